//! The steps of docs/migration.md: containers of the reference plugins keep their network while a
//! node migrates to cnibox; cnibox checks and deletes them, and so does the reference after the way
//! back.
//!
//! `install` tests the directory, `parity` each plugin, `handover` the nftables state,
//! tests/runtimes a containerd node. Here a runtime's chain lives through the whole migration.

use std::fs;
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;

use crate::support::compare::peer;
use crate::support::node::{Call, Container, Node, assert_unchanged, executable};
use crate::support::traffic::{self, Place};

/// Sufficient even for a slow machine.
const LIMIT: Duration = Duration::from_secs(10);

/// A node with the reference plugins in a directory, a network that uses them, and another host.
struct Site {
    node: Node,
    directory: PathBuf,
    outside: Container,
}

/// A container, the host port mapped to it, and its address.
struct Pod {
    container: Container,
    port: u16,
    ip: String,
}

impl Site {
    fn new(directory: PathBuf, node: Node) -> Site {
        let outside = Container::new();
        node.sh(&format!("ip link add out0 type veth peer name eth0 netns {}", outside.path()));
        node.sh("ip addr add 192.0.2.1/24 dev out0; ip link set out0 up");
        outside.sh("ip addr add 192.0.2.2/24 dev eth0");
        outside.sh("ip link set eth0 up");
        let site = Site { node, directory, outside };
        let list = json!({"cniVersion": "0.4.0", "name": "pods", "plugins": [
            {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true,
                "hairpinMode": true, "ipam": site.ipam()},
            {"type": "portmap", "capabilities": {"portMappings": true}},
            {"type": "firewall", "backend": "iptables"},
            {"type": "tuning", "sysctl": {"net.core.somaxconn": "500"}, "dataDir": site.node.state("tuning")},
        ]});
        fs::create_dir(site.node.path("net.d")).unwrap();
        fs::write(site.node.path("net.d/10-pods.conflist"), list.to_string()).unwrap();
        site
    }

