//! An ADD that needs an address and GC reclaim leases of deleted containers, but never leases of
//! containers that may still exist, whatever keeps their namespaces alive.

use std::fs;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use super::{add, del, net, one_set};
use crate::compare;
use crate::net::Net;
use crate::node::{Call, Container, Node, Outcome, eventually};
use crate::strace;

/// Five addresses that no other test assigns to an interface: another test's namespace may reuse
/// the inode number of a deleted one.
const FIVE: &str = "198.51.100.0/29";
const FULL: &str = "failed to allocate for range 0: no IP addresses available in range set: 198.51.100.1-198.51.100.6";
const ONE: &str = "198.51.100.64/30";

/// The same call after a reboot of the node, simulated by another boot id.
fn rebooted(net: &Net<'_>, call: Call, boot: &str) -> Call {
    let file = net.node.path("boot_id");
    fs::write(&file, format!("{boot}\n")).unwrap();
    let mount = format!("mount --bind {} /proc/sys/kernel/random/boot_id", file.display());
    call.in_script(&format!("{mount} && exec \"$0\""))
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
    let error = net.call("ADD", id).netns("/no/such").error();
    assert_eq!(error.brief(), (999, FULL));
}

fn gc(net: &Net<'_>, valid: &[&str]) -> Call {
    let valid: Vec<_> =
        valid.iter().map(|id| json!({"containerID": id, "ifname": "eth0"})).collect();
    net.with(&json!({"cni.dev/valid-attachments": valid})).call("GC", "")
}

#[test]
fn after_a_reboot_the_leases_of_before_are_free() {
    let node = Node::new();
    let net = one_set(&node, &[FIVE]);
    let container = Container::new();
    net.call("ADD", "c0").netns(&container.path()).result();
    for id in ["c1", "c2", "c3"] {
        add(&net, id);
    }
    // A lease of the reference, observed by a call of cnibox in the same boot.
    fs::write(node.path("leases/net/198.51.100.6"), "theirs\r\neth0").unwrap();
    is_full(&net, "new");
    net.call("STATUS", "").error();

    let status = rebooted(&net, net.call("STATUS", ""), "b2");
    done(&status);
    assert_eq!(net.leases().len(), 5, "STATUS changes nothing");
    let outcome = done(&rebooted(&net, net.call("ADD", "new").netns("/x"), "b2"));
    for (ip, id) in [("198.51.100.2", "c0"), ("198.51.100.6", "theirs")] {
        let line = format!(
            "reclaimed {ip} of container {id}, interface eth0: it was made before the last boot"
        );
        assert!(outcome.stderr.contains(&line), "{outcome:?}");
    }
    assert_eq!(net.leases().len(), 1);
    // Leases of the current boot remain.
    for id in ["d1", "d2", "d3", "d4"] {
        done(&rebooted(&net, net.call("ADD", id).netns("/x"), "b2"));
    }
    let error = rebooted(&net, net.call("ADD", "d5").netns("/x"), "b2").error();
    assert_eq!(error.brief(), (999, FULL));
    assert_eq!(net.leases().len(), 5);
}

#[test]
fn after_a_reboot_a_container_of_the_same_name_gets_an_address() {
    let node = Node::new();
    let net = one_set(&node, &["198.51.100.0/24"]);
    assert_eq!(add(&net, "static-pod"), ["198.51.100.2/24"]);
    let again = net.call("ADD", "static-pod").netns("/x");
    assert!(again.error().msg.contains("duplicate allocation is not allowed"));
    done(&rebooted(&net, again, "b2"));
    assert_eq!(net.leases(), ["198.51.100.3"]);
}

#[test]
fn an_address_asked_for_by_name_is_taken_from_the_dead_only() {
    let node = Node::new();
    let net = one_set(&node, &["198.51.100.0/24"]);
    let (dead, alive) = (Container::new(), Container::new());
    for (id, container) in [("dead", &dead), ("alive", &alive)] {
        net.call("ADD", id).netns(&container.path()).result();
    }
    drop(dead);
    let ask = |ip: &str| {
        let args = json!({"args": {"cni": {"ips": [ip]}}});
        net.with(&args).call("ADD", ip).netns("/x")
    };
    ask("198.51.100.2").result();
    assert!(ask("198.51.100.3").error().msg.contains("is not available"));
}

