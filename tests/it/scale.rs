//! Every feature that keeps state of all attachments at 1, 20 and 200, each call a process of its
//! own: ADD, CHECK and GC succeed, what DEL or GC leaves is what was there before, and the cost of
//! a call does not grow.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;

use serde_json::{Value, json};

use crate::support::conflist::{Attached, Conflist};
use crate::support::net::{no_veth_remains, settles};
use crate::support::node::{Container, Node, executable, exists};
use crate::support::parallel::at_once;
use crate::support::snapshot::without_recorded;
use crate::support::strace::{self, Cost};

/// The numbers of attachments, or of other things, at which a call is examined.
const SIZES: [usize; 3] = [1, 20, 200];

/// GC of all networks where each attachment has its own would be most of the time.
const NETWORKS: usize = 10;

/// A feature: networks that use it, and what grows.
struct Feature {
    name: &'static str,
    /// The list of plugins of the attachment with this number; 0 is attached before all others.
    list: fn(&Node, usize) -> Value,
    /// The runtime's capability arguments for it.
    runtime: fn(usize) -> Value,
    /// What there is beside the measured attachment: other attachments, or what this creates.
    beside: Option<fn(&Node, Range<usize>)>,
    /// Whether the cost is constant: the programs of iptables read all rules.
    counts: bool,
    /// More system calls than at the first size, and more bytes for each attachment: records,
    /// rules and elements are read.
    more: [usize; 2],
    /// The plugins whose ADD reads the same number of rules of any number of attachments.
    flat: &'static [&'static str],
}

const FEATURES: [Feature; 12] = [
    Feature { name: "subnets", list: subnets, ..Feature::PLAIN },
    Feature { name: "single addresses", list: single_addresses, ..Feature::PLAIN },
    Feature { name: "bridges", list: bridges, ..Feature::PLAIN },
    Feature { name: "chain", list: chain, ..Feature::PLAIN },
    Feature {
        name: "conditions",
        list: conditions,
        runtime: |i| ports(if i == 0 { 100 } else { 1 }, i),
        // The rules of others are read: one of a container that has ended would serve the port.
        more: [12, 1800],
        ..Feature::PLAIN
    },
    Feature {
        name: "administrator's rules",
        list: administrators_chain,
        beside: Some(administrators_rules),
        ..Feature::PLAIN
    },
    Feature { name: "equal policies", list: equal_policies, ..Feature::PLAIN },
    Feature { name: "different policies", list: different_policies, ..Feature::PLAIN },
    Feature { name: "leases", list: leases, ..Feature::PLAIN },
    Feature { name: "flannel", list: flannel, ..Feature::PLAIN },
    Feature { name: "iptables", list: iptables, counts: false, ..Feature::PLAIN },
    Feature {
        name: "usual chain",
        list: usual_chain,
        // DEL reads the chains whose rules it deletes.
        more: [48, 1800],
        flat: &["bridge", "firewall"],
        ..Feature::PLAIN
    },
];

impl Feature {
    const PLAIN: Feature = Feature {
        name: "",
        list: leases,
        runtime: |i| ports(1, i),
        beside: None,
        counts: true,
        more: [12, 1200],
        flat: &[],
    };

    fn of(name: &str) -> &'static Feature {
        FEATURES.iter().find(|feature| feature.name == name).unwrap()
    }
}

fn list(name: &str, plugins: &Value) -> Value {
    json!({"cniVersion": "1.0.0", "name": name, "plugins": plugins})
}

fn ports(count: usize, i: usize) -> Value {
    let port = |n| json!({"hostPort": 10_000 + i + n, "containerPort": 80, "protocol": "tcp"});
    json!({"portMappings": (0..count).map(|n| port(n * 1000 % 50_000 + n / 50)).collect::<Vec<_>>()})
}

/// A network with a subnet for each attachment.
fn subnets(node: &Node, i: usize) -> Value {
    let ipam = node.host_local(&[&format!("10.{}.{}.0/24", 1 + i / 250, i % 250)]);
    list(
        &format!("net{i}"),
        &json!([{"type": "ptp", "ipMasq": true, "ipMasqBackend": "nftables", "ipam": ipam}]),
    )
}

