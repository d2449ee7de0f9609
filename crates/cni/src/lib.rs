//! The Container Network Interface (CNI) for Rust: for container runtimes, and for plugins.
#![doc = include_str!("../README.md")]
#![warn(missing_docs)]

pub mod args;
pub mod config;
pub mod error;
pub mod exec;
#[doc(hidden)]
pub mod files;
#[doc(hidden)]
pub mod ip;
pub mod json;
pub mod names;
pub mod plugin;
pub mod result;
pub mod runtime;
#[doc(hidden)]
pub mod sort;
pub mod version;
#[doc(hidden)]
pub mod wire;

pub use config::{NetworkConfig, ValidAttachment};
pub use error::{Error, ErrorCode, Result};
pub use json::Json;
pub use names::{ContainerId, InterfaceName, NetworkName};
pub use result::{CniResult, DnsConfig, IpConfig, ResultInterface, ResultRoute};
pub use version::{SpecVersion, VersionNumber};

/// Prefixes of results.
pub use ipnet;
