//! IPAM plugins that are missing, fail or return invalid results: the error, and no state left.

use serde_json::{Value, json};

use super::simple;
use crate::support::net::{Net, no_veth_remains, settles};
use crate::support::node::{Container, Node, Refusal};

/// A network with an IPAM plugin that runs the shell command `add` on ADD and logs its calls to the
/// file `calls`.
fn net<'n>(node: &'n Node, add: &str) -> Net<'n> {
    node.script(
        "fake",
        &format!(
            "cat > {0}/stdin; echo $CNI_COMMAND >> {0}/calls\n[ $CNI_COMMAND = ADD ] || exit 0\n{add}",
            node.path("").display()
        ),
    );
    node.sh(
        "ip link show br0 2>/dev/null || ip link add br0 address 02:00:00:00:00:0b up type bridge",
    );
    simple(node, &json!({"isGateway": true, "ipam": {"type": "fake"}}))
}

/// Asserts that ADD fails and changes neither host nor container; returns the error.
#[track_caller]
fn refused(net: &Net<'_>) -> Refusal {
    let container = Container::new();
    let before = (net.node.snapshot(), container.snapshot(net.node));
    let error = net.on("ADD", &container).error();
    settles(&before.0, || net.node.snapshot());
    settles(&before.1, || container.snapshot(net.node));
    error
}

fn calls(node: &Node) -> String {
    std::fs::read_to_string(node.path("calls")).unwrap().replace('\n', " ")
}

#[test]
fn a_missing_plugin_is_named_with_the_path() {
    let node = Node::new();
    node.sh("ip link add br0 address 02:00:00:00:00:0b up type bridge");
    let net = simple(&node, &json!({"ipam": {"type": "no-such"}}));
    let path = format!("{}:/nowhere", node.bin().display());
    let container = Container::new();
    let msg =
        format!("failed to find plugin \"no-such\" in path [{} /nowhere]", node.bin().display());
    for verb in ["ADD", "DEL", "CHECK", "STATUS"] {
        let error = net.on(verb, &container).env("CNI_PATH", &path).error();
        assert_eq!(error.msg, msg, "{verb}");
    }
    no_veth_remains(&node);
    // DEL deletes the link although the IPAM plugin fails.
    let fine = simple(&node, &json!({}));
    fine.add(&container);
    assert_eq!(net.on("DEL", &container).env("CNI_PATH", &path).error().msg, msg);
    no_veth_remains(&node);
    let error =
        simple(&node, &json!({"ipam": {"type": "../bridge"}})).on("ADD", &container).error();
    assert_eq!(error.msg, "invalid plugin name: ../bridge");
}

