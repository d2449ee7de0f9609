//! One container through a chain of seven plugins: ADD and DEL.

use serde_json::{Value, json};

use crate::chain;
use crate::support::net::{merged, settles};
use crate::support::node::{Call, Container, Node};
use crate::support::traffic::{Place, tcp_through};

/// The plugins in the order of ADD.
const PLUGINS: [&str; 7] =
    ["loopback", "bridge", "portmap", "bandwidth", "firewall", "tuning", "sbr"];

fn keys(node: &Node, plugin: &str) -> Value {
    let ports = json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]);
    match plugin {
        "bridge" => json!({"bridge": "cni0", "isDefaultGateway": true, "ipMasq": true,
            "ipMasqBackend": "nftables", "ipam": node.host_local(&["10.1.0.0/24", "fd00:1::/64"])}),
        "portmap" => json!({"backend": "nftables", "runtimeConfig": {"portMappings": ports}}),
        "bandwidth" => json!({"ingressRate": 80_000_000, "ingressBurst": 800_000,
            "egressRate": 80_000_000, "egressBurst": 800_000}),
        "firewall" => json!({"backend": "nftables"}),
        "tuning" => json!({"dataDir": node.state("tuning"), "mtu": 1400,
            "sysctl": {"net.core.somaxconn": "500"}}),
        _ => json!({}),
    }
}

fn call(node: &Node, pod: &Container, verb: &str, (plugin, prev): (&str, &Value)) -> Call {
    let common = json!({"cniVersion": "1.0.0", "name": "n", "type": plugin});
    let mut conf = merged(&common, &keys(node, plugin));
    if !prev.is_null() {
        conf["prevResult"] = prev.clone();
    }
    node.call(plugin, verb).conf(&conf).netns(&pod.path())
}

#[test]
fn a_chain_of_seven_plugins_is_added_and_deleted() {
    let node = Node::new();
    let client = chain::peer(&node);
    let (pod, scratch) = (Container::new(), Container::new());
    // Creates the state that remains permanently: the bridge, empty tables, directories.
    let add = |pod: &Container| {
        PLUGINS
            .iter()
            .fold(Value::Null, |prev, plugin| call(&node, pod, "ADD", (plugin, &prev)).result())
    };
    let del = |pod: &Container, last: &Value| {
        for plugin in PLUGINS.iter().rev() {
            call(&node, pod, "DEL", (plugin, last)).ok();
        }
    };
    del(&scratch, &add(&scratch));
    // The kernel assigns `lo` its address when it first comes up.
    pod.sh("ip link set lo up");
    pod.sh("ip link set lo down");
    let before = (node.snapshot(), pod.snapshot(&node));

    let last = add(&pod);
    for plugin in PLUGINS {
        call(&node, &pod, "CHECK", (plugin, &last)).ok();
    }
    assert!(pod.sh("ip link show eth0").contains("mtu 1400"), "tuning");
    assert_eq!(pod.sysctl("net/core/somaxconn"), "500", "tuning");
    assert!(pod.sh("ip rule").contains("lookup 100"), "sbr");
    assert!(node.sh("tc qdisc").contains("tbf"), "bandwidth");
    tcp_through(&client, &pod, "192.0.2.1:8080", 80);
    assert!(pod.reaches("127.0.0.1"), "loopback");
    // sbr has emptied the main table, so a packet without a source address has no route.
    let ips = last["ips"].as_array().unwrap();
    let source = |i: usize| ips[i]["address"].as_str().unwrap().split('/').next().unwrap();
    for (i, target) in [(0, "10.1.0.1"), (0, "192.0.2.2"), (1, "fd00:1::1")] {
        pod.sh(&format!("ping -n -q -c 1 -w 20 -I {} {target}", source(i)));
    }

    del(&pod, &last);
    settles(&before.0, || node.snapshot());
    settles(&before.1, || pod.snapshot(&node));
    del(&pod, &last);
    del(&pod, &Value::Null);
    settles(&before.0, || node.snapshot());
}
