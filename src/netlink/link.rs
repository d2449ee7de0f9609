//! Links: what the kernel tells about them.

use std::fmt;

use nix::errno::Errno;
use nix::libc;
use nix::libc::{RTM_DELLINK, RTM_GETLINK};
use rtnetlink::packet_core::DefaultNla;
use rtnetlink::packet_route::link::{
    LinkAttribute, LinkExtentMask, LinkFlags, LinkHeader, LinkMessage,
};

use super::Netlink;
use super::error::{Error, Failure, Result};
use super::kind::{self, IpvlanMode, MacvlanMode};
use super::mac::Mac;
use super::packet::{Attr, Packet, attrs};
use super::tun::{self, TunInfo};

/// `IFLA_BR_VLAN_FILTERING`, missing in libc.
const IFLA_BR_VLAN_FILTERING: u16 = 7;
/// `IFLA_BR_VLAN_DEFAULT_PVID`, missing in libc.
const IFLA_BR_VLAN_DEFAULT_PVID: u16 = 39;
/// `IFLA_BR_MULTI_BOOLOPT`, missing in libc: the values of the bridge's switches, then which it knows.
const IFLA_BR_MULTI_BOOLOPT: u16 = 46;
/// `BR_BOOLOPT_NO_LL_LEARN` as a bit of both.
const NO_LL_LEARN: u32 = 1;
/// The parameters of IPv6 in `AF_INET6` of `IFLA_AF_SPEC`: an array of `u32`, from `linux/if_link.h`.
const IFLA_INET6_CONF: u16 = 2;
/// `DEVCONF_ACCEPT_RA`, the place of `accept_ra` in it, from `linux/ipv6.h`.
const DEVCONF_ACCEPT_RA: usize = 3;
/// `IFLA_MACVLAN_MODE`, missing in libc.
const IFLA_MACVLAN_MODE: u16 = 1;
/// `IFLA_MACVLAN_BC_QUEUE_LEN`, missing in libc.
const IFLA_MACVLAN_BC_QUEUE_LEN: u16 = 7;
/// `IFLA_IPVLAN_MODE`, missing in libc.
const IFLA_IPVLAN_MODE: u16 = 1;
/// `IFLA_VLAN_ID`, missing in libc.
const IFLA_VLAN_ID: u16 = 1;
/// `IFLA_VRF_TABLE`, missing in libc.
const IFLA_VRF_TABLE: u16 = 1;
/// `IFLA_BRPORT_MODE`, which is hairpin mode; missing in libc.
const IFLA_BRPORT_MODE: u16 = 4;
/// `IFLA_BRPORT_ISOLATED`, missing in libc.
const IFLA_BRPORT_ISOLATED: u16 = 33;

