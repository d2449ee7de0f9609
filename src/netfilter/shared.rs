//! Keys of sets and maps that several attachments need: two networks with one subnet, a fixed address of a neighbour.
//!
//! An element belongs to one attachment, the first one. ADD of another attachment leaves the element in place unless its
//! owner is certainly gone. The deletion of the owner hands the element to another living attachment with a record of the
//! key, in the same transaction (`docs/decisions/0022-shared-elements.md`).

use std::collections::{BTreeSet, HashSet};
use std::net::IpAddr;

use serde::de::DeserializeOwned;

use crate::attachment::{Keepsake, Kept, Owner, Record};
use crate::netlink::nftables::{Element, Key, Set, Value};

/// The elements of other attachments with the keys of elements that are about to be deleted.
pub type Heirs<'a> = &'a dyn Fn(&[Element]) -> Vec<Element>;

/// The [instance](Owner::instance) in a comment.
pub fn instance(comment: Option<&str>) -> Option<&str> {
    comment?.split(',').next()
}

/// Whether the owner of the element has a record. An element that belongs to a network (`<hash>, net: ..`) needs none.
pub fn is_recorded(kept: Kept, element: &Element) -> bool {
    let owner = instance(element.comment.as_deref());
    owner.is_some_and(|owner| !owner.contains('-') || kept.exists(owner))
}

/// Whether the comments name one owner.
pub fn has_owner_of(found: &Element, wanted: &Element) -> bool {
    instance(found.comment.as_deref()) == instance(wanted.comment.as_deref())
}

/// Whether an attachment leaves the element that was found for the key of `wanted` in place: its owner is another
/// attachment, and not certainly gone.
pub fn is_left(found: &Element, wanted: &Element) -> bool {
    !has_owner_of(found, wanted) && !is_of_dead(found.comment.as_deref())
}

/// Whether the owner in a comment is certainly gone.
pub fn is_of_dead(comment: Option<&str>) -> bool {
    instance(comment).and_then(Record::read).is_some_and(|record| record.is_gone())
}

/// Whether the element that was found for the key of `wanted` is correct, or another attachment's: that attachment may
/// have another subnet.
pub fn serves(found: Option<&Element>, wanted: &Element) -> bool {
    found.is_some_and(|found| found.data == wanted.data || !has_owner_of(found, wanted))
}

/// The record of another attachment for which `is_wanted` returns true, and whose container is not certainly gone.
pub fn another<T: DeserializeOwned>(
    kept: Kept,
    owner: Owner<'_>,
    is_wanted: impl Fn(&T) -> bool,
) -> Option<Keepsake<T>> {
    kept.others(owner).find(|other| is_wanted(&other.content) && !other.record.is_gone())
}

/// The other living attachments with this address that have a record of the feature.
pub fn others<T: DeserializeOwned>(kept: Kept, ip: IpAddr, owner: Owner<'_>) -> Vec<(Record, T)> {
    let others = Record::sharing(ip, owner).into_iter().filter(|record| !record.is_gone());
    others.filter_map(|record| kept.read(record.owner()).map(|content| (record, content))).collect()
}

/// The [heirs](Heirs): for the deletion of the `owner` among the attachments with the same addresses; for GC, after the removal
/// of stale records, among all attachments. `elements` makes the elements of a record.
pub fn heirs<T: DeserializeOwned>(
    kept: Kept,
    owner: Option<Owner<'_>>,
    deleted: &[Element],
    elements: impl Fn(Owner<'_>, &T) -> Vec<Element>,
) -> Vec<Element> {
    let ip = |element: &Element| match element.key.0.as_slice() {
        [Value::Ip(ip)] => Some(*ip),
        _ => None,
    };
    let Some(owner) = owner else {
        let living = if deleted.is_empty() { Vec::new() } else { kept.living::<T>() };
        let living = living.iter().flat_map(|kept| elements(kept.owner(), &kept.content));
        return with_keys_of(deleted, living);
    };
    let ips: BTreeSet<IpAddr> = deleted.iter().filter_map(ip).collect();
    let others = ips.into_iter().flat_map(|ip| others(kept, ip, owner));
    with_keys_of(deleted, others.flat_map(|(record, content)| elements(record.owner(), &content)))
}

/// The first of `elements` for each key.
fn with_keys_of(deleted: &[Element], elements: impl Iterator<Item = Element>) -> Vec<Element> {
    let mut keys: HashSet<(Set<'_>, Key)> =
        deleted.iter().map(|e| (e.set, e.key.clone())).collect();
    elements.filter(|element| keys.remove(&(element.set, element.key.clone()))).collect()
}
