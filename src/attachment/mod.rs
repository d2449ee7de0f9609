//! An attachment lives and ends as a whole: its owner, and whether it has ended.
//!
//! | file | |
//! | --- | --- |
//! | `owner.rs` | the owner: network, container, interface |
//! | `liveness.rs` | alive, gone or in doubt, by what was recorded of the attachment |
//! | `boot.rs` | the boot in which it was made |
//! | `record.rs` | the record of an attachment that has more on the host than its links |
//! | `kept.rs` | the parts of records from which each feature of the packet filter restores its rules |
//! | `file.rs` | the files of records |
//! | `backup.rs` | the settings of an interface before a plugin changed them |

pub mod backup;
pub mod boot;
mod file;
mod kept;
pub mod liveness;
mod owner;
mod record;

pub use boot::{Boot, Made};
pub use file::{forget, remove_all, unrecorded};
pub use kept::{Keepsake, Kept};
pub use liveness::{Doubt, Evidence, Gone, HostEnd, Liveness};
pub use owner::{Owner, hash, network_hash};
pub use record::Record;
