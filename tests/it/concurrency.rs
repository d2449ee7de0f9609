//! Concurrent calls: many containers on one bridge, racing first ADDs that create it, GC meanwhile,
//! and the reference's host-local on the same leases.

use std::collections::{BTreeSet, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Barrier;

use fs2::FileExt;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::doctor::Ward;
use crate::support::compare;
use crate::support::net::{merged, settles};
use crate::support::node::{Call, Container, Node, eventually, exists};
use crate::support::parallel::{WORKERS, at_once, at_once_in};
use crate::support::traffic::Place;

fn bridge_conf(node: &Node) -> Value {
    let ipam = node.host_local(&["10.1.0.0/16", "fd00:1::/64"]);
    json!({"name": "n", "cniVersion": "1.0.0", "isDefaultGateway": true, "ipam": ipam})
}

fn addresses(result: &Value) -> Vec<String> {
    let ips = result["ips"].as_array().unwrap();
    ips.iter().map(|ip| ip["address"].as_str().unwrap().to_owned()).collect()
}

fn ids(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|i| format!("{prefix}-{i}")).collect()
}

#[test]
fn a_hundred_containers_join_one_bridge_concurrently() {
    const COUNT: usize = 100;
    let node = Node::new();
    let conf = bridge_conf(&node);
    let containers: Vec<_> = (0..COUNT).map(|_| Container::new()).collect();
    let ids = ids("pod", COUNT);
    let call = |verb: &str, i: usize| -> Call {
        node.call("bridge", verb).conf(&conf).id(&ids[i]).netns(&containers[i].path())
    };
    let results = at_once(COUNT, |i| call("ADD", i).result());
    let all: Vec<String> = results.iter().flat_map(addresses).collect();
    let different: HashSet<&String> = all.iter().collect();
    assert_eq!((all.len(), different.len()), (2 * COUNT, 2 * COUNT), "an address twice");
    assert_eq!(node.leases("n").len(), 2 * COUNT);

    let bridges = node.ip("link show type bridge");
    let macs: HashSet<&Value> = results.iter().map(|r| &r["interfaces"][0]["mac"]).collect();
    assert_eq!(bridges.as_array().unwrap().len(), 1);
    assert_eq!(macs, HashSet::from([&bridges[0]["address"]]), "the bridge changed its MAC");
    let ports = node.ip("link show type veth");
    assert_eq!(ports.as_array().unwrap().len(), COUNT);
    let gateways = node.sh("ip -o -4 addr show cni0");
    assert_eq!(gateways.lines().count(), 1, "{gateways}");
    for (container, result) in [(&containers[0], &results[0]), (&containers[99], &results[99])] {
        let inside = container.sh("ip -o addr show eth0");
        assert!(addresses(result).iter().all(|ip| inside.contains(ip.as_str())), "{inside}");
    }

    let last = addresses(&results[99]);
    assert!(containers[0].pings(last[0].split('/').next().unwrap()));
    assert!(containers[0].pings(last[1].split('/').next().unwrap()));
    assert!(containers[0].pings("10.1.0.1"));

    at_once(COUNT, |i| call("DEL", i).ok());
    assert_eq!(node.leases("n"), [""; 0]);
    assert_eq!(node.ip("link show type veth"), json!([]));
    assert!(containers.iter().all(|c| c.ip("link").as_array().unwrap().len() == 1));
    let after = node.ip("link show type bridge");
    assert_eq!(after[0]["address"], bridges[0]["address"]);
}

