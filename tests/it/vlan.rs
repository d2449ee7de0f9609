//! vlan: lifecycle in every version, tagged frames, masters, CHECK, refusals.

mod check;
mod masters;

use serde_json::{Value, json};

use crate::lane::{self, needs};
use crate::support::lifecycle::{Subject, golden, lifecycle};
use crate::support::net::{FIRST, GATEWAYS, Net, dual_ipam, merged, settles, unplug, wire};
use crate::support::node::{Container, MILESTONES, Node, eventually};
use crate::support::parallel::at_once;
use crate::support::traffic::{Place, tcp, udp};

const SUBJECT: Subject = Subject {
    plugin: "vlan",
    keys: |node| {
        tagged_wire(node, &[100]);
        let ipam = dual_ipam(node);
        json!({"master": "wire0", "vlanId": 100, "mtu": 1400, "ipam": ipam})
    },
    // One interface, in the container.
    golden: golden!("macvlan"),
    remove_remainder: unplug,
};

/// A [`wire`] with VLANs on its far end: `far<id>` for each, the first one with the gateways.
fn tagged_wire(node: &Node, ids: &[u16]) {
    wire(node);
    node.sh("ip addr flush dev wire1 scope global");
    for id in ids {
        node.sh(&format!("ip link add link wire1 name far{id} type vlan id {id}"));
        node.sh(&format!("ip link set far{id} up"));
    }
    let [v4, v6] = GATEWAYS;
    let far = format!("far{}", ids[0]);
    node.sh(&format!("ip addr add {v4}/24 dev {far} && ip addr add {v6}/64 dev {far} nodad"));
}

/// A network of version 1.1.0 with 10.1.2.0/24 in VLAN 100 of `wire0`, with `keys`.
fn simple<'n>(node: &'n Node, keys: &Value) -> Net<'n> {
    let ipam = node.host_local(&["10.1.2.0/24"]);
    let base = json!({"master": "wire0", "vlanId": 100, "ipam": ipam});
    Net::new(node, "vlan", "1.1.0", &merged(&base, keys))
}

/// A container with duplicate address detection disabled.
fn quick() -> Container {
    let container = Container::new();
    container.sh("sh -c 'echo 0 > /proc/sys/net/ipv6/conf/default/dad_transmits'");
    container
}

lifecycle! { SUBJECT, needs lane::VLAN;
    add_check_and_del_with_the_golden_result: add_check_del_del,
    status_tells_of_an_exhausted_range: status,
}

