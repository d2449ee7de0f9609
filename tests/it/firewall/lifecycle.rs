//! The verbs in the orders in which runtimes call them, with both native back ends.

use std::thread;
use std::time::Duration;

use serde_json::{Value, json};

use super::{BACKENDS, IPS, OTHER, VERSIONS, assert_same, net, prev, rules};
use crate::support::net::Net;
use crate::support::node::{Container, Node};
use crate::support::strace;

#[test]
fn add_check_del_del_in_every_version() {
    for backend in BACKENDS {
        for version in VERSIONS {
            let policies = ["same-bridge", "open", "isolated"];
            // Policies differ in their rules, not by the version.
            let policies = if version == "1.1.0" { &policies[..] } else { &policies[..1] };
            for policy in policies {
                let (node, container) = (Node::new(), Container::new());
                let keys = json!({"backend": backend, "ingressPolicy": policy});
                let net = net(&node, version, &keys);
                net.call("ADD", "first").netns(&container.path()).result();
                net.call("DEL", "first").netns(&container.path()).ok();
                let base = rules(&node);
                let what = format!("{backend} {version} {policy}");

                assert_eq!(net.add(&container), prev(version, &IPS), "{what}");
                let full = rules(&node);
                assert!(full != base && full.contains("10.1.2.2"), "{what}: {full}");
                let checks = || net.on("CHECK", &container);
                checks().ok();
                assert_same(&full, &rules(&node));
                net.add(&container);
                assert_same(&full, &rules(&node));

                net.del(&container);
                assert_same(&base, &rules(&node));
                net.del(&container);
                assert_same(&base, &rules(&node));
                let error = checks().error();
                assert_eq!(error.code, 999);
                assert!(
                    error.msg.contains("is missing in") && error.msg.contains("10.1.2.2"),
                    "{}",
                    error.msg
                );
            }
        }
    }
}

#[test]
fn an_exception_of_an_administrator_hides_no_lost_policy() {
    let (node, container) = (Node::new(), Container::new());
    let net = net(&node, "1.1.0", &json!({"backend": "iptables", "ingressPolicy": "isolated"}));
    net.add(&container);
    let bridge = node.sh(
        "iptables -S CNI-ISOLATION-STAGE-2 | sed -n 's/.*-o \\([^ ]*\\) .*-j DROP/\\1/p' | head -1",
    );
    node.sh(&format!(
        "iptables -I CNI-ISOLATION-STAGE-2 -o {} -s 192.0.2.1 -j RETURN",
        bridge.trim()
    ));
    net.on("CHECK", &container).ok();
    node.sh("iptables -F FORWARD");
    net.on("CHECK", &container).error();
    node.cnibox(&["repair"]).run();
    net.on("CHECK", &container).ok();
    assert!(node.sh("iptables -S FORWARD").contains("-j CNI-ISOLATION-STAGE-1"));
    assert!(node.sh("iptables -S CNI-ISOLATION-STAGE-2").contains("192.0.2.1"));
}

#[test]
fn the_policy_of_each_family_is_restored() {
    let (node, both, later) = (Node::new(), Container::new(), Container::new());
    let net = net(&node, "1.1.0", &json!({"backend": "iptables", "ingressPolicy": "isolated"}));
    net.add(&both);
    let only_ipv4 = net.with(&json!({"prevResult": prev("1.1.0", &OTHER[..1])}));
    only_ipv4.call("ADD", "later").netns(&later.path()).result();
    let policy =
        || node.sh("ip6tables -S CNI-ISOLATION-STAGE-1; ip6tables -S CNI-ISOLATION-STAGE-2");
    let before = policy();
    node.sh("ip6tables -F CNI-ISOLATION-STAGE-1; ip6tables -F CNI-ISOLATION-STAGE-2");
    assert!(node.cnibox(&["repair"]).run().stdout.contains("is missing in ip6tables table filter"));
    assert_eq!(policy(), before);
}

