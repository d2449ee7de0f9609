//! The reference plugin's nftables rules: table `cni_hostport` of either family, each rule with
//! the container's id as its comment, and nothing that tells the network. They are made only when
//! the reference takes over.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::error::Result;
use crate::netlink::nftables::{Batch, Chain, DSTNAT, Family, Hook, L4, Nft, Rule, SRCNAT, Table};

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

/// A rule of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Former {
    /// The container.
    pub(super) id: String,
    /// Its address.
    pub(super) addr: IpAddr,
    /// What the rule does.
    pub(super) what: What,
}

/// What a rule of a container does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// Leads a port of the host, of one of its addresses or of all, to a port of the container.
    Map(Option<IpAddr>, L4, u16, u16),
    /// Translates the source of clients from here.
    Masquerade(IpNet),
}

/// Adds the rules of one family to what the reference may have there.
pub(super) fn make(batch: &mut Batch, family: Family, rules: &[Former]) {
    let table = Table::new(family, "cni_hostport").comment("CNI portmap plugin");
    let [hostports, by_address, masquerading] =
        ["hostports", "hostip_hostports", "masquerading"].map(|name| table.chain(name));
    let all = table.chain("hostports_all");
    let masquerading = masquerading.nat(Hook::Postrouting, SRCNAT);
    batch.ensure_table(table).ensure_chain(hostports).ensure_chain(by_address);
    refill(batch, all, [by_address, hostports].map(|chain| Rule::new().jump(chain.name())));
    for (name, hook) in [("prerouting", Hook::Prerouting), ("output", Hook::Output)] {
        let entry = Rule::new().daddr_is_local().jump(all.name());
        refill(batch, table.chain(name).nat(hook, DSTNAT), [entry]);
    }
    batch.ensure_chain(masquerading);
    for former in rules {
        let (chain, rule) = match former.what {
            What::Map(on, proto, from, to) => {
                let rule = on.map_or_else(Rule::new, |on| Rule::new().daddr(on));
                (hostports, rule.dport(proto, from).dnat(former.addr, Some(to)))
            }
            What::Masquerade(sources) => {
                let rule = Rule::new().saddr_in(sources).daddr(former.addr);
                (masquerading, rule.masquerade())
            }
        };
        batch.append_rule(chain, &rule.comment(&former.id));
    }
}

fn refill<const N: usize>(batch: &mut Batch, chain: Chain<'_>, rules: [Rule; N]) {
    batch.ensure_chain(chain).flush_chain(chain);
    for rule in rules {
        batch.append_rule(chain, &rule);
    }
}
