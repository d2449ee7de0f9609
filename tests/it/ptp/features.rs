//! Routes and addresses on both sides, and refusals.

use std::fs;

use serde_json::{Value, json};

use super::{SUBJECT, simple};
use crate::support::net::{FIRST, Net, addresses, no_veth_remains, routes, settles};
use crate::support::node::{Container, Node, assert_unchanged, eventually};
use crate::support::traffic::Place;

fn host_end(result: &Value) -> &str {
    result["interfaces"][0]["name"].as_str().unwrap()
}

fn dual(node: &Node) -> Net<'_> {
    Net::new(node, "ptp", "1.1.0", &(SUBJECT.keys)(node))
}

#[test]
fn host_and_container_have_exactly_these_routes_and_addresses() {
    let node = Node::new();
    let container = Container::new();
    let result = dual(&node).add(&container);
    let veth = host_end(&result);
    assert_eq!(
        routes(&container.sh("ip route show")),
        [
            "10.1.2.0/24 via 10.1.2.1 dev eth0 src 10.1.2.2",
            "10.1.2.1 dev eth0 scope link src 10.1.2.2",
            "default via 10.1.2.1 dev eth0",
        ]
    );
    assert_eq!(
        routes(&container.sh("ip -6 route show")),
        [
            "2001:db8:1::/64 via 2001:db8:1::1 dev eth0 src 2001:db8:1::2 metric 1024 pref medium",
            "2001:db8:1::1 dev eth0 src 2001:db8:1::2 metric 1024 pref medium",
            "default via 2001:db8:1::1 dev eth0 metric 1024 pref medium",
        ]
    );
    assert_eq!(addresses(&container.ip("addr show eth0")), ["10.1.2.2/24", "2001:db8:1::2/64"]);
    assert_eq!(routes(&node.sh("ip route show")), [format!("10.1.2.2 dev {veth} scope host")]);
    let v6 = routes(&node.sh("ip -6 route show"));
    assert_eq!(
        v6,
        [
            format!("2001:db8:1::1 dev {veth} proto kernel metric 256 pref medium"),
            format!("2001:db8:1::2 dev {veth} metric 1024 pref medium"),
        ]
    );
    let on_host = addresses(&node.ip(&format!("addr show {veth}")));
    assert_eq!(on_host, ["10.1.2.1/32", "2001:db8:1::1/128"]);
    // Before Linux 6.2 the kernel tells the state later.
    let is_up = || container.ip("link show eth0")[0]["operstate"] == "UP";
    eventually("the interface is up", is_up);
    for (link, at) in [
        (node.ip(&format!("link show {veth}")), "host"),
        (container.ip("link show eth0"), "container"),
    ] {
        assert_eq!((&link[0]["mtu"], &link[0]["operstate"]), (&json!(5000), &json!("UP")), "{at}");
        let index = usize::from(at == "container");
        assert_eq!(link[0]["address"], result["interfaces"][index]["mac"]);
    }
    assert_eq!(node.sh("cat /proc/sys/net/ipv4/ip_forward"), "1\n");
    assert_eq!(node.sh("cat /proc/sys/net/ipv6/conf/all/forwarding"), "1\n");
    assert_eq!(node.sh(&format!("cat /proc/sys/net/ipv6/conf/{veth}/accept_ra")), "0\n");
}

#[test]
fn only_the_families_in_use_are_forwarded() {
    let node = Node::new();
    simple(&node, &json!({})).add(&Container::new());
    assert_eq!(node.sh("cat /proc/sys/net/ipv4/ip_forward"), "1\n");
    assert_eq!(node.sh("cat /proc/sys/net/ipv6/conf/all/forwarding"), "0\n");
}

#[test]
fn several_addresses_may_share_a_gateway() {
    let node = Node::new();
    let mut ipam = node.host_local(&[]);
    ipam["ranges"] = json!([
        [{"subnet": "10.1.2.0/24", "rangeEnd": "10.1.2.9"}],
        [{"subnet": "10.1.2.0/24", "rangeStart": "10.1.2.20"}],
        [{"subnet": "10.3.0.0/24", "gateway": "10.1.2.1"}]]);
    let net = simple(&node, &json!({"ipam": ipam}));
    let container = Container::new();
    let result = net.add(&container);
    for ip in ["10.1.2.2", "10.1.2.20", "10.3.0.1"] {
        assert!(node.reaches(ip), "{ip}");
    }
    let shown = routes(&node.sh("ip route show"));
    assert_eq!(shown.len(), 3, "{shown:?}");
    assert_eq!(addresses(&node.ip(&format!("addr show {}", host_end(&result)))), ["10.1.2.1/32"]);
    assert_eq!(
        routes(&container.sh("ip route show")),
        [
            "10.1.2.0/24 via 10.1.2.1 dev eth0 src 10.1.2.2",
            "10.1.2.1 dev eth0 scope link src 10.1.2.2",
            "10.3.0.0/24 via 10.1.2.1 dev eth0 src 10.3.0.1",
        ]
    );
    net.check(&container, &result).ok();
    net.del(&container);
    no_veth_remains(&node);
    assert_eq!(net.leases(), [""; 0]);
}

