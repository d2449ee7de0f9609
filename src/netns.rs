//! Network namespaces: opening them, and running code in them.
//!
//! Only this file calls setns(2) and unshare(2). [`Netns::run_inside`] moves the calling thread
//! into the namespace and back, also after a panic. A thread that cannot return may still use the
//! descriptors that it opened on the host, for the rollback, but opening files, writing parameters
//! and starting programs are refused ([`require_home_netns`]). Starting a thread instead, as
//! [`Netns::spawn_inside`] does, costs a tenth of an ADD.

use std::cell::RefCell;
use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use std::{fmt, io, panic, process};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::libc;
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::socket::sockopt::GetStruct;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, getsockopt, socket};
use nix::sys::statfs::{FsType, NSFS_MAGIC, PROC_SUPER_MAGIC, statfs};
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use cni::error::{self, errno_text, io_text};
use cni::files::{self, open_file};

/// The namespace of the calling thread; `/proc/self/ns/net` is the main thread's.
const CURRENT: &str = "/proc/thread-self/ns/net";

/// Stack size in bytes: enough for a dozen netlink requests; the default of 2 MiB would use more
/// memory.
const STACK_SIZE: usize = 256 * 1024;

/// Clock ticks a second in files of `/proc`, on every architecture of this program.
const USER_HZ: u64 = 100;

/// Limit of the size of `/proc/<pid>/stat` in bytes.
const MAX_STAT_BYTES: usize = 4096;

/// The identity of a namespace, by a path to it.
///
/// The kernel reuses the inode number of a deleted namespace. The ctime of the inode distinguishes
/// the two namespaces if a mount or a descriptor pins the inode: for a namespace that only
/// processes hold, the kernel may create a new inode at every lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NetnsIdentity {
    /// The device of the file system of namespaces.
    pub dev: u64,
    /// The namespace's number.
    pub ino: u64,
    /// Nanoseconds of the inode's ctime; 0 if nothing pins the inode.
    pub ctime: i64,
}

impl NetnsIdentity {
    /// The identity of the namespace at `path`; `None` if there is none.
    pub fn at_path(path: &Path) -> Option<NetnsIdentity> {
        let own = path.symlink_metadata().ok()?;
        if statfs(path).ok()?.filesystem_type() != NSFS_MAGIC {
            return None;
        }
        // A mount is the namespace itself. A link such as /proc/<pid>/ns/net pins nothing, except
        // for a link to an open descriptor.
        let linked = own.is_symlink();
        let pinned = !linked || path.parent().is_some_and(|dir| dir.ends_with("fd"));
        let meta = if linked { fs::metadata(path).ok()? } else { own };
        let ctime = meta.ctime().wrapping_mul(1_000_000_000).wrapping_add(meta.ctime_nsec());
        Some(NetnsIdentity {
            dev: meta.dev(),
            ino: meta.ino(),
            ctime: if pinned { ctime } else { 0 },
        })
    }

    /// When the namespace at `path` was created or, in `/proc/<pid>`, when that process was
    /// started, by the present wall clock. `None` if there is no namespace, or this is unknown.
    pub fn creation_time(path: &Path) -> Option<SystemTime> {
        let ctime = NetnsIdentity::at_path(path)?.ctime;
        if ctime != 0 {
            return UNIX_EPOCH.checked_add(Duration::from_nanos(ctime.try_into().ok()?));
        }
        let process = path.strip_prefix("/proc").ok()?.components().next()?;
        let stat = Path::new("/proc").join(process).join("stat");
        let stat = files::read_text(&stat, MAX_STAT_BYTES).ok()?;
        // proc_pid_stat(5): starttime is the 20th field after the name of the program.
        let ticks: u64 = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
        let uptime = Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME).ok()?);
        let age = uptime.checked_sub(Duration::from_millis(ticks * (1000 / USER_HZ)))?;
        SystemTime::now().checked_sub(age)
    }
}

/// The socket option `SO_NETNS_COOKIE`.
#[derive(Clone, Copy, Debug)]
struct NetnsCookie;

