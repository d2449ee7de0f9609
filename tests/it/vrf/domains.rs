//! Several interfaces, several VRFs.

use serde_json::json;

use super::Pod;
use crate::lane::{self, needs};
use crate::support::net::{addresses, settles};
use crate::support::node::{Container, Node};
use crate::support::parallel::at_once;
use crate::support::traffic::Place;

/// Assigns an address of each family to both interfaces.
fn address(pod: &Pod, addrs: [[&str; 2]; 2]) {
    for (name, addrs) in ["eth0", "net1"].iter().zip(addrs) {
        pod.container.sh(&format!("ip addr add {} dev {name}", addrs[0]));
        pod.container.sh(&format!("ip addr add {} dev {name} nodad", addrs[1]));
    }
}

#[test]
fn a_vrf_is_deleted_with_its_last_interface() {
    needs!(lane::VRF);
    let pod = Pod::new();
    address(&pod, [["10.0.0.2/24", "fd00:1::2/64"], ["10.0.1.2/24", "fd00:2::2/64"]]);
    let before = pod.container.snapshot(&pod.node);
    pod.add("eth0", "blue");
    pod.add("net1", "blue");
    assert_eq!(pod.members("blue").len(), 2);
    for name in ["eth0", "net1"] {
        assert_eq!(addresses(&pod.container.ip(&format!("addr show dev {name}"))).len(), 2);
        pod.call("CHECK", name, &json!({"vrfName": "blue"})).ok();
    }
    pod.del("eth0", "blue");
    assert_eq!(pod.members("blue"), ["net1"]);
    pod.del("eth0", "blue");
    assert_eq!(pod.members("blue"), ["net1"]);
    pod.del("net1", "blue");
    assert_eq!(pod.table("blue"), None);
    settles(&before, || pod.container.snapshot(&pod.node));
}

#[test]
fn two_vrfs_may_have_the_same_addresses() {
    needs!(lane::VRF);
    let (node, pod) = (Node::new(), Container::new());
    super::remember(&pod);
    let servers = [Container::new(), Container::new()];
    for (i, server) in servers.iter().enumerate() {
        let name = format!("net{i}");
        let peer = server.path();
        pod.sh(&format!("ip link add {name} type veth peer name eth0 netns {peer}"));
        for (place, name, host) in [(&pod, name.as_str(), 2), (server, "eth0", 1)] {
            place.sh(&format!("ip link set {name} up"));
            place.sh(&format!("ip addr add 10.0.0.{host}/24 dev {name}"));
            place.sh(&format!("ip addr add fd00::{host}/64 dev {name} nodad"));
        }
        // Each server has its own prefix behind it.
        server.sh("ip link set lo up");
        server.sh(&format!("ip addr add 198.51.100.{i}/32 dev lo"));
    }
    for (i, vrf) in ["red", "blue"].iter().enumerate() {
        // A default route via the same gateway address in both VRFs.
        pod.sh(&format!("ip route add default via 10.0.0.1 dev net{i} metric {}", 10 + i));
        let prev = json!({"interfaces": [{"name": format!("net{i}"), "sandbox": pod.path()}]});
        let conf = json!({"cniVersion": "1.1.0", "name": "n", "vrfname": vrf, "prevResult": prev});
        let call = node.call("vrf", "ADD").conf(&conf).ifname(&format!("net{i}"));
        call.netns(&pod.path()).result();
    }
    for (i, vrf) in ["red", "blue"].iter().enumerate() {
        let other = 1 - i;
        let reaches = |target: &str, limit: u32| {
            pod.try_sh(&format!("ping -n -q -c 1 -w {limit} -I {vrf} {target}"))
        };
        assert!(reaches("10.0.0.1", 20) && reaches("fd00::1", 20), "{vrf}");
        assert!(reaches(&format!("198.51.100.{i}"), 20), "{vrf}");
        assert!(!reaches(&format!("198.51.100.{other}"), 2), "{vrf} reaches the other's world");
        assert!(servers[i].reaches("10.0.0.2") && servers[i].reaches("fd00::2"), "{vrf}");
        let addrs = addresses(&pod.ip(&format!("addr show dev net{i}")));
        assert_eq!(addrs, ["10.0.0.2/24", "fd00::2/64"]);
    }
    assert!(!pod.try_sh("ping -n -q -c 1 -w 2 10.0.0.1"), "outside of both there is no way");
}

