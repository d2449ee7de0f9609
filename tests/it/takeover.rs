//! A node changes plugins under its containers: what the reference attached, cnibox checks and
//! detaches, and what cnibox attached, the reference. For every plugin that the reference has, and
//! both back ends.
//!
//! The reference is that of [`compare::peer`]. Left out are `dhcp`, whose plugin and daemon are of
//! one implementation (docs/parity.md, "protocol between plugin and daemon"), and `flannel`, which
//! is not among the reference plugins (`flannel::reference`).

use std::path::PathBuf;
use std::thread;

use cnibox::testing::netfilter::{PacketFilter, hand_over_to_reference};
use serde_json::{Value, json};

use crate::lane::{self, KernelFeature, needs};
use crate::support::compare;
use crate::support::net::{merged, no_veth_remains, settles, wire};
use crate::support::node::{Call, Container, Node, Snapshot};

/// Which implementation is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Ours,
    Reference,
}

/// A list of plugins to attach a container with.
struct Case {
    name: &'static str,
    /// The configurations of the plugins.
    list: Vec<Value>,
    /// The keys that only some releases of the reference have, and with which they differ
    /// otherwise.
    is_new: bool,
    /// What a DEL of the reference leaves, even of a container that it added itself; a row of
    /// docs/parity.md.
    leaves: &'static str,
}

impl Case {
    fn of(name: &'static str, list: &[&Value]) -> Case {
        let list = list.iter().map(|conf| (*conf).clone()).collect();
        Case { name, list, is_new: false, leaves: "" }
    }

    /// A case that needs a reference with CNI 1.1.0: with nftables.
    fn new_only(self) -> Case {
        Case { is_new: true, ..self }
    }

    fn reference_leaves(self, leaves: &'static str) -> Case {
        Case { leaves, ..self }
    }
}

fn ptp() -> Value {
    json!({"type": "ptp", "ipam": "v4"})
}

/// The cases that every kernel can run.
fn cases() -> Vec<Case> {
    let bridge = json!({"type": "bridge", "bridge": "br0", "isGateway": true, "ipam": "v4"});
    let masquerading = |base: &Value, backend: &str| {
        merged(base, &json!({"ipMasq": true, "ipMasqBackend": backend}))
    };
    let checked = merged(&bridge, &json!({"macspoofchk": true}));
    let ports = json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
        {"hostPort": 5353, "containerPort": 53, "protocol": "udp", "hostIP": "10.1.2.1"}]);
    let portmap = |backend: &str| json!({"type": "portmap", "backend": backend, "runtimeConfig": {"portMappings": ports}});
    let firewall = json!({"type": "firewall", "backend": "iptables"});
    let policy = merged(&firewall, &json!({"ingressPolicy": "same-bridge"}));
    let mac = json!({"runtimeConfig": {"mac": "c2:11:22:33:44:55"}});
    let on_wire = json!({"type": "macvlan", "master": "wire0", "ipam": "v4"});
    let tuning = json!({"type": "tuning", "mtu": 1300, "promisc": true,
        "allmulti": true, "mac": "02:00:00:00:00:2a", "sysctl": {"net.core.somaxconn": "128"}});
    let limits = json!({"type": "bandwidth", "ingressRate": 8_000_000, "ingressBurst": 800_000,
        "egressRate": 8_000_000, "egressBurst": 800_000});
    let fixed = json!({"type": "static", "addresses":
        [{"address": "10.1.2.9/24", "gateway": "10.1.2.1"}], "routes": [{"dst": "10.9.0.0/16", "gw": "10.1.2.1"}]});
    let case = Case::of;
    vec![
        case("loopback", &[&json!({"type": "loopback"})]),
        case("bridge", &[&masquerading(&bridge, "iptables")]),
        case("bridge, nftables", &[&masquerading(&bridge, "nftables")]).new_only(),
        case("bridge, both families", &[&merged(&bridge, &json!({"ipam": "dual"}))]),
        case("bridge, MAC", &[&merged(&bridge, &mac)]),
        case("bridge, macspoofchk", &[&checked]),
        case("bridge, macspoofchk, masquerading", &[&masquerading(&checked, "nftables")])
            .new_only(),
        case("bridge, hairpin", &[&merged(&bridge, &json!({"hairpinMode": true, "mtu": 1400}))]),
        case("bridge, promiscuous", &[&merged(&bridge, &json!({"promiscMode": true}))]),
        case("bridge, isolation", &[&merged(&bridge, &json!({"portIsolation": true}))]).new_only(),
        case("ptp", &[&masquerading(&ptp(), "iptables")]),
        case("ptp, nftables", &[&masquerading(&ptp(), "nftables")]).new_only(),
        case("ptp, both families", &[&merged(&ptp(), &json!({"ipam": "dual"}))]),
        case("static", &[&merged(&ptp(), &json!({"ipam": fixed}))]),
        case("macvlan", &[&on_wire]),
        case("macvlan, layer 2", &[&merged(&on_wire, &json!({"ipam": null, "mode": "private"}))]),
        case("tap", &[&json!({"type": "tap", "ipam": "v4"})]),
        case("host-device", &[&json!({"type": "host-device", "device": "wire0", "ipam": "v4"})]),
        case("portmap", &[&bridge, &portmap("iptables")]),
        case("portmap, nftables", &[&bridge, &portmap("nftables")]).new_only(),
        case("firewall", &[&ptp(), &firewall]),
        case("firewall, policy", &[&bridge, &policy]).new_only(),
        case("bandwidth", &[&ptp(), &limits]),
        case("tuning", &[&ptp(), &tuning]),
        case("sbr", &[&ptp(), &json!({"type": "sbr"})]),
        case(
            "whole list",
            &[&masquerading(&bridge, "iptables"), &portmap("iptables"), &firewall, &tuning],
        ),
    ]
}

