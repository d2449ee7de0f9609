//! What a flush took from iptables: noticed by the entries of one other attachment, and made again from
//! the records of all.

use super::chains::{NAT, make, missing, taken_port};
use super::rules::entry_comment;
use super::{Forward, KEPT, Record};
use crate::attachment::Keepsake;
use crate::error::Result;
use crate::netfilter::backend::{Backend, Family};
use crate::netfilter::iptables::{Draft, Rule, missed, revive};
use crate::netfilter::names::Owner;

/// What is made with iptables.
fn kept(
    all: impl IntoIterator<Item = Keepsake<Record<'static>>>,
) -> impl Iterator<Item = Keepsake<Record<'static>>> {
    all.into_iter().filter(|kept| kept.content.backend == Backend::Iptables)
}

/// The comment of another attachment's entries, by which a flush is noticed.
pub(super) fn witness(owner: Owner<'_>, family: Family) -> Option<String> {
    let is_of = |kept: &Keepsake<Record<'static>>| {
        let mut targets = kept.content.targets.iter();
        kept.owner() != owner && targets.any(|target| target.family() == family)
    };
    kept(KEPT.all()).find(is_of).map(|kept| entry_comment(kept.owner()))
}

/// Makes the mappings of all attachments of this host but one, where a rule of theirs is gone and
/// nobody has the port meanwhile.
pub(super) fn restore(draft: &mut Draft, family: Family, but: Option<Owner<'_>>) {
    for kept in kept(KEPT.living()).filter(|kept| Some(kept.owner()) != but) {
        let owner = kept.owner();
        let Record { mappings, targets, snat, conditions, options, .. } = &kept.content;
        let Some(options) = options else { continue };
        let (snat, conditions) = (*snat, conditions.as_ref());
        let forward = Forward { owner, mappings, targets, snat, conditions };
        for target in targets.iter().filter(|target| target.family() == family) {
            let has = |rule: &Rule| Ok(draft.has(rule) || draft.unreadable.contains(&rule.chain));
            let is_whole =
                missing(draft, &forward, target, options, has).is_ok_and(|m| m.is_none());
            if !is_whole && taken_port(draft, &forward, target).is_none() {
                make(draft, &forward, target, options);
            }
        }
    }
}

/// What of attachments of this host is gone.
pub(super) fn damage() -> Result<Option<String>> {
    each_used(|family| missed(family, NAT, |draft| restore(draft, family, None)))
}

/// Restores what is gone; what that was.
pub(in crate::netfilter) fn heal() -> Result<Option<String>> {
    each_used(|family| revive(family, NAT, |draft| restore(draft, family, None)))
}

fn each_used(look: impl Fn(Family) -> Result<Option<String>>) -> Result<Option<String>> {
    let mut found = None;
    for family in Family::BOTH {
        let is_of = |kept: Keepsake<Record<'static>>| {
            kept.content.targets.iter().any(|target| target.family() == family)
        };
        if kept(KEPT.all()).any(is_of) {
            found = found.or(look(family)?);
        }
    }
    Ok(found)
}