#[test]
fn the_ipam_plugin_gets_the_request_unchanged() {
    let node = Node::new();
    let net = net(&node, r#"echo '{"cniVersion":"1.1.0","ips":[{"address":"10.5.0.9/16"}]}'"#);
    let text = format!("{}  \n", net.conf.to_string().replace("\"ipam\"", "  \"IPAM\""));
    let container = Container::new();
    let result: Value = net.on("ADD", &container).stdin(text.as_str()).result();
    assert_eq!(std::fs::read_to_string(node.path("stdin")).unwrap(), text);
    // Without a gateway from IPAM the first address of the subnet is the gateway.
    assert_eq!(
        result["ips"],
        json!([{"address": "10.5.0.9/16", "gateway": "10.5.0.1", "interface": 2}])
    );
    net.del(&container);
    assert_eq!(calls(&node), "ADD DEL ");
}

#[test]
fn an_unparsable_ipam_result_is_refused() {
    let node = Node::new();
    for (output, start) in [
        ("echo garbage", "failed to unmarshal raw result: "),
        ("echo '[1]'", "failed to unmarshal raw result: "),
        ("exit 0", "failed to unmarshal raw result: "),
        (r#"echo '{"cniVersion":"9.0.0"}'"#, "unsupported CNI result version \"9.0.0\""),
        (r#"echo '{"ips":[{"address":"10.1.2.300/24"}]}'"#, "invalid CIDR address: 10.1.2.300/24"),
        (r#"echo '{"ips":7}'"#, ""),
    ] {
        let error = refused(&net(&node, output));
        assert!([6, 999].contains(&error.code) && error.msg.contains(start), "{output}: {error:?}");
        assert!(!error.msg.is_empty());
    }
}

#[test]
fn no_addresses_are_refused_and_released() {
    let node = Node::new();
    for output in
        [r#"echo '{"cniVersion":"1.0.0"}'"#, r#"echo '{"ips":[]}'"#, "echo null", "echo {}"]
    {
        let net = net(&node, output);
        drop(std::fs::remove_file(node.path("calls")));
        let error = refused(&net);
        assert_eq!(error.brief(), (999, "IPAM plugin returned missing IP config"), "{output}");
        assert_eq!(calls(&node), "ADD DEL ");
    }
}

#[test]
fn an_error_object_passes_through_and_del_follows() {
    let node = Node::new();
    let net = net(
        &node,
        r#"echo '{"cniVersion":"1.0.0","code":123,"msg":"no <room>","details":"ask later"}'; exit 7"#,
    );
    let error = refused(&net);
    assert_eq!(error.brief(), (123, "no <room>"));
    assert!(error.details.contains("ask later"), "{error:?}");
    assert_eq!(error.version, "1.1.0");
    assert_eq!(calls(&node), "ADD DEL ", "the specification wants DEL after a failed ADD");
}

#[test]
fn a_failure_without_an_error_object_is_described() {
    let node = Node::new();
    for (script, msg) in [
        ("exit 3", "netplugin failed with no error message: exit status 3"),
        ("echo boo >&2; exit 1", "netplugin failed: \"boo\\n\": exit status 1"),
        ("kill -9 $$", "netplugin failed with no error message: signal: killed"),
    ] {
        let error = refused(&net(&node, script));
        assert_eq!(error.brief(), (0, msg), "{script}");
    }
}

#[test]
fn stderr_of_the_ipam_plugin_is_forwarded() {
    let node = Node::new();
    let net = net(
        &node,
        r#"echo chatter >&2; echo '{"ips":[{"address":"10.1.2.9/24"}]}'; echo more >&2"#,
    );
    let outcome = net.on("ADD", &Container::new()).run();
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    assert_eq!(outcome.stderr, "chatter\nmore\n");
    serde_json::from_str::<Value>(&outcome.stdout).unwrap();
}

#[test]
fn ipam_results_of_older_versions_are_converted() {
    let node = Node::new();
    let net = net(
        &node,
        r#"echo '{"cniVersion":"0.2.0","ip4":{"ip":"10.1.2.9/24","gateway":"10.1.2.7","routes":[{"dst":"0.0.0.0/0"}]},"ip6":{"ip":"2001:db8::9/64"}}'"#,
    );
    let container = Container::new();
    let result = net.add(&container);
    let ips = json!([{"address": "10.1.2.9/24", "gateway": "10.1.2.7", "interface": 2},
                     {"address": "2001:db8::9/64", "gateway": "2001:db8::1", "interface": 2}]);
    assert_eq!((&result["ips"], &result["routes"]), (&ips, &json!([{"dst": "0.0.0.0/0"}])));
    assert_eq!(container.ip("route show default")[0]["gateway"], "10.1.2.7");
}

#[test]
fn a_foreign_host_local_earlier_in_cni_path_is_used() {
    let node = Node::new();
    let other = node.path("other");
    std::fs::create_dir(&other).unwrap();
    node.script("fake", r#"cat >/dev/null; echo '{"ips":[{"address":"10.1.2.99/24"}]}'"#);
    std::fs::rename(node.bin().join("fake"), other.join("host-local")).unwrap();
    let path = format!("{}:{}", other.display(), node.bin().display());
    let net = simple(&node, &json!({}));
    let result = net.on("ADD", &Container::new()).env("CNI_PATH", &path).result();
    assert_eq!(result["ips"][0]["address"], "10.1.2.99/24");
    assert_eq!(net.leases(), [""; 0]);
}
