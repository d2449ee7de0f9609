//! sbr: rules and tables, routes that stay in the main table, CHECK, refusals.

mod damage;
mod races;
mod reference;
mod tables;
mod traffic;

use serde_json::{Value, json};

use crate::support::chained::Subject;
use crate::support::net;
use crate::support::node::{Container, Node};

const SUBJECT: Subject = Subject { plugin: "sbr", ..Subject::BEHIND_BRIDGE };

/// A container with `eth0` (10.0.0.2/24, default route) and `net1` (192.168.1.209/24,
/// `fd00:1::9/64`, routes via a neighbour), as in the reference's tests, and the result for `net1`.
pub(super) struct Pod {
    pub(super) node: Node,
    pub(super) container: Container,
    pub(super) prev: Value,
}

impl Pod {
    pub(super) fn new() -> Pod {
        let (node, container) = (Node::new(), Container::new());
        container.sh("ip link set lo up");
        for (name, addr) in [("eth0", "10.0.0.2/24"), ("net1", "192.168.1.209/24")] {
            container.sh(&format!("ip link add {name} type veth peer name far-{name}"));
            container.sh(&format!("ip link set far-{name} addrgenmode none up"));
            container.sh(&format!("ip link set {name} up"));
            container.sh(&format!("ip addr add {addr} dev {name}"));
        }
        container.sh("ip addr add fd00:1::9/64 dev net1 nodad");
        container.sh("ip route add 10.2.0.0/24 via 10.0.0.5");
        container.sh("ip route add default via 10.0.0.1");
        container.sh("ip route add 192.168.2.0/24 via 192.168.1.2");
        container.sh("ip route add fd00:2::/64 via fd00:1::2");
        let prev = json!({
            "interfaces": [{"name": "net1", "sandbox": container.path()}],
            "ips": [{"address": "192.168.1.209/24", "gateway": "192.168.1.1", "interface": 0}],
        });
        Pod { node, container, prev }
    }

    /// The same with an IPv6 address in the result.
    pub(super) fn dual() -> Pod {
        let mut pod = Pod::new();
        let v6 = json!({"address": "fd00:1::9/64", "gateway": "fd00:1::1", "interface": 0});
        pod.prev["ips"].as_array_mut().unwrap().push(v6);
        pod
    }

    pub(super) fn conf(&self, keys: &Value) -> Value {
        let conf = json!({"cniVersion": "1.1.0", "name": "n", "type": "sbr"});
        net::merged(&net::merged(&conf, &json!({"prevResult": self.prev})), keys)
    }

    pub(super) fn call(&self, verb: &str, keys: &Value) -> crate::support::node::Call {
        let call = self.node.call("sbr", verb).conf(&self.conf(keys));
        call.ifname("net1").netns(&self.container.path())
    }

    pub(super) fn add(&self, keys: &Value) {
        self.call("ADD", keys).result();
    }

    /// The rules of one family as `from .. lookup ..`, without the kernel's default rules.
    pub(super) fn rules(&self, family: &str) -> Vec<String> {
        let text = self.container.sh(&format!("ip {family} rule"));
        let rules = text.lines().filter_map(|line| line.split_once(":\t"));
        let rules = rules.filter(|(_, rule)| !rule.starts_with("from all"));
        rules.map(|(_, rule)| rule.trim().to_owned()).collect()
    }

    /// The routes of one family in a table, sorted.
    pub(super) fn routes(&self, family: &str, table: &str) -> Vec<String> {
        let line = format!("ip {family} route show table {table}");
        // The kernel reports an error for a table that was never used.
        let text = self.container.sh(&format!("sh -c '{line} 2>/dev/null || true'"));
        net::routes(&text.replace(" linkdown", ""))
    }
}

#[test]
fn every_verb_works_in_every_version() {
    SUBJECT.every_verb_in_every_version(&json!({}));
}

#[test]
fn every_verb_works_in_every_version_with_a_table() {
    SUBJECT.every_verb_in_every_version(&json!({"table": 5000}));
}

