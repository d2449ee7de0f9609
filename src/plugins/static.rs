//! static: addresses, routes and name servers from the configuration, from `CNI_ARGS` (`IP`,
//! `GATEWAY`) or from the runtime (`args.cni.ips`, capability `ips`).
//!
//! The runtime's addresses replace all others; those of `CNI_ARGS` are added to the configured
//! ones. `GATEWAY` is set on every address of its network without a gateway, on addresses of the
//! runtime only if `CNI_ARGS` has no `IP`. There is no state: two containers with the same address
//! are not detected.
//!
//! Keys, all in `ipam`: `type`, `addresses` (`address`, `gateway`), `routes`, `dns`.

use std::net::IpAddr;

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, GcRequest, Plugin, addressing,
};
use cni::config::Args;
use cni::error::{Error, Result};
use cni::json::Json;
use cni::json::keys::DecodedKeys;
use cni::{CniResult, DnsConfig, IpConfig, ResultRoute, ip};

#[derive(Debug)]
pub struct Static;

/// The keys of a network, decoded on demand: DEL needs none.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct StaticConfig {
    ipam: Option<Json>,
    runtime_config: Option<Json>,
    args: Option<Json>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StaticIpamConfig {
    /// The addresses of the interface.
    addresses: Vec<StaticAddressConfig>,
    /// Routes, copied to the result.
    routes: Vec<ResultRoute>,
    /// Name resolution, copied to the result.
    dns: DnsConfig,
}

/// An entry of `ipam.addresses`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StaticAddressConfig {
    /// The address with its prefix length.
    address: String,
    /// The gateway of its network. Default: none.
    #[serde(deserialize_with = "ip::deserialize_optional_ip")]
    gateway: Option<IpAddr>,
    /// `address` as an object, written by programs that encode the reference's type.
    #[serde(rename = "Address")]
    _parts: IgnoredAny,
}

/// `args.cni` and `runtimeConfig`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RequestedIps {
    /// Addresses with their prefix lengths.
    ips: Vec<String>,
}

impl Plugin for Static {
    const NAME: &'static str = "static";
    const ABOUT: &'static str = "configured and requested addresses";
    type Conf = StaticConfig;

    fn keys() -> DecodedKeys {
        let (ipam, runtime) =
            (DecodedKeys::of_type::<StaticIpamConfig>(), DecodedKeys::of_type::<RequestedIps>());
        DecodedKeys::of_type::<StaticConfig>()
            .with_member("ipam", ipam)
            .with_member("runtimeConfig", runtime)
    }

    fn examine(
        cx: &CallContext<'_>,
        conf: &StaticConfig,
        remarks: &mut ConfigRemarks,
    ) -> Result<()> {
        let StaticPlan { ips, ipam } = StaticPlan::before_add(cx, conf)?;
        remarks.subnets.extend(ips.iter().map(|ip| ip.address));
        remarks.warnings.extend(addressing::gateway_warnings(&cx.net, &ips, &ipam.routes));
        remarks.warnings.extend(addressing::route_warnings(&ips, &ipam.routes));
        Ok(())
    }

    fn add(cx: &CallContext<'_>, conf: &StaticConfig, _: &AddRequest) -> Result<CniResult> {
        let StaticPlan { ips, ipam: StaticIpamConfig { routes, dns, .. } } =
            StaticPlan::from_config(cx, conf)?;
        Ok(CniResult { ips, routes, dns, ..CniResult::new() })
    }

    fn check(cx: &CallContext<'_>, conf: &StaticConfig, req: &CheckRequest) -> Result<()> {
        let plan = StaticPlan::from_config(cx, conf)?;
        let prev = req.require_final_result()?;
        plan.ips.iter().try_for_each(|wanted| verify_address(wanted, &prev.ips, req))
    }

    fn del(_: &CallContext<'_>, _: &StaticConfig, _: &DelRequest) -> Result<()> {
        // ADD leaves no state.
        Ok(())
    }

    fn gc(_: &CallContext<'_>, _: &StaticConfig, _: &GcRequest) -> Result<()> {
        // ADD leaves no state.
        Ok(())
    }

    fn status(cx: &CallContext<'_>, conf: &StaticConfig) -> Result<()> {
        StaticPlan::before_add(cx, conf).map(drop)
    }
}

