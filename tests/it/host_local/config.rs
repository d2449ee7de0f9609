//! Valid configurations, and the errors of invalid ones.

use std::fs;

use serde_json::{Value, json};

use super::{add, del, net, one_set, refused};
use crate::support::node::{Node, VERSIONS};

#[test]
fn invalid_ranges_are_named_with_their_index() {
    let node = Node::new();
    let set = |range: Value| json!({"ranges": [[{"subnet": "192.168.0.0/24"}], [range]]});
    let subnet = |text: &str| set(json!({"subnet": text}));
    let host_bits = "Network has host bits set. For a subnet mask of length";
    for (ipam, msg) in [
        (json!({"ranges": []}), "no IP ranges specified".to_owned()),
        (json!({}), "no IP ranges specified".to_owned()),
        (json!({"rangeStart": "10.1.2.3"}), "no IP ranges specified".to_owned()),
        (json!({"ranges": [[]]}), "invalid range set 0: empty range set".to_owned()),
        (set(json!({})), "invalid range set 1: IP <nil> not v4 nor v6".to_owned()),
        (
            subnet("10.1.2.0/31"),
            "invalid range set 1: Network 10.1.2.0/31 too small to allocate from".to_owned(),
        ),
        (
            subnet("2001:db8::/127"),
            "invalid range set 1: Network 2001:db8::/127 too small to allocate from".to_owned(),
        ),
        (
            subnet("10.1.2.9/24"),
            format!("invalid range set 1: {host_bits} 24 the network address is 10.1.2.0"),
        ),
        (
            subnet("2001:db8::9/64"),
            format!("invalid range set 1: {host_bits} 64 the network address is 2001:db8::"),
        ),
        (
            set(json!({"subnet": "10.1.2.0/24", "rangeStart": "10.1.3.0"})),
            "invalid range set 1: RangeStart 10.1.3.0 not in network 10.1.2.0/24".to_owned(),
        ),
        (
            set(json!({"subnet": "10.1.2.0/24", "rangeStart": "10.1.2.9", "rangeEnd": "10.1.2.8"})),
            "invalid range set 1: RangeStart 10.1.2.9 not in network 10.1.2.0/24".to_owned(),
        ),
        (
            set(json!({"subnet": "10.1.2.0/24", "rangeEnd": "10.1.3.0"})),
            "invalid range set 1: RangeEnd 10.1.3.0 not in network 10.1.2.0/24".to_owned(),
        ),
        (
            json!({"ranges": [[{"subnet": "10.1.2.0/24"}, {"subnet": "2001:db8::/64"}]]}),
            "invalid range set 0: mixed address families".to_owned(),
        ),
        (
            json!({"ranges": [[{"subnet": "10.1.2.0/24"}, {"subnet": "10.1.0.0/16"}]]}),
            "invalid range set 0: subnets 10.1.2.1-10.1.2.254 and 10.1.0.1-10.1.255.254 overlap"
                .to_owned(),
        ),
        (
            json!({"ranges": [[{"subnet": "10.2.2.0/24"}], [{"subnet": "10.1.2.0/24"}], [{"subnet": "10.1.0.0/16"}]]}),
            "range set 1 overlaps with 2".to_owned(),
        ),
        (
            json!({"subnet": "10.1.2.0/24", "ranges": [[{"subnet": "10.1.2.0/25"}]]}),
            "range set 0 overlaps with 1".to_owned(),
        ),
    ] {
        refused(&net(&node, "1.1.0", &ipam), "c1", 7, &msg);
        let error = net(&node, "1.1.0", &ipam).call("STATUS", "").error();
        assert_eq!(error.msg, msg, "STATUS");
    }
    let missing = net(&node, "1.1.0", &json!({})).with(&json!({"ipam": null}));
    refused(&missing, "c1", 7, "IPAM config missing 'ipam' key");
    assert!(!crate::support::node::exists(node.path("leases")));
}

#[test]
fn invalid_addresses_are_quoted() {
    let node = Node::new();
    for (ipam, word) in [
        (json!({"subnet": "x"}), "invalid CIDR address: x"),
        (json!({"subnet": "10.1.2.0"}), "invalid CIDR address: 10.1.2.0"),
        (json!({"subnet": "10.1.2.0/33"}), "invalid CIDR address: 10.1.2.0/33"),
        (json!({"subnet": "10.1.2.0/24", "gateway": "x"}), "invalid IP address: x"),
        (
            json!({"subnet": "10.1.2.0/24", "rangeStart": "10.01.2.3"}),
            "invalid IP address: 10.01.2.3",
        ),
        (
            json!({"subnet": "10.1.2.0/24", "routes": [{"dst": "10.0.0.0"}]}),
            "invalid CIDR address: 10.0.0.0",
        ),
        (
            json!({"subnet": "10.1.2.0/24", "routes": [{"dst": "10.0.0.0/8", "gw": "y"}]}),
            "invalid IP address: y",
        ),
        (json!({"subnet": 7}), ""),
        (json!({"ranges": {}}), ""),
        (json!({"ranges": [{"subnet": "10.1.2.0/24"}]}), ""),
        (json!({"subnet": "10.1.2.0/24", "routes": "x"}), ""),
        (json!({"subnet": "10.1.2.0/24", "dataDir": 7}), ""),
    ] {
        let net = net(&node, "1.1.0", &ipam);
        let error = net.call("ADD", "c1").netns("/x").error();
        assert!(error.code != 0 && format!("{error:?}").contains(word), "{ipam}: {error:?}");
        assert!(!crate::support::node::exists(node.path("leases")));
    }
}

