//! Refusals before any change, and CHECK. The refusals need no bonding driver.

use serde_json::{Value, json};

use super::{dual, hand_over, is_back, plug, records, simple};
use crate::lane::{self, needs};
use crate::support::net::settles;
use crate::support::node::{Container, Node};

#[test]
fn bad_configurations_change_nothing() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    node.sh("ip link add end1 mtu 1400 type veth peer name end2 mtu 1400");
    let links = |names: &[&str]| json!({"links": names.iter().map(|name| json!({"name": name})).collect::<Vec<_>>()});
    for (keys, code, msg) in [
        (json!({"mode": null}), 7, "\"mode\" is required"),
        (json!({"mode": "fastest"}), 7, "unknown mode \"fastest\""),
        (json!({"links": null}), 7, "bonding requires at least two links, \"links\" has 0"),
        (links(&["up1"]), 7, "bonding requires at least two links, \"links\" has 1"),
        (links(&["up1", ""]), 7, "links[1] has no name"),
        (links(&["up1", "up1"]), 7, "\"links\" has \"up1\" twice"),
        (links(&["up1", "lo"]), 7, "\"lo\" is the loopback interface"),
        (
            links(&["up1", "a-long-name-of-up1"]),
            7,
            "\"a-long-name-of-up1\" is \"up1\", which \"links\" has already",
        ),
        (links(&["up1", "up9"]), 999, "failed to find a link of the bond: link \"up9\" not found"),
        (
            links(&["end1", "end2"]),
            7,
            "\"end2\" and \"end1\" are ends of one link, or one is on the other",
        ),
        (links(&["up1", "far2"]), 999, "link \"far2\" belongs to another bond, bridge or VRF"),
        (json!({"mtu": 1500}), 7, "invalid mtu 1500: link \"up1\" has only 1400"),
        (json!({"mtu": null}), 7, "invalid mtu 1500: link \"up1\" has only 1400"),
        (json!({"mtu": 20}), 7, "invalid mtu 20, must be 68 to 65535"),
        (json!({"failOverMac": 3}), 7, "invalid failOverMac 3, must be 0 to 2"),
        (json!({"tlbDynamicLb": 1}), 7, "tlbDynamicLb does not exist in mode \"active-backup\""),
        (json!({"allSlavesActive": "2"}), 7, "invalid allSlavesActive 2, must be 0 to 1"),
        (json!({"xmitHashPolicy": "layer2+3+4"}), 7, "unknown xmitHashPolicy \"layer2+3+4\""),
        (json!({"mac": "zz"}), 7, "invalid args zz for MAC addr: address zz: invalid MAC address"),
        (
            json!({"mac": "02:00:00:00:00:01", "failOverMac": 1}),
            7,
            "with failOverMac 1 the bond cannot have the MAC 02:00:00:00:00:01",
        ),
        (json!({"ipam": {"type": "no-such"}}), 999, ""),
    ] {
        let before = (node.snapshot(), container.snapshot(&node));
        let error = simple(&node, &keys).on("ADD", &container).error();
        assert!(error.code == code && (msg.is_empty() || error.msg == msg), "{error:?}");
        assert!(
            !error.details.is_empty() || msg.starts_with("invalid") || msg.is_empty(),
            "{error:?}"
        );
        settles(&before.0, || node.snapshot());
        settles(&before.1, || container.snapshot(&node));
        assert_eq!(records(&node), [""; 0]);
    }
    for (key, value) in [
        ("mode", json!(7)),
        ("links", json!({})),
        ("miimon", json!("x")),
        ("linksInContainer", json!(1)),
    ] {
        let error = simple(&node, &json!({key: value})).on("ADD", &container).error();
        assert!(error.code == 6 && format!("{error:?}").contains(key), "{key}: {error:?}");
    }
}

#[test]
fn names_in_use_are_refused() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let net = simple(&node, &json!({}));
    let call = net.on("ADD", &container).ifname("up2");
    net.is_refused(&call, &container, (7, "\"up2\" is the name of a link of the bond"));
    container.sh("ip link add up2 type bridge");
    net.add_is_refused(&container, 999, "container already has an interface \"up2\"");
    container.sh("ip link set up2 name eth0");
    net.add_is_refused(&container, 999, "container already has an interface \"eth0\"");
}

fn record_of_killed_add(node: &Node, record: &Value) {
    let dir = node.state("bond/net");
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("c1:eth0:up1.json"), record.to_string()).unwrap();
}

