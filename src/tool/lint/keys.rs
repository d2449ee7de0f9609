//! The words of findings about keys: comments, keys at another level than the one that is read,
//! misspellings.

use cni::error::Error;
use cni::json::Json;
use cni::names::nearest_word;

/// A finding, with its remedy.
pub(super) fn mistake_error(problem: impl Into<String>, remedy: impl Into<String>) -> Error {
    Error::config(problem).with_details(remedy)
}

/// The remedy for a key that is not read, in an object in which the keys `known` are read.
pub(super) fn unread_key_remedy(key: &str, known: &[&str]) -> String {
    if let Some(near) = nearest_word(key, known.iter().copied()) {
        return format!("did you mean \"{near}\"?");
    }
    let denied = key.strip_prefix("no").or_else(|| key.strip_prefix("disable"));
    match denied.and_then(|denied| known.iter().find(|name| name.eq_ignore_ascii_case(denied))) {
        Some(name) => format!("write \"{name}\": false"),
        None => "remove it".to_owned(),
    }
}

/// The remedy for a capability that the plugin does not use. `keys` are the keys of its
/// configuration.
pub(super) fn capability_remedy(name: &str, used: &[&str], keys: &[&str]) -> String {
    if keys.contains(&name) {
        return format!("\"{name}\" is a key of the plugin: write it beside \"capabilities\"");
    }
    unread_key_remedy(name, used)
}

/// The keys of `args` that plugins read below `args.cni` only.
pub(super) fn keys_above_cni(conf: &Json) -> Vec<String> {
    const OF_ROUTES: [&str; 5] =
        ["addroutes", "delroutes", "flushgateway", "flushroutes", "skipcheck"];
    const READ: [&str; 7] = ["allmulti", "ips", "mac", "mtu", "promisc", "sysctl", "txQLen"];
    let Some(Json::Object(members)) = conf.get_present_member("args") else { return Vec::new() };
    let names = members.iter().map(|(name, _)| name.as_str());
    names
        .filter(|name| READ.contains(name) || OF_ROUTES.contains(name))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_key_gets_a_suggestion() {
        for (key, remedy_of_it) in [
            ("snatt", "did you mean \"snat\"?"),
            ("noSnat", "write \"snat\": false"),
            ("disableSnat", "write \"snat\": false"),
            ("colour", "remove it"),
        ] {
            assert_eq!(unread_key_remedy(key, &["snat", "backend"]), remedy_of_it);
        }
    }
}
