//! Configurations that were edited after ADD: no key that has the wrong type or is gone keeps a
//! container from being deleted, and nothing of it stays.

use serde_json::{Value, json};

use crate::support::conflist::{Attached, Conflist};
use crate::support::net::{merged, wire};
use crate::support::node::{Container, Node, Snapshot, assert_unchanged};

/// The state of the host, with the leases in the default directory.
fn state(node: &Node) -> Snapshot {
    let leases = node.sh("ls /var/lib/cni/networks/net | grep '^[0-9]' || true");
    node.snapshot().with("leases in the default directory", leases)
}

/// Leases of attachments without a record are found in the directory of the configuration and in
/// the default one.
fn default_directory(node: &Node) -> Value {
    node.sh("mkdir -p /var/lib/cni && mount -t tmpfs tmpfs /var/lib/cni");
    json!({"type": "host-local", "ranges": [[{"subnet": "10.1.0.0/24"}]]})
}

/// The pointers of all values of a document, but for those that identify the network and the
/// plugin.
fn places(value: &Value, at: &str, found: &mut Vec<String>) {
    let mut below = |step: &str, value: &Value| {
        let place = format!("{at}/{}", step.replace('~', "~0").replace('/', "~1"));
        if !["type", "dataDir"].contains(&step) {
            found.push(place.clone());
        }
        places(value, &place, found);
    };
    match value {
        Value::Object(members) => members.iter().for_each(|(key, value)| below(key, value)),
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(i, item)| below(&i.to_string(), item));
        }
        _ => {}
    }
}

/// Values of other types than `value`; null is an absent key.
fn wrong(value: &Value) -> Vec<Value> {
    match value {
        Value::String(_) => vec![json!(7), json!(["x"]), json!(null)],
        Value::Number(_) => vec![json!("1500"), json!({"x": 7}), json!(null)],
        Value::Bool(_) => vec![json!("true"), json!([7]), json!(null)],
        Value::Array(_) => vec![json!("x"), json!({"x": 7}), json!(null)],
        _ => vec![json!("x"), json!([7]), json!(null)],
    }
}

/// ADD with the plugins, then DEL with each of their keys wrong in each way.
fn sweep(node: &Node, plugins: &Value) {
    let conf = json!({"cniVersion": "1.0.0", "name": "net", "plugins": plugins});
    let mut all = Vec::new();
    places(&conf["plugins"], "/plugins", &mut all);
    let keys = all.iter().filter(|place| place.matches('/').count() > 2);
    let mut runs = 0;
    // The state that every attachment shares is there before.
    let warm = |list: &Conflist<'_>| {
        let container = Container::new();
        let at = Attached::new("first", &container.path());
        let result = list.add(&at).unwrap();
        list.del(&at, Some(&result)).unwrap();
    };
    warm(&Conflist::new(node, conf.clone()));
    for key in keys.map(String::as_str).chain(["/cniVersion"]) {
        for value in wrong(conf.pointer(key).unwrap()) {
            let container = Container::new();
            let before = state(node);
            let at = Attached::new("c1", &container.path());
            let good = Conflist::new(node, conf.clone());
            let result = good.add(&at).unwrap();
            let mut edited = conf.clone();
            *edited.pointer_mut(key).unwrap() = value.clone();
            let result = (runs % 2 == 0).then_some(&result);
            let deleted = Conflist::new(node, edited).del(&at, result);
            assert_eq!(deleted, Ok(()), "{key} = {value}");
            let after = state(node);
            if before != after {
                println!("{key} = {value}");
            }
            assert_unchanged(&before, &after);
            runs += 1;
        }
    }
    assert!(runs > 10, "{runs}");
}

fn filtered(node: &Node, plugin: &str, backend: &str) -> Value {
    let ipam = merged(
        &node.host_local(&["10.1.0.0/24", "fd00:1::/64"]),
        &json!({"routes": [{"dst": "0.0.0.0/0"}], "reuseDelay": 0, "lockTimeout": 5}),
    );
    let port = json!({"hostPort": 8080, "containerPort": 80, "protocol": "tcp"});
    json!([
        {"type": plugin, "mtu": 1400, "ipMasq": true, "ipMasqBackend": backend,
         "args": {"cni": {}}, "dns": {"nameservers": ["10.1.0.1"]}, "ipam": ipam},
        {"type": "portmap", "backend": backend, "snat": true,
         "capabilities": {"portMappings": true}, "runtimeConfig": {"portMappings": [port]}},
        {"type": "firewall", "backend": backend, "ingressPolicy": "same-bridge"},
    ])
}

#[test]
fn edited_bridge_portmap_firewall_with_nftables_is_deleted() {
    let node = Node::new();
    let mut plugins = filtered(&node, "bridge", "nftables");
    let keys =
        json!({"bridge": "br0", "isGateway": true, "hairpinMode": true, "macspoofchk": true});
    plugins[0] = merged(&plugins[0], &keys);
    sweep(&node, &plugins);
}

#[test]
fn edited_ptp_portmap_firewall_with_iptables_is_deleted() {
    let node = Node::new();
    let mut plugins = filtered(&node, "ptp", "iptables");
    plugins[2].as_object_mut().unwrap().remove("ingressPolicy");
    sweep(&node, &plugins);
}

