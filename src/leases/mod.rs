//! The leases of host-local: in a network's directory a file for each address, in the reference's
//! format, and the directory `.cnibox` with the journal, which also lists the addresses in
//! quarantine.
//!
//! | file | |
//! | --- | --- |
//! | `store.rs` | the leases of a network under its lock: start here |
//! | `lease.rs` | one lease: owner, address, the file's text |
//! | `listing.rs` | the content of a network's directory, read with or without the lock |
//! | `journal.rs` | a text file of all leases, which saves reading their files one by one |
//! | `lines.rs` | the lines of that text file |
//! | `notes.rs` | the journal's data on containers, for [`crate::attachment::liveness`] |
//! | `quarantine.rs` | addresses that were freed a short while ago (`reuseDelay`) |

#[doc(hidden)]
#[cfg(feature = "testing")]
pub mod fuzz;
mod journal;
mod lease;
mod lines;
mod listing;
mod notes;
mod quarantine;
mod store;
#[cfg(test)]
mod tests;

pub use lease::{AddressLease, LeaseOptions, ReclaimedLease};
pub use listing::{AddressReservation, LeaseListing, LeaseStatus, find_lease, list_networks};
pub use store::LeaseStore;

/// The default of host-local's `dataDir`.
pub const DATA_DIR: &str = "/var/lib/cni/networks";