/// The cases with these link kinds.
fn cases_of(feature: KernelFeature) -> Vec<Case> {
    let case = Case::of;
    let on_wire = |kind: &str| json!({"type": kind, "master": "wire0", "ipam": "v4"});
    match feature.name {
        "dummy" => vec![case("dummy", &[&json!({"type": "dummy", "ipam": "v4"})])],
        "ipvlan" => vec![case("ipvlan", &[&on_wire("ipvlan")])],
        "8021q" => vec![case("vlan", &[&merged(&on_wire("vlan"), &json!({"vlanId": 7}))])],
        "vrf" => vec![case("vrf", &[&ptp(), &json!({"type": "vrf", "vrfname": "blue"})])],
        "bridge VLANs" => vec![
            case(
                "bridge, VLAN",
                &[&json!({"type": "bridge", "bridge": "br0", "vlan": 100, "isGateway": true, "ipam": "v4"})],
            )
            .reference_leaves("gateway `<bridge>.<vlan>`"),
        ],
        other => panic!("no cases of {other}"),
    }
}

/// A node, and the reference's directory.
struct Site<'c> {
    node: Node,
    reference: PathBuf,
    case: &'c Case,
    /// The newest version that both implementations have.
    version: &'static str,
    /// The plugins whose CHECK by the reference passes what the reference added.
    checks: Vec<bool>,
}
struct Pod {
    container: Container,
    id: String,
    result: Value,
}

