//! Restoring the device on the host after changes in the container or the end of the namespace;
//! name conflicts.

use serde_json::json;

use super::{MAC, fall_back, is_back, layer2, plug, records, simple};
use crate::support::net::settles;
use crate::support::node::{Container, Node};

#[test]
fn del_restores_a_device_changed_in_the_container() {
    for change in [
        "ip link set eth0 mtu 1280",
        "ip link set eth0 address 02:00:00:00:00:99",
        "ip link set eth0 down",
        "ip link set eth0 promisc on allmulticast on",
        "ip link set eth0 alias mine",
        "ip link set eth0 alias ''",
        "sh -c 'ip link set eth0 down; ip link set eth0 name x9'",
        "sh -c 'ip link set eth0 down; ip link set eth0 name x9; ip link set x9 alias mine'",
        "sh -c 'ip link set eth0 down; ip link set eth0 name x9 address 02:00:00:00:00:99 mtu 1300; ip link add eth0 type bridge'",
        "ip addr add 10.77.0.1/16 dev eth0",
    ] {
        let node = Node::new();
        plug(&node);
        let before = node.snapshot();
        let container = Container::new();
        let net = simple(&node, &json!({}));
        net.add(&container);
        container.sh(change);
        net.del(&container);
        println!("{change}");
        is_back(&node, &before);
    }
}

#[test]
fn del_returns_a_device_down_if_it_was_down() {
    let node = Node::new();
    plug(&node);
    node.sh("ip link set hd0 down");
    let before = node.snapshot();
    let container = Container::new();
    for net in [simple(&node, &json!({})), layer2(&node, "1.0.0")] {
        net.add(&container);
        assert!(container.sh("ip link show eth0").contains(",UP"));
        net.del(&container);
        is_back(&node, &before);
    }
}

/// Also by GC; without the bridge there is only a warning.
#[test]
fn a_port_of_a_bridge_is_one_again() {
    let node = Node::new();
    plug(&node);
    node.sh("ip link add br7 up type bridge; ip link set hd0 master br7");
    let net = simple(&node, &json!({}));
    let before = node.snapshot();
    for has_del in [true, false] {
        let container = Container::new();
        net.add(&container);
        if has_del {
            net.del(&container);
        } else {
            net.with(&json!({"cni.dev/valid-attachments": []})).call("GC", "").ok();
        }
        assert_eq!(node.ip("link show hd0")[0]["master"], json!("br7"));
        is_back(&node, &before);
    }
    let container = Container::new();
    net.add(&container);
    node.sh("ip link del br7");
    let outcome = net.on("DEL", &container).run();
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    assert!(outcome.stderr.contains("\"hd0\" has no master: \"br7\" is gone"), "{outcome:?}");
    assert_eq!(node.ip("link show hd0")[0]["master"], json!(null));
}

#[test]
fn addresses_and_routes_of_protocols_are_not_restored() {
    let node = Node::new();
    plug(&node);
    node.sh("ip addr add 203.0.113.5/24 dev hd0 valid_lft 600 preferred_lft 600");
    node.sh("ip route add 203.0.114.0/24 via 203.0.113.1 proto dhcp");
    let container = Container::new();
    let net = simple(&node, &json!({}));
    net.add(&container);
    net.del(&container);
    let (addrs, routes) = (node.sh("ip addr show hd0"), node.sh("ip route"));
    assert!(!addrs.contains("203.0.113.5") && addrs.contains("192.0.2.7/24"), "{addrs}");
    assert!(!routes.contains("203.0.114.0") && routes.contains("198.51.100.0/24"), "{routes}");
}

#[test]
fn other_interfaces_with_the_same_name_are_kept() {
    let node = Node::new();
    plug(&node);
    // The host has another `eth0`, the container another `hd0`.
    node.sh("ip link add eth0 up type bridge");
    let container = Container::new();
    container.sh("ip link add hd0 up type bridge");
    let before = (node.snapshot(), container.snapshot(&node));
    for net in [simple(&node, &json!({})), layer2(&node, "1.0.0")] {
        let result = net.add(&container);
        assert_eq!(container.ip("link show eth0")[0]["address"], json!(MAC));
        assert_ne!(node.ip("link show eth0")[0]["address"], json!(MAC));
        net.check(&container, &result).ok();
        net.del(&container);
        is_back(&node, &before.0);
        settles(&before.1, || container.snapshot(&node));
    }
}