nix::getsockopt_impl!(NetnsCookie, libc::SOL_SOCKET, libc::SO_NETNS_COOKIE, u64, GetStruct<u64>);

/// The cookie of the calling thread's namespace. Within a boot no two namespaces have the same
/// cookie, even if the kernel reuses an inode number. `None` before Linux 5.14. An error, such as
/// too many open files, says nothing about the cookie.
pub fn current_cookie() -> Result<Option<u64>, NetnsError> {
    let (flags, kind) = (SockFlag::SOCK_CLOEXEC, SockType::Datagram);
    let socket = socket(AddressFamily::Inet, kind, flags, None)
        .map_err(|e| syscall_error("open a socket in", CURRENT, e))?;
    Ok(getsockopt(&socket, NetnsCookie).ok())
}

/// The identity, within this boot, of the calling thread's network namespace: its
/// [`current_cookie`], or its inode number before Linux 5.14. Inode numbers of namespaces begin at
/// 0xf0000000, above all cookies.
pub fn current_id() -> Option<u64> {
    current_cookie().ok().flatten().or_else(current_inode)
}

/// As [`current_id`], by a socket that the calling thread has opened in its namespace.
pub fn id_by_socket(socket: &impl AsFd) -> Option<u64> {
    cookie_by_socket(socket).or_else(current_inode)
}

/// The [cookie](current_cookie) of the namespace in which a socket was opened; `None` if it is
/// unknown.
pub fn cookie_by_socket(socket: &impl AsFd) -> Option<u64> {
    getsockopt(socket, NetnsCookie).ok()
}

/// The inode number of the calling thread's network namespace, which the kernel reuses.
pub fn current_inode() -> Option<u64> {
    fs::metadata(CURRENT).ok().map(|meta| meta.ino())
}

/// Why a namespace could not be opened or entered.
#[derive(Debug)]
pub enum NetnsError {
    /// Something else is at the path, for example the plain file that remains of a bind mount after
    /// a reboot. Has the magic number of the file system.
    NotNamespace(PathBuf, FsType),
    /// The system call of this name failed on the path.
    Io(&'static str, PathBuf, io::Error),
    /// The calling thread could not return to the host's namespace.
    Stranded(Errno),
}

impl NetnsError {
    /// Whether the namespace no longer exists, which is success for a DEL. A path that is longer
    /// than the kernel accepts, that leads through a file, or through a loop of links, can
    /// never exist.
    pub fn is_gone(&self) -> bool {
        match self {
            NetnsError::NotNamespace(..) => true,
            NetnsError::Io(_, _, cause) => {
                let errno = cause.raw_os_error().map(Errno::from_raw);
                matches!(
                    errno,
                    Some(
                        Errno::ENOENT
                            | Errno::ENAMETOOLONG
                            | Errno::ENOTDIR
                            | Errno::ELOOP
                            | Errno::ESRCH
                    )
                )
            }
            NetnsError::Stranded(_) => false,
        }
    }
}

impl fmt::Display for NetnsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NetnsError::NotNamespace(path, magic) => {
                write!(f, "unknown FS magic on {}: {:x}", quoted_path(path), magic.0)
            }
            NetnsError::Io(call, path, cause) => {
                write!(f, "{call} {}: {}", quoted_path(path), io_text(cause))
            }
            NetnsError::Stranded(errno) => write!(
                f,
                "return to the host's network namespace: {}; the next DEL removes what this call \
                 left",
                errno_text(*errno)
            ),
        }
    }
}

impl std::error::Error for NetnsError {}

impl From<NetnsError> for error::Error {
    fn from(error: NetnsError) -> Self {
        let top = error::Error::internal(error.to_string());
        let details = match &error {
            NetnsError::NotNamespace(..) => {
                "no network namespace is mounted there: \"ip netns add NAME\" makes one at \
                 /run/netns/NAME"
            }
            NetnsError::Io(_, path, cause) => match cause.kind() {
                io::ErrorKind::NotFound => {
                    let named = path.file_name().map(|name| Path::new("/run/netns").join(name));
                    if let Some(named) = named.filter(|named| named.exists()) {
                        return top.with_details(format!("did you mean {}?", named.display()));
                    }
                    "its container has ended, or the path is wrong: \"ip netns list\" has those in \
                     /run/netns"
                }
                io::ErrorKind::PermissionDenied => "cnibox needs CAP_SYS_ADMIN: run it as root",
                _ => "",
            },
            NetnsError::Stranded(_) => "",
        };
        top.with_details(details)
    }
}

