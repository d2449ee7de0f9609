//! host-device: moving a device to the container and back in every version, restored attributes,
//! name conflicts.
//!
//! The device is one end of a veth pair; the gateways are at the other end.

mod choice;
mod faults;
mod forged;
mod give_back;
mod hardware;
mod lost;
mod reference;
mod refusals;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::process;

use serde_json::{Value, json};

use crate::support::net::{FIRST, GATEWAYS, Net, addresses, dual_ipam, merged, normal, settles};
use crate::support::node::{Container, MILESTONES, Node, Snapshot, VERSIONS, eventually};
use crate::support::parallel::at_once;
use crate::support::traffic::{Place, tcp, udp};
const MAC: &str = "02:00:00:00:00:d0";

/// Creates the device `hd0`: up, with an alternative name, an address of each family, a route and
/// an alias. The gateways are on its peer `far0`.
fn plug(node: &Node) {
    node.sh(&format!(
        "ip link add hd0 address {MAC} mtu 1400 type veth peer name far0 mtu 1400 address 02:00:00:00:00:f0
         echo 0 > /proc/sys/net/ipv6/conf/hd0/accept_dad
         echo 0 > /proc/sys/net/ipv6/conf/far0/accept_dad
         ip link property add dev hd0 altname a-long-name-of-hd0
         ip link set hd0 alias uplink
         ip addr add 192.0.2.7/24 dev hd0
         ip addr add 2001:db8:7::7/64 dev hd0
         ip addr add 10.1.2.1/24 dev far0
         ip addr add 2001:db8:1::1/64 dev far0
         ip link set far0 up
         ip link set hd0 up
         ip route add 198.51.100.0/24 via 192.0.2.9 dev hd0"
    ));
}

/// Keys of a network with the device `hd0`.
fn keys(node: &Node) -> Value {
    json!({"device": "hd0", "ipam": node.host_local(&["10.1.2.0/24"])})
}

/// A network of version 1.1.0 with 10.1.2.0/24, `hd0` and more keys.
fn simple<'n>(node: &'n Node, extra: &Value) -> Net<'n> {
    Net::new(node, "host-device", "1.1.0", &merged(&keys(node), extra))
}

/// A network without IPAM.
fn layer2<'n>(node: &'n Node, version: &'static str) -> Net<'n> {
    Net::new(node, "host-device", version, &merged(&keys(node), &json!({"ipam": null})))
}

fn dual<'n>(node: &'n Node, version: &'static str) -> Net<'n> {
    let ipam = dual_ipam(node);
    let dns = json!({"nameservers": ["10.1.2.1"]});
    Net::new(node, "host-device", version, &merged(&keys(node), &json!({"ipam": ipam, "dns": dns})))
}

/// The paths of the records of moved devices.
fn records(node: &Node) -> String {
    node.sh(&format!("find {} -type f 2>/dev/null || true", node.state("host-device").display()))
}

/// Moves the container's device to the host under `name`, as the kernel does with physical devices
/// when a namespace ends. (A veth would be deleted by the kernel.)
fn fall_back(container: &Container, name: &str) {
    let host = File::open("/proc/thread-self/ns/net").unwrap();
    let home = format!("/proc/{}/fd/{}", process::id(), host.as_raw_fd());
    container.sh(&format!("ip link set eth0 netns {home} name {name}"));
}

/// Asserts that the host is as before, without records or leases.
#[track_caller]
fn is_back(node: &Node, before: &Snapshot) {
    settles(before, || node.snapshot());
    assert_eq!(records(node), "");
    assert_eq!(node.leases("net"), [""; 0]);
}

