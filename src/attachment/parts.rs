//! What a feature of the packet filter keeps in the [records](AttachmentRecord) of attachments, to
//! restore their rules after a flush.
//!
//! ADD writes its part of the record, and a link that lists the attachment under the feature,
//! before it creates the rules. DEL and GC remove the link and the part before they delete the
//! rules: a process that restores rules verifies afterwards that the link still exists
//! ([`RecordStore::has_instance`]).

use std::fs;
use std::io::ErrorKind;
use std::path::PathBuf;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::file;
use super::liveness::{Liveness, UnknownBecause};
use super::owner::AttachmentId;
use super::record::AttachmentRecord;
use cni::error::{Error, Result};
use cni::files::{FileOperationContext, FileResult};
use cni::json::Json;

pub const REPAIR_REMEDY: &str = "\"cnibox repair\" restores all rules of this host";

/// The parts of one feature in all records; the field is the feature's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RecordStore(pub &'static str);

/// The part of one feature in the record of one attachment.
#[derive(Clone, Debug)]
pub struct StoredRecord<T> {
    /// The attachment's record, without this feature's part.
    pub record: AttachmentRecord,
    /// The feature's own data.
    pub content: T,
}

impl<T> StoredRecord<T> {
    pub fn attachment_id(&self) -> AttachmentId<'_> {
        self.record.attachment_id()
    }
}

/// Decodes a part of a record; `None` if a newer version has written it, or it is damaged.
pub fn decode_part<T: DeserializeOwned>(part: &Json) -> Option<T> {
    part.decode().ok()
}

fn is_restorable(life: Liveness) -> bool {
    matches!(life, Liveness::Alive | Liveness::Unknown(UnknownBecause::NoHostEnd))
}

impl RecordStore {
    /// Adds the part to the attachment's record, in place of an earlier one.
    pub fn add_part<T: Serialize>(self, owner: AttachmentId<'_>, content: T) {
        let save = || {
            let mut record = AttachmentRecord::load_for_change(owner)?
                .unwrap_or_else(|| AttachmentRecord::new(owner, "", ""));
            record.rules.insert(self.0.to_owned(), Json::encode(&content));
            record.save_record()?;
            Ok(self.link_part(owner)?)
        };
        let saved: Result<(), Box<dyn std::error::Error>> = save();
        if let Err(e) = saved {
            file::log_unrecorded(format_args!(
                "could not record the rules: {e}; flushed rules of this attachment will not be \
                 restored"
            ));
        }
    }

    /// Changes the part of the attachment's record, unless `change` returns false. Returns it as it is
    /// then; `None` if there is none, or it stays as it was. The caller has the attachment's
    /// [lock](AttachmentRecord::lock_attachment).
    pub fn change_part<T: Serialize + DeserializeOwned>(
        self,
        owner: AttachmentId<'_>,
        change: impl FnOnce(&mut T) -> bool,
    ) -> Result<Option<T>> {
        let loaded = AttachmentRecord::load_for_change(owner);
        let loaded = loaded.map_err(|e| Error::io("read the record of the attachment", &e))?;
        let Some(mut record) = loaded else { return Ok(None) };
        let Some(mut part) = record.rules.get(self.0).and_then(decode_part::<T>) else {
            return Ok(None);
        };
        if !change(&mut part) {
            return Ok(None);
        }
        record.rules.insert(self.0.to_owned(), Json::encode(&part));
        record.save_record()?;
        // GC may have removed the part meanwhile.
        if !self.has_instance(&owner.instance_id()) {
            record.drop_unlisted_parts()?;
            return Ok(None);
        }
        Ok(Some(part))
    }

    /// Lists the attachment, whose record has the part, under the feature.
    pub fn link_part(self, owner: AttachmentId<'_>) -> FileResult<()> {
        let instance = owner.instance_id();
        file::link_record(&self.link_path(&instance), &instance)
    }

    /// How an operator restores the attachment's rules.
    pub fn restore_remedy(self, owner: AttachmentId<'_>) -> &'static str {
        let is_kept = self.has_instance(&owner.instance_id());
        let attach = "the rules are gone from the packet filter; attach the container again";
        if is_kept { REPAIR_REMEDY } else { attach }
    }

    pub fn remove_part(self, owner: AttachmentId<'_>) -> Result<()> {
        self.remove_part_of_instance(&owner.instance_id())
    }

    fn remove_part_of_instance(self, instance: &str) -> Result<()> {
        let link = self.link_path(instance);
        match fs::remove_file(&link) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
            removed => removed.during("remove", &link)?,
        }
        let record = AttachmentRecord::find_by_instance(instance);
        record.map_or(Ok(()), AttachmentRecord::drop_unlisted_parts)
    }

