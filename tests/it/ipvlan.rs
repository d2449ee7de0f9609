//! ipvlan: lifecycle, modes, chained on another interface, masters, CHECK, refusals.

use std::fs;

use serde_json::{Value, json};

use crate::lane::{self, needs};
use crate::support::lifecycle::{Subject, golden, lifecycle};
use crate::support::net::{Net, addresses, dual_ipam, merged, settles, unplug, wire};
use crate::support::node::{Container, Node, assert_unchanged};
use crate::support::traffic::Place;

const SUBJECT: Subject = Subject {
    plugin: "ipvlan",
    keys: |node| {
        wire(node);
        let ipam = dual_ipam(node);
        json!({"master": "wire0", "mtu": 1400, "ipam": ipam})
    },
    // Results are identical to macvlan's.
    golden: golden!("macvlan"),
    remove_remainder: unplug,
};

const GATEWAY: &str = "10.1.2.1";

/// A network of version 1.1.0 with 10.1.2.0/24 on top of `wire0`, with `keys`.
fn simple<'n>(node: &'n Node, keys: &Value) -> Net<'n> {
    let ipam = node.host_local(&["10.1.2.0/24"]);
    Net::new(node, "ipvlan", "1.1.0", &merged(&json!({"master": "wire0", "ipam": ipam}), keys))
}

/// The next plugin of a chain: without `ipam` and `master`, with the previous plugin's result.
fn chained<'n>(node: &'n Node, prev: &Value) -> Net<'n> {
    simple(node, &json!({"ipam": null, "master": null, "prevResult": prev}))
}

fn prev(interfaces: &Value) -> Value {
    let ips =
        json!([{"version": "4", "address": "10.1.2.2/24", "gateway": GATEWAY, "interface": 0}]);
    json!({"interfaces": interfaces, "ips": ips, "routes": [{"dst": "0.0.0.0/0"}],
           "dns": {"domain": "before.example"}})
}

lifecycle! { SUBJECT, needs lane::IPVLAN;
    add_check_and_del_with_the_golden_result: add_check_del_del,
    traffic_flows_in_all_directions: traffic,
    del_without_a_namespace_releases_addresses: del_without_a_namespace,
    gc_keeps_valid_attachments_and_releases_stale_ones: gc,
    status_tells_of_an_exhausted_range: status,
}

#[test]
fn all_modes_reach_siblings_and_the_gateway() {
    needs!(lane::IPVLAN);
    for (key, kernel) in [("", "l2"), ("l2", "l2"), ("l3", "l3"), ("l3s", "l3s")] {
        let node = Node::new();
        let (outside, one, two) = (Container::new(), Container::new(), Container::new());
        let path = outside.path();
        node.sh(&format!("ip link add wire0 type veth peer name wire1 netns {path}"));
        outside.sh("ip addr add 10.1.2.1/24 dev wire1");
        outside.sh("ip link set wire1 up");
        // In the l3 modes, the host's routing table decides, and return traffic passes through the
        // host.
        node.sh("ip addr add 10.1.2.200/24 dev wire0; ip link set wire0 up");
        if kernel != "l2" {
            outside.sh("ip route add 10.1.2.2/31 via 10.1.2.200");
        }
        let net = simple(&node, &json!({"mode": key, "mtu": 1300}));
        let result = net.add(&one);
        net.call("ADD", "c2").netns(&two.path()).result();
        let link = one.ip("-d link show eth0");
        assert_eq!(link[0]["linkinfo"]["info_data"]["mode"], kernel, "{key}");
        assert_eq!(
            (&link[0]["mtu"], &result["interfaces"][0]["mtu"]),
            (&json!(1300), &json!(1300))
        );
        let master = node.ip("link show wire0");
        assert_eq!(link[0]["address"], master[0]["address"], "the MAC is the master's");
        assert_eq!(result["interfaces"][0]["mac"], master[0]["address"]);
        assert!(one.reaches("10.1.2.3") && two.reaches("10.1.2.2"), "{key}: siblings");
        assert!(one.reaches(GATEWAY) && outside.reaches("10.1.2.3"), "{key}: the network outside");
        net.check(&one, &result).ok();
        net.del(&one);
        assert!(!one.try_sh("ip link show eth0"));
    }
}

#[test]
fn the_interface_of_prev_result_is_the_master() {
    needs!(lane::IPVLAN);
    let node = Node::new();
    wire(&node);
    let container = Container::new();
    let before = (node.snapshot(), container.snapshot(&node));
    let net = chained(&node, &prev(&json!([{"name": "wire0"}])));
    let result = net.add(&container);
    let mac = node.ip("link show wire0")[0]["address"].clone();
    let entry = json!({"name": "eth0", "mac": mac, "mtu": 1500, "sandbox": container.path()});
    assert_eq!(result["interfaces"], json!([entry]));
    let ip = json!({"address": "10.1.2.2/24", "gateway": GATEWAY, "interface": 0});
    assert_eq!(result["ips"], json!([ip]));
    assert_eq!(result["dns"], json!({"domain": "before.example"}));
    assert_eq!(addresses(&container.ip("addr show eth0")), ["10.1.2.2/24"]);
    assert!(container.reaches(GATEWAY));
    for master in [Value::Null, json!("wire0")] {
        net.with(&json!({"master": master})).check(&container, &result).ok();
    }
    net.with(&json!({"prevResult": result})).del(&container);
    settles(&before.1, || container.snapshot(&node));
    assert_unchanged(&before.0, &node.snapshot());
}