/// An IPAM plugin that returns this address on ADD.
fn fixed<'n>(node: &'n Node, ip: &Value) -> Net<'n> {
    let result = json!({"cniVersion": "1.0.0", "ips": [ip], "routes": [{"dst": "0.0.0.0/0"}]});
    node.script(
        "fixed",
        &format!(
            "cat >/dev/null; [ $CNI_COMMAND = ADD ] && echo '{result}'; echo $CNI_COMMAND >> {}; exit 0",
            node.path("calls").display()
        ),
    );
    simple(node, &json!({"ipam": {"type": "fixed"}}))
}

#[test]
fn a_single_address_without_a_subnet_is_routed() {
    let node = Node::new();
    let net = fixed(&node, &json!({"address": "10.7.7.7/32", "gateway": "10.9.9.9"}));
    let container = Container::new();
    let result = net.add(&container);
    assert!(container.pings("10.9.9.9") && node.reaches("10.7.7.7"));
    assert_eq!(
        routes(&container.sh("ip route show")),
        ["10.9.9.9 dev eth0 scope link src 10.7.7.7", "default via 10.9.9.9 dev eth0"]
    );
    net.check(&container, &result).ok();
}

#[test]
fn an_address_without_a_gateway_is_refused_and_released() {
    let node = Node::new();
    for ip in [
        json!({"address": "10.7.7.7/24"}),
        json!({"address": "10.7.7.7/24", "gateway": "2001:db8::1"}),
    ] {
        drop(fs::remove_file(node.path("calls")));
        let net = fixed(&node, &ip);
        let msg = "ptp: the IPAM plugin returned no gateway for 10.7.7.7/24";
        net.add_is_refused(&Container::new(), 7, msg);
        assert_eq!(fs::read_to_string(node.path("calls")).unwrap(), "ADD\nDEL\n");
    }
    assert_eq!(node.sh("cat /proc/sys/net/ipv4/ip_forward"), "0\n", "not even forwarding");
}

#[test]
fn a_host_route_of_another_owner_is_kept_and_add_refused() {
    for (route, ip, gateway) in [
        ("10.7.7.7 via 192.0.2.254 dev up0", "10.7.7.7/24", "10.7.7.1"),
        ("10.7.7.7 via 192.0.2.254 dev up0 metric 100", "10.7.7.7/32", "10.9.9.9"),
        ("10.7.7.7 dev up0 scope host", "10.7.7.7/24", "10.7.7.1"),
        ("10.7.7.7 nexthop via 192.0.2.8 nexthop via 192.0.2.9", "10.7.7.7/24", "10.7.7.1"),
        ("2001:db8:7::7 via 2001:db8:2::9 dev up0", "2001:db8:7::7/64", "2001:db8:7::1"),
        ("2001:db8:7::7 dev up0 metric 7", "2001:db8:7::7/64", "2001:db8:7::1"),
    ] {
        let node = Node::new();
        node.sh("ip link add up0 up type veth peer name up1; ip link set up1 up");
        node.sh("ip addr add 192.0.2.1/24 dev up0; ip addr add 2001:db8:2::1/64 dev up0 nodad");
        node.sh(&format!("ip route add {route}"));
        // Enabled here, because ADD never disables it again.
        node.sh("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1");
        let container = Container::new();
        let before = (node.snapshot(), container.snapshot(&node));
        let net = fixed(&node, &json!({"address": ip, "gateway": gateway}));
        let error = net.on("ADD", &container).error();
        let start = "failed to add route on host: the host has the route \"";
        assert!(error.msg.starts_with(start), "{route}: {error:?}");
        let dst = route.split(' ').next().unwrap();
        assert!(error.msg.contains(dst) && error.details.contains("ip route del"), "{error:?}");
        settles(&before.0, || node.snapshot());
        settles(&before.1, || container.snapshot(&node));
        net.del(&container);
        settles(&before.0, || node.snapshot());
    }
}

