//! A node with the bridge `br0` (192.168.1.1/24), DHCP servers on it, and the daemon.

use std::fs::{self, File};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::support::net::{Net, merged};
use crate::support::node::{Container, Node, eventually};

/// A process, terminated on drop by its own id.
pub(super) struct Process(Child);

impl Process {
    pub(super) fn start(command: &mut Command, log: &PathBuf) -> Process {
        let log = File::options().create(true).append(true).open(log).unwrap();
        let command = command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
        Process(command.spawn().unwrap_or_else(|e| panic!("{command:?}: {e}")))
    }

    pub(super) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.0.id().try_into().unwrap()), signal).unwrap();
    }

    /// Waits for the end of the process; returns its exit status.
    pub(super) fn wait(&mut self) -> Option<i32> {
        self.0.wait().unwrap().code()
    }

    pub(super) fn id(&self) -> u32 {
        self.0.id()
    }

    /// The path of the network namespace of the process.
    pub(super) fn netns(&self) -> String {
        format!("/proc/{}/ns/net", self.id())
    }

    /// Runs a shell command in the network namespace of the process.
    pub(super) fn sh(&self, command: &str) -> String {
        let netns = format!("--net={}", self.netns());
        let output = Command::new("nsenter").args([&netns, "sh", "-ec", command]).output().unwrap();
        assert!(output.status.success(), "{command}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Ends the process.
    pub(super) fn kill(&mut self) {
        self.signal(Signal::SIGKILL);
        self.wait();
    }

    /// The number of network namespaces that the process has open.
    pub(super) fn open_namespaces(&self) -> usize {
        let entries = fs::read_dir(format!("/proc/{}/fd", self.id())).unwrap();
        let links = entries.filter_map(|entry| fs::read_link(entry.unwrap().path()).ok());
        let names: Vec<_> = links.map(|link| link.display().to_string()).collect();
        names.iter().filter(|name| name.starts_with("net:[") || name.ends_with("/netns")).count()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

pub(super) struct World {
    pub(super) node: Node,
}

impl World {
    pub(super) fn new() -> World {
        let node = Node::new();
        node.sh("ip link add br0 address 02:00:00:00:01:01 type bridge && ip link set br0 up \
             && ip addr add 192.168.1.1/24 dev br0");
        World { node }
    }

    /// The same with `fd00:1::1/64` on the bridge. Duplicate address detection is off on the
    /// bridge, so that servers can reply as soon as its first port is up.
    pub(super) fn v6() -> World {
        let world = World::new();
        world.node.sh("ip link set br0 down \
             && echo 0 > /proc/sys/net/ipv6/conf/br0/accept_dad && ip link set br0 up \
             && ip addr add fd00:1::1/64 dev br0 nodad");
        world
    }

    /// Mounts a tmpfs on `/run` for this thread and its children, because daemons are started on
    /// demand below `/run/cni` only. Returns the path of the socket.
    pub(super) fn own_run(&self) -> PathBuf {
        unshare(CloneFlags::CLONE_NEWNS).unwrap();
        self.node.sh("mount --make-rprivate / && mount -t tmpfs tmpfs /run");
        "/run/cni/dhcp.sock".into()
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.node.path("run/dhcp.sock")
    }

    pub(super) fn records(&self) -> Vec<PathBuf> {
        let Ok(entries) = fs::read_dir(self.node.path("run/dhcp")) else { return Vec::new() };
        let paths = entries.map(|entry| entry.unwrap().path());
        paths.filter(|path| path.extension().is_some_and(|e| e == "json")).collect()
    }

    /// Starts the daemon and waits until it listens.
    pub(super) fn daemon(&self, args: &[&str]) -> Process {
        self.daemon_under(&[], args)
    }

    /// The same, started by another program, which replaces itself.
    pub(super) fn daemon_under(&self, starter: &[&str], args: &[&str]) -> Process {
        let dhcp = self.node.bin().join("dhcp").display().to_string();
        let line = [starter, &[dhcp.as_str(), "daemon", "-socketpath"]].concat();
        let mut command = Command::new(line[0]);
        command.args(&line[1..]).arg(self.socket()).args(args);
        let process = Process::start(&mut command, &self.node.path("daemon.log"));
        eventually("the daemon does not listen", || UnixStream::connect(self.socket()).is_ok());
        process
    }

    pub(super) fn daemon_log(&self) -> String {
        fs::read_to_string(self.node.path("daemon.log")).unwrap_or_default()
    }

    /// dnsmasq on the bridge with `addresses` addresses from 192.168.1.5 on, in sequence.
    pub(super) fn dnsmasq(&self, addresses: u8, args: &[&str]) -> Process {
        self.dnsmasq_random(addresses, &[args, &["--dhcp-sequential-ip"]].concat())
    }

    /// The same with a hashed first address for each client: in sequential mode dnsmasq offers one
    /// address to all concurrent clients.
    pub(super) fn dnsmasq_random(&self, addresses: u8, args: &[&str]) -> Process {
        let last = 4 + addresses;
        let range = format!("--dhcp-range=192.168.1.5,192.168.1.{last},2m");
        self.dnsmasq_of(&[&range], args)
    }

    /// dnsmasq with `addresses` addresses from `fd00:1::5` on, in sequence, and router
    /// advertisements.
    pub(super) fn dnsmasq_v6(&self, addresses: u16, args: &[&str]) -> Process {
        let range = range_v6(addresses);
        self.dnsmasq_of(&[&range, "--enable-ra", "--dhcp-sequential-ip"], args)
    }

    /// The same with addresses of both families.
    pub(super) fn dnsmasq_both(&self, addresses: u8) -> Process {
        self.dnsmasq(addresses, &[&range_v6(addresses.into()), "--enable-ra"])
    }

    fn dnsmasq_of(&self, ranges: &[&str], args: &[&str]) -> Process {
        let mut command = Command::new("dnsmasq");
        command.args([
            "--keep-in-foreground",
            "--log-facility=-",
            "--log-dhcp",
            "--conf-file=/dev/null",
            "--pid-file=",
            "--port=0",
            "--interface=br0",
            "--bind-interfaces",
            "--no-ping",
            "--dhcp-authoritative",
        ]);
        command.args(ranges);
        command.arg(format!("--dhcp-leasefile={}", self.node.path("dnsmasq.leases").display()));
        let log = self.node.path("dnsmasq.log");
        drop(fs::remove_file(&log));
        let process = Process::start(command.args(args), &log);
        eventually("dnsmasq does not start", || self.server_log().contains("sockets bound"));
        process
    }

    pub(super) fn server_log(&self) -> String {
        fs::read_to_string(self.node.path("dnsmasq.log")).unwrap_or_default()
    }

    /// Waits until exactly these addresses are leased; dnsmasq processes a release asynchronously.
    #[track_caller]
    pub(super) fn leases_become(&self, expected: &[&str]) {
        eventually(&format!("not {expected:?} but {:?}", self.leased()), || {
            self.leased() == expected
        });
    }

    /// The addresses leased by dnsmasq, sorted.
    pub(super) fn leased(&self) -> Vec<String> {
        let text = fs::read_to_string(self.node.path("dnsmasq.leases")).unwrap_or_default();
        let mut all: Vec<_> =
            text.lines().filter_map(|line| line.split(' ').nth(2)).map(str::to_owned).collect();
        all.sort();
        all
    }

    /// ISC dhcpd on the bridge with leases of `seconds` seconds.
    pub(super) fn isc(&self, seconds: u32) -> Process {
        let text = format!(
            "authoritative; ping-check false; min-lease-time {seconds}; max-lease-time {seconds};
             default-lease-time {seconds}; option routers 192.168.1.1;
             subnet 192.168.1.0 netmask 255.255.255.0 {{ range 192.168.1.5 192.168.1.200; }}"
        );
        self.dhcpd("-4", &text, "isc.leases")
    }

    /// ISC dhcpd for IPv6 with leases of `seconds` seconds and the lease file `name`.
    pub(super) fn isc_v6(&self, seconds: u32, name: &str) -> Process {
        let (renew, rebind) = (seconds / 3, seconds * 2 / 3);
        let text = format!(
            "authoritative; default-lease-time {seconds}; preferred-lifetime {seconds};
             option dhcp-renewal-time {renew}; option dhcp-rebinding-time {rebind};
             subnet6 fd00:1::/64 {{ range6 fd00:1::100 fd00:1::1ff; }}"
        );
        self.dhcpd("-6", &text, name)
    }

    /// ISC dhcpd of a family with this configuration and lease file.
    fn dhcpd(&self, family: &str, conf: &str, leases: &str) -> Process {
        let (path, leases) = (self.node.path("dhcpd.conf"), self.node.path(leases));
        fs::write(&path, conf).unwrap();
        drop(File::options().create(true).append(true).open(&leases).unwrap());
        let mut command = Command::new("dhcpd");
        command.args([family, "-f", "-d", "--no-pid", "-cf"]).arg(path).arg("-lf").arg(leases);
        let log = self.node.path("isc.log");
        drop(fs::remove_file(&log));
        let process = Process::start(command.arg("br0"), &log);
        eventually("dhcpd does not start", || self.isc_log().contains("Server starting service"));
        process
    }

    /// How many requests for 192.168.1.5 ISC dhcpd has granted.
    pub(super) fn granted(&self) -> usize {
        self.isc_log().matches("DHCPACK on 192.168.1.5").count()
    }

    /// Waits until the lease of 192.168.1.5 has been renewed twice from now on.
    #[track_caller]
    pub(super) fn is_renewed(&self) {
        let before = self.granted();
        eventually("it is not renewed", || self.granted() >= before + 2);
    }

    pub(super) fn isc_log(&self) -> String {
        fs::read_to_string(self.node.path("isc.log")).unwrap_or_default()
    }

    /// The IPAM configuration with more keys.
    pub(super) fn ipam(&self, keys: &Value) -> Value {
        merged(&json!({"type": "dhcp", "daemonSocketPath": self.socket()}), keys)
    }
    pub(super) fn net(&self, version: &'static str) -> Net<'_> {
        let keys = json!({"bridge": "br0", "ipam": self.ipam(&json!({}))});
        Net::new(&self.node, "bridge", version, &keys)
    }

    /// The same with leases of `family` ("ipv4", "ipv6" or "both").
    pub(super) fn net_of(&self, version: &'static str, family: &str) -> Net<'_> {
        self.net(version).with(&json!({"ipam": self.ipam(&json!({"family": family}))}))
    }

    /// The IPAM plugin alone, with leases of `family`.
    pub(super) fn alone_of(&self, family: &str) -> Net<'_> {
        self.alone("1.1.0").with(&json!({"ipam": self.ipam(&json!({"family": family}))}))
    }

    /// The IPAM plugin alone.
    pub(super) fn alone(&self, version: &'static str) -> Net<'_> {
        Net::new(&self.node, "dhcp", version, &json!({"ipam": self.ipam(&json!({}))}))
    }

    /// A container whose `eth0` is connected to the bridge without a plugin.
    pub(super) fn wired(&self, port: &str) -> Container {
        let container = Container::new();
        self.wire(&container, port, "eth0");
        container
    }

    /// A process in a namespace of its own, in which the shell command runs.
    pub(super) fn process(&self, command: &str) -> Process {
        let mut unshare = Command::new("unshare");
        let process = Process::start(
            unshare.args(["-n", "sh", "-c", command]),
            &self.node.path("process.log"),
        );
        let own = fs::read_link("/proc/thread-self/ns/net").unwrap();
        eventually("no namespace", || fs::read_link(process.netns()).unwrap() != own);
        process
    }

    /// The same, with `eth0` connected to the bridge.
    pub(super) fn wired_process(&self, port: &str, command: &str) -> Process {
        let process = self.process(command);
        self.node.sh(&format!(
            "ip link add {port} type veth peer name p{port} && ip link set {port} master br0 up"
        ));
        self.node.sh(&format!("ip link set p{port} netns {}", process.id()));
        process.sh(&format!("ip link set p{port} name eth0; ip link set eth0 up"));
        process
    }

    /// Mounts the container's namespace on a new file of the node's directory, as runtimes do, and
    /// returns the path.
    pub(super) fn mounted(&self, container: &Container, name: &str) -> String {
        self.mounted_at(&container.path(), name)
    }

    pub(super) fn mounted_at(&self, netns: &str, name: &str) -> String {
        let path = self.node.path(name).display().to_string();
        self.node.sh(&format!("touch {path} && mount --bind {netns} {path}"));
        path
    }

    pub(super) fn wire(&self, container: &Container, port: &str, ifname: &str) {
        self.node.sh(&format!(
            "ip link add {port} type veth peer name p{port} && ip link set {port} master br0 up"
        ));
        self.node.sh(&format!("ip link set p{port} netns {}", container.path()));
        container.sh(&format!("ip link set p{port} name {ifname}"));
        container.sh(&format!("ip link set {ifname} up"));
    }
}

fn range_v6(addresses: u16) -> String {
    format!("--dhcp-range=fd00:1::5,fd00:1::{:x},64,2m", 4 + addresses)
}

/// The global IPv6 addresses of `eth0`.
pub(super) fn addresses_v6(container: &Container) -> Vec<String> {
    crate::support::net::addresses(&container.ip("-6 addr show dev eth0"))
}

/// The IPv4 addresses of `eth0`.
pub(super) fn addresses(container: &Container) -> Vec<String> {
    crate::support::net::addresses(&container.ip("-4 addr show dev eth0"))
}
