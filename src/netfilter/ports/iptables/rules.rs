//! A container's iptables rules in the words of the reference plugin, so that the CHECK of either
//! implementation accepts the rules of the other. Only a mapping of a single address of the host
//! whose port another container maps at every address gets an additional entry, before all others:
//! it takes precedence, whichever program created the other mapping. The reference's CHECK ignores
//! the entry, and its DEL deletes it with the chain.

use std::net::SocketAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::super::{MappedPort, PortmapPart, SourceTranslation};
use crate::netfilter::iptables::IptablesRule;
use crate::netfilter::names::RULE_COMMENT;
use crate::netfilter::{AttachmentId, IpFamily};
use cni::ip::host_net;
use cni::sort::{collect_set, sort_by_key};

/// The chain that jumps to the chains of containers.
pub(super) const CHAIN_TOP: &str = "CNI-HOSTPORT-DNAT";
pub(super) const SETMARK: &str = "CNI-HOSTPORT-SETMARK";
pub(super) const CHAIN_MASQ: &str = "CNI-HOSTPORT-MASQ";
pub(super) const POSTROUTING: &str = "POSTROUTING";

/// The maximum number of ports in a rule: `XT_MULTI_PORTS`.
const MULTIPORT: usize = 15;

/// Options of the back end iptables.
#[derive(Clone, Serialize, Deserialize)]
pub struct IptablesOptions {
    /// The bit of a packet's mark that requests masquerading.
    pub mark_bit: u8,
    /// A chain of another program that sets the mark.
    pub set_mark_chain: Option<String>,
    /// Additional conditions for IPv4 and IPv6, as words of iptables.
    pub conditions: [Vec<String>; 2],
    /// The networks of the clients that may use the ports; none means all clients.
    #[serde(default)]
    pub clients: Vec<IpNet>,
}

/// The required rules of an attachment in the table of one family.
#[derive(Clone, Copy)]
pub(super) struct RequiredRules<'a> {
    pub(super) owner: AttachmentId<'a>,
    pub(super) forward: &'a PortmapPart,
    /// The address of the family.
    pub(super) target: IpNet,
    pub(super) options: &'a IptablesOptions,
}

impl<'a> RequiredRules<'a> {
    /// The rules of the family; none without [`PortmapPart::options`].
    pub(super) fn of_family(
        owner: AttachmentId<'a>,
        forward: &'a PortmapPart,
        family: IpFamily,
    ) -> Option<RequiredRules<'a>> {
        let target =
            forward.targets.iter().find(|target| IpFamily::of_address(target.addr()) == family)?;
        Some(RequiredRules { owner, forward, target: *target, options: forward.options.as_ref()? })
    }

    pub(super) fn ip_family(self) -> IpFamily {
        IpFamily::of_address(self.target.addr())
    }

    pub(super) fn family_mappings(self) -> impl Iterator<Item = &'a MappedPort> {
        self.forward.mappings_to(self.target)
    }

    pub(super) fn condition_words(self) -> &'a [String] {
        &self.options.conditions[usize::from(self.ip_family() == IpFamily::V6)]
    }

    /// The sources of entries: each allowed network of the family. iptables-save does not print the
    /// network of all addresses.
    fn sources(self) -> Vec<Option<IpNet>> {
        let is_of_family = |net: &&IpNet| IpFamily::of_address(net.addr()) == self.ip_family();
        let nets = self.options.clients.iter().filter(is_of_family).copied();
        let mut all: Vec<_> = nets.map(|net| Some(net).filter(|n| n.prefix_len() > 0)).collect();
        if all.is_empty() {
            all.push(None);
        }
        all
    }

    /// Whether entries have conditions, by which one container may take precedence over another.
    fn has_conditions(self) -> bool {
        !self.condition_words().is_empty() || !self.options.clients.is_empty()
    }

    /// Whether our own chains that mark and masquerade are required.
    pub(super) fn needs_mark_chains(self) -> bool {
        self.options.set_mark_chain.is_none() && self.forward.snat != SourceTranslation::Never
    }
}

/// The rules that all attachments share: two entries, and three that masquerade.
pub(super) fn shared_rules(wanted: RequiredRules<'_>) -> Vec<IptablesRule> {
    let mut rules = top_chain_jumps().to_vec();
    if wanted.needs_mark_chains() {
        let mark = 1_u32 << wanted.options.mark_bit;
        let mark = format!("{mark:#x}/{mark:#x}");
        let set_mark = IptablesRule::new(SETMARK)
            .with_comment("CNI portfwd masquerade mark")
            .with_target("MARK");
        rules.push(set_mark.with_words(&["--set-xmark", &mark]));
        let is_marked = IptablesRule::new(CHAIN_MASQ).with_words(&["-m", "mark", "--mark", &mark]);
        rules.push(is_marked.with_target("MASQUERADE"));
        let entry = IptablesRule::new(POSTROUTING).with_comment("CNI portfwd requiring masquerade");
        rules.push(entry.with_target(CHAIN_MASQ));
    }
    rules
}

/// The rules that jump to [`CHAIN_TOP`].
pub(super) fn top_chain_jumps() -> [IptablesRule; 2] {
    let is_local = ["-m", "addrtype", "--dst-type", "LOCAL"];
    ["PREROUTING", "OUTPUT"]
        .map(|chain| IptablesRule::new(chain).with_words(&is_local).with_target(CHAIN_TOP))
}

