//! Leaves out what may be secret in documents and texts that are kept or leave the node: the flight recorder, `cnibox
//! sysdump`.
//!
//! Of a document only the values of known keys are shown, those of the specification and of our plugins: the name of
//! another program's key proves nothing about its value. A value is not shown either if its key sounds secret.
//! Texts can only be searched for what gives a secret away: [`without_text`].

use super::json::Json;
use super::json::keys::Keys;
use super::{Attachment, CniResult, Dns, Route};

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

/// The shortest secret that is searched for in other texts, in bytes: a shorter one is part of too many words.
const SHORTEST: usize = 4;

/// What may be shown of documents: the values of these keys.
#[derive(Debug)]
pub struct Shown(Keys);

impl Shown {
    /// The keys of the specification, and those of plugins, for networks, lists of plugins and delegates.
    pub fn new(plugins: impl Iterator<Item = Keys>) -> Shown {
        let plugin = plugins.fold(of_plugins(), Keys::and);
        let plugin = plugin.clone().with("delegate", plugin);
        let list = ["cniVersions", "disableCheck", "disableGC", "loadOnlyInlinedPlugins"];
        let list = list.into_iter().fold(plugin.clone(), |keys, name| keys.with(name, Keys::Any));
        Shown(list.with("plugins", Keys::Items(Box::new(plugin))))
    }

    /// The network configuration, a request to a plugin, or a list, without what may be secret.
    pub fn conf(&self, json: Json) -> Json {
        shown(json, &self.0)
    }

    /// The values that the runtime adds for capabilities.
    pub fn capability_args(&self, json: Json) -> Json {
        shown(json, self.0.get("runtimeConfig").unwrap_or(&NONE))
    }
}

/// No key is known.
const NONE: Keys = Keys::Fields(Vec::new());

/// The keys of the specification in the configuration of a plugin.
fn of_plugins() -> Keys {
    let attachments = || Keys::Items(Box::new(Keys::of::<Attachment>()));
    [
        ("args", Keys::Fields(vec![("cni", NONE)])),
        // Names of capabilities are known by their plugins; their values are booleans.
        ("capabilities", NONE),
        ("cni.dev/attachments", attachments()),
        ("cni.dev/valid-attachments", attachments()),
        ("cniVersion", Keys::Any),
        ("dns", Keys::of::<Dns>()),
        ("ipam", Keys::Fields(vec![("type", Keys::Any)])),
        ("name", Keys::Any),
        ("prevResult", of_results()),
        ("runtimeConfig", NONE),
        ("type", Keys::Any),
    ]
    .into_iter()
    .fold(NONE, |keys, (name, of)| keys.with(name, of))
}

/// The keys of results in all versions.
fn of_results() -> Keys {
    let items = |keys| Keys::Items(Box::new(keys));
    let (version, routes) =
        (Keys::Fields(vec![("version", Keys::Any)]), items(Keys::of::<Route>()));
    let address = [("ip", Keys::Any), ("gateway", Keys::Any), ("routes", routes)];
    let address = Keys::Fields(address.to_vec());
    let result = Keys::of::<CniResult>().with("cniVersion", Keys::Any).with("ips", items(version));
    result.with("ip4", address.clone()).with("ip6", address)
}

fn shown(json: Json, keys: &Keys) -> Json {
    match (json, keys) {
        (Json::Object(members), Keys::Fields(_)) => {
            let member = |(key, value): (String, Json)| {
                let value = match keys.get(&key).filter(|_| !is_secret(&key)) {
                    Some(Keys::Any) if MAPS.contains(&key.as_str()) => of_map(value),
                    Some(keys) => shown(value, keys),
                    None => left_out(value),
                };
                (key, value)
            };
            Json::Object(members.into_iter().map(member).collect())
        }
        (object @ Json::Object(_), _) => left_out(object),
        (Json::Array(items), keys) => {
            let of_items = if let Keys::Items(keys) = keys { keys } else { keys };
            Json::Array(items.into_iter().map(|item| shown(item, of_items)).collect())
        }
        (Json::String(text), _) => Json::String(without_text(&text)),
        (other, _) => other,
    }
}

fn of_map(json: Json) -> Json {
    let Json::Object(members) = json else { return shown(json, &Keys::Any) };
    let member = |(key, value): (String, Json)| {
        let value = if is_secret(&key) { left_out(value) } else { shown(value, &Keys::Any) };
        (key, value)
    };
    Json::Object(members.into_iter().map(member).collect())
}

/// The replacement of a value that has content.
fn left_out(json: Json) -> Json {
    match json {
        Json::Null | Json::Bool(_) => json,
        Json::Object(members) if members.is_empty() => Json::Object(members),
        Json::Array(items) if items.is_empty() => Json::Array(items),
        _ => LEFT_OUT.into(),
    }
}

/// The document with each text as in [`without_text`].
pub fn without_texts(mut json: Json) -> Json {
    json.for_each(&|json| {
        if let Json::String(text) = json {
            *text = without_text(text);
        }
    });
    json
}

/// The values of keys that sound secret, for [`without_values`].
pub fn values(json: &Json) -> Vec<String> {
    let mut found = Vec::new();
    collect(json, false, &mut found);
    found
}

fn collect(json: &Json, is_of_secret: bool, found: &mut Vec<String>) {
    match json {
        Json::Object(members) => {
            for (key, value) in members {
                collect(value, is_of_secret || is_secret(key), found);
            }
        }
        Json::Array(items) => items.iter().for_each(|item| collect(item, is_of_secret, found)),
        Json::String(text) if is_of_secret && text.len() >= SHORTEST => found.push(text.clone()),
        _ => {}
    }
}

