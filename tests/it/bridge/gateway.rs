//! The bridge as gateway: addresses, conflicts, forwarding, and flags of the container's IPv6
//! address.

use serde_json::{Value, json};

use super::{dual, simple};
use crate::support::net::{FIRST, Net, addresses, merged, no_veth_remains, settles};
use crate::support::node::{Container, Node, VERSIONS, assert_unchanged, eventually};
use crate::support::traffic::Place;

fn on_bridge(node: &Node) -> Vec<String> {
    addresses(&node.ip("addr show br0"))
}

fn forwarding(node: &Node) -> [String; 2] {
    ["ipv4/ip_forward", "ipv6/conf/all/forwarding"]
        .map(|key| node.sh(&format!("cat /proc/sys/net/{key}")).trim().to_owned())
}

#[test]
fn is_gateway_sets_address_and_forwarding_of_the_family() {
    for (subnet, gateway, flags) in [
        ("10.1.2.0/24", "10.1.2.1/24", ["1", "0"]),
        ("2001:db8:1::/64", "2001:db8:1::1/64", ["0", "1"]),
    ] {
        let node = Node::new();
        assert_eq!(forwarding(&node), ["0", "0"]);
        let keys = json!({"isGateway": true, "ipam": node.host_local(&[subnet])});
        let result = simple(&node, &keys).add(&Container::new());
        assert_eq!(on_bridge(&node), [gateway]);
        assert_eq!(forwarding(&node), flags);
        assert_eq!(result["routes"], Value::Null, "a default route was not asked for");
    }
}

#[test]
fn without_is_gateway_no_address_and_no_forwarding() {
    let node = Node::new();
    let container = Container::new();
    let result = simple(&node, &json!({})).add(&container);
    assert_eq!(on_bridge(&node), [""; 0]);
    assert_eq!(forwarding(&node), ["0", "0"]);
    assert_eq!(container.sh("ip route show default"), "");
    assert_eq!(result["ips"][0]["gateway"], "10.1.2.1", "the range's");
}

#[test]
fn is_default_gateway_implies_is_gateway() {
    let node = Node::new();
    let keys = merged(&dual(&node), &json!({"isDefaultGateway": true}));
    let container = Container::new();
    Net::new(&node, "bridge", "1.1.0", &keys).add(&container);
    assert_eq!(on_bridge(&node), ["10.1.2.1/24", "2001:db8:1::1/64"]);
    let default = |args| container.ip(args)[0].clone();
    let v4 = default("route show default");
    assert_eq!((&v4["gateway"], &v4["prefsrc"]), (&json!("10.1.2.1"), &Value::Null));
    assert_eq!(default("-6 route show default")["gateway"], "2001:db8:1::1");
}

#[test]
fn a_default_route_of_ipam_is_not_added_twice() {
    for (route, gw) in [
        (json!({"dst": "0.0.0.0/0"}), "10.1.2.1"),
        (json!({"dst": "0.0.0.0/0", "gw": "10.1.2.1"}), "10.1.2.1"),
        (json!({"dst": "0.0.0.0/0", "gw": "10.1.2.9"}), "10.1.2.9"),
    ] {
        let node = Node::new();
        let mut ipam = node.host_local(&["10.1.2.0/24"]);
        ipam["routes"] = json!([route]);
        let container = Container::new();
        let net = simple(&node, &json!({"isDefaultGateway": true, "ipam": ipam}));
        let result = net.add(&container);
        assert_eq!(result["routes"], json!([route]), "the route is told as IPAM gave it");
        let routes = container.ip("route show default");
        assert_eq!(routes.as_array().unwrap().len(), 1, "{routes}");
        assert_eq!(routes[0]["gateway"], gw);
        net.check(&container, &result).ok();
    }
}

#[test]
fn an_ipv4_default_route_does_not_replace_the_ipv6_one() {
    let node = Node::new();
    let mut keys = merged(&dual(&node), &json!({"isDefaultGateway": true}));
    keys["ipam"]["routes"] = json!([{"dst": "0.0.0.0/0"}]);
    let container = Container::new();
    let result = Net::new(&node, "bridge", "1.0.0", &keys).add(&container);
    let expected = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0", "gw": "2001:db8:1::1"}]);
    assert_eq!(result["routes"], expected);
    assert_eq!(container.ip("-6 route show default")[0]["gateway"], "2001:db8:1::1");
}

