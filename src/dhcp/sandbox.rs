//! The namespace of a lease: which one it is, and how the daemon reaches it.
//!
//! The daemon keeps the descriptor that the plugin has passed, because a container may live on when
//! its path is gone. While the path leads to the namespace, something else keeps the namespace
//! alive as well; afterwards `daemon/view.rs` decides how long the daemon keeps it alive
//! (`docs/decisions/0028-dhcp-namespaces.md`).

use std::cell::RefCell;
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::passing::{PassedDescriptors, ProcfsLink};
use super::timing::BootClockTime;
use crate::netlink::{Netlink, NetlinkResult};
use crate::netns::{self, Netns};
use cni::error::{Error, Result};

/// How often the task of a lease looks at the path. An open descriptor keeps the namespace of an
/// ended container alive for this time.
const LOOK: Duration = Duration::from_secs(5);
/// For how long no process has to be seen in a namespace, before the daemon lets go of it.
const UNSEEN: Duration = Duration::from_secs(1);

/// Why an interface is not usable.
#[derive(Debug)]
pub enum InterfaceError {
    /// The namespace or the interface has ended for certain.
    Gone(String),
    /// Nothing leads to the namespace, which may exist.
    OutOfView(String),
    /// An error of a socket.
    Io(io::Error),
    Failed(Error),
}

impl From<InterfaceError> for Error {
    fn from(error: InterfaceError) -> Error {
        match error {
            InterfaceError::Gone(why) | InterfaceError::OutOfView(why) => Error::internal(why),
            InterfaceError::Io(cause) => Error::io("use the interface", &cause),
            InterfaceError::Failed(error) => error,
        }
    }
}

impl From<io::Error> for InterfaceError {
    fn from(cause: io::Error) -> InterfaceError {
        InterfaceError::Io(cause)
    }
}

impl From<Error> for InterfaceError {
    fn from(error: Error) -> InterfaceError {
        InterfaceError::Failed(error)
    }
}

/// The id of a namespace in the daemon's namespace. It refers to the namespace without keeping it
/// alive: when the namespace ends, no namespace has the id, until the kernel gives it to another
/// one.
#[derive(Clone, Copy, Debug, Deserialize, Serialize, PartialEq, Eq)]
pub struct NamespaceNumber {
    /// The [identity](netns::current_id) of the daemon's namespace.
    viewer: u64,
    id: i32,
}

impl NamespaceNumber {
    fn assign(netns: &Netns) -> NetlinkResult<Option<NamespaceNumber>> {
        let host = Netlink::open()?;
        let id = host.ensure_namespace_id(netns.as_fd())?;
        Ok(host.netns_id().zip(id).map(|(viewer, id)| NamespaceNumber { viewer, id }))
    }

    /// Whether it is proved that the namespace has ended.
    pub fn has_ended(self) -> bool {
        let look = || {
            let host = Netlink::open()?;
            let is_viewer = host.netns_id() == Some(self.viewer);
            Ok(is_viewer && host.has_namespace(self.id)? == Some(false))
        };
        unless_failed(look()).unwrap_or(false)
    }
}

fn unless_failed<T>(result: NetlinkResult<T>) -> Option<T> {
    result.map_err(|error| debug!("{error}")).ok()
}

/// The namespace of a lease.
#[derive(Debug)]
pub struct LeaseSandbox {
    /// The path of the namespace, as in `CNI_NETNS`.
    pub netns: String,
    /// Device and inode. While no descriptor is open, the kernel may give the inode's number to
    /// another namespace.
    pub id: (u64, u64),
    /// The path for the daemon.
    path: PathBuf,
    /// The open descriptor, if there is one.
    view: RefCell<Option<SandboxView>>,
}

/// An open namespace.
#[derive(Debug)]
struct SandboxView {
    netns: Netns,
    access: SandboxAccess,
    /// Whether the path did not lead to the namespace at the last look.
    is_lost: bool,
    /// The thread that was seen in the namespace at the last look, as a directory of procfs.
    occupant: Option<PathBuf>,
    /// When no thread was seen for the first time.
    unseen_since: Option<BootClockTime>,
}

