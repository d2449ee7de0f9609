//! `cnibox lint`: each mistake is reported once, with location and remedy; valid lists pass.

use std::fs;
use std::path::{Path, PathBuf};

use cnibox_tests::root;
use serde_json::{Value, json};

use crate::support::net::{merged, wire};
use crate::support::node::{Call, Node, Outcome, assert_unchanged, executable};

/// A call of `cnibox` with these arguments and this node's plugins.
fn cnibox(node: &Node, args: &[&str]) -> Call {
    let call = node.tool("cnitool", args).program(executable());
    call.env("CNI_PATH", &node.bin().display().to_string())
}

fn write(node: &Node, file: &str, text: &str) -> PathBuf {
    let path = node.path("net.d").join(file);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, text).unwrap();
    path
}

fn list(name: &str, plugins: &Value) -> String {
    json!({"cniVersion": "1.0.0", "name": name, "plugins": plugins}).to_string()
}

/// The output of lint for the directory's files, without the directory's name.
fn run(node: &Node, args: &[&str]) -> (Option<i32>, String) {
    let directory = node.path("net.d").display().to_string();
    let Outcome { status, stdout, stderr } =
        cnibox(node, &[&["lint", &directory], args].concat()).run();
    assert_eq!(stderr, "");
    (status, stdout.replace(&format!("{directory}/"), "").replace(&directory, "DIR"))
}

fn bridge(ipam: &Value) -> Value {
    json!({"type": "bridge", "bridge": "cni0", "isDefaultGateway": true, "ipMasq": true, "ipam": ipam})
}

fn pool(subnet: &str) -> Value {
    json!({"type": "host-local", "ranges": [[{"subnet": subnet}]], "routes": [{"dst": "0.0.0.0/0"}]})
}

fn portmap() -> Value {
    json!({"type": "portmap", "capabilities": {"portMappings": true}})
}

#[test]
fn correct_configurations_have_no_findings() {
    let node = Node::new();
    node.script("somebody-elses", "exit 1");
    wire(&node);
    let tuning = json!({"type": "tuning", "sysctl": {"net.core.somaxconn": "1024"}, "capabilities": {"mac": true},
        "runtimeConfig": {}, "args": {"any": {"thing": 1}}});
    let plugins = json!([
        with(&json!({"hairpinMode": true})),
        portmap(),
        {"type": "firewall", "ingressPolicy": "same-bridge"},
        tuning,
        {"type": "bandwidth", "capabilities": {"bandwidth": true}},
        {"type": "somebody-elses", "any": "key"},
    ]);
    write(&node, "10-pods.conflist", &list("pods", &plugins));
    let macvlan = json!({"cniVersion": "0.3.1", "name": "lan", "type": "macvlan", "master": "wire0",
        "capabilities": {"ips": true}, "ipam": {"type": "static"}});
    write(&node, "20-lan.conf", &macvlan.to_string());
    // As Nomad's default network.
    let plugins = json!([{"type": "loopback"}, {"type": "ptp", "ipMasq": true, "dns": {"nameservers": ["10.0.0.1"]},
        "ipam": merged(&pool("fd00:7::/64"), &json!({"routes": [{"dst": "::/0"}]}))}, {"type": "sbr"}]);
    write(&node, "30-six.conflist", &list("six", &plugins));
    write(&node, "README", "is no configuration");
    let before = node.snapshot();
    let whole = (Some(0), "no mistake was found\n".to_owned());
    assert_eq!(run(&node, &[]), whole);
    assert_eq!(run(&node, &["--offline"]), whole);
    assert_eq!(run(&node, &["--json"]), (Some(0), "[]\n".to_owned()));
    assert_unchanged(&before, &node.snapshot());
    fs::remove_file(node.bin().join("somebody-elses")).unwrap();
    let (status, lines) = run(&node, &[]);
    let said = "error: plugin 5 \"somebody-elses\": failed to find plugin \"somebody-elses\" in";
    assert!(status == Some(1) && lines.contains(said), "{lines}");
    assert_eq!(run(&node, &["--offline"]), whole);
    fs::remove_dir_all(node.bin()).unwrap();
    assert!(!run(&node, &[]).1.contains("somebody-elses"), "a machine without plugins is no node");
}

