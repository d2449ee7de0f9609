//! Whether the container of an attachment can be alive, in the words of all tools.

use std::path::PathBuf;

use crate::attachment::{AttachmentId, Liveness};
use crate::framework::reclaim;
use cni::runtime::CachedAttachment;

/// The state of the container of a cached attachment.
pub(super) struct ContainerState {
    pub(super) liveness: Liveness,
    /// Another container that was attached with the same path of a network namespace. The
    /// namespace that is at the path now may belong to either container.
    pub(super) rival: Option<String>,
}

impl ContainerState {
    /// Why it is unknown whether the container is alive; `None` if it is known.
    pub(super) fn doubt_reason(&self, netns: &str) -> Option<String> {
        let rival = self.rival.as_ref();
        let taken = rival.map(|id| format!("{netns} is also the namespace of container {id}"));
        doubt_reason(self.liveness).map(|why| taken.unwrap_or(why))
    }
}

/// The states of these attachments, which are all attachments in the cache; `data_dir` returns the
/// directory with the leases of an attachment.
pub(super) fn container_states(
    cached: &[CachedAttachment],
    data_dir: impl Fn(&CachedAttachment) -> PathBuf,
) -> Vec<ContainerState> {
    let liveness = |one: &CachedAttachment| {
        let CachedAttachment { network, attach, .. } = one;
        let owner = AttachmentId { network, ifname: &attach.ifname, id: &attach.container_id };
        reclaim::attachment_liveness(owner, &data_dir(one))
    };
    let life = |one: &CachedAttachment| {
        let rival = find_rival(cached, one).map(|other| other.attach.container_id.clone());
        // `lo` has no record: it lives as long as any other interface of its container.
        let is_lo = |it: &CachedAttachment| it.attach.ifname == "lo";
        let others = cached.iter().filter(|other| {
            is_lo(one) && !is_lo(other) && other.attach.container_id == one.attach.container_id
        });
        let longest =
            others.map(liveness).reduce(|a, b| if end_reason(a).is_some() { b } else { a });
        ContainerState { liveness: longest.unwrap_or_else(|| liveness(one)), rival }
    };
    cached.iter().map(life).collect()
}

/// An attachment of another container with the same path of a network namespace.
pub(super) fn find_rival<'a>(
    all: &'a [CachedAttachment],
    one: &CachedAttachment,
) -> Option<&'a CachedAttachment> {
    let attach = &one.attach;
    all.iter().find(|other| {
        !attach.netns.is_empty()
            && other.attach.netns == attach.netns
            && other.attach.container_id != attach.container_id
    })
}

/// Why an attachment has ended; `None` if it may be in use.
pub(super) fn end_reason(liveness: Liveness) -> Option<String> {
    if let Liveness::Gone(why) = liveness { Some(why.to_string()) } else { None }
}

/// Why it is unknown whether an attachment is in use; `None` if it is known.
pub(super) fn doubt_reason(liveness: Liveness) -> Option<String> {
    if let Liveness::Unknown(doubt) = liveness { Some(doubt.to_string()) } else { None }
}

/// Whether the container is alive, `None` if that is unknown; and the reason, unless it is alive.
pub(super) fn alive_and_reason(liveness: Liveness) -> (Option<bool>, Option<String>) {
    match liveness {
        Liveness::Alive => (Some(true), None),
        Liveness::Gone(_) => (Some(false), end_reason(liveness)),
        Liveness::Unknown(_) => (None, doubt_reason(liveness)),
    }
}

/// Formats the return value of [`alive_and_reason`].
pub(super) fn format_alive((alive, reason): (Option<bool>, Option<String>)) -> String {
    let word = match alive {
        Some(true) => "yes",
        Some(false) => "no",
        None => "?",
    };
    reason.map_or_else(|| word.to_owned(), |reason| format!("{word}: {reason}"))
}

/// The attachments that may be deleted.
#[derive(Clone, Copy)]
pub(super) struct AttachmentSelection<'a> {
    /// Only attachments of this network; `None`: of all networks.
    pub(super) network: Option<&'a str>,
    /// The container that a person has named.
    pub(super) container: Option<&'a str>,
}

impl AttachmentSelection<'_> {
    pub(super) fn has_network(&self, name: &str) -> bool {
        self.network.is_none_or(|network| network == name)
    }

    pub(super) fn has_attachment(&self, network: &str, id: &str) -> bool {
        self.has_network(network) && self.container.is_none_or(|container| container == id)
    }

    /// Why the attachment can be deleted; `None` if it has to stay.
    pub(super) fn deletion_reason(
        &self,
        network: &str,
        id: &str,
        liveness: Liveness,
    ) -> Option<String> {
        if !self.has_attachment(network, id) {
            return None;
        }
        let named = || Some(format!("named by --container, {}", doubt_reason(liveness)?));
        end_reason(liveness).or_else(|| self.container.and_then(|_| named()))
    }
}
