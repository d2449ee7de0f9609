//! A container's iptables rules in the words of the reference plugin, so that the CHECK of either implementation
//! accepts the rules of the other. Only a mapping of a single address of the host whose port another container
//! maps at every address gets an additional entry, before all others: it takes precedence, whichever program created
//! the other mapping. The reference's CHECK ignores the entry, and its DEL deletes it with the chain.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::super::{Forward, Mapping, Snat};
use crate::cni::ip::host_net;
use crate::netfilter::iptables::Rule;
use crate::netfilter::names::RULE_COMMENT;
use crate::netfilter::{Family, Owner};
use crate::sort::sort_by_key;

/// The chain that jumps to the chains of containers.
pub(super) const TOP: &str = "CNI-HOSTPORT-DNAT";
pub(super) const SETMARK: &str = "CNI-HOSTPORT-SETMARK";
pub(super) const MASQ: &str = "CNI-HOSTPORT-MASQ";
pub(super) const POSTROUTING: &str = "POSTROUTING";

/// The maximum number of ports in a rule: `XT_MULTI_PORTS`.
const MULTIPORT: usize = 15;

/// Options of the back end iptables.
#[derive(Clone, Serialize, Deserialize)]
pub struct Options {
    /// The bit of a packet's mark that requests masquerading.
    pub mark_bit: u8,
    /// A chain of another program that sets the mark.
    pub set_mark_chain: Option<String>,
    /// Additional conditions for IPv4 and IPv6, as words of iptables.
    pub conditions: [Vec<String>; 2],
}

/// The required rules of an attachment in the table of one family.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub(super) owner: Owner<'a>,
    pub(super) forward: &'a Forward,
    /// The address of the family.
    pub(super) target: IpNet,
    pub(super) options: &'a Options,
}

impl<'a> Wanted<'a> {
    /// The rules of each family; none without [`Forward::options`].
    pub(super) fn each(owner: Owner<'a>, forward: &'a Forward) -> Vec<Wanted<'a>> {
        let Some(options) = &forward.options else { return Vec::new() };
        let wanted = |target| Wanted { owner, forward, target, options };
        forward.targets.iter().copied().map(wanted).collect()
    }

    pub(super) fn family(self) -> Family {
        Family::of(self.target.addr())
    }

    pub(super) fn mappings(self) -> impl Iterator<Item = &'a Mapping> {
        self.forward.mappings_to(self.target)
    }

    pub(super) fn conditions(self) -> &'a [String] {
        &self.options.conditions[usize::from(self.family() == Family::V6)]
    }

    /// Whether our own chains that mark and masquerade are required.
    pub(super) fn masquerades(self) -> bool {
        self.options.set_mark_chain.is_none() && self.forward.snat != Snat::Never
    }
}

/// The rules that all attachments share: two entries, and three that masquerade.
pub(super) fn shared_rules(wanted: Wanted<'_>) -> Vec<Rule> {
    let mut rules = entries().to_vec();
    if wanted.masquerades() {
        let mark = 1_u32 << wanted.options.mark_bit;
        let mark = format!("{mark:#x}/{mark:#x}");
        let set_mark = Rule::new(SETMARK).comment("CNI portfwd masquerade mark").target("MARK");
        rules.push(set_mark.with(&["--set-xmark", &mark]));
        let is_marked = Rule::new(MASQ).with(&["-m", "mark", "--mark", &mark]);
        rules.push(is_marked.target("MASQUERADE"));
        let entry = Rule::new(POSTROUTING).comment("CNI portfwd requiring masquerade");
        rules.push(entry.target(MASQ));
    }
    rules
}

/// The rules that jump to [`TOP`].
pub(super) fn entries() -> [Rule; 2] {
    let is_local = ["-m", "addrtype", "--dst-type", "LOCAL"];
    ["PREROUTING", "OUTPUT"].map(|chain| Rule::new(chain).with(&is_local).target(TOP))
}

/// `dnat name: "<network>" id: "<id>"`, cut as the reference does.
pub(super) fn entry_comment(owner: Owner<'_>) -> String {
    let mut text = format!("dnat {}", owner.rule_name());
    if text.len() > RULE_COMMENT {
        text.truncate(RULE_COMMENT - 3);
        text.push_str("...");
    }
    text
}

