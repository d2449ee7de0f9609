//! The rules of attachments in tables of iptables, as their records want them.
//!
//! The absence of another attachment's rules shows that a table was flushed: then ADD restores the
//! rules of all attachments.

use std::cell::Cell;

use serde::Serialize;

use super::elements::find_other_records;
use super::iptables::{ChainScope, IptablesHandle, IptablesRule, IptablesTable};
use super::names::AttachmentId;
use crate::attachment::{RecordStore, StoredRecord};
use crate::netlink::IpFamily;
use crate::netlink::nftables::XtExtension;
use cni::error::{ErrorCode, ErrorContext, Result, join_outcomes};
use cni::json::Json;

/// What the records of a feature want in a table of iptables.
#[derive(Clone, Copy, Debug)]
pub struct RecordedRules {
    /// All records of the feature, records of other back ends included.
    pub kept: RecordStore,
    pub table: &'static str,
    /// What its rules need of the kernel, for any family.
    pub extensions: &'static [XtExtension],
    /// Whether a record with this part has rules in this family's table.
    pub is_of: fn(&Json, IpFamily) -> bool,
    /// Creates the rules of one record unless they exist. The slice has the records of other
    /// attachments, too. Returns what prevents that, if anything.
    pub plan: PlanRecord,
    /// Rules, or parts of rules, that the table has unless it was flushed: those of this other
    /// record. The part is that of the attachment to add, if that is in the same network.
    pub expected: fn(IpFamily, &StoredRecord<Json>, Option<&Json>) -> Vec<IptablesRule>,
}

/// Opens the tables of the node's default iptables.
pub type IptablesOpener<'a> = &'a dyn Fn(IpFamily) -> Result<IptablesHandle<'a>>;

/// See [`RecordedRules::plan`].
type PlanRecord =
    fn(&mut IptablesTable, IpFamily, &StoredRecord<Json>, &[StoredRecord<Json>]) -> Option<String>;

impl RecordedRules {
    /// For ADD: commits the changes of `plan`, and the rules of all other attachments if those of
    /// one of them are missing. Rules of others that cannot be restored do not prevent the ADD.
    /// The beginnings of chains end with the rules of that one.
    pub fn add(
        &self,
        tables: &IptablesHandle<'_>,
        owner: AttachmentId<'_>,
        part: &impl Serialize,
        scope: ChainScope<'_>,
        plan: &dyn Fn(&mut IptablesTable),
    ) -> Result<()> {
        let family = tables.family;
        let part = &Json::encode(part);
        let (others, recorded) =
            find_other_records(self.kept, owner, |content| (self.is_of)(content, family));
        let restores = Cell::new(false);
        let [oldest, newest] = others.map(|other| {
            other.map_or(Vec::new(), |other| {
                let in_network = other.record.network == owner.network;
                (self.expected)(family, &other, Some(part).filter(|_| in_network))
            })
        });
        let scope = scope.until(&oldest, recorded);
        let plan_with_others = |table: &mut IptablesTable| {
            let has = |part| table.has_words_of(part);
            // The rules of the newest one are beyond the beginning.
            let mut of_newest = newest.iter().filter(|part| table.has_read(&part.chain));
            restores.set(!oldest.iter().all(has) || !of_newest.all(has));
            if restores.get() {
                table.require_all_chains();
                let all = self.records_of_family(family);
                for other in all.iter().filter(|stored| stored.attachment_id() != owner) {
                    _ = (self.plan)(table, family, other, &all);
                }
            }
            plan(table);
        };
        let Err(error) = tables.update_table(self.table, scope, &plan_with_others) else {
            return Ok(());
        };
        if !restores.get() || error.code() == ErrorCode::TRY_AGAIN {
            return Err(error);
        }
        tables.update_table(self.table, scope, plan)?;
        warn!("could not restore the rules of other containers: {error}");
        Ok(())
    }

    /// Restores the missing rules of all attachments of this host by one change. If that fails,
    /// restores the rules of each attachment separately, so that refused rules do not prevent
    /// those of others, and returns the error.
    pub fn restore(&self, tables: IptablesOpener<'_>) -> Result<()> {
        let all: Vec<_> = self
            .kept
            .find_restorable_parts(&|stored| self.families(&stored.content).next().is_some());
        join_outcomes(IpFamily::BOTH.map(|family| self.restore_family(tables, family, &all)))
    }

    fn restore_family(
        &self,
        tables: IptablesOpener<'_>,
        family: IpFamily,
        all: &[StoredRecord<Json>],
    ) -> Result<()> {
        let all: Vec<StoredRecord<Json>> =
            all.iter().filter(|stored| (self.is_of)(&stored.content, family)).cloned().collect();
        if all.is_empty() {
            return Ok(());
        }
        let tables = tables(family)?;
        // Usually nothing is missing, and no lock is needed.
        let mut table = tables.read_table(self.table, ChainScope::All)?;
        self.plan_all(&mut table, family, &all);
        if table.first_change().is_none() {
            return Ok(());
        }
        // The records are read again under the lock of the writers.
        let restore = |table: &mut IptablesTable| {
            self.plan_all(table, family, &self.records_of_family(family));
        };
        match tables.update_table(self.table, ChainScope::All, &restore) {
            Err(error) if error.code() != ErrorCode::TRY_AGAIN => self.restore_each(&tables),
            outcome => outcome,
        }
    }

    fn plan_all(&self, table: &mut IptablesTable, family: IpFamily, all: &[StoredRecord<Json>]) {
        for stored in all {
            _ = (self.plan)(table, family, stored, all);
        }
    }

    fn restore_each(&self, tables: &IptablesHandle<'_>) -> Result<()> {
        let all = self.records_of_family(tables.family);
        join_outcomes(all.iter().map(|stored| {
            let owner = stored.attachment_id();
            let restored = tables.update_table(self.table, ChainScope::All, &|table| {
                // Its DEL may have ended meanwhile.
                if self.kept.has_instance(&owner.instance_id()) {
                    _ = (self.plan)(table, tables.family, stored, &all);
                }
            });
            restored.context(|| format!("restore the rules of container {}", owner.id))
        }))
    }

    /// The families in whose tables a record with this part has rules.
    pub fn families<'p>(&self, part: &'p Json) -> impl Iterator<Item = IpFamily> + use<'p> {
        let is_of = self.is_of;
        IpFamily::BOTH.into_iter().filter(move |family| is_of(part, *family))
    }

    /// The records of living attachments with rules in the family's table.
    fn records_of_family(&self, family: IpFamily) -> Vec<StoredRecord<Json>> {
        self.kept.find_restorable_parts(&|stored| (self.is_of)(&stored.content, family))
    }
}
