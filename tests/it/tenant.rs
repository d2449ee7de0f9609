//! What the author of a network configuration can name: directories of state, files, and what a pod
//! that runs as uid 0 puts there.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::support::net::{Net, merged};
use crate::support::node::{Container, Node, exists};

/// A volume of a pod: a directory of uid 0 that nobody else can write to.
fn volume(node: &Node) -> PathBuf {
    let dir = node.path("pods/1/volumes/kubernetes.io~empty-dir/data");
    fs::create_dir_all(&dir).unwrap();
    node.sh(&format!("chmod 755 {}", dir.display()));
    dir
}

/// A container with `eth0`, and the result of its interface plugin.
fn pod(node: &Node) -> (Container, Value) {
    let container = Container::new();
    let ipam = node.host_local(&["10.1.2.0/24"]);
    let net = Net::new(node, "ptp", "1.1.0", &json!({"name": "under", "ipam": ipam}));
    let prev = net.add(&container);
    (container, prev)
}

/// Gives the node its own `/var/lib/cni`.
fn own_lib(node: &Node) {
    node.sh("mkdir -p /var/lib/cni; mount -t tmpfs -o mode=755 tmpfs /var/lib/cni");
}

fn gc<'n>(net: &Net<'n>) -> Net<'n> {
    net.with(&json!({"cni.dev/valid-attachments": []}))
}

/// The beginning of the refusal of a `dataDir`.
fn refusal(dir: &Path) -> String {
    format!("dataDir \"{}\"", dir.display())
}

#[test]
fn host_device_ignores_records_in_a_volume() {
    let (node, victim) = (Node::new(), Container::new());
    node.sh("ip link add end0 type veth peer name tmp0; ip link set end0 up");
    node.sh(&format!("ip link set tmp0 netns {} name eth0", victim.path()));
    let end = node.ip("link show end0")[0]["ifindex"].clone();
    let dir = volume(&node).join("net");
    fs::create_dir(&dir).unwrap();
    let record = json!({"containerID": "c1", "ifname": "eth0", "netns": victim.path(),
        "device": {"name": "stolen0", "identity": {"kind": "veth", "link": end}, "up": true,
            "addresses": [{"net": "203.0.113.2/24", "noPrefixRoute": false, "broadcast": false}]}});
    let file = dir.join("c1:eth0.json");
    fs::write(&file, record.to_string()).unwrap();
    let keys = json!({"device": "none", "dataDir": dir.parent().unwrap()});
    let net = Net::new(&node, "host-device", "1.1.0", &keys);
    let before = (node.snapshot(), victim.snapshot(&node));
    net.call("DEL", "c1").ok();
    gc(&net).call("GC", "").ok();
    crate::support::net::settles(&before.0, || node.snapshot());
    crate::support::net::settles(&before.1, || victim.snapshot(&node));
    assert!(exists(file));
}

/// Regression test: DEL without a namespace entered whatever was at the recorded path by then.
#[test]
fn host_device_does_not_enter_a_replaced_namespace() {
    let (node, container, later) = (Node::new(), Container::new(), Container::new());
    let path = node.path("ns").display().to_string();
    fs::write(&path, "").unwrap();
    node.sh(&format!("mount --bind {} {path}", container.path()));
    node.sh("ip tuntap add hd0 mode tap");
    let net = Net::new(&node, "host-device", "1.1.0", &json!({"device": "hd0"}));
    net.call("ADD", "c1").netns(&path).result();
    node.sh(&format!("umount {path}; mount --bind {} {path}", later.path()));
    later.sh("ip tuntap add eth0 mode tap");
    later.sh("ip link set eth0 alias hd0");
    let before = later.snapshot(&node);
    net.call("DEL", "c1").ok();
    crate::support::node::assert_unchanged(&before, &later.snapshot(&node));
    node.sh(&format!("umount {path}"));
}

