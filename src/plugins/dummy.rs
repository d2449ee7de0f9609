//! dummy: a device that goes nowhere, to carry addresses that the container is to have.
//!
//! Keys: `mtu`, `mac`, which the capability `mac` overrides, and `ipam`, which is required.
//!
//! On the host it leaves nothing: the device is made in the container, and vanishes with it.

use serde::Deserialize;

use crate::cni::CniResult;
use crate::error::{Context, Error, Result};
use crate::iface::configure::{self, Connected, Style};
use crate::iface::mtu;
use crate::iface::{Inside, child, driver, veth};
use crate::netlink::{Dad, Link, LinkKind, Mac, NewLink};
use crate::skel::{AddReq, CheckReq, Cx, DelReq, GcReq, Plugin, Remarks, Rollback};

const KIND: &str = "dummy";

#[derive(Debug)]
pub struct Dummy;

/// The keys of a dummy network.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Conf {
    /// MTU in bytes. Default: the kernel's.
    mtu: i64,
    /// MAC of the device. Default: the kernel chooses.
    mac: String,
    /// `runtimeConfig.mac` (capability `mac`): the same; wins.
    runtime_config: RuntimeConfig,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RuntimeConfig {
    mac: String,
}

impl Plugin for Dummy {
    const NAME: &'static str = KIND;
    const ABOUT: &'static str = "device that only carries addresses";
    type Conf = Conf;

    fn examine(cx: &Cx<'_>, conf: &Conf, _: &mut Remarks) -> Result<()> {
        Plan::resolve(cx, conf).map(drop)
    }

    fn add(cx: &Cx<'_>, conf: &Conf, req: &AddReq) -> Result<CniResult> {
        let plan = Plan::resolve(cx, conf)?;
        let inside = Inside::enter(req.sandbox.netns()?)?;
        let mut undo = Rollback::new();

        // Before IPAM, so that an attachment that is there already keeps its address.
        let link = plan.create(&inside, req)?;
        undo.push(format!("delete \"{}\"", link.name), || child::take_back(&inside, &req.ifname));
        let mut result = cx.ipam_add(&mut undo)?;
        result.assign_to_first();
        result.interfaces = vec![veth::interface(&link, &req.sandbox.path)];
        inside.set(&configure::settings(&result, &link.name))?;
        // A dummy has no neighbours: duplicate address detection makes no sense.
        let style = Style { dad: Dad::Off, connected: Connected::Route };
        configure::addresses_and_up(&inside, &link, &result, style)?;
        configure::add_routes(&inside, &link, &result)?;
        cx.finish(&mut result);
        undo.commit();
        Ok(result)
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        let plan = Plan::resolve(cx, conf)?;
        let inside = Inside::enter(req.sandbox.netns()?)?;
        cx.ipam_check()?;
        let found = req.find_link(&inside, KIND)?;
        child::verify_mtu(&found.link, plan.mtu)?;
        found.verify_layer3(&inside)
    }

    fn del(cx: &Cx<'_>, _: &Conf, req: &DelReq) -> Result<()> {
        req.del_link(cx, KIND)
    }

    fn gc(cx: &Cx<'_>, _: &Conf, _: &GcReq) -> Result<()> {
        // The device vanishes with the container; addresses are the IPAM plugin's.
        cx.if_ipam(Cx::ipam_gc)
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        Self::require_sound(cx, conf)?;
        cx.usable_host()?;
        driver::require(|_| LinkKind::Dummy).or_unavailable()?;
        cx.ipam_status()
    }
}

/// The validated configuration.
#[derive(Debug)]
struct Plan {
    mtu: u32,
    mac: Option<Mac>,
}

impl Plan {
    fn resolve(cx: &Cx<'_>, conf: &Conf) -> Result<Plan> {
        if !cx.has_ipam() {
            let msg = "dummy interface requires an IPAM configuration";
            return Err(
                Error::config(msg).with_details("add \"ipam\", for instance of type \"static\"")
            );
        }
        let mtu = mtu::bytes(conf.mtu)?;
        let sources = [&conf.runtime_config.mac, &conf.mac];
        let text = sources.into_iter().find(|text| !text.is_empty());
        let parse = |text: &String| text.parse::<Mac>().map_err(|e| Error::config(e.to_string()));
        Ok(Plan { mtu, mac: text.map(parse).transpose()? })
    }

    fn create(&self, inside: &Inside<'_>, req: &AddReq) -> Result<Link> {
        let link = NewLink::new(req.ifname.as_str(), LinkKind::Dummy).mtu(self.mtu).mac(self.mac);
        let created = inside.netlink.create_link(&link).inspect_err(|error| {
            if error.is_unanswered() {
                // It may have been made.
                drop(child::del(inside.netns, &req.ifname, KIND, None));
            }
        });
        created.context(|| "failed to create dummy")
    }
}
