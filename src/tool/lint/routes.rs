//! Subnets of a network that the node routes to another link: packets for the containers leave there.

use ipnet::IpNet;

use crate::cni::json::Json;
use crate::error::{Error, Result};
use crate::iface::overlap;
use crate::netlink::{Link, Netlink};
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

/// The routes of other links than the bridge `own`, and than the gateways of its VLANs.
fn overlaps(own: &str, subnets: &[IpNet]) -> Result<Vec<Error>> {
    let vlan_gateways = format!("{own}.");
    let is_own = |link: &Link| link.name == own || link.name.starts_with(&vlan_gateways);
    let found = overlap::elsewhere(&Netlink::open()?, subnets, &is_own)?;
    Ok(found.into_iter().map(|error| error.context("on this node")).collect())
}
