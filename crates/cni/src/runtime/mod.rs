//! The runtime side of CNI: reads network configurations, runs plugins, returns and caches results.
//!
//! The counterpart of libcni for Rust programs. Plugins are executables. A program that attaches
//! containers needs three things:
//!
//! * a network, from a file: [`NetworkList::load`] by name, [`NetworkList::from_file`],
//!   [`NetworkList::from_bytes`];
//! * an [`AttachmentParams`]: the container, the namespace, the interface and the arguments;
//! * a [`Runtime`]: the directories of plugins and cache, and the behaviour on errors. Its methods
//!   are the operations: [`Runtime::add`], [`Runtime::check`], [`Runtime::del`], [`Runtime::gc`],
//!   [`Runtime::status`], [`Runtime::validate`].
//!
//! ```no_run
//! use cnibox_cni::runtime::{AttachmentParams, NetworkList, OnAddError, Runtime};
//!
//! # fn main() -> cnibox_cni::Result<()> {
//! let runtime = Runtime {
//!     on_add_error: OnAddError::Undo,
//!     ..Runtime::new(vec!["/opt/cni/bin".into()])
//! };
//! let network = NetworkList::load("/etc/cni/net.d".as_ref(), "pods")?;
//! let attachment = AttachmentParams::new("3f2a", "/run/netns/pod1", "eth0");
//! let result = runtime.add(&network, &attachment)?;
//! # drop(result);
//! runtime.del(&network, &attachment)
//! # }
//! ```
//!
//! There is no locking: the caller must serialise operations on the same container, and run no ADD
//! and no DEL of a network during its GC. The format of the cache is that of libcni (see
//! [`cache`]).
//!
//! Errors are those of the plugin, with its code (spec, section "Error"), or name the step that
//! failed, with the texts of libcni.
#![warn(missing_docs)]

pub mod cache;
mod conf;
mod housekeeping;
mod list;
mod ops;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

pub use cache::CachedAttachment;
#[doc(hidden)]
pub use cache::cached_netns;
pub use conf::{EXTENSIONS, MAX_CONF_BYTES, PluginConfig, find_config_files};
pub use list::NetworkList;
#[doc(hidden)]
pub use list::is_list_file;

use crate::exec::{PluginExecutor, ProcessExecutor};
use crate::json::Json;

/// The default directory of cached results.
pub const DEFAULT_CACHE_DIR: &str = "/var/lib/cni";

/// The parameters of an attachment of a container to a network.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AttachmentParams {
    /// The container, `CNI_CONTAINERID`: `[a-zA-Z0-9][a-zA-Z0-9_.-]*`.
    pub container_id: String,
    /// Path of the network namespace, `CNI_NETNS`. May be empty on DEL if the namespace no longer
    /// exists.
    pub netns: String,
    /// The interface inside the container, `CNI_IFNAME`: 1 to 15 bytes.
    pub ifname: String,
    /// The pairs of `CNI_ARGS`, in order.
    pub args: Vec<(String, String)>,
    /// Capability arguments, name and value: the `runtimeConfig` of a plugin has those that its
    /// `capabilities` ask for.
    pub capability_args: Vec<(String, Json)>,
}

impl AttachmentParams {
    /// An attachment without arguments.
    ///
    /// ```
    /// # use cnibox_cni::runtime::AttachmentParams;
    /// let pod = AttachmentParams {
    ///     args: vec![("K8S_POD_NAME".into(), "web".into()), ("IgnoreUnknown".into(), "1".into())],
    ///     ..AttachmentParams::new("3f2a", "/run/netns/web", "eth0")
    /// };
    /// assert_eq!(pod.ifname, "eth0");
    /// ```
    pub fn new(container_id: &str, netns: &str, ifname: &str) -> AttachmentParams {
        AttachmentParams {
            container_id: container_id.to_owned(),
            netns: netns.to_owned(),
            ifname: ifname.to_owned(),
            ..AttachmentParams::default()
        }
    }
}

/// What DEL does when a plugin fails.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnDelError {
    /// Return at once, as libcni: a later plugin might act on an address that an earlier plugin has
    /// released and that another container has received.
    #[default]
    Stop,
    /// Run the other plugins too and report all errors.
    Continue,
}

/// What a failed ADD leaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnAddError {
    /// The work of the plugins that ran: the caller must run DEL, as in the specification.
    #[default]
    Keep,
    /// Nothing: the plugins that ran get a DEL, in reverse order, unless an earlier ADD of the same
    /// attachment is in the cache. Errors of these DELs are logged; the error of the ADD is
    /// returned. A delegate of a plugin that its deadline has killed may still work afterwards.
    Undo,
}

/// Plugin directories, cache directory and behaviour. Create it with [`Runtime::new`] and change
/// the fields that differ.
#[derive(Debug)]
pub struct Runtime {
    /// The directories of plugins, searched in order. Plugins receive the same list as `CNI_PATH`.
    pub plugin_dirs: Vec<PathBuf>,
    /// Results are cached in `results/` below this directory. A directory below `/run` has no
    /// stale entries after a reboot.
    pub cache_dir: PathBuf,
    /// The timeout of each plugin, which is then killed. `None`: no timeout.
    pub deadline: Option<Duration>,
    /// What DEL does when a plugin fails.
    pub on_del_error: OnDelError,
    /// What a failed ADD leaves.
    pub on_add_error: OnAddError,
    /// Finds and runs plugins: as processes by default.
    pub executor: Box<dyn PluginExecutor>,
}

impl Runtime {
    /// The behaviour of libcni, and the cache in [`DEFAULT_CACHE_DIR`].
    ///
    /// ```
    /// # use cnibox_cni::runtime::Runtime;
    /// let runtime = Runtime { cache_dir: "/run/my-runtime/cni".into(), ..Runtime::new(vec!["/opt/cni/bin".into()]) };
    /// assert_eq!(runtime.deadline, None);
    /// ```
    pub fn new(plugin_dirs: Vec<PathBuf>) -> Runtime {
        Runtime {
            plugin_dirs,
            cache_dir: DEFAULT_CACHE_DIR.into(),
            deadline: None,
            on_del_error: OnDelError::default(),
            on_add_error: OnAddError::default(),
            executor: Box::new(ProcessExecutor),
        }
    }
}
