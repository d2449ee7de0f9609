//! The layers of docs/architecture.md, checked on the source text.
//!
//! A module imports only from the modules that its layer permits; certain words (`setns`, `fs2`,
//! `Command`, `/proc/sys`) are confined to one place each. Comments are ignored, so that
//! documentation may name anything.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;

use cnibox_tests::root;

/// The modules of cnibox that each module may import besides itself and `stderr`.
const LAYERS: &[(&str, &[&str])] = &[
    ("stderr", &[]),
    ("secrets", &[]),
    ("lane", &[]),
    ("options", &[]),
    ("repairs", &[]),
    ("netns", &[]),
    ("sysctl", &["netns"]),
    ("trace", &[]),
    ("cmd", &["netns", "trace"]),
    ("confine", &[]),
    ("daemon", &[]),
    ("netlink", &["netns", "trace"]),
    ("files", &["netns", "trace"]),
    ("attachment", &["files", "netlink", "netns", "sysctl"]),
    ("leases", &["attachment", "files"]),
    ("invoke", &["netns", "trace"]),
    ("iface", &["cmd", "netlink", "netns", "repairs", "sysctl"]),
    ("netfilter", &["attachment", "cmd", "netlink", "netns", "files", "leases", "sysctl"]),
    (
        "framework",
        &[
            "attachment",
            "netlink",
            "netns",
            "iface",
            "invoke",
            "netfilter",
            "leases",
            "options",
            "files",
            "repairs",
            "secrets",
            "trace",
        ],
    ),
    ("devices", &["attachment", "files", "framework", "iface", "netlink", "netns"]),
    (
        "plugins",
        &[
            "attachment",
            "cmd",
            "devices",
            "netlink",
            "netns",
            "sysctl",
            "iface",
            "netfilter",
            "options",
            "repairs",
            "framework",
            "files",
            "leases",
        ],
    ),
    (
        "dhcp",
        &[
            "attachment",
            "cmd",
            "confine",
            "daemon",
            "netlink",
            "netns",
            "sysctl",
            "iface",
            "netfilter",
            "options",
            "repairs",
            "framework",
            "files",
            "leases",
        ],
    ),
    (
        "resolver",
        &[
            "attachment",
            "confine",
            "daemon",
            "files",
            "framework",
            "iface",
            "netfilter",
            "netlink",
            "options",
        ],
    ),
    (
        "tool",
        &[
            "attachment",
            "cmd",
            "devices",
            "iface",
            "invoke",
            "netfilter",
            "netlink",
            "netns",
            "options",
            "repairs",
            "resolver",
            "secrets",
            "framework",
            "files",
            "leases",
            "netlink",
            "sysctl",
        ],
    ),
    ("applets", &["dhcp", "plugins", "framework", "tool"]),
    ("memcpy", &[]),
    ("musl", &["memcpy"]),
    ("start", &["applets", "framework", "tool"]),
    (
        "testing",
        &[
            "applets",
            "attachment",
            "dhcp",
            "iface",
            "netfilter",
            "netlink",
            "netns",
            "options",
            "plugins",
            "framework",
            "files",
            "leases",
            "resolver",
            "tool",
        ],
    ),
];

/// The modules of the library in `crates/cni` that each of its modules may import besides itself
/// and `error`.
const LIBRARY_LAYERS: &[(&str, &[&str])] = &[
    ("error", &[]),
    ("sort", &[]),
    ("files", &[]),
    ("json", &["sort"]),
    ("ip", &["json"]),
    ("names", &[]),
    ("args", &["ip"]),
    ("version", &["json"]),
    ("wire", &["json", "version"]),
    ("result", &["ip", "json", "sort", "version"]),
    ("config", &["json", "names", "result", "version"]),
    ("exec", &["json", "names", "result", "version", "wire"]),
    ("runtime", &["config", "exec", "files", "json", "names", "result", "sort", "version"]),
    ("plugin", &["args", "config", "exec", "json", "names", "result", "version", "wire"]),
];

