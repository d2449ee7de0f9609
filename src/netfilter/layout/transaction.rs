//! A transaction that changes our tables, and restores them after a flush of rules or sets.

use std::collections::{HashMap, HashSet};
use std::mem;

use nix::errno::Errno;
use serde::de::DeserializeOwned;

use super::{RestorableState, RuleComparison, TableLayout, TableState};
use crate::attachment::{RecordStore, StoredRecord};
use crate::netfilter::names::{has_same_owner, instance_in_comment, is_left_in_place};
use crate::netlink::nftables::{
    ElementKey, NftBatch, NftChain, NftRule, NftSet, NftSocket, NftTable, SetElement,
};
use crate::netlink::{NetlinkError, NetlinkResult};

/// How often a change is planned again after a conflict; in each conflict another process makes
/// progress.
const ATTEMPTS: usize = 200;

/// The number of conflicts after which other tables are not restored: one of them may have foreign
/// objects that refuse every attempt.
const OWN_TABLES_ONLY_AFTER: usize = 10;

/// After how many attempts without a commit of anybody a refusal is no conflict, but what the kernel
/// says to the change: that it lacks an expression, or a device of a chain. One attempt may have
/// been planned during a commit, which changes the generation at its beginning.
const UNCHANGED_GENERATIONS: u32 = 2;

/// Adds changes to a transaction. Gets the elements that were found for the keys of `wanted`.
type TransactionPlanner<'f> =
    &'f mut dyn FnMut(&mut LayoutTransaction<'_>, Vec<Option<SetElement>>) -> NetlinkResult<()>;

/// Our tables of `nf_tables`.
#[derive(Debug)]
pub struct CniboxTables<'n> {
    pub nft: &'n NftSocket,
    /// The state of all features in them.
    pub state: Vec<RestorableState>,
}

/// A planned change of our tables.
#[derive(Debug)]
pub struct LayoutTransaction<'n> {
    pub nft: &'n NftSocket,
    /// The state of all features.
    state: &'n [RestorableState],
    views: Vec<TableState>,
    /// The changes so far; a feature may add any change.
    pub batch: NftBatch,
    /// The chains that the batch creates for elements that jump to them.
    new_chains: HashSet<(NftTable<'static>, String)>,
    /// If there is damage: the elements that flushed sets have again, or will have after the
    /// commit.
    present_elements: Option<HashMap<(NftSet<'static>, ElementKey), SetElement>>,
    /// For [`CniboxTables::repair_tables`], which looks for missing elements in all sets, flushed
    /// or not.
    is_repair: bool,
    /// Whether only the tables of the change are restored.
    has_own_tables_only: bool,
    /// Whether the commit fails with `ERESTART` if another process has changed anything since the
    /// first read.
    is_conditional: bool,
    /// The records that state is restored from.
    records: Vec<(RecordStore, String)>,
    /// The comments of rules that the batch appends.
    appended: HashSet<String>,
}

impl CniboxTables<'_> {
    /// Commits the changes of `fill` in the tables of `layouts`. The same transaction restores
    /// these tables, and the state of other attachments that a flush has deleted.
    pub fn change_tables(
        &self,
        layouts: &[TableLayout],
        wanted: &[SetElement],
        fill: TransactionPlanner<'_>,
    ) -> NetlinkResult<()> {
        self.commit_with_retries(layouts, wanted, false, fill)
    }

    /// Restores all state of the attachments of this host in all of our tables, single elements
    /// included.
    pub fn repair_tables(&self) -> NetlinkResult<()> {
        self.commit_with_retries(&[], &[], true, &mut |_, _| Ok(()))
    }

    /// Plans and commits; again after a conflict with another process that created, deleted or
    /// restored something.
    fn commit_with_retries(
        &self,
        layouts: &[TableLayout],
        wanted: &[SetElement],
        is_repair: bool,
        fill: TransactionPlanner<'_>,
    ) -> NetlinkResult<()> {
        let (mut outcome, mut has_own_tables_only) = (Ok(()), false);
        let (mut generation, mut unchanged) = (None, 0);
        for attempt in 1..=ATTEMPTS {
            outcome = self.plan_and_commit(layouts, wanted, is_repair, has_own_tables_only, fill);
            match outcome.as_ref().map_err(NetlinkError::errno) {
                Err(Some(Errno::EEXIST | Errno::ENOENT | Errno::ERESTART)) => {}
                _ => break,
            }
            let present = Some(self.nft.read_generation()?);
            unchanged = if generation == present { unchanged + 1 } else { 0 };
            generation = present;
            let is_refused = unchanged >= UNCHANGED_GENERATIONS;
            if is_refused && (is_repair || has_own_tables_only) {
                break;
            }
            has_own_tables_only = !is_repair
                && (has_own_tables_only || is_refused || attempt >= OWN_TABLES_ONLY_AFTER);
        }
        outcome
    }

    fn plan_and_commit(
        &self,
        layouts: &[TableLayout],
        wanted: &[SetElement],
        is_repair: bool,
        has_own_tables_only: bool,
        fill: TransactionPlanner<'_>,
    ) -> NetlinkResult<()> {
        let read = |comparison| {
            let (mut views, mut found) = (Vec::new(), Vec::new());
            for layout in layouts {
                let wanted = if views.is_empty() { wanted } else { &[] };
                let (view, elements) =
                    TableState::read_table(self.nft, *layout, wanted, comparison)?;
                found.extend(elements);
                views.push(TableState { is_required: true, ..view });
            }
            Ok::<_, NetlinkError>((views, found))
        };
        let (mut views, mut found) = read(RuleComparison::ByComment)?;
        if views.iter().any(|view| view.damage.is_some() && view.layout.has_only_these_rules) {
            (views, found) = read(RuleComparison::RuleSet)?;
        }
        let is_damaged = is_repair || views.iter().any(|view| view.damage.is_some());
        let mut change = LayoutTransaction {
            nft: self.nft,
            state: &self.state,
            views,
            batch: NftBatch::new(),
            new_chains: HashSet::new(),
            present_elements: is_damaged.then(HashMap::new),
            is_repair,
            has_own_tables_only,
            is_conditional: is_damaged,
            records: Vec::new(),
            appended: HashSet::new(),
        };
        fill(&mut change, found)?;
        change.restore_and_commit()
    }
}

