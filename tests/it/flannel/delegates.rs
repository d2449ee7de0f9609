//! The delegate: in the same process, in a child process, or foreign.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use serde_json::{Value, json};

use super::{kept, simple};
use crate::support::compare::{assert_same, normal};
use crate::support::faults::has_effect;
use crate::support::node::{Container, Node, executable};
use crate::support::strace::{self, Hits};

/// Output and state of a series of calls, with bridge as a link to this executable or a copy.
fn transcript(version: &'static str, copied: bool) -> String {
    let node = Node::new();
    if copied {
        for name in ["bridge", "host-local"] {
            let path = node.bin().join(name);
            fs::remove_file(&path).unwrap();
            fs::copy(executable(), &path).unwrap();
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        }
    }
    let net =
        crate::support::net::Net::new(&node, "flannel", version, &super::keys(&node, super::ENV));
    let container = Container::new();
    let mut out = String::new();
    let mut run = |verb: &str, keys: &Value| {
        let outcome = net.with(keys).on(verb, &container).env("RUST_BACKTRACE", "0").run();
        let state = format!("{:?} {:?}", kept(&node), node.leases("net"));
        // A delegate in process logs under the name of the call.
        let text = normal(&format!("{outcome:?}"), &node, &container)
            .replace("cnibox: flannel ADD, ", "cnibox: bridge DEL, ");
        out.extend(["== ", verb, "\n", &text, "\n", &state, "\n"]);
        outcome.stdout
    };
    let nothing = json!({});
    run("STATUS", &nothing);
    let printed = run("ADD", &nothing);
    let prev: Value = serde_json::from_str(&printed).unwrap();
    let prev = json!({"prevResult": prev, "cni.dev/valid-attachments": []});
    run("CHECK", &prev);
    run("ADD", &nothing);
    run("GC", &prev);
    run("DEL", &prev);
    run("DEL", &nothing);
    run("ADD", &json!({"delegate": {"mtu": "x"}}));
    run("ADD", &json!({"ipam": {"dataDir": "/proc/x"}}));
    run("DEL", &nothing);
    out
}

#[test]
fn delegates_answer_the_same_in_and_out_of_process() {
    for version in crate::support::node::VERSIONS {
        let [linked, copied] = [false, true].map(|copied| transcript(version, copied));
        assert_same(&format!("{version}: in process, exec"), &linked, &copied);
        assert!(linked.contains("10.1.2.2"), "{linked}");
    }
}

#[test]
fn flannel_bridge_and_host_local_are_one_process() {
    let node = Node::new();
    let net = simple(&node);
    let container = Container::new();
    for verb in ["ADD", "DEL"] {
        let (outcome, calls) = strace::record(&node, &net.on(verb, &container));
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        let started = calls.iter().filter(|call| call.name == "execve").count();
        assert_eq!(started, 1, "{verb}");
    }
}

/// A foreign delegate that records its input.
const RECORDER: &str = r#"
cat > "$0.$CNI_COMMAND"
env | grep ^CNI_ | grep -v PATH | sort > "$0.$CNI_COMMAND.env"
if [ -e "$0.fails" ]; then echo '{"code":77,"msg":"no way","details":"said so"}'; exit 1; fi
if [ "$CNI_COMMAND" = ADD ]; then echo '{"cniVersion":"1.0.0","ips":[{"address":"10.9.0.2/24"}]}'; fi"#;

fn recorded(node: &Node, what: &str) -> Option<String> {
    fs::read_to_string(node.bin().join(format!("recorder.{what}"))).ok()
}

