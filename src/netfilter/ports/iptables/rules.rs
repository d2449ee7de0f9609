//! The words of a container's iptables rules: the reference plugin's, so that the CHECK of either
//! finds what the other made. What the reference does not have stands in rules beside them, which
//! its CHECK passes over and its DEL takes with the chain:
//!
//! - at the end of the chain a comment that tells the interface, and does nothing;
//! - for mappings of one address of the host, entries in front of all others, so that a mapping of
//!   every address, by whomever and whenever, does not get there first.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

use super::super::{Forward, Mapping, Snat, Target};
use crate::cni::ip::host_net;
use crate::netfilter::backend::Family;
use crate::netfilter::iptables::Rule;
use crate::netfilter::names::Owner;
use crate::sort::sort_by_key;

/// The chain that leads to the chains of containers.
pub(super) const TOP: &str = "CNI-HOSTPORT-DNAT";
pub(super) const SETMARK: &str = "CNI-HOSTPORT-SETMARK";
pub(super) const MASQ: &str = "CNI-HOSTPORT-MASQ";

/// How many ports the kernel takes in one rule.
const MULTIPORT: usize = 15;
/// The longest comment.
const COMMENT: usize = 255;
/// What the comment begins with that tells an interface.
const INTERFACE: &str = "if: ";

/// What only iptables knows of the mappings.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Options<'a> {
    /// The bit of a packet's mark that asks for masquerading.
    pub mark_bit: u8,
    /// A chain that another program made and that sets such a mark.
    pub set_mark_chain: Option<Cow<'a, str>>,
    /// More conditions of IPv4 and IPv6, as words of iptables.
    pub conditions: [Cow<'a, [String]>; 2],
}

/// What an attachment is to have in the table of one family.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// All that is to be forwarded.
    pub forward: &'a Forward<'a>,
    /// The address of the family.
    pub target: &'a Target,
    /// What only iptables knows.
    pub options: &'a Options<'a>,
}

impl<'a> Wanted<'a> {
    /// The rules that the attachment is to have in each family.
    pub fn each(forward: &'a Forward<'a>, options: &'a Options<'a>) -> Vec<Wanted<'a>> {
        forward.targets.iter().map(|target| Wanted { forward, target, options }).collect()
    }

    pub(super) fn mappings(self) -> impl Iterator<Item = &'a Mapping> {
        self.forward.mappings_to(self.target)
    }

    pub(super) fn conditions(self) -> &'a [String] {
        &self.options.conditions[usize::from(self.target.family() == Family::V6)]
    }

    /// Whether it needs the chains of our own that mark and masquerade.
    pub(super) fn masquerades(self) -> bool {
        self.options.set_mark_chain.is_none() && self.forward.snat != Snat::Never
    }
}

/// The rules that all attachments share: two entries, and three that masquerade.
pub(super) fn shared_rules(options: &Options<'_>) -> [Rule; 5] {
    let [prerouting, output] = entries();
    let mark = 1_u32 << options.mark_bit;
    let mark = format!("{mark:#x}/{mark:#x}");
    [
        prerouting,
        output,
        Rule::every(SETMARK)
            .comment("CNI portfwd masquerade mark")
            .target("MARK")
            .with(["--set-xmark", &mark]),
        Rule::new(MASQ, ["-m", "mark", "--mark", &mark]).target("MASQUERADE"),
        Rule::every("POSTROUTING").comment("CNI portfwd requiring masquerade").target(MASQ),
    ]
}

/// The rules that lead to the chains of containers.
pub(super) fn entries() -> [Rule; 2] {
    ["PREROUTING", "OUTPUT"]
        .map(|chain| Rule::new(chain, ["-m", "addrtype", "--dst-type", "LOCAL"]).target(TOP))
}

/// The rule that tells whose interface the chain is for.
pub(super) fn marker(chain: &str, ifname: &str) -> Rule {
    Rule::every(chain).comment(&format!("{INTERFACE}{ifname}"))
}

/// The interface that a rule of a container's chain tells.
pub(super) fn interface(rule: &Rule) -> Option<&str> {
    rule.value("--comment")?.strip_prefix(INTERFACE)
}

/// `dnat name: "<network>" id: "<id>"`
pub(super) fn entry_comment(owner: Owner<'_>) -> String {
    let mut text = format!("dnat {}", owner.rule_comment());
    if text.len() > COMMENT {
        text.truncate(COMMENT - 3);
        text.push_str("...");
    }
    text
}

