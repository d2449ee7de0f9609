//! Links: creates a link with all of its settings by one message.

use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::libc::RTM_NEWLINK;
use rtnetlink::packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use rtnetlink::packet_route::link::{
    InfoBridge, InfoData, InfoIpVlan, InfoKind, InfoMacVlan, InfoVeth, InfoVlan, InfoVrf,
    LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};

use super::Netlink;
use super::error::{NetlinkError, NetlinkResult, RequestFailure};
use super::link::{Link, link_message};
use super::link_info::{BondSettings, IpvlanMode, MacvlanMode};
use super::mac::MacAddress;
use super::request::NetlinkRequest;

#[derive(Clone, Debug)]
pub enum LinkKind<'a> {
    Bridge {
        /// Whether ports belong to VLANs; `None` for the kernel's default.
        vlan_filtering: Option<bool>,
    },
    /// Several links, its ports, as one.
    Bond(BondSettings),
    /// One end of a veth pair; the same message creates the other end.
    Veth {
        peer: VethPeer<'a>,
    },
    /// A device that drops all packets.
    Dummy,
    /// A device for shaping of incoming packets.
    Ifb,
    /// An additional Ethernet address on a lower device.
    Macvlan {
        /// The index of the lower device.
        link: u32,
        mode: MacvlanMode,
        /// The length of the queue for broadcasts; 0 for the kernel's default.
        bc_queue_len: u32,
    },
    /// Additional IP addresses with the Ethernet address of the lower device.
    Ipvlan {
        /// The index of the lower device.
        link: u32,
        mode: IpvlanMode,
    },
    /// A VLAN of a lower device.
    Vlan {
        /// The index of the lower device.
        link: u32,
        /// The VLAN id, 0 to 4094.
        id: u16,
    },
    Vrf {
        table: u32,
    },
}

/// The other end of a new veth pair, which is always down: the kernel configures it before the pair
/// is complete, and refuses to set half of a pair up.
#[derive(Clone, Debug)]
#[must_use]
pub struct VethPeer<'a> {
    message: LinkMessage,
    netns: Option<BorrowedFd<'a>>,
}

impl<'a> VethPeer<'a> {
    /// A peer in the namespace of the first end.
    pub fn new(name: impl Into<String>) -> VethPeer<'a> {
        let message = link_message(0, vec![LinkAttribute::IfName(name.into())]);
        VethPeer { message, netns: None }
    }

    /// Creates the peer in another namespace.
    pub fn with_netns(mut self, netns: BorrowedFd<'a>) -> Self {
        self.netns = Some(netns);
        self
    }

    /// The Ethernet address; random by default.
    pub fn with_mac(mut self, mac: impl Into<Option<MacAddress>>) -> Self {
        let mac = mac.into().map(|mac| LinkAttribute::Address(mac.0.to_vec()));
        self.message.attributes.extend(mac);
        self
    }

    /// The MTU in bytes; 0 for the kernel's default.
    pub fn with_mtu(mut self, mtu: u32) -> Self {
        self.message.attributes.extend((mtu > 0).then_some(LinkAttribute::Mtu(mtu)));
        self
    }

    fn to_message(&self) -> LinkMessage {
        let mut message = self.message.clone();
        let netns = self.netns.map(|netns| LinkAttribute::NetNsFd(netns.as_raw_fd()));
        message.attributes.extend(netns);
        message
    }
}

/// A link to be created.
#[derive(Clone, Debug)]
#[must_use]
pub struct NewLink<'a> {
    name: String,
    kind: LinkKind<'a>,
    /// The settings that the peer of a veth link can also have.
    common: VethPeer<'a>,
}

