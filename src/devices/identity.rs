//! The identity of a device: the attributes that distinguish the device from all other links, in
//! any namespace.
//!
//! The owner of a network namespace chooses names, aliases, addresses and indexes freely, and can
//! create links of most kinds. Only the kernel decides the parent device and the permanent address
//! of hardware, the kind of a link, and the link and namespace of its other end.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::attachment::backup::mac_text;
use crate::iface::{ContainerNetns, peer};
use crate::netlink::{Link, MacAddress, Netlink, ParentDevice};
use cni::error::Result;

/// Kinds of virtual links whose packets pass through another link, [`Link::link`].
/// Tunnels also have a `link`, but the namespace's owner sets their remote end.
const ON_A_LINK: [&str; 8] =
    ["veth", "vxcan", "netkit", "macvlan", "macvtap", "ipvlan", "ipvtap", "vlan"];

/// The kinds of these with two ends, each of which belongs to one other.
const PAIRS: [&str; 3] = ["veth", "vxcan", "netkit"];

/// The attributes of a device that a network namespace cannot change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DeviceIdentity {
    /// `IFLA_INFO_KIND`; empty for hardware.
    kind: String,
    /// The hardware's bus, and its name there; empty before Linux 5.14.
    bus: String,
    parent: String,
    /// `IFLA_PERM_ADDRESS`; virtual links have none.
    #[serde(with = "mac_text")]
    permanent_mac: Option<MacAddress>,
    /// The VLAN ID of a VLAN.
    vlan: Option<u16>,
    /// The other end of a pair, or the lower device, and the host's nsid of its namespace.
    link: Option<u32>,
    link_netnsid: Option<i32>,
}

impl DeviceIdentity {
    /// The identity of a device on the host.
    pub fn from_link(device: &Link) -> DeviceIdentity {
        let ParentDevice { bus, name: parent } = device.parent.clone().unwrap_or_default();
        DeviceIdentity {
            kind: device.kind.clone().unwrap_or_default(),
            bus,
            parent,
            permanent_mac: device.permanent_mac,
            vlan: device.vlan,
            link: device.link,
            link_netnsid: device.link_netnsid,
        }
    }

    /// Whether no link that a container can create has this identity: hardware, a link on another
    /// link, or a dummy, all of which are equivalent. Only hardware has a parent device or a
    /// permanent address; kernels before 5.6 report neither.
    pub fn is_certain(&self) -> bool {
        let is_hardware = !self.parent.is_empty() || self.permanent_mac.is_some();
        is_hardware || self.is_on_link() || self.kind == "dummy"
    }

    /// Whether no other link has this identity, whatever its name: hardware with an address of its
    /// own, or an end of a pair.
    pub fn is_unique(&self) -> bool {
        self.permanent_mac.is_some() || (self.link.is_some() && PAIRS.contains(&self.kind.as_str()))
    }

    /// Whether a device that is nowhere may exist in a namespace that has no path: hardware, unless
    /// the kernel tells that it has no network interface. Virtual links end with their namespace.
    pub fn may_exist(&self) -> bool {
        if self.parent.is_empty() {
            return self.permanent_mac.is_some();
        }
        let devices = Path::new("/sys/bus").join(&self.bus).join("devices");
        // Present in every namespace, while the device has an interface in any of them.
        devices.join(&self.parent).join("net").exists() || !devices.exists()
    }

    /// Whether the hardware has one of these names on its bus.
    pub fn is_on_bus(&self, names: &[String]) -> bool {
        names.contains(&self.parent)
    }

    /// Whether the hardware has this permanent address.
    pub fn has_permanent_mac(&self, mac: MacAddress) -> bool {
        self.permanent_mac == Some(mac)
    }

    /// Whether a link is of the same kind, which does not prove that the link is the device.
    pub fn has_kind_of(&self, link: &Link) -> bool {
        self.kind == link.kind.as_deref().unwrap_or_default()
    }

    fn is_on_link(&self) -> bool {
        self.link.is_some() && ON_A_LINK.contains(&self.kind.as_str())
    }

    /// Whether a link may be the device, by its own attributes. The permanent address decides only
    /// without a parent device, because some drivers change the address.
    fn may_match(&self, link: &Link) -> bool {
        let other = DeviceIdentity::from_link(link);
        let same_hardware = (&self.bus, &self.parent) == (&other.bus, &other.parent);
        let same_mac = !self.parent.is_empty() || self.permanent_mac == link.permanent_mac;
        let same_link = !self.is_on_link() || (self.link == link.link && self.vlan == link.vlan);
        self.is_certain() && self.kind == other.kind && same_hardware && same_mac && same_link
    }

