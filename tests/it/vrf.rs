//! vrf: membership, tables, state preserved when joining and leaving, overlapping addresses. All
//! tests need a kernel with VRFs.

mod domains;
mod reference;
mod steps;

use serde_json::{Value, json};

use crate::lane::{self, needs};
use crate::support::chained::Subject;
use crate::support::net::{self, settles};
use crate::support::node::{Call, Container, Node};
use crate::support::traffic::Place;

const SUBJECT: Subject = Subject {
    plugin: "vrf",
    versions: &["0.3.1", "0.4.0", "1.0.0", "1.1.0"],
    prepare: |_, container| remember(container),
    ..Subject::BEHIND_BRIDGE
};

/// The first VRF adds a permanent l3mdev rule to the namespace.
fn remember(container: &Container) {
    container.sh("ip link add first type vrf table 9999");
    container.sh("ip link del first");
}

/// A container with `eth0` and `net1` as bridge leaves them, without chained plugins.
struct Pod {
    node: Node,
    container: Container,
}

impl Pod {
    fn new() -> Pod {
        let (node, container) = (Node::new(), Container::new());
        remember(&container);
        container.sh("ip link set lo up");
        for name in ["eth0", "net1"] {
            container.sh(&format!("ip link add {name} type veth peer name far-{name}"));
            container.sh(&format!("ip link set far-{name} addrgenmode none up"));
            container.sh(&format!("ip link set {name} up"));
        }
        Pod { node, container }
    }

    fn call(&self, verb: &str, ifname: &str, keys: &Value) -> Call {
        let prev = json!({"interfaces": [{"name": ifname, "sandbox": self.container.path()}]});
        let conf = json!({"cniVersion": "1.1.0", "name": "n", "type": "vrf", "prevResult": prev});
        let call = self.node.call("vrf", verb).conf(&net::merged(&conf, keys));
        call.ifname(ifname).netns(&self.container.path())
    }

    fn add(&self, ifname: &str, vrf: &str) {
        self.call("ADD", ifname, &json!({"vrfName": vrf})).result();
    }

    fn del(&self, ifname: &str, vrf: &str) {
        self.call("DEL", ifname, &json!({"vrfName": vrf})).ok();
    }

    /// The table of a VRF, or `None` if the VRF does not exist.
    fn table(&self, vrf: &str) -> Option<u64> {
        let links = self.container.ip("-d link show type vrf");
        let mut links = links.as_array().unwrap().iter();
        let found = links.find(|link| link["ifname"] == vrf)?;
        found["linkinfo"]["info_data"]["table"].as_u64()
    }

    fn members(&self, vrf: &str) -> Vec<String> {
        let links = self.container.ip(&format!("link show master {vrf}"));
        let names = links.as_array().unwrap().iter();
        names.map(|link| link["ifname"].as_str().unwrap().to_owned()).collect()
    }

    fn routes(&self, family: &str, table: &str) -> Vec<String> {
        let line = format!("ip {family} route show table {table}");
        let text = self.container.sh(&format!("sh -c '{line} 2>/dev/null || true'"));
        let mut routes = net::routes(&text.replace(" linkdown", ""));
        routes.retain(|route| {
            !["local", "broadcast", "anycast"].iter().any(|t| route.starts_with(t))
        });
        routes
    }
}

#[test]
fn every_verb_works_in_every_version() {
    needs!(lane::VRF);
    SUBJECT.every_verb_in_every_version(&json!({"vrfname": "blue"}));
}

#[test]
#[ignore = "takes minutes in the VM lane: make test-long"]
fn every_verb_works_in_every_version_with_a_table() {
    needs!(lane::VRF);
    SUBJECT.every_verb_in_every_version(&json!({"vrfname": "blue", "table": 1001}));
}

#[test]
fn addresses_and_routes_survive_joining_and_leaving() {
    needs!(lane::VRF);
    let pod = Pod::new();
    let sh = |line: &str| drop(pod.container.sh(line));
    sh("ip addr add 10.0.0.2/24 dev eth0");
    sh("ip addr add abcd:1234:ffff::cdde/64 dev eth0 nodad");
    sh("ip addr add fd00::7/128 dev eth0 nodad noprefixroute");
    sh("ip addr add fd00:5::7/64 dev eth0 nodad valid_lft 9000 preferred_lft 5000");
    sh("ip route add 10.0.0.77 dev eth0 scope link");
    sh("ip route add 10.10.10.0/24 via 10.0.0.1 src 10.0.0.2");
    sh("ip route add 10.11.0.0/16 via 10.0.0.77 metric 100 mtu 1300");
    sh("ip route add 10.12.0.0/16 via 10.0.0.1 table 500");
    sh("ip route add 1111:dddd::/80 via abcd:1234:ffff::1 src abcd:1234:ffff::cdde");
    let before = pod.container.snapshot(&pod.node);
    pod.add("eth0", "blue");
    assert_eq!((pod.table("blue"), pod.members("blue")), (Some(1), vec!["eth0".to_owned()]));
    assert_eq!(
        pod.routes("-4", "1"),
        [
            "10.0.0.0/24 dev eth0 proto kernel scope link src 10.0.0.2",
            "10.0.0.77 dev eth0 scope link",
            "10.10.10.0/24 via 10.0.0.1 dev eth0 src 10.0.0.2",
            "10.11.0.0/16 via 10.0.0.77 dev eth0 metric 100 mtu 1300",
        ]
    );
    let v6 = pod.routes("-6", "1");
    for route in [
        "1111:dddd::/80 via abcd:1234:ffff::1 dev eth0 src abcd:1234:ffff::cdde metric 1024 pref medium",
        "abcd:1234:ffff::/64 dev eth0 proto kernel metric 256 pref medium",
    ] {
        assert!(v6.contains(&route.to_owned()), "{route}: {v6:?}");
    }
    assert_eq!(pod.routes("-4", "500"), ["10.12.0.0/16 via 10.0.0.1 dev eth0"]);
    assert!(pod.routes("-4", "main").is_empty());
    let addrs = pod.container.sh("ip -6 addr show dev eth0");
    for addr in ["abcd:1234:ffff::cdde/64 scope global nodad", "fd00::7/128", "noprefixroute"] {
        assert!(addrs.contains(addr), "{addr}: {addrs}");
    }
    assert!(addrs.contains("preferred_lft 4") || addrs.contains("preferred_lft 5000"), "{addrs}");
    pod.del("eth0", "blue");
    assert_eq!(pod.table("blue"), None);
    settles(&before, || pod.container.snapshot(&pod.node));
}

