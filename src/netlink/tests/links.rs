//! Links: creating, reading, changing, deleting.

use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use rtnetlink::packet_core::{NLM_F_APPEND, NLM_F_CREATE, NLM_F_EXCL};
use rtnetlink::packet_route::link::{LinkAttribute, Prop};

use super::{bridge, sandbox, veths};
use crate::lane::{self, needs};
use crate::netlink::link::link_message;
use crate::netlink::link_info::BridgePortInfo;
use crate::netlink::request::NetlinkRequest;
use crate::netlink::{
    IpvlanMode, Link, LinkChange, LinkKind, MacAddress, MacvlanMode, Netlink, NewLink,
    OnOffSetting, OperationalState, VethPeer,
};
use crate::netns::Netns;

/// From `linux/rtnetlink.h`; libc lacks it.
const RTM_NEWLINKPROP: u16 = 108;

#[test]
fn one_message_creates_a_veth_with_all_settings() {
    let host = sandbox();
    let bridge = bridge(&host, "br0");
    let container = Netns::create_unnamed().unwrap();
    let inside = Netlink::open_in(&container).unwrap();
    let (mac, peer_mac) = (MacAddress([2, 0, 0, 0, 0, 1]), MacAddress([2, 0, 0, 0, 0, 2]));
    let peer =
        VethPeer::new("eth0").with_netns(container.as_fd()).with_mac(peer_mac).with_mtu(1400);
    let veth = NewLink::new("veth0", LinkKind::Veth { peer })
        .with_mtu(1400)
        .with_mac(mac)
        .with_master(bridge.index)
        .set_promisc()
        .set_up();
    host.add_link(&veth).unwrap();

    let outer = host.require_link("veth0").unwrap();
    assert_eq!((outer.mac, outer.mtu, outer.up), (Some(mac), 1400, true));
    assert_eq!((outer.kind.as_deref(), outer.master), (Some("veth"), Some(bridge.index)));
    assert!(outer.promiscuity > 0);
    assert!(outer.link_netnsid.is_some());
    let inner = inside.require_link("eth0").unwrap();
    assert_eq!((inner.mac, inner.mtu, inner.up), (Some(peer_mac), 1400, false));
    assert_eq!((inner.link, outer.link), (Some(outer.index), Some(inner.index)));
    assert_ne!(outer.oper_state, OperationalState::Up);
}

#[test]
fn a_link_is_created_in_another_namespace() {
    let host = sandbox();
    let container = Netns::create_unnamed().unwrap();
    let (lower, _) = veths(&host);
    let kind = macvlan(lower.index, MacvlanMode::Bridge);
    host.add_link(&NewLink::new("mac0", kind).with_netns(container.as_fd())).unwrap();
    assert!(host.find_link("mac0").unwrap().is_none());
    let link = Netlink::open_in(&container).unwrap().require_link("mac0").unwrap();
    assert_eq!((link.kind.as_deref(), link.link), (Some("macvlan"), Some(lower.index)));
}

fn macvlan<'a>(link: u32, mode: MacvlanMode) -> LinkKind<'a> {
    LinkKind::Macvlan { link, mode, bc_queue_len: 0 }
}

#[test]
fn a_macvlan_reports_its_mode_and_its_queue_length() {
    needs!(lane::MACVLAN_QUEUE);
    let netlink = sandbox();
    let (lower, _) = veths(&netlink);
    for mode in [MacvlanMode::Private, MacvlanMode::Bridge, MacvlanMode::Vepa] {
        let kind = LinkKind::Macvlan { link: lower.index, mode, bc_queue_len: 321 };
        netlink.add_link(&NewLink::new(mode.as_str(), kind)).unwrap();
        let info = netlink.require_link(mode.as_str()).unwrap().macvlan.unwrap();
        assert_eq!((info.mode, info.bc_queue_len), (Some(mode), 321));
    }
    assert_eq!(netlink.require_link("peer").unwrap().macvlan, None);
}

#[test]
fn modes_have_the_kernels_numbers_and_iproute2s_names() {
    let macvlan: Vec<_> = (0..20).filter_map(MacvlanMode::from_wire).collect();
    let names = macvlan.iter().map(|mode| mode.as_str()).collect::<Vec<_>>();
    assert_eq!(names, ["private", "vepa", "bridge", "passthru"]);
    let ipvlan: Vec<_> = (0..20).filter_map(IpvlanMode::from_wire).collect();
    let names = ipvlan.iter().map(|mode| mode.as_str()).collect::<Vec<_>>();
    assert_eq!(names, ["l2", "l3", "l3s"]);
    assert!(macvlan.iter().all(|mode| MacvlanMode::parse(mode.as_str()) == Some(*mode)));
    assert!(ipvlan.iter().all(|mode| IpvlanMode::parse(mode.as_str()) == Some(*mode)));
    assert_eq!((MacvlanMode::parse("source"), IpvlanMode::parse("")), (None, None));
}

