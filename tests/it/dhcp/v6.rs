//! Leases of IPv6, and of both families, of dnsmasq and of ISC's server.

use std::fs;
use std::thread;
use std::time::Instant;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::world::{World, addresses, addresses_v6};
use crate::net::{no_veth_remains, settles};
use crate::node::{Container, eventually};

/// The first address that dnsmasq gives in sequence.
const FIRST: &str = "fd00:1::6";

#[test]
fn add_check_del_and_the_router_is_advertised() {
    for version in ["0.2.0", "0.4.0", "1.1.0"] {
        let world = World::v6();
        let _server = world.dnsmasq_v6(9, &[]);
        let _daemon = world.daemon(&[]);
        let net = world.net_of(version, "ipv6");
        let before = world.node.snapshot();
        let container = Container::new();
        let empty = container.snapshot(&world.node);
        let result = net.add(&container);
        let ip = match version {
            "0.2.0" => &result["ip6"]["ip"],
            _ => &result["ips"][0]["address"],
        };
        assert_eq!(ip, "fd00:1::6/128", "{result}");
        assert_eq!(addresses_v6(&container), ["fd00:1::6/128"]);
        assert_eq!(addresses(&container), [""; 0]);
        world.leases_become(&[FIRST]);
        assert_eq!(world.records().len(), 1);
        // The routes are the router's to tell.
        eventually("no default route", || {
            container.sh("ip -6 route").lines().any(|line| line.starts_with("default via fe80::"))
        });
        assert!(container.sh("ip -6 route").contains("fd00:1::/64 dev eth0 proto kernel"));
        assert!(container.pings("fd00:1::1"));
        if version >= "0.4.0" {
            net.check(&container, &result).ok();
        }
        net.del(&container);
        no_veth_remains(&world.node);
        world.leases_become(&[]);
        assert_eq!(world.records().len(), 0);
        net.del(&container);
        net.call("DEL", "c1").without("CNI_NETNS").ok();
        settles(&before, || world.node.snapshot());
        settles(&empty, || container.snapshot(&world.node));
    }
}
