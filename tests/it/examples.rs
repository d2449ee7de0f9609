//! The example at the beginning of each page of docs/plugins/, tried as docs/plugins/README.md
//! describes: `lint`, ADD, CHECK, the page's commands with their output, DEL. No other state may
//! remain.
//!
//! The fenced blocks of a page: the first `json` block is the network; an optional `sh` block runs
//! before ADD; the first `console` block shows the state of the attached container, the optional
//! second one shows permanent state after DEL. Without the second block no state may remain.

use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use cnibox::testing::{APPLETS, AppletKind};
use serde_json::{Deserializer, Value};

use crate::lane::{BOND, DUMMY, IPVLAN, VLAN, VRF, needs};
use crate::support::net::settles;
use crate::support::node::{Node, Snapshot, executable};
use crate::support::resolver::start_resolver;

macro_rules! page {
    ($name:literal) => {
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/plugins/", $name, ".md"))
    };
}
pub(crate) use page;

/// Separates the outputs of a script's commands.
const MARK: &str = "@@@@\n";

/// The contents of the fenced blocks of a language, in order.
pub(crate) fn blocks<'t>(text: &'t str, language: &str) -> Vec<&'t str> {
    let fence = format!("\n```{language}\n");
    let after = text.split(&fence).skip(1);
    after.map(|rest| rest.split_once("\n```").expect("a fence is not closed").0).collect()
}

/// The commands of a `console` block (lines with the prompt `#`), each with its expected output.
fn session(block: &str) -> Vec<(&str, Vec<&str>)> {
    let mut commands: Vec<(&str, Vec<&str>)> = Vec::new();
    for line in block.lines() {
        match line.strip_prefix("# ") {
            Some(command) => commands.push((command, Vec::new())),
            None => commands.last_mut().expect("a command comes first").1.push(line),
        }
    }
    commands
}

/// Whether a printed line matches the page's line; `...` matches any text, and amounts of white
/// space are equal.
fn alike(page: &str, printed: &str) -> bool {
    let [page, printed] =
        [page, printed].map(|l| l.split_whitespace().collect::<Vec<_>>().join(" "));
    let Some((start, rest)) = page.split_once("...") else { return page == printed };
    let (middle, end) = rest.rsplit_once("...").unwrap_or(("", rest));
    let rest = printed.strip_prefix(start).and_then(|rest| rest.strip_suffix(end));
    let Some(mut rest) = rest else { return false };
    for part in middle.split("...") {
        let Some(at) = rest.find(part) else { return false };
        rest = &rest[at + part.len()..];
    }
    true
}

/// Prepares the directories of the examples, the network card `eth1` with a carrier, and the page's
/// prerequisites.
fn prepare(node: &Node, page: &str) {
    node.sh("for dir in /opt /run /var/lib; do mount -t tmpfs -o mode=755 tmpfs $dir; done");
    node.sh(
        "ip link add eth1 type veth peer name lan1 && ip link set eth1 up && ip link set lan1 up",
    );
    fs::create_dir("/opt/cni").unwrap();
    symlink(node.bin(), "/opt/cni/bin").unwrap();
    symlink(executable(), node.bin().join("cnibox")).unwrap();
    fs::create_dir(node.path("try")).unwrap();
    fs::write(node.path("try/example.conflist"), blocks(page, "json")[0]).unwrap();
    for script in blocks(page, "sh") {
        node.sh(script);
    }
}

/// Runs commands in the directory of the example; returns their output.
#[track_caller]
fn run(node: &Node, script: &str) -> String {
    let path = format!("{}:{}", node.bin().display(), std::env::var("PATH").unwrap());
    let mut shell = Command::new("sh");
    shell.args(["-euc", script]).current_dir(node.path("try")).env("PATH", path);
    let output = shell.output().unwrap();
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && stderr.is_empty(), "{script}\n{stdout}\n{stderr}");
    stdout
}

/// The state of the node with all files of plugins and cnitool, except locks and hints.
fn state(node: &Node) -> Snapshot {
    let files = node.sh("find /run /var/lib -type f ! -name '*lock' ! -name 'last_reserved_ip.*' \
         ! -path '*/.cnibox/*' ! -path '/run/cnibox/*' | sort");
    node.snapshot().with("files", files)
}

