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
        let all: Vec<_> = self.kept.all().collect();
        let mut used = Family::BOTH.to_vec();
        used.retain(|family| all.iter().any(|kept| (self.is_of)(&kept.content, *family)));
        let restore = |table: &mut Table, family| self.restore(table, family, None);
        look(self.table, &used, &restore, repair)
    }
}

/// Looks for what `restore` makes in the tables of these families. Returns the first that was missing.
fn look(
    name: &str,
    families: &[Family],
    restore: &dyn Fn(&mut Table, Family),
    repair: Repair,
) -> Result<Option<String>> {
    let mut found = None;
    for family in families.iter().copied() {
        let programs = Iptables::require(family)?;
        let mut table = programs.read(name)?;
        restore(&mut table, family);
        programs.settle(&mut table)?;
        if let Some(line) = table.first_change() {
            found.get_or_insert(format!("\"{line}\" is missing in {family} table {name}"));
            if repair == Repair::Restore {
                programs.update(name, &|table| restore(table, family))?;
            }
        }
    }
    Ok(found)
}
