//! Routes.

use nix::libc::RTM_GETROUTE;

use super::super::request::NetlinkRequest;
use super::{net, sandbox, wire};
use crate::netlink::{
    DuplicateDetection, IpFamily, KernelRoute, Link, MultipathHop, Netlink, NewLinkAddress,
    RT_TABLE_MAIN, RouteAddMode, RouteFilter,
};

/// A link with an address of each family.
fn connected() -> (Netlink, Link) {
    let netlink = sandbox();
    let (veth, _) = wire(&netlink);
    netlink.add_address(veth.index, &NewLinkAddress::new(net("10.1.0.1/24"))).unwrap();
    netlink
        .add_address(
            veth.index,
            &NewLinkAddress {
                dad: DuplicateDetection::Off,
                ..NewLinkAddress::new(net("fd00::1/64"))
            },
        )
        .unwrap();
    (netlink, veth)
}

fn via(dst: &str, gw: &str) -> KernelRoute {
    KernelRoute { gw: Some(gw.parse().unwrap()), ..KernelRoute::new(net(dst)) }
}

fn find(netlink: &Netlink, filter: RouteFilter, dst: &str) -> Vec<KernelRoute> {
    let mut routes = netlink.dump_routes(&filter).unwrap();
    routes.retain(|route| route.dst == net(dst));
    routes
}

#[test]
fn all_fields_of_a_route_are_read_back() {
    let (netlink, veth) = connected();
    for (dst, gw, src) in [
        ("10.7.0.0/16", "10.1.0.9", "10.1.0.1"),
        ("0.0.0.0/0", "10.1.0.9", "10.1.0.1"),
        ("fd07::/32", "fd00::9", "fd00::1"),
        ("::/0", "fd00::9", "fd00::1"),
    ] {
        let route = KernelRoute {
            oif: Some(veth.index),
            src: src.parse().ok(),
            scope: Some(0),
            table: Some(5000),
            priority: Some(42),
            mtu: Some(1300),
            advmss: Some(1200),
            protocol: Some(4),
            ..via(dst, gw)
        };
        netlink.add_route(&route, RouteAddMode::Exclusive).unwrap();
        let filter = RouteFilter { table: Some(5000), ..RouteFilter::default() };
        assert_eq!(find(&netlink, filter, dst), [route]);
    }
}

#[test]
fn the_scope_of_a_route_is_kept() {
    let (netlink, veth) = connected();
    let route = KernelRoute {
        oif: Some(veth.index),
        scope: Some(200),
        ..KernelRoute::new(net("10.7.0.0/16"))
    };
    netlink.add_route(&route, RouteAddMode::Create).unwrap();
    let filter = RouteFilter { family: Some(IpFamily::V4), ..RouteFilter::default() };
    let found = find(&netlink, filter, "10.7.0.0/16");
    assert_eq!((found[0].scope, found[0].table), (Some(200), Some(RT_TABLE_MAIN)));
    assert_eq!(found[0].protocol, Some(3));
    assert_eq!(netlink.delete_route(&KernelRoute::new(net("10.7.0.0/16"))), Ok(true));
}

#[test]
fn multipath_routes_are_read_back() {
    let (netlink, veth) = connected();
    for (dst, one, two) in
        [("10.7.0.0/16", "10.1.0.8", "10.1.0.9"), ("fd07::/32", "fd00::8", "fd00::9")]
    {
        let hop =
            |gw: &str, weight| MultipathHop { gw: gw.parse().ok(), oif: Some(veth.index), weight };
        let nexthops = vec![hop(one, 1), hop(two, 3)];
        let route = KernelRoute { nexthops, ..KernelRoute::new(net(dst)) };
        netlink.add_route(&route, RouteAddMode::Exclusive).unwrap();
        let filter = RouteFilter { oif: Some(veth.index), ..RouteFilter::default() };
        let found = find(&netlink, filter, dst);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].nexthops, route.nexthops);
        assert_eq!(netlink.delete_route(&route), Ok(true));
    }
}

#[test]
fn host_bits_of_a_destination_are_ignored() {
    let (netlink, _) = connected();
    netlink.add_route(&via("10.7.1.2/16", "10.1.0.9"), RouteAddMode::Exclusive).unwrap();
    assert_eq!(find(&netlink, RouteFilter::default(), "10.7.0.0/16").len(), 1);
}

