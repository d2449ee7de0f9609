//! The distribution of routes over tables, and the effect of the options.

use serde_json::json;

use super::Pod;

#[test]
fn each_address_has_a_rule_and_a_table() {
    let pod = Pod::dual();
    pod.add(&json!({}));
    assert_eq!(pod.rules("-4"), ["from 192.168.1.209 lookup 100"]);
    assert_eq!(pod.rules("-6"), ["from fd00:1::9 lookup 101"]);
    assert_eq!(
        pod.routes("-4", "100"),
        [
            "192.168.1.0/24 dev net1 proto kernel scope link src 192.168.1.209",
            "192.168.2.0/24 via 192.168.1.2 dev net1",
            "default via 192.168.1.1 dev net1",
        ]
    );
    assert_eq!(
        pod.routes("-6", "101"),
        [
            "default via fd00:1::1 dev net1 metric 1024 pref medium",
            "fd00:1::/64 dev net1 proto kernel metric 256 pref medium",
            "fd00:2::/64 via fd00:1::2 dev net1 metric 1024 pref medium",
        ]
    );
    assert_eq!(pod.routes("-6", "100"), [""; 0]);
    assert_eq!(pod.routes("-4", "101"), [""; 0]);
    assert_eq!(
        pod.routes("-4", "main"),
        [
            "10.0.0.0/24 dev eth0 proto kernel scope link src 10.0.0.2",
            "10.2.0.0/24 via 10.0.0.5 dev eth0",
            "default via 10.0.0.1 dev eth0",
        ]
    );
    let v6 = pod.container.sh("ip -6 route show dev net1");
    assert!(v6.contains("fe80::/64") && !v6.contains("fd00"), "link-local stays: {v6}");
}

#[test]
fn addresses_of_a_family_share_generic_routes() {
    let mut pod = Pod::new();
    pod.container.sh("ip addr add 192.168.101.209/24 dev net1");
    pod.container.sh("ip route add 172.16.0.0/16 dev net1 scope link");
    pod.container.sh("ip route add 169.254.1.1 dev net1 scope link");
    pod.container.sh("ip route add 172.17.0.0/16 via 169.254.1.1 dev net1");
    // The second address has an interface index out of range, as in the reference's test.
    pod.prev["ips"]
        .as_array_mut()
        .unwrap()
        .push(json!({"address": "192.168.101.209/24", "gateway": "192.168.101.1", "interface": 1}));
    pod.add(&json!({}));
    assert_eq!(
        pod.rules("-4"),
        ["from 192.168.101.209 lookup 101", "from 192.168.1.209 lookup 100"]
    );
    let generic = [
        "169.254.1.1 dev net1 scope link",
        "172.16.0.0/16 dev net1 scope link",
        "172.17.0.0/16 via 169.254.1.1 dev net1",
    ];
    for (table, own) in [
        (
            "100",
            &[
                "192.168.1.0/24 dev net1 proto kernel scope link src 192.168.1.209",
                "192.168.2.0/24 via 192.168.1.2 dev net1",
                "default via 192.168.1.1 dev net1",
            ][..],
        ),
        (
            "101",
            &[
                "192.168.101.0/24 dev net1 proto kernel scope link src 192.168.101.209",
                "default via 192.168.101.1 dev net1",
            ][..],
        ),
    ] {
        assert_eq!(pod.routes("-4", table), [&generic[..], own].concat(), "{table}");
    }
    assert!(pod.routes("-4", "main").iter().all(|route| route.contains("eth0")));
}

#[test]
fn only_addresses_of_the_named_interface_are_routed() {
    let mut pod = Pod::new();
    pod.prev["interfaces"] = json!([{"name": "eth0"}, {"name": "net1"}]);
    pod.prev["ips"] = json!([
        {"address": "10.0.0.2/24", "gateway": "10.0.0.1", "interface": 0},
        {"address": "192.168.1.209/24", "interface": 1},
    ]);
    pod.add(&json!({}));
    assert_eq!(pod.rules("-4"), ["from 192.168.1.209 lookup 100"]);
    let routes = pod.routes("-4", "100");
    assert!(!routes.iter().any(|route| route.starts_with("default")), "no gateway: {routes:?}");
}

#[test]
fn a_fixed_table_gets_rules_only() {
    let pod = Pod::dual();
    let routes = pod.routes("-4", "all");
    pod.add(&json!({"table": 5000, "gateways": ["not looked at"]}));
    assert_eq!(pod.rules("-4"), ["from 192.168.1.209 lookup 5000"]);
    assert_eq!(pod.rules("-6"), ["from fd00:1::9 lookup 5000"]);
    assert_eq!(pod.routes("-4", "all"), routes);
}

#[test]
fn configured_gateways_override_all_others() {
    let pod = Pod::dual();
    pod.container.sh("ip route del default");
    pod.container.sh("ip route add default via 192.168.1.1");
    pod.add(&json!({"gateways": ["fd00:1::fe", "192.168.1.254"]}));
    let default = |family: &str, table: &str| -> Vec<String> {
        let routes = pod.routes(family, table);
        routes.into_iter().filter(|route| route.starts_with("default")).collect()
    };
    assert_eq!(default("-4", "100"), ["default via 192.168.1.254 dev net1"]);
    assert_eq!(default("-6", "101"), ["default via fd00:1::fe dev net1 metric 1024 pref medium"]);
    assert_eq!(default("-4", "main"), [""; 0]);
}

