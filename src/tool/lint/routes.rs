//! Subnets of a network that the node routes to another link: packets for the containers leave there.

use ipnet::IpNet;

use super::keys::mistake;
use crate::cni::json::Json;
use crate::error::{Error, Result};
use crate::netlink::{Link, Netlink, RT_TABLE_MAIN, RouteFilter};
use crate::runtime::PluginConf;

/// Warnings for a plugin whose containers the node routes to, with the subnets of their addresses.
pub(super) fn elsewhere(conf: &PluginConf, subnets: &[IpNet]) -> Vec<Error> {
    let text = |key: &str| conf.json().get_present(key).and_then(Json::as_str);
    let own = match conf.plugin_type.as_str() {
        "bridge" => text("bridge").unwrap_or("cni0"),
        "ptp" => "",
        _ => return Vec::new(),
    };
    overlaps(own, subnets).unwrap_or_default()
}

/// The routes of other links than `own`, and than the gateway of one of its VLANs, into, or around, the subnets. Routes to single addresses are those of ptp, default routes
/// those of the node.
fn overlaps(own: &str, subnets: &[IpNet]) -> Result<Vec<Error>> {
    let host = Netlink::open()?;
    let filter = RouteFilter { table: Some(RT_TABLE_MAIN), ..RouteFilter::default() };
    let mut found = Vec::new();
    for route in host.dump_routes(&filter)? {
        let (dst, Some(oif)) = (route.dst, route.oif) else { continue };
        let is_single = dst.prefix_len() == dst.max_prefix_len();
        let shares = |subnet: &&IpNet| subnet.contains(&dst) || dst.contains(&subnet.trunc());
        let Some(subnet) = subnets.iter().find(shares) else { continue };
        if dst.prefix_len() == 0 || is_single || route.gw.is_some() {
            continue;
        }
        let vlan_gateways = format!("{own}.");
        let is_own = |link: &Link| link.name == own || link.name.starts_with(&vlan_gateways);
        if let Some(link) = host.link_by_index(oif)?.filter(|link| !is_own(link)) {
            let msg = format!(
                "on this node: {dst}, in or around the subnet {subnet}, is routed to \"{}\"",
                link.name
            );
            let remedy =
                "containers are not reached: choose a subnet that nothing else on the node uses";
            found.push(mistake(msg, remedy));
        }
    }
    Ok(found)
}
