//! static: addresses, routes and name servers from the configuration, from `CNI_ARGS` (`IP`, `GATEWAY`) or from the
//! runtime (`args.cni.ips`, capability `ips`).
//!
//! The runtime's addresses replace all others; those of `CNI_ARGS` are added to the configured ones. `GATEWAY` is set on
//! every address of its network without a gateway, on addresses of the runtime only if `CNI_ARGS` has no `IP`. There is
//! no state: two containers with the same address are not detected.
//!
//! Keys, all in `ipam`: `type`, `addresses` (`address`, `gateway`), `routes`, `dns`.

use std::net::IpAddr;

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::cni::json::Json;
use crate::cni::json::keys::Keys;
use crate::cni::{CniResult, Dns, IpConfig, Route, ip};
use crate::error::{Error, Result};
use crate::skel::{AddReq, CheckReq, Cx, DelReq, GcReq, Plugin, Remarks, addressing};

#[derive(Debug)]
pub struct Static;

/// The keys of a network, decoded on demand: DEL needs none.
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
    /// Routes, copied to the result.
    routes: Vec<Route>,
    /// Name resolution, copied to the result.
    dns: Dns,
}

/// An entry of `ipam.addresses`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct AddressConf {
    /// The address with its prefix length.
    address: String,
    /// The gateway of its network. Default: none.
    #[serde(deserialize_with = "ip::optional_ip")]
    gateway: Option<IpAddr>,
    /// `address` as an object, written by programs that encode the reference's type.
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
    /// Addresses with their prefix lengths.
    ips: Vec<String>,
}

impl Plugin for Static {
    const NAME: &'static str = "static";
    const ABOUT: &'static str = "configured and requested addresses";
    type Conf = Conf;

    fn keys() -> Keys {
        let (ipam, runtime) = (Keys::of::<Ipam>(), Keys::of::<Ips>());
        Keys::of::<Conf>().with("ipam", ipam).with("runtimeConfig", runtime)
    }

    fn examine(cx: &Cx<'_>, conf: &Conf, remarks: &mut Remarks) -> Result<()> {
        let Plan { ips, ipam } = Plan::before_add(cx, conf)?;
        remarks.subnets.extend(ips.iter().map(|ip| ip.address));
        remarks.warnings.extend(addressing::gateways(&cx.net, &ips, &ipam.routes));
        remarks.warnings.extend(addressing::routes(&ips, &ipam.routes));
        Ok(())
    }

    fn add(cx: &Cx<'_>, conf: &Conf, _: &AddReq) -> Result<CniResult> {
        let Plan { ips, ipam: Ipam { routes, dns, .. } } = Plan::resolve(cx, conf)?;
        Ok(CniResult { ips, routes, dns, ..CniResult::new() })
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        let plan = Plan::resolve(cx, conf)?;
        let prev = req.require_prev()?;
        plan.ips.iter().try_for_each(|wanted| verify(wanted, &prev.ips, req))
    }

    fn del(_: &Cx<'_>, _: &Conf, _: &DelReq) -> Result<()> {
        // ADD leaves no state.
        Ok(())
    }

    fn gc(_: &Cx<'_>, _: &Conf, _: &GcReq) -> Result<()> {
        // ADD leaves no state.
        Ok(())
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        Plan::before_add(cx, conf).map(drop)
    }
}

/// The addresses, routes and name servers of a call.
struct Plan {
    ips: Vec<IpConfig>,
    ipam: Ipam,
}

impl Plan {
    fn resolve(cx: &Cx<'_>, conf: &Conf) -> Result<Plan> {
        Plan::of(cx, conf, false)
    }

    /// The plan before the runtime has supplied addresses, which replace those of the configuration.
    fn before_add(cx: &Cx<'_>, conf: &Conf) -> Result<Plan> {
        Plan::of(cx, conf, true)
    }

