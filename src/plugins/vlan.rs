//! vlan: the frames of one VLAN (802.1Q) of a link, its master, as an interface of the container.
//!
//! Keys: `master`, `vlanId`, both required, `mtu`, `linkInContainer` (the master is in the
//! container), and `ipam`, which is required.
//!
//! There is no state on the host: the interface is created in the container, and vanishes with it.
//! While the link exists, no other link can have that VLAN of that master.

use serde::Deserialize;

use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, GcRequest, LinkAddresses,
    Plugin,
};
use crate::iface::ContainerNetns;
use crate::iface::child::{self, MasterConfig, NewChildLink};
use crate::iface::mtu::MtuConfig;
use crate::netlink::{Link, LinkKind, Netlink};
use crate::repairs::RepairFindings;
use cni::CniResult;
use cni::error::{Error, ErrorContext, Result};

const KIND: &str = "vlan";

pub struct Vlan;

/// The keys of a VLAN network.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VlanConfig {
    /// The link below.
    master: String,
    /// The VLAN ID, 0 to 4094; 0 is for frames that have a priority only.
    vlan_id: Option<i64>,
    /// MTU in bytes, at most that of the master. Default: the master's.
    mtu: i64,
    /// Look for the master in the container.
    link_in_container: bool,
    /// Whether the default routes of `ipam` are the container's. Default: true.
    default_route: Option<bool>,
    /// Whether router advertisements give the interface addresses and routes, if it has IPv6
    /// addresses of `ipam`. Default: as the kernel decides.
    #[serde(rename = "acceptRA")]
    accept_ra: Option<bool>,
}

impl Plugin for Vlan {
    const NAME: &'static str = KIND;
    const ABOUT: &'static str = "one VLAN of a link of the host";
    const REPAIRS: bool = true;
    type Conf = VlanConfig;

    fn examine(_: &CallContext<'_>, conf: &VlanConfig, _: &mut ConfigRemarks) -> Result<()> {
        conf.require_master()?;
        conf.parse_vlan_id().map(drop)
    }

    fn add(cx: &CallContext<'_>, conf: &VlanConfig, req: &AddRequest) -> Result<CniResult> {
        // Fails before anything is created.
        cx.ipam_plugin()?;
        let (inside, host) = (
            ContainerNetns::open_in(req.sandbox.open_netns()?)?.with_accept_ra(conf.accept_ra),
            cx.host_netlink()?,
        );
        let place = conf.master_config().master_netlink(host, &inside);
        let (master, mtu) = conf.find_usable_master(place, host)?;
        let id = conf.parse_vlan_id()?;
        let kind = LinkKind::Vlan { link: master.index, id };
        let wanted = NewChildLink { ifname: &req.ifname, kind, mtu, mac: None };
        let addresses = LinkAddresses { given: None, default_route: conf.default_route };
        req.attach_link(cx, &inside, place, &wanted, addresses).map(|(result, _)| result)
    }

    fn check(cx: &CallContext<'_>, conf: &VlanConfig, req: &CheckRequest) -> Result<()> {
        let id = conf.parse_vlan_id()?;
        let inside = ContainerNetns::open_in(req.sandbox.open_netns()?)?;
        cx.ipam_check()?;
        let found = req.find_link(&inside, KIND)?;
        if found.link.vlan != Some(id) {
            let (name, other) = (&found.link.name, found.link.vlan.unwrap_or_default());
            let msg = format!("interface \"{name}\" is of VLAN {other}, configured is {id}");
            return Err(Error::internal(msg));
        }
        conf.master_config().verify_master(cx.host_netlink()?, &inside, &found.link)?;
        child::verify_mtu(&found.link, u32::try_from(conf.mtu).unwrap_or_default())?;
        found.verify_layer3(&inside)
    }

