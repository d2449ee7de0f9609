//! Links: changing them, with as few messages as the kernel allows.

use std::os::fd::{AsRawFd, BorrowedFd};

use nix::libc;
use nix::libc::RTM_NEWLINK;
use rtnetlink::packet_core::DefaultNla;
use rtnetlink::packet_route::link::{
    BridgeBooleanOptionFlags, BridgeBooleanOptions, InfoBridge, InfoBridgePort, InfoData, InfoKind,
    InfoPortData, InfoPortKind, LinkAttribute, LinkMessage, Prop,
};

use super::Netlink;
use super::attribute::{Attributes, NLA_F_NESTED};
use super::error::Result;
use super::mac::Mac;
use super::new_link::Builder;
use super::packet::Packet;

/// From `linux/rtnetlink.h`; libc lacks it.
const RTM_DELLINKPROP: u16 = 109;

/// The parameters of IPv4 in `AF_INET` of `IFLA_AF_SPEC`, from `linux/if_link.h`.
const IFLA_INET_CONF: u16 = 1;

/// The family as the type of an attribute.
const AF_INET: u16 = 2;

/// Which of them, from `linux/ip.h`.
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

/// Changes to a link, all made by one [`Netlink::set_link`].
#[derive(Debug, Default)]
pub struct LinkChange {
    builder: Builder,
    master: Option<u32>,
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

    /// Of a bridge: its ports learn no sources of link-local frames. Kernels before 4.20 ignore it.
    pub fn no_link_local_learning() -> LinkChange {
        let option = BridgeBooleanOptionFlags::NoLinkLocalLearn;
        LinkChange::bridge(InfoBridge::MultiBoolOpt(BridgeBooleanOptions {
            value: option,
            mask: option,
        }))
    }

    fn bridge(option: InfoBridge) -> LinkChange {
        let builder = Builder::new_with_info_kind(InfoKind::Bridge);
        let builder = builder.set_info_data(InfoData::Bridge(vec![option]));
        LinkChange { builder, ..LinkChange::default() }
    }

    fn with(mut self, change: impl FnOnce(Builder) -> Builder) -> Self {
        self.builder = change(self.builder);
        self
    }

    #[must_use]
    pub fn up(self) -> Self {
        self.with(Builder::up)
    }

    #[must_use]
    pub fn down(self) -> Self {
        self.with(Builder::down)
    }

    /// Renames it; most kernels refuse that while it is up.
    #[must_use]
    pub fn name(self, name: impl Into<String>) -> Self {
        self.with(|builder| builder.name(name))
    }

    /// Gives it a free text, of 255 bytes at most; an empty one takes it away.
    #[must_use]
    pub fn alias(self, text: &str) -> Self {
        // Without the NUL, which would be an alias that is empty.
        let alias = DefaultNla::new(libc::IFLA_IFALIAS, text.as_bytes().to_vec());
        self.with(|builder| builder.append_extra_attribute(LinkAttribute::Other(alias)))
    }

    #[must_use]
    pub fn mtu(self, mtu: u32) -> Self {
        self.with(|builder| builder.mtu(mtu))
    }

    /// Sets the Ethernet address.
    #[must_use]
    pub fn mac(self, mac: Mac) -> Self {
        self.with(|builder| builder.address(mac.0.to_vec()))
    }

    /// Makes it a port of a bridge, bond or VRF.
    #[must_use]
    pub fn master(mut self, index: u32) -> Self {
        self.master = Some(index);
        self
    }

    /// Takes it out of its bridge, bond or VRF.
    #[must_use]
    pub fn no_master(self) -> Self {
        self.master(0)
    }

    /// Whether it receives what is not addressed to it.
    #[must_use]
    pub fn promisc(self, switch: Switch) -> Self {
        self.with(|builder| builder.promiscuous(switch.into()))
    }

    /// Whether it receives every multicast.
    #[must_use]
    pub fn allmulti(self, switch: Switch) -> Self {
        self.with(|builder| builder.allmulticast(switch.into()))
    }

    /// Whether the kernel announces its IPv4 addresses when it comes up: `arp_notify` below
    /// `/proc/sys/net/ipv4/conf`. It needs a message of its own before the message that
    /// sets the link up, because the kernel would set the link up first.
    #[must_use]
    pub fn arp_notify(self, switch: Switch) -> Self {
        let mut spec = Attributes::new();
        spec.nest(AF_INET, |inet| {
            inet.nest(IFLA_INET_CONF, |conf| {
                conf.u32(IPV4_DEVCONF_ARP_NOTIFY, bool::from(switch).into());
            });
        });
        let spec = DefaultNla::new(libc::IFLA_AF_SPEC | NLA_F_NESTED, spec.into_bytes());
        self.with(|builder| builder.append_extra_attribute(LinkAttribute::Other(spec)))
    }

    /// Sets the length of the transmit queue.
    #[must_use]
    pub fn txqlen(self, packets: u32) -> Self {
        self.with(|builder| builder.txqueuelen(packets))
    }

    /// Moves it into another namespace, where it is down and may get another index. A name given
    /// beside is that in the other namespace, and all other changes are made there; when one of
    /// these fails, the link is there already.
    #[must_use]
    pub fn netns(self, netns: BorrowedFd<'_>) -> Self {
        self.with(|builder| builder.setns_by_fd(netns.as_raw_fd()))
    }

    /// As a port of a bridge: whether frames may leave through the port they came in by.
    #[must_use]
    pub fn hairpin(mut self, switch: Switch) -> Self {
        self.port.push(InfoBridgePort::HairpinMode(switch.into()));
        self
    }

    /// As a port of a bridge: whether it exchanges frames only with ports that are not isolated.
    #[must_use]
    pub fn isolated(mut self, switch: Switch) -> Self {
        self.port.push(InfoBridgePort::Isolated(switch.into()));
        self
    }

    /// The messages to send, in order. Settings of a port need a message of their own when the
    /// link becomes that port by the same change: the kernel looks for the bridge before it
    /// enslaves the link, and would skip them in silence.
    fn messages(self, index: u32) -> Vec<LinkMessage> {
        let mut messages = Vec::with_capacity(1);
        let mut builder = self.builder.index(index);
        if let Some(master) = self.master {
            if self.port.is_empty() {
                builder = builder.controller(master);
            } else {
                messages.push(Builder::new().index(index).controller(master).build());
            }
        }
        if !self.port.is_empty() {
            builder = builder
                .set_port_kind(InfoPortKind::Bridge)
                .set_port_data(InfoPortData::BridgePort(self.port));
        }
        messages.push(builder.build());
        messages
    }
}

impl Netlink {
    /// Changes the link with this index.
    pub fn set_link(&self, index: u32, change: LinkChange) -> Result<()> {
        for message in change.messages(index) {
            // RTM_SETLINK ignores the settings of a port; RTM_NEWLINK takes everything.
            self.ack(Packet::new(RTM_NEWLINK, &message), 0)
                .map_err(|failure| failure.doing("change", || self.label(index)))?;
        }
        Ok(())
    }

    /// Takes alternative names away from the link with this index.
    pub fn del_alt_names(&self, index: u32, names: &[String]) -> Result<()> {
        let mut message = LinkMessage::default();
        message.header.index = index;
        let names = names.iter().cloned().map(Prop::AltIfName).collect();
        message.attributes.push(LinkAttribute::PropList(names));
        self.ack(Packet::new(RTM_DELLINKPROP, &message), 0)
            .map_err(|failure| failure.doing("take the alternative names of", || self.label(index)))
    }
}
