//! Comparison with the reference plugin: the same rules, and DEL of each removes the other's, with
//! both iptables implementations.

use std::fs;
use std::os::unix::fs::symlink;

use serde_json::{Value, json};

use super::{IPS, net, prev, rules};
use crate::support::compare::peer;
use crate::support::node::{Call, Container, Node};

const FLAVOURS: [&str; 2] = ["nft", "legacy"];

/// A `PATH` with the programs of an iptables flavour.
fn path(node: &Node, flavour: &str) -> String {
    let dir = node.path(flavour);
    if fs::create_dir(&dir).is_ok() {
        for family in ["iptables", "ip6tables"] {
            for tool in ["", "-save", "-restore"] {
                let target = format!("/usr/sbin/{family}-{flavour}{tool}");
                symlink(target, dir.join(format!("{family}{tool}"))).unwrap();
            }
            for flavour in FLAVOURS {
                for tool in ["-save", "-restore"] {
                    let name = format!("{family}-{flavour}{tool}");
                    symlink(format!("/usr/sbin/{name}"), dir.join(name)).unwrap();
                }
            }
        }
    }
    format!("{}:/usr/bin:/bin", dir.display())
}

/// Chains and rules, except for the only rules that the reference does not have.
fn saved(node: &Node, flavour: &str) -> String {
    let text = ["iptables", "ip6tables"]
        .map(|family| node.sh(&format!("{family}-{flavour}-save -t filter 2>/dev/null")))
        .concat();
    let is_own = |line: &&str| line.contains("\"cnibox: published ports\"");
    let lines = text.lines().filter(|line| !line.starts_with('#') && !is_own(line));
    let counters = |line: &str| line.split(" [").next().unwrap_or_default().to_owned();
    lines.map(counters).collect::<Vec<_>>().join("\n")
}

/// Creates calls of a verb, by cnibox if the second argument is true, by the reference otherwise.
fn calls(node: &Node, flavour: &str, keys: &Value) -> impl Fn(&str, bool) -> Call {
    let reference = peer("firewall").map(|dir| dir.join("firewall"));
    let (conf, path) = (net(node, "1.0.0", keys).conf, path(node, flavour));
    let (base, container) = (node.call("firewall", "ADD").id("c1").conf(&conf), Container::new());
    move |verb, ours| {
        let base = base.clone().netns(&container.path());
        let call = base.clone().env("CNI_COMMAND", verb).env("PATH", &path);
        if ours { call } else { call.program(reference.as_ref().unwrap()) }
    }
}

#[test]
fn rules_equal_the_references_and_each_deletes_them() {
    if peer("firewall reference").is_none() {
        return;
    }
    for flavour in FLAVOURS {
        for keys in [json!({}), json!({"iptablesAdminChainName": "CNI-foobar"})] {
            let keys = crate::support::net::merged(&json!({"backend": "iptables"}), &keys);
            let node = Node::new();
            let call = calls(&node, flavour, &keys);
            call("ADD", true).result();
            let ours = saved(&node, flavour);
            call("CHECK", false).ok();
            call("DEL", false).ok();
            let rest = saved(&node, flavour);
            assert!(!rest.contains("10.1.2.2") && !rest.contains("2001:db8:1::2"), "{rest}");
            // Only the owner's element remains, which GC deletes.
            let gc = net(&node, "1.1.0", &keys).with(&json!({"cni.dev/valid-attachments": []}));
            gc.call("GC", "").env("PATH", &path(&node, flavour)).ok();
            assert!(!rules(&node).contains("10.1.2.2"), "{}", rules(&node));

            let node = Node::new();
            let call = calls(&node, flavour, &keys);
            call("ADD", false).result();
            let theirs = saved(&node, flavour);
            assert_eq!(lines(&ours), lines(&theirs), "{flavour}");
            call("CHECK", true).ok();
            call("DEL", true).ok();
            assert_eq!(lines(&saved(&node, flavour)), lines(&rest), "{flavour}");
            call("ADD", false).result();
            call("ADD", true).result();
            assert_eq!(lines(&saved(&node, flavour)), lines(&theirs), "{flavour}");
        }
    }
}

fn lines(text: &str) -> Vec<&str> {
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines
}

#[test]
fn a_node_may_change_its_back_end() {
    let (node, container) = (Node::new(), Container::new());
    let of = |backend: &str| net(&node, "1.1.0", &json!({"backend": backend}));
    let legacy = path(&node, "legacy");
    of("iptables").on("ADD", &container).env("PATH", &legacy).result();
    of("iptables").on("ADD", &container).env("PATH", &path(&node, "nft")).result();
    of("nftables").add(&container);
    assert_eq!(prev("1.1.0", &IPS), of("nftables").add(&container));
    for family in ["legacy", "nft"] {
        assert!(saved(&node, family).contains("10.1.2.2"), "{family}");
    }
    of("").with(&json!({"prevResult": null})).on("DEL", &container).ok();
    assert!(!rules(&node).contains("10.1.2.2"), "{}", rules(&node));
    assert!(!rules(&node).contains("2001:db8:1::2"), "{}", rules(&node));
}

#[test]
fn isolation_has_the_chains_and_rules_of_the_reference() {
    for flavour in FLAVOURS {
        let node = Node::new();
        let keys = json!({"backend": "iptables", "ingressPolicy": "isolated",
            "prevResult": prev("1.0.0", &["10.1.2.2/24"])});
        let (conf, path) = (net(&node, "1.0.0", &keys).conf, path(&node, flavour));
        let container = Container::new();
        let call = node.call("firewall", "ADD").conf(&conf).netns(&container.path());
        call.env("PATH", &path).result();
        let any = "-m comment --comment \"CNI firewall plugin rules (ingressPolicy: same-bridge|isolated)\"";
        let this = "-m comment --comment \"CNI firewall plugin rules (ingressPolicy: isolated)\"";
        let expected = [
            format!("-A FORWARD {any} -j CNI-ISOLATION-STAGE-1"),
            "-A FORWARD -m comment --comment \"CNI firewall plugin rules\" -j CNI-FORWARD".into(),
            "-A CNI-FORWARD -m comment --comment \"CNI firewall plugin admin overrides\" -j CNI-ADMIN".into(),
            "-A CNI-FORWARD -d 10.1.2.2/32 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT".into(),
            "-A CNI-FORWARD -s 10.1.2.2/32 -j ACCEPT".into(),
            format!("-A CNI-ISOLATION-STAGE-1 -i br0 -o br0 {this} -j DROP"),
            format!("-A CNI-ISOLATION-STAGE-1 -i br0 ! -o br0 {this} -j CNI-ISOLATION-STAGE-2"),
            format!("-A CNI-ISOLATION-STAGE-1 {any} -j RETURN"),
            format!("-A CNI-ISOLATION-STAGE-2 -o br0 {any} -j DROP"),
            format!("-A CNI-ISOLATION-STAGE-2 {any} -j RETURN"),
        ];
        let saved = saved(&node, flavour);
        let rules = saved.lines().filter(|line| line.starts_with("-A"));
        assert_eq!(rules.collect::<Vec<_>>(), expected, "{flavour}");
    }
}
