//! GC, STATUS, VERSION and validation.

use std::fs;

use super::{Node, answer, attach, list};
use crate::config::ValidAttachment;
use crate::error::ErrorCode;
use crate::runtime::{AttachmentParams, NetworkList};

fn two(version: &str, keys: &str) -> NetworkList {
    list(&format!(
        r#"{{"name":"net","cniVersion":"{version}",{keys}"plugins":[
            {{"type":"a","mark":"now","capabilities":{{"mac":true}}}},{{"type":"b"}}]}}"#
    ))
}

fn node() -> Node {
    let node = Node::new();
    node.plugin("a", &answer("1.1.0", "10.0.0.1/24"));
    node.plugin("b", &answer("1.1.0", "10.0.0.2/24"));
    node
}

fn valid(id: &str) -> ValidAttachment {
    ValidAttachment { container_id: id.to_owned(), ifname: "eth0".to_owned() }
}

#[test]
fn gc_deletes_what_is_not_valid() {
    let node = node();
    let list = two("1.1.0", "");
    let other = AttachmentParams::new("c2", "/run/netns/y", "eth0");
    node.runtime.add(&list, &attach()).unwrap();
    node.runtime.add(&list, &other).unwrap();
    node.forget_calls();
    node.runtime.gc(&list, Some(&[valid("c1"), valid("c2")])).unwrap();
    assert_eq!(node.calls(), ["GC a", "GC b"]);
    assert_eq!(node.env("a", "GC"), format!("||||{}\n", node.path("bin").display()));
    node.forget_calls();
    node.runtime.gc(&list, Some(&[valid("c2")])).unwrap();
    assert_eq!(node.calls(), ["DEL b", "DEL a", "GC a", "GC b"]);
    assert!(node.env("a", "DEL").starts_with("c1|/run/netns/x|eth0|IP=10.0.0.9|"));
    assert!(node.request("a", "DEL").contains("\"prevResult\""));
    let key = r#""cni.dev/valid-attachments":[{"containerID":"c2","ifname":"eth0"}]"#;
    assert!(node.request("b", "GC").contains(key) && !node.request("b", "GC").contains("prevRes"));
    node.runtime.gc(&list, Some(&[])).unwrap();
    assert!(node.request("b", "GC").contains(r#""cni.dev/valid-attachments":[]"#));
    assert!(node.cached().is_empty());
}

#[test]
fn gc_without_a_list_deletes_and_sends_none() {
    let node = node();
    let list = two("1.1.0", "");
    node.runtime.add(&list, &attach()).unwrap();
    let elsewhere =
        super::list(r#"{"name":"other","cniVersion":"1.1.0","plugins":[{"type":"a"}]}"#);
    node.runtime.add(&elsewhere, &attach()).unwrap();
    node.runtime.gc(&list, None).unwrap();
    assert_eq!(node.cached(), ["other-c1-eth0"], "another network's attachment stays");
    assert!(!node.request("a", "GC").contains("cni.dev"));
}

#[test]
fn gc_before_1_1_0_sends_del_and_disabled_gc_nothing() {
    let node = node();
    node.runtime.add(&two("1.0.0", ""), &attach()).unwrap();
    node.forget_calls();
    node.runtime.gc(&two("1.1.0", "\"disableGC\":true,"), None).unwrap();
    assert!(node.calls().is_empty());
    node.runtime.gc(&two("1.0.0", ""), None).unwrap();
    assert_eq!(node.calls(), ["DEL b", "DEL a"]);
}

#[test]
fn gc_uses_the_cached_configuration() {
    let node = node();
    let then = list(
        r#"{"name":"net","cniVersion":"1.0.0","plugins":[
            {"type":"a","mark":"then","capabilities":{"mac":true}}]}"#,
    );
    let mac = vec![("mac".to_owned(), "02::".into())];
    node.runtime.add(&then, &AttachmentParams { capability_args: mac, ..attach() }).unwrap();
    node.forget_calls();
    node.runtime.gc(&two("1.1.0", ""), Some(&[])).unwrap();
    assert_eq!(node.calls(), ["DEL a", "GC a", "GC b"]);
    let request = node.request("a", "DEL");
    assert!(request.contains(r#""mark":"then""#), "{request}");
    assert!(request.contains(r#""runtimeConfig":{"mac":"02::"}"#), "{request}");
}

#[test]
fn gc_works_without_a_cached_configuration() {
    let node = node();
    for config in ["", "e30=", "bm90IGpzb24="] {
        node.cache(
            "net-c1-eth0",
            &format!(
                r#"{{"kind":"cniCacheV1","containerId":"c1","config":"{config}","ifName":"eth0",
                "networkName":"net","result":{{"cniVersion":"1.1.0"}}}}"#
            ),
        );
        node.forget_calls();
        node.runtime.gc(&two("1.1.0", ""), Some(&[])).unwrap();
        assert_eq!(node.calls(), ["DEL b", "DEL a", "GC a", "GC b"]);
    }
}

#[test]
fn gc_continues_after_errors_and_reports_all() {
    let node = node();
    let list = two("1.1.0", "");
    node.runtime.add(&list, &attach()).unwrap();
    let fail = r#"echo "{\"code\":100,\"msg\":\"no $CNI_COMMAND\"}"; exit 1"#;
    node.plugin("a", fail);
    node.plugin("b", fail);
    node.forget_calls();
    let error = node.runtime.gc(&list, Some(&[])).unwrap_err();
    assert_eq!(
        error.message().lines().collect::<Vec<_>>(),
        [
            "failed to delete stale attachment c1 eth0: plugin type=\"b\" failed (delete): no DEL",
            "failed to GC plugin a: no GC",
            "failed to GC plugin b: no GC"
        ]
    );
    assert_eq!((error.code(), node.calls().len()), (ErrorCode(100), 3));
}

#[test]
fn gc_reports_an_unreadable_cache_and_still_runs() {
    let node = node();
    fs::create_dir(node.path("cache")).unwrap();
    fs::write(node.path("cache/results"), "").unwrap();
    let error = node.runtime.gc(&two("1.1.0", ""), None).unwrap_err();
    assert!(error.message().starts_with("read the cached attachments: open "), "{error}");
    assert_eq!(node.calls(), ["GC a", "GC b"]);
}

#[test]
fn status_returns_the_first_error_unchanged() {
    let node = node();
    node.runtime.status(&two("1.0.0", "")).unwrap();
    assert!(node.calls().is_empty());
    node.runtime.status(&two("1.1.0", "")).unwrap();
    assert_eq!(node.calls(), ["STATUS a", "STATUS b"]);
    assert!(node.request("b", "STATUS").ends_with(r#""name":"net","type":"b"}"#));
    node.plugin("a", r#"echo '{"code":50,"msg":"down"}'; exit 1"#);
    node.forget_calls();
    let error = node.runtime.status(&two("1.1.0", "")).unwrap_err();
    assert_eq!((error.code(), error.to_string().as_str()), (ErrorCode::NOT_AVAILABLE, "down"));
    assert_eq!(node.calls(), ["STATUS a"]);
}

#[test]
fn validate_lists_capabilities_and_checks_versions() {
    let node = Node::new();
    let versions =
        |list: &str| format!(r#"echo '{{"cniVersion":"1.1.0","supportedVersions":[{list}]}}'"#);
    node.plugin("a", &versions(r#""0.1.0","1.1.0""#));
    node.plugin("b", &versions(r#""1.1.0""#));
    assert_eq!(node.runtime.validate(&two("1.1.0", "")).unwrap(), ["mac"]);
    assert_eq!(node.runtime.version_info("a").unwrap().supported_versions, ["0.1.0", "1.1.0"]);
    let error = node.runtime.validate(&two("", "")).unwrap_err();
    assert_eq!(error.message(), "[plugin b does not support config version \"0.1.0\"]");
    fs::remove_file(node.path("bin/a")).unwrap();
    let error = node.runtime.validate(&two("0.4.0", "")).unwrap_err();
    let bin = node.path("bin").display().to_string();
    assert_eq!(
        error.message(),
        format!(
            "[failed to find plugin \"a\" in path [{bin}]; install the plugin there, or correct \"type\" \
             plugin b does not support config version \"0.4.0\"]"
        )
    );
    let error = node.runtime.validate_plugin(&two("", "").plugins[1]).unwrap_err();
    assert_eq!(error.message(), "plugin b does not support config version \"0.1.0\"");
}