/// `dnat name: "<network>" id: "<id>"`, cut as the reference does.
pub(super) fn entry_comment(owner: AttachmentId<'_>) -> String {
    let mut text = format!("dnat {}", owner.rule_name());
    if text.len() > RULE_COMMENT {
        text.truncate(RULE_COMMENT - 3);
        text.push_str("...");
    }
    text
}

/// The entries and the rules of the chain, in the reference's words.
pub(super) fn attachment_rules(wanted: RequiredRules<'_>, chain: &str) -> Vec<IptablesRule> {
    // As the reference, includes mappings that are for the other family only.
    let mappings: Vec<_> = wanted.forward.mappings.iter().collect();
    let entries = wanted
        .sources()
        .into_iter()
        .flat_map(|source| multiport_entries(wanted.owner, [source, None], &mappings));
    let mut mappings: Vec<&MappedPort> = wanted.family_mappings().collect();
    // A mapping of a single address takes precedence over one of every address.
    sort_by_key(&mut mappings, |mapping| {
        mapping.single_address().is_none()
            && wanted.family_mappings().any(|m| {
                m.single_address().is_some()
                    && (m.proto, m.host_port) == (mapping.proto, mapping.host_port)
            })
    });
    let of_mappings =
        mappings.into_iter().flat_map(|mapping| mapping_rules(wanted, mapping, chain));
    entries
        .map(|entry| entry.with_words(wanted.condition_words()).with_target(chain))
        .chain(of_mappings)
        .collect()
}

/// The entries for mappings of a single address of the host. With conditions there are none: the
/// order of the containers decides.
pub(super) fn entries_ahead(wanted: RequiredRules<'_>, chain: &str) -> Vec<IptablesRule> {
    if wanted.has_conditions() {
        return Vec::new();
    }
    let addrs = collect_set(wanted.family_mappings().filter_map(MappedPort::single_address));
    addrs
        .into_iter()
        .flat_map(|addr| {
            let mappings = wanted.family_mappings().filter(|m| m.single_address() == Some(addr));
            let nets = [None, Some(host_net(addr))];
            multiport_entries(wanted.owner, nets, &mappings.collect::<Vec<_>>())
        })
        .map(|entry| entry.with_target(chain))
        .collect()
}

/// Entries without conditions and targets from one network to another, for each protocol, with at
/// most [`MULTIPORT`] ports each.
fn multiport_entries(
    owner: AttachmentId<'_>,
    nets: [Option<IpNet>; 2],
    mappings: &[&MappedPort],
) -> Vec<IptablesRule> {
    let protocols = collect_set(mappings.iter().map(|m| m.proto.to_string()));
    let mut all = Vec::new();
    for proto in protocols {
        let mine = mappings.iter().filter(|m| m.proto.to_string() == proto);
        let ports: Vec<String> = mine.map(|m| m.host_port.to_string()).collect();
        for ports in ports.chunks(MULTIPORT) {
            let rule = ["-s", "-d"]
                .into_iter()
                .zip(nets)
                .fold(IptablesRule::new(CHAIN_TOP), |rule, (option, net)| {
                    with_network(rule, option, net)
                });
            let rule = rule.with_words(&["-p", &proto]);
            let rule = rule.with_comment(&entry_comment(owner));
            all.push(rule.with_words(&["-m", "multiport", "--dports", &ports.join(",")]));
        }
    }
    all
}

/// Adds `-s` or `-d` with a network, if any.
fn with_network(rule: IptablesRule, option: &str, net: Option<IpNet>) -> IptablesRule {
    net.into_iter().fold(rule, |rule, net| rule.with_words(&[option, &net.to_string()]))
}

fn mapping_rules(
    wanted: RequiredRules<'_>,
    mapping: &MappedPort,
    chain: &str,
) -> Vec<IptablesRule> {
    let RequiredRules { forward, target, options, .. } = wanted;
    let (proto, port) = (mapping.proto.to_string(), mapping.host_port.to_string());
    let rule = |rule: IptablesRule| {
        let words = ["-p", &proto, "-m", &proto, "--dport", &port];
        with_network(rule, "-d", mapping.single_address().map(host_net)).with_words(&words)
    };
    let from = |source: &str| rule(IptablesRule::new(chain).with_words(&["-s", source]));
    let set_mark = options.set_mark_chain.as_deref().unwrap_or(SETMARK);
    let mut all = Vec::new();
    match forward.snat {
        SourceTranslation::Never => {}
        SourceTranslation::Always => all.push(rule(IptablesRule::new(chain)).with_target(set_mark)),
        SourceTranslation::WhereNeeded => {
            all.push(from(&target.trunc().to_string()).with_target(set_mark));
            if target.addr().is_ipv4() {
                all.push(from("127.0.0.1/32").with_target(set_mark));
            }
        }
    }
    let to = SocketAddr::new(target.addr(), mapping.container_port).to_string();
    all.push(
        rule(IptablesRule::new(chain)).with_target("DNAT").with_words(&["--to-destination", &to]),
    );
    all
}

/// The network and container in the comment of an entry.
pub(super) fn parse_entry_comment(text: &str) -> Option<(&str, &str)> {
    let (network, id) = text.strip_prefix("dnat name: \"")?.split_once("\" id: \"")?;
    Some((network, id.strip_suffix('"')?))
}
