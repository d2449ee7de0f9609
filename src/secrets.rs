//! Leaves out possible secrets in documents and texts that are stored or leave the node (flight
//! recorder, `cnibox sysdump`).
//!
//! Of a document only the values of known keys are shown, those of the specification and of our
//! plugins: the name of another program's key proves nothing about its value. A value is not shown
//! either if its key sounds secret. Texts can only be searched for the names and forms of secrets:
//! [`redact_text`].

use cni::json::Json;
use cni::json::keys::DecodedKeys;
use cni::runtime::NetworkList;
use cni::{CniResult, DnsConfig, ResultRoute, ValidAttachment};

/// The replacement of a secret.
const LEFT_OUT: &str = "(left out)";

/// Parts of the names of secrets, in lower case and without `-` and `_`.
const PARTS: [&str; 14] = [
    "auth",
    "bearer",
    "cert",
    "credential",
    "jwt",
    "key",
    "kubeconfig",
    "login",
    "pass",
    "private",
    "psk",
    "pwd",
    "secret",
    "token",
];

/// Names of secrets, also in the plural, that are part of too many other words.
const NAMES: [&str; 5] = ["dsn", "otp", "pin", "sas", "sig"];

/// The first characters of PEM, and of PEM in base64.
const PEM: [&str; 2] = ["-----BEGIN", "LS0tLS1CRUdJTi"];

/// The known keys of `CNI_ARGS`: those of our plugins and of the runtimes.
const ARGS: [&str; 8] = [
    "GATEWAY",
    "IP",
    "IgnoreUnknown",
    "K8S_POD_INFRA_CONTAINER_ID",
    "K8S_POD_NAME",
    "K8S_POD_NAMESPACE",
    "K8S_POD_UID",
    "MAC",
];

/// Known keys whose objects may have any keys.
const MAPS: [&str; 1] = ["sysctl"];

/// The shortest secret that is searched for in other texts, in bytes: a shorter one is part of too
/// many words.
const SHORTEST: usize = 4;

/// The keys whose values may be shown.
#[derive(Debug)]
pub struct VisibleKeys(DecodedKeys);

impl VisibleKeys {
    /// The keys of the specification, and those of plugins, for networks, lists of plugins and
    /// delegates.
    pub fn new(plugins: impl Iterator<Item = DecodedKeys>) -> VisibleKeys {
        let plugin = plugins.fold(plugin_keys(), DecodedKeys::union_with);
        let plugin = plugin.clone().with_member("delegate", plugin);
        let list = NetworkList::KEYS
            .into_iter()
            .fold(plugin.clone(), |keys, name| keys.with_member(name, DecodedKeys::Any));
        VisibleKeys(list.with_member("plugins", DecodedKeys::Items(Box::new(plugin))))
    }

    /// The network configuration, a request to a plugin, or a list, without what may be secret.
    pub fn redact_config(&self, json: Json) -> Json {
        redact_value(json, &self.0)
    }

    /// The values that the runtime adds for capabilities.
    pub fn redact_capability_args(&self, json: Json) -> Json {
        redact_value(json, self.0.member_keys("runtimeConfig").unwrap_or(&NONE))
    }
}

/// Shows no values.
const NONE: DecodedKeys = DecodedKeys::Fields(Vec::new());

/// The keys of the specification in the configuration of a plugin.
fn plugin_keys() -> DecodedKeys {
    let attachments = || DecodedKeys::Items(Box::new(DecodedKeys::of_type::<ValidAttachment>()));
    [
        ("args", DecodedKeys::Fields(vec![("cni", NONE)])),
        // Names of capabilities are known by their plugins; their values are booleans.
        ("capabilities", NONE),
        ("cni.dev/attachments", attachments()),
        ("cni.dev/valid-attachments", attachments()),
        ("cniVersion", DecodedKeys::Any),
        ("dns", DecodedKeys::of_type::<DnsConfig>()),
        ("ipam", DecodedKeys::Fields(vec![("type", DecodedKeys::Any)])),
        ("name", DecodedKeys::Any),
        ("prevResult", result_keys()),
        ("runtimeConfig", NONE),
        ("type", DecodedKeys::Any),
    ]
    .into_iter()
    .fold(NONE, |keys, (name, of)| keys.with_member(name, of))
}

/// The keys of results in all versions.
fn result_keys() -> DecodedKeys {
    let items = |keys| DecodedKeys::Items(Box::new(keys));
    let (version, routes) = (
        DecodedKeys::Fields(vec![("version", DecodedKeys::Any)]),
        items(DecodedKeys::of_type::<ResultRoute>()),
    );
    let address = [("ip", DecodedKeys::Any), ("gateway", DecodedKeys::Any), ("routes", routes)];
    let address = DecodedKeys::Fields(address.to_vec());
    let result = DecodedKeys::of_type::<CniResult>()
        .with_member("cniVersion", DecodedKeys::Any)
        .with_member("ips", items(version));
    result.with_member("ip4", address.clone()).with_member("ip6", address)
}

