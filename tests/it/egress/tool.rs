//! `cnibox egress`: what was refused, and other policies for running containers.

use serde_json::{Value, json};

use super::{FAR, World, list};
use crate::support::conflist::Attached;
use crate::support::net::settles;
use crate::support::node::{Container, Node};
use crate::support::parallel::at_once;
use crate::support::strace::{self, Hits};
use crate::support::traffic::Place;

fn listed(node: &Node, args: &[&str]) -> String {
    node.tool("egress", &[&["ls"][..], args].concat()).printed()
}

#[test]
fn check_names_the_entry_that_decides() {
    let world = World::new(
        "bridge",
        &json!({"allow": [{"to": ["192.0.2.0/24"], "ports": ["udp"]}, {"to": ["10.1.2.2"]}]}),
    );
    let asked = |words: &str| {
        let words: Vec<&str> = words.split(' ').collect();
        let options = ["check", "--container", "c1"];
        let outcome = world.node.tool("egress", &[&options[..], &words].concat()).run();
        (outcome.status, outcome.stdout)
    };
    for (words, status, said) in [
        (
            "192.0.2.7 udp/53",
            0,
            "192.0.2.7 is another host\nudp/53 is allowed by allow[0] of policy 1\n",
        ),
        ("192.0.2.7", 1, "192.0.2.7 is another host\ntcp is refused by policy of policy 1\n"),
        (
            "10.1.2.2 icmp",
            0,
            "10.1.2.2 is a container of this host\nicmp is allowed by allow[1] of policy 1\n",
        ),
        (
            "10.9.0.1 tcp/22",
            1,
            "10.9.0.1 is the host itself\ntcp/22 is refused by policy of policy 1\n",
        ),
        ("example.com tcp/22", 1, "tcp/22 is refused by policy of policy 1\n"),
    ] {
        assert_eq!(asked(words), (Some(status), said.to_owned()), "{words}");
    }
    assert_eq!(asked("example tcp/22").0, Some(2));
}

#[test]
fn ls_tells_what_was_refused() {
    for kind in ["bridge", "ptp"] {
        let world = World::new(kind, &json!({"allow": [{"to": ["192.0.2.0/24"]}]}));
        let json = || serde_json::from_str::<Value>(&listed(&world.node, &["--json"])).unwrap();
        // Each ping has another checksum. They would use up the limit of recorded flows.
        for ip in [FAR[1], FAR[3]] {
            world.inside.sh(&format!("ping -c 60 -i 0.002 -W 1 {ip} || true"));
        }
        assert!(!world.reaches(&world.outside, FAR[1], 53));
        assert!(!world.reaches(&world.outside, FAR[3], 99));
        assert!(!world.inside.reaches_within(FAR[1], 1));
        assert!(!world.inside.reaches_within("10.1.2.2", 1));
        let port = &json()[0];
        let flows = port["flows"].to_string();
        let neighbour = if kind == "bridge" { "10.1.2.2 arp" } else { "10.1.2.2 icmp" };
        for flow in ["198.51.100.7 udp/53", "2001:db8:f::7 udp/99", "198.51.100.7 icmp", neighbour]
        {
            assert!(
                flows.contains(flow),
                "{kind}: {flow}: {port} {}",
                world.node.sh("nft list ruleset")
            );
        }
        for ip in [FAR[1], FAR[3]] {
            assert_eq!(flows.matches(&format!("{ip} icmp")).count(), 1, "{flows}");
        }
        assert!(port["refused_packets"].as_u64().unwrap() >= 127, "{port}");
        assert_eq!(
            (&port["network"], &port["container"], &port["interface"]),
            (&json!("net"), &json!("c1"), &json!("eth0"))
        );
        let metrics = listed(&world.node, &["--metrics"]);
        let line = metrics
            .lines()
            .find(|line| line.starts_with("cnibox_egress_refused_packets_total{"))
            .unwrap();
        assert!(line.contains("container=\"c1\"") && !line.ends_with(" 0"), "{metrics}");
        let text = listed(&world.node, &["--container", "c1"]);
        assert!(text.lines().count() >= 4 && text.contains("udp/53"), "{text}");
        assert_eq!(listed(&world.node, &["--container", "c9", "--json"]), "[]\n");
    }
}

#[test]
fn set_during_other_calls_leaves_one_policy_or_none() {
    let keys = json!({"allow": [{"to": ["192.0.2.0/24"]}]});
    let world = World::new("bridge", &keys);
    let list = list(&world.node, "bridge", &keys);
    let at = world.attached();
    let files = ["192.0.2.7", "198.51.100.7"].map(|addr| {
        let file = world.node.path(&format!("{addr}.json"));
        std::fs::write(&file, json!({"allow": [{"to": [addr]}]}).to_string()).unwrap();
        file.display().to_string()
    });
    let set = |file: &str| world.node.tool("egress", &["set", "--container", "c1", file]).run();
    for _ in 0..15 {
        at_once(2, |i| assert_eq!(set(&files[i]).status, Some(0)));
        list.check(&at, &world.result).unwrap();
        at_once(2, |i| {
            if i == 0 {
                assert_eq!(set(&files[0]).status, Some(0));
            } else {
                list.call("ADD", &at, 1, Some(&world.result)).result();
            }
        });
        list.check(&at, &world.result).unwrap();
    }
    for round in 0..15 {
        list.call("ADD", &at, 1, Some(&world.result)).result();
        at_once(2, |i| {
            if i == 0 {
                drop(set(&files[0]));
            } else {
                std::thread::sleep(std::time::Duration::from_micros(round * 300));
                list.call("DEL", &at, 1, Some(&world.result)).ok();
            }
        });
        assert_eq!(listed(&world.node, &["--json"]), "[]\n", "round {round}");
        assert!(!world.node.sh("nft list ruleset").contains("policy_"), "round {round}");
    }
}

