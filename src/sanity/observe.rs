//! The kernel and the files of the node as they are, in lines that can be compared.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use rtnetlink::packet_route::RouteNetlinkMessage as Message;
use rtnetlink::packet_route::address::{AddressAttribute, AddressMessage};
use rtnetlink::packet_route::link::{InfoKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage};
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteMessage};
use rtnetlink::packet_route::rule::RuleMessage;
use rtnetlink::packet_route::tc::TcMessage;

use super::netlink::{Netlink, Protocol};

/// `NFT_MSG_GETRULE` of `linux/netfilter/nf_tables.h`.
const GETRULE: u8 = 7;

/// Attributes of a rule that change from one to the next: its number and its place.
const RULE_HANDLE: u16 = 3;
const RULE_POSITION: u16 = 6;

/// Where namespaces of containers are.
pub const NAMESPACES: &str = "/run/netns";

/// A link, as far as results of plugins speak of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    pub index: u32,
    pub name: String,
    pub kind: String,
    pub mac: String,
    pub mtu: u32,
    pub up: bool,
    pub promisc: bool,
    pub allmulti: bool,
    /// Packets of its queue.
    pub queue: u32,
    pub master: Option<u32>,
    /// What the kernel says of its kind, as `netlink-packet-route` prints it.
    pub detail: String,
}

/// The links of the calling thread's namespace.
pub fn links() -> io::Result<Vec<Link>> {
    let answers = Netlink::open(Protocol::Route)?.dump(Message::GetLink(LinkMessage::default()))?;
    let link = |message| match message {
        Message::NewLink(link) => Some(link),
        _ => None,
    };
    Ok(answers.into_iter().filter_map(link).map(|message| read_link(&message)).collect())
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
                    LinkInfo::Kind(kind) => Some(kind_name(kind)),
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

fn kind_name(kind: &InfoKind) -> String {
    kind.to_string()
}

/// An address of a link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub index: u32,
    pub ip: IpAddr,
    pub prefix: u8,
}

/// The addresses of the calling thread's namespace.
pub fn addresses() -> io::Result<Vec<Address>> {
    let answers =
        Netlink::open(Protocol::Route)?.dump(Message::GetAddress(AddressMessage::default()))?;
    let address = |message| {
        let Message::NewAddress(message) = message else { return None };
        let find = |wanted: fn(&AddressAttribute) -> Option<IpAddr>| {
            message.attributes.iter().find_map(wanted)
        };
        let local = find(|attribute| match attribute {
            AddressAttribute::Local(ip) => Some(*ip),
            _ => None,
        });
        let ip = local.or_else(|| {
            find(|attribute| match attribute {
                AddressAttribute::Address(ip) => Some(*ip),
                _ => None,
            })
        })?;
        Some(Address { index: message.header.index, ip, prefix: message.header.prefix_len })
    };
    Ok(answers.into_iter().filter_map(address).collect())
}

/// A route: its destination, `None` for the default route of its family.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    pub dst: Option<IpAddr>,
    pub prefix: u8,
    pub is_v4: bool,
    pub gateway: Option<IpAddr>,
    pub oif: Option<u32>,
    pub table: u32,
}

/// The routes of the calling thread's namespace, without those of the kernel to itself.
pub fn routes() -> io::Result<Vec<Route>> {
    use rtnetlink::packet_route::AddressFamily;
    use rtnetlink::packet_route::route::RouteType;
    let netlink = Netlink::open(Protocol::Route)?;
    let answers = netlink.dump(Message::GetRoute(RouteMessage::default()))?;
    let route = |message| {
        let Message::NewRoute(message) = message else { return None };
        if message.header.kind != RouteType::Unicast {
            return None;
        }
        let mut route = Route {
            dst: None,
            prefix: message.header.destination_prefix_length,
            is_v4: message.header.address_family == AddressFamily::Inet,
            gateway: None,
            oif: None,
            table: u32::from(message.header.table),
        };
        for attribute in &message.attributes {
            match attribute {
                RouteAttribute::Destination(address) => route.dst = ip(address),
                RouteAttribute::Gateway(address) => route.gateway = ip(address),
                RouteAttribute::Oif(index) => route.oif = Some(*index),
                RouteAttribute::Table(table) => route.table = *table,
                _ => {}
            }
        }
        Some(route)
    };
    Ok(answers.into_iter().filter_map(route).collect())
}

fn ip(address: &RouteAddress) -> Option<IpAddr> {
    match address {
        RouteAddress::Inet(ip) => Some(IpAddr::V4(*ip)),
        RouteAddress::Inet6(ip) => Some(IpAddr::V6(*ip)),
        _ => None,
    }
}

/// What is on a node, in lines: what is left of two ADDs and DELs is what only one of two snapshots has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot(BTreeSet<String>);

