//! Kinds of links that some kernels lack.

use super::{sandbox, veths};
use crate::lane::{self, needs};
use crate::netlink::link_info::BridgeInfo;
use crate::netlink::{BOND_MODES, BondSettings, IpvlanMode, LinkKind, NewLink};

#[test]
fn optional_kinds_are_created_and_read() {
    needs!(lane::DUMMY, lane::VRF, lane::VLAN, lane::IPVLAN, lane::BRIDGE_VLAN);
    let netlink = sandbox();
    let (veth, peer) = veths(&netlink);
    let add = |name, kind| netlink.add_link(&NewLink::new(name, kind)).unwrap();
    add("dummy", LinkKind::Dummy);
    add("vrf", LinkKind::Vrf { table: 9 });
    add("vlan", LinkKind::Vlan { link: veth.index, id: 4094 });
    add("ipvlan", LinkKind::Ipvlan { link: peer.index, mode: IpvlanMode::L3s });
    add("bridge", LinkKind::Bridge { vlan_filtering: Some(true) });
    for (kind, lower) in
        [("dummy", None), ("vrf", None), ("vlan", Some(veth.index)), ("ipvlan", Some(peer.index))]
    {
        let link = netlink.require_link(kind).unwrap();
        assert_eq!((link.kind.as_deref(), link.link), (Some(kind), lower));
    }
    assert_eq!(netlink.require_link("vlan").unwrap().vlan, Some(4094));
    assert_eq!(netlink.require_link("ipvlan").unwrap().ipvlan, Some(IpvlanMode::L3s));
    let bridge = netlink.require_link("bridge").unwrap().bridge;
    assert_eq!(
        bridge,
        Some(BridgeInfo { vlan_filtering: true, default_pvid: 1, learns_link_local: Some(true) })
    );
}

#[test]
fn a_bond_is_created_with_its_settings_and_read() {
    needs!(lane::BOND);
    let netlink = sandbox();
    let add = |name: &str, settings| {
        netlink.add_link(&NewLink::new(name, LinkKind::Bond(settings))).unwrap();
        netlink.require_link(name).unwrap().bond.unwrap()
    };
    for (number, name) in BOND_MODES.iter().enumerate() {
        let mode = u8::try_from(number).unwrap();
        let wanted = BondSettings {
            mode,
            miimon: 150,
            fail_over_mac: 2,
            // The next one is of Linux 5.12.
            xmit_hash_policy: Some(mode.min(4)),
            all_slaves_active: Some(1),
            tlb_dynamic_lb: (mode >= 5).then_some(0),
            lacp_rate: (mode == 4).then_some(1),
            min_links: (mode == 4).then_some(2),
        };
        let found = add(&format!("b{number}"), wanted);
        let expected = BondSettings {
            tlb_dynamic_lb: found.tlb_dynamic_lb,
            lacp_rate: wanted.lacp_rate.or(found.lacp_rate),
            min_links: wanted.min_links.or(found.min_links),
            ..wanted
        };
        assert_eq!((found, found.mode_name()), (expected, *name));
        assert!(mode < 5 || found.tlb_dynamic_lb == Some(0));
    }
    let default = add("b9", BondSettings::default());
    assert_eq!(
        (default.xmit_hash_policy, default.all_slaves_active, default.tlb_dynamic_lb),
        (Some(0), Some(0), Some(1))
    );
}
