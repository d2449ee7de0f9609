//! macvlan: lifecycle in every version, modes, masters, CHECK, refusals.

mod check;
mod features;
mod masters;
mod modes;

use serde_json::{Value, json};

use crate::lifecycle::Subject;
use crate::net::{Net, merged, unplug, wire};
use crate::node::Node;

const SUBJECT: Subject = Subject {
    plugin: "macvlan",
    keys: |node| {
        wire(node);
        let mut ipam = node.host_local(&["10.1.2.0/24", "2001:db8:1::/64"]);
        ipam["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
        json!({"master": "wire0", "mtu": 1400, "ipam": ipam})
    },
    golden: |version| match version {
        "0.1.0" | "0.2.0" => include_str!("golden/macvlan/0.1.json"),
        "1.0.0" => include_str!("golden/macvlan/1.0.json"),
        "1.1.0" => include_str!("golden/macvlan/1.1.json"),
        _ => include_str!("golden/macvlan/0.3.json"),
    },
    remove_remainder: unplug,
};

/// A network of 1.1.0 of 10.1.2.0/24 on top of `wire0`, with `keys`.
fn simple<'n>(node: &'n Node, keys: &Value) -> Net<'n> {
    let ipam = node.host_local(&["10.1.2.0/24"]);
    Net::new(node, "macvlan", "1.1.0", &merged(&json!({"master": "wire0", "ipam": ipam}), keys))
}

/// The same without addresses.
fn layer2<'n>(node: &'n Node, keys: &Value) -> Net<'n> {
    simple(node, &json!({"ipam": null})).with(keys)
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
fn del_without_a_namespace_releases_addresses() {
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
