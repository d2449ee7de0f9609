//! Whether the container of an attachment can still be alive.
//!
//! A container is gone only if that is proved (`docs/decisions/0007-lease-liveness.md`); state of all other containers
//! stays.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::net::IpAddr;
use std::path::Path;

use crate::error::Result;
use crate::log;
use crate::netlink::Netlink;
use crate::netns::holders::Holders;
use crate::netns::{Netns, NetnsId};

/// Whether the container of an attachment can be alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// The network namespace exists.
    Alive,
    /// The container is gone: its addresses and rules can be reclaimed.
    Gone(Gone),
    /// Nothing is proved: addresses and rules stay.
    Unknown,
}

/// Why a container cannot be alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gone {
    /// The attachment was created before the last boot.
    EarlierBoot,
    /// The network namespace no longer exists.
    Namespace,
}

impl fmt::Display for Gone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Gone::EarlierBoot => "it was made before the last boot",
            Gone::Namespace => "its network namespace is gone",
        })
    }
}

/// The state of a container that was recorded when the attachment was created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trace {
    /// The network namespace.
    pub netns: Option<NetnsId>,
    /// The attachment was created before the last boot.
    pub earlier_boot: bool,
    /// The container's addresses.
    pub ips: Vec<IpAddr>,
}

/// Attempts to find namespaces: the process that holds a namespace may end before the namespace is entered.
const ATTEMPTS: usize = 3;

/// The liveness of the container of each trace, in order.
pub fn judge(traces: &[Trace]) -> Vec<Liveness> {
    let mut lives = vec![None; traces.len()];
    for _ in 0..ATTEMPTS {
        let open: Vec<usize> = (0..lives.len()).filter(|i| lives[*i].is_none()).collect();
        let asked: Vec<&Trace> = open.iter().map(|i| &traces[*i]).collect();
        for (i, life) in open.into_iter().zip(judge_once(&asked)) {
            lives[i] = life;
        }
    }
    lives.into_iter().map(|life| life.unwrap_or(Liveness::Unknown)).collect()
}

fn judge_once(traces: &[&Trace]) -> Vec<Option<Liveness>> {
    let numbers = traces.iter().filter(|trace| !trace.earlier_boot);
    let numbers: HashSet<u32> = numbers.filter_map(|e| Some(e.netns?.ino)).collect();
    let holders = Holders::find(&numbers);
    if let Some(doubt) = holders.doubt() {
        log::debug(format_args!("the search for network namespaces is incomplete: {doubt}"));
    }
    let mut inside = HashMap::new();
    traces.iter().map(|trace| life(trace, &holders, &mut inside)).collect()
}

/// The liveness of one container; `None` if the search has to be repeated. `inside` caches the addresses in namespaces that
/// were entered.
fn life(
    trace: &Trace,
    holders: &Holders,
    inside: &mut HashMap<u32, Option<HashSet<IpAddr>>>,
) -> Option<Liveness> {
    if trace.earlier_boot {
        return Some(Liveness::Gone(Gone::EarlierBoot));
    }
    let Some(noted) = trace.netns else { return Some(Liveness::Unknown) };
    let Some(holder) = holders.holder(noted.ino) else {
        let is_proved = holders.doubt().is_none();
        return Some(if is_proved { Liveness::Gone(Gone::Namespace) } else { Liveness::Unknown });
    };
    let now = NetnsId::of_holder(holder).filter(|now| now.ino == noted.ino)?;
    if noted.ctime == now.ctime {
        return Some(Liveness::Alive);
    }
    if noted.ctime == 0 {
        // Nothing pinned the namespace: the number may be of the container's namespace or of a later one.
        return Some(Liveness::Unknown);
    }
    // The number belongs to another namespace, or the container's own namespace is no longer pinned by the same mount or
    // descriptor. The container is gone if the namespace has none of its addresses.
    let inside =
        inside.entry(noted.ino).or_insert_with(|| addresses(holder, noted.ino)).as_ref()?;
    let has_one = trace.ips.iter().any(|ip| inside.contains(ip));
    Some(if has_one { Liveness::Alive } else { Liveness::Gone(Gone::Namespace) })
}

/// Removes the addresses from the interfaces of containers that are alive, so that they can be allocated again. Returns
/// the addresses that are, or may be, still on an interface.
pub fn remove_addresses(traces: &[Trace]) -> HashSet<IpAddr> {
    let mut left = HashSet::new();
    for _ in 0..ATTEMPTS {
        left = remove_addresses_once(traces);
        if left.is_empty() {
            break;
        }
    }
    left
}

fn remove_addresses_once(traces: &[Trace]) -> HashSet<IpAddr> {
    let numbers = traces.iter().filter_map(|trace| Some(trace.netns?.ino)).collect();
    let holders = Holders::find(&numbers);
    let mut left = HashSet::new();
    for trace in traces {
        let Some(noted) = trace.netns else { continue };
        let Some(holder) = holders.holder(noted.ino) else { continue };
        match remove_addresses_in(holder, noted, &trace.ips) {
            Ok(ips) => left.extend(ips),
            Err(e) => {
                log::debug(format_args!("look for addresses in {}: {e}", holder.display()));
                left.extend(&trace.ips);
            }
        }
    }
    left
}

fn remove_addresses_in(holder: &Path, noted: NetnsId, ips: &[IpAddr]) -> Result<Vec<IpAddr>> {
    // The number may have been reused for the namespace of another container.
    let is_own = noted.ctime != 0 && NetnsId::of_holder(holder) == Some(noted);
    let netlink = Netlink::open_in(&Netns::open(holder)?)?;
    let mut addrs = netlink.dump_all_addrs()?;
    addrs.retain(|addr| ips.contains(&addr.net.addr()));
    addrs.retain(|addr| !is_own || netlink.del_addr(addr.index, addr.net).is_err());
    Ok(addrs.into_iter().map(|addr| addr.net.addr()).collect())
}

/// All addresses in the namespace that `holder` leads to, if its inode number is `ino`.
fn addresses(holder: &Path, ino: u32) -> Option<HashSet<IpAddr>> {
    let netns = Netns::open(holder).ok()?;
    let netlink = Netlink::open_in(&netns).ok()?;
    let addresses = netlink.dump_all_addrs().ok()?;
    let same = NetnsId::of_holder(holder).is_some_and(|now| now.ino == ino);
    same.then(|| addresses.into_iter().map(|addr| addr.net.addr()).collect())
}
