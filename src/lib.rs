//! cnibox: every Linux CNI plugin, the runtime side of CNI and their installer in one executable
//! that picks its role from `argv[0]`.
//!
//! # The map
//!
//! Imports go down only; `make arch` checks it.
//!
//! | layer | module | what is there |
//! | --- | --- | --- |
//! | | [`applets`] | the table: every applet, one line each |
//! | 5 | [`tool`] | what a person runs: `cnitool`, `ipam`, `install`, `cnibox list` |
//! | 4 | [`plugins`] | one file or folder per plugin |
//! | 4 | [`runtime`] | the calling side: lists, requests, execution, cache; a library for runtimes |
//! | 3 | [`skel`] | the plugin process: trait, typed requests, rollback, the printer of results |
//! | 2 | [`iface`] | link work that plugins share |
//! | 2 | [`netfilter`] | the packet filter |
//! | 2 | [`attachment`] | whose something is, and whether that container is alive |
//! | 2 | [`invoke`] | finding and running a plugin |
//! | 2 | [`store`] | everything kept on disk |
//! | 1 | [`netlink`] | links, addresses, routes, traffic control, `nf_tables`: the only user of rtnetlink |
//! | 1 | [`netns`], [`sysctl`], [`cmd`], [`log`] | namespaces, kernel parameters, programs, stderr |
//! | 0 | [`cni`], [`error`] | the protocol as pure data |
//!
//! A plugin is a type that implements [`skel::Plugin`]; start reading at
//! `plugins/loopback.rs`, the smallest one, then `plugins/ptp.rs`.
//!
//! A Rust program that is a container runtime uses [`runtime`]; the other modules are public for
//! the tests of this repository and may change at any time.

pub mod applets;
pub mod attachment;
pub mod cmd;
pub mod cni;
pub mod error;
pub mod iface;
pub mod invoke;
#[cfg(test)]
#[path = "../tests/it/lane.rs"]
mod lane;
pub mod log;
pub mod netfilter;
pub mod netlink;
pub mod netns;
pub mod plugins;
pub mod runtime;
pub mod skel;
pub mod store;
pub mod sysctl;
pub mod tool;
