//! The result of ADD: one model for all versions, its layouts in JSON, and the conversions between versions.
//!
//! Plugins work on [`CniResult`] in the newest form. [`CniResult::decode`] reads any version into
//! it, [`CniResult::convert`] drops the data that another version cannot represent, and
//! [`CniResult::to_json`] writes the layout of the result's own version.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::ip;
use super::json::Json;
use super::version::{Generation, SpecVersion};
use crate::error::{Code, Error, Result};
use crate::sort::sort_by_key;

/// The result of an ADD (spec, section 5). The fields of this struct and of its parts are in the order of the 0.x
/// layouts; since 1.0.0 the keys of every object are sorted, as the reference prints them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CniResult {
    /// The version whose layout and limits this result has.
    #[serde(rename = "cniVersion", skip_deserializing)]
    pub version: SpecVersion,
    /// Every interface of the attachment, host side included; `ips` point into this list.
    #[serde(skip_serializing_if = "is_default")]
    pub interfaces: Vec<Interface>,
    /// The addresses.
    #[serde(skip_serializing_if = "is_default")]
    pub ips: Vec<IpConfig>,
    /// The routes.
    #[serde(skip_serializing_if = "is_default")]
    pub routes: Vec<Route>,
    /// Name resolution.
    pub dns: Dns,
}

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Interface {
    /// The kernel's name.
    pub name: String,
    /// Hardware address, lower case with colons; empty if there is none.
    #[serde(skip_serializing_if = "is_default")]
    pub mac: String,
    /// MTU in bytes; 0 if unknown. Since 1.1.0.
    #[serde(skip_serializing_if = "is_default")]
    pub mtu: u32,
    /// `CNI_NETNS` for an interface inside the container, empty for one on the host.
    #[serde(skip_serializing_if = "is_default")]
    pub sandbox: String,
    /// Socket that belongs to the interface. Since 1.1.0.
    #[serde(skip_serializing_if = "is_default")]
    pub socket_path: String,
    /// PCI device behind the interface. Since 1.1.0.
    #[serde(rename = "pciID", skip_serializing_if = "is_default")]
    pub pci_id: String,
}

/// An address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpConfig {
    /// Index into `interfaces`; absent in IPAM results.
    #[serde(default, skip_serializing_if = "is_default")]
    pub interface: Option<i64>,
    /// Address with the prefix length of its subnet.
    #[serde(deserialize_with = "ip::cidr")]
    pub address: IpNet,
    /// Gateway of the subnet; it does not imply a route.
    #[serde(default, deserialize_with = "ip::optional_ip", skip_serializing_if = "is_default")]
    pub gateway: Option<IpAddr>,
}

/// A route.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Route {
    /// Destination; host bits are kept.
    #[serde(deserialize_with = "ip::cidr")]
    pub dst: IpNet,
    /// Next hop.
    #[serde(default, deserialize_with = "ip::optional_ip", skip_serializing_if = "is_default")]
    pub gw: Option<IpAddr>,
    /// Path MTU in bytes (`RTAX_MTU`).
    #[serde(default, skip_serializing_if = "is_zero")]
    pub mtu: Option<u32>,
    /// Advertised maximum segment size in bytes (`RTAX_ADVMSS`).
    #[serde(default, skip_serializing_if = "is_zero")]
    pub advmss: Option<u32>,
    /// Metric: the lower one wins.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub priority: Option<u32>,
    /// Routing table; `Some(0)` was written as 0.
    #[serde(default, skip_serializing_if = "is_default")]
    pub table: Option<u32>,
    /// Scope as in rtnetlink(7): 0 universe, 253 link, 254 host; `Some(0)` was written as 0.
    #[serde(default, skip_serializing_if = "is_default")]
    pub scope: Option<u8>,
}

/// Name resolution.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Dns {
    /// Name servers, in order of priority.
    #[serde(skip_serializing_if = "is_default")]
    pub nameservers: Vec<String>,
    /// The local domain.
    #[serde(skip_serializing_if = "is_default")]
    pub domain: String,
    /// Search domains, in order of priority.
    #[serde(skip_serializing_if = "is_default")]
    pub search: Vec<String>,
    /// Resolver options.
    #[serde(skip_serializing_if = "is_default")]
    pub options: Vec<String>,
}

