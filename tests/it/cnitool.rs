//! cnitool with the real plugins: the walk-through of its documentation, lists with foreign
//! plugins, capabilities, and CHECK, GC and STATUS of a list.
//!
//! The tool's cache is in the node's directory, so that tests do not change the machine.

use std::fs;

use serde_json::{Value, json};

use crate::support::node::{Call, Container, Node, assert_unchanged};

const MYPTP: &str = r#"{
    "cniVersion": "0.4.0",
    "name": "myptp",
    "type": "ptp",
    "ipam": {
        "type": "host-local",
        "subnet": "172.16.29.0/24",
        "dataDir": "LEASES",
        "routes": [{ "dst": "0.0.0.0/0" }]
    }
}"#;

/// A call of cnitool with the configuration and cache directories of `node`.
fn tool(node: &Node, args: &[&str]) -> Call {
    let cache = node.path("cache").display().to_string();
    let args = args.iter().copied().chain(["--cache-dir", &cache]);
    node.tool("cnitool", &args.collect::<Vec<_>>())
        .env("NETCONFPATH", &node.path("net.d").display().to_string())
        .env("CNI_PATH", &node.bin().display().to_string())
}

fn configure(node: &Node, file: &str, text: &str) {
    let leases = node.path("leases").display().to_string();
    fs::create_dir_all(node.path("net.d")).unwrap();
    fs::write(node.path("net.d").join(file), text.replace("LEASES", &leases)).unwrap();
}

#[test]
fn the_documented_walk_through_works() {
    let node = Node::new();
    configure(&node, "10-myptp.conf", MYPTP);
    let (before, container) = (node.snapshot(), Container::new());
    let netns = container.path();
    let result = tool(&node, &["add", "myptp", &netns]).result();
    let host_end = result["interfaces"][0]["name"].as_str().unwrap().to_owned();
    let macs = [&result["interfaces"][0]["mac"], &result["interfaces"][1]["mac"]];
    assert_eq!(
        result,
        json!({
            "cniVersion": "0.4.0",
            "interfaces": [
                {"name": host_end, "mac": macs[0]},
                {"name": "eth0", "mac": macs[1], "sandbox": netns},
            ],
            "ips": [{"version": "4", "interface": 1, "address": "172.16.29.2/24", "gateway": "172.16.29.1"}],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dns": {},
        })
    );
    let routes = |text: String| text.lines().map(|l| l.trim_end().to_owned()).collect::<Vec<_>>();
    assert_eq!(routes(node.sh("ip route")), [format!("172.16.29.2 dev {host_end} scope host")]);
    assert_eq!(
        routes(container.sh("ip route")),
        [
            "default via 172.16.29.1 dev eth0",
            "172.16.29.0/24 via 172.16.29.1 dev eth0 src 172.16.29.2",
            "172.16.29.1 dev eth0 scope link src 172.16.29.2",
        ]
    );
    assert!(container.pings("172.16.29.1"), "container to host");
    node.sh("ping -n -c 1 -W 2 172.16.29.2");
    tool(&node, &["check", "myptp", &netns]).ok();
    tool(&node, &["del", "myptp", &netns]).ok();
    assert_unchanged(&before, &node.snapshot());
    tool(&node, &["del", "myptp", &netns]).ok();
    assert_eq!(fs::read_dir(node.path("cache/results")).unwrap().count(), 0);
}

#[test]
fn the_walk_through_works_with_masquerading() {
    let node = Node::new();
    let keys = "\"type\": \"ptp\", \"ipMasq\": true,";
    configure(&node, "10-myptp.conf", &MYPTP.replace("\"type\": \"ptp\",", keys));
    let container = Container::new();
    let netns = container.path();
    // The first attachment creates nftables tables that remain.
    tool(&node, &["add", "myptp", &netns]).result();
    tool(&node, &["del", "myptp", &netns]).ok();
    let before = node.snapshot();
    tool(&node, &["add", "myptp", &netns]).result();
    assert!(node.sh("nft list ruleset").contains("172.16.29.3"));
    tool(&node, &["check", "myptp", &netns]).ok();
    tool(&node, &["del", "myptp", &netns]).ok();
    assert_unchanged(&before, &node.snapshot());
}

/// A list with a foreign IPAM plugin behind an interface plugin of cnibox, then a foreign chained
/// plugin.
fn chain(node: &Node) -> Value {
    let log = node.path("log").display().to_string();
    fs::create_dir_all(&log).unwrap();
    node.script(
        "their-ipam",
        &format!(
            "cat > {log}/ipam.$CNI_COMMAND\n\
             [ $CNI_COMMAND = ADD ] && echo '{{\"cniVersion\":\"0.4.0\",\"ips\":[{{\"version\":\"4\",\
             \"address\":\"10.7.0.5/24\",\"gateway\":\"10.7.0.1\"}}]}}'\ntrue"
        ),
    );
    node.script(
        "their-meta",
        &format!(
            "cat > {log}/meta.$CNI_COMMAND\n\
             [ $CNI_COMMAND = ADD ] && sed 's/.*\"prevResult\":\\({{.*}}\\),\"runtimeConfig.*/\\1/' {log}/meta.ADD\ntrue"
        ),
    );
    json!({
        "cniVersion": "1.1.0",
        "name": "chained",
        "plugins": [
            {"type": "bridge", "bridge": "br0", "isGateway": true, "capabilities": {"mac": true},
             "ipam": {"type": "their-ipam"}},
            {"type": "their-meta", "capabilities": {"portMappings": true}},
        ],
    })
}

