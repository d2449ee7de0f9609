//! host-local: calls of runtimes and of other plugins, and the files of the store.

mod config;
mod crowd;
mod kills;
pub(crate) mod reclaim;
mod requested;
mod store;

use std::fs;

use serde_json::{Value, json};

use crate::support::net::{Net, merged};
use crate::support::node::{Container, Node, VERSIONS, assert_unchanged};

/// A network with these `ipam` keys. Its namespace need not exist.
fn net<'n>(node: &'n Node, version: &'static str, ipam: &Value) -> Net<'n> {
    let own = json!({"type": "host-local", "dataDir": node.path("leases")});
    Net::new(node, "host-local", version, &json!({"ipam": merged(&own, ipam)}))
}

/// A network of version 1.1.0 with one range set of these subnets.
fn one_set<'n>(node: &'n Node, subnets: &[&str]) -> Net<'n> {
    let set: Vec<_> = subnets.iter().map(|s| json!({"subnet": s})).collect();
    net(node, "1.1.0", &json!({"ranges": [set]}))
}

/// ADD for `eth0` of container `id`; returns the addresses.
#[track_caller]
fn add(net: &Net<'_>, id: &str) -> Vec<String> {
    let result = net.call("ADD", id).netns("/no/such/netns").result();
    let text = |ip: &Value| {
        let address = ip["ip"].as_str().or(ip["address"].as_str());
        address.unwrap().to_owned()
    };
    match &result["ips"] {
        Value::Array(ips) => ips.iter().map(text).collect(),
        _ => ["ip4", "ip6"]
            .iter()
            .filter(|f| result[**f].is_object())
            .map(|f| text(&result[*f]))
            .collect(),
    }
}

#[track_caller]
fn del(net: &Net<'_>, id: &str) {
    net.call("DEL", id).netns("/no/such/netns").ok();
}

/// Asserts that ADD fails with this error and leaves no lease.
#[track_caller]
fn refused(net: &Net<'_>, id: &str, code: u64, msg: &str) {
    let before = net.node.snapshot();
    let error = net.call("ADD", id).netns("/no/such/netns").error();
    assert_eq!(error.brief(), (code, msg), "{}", net.conf);
    assert_unchanged(&before, &net.node.snapshot());
}

fn file(net: &Net<'_>, name: &str) -> String {
    fs::read_to_string(net.node.path("leases/net").join(name)).unwrap()
}

/// The upstream test's configuration with more route attributes.
fn upstream(node: &Node) -> Value {
    let resolv = node.path("resolv.conf");
    fs::write(
        &resolv,
        "nameserver 192.0.2.3\n# x\ndomain example.com\nsearch a\nsearch b\noptions ndots:2\n",
    )
    .unwrap();
    json!({"resolvConf": resolv,
        "ranges": [[{"subnet": "10.1.2.0/24"}, {"subnet": "10.2.2.0/24"}],
                   [{"subnet": "2001:db8:1::/64"}]],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}, {"dst": "192.168.0.0/16", "gw": "1.1.1.1"},
                   {"dst": "2001:db8:2::/64", "gw": "2001:db8:3::1", "mtu": 1400, "table": 0, "scope": 0}]})
}

#[test]
fn add_prints_the_golden_result_and_keeps_the_references_files() {
    for version in VERSIONS {
        let node = Node::new();
        let net = net(&node, version, &upstream(&node));
        let call = |verb| net.call(verb, "dummy").netns("/no/such/netns");
        let outcome = call("ADD").run();
        let golden = match version {
            "0.1.0" | "0.2.0" => include_str!("golden/host-local/0.1.json"),
            "1.0.0" | "1.1.0" => include_str!("golden/host-local/1.0.json"),
            _ => include_str!("golden/host-local/0.3.json"),
        };
        assert_eq!(outcome.stdout, golden.trim_end().replace("VERSION", version));
        assert_eq!((outcome.status, outcome.stderr.as_str()), (Some(0), ""));
        for ip in ["10.1.2.2", "2001:db8:1::2"] {
            assert_eq!(file(&net, ip), "dummy\r\neth0");
            let mode =
                node.sh(&format!("stat -c %a {}", node.path("leases/net").join(ip).display()));
            assert_eq!(mode, "600\n");
        }
        assert_eq!(file(&net, "last_reserved_ip.0"), "10.1.2.2");
        assert_eq!(file(&net, "last_reserved_ip.1"), "2001:db8:1::2");
        assert_eq!(file(&net, "lock"), "");
        assert_eq!(node.sh(&format!("stat -c %a {}", node.path("leases/net").display())), "755\n");
        if version >= "0.4.0" {
            call("CHECK").ok();
        } else {
            let msg = "config version does not allow CHECK";
            assert_eq!(call("CHECK").error().brief(), (1, msg));
        }
        call("DEL").ok();
        assert_eq!(net.leases(), [""; 0]);
        assert_eq!(file(&net, "last_reserved_ip.0"), "10.1.2.2", "not to be reused at once");
        call("DEL").ok();
        net.call("DEL", "dummy").without("CNI_NETNS").ok();
        net.call("DEL", "other").netns("").ok();
    }
}

