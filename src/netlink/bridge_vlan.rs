//! VLANs of the ports of a bridge.

use std::ops::RangeInclusive;

use nix::libc::{self, RTM_DELLINK, RTM_GETLINK, RTM_SETLINK};
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::link::{
    AfSpecBridge, BridgeVlanInfo, BridgeVlanInfoFlags as Flags, LinkAttribute, LinkExtentMask,
    LinkHeader,
};

use super::Netlink;
use super::attribute::{ReplyAttribute, parse_attributes};
use super::error::NetlinkResult;
use super::link::{IFINFOMSG, link_message};
use super::request::NetlinkRequest;

/// `IFLA_BRIDGE_VLAN_INFO`, missing in libc.
const IFLA_BRIDGE_VLAN_INFO: u16 = 2;

/// The tags of a VLAN's frames at a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VlanTagging {
    /// Frames are tagged in both directions.
    Tagged,
    /// Frames leave untagged. Untagged incoming frames belong to another VLAN, or to none.
    Untagged,
    /// Frames leave untagged, and untagged incoming frames belong to the VLAN (PVID).
    Native,
}

/// VLANs of a port with the same tagging.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortVlanRange {
    /// The VLAN ids, 1 to 4094.
    pub ids: RangeInclusive<u16>,
    pub tagging: VlanTagging,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BridgePortVlans {
    pub index: u32,
    /// The index of the bridge; `None` for a bridge, which is a port of itself.
    pub master: Option<u32>,
    pub vlans: Vec<PortVlanRange>,
}

impl PortVlanRange {
    pub fn native_vlan(id: u16) -> PortVlanRange {
        PortVlanRange { ids: id..=id, tagging: VlanTagging::Native }
    }
}

impl BridgePortVlans {
    /// The tagging of this VLAN; `None` if the port does not belong to it.
    pub fn tagging_of_vlan(&self, id: u16) -> Option<VlanTagging> {
        self.vlans.iter().find(|vlans| vlans.ids.contains(&id)).map(|vlans| vlans.tagging)
    }

    pub(super) fn parse(body: &[u8]) -> Option<BridgePortVlans> {
        let index = LinkHeader::parse(body).ok()?.index;
        let mut port = BridgePortVlans { index, ..BridgePortVlans::default() };
        for attr in parse_attributes(body.get(IFINFOMSG..)?) {
            match attr.kind {
                libc::IFLA_MASTER => port.master = attr.to_u32().filter(|index| *index != 0),
                libc::IFLA_AF_SPEC => port.vlans = parse_vlans(attr),
                _ => {}
            }
        }
        Some(port)
    }
}

/// The VLANs in a reply, in which a range has two entries.
fn parse_vlans(spec: ReplyAttribute<'_>) -> Vec<PortVlanRange> {
    let mut vlans = Vec::new();
    let mut begin = None;
    for attr in spec.nested_attributes().filter(|attr| attr.kind == IFLA_BRIDGE_VLAN_INFO) {
        let Ok(BridgeVlanInfo { flags, vid }) = BridgeVlanInfo::try_from(attr.value) else {
            continue;
        };
        if flags.contains(Flags::RangeBegin) {
            begin = Some(vid);
            continue;
        }
        let tagging = if flags.contains(Flags::Pvid) {
            VlanTagging::Native
        } else if flags.contains(Flags::Untagged) {
            VlanTagging::Untagged
        } else {
            VlanTagging::Tagged
        };
        vlans.push(PortVlanRange { ids: begin.take().unwrap_or(vid)..=vid, tagging });
    }
    vlans
}

fn bridge_request(kind: u16, port: u32, attribute: LinkAttribute) -> NetlinkRequest {
    let mut message = link_message(port, vec![attribute]);
    message.header.interface_family = AddressFamily::Bridge;
    NetlinkRequest::new_route(kind, &message)
}

/// A request with one entry for each VLAN, or two for the ends of a range.
fn vlan_request(kind: u16, port: u32, vlans: &[PortVlanRange]) -> NetlinkRequest {
    let mut spec = Vec::new();
    for PortVlanRange { ids, tagging } in vlans {
        let flags = match tagging {
            VlanTagging::Tagged => Flags::empty(),
            VlanTagging::Untagged => Flags::Untagged,
            VlanTagging::Native => Flags::Untagged | Flags::Pvid,
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
    bridge_request(kind, port, LinkAttribute::AfSpecBridge(spec))
}

impl Netlink {
    /// Adds the port with this index to VLANs, by one message.
    pub fn add_port_vlans(&self, port: u32, vlans: &[PortVlanRange]) -> NetlinkResult<()> {
        let request = vlan_request(RTM_SETLINK, port, vlans);
        self.socket.request_change(&request, 0, "set VLANs of", &self.link_label(port))
    }

    /// Removes the port from VLANs. VLANs to which the port does not belong are ignored.
    pub fn delete_port_vlans(&self, port: u32, vlans: &[PortVlanRange]) -> NetlinkResult<()> {
        let request = vlan_request(RTM_DELLINK, port, vlans);
        self.socket.request_change(&request, 0, "remove VLANs of", &self.link_label(port))
    }

    /// The VLANs of the ports of all bridges: old kernels have no request for a single port.
    pub fn dump_port_vlans(&self) -> NetlinkResult<Vec<BridgePortVlans>> {
        let mask = LinkAttribute::ExtMask(vec![LinkExtentMask::BrvlanCompressed]);
        let request = bridge_request(RTM_GETLINK, 0, mask);
        self.socket.request_list(&request, "list", &"VLANs of bridges", BridgePortVlans::parse)
    }
}