/// The layout before 0.3.0.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct Ip4Ip6 {
    #[serde(rename = "cniVersion", skip_deserializing)]
    version: SpecVersion,
    #[serde(skip_serializing_if = "is_default")]
    ip4: Option<FamilyIp>,
    #[serde(skip_serializing_if = "is_default")]
    ip6: Option<FamilyIp>,
    dns: Dns,
}

#[derive(PartialEq, Serialize, Deserialize)]
struct FamilyIp {
    #[serde(deserialize_with = "ip::cidr")]
    ip: IpNet,
    #[serde(default, deserialize_with = "ip::optional_ip", skip_serializing_if = "is_default")]
    gateway: Option<IpAddr>,
    #[serde(default, skip_serializing_if = "is_default")]
    routes: Vec<Route>,
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

#[expect(
    clippy::ref_option,
    clippy::trivially_copy_pass_by_ref,
    reason = "the signature that serde requires"
)]
fn is_zero(value: &Option<u32>) -> bool {
    value.unwrap_or_default() == 0
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

    /// Decodes a plugin's output by the layout of its `cniVersion`, or of `default` if it has none.
    pub fn decode(json: &Json, default: SpecVersion) -> Result<CniResult> {
        let version = match written_version(json)? {
            None => default,
            Some(text) => SpecVersion::exact(text).ok_or_else(|| {
                Error::internal(format!("unsupported CNI result version \"{text}\""))
            })?,
        };
        read(json, version)
    }

    /// Decodes a `prevResult`. Its `cniVersion`, if any, must have the layout of the configuration's version.
    pub fn decode_prev(json: &Json, conf_version: SpecVersion) -> Result<CniResult> {
        let generation = conf_version.generation();
        let decode = || match written_version(json)? {
            None => read(json, conf_version),
            Some(text) => SpecVersion::exact(text)
                .filter(|version| version.generation() == generation)
                .ok_or_else(|| foreign_generation(generation, text))
                .and_then(|version| read(json, version)),
        };
        decode().map_err(|e| e.context("could not parse prevResult"))
    }

    /// The result in the layout of its version.
    pub fn to_json(&self) -> Json {
        let generation = self.version.generation();
        if generation == Generation::Ip4Ip6 {
            let (ip4, ip6) = (self.family(IpAddr::is_ipv4), self.family(IpAddr::is_ipv6));
            return Json::encode(&Ip4Ip6 {
                version: self.version,
                ip4,
                ip6,
                dns: self.dns.clone(),
            });
        }
        let mut json = Json::encode(self);
        if generation == Generation::Current {
            if self.dns.is_empty() {
                json.remove("dns");
            }
            return json.sorted();
        }
        if let Some(Json::Array(ips)) = json.get_mut("ips") {
            for (json, ip) in ips.iter_mut().zip(&self.ips) {
                let version = if ip.address.addr().is_ipv4() { "4" } else { "6" };
                if let Json::Object(members) = json {
                    members.insert(0, ("version".to_owned(), version.into()));
                }
            }
        }
        json
    }

    fn family(&self, is_wanted: fn(&IpAddr) -> bool) -> Option<FamilyIp> {
        let ip = self.ips.iter().find(|ip| is_wanted(&ip.address.addr()))?;
        let routes = self.routes.iter().filter(|route| is_wanted(&route.dst.addr()));
        let routes = routes.cloned().collect();
        Some(FamilyIp { ip: ip.address, gateway: ip.gateway, routes })
    }

    /// The same result within the limits of `to`.
    ///
    /// Fails if `to` is 0.1.0 or 0.2.0 and there is no address, because those layouts consist of addresses only.
    /// A result that was decoded from such a version passes unchanged.
    pub fn convert(mut self, to: SpecVersion) -> Result<CniResult> {
        let from = self.version.generation();
        self.version = to;
        if to.generation() >= from {
            return Ok(self);
        }
        if from == Generation::Current {
            for interface in &mut self.interfaces {
                interface.mtu = 0;
                interface.socket_path.clear();
                interface.pci_id.clear();
            }
        }
        if to.generation() == Generation::Ip4Ip6 { self.keep_one_per_family() } else { Ok(self) }
    }

    fn keep_one_per_family(mut self) -> Result<CniResult> {
        let first = |wanted: fn(&IpAddr) -> bool| {
            self.ips.iter().find(|ip| wanted(&ip.address.addr())).cloned()
        };
        let (v4, v6) = (first(IpAddr::is_ipv4), first(IpAddr::is_ipv6));
        if v4.is_none() && v6.is_none() {
            return Err(Error::internal("cannot convert: no valid IP addresses"));
        }
        self.routes.retain(|route| if route.dst.addr().is_ipv4() { &v4 } else { &v6 }.is_some());
        for route in &mut self.routes {
            *route = Route { gw: route.gw, ..Route::to(route.dst) };
        }
        sort_by_key(&mut self.routes, |route| route.dst.addr().is_ipv6());
        self.ips = v4.into_iter().chain(v6).map(|ip| IpConfig { interface: None, ..ip }).collect();
        self.interfaces.clear();
        Ok(self)
    }

    /// The addresses of the interface at `index`.
    pub fn ips_of(&self, index: usize) -> impl Iterator<Item = &IpConfig> {
        let index = i64::try_from(index).ok();
        self.ips.iter().filter(move |ip| ip.interface == index && index.is_some())
    }

    /// Assigns all addresses to the first interface.
    pub fn assign_to_first(&mut self) {
        self.ips.iter_mut().for_each(|ip| ip.interface = Some(0));
    }

    /// All addresses, with the prefix lengths of their subnets.
    pub fn addresses(&self) -> Vec<IpNet> {
        self.ips.iter().map(|ip| ip.address).collect()
    }
}

