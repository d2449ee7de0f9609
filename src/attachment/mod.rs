//! An attachment lives or dies as a whole: its owner, and whether the owner's container is alive.
//!
//! | file | |
//! | --- | --- |
//! | `owner.rs` | the owner: network, container, interface |
//! | `liveness.rs` | alive, gone or unknown, by what was recorded of the container's namespace |
//! | `record.rs` | the record of an attachment that has more on the host than its links |
//! | `kept.rs` | the records from which each feature of the packet filter restores its rules |
//! | `file.rs` | the files of both kinds of records |
//! | `backup.rs` | the settings of an interface before a plugin changed them |

pub mod backup;
mod file;
mod kept;
pub mod liveness;
mod owner;
mod record;

pub use file::remove_all;
pub use kept::{Keepsake, Kept};
pub use liveness::{Gone, Liveness, Trace};
pub use owner::{Owner, hash, network_hash};
pub use record::{Record, forget};