#[test]
fn a_foreign_delegate_gets_the_derived_configuration() {
    let node = Node::new();
    node.script("recorder", RECORDER);
    let net =
        simple(&node).with(&json!({"delegate": {"type": "recorder", "key": {"b": 1, "a": 2}}}));
    let container = Container::new();
    let result = net.add(&container);
    assert_eq!(result, json!({"cniVersion": "1.1.0", "ips": [{"address": "10.9.0.2/24"}]}));
    let sent = recorded(&node, "ADD").unwrap();
    let expected = format!(
        r#"{{"cniVersion":"1.1.0","ipMasq":false,"ipam":{{"dataDir":"{}","ranges":[[{{"subnet":"10.1.2.0/24"}}]],"routes":[{{"dst":"10.1.0.0/16"}}],"type":"host-local"}},"key":{{"a":2,"b":1}},"mtu":1450,"name":"net","type":"recorder"}}"#,
        node.path("leases").display()
    );
    assert_eq!(sent, expected);
    assert_eq!(fs::read_to_string(node.state("flannel").join("c1")).unwrap(), sent);
    net.check(&container, &result).ok();
    let checked: Value = serde_json::from_str(&recorded(&node, "CHECK").unwrap()).unwrap();
    assert_eq!(checked["prevResult"], result);
    assert_eq!(checked["key"], json!({"a": 2, "b": 1}));
    // A call without a result adds nothing to the stored configuration.
    net.del(&container);
    assert_eq!(recorded(&node, "DEL").unwrap(), sent);
    let env = recorded(&node, "DEL.env").unwrap();
    assert!(env.contains("CNI_CONTAINERID=c1\n") && env.contains("CNI_IFNAME=eth0\n"), "{env}");
    assert_eq!(kept(&node), [""; 0]);
}

#[test]
fn errors_of_delegates_are_returned_by_every_verb() {
    let node = Node::new();
    node.script("recorder", RECORDER);
    let net = simple(&node).with(&json!({"delegate": {"type": "recorder"}}));
    let container = Container::new();
    fs::write(node.bin().join("recorder.fails"), "").unwrap();
    let error = net.on("ADD", &container).error();
    assert_eq!((error.brief(), error.details.as_str()), ((77, "no way"), "said so"));
    assert!(recorded(&node, "DEL").is_some() && recorded(&node, "DEL") == recorded(&node, "ADD"));
    assert!(!kept(&node).is_empty(), "its DEL failed as well: another one is needed");
    fs::remove_file(node.bin().join("recorder.fails")).unwrap();
    net.del(&container);
    assert_eq!(kept(&node), [""; 0]);
    let prev = net.add(&container);
    fs::write(node.bin().join("recorder.fails"), "").unwrap();
    for verb in ["CHECK", "DEL", "GC", "STATUS"] {
        let keys = json!({"prevResult": prev, "cni.dev/valid-attachments": []});
        let error = net.with(&keys).on(verb, &container).error();
        let msg = if verb == "GC" { "no way; no way" } else { "no way" };
        assert_eq!(error.brief(), (77, msg), "{verb}");
    }
    assert_eq!(kept(&node).len(), 2);
}

#[test]
fn gc_forwards_attachments_and_deletes_recorded_ones() {
    let node = Node::new();
    node.script("recorder", RECORDER);
    let net = simple(&node).with(&json!({"delegate": {"type": "recorder"}}));
    let container = Container::new();
    net.on("ADD", &container).ifname("net7").result();
    let valid = json!([{"containerID": "other", "ifname": "eth0"}]);
    let keys = json!({"cni.dev/valid-attachments": valid});
    net.with(&keys).call("GC", "").without("CNI_CONTAINERID").ok();
    assert_eq!(recorded(&node, "DEL"), recorded(&node, "ADD"));
    let env = recorded(&node, "DEL.env").unwrap();
    assert!(env.contains("CNI_CONTAINERID=c1\n") && env.contains("CNI_IFNAME=net7\n"), "{env}");
    assert!(env.contains(&format!("CNI_NETNS={}\n", container.path())), "{env}");
    let sent: Value = serde_json::from_str(&recorded(&node, "GC").unwrap()).unwrap();
    assert_eq!(sent["cni.dev/valid-attachments"], valid);
    assert_eq!(sent["type"], "recorder");
    assert_eq!(kept(&node), [""; 0]);
}

