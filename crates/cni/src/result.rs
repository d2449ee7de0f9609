//! The result of ADD: one model for all versions, its layouts in JSON, and the conversions between
//! versions.
//!
//! Plugins work on [`CniResult`] in the newest form. [`CniResult::decode`] reads any version into
//! it, [`CniResult::convert_to`] drops the data that another version cannot represent, and
//! [`CniResult::to_json`] writes the layout of the result's own version.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::ip;
use super::version::{ResultLayout, SpecVersion};
use crate::error::{Error, ErrorCode, Result};
use crate::json::Json;
use crate::sort::sort_by_key;

/// The result of an ADD (spec, section 5). The fields of this struct and of its parts are in the
/// order of the 0.x layouts; since 1.0.0 the keys of every object are sorted, as the reference
/// prints them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CniResult {
    /// The version whose layout and limits this result has.
    #[serde(rename = "cniVersion", skip_deserializing)]
    pub version: SpecVersion,
    /// Every interface of the attachment, host side included; `ips` point into this list.
    #[serde(skip_serializing_if = "is_default")]
    pub interfaces: Vec<ResultInterface>,
    /// The addresses.
    #[serde(skip_serializing_if = "is_default")]
    pub ips: Vec<IpConfig>,
    /// The routes.
    #[serde(skip_serializing_if = "is_default")]
    pub routes: Vec<ResultRoute>,
    /// Name resolution.
    pub dns: DnsConfig,
}

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ResultInterface {
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
    #[serde(deserialize_with = "ip::deserialize_cidr")]
    pub address: IpNet,
    /// Gateway of the subnet; it does not imply a route.
    #[serde(
        default,
        deserialize_with = "ip::deserialize_optional_ip",
        skip_serializing_if = "is_default"
    )]
    pub gateway: Option<IpAddr>,
}

