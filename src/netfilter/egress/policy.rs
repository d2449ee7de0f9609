//! The syntax of egress policies.

use std::net::IpAddr;
use std::str::FromStr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};

use super::compile::{
    AllowedTraffic, Entry, Service, ServiceRange, Verdict, combine_services, flatten,
    merge_services,
};
use cni::error::{Error, ErrorContext, Result};

/// The largest number of networks in the entries of a policy.
const MOST_NETWORKS: usize = 1024;

const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;
const SCTP: u8 = 132;

/// The protocols with a name.
const PROTOCOLS: [(&str, u8); 5] =
    [("tcp", TCP), ("udp", UDP), ("sctp", SCTP), ("icmp", 1), ("icmpv6", ICMPV6)];

/// The protocols whose ports policies can name.
const WITH_PORTS: [u8; 3] = [TCP, UDP, SCTP];

/// The networks that the profile `sandbox` denies, besides the container's own.
const SANDBOX: [&str; 26] = [
    // link-local addresses: the metadata services of clouds and their neighbours
    "169.254.0.0/16",
    "fd00:ec2::254",
    "168.63.129.16",
    // private, shared, loopback, protocol assignments, benchmarks, multicast, reserved, broadcast
    // (RFC 6890)
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "224.0.0.0/4",
    "240.0.0.0/4",
    // unspecified, loopback, unique local, link-local, site-local (RFC 3879), multicast
    "::",
    "::1",
    "fc00::/7",
    "fe80::/10",
    "fec0::/10",
    "ff00::/8",
    // IPv4 addresses in IPv6 addresses: NAT64 (RFC 6052, RFC 8215), 6to4, Teredo
    "64:ff9b::/96",
    "64:ff9b:1::/48",
    "2002::/16",
    "2001::/32",
    // not global unicast (RFC 4291)
    "::/3",
    "4000::/2",
    "8000::/1",
];

/// A policy as a configuration, the runtime or a file gives it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EgressPolicy {
    /// The verdict on destinations that no entry names: `deny` or `allow`. Default: `deny`; with a
    /// profile `allow`.
    pub policy: String,
    pub allow: Vec<PolicyEntry>,
    pub deny: Vec<PolicyEntry>,
    /// `sandbox` or empty.
    pub profile: String,
    /// The services of the container whose replies pass, besides its published ports.
    pub serve: Vec<String>,
}

/// Destinations.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PolicyEntry {
    /// Networks and addresses.
    pub to: Vec<String>,
    /// Services: `tcp/443`, `tcp/8000-8100`, `udp`, `icmp`, or the number of a protocol. `None`:
    /// all.
    pub ports: Option<Vec<String>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CompiledPolicy {
    /// The destinations on other machines and in other containers.
    pub routed: AllowedTraffic,
    /// The destinations that are addresses of the host.
    pub host: AllowedTraffic,
    pub served: Vec<ServiceRange>,
}

impl CompiledPolicy {
    /// What packets may reach if these are the addresses of the host, and others are not.
    pub fn with_host(&self, own: &[IpNet]) -> AllowedTraffic {
        if self.routed == self.host {
            return self.routed.clone();
        }
        self.routed.without(own).union(&self.host.restrict_to(own))
    }
}

impl EgressPolicy {
    /// Compiles the policy for a container whose interface has addresses of the networks `on_link`.
    ///
    /// Of the entries that match a packet's destination and service, the one with the longest
    /// prefix decides; of those with equally long ones, one of `deny`. What is empty denies: an
    /// entry of `allow` without networks, or with an empty list of services, matches nothing;
    /// such an entry of `deny` matches all networks, or all services.
    ///
    /// The profile `sandbox` adds entries of `deny`, so that a user's more specific entry overrides
    /// them. Addresses of the host are then denied without these entries too, except for name
    /// service and the user's entries.
    ///
    /// Errors have code 7 and name the entry.
    pub fn compile(&self, on_link: &[IpNet]) -> Result<CompiledPolicy> {
        let default = self.parse_default()?;
        let entries = self.parse_entries()?;
        let served = parse_services("serve", &self.serve)?;
        let (routed, host) = match self.profile.as_str() {
            "" => {
                let routed = flatten(&entries, default.unwrap_or(Verdict::Deny));
                (routed.clone(), routed)
            }
            "sandbox" => {
                let sandbox = sandbox_entries(on_link)?;
                let routed =
                    flatten(&[&*entries, &sandbox].concat(), default.unwrap_or(Verdict::Allow));
                (routed, flatten(&[&*entries, &[name_service_entry()]].concat(), Verdict::Deny))
            }
            other => {
                return Err(Error::config(format!("profile {other:?}: unknown profile"))
                    .with_details("write \"sandbox\", or leave the key out"));
            }
        };
        Ok(CompiledPolicy { routed, host, served })
    }

