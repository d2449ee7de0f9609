//! Refusals before any change, and CHECK.

use serde_json::{Value, json};

use super::{MAC, dual, is_back, layer2, plug, simple};
use crate::support::net::{Net, settles};
use crate::support::node::{Container, Node, assert_unchanged};

#[test]
fn bad_configurations_change_nothing() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let without = |keys: Value| crate::support::net::merged(&json!({"device": null}), &keys);
    let path = "kernel device path \"/sys/class\" must be absolute and begin with /sys/devices/";
    for (keys, code, msg) in [
        (json!({}), 999, "specify either \"device\", \"hwaddr\", \"kernelpath\" or \"pciBusID\""),
        (
            json!({"device": ""}),
            999,
            "specify either \"device\", \"hwaddr\", \"kernelpath\" or \"pciBusID\"",
        ),
        (json!({"device": "hd9"}), 999, "failed to find host device: link \"hd9\" not found"),
        (
            json!({"device": "lo"}),
            7,
            "failed to find host device: \"lo\" is the host's loopback interface",
        ),
        (
            json!({"hwaddr": "zz"}),
            7,
            "failed to parse MAC address \"zz\": address zz: invalid MAC address",
        ),
        (
            json!({"hwaddr": "02:99:00:00:00:00"}),
            999,
            "failed to find host device: failed to find physical interface",
        ),
        (json!({"kernelpath": "/sys/class"}), 7, path),
        (
            json!({"kernelpath": "/sys/devices/no"}),
            999,
            "failed to find host device: failed to read directory /sys/devices/no/net: no such file or directory",
        ),
        (
            json!({"pciBusID": "ffff:ff:1f.7"}),
            999,
            "failed to find host device: no net directory under pci device ffff:ff:1f.7",
        ),
        (json!({"pciBusID": "../../x"}), 7, "pciBusID \"../../x\" is not the name of a device"),
        (
            json!({"runtimeConfig": {"deviceID": "no"}}),
            999,
            "runtime config DeviceID no not found or unsupported",
        ),
        (json!({"device": "hd0", "ipam": {"type": "no-such"}}), 999, ""),
    ] {
        let net = simple(&node, &without(keys));
        let before = (node.snapshot(), container.snapshot(&node));
        let error = net.on("ADD", &container).error();
        assert!(error.code == code && (msg.is_empty() || error.msg == msg), "{error:?}");
        settles(&before.0, || node.snapshot());
        settles(&before.1, || container.snapshot(&node));
    }
    for (key, value) in [("device", json!(7)), ("runtimeConfig", json!([])), ("hwaddr", json!({}))]
    {
        let error = simple(&node, &json!({key: value})).on("ADD", &container).error();
        assert!(error.code == 6 && format!("{error:?}").contains(key), "{key}: {error:?}");
    }
}

#[test]
fn a_name_in_use_in_the_container_is_refused() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    node.sh("ip link property add dev hd0 altname eth5");
    let net = simple(&node, &json!({}));
    container.sh("ip link add eth0 up type bridge");
    net.add_is_refused(&container, 999, "container already has an interface \"eth0\"");
    container.sh("ip link property add dev eth0 altname eth1");
    let call = net.on("ADD", &container).ifname("eth1");
    net.is_refused(&call, &container, (999, "container already has an interface \"eth1\""));
    let call = net.on("ADD", &container).ifname("eth5");
    net.is_refused(&call, &container, (999, "\"eth5\" is an alternative name of \"hd0\" itself"));
    container.sh("ip link property add dev eth0 altname a-long-name-of-hd0");
    let call = net.on("ADD", &container).ifname("eth2");
    let msg = "container already has an interface \"a-long-name-of-hd0\"";
    net.is_refused(&call, &container, (999, msg));
}

