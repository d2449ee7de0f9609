//! Requested addresses: their sources, refusals, and the ranges without a requested address.

use std::fs;

use serde_json::{Value, json};

use super::{add, net, one_set};
use crate::support::net::Net;
use crate::support::node::{Node, VERSIONS, assert_unchanged};

fn two_sets(node: &Node) -> Net<'_> {
    let ranges = json!([[{"subnet": "10.1.2.0/24"}, {"subnet": "10.2.2.0/29"}],
                        [{"subnet": "2001:db8::/64"}]]);
    net(node, "1.1.0", &json!({"ranges": ranges}))
}

/// ADD with addresses requested by `CNI_ARGS`, `args` and `runtimeConfig`.
fn asking(net: &Net<'_>, env: &str, args: &[&str], runtime: &[&str]) -> Result<Value, String> {
    let keys = json!({"args": {"cni": {"ips": args}}, "RuntimeConfig": {"ips": runtime}});
    let before = net.node.snapshot();
    let outcome = net.with(&keys).call("ADD", "c1").netns("/x").env("CNI_ARGS", env).run();
    let answer: Value = serde_json::from_str(&outcome.stdout).unwrap();
    if outcome.status == Some(0) {
        net.call("DEL", "c1").ok();
        return Ok(answer["ips"]
            .as_array()
            .unwrap()
            .iter()
            .map(|ip| ip["address"].clone())
            .collect());
    }
    assert_unchanged(&before, &net.node.snapshot());
    Err(answer["msg"].as_str().unwrap().to_owned())
}

#[test]
fn addresses_may_be_requested_in_every_way() {
    let node = Node::new();
    let net = two_sets(&node);
    let both = Ok(json!(["10.1.2.77/24", "2001:db8::7/64"]));
    for (v4, v6) in [("10.1.2.77", "2001:db8::7"), ("10.1.2.77/8", "2001:DB8:0::7/128")] {
        assert_eq!(asking(&net, "", &[v4, v6], &[]), both);
        assert_eq!(asking(&net, "", &[], &[v6, v4]), both);
        assert_eq!(asking(&net, &format!("IP={v4}"), &[v6], &[]), both);
        assert_eq!(asking(&net, &format!("IgnoreUnknown=1;IP={v4}"), &[], &[v6]), both);
        assert_eq!(asking(&net, &format!("IP={v4}"), &[v6, v4], &[v4]), both, "said thrice");
    }
    let second = asking(&net, "", &["10.2.2.6"], &[]).unwrap();
    assert_eq!(second[0], "10.2.2.6/29", "the mask of its own range");
}

#[test]
fn the_first_requested_address_that_fits_wins() {
    let node = Node::new();
    let net = two_sets(&node);
    let left = |ips: &str| Err(format!("failed to allocate all requested IPs: {ips}"));
    assert_eq!(
        asking(&net, "IP=10.1.2.5", &["10.1.2.6"], &["10.2.2.3"]),
        left("10.1.2.6 10.2.2.3")
    );
    assert_eq!(asking(&net, "", &["172.16.0.1"], &["2001:db8::9"]), left("172.16.0.1"));
    assert_eq!(asking(&net, "", &[], &["10.2.2.7"]), left("10.2.2.7"), "broadcast");
}

#[test]
fn unavailable_requested_addresses_are_named() {
    let node = Node::new();
    let net = two_sets(&node);
    let failed = |msg: &str| Err(format!("failed to allocate for range 0: {msg}"));
    let set = "10.1.2.1-10.1.2.254,10.2.2.1-10.2.2.6";
    assert_eq!(
        asking(&net, "IP=10.1.2.1", &[], &[]),
        failed("requested ip 10.1.2.1 is subnet's gateway")
    );
    assert_eq!(
        asking(&net, "", &["10.2.2.1"], &[]),
        failed("requested ip 10.2.2.1 is subnet's gateway")
    );
    net.with(&json!({"args": {"cni": {"ips": ["10.1.2.9"]}}}))
        .call("ADD", "c9")
        .netns("/x")
        .result();
    let taken = format!("requested IP address 10.1.2.9 is not available in range set {set}");
    assert_eq!(asking(&net, "", &["10.1.2.9"], &[]), failed(&taken));
}

