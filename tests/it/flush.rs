//! The flush matrix: whatever an administrator flushes, STATUS and CHECK say so, and one ADD of any
//! other container later everything works for all, tried with traffic.
//!
//! A row is a chain of plugins and what must hold. The ways to damage it are found in the live rules:
//! the whole ruleset, each table flushed or deleted, each chain, each set and map.

use serde_json::{Value, json};

use crate::masquerade::{outside, seen};
use crate::net::{Net, merged};
use crate::node::{Container, Node};
use crate::traffic::Place;

/// A feature on a node where one container has it already.
struct Row<'n> {
    node: &'n Node,
    /// The plugins of the list.
    list: Vec<Net<'n>>,
    first: Container,
    /// What each plugin was given, and the last result.
    results: Vec<Value>,
}

impl<'n> Row<'n> {
    fn new(node: &'n Node, list: Vec<Net<'n>>) -> Row<'n> {
        let first = Container::new();
        let results = add(&list, "c1", &first);
        Row { node, list, first, results }
    }

    /// How many plugins of the list refuse this verb with this code.
    fn refusals(&self, verb: &str, code: u64) -> usize {
        let refuses = |(net, prev): (&Net<'_>, &Value)| {
            let net = net.with(&json!({"prevResult": prev}));
            let call = match verb {
                "STATUS" => net.call("STATUS", "").without("CNI_CONTAINERID"),
                _ => net.on(verb, &self.first),
            };
            if call.run().status == Some(0) {
                return false;
            }
            let error = call.error();
            assert_eq!(error.code, code, "{}", error.msg);
            assert!(error.details.contains("cnibox repair"), "{}: {}", error.msg, error.details);
            true
        };
        self.list.iter().zip(&self.results[1..]).filter(|row| refuses(*row)).count()
    }

    /// Each way of damage in turn; `holds` tries the first container and a later one, whose
    /// address it gets.
    #[track_caller]
    fn survives(&self, damages: &[String], holds: impl Fn(&Container, &Container, &str)) {
        for damage in damages {
            println!("{damage}");
            self.node.sh(damage);
            assert_ne!(self.refusals("STATUS", 50), 0, "STATUS is silent: {damage}");
            assert_ne!(self.refusals("CHECK", 999), 0, "CHECK is silent: {damage}");
            let second = Container::new();
            let results = add(&self.list, "c2", &second);
            let ip = results[1]["ips"][0]["address"].as_str().unwrap();
            holds(&self.first, &second, ip.split('/').next().unwrap());
            assert_eq!(self.refusals("STATUS", 50), 0, "{damage}");
            assert_eq!(self.refusals("CHECK", 999), 0, "{damage}");
            for (net, prev) in self.list.iter().zip(&results[1..]).rev() {
                let net = net.with(&json!({"prevResult": prev}));
                net.call("DEL", "c2").netns(&second.path()).ok();
            }
            assert!(!self.node.sh("nft list ruleset").contains("id: c2"), "{damage}");
        }
    }
}

/// ADD by each plugin of the list: nothing, and each result.
fn add(list: &[Net<'_>], id: &str, container: &Container) -> Vec<Value> {
    let mut results = vec![Value::Null];
    for net in list {
        let net = net.with(&json!({"prevResult": results.last()}));
        results.push(net.call("ADD", id).netns(&container.path()).result());
    }
    results
}

/// Every way to flush what cnibox has in nftables now. In chains without fixed rules there is nothing
/// that could be missed.
fn damages(node: &Node) -> Vec<String> {
    let rules: Value = serde_json::from_str(&node.sh("nft -j list ruleset")).unwrap();
    let mut all = vec!["nft flush ruleset".to_owned()];
    for object in rules["nftables"].as_array().unwrap() {
        let (kind, object) = object.as_object().unwrap().iter().next().unwrap();
        let [family, table, name] =
            ["family", "table", "name"].map(|key| object[key].as_str().unwrap_or_default());
        match kind.as_str() {
            "table" => {
                all.push(format!("nft flush table {family} {name}"));
                all.push(format!("nft delete table {family} {name}"));
            }
            "chain" if !["admin", "conditional"].contains(&name) => {
                all.push(format!("nft flush chain {family} {table} {name}"));
            }
            "set" | "map" => all.push(format!("nft flush {kind} {family} {table} {name}")),
            _ => {}
        }
    }
    all
}

fn bridge<'n>(node: &'n Node, keys: &Value) -> Net<'n> {
    let mut ipam = node.host_local(&["10.1.2.0/24", "2001:db8:1::/64"]);
    ipam["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
    let base = json!({"bridge": "br0", "isGateway": true, "ipam": ipam});
    Net::new(node, "bridge", "1.1.0", &merged(&base, keys))
}