/// Addresses that are subnets of their own.
fn single_addresses(_: &Node, i: usize) -> Value {
    let address = format!("10.7.{}.{}/32", i / 250, 1 + i % 250);
    let ipam = json!({"type": "static",
        "addresses": [{"address": address, "gateway": "169.254.1.1"}]});
    list("n", &json!([{"type": "ptp", "ipMasq": true, "ipMasqBackend": "nftables", "ipam": ipam}]))
}

/// A network with a bridge and a policy for each attachment.
fn bridges(node: &Node, i: usize) -> Value {
    let ipam = node.host_local(&[&format!("10.{}.{}.0/24", 1 + i / 250, i % 250)]);
    list(
        &format!("net{i}"),
        &json!([
            {"type": "bridge", "bridge": format!("br{i}"), "isDefaultGateway": true, "ipMasq": true,
                "ipMasqBackend": "nftables", "ipam": ipam},
            {"type": "portmap", "backend": "nftables", "capabilities": {"portMappings": true}},
            {"type": "firewall", "backend": "nftables", "ingressPolicy": "same-bridge"},
        ]),
    )
}

/// A network with every plugin that keeps state of a container.
fn chain(node: &Node, _: usize) -> Value {
    list(
        "n",
        &json!([
            {"type": "bridge", "bridge": "cni0", "isDefaultGateway": true, "ipMasq": true,
                "macspoofchk": true, "ipMasqBackend": "nftables",
                "ipam": node.host_local(&["10.1.0.0/16"])},
            {"type": "portmap", "backend": "nftables", "capabilities": {"portMappings": true}},
            {"type": "firewall", "backend": "nftables", "ingressPolicy": "isolated"},
            {"type": "bandwidth", "ingressRate": 80_000_000, "ingressBurst": 800_000,
                "egressRate": 80_000_000, "egressBurst": 800_000},
            {"type": "tuning", "mtu": 1400,
                "sysctl": {"net.core.somaxconn": "500"}},
            {"type": "route-override", "flushgateway": true, "addroutes": [{"dst": "0.0.0.0/0"}]},
            {"type": "sbr"},
            {"type": "egress", "profile": "sandbox", "capabilities": {"portMappings": true}},
        ]),
    )
}

/// Ports with a condition, of which each is a rule; the first container has a hundred.
fn conditions(node: &Node, _: usize) -> Value {
    list(
        "n",
        &json!([
            {"type": "bridge", "bridge": "cni0", "isDefaultGateway": true,
                "ipam": node.host_local(&["10.1.0.0/16"])},
            {"type": "portmap", "backend": "nftables", "conditionsV4": ["ip saddr != 192.0.2.0/24"],
                "capabilities": {"portMappings": true}},
        ]),
    )
}

/// A bridge, and a policy that allows a service of a network.
fn with_policy(node: &Node, allowed: &str) -> Value {
    list(
        "n",
        &json!([
            {"type": "bridge", "bridge": "cni0", "isDefaultGateway": true, "ipam": node.host_local(&["10.1.0.0/16"])},
            {"type": "egress", "profile": "sandbox", "allow": [{"to": [allowed], "ports": ["tcp/443"]}],
                "capabilities": {"portMappings": true}},
        ]),
    )
}

/// Containers that share the chain of their policy.
fn equal_policies(node: &Node, _: usize) -> Value {
    with_policy(node, "10.9.0.0/24")
}

/// A policy for each attachment.
fn different_policies(node: &Node, i: usize) -> Value {
    with_policy(node, &format!("10.9.{i}.0/24"))
}

fn administrators_chain(node: &Node, _: usize) -> Value {
    list(
        "n",
        &json!([
            {"type": "bridge", "bridge": "cni0", "isDefaultGateway": true,
                "ipam": node.host_local(&["10.1.0.0/16"])},
            {"type": "firewall", "backend": "nftables"},
        ]),
    )
}