#[test]
fn del_without_namespace_or_prev_result_removes_its_own() {
    for backend in BACKENDS {
        let (node, container) = (Node::new(), Container::new());
        let net = net(&node, "1.1.0", &json!({"backend": backend}));
        let other = net.with(&json!({"prevResult": prev("1.1.0", &OTHER)}));
        other.call("ADD", "c2").netns(&container.path()).result();
        let before = rules(&node);
        for without in [&["CNI_NETNS"][..], &["prevResult"], &["CNI_NETNS", "prevResult"]] {
            net.add(&container);
            assert!(rules(&node) != before);
            let conf = if without.contains(&"prevResult") {
                net.with(&json!({"prevResult": null}))
            } else {
                net.with(&json!({}))
            };
            let call = conf.on("DEL", &container);
            if without.contains(&"CNI_NETNS") { call.without("CNI_NETNS") } else { call }.ok();
            assert_same(&before, &rules(&node));
        }
        // The other interface of the container is a separate attachment.
        net.with(&json!({"prevResult": null})).call("DEL", "c2").ifname("eth1").ok();
        assert_same(&before, &rules(&node));
    }
}

#[test]
fn a_shared_address_is_accepted_until_its_last_owner_ends() {
    for policy in ["open", "isolated"] {
        for backend in BACKENDS {
            for (first, last) in [("c1", "c2"), ("c2", "c1")] {
                for way in ["DEL", "DEL without prevResult", "GC"] {
                    println!("{backend}, {policy}: {way} of {first}");
                    let (node, container) = (Node::new(), Container::new());
                    let keys = json!({"backend": backend, "ingressPolicy": policy});
                    let net = net(&node, "1.1.0", &keys);
                    let call = |verb: &str, id: &str| {
                        // Two networks, so that GC of one does not concern the other.
                        let port = prev("1.1.0", &IPS).to_string().replace("veth2", id);
                        let prev: Value = serde_json::from_str(&port).unwrap();
                        let net = net.with(&json!({"name": id, "prevResult": prev}));
                        net.call(verb, id).netns(&container.path())
                    };
                    call("ADD", "c1").result();
                    let alone = rules(&node);
                    call("ADD", "c2").result();
                    call("CHECK", "c1").ok();
                    call("CHECK", "c2").ok();
                    let of_first = |keys| net.with(&json!({"name": first})).with(&keys);
                    match way {
                        "DEL" => call("DEL", first).ok(),
                        "GC" => {
                            of_first(json!({"cni.dev/valid-attachments": [], "prevResult": null}))
                                .call("GC", "")
                                .ok();
                        }
                        _ => of_first(json!({"prevResult": null})).call("DEL", first).ok(),
                    }
                    call("CHECK", last).ok();
                    let rest = rules(&node);
                    assert!(!rest.contains(&format!("id: {first}")), "{rest}");
                    if first == "c2" {
                        assert_same(&alone, &rest);
                    } else {
                        assert_eq!(rest.lines().count(), alone.lines().count(), "{rest}");
                    }
                    call("DEL", last).ok();
                    assert!(!rules(&node).contains("10.1.2.2"), "{}", rules(&node));
                }
            }
        }
    }
}

#[test]
fn gc_removes_rules_of_stale_attachments() {
    for backend in BACKENDS {
        let (node, container) = (Node::new(), Container::new());
        let keys = json!({"backend": backend, "ingressPolicy": "isolated"});
        let foreign = net(&node, "1.1.0", &keys).with(&json!({
            "name": "foreign",
            "prevResult": {"cniVersion": "1.1.0", "ips": [{"address": "10.9.9.9/24"}, {"address": "fd09::9/64"}],
                "interfaces": [{"name": "br9"}, {"name": "veth9"}]},
        }));
        foreign.add(&container);
        let base = rules(&node);
        let net = net(&node, "1.1.0", &keys);
        net.add(&container);
        let one = rules(&node);
        let other = net.with(&json!({"prevResult": prev("1.1.0", &OTHER)}));
        other.call("ADD", "c2").netns(&container.path()).result();
        let two = rules(&node);

        let gc = |valid: Value| {
            net.with(&json!({"cni.dev/valid-attachments": valid, "prevResult": null}))
                .call("GC", "")
        };
        let of = |id: &str| json!({"containerID": id, "ifname": "eth0"});
        gc(json!([of("c1"), of("c2")])).ok();
        assert_same(&two, &rules(&node));
        net.with(&json!({"prevResult": null})).call("GC", "").ok();
        assert_same(&two, &rules(&node));
        gc(json!([of("c1")])).ok();
        assert_same(&one, &rules(&node));
        gc(json!([])).ok();
        assert_same(&base, &rules(&node));
    }
}

