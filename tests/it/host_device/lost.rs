//! Devices that are neither in the container nor on the host when DEL comes, and those that nothing
//! proves to be the host's: no device is lost, and no address has two owners.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{MAC, fall_back, is_back, plug, records, simple};
use crate::support::net::Net;
use crate::support::node::{Container, Node, eventually};
use crate::support::parallel::Holder;

/// The record of the first container's device once that DEL has not found it.
fn lost_record(node: &Node) -> PathBuf {
    node.state("host-device/net/c1:eth0:hd0.json")
}

/// Changes the record of the first container's device.
fn edit_record(from: &Path, to: &Path, change: impl Fn(&mut Value)) {
    let mut record: Value = serde_json::from_slice(&fs::read(from).unwrap()).unwrap();
    change(&mut record);
    fs::remove_file(from).unwrap();
    fs::write(to, record.to_string()).unwrap();
}

#[test]
fn a_process_in_a_namespace_without_a_path_loses_no_device() {
    let end: [fn(&Net<'_>, &str); 3] = [
        |net, path| net.call("DEL", "c1").netns(path).ok(),
        |net, _| net.call("DEL", "c1").netns("").ok(),
        |net, _| net.with(&json!({"cni.dev/valid-attachments": []})).call("GC", "").ok(),
    ];
    for end in end {
        let (node, container) = (Node::new(), Container::new());
        plug(&node);
        let before = node.snapshot();
        let net = simple(&node, &json!({}));
        net.add(&container);
        let (holder, path) = (Holder::of(&container), container.path());
        drop(container);
        end(&net, &path);
        is_back(&node, &before);
        drop(holder);
    }
}

/// A later container's device is not taken by a late DEL, whatever still holds the first namespace.
#[test]
fn a_late_del_leaves_the_device_to_its_next_container() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let before = node.snapshot();
    let net = simple(&node, &json!({}));
    net.add(&container);
    let (holder, path) = (Holder::of(&container), container.path());
    fall_back(&container, "dev7");
    drop(container);
    let later = Container::new();
    net.call("ADD", "c2").netns(&later.path()).result();
    net.call("DEL", "c1").netns(&path).ok();
    assert_eq!(later.ip("link show eth0")[0]["address"], MAC);
    net.call("DEL", "c2").netns(&later.path()).ok();
    is_back(&node, &before);
    drop(holder);
}

/// A card is nowhere as long as its namespace lives without a path. This one exists in a sysfs of
/// the test only.
#[test]
fn the_record_of_hardware_stays_as_long_as_it_may_come_back() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let card = "/sys/bus/pci/devices/0000:99:00.0/net";
    node.sh(&format!("mount -t tmpfs none /sys/bus; mkdir -p {card}"));
    let net = simple(&node, &json!({}));
    net.add(&container);
    let file = node.state("host-device/net/c1:eth0.json");
    edit_record(&file, &file, |record| {
        record["device"]["identity"] = json!({"bus": "pci", "parent": "0000:99:00.0"});
    });
    let path = container.path();
    drop(container);
    let outcome = net.call("DEL", "c1").netns(&path).run();
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    let warning = "\"hd0\" is neither in the container nor on the host";
    assert!(outcome.stderr.contains(warning), "{outcome:?}");
    assert!(lost_record(&node).exists() && !file.exists(), "{}", records(&node));
    assert_eq!(net.leases(), [""; 0]);
    // Nothing ends it, and nothing fails because of it.
    net.call("DEL", "c1").netns(&path).ok();
    net.with(&json!({"cni.dev/valid-attachments": []})).call("GC", "").ok();
    node.cnibox(&["gc"]).run();
    assert!(lost_record(&node).exists());
    let doctor = node.cnibox(&["doctor"]).run().stdout;
    assert!(doctor.contains("device hd0 of container c1: has not come back"), "{doctor}");
    let later = Container::new();
    let error = net.call("ADD", "c2").netns(&later.path()).error();
    assert!(error.details.starts_with("container c1 had it as eth0, and "), "{error:?}");
    let by_card = net.with(&json!({"device": null, "pciBusID": "0000:99:00.0"}));
    let error = by_card.call("ADD", "c2").netns(&later.path()).error();
    assert!(error.details.starts_with("container c1 had it as eth0, and "), "{error:?}");
    // The card was pulled, or its interface is gone with its driver.
    node.sh(&format!("rmdir {card}"));
    assert!(!node.cnibox(&["doctor"]).run().stdout.contains("hd0"));
    node.cnibox(&["gc"]).run();
    assert_eq!(records(&node), "");
}

