//! `cnibox repair`: once, as a dry run, and with `--watch` after every change of the rules.

use serde_json::json;

use super::{Row, bridge, firewall};
use crate::portmap::tcp;
use crate::support::net::Net;
use crate::support::node::{Container, Node, Running, eventually};

#[test]
fn repair_restores_and_names_missing_rules() {
    let node = Node::new();
    let keys = json!({"ipMasq": true, "ipMasqBackend": "nftables", "macspoofchk": true});
    let row = Row::new(&node, vec![bridge(&node, &keys), firewall(&node, "isolated")]);
    let repair = || node.cnibox(&["repair"]).run().stdout;
    assert_eq!(repair(), "nothing was missing\n");
    node.sh("nft flush ruleset");
    let text = repair();
    for table in ["inet cnibox_masquerade", "bridge cnibox_spoof", "bridge cnibox_firewall"] {
        assert!(text.contains(&format!("restored: table {table} is gone\n")), "{text}");
    }
    assert_eq!(row.refusals("CHECK", 999) + row.refusals("STATUS", 50), 0);
    node.sh("nft delete element inet cnibox_masquerade pods4 '{ 10.1.2.2 }'");
    assert_eq!(row.refusals("CHECK", 999), 1, "one element");
    assert_eq!(repair(), "restored: 10.1.2.2 is missing in map inet cnibox_masquerade pods4\n");
    assert_eq!(row.refusals("CHECK", 999), 0);
    for plugin in row.list.iter().rev() {
        plugin.call("DEL", "c1").netns(&row.first.path()).ok();
    }
    node.sh("nft flush ruleset");
    assert_eq!(repair(), "nothing was missing\n", "nobody is left");
    assert_eq!(node.sh("find /run/cni/cnibox -type f ! -name '*.lock'"), "");
}

#[test]
fn repair_restores_rules_of_iptables() {
    let node = Node::new();
    let keys = json!({"ipMasq": true, "ipMasqBackend": "iptables"});
    let row = Row::new(&node, vec![bridge(&node, &keys)]);
    let repair = || node.cnibox(&["repair"]).run().stdout;
    assert_eq!(repair(), "nothing was missing\n");
    node.sh("iptables -t nat -F");
    assert!(repair().contains("is missing in iptables table nat"));
    assert_eq!(row.refusals("CHECK", 999) + row.refusals("STATUS", 50), 0);
}

#[test]
fn a_dry_run_names_what_is_missing_and_changes_nothing() {
    for backend in ["nftables", "iptables"] {
        let node = Node::new();
        let row = Row::new(
            &node,
            vec![bridge(&node, &json!({"ipMasq": true, "ipMasqBackend": backend}))],
        );
        let dry_run = || {
            let outcome = node.tool("repair", &["--dry-run"]).run();
            (outcome.status, outcome.stdout)
        };
        assert_eq!(dry_run(), (Some(0), "nothing was missing\n".to_owned()));
        node.sh("nft flush ruleset");
        let before = node.sh("nft list ruleset");
        let (status, stdout) = dry_run();
        assert!(
            stdout.starts_with("missing: ")
                && stdout.lines().count() == 1 + usize::from(backend == "iptables"),
            "{stdout}"
        );
        assert_eq!((status, node.sh("nft list ruleset")), (Some(1), before));
        assert_ne!(row.refusals("CHECK", 999), 0);
    }
}

/// A list with a port mapping and firewall rules.
fn chain<'n>(node: &'n Node, backend: &str) -> Vec<Net<'n>> {
    let mappings = json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]);
    let portmap = json!({"backend": backend, "runtimeConfig": {"portMappings": mappings}});
    let firewall = json!({"backend": backend, "ingressPolicy": "same-bridge"});
    vec![
        bridge(node, &json!({"ipMasq": true, "ipMasqBackend": backend})),
        Net::new(node, "portmap", "1.1.0", &portmap),
        Net::new(node, "firewall", "1.1.0", &firewall),
    ]
}

#[test]
fn watch_restores_after_every_flush() {
    for backend in ["nftables", "iptables"] {
        let node = Node::new();
        let row = Row::new(&node, chain(&node, backend));
        // STATUS would restore the rules itself.
        let is_whole = || row.refusals("CHECK", 999) == 0;
        let watch = Running::start(&node.tool("repair", &["--watch"]));
        for _ in 0..3 {
            node.sh("nft flush ruleset");
            eventually("the rules are back", || {
                tcp(&node, &row.first, "10.1.2.1:8080", 80).is_some()
            });
            eventually("all of them", is_whole);
        }
        watch.ends();
        node.sh("nft flush ruleset");
        assert!(!is_whole(), "nobody watches any more");
    }
}

#[test]
fn watch_sleeps_when_no_rules_change() {
    let node = Node::new();
    let _row = Row::new(&node, chain(&node, "nftables"));
    let watch = Running::start(&node.tool("repair", &["--watch"]));
    eventually("it works without need", || watch.sleeps());
    watch.ends();
}

/// The watcher neither restores state of a deleted container nor disturbs an ADD.
#[test]
fn watch_does_not_disturb_add_and_del() {
    for backend in ["nftables", "iptables"] {
        let node = Node::new();
        let row = Row::new(&node, chain(&node, backend));
        let watch = Running::start(&node.tool("repair", &["--watch"]));
        let rounds = if backend == "nftables" { 40 } else { 10 };
        for _ in 0..rounds {
            let second = Container::new();
            let mut list: Vec<_> = row.later.iter().map(|net| net.with(&json!({}))).collect();
            list[1] = list[1].with(&json!({"runtimeConfig": {"portMappings": [
                {"hostPort": 8081, "containerPort": 80, "protocol": "tcp"},
            ]}}));
            super::add(&list, "c2", &second);
            for net in list.iter().rev() {
                net.call("DEL", "c2").netns(&second.path()).ok();
            }
        }
        watch.ends();
        let rules = node.sh("nft list ruleset");
        assert!(!rules.contains("c2") && !rules.contains("8081"), "{rules}");
        assert_eq!(row.refusals("CHECK", 999) + row.refusals("STATUS", 50), 0);
        assert_eq!(node.cnibox(&["repair"]).run().stdout, "nothing was missing\n");
    }
}
