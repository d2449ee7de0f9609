//! The mode audit: what a policy would refuse passes, is listed, and makes the policy that would do.

use serde_json::{Value, json};

use super::{FAR, OUTSIDE, World, list};
use crate::support::traffic::Place;

#[test]
fn an_audited_policy_refuses_nothing_and_tells_what_it_would() {
    for kind in ["bridge", "ptp"] {
        let keys = json!({"allow": [{"to": ["192.0.2.0/24"]}], "mode": "audit"});
        let world = World::new(kind, &keys);
        for (place, ip) in [
            (&world.outside, FAR[0]),
            (&world.outside, FAR[1]),
            (&world.outside, FAR[3]),
            (&world.outside, OUTSIDE[0]),
            (&world.neighbour, "10.1.2.2"),
            (&world.neighbour, "2001:db8:1::2"),
        ] {
            assert!(world.reaches(place, ip, 4000), "{kind}: {ip}");
        }
        assert!(world.reaches(&world.node, "10.1.2.1", 4001), "{kind}: the host");
        assert!(world.inside.reaches(FAR[1]), "{kind}: ping");
        let list = list(&world.node, kind, &keys);
        list.check(&world.attached(), &world.result).unwrap();

        let learned = world.node.tool("egress", &["learn", "--container", "c1"]).printed();
        let policy: Value = serde_json::from_str(&learned).unwrap();
        let allow = policy["allow"].as_array().unwrap();
        let opens = |to: &str, service: &str| {
            let is = |list: &Value, text: &str| list.as_array().unwrap().contains(&json!(text));
            allow[1..].iter().any(|entry| is(&entry["to"], to) && is(&entry["ports"], service))
        };
        assert_eq!(allow[0], json!({"to": ["192.0.2.0/24"]}));
        for (to, service) in [
            (FAR[1], "udp/4000"),
            (FAR[1], "icmp"),
            (FAR[3], "udp/4000"),
            (OUTSIDE[0], "udp/4000"),
            ("host", "udp/4001"),
        ] {
            assert!(opens(to, service), "{kind}: {to} {service}: {learned}");
        }
        assert!(!learned.contains(FAR[0]), "{kind}: it is allowed: {learned}");

        // What was learned is enough, and enforced.
        let file = world.node.path("learned.json");
        std::fs::write(&file, &learned).unwrap();
        let file = file.to_str().unwrap();
        world.node.tool("egress", &["set", "--container", "c1", file]).printed();
        for ip in [FAR[0], FAR[1], FAR[3], OUTSIDE[0]] {
            assert!(world.reaches(&world.outside, ip, 4000), "{kind}: {ip} afterwards");
        }
        assert!(world.reaches(&world.node, "10.1.2.1", 4001), "{kind}: the host afterwards");
        assert!(!world.reaches(&world.outside, FAR[1], 4002), "{kind}: enforced");
    }
}

/// Who the container is counts in this mode, too.
#[test]
fn an_audited_container_sends_from_its_own_addresses_only() {
    let world = World::new("bridge", &json!({"mode": "audit"}));
    assert!(world.reaches(&world.outside, FAR[1], 4000));
    world.inside.sh("ip addr add 10.1.2.77/24 dev eth0");
    let answers = |source: &str| {
        let ping = format!("ping -n -c 1 -W 1 -I {source} {} && echo answered || true", FAR[1]);
        world.inside.sh(&ping).contains("answered")
    };
    assert!(answers(&world.ip(false)) && !answers("10.1.2.77"));
}

#[test]
fn an_unknown_mode_is_refused() {
    let world = World::new("bridge", &json!({}));
    let list = list(&world.node, "bridge", &json!({"mode": "observe"}));
    let error = list.call("ADD", &world.attached(), 1, Some(&world.result)).error();
    assert_eq!(error.brief(), (7, "mode \"observe\": unknown value"));
}
