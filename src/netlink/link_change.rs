//! Links: changing them, with as few messages as the kernel allows.

use std::os::fd::{AsRawFd, BorrowedFd};

use nix::libc::{self, RTM_NEWLINK};
use rtnetlink::packet_core::{DefaultNla, NLA_F_NESTED};
use rtnetlink::packet_route::link::{
    BridgeBooleanOptionFlags, BridgeBooleanOptions, InfoBridge, InfoBridgePort, InfoData, InfoKind,
    InfoPortData, InfoPortKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage, Prop,
};

use super::Netlink;
use super::attribute::Attributes;
use super::error::Result;
use super::link::message;
use super::mac::Mac;
use super::request::Request;

/// From `linux/rtnetlink.h`; libc lacks it.
const RTM_DELLINKPROP: u16 = 109;

/// The parameters of IPv4 in `AF_INET` of `IFLA_AF_SPEC`, from `linux/if_link.h`.
const IFLA_INET_CONF: u16 = 1;

/// The family as the type of an attribute.
const AF_INET: u16 = 2;

/// The parameter's attribute in `IFLA_INET_CONF`, from `linux/ip.h`.
const IPV4_DEVCONF_ARP_NOTIFY: u16 = 22;

/// A setting that is either on or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switch {
    On,
    Off,
}

impl From<bool> for Switch {
    fn from(on: bool) -> Switch {
        if on { Switch::On } else { Switch::Off }
    }
}

impl From<Switch> for bool {
    fn from(switch: Switch) -> bool {
        switch == Switch::On
    }
}

/// Changes to a link for one [`Netlink::set_link`].
#[derive(Debug, Default)]
#[must_use]
pub struct LinkChange {
    message: LinkMessage,
    master: Option<u32>,
    /// Settings of a port of a bridge.
    port: Vec<InfoBridgePort>,
}

impl LinkChange {
    pub fn new() -> LinkChange {
        LinkChange::default()
    }

    /// Of a bridge: its ports belong to VLANs from now on.
    pub fn vlan_filtering() -> LinkChange {
        LinkChange::bridge(InfoBridge::VlanFiltering(true))
    }

    /// Of a bridge: its ports do not learn the source addresses of link-local frames. Ignored before
    /// Linux 4.20.
    pub fn no_link_local_learning() -> LinkChange {
        let value = BridgeBooleanOptionFlags::NoLinkLocalLearn;
        LinkChange::bridge(InfoBridge::MultiBoolOpt(BridgeBooleanOptions { value, mask: value }))
    }

    fn bridge(option: InfoBridge) -> LinkChange {
        let data = LinkInfo::Data(InfoData::Bridge(vec![option]));
        let info = vec![LinkInfo::Kind(InfoKind::Bridge), data];
        LinkChange::new().attribute(LinkAttribute::LinkInfo(info))
    }

    fn attribute(mut self, attribute: LinkAttribute) -> Self {
        self.message.attributes.push(attribute);
        self
    }

    fn flag(mut self, flag: LinkFlags, switch: Switch) -> Self {
        self.message.header.change_mask |= flag;
        self.message.header.flags.set(flag, switch.into());
        self
    }

    pub fn up(self) -> Self {
        self.flag(LinkFlags::Up, Switch::On)
    }

    pub fn down(self) -> Self {
        self.flag(LinkFlags::Up, Switch::Off)
    }

    /// Renames the link; most kernels refuse that while the link is up.
    pub fn name(self, name: impl Into<String>) -> Self {
        self.attribute(LinkAttribute::IfName(name.into()))
    }

    /// Sets the alias, at most 255 bytes; an empty text removes it.
    pub fn alias(self, text: &str) -> Self {
        // `IfAlias` has a terminating NUL, which would be an empty alias instead of none.
        let alias = DefaultNla::new(libc::IFLA_IFALIAS, text.as_bytes().to_vec());
        self.attribute(LinkAttribute::Other(alias))
    }

    pub fn mtu(self, mtu: u32) -> Self {
        self.attribute(LinkAttribute::Mtu(mtu))
    }

    /// Sets the Ethernet address.
    pub fn mac(self, mac: Mac) -> Self {
        self.attribute(LinkAttribute::Address(mac.0.to_vec()))
    }