#[test]
fn a_namespace_that_went_without_del_gives_its_address_back() {
    let node = Node::new();
    let net = one_set(&node, &[FIVE]);
    let mut containers: Vec<_> = (0..5).map(|_| Container::new()).collect();
    for (n, container) in containers.iter().enumerate() {
        net.call("ADD", &format!("c{n}")).netns(&container.path()).result();
    }
    is_full(&net, "new");
    drop(containers.remove(2));
    let status = net.call("STATUS", "");
    eventually("the kernel removes the namespace", || status.run().status == Some(0));
    assert_eq!(net.leases().len(), 5);
    let outcome = done(&net.call("ADD", "new").netns("/x"));
    let line =
        "reclaimed 198.51.100.4 of container c2, interface eth0: its network namespace is gone";
    assert!(outcome.stdout.contains("198.51.100.4/29") && outcome.stderr.contains(line));
    is_full(&net, "newer");
    del(&net, "c2");
    assert_eq!(net.leases().len(), 5, "a late DEL takes nothing from the next owner");
}

#[test]
fn gc_reclaims_the_dead_with_a_list_and_without() {
    let node = Node::new();
    let net = one_set(&node, &[FIVE]);
    let (alive, dead) = (Container::new(), Container::new());
    net.call("ADD", "alive").netns(&alive.path()).result();
    net.call("ADD", "unknown").netns("/no/such").result();
    let dead_path = dead.path();
    for listed in [None, Some(["alive", "unknown", "dead"])] {
        let dead = Container::new();
        net.call("ADD", "dead").netns(&dead.path()).result();
        let call = match listed {
            None => net.call("GC", ""),
            Some(valid) => gc(&net, &valid),
        };
        done(&call);
        assert_eq!(net.leases().len(), 3, "all may live");
        drop(dead);
        eventually("the dead one is reclaimed", || {
            done(&call);
            net.leases().len() == 2
        });
    }
    drop(dead_path);
    done(&gc(&net, &["unknown"]));
    assert_eq!(net.leases(), ["198.51.100.3"], "who is not listed is released as ever");
}

/// A process in its own process group, killed with its children on drop.
struct Background(Child);

impl Background {
    fn new(script: &str) -> Background {
        let mut command = Command::new("sh");
        command.args(["-c", script]).process_group(0).stdin(Stdio::null());
        Background(command.spawn().unwrap())
    }

    /// A process in a network namespace that is not bind-mounted; also returns its process id.
    fn in_own_netns(node: &Node) -> (Background, String) {
        let ready = node.path("ready");
        let script = format!("echo $$ > {0}.new; mv {0}.new {0}; exec sleep 600", ready.display());
        let process = Background::new(&format!("exec unshare -n sh -c '{script}'"));
        eventually("the process is there", || ready.exists());
        (process, fs::read_to_string(&ready).unwrap().trim().to_owned())
    }

    fn end(&mut self) {
        if !matches!(self.0.try_wait(), Ok(None)) {
            return;
        }
        let group = format!("-{}", self.0.id());
        drop(Command::new("kill").args(["-KILL", "--", &group]).status());
        drop(self.0.wait());
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.end();
    }
}

#[test]
fn a_process_holds_its_namespace() {
    let node = Node::new();
    let net = one_set(&node, &[ONE]);
    let (mut process, pid) = Background::in_own_netns(&node);
    net.call("ADD", "c1").netns(&format!("/proc/{pid}/ns/net")).result();
    let wanted = net.call("ADD", "c2").netns("/x");
    assert_eq!(wanted.error().code, 999);
    process.end();
    // The lease remains as long as another namespace has the same inode number.
    eventually("the address comes back", || wanted.run().status == Some(0));
}

/// GC fails while a container may use an address of the stale lease.
#[test]
fn gc_fails_while_a_stale_address_is_in_use() {
    let node = Node::new();
    let net = one_set(&node, &[ONE]);
    let (mut process, pid) = Background::in_own_netns(&node);
    net.call("ADD", "c1").netns(&format!("/proc/{pid}/ns/net")).result();
    let ip = net.leases().remove(0);
    // The namespace is not bind-mounted, so it may be another container's with the same inode
    // number.
    node.sh(&format!("nsenter -t {pid} -n ip addr add {ip}/32 dev lo"));
    let gc = net.with(&json!({"cni.dev/valid-attachments": []}));
    let error = gc.call("GC", "").error();
    assert!(error.code == 11 && error.msg.contains(&ip) && error.msg.contains("c1"), "{error:?}");
    assert_eq!(net.leases(), [ip]);
    process.end();
    eventually("GC succeeds", || gc.call("GC", "").run().status == Some(0));
    assert_eq!(net.leases(), [""; 0]);
}

