//! Leases of dnsmasq and ISC dhcpd, with the call orders of runtimes.

use std::thread;

use serde_json::{Value, json};

use super::world::{World, addresses};
use crate::support::net::{Net, no_veth_remains, normal_json, settles};
use crate::support::node::{Container, MILESTONES, Node, VERSIONS, eventually};

/// The number of containers of `many_at_once`, unless `DHCP_CONTAINERS` is set.
const MANY: u8 = 50;

#[test]
fn add_check_and_del_work_in_every_version() {
    for version in VERSIONS {
        let world = World::new();
        let _server = world.dnsmasq(9, &[]);
        let _daemon = world.daemon(&[]);
        let net = world.net(version);
        let before = world.node.snapshot();
        let container = Container::new();
        let empty = container.snapshot(&world.node);
        let result = net.add(&container);
        let ip = match version {
            "0.1.0" | "0.2.0" => &result["ip4"]["ip"],
            _ => &result["ips"][0]["address"],
        };
        assert_eq!(ip, "192.168.1.5/24");
        assert_eq!(addresses(&container), ["192.168.1.5/24"]);
        assert!(container.pings("192.168.1.1"));
        assert!(container.sh("ip route").contains("default via 192.168.1.1"));
        world.leases_become(&["192.168.1.5"]);
        assert_eq!(world.records().len(), 1);
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
    let world = World::new();
    let options = [
        "--dhcp-option=6,8.8.8.8,1.1.1.1",
        "--dhcp-option=15,example.com",
        "--dhcp-option=119,a.com,b.a.com",
        "--dhcp-option=26,1400",
        "--dhcp-option=121,10.9.0.0/16,192.168.1.2",
    ];
    let _server = world.dnsmasq(9, &options);
    let _daemon = world.daemon(&[]);
    let container = world.wired("v1");
    let net = world.alone("1.1.0");
    let dns = json!({"nameservers": ["8.8.8.8", "1.1.1.1"], "domain": "example.com",
        "search": ["a.com", "b.a.com"]});
    let ips = json!([{"address": "192.168.1.5/24", "gateway": "192.168.1.1"}]);
    let default = json!({"dst": "0.0.0.0/0", "gw": "192.168.1.1", "mtu": 1400});
    let expected =
        |routes: Value| json!({"cniVersion": "1.1.0", "ips": ips, "dns": dns, "routes": routes});
    assert_eq!(net.add(&container), expected(json!([default])));
    assert_eq!(addresses(&container), [""; 0], "the interface is not this plugin's");
    net.del(&container);

    let asked = json!({"request": [{"option": "121"}], "priority": 77});
    let net = net.with(&json!({"ipam": world.ipam(&asked)}));
    let route = json!({"dst": "10.9.0.0/16", "gw": "192.168.1.2", "mtu": 1400, "priority": 77});
    assert_eq!(net.add(&container), expected(json!([route])));
    net.del(&container);

    let asked = json!({"request": [{"skipDefault": true, "option": "1"}]});
    let net = net.with(&json!({"ipam": world.ipam(&asked)}));
    let bare = json!([{"address": "192.168.1.5/24"}]);
    assert_eq!(net.add(&container), json!({"cniVersion": "1.1.0", "ips": bare}));
    net.del(&container);
    world.leases_become(&[]);
}

#[test]
fn provided_options_reach_the_server() {
    let world = World::new();
    let _server = world.dnsmasq(9, &["--dhcp-vendorclass=set:ours,acme", "--dhcp-match=set:y,77"]);
    let _daemon = world.daemon(&["-broadcast"]);
    let container = world.wired("v1");
    let keys = json!({"provide": [{"option": "host-name", "fromArg": "K8S_POD_NAME"},
        {"option": "60", "value": "acme-1"}, {"option": "user-class", "value": "u"}]});
    let net = world.alone("1.1.0").with(&json!({"ipam": world.ipam(&keys)}));
    net.on("ADD", &container).env("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAME=pod-7").result();
    let log = world.server_log();
    for text in ["client provides name: pod-7", "vendor class: acme-1", "tags: ours, y"] {
        assert!(log.contains(text), "{text}: {log}");
    }
    let lease = std::fs::read_to_string(world.node.path("dnsmasq.leases")).unwrap();
    // The client identifier: a zero byte and "c1/net/eth0".
    assert!(lease.ends_with(" pod-7 00:63:31:2f:6e:65:74:2f:65:74:68:30\n"), "{lease}");
    net.del(&container);
}

#[test]
fn concurrent_dels_all_succeed() {
    for version in MILESTONES {
        let world = World::new();
        let _server = world.dnsmasq(9, &[]);
        let _daemon = world.daemon(&[]);
        let container = world.wired("v1");
        let net = world.alone(version);
        net.add(&container);
        let del = net.on("DEL", &container);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| del.ok());
            }
        });
        del.ok();
        world.leases_become(&[]);
    }
}

