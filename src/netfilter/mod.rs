//! The rules of plugins in the packet filter, with `nf_tables` or iptables.
//!
//! | file | |
//! | --- | --- |
//! | `backend.rs` | selection of the back end; the sockets and programs of a call; what a feature is |
//! | `features.rs` | the list of features |
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
mod features;
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
