//! The state of the kernel and the files of the node, as lines that can be compared.

use std::collections::BTreeSet;
use std::fs;
use std::iter;
use std::net::IpAddr;
use std::path::Path;

use rtnetlink::packet_route::address::{AddressAttribute, AddressMessage};
use rtnetlink::packet_route::link::{LinkAttribute, LinkFlags, LinkInfo, LinkMessage};
use rtnetlink::packet_route::route::{
    RouteAddress, RouteAttribute, RouteMessage, RouteMetric, RouteType,
};
use rtnetlink::packet_route::rule::{RuleAttribute, RuleMessage};
use rtnetlink::packet_route::tc::{TcAttribute, TcMessage};
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage as Message};

use super::{Result, context, netlink};

/// Attributes of a rule that differ between two equal rules: `NFTA_RULE_HANDLE`,
/// `NFTA_RULE_POSITION` and `NFTA_RULE_PAD`, with which kernels for some architectures align what
/// follows in a dump.
const RULE_HANDLE: u16 = 3;
const RULE_POSITION: u16 = 6;
const RULE_PAD: u16 = 8;
/// `NFTA_RULE_TABLE`, `NFTA_RULE_CHAIN`, `NFTA_RULE_EXPRESSIONS`; `NFTA_EXPR_NAME`.
const RULE_TABLE: u16 = 1;
const RULE_CHAIN: u16 = 2;
const RULE_EXPRESSIONS: u16 = 4;
const EXPRESSION_NAME: u16 = 1;

/// The directory of the containers' network namespaces.
pub const NAMESPACES: &str = "/run/netns";

/// A link, reduced to what results of plugins contain.
#[derive(Debug, Default)]
pub struct Link {
    pub index: u32,
    pub name: String,
    pub kind: String,
    pub mac: String,
    pub mtu: u32,
    pub up: bool,
    pub promisc: bool,
    pub allmulti: bool,
    /// Length of the transmit queue in packets.
    pub queue: u32,
    pub master: Option<u32>,
    /// `IFLA_LINKINFO`, as `netlink-packet-route` prints it.
    pub detail: String,
}

/// The links of the calling thread's namespace.
pub fn links() -> Result<Vec<Link>> {
    let link = |message| match message {
        Message::NewLink(link) => Some(read_link(&link)),
        _ => None,
    };
    let messages = netlink::dump(Message::GetLink(LinkMessage::default()));
    Ok(context(messages, "list links")?.into_iter().filter_map(link).collect())
}

fn read_link(message: &LinkMessage) -> Link {
    let has = |flag| message.header.flags.contains(flag);
    let (up, promisc, allmulti) =
        (has(LinkFlags::Up), has(LinkFlags::Promisc), has(LinkFlags::Allmulti));
    let mut link = Link { index: message.header.index, up, promisc, allmulti, ..Link::default() };
    for attribute in &message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name.clone_from(name),
            LinkAttribute::Mtu(mtu) => link.mtu = *mtu,
            LinkAttribute::Controller(master) => link.master = Some(*master),
            LinkAttribute::TxQueueLen(packets) => link.queue = *packets,
            LinkAttribute::Address(mac) => {
                let bytes: Vec<String> = mac.iter().map(|byte| format!("{byte:02x}")).collect();
                link.mac = bytes.join(":");
            }
            LinkAttribute::LinkInfo(infos) => {
                let kind = infos.iter().find_map(|info| match info {
                    LinkInfo::Kind(kind) => Some(kind.to_string()),
                    _ => None,
                });
                link.kind = kind.unwrap_or_default();
                link.detail = format!("{infos:?}");
            }
            _ => {}
        }
    }
    link
}

/// An address, with the link that has it.
#[derive(Debug)]
pub struct Address {
    pub index: u32,
    pub ip: IpAddr,
    pub prefix: u8,
}

/// The addresses of the calling thread's namespace.
pub fn addresses() -> Result<Vec<Address>> {
    let address = |message| {
        let Message::NewAddress(message) = message else { return None };
        // With a peer IFA_ADDRESS is the peer's address, and IFA_LOCAL the link's.
        let ips = message.attributes.iter().filter_map(|attribute| match attribute {
            AddressAttribute::Local(ip) => Some((0, *ip)),
            AddressAttribute::Address(ip) => Some((1, *ip)),
            _ => None,
        });
        let (_, ip) = ips.min()?;
        Some(Address { index: message.header.index, ip, prefix: message.header.prefix_len })
    };
    let messages = netlink::dump(Message::GetAddress(AddressMessage::default()));
    Ok(context(messages, "list addresses")?.into_iter().filter_map(address).collect())
}

