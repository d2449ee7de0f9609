//! Ownership of devices: several interfaces of one container, several networks, foreign devices and
//! qdiscs on the host's veth end, GC.

use serde_json::{Value, json};

use super::{IFB, SUBJECT, bucket, end, redirects};
use crate::support::net::Net;
use crate::support::node::{Container, Node};
use crate::support::parallel::at_once;

/// Creates a second interface of the same container and network; returns `ptp`'s result for it.
fn second(pod: &crate::support::chained::Pod<'_>) -> Value {
    let ipam = pod.node.host_local(&["10.1.3.0/24"]);
    let ptp = Net::new(&pod.node, "ptp", "1.1.0", &json!({"name": "other", "ipam": ipam}));
    ptp.on("ADD", &pod.container).ifname("eth1").result()
}

#[test]
fn interfaces_of_one_container_have_devices_of_their_own() {
    let pod = SUBJECT.pod("1.1.0");
    let prev = second(&pod);
    let before = pod.state();
    let (one, two) = (pod.plain(), pod.net(&json!({"prevResult": prev})));
    one.add(&pod.container);
    let add = || two.on("ADD", &pod.container).ifname("eth1").result();
    let result = add();
    let device = result["interfaces"][2]["name"].as_str().unwrap();
    assert!(device.starts_with("bwp") && device.len() == 15 && device != IFB, "{device}");
    assert_eq!(add(), result);
    assert_eq!(redirects(&pod), [IFB]);
    let checked = two.with(&json!({"prevResult": result}));
    checked.on("CHECK", &pod.container).ifname("eth1").ok();
    // DEL of the first interface keeps the second one.
    one.del(&pod.container);
    checked.on("CHECK", &pod.container).ifname("eth1").ok();
    one.add(&pod.container);
    two.on("DEL", &pod.container).ifname("eth1").ok();
    let devices = pod.node.ip("link show type ifb");
    assert_eq!((devices[0]["ifname"].as_str(), &devices[1]), (Some(IFB), &Value::Null));
    assert_eq!(redirects(&pod), [IFB]);
    one.del(&pod.container);
    pod.assert_as(&before, "both");
}

#[test]
fn del_keeps_devices_of_other_containers_and_networks() {
    let pod = SUBJECT.pod("1.1.0");
    pod.plain().add(&pod.container);
    let before = pod.state();
    let nothing = json!({"prevResult": null});
    pod.net(&nothing).call("DEL", "c2").without("CNI_NETNS").ok();
    pod.net(&nothing).with(&json!({"name": "other"})).call("DEL", "c1").without("CNI_NETNS").ok();
    pod.net(&nothing).call("DEL", "c1").ifname("eth1").without("CNI_NETNS").ok();
    pod.assert_as(&before, "DELs of others");
}

#[test]
fn foreign_filters_on_the_host_end_are_kept() {
    for hook in ["ingress", "clsact"] {
        let pod = SUBJECT.pod("1.1.0");
        let (net, end) = (pod.plain(), end(&pod));
        pod.node.sh(&format!("tc qdisc add dev {end} {hook}"));
        let theirs = format!(
            "tc filter add dev {end} ingress protocol ip pref 7 u32 match u32 0 0 flowid 1:7"
        );
        pod.node.sh(&theirs);
        let before = pod.state();
        let prev = net.add(&pod.container);
        assert_eq!(redirects(&pod), [IFB], "{hook}");
        net.add(&pod.container);
        net.check(&pod.container, &prev).ok();
        assert_eq!(redirects(&pod), [IFB], "{hook}");
        assert!(pod.container.pings("10.1.2.1"), "{hook}");
        net.del(&pod.container);
        pod.assert_as(&before, hook);
    }
}

#[test]
fn a_redirect_to_a_deleted_device_is_replaced() {
    let pod = SUBJECT.pod("1.1.0");
    let before = pod.state();
    let net = pod.plain();
    net.add(&pod.container);
    // The state that the reference's DEL leaves: a redirect to a deleted device.
    pod.node.sh(&format!("ip link del {IFB}"));
    assert!(!pod.container.try_sh("ping -n -c 1 -W 1 10.1.2.1"), "the redirect leads nowhere");
    net.add(&pod.container);
    assert_eq!(redirects(&pod), [IFB]);
    assert!(pod.container.pings("10.1.2.1"));
    pod.node.sh(&format!("ip link del {IFB}"));
    net.del(&pod.container);
    pod.assert_as(&before, "DEL after the device has gone");
}

#[test]
fn a_foreign_link_with_the_devices_name_is_kept() {
    let pod = SUBJECT.pod("1.1.0");
    pod.node.sh(&format!("ip link add {IFB} type bridge"));
    let before = pod.state();
    let result = pod.plain().add(&pod.container);
    assert_ne!(result["interfaces"][2]["name"], json!(IFB));
    pod.plain().del(&pod.container);
    pod.assert_as(&before, "DEL");
}

#[test]
fn a_failed_second_add_restores_the_limits_of_the_first() {
    let pod = SUBJECT.pod("1.1.0");
    // Both names of the device are taken.
    pod.node.sh(&format!("ip link add {IFB} type bridge"));
    let result = pod.plain().add(&pod.container);
    pod.plain().del(&pod.container);
    pod.node.sh(&format!(
        "ip link add {} type bridge",
        result["interfaces"][2]["name"].as_str().unwrap()
    ));
    pod.plain().with(&json!({"egressRate": 0, "egressBurst": 0})).add(&pod.container);
    let before = bucket(&pod, &end(&pod));
    assert_eq!(before, json!(["tbf", "1:", 1_000_000]));
    pod.plain().with(&json!({"ingressRate": 4_000_000})).on("ADD", &pod.container).error();
    assert_eq!(bucket(&pod, &end(&pod)), before);
}

