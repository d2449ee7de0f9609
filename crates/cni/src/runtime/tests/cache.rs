//! The files of the cache: the reference's format, damaged files, interrupted writers.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use std::{env, fs, thread};

use super::{Node, answer, attach, list, members};
use crate::exec::{PluginCommand, execute_plugin};
use crate::files::atomic::{AtomicWriter, Durability};
use crate::runtime::{AttachmentParams, NetworkList};

fn network() -> NetworkList {
    named("net")
}

fn named(name: &str) -> NetworkList {
    list(&format!(r#"{{"name":"{name}","cniVersion":"1.0.0","plugins":[{{"type":"a"}}]}}"#))
}

fn node() -> Node {
    let node = Node::new();
    node.plugin("a", &answer("1.0.0", "10.0.0.1/24"));
    node
}

/// A file as a program built on libcni writes it; the configuration is
/// `{"cniVersion":"1.0.0",...}`.
const REFERENCE: &str = concat!(
    r#"{"kind":"cniCacheV1","containerId":"c1","#,
    r#""config":"eyJuYW1lIjoibmV0IiwiY25pVmVyc2lvbiI6IjEuMC4wIiwicGx1Z2lucyI6W3sidHlwZSI6ImEifV19","#,
    r#""ifName":"eth0","networkName":"net","netns":"/run/netns/x","#,
    r#""cniArgs":[["IP","10.0.0.9"],["IgnoreUnknown","1"]],"#,
    r#""capabilityArgs":{"mac":"02::","z":{"b":1}},"#,
    r#""result":{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.1/24"}]}}"#
);

fn reference_attach() -> AttachmentParams {
    let mut attach = attach();
    attach.args.push(("IgnoreUnknown".to_owned(), "1".to_owned()));
    attach.capability_args = members(r#"{"z":{"b":1},"mac":"02::"}"#);
    attach
}

#[test]
fn cache_files_equal_the_references_byte_for_byte() {
    let node = node();
    node.runtime.add(&network(), &reference_attach()).unwrap();
    let file = fs::read_to_string(node.path("cache/results/net-c1-eth0")).unwrap();
    assert_eq!(file, REFERENCE);
    let bare = AttachmentParams::new("c1", "", "eth1");
    node.runtime.add(&network(), &bare).unwrap();
    let file = fs::read_to_string(node.path("cache/results/net-c1-eth1")).unwrap();
    assert!(!file.contains("netns") && !file.contains("Args"), "{file}");
    assert_eq!(node.cached().len(), 2, "one file per interface, and no temporary one");
}

#[test]
fn cache_files_of_the_reference_are_read() {
    let node = node();
    node.cache("net-c1-eth0", REFERENCE);
    let result = node.runtime.cached_result(&network(), &attach()).unwrap().unwrap();
    assert_eq!(result.ips[0].address.to_string(), "10.0.0.1/24");
    let asked = AttachmentParams::new("c1", "/elsewhere", "eth0");
    let (config, attach) = node.runtime.cached_config("net", &asked).unwrap().unwrap();
    assert_eq!(config, network().bytes());
    assert_eq!(attach.netns, "/elsewhere", "the namespace is the caller's");
    assert_eq!(attach.args, reference_attach().args);
    assert_eq!(attach.capability_args, members(r#"{"mac":"02::","z":{"b":1}}"#));
    let all = node.runtime.cached_attachments("").unwrap();
    assert_eq!((all.len(), all[0].network.as_str()), (1, "net"));
    assert_eq!(all[0].attach.netns, "/run/netns/x");
}

/// libcni before 1.2, such as that of containerd 1.6 and 1.7 and of podman 4, writes no `netns`.
#[test]
fn the_namespace_of_an_older_file_is_that_of_its_result() {
    let node = node();
    let older = REFERENCE.replace(r#""netns":"/run/netns/x","#, "");
    let netns = |interfaces: &str| {
        let result = format!(r#""result":{{"interfaces":{interfaces},"#);
        node.cache("net-c1-eth0", &older.replace(r#""result":{"#, &result));
        node.runtime.cached_attachments("").unwrap()[0].attach.netns.clone()
    };
    let own = r#"{"name":"eth0","sandbox":"/run/netns/x"}"#;
    let others = r#"{"name":"cni0"},{"name":"eth0"},{"name":"eth1","sandbox":"/y"}"#;
    assert_eq!(netns(&format!("[{others},{own}]")), "/run/netns/x");
    for unknown in [&format!("[{others}]"), "[]", "null", "7", r#"[7,{"name":7}]"#] {
        assert_eq!(netns(unknown), "", "{unknown}");
    }
    node.cache("net-c1-eth0", &older);
    assert_eq!(node.runtime.cached_attachments("").unwrap()[0].attach.netns, "");
}

#[test]
fn unreadable_cached_configurations_are_errors() {
    let node = node();
    let config = || node.runtime.cached_config("net", &attach());
    assert_eq!(config().unwrap(), None);
    node.cache("net-c1-eth0", "{");
    let error = config().unwrap_err();
    assert!(error.message().starts_with("failed to unmarshal cached network \"net\" config: "));
    node.cache("net-c1-eth0", r#"{"kind":"other"}"#);
    let text = "read cached network \"net\" config has wrong kind: other";
    assert_eq!(config().unwrap_err().message(), text);
    node.cache("net-c1-eth0", "");
    assert_eq!(config().unwrap(), None);
    let error =
        node.runtime.cached_config("net", &AttachmentParams::new("c1", "", "")).unwrap_err();
    assert_eq!(
        error.message(),
        "cache file path requires network name (\"net\"), container ID (\"c1\"), \
         and interface name (\"\")"
    );
}

#[test]
fn cached_results_of_other_versions_are_converted() {
    let node = node();
    let with = |result: &str| {
        let prefix = r#"{"kind":"cniCacheV1","containerId":"c1","ifName":"eth0","#;
        node.cache("net-c1-eth0", &format!(r#"{prefix}"networkName":"net"{result}}}"#));
    };
    with("");
    assert!(node.runtime.cached_result(&network(), &attach()).unwrap().unwrap().ips.is_empty());
    with(r#","result":{"cniVersion":"0.2.0","ip4":{"ip":"10.0.0.7/8"}}"#);
    let result = node.runtime.cached_result(&network(), &attach()).unwrap().unwrap();
    assert_eq!(result.ips[0].address.to_string(), "10.0.0.7/8");
    let unknown = list(r#"{"name":"net","cniVersion":"1.2.3","plugins":[{"type":"a"}]}"#);
    assert_eq!(
        node.runtime.cached_result(&unknown, &attach()).unwrap_err().message(),
        "failed to convert cached result to config version \"1.2.3\": \
         no converter for CNI result version 0.2.0 to 1.2.3"
    );
}

#[test]
fn attachments_are_listed() {
    let node = node();
    for (id, ifname) in [("c2", "eth0"), ("c1", "eth1"), ("c1", "eth0"), ("c1-x", "eth0")] {
        node.runtime.add(&network(), &AttachmentParams::new(id, "/x", ifname)).unwrap();
    }
    node.cache("net-c9-eth0", "garbage");
    node.cache("net-c1-old", r#"{"cniVersion":"0.4.0"}"#);
    node.cache(".tmp-1-1", REFERENCE);
    let names = |id: &str| -> Vec<String> {
        let all = node.runtime.cached_attachments(id).unwrap();
        all.iter().map(|a| format!("{} {}", a.attach.container_id, a.attach.ifname)).collect()
    };
    assert_eq!(names(""), ["c1 eth0", "c1 eth1", "c1-x eth0", "c2 eth0"]);
    assert_eq!(names("c1"), ["c1 eth0", "c1 eth1"]);
    assert!(
        names("none").is_empty() && Node::new().runtime.cached_attachments("").unwrap().is_empty()
    );
}

#[test]
fn attachments_with_the_same_file_name_are_told_apart() {
    let node = node();
    let (first, second) = (named("a-b"), named("a"));
    let (x, y) =
        (AttachmentParams::new("c", "/x", "eth0"), AttachmentParams::new("b-c", "/y", "eth0"));
    node.runtime.add(&first, &x).unwrap();
    assert_eq!(node.runtime.cached_result(&second, &y).unwrap(), None, "it is the other one's");
    node.runtime.del(&second, &y).unwrap();
    assert_eq!(node.cached(), ["a-b-c-eth0"], "and stays");
    node.runtime.add(&second, &y).unwrap();
    assert_eq!(node.cached().len(), 2);
    for (list, attach, netns) in [(&first, &x, "/x"), (&second, &y, "/y")] {
        assert!(node.runtime.cached_result(list, attach).unwrap().is_some());
        let of_container = node.runtime.cached_attachments(&attach.container_id).unwrap();
        assert_eq!((of_container.len(), of_container[0].attach.netns.as_str()), (1, netns));
        node.runtime.del(list, attach).unwrap();
    }
    assert!(node.cached().is_empty());
}

#[test]
fn names_too_long_for_a_file_are_hashed() {
    let node = node();
    let attach = AttachmentParams::new(&"c".repeat(300), "/x", "eth0");
    node.runtime.add(&network(), &attach).unwrap();
    assert!(node.cached()[0].ends_with(".hashed"), "{:?}", node.cached());
    assert!(node.runtime.cached_result(&network(), &attach).unwrap().is_some());
    assert_eq!(node.runtime.cached_attachments(&attach.container_id).unwrap().len(), 1);
    node.runtime.del(&network(), &attach).unwrap();
    assert!(node.cached().is_empty());
}

fn with_long_args(length: usize) -> AttachmentParams {
    AttachmentParams { args: vec![("K".to_owned(), "v".repeat(length))], ..attach() }
}

#[test]
fn readers_never_see_a_half_written_file() {
    let node = node();
    let (runtime, list) = (&node.runtime, network());
    let store = |length| runtime.cache_result(&list, &with_long_args(length), None).unwrap();
    store(1);
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let writers = [100_000, 10].map(|length| {
            scope.spawn(move || {
                for _ in 0..40 {
                    store(length);
                }
            })
        });
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                assert!(runtime.cached_config("net", &attach()).unwrap().is_some());
            }
        });
        for writer in writers {
            writer.join().unwrap();
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(node.cached(), ["net-c1-eth0"]);
}

/// Writes into the cache until it is killed, when the test runs itself again.
const VICTIM: &str = "CNIBOX_TEST_CACHE";

#[test]
fn a_killed_writer_leaves_a_whole_file() {
    if let Some(path) = env::var_os(VICTIM) {
        // Made beforehand, so that nearly all of the time goes into writing.
        let long = REFERENCE.replace("10.0.0.9", &"9".repeat(4_000_000));
        for text in [&long, REFERENCE].into_iter().cycle() {
            let path: &Path = path.as_ref();
            let writer = AtomicWriter::with_unique_name(path, Durability::Synced);
            writer.replace_file(path, text.as_bytes(), 0o600).unwrap();
        }
    }
    let node = node();
    let name = "runtime::tests::cache::a_killed_writer_leaves_a_whole_file";
    let own = env::current_exe().unwrap();
    node.plugin("victim", &format!("exec {} --exact {name} --nocapture", own.display()));
    let path = node.path("bin/victim");
    node.runtime.cache_result(&network(), &attach(), None).unwrap();
    for extra in 0..8 {
        let call = PluginCommand {
            path: &path,
            env: vec![(VICTIM, node.path("cache/results/net-c1-eth0").display().to_string())],
            stdin: b"",
            deadline: Some(Duration::from_millis(150 + 7 * extra)),
        };
        assert!(execute_plugin(&call).is_err());
        let found = node.runtime.cached_config("net", &attach()).unwrap();
        assert!(found.is_some(), "the file is gone or empty");
        let listed = node.runtime.cached_attachments("").unwrap();
        assert_eq!(listed.len(), 1, "what is left under a temporary name is no attachment");
    }
}