#[test]
fn an_exhausted_pool_fails_at_the_time_limit() {
    let world = World::new();
    let _server = world.dnsmasq(1, &[]);
    let _daemon =
        world.daemon(&["-timeout", "500ms", "-resendmax=1s", "--resendtimeout", "2500ms"]);
    let (one, two) = (world.wired("v1"), world.wired("v2"));
    let net = world.alone("1.1.0");
    net.add(&one);
    let started = std::time::Instant::now();
    let error = net.call("ADD", "c2").netns(&two.path()).error();
    assert_eq!(error.brief(), (999, "error calling DHCP.Allocate: no more tries"));
    let took = started.elapsed().as_secs_f64();
    assert!((2.4..30.0).contains(&took), "{took}");
    assert_eq!(error.details, "no DHCP server gave an address in 2.5 s");
    net.del(&one);
    net.call("DEL", "c2").netns(&two.path()).ok();
    net.call("ADD", "c2").netns(&two.path()).result();
    net.call("DEL", "c2").netns(&two.path()).ok();
    world.leases_become(&[]);
}

#[test]
fn two_interfaces_of_a_container_have_two_leases() {
    let world = World::new();
    let _server = world.dnsmasq(2, &[]);
    let _daemon = world.daemon(&[]);
    let container = world.wired("v1");
    world.wire(&container, "v2", "eth1");
    let net = world.alone("0.3.1");
    let address = |result: Value| result["ips"][0]["address"].as_str().unwrap().to_owned();
    assert_eq!(address(net.add(&container)), "192.168.1.5/24");
    assert_eq!(address(net.on("ADD", &container).ifname("eth1").result()), "192.168.1.6/24");
    net.del(&container);
    world.leases_become(&["192.168.1.6"]);
    net.on("DEL", &container).ifname("eth1").ok();
    world.leases_become(&[]);
}

#[test]
fn a_repeated_add_gets_the_same_lease() {
    let world = World::new();
    let _server = world.dnsmasq(9, &[]);
    let _daemon = world.daemon(&[]);
    let container = world.wired("v1");
    let net = world.alone("1.1.0");
    let first = net.add(&container);
    let requests = world.server_log().matches("DHCPREQUEST").count();
    assert_eq!(net.add(&container), first);
    assert_eq!(world.server_log().matches("DHCPREQUEST").count(), requests, "no new exchange");
    // Also in another namespace, because the first container may live.
    let other = world.wired("v2");
    assert_eq!(net.add(&other), first);
    assert_eq!(world.server_log().matches("DHCPREQUEST").count(), requests, "no new exchange");
    net.check(&container, &first).ok();
    net.del(&other);
    world.leases_become(&[]);
    assert_eq!(world.server_log().matches("DHCPRELEASE").count(), 1, "{}", world.server_log());
}

#[test]
fn check_reports_missing_lease_and_address() {
    let world = World::new();
    let _server = world.dnsmasq(9, &[]);
    let _daemon = world.daemon(&[]);
    let container = world.wired("v1");
    let net = world.alone("1.1.0");
    let missing = "error calling DHCP.Check: no lease for c1/net/eth0";
    assert_eq!(net.on("CHECK", &container).error().brief(), (999, missing));
    assert_eq!(world.leased(), [""; 0], "CHECK gets no lease");
    let result = net.add(&container);
    net.check(&container, &result).ok();
    let mut other = result.clone();
    other["ips"][0]["address"] = json!("192.168.1.77/24");
    let msg = "error calling DHCP.Check: the lease for c1/net/eth0 has the address 192.168.1.5";
    assert_eq!(net.check(&container, &other).error().brief(), (999, msg));
    container.sh("ip link del eth0");
    assert_eq!(net.check(&container, &result).error().brief(), (999, missing));
    net.del(&container);
}

