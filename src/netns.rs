//! Network namespaces: opening them, and running code in them.
//!
//! Only this file calls setns(2) and unshare(2). [`Netns::run`] moves the calling thread into the namespace and back,
//! also after a panic. A thread that cannot return may still use the descriptors that it opened on the host, for the
//! rollback, but opening files, writing parameters and starting programs are refused ([`at_home`]). Starting a thread
//! instead, as [`Netns::visit`] does, costs a tenth of an ADD.

pub mod holders;

use std::cell::RefCell;
use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::thread::{self, JoinHandle};
use std::{fmt, io, panic, process};

use nix::errno::Errno;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::statfs::{FsType, NSFS_MAGIC, PROC_SUPER_MAGIC, statfs};
use serde::{Deserialize, Serialize};

/// The namespace of the calling thread; `/proc/self/ns/net` is the main thread's.
const CURRENT: &str = "/proc/thread-self/ns/net";

/// Stack size in bytes: enough for a dozen netlink requests; the default of 2 MiB would use more memory.
const STACK_SIZE: usize = 256 * 1024;

/// The identity of a namespace among all namespaces of a boot.
///
/// The kernel reuses the inode number of a namespace that is gone. The creation time of the inode
/// tells the two apart, as long as something pins the inode: the kernel makes a new inode
/// when a namespace that only its processes hold is looked at again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NetnsId {
    /// The device of the file system of namespaces.
    pub dev: u32,
    /// The namespace's number.
    pub ino: u32,
    /// Nanoseconds of the inode's ctime; 0 if nothing pins the inode.
    pub ctime: u64,
}

impl NetnsId {
    /// The namespace at `path`; `None` if there is none, or nothing that tells.
    pub fn at(path: &Path) -> Option<NetnsId> {
        let own = path.symlink_metadata().ok()?;
        if statfs(path).ok()?.filesystem_type() != NSFS_MAGIC {
            return None;
        }
        // A mount is the namespace itself. A link, as in /proc/<pid>/ns, pins nothing, but for
        // one to an open descriptor.
        let linked = own.is_symlink();
        let pinned = !linked || path.parent().is_some_and(|dir| dir.ends_with("fd"));
        let meta = if linked { fs::metadata(path).ok()? } else { own };
        let id = NetnsId::of(&meta)?;
        Some(if pinned { id } else { NetnsId { ctime: 0, ..id } })
    }

    fn of(meta: &fs::Metadata) -> Option<NetnsId> {
        let nanoseconds =
            meta.ctime().checked_mul(1_000_000_000)?.checked_add(meta.ctime_nsec())?;
        Some(NetnsId {
            dev: u32::try_from(meta.dev()).ok()?,
            ino: u32::try_from(meta.ino()).ok()?,
            ctime: u64::try_from(nanoseconds).ok()?,
        })
    }

    /// The namespace at the end of a path that [`holders::Holders`] found, whatever holds it.
    pub fn of_holder(holder: &Path) -> Option<NetnsId> {
        NetnsId::of(&fs::metadata(holder).ok()?)
    }
}

