//! ptp: lifecycle in every version, routes on both sides, CHECK, refusals.

mod check;
mod features;

use serde_json::{Value, json};

use crate::support::lifecycle::{Subject, golden, lifecycle};
use crate::support::net::{Net, dual_ipam, merged};
use crate::support::node::Node;

const SUBJECT: Subject = Subject {
    plugin: "ptp",
    keys: |node| {
        let ipam = dual_ipam(node);
        json!({"mtu": 5000, "ipam": ipam})
    },
    golden: golden!("ptp"),
    remove_remainder: |_| {},
};

/// A network of version 1.1.0 with 10.1.2.0/24 and `keys`.
fn simple<'n>(node: &'n Node, keys: &Value) -> Net<'n> {
    let base = json!({"ipam": node.host_local(&["10.1.2.0/24"])});
    Net::new(node, "ptp", "1.1.0", &merged(&base, keys))
}

lifecycle! { SUBJECT;
    add_check_and_del_with_the_golden_result: add_check_del_del,
    traffic_flows_in_all_directions: traffic,
    del_without_a_namespace_uses_prev_result: del_without_a_namespace,
    gc_keeps_valid_attachments_and_releases_stale_ones: gc,
    status_tells_of_an_exhausted_range: status,
}
