//! What a node keeps in iptables when it goes back to the reference plugins.

use super::nftables::Content;
use super::xtables::{
    self, Admin, BRIDGE_OWNER, DEFAULT_ADMIN, FILTER, OWNERS, make_policy, shared,
};
use crate::error::{Error, Result};
use crate::netfilter::backend::{Family, PacketFilter, iptables_table};
use crate::netfilter::iptables::{Flavour, Iptables};
use crate::netlink::nftables::Batch;

/// Makes the rules for what another back end held, without owners, as the reference would.
pub(super) fn make_ownerless(content: &Content) -> Result<()> {
    let of = |family| content.ips.iter().filter(move |ip| Family::of(**ip) == family);
    for family in Family::BOTH {
        if of(family).next().is_none() && content.bridges.is_empty() {
            continue;
        }
        Iptables::require(family)?.update(FILTER, |draft| {
            shared(draft, Admin(DEFAULT_ADMIN));
            for rule in of(family).flat_map(|ip| xtables::address_rules(*ip)) {
                draft.append_unique(rule);
            }
            for (bridge, policy) in &content.bridges {
                make_policy(draft, bridge, *policy);
            }
            Ok(())
        })?;
    }
    Ok(())
}

/// Removes the notes of owners; rules stay. On `nf_tables` no program is needed for that.
pub(super) fn forget_owners(filter: &PacketFilter) -> Result<()> {
    let is_note = |chain: &str| chain == OWNERS || chain.starts_with(BRIDGE_OWNER);
    if let Some(nft) = filter.nft_if_present()? {
        let mut batch = Batch::new();
        for table in Family::BOTH.map(|family| iptables_table(family, FILTER)) {
            let chains = if nft.has_table(table)? { nft.dump_chains(table)? } else { Vec::new() };
            for chain in chains.iter().filter(|chain| is_note(&chain.name)) {
                batch.flush_chain(table.chain(&chain.name)).del_chain(table.chain(&chain.name));
            }
        }
        nft.commit(batch)?;
    }
    for family in Family::BOTH.into_iter().filter(|family| filter.has_legacy_table(*family, FILTER))
    {
        let legacy = Iptables::find(family, Flavour::Legacy);
        let programs = legacy.or_else(|| Iptables::find(family, Flavour::Default));
        let programs = programs.ok_or_else(|| {
            let name = if family == Family::V4 { "iptables" } else { "ip6tables" };
            Error::internal(format!("look for chain {OWNERS}: no {name}-legacy in PATH"))
                .with_details(format!(
                    "if there is one, run on the node: {name}-legacy -F {OWNERS}; \
                     {name}-legacy -X {OWNERS}; and the same for each chain {BRIDGE_OWNER}.."
                ))
        })?;
        programs.update(FILTER, |draft| {
            for chain in draft.chains().to_vec().iter().filter(|chain| is_note(chain)) {
                draft.del_chain(chain);
            }
            Ok(())
        })?;
    }
    Ok(())
}
