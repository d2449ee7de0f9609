//! Descriptors that the plugin passes to the daemon with an ADD, as ancillary data of its request
//! (`SCM_RIGHTS`).
//!
//! A daemon that does not expect them discards them, and a plugin that passes none is served as far
//! as the daemon can open the namespace itself.

use std::fs;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open};
use nix::sys::stat::Mode;
use nix::sys::statfs::{PROC_SUPER_MAGIC, statfs};
use rustix::cmsg_space;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// The most descriptors of a request.
const MOST: usize = 2;
/// The most links that a path is followed through, as in the kernel.
const MOST_LINKS: usize = 40;

#[derive(Debug, Default)]
pub struct PassedDescriptors {
    /// The container's network namespace.
    pub netns: Option<OwnedFd>,
    /// The directory of the [`ProcfsLink`] that the path of the namespace is or leads to.
    pub directory: Option<OwnedFd>,
}

impl PassedDescriptors {
    /// The descriptors in the order of [`send_line`].
    pub fn from_descriptors(descriptors: Vec<OwnedFd>) -> PassedDescriptors {
        let mut descriptors = descriptors.into_iter();
        PassedDescriptors { netns: descriptors.next(), directory: descriptors.next() }
    }
}

/// Sends `line`, with the descriptors beside its first bytes.
pub fn send_line(
    mut stream: &UnixStream,
    line: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MOST))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(ErrorKind::InvalidInput.into());
    }
    let sent = sendmsg(stream, &[IoSlice::new(line)], &mut control, SendFlags::NOSIGNAL)?;
    stream.write_all(&line[sent..])
}

/// Receives bytes, and adds the descriptors beside them to `descriptors`. Those above [`MOST`] are
/// closed.
pub fn receive_bytes(
    stream: impl AsFd,
    buffer: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MOST))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(stream, &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            descriptors.extend(passed);
        }
    }
    descriptors.truncate(MOST);
    Ok(received.bytes)
}

/// A link of procfs to a namespace, such as `/proc/<pid>/ns/net`. It exists as long as the process;
/// opening what it points to needs `CAP_SYS_PTRACE`, but looking whether it exists needs only a
/// descriptor of its directory.
#[derive(Debug)]
pub struct ProcfsLink {
    directory: OwnedFd,
    path: PathBuf,
}

impl ProcfsLink {
    /// The link that `path` is, or leads to through symbolic links; `None` for any other path, such
    /// as a mount.
    pub fn from_path(path: &Path) -> io::Result<Option<ProcfsLink>> {
        let mut path = path.to_owned();
        for _ in 0..MOST_LINKS {
            let (Some(directory), Some(name)) = (path.parent(), path.file_name()) else { break };
            if !path.symlink_metadata()?.is_symlink() {
                break;
            }
            if statfs(directory)?.filesystem_type() == PROC_SUPER_MAGIC {
                let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
                let directory = open(directory, flags, Mode::empty())?;
                let path = fs::read_link(proc_self_path(&directory))?.join(name);
                return Ok(Some(ProcfsLink { directory, path }));
            }
            path = directory.join(fs::read_link(&path)?);
        }
        Ok(None)
    }

    /// The link at `path` in a directory that a plugin has passed.
    pub fn from_directory(directory: OwnedFd, path: PathBuf) -> ProcfsLink {
        ProcfsLink { directory, path }
    }

