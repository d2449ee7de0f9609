//! The layouts on the wire: which keys, in which order, and what is left out when empty.
//!
//! Written in the order of the 0.x layouts; from 1.0.0 on the keys of every object are sorted,
//! as the reference prints them.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::Deserialize;

use super::{CniResult, Dns, Interface, IpConfig, Route};
use crate::cni::ip;
use crate::cni::json::Json;
use crate::cni::version::{Generation, SpecVersion};
use crate::error::{Error, Result};

#[derive(Default, Deserialize)]
#[serde(default)]
struct Ip4Ip6 {
    ip4: Option<FamilyIp>,
    ip6: Option<FamilyIp>,
    dns: Dns,
}

#[derive(Deserialize)]
struct FamilyIp {
    #[serde(deserialize_with = "ip::cidr::deserialize")]
    ip: IpNet,
    #[serde(default, deserialize_with = "ip::optional_ip::deserialize")]
    gateway: Option<IpAddr>,
    #[serde(default)]
    routes: Vec<Route>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Lists {
    interfaces: Vec<Interface>,
    ips: Vec<IpConfig>,
    routes: Vec<Route>,
    dns: Dns,
}

impl CniResult {
    /// Reads a result that says its own version, as a plugin prints it. Where it says none,
    /// `default` is assumed.
    pub fn decode(json: &Json, default: SpecVersion) -> Result<CniResult> {
        let version = match version_text(json)? {
            None => default,
            Some(text) => SpecVersion::exact(text).ok_or_else(|| {
                Error::internal(format!("unsupported CNI result version \"{text}\""))
            })?,
        };
        read(json, version)
    }

    /// Reads a `prevResult` by the layout of the configuration's version: one of its own must be
    /// of the same generation.
    pub fn decode_prev(json: &Json, conf_version: SpecVersion) -> Result<CniResult> {
        let wrap = |e: Error| e.context("could not parse prevResult");
        let generation = conf_version.generation();
        let version = match version_text(json).map_err(wrap)? {
            None => conf_version,
            Some(text) => SpecVersion::exact(text)
                .filter(|v| v.generation() == generation)
                .ok_or_else(|| wrap(foreign_generation(generation, text)))?,
        };
        read(json, version).map_err(wrap)
    }

    /// The layout of this result's version.
    pub fn to_json(&self) -> Json {
        let mut top = Object::default();
        top.always("cniVersion", self.version.as_str().into());
        match self.version.generation() {
            Generation::Ip4Ip6 => {
                top.some("ip4", self.family_json(IpAddr::is_ipv4));
                top.some("ip6", self.family_json(IpAddr::is_ipv6));
            }
            Generation::TypedIps | Generation::Current => {
                top.list("interfaces", self.interfaces.iter().map(interface_json));
                let typed = self.version.generation() == Generation::TypedIps;
                top.list("ips", self.ips.iter().map(|ip| ip_json(ip, typed)));
                top.list("routes", self.routes.iter().map(route_json));
            }
        }
        let current = self.version.generation() == Generation::Current;
        if !(current && self.dns.is_empty()) {
            top.always("dns", dns_json(&self.dns));
        }
        let json = Json::Object(top.0);
        if current { json.sorted() } else { json }
    }

