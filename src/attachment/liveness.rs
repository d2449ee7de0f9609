//! Whether an attachment has ended.
//!
//! An attachment ends by its DEL, or by a GC whose list lacks the attachment. Without these, two
//! facts prove its end (`docs/decisions/0007-lease-liveness.md`): the attachment was created before
//! this boot, or its veth pair, both ends of which the kernel deletes together, no longer exists.
//! Paths, processes and addresses prove nothing. An attachment in doubt is not reclaimed.

use std::cell::OnceCell;
use std::fmt;
use std::os::fd::AsFd;

use serde::{Deserialize, Serialize};

use super::BootRelation;
use super::owner::{AttachmentId, instance_in_label};
use crate::netlink::{Link, Netlink, NetlinkResult};
use crate::netns::Netns;

/// Whether an attachment exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// The host's end of its veth pair exists.
    Alive,
    /// The attachment has ended: its addresses and rules can be reclaimed.
    Gone(EndedBy),
    /// Nothing is proved: its addresses and rules stay.
    Unknown(UnknownBecause),
}

impl Liveness {
    /// Whether nothing is proved.
    pub fn is_doubtful(self) -> bool {
        matches!(self, Liveness::Unknown(_))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndedBy {
    /// The attachment was created in an earlier boot of this machine.
    EarlierBoot,
    /// The host's end of its veth pair no longer exists, and neither does the container's end.
    HostEnd,
}

/// Why it is unknown whether an attachment has ended: see the texts below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnknownBecause {
    /// Created in this boot, by a plugin without a link on the host.
    NoHostEnd,
    /// The calling thread is in another network namespace than its link.
    OtherNamespace,
    OtherBoot,
    /// The index of the link.
    Unlabelled(u32),
    /// The index of the link.
    Unreadable(u32),
    /// The index that the link had.
    Moved(u32),
    NoRecord,
}

impl fmt::Display for EndedBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EndedBy::EarlierBoot => "it was made before the last boot",
            EndedBy::HostEnd => "its link on the host is gone",
        })
    }
}

impl fmt::Display for UnknownBecause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            UnknownBecause::NoHostEnd => "it has no link on the host that would show its end",
            UnknownBecause::OtherNamespace => {
                "it was made in another network namespace of the host"
            }
            UnknownBecause::OtherBoot => {
                "it was made in another boot, not certainly an earlier one of this machine"
            }
            UnknownBecause::Unlabelled(index) => {
                return write!(f, "the link with index {index} no longer has its alias");
            }
            UnknownBecause::Unreadable(index) => {
                return write!(f, "the link with index {index} cannot be read");
            }
            UnknownBecause::Moved(index) => {
                return write!(
                    f,
                    "the link with index {index} may have been moved to another network namespace"
                );
            }
            UnknownBecause::NoRecord => "nothing was recorded of it",
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HostVeth {
    /// The [identity](crate::netns::current_id) of the host's network namespace.
    pub netns: u64,
    /// The link's index in `netns`.
    pub index: u32,
    /// Whether the link's alias is the label of the attachment.
    pub labelled: bool,
    #[serde(default)]
    pub peer: Option<ContainerVeth>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ContainerVeth {
    /// The [id](Netlink::namespace_id) of the container's network namespace in that of the host.
    /// The kernel gives the id of a namespace that has ended to another one.
    pub nsid: i32,
    /// The link's index in the container, unless the container has moved the link.
    pub index: u32,
}

impl HostVeth {
    /// The end `link`, which has the label of its attachment, in the network namespace of `host`.
    pub fn from_labelled_link(host: &Netlink, link: &Link) -> Option<HostVeth> {
        let peer = link
            .link_netnsid
            .filter(|nsid| *nsid >= 0)
            .and_then(|nsid| Some(ContainerVeth { nsid, index: link.link? }));
        Some(HostVeth { netns: host.netns_id()?, index: link.index, labelled: true, peer })
    }

    /// The end `link` of any plugin, with or without a label; `None` if the link is not the end of
    /// a pair.
    pub fn from_link(owner: AttachmentId<'_>, host: &Netlink, link: &Link) -> Option<HostVeth> {
        let labelled = instance_in_label(&link.alias) == Some(&owner.instance_id());
        HostVeth::from_labelled_link(host, link)
            .filter(|_| is_pair(link))
            .map(|end| HostVeth { labelled, ..end })
    }
}

/// Whether the link is one of a pair: the kernel deletes both ends together, and an end with its
/// network namespace.
pub fn is_pair(link: &Link) -> bool {
    matches!(link.kind.as_deref(), Some("veth" | "netkit"))
}

/// The data about an attachment from its record or lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LivenessEvidence<'a> {
    pub owner: AttachmentId<'a>,
    pub made: BootRelation,
    pub end: Option<HostVeth>,
}