#[test]
fn the_route_of_a_living_container_is_named_and_kept() {
    let node = Node::new();
    let (one, two) = (Container::new(), Container::new());
    let net = |name: &str| {
        let ipam = json!({"type": "host-local", "dataDir": node.path(name), "ranges": [[{"subnet": "10.1.2.0/24"}]]});
        simple(&node, &json!({"name": name, "ipam": ipam}))
    };
    let (first, second) = (net("one"), net("two"));
    let prev = first.add(&one);
    let error = second.call("ADD", "c2").netns(&two.path()).error();
    let veth = host_end(&prev);
    let msg =
        format!("failed to add route on host: the host has the route \"10.1.2.2/32 dev {veth}\"");
    assert_eq!(error.brief(), (999, msg.as_str()));
    assert!(error.details.contains("eth0 of container c1 in network \"one\""), "{error:?}");
    assert!(node.reaches(FIRST[0]));
    second.call("DEL", "c2").netns(&two.path()).ok();
    assert!(node.reaches(FIRST[0]));
    first.check(&one, &prev).ok();
}

/// A container's address is free when its namespace is gone, a little before the kernel deletes
/// the pair.
#[test]
fn add_waits_for_the_route_of_a_pair_being_deleted() {
    let node = Node::new();
    let net = fixed(&node, &json!({"address": "10.7.7.7/24", "gateway": "10.7.7.1"}));
    for round in 0..10 {
        let container = Container::new();
        net.call("ADD", &format!("c{round}")).netns(&container.path()).result();
        assert!(node.reaches("10.7.7.7"), "{round}");
        drop(container);
    }
}

#[test]
fn the_route_of_an_earlier_pair_is_replaced() {
    let node = Node::new();
    let (earlier, container) = (Container::new(), Container::new());
    let net = fixed(&node, &json!({"address": "10.7.7.7/24", "gateway": "10.7.7.1"}));
    net.add(&earlier);
    let before = node.sh("ip route show");
    let unreachable = json!({"cniVersion": "1.0.0",
        "ips": [{"address": "10.7.7.7/24", "gateway": "10.7.7.1"}],
        "routes": [{"dst": "10.9.0.0/16", "gw": "172.16.0.1"}]});
    node.script(
        "failing",
        &format!("cat >/dev/null; [ $CNI_COMMAND != ADD ] || echo '{unreachable}'"),
    );
    let failing = net.with(&json!({"ipam": {"type": "failing"}}));
    let error = failing.on("ADD", &container).error();
    assert!(error.msg.starts_with("failed to add route '10.9.0.0/16 via"), "{error:?}");
    assert_eq!(node.sh("ip route show"), before);
    let result = net.add(&container);
    let shown = routes(&node.sh("ip route show 10.7.7.7"));
    assert_eq!(shown, [format!("10.7.7.7 dev {} scope host", host_end(&result))]);
    assert!(node.reaches("10.7.7.7"));
}

#[test]
fn a_second_add_is_refused_and_the_first_lease_stays() {
    let node = Node::new();
    let container = Container::new();
    let net = simple(&node, &json!({}));
    let result = net.add(&container);
    let before = (node.snapshot(), container.snapshot(&node));
    let error = net.on("ADD", &container).error();
    assert!(error.msg.starts_with("container veth name (\"eth0\") peer provided (\"veth"));
    assert!(error.msg.ends_with("\") already exists"), "{error:?}");
    assert_unchanged(&before.0, &node.snapshot());
    assert_unchanged(&before.1, &container.snapshot(&node));
    assert_eq!(net.leases(), ["10.1.2.2"]);
    net.check(&container, &result).ok();
    assert!(node.reaches(FIRST[0]));
}

#[test]
fn add_rolls_back_if_the_kernel_refuses_a_route() {
    let node = Node::new();
    let mut ipam = node.host_local(&["10.1.2.0/24"]);
    ipam["routes"] = json!([{"dst": "10.9.0.0/16", "gw": "172.16.0.1"}]);
    let net = simple(&node, &json!({"ipam": ipam}));
    let container = Container::new();
    let before = (node.snapshot(), container.snapshot(&node));
    let error = net.on("ADD", &container).error();
    assert!(error.msg.starts_with("failed to add route '10.9.0.0/16 via 172.16.0.1"), "{error:?}");
    settles(&before.0, || node.snapshot());
    settles(&before.1, || container.snapshot(&node));
}