/// The files with unsafe code.
const UNSAFE: &[&str] = &[
    "confine/seccomp.rs",
    "iface/tun.rs",
    "main.rs",
    "memcpy.rs",
    "musl.rs",
    "netlink/deferred_close.rs",
    "netlink/detached_delete.rs",
    "netlink/offload.rs",
];

/// Words, and the only files or directories below `src` that may contain them.
const PLACES: &[(&str, &[&str])] = &[
    ("setns(", &["netns.rs"]),
    ("unshare(", &["lane.rs", "netns.rs"]),
    ("fs2::", &["files/lock.rs"]),
    ("IPTables", &["netfilter/iptables/mod.rs"]),
    ("-restore\"", &["netfilter/iptables/"]),
    ("rtnetlink", &["netlink/"]),
    ("netlink_packet", &["netlink/"]),
    ("tokio", &["daemon.rs", "dhcp/daemon/", "resolver/"]),
    ("socket2", &["dhcp/", "resolver/"]),
    ("listenfd", &["dhcp/daemon/", "resolver/"]),
    ("sock_filter", &["confine/seccomp.rs"]),
    ("process::Command", &["cmd/mod.rs", "lane.rs"]),
    ("process::{Child, Command", &["cmd/mod.rs", "lane.rs"]),
    ("/proc/sys", &["sysctl.rs"]),
    ("/sys/class/net", &[]),
    ("io::stdout", &["start.rs", "tool/", "dhcp/daemon/"]),
    ("println!", &[]),
    ("unsafe ", UNSAFE),
    ("unsafe_code", UNSAFE),
    ("fork()", &["netlink/detached_delete.rs"]),
    ("io_uring", &["netlink/deferred_close.rs", "confine/mod.rs"]),
    ("thread::sleep", &["netfilter/watch.rs", "tool/snapshot.rs"]),
    // Files are read by `cni::files`, which is bounded and opens nothing but regular files.
    // Excepted are the kernel's files where `files` is out of reach, and descriptors of
    // namespaces, directories and devices.
    ("fs::read(", &["cmd/mod.rs", "files/lock.rs", "netns/"]),
    ("fs::read_to_string(", &["files/lock.rs", "netns/"]),
    ("fs::copy(", &["tool/install/files.rs"]),
    ("read_to_end(", &["sysctl.rs"]),
    ("read_to_string(", &["files/lock.rs", "leases/journal.rs", "netns/"]),
    ("File::open", &["files/", "leases/journal.rs", "tool/install/files.rs"]),
    (
        "OpenOptions",
        &[
            "files/dir.rs",
            "iface/tun.rs",
            "lane.rs",
            "tool/install/files.rs",
            "tool/sysdump/mod.rs",
        ],
    ),
];

/// As [`PLACES`], below `crates/cni/src`.
const LIBRARY_PLACES: &[(&str, &[&str])] = &[
    ("process::Command", &["exec/process.rs"]),
    ("process::{Child, Command", &["exec/process.rs", "exec/pump.rs"]),
    ("io::stdin", &["plugin/process.rs"]),
    ("io::stdout", &["plugin/process.rs"]),
    ("println!", &[]),
    ("unsafe", &[]),
    ("thread::sleep", &["exec/process.rs"]),
    ("fs::read(", &[]),
    ("fs::read_to_string(", &[]),
    ("read_to_end(", &["files/read.rs", "plugin/process.rs"]),
    ("File::open", &["files/mod.rs"]),
    ("OpenOptions", &[]),
];

/// Module names that describe no purpose.
const DUMPING_GROUNDS: [&str; 6] = ["util", "utils", "common", "helper", "helpers", "misc"];

const LONGEST_FILE: usize = 560;

const LONGEST_TEST_NAME: usize = 60;

/// The names of the modules from the crate root down.
type ModulePath = Vec<String>;

struct Source {
    /// The path below `src`.
    path: String,
    text: String,
}

impl Source {
    /// The modules that lead to this file, outermost first.
    fn modules(&self) -> Vec<String> {
        let parts = self.path.trim_end_matches(".rs").split('/');
        parts.filter(|part| *part != "mod").map(str::to_owned).collect()
    }

