//! cnibox: every Linux CNI plugin, the runtime side of CNI and their installer in one program.
pub mod applets;
pub mod cni;
pub mod error;
pub mod iface;
pub mod invoke;
pub mod log;
pub mod netfilter;
pub mod netlink;
pub mod netns;
pub mod plugins;
pub mod skel;
pub mod store;
pub mod sysctl;
pub mod tool;
