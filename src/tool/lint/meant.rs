//! Keys in the wrong place or under another name: the key or level that is meant.

use crate::cni::json::Json;
use crate::cni::json::place::Place;
use crate::error::Error;

/// Keys of a range that host-local reads beside `subnet` or within `ranges`.
const OF_RANGE: [&str; 3] = ["gateway", "rangeStart", "rangeEnd"];

/// The remedy for a key of the list that only plugins read.
pub(super) fn in_list(key: &str, of_plugins: &[&str]) -> Option<String> {
    of_plugins
        .contains(&key)
        .then(|| "move it into the object of the plugin that reads it, in \"plugins\"".to_owned())
}

/// The remedy for an unknown key of a plugin that is a known one under another name.
pub(super) fn under_another_name(key: &str) -> Option<String> {
    match key {
        "noSnat" => Some("write \"snat\": false".to_owned()),
        _ => None,
    }
}

/// The remedy for a capability that is a key of the plugin.
pub(super) fn beside_capabilities(capability: &str, of_plugin: &[&str]) -> Option<String> {
    of_plugin
        .contains(&capability)
        .then(|| format!("{capability:?} is a key of the plugin: write it beside \"capabilities\""))
}

/// Keys of a plugin's configuration that are known, and ignored where they are.
pub(super) fn ignored(conf: &Json) -> Vec<(Place, Error)> {
    let mut found = Vec::new();
    let mut report = |place: String, remedy: String| {
        let problem = format!("{place:?} is ignored");
        found.push((Place::parse(&place), Error::config(problem).with_details(remedy)));
    };
    let has = |json: Option<&Json>, key| json.is_some_and(|json| json.get_present(key).is_some());
    let args = conf.get_present("args");
    for key in ["ips", "mac"].into_iter().filter(|key| has(args, key)) {
        report(
            format!("args.{key}"),
            format!("write it as \"args\": {{\"cni\": {{{key:?}: ...}}}}"),
        );
    }
    let ipam = conf.get_present("ipam");
    if has(ipam, "ranges") && !has(ipam, "subnet") {
        for key in OF_RANGE.into_iter().filter(|key| has(ipam, key)) {
            report(format!("ipam.{key}"), "move it into a range, beside \"subnet\"".to_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(text: &str) -> Vec<String> {
        let found = ignored(&Json::parse(text.as_bytes()).unwrap());
        found.iter().map(|(place, error)| format!("{place}: {error}")).collect()
    }

    #[test]
    fn keys_that_are_ignored_where_they_are() {
        assert_eq!(
            told(r#"{"args":{"ips":["10.1.0.9/24"],"cni":{"mac":""}}}"#),
            [r#"args.ips: "args.ips" is ignored; write it as "args": {"cni": {"ips": ...}}"#]
        );
        assert_eq!(
            told(r#"{"ipam":{"ranges":[],"gateway":"10.1.0.1"}}"#),
            [r#"ipam.gateway: "ipam.gateway" is ignored; move it into a range, beside "subnet""#]
        );
        assert!(told(r#"{"ipam":{"ranges":[],"subnet":"10.1.0.0/24","gateway":""}}"#).is_empty());
        assert!(told(r#"{"ipam":{"type":"static"}}"#).is_empty());
    }

    #[test]
    fn the_key_that_is_meant() {
        assert!(in_list("capabilities", &["capabilities"]).is_some());
        assert!(in_list("nerdctlID", &["capabilities"]).is_none());
        assert!(beside_capabilities("snat", &["snat"]).is_some());
        assert_eq!(under_another_name("noSnat").as_deref(), Some("write \"snat\": false"));
    }
}