#[test]
fn the_default_route_moves_to_the_table() {
    let pod = Pod::new();
    pod.container.sh("ip route del default");
    pod.container.sh("ip route add default via 192.168.1.7 mtu 1300");
    pod.add(&json!({}));
    let routes = pod.routes("-4", "100");
    assert!(routes.contains(&"default via 192.168.1.7 dev net1 mtu 1300".to_owned()), "{routes:?}");
    assert!(!pod.container.sh("ip route").contains("default"));
}

#[test]
fn a_gateway_outside_of_all_subnets_is_on_link() {
    let mut pod = Pod::new();
    pod.container.sh("ip addr flush dev net1");
    pod.container.sh("ip addr add 192.168.1.209/32 dev net1");
    pod.prev["ips"][0]["address"] = json!("192.168.1.209/32");
    pod.add(&json!({}));
    assert_eq!(pod.routes("-4", "100"), ["default via 192.168.1.1 dev net1 onlink"]);
}

#[test]
fn hints_keep_the_subnets_in_the_main_table() {
    let pod = Pod::dual();
    pod.add(&json!({"addSourceHints": true}));
    let of_net1 = |family: &str| -> Vec<String> {
        let routes = pod.routes(family, "main");
        routes.into_iter().filter(|route| route.contains("net1")).collect()
    };
    let v4 = "192.168.1.0/24 dev net1 proto kernel scope link src 192.168.1.209";
    assert_eq!(of_net1("-4"), [v4]);
    let v6 = "fd00:1::/64 dev net1 proto kernel src fd00:1::9 metric 256 pref medium";
    assert_eq!(of_net1("-6"), [v6]);
    assert_eq!(pod.routes("-4", "100").len(), 3);
    assert_eq!(pod.routes("-6", "101").len(), 3);
}

#[test]
fn hints_add_missing_routes_of_subnets() {
    let pod = Pod::new();
    pod.container.sh("ip route flush dev net1");
    pod.add(&json!({"addSourceHints": true}));
    let main = pod.routes("-4", "main");
    let hint = "192.168.1.0/24 dev net1 scope link src 192.168.1.209";
    assert!(main.contains(&hint.to_owned()), "{main:?}");
}

#[test]
fn tables_in_use_are_not_assigned() {
    let pod = Pod::new();
    // A rule, a route without a rule, an IPv6 route.
    pod.container.sh("ip rule add from 10.9.9.9 lookup 100");
    pod.container.sh("ip route add 10.9.0.0/16 dev eth0 table 101");
    pod.container.sh("ip -6 route add fd09::/64 dev eth0 table 102");
    pod.add(&json!({}));
    assert_eq!(pod.rules("-4"), ["from 192.168.1.209 lookup 103", "from 10.9.9.9 lookup 100"]);
}

#[test]
fn reserved_tables_are_never_assigned() {
    let pod = Pod::new();
    for table in 100..=252 {
        pod.container.sh(&format!("ip rule add from 10.9.9.9 lookup {table} pref {table}"));
    }
    pod.add(&json!({}));
    assert!(pod.rules("-4").contains(&"from 192.168.1.209 lookup 256".to_owned()));
}

#[test]
fn attributes_of_routes_survive_the_move() {
    let pod = Pod::new();
    let plain = "172.16.0.0/16 via 192.168.1.3 dev net1 proto static src 192.168.1.209 metric 77";
    pod.container.sh(&format!("ip route add {plain} mtu 1400 advmss 1200"));
    pod.container.sh("ip route add 172.17.0.0/16 via 10.77.0.1 dev net1 onlink");
    let multipath = "172.18.0.0/16 nexthop via 192.168.1.4 dev net1 weight 1 nexthop via 192.168.1.5 dev net1 weight 2";
    pod.container.sh(&format!("ip route add {multipath}"));
    let foreign = "172.19.0.0/16 nexthop via 192.168.1.4 dev net1 nexthop via 10.0.0.4 dev eth0";
    pod.container.sh(&format!("ip route add {foreign}"));
    pod.add(&json!({}));
    let text = pod.container.sh("ip route show table 100");
    let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
    for route in [
        &format!("{plain} mtu 1400 advmss 1200"),
        "172.17.0.0/16 via 10.77.0.1 dev net1 onlink",
        multipath,
        "172.19.0.0/16 via 192.168.1.4 dev net1",
    ] {
        assert!(words.contains(route), "{route}: {words}");
    }
    let main = pod.container.sh("ip route");
    assert!(main.contains("172.19.0.0/16 via 10.0.0.4 dev eth0"), "it is not net1's alone: {main}");
    pod.call("DEL", &json!({})).ok();
    let main = pod.container.sh("ip route").split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(main.contains(multipath) && main.contains("10.77.0.1 dev net1 onlink"), "{main}");
}
