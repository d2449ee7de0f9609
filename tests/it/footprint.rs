//! Resource use of a call: no other program, process or thread, no sleep, little memory. DEL of an
//! interface has one child, which waits for the kernel, where process 1 reaps it (`detached`).

use std::fs;
use std::io::{Read, Write, pipe};
use std::process::Stdio;

use serde_json::{Value, json};

use crate::support::node::{Call, Container, Node, Outcome, eventually};
use crate::support::strace::{self, Syscall};

/// Limit of an ADD's peak resident memory (`VmHWM`) in kB, mostly shared pages of the executable.
/// The executable's state in the page cache changes it by 200 kB.
const PEAK: u64 = 4352;
/// Limit of the anonymous part (`RssAnon`) in kB, including relocated pages of the
/// position-independent executable (decision 14) and the buffers of netfilter dumps. Address space
/// randomisation adds up to 64 kB by fault-around.
const OWN: u64 = 448;

fn conf(node: &Node) -> Value {
    let ipam = node.host_local(&["10.1.0.0/24", "fd00:1::/64"]);
    json!({"name": "n", "cniVersion": "1.0.0", "isDefaultGateway": true, "ipam": ipam,
           "ipMasq": true, "ipMasqBackend": "nftables", "macspoofchk": true})
}

fn assert_frugal(what: &str, calls: &[Syscall], children: usize) {
    let named = |names: &[&str]| -> Vec<String> {
        let named = calls.iter().filter(|call| names.contains(&call.name.as_str()));
        named.map(|call| format!("{}({}", call.name, call.text)).collect()
    };
    let programs = named(&["execve", "execveat"]);
    assert_eq!(programs.len(), 1, "{what} executes: {programs:#?}");
    let born = named(&["fork", "vfork", "clone", "clone3"]);
    assert!(born.len() <= children, "{what} starts processes or threads: {born:#?}");
    let sleeps = named(&["nanosleep", "clock_nanosleep"]);
    assert!(sleeps.is_empty(), "{what} sleeps: {sleeps:#?}");
}

#[test]
fn no_verb_starts_a_program_or_a_thread_or_sleeps() {
    let node = Node::new();
    node.sh("ip link add hd0 type veth peer name far0");
    for plugin in ["bridge", "host-device", "host-local", "ptp", "tap"] {
        let container = Container::new();
        let mut conf = conf(&node);
        conf["name"] = json!(plugin);
        conf["device"] = json!("hd0");
        for verb in ["ADD", "CHECK", "DEL"] {
            let call = node.call(plugin, verb).conf(&conf).netns(&container.path());
            let (outcome, calls) = strace::record(&node, &call);
            assert_eq!(outcome.status, Some(0), "{plugin} {verb}: {outcome:?}");
            assert!(calls.iter().any(|call| call.verb() == "open"), "nothing was recorded");
            let deletes_link = verb == "DEL" && !["host-device", "host-local"].contains(&plugin);
            assert_frugal(&format!("{plugin} {verb}"), &calls, usize::from(deletes_link));
            if verb == "ADD" {
                conf["prevResult"] = serde_json::from_str(&outcome.stdout).unwrap();
            }
        }
    }
}

#[test]
fn del_leaves_closing_its_deleting_sockets_to_the_kernel() {
    let node = Node::new();
    let container = Container::new();
    let conf = conf(&node);
    let call = |verb| node.call("bridge", verb).conf(&conf).netns(&container.path());
    call("ADD").result();
    let (outcome, calls) = strace::record(&node, &call("DEL"));
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    let named = |name: &'static str| calls.iter().filter(move |call| call.name == name);
    // strace prints a socket descriptor as its number and `<socket:[inode]>`.
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

/// A successful call, and the names of the programs that it executes.
fn started(node: &Node, call: &Call) -> (Outcome, Vec<String>) {
    let (outcome, calls) = strace::record(node, call);
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    let programs = calls.iter().filter(|call| call.name == "execve").skip(1);
    let name = |call: &Syscall| {
        let path = call.text.split('"').nth(1).unwrap_or_default();
        path.rsplit('/').next().unwrap_or_default().to_owned()
    };
    (outcome, programs.map(name).collect())
}

/// Lists the iptables rules.
const RULES: &str = "iptables -t nat -S; iptables -S; ip6tables -t nat -S; ip6tables -S";

/// A host with masqueraded, port-mapped and firewalled containers, all by iptables.
struct Filtered<'a> {
    node: &'a Node,
    bridge: Value,
}