/// An open network namespace; it lives at least as long as this value.
#[derive(Clone, Debug)]
pub struct Netns {
    file: Arc<File>,
    path: PathBuf,
}

impl Netns {
    pub fn open(path: impl Into<PathBuf>) -> Result<Netns, NetnsError> {
        let path = path.into();
        let magic = check_magic(&path)?;
        match open_file(&path, OFlag::O_RDONLY) {
            Ok(file) if is_of_another_kind(&path, &file) => {
                Err(NetnsError::NotNamespace(path, magic))
            }
            Ok(file) => Ok(Netns { file: Arc::new(file), path }),
            Err(cause) => Err(NetnsError::Io("open", path, cause)),
        }
    }

    /// The namespace with this inode on this device, if it is that of a process.
    pub fn find_by_process(dev: u64, ino: u64) -> Option<Netns> {
        for process in fs::read_dir("/proc").ok()?.flatten() {
            let path = process.path().join("ns/net");
            let is_wanted = |meta: fs::Metadata| (meta.dev(), meta.ino()) == (dev, ino);
            if fs::metadata(&path).is_ok_and(is_wanted)
                && let Ok(netns) = Netns::open(path)
                && netns.device_and_inode().is_ok_and(|found| found == (dev, ino))
            {
                return Some(netns);
            }
        }
        None
    }

    /// A namespace that another process has opened and passed; `path` is for messages.
    pub fn from_descriptor(descriptor: OwnedFd, path: impl Into<PathBuf>) -> Netns {
        Netns { file: Arc::new(descriptor.into()), path: path.into() }
    }

    /// Opens the namespace of the calling thread.
    pub fn open_current() -> Result<Netns, NetnsError> {
        let file = open_file(CURRENT, OFlag::O_RDONLY)
            .map_err(|e| NetnsError::Io("open", CURRENT.into(), e))?;
        Ok(Netns { file: Arc::new(file), path: CURRENT.into() })
    }

    /// Creates a namespace that only this value keeps alive. Other processes can open its
    /// [`path`](Netns::path) while this process runs.
    pub fn create_unnamed() -> Result<Netns, NetnsError> {
        let file = on_scratch_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET).map_err(|e| syscall_error("unshare", CURRENT, e))?;
            open_file(CURRENT, OFlag::O_RDONLY)
                .map_err(|e| NetnsError::Io("open", CURRENT.into(), e))
        })??;
        let path = format!("/proc/{}/fd/{}", process::id(), file.as_raw_fd());
        Ok(Netns { file: Arc::new(file), path: path.into() })
    }

    /// The path as it was passed to [`Netns::open`]; results show it as `sandbox`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether both are the same namespace, whatever their paths.
    pub fn is_same_as(&self, other: &Netns) -> Result<bool, NetnsError> {
        Ok(self.device_and_inode()? == other.device_and_inode()?)
    }

    /// Runs `f` in this namespace. A panic of `f` continues in the caller. `f` must not start
    /// threads that outlive `f`: they would stay in the namespace.
    pub fn run_inside<T: Send>(&self, f: impl FnOnce() -> T + Send) -> Result<T, NetnsError> {
        require_home_netns()?;
        let there = || {
            self.move_thread_into()?;
            Ok(f())
        };
        let Some(back) = NetnsReturn::for_current_thread() else {
            return on_scratch_thread(there)?;
        };
        let outcome = there();
        drop(back);
        require_home_netns().and(outcome)
    }

    fn move_thread_into(&self) -> Result<(), NetnsError> {
        setns(&self.file, CloneFlags::CLONE_NEWNET)
            .map_err(|e| syscall_error("enter network namespace", &self.path, e))
    }

    /// Starts a thread that enters this namespace and runs `f`, and returns without waiting.
    pub fn spawn_inside<T: Send + 'static>(
        &self,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> Result<JoinHandle<Result<T, NetnsError>>, NetnsError> {
        let there = self.clone();
        let thread = thread::Builder::new().stack_size(STACK_SIZE).spawn(move || {
            there.move_thread_into()?;
            Ok(f())
        });
        thread.map_err(|e| NetnsError::Io("start a thread for", self.path.clone(), e))
    }

    /// Device and inode, which identify the namespace while it exists.
    pub fn device_and_inode(&self) -> Result<(u64, u64), NetnsError> {
        let meta =
            self.file.metadata().map_err(|e| NetnsError::Io("stat", self.path.clone(), e))?;
        Ok((meta.dev(), meta.ino()))
    }
}

