//! The link of the host's default route.

use crate::error::{Error, Result};
use crate::netlink::{Family, Link, Netlink, RT_TABLE_MAIN, Route, RouteFilter};

/// The link of the default route in the main table, of IPv4 first.
pub(super) fn link(place: &Netlink) -> Result<Link> {
    for family in [Family::V4, Family::V6] {
        let filter = RouteFilter { family: Some(family), table: Some(RT_TABLE_MAIN), oif: None };
        let routes = place.dump_routes(&filter)?;
        let default = routes.iter().filter(|route| route.dst.prefix_len() == 0);
        for index in default.filter_map(leaves_by) {
            let link = place.require_link_by_index(index)?;
            // An "unreachable" route has the loopback interface.
            if !link.loopback {
                return Ok(link);
            }
        }
    }
    Err(Error::internal("no default route interface found")
        .with_details("name the link in the key \"master\", or a number in the key \"mtu\""))
}

/// The link of a route: of a multipath route, the first next hop's.
fn leaves_by(route: &Route) -> Option<u32> {
    route.oif.or_else(|| route.nexthops.iter().find_map(|hop| hop.oif))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_multipath_route_leaves_by_its_first_way() {
        let mut route = Route::new("0.0.0.0/0".parse().unwrap());
        assert_eq!(leaves_by(&route), None);
        let hop = |oif| crate::netlink::NextHop { gw: None, oif, weight: 1 };
        route.nexthops = vec![hop(None), hop(Some(7)), hop(Some(8))];
        assert_eq!(leaves_by(&route), Some(7));
        route.oif = Some(3);
        assert_eq!(leaves_by(&route), Some(3));
    }
}
