//! Links: reads and deletes them; the ids by which a network namespace refers to other network
//! namespaces.

use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::libc::{self, RTM_DELLINK, RTM_GETLINK, RTM_GETNSID, RTM_NEWNSID};
use rtnetlink::packet_core::DefaultNla;
use rtnetlink::packet_route::link::{
    LinkAttribute, LinkExtentMask, LinkFlags, LinkHeader, LinkMessage,
};
use rtnetlink::packet_route::nsid::{NsidAttribute, NsidMessage};

use super::Netlink;
use super::attribute::{ReplyAttribute, find_attribute, parse_attributes, read_u32_at};
use super::error::{NetlinkError, NetlinkResult, RequestFailure, unless_absent};
use super::link_info::{
    self, BRIDGE, BondSettings, BridgeInfo, BridgePortInfo, IFLA_IPVLAN_MODE, IFLA_VLAN_ID,
    IFLA_VRF_TABLE, IpvlanMode, MacvlanInfo, TunTapInfo,
};
use super::mac::MacAddress;
use super::request::NetlinkRequest;

/// The parameters of IPv6 in `AF_INET6` of `IFLA_AF_SPEC`: an array of `u32`, from
/// `linux/if_link.h`.
const IFLA_INET6_CONF: u16 = 2;
/// `DEVCONF_ACCEPT_RA`, the index of `accept_ra` in that array, from `linux/ipv6.h`.
const DEVCONF_ACCEPT_RA: usize = 3;
/// Length of `struct ifinfomsg`.
pub(super) const IFINFOMSG: usize = 16;
/// An index that no link has: the kernel counts up from 1.
const NO_LINK: u32 = 0x7fff_ffff;
/// The attempt, in errors.
const DELETE: &str = "delete link";

// Attributes of namespace ids, missing in libc.
const NETNSA_NSID: u16 = 1;
const NETNSA_CURRENT_NSID: u16 = 5;
/// `NETNSA_NSID_NOT_ASSIGNED`: the kernel chooses the id.
const ANY_NSID: i32 = -1;
/// Length of `struct rtgenmsg`, padded.
const RTGENMSG: usize = 4;

/// A network interface as the kernel describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "the kernel's own flags")]
pub struct Link {
    /// The interface index, unique in its namespace.
    pub index: u32,
    pub name: String,
    /// Alternative names, which [`Netlink::find_link`] also accepts.
    pub alt_names: Vec<String>,
    /// `IFLA_IFALIAS`: free text, empty if there is none.
    pub alias: String,
    /// The kind, such as `bridge` or `veth`; hardware and `lo` have none.
    pub kind: Option<String>,
    /// The Ethernet address; tunnels have none.
    pub mac: Option<MacAddress>,
    /// The hardware's original Ethernet address.
    pub permanent_mac: Option<MacAddress>,
    /// The device of the interface; virtual links have none, and kernels before 5.14 do not report
    /// it.
    pub parent: Option<ParentDevice>,
    /// The MTU in bytes.
    pub mtu: u32,
    /// `IFF_UP`: administratively up, with or without carrier.
    pub up: bool,
    /// Whether there is a carrier; [`oper_state`](Link::oper_state) changes a little later.
    pub carrier: bool,
    /// `IFF_LOOPBACK`: the link is a loopback interface.
    pub loopback: bool,
    /// `IFF_ALLMULTI`: receives all multicast packets.
    pub allmulti: bool,
    /// The operational state by RFC 2863.
    pub oper_state: OperationalState,
    /// `IFF_PROMISC`: promiscuous mode by an administrator, not by a bridge.
    pub promisc: bool,
    /// The number of users of promiscuous mode.
    pub promiscuity: u32,
    /// The index of the bridge, bond or VRF.
    pub master: Option<u32>,
    /// `IFLA_LINK`: the peer of a veth, the lower device of a macvlan or VLAN.
    pub link: Option<u32>,
    /// The namespace of [`link`](Link::link), if it is in another namespace.
    pub link_netnsid: Option<i32>,
    /// `accept_ra` below `/proc/sys/net/ipv6/conf`; `None` without IPv6.
    pub accept_ra: Option<u32>,
    pub bridge: Option<BridgeInfo>,
    pub port: Option<BridgePortInfo>,
    pub bond: Option<BondSettings>,
    pub macvlan: Option<MacvlanInfo>,
    pub ipvlan: Option<IpvlanMode>,
    /// The VLAN id of a link of the kind `vlan`.
    pub vlan: Option<u16>,
    pub tun: Option<TunTapInfo>,
    /// The length of the transmit queue in packets.
    pub txqlen: u32,
    pub vrf_table: Option<u32>,
}