fn administrators_rules(node: &Node, numbers: Range<usize>) {
    let rule = |n| {
        let (high, low) = (n / 250, n % 250);
        format!(
            "add rule inet cnibox_firewall admin ip saddr 192.0.{high}.{low} \
             ip daddr 198.51.{high}.{low} tcp dport {} counter accept\n",
            n + 1
        )
    };
    let file = node.path("rules.nft");
    fs::write(&file, numbers.map(rule).collect::<String>()).unwrap();
    node.sh(&format!("nft -f {}", file.display()));
}

fn iptables(node: &Node, i: usize) -> Value {
    let mut list = bridges(node, i);
    for plugin in list["plugins"].as_array_mut().unwrap() {
        let key = if plugin["type"] == "bridge" { "ipMasqBackend" } else { "backend" };
        plugin[key] = json!("iptables");
    }
    list
}

/// The containers of one bridge, with the rules of the reference.
fn usual_chain(node: &Node, _: usize) -> Value {
    let mut list = iptables(node, 0);
    list["plugins"][0]["ipam"] = node.host_local(&["10.1.0.0/16"]);
    list["plugins"][2]["ingressPolicy"] = json!("open");
    list
}

fn leases(node: &Node, _: usize) -> Value {
    let mut plugin = json!({"type": "host-local"});
    plugin["ipam"] = node.host_local(&["10.1.0.0/16"]);
    list("n", &json!([plugin]))
}

fn flannel(node: &Node, _: usize) -> Value {
    let file = node.path("subnet.env");
    if !exists(&file) {
        let env = "FLANNEL_NETWORK=10.0.0.0/8\nFLANNEL_SUBNET=10.1.0.1/16\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";
        fs::write(&file, env).unwrap();
    }
    list(
        "n",
        &json!([{"type": "flannel", "subnetFile": file,
            "dataDir": "/run/cni/flannel", "ipam": {"dataDir": node.path("leases")},
            "delegate": {"bridge": "br0", "isDefaultGateway": true, "ipMasqBackend": "nftables"}}]),
    )
}
struct Run<'n> {
    node: &'n Node,
    feature: &'static Feature,
    containers: Vec<Container>,
    results: BTreeMap<usize, Value>,
    /// The cost of each verb of each plugin at each size.
    costs: BTreeMap<(&'static str, String), Vec<Cost>>,
}

