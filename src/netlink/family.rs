//! IPv4 or IPv6.

use std::net::IpAddr;

use rtnetlink::packet_route::AddressFamily;
use serde::{Deserialize, Serialize};

/// An IP version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both.
    pub const BOTH: [Family; 2] = [Family::V4, Family::V6];

    /// The family of an address.
    pub fn of(addr: IpAddr) -> Family {
        if addr.is_ipv4() { Family::V4 } else { Family::V6 }
    }

    /// As rtnetlink's headers have it.
    pub(super) fn wire(family: Option<Family>) -> AddressFamily {
        match family {
            None => AddressFamily::Unspec,
            Some(Family::V4) => AddressFamily::Inet,
            Some(Family::V6) => AddressFamily::Inet6,
        }
    }
}
