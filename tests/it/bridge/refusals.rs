//! Invalid configurations and host states: error code, message, and no change.

use serde_json::json;

use super::{layer2, simple};
use crate::support::net::{no_veth_remains, settles};
use crate::support::node::{Container, Node, assert_unchanged};

#[test]
fn keys_of_the_wrong_type_are_named() {
    let node = Node::new();
    let container = Container::new();
    for (key, value) in [
        ("bridge", json!(7)),
        ("isGateway", json!("true")),
        ("portIsolation", json!("true")),
        ("mtu", json!("1500")),
        ("mtu", json!(1500.5)),
        ("vlan", json!("7")),
        ("vlanTrunk", json!({})),
        ("args", json!([])),
        ("args", json!({"cni": 7})),
        ("runtimeConfig", json!({"mac": 7})),
        ("ipam", json!("host-local")),
        ("ipam", json!({"type": 7})),
        ("dns", json!({"nameservers": "192.0.2.1"})),
    ] {
        let net = simple(&node, &json!({key: value}));
        let before = node.snapshot();
        let error = net.on("ADD", &container).error();
        assert_eq!(error.code, 6, "{key}: {error:?}");
        let named = format!("{} {}", error.msg, error.details).to_lowercase();
        assert!(named.contains(&key.to_lowercase()), "{key}: {error:?}");
        assert_unchanged(&before, &node.snapshot());
    }
}

#[test]
fn impossible_values_are_refused() {
    let node = Node::new();
    let container = Container::new();
    let vlan = |id: i32| format!("invalid VLAN ID {id} (must be between 0 and 4094)");
    let mtu = |mtu: u64| format!("invalid MTU {mtu}, must be 0, or 68 to 65535");
    let both = "cannot set hairpin mode and promiscuous mode at the same time";
    for (keys, code, msg) in [
        (json!({"vlan": -100}), 7, vlan(-100)),
        (json!({"vlan": 5000}), 7, vlan(5000)),
        (json!({"vlan": 4095}), 7, vlan(4095)),
        (json!({"hairpinMode": true, "promiscMode": true}), 7, both.to_owned()),
        (json!({"mtu": 4_294_967_296_u64}), 7, mtu(4_294_967_296)),
        (json!({"mtu": 65_536}), 7, mtu(65_536)),
        (json!({"mtu": 10}), 7, mtu(10)),
        (
            json!({"bridge": "a-name-of-16-byt"}),
            7,
            "bridge name \"a-name-of-16-byt\": interface name is too long".to_owned(),
        ),
        (json!({"bridge": ""}), 7, "bridge name \"\": interface name is empty".to_owned()),
        (
            json!({"bridge": "a/b"}),
            7,
            "bridge name \"a/b\": interface name contains / or : or whitespace characters"
                .to_owned(),
        ),
        (json!({"runtimeConfig": {"mac": "zz"}}), 7, "address zz: invalid MAC address".to_owned()),
        (
            json!({"args": {"cni": {"mac": "02:00:00"}}}),
            7,
            "address 02:00:00: invalid MAC address".to_owned(),
        ),
    ] {
        simple(&node, &keys).add_is_refused(&container, code, &msg);
    }
}

#[test]
fn invalid_trunk_entries_get_the_references_errors() {
    let node = Node::new();
    let container = Container::new();
    let missing = "minID and maxID should be configured simultaneously,";
    for (entry, msg) in [
        (json!({"minID": 0, "maxID": 9}), "incorrect trunk minID parameter".to_owned()),
        (json!({"minID": 4095, "maxID": 9}), "incorrect trunk minID parameter".to_owned()),
        (json!({"minID": 1, "maxID": 4095}), "incorrect trunk maxID parameter".to_owned()),
        (
            json!({"minID": 9, "maxID": 8}),
            "minID is greater than maxID in trunk parameter".to_owned(),
        ),
        (json!({"maxID": 8}), format!("{missing} minID is missing")),
        (json!({"minID": 8}), format!("{missing} maxID is missing")),
        (json!({"id": 0}), "incorrect trunk id parameter".to_owned()),
        (json!({"id": 4095}), "incorrect trunk id parameter".to_owned()),
        (json!({"id": -1}), "incorrect trunk id parameter".to_owned()),
    ] {
        let net = simple(&node, &json!({"vlanTrunk": [{"id": 5}, entry]}));
        net.add_is_refused(&container, 7, &msg);
    }
    let null = simple(&node, &json!({"vlanTrunk": [null]}));
    assert_eq!(null.on("ADD", &container).error().code, 6);
}

#[test]
fn ip_masq_without_ipam_adds_no_rules() {
    let node = Node::new();
    layer2(&node, "1.1.0", &json!({"ipMasq": true})).add(&Container::new());
    assert_eq!(node.sh("nft list ruleset"), "");
}

#[test]
fn a_link_with_the_bridges_name_is_not_changed() {
    let node = Node::new();
    node.sh("ip link add br0 type veth peer name other");
    let container = Container::new();
    for keys in [json!({}), json!({"promiscMode": true, "mtu": 1400}), json!({"isGateway": true})] {
        let net = simple(&node, &keys);
        let msg = "failed to create bridge \"br0\": \"br0\" already exists but is not a bridge";
        net.add_is_refused(&container, 999, msg);
        assert_eq!(node.ip("-d link show br0")[0]["promiscuity"], 0);
        let status = net.call("STATUS", "").error();
        assert_eq!(status.brief(), (50, "\"br0\" already exists but is not a bridge"));
        net.del(&container);
    }
}

