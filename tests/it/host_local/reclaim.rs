//! An ADD that needs an address and GC reclaim the leases of attachments that have ended: whose
//! link on the host is gone, or which were made in an earlier boot. Leases of which nothing is
//! proved stay.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::json;

use super::{add, del, net, one_set};
use crate::support::compare;
use crate::support::net::Net;
use crate::support::node::{Call, Container, Node, Outcome, eventually};
use crate::support::strace;

const FIVE: &str = "198.51.100.0/29";
const FULL: &str = "failed to allocate for range 0: no IP addresses available in range set: 198.51.100.1-198.51.100.6";
const ONE: &str = "198.51.100.64/30";

/// A network of bridge, whose leases have the host's end of the attachment.
fn bridged<'n>(node: &'n Node, subnet: &str) -> Net<'n> {
    let keys = json!({"bridge": "br0", "ipam": node.host_local(&[subnet])});
    Net::new(node, "bridge", "1.1.0", &keys)
}

/// The same call where a container manager has replaced the boot id.
fn in_another_boot(net: &Net<'_>, call: Call) -> Call {
    let file = net.node.path("boot_id");
    fs::write(&file, "c9ae8a4e-5f0b-4c4c-9b7e-000000000000\n").unwrap();
    let mount = format!("mount --bind {} /proc/sys/kernel/random/boot_id", file.display());
    call.in_script(&format!("{mount} && exec \"$0\""))
}

/// Makes all leases those of an earlier boot of this machine: older than this boot, and noted in a
/// journal of another.
pub(super) fn age(net: &Net<'_>) {
    let directory = net.node.path("leases/net");
    let journal = directory.join(".cnibox/leases");
    let mut text = fs::read_to_string(&journal).unwrap();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    text = text.replace(boot.trim(), "00000000-1111-4222-8333-444444444444");
    for ip in net.leases() {
        let file = fs::File::options().write(true).open(directory.join(ip)).unwrap();
        let word = || {
            let meta = file.metadata().unwrap();
            format!("{}:{}", meta.ino(), meta.mtime() * 1_000_000_000 + meta.mtime_nsec())
        };
        let before = word();
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000)).unwrap();
        text = text.replace(&before, &word());
    }
    fs::write(&journal, text).unwrap();
}

/// Whether this machine has an id, without which no boot is known to be an earlier one.
pub(super) fn has_machine_id(test: &str) -> bool {
    let has = fs::read_to_string("/etc/machine-id").is_ok_and(|id| id.trim().len() == 32);
    if !has {
        println!("SKIP {test}: this machine has no /etc/machine-id");
    }
    has
}

/// Runs the call, which must succeed.
#[track_caller]
fn done(call: &Call) -> Outcome {
    let outcome = call.run();
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    outcome
}

#[track_caller]
fn is_full(net: &Net<'_>, id: &str) {
    let error = net.call("ADD", id).netns(&Container::new().path()).error();
    assert_eq!(error.brief(), (999, FULL));
}

fn gc(net: &Net<'_>, valid: &[&str]) -> Call {
    let valid: Vec<_> =
        valid.iter().map(|id| json!({"containerID": id, "ifname": "eth0"})).collect();
    net.with(&json!({"cni.dev/valid-attachments": valid})).call("GC", "")
}

#[test]
fn leases_are_reclaimed_after_a_reboot() {
    if !has_machine_id("leases of before a reboot") {
        return;
    }
    let node = Node::new();
    let net = one_set(&node, &[FIVE]);
    for id in ["c0", "c1", "c2", "c3"] {
        add(&net, id);
    }
    // A lease of the reference, observed by a call of cnibox in the same boot.
    fs::write(node.path("leases/net/198.51.100.6"), "theirs\r\neth0").unwrap();
    is_full(&net, "new");
    net.call("STATUS", "").error();

    age(&net);
    net.call("STATUS", "").ok();
    assert_eq!(net.leases().len(), 5, "STATUS changes nothing");
    let outcome = done(&net.call("ADD", "new").netns("/x"));
    for (ip, id) in [("198.51.100.2", "c0"), ("198.51.100.6", "theirs")] {
        let line = format!(
            "reclaimed {ip} of container {id}, interface eth0: it was made before the last boot"
        );
        assert!(outcome.stderr.contains(&line), "{outcome:?}");
    }
    assert_eq!(net.leases().len(), 1);
    // Leases of the current boot remain.
    for id in ["d1", "d2", "d3", "d4"] {
        add(&net, id);
    }
    is_full(&net, "d5");
    assert_eq!(net.leases().len(), 5);
}