impl<'a> NewLink<'a> {
    /// A link that is down, with the kernel's defaults.
    pub fn new(name: impl Into<String>, kind: LinkKind<'a>) -> NewLink<'a> {
        let name = name.into();
        NewLink { common: VethPeer::new(name.clone()), name, kind }
    }

    /// Creates the link in another network namespace. Before Linux 6.15 the name must also be free
    /// in this network namespace, unless the link is given an [`index`](NewLink::with_index).
    pub fn with_netns(self, netns: BorrowedFd<'a>) -> Self {
        NewLink { common: self.common.with_netns(netns), ..self }
    }

    /// The Ethernet address; random by default.
    pub fn with_mac(self, mac: impl Into<Option<MacAddress>>) -> Self {
        NewLink { common: self.common.with_mac(mac), ..self }
    }

    /// The MTU in bytes; 0 for the kernel's default.
    pub fn with_mtu(self, mtu: u32) -> Self {
        NewLink { common: self.common.with_mtu(mtu), ..self }
    }

    /// The index, which must be free in the link's namespace and in this one; 0 for the kernel's
    /// choice. An index in use fails with `EBUSY` or `EEXIST`.
    pub fn with_index(mut self, index: u32) -> Self {
        self.common.message.header.index = index;
        self
    }

    /// Adds the link to a bridge, bond or VRF.
    pub fn with_master(mut self, index: u32) -> Self {
        self.common.message.attributes.push(LinkAttribute::Controller(index));
        self
    }

    pub fn set_up(self) -> Self {
        self.set_flag(LinkFlags::Up)
    }

    /// Sets promiscuous mode.
    pub fn set_promisc(self) -> Self {
        self.set_flag(LinkFlags::Promisc)
    }

    fn set_flag(mut self, flag: LinkFlags) -> Self {
        self.common.message.header.flags |= flag;
        self.common.message.header.change_mask |= flag;
        self
    }

    /// The length of the transmit queue.
    pub fn with_txqlen(mut self, packets: u32) -> Self {
        self.common.message.attributes.push(LinkAttribute::TxQueueLen(packets));
        self
    }

    fn to_request(&self) -> NetlinkRequest {
        let mut message = self.common.to_message();
        if let LinkKind::Macvlan { link, .. }
        | LinkKind::Ipvlan { link, .. }
        | LinkKind::Vlan { link, .. } = self.kind
        {
            message.attributes.push(LinkAttribute::Link(link));
        }
        let (kind, data) = self.kind.kind_and_data();
        let info = std::iter::once(LinkInfo::Kind(kind)).chain(data.map(LinkInfo::Data));
        message.attributes.push(LinkAttribute::LinkInfo(info.collect()));
        NetlinkRequest::new_route(RTM_NEWLINK, &message)
    }

    fn refusal_error(&self, failure: RequestFailure) -> NetlinkError {
        let lacks_driver = failure.errno == Errno::EOPNOTSUPP;
        let error =
            failure.into_error("add link", &format_args!("{:?} ({})", self.name, self.kind));
        match self.kind {
            _ if !lacks_driver => error,
            LinkKind::Bridge { vlan_filtering: Some(true) } => error.with_remedy(
                "this kernel lacks VLANs on bridges (CONFIG_BRIDGE_VLAN_FILTERING): remove \
                 \"vlan\" and \"vlanTrunk\""
                    .to_owned(),
            ),
            LinkKind::Vlan { .. } => error.with_missing_module("8021q"),
            LinkKind::Bond(_) => error.with_missing_module("bonding"),
            _ => error.with_missing_module(&self.kind.to_string()),
        }
    }
}

impl LinkKind<'_> {
    /// `IFLA_INFO_KIND` and `IFLA_INFO_DATA`.
    fn kind_and_data(&self) -> (InfoKind, Option<InfoData>) {
        match self {
            LinkKind::Bridge { vlan_filtering } => (
                InfoKind::Bridge,
                vlan_filtering.map(|on| InfoData::Bridge(vec![InfoBridge::VlanFiltering(on)])),
            ),
            LinkKind::Bond(settings) => {
                (InfoKind::Bond, Some(InfoData::Bond(settings.to_attributes())))
            }
            LinkKind::Veth { peer } => {
                (InfoKind::Veth, Some(InfoData::Veth(InfoVeth::Peer(peer.to_message()))))
            }
            LinkKind::Dummy => (InfoKind::Dummy, None),
            LinkKind::Ifb => (InfoKind::Ifb, None),
            LinkKind::Macvlan { mode, bc_queue_len, .. } => {
                let mut data = vec![InfoMacVlan::Mode((*mode as u32).into())];
                if *bc_queue_len > 0 {
                    data.push(InfoMacVlan::BcQueueLen(*bc_queue_len));
                }
                (InfoKind::MacVlan, Some(InfoData::MacVlan(data)))
            }
            LinkKind::Ipvlan { mode, .. } => {
                let data = vec![InfoIpVlan::Mode((*mode as u16).into())];
                (InfoKind::IpVlan, Some(InfoData::IpVlan(data)))
            }
            LinkKind::Vlan { id, .. } => {
                (InfoKind::Vlan, Some(InfoData::Vlan(vec![InfoVlan::Id(*id)])))
            }
            LinkKind::Vrf { table } => {
                (InfoKind::Vrf, Some(InfoData::Vrf(vec![InfoVrf::TableId(*table)])))
            }
        }
    }
}

impl fmt::Display for LinkKind<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind_and_data().0.fmt(f)
    }
}

impl Netlink {
    /// Creates a link; for the kind veth, both ends.
    pub fn add_link(&self, link: &NewLink<'_>) -> NetlinkResult<()> {
        let created = self.socket.request_ack(&link.to_request(), NLM_F_CREATE | NLM_F_EXCL);
        created.map_err(|failure| link.refusal_error(failure))
    }

    /// Like [`Netlink::add_link`], for a link in this network namespace. Returns the link as the
    /// reply describes it, before the link joins its master; kernels before 6.2 need a second
    /// request.
    pub fn add_and_read_link(&self, link: &NewLink<'_>) -> NetlinkResult<Link> {
        let created =
            self.socket.request_ack_and_echo(&link.to_request(), NLM_F_CREATE | NLM_F_EXCL);
        let echo = created.map_err(|failure| link.refusal_error(failure))?;
        match echo.and_then(|body| Link::parse(&body)) {
            Some(created) => Ok(created),
            None => self.require_link(&link.name).inspect_err(|_| {
                // The caller does not know that the link exists.
                drop(self.delete_link(&link.name));
            }),
        }
    }
}
