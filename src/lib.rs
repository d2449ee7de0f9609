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
//! | 4 | [`plugins`] | one file or directory per plugin |
//! | 4 | [`dhcp`] | the plugin dhcp: its daemon, and the state machines of both protocols |
//! | 4 | [`runtime`] | the calling side: lists, requests, execution, cache; a library for runtimes |
//! | 3 | [`framework`] | the plugin process: trait, typed requests, rollback, the printer of results |
//! | 3 | [`devices`] | devices of the host that containers have: host-device, bond |
//! | 2 | [`iface`] | link work that plugins share |
//! | 2 | [`netfilter`] | the packet filter |
//! | 2 | [`invoke`] | finding and running a plugin |
//! | 2 | [`leases`] | the leases of host-local |
//! | 2 | [`attachment`] | the owner of rules and leases, and whether its container is alive |
//! | 2 | [`files`] | locks, atomic replacement, directories of state |
//! | 1 | [`netlink`] | links, addresses, routes, traffic control, `nf_tables`: the only user of rtnetlink |
//! | 1 | [`trace`] | the flight recorder |
//! | 1 | [`netns`], [`sysctl`], [`cmd`], [`log`], [`options`] | namespaces, kernel parameters, programs, stderr, command lines |
//! | 0 | [`cni`], [`error`], [`open`], [`sort`] | the protocol as pure data, errors, opening of files, sorting |
//! | 0 | [`repairs`] | what `cnibox repair` finds |
//! | | `start` | the executable's way to the applet |
//! | | `testing`, `lane` | what tests use of all this; the kernel features that a test needs |
//!
//! A plugin is a type that implements [`framework::Plugin`]; start reading at
//! `plugins/loopback.rs`, the smallest one, then `plugins/ptp.rs`.
//!
//! A Rust program that is a container runtime uses [`runtime`]; everything else is private. Without the default feature
//! `plugins` (`default-features = false`) the crate has only `runtime` and the layers below it.
#![cfg_attr(
    not(feature = "plugins"),
    expect(dead_code, unused_imports, reason = "parts of the lower layers that plugins use")
)]

#[cfg(feature = "plugins")]
mod applets;
#[cfg(feature = "plugins")]
mod attachment;
mod cmd;
mod cni;
#[cfg(feature = "plugins")]
mod devices;
#[cfg(feature = "plugins")]
mod dhcp;
mod error;
mod files;
#[cfg(feature = "plugins")]
mod framework;
#[cfg(feature = "plugins")]
mod iface;
mod invoke;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod lane;
#[cfg(feature = "plugins")]
mod leases;
mod log;
#[cfg(all(feature = "plugins", target_arch = "x86_64"))]
#[doc(hidden)]
pub mod memory;
#[cfg(feature = "plugins")]
mod netfilter;
#[cfg(feature = "plugins")]
mod netlink;
mod netns;
mod open;
mod options;
#[cfg(feature = "plugins")]
mod plugins;
#[cfg(feature = "plugins")]
mod repairs;
pub mod runtime;
mod sort;
#[cfg(feature = "plugins")]
#[doc(hidden)]
pub mod start;
#[cfg(feature = "plugins")]
mod sysctl;
#[cfg(feature = "plugins")]
mod tool;
mod trace;

#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod testing;