/// The device of a link, by its place on a bus.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ParentDevice {
    /// The bus: `pci`, `virtio`, `auxiliary`.
    pub bus: String,
    /// The name on the bus: `0000:3d:00.1`.
    pub name: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OperationalState {
    /// The driver, such as that of `lo`, does not report the state.
    #[default]
    Unknown,
    NotPresent,
    /// No carrier, or administratively down.
    Down,
    /// The lower device is down.
    LowerLayerDown,
    Testing,
    /// Waits for an external event, such as 802.1X authentication.
    Dormant,
    Up,
}

/// The operational states by their numbers (`IF_OPER_*`), with their names in sysfs.
const OPER_STATES: [(OperationalState, &str); 7] = [
    (OperationalState::Unknown, "unknown"),
    (OperationalState::NotPresent, "not-present"),
    (OperationalState::Down, "down"),
    (OperationalState::LowerLayerDown, "lower-layer-down"),
    (OperationalState::Testing, "testing"),
    (OperationalState::Dormant, "dormant"),
    (OperationalState::Up, "up"),
];

impl From<u8> for OperationalState {
    fn from(state: u8) -> OperationalState {
        OPER_STATES.get(usize::from(state)).map_or(OperationalState::Unknown, |(state, _)| *state)
    }
}

impl fmt::Display for OperationalState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(OPER_STATES[*self as usize].1)
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
        for attr in parse_attributes(body.get(IFINFOMSG..)?) {
            link.read_attribute(attr);
        }
        Some(link)
    }

    fn read_attribute(&mut self, attr: ReplyAttribute<'_>) {
        match attr.kind {
            libc::IFLA_IFNAME => self.name = attr.to_text(),
            libc::IFLA_PROP_LIST => {
                self.alt_names = attr.nested_attributes().map(ReplyAttribute::to_text).collect();
            }
            libc::IFLA_IFALIAS => self.alias = attr.to_text(),
            libc::IFLA_PERM_ADDRESS => self.permanent_mac = MacAddress::from_bytes(attr.value),
            libc::IFLA_PARENT_DEV_NAME => {
                self.parent.get_or_insert_default().name = attr.to_text();
            }
            libc::IFLA_PARENT_DEV_BUS_NAME => {
                self.parent.get_or_insert_default().bus = attr.to_text();
            }
            libc::IFLA_ADDRESS => self.mac = MacAddress::from_bytes(attr.value),
            libc::IFLA_MTU => self.mtu = attr.to_u32().unwrap_or_default(),
            libc::IFLA_TXQLEN => self.txqlen = attr.to_u32().unwrap_or_default(),
            libc::IFLA_OPERSTATE => self.oper_state = attr.to_u8().unwrap_or_default().into(),
            libc::IFLA_CARRIER => self.carrier = attr.to_u8() == Some(1),
            libc::IFLA_PROMISCUITY => self.promiscuity = attr.to_u32().unwrap_or_default(),
            libc::IFLA_MASTER => self.master = attr.to_u32().filter(|index| *index != 0),
            libc::IFLA_LINK => self.link = attr.to_u32().filter(|index| *index != 0),
            libc::IFLA_LINK_NETNSID => self.link_netnsid = attr.to_i32(),
            libc::IFLA_AF_SPEC => self.accept_ra = parse_accept_ra(attr),
            libc::IFLA_LINKINFO => self.read_link_info(attr),
            _ => {}
        }
    }

    fn read_link_info(&mut self, info: ReplyAttribute<'_>) {
        self.kind = info.find_nested(libc::IFLA_INFO_KIND).map(ReplyAttribute::to_text);
        if let Some(data) = info.find_nested(libc::IFLA_INFO_DATA) {
            match self.kind.as_deref() {
                Some(BRIDGE) => self.bridge = Some(link_info::parse_bridge(data)),
                Some("bond") => self.bond = Some(link_info::parse_bond(data)),
                Some("macvlan") => self.macvlan = Some(link_info::parse_macvlan(data)),
                Some("ipvlan") => {
                    let mode = data.find_nested(IFLA_IPVLAN_MODE).and_then(ReplyAttribute::to_u16);
                    self.ipvlan = mode.and_then(IpvlanMode::from_wire);
                }
                Some("tun") => self.tun = Some(link_info::parse_tun_tap(data)),
                Some("vrf") => {
                    self.vrf_table =
                        data.find_nested(IFLA_VRF_TABLE).and_then(ReplyAttribute::to_u32);
                }
                Some("vlan") => {
                    self.vlan = data.find_nested(IFLA_VLAN_ID).and_then(ReplyAttribute::to_u16);
                }
                _ => {}
            }
        }
        if info.find_nested(libc::IFLA_INFO_SLAVE_KIND).is_some_and(|kind| kind.to_text() == BRIDGE)
        {
            self.port =
                info.find_nested(libc::IFLA_INFO_SLAVE_DATA).map(link_info::parse_bridge_port);
        }
    }
}

