//! The surroundings of a plugin's process, and calls that are odd but right.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::mpsc;

use nix::sys::prctl::set_child_subreaper;
use nix::sys::stat::{Mode, umask};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::gettid;
use serde_json::{Value, json};

use super::protocol::fails_well;
use super::{Attachment, Container, Containers, Subject};
use crate::call::{Answer, Call};
use crate::check::Check;
use crate::profiles::{Profile, merge};
use crate::world::{Netns, Result, STATE};

pub fn run(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let containers = Containers::of(subject);
    // What plugins start and do not wait for is this process's then.
    set_child_subreaper(true).map_err(|error| format!("PR_SET_CHILD_SUBREAPER: {error}"))?;
    let stage = Stage { subject, containers };
    stage.configurations(check)?;
    stage.names(check)?;
    stage.surroundings(check)?;
    stage.namespaces(check)
}

struct Stage<'a> {
    subject: &'a Subject<'a>,
    containers: Containers<'a>,
}

impl Stage<'_> {
    /// ADD, changed by `change`, in a container of its own, and DEL.
    fn add(&self, members: Value, change: impl Fn(Call) -> Call) -> Result<Answer> {
        let mut conf = self.subject.conf.clone();
        merge(&mut conf, members);
        let container = self.containers.make()?;
        let added = change(self.containers.call("ADD", &conf, &container)).run()?;
        self.end(&conf, &container, &added, change)?;
        Ok(added)
    }

    fn end(
        &self,
        conf: &Value,
        container: &Container,
        added: &Answer,
        change: impl Fn(Call) -> Call,
    ) -> Result<()> {
        let mut last = conf.clone();
        if let Some(result) = added.json.as_ref().filter(|_| added.succeeded()) {
            last["prevResult"] = result.clone();
        }
        let bare = Container { at: container.at.clone(), prev: None };
        change(self.containers.call("DEL", &last, &bare)).run()?;
        self.containers
            .end(conf, container, added.json.as_ref().filter(|_| added.succeeded()))
            .map(drop)
    }

    /// Configurations with what a plugin has not heard of.
    fn configurations(&self, check: &mut Check) -> Result<()> {
        let large = "x".repeat(1 << 20);
        let deep = "[".repeat(100) + &"]".repeat(100);
        let deep: Value = serde_json::from_str(&deep).map_err(|error| error.to_string())?;
        for (id, members) in [
            ("process.unknown-key", json!({"org.example.key": {"a": 1}})),
            ("process.unicode", json!({"org.example.key": "\u{dc}ml\u{e4}ut \u{1f980}"})),
            ("process.large", json!({"org.example.key": large})),
            ("process.deep", json!({"org.example.key": deep})),
            ("process.labels", json!({"args": {"labels": [{"key": "app", "value": "web"}]}})),
            (
                "process.unknown-capability",
                json!({"capabilities": {"org.example": true},
                "runtimeConfig": merged(&self.subject.conf["runtimeConfig"], &json!({"org.example": 1}))}),
            ),
            ("process.name-characters", json!({"name": "a.b_c-9"})),
            (
                "process.dns",
                json!({"dns": {"nameservers": ["10.1.2.3"], "domain": "example.org", "search": ["a"], "options": ["b"]}}),
            ),
        ] {
            let added = self.add(members, |call| call)?;
            check.of(id, &added, added.succeeded());
        }
        let container = self.containers.make()?;
        for (id, text) in [
            ("process.two-documents", format!("{0}{0}", self.subject.conf)),
            ("process.null", "null".to_owned()),
            ("process.zeros", "\0\0\0\0".to_owned()),
            ("process.text", "\"text\"".to_owned()),
        ] {
            let call = self.containers.call("ADD", &self.subject.conf, &container);
            let answer = call.stdin(text.as_bytes()).run()?;
            check.of(id, &answer, fails_well(&answer));
        }
        let mut conf = self.subject.conf.clone();
        if let Some(prev) = &container.prev {
            conf["prevResult"] = prev.clone();
        }
        let added = self
            .containers
            .call("ADD", &conf, &container)
            .stdin(format!("\n {conf} \n\n").as_bytes())
            .run()?;
        check.of("process.white-space", &added, added.succeeded());
        self.end(&self.subject.conf, &container, &added, |call| call)
    }

    /// Identifiers and arguments as runtimes send them.
    fn names(&self, check: &mut Check) -> Result<()> {
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
        if self.subject.kind.profile == Profile::Interface && self.subject.kind.name != "loopback" {
            all.push(("process.ifname-longest", "CNI_IFNAME", "fifteen-bytes-9"));
        }
        for (id, variable, value) in all {
            let added = self.add(json!({}), |call| call.env(variable, value))?;
            check.of(id, &added, added.succeeded());
        }
        Ok(())
    }

    /// What a process inherits.
    fn surroundings(&self, check: &mut Check) -> Result<()> {
        fs::create_dir_all("/run/gone").map_err(|error| error.to_string())?;
        let gone = self.add(json!({}), |call| call.in_folder_that_goes("/run/gone"))?;
        check.of("process.folder-gone", &gone, gone.succeeded());
        let mute = self.add(json!({}), Call::without_stderr)?;
        check.of("process.no-stderr", &mute, mute.succeeded());
        let old = umask(Mode::empty());
        let open = self.add(json!({}), |call| call)?;
        umask(old);
        let writable: Vec<String> =
            STATE.iter().flat_map(|folder| writable(Path::new(folder))).collect();
        check.that("process.umask", writable.is_empty(), || writable.join(", "));
        drop(open);
        let old = umask(Mode::all());
        let closed = self.add(json!({}), |call| call)?;
        umask(old);
        check.of("process.umask-closed", &closed, closed.succeeded());
        let mut orphans = 0;
        while let Ok(WaitStatus::Exited(..) | WaitStatus::Signaled(..) | WaitStatus::StillAlive) =
            waitpid(None, Some(WaitPidFlag::WNOHANG))
        {
            orphans += 1;
            if orphans > 100 {
                break;
            }
        }
        check.that("process.no-orphans", orphans == 0, || {
            "processes are left that it started".to_owned()
        });
        Ok(())
    }

    /// Namespaces by other paths.
    fn namespaces(&self, check: &mut Check) -> Result<()> {
        let own = self.containers.make()?;
        let at = Attachment {
            netns: Netns { path: format!("/proc/{}/ns/net", std::process::id()).into() },
            ..own.at.clone()
        };
        let node = Container { at, prev: own.prev.clone() };
        let refused = self.containers.call("ADD", &self.subject.conf, &node).run()?;
        check.of("process.netns-of-node", &refused, fails_well(&refused));
        if refused.succeeded() {
            self.containers.call("DEL", &self.subject.conf, &node).run()?;
        }
        self.containers.end(&self.subject.conf, &own, None)?;
        if self.subject.kind.profile != Profile::Interface {
            return Ok(());
        }
        // A namespace that only a thread has, as those of runtimes that do not mount them.
        let container = self.containers.make()?;
        let (tell, told) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let netns = container.at.netns.clone();
        let thread = std::thread::spawn(move || {
            netns.run(move || {
                tell.send(gettid()).unwrap_or_default();
                // The channel's end is closed when the test is over.
                ended.recv().unwrap_or_default();
                Ok(())
            })
        });
        let tid = told.recv().map_err(|error| error.to_string())?;
        let path = format!("/proc/{}/task/{tid}/ns/net", std::process::id());
        let of_thread = Container {
            at: Attachment { netns: Netns { path: path.clone().into() }, ..container.at.clone() },
            prev: None,
        };
        let added = self.containers.call("ADD", &self.subject.conf, &of_thread).run()?;
        check.of("process.netns-of-thread", &added, added.succeeded());
        let sandbox = added.json.as_ref().map(|result| result["interfaces"].to_string());
        let is_named =
            !self.subject.since("0.3.0") || sandbox.is_some_and(|text| text.contains(&path));
        check.of("process.netns-of-thread-named", &added, is_named);
        self.containers.call("DEL", &self.subject.conf, &of_thread).run()?;
        drop(end);
        thread.join().map_err(|_| "a thread in a namespace: panic".to_owned())??;
        container.at.netns.remove()
    }
}

fn merged(one: &Value, other: &Value) -> Value {
    let mut all = if one.is_object() { one.clone() } else { json!({}) };
    merge(&mut all, other.clone());
    all
}

/// Files below a folder that everybody may write.
fn writable(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let (path, Ok(about)) = (entry.path(), entry.metadata()) else { continue };
        if about.is_dir() {
            found.extend(writable(&path));
        } else if about.is_file()
            && about.permissions().mode() & 0o002 != 0
            && !path.starts_with("/run/netns")
        {
            found.push(path.display().to_string());
        }
    }
    found
}