#[test]
fn sixty_four_calls_of_chained_plugins_leave_nothing() {
    const PODS: usize = 64;
    for (plugin, keys) in [
        (
            "route-override",
            json!({"flushgateway": true, "addroutes": [{"dst": "192.0.2.0/24"}, {"dst": "fd97::/48"}]}),
        ),
        ("tc-redirect-tap", json!({"allAddresses": true})),
        (
            "egress",
            json!({"profile": "sandbox", "allow": [{"to": ["192.0.2.0/24"], "ports": ["tcp/443"]}]}),
        ),
    ] {
        let node = Node::new();
        let (conf, ids) = (bridge_conf(&node), ids("pod", PODS));
        let containers: Vec<_> = (0..PODS).map(|_| Container::new()).collect();
        let call = |plugin: &str, verb: &str, conf: &Value, i: usize| -> Call {
            node.call(plugin, verb).conf(conf).id(&ids[i]).netns(&containers[i].path())
        };
        let chained = merged(&json!({"name": "n", "cniVersion": "1.0.0"}), &keys);
        // The bridge and the tables stay.
        let first =
            merged(&chained, &json!({"prevResult": call("bridge", "ADD", &conf, 0).result()}));
        call(plugin, "ADD", &first, 0).result();
        call(plugin, "DEL", &first, 0).ok();
        call("bridge", "DEL", &conf, 0).ok();
        let before = (node.snapshot(), containers[0].snapshot(&node));
        let results = at_once_in(PODS, PODS, |i| {
            let prev = call("bridge", "ADD", &conf, i).result();
            let result =
                call(plugin, "ADD", &merged(&chained, &json!({"prevResult": prev})), i).result();
            call(plugin, "CHECK", &merged(&chained, &json!({"prevResult": result})), i).ok();
            result
        });
        let all: HashSet<String> = results.iter().flat_map(addresses).collect();
        assert_eq!(all.len(), 2 * PODS, "{plugin}: an address twice");
        at_once_in(PODS, PODS, |i| {
            call(plugin, "DEL", &merged(&chained, &json!({"prevResult": results[i]})), i).ok();
            call("bridge", "DEL", &conf, i).ok();
        });
        settles(&before.0, || node.snapshot());
        for container in &containers {
            settles(&before.1, || container.snapshot(&node));
        }
        assert!(!node.state(plugin).join("n").exists(), "{plugin}: a record is left");
    }
}

#[test]
fn sixteen_first_adds_with_one_policy_create_it_once() {
    let node = Node::new();
    let (conf, ids) = (bridge_conf(&node), ids("pod", WORKERS));
    let containers: Vec<_> = (0..WORKERS).map(|_| Container::new()).collect();
    let call = |plugin: &str, verb: &str, conf: &Value, i: usize| -> Call {
        node.call(plugin, verb).conf(conf).id(&ids[i]).netns(&containers[i].path())
    };
    let policy = json!({"name": "n", "cniVersion": "1.0.0", "profile": "sandbox"});
    let confs: Vec<Value> = (0..WORKERS)
        .map(|i| merged(&policy, &json!({"prevResult": call("bridge", "ADD", &conf, i).result()})))
        .collect();
    for round in 0..20 {
        let start = Barrier::new(WORKERS);
        at_once(WORKERS, |i| {
            start.wait();
            call("egress", "ADD", &confs[i], i).result();
        });
        let rules = node.sh("nft list ruleset");
        let of_policies = rules.split("\tchain ").filter(|chain| chain.starts_with("policy_"));
        let ends = ["goto rejected comment \"rejected\"", "goto refused comment \"refused\""];
        let last = of_policies
            .map(|chain| ends.iter().map(|end| chain.matches(end).count()).sum::<usize>());
        assert_eq!(last.collect::<Vec<_>>(), [1, 1], "round {round}: {rules}");
        at_once(WORKERS, |i| call("egress", "DEL", &confs[i], i).ok());
    }
}

#[test]
fn sixteen_first_adds_make_one_bridge() {
    let node = Node::new();
    for round in 0..4 {
        let mut conf = bridge_conf(&node);
        let bridge = format!("br{round}");
        conf["bridge"] = json!(bridge);
        conf["name"] = json!(bridge);
        conf["ipam"]["ranges"] = json!([[{"subnet": format!("10.{round}.0.0/24")}]]);
        let containers: Vec<_> = (0..WORKERS).map(|_| Container::new()).collect();
        let ids = ids("first", WORKERS);
        let start = Barrier::new(WORKERS);
        let results = at_once(WORKERS, |i| {
            let call = node.call("bridge", "ADD").conf(&conf).id(&ids[i]);
            let call = call.netns(&containers[i].path());
            start.wait();
            call.result()
        });
        let link = node.ip(&format!("addr show {bridge}"));
        let mac = &link[0]["address"];
        assert!(results.iter().all(|r| &r["interfaces"][0]["mac"] == mac), "{mac} {results:?}");
        let v4 = link[0]["addr_info"].as_array().unwrap().iter().filter(|a| a["family"] == "inet");
        assert_eq!(v4.count(), 1);
        let ports = node.ip(&format!("link show master {bridge}"));
        assert_eq!(ports.as_array().unwrap().len(), WORKERS);
        let all: HashSet<String> = results.iter().flat_map(addresses).collect();
        assert_eq!(all.len(), WORKERS);
    }
}

