//! Normalisation and comparison of the results of different runs.

use crate::support::node::{Container, Node, exists};

/// The directory of the reference plugins: `$PEER`, or the directory of Debian's package
/// containernetworking-plugins. Without it this prints a skip notice and returns `None`, or fails
/// if `CNIBOX_TEST_STRICT=1`.
pub(crate) fn peer(test: &str) -> Option<std::path::PathBuf> {
    let dir = std::env::var_os("PEER").unwrap_or_else(|| "/usr/lib/cni".into());
    let dir = std::path::PathBuf::from(dir);
    if ["bridge", "host-local", "loopback", "ptp"].iter().all(|name| exists(dir.join(name))) {
        return Some(dir);
    }
    let strict = std::env::var("CNIBOX_TEST_STRICT").is_ok_and(|value| value == "1");
    let dir = dir.display();
    assert!(!strict, "{test}: no reference plugins in {dir} (CNIBOX_TEST_STRICT=1)");
    println!("SKIP {test}: no reference plugins in {dir}; install containernetworking-plugins");
    None
}

/// Whether a DEL of the reference has failed, in its last step, because its rules of iptables were
/// gone. With iptables 1.8.13 it fails so after an ADD with nftables of its own, too.
pub(crate) fn lacks_masquerading(error: &str) -> bool {
    error.contains("-t nat -D POSTROUTING") && error.contains("does not exist")
}

/// Replaces the paths of node and container, MACs and random names in `text`.
pub(crate) fn normal(text: &str, node: &Node, container: &Container) -> String {
    let text = text.replace(&container.path(), "NETNS");
    let text = text.replace(&node.path("").display().to_string(), "NODE/");
    let mut out = String::new();
    let mut word = String::new();
    for c in text.chars().chain(['\0']) {
        if c.is_ascii_alphanumeric() || c == ':' {
            word.push(c);
            continue;
        }
        out.push_str(if is_mac(&word) {
            "MAC"
        } else if is_veth(&word) {
            "VETH"
        } else {
            &word
        });
        word.clear();
        out.push(c);
    }
    out.pop();
    out
}

fn is_mac(word: &str) -> bool {
    let hex = |part: &str| part.len() == 2 && part.bytes().all(|b| b.is_ascii_hexdigit());
    word.len() == 17 && word.split(':').all(hex)
}

fn is_veth(word: &str) -> bool {
    let digits = word.strip_prefix("veth");
    digits.is_some_and(|d| d.len() == 8 && d.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Panics with the differing lines of two texts.
#[track_caller]
pub(crate) fn assert_same(what: &str, left: &str, right: &str) {
    if left == right {
        return;
    }
    let (l, r): (Vec<_>, Vec<_>) = (left.lines().collect(), right.lines().collect());
    let only = |a: &[&str], b: &[&str]| -> String {
        let only: Vec<&str> = a.iter().filter(|line| !b.contains(line)).copied().collect();
        only.join("\n  ")
    };
    panic!(
        "{what}\nonly left:\n  {}\nonly right:\n  {}\nleft:\n{left}",
        only(&l, &r),
        only(&r, &l)
    );
}
