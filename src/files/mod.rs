//! Files that outlive a call: locks, and directories that others may write to. Reading and atomic
//! replacement are in [`cni::files`].
//!
//! | file | |
//! | --- | --- |
//! | `lock.rs` | flock(2) with a timeout |
//! | `dir.rs` | directories of state, whose files are opened without following links |
//! | `trust.rs` | which directories are trusted |
//! | `ring.rs` | a log file of bounded size |

pub mod dir;
pub mod lock;
pub mod ring;
pub mod trust;
