//! The required content of our tables of `nf_tables`, its verification and its changes.
//!
//! A [`Layout`] describes a table: its sets and maps, its chains and their fixed rules. ADD compares the table with
//! its layout, plans, and commits ([`OwnTables::change`]). After a flush of rules or sets the same transaction restores them,
//! and the state of all attachments of this host in all of our tables ([`Restorable`]), so that protections and the
//! traffic they protect become effective together.
//!
//! Rules are identified by their comments: a rule that changes in a release gets a new comment. A table of an earlier
//! release that lacks only [additions](Layout::additions) is no damage, because a runtime that is told so by STATUS
//! sends no ADD any more; the next ADD completes it. A set contains a
//! sentinel, an element that matches no packet: a set without it was flushed.

mod transaction;

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use super::shared::{Heirs, has_owner_of, is_recorded};
use crate::attachment::Kept;
use crate::error::{self, Error};
use crate::netlink::Result;
use crate::netlink::nftables::{Batch, Chain, Element, Nft, Rule, RuleInfo, Set, Table};

pub use transaction::{Change, OwnTables};

/// The remedy for damage.
pub const REMEDY: &str =
    "\"cnibox repair\" restores all rules of this host; the next ADD that needs them does so, too";

/// Returns the elements to delete; may add other deletions.
type Find<'f> = &'f mut dyn FnMut(&Nft, &mut Batch) -> Result<Vec<Element>>;

/// The required content of a table.
#[derive(Clone, Debug)]
pub struct Layout {
    /// The table.
    pub table: Table<'static>,
    /// Its sets and maps.
    pub sets: Vec<Set<'static>>,
    /// Its chains and their fixed rules, each with a comment. A chain without fixed rules is not verified.
    pub chains: Vec<(Chain<'static>, Vec<Rule>)>,
    /// The comments of rules that the tables of earlier releases lack, beside others in the same chain.
    pub additions: &'static [&'static str],
    /// The rules of a chain that elements jump to, by the chain's name; `None` for other chains. Such a chain is
    /// created with the first element, and deleted with the last element.
    pub subnet: fn(&str) -> Option<Vec<Rule>>,
}

/// A feature's state of attachments, which is restored after a flush.
#[derive(Clone, Copy, Debug)]
pub struct Restorable {
    /// The feature's records.
    pub kept: Kept,
    /// The tables with the state.
    pub layouts: fn() -> Vec<Layout>,
    /// [Restores](Change::restore) the state from the [records](Change::living).
    pub restore: fn(&mut Change<'_>),
}

impl Layout {
    /// The first deviation of the table from its layout; `None` as well if no container depends on the table: the
    /// next ADD restores it.
    pub fn damage(self, nft: &Nft, is_needed: &dyn Fn() -> bool) -> Result<Option<String>> {
        let (view, _) = View::read(nft, self, &[])?;
        // Elements belong to containers, including containers without a record.
        let has_elements = |set: &Set<'static>| nft.find(&[*set], &[]).is_ok_and(|e| !e.is_empty());
        let is_used = || view.exists && view.layout.sets.iter().any(has_elements);
        let is_damaged = view.damage.is_some() && !view.is_outdated;
        let is_relevant = is_damaged && (is_needed() || is_used());
        Ok(view.damage.filter(|_| is_relevant))
    }

    /// Whether the table deviates from its layout, needed or not.
    pub fn has_damage(self, nft: &Nft) -> Result<bool> {
        Ok(View::read(nft, self, &[])?.0.damage.is_some())
    }

    /// These rules without the additions.
    fn former(&self, rules: &[Rule]) -> Vec<Rule> {
        let is_former = |rule: &&Rule| {
            rule.comment.as_deref().is_none_or(|comment| !self.additions.contains(&comment))
        };
        rules.iter().filter(is_former).cloned().collect()
    }

