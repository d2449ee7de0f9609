//! The records by which a feature restores the rules of attachments after a flush.
//!
//! ```text
//! /run/cni/cnibox/<feature>/<instance>.json
//! ```
//!
//! ADD writes the record before it creates the rules. DEL and GC remove the record before they delete the rules: a
//! process that restores rules from a record verifies afterwards that the record still exists ([`Kept::exists`]).

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::file::{self, DIR, ENDING, host};
use super::liveness::Liveness;
use super::owner::{Owner, network_hash};
use super::record::Record;
use crate::error::Result;
use crate::files::remove_file;
use crate::log;

/// The records of a feature, by the feature's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kept(&'static str);

/// The record of one attachment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Keepsake<T> {
    network: String,
    ifname: String,
    id: String,
    /// The inode number of the host's network namespace.
    host: u64,
    /// The feature's own data.
    pub content: T,
}

impl<T> Keepsake<T> {
    /// The attachment.
    pub fn owner(&self) -> Owner<'_> {
        Owner { network: &self.network, ifname: &self.ifname, id: &self.id }
    }
}

impl Kept {
    /// The records of the feature.
    pub const fn of(feature: &'static str) -> Kept {
        Kept(feature)
    }

    fn folder(self) -> PathBuf {
        Path::new(DIR).join(self.0)
    }

    fn place(self, instance: &str) -> PathBuf {
        self.folder().join(format!("{instance}{ENDING}"))
    }

    /// Writes the attachment's record, in place of an earlier one.
    pub fn keep<T: Serialize>(self, owner: Owner<'_>, content: T) {
        let path = self.place(&owner.instance());
        let host = host().unwrap_or_default();
        let [network, ifname, id] = [owner.network, owner.ifname, owner.id].map(str::to_owned);
        if let Err(e) = file::write(&path, host, &Keepsake { network, ifname, id, host, content }) {
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

    /// Removes the record of the attachment.
    pub fn remove(self, owner: Owner<'_>) -> Result<()> {
        Ok(remove_file(&self.place(&owner.instance()))?)
    }

    /// Removes the records of the network's attachments that are not among `valid`.
    pub fn remove_stale(self, network: &str, valid: &[Owner<'_>]) -> Result<()> {
        let valid: HashSet<String> = valid.iter().map(Owner::instance).collect();
        let prefix = network_hash(network) + "-";
        let mut stale = file::instances(&self.folder(), &prefix);
        stale.retain(|instance| !valid.contains(instance));
        Ok(stale.iter().try_for_each(|instance| remove_file(&self.place(instance)))?)
    }

    /// Whether there is any record.
    pub fn is_used(self) -> bool {
        fs::read_dir(self.folder()).is_ok_and(|mut folder| folder.next().is_some())
    }

    /// Whether there is a record of this [instance](Owner::instance).
    pub fn exists(self, instance: &str) -> bool {
        self.place(instance).exists()
    }

    /// The feature's data of the attachment, if its record can be read.
    pub fn read<T: DeserializeOwned>(self, owner: Owner<'_>) -> Option<T> {
        let kept = file::load::<Keepsake<T>>(&self.place(&owner.instance())).ok()??;
        Some(kept.content)
    }

    /// The records of this host, read one by one as the iterator advances.
    pub fn all<T: DeserializeOwned>(self) -> impl Iterator<Item = Keepsake<T>> {
        let here = host();
        file::instances(&self.folder(), "").into_iter().filter_map(move |instance| {
            let kept = file::load::<Keepsake<T>>(&self.place(&instance)).ok()??;
            (Some(kept.host) == here && kept.owner().instance() == instance).then_some(kept)
        })
    }

    /// The records of this host whose containers are not certainly gone.
    pub fn living<T: DeserializeOwned>(self) -> Vec<Keepsake<T>> {
        let mut all: Vec<Keepsake<T>> = self.all().collect();
        let records: Vec<Record> = all.iter().filter_map(|kept| Record::of(kept.owner())).collect();
        let lives = Record::liveness_of(&records);
        let gone: HashSet<Owner<'_>> = records
            .iter()
            .zip(lives)
            .filter(|(_, life)| matches!(life, Liveness::Gone(_)))
            .map(|(record, _)| record.owner())
            .collect();
        all.retain(|kept| !gone.contains(&kept.owner()));
        all
    }
}
