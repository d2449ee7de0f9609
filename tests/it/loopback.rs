//! loopback: `lo` is set up and down, in every version.

use serde_json::{Value, json};

use crate::support::net::{Net, addresses, normal};
use crate::support::node::{Container, Node, VERSIONS, assert_unchanged};
use crate::support::traffic::Place;

fn golden(version: &str) -> String {
    let text = crate::support::lifecycle::golden!("loopback")(version);
    text.trim_end().replace("VERSION", version)
}

fn is_up(container: &Container) -> bool {
    let flags = &container.ip("link show lo")[0]["flags"];
    flags.as_array().unwrap().contains(&json!("UP"))
}

fn net<'n>(node: &'n Node, version: &'static str) -> Net<'n> {
    // `type` is optional.
    Net::new(node, "loopback", version, &json!({"type": null}))
}

#[test]
fn add_sets_lo_up_check_agrees_and_del_sets_it_down() {
    for version in VERSIONS {
        let node = Node::new();
        let (net, container) = (net(&node, version), Container::new());
        let before = node.snapshot();
        assert!(!is_up(&container));
        if version == "1.1.0" {
            assert!(!container.reaches_within("127.0.0.1", 1));
        }
        let add = net.on("ADD", &container).ifname("lo").env("CNI_ARGS", "none");
        let printed = add.printed();
        assert_eq!(normal(&printed, &container), golden(version));
        assert!(is_up(&container));
        assert!(container.reaches("127.0.0.1") && container.reaches("::1"));
        assert_eq!(normal(&add.printed(), &container), golden(version), "a second ADD");
        let prev: Value = serde_json::from_str(&printed).unwrap();
        if version >= "0.4.0" {
            net.check(&container, &prev).ok();
            net.on("CHECK", &container).ok();
        } else {
            let error = net.check(&container, &prev).error();
            assert_eq!(error.brief(), (1, "config version does not allow CHECK"));
        }
        net.del(&container);
        assert!(!is_up(&container));
        // The kernel keeps the address that it assigned when `lo` came up.
        assert_eq!(addresses(&container.ip("addr show lo")), ["127.0.0.1/8"]);
        net.del(&container);
        assert_unchanged(&before, &node.snapshot());
    }
}

#[test]
fn del_works_without_add_and_without_a_namespace() {
    for version in VERSIONS {
        let node = Node::new();
        let (net, container) = (net(&node, version), Container::new());
        container.sh("ip link set lo up");
        net.call("DEL", "c1").netns("").ok();
        net.call("DEL", "c1").without("CNI_NETNS").ok();
        assert!(is_up(&container));
        net.del(&container);
        assert!(!is_up(&container));
        let path = container.path();
        drop(container);
        net.call("DEL", "c1").netns(&path).ok();
        let file = node.path("plain");
        std::fs::write(&file, "").unwrap();
        net.call("DEL", "c1").netns(&file.display().to_string()).ok();
        assert_eq!(node.ip("link show lo")[0]["flags"], json!(["LOOPBACK", "UP", "LOWER_UP"]));
    }
}

#[test]
fn gc_and_status_succeed_and_change_nothing() {
    let node = Node::new();
    for version in VERSIONS {
        for verb in ["GC", "STATUS"] {
            let call = net(&node, version).with(&json!({"cni.dev/valid-attachments": []}));
            let call = call.call(verb, "").without("CNI_CONTAINERID");
            if version == "1.1.0" {
                call.ok();
            } else {
                let msg = format!("config version does not allow {verb}");
                assert_eq!(call.error().brief(), (1, msg.as_str()));
            }
        }
    }
    // Not even a missing list is an error.
    let outcome = net(&node, "1.1.0").call("GC", "").without("CNI_CONTAINERID").run();
    assert_eq!((outcome.status, outcome.stdout.as_str()), (Some(0), ""));
}

