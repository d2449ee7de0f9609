//! What a call costs the node: no other process or thread, no sleep, little memory.

use std::fs;
use std::io::{Read, Write, pipe};
use std::process::Stdio;

use serde_json::{Value, json};

use crate::node::{Call, Container, Node, eventually};
use crate::strace::{self, Syscall};

/// Kilobytes that an ADD may have in memory at once, most of it pages of the executable that all
/// processes share.
const PEAK: u64 = 3584;
/// Kilobytes among these that are its own.
const OWN: u64 = 200;

fn conf(node: &Node) -> Value {
    let ipam = node.host_local(&["10.1.0.0/24", "fd00:1::/64"]);
    json!({"name": "n", "cniVersion": "1.0.0", "isDefaultGateway": true, "ipam": ipam,
           "ipMasq": true, "ipMasqBackend": "nftables", "macspoofchk": true})
}

fn assert_frugal(what: &str, calls: &[Syscall]) {
    let named = |names: &[&str]| -> Vec<String> {
        let named = calls.iter().filter(|call| names.contains(&call.name.as_str()));
        named.map(|call| format!("{}({}", call.name, call.text)).collect()
    };
    let programs = named(&["execve", "execveat"]);
    assert_eq!(programs.len(), 1, "{what} executes: {programs:#?}");
    let born = named(&["fork", "vfork", "clone", "clone3"]);
    assert!(born.is_empty(), "{what} starts processes or threads: {born:#?}");
    let sleeps = named(&["nanosleep", "clock_nanosleep"]);
    assert!(sleeps.is_empty(), "{what} sleeps: {sleeps:#?}");
}

#[test]
fn no_verb_starts_a_process_or_a_thread_or_sleeps() {
    let node = Node::new();
    node.sh("ip link add hd0 type veth peer name far0");
    for plugin in ["bridge", "host-device", "host-local", "ptp", "tap"] {
        let container = Container::new();
        let mut conf = conf(&node);
        conf["name"] = json!(plugin);
        conf["device"] = json!("hd0");
        conf["dataDir"] = json!(node.path("devices"));
        for verb in ["ADD", "CHECK", "DEL"] {
            let call = node.call(plugin, verb).conf(&conf).netns(&container.path());
            let (outcome, calls) = strace::record(&node, &call);
            assert_eq!(outcome.status, Some(0), "{plugin} {verb}: {outcome:?}");
            assert!(calls.len() > 20, "nothing was recorded");
            assert_frugal(&format!("{plugin} {verb}"), &calls);
            if verb == "ADD" {
                conf["prevResult"] = serde_json::from_str(&outcome.stdout).unwrap();
            }
        }
    }
}

#[test]
fn del_leaves_it_to_the_kernel_to_close_what_it_deleted_through() {
    let node = Node::new();
    let container = Container::new();
    let conf = conf(&node);
    let call = |verb| node.call("bridge", verb).conf(&conf).netns(&container.path());
    call("ADD").result();
    let (outcome, calls) = strace::record(&node, &call("DEL"));
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    let named = |name: &'static str| calls.iter().filter(move |call| call.name == name);
    // What strace calls a descriptor: its number and `<socket:[inode]>`.
    let opened: Vec<&str> = named("socket")
        .filter(|call| call.text.contains("NETLINK_NETFILTER"))
        .map(|call| call.text.rsplit("= ").next().unwrap())
        .collect();
    assert!(!opened.is_empty(), "nothing was deleted from nf_tables");
    for socket in opened {
        let kept = |call: &&Syscall| {
            call.text.contains("IORING_REGISTER_FILES") && call.text.contains(socket)
        };
        let keeper = named("io_uring_register").find(kept).expect(socket);
        let ring = keeper.text.split(',').next().unwrap();
        let closed = |what| {
            let text = format!("{what})");
            calls.iter().rposition(|call| call.name == "close" && call.text.starts_with(&text))
        };
        assert!(closed(socket).is_some() && closed(socket) < closed(ring), "{calls:#?}");
    }
}

