//! The plugin process: what every plugin has around it.
//!
//! [`run`] is the way from process start to exit and the only printer of results; [`dispatch`]
//! checks a call and hands the plugin a typed request; [`Cx`] is what a plugin may use besides:
//! the configuration's common keys, netlink in the host's namespace, its delegates; [`Rollback`]
//! undoes a failed ADD.

pub mod applet;
pub mod call;
mod context;
mod delegate;
mod dispatch;
pub mod plugin;
pub mod reclaim;
mod rollback;
pub mod run;
pub mod start;

pub use applet::{Applet, Kind, Main, Service};
pub use call::{Call, Env, Lookup, RunFn, Verb};
pub use context::Cx;
pub use dispatch::dispatch;
pub use plugin::{AddReq, CheckReq, DelReq, GcReq, Plugin, del_and_release};
pub use rollback::{Failures, Rollback};
