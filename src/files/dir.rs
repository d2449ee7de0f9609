//! Directories of state.
//!
//! [`ensure_directory`] and [`require_own_directory`] are for directories that only their owner may
//! write to: a user who could create a file there would control what the next command does as root.
//! A [`OpenDirectory`] is an open directory; its files are opened by name from its descriptor and
//! never through a symbolic link, so that a user who may write there cannot redirect root's writes.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, openat, readlinkat, renameat};
use nix::sys::stat::{Mode, mkdirat};
use nix::unistd::{UnlinkatFlags, geteuid, linkat, unlinkat};

use cni::files::{FileError, FileOperationContext, FileResult, create_new, remove_at};

/// The errors of linkat(2) on file systems without hard links, such as exFAT and many of FUSE and
/// SMB.
const NO_LINKS: [Errno; 5] =
    [Errno::EPERM, Errno::EOPNOTSUPP, Errno::ENOSYS, Errno::EMLINK, Errno::EXDEV];

const DIRECTORY: OFlag = OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_CLOEXEC);

/// The size of the buffer for names in bytes, as in glibc.
const LISTING_BUFFER: usize = 32 * 1024;

/// An open directory: it stays the same if its path is renamed or replaced.
#[derive(Debug)]
pub(crate) struct OpenDirectory {
    /// The path in messages.
    path: PathBuf,
    dir: File,
}

impl OpenDirectory {
    /// Opens the directory at `path`, following symbolic links.
    pub(crate) fn open(path: &Path) -> FileResult<OpenDirectory> {
        let dir = openat(AT_FDCWD, path, DIRECTORY, Mode::empty()).during("open", path)?;
        Ok(OpenDirectory { path: path.to_owned(), dir: dir.into() })
    }

    /// The directory of a network; `None` if there is none. The directory may be a symbolic link
    /// that this user owns, for example to another disk; links of other users are not followed.
    pub(crate) fn open_network(
        data_dir: &Path,
        network: &str,
    ) -> FileResult<Option<OpenDirectory>> {
        let path = data_dir.join(network);
        match openat(AT_FDCWD, &path, DIRECTORY | OFlag::O_NOFOLLOW, Mode::empty()) {
            Ok(dir) => Ok(Some(OpenDirectory { path, dir: dir.into() })),
            Err(Errno::ENOENT) => Ok(None),
            Err(Errno::ELOOP | Errno::ENOTDIR) => {
                OpenDirectory::open_linked(data_dir, path).map(Some)
            }
            Err(e) => Err(FileError::new("open", &path, e)),
        }
    }

    fn open_linked(data_dir: &Path, path: PathBuf) -> FileResult<OpenDirectory> {
        // Opens the link itself, so that the owner that is checked is that of the link that is
        // read.
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let link = openat(AT_FDCWD, &path, flags, Mode::empty()).during("open", &path)?;
        let link = File::from(link);
        let meta = link.metadata().during("stat", &path)?;
        if !meta.is_symlink() {
            return Err(FileError::new("open", &path, Errno::ENOTDIR));
        }
        if meta.uid() != geteuid().as_raw() {
            let why = format!("a symbolic link that belongs to user {}", meta.uid());
            let error = io::Error::new(ErrorKind::InvalidInput, why);
            return Err(FileError::new("open", &path, error));
        }
        let target = data_dir.join(readlinkat(&link, "").during("read link", &path)?);
        Ok(OpenDirectory { path, ..OpenDirectory::open(&target)? })
    }

    /// The subdirectory `name`, if owned and writable by this user alone; `None` if there is none.
    pub(crate) fn open_private(&self, name: &str) -> FileResult<Option<OpenDirectory>> {
        let path = self.file_path(name);
        let dir = match openat(&self.dir, name, DIRECTORY | OFlag::O_NOFOLLOW, Mode::empty()) {
            Err(Errno::ENOENT) => return Ok(None),
            dir => File::from(dir.during("open", &path)?),
        };
        require_owner(&dir.metadata().during("stat", &path)?, &path)?;
        Ok(Some(OpenDirectory { path, dir }))
    }

    /// Creates the subdirectory `name` for this user alone, unless the name exists.
    pub(crate) fn create_private(&self, name: &str) -> FileResult<()> {
        match mkdirat(&self.dir, name, Mode::S_IRWXU) {
            Err(Errno::EEXIST) => Ok(()),
            made => made.during("create", &self.file_path(name)),
        }
    }