/// Columns: address on the bridge before ADD, gateway, subnet, whether ADD without `forceAddress`
/// fails, addresses on the bridge after ADD with `forceAddress`.
#[test]
fn force_address_replaces_conflicting_addresses_only() {
    for (present, gateway, subnet, refused, forced) in [
        ("10.0.0.1/8", "10.1.2.3", "10.1.0.0/16", true, &["10.1.2.3/16"][..]),
        ("192.168.0.1/24", "10.1.2.3", "10.1.0.0/16", true, &["10.1.2.3/16"]),
        ("10.1.2.3/16", "10.1.2.3", "10.1.0.0/16", false, &["10.1.2.3/16"]),
        ("10.1.2.3/24", "10.1.2.3", "10.1.0.0/16", true, &["10.1.2.3/16"]),
        ("2001:db8::1/32", "2001:db8:1::1", "2001:db8:1::/64", true, &["2001:db8:1::1/64"]),
        ("2001:db8:1::9/80", "2001:db8:1::1", "2001:db8:1::/64", true, &["2001:db8:1::1/64"]),
        (
            "2001:db8:9::1/64",
            "2001:db8:1::1",
            "2001:db8:1::/64",
            false,
            &["2001:db8:1::1/64", "2001:db8:9::1/64"],
        ),
        (
            "2001:db8:9::1/64",
            "10.1.2.3",
            "10.1.0.0/16",
            false,
            &["10.1.2.3/16", "2001:db8:9::1/64"],
        ),
    ] {
        let node = Node::new();
        node.sh("ip link add br0 up type bridge");
        node.sh(&format!("ip addr add {present} dev br0 nodad"));
        let mut ipam = node.host_local(&[subnet]);
        ipam["ranges"][0][0]["gateway"] = gateway.into();
        let net = simple(&node, &json!({"isGateway": true, "ipam": ipam}));
        let container = Container::new();
        if refused {
            let length = subnet.split_once('/').unwrap().1;
            let msg = format!(
                "failed to set bridge addr: \"br0\" already has an IP address different from {gateway}/{length}"
            );
            let before = container.snapshot(&node);
            let error = net.on("ADD", &container).error();
            assert_eq!(error.brief(), (999, msg.as_str()));
            assert!(error.details.contains(present), "{error:?}");
            assert_eq!(on_bridge(&node), [present]);
            assert_unchanged(&before, &container.snapshot(&node));
            assert_eq!(net.leases(), [""; 0]);
            no_veth_remains(&node);
        } else {
            net.add(&container);
            assert_eq!(on_bridge(&node), forced, "without force");
            net.del(&container);
        }
        net.with(&json!({"forceAddress": true})).add(&container);
        assert_eq!(on_bridge(&node), forced, "{present} {gateway}");
        assert!(container.reaches(gateway));
    }
}