/// A network interface as the kernel describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "the kernel's own flags")]
pub struct Link {
    /// The interface index, unique in its namespace.
    pub index: u32,
    pub name: String,
    /// Alternative names, by which [`Netlink::link`] finds it as well.
    pub alt_names: Vec<String>,
    /// `IFLA_IFALIAS`: free text, empty if there is none.
    pub alias: String,
    /// The driver that made it, such as `bridge` or `veth`; hardware and `lo` have none.
    pub kind: Option<String>,
    /// The Ethernet address; tunnels have none.
    pub mac: Option<Mac>,
    /// The address that the hardware came with.
    pub permanent_mac: Option<Mac>,
    /// The device it is an interface of, as its bus calls it; virtual links have none, and kernels
    /// before 5.14 do not tell.
    pub parent: Option<Parent>,
    /// The largest packet in bytes.
    pub mtu: u32,
    /// `IFF_UP`: switched on, with or without carrier.
    pub up: bool,
    /// Whether there is a signal; [`oper_state`](Link::oper_state) follows a little later.
    pub carrier: bool,
    /// `IFF_LOOPBACK`.
    pub loopback: bool,
    /// `IFF_ALLMULTI`: receives every multicast.
    pub allmulti: bool,
    /// Whether packets can pass, by RFC 2863.
    pub oper_state: OperState,
    /// `IFF_PROMISC`: promiscuous because an administrator switched that on, not for a bridge.
    pub promisc: bool,
    /// How many users want promiscuous mode.
    pub promiscuity: u32,
    /// The index of the bridge, bond or VRF that it belongs to.
    pub master: Option<u32>,
    /// `IFLA_LINK`: the peer of a veth, the lower device of a macvlan or VLAN.
    pub link: Option<u32>,
    /// The namespace of [`link`](Link::link), if it is in another namespace.
    pub link_netnsid: Option<i32>,
    /// `accept_ra` below `/proc/sys/net/ipv6/conf`: whether router advertisements configure it;
    /// `None` where it has no IPv6.
    pub accept_ra: Option<u32>,
    /// What only a bridge has.
    pub bridge: Option<BridgeInfo>,
    /// What only a port of a bridge has.
    pub port: Option<BridgePort>,
    /// What only a macvlan has.
    pub macvlan: Option<MacvlanInfo>,
    /// The mode of an ipvlan.
    pub ipvlan: Option<IpvlanMode>,
    /// The number of a VLAN.
    pub vlan: Option<u16>,
    /// What only a tun or tap device has.
    pub tun: Option<TunInfo>,
    /// The length of the transmit queue.
    pub txqlen: u32,
    /// The routing table that only a VRF has.
    pub vrf_table: Option<u32>,
}

/// A device on a bus.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Parent {
    /// The bus: `pci`, `virtio`, `auxiliary`.
    pub bus: String,
    /// Its name there: `0000:3d:00.1`.
    pub name: String,
}

/// The settings of a bridge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BridgeInfo {
    /// Whether ports belong to VLANs.
    pub vlan_filtering: bool,
    /// The native VLAN of new ports; 0 for none.
    pub default_pvid: u16,
    /// Whether ports learn the sources of link-local frames, which pass the packet filter by;
    /// `None` where the kernel cannot be told not to, before 4.20.
    pub learns_link_local: Option<bool>,
}

/// The settings of a link as a port of its bridge.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BridgePort {
    /// Whether frames may leave through the port they came in by.
    pub hairpin: bool,
    /// Whether it exchanges frames only with ports that are not isolated.
    pub isolated: bool,
}

/// The settings of a macvlan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MacvlanInfo {
    /// How its siblings see it; `None` for a mode that has no name here.
    pub mode: Option<MacvlanMode>,
    /// How many broadcasts to it may wait; 0 on kernels before 5.11, which do not tell.
    pub bc_queue_len: u32,
}

/// The operational state of a link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OperState {
    /// The driver does not tell; `lo` is always so.
    #[default]
    Unknown,
    NotPresent,
    /// No carrier, or switched off.
    Down,
    /// The device below is down.
    LowerLayerDown,
    Testing,
    /// Waits for something outside, such as 802.1X.
    Dormant,
    Up,
}

impl From<u8> for OperState {
    fn from(state: u8) -> OperState {
        match libc::c_int::from(state) {
            libc::IF_OPER_NOTPRESENT => OperState::NotPresent,
            libc::IF_OPER_DOWN => OperState::Down,
            libc::IF_OPER_LOWERLAYERDOWN => OperState::LowerLayerDown,
            libc::IF_OPER_TESTING => OperState::Testing,
            libc::IF_OPER_DORMANT => OperState::Dormant,
            libc::IF_OPER_UP => OperState::Up,
            _ => OperState::Unknown,
        }
    }
}

impl fmt::Display for OperState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            OperState::Unknown => "unknown",
            OperState::NotPresent => "not-present",
            OperState::Down => "down",
            OperState::LowerLayerDown => "lower-layer-down",
            OperState::Testing => "testing",
            OperState::Dormant => "dormant",
            OperState::Up => "up",
        })
    }
}

