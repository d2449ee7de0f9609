//! static: every source of addresses in every version; CHECK, GC, STATUS, refusals; traffic with an
//! interface plugin.

use std::fs;

use serde_json::{Value, json};

use crate::support::compare;
use crate::support::net::{Net, merged};
use crate::support::node::{Call, Container, Node, VERSIONS, assert_unchanged};
use crate::support::traffic::Place;

fn net<'n>(node: &'n Node, version: &'static str, ipam: &Value) -> Net<'n> {
    let own = json!({"type": "static"});
    Net::new(node, "static", version, &json!({"ipam": merged(&own, ipam)}))
}

/// The upstream test's configuration with more route attributes.
fn upstream() -> Value {
    json!({
        "addresses": [{"address": "10.10.0.1/24", "gateway": "10.10.0.254"},
                      {"address": "3ffe:ffff:0:01ff::1/64", "gateway": "3ffe:ffff:0::1"}],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "192.168.0.0/16", "gw": "10.10.5.1"},
                   {"dst": "3ffe:ffff:0:01ff::1/64"}, {"dst": "0.0.0.0/0", "gw": "10.10.5.2"},
                   {"dst": "10.9.0.0/16", "mtu": 1400, "priority": 7, "table": 100, "scope": 253}],
        "dns": {"nameservers": ["8.8.8.8"], "domain": "example.com", "search": ["example.com"],
                "options": ["ndots:2"]}})
}

fn on(net: &Net<'_>, verb: &str) -> Call {
    net.call(verb, "dummy").netns("/some/where")
}

fn ips(result: &Value) -> Value {
    let ip = |ip: &Value| {
        let address = ip["address"].as_str().or(ip["ip"].as_str()).unwrap();
        json!([address, ip["gateway"]])
    };
    match &result["ips"] {
        Value::Array(ips) => ips.iter().map(ip).collect(),
        _ => ["ip4", "ip6"].iter().map(|f| &result[*f]).filter(|f| f.is_object()).map(ip).collect(),
    }
}

#[test]
fn every_verb_works_in_every_version() {
    for version in VERSIONS {
        let node = Node::new();
        let before = node.snapshot();
        let net = net(&node, version, &upstream());
        let outcome = on(&net, "ADD").run();
        let golden = match version {
            "0.1.0" | "0.2.0" => include_str!("golden/static/0.1.json"),
            "1.0.0" | "1.1.0" => include_str!("golden/static/1.0.json"),
            _ => include_str!("golden/static/0.3.json"),
        };
        assert_eq!(outcome.stdout, golden.trim_end().replace("VERSION", version));
        assert_eq!((outcome.status, outcome.stderr.as_str()), (Some(0), ""));
        let result: Value = serde_json::from_str(&outcome.stdout).unwrap();
        let check = on(&net.with(&json!({"prevResult": result})), "CHECK");
        if version >= "0.4.0" {
            check.ok();
        } else {
            assert_eq!(check.error().brief(), (1, "config version does not allow CHECK"));
        }
        for verb in ["GC", "STATUS"] {
            let call = on(&net.with(&json!({"cni.dev/valid-attachments": []})), verb);
            if version == "1.1.0" {
                call.ok();
            } else {
                let msg = format!("config version does not allow {verb}");
                assert_eq!(call.error().brief(), (1, msg.as_str()));
            }
        }
        for _ in 0..2 {
            on(&net, "DEL").ok();
        }
        // DEL accepts any IPAM configuration and needs no namespace.
        net.with(&json!({"ipam": null})).call("DEL", "other").without("CNI_NETNS").ok();
        net.with(&json!({"ipam": {"type": "static", "addresses": "x"}})).call("DEL", "o").ok();
        assert_unchanged(&before, &node.snapshot());
        assert_eq!(fs::read_dir(node.path("")).unwrap().count(), 1, "only the plugins");
    }
}

