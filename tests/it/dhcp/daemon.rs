//! The daemon's life cycle: start, termination, restart, and its socket.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;
use std::thread;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;

use super::world::{Process, World, addresses};
use crate::support::node::{Container, eventually};

#[test]
fn leases_survive_the_daemon_being_killed() {
    let world = World::new();
    let _server = world.isc(8);
    let mut daemon = world.daemon(&[]);
    let (net, container) = (world.net("1.1.0"), Container::new());
    let result = net.add(&container);
    for round in 1..3 {
        daemon.signal(Signal::SIGKILL);
        daemon.wait();
        assert!(world.socket().exists(), "a stale socket is part of the test");
        daemon = world.daemon(&[]);
        net.check(&container, &result).ok();
        let before = world.isc_log().matches("DHCPACK on 192.168.1.5").count();
        eventually("it is not renewed", || {
            world.isc_log().matches("DHCPACK on 192.168.1.5").count() > before
        });
        assert!(world.daemon_log().matches("ready, with 1 leases").count() == round);
        assert_eq!(addresses(&container), ["192.168.1.5/24"]);
        assert!(container.pings("192.168.1.1"));
    }
    assert_eq!(world.isc_log().matches("DHCPDISCOVER").count(), 1, "{}", world.isc_log());
    net.del(&container);
    eventually("no release", || world.isc_log().contains("DHCPRELEASE of 192.168.1.5"));
}

#[test]
fn sigterm_keeps_leases_and_removes_the_socket() {
    let world = World::new();
    let _server = world.dnsmasq(9, &[]);
    let pidfile = world.node.path("pid/x.pid");
    let mut daemon = world.daemon(&["-pidfile", &pidfile.display().to_string()]);
    assert_eq!(fs::read_to_string(&pidfile).unwrap(), daemon.id().to_string());
    let container = world.wired("v1");
    let net = world.alone("1.1.0");
    net.add(&container);
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.wait(), Some(0));
    assert!(!world.socket().exists() && !pidfile.exists());
    assert_eq!((world.leased().len(), world.records().len()), (1, 1));
    // DEL without a daemon releases the lease itself, with a warning.
    let outcome = net.on("DEL", &container).run();
    assert_eq!((outcome.status, outcome.stdout.as_str()), (Some(0), ""));
    assert!(outcome.stderr.contains("error dialing DHCP daemon"), "{outcome:?}");
    world.leases_become(&[]);
    assert!(world.records().is_empty());
}

#[test]
fn gc_releases_leases_without_the_daemon() {
    let world = World::new();
    let _server = world.dnsmasq(9, &[]);
    let daemon = world.daemon(&[]);
    let (one, two) = (world.wired("v1"), world.wired("v2"));
    let net = world.alone("1.1.0");
    net.add(&one);
    net.call("ADD", "c2").netns(&two.path()).result();
    drop(daemon);
    let valid = json!([{"containerID": "c2", "ifname": "eth0"}]);
    let outcome = net.with(&json!({"cni.dev/valid-attachments": valid})).call("GC", "").run();
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    world.leases_become(&["192.168.1.6"]);
    assert_eq!(world.records().len(), 1);
}

#[test]
fn leases_of_namespaces_that_are_gone_are_forgotten() {
    let world = World::new();
    let _server = world.dnsmasq(9, &[]);
    let daemon = world.daemon(&[]);
    let (one, two) = (world.wired("v1"), world.wired("v2"));
    let net = world.alone("1.1.0");
    net.add(&one);
    net.call("ADD", "c2").netns(&two.path()).result();
    assert_eq!(world.records().len(), 2);
    drop((daemon, one));
    two.sh("ip link del eth0");
    let _daemon = world.daemon(&[]);
    eventually("the records stay", || world.records().is_empty());
    net.call("DEL", "c1").ok();
}

