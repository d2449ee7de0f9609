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

pub use config::{Attachment, NetConf};
pub use names::{ContainerId, IfName, NetworkName};
pub use result::{CniResult, Dns, Interface, IpConfig, Route};
pub use version::{SpecVersion, Version};
