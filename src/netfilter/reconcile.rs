//! Compares the packet filter with the records of attachments, which are the desired state, and
//! makes it so.
//!
//! Every question whether rules are as they should be is asked here: by CHECK of one attachment, by
//! STATUS of what the next ADD needs, by `cnibox doctor` and `cnibox repair` of all attachments of
//! this host.

use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;

use serde::Serialize;

use super::backend::{FilterFeature, PacketFilter, RuleBackend};
use super::elements::RecordedElements;
use super::iptables::{ChainScope, IptablesTable, program_name};
use super::layout::{RuleComparison, TableLayout};
use super::rules::RecordedRules;
use super::{AttachmentId, IpFamily};
use crate::attachment::{AttachmentRecord, StoredRecord};
use crate::netlink::NetlinkResult;
use crate::netlink::nftables::NftTable;
use cni::error::{Error, ErrorContext, Result};
use cni::json::Json;

/// The attachments whose locks are held at once: each is an open file.
const LOCKED: usize = 64;

/// What is done about differences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReconcileMode {
    /// The packet filter is changed.
    Apply,
    /// Nothing is changed.
    Report,
}

/// What [`reconcile_all`] has found, and restored.
#[derive(Debug, Default)]
pub struct ReconcileOutcome {
    /// What was not as the records want it, for messages, without what could not be restored.
    pub differences: Vec<String>,
    /// What could not be restored.
    pub failures: Vec<Error>,
}

/// Something of an attachment that is not as its record wants it.
#[derive(Debug)]
struct Difference {
    /// The [instance](AttachmentId::instance_id) of the attachment.
    instance: String,
    /// What is missing or was changed, for messages.
    object: String,
}

/// For CHECK: fails unless everything is as this part of the attachment's record wants it. Without
/// a record, the rules of the reference are enough.
pub fn check_attachment(
    filter: &PacketFilter,
    feature: &FilterFeature,
    owner: AttachmentId<'_>,
    part: &impl Serialize,
) -> Result<()> {
    let content = Json::encode(part);
    let stored = StoredRecord { record: AttachmentRecord::new(owner, "", ""), content };
    FilterComparison::new(filter)
        .find_differences(feature, &stored, &[])?
        .into_iter()
        .next()
        .map_or(Ok(()), Err)
}

/// Compares the rules of all attachments of this host with their records.
pub fn reconcile_all(filter: &PacketFilter, mode: ReconcileMode) -> Result<ReconcileOutcome> {
    let mut differences = find_differences(filter)?;
    if mode == ReconcileMode::Report || differences.is_empty() {
        return Ok(ReconcileOutcome { differences, failures: Vec::new() });
    }
    let mut failures = restore_all(filter);
    let left = find_differences(filter)?;
    differences.retain(|object| !left.contains(object));
    failures
        .extend(left.into_iter().map(|object| Error::internal(format!("not restored: {object}"))));
    Ok(ReconcileOutcome { differences, failures })
}

/// Restores the missing rules of all attachments of this host. Returns what failed.
pub fn restore_all(filter: &PacketFilter) -> Vec<Error> {
    let tables = filter.query_nft(&|_| filter.own_tables()?.repair_tables());
    let others = filter.features.iter().map(|feature| restore_other_objects(filter, feature));
    [tables].into_iter().chain(others).filter_map(Result::err).collect()
}

/// Restores what is not in the feature's tables.
fn restore_other_objects(filter: &PacketFilter, feature: &FilterFeature) -> Result<()> {
    let of_rules = feature
        .rules
        .map_or(Ok(()), |rules| rules.restore(&|family| filter.default_iptables(family)));
    of_rules.and((feature.restore)(filter))
}

/// The differences of all features, each text once, without those of attachments that another
/// process is changing: ADD, DEL and whoever reclaims an attachment hold its lock from the change
/// of the record to that of the rules. What seems to differ is compared again while its lock is
/// held here.
fn find_differences(filter: &PacketFilter) -> Result<Vec<String>> {
    let seen: HashSet<String> =
        differences_of_features(filter)?.into_iter().map(|found| found.instance).collect();
    let seen: Vec<String> = seen.into_iter().collect();
    let mut certain: Vec<String> = Vec::new();
    for instances in seen.chunks(LOCKED) {
        let mut locked = Vec::new();
        for instance in instances {
            if let Some(lock) = AttachmentRecord::try_lock_instance(instance)? {
                locked.push((instance, lock));
            }
        }
        for Difference { instance, object } in differences_of_features(filter)? {
            if locked.iter().any(|(locked, _)| **locked == instance) && !certain.contains(&object) {
                certain.push(object);
            }
        }
    }
    Ok(certain)
}