#[test]
fn without_a_daemon_the_error_says_how_to_start_it() {
    let world = World::new();
    let container = world.wired("v1");
    let net = world.alone("1.1.0");
    let socket = world.socket();
    let socket = socket.display();
    let msg = format!(
        "error dialing DHCP daemon: dial unix {socket}: connect: no such file or directory"
    );
    let remedy = format!(
        "start it with \"dhcp daemon -socketpath {socket}\" or its systemd units, or set \"startDaemon\" in \"ipam\""
    );
    for (verb, code) in [("ADD", 999), ("CHECK", 999), ("STATUS", 50)] {
        let error = net.on(verb, &container).error();
        assert_eq!(error.brief(), (code, msg.as_str()), "{verb}");
        assert_eq!(error.details, remedy);
    }
    let outcome = net.on("DEL", &container).run();
    assert_eq!((outcome.status, outcome.stdout.as_str()), (Some(0), ""));
    let daemon = world.daemon(&[]);
    net.call("STATUS", "").ok();
    drop(daemon);
    let error = net.on("ADD", &container).error();
    assert!(error.msg.ends_with("connect: connection refused"), "{error:?}");
    assert!(world.node.ip("link show type veth")[0]["ifname"] == "v1");
}

/// The process of a pidfile, terminated on drop.
pub(super) struct Started(pub(super) PathBuf);

impl Drop for Started {
    fn drop(&mut self) {
        // A missing pidfile means that the process has exited.
        let pid = fs::read_to_string(&self.0).ok().and_then(|text| text.parse().ok());
        if let Some(pid) = pid {
            kill(Pid::from_raw(pid), Signal::SIGKILL).ok();
        }
    }
}

#[test]
fn the_example_of_the_dhcp_page_works() {
    let world = World::new();
    let _server = world.dnsmasq(9, &[]);
    let _ends_with_the_test = Started("/run/cni/dhcp/pid".into());
    crate::examples::works(&world.node, crate::examples::page!("dhcp"));
}

#[test]
fn the_daemon_is_started_on_demand_once() {
    let world = World::new();
    let _server = world.dnsmasq(9, &[]);
    let containers = ["v1", "v2", "v3", "v4"].map(|port| world.wired(port));
    let socket = world.own_run();
    let keys = json!({"startDaemon": true, "daemonSocketPath": socket});
    let net = world.alone("1.1.0").with(&json!({"ipam": world.ipam(&keys)}));
    net.call("STATUS", "").ok();
    assert!(!socket.exists(), "STATUS changes nothing");
    thread::scope(|scope| {
        for (n, container) in containers.iter().enumerate() {
            let call = net.call("ADD", &format!("c{n}")).netns(&container.path());
            scope.spawn(move || call.result());
        }
    });
    assert_eq!(world.leased().len(), 4);
    let pidfile = PathBuf::from("/run/cni/dhcp/pid");
    let _ends_with_the_test = Started(pidfile.clone());
    let pid = || Pid::from_raw(fs::read_to_string(&pidfile).unwrap().parse().unwrap());
    let first = pid();
    // The daemon has its own session and process group, and no inherited stdio.
    let stat = fs::read_to_string(format!("/proc/{first}/stat")).unwrap();
    let words: Vec<_> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    assert_eq!(words[3], first.to_string(), "{stat}");
    for fd in 0..3 {
        let target = fs::read_link(format!("/proc/{first}/fd/{fd}")).unwrap();
        assert_eq!(target.to_str(), Some("/dev/null"), "{fd}");
    }
    kill(first, Signal::SIGKILL).unwrap();
    eventually("it lives", || UnixStream::connect(&socket).is_err());
    // The next ADD starts a new daemon, which loads the leases.
    let again = net.call("ADD", "c0").netns(&containers[0].path()).result();
    assert_ne!(pid(), first);
    assert_eq!(again["ips"][0]["address"].as_str().unwrap().len(), "192.168.1.5/24".len());
    assert_eq!(world.leased().len(), 4);
    for n in 0..4 {
        net.call("DEL", &format!("c{n}")).ok();
    }
    world.leases_become(&[]);
    kill(pid(), Signal::SIGTERM).unwrap();
    eventually("it lives", || !socket.exists());
}

