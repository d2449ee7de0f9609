//! The protocol, independent of the plugin's purpose: VERSION, and invalid calls.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{Answer, Attachment, Call, Check, Profile, Result, Subject};
use crate::profiles::VERSIONS;

/// Error codes of the specification.
const INCOMPATIBLE: u64 = 1;
const ENVIRONMENT: u64 = 4;
const DECODING: u64 = 6;
const CONFIGURATION: u64 = 7;

/// All codes below 100 that the specification defines.
const CODES: [u64; 10] = [1, 2, 3, 4, 5, 6, 7, 11, 50, 51];

pub fn run(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    version(subject, check)?;
    let at = Attachment { ifname: "eth0", ..subject.attachment("sanity-1", "protocol")? };
    environment(subject, &at, check)?;
    stdin(subject, &at, check)
}

fn version(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let conf = json!({"cniVersion": subject.version});
    let call = || Call::new(&subject.plugin(), "VERSION", &conf);
    let answer = check.succeeds("version.succeeds", call().run())?;
    check.of("version.json", &answer, answer.json.as_ref().is_some_and(Value::is_object));
    let json = answer.json.clone().unwrap_or_default();
    let own = json["cniVersion"].as_str().unwrap_or_default();
    check.of("version.cni-version", &answer, is_version(own));
    check.of("version.echo", &answer, own == subject.version);
    let supported = json["supportedVersions"].as_array().into_iter().flatten();
    let supported: Vec<&str> = supported.filter_map(Value::as_str).collect();
    check.of("version.supported", &answer, !supported.is_empty());
    let are_versions = supported.iter().all(|version| is_version(version));
    check.of("version.supported-form", &answer, are_versions);
    let unique: BTreeSet<_> = supported.iter().collect();
    check.of("version.supported-unique", &answer, unique.len() == supported.len());
    check.of("version.current", &answer, supported.contains(&"1.1.0"));
    check.of("version.includes-own", &answer, supported.contains(&own));
    check.succeeds("version.no-other-variable", call().env("CNI_PATH", "").run())?;
    check.succeeds("version.no-stdin", call().stdin(b"").run())?;
    check.succeeds("version.any-stdin", call().stdin(b"no json").run())?;
    Ok(())
}

/// Whether a text has the form of `1.2.3`.
fn is_version(text: &str) -> bool {
    let mut parts = text.split('.');
    text.split('.').count() == 3
        && parts.all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit()))
}

fn environment(subject: &Subject<'_>, at: &Attachment, check: &mut Check) -> Result<()> {
    for (variable, [fails, code, named]) in [
        (
            "CNI_CONTAINERID",
            ["env.containerid.missing", "env.containerid.code", "env.containerid.named"],
        ),
        ("CNI_NETNS", ["env.netns.missing", "env.netns.code", "env.netns.named"]),
        ("CNI_IFNAME", ["env.ifname.missing", "env.ifname.code", "env.ifname.named"]),
    ] {
        let answer = check.fails(fails, subject.call("ADD", at, None).env(variable, "").run())?;
        check.of(code, &answer, answer.code() == Some(ENVIRONMENT));
        let is_named = answer.code() != Some(ENVIRONMENT) || message(&answer).contains(variable);
        check.of(named, &answer, is_named);
    }
    refused_values(subject, at, check)?;
    refused_verbs(subject, at, check)?;
    let without = |verb: &str, variable: &str| subject.call(verb, at, None).env(variable, "").run();
    if subject.since("0.4.0") {
        check.fails("env.check.containerid", without("CHECK", "CNI_CONTAINERID"))?;
    }
    check.fails("env.del.containerid", without("DEL", "CNI_CONTAINERID"))?;
    check.fails("env.del.ifname", without("DEL", "CNI_IFNAME"))?;
    Ok(())
}

fn refused_values(subject: &Subject<'_>, at: &Attachment, check: &mut Check) -> Result<()> {
    for (variable, value, id) in [
        ("CNI_IFNAME", "a-name-that-is-too-long", "env.ifname.too-long"),
        ("CNI_IFNAME", "with/slash", "env.ifname.slash"),
        ("CNI_IFNAME", "with space", "env.ifname.blank"),
        ("CNI_IFNAME", "..", "env.ifname.dots"),
        ("CNI_CONTAINERID", "../../etc", "env.containerid.path"),
        ("CNI_CONTAINERID", "-begins-wrong", "env.containerid.first"),
        ("CNI_NETNS", "/run/netns/nowhere", "env.netns.nowhere"),
        ("CNI_NETNS", "/etc/passwd", "env.netns.no-namespace"),
    ] {
        // Only plugins that create an interface must use the namespace.
        if variable != "CNI_NETNS" || subject.kind.profile == Profile::Interface {
            check.fails(id, subject.call("ADD", at, None).env(variable, value).run())?;
        }
    }
    Ok(())
}