/// The previous namespace of a thread, to which the thread returns when this is dropped.
struct NetnsReturn(Arc<File>);

impl NetnsReturn {
    /// Remembers the calling thread's present namespace; `None` if the thread may not enter it
    /// again, as in a process with a user namespace of its own.
    fn for_current_thread() -> Option<NetnsReturn> {
        let home = Netns::open_current().ok()?.file;
        setns(&home, CloneFlags::CLONE_NEWNET).is_ok().then(|| NetnsReturn(home))
    }
}

impl Drop for NetnsReturn {
    fn drop(&mut self) {
        if setns(&self.0, CloneFlags::CLONE_NEWNET).is_err() {
            STRANDED.set(Some(self.0.clone()));
        }
    }
}

thread_local! {
    /// The namespace that the calling thread failed to return to.
    static STRANDED: RefCell<Option<Arc<File>>> = const { RefCell::new(None) };
}

/// Fails in a thread that could not return from a container's namespace, where it would use the
/// container's files and parameters. Tries once more to return.
pub fn require_home_netns() -> Result<(), NetnsError> {
    STRANDED.with_borrow_mut(|stranded| {
        let Some(home) = stranded else { return Ok(()) };
        setns(home, CloneFlags::CLONE_NEWNET).map_err(NetnsError::Stranded)?;
        *stranded = None;
        Ok(())
    })
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Whether this is known to be a namespace of another kind, such as a mount namespace: below
/// `/proc` it is a link to `mnt:[4026531841]`. The name of a bind mount elsewhere is its mount
/// point; setns(2) then fails.
fn is_of_another_kind(path: &Path, file: &File) -> bool {
    if !path.starts_with("/proc") {
        return false;
    }
    let name = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let name = name.unwrap_or_default();
    let kind = name.to_str().and_then(|name| name.split_once(":[")).map(|(kind, _)| kind);
    kind.is_some_and(|kind| !kind.starts_with('/') && kind != "net")
}

/// Refuses files that are on neither nsfs nor proc, before opening them: opening a pipe or a device
/// could block or have effects.
fn check_magic(path: &Path) -> Result<FsType, NetnsError> {
    let stat = statfs(path).map_err(|errno| syscall_error("failed to Statfs", path, errno))?;
    let magic = stat.filesystem_type();
    if magic == NSFS_MAGIC || magic == PROC_SUPER_MAGIC {
        return Ok(magic);
    }
    Err(NetnsError::NotNamespace(path.into(), magic))
}

fn syscall_error(call: &'static str, path: impl Into<PathBuf>, errno: Errno) -> NetnsError {
    NetnsError::Io(call, path.into(), errno.into())
}

/// Runs `f` on a new thread, which starts in the namespaces of the calling thread; changes of `f`
/// to the thread end with the thread. A panic of `f` continues in the caller.
pub fn on_scratch_thread<T: Send>(f: impl FnOnce() -> T + Send) -> Result<T, NetnsError> {
    thread::scope(|scope| {
        let thread = thread::Builder::new()
            .stack_size(STACK_SIZE)
            .spawn_scoped(scope, f)
            .map_err(|e| NetnsError::Io("start a thread for", CURRENT.into(), e))?;
        Ok(thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic)))
    })
}

