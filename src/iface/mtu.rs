//! The key `mtu` of a network: bytes, or `"auto"`, the MTU of the link of the host's default route, so that the MTU of an
//! overlay or a cloud's network is configured in one place only.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, Visitor};

use crate::error::{Context, Error, Result};
use crate::netlink::{Family, Link, Netlink, RT_TABLE_MAIN, Route, RouteFilter};

/// The least MTU of an interface with IPv6 addresses (RFC 8200, section 5): below, the kernel removes them.
pub const LEAST_OF_IPV6: u32 = 1280;
/// The remedy for a lower one.
pub const REMEDY_OF_IPV6: &str =
    "IPv6 needs an MTU of 1280 or more: raise \"mtu\", or remove the IPv6 range of \"ipam\"";

/// The configured MTU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mtu {
    /// Bytes; 0 leaves the MTU to the kernel.
    Bytes(i64),
    /// `"auto"`: the MTU of the link of the host's default route, of IPv4 first.
    Auto,
}

impl Default for Mtu {
    fn default() -> Mtu {
        Mtu::Bytes(0)
    }
}

/// The MTU in bytes; 0 leaves the MTU to the kernel.
pub fn bytes(configured: i64) -> Result<u32> {
    let why = if configured < 0 { "is negative" } else { "is larger than any link's" };
    u32::try_from(configured).map_err(|_| {
        Error::config(format!("mtu {configured} {why}"))
            .with_details("remove the key, or write 0: the kernel chooses then")
    })
}

impl Mtu {
    /// Refuses an MTU outside the limits of a veth pair or bridge (`ETH_MIN_MTU`, `ETH_MAX_MTU` of `if_ether.h`).
    pub fn require_ethernet(self) -> Result<()> {
        match self {
            Mtu::Bytes(number) if number != 0 && !(68..=65535).contains(&number) => {
                let msg = format!("invalid MTU {number}, must be 0, or 68 to 65535");
                Err(Error::config(msg))
            }
            _ => Ok(()),
        }
    }

    /// The MTU of a veth pair or bridge, as [`bytes`].
    pub fn resolve(self, host: &Netlink) -> Result<u32> {
        self.require_ethernet()?;
        match self {
            Mtu::Bytes(number) => bytes(number),
            Mtu::Auto => {
                let link = default_link(host).context(|| "mtu \"auto\"");
                link.map(|link| link.mtu)
                    .map_err(|e| e.with_details("write a number of bytes in the key \"mtu\""))
            }
        }
    }

    /// The MTU of a link on top of `master`: at most the MTU of `master`, to which [`Mtu::Auto`] is reduced.
    pub fn resolve_below(self, host: &Netlink, master: &Link) -> Result<u32> {
        let most = master.mtu;
        match self {
            Mtu::Bytes(bytes) => {
                u32::try_from(bytes).ok().filter(|mtu| *mtu <= most).ok_or_else(|| {
                    Error::config(format!("invalid MTU {bytes}, must be [0, master MTU({most})]"))
                })
            }
            Mtu::Auto => Ok(self.resolve(host)?.min(most)),
        }
    }
}

impl<'de> Deserialize<'de> for Mtu {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Mtu, D::Error> {
        from.deserialize_any(MtuVisitor)
    }
}

struct MtuVisitor;

impl Visitor<'_> for MtuVisitor {
    type Value = Mtu;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number of bytes or \"auto\"")
    }

    fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<Mtu, E> {
        Ok(Mtu::Bytes(bytes))
    }

    fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<Mtu, E> {
        Ok(Mtu::Bytes(i64::try_from(bytes).unwrap_or(i64::MAX)))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Mtu, E> {
        if text == "auto" {
            Ok(Mtu::Auto)
        } else {
            Err(E::invalid_value(de::Unexpected::Str(text), &self))
        }
    }
}

/// The link of the default route in the main table, of IPv4 first.
pub(super) fn default_link(place: &Netlink) -> Result<Link> {
    for family in [Family::V4, Family::V6] {
        let filter = RouteFilter { family: Some(family), table: Some(RT_TABLE_MAIN), oif: None };
        let routes = place.dump_routes(&filter)?;
        let default = routes.iter().filter(|route| route.dst.prefix_len() == 0);
        for index in default.filter_map(leaves_by) {
            let link = place.require_link_by_index(index)?;
            // An "unreachable" route uses the loopback interface.
            if !link.loopback {
                return Ok(link);
            }
        }
    }
    Err(Error::internal("no default route interface found"))
}

/// The link of a route: of a multipath route, the first next hop's.
fn leaves_by(route: &Route) -> Option<u32> {
    route.oif.or_else(|| route.nexthops.iter().find_map(|hop| hop.oif))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::json::Json;

    fn read(text: &str) -> Result<Mtu, String> {
        let json = Json::parse(text.as_bytes()).unwrap();
        Mtu::deserialize(&json).map_err(|e| e.to_string())
    }

    #[test]
    fn numbers_and_auto_are_accepted() {
        assert_eq!(read("1400"), Ok(Mtu::Bytes(1400)));
        assert_eq!(read("-1"), Ok(Mtu::Bytes(-1)));
        assert_eq!(read("\"auto\""), Ok(Mtu::Auto));
        for wrong in ["\"1400\"", "true", "1.5", "{}"] {
            let error = read(wrong).unwrap_err();
            assert!(error.starts_with("expected a number of bytes or \"auto\", found "), "{error}");
        }
    }

    #[test]
    fn negative_and_too_large_are_refused() {
        assert_eq!((bytes(0), bytes(9000)), (Ok(0), Ok(9000)));
        assert!(bytes(1 << 32).is_err() && bytes(-1).is_err());
        assert!(Mtu::Bytes(-1).require_ethernet().is_err());
    }

    #[test]
    fn a_multipath_route_leaves_by_its_first_next_hop() {
        let mut route = Route::new("0.0.0.0/0".parse().unwrap());
        assert_eq!(leaves_by(&route), None);
        let hop = |oif| crate::netlink::NextHop { gw: None, oif, weight: 1 };
        route.nexthops = vec![hop(None), hop(Some(7)), hop(Some(8))];
        assert_eq!(leaves_by(&route), Some(7));
        route.oif = Some(3);
        assert_eq!(leaves_by(&route), Some(3));
    }
}
