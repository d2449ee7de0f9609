//! The CNI protocol as pure data: versions, names, arguments, configurations, results, errors.
//! Nothing here does I/O.
#![warn(missing_docs)]

pub mod args;
pub mod config;
pub mod ip;
pub mod json;
pub mod names;
pub mod result;
pub mod secrets;
pub mod version;
pub mod wire;

pub use config::{NetworkConfig, ValidAttachment};
pub use names::{ContainerId, InterfaceName, NetworkName};
pub use result::{CniResult, DnsConfig, IpConfig, ResultInterface, ResultRoute};
pub use version::{SpecVersion, VersionNumber};