#[test]
fn all_kinds_of_links_are_read() {
    let netlink = sandbox();
    let (veth, _) = veths(&netlink);
    bridge(&netlink, "br0");
    netlink.add_link(&NewLink::new("ifb9", LinkKind::Ifb)).unwrap();
    let kind = macvlan(veth.index, MacvlanMode::Private);
    netlink.add_link(&NewLink::new("mac0", kind)).unwrap();
    let mut links = netlink.dump_links().unwrap();
    links.sort_by(|a, b| a.name.cmp(&b.name));
    let named = |link: &Link| format!("{} {}", link.name, link.kind.as_deref().unwrap_or("-"));
    let named: Vec<String> = links.iter().map(named).collect();
    assert_eq!(named, ["br0 bridge", "ifb9 ifb", "lo -", "mac0 macvlan", "peer veth", "veth veth"]);
    for link in links {
        assert_eq!(netlink.require_link(&link.name).unwrap(), link);
        assert_eq!(netlink.require_link_by_index(link.index).unwrap(), link);
    }
}

#[test]
fn the_loopback_link_is_read() {
    let lo = sandbox().require_link("lo").unwrap();
    assert!(lo.loopback && !lo.up);
    assert_eq!((lo.index, lo.mtu, lo.mac), (1, 65536, Some(MacAddress([0; 6]))));
    assert_eq!((lo.kind, lo.master, lo.link, lo.port), (None, None, None, None));
}

