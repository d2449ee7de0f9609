//! The identity of a device: what tells it from every other link, in any namespace.
//!
//! In a network namespace names, aliases, addresses and indexes are chosen freely, and links of most
//! kinds are made freely. What hardware a link belongs to, the address that the hardware came with,
//! the kind of a link, and at which link of which namespace its other end is, only the kernel
//! decides.

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::iface::{Inside, peer};
use crate::netlink::{Link, Netlink};

/// Virtual links whose packets pass through another link, which [`Link::link`] tells.
/// Tunnels tell one as well, but the namespace's owner sets their far end.
const ON_A_LINK: [&str; 8] =
    ["veth", "vxcan", "netkit", "macvlan", "macvtap", "ipvlan", "ipvtap", "vlan"];

/// What a network namespace cannot change of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Identity {
    /// What kind of link it is; empty for hardware.
    kind: String,
    /// The bus that the hardware is on, and its name there; kernels before 5.14 do not tell.
    bus: String,
    parent: String,
    /// The address that it came with; virtual links have none.
    permanent_mac: String,
    /// The number of a VLAN.
    vlan: Option<u16>,
    /// The other end of a pair, or the device below, and its namespace as the host calls it.
    link: Option<u32>,
    link_netnsid: Option<i32>,
}

impl Identity {
    /// The identity of a device on the host.
    pub(super) fn of(device: &Link) -> Identity {
        let parent = device.parent.clone().unwrap_or_default();
        Identity {
            kind: device.kind.clone().unwrap_or_default(),
            bus: parent.bus,
            parent: parent.name,
            permanent_mac: permanent_mac(device),
            vlan: device.vlan,
            link: device.link,
            link_netnsid: device.link_netnsid,
        }
    }

    /// Whether it tells the device from all that a container can make.
    pub(super) fn is_certain(&self) -> bool {
        self.is_hardware() || self.is_on_a_link() || self.is_dummy()
    }

    /// Whether a link is of the same kind, which is not to say that it is the device.
    pub(super) fn is_of_the_kind_of(&self, link: &Link) -> bool {
        self.kind == link.kind.as_deref().unwrap_or_default()
    }

    /// Only hardware has a place on a bus, or came with an address. Kernels before 5.6 tell neither.
    fn is_hardware(&self) -> bool {
        !self.parent.is_empty() || !self.permanent_mac.is_empty()
    }

    fn is_on_a_link(&self) -> bool {
        self.link.is_some() && ON_A_LINK.contains(&self.kind.as_str())
    }

    /// Nothing passes through a dummy: each is as good as the other.
    fn is_dummy(&self) -> bool {
        self.kind == "dummy"
    }

    /// Whether a link may be the device, by itself. An address that came with the hardware counts
    /// where nothing else does: some drivers change it.
    fn fits(&self, link: &Link) -> bool {
        let other = Identity::of(link);
        let same_hardware = self.bus == other.bus && self.parent == other.parent;
        let same_mac = !self.parent.is_empty() || self.permanent_mac == other.permanent_mac;
        let same_link =
            !self.is_on_a_link() || (self.link == other.link && self.vlan == other.vlan);
        self.is_certain() && self.kind == other.kind && same_hardware && same_mac && same_link
    }

    /// The device among the links of the host.
    pub(super) fn on_host<'l>(&self, links: &'l [Link], ifname: &str) -> Option<&'l Link> {
        let there = |link: &Link| !self.is_on_a_link() || self.link_netnsid == link.link_netnsid;
        self.only(links.iter().filter(|link| self.fits(link) && there(link)).collect(), ifname)
    }

    /// The device among the links of a container.
    pub(super) fn in_container<'l>(
        &self,
        host: &Netlink,
        inside: &Inside<'_>,
        links: &'l [Link],
        ifname: &str,
    ) -> Result<Option<&'l Link>> {
        let mut found = Vec::new();
        for link in links.iter().filter(|link| self.fits(link)) {
            let (outer, inner) = (self.link_netnsid, link.link_netnsid);
            if !self.is_on_a_link() || peer::is_same_netns(host, inside, outer, inner)? {
                found.push(link);
            }
        }
        Ok(self.only(found, ifname))
    }

    /// Chooses among several candidates: of the same hardware, on the same lower link, or dummies. None where
    /// the kernel does not tell the hardware.
    fn only<'l>(&self, mut found: Vec<&'l Link>, ifname: &str) -> Option<&'l Link> {
        if found.len() > 1 {
            let same: Vec<_> =
                found.iter().copied().filter(|l| permanent_mac(l) == self.permanent_mac).collect();
            found = if same.is_empty() { found } else { same };
        }
        let named = found.iter().find(|link| link.name == ifname);
        let one_of_a_kind = found.len() == 1 || !self.parent.is_empty() || !self.kind.is_empty();
        named.or(found.first()).copied().filter(|_| one_of_a_kind)
    }
}