    fn repair(
        cx: &CallContext<'_>,
        conf: &VlanConfig,
        req: &CheckRequest,
        repairs: &mut RepairFindings,
    ) -> Result<()> {
        let (inside, host) = (
            ContainerNetns::open_in(req.sandbox.open_netns()?)?.with_accept_ra(conf.accept_ra),
            cx.host_netlink()?,
        );
        req.restore_link(&inside, KIND, repairs, &|_, up| {
            let place = conf.master_config().master_netlink(host, &inside);
            let (master, mtu) = conf.find_usable_master(place, host)?;
            let kind = LinkKind::Vlan { link: master.index, id: conf.parse_vlan_id()? };
            let wanted = NewChildLink { ifname: &req.ifname, kind, mtu, mac: None };
            child::create_link(place, &inside, &wanted, up)
        })
    }

    fn del(cx: &CallContext<'_>, _: &VlanConfig, req: &DelRequest) -> Result<()> {
        req.delete_link(cx, KIND)
    }

    fn gc(cx: &CallContext<'_>, _: &VlanConfig, _: &GcRequest) -> Result<()> {
        // The interface vanishes with the container; addresses are the IPAM plugin's.
        cx.if_ipam(CallContext::ipam_gc)
    }

    fn status(cx: &CallContext<'_>, conf: &VlanConfig) -> Result<()> {
        Self::require_sound(cx, conf)?;
        let host = cx.usable_host_netlink()?;
        // A master in the container cannot be checked, because the container is not known yet.
        if !conf.link_in_container {
            conf.find_usable_master(host, host).or_unavailable()?;
        }
        let id = conf.parse_vlan_id()?;
        child::require_driver(&|link| LinkKind::Vlan { link, id }).or_unavailable()?;
        cx.ipam_status()
    }
}

impl VlanConfig {
    fn require_master(&self) -> Result<()> {
        if self.master.is_empty() {
            let msg = "\"master\" field is required. It specifies the host interface name to \
                       create the VLAN for";
            return Err(Error::config(msg));
        }
        Ok(())
    }

    fn parse_vlan_id(&self) -> Result<u16> {
        let id = self.vlan_id.ok_or_else(|| {
            Error::config("\"vlanId\" field is required")
                .with_details("0 is the VLAN of frames that have a priority but no number")
        })?;
        u16::try_from(id).ok().filter(|id| *id <= 4094).ok_or_else(|| {
            Error::config(format!("invalid VLAN ID {id} (must be between 0 and 4094 inclusive)"))
        })
    }

    fn master_config(&self) -> MasterConfig<'_> {
        MasterConfig {
            name: &self.master,
            in_container: self.link_in_container,
            mtu: MtuConfig::Bytes(self.mtu),
        }
    }

    /// The master, which has to be up before the VLAN can be set up, and the MTU of the VLAN.
    fn find_usable_master(&self, place: &Netlink, host: &Netlink) -> Result<(Link, u32)> {
        self.require_master()?;
        let (master, mtu) = self.master_config().resolve_master(place, host)?;
        if master.up {
            return Ok((master, mtu));
        }
        Err(Error::internal(format!("master \"{}\" is down: network is down", self.master))
            .with_details(format!("ip link set {} up", self.master)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(vlan_id: Option<i64>) -> Result<u16> {
        VlanConfig { vlan_id, ..VlanConfig::default() }.parse_vlan_id()
    }

    #[test]
    fn master_and_vlan_id_are_required() {
        assert_eq!(id(Some(0)).unwrap(), 0);
        assert_eq!(id(Some(4094)).unwrap(), 4094);
        for wrong in [-1, 4095, 65536, i64::MAX] {
            let expected =
                format!("invalid VLAN ID {wrong} (must be between 0 and 4094 inclusive)");
            assert_eq!(id(Some(wrong)).unwrap_err().message(), expected);
        }
        assert_eq!(id(None).unwrap_err().message(), "\"vlanId\" field is required");
        let error = VlanConfig::default().require_master().unwrap_err();
        assert!(error.message().starts_with("\"master\" field is required."));
    }
}
