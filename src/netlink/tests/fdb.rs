//! The forwarding database of a bridge.

use super::super::fdb::FdbEntry;
use super::{sandbox, veths};
use crate::netlink::{LinkChange, LinkKind, NewLink};

#[test]
fn the_entries_of_one_bridge_are_listed() {
    let netlink = sandbox();
    let bridge = |name| {
        let kind = LinkKind::Bridge { vlan_filtering: None };
        netlink.add_and_read_link(&NewLink::new(name, kind).set_up()).unwrap()
    };
    let (one, other) = (bridge("br0"), bridge("br1"));
    let (port, far) = veths(&netlink);
    for (link, bridge) in [(&port, &one), (&far, &other)] {
        netlink
            .change_link(link.index, LinkChange::new().set_master(bridge.index).set_up())
            .unwrap();
    }
    let entry = FdbEntry { port: port.index, mac: port.mac.unwrap() };
    let found = netlink.dump_fdb(one.index).unwrap();
    assert!(found.contains(&entry), "{found:?}");
    assert!(found.iter().all(|entry| entry.port != far.index), "{found:?}");
}