impl<'a> Filtered<'a> {
    fn new(node: &'a Node) -> Filtered<'a> {
        let mut bridge = conf(node);
        bridge["ipMasqBackend"] = json!("iptables");
        Filtered { node, bridge }
    }

    /// The plugins behind bridge, with their configurations.
    fn chained(prev: &Value, port: u16) -> [(&'static str, Value); 2] {
        let ports = json!([{"hostPort": port, "containerPort": 80, "protocol": "tcp"}]);
        let conf = json!({"name": "n", "cniVersion": "1.0.0", "backend": "iptables",
            "prevResult": prev});
        let mut portmap = conf.clone();
        portmap["runtimeConfig"] = json!({"portMappings": ports});
        [("portmap", portmap), ("firewall", conf)]
    }

    /// Attaches a new container with this port; returns the programs executed by each plugin.
    fn add(&self, port: u16) -> Vec<(&'static str, String)> {
        let (container, id) = (Container::new(), format!("c{port}"));
        let run = |plugin, conf: &Value| {
            let call = self.node.call(plugin, "ADD").conf(conf).netns(&container.path()).id(&id);
            started(self.node, &call)
        };
        let (outcome, names) = run("bridge", &self.bridge);
        let prev = serde_json::from_str(&outcome.stdout).unwrap();
        let mut all = vec![("bridge", names.join(" "))];
        for (plugin, conf) in Self::chained(&prev, port) {
            all.push((plugin, run(plugin, &conf).1.join(" ")));
        }
        all
    }
}

#[test]
fn add_starts_no_program_for_iptables() {
    let node = Node::new();
    let host = Filtered::new(&node);
    let nothing = ["bridge", "portmap", "firewall"].map(|plugin| (plugin, String::new()));
    for port in [8080, 8081] {
        assert_eq!(host.add(port), nothing, "{port}");
    }
    let rules = node.sh(RULES);
    for ends in [
        "DNAT --to-destination 10.1.0.3:80",
        "DNAT --to-destination [fd00:1::3]:80",
        "-A CNI-FORWARD -s 10.1.0.3/32 -j ACCEPT",
        "-A CNI-FORWARD -s fd00:1::3/128 -j ACCEPT",
    ] {
        assert_eq!(rules.lines().filter(|line| line.ends_with(ends)).count(), 1, "{ends}: {rules}");
    }
    assert_eq!(rules.matches("-A POSTROUTING -s 10.1.0.3/32 ").count(), 1, "{rules}");
}

/// The second container's ADD examines, for each family, the record and the link of the first,
/// which show whether the rules were flushed.
#[test]
fn a_chain_opens_few_sockets_and_reads_few_records() {
    let node = Node::new();
    let host = Filtered::new(&node);
    host.add(8080);
    let container = Container::new();
    let add = |plugin, conf: &Value| {
        let call = node.call(plugin, "ADD").conf(conf).netns(&container.path()).id("c2");
        let (outcome, calls) = strace::record(&node, &call);
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        let sockets = calls.iter().filter(|call| call.name == "socket").count();
        let is_record = |call: &&Syscall| {
            call.name.starts_with("open")
                && call.text.contains("/attachments/")
                && call.text.contains("RDONLY")
        };
        (outcome, [sockets, calls.iter().filter(is_record).count()])
    };
    let (outcome, of_bridge) = add("bridge", &host.bridge);
    let prev = serde_json::from_str(&outcome.stdout).unwrap();
    let [(_, portmap), _] = Filtered::chained(&prev, 8081);
    let (_, of_portmap) = add("portmap", &portmap);
    for (what, found, most) in [("bridge", of_bridge, [11, 6]), ("portmap", of_portmap, [7, 4])] {
        let is_few = found.iter().zip(most).all(|(found, most)| *found <= most);
        assert!(is_few, "{what}: {found:?} sockets and reads of records, more than {most:?}");
    }
}

#[test]
fn add_restores_unexpected_shared_state() {
    let node = Node::new();
    let host = Filtered::new(&node);
    // Rules shared by all containers.
    let shared = || {
        let of_one = ["CNI-DN-", " id: ", "10.1.0.", "fd00:1::"];
        let mut lines: Vec<_> = node.sh(RULES).lines().map(str::to_owned).collect();
        lines
            .retain(|line| line.contains("CNI-") && !of_one.iter().any(|part| line.contains(part)));
        lines.retain(|line| !line.starts_with("-N "));
        lines.sort();
        lines
    };
    host.add(8080);
    let whole = shared();
    for (damage, port) in [
        ("-t nat -D PREROUTING -m addrtype --dst-type LOCAL -j CNI-HOSTPORT-DNAT", 8081),
        ("-t nat -F CNI-HOSTPORT-SETMARK", 8082),
        ("-D FORWARD -m comment --comment 'CNI firewall plugin rules' -j CNI-FORWARD", 8083),
        ("-F CNI-FORWARD", 8084),
    ] {
        for family in ["iptables", "ip6tables"] {
            node.sh(&format!("{family} {damage}"));
        }
        assert_ne!(shared(), whole, "{damage} does nothing");
        host.add(port);
        assert_eq!(shared(), whole, "{damage}");
    }
}

#[test]
fn del_starts_no_program_for_iptables() {
    let node = Node::new();
    let container = Container::new();
    let mut conf = Filtered::new(&node).bridge;
    let call =
        |plugin, verb, conf: &Value| node.call(plugin, verb).conf(conf).netns(&container.path());
    conf["prevResult"] = call("bridge", "ADD", &conf).result();
    let [portmap, firewall] = Filtered::chained(&conf["prevResult"], 8080);
    for (plugin, conf) in [&portmap, &firewall] {
        call(plugin, "ADD", conf).result();
    }
    for (plugin, conf) in [firewall, portmap, ("bridge", conf)] {
        let started = started(&node, &call(plugin, "DEL", &conf)).1;
        assert!(started.is_empty(), "{plugin}: {started:?}");
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
        assert_frugal(plugin, &calls, 0);
        let greedy = calls.iter().find(|call| {
            let reads_stdin = call.name == "read" && call.text.starts_with("0<");
            reads_stdin
                || matches!(
                    call.name.as_str(),
                    "socket" | "setns" | "clone3" | "clone" | "fork" | "flock"
                )
        });
        assert!(greedy.is_none(), "{plugin}: {greedy:?}");
    }
}

/// `VmHWM` and `RssAnon` in kB, read while the process is blocked on writing its result to a full
/// pipe.
fn peak(call: &Call, input: &Value) -> [u64; 2] {
    let (mut reader, mut writer) = pipe().unwrap();
    // The default capacity of a pipe, pipe(7).
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
    // Pages of a file that a linker has just written are mapped in larger units.
    let plugin = node.bin().join("bridge").display().to_string();
    node.sh(&format!("cp --remove-destination $(readlink -f {plugin}) {plugin}"));
    let [peak, own] = peak(&node.call("bridge", "ADD").netns(&container.path()), &conf);
    println!("footprint: bridge ADD has had {peak} kB in memory at most, {own} kB its own");
    if std::env::var_os("CNIBOX_BIN").is_none() {
        println!("SKIP footprint: {PEAK} kB are for a release; set CNIBOX_BIN");
        return;
    }
    assert!(peak < PEAK && own < OWN, "{peak} kB, {own} kB its own");
}
