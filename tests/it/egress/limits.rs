//! Limits of connections: of each container, at once and in a time.

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use serde_json::json;

use super::{FAR, World, list};
use crate::support::conflist::Attached;
use crate::support::net::merged;
use crate::support::node::{Container, eventually};
use crate::support::traffic::Place;

fn address(ip: &str) -> SocketAddr {
    (ip.parse::<IpAddr>().unwrap(), 8080).into()
}

/// Servers outside that accept connections, which their backlog keeps.
fn listen(world: &World) -> Vec<TcpListener> {
    let bound = [FAR[0], FAR[3]].map(|ip| {
        assert!(world.reaches(&world.outside, ip, 9), "{ip}: resolved");
        world.outside.within(|| TcpListener::bind(address(ip)).unwrap())
    });
    bound.into()
}

fn connect(from: &impl Place, ip: &str) -> Result<TcpStream, ErrorKind> {
    from.within(|| {
        TcpStream::connect_timeout(&address(ip), Duration::from_secs(2)).map_err(|e| e.kind())
    })
}

#[test]
fn connections_at_once_are_limited_for_each_container() {
    let keys = json!({"policy": "allow", "limits": {"connections": 4}});
    for kind in ["bridge", "ptp"] {
        let world = World::new(kind, &keys);
        // Two datagrams, to which nobody replies, are connections as well: 2 of 4.
        let servers = listen(&world);
        let other = Container::new();
        let list = list(&world.node, kind, &keys);
        let result = list.add(&Attached::new("c2", &other.path())).unwrap();
        let first = connect(&world.inside, FAR[0]).unwrap();
        let second = connect(&world.inside, FAR[3]).unwrap();
        let refused = ErrorKind::ConnectionRefused;
        assert_eq!(connect(&world.inside, FAR[0]).unwrap_err(), refused, "{kind}");
        assert_eq!(connect(&world.inside, FAR[3]).unwrap_err(), refused, "{kind}");
        let of_other: Vec<_> = (0..4).map(|_| connect(&other, FAR[0])).collect();
        assert!(of_other.iter().all(Result::is_ok), "{kind}: another container: {of_other:?}");
        assert_eq!(connect(&other, FAR[0]).unwrap_err(), refused, "{kind}");
        // Replies to clients are no connections of the container.
        let server = world.inside.within(|| TcpListener::bind("0.0.0.0:8080").unwrap());
        let from_outside = connect(&world.outside, &world.ip(false));
        assert!(from_outside.is_ok() && server.accept().is_ok(), "{kind}: {from_outside:?}");
        drop((first, second));
        for server in &servers {
            server.accept().unwrap();
        }
        eventually("closed connections do not count", || connect(&world.inside, FAR[0]).is_ok());
        list.check(&world.attached(), &world.result).unwrap();
        list.del(&Attached::new("c2", &other.path()), Some(&result)).unwrap();
        list.del(&world.attached(), Some(&world.result)).unwrap();
        let left = world.node.sh("nft list sets; nft list chains");
        assert!(!left.contains("policy_"), "{kind}: {left}");
    }
}

#[test]
fn new_connections_in_a_time_are_limited_by_every_source() {
    let given = json!({"policy": "allow", "limits": {"new": "5/m"}});
    let own = json!({"policy": "allow", "limits": {"new": "90/m", "connections": 1000}});
    let keys = merged(&own, &json!({"runtimeConfig": {"egressPolicy": given}}));
    let world = World::new("bridge", &keys);
    let servers = listen(&world);
    // Two were for the datagrams.
    for at in 0..3 {
        assert!(connect(&world.inside, FAR[0]).is_ok(), "{at}");
    }
    let refused = ErrorKind::ConnectionRefused;
    assert_eq!(connect(&world.inside, FAR[0]).unwrap_err(), refused);
    let listed = world.node.tool("egress", &["ls"]).printed();
    assert!(listed.contains("192.0.2.7 tcp/8080"), "{listed}");
    // Also after a flush, whoever restores the rules.
    world.node.sh("nft flush ruleset");
    assert_eq!(world.node.cnibox(&["repair"]).run().status, Some(0));
    for at in 0..5 {
        assert!(connect(&world.inside, FAR[0]).is_ok(), "{at}, restored");
    }
    assert_eq!(connect(&world.inside, FAR[0]).unwrap_err(), refused);
    drop(servers);
}