/// Runs the page's example twice, with different containers: permanent state must not grow after
/// the first run.
#[track_caller]
pub(crate) fn works(node: &Node, page: &str) {
    prepare(node, page);
    let &[begin, end] = &blocks(page!("README"), "sh")[..] else {
        panic!("two blocks of commands")
    };
    let sessions: Vec<_> = blocks(page, "console").into_iter().map(session).collect();
    let [alive, after] = [0, 1].map(|i| sessions.get(i).map_or(&[][..], Vec::as_slice));
    assert!(!alive.is_empty(), "the page shows nothing of what the example makes");
    let marked = |commands: &[(&str, Vec<&str>)]| {
        commands
            .iter()
            .fold(String::new(), |all, (command, _)| all + "echo " + MARK + command + "\n")
    };
    // The prerequisites are repeated for the variables that they export; they are idempotent.
    let begin = [&blocks(page, "sh").concat(), "\n", begin].concat();
    let mark = format!("\necho {MARK}");
    let script = [&begin, "\n", &marked(alive), &mark, end, "\n", &marked(after)].concat();

    let pristine = state(node);
    let printed = run(node, &script);
    let mut parts = printed.split(MARK);
    let said = parts.next().unwrap().strip_prefix("no mistake was found\n");
    let mut values = Deserializer::from_str(said.expect("lint finds nothing")).into_iter();
    let result: Value = values.next().unwrap().unwrap();
    let mut differs = false;
    let mut seen = Vec::new();
    for (command, expected) in alive.iter().chain([&(end, Vec::new())]).chain(after) {
        let lines: Vec<_> = parts.next().unwrap().lines().collect();
        let same = expected.iter().zip(&lines).all(|(page, line)| alike(page, line));
        differs |= !same || lines.len() != expected.len();
        seen.push([&[*command], &lines[..]].concat().join("\n"));
    }
    assert!(!differs, "the page shows something else than\n# {}", seen.join("\n# "));
    for ip in result["ips"].as_array().into_iter().flatten() {
        let address = ip["address"].as_str().unwrap();
        assert!(page.contains(address), "the page does not tell of {address}");
    }
    if after.is_empty() {
        settles(&pristine, || state(node));
    }
    let once = state(node);
    run(node, &[&begin, "\n", end].concat().replace("try", "another"));
    settles(&once, || state(node));
}

#[test]
fn output_of_examples_is_compared() {
    assert!(alike("eth0@...  UP   10.1.0.2/16", "eth0@if3 UP 10.1.0.2/16 "));
    assert!(!alike("eth0@... UP 10.1.0.2/16", "eth0@if3 UP 10.1.0.2/16 fe80::1/64"));
    assert!(!alike("eth0@... UP", "eth1@if3 UP"));
    assert!(alike("a ... b ... b", "a 1 b b 2 b") && !alike("a ... b ... b", "a 1 b"));
    assert_eq!(session("# a\nb\n# c"), [("a", vec!["b"]), ("c", vec![])]);
    assert_eq!(blocks("x\n```sh\na\nb\n```\n", "sh"), ["a\nb"]);
}

#[test]
fn every_plugin_page_has_a_tested_example() {
    let tests = concat!(include_str!("examples.rs"), include_str!("dhcp/daemon.rs"));
    for applet in APPLETS.iter().filter(|applet| applet.kind != AppletKind::Tool) {
        let call = format!("page!(\"{}\")", applet.name);
        assert!(tests.contains(&call), "add a test: works(&Node::new(), {call})");
    }
}

#[test]
fn bandwidth() {
    works(&Node::new(), page!("bandwidth"));
}

#[test]
fn bridge() {
    works(&Node::new(), page!("bridge"));
}

#[test]
fn bond() {
    needs!(BOND);
    works(&Node::new(), page!("bond"));
}

#[test]
fn dummy() {
    needs!(DUMMY);
    works(&Node::new(), page!("dummy"));
}

#[test]
fn egress() {
    works(&Node::new(), page!("egress"));
}

/// The lists of docs/egress.md: lint finds nothing, ADD, CHECK, DEL.
#[test]
fn egress_policies() {
    let page = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/egress.md"));
    for list in blocks(page, "json") {
        let node = Node::new();
        prepare(&node, page);
        fs::write(node.path("try/example.conflist"), list).unwrap();
        let has_names = list.contains("github.com");
        let _resolver = has_names.then(|| start_resolver(&node, &["127.0.0.1"]));
        let name = list.split("\"name\": \"").nth(1).unwrap().split('"').next().unwrap();
        let steps =
            blocks(page!("README"), "sh").join("\n").replace(" example ", &format!(" {name} "));
        assert!(run(&node, &steps).starts_with("no mistake was found\n"), "{name}");
    }
}

#[test]
fn firewall() {
    works(&Node::new(), page!("firewall"));
}

#[test]
fn flannel() {
    works(&Node::new(), page!("flannel"));
}

#[test]
fn host_device() {
    works(&Node::new(), page!("host-device"));
}

#[test]
fn host_local() {
    works(&Node::new(), page!("host-local"));
}

#[test]
fn ipvlan() {
    needs!(IPVLAN);
    works(&Node::new(), page!("ipvlan"));
}

#[test]
fn loopback() {
    works(&Node::new(), page!("loopback"));
}

#[test]
fn macvlan() {
    works(&Node::new(), page!("macvlan"));
}

#[test]
fn portmap() {
    works(&Node::new(), page!("portmap"));
}

#[test]
fn ptp() {
    works(&Node::new(), page!("ptp"));
}

#[test]
fn route_override() {
    works(&Node::new(), page!("route-override"));
}

#[test]
fn sbr() {
    works(&Node::new(), page!("sbr"));
}

#[test]
fn static_addresses() {
    works(&Node::new(), page!("static"));
}

#[test]
fn tap() {
    works(&Node::new(), page!("tap"));
}

#[test]
fn tc_redirect_tap() {
    works(&Node::new(), page!("tc-redirect-tap"));
}

#[test]
fn tuning() {
    works(&Node::new(), page!("tuning"));
}

#[test]
fn vlan() {
    needs!(VLAN);
    works(&Node::new(), page!("vlan"));
}

#[test]
fn vrf() {
    needs!(VRF);
    works(&Node::new(), page!("vrf"));
}
