//! A container's changes to its links have no effect on the host: only the device gets the restored
//! addresses, routes and names.

use serde_json::json;

use super::{MAC, fall_back, is_back, layer2, plug, records, simple};
use crate::support::net::{Net, settles};
use crate::support::node::{Container, Node};

/// Hides the device and replaces it by a veth with the same name, alias, MAC and peer index.
fn forge(node: &Node, container: &Container, far: Option<&Container>) {
    let index = &node.ip("link show far0")[0]["ifindex"];
    let netns = far.map_or(String::new(), |far| format!("netns {}", far.path()));
    container.sh(&format!(
        "sh -c 'ip link set eth0 down; ip link set eth0 name real; ip link set real alias x
         ip link set real address 02:00:00:00:00:99
         ip link add eth0 address {MAC} type veth peer name evil index {index} {netns}
         ip link set eth0 alias hd0; ip link set eth0 up'"
    ));
}

/// Asserts that no host link has the address, the route or the name of the device.
#[track_caller]
fn nothing_was_given(node: &Node) {
    let state = node.sh("ip addr; ip route");
    assert!(!state.contains("192.0.2.7") && !state.contains("198.51.100.0"), "{state}");
    assert_eq!(node.sh("ip -o link | grep -c ' hd0[@:]' || true"), "0\n");
}

#[test]
fn a_forged_device_does_not_get_the_hosts_addresses() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let before = node.snapshot();
    for net in [simple(&node, &json!({})), layer2(&node, "1.0.0")] {
        net.add(&container);
        forge(&node, &container, None);
        // DEL finds the renamed device and keeps the container's replacement.
        net.del(&container);
        is_back(&node, &before);
        assert!(container.try_sh("ip link show evil"));
        container.sh("ip link del evil");
    }
}

#[test]
fn a_forged_device_gets_nothing_if_the_real_one_is_missing() {
    let (node, container, other) = (Node::new(), Container::new(), Container::new());
    plug(&node);
    let net = simple(&node, &json!({}));
    net.add(&container);
    forge(&node, &container, Some(&other));
    container.sh(&format!("ip link set real netns {}", other.path()));
    net.del(&container);
    nothing_was_given(&node);
    assert!(container.try_sh("ip link show eth0"));
    assert_eq!(records(&node), "");
}

#[test]
fn a_forged_link_on_the_host_gets_no_addresses() {
    let (node, container, other) = (Node::new(), Container::new(), Container::new());
    plug(&node);
    let net = simple(&node, &json!({}));
    net.add(&container);
    forge(&node, &container, Some(&other));
    fall_back(&container, "dev7");
    let path = container.path();
    drop(container);
    net.call("DEL", "c1").netns(&path).ok();
    nothing_was_given(&node);
    assert_eq!(node.ip("link show dev7")[0]["ifalias"], "hd0");
}

#[test]
fn gc_restores_nothing_to_a_forged_link() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let before = node.snapshot();
    let net = simple(&node, &json!({}));
    net.add(&container);
    forge(&node, &container, None);
    net.with(&json!({"cni.dev/valid-attachments": []})).call("GC", "").ok();
    is_back(&node, &before);
    assert!(container.try_sh("ip link show evil"));
}

/// A network that selects the device by MAC, with an attachment whose record is lost.
fn by_mac<'n>(node: &'n Node, container: &Container) -> Net<'n> {
    plug(node);
    let net = simple(node, &json!({"device": null, "hwaddr": MAC, "ipam": null}));
    net.add(container);
    std::fs::remove_dir_all(node.state("host-device")).unwrap();
    net
}

#[test]
fn a_container_cannot_choose_a_name_on_the_host() {
    for name in ["docker0", "hd0"] {
        let (node, container) = (Node::new(), Container::new());
        let net = by_mac(&node, &container);
        container.sh(&format!("ip link set eth0 alias {name}"));
        container.sh("ip link property add dev eth0 altname br-lan");
        let outcome = net.on("DEL", &container).run();
        assert_eq!(outcome.status, Some(0));
        assert!(outcome.stderr.contains("it is on the host as \"dev0\", down"), "{outcome:?}");
        let link = &node.ip("addr show dev0")[0];
        assert_eq!((&link["address"], &link["ifalias"]), (&json!(MAC), &json!(null)));
        assert_eq!((&link["altnames"], &link["operstate"]), (&json!(null), &json!("DOWN")));
        assert_eq!(link["addr_info"], json!([]));
    }
}

#[test]
fn without_a_record_a_link_of_the_container_is_not_moved() {
    let (node, container) = (Node::new(), Container::new());
    let net = by_mac(&node, &container);
    forge(&node, &container, None);
    let before = (node.snapshot(), container.snapshot(&node));
    net.del(&container);
    settles(&before.0, || node.snapshot());
    settles(&before.1, || container.snapshot(&node));
}

#[test]
fn alternative_names_of_the_container_do_not_block_del() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let before = node.snapshot();
    let net = simple(&node, &json!({}));
    // The kernel refuses to move a link with an alternative name that exists in the target
    // namespace.
    for name in ["docker0", "lo", "far0"] {
        net.add(&container);
        container.try_sh(&format!("ip link property add dev eth0 altname {name}"));
        net.del(&container);
        is_back(&node, &before);
    }
}

#[test]
fn a_failed_return_of_a_device_is_reported_and_retried() {
    for helps in [true, false] {
        let (node, container) = (Node::new(), Container::new());
        plug(&node);
        let before = node.snapshot();
        let net = simple(&node, &json!({}));
        net.add(&container);
        node.sh("echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6");
        let error = net.on("DEL", &container).error();
        assert!(error.msg.starts_with("restore the addresses of \"hd0\": "), "{error:?}");
        assert_eq!(error.details, "the next DEL or GC retries once");
        assert!(records(&node).contains("c1:eth0.json"));
        assert!(node.sh("ip addr show hd0; ip route").contains("198.51.100.0/24"), "the rest");
        node.sh("echo 0 > /proc/sys/net/ipv6/conf/default/disable_ipv6");
        if helps {
            node.sh("echo 0 > /proc/sys/net/ipv6/conf/hd0/disable_ipv6");
        }
        net.del(&container);
        assert_eq!(records(&node), "");
        if helps {
            is_back(&node, &before);
        }
    }
}

#[test]
fn records_are_private_whatever_the_umask() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let net = layer2(&node, "1.0.0");
    net.on("ADD", &container).in_script("umask 000; exec \"$0\" \"$@\"").result();
    let devices = node.state("host-device");
    let modes = || node.sh(&format!("stat -c %a {0} {0}/net {0}/net/*", devices.display()));
    assert_eq!(modes(), "700\n700\n600\n");
    net.del(&container);
    // Another user could have planted records in this directory.
    node.sh(&format!("chmod 777 {}/net", devices.display()));
    let error = net.on("ADD", &container).error();
    assert!(error.msg.contains("others must not write there"), "{error:?}");
}
