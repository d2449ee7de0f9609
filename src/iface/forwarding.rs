//! Forwarding between interfaces of the host.

use ipnet::IpNet;

use crate::netlink::{Link, Netlink, RouteFilter};
use crate::repairs::RepairFindings;
use crate::sysctl;
use cni::error::{ErrorContext, Result};

const FORWARD_IPV4: &str = "net/ipv4/ip_forward";
const FORWARD_IPV6: &str = "net/ipv6/conf/all/forwarding";

/// The parameters that must be enabled for the families of `nets`, and are not. The kernel forwards
/// IPv4 packets from a link only if the link's own parameter is enabled, too; a new link inherits
/// that parameter from `conf/default`. Enabling [`FORWARD_IPV4`] enables the parameters of all
/// links.
fn disabled_parameters(link: &Link, nets: &[IpNet]) -> Result<Vec<String>> {
    let has = |v4| nets.iter().any(|net| net.addr().is_ipv4() == v4);
    let link_key = format!("net/ipv4/conf/{}/forwarding", link.name);
    let v4 = if has(true) { &[FORWARD_IPV4, &link_key][..] } else { &[] };
    let v6 = if has(false) { &[FORWARD_IPV6][..] } else { &[] };
    let mut disabled = Vec::new();
    for keys in [v4, v6] {
        for key in keys {
            if sysctl::read_value(key)? != "1" {
                disabled.push((*key).to_owned());
                break;
            }
        }
    }
    Ok(disabled)
}

/// Enables forwarding from `link` for the families of `nets`, and writes nothing if it is enabled
/// already. Forwarding is never disabled, since other programs may rely on it.
pub fn enable_for_link(host: &Netlink, link: &Link, nets: &[IpNet]) -> Result<()> {
    let failed = || "failed to enable forwarding";
    for key in disabled_parameters(link, nets).context(failed)? {
        if key == FORWARD_IPV6 {
            keep_advertisements(host, link)?;
        }
        sysctl::write_value(&key, "1").context(failed)?;
    }
    Ok(())
}

/// Enables forwarding again where it was disabled.
pub fn restore_disabled(host: &Netlink, link: &Link, nets: &[IpNet], repairs: &mut RepairFindings) {
    for key in disabled_parameters(link, nets).unwrap_or_default() {
        repairs.restore_missing(format!("sysctl {key}"), || enable_for_link(host, link, nets));
    }
}

/// Changes `accept_ra` from 1, which has no effect once forwarding is enabled, to 2 on the links of
/// the node and for links created later: otherwise the node loses the routes that its routers
/// advertise, or never gets them. Links of containers are left out: `own`, ports, links with the
/// random names of host ends, and bridges without a gateway behind them.
fn keep_advertisements(host: &Netlink, own: &Link) -> Result<()> {
    let leads_out = |link: &Link| {
        let filter = RouteFilter { oif: Some(link.index), ..RouteFilter::default() };
        let routes = host.dump_routes(&filter).unwrap_or_default();
        routes.iter().any(|route| route.gw.is_some() || !route.nexthops.is_empty())
    };
    let is_containers = |link: &Link| {
        let is_bridge = link.kind.as_deref() == Some("bridge");
        let has_name_of_host_end = link.name.starts_with("veth");
        let is_port = link.master.is_some();
        link.index == own.index || is_port || has_name_of_host_end || is_bridge && !leads_out(link)
    };
    let links = host.dump_links()?.into_iter();
    let uplinks = links.filter(|link| link.accept_ra == Some(1) && !link.loopback);
    let names = uplinks.filter(|link| !is_containers(link)).map(|link| link.name);
    for name in names.chain(["default".to_owned()]) {
        let key = format!("net/ipv6/conf/{name}/accept_ra");
        // The link may have been deleted meanwhile.
        if sysctl::read_value(&key).is_ok_and(|value| value == "1") {
            sysctl::write_value(&key, "2")
                .context(|| "keep the routes of router advertisements")?;
        }
    }
    Ok(())
}