/// A route.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ResultRoute {
    /// Destination; host bits are kept.
    #[serde(deserialize_with = "ip::deserialize_cidr")]
    pub dst: IpNet,
    /// Next hop.
    #[serde(
        default,
        deserialize_with = "ip::deserialize_optional_ip",
        skip_serializing_if = "is_default"
    )]
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
pub struct DnsConfig {
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
struct Ip4Ip6Result {
    #[serde(rename = "cniVersion", skip_deserializing)]
    version: SpecVersion,
    #[serde(skip_serializing_if = "is_default")]
    ip4: Option<FamilyIpConfig>,
    #[serde(skip_serializing_if = "is_default")]
    ip6: Option<FamilyIpConfig>,
    dns: DnsConfig,
}

#[derive(PartialEq, Serialize, Deserialize)]
struct FamilyIpConfig {
    #[serde(deserialize_with = "ip::deserialize_cidr")]
    ip: IpNet,
    #[serde(
        default,
        deserialize_with = "ip::deserialize_optional_ip",
        skip_serializing_if = "is_default"
    )]
    gateway: Option<IpAddr>,
    #[serde(default, skip_serializing_if = "is_default")]
    routes: Vec<ResultRoute>,
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
    ///
    /// ```
    /// # use cnibox_cni::{CniResult, SpecVersion};
    /// assert_eq!(CniResult::new().version, SpecVersion::NEWEST);
    /// ```
    pub fn new() -> CniResult {
        CniResult {
            version: SpecVersion::NEWEST,
            interfaces: Vec::new(),
            ips: Vec::new(),
            routes: Vec::new(),
            dns: DnsConfig::default(),
        }
    }

    /// Decodes a plugin's output by the layout of its `cniVersion`, or of `default` if it has none.
    ///
    /// ```
    /// # use cnibox_cni::{CniResult, Json, SpecVersion};
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let old = Json::parse(br#"{"ip4": {"ip": "10.1.2.3/24"}}"#)?;
    /// let result = CniResult::decode(&old, SpecVersion::V0_2_0)?;
    /// assert_eq!(result.ips[0].address.to_string(), "10.1.2.3/24");
    /// # Ok(())
    /// # }
    /// ```
    pub fn decode(json: &Json, default: SpecVersion) -> Result<CniResult> {
        let version = match written_version(json)? {
            None => default,
            Some(text) => SpecVersion::parse_exact(text).ok_or_else(|| {
                Error::internal(format!("unsupported CNI result version \"{text}\""))
            })?,
        };
        decode_as_version(json, version)
    }

    /// Decodes a `prevResult`. Its `cniVersion`, if any, must have the layout of the
    /// configuration's version.
    ///
    /// ```
    /// # use cnibox_cni::{CniResult, Json, SpecVersion};
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let prev = Json::parse(br#"{"cniVersion": "1.0.0", "ips": []}"#)?;
    /// assert!(CniResult::decode_prev_result(&prev, SpecVersion::V1_1_0).is_ok());
    /// assert!(CniResult::decode_prev_result(&prev, SpecVersion::V0_4_0).is_err());
    /// # Ok(())
    /// # }
    /// ```
    pub fn decode_prev_result(json: &Json, conf_version: SpecVersion) -> Result<CniResult> {
        let generation = conf_version.result_layout();
        let decode = || match written_version(json)? {
            None => decode_as_version(json, conf_version),
            Some(text) => SpecVersion::parse_exact(text)
                .filter(|version| version.result_layout() == generation)
                .ok_or_else(|| foreign_layout_error(generation, text))
                .and_then(|version| decode_as_version(json, version)),
        };
        decode().map_err(|e| e.context("could not parse prevResult"))
    }

    /// The result in the layout of its version.
    ///
    /// ```
    /// # use cnibox_cni::CniResult;
    /// assert_eq!(CniResult::new().to_json().get_member("cniVersion"), Some(&"1.1.0".into()));
    /// ```
    pub fn to_json(&self) -> Json {
        let generation = self.version.result_layout();
        if generation == ResultLayout::Ip4Ip6 {
            let (ip4, ip6) =
                (self.family_config(IpAddr::is_ipv4), self.family_config(IpAddr::is_ipv6));
            return Json::encode(&Ip4Ip6Result {
                version: self.version,
                ip4,
                ip6,
                dns: self.dns.clone(),
            });
        }
        let mut json = Json::encode(self);
        if generation == ResultLayout::Current {
            if self.dns.is_empty() {
                json.remove_member("dns");
            }
            return json.with_sorted_keys();
        }
        if let Some(Json::Array(ips)) = json.get_member_mut("ips") {
            for (json, ip) in ips.iter_mut().zip(&self.ips) {
                let version = if ip.address.addr().is_ipv4() { "4" } else { "6" };
                if let Json::Object(members) = json {
                    members.insert(0, ("version".to_owned(), version.into()));
                }
            }
        }
        json
    }

    fn family_config(&self, is_wanted: fn(&IpAddr) -> bool) -> Option<FamilyIpConfig> {
        let ip = self.ips.iter().find(|ip| is_wanted(&ip.address.addr()))?;
        let routes = self.routes.iter().filter(|route| is_wanted(&route.dst.addr()));
        let routes = routes.cloned().collect();
        Some(FamilyIpConfig { ip: ip.address, gateway: ip.gateway, routes })
    }

    /// The same result within the limits of `to`.
    ///
    /// Fails if `to` is 0.1.0 or 0.2.0 and there is no address, because those layouts consist of
    /// addresses only. A result that was decoded from such a version passes unchanged.
    ///
    /// ```
    /// # use cnibox_cni::{CniResult, Json, SpecVersion};
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let result = CniResult::decode(&Json::parse(br#"{"ips": [{"address": "10.1.2.3/24"}]}"#)?, SpecVersion::V1_1_0)?;
    /// let old = result.convert_to(SpecVersion::V0_2_0)?.to_json();
    /// assert!(old.get_member("ip4").is_some());
    /// # Ok(())
    /// # }
    /// ```
    pub fn convert_to(mut self, to: SpecVersion) -> Result<CniResult> {
        let from = self.version.result_layout();
        self.version = to;
        if to.result_layout() >= from {
            return Ok(self);
        }
        if from == ResultLayout::Current {
            for interface in &mut self.interfaces {
                interface.mtu = 0;
                interface.socket_path.clear();
                interface.pci_id.clear();
            }
        }
        if to.result_layout() == ResultLayout::Ip4Ip6 {
            self.keep_one_per_family()
        } else {
            Ok(self)
        }
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
            *route = ResultRoute { gw: route.gw, ..ResultRoute::for_destination(route.dst) };
        }
        sort_by_key(&mut self.routes, |route| route.dst.addr().is_ipv6());
        self.ips = v4.into_iter().chain(v6).map(|ip| IpConfig { interface: None, ..ip }).collect();
        self.interfaces.clear();
        Ok(self)
    }

    /// The addresses of the interface at `index`.
    ///
    /// ```
    /// # use cnibox_cni::{CniResult, Json, SpecVersion};
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let json = br#"{"interfaces": [{"name": "eth0"}], "ips": [{"interface": 0, "address": "10.1.2.3/24"}]}"#;
    /// let result = CniResult::decode(&Json::parse(json)?, SpecVersion::V1_1_0)?;
    /// assert_eq!(result.ips_of_interface(0).count(), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn ips_of_interface(&self, index: usize) -> impl Iterator<Item = &IpConfig> {
        let index = i64::try_from(index).ok();
        self.ips.iter().filter(move |ip| ip.interface == index && index.is_some())
    }

    /// Assigns all addresses to the first interface.
    #[doc(hidden)]
    pub fn assign_ips_to_first(&mut self) {
        self.ips.iter_mut().for_each(|ip| ip.interface = Some(0));
    }

    /// All addresses, with the prefix lengths of their subnets.
    ///
    /// ```
    /// # use cnibox_cni::{CniResult, Json, SpecVersion};
    /// # fn main() -> cnibox_cni::Result<()> {
    /// let json = Json::parse(br#"{"ips": [{"address": "10.1.2.3/24"}, {"address": "fd00::3/64"}]}"#)?;
    /// let addresses = CniResult::decode(&json, SpecVersion::V1_1_0)?.all_addresses();
    /// assert_eq!(addresses.len(), 2);
    /// # Ok(())
    /// # }
    /// ```
    pub fn all_addresses(&self) -> Vec<IpNet> {
        self.ips.iter().map(|ip| ip.address).collect()
    }
}

impl Default for CniResult {
    fn default() -> CniResult {
        CniResult::new()
    }
}

/// The `cniVersion` of a result; `None` if it is absent or empty. The reference refuses an empty
/// one since 0.3.0.
fn written_version(json: &Json) -> Result<Option<&str>> {
    match json.get_present_member("cniVersion") {
        None => Ok(None),
        Some(Json::String(text)) => Ok(Some(text.as_str()).filter(|text| !text.is_empty())),
        Some(other) => Err(Error::internal(format!(
            "cniVersion of the result: {}",
            other.wrong_type_message("a text")
        ))),
    }
}

fn foreign_layout_error(generation: ResultLayout, found: &str) -> Error {
    let versions = SpecVersion::ALL.into_iter().filter(|v| v.result_layout() == generation);
    // The reference counts the empty version among the oldest.
    let empty = (generation == ResultLayout::Ip4Ip6).then_some("");
    let supported: Vec<&str> = empty.into_iter().chain(versions.map(SpecVersion::as_str)).collect();
    Error::internal(format!(
        "result type supports [{}] but unmarshalled CNIVersion is \"{found}\"",
        supported.join(" ")
    ))
}

fn decode_as_version(json: &Json, version: SpecVersion) -> Result<CniResult> {
    if !matches!(json, Json::Object(_)) {
        return Err(
            Error::internal(json.wrong_type_message("an object")).context("decode a result")
        );
    }
    // The reference's runtime library rewrites the numbers of results.
    let json = json.clone().with_normalised_numbers();
    let untyped = |e: Error| e.with_code(ErrorCode::INTERNAL);
    if version.result_layout() != ResultLayout::Ip4Ip6 {
        return Ok(CniResult { version, ..json.decode().map_err(untyped)? });
    }
    let Ip4Ip6Result { ip4, ip6, dns, .. } = json.decode().map_err(untyped)?;
    let mut result = CniResult { version, dns, ..CniResult::new() };
    for FamilyIpConfig { ip: address, gateway, routes } in ip4.into_iter().chain(ip6) {
        result.ips.push(IpConfig { interface: None, address, gateway });
        result.routes.extend(routes);
    }
    Ok(result)
}

impl IpConfig {
    /// The gateway; `None` also for the unspecified address, with which route-override shows that
    /// it has deleted the default route.
    #[doc(hidden)]
    pub fn usable_gateway(&self) -> Option<IpAddr> {
        self.gateway.filter(|gateway| !gateway.is_unspecified())
    }
}

impl ResultRoute {
    /// A route to `dst` without any attribute.
    ///
    /// ```
    /// # use cnibox_cni::ResultRoute;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// assert_eq!(ResultRoute::for_destination("0.0.0.0/0".parse()?).gw, None);
    /// # Ok(())
    /// # }
    /// ```
    pub fn for_destination(dst: IpNet) -> ResultRoute {
        ResultRoute {
            dst,
            gw: None,
            mtu: None,
            advmss: None,
            priority: None,
            table: None,
            scope: None,
        }
    }

    /// Whether this is a default route.
    #[doc(hidden)]
    pub fn is_default(&self) -> bool {
        self.dst.prefix_len() == 0
    }
}

impl DnsConfig {
    /// Whether all fields are empty.
    ///
    /// ```
    /// # use cnibox_cni::DnsConfig;
    /// assert!(DnsConfig::default().is_empty());
    /// ```
    pub fn is_empty(&self) -> bool {
        *self == DnsConfig::default()
    }
}

#[cfg(test)]
mod tests;
