//! Locks by flock(2) on a file, as in the reference plugins.

use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use fs2::FileExt;
use nix::fcntl::{AT_FDCWD, OFlag};
use nix::sys::stat::{Mode, major, minor};

use super::dir::{self, OpenDirectory, open_regular};
use crate::netns::Netns;
use crate::trace;
use cni::files::{FileError, FileOperationContext, FileResult, remove_file};
use cni::sort::sort_by_key;

/// The default timeout of a store's lock. Commands of this program hold the lock for milliseconds,
/// those of the reference with 60,000 leases for seconds.
pub const TIMEOUT: Duration = Duration::from_secs(10);

/// How long a deletion waits for an attachment's lock before it continues without the lock. A
/// process that may hold another lock waits as long: two such processes may wait for each other.
pub const BRIEF: Duration = Duration::from_secs(2);

/// How often the holder of a lock is looked for.
const HOLDER_READS: usize = 3;

/// Read access is enough for flock(2), and possible if the file system became read-only.
const FLAGS: OFlag = OFlag::O_RDONLY.union(OFlag::O_CREAT);
const MODE: Mode = Mode::S_IRUSR.union(Mode::S_IWUSR).union(Mode::S_IRGRP);

/// The directory of locks for state outside of the networks' directories: owned by root, and not
/// visible in containers.
const TURNS: &str = "/run/cni/cnibox";
/// The prefix and the suffix of the names of containers' locks.
const OF_NETNS: (&str, &str) = ("netns-", ".lock");

/// Prefix and suffix of the names of attachments' locks.
const OF_ATTACHMENT: (&str, &str) = ("turn-", ".lock");

fn attachment_lock_name(instance: &str) -> String {
    let (prefix, suffix) = OF_ATTACHMENT;
    format!("{prefix}{instance}{suffix}")
}

/// An exclusive lock, held until it is dropped or the process ends.
#[derive(Debug)]
pub struct FileLock {
    /// Closing the file releases the lock; close-on-exec, so that child processes do not hold it.
    file: Arc<File>,
    /// The path of a file that ends with the lock: see [`FileLock::acquire_with_removal`].
    passing: Option<PathBuf>,
}

impl Drop for FileLock {
    /// Removes the file while the lock is held.
    fn drop(&mut self) {
        if let Some(path) = &self.passing {
            remove_file(path).unwrap_or_else(|error| debug!("could not {error}"));
        }
    }
}

impl FileLock {
    /// Waits for the lock on `path`, which is created (0640) if it is missing.
    pub fn acquire_exclusive(path: &Path) -> FileResult<FileLock> {
        FileLock::acquire_within(path, Duration::MAX)
    }

    /// Waits at most [`TIMEOUT`] for the lock `name` of this host, for state outside of the
    /// networks' directories. `None` if the directory of these locks cannot be used: the caller
    /// proceeds without a lock.
    pub fn acquire_host_lock(name: &str) -> FileResult<Option<FileLock>> {
        FileLock::acquire_in_lock_directory(name, |path| FileLock::acquire_within(path, TIMEOUT))
    }

    /// As [`FileLock::acquire_host_lock`], for the lock of an attachment, whose file is removed
    /// with the lock. Waits at most `timeout`.
    pub fn acquire_attachment_lock(
        instance: &str,
        timeout: Duration,
    ) -> FileResult<Option<FileLock>> {
        FileLock::acquire_in_lock_directory(&attachment_lock_name(instance), |path| {
            FileLock::acquire_with_removal(path, timeout)
        })
    }

    /// The lock of an attachment, whose file is removed with the lock; `None` if it is held.
    pub fn try_acquire_attachment_lock(instance: &str) -> FileResult<Option<FileLock>> {
        let path = Path::new(TURNS).join(attachment_lock_name(instance));
        let lock = FileLock::try_acquire_exclusive(&path)?;
        Ok(lock.and_then(|lock| lock.with_file_removal(&path)))
    }

    fn acquire_in_lock_directory(
        name: &str,
        take: impl Fn(&Path) -> FileResult<FileLock>,
    ) -> FileResult<Option<FileLock>> {
        let (dir, path) = (Path::new(TURNS), Path::new(TURNS).join(name));
        let taken = match take(&path) {
            Err(e) if e.source.kind() == ErrorKind::NotFound => {
                dir::ensure_directory(dir, 0o700).and_then(|()| take(&path))
            }
            taken => taken,
        };
        match taken {
            Ok(lock) => Ok(Some(lock)),
            Err(error) if error.source.kind() == ErrorKind::TimedOut => Err(error),
            Err(error) => {
                debug!("could not {error}");
                Ok(None)
            }
        }
    }