#[test]
fn edited_ptp_bandwidth_tuning_sbr_is_deleted() {
    let node = Node::new();
    let ipam = default_directory(&node);
    let limits = json!({"ingressRate": 1_000_000, "ingressBurst": 1_000_000});
    sweep(
        &node,
        &json!([
            {"type": "ptp", "ipam": ipam},
            {"type": "bandwidth", "egressRate": 1_000_000, "egressBurst": 1_000_000,
             "runtimeConfig": {"bandwidth": limits}},
            {"type": "tuning", "mtu": 1400, "promisc": true, "mac": "02:00:00:00:00:07",
             "dataDir": node.state("tuning"), "sysctl": {"net.core.somaxconn": "500"}},
            {"type": "route-override", "flushroutes": true, "addroutes": [{"dst": "198.51.100.0/24"}]},
            {"type": "sbr", "table": 100},
            {"type": "tc-redirect-tap", "multiQueue": true, "allAddresses": true},
        ]),
    );
}

#[test]
fn edited_bridge_egress_is_deleted() {
    let node = Node::new();
    let ipam = default_directory(&node);
    let allow = json!([{"to": ["192.0.2.0/24"], "ports": ["tcp/443"]}]);
    sweep(
        &node,
        &json!([
            {"type": "bridge", "bridge": "br0", "isGateway": true, "ipam": ipam},
            {"type": "egress", "policy": "deny", "allow": allow, "deny": [{"to": ["192.0.2.7"]}], "profile": "sandbox",
             "serve": ["tcp/80"], "policyDir": "/etc/cni/policies", "capabilities": {"egressPolicy": true},
             "runtimeConfig": {"egressPolicy": {"allow": allow}}},
        ]),
    );
}

#[test]
fn edited_macvlan_and_tap_are_deleted() {
    let node = Node::new();
    wire(&node);
    let ipam = default_directory(&node);
    sweep(&node, &json!([{"type": "macvlan", "master": "wire0", "mode": "bridge", "ipam": ipam}]));
    sweep(&node, &json!([{"type": "tap", "multiQueue": true, "ipam": ipam}]));
}

#[test]
fn edited_flannel_is_deleted() {
    let node = Node::new();
    let env = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.2.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=false\n";
    std::fs::write(node.path("subnet.env"), env).unwrap();
    let delegate = json!({"isDefaultGateway": true, "ipMasq": true, "ipMasqBackend": "nftables"});
    sweep(
        &node,
        &json!([{"type": "flannel", "subnetFile": node.path("subnet.env"), "delegate": delegate,
                 "dataDir": node.state("flannel"), "ipam": {"dataDir": node.path("leases")}}]),
    );
}

#[test]
fn del_releases_leases_of_the_former_ipam_type() {
    let (node, container) = (Node::new(), Container::new());
    default_directory(&node);
    let ipam = |kind: &str| json!({"type": kind, "subnet": "10.1.0.0/24"});
    let conf =
        |ipam: Value| json!({"cniVersion": "1.0.0", "name": "n", "type": "ptp", "ipam": ipam});
    let leases = || node.sh("ls /var/lib/cni/networks/n | grep -c '^10' || true");
    for edited in
        [json!(null), json!({}), ipam("static"), ipam("host-locl"), ipam("bridge"), json!("x")]
    {
        let call = |verb| node.call("ptp", verb).netns(&container.path());
        call("ADD").conf(&conf(ipam("host-local"))).result();
        assert_eq!(leases().trim(), "1");
        for _ in 0..2 {
            let outcome = call("DEL").conf(&conf(edited.clone())).run();
            assert_eq!((outcome.status, leases().trim()), (Some(0), "0"), "{edited}: {outcome:?}");
        }
    }
}

#[test]
fn del_needs_no_file_of_the_ipam_plugin() {
    let (node, container) = (Node::new(), Container::new());
    let ipam = node.host_local(&["10.1.0.0/24"]);
    let conf = json!({"cniVersion": "1.0.0", "name": "n", "type": "ptp", "ipam": ipam});
    node.call("ptp", "ADD").netns(&container.path()).conf(&conf).result();
    std::fs::remove_file(node.bin().join("host-local")).unwrap();
    let outcome = node.call("ptp", "DEL").netns(&container.path()).conf(&conf).run();
    assert_eq!((outcome.status, node.leases("n").len()), (Some(0), 0), "{outcome:?}");
}

#[test]
fn del_treats_an_impossible_namespace_path_as_gone() {
    let node = Node::new();
    let conf = json!({"cniVersion": "1.0.0", "name": "n", "type": "ptp",
                      "ipam": node.host_local(&["10.1.0.0/24"])});
    let file = node.path("file");
    std::fs::write(&file, "").unwrap();
    std::os::unix::fs::symlink("ring", node.path("ring")).unwrap();
    for path in [file.join("netns"), node.path("ring")] {
        let outcome = node.call("ptp", "DEL").netns(path.to_str().unwrap()).conf(&conf).run();
        assert_eq!(outcome.status, Some(0), "{} {outcome:?}", path.display());
    }
}