/// A container that ends between GC's two scans is reclaimed, and GC succeeds.
#[test]
fn gc_succeeds_when_the_container_ends_meanwhile() {
    let node = Node::new();
    let net = one_set(&node, &[ONE]);
    let (mut process, pid) = Background::in_own_netns(&node);
    net.call("ADD", "c1").netns(&format!("/proc/{pid}/ns/net")).result();
    let ip = net.leases().remove(0);
    node.sh(&format!("nsenter -t {pid} -n ip addr add {ip}/32 dev lo"));
    let gc = gc(&net, &[]);
    assert_eq!(gc.run().status, Some(1));
    let outcome = std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            // Each scan for a namespace reads the mounts first: three scans for the addresses, one
            // for the liveness.
            let (mounts, pause) = ("/proc/thread-self/mountinfo", Duration::from_secs(3));
            strace::pause_before(&node, &gc, mounts, 4, pause)
        });
        std::thread::sleep(Duration::from_millis(1500));
        process.end();
        run.join().unwrap()
    });
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    assert!(outcome.stderr.contains("reclaimed"), "{outcome:?}");
    assert_eq!(net.leases(), [""; 0]);
}

#[test]
fn a_thread_holds_its_namespace() {
    let node = Node::new();
    let net = one_set(&node, &[ONE]);
    let container = Container::new();
    net.call("ADD", "c1").netns(&container.path()).result();
    let (enter, left) = std::sync::mpsc::channel::<()>();
    let (inside, entered) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            container.run(move || {
                inside.send(()).unwrap();
                left.recv().ok();
            });
        });
        entered.recv().unwrap();
        assert_eq!(net.call("ADD", "c2").netns("/x").error().code, 999);
        drop(enter);
    });
    drop(container);
    let wanted = net.call("ADD", "c2").netns("/x");
    eventually("the address comes back", || wanted.run().status == Some(0));
}

#[test]
fn an_unseen_mount_holds_its_namespace() {
    let node = Node::new();
    let net = one_set(&node, &[ONE]);
    let (conf, ns) = (node.path("conf.json"), node.path("ns"));
    fs::write(&conf, net.conf.to_string()).unwrap();
    let (conf, ns, ready) = (conf.display(), ns.display(), node.path("ready"));
    let plugin = net.call("ADD", "c1").netns(&ns.to_string());
    // The bind mount is in another mount namespace, and so is the plugin that creates the lease.
    let script = format!(
        "touch {ns} && unshare --net={ns} true && \"$0\" < {conf} && touch {} && exec sleep 600",
        ready.display()
    );
    let mut command = plugin.in_script(&script).command();
    let child = command.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).spawn();
    let mut keeper = Background(child.unwrap());
    eventually("the lease is made", || ready.exists());
    let wanted = net.call("ADD", "c2").netns("/x");
    let error = wanted.error();
    assert_eq!(error.code, 999, "{error:?}");
    keeper.end();
    eventually("the address comes back", || wanted.run().status == Some(0));
}

#[test]
fn in_doubt_a_lease_stays() {
    let node = Node::new();
    let net = one_set(&node, &[ONE]);
    let wanted = net.call("ADD", "c2").netns("/x");
    // The namespace cannot be identified.
    let plain = node.path("plain");
    fs::write(&plain, "").unwrap();
    for path in [plain.display().to_string(), "/no/such".into(), "/proc/self/status".into()] {
        net.call("ADD", "c1").netns(&path).result();
        assert_eq!(wanted.error().code, 999, "{path}");
        done(&net.call("GC", ""));
        assert_eq!(net.leases().len(), 1, "{path}");
        del(&net, "c1");
    }
    // A lease of the reference from the current boot.
    fs::write(node.path("leases/net/198.51.100.66"), "theirs\r\neth0").unwrap();
    assert_eq!(wanted.error().code, 999);
    fs::remove_file(node.path("leases/net/198.51.100.66")).unwrap();
    // In another PID namespace not all processes are visible.
    let container = Container::new();
    net.call("ADD", "c1").netns(&container.path()).result();
    drop(container);
    let blind = wanted.clone().under(&["unshare", "-p", "-f", "--mount-proc"]);
    assert_eq!(blind.error().code, 999);
    assert_eq!(net.leases().len(), 1);
    eventually("who sees them can", || wanted.run().status == Some(0));
}

