//! cnibox: every Linux CNI plugin, the runtime side of CNI and their installer in one program.
pub mod error;
pub mod log;
pub mod plugins;
pub mod store;
pub mod sysctl;