impl Snapshot {
    /// Links, addresses, routes, rules, qdiscs and packet filter of the calling thread's namespace.
    pub fn of_kernel() -> io::Result<Snapshot> {
        let links = links()?;
        let name = |index: u32| {
            let found = links.iter().find(|link| link.index == index);
            found.map_or_else(|| format!("#{index}"), |link| link.name.clone())
        };
        let mut found = BTreeSet::new();
        for link in &links {
            let Link { kind, mtu, up, master, .. } = link;
            let master = master.map(name).unwrap_or_default();
            found
                .insert(format!("link {} {kind} mtu {mtu} up {up} master \"{master}\"", link.name));
        }
        for Address { index, ip, prefix } in addresses()? {
            // The link-local ones come and go with their links, in their own time.
            let is_link_local = matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local());
            if !is_link_local {
                found.insert(format!("address {ip}/{prefix} of {}", name(index)));
            }
        }
        for route in routes()? {
            let is_link_local = |ip: IpAddr| matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local() || v6.is_multicast());
            if route.dst.is_some_and(is_link_local) {
                continue;
            }
            let Route { dst, prefix, gateway, oif, table, is_v4 } = route;
            let (dst, gateway) = (dst.map(|ip| ip.to_string()), gateway.map(|ip| ip.to_string()));
            let (dst, gateway) = (dst.unwrap_or_default(), gateway.unwrap_or_default());
            let family = if is_v4 { 4 } else { 6 };
            let by = oif.map(name).unwrap_or_default();
            found.insert(format!(
                "route IPv{family} \"{dst}\"/{prefix} via \"{gateway}\" by {by} table {table}"
            ));
        }
        let netlink = Netlink::open(Protocol::Route)?;
        for rule in netlink.dump(Message::GetRule(RuleMessage::default()))? {
            if let Message::NewRule(rule) = rule {
                found.insert(format!("rule {:?} {:?}", rule.header, rule.attributes));
            }
        }
        for qdisc in netlink.dump(Message::GetQueueDiscipline(TcMessage::default()))? {
            if let Message::NewQueueDiscipline(qdisc) = qdisc {
                let kind = qdisc.attributes.iter().find_map(|attribute| match attribute {
                    rtnetlink::packet_route::tc::TcAttribute::Kind(kind) => Some(kind.clone()),
                    _ => None,
                });
                let of = name(u32::try_from(qdisc.header.index).unwrap_or_default());
                found.insert(format!("qdisc {} of {of}", kind.unwrap_or_default()));
            }
        }
        found.extend(rules());
        Ok(Snapshot(found))
    }

    /// With the files below these folders.
    pub fn with_files(mut self, folders: &[&Path]) -> Snapshot {
        for folder in folders {
            self.walk(folder);
        }
        self
    }

    fn walk(&mut self, folder: &Path) {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let (path, Ok(kind)) = (entry.path(), entry.file_type()) else { continue };
            if path.starts_with(NAMESPACES) {
                // The suite's own.
            } else if kind.is_dir() {
                self.walk(&path);
            } else {
                self.0.insert(format!("file {}", path.display()));
            }
        }
    }

    /// Whether a line has this text.
    pub fn has(&self, text: &str) -> bool {
        self.0.iter().any(|line| line.contains(text))
    }

    /// The lines that only this one has.
    pub fn without<'s>(&'s self, other: &Snapshot) -> Vec<&'s str> {
        let is_new = |line: &&String| !other.0.contains(*line);
        self.0.iter().filter(is_new).map(String::as_str).collect()
    }
}

/// The rules of `nf_tables`, iptables' among them, each with how many there are of it: bytes of its expressions
/// in hexadecimal digits, since what they say matters less than that they are gone.
fn rules() -> Vec<String> {
    let Ok(netlink) = Netlink::open(Protocol::Netfilter) else { return Vec::new() };
    let messages = netlink.dump_nftables(GETRULE, &[]).unwrap_or_default();
    let mut all: Vec<String> = messages.iter().map(|message| rule(message)).collect();
    all.sort();
    let mut lines = Vec::new();
    for same in all.chunk_by(|a, b| a == b) {
        lines.push(format!("{} x {}", same.len(), same[0]));
    }
    lines
}

fn rule(message: &[u8]) -> String {
    let mut texts = Vec::new();
    let mut rest = message.get(20..).unwrap_or_default();
    while let [a, b, c, d, ..] = rest {
        let (length, kind) =
            (usize::from(u16::from_ne_bytes([*a, *b])), u16::from_ne_bytes([*c, *d]) & 0x3fff);
        let Some(value) = rest.get(4..length) else { break };
        match kind {
            RULE_HANDLE | RULE_POSITION => {}
            // NFTA_RULE_TABLE, NFTA_RULE_CHAIN
            1 | 2 => texts.push(String::from_utf8_lossy(value).trim_end_matches('\0').to_owned()),
            // Counters are in the expressions: only how long they are.
            _ => texts.push(format!("{kind}:{}", value.len())),
        }
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    format!(
        "filter rule of family {}: {}",
        message.get(16).copied().unwrap_or_default(),
        texts.join(" ")
    )
}
