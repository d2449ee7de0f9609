//! The elements of attachments in sets and maps, as their records want them.
//!
//! Several attachments may need an element with the same key, as with two networks of one subnet.
//! The element belongs to the first of them. ADD of another attachment leaves the element in place
//! unless its owner is certainly gone. The deletion of the owner gives the key to another living
//! attachment whose record wants it, in the same transaction (`docs/decisions/0022-shared-elements.
//! md`).

use std::collections::HashSet;
use std::net::IpAddr;

use serde::de::DeserializeOwned;

use super::layout::{LayoutTransaction, TableLayout};
use super::names::{has_same_owner, instance_in_comment};
use crate::attachment::{AttachmentId, AttachmentRecord, RecordStore, StoredRecord, decode_part};
use crate::netlink::NetlinkResult;
use crate::netlink::nftables::{
    CommentSelector, ElementKey, NftBatch, NftSet, NftSocket, NftTable, NftValue, SetElement,
};
use cni::json::Json;
use cni::sort::collect_set;

/// Returns the elements to delete; may add other deletions.
pub type FindElements<'f> =
    &'f mut dyn FnMut(&NftSocket, &mut NftBatch) -> NetlinkResult<Vec<SetElement>>;

/// What the records of a feature want in sets and maps.
#[derive(Clone, Copy, Debug)]
pub struct RecordedElements {
    /// The feature's records.
    pub kept: RecordStore,
    /// The table with the chains that elements jump to.
    pub layout: TableLayout,
    pub sets: &'static [NftSet<'static>],
    /// The elements that a record with this part wants, see [`elements_of_part`].
    pub of_part: fn(AttachmentId<'_>, &Json) -> Vec<SetElement>,
    /// What is wrong with the element that was found for the key of a wanted one, usually
    /// [`differing_data`].
    pub find_conflict: fn(AttachmentId<'_>, &SetElement, &SetElement) -> Option<String>,
}

/// The attachment's element has other data. The element of another attachment is in its place: that
/// attachment may have another subnet.
pub fn differing_data(
    _: AttachmentId<'_>,
    wanted: &SetElement,
    found: &SetElement,
) -> Option<String> {
    let is_wrong = has_same_owner(found, wanted) && found.data != wanted.data;
    is_wrong.then(|| format!("element {wanted} of {} has another value", wanted.set))
}

/// The elements that `elements` returns for the feature's part of a record; none if the part cannot
/// be read.
pub fn elements_of_part<R: DeserializeOwned>(
    owner: AttachmentId<'_>,
    part: &Json,
    elements: fn(AttachmentId<'_>, &R) -> Vec<SetElement>,
) -> Vec<SetElement> {
    decode_part::<R>(part).map(|content| elements(owner, &content)).unwrap_or_default()
}

impl RecordedElements {
    fn of_stored(&self, stored: &StoredRecord<Json>) -> Vec<SetElement> {
        (self.of_part)(stored.attachment_id(), &stored.content)
    }

    /// Whether the record of a living attachment wants an element in the table.
    pub fn need_table(&self, table: NftTable<'_>) -> bool {
        self.kept.has_restorable_part(&|stored| {
            self.of_stored(stored).iter().any(|element| element.set.table == table)
        })
    }

    /// Restores the elements of all records, if one of the sets was flushed.
    pub fn restore(&self, change: &mut LayoutTransaction<'_>) {
        if self.sets.iter().any(|set| change.is_flushed(*set)) {
            for element in change
                .restorable_records(self.kept)
                .iter()
                .flat_map(|stored| self.of_stored(stored))
            {
                change.restore_element(&element);
            }
        }
    }

    /// The first of the `wanted` elements that is missing or wrong, for messages.
    pub fn find_difference(
        &self,
        nft: &NftSocket,
        owner: AttachmentId<'_>,
        wanted: &[SetElement],
    ) -> NetlinkResult<Option<String>> {
        let found = nft.read_elements(wanted)?;
        Ok(wanted.iter().zip(found).find_map(|(element, found)| match found {
            Some(found) => (self.find_conflict)(owner, element, &found),
            None => Some(format!("{element} is missing in {}", element.set)),
        }))
    }

    /// Deletes the attachment's elements: those with the keys of `known`, or, if that is empty,
    /// all.
    pub fn delete_of_owner(
        &self,
        nft: &NftSocket,
        owner: AttachmentId<'_>,
        known: &[SetElement],
    ) -> NetlinkResult<()> {
        let is_own = owner.comment_matcher();
        self.delete_found(nft, Some(owner), &mut |nft, _| {
            nft.find_elements_by_comment(self.sets, known, &is_own)
        })
    }

    /// Deletes the elements with the comments that `which` selects.
    pub fn delete_by_comment(
        &self,
        nft: &NftSocket,
        which: CommentSelector<'_>,
    ) -> NetlinkResult<()> {
        self.delete_found(nft, None, &mut |nft, _| {
            nft.find_elements_by_comment(self.sets, &[], which)
        })
    }

    /// Deletes the elements that `find` returns, unless another process has replaced them in
    /// between, and the chains that only these elements jump to. Keys that records of other
    /// attachments want are given to them. With the `owner` of the elements only the
    /// attachments with the same addresses are considered.
    pub fn delete_found(
        &self,
        nft: &NftSocket,
        owner: Option<AttachmentId<'_>>,
        find: FindElements<'_>,
    ) -> NetlinkResult<()> {
        let mut added = Vec::new();
        nft.update_tables(&mut |nft| {
            let mut batch = NftBatch::new();
            let found = find(nft, &mut batch)?;
            added = self.elements_of_next_owners(owner, &found);
            self.layout.delete_elements(&mut batch, nft, &found, &added)?;
            Ok(batch)
        })?;
        // A next owner may have been deleted meanwhile, by a DEL that did not find these elements:
        // DEL removes the record first.
        added.retain(|element| !is_recorded(self.kept, element));
        if added.is_empty() {
            return Ok(());
        }
        self.delete_found(nft, owner, &mut |nft, _| {
            let found = added.iter().zip(nft.read_elements(&added)?);
            Ok(found.filter_map(|(e, found)| found.filter(|f| has_same_owner(f, e))).collect())
        })
    }

    /// The elements of other attachments with the keys of elements that are about to be deleted:
    /// for the deletion of the `owner` of the attachments with the same addresses; for GC,
    /// after the removal of stale records, of all attachments.
    pub fn elements_of_next_owners(
        &self,
        owner: Option<AttachmentId<'_>>,
        deleted: &[SetElement],
    ) -> Vec<SetElement> {
        let ip = |element: &SetElement| match element.key.0.as_slice() {
            [NftValue::Ip(ip)] => Some(*ip),
            _ => None,
        };
        let Some(owner) = owner else {
            let living = if deleted.is_empty() { Vec::new() } else { self.kept.restorable_parts() };
            return first_for_each_key(
                deleted,
                living.iter().flat_map(|stored| self.of_stored(stored)),
            );
        };
        let ips = collect_set(deleted.iter().filter_map(ip));
        let others = ips.into_iter().flat_map(|ip| other_attachments(self.kept, ip, owner));
        first_for_each_key(
            deleted,
            others.flat_map(|(record, part)| (self.of_part)(record.attachment_id(), &part)),
        )
    }
}

/// Whether the owner of the element has a record. An element that belongs to a network (`<hash>,
/// net: ..`) needs none.
fn is_recorded(kept: RecordStore, element: &SetElement) -> bool {
    let owner = instance_in_comment(element.comment.as_deref());
    owner.is_some_and(|owner| !owner.contains('-') || kept.has_instance(owner))
}

/// The record of another attachment for which `is_wanted` returns true, and whose container is not
/// certainly gone.
pub fn find_other_record<T: DeserializeOwned>(
    kept: RecordStore,
    owner: AttachmentId<'_>,
    is_wanted: impl Fn(&T) -> bool,
) -> Option<StoredRecord<T>> {
    kept.records_of_others(owner).find(|other| is_wanted(&other.content) && !other.record.is_gone())
}

/// Like [`find_other_record`], for the oldest and the newest one; and the number of other records
/// of the feature.
pub fn find_other_records<T: DeserializeOwned>(
    kept: RecordStore,
    owner: AttachmentId<'_>,
    is_wanted: impl Fn(&T) -> bool,
) -> ([Option<StoredRecord<T>>; 2], usize) {
    let mut others = kept.records_of_others(owner);
    // None has been read, and left out, yet.
    let (_, count) = others.size_hint();
    let mut is_living =
        |other: &StoredRecord<T>| is_wanted(&other.content) && !other.record.is_gone();
    ([others.find(&mut is_living), others.rfind(is_living)], count.unwrap_or_default())
}

/// The other living attachments with this address that have a record of the feature.
pub fn other_attachments<T: DeserializeOwned>(
    kept: RecordStore,
    ip: IpAddr,
    owner: AttachmentId<'_>,
) -> Vec<(AttachmentRecord, T)> {
    let others = AttachmentRecord::find_others_by_address(ip, owner)
        .into_iter()
        .filter(|record| !record.is_gone());
    others
        .filter_map(|record| {
            kept.read_content(record.attachment_id()).map(|content| (record, content))
        })
        .collect()
}

/// The first of `elements` for each key.
fn first_for_each_key(
    deleted: &[SetElement],
    elements: impl Iterator<Item = SetElement>,
) -> Vec<SetElement> {
    let mut keys: HashSet<(NftSet<'_>, ElementKey)> =
        deleted.iter().map(|e| (e.set, e.key.clone())).collect();
    elements.filter(|element| keys.remove(&(element.set, element.key.clone()))).collect()
}
