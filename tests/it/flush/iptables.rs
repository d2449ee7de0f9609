//! The flush matrix of the iptables back end.

use serde_json::json;

use super::{Row, add, bridge};
use crate::masquerade::{outside, seen};
use crate::portmap::tcp;
use crate::support::net::Net;
use crate::support::node::{Container, Node};
use crate::support::traffic::Place;

/// Ways to lose a table's rules; the last one is what a reload of firewalld with its iptables back
/// end does.
fn damages(table: &str) -> Vec<String> {
    let each = |words: &str| {
        let of = |program| words.split(';').map(move |w| format!("{program} {w}"));
        of("iptables").chain(of("ip6tables")).collect::<Vec<_>>().join(" && ")
    };
    let all = ["raw", "mangle", "nat", "filter"].map(|t| format!("-t {t} -F;-t {t} -X"));
    vec![
        each(&format!("-t {table} -F")),
        each(&format!("-t {table} -F;-t {table} -X")),
        "nft flush ruleset".to_owned(),
        each(&all.join(";")),
    ]
}

#[test]
fn add_restores_masquerading() {
    let node = Node::new();
    let outside = outside(&node);
    let net = bridge(&node, &json!({"ipMasq": true, "ipMasqBackend": "iptables"}));
    let row = Row::new(&node, vec![net]);
    let chain = "$(iptables -t nat -S | sed -n 's/^-N //p' | head -1)";
    let mut damages = damages("nat");
    damages.push("iptables -t nat -F POSTROUTING".to_owned());
    damages.push(format!(
        "chain={chain}; iptables -t nat -F && iptables -t nat -X $chain && ip6tables -t nat -F"
    ));
    row.survives(&damages, |first, second, ip| {
        for (ip, host) in [("192.0.2.2", "192.0.2.1"), ("2001:db8:ff::2", "2001:db8:ff::1")] {
            assert_eq!(seen(first, &outside, ip), host);
            assert_eq!(seen(second, &outside, ip), host);
        }
        assert_eq!(seen(first, second, ip), "10.1.2.2", "inside the subnet");
    });
}

#[test]
fn add_restores_accepted_traffic_and_isolation() {
    let node = Node::new();
    let outside = outside(&node);
    outside.sh("ip route add 10.1.2.0/24 via 192.0.2.1");
    let keys = json!({"backend": "iptables", "ingressPolicy": "same-bridge"});
    let firewall = Net::new(&node, "firewall", "1.1.0", &keys);
    let mut row = Row::new(&node, vec![bridge(&node, &json!({})), firewall]);
    let mut damages = damages("filter");
    for chain in ["FORWARD", "CNI-FORWARD", "CNI-ISOLATION-STAGE-1", "CNI-ISOLATION-STAGE-2"] {
        damages.push(format!("iptables -F {chain}"));
    }
    let policy = node.sh("iptables -S CNI-ISOLATION-STAGE-1; iptables -S CNI-ISOLATION-STAGE-2");
    let holds = |first: &Container, second: &Container, _: &str| {
        node.sh("iptables -P FORWARD DROP");
        assert!(first.reaches("192.0.2.2") && second.reaches("192.0.2.2"));
        node.sh("iptables -P FORWARD ACCEPT");
        let now = node.sh("iptables -S CNI-ISOLATION-STAGE-1; iptables -S CNI-ISOLATION-STAGE-2");
        assert_eq!(now, policy);
    };
    row.survives(&damages, holds);
    // The later container has no ingress policy, so it is in no policy chain.
    row.later[1] = row.list[1].with(&json!({"ingressPolicy": "open", "name": "other"}));
    row.survives(&damages, holds);
}

#[test]
fn add_restores_host_ports() {
    let node = Node::new();
    let portmap = |host: u16, proto: &str| {
        Net::new(
            &node,
            "portmap",
            "1.1.0",
            &json!({"backend": "iptables", "runtimeConfig": {
                "portMappings": [{"hostPort": host, "containerPort": 80, "protocol": proto}]}}),
        )
    };
    let gateway = json!({"isDefaultGateway": true});
    let mut row = Row::new(&node, vec![bridge(&node, &gateway), portmap(8080, "tcp")]);
    let mut damages = damages("nat");
    for chain in ["CNI-HOSTPORT-DNAT", "PREROUTING", "CNI-HOSTPORT-SETMARK", "CNI-HOSTPORT-MASQ"] {
        damages.push(format!("iptables -t nat -F {chain}"));
    }
    row.later[1] = portmap(8081, "udp");
    row.survives(&damages, |first, second, _| {
        for target in ["10.1.2.1:8080", "127.0.0.1:8080", "[2001:db8:1::1]:8080"] {
            assert!(tcp(&node, first, target, 80).is_some(), "{target}");
        }
        assert!(tcp(second, first, "10.1.2.1:8080", 80).is_some(), "a neighbour");
    });
}

