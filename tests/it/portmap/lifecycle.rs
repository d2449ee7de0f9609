//! Verbs and versions, configurations, remaining state.

use serde_json::{Value, json};

use super::{ALL, Ports, Rules, mapping, tcp};
use crate::support::node::{MILESTONES, VERSIONS};
use crate::support::strace::{self, Hits};

fn two() -> Value {
    json!([mapping(8080, 80, "tcp"), {"HostPort": 5353, "ContainerPort": 53, "Protocol": "UDP",
        "HostIP": "10.1.2.1"}])
}

#[test]
fn every_version_adds_checks_and_deletes() {
    for (rules, versions) in [(Rules::Nftables, &VERSIONS[..]), (Rules::Iptables, &MILESTONES)] {
        for version in versions {
            let ports = Ports::new(rules, version);
            let pod = ports.pod("c1");
            ports.add(&pod, &two());
            ports.del(&pod, &two());
            let base = ports.state();
            assert!(!base.contains("c1") && !base.contains("CNI-DN"), "{base}");
            ports.add(&pod, &two());
            assert_ne!(ports.state(), base);
            if *version >= "0.4.0" {
                let before = ports.state();
                ports.call("CHECK", &pod, &two()).ok();
                assert_eq!(ports.state(), before);
            }
            ports.del(&pod, &two());
            assert_eq!(ports.state(), base);
            ports.del(&pod, &two());
            assert_eq!(ports.state(), base);
        }
    }
}

#[test]
fn del_needs_neither_namespace_nor_prev_result_nor_ports() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let pod = ports.pod("c1");
        ports.add(&pod, &two());
        ports.del(&pod, &two());
        let base = ports.state();
        let some = json!([mapping(8080, 80, "tcp"), mapping(0, 1, "x")]);
        for known in [two(), json!([]), json!(null), some] {
            ports.add(&pod, &two());
            let net = ports.net(&known, &json!({}));
            ports.path(net.call("DEL", "c1").without("CNI_NETNS")).ok();
            assert_eq!(ports.state(), base, "{rules:?} {known}");
        }
        ports.add(&pod, &two());
        let other = json!({"backend": null});
        ports.path(ports.net(&two(), &other).call("DEL", "c1")).ok();
        assert_eq!(ports.state(), base, "whatever the back end");
    }
}

#[test]
fn a_repeated_add_replaces_the_mappings() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let mut pod = ports.pod("c1");
        let other = json!([mapping(8081, 81, "tcp"), mapping(8080, 82, "tcp")]);
        ports.add(&pod, &other);
        let expected = ports.state();
        ports.del(&pod, &other);
        let prev = pod.prev.clone();
        pod.prev["ips"][0]["address"] = json!("10.1.2.77/24");
        ports.add(&pod, &two());
        pod.prev = prev;
        ports.add(&pod, &other);
        assert_eq!(ports.state(), expected, "{rules:?}");
        ports.call("CHECK", &pod, &other).ok();
    }
}

#[test]
fn add_without_mappings_creates_no_rules() {
    let ports = Ports::new(Rules::Nftables, "1.1.0");
    let pod = ports.pod("c1");
    let before = ports.state();
    for none in [json!([]), json!(null)] {
        ports.add(&pod, &none);
        ports.call("CHECK", &pod, &none).ok();
        ports.del(&pod, &none);
    }
    assert_eq!(ports.state(), before);
    ports.call("DEL", &pod, &two()).ok();
    assert_eq!(ports.state(), before, "DEL makes nothing either");
}