impl Link {
    /// Reads an `RTM_NEWLINK` message.
    pub(super) fn parse(body: &[u8]) -> Option<Link> {
        let header = LinkHeader::parse(body).ok()?;
        let mut link = Link {
            index: header.index,
            up: header.flags.contains(LinkFlags::Up),
            loopback: header.flags.contains(LinkFlags::Loopback),
            allmulti: header.flags.contains(LinkFlags::Allmulti),
            promisc: header.flags.contains(LinkFlags::Promisc),
            ..Link::default()
        };
        for attr in attrs(body.get(HEADER_LEN..)?) {
            link.read(attr);
        }
        Some(link)
    }

    fn read(&mut self, attr: Attr<'_>) {
        match attr.kind {
            libc::IFLA_IFNAME => self.name = attr.text(),
            libc::IFLA_PROP_LIST => self.alt_names = attr.nested().map(Attr::text).collect(),
            libc::IFLA_IFALIAS => self.alias = attr.text(),
            libc::IFLA_PERM_ADDRESS => self.permanent_mac = Mac::from_bytes(attr.value),
            libc::IFLA_PARENT_DEV_NAME => self.parent_mut().name = attr.text(),
            libc::IFLA_PARENT_DEV_BUS_NAME => self.parent_mut().bus = attr.text(),
            libc::IFLA_ADDRESS => self.mac = Mac::from_bytes(attr.value),
            libc::IFLA_MTU => self.mtu = attr.u32().unwrap_or_default(),
            libc::IFLA_TXQLEN => self.txqlen = attr.u32().unwrap_or_default(),
            libc::IFLA_OPERSTATE => self.oper_state = attr.u8().unwrap_or_default().into(),
            libc::IFLA_CARRIER => self.carrier = attr.u8() == Some(1),
            libc::IFLA_PROMISCUITY => self.promiscuity = attr.u32().unwrap_or_default(),
            libc::IFLA_MASTER => self.master = attr.u32().filter(|index| *index != 0),
            libc::IFLA_LINK => self.link = attr.u32().filter(|index| *index != 0),
            libc::IFLA_LINK_NETNSID => self.link_netnsid = attr.i32(),
            libc::IFLA_AF_SPEC => self.accept_ra = accept_ra(attr),
            libc::IFLA_LINKINFO => self.read_info(attr),
            _ => {}
        }
    }

    fn parent_mut(&mut self) -> &mut Parent {
        self.parent.get_or_insert_default()
    }

    fn read_info(&mut self, info: Attr<'_>) {
        let find = |kind| info.nested().find(|attr| attr.kind == kind);
        self.kind = find(libc::IFLA_INFO_KIND).map(Attr::text);
        let data = find(libc::IFLA_INFO_DATA);
        match self.kind.as_deref() {
            Some(kind::BRIDGE) => {
                self.bridge = data.map(|data| BridgeInfo {
                    vlan_filtering: flag(data, IFLA_BR_VLAN_FILTERING),
                    default_pvid: number(data, IFLA_BR_VLAN_DEFAULT_PVID).unwrap_or_default(),
                    learns_link_local: learns_link_local(data),
                });
            }
            Some("macvlan") => self.macvlan = data.map(macvlan),
            Some("ipvlan") => self.ipvlan = data.and_then(ipvlan),
            Some(tun::KIND) => self.tun = data.map(TunInfo::parse),
            Some(kind::VRF) => {
                let table =
                    |data: Attr<'_>| data.nested().find(|a| a.kind == IFLA_VRF_TABLE)?.u32();
                self.vrf_table = data.and_then(table);
            }
            Some("vlan") => self.vlan = data.and_then(|data| number(data, IFLA_VLAN_ID)),
            _ => {}
        }
        if find(libc::IFLA_INFO_SLAVE_KIND).map(Attr::text).as_deref() == Some(kind::BRIDGE) {
            self.port = find(libc::IFLA_INFO_SLAVE_DATA).map(|data| BridgePort {
                hairpin: flag(data, IFLA_BRPORT_MODE),
                isolated: flag(data, IFLA_BRPORT_ISOLATED),
            });
        }
    }
}

