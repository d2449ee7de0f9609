//! The required content of our tables of `nf_tables`: verifies, changes and restores it.
//!
//! A [`TableLayout`] describes a table: its sets and maps, its chains and their fixed rules. ADD
//! compares the table with its layout, plans, and commits ([`CniboxTables::change_tables`]). After
//! a flush of rules or sets the same transaction restores them, and the state of all attachments of
//! this host in all of our tables ([`RestorableState`]), so that protections and the traffic they
//! protect become effective together.
//!
//! Rules are identified by their comments: a rule that changes in a release gets a new comment, and
//! the next ADD or STATUS completes the tables of the earlier release. A set contains a sentinel,
//! an element that matches no packet: a set without it was flushed.

mod transaction;

use std::collections::{BTreeMap, HashSet};
use std::fmt;

use crate::attachment::{REPAIR_REMEDY, RecordStore};
use crate::netlink::NetlinkResult;
use crate::netlink::nftables::{
    NftBatch, NftChain, NftRule, NftSet, NftSocket, NftTable, RuleInfo, SetElement,
};
use cni::error::{self, Error};

pub use transaction::{CniboxTables, LayoutTransaction};

/// The rules of the chain of this name, if it is one that elements jump to.
type SubnetRules = fn(&str) -> Option<Vec<NftRule>>;

/// A rule that its chain must have: the comment by which it is recognised, and the rule, which is
/// built only if it is missing.
pub type FixedRule = (&'static str, fn() -> NftRule);

/// How the rules of an [exact](TableLayout::has_only_these_rules) layout are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RuleComparison {
    /// By their comments, for ADD, and for STATUS: after a reload of a listing of nft, which writes
    /// other expressions, pods can still be started.
    ByComment,
    /// Also by their expressions, and base chains by their hooks, for CHECK and repairs. Takes 0.3
    /// ms.
    RuleSet,
}

/// The required content of a table.
#[derive(Clone, Copy, Debug)]
pub struct TableLayout {
    pub table: NftTable<'static>,
    /// The sets and maps of the table.
    pub sets: &'static [NftSet<'static>],
    /// Sets that packets fill, which have no sentinel.
    pub packet_filled_sets: &'static [NftSet<'static>],
    /// The chains of the table and their fixed rules. A chain without fixed rules is not verified.
    pub chains: &'static [(NftChain<'static>, &'static [FixedRule])],
    /// The rules of a chain that elements jump to, by the chain's name; `None` for other chains.
    /// Such a chain is created with the first element, and deleted with the last element.
    pub subnet: Option<SubnetRules>,
    /// Whether chains of this layout have only these rules. The table has many other chains, whose
    /// rules are not read.
    pub has_only_these_rules: bool,
}

/// A feature's state of attachments, which is restored after a flush.
#[derive(Clone, Copy, Debug)]
pub struct RestorableState {
    /// The feature's records.
    pub kept: RecordStore,
    /// The tables with the state.
    pub layouts: &'static [TableLayout],
    /// Whether the record of a living attachment needs the table.
    pub needs_table: fn(&TableLayout) -> bool,
    pub restore: fn(&mut LayoutTransaction<'_>),
}

impl TableLayout {
    /// An empty table.
    pub const fn new(table: NftTable<'static>) -> TableLayout {
        TableLayout {
            table,
            sets: &[],
            packet_filled_sets: &[],
            chains: &[],
            subnet: None,
            has_only_these_rules: false,
        }
    }

    pub fn find_difference(
        self,
        nft: &NftSocket,
        comparison: RuleComparison,
    ) -> NetlinkResult<Option<TableDamage>> {
        let (state, _) = TableState::read_table(nft, self, &[], comparison)?;
        Ok(state.damage.map(|text| TableDamage { exists: state.exists, text }))
    }

    /// For CHECK: fails if the table differs from its layout.
    pub fn require_whole(self, nft: &NftSocket, comparison: RuleComparison) -> error::Result<()> {
        let damage = self.find_difference(nft, comparison)?;
        damage
            .map_or(Ok(()), |damage| Err(Error::internal(damage.text).with_details(REPAIR_REMEDY)))
    }

