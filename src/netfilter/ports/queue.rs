//! Who has a port of the host: the mapping that serves it, and behind it those of the same
//! container in other networks.
//!
//! Runtimes ask for a container's ports in each of its networks (`podman network connect`). The
//! first serves; the others are kept in the maps `waiting4` and `waiting6`, which no rule looks
//! at, by the port and their number in the queue. When the first goes, the next moves up.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::layout::Sets;
use super::maps::Placed;
use crate::netfilter::backend::Family;
use crate::netfilter::names::Owner;
use crate::netlink;
use crate::netlink::nftables::{Batch, Element, Key, Nft, Set, Value};

/// A port's mappings as they were found, and as they are to be. Those that wait are written as
/// if they served: with the port alone as their key.
#[derive(Debug)]
pub(super) struct Queue {
    set: Set<'static>,
    key: Key,
    found: Vec<Option<Element>>,
    wanted: Vec<Element>,
}

impl Queue {
    /// The queue of the port `key` of `set`, one of those whose keys are ports.
    pub(super) fn read(nft: &Nft, set: Set<'static>, key: &Key) -> netlink::Result<Queue> {
        let mut found = vec![nft.element(set, key.clone())?];
        while let Some(mut next) = {
            let (waiting, place) = place(set, key, found.len());
            nft.element(waiting, place)?
        } {
            next.key = key.clone();
            found.push(Some(next));
        }
        let wanted = found.iter().flatten().cloned().collect();
        Ok(Queue { set, key: key.clone(), found, wanted })
    }

    /// The owner's mapping.
    pub(super) fn of(self, owner: Owner<'_>) -> Option<Element> {
        self.wanted.into_iter().find(|element| owner.owns(element.comment.as_deref()))
    }

    /// Takes out the mappings whose comments `which` is true of, and returns them.
    pub(super) fn leave(&mut self, which: impl Fn(Option<&str>) -> bool) -> Vec<Placed> {
        let leaving = self.wanted.extract_if(.., |element| which(element.comment.as_deref()));
        leaving.map(|element| Placed { set: self.set, element }).collect()
    }

    /// Puts in the owner's mapping, where it was before or at the end. If the port is another
    /// container's, or of the same one in the same network, that mapping is the error.
    pub(super) fn enter(&mut self, owner: Owner<'_>, element: &Element) -> Result<(), Element> {
        let comment = |element: &Element| element.comment.clone();
        if let Some(first) = self.wanted.first()
            && !owner.owns(comment(first).as_deref())
            && !owner.is_of_same_container(comment(first).as_deref())
        {
            return Err(first.clone());
        }
        match self.wanted.iter_mut().find(|mine| owner.owns(comment(mine).as_deref())) {
            Some(mine) => *mine = element.clone(),
            None => self.wanted.push(element.clone()),
        }
        Ok(())
    }

    /// Adds what changes the queue to what it is to be.
    pub(super) fn write(&self, batch: &mut Batch) {
        for number in 0..self.found.len().max(self.wanted.len()) {
            let (was, is) =
                (self.found.get(number).and_then(Option::as_ref), self.wanted.get(number));
            if was == is {
                continue;
            }
            let (set, key) = place(self.set, &self.key, number);
            if was.is_some() {
                batch.del_element(set, &Element::new(key.clone()));
            }
            if let Some(is) = is {
                if number >= self.found.len() {
                    batch.ensure_set(set);
                }
                batch.add_element(set, &Element { key, ..is.clone() });
            }
        }
    }
}

/// The queues of several ports.
#[derive(Debug, Default)]
pub(super) struct Queues(Vec<Queue>);

impl Queues {
    /// That of the port `key` of `set`, read when it is first asked for.
    pub(super) fn of(
        &mut self,
        nft: &Nft,
        set: Set<'static>,
        key: &Key,
    ) -> netlink::Result<&mut Queue> {
        let known = self.0.iter().position(|queue| queue.set == set && queue.key == *key);
        let at = known.unwrap_or(self.0.len());
        if known.is_none() {
            self.0.push(Queue::read(nft, set, key)?);
        }
        Ok(&mut self.0[at])
    }

    /// Adds what changes all to what they are to be.
    pub(super) fn write(&self, batch: &mut Batch) {
        for queue in &self.0 {
            queue.write(batch);
        }
    }
}

/// Where the mapping with this number is kept.
fn place(set: Set<'static>, port: &Key, number: usize) -> (Set<'static>, Key) {
    let Some(number) = u32::try_from(number).ok().filter(|number| *number > 0) else {
        return (set, port.clone());
    };
    let family = Sets::family_of(set);
    let any: IpAddr = match family {
        Family::V4 => Ipv4Addr::UNSPECIFIED.into(),
        Family::V6 => Ipv6Addr::UNSPECIFIED.into(),
    };
    let addr = (set == Sets::of(family).any).then_some(Value::Ip(any));
    let parts = addr.into_iter().chain(port.0.iter().cloned()).chain([Value::Mark(number)]);
    (Sets::of(family).waiting, Key(parts.collect()))
}

/// All mappings of a family that wait, in the order of their numbers.
pub(super) fn waiting(nft: &Nft, family: Family) -> netlink::Result<Vec<Placed>> {
    let sets = Sets::of(family);
    let mut all = nft.dump_elements(sets.waiting)?;
    let number = |element: &Element| match element.key.0.last() {
        Some(Value::Mark(number)) => *number,
        _ => 0,
    };
    all.sort_by_key(number);
    let served = |mut element: Element| {
        let [Value::Ip(addr), proto, port, _] = element.key.0.as_slice() else { return None };
        let port = [proto.clone(), port.clone()];
        let any = addr.is_unspecified();
        let (set, addr) = if any { (sets.any, None) } else { (sets.host, Some(Value::Ip(*addr))) };
        element.key = Key(addr.into_iter().chain(port).collect());
        Some(Placed { set, element })
    };
    Ok(all.into_iter().filter_map(served).collect())
}
