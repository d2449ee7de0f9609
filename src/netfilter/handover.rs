//! Live state for the reference plugins: what containers have in our own layouts is rewritten into
//! theirs, so that a node goes back with its containers running and a later DEL by the reference
//! finds everything.
//!
//! | ours | becomes |
//! | --- | --- |
//! | table `inet cnibox_masquerade` | rules in `inet cni_plugins_masquerade` |
//! | table `inet cnibox_portmap` | rules in `ip cni_hostport` and `ip6 cni_hostport` |
//! | table `bridge cnibox_spoof` | chains in `bridge nat` |
//! | table `inet cnibox_localhost` | nothing: the reference has no such |
//! | tables `inet` and `bridge cnibox_firewall` | iptables rules: the reference has no other |
//! | chains `CNIBOX-..` in iptables | nothing: they only note owners |
//! | a second interface's chain `CNI-DN-..` in iptables | part of the container's chain |
//!
//! Each table of `nf_tables` is replaced in one transaction: no packet passes in between.

use std::fmt;

use super::backend::PacketFilter;
use super::{filter, localhost, masquerade, ports, spoof};
use crate::error::{Error, Result};

/// How much of one layout was handed over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct HandedOver {
    /// Objects that the reference has now: rules, ports, addresses or chains, as the layout counts.
    pub(super) objects: usize,
    /// Those that are lost because their comments had no room for the container's id.
    pub(super) nameless: usize,
    /// Rules that are lost because they have conditions of one container.
    pub(super) conditional: usize,
}

impl HandedOver {
    /// So many objects, and nothing is lost.
    pub(super) fn all(objects: usize) -> HandedOver {
        HandedOver { objects, ..HandedOver::default() }
    }
}

impl fmt::Display for HandedOver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} handed over", self.objects)?;
        for (lost, why) in [
            (self.nameless, "the container's id is too long for a comment"),
            (self.conditional, "the reference has no conditions of one container"),
        ] {
            if lost > 0 {
                write!(f, ", {lost} lost: {why}")?;
            }
        }
        Ok(())
    }
}

/// Hands everything over in the calling thread's namespace; what that was, in words. Plugins of
/// ours must not run any more: what they add later stays in our layout. All that can be done is
/// done, then the first trouble is reported.
pub fn to_reference(packets: &PacketFilter) -> Result<Vec<String>> {
    let mut done = Vec::new();
    let mut errors = Vec::new();
    let mut note = |what: &str, outcome: Result<HandedOver>| match outcome {
        Ok(nothing) if nothing == HandedOver::default() => {}
        Ok(handed) => done.push(format!("{what}: {handed}")),
        Err(error) => errors.push(error.context(format!("hand over {what}"))),
    };
    if let Some(nft) = packets.nft_if_present()? {
        note("masqueraded addresses", masquerade::hand_over(nft));
        note("port mappings", ports::hand_over(nft));
        note("source-MAC checks", spoof::hand_over(nft));
        note("loopback addresses", localhost::hand_over(nft));
    }
    note("port mappings of second interfaces", ports::chains::join_interfaces(packets));
    note("firewall rules", filter::hand_over(packets));
    Error::join(errors).map_or(Ok(done), Err)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_is_told_with_the_reason() {
        assert_eq!(HandedOver::all(3).to_string(), "3 handed over");
        let handed = HandedOver { objects: 1, nameless: 2, conditional: 3 };
        let expected = "1 handed over, 2 lost: the container's id is too long for a comment, \
                        3 lost: the reference has no conditions of one container";
        assert_eq!(handed.to_string(), expected);
    }
}
