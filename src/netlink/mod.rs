//! The kernel's links, addresses and routes.
//!
//! [`Netlink`] is one socket in one network namespace with plain, synchronous methods. Nothing
//! outside this folder sees a packet: lookups return
//! [`Link`], [`Addr`] and [`Route`], changes take [`NewLink`], [`LinkChange`], [`NewAddr`] and
//! [`Route`].
//!
//! The verbs: `x` looks up, `require_x` fails when there is none, `add_x` fails when there is
//! one, `del_x` tells whether there was one, `dump_x` lists.
//!
//! | file | |
//! | --- | --- |
//! | `socket.rs` | the one place that sends and receives |
//! | `request.rs` | requests, and errors decoded |
//! | `packet.rs` | messages and attributes as bytes |
//! | `link.rs`, `tun.rs`, `new_link.rs`, `link_change.rs` | links: reading, creating, changing |
//! | `nsid.rs` | the numbers of other namespaces |
//! | `bridge_vlan.rs` | VLANs of the ports of bridges |
//! | `addr.rs`, `route.rs`, `rule.rs` | addresses, routes, policy rules |
//! | `family.rs` | IPv4 or IPv6 |
//! | `events.rs` | waiting for the kernel instead of sleeping |
//! | `traffic/` | traffic control: qdiscs and filters |
//! | `attribute.rs`, `netfilter.rs` | attributes, netfilter's messages |
//! | `deferred_close.rs` | closing that socket without waiting |
//! | `nftables/` | the packet filter |
//! | `conntrack.rs` | forgetting connections |

mod addr;
mod attribute;
mod bridge_vlan;
pub mod conntrack;
mod deferred_close;
mod error;
mod events;
mod family;
#[doc(hidden)]
#[cfg(feature = "testing")]
pub mod fuzz;
mod kind;
mod link;
mod link_change;
mod mac;
mod netfilter;
mod new_link;
pub mod nftables;
mod nsid;
mod packet;
mod request;
mod route;
mod rule;
mod socket;
#[cfg(test)]
mod tests;
pub mod traffic;
mod tun;

use std::fmt;

use rtnetlink::sys::protocols::NETLINK_ROUTE;

pub use self::addr::{Addr, Dad, NewAddr};
pub use self::bridge_vlan::{PortVlans, Tagging, VlanPort};
pub use self::error::{Error, Result};
pub use self::events::{Changes, Waited};
pub use self::family::Family;
pub use self::kind::{IpvlanMode, MacvlanMode};
pub use self::link::{Link, OperState, Parent};
pub use self::link_change::{LinkChange, Switch};
pub use self::mac::Mac;
pub use self::new_link::{LinkKind, NewLink, VethPeer};
pub use self::packet::ip;
pub use self::route::{NextHop, RT_TABLE_MAIN, Route, RouteFilter, RouteMode};
pub use self::rule::Rule;
use self::socket::Socket;
use crate::netns::Netns;

/// A netlink socket in one network namespace.
pub struct Netlink {
    socket: Socket,
}

impl Netlink {
    /// A socket in the calling thread's namespace.
    pub fn open() -> Result<Netlink> {
        Ok(Netlink { socket: Socket::open(NETLINK_ROUTE)? })
    }

    /// A socket in `ns`.
    pub fn open_in(ns: &Netns) -> Result<Netlink> {
        ns.run(Netlink::open)?
    }
}

impl fmt::Debug for Netlink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Netlink").finish_non_exhaustive()
    }
}