#[test]
fn tables_are_configured_or_assigned() {
    needs!(lane::VRF);
    let pod = Pod::new();
    let add = |ifname: &str, keys| pod.call("ADD", ifname, &keys).result();
    let del = |ifname: &str, keys| pod.call("DEL", ifname, &keys).ok();
    // The same VRF and table twice; then another VRF with the same table.
    let red = json!({"vrfname": "red", "table": 1001});
    add("eth0", red.clone());
    add("net1", red.clone());
    assert_eq!((pod.table("red"), pod.members("red").len()), (Some(1001), 2));
    del("net1", red.clone());
    let outcome = pod.call("ADD", "net1", &json!({"vrfname": "blue", "table": 1001})).run();
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    assert!(outcome.stderr.contains("shares the table 1001 with red"), "{outcome:?}");
    assert_eq!((pod.table("red"), pod.table("blue")), (Some(1001), Some(1001)));
    del("net1", json!({"vrfname": "blue"}));
    let error = pod.call("ADD", "net1", &json!({"vrfname": "red", "table": 1002})).error();
    assert_eq!(error.msg, "VRF red already exist with different routing table 1001");
    del("eth0", red);
    // The chosen table is the first one that no VRF, rule or route uses.
    pod.container.sh("ip link add used type vrf table 1");
    pod.container.sh("ip rule add from 10.9.9.9 lookup 2");
    pod.container.sh("ip addr add 10.7.0.1/24 dev eth0");
    pod.container.sh("ip route add 10.9.0.0/16 via 10.7.0.9 table 3");
    add("net1", json!({"vrfname": "green"}));
    assert_eq!(pod.table("green"), Some(4));
    del("net1", json!({"vrfname": "green"}));
}

#[test]
fn a_vrf_that_existed_before_is_kept() {
    needs!(lane::VRF);
    let pod = Pod::new();
    pod.container.sh("ip link add red type vrf table 50");
    pod.container.sh("ip link set red up");
    pod.container.sh("ip addr add 10.0.0.2/24 dev eth0");
    let before = pod.container.snapshot(&pod.node);
    // A DEL without ADD keeps the VRF.
    pod.del("eth0", "red");
    settles(&before, || pod.container.snapshot(&pod.node));
    for _ in 0..2 {
        pod.add("eth0", "red");
        pod.add("net1", "red");
        assert_eq!(pod.members("red").len(), 2);
        pod.del("eth0", "red");
        pod.del("net1", "red");
        settles(&before, || pod.container.snapshot(&pod.node));
    }
    // A VRF with a foreign alias.
    pod.container.sh("ip link set red alias theirs");
    pod.add("eth0", "red");
    pod.del("eth0", "red");
    assert_eq!(pod.table("red"), Some(50));
}

#[test]
fn del_works_without_the_interface() {
    needs!(lane::VRF);
    let pod = Pod::new();
    pod.add("eth0", "blue");
    pod.add("net1", "blue");
    pod.container.sh("ip link del eth0");
    pod.del("eth0", "blue");
    assert_eq!(pod.members("blue"), ["net1"]);
    pod.container.sh("ip link del net1");
    pod.del("net1", "blue");
    assert_eq!(pod.table("blue"), None);
    pod.del("net1", "blue");
}

#[test]
fn concurrently_created_vrfs_have_different_tables() {
    const COUNT: usize = 12;
    needs!(lane::VRF);
    let pod = Pod::new();
    for i in 0..COUNT {
        pod.container.sh(&format!("ip link add n{i} type veth peer name f{i}"));
    }
    let before = pod.container.snapshot(&pod.node);
    let name = |i: usize| (format!("n{i}"), format!("vrf{}", i / 2));
    // Two interfaces per VRF; either ADD may create it.
    at_once(COUNT, |i| pod.add(&name(i).0, &name(i).1));
    let tables: std::collections::BTreeSet<_> =
        (0..COUNT).map(|i| pod.table(&name(i).1).unwrap()).collect();
    assert_eq!(tables.len(), COUNT / 2);
    at_once(COUNT, |i| pod.del(&name(i).0, &name(i).1));
    settles(&before, || pod.container.snapshot(&pod.node));
}