/// Why a namespace could not be opened or entered.
#[derive(Debug)]
pub enum Error {
    /// Nothing is at the path: the container is gone.
    NotExist(PathBuf),
    /// Something else is at the path, for example the plain file that a reboot leaves of a bind
    /// mount. Holds the magic number of its file system.
    NotNamespace(PathBuf, FsType),
    /// The system call named first failed on the path.
    Io(&'static str, PathBuf, io::Error),
    /// The calling thread could not return to the host's namespace.
    Stranded(Errno),
}

impl Error {
    /// Whether there is no namespace any more, which is success for a DEL. Nothing can ever be at a
    /// path that is longer than the kernel takes.
    pub fn is_gone(&self) -> bool {
        match self {
            Error::NotExist(_) | Error::NotNamespace(..) => true,
            Error::Io(_, _, cause) => cause.raw_os_error() == Some(Errno::ENAMETOOLONG as i32),
            Error::Stranded(_) => false,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::NotExist(path) => {
                write!(
                    f,
                    "failed to Statfs {}: {}",
                    quoted(path),
                    crate::error::errno_text(Errno::ENOENT)
                )
            }
            Error::NotNamespace(path, magic) => {
                write!(f, "unknown FS magic on {}: {:x}", quoted(path), magic.0)
            }
            Error::Io(call, path, cause) => {
                write!(f, "{call} {}: {}", quoted(path), crate::error::io_text(cause))
            }
            Error::Stranded(errno) => write!(
                f,
                "return to the host's network namespace: {}; what could not be taken back is left \
                 to the next DEL",
                crate::error::errno_text(*errno)
            ),
        }
    }
}

impl std::error::Error for Error {}

impl From<Error> for crate::error::Error {
    fn from(error: Error) -> Self {
        let top = crate::error::Error::internal(error.to_string());
        let named =
            |path: &PathBuf| path.file_name().map(|name| Path::new("/run/netns").join(name));
        if let Error::NotExist(path) = &error
            && let Some(named) = named(path).filter(|named| named.exists())
        {
            return top.with_details(format!("did you mean {}?", named.display()));
        }
        top.with_details(match error {
            Error::NotExist(_) => {
                "its container has ended, or the path is wrong: \"ip netns list\" has those in /run/netns"
            }
            Error::NotNamespace(..) => {
                "no network namespace is mounted there: \"ip netns add NAME\" makes one at /run/netns/NAME"
            }
            Error::Io(_, _, cause) if cause.kind() == io::ErrorKind::PermissionDenied => {
                "cnibox needs CAP_SYS_ADMIN: run it as root"
            }
            _ => "",
        })
    }
}

/// An open network namespace; it lives at least as long as this value.
#[derive(Debug)]
pub struct Netns {
    file: File,
    path: PathBuf,
}

impl Netns {
    /// Opens the namespace at `path`.
    pub fn open(path: impl Into<PathBuf>) -> Result<Netns, Error> {
        let path = path.into();
        let magic = check_magic(&path)?;
        match File::open(&path) {
            Ok(file) if is_of_another_kind(&path, &file) => Err(Error::NotNamespace(path, magic)),
            Ok(file) => Ok(Netns { file, path }),
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Err(Error::NotExist(path)),
            Err(cause) => Err(Error::Io("open", path, cause)),
        }
    }

    /// Opens the namespace of the calling thread.
    pub fn current() -> Result<Netns, Error> {
        // What the kernel itself has there need not be looked at first.
        let file = File::open(CURRENT).map_err(|e| Error::Io("open", CURRENT.into(), e))?;
        Ok(Netns { file, path: CURRENT.into() })
    }

    /// Creates a namespace that nothing but this value keeps alive. Other processes reach it by
    /// its [`path`](Netns::path) while this one runs.
    pub fn fresh() -> Result<Netns, Error> {
        let file = on_scratch_thread(|| {
            unshare(CloneFlags::CLONE_NEWNET).map_err(|e| entering("unshare", CURRENT, e))?;
            File::open(CURRENT).map_err(|e| Error::Io("open", CURRENT.into(), e))
        })??;
        let path = format!("/proc/{}/fd/{}", process::id(), file.as_raw_fd());
        Ok(Netns { file, path: path.into() })
    }

    /// The path as it was passed to [`Netns::open`]; results show it as `sandbox`.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether both are the same namespace, whatever their paths.
    pub fn same_as(&self, other: &Netns) -> Result<bool, Error> {
        Ok(self.identity()? == other.identity()?)
    }

    /// Runs `f` in this namespace. A panic of `f` goes on in the caller. `f` must not start threads
    /// that outlive it: they would stay in the namespace.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> Result<T, Error> {
        at_home()?;
        let there = || {
            self.enter()?;
            Ok(f())
        };
        let Some(back) = WayBack::find() else { return on_scratch_thread(there)? };
        let outcome = there();
        drop(back);
        at_home().and(outcome)
    }

    fn enter(&self) -> Result<(), Error> {
        setns(&self.file, CloneFlags::CLONE_NEWNET)
            .map_err(|e| entering("enter network namespace", &self.path, e))
    }

    /// The same namespace once more, kept alive by the copy as well.
    pub fn try_clone(&self) -> Result<Netns, Error> {
        let path = self.path.clone();
        match self.file.try_clone() {
            Ok(file) => Ok(Netns { file, path }),
            Err(cause) => Err(Error::Io("duplicate", path, cause)),
        }
    }

    /// Has a thread of its own enter this namespace and run `f` there while the caller goes on.
    pub fn visit<T: Send + 'static>(
        &self,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Visit<T>, Error> {
        let there = self.try_clone()?;
        let enter = move || {
            there.enter()?;
            Ok(f())
        };
        let thread = thread::Builder::new().stack_size(STACK_SIZE).spawn(enter);
        thread.map(Visit).map_err(|e| Error::Io("start a thread for", self.path.clone(), e))
    }

