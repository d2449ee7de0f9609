//! VLAN filtering: isolation between VLANs, the VLANs of a port, the gateway of a VLAN, CHECK.

use serde_json::{Value, json};

use super::{SUBJECT, layer2, simple};
use crate::lane::{self, needs};
use crate::support::lifecycle::Subject;
use crate::support::net::{GATEWAYS, Net, addresses, merged, no_veth_remains, settles};
use crate::support::node::{Container, Node};
use crate::support::parallel::at_once;
use crate::support::traffic::Place;

const WITH_VLAN: Subject = Subject {
    keys: |node| merged(&(SUBJECT.keys)(node), &json!({"vlan": 100})),
    golden: |version| match version {
        "0.1.0" | "0.2.0" => include_str!("../golden/bridge_vlan/0.1.json"),
        "1.0.0" => include_str!("../golden/bridge_vlan/1.0.json"),
        "1.1.0" => include_str!("../golden/bridge_vlan/1.1.json"),
        _ => include_str!("../golden/bridge_vlan/0.3.json"),
    },
    ..SUBJECT
};

#[test]
fn add_check_and_del_with_the_golden_result() {
    needs!(lane::BRIDGE_VLAN);
    WITH_VLAN.add_check_del_del();
}

#[test]
fn traffic_flows_in_all_directions() {
    needs!(lane::BRIDGE_VLAN);
    WITH_VLAN.traffic();
}

#[test]
fn del_without_a_namespace_uses_prev_result() {
    needs!(lane::BRIDGE_VLAN);
    WITH_VLAN.del_without_a_namespace();
}

#[test]
fn gc_keeps_valid_attachments_and_releases_stale_ones() {
    needs!(lane::BRIDGE_VLAN);
    WITH_VLAN.gc();
}

/// The VLANs of a port, for example `100 native`, `200-210`, `7 untagged`.
fn vlans_of(node: &Node, port: &str) -> Vec<String> {
    let shown = node.sh(&format!("bridge -j vlan show dev {port}"));
    let shown: Value = serde_json::from_str(&shown).unwrap();
    let mut ranges: Vec<(u64, u64, &str)> = Vec::new();
    for vlan in shown[0]["vlans"].as_array().unwrap() {
        let (id, flags) = (vlan["vlan"].as_u64().unwrap(), vlan["flags"].to_string());
        let how = match (flags.contains("PVID"), flags.contains("Untagged")) {
            (true, true) => " native",
            (false, true) => " untagged",
            (false, false) => "",
            (true, false) => " native but tagged",
        };
        match ranges.last_mut() {
            Some(last) if last.1 + 1 == id && last.2 == how => last.1 = id,
            _ => ranges.push((id, id, how)),
        }
    }
    let text = |(first, last, how): &(u64, u64, &str)| {
        if first == last { format!("{first}{how}") } else { format!("{first}-{last}{how}") }
    };
    ranges.iter().map(text).collect()
}

/// The name of the host's veth end.
fn port(result: &Value) -> &str {
    result["interfaces"][1]["name"].as_str().unwrap()
}

/// The peer of the gateway interface.
fn gateway_port(node: &Node, gateway: &str) -> Value {
    let index = node.ip(&format!("link show {gateway}"))[0]["link_index"].clone();
    let all = node.ip("link show type veth");
    let peer = all.as_array().unwrap().iter().find(|link| match index.as_u64() {
        Some(index) => link["ifindex"] == index,
        // For a peer in the same namespace, `ip` prints its name and not its index.
        None => node.ip(&format!("link show {gateway}"))[0]["link"] == link["ifname"],
    });
    peer.unwrap().clone()
}

