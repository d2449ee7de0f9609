//! `ipMasqExcept` and `ipMasqRandomFully` with every back end.

use cnibox::testing::netfilter::{PacketFilter, hand_over_to_reference};
use serde_json::{Value, json};

use super::{BACKENDS, HOST, Masq, OUTSIDE, each_back_end, lines_of, outside, rules, seen};
use crate::support::node::{Container, Node};
use crate::support::traffic::Place;

/// The addresses of the first container, and those of the second one.
const ONE: [&str; 2] = ["10.1.2.2", "2001:db8:1::2"];
const TWO: [&str; 2] = ["10.1.2.3", "2001:db8:1::3"];
/// The addresses of the external machine that are exceptions.
const EXCEPTED: [&str; 2] = ["198.51.100.2", "2001:db8:fe::2"];

/// A machine next to the host that has a network of exceptions, too.
fn outside_with_exceptions(node: &Node) -> Container {
    let outside = outside(node);
    node.sh("ip addr add 198.51.100.1/24 dev out0");
    node.sh("ip addr add 2001:db8:fe::1/64 dev out0 nodad");
    outside.sh("ip addr add 198.51.100.2/24 dev peer0");
    outside.sh("ip addr add 2001:db8:fe::2/64 dev peer0 nodad");
    outside
}

fn keys() -> Value {
    json!({"ipMasqExcept": ["203.0.113.0/24", "198.51.100.77/24", "2001:db8:fe::2"]})
}

/// Whether the sources in both families are the container's for exceptions, and the host's
/// otherwise.
#[track_caller]
fn is_excepted(container: &Container, outside: &Container, own: [&str; 2]) {
    for at in [0, 1] {
        assert_eq!(seen(container, outside, EXCEPTED[at]), own[at]);
        assert_eq!(seen(container, outside, OUTSIDE[at]), HOST[at]);
    }
}

#[track_caller]
fn is_masqueraded(container: &Container, outside: &Container) {
    for (to, from) in [(EXCEPTED[0], "198.51.100.1"), (EXCEPTED[1], "2001:db8:fe::1")] {
        assert_eq!(seen(container, outside, to), from);
    }
}

#[test]
fn exceptions_see_the_address_of_the_container() {
    for plugin in ["bridge", "ptp"] {
        each_back_end(|node, masq| {
            let plain = masq(plugin);
            let masq = plain.with(&keys());
            let (outside, one, two) =
                (outside_with_exceptions(node), Container::new(), Container::new());
            let warm = Container::new();
            plain.add("c0", &warm);
            plain.call("DEL", "c0", &warm.path()).ok();
            // With iptables-legacy it creates a table.
            masq.call("STATUS", "", "").without("CNI_CONTAINERID").ok();
            node.sh(&format!("rm -rf {}", node.path("leases").display()));
            let empty = rules(node);
            let first = masq.add("c1", &one);
            plain.add("c2", &two);
            is_excepted(&one, &outside, ONE);
            is_masqueraded(&two, &outside);
            assert_eq!(seen(&one, &two, TWO[0]), ONE[0], "inside the subnet");
            let check = masq.with(&json!({"prevResult": first}));
            check.call("CHECK", "c1", &one.path()).ok();
            masq.del("c1");
            assert_eq!(lines_of(node, "c1"), 0, "{}", rules(node));
            assert!(!rules(node).contains("203.0.113"), "{}", rules(node));
            is_masqueraded(&two, &outside);
            plain.del("c2");
            assert_eq!(rules(node), empty);
        });
    }
}

/// Each of two attachments of a container that share the chain of iptables has its own exceptions.
#[test]
fn exceptions_are_those_of_one_attachment() {
    each_back_end(|node, masq| {
        let plain = masq("bridge");
        let (outside, one) = (outside_with_exceptions(node), Container::new());
        plain.add("c1", &one);
        let alone = rules(node);
        let ipam = node.host_local(&["10.1.2.0/24", "2001:db8:1::/64"]);
        let other = plain.with(&keys()).with(&json!({ "ipam": ipam }));
        let on_eth1 = |verb: &str, prev: Value| {
            let known = other.with(&json!({"prevResult": prev}));
            known.call(verb, "c1", &one.path()).ifname("eth1")
        };
        let second = on_eth1("ADD", Value::Null).result();
        on_eth1("CHECK", second.clone()).ok();
        is_masqueraded(&one, &outside);
        on_eth1("DEL", second).ok();
        assert_eq!(rules(node), alone);
    });
}

