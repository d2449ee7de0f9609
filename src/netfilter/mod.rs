//! The packet filter: what plugins put into it, with `nf_tables` or iptables.
//!
//! | file | |
//! | --- | --- |
//! | `backend.rs` | which of the two; the sockets and programs of a call |
//! | `draft.rs` | a table of iptables, the changes to come, and which words may be in them |
//! | `handover.rs` | live state for the reference plugins, when a node goes back to them |
//! | `layout.rs` | our tables of `nf_tables`: looked at, changed, restored after a flush |
//! | `iptables.rs` | tables read with iptables-save and changed with iptables-restore |
//! | `localhost.rs` | 127.0.0.0/8 of the host, closed to containers |
//! | `names.rs` | names and comments, those of the reference plugins |
//! | `piecemeal.rs` | tables that iptables cannot show, rules that it cannot delete together |
//! | `masquerade/` | `ipMasq` |
//! | `spoof.rs` | `macspoofchk` |
//! | `ports/` | port mappings |
//! | `filter/` | the rules of the firewall plugin |

pub mod backend;
pub mod draft;
pub mod filter;
pub mod handover;
pub mod iptables;
pub mod layout;
pub mod localhost;
pub mod masquerade;
pub mod names;
mod piecemeal;
pub mod ports;
pub mod spoof;

pub use backend::{Backend, PacketFilter};
pub use names::Owner;

use self::layout::Feature;
use crate::error::Result;

/// What belongs to attachments in our tables of `nf_tables`.
const FEATURES: &[Feature] =
    &[masquerade::FEATURE, spoof::FEATURE, filter::FEATURE, ports::FEATURE, localhost::FEATURE];

/// Restores all rules of the attachments of this host, which somebody flushed; what was wrong.
pub fn heal(filter: &PacketFilter) -> Result<Vec<String>> {
    let mut troubles = match filter.nft_if_present()? {
        Some(nft) => layout::heal(nft)?,
        None => Vec::new(),
    };
    for heal in [masquerade::heal_chains, filter::heal_chains, ports::kept::heal] {
        troubles.extend(heal()?);
    }
    Ok(troubles)
}