    /// Waits for the lock on a container's rules and routes. It is not a lock on the namespace's
    /// file, which any process in the container could hold.
    pub fn acquire_netns_lock(netns: &Netns) -> cni::error::Result<Option<FileLock>> {
        let (device, inode) = netns.device_and_inode()?;
        let (prefix, suffix) = OF_NETNS;
        Ok(FileLock::acquire_in_lock_directory(
            &format!("{prefix}{device}-{inode}{suffix}"),
            |path| FileLock::acquire_with_removal(path, TIMEOUT),
        )?)
    }

    /// Removes the files of containers' locks that killed processes left.
    pub fn remove_stale_locks() {
        FileLock::remove_stale_locks_in(Path::new(TURNS));
    }

    fn remove_stale_locks_in(dir: &Path) {
        let entries = fs::read_dir(dir).into_iter().flatten().flatten();
        for path in entries.filter(|entry| {
            entry.file_name().to_str().is_some_and(|name| {
                [OF_NETNS, OF_ATTACHMENT]
                    .iter()
                    .any(|(prefix, suffix)| name.starts_with(prefix) && name.ends_with(suffix))
            })
        }) {
            let path = path.path();
            // Not created: another process may have removed it.
            let file = open_regular(AT_FDCWD, &path, OFlag::O_RDONLY, Mode::empty());
            let lock =
                file.ok().and_then(|(file, _)| FileLock::try_acquire_open(file, &path).ok()?);
            drop(lock.and_then(|lock| lock.with_file_removal(&path)));
        }
    }

    /// Takes the lock on `path`; `None` if it is held.
    pub fn try_acquire_exclusive(path: &Path) -> FileResult<Option<FileLock>> {
        FileLock::try_acquire_open(open_lock_file(path)?, path)
    }

    /// As [`FileLock::try_acquire_exclusive`], for the open file of `path`.
    pub(crate) fn try_acquire_open(file: File, path: &Path) -> FileResult<Option<FileLock>> {
        let file = Arc::new(file);
        Ok(try_lock(&file, path)?.then_some(FileLock { file, passing: None }))
    }

    /// Waits for the lock at most `timeout`; the error names the process that holds it.
    pub fn acquire_within(path: &Path, timeout: Duration) -> FileResult<FileLock> {
        FileLock::wait_for_lock(open_lock_file(path)?, path, timeout)
    }

    /// As [`FileLock::acquire_within`], for a lock file that is removed with the lock, so that a
    /// container leaves no lock file.
    fn acquire_with_removal(path: &Path, timeout: Duration) -> FileResult<FileLock> {
        let (start, mut left) = (Instant::now(), timeout);
        loop {
            let lock = FileLock::acquire_within(path, left)?;
            // The former holder has removed the file that this process waited for: others use a new
            // one.
            if let Some(lock) = lock.with_file_removal(path) {
                return Ok(lock);
            }
            left = timeout.saturating_sub(start.elapsed());
        }
    }

    /// The lock, whose file ends with it; `None` if the file is no longer at `path`. The file at
    /// `path` stays the same while its lock is held, because only the holder removes it. The
    /// file has no other name.
    fn with_file_removal(mut self, path: &Path) -> Option<FileLock> {
        let is_there = self.file.metadata().ok()?.nlink() > 0;
        self.passing = is_there.then(|| path.to_owned());
        is_there.then_some(self)
    }

    /// As [`FileLock::acquire_within`], for the lock of a store.
    pub(crate) fn acquire_store_lock(
        store: &OpenDirectory,
        timeout: Duration,
    ) -> FileResult<FileLock> {
        let path = store.file_path("lock");
        let file = store.open_file("lock", FLAGS, MODE).during("open lock", &path)?;
        FileLock::wait_for_lock(file.0, &path, timeout)
    }