/// The liveness of each attachment, in order. Sends one request for each link of this network
/// namespace.
pub fn judge_liveness(all: &[LivenessEvidence<'_>]) -> Vec<Liveness> {
    let netlink = OnceCell::new();
    all.iter()
        .map(|evidence| {
            check_socket(evidence, &|| {
                netlink.get_or_init(Netlink::open).as_ref().map_err(Clone::clone)
            })
        })
        .collect()
}

/// The liveness of one attachment, by a socket of the calling thread's network namespace.
pub fn check_socket<'h>(
    evidence: &LivenessEvidence<'_>,
    host: &dyn Fn() -> NetlinkResult<&'h Netlink>,
) -> Liveness {
    match evidence.made {
        BootRelation::Earlier => return Liveness::Gone(EndedBy::EarlierBoot),
        BootRelation::Elsewhere => return Liveness::Unknown(UnknownBecause::OtherBoot),
        BootRelation::Now => {}
    }
    let Some(end) = evidence.end else {
        return Liveness::Unknown(UnknownBecause::NoHostEnd);
    };
    let judged = host().and_then(|host| judge_by_pair(host, evidence.owner, end));
    judged.unwrap_or_else(|error| {
        debug!("could not look up the link of an attachment: {error}");
        Liveness::Unknown(UnknownBecause::Unreadable(end.index))
    })
}

fn judge_by_pair(
    host: &Netlink,
    owner: AttachmentId<'_>,
    end: HostVeth,
) -> NetlinkResult<Liveness> {
    if host.netns_id() != Some(end.netns) {
        return Ok(Liveness::Unknown(UnknownBecause::OtherNamespace));
    }
    // The kernel may reuse an index, and a link that is moved into this namespace keeps its index.
    if let Some(link) = host.find_link_by_index(end.index)?.filter(is_pair) {
        match instance_in_label(&link.alias) {
            Some(instance) if instance == owner.instance_id() => return Ok(Liveness::Alive),
            Some(_) => {}
            None if end.labelled => {
                return Ok(Liveness::Unknown(UnknownBecause::Unlabelled(end.index)));
            }
            None => return Ok(Liveness::Alive),
        }
    }
    let may_exist = may_exist_elsewhere(host, end)?;
    Ok(if may_exist {
        Liveness::Unknown(UnknownBecause::Moved(end.index))
    } else {
        Liveness::Gone(EndedBy::HostEnd)
    })
}

/// Whether the container's end of a pair may exist, whose other end is no longer on the host: a
/// person may have moved that end to another network namespace.
fn may_exist_elsewhere(host: &Netlink, end: HostVeth) -> NetlinkResult<bool> {
    let Some(peer) = end.peer else { return Ok(true) };
    let Some(inside) = host.find_link_in(peer.nsid, peer.index)?.filter(is_pair) else {
        return Ok(false);
    };
    // The kernel may have given the id to another namespace: to the host's own,
    let Ok(here) = Netns::open_current() else { return Ok(true) };
    if host.namespace_id(here.as_fd())? == Some(peer.nsid) {
        return Ok(false);
    }
    // or to that of another container, or of this container after a restart. The pair of either has
    // an end on the host.
    let outside = inside.link.map(|index| host.find_link_by_index(index)).transpose()?.flatten();
    Ok(!outside.as_ref().is_some_and(|outside| {
        outside.link == Some(peer.index) && outside.link_netnsid == Some(peer.nsid)
    }))
}