#[test]
fn links_on_the_other_side_are_told_of() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    hand_over(&node, &container);
    let error = simple(&node, &json!({})).on("ADD", &container).error();
    assert_eq!(error.details, "the container has it: write \"linksInContainer\": true");
    // An ADD that was killed after the link was moved.
    let record = json!({"containerID": "c1", "ifname": "eth0", "netns": "/x", "port": "up1", "device": {"name": "up1"}});
    record_of_killed_add(&node, &record);
    let error = simple(&node, &json!({})).on("ADD", &container).error();
    assert_eq!(
        error.details,
        "container c1 has it as up1, or was not followed by DEL: detach it there first"
    );
    let links = json!({"linksInContainer": true, "links": [{"name": "far1"}, {"name": "far2"}]});
    let error = simple(&node, &links).on("ADD", &container).error();
    assert!(error.details.contains("remove \"linksInContainer\""), "{error:?}");
}

/// The path of a namespace may lead to that of a later container, whose link may have the name of
/// the recorded one.
#[test]
fn del_leaves_links_of_a_later_namespace_alone() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    hand_over(&node, &container);
    let before = container.snapshot(&node);
    let device = json!({"name": "up1", "mtu": 1300, "identity": {"kind": "veth"}});
    let record = json!({"containerID": "c1", "ifname": "eth0", "netns": container.path(), "port": "up1",
        "inContainer": true, "netnsId": {"dev": 4, "ino": 1, "ctime": 7}, "device": device});
    record_of_killed_add(&node, &record);
    simple(&node, &json!({"linksInContainer": true})).del(&container);
    settles(&before, || container.snapshot(&node));
    assert_eq!(records(&node), [""; 0]);
}

#[test]
fn a_kernel_without_bonds_is_told_of() {
    if lane::BOND.is_here() {
        return;
    }
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let before = (node.snapshot(), container.snapshot(&node));
    let net = simple(&node, &json!({}));
    let error = net.on("ADD", &container).error();
    assert_eq!(error.details, "load the kernel module \"bonding\" on the node");
    is_back(&node, &before.0);
    settles(&before.1, || container.snapshot(&node));
    assert_eq!(net.call("STATUS", "").error().code, 50);
    hand_over(&node, &container);
    let before = container.snapshot(&node);
    net.with(&json!({"linksInContainer": true})).on("ADD", &container).error();
    settles(&before, || container.snapshot(&node));
}

#[test]
fn add_returns_the_links_if_addressing_fails() {
    needs!(lane::BOND);
    let mut unreachable = json!(null);
    for in_container in [false, true] {
        let (node, container) = (Node::new(), Container::new());
        plug(&node);
        if in_container {
            hand_over(&node, &container);
        }
        let before = (node.snapshot(), container.snapshot(&node));
        if unreachable.is_null() {
            unreachable = json!([{"dst": "10.9.0.0/16", "gw": "172.16.0.1"}]);
        }
        let mut ipam = node.host_local(&["10.1.2.0/24"]);
        ipam["routes"] = unreachable.clone();
        let net = simple(&node, &json!({"ipam": ipam, "linksInContainer": in_container}));
        let error = net.on("ADD", &container).error();
        assert!(error.msg.starts_with("failed to add route '10.9.0.0/16"), "{error:?}");
        is_back(&node, &before.0);
        settles(&before.1, || container.snapshot(&node));
    }
}

#[test]
fn check_reports_every_kind_of_damage() {
    needs!(lane::BOND);
    let damages: [(&str, &str); 7] = [
        ("ip link set eth0 down", "interface \"eth0\" is down"),
        ("ip addr del 10.1.2.2/24 dev eth0", "Failed to match addr 10.1.2.2/24 on interface eth0"),
        ("ip link set up2 nomaster", "link \"up2\" is not a port of \"eth0\""),
        ("ip link del up2", "link \"up2\" not found"),
        ("ip link set eth0 mtu 1300", "interface \"eth0\" has MTU 1300 instead of 1400"),
        ("ip link set eth0 type bond miimon 20", "bond \"eth0\" has miimon 20, configured is 100"),
        ("ip link del eth0", "Interface name eth0 not found in NETNS"),
    ];
    for (line, msg) in damages {
        let (node, container) = (Node::new(), Container::new());
        plug(&node);
        let net = dual(&node, "1.1.0");
        let result: Value = net.add(&container);
        net.check(&container, &result).ok();
        container.sh(line);
        net.check_finds(&container, &result, &msg.replace("NETNS", &container.path()));
    }
}