/// Asserts that a list of these plugins yields exactly one message, at a key of this name.
#[track_caller]
fn assert_told(node: &Node, plugins: &Value, key: &str, said: &str) {
    let text = list("pods", plugins);
    write(node, "10-pods.conflist", &text);
    let (found, lines) = run(node, &["--offline"]);
    let quoted = format!("\"{key}\"");
    let places = text.match_indices(&quoted).map(|(i, _)| i + 1);
    let expected: Vec<String> =
        places.map(|column| format!("10-pods.conflist:1:{column}: {said}\n")).collect();
    assert!(expected.contains(&lines), "{lines}\n{expected:?}");
    assert_eq!(found, Some(1), "{lines}");
}

/// The bridge of the pods with additional or replaced keys.
fn with(keys: &Value) -> Value {
    merged(&bridge(&pool("10.88.0.0/16")), keys)
}

/// A bridge with a host-local range of these keys.
fn ranged(keys: &Value) -> Value {
    let range = merged(&json!({"subnet": "10.88.0.0/16"}), keys);
    json!([bridge(&json!({"type": "host-local", "ranges": [[range]]}))])
}

#[test]
fn unknown_keys_and_wrong_values_are_reported() {
    let node = Node::new();
    for (plugins, key, said) in [
        (
            json!([with(&json!({"isDefaultGatway": true}))]),
            "isDefaultGatway",
            r#"warning: plugin 0 "bridge": unknown key "isDefaultGatway"; did you mean "isDefaultGateway"?"#,
        ),
        (
            ranged(&json!({"colour": "red"})),
            "colour",
            r#"warning: plugin 0 "bridge": unknown key "colour"; remove it"#,
        ),
        (
            json!([with(&json!({"mtu": "15"}))]),
            "mtu",
            r#"error: plugin 0 "bridge": failed to load netconf: expected a number of bytes or "auto", found the text "15"; in "mtu""#,
        ),
        (
            json!([bridge(&pool("10.88.0.0/33"))]),
            "subnet",
            r#"error: plugin 0 "bridge": invalid CIDR address: 10.88.0.0/33; in "ranges[0][0].subnet": write an address and the length of its prefix, as in 10.1.0.0/16"#,
        ),
        (
            ranged(&json!({"gateway": "10.89.0.1"})),
            "type",
            r#"warning: plugin 0 "bridge": the gateway 10.89.0.1 is not in the subnet 10.88.0.0/16; containers cannot reach it: choose an address of the subnet"#,
        ),
        (
            ranged(&json!({"rangeStart": "10.88.0.9", "rangeEnd": "10.88.0.8"})),
            "type",
            r#"error: plugin 0 "bridge": invalid range set 0: RangeStart 10.88.0.9 not in network 10.88.0.0/16; rangeStart is above rangeEnd: swap them"#,
        ),
        (
            json!([{"type": "bridge", "bridge": "a-name-that-is-too-long"}]),
            "type",
            r#"error: plugin 0 "bridge": bridge name "a-name-that-is-too-long": interface name is too long; interface name should be less than 16 characters"#,
        ),
        (
            json!([{"type": "bridge", "isGateway": true}]),
            "type",
            r#"warning: plugin 0 "bridge": "isGateway" has no effect without addresses; add "ipam", or remove the key"#,
        ),
    ] {
        assert_told(&node, &plugins, key, said);
    }
}

