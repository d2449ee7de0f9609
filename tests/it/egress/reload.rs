//! `cnibox egress reload` and `cnibox egress events`.

use std::fs;

use serde_json::{Value, json};

use super::{FAR, World, datagram_arrives, list};
use crate::support::conflist::Attached;
use crate::support::node::{Container, Running, eventually};

const POD: &str = "IgnoreUnknown=1;K8S_POD_NAMESPACE=space;K8S_POD_NAME=agent";

#[test]
fn reload_puts_a_changed_file_in_force_in_all_its_containers() {
    let keys = json!({"policy": "allow"});
    let world = World::new("bridge", &keys);
    let dir = world.node.state("egress-policies");
    fs::create_dir_all(&dir).unwrap();
    let file = dir.join("agents.json");
    let write = |addr: &str| fs::write(&file, json!({"allow": [{"to": [addr]}]}).to_string());
    write(FAR[0]).unwrap();
    let named = json!({"policy": "allow", "policyDir": dir});
    let named = list(&world.node, "bridge", &named);
    let (second, third) = (Container::new(), Container::new());
    let args = format!("{POD};EGRESS_POLICY=agents");
    let ports: Vec<(Attached, Value)> = [("c2", &second), ("c3", &third)]
        .map(|(id, container)| {
            let at = Attached::new(id, &container.path());
            let result = list(&world.node, "bridge", &keys).add(&at).unwrap();
            named.call("DEL", &at, 1, Some(&result)).ok();
            named.call("ADD", &at, 1, Some(&result)).env("CNI_ARGS", &args).result();
            (at, result)
        })
        .into();
    let reload = || world.node.tool("egress", &["reload"]).printed();
    let reaches =
        |container: &Container, addr| datagram_arrives(container, &world.outside, addr, 9);
    assert_eq!(reload(), "no policy has changed\n");
    assert!(reaches(&second, FAR[0]) && !reaches(&second, FAR[1]));

    write(FAR[1]).unwrap();
    let shown = file.display();
    let reloaded = |id: &str| format!("reloaded: policy {shown} of net {id} eth0\n");
    assert_eq!(reload(), reloaded("c2") + &reloaded("c3"));
    for container in [&second, &third] {
        assert!(!reaches(container, FAR[0]) && reaches(container, FAR[1]));
    }
    assert!(world.reaches(&world.outside, FAR[0], 9), "a container without a file");
    for (at, result) in &ports {
        named.check(at, result).unwrap();
    }
    let listed = world.node.tool("egress", &["ls", "--json", "--container", "c2"]).printed();
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed[0]["policies"][1], json!({"allow": [{"to": [FAR[1]]}]}), "{listed}");
    assert_eq!((&listed[0]["pod"], &listed[0]["mode"]), (&json!("space/agent"), &json!("enforce")));

    // A mistake changes nothing, a policy that was set stays.
    fs::write(&file, r#"{"alow": []}"#).unwrap();
    let outcome = world.node.tool("egress", &["reload", "--container", "c2"]).run();
    assert_eq!((outcome.status, outcome.stdout.as_str()), (Some(1), ""));
    assert!(outcome.stderr.contains("unknown key \"alow\""), "{}", outcome.stderr);
    assert!(reaches(&second, FAR[1]));
    write(FAR[0]).unwrap();
    let set = world.node.path("set.json");
    fs::write(&set, json!({"allow": [{"to": [FAR[1]]}]}).to_string()).unwrap();
    world.node.tool("egress", &["set", "--container", "c3", set.to_str().unwrap()]).printed();
    let left =
        format!("left alone: policy {shown} of net c3 eth0, which \"egress set\" has replaced\n");
    assert_eq!(reload(), reloaded("c2") + &left);
    assert!(reaches(&second, FAR[0]) && reaches(&third, FAR[1]) && !reaches(&third, FAR[0]));

    // A running repair does so by itself; a file that is gone leaves its policy.
    let cache = world.node.path("cache").display().to_string();
    let watch = world.node.cnibox(&["repair", "--watch", "--cache-dir", &cache]);
    let watch = Running::start(&watch);
    eventually("it waits", || watch.sleeps());
    write(FAR[3]).unwrap();
    eventually("the new policy", || reaches(&second, FAR[3]));
    assert!(!reaches(&second, FAR[0]));
    fs::remove_file(&file).unwrap();
    eventually("it waits again", || watch.sleeps());
    assert!(reaches(&second, FAR[3]) && !reaches(&second, FAR[0]));
    watch.ends();
    assert_eq!(reload(), "no policy has changed\n");
}

#[test]
fn events_are_lines_about_each_refused_flow() {
    for mode in ["enforce", "audit"] {
        let keys = json!({"allow": [{"to": [FAR[0]]}], "mode": mode});
        let world = World::new("bridge", &keys);
        let list = list(&world.node, "bridge", &keys);
        list.call("DEL", &world.attached(), 1, Some(&world.result)).ok();
        list.call("ADD", &world.attached(), 1, Some(&world.result)).env("CNI_ARGS", POD).result();
        let sent = |port| world.reaches(&world.outside, FAR[1], port);
        sent(4000);
        let file = world.node.path("events.json").display().to_string();
        let script = format!("exec \"$0\" \"$@\" >{file}");
        let call = world.node.tool("egress", &["events", "--interval", "1"]);
        let running = Running::start(&call.under(&["sh", "-c", &script]));
        let events = |port: u16| -> Vec<Value> {
            let text = fs::read_to_string(&file).unwrap_or_default();
            let all = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
            all.filter(|event| event["service"] == format!("udp/{port}")).collect()
        };
        eventually("an event of what was there before", || !events(4000).is_empty());
        sent(4001);
        eventually("an event", || !events(4001).is_empty());
        let first = events(4001).remove(0);
        let verdict = if mode == "audit" { "noted" } else { "refused" };
        for (key, value) in [
            ("network", "net"),
            ("container", "c1"),
            ("interface", "eth0"),
            ("pod", "space/agent"),
            ("destination", FAR[1]),
            ("verdict", verdict),
        ] {
            assert_eq!(first[key], value, "{mode}: {first}");
        }
        let time = first["time"].as_str().unwrap();
        assert!(time.len() == 24 && time.ends_with('Z'), "{time}");
        assert!(first["packets"].as_u64().unwrap() >= 1, "{first}");
        sent(4001);
        eventually("an event about more packets", || events(4001).len() == 2);
        assert_eq!(events(4000).len(), 1, "{mode}: once");
        running.ends();
    }
}

#[test]
fn wrong_words_are_wrong_usage() {
    let node = crate::support::node::Node::new();
    for args in [
        &["reload", "--json"][..],
        &["reload", "x"],
        &["events", "--interval", "0"],
        &["events", "--metrics"],
        &["set", "--container", "c1", "--interval", "1", "x"],
    ] {
        assert_eq!(node.tool("egress", args).run().status, Some(2), "{args:?}");
    }
}
