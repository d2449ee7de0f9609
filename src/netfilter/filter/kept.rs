//! What a flush took from iptables: noticed by the rules of one other attachment, and made again from
//! the records of all.

use std::net::IpAddr;

use super::xtables::{self, Admin, FILTER, Wanted};
use super::{KEPT, Owner, Record};
use crate::attachment::Keepsake;
use crate::error::Result;
use crate::netfilter::backend::{Backend, Family};
use crate::netfilter::iptables::{Draft, Rule, missed, revive};

/// What is made with iptables, and its addresses of the family.
fn kept(
    all: impl IntoIterator<Item = Keepsake<Record>>,
    family: Family,
) -> impl Iterator<Item = (Keepsake<Record>, Vec<IpAddr>)> {
    let made = |kept: &Keepsake<Record>| kept.content.backend == Backend::Iptables;
    all.into_iter().filter(made).filter_map(move |kept| {
        let mut ips = kept.content.ips.clone();
        ips.retain(|ip| Family::of(*ip) == family);
        (!ips.is_empty()).then_some((kept, ips))
    })
}

/// The rules of another attachment, by which a flush is noticed.
pub(super) fn witness(owner: &Owner, family: Family) -> Vec<Rule> {
    let other = kept(KEPT.all(), family).find(|(kept, _)| kept.owner() != owner.attachment());
    let Some((kept, ips)) = other else { return Vec::new() };
    let mut rules = xtables::policy_rules(kept.content.ingress());
    if kept.content.admin.is_some() {
        rules.extend(ips.iter().flat_map(|ip| xtables::address_rules(*ip)));
    }
    rules
}

/// Makes the rules of all attachments of this host, where they are not there.
pub(super) fn restore(draft: &mut Draft, family: Family) {
    for (kept, ips) in kept(KEPT.living(), family) {
        let Record { admin, .. } = &kept.content;
        let (pod, ingress) = (kept.content.pod(kept.owner()), kept.content.ingress());
        let admin = admin.as_deref().map(Admin);
        xtables::make(draft, Wanted { pod: &pod, ingress, admin }, &ips);
    }
}

/// What of attachments of this host is gone.
pub fn damage() -> Result<Option<String>> {
    each_used(|family| missed(family, FILTER, |draft| restore(draft, family)))
}

/// Restores what is gone; what that was.
pub(in crate::netfilter) fn heal() -> Result<Option<String>> {
    each_used(|family| revive(family, FILTER, |draft| restore(draft, family)))
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
