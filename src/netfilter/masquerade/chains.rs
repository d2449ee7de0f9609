//! The reference's layout with iptables: a chain for each container and network.
//!
//! ```text
//! -A POSTROUTING -s 10.1.2.4/32 .. -j CNI-<hash>
//! -A CNI-<hash> -d 10.1.2.0/24 .. -j ACCEPT
//! -A CNI-<hash> ! -d 224.0.0.0/4 .. -j MASQUERADE
//! ```
//!
//! The interface is not part of any name: two attachments of a container to one network share the
//! chain, which stays until the last address is gone.

use ipnet::IpNet;

use super::super::backend::{Backend, Family, PacketFilter};
use super::super::iptables::{Draft, Iptables, Rule, missed, revive};
use super::super::names::{Owner, rule_comment_of};
use super::{KEPT, Record};
use crate::attachment::Keepsake;
use crate::cni::ip::host_net;
use crate::error::Result;

const NAT: &str = "nat";
const POSTROUTING: &str = "POSTROUTING";

fn of_family(family: Family, addrs: &[IpNet]) -> Vec<IpNet> {
    addrs.iter().copied().filter(|addr| Family::of(addr.addr()) == family).collect()
}

pub(super) fn add(owner: Owner<'_>, addrs: &[IpNet]) -> Result<()> {
    for family in Family::BOTH {
        let addrs = of_family(family, addrs);
        if !addrs.is_empty() {
            let witness = witness(owner, family);
            let plan = |draft: &mut Draft| {
                if witness.as_ref().is_some_and(|rule| !draft.has(rule)) {
                    restore(draft, family);
                }
                plan_add(draft, owner, &addrs);
                Ok(())
            };
            // Its rules need nothing of what is there; but if another's are gone, all are.
            let expect = || {
                let mut draft = Draft::empty(NAT);
                draft.rules.extend(witness.clone());
                Some(draft)
            };
            Iptables::require(family)?.add_expected(NAT, expect, plan)?;
        }
    }
    Ok(())
}

/// The rule of another attachment, by which a flush is noticed.
fn witness(owner: Owner<'_>, family: Family) -> Option<Rule> {
    kept(KEPT.all(), family).find(|(kept, _)| kept.owner() != owner).map(|(kept, addr)| {
        let from = ["-s".to_owned(), host_net(addr.addr()).to_string()];
        let rule = Rule::new(POSTROUTING, from).comment(&kept.owner().rule_comment());
        rule.target(&kept.owner().chain(""))
    })
}

/// What is made with iptables, and its first address of the family.
fn kept(
    all: impl IntoIterator<Item = Keepsake<Record>>,
    family: Family,
) -> impl Iterator<Item = (Keepsake<Record>, IpNet)> {
    let made = |kept: &Keepsake<Record>| kept.content.backend == Backend::Iptables;
    all.into_iter().filter(made).filter_map(move |kept| {
        let addr = of_family(family, &kept.content.addrs).first().copied()?;
        Some((kept, addr))
    })
}

/// Makes the rules of all attachments of this host, where they are not there.
fn restore(draft: &mut Draft, family: Family) {
    for (kept, _) in kept(KEPT.living(), family) {
        plan_add(draft, kept.owner(), &of_family(family, &kept.content.addrs));
    }
}

/// What of attachments of this host is gone.
pub(super) fn damage() -> Result<Option<String>> {
    each_used(|family| missed(family, NAT, |draft| restore(draft, family)))
}

/// Restores what is gone; what that was.
pub(super) fn heal() -> Result<Option<String>> {
    each_used(|family| revive(family, NAT, |draft| restore(draft, family)))
}

fn each_used(look: impl Fn(Family) -> Result<Option<String>>) -> Result<Option<String>> {
    let mut found = None;
    for family in Family::BOTH {
        if kept(KEPT.all(), family).next().is_some() {
            found = found.or(look(family)?);
        }
    }
    Ok(found)
}

fn plan_add(draft: &mut Draft, owner: Owner<'_>, addrs: &[IpNet]) {
    let (chain, comment) = (owner.chain(""), owner.rule_comment());
    draft.ensure_chain(&chain);
    for addr in addrs {
        let stays = Rule::new(&chain, to(addr.trunc())).comment(&comment).target("ACCEPT");
        // Before the rule for all others, which an earlier address may have brought.
        draft.insert_unique(stays);
    }
    for addr in addrs {
        let multicast = if addr.addr().is_ipv4() { "224.0.0.0/4" } else { "ff00::/8" };
        let leaves = Rule::new(&chain, ["!", "-d", multicast]).comment(&comment);
        draft.append_unique(leaves.target("MASQUERADE"));
        let from = ["-s".to_owned(), host_net(addr.addr()).to_string()];
        draft.append_unique(Rule::new(POSTROUTING, from).comment(&comment).target(&chain));
    }
}

