//! An attachment lives or dies as a whole: its owner, and whether the owner's container is alive.
//!
//! | file | |
//! | --- | --- |
//! | `owner.rs` | the owner: network, container, interface |
//! | `liveness.rs` | alive, gone or unknown, by what was noted of the container's namespace |
//! | `record.rs` | what is noted on the node of an attachment that has more than its links |
//! | `kept.rs` | what each feature of the packet filter keeps, to make its rules again |
//! | `file.rs` | the files of both |

mod file;
mod kept;
pub mod liveness;
mod owner;
mod record;

pub use kept::{Keepsake, Kept};
pub use liveness::{Gone, Liveness, Trace};
pub use owner::{Owner, hash, network_hash};
pub use record::{Record, forget};
