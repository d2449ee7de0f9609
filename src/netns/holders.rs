//! Searches for the processes, mounts and descriptors that hold network namespaces.
//!
//! A namespace exists as long as a thread is in it, a mount refers to it or a descriptor has it open. A process that sees
//! all processes finds all three in `/proc`; for other processes the search has no certain result. The search does not
//! find a namespace that only a socket holds, in which no process can be, a mount in a mount namespace without processes,
//! and descriptors of processes that a security module hides from root.

use std::collections::{HashMap, HashSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// The inode number of the initial PID namespace (`PROC_PID_INIT_INO`).
const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";
/// The mounts of the calling thread.
const OWN_MOUNTS: &str = "/proc/thread-self/mountinfo";

/// The result of a search for namespaces.
#[derive(Debug, Default)]
pub struct Holders {
    /// For each number that is in use, a path that leads to the namespace.
    by_number: HashMap<u32, PathBuf>,
    /// Why a namespace that was not found may still exist.
    doubt: Option<String>,
}

impl Holders {
    /// Looks for the namespaces of these numbers.
    pub fn find(wanted: &HashSet<u32>) -> Holders {
        let mut search = Search { wanted, found: Holders::default(), hidden: Vec::new() };
        if wanted.is_empty() {
            return search.found;
        }
        search.mounts(Path::new(OWN_MOUNTS), Path::new("/"));
        if !search.is_done() {
            search.require_sight();
        }
        // Twice: a process that was looked at late may have passed a namespace to a process that was looked
        // at early.
        for _ in 0..2 {
            if !search.is_done() {
                search.processes();
            }
        }
        search.found
    }

    /// A path that leads to the namespace of this number, if it exists.
    pub fn holder(&self, ino: u32) -> Option<&Path> {
        self.by_number.get(&ino).map(PathBuf::as_path)
    }

    /// Why a namespace that was not found may still exist; `None` if it cannot.
    pub fn doubt(&self) -> Option<&str> {
        self.doubt.as_deref()
    }
}

struct Search<'a> {
    wanted: &'a HashSet<u32>,
    found: Holders,
    /// Processes and threads whose namespace cannot be read.
    hidden: Vec<PathBuf>,
}

impl Search<'_> {
    fn is_done(&self) -> bool {
        self.found.by_number.len() == self.wanted.len()
    }

    fn found(&mut self, ino: u32, holder: impl FnOnce() -> PathBuf) {
        if self.wanted.contains(&ino) {
            self.found.by_number.entry(ino).or_insert_with(holder);
        }
    }

    fn require_sight(&mut self) {
        let own = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        if own != Path::new(FIRST_PID_NAMESPACE) {
            let why = "processes outside of this pid namespace cannot be seen";
            self.found.doubt = Some(why.to_owned());
        }
        // If /proc hides processes of other users (`hidepid`), it hides process 1 as well.
        if net_of(Path::new("/proc/1")).is_none() {
            self.found.doubt = Some("/proc does not show all processes".to_owned());
        }
    }

    fn processes(&mut self) {
        let mut mounts = HashSet::new();
        let Some(processes) = self.list(Path::new("/proc")) else { return };
        let processes: Vec<_> = processes.into_iter().filter(|path| is_number(path)).collect();
        for process in &processes {
            self.namespace_of(process);
            let id = fs::read_link(process.join("ns/mnt")).ok();
            if id.is_none_or(|id| mounts.insert(id)) {
                self.mounts(&process.join("mountinfo"), &process.join("root"));
            }
        }
        for process in &processes {
            if self.is_done() {
                return;
            }
            for thread in self.list(&process.join("task")).unwrap_or_default() {
                self.namespace_of(&thread);
            }
            let descriptors = fs::read_dir(process.join("fd")).into_iter().flatten();
            for descriptor in descriptors.flatten() {
                self.descriptor(process, &descriptor.path());
            }
        }
        self.unveil(&processes);
    }

    /// A process whose namespace cannot be read does no harm if it shares the namespace of a readable process; else it may
    /// hold any namespace.
    fn unveil(&mut self, processes: &[PathBuf]) {
        let hidden = std::mem::take(&mut self.hidden);
        if hidden.is_empty() {
            return;
        }
        let open = processes.iter().filter(|process| fs::read_link(process.join("ns/net")).is_ok());
        let known: HashSet<u64> = open.filter_map(|process| net_of(process)).collect();
        for process in hidden {
            if net_of(&process).is_some_and(|net| !known.contains(&net)) {
                let why = format!("the namespace of {} cannot be read", process.display());
                self.found.doubt = Some(why);
            }
        }
    }

    fn namespace_of(&mut self, process: &Path) {
        let path = process.join("ns/net");
        match fs::read_link(&path) {
            Err(e) if is_denied(&e) => self.hidden.push(process.to_owned()),
            target => {
                let target = self.seen(&path, target);
                if let Some(ino) = target.and_then(|target| number(target.to_str()?)) {
                    self.found(ino, || path);
                }
            }
        }
    }

    /// The link of a descriptor of a namespace is `net:[<number>]`, or the mount point that it was opened at; then `fdinfo`
    /// has the number.
    fn descriptor(&mut self, process: &Path, path: &Path) {
        // Descriptors of a process that cannot be inspected: `unveil` decides whether that matters.
        let Ok(target) = fs::read_link(path) else { return };
        let ino = match target.to_str().and_then(number) {
            None if target.is_absolute() => self.info(process, path),
            ino => ino,
        };
        if let Some(ino) = ino {
            self.found(ino, || path.to_owned());
        }
    }

    fn info(&mut self, process: &Path, descriptor: &Path) -> Option<u32> {
        let path = process.join("fdinfo").join(descriptor.file_name()?);
        let text = self.seen(&path, fs::read_to_string(&path))?;
        let Some(ino) = text.lines().find_map(|line| line.strip_prefix("ino:")) else {
            // Kernels before 5.14.
            self.found.doubt = Some(format!("{} has no inode number", path.display()));
            return None;
        };
        ino.trim().parse().ok()
    }

    /// The namespaces that are mounted: in a line of mountinfo the fourth word is the root of the mount within its file
    /// system, the fifth the mount point (`proc_pid_mountinfo(5)`).
    fn mounts(&mut self, path: &Path, root: &Path) {
        let Some(text) = self.seen(path, fs::read(path)) else { return };
        for line in String::from_utf8_lossy(&text).lines() {
            let mut words = line.split(' ').skip(3);
            if let (Some(mounted), Some(point)) = (words.next(), words.next())
                && let Some(ino) = number(mounted)
            {
                self.found(ino, || root.join(unescaped(point).trim_start_matches('/')));
            }
        }
    }

    fn list(&mut self, path: &Path) -> Option<Vec<PathBuf>> {
        let entries =
            fs::read_dir(path).and_then(|dir| dir.map(|entry| Ok(entry?.path())).collect());
        self.seen(path, entries)
    }

    /// A process that has ended holds nothing (reading the mounts of a zombie fails with EINVAL); a file that cannot be read
    /// leaves a doubt.
    fn seen<T>(&mut self, path: &Path, result: io::Result<T>) -> Option<T> {
        result
            .inspect_err(|e| {
                let gone = [nix::libc::ENOENT, nix::libc::ESRCH, nix::libc::EINVAL];
                if !e.raw_os_error().is_some_and(|errno| gone.contains(&errno)) {
                    let why = crate::error::io_text(e);
                    self.found.doubt = Some(format!("read {}: {why}", path.display()));
                }
            })
            .ok()
    }
}