/// An index that is never given out: the kernel counts up from 1.
const NO_LINK: u32 = 0x7fff_ffff;

/// Length of `struct ifinfomsg`.
const HEADER_LEN: usize = 16;

fn flag(data: Attr<'_>, kind: u16) -> bool {
    data.nested().find(|attr| attr.kind == kind).and_then(Attr::u8) == Some(1)
}

fn learns_link_local(data: Attr<'_>) -> Option<bool> {
    let options = data.nested().find(|attr| attr.kind == IFLA_BR_MULTI_BOOLOPT)?;
    let values = options.value.first_chunk().copied().map(u32::from_ne_bytes)?;
    Some(values & NO_LL_LEARN == 0)
}

fn accept_ra(spec: Attr<'_>) -> Option<u32> {
    let of_ipv6 = spec.nested().find(|attr| i32::from(attr.kind) == libc::AF_INET6)?;
    let conf = of_ipv6.nested().find(|attr| attr.kind == IFLA_INET6_CONF)?;
    conf.value.chunks_exact(4).nth(DEVCONF_ACCEPT_RA)?.try_into().ok().map(u32::from_ne_bytes)
}

fn macvlan(data: Attr<'_>) -> MacvlanInfo {
    let number = |kind| data.nested().find(|attr| attr.kind == kind).and_then(Attr::u32);
    MacvlanInfo {
        mode: number(IFLA_MACVLAN_MODE).and_then(MacvlanMode::from_wire),
        bc_queue_len: number(IFLA_MACVLAN_BC_QUEUE_LEN).unwrap_or_default(),
    }
}

fn ipvlan(data: Attr<'_>) -> Option<IpvlanMode> {
    IpvlanMode::from_wire(number(data, IFLA_IPVLAN_MODE)?)
}

/// A number of two bytes.
fn number(data: Attr<'_>, kind: u16) -> Option<u16> {
    let attr = data.nested().find(|attr| attr.kind == kind)?;
    attr.value.try_into().ok().map(u16::from_ne_bytes)
}

impl Netlink {
    /// The link with this name or alternative name.
    pub fn link(&self, name: &str) -> Result<Option<Link>> {
        let mut message = LinkMessage::default();
        message.attributes.push(by_name(name));
        self.look_up(message, || quoted(name))
    }

    /// The link with this name; an error if there is none.
    pub fn require_link(&self, name: &str) -> Result<Link> {
        self.link(name)?.ok_or_else(|| Error::NoLink(quoted(name)))
    }