fn permanent_mac(link: &Link) -> String {
    link.permanent_mac.map(|mac| mac.to_string()).unwrap_or_default()
}

/// Whether a link in a container was surely on the host once: the container can make no such one.
pub(super) fn came_from_host(host: &Netlink, inside: &Inside<'_>, link: &Link) -> Result<bool> {
    let identity = Identity::of(link);
    if identity.is_on_a_link() {
        return peer::is_on_host(host, inside, link);
    }
    Ok(identity.is_certain())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::{Mac, Parent};

    fn card(name: &str, function: u8, mac: u8) -> Link {
        let parent = (function > 0)
            .then(|| Parent { bus: "pci".into(), name: format!("0000:00:0{function}.0") });
        let permanent_mac = (mac > 0).then_some(Mac([2, 0, 0, 0, 0, mac]));
        Link { name: name.into(), parent, permanent_mac, ..Link::default() }
    }

    fn made(name: &str, kind: &str, link: u32) -> Link {
        Link {
            name: name.into(),
            kind: Some(kind.into()),
            link: Some(link).filter(|link| *link > 0),
            ..Link::default()
        }
    }

    fn found<'l>(device: &Link, links: &'l [Link]) -> Option<&'l str> {
        Identity::of(device).on_host(links, "eth0").map(|link| link.name.as_str())
    }

    #[test]
    fn hardware_is_known_by_its_place_and_then_by_its_address() {
        let device = card("ens1", 1, 1);
        let veth = made("eth0", "veth", 2);
        assert_eq!(found(&device, &[veth.clone(), card("eth0", 2, 1), card("x", 1, 1)]), Some("x"));
        assert_eq!(found(&device, &[card("x", 1, 9)]), Some("x"), "a driver has changed it");
        assert_eq!(found(&device, &[card("eth0", 1, 2), card("x", 1, 1)]), Some("x"), "two ports");
        assert_eq!(found(&device, &[veth.clone(), card("eth0", 0, 1)]), None);
        // A kernel that does not tell the place.
        let old = card("ens1", 0, 1);
        assert_eq!(found(&old, &[card("eth0", 0, 2), card("x", 0, 1)]), Some("x"));
        assert_eq!(found(&old, &[card("eth0", 0, 2)]), None);
        assert_eq!(found(&old, &[card("eth0", 0, 1), card("x", 0, 1)]), None);
        // What some protocols make has no kind either.
        assert_eq!(found(&card("ens1", 0, 0), &[card("eth0", 0, 0), veth]), None);
    }

    #[test]
    fn virtual_links_are_known_by_what_is_behind_them() {
        let veth = made("hd0", "veth", 7);
        assert_eq!(found(&veth, &[made("eth0", "veth", 8), made("x", "veth", 7)]), Some("x"));
        let elsewhere = Link { link_netnsid: Some(0), ..made("eth0", "veth", 7) };
        assert_eq!(found(&veth, &[elsewhere, made("y", "macvlan", 7)]), None);
        let vlan = |name: &str, id| Link { vlan: Some(id), ..made(name, "vlan", 7) };
        assert_eq!(found(&vlan("v", 5), &[vlan("eth0", 6), vlan("x", 5)]), Some("x"));
        assert_eq!(found(&made("d", "dummy", 0), &[made("x", "dummy", 0)]), Some("x"));
        for kind in ["tun", "vxlan", "wireguard", "bridge"] {
            assert_eq!(found(&made("t", kind, 7), &[made("eth0", kind, 7)]), None, "{kind}");
        }
    }
}
