//! Rules of other software that drop forwarded packets: from containers to other networks, and to
//! published ports of containers.

use std::mem::discriminant;
use std::net::IpAddr;

use super::attachments::RoutedNetwork;
use super::path::ELSEWHERE;
use crate::cmd;
use crate::netfilter::ports::{PortmapPart, RECORDS};
use crate::netlink::Netlink;
use crate::netlink::nftables::{
    ForwardChain, ForwardJudgement, ForwardedPacket, NftSocket, NftTable, TableFamily,
    TransportProtocol,
};
use crate::tool::finding::Finding;

/// The chain for an administrator's rules on a node with Docker.
const DOCKER_USER: &str = "DOCKER-USER";

/// The packets of a network that are judged: to other networks, and to published ports.
struct ForwardedPackets {
    /// The host's link to the containers, as a pattern: the links of ptp differ.
    link: String,
    is_shared: bool,
    out: Vec<ForwardedPacket>,
    published: Vec<ForwardedPacket>,
}

/// The base chains that drop packets of these networks, or do so unless a rule accepts them whose
/// condition cannot be judged. Tables of cnibox are left out: whoever configured the plugins knows
/// them.
pub(super) fn find_dropping_chains(
    nft: &NftSocket,
    networks: &[RoutedNetwork<'_>],
) -> Vec<Finding> {
    let mut chains = nft.dump_forward_chains().unwrap_or_default();
    chains.retain(|chain| !chain.table.starts_with("cnibox_"));
    let Ok(host) = Netlink::open() else { return Vec::new() };
    let ways: Vec<_> = networks
        .iter()
        .map(|(list, ips)| (&list.name, forwarded_packets(&host, &list.name, ips)))
        .collect();
    let dropped = |chain: &ForwardChain| {
        let judge = |packets: &[ForwardedPacket]| {
            let judged = packets.iter().map(|packet| match chain.judge_packet(nft, packet) {
                // Without a default route a rule may concern any link.
                ForwardJudgement::DropsUnless(_)
                    if packet.iif.is_none() || packet.oif.is_none() =>
                {
                    ForwardJudgement::Passes
                }
                judged => judged,
            });
            judged.max().unwrap_or(ForwardJudgement::Passes)
        };
        ways.iter().find_map(|(network, ways)| {
            let ways = ways.as_ref()?;
            let (out, published) = (judge(&ways.out), judge(&ways.published));
            let worst = out.clone().max(published.clone());
            let is_dropped = |judged: &ForwardJudgement| {
                worst != ForwardJudgement::Passes && discriminant(judged) == discriminant(&worst)
            };
            let (out, published) = (is_dropped(&out), is_dropped(&published));
            let dropped = match (out, published) {
                (true, true) => "to other networks, and those to its published ports",
                (true, false) => "to other networks",
                (false, true) => "to its published ports",
                (false, false) => return None,
            };
            let problem = format!("drops forwarded packets of network {network} {dropped}");
            let subject = format!("chain {} {} {}", chain.family, chain.table, chain.name);
            let remedy = accept_commands(nft, chain, ways, !out);
            Some(match worst {
                ForwardJudgement::DropsUnless(rule) => {
                    let unless = format!("{problem}, unless {rule} accepts them");
                    Finding::new_note(subject, unless, remedy)
                }
                _ => Finding::new_warning(subject, problem, remedy),
            })
        })
    };
    chains.iter().filter_map(dropped).collect()
}

/// The packets of a network whose containers have these addresses; `None` if no route leads to
/// them.
fn forwarded_packets(host: &Netlink, network: &str, ips: &[IpAddr]) -> Option<ForwardedPackets> {
    let name = |index| Some(host.find_link_by_index(index).ok()??.name);
    let to = |ip: IpAddr| name(host.find_route_to(ip, None).ok()??.oif?);
    let uplink = |is_ipv4: bool| to(*ELSEWHERE.iter().find(|ip| ip.is_ipv4() == is_ipv4)?);
    let link = ips.iter().find_map(|ip| to(*ip))?;
    let out = |ip: &IpAddr| ForwardedPacket {
        is_ipv4: ip.is_ipv4(),
        iif: to(*ip),
        oif: uplink(ip.is_ipv4()),
        source: Some(*ip),
        destination: None,
        proto: TransportProtocol::Tcp,
        port: None,
        host_port: None,
    };
    let mut published = Vec::new();
    for kept in RECORDS.restorable_parts::<PortmapPart>() {
        if kept.attachment_id().network != network {
            continue;
        }
        for target in kept.content.targets.iter().copied() {
            let addr = target.addr();
            published.extend(kept.content.mappings_to(target).map(|mapping| ForwardedPacket {
                is_ipv4: addr.is_ipv4(),
                iif: uplink(addr.is_ipv4()),
                oif: to(addr),
                source: None,
                destination: Some(addr),
                proto: mapping.proto,
                port: Some(mapping.container_port),
                host_port: Some(mapping.host_port),
            }));
        }
    }
    // One container of each family is enough.
    let firsts = [true, false].map(|is_ipv4| ips.iter().find(|ip| ip.is_ipv4() == is_ipv4));
    let is_shared = !link.starts_with("veth");
    Some(ForwardedPackets {
        link,
        is_shared,
        out: firsts.into_iter().flatten().map(out).collect(),
        published,
    })
}

/// Commands that add rules which accept the packets of this network only. The rules last until the
/// rules of the node are loaded again.
fn accept_commands(
    nft: &NftSocket,
    chain: &ForwardChain,
    ways: &ForwardedPackets,
    is_strict: bool,
) -> String {
    let ForwardChain { family, table, name, .. } = chain;
    let pattern =
        |wildcard: &'static str| if ways.is_shared { ways.link.as_str() } else { wildcard };
    if *family != TableFamily::Inet && table == "filter" && name == "FORWARD" {
        let program = if *family == TableFamily::Ip6 { "ip6tables" } else { "iptables" };
        let has_docker = nft
            .has_object(NftTable::new(*family, table).named_chain(DOCKER_USER))
            .unwrap_or_default();
        let chain = if has_docker { DOCKER_USER } else { "FORWARD" };
        return accept_by_iptables(program, chain, pattern("veth+"));
    }
    if table == "firewalld" && ways.is_shared && cmd::find_program("firewall-cmd").is_some() {
        if is_strict {
            return "set StrictForwardPorts=no in /etc/firewalld/firewalld.conf, then: \
                    firewall-cmd --reload"
                .to_owned();
        }
        let zone = format!("--zone=trusted --change-interface={}", ways.link);
        return format!("firewall-cmd {zone}; firewall-cmd --permanent {zone}");
    }
    let (link, chain) = (pattern("veth*"), format!("{family} {table} {name}"));
    let rules = [
        format!("iifname \"{link}\" accept"),
        format!("oifname \"{link}\" ct state established,related accept"),
        format!("oifname \"{link}\" ct status dnat accept"),
    ];
    format!("nft '{}'", rules.map(|rule| format!("insert rule {chain} {rule}")).join("; "))
}

/// Commands that accept packets from the link, answers to them, and packets whose destination the
/// host has translated. The plugin firewall does the same for each container.
pub(super) fn accept_by_iptables(program: &str, chain: &str, link: &str) -> String {
    format!(
        "{program} -I {chain} -i {link} -j ACCEPT; {program} -I {chain} -o {link} -m conntrack \
         --ctstate RELATED,ESTABLISHED,DNAT -j ACCEPT # or add the plugin firewall to its list"
    )
}
