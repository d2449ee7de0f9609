//! route-override: lifecycle in every version, routes of both families with all attributes, traffic
//! through the changed routes, refusals, CHECK, records, faults.

mod lists;
mod records;

use serde_json::{Value, json};

use crate::support::chained::{Pod, Subject};
use crate::support::net::{self, Net, merged};
use crate::support::node::{Container, Node};
use crate::support::traffic::{Place, tcp};

/// Behind ptp with default routes: others take their place.
const SUBJECT: Subject = Subject {
    plugin: "route-override",
    keys: |_| {
        json!({"flushgateway": true, "delroutes": [{"dst": "192.0.2.0/24"}],
               "addroutes": [{"dst": "198.51.100.0/24"}, {"dst": "fd99::/64", "gw": "2001:db8:1::1"}]})
    },
    result: |result, version| {
        let v4 = json!([{"dst": "198.51.100.0/24", "gw": "10.1.2.1"}]);
        let v6 = json!([{"dst": "fd99::/64", "gw": "2001:db8:1::1"}]);
        if version < "0.3.0" {
            for (family, gateway, routes) in [("ip4", "0.0.0.0", v4), ("ip6", "::", v6)] {
                result[family]["gateway"] = json!(gateway);
                result[family]["routes"] = routes;
            }
            return;
        }
        for (ip, gateway) in [(0, "0.0.0.0"), (1, "::")] {
            result["ips"][ip]["gateway"] = json!(gateway);
        }
        result["routes"] = json!([v4[0], v6[0]]);
    },
    files: "route-override",
    ..Subject::BEHIND_PTP
};

/// Behind bridge with routes to 192.168.0.0/16 via 10.1.2.9 and `fd99::/16` via the gateway;
/// without keys.
const BRIDGED: Subject = Subject {
    plugin: "route-override",
    files: "route-override",
    keys: |_| json!({}),
    ..Subject::BEHIND_BRIDGE
};

/// The routes of one family in a table, sorted, without the words that do not matter here.
fn routes_in(container: &Container, family: &str, table: &str) -> Vec<String> {
    let text = container.sh(&format!("ip {family} route show table {table}"));
    net::routes(
        &text
            .replace(" dev eth0", "")
            .replace(" pref medium", "")
            .replace(" metric 1024", "")
            .replace(" metric 256", ""),
    )
}

fn routes(container: &Container, family: &str) -> Vec<String> {
    routes_in(container, family, "main")
}

/// Runs ADD of the keys on a pod behind bridge, and CHECK with its result.
#[track_caller]
fn added(keys: &Value) -> (Pod<'static>, Value) {
    let pod = BRIDGED.pod("1.1.0");
    let result = pod.net(keys).add(&pod.container);
    pod.net(keys).check(&pod.container, &result).ok();
    (pod, result)
}

const SUBNETS: [&str; 2] =
    ["10.1.2.0/24 proto kernel scope link src 10.1.2.2", "2001:db8:1::/64 proto kernel"];

#[test]
fn add_changes_routes_check_agrees_and_del_restores() {
    SUBJECT.add_check_del_del();
}

#[test]
fn del_succeeds_without_prev_result_and_namespace() {
    SUBJECT.del_without(|_, _, _| ());
}

#[test]
fn a_failing_add_changes_nothing() {
    SUBJECT.no_add_leaves_anything(&["open", "write", "rename", "RTM_DELROUTE", "RTM_NEWROUTE"]);
}

#[test]
fn an_add_or_del_killed_anywhere_is_cleaned_up_by_del() {
    SUBJECT.survives_kill(
        &["open", "write", "rename", "RTM_DELROUTE", "RTM_NEWROUTE"],
        &["unlink", "RTM_DELROUTE", "RTM_NEWROUTE"],
    );
}

