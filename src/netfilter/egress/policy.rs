//! The syntax of egress policies.

use std::net::{IpAddr, Ipv4Addr};
use std::str::FromStr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

use super::compile::{
    AllowedTraffic, Entry, Service, ServiceRange, Verdict, combine_services, flatten,
    merge_services,
};
use super::limits::{ConnectionLimits, PolicyLimits};
use super::names::{NamePattern, NameTable};
use super::special::{metadata_networks, special_networks};
use cni::error::{Error, ErrorContext, Result};

/// The largest number of networks in the entries of a policy.
const MOST_NETWORKS: usize = 1024;

/// The largest number of pairs of a network and a range of ports in a policy, and of such ranges
/// for a network. The kernel builds a set of all pairs while no other program can change
/// `nf_tables`, for longer than in proportion to these numbers.
const MOST_PAIRS: usize = 2048;
const MOST_SERVICES: usize = 256;

const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;
const SCTP: u8 = 132;

/// The protocols with a name.
const PROTOCOLS: [(&str, u8); 5] =
    [("tcp", TCP), ("udp", UDP), ("sctp", SCTP), ("icmp", 1), ("icmpv6", ICMPV6)];

/// The protocols whose ports policies can name.
const WITH_PORTS: [u8; 3] = [TCP, UDP, SCTP];

/// A policy as a configuration, the runtime or a file gives it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EgressPolicy {
    /// The verdict on destinations that no entry names: `deny` or `allow`. Default: `deny`; with a
    /// profile `allow`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub policy: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub allow: Vec<PolicyEntry>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub deny: Vec<PolicyEntry>,
    /// `sandbox` or empty.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub profile: String,
    /// The services of the container whose replies pass, besides its published ports.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub serve: Vec<String>,
    #[serde(skip_serializing_if = "PolicyLimits::is_empty")]
    pub limits: PolicyLimits,
}

/// Destinations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicyEntry {
    /// Networks and addresses; `host`, `neighbours`, `dns` and `internet`; in `allow` also names,
    /// and `*.` before a name for all names below it.
    pub to: Vec<String>,
    /// Services: `tcp/443`, `tcp/8000-8100`, `udp`, `icmp`, or the number of a protocol. `None`:
    /// all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ports: Option<Vec<String>>,
}

/// The traffic that a policy allows, by the place of its destination.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CompiledPolicy {
    /// To other machines.
    pub routed: AllowedTraffic,
    /// To the host itself, by any of its addresses.
    pub host: AllowedTraffic,
    /// To other containers of the host.
    pub neighbours: AllowedTraffic,
    pub served: Vec<ServiceRange>,
    pub limits: ConnectionLimits,
    /// The names of one policy; empty for an [intersection](CompiledPolicy::intersect).
    pub names: NameTable,
    /// The lists of services that names of a container may have; empty for one policy.
    pub service_lists: Vec<Vec<ServiceRange>>,
}

/// The surroundings of a container, which the words of its policies mean.
#[derive(Clone, Copy, Debug, Default)]
pub struct PolicyScene<'a> {
    /// The networks of the container's addresses.
    pub on_link: &'a [IpNet],
    /// The name servers of the container and of the host.
    pub name_servers: &'a [IpAddr],
}

/// A destination of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Destination {
    Network(IpNet),
    /// The host itself, by any address.
    Host,
    /// Other containers of the host, by any address.
    Neighbours,
    /// Port 53 of the host and of the name servers.
    Dns,
    /// What is neither special ([special](special_networks)) nor on the container's own link.
    Internet,
    Name(NamePattern),
}

const WORDS: [(&str, Destination); 4] = [
    ("host", Destination::Host),
    ("neighbours", Destination::Neighbours),
    ("dns", Destination::Dns),
    ("internet", Destination::Internet),
];

/// Name service by UDP, and an address that nobody has (RFC 7600), for which no entry is.
const DNS_SERVICE: Service = 0x11_0035;
const NO_ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 0, 8));

