//! What is not as the records of attachments want it.

use std::collections::HashSet;

use serde::de::DeserializeOwned;

use crate::attachment::{AttachmentId, RecordStore, StoredRecord};
use crate::error::{Error, Result};

/// What is done about differences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReconcileMode {
    /// The packet filter is changed.
    Apply,
    /// Nothing is changed.
    Report,
}

/// Something of an attachment that is not as its record wants it.
#[derive(Debug)]
pub struct Difference {
    /// The [instance](AttachmentId::instance_id) of the attachment.
    pub instance: String,
    /// What is missing or was changed, for messages.
    pub object: String,
}

impl Difference {
    /// The difference that CHECK has found.
    pub fn new(owner: AttachmentId<'_>, found: &Error) -> Difference {
        Difference { instance: owner.instance_id(), object: found.message().to_owned() }
    }
}

/// The differences that `check` finds of the living attachments with a part of the feature.
pub fn differences_of_records<T: DeserializeOwned>(
    kept: RecordStore,
    mut check: impl FnMut(&StoredRecord<T>, &[StoredRecord<T>]) -> Result<()>,
) -> Vec<Difference> {
    let all = kept.restorable_parts::<T>();
    let check = |stored| check(stored, &all).err().map(|found| Difference::new(stored.attachment_id(), &found));
    all.iter().filter_map(check).collect()
}

/// The texts, each once: attachments share objects.
pub fn unique_objects(differences: Vec<Difference>) -> Vec<String> {
    let mut known = HashSet::new();
    let objects = differences.into_iter().map(|difference| difference.object);
    objects.filter(|object| known.insert(object.clone())).collect()
}