#[test]
fn missing_addresses_and_capabilities_are_reported() {
    let node = Node::new();
    for (plugins, key, said) in [
        (
            json!([{"type": "bridge", "ipam": {"subnet": "10.88.0.0/16"}}]),
            "ipam",
            r#"warning: plugin 0 "bridge": no address is allocated: "ipam" has no "type"; add a type, such as "host-local""#,
        ),
        (
            json!([bridge(&json!({"type": "host-lokal", "subnet": "10.88.0.0/16"}))]),
            "type",
            r#"warning: plugin 0 "bridge": unknown IPAM plugin "host-lokal"; did you mean "host-local"?"#,
        ),
        (
            json!([bridge(&json!({"type": "ptp"}))]),
            "type",
            r#"error: plugin 0 "bridge": "ptp" is not an IPAM plugin; choose host-local, static or dhcp"#,
        ),
        (
            json!([{"type": "brigde"}, portmap()]),
            "type",
            r#"warning: plugin 0 "brigde": unknown plugin; did you mean "bridge"?"#,
        ),
        (
            json!([with(&json!({})), {"type": "portmap"}]),
            "type",
            r#"warning: plugin 1 "portmap": no port is mapped: the capability is not enabled; add "capabilities": {"portMappings": true}"#,
        ),
        (
            json!([with(&json!({"capabilities": {"rate": true}}))]),
            "capabilities",
            r#"warning: plugin 0 "bridge": unused capability "rate"; remove it"#,
        ),
        (
            json!([with(&json!({"capabilities": {"ipranges": true}}))]),
            "capabilities",
            r#"warning: plugin 0 "bridge": unused capability "ipranges"; did you mean "ipRanges"?"#,
        ),
        (
            json!([with(&json!({})), {"type": "bandwidth"}]),
            "type",
            r#"warning: plugin 1 "bandwidth": nothing is limited: there are no rates, and the capability is not enabled; add "capabilities": {"bandwidth": true}, or rates and bursts"#,
        ),
    ] {
        assert_told(&node, &plugins, key, said);
    }
}

#[test]
fn plugins_in_the_wrong_position_are_reported() {
    let node = Node::new();
    for (plugins, key, said) in [
        (
            json!([portmap(), with(&json!({}))]),
            "type",
            r#"error: plugin 0 "portmap": it needs a plugin before it that creates an interface; move it behind that plugin"#,
        ),
        (
            json!([{"type": "static"}]),
            "type",
            r#"error: plugin 0 "static": it allocates addresses for other plugins, and creates no interface; set it as "type" in the "ipam" of another plugin"#,
        ),
        (
            json!([with(&json!({})), {"type": "ptp", "ipam": pool("10.89.0.0/16")}]),
            "type",
            r#"warning: plugin 1 "ptp": a plugin before it creates the interface; move it to a network of its own"#,
        ),
        (
            json!([with(&json!({})), {"type": "tc-redirect-tap"}, {"type": "tuning", "mtu": 1400}]),
            "mtu",
            r#"warning: plugin 2 "tuning": the machine behind "tc-redirect-tap" keeps the MTU and the MAC from before; put "tuning" before "tc-redirect-tap""#,
        ),
        (
            json!([with(&json!({})), {"type": "egress", "policy": "deny", "serve": []}, {"type": "egress", "policy": "deny", "serve": []}]),
            "type",
            r#"error: plugin 2 "egress": there is an "egress" before it, and ADD refuses a second policy; write one policy that allows what both allow"#,
        ),
        (
            json!([with(&json!({})), {"type": "egress", "policy": "deny", "serve": []}, {"type": "tuning", "mac": "02:00:00:00:00:01"}]),
            "mac",
            r#"warning: plugin 2 "tuning": the policy of "egress" is for the MAC address before tuning changes it; put "tuning" before "egress""#,
        ),
        (
            json!([{"type": "tc-redirect-tap"}, with(&json!({}))]),
            "type",
            r#"error: plugin 0 "tc-redirect-tap": it needs a plugin before it that creates an interface; move it behind that plugin"#,
        ),
        (
            json!([with(&json!({})), {"type": "tuning", "sysctl": {"kernel.pid_max": "1"}}]),
            "type",
            r#"error: plugin 1 "tuning": invalid net sysctl key: "kernel/pid_max"; only keys below "net" can be set"#,
        ),
    ] {
        assert_told(&node, &plugins, key, said);
    }
}