impl<'c> Site<'c> {
    /// `None` if the reference has not all plugins or features of the case.
    fn new(reference: PathBuf, case: &'c Case) -> Option<Site<'c>> {
        let node = Node::new();
        wire(&node);
        let program = reference.join("bridge");
        let is_new = node.call("bridge", "VERSION").program(program).run().stdout.contains("1.1.0");
        let has = |conf: &Value| reference.join(conf["type"].as_str().unwrap()).exists();
        if (case.is_new && !is_new) || !case.list.iter().all(has) {
            println!("SKIP {}: not in the reference of {}", case.name, reference.display());
            return None;
        }
        let version = if is_new { "1.1.0" } else { "1.0.0" };
        let mut site = Site { node, reference, case, version, checks: Vec::new() };
        site.checks = site.checks_of_reference();
        Some(site)
    }

    fn call(&self, side: Side, verb: &str, pod: &Pod, conf: &Value) -> Call {
        let plugin = conf["type"].as_str().unwrap();
        let mut conf = merged(&json!({"cniVersion": self.version, "name": "net"}), conf);
        match conf["ipam"].as_str() {
            Some("v4") => conf["ipam"] = self.node.host_local(&["10.1.2.0/24"]),
            Some(_) => conf["ipam"] = self.node.host_local(&["10.1.2.0/24", "2001:db8:1::/64"]),
            None => {}
        }
        if !pod.result.is_null() {
            conf["prevResult"] = pod.result.clone();
        }
        let ifname = if plugin == "loopback" { "lo" } else { "eth0" };
        let call = self.node.call(plugin, verb).id(&pod.id).ifname(ifname).conf(&conf);
        let call = call.netns(&pod.container.path());
        match side {
            Side::Ours => call,
            Side::Reference => {
                let directory = self.reference.display().to_string();
                call.program(self.reference.join(plugin)).env("CNI_PATH", &directory)
            }
        }
    }

    fn attach(&self, id: &str, side: Side) -> Pod {
        let mut pod = Pod { container: Container::new(), id: id.to_owned(), result: Value::Null };
        for conf in &self.case.list {
            pod.result = self.call(side, "ADD", &pod, conf).result();
        }
        pod
    }

    fn detach(&self, side: Side, pod: &Pod) {
        for conf in self.case.list.iter().rev() {
            let outcome = self.call(side, "DEL", pod, conf).run();
            let is_known = side == Side::Reference && compare::lacks_masquerading(&outcome.stdout);
            assert!(
                outcome.status == Some(0) || is_known,
                "DEL of {conf} by {side:?}: {outcome:?}"
            );
        }
    }

    /// Some releases of the reference refuse what they have added: for instance, portmap of 1.1.1
    /// expects IPv6 rules of each container.
    fn checks_of_reference(&self) -> Vec<bool> {
        let pod = self.attach("c0", Side::Reference);
        let check = |conf| self.call(Side::Reference, "CHECK", &pod, conf).run().status == Some(0);
        let checks = self.case.list.iter().map(check).collect();
        self.detach(Side::Reference, &pod);
        self.detach(Side::Ours, &pod);
        checks
    }

    /// Attaches a container with `adds`, checks it with both, and detaches it with `deletes`.
    fn cycle(&self, id: &str, adds: Side, deletes: Side) -> Pod {
        let pod = self.attach(id, adds);
        self.check(adds, &pod);
        if (adds, deletes) == (Side::Ours, Side::Reference) {
            // The last step of the way back, `cnibox uninstall`.
            hand_over_to_reference(&PacketFilter::new()).unwrap();
        }
        self.check(deletes, &pod);
        self.detach(deletes, &pod);
        pod
    }

    fn check(&self, side: Side, pod: &Pod) {
        for (conf, is_able) in self.case.list.iter().zip(&self.checks) {
            if side == Side::Ours || *is_able {
                let outcome = self.call(side, "CHECK", pod, conf).run();
                assert_eq!(outcome.status, Some(0), "CHECK of {conf} by {side:?}: {outcome:?}");
            }
        }
    }

    fn snapshot(&self, deletes: Side) -> Snapshot {
        let backups = self.node.sh("ls /run/cni/tuning 2>&1 || true");
        let snapshot = self.node.snapshot().with("backups", backups);
        // Records of cnibox that a DEL by the reference leaves: GC removes them, and so does a DEL.
        if deletes == Side::Reference { snapshot.with("notes", String::new()) } else { snapshot }
    }

    /// Two containers, one after the other: the second leaves nothing beside what is shared. What
    /// the reference leaves of a container, a DEL by cnibox removes.
    fn takes_over(&self, adds: Side, deletes: Side) {
        let leaves = !self.case.leaves.is_empty() && deletes == Side::Reference;
        let cycle = |id: &str| {
            let pod = self.cycle(id, adds, deletes);
            if leaves {
                self.detach(Side::Ours, &pod);
            }
            pod
        };
        let inside = |pod: &Pod| pod.container.snapshot(&self.node).with("notes", String::new());
        let first = cycle("c1");
        let detached = inside(&first);
        drop(first);
        no_veth_remains(&self.node);
        let before = self.snapshot(deletes);
        let second = cycle("c2");
        settles(&before, || self.snapshot(deletes));
        settles(&detached, || inside(&second));
    }
}

/// Runs each case on a thread of its own, in both directions.
fn each(cases: &[Case]) {
    let Some(reference) = compare::peer("take-over") else { return };
    let failed: Vec<String> = thread::scope(|scope| {
        let mut threads = Vec::new();
        for case in cases {
            for (adds, deletes) in [(Side::Reference, Side::Ours), (Side::Ours, Side::Reference)] {
                let reference = reference.clone();
                let run = move || {
                    if let Some(site) = Site::new(reference, case) {
                        site.takes_over(adds, deletes);
                    }
                };
                let what = format!("{}: {adds:?} adds, {deletes:?} deletes", case.name);
                let named = thread::Builder::new().name(what.clone());
                threads.push((what, named.spawn_scoped(scope, run).unwrap()));
            }
        }
        threads.into_iter().filter_map(|(what, t)| t.join().is_err().then_some(what)).collect()
    });
    assert!(failed.is_empty(), "see above: {failed:#?}");
}

#[test]
fn each_checks_and_deletes_what_the_other_added() {
    each(&cases());
}

#[test]
fn each_checks_and_deletes_the_dummy_of_the_other() {
    needs!(lane::DUMMY);
    each(&cases_of(lane::DUMMY));
}

#[test]
fn each_checks_and_deletes_the_ipvlan_of_the_other() {
    needs!(lane::IPVLAN);
    each(&cases_of(lane::IPVLAN));
}

#[test]
fn each_checks_and_deletes_the_vlan_of_the_other() {
    needs!(lane::VLAN);
    each(&cases_of(lane::VLAN));
}

#[test]
fn each_checks_and_deletes_the_vrf_of_the_other() {
    needs!(lane::VRF);
    each(&cases_of(lane::VRF));
}

#[test]
fn each_checks_and_deletes_the_bridge_vlan_of_the_other() {
    needs!(lane::VLAN, lane::BRIDGE_VLAN);
    each(&cases_of(lane::BRIDGE_VLAN));
}
