//! Messages and addresses for the unit tests of both families.

use std::net::Ipv6Addr;

use super::v4::message::{Kind, Message};
use super::v6::message::{IaAddr, Status};
use crate::netlink::Mac;

pub(super) const MAC: Mac = Mac([2, 0, 0, 0, 0, 7]);

pub(super) fn ack(extra: &[(u8, &[u8])]) -> Message {
    let mut message = Message::new(Kind::Ack, 1, MAC);
    message.yiaddr = [10, 1, 2, 9].into();
    let base: [(u8, &[u8]); 3] =
        [(1, &[255, 255, 255, 0]), (54, &[10, 1, 2, 1]), (51, &[0, 0, 3, 232])];
    for (code, value) in base.iter().chain(extra) {
        message.options.insert(*code, value.to_vec());
    }
    message
}

pub(super) const FIVE: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 5);

pub(super) fn addr(addr: Ipv6Addr, preferred: u32, valid: u32) -> IaAddr {
    IaAddr { addr, preferred, valid, status: Status::default() }
}