#[test]
fn gc_removes_stale_devices_of_its_network() {
    let pod = SUBJECT.pod("1.1.0");
    let net = pod.plain();
    let gc = |keys: Value| net.with(&keys).with(&json!({"prevResult": null})).call("GC", "");
    let before = pod.state();
    net.add(&pod.container);
    let added = pod.state();
    gc(json!({})).run();
    let of = |id: &str, ifname: &str| json!([{"containerID": id, "ifname": ifname}]);
    gc(json!({"cni.dev/valid-attachments": of("c1", "eth0")})).ok();
    gc(json!({"cni.dev/valid-attachments": [], "name": "other"})).ok();
    pod.assert_as(&added, "GC of others");
    gc(json!({"cni.dev/valid-attachments": of("c1", "eth1")})).ok();
    pod.assert_as(&before, "GC");
    // The state of an ADD that was killed before it labelled the device with its owner.
    net.add(&pod.container);
    let device = &pod.node.ip(&format!("link show {IFB}"))[0];
    let mac = device["address"].as_str().unwrap();
    net.del(&pod.container);
    let killed = || pod.node.sh(&format!("ip link add {IFB} address {mac} up type ifb"));
    killed();
    let there = pod.state();
    gc(json!({"cni.dev/valid-attachments": [], "name": "other"})).ok();
    gc(json!({"cni.dev/valid-attachments": of("c1", "eth0")})).ok();
    pod.assert_as(&there, "GC of others");
    gc(json!({"cni.dev/valid-attachments": of("c2", "eth0")})).ok();
    pod.assert_as(&before, "GC of a killed ADD's");
    // A device without an owner label may be foreign.
    pod.node.sh(&format!("ip link add {IFB} type ifb"));
    let before = pod.state();
    gc(json!({"cni.dev/valid-attachments": []})).ok();
    pod.assert_as(&before, "GC of the reference's");
    net.del(&pod.container);
    assert_eq!(pod.node.ip("link show type ifb"), json!([]));
}

#[test]
fn a_forged_pair_does_not_change_other_containers_limits() {
    let pod = SUBJECT.pod("1.1.0");
    pod.plain().add(&pod.container);
    let (victim, attacker) = (Container::new(), Container::new());
    let ipam = pod.node.host_local(&["10.1.3.0/24"]);
    let ptp = Net::new(&pod.node, "ptp", "1.1.0", &json!({"name": "other", "ipam": ipam}));
    let prev = ptp.call("ADD", "victim").netns(&victim.path()).result();
    let net = pod.net(&json!({"prevResult": prev}));
    let prev = net.call("ADD", "victim").netns(&victim.path()).result();
    let limited = pod.state();
    let name = prev["interfaces"][0]["name"].as_str().unwrap();
    let outer = pod.node.ip(&format!("link show {name}"))[0]["ifindex"].as_u64().unwrap();
    let inner = victim.ip("link show eth0")[0]["ifindex"].as_u64().unwrap();
    // A forged veth pair with the indexes of the victim's pair, in the attacker's namespace.
    attacker.sh(&format!("ip link add eth0 index {inner} type veth peer name x index {outer}"));
    let forged = pod.plain().with(&json!({"prevResult": null}));
    forged.call("DEL", "attacker").netns(&attacker.path()).ok();
    pod.assert_as(&limited, "DEL of the attacker");
    let error = net.call("ADD", "attacker").netns(&attacker.path()).error();
    assert_eq!(error.msg, format!("veth peer with index {outer} is not in host ns"));
    pod.assert_as(&limited, "ADD of the attacker");
}

#[test]
fn sixteen_containers_are_limited_concurrently() {
    const COUNT: usize = 16;
    let node = Node::new();
    let ipam = node.host_local(&["10.1.2.0/24"]);
    let ptp = Net::new(&node, "ptp", "1.1.0", &json!({"ipam": ipam}));
    let pods: Vec<Container> = (0..COUNT).map(|_| Container::new()).collect();
    let id = |i: usize| format!("pod-{i}");
    let prevs: Vec<Value> =
        (0..COUNT).map(|i| ptp.call("ADD", &id(i)).netns(&pods[i].path()).result()).collect();
    let before = node.snapshot();
    let net = |i: usize| {
        let keys =
            crate::support::net::merged(&(SUBJECT.keys)(&node), &json!({"prevResult": prevs[i]}));
        Net::new(&node, "bandwidth", "1.1.0", &keys)
    };
    let results = at_once(COUNT, |i| net(i).call("ADD", &id(i)).netns(&pods[i].path()).result());
    let devices = node.ip("link show type ifb");
    assert_eq!(devices.as_array().unwrap().len(), COUNT);
    at_once(COUNT, |i| {
        let checked = net(i).with(&json!({"prevResult": results[i]}));
        checked.call("CHECK", &id(i)).netns(&pods[i].path()).ok();
    });
    at_once(COUNT, |i| net(i).call("DEL", &id(i)).netns(&pods[i].path()).ok());
    crate::support::node::assert_unchanged(&before, &node.snapshot());
}

#[test]
fn del_of_a_dead_container_removes_the_device() {
    let pod = SUBJECT.pod("1.1.0");
    let net = pod.plain();
    net.add(&pod.container);
    assert_ne!(bucket(&pod, IFB), Value::Null);
    let path = pod.container.path();
    let crate::support::chained::Pod { container, node, .. } = pod;
    drop(container);
    crate::support::net::no_veth_remains(&node);
    let conf = json!({"cniVersion": "1.1.0", "name": "net", "type": "bandwidth"});
    node.call("bandwidth", "DEL").id("c1").netns(&path).conf(&conf).ok();
    assert_eq!(node.ip("link show type ifb"), json!([]));
}
