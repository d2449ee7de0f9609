//! The key `mtu` of a network: a number of bytes, or `"auto"` for the MTU of the link of the host's
//! default route, so that the MTU of an overlay or cloud network is configured in one place only.

use std::fmt;

use serde::de::{self, Deserialize, Deserializer, Visitor};

use super::{ContainerNetns, peer};
use crate::netlink::{
    IpFamily, KernelRoute, Link, LinkChange, Netlink, RT_TABLE_MAIN, RouteFilter,
};
use cni::error::{Error, ErrorContext, Result};

/// The least MTU of an interface with IPv6 addresses, in bytes (RFC 8200, section 5): with a lower
/// MTU the kernel deletes the addresses.
pub const LEAST_OF_IPV6: u32 = 1280;
/// The remedy for an MTU below [`LEAST_OF_IPV6`].
pub const REMEDY_OF_IPV6: &str =
    "IPv6 needs an MTU of 1280 or more: raise \"mtu\", or remove the IPv6 range of \"ipam\"";

/// Gives the host's end of a veth pair the MTU `mtu`, which the container's end `link` has got:
/// packets that are larger than the MTU of the end that receives them vanish without notice, and
/// so do those between ports of a bridge. Below the MTU of its bridge the host's end stays as it
/// is, because the kernel would lower that of the bridge. Warns of an end that stays, or a bridge
/// that differs. Returns the host's end if it has the MTU.
pub fn set_on_host_end(
    host: &Netlink,
    inside: &ContainerNetns<'_>,
    link: &Link,
    mtu: u32,
) -> Result<Option<Link>> {
    let name = &link.name;
    let Some(end) = peer::find_host_end(host, inside, link)? else {
        if link.kind.as_deref() == Some("veth") {
            warn!("mtu {mtu} of \"{name}\": the other end is not on the host, and keeps its MTU");
        }
        return Ok(None);
    };
    let master = end.master.map(|index| host.find_link_by_index(index)).transpose()?.flatten();
    let bridge = master.filter(|master| master.bridge.is_some());
    if let Some(bridge) = bridge.as_ref().filter(|bridge| bridge.mtu != mtu) {
        warn!(
            "mtu {mtu} of \"{name}\": \"{}\" has {}, and packets of more than the lower number \
             vanish between them; write \"mtu\" for the plugin bridge instead",
            bridge.name, bridge.mtu
        );
    }
    if bridge.is_none_or(|bridge| bridge.mtu <= mtu) && end.mtu != mtu {
        host.change_link(end.index, LinkChange::new().set_mtu(mtu))
            .context(|| format!("set mtu {mtu} of \"{}\"", end.name))?;
        return Ok(Some(Link { mtu, ..end }));
    }
    Ok((end.mtu == mtu).then_some(end))
}

/// The value of the key `mtu`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MtuConfig {
    /// Bytes; 0 leaves the MTU to the kernel.
    Bytes(i64),
    /// `"auto"`: the MTU of the link of the host's default route; the IPv4 route is preferred.
    Auto,
}

impl Default for MtuConfig {
    fn default() -> MtuConfig {
        MtuConfig::Bytes(0)
    }
}

/// The MTU in bytes; 0 leaves the MTU to the kernel.
pub fn bytes_from_config(configured: i64) -> Result<u32> {
    let why = if configured < 0 { "is negative" } else { "is larger than any link's" };
    u32::try_from(configured).map_err(|_| {
        Error::config(format!("mtu {configured} {why}"))
            .with_details("remove the key, or write 0: the kernel chooses then")
    })
}

impl MtuConfig {
    /// Refuses an MTU outside the limits of a veth pair or bridge (`ETH_MIN_MTU`, `ETH_MAX_MTU` of
    /// `if_ether.h`).
    pub fn require_ethernet(self) -> Result<()> {
        match self {
            MtuConfig::Bytes(number) if number != 0 && !(68..=65535).contains(&number) => {
                let msg = format!("invalid MTU {number}, must be 0, or 68 to 65535");
                Err(Error::config(msg))
            }
            _ => Ok(()),
        }
    }

    /// The MTU of a veth pair or bridge in bytes; 0 leaves the MTU to the kernel.
    pub fn resolve_bytes(self, host: &Netlink) -> Result<u32> {
        self.require_ethernet()?;
        match self {
            MtuConfig::Bytes(number) => bytes_from_config(number),
            MtuConfig::Auto => {
                let link = default_route_link(host).context(|| "mtu \"auto\"");
                link.map(|link| link.mtu)
                    .map_err(|e| e.with_details("write a number of bytes in the key \"mtu\""))
            }
        }
    }