    /// Adds the link to a bridge, bond or VRF.
    pub fn master(mut self, index: u32) -> Self {
        self.master = Some(index);
        self
    }

    /// Removes the link from its bridge, bond or VRF.
    pub fn no_master(self) -> Self {
        self.master(0)
    }

    /// Promiscuous mode.
    pub fn promisc(self, switch: Switch) -> Self {
        self.flag(LinkFlags::Promisc, switch)
    }

    /// Whether the link receives all multicast packets.
    pub fn allmulti(self, switch: Switch) -> Self {
        self.flag(LinkFlags::Allmulti, switch)
    }

    /// Whether the kernel announces the link's IPv4 addresses when it comes up: `arp_notify` below
    /// `/proc/sys/net/ipv4/conf`. Must precede the message that sets the link up, because the kernel
    /// applies flags before this parameter.
    pub fn arp_notify(self, switch: Switch) -> Self {
        let mut spec = Attributes::new();
        spec.nest(AF_INET, |inet| {
            let on = u32::from(bool::from(switch));
            inet.nest(IFLA_INET_CONF, |conf| conf.u32(IPV4_DEVCONF_ARP_NOTIFY, on))
        });
        let spec = DefaultNla::new(libc::IFLA_AF_SPEC | NLA_F_NESTED, spec.as_bytes().to_vec());
        self.attribute(LinkAttribute::Other(spec))
    }

    /// Sets the length of the transmit queue.
    pub fn txqlen(self, packets: u32) -> Self {
        self.attribute(LinkAttribute::TxQueueLen(packets))
    }

    /// Moves the link into another namespace, where it is down and may get another index. All other
    /// changes, such as a name, are applied in the other namespace; when one of them fails, the link is
    /// already there.
    pub fn netns(self, netns: BorrowedFd<'_>) -> Self {
        self.attribute(LinkAttribute::NetNsFd(netns.as_raw_fd()))
    }

    /// Of a port of a bridge: whether frames may leave through the port on which they arrived.
    pub fn hairpin(mut self, switch: Switch) -> Self {
        self.port.push(InfoBridgePort::HairpinMode(switch.into()));
        self
    }

    /// Of a port of a bridge: whether frames are exchanged only with ports that are not isolated.
    pub fn isolated(mut self, switch: Switch) -> Self {
        self.port.push(InfoBridgePort::Isolated(switch.into()));
        self
    }

    /// The messages to send, in order. Settings of a port need a message of their own when the
    /// link becomes that port by the same change: the kernel looks up the bridge before it
    /// enslaves the link, and would silently ignore them.
    fn messages(self, index: u32) -> Vec<LinkMessage> {
        let mut messages = Vec::with_capacity(1);
        let mut last = self.message;
        last.header.index = index;
        if let Some(master) = self.master.map(LinkAttribute::Controller) {
            if self.port.is_empty() {
                last.attributes.push(master);
            } else {
                messages.push(message(index, vec![master]));
            }
        }
        if !self.port.is_empty() {
            let data = LinkInfo::PortData(InfoPortData::BridgePort(self.port));
            let info = vec![LinkInfo::PortKind(InfoPortKind::Bridge), data];
            last.attributes.push(LinkAttribute::LinkInfo(info));
        }
        messages.push(last);
        messages
    }
}

impl Netlink {
    /// Changes the link with this index.
    pub fn set_link(&self, index: u32, change: LinkChange) -> Result<()> {
        // RTM_NEWLINK, because RTM_SETLINK ignores the settings of a port.
        change.messages(index).iter().try_for_each(|message| {
            let request = Request::route(RTM_NEWLINK, message);
            self.socket.change(&request, 0, "change", &self.label(index))
        })
    }

    /// Deletes alternative names of the link with this index.
    pub fn del_alt_names(&self, index: u32, names: &[String]) -> Result<()> {
        let names = names.iter().cloned().map(Prop::AltIfName).collect();
        let message = message(index, vec![LinkAttribute::PropList(names)]);
        let request = Request::route(RTM_DELLINKPROP, &message);
        let op = "take the alternative names of";
        self.socket.change(&request, 0, op, &self.label(index))
    }
}
