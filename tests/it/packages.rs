//! The maintainer scripts of the debs: `tests/packages.sh` with stand-ins of the packages, in a
//! root of its own; and the files of the packages for managers of links.

use std::fs;
use std::process::Command;

use cnibox_tests::root;
use serde_json::json;

use crate::support::net::Net;
use crate::support::node::{Container, Node};

/// The exit status of the script without dpkg and apt.
const MISSING: i32 = 77;

#[test]
fn no_call_fails_while_a_deb_replaces_the_reference() {
    let script = root().join("tests/packages.sh");
    let output = Command::new(script).output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    print!("{}", String::from_utf8_lossy(&text));
    match output.status.code() {
        Some(MISSING) => println!("SKIP: no dpkg, no apt-get"),
        code => assert_eq!(code, Some(0)),
    }
}

/// The managers match names with the patterns of a shell.
#[test]
fn managers_of_links_leave_our_links_alone_and_no_others() {
    let read = |name: &str| fs::read_to_string(root().join("packaging/links").join(name)).unwrap();
    let (networkd, manager) = (read("05-cnibox.network"), read("10-cnibox.conf"));
    let words = |text: &str, key: &str, separator: char| -> Vec<String> {
        let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap();
        line.split(separator).map(|word| word.replace("interface-name:", "")).collect()
    };
    let (node, container) = (Node::new(), Container::new());
    let ipam = node.host_local(&["10.1.2.0/24"]);
    let net = Net::new(&node, "bridge", "1.0.0", &json!({"ipam": ipam}));
    let result = net.call("ADD", "c").netns(&container.path()).result();
    let own: Vec<&str> =
        (0..2).map(|at| result["interfaces"][at]["name"].as_str().unwrap()).collect();
    let others = ["eth0", "br0", "docker0", "veth0", "veth1a2b3c4", "vethernet", "cnitap0"];
    for patterns in [words(&networkd, "Name=", ' '), words(&manager, "match-device=", ',')] {
        let case = format!("in {}) echo matches;; esac", patterns.join("|"));
        let matches = |name: &str| node.sh(&format!("case {name} {case}")).contains("matches");
        assert!(own.iter().all(|name| matches(name)), "{own:?} {patterns:?}");
        assert_eq!(others.iter().find(|name| matches(name)), None, "{patterns:?}");
    }
}