    fn family_json(&self, family: fn(&IpAddr) -> bool) -> Option<Json> {
        let ip = self.ips.iter().find(|ip| family(&ip.address.addr()))?;
        let mut object = Object::default();
        object.always("ip", text(&ip.address));
        object.some("gateway", ip.gateway.as_ref().map(text));
        let routes = self.routes.iter().filter(|route| family(&route.dst.addr()));
        object.list("routes", routes.map(route_json));
        Some(Json::Object(object.0))
    }
}

fn version_text(json: &Json) -> Result<Option<&str>> {
    match json.get_present("cniVersion") {
        // Empty is as good as absent; the reference refuses it from 0.3.0 on.
        None => Ok(None),
        Some(Json::String(text)) => Ok(Some(text.as_str()).filter(|text| !text.is_empty())),
        Some(other) => {
            Err(Error::internal(format!("cniVersion of the result is of type {}", other.go_type())))
        }
    }
}

fn foreign_generation(generation: Generation, found: &str) -> Error {
    let mut supported: Vec<&str> = SpecVersion::ALL
        .into_iter()
        .filter(|v| v.generation() == generation)
        .map(SpecVersion::as_str)
        .collect();
    if generation == Generation::Ip4Ip6 {
        // The reference counts the empty version as one of this row.
        supported.insert(0, "");
    }
    Error::internal(format!(
        "result type supports [{}] but unmarshalled CNIVersion is \"{found}\"",
        supported.join(" ")
    ))
}

fn read(json: &Json, version: SpecVersion) -> Result<CniResult> {
    // What went through the reference's runtime library has its numbers rewritten.
    let json = json.clone().normalised();
    if !matches!(json, Json::Object(_)) {
        return Err(Error::internal(format!("a result of type {}", json.go_type())));
    }
    let untyped = |e: Error| e.with_code(crate::error::Code::INTERNAL);
    if version.generation() == Generation::Ip4Ip6 {
        let Ip4Ip6 { ip4, ip6, dns } = json.decode().map_err(untyped)?;
        let (mut ips, mut routes) = (Vec::new(), Vec::new());
        for family in ip4.into_iter().chain(ip6) {
            ips.push(IpConfig { address: family.ip, gateway: family.gateway, interface: None });
            routes.extend(family.routes);
        }
        return Ok(CniResult { version, interfaces: Vec::new(), ips, routes, dns });
    }
    let Lists { interfaces, ips, routes, dns } = json.decode().map_err(untyped)?;
    Ok(CniResult { version, interfaces, ips, routes, dns })
}

/// Members of an object under construction.
#[derive(Default)]
struct Object(Vec<(String, Json)>);

impl Object {
    fn always(&mut self, key: &str, value: Json) {
        self.0.push((key.to_owned(), value));
    }

    fn some(&mut self, key: &str, value: Option<Json>) {
        if let Some(value) = value {
            self.always(key, value);
        }
    }

    fn text(&mut self, key: &str, value: &str) {
        self.some(key, Some(value).filter(|v| !v.is_empty()).map(Json::from));
    }

    fn nonzero(&mut self, key: &str, value: Option<u32>) {
        self.some(key, value.filter(|v| *v != 0).map(|v| Json::Integer(v.into())));
    }

    fn list(&mut self, key: &str, items: impl Iterator<Item = Json>) {
        let items: Vec<Json> = items.collect();
        if !items.is_empty() {
            self.always(key, Json::Array(items));
        }
    }
}

fn text(value: &impl ToString) -> Json {
    Json::String(value.to_string())
}

fn interface_json(interface: &Interface) -> Json {
    let mut object = Object::default();
    object.always("name", interface.name.as_str().into());
    object.text("mac", &interface.mac);
    object.nonzero("mtu", Some(interface.mtu));
    object.text("sandbox", &interface.sandbox);
    object.text("socketPath", &interface.socket_path);
    object.text("pciID", &interface.pci_id);
    Json::Object(object.0)
}

fn ip_json(ip: &IpConfig, typed: bool) -> Json {
    let mut object = Object::default();
    if typed {
        object.always("version", if ip.address.addr().is_ipv4() { "4" } else { "6" }.into());
    }
    object.some("interface", ip.interface.map(|i| Json::Integer(i.into())));
    object.always("address", text(&ip.address));
    object.some("gateway", ip.gateway.as_ref().map(text));
    Json::Object(object.0)
}

impl Route {
    /// The route as results and configurations have it.
    pub fn to_json(&self) -> Json {
        route_json(self)
    }
}

fn route_json(route: &Route) -> Json {
    let mut object = Object::default();
    object.always("dst", text(&route.dst));
    object.some("gw", route.gw.as_ref().map(text));
    object.nonzero("mtu", route.mtu);
    object.nonzero("advmss", route.advmss);
    object.nonzero("priority", route.priority);
    // An explicit 0 is printed for these two: 0 is the universe scope.
    object.some("table", route.table.map(|v| Json::Integer(v.into())));
    object.some("scope", route.scope.map(|v| Json::Integer(v.into())));
    Json::Object(object.0)
}

fn dns_json(dns: &Dns) -> Json {
    let mut object = Object::default();
    let texts = |list: &[String]| list.iter().map(|t| t.as_str().into()).collect::<Vec<Json>>();
    object.list("nameservers", texts(&dns.nameservers).into_iter());
    object.text("domain", &dns.domain);
    object.list("search", texts(&dns.search).into_iter());
    object.list("options", texts(&dns.options).into_iter());
    Json::Object(object.0)
}