fn refused_verbs(subject: &Subject<'_>, at: &Attachment, check: &mut Check) -> Result<()> {
    let unknown = check.fails("env.command.unknown", subject.run("NONSENSE", at, None))?;
    check.of("env.command.unknown-code", &unknown, unknown.code() == Some(ENVIRONMENT));
    check.fails("env.command.case", subject.run("add", at, None))?;
    for (verb, version, id, code) in [
        ("CHECK", "0.4.0", "env.command.check-early", "env.command.check-early-code"),
        ("GC", "1.1.0", "env.command.gc-early", "env.command.gc-early-code"),
        ("STATUS", "1.1.0", "env.command.status-early", "env.command.status-early-code"),
    ] {
        if !subject.since(version) {
            let early = check.fails(id, subject.run(verb, at, None))?;
            // A plugin without a version that has the verb may report the verb as unknown.
            let is_unknown = verb != "CHECK" && early.code() == Some(ENVIRONMENT);
            check.of(code, &early, is_unknown || early.code() == Some(INCOMPATIBLE));
        }
    }
    Ok(())
}

fn stdin(subject: &Subject<'_>, at: &Attachment, check: &mut Check) -> Result<()> {
    for (bytes, fails, code) in [
        (&b"{"[..], "stdin.cut-off", "stdin.cut-off-code"),
        (b"no json at all", "stdin.no-json", "stdin.no-json-code"),
        (b"[1, 2]", "stdin.no-object", "stdin.no-object-code"),
        (b"", "stdin.empty", "stdin.empty-code"),
    ] {
        let answer = check.fails(fails, subject.call("ADD", at, None).stdin(bytes).run())?;
        check.of(code, &answer, answer.code() == Some(DECODING));
    }
    for (verb, version, id) in [
        ("CHECK", "0.4.0", "stdin.check"),
        ("GC", "1.1.0", "stdin.gc"),
        ("STATUS", "1.1.0", "stdin.status"),
    ] {
        if subject.since(version) {
            check.fails(id, subject.call(verb, at, None).stdin(b"no json at all").run())?;
        }
    }
    for (id, code, members) in [
        ("conf.name-missing", Some(("conf.name-code", CONFIGURATION)), json!({"name": null})),
        ("conf.name-path", None, json!({"name": "../up"})),
        ("conf.name-type", None, json!({"name": 7})),
        (
            "conf.version-unknown",
            Some(("conf.version-code", INCOMPATIBLE)),
            json!({"cniVersion": "9.9.9"}),
        ),
        ("conf.version-old", None, json!({"cniVersion": "0.0.9"})),
        ("conf.version-form", None, json!({"cniVersion": "one"})),
        ("conf.version-type", None, json!({"cniVersion": 1})),
    ] {
        let answer = check.fails(id, subject.with(members).run("ADD", at, None))?;
        if let Some((id, code)) = code {
            check.of(id, &answer, answer.code() == Some(code));
        }
        // The version of the error is known, because the configuration was read.
        if id == "conf.name-missing" && answer.failed() {
            error(&answer, subject, check);
        }
    }
    if subject.since("0.4.0") {
        let garbage = json!({"cniVersion": "9.9.9", "ips": 7});
        check.fails("conf.prev-result-garbage", subject.run("CHECK", at, Some(&garbage)))?;
    }
    Ok(())
}

fn message(answer: &Answer) -> String {
    let text = |key| {
        answer.json.as_ref().and_then(|json| json[key].as_str()).unwrap_or_default().to_owned()
    };
    text("msg") + &text("details")
}

/// The form of the error object.
fn error(answer: &Answer, subject: &Subject<'_>, check: &mut Check) {
    let json = answer.json.clone().unwrap_or_default();
    check.of("error.stdout", answer, !answer.stdout.is_empty());
    check.of("error.object", answer, json.is_object());
    check.of("error.code", answer, json["code"].is_u64());
    let is_free = json["code"].as_u64().is_none_or(|code| code >= 100 || CODES.contains(&code));
    check.of("error.code-reserved", answer, is_free);
    check.of("error.msg", answer, json["msg"].as_str().is_some_and(|msg| !msg.is_empty()));
    check.of("error.details", answer, json["details"].is_null() || json["details"].is_string());
    let version = json["cniVersion"].as_str();
    check.of("error.cni-version", answer, version.is_some());
    let is_known =
        version.is_none_or(|version| version == subject.version || VERSIONS.contains(&version));
    check.of("error.cni-version-known", answer, is_known);
}