/// The entries and the rules of the chain, in the reference's words.
pub(super) fn rules(wanted: Wanted<'_>, chain: &str) -> Vec<Rule> {
    // As the reference, includes mappings that are for the other family only.
    let entries =
        entries_to(wanted.owner, None, &wanted.forward.mappings.iter().collect::<Vec<_>>());
    let conditional = |entry: Rule| entry.with(wanted.conditions()).target(chain);
    let mut mappings: Vec<&Mapping> = wanted.mappings().collect();
    // A mapping of a single address takes precedence over one of every address.
    sort_by_key(&mut mappings, |mapping| {
        let is_narrower = |m: &Mapping| {
            m.address().is_some() && (m.proto, m.host_port) == (mapping.proto, mapping.host_port)
        };
        mapping.address().is_none() && wanted.mappings().any(is_narrower)
    });
    let of_mappings = mappings.into_iter().flat_map(|mapping| rules_of(wanted, mapping, chain));
    entries.into_iter().map(conditional).chain(of_mappings).collect()
}

/// The entries for mappings of a single address of the host. With conditions there are none: the order of the
/// containers decides.
pub(super) fn entries_ahead(wanted: Wanted<'_>, chain: &str) -> Vec<Rule> {
    if !wanted.conditions().is_empty() {
        return Vec::new();
    }
    let addrs: BTreeSet<IpAddr> = wanted.mappings().filter_map(Mapping::address).collect();
    let of = |addr: IpAddr| {
        let mappings = wanted.mappings().filter(|m| m.address() == Some(addr));
        entries_to(wanted.owner, Some(addr), &mappings.collect::<Vec<_>>())
    };
    addrs.into_iter().flat_map(of).map(|entry| entry.target(chain)).collect()
}

/// Entries without conditions and targets, for each protocol, with at most [`MULTIPORT`] ports each.
fn entries_to(owner: Owner<'_>, addr: Option<IpAddr>, mappings: &[&Mapping]) -> Vec<Rule> {
    let protocols: BTreeSet<String> = mappings.iter().map(|m| m.proto.to_string()).collect();
    let mut all = Vec::new();
    for proto in protocols {
        let mine = mappings.iter().filter(|m| m.proto.to_string() == proto);
        let ports: Vec<String> = mine.map(|m| m.host_port.to_string()).collect();
        for ports in ports.chunks(MULTIPORT) {
            let rule = to(Rule::new(TOP), addr).with(&["-p", &proto]);
            let rule = rule.comment(&entry_comment(owner));
            all.push(rule.with(&["-m", "multiport", "--dports", &ports.join(",")]));
        }
    }
    all
}

/// Adds the address of the host, if any.
fn to(rule: Rule, addr: Option<IpAddr>) -> Rule {
    addr.into_iter().fold(rule, |rule, addr| rule.with(&["-d", &host_net(addr).to_string()]))
}

/// The rules of one mapping.
fn rules_of(wanted: Wanted<'_>, mapping: &Mapping, chain: &str) -> Vec<Rule> {
    let Wanted { forward, target, options, .. } = wanted;
    let (proto, port) = (mapping.proto.to_string(), mapping.host_port.to_string());
    let rule = |rule: Rule| {
        let words = ["-p", &proto, "-m", &proto, "--dport", &port];
        to(rule, mapping.address()).with(&words)
    };
    let from = |source: &str| rule(Rule::new(chain).with(&["-s", source]));
    let set_mark = options.set_mark_chain.as_deref().unwrap_or(SETMARK);
    let mut all = Vec::new();
    match forward.snat {
        Snat::Never => {}
        Snat::Always => all.push(rule(Rule::new(chain)).target(set_mark)),
        Snat::WhereNeeded => {
            all.push(from(&target.trunc().to_string()).target(set_mark));
            if target.addr().is_ipv4() {
                all.push(from("127.0.0.1/32").target(set_mark));
            }
        }
    }
    let to = SocketAddr::new(target.addr(), mapping.container_port).to_string();
    all.push(rule(Rule::new(chain)).target("DNAT").with(&["--to-destination", &to]));
    all
}

/// The network and container in the comment of an entry.
pub(super) fn parse_comment(text: &str) -> Option<(&str, &str)> {
    let (network, id) = text.strip_prefix("dnat name: \"")?.split_once("\" id: \"")?;
    Some((network, id.strip_suffix('"')?))
}