#[test]
fn refusals_change_nothing() {
    let ports = Ports::new(Rules::Nftables, "1.1.0");
    let pod = ports.pod("c1");
    let before = ports.state();
    let mut alone = ports.net(&two(), &json!({}));
    alone.conf["prevResult"] = json!(null);
    let error = alone.call("ADD", "c1").netns(&pod.container.path()).error();
    assert_eq!(error.brief(), (999, "must be called as chained plugin"));
    let port = |key: &str, value: Value| {
        let mut port = mapping(8080, 80, "tcp");
        port[key] = value;
        (json!([port]), json!({}))
    };
    let thousand = &format!("ip saddr {{ {} }}", "192.0.2.7, ".repeat(1000));
    let clash = "Cannot specify externalSetMarkChain and markMasqBit";
    let foreign = "nftables backend was requested but configuration contains iptables-specific options [externalSetMarkChain conditionsV4]";
    let ours = "iptables backend was requested but configuration contains nftables-specific options [conditionsV6]";
    for ((mappings, keys), code, msg) in [
        (port("hostPort", json!(0)), 7, "Invalid host port number: 0"),
        (port("containerPort", json!(-1)), 7, "Invalid container port number: -1"),
        (port("hostPort", json!(65_536)), 7, "Invalid host port number: 65536"),
        (port("protocol", json!("icmp")), 7, "invalid protocol \"icmp\" of host port 8080"),
        (port("hostIP", json!("10.1.2")), 7, "invalid hostIP \"10.1.2\""),
        ((two(), json!({"backend": "ebpf"})), 7, "unrecognized backend \"ebpf\""),
        ((two(), json!({"markMasqBit": 32})), 7, "MasqMarkBit must be between 0 and 31"),
        ((two(), json!({"markMasqBit": 3, "externalSetMarkChain": "X"})), 7, clash),
        (
            (two(), json!({"externalSetMarkChain": "X", "conditionsV4": ["-s", "1.2.3.4"]})),
            7,
            foreign,
        ),
        ((two(), json!({"backend": "iptables", "conditionsV6": ["ip6", "saddr"]})), 7, ours),
        (
            (two(), json!({"conditionsV4": ["tcp", "flags", "syn"]})),
            2,
            "\"conditionsV4\": \"tcp\" is not supported with nftables",
        ),
        (
            (json!([mapping(80, 1, "tcp"), mapping(80, 2, "tcp")]), json!({})),
            7,
            "host port 80/tcp is mapped to two container ports",
        ),
        (
            (two(), json!({"conditionsV4": [thousand, thousand, thousand]})),
            7,
            "\"conditionsV4\": more than 10000 rules for 2 ports",
        ),
    ] {
        let error = ports.call_with("ADD", &pod, &mappings, &keys).error();
        assert_eq!(error.brief(), (code, format!("failed to parse config: {msg}").as_str()));
        assert_eq!(ports.state(), before);
        // DEL does not validate the mappings.
        if error.code != 6 {
            ports.call_with("DEL", &pod, &mappings, &keys).ok();
        }
    }
}

#[test]
fn check_reports_every_kind_of_damage() {
    let ports = Ports::new(Rules::Nftables, "1.1.0");
    let pod = ports.pod("c1");
    ports.add(&pod, &two());
    for (damage, says) in [
        ("delete element inet cnibox_portmap any4 { tcp . 8080 }", "tcp . 8080 is missing in map"),
        ("delete element inet cnibox_portmap mapped4 { 10.1.2.2 }", "10.1.2.2 is missing in map"),
        (
            "flush chain inet cnibox_portmap postrouting",
            "rule \"by container, for an own address\" is missing",
        ),
        ("flush map inet cnibox_portmap attachments", "attachments"),
        ("delete table inet cnibox_portmap", "table inet cnibox_portmap is gone"),
    ] {
        ports.call("CHECK", &pod, &two()).ok();
        ports.node.sh(&format!("nft '{damage}'"));
        let error = ports.call("CHECK", &pod, &two()).error();
        assert!(error.code == 999 && error.msg.contains(says), "{damage}: {error:?}");
        ports.add(&pod, &two());
    }
    ports.node.sh("echo 0 > /proc/sys/net/ipv4/conf/cni0/route_localnet");
    let error = ports.call("CHECK", &pod, &two()).error();
    assert_eq!(error.msg, "sysctl net/ipv4/conf/cni0/route_localnet is not 1");
    let ports = Ports::new(Rules::Iptables, "1.1.0");
    let pod = ports.pod("c1");
    ports.add(&pod, &two());
    for damage in [
        "iptables -t nat -F CNI-HOSTPORT-SETMARK",
        "iptables -t nat -F OUTPUT",
        "ip6tables -t nat -F CNI-HOSTPORT-DNAT",
        "iptables -t nat -F $(iptables -t nat -S | grep -o '^-N CNI-DN.*' | cut -c4-)",
    ] {
        ports.call("CHECK", &pod, &two()).ok();
        ports.node.sh(damage);
        let error = ports.call("CHECK", &pod, &two()).error();
        assert!(error.msg.contains("tables table nat"), "{damage}: {error:?}");
        ports.add(&pod, &two());
    }
}

#[test]
fn repair_claims_no_port_that_another_container_has() {
    let ports = Ports::new(Rules::Nftables, "1.1.0");
    let (one, two) = (ports.pod("c1"), ports.pod("c2"));
    let http = json!([mapping(8080, 80, "tcp")]);
    ports.add(&one, &http);
    ports.node.sh("nft delete element inet cnibox_portmap any4 '{ tcp . 8080 }'");
    ports.node.sh("nft delete element inet cnibox_portmap any6 '{ tcp . 8080 }'");
    ports.add(&two, &http);
    let repair = ports.node.cnibox(&["repair"]).run();
    let taken = "element tcp . 8080 of map inet cnibox_portmap any4 belongs to container \"c2\"";
    assert!(repair.stderr.contains(&format!("not restored: {taken}")), "{repair:?}");
    assert_eq!(
        (repair.status, repair.stdout.contains("restored: element")),
        (Some(1), false),
        "{repair:?}"
    );
    assert!(tcp(&ports.node, &two.container, "10.1.2.1:8080", 80).is_some());
}