impl<'n> Run<'n> {
    fn list(&self, i: usize) -> Conflist<'n> {
        Conflist::new(self.node, (self.feature.list)(self.node, i))
    }

    fn attached(&self, i: usize) -> Attached {
        let at = Attached::new(&format!("pod-{i}"), &self.containers[i].path());
        Attached { runtime: (self.feature.runtime)(i), ..at }
    }

    /// Attaches these containers.
    fn fill(&mut self, numbers: Range<usize>) {
        self.containers.resize_with(numbers.end.max(self.containers.len()), Container::new);
        let at = |n| numbers.start + n;
        let results = at_once(numbers.len(), |n| {
            let added = self.list(at(n)).add(&self.attached(at(n)));
            added.unwrap_or_else(|failed| panic!("container {}: {failed:?}", at(n)))
        });
        self.results.extend(numbers.clone().zip(results));
    }

    /// Attaches and detaches the container under strace, and attaches it.
    fn measure(&mut self, i: usize) {
        self.containers.resize_with((i + 1).max(self.containers.len()), Container::new);
        let (list, at) = (self.list(i), self.attached(i));
        let mut prev = None;
        for (nth, plugin) in list.types().into_iter().enumerate() {
            let call = list.call("ADD", &at, nth, prev.as_ref());
            let (cost, outcome) = strace::cost_and_outcome(self.node, &call);
            prev = Some(serde_json::from_str(&outcome.stdout).unwrap());
            self.costs.entry(("ADD", plugin.to_owned())).or_default().push(cost);
        }
        for (nth, plugin) in list.types().into_iter().enumerate().rev() {
            let cost = strace::cost(self.node, &list.call("DEL", &at, nth, prev.as_ref()));
            self.costs.entry(("DEL", plugin.to_owned())).or_default().push(cost);
        }
        self.fill(i..i + 1);
        list.check(&at, &self.results[&i]).unwrap();
    }

    /// GC with all attachments as valid succeeds and changes nothing.
    fn nothing_is_stale(&self) {
        // A snapshot also runs tc for each link. The operational state of a bridge follows its
        // ports with a delay.
        let leases = self.node.path("leases").display().to_string();
        let state = || {
            let find = format!("find {leases} /run/cni/cnibox -type f ! -name '*.lock'");
            let text = self.node.sh(&format!(
                "ip -br link | cut -d ' ' -f 1; nft -s list ruleset; {find} | sort; true"
            ));
            without_recorded(&text)
        };
        let before = state();
        for (list, valid) in self.networks(|_| true).into_iter().take(NETWORKS) {
            list.gc(&valid).unwrap();
        }
        assert_eq!(before, state(), "GC with everything valid");
    }

    /// Each network with those of its attachments for which `which` returns true.
    fn networks(&self, which: fn(&usize) -> bool) -> Vec<(Conflist<'n>, Vec<Attached>)> {
        let mut networks: BTreeMap<String, (Conflist<'n>, Vec<Attached>)> = BTreeMap::new();
        for i in self.results.keys().filter(|i| which(i)) {
            let list = self.list(*i);
            let name = list.conf["name"].to_string();
            networks.entry(name).or_insert((list, Vec::new())).1.push(self.attached(*i));
        }
        networks.into_values().collect()
    }

    /// Ends every second attachment by DEL, and the others by GC.
    fn end_all(&mut self) {
        let odd: Vec<usize> = self.results.keys().copied().filter(|i| i % 2 == 1).collect();
        at_once(odd.len(), |n| {
            let i = odd[n];
            self.list(i).del(&self.attached(i), Some(&self.results[&i])).unwrap();
        });
        let networks = self.networks(|i| i % 2 == 0);
        at_once(networks.len(), |n| networks[n].0.gc(&[]).unwrap());
        self.results.clear();
    }

    fn report(&self, sizes: &[usize]) {
        for ((verb, plugin), costs) in &self.costs {
            let name = self.feature.name;
            let calls: Vec<usize> = costs.iter().map(|cost| cost.calls).collect();
            let bytes: Vec<usize> = costs.iter().map(|cost| cost.bytes).collect();
            println!(
                "scale: {name}: {plugin} {verb} at {sizes:?}: {calls:?} calls, {bytes:?} bytes"
            );
            if !self.feature.counts {
                continue;
            }
            let [more_calls, more_bytes] = self.feature.more;
            let is_constant = calls.iter().all(|n| *n <= calls[0] + more_calls);
            assert!(is_constant, "{name}: {plugin} {verb}: {calls:?} system calls");
            let is_little =
                bytes.iter().zip(sizes).all(|(n, size)| *n <= bytes[0] + more_bytes * size);
            assert!(is_little, "{name}: {plugin} {verb}: {bytes:?} bytes");
            let may_grow = *verb != "ADD" || !self.feature.flat.contains(&plugin.as_str());
            assert!(may_grow || bytes.iter().all(|n| *n < bytes[0] + 16 * 1024), "{bytes:?}");
        }
    }
}

/// Lets a feature grow to each of the sizes on a fresh node.
fn grow(feature: &'static Feature, sizes: &[usize]) {
    let node = Node::new();
    let (containers, results, costs) = (Vec::new(), BTreeMap::new(), BTreeMap::new());
    let mut run = Run { node: &node, feature, containers, results, costs };
    // What remains permanently: bridges, empty tables, directories.
    run.fill(0..1);
    let end = sizes.last().unwrap() + 2;
    if ["bridges", "iptables"].contains(&feature.name) {
        // Bridges are never deleted.
        run.fill(1..end);
    }
    run.end_all();
    no_veth_remains(&node);
    let before = node.snapshot();
    run.fill(0..1);
    let mut reached = 1;
    for size in sizes {
        match feature.beside {
            None => run.fill(reached..*size),
            Some(create) => create(&node, reached..*size),
        }
        let measured = run.results.len();
        run.measure(measured);
        reached = size + usize::from(feature.beside.is_none());
        run.nothing_is_stale();
    }
    run.report(sizes);
    run.end_all();
    if feature.beside.is_some() {
        node.sh("nft flush chain inet cnibox_firewall admin");
    }
    no_veth_remains(&node);
    settles(&before, || node.snapshot());
}