#[test]
fn the_same_container_gets_an_address_after_a_reboot() {
    if !has_machine_id("a container of the same name") {
        return;
    }
    let node = Node::new();
    let net = one_set(&node, &["198.51.100.0/24"]);
    assert_eq!(add(&net, "static-pod"), ["198.51.100.2/24"]);
    let again = net.call("ADD", "static-pod").netns("/x");
    assert!(again.error().msg.contains("duplicate allocation is not allowed"));
    age(&net);
    done(&again);
    assert_eq!(net.leases(), ["198.51.100.3"]);
}

/// systemd-nspawn and LXC mount a boot id of their own.
#[test]
fn a_boot_id_set_by_a_container_manager_ends_no_lease() {
    for start_inside in [false, true] {
        let node = Node::new();
        let net = bridged(&node, ONE);
        let container = Container::new();
        let call = net.call("ADD", "c1").netns(&container.path());
        done(&if start_inside { in_another_boot(&net, call) } else { call });
        let other = Container::new();
        let wanted = net.call("ADD", "c2").netns(&other.path());
        for call in [wanted.clone(), net.call("GC", ""), gc(&net, &["c1"])] {
            in_another_boot(&net, call.clone()).run();
            call.run();
            assert_eq!(net.leases(), ["198.51.100.66"]);
            assert!(container.sh("ip addr show dev eth0").contains("198.51.100.66"));
        }
        assert_eq!(wanted.error().code, 999);
        // What a boot id proves is lost with the first other one; DEL works as ever.
        in_another_boot(&net, net.call("DEL", "c1").netns(&container.path())).ok();
        done(&wanted);
    }
}

#[test]
fn a_requested_address_is_reclaimed_from_the_dead_only() {
    let node = Node::new();
    let net = bridged(&node, "198.51.100.0/24");
    let (dead, alive, third) = (Container::new(), Container::new(), Container::new());
    for (id, container) in [("dead", &dead), ("alive", &alive)] {
        net.call("ADD", id).netns(&container.path()).result();
    }
    drop(dead);
    let ask = |ip: &str| {
        let args = json!({"args": {"cni": {"ips": [ip]}}});
        net.with(&args).call("ADD", ip).netns(&third.path())
    };
    eventually("the address comes back", || ask("198.51.100.2").run().status == Some(0));
    assert!(ask("198.51.100.3").ifname("eth1").error().msg.contains("is not available"));
}

#[test]
fn addresses_of_deleted_namespaces_are_reclaimed() {
    let node = Node::new();
    let net = bridged(&node, FIVE);
    let mut containers: Vec<_> = (0..5).map(|_| Container::new()).collect();
    for (n, container) in containers.iter().enumerate() {
        net.call("ADD", &format!("c{n}")).netns(&container.path()).result();
    }
    is_full(&net, "new");
    drop(containers.remove(2));
    let status = net.call("STATUS", "");
    eventually("the kernel removes the namespace", || status.run().status == Some(0));
    assert_eq!(net.leases().len(), 5);
    let container = Container::new();
    let outcome = done(&net.call("ADD", "new").netns(&container.path()));
    let why = "its link on the host is gone";
    let line = format!("reclaimed 198.51.100.4 of container c2, interface eth0: {why}");
    assert!(outcome.stdout.contains("198.51.100.4/29") && outcome.stderr.contains(&line));
    // The journal and the list say why.
    let journal = fs::read_to_string(node.path("leases/net/.cnibox/leases")).unwrap();
    assert!(journal.contains("\n- 198.51.100.4 - host-end c2 eth0 ."), "{journal}");
    let dir = node.path("leases").display().to_string();
    let list = node.tool("ipam", &["ls", "--network", "net", "--data-dir", &dir]).printed();
    assert!(list.contains(&format!("yes; reclaimed from container c2: {why}\n")), "{list}");
    is_full(&net, "newer");
    net.call("DEL", "c2").netns("/x").ok();
    assert_eq!(net.leases().len(), 5, "a late DEL takes nothing from the next owner");
}

