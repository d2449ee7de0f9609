//! Our tables of `nf_tables`: what they have to be like, and how they get and stay so.
//!
//! A [`Layout`] is a value: a table, its sets and maps, its chains with their fixed rules. An ADD looks
//! whether the table is as its layout says, plans, and commits ([`change`]); after a flush of
//! rules or sets, the same transaction makes them again, and all that the attachments of this host had
//! in any of our tables ([`Feature`]): protections and what they protect are effective together.
//!
//! A rule is known by its comment: a rule that changes gets a new comment. A set has a sentinel, an element
//! that no packet matches: as long as it is there, the set was not flushed.

mod transaction;

use std::collections::{BTreeMap, HashSet};

use crate::attachment::Kept;
use crate::error;
use crate::netlink::Result;
use crate::netlink::nftables::{Batch, Chain, Element, Nft, Rule, RuleInfo, Set, Table};

pub(super) use transaction::heal;
pub use transaction::{Change, change};

/// What to do about damage.
pub const REMEDY: &str =
    "\"cnibox repair\" restores all rules of this host; the next ADD that needs them does so, too";

/// A table as it has to be.
#[derive(Clone, Debug)]
pub struct Layout {
    /// The table.
    pub table: Table<'static>,
    /// Its sets and maps.
    pub sets: Vec<Set<'static>>,
    /// Its chains and their fixed rules, each with a comment. A chain without any is not looked at.
    pub chains: Vec<(Chain<'static>, Vec<Rule>)>,
    /// The rules of a chain of this name that elements lead to and that is not fixed.
    pub subnet: fn(&str) -> Option<Vec<Rule>>,
}

/// Something of an attachment that is in our tables and comes back after a flush.
#[derive(Debug)]
pub struct Feature {
    /// Its records.
    pub kept: Kept,
    /// The tables that it is in.
    pub layouts: fn() -> Vec<Layout>,
    /// [Restores](Change::restore) what its [records](Change::living) tell.
    pub restore: fn(&mut Change<'_>),
}

impl Layout {
    /// What is wrong with the table. Nothing is if no container depends on it: the next ADD makes it whole.
    pub fn damage(self, nft: &Nft, is_needed: impl FnOnce() -> bool) -> Result<Option<String>> {
        let sets = self.sets.clone();
        let (view, _) = View::take(nft, self, &[])?;
        let Some(trouble) = view.trouble else { return Ok(None) };
        // Elements are of containers, also of those of which nothing was recorded.
        let has_elements = |set| nft.find(&[set], &[]).is_ok_and(|found| !found.is_empty());
        let is_used = || view.is_there && sets.into_iter().any(has_elements);
        Ok(Some(trouble).filter(|_| is_needed() || is_used()))
    }

    /// Deletes the elements that `find` finds, and no other that has taken the place of one since; with
    /// them the chains of subnets that nothing else leads to.
    pub fn remove(&self, nft: &Nft, find: &dyn Fn(&Nft) -> Result<Vec<Element>>) -> Result<()> {
        nft.update(&mut |nft| self.deletion(nft, &find(nft)?))
    }

