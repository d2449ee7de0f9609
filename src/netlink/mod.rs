//! Netlink: links, addresses, routes, rules, traffic control and the packet filter.
//!
//! [`Netlink`] is one socket in one network namespace with plain, synchronous methods. Nothing
//! outside this directory handles messages: lookups return [`Link`], [`LinkAddress`] and
//! [`KernelRoute`], changes take [`NewLink`], [`LinkChange`], [`NewLinkAddress`] and
//! [`KernelRoute`].
//!
//! Methods: `find_x` looks up, `require_x` fails if the object is absent, `add_x` fails if the
//! object exists, `delete_x` returns whether it existed, `dump_x` lists.
//!
//! | file | |
//! | --- | --- |
//! | `socket.rs` | sending and receiving |
//! | `request.rs` | requests, and decoding of replies and errors |
//! | `attribute.rs` | attributes |
//! | `link.rs`, `link_info.rs`, `new_link.rs`, `link_change.rs` | links: reading, creating, changing |
//! | `offload.rs` | the checksum offload of a link |
//! | `bridge_vlan.rs`, `fdb.rs` | bridges: VLANs of ports, the forwarding database |
//! | `addr.rs`, `route.rs`, `rule.rs`, `neighbour.rs` | addresses, routes, policy rules, neighbours |
//! | `events.rs` | waiting for events of the kernel |
//! | `traffic.rs`, `traffic/` | traffic control: qdiscs and filters |
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
mod neighbour;
mod new_link;
pub mod nftables;
mod offload;
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

pub use self::addr::{DuplicateDetection, LinkAddress, NewLinkAddress};
pub use self::attribute::ip_from_bytes;
pub use self::bridge_vlan::{BridgePortVlans, PortVlanRange, VlanTagging};
pub use self::detached_delete::set_process_ends;
pub use self::error::{NetlinkError, NetlinkResult};
pub use self::events::{LossEvents, WaitOutcome};
pub use self::fdb::FdbEntry;
pub use self::link::{Link, OperationalState, ParentDevice};
pub use self::link_change::{LinkChange, OnOffSetting};
pub use self::link_info::{
    BOND_HASH_POLICIES, BOND_LACP_RATES, BOND_MODES, BondSettings, IpvlanMode, MacvlanMode,
};
pub use self::mac::MacAddress;
pub use self::new_link::{LinkKind, NewLink, VethPeer};
pub use self::route::{KernelRoute, MultipathHop, RT_TABLE_MAIN, RouteAddMode, RouteFilter};
pub use self::rule::PolicyRule;
use self::socket::NetlinkSocket;
use crate::netns::{self, Netns};

/// A netlink socket in one network namespace.
#[derive(Debug)]
pub struct Netlink {
    socket: NetlinkSocket,
    /// The network namespace of the socket, if the socket was opened by [`Netlink::open_in`].
    elsewhere: Option<Netns>,
}

impl Netlink {
    /// A socket in the calling thread's namespace.
    pub fn open() -> NetlinkResult<Netlink> {
        Ok(Netlink { socket: NetlinkSocket::open(NETLINK_ROUTE)?, elsewhere: None })
    }

    /// A socket in `netns`.
    pub fn open_in(netns: &Netns) -> NetlinkResult<Netlink> {
        let socket = netns.run_inside(|| NetlinkSocket::open(NETLINK_ROUTE))??;
        Ok(Netlink { socket, elsewhere: Some(netns.clone()) })
    }

    /// The [identity](netns::current_id) of the calling thread's namespace, in which the socket was
    /// [opened](Netlink::open).
    pub fn netns_id(&self) -> Option<u64> {
        netns::id_by_socket(&self.socket)
    }

    /// The [cookie](netns::current_cookie) of the socket's namespace; `None` if it is unknown.
    pub fn netns_cookie(&self) -> Option<u64> {
        netns::cookie_by_socket(&self.socket)
    }
}

/// An IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum IpFamily {
    V4,
    V6,
}

impl IpFamily {
    pub const BOTH: [IpFamily; 2] = [IpFamily::V4, IpFamily::V6];

    pub fn of_address(addr: IpAddr) -> IpFamily {
        if addr.is_ipv4() { IpFamily::V4 } else { IpFamily::V6 }
    }

    /// `AF_UNSPEC`, `AF_INET` or `AF_INET6`, for the fixed headers of messages.
    fn af_number(family: Option<IpFamily>) -> u8 {
        match family {
            None => 0,
            Some(IpFamily::V4) => 2,
            Some(IpFamily::V6) => 10,
        }
    }
}