#[test]
fn gc_keeps_valid_policies_whose_records_are_lost() {
    for backend in BACKENDS {
        let (node, container) = (Node::new(), Container::new());
        node.sh("ip link add br0 type bridge; ip link add port type veth peer name far; ip link set port master br0");
        let net = net(&node, "1.1.0", &json!({"backend": backend, "ingressPolicy": "same-bridge"}));
        net.add(&container);
        let before = rules(&node);
        node.sh("rm -r /run/cni/cnibox");
        let valid = json!([{"containerID": "c1", "ifname": "eth0"}]);
        net.with(&json!({"cni.dev/valid-attachments": valid, "prevResult": null}))
            .call("GC", "")
            .ok();
        assert_same(&before, &rules(&node));
    }
}

#[test]
fn a_policy_follows_the_configuration() {
    let sorted = |text: &str| {
        let mut lines: Vec<String> = text.lines().map(ToOwned::to_owned).collect();
        lines.sort();
        lines.join("\n")
    };
    for backend in BACKENDS {
        let (node, container) = (Node::new(), Container::new());
        let with = |policy: &str| {
            let keys = json!({"backend": backend, "ingressPolicy": policy});
            let net = net(&node, "1.1.0", &keys);
            net.add(&container);
            net.on("CHECK", &container).ok();
            sorted(&rules(&node))
        };
        let (isolated, same) = (with("isolated"), with("same-bridge"));
        assert_ne!(isolated, same);
        assert_same(&isolated, &with("isolated"));
        assert_same(&same, &with("same-bridge"));
        let open = with("open");
        assert!(same.contains("br0") && !open.contains("br0"), "{open}");
        // ADD of another container removes the old policy too.
        with("same-bridge");
        let keys = json!({"backend": backend, "prevResult": prev("1.1.0", &OTHER)});
        net(&node, "1.1.0", &keys).call("ADD", "c2").netns(&container.path()).result();
        assert!(!rules(&node).contains("br0"), "{}", rules(&node));
        // The policy of another network on the same bridge remains.
        let keys = json!({"name": "other", "backend": backend, "ingressPolicy": "isolated"});
        net(&node, "1.1.0", &keys).call("ADD", "c9").netns(&container.path()).result();
        let before = rules(&node);
        assert!(before.contains("br0"));
        let keys = json!({"backend": backend, "ingressPolicy": "open"});
        net(&node, "1.1.0", &keys).call("ADD", "c9").netns(&container.path()).result();
        assert_eq!(before.matches("br0").count(), rules(&node).matches("br0").count());
    }
}

/// The policy of a bridge was changed while containers with the former one run.
#[test]
fn a_repair_keeps_the_policy_of_the_latest_attachment() {
    for (backend, former, latest) in BACKENDS
        .into_iter()
        .flat_map(|b| [(b, "isolated", "same-bridge"), (b, "same-bridge", "open")])
    {
        let (node, container) = (Node::new(), Container::new());
        let attach = |id: &str, prev: Value, policy: &str| {
            let keys = json!({"backend": backend, "ingressPolicy": policy, "prevResult": prev});
            net(&node, "1.1.0", &keys).call("ADD", id).netns(&container.path()).result();
        };
        // Names of records are hashes: one order of them is not that of the attachments.
        attach("c1", prev("1.1.0", &OTHER), former);
        attach("c3", prev("1.1.0", &["10.1.2.4/24"]), former);
        // Records have the time in seconds.
        thread::sleep(Duration::from_millis(1100));
        attach("c2", prev("1.1.0", &IPS), latest);
        let before = rules(&node);
        assert_eq!(
            node.cnibox(&["repair"]).printed(),
            "nothing was missing\n",
            "{backend} {former} {latest}"
        );
        assert_same(&before, &rules(&node));
        node.sh("nft flush ruleset; iptables -F; ip6tables -F; iptables -X; ip6tables -X");
        assert!(node.cnibox(&["repair"]).printed().contains("restored"));
        assert_eq!(
            before.matches("br0").count(),
            rules(&node).matches("br0").count(),
            "{}",
            rules(&node)
        );
        assert_eq!(
            node.cnibox(&["repair"]).printed(),
            "nothing was missing\n",
            "{backend} {former} {latest}"
        );
    }
}

