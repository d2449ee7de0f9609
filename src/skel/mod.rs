//! The plugin process: what all plugins have in common.
//!
//! [`run`] is the way from process start to exit and the only printer of results; [`dispatch`]
//! checks a call and hands the plugin a typed request; [`Cx`] is what a plugin may use besides:
//! the configuration's common keys, netlink in the host's namespace, its delegates; [`Rollback`]
//! undoes a failed ADD.

pub mod addressing;
pub mod call;
mod context;
mod delegate;
mod dispatch;
pub mod in_doubt;
pub mod plugin;
pub mod reclaim;
pub mod record;
mod rollback;
pub mod run;

pub use call::{Applet, Kind, Main, OwnPlugin, Remarks, Service, Table, Verb};
pub use context::Cx;
pub use plugin::{AddReq, CheckReq, DelReq, GcReq, Plugin, del_and_release, require_prev};
pub use rollback::{Failures, Rollback};
