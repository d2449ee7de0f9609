//! The parsers of replies, for the fuzz targets in `fuzz/`: no input may cause a panic.

use std::hint::black_box;

use super::conntrack;
use super::nftables::read::{parse_chain, parse_elements, parse_rule};
use super::nftables::{NftTable, ValueType, expression};
use super::request::NetlinkReply;
use super::traffic::{QdiscInfo, TrafficFilterInfo};
use super::{BridgePortVlans, KernelRoute, Link, LinkAddress, PolicyRule, socket};

const KEYS: [ValueType; 4] =
    [ValueType::Ipv4Addr, ValueType::InetProto, ValueType::InetService, ValueType::IfName];

/// Reads `bytes` as a datagram, and as the body of a message of each kind.
pub fn parse_replies(bytes: &[u8]) {
    let messages = socket::split_messages(bytes);
    let mut bodies = vec![bytes.to_vec()];
    bodies.extend(messages.iter().map(|message| message.body.clone()));
    drop(black_box(NetlinkReply::from_messages(messages)));
    for body in &bodies {
        black_box((
            Link::parse(body),
            LinkAddress::parse(body),
            KernelRoute::parse(body),
            PolicyRule::parse(body),
        ));
        black_box((
            BridgePortVlans::parse(body),
            QdiscInfo::parse_body(body),
            TrafficFilterInfo::parse_body(body),
        ));
        black_box((
            parse_chain(body),
            parse_rule(body.clone()).map(|rule| (rule.expressions(), rule.values())),
            expression::parse_foreign_rule(body),
        ));
        black_box(conntrack::parse_flow(body));
    }
    let table = NftTable::new_inet("t");
    for set in [
        table.named_set("s", &KEYS),
        table.value_map("m", &KEYS, &KEYS[..1]),
        table.value_map("n", &KEYS[3..], &[ValueType::Mark]),
    ] {
        black_box(parse_elements(set, &bodies));
    }
}
