//! static: addresses, routes and name servers as they are written, from the configuration, from
//! `CNI_ARGS` (`IP`, `GATEWAY`) or from the runtime (`args.cni.ips`, capability `ips`).
//!
//! The runtime's addresses take the place of all others, those of `CNI_ARGS` are added to the
//! configured ones. `GATEWAY` serves every address of its network that has none; addresses of the
//! runtime only where `CNI_ARGS` names no `IP` that it belongs to. Nothing is kept: who uses the
//! same address twice is not noticed.
//!
//! Keys, all in `ipam`: `type`, `addresses` (`address`, `gateway`), `routes`, `dns`.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::cni::json::Json;
use crate::cni::json::keys::Keys;
use crate::cni::{CniResult, Dns, IpConfig, Route, ip};
use crate::error::{Error, Result};
use crate::skel::{AddReq, CheckReq, Cx, DelReq, GcReq, Plugin, Remarks};

#[derive(Debug)]
pub struct Static;

/// The keys of a network, read when they are needed: DEL needs none.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Conf {
    ipam: Option<Json>,
    runtime_config: Option<Json>,
    args: Option<Json>,
}

/// `ipam`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Ipam {
    /// The addresses of the interface.
    addresses: Vec<AddressConf>,
    /// Routes, passed on as they are.
    routes: Vec<Route>,
    /// Name resolution, passed on as it is.
    dns: Dns,
}

/// An entry of `ipam.addresses`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct AddressConf {
    /// The address with the length of its prefix.
    address: String,
    /// The gateway of its network. Default: none.
    #[serde(deserialize_with = "ip::optional_ip")]
    gateway: Option<IpAddr>,
    /// What programs write that print the reference's own type: `address` once more, in parts.
    #[serde(rename = "Address")]
    _parts: IgnoredAny,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Args {
    cni: Ips,
}

/// `args.cni` and `runtimeConfig`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Ips {
    /// Addresses with the lengths of their prefixes.
    ips: Vec<String>,
}

impl Plugin for Static {
    const NAME: &'static str = "static";
    const ABOUT: &'static str = "addresses as they are configured or asked for";
    type Conf = Conf;

    fn keys() -> Keys {
        let (ipam, runtime) = (Keys::of::<Ipam>(), Keys::of::<Ips>());
        Keys::of::<Conf>().with("ipam", ipam).with("runtimeConfig", runtime)
    }

    fn examine(cx: &Cx<'_>, conf: &Conf, _: &mut Remarks) -> Result<()> {
        Plan::resolve(cx, conf).map(drop)
    }

    fn add(cx: &Cx<'_>, conf: &Conf, _: &AddReq) -> Result<CniResult> {
        let Plan { ips, routes, dns } = Plan::resolve(cx, conf)?;
        Ok(CniResult { ips, routes, dns, ..CniResult::new() })
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        let plan = Plan::resolve(cx, conf)?;
        let prev = req.require_prev()?;
        plan.ips.iter().try_for_each(|wanted| verify(wanted, &prev.ips, req))
    }

    fn del(_: &Cx<'_>, _: &Conf, _: &DelReq) -> Result<()> {
        // ADD kept nothing.
        Ok(())
    }

    fn gc(_: &Cx<'_>, _: &Conf, _: &GcReq) -> Result<()> {
        // ADD kept nothing.
        Ok(())
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        Plan::resolve(cx, conf).map(drop)
    }
}

/// What ADD hands out.
#[derive(Debug)]
struct Plan {
    ips: Vec<IpConfig>,
    routes: Vec<Route>,
    dns: Dns,
}