#[test]
fn addresses_come_from_capability_args_or_keys() {
    let one = json!({"addresses": [{"address": "10.1.0.1/24", "gateway": "10.1.0.254"},
                                   {"address": "10.2.0.1/24"}]});
    let args = json!({"args": {"cni": {"ips": ["10.10.0.2/24", "2001:db8::2/64"]}}});
    let runtime = json!({"RuntimeConfig": {"ips": ["10.10.0.3/24", "2001:db8::3/64"]}});
    let both = merged(&args, &runtime);
    let nothing = json!({});
    for (ipam, keys, cni_args, want) in [
        (&one, &nothing, "", json!([["10.1.0.1/24", "10.1.0.254"], ["10.2.0.1/24", null]])),
        (
            &nothing,
            &nothing,
            "IP=10.10.0.1/24;GATEWAY=10.10.0.254",
            json!([["10.10.0.1/24", "10.10.0.254"]]),
        ),
        (
            &nothing,
            &nothing,
            "IP=10.10.0.1/24, 11.11.0.1/24;GATEWAY=10.10.0.254",
            json!([["10.10.0.1/24", "10.10.0.254"], ["11.11.0.1/24", null]]),
        ),
        (
            &nothing,
            &nothing,
            "IgnoreUnknown=1;K8S_POD_NAME=x;IP=10.10.0.1/24,::1/64;GATEWAY=10.10.0.2,::2,10.10.0.3",
            json!([["10.10.0.1/24", "10.10.0.3"], ["::1/64", "::2"]]),
        ),
        // Addresses of `CNI_ARGS` are appended; GATEWAY applies to addresses without a gateway.
        (
            &one,
            &nothing,
            "IP=10.3.0.1/24;GATEWAY=10.1.0.9,10.2.0.9",
            json!([
                ["10.1.0.1/24", "10.1.0.254"],
                ["10.2.0.1/24", "10.2.0.9"],
                ["10.3.0.1/24", null]
            ]),
        ),
        (&one, &args, "", json!([["10.10.0.2/24", null], ["2001:db8::2/64", null]])),
        (&one, &runtime, "", json!([["10.10.0.3/24", null], ["2001:db8::3/64", null]])),
        (
            &one,
            &both,
            "IP=10.10.0.4/24;GATEWAY=10.10.0.254",
            json!([["10.10.0.3/24", null], ["2001:db8::3/64", null]]),
        ),
        (
            &nothing,
            &both,
            "GATEWAY=10.10.0.254,2001:db8::1",
            json!([["10.10.0.3/24", "10.10.0.254"], ["2001:db8::3/64", "2001:db8::1"]]),
        ),
        (
            &one,
            &json!({"args": {"cni": {"ips": []}}, "runtimeConfig": {"ips": null}}),
            "",
            json!([["10.1.0.1/24", "10.1.0.254"], ["10.2.0.1/24", null]]),
        ),
        (
            &json!({"ADDRESSES": [{"ADDRESS": "::ffff:10.1.0.1/120", "GATEWAY": ""}]}),
            &nothing,
            "",
            json!([["10.1.0.1/24", null]]),
        ),
        (&nothing, &nothing, "", json!([])),
    ] {
        let node = Node::new();
        let net = net(&node, "1.0.0", ipam).with(keys);
        let call = on(&net, "ADD").env("CNI_ARGS", cni_args);
        assert_eq!(ips(&call.result()), want, "{ipam} {keys} {cni_args}");
    }
}