    /// The configured verdict on destinations that no entry names.
    fn parse_default(&self) -> Result<Option<Verdict>> {
        match self.policy.as_str() {
            "" => Ok(None),
            "allow" => Ok(Some(Verdict::Allow)),
            "deny" => Ok(Some(Verdict::Deny)),
            other => Err(Error::config(format!("policy {other:?}: unknown verdict"))
                .with_details("write \"deny\" or \"allow\", or leave the key out")),
        }
    }

    fn parse_entries(&self) -> Result<Vec<Entry>> {
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
    fn parse(&self, name: &str, verdict: Verdict) -> Result<Entry> {
        let networks =
            self.to.iter().enumerate().map(|(at, text)| {
                parse_network(text).context(|| format!("{name}.to[{at}] {text:?}"))
            });
        let mut networks = networks.collect::<Result<Vec<_>>>()?;
        let mut services = match &self.ports {
            None => vec![ServiceRange::ALL],
            Some(ports) => parse_services(&format!("{name}.ports"), ports)?,
        };
        if verdict == Verdict::Deny && networks.is_empty() {
            networks = all_networks();
        }
        if verdict == Verdict::Deny && services.is_empty() {
            services = vec![ServiceRange::ALL];
        }
        Ok(Entry { networks, services, verdict })
    }
}

impl CompiledPolicy {
    /// The policy of a container that has two policies: both must allow what it sends, and it
    /// serves what both serve.
    #[must_use]
    pub fn intersect(&self, other: &CompiledPolicy) -> CompiledPolicy {
        CompiledPolicy {
            routed: self.routed.intersect(&other.routed),
            host: self.host.intersect(&other.host),
            served: combine_services(&self.served, &other.served, |ours, theirs| ours && theirs),
        }
    }
}

/// The entries that the profile `sandbox` adds for other destinations than the host.
fn sandbox_entries(on_link: &[IpNet]) -> Result<[Entry; 2]> {
    let special = SANDBOX.iter().map(|text| parse_network(text));
    let mut networks = special.collect::<Result<Vec<_>>>()?;
    networks.extend_from_slice(on_link);
    let verdict = Verdict::Deny;
    let everywhere = vec![Ipv6Net::default().into()];
    Ok([
        Entry { networks, services: vec![ServiceRange::ALL], verdict },
        Entry { networks: everywhere, services: vec![ServiceRange::of_protocol(ICMPV6)], verdict },
    ])
}

/// The entry that the profile `sandbox` adds for the host.
fn name_service_entry() -> Entry {
    let services = [TCP, UDP].map(|protocol| ServiceRange::of_port(protocol, 53)).to_vec();
    Entry { networks: all_networks(), services, verdict: Verdict::Allow }
}

/// The networks of all addresses.
fn all_networks() -> Vec<IpNet> {
    vec![Ipv4Net::default().into(), Ipv6Net::default().into()]
}

/// Parses a network, whose address may be any in it, or an address.
fn parse_network(text: &str) -> Result<IpNet> {
    let network = text.parse().or_else(|_| text.parse().map(|addr: IpAddr| addr.into()));
    let network: IpNet = network.map_err(|_| {
        Error::config("not a network or address")
            .with_details("write a network like 10.0.0.0/8 or 2001:db8::/32, or a complete address")
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