    /// The deletion of elements, and of the chains of subnets that nothing else leads to.
    pub fn deletion(&self, nft: &Nft, elements: &[Element]) -> Result<Batch> {
        let mut batch = Batch::new();
        let mut left: BTreeMap<&str, usize> = BTreeMap::new();
        for element in elements {
            batch.del_element(element);
            if let Some(name) = element.leads_to() {
                *left.entry(name).or_default() += 1;
            }
        }
        for (name, count) in left {
            let Some(rules) = (self.subnet)(name) else { continue };
            let chain = self.table.chain(name);
            let uses = nft.chain(chain)?.map(|info| info.uses as usize);
            if uses.is_some_and(|uses| uses <= count + rules.len()) {
                batch.del(chain);
            }
        }
        Ok(batch)
    }
}

/// For STATUS and CHECK: an error if there is damage.
pub fn refuse(damage: Option<String>) -> error::Result<()> {
    let refused = |trouble| Err(error::Error::internal(trouble).with_details(REMEDY));
    damage.map_or(Ok(()), refused)
}

/// A table as it is.
#[derive(Debug)]
struct View {
    layout: Layout,
    generation: u32,
    is_there: bool,
    /// Whether it is to be there, whatever else is restored.
    is_wanted: bool,
    rules: Vec<RuleInfo>,
    /// The chains with rules.
    filled: HashSet<String>,
    /// The chains that lack a fixed rule.
    broken: Vec<Chain<'static>>,
    /// The sets that were flushed.
    flushed: Vec<Set<'static>>,
    /// The chains of subnets without their rule.
    hollow: Vec<String>,
    /// The first trouble, in words.
    trouble: Option<String>,
}

impl View {
    /// Two system calls, and those tell of the elements with the keys of `wanted` as well.
    fn take(nft: &Nft, layout: Layout, wanted: &[Element]) -> Result<(View, Vec<Option<Element>>)> {
        let sentinels = layout.sets.iter().map(|set| set.sentinel());
        let asked: Vec<_> = sentinels.chain(wanted.iter().cloned()).collect();
        let mut look = nft.look(layout.table, &asked)?;
        let found = look.elements.split_off(layout.sets.len());
        let mut troubles = Vec::new();
        if look.objects.is_none() {
            troubles.push(format!("table {} is gone", layout.table));
        }
        let mut broken = Vec::new();
        for (chain, rules) in &layout.chains {
            if let Some(rule) = missing(&look.rules, *chain, rules) {
                troubles.push(format!("rule \"{rule}\" is missing in chain {chain}"));
                broken.push(*chain);
            }
        }
        let sentinels = layout.sets.iter().zip(look.elements);
        let flushed = sentinels.filter(|(_, sentinel)| sentinel.is_none());
        let flushed: Vec<Set<'static>> = flushed.map(|(set, _)| *set).collect();
        troubles.extend(flushed.iter().map(|set| format!("{set} was flushed")));
        let filled: HashSet<String> = look.rules.iter().map(|rule| rule.chain.clone()).collect();
        let mut known: HashSet<&str> = filled.iter().map(String::as_str).collect();
        known.extend(layout.chains.iter().map(|(chain, _)| chain.name));
        let mut hollow = Vec::new();
        // More than are known: one may be without a rule, and only a list of all chains tells which.
        if look.objects.is_some_and(|count| count as usize > layout.sets.len() + known.len()) {
            let chains = nft.dump_chains(layout.table)?.into_iter().map(|chain| chain.name);
            let is_hollow =
                |name: &String| !filled.contains(name) && (layout.subnet)(name).is_some();
            hollow = chains.filter(is_hollow).collect();
        }
        let without = |name| format!("chain {} has no rule", layout.table.chain(name));
        troubles.extend(hollow.iter().map(|name| without(name)));
        let view = View {
            generation: look.generation,
            is_there: look.objects.is_some(),
            is_wanted: false,
            rules: look.rules,
            trouble: troubles.into_iter().next(),
            layout,
            filled,
            broken,
            flushed,
            hollow,
        };
        Ok((view, found))
    }

    /// Makes what is missing. Nothing else of the table is touched: an administrator may have set a
    /// chain's policy, or have rules of their own in a chain without fixed ones.
    fn build(&self, batch: &mut Batch) {
        let Layout { table, sets, chains, subnet } = &self.layout;
        batch.ensure(*table);
        for set in sets {
            batch.ensure(*set);
        }
        for (chain, _) in chains {
            batch.ensure(*chain);
        }
        for (chain, rules) in chains.iter().filter(|(chain, _)| self.broken.contains(chain)) {
            batch.flush_chain(*chain);
            for rule in rules {
                batch.append_rule(*chain, rule);
            }
        }
        for set in &self.flushed {
            batch.ensure_element(&set.sentinel());
        }
        for name in &self.hollow {
            for rule in subnet(name).unwrap_or_default() {
                batch.append_rule(table.chain(name), &rule);
            }
        }
    }
}

/// The name of the first of the rules that is not in the chain, or in another order. Others may stand
/// between them.
fn missing<'r>(found: &[RuleInfo], chain: Chain<'_>, rules: &'r [Rule]) -> Option<&'r str> {
    let mut comments = found.iter().filter(|rule| rule.chain == chain.name);
    let mut is_there =
        |rule: &&Rule| comments.any(|f| f.comment.as_deref() == rule.comment.as_deref());
    let missing = rules.iter().find(|rule| !is_there(rule));
    missing.map(|rule| rule.comment.as_deref().unwrap_or_default())
}
