//! cnibox: every Linux CNI plugin, the runtime side of CNI and their installer in one program.
pub mod cni;
pub mod error;
pub mod log;
pub mod netlink;
pub mod netns;
pub mod sysctl;
