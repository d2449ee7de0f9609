//! DEL returns when the link is gone, and a child process waits for the kernel's grace periods: the
//! child keeps nothing of the caller, is left only to a process 1 that reaps it, and neither its
//! end nor the plugin's at any step leaves anything.

use std::fs;

use serde_json::{Value, json};

use crate::support::faults::{has_effect, quick};
use crate::support::net::{Net, merged, wire};
use crate::support::node::{Call, Container, Node, assert_unchanged};
use crate::support::strace::{self, Hits, Syscall};

/// The caller of a plugin in a PID namespace of its own.
#[derive(Clone, Copy, Debug)]
enum Caller {
    /// A child of a process 1 that blocks `SIGCHLD`, as systemd does, and reaps.
    BelowInit,
    /// A child of a process 1 that has the default action for `SIGCHLD`.
    BelowOther,
    Init,
}

use Caller::{BelowInit, BelowOther, Init};

/// Process 1: runs the plugin, reports the open files of all processes at once, reaps as systemd
/// does until it is alone, 10 seconds at most, and reports the processes that are left.
const INIT: &str = r#"use POSIX qw(:sys_wait_h :signal_h);
    ($report, $blocks) = (shift, shift);
    sigprocmask(SIG_BLOCK, POSIX::SigSet->new(SIGCHLD)) if $blocks;
    if (!($child = fork)) { exec @ARGV or die }
    waitpid $child, 0;
    $status = $?;
    open REPORT, '>', $report;
    print REPORT join(' ', glob '/proc/[0-9]*/fd/*'), "\n";
    for (1..1000) {
        1 while waitpid(-1, WNOHANG) > 0;
        last if (@left = glob '/proc/[0-9]*') == 1;
        select undef, undef, undef, .01;
    }
    print REPORT "@left\n";
    close REPORT;
    exit($status & 127 ? 128 + ($status & 127) : $status >> 8);"#;

/// A node with a network and a container, whose namespace also has a path in other PID namespaces.
struct Scene<'n> {
    net: Net<'n>,
    container: Container,
    netns: String,
    report: String,
}

impl<'n> Scene<'n> {
    fn new(node: &'n Node, plugin: &'static str, keys: &Value) -> Scene<'n> {
        node.sh("echo 1 > /proc/sys/net/ipv6/conf/default/addr_gen_mode");
        let ipam = node.host_local(&["10.1.0.0/24"]);
        let net = Net::new(node, plugin, "1.0.0", &merged(&json!({"ipam": ipam}), keys));
        let container = quick();
        let netns = node.state("container").display().to_string();
        node.sh(&format!("touch {netns}; mount --bind {} {netns}", container.path()));
        let report = node.path("report").display().to_string();
        Scene { net, container, netns, report }
    }

    fn call(&self, verb: &str) -> Call {
        self.net.call(verb, "c1").netns(&self.netns).env("RUST_BACKTRACE", "0")
    }

    /// The command line of a caller, which the plugin's follows.
    fn caller(&self, caller: Caller) -> Vec<&str> {
        let mut line = vec!["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
        let blocks = if let BelowOther = caller { "" } else { "1" };
        line.extend(["perl", "-e", INIT, &self.report, blocks]);
        if let BelowInit | BelowOther = caller {
            line.extend(["sh", "-c", "\"$@\"; exit $?", "sh"]);
        }
        line
    }

    /// The open files of the processes, except 1, at the plugin's end; asserts that none remains.
    fn left_behind(&self) -> Vec<String> {
        let text = fs::read_to_string(&self.report).unwrap();
        let (files, processes) = text.trim().split_once('\n').unwrap();
        assert_eq!(processes, "/proc/1");
        let others = files.split(' ').filter(|file| !file.starts_with("/proc/1/"));
        others.map(str::to_owned).collect()
    }

    /// Attaches and detaches the container, and returns [`Scene::left_behind`].
    fn round(&self, caller: Caller) -> Vec<String> {
        let prev = self.call("ADD").result();
        let with_result = self.net.with(&json!({"prevResult": prev}));
        let del = with_result.call("DEL", "c1").netns(&self.netns);
        del.under(&self.caller(caller)).ok();
        assert_eq!(self.container.ip("link show eth0 || true"), json!([]));
        assert_eq!(self.net.node.ip("link show type veth"), json!([]));
        assert_eq!(self.net.leases(), [""; 0]);
        self.left_behind()
    }
}

fn bridge(node: &Node) -> Scene<'_> {
    Scene::new(
        node,
        "bridge",
        &json!({"isGateway": true, "ipMasq": true,
        "ipMasqBackend": "nftables"}),
    )
}

#[test]
fn the_child_has_only_its_socket_and_is_reaped() {
    let node = Node::new();
    let scene = bridge(&node);
    let seen: Vec<_> = (0..10).map(|_| scene.round(BelowInit)).filter(|l| !l.is_empty()).collect();
    assert!(seen.iter().all(|files| files.len() == 1), "{seen:#?}");
    assert!(!seen.is_empty(), "DEL waited each time");
}