    /// The lines of code, without comments and tests.
    fn code(&self) -> impl Iterator<Item = &str> {
        let tests = self.path.split('/').any(|part| part == "tests" || part == "tests.rs");
        let mut skipping = None;
        let lines = self.text.lines().filter(|line| !line.trim_start().starts_with("//"));
        lines.filter(move |line| !tests && !belongs_to_tests(line, &mut skipping))
    }

    /// The modules and items that this file imports or names, from the crate root down.
    fn imports(&self) -> Vec<Vec<String>> {
        let code = self.code().collect::<Vec<_>>().join("\n");
        let resolve = |path: Vec<String>| {
            let ups = path.iter().take_while(|step| *step == "super").count();
            let modules = self.modules();
            let from = if ups == 0 { &[] } else { &modules[..modules.len().saturating_sub(ups)] };
            let rest = path.into_iter().skip_while(|step| ["super", "crate"].contains(&&**step));
            from.iter().cloned().chain(rest).collect()
        };
        paths(&code).into_iter().map(resolve).collect()
    }
}

impl Source {
    /// The items of child modules that this file re-exports: module and item name, with the child.
    fn reexports(&self, all: &BTreeSet<ModulePath>) -> Vec<((ModulePath, String), ModulePath)> {
        let own = self.modules();
        let code = self.code().collect::<Vec<_>>().join("\n");
        let mut paths = Vec::new();
        for (at, word) in code.match_indices("use ") {
            let text = code[at + word.len()..].trim_start_matches("self::");
            branches(text, &mut Vec::new(), &mut paths);
        }
        let child = |path: &Vec<String>| [&own[..], &path[..1]].concat();
        let named = paths.iter().filter(|path| !path.is_empty() && all.contains(&child(path)));
        named.map(|path| ((own.clone(), path[path.len() - 1].clone()), child(path))).collect()
    }
}

impl Source {
    /// The top-level constants and functions of this file, each with the words of its definition.
    /// In rustfmt's layout, an item ends on its first line, or with the next line that starts
    /// with a closing bracket.
    fn items(&self) -> BTreeMap<String, BTreeSet<String>> {
        let mut items = BTreeMap::new();
        let mut lines = self.code();
        while let Some(first) = lines.next() {
            let mut start = first.split(|c: char| !c.is_alphanumeric() && c != '_');
            let is_kind = |word: &&str| ["static", "const", "fn", "type"].contains(word);
            if first.starts_with(' ') || start.by_ref().find(is_kind).is_none() {
                continue;
            }
            let Some(name) = start.find(|word| *word != "fn") else { continue };
            let mut text = first.to_owned();
            while !text.ends_with([';', '}']) || text.lines().next_back().unwrap().starts_with(' ')
            {
                let Some(line) = lines.next() else { break };
                text = format!("{text}\n{line}");
            }
            // A word behind a single dot is a method or a field.
            let words = text.replace("..", " ").replace('.', " .");
            let words = words.split(|c: char| !c.is_alphanumeric() && !['_', '.'].contains(&c));
            items.insert(name.to_owned(), words.map(str::to_owned).collect());
        }
        items
    }

    /// The child modules that the definition of an item of this file names, by itself or through
    /// other items of the file.
    fn named_by(
        &self,
        item: &str,
        all: &BTreeSet<ModulePath>,
        reexports: &BTreeMap<(ModulePath, String), ModulePath>,
    ) -> BTreeSet<ModulePath> {
        let (own, items) = (self.modules(), self.items());
        let (mut open, mut seen) = (vec![item.to_owned()], BTreeSet::new());
        let mut named = BTreeSet::new();
        while let Some(word) = open.pop() {
            let child = [&own[..], std::slice::from_ref(&word)].concat();
            if let Some(words) = items.get(&word).filter(|_| seen.insert(word.clone())) {
                open.extend(words.iter().cloned());
            } else if all.contains(&child) {
                named.insert(child);
            } else {
                named.extend(reexports.get(&(own.clone(), word)).cloned());
            }
        }
        named
    }
}