    fn wait_for_lock(file: File, path: &Path, timeout: Duration) -> FileResult<FileLock> {
        let file = Arc::new(file);
        if try_lock(&file, path)? {
            return Ok(FileLock { file, passing: None });
        }
        if timeout.is_zero() {
            return Err(held_error(path, format!("held by {}", describe_holder(&file))));
        }
        let span = trace::begin_span("lock wait");
        span.add_text("file.path", || path.display().to_string());
        // A thread blocks in flock(2), so that the kernel wakes it up; polling would add latency.
        let (waiting, (done, outcome)) = (Arc::clone(&file), sync_channel(1));
        let waiter = move || {
            let outcome = loop {
                match waiting.lock_exclusive() {
                    Err(e) if e.kind() == ErrorKind::Interrupted => {}
                    outcome => break outcome,
                }
            };
            // Dropped before sending: the receiver of the outcome must be the only holder of the
            // lock.
            drop(waiting);
            drop(done.send(outcome));
        };
        let thread = thread::Builder::new().stack_size(64 * 1024).spawn(waiter);
        drop(thread.during("start a thread for lock", path)?);
        match outcome.recv_timeout(timeout) {
            Ok(outcome) => {
                outcome.during("take lock", path).map(|()| FileLock { file, passing: None })
            }
            Err(RecvTimeoutError::Timeout) => {
                let holder = describe_holder(&file);
                let seconds = timeout.as_secs_f32();
                Err(held_error(path, format!("held for more than {seconds} s by {holder}")))
            }
            Err(RecvTimeoutError::Disconnected) => {
                Err(FileError::new("take lock", path, ErrorKind::Other))
            }
        }
    }
}

fn held_error(path: &Path, text: String) -> FileError {
    FileError::new("take lock", path, io::Error::new(ErrorKind::TimedOut, text))
}

fn open_lock_file(path: &Path) -> FileResult<File> {
    open_regular(AT_FDCWD, path, FLAGS, MODE).map(|(file, _)| file).during("open lock", path)
}

fn try_lock(file: &File, path: &Path) -> FileResult<bool> {
    match FileExt::try_lock_exclusive(file) {
        Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(false),
        locked => locked.during("take lock", path).map(|()| true),
    }
}

/// The process that holds the lock, by `/proc/locks`. The kernel leaves lines out if others take and
/// release locks between two reads of the file.
fn describe_holder(file: &File) -> String {
    let find = |meta: &Metadata| {
        let locks = fs::read_to_string("/proc/locks").ok()?;
        holder_pid(&locks, meta.dev(), meta.ino())
    };
    let pid = file.metadata().ok().and_then(|meta| (0..HOLDER_READS).find_map(|_| find(&meta)));
    pid.map_or_else(
        || "an unknown process".to_owned(),
        |pid| describe_process(Path::new("/proc").join(pid.to_string()).as_path(), pid),
    )
}

/// The process in a line such as `1: FLOCK  ADVISORY  WRITE 4711 08:01:1234 0 EOF`; lines of
/// waiting processes have an arrow. A file system with several devices may show another device than
/// stat(2) does.
fn holder_pid(locks: &str, dev: u64, ino: u64) -> Option<u32> {
    let held = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["FLOCK", _, _, pid, file, ..] = words.get(1..)? else { return None };
        let (device, inode) = file.rsplit_once(':')?;
        let here = device == format!("{:02x}:{:02x}", major(dev), minor(dev));
        (inode.parse() == Ok(ino)).then_some((here, pid.parse().ok()?))
    };
    let mut held: Vec<(bool, u32)> = locks.lines().filter_map(held).collect();
    sort_by_key(&mut held, |(here, _)| !here);
    // 0: a process of another pid namespace.
    held.first().map(|(_, pid)| *pid).filter(|pid| *pid > 0)
}

