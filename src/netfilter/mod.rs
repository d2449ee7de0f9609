//! The packet filter: what plugins put into it, with `nf_tables` or iptables.
//!
//! | file | |
//! | --- | --- |
//! | `backend.rs` | which of the two; the sockets and programs of a call |
//! | `handed_over.rs` | one table of ours replaced by the reference's |
//! | `handover.rs` | live state for the reference plugins, when a node goes back to them |
//! | `layout.rs` | our tables of `nf_tables`: looked at, changed, restored after a flush |
//! | `iptables/` | tables of iptables: read with iptables-save, changed with iptables-restore |
//! | `localhost.rs` | 127.0.0.0/8 of the host, closed to containers |
//! | `names.rs` | names and comments of rules, as the reference plugins write them |
//! | `masquerade/` | `ipMasq` |
//! | `spoof.rs` | `macspoofchk` |
//! | `ports/` | port mappings |
//! | `filter/` | the rules of the firewall plugin |
//! | `watch.rs` | waiting for a change of rules |

pub mod backend;
pub mod filter;
mod handed_over;
pub mod handover;
pub mod iptables;
pub mod layout;
pub mod localhost;
pub mod masquerade;
pub mod names;
pub mod ports;
pub mod spoof;
mod watch;

pub use backend::{Backend, PacketFilter};
pub use names::Owner;
pub use watch::Watch;

use self::layout::Feature;
use crate::error::{Error, Result};

/// What belongs to attachments in our tables of `nf_tables`.
const FEATURES: &[Feature] =
    &[masquerade::FEATURE, spoof::FEATURE, filter::FEATURE, ports::FEATURE, localhost::FEATURE];

/// What is done about missing rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair {
    /// They are restored.
    Restore,
    /// They are reported, and nothing is changed.
    Report,
}

/// Success, or all errors as one.
fn all(outcomes: impl IntoIterator<Item = Result<()>>) -> Result<()> {
    let errors = outcomes.into_iter().filter_map(Result::err).collect();
    Error::join(errors).map_or(Ok(()), Err)
}

/// Looks for the rules of all attachments of this host. Returns what was missing.
pub fn heal(filter: &PacketFilter, repair: Repair) -> Result<Vec<String>> {
    let mut troubles = match filter.nft_if_present()? {
        Some(nft) => layout::heal(nft, repair)?,
        None => Vec::new(),
    };
    troubles.extend(masquerade::iptables::RECORDS.heal(repair)?);
    troubles.extend(filter::iptables::RECORDS.heal(repair)?);
    troubles.extend(ports::iptables::RECORDS.heal(repair)?);
    troubles.extend(filter::firewalld::heal(repair));
    Ok(troubles)
}
