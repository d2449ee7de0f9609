//! Tests of [`Netlink`] with the real kernel, each in its own network namespace.

mod addrs;
mod bridge_vlans;
mod events;
mod fdb;
mod kinds;
mod links;
mod routes;
mod rules;

use ipnet::IpNet;

use super::{Link, LinkChange, LinkKind, Netlink, NewLink, VethPeer};
use crate::netlink::request::NetlinkRequest;
use crate::netns::{Netns, isolate_test_thread};

/// A socket in a private namespace, which the calling thread enters.
fn sandbox() -> Netlink {
    isolate_test_thread();
    Netlink::open().unwrap()
}

fn bridge(netlink: &Netlink, name: &str) -> Link {
    let kind = LinkKind::Bridge { vlan_filtering: None };
    netlink.add_link(&NewLink::new(name, kind).set_up()).unwrap();
    netlink.require_link(name).unwrap()
}

/// A veth pair in the namespace of `netlink`, both ends down.
fn veths(netlink: &Netlink) -> (Link, Link) {
    let kind = LinkKind::Veth { peer: VethPeer::new("peer") };
    netlink.add_link(&NewLink::new("veth", kind)).unwrap();
    (netlink.require_link("veth").unwrap(), netlink.require_link("peer").unwrap())
}

/// Like [`veths`], with both ends up.
fn wire(netlink: &Netlink) -> (Link, Link) {
    let (one, two) = veths(netlink);
    netlink.change_link(one.index, LinkChange::new().set_up()).unwrap();
    netlink.change_link(two.index, LinkChange::new().set_up()).unwrap();
    (one, two)
}

/// Runs iproute2 in the calling thread's namespace.
fn ip(args: &str) {
    let words = args.split(' ');
    assert!(std::process::Command::new("ip").args(words).status().unwrap().success(), "{args}");
}

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

#[test]
fn a_thousand_requests_on_one_socket() {
    let netlink = sandbox();
    for _ in 0..1000 {
        assert_eq!(netlink.require_link("lo").unwrap().index, 1);
    }
}

#[test]
fn sockets_of_two_namespaces_can_alternate() {
    let here = sandbox();
    let other = Netns::create_unnamed().unwrap();
    let there = Netlink::open_in(&other).unwrap();
    bridge(&there, "br0");
    for _ in 0..10 {
        assert!(here.find_link("br0").unwrap().is_none());
        assert!(there.find_link("br0").unwrap().is_some());
    }
}

#[test]
fn a_dropped_socket_releases_the_namespace() {
    let here = sandbox();
    let other = Netns::create_unnamed().unwrap();
    let there = Netlink::open_in(&other).unwrap();
    let kind = LinkKind::Veth {
        peer: VethPeer::new("inside").with_netns(std::os::fd::AsFd::as_fd(&other)),
    };
    here.add_link(&NewLink::new("outside", kind)).unwrap();
    there.require_link("inside").unwrap();
    let index = here.require_link("outside").unwrap().index;
    drop((there, other));
    // The kernel deletes the namespace with its veth shortly after the last reference is dropped.
    let limit = std::time::Duration::from_secs(5);
    let gone = here.wait_for_link(index, limit, |_| false).unwrap_err();
    assert!(gone.is_not_found(), "{gone}");
}

#[test]
fn a_request_that_could_not_be_sent_is_not_sent_later() {
    let here = sandbox();
    let other = Netns::create_unnamed().unwrap();
    let there = Netlink::open_in(&other).unwrap();
    for (socket, name) in [(&here, "br0"), (&there, "br1")] {
        for _ in 0..2 {
            // More than fits in the send buffer.
            let request = NetlinkRequest::new(16, &vec![0; 1 << 22]);
            assert!(socket.socket.request_ack(&request, 0).is_err());
            bridge(socket, name);
            assert!(socket.delete_link(name).unwrap());
        }
        bridge(socket, name);
    }
    assert!(here.find_link("br1").unwrap().is_none() && there.find_link("br0").unwrap().is_none());
}