#[test]
fn a_second_daemon_is_refused_and_the_socket_is_roots() {
    let world = World::new();
    let daemon = world.daemon(&[]);
    let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(world.socket()), 0o600);
    assert_eq!(mode(world.node.path("run/dhcp")), 0o700);
    let dhcp = world.node.bin().join("dhcp");
    let second = |args: &[&str]| {
        let socket = world.socket();
        let mut command = Command::new(&dhcp);
        let output = command.arg("daemon").arg("-socketpath").arg(socket).args(args).output();
        let output = output.unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    };
    let (code, said) = second(&[]);
    assert_eq!(code, Some(1));
    assert!(said.contains("another daemon keeps the leases"), "{said}");
    let (code, said) = second(&["-pidfile", "x"]);
    assert_eq!(
        (code, said.as_str()),
        (Some(1), "Error writing pidfile \"x\": path not absolute\n")
    );
    assert_eq!(second(&["-h"]).0, Some(0));
    assert_eq!(second(&["--nonsense"]).0, Some(2));
    assert_eq!(world.alone("1.1.0").call("STATUS", "").run().status, Some(0), "the first serves");
    // The daemon rejects other users even if the mode of the socket admits them.
    fs::set_permissions(world.socket(), fs::Permissions::from_mode(0o666)).unwrap();
    let script = format!(
        "use IO::Socket::UNIX; $> = 65534; $SIG{{PIPE}} = 'IGNORE'; \
         $s = IO::Socket::UNIX->new('{}') or die; print $s '{{}}', \"\\n\"; print <$s>;",
        world.socket().display()
    );
    for dir in [world.node.path(""), world.node.path("run")] {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let output = Command::new("perl").args(["-e", &script]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(said.contains("user 65534 may not ask for leases"), "{said} {output:?}");
    drop(daemon);
    // A foreign socket with a live listener is not replaced.
    fs::remove_file(world.socket()).unwrap();
    let _other = UnixListener::bind(world.socket()).unwrap();
    let (code, said) = second(&[]);
    assert_eq!(code, Some(1));
    assert!(said.contains("Error getting listener: listen unix"), "{said}");
}

#[test]
fn the_daemon_of_the_reference_is_named() {
    let world = World::new();
    fs::create_dir_all(world.node.path("run")).unwrap();
    let listener = UnixListener::bind(world.socket()).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            stream.read_exact(&mut [0]).unwrap();
            stream.write_all(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n").unwrap();
        }
    });
    let (net, container) = (world.net("1.1.0"), Container::new());
    for (verb, method) in [("ADD", "Allocate"), ("DEL", "Release")] {
        let error = net.on(verb, &container).error();
        let msg = format!(
            "error calling DHCP.{method}: the DHCP daemon is that of the reference plugins"
        );
        assert_eq!(error.brief(), (11, msg.as_str()));
    }
}

#[test]
fn a_socket_of_systemd_is_used_and_kept() {
    let world = World::new();
    fs::create_dir_all(world.node.path("run")).unwrap();
    let script = "use IO::Socket::UNIX; use POSIX; $^F = 99; \
        $s = IO::Socket::UNIX->new(Local => $ARGV[0], Listen => 5) or die; \
        POSIX::dup2(fileno($s), 3); $ENV{LISTEN_PID} = $$; $ENV{LISTEN_FDS} = 1; \
        exec $ARGV[1], 'daemon', '-socketpath', $ARGV[0];";
    let mut command = Command::new("perl");
    command.args(["-e", script]).arg(world.socket()).arg(world.node.bin().join("dhcp"));
    let mut daemon = Process::start(&mut command, &world.node.path("daemon.log"));
    let status = || world.alone("1.1.0").call("STATUS", "").run().status;
    eventually("it does not serve", || status() == Some(0));
    assert!(world.daemon_log().contains("ready"), "{}", world.daemon_log());
    daemon.signal(Signal::SIGINT);
    assert_eq!(daemon.wait(), Some(0));
    assert!(world.socket().exists(), "it is systemd's");
}