#[test]
fn refusals_change_nothing() {
    needs!(lane::VRF);
    let attached = SUBJECT.pod_with("1.1.0", &json!({"vrfname": "blue"}));
    let sh = |line: &str| drop(attached.container.sh(line));
    sh("ip link add br9 type bridge");
    sh("ip link add red type vrf table 77");
    sh("ip link set red up");
    sh("ip link add port type veth peer name far");
    sh("ip link set port master br9");
    let refused = |verb: &str, keys: Value, code: u64, msg: &str| {
        let prev = json!({"prevResult": attached.prev});
        let call = attached.call_with(verb, &net::merged(&prev, &keys));
        attached.is_refused(&call, (code, msg));
    };
    let nameless = "configuration is expected to have a valid vrf name";
    for verb in ["ADD", "CHECK"] {
        refused(verb, json!({"vrfname": ""}), 7, nameless);
    }
    refused("STATUS", json!({"vrfname": ""}), 50, nameless);
    refused("ADD", json!({"prevResult": null}), 999, "missing prevResult from earlier plugin");
    refused("CHECK", json!({"prevResult": null}), 999, "missing prevResult from earlier plugin");
    refused("ADD", json!({"vrfname": "br9"}), 999, "Netlink br9 is not a VRF");
    attached.call_with("DEL", &json!({"vrfname": "br9"})).ok();
    let other = "VRF red already exist with different routing table 77";
    refused("ADD", json!({"vrfname": "red", "table": 78}), 999, other);
    let call = attached.call("ADD").ifname("port");
    attached.is_refused(&call, (999, "interface port has already a master set: br9"));
    let call = attached.call("ADD").ifname("gone");
    attached.is_refused(&call, (999, "could not get link by name gone"));
    assert_eq!(attached.call_with("ADD", &json!({"table": "x"})).error().code, 6);
    // DEL must not release a member of a bridge.
    attached.call_with("DEL", &json!({"vrfname": "red"})).ifname("port").ok();
    assert!(attached.container.sh("ip link show port").contains("master br9"));
}

#[test]
fn check_reports_every_kind_of_damage() {
    needs!(lane::VRF);
    let attached = SUBJECT.pod_with("1.1.0", &json!({"vrfname": "blue", "table": 1001}));
    attached.check_finds("vrf: there is no VRF \"blue\"");
    let again = || {
        attached.call("DEL").ok();
        attached.call("ADD").result();
        attached.call("CHECK").ok();
    };
    attached.call("ADD").result();
    let sh = |line: &str| drop(attached.container.sh(line));
    sh("ip route del 192.168.0.0/16 table 1001");
    attached.check_finds(
        "Expected Route 192.168.0.0/16 via 10.1.2.9 table 1001 not found in routing table",
    );
    sh("ip route add 192.168.0.0/16 via 10.1.2.9 table 1001");
    again();
    sh("ip link set eth0 nomaster");
    attached.check_finds("failed to find eth0 associated to vrf blue");
    sh("ip link set eth0 master blue");
    sh("ip route add 192.168.0.0/16 via 10.1.2.9 table 1001");
    sh("ip route add fd99::/16 via 2001:db8:1::1 table 1001");
    again();
    sh("ip link set blue down");
    attached.check_finds("interface \"blue\" is down");
    sh("ip link set blue up");
    attached.call("CHECK").ok();
    sh("ip addr del 2001:db8:1::2/64 dev eth0");
    attached.check_finds("Failed to match addr 2001:db8:1::2/64 on interface eth0");
    let other = json!({"table": 1002, "prevResult": attached.prev});
    let msg = "VRF blue already exist with different routing table 1001";
    assert_eq!(attached.call_with("CHECK", &other).error().brief(), (999, msg));
}

#[test]
fn a_container_of_bridge_in_a_vrf_is_reachable() {
    needs!(lane::VRF);
    let attached = SUBJECT.pod_with("1.0.0", &json!({"vrfname": "blue"}));
    attached.call("ADD").result();
    for target in ["10.1.2.2", "2001:db8:1::2"] {
        assert!(attached.node.reaches(target), "{target}");
    }
    for target in ["10.1.2.1", "2001:db8:1::1"] {
        attached.container.sh(&format!("ping -n -q -c 1 -w 20 -I blue {target}"));
    }
    attached.call("DEL").ok();
    attached.assert_settles_as(&attached.before, "DEL");
}
