//! The plugins as a runtime sees them: the real executable, the real kernel.
//!
//! Every test makes a private host namespace on its own thread ([`node::Node`]) and containers
//! that are namespaces held by a descriptor, so tests run in parallel and clean up by ending.
//! Root, or `unshare -rn`, is required; iproute2 and ping are the independent eyes.
//!
//! | module | |
//! | --- | --- |
//! | `node` | the private host, calls of plugins, snapshots of everything a plugin may leave |
//! | `protocol` | what all plugins share: environment, versions, error objects, VERSION, about |
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

mod faults;
mod node;
mod protocol;
mod strace;