fn parse_accept_ra(spec: ReplyAttribute<'_>) -> Option<u32> {
    let ipv6 = spec.nested_attributes().find(|attr| i32::from(attr.kind) == libc::AF_INET6)?;
    read_u32_at(ipv6.find_nested(IFLA_INET6_CONF)?.value, 4 * DEVCONF_ACCEPT_RA)
}

/// A link in a request, and in errors.
#[derive(Clone, Copy)]
enum LinkSelector<'a> {
    Name(&'a str),
    Index(u32),
}

impl LinkSelector<'_> {
    fn to_message(self) -> LinkMessage {
        match self {
            LinkSelector::Index(index) => link_message(index, Vec::new()),
            LinkSelector::Name(name) if name.len() < libc::IFNAMSIZ => {
                link_message(0, vec![LinkAttribute::IfName(name.to_owned())])
            }
            // A longer name is an alternative name.
            LinkSelector::Name(name) => {
                let name = DefaultNla::new(libc::IFLA_ALT_IFNAME, [name.as_bytes(), &[0]].concat());
                link_message(0, vec![LinkAttribute::Other(name)])
            }
        }
    }
}

impl fmt::Display for LinkSelector<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LinkSelector::Name(name) => write!(f, "{name:?}"),
            LinkSelector::Index(index) => index.fmt(f),
        }
    }
}

impl Netlink {
    /// The link with this name or alternative name.
    pub fn find_link(&self, name: &str) -> NetlinkResult<Option<Link>> {
        self.look_up_link(LinkSelector::Name(name))
    }

    /// The link with this name; an error if there is none.
    pub fn require_link(&self, name: &str) -> NetlinkResult<Link> {
        self.find_link(name)?
            .ok_or_else(|| NetlinkError::NoLink(LinkSelector::Name(name).to_string()))
    }

    pub fn find_link_by_index(&self, index: u32) -> NetlinkResult<Option<Link>> {
        self.look_up_link(LinkSelector::Index(index))
    }

    /// The link with this index in the network namespace that has the id `nsid` in this one; `None`
    /// also if no namespace has the id.
    pub fn find_link_in(&self, nsid: i32, index: u32) -> NetlinkResult<Option<Link>> {
        let request = lookup_request(link_message(index, vec![LinkAttribute::IfNetnsId(nsid)]));
        match self.socket.request_object(&request) {
            // The kernel's answer for an id that no namespace has.
            Err(failure) if failure.refusal_errno() == Some(Errno::EINVAL) => Ok(None),
            reply => link_in_reply(reply, LinkSelector::Index(index)),
        }
    }