#[test]
fn wrong_forms_of_files_are_reported() {
    let node = Node::new();
    let plugin = bridge(&pool("10.88.0.0/16"));
    let single = merged(&json!({"cniVersion": "1.0.0", "name": "n"}), &plugin).to_string();
    let many = list("n", &json!([plugin]));
    for (file, text, said) in [
        (
            "a.conflist",
            "{\n  \"name\": \"n\",\n}",
            "a.conflist:3:1: error: error parsing configuration list: expected a value, found '}' at line 3 column 1; delete the comma before it\n",
        ),
        (
            "a.conflist",
            "",
            "a.conflist:1:1: error: error parsing configuration list: unexpected end of JSON input at line 1 column 1; the document is empty or was cut short: write it again\n",
        ),
        (
            "a.conflist",
            &single,
            "a.conflist: error: this is the configuration of one plugin, not a list; write \"plugins\": [ ... ] around it, or name the file .conf\n",
        ),
        (
            "a.conf",
            &many,
            "a.conf: error: this is a list of plugins; name the file .conflist: others hold one plugin\n",
        ),
        (
            "a.conf",
            &many.replace("plugins", "plugin"),
            "a.conf: error: error parsing configuration: missing 'type'; add \"type\", the name of the plugin\n",
        ),
        (
            "a.conflist",
            &many.replace("\"1.0.0\"", "\"1.2.0\""),
            "a.conflist:1:2: error: unknown CNI version \"1.2.0\"; write \"1.1.0\"; there are 0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0\n\
             a.conflist:1:NN: error: plugin 0 \"bridge\": incompatible CNI versions; config is \"1.2.0\", plugin supports [\"0.1.0\" \"0.2.0\" \"0.3.0\" \"0.3.1\" \"0.4.0\" \"1.0.0\" \"1.1.0\"]; write \"1.1.0\"\n",
        ),
        (
            "a.conflist",
            &many.replace("\"n\"", "\"my net\""),
            "a.conflist:1:23: error: invalid characters found in network name; my net; use letters, digits, \".\", \"_\" and \"-\", the first a letter or a digit\n\
             a.conflist:1:NN: error: plugin 0 \"bridge\": invalid characters found in network name; my net; use letters, digits, \".\", \"_\" and \"-\", the first a letter or a digit\n",
        ),
        (
            "a.conflist",
            &many.replace("\"cniVersion\":\"1.0.0\",", ""),
            "a.conflist:1:2: warning: \"cniVersion\" is missing, which means 0.1.0; add the intended version, such as \"1.0.0\"\n",
        ),
        (
            "a.conflist",
            &many.replace("cniVersion", "cniversion"),
            "a.conflist:1:2: warning: list: unknown key \"cniversion\"; did you mean \"cniVersion\"?\n\
             a.conflist:1:23: warning: \"cniVersion\" is missing, which means 0.1.0; add the intended version, such as \"1.0.0\"\n",
        ),
    ] {
        drop(fs::remove_dir_all(node.path("net.d")));
        write(&node, file, text);
        let (found, lines) = run(&node, &["--offline"]);
        let column = text.find("\"type\":\"bridge\"").map_or(0, |i| i + 1);
        assert_eq!(lines, said.replace("NN", &column.to_string()), "{text}");
        assert_eq!(found, Some(1), "{text}");
    }
    fs::remove_dir_all(node.path("net.d")).unwrap();
    fs::create_dir(node.path("net.d")).unwrap();
    let empty = "DIR: error: no network configuration: runtimes report \"cni plugin not initialized\"; install a file that ends in .conflist\n";
    assert_eq!(run(&node, &[]), (Some(1), empty.to_owned()));
    std::os::unix::fs::symlink("/no/such", node.path("net.d/a.conflist")).unwrap();
    let gone = "a.conflist: error: read the file: no such file or directory\n";
    assert_eq!(run(&node, &[]), (Some(1), gone.to_owned()));
}

