//! An open folder of a store. Its files are reached by name from its descriptor and never by way of
//! a symbolic link: whoever may write there must not lead root's work elsewhere.

use std::fs::{File, Metadata};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, openat, readlinkat, renameat};
use nix::sys::stat::{Mode, fstatat, mkdirat};
use nix::unistd::{UnlinkatFlags, geteuid, linkat, unlinkat};

use super::folder::require_owner;
use super::{During, Error, Result};

const FOLDER: OFlag = OFlag::O_RDONLY.union(OFlag::O_DIRECTORY).union(OFlag::O_CLOEXEC);

/// A folder that stays the same one whatever its name leads to by now.
#[derive(Debug)]
pub(super) struct Dir {
    /// For messages.
    path: PathBuf,
    dir: File,
}

impl Dir {
    /// The folder at `path`, whatever leads there.
    pub(super) fn open(path: &Path) -> Result<Dir> {
        let dir = openat(AT_FDCWD, path, FOLDER, Mode::empty()).during("open", path)?;
        Ok(Dir { path: path.to_owned(), dir: dir.into() })
    }

    /// The folder of a network; `None` if there is none. An administrator may have linked it to
    /// another disk; nobody else's link is followed.
    pub(super) fn of_network(data_dir: &Path, network: &str) -> Result<Option<Dir>> {
        let path = data_dir.join(network);
        match openat(AT_FDCWD, &path, FOLDER | OFlag::O_NOFOLLOW, Mode::empty()) {
            Ok(dir) => Ok(Some(Dir { path, dir: dir.into() })),
            Err(Errno::ENOENT) => Ok(None),
            Err(Errno::ELOOP | Errno::ENOTDIR) => Dir::linked(data_dir, path).map(Some),
            Err(e) => Err(Error::new("open", &path, e)),
        }
    }

    fn linked(data_dir: &Path, path: PathBuf) -> Result<Dir> {
        // The link itself, so that its owner is that of what is read.
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let link: OwnedFd = openat(AT_FDCWD, &path, flags, Mode::empty()).during("open", &path)?;
        let link = File::from(link);
        let meta = link.metadata().during("stat", &path)?;
        if !meta.is_symlink() {
            return Err(Error::new("open", &path, Errno::ENOTDIR));
        }
        if meta.uid() != geteuid().as_raw() {
            let why = format!("a symbolic link that belongs to user {}", meta.uid());
            return Err(Error::new("open", &path, io::Error::new(ErrorKind::InvalidInput, why)));
        }
        let target = data_dir.join(readlinkat(&link, "").during("read link", &path)?);
        Ok(Dir { path, ..Dir::open(&target)? })
    }

    /// The folder `name` in it, if it is ours and for nobody else to write; `None` if there is none.
    pub(super) fn private(&self, name: &str) -> Result<Option<Dir>> {
        let path = self.path(name);
        let dir = match openat(&self.dir, name, FOLDER | OFlag::O_NOFOLLOW, Mode::empty()) {
            Err(Errno::ENOENT) => return Ok(None),
            dir => File::from(dir.during("open", &path)?),
        };
        require_owner(&dir.metadata().during("stat", &path)?, &path)?;
        Ok(Some(Dir { path, dir }))
    }

    /// Makes such a folder unless something is there.
    pub(super) fn make_private(&self, name: &str) -> Result<()> {
        match mkdirat(&self.dir, name, Mode::S_IRWXU) {
            Err(Errno::EEXIST) => Ok(()),
            made => made.during("create", &self.path(name)),
        }
    }

    /// What a file in it is called in messages.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// What tells it from others.
    pub(super) fn metadata(&self) -> Result<Metadata> {
        self.dir.metadata().during("stat", &self.path)
    }

    /// The names of all that is in it.
    pub(super) fn names(&self) -> Result<Vec<String>> {
        // Opened anew: a descriptor has one place in the list.
        let dir = openat(&self.dir, ".", FOLDER, Mode::empty()).and_then(nix::dir::Dir::from_fd);
        let mut names = Vec::new();
        for entry in dir.during("list", &self.path)?.iter() {
            let entry = entry.during("list", &self.path)?;
            names.extend(entry.file_name().to_str().ok().map(str::to_owned));
        }
        Ok(names)
    }