#[test]
fn gc_during_adds_removes_unlisted_attachments_only() {
    const COUNT: usize = 48;
    let node = Node::new();
    let conf =
        json!({"name": "n", "cniVersion": "1.1.0", "ipam": node.host_local(&["10.1.0.0/16"])});
    let add = |id: &str| node.call("host-local", "ADD").conf(&conf).id(id).netns("/x").result();
    for i in 0..8 {
        add(&format!("stale-{i}"));
    }
    let ids = ids("valid", COUNT);
    let mut gc = conf.clone();
    let listed = |id: &String| json!({"containerID": id, "ifname": "eth0"});
    gc["cni.dev/valid-attachments"] = ids.iter().map(listed).collect();
    let given = at_once(2 * COUNT, |i| {
        if i % 2 == 1 {
            node.call("host-local", "GC").conf(&gc).ok();
            return None;
        }
        Some(add(&ids[i / 2])["ips"][0]["address"].as_str().unwrap().replace("/16", ""))
    });
    let given: BTreeSet<String> = given.into_iter().flatten().collect();
    assert_eq!(given.len(), COUNT, "an address twice");
    assert_eq!(node.leases("n").into_iter().collect::<BTreeSet<_>>(), given);
}

/// The lease protocol of the reference's host-local: the lock file, a lease file created with
/// `O_EXCL`, the file of the last address; DEL scans all files.
struct Reference {
    store: PathBuf,
}

impl Reference {
    fn lock(&self) -> File {
        let lock = File::open(self.store.join("lock")).unwrap();
        lock.lock_exclusive().unwrap();
        lock
    }

    fn add(&self, id: &str) -> String {
        let _lock = self.lock();
        let last = fs::read_to_string(self.store.join("last_reserved_ip.0")).unwrap_or_default();
        let last: u8 = last.rsplit('.').next().and_then(|n| n.parse().ok()).unwrap_or(1);
        for n in (last..255).skip(1).chain(2..=last) {
            let ip = format!("10.1.0.{n}");
            let file = OpenOptions::new().write(true).create_new(true).open(self.store.join(&ip));
            let Ok(mut file) = file else { continue };
            file.write_all(format!("{id}\r\neth0").as_bytes()).unwrap();
            fs::write(self.store.join("last_reserved_ip.0"), &ip).unwrap();
            return ip;
        }
        panic!("full");
    }

    fn del(&self, id: &str) {
        let _lock = self.lock();
        let content = format!("{id}\r\neth0");
        for entry in fs::read_dir(&self.store).unwrap() {
            let path = entry.unwrap().path();
            if fs::read_to_string(&path).is_ok_and(|text| text.trim() == content) {
                fs::remove_file(path).unwrap();
            }
        }
    }
}

/// Who reclaims leases, with the lock of all leases of the network, waits for no attachment that
/// another call is changing: calls of other containers would wait as long.
#[test]
fn leases_are_not_locked_while_attachments_are_awaited() {
    // Each would be awaited for two seconds, and an ADD waits ten for the leases.
    const DEAD: usize = 6;
    let ipam = json!({"type": "host-local", "dataDir": "LEASES", "ranges": [[{"subnet": "10.88.0.0/24"}]]});
    let ptp = json!({"type": "ptp", "ipMasq": true, "ipMasqBackend": "nftables", "ipam": ipam});
    let mut ward = Ward::sized(&json!([ptp]), DEAD + 1);
    (1..=DEAD).for_each(|pod| ward.attach(pod));
    drop(ward.pods.split_off(1));
    eventually("all have ended", || ward.node.sh("ip -o link show type veth").is_empty());
    let records = fs::read_dir("/run/cni/cnibox/attachments").unwrap();
    let turns = records.map(|record| {
        let name = record.unwrap().file_name().into_string().unwrap();
        let instance = name.strip_suffix(".json").unwrap();
        let turn = File::create(format!("/run/cni/cnibox/turn-{instance}.lock")).unwrap();
        turn.lock_exclusive().unwrap();
        turn
    });
    let turns: Vec<File> = turns.collect();
    assert_eq!(turns.len(), DEAD);
    let [leases, net_d] = ["leases", "net.d"].map(|dir| ward.node.path(dir).display().to_string());
    let gc = ward.cnibox(&["gc", "--data-dir", &leases, "--conf-dir", &net_d]);
    let mut running = gc.spawn().unwrap();
    let lock = File::open(ward.node.path("leases/pods/lock")).unwrap();
    eventually("gc has the leases, or has ended", || {
        let is_locked = FileExt::try_lock_exclusive(&lock).is_err();
        FileExt::unlock(&lock).unwrap();
        is_locked || running.try_wait().unwrap().is_some()
    });
    ward.attach(0);
    running.wait().unwrap();
    assert_eq!(ward.node.leases("pods").len(), DEAD + 1, "others are changing them");
    drop(turns);
    gc.printed();
    assert_eq!(ward.node.leases("pods").len(), 1);
    // As after a boot, there may be no directory for locks: an ADD that begins meanwhile must wait.
    ward.pods.clear();
    eventually("it has ended", || ward.node.sh("ip -o link show type veth").is_empty());
    ward.node.sh("rm -r /run/cni/cnibox");
    assert!(gc.printed().contains("detached container pod0"));
    assert!(exists("/run/cni/cnibox"));
}

