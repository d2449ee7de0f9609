//! dummy: a device that drops all packets, to carry addresses of the container.
//!
//! Keys: `mtu`, `mac`, which the capability `mac` overrides, and `ipam`, which is required.
//!
//! There is no state on the host: the device is created in the container, and vanishes with it.

use serde::Deserialize;

use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, GcRequest, Plugin, Rollback,
};
use crate::iface::child;
use crate::iface::configure::{self, AddressStyle};
use crate::iface::{ContainerNetns, mtu, veth};
use crate::netlink::{LinkKind, MacAddress, NewLink};
use cni::CniResult;
use cni::config::MacConfig;
use cni::error::{Error, ErrorContext, Result};

const KIND: &str = "dummy";

pub struct Dummy;

/// The keys of a dummy network.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DummyConfig {
    /// MTU in bytes. Default: the kernel's.
    mtu: i64,
    /// MAC of the device. Default: the kernel chooses.
    mac: String,
    /// Whether the default routes of `ipam` are the container's. Default: true.
    default_route: Option<bool>,
    /// Whether router advertisements give the interface addresses and routes, if it has IPv6
    /// addresses of `ipam`. Default: as the kernel decides.
    #[serde(rename = "acceptRA")]
    accept_ra: Option<bool>,
    /// `runtimeConfig.mac` (capability `mac`): the same; has precedence.
    runtime_config: MacConfig,
}

impl Plugin for Dummy {
    const NAME: &'static str = KIND;
    const ABOUT: &'static str = "device that only carries addresses";
    type Conf = DummyConfig;

    fn examine(cx: &CallContext<'_>, conf: &DummyConfig, _: &mut ConfigRemarks) -> Result<()> {
        DummyPlan::from_config(cx, conf).map(drop)
    }

    fn add(cx: &CallContext<'_>, conf: &DummyConfig, req: &AddRequest) -> Result<CniResult> {
        let plan = DummyPlan::from_config(cx, conf)?;
        let inside =
            ContainerNetns::open_in(req.sandbox.open_netns()?)?.with_accept_ra(conf.accept_ra);
        let mut undo = Rollback::new();

        // Created before IPAM is called, so that an attachment that exists already keeps its
        // address.
        let new = NewLink::new(req.ifname.as_str(), LinkKind::Dummy)
            .with_mtu(plan.mtu)
            .with_mac(plan.mac);
        let created = inside.netlink.add_and_read_link(&new).inspect_err(|error| {
            if error.is_unanswered() {
                // The link may exist.
                drop(child::delete_link(inside.netns, &req.ifname, KIND, None));
            }
        });
        let link = created.context(|| "failed to create dummy")?;
        undo.add_step(format!("delete \"{}\"", link.name), || {
            child::roll_back_link(&inside, &req.ifname)
        });
        let mut result = cx.ipam_add(&mut undo, conf.default_route)?;
        result.assign_ips_to_first();
        result.interfaces = vec![veth::interface_entry(&link, &req.sandbox.path)];
        // A dummy has no neighbours, so duplicate address detection is not needed.
        configure::configure_layer3(&inside, &link, &result, AddressStyle::Immediate, &[])?;
        cx.finish_result(&mut result);
        undo.commit();
        Ok(result)
    }

    fn check(cx: &CallContext<'_>, conf: &DummyConfig, req: &CheckRequest) -> Result<()> {
        let plan = DummyPlan::from_config(cx, conf)?;
        let inside = ContainerNetns::open_in(req.sandbox.open_netns()?)?;
        cx.ipam_check()?;
        let found = req.find_link(&inside, KIND)?;
        child::verify_mtu(&found.link, plan.mtu)?;
        found.verify_layer3(&inside)
    }

    fn del(cx: &CallContext<'_>, _: &DummyConfig, req: &DelRequest) -> Result<()> {
        req.delete_link(cx, KIND)
    }

    fn gc(cx: &CallContext<'_>, _: &DummyConfig, _: &GcRequest) -> Result<()> {
        // The device vanishes with the container; addresses are the IPAM plugin's.
        cx.if_ipam(CallContext::ipam_gc)
    }

    fn status(cx: &CallContext<'_>, conf: &DummyConfig) -> Result<()> {
        Self::require_sound(cx, conf)?;
        cx.usable_host_netlink()?;
        child::require_driver(&|_| LinkKind::Dummy).or_unavailable()?;
        cx.ipam_status()
    }
}

struct DummyPlan {
    mtu: u32,
    mac: Option<MacAddress>,
}

impl DummyPlan {
    fn from_config(cx: &CallContext<'_>, conf: &DummyConfig) -> Result<DummyPlan> {
        if !cx.has_ipam() {
            let msg = "dummy interface requires an IPAM configuration";
            return Err(
                Error::config(msg).with_details("add \"ipam\", for instance of type \"static\"")
            );
        }
        let mtu = mtu::bytes_from_config(conf.mtu)?;
        let sources = [&conf.runtime_config.mac, &conf.mac];
        let text = sources.into_iter().find(|text| !text.is_empty());
        Ok(DummyPlan { mtu, mac: text.map(|text| MacAddress::parse_unicast(text)).transpose()? })
    }
}
