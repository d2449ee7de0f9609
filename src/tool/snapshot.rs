//! What the node had recorded at one moment, by which an attachment is recognised later: another
//! container may have got its names meanwhile.

use std::collections::HashMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use crate::attachment::{AttachmentId, AttachmentRecord};
use cni::runtime::{CachedAttachment, Runtime};

/// How long a runtime may take for the calls of a list, before or after which it writes or deletes
/// the attachment's file in its cache.
const CHANGING: Duration = Duration::from_secs(1);

/// Waits until a list of calls that was running has ended.
pub(super) fn wait_for_running_calls() {
    thread::sleep(CHANGING);
}

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
        AttachmentRecord::find_by_attachment(owner).as_ref() == record
            && files.iter().all(|path| self.is_same(path))
    }

    /// Whether no runtime has attached or detached the container since. A repair itself may have
    /// changed the record.
    pub(super) fn is_at_rest(&self, runtime: &Runtime, cached: &CachedAttachment) -> bool {
        runtime.cache_paths(&cached.network, &cached.attach).is_ok_and(|files| {
            files.iter().any(|file| self.files.contains_key(file))
                && files.iter().all(|path| self.is_same(path))
        })
    }

    fn is_same(&self, path: &Path) -> bool {
        file_instance(path).as_ref() == self.files.get(path)
    }
}

fn file_instance(path: &Path) -> Option<FileInstance> {
    let meta = path.symlink_metadata().ok()?;
    Some((meta.dev(), meta.ino(), (meta.ctime(), meta.ctime_nsec())))
}
