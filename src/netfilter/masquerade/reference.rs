//! The reference's layout on `nf_tables`: in `inet cni_plugins_masquerade`, chain `masq_checks`,
//! one rule for each address, with our comments. What is there is respected and removed; it is
//! made only when the reference takes over.

use super::super::names::{Owner, stale};
use super::nft::{Pod, multicast};
use crate::error::Result;
use crate::netlink;
use crate::netlink::nftables::{Batch, ByComment, Chain, Hook, Nft, Rule, SRCNAT, Table};

const TABLE: Table<'_> = Table::inet("cni_plugins_masquerade")
    .comment("Masquerading for plugins from github.com/containernetworking/plugins");
const MASQ_CHECKS: Chain<'_> = TABLE
    .chain("masq_checks")
    .comment("Masquerade traffic from certain IPs to any (non-multicast) IP outside their subnet");
const POSTROUTING: Chain<'_> = TABLE.chain("postrouting").nat(Hook::Postrouting, SRCNAT);

/// Adds the rules for `pods` to what the reference may have there.
pub(super) fn make(nft: &Nft, batch: &mut Batch, pods: &[Pod]) -> netlink::Result<()> {
    batch.ensure(TABLE).ensure(MASQ_CHECKS).ensure(POSTROUTING);
    batch.flush_chain(POSTROUTING);
    for net in multicast() {
        batch.append_rule(POSTROUTING, &Rule::new().daddr_in(net).ret());
    }
    batch.append_rule(POSTROUTING, &Rule::new().goto(MASQ_CHECKS.name));
    let is_replaced = |comment: Option<&str>| pods.iter().any(|pod| comment == Some(&pod.comment));
    batch.del_rules(TABLE, &nft.rules_of(MASQ_CHECKS, &is_replaced)?);
    for pod in pods {
        let leaves = Rule::new().saddr(pod.net.addr()).daddr_not_in(pod.net.trunc());
        batch.append_rule(MASQ_CHECKS, &leaves.masquerade().comment(&pod.comment));
    }
    Ok(())
}

pub(super) fn has(nft: &Nft, owner: Owner<'_>) -> Result<bool> {
    Ok(!nft.rules_of(MASQ_CHECKS, &owner.matcher())?.is_empty())
}

pub(super) fn del(nft: &Nft, owner: Owner<'_>) -> Result<()> {
    del_rules(nft, &owner.matcher())
}

pub(super) fn gc(nft: &Nft, network: &str, valid: &[Owner<'_>]) -> Result<()> {
    del_rules(nft, &stale(network, valid))
}

fn del_rules(nft: &Nft, which: ByComment<'_>) -> Result<()> {
    let mut batch = Batch::new();
    batch.del_rules(TABLE, &nft.rules_of(MASQ_CHECKS, which)?);
    Ok(nft.commit(batch)?)
}