impl LayoutTransaction<'_> {
    fn state_of_table(&self, table: NftTable<'_>) -> Option<&TableState> {
        self.views.iter().find(|view| view.layout.table == table)
    }

    /// Adds an element, and the chain that it jumps to unless the chain exists.
    pub fn put_element(&mut self, element: &SetElement) {
        let table = element.set.table;
        if let Some(name) = element.target_chain()
            && let Some(view) = self.state_of_table(table)
            && !view.rules.iter().any(|rule| rule.chain == name)
            && !view.empty.iter().any(|empty| empty == name)
            && let Some(rules) = view.layout.subnet_rules(name)
            && self.new_chains.insert((table, name.to_owned()))
        {
            self.batch.add_object(table.named_chain(name));
            for rule in &rules {
                self.batch.append_rule(table.named_chain(name), rule);
            }
        }
        if let Some(present_elements) = &mut self.present_elements {
            present_elements.insert((element.set, element.key.clone()), element.clone());
        }
        self.batch.add_element(element);
    }

    /// Replaces the element that was found for the key by `element`, unless they are equal.
    pub fn replace_element(&mut self, found: Option<&SetElement>, element: &SetElement) {
        if found == Some(element) {
            return;
        }
        if found.is_some() {
            return self.replace_data(element);
        }
        self.put_element(element);
    }

    /// Like [`LayoutTransaction::replace_element`], unless the element that was found is
    /// [left](is_left_in_place) to another attachment. Returns whether the attachment has the
    /// element.
    ///
    /// An element that is left is written again: a concurrent deletion of its owner, which may not
    /// have seen the record of this attachment, is refused and planned again, or refuses this
    /// transaction.
    pub fn claim_element(&mut self, found: Option<&SetElement>, element: &SetElement) -> bool {
        let Some(left) = found.filter(|found| is_left_in_place(found, element)) else {
            self.replace_element(found, element);
            return true;
        };
        if left.data != element.data {
            warn!(
                "{element} of {} has another value, and is left: its owner is \"{}\"",
                element.set,
                left.comment.as_deref().unwrap_or_default()
            );
        }
        self.require_unchanged();
        self.batch.delete_element(left);
        self.put_element(left);
        false
    }

    /// Appends an attachment's rules, which have this comment, to a chain.
    pub fn append_rules(&mut self, chain: NftChain<'static>, comment: &str, rules: &[NftRule]) {
        for rule in rules {
            self.batch.append_rule(chain, rule);
        }
        self.appended.insert(comment.to_owned());
    }

    /// Like [`LayoutTransaction::append_rules`], unless the chain has rules of the attachment.
    pub fn restore_rules(&mut self, chain: NftChain<'static>, comment: &str, rules: &[NftRule]) {
        let exists = self.state_of_table(chain.table).is_some_and(|view| {
            !view.incomplete.contains(&chain)
                && view.rules.iter().any(|rule| rule.comment.as_deref() == Some(comment))
        });
        if !rules.is_empty() && !exists && !self.appended.contains(comment) {
            self.append_rules(chain, comment, rules);
        }
    }

    /// The records of a feature, without those of containers that are certainly gone.
    pub fn restorable_records<T: DeserializeOwned>(
        &mut self,
        kept: RecordStore,
    ) -> Vec<StoredRecord<T>> {
        let living = kept.restorable_parts::<T>();
        self.records.extend(living.iter().map(|one| (kept, one.attachment_id().instance_id())));
        living
    }

    /// Makes the commit fail, and the change be planned again, if another process has changed
    /// anything since the first read.
    pub fn require_unchanged(&mut self) {
        self.is_conditional = true;
    }

    /// How much of rules is compared: all of them only where something is missing already, or for a
    /// repair.
    pub fn rule_comparison(&self) -> RuleComparison {
        if self.present_elements.is_some() {
            RuleComparison::RuleSet
        } else {
            RuleComparison::ByComment
        }
    }

    /// Whether the caller has to create the chain, because nothing in this transaction has created
    /// it yet.
    pub fn begin_chain(&mut self, table: NftTable<'static>, chain: &str) -> bool {
        self.new_chains.insert((table, chain.to_owned()))
    }

    /// Whether elements of the set, or the chains that they refer to, may be missing.
    pub fn is_flushed(&self, set: NftSet<'_>) -> bool {
        self.views.iter().any(|view| {
            // Chains that are not read may have lost their rules as well.
            let is_suspect = view.layout.has_only_these_rules && !view.incomplete.is_empty();
            view.flushed.contains(&set)
                || ((self.is_repair || is_suspect) && view.layout.sets.contains(&set))
        })
    }

    /// Whether the set has lost its sentinel.
    pub fn was_flushed(&self, set: NftSet<'_>) -> bool {
        self.views.iter().any(|view| view.flushed.contains(&set))
    }

    /// Whether there is an element with this key, or will be after the commit.
    pub fn has_occupant(&self, wanted: &SetElement) -> bool {
        self.find_present(wanted).is_some()
    }

    /// The element that a flushed set has for the key of `wanted`, or will have after the commit.
    fn find_present(&self, wanted: &SetElement) -> Option<&SetElement> {
        self.present_elements.as_ref()?.get(&(wanted.set, wanted.key.clone()))
    }

    /// Like [`LayoutTransaction::put_element`], if the set was flushed and has no element with this
    /// key. Returns whether the element is restored.
    pub fn restore_element(&mut self, element: &SetElement) -> bool {
        let is_missing = self.is_flushed(element.set) && self.find_present(element).is_none();
        if is_missing {
            self.put_element(element);
        }
        is_missing
    }

    /// Whether [`LayoutTransaction::restore_with_data`] leaves the element to the attachment, with
    /// its data.
    pub fn will_have_data(&self, element: &SetElement) -> bool {
        self.is_flushed(element.set)
            && self.find_present(element).is_none_or(|found| is_ownerless_or_own(found, element))
    }

    /// Like [`LayoutTransaction::restore_element`]; also corrects the data of the attachment's
    /// element, which is outdated after an ADD that was killed between writing the record and
    /// the rules.
    pub fn restore_with_data(&mut self, element: &SetElement) {
        if !self.restore_element(element)
            && self
                .find_present(element)
                .is_some_and(|found| is_ownerless_or_own(found, element) && found != element)
        {
            self.replace_data(element);
        }
    }

    /// Deletes the element with this key, and adds this one.
    pub fn replace_data(&mut self, element: &SetElement) {
        self.batch.delete_element(element);
        self.put_element(element);
    }

    /// The generation of the first read, if the commit depends on it; otherwise 0.
    fn required_generation(&self) -> u32 {
        self.views.first().filter(|_| self.is_conditional).map_or(0, |view| view.generation)
    }

    /// Restores damaged state and commits.
    fn restore_and_commit(mut self) -> NetlinkResult<()> {
        if self.present_elements.is_none() {
            let generation = self.required_generation();
            return self.nft.commit_at_generation(self.batch, generation);
        }
        self.restore_tables()?;
        let generation = self.required_generation();
        let mut batch = NftBatch::new();
        for view in self.views.iter().filter(|view| view.damage.is_some()) {
            if view.exists || view.is_required || self.batch.is_about_table(view.layout.table) {
                view.add_missing_objects(&mut batch);
            }
        }
        batch.append_batch(mem::take(&mut self.batch));
        self.commit_repair(batch, generation)?;
        remove_deleted_attachments(self.nft, self.state, &self.records)
    }

    /// Commits the batch. The kernel refuses a batch that creates base chains in a table and clears
    /// its flag `dormant`; in that case another batch clears the flag first.
    fn commit_repair(&self, batch: NftBatch, generation: u32) -> NetlinkResult<()> {
        let dormant: Vec<_> = self.views.iter().filter_map(|view| view.dormant).collect();
        if dormant.is_empty() {
            return self.nft.commit_at_generation(batch, generation);
        }
        let outcome = self.nft.commit_at_generation(batch.clone(), generation);
        if outcome.as_ref().err().and_then(NetlinkError::errno) != Some(Errno::EINVAL) {
            return outcome;
        }
        let mut wake = NftBatch::new();
        for table in dormant {
            wake.ensure_object(table);
        }
        self.nft.commit_at_generation(wake, generation)?;
        self.nft.commit_at_generation(batch, if generation == 0 { 0 } else { generation + 1 })
    }

    /// Reads the other tables, and adds the missing state of all of them.
    fn restore_tables(&mut self) -> NetlinkResult<()> {
        let comparison = self.rule_comparison();
        let mut state = self.state.to_vec();
        state.retain(|s| {
            !self.has_own_tables_only
                || s.layouts.iter().any(|layout| self.state_of_table(layout.table).is_some())
        });
        for layout in state.iter().flat_map(|state| state.layouts) {
            let table = layout.table;
            if self.state_of_table(table).is_none() {
                match TableState::read_table(self.nft, *layout, &[], comparison) {
                    Ok((view, _)) => self.views.push(view),
                    Err(e) => warn!("could not restore table {table}: {e}"),
                }
            }
        }
        let sets = self.views.iter().filter(|view| view.exists).flat_map(|v| v.layout.sets);
        let flushed: Vec<_> = sets.copied().filter(|set| self.is_flushed(*set)).collect();
        let present = self.nft.find_elements(&flushed, &[])?.into_iter();
        let present = present.map(|element| ((element.set, element.key.clone()), element));
        let present_elements = self.present_elements.get_or_insert_default();
        for (key, element) in present {
            present_elements.entry(key).or_insert(element);
        }
        for RestorableState { restore, .. } in state {
            restore(self);
        }
        Ok(())
    }
}