#[test]
fn conflicts_between_networks_are_reported() {
    let node = Node::new();
    let networks = [
        ("10-a.conflist", "a", "10.88.0.0/16"),
        ("20-b.conflist", "b", "10.88.7.0/24"),
        ("30-a.conflist", "a", "10.89.0.0/16"),
        ("40-c.conflist", "c", "10.90.0.0/16"),
    ];
    for (file, name, subnet) in networks {
        write(&node, file, &list(name, &json!([bridge(&pool(subnet))])));
    }
    let directory = node.path("net.d").display().to_string();
    let said = "20-b.conflist:1:23: warning: subnet 10.88.7.0/24 overlaps 10.88.0.0/16 of network \"a\" in 10-a.conflist; two containers may get the same address: choose another subnet\n\
        30-a.conflist:1:23: warning: network \"a\" is already in 10-a.conflist; runtimes use the first of them: rename or remove one\n";
    assert_eq!(run(&node, &["--offline"]), (Some(1), said.to_owned()));
    let object = |file: &str, network: &str, message: String, remedy: &str| {
        json!({"file": format!("{directory}/{file}"), "network": network, "line": 1, "column": 23,
            "object": format!("{directory}/{file}:1:23"), "severity": "warning", "problem": message,
            "remedy": remedy})
    };
    let printed = cnibox(&node, &["lint", &directory, "--offline", "--json"]).run().stdout;
    let overlap = format!(
        "subnet 10.88.7.0/24 overlaps 10.88.0.0/16 of network \"a\" in {directory}/10-a.conflist"
    );
    assert_eq!(
        serde_json::from_str::<Value>(&printed).unwrap(),
        json!([
            object(
                "20-b.conflist",
                "b",
                overlap,
                "two containers may get the same address: choose another subnet"
            ),
            object(
                "30-a.conflist",
                "a",
                format!("network \"a\" is already in {directory}/10-a.conflist"),
                "runtimes use the first of them: rename or remove one"
            ),
        ])
    );
}

#[test]
fn conflicts_with_the_node_are_reported() {
    let node = Node::new();
    wire(&node);
    let before = node.snapshot();
    let lan = |keys: Value| {
        let lan = json!({"type": "macvlan", "master": "wire0", "ipam": pool("10.88.0.0/16")});
        list("lan", &json!([merged(&lan, &keys)]))
    };
    for (text, said) in [
        (lan(json!({"master": "gone0"})), "failed to lookup master \"gone0\": Link not found"),
        (lan(json!({"mtu": 9000})), "invalid MTU 9000, must be [0, master MTU(1500)]"),
    ] {
        write(&node, "10-lan.conflist", &text);
        assert_eq!(run(&node, &["--offline"]).0, Some(0), "{text}");
        let (status, lines) = run(&node, &[]);
        let said = format!("error: plugin 0 \"macvlan\": on this node: {said}");
        assert!(lines.starts_with("10-lan.conflist:1:") && lines.contains(&said), "{lines}");
        assert_eq!((status, lines.lines().count()), (Some(1), 1), "{lines}");
    }
    assert_unchanged(&before, &node.snapshot());
}