/// Each link has a link-local address of the kernel, and the subnets of all are the same.
#[test]
fn a_link_local_gateway_conflicts_with_no_address() {
    let node = Node::new();
    node.sh("ip link add up0 type dummy 2>/dev/null || ip link add up0 type veth peer name up1
             ip link set up0 up");
    for (index, gateway) in ["fe80::1", "fe80::2"].iter().enumerate() {
        let subnet = format!("2001:db8:{index}::/64");
        let mut ipam = node.host_local(&[]);
        ipam["ranges"] = json!([[{"subnet": subnet, "gateway": gateway}]]);
        let container = Container::new();
        let net = simple(&node, &json!({"isDefaultGateway": true, "ipam": ipam}));
        let net = net.with(&json!({"name": format!("net{index}")}));
        let outcome = net.on("ADD", &container).run();
        assert_eq!((outcome.status, outcome.stderr.as_str()), (Some(0), ""), "{outcome:?}");
        let result = serde_json::from_str(&outcome.stdout).unwrap();
        assert_eq!(container.ip("-6 route show default")[0]["gateway"], *gateway);
        assert!(container.reaches(&format!("{gateway}%eth0")));
        net.check(&container, &result).ok();
    }
}

#[test]
fn a_failed_add_removes_no_address_of_the_bridge() {
    let node = Node::new();
    let (one, two) = (Container::new(), Container::new());
    let net = |subnet: &str| {
        let keys = json!({"isGateway": true, "ipam": node.host_local(&[subnet])});
        simple(&node, &keys)
    };
    net("10.1.2.0/24").add(&one);
    // Refused after the container is configured, and by the kernel at the new address itself.
    let mut ipam = node.host_local(&["10.2.0.0/24"]);
    ipam["ranges"][0][0]["gateway"] = json!("10.2.0.1");
    let forced =
        net("10.2.0.0/24").with(&json!({"name": "other", "forceAddress": true, "ipam": ipam}));
    node.sh("nft 'add table inet cnibox_masquerade; add chain inet cnibox_masquerade postrouting; add map inet cnibox_masquerade pods4 { type ipv4_addr : mark; }'");
    let masquerades = forced.with(&json!({"ipMasq": true, "ipMasqBackend": "nftables"}));
    let call = masquerades.call("ADD", "c2").netns(&two.path());
    assert!(call.error().msg.contains("cnibox_masquerade"), "{:?}", call.error());
    assert_eq!(on_bridge(&node), ["10.1.2.1/24"]);
    assert!(one.reaches("10.1.2.1"));
    forced.call("ADD", "c2").netns(&two.path()).result();
    assert_eq!(on_bridge(&node), ["10.2.0.1/24"]);
}

#[test]
fn three_ranges_give_three_addresses_and_gateways() {
    let ranges = ["192.168.0.0/24", "2001:db8:1::/64", "2001:db8:2::/64"];
    for version in VERSIONS {
        let node = Node::new();
        let keys = json!({"cniVersion": version, "isDefaultGateway": true,
                          "ipam": node.host_local(&ranges)});
        let net = simple(&node, &keys);
        let container = Container::new();
        let msg = format!("CNI version {version} does not support more than 1 address per family");
        if version < "0.3.0" {
            let error = net.on("ADD", &container).error();
            assert_eq!(error.brief(), (7, msg.as_str()));
            no_veth_remains(&node);
            net.on("DEL", &container).ok();
            continue;
        }
        let result = net.add(&container);
        assert_eq!(result["ips"].as_array().unwrap().len(), 3);
        let expected = ["192.168.0.1/24", "2001:db8:2::1/64", "2001:db8:1::1/64"];
        let mut present = on_bridge(&node);
        present.sort();
        let mut sorted = expected.map(str::to_owned);
        sorted.sort();
        assert_eq!(present, sorted);
        let own = addresses(&container.ip("addr show eth0"));
        assert_eq!(own.len(), 3, "{own:?}");
        assert_eq!(container.ip("-6 route show default")[0]["gateway"], "2001:db8:1::1");
        for gateway in ["192.168.0.1", "2001:db8:1::1", "2001:db8:2::1"] {
            assert!(container.reaches(gateway), "{gateway}");
        }
        net.del(&container);
    }
}

#[test]
fn two_ipv4_ranges_both_have_their_gateway() {
    let node = Node::new();
    let ranges = ["10.1.0.0/24", "10.2.0.0/24"];
    let net = simple(&node, &json!({"isGateway": true, "ipam": node.host_local(&ranges)}));
    let container = Container::new();
    net.add(&container);
    assert_eq!(on_bridge(&node), ["10.1.0.1/24", "10.2.0.1/24"]);
    assert!(container.reaches("10.1.0.1") && container.reaches("10.2.0.1"));
    net.call("ADD", "c2").netns(&Container::new().path()).result();
}

/// The global IPv6 address of the container with its flags, as `ip -j` prints it.
fn ipv6_flags(container: &Container) -> Value {
    let infos = container.ip("-6 addr show eth0 scope global");
    // `ip` prints an empty object for each address that the scope filter excludes.
    let mut infos = infos[0]["addr_info"].as_array().unwrap().clone();
    infos.retain(|info| info["local"].is_string());
    assert_eq!(infos.len(), 1);
    infos.remove(0)
}

#[test]
fn add_updates_neighbour_caches_of_a_reused_address() {
    let node = Node::new();
    let net = simple(&node, &json!({}));
    let neighbour = Container::new();
    net.add(&neighbour);
    neighbour.sh("ip neigh add 10.1.2.3 lladdr 02:00:00:00:00:01 dev eth0 nud reachable");
    let container = Container::new();
    let result = net.call("ADD", "c2").netns(&container.path()).result();
    assert_eq!(result["ips"][0]["address"], "10.1.2.3/24");
    assert_eq!(container.sysctl("net/ipv4/conf/eth0/arp_notify"), "1");
    let mac = result["interfaces"][2]["mac"].as_str().unwrap();
    eventually("the neighbour knows", || neighbour.sh("ip neigh show 10.1.2.3").contains(mac));
}

#[test]
fn enabledad_waits_until_addresses_are_not_tentative() {
    for (enabledad, accept) in [(false, "0"), (true, "1")] {
        let node = Node::new();
        let keys = json!({"isGateway": true, "enabledad": enabledad,
                          "ipam": node.host_local(&["2001:db8:1::/64"])});
        let container = Container::new();
        let start = std::time::Instant::now();
        simple(&node, &keys).add(&container);
        // Duplicate address detection takes at least one second.
        assert!(!enabledad || start.elapsed().as_millis() > 900);
        let flags = ipv6_flags(&container);
        assert_eq!(flags["tentative"], Value::Null, "{flags}");
        assert_eq!(flags["nodad"] == true, !enabledad, "{flags}");
        assert_eq!(container.sysctl("net/ipv6/conf/eth0/accept_dad"), accept);
        assert!(node.reaches(FIRST[1]));
    }
}

#[test]
fn enabledad_rolls_back_if_it_finds_a_duplicate() {
    let node = Node::new();
    let (thief, victim) = (Container::new(), Container::new());
    let ipam = node.host_local(&["2001:db8:1::/64"]);
    super::layer2(&node, "1.1.0", &json!({})).add(&thief);
    thief.sh("ip addr add 2001:db8:1::2/64 dev eth0 nodad");
    let net = simple(&node, &json!({"enabledad": true, "ipam": ipam}));
    let before = (node.snapshot(), victim.snapshot(&node));
    let error = net.on("ADD", &victim).id("c2").error();
    let start = "failed to settle addresses for \"eth0\": ";
    assert!(error.code == 999 && error.msg.starts_with(start), "{error:?}");
    assert!(error.msg.contains("2001:db8:1::2"), "{error:?}");
    settles(&before.0, || node.snapshot());
    settles(&before.1, || victim.snapshot(&node));
    // Without `enabledad` a duplicate address is not detected.
    net.with(&json!({"enabledad": false})).call("ADD", "c2").netns(&victim.path()).result();
}

/// On hardened nodes `conf/default/forwarding` is 0, which new links take over; without the link's
/// own parameter the host does not forward the containers' packets.
#[test]
fn the_bridge_forwards_if_the_default_for_links_is_off() {
    let node = Node::new();
    node.sh("sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.default.forwarding=0");
    let (pod, far) = (Container::new(), Container::new());
    let keys = merged(&dual(&node), &json!({"isDefaultGateway": true}));
    let net = Net::new(&node, "bridge", "1.1.0", &keys);
    net.add(&pod);
    let ipam =
        merged(&node.host_local(&["10.9.0.0/24"]), &json!({"routes": [{"dst": "0.0.0.0/0"}]}));
    let ptp = Net::new(&node, "ptp", "1.1.0", &json!({"name": "far", "ipam": ipam}));
    ptp.call("ADD", "far").netns(&far.path()).result();
    assert!(pod.reaches("10.9.0.2"));
    node.sh("sysctl -qw net.ipv4.conf.br0.forwarding=0");
    net.call("ADD", "c2").netns(&Container::new().path()).result();
    assert_eq!(node.sh("sysctl -n net.ipv4.conf.br0.forwarding"), "1\n");
    assert!(pod.reaches("10.9.0.2"));
}
