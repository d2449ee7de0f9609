//! Where policies come from, and refusals.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use serde_json::{Value, json};

use super::{FAR, World, list};
use crate::support::net::merged;

/// The network of ADD of egress with keys, on a container that has a policy already.
fn refused(world: &World, keys: &Value, args: &str) -> (u64, String, String) {
    let list = list(&world.node, "bridge", keys);
    let call = list.call("ADD", &world.attached(), 1, Some(&world.result)).env("CNI_ARGS", args);
    let before = world.node.snapshot();
    let error = call.error();
    crate::support::node::assert_unchanged(&before, &world.node.snapshot());
    (error.code, error.msg, error.details)
}

#[test]
fn every_source_must_allow() {
    let one = json!({"allow": [{"to": ["192.0.2.0/24", "198.51.100.0/24"]}]});
    let world = World::new("bridge", &one);
    assert!(world.reaches(&world.outside, FAR[0], 9) && world.reaches(&world.outside, FAR[1], 9));
    let other = json!({"allow": [{"to": ["192.0.2.0/24", "169.254.169.254"]}]});
    let dir = world.node.state("egress-policies");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("two.json"), other.to_string()).unwrap();
    for (keys, args) in [
        (json!({"runtimeConfig": {"egressPolicy": other}}), ""),
        (json!({"args": {"cni": {"egressPolicy": other}}}), ""),
        (json!({"policyDir": dir}), "IgnoreUnknown=1;K8S_POD_NAME=x;EGRESS_POLICY=two"),
    ] {
        let list = list(&world.node, "bridge", &merged(&one, &keys));
        list.call("DEL", &world.attached(), 1, Some(&world.result)).ok();
        list.call("ADD", &world.attached(), 1, Some(&world.result)).env("CNI_ARGS", args).result();
        assert!(world.reaches(&world.outside, FAR[0], 9), "{keys}");
        assert!(!world.reaches(&world.outside, FAR[1], 9), "{keys}");
        assert!(!world.reaches(&world.outside, FAR[2], 9), "no source widens another: {keys}");
    }
}

#[test]
fn a_source_alone_is_the_policy() {
    let world = World::new(
        "bridge",
        &json!({"runtimeConfig": {"egressPolicy": {"allow": [{"to": ["192.0.2.0/24"]}]}}}),
    );
    assert!(world.reaches(&world.outside, FAR[0], 9) && !world.reaches(&world.outside, FAR[1], 9));
}

#[test]
fn mistakes_are_refused_and_change_nothing() {
    let world = World::new("bridge", &json!({"policy": "allow"}));
    let dir = world.node.state("egress-open");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("p.json"), "{}").unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
    for (keys, args, msg) in [
        (json!({"policy": "maybe"}), "", "policy \"maybe\""),
        (json!({"allow": [{"to": ["10.0.0/8"]}]}), "", "allow[0].to[0] \"10.0.0/8\""),
        (
            json!({"allow": [{"to": ["10.0.0.0/8"], "port": ["tcp/1"]}]}),
            "",
            "unknown key \"port\" in allow[0]",
        ),
        (
            json!({"runtimeConfig": {"egressPolicy": {"alow": []}}}),
            "",
            "unknown key \"alow\" in runtimeConfig.egressPolicy",
        ),
        (json!({"allow": [{"to": ["10.0.0.0/8"], "ports": null}]}), "", "allow[0].ports is null"),
        (json!({"deny": [{"to": ["::ffff:10.0.0.5"]}]}), "", "an IPv4 address in an IPv6 address"),
        (json!({}), "EGRESS_POLICY=x", "there is no directory of policies"),
        (json!({"policyDir": "/etc/cni/none"}), "EGRESS_POLICY=../x", "not the name of a policy"),
        (json!({"policyDir": "/tmp"}), "EGRESS_POLICY=x", "not below /etc/cni"),
        (json!({"policyDir": dir}), "EGRESS_POLICY=p", "can be written by others"),
    ] {
        let (code, text, details) = refused(&world, &keys, args);
        assert!(text.contains(msg), "{text}");
        assert_eq!(code, 7, "{text}");
        assert!(!details.is_empty(), "{text}");
    }
}

#[test]
fn an_interface_without_an_end_on_the_host_is_refused() {
    let world = World::new("bridge", &json!({"policy": "allow"}));
    world.inside.sh("ip link add eth7 type veth peer name eth8");
    let list = list(&world.node, "bridge", &json!({"policy": "allow"}));
    let call = list.call("ADD", &world.attached(), 1, Some(&world.result)).ifname("eth7");
    let error = call.error();
    assert_eq!(error.brief(), (7, "interface \"eth7\" has no other end on the host"));
}

#[test]
fn a_mac_of_another_container_is_refused() {
    let world = World::new("bridge", &json!({"policy": "allow"}));
    let mac = world.result["interfaces"][2]["mac"].as_str().unwrap().to_owned();
    let other = crate::support::node::Container::new();
    let mut list = list(&world.node, "bridge", &json!({"policy": "allow"}));
    list.conf["plugins"][0]["mac"] = json!(mac);
    let at = crate::support::conflist::Attached::new("c2", &other.path());
    let mut twin = at.clone();
    twin.runtime = json!({"mac": mac});
    list.conf["plugins"][0]["capabilities"] = json!({"mac": true});
    let failed = list.add(&twin).unwrap_err();
    assert!(failed.plugin == "egress" && failed.msg.contains("is also that of"), "{failed:?}");
}