/// iptables does not mention a destination that is everything.
fn to(net: IpNet) -> Vec<String> {
    if net.prefix_len() == 0 { Vec::new() } else { vec!["-d".to_owned(), net.to_string()] }
}

pub(super) fn has(filter: &PacketFilter, owner: Owner<'_>, addr: IpNet) -> Result<bool> {
    for programs in filter.iptables_with(Family::of(addr.addr()), NAT, &owner.chain(""))? {
        let mut draft = programs.read(NAT)?;
        plan_add(&mut draft, owner, &[addr]);
        programs.settle(&mut draft)?;
        if draft.first_change().is_none() {
            return Ok(true);
        }
    }
    Ok(false)
}

pub(super) fn del(filter: &PacketFilter, owner: Owner<'_>, addrs: &[IpNet]) -> Vec<Result<()>> {
    let chain = owner.chain("");
    let plan = |draft: &mut Draft| {
        plan_del(draft, owner, addrs);
        Ok(())
    };
    let mut outcomes = Vec::new();
    for family in Family::BOTH {
        let addrs = of_family(family, addrs);
        let mut expected = Draft::empty(NAT);
        if !addrs.is_empty() {
            plan_add(&mut expected, owner, &addrs);
        }
        let delete = |programs: Iptables| programs.delete_expected(&expected, plan);
        match filter.iptables_with(family, NAT, &chain) {
            Ok(found) => outcomes.extend(found.into_iter().map(delete)),
            Err(error) => outcomes.push(Err(error)),
        }
    }
    outcomes
}

fn update_each(found: Result<Vec<Iptables>>, plan: impl Fn(&mut Draft)) -> Vec<Result<()>> {
    let update = |programs: Iptables| {
        programs.update(NAT, |draft| {
            plan(draft);
            Ok(())
        })
    };
    match found {
        Ok(found) => found.into_iter().map(update).collect(),
        Err(error) => vec![Err(error)],
    }
}

/// Old versions of the reference matched the whole subnet in POSTROUTING.
fn plan_del(draft: &mut Draft, owner: Owner<'_>, addrs: &[IpNet]) {
    let (chain, comment) = (owner.chain(""), owner.rule_comment());
    let sources: Vec<String> =
        addrs.iter().flat_map(|a| [host_net(a.addr()), a.trunc()]).map(|n| n.to_string()).collect();
    let is_ours = |rule: &Rule| {
        rule.goes_to(&chain)
            && match rule.value("-s") {
                Some(source) if !addrs.is_empty() => sources.iter().any(|own| own == source),
                // Another network and container may have the chain, too: the name joins both texts.
                _ => addrs.is_empty() && rule.value("--comment").is_none_or(|c| c == comment),
            }
    };
    draft.del_rules(is_ours);
    if !draft.rules().iter().any(|rule| rule.goes_to(&chain)) {
        draft.del_chain(&chain);
    }
}

