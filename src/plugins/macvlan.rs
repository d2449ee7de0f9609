//! macvlan: an interface with an Ethernet address of its own on top of a link, its master.
//!
//! Keys: `master` (default: the link of the default route), `mode` (`bridge`, `private`, `vepa`,
//! `passthru`), `mtu`, `mac`, `bcqueuelen`, `linkInContainer` (the master is in the container);
//! `CNI_ARGS` `MAC` and the capability `mac` have precedence over `mac`. `ipam` is optional:
//! without it the interface is layer 2.
//!
//! There is no state on the host: the interface is created in the container, and vanishes with it.

use serde::Deserialize;

use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, GcRequest, LinkAddresses,
    Plugin,
};
use crate::iface::ContainerNetns;
use crate::iface::child::{self, MasterConfig, NewChildLink};
use crate::iface::mtu::MtuConfig;
use crate::netlink::{Link, LinkKind, MacAddress, MacvlanMode, Netlink};
use crate::repairs::RepairFindings;
use cni::config::MacConfig;
use cni::error::{Error, ErrorContext, Result};
use cni::{CniResult, InterfaceName};

const KIND: &str = "macvlan";

pub struct Macvlan;

/// The keys of a macvlan network.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct MacvlanConfig {
    /// The link below. Default: the link of the default route.
    master: String,
    /// Traffic between the interfaces on a master: `bridge` (default), `private`, `vepa`,
    /// `passthru`.
    mode: String,
    /// MTU in bytes, at most that of the master, or `"auto"`. Default: the master's.
    mtu: MtuConfig,
    /// MAC of the interface. Default: the kernel chooses.
    mac: String,
    /// Look for the master in the container.
    link_in_container: bool,
    /// Whether the default routes of `ipam` are the container's. Default: true.
    default_route: Option<bool>,
    /// Whether router advertisements give the interface addresses and routes, if it has IPv6
    /// addresses of `ipam`. Default: as the kernel decides.
    #[serde(rename = "acceptRA")]
    accept_ra: Option<bool>,
    /// The length of the queue of received broadcasts. Default: the kernel's.
    bcqueuelen: u32,
    /// `runtimeConfig.mac` (capability `mac`): MAC of the interface; has precedence over the
    /// others.
    runtime_config: MacConfig,
}

impl MacvlanConfig {
    fn master_config(&self) -> MasterConfig<'_> {
        MasterConfig { name: &self.master, in_container: self.link_in_container, mtu: self.mtu }
    }
}

impl Plugin for Macvlan {
    const NAME: &'static str = KIND;
    const ABOUT: &'static str = "interface with a MAC of its own on a link of the host";
    const UNDO_IF_UNREPRESENTABLE: bool = false;
    const REPAIRS: bool = true;
    type Conf = MacvlanConfig;

    fn examine(_: &CallContext<'_>, conf: &MacvlanConfig, _: &mut ConfigRemarks) -> Result<()> {
        MacvlanPlan::from_config(conf, "").map(drop)
    }

    fn add(cx: &CallContext<'_>, conf: &MacvlanConfig, req: &AddRequest) -> Result<CniResult> {
        let plan = MacvlanPlan::from_config(conf, &cx.mac_arg()?)?;
        let (inside, host) = (
            ContainerNetns::open_in(req.sandbox.open_netns()?)?.with_accept_ra(conf.accept_ra),
            cx.host_netlink()?,
        );
        let place = conf.master_config().master_netlink(host, &inside);
        let wanted = plan.resolve_link(conf, (place, host), &req.ifname)?;
        let given = (!cx.has_ipam()).then(CniResult::new);
        let addresses = LinkAddresses { given, default_route: conf.default_route };
        let (result, link) = req.attach_link(cx, &inside, place, &wanted, addresses)?;
        if let Some(mac) = plan.mac.filter(|mac| link.mac != Some(*mac)) {
            warn!("mode \"passthru\" keeps the master's MAC: {mac} is not used");
        }
        Ok(result)
    }

    fn check(cx: &CallContext<'_>, conf: &MacvlanConfig, req: &CheckRequest) -> Result<()> {
        let plan = MacvlanPlan::from_config(conf, &cx.mac_arg()?)?;
        let inside = ContainerNetns::open_in(req.sandbox.open_netns()?)?;
        cx.if_ipam(CallContext::ipam_check)?;
        let found = req.find_link(&inside, KIND)?;
        plan.verify_link(conf, &found.link)?;
        conf.master_config().verify_master(cx.host_netlink()?, &inside, &found.link)?;
        found.verify_layer3(&inside)
    }

    fn repair(
        cx: &CallContext<'_>,
        conf: &MacvlanConfig,
        req: &CheckRequest,
        repairs: &mut RepairFindings,
    ) -> Result<()> {
        let (inside, host) = (
            ContainerNetns::open_in(req.sandbox.open_netns()?)?.with_accept_ra(conf.accept_ra),
            cx.host_netlink()?,
        );
        req.restore_link(&inside, KIND, repairs, &|mac, up| {
            let plan = MacvlanPlan { mac, ..MacvlanPlan::from_config(conf, "")? };
            let place = conf.master_config().master_netlink(host, &inside);
            let wanted = plan.resolve_link(conf, (place, host), &req.ifname)?;
            child::create_link(place, &inside, &wanted, up)
        })
    }

