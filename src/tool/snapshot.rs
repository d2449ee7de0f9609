//! What the node had recorded at one moment, by which an attachment is recognised later: another container may have got
//! its names meanwhile.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::attachment::{AttachmentId, AttachmentRecord};

/// Device, inode number and time of change of a file. The file that replaces it has another time.
type FileInstance = (u64, u64, (i64, i64));

/// The records of attachments, and the files of the runtimes' cache and of leases.
pub(super) struct NodeSnapshot {
    records: Vec<AttachmentRecord>,
    files: HashMap<PathBuf, FileInstance>,
}

impl NodeSnapshot {
    /// Reads the records, and the files in these directories.
    pub(super) fn take(directories: &[PathBuf]) -> NodeSnapshot {
        let entries = directories.iter().flat_map(fs::read_dir).flatten().flatten();
        let files = entries.filter_map(|entry| Some((entry.path(), file_instance(&entry.path())?)));
        NodeSnapshot { records: AttachmentRecord::read_all(None), files: files.collect() }
    }

    /// Whether the attachment's record and these files of it are still as they were.
    pub(super) fn has_same(&self, owner: AttachmentId<'_>, files: &[PathBuf]) -> bool {
        let record = self.records.iter().find(|record| record.attachment_id() == owner);
        let is_same = |path: &PathBuf| file_instance(path).as_ref() == self.files.get(path);
        AttachmentRecord::find_by_attachment(owner).as_ref() == record && files.iter().all(is_same)
    }
}

fn file_instance(path: &Path) -> Option<FileInstance> {
    let meta = path.symlink_metadata().ok()?;
    Some((meta.dev(), meta.ino(), (meta.ctime(), meta.ctime_nsec())))
}