#[test]
fn each_key_deletes_its_routes() {
    let (v4, v6) = ("192.168.0.0/16 via 10.1.2.9", "fd99::/16 via 2001:db8:1::1");
    for (keys, left) in [
        (json!({}), [vec![v4], vec![v6]]),
        (json!({"flushroutes": true}), [vec![], vec![]]),
        (json!({"flushgateway": true}), [vec![v4], vec![v6]]),
        (json!({"delroutes": [{"dst": "192.168.0.0/16"}]}), [vec![], vec![v6]]),
        // Host bits and the gateway do not matter, the metric does.
        (json!({"delroutes": [{"dst": "192.168.9.9/16", "gw": "10.1.2.77"}]}), [vec![], vec![v6]]),
        (json!({"delroutes": [{"dst": "192.168.0.0/16", "priority": 7}]}), [vec![v4], vec![v6]]),
        (json!({"delroutes": [{"dst": "fd99::/16", "priority": 1024}]}), [vec![v4], vec![]]),
        (json!({"delroutes": [{"dst": "fd99::/16", "table": 254}]}), [vec![v4], vec![]]),
        (
            json!({"delroutes": [{"dst": "fd99::/16", "table": 7}, {"dst": "fd98::/16"}]}),
            [vec![v4], vec![v6]],
        ),
    ] {
        let (pod, result) = added(&keys);
        for (family, (left, subnet)) in ["-4", "-6"].into_iter().zip(left.iter().zip(SUBNETS)) {
            let found = routes(&pod.container, family);
            let mut expected = [&left[..], &[subnet]].concat();
            expected.sort_unstable();
            assert_eq!(found, expected, "{keys}");
        }
        let listed = result["routes"].as_array().map_or(0, Vec::len);
        assert_eq!(listed, left[0].len() + left[1].len(), "{keys}: {result}");
        pod.net(&keys).del(&pod.container);
        pod.assert_as(&pod.before, &keys.to_string());
    }
}