/// The latest ADD may be of a container that is gone, or has the record of an earlier one.
#[test]
fn a_repair_changes_no_policy_that_is_in_force() {
    for backend in BACKENDS {
        let (node, container) = (Node::new(), Container::new());
        let net = |id: &str, ips: &[&str], policy: &str| {
            let keys = json!({"backend": backend, "ingressPolicy": policy, "prevResult": prev("1.1.0", ips)});
            (net(&node, "1.1.0", &keys), id.to_owned())
        };
        let attach = |(net, id): &(Net<'_>, String)| {
            drop(net.call("ADD", id).netns(&container.path()).result());
        };
        let steady = |what: &str| {
            let before = rules(&node);
            assert_eq!(
                node.cnibox(&["repair"]).printed(),
                "nothing was missing\n",
                "{backend} {what}"
            );
            assert_same(&before, &rules(&node));
        };
        // In one second.
        attach(&net("z", &OTHER, "same-bridge"));
        attach(&net("a", &IPS, "isolated"));
        steady("one second");
        let (last, id) = net("a", &IPS, "isolated");
        last.call("DEL", &id).netns(&container.path()).ok();
        steady("deleted");
        thread::sleep(Duration::from_millis(1100));
        attach(&net("a", &IPS, "isolated"));
        attach(&net("z", &OTHER, "same-bridge"));
        steady("attached again");
    }
}

/// IPv4 and IPv6 have tables of their own.
#[test]
fn a_repair_restores_the_policy_in_both_families() {
    let (node, container) = (Node::new(), Container::new());
    for ips in [&OTHER[..], &["10.1.2.9/24"]] {
        let keys = json!({"backend": "iptables", "ingressPolicy": "same-bridge", "prevResult": prev("1.1.0", ips)});
        net(&node, "1.1.0", &keys)
            .call("ADD", ips[0].split('/').next().unwrap())
            .netns(&container.path())
            .result();
        thread::sleep(Duration::from_millis(1100));
    }
    let before = rules(&node);
    node.sh("ip6tables -F; ip6tables -X; iptables -F; iptables -X");
    assert!(node.cnibox(&["repair"]).printed().contains("restored"));
    assert_eq!(
        before.matches("br0").count(),
        rules(&node).matches("br0").count(),
        "{}",
        rules(&node)
    );
}

