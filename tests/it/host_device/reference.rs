//! Comparison with the reference plugin: the same results and kernel state, and DEL of each returns
//! the other's device.

use std::path::Path;

use serde_json::{Value, json};

use super::{MAC, fall_back, layer2, plug, records, simple};
use crate::support::compare::{assert_same, peer};
use crate::support::net::{Net, normal_json};
use crate::support::node::{Call, Container, Node};

/// Replaces the program of the call by the reference's plugin, if given.
fn by(call: Call, peer: Option<&Path>) -> Call {
    let Some(dir) = peer else { return call };
    call.program(dir.join("host-device")).env("CNI_PATH", &dir.display().to_string())
}

fn net<'n>(node: &'n Node, version: &'static str, addresses: bool) -> Net<'n> {
    let net = if addresses { simple(node, &json!({})) } else { layer2(node, version) };
    Net { version, ..net.with(&json!({"cniVersion": version})) }
}

/// Result, links and addresses of an ADD on a new node.
fn added(peer: Option<&Path>, version: &'static str, addresses: bool) -> (Value, String) {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let net = net(&node, version, addresses);
    let result = by(net.on("ADD", &container), peer).result();
    let state = container.sh("sh -c 'ip -o -4 addr show eth0; ip route; ip -o link show eth0'")
        + &node.sh("ip -o -4 addr; ip route; ip -br link");
    // The carrier state is asynchronous, and the broadcast address is unused.
    let noise = [" brd 10.1.2.255", "NO-CARRIER,", ",LOWER_UP", " linkdown", ",M-DOWN"];
    let states =
        [" state UP", " state DOWN", " state LOWERLAYERDOWN", " UP", " DOWN", " LOWERLAYERDOWN"];
    let without = |line: &str| {
        let gone = noise.iter().chain(&states);
        let line = gone.fold(line.to_owned(), |line, word| line.replace(word, ""));
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let state: Vec<_> = state.lines().map(without).collect();
    (normal_json(&result, &container), state.join("\n"))
}

#[test]
fn results_and_state_equal_the_references() {
    let Some(peer) = peer("host-device") else { return };
    for version in ["0.3.0", "0.3.1", "0.4.0", "1.0.0"] {
        for addresses in [true, false] {
            let (ours, theirs) =
                (added(None, version, addresses), added(Some(&peer), version, addresses));
            let mut their_result = theirs.0;
            // Debian's release prints an empty object in 1.0.0, later releases do not.
            if version == "1.0.0" {
                their_result.as_object_mut().unwrap().retain(|_, value| *value != json!({}));
            }
            assert_eq!(ours.0, their_result, "{version} {addresses}");
            assert_same(version, &ours.1, &theirs.1);
        }
    }
}

#[test]
fn each_returns_devices_added_by_the_other() {
    let Some(peer) = peer("host-device across") else { return };
    for addresses in [true, false] {
        for (adds, deletes) in [(None, Some(peer.as_path())), (Some(peer.as_path()), None)] {
            let (node, container) = (Node::new(), Container::new());
            plug(&node);
            let inside = container.snapshot(&node);
            let net = net(&node, "1.0.0", addresses);
            let result = by(net.on("ADD", &container), adds).result();
            by(net.check(&container, &result), deletes).ok();
            by(net.on("DEL", &container), deletes).ok();
            let link = node.ip("link show hd0");
            assert_eq!(link[0]["address"], json!(MAC));
            // Debian's release keeps the alias on the host; later releases and cnibox remove it.
            assert!(deletes.is_some() || link[0]["ifalias"].is_null(), "{link}");
            assert_eq!(net.leases(), [""; 0]);
            crate::support::net::settles(&inside, || container.snapshot(&node));
            // The next DEL of cnibox removes the record.
            net.del(&container);
            assert_eq!(records(&node), "");
            // The next ADD succeeds with either program.
            by(net.on("ADD", &container), deletes).result();
            by(net.on("DEL", &container), adds).ok();
            assert_eq!(node.ip("link show hd0")[0]["address"], json!(MAC));
        }
    }
}

#[test]
fn del_without_a_namespace_works_after_the_references_add() {
    let Some(peer) = peer("host-device that fell back") else { return };
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let net = net(&node, "1.0.0", false);
    by(net.on("ADD", &container), Some(&peer)).result();
    fall_back(&container, "eth0");
    net.call("DEL", "c1").netns("/var/run/netns/no-such").ok();
    let link = node.ip("link show hd0");
    assert_eq!((&link[0]["address"], &link[0]["ifalias"]), (&json!(MAC), &json!(null)));
}
