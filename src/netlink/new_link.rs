//! Links: creating them, with one message each.

use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::libc::RTM_NEWLINK;
use rtnetlink::packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use rtnetlink::packet_route::link::{
    InfoBridge, InfoData, InfoIpVlan, InfoKind, InfoMacVlan, InfoVeth, InfoVlan, InfoVrf,
    LinkMessage,
};
use rtnetlink::{LinkMessageBuilder, LinkUnspec};

use super::Netlink;
use super::error::{Error, Failure, Result};
use super::kind::{IpvlanMode, MacvlanMode};
use super::link::{Link, quoted};
use super::mac::Mac;
use super::packet::Packet;

pub(super) type Builder = LinkMessageBuilder<LinkUnspec>;

/// What a new link is, with the settings only that kind has.
#[derive(Clone, Debug)]
pub enum LinkKind<'a> {
    Bridge {
        /// Whether ports belong to VLANs; `None` leaves it to the kernel.
        vlan_filtering: Option<bool>,
    },
    /// One end of a veth pair; the other one is made by the same message.
    Veth {
        peer: VethPeer<'a>,
    },
    /// A device that swallows everything.
    Dummy,
    /// A device to shape what comes in.
    Ifb,
    /// An Ethernet address of its own on a lower device.
    Macvlan {
        /// The index of the lower device.
        link: u32,
        /// How its siblings see it.
        mode: MacvlanMode,
        /// How many broadcasts to it may wait; 0 leaves it to the kernel.
        bc_queue_len: u32,
    },
    /// The lower device's Ethernet address with other IP addresses.
    Ipvlan {
        /// The index of the lower device.
        link: u32,
        /// Where packets are switched.
        mode: IpvlanMode,
    },
    /// A VLAN of a lower device.
    Vlan {
        /// The index of the lower device.
        link: u32,
        /// The VLAN's number, 0 to 4094.
        id: u16,
    },
    Vrf {
        table: u32,
    },
}

/// What both ends of a veth pair and every other new link can have.
#[derive(Clone, Debug)]
struct Basics<'a> {
    name: String,
    netns: Option<BorrowedFd<'a>>,
    mac: Option<Mac>,
    mtu: u32,
}

impl<'a> Basics<'a> {
    fn new(name: String) -> Basics<'a> {
        Basics { name, netns: None, mac: None, mtu: 0 }
    }

    fn add_to(&self, builder: Builder) -> Builder {
        let mut builder = builder.name(self.name.clone());
        if self.mtu > 0 {
            builder = builder.mtu(self.mtu);
        }
        if let Some(mac) = self.mac {
            builder = builder.address(mac.0.to_vec());
        }
        if let Some(netns) = self.netns {
            builder = builder.setns_by_fd(netns.as_raw_fd());
        }
        builder
    }
}

/// The other end of a new veth pair. It is always down: the kernel configures it before the pair
/// is one, and refuses to switch on half of it.
#[derive(Clone, Debug)]
pub struct VethPeer<'a>(Basics<'a>);

impl<'a> VethPeer<'a> {
    /// A peer in the namespace where the first end is created.
    pub fn new(name: impl Into<String>) -> VethPeer<'a> {
        VethPeer(Basics::new(name.into()))
    }

    /// Puts it into another namespace right away.
    #[must_use]
    pub fn netns(mut self, netns: BorrowedFd<'a>) -> Self {
        self.0.netns = Some(netns);
        self
    }

    /// Its Ethernet address; without one the kernel makes one up.
    #[must_use]
    pub fn mac(mut self, mac: impl Into<Option<Mac>>) -> Self {
        self.0.mac = mac.into();
        self
    }

    /// Its MTU; 0 leaves it to the kernel.
    #[must_use]
    pub fn mtu(mut self, mtu: u32) -> Self {
        self.0.mtu = mtu;
        self
    }
}

/// A link to be created.
#[derive(Clone, Debug)]
pub struct NewLink<'a> {
    basics: Basics<'a>,
    kind: LinkKind<'a>,
    index: u32,
    master: Option<u32>,
    up: bool,
    promisc: bool,
    txqlen: Option<u32>,
}