    fn of(cx: &Cx<'_>, conf: &Conf, is_asked_before: bool) -> Result<Plan> {
        let is_supplied = is_asked_before && cx.net.wants("ips");
        let missing = || Error::config("IPAM config missing 'ipam' key");
        let ipam: Ipam = conf.ipam.as_ref().ok_or_else(missing)?.decode()?;
        let text = |value: &str| Ok(value.to_owned());
        let args = cx.args(&["IP", "GATEWAY"])?;
        let (own, gateways) = (args.get("IP", text)?, args.get("GATEWAY", text)?);
        let gateway = |item: &str| {
            ip::parse_ip(item.trim())
                .map_err(|_| Error::config(format!("invalid gateway address: {item}")))
        };
        let gateways = items(gateways.as_deref()).map(gateway).collect::<Result<Vec<_>>>()?;

        let requested: Args = Json::decode_or_default(conf.args.as_ref())?;
        let runtime: Ips = Json::decode_or_default(conf.runtime_config.as_ref())?;
        // Each list replaces all addresses before, which may be placeholders.
        let mut lists = [runtime.ips, requested.cni.ips].into_iter().map(|mut list| {
            list.retain(|item| !item.trim().is_empty());
            list
        });
        let (mut ips, mut use_gateways) = (Vec::new(), true);
        if let Some(list) = lists.find(|list| !list.is_empty()) {
            let not_cidr = "an entry in the 'ips' field is NOT in CIDR notation";
            ips = list.iter().map(|item| parse(item.trim(), not_cidr)).collect::<Result<_>>()?;
            use_gateways = own.is_none();
        } else {
            for configured in ipam.addresses.iter().filter(|_| !is_supplied) {
                let expected = "the 'address' field is expected to be in CIDR notation";
                let AddressConf { address, gateway, .. } = configured;
                if !(is_asked_before && address.is_empty()) {
                    ips.push(IpConfig { gateway: *gateway, ..parse(address, expected)? });
                }
            }
            for item in items(own.as_deref()) {
                ips.push(parse(item.trim(), "the 'ip' field is expected to be in CIDR notation")?);
            }
        }
        for ip in ips.iter_mut().filter(|ip| use_gateways && ip.gateway.is_none()) {
            // Of several gateways in the network the last one counts.
            let network = ip.address.trunc();
            ip.gateway = gateways.iter().rfind(|gateway| network.contains(*gateway)).copied();
        }
        refuse_invalid(&ips)?;
        cx.require_one_per_family(ips.iter().map(|ip| ip.address.addr().is_ipv4()))?;
        Ok(Plan { ips, ipam })
    }
}

/// The items of a list with commas that are not empty.
fn items(text: Option<&str>) -> impl Iterator<Item = &str> {
    text.into_iter().flat_map(|text| text.split(',')).filter(|item| !item.trim().is_empty())
}

/// An address without a gateway.
fn parse(text: &str, expected: &str) -> Result<IpConfig> {
    let address =
        ip::parse_cidr(text).map_err(|_| Error::config(format!("{expected}, got: '{text}'")))?;
    Ok(IpConfig { address, gateway: None, interface: None })
}

/// Refuses gateways of another family, and addresses that occur twice.
fn refuse_invalid(ips: &[IpConfig]) -> Result<()> {
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

/// The remedy for a configuration that was edited after ADD.
const REMEDY: &str = "attach the container again, or undo the change of its configuration";

/// Verifies that the result of ADD has the address, its prefix length and its gateway.
fn verify(wanted: &IpConfig, all: &[IpConfig], req: &CheckReq) -> Result<()> {
    let IpConfig { address, gateway, .. } = wanted;
    let (ip, ifname) = (address.addr(), &req.ifname);
    let Some(found) = all.iter().find(|found| found.address.addr() == ip) else {
        let msg = format!("static: address {ip} of interface {ifname} is not in prevResult");
        return Err(Error::internal(msg));
    };
    if gateway.is_some() && *gateway != found.gateway {
        let text = |gateway: &Option<IpAddr>| gateway.map_or("none".to_owned(), |g| g.to_string());
        let details =
            format!("the gateway is {}, not {}: {REMEDY}", text(&found.gateway), text(gateway));
        let msg = format!("static: Failed to match addr {ip} on interface {ifname}");
        return Err(Error::internal(msg).with_details(details));
    }
    // A plugin may narrow an address to /32 or /128.
    let lengths = [address.prefix_len(), address.max_prefix_len()];
    if !lengths.contains(&found.address.prefix_len()) {
        let msg = format!("static: address {ip} of interface {ifname} has another prefix length");
        return Err(Error::internal(msg).with_details(format!("it is {}: {REMEDY}", found.address)));
    }
    Ok(())
}
