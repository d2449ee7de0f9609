//! macvlan: an interface with an Ethernet address of its own on top of a link, its master.
//!
//! Keys: `master` (default: the link of the default route), `mode` (`bridge`, `private`, `vepa`,
//! `passthru`), `mtu`, `mac`, `bcqueuelen`, `linkInContainer` (the master is in the container);
//! `CNI_ARGS` `MAC` and the capability `mac` have precedence over `mac`. `ipam` is optional: without it the
//! interface is layer 2.
//!
//! On the host it leaves nothing: the interface is created in the container, and vanishes with it.

use serde::Deserialize;

use crate::cni::CniResult;
use crate::error::{Context, Error, Result};
use crate::iface::Inside;
use crate::iface::child::{self, Below, Wanted, WithMac};
use crate::iface::mtu::Mtu;
use crate::log;
use crate::netlink::{Link, LinkKind, Mac, MacvlanMode};
use crate::repairs::Repairs;
use crate::skel::{AddReq, CheckReq, Cx, DelReq, GcReq, Plugin, Remarks};

const KIND: &str = "macvlan";

pub struct Macvlan;

/// The keys of a macvlan network.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Conf {
    /// The link below. Default: the link of the default route.
    master: String,
    /// Traffic between the interfaces on a master: `bridge` (default), `private`, `vepa`, `passthru`.
    mode: String,
    /// MTU in bytes, at most that of the master, or `"auto"`. Default: the master's.
    mtu: Mtu,
    /// MAC of the interface. Default: the kernel chooses.
    mac: String,
    /// Look for the master in the container.
    link_in_container: bool,
    /// The length of the queue of received broadcasts. Default: the kernel's.
    bcqueuelen: u32,
    /// `runtimeConfig.mac` (capability `mac`): MAC of the interface; has precedence over the others.
    runtime_config: WithMac,
}

impl Conf {
    fn below(&self) -> Below<'_> {
        Below { name: &self.master, in_container: self.link_in_container, mtu: self.mtu }
    }
}

impl Plugin for Macvlan {
    const NAME: &'static str = KIND;
    const ABOUT: &'static str = "interface with a MAC of its own on a link of the host";
    const UNDO_IF_UNREPRESENTABLE: bool = false;
    const REPAIRS: bool = true;
    type Conf = Conf;

    fn examine(_: &Cx<'_>, conf: &Conf, _: &mut Remarks) -> Result<()> {
        Plan::resolve(conf, "").map(drop)
    }

    fn add(cx: &Cx<'_>, conf: &Conf, req: &AddReq) -> Result<CniResult> {
        let plan = Plan::resolve(conf, &cx.mac_arg()?)?;
        let (inside, host) = (Inside::enter(req.sandbox.netns()?)?, cx.host()?);
        let place = conf.below().place(host, &inside);
        let (master, mtu) = conf.below().master(place, host)?;
        let kind = LinkKind::Macvlan {
            link: master.index,
            mode: plan.mode,
            bc_queue_len: conf.bcqueuelen,
        };
        let wanted = Wanted { ifname: &req.ifname, kind, mtu, mac: plan.mac };
        let without_ipam = (!cx.has_ipam()).then(CniResult::new);
        let (result, link) = req.attach_link(cx, &inside, place, &wanted, without_ipam)?;
        if let Some(mac) = plan.mac.filter(|mac| link.mac != Some(*mac)) {
            log::warn(format_args!("mode \"passthru\" keeps the master's MAC: {mac} is not used"));
        }
        Ok(result)
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        let plan = Plan::resolve(conf, &cx.mac_arg()?)?;
        let inside = Inside::enter(req.sandbox.netns()?)?;
        cx.if_ipam(Cx::ipam_check)?;
        let found = req.find_link(&inside, KIND)?;
        plan.check(conf, &found.link)?;
        conf.below().verify(cx.host()?, &inside, &found.link)?;
        found.verify_layer3(&inside)
    }

    fn repair(_: &Cx<'_>, _: &Conf, req: &CheckReq, repairs: &mut Repairs) -> Result<()> {
        req.restore_routes(KIND, repairs)
    }

    fn del(cx: &Cx<'_>, _: &Conf, req: &DelReq) -> Result<()> {
        req.del_link(cx, KIND)
    }

    fn gc(cx: &Cx<'_>, _: &Conf, _: &GcReq) -> Result<()> {
        // The interface vanishes with the container; addresses are the IPAM plugin's.
        cx.if_ipam(Cx::ipam_gc)
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        Self::require_sound(cx, conf)?;
        let host = cx.usable_host()?;
        conf.below().status(host)?;
        let kind = |link| LinkKind::Macvlan { link, mode: MacvlanMode::Bridge, bc_queue_len: 0 };
        child::require_driver(&kind).or_unavailable()?;
        cx.if_ipam(Cx::ipam_status)
    }
}

/// The validated configuration.
#[derive(Debug)]
struct Plan {
    mode: MacvlanMode,
    mac: Option<Mac>,
}

impl Plan {
    fn resolve(conf: &Conf, from_args: &str) -> Result<Plan> {
        let name = if conf.mode.is_empty() { "bridge" } else { &conf.mode };
        let mode = MacvlanMode::parse(name).ok_or_else(|| {
            Error::config(format!("unknown macvlan mode: \"{name}\""))
                .with_details("known are \"bridge\", \"private\", \"vepa\" and \"passthru\"")
        })?;
        let mac = child::requested_mac(&[&conf.runtime_config.mac, from_args, &conf.mac])?;
        Ok(Plan { mode, mac })
    }

    /// CHECK: fails unless the link has the configured mode and queue length.
    fn check(&self, conf: &Conf, link: &Link) -> Result<()> {
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
    use crate::error::Code;

    fn plan(conf: &Conf, from_args: &str) -> Result<Plan> {
        Plan::resolve(conf, from_args)
    }

    #[test]
    fn the_capability_wins_over_cni_args_and_those_over_the_key() {
        let conf = |mac: &str, runtime: &str| Conf {
            mac: mac.to_owned(),
            runtime_config: WithMac { mac: runtime.to_owned() },
            ..Conf::default()
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
        let conf = Conf { mode: "source".to_owned(), ..Conf::default() };
        assert_eq!(plan(&conf, "").unwrap_err().msg(), "unknown macvlan mode: \"source\"");
        assert_eq!(plan(&Conf::default(), "").unwrap().mode, MacvlanMode::Bridge);
        for (mac, why) in [
            ("x", "address x: invalid MAC address"),
            (
                "01:00:5e:00:00:01",
                "address 01:00:5e:00:00:01: not a unicast address, but multicast",
            ),
            ("00:00:00:00:00:00", "address 00:00:00:00:00:00: not a unicast address"),
        ] {
            let error = plan(&Conf::default(), mac).unwrap_err();
            assert_eq!(error.msg(), format!("invalid args {mac} for MAC addr: {why}"));
            assert_eq!(error.code(), Code::INVALID_CONFIG);
        }
    }
}
