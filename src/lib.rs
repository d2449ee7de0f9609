//! cnibox: every Linux CNI plugin, the runtime side of CNI and their installer in one program.
pub mod cni;
pub mod error;
pub mod invoke;
pub mod log;
pub mod runtime;
pub mod store;
pub mod tool;
