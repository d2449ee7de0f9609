//! Forwarding between interfaces of the host.

use ipnet::IpNet;

use crate::error::{Context, Result};
use crate::netlink::{Family, Link, Netlink, RouteFilter};
use crate::repairs::Repairs;
use crate::sysctl;

/// The protocol of routes from router advertisements, `RTPROT_RA`.
const BY_ADVERTISEMENT: u8 = 9;
const OF_IPV4: &str = "net/ipv4/ip_forward";
const OF_IPV6: &str = "net/ipv6/conf/all/forwarding";

/// The parameters to set for the families of `nets`. IPv4 is forwarded from a link only with the link's own parameter, which a
/// new link takes over from `conf/default`; enabling the first parameter enables those of all links.
fn disabled(link: &Link, nets: &[IpNet]) -> Result<Vec<String>> {
    let has = |v4| nets.iter().any(|net| net.addr().is_ipv4() == v4);
    let of_link = format!("net/ipv4/conf/{}/forwarding", link.name);
    let v4 = if has(true) { &[OF_IPV4, &of_link][..] } else { &[] };
    let v6 = if has(false) { &[OF_IPV6][..] } else { &[] };
    let mut disabled = Vec::new();
    for keys in [v4, v6] {
        for key in keys {
            if sysctl::read(key)? != "1" {
                disabled.push((*key).to_owned());
                break;
            }
        }
    }
    Ok(disabled)
}

/// Enables forwarding from `link` for the families of `nets`. Forwarding is never disabled, since other programs may rely on it,
/// and not written if enabled already.
pub fn enable(host: &Netlink, link: &Link, nets: &[IpNet]) -> Result<()> {
    let failed = || "failed to enable forwarding";
    for key in disabled(link, nets).context(failed)? {
        if key == OF_IPV6 {
            keep_default_routes(host)?;
        }
        sysctl::write(&key, "1").context(failed)?;
    }
    Ok(())
}

/// Enables forwarding again where it was disabled.
pub fn repair(host: &Netlink, link: &Link, nets: &[IpNet], repairs: &mut Repairs) {
    for key in disabled(link, nets).unwrap_or_default() {
        repairs.restore(format!("sysctl {key}"), || enable(host, link, nets));
    }
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
