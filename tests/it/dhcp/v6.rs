//! IPv6 and dual-stack leases of dnsmasq and ISC dhcpd.

use std::fs;
use std::thread;
use std::time::Instant;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::world::{World, addresses, addresses_v6};
use crate::support::net::{no_veth_remains, settles};
use crate::support::node::{Container, eventually};

/// The first address that dnsmasq assigns in sequential mode.
const FIRST: &str = "fd00:1::6";

#[test]
fn add_check_and_del_work_with_an_advertised_router() {
    for version in ["0.2.0", "1.1.0"] {
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
        // Routes come from router advertisements.
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

#[test]
fn the_result_has_every_option_of_the_lease() {
    let world = World::v6();
    let options = [
        "--dhcp-option=option6:dns-server,[fd00:1::53],[2001:db8::53]",
        "--dhcp-option=option6:domain-search,example.com,b.example.com",
    ];
    let _server = world.dnsmasq_v6(9, &options);
    let _daemon = world.daemon(&[]);
    let container = world.wired("v1");
    let net = world.alone_of("ipv6");
    let dns = json!({"nameservers": ["fd00:1::53", "2001:db8::53"],
        "search": ["example.com", "b.example.com"]});
    let ips = json!([{"address": "fd00:1::6/128"}]);
    assert_eq!(net.add(&container), json!({"cniVersion": "1.1.0", "ips": ips, "dns": dns}));
    assert_eq!(addresses_v6(&container), [""; 0], "the interface is not this plugin's");
    // The DUID is a DUID-UUID derived from "c1/net/eth0".
    let leases = fs::read_to_string(world.node.path("dnsmasq.leases")).unwrap();
    assert!(
        leases.contains(" 00:04:51:42:44:e6:7f:62:89:15:89:59:c2:45:b1:e4:97:57\n"),
        "{leases}"
    );
    net.del(&container);
    world.leases_become(&[]);
}

#[test]
fn add_enables_ipv6_on_the_interface() {
    let world = World::v6();
    let _server = world.dnsmasq_v6(9, &[]);
    let _daemon = world.daemon(&[]);
    let container = Container::new();
    container.sh("sh -c 'echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6'");
    let net = world.net_of("1.1.0", "ipv6");
    net.add(&container);
    assert_eq!(addresses_v6(&container), ["fd00:1::6/128"]);
    net.del(&container);
    world.leases_become(&[]);
}

#[test]
fn add_without_a_server_times_out_with_the_reason() {
    let world = World::v6();
    let _daemon = world.daemon(&["-timeout", "300ms", "-resendmax=1s", "-resendtimeout", "4s"]);
    let container = world.wired("v1");
    let net = world.alone_of("ipv6");
    let started = Instant::now();
    let error = net.on("ADD", &container).error();
    assert_eq!(error.brief(), (999, "error calling DHCP.Allocate: no more tries"));
    assert_eq!(error.details, "no DHCPv6 server gave an address in 4 s");
    let took = started.elapsed().as_secs_f64();
    assert!((3.9..30.0).contains(&took), "{took}");
    assert!(world.records().is_empty());
    // A server without free addresses reports NoAddrsAvail.
    let _server = world.dnsmasq_v6(2, &[]);
    let other = world.wired("v2");
    net.add(&other);
    let error = net.call("ADD", "c3").netns(&container.path()).error();
    let why = "no DHCPv6 server gave an address in 4 s; refused by the server: NoAddrsAvail";
    assert!(error.details.starts_with(why), "{error:?}");
    net.call("DEL", "c3").netns(&container.path()).ok();
    // DHCPv6 needs a link-local source address.
    container.sh("sh -c 'echo 1 > /proc/sys/net/ipv6/conf/eth0/addr_gen_mode'");
    container.sh("ip link set eth0 down");
    let error = net.call("ADD", "c3").netns(&container.path()).error();
    let why = "eth0 has no usable IPv6 link-local address";
    assert!(error.details.contains(why), "{error:?}");
}

#[test]
fn concurrent_adds_get_different_addresses() {
    let world = World::v6();
    let _server = world.dnsmasq_v6(2000, &[]);
    let _daemon = world.daemon(&[]);
    let net = world.net_of("1.1.0", "ipv6");
    let containers: Vec<_> = (0..20).map(|_| Container::new()).collect();
    let all = |verb: &str| {
        let call = |(n, c): (usize, &Container)| net.call(verb, &format!("c{n}")).netns(&c.path());
        let calls: Vec<_> = containers.iter().enumerate().map(call).collect();
        thread::scope(|scope| {
            let threads: Vec<_> =
                calls.iter().map(|call| scope.spawn(move || call.run())).collect();
            for thread in threads {
                let outcome = thread.join().unwrap();
                assert_eq!(outcome.status, Some(0), "{verb}: {outcome:?}");
            }
        });
    };
    all("ADD");
    let mut given: Vec<_> = containers.iter().flat_map(addresses_v6).collect();
    given.sort();
    given.dedup();
    assert_eq!((given.len(), world.leased().len()), (20, 20));
    all("DEL");
    world.leases_become(&[]);
    assert_eq!(world.records().len(), 0);
}

#[test]
fn an_address_in_use_is_declined() {
    let world = World::v6();
    let _server = world.dnsmasq_v6(9, &[]);
    let _daemon = world.daemon(&[]);
    let squatter = world.wired("v1");
    squatter.sh("ip addr add fd00:1::6/64 dev eth0 nodad");
    let net = world.net_of("1.1.0", "ipv6");
    let container = Container::new();
    let result = net.add(&container);
    assert_ne!(result["ips"][0]["address"], "fd00:1::6/128");
    let log = world.server_log();
    assert_eq!(log.matches("DHCPDECLINE(br0)").count(), 1, "{log}");
    let said = "c1/net/eth0 (ipv6): declined fd00:1::6, which another host on the link uses";
    assert!(world.daemon_log().contains(said), "{}", world.daemon_log());
    net.del(&container);
}

#[test]
fn leases_of_dhcpd_are_renewed_and_released() {
    let world = World::v6();
    let _server = world.isc_v6(9, "isc6.leases");
    let mut daemon = world.daemon(&[]);
    let net = world.net_of("1.1.0", "ipv6");
    let container = Container::new();
    let result = net.add(&container);
    let address = result["ips"][0]["address"].as_str().unwrap().to_owned();
    let renewals = || world.isc_log().matches("Renew message from").count();
    eventually("it is not renewed", || renewals() >= 2);
    for round in 1..3 {
        daemon.signal(Signal::SIGKILL);
        daemon.wait();
        daemon = world.daemon(&[]);
        let before = renewals();
        eventually("it is not renewed by the next daemon", || renewals() > before);
        assert_eq!(world.daemon_log().matches("ready, with 1 leases").count(), round);
        net.check(&container, &result).ok();
    }
    let log = world.isc_log();
    assert_eq!(log.matches("Solicit message from").count(), 1, "{log}");
    assert_eq!(log.matches("Rebind message from").count(), 0, "{log}");
    assert_eq!(addresses_v6(&container), [address.as_str()]);
    net.del(&container);
    eventually("it is not released in the server's file", || {
        let text = fs::read_to_string(world.node.path("isc6.leases")).unwrap();
        // The last entry of the address is the valid one.
        let last = text.rsplit("iaaddr ").next().unwrap();
        last.contains("binding state released")
    });
    assert!(world.records().is_empty());
}

#[test]
fn another_server_takes_over_if_the_first_fails() {
    let world = World::v6();
    let first = world.isc_v6(12, "isc6.leases");
    let _daemon = world.daemon(&[]);
    let net = world.net_of("1.1.0", "ipv6");
    let container = Container::new();
    let result = net.add(&container);
    let address = addresses_v6(&container);
    let server = || {
        let text = fs::read_to_string(&world.records()[0]).unwrap();
        serde_json::from_str::<Value>(&text).unwrap()["record"]["lease"]["server"].clone()
    };
    let before = server();
    assert!(before.is_array(), "{before}");
    drop(first);
    // A server with another DUID and without leases.
    let _second = world.dnsmasq_v6(600, &[]);
    eventually("it has no lease of the second server", || server() != before);
    assert!(world.server_log().contains("DHCPREBIND"), "{}", world.server_log());
    assert_eq!(addresses_v6(&container), address, "{}", world.daemon_log());
    assert_eq!(world.server_log().matches("DHCPSOLICIT").count(), 0, "{}", world.server_log());
    net.check(&container, &result).ok();
    net.del(&container);
}

#[test]
fn a_lease_is_released_without_the_daemon() {
    let world = World::v6();
    let _server = world.dnsmasq_both(9);
    let mut daemon = world.daemon(&[]);
    let container = world.wired("v1");
    let net = world.alone_of("both");
    net.add(&container);
    assert_eq!(world.leased().len(), 2);
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.wait(), Some(0));
    assert_eq!(world.records().len(), 2);
    let outcome = net.on("DEL", &container).run();
    assert_eq!((outcome.status, outcome.stdout.as_str()), (Some(0), ""));
    assert!(outcome.stderr.contains("error dialing DHCP daemon"), "{outcome:?}");
    world.leases_become(&[]);
    assert!(world.records().is_empty());
}

#[test]
fn both_families_are_leased_to_one_attachment() {
    let world = World::v6();
    let _server = world.dnsmasq_both(9);
    let _daemon = world.daemon(&[]);
    let net = world.net_of("1.1.0", "both");
    let container = Container::new();
    let result = net.add(&container);
    let ip = |n: usize| result["ips"][n]["address"].as_str().unwrap();
    assert_eq!((ip(0), ip(1)), ("192.168.1.5/24", "fd00:1::6/128"));
    assert_eq!(result["routes"].as_array().unwrap().len(), 1, "{result}");
    assert_eq!(addresses(&container), ["192.168.1.5/24"]);
    assert_eq!(addresses_v6(&container), ["fd00:1::6/128"]);
    assert!(container.pings("192.168.1.1"));
    world.leases_become(&["192.168.1.5", FIRST]);
    assert_eq!(world.records().len(), 2);
    let again = world.alone_of("both").add(&container);
    assert_eq!(again["ips"].as_array().unwrap().len(), 2);
    assert_eq!(world.server_log().matches("DHCPSOLICIT").count(), 1, "a repeated ADD");

    net.check(&container, &result).ok();
    let mut other = result.clone();
    other["ips"][1]["address"] = json!("fd00:1::77/128");
    let error = net.check(&container, &other).error();
    let msg =
        "error calling DHCP.Check: the lease for c1/net/eth0 (ipv6) has the address fd00:1::6";
    assert_eq!(error.brief(), (999, msg));

    // GC keeps the leases of both families of a valid attachment.
    let gc = |valid: Value| {
        net.with(&json!({"cni.dev/valid-attachments": valid})).call("GC", "").ok();
    };
    gc(json!([{"containerID": "c1", "ifname": "eth0"}]));
    assert_eq!(world.leased().len(), 2);
    net.del(&container);
    world.leases_become(&[]);
    assert_eq!(world.records().len(), 0);
    let container = Container::new();
    net.add(&container);
    gc(json!([]));
    world.leases_become(&[]);
    assert_eq!(world.records().len(), 0);
    // DEL releases all leases of the attachment, regardless of the configured family.
    net.del(&container);
    let container = world.wired("v1");
    world.alone_of("both").add(&container);
    world.alone("1.1.0").del(&container);
    world.leases_become(&[]);
}

#[test]
fn a_failure_of_one_family_releases_the_other() {
    let world = World::v6();
    let server = world.dnsmasq(9, &[]);
    let flags = ["-timeout", "300ms", "-resendmax=1s", "-resendtimeout", "3s"];
    let _daemon = world.daemon(&flags);
    let net = world.net_of("1.1.0", "both");
    let container = Container::new();
    let (before, empty) = (world.node.snapshot(), container.snapshot(&world.node));
    let error = net.on("ADD", &container).error();
    assert_eq!(error.brief(), (999, "error calling DHCP.Allocate: no more tries"));
    assert_eq!(error.details, "no DHCPv6 server gave an address in 3 s");
    eventually("no release", || world.server_log().contains("DHCPRELEASE(br0) 192.168.1.5"));
    world.leases_become(&[]);
    assert!(world.records().is_empty());
    no_veth_remains(&world.node);
    settles(&before, || world.node.snapshot());
    settles(&empty, || container.snapshot(&world.node));
    drop(server);

    // The IPAM plugin is called alone, so that no caller does a DEL after the failed ADD: the
    // daemon itself releases the IPv4 lease.
    let _server = world.dnsmasq_v6(9, &[]);
    let container = world.wired("v1");
    let error = world.alone_of("both").on("ADD", &container).error();
    assert_eq!(error.details, "no DHCP server gave an address in 3 s");
    assert!(world.server_log().contains("DHCPRELEASE(br0)"), "{}", world.server_log());
    world.leases_become(&[]);
    assert!(world.records().is_empty());
}