    /// Device and inode, by which the namespace is known while it lives.
    pub fn identity(&self) -> Result<(u64, u64), Error> {
        let meta = self.file.metadata().map_err(|e| Error::Io("stat", self.path.clone(), e))?;
        Ok((meta.dev(), meta.ino()))
    }
}

/// The previous namespace of a thread, to which the thread returns when this is dropped.
struct WayBack(Option<File>);

impl WayBack {
    /// The way back to where the calling thread is now, if it is open: a process in a user namespace
    /// of its own may be in a network namespace that it could not enter.
    fn find() -> Option<WayBack> {
        let home = File::open(CURRENT).ok()?;
        setns(&home, CloneFlags::CLONE_NEWNET).is_ok().then(|| WayBack(Some(home)))
    }
}

impl Drop for WayBack {
    fn drop(&mut self) {
        // The file is taken here only.
        let Some(home) = self.0.take() else { return };
        if setns(&home, CloneFlags::CLONE_NEWNET).is_err() {
            STRANDED.set(Some(home));
        }
    }
}

thread_local! {
    /// The namespace that the calling thread failed to return to.
    static STRANDED: RefCell<Option<File>> = const { RefCell::new(None) };
}

/// Fails in a thread that could not return from a container's namespace: its files, parameters and programs would be the
/// container's. Tries once more to return.
pub fn at_home() -> Result<(), Error> {
    STRANDED.with_borrow_mut(|stranded| {
        let Some(home) = stranded else { return Ok(()) };
        setns(home, CloneFlags::CLONE_NEWNET).map_err(Error::Stranded)?;
        *stranded = None;
        Ok(())
    })
}

/// A thread in a namespace. The thread goes on if this is dropped.
#[derive(Debug)]
pub struct Visit<T>(JoinHandle<Result<T, Error>>);

impl<T> Visit<T> {
    /// Waits for its end. A panic goes on in the caller.
    pub fn join(self) -> Result<T, Error> {
        self.0.join().unwrap_or_else(|panic| panic::resume_unwind(panic))
    }
}

impl AsFd for Netns {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Whether this is known to be a namespace of another kind, such as a mount namespace: below `/proc` it is a
/// link to `mnt:[4026531841]`. A bind mount elsewhere has the name of its mount point, which tells nothing;
/// the kernel then refuses setns(2).
fn is_of_another_kind(path: &Path, file: &File) -> bool {
    if !path.starts_with("/proc") {
        return false;
    }
    let name = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let name = name.unwrap_or_default();
    let kind = name.to_str().and_then(|name| name.split_once(":[")).map(|(kind, _)| kind);
    kind.is_some_and(|kind| !kind.starts_with('/') && kind != "net")
}

/// Refuses files that are on neither nsfs nor proc, before opening them: opening a pipe or a device could block or have
/// effects.
fn check_magic(path: &Path) -> Result<FsType, Error> {
    let magic = match statfs(path) {
        Ok(stat) => stat.filesystem_type(),
        Err(Errno::ENOENT) => return Err(Error::NotExist(path.into())),
        Err(errno) => return Err(entering("failed to Statfs", path, errno)),
    };
    if magic == NSFS_MAGIC || magic == PROC_SUPER_MAGIC {
        return Ok(magic);
    }
    Err(Error::NotNamespace(path.into(), magic))
}

fn entering(call: &'static str, path: impl Into<PathBuf>, errno: Errno) -> Error {
    Error::Io(call, path.into(), errno.into())
}

/// Runs `f` on a new thread, which starts in the namespaces of the calling thread; changes of `f` to the thread end with
/// the thread. A panic of `f` continues in the caller.
pub fn on_scratch_thread<T: Send>(f: impl FnOnce() -> T + Send) -> Result<T, Error> {
    thread::scope(|scope| {
        let thread = thread::Builder::new()
            .stack_size(STACK_SIZE)
            .spawn_scoped(scope, f)
            .map_err(|e| Error::Io("start a thread for", CURRENT.into(), e))?;
        Ok(thread.join().unwrap_or_else(|panic| panic::resume_unwind(panic)))
    })
}

/// Puts the calling process, which must have one thread, into a network namespace of its own, without any of the host's
/// links, and covers these folders, if they are there, by empty file systems that nobody else sees.
pub fn hide(folders: &[&Path]) -> Result<(), Error> {
    let apart = CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS;
    unshare(apart).map_err(|e| entering("unshare", CURRENT, e))?;
    let mount = |kind: Option<&str>, on: &Path, flags| {
        mount(kind, on, kind, flags, None::<&str>).map_err(|e| entering("mount", on, e))
    };
    mount(None, Path::new("/"), MsFlags::MS_REC | MsFlags::MS_PRIVATE)?;
    for folder in folders.iter().filter(|folder| folder.is_dir()) {
        mount(Some("tmpfs"), folder, MsFlags::MS_NOSUID | MsFlags::MS_NODEV)?;
    }
    Ok(())
}

/// The path in double quotes, as the reference plugins show it.
fn quoted(path: &Path) -> String {
    format!("{:?}", path.to_string_lossy())
}

/// Puts the calling test in a private, empty network namespace: tests run on threads of their
/// own, so they neither see each other nor leave anything behind.
///
/// # Panics
///
/// Without the right to do so.
#[cfg(test)]
pub fn isolate() {
    crate::lane::assert_not_listing();
    unshare(CloneFlags::CLONE_NEWNET).expect("run as root or under unshare -rn");
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::process::Command;

    use super::*;

    #[test]
    fn a_missing_path_is_gone() {
        let error = Netns::open("/var/run/netns/no-such").unwrap_err();
        assert!(error.is_gone());
        assert_eq!(
            error.to_string(),
            r#"failed to Statfs "/var/run/netns/no-such": no such file or directory"#
        );
    }

    #[test]
    fn a_plain_file_is_gone_too() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = Netns::open(file.path()).unwrap_err();
        assert!(error.is_gone());
        assert!(error.to_string().starts_with("unknown FS magic on \"/"), "{error}");
    }