#[test]
fn an_interface_name_in_use_is_refused() {
    let node = Node::new();
    let container = Container::new();
    node.sh("ip link add br0 address 02:00:00:00:00:0b up type bridge");
    container.sh("ip link add eth0 type veth peer name x");
    let before = (node.snapshot(), container.snapshot(&node));
    let error = simple(&node, &json!({})).on("ADD", &container).error();
    let start = "container veth name (\"eth0\") peer provided (\"veth";
    assert!(error.code == 999 && error.msg.starts_with(start), "{error:?}");
    assert!(error.msg.ends_with("\") already exists"), "{error:?}");
    settles(&before.0, || node.snapshot());
    assert_unchanged(&before.1, &container.snapshot(&node));
}

#[test]
fn a_second_add_is_refused_and_the_first_lease_stays() {
    let node = Node::new();
    let container = Container::new();
    let net = simple(&node, &json!({"isGateway": true}));
    let result = net.add(&container);
    let before = (node.snapshot(), container.snapshot(&node));
    let error = net.on("ADD", &container).error();
    assert!(error.msg.contains("already exists"), "{error:?}");
    settles(&before.0, || node.snapshot());
    assert_unchanged(&before.1, &container.snapshot(&node));
    assert_eq!(net.leases(), ["10.1.2.2"]);
    net.check(&container, &result).ok();
}

#[test]
fn an_invalid_namespace_is_code_8_and_del_releases() {
    let node = Node::new();
    let net = simple(&node, &json!({"isGateway": true}));
    let file = node.path("plain");
    std::fs::write(&file, "").unwrap();
    let file = file.display().to_string();
    for (path, why) in [
        (file.as_str(), format!("unknown FS magic on \"{file}\": ")),
        ("/no/such", "failed to Statfs \"/no/such\": no such file or directory".to_owned()),
    ] {
        let before = node.snapshot();
        let error = net.call("ADD", "c1").netns(path).error();
        let start = format!("failed to open netns \"{path}\": {why}");
        assert!(error.code == 8 && error.msg.starts_with(&start), "{error:?}");
        assert_unchanged(&before, &node.snapshot());
        let container = Container::new();
        net.add(&container);
        net.call("DEL", "c1").netns(path).ok();
        assert_eq!(net.leases(), [""; 0]);
        net.del(&container);
        node.sh("ip link del br0");
    }
}

#[test]
fn a_namespace_of_another_kind_is_no_network_namespace() {
    let node = Node::new();
    let net = simple(&node, &json!({}));
    let before = node.snapshot();
    let error = net.call("ADD", "c1").netns("/proc/self/ns/mnt").error();
    assert_eq!(error.code, 8, "{error:?}");
    assert!(error.msg.contains("/proc/self/ns/mnt"), "{error:?}");
    assert_unchanged(&before, &node.snapshot());
}

#[test]
fn cni_args_are_validated_on_add_only() {
    let node = Node::new();
    let container = Container::new();
    let net = simple(&node, &json!({}));
    for (args, msg) in [
        ("A=1", "ARGS: unknown args [\"A=1\"]"),
        ("none", "ARGS: invalid pair \"none\""),
        ("MAC=zz", "address zz: invalid MAC address"),
        ("MAC=a=b", "ARGS: invalid pair \"MAC=a=b\""),
    ] {
        let before = node.snapshot();
        let error = net.on("ADD", &container).env("CNI_ARGS", args).error();
        assert_eq!(error.msg, msg);
        assert_unchanged(&before, &node.snapshot());
    }
    let k8s = "IgnoreUnknown=1;K8S_POD_NAMESPACE=a;K8S_POD_NAME=b;K8S_POD_UID=c";
    net.on("ADD", &container).env("CNI_ARGS", k8s).result();
    net.on("DEL", &container).env("CNI_ARGS", "MAC=zz;A=1").ok();
    no_veth_remains(&node);
    assert_eq!(net.leases(), [""; 0]);
}

#[test]
fn add_rolls_back_if_the_kernel_refuses_the_mtu() {
    let node = Node::new();
    node.sh("ip link add br0 address 02:00:00:00:00:0b up type bridge");
    let container = Container::new();
    // The minimum MTU of IPv6 is 1280 bytes, RFC 8200 section 5.
    let net = simple(&node, &json!({"mtu": 1279, "ipam": node.host_local(&["fd00:12::/64"])}));
    let before = (node.snapshot(), container.snapshot(&node));
    let error = net.on("ADD", &container).error();
    assert!(error.code == 999 && error.details.contains("MTU is below 1280"), "{error:?}");
    settles(&before.0, || node.snapshot());
    settles(&before.1, || container.snapshot(&node));
    let error = simple(&node, &json!({"mtu": -1})).on("ADD", &container).error();
    assert_eq!((error.code, error.msg.as_str()), (7, "invalid MTU -1, must be 0, or 68 to 65535"));
    settles(&before.1, || container.snapshot(&node));
}

#[test]
fn exhausted_ranges_leave_no_link() {
    let node = Node::new();
    let keys = json!({"isGateway": true, "ipam": node.host_local(&["10.1.2.0/30"])});
    let net = simple(&node, &keys);
    let (one, two) = (Container::new(), Container::new());
    net.add(&one);
    let before = (node.snapshot(), two.snapshot(&node));
    let error = net.call("ADD", "c2").netns(&two.path()).error();
    let msg =
        "failed to allocate for range 0: no IP addresses available in range set: 10.1.2.1-10.1.2.2";
    assert_eq!(error.brief(), (999, msg));
    settles(&before.0, || node.snapshot());
    settles(&before.1, || two.snapshot(&node));
}