macro_rules! grow {
    ($($test:ident: $name:literal to $sizes:expr,)+) => {
        $(
            #[test]
            fn $test() {
                grow(Feature::of($name), &$sizes);
            }
        )+
    };
}

grow! {
    subnets_of_two_hundred_networks: "subnets" to SIZES,
    two_hundred_single_addresses: "single addresses" to SIZES,
    two_hundred_bridges: "bridges" to SIZES,
    two_hundred_containers_with_every_plugin: "chain" to SIZES,
    two_hundred_ports_with_conditions: "conditions" to SIZES,
    two_hundred_rules_of_the_administrator: "administrator's rules" to SIZES,
    two_hundred_containers_with_an_egress_policy: "equal policies" to SIZES,
    two_hundred_egress_policies: "different policies" to SIZES,
    two_hundred_leases: "leases" to SIZES,
    two_hundred_records_of_flannel: "flannel" to SIZES,
    twenty_networks_with_iptables: "iptables" to SIZES[..2],
    two_hundred_containers_of_the_usual_chain: "usual chain" to SIZES,
}

macro_rules! long {
    ($($test:ident: $name:literal to $sizes:expr,)+) => {
        $(
            #[test]
            #[ignore = "takes minutes: make test-long"]
            fn $test() {
                grow(Feature::of($name), &$sizes);
            }
        )+
    };
}

long! {
    subnets_of_two_thousand_networks: "subnets" to [1, 2000],
    two_thousand_single_addresses: "single addresses" to [1, 2000],
    two_thousand_rules_of_the_administrator: "administrator's rules" to [1, 2000],
    two_thousand_ports_with_conditions: "conditions" to [1, 2000],
    two_thousand_leases: "leases" to [1, 2000],
    two_hundred_networks_with_iptables: "iptables" to SIZES,
}

/// `cnitool` keeps a result of each attachment, which `doctor` checks.
#[test]
fn gc_handles_200_cached_attachments() {
    let node = Node::new();
    let directory = node.path("net.d");
    fs::create_dir(&directory).unwrap();
    let conf = chain(&node, 0);
    fs::write(directory.join("10-n.conflist"), conf.to_string()).unwrap();
    let cache = node.path("cache").display().to_string();
    let directory = directory.display().to_string();
    let tool = |name: &str, args: &[&str]| {
        let call = node.tool(name, args).env("NETCONFPATH", &directory);
        call.program(executable()).env("CNI_PATH", &node.bin().display().to_string())
    };
    let cnitool = |verb: &str, container: &Container| {
        let call = tool("cnitool", &[verb, "n", &container.path(), "--cache-dir", &cache]);
        call.program(node.bin().join("cnitool"))
    };
    let doctor = || {
        let leases = node.path("leases").display().to_string();
        let args =
            ["doctor", "--cache-dir", &cache, "--conf-dir", &directory, "--data-dir", &leases];
        tool("cnibox", &args).run()
    };
    let mut containers: Vec<Container> = Vec::new();
    let mut said = Vec::new();
    for size in SIZES {
        let new = size - containers.len();
        containers.extend((0..new).map(|_| Container::new()));
        let added = &containers[size - new..];
        at_once(new, |n| cnitool("add", &added[n]).result());
        cnitool("check", &containers[size - 1]).ok();
        said.push(doctor());
    }
    for (outcome, size) in said.iter().zip(SIZES) {
        println!("scale: doctor at {size}: {}", outcome.stdout);
        assert_eq!(outcome.status, Some(0), "{size} attachments: {outcome:?}");
    }
    at_once(containers.len(), |n| cnitool("del", &containers[n]).ok());
    assert_eq!(node.leases("n"), [""; 0]);
    no_veth_remains(&node);
}
