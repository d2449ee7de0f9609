//! The leases of host-local: in a network's folder a file for each address, in the reference's format,
//! and beside them `.cnibox` with what makes the commands fast and tells which containers are dead.
//!
//! | file | |
//! | --- | --- |
//! | `store.rs` | the leases of a network under its lock: start here |
//! | `lease.rs` | one lease: owner, address, the file's text |
//! | `listing.rs` | what a network's folder has, seen with or without the lock |
//! | `journal.rs` | a text file of all leases, so that no command reads their files one by one |
//! | `notes.rs` | what the journal tells of the containers, for [`crate::attachment::liveness`] |
//! | `boot.rs` | the boot and the machine: ids and clocks |
//! | `quarantine.rs` | addresses that were freed a short while ago (`reuseDelay`) |

mod boot;
#[doc(hidden)]
#[cfg(feature = "testing")]
pub mod fuzz;
mod journal;
mod lease;
mod listing;
mod notes;
mod quarantine;
mod store;
#[cfg(test)]
mod tests;

pub use lease::{Lease, LeaseOptions, Owner};
pub use listing::{LeaseStatus, Listing, Reservation, lease_of, networks};
pub use notes::Reclaimed;
pub use store::LeaseStore;

/// Where host-local keeps leases unless the configuration says otherwise.
pub const DATA_DIR: &str = "/var/lib/cni/networks";
