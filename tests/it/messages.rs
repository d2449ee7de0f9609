//! The messages for operators' mistakes: each error is reported once, with a remedy.
//!
//! The mistakes and the expected output are in `golden/messages.json`.

use std::fs;
use std::os::unix::fs::symlink;

use regex_lite::{Captures, Regex};
use serde_json::{Value, json};

use crate::support::net::merged;
use crate::support::node::{Container, Node, Outcome, executable};

/// Prepended to each command, in its own mount namespace.
pub(crate) const PRELUDE: &str = "\
mount -t tmpfs tmpfs /run && mkdir -p /run/cni /run/netns
export PATH=BIN:$PATH NETCONFPATH=DIR/net.d CNI_PATH=BIN
cnitool() { BIN/cnitool \"$@\" --cache-dir DIR/cache; }
other() { ip netns add other && cnitool add pods /run/netns/other --container-id other \"$@\" >/dev/null; }
swap() { sed -i \"s#$1#$2#\" DIR/net.d/*; }
wire() { ip link add wire0 up type veth peer name wire1; ip link set wire1 up; }
plugin() { echo '{\"cniVersion\":\"1.1.0\",\"name\":\"pods\",'\"$2\"'}' | CNI_COMMAND=$1 CNI_CONTAINERID=c1 CNI_IFNAME=eth0 CNI_NETNS=NETNS $3; }
";

/// A mistake and the expected output.
pub(crate) struct Mistake {
    /// A description of the mistake in searchable words.
    pub(crate) mistake: String,
    /// The text of a configuration, or the differences from [`network`].
    conf: Value,
    /// A shell command line. DIR is a private directory, BIN the plugins' directory, NETNS the
    /// container's namespace.
    pub(crate) run: String,
    /// All output lines except results.
    pub(crate) says: String,
    /// The part of `says` with the remedy.
    pub(crate) cure: String,
    /// Command lines that follow the advice, each another reading of it, and repeat the call; see
    /// `advice`.
    pub(crate) follow: Vec<String>,
    /// Why the advice is not followed in a test.
    pub(crate) unfollowed: String,
    /// The mistake is the use of a feature that the kernel lacks; no error on kernels with the
    /// feature.
    pub(crate) of_kernel: bool,
}

pub(crate) fn mistakes() -> Vec<Mistake> {
    let all: Vec<Value> = serde_json::from_str(include_str!("golden/messages.json")).unwrap();
    let text = |mistake: &Value, key: &str| mistake[key].as_str().unwrap_or_default().to_owned();
    let read = |mistake: &Value| Mistake {
        mistake: text(mistake, "mistake"),
        conf: mistake["conf"].clone(),
        run: text(mistake, "run"),
        says: text(mistake, "says"),
        cure: text(mistake, "cure"),
        follow: match &mistake["follow"] {
            Value::Array(all) => all.iter().map(|line| line.as_str().unwrap().to_owned()).collect(),
            one => one.as_str().map(str::to_owned).into_iter().collect(),
        },
        unfollowed: text(mistake, "unfollowed"),
        of_kernel: mistake["ofKernel"] == true,
    };
    all.iter().map(read).collect()
}

/// The configuration list of the network `pods`: a bridge with host-local, changed by `conf`.
fn network(conf: &Value) -> String {
    if let Some(text) = conf["text"].as_str() {
        return text.to_owned();
    }
    let changed = |base: Value, key: &str| match &conf[key] {
        Value::Null => base,
        changes => merged(&base, changes),
    };
    let range = json!([{"subnet": "10.88.0.0/24"}]);
    let ipam = json!({"type": "host-local", "dataDir": "DIR/leases", "ranges": [range],
        "routes": [{"dst": "0.0.0.0/0"}]});
    let bridge = json!({"type": "bridge", "bridge": "cni0", "isGateway": true, "ipam": changed(ipam, "ipam")});
    let mut plugins = vec![changed(bridge, "bridge")];
    plugins.extend(conf["chained"].as_array().cloned().unwrap_or_default());
    let network = json!({"cniVersion": "1.1.0", "name": "pods", "plugins": plugins});
    changed(network, "network").to_string()
}

impl Mistake {
    /// Makes the mistake; returns the output with placeholders for variable parts.
    fn make(&self) -> String {
        let Outcome { stdout, stderr, .. } = self.run(&self.run);
        stderr + &said_on_stdout(&stdout)
    }

    /// Runs a script with the mistake's configuration on a new node; returns the output with
    /// placeholders for variable parts.
    pub(crate) fn run(&self, script: &str) -> Outcome {
        let (node, container) = (Node::new(), Container::new());
        symlink(executable(), node.bin().join("cnibox")).unwrap();
        let dir = node.path("net.d").parent().unwrap().display().to_string();
        let netns = container.path();
        // One pass: the random name of the directory may contain a placeholder. The first two are
        // words that contain one.
        let placeholders = Regex::new("REDIRECT|CNI_NETNS|BIN|DIR|NETNS").unwrap();
        let fill = |text: &str| {
            let value = |found: &Captures| match &found[0] {
                "BIN" => format!("{dir}/bin"),
                "DIR" => dir.clone(),
                "NETNS" => netns.clone(),
                word => word.to_owned(),
            };
            placeholders.replace_all(text, value).into_owned()
        };
        fs::create_dir(node.path("net.d")).unwrap();
        fs::write(node.path("net.d/10-pods.conflist"), fill(&network(&self.conf))).unwrap();
        let script = fill(&format!("{PRELUDE}{script}"));
        let call =
            node.tool("cnitool", &["-c", &script]).program("/bin/sh").under(&["unshare", "-m"]);
        let outcome = call.run();
        let shown = |text: String| {
            let text = text.replace(&dir, "DIR").replace(&netns, "NETNS");
            let text =
                Regex::new("veth[0-9a-f]{8}").unwrap().replace_all(&text, "VETH").into_owned();
            Regex::new("cnitool-[0-9a-f]{20}")
                .unwrap()
                .replace_all(&text, "ID")
                .trim_end()
                .to_owned()
        };
        let (stdout, stderr) = (shown(outcome.stdout), shown(outcome.stderr));
        Outcome { stdout, stderr, ..outcome }
    }

    fn check(&self) {
        let told = self.make();
        if self.of_kernel && told.is_empty() {
            println!("skipped: {}: this kernel has it", self.mistake);
            return;
        }
        assert_eq!(told, self.says, "{}", self.mistake);
        assert!(!self.cure.is_empty(), "{}: no remedy", self.mistake);
        assert!(told.contains(&self.cure), "{}: {:?} is not said", self.mistake, self.cure);
        let reasons = Regex::new(r"(?m)^[^\n]*\): ").unwrap();
        let mut reasons: Vec<&str> = told
            .lines()
            .map(|line| reasons.find(line).map_or(line, |m| &line[m.end()..]))
            .collect();
        reasons.sort_unstable();
        reasons
            .windows(2)
            .for_each(|two| assert_ne!(two[0], two[1], "{}: said twice", self.mistake));
    }
}

/// The error of a plugin, or the lines of a tool, without results.
fn said_on_stdout(stdout: &str) -> String {
    let Ok(object) = serde_json::from_str::<Value>(stdout) else { return stdout.to_owned() };
    let text = |key: &str| object[key].as_str().unwrap_or_default().to_owned();
    match (text("msg"), text("details")) {
        (msg, details) if details.is_empty() => msg,
        (msg, details) => format!("{msg}; {details}"),
    }
}

/// Checks every fourth mistake, starting with `first`.
fn check(first: usize) {
    for mistake in mistakes().iter().skip(first).step_by(4) {
        mistake.check();
    }
}

#[test]
fn each_mistake_is_reported_once_with_a_remedy() {
    check(0);
}

#[test]
fn each_mistake_is_reported_once_with_a_remedy_2() {
    check(1);
}

#[test]
fn each_mistake_is_reported_once_with_a_remedy_3() {
    check(2);
}

#[test]
fn each_mistake_is_reported_once_with_a_remedy_4() {
    check(3);
}

/// Prints the current output, to update `golden/messages.json`.
#[test]
#[ignore = "prints only"]
fn print_messages() {
    for mistake in mistakes() {
        println!("{}", json!({"mistake": mistake.mistake, "says": mistake.make()}));
    }
}
