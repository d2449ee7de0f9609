//! Folders of state: made so that nobody but their owner can write to them, and used only when that
//! is so. Whoever could put a file there would decide what the next command does as root.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use nix::libc::{O_DIRECTORY, O_NOFOLLOW};
use nix::unistd::geteuid;

use super::{During, Error, Result};

/// Write permission of the group and of all others.
const OTHERS_WRITE: u32 = 0o022;

/// Makes the folder and those above it that are missing, with `mode` whatever the umask; one that
/// is there must be as [`require_own`] has it.
pub fn ensure(dir: &Path, mode: u32) -> Result<()> {
    if require_own(dir)? {
        return Ok(());
    }
    if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        DirBuilder::new().recursive(true).mode(0o755).create(parent).during("create", parent)?;
    }
    match DirBuilder::new().mode(mode).create(dir) {
        Ok(()) => fs::set_permissions(dir, Permissions::from_mode(mode)).during("create", dir),
        // Another command was faster.
        Err(e) if e.kind() == ErrorKind::AlreadyExists => require_own(dir).map(drop),
        Err(e) => Err(Error::new("create", dir, e)),
    }
}

/// Whether the folder is there. It must be one, not a link to one, this user's, and nobody else's to
/// write to.
pub fn require_own(dir: &Path) -> Result<bool> {
    let mut options = OpenOptions::new();
    let opened = options.read(true).custom_flags(O_NOFOLLOW | O_DIRECTORY).open(dir);
    let meta = match opened.and_then(|dir: File| dir.metadata()) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
        meta => meta.during("open", dir)?,
    };
    require_owner(&meta, dir).map(|()| true)
}

/// Fails unless an open folder is this user's, and nobody else's to write to.
pub(super) fn require_owner(meta: &Metadata, dir: &Path) -> Result<()> {
    if meta.uid() == geteuid().as_raw() && meta.mode() & OTHERS_WRITE == 0 {
        return Ok(());
    }
    let (owner, mode) = (meta.uid(), meta.mode() & 0o7777);
    let why = format!("user {owner} has it with mode {mode:o}, and others must not write there");
    Err(Error::new("use", dir, io::Error::other(why)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn mode(path: &Path) -> u32 {
        path.metadata().unwrap().mode() & 0o777
    }

    #[test]
    fn what_is_made_is_the_owner_s_alone() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("a/b/c");
        assert!(!require_own(&dir).unwrap());
        ensure(&dir, 0o700).unwrap();
        ensure(&dir, 0o700).unwrap();
        assert!(require_own(&dir).unwrap());
        assert_eq!(mode(&dir), 0o700);
        assert_eq!(mode(dir.parent().unwrap()) & OTHERS_WRITE, 0);
    }

    #[test]
    fn folders_that_others_can_write_to_links_and_files_are_refused() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        for (name, mode) in [("group", 0o770), ("all", 0o1777)] {
            fs::create_dir(path(name)).unwrap();
            fs::set_permissions(path(name), Permissions::from_mode(mode)).unwrap();
            let error = ensure(&path(name), 0o700).unwrap_err().to_string();
            assert!(error.contains("others must not write there"), "{error}");
        }
        fs::create_dir(path("good")).unwrap();
        symlink("good", path("link")).unwrap();
        fs::write(path("file"), "").unwrap();
        for name in ["link", "file"] {
            assert!(require_own(&path(name)).is_err() && ensure(&path(name), 0o700).is_err());
        }
    }
}
