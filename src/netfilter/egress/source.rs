//! Where policies come from: files, and the names of files in `CNI_ARGS`.

use std::path::Path;

use super::policy::EgressPolicy;
use crate::files::trust;
use cni::error::{Error, ErrorContext, Result};
use cni::files;
use cni::json::Json;
use cni::json::keys::DecodedKeys;

/// The key of `CNI_ARGS` with the name of a policy.
const POLICY_NAME: &str = "EGRESS_POLICY";

/// The maximum size of the file of a policy in bytes.
const LARGEST_POLICY: usize = 1 << 20;

/// Fails if the value has keys other than those of `keys`: `port` in place of `ports` would allow
/// all ports. `of` names the value.
pub fn require_keys(json: &Json, keys: fn() -> DecodedKeys, of: &str) -> Result<()> {
    if has_null(json) {
        let remedy = "write a value, or leave the key out: without \"ports\" all services are \
                      meant, with [] none";
        return Err(Error::config(format!("a value in {of} is null")).with_details(remedy));
    }
    match keys().find_unknown_keys(json).first() {
        None => Ok(()),
        Some((place, known)) => Err(Error::config(format!("unknown key {place} in {of}"))
            .with_details(format!("the keys are: {}", known.join(", ")))),
    }
}

/// Whether a value at any depth is null: elsewhere that means an absent key, in a policy it would
/// mean everything.
pub fn has_null(json: &Json) -> bool {
    match json {
        Json::Null => true,
        Json::Array(items) => items.iter().any(has_null),
        Json::Object(members) => members.iter().any(|(_, value)| has_null(value)),
        _ => false,
    }
}

/// The policy that `CNI_ARGS` names: a file in `directory`. Keys of other plugins are ignored.
pub fn named_policy(args: &str, directory: &Path) -> Result<Option<EgressPolicy>> {
    let mut pairs = args.split(';').filter_map(|pair| pair.split_once('='));
    let Some((_, name)) = pairs.find(|(key, name)| *key == POLICY_NAME && !name.is_empty()) else {
        return Ok(None);
    };
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
    read_policy(&trust::resolve_policy_file(directory, &format!("{name}.json"))?).map(Some)
}

pub fn read_policy(path: &Path) -> Result<EgressPolicy> {
    let of = format!("policy \"{}\"", path.display());
    let read = files::read_regular_file(path, LARGEST_POLICY);
    let bytes =
        read.map_err(|error| Error::config(format!("read {of}: {}", cni::error::io_text(&error))))?;
    let json = Json::parse(&bytes).context(|| of.clone())?;
    require_keys(&json, DecodedKeys::of_type::<EgressPolicy>, &of)?;
    json.decode().context(|| of.clone())
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
        std::fs::write(&path, r#"{"allow":[{"to":["10.0.0.0/8"],"port":["tcp/443"]}]}"#).unwrap();
        let error = read_policy(&path).unwrap_err();
        let expected = format!("unknown key allow[0].port in policy \"{}\"", path.display());
        assert_eq!(
            (error.message(), error.details()),
            (expected.as_str(), "the keys are: to, ports")
        );
    }

    #[test]
    fn a_named_policy_is_in_a_directory_of_root() {
        let named =
            |args, dir| named_policy(args, Path::new(dir)).map_err(|e| e.message().to_owned());
        assert_eq!(named("K8S_POD_NAME=x;EGRESS_POLICY=", "/etc/cni/p"), Ok(None));
        for (args, dir, why) in [
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
