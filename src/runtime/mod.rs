//! The runtime side of CNI: network configurations in, plugins run, results and cache out.
//!
//! What libcni is to Go programs. It knows plugins as executables only. A program that attaches
//! containers needs three things:
//!
//! * a network, from a file: [`NetworkList::load`] by name, [`NetworkList::from_file`],
//!   [`NetworkList::from_bytes`];
//! * an [`Attach`]: which container, namespace and interface, with which arguments;
//! * a [`Runtime`]: where plugins and cache are, and what to do on trouble. Its methods are the
//!   operations: [`Runtime::add`], [`Runtime::check`], [`Runtime::del`], [`Runtime::gc`],
//!   [`Runtime::status`], [`Runtime::validate`].
//!
//! ```no_run
//! use cnibox::runtime::{Attach, NetworkList, OnAddError, Runtime};
//!
//! # fn main() -> cnibox::runtime::Result<()> {
//! let runtime = Runtime {
//!     on_add_error: OnAddError::Undo,
//!     ..Runtime::new(vec!["/opt/cni/bin".into()])
//! };
//! let network = NetworkList::load("/etc/cni/net.d".as_ref(), "pods")?;
//! let attach = Attach::new("3f2a", "/run/netns/pod1", "eth0");
//! let result = runtime.add(&network, &attach)?;
//! # drop(result);
//! runtime.del(&network, &attach)
//! # }
//! ```
//!
//! Nothing is locked: hold off other operations on the same container, and ADD and DEL of the
//! network during GC. The cache files are those of libcni, in both directions (see [`cache`]).
//!
//! Errors are the plugin's own, with its code (spec, section 7.2), or say which step failed;
//! texts are those of the reference.
#![warn(missing_docs)]

pub mod cache;
mod conf;
mod housekeeping;
pub(crate) mod list;
mod ops;
mod request;
#[cfg(test)]
mod tests;
mod validate;

use std::path::PathBuf;
use std::time::Duration;

pub use cache::CachedAttachment;
pub(crate) use conf::EXTENSIONS;
pub use conf::{PluginConf, conf_files};
pub use list::NetworkList;

pub use crate::cni::json::Json;
pub use crate::cni::{Attachment, CniResult, Dns, Interface, IpConfig, Route, SpecVersion};
pub use crate::error::{Code, Error, Result};
pub use crate::invoke::{Exec, Executor, System, VersionInfo};

/// The default directory of cached results.
pub const DEFAULT_CACHE_DIR: &str = "/var/lib/cni";

/// One attachment of a container to a network, as the caller describes it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Attach {
    /// The container, `CNI_CONTAINERID`: `[a-zA-Z0-9][a-zA-Z0-9_.-]*`.
    pub container_id: String,
    /// Path of the network namespace, `CNI_NETNS`. May be empty on DEL, when it is gone.
    pub netns: String,
    /// The interface inside the container, `CNI_IFNAME`: 1 to 15 bytes.
    pub ifname: String,
    /// The pairs of `CNI_ARGS`, in order.
    pub args: Vec<(String, String)>,
    /// Capability arguments, name and value: those that a plugin's `capabilities` ask for become
    /// its `runtimeConfig`.
    pub capability_args: Vec<(String, Json)>,
}

impl Attach {
    /// An attachment without arguments.
    pub fn new(container_id: &str, netns: &str, ifname: &str) -> Attach {
        Attach {
            container_id: container_id.to_owned(),
            netns: netns.to_owned(),
            ifname: ifname.to_owned(),
            ..Attach::default()
        }
    }
}

/// What DEL does when a plugin fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnDelError {
    /// Return at once, as the reference: a later plugin might act on an address that an earlier
    /// plugin has released and another container has got.
    #[default]
    Stop,
    /// Run the others too and report all errors.
    Continue,
}

/// What a failed ADD leaves behind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnAddError {
    /// The work of the plugins that ran, for the caller to DEL: the specification's division of
    /// labour.
    #[default]
    Keep,
    /// Nothing: the plugins that ran get a DEL, the last one first, unless an earlier ADD of the
    /// same attachment is in the cache. Trouble with that goes to stderr; the error returned is
    /// that of the ADD.
    Undo,
}

/// Plugin directories, cache directory and habits. Build it with [`Runtime::new`] and change the
/// fields that should differ.
#[derive(Debug)]
pub struct Runtime {
    /// Where plugins are looked for, in order. Plugins get the same list as `CNI_PATH`.
    pub plugin_dirs: Vec<PathBuf>,
    /// Results are kept in `results/` below this directory. One that does not survive a reboot
    /// (below `/run`) keeps stale entries away.
    pub cache_dir: PathBuf,
    /// How long each plugin may take before it is killed. `None`: for ever.
    pub deadline: Option<Duration>,
    /// What a failing DEL does.
    pub on_del_error: OnDelError,
    /// What a failing ADD does.
    pub on_add_error: OnAddError,
    /// How plugins are found and run: processes, or a test's replacement.
    pub executor: Box<dyn Executor>,
}

impl Runtime {
    /// The reference's habits and the cache in [`DEFAULT_CACHE_DIR`].
    pub fn new(plugin_dirs: Vec<PathBuf>) -> Runtime {
        Runtime {
            plugin_dirs,
            cache_dir: DEFAULT_CACHE_DIR.into(),
            deadline: None,
            on_del_error: OnDelError::default(),
            on_add_error: OnAddError::default(),
            executor: Box::new(System),
        }
    }
}
