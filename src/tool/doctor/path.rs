//! What is in the way of packets that leave a container: links of the node that carry smaller ones, and the filter of
//! reverse paths.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::diagnosis::Diagnosis;
use crate::netlink::{Link, Netlink, RouteFilter};
use crate::netns::Netns;
use crate::sysctl;

/// Addresses that nobody has (RFC 5737, RFC 3849): packets to them take the default route.
const ELSEWHERE: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)),
];

/// Kinds of links that put packets into packets.
const TUNNELS: [&str; 6] = ["geneve", "gre", "ip6tnl", "ipip", "vxlan", "wireguard"];

/// Drops what comes in by another link than its answer would leave by.
const STRICT: &str = "1";

/// An interface in a living container.
pub(super) struct End<'a> {
    /// What a diagnosis of the attachment is about.
    pub(super) title: String,
    pub(super) network: &'a str,
    /// The path of the namespace.
    pub(super) netns: &'a str,
    pub(super) ifname: &'a str,
    pub(super) ips: &'a [IpAddr],
    /// The node is its gateway.
    pub(super) is_routed: bool,
    /// ADD told of an IPv4 default route by it.
    pub(super) has_default: bool,
}

/// What is wrong with the paths of these. What cannot be read is not known, and no mistake.
pub(super) fn examine(ends: &[End<'_>]) -> Vec<Diagnosis> {
    let mut found: Vec<Diagnosis> = strict_filters(ends).collect();
    if let Ok(host) = Netlink::open()
        && let Some(way) = narrowest_way(&host)
    {
        found.extend(too_large(ends, &way));
    }
    found
}

/// The link with the smallest MTU of those that packets of containers leave the node by.
fn narrowest_way(host: &Netlink) -> Option<Link> {
    let mut ways = host.dump_links().ok()?;
    let by_default = ELSEWHERE.map(|to| host.route_to(to).ok()??.oif);
    let has_gateway = |link: &Link| {
        let filter = RouteFilter { oif: Some(link.index), ..RouteFilter::default() };
        host.dump_routes(&filter).is_ok_and(|routes| routes.iter().any(|route| route.gw.is_some()))
    };
    let is_tunnel = |link: &Link| link.kind.as_deref().is_some_and(|kind| TUNNELS.contains(&kind));
    ways.retain(|link| {
        by_default.contains(&Some(link.index)) || (is_tunnel(link) && link.up && has_gateway(link))
    });
    ways.into_iter().min_by_key(|link| link.mtu)
}

/// Networks whose containers send larger packets than the way takes; one container tells.
fn too_large(ends: &[End<'_>], way: &Link) -> Vec<Diagnosis> {
    let mut known = HashSet::new();
    let firsts = ends.iter().filter(|end| end.is_routed && known.insert(end.network));
    let diagnosis = |end: &End<'_>| {
        let mtu = Netlink::open_in(&Netns::open(end.netns).ok()?).ok()?.link(end.ifname).ok()??.mtu;
        let (name, most) = (&way.name, way.mtu);
        (mtu > most).then(|| {
            let problem = format!(
                "containers send packets of up to {mtu} bytes, and \"{name}\" takes {most}: larger ones depend on ICMP errors"
            );
            let cure = format!("set \"mtu\": {most} in its configuration, and attach the containers anew");
            Diagnosis::warning(format!("network {}", end.network), problem, cure)
        })
    };
    firsts.filter_map(diagnosis).collect()
}

/// Interfaces of containers with several, whose packets the container drops as it would answer by another interface.
fn strict_filters<'a>(ends: &'a [End<'_>]) -> impl Iterator<Item = Diagnosis> + 'a {
    let mut interfaces: HashMap<&str, usize> = HashMap::new();
    for end in ends {
        *interfaces.entry(end.netns).or_default() += 1;
    }
    ends.iter()
        .filter(move |end| end.has_default && interfaces[end.netns] > 1)
        .filter_map(strict_filter)
}

fn strict_filter(end: &End<'_>) -> Option<Diagnosis> {
    let ip = *end.ips.iter().find(|ip| ip.is_ipv4())?;
    let netns = Netns::open(end.netns).ok()?;
    let inside = Netlink::open_in(&netns).ok()?;
    let way = inside.route_from(ip, ELSEWHERE[0]).ok()??.oif?;
    let link = inside.link(end.ifname).ok()??;
    let other = inside.link_by_index(way).ok()??.name;
    let key = format!("net.ipv4.conf.{}.rp_filter", end.ifname);
    // The kernel takes the higher of the two.
    let both = [
        format!("net/ipv4/conf/{}/rp_filter", end.ifname),
        "net/ipv4/conf/all/rp_filter".to_owned(),
    ];
    let values = netns.run(|| both.map(|key| sysctl::read(&key).unwrap_or_default())).ok()?;
    (way != link.index && values.iter().max().is_some_and(|value| value == STRICT)).then(|| {
        let problem = format!("answers leave by \"{other}\", and rp_filter is strict: packets from other subnets are dropped");
        Diagnosis::warning(&*end.title, problem, format!("nsenter --net={} sysctl -w {key}=2", end.netns))
    })
}