    /// The link with this index; an error if there is none.
    pub fn require_link_by_index(&self, index: u32) -> NetlinkResult<Link> {
        self.find_link_by_index(index)?.ok_or_else(|| NetlinkError::NoLink(index.to_string()))
    }

    /// Fails unless this process has `CAP_NET_ADMIN` in the user namespace of this network
    /// namespace: the kernel checks the capability before it looks up the link, which does not
    /// exist.
    pub fn require_net_admin(&self) -> NetlinkResult<()> {
        self.delete_selected_link(LinkSelector::Index(NO_LINK)).map(drop)
    }

    /// All links of the namespace.
    pub fn dump_links(&self) -> NetlinkResult<Vec<Link>> {
        self.socket.request_list(
            &lookup_request(link_message(0, Vec::new())),
            "list",
            &"links",
            Link::parse,
        )
    }

    /// Deletes the link with this name; `false` if there was none.
    pub fn delete_link(&self, name: &str) -> NetlinkResult<bool> {
        self.delete_selected_link(LinkSelector::Name(name))
    }

    /// Deletes the link with this index; `false` if there was none. When the method returns, the
    /// link, and the other end of a pair, are gone from their network namespaces.
    pub fn delete_link_by_index(&self, index: u32) -> NetlinkResult<bool> {
        let which = LinkSelector::Index(index);
        match self.delete_detached(index, &deletion_request(which)) {
            Some(outcome) => {
                let deleted = outcome.map(|()| true);
                unless_absent(deleted.map_err(|failure| failure.into_error(DELETE, &which)), false)
            }
            None => self.delete_selected_link(which),
        }
    }

    fn delete_selected_link(&self, which: LinkSelector<'_>) -> NetlinkResult<bool> {
        self.socket.request_deletion(&deletion_request(which), DELETE, &which)
    }

    fn look_up_link(&self, which: LinkSelector<'_>) -> NetlinkResult<Option<Link>> {
        link_in_reply(self.socket.request_object(&lookup_request(which.to_message())), which)
    }

    /// The id of the namespace `netns` in this socket's namespace, if one was assigned. The kernel
    /// assigns an id when it first reports a link whose other end is in `netns`, and never changes
    /// it.
    pub fn namespace_id(&self, netns: BorrowedFd<'_>) -> NetlinkResult<Option<i32>> {
        Ok(self.query_namespace_ids(vec![NsidAttribute::Fd(netns.as_raw_fd().cast_unsigned())])?.0)
    }

    /// Like [`Netlink::namespace_id`], but assigns an id if there is none. The id does not keep the
    /// namespace alive.
    pub fn ensure_namespace_id(&self, netns: BorrowedFd<'_>) -> NetlinkResult<Option<i32>> {
        if let Some(id) = self.namespace_id(netns)? {
            return Ok(Some(id));
        }
        let attributes =
            vec![NsidAttribute::Fd(netns.as_raw_fd().cast_unsigned()), NsidAttribute::Id(ANY_NSID)];
        let request = namespace_id_request(RTM_NEWNSID, attributes);
        match self.socket.request_change(&request, 0, "assign", &"namespace id") {
            Err(error) if !error.is_exists() => Err(error),
            _ => self.namespace_id(netns),
        }
    }

    /// Whether a namespace has this id in this socket's namespace: the kernel gives the id of a
    /// namespace to another one only when the first has ended. `None` before Linux 5.0.
    pub fn has_namespace(&self, id: i32) -> NetlinkResult<Option<bool>> {
        match self
            .socket
            .request_object(&namespace_id_request(RTM_GETNSID, vec![NsidAttribute::Id(id)]))
        {
            Ok(_) => Ok(Some(true)),
            Err(failure) => match failure.refusal_errno() {
                Some(Errno::ENOENT) => Ok(Some(false)),
                Some(Errno::EINVAL) => Ok(None),
                _ => Err(failure.into_error("look up", &"namespace id")),
            },
        }
    }