#[test]
fn frames_are_tagged_and_traffic_flows() {
    needs!(lane::VLAN);
    for version in ["0.3.1", "1.1.0"] {
        let (node, container) = (Node::new(), quick());
        let net = Net::new(&node, "vlan", version, &(SUBJECT.keys)(&node));
        // Counts arriving frames at the far end before the kernel removes the tags.
        node.sh("nft add table netdev t");
        let hook = "'{ type filter hook ingress device wire1 priority 0; }'";
        node.sh(&format!("nft add chain netdev t c {hook}"));
        node.sh("nft add rule netdev t c vlan id 100 counter accept comment tagged");
        node.sh("nft add rule netdev t c vlan id != 100 counter comment other");
        node.sh("nft 'add rule netdev t c ip saddr 10.1.2.2 counter comment untagged'");
        net.add(&container);
        for (own, gateway) in FIRST.into_iter().zip(GATEWAYS) {
            assert!(container.reaches(gateway) && node.reaches(own), "{gateway}");
            tcp(&container, &node, gateway);
            assert_eq!(udp(&container, &node, gateway).to_string(), own);
        }
        let rules = node.sh("nft list table netdev t");
        let packets = |comment: &str| -> u64 {
            let line = rules.lines().find(|line| line.contains(comment)).unwrap();
            line.split("packets ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap()
        };
        assert!(packets("\"tagged\"") > 10, "{rules}");
        assert_eq!((packets("\"other\""), packets("\"untagged\"")), (0, 0), "{rules}");
        net.del(&container);
    }
}

#[test]
fn vlans_of_a_master_are_isolated() {
    needs!(lane::VLAN);
    let node = Node::new();
    tagged_wire(&node, &[100, 200]);
    let (one, two) = (quick(), quick());
    let net = simple(&node, &json!({}));
    net.add(&one);
    net.with(&json!({"vlanId": 200})).call("ADD", "c2").netns(&two.path()).result();
    assert!(one.reaches(GATEWAYS[0]), "the gateway is in VLAN 100");
    assert!(!two.pings(GATEWAYS[0]) && !two.pings(FIRST[0]) && !one.pings("10.1.2.3"));
    node.sh("ip addr flush dev far100; ip addr add 10.1.2.1/24 dev far200");
    assert!(two.reaches(GATEWAYS[0]), "now it is in VLAN 200");
    assert!(!one.pings(GATEWAYS[0]));
}

#[test]
fn del_without_a_namespace_releases_addresses() {
    needs!(lane::VLAN);
    for version in MILESTONES {
        let (node, container) = (Node::new(), quick());
        let net = Net::new(&node, "vlan", version, &(SUBJECT.keys)(&node));
        net.add(&container);
        let path = container.path();
        drop(container);
        net.call("DEL", "c1").netns(&path).ok();
        assert_eq!(net.leases(), [""; 0]);
        // The kernel deletes the VLAN asynchronously with the namespace.
        let container = quick();
        eventually("the VLAN is still taken", || net.on("ADD", &container).run().status == Some(0));
        net.call("DEL", "c1").netns("").ok();
        assert_eq!(net.leases(), [""; 0]);
        assert!(container.try_sh("ip link show eth0"), "nothing tells where it is");
        net.call("DEL", "c1").ok();
        net.del(&container);
        assert!(!container.try_sh("ip link show eth0"));
    }
}

#[test]
fn gc_keeps_a_valid_attachment_and_releases_a_stale_one() {
    needs!(lane::VLAN);
    let (node, container) = (Node::new(), quick());
    tagged_wire(&node, &[100]);
    let net = simple(&node, &json!({}));
    net.add(&container);
    let gc = |keys: Value| net.with(&keys).call("GC", "").without("CNI_CONTAINERID");
    assert_eq!(gc(json!({})).run().status, Some(0));
    gc(json!({"cni.dev/valid-attachments": [{"containerID": "c1", "ifname": "eth0"}]})).ok();
    assert_eq!(net.leases(), ["10.1.2.2"]);
    gc(json!({"cni.dev/valid-attachments": [{"containerID": "c1", "ifname": "eth1"}]})).ok();
    assert_eq!(net.leases(), [""; 0]);
    net.del(&container);
}

#[test]
fn bad_configurations_change_nothing() {
    needs!(lane::VLAN);
    let (node, container) = (Node::new(), quick());
    tagged_wire(&node, &[100]);
    let master =
        "\"master\" field is required. It specifies the host interface name to create the VLAN for";
    let range = |id: i64| format!("invalid VLAN ID {id} (must be between 0 and 4094 inclusive)");
    let mtu = |mtu: i64| format!("invalid MTU {mtu}, must be [0, master MTU(1500)]");
    for (keys, code, msg) in [
        (json!({"master": null}), 7, master.to_owned()),
        (json!({"vlanId": null}), 7, "\"vlanId\" field is required".to_owned()),
        (json!({"vlanId": -1}), 7, range(-1)),
        (json!({"vlanId": 4095}), 7, range(4095)),
        (json!({"mtu": 1600}), 7, mtu(1600)),
        (json!({"mtu": -100}), 7, mtu(-100)),
        (json!({"ipam": null}), 999, "no plugin name provided".to_owned()),
        (
            json!({"master": "gone"}),
            999,
            "failed to lookup master \"gone\": Link not found".to_owned(),
        ),
    ] {
        let net = simple(&node, &keys);
        net.add_is_refused(&container, code, &msg);
        let status = net.call("STATUS", "").error();
        assert_eq!(status.msg, msg);
        assert!(status.code == 50 || code == 999, "{status:?}");
    }
}

#[test]
fn a_vlan_in_use_is_refused_before_ipam() {
    needs!(lane::VLAN);
    let (node, one, two) = (Node::new(), quick(), quick());
    tagged_wire(&node, &[100]);
    let net = simple(&node, &json!({}));
    let result = net.add(&one);
    let taken = "failed to create vlan: add link \"eth0\" (vlan): \
                 8021q: VLAN device already exists: file exists";
    let again = net.call("ADD", "c2").netns(&two.path());
    net.is_refused(&again, &two, (999, taken));
    assert!(again.error().details.contains("another container"));
    let there = "failed to create vlan: container already has an interface \"eth0\": file exists";
    net.add_is_refused(&one, 999, there);
    assert_eq!(net.leases(), ["10.1.2.2"]);
    net.check(&one, &result).ok();
    net.del(&one);
    again.result();
}

#[test]
fn add_rolls_back_if_ipam_or_a_route_fails() {
    needs!(lane::VLAN);
    let (node, container) = (Node::new(), quick());
    tagged_wire(&node, &[100]);
    let mut ipam = node.host_local(&["10.1.2.0/24"]);
    ipam["routes"] = json!([{"dst": "10.9.0.0/16", "gw": "172.16.0.1"}]);
    node.script("broken", "cat >/dev/null; echo '{\"code\": 11, \"msg\": \"no\"}'; exit 1");
    node.script("empty", "cat >/dev/null; echo '{\"cniVersion\": \"1.1.0\"}'");
    for (ipam, code, start) in [
        (ipam, 999, "failed to add route '10.9.0.0/16 via 172.16.0.1"),
        (json!({"type": "broken"}), 11, "no"),
        (json!({"type": "empty"}), 999, "IPAM plugin returned missing IP config"),
    ] {
        let before = (node.snapshot(), container.snapshot(&node));
        let error = simple(&node, &json!({"ipam": ipam})).on("ADD", &container).error();
        assert!(error.code == code && error.msg.starts_with(start), "{error:?}");
        settles(&before.0, || node.snapshot());
        settles(&before.1, || container.snapshot(&node));
    }
    // The VLAN ID is available again.
    simple(&node, &json!({})).add(&container);
}

#[test]
fn dns_of_ipam_is_used_unless_the_network_has_its_own() {
    needs!(lane::VLAN);
    let (node, container) = (Node::new(), quick());
    tagged_wire(&node, &[100]);
    let file = node.path("resolv.conf");
    std::fs::write(&file, "nameserver 192.0.2.3\n").unwrap();
    let mut ipam = node.host_local(&["10.1.2.0/24"]);
    ipam["resolvConf"] = json!(file);
    for (dns, expected) in [
        (Value::Null, json!({"nameservers": ["192.0.2.3"]})),
        (json!({"domain": "c.example"}), json!({"domain": "c.example"})),
    ] {
        let net = simple(&node, &json!({"ipam": ipam, "dns": dns}));
        assert_eq!(net.add(&container)["dns"], expected);
        net.del(&container);
    }
}

#[test]
fn fifty_vlans_of_a_master_are_added_concurrently() {
    const COUNT: usize = 50;
    needs!(lane::VLAN);
    let node = Node::new();
    tagged_wire(&node, &[1]);
    let net = simple(&node, &json!({}));
    let before = node.snapshot();
    let containers: Vec<_> = (0..COUNT).map(|_| quick()).collect();
    let call = |verb: &str, i: usize| {
        let net = net.with(&json!({"vlanId": i + 1}));
        net.call(verb, &format!("c{i}")).netns(&containers[i].path())
    };
    let results = at_once(COUNT, |i| call("ADD", i).result());
    assert_eq!(net.leases().len(), COUNT);
    for (i, container) in containers.iter().enumerate() {
        let link = container.ip("-d link show eth0");
        assert_eq!(link[0]["linkinfo"]["info_data"]["id"], i + 1);
    }
    let first = results[0]["ips"][0]["address"].as_str().unwrap().split('/').next().unwrap();
    assert!(node.reaches(first));
    at_once(COUNT, |i| call("DEL", i).ok());
    settles(&before, || node.snapshot());
    assert!(containers.iter().all(|c| c.ip("link").as_array().unwrap().len() == 1));
}