#[test]
fn a_port_is_in_exactly_the_vlans_that_are_configured() {
    needs!(lane::BRIDGE_VLAN);
    for (keys, expected) in [
        (json!({"vlan": 100}), &["100 native"][..]),
        (json!({"vlan": 100, "preserveDefaultVlan": true}), &["1 untagged", "100 native"]),
        (json!({"vlan": 1}), &["1 native"]),
        (json!({"vlanTrunk": []}), &["1 native"]),
        (
            json!({"vlanTrunk": [{"id": 101}, {"minID": 200, "maxID": 210}, {"id": 205}]}),
            &["1 native", "101", "200-210"],
        ),
        (json!({"vlanTrunk": [{"id": 101}], "preserveDefaultVlan": false}), &["101"]),
        (
            json!({"vlan": 100, "vlanTrunk": [{"id": 101}, {"minID": 200, "maxID": 210}]}),
            &["100 native", "101", "200-210"],
        ),
        (
            json!({"vlan": 205, "vlanTrunk": [{"minID": 200, "maxID": 210}]}),
            &["200-204", "205 native", "206-210"],
        ),
        (json!({"vlanTrunk": [{"minID": 1, "maxID": 4094}]}), &["1 native", "2-4094"]),
    ] {
        let (node, container) = (Node::new(), Container::new());
        let net = layer2(&node, "1.1.0", &keys);
        let result = net.add(&container);
        assert_eq!(vlans_of(&node, port(&result)), expected, "{keys}");
        let bridge = node.ip("-d link show br0");
        assert_eq!(bridge[0]["linkinfo"]["info_data"]["vlan_filtering"], 1);
        net.check(&container, &result).ok();
        net.del(&container);
    }
}

#[test]
fn containers_hear_only_their_own_vlan() {
    needs!(lane::BRIDGE_VLAN);
    let node = Node::new();
    let containers: Vec<_> = (0..4).map(|_| Container::new()).collect();
    let add = |i: usize, vlan: u16| {
        let net = simple(&node, &json!({"vlan": vlan}));
        net.call("ADD", &format!("c{i}")).netns(&containers[i].path()).result();
    };
    for (i, vlan) in [100, 100, 200, 200].into_iter().enumerate() {
        add(i, vlan);
    }
    for (from, to, heard) in [(0, 1, true), (2, 3, true), (0, 2, false), (3, 1, false)] {
        let target = format!("10.1.2.{}", to + 2);
        assert_eq!(containers[from].pings(&target), heard, "{from} to {to}");
    }
    // The host in VLAN 1 is not reachable either.
    node.sh("ip addr add 10.1.2.1/24 dev br0");
    assert!(!containers[0].pings("10.1.2.1"));
}

#[test]
fn trunks_carry_tagged_frames_to_the_container() {
    needs!(lane::BRIDGE_VLAN, lane::VLAN);
    let (node, trunk, one, two) =
        (Node::new(), Container::new(), Container::new(), Container::new());
    layer2(&node, "1.1.0", &json!({"vlanTrunk": [{"id": 100}]})).add(&trunk);
    for (id, container, vlan) in [("c2", &one, 100), ("c3", &two, 200)] {
        simple(&node, &json!({"vlan": vlan})).call("ADD", id).netns(&container.path()).result();
    }
    for vlan in [100, 200] {
        trunk.sh(&format!("ip link add link eth0 name eth0.{vlan} type vlan id {vlan}"));
        trunk.sh(&format!("ip link set eth0.{vlan} up"));
    }
    trunk.sh("ip addr add 10.1.2.99/24 dev eth0.100");
    assert!(trunk.reaches("10.1.2.2"), "VLAN 100 is in the trunk");
    trunk.sh("ip addr flush dev eth0.100");
    trunk.sh("ip addr add 10.1.2.99/24 dev eth0.200");
    assert!(!trunk.pings("10.1.2.3"), "VLAN 200 is not");
}

