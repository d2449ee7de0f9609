//! The layers of docs/architecture.md, checked in the text of the source.
//!
//! A module imports only from its own layer's allowance; a few words (`setns`, `fs2`, `Command`,
//! `/proc/sys`) may stand in one place each. Comments are not looked at, so that documentation
//! can speak freely.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::fs;
use std::path::{Path, PathBuf};

/// What each module may import from the crate besides itself, `error` and `log`.
const LAYERS: &[(&str, &[&str])] = &[
    ("error", &[]),
    ("log", &[]),
    ("cni", &[]),
    ("netns", &[]),
    ("sysctl", &[]),
    ("cmd", &[]),
    ("netlink", &["netns"]),
    ("attachment", &["cni", "netlink", "netns"]),
    ("store", &["attachment", "netlink", "netns", "sysctl"]),
    ("invoke", &["cni"]),
    ("iface", &["cmd", "cni", "netlink", "netns", "sysctl"]),
    ("netfilter", &["attachment", "cmd", "cni", "netlink", "netns", "store", "sysctl"]),
    ("skel", &["attachment", "cni", "netlink", "netns", "iface", "invoke", "netfilter", "store"]),
    ("runtime", &["cni", "invoke", "store"]),
    (
        "plugins",
        &[
            "attachment",
            "cmd",
            "cni",
            "netlink",
            "netns",
            "sysctl",
            "iface",
            "netfilter",
            "skel",
            "store",
        ],
    ),
    ("tool", &["attachment", "cni", "invoke", "netfilter", "runtime", "skel", "store"]),
    ("applets", &["plugins", "skel", "tool"]),
];

/// Words and the only files or folders below `src` that may have them.
const PLACES: &[(&str, &[&str])] = &[
    ("setns(", &["netns.rs"]),
    ("unshare(", &["netns.rs"]),
    ("fs2::", &["store/lock.rs"]),
    ("-restore\"", &["netfilter/iptables.rs"]),
    ("rtnetlink", &["netlink/"]),
    ("netlink_packet", &["netlink/"]),
    ("tokio", &["netlink/", "plugins/dhcp/daemon/"]),
    ("socket2", &["plugins/dhcp/"]),
    ("listenfd", &["plugins/dhcp/daemon/"]),
    ("process::Command", &["cmd.rs", "invoke/"]),
    ("process::{Child, Command", &["cmd.rs", "invoke/"]),
    ("/proc/sys", &["sysctl.rs"]),
    ("/sys/class/net", &[]),
    ("io::stdout", &["skel/run.rs", "skel/start.rs", "tool/", "plugins/dhcp/daemon/"]),
    ("println!", &[]),
    ("unsafe ", &["iface/tun.rs", "main.rs", "netlink/later.rs"]),
    ("unsafe_code", &["iface/tun.rs", "main.rs", "netlink/later.rs"]),
    ("io_uring", &["netlink/later.rs"]),
    ("thread::sleep", &["invoke/"]),
];

/// Names that say nothing about what is inside.
const DUMPING_GROUNDS: [&str; 6] = ["util", "utils", "common", "helper", "helpers", "misc"];

const LONGEST_FILE: usize = 500;

struct Source {
    /// Path below `src`.
    path: String,
    text: String,
}

impl Source {
    /// The module directly below the crate.
    fn module(&self) -> &str {
        self.path.split('/').next().unwrap().trim_end_matches(".rs")
    }

    /// The lines of code: no comments, no tests.
    fn code(&self) -> impl Iterator<Item = &str> {
        let tests = self.path.contains("tests");
        let lines = self.text.lines().take_while(|line| !line.starts_with("#[cfg(test)]"));
        lines.filter(move |line| !tests && !line.trim_start().starts_with("//"))
    }
}

fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut found = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path: PathBuf = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                let path = path.strip_prefix(&root).unwrap().display().to_string();
                found.push(Source { path, text });
            }
        }
    }
    assert!(found.len() > 30, "the source was not found");
    found
}