fn one_range(node: &Node) -> Value {
    json!({"name": "n", "cniVersion": "1.0.0", "ipam": node.host_local(&["10.1.0.0/24"])})
}

fn host_local(program: &Path, node: &Node, (verb, id): (&str, &str)) -> Call {
    let call = node.call("host-local", verb).program(program).conf(&one_range(node));
    call.id(id).netns("/x")
}

#[test]
fn leases_are_shared_with_a_writer_of_the_references_format() {
    const COUNT: usize = 60;
    let node = Node::new();
    let own = node.bin().join("host-local");
    host_local(&own, &node, ("ADD", "before")).result();
    let reference = Reference { store: node.path("leases").join("n") };
    let ids = ids("pod", COUNT);
    let given = at_once(COUNT, |i| {
        if i % 2 == 0 {
            return reference.add(&ids[i]);
        }
        let result = host_local(&own, &node, ("ADD", &ids[i])).result();
        result["ips"][0]["address"].as_str().unwrap().replace("/24", "")
    });
    let different: BTreeSet<&String> = given.iter().collect();
    assert_eq!(different.len(), COUNT, "an address twice: {given:?}");
    assert_eq!(node.leases("n").len(), COUNT + 1);
    // Each program deletes the other's leases.
    at_once(COUNT, |i| {
        if i % 2 == 0 {
            host_local(&own, &node, ("DEL", &ids[i])).ok();
        } else {
            reference.del(&ids[i]);
        }
    });
    assert_eq!(node.leases("n").len(), 1);
    host_local(&own, &node, ("DEL", "before")).ok();
    assert_eq!(node.leases("n"), [""; 0]);
}

#[test]
fn leases_are_shared_with_the_references_host_local() {
    const COUNT: usize = 40;
    let Some(peer) = compare::peer("concurrency with the reference's host-local") else { return };
    let node = Node::new();
    let programs = [node.bin().join("host-local"), peer.join("host-local")];
    let ids = ids("pod", COUNT);
    for concurrent in [false, true] {
        let each = |work: &(dyn Fn(usize) + Sync)| {
            if concurrent { drop(at_once(COUNT, work)) } else { (0..COUNT).for_each(work) }
        };
        let seen = std::sync::Mutex::new(BTreeSet::new());
        each(&|i| {
            let result = host_local(&programs[i % 2], &node, ("ADD", &ids[i])).result();
            let new = seen.lock().unwrap().insert(addresses(&result)[0].clone());
            assert!(new, "given twice: {result}");
        });
        assert_eq!(node.leases("n").len(), COUNT);
        each(&|i| {
            let own_again = host_local(&programs[i % 2], &node, ("CHECK", &ids[i]));
            let other = host_local(&programs[1 - i % 2], &node, ("CHECK", &ids[i]));
            own_again.ok();
            other.ok();
        });
        // DEL by the program that did not do the ADD.
        each(&|i| host_local(&programs[1 - i % 2], &node, ("DEL", &ids[i])).ok());
        assert_eq!(node.leases("n"), [""; 0], "concurrent: {concurrent}");
    }
}