#[test]
fn add_check_and_del_return_the_device() {
    for version in VERSIONS {
        let node = Node::new();
        plug(&node);
        let container = Container::new();
        let before = (node.snapshot(), container.snapshot(&node));
        let net = dual(&node, version);
        let printed = net.on("ADD", &container).printed();
        let golden = crate::support::lifecycle::golden!("host-device")(version);
        let golden = golden.trim_end().replace("VERSION", version).replace(MAC, "MAC");
        assert_eq!(normal(&printed, &container), golden);
        let link = container.ip("-d link show eth0");
        assert_eq!((&link[0]["address"], &link[0]["ifalias"]), (&json!(MAC), &json!("hd0")));
        assert_eq!(link[0]["altnames"], json!(["a-long-name-of-hd0"]));
        assert_eq!(addresses(&container.ip("addr show eth0")), ["10.1.2.2/24", "2001:db8:1::2/64"]);
        assert_eq!(
            node.sh("ip -o link show dev far0 | wc -l; ip -o link | grep -c hd0: || true"),
            "1\n0\n"
        );
        let prev: Value = serde_json::from_str(&printed).unwrap();
        if !MILESTONES.contains(&version) {
            net.del(&container);
            is_back(&node, &before.0);
            continue;
        }
        if version >= "0.4.0" {
            let added = (node.snapshot(), container.snapshot(&node));
            net.check(&container, &prev).ok();
            settles(&added.0, || node.snapshot());
            settles(&added.1, || container.snapshot(&node));
        } else {
            let error = net.check(&container, &prev).error();
            assert_eq!(error.brief(), (1, "config version does not allow CHECK"));
        }
        for _ in ["DEL", "DEL again"] {
            net.del(&container);
            is_back(&node, &before.0);
            settles(&before.1, || container.snapshot(&node));
        }
    }
}

#[test]
fn add_without_ipam_only_moves_the_device() {
    for version in VERSIONS {
        let node = Node::new();
        plug(&node);
        let container = Container::new();
        let before = (node.snapshot(), container.snapshot(&node));
        let net = layer2(&node, version);
        if version < "0.3.0" {
            let msg = "cannot convert: no valid IP addresses";
            assert_eq!(net.on("ADD", &container).error().brief(), (999, msg));
        } else {
            let result = net.add(&container);
            let mut entry = json!({"name": "eth0", "mac": MAC, "sandbox": container.path()});
            if version == "1.1.0" {
                entry["mtu"] = json!(1400);
            }
            assert_eq!(result["interfaces"], json!([entry]));
            assert_eq!(result["ips"], Value::Null);
            let link = container.ip("link show eth0");
            assert!(link[0]["flags"].as_array().unwrap().contains(&json!("UP")), "{link}");
            if version >= "0.4.0" {
                net.check(&container, &result).ok();
            }
            net.del(&container);
        }
        is_back(&node, &before.0);
        settles(&before.1, || container.snapshot(&node));
        net.del(&container);
    }
}

#[test]
fn traffic_flows_in_both_directions() {
    let node = Node::new();
    plug(&node);
    let container = Container::new();
    let net = dual(&node, "1.1.0");
    net.add(&container);
    for family in [0, 1] {
        assert!(container.reaches(GATEWAYS[family]), "container to the wire");
        assert!(node.reaches(FIRST[family]), "and back");
        tcp(&container, &node, GATEWAYS[family]);
        tcp(&node, &container, FIRST[family]);
        let seen = udp(&container, &node, GATEWAYS[family]);
        assert_eq!(seen.to_string(), FIRST[family]);
    }
    net.del(&container);
}

#[test]
fn add_announces_the_addresses_once_the_other_side_forwards() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    node.sh(
        "ip link add br0 type bridge; ip link set br0 up; ip link add out0 type veth peer name out1
             ip link set out1 up; ip link set out1 master br0; ip link set out0 up
             ip addr flush dev far0; ip link set far0 master br0; ip addr add 10.1.2.1/24 dev out0",
    );
    node.sh(&format!("ip neigh replace {} lladdr 02:00:00:00:00:01 dev out0 nud stale", FIRST[0]));
    simple(&node, &json!({})).add(&container);
    let known = || node.ip(&format!("neigh show {} dev out0", FIRST[0]))[0]["lladdr"] == MAC;
    eventually("the address was not announced", known);
}