/// The inode of a file of `/proc/<pid>/net`, which is the same for all processes in one network namespace and readable
/// without permission to inspect the process.
fn net_of(process: &Path) -> Option<u64> {
    fs::metadata(process.join("net/dev")).ok().map(|meta| meta.ino())
}

fn is_denied(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(nix::libc::EACCES | nix::libc::EPERM))
}

/// The number in `net:[4026532177]`.
fn number(target: &str) -> Option<u32> {
    target.strip_prefix("net:[")?.strip_suffix(']')?.parse().ok()
}

fn is_number(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    !name.is_empty() && name.iter().all(u8::is_ascii_digit)
}

/// Mountinfo escapes blanks, tabs, newlines and backslashes as octal numbers such as `\040`.
fn unescaped(text: &str) -> String {
    let mut out = String::new();
    let mut parts = text.split('\\');
    out.push_str(parts.next().unwrap_or_default());
    for part in parts {
        let code = part.get(..3).and_then(|code| u8::from_str_radix(code, 8).ok());
        match code {
            Some(code) => {
                out.push(char::from(code));
                out.push_str(&part[3..]);
            }
            None => out.push_str(part),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::{Netns, NetnsId, isolate};

    fn holders(id: NetnsId) -> Holders {
        Holders::find(&HashSet::from([id.ino]))
    }

    #[test]
    fn a_namespace_is_found_by_the_descriptor_that_holds_it() {
        isolate();
        let ns = Netns::fresh().unwrap();
        let id = NetnsId::at(ns.path()).unwrap();
        assert!(id.ctime > 0, "a descriptor pins it");
        let found = holders(id);
        assert_eq!(NetnsId::of_holder(found.holder(id.ino).unwrap()), Some(id));
        drop(ns);
        // Another test may have got the number since.
        let after = holders(id);
        assert!(after.holder(id.ino).and_then(NetnsId::of_holder) != Some(id), "{after:?}");
        assert_eq!(after.doubt(), None);
    }

    #[test]
    fn a_namespace_is_found_by_the_thread_that_is_in_it() {
        isolate();
        let own = NetnsId::at(Path::new("/proc/thread-self/ns/net")).unwrap();
        assert_eq!(own.ctime, 0, "nothing pins it");
        let found = holders(own);
        assert!(found.holder(own.ino).is_some(), "{found:?}");
    }

    #[test]
    fn other_files_have_no_identity() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for path in ["/no/such", "", "/proc/self/status", file.path().to_str().unwrap()] {
            assert_eq!(NetnsId::at(Path::new(path)), None, "{path}");
        }
    }

    #[test]
    fn texts_of_the_kernel() {
        assert_eq!(number("net:[4026532177]"), Some(4_026_532_177));
        assert_eq!((number("mnt:[4026532177]"), number("/run/netns/x")), (None, None));
        assert_eq!(unescaped(r"/a\040b\134"), r"/a b\");
    }

    #[test]
    fn a_search_for_nothing_has_no_doubt() {
        assert!(Holders::find(&HashSet::new()).doubt().is_none());
    }
}
