//! Rules that come back after a flush: noticed by the rules of one other attachment, and made again from
//! the records of all.

use serde::de::DeserializeOwned;

use super::super::Repair;
use super::super::names::Owner;
use super::{Iptables, Table};
use crate::attachment::{self, Keepsake};
use crate::error::Result;
use crate::netlink::Family;

/// The records of the attachments whose rules a feature makes with iptables.
#[derive(Debug)]
pub struct Records<R> {
    /// All records of the feature, records of other back ends included.
    pub kept: attachment::Kept,
    /// The table with the rules.
    pub table: &'static str,
    /// Whether the record is of rules in this family's table.
    pub is_of: fn(&R, Family) -> bool,
    /// Makes the rules of one record where they are not there.
    pub restore: fn(&mut Table, Family, &Keepsake<R>),
}

impl<R: DeserializeOwned> Records<R> {
    /// The record of another attachment, by whose rules a flush is noticed.
    pub fn another(&self, owner: Owner<'_>, family: Family) -> Option<Keepsake<R>> {
        let mut all = self.kept.all().filter(|kept| (self.is_of)(&kept.content, family));
        all.find(|kept| kept.owner() != owner)
    }

    /// Makes the rules of all attachments of this host but one, where they are not there.
    pub fn restore(&self, table: &mut Table, family: Family, but: Option<Owner<'_>>) {
        let mut all = self.kept.living();
        all.retain(|kept| (self.is_of)(&kept.content, family) && Some(kept.owner()) != but);
        for kept in all {
            (self.restore)(table, family, &kept);
        }
    }

    /// The first rule of attachments of this host that is missing.
    pub fn damage(&self) -> Result<Option<String>> {
        self.heal(Repair::Report)
    }

    /// Looks for the rules of attachments of this host. Returns the first that was missing.
    pub fn heal(&self, repair: Repair) -> Result<Option<String>> {
        self.look(|programs, family| match repair {
            Repair::Restore => {
                programs.update(self.table, |table| self.restore(table, family, None))
            }
            Repair::Report => Ok(()),
        })
    }

    fn look(&self, repair: impl Fn(&Iptables, Family) -> Result<()>) -> Result<Option<String>> {
        let mut found = None;
        let all: Vec<_> = self.kept.all().collect();
        for family in Family::BOTH {
            if !all.iter().any(|kept| (self.is_of)(&kept.content, family)) {
                continue;
            }
            let programs = Iptables::require(family)?;
            let mut table = programs.read(self.table)?;
            self.restore(&mut table, family, None);
            programs.settle(&mut table)?;
            if let Some(line) = table.first_change() {
                let text = format!("\"{line}\" is missing in {family} table {}", self.table);
                found.get_or_insert(text);
                repair(&programs, family)?;
            }
        }
        Ok(found)
    }
}