#[test]
fn an_address_of_a_file_is_for_requests_if_a_range_says_so() {
    let node = Node::new();
    let range =
        json!({"subnet": "10.1.2.0/24", "rangeStart": "10.1.2.50", "rangeEnd": "10.1.2.52"});
    let closed = net(&node, "1.1.0", &json!({"ranges": [[range]]}));
    let mut range = range;
    range["requestsFromReserved"] = json!(true);
    let open = net(&node, "1.1.0", &json!({"ranges": [[range]]}));
    let request =
        |net: &Net<'_>, id: &str| net.call("ADD", id).netns("/x").env("CNI_ARGS", "IP=10.1.2.51");
    let file = node.path("leases").join("net/10.1.2.51");
    fs::create_dir_all(file.parent().unwrap()).unwrap();
    fs::write(&file, "").unwrap();
    let remedy = "a file that names no container reserves it, which \"cnibox ipam free --network \
                  net 10.1.2.51\" ends: request another address of 10.1.2.50-10.1.2.52, or \
                  write \"requestsFromReserved\": true into the range";
    assert_eq!(request(&closed, "c1").error().details, remedy);

    for round in 0..2 {
        assert_eq!(request(&open, "c1").result()["ips"][0]["address"], "10.1.2.51/24");
        let details = request(&open, "c2").error().details;
        assert!(details.starts_with("container c1 has it"), "{details}");
        if round == 0 {
            open.call("DEL", "c1").ok();
        } else {
            // As the DEL of the reference does; the next call repairs.
            fs::remove_file(&file).unwrap();
            open.call("DEL", "c1").ok();
        }
        assert_eq!(fs::read(&file).unwrap(), b"", "it is reserved again");
    }
    // It is not for those who ask for nothing, and not for a second address of one container.
    for (id, ip) in [("c2", "10.1.2.52/24"), ("c3", "10.1.2.50/24")] {
        assert_eq!(open.call("ADD", id).netns("/x").result()["ips"][0]["address"], ip);
    }
    assert!(open.call("ADD", "c5").netns("/x").error().msg.contains("no IP addresses available"));
    let second = "10.1.2.52 has been allocated to c2, duplicate allocation is not allowed";
    assert!(request(&open, "c2").error().msg.ends_with(second));
    for id in ["c2", "c3"] {
        open.call("DEL", id).ok();
    }
    assert_eq!(open.leases(), ["10.1.2.51"]);
}

/// As Nomad's users separate fixed addresses from those of the pool.
#[test]
fn the_rest_of_the_subnet_can_be_requested_if_a_range_says_so() {
    let node = Node::new();
    let range =
        json!({"subnet": "10.1.2.0/24", "rangeStart": "10.1.2.50", "rangeEnd": "10.1.2.52"});
    let closed = net(&node, "1.1.0", &json!({"ranges": [[range]]}));
    let request = |net: &Net<'_>, id: &str, ip: &str| {
        net.call("ADD", id).netns("/x").env("CNI_ARGS", &format!("IP={ip}"))
    };
    let error = request(&closed, "c1", "10.1.2.20").error();
    assert_eq!(error.msg, "failed to allocate all requested IPs: 10.1.2.20");
    let remedy = "it is in the subnet, but not in 10.1.2.50-10.1.2.52: request another one, or \
                  write \"requestsFromSubnet\": true into the range";
    assert_eq!(error.details, remedy);

    let mut range = range;
    range["requestsFromSubnet"] = json!(true);
    let open = net(&node, "1.1.0", &json!({"ranges": [[range]]}));
    let result = request(&open, "c1", "10.1.2.20").result();
    assert_eq!(result["ips"][0]["address"], "10.1.2.20/24");
    assert_eq!(
        request(&open, "c2", "10.1.2.20").error().details,
        "container c1 has it (\"cnibox ipam ls\"): request another address of 10.1.2.50-10.1.2.52"
    );
    assert_eq!(
        request(&open, "c1", "10.1.2.21").error().msg,
        "failed to allocate for range 0: 10.1.2.20 has been allocated to c1, duplicate allocation is not allowed"
    );
    for (ip, msg) in [
        ("10.1.2.1", "failed to allocate for range 0: requested ip 10.1.2.1 is subnet's gateway"),
        ("10.1.2.255", "failed to allocate all requested IPs: 10.1.2.255"),
        ("10.1.3.2", "failed to allocate all requested IPs: 10.1.3.2"),
    ] {
        assert_eq!(request(&open, "c2", ip).error().msg, msg);
    }
    // Addresses that nobody asks for are those of the pool.
    for (id, ip) in [("c2", "10.1.2.50/24"), ("c3", "10.1.2.51/24"), ("c4", "10.1.2.52/24")] {
        assert_eq!(open.call("ADD", id).netns("/x").result()["ips"][0]["address"], ip);
    }
    assert!(open.call("ADD", "c5").netns("/x").error().msg.contains("no IP addresses available"));
    for id in ["c1", "c2", "c3", "c4"] {
        open.call("DEL", id).ok();
    }
    assert_eq!(open.leases(), [""; 0]);
}

