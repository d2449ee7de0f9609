//! Hand-over to the reference plugins: one chain for all interfaces of a container.

use std::cell::Cell;
use std::collections::BTreeSet;

use super::rules::CHAIN_TOP;
use super::{NAT, container_entries};
use crate::netfilter::iptables::{ChainScope, IptablesRule, IptablesTable};
use crate::netfilter::layout::HandoverCount;
use crate::netfilter::{AttachmentId, IpFamily, PacketFilter};
use cni::error::Result;

/// Moves the rules of second interfaces into their containers' chains, the only ones that the
/// reference looks for. Counts chains.
pub(in crate::netfilter) fn join_interfaces(filter: &PacketFilter) -> Result<HandoverCount> {
    let mut handed = HandoverCount::default();
    for family in IpFamily::BOTH {
        for tables in filter.iptables_with_chains(family, NAT, &[CHAIN_TOP])? {
            let joined = Cell::new(0);
            tables.update_table(NAT, ChainScope::All, &|table| joined.set(join_chains(table)))?;
            handed.objects += joined.get();
        }
    }
    Ok(handed)
}

fn join_chains(table: &mut IptablesTable) -> usize {
    let mut joined = BTreeSet::new();
    let before = table.clone();
    for (entry, chain, network, id) in container_entries(&before) {
        let common = AttachmentId { network, ifname: "", id }.iptables_chain("DN-");
        if chain == common {
            continue;
        }
        table.ensure_chain(&common);
        let moved = |word: &String| if word == chain { common.clone() } else { word.clone() };
        let words: Vec<String> = entry.words.iter().map(moved).collect();
        let moved = IptablesRule::new(CHAIN_TOP).with_words(&words);
        if moved.option_value("-d").is_some() {
            table.insert_unique(0, moved);
        } else {
            table.append_unique(moved);
        }
        for rule in before.rules_of_chain(chain) {
            table.append_unique(IptablesRule::new(&common).with_words(&rule.words));
        }
        joined.insert(chain);
    }
    for chain in &joined {
        table.delete_chain_and_jumps(chain);
    }
    joined.len()
}