/// What the path of a namespace is.
#[derive(Debug)]
enum SandboxAccess {
    Mount,
    Link(ProcfsLink),
    /// The namespace was opened through one of its threads, because the path did not lead to it.
    Thread,
}

impl LeaseSandbox {
    /// The namespace of an ADD: the descriptor that the plugin has passed; without one, what the
    /// daemon itself can open.
    pub fn from_passed(
        netns: &str,
        path: PathBuf,
        passed: PassedDescriptors,
    ) -> Result<LeaseSandbox, InterfaceError> {
        let (opened, access) = match (passed.netns, passed.directory) {
            (None, _) => (open_verified(&path, None)?, SandboxAccess::Mount),
            (Some(descriptor), None) => {
                (Netns::from_descriptor(descriptor, &path), SandboxAccess::Mount)
            }
            (Some(descriptor), Some(directory)) => {
                let link = ProcfsLink::from_directory(directory, path.clone());
                (Netns::from_descriptor(descriptor, &path), SandboxAccess::Link(link))
            }
        };
        let sandbox = LeaseSandbox::closed(netns, path, identify(&opened)?);
        sandbox.keep(&opened, access)?;
        sandbox.verify_path().map(|()| sandbox)
    }

    /// The namespace of a record, which is not open.
    pub fn closed(netns: &str, path: PathBuf, id: (u64, u64)) -> LeaseSandbox {
        LeaseSandbox { netns: netns.to_owned(), id, path, view: RefCell::new(None) }
    }

    /// Keeps the namespace open. A descriptor that was opened through a mount would keep the mount
    /// busy, so that umount(2) failed.
    fn keep(&self, opened: &Netns, access: SandboxAccess) -> Result<()> {
        let inside = opened.spawn_inside(Netns::open_current)?;
        let netns = inside.join().unwrap_or_else(|panic| resume_unwind(panic))?;
        // Without procfs the mount stays busy.
        let netns = netns.unwrap_or_else(|_| opened.clone());
        let view =
            SandboxView { netns, access, is_lost: false, occupant: None, unseen_since: None };
        *self.view.borrow_mut() = Some(view);
        Ok(())
    }

    /// Opens the namespace by its path. For a link of procfs this needs `CAP_SYS_PTRACE`. Without a
    /// descriptor the number alone does not identify the namespace: the caller verifies the
    /// cookie.
    pub fn reopen(&self) -> Result<(), InterfaceError> {
        let link = ProcfsLink::from_path(&self.path).ok().flatten();
        let opened = match &link {
            Some(link) => open_verified(&link.descriptor_path(), Some(self.id))?,
            None => open_verified(&self.path, Some(self.id))?,
        };
        Ok(self.keep(&opened, link.map_or(SandboxAccess::Mount, SandboxAccess::Link))?)
    }

    /// Opens the namespace through a thread that is in it. This needs `CAP_SYS_PTRACE`.
    pub fn reopen_through(&self, link: &Path) -> Result<(), InterfaceError> {
        Ok(self.keep(&open_verified(link, Some(self.id))?, SandboxAccess::Thread)?)
    }

    /// Closes the descriptor, so that the namespace ends unless something else keeps it.
    pub fn let_go(&self) {
        *self.view.borrow_mut() = None;
    }

    pub fn is_open(&self) -> bool {
        self.view.borrow().is_some()
    }

    pub fn open_namespace(&self) -> Result<Netns, InterfaceError> {
        let view = self.view.borrow();
        view.as_ref().map(|view| view.netns.clone()).ok_or_else(|| {
            InterfaceError::OutOfView(format!("nothing leads to the namespace {}", self.netns))
        })
    }

    /// The namespace's number for [`NamespaceNumber::has_ended`].
    pub fn number(&self) -> Option<NamespaceNumber> {
        let netns = self.open_namespace().ok()?;
        unless_failed(NamespaceNumber::assign(&netns)).flatten()
    }