impl Default for CniResult {
    fn default() -> CniResult {
        CniResult::new()
    }
}

/// The `cniVersion` of a result; `None` if it is absent or empty. The reference refuses an empty one since 0.3.0.
fn written_version(json: &Json) -> Result<Option<&str>> {
    match json.get_present("cniVersion") {
        None => Ok(None),
        Some(Json::String(text)) => Ok(Some(text.as_str()).filter(|text| !text.is_empty())),
        Some(other) => {
            Err(Error::internal(format!("cniVersion of the result: {}", other.expected("a text"))))
        }
    }
}

fn foreign_generation(generation: Generation, found: &str) -> Error {
    let versions = SpecVersion::ALL.into_iter().filter(|v| v.generation() == generation);
    // The reference counts the empty version among the oldest.
    let empty = (generation == Generation::Ip4Ip6).then_some("");
    let supported: Vec<&str> = empty.into_iter().chain(versions.map(SpecVersion::as_str)).collect();
    Error::internal(format!(
        "result type supports [{}] but unmarshalled CNIVersion is \"{found}\"",
        supported.join(" ")
    ))
}

fn read(json: &Json, version: SpecVersion) -> Result<CniResult> {
    if !matches!(json, Json::Object(_)) {
        return Err(Error::internal(json.expected("an object")).context("decode a result"));
    }
    // The reference's runtime library rewrites the numbers of results.
    let json = json.clone().normalised();
    let untyped = |e: Error| e.with_code(Code::INTERNAL);
    if version.generation() != Generation::Ip4Ip6 {
        return Ok(CniResult { version, ..json.decode().map_err(untyped)? });
    }
    let Ip4Ip6 { ip4, ip6, dns, .. } = json.decode().map_err(untyped)?;
    let mut result = CniResult { version, dns, ..CniResult::new() };
    for FamilyIp { ip: address, gateway, routes } in ip4.into_iter().chain(ip6) {
        result.ips.push(IpConfig { interface: None, address, gateway });
        result.routes.extend(routes);
    }
    Ok(result)
}

impl Route {
    /// A route to `dst` without any attribute.
    pub fn to(dst: IpNet) -> Route {
        Route { dst, gw: None, mtu: None, advmss: None, priority: None, table: None, scope: None }
    }

    /// Whether this is a default route.
    pub fn is_default(&self) -> bool {
        self.dst.prefix_len() == 0
    }
}

impl Dns {
    /// Whether all fields are empty.
    pub fn is_empty(&self) -> bool {
        *self == Dns::default()
    }
}

#[cfg(test)]
mod tests;
