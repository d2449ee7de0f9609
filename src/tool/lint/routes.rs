//! Subnets of a network that the node routes to another link: packets for the containers leave
//! there.

use ipnet::IpNet;

use crate::iface::overlap;
use crate::netlink::Netlink;
use cni::error::Error;
use cni::json::Json;
use cni::runtime::PluginConfig;

/// Warnings for a plugin whose containers the node routes to, with the subnets of their addresses.
pub(super) fn subnets_routed_elsewhere(conf: &PluginConfig, subnets: &[IpNet]) -> Vec<Error> {
    let text = |key: &str| conf.json().get_present_member(key).and_then(Json::as_str);
    let own = match conf.plugin_type.as_str() {
        "bridge" => text("bridge").unwrap_or("cni0"),
        "ptp" => "",
        _ => return Vec::new(),
    };
    let host = Netlink::open().map_err(Error::from);
    let found = host.and_then(|host| overlap::conflicting_routes(&host, subnets, own));
    found.unwrap_or_default().into_iter().map(|error| error.context("on this node")).collect()
}