/// The names of the programs that a call starts.
fn started(node: &Node, call: &Call) -> Vec<String> {
    let (outcome, calls) = strace::record(node, call);
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    let programs = calls.iter().filter(|call| call.name == "execve").skip(1);
    let name = |call: &Syscall| {
        let path = call.text.split('"').nth(1).unwrap_or_default();
        path.rsplit('/').next().unwrap_or_default().to_owned()
    };
    programs.map(name).collect()
}

#[test]
fn del_of_what_is_known_reads_no_table_of_iptables() {
    let node = Node::new();
    let container = Container::new();
    let mut conf = conf(&node);
    conf["ipMasqBackend"] = json!("iptables");
    let call =
        |plugin, verb, conf: &Value| node.call(plugin, verb).conf(conf).netns(&container.path());
    conf["prevResult"] = call("bridge", "ADD", &conf).result();
    let prev = &conf["prevResult"];
    let ports = json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]);
    let portmap = json!({"name": "n", "cniVersion": "1.0.0", "backend": "iptables",
        "prevResult": prev, "runtimeConfig": {"portMappings": ports}});
    let firewall = json!({"name": "n", "cniVersion": "1.0.0", "backend": "iptables",
        "prevResult": prev});
    call("portmap", "ADD", &portmap).result();
    call("firewall", "ADD", &firewall).result();
    let once_each = ["iptables-nft-restore", "ip6tables-nft-restore"];
    for (plugin, conf) in [("firewall", &firewall), ("portmap", &portmap), ("bridge", &conf)] {
        assert_eq!(started(&node, &call(plugin, "DEL", conf)), once_each, "{plugin}");
    }
    let left = node.sh("iptables-nft-save; ip6tables-nft-save");
    assert!(!left.contains("10.1.0.2") && !left.contains("fd00:1::2"), "{left}");
}

#[test]
fn version_reads_no_stdin_and_opens_no_socket() {
    let node = Node::new();
    for plugin in ["bridge", "ptp", "host-local", "loopback"] {
        let (outcome, calls) = strace::record(&node, &node.call(plugin, "VERSION"));
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        assert_frugal(plugin, &calls);
        let greedy = calls.iter().find(|call| {
            let reads_stdin = call.name == "read" && call.text.starts_with("0<");
            reads_stdin || matches!(call.name.as_str(), "socket" | "setns" | "clone3" | "flock")
        });
        assert!(greedy.is_none(), "{plugin}: {greedy:?}");
    }
}

/// The most memory the process has had, and what is its own of it, in kilobytes, when it writes its
/// result: that waits for room in a pipe that is full.
fn peak(call: &Call, input: &Value) -> [u64; 2] {
    let (mut reader, mut writer) = pipe().unwrap();
    // The capacity of a pipe, pipe(7).
    writer.write_all(&vec![b' '; 65536]).unwrap();
    let mut child = call.command().stdout(Stdio::from(writer)).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input.to_string().as_bytes()).unwrap();
    let proc = format!("/proc/{}", child.id());
    eventually("the result is written", || {
        fs::read_to_string(format!("{proc}/wchan")).unwrap().contains("pipe_w")
    });
    let status = fs::read_to_string(format!("{proc}/status")).unwrap();
    let kilobytes = ["VmHWM:", "RssAnon:"].map(|key| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    });
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert!(child.wait().unwrap().success(), "{text}");
    kilobytes
}

#[test]
fn a_dual_stack_add_stays_small() {
    let node = Node::new();
    let container = Container::new();
    let conf = conf(&node);
    let [peak, own] = peak(&node.call("bridge", "ADD").netns(&container.path()), &conf);
    println!("footprint: bridge ADD has had {peak} kB in memory at most, {own} kB its own");
    if std::env::var_os("CNIBOX_BIN").is_none() {
        println!("SKIP footprint: {PEAK} kB are for a release; set CNIBOX_BIN");
        return;
    }
    assert!(peak < PEAK && own < OWN, "{peak} kB, {own} kB its own");
}
