//! Snapshots of a node or a container, which show what a call has left behind.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use crate::support::netlink;
use crate::support::node::Node;

/// Links, addresses, routes, rules, qdiscs, packet filter rules, leases and records at one moment,
/// as comparable text.
#[derive(Debug, PartialEq, Eq, Clone)]
pub(crate) struct Snapshot(BTreeMap<String, String>);

impl Snapshot {
    /// The state of the calling thread's namespace, and the files of the node. A test takes many
    /// snapshots, and a process takes 50 ms under emulation, so most of them start none.
    pub(crate) fn take(node: &Node) -> Snapshot {
        // A lock's file belongs to no attachment, nor does the hint of the last address.
        let is_lease = |path: &str| {
            let name = path.rsplit('/').next().unwrap_or_default();
            !path.contains("/.cnibox/") && name != "lock" && !name.starts_with("last_reserved_ip.")
        };
        let is_record =
            |path: &str| !path.contains("/netns-") && !path.ends_with("/bridge-vlan.lock");
        let rules = if netlink::has_tables() {
            output("nft -s list ruleset").unwrap()
        } else {
            String::new()
        };
        let topics = [
            ("links", netlink::dump(&netlink::LINKS)),
            ("addresses", netlink::dump(&netlink::ADDRESSES)),
            ("routes", netlink::dump(&netlink::ROUTES)),
            ("policy rules", netlink::dump(&netlink::RULES)),
            ("qdisc", if netlink::has_qdiscs() { qdiscs() } else { String::new() }),
            ("leases", files(&node.path("leases"), &is_lease)),
            ("notes", files(Path::new("/run/cni/cnibox"), &is_record)),
            ("rules", without_recorded(&rules)),
        ];
        Snapshot(topics.map(|(topic, text)| (topic.to_owned(), text)).into())
    }

    /// The snapshot with an additional topic that only some tests compare.
    pub(crate) fn with(mut self, topic: &str, text: String) -> Snapshot {
        self.0.insert(topic.to_owned(), text);
        self
    }

    /// The differences, for messages.
    pub(crate) fn difference(&self, other: &Snapshot) -> String {
        let changed = self.0.iter().filter(|(key, value)| other.0.get(*key) != Some(value));
        changed.fold(String::new(), |out, (key, value)| {
            out + &format!("--- {key}\nbefore:\n{value}\nafter:\n{}\n", other.0[key])
        })
    }
}

/// Asserts that nothing changed between two snapshots.
#[track_caller]
pub(crate) fn assert_unchanged(before: &Snapshot, after: &Snapshot) {
    assert!(before == after, "something was left behind:\n{}", before.difference(after));
}

/// The rules without the elements that packets have added to sets, and without their number, which
/// newer nft list.
pub(crate) fn without_recorded(rules: &str) -> String {
    let (mut lines, mut is_filled, mut is_element) = (Vec::new(), false, false);
    for line in rules.lines() {
        is_filled = (is_filled || line.contains("flags dynamic,timeout")) && line.trim() != "}";
        is_element = is_filled && (is_element || line.contains("elements = {"));
        if !is_element {
            lines.push(line.split("\t# count ").next().unwrap());
        }
        is_element = is_element && !line.ends_with('}');
    }
    lines.join("\n")
}

/// The output of a command; the command and its message if it fails.
fn output(command: &str) -> Result<String, String> {
    let mut words = command.split(' ');
    let output = Command::new(words.next().unwrap()).args(words).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    if output.status.success() {
        Ok(text(output.stdout))
    } else {
        Err(format!("{command}: {}", text(output.stderr)))
    }
}

/// The files below a directory for which the function is true, one a line; links and sockets are
/// files.
fn files(root: &Path, is_wanted: &dyn Fn(&str) -> bool) -> String {
    fn walk(dir: &Path, found: &mut Vec<String>) {
        // A record may be removed meanwhile, by a child process of a DEL.
        for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => walk(&entry.path(), found),
                Ok(_) => found.push(entry.path().display().to_string()),
                Err(_) => {}
            }
        }
    }
    let mut found = Vec::new();
    walk(root, &mut found);
    found.retain(|path| is_wanted(path));
    found.sort();
    found.join("\n")
}

/// Traffic control without the kernel's default qdiscs, including ingress filters.
fn qdiscs() -> String {
    let mut attempts = (0..100).filter_map(|_| listed_qdiscs());
    attempts.next().expect("a listed link is never found")
}

/// `None` if a child process of a DEL has deleted a link meanwhile.
fn listed_qdiscs() -> Option<String> {
    let all = output("tc qdisc show").unwrap();
    let mut lines = Vec::new();
    for line in all.lines().filter(|line| !line.contains(" 0: dev ")) {
        let words: Vec<_> = line.split_whitespace().collect();
        let refcnt = words.iter().position(|word| *word == "refcnt").unwrap_or(words.len());
        let is_noise = |at: usize| at == refcnt || at == refcnt + 1 || words[at].starts_with("---");
        let kept = (0..words.len()).filter(|at| !is_noise(*at)).map(|at| words[at]);
        lines.push(kept.collect::<Vec<_>>().join(" "));
        if let ["qdisc", "ingress" | "clsact", _, "dev", dev, ..] = words[..] {
            let filters = match output(&format!("tc filter show dev {dev} ingress")) {
                Err(message) if message.contains("Cannot find device") => return None,
                filters => filters.unwrap(),
            };
            // The kernel numbers the actions of all links.
            let filters = filters.lines().filter(|line| !line.trim_start().starts_with("index "));
            lines.extend(filters.map(|line| {
                let words = line.split_whitespace().collect::<Vec<_>>();
                words.join(" ").replace(" parent ffff:fff1", "").replace(" parent ffff:", "")
            }));
        }
    }
    Some(lines.join("\n"))
}