    /// The changes that create the table.
    pub fn creation(&self) -> NftBatch {
        let mut batch = NftBatch::new();
        batch.ensure_object(self.table);
        for set in self.sets.iter().chain(self.packet_filled_sets) {
            batch.ensure_object(*set);
        }
        for (chain, rules) in self.chains {
            batch.ensure_object(*chain);
            for (comment, rule) in *rules {
                batch.append_rule(*chain, &rule().with_comment(*comment));
            }
        }
        batch
    }

    /// The rules of a chain that elements jump to.
    fn subnet_rules(&self, chain: &str) -> Option<Vec<NftRule>> {
        self.subnet.and_then(|rules| rules(chain))
    }

    /// The chains that elements jump to, and that are not among those with rules.
    fn empty_chains(&self, nft: &NftSocket, filled: &HashSet<&str>) -> NetlinkResult<Vec<String>> {
        if self.subnet.is_none() {
            return Ok(Vec::new());
        }
        let mut names: Vec<String> =
            nft.dump_chains(self.table)?.into_iter().map(|chain| chain.name).collect();
        names.retain(|name| !filled.contains(name.as_str()) && self.subnet_rules(name).is_some());
        Ok(names)
    }

    /// The chains of an exact layout that are at another hook; of any layout those at a device,
    /// which some kernels (6.12) keep without a hook when the device goes.
    fn misplaced_chains(
        &self,
        nft: &NftSocket,
        comparison: RuleComparison,
    ) -> NetlinkResult<Vec<NftChain<'static>>> {
        let mut misplaced = Vec::new();
        let are_exact = self.has_only_these_rules && comparison == RuleComparison::RuleSet;
        for (chain, _) in self.chains {
            if (are_exact || chain.is_at_device()) && !nft.is_at_hook(*chain)? {
                misplaced.push(*chain);
            }
        }
        Ok(misplaced)
    }

    /// Whether only `deleted` elements jump to a chain of [`TableLayout::subnet`]. The kernel counts
    /// its rules among the uses: some may have been flushed, and one that somebody added keeps it.
    pub fn is_unused(
        &self,
        nft: &NftSocket,
        chain: NftChain<'_>,
        uses: u32,
        deleted: usize,
    ) -> NetlinkResult<bool> {
        let Some(rules) = self.subnet_rules(chain.name) else { return Ok(false) };
        let uses = uses as usize;
        Ok(uses <= deleted + rules.len() && uses <= deleted + nft.dump_rules(chain)?.len())
    }