impl Destination {
    /// Fails for a name that is denied: what it leads to may have other names.
    fn require_possible(self, verdict: Verdict) -> Result<Destination> {
        match (&self, verdict) {
            (Destination::Name(_), Verdict::Deny) => {
                Err(Error::config("a name cannot be denied, because its addresses have others")
                    .with_details("leave it out: names are refused unless \"allow\" has them"))
            }
            _ => Ok(self),
        }
    }
}

/// An entry as it is written.
struct ParsedEntry {
    to: Vec<Destination>,
    services: Vec<ServiceRange>,
    verdict: Verdict,
}

impl ParsedEntry {
    fn names(&self, word: &Destination) -> bool {
        self.to.contains(word)
    }

    /// The services of the entry that are name service.
    fn name_services(&self) -> Vec<ServiceRange> {
        combine_services(&self.services, &name_services(), |ours, named| ours && named)
    }

    /// The networks of the entry that `which` selects, as an entry.
    fn networks(&self, which: impl Fn(&IpNet) -> bool) -> Entry {
        let networks = self.to.iter().filter_map(|to| match to {
            Destination::Network(net) => Some(*net),
            _ => None,
        });
        let networks = networks.filter(which).collect();
        Entry { networks, services: self.services.clone(), verdict: self.verdict }
    }
}

impl EgressPolicy {
    /// Compiles the policy for a container in these surroundings.
    ///
    /// Of the entries that match a packet's destination and service, the one with the longest
    /// prefix decides; of those with equally long ones, one of `deny`. What is empty denies: an
    /// entry of `allow` without networks, or with an empty list of services, matches nothing;
    /// such an entry of `deny` matches all networks, or all services.
    ///
    /// The host and other containers of the host are destinations of their own: words and single
    /// addresses allow them, networks only deny them.
    ///
    /// The profile `sandbox` adds entries of `deny`, so that a user's more specific entry overrides
    /// them, and allows name service.
    ///
    /// Errors have code 7 and name the entry.
    pub fn compile(&self, scene: &PolicyScene<'_>) -> Result<CompiledPolicy> {
        let entries = self.parse_entries()?;
        let served = parse_services("serve", &self.serve)?;
        let limits = self.limits.compile()?;
        let is_sandbox = match self.profile.as_str() {
            "" => false,
            "sandbox" => true,
            other => {
                return Err(Error::config(format!("profile {other:?}: unknown profile"))
                    .with_details("write \"sandbox\", or leave the key out"));
            }
        };
        let is_allowed = self.parse_default()?.unwrap_or(is_sandbox);
        let by_default = if is_allowed { vec![ServiceRange::ALL] } else { Vec::new() };
        let routed = compile_routed(&entries, scene, is_sandbox, &by_default);
        let (host, neighbours) = if is_sandbox {
            (name_services(), Vec::new())
        } else {
            (by_default.clone(), by_default)
        };
        let host = compile_near(&entries, &Destination::Host, &host);
        let neighbours = compile_near(&entries, &Destination::Neighbours, &neighbours);
        let names = compile_names(&entries, host.allows(NO_ADDRESS, DNS_SERVICE));
        let service_lists = Vec::new();
        Ok(CompiledPolicy { routed, host, neighbours, served, limits, names, service_lists })
    }

    /// Whether destinations are allowed that no entry names, if the policy says so.
    fn parse_default(&self) -> Result<Option<bool>> {
        match self.policy.as_str() {
            "" => Ok(None),
            "allow" => Ok(Some(true)),
            "deny" => Ok(Some(false)),
            other => Err(Error::config(format!("policy {other:?}: unknown verdict"))
                .with_details("write \"deny\" or \"allow\", or leave the key out")),
        }
    }