fn redact_value(json: Json, keys: &DecodedKeys) -> Json {
    match (json, keys) {
        (Json::Object(members), DecodedKeys::Fields(_)) => Json::Object(
            members
                .into_iter()
                .map(|(key, value)| {
                    let value = match keys.member_keys(&key).filter(|_| !is_secret_name(&key)) {
                        Some(DecodedKeys::Any) if MAPS.contains(&key.as_str()) => redact_map(value),
                        Some(keys) => redact_value(value, keys),
                        None => redact_content(value),
                    };
                    (key, value)
                })
                .collect(),
        ),
        (object @ Json::Object(_), _) => redact_content(object),
        (Json::Array(items), keys) => {
            let of_items = if let DecodedKeys::Items(keys) = keys { keys } else { keys };
            Json::Array(items.into_iter().map(|item| redact_value(item, of_items)).collect())
        }
        (Json::String(text), _) => Json::String(redact_text(&text)),
        (other, _) => other,
    }
}

fn redact_map(json: Json) -> Json {
    let Json::Object(members) = json else { return redact_value(json, &DecodedKeys::Any) };
    Json::Object(
        members
            .into_iter()
            .map(|(key, value)| {
                let value = if is_secret_name(&key) {
                    redact_content(value)
                } else {
                    redact_value(value, &DecodedKeys::Any)
                };
                (key, value)
            })
            .collect(),
    )
}

/// The replacement of a value that has content.
fn redact_content(json: Json) -> Json {
    match json {
        Json::Null | Json::Bool(_) => json,
        Json::Object(members) if members.is_empty() => Json::Object(members),
        Json::Array(items) if items.is_empty() => Json::Array(items),
        _ => LEFT_OUT.into(),
    }
}

/// The document with each text as in [`redact_text`].
pub fn redact_texts(mut json: Json) -> Json {
    json.modify_values(&|json| {
        if let Json::String(text) = json {
            *text = redact_text(text);
        }
    });
    json
}

/// The values of keys that sound secret, for [`redact_values`].
pub fn find_values(json: &Json) -> Vec<String> {
    let mut found = Vec::new();
    collect_values(json, false, &mut found);
    found
}

fn collect_values(json: &Json, is_of_secret: bool, found: &mut Vec<String>) {
    match json {
        Json::Object(members) => {
            for (key, value) in members {
                collect_values(value, is_of_secret || is_secret_name(key), found);
            }
        }
        Json::Array(items) => {
            for item in items {
                collect_values(item, is_of_secret, found);
            }
        }
        Json::String(text) if is_of_secret && text.len() >= SHORTEST => found.push(text.clone()),
        _ => {}
    }
}

/// As [`redact_text`], also without these [`find_values`] of the configuration that the text is
/// about.
pub fn redact_values(text: &str, values: &[String]) -> String {
    let text = values.iter().fold(text.to_owned(), |text, value| text.replace(value, LEFT_OUT));
    redact_text(&text)
}

/// `CNI_ARGS` without the values of unknown keys.
pub fn redact_args(args: &str) -> String {
    args.split(';')
        .map(|pair| match pair.split_once('=') {
            Some((key, value)) => format!("{key}={}", redact_arg(key, value)),
            None if pair.is_empty() => String::new(),
            None => LEFT_OUT.to_owned(),
        })
        .collect::<Vec<_>>()
        .join(";")
}

/// The value of this key of `CNI_ARGS`, if it may be shown.
pub fn redact_arg(key: &str, value: &str) -> String {
    if ARGS.contains(&key) { redact_text(value) } else { LEFT_OUT.to_owned() }
}

fn is_secret_name(key: &str) -> bool {
    let plain: String = key.chars().filter(char::is_ascii_alphanumeric).collect();
    let plain = plain.to_ascii_lowercase();
    let one = plain.strip_suffix('s').unwrap_or(&plain);
    NAMES.iter().any(|name| [one, &plain].contains(name))
        || PARTS.iter().any(|part| plain.contains(part))
}

/// The text with URLs without user, password and query, and up to the first PEM or value of a name
/// that sounds secret.
pub fn redact_text(text: &str) -> String {
    let words = text.split_inclusive(is_word_end);
    let mut text: String = words.map(redact_word).collect();
    let pem = PEM.iter().filter_map(|mark| text.find(mark));
    let cut = pem.chain(find_secret_value(&text)).chain(find_secret_option(&text)).min();
    if let Some(cut) = cut.filter(|cut| *cut < text.len()) {
        text.truncate(cut);
        text += LEFT_OUT;
    }
    text
}