#[test]
fn masquerading_comes_back() {
    let node = Node::new();
    let outside = outside(&node);
    let net = bridge(&node, &json!({"ipMasq": true, "ipMasqBackend": "nftables"}));
    let row = Row::new(&node, vec![net]);
    let damages = damages(&node);
    assert!(damages.len() >= 8, "{damages:?}");
    row.survives(&damages, |first, second, ip| {
        for (ip, host) in [("192.0.2.2", "192.0.2.1"), ("2001:db8:ff::2", "2001:db8:ff::1")] {
            assert_eq!(seen(first, &outside, ip), host);
            assert_eq!(seen(second, &outside, ip), host);
        }
        assert_eq!(seen(first, second, ip), "10.1.2.2", "inside the subnet");
    });
}

#[test]
fn the_check_of_source_macs_comes_back() {
    let node = Node::new();
    let row = Row::new(&node, vec![bridge(&node, &json!({"macspoofchk": true}))]);
    let damages = damages(&node);
    assert!(damages.len() >= 6, "{damages:?}");
    row.survives(&damages, |first, second, _| {
        for container in [first, second] {
            let link = container.sh("ip -o link show eth0");
            let own = link.split("ether ").nth(1).unwrap().split(' ').next().unwrap();
            assert!(container.reaches("10.1.2.1"));
            container.sh("ip link set eth0 address 02:00:00:00:00:99 && ip neigh flush all");
            assert!(!container.reaches_within("10.1.2.1", 1), "spoofed");
            container.sh(&format!("ip link set eth0 address {own}"));
            assert!(container.reaches("10.1.2.1"));
        }
    });
}

fn firewall<'n>(node: &'n Node, policy: &str) -> Net<'n> {
    let keys = json!({"backend": "nftables", "ingressPolicy": policy});
    Net::new(node, "firewall", "1.1.0", &keys)
}

#[test]
fn isolated_neighbours_stay_silent() {
    let node = Node::new();
    let row = Row::new(&node, vec![bridge(&node, &json!({})), firewall(&node, "isolated")]);
    let damages = damages(&node);
    assert!(damages.len() >= 13, "{damages:?}");
    row.survives(&damages, |first, second, ip| {
        assert!(first.reaches("10.1.2.1") && second.reaches("10.1.2.1"));
        assert!(!first.reaches_within(ip, 1), "isolated");
        assert!(!second.reaches_within("10.1.2.2", 1), "isolated");
    });
}

#[test]
fn what_the_firewall_accepts_passes_again() {
    let node = Node::new();
    let outside = outside(&node);
    outside.sh("ip route add 10.1.2.0/24 via 192.0.2.1");
    let row = Row::new(&node, vec![bridge(&node, &json!({})), firewall(&node, "same-bridge")]);
    node.sh("nft chain inet cnibox_firewall forward '{ policy drop; }'");
    node.sh("nft 'add rule inet cnibox_firewall admin counter comment \"mine\"'");
    let is_partial =
        |damage: &String| ["flush chain", "flush set"].iter().any(|word| damage.contains(word));
    let damages: Vec<_> = damages(&node).into_iter().filter(is_partial).collect();
    row.survives(&damages, |first, second, ip| {
        assert!(first.reaches("192.0.2.2") && second.reaches("192.0.2.2"));
        assert!(first.reaches(ip), "neighbours");
        let rules = node.sh("nft list table inet cnibox_firewall");
        assert!(rules.contains("policy drop") && rules.contains("\"mine\""), "{rules}");
    });
}