    fn ipam(&self) -> serde_json::Value {
        let mut ipam = self.node.host_local(&["10.1.2.0/24", "2001:db8:1::/64"]);
        ipam["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
        ipam
    }

    fn state(&self, name: &str) -> String {
        self.node.path(name).display().to_string()
    }

    /// A call by the runtime: uses the plugins currently in the directory.
    fn call(&self, verb: &str, netns: &str, port: u16) -> Call {
        let cache = self.state("cache");
        let ports = json!({"portMappings":
            [{"hostPort": port, "containerPort": 80, "protocol": "tcp"}]});
        self.node
            .tool("cnitool", &[verb, "pods", netns, "--cache-dir", &cache])
            .env("NETCONFPATH", &self.state("net.d"))
            .env("CNI_PATH", &self.directory.display().to_string())
            .env("CAP_ARGS", &ports.to_string())
    }

    fn add(&self, port: u16) -> Pod {
        let container = Container::new();
        let result = self.call("add", &container.path(), port).result();
        let ip = result["ips"][0]["address"].as_str().unwrap();
        let ip = ip.split('/').next().unwrap().to_owned();
        Pod { container, port, ip }
    }

    #[track_caller]
    fn check(&self, pod: &Pod) {
        self.call("check", &pod.container.path(), pod.port).ok();
    }

    #[track_caller]
    fn del(&self, pod: &Pod) {
        self.call("del", &pod.container.path(), pod.port).ok();
        let rules = self.node.sh("nft -s list ruleset 2>/dev/null");
        for left in [&pod.ip, &format!("dport {} ", pod.port)] {
            assert!(!rules.contains(left.as_str()), "{left}: {rules}");
        }
        assert!(!self.node.leases("pods").contains(&pod.ip));
        assert!(!pod.container.try_sh("ip link show eth0"), "the interface is gone");
    }

    /// The mapped port answers the other host, outgoing packets have the host's address, and the
    /// container reaches its gateway in both families.
    #[track_caller]
    fn works(&self, pod: &Pod) {
        let listener = pod.container.within(|| TcpListener::bind("0.0.0.0:80"));
        let target = format!("192.0.2.1:{}", pod.port).parse().unwrap();
        let connect = || TcpStream::connect_timeout(&target, LIMIT);
        self.outside.within(connect).unwrap_or_else(|e| panic!("port {}: {e}", pod.port));
        drop(listener);
        let seen = traffic::udp(&pod.container, &self.outside, "192.0.2.2");
        assert_eq!(seen.to_string(), "192.0.2.1", "{} is masqueraded", pod.ip);
        assert!(pod.container.pings("2001:db8:1::1"), "{} has IPv6", pod.ip);
        assert_eq!(pod.container.sysctl("net/core/somaxconn"), "500");
    }

    /// `cnibox <command> <directory>`.
    #[track_caller]
    fn cnibox(&self, command: &str) {
        let directory = self.directory.display().to_string();
        let call = self.node.tool("cnibox", &[command, &directory]).program(executable());
        call.without("DESTDIR").printed();
    }

    #[track_caller]
    fn plugins_are_cnibox(&self, expected: bool) {
        for name in ["bridge", "host-local", "portmap", "firewall", "tuning"] {
            let about = self.node.tool(name, &[]).program(self.directory.join(name)).run().stderr;
            assert_eq!(about.contains("+cnibox."), expected, "{name}: {about}");
        }
    }
}

/// The whole migration, for a directory that `fill` populates with reference plugins.
fn there_and_back(fill: impl Fn(&Path, &Path)) {
    let Some(reference) = peer("migration") else { return };
    let node = Node::new();
    let directory = node.path("plugins");
    fs::create_dir(&directory).unwrap();
    fill(&reference, &directory);
    let site = Site::new(directory, node);
    site.plugins_are_cnibox(false);
    // The bridge and the shared chains persist, so they are created before the snapshot.
    let empty = {
        site.del(&site.add(8080));
        site.node.snapshot()
    };
    let old: Vec<Pod> = [8081, 8082, 8083].map(|port| site.add(port)).into();
    for pod in &old {
        site.works(pod);
    }
    let before = site.node.snapshot();

    site.cnibox("install");
    site.plugins_are_cnibox(true);
    assert_unchanged(&before, &site.node.snapshot());
    for pod in &old {
        site.works(pod);
        site.check(pod);
    }
    site.del(&old[0]);
    let new = [8084, 8085].map(|port| site.add(port));
    site.del(&new[0]);
    for pod in [&old[1], &old[2], &new[1]] {
        site.works(pod);
        site.check(pod);
    }

    site.cnibox("uninstall");
    site.plugins_are_cnibox(false);
    // No CHECK: portmap 1.1.1 of the reference expects an IPv6 rule for containers without IPv6
    // (plugins#819).
    for pod in [&old[1], &old[2], &new[1]] {
        site.works(pod);
    }
    let last = site.add(8086);
    site.works(&last);
    site.del(&old[1]);
    site.del(&new[1]);

    // A second migration, with the reference's state and the first migration's remainders.
    site.cnibox("install");
    site.works(&old[2]);
    site.del(&old[2]);
    site.del(&last);
    // Uninstallation has removed the records that DEL of the reference does not know.
    drop(new);
    let directories = ["cache", "net.d", "leases"].map(|name| site.state(name));
    let [cache, net_d, leases] = &directories;
    let gc = ["gc", "--cache-dir", cache, "--conf-dir", net_d, "--data-dir", leases];
    let cni_path = site.directory.display().to_string();
    let said =
        site.node.tool("cnibox", &gc).program(executable()).env("CNI_PATH", &cni_path).printed();
    assert_eq!(said, "no dead attachment was found\n");
    assert_unchanged(&empty, &site.node.snapshot());
}

fn names(reference: &Path) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(reference).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap())
}

/// The layout of the reference's archive, Debian's package and `kubernetes-cni`: one file per
/// plugin.
#[test]
fn a_directory_of_files_is_migrated_and_rolled_back() {
    there_and_back(|reference, directory| {
        for name in names(reference) {
            fs::copy(reference.join(&name), directory.join(&name)).unwrap();
        }
    });
}

/// k3s: a directory of links into another directory that belongs to the release.
#[test]
fn a_directory_of_links_is_migrated_and_rolled_back() {
    there_and_back(|reference, directory| {
        let data = directory.with_file_name("data");
        fs::create_dir(&data).unwrap();
        for name in names(reference) {
            fs::copy(reference.join(&name), data.join(&name)).unwrap();
            symlink(data.join(&name), directory.join(&name)).unwrap();
        }
    });
}