/// A single rule of an exception that is gone is reported by CHECK, and comes back, as after a
/// flush of everything.
#[test]
fn exceptions_are_restored() {
    each_back_end(|node, masq| {
        let (masq, one) = (masq("ptp").with(&keys()), Container::new());
        let outside = outside_with_exceptions(node);
        let prev = masq.add("c1", &one);
        let whole = rules(node);
        let check = masq.with(&json!({"prevResult": prev})).call("CHECK", "c1", &one.path());
        check.ok();
        let of_family = |program: &str, from: &str| {
            format!(
                "(echo '*nat'; {program}-save -t nat | grep -e '-s {from} -d ' | \
                 sed 's/^-A/-D/'; echo COMMIT) | {program}-restore -n; "
            )
        };
        let in_families = [("iptables", "10.1.2.2/32"), ("ip6tables", "2001:db8:1::2/128")];
        let mut damages: Vec<String> =
            in_families.iter().map(|(program, from)| of_family(program, from)).collect();
        damages.push(["iptables", "ip6tables"].map(|p| format!("{p} -t nat -F; ")).concat());
        if masq.net.conf["ipMasqBackend"] == "nftables" {
            let chain = |subnet: &str| {
                let listed = format!("nft list chains | grep -o '{subnet}[^ ]*'");
                format!("nft flush chain inet cnibox_masquerade $({listed})")
            };
            damages = vec![
                chain("subnet-10.1"),
                chain("subnet-2001"),
                "nft flush ruleset".to_owned(),
                "nft delete element inet cnibox_masquerade pods4 '{ 10.1.2.2 }'".to_owned(),
            ];
        }
        for damage in damages {
            node.sh(&format!("PATH={}; {damage}", masq.path));
            assert_ne!(rules(node), whole, "{damage}");
            let error = check.error();
            assert_eq!(error.code, 999, "{damage}: {error:?}");
            assert_eq!(error.details, "\"cnibox repair\" restores all rules of this host");
            let doctor = node.cnibox(&["doctor"]).env("PATH", &masq.path).run();
            assert!(doctor.stdout.contains(&error.msg), "{error:?}: {doctor:?}");
            let repair = node.cnibox(&["repair"]).env("PATH", &masq.path);
            assert_eq!(repair.run().status, Some(0), "{damage}");
            check.ok();
            is_excepted(&one, &outside, ONE);
        }
    });
}

#[test]
fn ports_are_random_in_both_families() {
    for plugin in ["bridge", "ptp"] {
        each_back_end(|node, masq| {
            let plain = masq(plugin);
            let masq = plain.with(&json!({"ipMasqRandomFully": true}));
            let (outside, one, two) = (outside(node), Container::new(), Container::new());
            let prev = masq.add("c1", &one);
            plain.add("c2", &two);
            let text = rules(node);
            let (random, listed) = if masq.net.conf["ipMasqBackend"] == "nftables" {
                ("masquerade fully-random", "masquerade")
            } else {
                ("-j MASQUERADE --random-fully", "-j MASQUERADE")
            };
            let lines = |word: &str| text.lines().filter(|line| line.contains(word)).count();
            // iptables-nft is listed by nft, too, which prints the rules of extensions in its way.
            assert_eq!(lines(random), 2, "{text}");
            assert!(lines(listed) >= 4, "{text}");
            for (to, from) in OUTSIDE.into_iter().zip(HOST) {
                assert_eq!(seen(&one, &outside, to), from);
                assert!(one.reaches(to), "answers come back");
            }
            masq.with(&json!({"prevResult": prev})).call("CHECK", "c1", &one.path()).ok();
            masq.del("c1");
            assert!(!rules(node).contains("random"), "{}", rules(node));
        });
    }
}

/// A configuration that is edited after ADD changes nothing for running containers.
#[test]
fn options_are_those_of_the_attachment() {
    each_back_end(|node, masq| {
        let plain = masq("bridge");
        let both = plain.with(&keys()).with(&json!({"ipMasqRandomFully": true}));
        let outside = outside_with_exceptions(node);
        let (one, two) = (Container::new(), Container::new());
        let record = |id: &str| {
            node.sh(&format!("grep -l '\"id\":\"{id}\"' -r /run/cni/cnibox | xargs cat"))
        };
        let first = both.add("c1", &one);
        let second = plain.add("c2", &two);
        assert!(record("c1").contains("203.0.113.0/24"), "{}", record("c1"));
        assert!(!record("c2").contains("options"), "{}", record("c2"));
        let check = |masq: &Masq<'_>, prev: &Value, id: &str, container: &Container| {
            masq.with(&json!({"prevResult": prev})).call("CHECK", id, &container.path()).ok();
        };
        check(&plain, &first, "c1", &one);
        check(&both, &second, "c2", &two);
        let text = rules(node);
        let repair = node.cnibox(&["repair"]).env("PATH", &plain.path);
        assert_eq!(repair.run().status, Some(0));
        assert_eq!(rules(node), text);
        is_excepted(&one, &outside, ONE);
        is_masqueraded(&two, &outside);
        let valid = json!([{"containerID": "c2", "ifname": "eth0"}]);
        let gc = plain.with(&json!({"cni.dev/valid-attachments": valid}));
        gc.call("GC", "", "").without("CNI_CONTAINERID").ok();
        assert!(!rules(node).contains("203.0.113"), "{}", rules(node));
        is_masqueraded(&two, &outside);
    });
}