    /// Deletes elements, and the chains that only these elements jump to; `added` get their keys.
    pub fn delete_elements(
        &self,
        batch: &mut NftBatch,
        nft: &NftSocket,
        elements: &[SetElement],
        added: &[SetElement],
    ) -> NetlinkResult<()> {
        // For each chain the elements that jump to it: deleted and added.
        let mut jumps: BTreeMap<&str, (usize, usize)> = BTreeMap::new();
        for element in elements {
            batch.delete_element(element);
            if let Some(name) = element.target_chain() {
                jumps.entry(name).or_default().0 += 1;
            }
        }
        for name in added.iter().filter_map(SetElement::target_chain) {
            jumps.entry(name).or_default().1 += 1;
        }
        for (name, (deleted, added)) in jumps {
            let Some(rules) = self.subnet_rules(name) else { continue };
            let chain = self.table.named_chain(name);
            match nft.read_chain(chain)? {
                Some(info) if added == 0 && self.is_unused(nft, chain, info.uses, deleted)? => {
                    batch.delete_object(chain);
                }
                None if added > 0 => {
                    batch.add_object(chain);
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

/// A table that is not as its layout.
#[derive(Debug)]
pub struct TableDamage {
    /// Whether there is a table.
    pub exists: bool,
    /// The first difference, for messages.
    pub text: String,
}

/// The present content of a table, compared with its layout.
#[derive(Debug)]
struct TableState {
    layout: TableLayout,
    generation: u32,
    exists: bool,
    /// Whether the table is created if it does not exist, even if nothing is restored in it.
    is_required: bool,
    rules: Vec<RuleInfo>,
    /// The table if an operator has set the flag `dormant`, which switches its chains off; the
    /// flag has to be cleared.
    dormant: Option<NftTable<'static>>,
    /// The chains whose fixed rules are written again.
    incomplete: Vec<NftChain<'static>>,
    /// The chains that are created again, at their hooks.
    misplaced: Vec<NftChain<'static>>,
    /// The sets without a sentinel.
    flushed: Vec<NftSet<'static>>,
    /// The chains of [`TableLayout::subnet`] without rules.
    empty: Vec<String>,
    /// The first deviation, for messages.
    damage: Option<String>,
}

impl TableState {
    /// Reads the table and the elements with the keys of `wanted` by one datagram.
    fn read_table(
        nft: &NftSocket,
        layout: TableLayout,
        wanted: &[SetElement],
        comparison: RuleComparison,
    ) -> NetlinkResult<(TableState, Vec<Option<SetElement>>)> {
        let sentinels = layout.sets.iter().map(|set| set.sentinel_element());
        let queried: Vec<_> = sentinels.chain(wanted.iter().cloned()).collect();
        let own: Vec<_> = layout
            .chains
            .iter()
            .map(|(chain, _)| *chain)
            .filter(|_| layout.has_only_these_rules)
            .collect();
        let mut look = nft.read_table(layout.table, &own, &queried)?;
        let found = look.elements.split_off(layout.sets.len());
        let mut damage = Vec::new();
        if look.objects.is_none() {
            damage.push(format!("table {} is gone", layout.table));
        }
        if look.is_dormant {
            damage.push(format!("table {} is dormant", layout.table));
        }
        let mut incomplete = Vec::new();
        for (chain, rules) in layout.chains {
            let comments = rules.iter().map(|(comment, _)| *comment);
            if let Some(rule) = find_missing_rule(&look.rules, *chain, comments) {
                damage.push(format!("rule \"{rule}\" is missing in chain {chain}"));
                incomplete.push(*chain);
            } else if layout.has_only_these_rules
                && let Some(difference) = first_difference(&look.rules, *chain, rules, comparison)
            {
                damage.push(difference);
                incomplete.push(*chain);
            }
        }
        let misplaced = layout.misplaced_chains(nft, comparison)?;
        damage.extend(misplaced.iter().map(|chain| format!("chain {chain} is at another hook")));
        incomplete.extend(&misplaced);
        let sentinels = layout.sets.iter().zip(look.elements);
        let flushed = sentinels.filter(|(_, sentinel)| sentinel.is_none());
        let flushed: Vec<NftSet<'static>> = flushed.map(|(set, _)| *set).collect();
        damage.extend(flushed.iter().map(|set| format!("{set} was flushed")));
        let filled: HashSet<&str> = look.rules.iter().map(|rule| rule.chain.as_str()).collect();
        let fixed = layout.chains.iter().map(|(chain, _)| chain.name);
        let sets = layout.sets.len() + layout.packet_filled_sets.len();
        let known = sets + fixed.chain(filled.iter().copied()).collect::<HashSet<_>>().len();
        // Only a list of all chains shows the empty ones.
        let has_others = look.objects.is_some_and(|count| count as usize > known);
        let empty = if has_others { layout.empty_chains(nft, &filled)? } else { Vec::new() };
        let without_rule = |name| format!("chain {} has no rule", layout.table.named_chain(name));
        damage.extend(empty.iter().map(|name| without_rule(name)));
        let view = TableState {
            generation: look.generation,
            exists: look.objects.is_some(),
            is_required: false,
            rules: look.rules,
            damage: damage.into_iter().next(),
            layout,
            dormant: look.is_dormant.then_some(layout.table),
            incomplete,
            misplaced,
            flushed,
            empty,
        };
        Ok((view, found))
    }

    /// Creates the missing objects. Others are not changed: an administrator may have set a chain's
    /// policy, or have added rules to a chain without fixed rules.
    fn add_missing_objects(&self, batch: &mut NftBatch) {
        let TableLayout { table, sets, packet_filled_sets, chains, .. } = self.layout;
        batch.ensure_object(table);
        // The hook of a chain cannot be changed.
        for chain in &self.misplaced {
            batch.flush_chain(*chain).delete_object(*chain);
        }
        for set in sets.iter().chain(packet_filled_sets) {
            batch.ensure_object(*set);
        }
        for (chain, _) in chains {
            batch.ensure_object(*chain);
        }
        for (chain, rules) in chains.iter().filter(|(chain, _)| self.incomplete.contains(chain)) {
            batch.flush_chain(*chain);
            for (comment, rule) in *rules {
                batch.append_rule(*chain, &rule().with_comment(*comment));
            }
        }
        for set in &self.flushed {
            batch.ensure_element(&set.sentinel_element());
        }
        for name in &self.empty {
            for rule in self.layout.subnet_rules(name).unwrap_or_default() {
                batch.append_rule(table.named_chain(name), &rule);
            }
        }
    }
}

/// The first of the comments whose rule is not in the chain, or not in this order. Other rules may
/// stand in between.
fn find_missing_rule(
    found: &[RuleInfo],
    chain: NftChain<'_>,
    mut comments: impl Iterator<Item = &'static str>,
) -> Option<&'static str> {
    let mut present = found.iter().filter(|rule| rule.chain == chain.name);
    comments.find(|comment| !present.any(|rule| rule.comment.as_deref() == Some(comment)))
}

/// The first rule of the chain that is not as in `rules`, none of which is missing.
fn first_difference(
    found: &[RuleInfo],
    chain: NftChain<'_>,
    rules: &[FixedRule],
    comparison: RuleComparison,
) -> Option<String> {
    let mut fixed = rules.iter();
    for rule in found.iter().filter(|rule| rule.chain == chain.name) {
        match fixed.next() {
            Some((comment, build)) if rule.comment.as_deref() == Some(comment) => {
                if comparison == RuleComparison::RuleSet
                    && !build().has_expressions_of(chain.table, rule)
                {
                    return Some(format!("rule \"{comment}\" of chain {chain} was changed"));
                }
            }
            _ => return Some(format!("chain {chain} has a rule of another owner")),
        }
    }
    None
}

/// How much of one layout was handed over to the reference plugins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HandoverCount {
    /// The objects that the reference has now: rules, ports, addresses or chains, depending on the
    /// layout.
    pub objects: usize,
    /// Rules that are lost because their comments had no room for the container's id.
    pub nameless: usize,
    /// Rules that are lost because they have conditions of one container.
    pub conditional: usize,
}

impl fmt::Display for HandoverCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} handed over", self.objects)?;
        for (count, why) in [
            (self.nameless, "the container's id is too long for a comment"),
            (self.conditional, "the reference has no conditions of one container"),
        ] {
            if count > 0 {
                write!(f, ", {count} lost: {why}")?;
            }
        }
        Ok(())
    }
}

/// Deletes our table, if it exists, in one transaction with the changes that `convert` adds.
pub(super) fn hand_over(
    nft: &NftSocket,
    table: NftTable<'_>,
    convert: &dyn Fn(&NftSocket, &mut NftBatch) -> NetlinkResult<HandoverCount>,
) -> NetlinkResult<HandoverCount> {
    let mut handed = HandoverCount::default();
    nft.update_tables(&mut |nft| {
        let mut batch = NftBatch::new();
        handed = HandoverCount::default();
        if nft.has_object(table)? {
            handed = convert(nft, &mut batch)?;
            batch.delete_object(table);
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
        let complete = HandoverCount { objects: 3, ..HandoverCount::default() };
        assert_eq!(complete.to_string(), "3 handed over");
        let handed = HandoverCount { objects: 1, nameless: 2, conditional: 3 };
        let expected = "1 handed over, 2 lost: the container's id is too long for a comment, 3 \
                        lost: the reference has no conditions of one container";
        assert_eq!(handed.to_string(), expected);
    }
}
