//! What every plugin answers, whatever it is for: VERSION, and calls that cannot be right.

use serde_json::{Value, json};

use super::{Attachment, Subject};
use crate::call::{Answer, Call};
use crate::check::Check;
use crate::profiles::VERSIONS;
use crate::world::{Netns, Result};

/// The codes of the specification for requests that are wrong in themselves.
const INCOMPATIBLE: u64 = 1;
const ENVIRONMENT: u64 = 4;
const DECODING: u64 = 6;
const CONFIGURATION: u64 = 7;

pub fn run(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    version(subject, check)?;
    let at = Attachment { id: "sanity-1", netns: Netns::new("protocol")?, ifname: "eth0" };
    environment(subject, &at, check)?;
    stdin(subject, &at, check)?;
    Ok(())
}

fn version(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let plugin = subject.plugin();
    let call = || Call::new(&plugin, "VERSION", &json!({"cniVersion": subject.version}));
    let answer = call().run()?;
    check.of("version.succeeds", &answer, answer.succeeded());
    check.of("version.json", &answer, answer.json.as_ref().is_some_and(Value::is_object));
    let json = answer.json.clone().unwrap_or_default();
    let own = json["cniVersion"].as_str().unwrap_or_default();
    check.of("version.cni-version", &answer, is_version(own));
    let supported: Vec<&str> = json["supportedVersions"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    check.of("version.supported", &answer, !supported.is_empty());
    check.of(
        "version.supported-form",
        &answer,
        supported.iter().all(|version| is_version(version)),
    );
    check.of("version.supports-configured", &answer, supported.contains(&subject.version));
    let mut unique = supported.clone();
    unique.sort_unstable();
    unique.dedup();
    check.of("version.supported-unique", &answer, unique.len() == supported.len());
    check.of("version.current", &answer, supported.contains(&"1.1.0"));
    check.of("version.includes-own", &answer, supported.contains(&own));
    let bare = call().env("CNI_PATH", "").run()?;
    check.of("version.no-other-variable", &bare, bare.succeeded());
    let silent = call().stdin(b"").run()?;
    check.of("version.no-stdin", &silent, silent.succeeded());
    let wrong = call().stdin(b"no json").run()?;
    check.of("version.any-stdin", &wrong, wrong.succeeded());
    Ok(())
}

/// `1.2.3`
pub fn is_version(text: &str) -> bool {
    let parts: Vec<&str> = text.split('.').collect();
    let is_number =
        |part: &&str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    parts.len() == 3 && parts.iter().all(is_number)
}

fn environment(subject: &Subject<'_>, at: &Attachment, check: &mut Check) -> Result<()> {
    let add = || subject.call("ADD", at, None);
    for (variable, fails, code, named) in [
        (
            "CNI_CONTAINERID",
            "env.containerid.missing",
            "env.containerid.code",
            "env.containerid.named",
        ),
        ("CNI_NETNS", "env.netns.missing", "env.netns.code", "env.netns.named"),
        ("CNI_IFNAME", "env.ifname.missing", "env.ifname.code", "env.ifname.named"),
    ] {
        let answer = add().env(variable, "").run()?;
        check.of(fails, &answer, fails_well(&answer));
        check.of(code, &answer, answer.code() == Some(ENVIRONMENT));
        check.of(named, &answer, message(&answer).contains(variable));
        if variable == "CNI_CONTAINERID" {
            error(&answer, subject, check);
        }
    }
    refused_values(subject, at, check)?;
    refused_verbs(subject, at, check)?;
    let checked = subject.call("CHECK", at, None).env("CNI_CONTAINERID", "").run()?;
    if subject.since("0.4.0") {
        check.of("env.check.containerid", &checked, fails_well(&checked));
    }
    let deleted = subject.call("DEL", at, None).env("CNI_CONTAINERID", "").run()?;
    check.of("env.del.containerid", &deleted, fails_well(&deleted));
    let deleted = subject.call("DEL", at, None).env("CNI_IFNAME", "").run()?;
    check.of("env.del.ifname", &deleted, fails_well(&deleted));
    Ok(())
}

fn refused_values(subject: &Subject<'_>, at: &Attachment, check: &mut Check) -> Result<()> {
    for (variable, value, id) in [
        ("CNI_IFNAME", "a-name-that-is-too-long", "env.ifname.too-long"),
        ("CNI_IFNAME", "with/slash", "env.ifname.slash"),
        ("CNI_IFNAME", "with blank", "env.ifname.blank"),
        ("CNI_IFNAME", "..", "env.ifname.dots"),
        ("CNI_CONTAINERID", "../../etc", "env.containerid.path"),
        ("CNI_CONTAINERID", "-begins-wrong", "env.containerid.first"),
        ("CNI_NETNS", "/run/netns/nowhere", "env.netns.nowhere"),
        ("CNI_NETNS", "/etc/passwd", "env.netns.no-namespace"),
    ] {
        // Loopback and IPAM plugins have no use for some of them.
        let is_used = match variable {
            "CNI_NETNS" => subject.kind.profile == crate::profiles::Profile::Interface,
            _ => true,
        };
        if is_used {
            let answer = subject.call("ADD", at, None).env(variable, value).run()?;
            check.of(id, &answer, fails_well(&answer));
        }
    }
    Ok(())
}

fn refused_verbs(subject: &Subject<'_>, at: &Attachment, check: &mut Check) -> Result<()> {
    let unknown = subject.call("NONSENSE", at, None).run()?;
    check.of("env.command.unknown", &unknown, fails_well(&unknown));
    check.of("env.command.unknown-code", &unknown, unknown.code() == Some(ENVIRONMENT));
    let lower = subject.call("add", at, None).run()?;
    check.of("env.command.case", &lower, fails_well(&lower));
    for (verb, version, id, code) in [
        ("CHECK", "0.4.0", "env.command.check-early", "env.command.check-early-code"),
        ("GC", "1.1.0", "env.command.gc-early", "env.command.gc-early-code"),
        ("STATUS", "1.1.0", "env.command.status-early", "env.command.status-early-code"),
    ] {
        if !subject.since(version) {
            let early = subject.call(verb, at, None).run()?;
            check.of(id, &early, fails_well(&early));
            // A plugin that knows no version with the verb does not know the verb either.
            let is_unknown = verb != "CHECK" && early.code() == Some(ENVIRONMENT);
            check.of(code, &early, is_unknown || early.code() == Some(INCOMPATIBLE));
        }
    }
    Ok(())
}

fn stdin(subject: &Subject<'_>, at: &Attachment, check: &mut Check) -> Result<()> {
    let add = || subject.call("ADD", at, None);
    for (bytes, fails, code) in [
        (&b"{"[..], "stdin.cut-off", "stdin.cut-off-code"),
        (b"no json at all", "stdin.no-json", "stdin.no-json-code"),
        (b"[1, 2]", "stdin.no-object", "stdin.no-object-code"),
        (b"", "stdin.empty", "stdin.empty-code"),
    ] {
        let answer = add().stdin(bytes).run()?;
        check.of(fails, &answer, fails_well(&answer));
        check.of(code, &answer, answer.code() == Some(DECODING));
    }
    let with = |change: &dyn Fn(&mut Value)| {
        let mut conf = subject.conf.clone();
        change(&mut conf);
        add().stdin(conf.to_string().as_bytes())
    };
    let nameless =
        with(&|conf| drop(conf.as_object_mut().map(|conf| conf.remove("name")))).run()?;
    check.of("conf.name-missing", &nameless, fails_well(&nameless));
    check.of("conf.name-code", &nameless, nameless.code() == Some(CONFIGURATION));
    let odd = with(&|conf| conf["name"] = json!("../up")).run()?;
    check.of("conf.name-path", &odd, fails_well(&odd));
    let typed = with(&|conf| conf["name"] = json!(7)).run()?;
    check.of("conf.name-type", &typed, fails_well(&typed));
    for (version, id) in [
        ("9.9.9", "conf.version-unknown"),
        ("0.0.9", "conf.version-old"),
        ("one", "conf.version-form"),
    ] {
        let answer = with(&|conf| conf["cniVersion"] = json!(version)).run()?;
        check.of(id, &answer, fails_well(&answer));
        if id == "conf.version-unknown" {
            check.of("conf.version-code", &answer, answer.code() == Some(INCOMPATIBLE));
        }
    }
    let typed = with(&|conf| conf["cniVersion"] = json!(1)).run()?;
    check.of("conf.version-type", &typed, fails_well(&typed));
    if subject.since("0.4.0") {
        let odd =
            subject.call("CHECK", at, Some(&json!({"cniVersion": "9.9.9", "ips": 7}))).run()?;
        check.of("conf.prev-result-garbage", &odd, fails_well(&odd));
    }
    Ok(())
}

/// An error as the specification has it: not status 0, and not killed.
pub fn fails_well(answer: &Answer) -> bool {
    answer.status.is_some_and(|status| status != 0)
}

fn message(answer: &Answer) -> String {
    let text = |key| {
        answer.json.as_ref().and_then(|json| json[key].as_str()).unwrap_or_default().to_owned()
    };
    text("msg") + &text("details")
}

/// The object that an error is told by.
fn error(answer: &Answer, subject: &Subject<'_>, check: &mut Check) {
    let json = answer.json.clone().unwrap_or_default();
    check.of("error.stdout", answer, !answer.stdout.is_empty());
    check.of("error.object", answer, json.is_object());
    check.of("error.code", answer, json["code"].is_u64());
    check.of("error.msg", answer, json["msg"].as_str().is_some_and(|msg| !msg.is_empty()));
    check.of("error.details", answer, json["details"].is_null() || json["details"].is_string());
    let version = json["cniVersion"].as_str();
    check.of("error.cni-version", answer, version.is_some());
    check.of(
        "error.cni-version-known",
        answer,
        version.is_none_or(|version| version == subject.version || VERSIONS.contains(&version)),
    );
}
