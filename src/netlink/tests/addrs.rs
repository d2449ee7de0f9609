//! Addresses.

use nix::libc::RTM_GETADDR;
use rtnetlink::packet_route::AddressFamily;
use rtnetlink::packet_route::address::AddressMessage;

use super::super::request::NetlinkRequest;
use super::{net, sandbox, wire};
use crate::netlink::{DuplicateDetection, NewLinkAddress};

#[test]
fn addresses_are_added_read_and_deleted() {
    let netlink = sandbox();
    let (veth, _) = wire(&netlink);
    netlink.add_address(veth.index, &NewLinkAddress::new(net("10.1.2.3/24"))).unwrap();
    netlink.add_address(veth.index, &NewLinkAddress::new(net("10.9.0.1/32"))).unwrap();
    let addrs = netlink.dump_addresses(veth.index).unwrap();
    let find = |text: &str| addrs.iter().find(|addr| addr.net == net(text)).unwrap();
    assert_eq!(find("10.1.2.3/24").broadcast, "10.1.2.255".parse().ok());
    assert_eq!(find("10.1.2.3/24").label.as_deref(), Some("veth"));
    assert_eq!((find("10.9.0.1/32").broadcast, find("10.9.0.1/32").scope), (None, 0));
    assert_eq!(netlink.delete_address(veth.index, net("10.1.2.3/24")), Ok(true));
    assert_eq!(netlink.delete_address(veth.index, net("10.1.2.3/24")), Ok(false));
    assert_eq!(netlink.delete_address(99, net("10.1.2.3/24")), Ok(false));
}

#[test]
fn an_address_is_added_once() {
    let netlink = sandbox();
    let (veth, _) = wire(&netlink);
    for text in ["10.1.2.3/24", "fd00::1/64"] {
        let addr = NewLinkAddress::new(net(text));
        netlink.add_address(veth.index, &addr).unwrap();
        let error = netlink.add_address(veth.index, &addr).unwrap_err();
        assert!(error.is_exists());
        // New kernels add a message before the error number.
        let (error, start) = (error.to_string(), format!(r#"add address {text} to "veth": "#));
        assert!(error.starts_with(&start) && error.ends_with(": file exists"), "{error}");
    }
}

#[test]
fn without_detection_an_address_is_usable_at_once() {
    let netlink = sandbox();
    let (veth, _) = wire(&netlink);
    netlink
        .add_address(
            veth.index,
            &NewLinkAddress {
                dad: DuplicateDetection::Off,
                ..NewLinkAddress::new(net("fd00::1/64"))
            },
        )
        .unwrap();
    netlink.add_address(veth.index, &NewLinkAddress::new(net("fd00::2/64"))).unwrap();
    let addrs = netlink.dump_addresses(veth.index).unwrap();
    let tentative =
        |text: &str| addrs.iter().find(|addr| addr.net == net(text)).unwrap().is_tentative();
    assert!(!tentative("fd00::1/64"));
    assert!(tentative("fd00::2/64"));
}

#[test]
fn only_the_requested_link_is_listed() {
    let netlink = sandbox();
    let (veth, peer) = wire(&netlink);
    netlink.add_address(veth.index, &NewLinkAddress::new(net("10.1.0.1/24"))).unwrap();
    netlink.add_address(peer.index, &NewLinkAddress::new(net("10.2.0.1/24"))).unwrap();
    let addrs = netlink.dump_addresses(peer.index).unwrap();
    assert!(addrs.iter().all(|addr| addr.index == peer.index));
    assert!(addrs.iter().any(|addr| addr.net == net("10.2.0.1/24")));
}

#[test]
fn a_dump_that_fails_at_its_end_is_an_error() {
    let error = sandbox().dump_addresses(99).unwrap_err();
    assert!(error.is_not_found());
    assert_eq!(error.to_string(), "list addresses of link 99: no such device");
}

#[test]
fn the_kernel_filters_the_dump() {
    let netlink = sandbox();
    let (veth, peer) = wire(&netlink);
    for (index, text) in [(veth.index, "10.1.0.1/24"), (peer.index, "10.2.0.1/24")] {
        netlink.add_address(index, &NewLinkAddress::new(net(text))).unwrap();
    }
    let count = |index| {
        let mut message = AddressMessage::default();
        message.header.family = AddressFamily::Inet;
        message.header.index = index;
        netlink
            .socket
            .request_dump(&NetlinkRequest::new_route(RTM_GETADDR, &message))
            .unwrap()
            .len()
    };
    assert_eq!((count(0), count(veth.index)), (2, 1));
}
