//! Links: changes them, by as few messages as the kernel allows.

use std::os::fd::{AsRawFd, BorrowedFd};

use nix::libc::{self, RTM_NEWLINK};
use rtnetlink::packet_core::{DefaultNla, NLA_F_NESTED};
use rtnetlink::packet_route::link::{
    BridgeBooleanOptionFlags, BridgeBooleanOptions, InfoBridge, InfoBridgePort, InfoData, InfoKind,
    InfoPortData, InfoPortKind, LinkAttribute, LinkFlags, LinkInfo, LinkMessage, Prop,
};

use super::Netlink;
use super::attribute::AttributeBuilder;
use super::error::NetlinkResult;
use super::link::link_message;
use super::mac::MacAddress;
use super::request::NetlinkRequest;

/// From `linux/rtnetlink.h`; libc lacks it.
const RTM_DELLINKPROP: u16 = 109;

/// The parameters of IPv4 in `AF_INET` of `IFLA_AF_SPEC`, from `linux/if_link.h`.
const IFLA_INET_CONF: u16 = 1;

/// The address family, as the type of an attribute.
const AF_INET: u16 = 2;

/// The attribute of `arp_notify` in `IFLA_INET_CONF`, from `linux/ip.h`.
const IPV4_DEVCONF_ARP_NOTIFY: u16 = 22;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnOffSetting {
    On,
    Off,
}

impl From<bool> for OnOffSetting {
    fn from(on: bool) -> OnOffSetting {
        if on { OnOffSetting::On } else { OnOffSetting::Off }
    }
}

impl From<OnOffSetting> for bool {
    fn from(switch: OnOffSetting) -> bool {
        switch == OnOffSetting::On
    }
}

/// Changes to a link for one [`Netlink::change_link`].
#[derive(Debug, Default)]
#[must_use]
pub struct LinkChange {
    message: LinkMessage,
    master: Option<u32>,
    port: Vec<InfoBridgePort>,
}

impl LinkChange {
    pub fn new() -> LinkChange {
        LinkChange::default()
    }

    /// Enables VLANs for the ports of a bridge.
    pub fn enable_vlan_filtering() -> LinkChange {
        LinkChange::bridge_option(InfoBridge::VlanFiltering(true))
    }

    /// Stops the ports of a bridge from learning the source addresses of link-local frames. Ignored
    /// before Linux 4.20.
    pub fn no_link_local_learning() -> LinkChange {
        let value = BridgeBooleanOptionFlags::NoLinkLocalLearn;
        LinkChange::bridge_option(InfoBridge::MultiBoolOpt(BridgeBooleanOptions {
            value,
            mask: value,
        }))
    }

    fn bridge_option(option: InfoBridge) -> LinkChange {
        let data = LinkInfo::Data(InfoData::Bridge(vec![option]));
        let info = vec![LinkInfo::Kind(InfoKind::Bridge), data];
        LinkChange::new().push_attribute(LinkAttribute::LinkInfo(info))
    }

    fn push_attribute(mut self, attribute: LinkAttribute) -> Self {
        self.message.attributes.push(attribute);
        self
    }

    fn set_flag(mut self, flag: LinkFlags, switch: OnOffSetting) -> Self {
        self.message.header.change_mask |= flag;
        self.message.header.flags.set(flag, switch.into());
        self
    }

    pub fn set_up(self) -> Self {
        self.set_flag(LinkFlags::Up, OnOffSetting::On)
    }

    pub fn set_down(self) -> Self {
        self.set_flag(LinkFlags::Up, OnOffSetting::Off)
    }

    /// Renames the link; most kernels refuse that while the link is up.
    pub fn set_name(self, name: impl Into<String>) -> Self {
        self.push_attribute(LinkAttribute::IfName(name.into()))
    }

    /// Sets the alias, at most 255 bytes; an empty text removes it.
    pub fn set_alias(self, text: &str) -> Self {
        // `IfAlias` has a terminating NUL, which would be an empty alias instead of none.
        let alias = DefaultNla::new(libc::IFLA_IFALIAS, text.as_bytes().to_vec());
        self.push_attribute(LinkAttribute::Other(alias))
    }