    /// The MTU of a link on top of `master`: at most the MTU of `master`, to which
    /// [`MtuConfig::Auto`] is reduced.
    pub fn resolve_below(self, host: &Netlink, master: &Link) -> Result<u32> {
        let most = master.mtu;
        match self {
            MtuConfig::Bytes(bytes) => {
                u32::try_from(bytes).ok().filter(|mtu| *mtu <= most).ok_or_else(|| {
                    Error::config(format!("invalid MTU {bytes}, must be [0, master MTU({most})]"))
                })
            }
            MtuConfig::Auto => Ok(self.resolve_bytes(host)?.min(most)),
        }
    }
}

impl<'de> Deserialize<'de> for MtuConfig {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<MtuConfig, D::Error> {
        from.deserialize_any(MtuVisitor)
    }
}

struct MtuVisitor;

impl Visitor<'_> for MtuVisitor {
    type Value = MtuConfig;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number of bytes or \"auto\"")
    }

    fn visit_i64<E: de::Error>(self, bytes: i64) -> Result<MtuConfig, E> {
        Ok(MtuConfig::Bytes(bytes))
    }

    fn visit_u64<E: de::Error>(self, bytes: u64) -> Result<MtuConfig, E> {
        Ok(MtuConfig::Bytes(i64::try_from(bytes).unwrap_or(i64::MAX)))
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<MtuConfig, E> {
        if text == "auto" {
            Ok(MtuConfig::Auto)
        } else {
            Err(E::invalid_value(de::Unexpected::Str(text), &self))
        }
    }
}

/// The link of the default route in the main table; the IPv4 route is preferred.
pub(super) fn default_route_link(netlink: &Netlink) -> Result<Link> {
    for family in [IpFamily::V4, IpFamily::V6] {
        let filter = RouteFilter { family: Some(family), table: Some(RT_TABLE_MAIN), oif: None };
        let routes = netlink.dump_routes(&filter)?;
        let default = routes.iter().filter(|route| route.dst.prefix_len() == 0);
        for index in default.filter_map(outgoing_link) {
            let link = netlink.require_link_by_index(index)?;
            // An "unreachable" route uses the loopback interface.
            if !link.loopback {
                return Ok(link);
            }
        }
    }
    Err(Error::internal("no default route interface found"))
}

/// The index of the link of a route; of the first next hop for a multipath route.
fn outgoing_link(route: &KernelRoute) -> Option<u32> {
    route.oif.or_else(|| route.nexthops.iter().find_map(|hop| hop.oif))
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni::json::Json;

    fn read(text: &str) -> Result<MtuConfig, String> {
        let json = Json::parse(text.as_bytes()).unwrap();
        MtuConfig::deserialize(&json).map_err(|e| e.to_string())
    }

    #[test]
    fn an_mtu_is_a_number_or_auto() {
        assert_eq!(read("1400"), Ok(MtuConfig::Bytes(1400)));
        assert_eq!(read("-1"), Ok(MtuConfig::Bytes(-1)));
        assert_eq!(read("\"auto\""), Ok(MtuConfig::Auto));
        for wrong in ["\"1400\"", "true", "1.5", "{}"] {
            let error = read(wrong).unwrap_err();
            assert!(error.starts_with("expected a number of bytes or \"auto\", found "), "{error}");
        }
    }

    #[test]
    fn mtus_out_of_range_are_refused() {
        assert_eq!((bytes_from_config(0), bytes_from_config(9000)), (Ok(0), Ok(9000)));
        assert!(bytes_from_config(1 << 32).is_err() && bytes_from_config(-1).is_err());
        assert!(MtuConfig::Bytes(-1).require_ethernet().is_err());
    }

    #[test]
    fn auto_mtu_uses_the_first_next_hop_of_a_multipath_route() {
        let mut route = KernelRoute::new("0.0.0.0/0".parse().unwrap());
        assert_eq!(outgoing_link(&route), None);
        let hop = |oif| crate::netlink::MultipathHop { gw: None, oif, weight: 1 };
        route.nexthops = vec![hop(None), hop(Some(7)), hop(Some(8))];
        assert_eq!(outgoing_link(&route), Some(7));
        route.oif = Some(3);
        assert_eq!(outgoing_link(&route), Some(3));
    }
}