/// Whether the line belongs to the item behind a `#[cfg(test)]`; `inside` holds the item's
/// indentation and whether its first line has been seen. In rustfmt's layout, the item ends on its
/// first line or with a line of the same indentation that starts with a closing bracket.
fn belongs_to_tests(line: &str, inside: &mut Option<(usize, bool)>) -> bool {
    let text = line.trim();
    let depth = line.len() - line.trim_start().len();
    let Some((indent, begun)) = *inside else {
        *inside = (text == "#[cfg(test)]").then_some((depth, false));
        return inside.is_some();
    };
    if !begun && text.starts_with("#[") {
        return true;
    }
    let closes = !begun || (depth == indent && text.starts_with(['}', ']', ')']));
    *inside = (!closes || !text.ends_with([';', '}'])).then_some((indent, true));
    true
}

/// Every path that starts with `crate` or `super`; groups in braces are expanded.
fn paths(code: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for start in ["crate::", "super::"] {
        for (at, _) in code.match_indices(start) {
            let before = code[..at].chars().next_back().unwrap_or(' ');
            if !before.is_alphanumeric() && before != '_' && before != ':' {
                branches(&code[at..], &mut Vec::new(), &mut found);
            }
        }
    }
    found
}

/// Adds the paths at the start of `text`, prefixed with `stem`; returns the text behind them.
fn branches<'t>(text: &'t str, stem: &mut Vec<String>, found: &mut Vec<Vec<String>>) -> &'t str {
    let text = text.trim_start();
    if let Some(mut rest) = text.strip_prefix('{') {
        loop {
            rest = branches(rest, stem, found).trim_start();
            match rest.strip_prefix(',') {
                Some(next) => rest = next,
                None => return rest.strip_prefix('}').unwrap_or(rest),
            }
        }
    }
    let name = word(text);
    if name.is_empty() {
        // The end of a group, or a glob.
        found.extend(text.starts_with('*').then(|| stem.clone()));
        return text.trim_start_matches('*');
    }
    let mut rest = &text[name.len()..];
    stem.push(name);
    match rest.strip_prefix("::") {
        Some(below) => rest = branches(below, stem, found),
        None => found.push(stem.clone()),
    }
    stem.pop();
    // `a as b`
    rest.find([',', '}']).filter(|_| rest.starts_with(" as ")).map_or(rest, |end| &rest[end..])
}

/// The source of the conformance suite, a separate crate.
const SUITE: &str = "crates/cni-sanity/src";

/// The source of the library for runtimes and plugins, a separate crate.
const LIBRARY: &str = "crates/cni/src";

/// cnibox.
fn sources() -> Vec<Source> {
    sources_of("src")
}

/// The Rust files below a directory of the repository.
fn sources_of(directory: &str) -> Vec<Source> {
    let root = root().join(directory);
    let mut found = Vec::new();
    let mut directories = vec![root.clone()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path: PathBuf = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                let path = path.strip_prefix(&root).unwrap().display().to_string();
                found.push(Source { path, text });
            }
        }
    }
    assert!(found.len() > 20, "the source was not found");
    found
}

fn fail_on(what: &str, broken: &[String]) {
    assert!(broken.is_empty(), "{what}:\n  {}", broken.join("\n  "));
}