#[test]
fn an_old_file_is_of_an_earlier_boot_unless_the_clock_was_set() {
    let node = Node::new();
    let net = one_set(&node, &[ONE]);
    let lease = node.path("leases/net/198.51.100.66");
    let witness = node.path("null");
    let null = |modified: &str| {
        node.sh(&format!("touch -d '{modified}' {}", witness.display()));
        format!("mount --bind {} /dev/null && exec \"$0\"", witness.display())
    };
    let boot = "$(awk '{print int($1)}' /proc/uptime) seconds ago";
    let boot: u64 = node.sh(&format!("date -d \"{boot}\" +%s")).trim().parse().unwrap();
    let (boot, shortly_before) = (format!("@{boot}"), format!("@{}", boot - 300));
    let wanted = |script: &str| net.call("ADD", "new").netns("/x").in_script(script);
    let old = |date: &str| {
        fs::remove_dir_all(node.path("leases")).ok();
        fs::create_dir_all(node.path("leases/net")).unwrap();
        fs::write(&lease, "theirs\r\neth0").unwrap();
        node.sh(&format!("touch -d '{date}' {}", lease.display()));
    };
    // Without an RTC battery the boot begins in 1970 by the wall clock.
    old("1970-01-02");
    assert_eq!(wanted(&null("1970-01-01 12:00")).error().code, 999, "the clock was set");
    old("now");
    assert_eq!(wanted(&null(&boot)).error().code, 999, "the lease is of this boot");
    old(&shortly_before);
    assert_eq!(wanted(&null(&boot)).error().code, 999, "too close to tell");
    old("2001-02-03");
    let outcome = done(&wanted(&null(&boot)));
    assert!(outcome.stderr.contains("198.51.100.66 of container theirs"), "{outcome:?}");
}

#[test]
fn the_references_host_local_and_ours_heal_one_store() {
    let Some(peer) = compare::peer("healing beside the reference's host-local") else { return };
    let node = Node::new();
    let ipam = json!({"ranges": [[{"subnet": FIVE}]]});
    let net = net(&node, "1.0.0", &ipam);
    let theirs = |verb, id: &str, netns: &str| {
        net.call(verb, id).netns(netns).program(peer.join("host-local"))
    };
    let dead: Vec<_> = (0..3).map(|_| Container::new()).collect();
    let alive = Container::new();
    // Alternating ADDs: each program accepts the other's leases, and the records of cnibox persist.
    net.call("ADD", "d0").netns(&dead[0].path()).result();
    theirs("ADD", "t1", &alive.path()).result();
    net.call("ADD", "d1").netns(&dead[1].path()).result();
    theirs("ADD", "gone", "/x").result();
    theirs("DEL", "gone", "/x").ok();
    net.call("ADD", "d2").netns(&dead[2].path()).result();
    theirs("ADD", "t2", &alive.path()).result();
    assert_eq!(net.leases().len(), 5);
    drop(dead);
    let full = theirs("ADD", "t3", "/x").run();
    assert_eq!(full.status, Some(1), "the reference knows no better: {full:?}");
    eventually("three come back", || {
        let outcome = net.call("ADD", "new").netns("/x").run();
        del(&net, "new");
        outcome.status == Some(0) && net.leases().len() == 2
    });
    // The reference reuses the reclaimed addresses.
    for id in ["t3", "t4", "t5"] {
        theirs("ADD", id, "/x").result();
    }
    for id in ["t1", "t2", "t3", "t4", "t5"] {
        net.call("CHECK", id).netns("/x").ok();
        del(&net, id);
    }
    assert_eq!(net.leases(), [""; 0]);
    // A lease that the reference recreates with the same container and address is not the recorded
    // lease.
    let dead = Container::new();
    net.call("ADD", "c1").netns(&dead.path()).result();
    fs::remove_file(node.path("leases/net").join("last_reserved_ip.0")).unwrap();
    let ip = net.leases().remove(0);
    theirs("DEL", "c1", "/x").ok();
    fs::write(node.path("leases/net/last_reserved_ip.0"), "198.51.100.1").unwrap();
    while !net.leases().contains(&ip) {
        theirs("ADD", "c1", "/x").result();
        if !net.leases().contains(&ip) {
            theirs("DEL", "c1", "/x").ok();
        }
    }
    drop(dead);
    done(&net.with(&json!({"cniVersion": "1.1.0"})).call("GC", ""));
    assert_eq!(net.leases(), [ip]);
}

