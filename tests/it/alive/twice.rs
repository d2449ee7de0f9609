//! A second ADD with the names of a live attachment undoes what it has done itself, and nothing of
//! the first.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use cnibox::testing::attachment::AttachmentId;
use nix::fcntl::{Flock, FlockArg};
use serde_json::{Value, json};

use crate::support::net::{Net, wire};
use crate::support::node::{Container, Node, Snapshot, assert_unchanged, executable};

/// A network of the plugin in which one container is attached.
struct Attached<'n> {
    net: Net<'n>,
    container: Container,
    result: Value,
}

impl<'n> Attached<'n> {
    fn new(node: &'n Node, plugin: &'static str, ipam: &Value) -> Attached<'n> {
        if plugin == "macvlan" {
            wire(node);
        }
        let keys = json!({"bridge": "br0", "master": "wire0", "isGateway": true, "ipMasq": true,
            "ipMasqBackend": "nftables", "macspoofchk": true, "ipam": ipam});
        // The tap device is not a port of a bridge.
        let keys = if plugin == "tap" { json!({"ipam": ipam}) } else { keys };
        let (net, container) = (Net::new(node, plugin, "1.1.0", &keys), Container::new());
        let result = net.add(&container);
        Attached { net, container, result }
    }

    fn snapshot(&self) -> (Snapshot, Snapshot) {
        (self.net.node.snapshot(), self.container.snapshot(self.net.node))
    }

    /// Runs the ADD of `other`, which fails with this message, as the names of `id`.
    #[track_caller]
    fn is_unharmed_by(&self, net: &Net<'_>, id: &str, other: &Container, msg: &str) {
        let (before, empty) = (self.snapshot(), other.snapshot(net.node));
        let error = net.call("ADD", id).netns(&other.path()).error();
        assert!(error.msg.contains(msg), "{}: {error:?}", net.plugin);
        let after = self.snapshot();
        assert_unchanged(&before.0, &after.0);
        assert_unchanged(&before.1, &after.1);
        assert_unchanged(&empty, &other.snapshot(net.node));
        self.net.check(&self.container, &self.result).ok();
    }
}

#[test]
fn a_second_add_frees_no_address_of_the_first() {
    for plugin in ["bridge", "ptp", "tap", "macvlan"] {
        let node = Node::new();
        let first = Attached::new(&node, plugin, &node.host_local(&["10.1.2.0/29"]));
        let other = Container::new();
        first.is_unharmed_by(&first.net, "c1", &other, "duplicate allocation is not allowed");
        let asks = |ip: &str| first.net.with(&json!({"runtimeConfig": {"ips": [ip]}}));
        first.is_unharmed_by(
            &asks("10.1.2.4/29"),
            "c1",
            &other,
            "duplicate allocation is not allowed",
        );
        first.is_unharmed_by(&asks("10.1.2.2/29"), "c2", &other, "10.1.2.2 is not available");
        let next = first.net.call("ADD", "c2").netns(&other.path()).result();
        assert_eq!(next["ips"][0]["address"], "10.1.2.3/29", "{plugin}");
    }
}

/// An IPAM plugin of another executable: what its failed ADD has left is unknown, but the names are
/// those of a container that lives.
#[test]
fn a_second_add_frees_no_address_of_another_ipam_plugin() {
    for plugin in ["bridge", "ptp"] {
        let node = Node::new();
        let path = node.bin().join("host-local");
        fs::remove_file(&path).unwrap();
        fs::copy(executable(), &path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let first = Attached::new(&node, plugin, &node.host_local(&["10.1.2.0/29"]));
        first.is_unharmed_by(
            &first.net,
            "c1",
            &Container::new(),
            "duplicate allocation is not allowed",
        );
    }
}

/// The second ADD fails late, when it has a record and rules.
#[test]
fn a_second_add_restores_record_and_rules_of_the_first() {
    let node = Node::new();
    let address = |gateway: &str| json!({"type": "static", "addresses": [{"address": "10.1.2.5/24", "gateway": gateway}]});
    let first = Attached::new(&node, "bridge", &address("10.1.2.1"));
    let record = || node.sh("cat /run/cni/cnibox/attachments/*");
    let before = record();
    let late = first.net.with(&json!({"ipam": address("10.1.2.254")}));
    first.is_unharmed_by(
        &late,
        "c1",
        &Container::new(),
        "already has an IP address different from 10.1.2.254/24",
    );
    assert_eq!(record(), before);
}

/// Some process holds the lock of the attachment, and hangs.
#[test]
fn del_does_not_wait_long_for_the_lock() {
    let node = Node::new();
    let first = Attached::new(&node, "bridge", &node.host_local(&["10.1.2.0/29"]));
    let instance = AttachmentId { network: "net", ifname: "eth0", id: "c1" }.instance_id();
    let file = File::create(format!("/run/cni/cnibox/turn-{instance}.lock")).unwrap();
    let lock = Flock::lock(file, FlockArg::LockExclusive).unwrap();
    let start = Instant::now();
    let outcome = first.net.on("DEL", &first.container).run();
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    assert!(
        outcome.stderr.contains("DEL continues without the lock of the attachment: ")
            && outcome.stderr.contains(" held for more than 2 s by "),
        "{outcome:?}"
    );
    assert!(start.elapsed() < Duration::from_secs(6), "{:?}", start.elapsed());
    assert_eq!(node.leases("net"), [""; 0]);
    drop(lock);
    // The lock's file, which nobody holds now, goes with the next container.
    first.net.add(&first.container);
    first.net.del(&first.container);
    assert_eq!(node.sh("find /run/cni/cnibox -type f"), "");
}