#[test]
fn a_failed_set_keeps_the_policy() {
    let keys = json!({"allow": [{"to": ["192.0.2.0/24"]}]});
    let world = World::new("bridge", &keys);
    let list = list(&world.node, "bridge", &keys);
    let before = world.node.snapshot();
    let record = || world.node.sh("cat /run/cni/cnibox/attachments/*-*.json");
    let file = world.node.path("policy.json").display().to_string();
    std::fs::write(&file, json!({"policy": "allow"}).to_string()).unwrap();
    let mut failed = Hits::default();
    let set = world.node.tool("egress", &["set", "--container", "c1", &file]);
    for when in 1.. {
        let recorded = record();
        let injection = format!("sendto,sendmsg:error=ENOBUFS:when={when}");
        let (set, hit) = strace::inject(&world.node, &set, &injection);
        if set.status == Some(0) {
            list.call("ADD", &world.attached(), 1, Some(&world.result)).result();
        } else {
            failed.extend(&hit);
            assert_eq!(record(), recorded, "{when}: {}", set.stderr);
        }
        settles(&before, || world.node.snapshot());
        list.check(&world.attached(), &world.result).unwrap();
        if hit.is_empty() {
            break;
        }
    }
    failed.assert_include(&["NFT_MSG_NEWCHAIN", "NFT_MSG_NEWSETELEM", "RTM_NEWTFILTER"]);
    // A record that cannot be written would bring the former policy back.
    let recorded = record();
    let (set, _) = strace::inject(&world.node, &set, "rename,renameat2:error=ENOSPC");
    assert!(set.stderr.contains("the record of the former policy cannot be replaced"), "{set:?}");
    assert_eq!(record(), recorded);
    settles(&before, || world.node.snapshot());
    list.check(&world.attached(), &world.result).unwrap();
}

#[test]
fn set_replaces_the_policy_of_a_running_container() {
    let world = World::new("bridge", &json!({"allow": [{"to": ["192.0.2.0/24"]}]}));
    let file = world.node.path("policy.json");
    std::fs::write(&file, json!({"allow": [{"to": ["198.51.100.0/24"]}]}).to_string()).unwrap();
    let file = file.display().to_string();
    let set = |id: &str| world.node.tool("egress", &["set", "--container", id, &file]);
    assert_eq!(set("c").printed(), format!("net c1 eth0: the policy is that of {file}\n"));
    assert!(!world.reaches(&world.outside, FAR[0], 9) && world.reaches(&world.outside, FAR[1], 9));
    list(&world.node, "bridge", &json!({})).check(&world.attached(), &world.result).unwrap();
    let outcome = set("c9").run();
    assert!(outcome.stderr.contains("container \"c9\" has no egress policy"), "{outcome:?}");
    let outcome = world.node.tool("egress", &["set", &file]).run();
    assert_eq!(outcome.status, Some(2), "{outcome:?}");
    std::fs::write(&file, r#"{"allow": [{"to": []}]}"#).unwrap();
    let outcome = set("c1").run();
    let closes = "allow[0] without \"to\" allows nothing";
    assert!(outcome.status == Some(0) && outcome.stderr.contains(closes), "{outcome:?}");
}

#[test]
fn the_beginning_of_an_id_selects_one_container() {
    let node = Node::new();
    let list = list(&node, "bridge", &json!({"policy": "allow"}));
    let file = node.path("policy.json").display().to_string();
    std::fs::write(&file, r#"{"policy": "deny"}"#).unwrap();
    let set = |id: &str| node.tool("egress", &["set", "--container", id, &file]);
    let containers = ["4f1c00", "4f1c07", "4f1c0"].map(|id| (id, Container::new()));
    for (id, container) in &containers {
        list.add(&Attached::new(id, &container.path())).unwrap();
    }
    let outcome = set("4f1c").run();
    assert_eq!(outcome.status, Some(1));
    let several = "\"4f1c\" begins the ids of several containers; write more of it: 4f1c0";
    assert!(outcome.stderr.contains(several), "{outcome:?}");
    for (id, whole) in [("4f1c07", "4f1c07"), ("4f1c0", "4f1c0")] {
        assert!(set(id).printed().starts_with(&format!("net {whole} eth0: ")));
    }
    let selected = |id: &str| {
        let listed: Value =
            serde_json::from_str(&listed(&node, &["--container", id, "--json"])).unwrap();
        listed.as_array().unwrap().len()
    };
    assert_eq!((selected("4f1c0"), selected("4f1c00"), selected("4f")), (1, 1, 3));
}