#[test]
fn an_element_of_nobody_in_place_of_a_mapping_is_found() {
    let ports = Ports::new(Rules::Nftables, "1.1.0");
    let one = ports.pod("c1");
    let http = json!([mapping(8080, 80, "tcp")]);
    ports.add(&one, &http);
    let replaced = "tcp . 8080 : 10.9.9.9 . 81";
    ports.node.sh(&format!(
        "nft 'delete element inet cnibox_portmap any4 {{ tcp . 8080 }}; add element inet cnibox_portmap any4 {{ {replaced} }}'"
    ));
    let error = ports.call("CHECK", &one, &http).error();
    assert_eq!(error.msg, "element tcp . 8080 of map inet cnibox_portmap any4 has another value");
}

#[test]
fn a_refused_second_add_keeps_the_mappings_of_the_first() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let (one, two) = (ports.pod("c1"), ports.pod("c2"));
        let [http, other] = [8080, 8081].map(|port| json!([mapping(port, 80, "tcp")]));
        ports.add(&one, &http);
        ports.add(&two, &other);
        let before = ports.state();
        assert!(
            ports.call("ADD", &two, &http).error().msg.starts_with("host port 8080/tcp is taken")
        );
        assert_eq!(ports.state(), before, "{rules:?}");
    }
}

#[test]
fn nftables_starts_no_program() {
    let ports = Ports::new(Rules::Nftables, "1.1.0");
    let pod = ports.pod("c1");
    for verb in ["ADD", "CHECK", "DEL", "DEL", "STATUS"] {
        let (outcome, calls) = strace::record(&ports.node, &ports.call(verb, &pod, &two()));
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        let started = calls.iter().filter(|call| call.name.starts_with("exec")).count();
        assert_eq!(started, 1, "{verb}: only the plugin itself");
    }
}

#[test]
fn status_reports_missing_programs() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let net = ports.net(&json!(null), &json!({}));
        ports.path(net.call("STATUS", "")).ok();
        assert!(!ports.node.sh("nft list ruleset").contains("cnibox"), "changes nothing");
    }
    let ports = Ports::new(Rules::Nftables, "1.1.0");
    let bad = ports.net(&json!(null), &json!({"backend": "x"})).call("STATUS", "").error();
    assert_eq!(bad.brief(), (50, "unrecognized backend \"x\""));
    let call = ports.net(&json!(null), &json!({"backend": "iptables"})).call("STATUS", "");
    let script = "mount -t tmpfs none /usr/sbin && PATH=/usr/bin exec \"$0\"";
    let error = call.in_script(script).error();
    assert!(error.code == 50 && error.msg.contains("failed to locate iptables"), "{error:?}");
    assert!(error.details.contains("nftables"), "{error:?}");
}

/// Mappings without a path from 127.0.0.1 do not need the table that protects loopback addresses.
#[test]
fn check_accepts_mappings_without_127_0_0_1() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let (list, mut pod) = (json!([mapping(8080, 80, "tcp")]), ports.pod("c1"));
        let all = pod.prev["ips"].as_array().unwrap().clone();
        let is_v6 = |ip: &&Value| ip["address"].as_str().unwrap().contains(':');
        let v6: Vec<_> = all.iter().filter(is_v6).cloned().collect();
        assert!(!v6.is_empty());
        for (ips, keys) in [(json!(v6), json!({})), (json!(all), json!({"snat": false}))] {
            pod.prev["ips"] = ips;
            ports.call_with("ADD", &pod, &list, &keys).result();
            assert!(!ports.node.sh("nft list ruleset").contains("cnibox_localhost"));
            ports.call_with("CHECK", &pod, &list, &keys).ok();
            ports.path(ports.net(&json!(null), &keys).call("STATUS", "")).ok();
            let repaired = ports.path(ports.node.cnibox(&["repair"])).run();
            assert_eq!(repaired.stdout, "nothing was missing\n");
            ports.call_with("DEL", &pod, &list, &keys).ok();
        }
    }
}

/// A repair restores the recorded ports of a killed ADD: DEL deletes also those from before.
#[test]
fn a_killed_second_add_leaves_nothing_after_a_repair() {
    let ports = Ports::new(Rules::Nftables, "1.1.0");
    let pod = ports.pod("c1");
    let (first, second) = (json!([mapping(8080, 80, "tcp")]), json!([mapping(8081, 81, "tcp")]));
    let left = || ports.node.sh("nft list ruleset | grep 'id: c1' || :");
    let mut killed = Hits::default();
    for when in 1.. {
        ports.add(&pod, &first);
        let injection = format!("sendto,sendmsg:signal=KILL:when={when}");
        let (outcome, hit) =
            strace::inject(&ports.node, &ports.call("ADD", &pod, &second), &injection);
        if hit.is_empty() {
            assert_eq!(outcome.status, Some(0), "{when}: {outcome:?}");
            break;
        }
        killed.extend(&hit);
        assert_eq!(ports.node.cnibox(&["repair"]).run().status, Some(0));
        ports.call("DEL", &pod, &second).ok();
        assert_eq!(left(), "", "{when}");
    }
    killed.assert_include(&["NFT_MSG_NEWSETELEM"]);
}