#[test]
fn invalid_requested_addresses_are_quoted() {
    let node = Node::new();
    let net = two_sets(&node);
    for (env, msg) in [
        ("IP=abc", "ARGS: error parsing value of pair \"IP=abc\": invalid IP address abc"),
        ("ip=10.1.2.5", "ARGS: unknown args [\"ip=10.1.2.5\"]"),
        ("none", "ARGS: invalid pair \"none\""),
    ] {
        assert_eq!(asking(&net, env, &[], &[]), Err(msg.to_owned()));
    }
    let error = asking(&net, "", &["x"], &[]).unwrap_err();
    assert!(error.contains('x'), "{error}");
    // DEL ignores invalid requests.
    add(&net, "c1");
    net.call("DEL", "c1").env("CNI_ARGS", "IP=abc").ok();
    assert_eq!(net.leases(), [""; 0]);
}

/// A wrapper that has no address to ask for sends an empty one.
#[test]
fn an_empty_request_is_ignored() {
    let node = Node::new();
    let net = two_sets(&node);
    for (env, args, runtime) in
        [("IP=", &[][..], &[][..]), ("IgnoreUnknown=1;IP= ", &[""], &[]), ("", &[], &["", " "])]
    {
        let given = asking(&net, env, args, runtime);
        assert!(given.is_ok(), "{env} {args:?} {runtime:?} {given:?}");
        net.call("DEL", "c1").ok();
    }
}

#[test]
fn addresses_may_be_requested_in_every_version() {
    for version in VERSIONS {
        let node = Node::new();
        let two = json!([[{"subnet": "10.1.2.0/24"}], [{"subnet": "2001:db8::/64"}]]);
        let asked = json!({"args": {"cni": {"ips": ["10.1.2.88", "2001:db8::88"]}}});
        let net = net(&node, version, &json!({"ranges": two})).with(&asked);
        assert_eq!(add(&net, "c1"), ["10.1.2.88/24", "2001:db8::88/64"]);
        assert_eq!(super::file(&net, "last_reserved_ip.0"), "10.1.2.88");
        assert_eq!(net.leases(), ["10.1.2.88", "2001:db8::88"]);
    }
}

#[test]
fn a_second_requested_address_of_a_set_is_refused() {
    let node = Node::new();
    let net = one_set(&node, &["10.1.2.0/24"]);
    add(&net, "c1");
    let msg = "failed to allocate for range 0: 10.1.2.2 has been allocated to c1, duplicate allocation is not allowed";
    for ip in [&[][..], &["10.1.2.50"], &["10.1.2.2"]] {
        let again = net.with(&json!({"args": {"cni": {"ips": ip}}}));
        super::refused(&again, "c1", 999, msg);
        super::refused(&again, "c1", 999, msg);
        assert_eq!(net.leases(), ["10.1.2.2"], "the first ADD's lease stays");
    }
    assert_eq!(add(&net, "c2"), ["10.1.2.3/24"]);
}
