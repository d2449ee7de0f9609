//! Defects on the path of packets between a container and the network outside of the node:
//! forwarding, the MTU of links of the node, and reverse path filters.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::attachments::{ExaminedAttachment, RoutedNetwork, attachment_title, living_attachments};
use crate::netlink::{Link, Netlink, RouteFilter};
use crate::netns::Netns;
use crate::sysctl;
use crate::tool::finding::Finding;

/// Addresses that are not in use (RFC 5737, RFC 3849): packets to them take the default route.
pub(super) const ELSEWHERE: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
];

/// The kinds of tunnel links.
const TUNNELS: [&str; 6] = ["geneve", "gre", "ip6tnl", "ipip", "vxlan", "wireguard"];

/// `rp_filter` in strict mode (RFC 3704): drops packets whose source is reached through another
/// link.
const STRICT: &str = "1";

/// Forwarding that is off although the node is the gateway of containers.
pub(super) fn find_disabled_forwarding(routed: &[RoutedNetwork<'_>]) -> Vec<Finding> {
    let ips = routed.iter().flat_map(|(_, ips)| ips);
    let keys = [(true, "net/ipv4/ip_forward"), (false, "net/ipv6/conf/all/forwarding")];
    keys.into_iter()
        .filter_map(|(is_v4, key)| {
            let is_off = ips.clone().any(|ip| ip.is_ipv4() == is_v4)
                && sysctl::read_value(key).is_ok_and(|value| value == "0");
            let key = key.replace('/', ".");
            let problem = format!("{key} is 0: packets of containers are not forwarded");
            is_off.then(|| Finding::new_error("node", problem, format!("sysctl -w {key}=1")))
        })
        .collect()
}

/// Defects on the paths of living containers. Data that cannot be read is not a defect.
pub(super) fn examine_paths(attached: &[ExaminedAttachment]) -> Vec<Finding> {
    let mut interfaces: HashMap<&str, usize> = HashMap::new();
    for attached in living_attachments(attached) {
        *interfaces.entry(&attached.cached.attach.netns).or_default() += 1;
    }
    let candidates = living_attachments(attached).filter(|attached| attached.has_default);
    let mut findings: Vec<Finding> = candidates
        .filter(|attached| interfaces[&*attached.cached.attach.netns] > 1)
        .filter_map(find_strict_filter)
        .collect();
    if let Ok(host) = Netlink::open()
        && let Some(uplink) = narrowest_uplink(&host)
    {
        // One container of each network.
        let mut seen = HashSet::new();
        let routed = living_attachments(attached).filter(|attached| attached.is_routed());
        let firsts = routed.filter(|attached| seen.insert(&attached.cached.network));
        findings.extend(firsts.filter_map(|attached| find_oversized_packets(attached, &uplink)));
    }
    findings
}

/// The interface of a container with several interfaces if the container drops packets there
/// because its replies leave through another interface.
fn find_strict_filter(attached: &ExaminedAttachment) -> Option<Finding> {
    let (netns, ifname) = (&attached.cached.attach.netns, &attached.cached.attach.ifname);
    let ip = *attached.ips.iter().find(|ip| ip.is_ipv4())?;
    let namespace = Netns::open(netns).ok()?;
    let inside = Netlink::open_in(&namespace).ok()?;
    let reply = inside.find_route_to(ELSEWHERE[0], Some(ip)).ok()??.oif?;
    let link = inside.find_link(ifname).ok()??;
    let other = inside.find_link_by_index(reply).ok()??.name;
    // The kernel uses the higher of the two values.
    let keys = [ifname, "all"].map(|name| format!("net/ipv4/conf/{name}/rp_filter"));
    let mode = namespace
        .run_inside(|| keys.map(|key| sysctl::read_value(&key).unwrap_or_default()))
        .ok()?
        .into_iter()
        .max()?;
    (reply != link.index && mode == STRICT).then(|| {
        let problem = format!(
            "replies leave through \"{other}\", but rp_filter is strict: packets from other \
             subnets are dropped"
        );
        let remedy = format!("nsenter --net={netns} sysctl -w net.ipv4.conf.{ifname}.rp_filter=2");
        Finding::new_warning(attachment_title(&attached.cached), problem, remedy)
    })
}

/// The link with the smallest MTU among those through which packets of containers leave the node:
/// the links of the default routes, and tunnels.
fn narrowest_uplink(host: &Netlink) -> Option<Link> {
    let mut links = host.dump_links().ok()?;
    let by_default = ELSEWHERE.map(|to| host.find_route_to(to, None).ok()??.oif);
    let has_gateway = |link: &Link| {
        let filter = RouteFilter { oif: Some(link.index), ..RouteFilter::default() };
        host.dump_routes(&filter).is_ok_and(|routes| routes.iter().any(|route| route.gw.is_some()))
    };
    let is_tunnel = |link: &Link| link.kind.as_deref().is_some_and(|kind| TUNNELS.contains(&kind));
    links.retain(|link| {
        by_default.contains(&Some(link.index)) || (is_tunnel(link) && link.up && has_gateway(link))
    });
    links.into_iter().min_by_key(|link| link.mtu)
}

/// The network of a container whose packets are larger than the MTU of the uplink.
fn find_oversized_packets(attached: &ExaminedAttachment, uplink: &Link) -> Option<Finding> {
    let attach = &attached.cached.attach;
    let inside = Netlink::open_in(&Netns::open(&attach.netns).ok()?).ok()?;
    let mtu = inside.find_link(&attach.ifname).ok()??.mtu;
    let Link { name, mtu: limit, .. } = uplink;
    (mtu > *limit).then(|| {
        let problem = format!(
            "containers send packets of up to {mtu} bytes, but the MTU of \"{name}\" is {limit}: \
             larger ones depend on ICMP errors"
        );
        let remedy =
            format!("set \"mtu\": {limit} in its configuration, and recreate the containers");
        Finding::new_warning(format!("network {}", attached.cached.network), problem, remedy)
    })
}