#[test]
fn a_prev_result_is_passed_on_unchanged() {
    let node = Node::new();
    for (version, prev) in [
        (
            "0.2.0",
            json!({"ip4": {"ip": "10.0.0.2/24", "routes": [{"dst": "0.0.0.0/0"}]}, "dns": {"domain": "x"}}),
        ),
        // Not convertible; passed through.
        ("0.2.0", json!({"cniVersion": "0.2.0", "dns": {}})),
        (
            "0.4.0",
            json!({"interfaces": [{"name": "eth0", "sandbox": "/x"}], "ips": [{"version": "4", "interface": 0, "address": "10.0.0.2/24"}], "dns": {}}),
        ),
        (
            "1.0.0",
            json!({"cniVersion": "1.1.0", "interfaces": [{"name": "eth0", "mac": "02:00:00:00:00:01"}], "routes": [{"dst": "0.0.0.0/0", "table": 0}]}),
        ),
        (
            "1.1.0",
            json!({"interfaces": [{"name": "eth0", "mtu": 1400, "pciID": "a", "socketPath": "/s"}], "dns": {"search": ["a"]}}),
        ),
    ] {
        let container = Container::new();
        let result = net(&node, version).with(&json!({"prevResult": prev})).add(&container);
        let mut expected = prev.clone();
        expected["cniVersion"] = version.into();
        assert_eq!(result, expected);
        assert!(is_up(&container));
    }
}

#[test]
fn an_unreadable_prev_result_leaves_lo_down() {
    let node = Node::new();
    for (prev, start) in [
        (
            json!({"cniVersion": "0.4.0"}),
            "could not parse prevResult: result type supports [1.0.0 1.1.0] but unmarshalled CNIVersion is \"0.4.0\"",
        ),
        (json!({"ips": [{"address": "x"}]}), "could not parse prevResult: "),
        (json!("text"), "could not parse prevResult: "),
    ] {
        let container = Container::new();
        let net = net(&node, "1.1.0").with(&json!({"prevResult": prev}));
        let error = net.on("ADD", &container).error();
        assert!(error.code == 999 && error.msg.starts_with(start), "{error:?}");
        assert!(!is_up(&container));
    }
}

#[test]
fn a_foreign_address_on_lo_is_refused() {
    for (address, ip) in [("10.0.0.9/8", "10.0.0.9"), ("2001:db8::9/64", "2001:db8::9")] {
        let node = Node::new();
        let (net, container) = (net(&node, "1.1.0"), Container::new());
        container.sh(&format!("ip addr add {address} dev lo"));
        let msg = format!("loopback interface found with non-loopback address \"{ip}\"");
        net.add_is_refused(&container, 999, &msg);
        assert!(!is_up(&container));
        container.sh("ip link set lo up");
        net.add_is_refused(&container, 999, &msg);
        net.check_finds(&container, &json!({}), &msg);
        // Other addresses of 127.0.0.0/8 are allowed.
        container.sh(&format!("ip addr del {address} dev lo"));
        container.sh("ip addr add 127.0.0.9/8 dev lo");
        assert_eq!(net.add(&container)["ips"].as_array().unwrap().len(), 2);
    }
}

#[test]
fn check_reports_lo_down() {
    let node = Node::new();
    let (net, container) = (net(&node, "1.1.0"), Container::new());
    let result = net.add(&container);
    container.sh("ip link set lo down");
    net.check_finds(&container, &result, "loopback interface is down");
}

#[test]
fn a_path_that_is_no_namespace_is_refused_with_code_8() {
    let node = Node::new();
    for (path, why) in [
        ("/no/such", "failed to Statfs \"/no/such\": no such file or directory"),
        ("/", "unknown FS magic on \"/\": "),
    ] {
        for verb in ["ADD", "CHECK"] {
            let error = net(&node, "1.1.0").call(verb, "c1").netns(path).error();
            assert!(error.code == 8 && error.msg.contains(why), "{error:?}");
        }
    }
}