#[test]
fn a_device_that_cannot_move_is_not_changed() {
    let (node, container) = (Node::new(), Container::new());
    // Bridges cannot change their network namespace.
    node.sh("ip link add br9 up type bridge; ip addr add 192.0.2.1/24 dev br9");
    let before = (node.snapshot(), container.snapshot(&node));
    let error = simple(&node, &json!({"device": "br9"})).on("ADD", &container).error();
    assert!(error.msg.starts_with("failed to move \"br9\" to container NS: "), "{error:?}");
    is_back(&node, &before.0);
    settles(&before.1, || container.snapshot(&node));
}

#[test]
fn add_returns_the_device_if_addressing_fails() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let before = (node.snapshot(), container.snapshot(&node));
    node.script(
        "no-ips",
        "cat >/dev/null; [ $CNI_COMMAND = ADD ] && echo '{\"cniVersion\":\"1.0.0\"}'; exit 0",
    );
    let mut unreachable = node.host_local(&["10.1.2.0/24"]);
    unreachable["routes"] = json!([{"dst": "10.9.0.0/16", "gw": "172.16.0.1"}]);
    for (ipam, msg) in [
        (json!({"type": "no-ips"}), "IPAM plugin returned missing IP config"),
        (unreachable, "failed to add route '10.9.0.0/16 via 172.16.0.1 dev eth0'"),
    ] {
        let error = simple(&node, &json!({"ipam": ipam})).on("ADD", &container).error();
        assert!(error.msg.starts_with(msg), "{error:?}");
        is_back(&node, &before.0);
        settles(&before.1, || container.snapshot(&node));
    }
}

#[test]
fn an_invalid_namespace_is_refused() {
    let node = Node::new();
    plug(&node);
    let before = node.snapshot();
    let net = simple(&node, &json!({}));
    assert_eq!(net.call("ADD", "c1").netns("/var/run/netns/no-such").error().code, 8);
    is_back(&node, &before);
}

fn attached<'n>(node: &'n Node, container: &Container) -> (Net<'n>, Value) {
    plug(node);
    let net = dual(node, "1.1.0");
    let result = net.add(container);
    net.check(container, &result).ok();
    (net, result)
}

#[test]
fn check_reports_every_kind_of_damage() {
    let route = "Expected Route 0.0.0.0/0 via 10.1.2.1 not found in routing table";
    let mac = format!("Interface eth0 Mac {MAC} doesn't match link Mac: 02:00:00:00:00:99");
    for (line, msg) in [
        ("ip link set eth0 down", "interface \"eth0\" is down"),
        ("ip addr del 10.1.2.2/24 dev eth0", "Failed to match addr 10.1.2.2/24 on interface eth0"),
        ("ip route del default", route),
        ("ip link set eth0 address 02:00:00:00:00:99", &mac),
        ("ip link set eth0 alias ''", "\"eth0\" has no alias, which is its name on the host"),
        ("ip link del eth0", "Container Interface name in prevResult: eth0 not found"),
    ] {
        let (node, container) = (Node::new(), Container::new());
        let (net, result) = attached(&node, &container);
        container.sh(line);
        net.check_finds(&container, &result, msg);
    }
    let (node, container) = (Node::new(), Container::new());
    let (net, result) = attached(&node, &container);
    assert_eq!(net.on("CHECK", &container).error().msg, "Required prevResult missing");
    let netns = container.path();
    let mut other = result.clone();
    other["interfaces"][0]["sandbox"] = json!("/elsewhere");
    let msg = format!("Sandbox in prevResult /elsewhere doesn't match configured netns: {netns}");
    net.check_finds(&container, &other, &msg);
    for ip in net.leases() {
        std::fs::remove_file(node.path("leases/net").join(ip)).unwrap();
    }
    net.check_finds(
        &container,
        &result,
        "host-local: Failed to find address added by container c1",
    );
}

#[test]
fn the_plugins_own_namespace_is_refused() {
    let node = Node::new();
    plug(&node);
    let before = node.snapshot();
    let own = format!("/proc/{}/task/{}/ns/net", std::process::id(), nix::unistd::gettid());
    assert_eq!(layer2(&node, "1.0.0").call("ADD", "c1").netns(&own).error().code, 8);
    assert_unchanged(&before, &node.snapshot());
}
