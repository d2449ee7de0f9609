//! VLANs of the ports of a bridge.

use std::ops::RangeInclusive;

use nix::libc::{self, RTM_DELLINK, RTM_GETLINK, RTM_SETLINK};
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::link::{
    AfSpecBridge, BridgeVlanInfo, BridgeVlanInfoFlags as Flags, LinkAttribute, LinkExtentMask,
    LinkHeader,
};

use super::Netlink;
use super::attribute::{Attr, attrs};
use super::error::Result;
use super::link::{IFINFOMSG, message};
use super::request::Request;

/// `IFLA_BRIDGE_VLAN_INFO`, missing in libc.
const IFLA_BRIDGE_VLAN_INFO: u16 = 2;

/// The tags of a VLAN's frames at a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tagging {
    /// Frames are tagged in both directions.
    Tagged,
    /// Frames leave untagged. Untagged incoming frames belong to another VLAN, or to none.
    Untagged,
    /// Frames leave untagged, and untagged incoming frames belong to the VLAN (PVID).
    Native,
}

/// VLANs of a port with the same tagging.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortVlans {
    /// The VLAN ids, 1 to 4094.
    pub ids: RangeInclusive<u16>,
    pub tagging: Tagging,
}

/// A port and its VLANs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VlanPort {
    /// The index of the port.
    pub index: u32,
    /// The index of the bridge; `None` for a bridge, which is a port of itself.
    pub master: Option<u32>,
    pub vlans: Vec<PortVlans>,
}

impl PortVlans {
    /// A single native VLAN.
    pub fn native(id: u16) -> PortVlans {
        PortVlans { ids: id..=id, tagging: Tagging::Native }
    }
}

impl VlanPort {
    /// The tagging of this VLAN; `None` if the port does not belong to it.
    pub fn tagging(&self, id: u16) -> Option<Tagging> {
        self.vlans.iter().find(|vlans| vlans.ids.contains(&id)).map(|vlans| vlans.tagging)
    }

    pub(super) fn parse(body: &[u8]) -> Option<VlanPort> {
        let index = LinkHeader::parse(body).ok()?.index;
        let mut port = VlanPort { index, ..VlanPort::default() };
        for attr in attrs(body.get(IFINFOMSG..)?) {
            match attr.kind {
                libc::IFLA_MASTER => port.master = attr.u32().filter(|index| *index != 0),
                libc::IFLA_AF_SPEC => port.vlans = vlans(attr),
                _ => {}
            }
        }
        Some(port)
    }
}

/// The VLANs of a reply, where a range has two entries.
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

fn request(kind: u16, port: u32, attribute: LinkAttribute) -> Request {
    let mut message = message(port, vec![attribute]);
    message.header.interface_family = AddressFamily::Bridge;
    Request::route(kind, &message)
}

/// A request with one entry for each VLAN, or two for the ends of a range.
fn vlan_request(kind: u16, port: u32, vlans: &[PortVlans]) -> Request {
    let mut spec = Vec::new();
    for PortVlans { ids, tagging } in vlans {
        let flags = match tagging {
            Tagging::Tagged => Flags::empty(),
            Tagging::Untagged => Flags::Untagged,
            Tagging::Native => Flags::Untagged | Flags::Pvid,
        };
        let mut entry =
            |flags, vid| spec.push(AfSpecBridge::VlanInfo(BridgeVlanInfo { flags, vid }));
        if ids.start() == ids.end() {
            entry(flags, *ids.start());
        } else {
            entry(flags | Flags::RangeBegin, *ids.start());
            entry(flags | Flags::RangeEnd, *ids.end());
        }
    }
    request(kind, port, LinkAttribute::AfSpecBridge(spec))
}

impl Netlink {
    /// Adds the port with this index to VLANs, by one message.
    pub fn add_port_vlans(&self, port: u32, vlans: &[PortVlans]) -> Result<()> {
        let request = vlan_request(RTM_SETLINK, port, vlans);
        self.socket.change(&request, 0, "set VLANs of", &self.label(port))
    }

    /// Removes the port from VLANs; VLANs without the port are ignored.
    pub fn del_port_vlans(&self, port: u32, vlans: &[PortVlans]) -> Result<()> {
        let request = vlan_request(RTM_DELLINK, port, vlans);
        self.socket.change(&request, 0, "remove VLANs of", &self.label(port))
    }

    /// The VLANs of the ports of all bridges: old kernels have no request for a single port.
    pub fn dump_port_vlans(&self) -> Result<Vec<VlanPort>> {
        let mask = LinkAttribute::ExtMask(vec![LinkExtentMask::BrvlanCompressed]);
        let request = request(RTM_GETLINK, 0, mask);
        self.socket.list(&request, "list", &"VLANs of bridges", VlanPort::parse)
    }
}
