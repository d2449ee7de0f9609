//! Messages and addresses for the unit tests of both families.

use std::net::Ipv6Addr;

use super::v4::message::{Dhcp4Message, Dhcp4MessageKind};
use super::v6::message::{AssociationAddress, Dhcp6Status};
use crate::netlink::MacAddress;

pub(super) const MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 7]);

pub(super) fn ack(extra: &[(u8, &[u8])]) -> Dhcp4Message {
    let mut message = Dhcp4Message::new(Dhcp4MessageKind::Ack, 1, MAC);
    message.yiaddr = [10, 1, 2, 9].into();
    let base: [(u8, &[u8]); 3] =
        [(1, &[255, 255, 255, 0]), (54, &[10, 1, 2, 1]), (51, &[0, 0, 3, 232])];
    for (code, value) in base.iter().chain(extra) {
        message.options.insert(*code, value.to_vec());
    }
    message
}

pub(super) const FIVE: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 5);

pub(super) fn addr(addr: Ipv6Addr, preferred: u32, valid: u32) -> AssociationAddress {
    AssociationAddress { addr, preferred, valid, status: Dhcp6Status::default() }
}