#[test]
fn a_vlan_gateway_is_deleted_with_its_last_port() {
    needs!(lane::BRIDGE_VLAN);
    let (node, one, two, other) =
        (Node::new(), Container::new(), Container::new(), Container::new());
    let net = Net::new(&node, "bridge", "1.1.0", &(WITH_VLAN.keys)(&node));
    let result = net.add(&one);
    assert_eq!(addresses(&node.ip("addr show br0.100")), ["10.1.2.1/24", "2001:db8:1::1/64"]);
    assert_eq!(addresses(&node.ip("addr show br0")), [""; 0]);
    let gateway = &node.ip("link show br0.100")[0];
    let peer = gateway_port(&node, "br0.100");
    assert_eq!(peer["ifindex"].as_u64().unwrap(), gateway["ifindex"].as_u64().unwrap() - 1);
    assert_eq!((&peer["master"], &gateway["operstate"]), (&json!("br0"), &json!("UP")));
    assert_eq!(vlans_of(&node, peer["ifname"].as_str().unwrap()), ["100 native"]);
    assert_eq!(result["interfaces"][3]["mac"], gateway["address"]);

    // Another VLAN of the same bridge has its own gateway interface, here with the same address.
    net.call("ADD", "c2").netns(&two.path()).result();
    let vlan200 = net.with(&json!({"vlan": 200, "name": "other"}));
    let ipam = json!({"ipam": node.host_local(&["10.9.9.0/24"])});
    vlan200.with(&ipam).call("ADD", "c3").netns(&other.path()).result();
    assert_eq!(addresses(&node.ip("addr show br0.200")), ["10.9.9.1/24"]);
    assert!(other.reaches("10.9.9.1") && two.reaches(GATEWAYS[0]));
    vlan200.call("DEL", "c3").netns(&other.path()).ok();
    let there = |name: &str| node.sh("ip -o link").contains(name);
    assert!(!there("br0.200") && there("br0.100"));

    net.check(&one, &result).ok();
    net.del(&one);
    assert!(there("br0.100") && two.reaches(GATEWAYS[0]), "there is another port");
    net.call("DEL", "c2").netns(&two.path()).ok();
    assert!(!there("br0.100"));
    no_veth_remains(&node);
}

#[test]
fn del_by_prev_result_keeps_a_gateway_that_is_in_use() {
    needs!(lane::BRIDGE_VLAN);
    let (node, one, two) = (Node::new(), Container::new(), Container::new());
    let net = Net::new(&node, "bridge", "1.1.0", &(WITH_VLAN.keys)(&node));
    let result = net.add(&one);
    net.call("ADD", "c2").netns(&two.path()).result();
    net.with(&json!({"prevResult": result})).call("DEL", "c1").ok();
    assert!(!one.try_sh("ip link show eth0"), "the pair is gone");
    assert!(two.reaches(GATEWAYS[0]), "the gateway is not");
    // An uplink port in the VLAN keeps the gateway too.
    node.sh("ip link add up0 type veth peer name up1; ip link set up0 master br0");
    node.sh("bridge vlan add dev up0 vid 100");
    net.call("DEL", "c2").netns(&two.path()).ok();
    assert!(node.sh("ip -o link").contains("br0.100"));
    node.sh("ip link del up0");
    net.call("GC", "").conf(&merged(&net.conf, &json!({"cni.dev/valid-attachments": []}))).ok();
    assert!(!node.sh("ip -o link").contains("br0.100"), "GC finds it");
}

#[test]
fn concurrent_first_adds_share_one_vlan_gateway() {
    const COUNT: usize = 24;
    needs!(lane::BRIDGE_VLAN);
    let node = Node::new();
    let net = simple(&node, &json!({"vlan": 100, "isDefaultGateway": true}));
    let containers: Vec<_> = (0..COUNT).map(|_| Container::new()).collect();
    let call = |verb: &str, i: usize| net.call(verb, &format!("c{i}")).netns(&containers[i].path());
    let results = at_once(COUNT, |i| call("ADD", i).result());
    assert!(results.iter().all(|r| r["interfaces"][3] == results[0]["interfaces"][3]));
    assert!(containers.iter().all(|container| container.reaches(GATEWAYS[0])));
    // Half of the containers are deleted and added again, the others are deleted. The gateway must
    // serve every container that remains.
    at_once(COUNT, |i| {
        call("DEL", i).ok();
        if i % 2 == 0 {
            call("ADD", i).result();
        }
    });
    let stay = containers.iter().step_by(2);
    assert!(stay.into_iter().all(|container| container.reaches(GATEWAYS[0])));
    at_once(COUNT, |i| call("DEL", i).ok());
    no_veth_remains(&node);
    assert!(!node.sh("ip -o link").contains("br0.100"));
    assert_eq!(net.leases(), [""; 0]);
}