#[test]
fn sixteen_concurrent_calls_make_no_duplicates() {
    for backend in BACKENDS {
        for policy in ["open", "isolated"] {
            let (node, container) = (Node::new(), Container::new());
            let keys = json!({"backend": backend, "ingressPolicy": policy});
            let base = net(&node, "1.1.0", &keys);
            let call = |verb: &str, n: u8| {
                let (four, six) = (format!("10.1.2.{n}/24"), format!("2001:db8::{n}/64"));
                base.with(&json!({"prevResult": prev("1.1.0", &[&four, &six])}))
                    .call(verb, &format!("c{n}"))
                    .netns(&container.path())
            };
            // The delay makes all processes read the rules before the first change.
            let inject = match backend {
                "nftables" => "inject=sendto:delay_enter=50000",
                _ => "inject=execve:delay_enter=30000",
            };
            let slow = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", inject];
            let at_once = |verb: &'static str| {
                let calls: Vec<_> = (10..26).map(|n| call(verb, n).under(&slow)).collect();
                thread::scope(|scope| {
                    for call in &calls {
                        scope.spawn(move || {
                            let outcome = call.run();
                            assert_eq!(outcome.status, Some(0), "{outcome:?}");
                        });
                    }
                });
            };
            at_once("ADD");
            let full = rules(&node);
            let listed = |text: &str| -> Vec<String> {
                let is_rule =
                    |l: &&str| l.contains("accept") || l.contains("jump") || l.contains("drop");
                text.lines()
                    .filter(|l| is_rule(l) && !l.contains(" hook "))
                    .map(|l| l.trim().to_owned())
                    .collect()
            };
            for family in ["iptables-save", "ip6tables-save"] {
                let saved = node.sh(family);
                let mut lines: Vec<_> = saved.lines().filter(|l| l.starts_with("-A")).collect();
                let count = lines.len();
                lines.sort_unstable();
                lines.dedup();
                assert_eq!(lines.len(), count, "{backend} {policy}: {saved}");
            }
            if backend == "nftables" {
                let mut once = listed(&full);
                let count = once.len();
                once.sort();
                once.dedup();
                // The bridge family's drop rules of IPv4 and IPv6 print differently, so every line
                // is unique.
                assert_eq!(once.len(), count, "{full}");
            }
            for n in 10..26 {
                call("CHECK", n).ok();
            }
            at_once("DEL");
            assert!(!rules(&node).contains("id: c"), "{}", rules(&node));
        }
    }
}

/// ADD reads a chain with many rules up to those of another container.
#[test]
fn rules_beyond_the_beginning_of_a_chain_are_not_doubled() {
    let (node, container) = (Node::new(), Container::new());
    let add = |n: u8, admin: &str| {
        let addrs = [format!("10.1.2.{n}/24"), format!("2001:db8::{n}/64")];
        let keys = json!({"backend": "iptables", "iptablesAdminChainName": admin,
            "prevResult": prev("1.1.0", &addrs.each_ref().map(String::as_str))});
        let net = net(&node, "1.1.0", &keys);
        net.call("ADD", &format!("c{n}")).netns(&container.path()).result();
        for family in ["iptables-save", "ip6tables-save"] {
            let saved = node.sh(family);
            let mut lines: Vec<_> = saved.lines().filter(|line| line.starts_with("-A")).collect();
            let count = lines.len();
            lines.sort_unstable();
            lines.dedup();
            assert_eq!(lines.len(), count, "after c{n}: {saved}");
        }
        node.sh("iptables -S; ip6tables -S")
    };
    for n in 10..40 {
        add(n, "CNI-ADMIN");
    }
    let jump =
        "-A CNI-FORWARD -m comment --comment \"CNI firewall plugin admin overrides\" -j OTHERS";
    for _ in 0..2 {
        assert_eq!(add(40, "OTHERS").matches(jump).count(), 2, "in both families");
    }
    node.sh("for n in $(seq 30); do iptables -I FORWARD -s 192.0.2.$n -j ACCEPT; done");
    let whole = add(41, "CNI-ADMIN");
    for damage in ["-F CNI-FORWARD", "-D FORWARD 31", "-D CNI-FORWARD 2", "-F FORWARD"] {
        node.sh(&format!("iptables {damage}; ip6tables -F"));
        let restored = add(41, "CNI-ADMIN");
        let missing = whole.lines().filter(|line| !line.contains("192.0.2."));
        let missing: Vec<_> = missing.filter(|line| !restored.contains(line)).collect();
        assert!(missing.is_empty(), "{damage}: {missing:#?}");
    }
}

#[test]
fn refusals_change_nothing() {
    let (node, container) = (Node::new(), Container::new());
    let conf = net(&node, "1.1.0", &json!({"backend": "nftables"}));
    let refused = |keys: Value, code: u64, msg: &str| {
        conf.with(&keys).add_is_refused(&container, code, msg);
        assert_eq!(rules(&node).trim(), "");
    };
    refused(json!({"prevResult": null}), 999, "missing prevResult from earlier plugin");
    refused(json!({"ingressPolicy": "shut"}), 7, "unknown ingress policy: \"shut\"");
    let bare = json!({"cniVersion": "1.1.0", "ips": [{"address": "10.1.2.2/24"}]});
    refused(
        json!({"ingressPolicy": "isolated", "prevResult": bare}),
        7,
        "interface needs to be set for ingress policy \"isolated\", make sure to chain \"firewall\" plugin with \"bridge\"",
    );
    for version in ["0.1.0", "0.3.1"] {
        refused(json!({"cniVersion": version}), 1, "incompatible CNI versions");
    }
}

