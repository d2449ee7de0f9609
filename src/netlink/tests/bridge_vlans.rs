//! VLANs of the ports of a bridge.

use super::{sandbox, veths};
use crate::lane::{self, needs};
use crate::netlink::{LinkChange, LinkKind, NewLink, PortVlanRange, VlanTagging};

#[test]
fn vlans_are_added_as_ranges_read_and_removed() {
    needs!(lane::BRIDGE_VLAN);
    let netlink = sandbox();
    netlink.add_link(&NewLink::new("br0", LinkKind::Bridge { vlan_filtering: None })).unwrap();
    let bridge = netlink.require_link("br0").unwrap();
    let info = bridge.bridge.unwrap();
    assert_eq!((info.vlan_filtering, info.default_pvid), (false, 1));
    netlink.change_link(bridge.index, LinkChange::enable_vlan_filtering()).unwrap();
    assert!(netlink.require_link("br0").unwrap().bridge.unwrap().vlan_filtering);
    let (port, _) = veths(&netlink);
    netlink.change_link(port.index, LinkChange::new().set_master(bridge.index)).unwrap();
    let port = |()| {
        let all = netlink.dump_port_vlans().unwrap();
        all.into_iter().find(|p| p.index == port.index).unwrap()
    };
    assert_eq!(port(()).vlans, [PortVlanRange::native_vlan(1)]);
    assert_eq!(port(()).master, Some(bridge.index));
    let index = port(()).index;
    let tagged = PortVlanRange { ids: 200..=4094, tagging: VlanTagging::Tagged };
    let single = PortVlanRange { ids: 7..=7, tagging: VlanTagging::Tagged };
    let all = [single.clone(), PortVlanRange::native_vlan(100), tagged.clone()];
    netlink.add_port_vlans(index, &all).unwrap();
    // VLAN 1 is no longer the native VLAN.
    netlink
        .delete_port_vlans(index, &[PortVlanRange::native_vlan(1), PortVlanRange::native_vlan(9)])
        .unwrap();
    assert_eq!(port(()).vlans, all);
    let tagging = [7, 100, 199, 200, 4094].map(|id| port(()).tagging_of_vlan(id));
    let expected = [Some(VlanTagging::Tagged), Some(VlanTagging::Native), None];
    assert_eq!(tagging[..3], expected);
    assert_eq!(tagging[3..], [Some(VlanTagging::Tagged); 2]);
    netlink.delete_port_vlans(index, &all).unwrap();
    assert!(port(()).vlans.is_empty());
    let error = netlink.add_port_vlans(1, &[single]).unwrap_err();
    assert!(error.to_string().starts_with("set VLANs of \"lo\": "), "{error}");
}