    /// The link with this index.
    pub fn link_by_index(&self, index: u32) -> Result<Option<Link>> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        self.look_up(message, || index.to_string())
    }

    /// The link with this index; an error if there is none.
    pub fn require_link_by_index(&self, index: u32) -> Result<Link> {
        self.link_by_index(index)?.ok_or_else(|| Error::NoLink(index.to_string()))
    }

    /// Fails unless this process may change links here (`CAP_NET_ADMIN` in the namespace's user
    /// namespace): the kernel checks that before it looks for the link, and there is none.
    pub fn require_admin(&self) -> Result<()> {
        self.del_link_by_index(NO_LINK).map(drop)
    }

    /// All links of the namespace.
    pub fn dump_links(&self) -> Result<Vec<Link>> {
        let mut message = LinkMessage::default();
        message.attributes.push(without_statistics());
        let bodies = self
            .dump(&Packet::new(RTM_GETLINK, &message))
            .map_err(|e| e.doing("list", || "links".to_owned()))?;
        Ok(bodies.iter().filter_map(|body| Link::parse(body)).collect())
    }

    /// Deletes the link with this name; `false` if there was none.
    pub fn del_link(&self, name: &str) -> Result<bool> {
        let mut message = LinkMessage::default();
        message.attributes.push(by_name(name));
        self.delete(&message, || quoted(name))
    }

    /// Deletes the link with this index; `false` if there was none.
    pub fn del_link_by_index(&self, index: u32) -> Result<bool> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        self.delete(&message, || index.to_string())
    }

    fn look_up(
        &self,
        mut message: LinkMessage,
        target: impl FnOnce() -> String,
    ) -> Result<Option<Link>> {
        message.attributes.push(without_statistics());
        match self.one(Packet::new(RTM_GETLINK, &message)) {
            Ok(body) => Link::parse(&body)
                .map(Some)
                .ok_or_else(|| Failure::from(Errno::EBADMSG).doing("look up link", target)),
            Err(Failure { errno: Errno::ENODEV, unanswered: false, .. }) => Ok(None),
            Err(failure) => Err(failure.doing("look up link", target)),
        }
    }

    fn delete(&self, message: &LinkMessage, target: impl FnOnce() -> String) -> Result<bool> {
        let deleted = self.ack(Packet::new(RTM_DELLINK, message), 0);
        unless_absent(deleted.map_err(|failure| failure.doing("delete link", target)))
    }

    /// How errors call a link of which only the index is at hand: by its name, if it has one
    /// still. Asked only when something has failed already.
    pub(super) fn label(&self, index: u32) -> String {
        match self.link_by_index(index) {
            Ok(Some(link)) => quoted(&link.name),
            _ => format!("link {index}"),
        }
    }
}

/// The attribute that names a link; what is too long for a name is an alternative name.
fn by_name(name: &str) -> LinkAttribute {
    if name.len() < libc::IFNAMSIZ {
        LinkAttribute::IfName(name.to_owned())
    } else {
        let mut value = name.as_bytes().to_vec();
        value.push(0);
        LinkAttribute::Other(DefaultNla::new(libc::IFLA_ALT_IFNAME, value))
    }
}

/// Statistics are more than half of an answer, and are not used here.
fn without_statistics() -> LinkAttribute {
    LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats])
}

/// A deletion is done when there was nothing to delete.
pub(super) fn unless_absent(deleted: Result<()>) -> Result<bool> {
    match deleted {
        Ok(()) => Ok(true),
        Err(error) if error.is_not_found() => Ok(false),
        Err(error) => Err(error),
    }
}

pub(super) fn quoted(name: &str) -> String {
    format!("{name:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attr(kind: u16, value: &[u8]) -> Vec<u8> {
        let length = u16::try_from(value.len() + 4).unwrap();
        let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    #[test]
    fn what_cannot_be_read_does_not_hide_the_rest() {
        let broken_data = attr(libc::IFLA_INFO_DATA, &[255, 255, 1, 2, 3]);
        let body = [
            vec![0; HEADER_LEN],
            attr(libc::IFLA_MTU, &[1, 2]),
            attr(999, b"from the future"),
            attr(libc::IFLA_OPERSTATE, &[]),
            attr(libc::IFLA_ADDRESS, &[10, 0, 0, 1]),
            attr(
                libc::IFLA_LINKINFO,
                &[attr(libc::IFLA_INFO_KIND, b"bridge\0"), broken_data].concat(),
            ),
            attr(libc::IFLA_IFNAME, b"br0\0"),
            vec![99, 0, 3, 0],
        ];
        let link = Link::parse(&body.concat()).unwrap();
        assert_eq!((link.name.as_str(), link.kind.as_deref()), ("br0", Some("bridge")));
        assert_eq!((link.mtu, link.mac, link.bridge), (0, None, Some(BridgeInfo::default())));
        assert_eq!(Link::parse(&[0; HEADER_LEN - 1]), None);
    }

    #[test]
    fn states_have_the_kernels_names() {
        let names: Vec<String> = (0..=7).map(|state| OperState::from(state).to_string()).collect();
        let expected =
            "unknown not-present down lower-layer-down testing dormant up unknown".split(' ');
        assert!(names.iter().map(String::as_str).eq(expected), "{names:?}");
    }
}