    /// The device `name` among the links of the host. Ports of a card, links on one lower link and
    /// dummies are alike, so a link without this name or alias is another's, unless it has the
    /// device's permanent address.
    pub fn find_on_host<'l>(
        &self,
        links: &'l [Link],
        ifname: &str,
        name: &str,
    ) -> Option<&'l Link> {
        let is_here = |link: &Link| !self.is_on_link() || self.link_netnsid == link.link_netnsid;
        let has_mac =
            |link: &Link| self.permanent_mac.is_some() && self.permanent_mac == link.permanent_mac;
        let is_known = |link: &Link| link.name == name || link.alias == name || has_mac(link);
        self.choose_candidate(
            links
                .iter()
                .filter(|link| self.may_match(link) && is_here(link) && is_known(link))
                .collect(),
            ifname,
        )
    }

    /// The device among the links of a container.
    pub fn find_in_container<'l>(
        &self,
        host: &Netlink,
        inside: &ContainerNetns<'_>,
        links: &'l [Link],
        ifname: &str,
    ) -> Result<Option<&'l Link>> {
        let mut found = Vec::new();
        for link in links.iter().filter(|link| self.may_match(link)) {
            let (outer, inner) = (self.link_netnsid, link.link_netnsid);
            if !self.is_on_link() || peer::is_same_netns(host, inside, outer, inner)? {
                found.push(link);
            }
        }
        Ok(self.choose_candidate(found, ifname))
    }

    /// Chooses among several candidates: ports of the same hardware, links on the same lower link,
    /// or dummies. `None` if the kernel does not report the hardware.
    fn choose_candidate<'l>(&self, mut found: Vec<&'l Link>, ifname: &str) -> Option<&'l Link> {
        if found.iter().any(|link| link.permanent_mac == self.permanent_mac) {
            found.retain(|link| link.permanent_mac == self.permanent_mac);
        }
        let named = found.iter().find(|link| link.name == ifname);
        let is_unique = found.len() == 1 || !self.parent.is_empty() || !self.kind.is_empty();
        named.or(found.first()).copied().filter(|_| is_unique)
    }
}

/// Whether a link in a container certainly came from the host, because no container can create such
/// a link.
pub fn came_from_host(host: &Netlink, inside: &ContainerNetns<'_>, link: &Link) -> Result<bool> {
    let identity = DeviceIdentity::from_link(link);
    if identity.is_on_link() {
        return peer::is_peer_on_host(host, inside, link);
    }
    Ok(identity.is_certain())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(name: &str, function: u8, mac: u8) -> Link {
        let parent = (function > 0)
            .then(|| ParentDevice { bus: "pci".into(), name: format!("0000:00:0{function}.0") });
        let permanent_mac = (mac > 0).then_some(MacAddress([2, 0, 0, 0, 0, mac]));
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

    fn find(device: &Link, links: &[Link]) -> Option<String> {
        DeviceIdentity::from_link(device)
            .find_on_host(links, "eth0", &device.name)
            .map(|link| link.name.clone())
    }

    /// The name of the device among links that have its alias.
    fn found(device: &Link, links: &[Link]) -> Option<String> {
        find(
            device,
            &links
                .iter()
                .map(|link| Link { alias: device.name.clone(), ..link.clone() })
                .collect::<Vec<_>>(),
        )
    }

    #[test]
    fn hardware_is_identified_by_sysfs_path_then_by_mac() {
        let x = || Some("x".to_owned());
        let device = card("ens1", 1, 1);
        let veth = made("eth0", "veth", 2);
        assert_eq!(found(&device, &[veth.clone(), card("eth0", 2, 1), card("x", 1, 1)]), x());
        assert_eq!(found(&device, &[card("x", 1, 9)]), x(), "a driver has changed it");
        assert_eq!(found(&device, &[card("eth0", 1, 2), card("x", 1, 1)]), x(), "two ports");
        assert_eq!(found(&device, &[veth.clone(), card("eth0", 0, 1)]), None);
        // A kernel that does not report the parent.
        let old = card("ens1", 0, 1);
        assert_eq!(found(&old, &[card("eth0", 0, 2), card("x", 0, 1)]), x());
        assert_eq!(found(&old, &[card("eth0", 0, 2)]), None);
        assert_eq!(found(&old, &[card("eth0", 0, 1), card("x", 0, 1)]), None);
        // Links of some protocols have no kind either.
        assert_eq!(found(&card("ens1", 0, 0), &[card("eth0", 0, 0), veth]), None);
    }

    #[test]
    fn virtual_links_are_identified_by_kind_peer_and_id() {
        let x = || Some("x".to_owned());
        let veth = made("hd0", "veth", 7);
        assert_eq!(found(&veth, &[made("eth0", "veth", 8), made("x", "veth", 7)]), x());
        let elsewhere = Link { link_netnsid: Some(0), ..made("eth0", "veth", 7) };
        assert_eq!(found(&veth, &[elsewhere, made("y", "macvlan", 7)]), None);
        let vlan = |name: &str, id| Link { vlan: Some(id), ..made(name, "vlan", 7) };
        assert_eq!(found(&vlan("v", 5), &[vlan("eth0", 6), vlan("x", 5)]), x());
        assert_eq!(found(&made("d", "dummy", 0), &[made("x", "dummy", 0)]), x());
        for kind in ["tun", "vxlan", "wireguard", "bridge"] {
            assert_eq!(found(&made("t", kind, 7), &[made("eth0", kind, 7)]), None, "{kind}");
        }
    }

    #[test]
    fn links_of_others_that_are_alike_are_not_the_device() {
        let port = card("ens1", 1, 1);
        assert_eq!(find(&port, &[card("uplink", 1, 2)]), None, "the other port of a card");
        assert_eq!(
            find(&port, &[card("dev7", 1, 1)]).as_deref(),
            Some("dev7"),
            "the container changed the alias"
        );
        for device in [card("rep1", 1, 0), made("d1", "dummy", 0), made("mv1", "macvlan", 7)] {
            let other = Link { name: "other".into(), ..device.clone() };
            let back = Link { alias: device.name.clone(), name: "dev7".into(), ..device.clone() };
            assert_eq!(find(&device, std::slice::from_ref(&other)), None);
            assert_eq!(find(&device, &[other, back]).as_deref(), Some("dev7"));
        }
    }
}
