//! flannel: lifecycle with a bridge delegate, records, delegates in process and in child processes.

mod delegates;
mod records;
mod reference;

use std::fs;

use serde_json::{Value, json};

use crate::support::lifecycle::{Subject, golden, lifecycle};
use crate::support::net::Net;
use crate::support::node::{Container, Node};

/// The flannel daemon's subnet file, with the subnets of the lifecycle suite.
pub(super) const ENV: &str = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.2.1/24\n\
    FLANNEL_IPV6_NETWORK=2001:db8::/32\nFLANNEL_IPV6_SUBNET=2001:db8:1::1/64\n\
    FLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";

const SUBJECT: Subject = Subject {
    plugin: "flannel",
    keys: |node| keys(node, ENV),
    golden: golden!("flannel"),
    remove_remainder: |node| {
        assert_eq!(kept(node), [""; 0], "a record is left");
        if node.ip("link show type bridge") != json!([]) {
            node.sh("ip link del br0");
        }
    },
};

/// Writes `env` as the daemon's subnet file; returns the keys of the network.
pub(super) fn keys(node: &Node, env: &str) -> Value {
    fs::write(node.path("subnet.env"), env).unwrap();
    json!({
        "subnetFile": node.path("subnet.env"), "dataDir": node.state("flannel"),
        "delegate": {"bridge": "br0", "isDefaultGateway": true},
        "ipam": {"dataDir": node.path("leases")},
    })
}

/// A network of version 1.1.0 with one IPv4 subnet.
pub(super) fn simple(node: &Node) -> Net<'_> {
    Net::new(node, "flannel", "1.1.0", &keys(node, ENV_V4))
}

pub(super) const ENV_V4: &str = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.2.1/24\n\
    FLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";

/// The files below flannel's data directory.
pub(super) fn kept(node: &Node) -> Vec<String> {
    let text = node.sh(&format!(
        "cd {} 2>/dev/null && find . -type f | sort || true",
        node.state("flannel").display()
    ));
    text.lines().map(str::to_owned).collect()
}

lifecycle! { SUBJECT;
    add_check_and_del_with_the_golden_result: add_check_del_del,
    traffic_flows_in_all_directions: traffic,
}

#[test]
fn del_without_a_namespace_releases_addresses() {
    let node = Node::new();
    let net = simple(&node);
    for path in ["gone", "empty", "dangling"] {
        let container = Container::new();
        let prev = net.add(&container);
        let dangling = container.path();
        let call = net.with(&json!({"prevResult": prev})).call("DEL", "c1");
        match path {
            "gone" => call.netns("/var/run/netns/no-such").ok(),
            "empty" => call.netns("").ok(),
            _ => {
                drop(container);
                call.netns(&dangling).ok();
            }
        }
        assert_eq!((net.leases(), kept(&node)), (vec![], vec![]), "{path}");
        crate::support::net::no_veth_remains(&node);
    }
}

#[test]
fn status_asks_the_daemon_and_the_delegate() {
    let node = Node::new();
    let net = simple(&node);
    let status = |net: &Net<'_>| net.call("STATUS", "").without("CNI_CONTAINERID");
    status(&net).ok();
    assert_eq!((kept(&node), net.leases()), (vec![], vec![]));
    let full = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.2.1/30\nFLANNEL_MTU=1450\n\
                FLANNEL_IPMASQ=true\n";
    fs::write(node.path("subnet.env"), full).unwrap();
    let container = Container::new();
    net.add(&container);
    let range = "no IP addresses available in range set: 10.1.2.1-10.1.2.2";
    assert_eq!(status(&net).error().brief(), (50, range));
    net.del(&container);
    status(&net).ok();
    fs::remove_file(node.path("subnet.env")).unwrap();
    let error = status(&net).error();
    let name = node.path("subnet.env").display().to_string();
    let msg = format!(
        "failed to load flannel 'subnet.env' file: open {name}: no such file or directory. \
         Check the flannel pod log for this node."
    );
    assert_eq!(error.brief(), (50, msg.as_str()));
    let bad = net.with(&json!({"delegate": {"type": "no-such-plugin"}}));
    fs::write(node.path("subnet.env"), ENV_V4).unwrap();
    assert_eq!(status(&bad).error().code, 50);
}