/// The differences of all living attachments.
fn differences_of_features(filter: &PacketFilter) -> Result<Vec<Difference>> {
    let comparison = FilterComparison::new(filter);
    let mut found = Vec::new();
    for feature in filter.features {
        let all = feature.state.kept.restorable_parts::<Json>();
        for stored in &all {
            let content = (feature.decided_part)(filter, stored, &all)?;
            let decided = StoredRecord { record: stored.record.clone(), content };
            let errors = comparison
                .find_differences(feature, &decided, &all)
                .unwrap_or_else(|error| vec![error]);
            let instance = stored.attachment_id().instance_id();
            found.extend(errors.iter().map(|error| Difference {
                instance: instance.clone(),
                object: error.message().to_owned(),
            }));
        }
    }
    Ok(found)
}

/// What was read of a table of iptables.
type TablesByName<T> = ReadOnce<(IpFamily, &'static str), Rc<T>>;

/// What was read for each of a few keys.
type ReadOnce<K, V> = RefCell<Vec<(K, V)>>;

/// The value of the key, read at its first use.
fn read_once<K: PartialEq, V: Clone, E>(
    values: &ReadOnce<K, V>,
    key: K,
    read: impl FnOnce() -> Result<V, E>,
) -> Result<V, E> {
    if let Some((_, known)) = values.borrow().iter().find(|(known, _)| *known == key) {
        return Ok(known.clone());
    }
    let value = read()?;
    values.borrow_mut().push((key, value.clone()));
    Ok(value)
}

/// Compares attachments with the packet filter, and reads once what several attachments have in
/// common.
struct FilterComparison<'f> {
    filter: &'f PacketFilter,
    /// The first difference of each table from its layout.
    layouts: ReadOnce<NftTable<'static>, Option<String>>,
    /// The tables of the node's default iptables.
    tables: TablesByName<IptablesTable>,
    /// The tables of all flavours of iptables with chains of CNI plugins.
    flavours: TablesByName<Vec<IptablesTable>>,
}