#[test]
fn check_skips_a_delegate_before_0_4_0() {
    let node = Node::new();
    node.script("recorder", RECORDER);
    let net = simple(&node).with(&json!({"delegate": {"type": "recorder"}}));
    let container = Container::new();
    let prev = net.add(&container);
    let refusal = "echo '{\"code\":1,\"msg\":\"incompatible CNI versions\"}'; exit 1";
    node.script("recorder", refusal);
    net.check(&container, &prev).ok();
    node.script("recorder", RECORDER);
    net.del(&container);
}

/// The clean-up after an interrupted command.
#[derive(Clone, Copy, PartialEq)]
enum CleanUp {
    Del,
    /// GC while the namespace exists, by a runtime that knows only the neighbour; then DEL.
    GcThenDel,
}

/// Each system call with an effect of ADD or DEL fails, or the process is killed before it.
fn at_each_step(verb: &str, action: &str, clean_up: CleanUp) {
    let node = Node::new();
    node.sh("echo 1 > /proc/sys/net/ipv6/conf/default/addr_gen_mode");
    let net = simple(&node);
    let (neighbour, container) = (Container::new(), Container::new());
    net.call("ADD", "neighbour").netns(&neighbour.path()).result();
    net.add(&container);
    net.del(&container);
    let state = || (node.snapshot(), container.snapshot(&node), kept(&node));
    let before = state();
    let call = || net.on(verb, &container).env("RUST_BACKTRACE", "0");
    if verb == "DEL" {
        net.add(&container);
    }
    let (outcome, calls) = strace::record(&node, &call());
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    net.del(&container);
    let mut hit = Hits::default();
    for point in strace::points(&calls)
        .into_iter()
        .filter(|point| has_effect(point) || point.name == "fsync")
    {
        if verb == "DEL" {
            net.add(&container);
        }
        let (outcome, fired) = point.run(&node, &call(), action);
        let why = format!("{verb} with {action} at {}: {outcome:?}", point.describe());
        assert!(!outcome.stderr.contains("panicked"), "{why}");
        hit.extend(fired.then_some(&point));
        // A failed ADD leaves no state, not even a record.
        if verb == "DEL" || outcome.status != Some(1) {
            if clean_up == CleanUp::GcThenDel {
                let valid = json!([{"containerID": "neighbour", "ifname": "eth0"}]);
                let gc = net.with(&json!({"cni.dev/valid-attachments": valid}));
                gc.call("GC", "").without("CNI_CONTAINERID").ok();
            }
            let again = net.on("DEL", &container).run();
            assert_eq!(again.status, Some(0), "{why}, then {again:?}");
        }
        crate::support::node::eventually(&why, || {
            node.ip("link show type veth").as_array().unwrap().len() == 1
        });
        // Later writers remove the temporary files of a killed one.
        node.sh(&format!("rm -f {}/.tmp-* {0}/.cnibox/.tmp-*", node.state("flannel").display()));
        let now = state();
        assert!(
            now == before,
            "{why}\n{}{}\n{:?}",
            before.0.difference(&now.0),
            before.1.difference(&now.1),
            now.2
        );
    }
    hit.assert_include(match verb {
        "ADD" => &[
            "open",
            "write",
            "fsync",
            "link",
            "rename",
            "RTM_NEWLINK",
            "RTM_NEWADDR",
            "RTM_NEWROUTE",
        ],
        _ => &["open", "write", "unlink", "RTM_DELLINK"],
    });
    net.add(&container);
    net.del(&container);
}

#[test]
fn a_failing_add_leaves_nothing_at_any_step() {
    at_each_step("ADD", "error=ENOSPC", CleanUp::Del);
}

#[test]
fn an_add_killed_anywhere_is_cleaned_up_by_del() {
    at_each_step("ADD", "signal=KILL", CleanUp::Del);
}

#[test]
fn a_del_killed_anywhere_is_finished_by_the_next() {
    at_each_step("DEL", "signal=KILL", CleanUp::Del);
}

#[test]
fn a_killed_add_is_cleaned_up_by_gc() {
    at_each_step("ADD", "signal=KILL", CleanUp::GcThenDel);
}
