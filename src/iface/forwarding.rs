//! Forwarding between interfaces of the host.

use std::net::IpAddr;

use crate::error::{Context, Result};
use crate::netlink::{Family, Netlink, RouteFilter};
use crate::sysctl;

/// The protocol of routes from router advertisements, `RTPROT_RA`.
const BY_ADVERTISEMENT: u8 = 9;
const OF_IPV4: &str = "net/ipv4/ip_forward";
const OF_IPV6: &str = "net/ipv6/conf/all/forwarding";

/// The parameters that [`enable`] would have to write for the families of `ips`.
pub fn missing(ips: impl Iterator<Item = IpAddr>) -> Vec<&'static str> {
    let mut keys: Vec<_> = ips.map(|ip| if ip.is_ipv4() { OF_IPV4 } else { OF_IPV6 }).collect();
    keys.sort_unstable();
    keys.dedup();
    keys.retain(|key| sysctl::read(key).is_ok_and(|value| value == "0"));
    keys
}

/// Enables forwarding for the families of `ips`. Forwarding is never disabled, since other programs may rely on it, and
/// not written if enabled already.
pub fn enable(host: &Netlink, ips: impl Iterator<Item = IpAddr>) -> Result<()> {
    let (mut v4, mut v6) = (false, false);
    for ip in ips {
        *if ip.is_ipv4() { &mut v4 } else { &mut v6 } = true;
    }
    let failed = || "failed to enable forwarding";
    if v4 {
        sysctl::ensure(OF_IPV4, "1").context(failed)?;
    }
    if v6 && sysctl::read(OF_IPV6).context(failed)? != "1" {
        keep_default_routes(host)?;
        sysctl::write(OF_IPV6, "1").context(failed)?;
    }
    Ok(())
}

/// Sets `accept_ra` to 2 on links with a default route from a router advertisement: otherwise a host that forwards
/// ignores router advertisements and loses these routes.
fn keep_default_routes(host: &Netlink) -> Result<()> {
    let filter = RouteFilter { family: Some(Family::V6), ..RouteFilter::default() };
    let routes = host.dump_routes(&filter)?;
    let advertised = routes
        .iter()
        .filter(|route| route.protocol == Some(BY_ADVERTISEMENT) && route.dst.prefix_len() == 0);
    let hops = advertised.flat_map(|r| r.nexthops.iter().map(|hop| hop.oif).chain([r.oif]));
    for index in hops.flatten() {
        let Some(link) = host.link_by_index(index)? else { continue };
        if link.accept_ra == Some(1) {
            let key = format!("net/ipv6/conf/{}/accept_ra", link.name);
            sysctl::write(&key, "2").context(|| "keep the IPv6 default route")?;
        }
    }
    Ok(())
}