#[test]
fn del_keeps_the_device_while_its_name_is_in_use() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let before = node.snapshot();
    let net = simple(&node, &json!({}));
    net.add(&container);
    for (obstacle, remove, what) in [
        ("ip link add hd0 type bridge", "ip link del hd0", "is the name"),
        (
            "ip link add br7 type bridge; ip link property add dev br7 altname hd0",
            "ip link del br7",
            "is an alternative name",
        ),
    ] {
        node.sh(obstacle);
        // DEL releases the lease and keeps everything else.
        let state = || {
            let text = container.sh("sh -c 'ip -o addr; ip route; ip -6 route; ip -d link'");
            // Duplicate address detection of the link-local address takes one second.
            text.replace(" tentative", "")
        };
        let inside = state();
        let error = net.on("DEL", &container).error();
        let msg = format!("\"hd0\" {what} of another link on the host");
        assert_eq!(error.brief(), (999, msg.as_str()));
        assert!(error.details.starts_with("the device stays in the container"), "{error:?}");
        assert_eq!(inside, state());
        assert!(container.pings("10.1.2.1"));
        node.sh(remove);
    }
    net.del(&container);
    is_back(&node, &before);
}

#[test]
fn del_renames_a_device_already_back_on_the_host() {
    for name in ["eth0", "dev7"] {
        let (node, container) = (Node::new(), Container::new());
        plug(&node);
        let before = node.snapshot();
        let net = simple(&node, &json!({}));
        net.add(&container);
        fall_back(&container, name);
        let path = container.path();
        drop(container);
        net.call("DEL", "c1").netns(&path).ok();
        is_back(&node, &before);
        net.call("DEL", "c1").netns(&path).ok();
        is_back(&node, &before);
    }
}

#[test]
fn the_next_container_does_not_lose_the_state_of_the_device() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let before = node.snapshot();
    let net = simple(&node, &json!({}));
    net.add(&container);
    // The namespace ends, and the device is used again before DEL.
    fall_back(&container, "hd0");
    let path = container.path();
    drop(container);
    let later = Container::new();
    net.call("ADD", "c2").netns(&later.path()).result();
    net.call("DEL", "c1").netns(&path).ok();
    net.call("DEL", "c2").netns(&later.path()).ok();
    is_back(&node, &before);
}

/// The path of an ended process may lead to the namespace of a later one.
#[test]
fn del_leaves_the_device_to_a_later_container_at_the_same_path() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let before = node.snapshot();
    let net = layer2(&node, "1.1.0");
    net.add(&container);
    fall_back(&container, "hd0");
    drop(container);
    let later = Container::new();
    net.call("ADD", "c2").netns(&later.path()).result();
    net.call("DEL", "c1").netns(&later.path()).ok();
    assert_eq!(later.ip("link show eth0")[0]["address"], MAC);
    net.call("DEL", "c2").netns(&later.path()).ok();
    is_back(&node, &before);
}

/// All macvlans on one link are alike, as are dummies.
#[test]
fn del_after_the_namespace_spares_links_that_are_alike() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    for name in ["hd1", "mine"] {
        node.sh(&format!("ip link add link far0 name {name} up type macvlan mode bridge"));
    }
    let net = simple(&node, &json!({"device": "hd1"}));
    net.add(&container);
    let path = container.path();
    drop(container);
    net.call("DEL", "c1").netns(&path).ok();
    assert_eq!(
        node.sh("ip -o link show up | grep -cE ' (hd1|mine)@'; ip link show mine | wc -l"),
        "1\n2\n"
    );
    assert_eq!((records(&node), net.leases()), (String::new(), Vec::new()));
}

#[test]
fn del_returns_a_device_by_the_references_alias() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let net = layer2(&node, "1.0.0");
    net.add(&container);
    // As after an ADD of the reference, which keeps no records.
    std::fs::remove_dir_all(node.state("host-device")).unwrap();
    net.del(&container);
    let link = node.ip("link show hd0");
    assert_eq!((&link[0]["address"], &link[0]["ifalias"]), (&json!(MAC), &json!(null)));
    assert_eq!(records(&node), "");
}

#[test]
fn add_is_refused_if_no_record_can_be_written() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    std::fs::write(node.state("host-device"), "").unwrap();
    let net = simple(&node, &json!({}));
    let msg = "record the state of \"hd0\": open /run/cni/host-device: not a directory";
    net.add_is_refused(&container, 5, msg);
    net.del(&container);
}