#[test]
fn adding_a_route_twice_fails_and_replacing_succeeds() {
    let (netlink, _) = connected();
    let (one, two) = (via("10.7.0.0/16", "10.1.0.8"), via("10.7.0.0/16", "10.1.0.9"));
    let count = || find(&netlink, RouteFilter::default(), "10.7.0.0/16").len();
    netlink.add_route(&one, RouteAddMode::Exclusive).unwrap();
    assert!(netlink.add_route(&two, RouteAddMode::Exclusive).unwrap_err().is_exists());
    netlink.add_route(&two, RouteAddMode::Replace).unwrap();
    assert_eq!(count(), 1);
    netlink.add_route(&one, RouteAddMode::Create).unwrap();
    assert_eq!(count(), 2);
    assert!(netlink.add_route(&one, RouteAddMode::Create).unwrap_err().is_exists());
}

#[test]
fn a_route_is_deleted_once() {
    let (netlink, veth) = connected();
    let route = KernelRoute {
        oif: Some(veth.index),
        table: Some(100),
        priority: Some(5),
        ..via("fd07::/32", "fd00::9")
    };
    netlink.add_route(&route, RouteAddMode::Exclusive).unwrap();
    assert_eq!(netlink.delete_route(&route), Ok(true));
    assert_eq!(netlink.delete_route(&route), Ok(false));
    assert_eq!(netlink.delete_route(&via("10.7.0.0/16", "10.1.0.9")), Ok(false));
}

#[test]
fn only_matching_routes_are_listed() {
    let (netlink, veth) = connected();
    let in_table = |dst, gw, table| KernelRoute { table: Some(table), ..via(dst, gw) };
    netlink.add_route(&in_table("10.7.0.0/16", "10.1.0.9", 100), RouteAddMode::Create).unwrap();
    netlink.add_route(&in_table("fd07::/32", "fd00::9", 100), RouteAddMode::Create).unwrap();
    let dump = |filter| netlink.dump_routes(&filter).unwrap();
    let table = RouteFilter { table: Some(100), ..RouteFilter::default() };
    assert_eq!(dump(table).len(), 2);
    let unfiltered = netlink
        .socket
        .request_dump(&NetlinkRequest::new_route(RTM_GETROUTE, &table.to_message()))
        .unwrap();
    assert_eq!(unfiltered.len(), 2, "the kernel should have filtered");
    assert_eq!(dump(RouteFilter { family: Some(IpFamily::V4), ..table }).len(), 1);
    assert_eq!(dump(RouteFilter { family: Some(IpFamily::V4), table: Some(101), oif: None }), []);
    assert_eq!(dump(RouteFilter { oif: Some(1), ..table }), []);
    let main =
        dump(RouteFilter { table: Some(RT_TABLE_MAIN), oif: Some(veth.index), family: None });
    assert!(main.iter().any(|route| route.dst == net("10.1.0.0/24")));
    assert!(main.iter().all(|route| route.table == Some(RT_TABLE_MAIN)));
}

#[test]
fn the_gateway_of_an_ipv4_route_may_be_ipv6() {
    let (netlink, veth) = connected();
    let route = KernelRoute { oif: Some(veth.index), ..via("10.7.0.0/16", "fd00::9") };
    netlink.add_route(&route, RouteAddMode::Create).unwrap();
    assert_eq!(find(&netlink, RouteFilter::default(), "10.7.0.0/16")[0].gw, route.gw);
}

#[test]
fn an_unreachable_gateway_is_refused_with_the_kernels_message() {
    let (netlink, veth) = connected();
    let route = KernelRoute { oif: Some(veth.index), ..via("10.7.0.0/16", "192.0.2.1") };
    let error = netlink.add_route(&route, RouteAddMode::Exclusive).unwrap_err();
    assert_eq!(
        error.to_string(),
        "add route 10.7.0.0/16 via 192.0.2.1: Nexthop has invalid gateway: network is unreachable"
    );
    let onlink = KernelRoute { onlink: true, ..route };
    netlink.add_route(&onlink, RouteAddMode::Exclusive).unwrap();
    assert!(find(&netlink, RouteFilter::default(), "10.7.0.0/16")[0].onlink);
}
