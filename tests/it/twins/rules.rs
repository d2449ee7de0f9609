//! Rules of attachments. With iptables on both nodes they are the words of `iptables-save`; with
//! nftables, whose layouts differ, what they say: which port is published for whom, and which
//! address is masqueraded or accepted.

use std::collections::{BTreeMap, BTreeSet};

use regex_lite::{Captures, Regex};

use super::plan::{Extra, Network, Rules};
use crate::support::node::Node;
use crate::support::snapshot::without_recorded;

/// A rule, and whose it is as far as it says.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Rule {
    pub(super) text: String,
    owner: Owner,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Owner {
    Attachment {
        pod: String,
        net: Option<String>,
    },
    /// All attachments that have the address and, in their network, this.
    Address(String, Extra),
    /// A chain to which nothing leads.
    Nobody,
}

impl Rule {
    fn published(pod: &str, net: Option<&str>, [protocol, port, addr, target]: [&str; 4]) -> Rule {
        let owner = Owner::Attachment { pod: pod.to_owned(), net: net.map(str::to_owned) };
        Rule {
            text: format!("rule: {protocol} {port} is published for {pod} at {addr}:{target}"),
            owner,
        }
    }

    fn masquerades(addr: &str) -> Rule {
        let owner = Owner::Address(addr.to_owned(), Extra::Masquerade);
        Rule { text: format!("rule: {addr} is masqueraded"), owner }
    }

    fn accepts(addr: &str) -> Rule {
        Rule {
            text: format!("rule: {addr} is accepted"),
            owner: Owner::Address(addr.to_owned(), Extra::Firewall),
        }
    }

    /// Whether this attachment may have it. A chain may have rules of a former address of the
    /// container.
    pub(super) fn is_of(&self, pod: &str, net: &Network, addresses: &[String]) -> bool {
        match &self.owner {
            Owner::Attachment { pod: owner, net: of } => {
                let mut mentioned = captures(r"10\.\d\.0\.[1-9]\d*", &self.text).into_iter();
                let is_its_own = |addr: Captures<'_>| addresses.iter().any(|own| own == &addr[0]);
                owner == pod
                    && of.as_ref().is_none_or(|of| of == net.name)
                    && mentioned.all(is_its_own)
            }
            Owner::Address(addr, extra) => net.has(*extra) && addresses.contains(addr),
            Owner::Nobody => false,
        }
    }
}

/// The rules of all attachments.
pub(super) fn rules(node: &Node, rules: Rules) -> Vec<Rule> {
    let words = words(&node.sh("iptables-save"));
    if rules == Rules::Iptables {
        return words;
    }
    let said = words.iter().filter_map(said_by_iptables);
    let set: BTreeSet<Rule> =
        said.chain(said_by_nftables(&without_recorded(&node.sh("nft -s list ruleset")))).collect();
    set.into_iter().collect()
}

fn captures<'t>(pattern: &str, text: &'t str) -> Vec<Captures<'t>> {
    Regex::new(pattern).unwrap().captures_iter(text).collect()
}

/// The rules of `iptables-save` that name a container, or an address of one, or are in a chain of
/// one.
fn words(saved: &str) -> Vec<Rule> {
    let comment = r#"name: \\"(\w+)\\" id: \\"twin-(\w+)\\""#;
    let owner_named = |line: &str| {
        let names = captures(comment, line);
        let names = names.first()?;
        Some(Owner::Attachment { pod: names[2].to_owned(), net: Some(names[1].to_owned()) })
    };
    let lines = || saved.lines().filter_map(|line| line.strip_prefix("-A "));
    let jump = |line: &str| Some((line.rsplit_once("-j CNI-")?.1.to_owned(), owner_named(line)?));
    let chains: BTreeMap<String, Owner> = lines().filter_map(jump).collect();
    let owner = |line: &str| {
        let chain = line.split(' ').next()?.strip_prefix("CNI-")?;
        let is_own = chain.starts_with("DN-") || chain.bytes().all(|byte| byte.is_ascii_hexdigit());
        let forwarded = captures(r"^CNI-FORWARD -[sd] ([0-9.]+)/32 ", line);
        match forwarded.first() {
            // A row of docs/parity.md: "published ports of a container where the host drops ...".
            Some(_) if line.contains("cnibox: published ports") => None,
            Some(addr) => Some(Owner::Address(addr[1].to_owned(), Extra::Firewall)),
            None if is_own => Some(chains.get(chain).cloned().unwrap_or(Owner::Nobody)),
            None => None,
        }
    };
    let rule = |line: &str| {
        let owner = owner_named(line).or_else(|| owner(line))?;
        Some(Rule { text: format!("rule: {line}"), owner })
    };
    lines().filter_map(rule).collect()
}

/// What a rule of iptables says.
fn said_by_iptables(rule: &Rule) -> Option<Rule> {
    let first = |pattern: &str| captures(pattern, &rule.text).into_iter().next();
    if let Some(dnat) =
        first(r"-p (\w+) -m \w+ --dport (\d+) -j DNAT --to-destination ([0-9.]+):(\d+)")
    {
        let Owner::Attachment { pod, net } = &rule.owner else { return Some(rule.clone()) };
        return Some(Rule::published(pod, net.as_deref(), [1, 2, 3, 4].map(|n| &dnat[n])));
    }
    if let Some(masquerade) = first("POSTROUTING -s ([0-9.]+)/32 ") {
        return Some(Rule::masquerades(&masquerade[1]));
    }
    let accept = first("CNI-FORWARD -s ([0-9.]+)/32 -j ACCEPT")?;
    Some(Rule::accepts(&accept[1]))
}

/// What the rules of nftables say, in the layouts of cnibox and of the reference.
fn said_by_nftables(ruleset: &str) -> Vec<Rule> {
    let mut rules = Vec::new();
    let element =
        r#"(\w+) \. (\d+) comment "[^"]*id: twin-(\w+), [^"]*net: (\w+)" : ([0-9.]+) \. (\d+)"#;
    for said in captures(element, ruleset) {
        rules.push(Rule::published(&said[3], Some(&said[4]), [1, 2, 5, 6].map(|n| &said[n])));
    }
    let rule = r#"(\w+) dport (\d+) dnat to ([0-9.]+):(\d+) comment "twin-(\w+)""#;
    for said in captures(rule, ruleset) {
        rules.push(Rule::published(&said[5], None, [1, 2, 3, 4].map(|n| &said[n])));
    }
    let element = r#"([0-9.]+) comment "[^"]*id: twin-\w+" : goto subnet-"#;
    let rule = r#"ip saddr ([0-9.]+) ip daddr != \S+ masquerade comment "[^"]*id: twin-\w+""#;
    for said in captures(element, ruleset).into_iter().chain(captures(rule, ruleset)) {
        rules.push(Rule::masquerades(&said[1]));
    }
    let accepted = ruleset.split_once("table inet cnibox_firewall {").map_or("", |(_, rest)| rest);
    let accepted = accepted.split_once("set pods6 {").map_or("", |(pods, _)| pods);
    for said in captures(r#"([0-9.]+) comment "[^"]*id: twin-"#, accepted) {
        rules.push(Rule::accepts(&said[1]));
    }
    rules
}