#[test]
fn invalid_configurations_are_refused() {
    let node = Node::new();
    let missing = (7, "IPAM config missing 'ipam' key");
    for version in VERSIONS {
        let conf = net(&node, version, &json!({}));
        let refused = |keys: Value, args: &str, code: u64, msg: &str| {
            let error = on(&conf.with(&keys), "ADD").env("CNI_ARGS", args).error();
            assert_eq!(error.brief(), (code, msg), "{version} {keys} {args}");
        };
        let ipam = |addresses: Value| json!({"ipam": {"type": "static", "addresses": addresses}});
        refused(json!({"ipam": null}), "IP=10.10.0.1/24;GATEWAY=10.10.0.254", missing.0, missing.1);
        refused(
            json!({"ipam": null, "runtimeConfig": {"ips": ["10.10.0.1/24"]}}),
            "",
            missing.0,
            missing.1,
        );
        refused(
            ipam(json!([{"address": "10.10.0.1"}])),
            "",
            7,
            "the 'address' field is expected to be in CIDR notation, got: '10.10.0.1'",
        );
        refused(
            json!({}),
            "IP=10.10.0.1",
            7,
            "the 'ip' field is expected to be in CIDR notation, got: '10.10.0.1'",
        );
        let entry = "an entry in the 'ips' field is NOT in CIDR notation, got: '10.10.0.1'";
        refused(json!({"args": {"cni": {"ips": ["10.10.0.1"]}}}), "", 7, entry);
        refused(json!({"RuntimeConfig": {"ips": ["10.10.0.1"]}}), "", 7, entry);
        refused(json!({}), "IP=10.1.0.1/24;GATEWAY= x", 7, "invalid gateway address:  x");
        refused(
            ipam(json!([{"address": "10.1.0.1/24", "gateway": "::1"}])),
            "",
            7,
            "gateway ::1 is of another family than address 10.1.0.1/24",
        );
        refused(
            ipam(json!([{"address": "10.1.0.1/24"}])),
            "IP=10.1.0.1/16",
            7,
            "address 10.1.0.1 is given twice",
        );
        refused(json!({}), "IP", 999, "ARGS: invalid pair \"IP\"");
        let two = ipam(json!([{"address": "10.1.0.1/24"}, {"address": "10.2.0.1/24"}]));
        if version < "0.3.0" {
            refused(
                two,
                "",
                7,
                &format!("CNI version {version} does not support more than 1 address per family"),
            );
            refused(json!({}), "", 999, "cannot convert: no valid IP addresses");
        } else {
            on(&conf.with(&two), "ADD").result();
        }
    }
    let status = on(&net(&node, "1.1.0", &json!({"addresses": [{"address": "x"}]})), "STATUS");
    assert_eq!(status.error().code, 7);
}

#[test]
fn check_compares_with_prev_result() {
    let node = Node::new();
    let ipam = json!({"addresses": [{"address": "10.1.0.1/24", "gateway": "10.1.0.254"},
                                    {"address": "2001:db8::1/64"}]});
    let net = net(&node, "1.0.0", &ipam);
    let error = on(&net, "CHECK").error();
    assert_eq!(error.brief(), (999, "Required prevResult missing"));
    let check = |ips: Value| {
        let prev = json!({"cniVersion": "1.0.0", "ips": ips});
        on(&net.with(&json!({"prevResult": prev})), "CHECK")
    };
    let v6 = json!({"address": "2001:db8::1/64", "gateway": "2001:db8::ff"});
    check(json!([v6, {"address": "10.1.0.1/24", "gateway": "10.1.0.254"}])).ok();
    check(json!([v6, {"address": "10.1.0.1/32", "gateway": "10.1.0.254"}])).ok();
    for (ips, msg) in [
        (json!([v6]), "static: address 10.1.0.1 of interface eth0 is not in prevResult"),
        (
            json!([{"address": "10.1.0.1/24", "gateway": "10.1.0.254"}]),
            "static: address 2001:db8::1 of interface eth0 is not in prevResult",
        ),
        (
            json!([{"address": "10.1.0.1/24", "gateway": "10.1.0.253"}, v6]),
            "static: Failed to match addr 10.1.0.1 on interface eth0",
        ),
        (
            json!([{"address": "10.1.0.1/24"}, v6]),
            "static: Failed to match addr 10.1.0.1 on interface eth0",
        ),
        (
            json!([{"address": "10.1.0.1/16", "gateway": "10.1.0.254"}, v6]),
            "static: address 10.1.0.1 of interface eth0 has another prefix length",
        ),
    ] {
        assert_eq!(check(ips).error().brief(), (999, msg));
    }
}

