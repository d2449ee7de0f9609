//! firewall: lifecycle in every version and back end, owners, refusals; the submodules test
//! traffic, the reference's iptables rules, untrusted strings, and firewalld.

pub(crate) mod firewalld;
mod lifecycle;
mod odd;
mod published;
mod reference;
mod traffic;
mod words;

use serde_json::{Value, json};

use crate::support::net::{Net, merged};
use crate::support::node::Node;

/// The supported CNI versions.
const VERSIONS: [&str; 3] = ["0.4.0", "1.0.0", "1.1.0"];

/// Back ends without a daemon.
const BACKENDS: [&str; 2] = ["nftables", "iptables"];

const IPS: [&str; 2] = ["10.1.2.2/24", "2001:db8:1::2/64"];
const OTHER: [&str; 2] = ["10.1.2.3/24", "2001:db8:1::3/64"];

/// A result of `bridge` with the addresses `ips`.
fn prev(version: &str, ips: &[&str]) -> Value {
    let ip = |text: &&str| {
        let family = if text.contains(':') { "6" } else { "4" };
        match version {
            "0.4.0" => json!({"version": family, "interface": 2, "address": text}),
            _ => json!({"interface": 2, "address": text}),
        }
    };
    let number = ips.last().and_then(|text| text.rsplit(['.', ':', '/']).nth(1));
    let port = format!("veth{}", number.unwrap_or_default());
    let ips: Vec<Value> = ips.iter().map(ip).collect();
    let interfaces = json!([{"name": "br0"}, {"name": port}, {"name": "eth0", "sandbox": "/x"}]);
    match version {
        "0.4.0" => json!({"cniVersion": version, "interfaces": interfaces, "ips": ips, "dns": {}}),
        _ => json!({"cniVersion": version, "interfaces": interfaces, "ips": ips}),
    }
}

/// The network `net` with `prevResult` and `keys`.
fn net<'n>(node: &'n Node, version: &'static str, keys: &Value) -> Net<'n> {
    let base = json!({"prevResult": prev(version, &IPS)});
    Net::new(node, "firewall", version, &merged(&base, keys))
}

/// All rules of both iptables implementations and of cnibox's nftables tables, without counters.
fn rules(node: &Node) -> String {
    let mut text = String::new();
    for family in ["inet", "bridge"] {
        text += &node.sh(&format!("nft list table {family} cnibox_firewall 2>/dev/null || true"));
    }
    for flavour in ["nft", "legacy"] {
        for family in ["iptables", "ip6tables"] {
            let save = format!("{family}-{flavour}-save 2>/dev/null || true");
            let lines = node.sh(&save);
            let lines = lines.lines().filter(|line| !line.starts_with('#'));
            let lines = lines.map(|line| line.split(" [").next().unwrap_or_default());
            let lines: Vec<_> = lines.map(|line| format!("{flavour} {family} {line}")).collect();
            text = format!("{text}{}\n", lines.join("\n"));
        }
    }
    text
}

/// Asserts that two states of the rules are equal.
#[track_caller]
fn assert_same(before: &str, after: &str) {
    crate::support::compare::assert_same("the rules differ", before, after);
}
