//! macvlan: lifecycle in every version, modes, masters, CHECK, refusals.

mod check;
mod features;
mod masters;
mod modes;

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::support::lifecycle::{Subject, golden, lifecycle};
use crate::support::net::{Net, dual_ipam, merged, settles, unplug, wire};
use crate::support::node::{Container, Node};
use crate::support::parallel::at_once;
use crate::support::traffic::Place;

const SUBJECT: Subject = Subject {
    plugin: "macvlan",
    keys: |node| {
        wire(node);
        let ipam = dual_ipam(node);
        json!({"master": "wire0", "mtu": 1400, "ipam": ipam})
    },
    golden: golden!("macvlan"),
    remove_remainder: unplug,
};

/// A network of version 1.1.0 with 10.1.2.0/24 on top of `wire0`, with `keys`.
fn simple<'n>(node: &'n Node, keys: &Value) -> Net<'n> {
    let ipam = node.host_local(&["10.1.2.0/24"]);
    Net::new(node, "macvlan", "1.1.0", &merged(&json!({"master": "wire0", "ipam": ipam}), keys))
}

/// The same network without IPAM.
fn layer2<'n>(node: &'n Node, keys: &Value) -> Net<'n> {
    simple(node, &json!({"ipam": null})).with(keys)
}

lifecycle! { SUBJECT;
    add_check_and_del_with_the_golden_result: add_check_del_del,
    traffic_flows_in_all_directions: traffic,
    del_without_a_namespace_releases_addresses: del_without_a_namespace,
    gc_keeps_valid_attachments_and_releases_stale_ones: gc,
    status_tells_of_an_exhausted_range: status,
}

/// Attaches and detaches fifty containers concurrently in a network of 10.1.2.0/24 on top of
/// `wire0`.
pub(crate) fn many_at_once(net: &dyn Fn(&Node) -> Net<'_>) {
    const COUNT: usize = 50;
    let node = Node::new();
    wire(&node);
    let net = net(&node);
    let before = node.snapshot();
    let containers: Vec<_> = (0..COUNT).map(|_| Container::new()).collect();
    let call = |verb: &str, i: usize| {
        let call = node.call(net.plugin, verb).conf(&net.conf);
        call.id(&format!("c{i}")).netns(&containers[i].path())
    };
    let results = at_once(COUNT, |i| call("ADD", i).result());
    let address = |i: usize| {
        let text = results[i]["ips"][0]["address"].as_str().unwrap();
        text.split('/').next().unwrap().to_owned()
    };
    assert_eq!((0..COUNT).map(address).collect::<BTreeSet<_>>().len(), COUNT);
    assert_eq!(net.leases().len(), COUNT);
    for i in [0, COUNT - 1] {
        assert!(containers[i].reaches(&address(COUNT / 2)) && containers[i].reaches("10.1.2.1"));
    }
    at_once(COUNT, |i| call("DEL", i).ok());
    for container in &containers {
        assert_eq!(container.ip("link").as_array().unwrap().len(), 1);
    }
    settles(&before, || node.snapshot());
}

#[test]
fn fifty_containers_share_a_master_concurrently() {
    many_at_once(&|node| simple(node, &json!({})));
}
