//! What a feature of the packet filter keeps in the [records](Record) of attachments, to restore their rules after a flush.
//!
//! ADD writes its part of the record, and a link that lists the attachment under the feature, before it creates the rules. DEL and
//! GC remove the link and the part before they delete the rules: a process that restores rules verifies afterwards that the link
//! still exists ([`Kept::exists`]).
//!
//! Up to release 0.2.0 the feature's part was a file in place of the link; such files are still read.

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::file::{self, ATTACHMENTS, Here, here};
use super::liveness::{Doubt, Liveness};
use super::owner::Owner;
use super::record::Record;
use crate::error::Result;
use crate::files::During;

/// The parts of a feature, by the feature's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kept(pub &'static str);

/// What a feature keeps of one attachment.
#[derive(Clone, Debug)]
pub struct Keepsake<T> {
    /// The attachment's record, without this feature's part.
    pub record: Record,
    /// The feature's own data.
    pub content: T,
}

impl<T> Keepsake<T> {
    /// The attachment.
    pub fn owner(&self) -> Owner<'_> {
        self.record.owner()
    }
}

impl Kept {
    /// Adds the part to the attachment's record, in place of an earlier one.
    pub fn keep<T: Serialize>(self, owner: Owner<'_>, content: T) {
        let save = || {
            let mut record = Record::present(owner)?.unwrap_or_else(|| Record::new(owner, "", ""));
            record.rules.insert(self.0.to_owned(), serde_json::to_value(content)?);
            record.save()?;
            let instance = owner.instance();
            Ok(file::link(&self.place(&instance), &instance)?)
        };
        let saved: Result<(), Box<dyn std::error::Error>> = save();
        if let Err(e) = saved {
            file::unrecorded(format_args!(
                "{e}; flushed rules of this attachment will not be restored"
            ));
        }
    }

    /// How an operator restores the attachment's rules; `trouble` describes the missing rules, if known.
    pub fn remedy(self, owner: Owner<'_>, trouble: Option<&str>) -> String {
        let trouble = trouble.unwrap_or("the rules are gone from the packet filter");
        let is_kept = self.exists(&owner.instance());
        let repair = "\"cnibox repair\" restores all rules of this host";
        format!("{trouble}; {}", if is_kept { repair } else { "attach the container again" })
    }

    /// Removes the part from the attachment's record.
    pub fn remove(self, owner: Owner<'_>) -> Result<()> {
        self.remove_of(&owner.instance())
    }

    fn remove_of(self, instance: &str) -> Result<()> {
        let link = self.place(instance);
        match fs::remove_file(&link) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
            removed => removed.during("remove", &link)?,
        }
        let Some(mut record) = Record::read(instance) else { return Ok(()) };
        record.rules.remove(self.0);
        if record.plugin.is_empty() && record.rules.is_empty() {
            return record.remove();
        }
        Ok(record.save()?)
    }

    /// Removes the parts of the network's attachments that are not among `valid`.
    pub fn remove_stale(self, network: &str, valid: &[Owner<'_>]) -> Result<()> {
        let stale = file::stale(self.0, network, valid);
        stale.iter().try_for_each(|instance| self.remove_of(instance))
    }

    /// Whether any attachment is listed under the feature.
    pub fn is_used(self) -> bool {
        fs::read_dir(file::folder(self.0)).is_ok_and(|mut folder| folder.next().is_some())
    }

    /// Whether the attachment of this [instance](Owner::instance) is listed under the feature.
    pub fn exists(self, instance: &str) -> bool {
        self.place(instance).symlink_metadata().is_ok()
    }

    /// The feature's data of the attachment, if it can be read.
    pub fn read<T: DeserializeOwned>(self, owner: Owner<'_>) -> Option<T> {
        serde_json::from_value(self.part(&owner.instance(), &here())?.content).ok()
    }

    /// The parts in records of this host, read one by one as the iterator advances.
    pub fn all<T: DeserializeOwned>(self) -> impl Iterator<Item = Keepsake<T>> {
        self.parts(file::instances(self.0, None))
    }

    /// As [`all`](Kept::all), but for the attachment `except`.
    pub fn others<T: DeserializeOwned>(
        self,
        except: Owner<'_>,
    ) -> impl Iterator<Item = Keepsake<T>> + use<T> {
        let (mut instances, own) = (file::instances(self.0, None), except.instance());
        instances.retain(|instance| *instance != own);
        self.parts(instances)
    }

    fn parts<T: DeserializeOwned>(
        self,
        instances: Vec<String>,
    ) -> impl Iterator<Item = Keepsake<T>> + use<T> {
        let here = here();
        let parts = instances.into_iter().filter_map(move |instance| self.part(&instance, &here));
        parts.filter_map(|Keepsake { record, content }| {
            Some(Keepsake { record, content: serde_json::from_value(content).ok()? })
        })
    }

    /// The parts of the attachments whose rules are to be restored: those that exist, and those made on this host in this
    /// boot that have no link which would show their end.
    pub fn living<T: DeserializeOwned>(self) -> Vec<Keepsake<T>> {
        let mut all: Vec<Keepsake<T>> = self.all().collect();
        let records: Vec<&Record> = all.iter().map(|kept| &kept.record).collect();
        let mut lives = Record::liveness_of(&records).into_iter();
        let is_here = |life| matches!(life, Liveness::Alive | Liveness::Unknown(Doubt::NoHostEnd));
        all.retain(|_| lives.next().is_some_and(is_here));
        all
    }

    /// The part in the attachment's record, or in a file of release 0.2.0 in place of the link.
    fn part(self, instance: &str, here: &Here) -> Option<Keepsake<Value>> {
        [ATTACHMENTS, self.0].into_iter().find_map(|folder| {
            let mut record = file::read(folder, instance, here)?;
            let content = record.rules.remove(self.0).or(record.content.take())?;
            Some(Keepsake { record, content })
        })
    }

    fn place(self, instance: &str) -> PathBuf {
        file::place(self.0, instance)
    }
}