#[test]
fn a_chained_master_may_be_in_the_container() {
    needs!(lane::IPVLAN);
    let node = Node::new();
    let container = Container::new();
    let path = container.path();
    node.sh(&format!("ip link add wire1 type veth peer name inner netns {path}"));
    node.sh("ip link set wire1 up; ip addr add 10.1.2.1/24 dev wire1");
    container.sh("ip link set inner up");
    for (entry, keys) in [
        (json!({"name": "inner", "sandbox": path}), json!({})),
        (json!({"name": "inner"}), json!({"linkInContainer": true})),
    ] {
        let net = chained(&node, &prev(&json!([entry]))).with(&keys);
        let result = net.add(&container);
        assert!(container.reaches(GATEWAY));
        net.check(&container, &result).ok();
        net.del(&container);
    }
    container.sh("ip link show inner");
}

#[test]
fn prev_result_without_a_single_named_interface_is_refused() {
    needs!(lane::IPVLAN);
    let node = Node::new();
    wire(&node);
    let container = Container::new();
    let msg = "chained master failure. PrevResult lacks a single named interface";
    for interfaces in [json!([]), json!([{"name": ""}]), json!([{"name": "a"}, {"name": "wire0"}])]
    {
        chained(&node, &prev(&interfaces)).add_is_refused(&container, 7, msg);
    }
    // A named master needs no interface in the result.
    let net = chained(&node, &prev(&json!([]))).with(&json!({"master": "wire0"}));
    net.add(&container);
    net.del(&container);
}

#[test]
fn addresses_of_ipam_replace_those_of_prev_result() {
    needs!(lane::IPVLAN);
    let node = Node::new();
    wire(&node);
    let container = Container::new();
    let ipam = node.host_local(&["10.1.3.0/24"]);
    let net = chained(&node, &prev(&json!([{"name": "wire0"}]))).with(&json!({"ipam": ipam}));
    assert_eq!(net.add(&container)["ips"][0]["address"], "10.1.3.2/24");
    net.del(&container);
    assert_eq!(net.leases(), [""; 0]);
}

#[test]
fn the_master_is_the_default_route_or_in_the_container() {
    needs!(lane::IPVLAN);
    let node = Node::new();
    wire(&node);
    let container = Container::new();
    let net = simple(&node, &json!({"master": null}));
    net.add_is_refused(&container, 999, "no default route interface found");
    node.sh("ip route add default via 10.1.2.77 dev wire1; ip route replace default dev wire0");
    let result = net.add(&container);
    node.sh("ip route del default");
    net.check(&container, &result).ok();
    net.del(&container);
    container.sh("ip link add inner type bridge");
    container.sh("ip link set inner up");
    let net = simple(&node, &json!({"master": "inner", "linkInContainer": true}));
    let result = net.add(&container);
    net.check(&container, &result).ok();
    net.del(&container);
    assert_eq!(net.leases(), [""; 0]);
}

#[test]
fn the_container_may_use_an_interface_name_of_the_host() {
    needs!(lane::IPVLAN);
    let node = Node::new();
    wire(&node);
    node.sh("ip link set wire0 down; ip link set wire0 name eth0; ip link set eth0 up");
    let container = Container::new();
    let net = simple(&node, &json!({"master": "eth0"}));
    net.add(&container);
    assert!(container.reaches(GATEWAY));
    net.del(&container);
    node.sh("ip link show eth0");
}