fn fail_on(what: &str, broken: &[String]) {
    assert!(broken.is_empty(), "{what}:\n  {}", broken.join("\n  "));
}

/// The identifier that `text` begins with.
fn word(text: &str) -> String {
    let text = text.trim_start();
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// The modules that a line imports or names: `crate::cni::json` gives `cni`, and
/// `crate::{a, b::c}` both.
fn imports(line: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in line.match_indices("crate::") {
        let rest = &line[at + "crate::".len()..];
        let names = match rest.strip_prefix('{') {
            Some(list) => list.split(',').collect(),
            None => vec![rest],
        };
        found.extend(names.into_iter().map(word).filter(|name| !name.is_empty()));
    }
    found
}

#[test]
fn imports_go_down_only() {
    let mut broken = Vec::new();
    for source in sources() {
        let module = source.module();
        if matches!(module, "lib" | "main") {
            continue;
        }
        let Some((_, allowed)) = LAYERS.iter().find(|(name, _)| *name == module) else {
            broken.push(format!("{}: {module} has no layer; add it to LAYERS", source.path));
            continue;
        };
        for line in source.code() {
            for import in imports(line) {
                let free = [module, "error", "log"].contains(&import.as_str());
                if !free && !allowed.contains(&import.as_str()) {
                    broken.push(format!("{}: {module} imports {import}", source.path));
                }
            }
        }
    }
    fail_on("modules that import from above", &broken);
}

#[test]
fn plugins_do_not_know_each_other() {
    let mut broken = Vec::new();
    for source in sources().iter().filter(|s| s.path.starts_with("plugins/")) {
        let own = source.path["plugins/".len()..].split('/').next().unwrap();
        let own = own.trim_end_matches(".rs");
        for line in source.code() {
            for (at, _) in line.match_indices("plugins::") {
                if word(&line[at + "plugins::".len()..]) != own {
                    broken.push(format!("{}: {}", source.path, line.trim()));
                }
            }
        }
    }
    fail_on("plugins that import plugins", &broken);
}

#[test]
fn some_things_have_one_place() {
    let mut broken = Vec::new();
    for source in sources() {
        for line in source.code() {
            for (word, places) in PLACES {
                if line.contains(word) && !places.iter().any(|p| source.path.starts_with(p)) {
                    broken.push(format!("{}: {}", source.path, line.trim()));
                }
            }
        }
    }
    fail_on("words out of their place", &broken);
}

#[test]
fn files_are_small_described_and_well_named() {
    let mut broken = Vec::new();
    for source in sources() {
        let lines = source.text.lines().count();
        if lines > LONGEST_FILE {
            broken.push(format!("{}: {lines} lines, {LONGEST_FILE} at most", source.path));
        }
        if !source.text.starts_with("//!") {
            broken.push(format!("{}: does not start with //!", source.path));
        }
        for part in source.path.split('/') {
            if DUMPING_GROUNDS.contains(&part.trim_end_matches(".rs")) {
                broken.push(format!("{}: a name that says nothing", source.path));
            }
        }
    }
    let main = sources().into_iter().find(|s| s.path == "main.rs").unwrap();
    if main.text.lines().count() > 60 {
        broken.push("main.rs: more than 60 lines".to_owned());
    }
    fail_on("files", &broken);
}

#[test]
fn the_checks_see_what_they_look_for() {
    assert_eq!(imports("use crate::cni::json::Json;"), ["cni"]);
    assert_eq!(imports("use crate::{cni::ip, error};"), ["cni", "error"]);
    assert_eq!(imports("let x = crate::netns::open(crate::log::Y);"), ["netns", "log"]);
    let all = sources();
    let setns = all.iter().filter(|s| s.code().any(|line| line.contains("setns("))).count();
    assert_eq!(setns, 1);
}
