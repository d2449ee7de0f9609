//! The threads in a network namespace, as procfs shows them.
//!
//! That none is seen proves nothing: a descriptor or a mount of another process may keep the
//! namespace alive. It decides only whether the daemon lets go of the namespace.

use std::collections::HashMap;
use std::fs::{self, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process;

use nix::errno::Errno;

/// The link to the namespace of a thread, which needs `CAP_SYS_PTRACE`.
pub(super) const NAMESPACE: &str = "ns/net";
/// A file of the namespace of a thread. It is the same one for all threads in the namespace, and
/// needs no capability.
const FILE: &str = "net/dev";
const PROCESSES: &str = "/proc";
const OWN_THREAD: &str = "/proc/thread-self";

/// Whether the process is visible, with the files of its network namespace.
pub(super) fn is_visible(process: u32) -> bool {
    Path::new(PROCESSES).join(process.to_string()).join(FILE).metadata().is_ok()
}

/// A thread of another process in the namespace of the calling thread, as a directory of procfs:
/// `known`, if it is still there. An error says nothing.
pub(super) fn find_in_namespace(known: Option<PathBuf>) -> io::Result<Option<PathBuf>> {
    let wanted = device_and_inode(&fs::metadata(Path::new(OWN_THREAD).join(FILE))?);
    let is_here = |thread: &Path| read_number(thread, FILE).map(|number| number == Some(wanted));
    match known {
        Some(known) if is_here(&known)? => return Ok(Some(known)),
        _ => {}
    }
    for process in other_processes()? {
        for thread in threads(&process)? {
            if is_here(&thread)? {
                return Ok(Some(thread));
            }
        }
    }
    Ok(None)
}

/// A thread of each namespace that can be opened, by device and inode of the namespace.
pub(super) fn all_namespaces() -> HashMap<(u64, u64), PathBuf> {
    let mut found = HashMap::new();
    for process in other_processes().unwrap_or_default() {
        for thread in threads(&process).unwrap_or_default() {
            if let Ok(Some(number)) = read_number(&thread, NAMESPACE) {
                found.entry(number).or_insert(thread);
            }
        }
    }
    found
}

/// The directories of all processes but this one.
fn other_processes() -> io::Result<Vec<PathBuf>> {
    let own = process::id();
    Ok(entries(Path::new(PROCESSES))?
        .into_iter()
        .filter(|path| file_number(path).is_some_and(|id| id != own))
        .collect())
}

/// The directories of the threads of a process; none if the process has ended.
fn threads(process: &Path) -> io::Result<Vec<PathBuf>> {
    unless_ended(entries(&process.join("task"))).map(Option::unwrap_or_default)
}

fn entries(directory: &Path) -> io::Result<Vec<PathBuf>> {
    fs::read_dir(directory)?.map(|entry| Ok(entry?.path())).collect()
}

fn file_number(path: &Path) -> Option<u32> {
    path.file_name()?.to_str()?.parse().ok()
}

/// Device and inode of a file of a thread; `None` if the thread has ended.
fn read_number(thread: &Path, file: &str) -> io::Result<Option<(u64, u64)>> {
    Ok(unless_ended(fs::metadata(thread.join(file)))?.as_ref().map(device_and_inode))
}

fn device_and_inode(meta: &Metadata) -> (u64, u64) {
    (meta.dev(), meta.ino())
}

/// `None` after the error of a process that has ended.
fn unless_ended<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(e)
            if e.kind() == ErrorKind::NotFound || e.raw_os_error() == Some(Errno::ESRCH as i32) =>
        {
            Ok(None)
        }
        Err(e) => Err(e),
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::netns::{Netns, isolate_test_thread};

    /// A process that inherits the namespace of the calling thread.
    fn sleeper() -> Child {
        Command::new("sleep").arg("60").spawn().unwrap()
    }

    #[test]
    fn a_process_is_seen_in_its_namespace_until_it_ends() {
        isolate_test_thread();
        assert_eq!(find_in_namespace(None).unwrap(), None, "the own process does not count");
        let mut process = sleeper();
        let expected = PathBuf::from(format!("/proc/{id}/task/{id}", id = process.id()));
        assert_eq!(find_in_namespace(None).unwrap().as_ref(), Some(&expected));
        assert_eq!(find_in_namespace(Some(expected.clone())).unwrap().as_ref(), Some(&expected));
        assert_eq!(
            find_in_namespace(Some("/proc/1/task/1".into())).unwrap(),
            Some(expected.clone())
        );
        assert!(is_visible(process.id()));
        let own = Netns::open_current().unwrap().device_and_inode().unwrap();
        assert_eq!(all_namespaces().get(&own), Some(&expected));
        process.kill().unwrap();
        // Also while it is not waited for.
        let deadline = Instant::now() + Duration::from_secs(60);
        while find_in_namespace(Some(expected.clone())).unwrap().is_some() {
            assert!(Instant::now() < deadline);
            thread::yield_now();
        }
        process.wait().unwrap();
        assert_eq!(find_in_namespace(None).unwrap(), None);
        assert!(!is_visible(process.id()) && !is_visible(0));
    }
}
