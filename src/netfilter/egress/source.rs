//! Where policies come from: files, and the names of files in `CNI_ARGS`.

use std::iter;
use std::path::{Path, PathBuf};

use super::policy::EgressPolicy;
use crate::files::trust;
use cni::error::{Error, ErrorContext, Result};
use cni::files;
use cni::json::Json;
use cni::json::keys::{DecodedKeys, is_comment};
use cni::json::place::{JsonPathStep, JsonValuePath};
use cni::names::nearest_word;

/// The key of `CNI_ARGS` with the name of a policy.
const POLICY_NAME: &str = "EGRESS_POLICY";

/// The maximum size of the file of a policy in bytes.
const LARGEST_POLICY: usize = 1 << 20;

/// Fails at the first key that is not one of `keys`, is repeated, or whose value is null. An unknown
/// key may be a misspelled one, and `port` in place of `ports` would allow all ports; of repeated
/// keys the last one counts; null means an absent key elsewhere, in a policy it would mean
/// everything. `place` is that of the value.
pub fn require_keys(json: &Json, keys: &DecodedKeys, place: &JsonValuePath) -> Result<()> {
    match (json, keys) {
        (Json::Null, _) => {
            let remedy = "write a value, or leave the key out: without \"ports\" all services are \
                          meant, with [] none";
            Err(Error::config(format!("{place} is null")).with_details(remedy))
        }
        (Json::Object(members), DecodedKeys::Fields(_)) => {
            for (at, (name, value)) in members.iter().enumerate() {
                if is_comment(name) {
                    continue;
                }
                let Some(known) = keys.member_keys(name) else {
                    return Err(unknown_key_error(name, place, keys));
                };
                require_unrepeated(members, at, place)?;
                require_keys(value, known, &place.join_step(JsonPathStep::Key(name.clone())))?;
            }
            Ok(())
        }
        (Json::Array(items), _) => {
            let keys = if let DecodedKeys::Items(keys) = keys { keys } else { &DecodedKeys::Any };
            for (at, item) in items.iter().enumerate() {
                if item.as_str().is_none() {
                    require_keys(item, keys, &place.join_step(JsonPathStep::Index(at)))?;
                }
            }
            Ok(())
        }
        _ => Ok(()),
    }
}

/// The error of a key in the object at `place`, which has the keys `known`.
pub fn unknown_key_error(name: &str, place: &JsonValuePath, known: &DecodedKeys) -> Error {
    let known: Vec<_> = known.field_names().collect();
    key_error(format!("unknown key \"{name}\""), place)
        .with_details(format!("the keys are: {}", known.join(", ")))
}

/// Fails if the member of the object at `place` has the key of an earlier one.
pub fn require_unrepeated(
    members: &[(String, Json)],
    at: usize,
    place: &JsonValuePath,
) -> Result<()> {
    let (name, _) = &members[at];
    if members[..at].iter().any(|(earlier, _)| earlier.eq_ignore_ascii_case(name)) {
        let error = key_error(format!("repeated key \"{name}\""), place);
        return Err(error.with_details("only the last one would count: write it once"));
    }
    Ok(())
}

/// The error of a key in the object at `place`.
pub fn key_error(problem: String, place: &JsonValuePath) -> Error {
    let place = place.to_string();
    Error::config(if place.is_empty() { problem } else { format!("{problem} in {place}") })
}

/// Whether a key is, or probably was meant to be, that of a policy, such as `EGRESS_POLICY` or
/// `egressPolicies`.
pub fn resembles_policy_key(name: &str) -> bool {
    let mut letters = name.to_ascii_lowercase();
    letters.retain(|letter| letter.is_ascii_alphanumeric());
    letters == "egress"
        || letters.starts_with("egresspol")
        || nearest_word(&letters, iter::once("egresspolicy")).is_some()
}

/// The policy that `CNI_ARGS` names, and its file in `directory`. Keys of other plugins are ignored.
pub fn named_policy(args: &str, directory: &Path) -> Result<Option<(EgressPolicy, PathBuf)>> {
    let Some(name) = policy_name(args)? else { return Ok(None) };
    let refuse = |why: &str, remedy: &str| {
        Err(Error::config(format!("ARGS: {POLICY_NAME}={name}: {why}")).with_details(remedy))
    };
    if directory.as_os_str().is_empty() {
        return refuse(
            "there is no directory of policies",
            "add \"policyDir\" to the configuration",
        );
    }
    if name.starts_with('.')
        || !name.chars().all(|c: char| c.is_ascii_alphanumeric() || "._-".contains(c))
    {
        return refuse(
            "not the name of a policy",
            "a name has letters, digits, \".\", \"_\" and \"-\"",
        );
    }
    let path = directory.join(format!("{name}.json"));
    Ok(Some((read_trusted_policy(&path)?, path)))
}

/// Reads a policy in a directory where only root can write.
pub fn read_trusted_policy(path: &Path) -> Result<EgressPolicy> {
    read_policy(&trust::resolve_policy_file(path)?)
}

/// The pod that `CNI_ARGS` names: its namespace and name.
pub fn pod_name(args: &str) -> String {
    let named = |key: &str| {
        let mut pairs = args.split(';').filter_map(|pair| pair.split_once('='));
        pairs.find(|(known, _)| *known == key).map(|(_, value)| value)
    };
    let parts = [named("K8S_POD_NAMESPACE"), named("K8S_POD_NAME")];
    parts.into_iter().flatten().collect::<Vec<_>>().join("/")
}

