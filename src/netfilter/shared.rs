//! Keys of sets and maps that several attachments need: two networks with one subnet, a fixed address of a neighbour.
//!
//! An element belongs to one attachment, the first one. ADD of another attachment leaves the element in place unless
//! its owner is certainly gone. The deletion of the owner hands the element to another living attachment with a record
//! of the key, in the same transaction (`docs/decisions/0022-shared-elements.md`).

use std::collections::{BTreeSet, HashSet};
use std::net::IpAddr;

use serde::de::DeserializeOwned;

use crate::attachment::{AttachmentId, AttachmentRecord, RecordStore, StoredRecord};
use crate::netlink::nftables::{ElementKey, NftSet, NftValue, SetElement};

/// The elements of other attachments with the keys of elements that are about to be deleted.
pub type HeirFinder<'a> = &'a dyn Fn(&[SetElement]) -> Vec<SetElement>;

/// The [instance](AttachmentId::instance_id) in a comment.
pub fn instance_in_comment(comment: Option<&str>) -> Option<&str> {
    comment?.split(',').next()
}

/// Whether the owner of the element has a record. An element that belongs to a network (`<hash>, net: ..`) needs none.
pub fn is_recorded(kept: RecordStore, element: &SetElement) -> bool {
    let owner = instance_in_comment(element.comment.as_deref());
    owner.is_some_and(|owner| !owner.contains('-') || kept.has_instance(owner))
}

/// Whether the comments name one owner.
pub fn has_same_owner(found: &SetElement, wanted: &SetElement) -> bool {
    instance_in_comment(found.comment.as_deref()) == instance_in_comment(wanted.comment.as_deref())
}

/// Whether an attachment leaves the element that was found for the key of `wanted` in place: its owner is another
/// attachment, and not certainly gone.
pub fn is_left_in_place(found: &SetElement, wanted: &SetElement) -> bool {
    !has_same_owner(found, wanted) && !is_owner_gone(found.comment.as_deref())
}

/// Whether the owner in a comment is certainly gone.
pub fn is_owner_gone(comment: Option<&str>) -> bool {
    instance_in_comment(comment).and_then(AttachmentRecord::find_by_instance).is_some_and(|record| record.is_gone())
}

/// Whether the element that was found for the key of `wanted` is correct, or another attachment's: that attachment may
/// have another subnet.
pub fn is_correct_or_foreign(found: Option<&SetElement>, wanted: &SetElement) -> bool {
    found.is_some_and(|found| found.data == wanted.data || !has_same_owner(found, wanted))
}

/// The record of another attachment for which `is_wanted` returns true, and whose container is not certainly gone.
pub fn find_other_record<T: DeserializeOwned>(
    kept: RecordStore,
    owner: AttachmentId<'_>,
    is_wanted: impl Fn(&T) -> bool,
) -> Option<StoredRecord<T>> {
    kept.records_of_others(owner).find(|other| is_wanted(&other.content) && !other.record.is_gone())
}

/// The other living attachments with this address that have a record of the feature.
pub fn other_attachments<T: DeserializeOwned>(
    kept: RecordStore,
    ip: IpAddr,
    owner: AttachmentId<'_>,
) -> Vec<(AttachmentRecord, T)> {
    let others = AttachmentRecord::find_others_by_address(ip, owner).into_iter().filter(|record| !record.is_gone());
    others.filter_map(|record| kept.read_content(record.attachment_id()).map(|content| (record, content))).collect()
}

/// The [heirs](HeirFinder): for the deletion of the `owner` among the attachments with the same addresses; for GC,
/// after the removal of stale records, among all attachments. `elements` makes the elements of a record.
pub fn find_heirs<T: DeserializeOwned>(
    kept: RecordStore,
    owner: Option<AttachmentId<'_>>,
    deleted: &[SetElement],
    elements: impl Fn(AttachmentId<'_>, &T) -> Vec<SetElement>,
) -> Vec<SetElement> {
    let ip = |element: &SetElement| match element.key.0.as_slice() {
        [NftValue::Ip(ip)] => Some(*ip),
        _ => None,
    };
    let Some(owner) = owner else {
        let living = if deleted.is_empty() { Vec::new() } else { kept.restorable_parts::<T>() };
        let living = living.iter().flat_map(|kept| elements(kept.attachment_id(), &kept.content));
        return first_for_each_key(deleted, living);
    };
    let ips: BTreeSet<IpAddr> = deleted.iter().filter_map(ip).collect();
    let others = ips.into_iter().flat_map(|ip| other_attachments(kept, ip, owner));
    first_for_each_key(deleted, others.flat_map(|(record, content)| elements(record.attachment_id(), &content)))
}

/// The first of `elements` for each key.
fn first_for_each_key(deleted: &[SetElement], elements: impl Iterator<Item = SetElement>) -> Vec<SetElement> {
    let mut keys: HashSet<(NftSet<'_>, ElementKey)> = deleted.iter().map(|e| (e.set, e.key.clone())).collect();
    elements.filter(|element| keys.remove(&(element.set, element.key.clone()))).collect()
}