impl<'f> FilterComparison<'f> {
    fn new(filter: &'f PacketFilter) -> FilterComparison<'f> {
        FilterComparison {
            filter,
            layouts: RefCell::default(),
            tables: RefCell::default(),
            flavours: RefCell::default(),
        }
    }

    /// What is not as the attachment's part wants it: each damaged table, or else the first
    /// element, and the first rule of each family.
    fn find_differences(
        &self,
        feature: &FilterFeature,
        stored: &StoredRecord<Json>,
        all: &[StoredRecord<Json>],
    ) -> Result<Vec<Error>> {
        let (owner, part) = (stored.attachment_id(), &stored.content);
        let families: Vec<IpFamily> =
            feature.rules.iter().flat_map(|rules| rules.families(part)).collect();
        let mut texts = Vec::new();
        if let Some(elements) = &feature.elements
            && self.requires_elements(feature, owner, part)?
        {
            texts = self.find_wrong_elements(feature, elements, owner, part)?;
        }
        if !texts.is_empty() && (feature.is_of_reference)(self.filter.nft_socket()?, owner, part)? {
            return Ok(Vec::new());
        }
        for (rules, family) in
            feature.rules.iter().flat_map(|rules| families.iter().map(move |f| (rules, *f)))
        {
            texts.extend(self.find_missing_rule(rules, family, stored, all)?);
        }
        let mut errors: Vec<Error> = texts
            .into_iter()
            .map(|text| {
                Error::internal(text).with_details(feature.state.kept.restore_remedy(owner))
            })
            .collect();
        errors.extend((feature.check)(self.filter, owner, part).err());
        Ok(errors)
    }

    /// Whether the elements are required. An attachment with rules in iptables needs none if the
    /// reference created it, or if the kernel has no `nf_tables`.
    fn requires_elements(
        &self,
        feature: &FilterFeature,
        owner: AttachmentId<'_>,
        part: &Json,
    ) -> Result<bool> {
        if RuleBackend::of_part(part) != Some(RuleBackend::Iptables) {
            return Ok(true);
        }
        let is_recorded = feature.state.kept.has_instance(&owner.instance_id());
        Ok(is_recorded && self.filter.nft_socket_if_present()?.is_some())
    }

    fn find_wrong_elements(
        &self,
        feature: &FilterFeature,
        elements: &RecordedElements,
        owner: AttachmentId<'_>,
        part: &Json,
    ) -> Result<Vec<String>> {
        let (mut wrong, wanted) = (Vec::new(), (elements.of_part)(owner, part));
        for layout in feature.state.layouts {
            if wanted.iter().any(|element| element.set.table == layout.table) {
                wrong.extend(self.find_table_difference(*layout)?);
            }
        }
        if wrong.is_empty() && !wanted.is_empty() {
            wrong.extend(elements.find_difference(self.filter.nft_socket()?, owner, &wanted)?);
        }
        Ok(wrong)
    }

    fn find_table_difference(&self, layout: TableLayout) -> NetlinkResult<Option<String>> {
        read_once(&self.layouts, layout.table, || {
            let nft = self.filter.nft_socket()?;
            let damage = layout.find_difference(nft, RuleComparison::ByComment)?;
            Ok(damage.map(|damage| damage.text))
        })
    }

    /// The first rule of the attachment that no flavour of iptables has.
    fn find_missing_rule(
        &self,
        rules: &RecordedRules,
        family: IpFamily,
        stored: &StoredRecord<Json>,
        all: &[StoredRecord<Json>],
    ) -> Result<Option<String>> {
        let compared = self.default_table(family, rules.table).map(|present| {
            let mut planned = IptablesTable::clone(&present);
            let obstacle = (rules.plan)(&mut planned, family, stored, all);
            planned.first_difference(&present).ok_or(obstacle)
        });
        if let Ok(Err(obstacle)) = compared {
            return Ok(obstacle);
        }
        for table in self.tables_with_chains(family, rules.table)?.iter() {
            let mut planned = table.clone();
            if (rules.plan)(&mut planned, family, stored, all).is_none()
                && planned.first_change().is_none()
            {
                return Ok(None);
            }
        }
        let line = compared?.unwrap_or_default();
        Ok(Some(format!("\"{line}\" is missing in {} table {}", program_name(family), rules.table)))
    }

    fn tables_with_chains(
        &self,
        family: IpFamily,
        name: &'static str,
    ) -> Result<Rc<Vec<IptablesTable>>> {
        read_once(&self.flavours, (family, name), || {
            let found = self.filter.iptables_with_chains(family, name, &[])?;
            let tables = found.iter().map(|tables| tables.read_table(name, ChainScope::All));
            Ok(Rc::new(tables.collect::<Result<_>>()?))
        })
    }

    fn default_table(&self, family: IpFamily, name: &'static str) -> Result<Rc<IptablesTable>> {
        read_once(&self.tables, (family, name), || {
            let programs = self.filter.default_iptables(family)?;
            Ok(Rc::new(programs.read_table(name, ChainScope::All)?))
        })
    }
}

/// For STATUS: restores what the next ADD with these features would restore. Fails, with code 50,
/// only where that ADD would fail: if the back end cannot work, or the feature's tables of this
/// back end cannot be restored. Other rules that cannot be restored are those of other attachments,
/// which `cnibox doctor` reports. `None` stands for an ADD that needs no rules of these features.
pub fn require_serviceable(
    filter: &PacketFilter,
    backend: Option<RuleBackend>,
    features: &[FilterFeature],
) -> Result<()> {
    backend.map_or(Ok(()), |backend| backend.require_usable(filter, features))?;
    for feature in features {
        match filter.query_nft(&|_| restore_tables(filter, feature)) {
            Err(error) if backend != Some(RuleBackend::Nftables) => warn!("{}", unrestored(&error)),
            outcome => outcome.or_unavailable()?,
        }
        restore_other_objects(filter, feature)
            .unwrap_or_else(|error| warn!("{}", unrestored(&error)));
    }
    Ok(())
}

fn unrestored(error: &Error) -> String {
    format!("could not restore rules: {error}")
}

/// Restores the tables of a feature that exist or that records need, with all elements in flushed
/// sets.
fn restore_tables(filter: &PacketFilter, feature: &FilterFeature) -> NetlinkResult<()> {
    let mut damaged: Vec<TableLayout> = Vec::new();
    for layout in feature.state.layouts {
        let damage = layout.find_difference(filter.nft_socket()?, RuleComparison::ByComment)?;
        if let Some(damage) =
            damage.filter(|damage| damage.exists || (feature.state.needs_table)(layout))
        {
            debug!("restored: {}", damage.text);
            damaged.push(*layout);
        }
    }
    if damaged.is_empty() {
        return Ok(());
    }
    filter.own_tables()?.change_tables(&damaged, &[], &mut |_, _| Ok(()))
}