#[test]
fn refusals_change_nothing() {
    let node = Node::new();
    let net = simple(&node);
    let container = Container::new();
    let refused = |keys: &Value, code: u64, msg: &str| {
        net.with(keys).add_is_refused(&container, code, msg);
        assert_eq!((kept(&node), net.leases()), (vec![], vec![]));
    };
    let dictionary = "'delegate' dictionary";
    let msg = format!("{dictionary}, if present, must have (string) 'type' field");
    refused(&json!({"delegate": {"type": 7}}), 7, &msg);
    let msg = format!("{dictionary} must not have 'name' field, it'll be set by flannel");
    refused(&json!({"delegate": {"name": "x"}}), 7, &msg);
    let msg = format!("{dictionary} must not have 'ipam' field, it'll be set by flannel");
    refused(&json!({"delegate": {"ipam": {}}}), 7, &msg);
    let itself = json!({"delegate": {"type": "flannel"}});
    refused(&itself, 7, "flannel cannot delegate to flannel");
    let nowhere = "failed to delegate add: failed to find plugin \"no-such\" in path";
    let msg = format!("{nowhere} [{}]", node.bin().display());
    refused(&json!({"delegate": {"type": "no-such"}}), 999, &msg);
    fs::write(node.path("subnet.env"), "FLANNEL_MTU=1450\nFLANNEL_IPMASQ=false\n").unwrap();
    let missing = "FLANNEL_NETWORK, FLANNEL_IPV6_NETWORK, FLANNEL_SUBNET, FLANNEL_IPV6_SUBNET";
    let msg = format!(
        "failed to load flannel 'subnet.env' file: {} is missing {missing}. Check the flannel pod \
         log for this node.",
        node.path("subnet.env").display()
    );
    refused(&json!({}), 11, &msg);
}

#[test]
fn a_host_port_reaches_a_container_of_flannel() {
    let node = Node::new();
    let conf = |plugin: &str, keys: &Value, prev: &Value| {
        let common = json!({"cniVersion": "1.0.0", "name": "cbr0", "type": plugin});
        let own = crate::support::net::merged(&common, keys);
        crate::support::net::merged(&own, &json!({"prevResult": prev}))
    };
    let flannel = crate::support::net::merged(
        &keys(&node, ENV_V4),
        &json!({"delegate": {"hairpinMode": true, "isDefaultGateway": true}}),
    );
    let ports = json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]);
    let portmap = json!({"backend": "nftables", "runtimeConfig": {"portMappings": ports}});
    let (client, pod) = (Container::new(), Container::new());
    node.sh(&format!("ip link add out0 type veth peer name eth0 netns {}", client.path()));
    node.sh("ip addr add 192.0.2.1/24 dev out0; ip link set out0 up");
    client.sh("ip addr add 192.0.2.2/24 dev eth0");
    client.sh("ip link set eth0 up");
    let call = |plugin: &str, verb: &str, keys: &Value, prev: &Value| {
        let call = node.call(plugin, verb).conf(&conf(plugin, keys, prev));
        call.netns(&pod.path()).id("pod")
    };
    let prev = call("flannel", "ADD", &flannel, &Value::Null).result();
    let last = call("portmap", "ADD", &portmap, &prev).result();
    assert_eq!(last["ips"][0]["address"], "10.1.2.2/24");
    crate::support::traffic::tcp_through(&client, &pod, "192.0.2.1:8080", 80);
    call("flannel", "CHECK", &flannel, &last).ok();
    call("portmap", "CHECK", &portmap, &last).ok();
    call("portmap", "DEL", &portmap, &last).ok();
    call("flannel", "DEL", &flannel, &last).ok();
    assert_eq!((kept(&node), node.leases("cbr0")), (vec![], vec![]));
    assert!(!pod.try_sh("ip link show eth0"));
}
