//! ptp: lifecycle in every version, routes on both sides, CHECK, refusals.

mod check;
mod features;

use serde_json::{Value, json};

use crate::lifecycle::Subject;
use crate::net::{Net, merged};
use crate::node::Node;

const SUBJECT: Subject = Subject {
    plugin: "ptp",
    keys: |node| {
        let mut ipam = node.host_local(&["10.1.2.0/24", "2001:db8:1::/64"]);
        ipam["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
        json!({"mtu": 5000, "ipam": ipam})
    },
    golden: |version| match version {
        "0.1.0" | "0.2.0" => include_str!("golden/ptp/0.1.json"),
        "1.0.0" => include_str!("golden/ptp/1.0.json"),
        "1.1.0" => include_str!("golden/ptp/1.1.json"),
        _ => include_str!("golden/ptp/0.3.json"),
    },
    remove_remainder: |_| {},
};

/// A network of 1.1.0 of 10.1.2.0/24, with `keys`.
fn simple<'n>(node: &'n Node, keys: &Value) -> Net<'n> {
    let base = json!({"ipam": node.host_local(&["10.1.2.0/24"])});
    Net::new(node, "ptp", "1.1.0", &merged(&base, keys))
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