    fn del(cx: &CallContext<'_>, _: &MacvlanConfig, req: &DelRequest) -> Result<()> {
        req.delete_link(cx, KIND)
    }

    fn gc(cx: &CallContext<'_>, _: &MacvlanConfig, _: &GcRequest) -> Result<()> {
        // The interface vanishes with the container; addresses are the IPAM plugin's.
        cx.if_ipam(CallContext::ipam_gc)
    }

    fn status(cx: &CallContext<'_>, conf: &MacvlanConfig) -> Result<()> {
        Self::require_sound(cx, conf)?;
        let host = cx.usable_host_netlink()?;
        conf.master_config().require_present(host)?;
        child::require_driver(&|link| LinkKind::Macvlan {
            link,
            mode: MacvlanMode::Bridge,
            bc_queue_len: 0,
        })
        .or_unavailable()?;
        cx.if_ipam(CallContext::ipam_status)
    }
}

#[derive(Debug)]
struct MacvlanPlan {
    mode: MacvlanMode,
    mac: Option<MacAddress>,
}

impl MacvlanPlan {
    fn from_config(conf: &MacvlanConfig, from_args: &str) -> Result<MacvlanPlan> {
        let name = if conf.mode.is_empty() { "bridge" } else { &conf.mode };
        let mode = MacvlanMode::parse(name).ok_or_else(|| {
            Error::config(format!("unknown macvlan mode: \"{name}\""))
                .with_details("known are \"bridge\", \"private\", \"vepa\" and \"passthru\"")
        })?;
        let mac = child::requested_mac(&[&conf.runtime_config.mac, from_args, &conf.mac])?;
        Ok(MacvlanPlan { mode, mac })
    }

    /// The link on top of its master; `place` is the socket of the master's namespace.
    fn resolve_link<'a>(
        &self,
        conf: &MacvlanConfig,
        (place, host): (&Netlink, &Netlink),
        ifname: &'a InterfaceName,
    ) -> Result<NewChildLink<'a>> {
        let (master, mtu) = conf.master_config().resolve_master(place, host)?;
        let (link, mode, bc_queue_len) = (master.index, self.mode, conf.bcqueuelen);
        let kind = LinkKind::Macvlan { link, mode, bc_queue_len };
        Ok(NewChildLink { ifname, kind, mtu, mac: self.mac })
    }

    /// CHECK: fails unless the link has the configured mode and queue length.
    fn verify_link(&self, conf: &MacvlanConfig, link: &Link) -> Result<()> {
        let info = link.macvlan.unwrap_or_default();
        let differs = |what: &str, found: &str, wanted: &str| {
            let msg = format!("container macvlan {what} {found} does not match expected value");
            Err(Error::internal(format!("{msg}: {wanted}")))
        };
        if info.mode != Some(self.mode) {
            let found = info.mode.map_or("unknown", MacvlanMode::as_str);
            return differs("mode", found, self.mode.as_str());
        }
        let (found, wanted) = (info.bc_queue_len, conf.bcqueuelen);
        // Kernels before 5.11 do not report the length.
        if wanted > 0 && found > 0 && found != wanted {
            return differs("bcqueuelen", &found.to_string(), &wanted.to_string());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni::error::ErrorCode;

    fn plan(conf: &MacvlanConfig, from_args: &str) -> Result<MacvlanPlan> {
        MacvlanPlan::from_config(conf, from_args)
    }

    #[test]
    fn mac_comes_from_the_capability_then_args_then_the_key() {
        let conf = |mac: &str, runtime: &str| MacvlanConfig {
            mac: mac.to_owned(),
            runtime_config: MacConfig { mac: runtime.to_owned() },
            ..MacvlanConfig::default()
        };
        let [one, two, three] = ["02:00:00:00:00:01", "02:00:00:00:00:02", "02:00:00:00:00:03"];
        for (conf, args, expected) in
            [(conf(one, two), three, two), (conf(one, ""), three, three), (conf(one, ""), "", one)]
        {
            assert_eq!(plan(&conf, args).unwrap().mac, Some(expected.parse().unwrap()));
        }
        assert_eq!(plan(&conf("", ""), "").unwrap().mac, None);
    }

    #[test]
    fn modes_and_addresses_are_checked() {
        let conf = MacvlanConfig { mode: "source".to_owned(), ..MacvlanConfig::default() };
        assert_eq!(plan(&conf, "").unwrap_err().message(), "unknown macvlan mode: \"source\"");
        assert_eq!(plan(&MacvlanConfig::default(), "").unwrap().mode, MacvlanMode::Bridge);
        for (mac, why) in [
            ("x", "address x: invalid MAC address"),
            (
                "01:00:5e:00:00:01",
                "address 01:00:5e:00:00:01: not a unicast address, but multicast",
            ),
            ("00:00:00:00:00:00", "address 00:00:00:00:00:00: not a unicast address"),
        ] {
            let error = plan(&MacvlanConfig::default(), mac).unwrap_err();
            assert_eq!(error.message(), format!("invalid args {mac} for MAC addr: {why}"));
            assert_eq!(error.code(), ErrorCode::INVALID_CONFIG);
        }
    }
}