    fn parse_entries(&self) -> Result<Vec<ParsedEntry>> {
        let count: usize = self.allow.iter().chain(&self.deny).map(|entry| entry.to.len()).sum();
        if count > MOST_NETWORKS {
            return Err(Error::config(format!("allow and deny have {count} networks"))
                .with_details(format!(
                    "{MOST_NETWORKS} are possible: write larger networks instead of their parts"
                )));
        }
        let lists = [("allow", &self.allow, Verdict::Allow), ("deny", &self.deny, Verdict::Deny)];
        let numbered = lists.into_iter().flat_map(|(key, entries, verdict)| {
            entries
                .iter()
                .enumerate()
                .map(move |(at, entry)| (format!("{key}[{at}]"), entry, verdict))
        });
        numbered.map(|(name, entry, verdict)| entry.parse(&name, verdict)).collect()
    }
}

impl PolicyEntry {
    /// The entry with the verdict of its list; `name` is for errors.
    fn parse(&self, name: &str, verdict: Verdict) -> Result<ParsedEntry> {
        let to = self.to.iter().enumerate().map(|(at, text)| {
            parse_destination(text)
                .and_then(|to| to.require_possible(verdict))
                .context(|| format!("{name}.to[{at}] {text:?}"))
        });
        let mut to = to.collect::<Result<Vec<_>>>()?;
        let mut services = match &self.ports {
            None => vec![ServiceRange::ALL],
            Some(ports) => parse_services(&format!("{name}.ports"), ports)?,
        };
        if verdict == Verdict::Deny && to.is_empty() {
            to = all_networks().into_iter().map(Destination::Network).collect();
        }
        if verdict == Verdict::Deny && services.is_empty() {
            services = vec![ServiceRange::ALL];
        }
        Ok(ParsedEntry { to, services, verdict })
    }
}

impl CompiledPolicy {
    /// Fails if the kernel would need long to put the policy in force.
    pub fn require_bounded(&self) -> Result<()> {
        for traffic in [&self.routed, &self.host, &self.neighbours] {
            let (pairs, services) = traffic.count_pairs();
            for (count, most, what, remedy) in [
                (services, MOST_SERVICES, "ranges of ports for a network", "larger ranges"),
                (pairs, MOST_PAIRS, "pairs of a network and a range of ports", "larger networks"),
            ] {
                if count > most {
                    let problem = format!("the egress policy has {count} {what}");
                    let remedy = format!("{most} are possible: write {remedy} instead of parts");
                    return Err(Error::config(problem).with_details(remedy));
                }
            }
        }
        Ok(())
    }

    /// The policy of a container that has two policies: both must allow what it sends, and it
    /// serves what both serve.
    #[must_use]
    pub fn intersect(&self, other: &CompiledPolicy) -> CompiledPolicy {
        CompiledPolicy {
            routed: self.routed.intersect(&other.routed),
            host: self.host.intersect(&other.host),
            neighbours: self.neighbours.intersect(&other.neighbours),
            served: combine_services(&self.served, &other.served, |ours, theirs| ours && theirs),
            limits: self.limits.intersect(other.limits),
            ..CompiledPolicy::default()
        }
    }
}

/// What the entries allow on other machines.
fn compile_routed(
    entries: &[ParsedEntry],
    scene: &PolicyScene<'_>,
    is_sandbox: bool,
    by_default: &[ServiceRange],
) -> AllowedTraffic {
    let mut all: Vec<Entry> = entries.iter().map(|entry| entry.networks(|_| true)).collect();
    let special = [special_networks(), scene.on_link].concat();
    let servers: Vec<IpNet> = scene.name_servers.iter().copied().map(IpNet::from).collect();
    for entry in entries.iter().filter(|entry| entry.names(&Destination::Dns)) {
        let (networks, services) = (servers.clone(), entry.name_services());
        all.push(Entry { networks, services, verdict: entry.verdict });
    }
    let denied: Vec<Entry> =
        all.iter().filter(|entry| entry.verdict == Verdict::Deny).cloned().collect();
    if is_sandbox {
        all.extend(sandbox_entries(&special));
    } else if by_default.is_empty() {
        let mut networks = metadata_networks();
        networks.retain(|net| !all.iter().any(|entry| entry.networks.contains(net)));
        let services = vec![ServiceRange::ALL];
        all.push(Entry { networks, services, verdict: Verdict::Deny });
    }
    let mut routed = flatten(&all, by_default);
    let on_internet = services_of_word(entries, &Destination::Internet, by_default);
    if on_internet != by_default {
        routed = routed.restrict_to(&special).union(&flatten(&all, &on_internet).without(&special));
    }
    if is_sandbox {
        routed = routed.union(&flatten(&denied, &name_services()).restrict_to(&servers));
    }
    routed
}

