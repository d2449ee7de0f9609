//! One language for all tools: the same options, exit statuses and keys of JSON, and the words of
//! the release before, which still work and say so.

use std::fs;

use serde_json::{Value, json};

use crate::support::net::merged;
use crate::support::node::{Call, Container, Node, Outcome, eventually};

/// A node with a network of two attachments: one that lives, one whose container is dead.
struct Ground {
    node: Node,
    living: Container,
}

impl Ground {
    fn new() -> Ground {
        let node = Node::new();
        let (living, dead) = (Container::new(), Container::new());
        let ground = Ground { node, living };
        fs::create_dir(ground.node.path("net.d")).unwrap();
        let keys = json!({"type": "bridge", "bridge": "br0", "ipam": ground.node.host_local(&["203.0.113.0/24"])});
        let list = json!({"cniVersion": "1.1.0", "name": "pods", "plugins": [keys]});
        fs::write(ground.node.path("net.d/10-pods.conflist"), list.to_string()).unwrap();
        for (id, container) in [("living", &ground.living), ("dead", &dead)] {
            let conf = merged(&keys, &json!({"cniVersion": "1.1.0", "name": "pods"}));
            ground.node.call("bridge", "ADD").conf(&conf).id(id).netns(&container.path()).result();
        }
        drop(dead);
        eventually("its link is gone", || {
            ground.node.sh("ip -o link show type veth").lines().count() == 1
        });
        ground
    }

    /// A tool with the directories of this node.
    fn tool(&self, line: &str) -> Call {
        let [conf, cache, leases] =
            ["net.d", "cache", "leases"].map(|name| self.node.path(name).display().to_string());
        let mut words: Vec<&str> = line.split_whitespace().collect();
        let directories = match words[0] {
            "gc" | "ipam" | "doctor" => {
                vec!["--conf-dir", &conf, "--cache-dir", &cache, "--data-dir", &leases]
            }
            "lint" => vec!["--conf-dir", &conf],
            "repair" => vec!["--cache-dir", &cache],
            _ => Vec::new(),
        };
        words.extend(directories);
        self.node.cnibox(&words).env("CNI_PATH", &self.node.bin().display().to_string())
    }

    #[track_caller]
    fn ends(&self, line: &str, status: i32) -> Outcome {
        let outcome = self.tool(line).run();
        assert_eq!(outcome.status, Some(status), "{line}: {outcome:?}");
        outcome
    }

    #[track_caller]
    fn objects(&self, line: &str, status: i32) -> Vec<Value> {
        serde_json::from_str(&self.ends(line, status).stdout).unwrap()
    }
}

#[test]
fn the_exit_status_tells_whether_something_was_found() {
    let ground = Ground::new();
    let target = ground.node.path("target").display().to_string();
    // Found, or failed.
    for line in [
        "gc --dry-run",
        "gc --network none",
        "doctor",
        "ipam ls --network none",
        "ipam free --network pods none",
        "ipam free --network pods dead --dry-run",
        "trace show 0123",
        &format!("install {target} --dry-run"),
    ] {
        ground.ends(line, 1);
    }
    for tool in
        ["gc", "doctor", "lint", "repair", "ipam", "trace ls", "install", "uninstall", "sysdump"]
    {
        ground.ends(&format!("{tool} --nonsense"), 2);
    }
    // Nothing.
    ground.ends("ipam ls", 0);
    ground.ends("gc", 0);
    ground.ends("gc --dry-run", 0);
    ground.ends("lint --offline", 0);
    ground.ends("repair --dry-run", 0);
    ground.ends(&format!("install {target}"), 0);
    ground.ends(&format!("install {target} --dry-run"), 0);
    ground.ends(&format!("uninstall {target} --dry-run"), 1);
    ground.ends(&format!("uninstall {target}"), 0);
    ground.ends(&format!("uninstall {target} --dry-run"), 0);
    // A warning, and an error.
    let file = ground.node.path("net.d/10-pods.conflist");
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.replace("\"bridge\":\"br0\"", "\"bridge\":\"br0\",\"brigde\":1"))
        .unwrap();
    ground.ends("lint --offline", 1);
    fs::write(&file, "{").unwrap();
    ground.ends("lint --offline", 1);
}

