//! The reference's layout on `nf_tables`: in `inet cni_plugins_masquerade`, chain `masq_checks`,
//! one rule for each address, with our comments. Never made here; what is there is respected and
//! removed.

use super::super::names::{Owner, stale};
use crate::error::Result;
use crate::netlink::nftables::{Batch, Chain, Nft, Table};

const MASQ_CHECKS: Chain<'_> = Table::inet("cni_plugins_masquerade").chain("masq_checks");

pub(super) fn has(nft: &Nft, owner: Owner<'_>) -> Result<bool> {
    Ok(nft.dump_rules(MASQ_CHECKS)?.iter().any(|rule| owner.owns(rule.comment.as_deref())))
}

pub(super) fn del(nft: &Nft, owner: Owner<'_>) -> Result<()> {
    del_rules(nft, |comment| owner.owns(comment))
}

pub(super) fn gc(nft: &Nft, network: &str, valid: &[Owner<'_>]) -> Result<()> {
    del_rules(nft, stale(network, valid))
}

fn del_rules(nft: &Nft, which: impl Fn(Option<&str>) -> bool) -> Result<()> {
    let mut batch = Batch::new();
    for rule in nft.dump_rules(MASQ_CHECKS)? {
        if which(rule.comment.as_deref()) {
            batch.del_rule(MASQ_CHECKS, rule.handle);
        }
    }
    Ok(nft.commit(batch)?)
}