#[test]
fn a_refused_add_changes_nothing() {
    needs!(lane::IPVLAN);
    let node = Node::new();
    wire(&node);
    let container = Container::new();
    for (keys, code, msg) in [
        (json!({"mode": "l4"}), 7, "unknown ipvlan mode: \"l4\""),
        (json!({"mtu": 1501}), 7, "invalid MTU 1501, must be [0, master MTU(1500)]"),
        (json!({"master": "x"}), 999, "failed to lookup master \"x\": Link not found"),
        (json!({"ipam": null}), 999, "no plugin name provided"),
        (json!({"ipam": {}}), 999, "no plugin name provided"),
    ] {
        simple(&node, &keys).add_is_refused(&container, code, msg);
    }
    let net = simple(&node, &json!({}));
    // ipvlan ignores `CNI_ARGS`.
    net.on("ADD", &container).env("CNI_ARGS", "IgnoreUnknown=1;MAC=zz").result();
    let msg = "failed to create ipvlan: container already has an interface \"eth0\": file exists";
    net.add_is_refused(&container, 999, msg);
    assert_eq!(net.leases(), ["10.1.2.2"]);
    for keys in [json!({"mode": "l4"}), json!({"master": "x"})] {
        let error = net.with(&keys).call("STATUS", "").error();
        assert_eq!(error.code, 50, "{error:?}");
    }
    net.with(&json!({"master": null})).call("STATUS", "").ok();
    // The kernel allows a link only one kind of child (macvlan or ipvlan).
    let other = Container::new();
    let before = (node.snapshot(), other.snapshot(&node));
    let conf = json!({"cniVersion": "1.1.0", "name": "n", "master": "wire0"});
    let call = node.call("macvlan", "ADD").netns(&other.path()).conf(&conf);
    let error = call.error();
    assert!(error.details.contains("children of another kind"), "{error:?}");
    assert_unchanged(&before.0, &node.snapshot());
    assert_unchanged(&before.1, &other.snapshot(&node));
}

#[test]
fn a_failing_add_releases_address_and_interface() {
    needs!(lane::IPVLAN);
    let node = Node::new();
    wire(&node);
    let container = Container::new();
    let before = (node.snapshot(), container.snapshot(&node));
    let log = node.path("calls");
    for (result, msg) in [
        (json!({"ips": []}), "IPAM plugin returned missing IP config"),
        (
            json!({"ips": [{"address": "10.1.2.9/24"}, {"address": "10.1.2.9/24"}]}),
            "failed to add IP addr 10.1.2.9/24 to \"eth0\": ",
        ),
        (
            json!({"ips": [{"address": "10.1.2.9/24"}],
                   "routes": [{"dst": "10.9.0.0/16", "gw": "172.16.0.1"}]}),
            "failed to add route '10.9.0.0/16 via 172.16.0.1 dev eth0': ",
        ),
    ] {
        let result = merged(&json!({"cniVersion": "1.0.0"}), &result);
        let answer = format!("[ $CNI_COMMAND != ADD ] || echo '{result}'");
        let record = format!("echo $CNI_COMMAND >> {}", log.display());
        node.script("odd", &format!("cat >/dev/null; {record}; {answer}"));
        let error = simple(&node, &json!({"ipam": {"type": "odd"}})).on("ADD", &container).error();
        assert!(error.msg.starts_with(msg), "{error:?}");
        assert_eq!(fs::read_to_string(&log).unwrap(), "ADD\nDEL\n");
        fs::remove_file(&log).unwrap();
        settles(&before.0, || node.snapshot());
        settles(&before.1, || container.snapshot(&node));
    }
}

#[test]
fn check_reports_every_kind_of_damage() {
    needs!(lane::IPVLAN);
    for (inside, keys, msg) in [
        (
            "true",
            json!({"mode": "l3"}),
            "Container IPVlan mode l2 does not match expected value: l3",
        ),
        ("true", json!({"master": "wire1"}), "interface \"eth0\" is not on top of \"wire1\""),
        ("true", json!({"master": "x"}), "failed to lookup master \"x\": Link not found"),
        (
            "ip addr del 10.1.2.2/24 dev eth0",
            json!({}),
            "Failed to match addr 10.1.2.2/24 on interface eth0",
        ),
        ("ip link set eth0 down", json!({}), "interface \"eth0\" is down"),
        ("ip link del eth0", json!({}), "Interface name eth0 not found in NETNS"),
        (
            "sh -c 'ip link del eth0; ip link add eth0 up type bridge'",
            json!({}),
            "Error: Container interface eth0 not of type ipvlan",
        ),
    ] {
        let node = Node::new();
        wire(&node);
        let container = Container::new();
        let net = simple(&node, &json!({}));
        let result = net.add(&container);
        net.check(&container, &result).ok();
        container.sh(inside);
        let msg = msg.replace("NETNS", &container.path());
        net.with(&keys).check_finds(&container, &result, &msg);
    }
}

#[test]
fn del_needs_no_master_and_no_good_prev_result() {
    needs!(lane::IPVLAN);
    let node = Node::new();
    wire(&node);
    let container = Container::new();
    let net = simple(&node, &json!({}));
    for keys in [
        json!({"master": null, "prevResult": {"interfaces": 7}}),
        json!({"master": null}),
        json!({"master": "x", "mode": "l4", "mtu": -1}),
    ] {
        net.add(&container);
        net.with(&keys).del(&container);
        assert!(!container.try_sh("ip link show eth0"), "{keys}");
        assert_eq!(net.leases(), [""; 0]);
    }
}

#[test]
fn fifty_containers_share_a_master_concurrently() {
    needs!(lane::IPVLAN);
    crate::macvlan::many_at_once(&|node| simple(node, &json!({})));
}
