//! The plugin process: what all plugins have in common.
//!
//! [`run`] is the way from process start to exit and the only printer of results; [`dispatch`]
//! checks a call and hands the plugin a typed request; [`CallContext`] is what a plugin may use
//! besides: the configuration's common keys, netlink in the host's namespace, its delegates;
//! [`Rollback`] undoes a failed ADD.

pub mod addressing;
pub mod call;
mod context;
mod delegate;
mod dispatch;
mod host_name;
mod living;
pub mod plugin;
pub mod port_owner;
pub mod reclaim;
pub mod record;
pub mod reference_gc;
pub mod resolv;
mod rollback;
pub mod run;
mod turn;

pub use call::{
    Applet, AppletKind, AppletMain, AppletTable, BuiltinPlugin, ConfigRemarks, PluginService,
};
pub use context::CallContext;
pub use living::CACHE_DIRS;
pub use plugin::{
    AddRequest, CheckRequest, DelRequest, GcRequest, LinkAddresses, Plugin, delete_and_release,
    require_prev_result,
};
pub use rollback::{Failures, Rollback};
pub use turn::AttachmentTurn;
