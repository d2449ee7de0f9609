//! bridge: lifecycle in every version, features, CHECK, refusals.

mod check;
mod gateway;
mod ipam;
mod link;
mod refusals;
mod routes;
mod vlan;

use serde_json::{Value, json};

use crate::lifecycle::Subject;
use crate::net::{Net, merged};
use crate::node::Node;

const SUBJECT: Subject = Subject {
    plugin: "bridge",
    keys: |node| merged(&dual(node), &json!({"isDefaultGateway": true})),
    golden: |version| match version {
        "0.1.0" | "0.2.0" => include_str!("golden/bridge/0.1.json"),
        "1.0.0" => include_str!("golden/bridge/1.0.json"),
        "1.1.0" => include_str!("golden/bridge/1.1.json"),
        _ => include_str!("golden/bridge/0.3.json"),
    },
    remove_remainder: |node| {
        if node.ip("link show type bridge") != json!([]) {
            node.sh("ip link del br0");
        }
    },
};

/// A dual-stack network on `br0`.
fn dual(node: &Node) -> Value {
    json!({"bridge": "br0", "ipam": node.host_local(&["10.1.2.0/24", "2001:db8:1::/64"])})
}

/// A network of 1.1.0 of 10.1.2.0/24 on `br0`, with `keys`.
fn simple<'n>(node: &'n Node, keys: &Value) -> Net<'n> {
    let base = json!({"bridge": "br0", "ipam": node.host_local(&["10.1.2.0/24"])});
    Net::new(node, "bridge", "1.1.0", &merged(&base, keys))
}

/// A layer 2 network on `br0`.
fn layer2<'n>(node: &'n Node, version: &'static str, keys: &Value) -> Net<'n> {
    Net::new(node, "bridge", version, &merged(&json!({"bridge": "br0"}), keys))
}

#[test]
fn add_prints_the_golden_result_check_agrees_and_del_is_idempotent() {
    SUBJECT.add_check_del_del();
}

#[test]
fn traffic_flows_in_all_directions() {
    SUBJECT.traffic();
}

#[test]
fn del_without_a_namespace_releases_addresses_and_finds_the_pair_by_prev_result() {
    SUBJECT.del_without_a_namespace();
}

#[test]
fn del_of_nothing_succeeds_and_touches_no_other_attachment() {
    SUBJECT.del_of_nothing();
}

#[test]
fn gc_keeps_valid_attachments_and_releases_stale_ones() {
    SUBJECT.gc();
}

#[test]
fn status_tells_of_an_exhausted_range() {
    SUBJECT.status();
}
