//! The reference plugin's nftables rules: table `cni_hostport` of either family, each rule with
//! the container's id as its comment, and nothing that tells the network.

use crate::error::Result;
use crate::netlink::nftables::{Batch, Family, Nft, Table};

/// Chains that have rules of containers; releases differ in which they use.
const CHAINS: [&str; 3] = ["hostports", "hostip_hostports", "masquerading"];

/// Deletes the rules of container `id`; tells whether there were any.
pub fn del(nft: &Nft, id: &str) -> Result<bool> {
    let mut batch = Batch::new();
    for family in [Family::Ip, Family::Ip6] {
        let table = Table::new(family, "cni_hostport");
        if !nft.has_table(table)? {
            continue;
        }
        for chain in CHAINS.map(|name| table.chain(name)) {
            let rules = nft.dump_rules(chain)?;
            for rule in rules.iter().filter(|rule| rule.comment.as_deref() == Some(id)) {
                batch.del_rule(chain, rule.handle);
            }
        }
    }
    let found = !batch.is_empty();
    nft.commit(batch)?;
    Ok(found)
}
