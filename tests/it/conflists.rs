//! Configurations of other projects: `cnibox lint` reports real mistakes, and nothing else.
//!
//! `conflists/manifest.json` has the origin of each file, and the findings that are right: keys
//! that no plugin reads, and firewall before version 0.4.0, which the reference also refuses.

use cnibox_tests::root;
use serde_json::Value;

use crate::support::node::{Node, executable};

#[test]
fn lint_accepts_configurations_of_other_projects() {
    let node = Node::new();
    let manifest: Vec<Value> =
        serde_json::from_str(include_str!("conflists/manifest.json")).unwrap();
    let dir = root().join("tests/it/conflists");
    let mut without = 0;
    for entry in &manifest {
        let file = dir.join(entry["file"].as_str().unwrap()).display().to_string();
        let lint = node.tool("cnitool", &["lint", "--offline", &file]).program(executable());
        let outcome = lint.run();
        let expected = entry["findings"].as_array().unwrap();
        if expected.is_empty() {
            without += 1;
            assert_eq!((outcome.status, &*outcome.stdout), (Some(0), "no mistake was found\n"));
            continue;
        }
        assert_eq!(outcome.stdout.lines().count(), expected.len(), "{file}: {}", outcome.stdout);
        for finding in expected {
            assert!(
                outcome.stdout.contains(finding.as_str().unwrap()),
                "{file}: {}",
                outcome.stdout
            );
        }
    }
    assert!(without >= 60, "{without}");
    let files = std::fs::read_dir(&dir).unwrap().count();
    assert_eq!(files, manifest.len() + 1, "a file without an origin");
}