#[test]
fn a_half_made_vlan_gateway_is_completed() {
    needs!(lane::BRIDGE_VLAN);
    for steps in [
        "ip link add br0.100 type veth peer name veth00000001",
        "ip link add br0.100 type veth peer name veth00000001; ip link set veth00000001 master br0",
        "ip link add br0.100 type veth peer name veth00000001; ip link set veth00000001 master br0; \
         bridge vlan add dev veth00000001 vid 100 pvid untagged; ip addr add 10.1.2.1/24 dev br0.100",
    ] {
        let (node, container) = (Node::new(), Container::new());
        node.sh("ip link add br0 up type bridge vlan_filtering 1");
        node.sh(steps);
        let net = simple(&node, &json!({"vlan": 100, "isGateway": true}));
        let result = net.add(&container);
        assert!(container.reaches(GATEWAYS[0]), "{steps}");
        net.check(&container, &result).ok();
        net.del(&container);
        assert!(!node.sh("ip -o link").contains("br0.100"), "{steps}");
    }
    // An existing interface that is not a veth pair is foreign: DEL keeps it.
    needs!(lane::VLAN);
    let (node, container) = (Node::new(), Container::new());
    node.sh(
        "ip link add br0 up type bridge vlan_filtering 1; bridge vlan add dev br0 vid 100 self",
    );
    node.sh("ip link add link br0 name br0.100 type vlan id 100");
    let net = simple(&node, &json!({"vlan": 100, "isGateway": true}));
    let result = net.add(&container);
    assert!(container.reaches(GATEWAYS[0]));
    net.check(&container, &result).ok();
    net.del(&container);
    assert!(node.sh("ip -o link").contains("br0.100"));
}

#[test]
fn a_failed_add_deletes_the_vlans_gateway() {
    needs!(lane::BRIDGE_VLAN);
    let (node, container) = (Node::new(), Container::new());
    node.sh("ip link add br0 up type bridge vlan_filtering 1");
    let net = simple(&node, &json!({"vlan": 100, "isGateway": true}));
    // The gateway interface has an address of another network.
    node.sh("ip link add br0.100 type veth peer name veth00000001");
    node.sh("ip addr add 10.8.0.1/24 dev br0.100");
    let error = net.on("ADD", &container).error();
    let msg = "failed to set vlan interface for bridge with addr: \
               \"br0.100\" already has an IP address different from 10.1.2.1/24";
    assert_eq!(error.brief(), (999, msg));
    assert_eq!(net.leases(), [""; 0]);
    assert_eq!(addresses(&node.ip("addr show br0.100")), ["10.8.0.1/24"]);
    net.with(&json!({"forceAddress": true})).add(&container);
    assert_eq!(addresses(&node.ip("addr show br0.100")), ["10.1.2.1/24"]);
    net.del(&container);
    let before = (node.snapshot(), container.snapshot(&node));
    // Masquerading, which follows the gateway, fails because its program is missing.
    let hide = "for dir in /usr/sbin /sbin; do mount -t tmpfs none $dir; done; exec \"$0\"";
    let keys = json!({"ipMasq": true, "ipMasqBackend": "iptables"});
    let error = net.with(&keys).on("ADD", &container).in_script(hide).error();
    assert!(error.msg.contains("iptables"), "{error:?}");
    settles(&before.0, || node.snapshot());
    settles(&before.1, || container.snapshot(&node));
}