#[test]
fn runtime_ranges_come_first_then_the_single_one_then_the_list() {
    let node = Node::new();
    let ipam = json!({"subnet": "10.2.0.0/24", "rangeStart": "10.2.0.50", "gateway": "10.2.0.9",
                      "ranges": [[{"subnet": "10.3.0.0/24", "rangeStart": "10.3.0.5"}]]});
    let net = net(&node, "1.1.0", &ipam)
        .with(&json!({"runtimeConfig": {"ipRanges": [[{"subnet": "10.1.0.0/24"}]]}}));
    let result = net.call("ADD", "c1").netns("/x").result();
    let ips = json!([{"address": "10.1.0.2/24", "gateway": "10.1.0.1"},
                     {"address": "10.2.0.50/24", "gateway": "10.2.0.9"},
                     {"address": "10.3.0.5/24", "gateway": "10.3.0.1"}]);
    assert_eq!(result["ips"], ips);
}

#[test]
fn two_addresses_of_a_family_require_0_3_0() {
    for version in VERSIONS {
        let node = Node::new();
        let two = json!({"ranges": [[{"subnet": "10.1.2.0/24"}], [{"subnet": "10.2.2.0/24"}]]});
        let old = net(&node, version, &two);
        if version >= "0.3.0" {
            assert_eq!(add(&old, "c1").len(), 2);
            continue;
        }
        let msg = format!("CNI version {version} does not support more than 1 address per family");
        refused(&old, "c1", 7, &msg);
        // A lease from when the network had a later version.
        add(&old.with(&json!({"cniVersion": "0.4.0"})), "c1");
        old.call("DEL", "c1").ok();
        assert_eq!(old.leases(), [""; 0]);
        let mixed = json!({"ranges": [[{"subnet": "10.1.2.0/24"}], [{"subnet": "2001:db8::/64"}]]});
        assert_eq!(add(&net(&node, version, &mixed), "c1").len(), 2);
    }
}

#[test]
fn del_with_a_broken_configuration_releases_the_address() {
    let node = Node::new();
    let fine = one_set(&node, &["10.1.2.0/24"]);
    for ipam in [json!({"subnet": "x"}), json!({"ranges": []}), json!({"subnet": "10.1.2.0/31"})] {
        add(&fine, "c1");
        net(&node, "1.1.0", &ipam).call("DEL", "c1").ok();
        assert_eq!(fine.leases(), [""; 0]);
    }
}

#[test]
fn a_missing_resolv_conf_is_named_and_nothing_leased() {
    let node = Node::new();
    let ipam = json!({"subnet": "10.1.2.0/24", "resolvConf": "/no/such.conf"});
    let net = net(&node, "1.1.0", &ipam);
    refused(&net, "c1", 5, "open /no/such.conf: no such file or directory");
    // DEL does not read the file.
    del(&net, "c1");
    fs::write(node.path("empty"), "").unwrap();
    let empty = super::net(
        &node,
        "1.1.0",
        &json!({"subnet": "10.1.2.0/24", "resolvConf": node.path("empty")}),
    );
    assert_eq!(empty.call("ADD", "c1").netns("/x").result()["dns"], Value::Null);
}

#[test]
fn a_gateway_outside_its_subnet_is_accepted() {
    let node = Node::new();
    for (gateway, first, warns) in
        [("172.16.0.1", "10.1.2.1/24", false), ("2001:db8::1", "10.1.2.2/24", true)]
    {
        let net = net(&node, "1.1.0", &json!({"subnet": "10.1.2.0/24", "gateway": gateway}));
        let outcome = net.call("ADD", gateway.split([':', '.']).next().unwrap()).netns("/x").run();
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        let result: Value = serde_json::from_str(&outcome.stdout).unwrap();
        assert_eq!(result["ips"][0], json!({"address": first, "gateway": gateway}));
        assert_eq!(outcome.stderr.contains("another family"), warns, "{outcome:?}");
    }
}

/// A STATUS has no `runtimeConfig`: the ranges come with ADD.
#[test]
fn status_accepts_ranges_that_come_from_the_runtime() {
    let node = Node::new();
    let awaiting =
        net(&node, "1.1.0", &json!({})).with(&json!({"capabilities": {"ipRanges": true}}));
    awaiting.call("STATUS", "").ok();
    assert_eq!(awaiting.call("ADD", "c1").netns("/x").error().code, 7);
    let given =
        awaiting.with(&json!({"runtimeConfig": {"ipRanges": [[{"subnet": "10.1.0.0/24"}]]}}));
    assert_eq!(add(&given, "c1"), ["10.1.0.2/24"]);
    let unranged = net(&node, "1.1.0", &json!({}));
    assert_eq!(unranged.call("STATUS", "").error().code, 7);
}

/// The network and the broadcast address of a subnet are left out, with a warning.
#[test]
fn addresses_that_no_host_can_have_are_not_leased() {
    for (start, end, given) in
        [("10.1.2.254", "10.1.2.255", "10.1.2.254/24"), ("10.1.2.0", "10.1.2.1", "10.1.2.1/24")]
    {
        let node = Node::new();
        let range = json!({"subnet": "10.1.2.0/24", "gateway": "10.1.2.9", "rangeStart": start, "rangeEnd": end});
        let net = net(&node, "1.1.0", &json!({"ranges": [[range]]}));
        let outcome = net.call("ADD", "c1").netns("/x").run();
        assert!(outcome.stdout.contains(given), "{outcome:?}");
        assert!(outcome.stderr.contains("which no host can have"), "{outcome:?}");
        let error = net.call("ADD", "c2").netns("/x").error();
        assert!(error.msg.contains("no IP addresses available"), "{error:?}");
        assert_eq!(net.call("STATUS", "").error().code, 50);
    }
}
