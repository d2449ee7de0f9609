//! The verbs in every version, GC, containers that end, and links that a container has changed.

use serde_json::{Value, json};

use super::{MACS, dual, golden, hand_over, is_back, plug, records, simple};
use crate::lane::{self, needs};
use crate::support::net::{normal, settles};
use crate::support::node::{Container, MILESTONES, Node, VERSIONS, eventually};
use crate::support::parallel::{Holder, at_once, at_once_in};

#[test]
fn add_check_and_del_return_the_links() {
    needs!(lane::BOND);
    for version in VERSIONS {
        let (node, container) = (Node::new(), Container::new());
        plug(&node);
        let before = (node.snapshot(), container.snapshot(&node));
        let net = dual(&node, version);
        let printed = net.on("ADD", &container).printed();
        assert_eq!(normal(&printed, &container), golden(version));
        assert_eq!(records(&node), ["./net/c1:eth0:up1.json", "./net/c1:eth0:up2.json"]);
        let prev: Value = serde_json::from_str(&printed).unwrap();
        if version >= "0.4.0" {
            net.check(&container, &prev).ok();
        }
        net.del(&container);
        is_back(&node, &before.0);
        settles(&before.1, || container.snapshot(&node));
        if MILESTONES.contains(&version) {
            net.del(&container);
            is_back(&node, &before.0);
        }
    }
}

#[test]
fn twenty_bonds_at_once_return_their_links() {
    const PODS: usize = 20;
    needs!(lane::BOND);
    let node = Node::new();
    let links = "for link in a$i b$i; do ip link add $link type veth peer name far-$link; done";
    node.sh(&format!("for i in $(seq 0 {}); do {links}; done", PODS - 1));
    let containers: Vec<_> = (0..PODS).map(|_| Container::new()).collect();
    let before = (node.snapshot(), containers[0].snapshot(&node));
    let call = |verb: &str, i: usize| {
        let links = json!([{"name": format!("a{i}")}, {"name": format!("b{i}")}]);
        let net = simple(&node, &json!({"links": links, "mtu": 1300}));
        net.call(verb, &format!("pod{i}")).netns(&containers[i].path())
    };
    for _ in 0..2 {
        at_once_in(PODS, PODS, |i| call("ADD", i).result());
        assert_eq!(records(&node).len(), 2 * PODS);
        at_once_in(PODS, PODS, |i| call("DEL", i).ok());
        is_back(&node, &before.0);
        for container in &containers {
            settles(&before.1, || container.snapshot(&node));
        }
    }
}

#[test]
fn add_without_ipam_makes_a_bond_that_is_up() {
    needs!(lane::BOND);
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let before = (node.snapshot(), container.snapshot(&node));
    for version in VERSIONS {
        let net = simple(&node, &json!({"ipam": null, "cniVersion": version}));
        if version < "0.3.0" {
            let msg = "cannot convert: no valid IP addresses";
            assert_eq!(net.on("ADD", &container).error().brief(), (999, msg));
        } else {
            let result = net.add(&container);
            assert_eq!(
                (&result["interfaces"][0]["mac"], &result["ips"]),
                (&json!(MACS[0]), &Value::Null)
            );
            net.del(&container);
        }
        is_back(&node, &before.0);
        settles(&before.1, || container.snapshot(&node));
    }
}

#[test]
fn del_restores_links_changed_in_the_container() {
    needs!(lane::BOND);
    for change in [
        "ip link set eth0 address 02:00:00:00:00:99 mtu 1300",
        "sh -c 'ip link set up1 nomaster; ip link set up1 mtu 1300 address 02:00:00:00:00:98 alias mine'",
        "sh -c 'ip link set up2 nomaster; ip link set up2 down; ip link set up2 name x9; ip link add up2 type bridge'",
        "sh -c 'ip link set eth0 down; ip link set eth0 name x9; ip link add eth0 type bridge'",
        "ip link del eth0",
    ] {
        let (node, container) = (Node::new(), Container::new());
        plug(&node);
        let before = node.snapshot();
        let net = simple(&node, &json!({}));
        net.add(&container);
        container.sh(change);
        net.del(&container);
        println!("{change}");
        is_back(&node, &before);
    }
}

#[test]
fn del_without_the_namespace_returns_the_links() {
    needs!(lane::BOND);
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let before = (node.snapshot(), container.snapshot(&node));
    let net = simple(&node, &json!({}));
    net.add(&container);
    // The records contain the namespace.
    net.call("DEL", "c1").netns("").ok();
    is_back(&node, &before.0);
    settles(&before.1, || container.snapshot(&node));
    // A veth is deleted with its namespace.
    net.add(&container);
    let path = container.path();
    drop(container);
    net.call("DEL", "c1").netns(&path).ok();
    assert_eq!((records(&node), net.leases()), (Vec::new(), Vec::new()));
    net.call("DEL", "c1").netns(&path).ok();
}

