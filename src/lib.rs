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
//! | 4 | [`resolver`] | `cnibox egress resolver`: answers the queries for names of policies |
//! | 3 | [`framework`] | the plugin process: trait, typed requests, rollback, the printer of results |
//! | 3 | [`devices`] | devices of the host that containers have: host-device, bond |
//! | 2 | [`iface`] | link work that plugins share |
//! | 2 | [`netfilter`] | the packet filter |
//! | 2 | [`invoke`] | plugins as processes, in the flight recorder |
//! | 2 | [`leases`] | the leases of host-local |
//! | 2 | [`attachment`] | the owner of rules and leases, and whether its container is alive |
//! | 2 | [`files`] | locks, directories of state |
//! | 1 | [`netlink`] | links, addresses, routes, traffic control, `nf_tables`: the only user of rtnetlink |
//! | 1 | [`trace`] | the flight recorder |
//! | 1 | [`netns`], [`sysctl`], [`cmd`], [`stderr`], [`options`] | namespaces, kernel parameters, programs, the log, command lines |
//! | 1 | [`daemon`], [`confine`] | how daemons begin, and drop privileges |
//! | 0 | [`secrets`] | what a document shows that leaves the node |
//! | 0 | [`repairs`] | what `cnibox repair` finds |
//! | | [`cni`] | the crate in `crates/cni`: the protocol as data, the calling side of CNI, the skeleton of a plugin |
//! | | `start` | the executable's way to the applet |
//! | | `testing`, `lane` | what tests use of all this; the kernel features that a test needs |
//!
//! A plugin is a type that implements [`framework::Plugin`]; start reading at
//! `plugins/loopback.rs`, the smallest one, then `plugins/ptp.rs`.
//!
//! All of it is private: a container runtime or a plugin in Rust uses the crate [`cni`], published
//! as `cnibox-cni`.

// First: its macros are for all modules.
#[macro_use]
mod stderr;

mod applets;
mod attachment;
mod cmd;
mod confine;
mod daemon;
mod devices;
mod dhcp;
mod files;
mod framework;
mod iface;
mod invoke;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod lane;
mod leases;
#[cfg(target_arch = "x86_64")]
#[doc(hidden)]
pub mod memcpy;
mod netfilter;
mod netlink;
mod netns;
mod options;
mod plugins;
mod repairs;
mod resolver;
mod secrets;
#[doc(hidden)]
pub mod start;
mod sysctl;
mod tool;
mod trace;

#[cfg(feature = "testing")]
#[doc(hidden)]
pub mod testing;
