//! Parsing lists, choosing their version, finding them by name.

use super::Node;
use crate::runtime::{NetworkList, PluginConfig};

const PREFIX: &str = "error parsing configuration list: ";

fn parse(text: &str) -> Result<NetworkList, String> {
    NetworkList::from_bytes(text.as_bytes()).map_err(|e| e.message().to_owned())
}

fn version(keys: &str) -> Result<String, String> {
    let list = parse(&format!(r#"{{"name":"n",{keys}"plugins":[{{"type":"x"}}]}}"#))?;
    Ok(list.cni_version)
}

#[test]
fn a_list_keeps_its_bytes_and_sorts_its_entries() {
    let raw = r#"{ "name": "n", "args": {}, "plugins": [ {"type": "x", "b": [1.0, {"d": 1, "c": 2}]} ] }"#;
    let list = parse(raw).unwrap();
    assert_eq!(list.bytes(), raw.as_bytes());
    assert_eq!(list.plugins[0].bytes(), br#"{"b":[1,{"c":2,"d":1}],"type":"x"}"#);
    assert_eq!((list.name.as_str(), list.cni_version.as_str()), ("n", ""));
    assert!(parse(r#"{"name":""}"#).unwrap().plugins.is_empty());
}

#[test]
fn malformed_lists_are_refused() {
    for (text, why) in [
        ("[]", "expected an object, found a list"),
        ("{}", "no name"),
        (r#"{"Name":"n"}"#, "no name"),
        (r#"{"name":7}"#, "invalid name type float64"),
        (r#"{"name":null}"#, "invalid name type <nil>"),
        (r#"{"name":"n","cniVersion":true}"#, "invalid cniVersion type bool"),
        (r#"{"name":"n","disableCheck":1}"#, "invalid type float64 for disableCheck"),
        (r#"{"name":"n","disableGC":"Yes"}"#, "invalid value \"yes\" for disableGC"),
        (
            r#"{"name":"n","loadOnlyInlinedPlugins":"TRUE"}"#,
            "`loadOnlyInlinedPlugins` is true, and no 'plugins' key",
        ),
        (r#"{"name":"n","plugins":{}}"#, "invalid 'plugins' type map[string]interface {}"),
        (r#"{"name":"n","plugins":[]}"#, "no plugins in list"),
    ] {
        assert_eq!(parse(text).unwrap_err(), format!("{PREFIX}{why}"), "{text}");
    }
    assert!(parse("").unwrap_err().starts_with(PREFIX));
    assert_eq!(
        parse(r#"{"name":"n","plugins":[{"type":"x"},{"type":""}]}"#).unwrap_err(),
        "failed to parse plugin config 1: error parsing configuration: missing 'type'"
    );
}

#[test]
fn disable_flags_may_be_strings() {
    let text = r#"{"name":"n","disableCheck":"True","disableGC":true,"plugins":[{"type":"x"}]}"#;
    let list = parse(text).unwrap();
    assert!(list.disable_check && list.disable_gc && !list.only_inlined);
    let list = parse(r#"{"name":"n","disableCheck":"false"}"#).unwrap();
    assert!(!list.disable_check && !list.disable_gc);
}

#[test]
fn the_highest_supported_version_is_selected() {
    for (keys, selected) in [
        ("", ""),
        (r#""cniVersion":"1.2.3","#, "1.2.3"),
        (r#""cniVersion":"rubbish","#, "rubbish"),
        (r#""cniVersions":["0.4.0","1.0.0","0.3.1"],"#, "1.0.0"),
        (r#""cniVersion":"1.1.0","cniVersions":["0.4.0","1.0.0"],"#, "1.1.0"),
        (r#""cniVersion":"0.3.1","cniVersions":["0.4.0","1.2.0","99.0.0"],"#, "0.4.0"),
        (r#""cniVersion":"1.2.0","cniVersions":[],"#, "1.2.0"),
        (r#""cniVersions":["2.0.0"],"#, ""),
        (r#""cniVersions":[],"#, ""),
    ] {
        assert_eq!(version(keys).as_deref(), Ok(selected), "{keys}");
    }
    for (keys, why) in [
        (r#""cniVersions":"1.0.0","#, "invalid type for cniVersions: string"),
        (r#""cniVersions":["1.0.0",7],"#, "invalid type for cniVersions index 1: float64"),
        (
            r#""cniVersions":["1.0.0","x"],"#,
            "invalid cniVersions entry x at index 1: invalid version \"x\"",
        ),
        (
            r#""cniVersion":"bad","cniVersions":["1.0.0"],"#,
            "invalid cniVersion bad: invalid version \"bad\"",
        ),
    ] {
        assert_eq!(version(keys), Err(format!("{PREFIX}{why}")), "{keys}");
    }
}

/// The plugin types of the list in a file with these keys, with two plugins in the directory or
/// not.
fn types(keys: &str, directory: &str) -> Result<Vec<String>, String> {
    let node = Node::new();
    let file = node.conf("a.conflist", &format!("{{{keys}\"cniVersion\":\"1.1.0\"}}"));
    node.conf(&format!("{directory}/20.conf"), r#"{"type":"f2"}"#);
    node.conf(&format!("{directory}/10.conf"), r#"{"type":"f1"}"#);
    node.conf(&format!("{directory}/15.json"), r#"{"type":"not read"}"#);
    let list = NetworkList::from_file(&file).map_err(|e| e.to_string())?;
    let again = NetworkList::from_bytes(list.bytes()).unwrap();
    let types = |l: &NetworkList| -> Vec<String> {
        l.plugins.iter().map(|p| p.plugin_type.clone()).collect()
    };
    assert_eq!(types(&list), types(&again), "the cached bytes say the same");
    Ok(types(&list))
}

#[test]
fn plugins_are_loaded_from_a_directory() {
    let inline = r#""name":"net","plugins":[{"type":"i"}],"#;
    let only = r#""name":"net","plugins":[{"type":"i"}],"loadOnlyInlinedPlugins":true,"#;
    assert_eq!(types(inline, "net").unwrap(), ["i", "f1", "f2"]);
    assert_eq!(types(inline, "other").unwrap(), ["i"]);
    assert_eq!(types(only, "net").unwrap(), ["i"]);
    assert_eq!(types(r#""name":"net","#, "net").unwrap(), ["f1", "f2"]);
    let error = types(r#""name":"net","#, "other").unwrap_err();
    assert!(error.starts_with("no plugin configs found; "), "{error}");
    assert!(types(r#""name":"net","loadOnlyInlinedPlugins":true,"#, "net").is_err());
    // The name becomes a part of a path: nothing outside of the directory may be read.
    assert_eq!(types(r#""name":"","plugins":[{"type":"i"}],"#, ".").unwrap(), ["i"]);
    assert!(
        types(r#""name":"../net.d","#, ".").unwrap_err().starts_with("no plugin configs found; ")
    );
}

#[test]
fn a_bad_file_in_the_directory_fails_the_list() {
    let node = Node::new();
    let file = node.conf("a.conflist", r#"{"name":"net","plugins":[{"type":"i"}]}"#);
    node.conf("net/1.conf", r#"{"name":"x"}"#);
    let error = NetworkList::from_file(&file).unwrap_err();
    assert_eq!(error.message(), "error parsing configuration: missing 'type'");
}

#[test]
fn a_single_plugin_becomes_a_list() {
    let raw = r#"{"type":"x","name":"n","cniVersion":"0.3.1","capabilities":{"mac":true}}"#;
    let list =
        NetworkList::from_plugin(&PluginConfig::from_bytes(raw.as_bytes()).unwrap()).unwrap();
    assert_eq!((list.name.as_str(), list.cni_version.as_str()), ("n", "0.3.1"));
    let sorted = r#"{"capabilities":{"mac":true},"cniVersion":"0.3.1","name":"n","type":"x"}"#;
    assert_eq!(list.plugins[0].bytes(), sorted.as_bytes());
    let whole = format!(r#"{{"cniVersion":"0.3.1","name":"n","plugins":[{sorted}]}}"#);
    assert_eq!(list.bytes(), whole.as_bytes());
}

#[test]
fn a_list_is_loaded_by_name() {
    let node = Node::new();
    let load = |name: &str| NetworkList::load(&node.path("net.d"), name);
    let dir = node.path("net.d").display().to_string();
    assert_eq!(load("n").unwrap_err().message(), format!("no net configurations found in {dir}"));
    node.conf("1.conf", r#"{"name":"n","type":"single"}"#);
    node.conf("9.json", r#"{"name":"j","type":"json"}"#);
    node.conf("below/n.conflist", r#"{"name":"deep","plugins":[{"type":"x"}]}"#);
    assert_eq!(load("n").unwrap().plugins[0].plugin_type, "single");
    assert_eq!(load("j").unwrap().plugins[0].plugin_type, "json");
    node.conf("5.conflist", r#"{"name":"n","plugins":[{"type":"listed"}]}"#);
    assert_eq!(load("n").unwrap().plugins[0].plugin_type, "listed");
    let error = load("deep").unwrap_err();
    assert_eq!(error.message(), format!("no net configuration with name \"deep\" in {dir}"));
    assert_eq!(error.details(), "there are: n, n, j");
}

#[test]
fn a_bad_file_is_reported_only_if_nothing_matches() {
    let node = Node::new();
    node.conf("0.conflist", "{");
    node.conf("0.conf", "[]");
    node.conf("1.conflist", r#"{"name":"l","plugins":[{"type":"x"}]}"#);
    node.conf("1.conf", r#"{"name":"s","type":"x"}"#);
    let load = |name: &str| NetworkList::load(&node.path("net.d"), name);
    assert!(load("l").is_ok() && load("s").is_ok());
    let error = load("none").unwrap_err();
    assert!(error.message().starts_with(PREFIX), "{error}");
    assert!(error.details().ends_with("0.conflist"), "{error}");
}