#[test]
fn del_of_an_unknown_network_creates_no_directory() {
    for version in VERSIONS {
        let node = Node::new();
        let net = net(&node, version, &json!({"subnet": "10.1.2.0/24"}));
        del(&net, "c1");
        assert!(!crate::support::node::exists(node.path("leases")));
        let keys = json!({"cni.dev/valid-attachments": []});
        if version == "1.1.0" {
            net.with(&keys).call("GC", "").ok();
            net.call("STATUS", "").ok();
            assert!(!crate::support::node::exists(node.path("leases")));
        }
    }
}

#[test]
fn gc_and_status_require_1_1_0() {
    let node = Node::new();
    for version in &VERSIONS[..6] {
        for verb in ["GC", "STATUS"] {
            let net = net(&node, version, &json!({"subnet": "10.1.2.0/24"}));
            let msg = format!("config version does not allow {verb}");
            assert_eq!(net.call(verb, "").error().brief(), (1, msg.as_str()));
        }
    }
}

#[test]
fn check_reports_missing_lease_without_prev_result() {
    let node = Node::new();
    let net = one_set(&node, &["10.1.2.0/24"]);
    let check = |id| net.call("CHECK", id).netns("/no/such");
    let msg = "host-local: Failed to find address added by container c1";
    assert_eq!(check("c1").error().brief(), (999, msg));
    add(&net, "c1");
    check("c1").ok();
    assert_eq!(check("c1").ifname("eth1").error().brief(), (999, msg));
    fs::write(node.path("leases/net/10.1.2.2"), "another\r\neth0").unwrap();
    assert_eq!(check("c1").error().brief(), (999, msg));
}

#[test]
fn one_container_in_two_networks_has_two_leases() {
    let node = Node::new();
    let a = one_set(&node, &["10.1.2.0/24"]);
    let b = a.with(&json!({"name": "other", "ipam": {"type": "host-local",
        "dataDir": node.path("leases"), "subnet": "10.2.2.0/24"}}));
    add(&a, "c1");
    let result = b.call("ADD", "c1").netns("/x").ifname("eth1").result();
    assert_eq!(result["ips"][0]["address"], "10.2.2.2/24");
    del(&a, "c1");
    assert_eq!((node.leases("net"), node.leases("other")), (vec![], vec!["10.2.2.2".to_owned()]));
    b.call("DEL", "c1").ok();
    assert_eq!(node.leases("other").len(), 1, "eth0 never was in it");
    // GC of one network keeps the leases of the other.
    add(&a, "c1");
    a.with(&json!({"cni.dev/valid-attachments": []})).call("GC", "").ok();
    assert_eq!((node.leases("net").len(), node.leases("other").len()), (0, 1));
}

#[test]
fn the_network_namespace_is_not_opened() {
    let node = Node::new();
    let net = one_set(&node, &["10.1.2.0/24"]);
    let plain = node.path("plain");
    fs::write(&plain, "").unwrap();
    let container = Container::new();
    let before = container.snapshot(&node);
    for (id, path) in
        [("a", plain.display().to_string()), ("b", "/no/such".into()), ("c", container.path())]
    {
        net.call("ADD", id).netns(&path).result();
        net.call("CHECK", id).netns(&path).ok();
        net.call("DEL", id).netns(&path).ok();
    }
    assert_unchanged(&before, &container.snapshot(&node));
}
