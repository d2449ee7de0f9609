//! The plugins, one file or folder each.
pub mod host_local;
