//! What a feature of the packet filter keeps in the [records](Record) of attachments, to restore their rules after a flush.
//!
//! ```text
//! /run/cni/cnibox/<feature>/<instance>.json -> ../attachments/<instance>.json
//! ```
//!
//! ADD writes its part of the record, and a link that lists the attachment under the feature, before it creates the rules. DEL and
//! GC remove the link and the part before they delete the rules: a process that restores rules verifies afterwards that the link
//! still exists ([`Kept::exists`]).
//!
//! Up to release 0.2.0 the feature's part was a file in place of the link; such files are still read.

use std::collections::HashSet;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::file::{self, DIR, ENDING};
use super::liveness::{Doubt, Liveness};
use super::owner::{Owner, network_hash};
use super::record::{Record, is_here};
use crate::error::Result;
use crate::files::{self, During, remove_file};
use crate::log;

/// The parts of a feature, by the feature's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kept(&'static str);

/// What a feature keeps of one attachment.
#[derive(Clone, Debug)]
pub struct Keepsake<T> {
    record: Record,
    /// The feature's own data.
    pub content: T,
}

/// A file of release 0.2.0.
#[derive(Deserialize)]
struct OldFile {
    network: String,
    ifname: String,
    id: String,
    host: u64,
    content: Value,
}

impl<T> Keepsake<T> {
    /// The attachment.
    pub fn owner(&self) -> Owner<'_> {
        self.record.owner()
    }
}

impl Kept {
    /// The parts of the feature.
    pub const fn of(feature: &'static str) -> Kept {
        Kept(feature)
    }

    /// Adds the part to the attachment's record, in place of an earlier one.
    pub fn keep<T: Serialize>(self, owner: Owner<'_>, content: T) {
        let save = || {
            let mut record = Record::present(owner)?.unwrap_or_else(|| Record::new(owner, "", ""));
            record.rules.insert(self.0.to_owned(), serde_json::to_value(content)?);
            record.save()?;
            Ok(self.link(&owner.instance())?)
        };
        let saved: Result<(), Box<dyn std::error::Error>> = save();
        if let Err(e) = saved {
            log::warn(format_args!("{e}; flushed rules of this attachment will not be restored"));
        }
    }

    /// How an operator restores the attachment's rules; `trouble` describes the missing rules, if known.
    pub fn remedy(self, owner: Owner<'_>, trouble: Option<&str>) -> String {
        let trouble = trouble.unwrap_or("the rules are gone from the packet filter");
        if self.exists(&owner.instance()) {
            return format!("{trouble}; \"cnibox repair\" restores all rules of this host");
        }
        format!("{trouble}; attach the container again")
    }

    /// Removes the part from the attachment's record.
    pub fn remove(self, owner: Owner<'_>) -> Result<()> {
        Ok(self.remove_of(&owner.instance())?)
    }

    fn remove_of(self, instance: &str) -> files::Result<()> {
        let link = self.place(instance);
        match fs::remove_file(&link) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
            removed => removed.during("remove", &link)?,
        }
        let Some(mut record) = Record::read(instance) else { return Ok(()) };
        record.rules.remove(self.0);
        if record.plugin.is_empty() && record.rules.is_empty() {
            return file::remove(instance);
        }
        record.save()
    }

    /// Removes the parts of the network's attachments that are not among `valid`.
    pub fn remove_stale(self, network: &str, valid: &[Owner<'_>]) -> Result<()> {
        let valid: HashSet<String> = valid.iter().map(Owner::instance).collect();
        let mut stale = file::instances(&self.folder(), &network_hash(network));
        stale.retain(|instance| !valid.contains(instance));
        Ok(stale.iter().try_for_each(|instance| self.remove_of(instance))?)
    }

    /// Whether any attachment is listed under the feature.
    pub fn is_used(self) -> bool {
        fs::read_dir(self.folder()).is_ok_and(|mut folder| folder.next().is_some())
    }

    /// Whether the attachment of this [instance](Owner::instance) is listed under the feature.
    pub fn exists(self, instance: &str) -> bool {
        self.place(instance).symlink_metadata().is_ok()
    }

    /// The feature's data of the attachment, if it can be read.
    pub fn read<T: DeserializeOwned>(self, owner: Owner<'_>) -> Option<T> {
        serde_json::from_value(self.part(&owner.instance())?.content).ok()
    }

    /// The parts in records of this host, read one by one as the iterator advances.
    pub fn all<T: DeserializeOwned>(self) -> impl Iterator<Item = Keepsake<T>> {
        let instances = file::instances(&self.folder(), "").into_iter();
        let parts = instances.filter_map(move |instance| self.part(&instance));
        parts.filter_map(|Keepsake { record, content }| {
            Some(Keepsake { record, content: serde_json::from_value(content).ok()? })
        })
    }

    /// The parts of the attachments whose rules are to be restored: those that exist, and those made on this host in this
    /// boot that have no link which would show their end.
    pub fn living<T: DeserializeOwned>(self) -> Vec<Keepsake<T>> {
        let all: Vec<Keepsake<T>> = self.all().collect();
        let records: Vec<Record> = all.iter().map(|kept| kept.record.clone()).collect();
        let lives = Record::liveness_of(&records);
        let is_here = |life| matches!(life, Liveness::Alive | Liveness::Unknown(Doubt::NoHostEnd));
        all.into_iter()
            .zip(lives)
            .filter(|(_, life)| is_here(*life))
            .map(|(kept, _)| kept)
            .collect()
    }

    fn part(self, instance: &str) -> Option<Keepsake<Value>> {
        let kept = Record::read(instance).and_then(|mut record| {
            record.rules.remove(self.0).map(|content| Keepsake { record, content })
        });
        kept.or_else(|| {
            let old = file::load::<OldFile>(&self.place(instance)).ok()??;
            let OldFile { network, ifname, id, host, content } = old;
            let record = Record { network, id, ifname, host, ..Record::default() };
            let is_it = is_here(host) && record.owner().instance() == instance;
            is_it.then_some(Keepsake { record, content })
        })
    }

    /// Lists the attachment under the feature, in place of a file of release 0.2.0.
    fn link(self, instance: &str) -> files::Result<()> {
        let (link, target) = (self.place(instance), file::target(instance));
        match symlink(&target, &link) {
            Err(e) if e.kind() == ErrorKind::NotFound => file::make_folder(&self.folder())?,
            Err(e) if e.kind() == ErrorKind::AlreadyExists && link.is_symlink() => return Ok(()),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => remove_file(&link)?,
            linked => return linked.during("link", &link),
        }
        symlink(&target, &link).during("link", &link)
    }

    fn folder(self) -> PathBuf {
        Path::new(DIR).join(self.0)
    }

    fn place(self, instance: &str) -> PathBuf {
        self.folder().join(format!("{instance}{ENDING}"))
    }
}