#[test]
fn leases_are_added_and_removed_alternately() {
    let Some(peer) = compare::peer("alternation with the reference's host-local") else { return };
    let node = Node::new();
    let own = node.bin().join("host-local");
    let theirs = peer.join("host-local");
    // A permanent lease, so that a stale journal would be noticed.
    host_local(&own, &node, ("ADD", "stays")).result();
    for round in 0..12 {
        let (first, second) = if round % 2 == 0 { (&own, &theirs) } else { (&theirs, &own) };
        host_local(first, &node, ("ADD", "pod")).result();
        assert_eq!(node.leases("n").len(), 2, "round {round}");
        host_local(second, &node, ("DEL", "pod")).ok();
        assert_eq!(node.leases("n").len(), 1, "round {round}");
    }
    host_local(&theirs, &node, ("DEL", "stays")).ok();
    assert_eq!(node.leases("n"), [""; 0]);
}

/// A program that commits changes of a set of its own all the time, as one that blocks addresses.
struct Committer(Child);

impl Committer {
    fn start(node: &Node) -> Committer {
        node.sh("nft 'add table ip blocked; add set ip blocked s { type ipv4_addr; }'");
        let line = "while :; do echo add element ip blocked s { 192.0.2.1 }; \
                    echo delete element ip blocked s { 192.0.2.1 }; done | nft -i";
        let mut command = Command::new("sh");
        command.args(["-c", line]).process_group(0).stdin(Stdio::null()).stdout(Stdio::null());
        Committer(node.within(|| command.spawn().unwrap()))
    }
}

impl Drop for Committer {
    fn drop(&mut self) {
        let group = Pid::from_raw(self.0.id().try_into().unwrap());
        drop((killpg(group, Signal::SIGKILL), self.0.wait()));
    }
}

/// Rules of others, whose list takes longer than the pauses between commits of others.
#[test]
fn a_program_that_keeps_committing_stops_no_call() {
    let (node, container) = (Node::new(), Container::new());
    let rules = |chain: &str| -> String {
        let rule = |i| format!("-A {chain} -s 10.9.{}.{}/32 -p tcp -j RETURN\n", i / 250, i % 250);
        (0..2000).map(rule).collect()
    };
    let script =
        format!("*nat\n{}COMMIT\n*filter\n{}COMMIT\n", rules("POSTROUTING"), rules("FORWARD"));
    let file = node.path("rules");
    fs::write(&file, script).unwrap();
    node.sh(&format!("iptables-restore {}", file.display()));
    let bridge = merged(&bridge_conf(&node), &json!({"ipMasq": true, "ipMasqBackend": "iptables"}));
    let chained = |keys: &Value| merged(&json!({"name": "n", "cniVersion": "1.0.0"}), keys);
    let mapping = json!({"hostPort": 8080, "containerPort": 80, "protocol": "tcp"});
    let portmap =
        chained(&json!({"backend": "iptables", "runtimeConfig": {"portMappings": [mapping]}}));
    let plugins = [
        ("bridge", bridge),
        ("portmap", portmap),
        ("firewall", chained(&json!({"backend": "iptables"}))),
    ];
    let mut before = None;
    for is_alone in [true, false, false] {
        let committer = (!is_alone).then(|| Committer::start(&node));
        let mut prev = Value::Null;
        let call = |plugin: &str, verb: &str, conf: &Value, prev: &Value| {
            let conf = if prev.is_null() {
                conf.clone()
            } else {
                merged(conf, &json!({"prevResult": prev}))
            };
            let outcome =
                node.call(plugin, verb).conf(&conf).id("c").netns(&container.path()).run();
            assert_eq!(
                (outcome.status, &*outcome.stderr),
                (Some(0), ""),
                "{plugin} {verb}: {}",
                outcome.stdout
            );
            outcome.stdout
        };
        for (plugin, conf) in &plugins {
            prev = serde_json::from_str(&call(plugin, "ADD", conf, &prev)).unwrap();
        }
        for verb in ["CHECK", "DEL", "DEL"] {
            for (plugin, conf) in plugins.iter().rev() {
                call(plugin, verb, conf, &prev);
            }
        }
        if committer.is_some() {
            drop(committer);
            node.sh("nft delete table ip blocked");
        }
        // The bridge and the chains stay.
        settles(before.get_or_insert_with(|| node.snapshot()), || node.snapshot());
    }
}