/// Whether the element is the attachment's, or its comment names no attachment: another program has
/// written it.
fn is_ownerless_or_own(found: &SetElement, own: &SetElement) -> bool {
    has_same_owner(found, own)
        || !instance_in_comment(found.comment.as_deref()).is_some_and(|instance| {
            instance.split('-').all(|part| part.len() == 16) && instance.contains('-')
        })
}

/// Deletes the restored state of attachments whose records were deleted meanwhile: their DEL may
/// have ended before the commit.
fn remove_deleted_attachments(
    nft: &NftSocket,
    state: &[RestorableState],
    records: &[(RecordStore, String)],
) -> NetlinkResult<()> {
    for RestorableState { kept, layouts, .. } in state {
        let mut gone: Vec<&String> =
            records.iter().filter(|(of, _)| of == kept).map(|(_, instance)| instance).collect();
        gone.retain(|instance| !kept.has_instance(instance));
        if gone.is_empty() {
            continue;
        }
        let is_gone = |comment: Option<&str>| {
            gone.iter().any(|instance| comment.unwrap_or_default().starts_with(*instance))
        };
        nft.update_tables(&mut |nft| {
            let mut batch = NftBatch::new();
            for TableLayout { table, sets, .. } in *layouts {
                for element in nft.find_elements_by_comment(sets, &[], &is_gone)? {
                    batch.delete_element(&element);
                }
                let mut rules = nft.read_table(*table, &[], &[])?.rules;
                rules.retain(|rule| is_gone(rule.comment.as_deref()));
                batch.delete_rules(*table, &rules);
            }
            Ok(batch)
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::netlink::nftables::ValueType;
    use crate::netns::isolate_test_thread;

    const TABLE: NftTable<'_> = NftTable::new_inet("layout");
    const SET: NftSet<'_> = TABLE.named_set("names", &[ValueType::IfName]);
    const OTHER: NftTable<'_> = NftTable::new_inet("other");
    const LAYOUTS: [TableLayout; 1] = [TableLayout { sets: &[SET], ..TableLayout::new(TABLE) }];
    const RECORDS: RecordStore = RecordStore("layout-test");

    static PLANS: AtomicUsize = AtomicUsize::new(0);

    /// Another process commits while the first repair is planned.
    fn restore(_: &mut LayoutTransaction<'_>) {
        if PLANS.fetch_add(1, Ordering::Relaxed) == 0 {
            let mut batch = NftBatch::new();
            batch.ensure_object(OTHER);
            NftSocket::open().unwrap().commit_batch(batch).unwrap();
        }
    }

    #[test]
    fn a_repair_is_planned_again_after_a_commit_of_another_process() {
        isolate_test_thread();
        let nft = NftSocket::open().unwrap();
        let mut batch = NftBatch::new();
        batch.ensure_object(TABLE);
        nft.commit_batch(batch).unwrap();
        let state =
            RestorableState { kept: RECORDS, layouts: &LAYOUTS, needs_table: |_| true, restore };
        let own = CniboxTables { nft: &nft, state: vec![state] };
        own.repair_tables().unwrap();
        assert_eq!(
            LAYOUTS[0]
                .find_difference(&nft, RuleComparison::RuleSet)
                .unwrap()
                .map(|damage| damage.text),
            None
        );
        assert_eq!(PLANS.load(Ordering::Relaxed), 2);
    }

    /// The kernel says the same of a chain that another process has deleted, of a device that a
    /// chain needs, and of an expression that it lacks.
    #[test]
    fn what_is_refused_without_a_conflict_is_not_planned_again() {
        isolate_test_thread();
        let nft = NftSocket::open().unwrap();
        let own = CniboxTables { nft: &nft, state: Vec::new() };
        let plans_beside = |mut beside: Box<dyn FnMut()>| {
            let mut plans = 0;
            let refused = own.change_tables(&LAYOUTS, &[], &mut |change, _| {
                plans += 1;
                change.batch.append_rule(TABLE.named_chain("absent"), &NftRule::new());
                beside();
                Ok(())
            });
            (plans, refused.unwrap_err().errno().unwrap())
        };
        // Once more without the tables of others, which may have been what was refused.
        assert_eq!(plans_beside(Box::new(|| ())), (4, Errno::ENOENT));
        let other = NftSocket::open().unwrap();
        let commit = move || {
            let mut batch = NftBatch::new();
            batch.ensure_object(OTHER).delete_object(OTHER);
            other.commit_batch(batch).unwrap();
        };
        assert_eq!(plans_beside(Box::new(commit)), (ATTEMPTS, Errno::ERESTART));
    }
}