#[test]
fn flushgateway_deletes_every_default_route() {
    let pod = BRIDGED.pod("1.1.0");
    pod.container.sh("ip route add default via 10.1.2.1");
    pod.container.sh("ip route add default via 10.1.2.7 metric 50");
    pod.container.sh("ip -6 route add default via 2001:db8:1::1");
    pod.container.sh("ip route add default via 10.1.2.7 table 7");
    let before = pod.state();
    for keys in [
        json!({"flushgateway": true}),
        json!({"delroutes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]}),
    ] {
        let result = pod.net(&keys).add(&pod.container);
        let kept = [routes(&pod.container, "-4"), routes(&pod.container, "-6")].concat();
        assert!(!kept.iter().any(|route| route.starts_with("default")), "{kept:?}");
        assert_eq!(routes_in(&pod.container, "-4", "7"), ["default via 10.1.2.7"]);
        let has_gateway = keys.get("flushgateway").is_none();
        assert_eq!(
            result["ips"][0]["gateway"],
            json!(if has_gateway { "10.1.2.1" } else { "0.0.0.0" })
        );
        pod.net(&keys).check(&pod.container, &result).ok();
        pod.net(&keys).del(&pod.container);
        pod.assert_as(&before, "DEL");
    }
}

#[test]
fn a_flush_spares_the_link_and_other_interfaces() {
    let pod = BRIDGED.pod("1.1.0");
    for line in [
        "link add net1 type veth peer name far1",
        "link set far1 addrgenmode none up",
        "link set net1 addrgenmode none up",
        "addr add 172.20.0.2/24 dev net1",
        "route add 60.0.0.0/24 via 172.20.0.1",
        "route add 70.0.0.0/24 nexthop via 10.1.2.3 nexthop via 10.1.2.4",
        "route add 40.0.0.0/24 dev eth0 scope link",
        "route add 169.254.7.0/24 via 10.1.2.1",
        "route add default dev eth0 metric 9 scope link",
    ] {
        pod.container.sh(&format!("ip {line}"));
    }
    let before = pod.state();
    let net = pod.net(&json!({"flushroutes": true}));
    let result = net.add(&pod.container);
    let expected = [
        SUBNETS[0],
        "169.254.7.0/24 via 10.1.2.1",
        "172.20.0.0/24 dev net1 proto kernel scope link src 172.20.0.2",
        "40.0.0.0/24 scope link",
        "60.0.0.0/24 via 172.20.0.1 dev net1",
        "default scope link metric 9",
    ];
    assert_eq!(routes(&pod.container, "-4"), expected);
    net.check(&pod.container, &result).ok();
    net.del(&pod.container);
    pod.assert_as(&before, "DEL");
}

#[test]
fn ptp_reaches_its_subnets_after_a_flush() {
    const FLUSHED: Subject = Subject { keys: |_| json!({"flushroutes": true}), ..SUBJECT };
    let pod = FLUSHED.pod("1.1.0");
    let result = pod.plain().add(&pod.container);
    assert_eq!(result.get("routes"), None);
    assert_eq!(
        routes(&pod.container, "-4"),
        ["10.1.2.0/24 via 10.1.2.1 src 10.1.2.2", "10.1.2.1 scope link src 10.1.2.2"]
    );
    assert!(pod.container.reaches("10.1.2.1") && pod.container.reaches("2001:db8:1::1"));
}

#[test]
fn added_routes_have_all_attributes() {
    let keys = json!({"addroutes": [
        {"dst": "50.0.0.0/24", "gw": "10.1.2.9", "mtu": 1300, "advmss": 1200, "priority": 7, "table": 9},
        {"dst": "fd50::/64", "gw": "2001:db8:1::9", "mtu": 1310, "advmss": 1210, "priority": 8, "table": 10},
        {"dst": "51.0.0.0/24", "scope": 253},
        {"dst": "52.0.0.0/24", "table": 0, "scope": 0},
        {"dst": "53.0.0.0/24", "gw": "10.1.2.3"}, {"dst": "53.0.0.0/24", "gw": "10.1.2.4"},
        {"dst": "fd51::/64"},
    ]});
    let (pod, result) = added(&keys);
    let routes = |family, table| {
        let mut routes = routes_in(&pod.container, family, table);
        routes.retain(|route| {
            route.starts_with('5') || route.starts_with("fd5") || route.starts_with("nexthop")
        });
        routes
    };
    assert_eq!(routes("-4", "9"), ["50.0.0.0/24 via 10.1.2.9 metric 7 mtu 1300 advmss 1200"]);
    assert_eq!(routes("-6", "10"), ["fd50::/64 via 2001:db8:1::9 metric 8 mtu 1310 advmss 1210"]);
    let hops = ["nexthop via 10.1.2.3 weight 1", "nexthop via 10.1.2.4 weight 1"];
    let v4 =
        ["51.0.0.0/24 scope link", "52.0.0.0/24 via 10.1.2.1", "53.0.0.0/24", hops[0], hops[1]];
    assert_eq!(routes("-4", "main"), v4);
    assert_eq!(routes("-6", "main"), ["fd51::/64 via 2001:db8:1::1"]);
    let listed = result["routes"].as_array().unwrap();
    assert_eq!(listed[2..], *keys["addroutes"].as_array().unwrap());
    pod.net(&keys).del(&pod.container);
    pod.assert_as(&pod.before, "DEL");
}

#[test]
fn the_gateway_of_prev_result_is_that_of_the_family() {
    let mut pod = BRIDGED.pod("1.1.0");
    pod.prev["routes"] = json!([]);
    let keys = json!({"addroutes": [{"dst": "50.0.0.0/24"}, {"dst": "fd50::/64"}]});
    for (gateways, expected) in [
        (
            [json!("10.1.2.8"), json!("2001:db8:1::8")],
            ["50.0.0.0/24 via 10.1.2.8", "fd50::/64 via 2001:db8:1::8"],
        ),
        ([json!(null), json!("2001:db8:1::8")], ["50.0.0.0/24", "fd50::/64 via 2001:db8:1::8"]),
        ([json!("0.0.0.0"), json!("::")], ["50.0.0.0/24", "fd50::/64"]),
    ] {
        for (ip, gateway) in gateways.into_iter().enumerate() {
            pod.prev["ips"][ip]["gateway"] = gateway;
        }
        let result = pod.net(&keys).add(&pod.container);
        for (family, route) in ["-4", "-6"].into_iter().zip(expected) {
            let found = routes(&pod.container, family);
            assert!(
                found.iter().any(|line| line.trim_end_matches(" scope link") == route),
                "{route}: {found:?}"
            );
        }
        pod.net(&keys).check(&pod.container, &result).ok();
        pod.net(&keys).del(&pod.container);
        pod.assert_as(&pod.before, "DEL");
    }
}

#[test]
fn args_replace_keys() {
    let pod = BRIDGED.pod("1.1.0");
    let first = json!({"flushroutes": true, "flushgateway": true, "skipcheck": true,
                       "delroutes": [{"dst": "192.168.0.0/16"}], "addroutes": [{"dst": "50.0.0.0/24"}]});
    let none = json!({"flushroutes": false, "flushgateway": false, "delroutes": [], "addroutes": [], "skipcheck": false});
    let result = pod.net(&merged(&first, &json!({"args": {"cni": none}}))).add(&pod.container);
    assert_eq!(result, pod.prev);
    pod.assert_as(&pod.before, "all keys are off");
    for keys in [
        json!({"args": {}}),
        json!({"args": {"cni": {}}}),
        json!({"args": {"cni": {"flushRoutes": null}}}),
    ] {
        assert_eq!(pod.net(&keys).add(&pod.container), pod.prev);
    }
    pod.net(&json!({"args": {"cni": first}})).add(&pod.container);
    assert_eq!(routes(&pod.container, "-4"), [SUBNETS[0], "50.0.0.0/24 via 10.1.2.1"]);
    pod.net(&json!({})).del(&pod.container);
    pod.assert_as(&pod.before, "DEL");
}

/// A neighbour has addresses that only a route through it reaches.
#[test]
fn traffic_takes_the_added_routes() {
    let (node, pod, router) = (Node::new(), Container::new(), Container::new());
    let mut ipam = node.host_local(&["10.1.2.0/24", "2001:db8:1::/64"]);
    ipam["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
    let bridge = Net::new(&node, "bridge", "1.1.0", &json!({"isGateway": true, "ipam": ipam}));
    let prev = bridge.add(&pod);
    bridge.call("ADD", "c2").netns(&router.path()).result();
    router.sh("ip link set lo up");
    let behind = ["203.0.113.9", "fd20::9"];
    for address in behind {
        router.sh(&format!("ip addr add {address} dev lo"));
        assert!(!pod.reaches_within(address, 1), "{address}");
    }
    let keys = json!({"prevResult": prev, "flushgateway": true,
        "addroutes": [{"dst": "203.0.113.0/24", "gw": "10.1.2.3"}, {"dst": "fd20::/64", "gw": "2001:db8:1::3"}]});
    let net = Net::new(&node, "route-override", "1.1.0", &keys);
    let result = net.add(&pod);
    for address in behind {
        assert!(pod.reaches(address), "{address}");
        tcp(&pod, &router, address);
    }
    // Without default routes there is no way to other addresses of the node.
    node.sh("ip addr add 198.51.100.1/32 dev lo; ip addr add fd30::1/128 dev lo");
    for address in ["198.51.100.1", "fd30::1"] {
        assert!(!pod.reaches_within(address, 1), "{address}");
    }
    net.with(&json!({"prevResult": result})).del(&pod);
    for (gone, back) in behind.into_iter().zip(["198.51.100.1", "fd30::1"]) {
        assert!(pod.reaches(back) && !pod.reaches_within(gone, 1), "{gone} {back}");
    }
}

#[test]
fn refusals_change_nothing() {
    let pod = BRIDGED.pod("1.1.0");
    let refused = |keys: Value, code: u64, msg: &str| {
        let call = pod.call_with("ADD", &merged(&json!({"prevResult": pod.prev}), &keys));
        pod.is_refused(&call, (code, msg));
        pod.assert_as(&pod.before, msg);
    };
    refused(json!({"prevResult": null}), 999, "Required prevResult missing");
    let other = "addroutes: the gateway 10.1.2.1 of fd50::/64 is of another family";
    refused(json!({"addroutes": [{"dst": "fd50::/64", "gw": "10.1.2.1"}]}), 7, other);
    let taken = "addroutes: route 192.168.0.0/16 via 10.1.2.8: the container has \"192.168.0.0/16 via 10.1.2.9\" with \
                 the same metric";
    let both = json!([{"dst": "50.0.0.0/24"}, {"dst": "192.168.0.0/16", "gw": "10.1.2.8"}]);
    refused(json!({"addroutes": both}), 999, taken);
    let far = "failed to add route '50.0.0.0/24 via 10.9.9.9 dev eth0': add route 50.0.0.0/24 via 10.9.9.9: Nexthop has \
               invalid gateway: network is unreachable";
    let far_keys = json!({"flushroutes": true, "addroutes": [{"dst": "51.0.0.0/24"}, {"dst": "50.0.0.0/24", "gw": "10.9.9.9"}]});
    refused(far_keys, 999, far);
    for bad in [
        json!({"addroutes": [{"dst": "x"}]}),
        json!({"delroutes": [{}]}),
        json!({"flushroutes": "yes"}),
    ] {
        assert_eq!(
            pod.call_with("ADD", &merged(&json!({"prevResult": pod.prev}), &bad)).error().code,
            6,
            "{bad}"
        );
    }
    let status = |keys: Value| pod.call_with("STATUS", &keys).error().brief().0;
    assert_eq!(status(json!({"addroutes": [{"dst": "fd50::/64", "gw": "10.1.2.1"}]})), 50);
    pod.call_with("STATUS", &json!({"flushroutes": true})).ok();
}

#[test]
fn many_containers_are_attached_at_once() {
    SUBJECT.attaches_many_at_once();
}
