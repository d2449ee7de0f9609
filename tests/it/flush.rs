//! The flush matrix: after an administrator flushes any part of the rules, CHECK reports the loss,
//! STATUS succeeds and restores all containers, and so does one ADD of another container, verified
//! with traffic.
//!
//! A row is a list of plugins and its expectations. The damages are derived from the live rules:
//! flushing the ruleset, flushing or deleting each table, each chain, each set and map.

mod iptables;
mod repair;

use std::path::Path;
use std::time::Instant;

use cnibox::testing::attachment::AttachmentRecord;
use cnibox::testing::netfilter::filter::{self, FirewallPart, IngressPolicy};
use cnibox::testing::netfilter::spoof::SpoofPart;
use cnibox::testing::netfilter::{AttachmentId, PacketFilter, RuleBackend, masquerade, spoof};
use cnibox::testing::netfilter::{ReconcileMode, reconcile_all};
use cnibox::testing::netlink::MacAddress;
use cnibox::testing::netns::NetnsIdentity;
use ipnet::IpNet;
use serde_json::{Value, json};

use crate::masquerade::{outside, seen};
use crate::portmap::tcp;
use crate::support::net::{Net, merged};
use crate::support::node::{Container, Node};
use crate::support::strace;
use crate::support::traffic::Place;

/// A plugin list on a node with one attached container.
struct Row<'n> {
    node: &'n Node,
    /// The plugins of the list.
    list: Vec<Net<'n>>,
    /// The plugin list of the later container.
    later: Vec<Net<'n>>,
    first: Container,
    /// `prevResult` of each plugin, and the final result.
    results: Vec<Value>,
}

impl<'n> Row<'n> {
    fn new(node: &'n Node, list: Vec<Net<'n>>) -> Row<'n> {
        let first = Container::new();
        let results = add(&list, "c1", &first);
        let later = list.iter().map(|net| net.with(&json!({}))).collect();
        Row { node, list, later, first, results }
    }

    /// The number of plugins in the list that fail `verb` with `code`.
    fn refusals(&self, verb: &str, code: u64) -> usize {
        let refuses = |(net, prev): (&Net<'_>, &Value)| {
            let net = net.with(&json!({"prevResult": prev}));
            let call = match verb {
                "STATUS" => net.call("STATUS", "").without("CNI_CONTAINERID"),
                _ => net.on(verb, &self.first),
            };
            let outcome = call.run();
            if outcome.status == Some(0) {
                return false;
            }
            let error: Value = serde_json::from_str(&outcome.stdout).unwrap();
            assert_eq!(error["code"], code, "{outcome:?}");
            assert!(error["details"].as_str().unwrap().contains("cnibox repair"), "{outcome:?}");
            true
        };
        self.list.iter().zip(&self.results[1..]).filter(|row| refuses(*row)).count()
    }

    /// Applies each damage in turn, once healed by STATUS and once by ADD. `holds` verifies the
    /// first and the later container; its third argument is the address of the later container.
    #[track_caller]
    fn survives(&self, damages: &[String], holds: impl Fn(&Container, &Container, &str)) {
        for damage in damages {
            println!("{damage}");
            self.node.sh(damage);
            assert_ne!(self.refusals("CHECK", 999), 0, "CHECK is silent: {damage}");
            assert_eq!(self.refusals("STATUS", 50), 0, "STATUS heals: {damage}");
            assert_eq!(self.refusals("CHECK", 999), 0, "STATUS has restored nothing: {damage}");
            self.node.sh(damage);
            assert_ne!(self.refusals("CHECK", 999), 0, "CHECK is silent: {damage}");
            let second = Container::new();
            let results = add(&self.later, "c2", &second);
            let ip = results[1]["ips"][0]["address"].as_str().unwrap();
            holds(&self.first, &second, ip.split('/').next().unwrap());
            assert_eq!(self.refusals("CHECK", 999), 0, "{damage}");
            assert_eq!(self.refusals("STATUS", 50), 0, "{damage}");
            for (net, prev) in self.later.iter().zip(&results[1..]).rev() {
                let net = net.with(&json!({"prevResult": prev}));
                net.call("DEL", "c2").netns(&second.path()).ok();
            }
            assert!(!self.node.sh("nft list ruleset").contains("id: c2"), "{damage}");
        }
    }
}