/// What the entries allow at the host or at other containers: those with the word, those with a
/// single address, and all that deny.
fn compile_near(
    entries: &[ParsedEntry],
    word: &Destination,
    by_default: &[ServiceRange],
) -> AllowedTraffic {
    let of = |verdict, which: fn(&IpNet) -> bool| -> Vec<Entry> {
        let entries = entries.iter().filter(|entry| entry.verdict == verdict);
        entries.map(|entry| entry.networks(which)).collect()
    };
    let (everywhere, nothing) = (|services: &[ServiceRange]| flatten(&[], services), &[]);
    let named = services_of_word(entries, word, nothing);
    let refused = {
        let all = [ServiceRange::ALL];
        combine_services(&all, &services_of_word(entries, word, &all), |all, left| all && !left)
    };
    let mut traffic = flatten(&of(Verdict::Deny, |_| true), by_default).union(&everywhere(&named));
    traffic = traffic.subtract(&everywhere(&refused));
    traffic = traffic.union(&flatten(&of(Verdict::Allow, is_single), nothing));
    let mut addresses = of(Verdict::Deny, is_single);
    for entry in &mut addresses {
        entry.verdict = Verdict::Allow;
    }
    traffic.subtract(&flatten(&addresses, nothing))
}

/// The services that the entries with a word leave of `before`: those of `allow` add some, those
/// of `deny` take some away. Name service is a service of the host.
fn services_of_word(
    entries: &[ParsedEntry],
    word: &Destination,
    before: &[ServiceRange],
) -> Vec<ServiceRange> {
    let of = |verdict| {
        let entries = entries.iter().filter(|entry| entry.verdict == verdict);
        let services = entries.flat_map(|entry| {
            let is_dns = *word == Destination::Host && entry.names(&Destination::Dns);
            match (entry.names(word), is_dns) {
                (true, _) => entry.services.clone(),
                (false, true) => entry.name_services(),
                (false, false) => Vec::new(),
            }
        });
        merge_services(services.collect())
    };
    let allowed = combine_services(before, &of(Verdict::Allow), |ours, named| ours || named);
    combine_services(&allowed, &of(Verdict::Deny), |ours, named| ours && !named)
}

/// The entries that the profile `sandbox` adds for other destinations than the host.
fn sandbox_entries(special: &[IpNet]) -> [Entry; 2] {
    let verdict = Verdict::Deny;
    let everywhere = vec![Ipv6Net::default().into()];
    [
        Entry { networks: special.to_vec(), services: vec![ServiceRange::ALL], verdict },
        Entry { networks: everywhere, services: vec![ServiceRange::of_protocol(ICMPV6)], verdict },
    ]
}

/// Port 53.
pub(super) fn name_services() -> Vec<ServiceRange> {
    [TCP, UDP].map(|protocol| ServiceRange::of_port(protocol, 53)).to_vec()
}

/// The networks of all addresses.
fn all_networks() -> Vec<IpNet> {
    vec![Ipv4Net::default().into(), Ipv6Net::default().into()]
}

fn parse_destination(text: &str) -> Result<Destination> {
    match WORDS.iter().find(|(word, _)| *word == text) {
        Some((_, destination)) => Ok(destination.clone()),
        None if is_name(text) => NamePattern::parse(text).map(Destination::Name),
        None => parse_network(text).map(Destination::Network),
    }
}

/// Whether a destination is meant as a name.
pub(super) fn is_name(text: &str) -> bool {
    NamePattern::is_meant(text)
}