#[test]
fn a_freed_address_is_kept_back_for_as_long_as_asked() {
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
    // DEL with an invalid delay fails, but releases the lease.
    let bad = net.with(&json!({"ipam": {"type": "host-local", "dataDir": node.path("leases"),
        "ranges": [[{"subnet": ONE}]], "reuseDelay": "long"}}));
    assert!(bad.call("ADD", "c4").netns("/x").run().status == Some(1));
    assert_eq!(bad.call("DEL", "c3").netns("/x").run().status, Some(1));
    assert_eq!(net.leases(), [""; 0]);
}

#[test]
fn processes_are_looked_through_without_the_lock() {
    let node = Node::new();
    let net = one_set(&node, &[ONE]);
    let container = Container::new();
    net.call("ADD", "c1").netns(&container.path()).result();
    // ADD fails: the pool is exhausted (c2), or the container has an address already (c1).
    for id in ["c2", "c1"] {
        let (outcome, calls) = strace::record(&node, &net.call("ADD", id).netns("/x"));
        assert_eq!(outcome.status, Some(1), "{outcome:?}");
        let (mut locked, mut taken, mut looks) = (false, 0, 0);
        for call in &calls {
            let is_lock = call.text.contains("/leases/net/lock>");
            match call.name.as_str() {
                "flock" if is_lock => (locked, taken) = (true, taken + 1),
                "close" if is_lock => locked = false,
                _ if call.text.contains("\"/proc/") => {
                    assert!(!locked, "{id}: {call:?}");
                    looks += 1;
                }
                _ => {}
            }
        }
        assert!(taken == 2 && looks > 10, "{id}: {taken} locks, {looks} looks");
    }
    assert_eq!(net.leases().len(), 1);
}

#[test]
fn an_add_waits_for_the_lock_once_also_when_it_is_taken_back() {
    let node = Node::new();
    let mut ipam = node.host_local(&["198.51.100.0/24"]);
    ipam["lockTimeout"] = json!(4);
    let net = Net::new(&node, "bridge", "1.1.0", &json!({"bridge": "br0", "ipam": ipam}));
    let (lock, ready) = (node.path("leases/net/lock"), node.path("ready"));
    fs::create_dir_all(node.path("leases/net")).unwrap();
    let (path, touched) = (lock.display(), ready.display());
    let _holder =
        Background::new(&format!("exec flock {path} sh -c 'touch {touched}; exec sleep 600'"));
    eventually("the lock is taken", || ready.exists());
    let container = Container::new();
    let start = Instant::now();
    let error = net.call("ADD", "c1").netns(&container.path()).error();
    let took = start.elapsed();
    assert!(error.code == 11 && error.msg.contains("held for more than 4 s"), "{error:?}");
    assert!(took < Duration::from_millis(7_500), "{took:?}: it waited twice");
}

#[test]
fn a_lock_that_is_not_let_go_is_told_with_its_holder() {
    let node = Node::new();
    let ipam = json!({"ranges": [[{"subnet": "198.51.100.0/24"}]], "lockTimeout": 1});
    let net = net(&node, "1.1.0", &ipam);
    add(&net, "c1");
    let lock = node.path("leases/net/lock");
    let ready = node.path("ready");
    let holder = Background::new(&format!(
        "CNI_COMMAND=ADD CNI_CONTAINERID=stuck exec flock {} sh -c 'touch {}; exec sleep 600'",
        lock.display(),
        ready.display()
    ));
    eventually("the lock is taken", || ready.exists());
    let pid = holder.0.id();
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