#[test]
fn gc_returns_links_of_stale_attachments() {
    needs!(lane::BOND);
    for in_container in [false, true] {
        let (node, container) = (Node::new(), Container::new());
        plug(&node);
        if in_container {
            hand_over(&node, &container);
        }
        let before = (node.snapshot(), container.snapshot(&node));
        let net = simple(&node, &json!({"linksInContainer": in_container}));
        let gc =
            |valid: Value| net.with(&json!({"cni.dev/valid-attachments": valid})).call("GC", "");
        let added = net.add(&container);
        gc(json!([{"containerID": "c1", "ifname": "eth0"}])).ok();
        net.check(&container, &added).ok();
        gc(json!([{"containerID": "c1", "ifname": "eth1"}])).ok();
        is_back(&node, &before.0);
        settles(&before.1, || container.snapshot(&node));
        // A later container in the same namespace, without a DEL of the old id.
        net.add(&container);
        let old = node.state("bond/net/c1:eth0:up1.json");
        let kept = std::fs::read(&old).unwrap();
        net.del(&container);
        let added = net.call("ADD", "c2").netns(&container.path()).result();
        std::fs::write(&old, kept).unwrap();
        gc(json!([{"containerID": "c2", "ifname": "eth0"}])).ok();
        assert!(!old.exists());
        net.with(&json!({"prevResult": added})).call("CHECK", "c2").netns(&container.path()).ok();
        net.call("DEL", "c2").netns(&container.path()).ok();
        is_back(&node, &before.0);
    }
}

#[test]
fn a_process_in_a_namespace_without_a_path_loses_no_link() {
    needs!(lane::BOND);
    for has_path in [true, false] {
        let (node, container) = (Node::new(), Container::new());
        plug(&node);
        let before = node.snapshot();
        let net = simple(&node, &json!({}));
        net.add(&container);
        let holder = Holder::of(&container);
        let path = if has_path { container.path() } else { String::new() };
        drop(container);
        net.call("DEL", "c1").netns(&path).ok();
        is_back(&node, &before);
        drop(holder);
    }
}

/// What an ADD of the original leaves: links and bond in the container, no record.
#[test]
fn del_returns_links_without_records() {
    needs!(lane::BOND);
    for in_container in [false, true] {
        let (node, container) = (Node::new(), Container::new());
        plug(&node);
        let net = simple(&node, &json!({"linksInContainer": in_container}));
        if in_container {
            hand_over(&node, &container);
        }
        net.add(&container);
        std::fs::remove_dir_all(node.state("bond")).unwrap();
        container.try_sh("sh -c 'ip link set up1 alias \"\"; ip link set up2 alias \"\"'");
        net.del(&container);
        assert!(!container.try_sh("ip link show eth0"));
        for (name, mac) in ["up1", "up2"].into_iter().zip(MACS) {
            let args = format!("link show {name}");
            let link = if in_container { container.ip(&args) } else { node.ip(&args) };
            assert_eq!((&link[0]["address"], &link[0]["mtu"]), (&json!(mac), &json!(1400)));
            assert_eq!(link[0]["flags"].as_array().unwrap().contains(&json!("UP")), in_container);
        }
        assert_eq!(net.leases(), [""; 0]);
    }
}

#[test]
fn only_one_of_many_containers_gets_the_links() {
    const COUNT: usize = 6;
    needs!(lane::BOND);
    let node = Node::new();
    plug(&node);
    let before = node.snapshot();
    let net = simple(&node, &json!({}));
    let conf = net.conf.clone();
    let containers: Vec<_> = (0..COUNT).map(|_| Container::new()).collect();
    let paths: Vec<_> = containers.iter().map(Container::path).collect();
    let call = |verb: &str, i: usize| {
        node.call("bond", verb).conf(&conf).id(&format!("c{i}")).netns(&paths[i])
    };
    let outcomes = at_once(COUNT, |i| call("ADD", i).run());
    let winners: Vec<_> = (0..COUNT).filter(|i| outcomes[*i].status == Some(0)).collect();
    assert!(winners.len() <= 1, "{outcomes:?}");
    let has: Vec<_> = (0..COUNT).filter(|i| containers[*i].try_sh("ip link show eth0")).collect();
    assert_eq!(has, winners);
    assert_eq!((records(&node).len(), net.leases().len()), (2 * winners.len(), winners.len()));
    at_once(COUNT, |i| call("DEL", i).ok());
    is_back(&node, &before);
}

#[test]
fn status_requires_known_links_and_the_driver() {
    needs!(lane::BOND);
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let net = simple(&node, &json!({}));
    let status = |keys: Value| net.with(&keys).call("STATUS", "").without("CNI_CONTAINERID");
    let before = node.snapshot();
    status(json!({})).ok();
    net.add(&container);
    // Another container could not have the links now, as with a single device.
    status(json!({})).ok();
    net.del(&container);
    is_back(&node, &before);
    let links = json!({"links": [{"name": "up1"}, {"name": "up9"}]});
    let error = status(links.clone()).error();
    assert_eq!(error.brief(), (50, "link \"up9\" not found"));
    status(super::merged(&links, &json!({"linksInContainer": true}))).ok();
    assert_eq!(status(json!({"mode": "fast"})).error().code, 50);
    let small = json!({"ipam": node.host_local(&["10.1.2.0/30"])});
    net.with(&small).add(&container);
    assert_eq!(status(small.clone()).error().code, 50, "the range is exhausted");
    net.with(&small).del(&container);
    eventually("all is as before", || node.snapshot() == before);
}
