//! A transaction that changes our tables, and makes them whole again after a flush of rules or sets.

use std::collections::HashSet;

use nix::errno::Errno;
use serde::de::DeserializeOwned;

use super::{Feature, Layout, View};
use crate::attachment::{Keepsake, Kept, Owner};
use crate::log;
use crate::netfilter::{FEATURES, Repair};
use crate::netlink::nftables::{Batch, Chain, Element, Key, Nft, Rule, RuleInfo, Set, Table};
use crate::netlink::{Error, Result};

/// How often a change is planned that others got in the way of; each time one of them is done.
const ATTEMPTS: usize = 200;

/// After how many of them the tables of others are left as they are: one of them may have something
/// that is not ours.
const ALONE: usize = 10;

/// A change of our tables that is being planned.
#[derive(Debug)]
pub struct Change<'n> {
    /// The socket that the change is committed through.
    pub nft: &'n Nft,
    views: Vec<View>,
    /// Changes of any kind.
    pub batch: Batch,
    /// The chains of subnets that the batch makes.
    made: HashSet<(Table<'static>, String)>,
    /// With damage: the keys that are in flushed sets again, or will be.
    taken: Option<HashSet<(Set<'static>, Key)>>,
    /// Only for [`heal`], which misses elements also in sets that were not flushed.
    heal: Option<Repair>,
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
/// everything that a flush took from others. `fill` gets what was found for each key of `wanted`.
pub fn change(
    nft: &Nft,
    layouts: &[Layout],
    wanted: &[Element],
    mut fill: impl FnMut(&mut Change<'_>, Vec<Option<Element>>) -> Result<()>,
) -> Result<()> {
    again(|attempt| {
        let (mut change, found) = Change::look(nft, layouts, wanted)?;
        change.is_alone = attempt >= ALONE;
        fill(&mut change, found)?;
        change.finish().map(drop)
    })
}

/// Looks for all that belongs to the attachments of this host in all of our tables, single elements
/// as well, and restores what is missing unless it is only to be reported. Returns what was missing.
pub(in crate::netfilter) fn heal(nft: &Nft, repair: Repair) -> Result<Vec<String>> {
    let mut troubles = Vec::new();
    again(|_| {
        let (mut change, _) = Change::look(nft, &[], &[])?;
        (change.taken, change.heal) = (Some(HashSet::new()), Some(repair));
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
        wanted: &[Element],
    ) -> Result<(Change<'n>, Vec<Option<Element>>)> {
        let (mut views, mut found) = (Vec::new(), Vec::new());
        for layout in layouts {
            let wanted = if views.is_empty() { wanted } else { &[] };
            let (mut view, elements) = View::take(nft, layout.clone(), wanted)?;
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
            heal: None,
            is_alone: false,
            records: Vec::new(),
            ruled: HashSet::new(),
            restored: 0,
        };
        Ok((change, found))
    }

    /// The rules of the table, of all its chains.
    pub fn rules(&self, table: Table<'_>) -> &[RuleInfo] {
        let view = self.views.iter().find(|view| view.layout.table == table);
        view.map_or(&[], |view| &view.rules)
    }

    /// Adds an element, and the chain of a subnet that it leads to.
    pub fn put(&mut self, element: &Element) {
        if let Some(chain) = element.leads_to() {
            self.lead_to(element.set.table, chain);
        }
        if let Some(taken) = &mut self.taken {
            taken.insert((element.set, element.key.clone()));
        }
        self.batch.add_element(element);
    }

    /// Adds an element in the place of what was found for its key, unless that is the same.
    pub fn replace(&mut self, found: Option<&Element>, element: &Element) {
        if found == Some(element) {
            return;
        }
        if found.is_some() {
            self.batch.del_element(element);
        }
        self.put(element);
    }

    fn lead_to(&mut self, table: Table<'static>, name: &str) {
        let Some(view) = self.views.iter().find(|view| view.layout.table == table) else { return };
        let has_rule = view.filled.contains(name) || view.hollow.iter().any(|other| other == name);
        if let Some(rules) = (view.layout.subnet)(name).filter(|_| !has_rule)
            && self.made.insert((table, name.to_owned()))
        {
            let chain = table.chain(name);
            self.batch.add(chain);
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
        let view = self.views.iter().find(|view| view.layout.table == chain.table);
        let is_kept = view.is_some_and(|view| {
            let is_own = |rule: &RuleInfo| rule.comment.as_deref() == Some(comment);
            !view.broken.contains(&chain) && view.rules.iter().any(is_own)
        });
        if !rules.is_empty() && !is_kept && !self.ruled.contains(comment) {
            self.append_rules(chain, comment, rules);
            self.restored += rules.len();
        }
    }

    /// The records of a feature, without the records of containers that are certainly gone.
    pub fn living<T: DeserializeOwned>(&mut self, kept: Kept) -> Vec<Keepsake<T>> {
        let living = kept.living::<T>();
        self.records.extend(living.iter().map(|one| (kept, one.owner().instance())));
        living
    }

    /// Whether the set may lack elements, so that what was in it has to be restored.
    pub fn is_flushed(&self, set: Set<'_>) -> bool {
        let may_lack = |view: &View| {
            view.flushed.contains(&set) || (self.heal.is_some() && view.layout.sets.contains(&set))
        };
        self.views.iter().any(may_lack)
    }

    /// As [`put`](Change::put), if the set was flushed and has no element with this key.
    pub fn restore(&mut self, element: &Element) {
        let key = || (element.set, element.key.clone());
        let is_taken = |taken: &HashSet<_>| taken.contains(&key());
        if self.is_flushed(element.set) && !self.taken.as_ref().is_none_or(is_taken) {
            self.put(element);
            self.restored += 1;
        }
    }

    /// Restores the elements that `elements` makes of each record, if a set may lack some.
    pub fn restore_all<T: DeserializeOwned>(
        &mut self,
        kept: Kept,
        layouts: &[Layout],
        elements: impl Fn(Owner<'_>, &T) -> Vec<Element>,
    ) {
        if layouts.iter().flat_map(|layout| &layout.sets).any(|set| self.is_flushed(*set)) {
            for kept in self.living::<T>(kept) {
                for element in elements(kept.owner(), &kept.content) {
                    self.restore(&element);
                }
            }
        }
    }

    /// Restores what is damaged, and commits. Returns what was damaged. Where something is restored, the commit
    /// fails if another process has changed anything since the first look.
    fn finish(mut self) -> Result<Vec<String>> {
        if self.taken.is_none() {
            return self.nft.commit(self.batch).map(|()| Vec::new());
        }
        self.restore_tables()?;
        let (mut batch, mut troubles) = (Batch::new(), Vec::new());
        for view in self.views.iter().filter(|view| view.trouble.is_some()) {
            let is_used = || self.batch.is_about(view.layout.table);
            if view.is_there || view.is_wanted || is_used() {
                view.build(&mut batch);
                troubles.extend(view.trouble.clone());
            }
        }
        if self.heal != Some(Repair::Report) {
            batch.append(self.batch);
            let generation = self.views.first().map_or(0, |view| view.generation);
            self.nft.commit_at(batch, generation)?;
            forget_gone(self.nft, &self.records)?;
        }
        match self.restored {
            0 => {}
            1 => troubles.push("1 element was missing".to_owned()),
            many => troubles.push(format!("{many} elements were missing")),
        }
        Ok(troubles)
    }

    fn restore_tables(&mut self) -> Result<()> {
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
        let sets = self.views.iter().filter(|view| view.is_there).flat_map(|v| &v.layout.sets);
        let flushed: Vec<_> = sets.copied().filter(|set| self.is_flushed(*set)).collect();
        let present = self.nft.find(&flushed, &[])?.into_iter();
        let present = present.map(|element| (element.set, element.key));
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
        let is_gone = |comment: Option<&str>| {
            gone.iter().any(|instance| comment.unwrap_or_default().starts_with(*instance))
        };
        nft.update(&mut |nft| {
            let mut batch = Batch::new();
            for Layout { table, sets, .. } in layouts() {
                for element in nft.find_of(&sets, &[], &is_gone)? {
                    batch.del_element(&element);
                }
                let mut rules = nft.look(table, &[])?.rules;
                rules.retain(|rule| is_gone(rule.comment.as_deref()));
                batch.del_rules(table, &rules);
            }
            Ok(batch)
        })?;
    }
    Ok(())
}