/// What the runtime lists as valid stays: it will send a DEL.
#[test]
fn gc_reclaims_unlisted_dead_attachments() {
    let node = Node::new();
    let net = bridged(&node, FIVE);
    let (alive, dead, unknown) = (Container::new(), Container::new(), Container::new());
    net.call("ADD", "alive").netns(&alive.path()).result();
    net.call("ADD", "dead").netns(&dead.path()).result();
    let alone = Net { plugin: "host-local", ..net.with(&json!({})) };
    alone.call("ADD", "unknown").netns(&unknown.path()).result();
    let unlisted = alone.call("GC", "");
    done(&unlisted);
    assert_eq!(net.leases().len(), 3, "all may live");
    drop(dead);
    eventually("its link is gone", || {
        node.ip("link show type veth").as_array().unwrap().len() == 1
    });
    done(&gc(&net, &["alive", "unknown", "dead"]));
    assert_eq!(net.leases().len(), 3, "all are valid");
    done(&unlisted);
    assert_eq!(net.leases(), ["198.51.100.2", "198.51.100.4"]);
    done(&gc(&net, &["unknown"]));
    assert_eq!(net.leases(), ["198.51.100.4"], "who is not listed is released as ever");
}

/// A process in its own process group, killed with its children on drop.
pub(crate) struct Background(Child);

impl Background {
    pub(crate) fn new(script: &str) -> Background {
        let mut command = Command::new("sh");
        command.args(["-c", script]).process_group(0).stdin(Stdio::null());
        Background(command.spawn().unwrap())
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }

    pub(crate) fn end(&mut self) {
        let group = Pid::from_raw(self.0.id().cast_signed());
        killpg(group, Signal::SIGKILL).unwrap_or_default();
        drop(self.0.wait());
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.end();
    }
}

/// GC of host-local alone fails while a link of the stale attachment may use the address.
#[test]
fn gc_fails_while_a_stale_address_is_in_use() {
    let node = Node::new();
    let net = bridged(&node, ONE);
    let alone = Net { plugin: "host-local", ..net.with(&json!({})) };
    let ready = node.path("ready");
    // No mount pins the namespace.
    let script = format!("echo $$ > {0}.new; mv {0}.new {0}; exec sleep 60", ready.display());
    let mut process = Background::new(&format!("exec unshare -n sh -c '{script}'"));
    eventually("the process is there", || ready.exists());
    let pid = fs::read_to_string(&ready).unwrap();
    net.call("ADD", "c1").netns(&format!("/proc/{}/ns/net", pid.trim())).result();
    let error = gc(&alone, &[]).error();
    assert_eq!(error.brief(), (11, "198.51.100.66 of container c1, interface eth0 stays"));
    assert_eq!(net.leases(), ["198.51.100.66"]);
    process.end();
    eventually("GC succeeds", || gc(&alone, &[]).run().status == Some(0));
    assert_eq!(net.leases(), [""; 0]);
}

#[test]
fn a_lease_of_an_uncertain_owner_is_kept() {
    let node = Node::new();
    let net = one_set(&node, &[ONE]);
    let wanted = net.call("ADD", "c2").netns("/x");
    // Whatever the path: host-local knows no link of the container.
    let container = Container::new();
    for path in [container.path(), "/no/such".into(), "/proc/self/status".into()] {
        net.call("ADD", "c1").netns(&path).result();
        assert_eq!(wanted.error().code, 999, "{path}");
        done(&net.call("GC", ""));
        assert_eq!(net.leases().len(), 1, "{path}");
        del(&net, "c1");
    }
    net.call("ADD", "c1").netns(&container.path()).result();
    drop(container);
    assert_eq!(wanted.error().code, 999, "its namespace is gone, which proves nothing");
    del(&net, "c1");
    // Leases of the reference that no command of this program has seen, of whatever age.
    let lease = node.path("leases/net/198.51.100.66");
    for date in ["now", "2001-02-03"] {
        fs::write(&lease, "theirs\r\neth0").unwrap();
        node.sh(&format!("touch -d '{date}' {}", lease.display()));
        assert_eq!(wanted.error().code, 999, "{date}");
    }
}

