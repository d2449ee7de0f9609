//! What a node keeps in iptables when it goes back to the reference plugins.

use super::iptables::{self, BRIDGE_OWNER, DEFAULT_ADMIN, FILTER, OWNERS, make_policy, shared};
use super::nft::Content;
use crate::error::{Error, Result};
use crate::netfilter::backend::{Family, PacketFilter};
use crate::netfilter::iptables::{Flavour, Iptables, iptables_table};
use crate::netlink::nftables::Batch;

/// Makes the rules for what another back end held, without owners, as the reference would.
pub(super) fn make_ownerless(content: &Content) -> Result<()> {
    let of = |family| content.ips.iter().filter(move |ip| Family::of(**ip) == family);
    for family in Family::BOTH {
        if of(family).next().is_none() && content.bridges.is_empty() {
            continue;
        }
        Iptables::require(family)?.update(FILTER, &|table| {
            shared(table, DEFAULT_ADMIN);
            for rule in of(family).flat_map(|ip| iptables::address_rules(*ip)) {
                table.append_unique(rule);
            }
            for (bridge, policy) in &content.bridges {
                make_policy(table, bridge, *policy);
            }
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
            let chains = if nft.has(table)? { nft.dump_chains(table)? } else { Vec::new() };
            for chain in chains.iter().filter(|chain| is_note(&chain.name)) {
                batch.flush_chain(table.chain(&chain.name)).del(table.chain(&chain.name));
            }
        }
        nft.commit(batch)?;
    }
    for family in Family::BOTH.into_iter().filter(|family| filter.has_legacy_table(*family, FILTER))
    {
        let programs = Iptables::find_or_default(family, Flavour::Legacy).ok_or_else(|| {
            Error::internal(format!("look for chain {OWNERS}: no {family}-legacy in PATH"))
                .with_details(format!(
                    "if there is one, run on the node: {family}-legacy -F {OWNERS}; \
                     {family}-legacy -X {OWNERS}; and the same for each chain {BRIDGE_OWNER}.."
                ))
        })?;
        programs.update(FILTER, &|table| {
            for chain in table.chains.clone().iter().filter(|chain| is_note(chain)) {
                table.del_chain(chain);
            }
        })?;
    }
    Ok(())
}