    /// The id of the namespace `nsid` in the namespace `target`, both by their ids in this
    /// namespace; `None` before Linux 5.0.
    pub fn namespace_id_in(&self, target: i32, nsid: i32) -> NetlinkResult<Option<i32>> {
        let attributes = vec![NsidAttribute::Id(nsid), NsidAttribute::TargetNsid(target)];
        let (found, translated) = self.query_namespace_ids(attributes)?;
        // Older kernels ignore the target, and reply for this namespace.
        Ok(found.filter(|_| translated == Some(nsid)))
    }

    /// `NETNSA_NSID` and `NETNSA_CURRENT_NSID` of the reply.
    fn query_namespace_ids(
        &self,
        attributes: Vec<NsidAttribute>,
    ) -> NetlinkResult<(Option<i32>, Option<i32>)> {
        let body = match self.socket.request_object(&namespace_id_request(RTM_GETNSID, attributes))
        {
            // The namespace with this id no longer exists.
            Err(failure)
                if matches!(failure.refusal_errno(), Some(Errno::ENOENT | Errno::EINVAL)) =>
            {
                return Ok((None, None));
            }
            reply => reply.map_err(|failure| failure.into_error("look up", &"namespace id"))?,
        };
        let attributes = body.get(RTGENMSG..).unwrap_or_default();
        // A negative id means that none was assigned.
        let id = |kind| find_attribute(attributes, kind)?.to_i32().filter(|id| *id >= 0);
        Ok((id(NETNSA_NSID), id(NETNSA_CURRENT_NSID)))
    }

    /// The name of a link, for errors: the name is looked up only when an error is formatted.
    pub(super) fn link_label(&self, index: u32) -> LinkLabel<'_> {
        LinkLabel(self, index)
    }
}

pub(super) struct LinkLabel<'a>(&'a Netlink, u32);

impl fmt::Display for LinkLabel<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.find_link_by_index(self.1) {
            Ok(Some(link)) => write!(f, "{:?}", link.name),
            _ => write!(f, "link {}", self.1),
        }
    }
}

/// The link in the reply to a lookup.
fn link_in_reply(
    reply: NetlinkResult<Vec<u8>, RequestFailure>,
    which: LinkSelector<'_>,
) -> NetlinkResult<Option<Link>> {
    let failed = |failure: RequestFailure| failure.into_error("look up link", &which);
    match reply {
        Ok(body) => Link::parse(&body).map(Some).ok_or_else(|| failed(Errno::EBADMSG.into())),
        Err(failure) if failure.refusal_errno() == Some(Errno::ENODEV) => Ok(None),
        Err(failure) => Err(failed(failure)),
    }
}

fn namespace_id_request(kind: u16, attributes: Vec<NsidAttribute>) -> NetlinkRequest {
    let mut message = NsidMessage::default();
    message.attributes = attributes;
    NetlinkRequest::new_route(kind, &message)
}

fn deletion_request(which: LinkSelector<'_>) -> NetlinkRequest {
    NetlinkRequest::new_route(RTM_DELLINK, &which.to_message())
}

/// A message about the link with this index; 0 for none.
pub(super) fn link_message(index: u32, attributes: Vec<LinkAttribute>) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    message.attributes = attributes;
    message
}

/// A lookup without the statistics, which are unused and more than half of a reply.
fn lookup_request(mut message: LinkMessage) -> NetlinkRequest {
    message.attributes.push(LinkAttribute::ExtMask(vec![LinkExtentMask::SkipStats]));
    NetlinkRequest::new_route(RTM_GETLINK, &message)
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
    fn malformed_attributes_are_skipped() {
        let broken_data = attr(libc::IFLA_INFO_DATA, &[255, 255, 1, 2, 3]);
        let body = [
            vec![0; IFINFOMSG],
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
        assert_eq!(Link::parse(&[0; IFINFOMSG - 1]), None);
    }

    #[test]
    fn states_have_the_kernels_names() {
        let names: Vec<String> =
            (0..=7).map(|state| OperationalState::from(state).to_string()).collect();
        let expected =
            "unknown not-present down lower-layer-down testing dormant up unknown".split(' ');
        assert!(names.iter().map(String::as_str).eq(expected), "{names:?}");
    }
}