#[test]
fn a_missing_link_is_none() {
    let netlink = sandbox();
    assert_eq!(netlink.find_link("eth9"), Ok(None));
    assert_eq!(netlink.find_link_by_index(99), Ok(None));
    assert_eq!(netlink.find_link("a-name-of-more-than-fifteen-bytes"), Ok(None));
    let error = netlink.require_link("eth9").unwrap_err();
    assert_eq!(error.to_string(), r#"link "eth9" not found"#);
    assert!(error.is_not_found());
}

#[test]
fn a_link_is_found_by_its_alternative_names() {
    let netlink = sandbox();
    let (veth, _) = veths(&netlink);
    let names = ["short", "a-name-of-more-than-fifteen-bytes"];
    let props = names.map(|name| Prop::AltIfName(name.to_owned())).to_vec();
    let message = link_message(veth.index, vec![LinkAttribute::PropList(props)]);
    let flags = NLM_F_CREATE | NLM_F_EXCL | NLM_F_APPEND;
    netlink
        .socket
        .request_ack(&NetlinkRequest::new_route(RTM_NEWLINKPROP, &message), flags)
        .unwrap();
    for name in names {
        let link = netlink.require_link(name).unwrap();
        assert_eq!((link.index, link.name.as_str()), (veth.index, "veth"));
        assert_eq!(link.alt_names, names);
    }
    assert_eq!(netlink.delete_link(names[1]), Ok(true));
}

#[test]
fn settings_of_a_bridge_port_take_effect() {
    let netlink = sandbox();
    let bridge = bridge(&netlink, "br0");
    let (veth, _) = veths(&netlink);
    let port = |netlink: &Netlink| netlink.require_link("veth").unwrap().port;
    assert_eq!(port(&netlink), None);
    let change = LinkChange::new()
        .set_up()
        .set_master(bridge.index)
        .set_hairpin(OnOffSetting::On)
        .set_isolated(OnOffSetting::On);
    netlink.change_link(veth.index, change).unwrap();
    assert_eq!(port(&netlink), Some(BridgePortInfo { hairpin: true, isolated: true }));
    assert!(netlink.require_link("veth").unwrap().up);
    netlink.change_link(veth.index, LinkChange::new().set_hairpin(OnOffSetting::Off)).unwrap();
    assert_eq!(port(&netlink), Some(BridgePortInfo { hairpin: false, isolated: true }));
    netlink.change_link(veth.index, LinkChange::new().clear_master()).unwrap();
    assert_eq!(port(&netlink), None);
}

#[test]
fn one_change_applies_all_settings() {
    let netlink = sandbox();
    let (veth, _) = veths(&netlink);
    let mac = MacAddress([2, 0, 0, 0, 0, 9]);
    let change = LinkChange::new()
        .set_name("eth0")
        .set_mtu(1300)
        .set_mac(mac)
        .set_txqlen(77)
        .set_promisc(OnOffSetting::On)
        .set_allmulti(OnOffSetting::On)
        .set_up();
    netlink.change_link(veth.index, change).unwrap();
    let link = netlink.require_link("eth0").unwrap();
    assert_eq!((link.mtu, link.mac, link.txqlen), (1300, Some(mac), 77));
    assert!(link.up && link.allmulti && link.promiscuity == 1);
    let change =
        LinkChange::new().set_promisc(OnOffSetting::Off).set_allmulti(OnOffSetting::Off).set_down();
    netlink.change_link(veth.index, change).unwrap();
    let link = netlink.require_link("eth0").unwrap();
    assert!(!link.up && !link.allmulti && link.promiscuity == 0);
}

#[test]
fn a_link_moves_to_another_namespace() {
    let netlink = sandbox();
    let other = Netns::create_unnamed().unwrap();
    let (veth, _) = veths(&netlink);
    netlink
        .change_link(veth.index, LinkChange::new().move_to_netns(other.as_fd()).set_name("eth0"))
        .unwrap();
    assert_eq!(netlink.find_link("veth"), Ok(None));
    assert!(Netlink::open_in(&other).unwrap().find_link("eth0").unwrap().is_some());
}

#[test]
fn a_link_is_deleted_once() {
    let netlink = sandbox();
    veths(&netlink);
    assert_eq!(netlink.delete_link("veth"), Ok(true));
    assert_eq!(netlink.delete_link("veth"), Ok(false));
    assert_eq!(netlink.find_link("peer"), Ok(None));
    let bridge = bridge(&netlink, "br0");
    assert_eq!(netlink.delete_link_by_index(bridge.index), Ok(true));
    assert_eq!(netlink.delete_link_by_index(bridge.index), Ok(false));
}

#[test]
fn a_name_in_use_is_refused() {
    let netlink = sandbox();
    bridge(&netlink, "br0");
    let kind = LinkKind::Bridge { vlan_filtering: None };
    let error = netlink.add_link(&NewLink::new("br0", kind)).unwrap_err();
    assert!(error.is_exists());
    assert_eq!(error.to_string(), r#"add link "br0" (bridge): file exists"#);
}

#[test]
fn a_missing_driver_is_reported_with_its_module() {
    let netlink = sandbox();
    let (veth, _) = veths(&netlink);
    let kind = LinkKind::Vlan { link: veth.index, id: 7 };
    match netlink.add_link(&NewLink::new("veth.7", kind)) {
        // A kernel with the driver.
        Ok(()) => assert_eq!(netlink.require_link("veth.7").unwrap().link, Some(veth.index)),
        Err(error) => {
            assert_eq!(error.errno(), Some(Errno::EOPNOTSUPP));
            let top = cni::error::Error::from(error);
            assert_eq!(top.details(), r#"load the kernel module "8021q" on the node"#);
        }
    }
}

#[test]
fn errors_of_a_change_name_the_link() {
    let netlink = sandbox();
    let (veth, _) = veths(&netlink);
    let error = netlink.change_link(veth.index, LinkChange::new().set_mtu(1)).unwrap_err();
    let text = r#"change "veth": mtu less than device minimum: invalid argument"#;
    assert_eq!(error.to_string(), text);
    let error = netlink.change_link(99, LinkChange::new().set_up()).unwrap_err();
    assert!(error.is_not_found());
    assert_eq!(error.to_string(), "change link 99: no such device");
}

#[test]
fn links_are_looked_up_in_namespaces_by_their_ids() {
    let host = sandbox();
    let container = Netns::create_unnamed().unwrap();
    let peer = VethPeer::new("eth0").with_netns(container.as_fd());
    let outer = host.add_and_read_link(&NewLink::new("veth0", LinkKind::Veth { peer })).unwrap();
    let (nsid, index) = (outer.link_netnsid.unwrap(), outer.link.unwrap());
    let inner = host.find_link_in(nsid, index).unwrap().unwrap();
    assert_eq!((inner.name.as_str(), inner.index, inner.link), ("eth0", index, Some(outer.index)));
    assert_eq!(host.find_link_in(nsid, index + 1), Ok(None));
    assert_eq!(host.find_link_in(nsid + 9, index), Ok(None));
    host.delete_link_by_index(outer.index).unwrap();
    assert_eq!(host.find_link_in(nsid, index), Ok(None));
}

#[test]
fn the_id_of_a_namespace_ends_with_the_namespace() {
    let host = sandbox();
    let container = Netns::create_unnamed().unwrap();
    let descriptor = container.as_fd();
    assert_eq!(host.namespace_id(descriptor).unwrap(), None);
    let id = host.ensure_namespace_id(descriptor).unwrap().unwrap();
    assert_eq!(host.ensure_namespace_id(descriptor).unwrap(), Some(id));
    assert_eq!(host.has_namespace(id).unwrap(), Some(true));
    assert_eq!(host.has_namespace(id + 1).unwrap(), Some(false));
    drop(container);
    let deadline = Instant::now() + Duration::from_secs(60);
    while host.has_namespace(id).unwrap() == Some(true) {
        assert!(Instant::now() < deadline);
        thread::yield_now();
    }
}
