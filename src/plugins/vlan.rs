//! vlan: the frames of one VLAN (802.1Q) of a link, its master, as an interface of the container.
//!
//! Keys: `master`, `vlanId`, both required, `mtu`, `linkInContainer` (the master is in the
//! container), and `ipam`, which is required.
//!
//! On the host it leaves nothing: the interface is created in the container, and vanishes with it.
//! While the link exists, no other link can have that VLAN of that master.

use serde::Deserialize;

use crate::cni::CniResult;
use crate::error::{Context, Error, Result};
use crate::iface::Inside;
use crate::iface::child::{self, Below, Wanted};
use crate::iface::mtu::Mtu;
use crate::netlink::{Link, LinkKind, Netlink};
use crate::repairs::Repairs;
use crate::skel::{AddReq, CheckReq, Cx, DelReq, GcReq, Plugin, Remarks};

const KIND: &str = "vlan";

pub struct Vlan;

/// The keys of a VLAN network.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Conf {
    /// The link below.
    master: String,
    /// The VLAN ID, 0 to 4094; 0 is for frames that have a priority only.
    vlan_id: Option<i64>,
    /// MTU in bytes, at most that of the master. Default: the master's.
    mtu: i64,
    /// Look for the master in the container.
    link_in_container: bool,
}

impl Plugin for Vlan {
    const NAME: &'static str = KIND;
    const ABOUT: &'static str = "one VLAN of a link of the host";
    const REPAIRS: bool = true;
    type Conf = Conf;

    fn examine(_: &Cx<'_>, conf: &Conf, _: &mut Remarks) -> Result<()> {
        conf.require_master()?;
        conf.id().map(drop)
    }

    fn add(cx: &Cx<'_>, conf: &Conf, req: &AddReq) -> Result<CniResult> {
        // Fails before anything is created.
        cx.ipam()?;
        let (inside, host) = (Inside::enter(req.sandbox.netns()?)?, cx.host()?);
        let place = conf.below().place(host, &inside);
        let (master, mtu) = conf.usable_master(place, host)?;
        let id = conf.id()?;
        let kind = LinkKind::Vlan { link: master.index, id };
        let wanted = Wanted { ifname: &req.ifname, kind, mtu, mac: None };
        req.attach_link(cx, &inside, place, &wanted, None).map(|(result, _)| result)
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        let id = conf.id()?;
        let inside = Inside::enter(req.sandbox.netns()?)?;
        cx.ipam_check()?;
        let found = req.find_link(&inside, KIND)?;
        if found.link.vlan != Some(id) {
            let (name, other) = (&found.link.name, found.link.vlan.unwrap_or_default());
            let msg = format!("interface \"{name}\" is of VLAN {other}, configured is {id}");
            return Err(Error::internal(msg));
        }
        conf.below().verify(cx.host()?, &inside, &found.link)?;
        child::verify_mtu(&found.link, u32::try_from(conf.mtu).unwrap_or_default())?;
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
        // A master in the container cannot be checked, because the container is not known yet.
        if !conf.link_in_container {
            conf.usable_master(host, host).or_unavailable()?;
        }
        let id = conf.id()?;
        child::require_driver(&|link| LinkKind::Vlan { link, id }).or_unavailable()?;
        cx.ipam_status()
    }
}

impl Conf {
    fn require_master(&self) -> Result<()> {
        if self.master.is_empty() {
            let msg = "\"master\" field is required. It specifies the host interface name to create the VLAN for";
            return Err(Error::config(msg));
        }
        Ok(())
    }

    /// The VLAN ID.
    fn id(&self) -> Result<u16> {
        let id = self.vlan_id.ok_or_else(|| {
            Error::config("\"vlanId\" field is required")
                .with_details("0 is the VLAN of frames that have a priority but no number")
        })?;
        u16::try_from(id).ok().filter(|id| *id <= 4094).ok_or_else(|| {
            Error::config(format!("invalid VLAN ID {id} (must be between 0 and 4094 inclusive)"))
        })
    }

    fn below(&self) -> Below<'_> {
        Below {
            name: &self.master,
            in_container: self.link_in_container,
            mtu: Mtu::Bytes(self.mtu),
        }
    }

    /// The master, which has to be up before the VLAN can be set up, and the MTU of the VLAN.
    fn usable_master(&self, place: &Netlink, host: &Netlink) -> Result<(Link, u32)> {
        self.require_master()?;
        let (master, mtu) = self.below().master(place, host)?;
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
        Conf { vlan_id, ..Conf::default() }.id()
    }

    #[test]
    fn a_vlan_has_a_master_and_a_number() {
        assert_eq!(id(Some(0)).unwrap(), 0);
        assert_eq!(id(Some(4094)).unwrap(), 4094);
        for wrong in [-1, 4095, 65536, i64::MAX] {
            let expected =
                format!("invalid VLAN ID {wrong} (must be between 0 and 4094 inclusive)");
            assert_eq!(id(Some(wrong)).unwrap_err().msg(), expected);
        }
        assert_eq!(id(None).unwrap_err().msg(), "\"vlanId\" field is required");
        let error = Conf::default().require_master().unwrap_err();
        assert!(error.msg().starts_with("\"master\" field is required."));
    }
}
