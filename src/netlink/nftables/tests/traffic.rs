//! Packets through a router with two neighbours.

use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::*;
use crate::netlink::IpFamily::{V4, V6};
use crate::netlink::conntrack::{ConntrackSocket, FlowSelection, TrackedFlow};
use crate::netlink::{
    KernelRoute, LinkChange, LinkKind, Netlink, NewLink, NewLinkAddress, RouteAddMode, VethPeer,
};

/// The namespaces `client` (10.1.0.2) and `server` (10.2.0.2), connected by this namespace
/// (10.x.0.1).
struct World {
    client: Netns,
    server: Netns,
    nft: NftSocket,
}

fn neighbour(host: &Netlink, ns: &Netns, name: &str, net: &str) {
    let peer = VethPeer::new("eth0").with_netns(ns.as_fd());
    host.add_link(&NewLink::new(name, LinkKind::Veth { peer })).unwrap();
    let addr = |last: u8| format!("{net}.{last}/24").parse().unwrap();
    let link = host.require_link(name).unwrap();
    host.change_link(link.index, LinkChange::new().set_up()).unwrap();
    host.add_address(link.index, &NewLinkAddress::new(addr(1))).unwrap();
    let inside = Netlink::open_in(ns).unwrap();
    let link = inside.require_link("eth0").unwrap();
    inside.change_link(link.index, LinkChange::new().set_up()).unwrap();
    inside.add_address(link.index, &NewLinkAddress::new(addr(2))).unwrap();
    let gw = Some(ip(&format!("{net}.1")));
    let default = KernelRoute { gw, ..KernelRoute::new("0.0.0.0/0".parse().unwrap()) };
    inside.add_route(&default, RouteAddMode::Exclusive).unwrap();
}

fn world() -> World {
    let nft = sandbox();
    let (client, server) = (Netns::create_unnamed().unwrap(), Netns::create_unnamed().unwrap());
    let host = Netlink::open().unwrap();
    neighbour(&host, &client, "left", "10.1.0");
    neighbour(&host, &server, "right", "10.2.0");
    crate::sysctl::write_value("net/ipv4/ip_forward", "1").unwrap();
    commit_base(&nft);
    World { client, server, nft }
}

impl World {
    /// Connects from the client and returns the source address that the server saw.
    fn connect(&self, listen: &str, to: &str) -> IpAddr {
        let listener = self.server.run_inside(|| TcpListener::bind(listen).unwrap()).unwrap();
        let to: SocketAddr = to.parse().unwrap();
        let limit = Duration::from_secs(5);
        let stream =
            self.client.run_inside(|| TcpStream::connect_timeout(&to, limit).unwrap()).unwrap();
        let (accepted, peer) = listener.accept().unwrap();
        drop(accepted);
        let mut nothing = Vec::new();
        assert_eq!((&stream).read_to_end(&mut nothing).unwrap(), 0);
        peer.ip()
    }

    fn commit(&self, fill: impl FnOnce(&mut NftBatch)) {
        self.nft.commit_batch(one(fill)).unwrap();
    }
}

#[test]
fn a_concatenated_map_translates_a_port_to_address_and_port() {
    let world = world();
    world.commit(|batch| {
        let key = [PacketField::IpDaddr, PacketField::L4proto, PacketField::Dport];
        batch.append_rule(PRE, &NftRule::new().daddr_is_local().dnat_by_map(&key, DNAT4));
        let web = DNAT4
            .element_with_key((ip("10.1.0.1"), TransportProtocol::Tcp, 80))
            .with_values((ip("10.2.0.2"), 8080));
        batch.add_element(&web);
    });
    assert_eq!(world.connect("10.2.0.2:8080", "10.1.0.1:80"), ip("10.1.0.2"));
}

#[test]
fn a_verdict_map_and_masquerade_change_the_source() {
    let world = world();
    assert_eq!(world.connect("10.2.0.2:9000", "10.2.0.2:9000"), ip("10.1.0.2"));
    world.commit(|batch| {
        let net = "10.1.0.0/24".parse().unwrap();
        let rule = NftRule::new().saddr_is(ip("10.1.0.2")).daddr_not_in(net).masquerade();
        batch.append_rule(REGULAR, &rule);
        let names = T.verdict_map("out", &[ValueType::IfName]);
        batch
            .add_object(names)
            .append_rule(POST, &NftRule::new().verdict_by_map(&[PacketField::Oifname], names));
        let jump = names.element_with_key("right").with_verdict(PacketVerdict::jump_to("regular"));
        batch.add_element(&jump);
    });
    assert_eq!(world.connect("10.2.0.2:9001", "10.2.0.2:9001"), ip("10.2.0.1"));
}

#[test]
fn a_set_and_dnat_to_a_fixed_address_work() {
    let world = world();
    world.commit(|batch| {
        batch.add_element(&NETS.element_with_key(ip("10.1.0.2")));
        let rule = NftRule::new()
            .in_set(&[PacketField::IpSaddr], NETS)
            .dport_is(TransportProtocol::Tcp, 81);
        batch.append_rule(PRE, &rule.dnat_to(ip("10.2.0.2"), 8081));
        batch.append_rule(POST, &NftRule::new().masquerade());
    });
    assert_eq!(world.connect("10.2.0.2:8081", "10.9.9.9:81"), ip("10.2.0.1"));
}

#[test]
fn a_single_flow_is_deleted() {
    let world = world();
    // The kernel tracks connections only if a rule needs that.
    world.commit(|batch| {
        batch.append_rule(POST, &NftRule::new().masquerade());
    });
    let socket = world.client.run_inside(|| UdpSocket::bind("10.1.0.2:0").unwrap()).unwrap();
    for port in [5000, 5001, 5002] {
        socket.send_to(b"x", ("10.2.0.2", port)).unwrap();
    }
    let conntrack = ConntrackSocket::open().unwrap();
    let server = FlowSelection::AnsweredBy(ip("10.2.0.2"));
    let forget =
        |flows, port| conntrack.delete_flows(flows, &mut |flow| flow.dport == port).unwrap();
    // The packets wait for the resolution of the router's Ethernet address.
    let deadline = Instant::now() + Duration::from_secs(10);
    while conntrack.count_dumped_entries(server) < 3 {
        assert!(Instant::now() < deadline, "the packets have not arrived");
    }
    assert_eq!(conntrack.count_dumped_entries(FlowSelection::AnsweredBy(ip("10.2.0.3"))), 0);
    assert_eq!((forget(server, 6000), forget(FlowSelection::All(V6), 5001)), (0, 0));
    assert_eq!((forget(server, 5001), forget(server, 5001)), (1, 0));
    let mut seen = Vec::new();
    let mut note = |flow: &TrackedFlow| {
        seen.push(*flow);
        false
    };
    conntrack.delete_flows(FlowSelection::All(V4), &mut note).unwrap();
    seen.sort_by_key(|flow| flow.dport);
    let flow = |dport| TrackedFlow { daddr: ip("10.2.0.2"), dport, server: ip("10.2.0.2") };
    assert_eq!(seen, [flow(5000), flow(5002)]);
    assert_eq!((forget(FlowSelection::All(V4), 5002), forget(server, 5000)), (1, 1));
    assert_eq!(conntrack.count_dumped_entries(FlowSelection::All(V4)), 0);
    let empty =
        Netns::create_unnamed().unwrap().run_inside(|| ConntrackSocket::open().unwrap()).unwrap();
    assert_eq!(empty.delete_flows(server, &mut |_| true).unwrap(), 0);
}