    /// Deletes the elements that `find` returns, unless another process has replaced them in between, and the chains that
    /// only these elements jump to. Gives the keys that other attachments need to these `heirs`, whose records are `kept`.
    pub fn hand_on(&self, nft: &Nft, kept: Kept, find: Find<'_>, heirs: Heirs<'_>) -> Result<()> {
        let mut added = Vec::new();
        nft.update(&mut |nft| {
            let mut batch = Batch::new();
            let found = find(nft, &mut batch)?;
            added = heirs(&found);
            self.delete(&mut batch, nft, &found, &added)?;
            Ok(batch)
        })?;
        // The deletion of an heir may have ended meanwhile, without having found them: it removes the record first.
        added.retain(|element| !is_recorded(kept, element));
        if added.is_empty() {
            return Ok(());
        }
        let find = &mut |nft: &Nft, _: &mut Batch| {
            let found = added.iter().zip(nft.elements(&added)?);
            Ok(found.filter_map(|(e, found)| found.filter(|f| has_owner_of(f, e))).collect())
        };
        self.hand_on(nft, kept, find, heirs)
    }

    /// Deletes elements, and the chains that only these elements jump to; `added` get their keys.
    fn delete(
        &self,
        batch: &mut Batch,
        nft: &Nft,
        elements: &[Element],
        added: &[Element],
    ) -> Result<()> {
        // For each chain the elements that jump to it: deleted and added.
        let mut jumps: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
        for element in elements {
            batch.del_element(element);
            if let Some(name) = element.leads_to() {
                jumps.entry(name).or_default().0 += 1;
            }
        }
        for name in added.iter().filter_map(Element::leads_to) {
            jumps.entry(name).or_default().1 += 1;
        }
        for (name, (deleted, added)) in jumps {
            let Some(rules) = (self.subnet)(name) else { continue };
            let chain = self.table.chain(name);
            match nft.chain(chain)?.map(|info| info.uses as usize) {
                Some(uses) if added == 0 && uses <= deleted + rules.len() => drop(batch.del(chain)),
                None if added > 0 => {
                    batch.add(chain);
                    for rule in &rules {
                        batch.append_rule(chain, rule);
                    }
                }
                _ => {}
            }
        }
        for element in added {
            batch.add_element(element);
        }
        Ok(())
    }
}

/// For STATUS and CHECK: fails if there is damage.
pub fn refuse(damage: Option<String>) -> error::Result<()> {
    damage.map_or(Ok(()), |damage| Err(Error::internal(damage).with_details(REMEDY)))
}

/// The present content of a table, compared with its layout.
#[derive(Debug)]
struct View {
    layout: Layout,
    generation: u32,
    exists: bool,
    /// Whether the table is created if it does not exist, even if nothing is restored in it.
    is_required: bool,
    rules: Vec<RuleInfo>,
    /// The chains without a fixed rule.
    incomplete: Vec<Chain<'static>>,
    /// The sets without a sentinel.
    flushed: Vec<Set<'static>>,
    /// The chains of [`Layout::subnet`] without rules.
    empty: Vec<String>,
    /// The first deviation, for messages.
    damage: Option<String>,
    /// Whether nothing but [`Layout::additions`] is missing.
    is_outdated: bool,
}

impl View {
    /// Reads the table and the elements with the keys of `wanted` by one datagram.
    fn read(nft: &Nft, layout: Layout, wanted: &[Element]) -> Result<(View, Vec<Option<Element>>)> {
        let sentinels = layout.sets.iter().map(|set| set.sentinel());
        let queried: Vec<_> = sentinels.chain(wanted.iter().cloned()).collect();
        let mut look = nft.look(layout.table, &queried)?;
        let found = look.elements.split_off(layout.sets.len());
        let (mut damage, mut outdated) = (Vec::new(), Vec::new());
        if look.objects.is_none() {
            damage.push(format!("table {} is gone", layout.table));
        }
        let mut incomplete = Vec::new();
        for (chain, rules) in &layout.chains {
            if let Some(rule) = missing(&look.rules, *chain, rules) {
                let is_former = missing(&look.rules, *chain, &layout.former(rules)).is_none();
                let list = if is_former { &mut outdated } else { &mut damage };
                list.push(format!("rule \"{rule}\" is missing in chain {chain}"));
                incomplete.push(*chain);
            }
        }
        let sentinels = layout.sets.iter().zip(look.elements);
        let flushed = sentinels.filter(|(_, sentinel)| sentinel.is_none());
        let flushed: Vec<Set<'static>> = flushed.map(|(set, _)| *set).collect();
        damage.extend(flushed.iter().map(|set| format!("{set} was flushed")));
        let filled: HashSet<&str> = look.rules.iter().map(|rule| rule.chain.as_str()).collect();
        let fixed = layout.chains.iter().map(|(chain, _)| chain.name);
        let known =
            layout.sets.len() + fixed.chain(filled.iter().copied()).collect::<HashSet<_>>().len();
        let mut empty = Vec::new();
        // The table has more objects than those: only a list of all chains shows the empty chains.
        if look.objects.is_some_and(|count| count as usize > known) {
            empty.extend(nft.dump_chains(layout.table)?.into_iter().map(|chain| chain.name));
            empty.retain(|name| !filled.contains(name.as_str()) && (layout.subnet)(name).is_some());
        }
        let without_rule = |name| format!("chain {} has no rule", layout.table.chain(name));
        damage.extend(empty.iter().map(|name| without_rule(name)));
        let view = View {
            generation: look.generation,
            exists: look.objects.is_some(),
            is_required: false,
            rules: look.rules,
            is_outdated: damage.is_empty(),
            damage: damage.into_iter().chain(outdated).next(),
            layout,
            incomplete,
            flushed,
            empty,
        };
        Ok((view, found))
    }