    /// Whether there is anything of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        fstatat(&self.dir, name, AtFlags::AT_SYMLINK_NOFOLLOW).is_ok()
    }

    /// Opens a file in it.
    pub(super) fn file(
        &self,
        name: &str,
        flags: OFlag,
        mode: Mode,
    ) -> io::Result<(File, Metadata)> {
        open_regular(&self.dir, Path::new(name), flags, mode)
    }

    /// What a file in it has, up to `most` bytes.
    pub(super) fn read(&self, name: &str, most: usize) -> io::Result<(Vec<u8>, Metadata)> {
        let (mut file, meta) = self.file(name, OFlag::O_RDONLY, Mode::empty())?;
        let size = usize::try_from(meta.len()).unwrap_or(most).min(most);
        // One more: the end of a file is where less is read than was asked for.
        let mut content = vec![0; size + 1];
        let length = loop {
            match file.read(&mut content) {
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                length => break length?,
            }
        };
        content.truncate(length);
        Ok((content, meta))
    }

    /// Writes a new file in place of what a killed process left of this name.
    pub(super) fn create(&self, name: &str, bytes: &[u8]) -> Result<File> {
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_CLOEXEC;
        let open = || openat(&self.dir, name, flags, Mode::S_IRUSR | Mode::S_IWUSR);
        let file = match open() {
            Err(Errno::EEXIST) => {
                // Not truncated: it may be a second name of a lease that lives.
                self.remove(name)?;
                open()
            }
            file => file,
        };
        let mut file = File::from(file.during("create", &self.path(name))?);
        let written = file.write_all(bytes);
        if written.is_err() {
            // A full disk should not also keep the part that fitted.
            self.remove(name)?;
        }
        written.during("write", &self.path(name)).map(|()| file)
    }

    /// Writes a file in place. Not atomic: for hints that may be wrong.
    pub(super) fn overwrite(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let mode = Mode::S_IRUSR | Mode::S_IWUSR;
        let path = self.path(name);
        let (file, meta) =
            self.file(name, OFlag::O_WRONLY | OFlag::O_CREAT, mode).during("open", &path)?;
        if meta.nlink() > 1 {
            let why = "it has another name as well";
            return Err(Error::new("write", &path, io::Error::new(ErrorKind::InvalidInput, why)));
        }
        let length = bytes.len() as u64;
        let written = file.write_all_at(bytes, 0);
        let cut = || if meta.len() > length { file.set_len(length) } else { Ok(()) };
        written.and_then(|()| cut()).during("write", &path)
    }

    /// Gives a file in it a second name, in `to`; false if that one is taken.
    pub(super) fn link(&self, name: &str, to: &Dir, as_name: &str) -> Result<bool> {
        match linkat(&self.dir, name, &to.dir, as_name, AtFlags::empty()) {
            Err(Errno::EEXIST) => Ok(false),
            linked => linked.during("create", &to.path(as_name)).map(|()| true),
        }
    }

    /// Puts a file of it in place of another.
    pub(super) fn rename(&self, name: &str, as_name: &str) -> Result<()> {
        renameat(&self.dir, name, &self.dir, as_name).during("replace", &self.path(as_name))
    }

    /// Removes a file; that it is gone already is success.
    pub(super) fn remove(&self, name: &str) -> Result<()> {
        match unlinkat(&self.dir, name, UnlinkatFlags::NoRemoveDir) {
            Err(Errno::ENOENT) => Ok(()),
            removed => removed.during("remove", &self.path(name)),
        }
    }
}

impl AsFd for Dir {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.dir.as_fd()
    }
}

/// Opens a regular file, not by way of a link, and waits for nobody: a FIFO or a device in its
/// place would hold the call for ever, and a link lead it elsewhere.
pub(super) fn open_regular(
    dir: impl AsFd,
    path: &Path,
    flags: OFlag,
    mode: Mode,
) -> io::Result<(File, Metadata)> {
    let irregular = || io::Error::new(ErrorKind::InvalidInput, "not a regular file");
    let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
    let file = match openat(dir, path, flags, mode) {
        // A link; a socket, or a FIFO that nobody reads; a folder.
        Err(Errno::ELOOP | Errno::ENXIO | Errno::EISDIR) => return Err(irregular()),
        file => File::from(file?),
    };
    let meta = file.metadata()?;
    if meta.is_file() { Ok((file, meta)) } else { Err(irregular()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overwriting_leaves_nothing_of_a_longer_text() {
        let root = tempfile::tempdir().unwrap();
        let dir = Dir::open(root.path()).unwrap();
        for text in ["10.1.0.9", "10.1.0.10", "10.1.1.2"] {
            dir.overwrite("hint", text.as_bytes()).unwrap();
            assert_eq!(dir.read("hint", 100).unwrap().0, text.as_bytes());
        }
        assert_eq!(dir.read("hint", 3).unwrap().0.len(), 4, "more is there than was asked for");
    }
}