/// The name of a policy in `CNI_ARGS`.
fn policy_name(args: &str) -> Result<Option<&str>> {
    let mut found = None;
    for (key, name) in args.split(';').filter_map(|pair| pair.split_once('=')) {
        if key != POLICY_NAME && resembles_policy_key(key) {
            return Err(Error::config(format!("ARGS: unknown key {key}"))
                .with_details(format!("write {POLICY_NAME}")));
        }
        if key != POLICY_NAME || name.is_empty() {
            continue;
        }
        if let Some(other) = found.replace(name).filter(|other| *other != name) {
            return Err(Error::config(format!(
                "ARGS: {POLICY_NAME} is \"{other}\" and \"{name}\""
            ))
            .with_details("write one policy that allows what both allow, and name it"));
        }
    }
    Ok(found)
}

pub fn read_policy(path: &Path) -> Result<EgressPolicy> {
    let of = format!("policy \"{}\"", path.display());
    let read = files::read_regular_file(path, LARGEST_POLICY);
    let bytes =
        read.map_err(|error| Error::config(format!("read {of}: {}", cni::error::io_text(&error))))?;
    let decode = |json: Json| {
        require_keys(&json, &DecodedKeys::of_type::<EgressPolicy>(), &JsonValuePath::default())?;
        json.decode()
    };
    Json::parse(&bytes).and_then(decode).context(|| of)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_of_a_policy_has_no_unknown_key() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("p.json");
        std::fs::write(
            &path,
            r#"{"policy":"deny","allow":[{"to":["10.0.0.0/8"],"ports":["tcp/443"]}]}"#,
        )
        .unwrap();
        let policy = read_policy(&path).unwrap();
        assert_eq!(
            (policy.policy.as_str(), policy.allow[0].to[0].as_str()),
            ("deny", "10.0.0.0/8")
        );
        for (text, problem, remedy) in [
            (
                r#"{"allow":[{"to":["10.0.0.0/8"],"port":["tcp/443"]}]}"#,
                "unknown key \"port\" in allow[0]",
                "the keys are: to, ports",
            ),
            (
                r#"{"alow":[]}"#,
                "unknown key \"alow\"",
                "the keys are: policy, allow, deny, profile, serve, limits",
            ),
            (
                r#"{"deny":[],"comment":"x","Deny":[]}"#,
                "repeated key \"Deny\"",
                "only the last one would count: write it once",
            ),
            (
                r#"{"deny":[{"to":["10.0.0.0/8"]},{"to":[],"to":["192.0.2.0/24"]}]}"#,
                "repeated key \"to\" in deny[1]",
                "only the last one would count: write it once",
            ),
            (r#"{"deny":[{"to":["10.0.0.0/8",null]}]}"#, "deny[0].to[1] is null", "write a value"),
            (r#"{"profile":null}"#, "profile is null", "write a value"),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = read_policy(&path).unwrap_err();
            let expected = format!("policy \"{}\": {problem}", path.display());
            assert_eq!(error.message(), expected);
            assert!(error.details().starts_with(remedy), "{error}");
        }
    }

    #[test]
    fn a_pod_has_a_namespace_and_a_name() {
        assert_eq!(pod_name("IgnoreUnknown=1;K8S_POD_NAME=p;K8S_POD_NAMESPACE=n"), "n/p");
        assert_eq!(pod_name("K8S_POD_NAMES=p"), "");
    }

    #[test]
    fn a_named_policy_is_in_a_directory_of_root() {
        let named =
            |args, dir| named_policy(args, Path::new(dir)).map_err(|e| e.message().to_owned());
        assert_eq!(named("K8S_POD_NAME=x;EGRESS_POLICY=", "/etc/cni/p"), Ok(None));
        let far = "K8S_POD_NAMESPACE=egress;POLICY=b;EGRESS_POLICY=;EGRESS_RATE=7";
        assert_eq!(named(far, "/etc/cni/p"), Ok(None));
        for (args, dir, why) in [
            (
                "EGRESS_POLICY=a;IgnoreUnknown=1;EGRESS_POLICY=b",
                "/etc/cni/p",
                "ARGS: EGRESS_POLICY is \"a\" and \"b\"",
            ),
            ("EGRES_POLICY=a", "/etc/cni/p", "ARGS: unknown key EGRES_POLICY"),
            ("egress_policy=a", "/etc/cni/p", "ARGS: unknown key egress_policy"),
            (" EGRESS_POLICY=a", "/etc/cni/p", "ARGS: unknown key  EGRESS_POLICY"),
            ("EGRESS_POLICY=a", "", "ARGS: EGRESS_POLICY=a: there is no directory of policies"),
            (
                "EGRESS_POLICY=../a",
                "/etc/cni/p",
                "ARGS: EGRESS_POLICY=../a: not the name of a policy",
            ),
            ("EGRESS_POLICY=.a", "/etc/cni/p", "ARGS: EGRESS_POLICY=.a: not the name of a policy"),
            (
                "EGRESS_POLICY=a",
                "/tmp/p",
                "policyDir \"/tmp/p\": not below /etc/cni, /run/cni or /var/lib/cni",
            ),
            (
                "EGRESS_POLICY=a",
                "/etc/cni/../p",
                "policyDir \"/etc/cni/../p\": not below /etc/cni, /run/cni or /var/lib/cni",
            ),
        ] {
            assert_eq!(named(args, dir), Err(why.to_owned()));
        }
    }
}