    pub fn directory_fd(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// The path of the link, without symbolic links before it.
    pub fn link_path(&self) -> &Path {
        &self.path
    }

    /// The path of the link through the open directory, which never leads to another process with
    /// the same id.
    pub fn descriptor_path(&self) -> PathBuf {
        proc_self_path(&self.directory).join(self.path.file_name().unwrap_or_default())
    }

    /// Whether the link exists; unknown after an error.
    pub fn exists(&self) -> io::Result<bool> {
        match self.descriptor_path().symlink_metadata() {
            Ok(meta) => Ok(meta.is_symlink()),
            Err(e) if e.kind() == ErrorKind::NotFound => Ok(false),
            Err(e) if e.raw_os_error() == Some(Errno::ESRCH as i32) => Ok(false),
            Err(e) => Err(e),
        }
    }
}

fn proc_self_path(directory: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", directory.as_raw_fd()).into()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::symlink;
    use std::process::Command;

    use super::*;

    #[test]
    fn descriptors_arrive_with_the_line() {
        let (one, two) = UnixStream::pair().unwrap();
        let file = File::open("/proc/self/status").unwrap();
        let line = vec![b'x'; 100_000];
        let mut descriptors = Vec::new();
        std::thread::scope(|scope| {
            scope.spawn(|| send_line(&one, &line, &[file.as_fd(), file.as_fd()]).unwrap());
            let (mut buffer, mut read) = ([0; 4096], 0);
            while read < line.len() {
                read += receive_bytes(&two, &mut buffer, &mut descriptors).unwrap();
            }
        });
        assert_eq!(descriptors.len(), 2);
        let passed = PassedDescriptors::from_descriptors(descriptors);
        assert!(passed.netns.is_some() && passed.directory.is_some());
        // A reader that takes no descriptors.
        send_line(&one, b"line\n", &[file.as_fd()]).unwrap();
        let mut line = String::new();
        io::BufRead::read_line(&mut io::BufReader::new(&two), &mut line).unwrap();
        assert_eq!(line, "line\n");
        // A writer that passes no descriptors.
        (&one).write_all(b"line\n").unwrap();
        let mut descriptors = Vec::new();
        assert_eq!(receive_bytes(&two, &mut [0; 9], &mut descriptors).unwrap(), 5);
        assert!(descriptors.is_empty());
    }

    #[test]
    fn more_descriptors_than_expected_are_closed() {
        let (one, two) = UnixStream::pair().unwrap();
        let file = File::open("/proc/self/status").unwrap();
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(9))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let nine = [file.as_fd(); 9];
        assert!(control.push(SendAncillaryMessage::ScmRights(&nine)));
        sendmsg(&one, &[IoSlice::new(b"x")], &mut control, SendFlags::empty()).unwrap();
        send_line(&one, b"y", &[file.as_fd()]).unwrap();
        let mut descriptors = Vec::new();
        for _ in 0..2 {
            receive_bytes(&two, &mut [0; 1], &mut descriptors).unwrap();
        }
        assert_eq!(descriptors.len(), MOST);
    }

    #[test]
    fn a_link_is_found_through_links_and_ends_with_its_process() {
        let dir = tempfile::tempdir().unwrap();
        let mut process = Command::new("sleep").arg("60").spawn().unwrap();
        let real = PathBuf::from(format!("/proc/{}/ns/net", process.id()));
        symlink(&real, dir.path().join("one")).unwrap();
        symlink("one", dir.path().join("two")).unwrap();
        let link = ProcfsLink::from_path(&dir.path().join("two")).unwrap().unwrap();
        assert_eq!(link.link_path(), real);
        assert!(link.exists().unwrap());
        let held = link.directory_fd().try_clone_to_owned().unwrap();
        let same = ProcfsLink::from_directory(held, real);
        assert!(same.exists().unwrap());
        process.kill().unwrap();
        process.wait().unwrap();
        assert!(!link.exists().unwrap() && !same.exists().unwrap());
        let own = ProcfsLink::from_path(Path::new("/proc/self/ns/net")).unwrap().unwrap();
        let expected = PathBuf::from(format!("/proc/{}/ns/net", std::process::id()));
        assert_eq!(own.link_path(), expected);
    }

    #[test]
    fn paths_outside_of_procfs_are_not_links_of_procfs() {
        let dir = tempfile::tempdir().unwrap();
        symlink("loop", dir.path().join("loop")).unwrap();
        symlink("/etc/passwd", dir.path().join("file")).unwrap();
        for path in [dir.path().join("loop"), dir.path().join("file"), "/".into()] {
            assert!(
                ProcfsLink::from_path(&path).is_ok_and(|link| link.is_none()),
                "{}",
                path.display()
            );
        }
        assert!(ProcfsLink::from_path(Path::new("/proc/self/status")).unwrap().is_none());
        assert!(ProcfsLink::from_path(&dir.path().join("none")).is_err());
    }
}