#[test]
fn foreign_plugins_in_a_chain_get_their_capabilities() {
    let node = Node::new();
    configure(&node, "10-chain.conflist", &chain(&node).to_string());
    let container = Container::new();
    let caps = json!({"mac": "02:00:00:00:00:66", "portMappings": [{"hostPort": 80}]}).to_string();
    let call = |verb: &str| {
        tool(&node, &[verb, "chained", &container.path(), "-i", "net0"]).env("CAP_ARGS", &caps)
    };
    let result = call("add").result();
    assert_eq!(result["interfaces"][2]["name"], "net0");
    assert_eq!(result["interfaces"][2]["mac"], "02:00:00:00:00:66");
    assert_eq!(result["ips"][0]["address"], "10.7.0.5/24");
    let link = container.ip("link show net0");
    assert_eq!(link[0]["address"], "02:00:00:00:00:66");
    assert!(container.pings("10.7.0.1"));
    let request = |name: &str| -> Value {
        serde_json::from_str(&fs::read_to_string(node.path("log").join(name)).unwrap()).unwrap()
    };
    let meta = request("meta.ADD");
    assert_eq!(meta["runtimeConfig"], json!({"portMappings": [{"hostPort": 80}]}));
    assert_eq!(meta["prevResult"], result);
    assert_eq!(request("ipam.ADD")["runtimeConfig"], json!({"mac": "02:00:00:00:00:66"}));
    call("check").ok();
    assert_eq!(request("meta.CHECK")["prevResult"], result);
    assert!(request("ipam.CHECK")["prevResult"].is_object());
    call("del").ok();
    assert!(!container.try_sh("ip link show net0"));
    assert_eq!(request("meta.DEL")["prevResult"], result);
}

#[test]
fn status_and_gc_of_a_list_work() {
    let node = Node::new();
    let conf = json!({
        "cniVersion": "1.1.0",
        "name": "pool",
        "plugins": [{"type": "bridge", "bridge": "br0", "ipam": node.host_local(&["10.8.0.0/30"])}],
    });
    configure(&node, "10-pool.conflist", &conf.to_string());
    let (a, b) = (Container::new(), Container::new());
    tool(&node, &["status", "pool"]).ok();
    tool(&node, &["add", "pool", &a.path()]).result();
    let outcome = tool(&node, &["status", "pool"]).run();
    assert_eq!(outcome.status, Some(1));
    assert!(outcome.stderr.contains("no IP addresses available in range set: 10.8.0.1-10.8.0.2"));
    assert_eq!(tool(&node, &["add", "pool", &b.path()]).run().status, Some(1));

    tool(&node, &["gc", "pool", "--keep", &a.path()]).ok();
    assert_eq!(node.leases("pool"), ["10.8.0.2"]);
    tool(&node, &["check", "pool", &a.path()]).ok();
    tool(&node, &["gc", "pool"]).ok();
    assert!(node.leases("pool").is_empty());
    assert!(!a.try_sh("ip link show eth0"), "GC detaches what its cache lists");
    tool(&node, &["add", "pool", &b.path()]).result();
}

#[test]
fn a_second_add_leaves_the_first_alone() {
    let node = Node::new();
    configure(&node, "10-myptp.conf", MYPTP);
    let container = Container::new();
    tool(&node, &["add", "myptp", &container.path()]).result();
    assert_eq!(tool(&node, &["add", "myptp", &container.path()]).run().status, Some(1));
    assert!(container.pings("172.16.29.1"));
    assert_eq!(node.leases("myptp"), ["172.16.29.2"]);
    tool(&node, &["check", "myptp", &container.path()]).ok();
}

#[test]
fn help_is_printed_and_mistakes_are_explained() {
    let node = Node::new();
    let outcome = tool(&node, &["--help"]).run();
    assert_eq!(outcome.status, Some(0));
    assert!(outcome.stdout.contains("NETCONFPATH") && outcome.stdout.contains("Example"));
    let wrong = [&["frobnicate", "x", "y"][..], &["add"], &["add", "a", "/x", "--ifnam=y"]];
    for (args, status) in
        wrong.map(|args| (args, 2)).into_iter().chain([(&["add", "nosuch", "/x"][..], 1)])
    {
        let outcome = tool(&node, args).run();
        assert_eq!((outcome.status, outcome.stdout.as_str()), (Some(status), ""), "{args:?}");
        assert_eq!(outcome.stderr.trim_end().lines().count(), 1, "{outcome:?}");
    }
}

#[test]
fn cnibox_lists_and_runs_applets() {
    let node = Node::new();
    std::os::unix::fs::symlink(crate::support::node::executable(), node.bin().join("cnibox"))
        .unwrap();
    let list = node.tool("cnibox", &["list"]).run();
    let names: Vec<_> = list.stdout.lines().filter_map(|l| l.split(' ').next()).collect();
    let applets: Vec<_> = cnibox::testing::APPLETS.iter().map(|applet| applet.name).collect();
    assert_eq!(names, applets);
    assert!(node.tool("cnibox", &[]).run().stdout.contains("cnibox <applet>"));
    assert!(node.tool("cnibox", &["--version"]).run().stdout.starts_with("cnibox 0."));
    for (wrong, reason) in [
        (&["nosuch"][..], "no applet \"nosuch\""),
        (&["list", "--json"], "cnibox list: unexpected argument \"--json\""),
        (&["version", "--json"], "cnibox version: unexpected argument \"--json\""),
    ] {
        let outcome = node.tool("cnibox", wrong).run();
        assert_eq!((outcome.status, outcome.stdout.as_str()), (Some(2), ""), "{wrong:?}");
        assert!(outcome.stderr.contains(reason), "{outcome:?}");
    }
    let version = node.tool("cnibox", &["bridge"]).env("CNI_COMMAND", "VERSION").run();
    assert!(version.stdout.contains("\"supportedVersions\""));
}