#[test]
fn subnets_that_the_node_routes_elsewhere_are_reported() {
    let node = Node::new();
    node.sh("ip link add docker0 up type bridge && ip addr add 10.88.0.1/16 dev docker0 && \
             ip link add cni0 up type bridge && ip addr add 10.89.0.1/16 dev cni0 && \
             ip route add 10.90.0.0/16 via 10.89.0.7");
    let ptp = |subnet: &str| json!({"type": "ptp", "ipam": pool(subnet)});
    for (plugin, is_told) in [
        (bridge(&pool("10.88.7.0/24")), true),
        (bridge(&pool("10.64.0.0/10")), true),
        (ptp("10.88.7.0/24"), true),
        (bridge(&pool("10.89.0.0/16")), false),
        (bridge(&pool("10.90.0.0/16")), false),
        (json!({"type": "macvlan", "master": "docker0", "ipam": pool("10.88.0.0/16")}), false),
    ] {
        write(&node, "10-pods.conflist", &list("pods", &json!([plugin])));
        let (status, lines) = run(&node, &[]);
        let said = "on this node: 10.88.0.0/16, in or around the subnet 10";
        let link =
            "is routed to \"docker0\"; containers, or hosts behind that link, are not reached";
        assert_eq!(lines.contains(said) && lines.contains(link), is_told, "{plugin}: {lines}");
        assert_eq!(status, Some(is_told.into()), "{plugin}: {lines}");
        assert_eq!(run(&node, &["--offline"]).0, Some(0), "{plugin}");
    }
}

/// `portmap::traffic::own_ports_need_hairpin_mode_with_br_netfilter` has the packets.
#[test]
fn missing_hairpin_mode_for_own_ports_is_reported() {
    let node = Node::new();
    let key = "/proc/sys/net/bridge/bridge-nf-call-iptables";
    if !Path::new(key).exists() {
        println!("skipped: no br_netfilter");
        return;
    }
    let text =
        "note: plugin 1 \"portmap\": on this node: a container does not reach its own mapped ports";
    for (value, keys, is_noted) in [
        ("1", json!({}), true),
        ("0", json!({}), false),
        ("1", json!({"hairpinMode": true}), false),
        ("1", json!({"promiscMode": true}), true),
    ] {
        node.sh(&format!("echo {value} > {key}"));
        write(&node, "10-pods.conflist", &list("pods", &json!([with(&keys), portmap()])));
        let (status, lines) = run(&node, &[]);
        assert_eq!(lines.contains(text), is_noted, "{value} {keys}: {lines}");
        assert!(status == Some(0) && lines.ends_with("no mistake was found\n"), "{lines}");
        assert_eq!(run(&node, &["--offline"]).1, "no mistake was found\n");
    }
}

#[test]
fn cnitool_validate_and_install_use_lint() {
    let node = Node::new();
    let directory = node.path("net.d").display().to_string();
    let bad = list("bad", &json!([merged(&bridge(&pool("10.88.0.0/16")), &json!({"mtu": "15"}))]));
    let odd = list("odd", &json!([merged(&bridge(&pool("10.89.0.0/16")), &json!({"mut": 1500}))]));
    let (bad, odd) = (write(&node, "10-bad.conflist", &bad), write(&node, "20-odd.conflist", &odd));
    let validate = |name| {
        let args = ["cnitool", "validate", name, "--conf-dir", &directory];
        let Outcome { status, stdout, stderr } = cnibox(&node, &args).run();
        (status, stdout, stderr.replace(&format!("{directory}/"), ""))
    };
    let (status, stdout, stderr) = validate("bad");
    assert_eq!((status, stdout.as_str()), (Some(1), ""));
    assert!(stderr.contains("10-bad.conflist:1:") && stderr.contains("in \"mtu\""), "{stderr}");
    let (status, stdout, stderr) = validate("odd");
    assert_eq!(
        (status, stdout.as_str()),
        (Some(0), "network odd\nversion 1.0.0\nplugins bridge\n")
    );
    assert!(
        stderr.contains("20-odd.conflist:1:") && stderr.contains("did you mean \"mtu\"?"),
        "{stderr}"
    );

    let install = |file: &Path| {
        let (target, root) = ("/plugins", node.path("root").display().to_string());
        let file = file.display().to_string();
        cnibox(&node, &["install", target, "--root", &root, "--conflist", &file]).run()
    };
    let outcome = install(&bad);
    assert_eq!(outcome.status, Some(1), "{outcome:?}");
    assert!(outcome.stderr.contains("in \"mtu\""), "{outcome:?}");
    assert!(!crate::support::node::exists(node.path("root/plugins")), "nothing is installed");
    let outcome = install(&odd);
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    assert!(outcome.stderr.contains("unknown key \"mut\""), "{outcome:?}");
    assert!(crate::support::node::exists(node.path("root/etc/cni/net.d/20-odd.conflist")));
}

