//! Single configurations, files, and the requests made of them.

use std::fs;
use std::os::unix::fs::symlink;

use super::{Node, list, members};
use crate::config::ValidAttachment;
use crate::error::ErrorCode;
use crate::json::Json;
use crate::runtime::{AttachmentParams, NetworkList, PluginConfig, find_config_files, ops};

fn plugin(text: &str) -> PluginConfig {
    PluginConfig::from_bytes(text.as_bytes()).unwrap()
}

fn text(bytes: crate::error::Result<Vec<u8>>) -> String {
    String::from_utf8(bytes.unwrap()).unwrap()
}

#[test]
fn the_configuration_of_a_plugin_is_read() {
    let raw = r#"{ "type": "x", "NAME": "n", "cniVersion": "1.0.0",
        "capabilities": {"a": true, "b": false}, "ipam": {"type": "y"}, "dns": {"domain": "d"} }"#;
    let conf = plugin(raw);
    assert_eq!(conf.bytes(), raw.as_bytes());
    assert_eq!((conf.plugin_type.as_str(), conf.name.as_str()), ("x", "n"));
    assert_eq!((conf.ipam_type.as_str(), conf.dns.domain.as_str()), ("y", "d"));
    assert_eq!(
        conf.capabilities.into_iter().collect::<Vec<_>>(),
        [("a".to_owned(), true), ("b".to_owned(), false)]
    );
    for bad in ["{}", "null", r#"{"type":""}"#, r#"{"name":"n","plugins":[{"type":"x"}]}"#] {
        let error = PluginConfig::from_bytes(bad.as_bytes()).unwrap_err();
        assert_eq!(error.message(), "error parsing configuration: missing 'type'", "{bad}");
    }
    for bad in ["", "[]", r#"{"type":7}"#, "{\"type\":\"x\"} x"] {
        let error = PluginConfig::from_bytes(bad.as_bytes()).unwrap_err();
        assert!(error.message().starts_with("error parsing configuration: "), "{bad}: {error}");
        assert_eq!(error.code(), ErrorCode::DECODE, "{bad}");
    }
}

#[test]
fn an_unreadable_file_is_an_error() {
    let error = PluginConfig::from_file("/none/x.conf".as_ref()).unwrap_err();
    assert_eq!(
        error.message(),
        "error reading /none/x.conf: open /none/x.conf: no such file or directory"
    );
}

#[test]
fn injected_keys_replace_or_extend_the_configuration() {
    let conf = plugin(r#"{"type":"x","b":1.0,"A":"<"}"#);
    let inject = |key: &str, value| conf.inject_members(&[(key.to_owned(), value)]);
    let bytes = |conf: PluginConfig| String::from_utf8(conf.bytes().to_vec()).unwrap();
    assert_eq!(bytes(inject("c", true.into_json()).unwrap()), {
        r#"{"A":"\u003c","b":1,"c":true,"type":"x"}"#
    });
    assert_eq!(bytes(inject("a", "new".into()).unwrap()), r#"{"a":"new","b":1,"type":"x"}"#);
    assert_eq!(bytes(inject("A", "<".into()).unwrap()), r#"{"A":"\u003c","b":1,"type":"x"}"#);
    assert_eq!(inject("", "x".into()).unwrap_err().message(), "keys cannot be empty");
    assert_eq!(inject("k", Json::Null).unwrap_err().message(), "key 'k' value must not be nil");
}

trait IntoJson {
    fn into_json(self) -> Json;
}

impl IntoJson for bool {
    fn into_json(self) -> Json {
        Json::Bool(self)
    }
}

#[test]
fn files_are_listed_by_extension() {
    let node = Node::new();
    let dir = node.path("net.d");
    for name in ["b.conf", "10-a.conf", "9-a.conf", ".conf", "c.CONF", "d.conf.bak", "e.json"] {
        fs::write(dir.join(name), "").unwrap();
    }
    fs::create_dir(dir.join("dir.conf")).unwrap();
    symlink(dir.join("dir.conf"), dir.join("link.conf")).unwrap();
    let found = find_config_files(&dir, &["conf"]).unwrap();
    let names: Vec<_> = found.iter().map(|f| f.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(names, [".conf", "10-a.conf", "9-a.conf", "b.conf", "link.conf"]);
    assert!(find_config_files(&dir.join("none"), &["conf"]).unwrap().is_empty());
    assert!(find_config_files(&dir.join("e.json"), &["conf"]).is_err());
}

/// The request of the first plugin of `list` for ADD.
fn request_of(list: &NetworkList, attach: &AttachmentParams) -> String {
    text(ops::encode_request(ops::attachment_request(list, &list.plugins[0], attach, None)))
}

#[test]
fn a_request_is_compact_sorted_and_exact() {
    let list = list(
        r#"{"name":"n","cniVersion":"0.4.0","extra":1,"plugins":[{
            "type":"x","zeta":{"b":1.0,"a":1e3,"c":null,"d":0.5,"e":9007199254740993},
            "name":"other","CNIVERSION":"9","cniversion":"8","html":"<&>","twice":1,"twice":2}]}"#,
    );
    let expected = concat!(
        r#"{"cniVersion":"0.4.0","html":"\u003c\u0026\u003e","name":"n","twice":2,"type":"x","#,
        r#""zeta":{"a":1000,"b":1,"c":null,"d":0.5,"e":9007199254740993}}"#
    );
    assert_eq!(request_of(&list, &AttachmentParams::default()), expected);
}

#[test]
fn capabilities_select_arguments() {
    let list = list(
        r#"{"name":"n","plugins":[{"type":"x","runtimeConfig":{"old":1},
            "capabilities":{"mac":true,"ips":true,"dns":false}}]}"#,
    );
    let with = |args: &str| {
        let attach =
            AttachmentParams { capability_args: members(args), ..AttachmentParams::default() };
        let request = request_of(&list, &attach);
        let (_, rest) = request.split_once("\"runtimeConfig\":").unwrap();
        rest.split_once(",\"type\"").unwrap().0.to_owned()
    };
    assert_eq!(with(r#"{"dns":{},"other":1,"mac":"m"}"#), r#"{"mac":"m"}"#);
    assert_eq!(with(r#"{"mac":null,"ips":[]}"#), r#"{"ips":[],"mac":null}"#);
    assert_eq!(with(r#"{"dns":{}}"#), r#"{"old":1}"#, "nothing matches: the static one stays");
    assert!(request_of(&list, &AttachmentParams::default()).contains("\"capabilities\":"));
}

#[test]
fn a_gc_request_lists_valid_attachments() {
    let list = list(r#"{"name":"n","cniVersion":"1.1.0","plugins":[{"type":"x"}]}"#);
    let request =
        |valid| text(ops::encode_request(ops::network_request(&list, &list.plugins[0], valid)));
    assert_eq!(request(None), r#"{"cniVersion":"1.1.0","name":"n","type":"x"}"#);
    assert_eq!(
        request(Some(&[])),
        concat!(
            r#"{"cni.dev/attachments":[],"cni.dev/valid-attachments":[],"#,
            r#""cniVersion":"1.1.0","name":"n","type":"x"}"#
        )
    );
    let one = ValidAttachment { container_id: "c".to_owned(), ifname: "eth0".to_owned() };
    let array = r#"[{"containerID":"c","ifname":"eth0"}]"#;
    assert!(request(Some(&[one])).contains(&format!("\"cni.dev/valid-attachments\":{array}")));
}
