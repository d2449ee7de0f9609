//! The parsers of replies, for the fuzz targets in `fuzz/`: no input may cause a panic.

use std::hint::black_box;

use super::conntrack;
use super::nftables::read::{chain_info, elements, rule_info};
use super::nftables::{Table, Type, expression};
use super::request::Answers;
use super::traffic::{FilterInfo, QdiscInfo};
use super::{Addr, Link, Route, Rule, VlanPort, socket};

const KEYS: [Type; 4] = [Type::Ipv4Addr, Type::InetProto, Type::InetService, Type::IfName];

/// Reads `bytes` as a datagram, and as the body of a message of each kind.
pub fn answers(bytes: &[u8]) {
    let messages = socket::split(bytes);
    let mut bodies = vec![bytes.to_vec()];
    bodies.extend(messages.iter().map(|message| message.body.clone()));
    drop(black_box(Answers::collect(messages)));
    for body in &bodies {
        black_box((Link::parse(body), Addr::parse(body), Route::parse(body), Rule::parse(body)));
        black_box((VlanPort::parse(body), QdiscInfo::read(body), FilterInfo::read(body)));
        black_box((chain_info(body), rule_info(body), expression::rule(body)));
        black_box(conntrack::read(body));
    }
    let table = Table::inet("t");
    for set in [
        table.set("s", &KEYS),
        table.map("m", &KEYS, &KEYS[..1]),
        table.map("n", &KEYS[3..], &[Type::Mark]),
    ] {
        black_box(elements(set, &bodies));
    }
}
