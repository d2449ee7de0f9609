//! The bridge, its ports and the container's link.

use serde_json::{Value, json};

use super::{layer2, simple};
use crate::support::net::{addresses, is_mac, is_veth, normal_json, settles};
use crate::support::node::{Container, Node, VERSIONS};
use crate::support::traffic::Place;

const MACS: [&str; 3] = ["02:00:00:00:00:01", "02:00:00:00:00:02", "02:00:00:00:00:03"];

/// Details of a host link (`ip -d`).
fn details(node: &Node, name: &str) -> Value {
    node.ip(&format!("-d link show {name}"))[0].clone()
}

/// The bridge port attributes of the host interface in `result`.
fn port(node: &Node, result: &Value) -> Value {
    let name = result["interfaces"][1]["name"].as_str().unwrap();
    details(node, name)["linkinfo"]["info_slave_data"].clone()
}

#[test]
fn bridge_and_both_ends_have_the_mtu_reported_since_1_1_0() {
    for version in &VERSIONS[2..] {
        let node = Node::new();
        let net = simple(&node, &json!({"cniVersion": version, "mtu": 1400}));
        let container = Container::new();
        let result = net.add(&container);
        for i in 0..3 {
            let expected = if *version == "1.1.0" { json!(1400) } else { Value::Null };
            assert_eq!(result["interfaces"][i]["mtu"], expected, "{version}");
        }
        let veth = result["interfaces"][1]["name"].as_str().unwrap();
        assert_eq!(details(&node, "br0")["mtu"], 1400);
        assert_eq!(details(&node, veth)["mtu"], 1400);
        assert_eq!(container.ip("link show eth0")[0]["mtu"], 1400);
    }
}

#[test]
fn mtu_of_an_existing_bridge_stays() {
    let node = Node::new();
    node.sh("ip link add br0 type bridge");
    // Until the MTU is set explicitly, the kernel keeps it at the minimum of the ports' MTUs.
    node.sh("ip link set br0 mtu 1450");
    let container = Container::new();
    let result = simple(&node, &json!({"mtu": 1400})).add(&container);
    let mtus: Vec<_> = (0..3).map(|i| result["interfaces"][i]["mtu"].clone()).collect();
    assert_eq!(mtus, [1450, 1400, 1400]);
    assert_eq!(details(&node, "br0")["mtu"], 1450);
}

#[test]
fn promisc_mode_sets_the_flag_once_also_on_an_existing_bridge() {
    for (promisc, existing) in [(true, false), (true, true), (false, false), (false, true)] {
        let node = Node::new();
        if existing {
            node.sh("ip link add br0 up type bridge");
        }
        let net = simple(&node, &json!({"promiscMode": promisc}));
        for id in ["c1", "c2"] {
            let container = Container::new();
            net.call("ADD", id).netns(&container.path()).result();
            let promiscuity = &details(&node, "br0")["promiscuity"];
            assert_eq!(*promiscuity, i32::from(promisc), "existing: {existing}");
        }
    }
}

#[test]
fn mac_comes_from_runtime_config_then_args_then_environment() {
    let node = Node::new();
    for sources in 1..8_usize {
        let container = Container::new();
        let given = |bit: usize| (sources & (1 << bit) != 0).then(|| MACS[bit]);
        let mut keys = json!({"args": {"cni": {}}, "RuntimeConfig": {}});
        if let Some(mac) = given(0) {
            keys["RuntimeConfig"]["mac"] = mac.into();
        }
        if let Some(mac) = given(1) {
            keys["args"]["cni"]["mac"] = mac.into();
        }
        let net = simple(&node, &keys);
        let env = given(2).map_or(String::new(), |mac| format!("IgnoreUnknown=1;X=y;MAC={mac}"));
        let result = net.on("ADD", &container).env("CNI_ARGS", &env).result();
        let expected = MACS[sources.trailing_zeros() as usize];
        assert_eq!(result["interfaces"][2]["mac"], expected, "{sources:03b}");
        assert_eq!(container.ip("link show eth0")[0]["address"], expected);
        assert_ne!(result["interfaces"][1]["mac"], expected, "the host's end has its own");
        net.del(&container);
    }
}