pub(super) fn gc(filter: &PacketFilter, network: &str, valid: &[Owner<'_>]) -> Vec<Result<()>> {
    let with_any = |family| filter.iptables_with_any(family, NAT);
    let plan = |draft: &mut Draft| plan_gc(draft, network, valid);
    Family::BOTH.into_iter().flat_map(|family| update_each(with_any(family), plan)).collect()
}

/// Removes the chains of the network's containers that have no valid attachment. They are known
/// by the comments of their rules, and an address in POSTROUTING without its chain as well.
fn plan_gc(draft: &mut Draft, network: &str, valid: &[Owner<'_>]) {
    let ours = rule_comment_of(network);
    let mut stale: Vec<(String, String)> = Vec::new();
    for rule in draft.rules() {
        let Some(comment) = rule.value("--comment").filter(|text| text.starts_with(&ours)) else {
            continue;
        };
        let id = comment[ours.len()..].trim_end_matches('"');
        let chain = Owner { network, ifname: "", id }.chain("");
        // Other plugins comment their rules in the same way.
        let is_masquerading = rule.chain == chain || rule.goes_to(&chain);
        let is_valid = valid.iter().any(|owner| owner.id == id);
        let found = (chain, comment.to_owned());
        if is_masquerading && !is_valid && !stale.contains(&found) {
            stale.push(found);
        }
    }
    for (chain, comment) in stale {
        draft.del_rules(|rule| rule.goes_to(&chain) && rule.value("--comment") == Some(&comment));
        if !draft.rules().iter().any(|rule| rule.goes_to(&chain)) {
            draft.del_chain(&chain);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: Owner<'_> = Owner { network: "net", ifname: "eth0", id: "c1" };

    fn draft_with(owner: Owner<'_>, addrs: &[&str]) -> Draft {
        let mut draft = Draft::parse(NAT, ":POSTROUTING ACCEPT [0:0]\n");
        plan_add(&mut draft, owner, &nets(addrs));
        draft
    }

    fn nets(addrs: &[&str]) -> Vec<IpNet> {
        addrs.iter().map(|addr| addr.parse().unwrap()).collect()
    }

    fn targets(draft: &Draft) -> Vec<&str> {
        let chain = OWNER.chain("");
        let rules = draft.rules().iter().filter(|rule| rule.chain == chain);
        rules.filter_map(|rule| rule.value("-j")).collect()
    }

    #[test]
    fn every_subnet_stays_before_the_rest_leaves() {
        let mut draft = draft_with(OWNER, &["10.1.2.3/24"]);
        plan_add(&mut draft, OWNER, &nets(&["10.9.0.1/16", "10.1.2.4/24"]));
        assert_eq!(targets(&draft), ["ACCEPT", "ACCEPT", "MASQUERADE"]);
        let before = draft.rules().len();
        plan_add(&mut draft, OWNER, &nets(&["10.9.0.1/16"]));
        assert_eq!(draft.rules().len(), before);
    }

    #[test]
    fn the_chain_goes_with_the_last_address() {
        let mut draft = draft_with(OWNER, &["10.1.2.3/24", "10.1.2.4/24"]);
        plan_del(&mut draft, OWNER, &nets(&["10.1.2.3/24"]));
        assert_eq!(draft.rules().len(), 3);
        plan_del(&mut draft, OWNER, &nets(&["10.1.2.4/24"]));
        assert_eq!((draft.rules().len(), draft.chains().len()), (0, 1));
    }

    #[test]
    fn without_addresses_all_goes_but_others() {
        let other = Owner { id: "c2", ..OWNER };
        let mut draft = draft_with(OWNER, &["10.1.2.3/24", "10.1.2.4/24"]);
        plan_add(&mut draft, other, &nets(&["10.1.2.5/24"]));
        plan_del(&mut draft, OWNER, &[]);
        assert_eq!(draft.chains(), [POSTROUTING, &other.chain("")]);
        assert_eq!(draft.rules().len(), 3);
    }

    #[test]
    fn a_chain_of_two_containers_goes_with_the_second() {
        let [one, two] = [("n1", "2abc"), ("n12", "abc")].map(|(network, id)| Owner {
            network,
            ifname: "eth0",
            id,
        });
        assert_eq!(one.chain(""), two.chain(""));
        let removals: [fn(&mut Draft, Owner<'_>); 3] = [
            |draft, owner| plan_del(draft, owner, &[]),
            |draft, owner| plan_del(draft, owner, &nets(&["10.1.2.3/24", "10.1.2.4/24"])[..1]),
            |draft, owner| plan_gc(draft, owner.network, &[]),
        ];
        for remove in removals {
            let mut draft = draft_with(one, &["10.1.2.3/24"]);
            plan_add(&mut draft, two, &nets(&["10.1.2.4/24"]));
            remove(&mut draft, one);
            let leads = |r: &&Rule| r.chain == POSTROUTING && r.value("-s") == Some("10.1.2.4/32");
            assert!(
                draft.rules().iter().any(|rule| leads(&rule)) && draft.has_chain(&two.chain(""))
            );
            assert!(!draft.rules().iter().any(|rule| rule.value("-s") == Some("10.1.2.3/32")));
            plan_del(&mut draft, two, &[]);
            assert!(!draft.has_chain(&two.chain("")));
        }
    }

    #[test]
    fn gc_is_of_one_network() {
        let [two, elsewhere] = [Owner { id: "c2", ..OWNER }, Owner { network: "net2", ..OWNER }];
        let mut draft = draft_with(OWNER, &["10.1.2.3/24"]);
        plan_add(&mut draft, two, &nets(&["10.1.2.4/24"]));
        plan_add(&mut draft, elsewhere, &nets(&["10.3.0.4/24"]));
        draft.append_unique(Rule::new("CNI-X", ["-j", "X"]).comment(&OWNER.rule_comment()));
        plan_gc(&mut draft, "net", &[two]);
        assert_eq!(draft.chains(), [POSTROUTING, &two.chain(""), &elsewhere.chain("")]);
        assert_eq!(draft.rules().len(), 7);
    }
}
