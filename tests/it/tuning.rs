//! tuning: lifecycle in every version, attributes from every source, kernel parameters and
//! permissions, backups, CHECK, GC, STATUS, faults; comparison with the reference.

mod backups;
mod permission;
mod reference;

use std::process::Command;

use serde_json::{Value, json};

use crate::support::chained::{Pod, Subject};
use crate::support::net::{FIRST, GATEWAYS, Net, merged};
use crate::support::node::{Container, Node, VERSIONS, eventually};
use crate::support::traffic::Place;

const MAC: &str = "02:00:00:00:00:2a";

const SUBJECT: Subject = Subject {
    plugin: "tuning",
    keys: |node| {
        json!({
            "dataDir": node.state("tuning"),
            "sysctl": {
                "net.ipv4.conf.IFNAME.arp_notify": "1",
                "net/ipv4/ip_local_port_range": "20000 30000",
                "net.core.somaxconn": "128",
            },
            "mac": MAC.to_uppercase(),
            "mtu": 1400,
            "promisc": true,
            "allmulti": true,
            "txQLen": 500,
        })
    },
    result: |result, version| {
        for interface in
            result.get_mut("interfaces").and_then(Value::as_array_mut).into_iter().flatten()
        {
            if interface["name"] == "eth0" {
                interface["mac"] = json!(MAC);
            }
            // Of both ends of the pair.
            if version >= "1.1.0" {
                interface["mtu"] = json!(1400);
            }
        }
    },
    files: "tuning",
    ..Subject::BEHIND_PTP
};

/// Kernel parameters remain after DEL. A subject that tests the rollback of ADD observes them; this
/// one, for tests that end with a DEL, sets none.
const ATTRIBUTES: Subject = Subject {
    keys: |node| json!({"dataDir": node.state("tuning"), "mac": MAC, "mtu": 1400, "allmulti": true}),
    ..SUBJECT
};

fn link(pod: &Pod<'_>) -> Value {
    pod.container.ip("-d link show eth0")[0].clone()
}

/// The kernel's value of an attribute.
fn attribute(pod: &Pod<'_>, name: &str) -> Value {
    let link = link(pod);
    let flag = |flag: &str| json!(link["flags"].as_array().unwrap().contains(&json!(flag)));
    match name {
        "mac" => link["address"].clone(),
        "mtu" => link["mtu"].clone(),
        "promisc" => flag("PROMISC"),
        "allmulti" => flag("ALLMULTI"),
        _ => link["txqlen"].clone(),
    }
}

/// A network of version 1.1.0 with only these keys.
fn bare<'p>(pod: &'p Pod<'_>, keys: &Value) -> Net<'p> {
    let none = json!({"sysctl": null, "mac": null, "mtu": null, "promisc": null, "allmulti": null,
                      "txQLen": null});
    pod.net(&merged(&none, keys))
}