#[test]
fn status_reports_unusable_back_ends() {
    let node = Node::new();
    let status = |backend: &str| {
        net(&node, "1.1.0", &json!({"backend": backend, "prevResult": null}))
            .call("STATUS", "")
            .env("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/nonexistent")
    };
    for backend in ["", "nftables", "iptables"] {
        status(backend).ok();
    }
    let error = status("firewalld").error();
    assert_eq!(error.brief(), (50, "connect to the D-Bus system bus: no such file or directory"));
    assert!(error.details.contains("start firewalld"), "{}", error.details);
    let hide = "mount -t tmpfs none /usr/sbin; exec \"$0\"";
    let error = status("iptables").in_script(hide).error();
    assert_eq!(error.code, 50);
    assert!(error.details.contains("install iptables"), "{error:?}");
    status("").in_script(hide).ok();
    assert_eq!(rules(&node).trim(), "");
}

#[test]
fn nftables_starts_no_program() {
    let (node, container) = (Node::new(), Container::new());
    for policy in ["open", "isolated"] {
        let keys = json!({"backend": "nftables", "ingressPolicy": policy});
        let net = net(&node, "1.1.0", &keys);
        for verb in ["ADD", "CHECK", "DEL"] {
            let (outcome, calls) = strace::record(&node, &net.on(verb, &container));
            assert_eq!(outcome.status, Some(0), "{outcome:?}");
            let started = calls.iter().filter(|call| call.name == "execve").count();
            assert_eq!(started, 1, "{verb}");
        }
    }
}

/// The policy of a container without a bridge names its link on the host. Every packet passes these
/// rules, so those of missing links are deleted.
#[test]
fn policies_of_missing_links_are_removed() {
    for backend in BACKENDS {
        let node = Node::new();
        let keys = json!({"backend": backend, "ingressPolicy": "isolated"});
        let ptp =
            Net::new(&node, "ptp", "1.1.0", &json!({"ipam": node.host_local(&["10.1.2.0/24"])}));
        let attach = |id| {
            let container = Container::new();
            let prev = ptp.call("ADD", id).netns(&container.path()).result();
            let net =
                Net::new(&node, "firewall", "1.1.0", &keys).with(&json!({"prevResult": prev}));
            net.call("ADD", id).netns(&container.path()).result();
            net.call("CHECK", id).netns(&container.path()).ok();
            (container, net)
        };
        let detach = |id, (container, net): (Container, Net<'_>)| {
            net.call("DEL", id).netns(&container.path()).ok();
            ptp.call("DEL", id).netns(&container.path()).ok();
        };
        let policies = || rules(&node).matches("veth").count();
        let first = attach("c1");
        let of_one = policies();
        assert_ne!(of_one, 0);
        detach("c1", first);
        let base = rules(&node);
        assert!(!base.contains("veth"), "{backend}: {base}");
        for _ in 0..3 {
            detach("c2", attach("c2"));
        }
        assert_same(&base, &rules(&node));

        // A container that is gone without a DEL.
        let (lost, kept) = (attach("c3"), attach("c4"));
        assert!(policies() > of_one);
        let name = lost.1.conf["prevResult"]["interfaces"][0]["name"].as_str().unwrap();
        node.sh(&format!("ip link del {name}"));
        let valid = json!({"cni.dev/valid-attachments": [{"containerID": "c4", "ifname": "eth0"}]});
        kept.1.with(&valid).with(&json!({"prevResult": null})).call("GC", "").ok();
        assert_eq!(policies(), of_one, "{backend}: {}", rules(&node));
        kept.1.call("CHECK", "c4").netns(&kept.0.path()).ok();
    }
}
