//! Link work that plugins share: making a veth pair, configuring what is inside the container,
//! verifying it, forwarding on the host.

pub mod configure;
pub mod forwarding;
pub mod inside;
pub mod names;
pub mod verify;
pub mod veth;

pub use inside::Inside;