/// The end of a word, and of a URL.
fn is_word_end(c: char) -> bool {
    c.is_whitespace() || "\"'`<>".contains(c)
}

/// The position after the first `name=` or `name:` whose name sounds secret; the name may be in
/// quotes.
fn find_secret_value(text: &str) -> Option<usize> {
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    text.match_indices([':', '=']).find_map(|(at, _)| {
        let before = text[..at].trim_end_matches(['"', '\'', '\\', ' ']);
        let name = before.rsplit(|c| !is_of_name(c)).next().unwrap_or_default();
        is_secret_name(name).then_some(at + 1)
    })
}

/// The position after the first `Bearer `, or option of a command line that sounds secret:
/// `--password x`.
fn find_secret_option(text: &str) -> Option<usize> {
    let mut at = 0;
    text.split_inclusive(char::is_whitespace).find_map(|word| {
        at += word.len();
        let plain = word.trim_end().trim_matches(['"', '\'', '`', '(', '[', '{', ',']);
        let is_option = plain.starts_with('-') && is_secret_name(plain);
        (is_option || plain.eq_ignore_ascii_case("bearer")).then_some(at)
    })
}

/// A word without the user, password and query of its URLs (RFC 3986, section 3.2.1), up to the
/// last `@` before the next URL, as a password may have any character; and without `user:password@`
/// of a data source's name.
fn redact_word(word: &str) -> String {
    let after_at = |text: &str| match text.rfind('@') {
        Some(at) => format!("{LEFT_OUT}{}", &text[at..]),
        None => text.to_owned(),
    };
    let mut pieces = word.split("://");
    let first = pieces.next().unwrap_or_default();
    let is_source = first.split_once('@').is_some_and(|(user, _)| user.contains(':'));
    let mut shown = if is_source { after_at(first) } else { first.to_owned() };
    for piece in pieces.map(after_at) {
        shown += "://";
        // The replacement itself has two words.
        let query = piece.split_once('?').filter(|(_, query)| !LEFT_OUT.starts_with(query));
        if let Some((path, _)) = query {
            let end = word.trim_start_matches(|c| !is_word_end(c));
            return shown + path + "?" + LEFT_OUT + end;
        }
        shown += &piece;
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;
    use cni::json::encode_compact;

    fn shown(text: &str) -> String {
        let items = |keys| DecodedKeys::Items(Box::new(keys));
        let known = [
            ("bridge", DecodedKeys::Any),
            ("ranges", items(items(DecodedKeys::Fields(vec![("subnet", DecodedKeys::Any)])))),
            ("sysctl", DecodedKeys::Any),
            ("runtimeConfig", DecodedKeys::Fields(vec![("mac", DecodedKeys::Any)])),
        ];
        let shown = VisibleKeys::new(std::iter::once(DecodedKeys::Fields(known.to_vec())));
        encode_compact(&shown.redact_config(Json::parse(text.as_bytes()).unwrap())).unwrap()
    }

    /// The keys and values of real configurations, each with a secret that starts with `SECRET`.
    #[test]
    fn values_of_unknown_keys_are_left_out() {
        for member in [
            r#""etcd_endpoints":"https://u1:SECRETA@h1:2379,https://u2:SECRETB@h2:2379""#,
            r#""pass":"SECRET""#,
            r#""pwd":"SECRET""#,
            r#""bearer":"SECRET""#,
            r#""jwt":"SECRET""#,
            r#""kubeconfig_inline":"users: [{user: {password: SECRET}}]""#,
            r#""env":["DB_PASSWORD=SECRET","X=y PASSWORD=SECRET"]"#,
            r#""headers":{"X-Api":"Bearer SECRET"}"#,
            r#""cmd":"curl -H 'Authorization: Bearer SECRET'""#,
            r#""pem":"LS0tLS1CRUdJTiSECRET""#,
            r#""privateData":"SECRET""#,
            r#""sas":"https://x.blob/?sig=SECRET""#,
            r#""dsn":"user:SECRET@tcp(db:3306)/x""#,
            r#""otp":"SECRET""#,
            r#""pin":1234,"secret":[1234]"#,
            r#""args":{"cni":{"login":"SECRET"},"theirs":"SECRET"}"#,
            r#""apikeys":["SECRET"]"#,
            r#""keyData":"SECRET""#,
            r#""accessKeys":{"a":"SECRET"}"#,
            r#""bridge":"https://u:SECRET@x,https://v:SECRET@y/z""#,
            r#""bridge":{"token":"SECRET"}"#,
            r#""sysctl":{"net.ipv4.tcp_fastopen_key":"SECRET"}"#,
            r#""ipam":{"type":"theirs","pass":"SECRET","more":{"deep":["SECRET"]}}"#,
            r#""capabilities":{"SECRET0":true,"x":"SECRET"}"#,
            r#""runtimeConfig":{"theirs":"SECRET"}"#,
            r#""prevResult":{"theirs":"SECRET","ips":[{"theirs":"SECRET"}]}"#,
            r#""delegate":{"theirs":"SECRET"}"#,
            r#""plugins":[{"theirs":"SECRET","ipam":{"theirs":"SECRET"}}]"#,
            r#""plugins":{"theirs":"SECRET"}"#,
            r#""name":{"theirs":"SECRET"},"type":[{"theirs":"SECRET"}]"#,
        ] {
            let text = shown(&format!("{{{member}}}")).replace("SECRET0", "");
            assert!(!text.contains("SECRET") && !text.contains("1234"), "{member}: {text}");
            assert!(text.contains(LEFT_OUT), "{member}: {text}");
        }
    }

    #[test]
    fn values_of_known_keys_are_shown() {
        for document in [
            r#"{"type":"theirs","ipam":{"type":"x"},"authorized":true,"none":null}"#,
            r#"{"BRIDGE":"http://host/a","ranges":[[{"subnet":"10.0.0.0/24"}]]}"#,
            r#"{"cniVersion":"1.0.0","plugins":[{"bridge":"x","delegate":{"bridge":"y"}}]}"#,
            r#"{"sysctl":{"net.core.somaxconn":"500"},"runtimeConfig":{"mac":"02:00:00:00:00:01"}}"#,
            r#"{"prevResult":{"ips":[{"version":"4","address":"10.0.0.2/24","interface":0}],"dns":{}}}"#,
            r#"{"prevResult":{"ip4":{"ip":"10.0.0.2/24","routes":[{"dst":"0.0.0.0/0"}]}}}"#,
            r#"{"cni.dev/valid-attachments":[{"containerID":"a","ifname":"eth0"}]}"#,
        ] {
            assert_eq!(shown(document), document);
        }
    }

    #[test]
    fn secrets_are_removed_from_texts() {
        for (text, expected) in [
            ("get https://u:p@h1:1/x: refused", "get https://(left out)@h1:1/x: refused"),
            ("a https://t@h,https://v:p/w@i b", "a https://(left out)@h,https://(left out)@i b"),
            ("redis://u:p,q@h1,u:p@h2/0", "redis://(left out)@h2/0"),
            ("get \"https://h/p?sig=x\": no", "get \"https://h/p?(left out)\": no"),
            ("https://h/?next=https://i/&sig=x\nmore", "https://h/?(left out)\nmore"),
            ("open user:p@w@tcp(db:3306)/x", "open (left out)@tcp(db:3306)/x"),
            ("eth0@if3: fe80::1 is up", "eth0@if3: fe80::1 is up"),
            ("http://host:80/a", "http://host:80/a"),
            ("run curl --token x", "run curl --token (left out)"),
            ("sent 'Bearer x.y'", "sent 'Bearer (left out)"),
            ("Authorization: Basic x", "Authorization:(left out)"),
            ("users: [{user: {password: x}}]", "users: [{user: {password:(left out)"),
            (r#"in {\"apiKey\" : \"x\"}"#, r#"in {\"apiKey\" :(left out)"#),
            ("A=1 DB_PASSWORD=x", "A=1 DB_PASSWORD=(left out)"),
            ("file: -----BEGIN X-----", "file: (left out)"),
            ("file: LS0tLS1CRUdJTiBS", "file: (left out)"),
            ("no \"key\" of \"pass\" in it", "no \"key\" of \"pass\" in it"),
        ] {
            assert_eq!(redact_text(text), expected, "{text}");
            assert_eq!(redact_text(expected), expected);
        }
    }

    #[test]
    fn secrets_of_a_configuration_are_removed_from_errors() {
        let json = br#"{"name":"a net","login":["hunter2"],"pin":"007","tokens":{"a":"t0ken"}}"#;
        let values = find_values(&Json::parse(json).unwrap());
        assert_eq!(values, ["hunter2", "t0ken"]);
        let text = "network \"a net\": hunter2 has no right to t0ken, 007";
        let expected = "network \"a net\": (left out) has no right to (left out), 007";
        assert_eq!(redact_values(text, &values), expected);
    }

    #[test]
    fn secrets_are_removed_from_cni_args() {
        let args = "IgnoreUnknown=1;K8S_POD_NAME=p;MYPASS=x;A=Bearer y;z;IP=https://u:p@h;";
        let expected = "IgnoreUnknown=1;K8S_POD_NAME=p;MYPASS=(left out);A=(left out);(left out);\
            IP=https://(left out)@h;";
        assert_eq!(redact_args(args), expected);
        assert_eq!(redact_args(""), "");
    }
}