fn each() -> [(&'static str, Value); 5] {
    [
        ("mac", json!(MAC)),
        ("mtu", json!(1454)),
        ("promisc", json!(true)),
        ("allmulti", json!(true)),
        ("txQLen", json!(20000)),
    ]
}

#[test]
fn add_passes_the_result_on_check_agrees_and_del_restores() {
    SUBJECT.add_check_del_del();
}

#[test]
fn del_succeeds_without_prev_result_and_namespace() {
    SUBJECT.del_without(|_, _, _| ());
}

#[test]
fn every_attribute_may_come_from_keys_or_args() {
    for (name, value) in each() {
        for source in ["configuration", "args"] {
            let pod = SUBJECT.pod("1.1.0");
            let before = attribute(&pod, name);
            assert_ne!(before, value);
            let net = match source {
                "args" => bare(&pod, &json!({"args": {"cni": {name: value}}})),
                _ => bare(&pod, &json!({name: value})),
            };
            let result = net.add(&pod.container);
            assert_eq!(attribute(&pod, name), value, "{name} from {source}");
            net.check(&pod.container, &result).ok();
            let text = std::fs::read_to_string(pod.node.state("tuning/c1_eth0.json")).unwrap();
            let backup: Value = serde_json::from_str(&text).unwrap();
            assert_eq!(backup[name], before, "{text}");
            net.del(&pod.container);
            assert_eq!(attribute(&pod, name), before, "{name} from {source}");
        }
    }
}

/// Whether a packet of `size` bytes that may not be fragmented is answered.
fn is_answered(place: &impl Place, target: &str, size: u32) -> bool {
    let arguments = ["-c1", "-W1", "-M", "do", "-s", &(size - 28).to_string(), target];
    place.within(|| Command::new("ping").args(arguments).output().unwrap().status.success())
}

#[test]
fn both_ends_of_a_pair_get_the_mtu() {
    for mtu in [9000, 1400] {
        let pod = SUBJECT.pod("1.1.0");
        let net = bare(&pod, &json!({"mtu": mtu}));
        let outcome = net.on("ADD", &pod.container).run();
        assert_eq!((outcome.status, outcome.stderr.as_str()), (Some(0), ""));
        assert!(is_answered(&pod.container, GATEWAYS[0], mtu), "{mtu}");
        assert!(
            is_answered(&pod.node, FIRST[0], mtu) && !is_answered(&pod.node, FIRST[0], mtu + 1)
        );
        net.del(&pod.container);
        pod.assert_settles_as(&pod.before, "DEL");
    }
}

#[test]
fn add_warns_of_an_end_that_cannot_get_the_mtu() {
    let node = Node::new();
    let (one, two) = (Container::new(), Container::new());
    let bridge = Net::new(
        &node,
        "bridge",
        "1.1.0",
        &json!({"bridge": "br0", "isGateway": true, "ipam": node.host_local(&["10.1.2.0/24"])}),
    );
    bridge.on("ADD", &two).id("c2").result();
    let prev = bridge.add(&one);
    let tuning = |mtu: u32| {
        let keys = json!({"mtu": mtu, "prevResult": prev, "dataDir": node.state("tuning")});
        let outcome = Net::new(&node, "tuning", "1.1.0", &keys).on("ADD", &one).run();
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        outcome.stderr
    };
    for mtu in [1400, 9000] {
        let said = tuning(mtu);
        assert!(said.contains(&format!("mtu {mtu} of \"eth0\": \"br0\" has 1500")), "{said}");
        assert_eq!(node.ip("link show br0")[0]["mtu"], 1500, "the others'");
    }
    assert!(is_answered(&one, "10.1.2.1", 9000), "the host's end follows");
    assert_eq!(tuning(1500), "");

    // A pair whose other end is in a third namespace.
    let third = Container::new();
    third.sh("ip link add far type veth peer name net1");
    third.sh(&format!("ip link set net1 netns {}", one.path()));
    let keys = json!({"mtu": 1400, "prevResult": prev, "dataDir": node.state("tuning")});
    let net = Net::new(&node, "tuning", "1.1.0", &keys);
    let outcome = net.on("ADD", &one).ifname("net1").run();
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    assert!(outcome.stderr.contains("the other end is not on the host"), "{outcome:?}");
}

#[test]
fn a_new_mac_is_announced_behind_any_plugin() {
    let pod = SUBJECT.pod("1.1.0");
    let end = pod.prev["interfaces"][0]["name"].as_str().unwrap();
    pod.container.set_sysctl("net/ipv4/conf/eth0/arp_notify", "0");
    pod.container.set_sysctl("net/ipv6/conf/eth0/ndisc_notify", "0");
    for target in FIRST {
        pod.node
            .sh(&format!("ip neigh replace {target} lladdr 02:00:00:00:00:01 dev {end} nud stale"));
    }
    bare(&pod, &json!({"mac": MAC})).add(&pod.container);
    for target in FIRST {
        let known = || pod.node.ip(&format!("neigh show {target} dev {end}"))[0]["lladdr"] == MAC;
        eventually(&format!("{target} was not announced"), known);
    }
}

#[test]
fn runtime_config_precedes_args_and_args_precede_keys() {
    let pod = SUBJECT.pod("1.1.0");
    let macs = ["02:00:00:00:00:01", "02:00:00:00:00:02", "02:00:00:00:00:03", "02:00:00:00:00:04"];
    let with = |keys: Value, args: &str| {
        bare(&pod, &keys).on("ADD", &pod.container).env("CNI_ARGS", args).result();
        let mac = attribute(&pod, "mac");
        bare(&pod, &keys).del(&pod.container);
        macs.iter().position(|m| mac == *m)
    };
    let env = format!("IgnoreUnknown=true;K8S_POD_NAME=x;MAC={}", macs[1]);
    let runtime = json!({"mac": macs[2]});
    assert_eq!(with(json!({"mac": macs[0]}), ""), Some(0));
    assert_eq!(with(json!({"mac": macs[0]}), &env), Some(1));
    assert_eq!(with(json!({"mac": macs[0], "RuntimeConfig": runtime}), &env), Some(2));
    let args = json!({"cni": {"mac": macs[3]}});
    assert_eq!(
        with(json!({"mac": macs[0], "runtimeConfig": runtime, "args": args}), &env),
        Some(3)
    );
    // A key in `args` takes precedence even with an empty value.
    let args = json!({"cni": {"mac": "", "mtu": 0, "promisc": false}});
    let keys = json!({"mac": macs[0], "mtu": 1300, "promisc": true, "args": args});
    assert_eq!(with(keys, &env), None);
    assert!(!pod.node.state("tuning/c1_eth0.json").exists());
}

#[test]
fn parameters_are_set_in_order_and_args_last() {
    let pod = SUBJECT.pod("1.0.0");
    // Forwarding also sets `conf/*/accept_redirects`, so the last one written wins.
    let order = [
        json!({"net.ipv4.ip_forward": "1", "net.ipv4.conf.IFNAME.forwarding": "0"}),
        json!({"net.ipv4.conf.IFNAME.forwarding": "0", "net.ipv4.ip_forward": "1"}),
    ];
    for (sysctl, expected) in order.iter().zip(["0", "1"]) {
        let text = |net: &Net<'_>| net.conf.to_string();
        let net = bare(&pod, &json!({"sysctl": sysctl}));
        // serde_json sorts keys, so the text is assembled manually.
        let pairs: Vec<String> = match expected {
            "0" => vec![
                r#""net.ipv4.ip_forward":"1""#.into(),
                r#""net.ipv4.conf.IFNAME.forwarding":"0""#.into(),
            ],
            _ => vec![
                r#""net.ipv4.conf.IFNAME.forwarding":"0""#.into(),
                r#""net.ipv4.ip_forward":"1""#.into(),
            ],
        };
        let written = text(&net).replace(&sysctl.to_string(), &format!("{{{}}}", pairs.join(",")));
        pod.container.sh("sh -c 'echo 0 > /proc/sys/net/ipv4/ip_forward'");
        net.on("ADD", &pod.container).stdin(written).result();
        assert_eq!(pod.container.sysctl("net/ipv4/conf/eth0/forwarding"), expected);
    }
    let args = json!({"cni": {"sysctl": {"net/ipv4/ip_default_ttl": "33"}}});
    for conf in [json!({"net.ipv4.ip_default_ttl": "32"}), Value::Null] {
        let net = bare(&pod, &json!({"sysctl": conf, "args": args}));
        let result = net.add(&pod.container);
        assert_eq!(pod.container.sysctl("net/ipv4/ip_default_ttl"), "33");
        net.check(&pod.container, &result).ok();
    }
}

#[test]
fn names_of_interfaces_may_contain_dots() {
    let pod = SUBJECT.pod("1.0.0");
    pod.container.sh("ip link set eth0 down");
    pod.container.sh("ip link set eth0 name eth0.7");
    for (value, key) in [
        ("1", "net.ipv4.conf.IFNAME.arp_notify"),
        ("0", "net/ipv4/conf/eth0.7/arp_notify"),
        ("1", "net.ipv4.conf.eth0/7.arp_notify"),
    ] {
        let net = bare(&pod, &json!({"sysctl": {key: value}}));
        net.on("ADD", &pod.container).ifname("eth0.7").result();
        assert_eq!(pod.container.sysctl("net/ipv4/conf/eth0.7/arp_notify"), value, "{key}");
        net.on("CHECK", &pod.container).ifname("eth0.7").ok();
    }
}

#[test]
fn check_reports_changed_values() {
    let pod = SUBJECT.pod("1.1.0");
    let keys = json!({"sysctl": {"net.ipv4.ip_local_port_range": " 20000  30000 "}, "mac": MAC,
        "mtu": 1400, "promisc": true, "allmulti": true, "txQLen": 500});
    let net = bare(&pod, &keys);
    let prev = net.add(&pod.container);
    net.check(&pod.container, &prev).ok();
    let is = |what: &str| format!("Error: Tuning configured {what}");
    for (change, back, msg) in [
        (
            "sh -c 'echo 2000 3000 > /proc/sys/net/ipv4/ip_local_port_range'",
            "sh -c 'echo 20000 30000 > /proc/sys/net/ipv4/ip_local_port_range'",
            is(
                "value of net/ipv4/ip_local_port_range is  20000  30000 , current value is 2000\t3000",
            ),
        ),
        (
            "ip link set eth0 address 02:00:00:00:00:2b",
            "ip link set eth0 address 02:00:00:00:00:2a",
            is("Ethernet of eth0 is 02:00:00:00:00:2a, current value is 02:00:00:00:00:2b"),
        ),
        (
            "ip link set eth0 mtu 1399",
            "ip link set eth0 mtu 1400",
            is("MTU of eth0 is 1400, current value is 1399"),
        ),
        (
            "ip link set eth0 promisc off",
            "ip link set eth0 promisc on",
            "Error: Tuning link eth0 configured promisc is true, current value is 0".to_owned(),
        ),
        (
            "ip link set eth0 allmulticast off",
            "ip link set eth0 allmulticast on",
            is("all-multicast mode of eth0 is true, current value is false"),
        ),
        (
            "ip link set eth0 txqueuelen 501",
            "ip link set eth0 txqueuelen 500",
            is("Transmit Queue Length of eth0 is 500, current value is 501"),
        ),
    ] {
        pod.container.sh(change);
        net.check_finds(&pod.container, &prev, &msg);
        pod.container.sh(back);
        net.check(&pod.container, &prev).ok();
    }
    let off = net.with(&json!({"promisc": false}));
    off.check_finds(
        &pod.container,
        &prev,
        "Error: Tuning link eth0 configured promisc is false, current value is 1",
    );
    net.with(&json!({"promisc": null})).check(&pod.container, &prev).ok();
    net.with(&json!({"prevResult": null})).check_finds(
        &pod.container,
        &Value::Null,
        "Required prevResult missing",
    );
    pod.container.sh("ip link del eth0");
    net.check_finds(&pod.container, &prev, "Cannot find container link eth0");
}

#[test]
fn refusals_change_nothing() {
    let pod = SUBJECT.pod("1.1.0");
    let sysctl = |key: &str, value: &str| json!({"net.ipv4.ip_default_ttl": "32", key: value});
    let mut cases = vec![
        (json!({"prevResult": null}), 999, "Required prevResult missing"),
        (
            json!({"sysctl": sysctl("kernel.hostname", "x")}),
            7,
            "invalid net sysctl key: \"kernel/hostname\"",
        ),
        (
            json!({"sysctl": sysctl("net/ipv4/ip_default_ttl", "1")}),
            7,
            "duplicated sysctl keys are not allowed",
        ),
        (
            json!({"sysctl": sysctl("net.ipv4.no_such", "1")}),
            999,
            "read sysctl net/ipv4/no_such: no such file or directory",
        ),
        (
            json!({"sysctl": sysctl("net/../kernel/hostname", "1")}),
            999,
            "read sysctl net/kernel/hostname: no such file or directory",
        ),
        (
            json!({"sysctl": sysctl("net.ipv4.tcp_sack", "x")}),
            999,
            "write sysctl net/ipv4/tcp_sack=x: invalid argument",
        ),
        (
            json!({"mac": "xyz"}),
            7,
            "invalid args xyz for MAC addr: address xyz: invalid MAC address",
        ),
        (json!({"mtu": 5_000_000_000_u64}), 7, "mtu 5000000000 is larger than any link's"),
        (json!({"txQLen": -1}), 7, "txQLen -1 is not a length of a queue"),
        (json!({"profile": "loose"}), 7, "unknown profile \"loose\""),
        (
            json!({"dataDir": "/proc/no/where"}),
            7,
            "dataDir \"/proc/no/where\" may be of a container",
        ),
        (
            json!({"allmulti": true, "mtu": 20, "mac": MAC, "txQLen": 5}),
            7,
            "mtu 20 takes the address 2001:db8:1::2/64 off \"eth0\"",
        ),
        (
            json!({"mac": "01:00:00:00:00:01"}),
            7,
            "invalid args 01:00:00:00:00:01 for MAC addr: address 01:00:00:00:00:01: not a unicast address, but multicast",
        ),
    ];
    cases.push((
        json!({"sysctl": {"net.ipv4.ip_default_ttl": 7}}),
        6,
        "failed to load netconf: expected a text, found the number 7",
    ));
    let ttl = pod.container.sysctl("net/ipv4/ip_default_ttl");
    for (keys, code, msg) in cases {
        pod.plain().with(&keys).add_is_refused(&pod.container, code, msg);
        assert_eq!(pod.container.sysctl("net/ipv4/ip_default_ttl"), ttl, "{keys}");
        assert_eq!(pod.container.sysctl("net/core/somaxconn"), "4096", "{keys}");
        assert_eq!(pod.state().files, [""; 0], "{keys}");
    }
    let call = pod.plain().on("ADD", &pod.container).ifname("eth9");
    pod.plain().is_refused(
        &call,
        &pod.container,
        (999, "read sysctl net/ipv4/conf/eth9/arp_notify: no such file or directory"),
    );
    let call = bare(&pod, &json!({"mtu": 1400})).on("ADD", &pod.container).ifname("eth9");
    pod.plain().is_refused(&call, &pod.container, (999, "failed to get \"eth9\": Link not found"));
}

#[test]
fn the_result_changes_for_the_container_interface_only() {
    let pod = SUBJECT.pod("1.0.0");
    let mut prev = pod.prev.clone();
    let list = prev["interfaces"].as_array_mut().unwrap();
    list[0]["name"] = json!("eth0");
    list.push(json!({"name": "eth1", "mac": "02:00:00:00:00:09", "sandbox": pod.container.path()}));
    let result = pod.net(&json!({"prevResult": prev})).add(&pod.container);
    prev["interfaces"][1]["mac"] = json!(MAC);
    assert_eq!(result, prev);
}

#[test]
fn status_reports_what_add_would_refuse() {
    for version in VERSIONS {
        let pod = SUBJECT.pod(version);
        let status = |keys: Value| pod.net(&keys).call("STATUS", "").without("CNI_CONTAINERID");
        if version < "1.1.0" {
            assert_eq!(
                status(json!({})).error().brief(),
                (1, "config version does not allow STATUS")
            );
            continue;
        }
        let before = pod.state();
        status(json!({})).ok();
        let error = status(json!({"mac": "x"})).error();
        assert_eq!(
            error.brief(),
            (50, "invalid args x for MAC addr: address x: invalid MAC address")
        );
        let error = status(json!({"sysctl": {"kernel.x": "1"}})).error();
        assert_eq!(error.brief(), (50, "invalid net sysctl key: \"kernel/x\""));
        let error = status(json!({"dataDir": "/proc/no"})).error();
        let msg = "dataDir \"/proc/no\" may be of a container";
        assert_eq!(error.brief(), (50, msg));
        pod.assert_as(&before, "STATUS");
    }
}

#[test]
fn a_failing_add_leaves_nothing_at_any_system_call() {
    const WITH_PARAMETERS: Subject = Subject {
        keys: |node| {
            // The parameters are set to their current values, so that the state after DEL equals
            // the state before.
            let mut keys = (ATTRIBUTES.keys)(node);
            keys["sysctl"] =
                json!({"net.ipv4.conf.IFNAME.arp_filter": "0", "net.core.somaxconn": "4096"});
            keys
        },
        sysctls: &["net/ipv4/conf/eth0/arp_filter", "net/core/somaxconn"],
        ..SUBJECT
    };
    WITH_PARAMETERS.no_add_leaves_anything(&["open", "write", "rename", "RTM_NEWLINK"]);
}

#[test]
fn a_failed_add_restores_parameters() {
    let pod = SUBJECT.pod("1.0.0");
    let keys =
        ["net/ipv4/conf/eth0/arp_notify", "net/ipv4/ip_local_port_range", "net/core/somaxconn"];
    let values = || keys.map(|key| pod.container.sysctl(key));
    let before = values();
    let flush = json!({"net.ipv4.route.flush": "1", "net.core.somaxconn": "77", "net.ipv4.tcp_sack": "nonsense"});
    for keys in [json!({"mtu": 20}), json!({"sysctl": flush}), json!({"dataDir": "/proc/no"})] {
        assert_eq!(pod.plain().with(&keys).on("ADD", &pod.container).run().status, Some(1));
        assert_eq!(values(), before);
    }
    let net = bare(&pod, &json!({"sysctl": {"net.ipv4.route.flush": "1"}}));
    let prev = net.add(&pod.container);
    net.check(&pod.container, &prev).ok();
}

#[test]
fn add_rolls_back_if_its_result_cannot_be_written() {
    let pod = ATTRIBUTES.pod("1.0.0");
    let before = pod.state();
    let call = pod.plain().on("ADD", &pod.container).in_script("exec \"$0\" >/dev/full");
    assert_eq!(call.run().status, Some(1));
    pod.assert_as(&before, "no room for the result");
}

#[test]
fn an_add_or_del_killed_anywhere_is_cleaned_up_by_del() {
    ATTRIBUTES
        .survives_kill(&["open", "write", "rename", "RTM_NEWLINK"], &["unlink", "RTM_NEWLINK"]);
}

/// An MTU below 1280 and a sysctl take IPv6 addresses off the interface, which the result would
/// still list.
#[test]
fn addresses_of_earlier_plugins_are_kept() {
    let (node, container) = (Node::new(), Container::new());
    let ipam = node.host_local(&["10.1.0.0/24", "fd00:1::/64"]);
    let ptp = json!({"cniVersion": "1.0.0", "name": "n", "ipam": ipam});
    let prev = node.call("ptp", "ADD").netns(&container.path()).conf(&ptp).result();
    let add = |keys: &Value| {
        let conf = json!({"cniVersion": "1.0.0", "name": "n", "prevResult": prev});
        node.call("tuning", "ADD").netns(&container.path()).conf(&merged(&conf, keys))
    };
    for keys in [
        json!({"mtu": 1279}),
        json!({"args": {"cni": {"mtu": 576}}}),
        json!({"sysctl": {"net.ipv6.conf.IFNAME.disable_ipv6": "1"}}),
        json!({"sysctl": {"net/ipv6/conf/all/disable_ipv6": "1"}}),
    ] {
        let error = add(&keys).error();
        assert!(
            error.code == 7 && error.msg.contains("takes the address fd00:1::2/64"),
            "{error:?}"
        );
        assert!(container.sh("ip -6 addr show dev eth0").contains("fd00:1::2/64"), "{keys}");
    }
    add(&json!({"mtu": 1280, "sysctl": {"net.ipv6.conf.IFNAME.disable_ipv6": "0"}})).result();
    assert!(container.sh("ip -6 addr show dev eth0").contains("fd00:1::2/64"));
    for mtu in [-1, -1400] {
        assert_eq!(add(&json!({"mtu": mtu})).error().code, 7, "{mtu}");
    }
}
