//! VLANs of the ports of a bridge.

use std::ops::RangeInclusive;

use nix::libc;
use nix::libc::{RTM_DELLINK, RTM_GETLINK, RTM_SETLINK};
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::link::{
    AfSpecBridge, BridgeVlanInfo, BridgeVlanInfoFlags as Flags, LinkAttribute, LinkExtentMask,
    LinkHeader, LinkMessage,
};

use super::Netlink;
use super::error::Result;
use super::packet::{Attr, Packet, attrs};

/// `IFLA_BRIDGE_VLAN_INFO`, missing in libc.
const IFLA_BRIDGE_VLAN_INFO: u16 = 2;
/// Length of `struct ifinfomsg`.
const HEADER_LEN: usize = 16;

/// What a port does with the frames of a VLAN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tagging {
    /// They have a tag, in and out.
    Tagged,
    /// They leave without a tag. What comes in untagged is of another VLAN, or of none.
    Untagged,
    /// They leave without a tag, and what comes in untagged is theirs (PVID).
    Native,
}

/// VLANs that a port is in, all in the same way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortVlans {
    /// Their numbers, 1 to 4094.
    pub ids: RangeInclusive<u16>,
    /// What happens to their frames.
    pub tagging: Tagging,
}

/// A port and its VLANs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VlanPort {
    /// The index of the port.
    pub index: u32,
    /// The index of its bridge; a bridge itself is listed as a port as well, without one.
    pub master: Option<u32>,
    pub vlans: Vec<PortVlans>,
}

impl PortVlans {
    /// A single VLAN whose frames have no tag at this port.
    pub fn native(id: u16) -> PortVlans {
        PortVlans { ids: id..=id, tagging: Tagging::Native }
    }

    fn flags(&self) -> Flags {
        match self.tagging {
            Tagging::Tagged => Flags::empty(),
            Tagging::Untagged => Flags::Untagged,
            Tagging::Native => Flags::Untagged | Flags::Pvid,
        }
    }

    /// One entry, or two for the ends of a range.
    fn entries(&self) -> impl Iterator<Item = AfSpecBridge> {
        let (first, last, flags) = (*self.ids.start(), *self.ids.end(), self.flags());
        let entry = |flags, vid| AfSpecBridge::VlanInfo(BridgeVlanInfo { flags, vid });
        let (start, end) = if first == last {
            (entry(flags, first), None)
        } else {
            let end = entry(flags | Flags::RangeEnd, last);
            (entry(flags | Flags::RangeBegin, first), Some(end))
        };
        std::iter::once(start).chain(end)
    }
}

impl VlanPort {
    /// How it is in this VLAN; `None` if it is not.
    pub fn tagging(&self, id: u16) -> Option<Tagging> {
        self.vlans.iter().find(|vlans| vlans.ids.contains(&id)).map(|vlans| vlans.tagging)
    }

    pub(super) fn parse(body: &[u8]) -> Option<VlanPort> {
        let mut port =
            VlanPort { index: LinkHeader::parse(body).ok()?.index, ..VlanPort::default() };
        for attr in attrs(body.get(HEADER_LEN..)?) {
            match attr.kind {
                libc::IFLA_MASTER => port.master = attr.u32().filter(|index| *index != 0),
                libc::IFLA_AF_SPEC => port.vlans = vlans(attr),
                _ => {}
            }
        }
        Some(port)
    }
}

/// The VLANs of an answer, where ranges have two entries.
fn vlans(spec: Attr<'_>) -> Vec<PortVlans> {
    let mut vlans = Vec::new();
    let mut begin = None;
    for attr in spec.nested().filter(|attr| attr.kind == IFLA_BRIDGE_VLAN_INFO) {
        let Ok(BridgeVlanInfo { flags, vid }) = BridgeVlanInfo::try_from(attr.value) else {
            continue;
        };
        if flags.contains(Flags::RangeBegin) {
            begin = Some(vid);
            continue;
        }
        let tagging = if flags.contains(Flags::Pvid) {
            Tagging::Native
        } else if flags.contains(Flags::Untagged) {
            Tagging::Untagged
        } else {
            Tagging::Tagged
        };
        vlans.push(PortVlans { ids: begin.take().unwrap_or(vid)..=vid, tagging });
    }
    vlans
}

fn message(index: u32, attribute: LinkAttribute) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.interface_family = AddressFamily::Bridge;
    message.header.index = index;
    message.attributes.push(attribute);
    message
}

impl Netlink {
    /// Puts the port with this index into VLANs, by one message.
    pub fn add_port_vlans(&self, port: u32, vlans: &[PortVlans]) -> Result<()> {
        let spec = vlans.iter().flat_map(PortVlans::entries).collect();
        let message = message(port, LinkAttribute::AfSpecBridge(spec));
        self.ack(Packet::new(RTM_SETLINK, &message), 0)
            .map_err(|failure| failure.doing("set VLANs of", || self.label(port)))
    }

    /// Takes the port out of VLANs; those it is not in do not matter.
    pub fn del_port_vlans(&self, port: u32, vlans: &[PortVlans]) -> Result<()> {
        let spec = vlans.iter().flat_map(PortVlans::entries).collect();
        let message = message(port, LinkAttribute::AfSpecBridge(spec));
        self.ack(Packet::new(RTM_DELLINK, &message), 0)
            .map_err(|failure| failure.doing("remove VLANs of", || self.label(port)))
    }

    /// The VLANs of the ports of all bridges: the kernel has no question for one of them that
    /// old kernels understand.
    pub fn dump_port_vlans(&self) -> Result<Vec<VlanPort>> {
        let mask = LinkAttribute::ExtMask(vec![LinkExtentMask::BrvlanCompressed]);
        let bodies = self
            .dump(&Packet::new(RTM_GETLINK, &message(0, mask)))
            .map_err(|e| e.doing("list", || "VLANs of bridges".to_owned()))?;
        Ok(bodies.iter().filter_map(|body| VlanPort::parse(body)).collect())
    }
}
