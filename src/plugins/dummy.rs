//! dummy: a device that drops all packets, to carry addresses of the container.
//!
//! Keys: `mtu`, `mac`, which the capability `mac` overrides, and `ipam`, which is required.
//!
//! On the host it leaves nothing: the device is created in the container, and vanishes with it.

use serde::Deserialize;

use crate::cni::CniResult;
use crate::error::{Context, Error, Result};
use crate::iface::child::{self, WithMac};
use crate::iface::configure::{self, Style};
use crate::iface::{Inside, mtu, veth};
use crate::netlink::{LinkKind, Mac, NewLink};
use crate::skel::{AddReq, CheckReq, Cx, DelReq, GcReq, Plugin, Remarks, Rollback};

const KIND: &str = "dummy";

pub struct Dummy;

/// The keys of a dummy network.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Conf {
    /// MTU in bytes. Default: the kernel's.
    mtu: i64,
    /// MAC of the device. Default: the kernel chooses.
    mac: String,
    /// `runtimeConfig.mac` (capability `mac`): the same; has precedence.
    runtime_config: WithMac,
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

        // Created before IPAM is called, so that an attachment that exists already keeps its address.
        let new = NewLink::new(req.ifname.as_str(), LinkKind::Dummy).mtu(plan.mtu).mac(plan.mac);
        let created = inside.netlink.create_link(&new).inspect_err(|error| {
            if error.is_unanswered() {
                // The link may exist.
                drop(child::del(inside.netns, &req.ifname, KIND, None));
            }
        });
        let link = created.context(|| "failed to create dummy")?;
        undo.push(format!("delete \"{}\"", link.name), || child::take_back(&inside, &req.ifname));
        let mut result = cx.ipam_add(&mut undo)?;
        result.assign_to_first();
        result.interfaces = vec![veth::interface(&link, &req.sandbox.path)];
        // A dummy has no neighbours: duplicate address detection makes no sense.
        configure::layer3(&inside, &link, &result, Style::Immediate, &[])?;
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
        child::require_driver(&|_| LinkKind::Dummy).or_unavailable()?;
        cx.ipam_status()
    }
}

/// The validated configuration.
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
        Ok(Plan { mtu, mac: text.map(|text| Mac::of_interface(text)).transpose()? })
    }
}
