//! Work on links that several plugins do: create a veth pair, a tap device or a link on top of
//! another link, redirect and judge packets, configure and verify the container's interface, enable
//! forwarding on the host.

pub mod checksums;
pub mod child;
pub mod configure;
pub mod forwarding;
pub mod guard;
pub mod inside;
pub mod mtu;
pub mod overlap;
pub mod peer;
pub mod redirect;
pub mod routes;
pub mod tables;
pub mod tun;
pub mod verify;
pub mod veth;

pub use inside::ContainerNetns;

/// The scope of a route without a gateway: `RT_SCOPE_LINK` of `linux/rtnetlink.h`.
pub const ON_LINK: u8 = 253;