    /// The path of a file in the directory, for messages.
    pub(crate) fn file_path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub(crate) fn metadata(&self) -> FileResult<Metadata> {
        self.dir.metadata().during("stat", &self.path)
    }

    pub(crate) fn as_file(&self) -> &File {
        &self.dir
    }

    /// The names of all entries. Not by readdir(3), whose buffer in musl is 2 kB: a system call for
    /// every 60 leases.
    pub(crate) fn entry_names(&self) -> FileResult<Vec<String>> {
        // Opens the directory again: the position in the listing belongs to the open file
        // description.
        let directory =
            openat(&self.dir, ".", DIRECTORY, Mode::empty()).during("list", &self.path)?;
        let (mut names, mut buffer) = (Vec::new(), Vec::with_capacity(LISTING_BUFFER));
        let mut entries = rustix::fs::RawDir::new(directory, buffer.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = entry.map_err(io::Error::from).during("list", &self.path)?;
            names.extend(entry.file_name().to_str().ok().map(str::to_owned));
        }
        Ok(names)
    }

    pub(crate) fn has_entry(&self, name: &str) -> bool {
        // Not stat(2), which fails on 32 bits for times after 2038.
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        openat(&self.dir, name, flags, Mode::empty()).is_ok()
    }

    pub(crate) fn open_file(
        &self,
        name: &str,
        flags: OFlag,
        mode: Mode,
    ) -> io::Result<(File, Metadata)> {
        open_regular(&self.dir, Path::new(name), flags, mode)
    }

    /// The content of a file in the directory, up to `most` bytes.
    pub(crate) fn read_file(&self, name: &str, most: usize) -> io::Result<(Vec<u8>, Metadata)> {
        let (mut file, meta) = self.open_file(name, OFlag::O_RDONLY, Mode::empty())?;
        Ok((read_up_to(&mut file, &meta, most)?, meta))
    }

    /// As [`create_new`], for a file in the directory.
    pub(crate) fn create_file(&self, name: &str, bytes: &[u8]) -> FileResult<File> {
        let mode = Mode::S_IRUSR | Mode::S_IWUSR;
        create_new(self.as_fd(), Path::new(name), &self.file_path(name), mode, bytes)
    }

    /// Replaces the file `name` by a new one, written under the name `temp`.
    pub(crate) fn replace_file(&self, name: &str, temp: &str, bytes: &[u8]) -> FileResult<File> {
        let file = self.create_file(temp, bytes)?;
        let renamed = renameat(&self.dir, temp, &self.dir, name);
        if renamed.is_err() {
            self.remove_file(temp)?;
        }
        renamed.during("replace", &self.file_path(name)).map(|()| file)
    }

    /// Overwrites a file in place. Not atomic: only for hints, and for files without content.
    pub(crate) fn overwrite_file(&self, name: &str, bytes: &[u8]) -> FileResult<File> {
        let mode = Mode::S_IRUSR | Mode::S_IWUSR;
        let path = self.file_path(name);
        let (file, meta) =
            self.open_file(name, OFlag::O_WRONLY | OFlag::O_CREAT, mode).during("open", &path)?;
        if meta.nlink() > 1 {
            let error = io::Error::new(ErrorKind::InvalidInput, "it has a second name (hard link)");
            return Err(FileError::new("write", &path, error));
        }
        let length = bytes.len() as u64;
        let written = file.write_all_at(bytes, 0);
        written
            .and_then(|()| if meta.len() > length { file.set_len(length) } else { Ok(()) })
            .during("write", &path)
            .map(|()| file)
    }

    /// Links a complete file of this directory into the directory `to`; false if the name is taken
    /// there. The name in this directory may remain.
    pub(crate) fn publish_file(
        &self,
        name: &str,
        to: &OpenDirectory,
        as_name: &str,
    ) -> FileResult<bool> {
        let published = match linkat(&self.dir, name, &to.dir, as_name, AtFlags::empty()) {
            Err(errno) if NO_LINKS.contains(&errno) => self.publish_by_rename(name, to, as_name),
            linked => linked.map_err(io::Error::from),
        };
        match published {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => Ok(false),
            published => published.during("create", &to.file_path(as_name)).map(|()| true),
        }
    }