    #[test]
    fn a_file_of_procfs_that_is_no_namespace_cannot_be_entered() {
        let ns = Netns::open("/proc/self/status").unwrap();
        let error = ns.run(|| ()).unwrap_err();
        assert_eq!(
            error.to_string(),
            r#"enter network namespace "/proc/self/status": invalid argument"#
        );
    }

    #[test]
    fn run_comes_back() {
        isolate();
        let home = Netns::current().unwrap();
        let other = Netns::fresh().unwrap();
        assert!(!home.same_as(&other).unwrap());
        let inside = other.run(|| Netns::current().unwrap().same_as(&other).unwrap()).unwrap();
        assert!(inside);
        assert!(Netns::current().unwrap().same_as(&home).unwrap());
    }

    #[test]
    fn where_nobody_can_come_back_a_thread_goes_instead() {
        const NAME: &str = "netns::tests::where_nobody_can_come_back_a_thread_goes_instead";
        const IN_CHILD: &str = "CNIBOX_TEST_IN_CHILD";
        if env::var_os(IN_CHILD).is_none() {
            isolate();
            let mut child = Command::new("unshare");
            child.args(["--user", "--map-root-user"]).arg(env::current_exe().unwrap());
            let status = child.args([NAME, "--exact"]).env(IN_CHILD, "1").status().unwrap();
            assert!(status.success(), "{status}");
            return;
        }
        assert!(WayBack::find().is_none());
        let (home, other) = (Netns::current().unwrap(), Netns::fresh().unwrap());
        assert!(other.run(|| Netns::current().unwrap().same_as(&other).unwrap()).unwrap());
        assert!(Netns::current().unwrap().same_as(&home).unwrap());
    }

    #[test]
    fn a_fresh_namespace_is_reached_by_its_path() {
        isolate();
        let fresh = Netns::fresh().unwrap();
        assert!(Netns::open(fresh.path()).unwrap().same_as(&fresh).unwrap());
    }

    #[test]
    fn a_panic_in_the_namespace_reaches_the_caller() {
        isolate();
        let (home, ns) = (Netns::current().unwrap(), Netns::fresh().unwrap());
        let caught = panic::catch_unwind(panic::AssertUnwindSafe(|| {
            ns.run(|| -> () { panic::panic_any("inside") })
        }));
        assert_eq!(caught.unwrap_err().downcast_ref::<&str>(), Some(&"inside"));
        assert!(Netns::current().unwrap().same_as(&home).unwrap());
    }
}
