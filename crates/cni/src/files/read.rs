//! Opening and reading files, also those that another user has named or written.

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::fd::AsRawFd;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, openat};
use nix::sys::stat::Mode;

/// Opens the file at `path` with these flags besides `O_CLOEXEC`. After open(2), musl's function of
/// this name sets close-on-exec by another system call, which openat(2) does not need.
pub fn open_file(path: impl AsRef<Path>, flags: OFlag) -> io::Result<File> {
    Ok(openat(AT_FDCWD, path.as_ref(), flags | OFlag::O_CLOEXEC, Mode::empty()).map(File::from)?)
}

/// The content of the regular file at `path`, which may be a symbolic link; an error if there are
/// more than `most` bytes.
///
/// Nothing else is opened: a FIFO would block the call, a device may have no end, and the mere
/// opening of some devices has an effect (a watchdog starts).
pub fn read_regular_file(path: &Path, most: usize) -> io::Result<Vec<u8>> {
    let refuse = |why: String| Err(io::Error::new(ErrorKind::InvalidInput, why));
    let found = open_file(path, OFlag::O_PATH)?;
    let meta = found.metadata()?;
    if meta.is_dir() {
        return Err(Errno::EISDIR.into());
    }
    if !meta.is_file() {
        return refuse("not a regular file".to_owned());
    }
    // The link leads to the file that was examined, even if `path` leads elsewhere by now.
    let link = format!("/proc/self/fd/{}", found.as_raw_fd());
    let file = open_file(link, OFlag::O_RDONLY).map_err(|error| match error.kind() {
        ErrorKind::NotFound => io::Error::other("/proc is not mounted"),
        _ => error,
    })?;
    let limit = most as u64;
    // Room for all of it and the end, so that two reads are enough. The kernel's files have no
    // length.
    let mut content =
        Vec::with_capacity(usize::try_from(meta.len().min(limit)).unwrap_or(most) + 1);
    if meta.len() <= limit {
        file.take(limit + 1).read_to_end(&mut content)?;
    }
    if meta.len() > limit || content.len() > most {
        return refuse(format!("larger than {} KiB", most >> 10));
    }
    Ok(content)
}

/// As [`read_regular_file`], as text: bytes that are not UTF-8 become U+FFFD.
pub fn read_text(path: &Path, most: usize) -> io::Result<String> {
    read_regular_file(path, most).map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    use nix::unistd::mkfifo;

    #[test]
    fn regular_files_up_to_the_limit_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        fs::write(path("file"), "x".repeat(1024)).unwrap();
        symlink("file", path("link")).unwrap();
        for name in ["file", "link"] {
            assert_eq!(read_regular_file(&path(name), 1024).unwrap().len(), 1024, "{name}");
            let error = read_regular_file(&path(name), 1023).unwrap_err();
            assert_eq!(error.to_string(), "larger than 0 KiB", "{name}");
        }
        assert_eq!(read_regular_file(&path("none"), 9).unwrap_err().kind(), ErrorKind::NotFound);
        // The kernel's files have content, but no length.
        assert!(read_text(Path::new("/proc/self/status"), 1 << 20).unwrap().contains("Pid:"));
        let status = read_regular_file(Path::new("/proc/self/status"), 100).unwrap_err();
        assert_eq!(status.kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn only_regular_files_are_opened() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        mkfifo(&path("fifo"), Mode::S_IRUSR).unwrap();
        symlink("/dev/zero", path("device")).unwrap();
        for name in ["fifo", "device"] {
            let error = read_regular_file(&path(name), 9).unwrap_err();
            assert_eq!(error.to_string(), "not a regular file", "{name}");
        }
        assert_eq!(read_regular_file(dir.path(), 9).unwrap_err().kind(), ErrorKind::IsADirectory);
        let huge = File::create(path("huge")).unwrap();
        huge.set_len(1 << 40).unwrap();
        assert_eq!(
            read_regular_file(&path("huge"), 2048).unwrap_err().to_string(),
            "larger than 2 KiB"
        );
    }
}
