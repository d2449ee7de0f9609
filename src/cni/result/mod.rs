//! The result of ADD: one model for all versions, and the conversions between them.
//!
//! Plugins work on [`CniResult`] in the newest form. [`CniResult::decode`] reads any version into
//! it, [`CniResult::convert`] applies what is lost on the way to another version, and
//! [`CniResult::to_json`] writes the layout of the version that it is labelled with.

mod convert;
mod wire;

use std::net::IpAddr;

use ipnet::IpNet;
use serde::Deserialize;

use super::config::DnsConf;
use super::ip;
use super::version::SpecVersion;

/// What an ADD reports (spec, section 5).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CniResult {
    /// The version whose layout and limits this result has.
    pub version: SpecVersion,
    /// Every interface of the attachment, host side included; `ips` point into this list.
    pub interfaces: Vec<Interface>,
    /// The addresses.
    pub ips: Vec<IpConfig>,
    /// The routes.
    pub routes: Vec<Route>,
    /// Name resolution.
    pub dns: Dns,
}

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Interface {
    /// The kernel's name.
    pub name: String,
    /// Hardware address, lower case with colons; empty if there is none.
    pub mac: String,
    /// MTU in bytes; 0 if unknown. Since 1.1.0.
    pub mtu: u32,
    /// `CNI_NETNS` for an interface inside the container, empty for one on the host.
    pub sandbox: String,
    /// Socket that belongs to the interface. Since 1.1.0.
    pub socket_path: String,
    /// PCI device behind the interface. Since 1.1.0.
    #[serde(rename = "pciID")]
    pub pci_id: String,
}

/// An address.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct IpConfig {
    /// Address with the prefix length of its subnet.
    #[serde(deserialize_with = "ip::cidr::deserialize")]
    pub address: IpNet,
    /// Gateway of the subnet; no route is meant by it.
    #[serde(default, deserialize_with = "ip::optional_ip::deserialize")]
    pub gateway: Option<IpAddr>,
    /// Index into `interfaces`; absent in IPAM results.
    #[serde(default)]
    pub interface: Option<i64>,
}

/// A route.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Deserialize)]
pub struct Route {
    /// Destination; host bits are kept.
    #[serde(deserialize_with = "ip::cidr::deserialize")]
    pub dst: IpNet,
    /// Next hop.
    #[serde(default, deserialize_with = "ip::optional_ip::deserialize")]
    pub gw: Option<IpAddr>,
    /// Path MTU in bytes (`RTAX_MTU`).
    #[serde(default)]
    pub mtu: Option<u32>,
    /// Advertised maximum segment size in bytes (`RTAX_ADVMSS`).
    #[serde(default)]
    pub advmss: Option<u32>,
    /// Metric: the lower one wins.
    #[serde(default)]
    pub priority: Option<u32>,
    /// Routing table; `Some(0)` was written as 0.
    #[serde(default)]
    pub table: Option<u32>,
    /// Scope as in rtnetlink(7): 0 universe, 253 link, 254 host.
    #[serde(default)]
    pub scope: Option<u8>,
}

/// Name resolution.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Dns {
    /// Name servers, in order of priority.
    pub nameservers: Vec<String>,
    /// The local domain.
    pub domain: String,
    /// Search domains, in order of priority.
    pub search: Vec<String>,
    /// Resolver options.
    pub options: Vec<String>,
}

impl CniResult {
    /// An empty result in the newest version.
    pub fn new() -> CniResult {
        CniResult {
            version: SpecVersion::NEWEST,
            interfaces: Vec::new(),
            ips: Vec::new(),
            routes: Vec::new(),
            dns: Dns::default(),
        }
    }

    /// The addresses that belong to the interface at `index`.
    pub fn ips_of(&self, index: usize) -> impl Iterator<Item = &IpConfig> {
        let index = i64::try_from(index).ok();
        self.ips.iter().filter(move |ip| ip.interface == index && index.is_some())
    }

    /// All addresses are those of the first interface.
    pub fn assign_to_first(&mut self) {
        for ip in &mut self.ips {
            ip.interface = Some(0);
        }
    }

    /// All addresses, with the prefix of their subnets.
    pub fn addresses(&self) -> Vec<IpNet> {
        self.ips.iter().map(|ip| ip.address).collect()
    }
}

impl Default for CniResult {
    fn default() -> CniResult {
        CniResult::new()
    }
}

impl Route {
    /// A route to `dst` without any attribute.
    pub fn to(dst: IpNet) -> Route {
        Route { dst, gw: None, mtu: None, advmss: None, priority: None, table: None, scope: None }
    }

    /// Whether this is a route to everywhere.
    pub fn is_default(&self) -> bool {
        self.dst.prefix_len() == 0
    }
}

impl Dns {
    /// Whether there is nothing to print.
    pub fn is_empty(&self) -> bool {
        *self == Dns::default()
    }

    /// The configuration's `dns` where it has one, else `self` (the IPAM plugin's).
    #[must_use]
    pub fn overridden_by(self, conf: &DnsConf) -> Dns {
        if !conf.is_configured() {
            return self;
        }
        let conf = conf.clone();
        Dns {
            nameservers: conf.nameservers.unwrap_or_default(),
            domain: conf.domain,
            search: conf.search.unwrap_or_default(),
            options: conf.options.unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests;