#[test]
fn use_interface_network_moves_addresses_and_routes() {
    let node = Node::new();
    plug(&node);
    node.sh("ip route add default via 192.0.2.9 dev hd0 metric 50
             ip route add 203.0.113.0/24 dev hd0
             ip route add default via 2001:db8:7::9 dev hd0");
    let before = node.snapshot();
    let wire = [
        "192.0.2.9/24",
        "198.51.100.1/32",
        "203.0.113.1/32",
        "8.8.8.8/32",
        "2001:db8:7::9/64",
        "2001:db8:8::8/128",
    ];
    let own = ["192.0.2.7/24", "2001:db8:7::7/64"];
    for ipam in [false, true] {
        let container = Container::new();
        let net = if ipam { simple(&node, &json!({})) } else { layer2(&node, "1.1.0") };
        let net = net.with(&json!({"useInterfaceNetwork": true}));
        let result = net.add(&container);
        let ips = result["ips"].as_array().unwrap();
        let listed: Vec<_> = ips.iter().map(|ip| ip["address"].as_str().unwrap()).collect();
        let expected: Vec<_> = ["10.1.2.2/24"].into_iter().filter(|_| ipam).chain(own).collect();
        assert_eq!(listed, expected);
        assert!(ips.iter().all(|ip| ip["interface"] == 0), "{ips:?}");
        assert_eq!(addresses(&container.ip("addr show eth0")), expected);
        for route in [
            json!({"dst": "203.0.113.0/24", "scope": 253}),
            json!({"dst": "198.51.100.0/24", "gw": "192.0.2.9"}),
            json!({"dst": "0.0.0.0/0", "gw": "192.0.2.9", "priority": 50}),
        ] {
            assert!(result["routes"].as_array().unwrap().contains(&route), "{result}");
        }
        for address in wire {
            node.sh(&format!(
                "ip addr add {address} dev far0 $(case {address} in *:*) echo nodad;; esac)"
            ));
            let address = address.split('/').next().unwrap();
            eventually(&format!("{address} answers, ipam: {ipam}"), || container.pings(address));
        }
        net.check(&container, &result).ok();
        container.sh("ip route del 203.0.113.0/24");
        net.check_finds(
            &container,
            &result,
            "Expected Route 203.0.113.0/24 not found in routing table",
        );
        for address in wire {
            node.sh(&format!("ip addr del {address} dev far0"));
        }
        net.del(&container);
        is_back(&node, &before);
    }
    // On DEL the host's DHCP client, not the plugin, restores a leased address.
    node.sh("ip addr add 192.0.2.77/24 dev hd0 valid_lft 1000 preferred_lft 1000
             ip route add 203.0.113.8/32 via 192.0.2.9 dev hd0 proto dhcp metric 7");
    let container = Container::new();
    let net = layer2(&node, "1.1.0").with(&json!({"useInterfaceNetwork": true}));
    let result = net.add(&container).to_string();
    assert!(result.contains("192.0.2.77/24") && result.contains("203.0.113.8/32"), "{result}");
    net.del(&container);
    // The IPAM plugin may return the device's own address.
    let ipam = json!({"type": "static", "addresses": [{"address": "192.0.2.7/24"}]});
    let (container, net) = (Container::new(), net.with(&json!({"ipam": ipam})));
    assert_eq!(net.add(&container).to_string().matches("192.0.2.7/24").count(), 1);
    net.del(&container);
}

#[test]
fn del_without_a_namespace_releases_addresses() {
    let node = Node::new();
    plug(&node);
    let before = node.snapshot();
    // The record contains the namespace of the device.
    let container = Container::new();
    let net = simple(&node, &json!({}));
    let prev = net.add(&container);
    net.with(&json!({"prevResult": prev})).call("DEL", "c1").netns("").ok();
    is_back(&node, &before);
    net.add(&container);
    net.call("DEL", "c1").without("CNI_NETNS").ok();
    is_back(&node, &before);
    // A veth is deleted with its namespace; DEL releases the lease and removes the record.
    net.add(&container);
    let path = container.path();
    drop(container);
    net.call("DEL", "c1").netns(&path).ok();
    assert_eq!((records(&node), net.leases()), (String::new(), Vec::new()));
    net.call("DEL", "c1").netns(&path).ok();
    net.call("DEL", "c1").netns("/var/run/netns/no-such").ok();
}

#[test]
fn del_of_an_unknown_container_changes_nothing() {
    let node = Node::new();
    plug(&node);
    let container = Container::new();
    let net = simple(&node, &json!({}));
    net.del(&container);
    let result = net.add(&container);
    net.on("DEL", &container).ifname("eth1").ok();
    net.call("DEL", "c2").netns("").ok();
    net.call("DEL", "c2").netns(&Container::new().path()).ok();
    net.check(&container, &result).ok();
    assert!(node.reaches(FIRST[0]));
    // A link of another plugin with the same name is foreign.
    let other = Container::new();
    other.sh("ip link add eth0 type veth peer name eth9");
    let before = other.snapshot(&node);
    net.call("DEL", "c3").netns(&other.path()).ok();
    other.sh("ip link set eth0 alias hd7");
    net.call("DEL", "c3").netns(&other.path()).ok();
    other.sh("ip link set eth0 alias ''");
    settles(&before, || other.snapshot(&node));
    net.del(&container);
}

#[test]
fn gc_returns_devices_of_stale_attachments() {
    let node = Node::new();
    plug(&node);
    let before = node.snapshot();
    let container = Container::new();
    let net = simple(&node, &json!({}));
    let gc = |keys: Value| net.with(&keys).call("GC", "").without("CNI_CONTAINERID");
    let added = net.add(&container);
    let valid = json!([{"containerID": "c1", "ifname": "eth0"}]);
    gc(json!({})).run();
    gc(json!({"cni.dev/valid-attachments": valid})).ok();
    net.check(&container, &added).ok();
    gc(json!({"cni.dev/valid-attachments": [{"containerID": "c1", "ifname": "eth1"}]})).ok();
    is_back(&node, &before);
    // The device is deleted with its namespace.
    net.add(&container);
    drop(container);
    eventually("the namespace ends", || !node.sh("ip -o link").contains("far0"));
    gc(json!({"cni.dev/valid-attachments": []})).ok();
    assert_eq!((records(&node), net.leases()), (String::new(), Vec::new()));
    let error = dual(&node, "1.0.0").call("GC", "").error();
    assert_eq!(error.brief(), (1, "config version does not allow GC"));
}

#[test]
fn gc_keeps_a_device_with_its_new_container() {
    let node = Node::new();
    plug(&node);
    let container = Container::new();
    let net = simple(&node, &json!({}));
    net.add(&container);
    // The container was recreated in the same namespace, without a DEL of the old id.
    let old = node.state("host-device/net/c1:eth0.json");
    let kept = std::fs::read(&old).unwrap();
    net.del(&container);
    let added = net.call("ADD", "c2").netns(&container.path()).result();
    std::fs::write(&old, kept).unwrap();
    let valid = json!([{"containerID": "c2", "ifname": "eth0"}]);
    net.with(&json!({"cni.dev/valid-attachments": valid})).call("GC", "").ok();
    assert!(!old.exists());
    net.with(&json!({"prevResult": added})).call("CHECK", "c2").netns(&container.path()).ok();
    net.call("DEL", "c2").netns(&container.path()).ok();
}

#[test]
fn status_requires_the_device() {
    let node = Node::new();
    plug(&node);
    let net = simple(&node, &json!({}));
    let status = |keys: Value| net.with(&keys).call("STATUS", "").without("CNI_CONTAINERID");
    let before = node.snapshot();
    status(json!({})).ok();
    status(json!({"device": null})).ok();
    let container = Container::new();
    let small = json!({"ipam": node.host_local(&["10.1.2.0/30"])});
    net.with(&small).add(&container);
    status(json!({})).ok();
    assert_eq!(status(small).error().code, 50, "the range is exhausted");
    net.del(&container);
    let error = status(json!({"device": null, "pciBusID": "ffff:ff:1f.7"})).error();
    assert_eq!(error.brief(), (50, "there is no PCI device ffff:ff:1f.7"));
    assert_eq!(status(json!({"device": null, "hwaddr": "x"})).error().code, 50);
    is_back(&node, &before);
}

#[test]
fn the_error_names_the_container_with_the_device() {
    let node = Node::new();
    plug(&node);
    let (one, two) = (Container::new(), Container::new());
    let net = simple(&node, &json!({}));
    let added = net.add(&one);
    let before = (node.snapshot(), two.snapshot(&node));
    let error = net.call("ADD", "c2").netns(&two.path()).error();
    assert_eq!(error.brief(), (999, "failed to find host device: link \"hd0\" not found"));
    let details = "container c1 has it as eth0, or was not followed by DEL: detach it there first";
    assert_eq!(error.details, details);
    settles(&before.0, || node.snapshot());
    settles(&before.1, || two.snapshot(&node));
    net.call("DEL", "c2").netns(&two.path()).ok();
    net.check(&one, &added).ok();
    // ADD for the same container again.
    let error = net.on("ADD", &one).error();
    assert_eq!(error.code, 999);
    net.check(&one, &added).ok();
    net.del(&one);
}

#[test]
fn fifty_containers_get_their_devices_concurrently() {
    const COUNT: usize = 50;
    let node = Node::new();
    let script: Vec<_> = (0..COUNT)
        .map(|i| {
            format!("link add hd{i} address 02:00:00:00:01:{i:02x} type veth peer name far{i}")
        })
        .collect();
    node.sh(&format!("printf '{}\\n' | ip -batch -", script.join("\\n")));
    let before = node.snapshot();
    let containers: Vec<_> = (0..COUNT).map(|_| Container::new()).collect();
    let paths: Vec<_> = containers.iter().map(Container::path).collect();
    let net = simple(&node, &json!({}));
    let call = |verb: &str, i: usize| {
        let net = net.conf.clone();
        let conf = merged(&net, &json!({"device": format!("hd{i}")}));
        node.call("host-device", verb).conf(&conf).id(&format!("c{i}")).netns(&paths[i])
    };
    let results = at_once(COUNT, |i| call("ADD", i).result());
    let mut ips: Vec<_> = results.iter().map(|r| r["ips"][0]["address"].to_string()).collect();
    ips.sort();
    ips.dedup();
    assert_eq!(ips.len(), COUNT, "an address twice");
    for (i, result) in results.iter().enumerate() {
        let mac = format!("02:00:00:00:01:{i:02x}");
        assert_eq!(result["interfaces"][0]["mac"], json!(mac));
        assert_eq!(containers[i].ip("link show eth0")[0]["address"], json!(mac));
    }
    at_once(COUNT, |i| call("DEL", i).ok());
    is_back(&node, &before);
}

#[test]
fn only_one_of_many_containers_gets_a_device() {
    const COUNT: usize = 12;
    let node = Node::new();
    plug(&node);
    let before = node.snapshot();
    let net = simple(&node, &json!({}));
    let conf = net.conf.clone();
    for _ in 0..3 {
        let containers: Vec<_> = (0..COUNT).map(|_| Container::new()).collect();
        let paths: Vec<_> = containers.iter().map(Container::path).collect();
        let call = |verb: &str, i: usize| {
            node.call("host-device", verb).conf(&conf).id(&format!("c{i}")).netns(&paths[i])
        };
        let outcomes = at_once(COUNT, |i| call("ADD", i).run());
        let winners: Vec<_> = (0..COUNT).filter(|i| outcomes[*i].status == Some(0)).collect();
        assert_eq!(winners.len(), 1, "{outcomes:?}");
        let has: Vec<_> =
            (0..COUNT).filter(|i| containers[*i].try_sh("ip link show eth0")).collect();
        assert_eq!(has, winners);
        assert_eq!(records(&node).lines().count(), 1);
        assert_eq!(net.leases().len(), 1);
        at_once(COUNT, |i| call("DEL", i).ok());
        is_back(&node, &before);
    }
}
