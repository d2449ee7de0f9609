//! The environment of a plugin's process, and calls that are unusual but valid.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::mpsc;

use nix::sys::prctl::set_child_subreaper;
use nix::sys::stat::{Mode, umask};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::gettid;
use serde_json::{Value, json};

use super::{Answer, Attachment, Call, Check, Netns, Profile, Result, Subject};
use crate::profiles::merge;
use crate::world::STATE;

pub fn run(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    // Orphans of plugins become children of this process.
    set_child_subreaper(true)?;
    configurations(subject, check)?;
    names(subject, check)?;
    environment(subject, check)?;
    namespaces(subject, check)
}

/// ADD, modified by `change`, in a new container, and DEL.
fn add(subject: &Subject<'_>, members: Value, change: impl Fn(Call) -> Call) -> Result<Answer> {
    let subject = subject.with(members);
    let at = subject.container()?;
    let added = change(subject.call("ADD", &at, at.prev.as_ref())).run()?;
    end(&subject, &at, &added, change)?;
    Ok(added)
}

fn end(
    subject: &Subject<'_>,
    at: &Attachment,
    added: &Answer,
    change: impl Fn(Call) -> Call,
) -> Result<()> {
    change(subject.call("DEL", at, added.result())).run()?;
    subject.end(at, added.result()).map(drop)
}

/// Configurations with keys that a plugin does not know.
fn configurations(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let large = "x".repeat(1 << 20);
    let deep: Value = serde_json::from_str(&("[".repeat(100) + &"]".repeat(100)))?;
    let mut runtime = subject.conf["runtimeConfig"].clone();
    if !runtime.is_object() {
        runtime = json!({});
    }
    merge(&mut runtime, json!({"org.example": 1}));
    for (id, members) in [
        ("process.unknown-key", json!({"org.example.key": {"a": 1}})),
        ("process.unicode", json!({"org.example.key": "\u{dc}ml\u{e4}ut \u{1f980}"})),
        ("process.large", json!({"org.example.key": large})),
        ("process.deep", json!({"org.example.key": deep})),
        ("process.labels", json!({"args": {"labels": [{"key": "app", "value": "web"}]}})),
        (
            "process.unknown-capability",
            json!({"capabilities": {"org.example": true}, "runtimeConfig": runtime}),
        ),
        ("process.name-characters", json!({"name": "a.b_c-9"})),
        (
            "process.dns",
            json!({"dns": {"nameservers": ["10.1.2.3"], "domain": "example.org", "search": ["a"], "options": ["b"]}}),
        ),
    ] {
        if subject.asks(id) {
            check.succeeds(id, add(subject, members, |call| call))?;
        }
    }
    let at = subject.container()?;
    let with_stdin =
        |text: &str| subject.call("ADD", &at, at.prev.as_ref()).stdin(text.as_bytes()).run();
    for (id, text) in [
        ("process.two-documents", &*format!("{0}{0}", subject.conf)),
        ("process.null", "null"),
        ("process.zeros", "\0\0\0\0"),
        ("process.text", "\"text\""),
    ] {
        check.fails(id, with_stdin(text))?;
    }
    let mut conf = subject.conf.clone();
    if let Some(prev) = &at.prev {
        conf["prevResult"] = prev.clone();
    }
    let added = check.succeeds("process.white-space", with_stdin(&format!("\n {conf} \n\n")))?;
    end(subject, &at, &added, |call| call)
}

/// Identifiers and arguments as runtimes send them.
fn names(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let long = "0123456789abcdef".repeat(4);
    let mut all = vec![
        ("process.containerid-long", "CNI_CONTAINERID", long.as_str()),
        ("process.containerid-characters", "CNI_CONTAINERID", "a.b_c-9"),
        ("process.unknown-variable", "CNI_FUTURE", "1"),
        (
            "process.kubernetes-args",
            "CNI_ARGS",
            "IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME=web-0;K8S_POD_INFRA_CONTAINER_ID=abc;K8S_POD_UID=1-2",
        ),
    ];
    if subject.kind.profile == Profile::Interface && !subject.is(&["loopback"]) {
        all.push(("process.ifname-longest", "CNI_IFNAME", "fifteen-bytes-9"));
    }
    for (id, variable, value) in all {
        if subject.asks(id) {
            check.succeeds(id, add(subject, json!({}), |call| call.env(variable, value)))?;
        }
    }
    Ok(())
}

/// Working directory, stderr, umask, and child processes.
fn environment(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let add = |change: fn(Call) -> Call| add(subject, json!({}), change);
    fs::create_dir_all("/run/gone")?;
    check.succeeds("process.directory-gone", add(|call| call.in_deleted_directory("/run/gone")))?;
    check.succeeds("process.no-stderr", add(Call::without_stderr))?;
    let old = umask(Mode::empty());
    add(|call| call)?;
    umask(old);
    let writable: Vec<String> =
        STATE.iter().flat_map(|directory| writable(Path::new(directory))).collect();
    check.that("process.umask", writable.is_empty(), || writable.join(", "));
    let old = umask(Mode::all());
    let closed = add(|call| call)?;
    umask(old);
    check.succeeds("process.umask-closed", Ok(closed))?;
    let orphan = waitpid(None, Some(WaitPidFlag::WNOHANG));
    let has_orphan = matches!(
        orphan,
        Ok(WaitStatus::Exited(..) | WaitStatus::Signaled(..) | WaitStatus::StillAlive)
    );
    check.that("process.no-orphans", !has_orphan, || {
        "processes are left that it started".to_owned()
    });
    Ok(())
}

/// The files below a directory that every user may write to.
fn writable(directory: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let (path, Ok(metadata)) = (entry.path(), entry.metadata()) else { continue };
        if metadata.is_dir() {
            found.extend(writable(&path));
        } else if metadata.is_file()
            && metadata.permissions().mode() & 0o002 != 0
            && !path.starts_with("/run/netns")
        {
            found.push(path.display().to_string());
        }
    }
    found
}

/// Unusual paths of namespaces.
fn namespaces(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let own = subject.container()?;
    let path = format!("/proc/{}/ns/net", std::process::id()).into();
    let node = Attachment { netns: Netns { path }, ..own.clone() };
    let refused = check.fails("process.netns-of-node", subject.add(&node))?;
    if refused.succeeded() {
        subject.run("DEL", &node, node.prev.as_ref())?;
    }
    subject.end(&own, None)?;
    if subject.kind.profile != Profile::Interface {
        return Ok(());
    }
    // The namespace of a thread: some runtimes do not mount namespaces.
    let at = subject.container()?;
    let (send_tid, tid) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    let netns = at.netns.clone();
    let thread = std::thread::spawn(move || {
        netns.run(move || {
            send_tid.send(gettid()).unwrap_or_default();
            // Returns when the sender is dropped.
            ended.recv().unwrap_or_default();
            Ok(())
        })
    });
    let path = format!("/proc/{}/task/{}/ns/net", std::process::id(), tid.recv()?);
    let of_thread = Attachment { netns: Netns { path: path.clone().into() }, ..at.clone() };
    let added = check.succeeds("process.netns-of-thread", subject.run("ADD", &of_thread, None))?;
    let sandbox = added.json.as_ref().map(|result| result["interfaces"].to_string());
    let is_named = !subject.since("0.3.0") || sandbox.is_some_and(|text| text.contains(&path));
    check.of("process.netns-of-thread-named", &added, is_named);
    subject.run("DEL", &of_thread, None)?;
    drop(end);
    thread.join().map_err(|_| "a thread in a namespace: panic")??;
    at.netns.remove()
}