#[test]
fn gc_releases_stale_leases() {
    let world = World::new();
    let _server = world.dnsmasq(9, &[]);
    let _daemon = world.daemon(&[]);
    let containers = ["v1", "v2", "v3"].map(|port| world.wired(port));
    let net = world.alone("1.1.0");
    for (id, container) in ["c1", "c2", "c3"].iter().zip(&containers) {
        net.call("ADD", id).netns(&container.path()).result();
    }
    let other = net.with(&json!({"name": "other"}));
    let gc = |net: &Net<'_>, valid: Value| {
        net.with(&json!({"cni.dev/valid-attachments": valid})).call("GC", "").ok();
    };
    gc(&other, json!([]));
    assert_eq!(world.leased().len(), 3, "another network");
    gc(
        &net,
        json!([{"containerID": "c2", "ifname": "eth0"}, {"containerID": "c1", "ifname": "eth9"}]),
    );
    world.leases_become(&["192.168.1.6"]);
    net.call("CHECK", "c2").netns(&containers[1].path()).ok();
    gc(&net, json!([]));
    world.leases_become(&[]);
    assert_eq!(world.records().len(), 0);
}

#[test]
fn a_failed_add_of_bridge_releases_the_lease() {
    let world = World::new();
    let _server = world.dnsmasq(9, &["--dhcp-option=121,10.9.0.0/16,172.16.9.9"]);
    let _daemon = world.daemon(&[]);
    let container = Container::new();
    let (before, empty) = (world.node.snapshot(), container.snapshot(&world.node));
    let asked = world.ipam(&json!({"request": [{"option": "121"}]}));
    let net = world.net("1.1.0").with(&json!({"ipam": asked}));
    // The router of the server's route is unreachable.
    let error = net.on("ADD", &container).error();
    assert!(error.msg.contains("10.9.0.0/16"), "{error:?}");
    no_veth_remains(&world.node);
    world.leases_become(&[]);
    settles(&before, || world.node.snapshot());
    settles(&empty, || container.snapshot(&world.node));
}

#[test]
fn many_leases_are_acquired_concurrently() {
    let count = std::env::var("DHCP_CONTAINERS").ok().and_then(|n| n.parse().ok()).unwrap_or(MANY);
    let world = World::new();
    let _server = world.dnsmasq_random(count.saturating_add(count / 4), &[]);
    let _daemon = world.daemon(&[]);
    let net = world.net("1.1.0");
    let containers: Vec<_> = (0..count).map(|_| Container::new()).collect();
    let started = std::time::Instant::now();
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
    eprintln!("{count} leases in {:?}", started.elapsed());
    let mut given: Vec<_> = containers.iter().flat_map(addresses).collect();
    given.sort();
    given.dedup();
    assert_eq!((given.len(), world.leased().len()), (count.into(), count.into()));
    all("DEL");
    world.leases_become(&[]);
    assert_eq!(world.records().len(), 0);
}

#[test]
fn an_address_in_use_is_declined() {
    let world = World::new();
    let _server = world.dnsmasq(9, &[]);
    let _daemon = world.daemon(&[]);
    let squatter = world.wired("v1");
    squatter.sh("ip addr add 192.168.1.5/24 dev eth0");
    let net = world.net("1.1.0");
    let container = Container::new();
    let result = net.add(&container);
    assert_eq!(result["ips"][0]["address"], "192.168.1.6/24");
    assert!(world.server_log().contains("DHCPDECLINE(br0) 192.168.1.5"), "{}", world.server_log());
    assert!(container.pings("192.168.1.5"));
    net.del(&container);
}