    /// Creates the missing objects. Others are not changed: an administrator may have set a chain's policy, or
    /// have added rules to a chain without fixed rules.
    fn build(&self, batch: &mut Batch) {
        let Layout { table, sets, chains, subnet, .. } = &self.layout;
        batch.ensure(*table);
        for set in sets {
            batch.ensure(*set);
        }
        for (chain, _) in chains {
            batch.ensure(*chain);
        }
        for (chain, rules) in chains.iter().filter(|(chain, _)| self.incomplete.contains(chain)) {
            batch.flush_chain(*chain);
            for rule in rules {
                batch.append_rule(*chain, rule);
            }
        }
        for set in &self.flushed {
            batch.ensure_element(&set.sentinel());
        }
        for name in &self.empty {
            for rule in subnet(name).unwrap_or_default() {
                batch.append_rule(table.chain(name), &rule);
            }
        }
    }
}

/// The comment of the first rule that is not in the chain, or not in this order. Other rules may stand in between.
fn missing<'r>(found: &[RuleInfo], chain: Chain<'_>, rules: &'r [Rule]) -> Option<&'r str> {
    let mut comments = found.iter().filter(|rule| rule.chain == chain.name);
    let mut exists =
        |rule: &&Rule| comments.any(|f| f.comment.as_deref() == rule.comment.as_deref());
    let missing = rules.iter().find(|rule| !exists(rule));
    missing.map(|rule| rule.comment.as_deref().unwrap_or_default())
}

/// How much of one layout was handed over to the reference plugins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HandedOver {
    /// The objects that the reference has now: rules, ports, addresses or chains, depending on the layout.
    pub objects: usize,
    /// Rules that are lost because their comments had no room for the container's id.
    pub nameless: usize,
    /// Rules that are lost because they have conditions of one container.
    pub conditional: usize,
}

impl fmt::Display for HandedOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} handed over", self.objects)?;
        for (lost, why) in [
            (self.nameless, "the container's id is too long for a comment"),
            (self.conditional, "the reference has no conditions of one container"),
        ] {
            if lost > 0 {
                write!(f, ", {lost} lost: {why}")?;
            }
        }
        Ok(())
    }
}

/// Deletes our table, if it exists, in one transaction with the changes that `convert` adds.
pub(super) fn hand_over(
    nft: &Nft,
    table: Table<'_>,
    convert: &dyn Fn(&Nft, &mut Batch) -> Result<HandedOver>,
) -> Result<HandedOver> {
    let mut handed = HandedOver::default();
    nft.update(&mut |nft| {
        let mut batch = Batch::new();
        handed = HandedOver::default();
        if nft.has(table)? {
            handed = convert(nft, &mut batch)?;
            batch.del(table);
        }
        Ok(batch)
    })?;
    Ok(handed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_rules_are_reported_with_the_reason() {
        let complete = HandedOver { objects: 3, ..HandedOver::default() };
        assert_eq!(complete.to_string(), "3 handed over");
        let handed = HandedOver { objects: 1, nameless: 2, conditional: 3 };
        let expected = "1 handed over, 2 lost: the container's id is too long for a comment, \
                        3 lost: the reference has no conditions of one container";
        assert_eq!(handed.to_string(), expected);
    }
}