/// The entry rules and the rules of the chain, in the reference's words.
pub(super) fn rules(wanted: Wanted<'_>, chain: &str) -> Vec<Rule> {
    let forward = wanted.forward;
    // Also of mappings that are for the other family alone: so has the reference.
    let entries = entries_to(forward.owner, None, &forward.mappings.iter().collect::<Vec<_>>());
    let conditional = |entry: Rule| entry.with(wanted.conditions()).target(chain);
    let mut mappings: Vec<&Mapping> = wanted.mappings().collect();
    // Of its own, too, one of every address would get there first.
    sort_by_key(&mut mappings, |mapping| mapping.address().is_none());
    let of_mappings = mappings.into_iter().flat_map(|mapping| rules_of(wanted, mapping, chain));
    entries.into_iter().map(conditional).chain(of_mappings).collect()
}

/// The entry rules for mappings of one address of the host. Those with conditions have none: they
/// are asked in the order of their containers.
pub(super) fn entries_ahead(wanted: Wanted<'_>, chain: &str) -> Vec<Rule> {
    if !wanted.conditions().is_empty() {
        return Vec::new();
    }
    let addrs: BTreeSet<IpAddr> = wanted.mappings().filter_map(Mapping::address).collect();
    let of = |addr: IpAddr| {
        let mappings = wanted.mappings().filter(|m| m.address() == Some(addr));
        entries_to(wanted.forward.owner, Some(addr), &mappings.collect::<Vec<_>>())
    };
    addrs.into_iter().flat_map(of).map(|entry| entry.target(chain)).collect()
}

/// Entry rules without conditions and targets: for each protocol, and as many ports as fit.
fn entries_to(owner: Owner<'_>, addr: Option<IpAddr>, mappings: &[&Mapping]) -> Vec<Rule> {
    let protocols: BTreeSet<String> = mappings.iter().map(|m| m.proto.to_string()).collect();
    let to = addr.map(|addr| ["-d".to_owned(), host_net(addr).to_string()]);
    let mut all = Vec::new();
    for proto in protocols {
        let mine = mappings.iter().filter(|m| m.proto.to_string() == proto);
        let ports: Vec<String> = mine.map(|m| m.host_port.to_string()).collect();
        for ports in ports.chunks(MULTIPORT) {
            let rule = Rule::new(TOP, to.iter().flatten()).with(["-p", &proto]);
            let rule = rule.comment(&entry_comment(owner));
            all.push(rule.with(["-m", "multiport", "--dports", &ports.join(",")]));
        }
    }
    all
}

/// The rules of one mapping.
fn rules_of(wanted: Wanted<'_>, mapping: &Mapping, chain: &str) -> Vec<Rule> {
    let Wanted { forward, target, options } = wanted;
    let rule = |source: Option<String>| {
        let mut words: Vec<String> = Vec::new();
        words.extend(source.into_iter().flat_map(|source| ["-s".to_owned(), source]));
        if let Some(addr) = mapping.address() {
            words.extend(["-d".to_owned(), host_net(addr).to_string()]);
        }
        let (proto, port) = (mapping.proto.to_string(), mapping.host_port.to_string());
        Rule::new(chain, words).with(["-p", &proto, "-m", &proto, "--dport", &port])
    };
    let set_mark = options.set_mark_chain.as_deref().unwrap_or(SETMARK);
    let mut all = Vec::new();
    match forward.snat {
        Snat::Never => {}
        Snat::Always => all.push(rule(None).target(set_mark)),
        Snat::WhereNeeded => {
            all.push(rule(Some(target.net.trunc().to_string())).target(set_mark));
            if target.addr().is_ipv4() {
                all.push(rule(Some("127.0.0.1/32".to_owned())).target(set_mark));
            }
        }
    }
    let to = SocketAddr::new(target.addr(), mapping.container_port).to_string();
    all.push(rule(None).target("DNAT").with(["--to-destination", &to]));
    all
}

/// Network and container of an entry rule's comment.
pub(super) fn parse_comment(text: &str) -> Option<(&str, &str)> {
    let (network, id) = text.strip_prefix("dnat name: \"")?.split_once("\" id: \"")?;
    Some((network, id.strip_suffix('"')?))
}