/// Program, verb and container of a process.
fn describe_process(proc: &Path, pid: u32) -> String {
    let read = |name: &str| fs::read(proc.join(name)).unwrap_or_default();
    let (arguments, environment) = (read("cmdline"), read("environ"));
    let words = |bytes: &[u8]| -> Vec<String> {
        let words = bytes.split(|byte| *byte == 0).filter(|word| !word.is_empty());
        words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()
    };
    let (arguments, environment) = (words(&arguments), words(&environment));
    let Some((program, arguments)) = arguments.split_first() else {
        return format!("process {pid}, which has ended: one of its children holds the lock");
    };
    let program = program.rsplit('/').next().unwrap_or(program);
    let variable = |name: &str| environment.iter().find_map(|word| word.strip_prefix(name));
    match (variable("CNI_COMMAND="), variable("CNI_CONTAINERID=")) {
        (Some(verb), Some(id)) => format!("process {pid} ({program}, {verb} of container {id})"),
        (Some(verb), None) => format!("process {pid} ({program}, {verb})"),
        (None, _) => {
            let line = [&[program.to_owned()], arguments].concat().join(" ");
            format!("process {pid} ({})", line.chars().take(100).collect::<String>())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::AtomicU32;
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn a_lock_excludes_others_until_it_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let lock = FileLock::acquire_exclusive(&path).unwrap();
        let other = File::open(&path).unwrap();
        assert!(FileExt::try_lock_exclusive(&other).is_err());
        drop(lock);
        assert!(FileExt::try_lock_exclusive(&other).is_ok());
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o137, 0);
    }

    #[test]
    fn a_timeout_names_the_holder() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let lock = FileLock::acquire_within(&path, TIMEOUT).unwrap();
        let error = FileLock::acquire_within(&path, Duration::from_millis(30)).unwrap_err();
        let error = cni::error::Error::from(error);
        let (pid, path_text) = (std::process::id(), path.display());
        let start = format!("take lock {path_text}: held for more than 0.03 s by process {pid} (");
        assert!(error.message().starts_with(&start), "{error}");
        assert_eq!(error.code(), cni::error::ErrorCode::TRY_AGAIN);
        // The waiter that is left behind takes the lock and releases it.
        drop(lock);
        drop(FileLock::acquire_within(&path, TIMEOUT).unwrap());
    }

    #[test]
    fn a_released_lock_wakes_the_waiter_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let lock = FileLock::acquire_exclusive(&path).unwrap();
        let start = Instant::now();
        thread::scope(|scope| {
            scope.spawn(|| FileLock::acquire_within(&path, TIMEOUT).unwrap());
            thread::sleep(Duration::from_millis(20));
            drop(lock);
        });
        assert!(start.elapsed() < TIMEOUT / 2);
    }

    #[test]
    fn a_removed_lock_file_still_excludes_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("netns-1-2.lock");
        let (inside, most) = (AtomicU32::new(0), AtomicU32::new(0));
        thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let _lock = FileLock::acquire_with_removal(&path, TIMEOUT).unwrap();
                        most.fetch_max(inside.fetch_add(1, Relaxed) + 1, Relaxed);
                        thread::yield_now();
                        inside.fetch_sub(1, Relaxed);
                    }
                });
            }
        });
        assert_eq!((most.into_inner(), path.exists()), (1, false));
    }

    #[test]
    fn lock_files_of_killed_processes_are_removed_unless_held() {
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name);
        for name in ["netns-1-2.lock", "netns-3-4.lock", "other.lock"] {
            File::create(path(name)).unwrap();
        }
        let held = FileLock::acquire_with_removal(&path("netns-3-4.lock"), TIMEOUT).unwrap();
        FileLock::remove_stale_locks_in(dir.path());
        let left = |name: &str| path(name).exists();
        assert!(!left("netns-1-2.lock") && left("netns-3-4.lock") && left("other.lock"));
        drop(held);
        assert!(!left("netns-3-4.lock"));
    }

    #[test]
    fn the_holder_is_read_from_proc_locks() {
        let locks = "1: FLOCK  ADVISORY  WRITE 10 08:01:7 0 EOF\n1: -> FLOCK  ADVISORY  WRITE 11 \
                     08:01:9 0 EOF\n2: POSIX  ADVISORY  WRITE 12 08:01:9 0 EOF\n3: FLOCK  \
                     ADVISORY  WRITE 13 00:2f:9 0 EOF\n4: FLOCK  ADVISORY  WRITE 14 08:01:9 0 \
                     EOF\n5: FLOCK  ADVISORY  WRITE 0 08:01:5 0 EOF\n";
        let dev = nix::sys::stat::makedev(8, 1);
        assert_eq!(holder_pid(locks, dev, 9), Some(14));
        assert_eq!(holder_pid(locks, 99, 9), Some(13), "another device as a fallback");
        assert_eq!(holder_pid(locks, dev, 5), None, "of another pid namespace");
        assert_eq!(holder_pid(locks, dev, 1), None);
    }

    #[test]
    fn a_failed_open_names_the_file() {
        let error = FileLock::acquire_exclusive(Path::new("/nowhere/lock")).unwrap_err();
        let error = cni::error::Error::from(error);
        assert_eq!(error.message(), "open lock /nowhere/lock: no such file or directory");
        assert_eq!(error.code(), cni::error::ErrorCode::IO);
    }
}