/// The identifier at the start of `text`.
fn word(text: &str) -> String {
    let text = text.trim_start();
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// A file's imports that its layer does not permit. `free` may be imported by all.
fn upward(source: &Source, layers: &[(&str, &[&str])], free: &str) -> Vec<String> {
    let modules = source.modules();
    let module = modules[0].as_str();
    if matches!(module, "lib" | "main") {
        return Vec::new();
    }
    let Some((_, allowed)) = layers.iter().find(|(name, _)| *name == module) else {
        return vec![format!("{}: {module} has no layer; add it to LAYERS", source.path)];
    };
    let imports = source.imports().into_iter().filter_map(|path| path.into_iter().next());
    let broken = imports
        .filter(|import| ![module, free].contains(&&**import) && !allowed.contains(&&**import));
    broken.map(|import| format!("{}: {module} imports {import}", source.path)).collect()
}

/// A plugin's imports from other plugins.
fn sideways(source: &Source) -> Vec<String> {
    let modules = source.modules();
    let [layer, own, ..] = &modules[..] else { return Vec::new() };
    if layer != "plugins" {
        return Vec::new();
    }
    let others = source.imports().into_iter().filter_map(|path| match &path[..] {
        [layer, other, ..] if layer == "plugins" && other != own => Some(other.clone()),
        _ => None,
    });
    others.map(|other| format!("{}: {own} imports {other}", source.path)).collect()
}

/// Lines with words that are confined to other files.
fn misplaced(source: &Source, places: &[(&str, &[&str])]) -> Vec<String> {
    let is_out = |line: &&str| {
        let mut words = places.iter().filter(|(word, _)| line.contains(word));
        words.any(|(_, places)| !places.iter().any(|place| source.path.starts_with(place)))
    };
    source.code().filter(is_out).map(|line| format!("{}: {}", source.path, line.trim())).collect()
}

/// Import cycles among sibling modules, per parent module.
fn rings(sources: &[Source]) -> Vec<String> {
    let modules: BTreeSet<Vec<String>> = sources.iter().map(Source::modules).collect();
    let reexports: BTreeMap<_, _> = sources.iter().flat_map(|s| s.reexports(&modules)).collect();
    // Edges by parent module: importing child, imported child.
    let mut edges: BTreeMap<Vec<String>, BTreeSet<(String, String)>> = BTreeMap::new();
    for source in sources {
        let from = source.modules();
        for path in source.imports() {
            let deepest = (1..=path.len()).rev().find(|n| modules.contains(&path[..*n]));
            let Some(module) = deepest.map(|n| path[..n].to_vec()) else { continue };
            let name = path.get(module.len()).cloned().unwrap_or_default();
            // What an item of the directory's own file names, its importer depends on as well.
            if let Some(child) = from.strip_prefix(&module[..]).and_then(<[_]>::first)
                && let Some(parent) = sources.iter().find(|source| source.modules() == module)
            {
                for other in parent.named_by(&name, &modules, &reexports) {
                    let edge = (child.clone(), other[module.len()].clone());
                    edges.entry(module.clone()).or_default().insert(edge);
                }
            }
            let to = reexports.get(&(module.clone(), name)).unwrap_or(&module);
            let shared = from.iter().zip(to).take_while(|(a, b)| a == b).count();
            if let (Some(child), Some(other)) = (from.get(shared), to.get(shared)) {
                let edge = (child.clone(), other.clone());
                edges.entry(from[..shared].to_vec()).or_default().insert(edge);
            }
        }
    }
    let mut found = Vec::new();
    for (directory, mut edges) in edges {
        loop {
            let goes_on = |(from, to): &(String, String)| {
                edges.iter().any(|edge| edge.0 == *to) && edges.iter().any(|edge| edge.1 == *from)
            };
            let left: BTreeSet<_> = edges.iter().filter(|edge| goes_on(edge)).cloned().collect();
            if left.len() == edges.len() {
                break;
            }
            edges = left;
        }
        let directory = directory.join("/");
        found.extend(edges.iter().map(|(from, to)| format!("{directory}: {from} imports {to}")));
    }
    found
}

fn all_broken(directory: &str, check: impl Fn(&Source) -> Vec<String>) -> Vec<String> {
    sources_of(directory).iter().flat_map(check).collect()
}

#[test]
fn imports_go_down_only() {
    fail_on(
        "modules that import from above",
        &all_broken("src", |source| upward(source, LAYERS, "stderr")),
    );
    fail_on(
        "of the library",
        &all_broken(LIBRARY, |source| upward(source, LIBRARY_LAYERS, "error")),
    );
}

#[test]
fn files_of_a_directory_have_no_import_cycles() {
    fail_on("rings", &rings(&sources()));
    fail_on("rings of the library", &rings(&sources_of(LIBRARY)));
    fail_on("rings of the suite", &rings(&sources_of(SUITE)));
}

#[test]
fn import_cycles_are_found_through_a_list_of_names() {
    let source = |path: &str, text: &str| Source { path: path.to_owned(), text: text.to_owned() };
    let all = [
        source("a/mod.rs", "mod b;\nmod c;\npub use self::b::{B, X};\n"),
        source("a/b.rs", "use super::c::C;\n"),
        source("a/c.rs", "use super::B;\n"),
        source("a/d.rs", "use super::c::C;\n"),
    ];
    assert_eq!(rings(&all), ["a: b imports c", "a: c imports b"]);
    assert!(rings(&all[..2]).is_empty());
}

#[test]
fn import_cycles_are_found_through_an_item_of_mod_rs() {
    let source = |path: &str, text: &str| Source { path: path.to_owned(), text: text.to_owned() };
    let mut all = [
        source(
            "a/mod.rs",
            "mod b;\nmod c;\nconst ALL: &[X] = &[\n    c::X,\n];\nconst ONE: u8 = one.ALL();\n",
        ),
        source("a/b/mod.rs", "mod d;\n"),
        source("a/b/d.rs", "use crate::a::{ALL, ONE};\n"),
        source("a/c.rs", "use super::b::B;\n"),
    ];
    assert_eq!(rings(&all), ["a: b imports c", "a: c imports b"]);
    all[2].text = "use crate::a::ONE;\n".to_owned();
    assert!(rings(&all).is_empty());
}

/// The suite's verdict on this project's plugins must be independent of their code.
#[test]
fn the_conformance_suite_uses_nothing_of_the_library() {
    let manifest = fs::read_to_string(root().join("crates/cni-sanity/Cargo.toml")).unwrap();
    let mut dependencies = manifest.lines().skip_while(|line| *line != "[dependencies]");
    assert!(dependencies.next().is_some(), "{manifest}");
    let is_own = |line: &&str| line.starts_with("cnibox") || line.contains("path =");
    let broken: Vec<String> = dependencies.filter(is_own).map(str::to_owned).collect();
    fail_on("dependencies on this repository", &broken);
    let leaves = |source: &&Source| source.text.contains("#[path");
    let broken =
        sources_of(SUITE).iter().filter(leaves).map(|it| it.path.clone()).collect::<Vec<_>>();
    fail_on("files that include others", &broken);
}

#[test]
fn plugins_do_not_import_each_other() {
    fail_on("plugins that import plugins", &all_broken("src", sideways));
}

#[test]
fn restricted_words_are_used_in_one_place_only() {
    fail_on("words out of their place", &all_broken("src", |source| misplaced(source, PLACES)));
    fail_on("of the library", &all_broken(LIBRARY, |source| misplaced(source, LIBRARY_PLACES)));
}

#[test]
fn files_are_small_described_and_well_named() {
    let mut broken = Vec::new();
    for source in ["src", LIBRARY, SUITE].into_iter().flat_map(sources_of) {
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
fn names_of_tests_are_short() {
    let mut broken = Vec::new();
    for source in ["src", LIBRARY, SUITE, "tests"].into_iter().flat_map(sources_of) {
        let mut lines = source.text.lines().map(str::trim);
        while lines.by_ref().any(|line| line == "#[test]") {
            let is_function = |line: &&str| line.starts_with("fn ");
            let Some(name) = lines.by_ref().find(is_function) else { break };
            let name = name.trim_start_matches("fn ").split('(').next().unwrap();
            if name.len() > LONGEST_TEST_NAME {
                broken.push(format!("{}: {name}", source.path));
            }
        }
    }
    fail_on("names of tests over 60 characters", &broken);
}

#[test]
fn the_map_of_integration_tests_lists_every_module() {
    let read = |path: &str| fs::read_to_string(root().join("tests/it").join(path)).unwrap();
    let (main, support) = (read("main.rs"), read("support.rs"));
    let mapped: BTreeSet<String> = main
        .lines()
        .filter_map(|line| line.strip_prefix("//! | ")?.split(" | ").next())
        .flat_map(|cell| cell.split(", "))
        .filter_map(|name| Some(name.strip_prefix('`')?.strip_suffix('`')?.to_owned()))
        .collect();
    let modules = |text: &str, prefix: &str| {
        let name = |line: &str| Some(line.split_once("mod ")?.1.strip_suffix(';')?.to_owned());
        let code = text.lines().filter(|line| !line.starts_with("//")).filter_map(name);
        code.map(|name| format!("{prefix}{name}")).collect::<BTreeSet<_>>()
    };
    let mut all = modules(&main, "");
    assert!(all.remove("support"));
    all.append(&mut modules(&support, "support::"));
    assert_eq!(mapped, all);
}

#[test]
fn imported_paths_are_resolved() {
    let imports = |path: &str, text: &str| {
        let imports = Source { path: path.to_owned(), text: text.to_owned() }.imports();
        imports.into_iter().map(|path| path.join("::")).collect::<Vec<_>>()
    };
    assert_eq!(imports("a.rs", "use crate::cni::json::Json;"), ["cni::json::Json"]);
    let list = "use crate::{\n    cni::{ip, x as y},\n    error,\n};";
    assert_eq!(imports("a.rs", list), ["cni::ip", "cni::x", "error"]);
    let two = "let x = crate::netns::open(crate::log::Y);";
    assert_eq!(imports("a.rs", two), ["netns::open", "log::Y"]);
    assert_eq!(imports("a/b.rs", "use super::{c, d::E};"), ["a::c", "a::d::E"]);
    assert_eq!(imports("a/mod.rs", "super::d::e(); xsuper::f()"), ["d::e"]);
    assert_eq!(imports("a/b/c.rs", "use super::super::super::d;"), ["d"]);
}

/// Regression test: the checks once missed code behind the tests' module, and paths with `super`.
#[test]
fn planted_violations_are_found() {
    let upward = |source: &Source| upward(source, LAYERS, "stderr");
    let misplaced = |source: &Source| misplaced(source, PLACES);
    for header in [
        "//! x\n#[cfg(test)]\nmod tests;\n",
        "//! x\n#[cfg(test)]\n#[path = \"y\"]\nmod tests;\n",
        "//! x\n#[cfg(test)]\nuse a::{\n    b,\n};\n",
        "//! x\n#[cfg(test)]\nmod tests {\n    fn f(\n        x: u8,\n    ) {\n    }\n}\n",
        "//! x\nimpl X {\n    #[cfg(test)]\n    fn f() {\n        g();\n    }\n}\n",
    ] {
        let found = |check: &dyn Fn(&Source) -> Vec<String>, path: &str, planted: &str| {
            let text = format!("{header}fn planted() {{\n    {planted}\n}}\n");
            !check(&Source { path: path.to_owned(), text }).is_empty()
        };
        assert!(found(&upward, "leases/mod.rs", "use crate::plugins::bridge;"), "{header}");
        assert!(found(&misplaced, "leases/mod.rs", "std::process::Command::new(x);"), "{header}");
        assert!(found(&misplaced, "leases/mod.rs", "read(\"/proc/sys/x\");"), "{header}");
        assert!(found(&misplaced, "leases/mod.rs", "println!();"), "{header}");
        assert!(found(&misplaced, "plugins/x.rs", "let text = fs::read(path)?;"), "{header}");
        assert!(found(&upward, "netlink/route.rs", "use super::super::plugins::ptp;"), "{header}");
        assert!(found(&sideways, "plugins/ptp.rs", "use super::bridge::Bridge;"), "{header}");
        assert!(!found(&upward, "leases/store.rs", "use super::lock::*;"), "{header}");
    }
    let hidden = "//! x\n#[cfg(test)]\nmod tests {\n    println!();\n}\n".to_owned();
    assert_eq!(misplaced(&Source { path: "leases/mod.rs".to_owned(), text: hidden }), [""; 0]);
    let all = sources();
    let setns = all.iter().filter(|s| s.code().any(|line| line.contains("setns("))).count();
    assert_eq!(setns, 1);
}
