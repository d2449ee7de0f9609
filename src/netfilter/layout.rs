//! Our tables of `nf_tables`: what they have to be like, and how they get and stay so.
//!
//! A [`Layout`] is a value: a table, its sets and maps, its chains with their fixed rules. An ADD looks
//! whether the table is as its layout says, plans, and commits ([`change`]); where somebody flushed
//! rules or sets, the same transaction makes them again, and all that the attachments of this host had
//! in any of our tables ([`Feature`]): protections and what they protect are effective together.
//!
//! A rule's name is its comment: a rule that changes gets another one. That a set was not flushed
//! tells its sentinel, an element that no packet matches.

use std::collections::{HashMap, HashSet};

use nix::errno::Errno;
use serde::de::DeserializeOwned;

use super::FEATURES;
use crate::attachment::{Keepsake, Kept};
use crate::error;
use crate::log;
use crate::netlink::nftables::{Batch, Chain, Element, Key, Nft, Rule, RuleInfo, Set, Table};
use crate::netlink::{Error, Result};

/// How often a change is planned that others got in the way of; each time one of them is done.
const ATTEMPTS: usize = 200;

/// After how many of them the tables of others are left as they are: one of them may have something
/// that is not ours.
const ALONE: usize = 10;

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
    /// What is wrong with the table; nothing is wrong if it is not there and not needed, or if it is as
    /// an earlier release has made it.
    pub fn damage(self, nft: &Nft, is_needed: impl FnOnce() -> bool) -> Result<Option<String>> {
        let (view, _) = View::take(nft, self, &[])?;
        let matters = view.is_there || (view.trouble.is_some() && is_needed());
        Ok(view.trouble.as_ref().filter(|_| matters && !view.is_of_earlier_release()).cloned())
    }

    /// Deletes the chains of subnets that nothing leads to but these elements, which are being deleted.
    pub fn del_unused(&self, nft: &Nft, batch: &mut Batch, elements: &[&Element]) -> Result<()> {
        let mut left: HashMap<&str, usize> = HashMap::new();
        for name in elements.iter().filter_map(|element| element.leads_to()) {
            *left.entry(name).or_default() += 1;
        }
        for (name, count) in left {
            let Some(rules) = (self.subnet)(name) else { continue };
            let chain = self.table.chain(name);
            let uses = nft.chain(chain)?.map(|info| info.uses as usize);
            if uses.is_some_and(|uses| uses <= count + rules.len()) {
                batch.del_chain(chain);
            }
        }
        Ok(())
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
    /// Two system calls, and those tell of the elements of `keys` as well.
    fn take(
        nft: &Nft,
        layout: Layout,
        keys: &[(Set<'static>, Key)],
    ) -> Result<(View, Vec<Option<Element>>)> {
        let sentinels = layout.sets.iter().map(|set| (*set, set.sentinel().key));
        let asked: Vec<_> = sentinels.chain(keys.iter().cloned()).collect();
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
        known.extend(layout.chains.iter().map(|(chain, _)| chain.name()));
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

    /// No sentinels, and rules of other names. They work as long as they are there; the next ADD replaces
    /// them.
    fn is_of_earlier_release(&self) -> bool {
        self.flushed == self.layout.sets
            && !self.flushed.is_empty()
            && self.broken.iter().any(|chain| self.filled.contains(chain.name()))
    }

    /// Makes what is missing. Nothing else of the table is touched: an administrator may have set a
    /// chain's policy, or have rules of their own in a chain without fixed ones.
    fn build(&self, batch: &mut Batch) {
        let Layout { table, sets, chains, subnet } = &self.layout;
        batch.ensure_table(*table);
        for set in sets {
            batch.ensure_set(*set);
        }
        for (chain, _) in chains {
            batch.ensure_chain(*chain);
        }
        for (chain, rules) in chains.iter().filter(|(chain, _)| self.broken.contains(chain)) {
            batch.flush_chain(*chain);
            for rule in rules {
                batch.append_rule(*chain, rule);
            }
        }
        for set in &self.flushed {
            batch.ensure_element(*set, &set.sentinel());
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
    let mut comments = found.iter().filter(|rule| rule.chain == chain.name());
    let mut is_there = |rule: &&Rule| comments.any(|f| f.comment.as_deref() == rule.comment_text());
    let missing = rules.iter().find(|rule| !is_there(rule));
    missing.map(|rule| rule.comment_text().unwrap_or_default())
}

/// A change of our tables that is being planned.
#[derive(Debug)]
pub struct Change<'n> {
    nft: &'n Nft,
    views: Vec<View>,
    batch: Batch,
    /// The chains of subnets that the batch makes.
    made: HashSet<(Table<'static>, String)>,
    /// With damage: the keys that are in flushed sets again, or will be.
    taken: Option<HashSet<(Set<'static>, Key)>>,
    /// Whether elements are missed in sets that were not flushed.
    is_thorough: bool,
    /// Whether only the tables that are looked at are restored.
    is_alone: bool,
    /// The records that something is restored from.
    records: Vec<(Kept, String)>,
    /// The comments of rules that the batch appends.
    ruled: HashSet<String>,
    /// How many elements and rules are.
    restored: usize,
}

/// Commits what `fill` adds to the tables of `layouts`, which are made whole before, and with them
/// everything that a flush took from others. `fill` gets what was found for each of `keys`.
pub fn change(
    nft: &Nft,
    layouts: &[Layout],
    keys: &[(Set<'static>, Key)],
    mut fill: impl FnMut(&mut Change<'_>, Vec<Option<Element>>) -> Result<()>,
) -> Result<()> {
    again(|attempt| {
        let (mut change, found) = Change::look(nft, layouts, keys)?;
        change.is_alone = attempt >= ALONE;
        fill(&mut change, found)?;
        change.finish().map(drop)
    })
}

/// Restores all that belongs to the attachments of this host in all of our tables, single elements
/// as well; what was wrong.
pub(super) fn heal(nft: &Nft) -> Result<Vec<String>> {
    let mut troubles = Vec::new();
    again(|_| {
        let (mut change, _) = Change::look(nft, &[], &[])?;
        (change.taken, change.is_thorough) = (Some(HashSet::new()), true);
        troubles = change.finish()?;
        Ok(())
    })?;
    Ok(troubles)
}

/// Others may be faster to make, to remove or to restore something: then all is looked at again.
fn again(mut attempt: impl FnMut(usize) -> Result<()>) -> Result<()> {
    let mut outcome = Ok(());
    for number in 0..ATTEMPTS {
        outcome = attempt(number);
        match outcome.as_ref().map_err(Error::errno) {
            Err(Some(Errno::EEXIST | Errno::ENOENT | Errno::ERESTART)) => {}
            _ => break,
        }
    }
    outcome
}

impl<'n> Change<'n> {
    fn look(
        nft: &'n Nft,
        layouts: &[Layout],
        keys: &[(Set<'static>, Key)],
    ) -> Result<(Change<'n>, Vec<Option<Element>>)> {
        let (mut views, mut found) = (Vec::new(), Vec::new());
        for layout in layouts {
            let keys = if views.is_empty() { keys } else { &[] };
            let (mut view, elements) = View::take(nft, layout.clone(), keys)?;
            view.is_wanted = true;
            found.extend(elements);
            views.push(view);
        }
        let damaged = views.iter().any(|view| view.trouble.is_some());
        let taken = damaged.then(HashSet::new);
        let change = Change {
            nft,
            views,
            batch: Batch::new(),
            made: HashSet::new(),
            taken,
            is_thorough: false,
            is_alone: false,
            records: Vec::new(),
            ruled: HashSet::new(),
            restored: 0,
        };
        Ok((change, found))
    }

    /// What it is made with.
    pub fn nft(&self) -> &'n Nft {
        self.nft
    }

    /// The rules of the table, of all its chains.
    pub fn rules(&self, table: Table<'_>) -> &[RuleInfo] {
        let view = self.views.iter().find(|view| view.layout.table == table);
        view.map_or(&[], |view| &view.rules)
    }

    /// Changes of other kinds.
    pub fn batch(&mut self) -> &mut Batch {
        &mut self.batch
    }

    /// Adds an element, and the chain of a subnet that it leads to.
    pub fn put(&mut self, set: Set<'static>, element: &Element) {
        if let Some(chain) = element.leads_to() {
            self.lead_to(set.table(), chain);
        }
        if let Some(taken) = &mut self.taken {
            taken.insert((set, element.key.clone()));
        }
        self.batch.add_element(set, element);
    }

    /// Adds an element in the place of what was found for its key, unless that is the same.
    pub fn replace(&mut self, set: Set<'static>, found: Option<&Element>, element: &Element) {
        if found == Some(element) {
            return;
        }
        if found.is_some() {
            self.batch.del_element(set, element);
        }
        self.put(set, element);
    }

    fn lead_to(&mut self, table: Table<'static>, name: &str) {
        let Some(view) = self.views.iter().find(|view| view.layout.table == table) else { return };
        let has_rule = view.filled.contains(name) || view.hollow.iter().any(|other| other == name);
        if let Some(rules) = (view.layout.subnet)(name).filter(|_| !has_rule)
            && self.made.insert((table, name.to_owned()))
        {
            let chain = table.chain(name);
            self.batch.add_chain(chain);
            for rule in &rules {
                self.batch.append_rule(chain, rule);
            }
        }
    }

    /// Appends an attachment's rules, whose comment this is, to a chain.
    pub fn append_rules(&mut self, chain: Chain<'static>, comment: &str, rules: &[Rule]) {
        for rule in rules {
            self.batch.append_rule(chain, rule);
        }
        self.ruled.insert(comment.to_owned());
    }

    /// As [`append_rules`](Change::append_rules), if the attachment has none in the chain.
    pub fn restore_rules(&mut self, chain: Chain<'static>, comment: &str, rules: &[Rule]) {
        let view = self.views.iter().find(|view| view.layout.table == chain.table());
        let is_kept = view.is_some_and(|view| {
            let is_own = |rule: &RuleInfo| rule.comment.as_deref() == Some(comment);
            !view.broken.contains(&chain) && view.rules.iter().any(is_own)
        });
        if !rules.is_empty() && !is_kept && !self.ruled.contains(comment) {
            self.append_rules(chain, comment, rules);
            self.restored += rules.len();
        }
    }

    /// The records of a feature, but for those of containers that are certainly gone.
    pub fn living<T: DeserializeOwned>(&mut self, kept: Kept) -> Vec<Keepsake<T>> {
        let living = kept.living::<T>();
        self.records.extend(living.iter().map(|one| (kept, one.owner().instance())));
        living
    }

    /// Whether the set may lack elements, so that what was in it has to be restored.
    pub fn is_flushed(&self, set: Set<'_>) -> bool {
        let may_lack = |view: &View| {
            view.flushed.contains(&set) || (self.is_thorough && view.layout.sets.contains(&set))
        };
        self.views.iter().any(may_lack)
    }

    /// As [`put`](Change::put), if the set was flushed and nobody has the key.
    pub fn restore(&mut self, set: Set<'static>, element: &Element) {
        let taken = self.taken.as_ref();
        if self.is_flushed(set) && taken.is_some_and(|t| !t.contains(&(set, element.key.clone()))) {
            self.put(set, element);
            self.restored += 1;
        }
    }

    /// Restores what is damaged, and commits; what was wrong. Where something is restored, nobody may
    /// have changed anything since the first look.
    fn finish(mut self) -> Result<Vec<String>> {
        if self.taken.is_none() {
            return self.nft.commit(self.batch).map(|()| Vec::new());
        }
        self.restore_all()?;
        let (mut batch, mut troubles) = (Batch::new(), Vec::new());
        for view in self.views.iter().filter(|view| view.trouble.is_some()) {
            let is_used = || self.batch.is_about(view.layout.table);
            if view.is_there || view.is_wanted || is_used() {
                view.build(&mut batch);
                troubles.extend(view.trouble.clone());
            }
        }
        batch.append(self.batch);
        let generation = self.views.first().map_or(0, |view| view.generation);
        self.nft.commit_at(batch, generation)?;
        forget_gone(self.nft, &self.records)?;
        match self.restored {
            0 => {}
            1 => troubles.push("1 element was missing".to_owned()),
            many => troubles.push(format!("{many} elements were missing")),
        }
        Ok(troubles)
    }

    fn restore_all(&mut self) -> Result<()> {
        let tables: Vec<_> = self.views.iter().map(|view| view.layout.table).collect();
        let is_looked_at = |layout: &Layout| tables.contains(&layout.table);
        let features = FEATURES.iter();
        let features: Vec<&Feature> = features
            .filter(|feature| !self.is_alone || (feature.layouts)().iter().any(is_looked_at))
            .collect();
        for feature in &features {
            for layout in (feature.layouts)() {
                if self.views.iter().any(|view| view.layout.table == layout.table) {
                    continue;
                }
                let table = layout.table;
                match View::take(self.nft, layout, &[]) {
                    Ok((view, _)) => self.views.push(view),
                    Err(e) => log::warn(format_args!("table {table} is not looked after: {e}")),
                }
            }
        }
        let mut present = HashSet::new();
        let sets = self.views.iter().filter(|view| view.is_there).flat_map(|v| &v.layout.sets);
        for set in sets.filter(|set| self.is_flushed(**set)) {
            let elements = self.nft.dump_elements(*set)?.into_iter();
            present.extend(elements.map(|element| (*set, element.key)));
        }
        self.taken.get_or_insert_default().extend(present);
        for feature in features {
            (feature.restore)(self);
        }
        Ok(())
    }
}

/// A DEL that found nothing to delete may have ended meanwhile: what was restored for it goes.
fn forget_gone(nft: &Nft, records: &[(Kept, String)]) -> Result<()> {
    for Feature { kept, layouts, .. } in FEATURES {
        let mine = records.iter().filter(|(of, _)| of == kept).map(|(_, instance)| instance);
        let gone: Vec<&String> = mine.filter(|instance| !kept.is_there(instance)).collect();
        if gone.is_empty() {
            continue;
        }
        let is_gone = |comment: &Option<String>| {
            let comment = comment.as_deref().unwrap_or_default();
            gone.iter().any(|instance| comment.starts_with(*instance))
        };
        nft.update(|nft| {
            let mut batch = Batch::new();
            for Layout { table, sets, .. } in layouts() {
                for set in sets {
                    for element in nft.dump_elements(set)?.iter().filter(|e| is_gone(&e.comment)) {
                        batch.del_element(set, element);
                    }
                }
                for rule in nft.look(table, &[])?.rules.iter().filter(|r| is_gone(&r.comment)) {
                    batch.del_rule(table.chain(&rule.chain), rule.handle);
                }
            }
            Ok(batch)
        })?;
    }
    Ok(())
}