#[test]
fn hostprefix_applies_to_socket_and_namespaces() {
    let world = World::new();
    let _server = world.dnsmasq(9, &[]);
    let host = world.node.path("host");
    fs::create_dir(&host).unwrap();
    let mut command = Command::new(world.node.bin().join("dhcp"));
    let prefix = host.display().to_string();
    command.args(["daemon", "-hostprefix", &prefix, "-socketpath", "/run/dhcp.sock"]);
    let _daemon = Process::start(&mut command, &world.node.path("daemon.log"));
    let socket = host.join("run/dhcp.sock");
    eventually("it does not listen", || UnixStream::connect(&socket).is_ok());
    let container = world.wired("v1");
    let net =
        world.alone("1.1.0").with(&json!({"ipam": {"type": "dhcp", "daemonSocketPath": socket}}));
    // The daemon resolves the path of a mount below the prefix.
    let mount = world.mounted(&container, "netns");
    let mounted = net.call("ADD", "c1").netns(&mount);
    let error = mounted.error();
    assert!(error.msg.contains(&format!("failed to Statfs \"{prefix}/tmp/")), "{error:?}");
    std::os::unix::fs::symlink("/tmp", host.join("tmp")).unwrap();
    mounted.result();
    net.call("DEL", "c1").ok();
    // The plugin opens the namespaces of processes.
    net.add(&container);
    net.del(&container);
    world.leases_become(&[]);
}

#[test]
fn garbage_on_the_socket_is_refused() {
    let world = World::new();
    let _server = world.dnsmasq(9, &[]);
    let mut daemon = world.daemon(&[]);
    let talk = |bytes: &[u8]| {
        let mut stream = UnixStream::connect(world.socket()).unwrap();
        // The daemon may close the connection before it has read everything.
        drop(stream.write_all(bytes));
        if !bytes.ends_with(b"\n") {
            drop(stream.shutdown(std::net::Shutdown::Write));
        }
        let mut said = Vec::new();
        drop(stream.read_to_end(&mut said));
        String::from_utf8_lossy(&said).into_owned()
    };
    assert!(talk(b"CONNECT /_goRPC_ HTTP/1.0\n\n").starts_with("HTTP/1.0 501 "));
    assert!(talk(b"{}\n").contains("\"code\":1"));
    assert!(talk(b"\xff\xfe\n").contains("\"code\":6"));
    assert!(talk(b"{\"version\":1,\"verb\":\"add\"}\n").contains("error"));
    assert_eq!(talk(b""), "");
    assert_eq!(talk(b"{\"version\":1"), "");
    assert_eq!(talk(&vec![b'x'; 4 << 20]), "");
    let nested = [vec![b'['; 100_000], vec![b'\n']].concat();
    assert!(talk(&nested).contains("\"code\":6"));
    let netns = "{\"version\":1,\"verb\":\"add\",\"families\":[\"ipv4\"],\"key\":{\"ifname\":\"lo\"},\"netns\":\"/etc/passwd\"}\n";
    assert!(talk(netns.as_bytes()).contains("unknown FS magic"));
    let idle: Vec<_> = (0..200).map(|_| UnixStream::connect(world.socket()).unwrap()).collect();
    let container = world.wired("v1");
    let net = world.alone("1.1.0");
    net.add(&container);
    net.del(&container);
    drop(idle);
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.wait(), Some(0));
}

/// The retained capabilities: `NET_BIND_SERVICE`, `NET_ADMIN`, `NET_RAW`, `SYS_ADMIN`.
const KEPT: u64 = 1 << 10 | 1 << 12 | 1 << 13 | 1 << 21;

#[test]
fn the_daemon_drops_privileges() {
    let world = World::new();
    let daemon = world.daemon(&[]);
    // The daemon listens before it drops its privileges; only then is it ready.
    world.alone("1.1.0").call("STATUS", "").ok();
    let status = fs::read_to_string(format!("/proc/{}/status", daemon.id())).unwrap();
    let own = fs::read_to_string("/proc/self/status").unwrap();
    let field = |status: &str, name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        u64::from_str_radix(line.unwrap().trim_start_matches([':', '\t']), 16).unwrap()
    };
    for (name, expected) in [
        ("CapInh", 0),
        ("CapPrm", KEPT & field(&own, "CapPrm")),
        ("CapEff", KEPT & field(&own, "CapPrm")),
        ("CapBnd", KEPT & field(&own, "CapBnd")),
        ("CapAmb", 0),
        ("NoNewPrivs", 1),
        ("Seccomp", 2),
    ] {
        assert_eq!(field(&status, name), expected, "{name} {status}");
    }
}
