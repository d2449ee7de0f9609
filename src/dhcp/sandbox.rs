//! The namespace of a lease: which one it is, and how the daemon enters it again.
//!
//! A descriptor or a socket would keep the namespace of an ended container alive. A mount is therefore opened again for
//! each visit. A link of procfs is not, because that needs `CAP_SYS_PTRACE`: the daemon keeps the descriptor that it
//! got, and closes it when the link is gone.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::passing::{PassedDescriptors, ProcfsLink};
use crate::error::{Error, Result};
use crate::netns::{self, Netns};

/// Why an interface is not usable.
#[derive(Debug)]
pub enum InterfaceError {
    /// The namespace or the interface does not exist any more, or was replaced.
    Gone(String),
    /// An error of a socket.
    Io(io::Error),
    Failed(Error),
}

impl From<InterfaceError> for Error {
    fn from(error: InterfaceError) -> Error {
        match error {
            InterfaceError::Gone(why) => Error::internal(why),
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

/// The namespace of a lease.
#[derive(Debug)]
pub struct LeaseSandbox {
    /// Device and inode. While no descriptor is open, the kernel may give the inode's number to another namespace.
    pub id: (u64, u64),
    way: SandboxAccess,
}

/// How a namespace is entered again.
#[derive(Debug)]
enum SandboxAccess {
    Mount(PathBuf),
    Link(Netns, ProcfsLink),
}

impl LeaseSandbox {
    /// The namespace of an ADD: the descriptor that the plugin has passed; without one, what the daemon itself can
    /// open.
    pub fn from_passed(path: PathBuf, passed: PassedDescriptors) -> Result<LeaseSandbox, InterfaceError> {
        let Some(netns) = passed.netns.map(|netns| Netns::from_descriptor(netns, &path)) else {
            return LeaseSandbox::from_mount(path, None);
        };
        let id = netns.device_and_inode().map_err(Error::from)?;
        let Some(directory) = passed.directory else {
            return LeaseSandbox::from_mount(path, Some(id));
        };
        let sandbox = LeaseSandbox { id, way: SandboxAccess::Link(netns, ProcfsLink::from_directory(directory, path)) };
        sandbox.verify_present().map(|()| sandbox)
    }

    /// The namespace of a record. For a link of procfs this needs `CAP_SYS_PTRACE`.
    pub fn from_record(path: PathBuf, id: (u64, u64)) -> Result<LeaseSandbox, InterfaceError> {
        match ProcfsLink::from_path(&path) {
            Ok(Some(link)) => {
                let netns = open_verified(&link.descriptor_path(), Some(id))?;
                Ok(LeaseSandbox { id, way: SandboxAccess::Link(netns, link) })
            }
            _ => LeaseSandbox::from_mount(path, Some(id)),
        }
    }

    /// The namespace of a record that cannot be opened now: each visit tries it.
    pub fn without_opening(path: PathBuf, id: (u64, u64)) -> LeaseSandbox {
        LeaseSandbox { id, way: SandboxAccess::Mount(path) }
    }

    fn from_mount(path: PathBuf, id: Option<(u64, u64)>) -> Result<LeaseSandbox, InterfaceError> {
        let id = open_verified(&path, id)?.device_and_inode().map_err(Error::from)?;
        Ok(LeaseSandbox { id, way: SandboxAccess::Mount(path) })
    }

    /// Opens the namespace for a visit.
    pub fn open_namespace(&self) -> Result<Netns, InterfaceError> {
        match &self.way {
            SandboxAccess::Mount(path) => open_verified(path, Some(self.id)),
            SandboxAccess::Link(netns, _) => {
                self.verify_present()?;
                Ok(netns.clone())
            }
        }
    }

    /// Fails with [`InterfaceError::Gone`] if the container's namespace is not there any more.
    pub fn verify_present(&self) -> Result<(), InterfaceError> {
        match &self.way {
            SandboxAccess::Mount(path) => open_verified(path, Some(self.id)).map(drop),
            SandboxAccess::Link(_, link) => match link.exists() {
                Ok(true) => Ok(()),
                Ok(false) => Err(InterfaceError::Gone(format!("{} is gone", link.link_path().display()))),
                Err(cause) => Err(Error::io(format_args!("look for {}", link.link_path().display()), &cause).into()),
            },
        }
    }

    /// How often the task of the lease calls [`verify`](LeaseSandbox::verify_present). An open descriptor keeps the
    /// namespace of an ended container alive for this time.
    pub fn verify_interval(&self) -> Duration {
        match self.way {
            SandboxAccess::Mount(_) => Duration::from_secs(30),
            SandboxAccess::Link(..) => Duration::from_secs(5),
        }
    }
}

/// Opens the namespace at `path`, and verifies its device and inode if `id` is known.
pub fn open_verified(path: &Path, id: Option<(u64, u64)>) -> Result<Netns, InterfaceError> {
    let netns = match Netns::open(path) {
        Err(e) if e.is_gone() => return Err(InterfaceError::Gone(e.to_string())),
        Err(netns::NetnsError::Io(call, path, e)) if e.kind() == ErrorKind::PermissionDenied => {
            return Err(permission_error(&netns::NetnsError::Io(call, path, e)).into());
        }
        opened => opened.map_err(Error::from)?,
    };
    let found = netns.device_and_inode().map_err(Error::from)?;
    if id.is_some_and(|id| id != found) {
        let why = format!("another network namespace is at {}", path.display());
        return Err(InterfaceError::Gone(why));
    }
    Ok(netns)
}

/// Verifies the cookie of the calling thread's namespace, if the recorded one is known.
pub fn require_cookie(recorded: Option<u64>) -> Result<(), InterfaceError> {
    if recorded.is_none() || netns::current_cookie().map_err(Error::from)? == recorded {
        return Ok(());
    }
    Err(InterfaceError::Gone("another network namespace has the number of the container's".into()))
}

fn permission_error(error: &netns::NetnsError) -> Error {
    Error::internal(error.to_string()).with_details(
        "the daemon itself opens only mounts, such as those in /run/netns: the dhcp plugin of its release passes other \
         namespaces to it, and a daemon that starts with CAP_SYS_PTRACE opens those of its leases",
    )
}