/// The paths in the first column of the tables on a plugin's page.
fn documented(plugin: &str) -> Vec<String> {
    let page = root().join(format!("docs/plugins/{plugin}.md"));
    let page = fs::read_to_string(page).unwrap();
    let rows = page.lines().filter(|line| line.starts_with("| `"));
    let cells: Vec<&str> = rows.filter_map(|row| row.split('|').nth(1)).collect();
    let spans = cells.iter().flat_map(|cell| cell.split('`').skip(1).step_by(2));
    spans.map(str::to_owned).collect()
}

/// A document with only a null value at a path such as `ranges[][].subnet`.
fn nested(path: &str) -> Value {
    let Some((first, rest)) = path.split_once('.') else {
        return json!({path.trim_end_matches("[]"): null});
    };
    let depth = first.matches("[]").count();
    let value = (0..depth).fold(nested(rest), |value, _| json!([value]));
    json!({first.trim_end_matches("[]"): value})
}

#[test]
fn lint_knows_every_documented_key() {
    let node = Node::new();
    let mut seen = 0;
    for applet in
        cnibox::testing::APPLETS.iter().filter(|a| a.kind != cnibox::testing::AppletKind::Tool)
    {
        let name = applet.name;
        for path in documented(name).iter().filter(|path| !path.starts_with("runtimeConfig")) {
            // The keys of host-local's ranges and portmap's ports have separate tables.
            let path =
                if path.starts_with("ranges") { format!("ipam.{path}") } else { path.clone() };
            if path.starts_with("portMappings") {
                continue;
            }
            let conf = match name {
                "host-local" | "static" | "dhcp" => {
                    merged(&nested(&path), &json!({"type": "macvlan", "ipam": {"type": name}}))
                }
                _ => merged(&nested(&path), &json!({"type": name})),
            };
            write(&node, "10-n.conflist", &list("n", &json!([conf])));
            let (_, lines) = run(&node, &["--offline"]);
            assert!(!lines.contains("unknown key"), "{name}: {path}: {lines}");
            seen += 1;
        }
    }
    assert!(seen > 80, "{seen} keys");
}

#[test]
fn misplaced_keys_are_reported_with_their_level() {
    let node = Node::new();
    for (plugins, key, said) in [
        (
            json!([bridge(&pool("10.88.0.0/16")), {"type": "portmap", "capabilities": {"portMappings": true, "snat": true}}]),
            "capabilities",
            r#"warning: plugin 1 "portmap": unused capability "snat"; "snat" is a key of the plugin: write it beside "capabilities""#,
        ),
        (
            json!([bridge(&pool("10.88.0.0/16")), {"type": "portmap", "noSnat": true, "capabilities": {"portMappings": true}}]),
            "noSnat",
            r#"warning: plugin 1 "portmap": unknown key "noSnat"; write "snat": false"#,
        ),
        (
            json!([with(&json!({"args": {"ips": ["10.88.0.9"]}}))]),
            "ips",
            r#"warning: plugin 0 "bridge": "ips" of "args" is not read; write "args": {"cni": {"ips": ...}}"#,
        ),
        (
            json!([bridge(&merged(&pool("10.88.0.0/16"), &json!({"gateway": "10.88.0.254"})))]),
            "gateway",
            r#"warning: plugin 0 "bridge": "gateway" beside "ranges" is not read; in "gateway": move it into an object of "ranges""#,
        ),
        (
            json!([bridge(&pool("10.88.0.0/16")), {"type": "firewall", "backend": "nftables", "iptablesAdminChainName": "X"}]),
            "type",
            r#"warning: plugin 1 "firewall": "iptablesAdminChainName" has no effect with the back end nftables; add the rules to the chain admin, as in: nft add rule inet cnibox_firewall admin ip daddr 192.0.2.1 reject"#,
        ),
        (
            json!([bridge(
                &json!({"type": "dhcp", "routes": [{"dst": "10.9.0.0/16"}, {"dst": "fd00::/8"}]})
            )]),
            "type",
            r#"warning: plugin 0 "bridge": the route to fd00::/8 is of IPv6, but no address is; remove the route, or add IPv6 addresses"#,
        ),
        (
            json!([bridge(&json!({"type": "dhcp"})), {"type": "tuning", "mac": "02:00:00:00:00:01"}]),
            "mac",
            r#"warning: plugin 1 "tuning": the DHCP lease is for the MAC before tuning changes it; bridge, macvlan and dummy take a MAC themselves: give it to "bridge""#,
        ),
        (
            json!([bridge(&merged(&pool("fd00:1::/64"), &json!({"routes": [{"dst": "::/0"}]}))), {"type": "tuning", "mtu": 1200}]),
            "mtu",
            r#"warning: plugin 1 "tuning": with mtu 1200 the interface has no IPv6 address; IPv6 needs an MTU of 1280 or more: raise "mtu", or remove the IPv6 range of "ipam""#,
        ),
    ] {
        assert_told(&node, &plugins, key, said);
    }
}

