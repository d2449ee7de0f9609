//! Routes and DNS settings of IPAM, in the container and in the result.

use std::fs;

use serde_json::{Value, json};

use super::simple;
use crate::support::node::{Container, Node};

/// ADD with IPAM `routes`; returns the container and the result.
fn added(node: &Node, routes: &Value) -> (Container, Value) {
    let mut ipam = node.host_local(&["10.1.2.0/24", "2001:db8:1::/64"]);
    ipam["routes"] = routes.clone();
    let container = Container::new();
    let net = simple(node, &json!({"isGateway": true, "ipam": ipam}));
    let result = net.add(&container);
    net.check(&container, &result).ok();
    (container, result)
}

fn lines(text: &str) -> Vec<String> {
    text.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn every_attribute_of_a_route_reaches_kernel_and_result() {
    let node = Node::new();
    let routes = json!([
        {"dst": "10.9.0.0/16", "mtu": 1300, "advmss": 1200, "priority": 77},
        {"dst": "10.8.0.0/16", "gw": "10.1.2.7", "table": 500},
        {"dst": "10.7.0.7/32", "scope": 0},
        {"dst": "2001:db8:9::/48", "priority": 5, "mtu": 1290},
        {"dst": "2001:db8:8::/48", "table": 77},
    ]);
    let (container, result) = added(&node, &routes);
    assert_eq!(result["routes"], routes);
    let show = |args: &str| lines(&container.sh(&format!("ip {args}")));
    assert_eq!(
        show("route show 10.9.0.0/16"),
        ["10.9.0.0/16 via 10.1.2.1 dev eth0 metric 77 mtu 1300 advmss 1200"]
    );
    assert_eq!(show("route show table 500"), ["10.8.0.0/16 via 10.1.2.7 dev eth0"]);
    assert_eq!(show("route show 10.8.0.0/16"), [""; 0], "only in its table");
    assert_eq!(show("route show 10.7.0.7"), ["10.7.0.7 via 10.1.2.1 dev eth0"]);
    assert_eq!(
        show("-6 route show 2001:db8:9::/48"),
        ["2001:db8:9::/48 via 2001:db8:1::1 dev eth0 metric 5 mtu 1290 pref medium"]
    );
    assert_eq!(
        show("-6 route show table 77"),
        ["2001:db8:8::/48 via 2001:db8:1::1 dev eth0 metric 1024 pref medium"]
    );
}

#[test]
fn a_link_scope_route_without_reachable_gateway_is_on_link() {
    let node = Node::new();
    // A route of scope link cannot have the default gateway that ADD would fill in.
    let keys = json!({"ipam": {"type": "fake"}});
    node.script(
        "fake",
        r#"cat >/dev/null; [ $CNI_COMMAND = ADD ] && echo '{"cniVersion":"1.0.0","ips":[{"address":"10.1.2.5/24"}],"routes":[{"dst":"10.9.0.0/16","scope":253},{"dst":"10.8.0.0/16"}]}'; exit 0"#,
    );
    let container = Container::new();
    simple(&node, &keys).add(&container);
    let shown = lines(&container.sh("ip route show"));
    assert!(shown.contains(&"10.9.0.0/16 dev eth0 scope link".to_owned()), "{shown:?}");
    assert!(shown.iter().any(|line| line.starts_with("10.8.0.0/16 dev eth0")), "{shown:?}");
}

#[test]
fn two_gateways_to_one_destination_make_one_multipath_route() {
    for (family, dst, gateways) in [
        ("-4", "10.9.0.0/16", ["10.1.2.11", "10.1.2.12"]),
        ("-6", "2001:db8:9::/48", ["2001:db8:1::11", "2001:db8:1::12"]),
    ] {
        let node = Node::new();
        let routes = json!([{"dst": dst, "gw": gateways[0]}, {"dst": dst, "gw": gateways[1]}]);
        let (container, result) = added(&node, &routes);
        assert_eq!(result["routes"], routes);
        let shown = container.ip(&format!("{family} route show {dst}"));
        assert_eq!(shown.as_array().unwrap().len(), 1, "{shown}");
        let hops = shown[0]["nexthops"].as_array().unwrap();
        let hops: Vec<_> = hops.iter().map(|hop| hop["gateway"].as_str().unwrap()).collect();
        assert_eq!(hops, gateways);
    }
}

#[test]
fn duplicate_routes_are_added_once() {
    let node = Node::new();
    let (container, _) = added(
        &node,
        &json!([{"dst": "10.9.0.0/16"}, {"dst": "10.9.0.0/16", "gw": "10.1.2.1"},
                {"dst": "10.9.3.4/16"}, {"dst": "2001:db8:9::5/48"}, {"dst": "2001:db8:9::/48"}]),
    );
    assert_eq!(
        lines(&container.sh("ip route show 10.9.0.0/16")),
        ["10.9.0.0/16 via 10.1.2.1 dev eth0"]
    );
    assert_eq!(lines(&container.sh("ip -6 route show 2001:db8:9::/48")).len(), 1);
}

#[test]
fn add_names_an_unreachable_gateway_and_rolls_back() {
    let node = Node::new();
    let mut ipam = node.host_local(&["10.1.2.0/24"]);
    ipam["routes"] = json!([{"dst": "10.9.0.0/16", "gw": "172.16.0.1"}]);
    node.sh("ip link add br0 address 02:00:00:00:00:0b up type bridge");
    let net = simple(&node, &json!({"ipam": ipam}));
    let container = Container::new();
    let before = (node.snapshot(), container.snapshot(&node));
    let error = net.on("ADD", &container).error();
    let start = "failed to add route '10.9.0.0/16 via 172.16.0.1 dev eth0': ";
    assert!(error.code == 999 && error.msg.starts_with(start), "{error:?}");
    crate::support::net::settles(&before.0, || node.snapshot());
    crate::support::net::settles(&before.1, || container.snapshot(&node));
}

#[test]
fn dns_of_ipam_is_used_unless_the_network_has_its_own() {
    let node = Node::new();
    let file = node.path("resolv.conf");
    fs::write(&file, "nameserver 192.0.2.3\nsearch a.example\n").unwrap();
    let mut ipam = node.host_local(&["10.1.2.0/24"]);
    ipam["resolvConf"] = json!(file);
    let own = json!({"nameservers": ["192.0.2.4"], "domain": "b.example", "options": ["x"]});
    for (dns, expected) in [
        (json!({}), json!({"nameservers": ["192.0.2.3"], "search": ["a.example"]})),
        (own.clone(), own),
        (json!({"domain": "c.example"}), json!({"domain": "c.example"})),
        (json!({"search": ["d"]}), json!({"search": ["d"]})),
        (json!({"options": ["e"]}), json!({"options": ["e"]})),
        (json!({"nameservers": [], "search": [], "options": []}), Value::Null),
        (json!({"nameservers": []}), Value::Null),
    ] {
        let container = Container::new();
        let net = simple(&node, &json!({"ipam": ipam, "dns": dns}));
        let result = net.add(&container);
        assert_eq!(result["dns"], expected, "{dns}");
        net.del(&container);
    }
}

/// The subnet of the containers is that of another bridge of the node.
#[test]
fn a_new_bridge_warns_of_a_subnet_that_is_routed_elsewhere() {
    let node = Node::new();
    node.sh("ip link add docker0 up type bridge && ip addr add 10.1.0.1/16 dev docker0");
    node.sh("ip link add far0 up type bridge && ip route add 10.2.0.0/16 via 10.1.0.9");
    let said = |id: &str, keys: &Value| {
        let outcome = simple(&node, keys).call("ADD", id).netns(&Container::new().path()).run();
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        outcome.stderr
    };
    let within = |subnet: &str, bridge: &str, is_gateway: bool| json!({"bridge": bridge, "isGateway": is_gateway, "ipam": node.host_local(&[subnet])});
    let first = said("c1", &within("10.1.2.0/24", "cni0", true));
    let expected = "10.1.0.0/16, in or around the subnet 10.1.2.0/24, is routed to \"docker0\"; ";
    assert!(first.contains(expected) && first.lines().count() == 1, "{first}");
    assert_eq!(said("c2", &within("10.1.2.0/24", "cni0", true)), "", "the bridge exists");
    assert_eq!(said("c3", &within("10.1.3.0/24", "cni1", false)), "", "the node does not route");
    assert_eq!(said("c4", &within("10.2.3.0/24", "cni2", true)), "", "a route through a router");
    assert_eq!(said("c5", &within("10.3.3.0/24", "cni3", true)), "", "nobody else's");
}
