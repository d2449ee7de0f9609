//! Netlink: links, addresses, routes, rules, traffic control and the packet filter.
//!
//! [`Netlink`] is one socket in one network namespace with plain, synchronous methods. Nothing
//! outside this folder handles messages: lookups return [`Link`], [`Addr`] and [`Route`], changes
//! take [`NewLink`], [`LinkChange`], [`NewAddr`] and [`Route`].
//!
//! Methods: `x` looks up, `require_x` fails if the object is absent, `add_x` fails if it exists, `del_x`
//! returns whether it existed, `dump_x` lists.
//!
//! | file | |
//! | --- | --- |
//! | `socket.rs` | sending and receiving |
//! | `request.rs` | requests, and decoding of replies and errors |
//! | `attribute.rs` | attributes |
//! | `link.rs`, `link_info.rs`, `new_link.rs`, `link_change.rs` | links: reading, creating, changing |
//! | `bridge_vlan.rs`, `fdb.rs` | VLANs of the ports of bridges; their forwarding database |
//! | `addr.rs`, `route.rs`, `rule.rs` | addresses, routes, policy rules |
//! | `events.rs` | waiting for events of the kernel |
//! | `traffic.rs` | traffic control: qdiscs and filters |
//! | `nftables/` | the packet filter |
//! | `conntrack.rs` | deleting tracked connections |
//! | `deferred_close.rs` | closing a netfilter socket without waiting |
//! | `detached_delete.rs` | deleting a link without waiting |

mod addr;
mod attribute;
mod bridge_vlan;
pub mod conntrack;
mod deferred_close;
mod detached_delete;
mod error;
mod events;
mod fdb;
#[doc(hidden)]
#[cfg(feature = "testing")]
pub mod fuzz;
mod link;
mod link_change;
mod link_info;
mod mac;
mod new_link;
pub mod nftables;
mod request;
mod route;
mod rule;
mod socket;
#[cfg(test)]
mod tests;
pub mod traffic;

use std::net::IpAddr;

use rtnetlink::sys::protocols::NETLINK_ROUTE;
use serde::{Deserialize, Serialize};

pub use self::addr::{Addr, Dad, NewAddr};
pub use self::attribute::ip;
pub use self::bridge_vlan::{PortVlans, Tagging, VlanPort};
pub use self::detached_delete::process_ends;
pub use self::error::{Error, Result};
pub use self::events::{Changes, Waited};
pub use self::link::{Link, OperState, Parent};
pub use self::link_change::{LinkChange, Switch};
pub use self::link_info::{IpvlanMode, MacvlanMode};
pub use self::mac::Mac;
pub use self::new_link::{LinkKind, NewLink, VethPeer};
pub use self::route::{NextHop, RT_TABLE_MAIN, Route, RouteFilter, RouteMode};
pub use self::rule::Rule;
use self::socket::Socket;
use crate::netns::{self, Netns};

/// A netlink socket in one network namespace.
#[derive(Debug)]
pub struct Netlink {
    socket: Socket,
    /// The namespace, if it is not that of the thread which has the socket.
    elsewhere: Option<Netns>,
}

impl Netlink {
    /// A socket in the calling thread's namespace.
    pub fn open() -> Result<Netlink> {
        Ok(Netlink { socket: Socket::open(NETLINK_ROUTE)?, elsewhere: None })
    }

    /// A socket in `ns`.
    pub fn open_in(ns: &Netns) -> Result<Netlink> {
        let socket = ns.run(|| Socket::open(NETLINK_ROUTE))??;
        Ok(Netlink { socket, elsewhere: Some(ns.clone()) })
    }

    /// The [identity](netns::current_id) of the calling thread's namespace, in which the socket was [opened](Netlink::open).
    pub fn netns_id(&self) -> Option<u64> {
        netns::id_by(&self.socket)
    }
}

/// An IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    pub const BOTH: [Family; 2] = [Family::V4, Family::V6];

    /// The family of an address.
    pub fn of(addr: IpAddr) -> Family {
        if addr.is_ipv4() { Family::V4 } else { Family::V6 }
    }

    /// `AF_UNSPEC`, `AF_INET` or `AF_INET6`, as fixed headers have it.
    fn number(family: Option<Family>) -> u8 {
        match family {
            None => 0,
            Some(Family::V4) => 2,
            Some(Family::V6) => 10,
        }
    }
}