#[test]
fn unknown_keys_of_a_list_are_accepted() {
    let node = Node::new();
    let list = |keys: &Value| {
        let plugins =
            json!([with(&json!({"_note": 1, "//": "x", "Documentation": "/doc"})), portmap()]);
        let list = json!({"cniVersion": "1.0.0", "name": "pods", "plugins": plugins});
        write(&node, "10-pods.conflist", &merged(&list, keys).to_string());
        run(&node, &["--offline"])
    };
    let whole = (Some(0), "no mistake was found\n".to_owned());
    assert_eq!(list(&json!({"nerdctlID": "1", "nerdctlLabels": {}, "x-owner": "me"})), whole);
    for key in ["capabilities", "args", "isGateway", "snat"] {
        let (status, said) = list(&json!({key: {"ips": true}}));
        let text =
            format!("list: \"{key}\" beside \"plugins\" is not read; move it into the object");
        assert!(status == Some(1) && said.contains(&text), "{key}: {said}");
    }
}

#[test]
fn unusable_values_are_reported() {
    let node = Node::new();
    let routed =
        |dst: &str| bridge(&merged(&pool("10.88.0.0/16"), &json!({"routes": [{"dst": dst}]})));
    let fixed = |address: &str| json!({"type": "static", "addresses": [{"address": address, "gateway": "10.9.0.1"}]});
    for (plugin, said) in [
        (ranged(&json!({"rangeEnd": "10.88.255.255"}))[0].clone(), "broadcast address"),
        (ranged(&json!({"rangeStart": "10.88.0.0"}))[0].clone(), "network address"),
        (
            ranged(&json!({"gateway": "10.88.255.255"}))[0].clone(),
            "gateway 10.88.255.255 is the broadcast",
        ),
        (routed("::/0"), "the route to ::/0 is of IPv6, but no address is"),
        (routed("10.88.0.0/0"), "the route to 10.88.0.0/0 is the default route"),
        (bridge(&fixed("10.1.0.5/32")), "the gateway 10.9.0.1 is in no subnet of the interface"),
    ] {
        write(&node, "10-pods.conflist", &list("pods", &json!([plugin])));
        let (status, lines) = run(&node, &["--offline"]);
        assert!(status == Some(1) && lines.contains(said), "{said}: {lines}");
    }
    let ranges = json!([{"type": "bridge", "capabilities": {"ipRanges": true}, "ipam": {"type": "host-local"}}]);
    write(&node, "10-pods.conflist", &list("pods", &ranges));
    assert_eq!(run(&node, &[]).0, Some(0));
}
