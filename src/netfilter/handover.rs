//! Hands live state over to the reference plugins: our own layouts are rewritten into theirs, so
//! that a node can go back to the reference with its containers running, and a later DEL by the
//! reference finds all rules.
//!
//! | ours | becomes |
//! | --- | --- |
//! | table `inet cnibox_masquerade` | rules in `inet cni_plugins_masquerade` |
//! | table `inet cnibox_portmap` | rules in `ip cni_hostport` and `ip6 cni_hostport` |
//! | table `bridge cnibox_spoof` | chains in `bridge nat` |
//! | table `inet cnibox_localhost` | nothing: the reference has no equivalent |
//! | tables `inet` and `bridge cnibox_firewall` | iptables rules: the reference has no others |
//! | chains `CNIBOX-..` in iptables | nothing: they only record owners |
//! | a second interface's chain `CNI-DN-..` in iptables | part of the container's chain |
//!
//! Each table of `nf_tables` is replaced in one transaction, so every packet passes the rules
//! before or after it.

use super::backend::PacketFilter;
use super::layout::HandoverCount;
use cni::error::{Error, Result};

/// Converts the state in the calling thread's namespace. Returns descriptions of what was
/// converted. From now on our plugins must not run: rules that they add later stay in our layout.
/// Continues after an error; the errors are joined.
pub fn hand_over_to_reference(packets: &PacketFilter) -> Result<Vec<String>> {
    let (mut done, mut errors) = (Vec::new(), Vec::new());
    for (what, convert) in packets.features.iter().flat_map(|feature| feature.hand_over) {
        match convert(packets) {
            Ok(nothing) if nothing == HandoverCount::default() => {}
            Ok(handed) => done.push(format!("{what}: {handed}")),
            Err(error) => errors.push(error.context(format!("hand over {what}"))),
        }
    }
    Error::join_all(errors).map(|()| done)
}