#[test]
fn a_store_shared_with_the_reference_is_reclaimed() {
    let Some(peer) = compare::peer("healing beside the reference's host-local") else { return };
    if !has_machine_id("healing beside the reference's host-local") {
        return;
    }
    let node = Node::new();
    let ipam = json!({"ranges": [[{"subnet": FIVE}]]});
    let net = net(&node, "1.0.0", &ipam);
    let theirs = |verb, id: &str| net.call(verb, id).netns("/x").program(peer.join("host-local"));
    // Alternating ADDs: each program accepts the other's leases, and the records of cnibox persist.
    for id in ["c0", "c1"] {
        add(&net, id);
        theirs("ADD", &format!("their-{id}")).result();
        theirs("ADD", "gone").result();
        theirs("DEL", "gone").ok();
    }
    assert_eq!(net.leases().len(), 4);
    add(&net, "last");
    let full = theirs("ADD", "t3").run();
    age(&net);
    assert_eq!(full.status, Some(1), "the reference knows no better: {full:?}");
    add(&net, "new");
    assert_eq!(net.leases().len(), 1);
    // The reference reuses the reclaimed addresses.
    for id in ["t3", "t4", "t5", "t6"] {
        theirs("ADD", id).result();
    }
    for id in ["t3", "t4", "t5", "t6", "new"] {
        net.call("CHECK", id).netns("/x").ok();
        del(&net, id);
    }
    assert_eq!(net.leases(), [""; 0]);
    // A lease that the reference recreates with the same container and address is not the recorded
    // lease.
    add(&net, "c1");
    age(&net);
    let ip = net.leases().remove(0);
    theirs("DEL", "c1").ok();
    while !net.leases().contains(&ip) {
        theirs("ADD", "c1").result();
        if !net.leases().contains(&ip) {
            theirs("DEL", "c1").ok();
        }
    }
    done(&net.with(&json!({"cniVersion": "1.1.0"})).call("GC", ""));
    assert_eq!(net.leases(), [ip]);
}

#[test]
fn a_freed_address_is_quarantined_for_the_configured_time() {
    let node = Node::new();
    let ipam = json!({"ranges": [[{"subnet": ONE}]], "reuseDelay": 600});
    let net = net(&node, "1.1.0", &ipam);
    add(&net, "c1");
    del(&net, "c1");
    let error = net.call("ADD", "c2").netns("/x").error();
    assert_eq!(error.code, 11, "{error:?}");
    assert!(error.msg.contains("no IP addresses available in range set"), "{error:?}");
    assert!(error.details.contains("reuseDelay keeps back the next one for"), "{error:?}");
    assert_eq!(net.call("STATUS", "").error().code, 50);
    // A requested address is not subject to the delay; an address freed by GC is.
    let asked = net.with(&json!({"args": {"cni": {"ips": ["198.51.100.66"]}}}));
    asked.call("ADD", "c2").netns("/x").result();
    gc(&net, &[]).ok();
    assert_eq!(net.call("ADD", "c3").netns("/x").error().code, 11);
    let short = net.with(&json!({"ipam": {"type": "host-local", "dataDir": node.path("leases"),
        "ranges": [[{"subnet": ONE}]], "reuseDelay": 1}}));
    eventually("a second is over", || short.call("ADD", "c3").netns("/x").run().status == Some(0));
    // DEL with an invalid delay releases the lease.
    let bad = net.with(&json!({"ipam": {"type": "host-local", "dataDir": node.path("leases"),
        "ranges": [[{"subnet": ONE}]], "reuseDelay": "long"}}));
    assert!(bad.call("ADD", "c4").netns("/x").run().status == Some(1));
    assert_eq!(bad.call("DEL", "c3").netns("/x").run().status, Some(0));
    assert_eq!(net.leases(), [""; 0]);
}