/// A command that restores the device of a network.
type Restore<'a> = &'a dyn Fn(&Net<'_>);

/// The kernel gives a card back under another name, when no DEL will come any more.
#[test]
fn a_lost_device_gets_its_name_and_state_from_the_next_command() {
    let gc = json!({"cni.dev/valid-attachments": []});
    let add_and_del = |net: &Net<'_>| {
        let next = Container::new();
        net.call("ADD", "c2").netns(&next.path()).result();
        net.call("DEL", "c2").netns(&next.path()).ok();
    };
    let restore: [(&str, Restore<'_>); 5] = [
        ("ADD", &add_and_del),
        ("DEL", &|net| net.call("DEL", "c1").netns("").ok()),
        ("GC", &|net| net.with(&gc).call("GC", "").ok()),
        ("cnibox gc", &|net| {
            let dry = net.node.cnibox(&["gc", "--dry-run"]).run().stdout;
            assert!(dry.contains("would restore device hd0 of container c1"), "{dry}");
            let done = net.node.cnibox(&["gc"]).run().stdout;
            assert!(done.contains("restored: device hd0 of container c1"), "{done}");
        }),
        ("cnibox repair", &|net| {
            let doctor = net.node.cnibox(&["doctor"]).run().stdout;
            assert!(doctor.contains("is on the host without its name and state"), "{doctor}");
            let done = net.node.cnibox(&["repair"]).run().stdout;
            assert!(done.contains("restored: device hd0 of container c1"), "{done}");
        }),
    ];
    for (what, restore) in restore {
        println!("{what}");
        let (node, container) = (Node::new(), Container::new());
        plug(&node);
        let before = node.snapshot();
        let net = simple(&node, &json!({}));
        net.add(&container);
        let file = node.state("host-device/net/c1:eth0.json");
        edit_record(&file, &lost_record(&node), |record| record["lost"] = json!(true));
        fs::remove_dir_all(node.path("leases")).unwrap();
        fall_back(&container, "dev7");
        drop(container);
        restore(&net);
        is_back(&node, &before);
    }
}

/// What the reference moved has no record: nothing proves that this end of a pair, whose other end
/// is in a third namespace, came from the host.
#[test]
fn a_link_that_stays_in_the_container_keeps_its_address() {
    let (node, container, far) = (Node::new(), Container::new(), Container::new());
    node.sh(&format!("ip link add hd0 type veth peer name far0 netns {}", far.path()));
    let net = simple(&node, &json!({}));
    let prev = net.add(&container);
    fs::remove_dir_all(node.state("host-device")).unwrap();
    let del = net.with(&json!({"prevResult": prev}));
    let outcome = del.on("DEL", &container).run();
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    assert!(outcome.stderr.contains("it stays there, and keeps its addresses"), "{outcome:?}");
    assert!(container.sh("ip -o addr show eth0").contains("10.1.2.2/24"));
    assert_eq!(net.leases(), ["10.1.2.2"]);
    let path = container.path();
    drop(container);
    eventually("the pair ends", || !far.try_sh("ip link show far0"));
    del.call("DEL", "c1").netns(&path).ok();
    assert_eq!(net.leases(), [""; 0]);
}

/// Taps, tunnels and the like, which a container could have made itself.
#[test]
fn an_unproved_link_comes_back_under_its_name_down() {
    for create in [
        "ip tuntap add hd0 mode tap",
        "ip link add hd0 type vxlan id 7 dstport 4789 dev lo",
        "ip link add hd0 type ifb",
    ] {
        for has_record in [true, false] {
            println!("{create}, record: {has_record}");
            let (node, container) = (Node::new(), Container::new());
            node.sh(&format!(
                "{create}; ip link set hd0 up alias mine; ip addr add 192.0.2.7/24 dev hd0; \
                 ip link add br7 type bridge; ip link set hd0 master br7"
            ));
            let net = simple(&node, &json!({}));
            for _ in ["first", "next"] {
                net.add(&container);
                if !has_record {
                    fs::remove_dir_all(node.state("host-device")).unwrap();
                }
                let outcome = net.on("DEL", &container).run();
                assert_eq!(outcome.status, Some(0), "{outcome:?}");
                assert!(outcome.stderr.contains("nothing proves that \"eth0\""), "{outcome:?}");
                let link = &node.ip("addr show hd0")[0];
                let alias_now = &node.ip("link show hd0")[0]["ifalias"];
                let alias = if has_record { json!("mine") } else { json!(null) };
                assert_eq!((alias_now, &link["addr_info"]), (&alias, &json!([])));
                assert_eq!(link["master"], json!(null), "a container may have made it");
                assert!(!link["flags"].as_array().unwrap().contains(&json!("UP")), "{link}");
                assert_eq!((records(&node), net.leases()), (String::new(), Vec::new()));
                node.sh("ip link set hd0 alias mine");
            }
        }
    }
}