#[test]
fn keys_of_cni_args_for_other_plugins_need_ignore_unknown() {
    let node = Node::new();
    let container = Container::new();
    let net = simple(&node, &json!({}));
    let args = "MAC=02-00-00-00-00-0A;IP=10.1.2.77";
    let error = net.on("ADD", &container).env("CNI_ARGS", args).error();
    assert_eq!(error.msg, "ARGS: unknown args [\"IP=10.1.2.77\"]");
    let alone = "MAC=02-00-00-00-00-0A";
    let error = net.on("ADD", &container).env("CNI_ARGS", alone).error();
    assert_eq!(error.msg, "ARGS: unknown args [\"MAC=02-00-00-00-00-0A\"]", "of host-local");
    let args = &format!("IgnoreUnknown=1;{args}");
    let result = net.on("ADD", &container).env("CNI_ARGS", args).result();
    assert_eq!(result["interfaces"][2]["mac"], "02:00:00:00:00:0a");
    assert_eq!(result["ips"][0]["address"], "10.1.2.77/24");
}

#[test]
fn isolated_ports_reach_only_gateway_and_other_ports() {
    let node = Node::new();
    let (one, two, free) = (Container::new(), Container::new(), Container::new());
    let net = simple(&node, &json!({"isGateway": true, "portIsolation": true}));
    let result = net.add(&one);
    assert_eq!(port(&node, &result)["isolated"], true);
    net.call("ADD", "c2").netns(&two.path()).result();
    let open = net.with(&json!({"portIsolation": false}));
    let result = open.call("ADD", "c3").netns(&free.path()).result();
    assert_eq!(port(&node, &result)["isolated"], false);
    assert!(one.reaches("10.1.2.1") && two.reaches("10.1.2.1"), "the gateway");
    assert!(one.reaches("10.1.2.4") && free.reaches("10.1.2.3"), "ports that are not isolated");
    assert!(!one.reaches_within("10.1.2.3", 1), "isolated ports exchange nothing");
}

#[test]
fn hairpin_mode_sends_frames_back_through_their_port() {
    for hairpin in [true, false] {
        let node = Node::new();
        let (container, inner) = (Container::new(), [Container::new(), Container::new()]);
        let result = simple(&node, &json!({"hairpinMode": hairpin})).add(&container);
        assert_eq!(port(&node, &result)["hairpin"], hairpin);
        // Two macvlans in VEPA mode on eth0 reach each other only if the switch port reflects their
        // frames.
        for (i, place) in inner.iter().enumerate() {
            container.sh(&format!("ip link add link eth0 name m{i} type macvlan mode vepa"));
            container.sh(&format!("ip link set m{i} netns {}", place.path()));
            place.sh(&format!("ip addr add 10.1.2.{}/24 dev m{i}", 50 + i));
            place.sh(&format!("ip link set m{i} up"));
        }
        assert_eq!(inner[0].reaches_within("10.1.2.51", 1), hairpin);
    }
}

#[test]
fn an_existing_bridge_keeps_its_index_and_mac() {
    let node = Node::new();
    node.sh("ip link add br0 type bridge");
    let before = details(&node, "br0");
    let keys =
        json!({"isGateway": true, "ipam": node.host_local(&["10.1.2.0/24", "2001:db8:1::/64"])});
    let net = simple(&node, &keys);
    // A bridge without an assigned MAC follows its lowest port. The ports of this bridge have lower
    // MACs, so ADD must pin the bridge's own.
    for n in 0..3 {
        let container = Container::new();
        let result = net.add(&container);
        let now = details(&node, "br0");
        assert_eq!((&now["ifindex"], &now["address"]), (&before["ifindex"], &before["address"]));
        assert_eq!(result["interfaces"][0]["mac"], before["address"], "{n}");
        assert_ne!(result["interfaces"][1]["mac"], before["address"]);
        net.del(&container);
        assert_eq!(details(&node, "br0")["address"], before["address"]);
    }
}

#[test]
fn a_bridge_without_a_mac_gets_one_with_its_gateway() {
    let node = Node::new();
    node.sh("ip link add br0 up type bridge");
    node.sh("ip link add port type veth peer name other; ip link set port master br0");
    node.sh("ip link del port");
    // Without ports the kernel resets a MAC that was not assigned explicitly.
    assert_eq!(details(&node, "br0")["address"], "00:00:00:00:00:00");
    let (one, two) = (Container::new(), Container::new());
    let net = simple(&node, &json!({"isGateway": true}));
    let result = net.add(&one);
    let mac = details(&node, "br0")["address"].clone();
    assert_eq!(result["interfaces"][0]["mac"], mac);
    net.call("ADD", "c2").netns(&two.path()).result();
    net.del(&one);
    assert_eq!(details(&node, "br0")["address"], mac);
    assert!(two.reaches("10.1.2.1"));
}

