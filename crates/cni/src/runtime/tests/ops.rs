//! ADD, CHECK and DEL.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use super::{Node, answer, attach, list};
use crate::error::ErrorCode;
use crate::runtime::{AttachmentParams, NetworkList, OnAddError, OnDelError, PluginConfig};
use crate::version::SpecVersion;

const FAIL: &str = r#"echo '{"code":105,"msg":"refused","details":"why"}'; exit 1"#;

fn three(version: &str) -> NetworkList {
    list(&format!(
        r#"{{"name":"net","cniVersion":"{version}","plugins":[
            {{"type":"a"}},{{"type":"b","name":"own"}},{{"type":"c"}}]}}"#
    ))
}

/// A node with three plugins that answer 10.0.0.1, .2 and .3 in the given version.
fn node(version: &str) -> Node {
    let node = Node::new();
    for (name, address) in [("a", "10.0.0.1/24"), ("b", "10.0.0.2/24"), ("c", "10.0.0.3/24")] {
        node.plugin(name, &answer(version, address));
    }
    node
}

fn prev(address: &str) -> String {
    format!(r#""prevResult":{{"cniVersion":"1.0.0","ips":[{{"address":"{address}"}}]}}"#)
}

#[test]
fn add_passes_results_down_the_chain() {
    let node = node("1.0.0");
    let list = three("1.0.0");
    let result = node.runtime.add(&list, &attach()).unwrap().unwrap();
    assert_eq!(result.ips[0].address.to_string(), "10.0.0.3/24");
    assert_eq!(node.calls(), ["ADD a", "ADD b", "ADD c"]);
    assert_eq!(node.request("a", "ADD"), r#"{"cniVersion":"1.0.0","name":"net","type":"a"}"#);
    let expected =
        format!(r#"{{"cniVersion":"1.0.0","name":"net",{},"type":"b"}}"#, prev("10.0.0.1/24"));
    assert_eq!(node.request("b", "ADD"), expected);
    assert!(node.request("c", "ADD").contains(&prev("10.0.0.2/24")));
    let bin = node.path("bin");
    let env = format!("c1|/run/netns/x|eth0|IP=10.0.0.9|{}\n", bin.display());
    assert_eq!(node.env("a", "ADD"), env);
    assert_eq!(node.runtime.cached_result(&list, &attach()).unwrap(), Some(result));
    let (config, again) = node.runtime.cached_config("net", &attach()).unwrap().unwrap();
    assert_eq!((config.as_slice(), again), (list.bytes(), attach()));
}

#[test]
fn only_intermediate_results_are_converted() {
    let node = node("0.4.0");
    let result = node.runtime.add(&three("1.0.0"), &attach()).unwrap().unwrap();
    assert!(node.request("b", "ADD").contains(&prev("10.0.0.1/24")));
    assert_eq!(result.version, SpecVersion::V0_4_0);
}

#[test]
fn add_stops_at_the_first_failure() {
    let node = node("1.0.0");
    node.plugin("b", FAIL);
    let error = node.runtime.add(&three("1.0.0"), &attach()).unwrap_err();
    let text = "plugin type=\"b\" name=\"own\" failed (add): refused; why";
    assert_eq!((error.to_string().as_str(), error.code()), (text, ErrorCode(105)));
    assert_eq!(node.calls(), ["ADD a", "ADD b"]);
    assert!(node.cached().is_empty());
    fs::remove_file(node.path("bin/b")).unwrap();
    let error = node.runtime.add(&three("1.0.0"), &attach()).unwrap_err();
    let bin = node.path("bin");
    let text = format!(
        "plugin type=\"b\" name=\"own\" failed (add): failed to find plugin \"b\" in path [{}]",
        bin.display()
    );
    assert_eq!(error.message(), text);
}

#[test]
fn a_second_add_does_not_undo_the_first() {
    let mut node = node("1.0.0");
    node.runtime.on_add_error = OnAddError::Undo;
    let list = three("1.0.0");
    node.runtime.add(&list, &attach()).unwrap();
    node.plugin("b", FAIL);
    node.forget_calls();
    assert_eq!(node.runtime.add(&list, &attach()).unwrap_err().code(), ErrorCode(105));
    assert_eq!(node.calls(), ["ADD a", "ADD b"]);
}

#[test]
fn a_failing_add_can_be_undone() {
    let mut node = node("1.0.0");
    node.runtime.on_add_error = OnAddError::Undo;
    node.plugin("c", FAIL);
    // The other plugins get their DEL also if one DEL fails.
    node.plugin("b", &format!("[ $CNI_COMMAND = ADD ] || exit 1; {}", answer("1.0.0", "::2/64")));
    let error = node.runtime.add(&three("1.0.0"), &attach()).unwrap_err();
    assert!(error.message().ends_with("failed (add): refused"));
    assert_eq!(node.calls(), ["ADD a", "ADD b", "ADD c", "DEL c", "DEL b", "DEL a"]);
    assert!(node.request("a", "DEL").contains(&prev("::2/64")));
    // A plugin that never ran has nothing to undo.
    fs::remove_file(node.path("bin/b")).unwrap();
    node.forget_calls();
    node.runtime.add(&three("1.0.0"), &attach()).unwrap_err();
    assert_eq!(node.calls(), ["ADD a", "DEL a"]);
}

#[test]
fn names_are_checked_by_every_operation() {
    let node = node("1.0.0");
    let outside = node.path("net-x-eth0");
    fs::write(&outside, "{}").unwrap();
    for (id, ifname, code) in [
        ("", "eth0", ErrorCode::UNKNOWN_CONTAINER),
        ("../x", "eth0", ErrorCode::INVALID_ENVIRONMENT),
        ("x", "", ErrorCode::INVALID_ENVIRONMENT),
        ("x", "a/b", ErrorCode::INVALID_ENVIRONMENT),
        ("x", "sixteen-bytes-xx", ErrorCode::INVALID_ENVIRONMENT),
    ] {
        let attach = AttachmentParams::new(id, "/x", ifname);
        let list = three("1.0.0");
        let error = node.runtime.add(&list, &attach).unwrap_err();
        assert_eq!(error.code(), code, "{id} {ifname}");
        assert!(error.message().starts_with("plugin type=\"a\" failed (add): "), "{error}");
        assert_eq!(node.runtime.del(&list, &attach).unwrap_err().code(), code);
        assert_eq!(node.runtime.check(&list, &attach).unwrap_err().code(), code);
        assert!(node.runtime.cached_result(&list, &attach).is_err());
        assert!(node.runtime.cached_config("net", &attach).is_err());
    }
    let bad = list(r#"{"name":"a/b","cniVersion":"1.0.0","plugins":[{"type":"a"}]}"#);
    for error in [
        node.runtime.add(&bad, &attach()).unwrap_err(),
        node.runtime.del(&bad, &attach()).unwrap_err(),
        node.runtime.check(&bad, &attach()).unwrap_err(),
    ] {
        assert!(error.message().ends_with("invalid characters found in network name"), "{error}");
    }
    assert!(node.calls().is_empty() && outside.exists());
}

#[test]
fn a_cache_that_cannot_be_written_fails_the_add() {
    let mut node = node("1.0.0");
    fs::write(node.path("cache"), "").unwrap();
    let error = node.runtime.add(&three("1.0.0"), &attach()).unwrap_err();
    assert!(
        error.message().starts_with("failed to set network \"net\" cached result: "),
        "{error}"
    );
    assert_eq!(node.calls().len(), 3);
    node.runtime.on_add_error = OnAddError::Undo;
    node.runtime.add(&three("1.0.0"), &attach()).unwrap_err();
    assert_eq!(node.calls()[6..], ["DEL c", "DEL b", "DEL a"]);
}

#[test]
fn check_passes_the_final_result_to_every_plugin() {
    let node = node("1.0.0");
    let list = three("1.0.0");
    node.runtime.add(&list, &attach()).unwrap();
    node.forget_calls();
    node.runtime.check(&list, &attach()).unwrap();
    assert_eq!(node.calls(), ["CHECK a", "CHECK b", "CHECK c"]);
    for plugin in ["a", "b", "c"] {
        let request = node.request(plugin, "CHECK");
        assert!(request.contains(&prev("10.0.0.3/24")), "{request}");
        assert!(!request.contains("config") && !request.contains("kind"), "{request}");
    }
    node.plugin("b", FAIL);
    node.forget_calls();
    assert_eq!(node.runtime.check(&list, &attach()).unwrap_err().to_string(), "refused; why");
    assert_eq!(node.calls(), ["CHECK a", "CHECK b"]);
}

#[test]
fn check_before_0_4_0_is_an_error() {
    let node = node("0.3.1");
    for version in ["", "0.3.1"] {
        let error = node.runtime.check(&three(version), &attach()).unwrap_err();
        let text =
            format!("configuration version \"{version}\" does not support the CHECK command");
        assert_eq!(
            (error.message(), error.code()),
            (text.as_str(), ErrorCode::INCOMPATIBLE_VERSION)
        );
    }
    let list =
        list(r#"{"name":"n","cniVersion":"0.4.0","disableCheck":true,"plugins":[{"type":"a"}]}"#);
    node.runtime.check(&list, &attach()).unwrap();
    assert!(node.calls().is_empty());
}

#[test]
fn check_and_del_use_the_cached_result() {
    let node = node("1.0.0");
    let list = three("1.0.0");
    let file = "net-c1-eth0";
    node.runtime.check(&list, &attach()).unwrap();
    assert!(!node.request("a", "CHECK").contains("prevResult"), "nothing cached");
    // An older result, as libcni wrote them before it cached configurations.
    node.cache(file, r#"{"cniVersion":"0.4.0","ips":[{"version":"4","address":"10.1.1.1/8"}]}"#);
    node.runtime.check(&list, &attach()).unwrap();
    assert!(node.request("a", "CHECK").contains(&prev("10.1.1.1/8")));
    let start = "failed to get network \"net\" cached result: ";
    for (content, why) in [
        ("adf", "decoding version from network config: "),
        (r#"{"cniVersion":"0.4567.0"}"#, "unsupported CNI result version \"0.4567.0\""),
    ] {
        node.cache(file, content);
        let error = node.runtime.check(&list, &attach()).unwrap_err();
        assert!(error.message().starts_with(&format!("{start}{why}")), "{error}");
        node.runtime.del(&list, &attach()).unwrap();
        assert!(!node.request("a", "DEL").contains("prevResult"));
        assert!(node.cached().is_empty(), "a file that is no good is dropped");
    }
    node.cache(file, "adf");
    node.plugin("c", FAIL);
    node.runtime.del(&list, &attach()).unwrap_err();
    assert!(node.cached().is_empty(), "at once, whatever becomes of the DEL");
    node.plugin("c", "");
    node.cache(file, "");
    node.runtime.check(&list, &attach()).unwrap();
    node.runtime.del(&list, &attach()).unwrap();
    assert!(node.cached().is_empty(), "an empty file goes with its attachment");
}

#[test]
fn del_runs_in_reverse_order_and_clears_the_cache() {
    let node = node("1.0.0");
    let list = three("1.0.0");
    node.runtime.add(&list, &attach()).unwrap();
    node.forget_calls();
    node.runtime.del(&list, &attach()).unwrap();
    assert_eq!(node.calls(), ["DEL c", "DEL b", "DEL a"]);
    for plugin in ["a", "b", "c"] {
        assert!(node.request(plugin, "DEL").contains(&prev("10.0.0.3/24")));
    }
    assert!(node.cached().is_empty());
    node.runtime.del(&list, &attach()).unwrap();
    assert!(!node.request("a", "DEL").contains("prevResult"));
}

#[test]
fn del_before_0_4_0_has_no_previous_result() {
    let node = node("0.3.1");
    let list = three("0.3.1");
    node.runtime.add(&list, &attach()).unwrap();
    assert!(node.request("b", "ADD").contains("prevResult"));
    node.runtime.del(&list, &attach()).unwrap();
    assert!(!node.request("a", "DEL").contains("prevResult"));
    assert!(node.cached().is_empty());
    assert_eq!(node.runtime.del(&three("x"), &attach()).unwrap_err().code(), ErrorCode::DECODE);
}

#[test]
fn a_failing_del_keeps_the_cache() {
    let mut node = node("1.0.0");
    let list = three("1.0.0");
    node.runtime.add(&list, &attach()).unwrap();
    node.plugin("b", FAIL);
    node.forget_calls();
    let error = node.runtime.del(&list, &attach()).unwrap_err();
    let text = "plugin type=\"b\" name=\"own\" failed (delete): refused; why";
    assert_eq!((error.to_string().as_str(), error.code()), (text, ErrorCode(105)));
    assert_eq!(node.calls(), ["DEL c", "DEL b"]);
    node.runtime.on_del_error = OnDelError::Continue;
    node.plugin("a", FAIL);
    node.forget_calls();
    let error = node.runtime.del(&list, &attach()).unwrap_err();
    assert_eq!(node.calls(), ["DEL c", "DEL b", "DEL a"]);
    assert!(
        error.message().contains("type=\"b\"") && error.message().contains("type=\"a\""),
        "{error}"
    );
    assert_eq!(node.cached(), ["net-c1-eth0"]);
}

#[test]
fn a_single_plugin_is_added_checked_and_deleted() {
    let node = node("1.0.0");
    let raw = br#"{ "type": "a", "name": "solo", "cniVersion": "1.0.0", "x": 1.0 }"#;
    let conf = PluginConfig::from_bytes(raw).unwrap();
    let result = node.runtime.add_plugin(&conf, &attach()).unwrap();
    let expected = r#"{"cniVersion":"1.0.0","name":"solo","type":"a","x":1}"#;
    assert_eq!(node.request("a", "ADD"), expected);
    let (config, _) = node.runtime.cached_config("solo", &attach()).unwrap().unwrap();
    assert_eq!(config, raw);
    let list = NetworkList::from_plugin(&conf).unwrap();
    assert_eq!(node.runtime.cached_result(&list, &attach()).unwrap(), result);
    node.runtime.check_plugin(&conf, &attach()).unwrap();
    assert!(node.request("a", "CHECK").contains("prevResult"));
    node.runtime.del_plugin(&conf, &attach()).unwrap();
    assert!(node.cached().is_empty());
    node.plugin("a", FAIL);
    let error = node.runtime.add_plugin(&conf, &attach()).unwrap_err();
    assert_eq!(error.to_string(), "refused; why");
}

#[test]
fn every_operation_has_a_deadline() {
    let mut node = Node::new();
    node.runtime.deadline = Some(Duration::from_millis(150));
    node.plugin("s", "sleep 60");
    let list = list(r#"{"name":"n","cniVersion":"1.1.0","plugins":[{"type":"s"}]}"#);
    let started = Instant::now();
    for error in [
        node.runtime.add(&list, &attach()).unwrap_err(),
        node.runtime.check(&list, &attach()).unwrap_err(),
        node.runtime.del(&list, &attach()).unwrap_err(),
        node.runtime.gc(&list, None).unwrap_err(),
        node.runtime.status(&list).unwrap_err(),
        node.runtime.validate(&list).unwrap_err(),
    ] {
        let text = "netplugin failed with no error message: signal: killed";
        assert!(error.message().contains(text), "{error}");
    }
    assert!(started.elapsed() < Duration::from_secs(20));
}

#[test]
fn cache_files_are_private() {
    let node = node("1.0.0");
    node.runtime.add(&three("1.0.0"), &attach()).unwrap();
    let mode = |name: &str| fs::metadata(node.path(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode("cache/results/net-c1-eth0"), 0o600);
    assert_eq!((mode("cache"), mode("cache/results")), (0o700, 0o700));
}
