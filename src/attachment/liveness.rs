//! Whether an attachment has ended.
//!
//! Besides its DEL and a GC whose list lacks it, two facts prove the end of an attachment
//! (`docs/decisions/0007-lease-liveness.md`): it was made before this boot, or the host's end of its veth pair no longer
//! exists, which vanishes with the container's end. Paths, processes and addresses prove nothing. An attachment
//! that is in doubt stays.

use std::cell::OnceCell;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::Made;
use super::owner::{Owner, instance_of};
use crate::log;
use crate::netlink::{Link, Netlink, Result};

/// Whether an attachment exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// The host's end of its veth pair exists.
    Alive,
    /// It has ended: its addresses and rules can be reclaimed.
    Gone(Gone),
    /// Nothing is proved: its addresses and rules stay.
    Unknown(Doubt),
}

/// The proof that an attachment has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gone {
    /// It was made in an earlier boot of this machine.
    EarlierBoot,
    /// The host's end of its veth pair no longer exists, and with it the container's end.
    HostEnd,
}

/// Why nothing is proved of an attachment: see the texts below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doubt {
    /// It was made in this boot.
    NoHostEnd,
    /// The calling thread is in another network namespace than its link.
    OtherNamespace,
    OtherBoot,
    /// The index of the link.
    Unlabelled(u32),
    /// The index of the link.
    Unreadable(u32),
    NoRecord,
}

impl fmt::Display for Gone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Gone::EarlierBoot => "it was made before the last boot",
            Gone::HostEnd => "its link on the host is gone",
        })
    }
}

impl fmt::Display for Doubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Doubt::NoHostEnd => "it has no link on the host that would show its end",
            Doubt::OtherNamespace => "it was made in another network namespace of the host",
            Doubt::OtherBoot => {
                "it was made in another boot, not certainly an earlier one of this machine"
            }
            Doubt::Unlabelled(index) => {
                return write!(f, "the link with index {index} has no longer its alias");
            }
            Doubt::Unreadable(index) => {
                return write!(f, "the link with index {index} cannot be read");
            }
            Doubt::NoRecord => "nothing was recorded of it",
        })
    }
}

/// The host's end of an attachment's veth pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HostEnd {
    /// The [identity](crate::netns::current_id) of the host's network namespace.
    pub netns: u64,
    /// Its index there.
    pub index: u32,
    /// Whether its alias is the label of the attachment.
    pub labelled: bool,
}

impl HostEnd {
    /// The link, with the label of its attachment, in the calling thread's network namespace, which is that of `host`.
    pub fn own(host: &Netlink, link: &Link) -> Option<HostEnd> {
        Some(HostEnd { netns: host.netns_id()?, index: link.index, labelled: true })
    }

    /// As [`own`](HostEnd::own), for the link of any plugin; `None` if it is no end of a pair.
    pub fn of(owner: Owner<'_>, host: &Netlink, link: &Link) -> Option<HostEnd> {
        let labelled = instance_of(&link.alias) == Some(&owner.instance());
        HostEnd::own(host, link).filter(|_| is_pair(link)).map(|end| HostEnd { labelled, ..end })
    }
}

/// Whether a link of this kind consists of two ends, each of which is deleted with the other, and with its network namespace.
pub fn is_pair(link: &Link) -> bool {
    matches!(link.kind.as_deref(), Some("veth" | "netkit"))
}

/// What was recorded of an attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evidence<'a> {
    pub owner: Owner<'a>,
    pub made: Made,
    pub end: Option<HostEnd>,
}

/// The liveness of each attachment, in order. Costs one request for each link of this namespace.
pub fn judge(all: &[Evidence<'_>]) -> Vec<Liveness> {
    let netlink = OnceCell::new();
    let host = || netlink.get_or_init(Netlink::open).as_ref().map_err(Clone::clone);
    all.iter().map(|evidence| judge_by(evidence, &host)).collect()
}

/// The liveness of one attachment, by a socket of the calling thread's network namespace.
pub fn judge_by<'h>(evidence: &Evidence<'_>, host: &dyn Fn() -> Result<&'h Netlink>) -> Liveness {
    match evidence.made {
        Made::Earlier => return Liveness::Gone(Gone::EarlierBoot),
        Made::Elsewhere => return Liveness::Unknown(Doubt::OtherBoot),
        Made::Now => {}
    }
    let Some(HostEnd { netns, index, labelled }) = evidence.end else {
        return Liveness::Unknown(Doubt::NoHostEnd);
    };
    let is_here = |host: &Netlink| host.netns_id() == Some(netns);
    let look = |host: &Netlink| is_here(host).then(|| host.link_by_index(index)).transpose();
    match host().and_then(look) {
        Ok(None) => Liveness::Unknown(Doubt::OtherNamespace),
        Ok(Some(None)) => Liveness::Gone(Gone::HostEnd),
        // The kernel gives an index again, and a link that is moved here keeps its index.
        Ok(Some(Some(link))) if !is_pair(&link) => Liveness::Gone(Gone::HostEnd),
        Ok(Some(Some(link))) => match instance_of(&link.alias) {
            Some(instance) if instance == evidence.owner.instance() => Liveness::Alive,
            Some(_) => Liveness::Gone(Gone::HostEnd),
            None if labelled => Liveness::Unknown(Doubt::Unlabelled(index)),
            None => Liveness::Alive,
        },
        Err(error) => {
            log::debug(format_args!("the link of an attachment: {error}"));
            Liveness::Unknown(Doubt::Unreadable(index))
        }
    }
}