/// The path in double quotes, as in the reference's messages.
fn quoted_path(path: &Path) -> String {
    format!("{:?}", path.to_string_lossy())
}

/// Moves the thread of the calling test into a new, empty network namespace.
///
/// # Panics
///
/// Without `CAP_SYS_ADMIN`.
#[cfg(test)]
pub fn isolate_test_thread() {
    crate::lane::begin_test();
    unshare(CloneFlags::CLONE_NEWNET).expect("run as root or under unshare -rn");
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::process::Command;

    use super::*;

    #[test]
    fn each_namespace_has_an_identity() {
        isolate_test_thread();
        let there = Netns::create_unnamed().unwrap();
        let id_in = |ns: &Netns| ns.run_inside(current_id).unwrap().unwrap();
        let all = [
            id_in(&Netns::open_current().unwrap()),
            id_in(&there),
            id_in(&Netns::create_unnamed().unwrap()),
        ];
        let is_number = |id: &u64| *id >= 0xf000_0000;
        // Before Linux 5.14 it is the number of the inode.
        let is_cookie = current_cookie().unwrap().is_some();
        assert!(all.iter().all(|id| is_number(id) != is_cookie), "{all:?}");
        assert!(all[0] != all[1] && all[1] != all[2] && all[2] != all[0]);
        assert_eq!(id_in(&there), all[1]);
        assert!(is_number(&current_inode().unwrap()));
    }

    #[test]
    fn other_files_are_refused_as_namespaces() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for (path, gone, text) in [
            ("/no/such", true, "failed to Statfs \"/no/such\": no such file or directory"),
            (file.path().to_str().unwrap(), true, "unknown FS magic on \"/"),
            (
                "/proc/self/status",
                false,
                "enter network namespace \"/proc/self/status\": invalid argument",
            ),
        ] {
            assert_eq!(NetnsIdentity::at_path(Path::new(path)), None, "{path}");
            let error = Netns::open(path).and_then(|ns| ns.run_inside(|| ())).unwrap_err();
            assert!(error.is_gone() == gone && error.to_string().starts_with(text), "{error}");
        }
    }

    #[test]
    fn run_returns_to_the_host_after_a_panic() {
        isolate_test_thread();
        let (home, other) = (Netns::open_current().unwrap(), Netns::create_unnamed().unwrap());
        assert!(!home.is_same_as(&other).unwrap());
        assert!(Netns::open(other.path()).unwrap().is_same_as(&other).unwrap());
        let is_other = || Netns::open_current().unwrap().is_same_as(&other).unwrap();
        assert!(other.run_inside(is_other).unwrap() && !is_other());
        let caught = panic::catch_unwind(panic::AssertUnwindSafe(|| {
            other.run_inside(|| -> () { panic::panic_any("inside") })
        }));
        assert_eq!(caught.unwrap_err().downcast_ref::<&str>(), Some(&"inside"));
        assert!(Netns::open_current().unwrap().is_same_as(&home).unwrap());
    }

    #[test]
    fn a_thread_enters_if_returning_is_impossible() {
        const NAME: &str = "netns::tests::a_thread_enters_if_returning_is_impossible";
        const IN_CHILD: &str = "CNIBOX_TEST_IN_CHILD";
        if env::var_os(IN_CHILD).is_none() {
            isolate_test_thread();
            let mut child = Command::new("unshare");
            child.args(["--user", "--map-root-user"]).arg(env::current_exe().unwrap());
            let status = child.args([NAME, "--exact"]).env(IN_CHILD, "1").status().unwrap();
            assert!(status.success(), "{status}");
            return;
        }
        assert!(NetnsReturn::for_current_thread().is_none());
        let (home, other) = (Netns::open_current().unwrap(), Netns::create_unnamed().unwrap());
        assert!(
            other
                .run_inside(|| Netns::open_current().unwrap().is_same_as(&other).unwrap())
                .unwrap()
        );
        assert!(Netns::open_current().unwrap().is_same_as(&home).unwrap());
    }
}
