//! The crate in `crates/cni` as used by other programs: its examples, with the real plugins.
//!
//! `cargo build --workspace --examples` builds them.

use std::fs;
use std::path::PathBuf;

use serde_json::{Deserializer, Value, json};

use crate::support::compare;
use crate::support::node::{Call, Container, Node, assert_unchanged};

/// A node with the network `pods` in `net.d`, and its own cache at libcni's path.
fn node() -> Node {
    let node = Node::new();
    node.sh("mount -t tmpfs tmpfs /var/lib");
    let ptp = json!({"type": "ptp", "ipam": node.host_local(&["10.4.0.0/24"])});
    let list = json!({"cniVersion": "1.1.0", "name": "pods", "plugins": [ptp]});
    fs::create_dir(node.path("net.d")).unwrap();
    fs::write(list_of(&node), list.to_string()).unwrap();
    node
}

fn list_of(node: &Node) -> PathBuf {
    node.path("net.d/10-pods.conflist")
}

/// A call of an example with this node's plugins.
fn example(node: &Node, name: &str, args: &[&str]) -> Call {
    let bin = node.bin().display().to_string();
    node.tool("cnitool", args).env("CNI_PATH", &bin).program(cnibox_tests::example(name))
}

#[test]
fn cnitool_deletes_what_the_example_added() {
    let node = node();
    let (before, container) = (node.snapshot(), Container::new());
    let (dir, netns) = (node.path("net.d").display().to_string(), container.path());
    let call = example(&node, "add-network", &[&dir, "pods", &netns, "net0"]);
    assert_eq!(call.printed(), "10.4.0.2/24\n");
    assert!(container.pings("10.4.0.1"), "container to host");

    // A second attachment is refused and leaves the first one intact.
    let again = call.run();
    assert_eq!((again.status, again.stdout.as_str()), (Some(1), ""), "{again:?}");
    assert!(again.stderr.starts_with("add-network: plugin type=\"ptp\""), "{again:?}");
    assert!(container.pings("10.4.0.1"), "after the second call");

    let bin = node.bin().display().to_string();
    let id = netns.rsplit('/').next().unwrap();
    let del = ["del", "pods", &netns, "-i", "net0", "--container-id", id];
    node.tool("cnitool", &del).env("NETCONFPATH", &dir).env("CNI_PATH", &bin).ok();
    assert_unchanged(&before, &node.snapshot());
}

#[test]
fn the_example_runtime_attaches_runs_and_detaches() {
    let node = node();
    let (before, list) = (node.snapshot(), list_of(&node).display().to_string());
    let script = "ping -n -c 1 -W 2 10.4.0.1 >/dev/null && ip -j address show eth0; exit 7";
    let outcome = example(&node, "runtime", &[&list, "sh", "-c", script]).run();
    assert_eq!((outcome.status, outcome.stderr.as_str()), (Some(7), ""), "{outcome:?}");
    let printed: Vec<Value> =
        Deserializer::from_str(&outcome.stdout).into_iter().map(Result::unwrap).collect();
    let [result, inside] = &printed[..] else { panic!("{outcome:?}") };
    assert_eq!(result["ips"][0]["address"], "10.4.0.2/24", "{result}");
    assert_eq!(inside[0]["addr_info"][0]["local"], "10.4.0.2", "{inside}");
    assert_unchanged(&before, &node.snapshot());
    assert_eq!(fs::read_dir("/var/lib/cni/results").unwrap().count(), 0);

    // The command does not exist: the container is detached all the same.
    let outcome = example(&node, "runtime", &[&list, "/no/such/program"]).run();
    assert_eq!(outcome.status, Some(1), "{outcome:?}");
    assert!(outcome.stderr.contains("No such file"), "{outcome:?}");
    assert_unchanged(&before, &node.snapshot());
}

/// bridge, host-local, portmap and loopback of the reference, by the example runtime.
#[test]
fn the_example_runtime_drives_the_plugins_of_the_reference() {
    let Some(peer) = compare::peer("the example runtime") else { return };
    let node = node();
    let bridge = json!({"type": "bridge", "bridge": "pods0", "isGateway": true, "ipam": node.host_local(&["10.4.0.0/24"])});
    let tuning = json!({"type": "tuning", "mtu": 1400});
    let list = json!({"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge, tuning]});
    fs::write(list_of(&node), list.to_string()).unwrap();
    let script = "ping -n -c 1 -W 2 10.4.0.1 >/dev/null && cat /sys/class/net/eth0/mtu";
    let call =
        example(&node, "runtime", &[&list_of(&node).display().to_string(), "sh", "-c", script]);
    let outcome = call.env("CNI_PATH", &peer.display().to_string()).run();
    assert_eq!((outcome.status, outcome.stderr.as_str()), (Some(0), ""), "{outcome:?}");
    assert!(outcome.stdout.ends_with("}\n1400\n"), "{outcome:?}");
    assert_eq!(fs::read_dir("/var/lib/cni/results").unwrap().count(), 0);
    assert_eq!(node.leases("pods"), Vec::<String>::new());
}