/// The reference has rules for single addresses, which hold the exceptions, too.
#[test]
fn exceptions_are_handed_over() {
    let node = Node::new();
    let masq = Masq::new(&node, "ptp", BACKENDS[0]).with(&keys());
    let masq = masq.with(&json!({"ipMasqRandomFully": true}));
    let (outside, one) = (outside_with_exceptions(&node), Container::new());
    masq.add("c1", &one);
    is_excepted(&one, &outside, ONE);
    hand_over_to_reference(&PacketFilter::new()).unwrap();
    let text = rules(&node);
    assert!(!text.contains("cnibox"), "{text}");
    let rule = "ip saddr 10.1.2.2 ip daddr != 10.1.2.0/24 ip daddr != 203.0.113.0/24 \
                ip daddr != 198.51.100.0/24 masquerade fully-random comment";
    assert!(text.contains(rule), "{text}");
    is_excepted(&one, &outside, ONE);
    masq.del("c1");
    assert!(!rules(&node).contains("203.0.113"), "{}", rules(&node));
}

#[test]
fn exceptions_are_validated() {
    let node = Node::new();
    let nets: Vec<String> = (0..16).map(|n| format!("10.{n}.128.0/24")).collect();
    for plugin in ["bridge", "ptp"] {
        let masq = Masq::new(&node, plugin, BACKENDS[0]);
        let one = Container::new();
        for (list, msg) in [
            (
                json!(["10.0.0.0/8", "example.org"]),
                "ipMasqExcept[1] \"example.org\": not a network or address",
            ),
            (json!(["10.0.0.0/33"]), "ipMasqExcept[0] \"10.0.0.0/33\": not a network or address"),
            (
                json!(nets),
                "\"ipMasqExcept\": 230 characters for networks of one family, 198 are possible",
            ),
        ] {
            for is_on in [true, false] {
                let bad = masq.with(&json!({"ipMasqExcept": list, "ipMasq": is_on}));
                bad.net.add_is_refused(&one, 7, msg);
                let status = bad.call("STATUS", "", "").without("CNI_CONTAINERID");
                assert_eq!(status.without("CNI_NETNS").error().brief(), (50, msg));
                bad.del("c1");
            }
        }
        let v6 = (0x1000..0x1008).map(|n| format!("2001:db8:1234:{n:x}::/64"));
        let longest: Vec<String> = nets[..13].iter().cloned().chain(v6).collect();
        let masq = masq.with(&json!({"ipMasqExcept": longest, "ipMasqRandomFully": true}));
        masq.add("c1", &one);
        masq.del("c1");
        for (keys, key) in [
            (json!({"ipMasqExcept": ["10.0.0.0/8"]}), "ipMasqExcept"),
            (json!({"ipMasqExcept": [], "ipMasqRandomFully": true}), "ipMasqRandomFully"),
        ] {
            let off = masq.with(&json!({"ipMasq": false})).with(&keys);
            let outcome = off.call("ADD", "c1", &one.path()).run();
            let warning = format!(
                "\"{key}\" has no effect without \"ipMasq\"; add \"ipMasq\": true, or remove the \
                 key"
            );
            assert!(outcome.stderr.contains(&warning), "{outcome:?}");
            assert_eq!(outcome.status, Some(0), "{outcome:?}");
            off.call("DEL", "c1", &one.path()).ok();
            let net_d = node.path("net.d");
            std::fs::create_dir_all(&net_d).unwrap();
            let conf = off.net.conf.to_string();
            std::fs::write(net_d.join("10-net.conf"), conf).unwrap();
            let lint = node.cnibox(&["lint", "--offline", net_d.to_str().unwrap()]).run();
            assert!(lint.stdout.contains(&warning), "{lint:?}");
        }
    }
}