/// What the entries say about names.
fn compile_names(entries: &[ParsedEntry], answers_all: bool) -> NameTable {
    let (mut allowed, mut denied) = (Vec::new(), Vec::new());
    for entry in entries {
        for to in &entry.to {
            let services = entry.services.clone();
            match to {
                Destination::Name(pattern) => allowed.push((pattern.clone(), services)),
                Destination::Network(net) if entry.verdict == Verdict::Deny && is_single(net) => {
                    denied.push((net.addr(), services));
                }
                _ => {}
            }
        }
    }
    NameTable::new(allowed, denied, answers_all)
}

fn is_single(net: &IpNet) -> bool {
    net.prefix_len() == net.max_prefix_len()
}

/// Parses a network, whose address may be any in it, or an address.
pub(super) fn parse_network(text: &str) -> Result<IpNet> {
    let network = text.parse().or_else(|_| text.parse().map(|addr: IpAddr| addr.into()));
    let network: IpNet = network.map_err(|_| {
        Error::config("not a network or address").with_details(
            "write a network like 10.0.0.0/8 or 2001:db8::/32, a complete address, a name with a \
                 dot, or host, neighbours, dns or internet",
        )
    })?;
    match network {
        IpNet::V6(mapped)
            if mapped.prefix_len() >= 96 && mapped.addr().to_ipv4_mapped().is_some() =>
        {
            Err(Error::config("an IPv4 address in an IPv6 address")
                .with_details("write the IPv4 address or network"))
        }
        network => Ok(network),
    }
}

/// Parses the services of the list `key`, and merges them.
fn parse_services(key: &str, texts: &[String]) -> Result<Vec<ServiceRange>> {
    let services = texts
        .iter()
        .enumerate()
        .map(|(at, text)| parse_service(text).context(|| format!("{key}[{at}] {text:?}")));
    Ok(merge_services(services.collect::<Result<_>>()?))
}

/// Parses a protocol with or without ports: `tcp`, `tcp/443`, `tcp/8000-8100`, `47`. Errors do not
/// name the text.
pub fn parse_service(text: &str) -> Result<ServiceRange> {
    let (protocol, ports) =
        text.split_once('/').map_or((text, None), |(protocol, ports)| (protocol, Some(ports)));
    let named = PROTOCOLS.iter().find(|(name, _)| *name == protocol).map(|&(_, number)| number);
    let Some(number) = named.or_else(|| parse_digits(protocol)) else {
        return Err(Error::config("not a service").with_details(
            "write tcp, udp, sctp, icmp, icmpv6 or a protocol's number up to 255; ports like \
             tcp/443 or tcp/8000-8100",
        ));
    };
    let Some(ports) = ports else { return Ok(ServiceRange::of_protocol(number)) };
    if !WITH_PORTS.contains(&number) {
        return Err(Error::config("only tcp, udp and sctp have ports")
            .with_details(format!("write \"{protocol}\"")));
    }
    let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
    let (first, last) = (parse_port(first)?, parse_port(last)?);
    if first > last {
        return Err(Error::config("the first port is larger than the last")
            .with_details(format!("write \"{protocol}/{last}-{first}\"")));
    }
    Ok(ServiceRange::of_ports(number, first, last))
}

/// A service as policies write it, such as `tcp/443` or `icmp`.
pub fn service_name(service: Service) -> String {
    let [_, number, ..] = service.to_be_bytes();
    let known = PROTOCOLS.iter().find(|(_, known)| *known == number);
    let name = known.map_or_else(|| number.to_string(), |(name, _)| (*name).to_owned());
    if WITH_PORTS.contains(&number) { format!("{name}/{}", service & 0xffff) } else { name }
}

/// The service of a packet: 0 in place of the port, if the protocol has none.
pub fn service_of_packet(protocol: u8, port: u16) -> Service {
    ServiceRange::of_port(protocol, if WITH_PORTS.contains(&protocol) { port } else { 0 }).first
}

fn parse_port(text: &str) -> Result<u16> {
    parse_digits(text).filter(|&port| port != 0).ok_or_else(|| {
        Error::config(format!("{text:?} is not a port"))
            .with_details("a port is a number from 1 to 65535")
    })
}

/// Parses a number that consists of digits only.
fn parse_digits<N: FromStr>(text: &str) -> Option<N> {
    text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests;