#[test]
fn a_new_bridge_has_its_own_mac_that_no_port_changes() {
    let node = Node::new();
    let net = layer2(&node, "1.1.0", &json!({}));
    let (one, two) = (Container::new(), Container::new());
    let result = net.add(&one);
    let mac = result["interfaces"][0]["mac"].clone();
    assert_ne!(mac, result["interfaces"][1]["mac"]);
    net.call("ADD", "c2").netns(&two.path()).result();
    node.sh("ip link add low address 00:00:00:00:00:01 type veth peer high");
    node.sh("ip link set low master br0 up");
    assert_eq!(details(&node, "br0")["address"], mac);
}

#[test]
fn router_advertisements_do_not_configure_the_host() {
    let node = Node::new();
    let container = Container::new();
    let result = simple(&node, &json!({})).add(&container);
    for name in ["br0", result["interfaces"][1]["name"].as_str().unwrap()] {
        assert_eq!(node.sh(&format!("cat /proc/sys/net/ipv6/conf/{name}/accept_ra")), "0\n");
    }
}

#[test]
fn layer_2_networks_have_a_link_and_no_address() {
    for version in &VERSIONS[2..] {
        let node = Node::new();
        let container = Container::new();
        let before = (node.snapshot(), container.snapshot(&node));
        let net = layer2(&node, version, &json!({"isDefaultGateway": true}));
        let result = net.add(&container);
        let mut expected = json!({"cniVersion": version, "interfaces": [
            {"name": "br0", "mac": "MAC"}, {"name": "VETH", "mac": "MAC"},
            {"name": "eth0", "mac": "MAC", "sandbox": "NETNS"}]});
        match *version {
            "1.0.0" => {}
            "1.1.0" => (0..3).for_each(|i| expected["interfaces"][i]["mtu"] = 1500.into()),
            _ => expected["dns"] = json!({}),
        }
        assert_eq!(normal_json(&result, &container), expected);
        let link = container.ip("addr show eth0");
        assert_eq!((&link[0]["operstate"], addresses(&link).len()), (&json!("UP"), 0));
        assert_eq!(addresses(&node.ip("addr show br0")), [""; 0], "no gateway without IPAM");
        if *version >= "0.4.0" {
            net.check(&container, &result).ok();
        }
        net.del(&container);
        settles(&before.1, || container.snapshot(&node));
        node.sh("ip link del br0");
        settles(&before.0, || node.snapshot());
    }
}

#[test]
fn layer_2_is_refused_in_0_1_0_and_0_2_0() {
    for version in &VERSIONS[..2] {
        let node = Node::new();
        let container = Container::new();
        let before = (node.snapshot(), container.snapshot(&node));
        let net = layer2(&node, version, &json!({}));
        let error = net.on("ADD", &container).error();
        assert_eq!(error.brief(), (999, "cannot convert: no valid IP addresses"));
        assert_eq!(error.version, **version);
        settles(&before.1, || container.snapshot(&node));
        assert_eq!(details(&node, "br0")["linkinfo"]["info_kind"], "bridge");
        net.del(&container);
        node.sh("ip link del br0");
        settles(&before.0, || node.snapshot());
    }
}

#[test]
fn disable_container_interface_leaves_the_containers_end_down() {
    for version in ["0.3.0", "0.4.0", "1.1.0"] {
        let node = Node::new();
        let container = Container::new();
        let net = layer2(&node, version, &json!({"disableContainerInterface": true}));
        let result = net.add(&container);
        let link = container.ip("addr show eth0");
        assert_eq!((&link[0]["operstate"], &link[0]["addr_info"]), (&json!("DOWN"), &json!([])));
        // The bridge has an IPv6 link-local address and keeps the MAC of the result.
        let bridge = details(&node, "br0");
        assert_eq!(bridge["address"], result["interfaces"][0]["mac"]);
        assert_ne!(bridge["address"], result["interfaces"][1]["mac"]);
        let local = node.sh("ip -6 addr show dev br0 scope link");
        assert!(local.contains("inet6 fe80:"), "{local}");
        assert!(is_veth(result["interfaces"][1]["name"].as_str().unwrap()));
        assert!(is_mac(result["interfaces"][2]["mac"].as_str().unwrap()));
        if version >= "0.4.0" {
            net.check(&container, &result).ok();
        }
        net.del(&container);
    }
    let node = Node::new();
    simple(&node, &json!({"disableContainerInterface": true})).add_is_refused(
        &Container::new(),
        7,
        "cannot use IPAM when DisableContainerInterface flag is set",
    );
}
