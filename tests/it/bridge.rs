//! bridge: lifecycle in every version, features, CHECK, refusals.

mod check;
mod gateway;
mod ipam;
mod link;
mod refusals;
mod routes;
mod vlan;

use serde_json::{Value, json};

use crate::support::lifecycle::{Subject, golden, lifecycle};
use crate::support::net::{Net, merged};
use crate::support::node::Node;

const SUBJECT: Subject = Subject {
    plugin: "bridge",
    keys: |node| merged(&dual(node), &json!({"isDefaultGateway": true})),
    golden: golden!("bridge"),
    remove_remainder: |node| {
        if node.ip("link show type bridge") != json!([]) {
            node.sh("ip link del br0");
        }
    },
};

/// Keys of a dual-stack network on `br0`.
fn dual(node: &Node) -> Value {
    json!({"bridge": "br0", "ipam": node.host_local(&["10.1.2.0/24", "2001:db8:1::/64"])})
}

/// A network of version 1.1.0 with 10.1.2.0/24 on `br0` and more `keys`.
fn simple<'n>(node: &'n Node, keys: &Value) -> Net<'n> {
    let base = json!({"bridge": "br0", "ipam": node.host_local(&["10.1.2.0/24"])});
    Net::new(node, "bridge", "1.1.0", &merged(&base, keys))
}

/// A layer 2 network on `br0`.
fn layer2<'n>(node: &'n Node, version: &'static str, keys: &Value) -> Net<'n> {
    Net::new(node, "bridge", version, &merged(&json!({"bridge": "br0"}), keys))
}

lifecycle! { SUBJECT;
    add_check_and_del_with_the_golden_result: add_check_del_del,
    traffic_flows_in_all_directions: traffic,
    del_without_a_namespace_uses_prev_result: del_without_a_namespace,
    gc_keeps_valid_attachments_and_releases_stale_ones: gc,
    status_tells_of_an_exhausted_range: status,
}