#[test]
fn every_verb_works_in_every_version_with_hints() {
    SUBJECT.every_verb_in_every_version(&json!({"addSourceHints": true}));
}

#[test]
fn del_restores_the_default_route_of_the_result() {
    let attached = SUBJECT.pod_with("1.0.0", &json!({}));
    attached.container.sh("ip route add default via 10.1.2.1");
    let before = attached.container.snapshot(&attached.node);
    let mut prev = attached.prev.clone();
    attached.call("ADD").result();
    attached.bare("DEL").ok();
    let main = attached.container.sh("ip route");
    assert!(!main.contains("default"), "ADD itself may have made it: {main}");
    attached.container.sh("ip route add default via 10.1.2.1");
    attached.call("ADD").result();
    prev["routes"].as_array_mut().unwrap().push(json!({"dst": "0.0.0.0/0"}));
    attached.call_with("DEL", &json!({"prevResult": prev})).ok();
    crate::support::node::assert_unchanged(&before, &attached.container.snapshot(&attached.node));
}

#[test]
fn refusals_change_nothing() {
    let attached = SUBJECT.pod_with("1.1.0", &json!({}));
    let refused = |keys: Value, code: u64, msg: &str| {
        let prev = json!({"prevResult": attached.prev});
        let call = attached.call_with("ADD", &net::merged(&prev, &keys));
        attached.is_refused(&call, (code, msg));
    };
    refused(json!({"prevResult": null}), 999, "This plugin must be called as chained plugin");
    let no_ips = json!({"prevResult": {"interfaces": attached.prev["interfaces"]}});
    refused(no_ips, 999, "No IP addresses supplied on interface: eth0");
    refused(json!({"table": 0}), 7, "invalid table 0");
    refused(json!({"table": -3}), 7, "invalid table -3");
    let two = "gateways list contains multiple IPv4 addresses: 10.1.2.1 and 10.1.2.7";
    refused(json!({"gateways": ["10.1.2.1", "10.1.2.7"]}), 7, two);
    refused(json!({"gateways": ["x"]}), 7, "invalid static gateway IP address: x");
    let many = "gateways list cannot contain more than 2 entries (one IPv4, one IPv6)";
    refused(json!({"gateways": ["10.1.2.1", "fd00::1", "fd00::2"]}), 7, many);
    let gone = attached.call("ADD").ifname("eth7");
    attached.is_refused(&gone, (999, "Cannot find network interface eth7"));
    let status = |keys: Value| attached.call_with("STATUS", &keys).error().brief().0;
    assert_eq!(status(json!({"table": 0})), 50);
    assert_eq!(status(json!({"gateways": ["x"]})), 50);
    // A value of the wrong type is a decoding error.
    assert_eq!(attached.call_with("ADD", &json!({"table": "x"})).error().code, 6);
}

#[test]
fn an_invalid_namespace_leaves_no_lock_file() {
    let pod = Pod::new();
    let path = pod.node.path("gone").display().to_string();
    pod.call("DEL", &json!({})).netns(&path).ok();
    assert!(!crate::support::node::exists(&path));
    let error = pod.call("ADD", &json!({})).netns(&path).error();
    assert_eq!(error.code, 8);
    assert!(!crate::support::node::exists(&path));
}

/// Regression test: the lock of each container's namespace once stayed on the host for ever.
#[test]
fn lock_files_are_removed() {
    let pod = Pod::new();
    let locks = || pod.node.sh("find /run/cni/cnibox -name 'netns-*' 2>/dev/null || true");
    for _ in 0..20 {
        let container = Pod::new();
        let conf = container.conf(&json!({}));
        let call =
            |verb| pod.node.call("sbr", verb).netns(&container.container.path()).ifname("net1");
        call("ADD").conf(&conf).result();
        assert_eq!(locks(), "");
        call("DEL").conf(&conf).ok();
    }
    assert_eq!(locks(), "");
    // A killed process left it.
    pod.node.sh("touch /run/cni/cnibox/netns-4-4026530000.lock");
    pod.call("GC", &json!({"cni.dev/valid-attachments": [], "prevResult": null})).run();
    assert_eq!(locks(), "");
}
