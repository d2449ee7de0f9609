//! The plugins as a runtime sees them: the real executable, the real kernel.
//!
//! Every test makes a private host namespace on its own thread ([`node::Node`]) and containers
//! that are namespaces held by a descriptor, so tests run in parallel and clean up by ending.
//! Root, or `unshare -rn`, is required; iproute2 and ping are the independent eyes.
//!
//! | module | |
//! | --- | --- |
//! | `node` | the private host, calls of plugins, snapshots of everything a plugin may leave |
//! | `net` | a network of a node: its configuration, its calls, what may remain of it |
//! | `traffic` | pings, TCP and UDP between host and containers |
//! | `lifecycle` | the verbs in the orders runtimes call them, for every version |
//! | `cnitool` | the tool with the real plugins: walk-through, chains, GC, STATUS |
//! | `protocol` | what all plugins share: environment, versions, error objects, VERSION, about |
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

mod bridge;
mod cnitool;
mod host_local;
mod lifecycle;
mod loopback;
mod net;
mod node;
mod protocol;
mod ptp;
mod traffic;
