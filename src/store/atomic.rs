//! Replacing a file so that a reader, or a machine after a power cut, finds the old content or the
//! new one and nothing between.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};

/// Distinguishes the temporary files that the threads of one process write at the same time.
static COUNTER: AtomicU64 = AtomicU64::new(0);

/// Gives the file `path` the content `bytes` and the permissions `mode` (for instance `0o600`):
/// a temporary file in the same directory, synced, renamed over `path`; then the directory is
/// synced. Fails with code 5; the old content is then still there.
pub fn replace(path: &Path, bytes: &[u8], mode: u32) -> Result<()> {
    let dir = path.parent().unwrap_or(Path::new("."));
    let failed = |cause| Error::io(format_args!("write {}", path.display()), &cause);
    let temporary = temporary_in(dir);
    let renamed = write_new(&temporary, bytes, mode).and_then(|()| fs::rename(&temporary, path));
    if let Err(cause) = renamed {
        drop(fs::remove_file(&temporary));
        return Err(failed(cause));
    }
    // Without this the rename itself may be lost.
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(failed)
}

/// A name of its own kind: short, because that of the target may be as long as names can be, and
/// with a dot in front, so that who lists the directory can tell it from the real files.
fn temporary_in(dir: &Path) -> PathBuf {
    let n = COUNTER.fetch_add(1, Ordering::Relaxed);
    dir.join(format!(".tmp-{}-{n}", process::id()))
}

fn write_new(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    // What a crashed process of the same id left behind is in nobody's use.
    drop(fs::remove_file(path));
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn replaces_and_leaves_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        for text in ["one", "two"] {
            replace(&path, text.as_bytes(), 0o600).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_failure_names_the_file() {
        let error = replace(Path::new("/proc/none/f"), b"", 0o600).unwrap_err();
        assert_eq!(error.msg(), "write /proc/none/f: no such file or directory");
    }
}