#[test]
fn json_of_all_tools_has_the_same_keys() {
    let ground = Ground::new();
    let file = ground.node.path("net.d/20-odd.conf");
    fs::write(&file, r#"{"cniVersion": "1.1.0", "name": "odd", "type": "bridge", "brigde": 1}"#)
        .unwrap();
    let mut all = Vec::new();
    for (line, status) in [
        ("lint --offline --json", 1),
        ("doctor --json", 1),
        ("gc --dry-run --json", 1),
        ("ipam free --network pods dead --dry-run --json", 1),
    ] {
        let found = ground.objects(line, status);
        assert!(!found.is_empty(), "{line}");
        all.extend(found.into_iter().map(|object| (line, object)));
    }
    ground.node.sh("ip link set br0 down");
    all.extend(ground.objects("gc --json", 0).into_iter().map(|object| ("gc --json", object)));
    for (line, object) in all {
        for key in ["object", "problem", "remedy"] {
            assert!(object[key].is_string(), "{line}: {key}: {object}");
        }
        assert_ne!(object["object"], "", "{line}: {object}");
    }
    assert_eq!(ground.objects("gc --json", 0), Vec::<Value>::new());
    assert_eq!(ground.objects("repair --json", 0), Vec::<Value>::new());
}

#[test]
fn repair_and_trace_print_json() {
    let ground = Ground::new();
    let netns = Container::new();
    let [conf, cache, bin] =
        ["net.d", "cache", "bin"].map(|name| ground.node.path(name).display().to_string());
    let add = ["cnitool", "add", "pods", &netns.path(), "--conf-dir", &conf, "--cache-dir", &cache];
    let add = ground.node.cnibox(&[&add[..], &["--plugin-path", &bin]].concat());
    add.env("CNI_LOG", "trace").printed();
    ground.node.sh("ip link del br0");
    for (line, status, action) in
        [("repair --dry-run --json", 1, "missing"), ("repair --json", 0, "restored")]
    {
        let found = ground.objects(line, status);
        let bridge = found.iter().find(|found| found["object"] == "bridge \"br0\"").unwrap();
        assert_eq!(bridge["action"], action, "{found:?}");
        let remedy = if status == 1 { "cnibox repair" } else { "" };
        assert_eq!((&bridge["problem"], &bridge["remedy"]), (&json!(""), &json!(remedy)));
    }
    let calls = ground.objects("trace ls --json", 0);
    let call = calls.iter().find(|call| call["call"] == "bridge ADD").unwrap();
    assert_eq!(
        (&call["network"], &call["code"], &call["problem"]),
        (&json!("pods"), &json!(0), &json!(""))
    );
    assert!(call["seconds"].as_f64().unwrap() > 0.0, "{call}");
    let show = format!("trace show {} --json", call["id"].as_str().unwrap());
    let steps = ground.objects(&show, 0);
    assert!(steps.iter().any(|step| step["name"] == "netlink"), "{steps:?}");
    let stats = ground.objects("trace stats --json", 0);
    let adds = stats.iter().find(|row| row["plugin"] == "bridge" && row["verb"] == "ADD").unwrap();
    assert_eq!((&adds["calls"], &adds["failed"]), (&json!(1), &json!(0)));
    ground.ends("trace stats --json --format prometheus", 2);
}

#[test]
fn an_address_in_use_is_freed_by_force_only() {
    let ground = Ground::new();
    for line in
        ["ipam free --network pods living", "ipam free --network pods 203.0.113.2 --dry-run"]
    {
        let outcome = ground.ends(line, 1);
        let refusal = "203.0.113.2 of container living, interface eth0 is in use: its link on the host exists";
        assert!(
            outcome.stderr.contains(refusal) && outcome.stderr.contains("--force"),
            "{outcome:?}"
        );
    }
    assert_eq!(ground.node.leases("pods").len(), 2);
    let freed = ground.ends("ipam free --network pods living --force", 0);
    assert_eq!(
        freed.stdout,
        "freed 203.0.113.2 of container living, interface eth0 (network pods)\n"
    );
    ground.ends("ipam free --network pods dead", 0);
    assert_eq!(ground.node.leases("pods"), [""; 0]);
}

#[test]
fn every_help_documents_the_exit_status() {
    let node = Node::new();
    for (command, _) in cnibox::testing::options::flags_by_tool() {
        let words: Vec<&str> = command.trim_start_matches("cnibox ").split(' ').collect();
        let help = node.cnibox(&[&words[..], &["--help"]].concat()).printed();
        let is_told = help.contains("Exit status: 0 ") && help.contains("2 wrong usage");
        assert!(is_told || ["completion", "pause"].contains(&words[0]), "{command}: {help}");
    }
    let help = |tool: &str| node.cnibox(&[tool, "--help"]).printed();
    assert!(help("gc").contains("\"cnitool gc\" is the GC of a runtime"));
    assert!(help("cnitool").contains("\"cnibox gc\" works on the"));
}