#[derive(Debug)]
pub struct Route {
    /// `None` is the default route of the family.
    pub dst: Option<IpAddr>,
    pub prefix: u8,
    pub is_v4: bool,
    pub gateway: Option<IpAddr>,
    pub oif: Option<u32>,
    pub table: u32,
    pub priority: Option<u32>,
    pub scope: u8,
    pub mtu: Option<u32>,
    pub advmss: Option<u32>,
}

impl Route {
    /// Whether this is the network of the route.
    pub fn leads_to(&self, network: IpAddr, prefix: u8) -> bool {
        let dst = (prefix != 0).then_some(network);
        (self.dst, self.prefix, self.is_v4) == (dst, prefix, network.is_ipv4())
    }
}

/// The unicast routes of the calling thread's namespace, without the kernel's local and broadcast
/// routes.
pub fn routes() -> Result<Vec<Route>> {
    let route = |message| match message {
        Message::NewRoute(route) if route.header.kind == RouteType::Unicast => {
            Some(read_route(&route))
        }
        _ => None,
    };
    let messages = netlink::dump(Message::GetRoute(RouteMessage::default()));
    Ok(context(messages, "list routes")?.into_iter().filter_map(route).collect())
}

fn read_route(message: &RouteMessage) -> Route {
    let mut route = Route {
        dst: None,
        prefix: message.header.destination_prefix_length,
        is_v4: message.header.address_family == AddressFamily::Inet,
        gateway: None,
        oif: None,
        table: u32::from(message.header.table),
        priority: None,
        scope: message.header.scope.into(),
        mtu: None,
        advmss: None,
    };
    for attribute in &message.attributes {
        match attribute {
            RouteAttribute::Destination(address) => route.dst = ip(address),
            RouteAttribute::Gateway(address) => route.gateway = ip(address),
            RouteAttribute::Oif(index) => route.oif = Some(*index),
            RouteAttribute::Table(table) => route.table = *table,
            RouteAttribute::Priority(priority) => route.priority = Some(*priority),
            RouteAttribute::Metrics(metrics) => {
                for metric in metrics {
                    match metric {
                        RouteMetric::Mtu(mtu) => route.mtu = Some(*mtu),
                        RouteMetric::Advmss(bytes) => route.advmss = Some(*bytes),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    route
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(ip) => Some(IpAddr::V4(*ip)),
        RouteAddress::Inet6(ip) => Some(IpAddr::V6(*ip)),
        _ => None,
    }
}

/// The state of a namespace, one line for each object: an object that a plugin leaves behind is a
/// line that only the later of two snapshots has.
#[derive(Debug)]
pub struct Snapshot(BTreeSet<String>);

impl Snapshot {
    /// Links, addresses, routes, rules, qdiscs and packet filter of the calling thread's namespace.
    pub fn of_kernel() -> Result<Snapshot> {
        let links = links()?;
        let name = |index: u32| {
            let found = links.iter().find(|link| link.index == index);
            found.map_or_else(|| format!("#{index}"), |link| link.name.clone())
        };
        let mut found = BTreeSet::new();
        for Link { name: link, kind, mtu, up, master, .. } in &links {
            let master = master.map(name).unwrap_or_default();
            found.insert(format!("link {link} {kind} mtu {mtu} up {up} master \"{master}\""));
        }
        for Address { index, ip, prefix } in addresses()? {
            // The kernel adds and removes link-local addresses asynchronously.
            if !matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local()) {
                found.insert(format!("address {ip}/{prefix} of {}", name(index)));
            }
        }
        for Route { dst, prefix, gateway, oif, table, is_v4, .. } in routes()? {
            if matches!(dst, Some(IpAddr::V6(ip)) if ip.is_unicast_link_local() || ip.is_multicast())
            {
                continue;
            }
            let text = |ip: Option<IpAddr>| ip.map(|ip| ip.to_string()).unwrap_or_default();
            let (family, dst, gateway) = (if is_v4 { 4 } else { 6 }, text(dst), text(gateway));
            let by = oif.map(name).unwrap_or_default();
            found.insert(format!(
                "route IPv{family} \"{dst}\"/{prefix} via \"{gateway}\" by {by} table {table}"
            ));
        }
        for rule in netlink::dump(Message::GetRule(RuleMessage::default()))? {
            // The kernel adds a rule with the first VRF of a namespace, and keeps it.
            let of_vrf = RuleAttribute::L3MDev(true);
            if let Message::NewRule(rule) = rule
                && !rule.attributes.contains(&of_vrf)
            {
                found.insert(format!("rule {:?} {:?}", rule.header, rule.attributes));
            }
        }
        for qdisc in netlink::dump(Message::GetQueueDiscipline(TcMessage::default()))? {
            if let Message::NewQueueDiscipline(qdisc) = qdisc {
                let kind = qdisc.attributes.iter().find_map(|attribute| match attribute {
                    TcAttribute::Kind(kind) => Some(kind.as_str()),
                    _ => None,
                });
                let of = name(u32::try_from(qdisc.header.index).unwrap_or_default());
                found.insert(format!("qdisc {} of {of}", kind.unwrap_or_default()));
            }
        }
        found.extend(filter_rules());
        Ok(Snapshot(found))
    }

    /// Adds the files below a directory, without the namespaces, which are the suite's own.
    pub fn add_files(&mut self, directory: &Path) {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let (path, Ok(kind)) = (entry.path(), entry.file_type()) else { continue };
            if path.starts_with(NAMESPACES) {
                continue;
            }
            if kind.is_dir() {
                self.add_files(&path);
            } else {
                self.0.insert(format!("file {}", path.display()));
            }
        }
    }

    /// Whether a line contains this text.
    pub fn has(&self, text: &str) -> bool {
        self.0.iter().any(|line| line.contains(text))
    }

    /// The lines that the other snapshot lacks.
    pub fn without(&self, other: &Snapshot) -> Vec<String> {
        self.0.difference(&other.0).cloned().collect()
    }
}

/// The `nf_tables` rules, including those of iptables; equal ones are numbered, so that a snapshot
/// with more of them lacks none.
fn filter_rules() -> Vec<String> {
    let messages = netlink::filter_rules().unwrap_or_default();
    let mut all: Vec<String> = messages.iter().map(|message| filter_rule(message)).collect();
    all.sort();
    let numbered = |same: &[String]| {
        let lines = same.iter().zip(1..).map(|(rule, number)| format!("{rule}, number {number}"));
        lines.collect::<Vec<_>>()
    };
    all.chunk_by(|a, b| a == b).flat_map(numbered).collect()
}

fn filter_rule(message: &[u8]) -> String {
    let text = |value: &[u8]| String::from_utf8_lossy(value).trim_end_matches('\0').to_owned();
    let mut texts = Vec::new();
    for (kind, value) in attributes(message.get(20..).unwrap_or_default()) {
        match kind {
            RULE_HANDLE | RULE_POSITION | RULE_PAD => {}
            RULE_TABLE | RULE_CHAIN => texts.push(text(value)),
            // Only the names are stable: expressions contain counters, which may be padded too.
            RULE_EXPRESSIONS => {
                let inner = attributes(value).flat_map(|(_, expression)| attributes(expression));
                texts.extend(
                    inner.filter(|(kind, _)| *kind == EXPRESSION_NAME).map(|(_, name)| text(name)),
                );
            }
            _ => texts.push(format!("{kind}:{}", value.len())),
        }
    }
    let family = message.get(16).copied().unwrap_or_default();
    format!("filter rule of family {family}: {}", texts.join(" "))
}

/// The netlink attributes in these bytes, each with its kind.
fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    iter::from_fn(move || {
        let [a, b, c, d, ..] = *bytes else { return None };
        let (length, kind) =
            (usize::from(u16::from_ne_bytes([a, b])), u16::from_ne_bytes([c, d]) & 0x3fff);
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = u16::try_from(4 + value.len()).unwrap();
        let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
        bytes.extend_from_slice(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    /// A rule with a counter, and `padding` before the attributes of 64 bits.
    fn rule(packets: u64, padding: &[u8]) -> String {
        let counter =
            attribute(2, &[padding.to_vec(), attribute(2, &packets.to_be_bytes())].concat());
        let expression = attribute(1, &[attribute(1, b"counter\0"), counter].concat());
        let parts = [
            vec![0; 20],
            attribute(1, b"t\0"),
            attribute(2, b"c\0"),
            padding.to_vec(),
            attribute(3, &[0; 8]),
        ];
        filter_rule(&[parts.concat(), attribute(4, &expression), attribute(7, b"comment")].concat())
    }

    #[test]
    fn equal_rules_have_equal_lines_wherever_the_kernel_aligns_them() {
        assert_eq!(rule(0, &[]), "filter rule of family 0: t c counter 7:7");
        assert_eq!(rule(9, &attribute(8, &[])), rule(0, &[]));
    }
}
