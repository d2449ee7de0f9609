//! Removes secrets from documents that leave the node, such as `cnibox sysdump`.

use super::json::Json;

/// The replacement of a secret.
const LEFT_OUT: &str = "(left out)";

/// Parts of the names of secrets, in lower case and without `-` and `_`. Names that end in `key` are secrets as well.
const NAMES: [&str; 9] =
    ["auth", "cert", "credential", "passphrase", "passwd", "password", "psk", "secret", "token"];

/// The document without the values of keys that sound secret, keys in PEM, and the user and password of URLs.
pub fn without(mut json: Json) -> Json {
    json.for_each(&|json| match json {
        Json::Object(members) => {
            for (key, value) in members {
                if is_secret(key) && !matches!(value, Json::Null | Json::Bool(_)) {
                    *value = LEFT_OUT.into();
                }
            }
        }
        Json::Array(items) => {
            // The pairs of `CNI_ARGS` in a cached result.
            if let [Json::String(key), value @ Json::String(_)] = items.as_mut_slice()
                && is_secret(key)
            {
                *value = LEFT_OUT.into();
            }
        }
        Json::String(text) => *text = without_text(text),
        _ => {}
    });
    json
}

fn is_secret(key: &str) -> bool {
    let plain: String = key.chars().filter(char::is_ascii_alphanumeric).collect();
    let plain = plain.to_ascii_lowercase();
    plain.ends_with("key") || NAMES.iter().any(|name| plain.contains(name))
}

/// As [`without`], for other texts: pairs such as `A=1;B=2`, URLs, PEM.
pub fn without_text(text: &str) -> String {
    if text.contains("-----BEGIN") {
        return LEFT_OUT.to_owned();
    }
    let pair = |pair: &str| match pair.split_once('=') {
        Some((key, _)) if is_secret(key) => format!("{key}={LEFT_OUT}"),
        _ => of_url(pair),
    };
    text.split(';').map(pair).collect::<Vec<_>>().join(";")
}

/// `scheme://user:password@host` without user and password (RFC 3986, section 3.2.1).
fn of_url(text: &str) -> String {
    let Some((scheme, rest)) = text.split_once("://") else { return text.to_owned() };
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    match authority.rfind('@') {
        Some(at) => format!("{scheme}://{LEFT_OUT}{}", &rest[at..]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::json::compact;

    fn shown(text: &str) -> String {
        compact(&without(Json::parse(text.as_bytes()).unwrap())).unwrap()
    }

    #[test]
    fn secrets_are_left_out() {
        for (document, expected) in [
            (r#"{"password":"x"}"#, r#"{"password":"(left out)"}"#),
            (r#"{"a":[{"API_Key":{"b":1}}]}"#, r#"{"a":[{"API_Key":"(left out)"}]}"#),
            (r#"{"etcd_ca_cert_file":"x"}"#, r#"{"etcd_ca_cert_file":"(left out)"}"#),
            (r#"{"wgKey":"x"}"#, r#"{"wgKey":"(left out)"}"#),
            (r#"{"url":"http://me:pw@host:1/a@b"}"#, r#"{"url":"http://(left out)@host:1/a@b"}"#),
            (r#"{"key":"-----BEGIN X-----"}"#, r#"{"key":"(left out)"}"#),
            (r#"{"args":"POD=a;TOKEN=b"}"#, r#"{"args":"POD=a;TOKEN=(left out)"}"#),
            (r#"[["K8S_TOKEN","x"],["POD","y"]]"#, r#"[["K8S_TOKEN","(left out)"],["POD","y"]]"#),
        ] {
            assert_eq!(shown(document), expected, "{document}");
        }
    }

    #[test]
    fn the_rest_stays() {
        for document in [
            r#"{"type":"bridge","ipam":{"ranges":[[{"subnet":"10.0.0.0/24"}]]},"authorized":true}"#,
            r#"{"url":"http://host/a@b","mtu":1500,"token":null}"#,
        ] {
            assert_eq!(shown(document), document);
        }
    }
}