#[test]
fn bad_configurations_change_nothing() {
    let node = Node::new();
    let container = Container::new();
    let masq = "unknown ipmasq backend \"x\"";
    for (keys, code, msg) in [
        (json!({"ipMasq": true, "ipMasqBackend": "x"}), 7, masq),
        (json!({"mtu": 4_294_967_296_u64}), 7, "invalid MTU 4294967296, must be 0, or 68 to 65535"),
        (json!({"mtu": 65_536}), 7, "invalid MTU 65536, must be 0, or 68 to 65535"),
        (json!({"mtu": 10}), 7, "invalid MTU 10, must be 0, or 68 to 65535"),
        (json!({"ipam": null}), 999, "no plugin name provided"),
        (json!({"ipam": {}}), 999, "no plugin name provided"),
    ] {
        simple(&node, &keys).add_is_refused(&container, code, msg);
    }
    for (key, value) in [("mtu", json!("1500")), ("ipMasq", json!("true")), ("ipam", json!([]))] {
        let before = node.snapshot();
        let error = simple(&node, &json!({key: value})).on("ADD", &container).error();
        assert!(error.code == 6 && format!("{error:?}").contains(key), "{key}: {error:?}");
        assert_unchanged(&before, &node.snapshot());
    }
    let status = simple(&node, &json!({"ipMasq": true, "ipMasqBackend": "x"}));
    let status = status.call("STATUS", "").error();
    assert_eq!(status.brief(), (50, masq));
    assert_eq!(
        simple(&node, &json!({"ipam": null})).call("STATUS", "").error().msg,
        "no plugin name provided"
    );
}

#[test]
fn del_works_after_masquerading_by_the_reference() {
    let node = Node::new();
    let container = Container::new();
    let net = simple(&node, &json!({}));
    net.add(&container);
    net.with(&json!({"ipMasq": true})).del(&container);
    no_veth_remains(&node);
    assert_eq!(net.leases(), [""; 0]);
}

#[test]
fn an_invalid_namespace_is_code_8_and_del_releases() {
    let node = Node::new();
    let net = simple(&node, &json!({}));
    let file = node.path("plain");
    fs::write(&file, "").unwrap();
    let path = file.display().to_string();
    let before = node.snapshot();
    let error = net.call("ADD", "c1").netns(&path).error();
    let start = format!("failed to open netns \"{path}\": unknown FS magic on \"{path}\": ");
    assert!(error.code == 8 && error.msg.starts_with(&start), "{error:?}");
    assert_unchanged(&before, &node.snapshot());
    let container = Container::new();
    net.add(&container);
    net.call("DEL", "c1").netns(&path).ok();
    assert_eq!(net.leases(), [""; 0]);
}

#[test]
fn cni_args_are_passed_to_ipam() {
    let node = Node::new();
    let container = Container::new();
    let net = simple(&node, &json!({}));
    let result =
        net.on("ADD", &container).env("CNI_ARGS", "IgnoreUnknown=1;MAC=zz;IP=10.1.2.50").result();
    assert_eq!(result["ips"][0]["address"], "10.1.2.50/24");
    net.on("DEL", &container).env("CNI_ARGS", "none").ok();
}

#[test]
fn dns_of_ipam_is_used_unless_the_network_has_its_own() {
    let node = Node::new();
    let file = node.path("resolv.conf");
    fs::write(&file, "nameserver 192.0.2.3\n").unwrap();
    let mut ipam = node.host_local(&["10.1.2.0/24"]);
    ipam["resolvConf"] = json!(file);
    for (dns, expected) in [
        (json!({}), json!({"nameservers": ["192.0.2.3"]})),
        (json!({"domain": "c.example"}), json!({"domain": "c.example"})),
        (json!({"nameservers": [], "search": [], "options": []}), Value::Null),
    ] {
        let container = Container::new();
        let net = simple(&node, &json!({"ipam": ipam, "dns": dns}));
        assert_eq!(net.add(&container)["dns"], expected);
        net.del(&container);
    }
}

/// The subnet of the containers is that of a bridge of the node.
#[test]
fn the_first_add_warns_of_a_subnet_routed_elsewhere() {
    let node = Node::new();
    node.sh("ip link add docker0 up type bridge && ip addr add 10.1.0.1/16 dev docker0");
    let net = Net::new(&node, "ptp", "1.1.0", &json!({"ipam": node.host_local(&["10.1.2.0/24"])}));
    let pods = [Container::new(), Container::new()];
    let expected = "10.1.0.0/16, in or around the subnet 10.1.2.0/24, is routed to \"docker0\"; ";
    for (pod, (id, is_told)) in pods.iter().zip([("c1", true), ("c2", false)]) {
        let outcome = net.call("ADD", id).netns(&pod.path()).run();
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        assert_eq!(outcome.stderr.contains(expected), is_told, "{id}: {outcome:?}");
        assert_eq!(outcome.stderr.lines().count(), usize::from(is_told), "{outcome:?}");
    }
}