/// As [`without_text`], also without these [values] of the configuration that the text is about.
pub fn without_values(text: &str, values: &[String]) -> String {
    let text = values.iter().fold(text.to_owned(), |text, value| text.replace(value, LEFT_OUT));
    without_text(&text)
}

/// `CNI_ARGS` without the values of unknown keys.
pub fn without_args(args: &str) -> String {
    let pair = |pair: &str| match pair.split_once('=') {
        Some((key, value)) => format!("{key}={}", without_arg(key, value)),
        None if pair.is_empty() => String::new(),
        None => LEFT_OUT.to_owned(),
    };
    args.split(';').map(pair).collect::<Vec<_>>().join(";")
}

/// The value of this key of `CNI_ARGS`, if it may be shown.
pub fn without_arg(key: &str, value: &str) -> String {
    if ARGS.contains(&key) { without_text(value) } else { LEFT_OUT.to_owned() }
}

fn is_secret(key: &str) -> bool {
    let plain: String = key.chars().filter(char::is_ascii_alphanumeric).collect();
    let plain = plain.to_ascii_lowercase();
    let one = plain.strip_suffix('s').unwrap_or(&plain);
    NAMES.iter().any(|name| [one, &plain].contains(name))
        || PARTS.iter().any(|part| plain.contains(part))
}

/// The text with URLs without user, password and query, and up to the first PEM or value of a name that sounds secret.
pub fn without_text(text: &str) -> String {
    let words = text.split_inclusive(is_end);
    let mut text: String = words.map(of_word).collect();
    let pem = PEM.iter().filter_map(|mark| text.find(mark));
    let cut = pem.chain(value_of_secret(&text)).chain(after_word(&text)).min();
    if let Some(cut) = cut.filter(|cut| *cut < text.len()) {
        text.truncate(cut);
        text += LEFT_OUT;
    }
    text
}

/// The end of a word, and of a URL.
fn is_end(c: char) -> bool {
    c.is_whitespace() || "\"'`<>".contains(c)
}

/// The position after the first `name=` or `name:` whose name sounds secret; the name may be in quotes.
fn value_of_secret(text: &str) -> Option<usize> {
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    text.match_indices([':', '=']).find_map(|(at, _)| {
        let before = text[..at].trim_end_matches(['"', '\'', '\\', ' ']);
        let name = before.rsplit(|c| !is_of_name(c)).next().unwrap_or_default();
        is_secret(name).then_some(at + 1)
    })
}

/// The position after the first `Bearer `, or option of a command line that sounds secret: `--password x`.
fn after_word(text: &str) -> Option<usize> {
    let mut at = 0;
    text.split_inclusive(char::is_whitespace).find_map(|word| {
        at += word.len();
        let plain = word.trim_end().trim_matches(['"', '\'', '`', '(', '[', '{', ',']);
        let is_option = plain.starts_with('-') && is_secret(plain);
        (is_option || plain.eq_ignore_ascii_case("bearer")).then_some(at)
    })
}

/// A word without the user, password and query of its URLs (RFC 3986, section 3.2.1), up to the last `@` before the next
/// URL, as a password may have any character; and without `user:password@` of a data source's name.
fn of_word(word: &str) -> String {
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
            let end = word.trim_start_matches(|c| !is_end(c));
            return shown + path + "?" + LEFT_OUT + end;
        }
        shown += &piece;
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::json::compact;

    fn shown(text: &str) -> String {
        let items = |keys| Keys::Items(Box::new(keys));
        let known = [
            ("bridge", Keys::Any),
            ("ranges", items(items(Keys::Fields(vec![("subnet", Keys::Any)])))),
            ("sysctl", Keys::Any),
            ("runtimeConfig", Keys::Fields(vec![("mac", Keys::Any)])),
        ];
        let shown = Shown::new(std::iter::once(Keys::Fields(known.to_vec())));
        compact(&shown.conf(Json::parse(text.as_bytes()).unwrap())).unwrap()
    }

    /// The keys and values of real configurations, each with a secret that starts with `SECRET`.
    #[test]
    fn nothing_of_unknown_keys_is_shown() {
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
    fn known_keys_are_shown() {
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
    fn texts_lose_what_gives_a_secret_away() {
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
            assert_eq!(without_text(text), expected, "{text}");
            assert_eq!(without_text(expected), expected);
        }
    }

    #[test]
    fn what_a_configuration_calls_secret_is_no_part_of_errors() {
        let json = br#"{"name":"a net","login":["hunter2"],"pin":"007","tokens":{"a":"t0ken"}}"#;
        let values = values(&Json::parse(json).unwrap());
        assert_eq!(values, ["hunter2", "t0ken"]);
        let text = "network \"a net\": hunter2 has no right to t0ken, 007";
        let expected = "network \"a net\": (left out) has no right to (left out), 007";
        assert_eq!(without_values(text, &values), expected);
    }

    #[test]
    fn arguments() {
        let args = "IgnoreUnknown=1;K8S_POD_NAME=p;MYPASS=x;A=Bearer y;z;IP=https://u:p@h;";
        let expected = "IgnoreUnknown=1;K8S_POD_NAME=p;MYPASS=(left out);A=(left out);(left out);\
            IP=https://(left out)@h;";
        assert_eq!(without_args(args), expected);
        assert_eq!(without_args(""), "");
    }
}