/// A container cannot hold up, or mislead, a call for another container by its processes, mounts
/// and descriptors.
#[test]
fn other_processes_are_not_examined() {
    let node = Node::new();
    let net = bridged(&node, ONE);
    let containers = [Container::new(), Container::new()];
    let paths = ["c1", "c2"].map(|id| node.path(id).display().to_string());
    for (container, path) in containers.iter().zip(&paths) {
        node.sh(&format!("touch {path} && mount --bind {} {path}", container.path()));
    }
    let on = |verb, id, path: &str| net.call(verb, id).netns(path);
    on("ADD", "c1", &paths[0]).result();
    // The pool is full (c2), the container has an address already (c1).
    let calls = [on("ADD", "c2", &paths[1]), on("ADD", "c1", &paths[1]), net.call("GC", "")];
    let calls = calls.into_iter().chain([gc(&net, &["c1"]), net.call("STATUS", "")]);
    for call in calls.chain([on("DEL", "c1", &paths[0])]) {
        let (outcome, calls) = strace::record(&node, &call);
        let is_peek = |text: &&str| {
            let mut below = text.split("\"/proc/").skip(1);
            // DEL asks whether process 1 reaps a child that it leaves.
            below.any(|rest| {
                rest.starts_with(|c: char| c == '"' || c.is_ascii_digit())
                    && !rest.starts_with("1/status\"")
            }) || text.contains("mountinfo")
        };
        let peeks: Vec<&str> = calls.iter().map(|c| c.text.as_str()).filter(is_peek).collect();
        assert!(peeks.is_empty(), "{outcome:?} {peeks:?}");
        assert!(calls.iter().any(|call| call.verb() == "open"), "nothing was recorded");
    }
}

#[test]
fn add_waits_for_the_lock_once_even_with_rollback() {
    let node = Node::new();
    let mut ipam = node.host_local(&["198.51.100.0/24"]);
    ipam["lockTimeout"] = json!(4);
    let net = Net::new(&node, "bridge", "1.1.0", &json!({"bridge": "br0", "ipam": ipam}));
    let (lock, ready) = (node.path("leases/net/lock"), node.path("ready"));
    fs::create_dir_all(node.path("leases/net")).unwrap();
    let (path, touched) = (lock.display(), ready.display());
    let _holder =
        Background::new(&format!("exec flock {path} sh -c 'touch {touched}; exec sleep 60'"));
    eventually("the lock is taken", || ready.exists());
    let container = Container::new();
    let start = Instant::now();
    let error = net.call("ADD", "c1").netns(&container.path()).error();
    let took = start.elapsed();
    assert!(error.code == 11 && error.msg.contains("held for more than 4 s"), "{error:?}");
    assert!(took < Duration::from_millis(7_500), "{took:?}: it waited twice");
}

#[test]
fn a_lock_timeout_names_the_holder() {
    let node = Node::new();
    let ipam = json!({"ranges": [[{"subnet": "198.51.100.0/24"}]], "lockTimeout": 1});
    let net = net(&node, "1.1.0", &ipam);
    add(&net, "c1");
    let lock = node.path("leases/net/lock");
    let ready = node.path("ready");
    let holder = Background::new(&format!(
        "CNI_COMMAND=ADD CNI_CONTAINERID=stuck exec flock {} sh -c 'touch {}; exec sleep 60'",
        lock.display(),
        ready.display()
    ));
    eventually("the lock is taken", || ready.exists());
    let pid = holder.id();
    for verb in ["ADD", "DEL", "GC", "CHECK"] {
        let error = gc(&net, &[]).env("CNI_COMMAND", verb).id("c1").netns("/x").error();
        let msg = format!(
            "take lock {}: held for more than 1 s by process {pid} (flock, ADD of container stuck)",
            lock.display()
        );
        assert_eq!(error.brief(), (11, msg.as_str()), "{verb}");
    }
    net.call("STATUS", "").ok();
    assert_eq!(net.leases().len(), 1);
    drop(holder);
    del(&net, "c1");
}