/// The addresses, routes and name servers of a call.
struct StaticPlan {
    ips: Vec<IpConfig>,
    ipam: StaticIpamConfig,
}

impl StaticPlan {
    fn from_config(cx: &CallContext<'_>, conf: &StaticConfig) -> Result<StaticPlan> {
        StaticPlan::build_plan(cx, conf, false)
    }

    /// The plan before the runtime has supplied addresses, which replace those of the
    /// configuration.
    fn before_add(cx: &CallContext<'_>, conf: &StaticConfig) -> Result<StaticPlan> {
        StaticPlan::build_plan(cx, conf, true)
    }

    fn build_plan(
        cx: &CallContext<'_>,
        conf: &StaticConfig,
        is_asked_before: bool,
    ) -> Result<StaticPlan> {
        let is_supplied = is_asked_before && cx.net.wants_capability("ips");
        let missing = || Error::config("IPAM config missing 'ipam' key");
        let ipam: StaticIpamConfig = conf.ipam.as_ref().ok_or_else(missing)?.decode()?;
        let text = |value: &str| Ok(value.to_owned());
        let args = cx.parse_args(&["IP", "GATEWAY"])?;
        let (own, gateways) = (args.parse_value("IP", text)?, args.parse_value("GATEWAY", text)?);
        let gateway = |item: &str| {
            ip::parse_ip(item.trim())
                .map_err(|_| Error::config(format!("invalid gateway address: {item}")))
        };
        let gateways = split_items(gateways.as_deref()).map(gateway).collect::<Result<Vec<_>>>()?;

        let requested: Args<RequestedIps> = Json::decode_or_default(conf.args.as_ref())?;
        let runtime: RequestedIps = Json::decode_or_default(conf.runtime_config.as_ref())?;
        // Each list replaces all addresses before, which may be placeholders.
        let mut lists = [runtime.ips, requested.cni.ips].into_iter().map(|mut list| {
            list.retain(|item| !item.trim().is_empty());
            list
        });
        let (mut ips, mut use_gateways) = (Vec::new(), true);
        if let Some(list) = lists.find(|list| !list.is_empty()) {
            let not_cidr = "an entry in the 'ips' field is NOT in CIDR notation";
            ips = list
                .iter()
                .map(|item| parse_address(item.trim(), not_cidr))
                .collect::<Result<_>>()?;
            use_gateways = own.is_none();
        } else {
            for configured in ipam.addresses.iter().filter(|_| !is_supplied) {
                let expected = "the 'address' field is expected to be in CIDR notation";
                let StaticAddressConfig { address, gateway, .. } = configured;
                if !(is_asked_before && address.is_empty()) {
                    ips.push(IpConfig { gateway: *gateway, ..parse_address(address, expected)? });
                }
            }
            for item in split_items(own.as_deref()) {
                let reason = "the 'ip' field is expected to be in CIDR notation";
                ips.push(parse_address(item.trim(), reason)?);
            }
        }
        for ip in ips.iter_mut().filter(|ip| use_gateways && ip.gateway.is_none()) {
            // Of several gateways in the network the last one counts.
            let network = ip.address.trunc();
            ip.gateway = gateways.iter().rfind(|gateway| network.contains(*gateway)).copied();
        }
        refuse_invalid(&ips)?;
        cx.require_one_per_family(ips.iter().map(|ip| ip.address.addr().is_ipv4()))?;
        Ok(StaticPlan { ips, ipam })
    }
}

/// The items of a list with commas that are not empty.
fn split_items(text: Option<&str>) -> impl Iterator<Item = &str> {
    text.into_iter().flat_map(|text| text.split(',')).filter(|item| !item.trim().is_empty())
}

/// An address without a gateway.
fn parse_address(text: &str, expected: &str) -> Result<IpConfig> {
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
fn verify_address(wanted: &IpConfig, all: &[IpConfig], req: &CheckRequest) -> Result<()> {
    let IpConfig { address, gateway, .. } = wanted;
    let (ip, ifname) = (address.addr(), &req.ifname);
    let Some(found) = all.iter().find(|found| found.address.addr() == ip) else {
        let msg = format!("static: address {ip} of interface {ifname} is not in prevResult");
        return Err(Error::internal(msg));
    };
    // A plugin may have deleted the default route.
    let is_given_up = found.gateway.is_some() && found.usable_gateway().is_none();
    if gateway.is_some() && *gateway != found.gateway && !is_given_up {
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