/// ADD by each plugin of the list; returns null and each result.
fn add(list: &[Net<'_>], id: &str, container: &Container) -> Vec<Value> {
    let mut results = vec![Value::Null];
    for net in list {
        let net = net.with(&json!({"prevResult": results.last()}));
        results.push(net.call("ADD", id).netns(&container.path()).result());
    }
    results
}

/// Every way to flush cnibox's current nftables objects. Chains without static rules are skipped,
/// as their loss cannot be detected.
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
            "chain" if name != "admin" => {
                all.push(format!("nft flush chain {family} {table} {name}"));
            }
            // Filled by packets.
            "set" if object["flags"].to_string().contains("timeout") => {}
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

/// STATUS, CHECK and repair report no loss with any family, back end or policy: a false STATUS
/// error makes the node `NotReady`.
#[test]
fn an_intact_host_needs_no_restoration_after_add() {
    let node = Node::new();
    let subnets = [&["10.1.2.0/24"][..], &["2001:db8:1::/64"], &["10.1.2.0/24", "2001:db8:1::/64"]];
    for (subnets, backend) in subnets.iter().flat_map(|s| ["nftables", "iptables"].map(|b| (s, b)))
    {
        for (policy, snat) in [("open", true), ("same-bridge", false), ("isolated", true)] {
            let keys = json!({"bridge": "br0", "isDefaultGateway": true, "ipMasq": true,
                "ipMasqBackend": backend, "macspoofchk": true, "ipam": node.host_local(subnets)});
            let portmap = json!({"backend": backend, "snat": snat, "runtimeConfig": {
                "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]}});
            let firewall = json!({"backend": backend, "ingressPolicy": policy});
            let plugins = [("bridge", keys), ("portmap", portmap), ("firewall", firewall)];
            let net = |(name, keys): &(&'static str, Value)| Net::new(&node, name, "1.1.0", keys);
            let case = format!("{subnets:?} {backend} {policy} {snat}");
            let row = Row::new(&node, plugins.iter().map(net).collect());
            assert_eq!(row.refusals("CHECK", 999) + row.refusals("STATUS", 50), 0, "{case}");
            let repaired = node.cnibox(&["repair"]).run().stdout;
            assert_eq!(repaired, "nothing was missing\n", "{case}");
            for (net, prev) in row.list.iter().zip(&row.results[1..]).rev() {
                let net = net.with(&json!({"prevResult": prev}));
                net.call("DEL", "c1").netns(&row.first.path()).ok();
            }
            assert_eq!(row.refusals("STATUS", 50), 0, "{case}: afterwards");
            node.sh("ip link del br0; nft flush ruleset");
        }
    }
}

#[test]
fn add_restores_masquerading() {
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
fn add_restores_the_source_mac_check() {
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
fn add_restores_isolation() {
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
fn add_restores_accepted_traffic() {
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

#[test]
fn add_restores_host_ports() {
    let node = Node::new();
    let portmap = |keys: &Value| {
        let net = Net::new(&node, "portmap", "1.1.0", &json!({"backend": "nftables"}));
        net.with(keys)
    };
    let on =
        |ip: &str| json!({"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": ip});
    let ports = json!([on(""), on("10.1.2.1")]);
    let keys = json!({"runtimeConfig": {"portMappings": ports},
        "conditionsV6": ["ip6 saddr != 2001:db8:5::/64"]});
    let gateway = json!({"isDefaultGateway": true});
    let mut row = Row::new(&node, vec![bridge(&node, &gateway), portmap(&keys)]);
    let damages = damages(&node);
    assert!(damages.len() >= 17, "{damages:?}");
    let holds = |first: &Container, second: &Container, _: &str| {
        for target in ["10.1.2.1:8080", "127.0.0.1:8080", "[2001:db8:1::1]:8080"] {
            assert!(tcp(&node, first, target, 80).is_some(), "{target}");
        }
        assert!(tcp(second, first, "10.1.2.1:8080", 80).is_some(), "a neighbour");
    };
    row.later[1] = portmap(&json!({"runtimeConfig": {"portMappings": [
        {"hostPort": 8081, "containerPort": 80, "protocol": "udp"}]}}));
    row.survives(&damages, holds);
    // ADD without port mappings repairs too.
    row.later[1] = portmap(&json!({}));
    row.survives(&damages, holds);
}

#[test]
fn a_table_of_other_rules_is_rebuilt() {
    let node = Node::new();
    let outside = outside(&node);
    let net = bridge(&node, &json!({"ipMasq": true, "ipMasqBackend": "nftables"}));
    let row = Row::new(&node, vec![net]);
    let comment =
        node.sh("nft list ruleset | grep -o '[0-9a-f-]*, net: net, if: eth0, id: c1' | head -1");
    let t = "inet cnibox_masquerade";
    let replace_rules = || {
        node.sh(&format!(
            "rm -rf /run/cni/cnibox/masquerade; nft flush ruleset; nft '
        add table {t}
        add map {t} pods4 {{ type ipv4_addr : verdict; }}
        add map {t} pods6 {{ type ipv6_addr : verdict; }}
        add chain {t} postrouting {{ type nat hook postrouting priority srcnat; }}
        add chain {t} subnet-10.1.2.0/24
        add rule {t} postrouting ip daddr 224.0.0.0/4 return
        add rule {t} postrouting ip saddr vmap @pods4
        add rule {t} subnet-10.1.2.0/24 ip daddr != 10.1.2.0/24 masquerade
        add element {t} pods4 {{ 10.1.2.2 comment \"{}\" : goto subnet-10.1.2.0/24 }}'",
            comment.trim()
        ))
    };
    let is_rebuilt = || {
        let rules = node.sh("nft list ruleset");
        rules.contains("comment \"by source\"") && rules.contains("10.1.2.2 comment")
    };
    replace_rules();
    assert!(!is_rebuilt());
    assert_eq!(row.refusals("STATUS", 50), 0);
    assert!(is_rebuilt(), "by STATUS");
    replace_rules();
    let second = Container::new();
    add(&row.list, "c2", &second);
    assert_eq!(seen(&row.first, &outside, "192.0.2.2"), "192.0.2.1");
    assert!(is_rebuilt(), "by ADD");
    row.list[0].call("DEL", "c1").netns("").ok();
    assert!(!node.sh("nft list ruleset").contains("id: c1"));
}

#[test]
fn del_and_gc_work_when_one_of_two_tables_is_gone() {
    let node = Node::new();
    for verb in ["DEL", "GC"] {
        let list = vec![bridge(&node, &json!({})), firewall(&node, "isolated")];
        let row = Row::new(&node, list);
        node.sh("nft delete table inet cnibox_firewall");
        let valid = json!({"cni.dev/valid-attachments": []});
        row.list[1].with(&valid).call(verb, "c1").netns("").ok();
        assert!(!node.sh("nft list ruleset").contains("id: c1"), "{verb}");
        assert_eq!(node.sh("ls /run/cni/cnibox/firewall"), "", "{verb}");
        row.list[0].call("DEL", "c1").netns(&row.first.path()).ok();
    }
}

#[test]
fn del_and_gc_work_when_the_chain_of_a_subnet_is_empty() {
    let node = Node::new();
    for verb in ["DEL", "GC"] {
        let net = bridge(&node, &json!({"ipMasq": true, "ipMasqBackend": "nftables"}));
        let row = Row::new(&node, vec![net]);
        let second = Container::new();
        add(&row.list, "c2", &second);
        node.sh("nft flush table inet cnibox_masquerade");
        let valid = json!({"cni.dev/valid-attachments": [{"containerID": "c2", "ifname": "eth0"}]});
        row.list[0].with(&valid).call(verb, "c1").netns(&row.first.path()).ok();
        let rules = node.sh("nft list table inet cnibox_masquerade");
        assert!(!rules.contains("id: c1") && rules.contains("id: c2"), "{verb}: {rules}");
        row.list[0].call("DEL", "c2").netns(&second.path()).ok();
        let rules = node.sh("nft list table inet cnibox_masquerade");
        assert!(!rules.contains("subnet-"), "{verb}: {rules}");
    }
}

#[test]
fn damage_in_another_table_does_not_block_add() {
    let node = Node::new();
    let outside = outside(&node);
    node.sh("nft 'add table inet cnibox_firewall; add set inet cnibox_firewall pods4 { type ether_addr; }'");
    let net = bridge(&node, &json!({"ipMasq": true, "ipMasqBackend": "nftables"}));
    let container = Container::new();
    net.add(&container);
    assert_eq!(seen(&container, &outside, "192.0.2.2"), "192.0.2.1");
}

#[test]
fn add_reads_intact_tables_once() {
    let node = Node::new();
    let net = bridge(&node, &json!({"ipMasq": true, "ipMasqBackend": "nftables"}));
    let [one, two] = [Container::new(), Container::new()];
    net.add(&one);
    let (outcome, calls) = strace::record(&node, &net.call("ADD", "c2").netns(&two.path()));
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    let socket = calls.iter().find(|call| call.text.contains("NETLINK_NETFILTER)")).unwrap();
    let (_, fd) = socket.text.rsplit_once(" = ").unwrap();
    let on_netfilter = |call: &&strace::Syscall| {
        let moves = call.name.starts_with("send") || call.name.starts_with("recv");
        moves && call.text.starts_with(&format!("{fd},"))
    };
    let names: Vec<_> = calls.iter().filter(on_netfilter).map(|call| call.name.as_str()).collect();
    let requests = names.iter().filter(|name| **name == "sendto").count();
    assert_eq!(requests, 2, "one to look, one to commit: {names:?}");
    // A receive for each element, for each part of the list of rules, and for each acknowledgement.
    assert!(names.len() <= 2 + 8 + 2, "{names:?}");
}

/// Many attachments that use every feature.
fn crowd(count: u32) -> impl Iterator<Item = (String, IpNet, SpoofPart)> {
    (0..count).map(|n| {
        let addr = format!("10.2.{}.{}/16", n / 250, n % 250 + 1).parse().unwrap();
        let [.., high, low] = n.to_be_bytes();
        let port =
            SpoofPart { name: format!("veth{n:08x}"), mac: MacAddress([2, 0, 0, 0, high, low]) };
        (format!("crowd-{n}"), addr, port)
    })
}

#[test]
fn one_add_restores_500_containers() {
    let node = Node::new();
    let (filter, home) = (PacketFilter::new(), Container::new());
    for (id, addr, port) in crowd(500) {
        let owner = AttachmentId { network: "crowd", ifname: "eth0", id: &id };
        let netns = NetnsIdentity::at_path(Path::new(&home.path()));
        let record =
            AttachmentRecord { netns, ..AttachmentRecord::new(owner, "bridge", &home.path()) };
        record.save_with_addresses().unwrap();
        masquerade::add_addresses(
            &filter,
            RuleBackend::Nftables,
            owner,
            &[addr],
            &masquerade::MasqueradeOptions::default(),
        )
        .unwrap();
        spoof::add_port(&filter, owner, &port).unwrap();
        let pod = FirewallPart {
            backend: RuleBackend::Nftables,
            ips: vec![addr.addr()],
            ports: vec![port.name],
            policy: IngressPolicy::Isolated,
            bridge: Some("br9".to_owned()),
            admin: Some("CNI-ADMIN".to_owned()),
        };
        filter::add_rules(&filter, owner, &pod).unwrap();
    }
    let rules = || -> Vec<String> {
        let text = node.sh("nft -s list ruleset");
        let mut words: Vec<_> = text.split(['{', ',', '}']).map(|w| w.trim().to_owned()).collect();
        words.sort();
        words
    };
    let before = rules();
    node.sh("nft flush ruleset");
    let net = bridge(&node, &json!({"ipMasq": true, "ipMasqBackend": "nftables"}));
    let container = Container::new();
    let call = net.on("ADD", &container);
    let start = Instant::now();
    call.result();
    // Below one second in an optimised build; not asserted, as the machine may be busy.
    println!("{:?}", start.elapsed());
    net.del(&container);
    assert_eq!(rules(), before);
}

#[test]
fn rules_of_deleted_containers_are_not_restored() {
    let node = Node::new();
    let names: Vec<String> = (0..20).map(|n| format!("c{n}")).collect();
    let each = |act: &dyn Fn(&PacketFilter, AttachmentId<'_>, &[IpNet])| {
        let filter = PacketFilter::new();
        for (n, id) in names.iter().enumerate() {
            let addr = format!("10.1.2.{}/24", n + 2).parse().unwrap();
            act(&filter, AttachmentId { network: "net", ifname: "eth0", id }, &[addr]);
        }
    };
    for round in 0..40 {
        each(&|filter, owner, addrs| {
            masquerade::add_addresses(
                filter,
                RuleBackend::Nftables,
                owner,
                addrs,
                &masquerade::MasqueradeOptions::default(),
            )
            .unwrap();
        });
        node.sh("nft flush ruleset");
        std::thread::scope(|scope| {
            scope.spawn(|| reconcile_all(&PacketFilter::new(), ReconcileMode::Apply).unwrap());
            each(&|filter, owner, addrs| {
                masquerade::delete_addresses(filter, owner, addrs).unwrap();
            });
        });
        let rules = node.sh("nft list ruleset");
        assert!(!rules.contains("id: c"), "round {round}: {rules}");
    }
    assert_eq!(node.sh("find /run/cni/cnibox -type f"), "");
}