impl Plan {
    fn resolve(cx: &Cx<'_>, conf: &Conf) -> Result<Plan> {
        let missing = || Error::config("IPAM config missing 'ipam' key");
        let ipam: Ipam = conf.ipam.as_ref().ok_or_else(missing)?.decode()?;
        let text = |value: &str| Ok(value.to_owned());
        let args = cx.args(&["IP", "GATEWAY"])?;
        let (own, gateways) = (args.get("IP", text)?, args.get("GATEWAY", text)?);
        let gateways = items(gateways.as_deref()).map(gateway).collect::<Result<Vec<_>>>()?;

        let mut ips = ipam.addresses.iter().map(configured).collect::<Result<Vec<_>>>()?;
        for item in items(own.as_deref()) {
            ips.push(bare(item.trim(), "the 'ip' field is expected to be in CIDR notation")?);
        }
        let asked: Args = Json::decode_or_default(conf.args.as_ref())?;
        let runtime: Ips = Json::decode_or_default(conf.runtime_config.as_ref())?;
        // Later ones take the place of all before.
        let mut gateways_apply = true;
        for list in [asked.cni.ips, runtime.ips].into_iter().filter(|list| !list.is_empty()) {
            let not_cidr = "an entry in the 'ips' field is NOT in CIDR notation";
            ips = list.iter().map(|item| bare(item, not_cidr)).collect::<Result<_>>()?;
            gateways_apply = own.is_none();
        }
        if gateways_apply {
            for ip in &mut ips {
                complete(ip, &gateways);
            }
        }
        refuse_nonsense(&ips)?;
        cx.require_one_per_family(ips.iter().map(|ip| ip.address.addr().is_ipv4()))?;
        Ok(Plan { ips, routes: ipam.routes, dns: ipam.dns })
    }
}

/// The parts between commas; an absent or empty text has none.
fn items(text: Option<&str>) -> impl Iterator<Item = &str> {
    text.filter(|text| !text.is_empty()).into_iter().flat_map(|text| text.split(','))
}

fn gateway(item: &str) -> Result<IpAddr> {
    let invalid = |_| Error::config(format!("invalid gateway address: {item}"));
    ip::parse_ip(item.trim()).map_err(invalid)
}

fn configured(conf: &AddressConf) -> Result<IpConfig> {
    let expected = "the 'address' field is expected to be in CIDR notation";
    Ok(IpConfig { gateway: conf.gateway, ..bare(&conf.address, expected)? })
}

/// An address without a gateway.
fn bare(text: &str, complaint: &str) -> Result<IpConfig> {
    let address =
        ip::parse_cidr(text).map_err(|_| Error::config(format!("{complaint}, got: '{text}'")))?;
    Ok(IpConfig { address, gateway: None, interface: None })
}

/// Of several gateways in the address's network the last one is meant.
fn complete(ip: &mut IpConfig, gateways: &[IpAddr]) {
    if ip.gateway.is_none() {
        let network = ip.address.trunc();
        ip.gateway = gateways.iter().rfind(|gateway| network.contains(*gateway)).copied();
    }
}

/// What no kernel would take, or would take once only.
fn refuse_nonsense(ips: &[IpConfig]) -> Result<()> {
    for (i, IpConfig { address, gateway, .. }) in ips.iter().enumerate() {
        if let Some(gateway) = gateway
            && gateway.is_ipv4() != address.addr().is_ipv4()
        {
            let msg = format!("gateway {gateway} is of another family than address {address}");
            return Err(Error::config(msg));
        }
        if ips[..i].iter().any(|other| other.address.addr() == address.addr()) {
            let msg = format!("address {} is given twice", address.addr());
            return Err(Error::config(msg).with_details(
                "remove one: addresses of CNI_ARGS are added to those of \"addresses\"",
            ));
        }
    }
    Ok(())
}

/// The result of ADD has the address, its prefix length and its gateway.
fn verify(wanted: &IpConfig, all: &[IpConfig], req: &CheckReq) -> Result<()> {
    let IpConfig { address, gateway, .. } = wanted;
    let (ip, ifname) = (address.addr(), &req.ifname);
    let Some(found) = all.iter().find(|found| found.address.addr() == ip) else {
        let msg = format!("static: address {ip} of interface {ifname} is not in prevResult");
        return Err(Error::internal(msg));
    };
    if gateway.is_some() && *gateway != found.gateway {
        let text = |gateway: &Option<IpAddr>| gateway.map_or("none".to_owned(), |g| g.to_string());
        let details = format!("the gateway is {}, not {}", text(&found.gateway), text(gateway));
        let msg = format!("static: Failed to match addr {ip} on interface {ifname}");
        return Err(Error::internal(msg).with_details(details));
    }
    if !same_prefix(found.address, *address) {
        let msg = format!("static: address {ip} of interface {ifname} has another prefix length");
        return Err(Error::internal(msg).with_details(format!("{} in prevResult", found.address)));
    }
    Ok(())
}

/// A plugin may narrow an address down to a host's own network.
fn same_prefix(found: IpNet, wanted: IpNet) -> bool {
    [wanted.prefix_len(), wanted.max_prefix_len()].contains(&found.prefix_len())
}
