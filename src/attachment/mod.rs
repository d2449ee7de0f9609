//! Attachments: identity, records, and whether an attachment has ended.
//!
//! | file | |
//! | --- | --- |
//! | `owner.rs` | the identity of an attachment: network, container, interface |
//! | `liveness.rs` | alive, gone or in doubt, by what was recorded of the attachment |
//! | `boot.rs` | the boot in which an attachment was created |
//! | `record.rs` | the record of an attachment that has other state on the host than its links |
//! | `parts.rs` | the parts of records from which each feature of the packet filter restores its rules |
//! | `file.rs` | the files of records |
//! | `backup.rs` | the settings of an interface before a plugin changed them |

pub mod backup;
pub mod boot;
pub mod file;
pub mod liveness;
mod owner;
mod parts;
mod record;

pub use boot::{BootIdentity, BootRelation};
pub use file::{forget_attachment, log_unrecorded, remove_all_records};
pub use liveness::{ContainerVeth, EndedBy, HostVeth, Liveness, LivenessEvidence, UnknownBecause};
pub use owner::{AttachmentId, network_hash, sha512_hex};
pub use parts::{REPAIR_REMEDY, RecordStore, StoredRecord, decode_part};
pub use record::AttachmentRecord;
