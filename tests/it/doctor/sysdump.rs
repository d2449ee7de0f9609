//! `cnibox sysdump`: findings and state of a node, bounded in size and without secrets.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use serde_json::{Value, json};

use super::Ward;
use crate::support::node::{Outcome, assert_unchanged};

/// The files of an archive by their paths below its top directory.
fn files(tar: &[u8]) -> BTreeMap<String, String> {
    let mut archive = tar::Archive::new(tar);
    let mut files = BTreeMap::new();
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        let path = entry.path().unwrap().into_owned();
        let root = path.iter().next().unwrap();
        assert!(root.to_str().unwrap().starts_with("cnibox-sysdump-"), "{}", path.display());
        let mut text = String::new();
        entry.read_to_string(&mut text).unwrap();
        let name = path.strip_prefix(root).unwrap().to_str().unwrap().to_owned();
        assert_eq!(files.insert(name, text), None, "{}", path.display());
    }
    files
}

fn dump(ward: &Ward) -> (BTreeMap<String, String>, usize) {
    let file = ward.node.path("dump.tar");
    let said = ward.look(&["sysdump", "-o", file.to_str().unwrap()]).printed();
    assert_eq!(said, format!("{}\n", file.display()));
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let tar = fs::read(&file).unwrap();
    fs::remove_file(file).unwrap();
    (files(&tar), tar.len())
}

/// The objects of `attachments.json`, one per line.
fn attachments(files: &BTreeMap<String, String>) -> Vec<Value> {
    let lines = files["attachments.json"].lines();
    lines.map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn sysdump_contains_state_logs_and_configurations() {
    let ward = Ward::new();
    let foreign =
        json!([{"type": "theirs", "password": "hunter2", "url": "http://me:hunter2@host"}]);
    ward.write("20-theirs.conflist", "theirs", &foreign);
    fs::write(ward.node.path("net.d/30-broken.conf"), r#"{"password": "hunter2",}"#).unwrap();
    ward.pods[1].sh("ip link set eth0 down");
    let cached = ward.node.path("cache/results/pods-pod1-eth0");
    let (args, text) = ("\"capabilityArgs\":{", fs::read_to_string(&cached).unwrap());
    assert!(text.contains(args), "{text}");
    fs::write(
        &cached,
        text.replace(args, &format!("{args}\"vault\":{{\"password\":\"hunter2\"}},")),
    )
    .unwrap();
    ward.node.call("bridge", "ADD").conf(&json!({"name": "x", "cniVersion": "9"})).error();
    let before = ward.node.snapshot();
    let (files, size) = dump(&ward);
    assert_unchanged(&before, &ward.node.snapshot());
    assert!(size < 1_000_000, "{size} bytes");
    for (name, text) in &files {
        assert!(!text.contains("hunter2"), "{name}: {text}");
    }
    let doctor: Vec<Value> = serde_json::from_str(&files["doctor.json"]).unwrap();
    assert!(
        doctor.iter().any(|found| found["problem"] == "interface \"eth0\" is down"),
        "{doctor:?}"
    );
    let theirs: Value = serde_json::from_str(&files["net.d/20-theirs.conflist"]).unwrap();
    assert_eq!(theirs["plugins"][0]["password"], "(left out)");
    let attached = attachments(&files);
    let ids: Vec<_> = attached.iter().map(|object| &object["container"]).collect();
    assert_eq!(ids, ["pod1", "pod0"], "the one with something wrong is first");
    assert_eq!(attached[0]["alive"], "yes");
    assert_eq!(attached[0]["capabilityArgs"]["portMappings"][0]["hostPort"], 8081);
    assert_eq!(attached[0]["result"]["ips"][0]["address"], "10.88.0.3/16");
    assert_eq!(attached[1]["config"]["plugins"][0]["bridge"], "cni0");
    let containers = &files["containers.txt"];
    assert!(
        containers.contains("container pod1") && !containers.contains("container pod0"),
        "{containers}"
    );
    assert!(containers.contains("fd00:88::3/64"), "its addresses: {containers}");
    let leases: Vec<Value> = serde_json::from_str(&files["leases.json"]).unwrap();
    assert_eq!(leases.len(), 4);
    let records: Vec<Value> = serde_json::from_str(&files["records.json"]).unwrap();
    assert!(records.iter().any(|record| record["id"] == "pod0"), "{records:?}");
    for (name, part) in [
        ("failed.jsonl", "\"name\":\"bridge ADD\""),
        ("README.txt", "net.d/30-broken.conf: "),
        ("filter/nft-ruleset.txt", "table inet cnibox_portmap"),
        ("directories.txt", "bin/bridge"),
        ("directories.txt", "results/pods-pod1-eth0"),
        ("network/addresses.txt", "10.88.0.1/16"),
        ("network/links.txt", "cni0"),
        ("network/routes.txt", "10.88.0.0/16 dev cni0"),
        ("sysctl.txt", "net.ipv4.ip_forward = 1\n"),
        ("version.txt", "cnibox "),
        ("version.txt", "Linux version "),
    ] {
        assert!(files[name].contains(part), "{name}: {}", files[name]);
    }
}

#[test]
fn sysdump_is_bounded_and_lists_what_is_missing() {
    let ward = Ward::new();
    let cached = ward.node.path("cache/results/pods-pod0-eth0");
    let mut cached: Value = serde_json::from_slice(&fs::read(cached).unwrap()).unwrap();
    for i in 0..400 {
        cached["containerId"] = json!(format!("more{i}"));
        let file = ward.node.path(&format!("cache/results/pods-more{i}-eth0"));
        fs::write(file, cached.to_string()).unwrap();
        let network = json!([{"type": "theirs", "more": "x".repeat(8000)}]);
        ward.write(&format!("50-{i}.conflist"), &format!("net{i}"), &network);
    }
    let (files, size) = dump(&ward);
    assert!((500_000..1_000_000).contains(&size), "{size} bytes");
    let about = &files["README.txt"];
    assert!(about.contains("\n  attachments.json: ") && about.contains("\n  net.d/50-"), "{about}");
    assert!(!attachments(&files).is_empty(), "whole lines are left");
}

#[test]
fn sysdump_does_not_overwrite_files_of_others() {
    let ward = Ward::empty();
    let [file, link] = ["file", "link"].map(|name| ward.node.path(name));
    fs::write(&file, "theirs").unwrap();
    symlink(&file, &link).unwrap();
    for path in [&file, &link] {
        let Outcome { status, stderr, .. } =
            ward.look(&["sysdump", "--output", path.to_str().unwrap()]).run();
        assert_eq!(status, Some(1), "{stderr}");
        let expected = format!("cnibox sysdump: write {}: file exists\n", path.display());
        assert_eq!(stderr, expected);
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "theirs");
    assert!(!Path::new("dump.tar").exists());
}