#[test]
fn no_child_is_left_to_a_process_that_does_not_reap() {
    let node = Node::new();
    let scene = bridge(&node);
    for caller in [Init, BelowOther, Init, BelowOther] {
        assert_eq!(scene.round(caller), [""; 0], "{caller:?}");
    }
    // Without a /proc of this namespace it is unknown who reaps.
    let mut line = scene.caller(BelowInit);
    line.retain(|word| *word != "--mount-proc");
    scene.call("ADD").result();
    let (outcome, calls) = strace::record_under(&node, &scene.call("DEL"), &line);
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    assert!(!calls.iter().any(|call| call.verb() == "fork"), "{calls:#?}");
}

#[test]
fn the_address_is_reusable_when_del_returns() {
    let node = Node::new();
    let scene = bridge(&node);
    let mut ipam = node.host_local(&["10.1.0.0/24"]);
    let only = json!({"rangeStart": "10.1.0.9", "rangeEnd": "10.1.0.9"});
    ipam["ranges"][0][0] = merged(&ipam["ranges"][0][0], &only);
    let net = scene.net.with(&json!({"ipam": ipam}));
    let (other, path) = (quick(), node.state("other").display().to_string());
    node.sh(&format!("touch {path}; mount --bind {} {path}", other.path()));
    let ends = [(&scene.container, &scene.netns), (&other, &path)];
    net.call("ADD", "c0").netns(ends[0].1).result();
    let conf = node.path("conf").display().to_string();
    fs::write(&conf, net.conf.to_string()).unwrap();
    // The next ADD follows at once.
    let then =
        r#""$@" && CNI_COMMAND=ADD CNI_NETNS=$0 CNI_CONTAINERID=$NEXT "$@" <"$CONF" >/dev/null"#;
    for round in 0..20 {
        let [old, new] = [round % 2, (round + 1) % 2].map(|i| ends[i]);
        let mut line = scene.caller(BelowInit);
        line.truncate(line.len() - 4);
        line.extend(["sh", "-c", then, new.1]);
        let del = net.call("DEL", &format!("c{round}")).netns(old.1).env("CONF", &conf);
        del.env("NEXT", &format!("c{}", round + 1)).under(&line).ok();
        assert!(new.0.pings("10.1.0.1"), "round {round}");
        assert_eq!(old.0.ip("link show eth0 || true"), json!([]));
    }
}

/// Kills the plugin before each of its system calls that have an effect, while its child goes on.
fn survives_kill_of_the_parent(scene: &Scene<'_>) {
    let node = scene.net.node;
    scene.call("ADD").result();
    scene.call("DEL").ok();
    let before = (node.snapshot(), scene.container.snapshot(node));
    scene.call("ADD").result();
    let line = scene.caller(BelowInit);
    let (outcome, calls) = strace::record_under(node, &scene.call("DEL"), &line);
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    let matters = |point: &Syscall| has_effect(point) || point.verb() == "recv";
    let mut killed = Hits::default();
    for point in strace::points(&calls).into_iter().filter(matters) {
        scene.call("ADD").result();
        let (outcome, fired) = point.run_under(node, &scene.call("DEL"), "signal=KILL", &line);
        let why = format!("killed at {}: {outcome:?}", point.describe());
        killed.extend(fired.then_some(&point));
        // Whatever the child had open when its parent was killed, no process remains.
        drop(scene.left_behind());
        scene.call("DEL").ok();
        eprintln!("{why}");
        assert_unchanged(&before.0, &node.snapshot());
        assert_unchanged(&before.1, &scene.container.snapshot(node));
    }
    killed.assert_include(&["open", "write", "unlink", "fork", "recv"]);
}

#[test]
fn a_bridge_del_killed_at_any_step_can_be_repeated() {
    survives_kill_of_the_parent(&bridge(&Node::new()));
}

#[test]
fn a_macvlan_del_killed_at_any_step_can_be_repeated() {
    let node = Node::new();
    wire(&node);
    survives_kill_of_the_parent(&Scene::new(&node, "macvlan", &json!({"master": "wire0"})));
}

#[test]
fn the_plugin_deletes_the_link_if_the_child_fails() {
    let node = Node::new();
    let scene = bridge(&node);
    let line = scene.caller(BelowInit);
    let file = node.path("strace.child").display().to_string();
    // Calls of the child only, and the fork.
    let faults = [
        "close_range:signal=KILL:when=1",
        "close_range:signal=KILL:when=2",
        "close_range:error=ENOSYS",
        "chdir:signal=KILL",
        "clone,clone3,fork,vfork:error=EAGAIN",
    ];
    for fault in faults {
        scene.call("ADD").result();
        let strace = ["strace", "-f", "-o", &file, "-e", &format!("inject={fault}")];
        scene.call("DEL").under(&[&line, &strace[..]].concat()).ok();
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.contains("(INJECTED)") || text.contains("killed by SIGKILL"), "{fault}");
        assert_eq!(node.ip("link show type veth"), json!([]), "{fault}");
        assert_eq!(scene.net.leases(), [""; 0], "{fault}");
    }
}

#[test]
fn a_refusal_reaches_the_caller() {
    let node = Node::new();
    let scene = bridge(&node);
    scene.call("ADD").result();
    let mut line = scene.caller(BelowInit);
    line.extend(["setpriv", "--bounding-set", "-net_admin", "--inh-caps", "-net_admin"]);
    let error = scene.call("DEL").under(&line).error();
    assert!(error.msg.contains("operation not permitted"), "{}", error.msg);
    assert_eq!(scene.net.leases().len(), 1, "the address of a link that exists was released");
    scene.call("DEL").ok();
}