/// Native nftables rules, like Tailscale's, that iptables cannot list, for table `ip T` and base
/// chain `B`.
const NATIVE: [&str; 3] = [
    "add chain ip T ts-own; add rule ip T ts-own meta mark 0x40000 ct state new counter; add rule ip T B jump ts-own",
    "add rule ip T B ct state established,related counter",
    "add chain ip T own { type filter hook output priority 17; }; add rule ip T own ct state new counter",
];

/// Creates these rules in the tables of iptables-nft.
fn make_native(node: &Node, native: &str) {
    for (table, chain) in [("nat", "POSTROUTING"), ("filter", "FORWARD")] {
        node.sh(&format!(
            "iptables -t {table} -A {chain} -j RETURN; iptables -t {table} -D {chain} -j RETURN"
        ));
        let rule = native.replace("ip T", &format!("ip {table}"));
        node.sh(&format!("nft '{}'", rule.replace(" B ", &format!(" {chain} "))));
    }
}

#[test]
fn native_rules_in_tables_of_iptables_do_not_block_add() {
    let node = Node::new();
    let outside = outside(&node);
    let gateway = json!({"isDefaultGateway": true, "ipMasq": true});
    let portmap = json!({"runtimeConfig": {
        "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]}});
    let portmap = Net::new(&node, "portmap", "1.1.0", &portmap);
    let firewall = Net::new(&node, "firewall", "1.1.0", &json!({}));
    for native in NATIVE {
        node.sh("nft flush ruleset");
        make_native(&node, native);
        let list =
            vec![bridge(&node, &gateway), firewall.with(&json!({})), portmap.with(&json!({}))];
        let row = Row::new(&node, list);
        let chains = node.sh("nft list table ip nat; nft list table ip filter");
        for chain in ["CNI-HOSTPORT-DNAT", "CNI-FORWARD"] {
            assert!(chains.contains(chain), "{native}: {chains}");
        }
        assert_eq!(seen(&row.first, &outside, "192.0.2.2"), "192.0.2.1", "{native}");
        assert!(tcp(&node, &row.first, "10.1.2.1:8080", 80).is_some(), "{native}");
        assert_eq!(row.refusals("CHECK", 999) + row.refusals("STATUS", 50), 0, "{native}");
        for (net, prev) in row.list.iter().zip(&row.results[1..]).rev() {
            let net = net.with(&json!({"prevResult": prev}));
            net.call("DEL", "c1").netns(&row.first.path()).ok();
        }
        let left = node.sh("nft list ruleset");
        assert!(!left.contains("10.1.2.") || !left.contains("c1"), "{native}: {left}");
    }
}

/// Saved rules that are loaded again have the first containers, but not the later ones.
#[test]
fn add_restores_what_saved_rules_lack() {
    let node = Node::new();
    let containers: Vec<Container> = (0..31).map(|_| Container::new()).collect();
    let attach = |n: usize| {
        let ports = json!([{"hostPort": 8000 + n, "containerPort": 80, "protocol": "tcp"}]);
        let keys = json!({"backend": "iptables", "runtimeConfig": {"portMappings": ports}});
        let list = [
            bridge(&node, &json!({"ipMasq": true, "ipMasqBackend": "iptables"})),
            Net::new(&node, "portmap", "1.1.0", &keys),
            Net::new(&node, "firewall", "1.1.0", &json!({"backend": "iptables"})),
        ];
        add(&list, &format!("c{n}"), &containers[n]);
    };
    let saved = node.path("saved").display().to_string();
    (0..20).for_each(attach);
    node.sh(&format!("iptables-save > {saved}"));
    (20..30).for_each(attach);
    let rules = || node.sh("iptables -S; iptables -t nat -S");
    let before = rules();
    node.sh(&format!("iptables-restore < {saved}"));
    assert_ne!(rules(), before);
    attach(30);
    let after = rules();
    let missing: Vec<&str> = before.lines().filter(|line| !after.contains(line)).collect();
    assert!(missing.is_empty(), "{missing:#?}");
    let mut lines: Vec<&str> = after.lines().filter(|line| line.starts_with("-A")).collect();
    lines.sort_unstable();
    assert!(lines.windows(2).all(|pair| pair[0] != pair[1]), "{after}");
}