#[test]
fn bridge_with_static_carries_traffic_and_leaves_nothing() {
    let node = Node::new();
    let conf = |ips: [&str; 2]| {
        json!({"cniVersion": "1.1.0", "name": "net", "type": "bridge", "isGateway": true,
            "ipam": {"type": "static", "addresses": [
                {"address": ips[0], "gateway": "10.66.0.1"}, {"address": ips[1], "gateway": "fd66::1"}],
                "routes": [{"dst": "0.0.0.0/0"}]}})
    };
    let (one, two) = (Container::new(), Container::new());
    let before = one.snapshot(&node);
    let call = |verb: &str, id: &str, container: &Container, ips| {
        node.call("bridge", verb).id(id).netns(&container.path()).conf(&conf(ips))
    };
    let (first, second) = (["10.66.0.2/24", "fd66::2/64"], ["10.66.0.3/24", "fd66::3/64"]);
    let result = call("ADD", "c1", &one, first).result();
    call("ADD", "c2", &two, second).result();
    for target in ["10.66.0.3", "fd66::3", "10.66.0.1", "fd66::1"] {
        assert!(one.reaches(target), "{target}");
    }
    let mut check = conf(first);
    check["prevResult"] = result;
    node.call("bridge", "CHECK").id("c1").netns(&one.path()).conf(&check).ok();
    check["ipam"]["addresses"][0]["address"] = json!("10.66.0.9/24");
    let error = node.call("bridge", "CHECK").id("c1").netns(&one.path()).conf(&check).error();
    assert!(error.msg.contains("10.66.0.9"), "{error:?}");
    for _ in 0..2 {
        call("DEL", "c1", &one, first).ok();
    }
    assert_unchanged(&before, &one.snapshot(&node));
    call("DEL", "c2", &two, second).ok();
}

#[test]
fn results_equal_the_references() {
    let Some(peer) = compare::peer("static beside the reference's") else { return };
    let mut plain = upstream();
    // Debian's release does not support the attributes of this route.
    plain["routes"].as_array_mut().unwrap().pop();
    let cases = [
        (plain, json!({}), ""),
        (json!({}), json!({}), "IP=10.10.0.1/24;GATEWAY=10.10.0.254"),
        (json!({}), json!({"runtimeConfig": {"ips": ["10.10.0.1/24"]}}), "IP=10.9.0.1/24"),
        (json!({}), json!({"args": {"cni": {"ips": ["10.10.0.1/24", "fd00::1/64"]}}}), ""),
    ];
    for version in &VERSIONS[..5] {
        for (ipam, keys, args) in &cases {
            let node = Node::new();
            let call = on(&net(&node, version, ipam).with(keys), "ADD").env("CNI_ARGS", args);
            let theirs = call.clone().program(peer.join("static")).printed();
            assert_eq!(call.printed().trim_end(), theirs.trim_end(), "{version} {ipam} {args}");
        }
    }
}

#[test]
fn addresses_may_have_the_form_of_gos_ipnet() {
    let node = Node::new();
    let address = |parts: &Value| {
        let both = merged(&json!({"address": "10.10.0.1/24"}), parts);
        let net = net(&node, "1.1.0", &json!({"addresses": [both]}));
        ips(&on(&net, "ADD").result())
    };
    // The JSON form of the reference's Go type; the order of keys is irrelevant.
    let parts = json!({"Address": {"IP": "10.10.0.1", "Mask": "////AA=="}, "Version": "4"});
    assert_eq!(address(&parts), address(&json!({})));
}

/// Addresses of the runtime replace those of the file, which may be placeholders.
#[test]
fn replaced_addresses_are_not_validated() {
    let node = Node::new();
    for placeholder in [
        json!([{"gateway": "10.1.0.1"}]),
        json!([{"address": "", "gateway": "10.1.0.1"}]),
        json!([{"address": "set-by-annotation"}]),
    ] {
        let plain = net(&node, "1.1.0", &json!({"addresses": placeholder}));
        for asked in [
            json!({"runtimeConfig": {"ips": ["10.1.0.9/24"]}}),
            json!({"args": {"cni": {"ips": ["10.1.0.9/24"]}}}),
        ] {
            let result = on(&plain.with(&asked), "ADD").result();
            assert_eq!(ips(&result), json!([["10.1.0.9/24", null]]), "{placeholder} {asked}");
        }
        let empty = plain.with(&json!({"runtimeConfig": {"ips": [""]}}));
        assert_eq!(on(&empty, "ADD").error().code, 7, "{placeholder}");
        let wanted = plain.with(&json!({"capabilities": {"ips": true}}));
        on(&wanted, "STATUS").ok();
    }
    // Without an address the entry says that the runtime gives one.
    on(&net(&node, "1.1.0", &json!({"addresses": [{"gateway": "10.1.0.1"}]})), "STATUS").ok();
    let wrong = net(&node, "1.1.0", &json!({"addresses": [{"address": "10.1.0.300/24"}]}));
    assert_eq!(on(&wrong, "STATUS").error().code, 7);
}