#[test]
fn vlan_filtering_is_enabled_only_without_ports() {
    needs!(lane::BRIDGE_VLAN);
    let (node, container) = (Node::new(), Container::new());
    node.sh("ip link add br0 up type bridge");
    let index = node.ip("link show br0")[0]["ifindex"].clone();
    let net = layer2(&node, "1.1.0", &json!({"vlan": 100}));
    let result = net.add(&container);
    let bridge = node.ip("-d link show br0");
    assert_eq!((&bridge[0]["ifindex"], port(&result).len()), (&index, 12));
    assert_eq!(bridge[0]["linkinfo"]["info_data"]["vlan_filtering"], 1);
    net.del(&container);
    node.sh("ip link set br0 type bridge vlan_filtering 0");
    node.sh("ip link add up0 type veth peer name up1; ip link set up0 master br0");
    let msg = "failed to create bridge \"br0\": \
               bridge \"br0\" does not filter VLANs, and has other ports";
    net.add_is_refused(&container, 999, msg);
    assert!(net.on("ADD", &container).error().details.contains("vlan_filtering 1"));
    let error = net.call("STATUS", "").error();
    assert_eq!(error.code, 50);
    node.sh("ip link set br0 type bridge vlan_filtering 1");
    net.call("STATUS", "").ok();
    net.add(&container);
}

#[test]
fn a_bridge_name_too_long_for_the_vlan_is_refused() {
    needs!(lane::BRIDGE_VLAN);
    let (node, container) = (Node::new(), Container::new());
    let keys = json!({"bridge": "a-bridge-of-13", "vlan": 100, "isGateway": true});
    let net = simple(&node, &keys);
    let before = node.snapshot();
    let error = net.on("ADD", &container).error();
    assert!(error.code == 7 && error.msg.starts_with("VLAN gateway \"a-bridge-of-13.100\": "));
    crate::support::node::assert_unchanged(&before, &node.snapshot());
    net.del(&container);
}

#[test]
fn check_reports_changed_vlans() {
    needs!(lane::BRIDGE_VLAN);
    let keys = json!({"vlan": 100, "isGateway": true, "vlanTrunk": [{"minID": 200, "maxID": 210}]});
    for (line, msg) in [
        (
            "bridge vlan add dev VETH vid 100",
            "port \"VETH\" is not in VLAN 100, configured as native",
        ),
        (
            "bridge vlan del dev VETH vid 205",
            "port \"VETH\" is not in VLAN 205, configured as tagged",
        ),
        (
            "bridge vlan add dev VETH vid 300",
            "port \"VETH\" is in VLAN 300, which is not configured",
        ),
        (
            "ip link set br0 type bridge vlan_filtering 0",
            "bridge \"br0\" does not filter VLANs, and has other ports",
        ),
        ("ip link set br0.100 down", "VLAN gateway \"br0.100\" is down"),
        ("ip link del br0.100", "VLAN gateway \"br0.100\" was not found"),
        (
            "bridge vlan del dev PEER vid 100",
            "VLAN gateway \"br0.100\" is not connected to VLAN 100 of \"br0\"",
        ),
        (
            "ip link set PEER nomaster",
            "VLAN gateway \"br0.100\" is not connected to VLAN 100 of \"br0\"",
        ),
        ("ip addr flush dev br0.100", "gateway 10.1.2.1 is not an address of \"br0.100\""),
    ] {
        let (node, container) = (Node::new(), Container::new());
        let net = simple(&node, &keys);
        let result = net.add(&container);
        net.check(&container, &result).ok();
        let peer = gateway_port(&node, "br0.100");
        let line = line.replace("PEER", peer["ifname"].as_str().unwrap());
        node.sh(&line.replace("VETH", port(&result)));
        net.check_finds(&container, &result, &msg.replace("VETH", port(&result)));
    }
}
