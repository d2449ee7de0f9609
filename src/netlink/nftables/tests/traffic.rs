//! Packets through a router with two neighbours.

use std::io::Read;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::*;
use crate::netlink::Family::{V4, V6};
use crate::netlink::conntrack::{Conntrack, Flow, Flows};
use crate::netlink::{LinkChange, LinkKind, Netlink, NewAddr, NewLink, Route, RouteMode, VethPeer};

/// The namespaces `client` (10.1.0.2) and `server` (10.2.0.2), connected by this namespace (10.x.0.1).
struct World {
    client: Netns,
    server: Netns,
    nft: Nft,
}

fn neighbour(host: &Netlink, ns: &Netns, name: &str, net: &str) {
    let peer = VethPeer::new("eth0").netns(ns.as_fd());
    host.add_link(&NewLink::new(name, LinkKind::Veth { peer })).unwrap();
    let addr = |last: u8| format!("{net}.{last}/24").parse().unwrap();
    let link = host.require_link(name).unwrap();
    host.set_link(link.index, LinkChange::new().up()).unwrap();
    host.add_addr(link.index, &NewAddr::new(addr(1))).unwrap();
    let inside = Netlink::open_in(ns).unwrap();
    let link = inside.require_link("eth0").unwrap();
    inside.set_link(link.index, LinkChange::new().up()).unwrap();
    inside.add_addr(link.index, &NewAddr::new(addr(2))).unwrap();
    let gw = Some(ip(&format!("{net}.1")));
    let default = Route { gw, ..Route::new("0.0.0.0/0".parse().unwrap()) };
    inside.add_route(&default, RouteMode::Exclusive).unwrap();
}

fn world() -> World {
    let nft = sandbox();
    let (client, server) = (Netns::fresh().unwrap(), Netns::fresh().unwrap());
    let host = Netlink::open().unwrap();
    neighbour(&host, &client, "left", "10.1.0");
    neighbour(&host, &server, "right", "10.2.0");
    crate::sysctl::write("net/ipv4/ip_forward", "1").unwrap();
    commit_base(&nft);
    World { client, server, nft }
}

impl World {
    /// Connects from the client and returns the source address that the server saw.
    fn connect(&self, listen: &str, to: &str) -> IpAddr {
        let listener = self.server.run(|| TcpListener::bind(listen).unwrap()).unwrap();
        let to: SocketAddr = to.parse().unwrap();
        let limit = Duration::from_secs(5);
        let stream = self.client.run(|| TcpStream::connect_timeout(&to, limit).unwrap()).unwrap();
        let (accepted, peer) = listener.accept().unwrap();
        drop(accepted);
        let mut nothing = Vec::new();
        assert_eq!((&stream).read_to_end(&mut nothing).unwrap(), 0);
        peer.ip()
    }

    fn commit(&self, fill: impl FnOnce(&mut Batch)) {
        self.nft.commit(one(fill)).unwrap();
    }
}

#[test]
fn a_concatenated_map_translates_a_port_to_address_and_port() {
    let world = world();
    world.commit(|batch| {
        let key = [Field::IpDaddr, Field::L4proto, Field::Dport];
        batch.append_rule(PRE, &Rule::new().daddr_is_local().dnat_by(&key, DNAT4));
        let web = DNAT4.element((ip("10.1.0.1"), L4::Tcp, 80)).to((ip("10.2.0.2"), 8080));
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
        let rule = Rule::new().saddr(ip("10.1.0.2")).daddr_not_in(net).masquerade();
        batch.append_rule(REGULAR, &rule);
        let names = T.vmap("out", &[Type::IfName]);
        batch.add(names).append_rule(POST, &Rule::new().vmap(&[Field::Oifname], names));
        let jump = names.element("right").verdict(Verdict::jump("regular"));
        batch.add_element(&jump);
    });
    assert_eq!(world.connect("10.2.0.2:9001", "10.2.0.2:9001"), ip("10.2.0.1"));
}

#[test]
fn a_set_and_a_direct_dnat() {
    let world = world();
    world.commit(|batch| {
        batch.add_element(&NETS.element(ip("10.1.0.2")));
        let rule = Rule::new().in_set(&[Field::IpSaddr], NETS).dport(L4::Tcp, 81);
        batch.append_rule(PRE, &rule.dnat(ip("10.2.0.2"), 8081));
        batch.append_rule(POST, &Rule::new().masquerade());
    });
    assert_eq!(world.connect("10.2.0.2:8081", "10.9.9.9:81"), ip("10.2.0.1"));
}

#[test]
fn a_single_flow_is_deleted() {
    let world = world();
    // Connections are tracked only if a rule needs that.
    world.commit(|batch| {
        batch.append_rule(POST, &Rule::new().masquerade());
    });
    let socket = world.client.run(|| UdpSocket::bind("10.1.0.2:0").unwrap()).unwrap();
    for port in [5000, 5001, 5002] {
        socket.send_to(b"x", ("10.2.0.2", port)).unwrap();
    }
    let conntrack = Conntrack::open().unwrap();
    let server = Flows::AnsweredBy(ip("10.2.0.2"));
    let forget = |flows, port| conntrack.forget(flows, &mut |flow| flow.dport == port).unwrap();
    // The packets wait for the resolution of the router's Ethernet address.
    let deadline = Instant::now() + Duration::from_secs(10);
    while conntrack.kernel_filtered(server) < 3 {
        assert!(Instant::now() < deadline, "the packets have not arrived");
    }
    assert_eq!(conntrack.kernel_filtered(Flows::AnsweredBy(ip("10.2.0.3"))), 0);
    assert_eq!((forget(server, 6000), forget(Flows::All(V6), 5001)), (0, 0));
    assert_eq!((forget(server, 5001), forget(server, 5001)), (1, 0));
    let mut seen = Vec::new();
    let mut note = |flow: &Flow| {
        seen.push(*flow);
        false
    };
    conntrack.forget(Flows::All(V4), &mut note).unwrap();
    seen.sort_by_key(|flow| flow.dport);
    let flow = |dport| Flow { daddr: ip("10.2.0.2"), dport, server: ip("10.2.0.2") };
    assert_eq!(seen, [flow(5000), flow(5002)]);
    assert_eq!((forget(Flows::All(V4), 5002), forget(server, 5000)), (1, 1));
    assert_eq!(conntrack.kernel_filtered(Flows::All(V4)), 0);
    let empty = Netns::fresh().unwrap().run(|| Conntrack::open().unwrap()).unwrap();
    assert_eq!(empty.forget(server, &mut |_| true).unwrap(), 0);
}