    /// For file systems without hard links: takes the name with an empty file, which is then
    /// replaced. The empty file has the times of the file, so that a reader recognizes the
    /// leftover of a killed process after the next boot.
    fn publish_by_rename(&self, name: &str, to: &OpenDirectory, as_name: &str) -> io::Result<()> {
        let time = self.open_file(name, OFlag::O_RDONLY, Mode::empty())?.1.modified()?;
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
        let taken = openat(&to.dir, as_name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?;
        let renamed = File::from(taken)
            .set_modified(time)
            .and_then(|()| renameat(&self.dir, name, &to.dir, as_name).map_err(io::Error::from));
        if renamed.is_err() {
            unlinkat(&to.dir, as_name, UnlinkatFlags::NoRemoveDir)?;
        }
        renamed
    }

    /// Moves a file into the directory `to`, over a file there; false if there is no such file.
    pub(crate) fn move_file(
        &self,
        name: &str,
        to: &OpenDirectory,
        as_name: &str,
    ) -> FileResult<bool> {
        match renameat(&self.dir, name, &to.dir, as_name) {
            Err(Errno::ENOENT) => Ok(false),
            moved => moved.during("move", &self.file_path(name)).map(|()| true),
        }
    }

    /// Removes a file; a missing file is success.
    pub(crate) fn remove_file(&self, name: &str) -> FileResult<()> {
        remove_at(self.as_fd(), Path::new(name), &self.file_path(name))
    }
}

impl AsFd for OpenDirectory {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.dir.as_fd()
    }
}

/// The content of an open file from its start, up to `most` bytes and one more.
pub(crate) fn read_up_to(file: &mut File, meta: &Metadata, most: usize) -> io::Result<Vec<u8>> {
    let size = usize::try_from(meta.len()).unwrap_or(most).min(most);
    // One more byte than the size: a short read is the end of the file.
    let mut content = vec![0; size + 1];
    let length = loop {
        match file.read(&mut content) {
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            length => break length?,
        }
    };
    content.truncate(length);
    Ok(content)
}

/// Opens a regular file without following a link and without blocking: a FIFO or a device in its
/// place would block the call forever, and a link could lead to any file.
pub(crate) fn open_regular(
    dir: impl AsFd,
    path: &Path,
    flags: OFlag,
    mode: Mode,
) -> io::Result<(File, Metadata)> {
    let irregular = || io::Error::new(ErrorKind::InvalidInput, "not a regular file");
    let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
    let file = match openat(dir, path, flags, mode) {
        // In this order: a link; a socket, or a FIFO without a reader; a directory.
        Err(Errno::ELOOP | Errno::ENXIO | Errno::EISDIR) => return Err(irregular()),
        file => File::from(file?),
    };
    let meta = file.metadata()?;
    if meta.is_file() { Ok((file, meta)) } else { Err(irregular()) }
}

/// Write permission of the group and of all others.
pub(super) const OTHERS_WRITE: u32 = 0o022;

/// Creates the directory with `mode`, regardless of the umask, and its missing parents. A directory
/// that exists must pass [`require_own_directory`].
pub fn ensure_directory(dir: &Path, mode: u32) -> FileResult<()> {
    if require_own_directory(dir)? {
        return Ok(());
    }
    if let Some(parent) = dir.parent().filter(|parent| !parent.as_os_str().is_empty()) {
        DirBuilder::new().recursive(true).mode(0o755).create(parent).during("create", parent)?;
    }
    match DirBuilder::new().mode(mode).create(dir) {
        Ok(()) => fs::set_permissions(dir, Permissions::from_mode(mode)).during("create", dir),
        // Another command has created the directory meanwhile.
        Err(e) if e.kind() == ErrorKind::AlreadyExists => require_own_directory(dir).map(drop),
        Err(e) => Err(FileError::new("create", dir, e)),
    }
}

/// Whether the directory exists. Fails unless it is a directory, not a symbolic link, is owned by
/// this user, and is not writable by others.
pub fn require_own_directory(dir: &Path) -> FileResult<bool> {
    let mut options = OpenOptions::new();
    let opened =
        options.read(true).custom_flags((OFlag::O_NOFOLLOW | OFlag::O_DIRECTORY).bits()).open(dir);
    let meta = match opened.and_then(|dir: File| dir.metadata()) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
        meta => meta.during("open", dir)?,
    };
    require_owner(&meta, dir).map(|()| true)
}