    /// Fails with [`InterfaceError::OutOfView`] if the path does not lead to the open namespace.
    pub fn verify_path(&self) -> Result<(), InterfaceError> {
        self.open_namespace()?;
        let mut view = self.view.borrow_mut();
        let Some(view) = view.as_mut() else { return Ok(()) };
        let found = match &view.access {
            SandboxAccess::Mount => open_verified(&self.path, Some(self.id)).map(drop),
            SandboxAccess::Link(link) => match link.exists() {
                Ok(true) => Ok(()),
                Ok(false) => Err(InterfaceError::OutOfView(format!(
                    "{} is gone",
                    link.link_path().display()
                ))),
                Err(cause) => {
                    Err(Error::io(format_args!("look for {}", link.link_path().display()), &cause)
                        .into())
                }
            },
            // Another process may have the number of the path's process, and must not be opened.
            SandboxAccess::Thread => open_verified(&self.path, Some(self.id))
                .map(drop)
                .map_err(|error| InterfaceError::OutOfView(Error::from(error).to_string())),
        };
        if found.is_ok() {
            view.is_lost = false;
            view.unseen_since = None;
        }
        found
    }

    /// Notes that the path does not lead to the namespace; `true` if it did before.
    pub fn note_lost(&self) -> bool {
        let mut view = self.view.borrow_mut();
        view.as_mut().is_some_and(|view| !std::mem::replace(&mut view.is_lost, true))
    }

    /// The thread that was seen in the namespace last.
    pub fn occupant(&self) -> Option<PathBuf> {
        self.view.borrow().as_ref()?.occupant.clone()
    }

    /// Notes the thread that was seen in the namespace at `now`; whether none has been seen for
    /// some time.
    pub fn note_occupant(&self, occupant: Option<PathBuf>, now: BootClockTime) -> bool {
        let mut view = self.view.borrow_mut();
        let Some(view) = view.as_mut() else { return false };
        view.unseen_since = if occupant.is_none() { view.unseen_since.or(Some(now)) } else { None };
        view.occupant = occupant;
        view.unseen_since.is_some_and(|since| now.saturating_sub(since) >= UNSEEN)
    }

    /// How often to look at the path.
    pub fn look_interval(&self) -> Duration {
        let is_unseen = self.view.borrow().as_ref().is_some_and(|view| view.unseen_since.is_some());
        if is_unseen { UNSEEN } else { LOOK }
    }
}

fn identify(netns: &Netns) -> Result<(u64, u64)> {
    Ok(netns.device_and_inode()?)
}

/// Opens the namespace at `path`, and verifies its device and inode if `id` is known.
pub fn open_verified(path: &Path, id: Option<(u64, u64)>) -> Result<Netns, InterfaceError> {
    let netns = match Netns::open(path) {
        Err(e) if e.is_gone() => return Err(InterfaceError::OutOfView(e.to_string())),
        Err(netns::NetnsError::Io(call, path, e)) if e.kind() == ErrorKind::PermissionDenied => {
            return Err(permission_error(&netns::NetnsError::Io(call, path, e)).into());
        }
        opened => opened.map_err(Error::from)?,
    };
    if id.is_some_and(|id| identify(&netns).ok() != Some(id)) {
        let why = format!("another network namespace is at {}", path.display());
        return Err(InterfaceError::OutOfView(why));
    }
    Ok(netns)
}

/// Verifies the cookie of the calling thread's namespace, if the recorded one is known. The
/// namespace has the recorded number: if it is another one, the recorded one has ended.
pub fn require_cookie(recorded: Option<u64>) -> Result<(), InterfaceError> {
    if recorded.is_none() || netns::current_cookie().map_err(Error::from)? == recorded {
        return Ok(());
    }
    Err(InterfaceError::Gone("another network namespace has the number of the container's".into()))
}

fn permission_error(error: &netns::NetnsError) -> Error {
    Error::internal(error.to_string()).with_details(
        "the daemon itself opens only mounts, such as those in /run/netns: the dhcp plugin of its \
         release passes other namespaces to it, and a daemon that starts with CAP_SYS_PTRACE \
         opens those of its leases",
    )
}