    /// Removes the parts of the network's attachments that are not among `valid`.
    pub fn remove_stale_parts(self, network: &str, valid: &[AttachmentId<'_>]) -> Result<()> {
        let stale = file::stale_instances(self.0, network, valid);
        stale.iter().try_for_each(|instance| self.remove_part_of_instance(instance))
    }

    /// Whether any attachment is listed under the feature.
    pub fn is_used(self) -> bool {
        fs::read_dir(file::record_directory(self.0))
            .is_ok_and(|mut directory| directory.next().is_some())
    }

    /// Whether the attachment of this [instance](AttachmentId::instance_id) is listed under the
    /// feature.
    pub fn has_instance(self, instance: &str) -> bool {
        file::is_listed(self.0, instance)
    }

    /// The feature's data of the attachment, if it can be read.
    pub fn read_content<T: DeserializeOwned>(self, owner: AttachmentId<'_>) -> Option<T> {
        decode_part(&self.read_part(&owner.instance_id())?.content)
    }

    /// The part of the attachment of this [instance](AttachmentId::instance_id), if it is listed
    /// under the feature and can be read.
    pub fn find_part<T: DeserializeOwned>(self, instance: &str) -> Option<StoredRecord<T>> {
        let listed = self.has_instance(instance).then(|| instance.to_owned());
        self.stored_records(listed.into_iter().collect()).next()
    }

    /// The parts in records of this host, read one by one as the iterator advances.
    pub fn iter_parts<T: DeserializeOwned>(self) -> impl Iterator<Item = StoredRecord<T>> {
        self.stored_records(file::list_instances(self.0, None))
    }

    /// Like [`iter_parts`](RecordStore::iter_parts), without the attachment `except`. On tmpfs the
    /// oldest one is the first.
    pub fn records_of_others<T: DeserializeOwned>(
        self,
        except: AttachmentId<'_>,
    ) -> impl DoubleEndedIterator<Item = StoredRecord<T>> + use<T> {
        let (mut instances, own) = (file::list_instances(self.0, None), except.instance_id());
        instances.retain(|instance| *instance != own);
        instances.reverse();
        self.stored_records(instances)
    }

    fn stored_records<T: DeserializeOwned>(
        self,
        instances: Vec<String>,
    ) -> impl DoubleEndedIterator<Item = StoredRecord<T>> + use<T> {
        let parts = instances.into_iter().filter_map(move |instance| self.read_part(&instance));
        parts.filter_map(|StoredRecord { record, content }| {
            Some(StoredRecord { record, content: decode_part(&content)? })
        })
    }

    /// The parts of the attachments whose rules are to be restored: attachments that exist, and
    /// attachments created on this host in this boot without a link on the host that would show
    /// their end.
    pub fn restorable_parts<T: DeserializeOwned>(self) -> Vec<StoredRecord<T>> {
        self.find_restorable_parts(&|_| true)
    }

    /// The [restorable parts](RecordStore::restorable_parts) that `is_wanted` selects. The kernel
    /// is asked about these attachments only.
    pub fn find_restorable_parts<T: DeserializeOwned>(
        self,
        is_wanted: &dyn Fn(&StoredRecord<T>) -> bool,
    ) -> Vec<StoredRecord<T>> {
        let mut all: Vec<StoredRecord<T>> = self.iter_parts().filter(is_wanted).collect();
        let records: Vec<&AttachmentRecord> = all.iter().map(|stored| &stored.record).collect();
        let mut lives = AttachmentRecord::liveness_of_all(&records).into_iter();
        all.retain(|_| lives.next().is_some_and(is_restorable));
        all
    }

    /// Whether `is_wanted` selects any [restorable part](RecordStore::restorable_parts). Reads the
    /// records up to the first.
    pub fn has_restorable_part<T: DeserializeOwned>(
        self,
        is_wanted: &dyn Fn(&StoredRecord<T>) -> bool,
    ) -> bool {
        self.iter_parts().filter(is_wanted).any(|stored| is_restorable(stored.record.liveness()))
    }

    fn read_part(self, instance: &str) -> Option<StoredRecord<Json>> {
        let mut record = file::read_record(instance)?;
        let content = record.rules.remove(self.0)?;
        Some(StoredRecord { record, content })
    }

    fn link_path(self, instance: &str) -> PathBuf {
        file::record_path(self.0, instance)
    }
}