/// Fails unless an open directory is owned by this user and not writable by others.
pub(crate) fn require_owner(meta: &Metadata, dir: &Path) -> FileResult<()> {
    if meta.uid() == geteuid().as_raw() && meta.mode() & OTHERS_WRITE == 0 {
        return Ok(());
    }
    let (owner, mode) = (meta.uid(), meta.mode() & 0o7777);
    let why = format!("user {owner} has it with mode {mode:o}, and others must not write there");
    Err(FileError::new("use", dir, io::Error::other(why)))
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;
    use std::os::unix::fs::symlink;

    fn mode(path: &Path) -> u32 {
        path.metadata().unwrap().mode() & 0o777
    }

    #[test]
    fn new_files_and_directories_are_private() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("a/b/c");
        assert!(!require_own_directory(&dir).unwrap());
        ensure_directory(&dir, 0o700).unwrap();
        ensure_directory(&dir, 0o700).unwrap();
        assert!(require_own_directory(&dir).unwrap());
        assert_eq!(mode(&dir), 0o700);
        assert_eq!(mode(dir.parent().unwrap()) & OTHERS_WRITE, 0);
    }

    #[test]
    fn links_and_directories_writable_by_others_are_refused() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        for (name, mode) in [("group", 0o770), ("all", 0o1777)] {
            fs::create_dir(path(name)).unwrap();
            fs::set_permissions(path(name), Permissions::from_mode(mode)).unwrap();
            let error = ensure_directory(&path(name), 0o700).unwrap_err().to_string();
            assert!(error.contains("others must not write there"), "{error}");
        }
        fs::create_dir(path("good")).unwrap();
        symlink("good", path("link")).unwrap();
        fs::write(path("file"), "").unwrap();
        for name in ["link", "file"] {
            assert!(
                require_own_directory(&path(name)).is_err()
                    && ensure_directory(&path(name), 0o700).is_err()
            );
        }
    }

    #[test]
    fn publishing_works_without_hard_links() {
        let root = tempfile::tempdir().unwrap();
        let dir = OpenDirectory::open(root.path()).unwrap();
        let meta = |name| dir.read_file(name, 9).unwrap().1;
        let by_rename = |name: &str, to: &OpenDirectory, as_name: &str| {
            dir.publish_by_rename(name, to, as_name)
        };
        let temp = dir.create_file("temp", b"new").unwrap();
        // After 2038.
        let seconds = 3_000_000_000;
        temp.set_modified(UNIX_EPOCH + Duration::new(seconds, 9)).unwrap();
        let inode = meta("temp").ino();
        by_rename("temp", &dir, "lease").unwrap();
        assert_eq!(dir.read_file("lease", 9).unwrap().0, b"new");
        let lease = meta("lease");
        assert!(dir.has_entry("lease"));
        assert_eq!(
            (lease.ino(), lease.mtime(), lease.mtime_nsec()),
            (inode, seconds.cast_signed(), 9)
        );
        dir.create_file("temp", b"other").unwrap();
        assert_eq!(by_rename("temp", &dir, "lease").unwrap_err().kind(), ErrorKind::AlreadyExists);
        assert!(!dir.publish_file("temp", &dir, "lease").unwrap());
        assert_eq!(dir.read_file("lease", 9).unwrap().0, b"new");
        assert_eq!(by_rename("none", &dir, "free").unwrap_err().kind(), ErrorKind::NotFound);
        assert!(!dir.has_entry("free"));
    }

    #[test]
    fn overwriting_truncates_a_longer_file() {
        let root = tempfile::tempdir().unwrap();
        let dir = OpenDirectory::open(root.path()).unwrap();
        for text in ["10.1.0.9", "10.1.0.10", "10.1.1.2"] {
            dir.overwrite_file("hint", text.as_bytes()).unwrap();
            assert_eq!(dir.read_file("hint", 100).unwrap().0, text.as_bytes());
        }
        assert_eq!(
            dir.read_file("hint", 3).unwrap().0.len(),
            4,
            "more is there than was asked for"
        );
    }
}