#[test]
fn leases_of_iscs_server_are_renewed_and_released() {
    let world = World::new();
    let _server = world.isc(6);
    let _daemon = world.daemon(&[]);
    let net = world.net("1.1.0");
    let container = Container::new();
    let result = net.add(&container);
    assert_eq!(
        normal_json(&result, &container)["ips"],
        json!([{"address": "192.168.1.5/24", "gateway": "192.168.1.1", "interface": 2}])
    );
    // The log line of a unicast renewal lacks the "via" of DHCPDISCOVER.
    eventually("no renewal", || world.isc_log().matches("DHCPACK on 192.168.1.5").count() >= 3);
    assert_eq!(world.isc_log().matches("DHCPDISCOVER").count(), 1, "{}", world.isc_log());
    net.check(&container, &result).ok();
    assert_eq!(addresses(&container), ["192.168.1.5/24"]);
    net.del(&container);
    eventually("no release", || world.isc_log().contains("DHCPRELEASE of 192.168.1.5"));
    let log = world.isc_log();
    let line = log.lines().find(|line| line.contains("DHCPRELEASE of")).unwrap();
    assert!(line.ends_with("(found)"), "{line}");
    assert!(world.records().is_empty());
}

/// dnsmasq is at the other end of the master.
#[test]
fn a_macvlan_gets_a_lease_from_the_masters_network() {
    let node = Node::new();
    node.sh("ip link add wire0 type veth peer name br0 && ip link set wire0 up \
         && ip link set br0 up && ip addr add 192.168.1.1/24 dev br0");
    let world = World { node };
    let _server = world.dnsmasq(9, &[]);
    let _daemon = world.daemon(&[]);
    let keys = json!({"master": "wire0", "ipam": world.ipam(&json!({}))});
    let net = Net::new(&world.node, "macvlan", "1.1.0", &keys);
    let (one, two) = (Container::new(), Container::new());
    let (before, empty) = (world.node.snapshot(), one.snapshot(&world.node));
    let result = net.add(&one);
    assert_eq!(result["ips"][0]["address"], "192.168.1.5/24");
    assert_eq!(addresses(&one), ["192.168.1.5/24"]);
    assert_eq!(one.ip("-d link show dev eth0")[0]["linkinfo"]["info_kind"], "macvlan");
    assert!(one.sh("ip route").contains("default via 192.168.1.1"));
    let other = net.call("ADD", "c2").netns(&two.path()).result();
    assert_eq!(other["ips"][0]["address"], "192.168.1.6/24");
    assert!(one.pings("192.168.1.1") && one.pings("192.168.1.6"));
    net.check(&one, &result).ok();
    net.del(&one);
    world.leases_become(&["192.168.1.6"]);
    net.call("DEL", "c2").netns(&two.path()).ok();
    world.leases_become(&[]);
    assert_eq!(world.server_log().matches("DHCPRELEASE").count(), 2, "{}", world.server_log());
    assert!(world.records().is_empty());
    settles(&before, || world.node.snapshot());
    settles(&empty, || one.snapshot(&world.node));
}

/// The server knows the MAC of the lease only.
#[test]
fn tuning_warns_of_another_mac_than_that_of_the_lease() {
    let world = World::new();
    let _server = world.dnsmasq(9, &[]);
    let _daemon = world.daemon(&[]);
    world.node.sh("ip link add lan0 up type veth peer name lan1 && ip link set lan1 up master br0");
    let of_pool = json!({"ipam": world.node.host_local(&["10.1.2.0/24"])});
    let macvlan = Net::new(
        &world.node,
        "macvlan",
        "1.1.0",
        &json!({"master": "lan0", "ipam": world.ipam(&json!({}))}),
    );
    for (net, is_leased) in
        [(world.net("1.1.0"), true), (macvlan, true), (world.net("1.1.0").with(&of_pool), false)]
    {
        let container = Container::new();
        let prev = net.add(&container);
        let keys = json!({"type": "tuning", "ipam": null, "prevResult": prev});
        let tuning = Net { plugin: "tuning", ..net.with(&keys) };
        let said = |mac: &str| {
            let outcome = tuning.with(&json!({"mac": mac})).on("ADD", &container).run();
            assert_eq!(outcome.status, Some(0), "{outcome:?}");
            outcome.stderr
        };
        let mac = prev["interfaces"].as_array().unwrap().last().unwrap()["mac"].as_str().unwrap();
        assert_eq!(said(mac), "", "the MAC of the lease");
        let other = said("02:00:00:00:00:2a");
        let expected = format!("the DHCP lease of \"eth0\" is for {mac}: the server does not know");
        assert_eq!(other.contains(&expected), is_leased, "{other:?}");
        tuning.del(&container);
        net.del(&container);
        assert_eq!(world.node.sh("ls /run/cni/cnibox/attachments 2>/dev/null || true"), "");
    }
}