    pub fn set_mtu(self, mtu: u32) -> Self {
        self.push_attribute(LinkAttribute::Mtu(mtu))
    }

    pub fn set_mac(self, mac: MacAddress) -> Self {
        self.push_attribute(LinkAttribute::Address(mac.0.to_vec()))
    }

    /// Adds the link to a bridge, bond or VRF.
    pub fn set_master(mut self, index: u32) -> Self {
        self.master = Some(index);
        self
    }

    /// Removes the link from its bridge, bond or VRF.
    pub fn clear_master(self) -> Self {
        self.set_master(0)
    }

    pub fn set_promisc(self, switch: OnOffSetting) -> Self {
        self.set_flag(LinkFlags::Promisc, switch)
    }

    /// Whether the link receives all multicast packets.
    pub fn set_allmulti(self, switch: OnOffSetting) -> Self {
        self.set_flag(LinkFlags::Allmulti, switch)
    }

    /// Whether the kernel announces the link's IPv4 addresses when it comes up: `arp_notify` below
    /// `/proc/sys/net/ipv4/conf`. Must precede the message that sets the link up, because the
    /// kernel applies flags before this parameter.
    pub fn set_arp_notify(self, switch: OnOffSetting) -> Self {
        let mut spec = AttributeBuilder::new();
        spec.put_nested(AF_INET, |inet| {
            let on = u32::from(bool::from(switch));
            inet.put_nested(IFLA_INET_CONF, |conf| conf.put_u32(IPV4_DEVCONF_ARP_NOTIFY, on))
        });
        let spec = DefaultNla::new(libc::IFLA_AF_SPEC | NLA_F_NESTED, spec.as_bytes().to_vec());
        self.push_attribute(LinkAttribute::Other(spec))
    }

    /// Sets the length of the transmit queue.
    pub fn set_txqlen(self, packets: u32) -> Self {
        self.push_attribute(LinkAttribute::TxQueueLen(packets))
    }

    /// Moves the link into another namespace, where it is down and may get another index. All other
    /// changes, such as a name, are applied in the other namespace; when one of them fails, the
    /// link is already there.
    pub fn move_to_netns(self, netns: BorrowedFd<'_>) -> Self {
        self.push_attribute(LinkAttribute::NetNsFd(netns.as_raw_fd()))
    }

    /// Sets whether frames may leave through the port of a bridge on which they arrived.
    pub fn set_hairpin(mut self, switch: OnOffSetting) -> Self {
        self.port.push(InfoBridgePort::HairpinMode(switch.into()));
        self
    }

    /// Sets whether a port of a bridge exchanges frames only with ports that are not isolated.
    pub fn set_isolated(mut self, switch: OnOffSetting) -> Self {
        self.port.push(InfoBridgePort::Isolated(switch.into()));
        self
    }

    /// The messages to send, in order. If the same change makes the link a port and sets the
    /// settings of that port, the settings need a message of their own: the kernel looks up the
    /// bridge before it adds the link to the bridge, and would silently ignore the settings.
    fn into_messages(self, index: u32) -> Vec<LinkMessage> {
        let mut messages = Vec::with_capacity(1);
        let mut last = self.message;
        last.header.index = index;
        if let Some(master) = self.master.map(LinkAttribute::Controller) {
            if self.port.is_empty() {
                last.attributes.push(master);
            } else {
                messages.push(link_message(index, vec![master]));
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
    pub fn change_link(&self, index: u32, change: LinkChange) -> NetlinkResult<()> {
        // RTM_NEWLINK, because RTM_SETLINK ignores the settings of a port.
        change.into_messages(index).iter().try_for_each(|message| {
            let request = NetlinkRequest::new_route(RTM_NEWLINK, message);
            self.socket.request_change(&request, 0, "change", &self.link_label(index))
        })
    }

    pub fn delete_alt_name(&self, index: u32, name: &str) -> NetlinkResult<()> {
        let names = vec![Prop::AltIfName(name.to_owned())];
        let message = link_message(index, vec![LinkAttribute::PropList(names)]);
        let request = NetlinkRequest::new_route(RTM_DELLINKPROP, &message);
        let op = "take an alternative name of";
        self.socket.request_change(&request, 0, op, &self.link_label(index))
    }
}