#[test]
fn tuning_ignores_backups_in_a_volume() {
    let node = Node::new();
    let dir = volume(&node);
    let (container, prev) = pod(&node);
    let keys = json!({"dataDir": dir, "mtu": 1400, "prevResult": prev});
    let net = Net::new(&node, "tuning", "1.1.0", &keys);
    let error = net.on("ADD", &container).error();
    let msg = format!("{} may be of a container", refusal(&dir));
    assert_eq!(error.brief(), (7, msg.as_str()));
    assert_eq!(net.call("STATUS", "").error().brief(), (50, msg.as_str()));
    // What needs no backup needs no directory.
    let sysctl = json!({"sysctl": {"net.core.somaxconn": "500"}, "mtu": 0});
    net.with(&sysctl).on("ADD", &container).result();
    fs::write(dir.join("c1_eth0.json"), r#"{"mtu":1280,"network":"net"}"#).unwrap();
    gc(&net).call("GC", "").ok();
    net.del(&container);
    assert_eq!(container.ip("link show eth0")[0]["mtu"], 1500);
    assert!(exists(dir.join("c1_eth0.json")));
}

#[test]
fn flannel_executes_no_plugin_named_in_a_volume() {
    let node = Node::new();
    own_lib(&node);
    let dir = volume(&node);
    let executed = node.path("executed");
    node.script("pwn", &format!("echo $CNI_COMMAND >> {}", executed.display()));
    let env = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.2.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";
    fs::write(node.path("subnet.env"), env).unwrap();
    let keys = json!({"subnetFile": node.path("subnet.env"), "ipam": {"dataDir": node.path("leases")},
        "delegate": {"bridge": "br0"}});
    let usual = Net::new(&node, "flannel", "1.1.0", &keys);
    let net = usual.with(&json!({"dataDir": dir}));
    let container = Container::new();
    let error = net.on("ADD", &container).error();
    let msg = format!("{} may be of a container", refusal(&dir));
    assert_eq!(error.brief(), (7, msg.as_str()));
    assert_eq!(net.call("STATUS", "").error().code, 50);
    // An attachment of a release that accepted the directory.
    let prev = usual.add(&container);
    fs::remove_file("/var/lib/cni/flannel/c1").unwrap();
    fs::write(dir.join("c1"), r#"{"cniVersion":"1.1.0","name":"net","type":"pwn"}"#).unwrap();
    fs::copy(dir.join("c1"), dir.join("c2")).unwrap();
    net.check(&container, &prev).ok();
    net.with(&json!({"cni.dev/valid-attachments": [{"containerID": "c1", "ifname": "eth0"}]}))
        .call("GC", "")
        .ok();
    net.del(&container);
    net.del(&container);
    assert!(!exists(executed));
    assert!(exists(dir.join("c1")) && exists(dir.join("c2")));
    // The delegate's DEL has the configuration of the request.
    assert!(!container.try_sh("ip link show eth0"));
    assert_eq!(net.leases(), [""; 0]);
}

#[test]
fn directories_of_other_users_are_refused() {
    let node = Node::new();
    let (container, prev) = pod(&node);
    let disk = node.path("disk");
    fs::create_dir_all(&disk).unwrap();
    let tuning = |dir: &str| {
        let keys = json!({"dataDir": dir, "mtu": 1400, "prevResult": prev});
        Net::new(&node, "tuning", "1.1.0", &keys)
    };
    node.sh(
        "mkdir -m 775 /run/cni/open; mkdir -p /run/cni/theirs/deep; chown 4711 /run/cni/theirs",
    );
    node.sh(
        "mkdir /run/cni/foreign; ln -s theirs/deep /run/cni/far; ln -s x /run/cni/foreign/link",
    );
    node.sh("chown -h 4711 /run/cni/foreign/link");
    let place = volume(&node);
    symlink(&place, "/run/cni/volume").unwrap();
    for (dir, why) in [
        ("/run/cni/open", "\"/run/cni/open\": /run/cni/open can be written by others (mode 775)"),
        ("/run/cni/theirs", "\"/run/cni/theirs\": user 4711 has /run/cni/theirs"),
        ("/run/cni/theirs/deep", "\"/run/cni/theirs/deep\": user 4711 has /run/cni/theirs"),
        ("/run/cni/far", "\"/run/cni/far\": user 4711 has /run/cni/theirs"),
        ("/run/cni/foreign/link", "\"/run/cni/foreign/link\": user 4711 has /run/cni/foreign/link"),
        ("/run/cni/cnibox/x", "\"/run/cni/cnibox/x\": /run/cni/cnibox/x is for other records"),
        ("/run/cni/../x", "\"/run/cni/../x\" is not an absolute path without \"..\""),
        ("tuning", "\"tuning\" is not an absolute path without \"..\""),
        ("/run/cni/volume", "\"PLACE\" may be of a container"),
    ] {
        let error = tuning(dir).on("ADD", &container).error();
        let why = why.replace("PLACE", &place.display().to_string());
        assert_eq!(error.brief(), (7, format!("dataDir {why}").as_str()));
        tuning(dir).del(&container);
        gc(&tuning(dir)).call("GC", "").ok();
        assert_eq!(container.ip("link show eth0")[0]["mtu"], 1500, "{dir}");
    }
    symlink(&disk, "/run/cni/link").unwrap();
    tuning("/run/cni/link/deep").add(&container);
    assert!(exists(disk.join("deep/c1_eth0.json")));
    tuning("/var/run/cni/link/deep").del(&container);
    assert_eq!(container.ip("link show eth0")[0]["mtu"], 1500);
    assert!(!exists(disk.join("deep/c1_eth0.json")));

    // Any other directory of root will do, as for the reference.
    let anywhere = disk.join("tuning");
    tuning(&anywhere.display().to_string()).add(&container);
    assert!(exists(anywhere.join("c1_eth0.json")));
    tuning(&anywhere.display().to_string()).del(&container);
    assert_eq!(container.ip("link show eth0")[0]["mtu"], 1500);
}

#[test]
fn host_local_takes_any_absolute_directory() {
    let node = Node::new();
    let ipam = node.host_local(&["10.1.2.0/24"]);
    let net = |dir: &str| {
        let ipam = merged(&ipam, &json!({"dataDir": dir}));
        Net::new(&node, "host-local", "1.1.0", &json!({"ipam": ipam}))
    };
    let add = |dir| net(dir).call("ADD", "c1").netns("/x");
    let msg = "dataDir \"rel/leases\" is not an absolute path";
    assert_eq!(add("rel/leases").error().brief(), (7, msg));
    assert_eq!(net("rel/leases").call("STATUS", "").error().brief(), (7, msg));
    net("rel/leases").call("DEL", "c1").ok();
    gc(&net("rel/leases")).call("GC", "").ok();
    let anywhere = node.path("data").display().to_string();
    add(&anywhere).result();
    net(&anywhere).call("DEL", "c1").ok();
}

/// Each file that a configuration names or that is in a state directory is replaced by a FIFO, an
/// endless device and a huge file.
#[test]
fn special_and_huge_files_in_place_of_state_are_refused() {
    for make in ["mkfifo", "ln -sf /dev/zero", "truncate -s 3G"] {
        let node = Node::new();
        own_lib(&node);
        let (container, prev) = pod(&node);
        let place = |path: &str| {
            node.sh(&format!("mkdir -p $(dirname '{path}'); rm -f '{path}'; {make} '{path}'"));
        };
        let within = |call: crate::support::node::Call| {
            let outcome = call.under(&["timeout", "20", "prlimit", "--as=1000000000"]).run();
            assert!(matches!(outcome.status, Some(0 | 1)), "{make}: {outcome:?}");
            outcome
        };
        let subnet = node.path("subnet.env").display().to_string();
        let flannel = Net::new(&node, "flannel", "1.1.0", &json!({"subnetFile": subnet}));
        place(&subnet);
        let tuning = json!({"mtu": 1400, "prevResult": prev});
        let tuning = Net::new(&node, "tuning", "1.1.0", &tuning);
        let device = Net::new(&node, "host-device", "1.1.0", &json!({"device": "none"}));
        let routes = json!({"addroutes": [{"dst": "198.51.100.0/24"}], "prevResult": prev});
        let routes = Net::new(&node, "route-override", "1.1.0", &routes);
        let egress = json!({"policyDir": "/run/cni/policies", "prevResult": prev});
        let egress = Net::new(&node, "egress", "1.1.0", &egress);
        for path in [
            "/run/cni/policies/web.json",
            "/run/cni/route-override/c1_eth0.json",
            "/run/cni/route-override/zz_eth0.json",
            "/run/cni/tuning/c1_eth0.json",
            "/run/cni/tuning/zz_eth0.json",
            "/run/cni/host-device/net/c1:eth0.json",
            "/run/cni/host-device/net/zz:eth0.json",
            "/var/lib/cni/flannel/c1",
            "/var/lib/cni/flannel/zz",
        ] {
            place(path);
        }
        for net in [&flannel, &tuning, &device, &routes, &egress] {
            for verb in ["ADD", "CHECK", "STATUS", "DEL"] {
                within(
                    net.on(verb, &container).env("CNI_ARGS", "IgnoreUnknown=1;EGRESS_POLICY=web"),
                );
            }
            assert_eq!(within(gc(net).call("GC", "")).status, Some(0), "{make} {}", net.plugin);
        }
        let cache = node.path("cache").display().to_string();
        let net_d = node.path("net.d").display().to_string();
        place(&format!("{net_d}/10-net.conflist"));
        place(&format!("{cache}/results/net-c1-eth0"));
        let tool = |args: &[&str]| {
            within(node.tool("cnibox", args).program(crate::support::node::executable()));
        };
        tool(&["gc", "--dry-run", "--cache-dir", &cache]);
        tool(&["repair", "--dry-run", "--cache-dir", &cache]);
        let lint = node.tool("cnibox", &["lint", "--offline", &net_d]);
        let lint = lint.program(crate::support::node::executable()).under(&["timeout", "20"]).run();
        assert!(lint.stdout.contains("not a regular file") || lint.stdout.contains("larger than"));
    }
}
