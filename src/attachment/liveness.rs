//! Whether an attachment has ended.
//!
//! Besides its DEL and a GC whose list lacks it, two facts prove the end of an attachment
//! (`docs/decisions/0007-lease-liveness.md`): it was made before this boot, or the host's end of its veth pair no
//! longer exists, which vanishes with the container's end. Paths, processes and addresses prove nothing. An attachment
//! that is in doubt stays.

use std::cell::OnceCell;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::BootRelation;
use super::owner::{AttachmentId, instance_in_label};
use crate::log;
use crate::netlink::{Link, Netlink, NetlinkResult};

/// Whether an attachment exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Liveness {
    /// The host's end of its veth pair exists.
    Alive,
    /// It has ended: its addresses and rules can be reclaimed.
    Gone(EndProof),
    /// Nothing is proved: its addresses and rules stay.
    Unknown(LivenessDoubt),
}

/// The proof that an attachment has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndProof {
    /// It was made in an earlier boot of this machine.
    EarlierBoot,
    /// The host's end of its veth pair no longer exists, and with it the container's end.
    HostEnd,
}

/// Why nothing is proved of an attachment: see the texts below.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LivenessDoubt {
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

impl fmt::Display for EndProof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EndProof::EarlierBoot => "it was made before the last boot",
            EndProof::HostEnd => "its link on the host is gone",
        })
    }
}

impl fmt::Display for LivenessDoubt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LivenessDoubt::NoHostEnd => "it has no link on the host that would show its end",
            LivenessDoubt::OtherNamespace => "it was made in another network namespace of the host",
            LivenessDoubt::OtherBoot => {
                "it was made in another boot, not certainly an earlier one of this machine"
            }
            LivenessDoubt::Unlabelled(index) => {
                return write!(f, "the link with index {index} has no longer its alias");
            }
            LivenessDoubt::Unreadable(index) => {
                return write!(f, "the link with index {index} cannot be read");
            }
            LivenessDoubt::NoRecord => "nothing was recorded of it",
        })
    }
}

/// The host's end of an attachment's veth pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct HostPairEnd {
    /// The [identity](crate::netns::current_id) of the host's network namespace.
    pub netns: u64,
    /// Its index there.
    pub index: u32,
    /// Whether its alias is the label of the attachment.
    pub labelled: bool,
}

impl HostPairEnd {
    /// The link, with the label of its attachment, in the calling thread's network namespace, which is that of `host`.
    pub fn from_labelled_link(host: &Netlink, link: &Link) -> Option<HostPairEnd> {
        Some(HostPairEnd { netns: host.netns_id()?, index: link.index, labelled: true })
    }

    /// As [`own`](HostPairEnd::from_labelled_link), for the link of any plugin; `None` if it is no end of a pair.
    pub fn from_link(owner: AttachmentId<'_>, host: &Netlink, link: &Link) -> Option<HostPairEnd> {
        let labelled = instance_in_label(&link.alias) == Some(&owner.instance_id());
        HostPairEnd::from_labelled_link(host, link)
            .filter(|_| is_pair(link))
            .map(|end| HostPairEnd { labelled, ..end })
    }
}

/// Whether a link of this kind consists of two ends, each of which is deleted with the other, and with its network
/// namespace.
pub fn is_pair(link: &Link) -> bool {
    matches!(link.kind.as_deref(), Some("veth" | "netkit"))
}

/// What was recorded of an attachment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LivenessEvidence<'a> {
    pub owner: AttachmentId<'a>,
    pub made: BootRelation,
    pub end: Option<HostPairEnd>,
}

/// The liveness of each attachment, in order. Costs one request for each link of this namespace.
pub fn judge_liveness(all: &[LivenessEvidence<'_>]) -> Vec<Liveness> {
    let netlink = OnceCell::new();
    let host = || netlink.get_or_init(Netlink::open).as_ref().map_err(Clone::clone);
    all.iter().map(|evidence| judge_by_socket(evidence, &host)).collect()
}

/// The liveness of one attachment, by a socket of the calling thread's network namespace.
pub fn judge_by_socket<'h>(
    evidence: &LivenessEvidence<'_>,
    host: &dyn Fn() -> NetlinkResult<&'h Netlink>,
) -> Liveness {
    match evidence.made {
        BootRelation::Earlier => return Liveness::Gone(EndProof::EarlierBoot),
        BootRelation::Elsewhere => return Liveness::Unknown(LivenessDoubt::OtherBoot),
        BootRelation::Now => {}
    }
    let Some(HostPairEnd { netns, index, labelled }) = evidence.end else {
        return Liveness::Unknown(LivenessDoubt::NoHostEnd);
    };
    let is_here = |host: &Netlink| host.netns_id() == Some(netns);
    let look = |host: &Netlink| is_here(host).then(|| host.find_link_by_index(index)).transpose();
    match host().and_then(look) {
        Ok(None) => Liveness::Unknown(LivenessDoubt::OtherNamespace),
        Ok(Some(None)) => Liveness::Gone(EndProof::HostEnd),
        // The kernel gives an index again, and a link that is moved here keeps its index.
        Ok(Some(Some(link))) if !is_pair(&link) => Liveness::Gone(EndProof::HostEnd),
        Ok(Some(Some(link))) => match instance_in_label(&link.alias) {
            Some(instance) if instance == evidence.owner.instance_id() => Liveness::Alive,
            Some(_) => Liveness::Gone(EndProof::HostEnd),
            None if labelled => Liveness::Unknown(LivenessDoubt::Unlabelled(index)),
            None => Liveness::Alive,
        },
        Err(error) => {
            log::debug(format_args!("the link of an attachment: {error}"));
            Liveness::Unknown(LivenessDoubt::Unreadable(index))
        }
    }
}