impl<'a> NewLink<'a> {
    /// A link that is down and has what the kernel gives it.
    pub fn new(name: impl Into<String>, kind: LinkKind<'a>) -> NewLink<'a> {
        let basics = Basics::new(name.into());
        let (master, txqlen) = (None, None);
        NewLink { basics, kind, index: 0, master, up: false, promisc: false, txqlen }
    }

    /// Creates it in another namespace. Before Linux 6.15 the name must be free in this one as
    /// well, unless the link is given an [`index`](NewLink::index).
    #[must_use]
    pub fn netns(mut self, netns: BorrowedFd<'a>) -> Self {
        self.basics.netns = Some(netns);
        self
    }

    /// Its Ethernet address; without one the kernel makes one up.
    #[must_use]
    pub fn mac(mut self, mac: impl Into<Option<Mac>>) -> Self {
        self.basics.mac = mac.into();
        self
    }

    /// Its MTU; 0 leaves it to the kernel.
    #[must_use]
    pub fn mtu(mut self, mtu: u32) -> Self {
        self.basics.mtu = mtu;
        self
    }

    /// The index to give it, free where it is created and, if that is another namespace, in this
    /// one; 0 leaves it to the kernel. One that is taken fails with `EBUSY` or `EEXIST`.
    #[must_use]
    pub fn index(mut self, index: u32) -> Self {
        self.index = index;
        self
    }

    /// Makes it a port of a bridge, bond or VRF.
    #[must_use]
    pub fn master(mut self, index: u32) -> Self {
        self.master = Some(index);
        self
    }

    #[must_use]
    pub fn up(mut self) -> Self {
        self.up = true;
        self
    }

    /// Lets it receive what is not addressed to it.
    #[must_use]
    pub fn promisc(mut self) -> Self {
        self.promisc = true;
        self
    }

    /// The length of its transmit queue.
    #[must_use]
    pub fn txqlen(mut self, packets: u32) -> Self {
        self.txqlen = Some(packets);
        self
    }

    fn message(&self) -> LinkMessage {
        let mut builder = self.basics.add_to(Builder::new_with_info_kind(self.kind.info_kind()));
        if self.index != 0 {
            builder = builder.index(self.index);
        }
        if let Some(link) = self.kind.lower() {
            builder = builder.link(link);
        }
        if let Some(index) = self.master {
            builder = builder.controller(index);
        }
        if self.up {
            builder = builder.up();
        }
        if self.promisc {
            builder = builder.promiscuous(true);
        }
        if let Some(packets) = self.txqlen {
            builder = builder.txqueuelen(packets);
        }
        if let Some(data) = self.kind.info_data() {
            builder = builder.set_info_data(data);
        }
        builder.build()
    }
}

impl LinkKind<'_> {
    fn info_kind(&self) -> InfoKind {
        match self {
            LinkKind::Bridge { .. } => InfoKind::Bridge,
            LinkKind::Veth { .. } => InfoKind::Veth,
            LinkKind::Dummy => InfoKind::Dummy,
            LinkKind::Ifb => InfoKind::Ifb,
            LinkKind::Macvlan { .. } => InfoKind::MacVlan,
            LinkKind::Ipvlan { .. } => InfoKind::IpVlan,
            LinkKind::Vlan { .. } => InfoKind::Vlan,
            LinkKind::Vrf { .. } => InfoKind::Vrf,
        }
    }

    /// The module with the driver, to be named when the kernel has none.
    fn module(&self) -> String {
        match self {
            LinkKind::Vlan { .. } => "8021q".to_owned(),
            _ => self.to_string(),
        }
    }

    fn lower(&self) -> Option<u32> {
        match self {
            LinkKind::Macvlan { link, .. }
            | LinkKind::Ipvlan { link, .. }
            | LinkKind::Vlan { link, .. } => Some(*link),
            _ => None,
        }
    }

    fn info_data(&self) -> Option<InfoData> {
        Some(match self {
            LinkKind::Bridge { vlan_filtering } => {
                InfoData::Bridge(vec![InfoBridge::VlanFiltering((*vlan_filtering)?)])
            }
            LinkKind::Veth { peer } => {
                InfoData::Veth(InfoVeth::Peer(peer.0.add_to(Builder::new()).build()))
            }
            LinkKind::Macvlan { mode, bc_queue_len, .. } => {
                let mut info = vec![InfoMacVlan::Mode((*mode).into())];
                if *bc_queue_len > 0 {
                    info.push(InfoMacVlan::BcQueueLen(*bc_queue_len));
                }
                InfoData::MacVlan(info)
            }
            LinkKind::Ipvlan { mode, .. } => {
                InfoData::IpVlan(vec![InfoIpVlan::Mode((*mode).into())])
            }
            LinkKind::Vlan { id, .. } => InfoData::Vlan(vec![InfoVlan::Id(*id)]),
            LinkKind::Vrf { table } => InfoData::Vrf(vec![InfoVrf::TableId(*table)]),
            LinkKind::Dummy | LinkKind::Ifb => return None,
        })
    }
}

impl fmt::Display for LinkKind<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.info_kind().fmt(f)
    }
}

impl Netlink {
    /// Creates a link; with a veth, both ends.
    pub fn add_link(&self, link: &NewLink<'_>) -> Result<()> {
        let message = Packet::new(RTM_NEWLINK, &link.message());
        self.ack(message, NLM_F_CREATE | NLM_F_EXCL).map_err(|failure| link.refused(failure))
    }

    /// As [`Netlink::add_link`] for a link in this namespace, which the kernel describes in its
    /// answer, before it joins its master; kernels before 6.2 are asked for it.
    pub fn create_link(&self, link: &NewLink<'_>) -> Result<Link> {
        let message = Packet::new(RTM_NEWLINK, &link.message());
        let echo = self
            .ack_and_echo(message, NLM_F_CREATE | NLM_F_EXCL)
            .map_err(|failure| link.refused(failure))?;
        match echo.and_then(|body| Link::parse(&body)) {
            Some(created) => Ok(created),
            None => self.require_link(&link.basics.name).inspect_err(|_| {
                // The link is of no use, and the caller does not know that it exists.
                drop(self.del_link(&link.basics.name));
            }),
        }
    }
}

impl NewLink<'_> {
    fn refused(&self, failure: Failure) -> Error {
        let lacks_driver = failure.errno == Errno::EOPNOTSUPP;
        let error =
            failure.doing("add link", || format!("{} ({})", quoted(&self.basics.name), self.kind));
        if lacks_driver {
            if matches!(self.kind, LinkKind::Bridge { vlan_filtering: Some(true) }) {
                let option = "this kernel lacks VLANs on bridges (CONFIG_BRIDGE_VLAN_FILTERING): remove \"vlan\" and \"vlanTrunk\"";
                return error.with_remedy(option.to_owned());
            }
            let module = self.kind.module();
            return error.with_remedy(format!("load the kernel module {module:?} on the node"));
        }
        error
    }
}
