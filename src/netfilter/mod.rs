//! The rules of plugins in the packet filter, with `nf_tables` or iptables.
//!
//! | file | |
//! | --- | --- |
//! | `backend.rs` | selection of the back end; the sockets and programs of a call; what a feature is |
//! | `handover.rs` | conversion of live state for the reference plugins, when a node goes back to them |
//! | `elements.rs` | the elements of attachments, as their records want them |
//! | `rules.rs` | the rules of attachments in iptables, as their records want them |
//! | `layout.rs` | our tables of `nf_tables`: verified, changed, restored after a flush |
//! | `iptables/` | tables of iptables, over netlink or with iptables-save and iptables-restore |
//! | `localhost.rs` | 127.0.0.0/8 of the host, closed to containers |
//! | `names.rs` | names and comments of rules, as the reference plugins write them |
//! | `reconcile.rs` | compares the packet filter with the records of attachments, and restores it |
//! | `masquerade/` | `ipMasq` |
//! | `spoof.rs` | `macspoofchk` |
//! | `ports/` | port mappings |
//! | `filter/` | the rules of the firewall plugin |
//! | `egress/` | what containers may reach |
//! | `watch.rs` | waits for a change of rules |

pub mod backend;
pub mod egress;
mod elements;
pub mod filter;
pub mod handover;
pub mod iptables;
pub mod layout;
pub mod localhost;
pub mod masquerade;
pub mod names;
pub mod ports;
pub mod reconcile;
mod rules;
pub mod spoof;
mod watch;

pub use backend::{IpFamily, PacketFilter, RuleBackend};
pub use names::AttachmentId;
pub use watch::PacketFilterWatch;

use self::backend::FilterFeature;
use self::filter::firewalld;
use crate::error::{Error, Result};

/// All features. Each is registered here, and only here.
const FEATURES: &[FilterFeature] = &[
    masquerade::FEATURE,
    spoof::FEATURE,
    egress::FEATURE,
    filter::FEATURE,
    ports::FEATURE,
    localhost::FEATURE,
    firewalld::FEATURE,
];

impl PacketFilter {
    /// The packet filter with all features. Opens nothing yet.
    pub fn new() -> PacketFilter {
        PacketFilter::with_features(FEATURES)
    }
}

impl Default for PacketFilter {
    fn default() -> PacketFilter {
        PacketFilter::new()
    }
}

/// Joins the errors of several steps, all of which are attempted.
fn join_errors(outcomes: impl IntoIterator<Item = Result<()>>) -> Result<()> {
    let errors = outcomes.into_iter().filter_map(Result::err).collect();
    Error::join_all(errors).map_or(Ok(()), Err)
}
