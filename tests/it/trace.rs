//! The flight recorder: contents, location, and the output of `cnibox trace`.

use std::fs;

use nix::libc::{RTM_NEWADDR, RTM_NEWLINK, RTM_NEWROUTE};
use serde_json::{Value, json};

use crate::support::node::{Call, Container, Node, Outcome, executable};
use crate::support::strace;

const TRACES: &str = "/run/cnibox/traces.jsonl";
const FAILED: &str = "/run/cnibox/failed.jsonl";
const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

/// The spans of each line of a ring, the call first, validated as OTLP JSON.
fn calls(path: &str) -> Vec<Vec<Value>> {
    let text = fs::read_to_string(path).unwrap_or_default();
    let spans = |line: &str| {
        let line: Value = serde_json::from_str(line).unwrap();
        let resource = &line["resourceSpans"][0];
        let service = &resource["resource"]["attributes"][0];
        assert_eq!(*service, json!({"key": "service.name", "value": {"stringValue": "cnibox"}}));
        let spans = resource["scopeSpans"][0]["spans"].as_array().unwrap().clone();
        spans.iter().for_each(assert_well_formed);
        spans
    };
    text.lines().map(spans).collect()
}

fn assert_well_formed(span: &Value) {
    let is_hex = |key: &str, length: usize| {
        let id = span[key].as_str().unwrap();
        id.len() == length && id.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    };
    assert!(is_hex("traceId", 32) && is_hex("spanId", 16), "{span}");
    assert!(span.get("parentSpanId").is_none() || is_hex("parentSpanId", 16), "{span}");
    assert_eq!(span["kind"], 1, "{span}");
    assert!(time(span, "startTimeUnixNano") <= time(span, "endTimeUnixNano"), "{span}");
}

fn time(span: &Value, key: &str) -> u64 {
    span[key].as_str().unwrap().parse().unwrap()
}

fn attribute(span: &Value, key: &str) -> String {
    let attributes = span["attributes"].as_array().unwrap();
    let found = attributes.iter().find(|attribute| attribute["key"] == key);
    found.map_or(String::new(), |attribute| {
        let value = &attribute["value"];
        value["stringValue"].as_str().or(value["intValue"].as_str()).unwrap().to_owned()
    })
}

/// Asserts that each span has a parent, except for the first, and lies within the parent's time.
fn assert_nested(spans: &[Value]) {
    for span in &spans[1..] {
        let parent = spans.iter().find(|parent| parent["spanId"] == span["parentSpanId"]).unwrap();
        let [start, end] = ["startTimeUnixNano", "endTimeUnixNano"];
        assert!(time(parent, start) <= time(span, start) && time(span, end) <= time(parent, end));
    }
}

fn conf(node: &Node) -> Value {
    json!({"name": "pods", "cniVersion": "1.1.0", "type": "bridge", "bridge": "cni0", "isDefaultGateway": true,
           "ipam": node.host_local(&["10.1.0.0/24"])})
}

fn add(node: &Node, container: &Container) -> Call {
    node.call("bridge", "ADD").conf(&conf(node)).netns(&container.path())
}

fn parent(flags: &str) -> String {
    format!("00-{TRACE}-b7ad6b7169203331-{flags}")
}

fn trace(node: &Node, args: &[&str]) -> Outcome {
    node.tool("cnibox", &[&["trace"], args].concat()).program(executable()).run()
}

#[test]
fn a_disabled_trace_makes_no_system_call() {
    let (node, container) = (Node::new(), Container::new());
    let count = |call: &Call| {
        let (outcome, calls) = strace::record(&node, call);
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        node.call("bridge", "DEL").conf(&conf(&node)).netns(&container.path()).ok();
        calls
    };
    let off = count(&add(&node, &container));
    let is_of_recorder = |text: &str| text.contains("/run/cnibox") && !text.contains("/run/cni/");
    let odd = off.iter().find(|call| {
        is_of_recorder(&call.text) || call.name.starts_with("clock_") || call.name == "gettimeofday"
    });
    assert!(odd.is_none(), "{odd:?}");
    let on = count(&add(&node, &container).env("CNI_LOG", "trace"));
    assert!(
        on.iter().any(|call| is_of_recorder(&call.text)),
        "the recorder is seen where it is on"
    );
    assert!(on.len() <= off.len() + 12, "{} system calls instead of {}", on.len(), off.len());
}

#[test]
fn a_chain_is_one_trace() {
    let (node, container) = (Node::new(), Container::new());
    let mut bridge = conf(&node);
    bridge["ipMasq"] = json!(true);
    bridge["ipMasqBackend"] = json!("nftables");
    let plugins = json!([bridge, {"type": "portmap", "backend": "nftables", "capabilities": {"portMappings": true}}]);
    fs::create_dir(node.path("net.d")).unwrap();
    let list = json!({"name": "pods", "cniVersion": "1.1.0", "plugins": plugins});
    fs::write(node.path("net.d/10-pods.conflist"), list.to_string()).unwrap();
    let below = |name: &str| node.path(name).display().to_string();
    let args = [
        "add",
        "pods",
        &container.path(),
        "--conf-dir",
        &below("net.d"),
        "--cache-dir",
        &below("cache"),
        "--plugin-path",
        &below("bin"),
        "--cap-args",
        r#"{"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}]}"#,
    ];
    node.tool("cnitool", &args).env("CNI_LOG", "trace").printed();
    let calls = calls(TRACES);
    let names: Vec<&str> = calls.iter().map(|spans| spans[0]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["bridge ADD", "portmap ADD", "cnitool add"]);
    let tool = &calls[2];
    assert!(tool[0].get("parentSpanId").is_none(), "nobody called cnitool");
    for (spans, plugin) in calls.iter().zip(["bridge", "portmap"]) {
        assert_nested(spans);
        assert_eq!(spans[0]["traceId"], tool[0]["traceId"]);
        let parent = tool.iter().find(|span| span["spanId"] == spans[0]["parentSpanId"]).unwrap();
        assert_eq!(parent["name"], "plugin");
        let executable = below(&format!("bin/{plugin}"));
        assert_eq!(attribute(parent, "process.executable.path"), executable);
        let own = ["cni.plugin", "cni.command", "cni.network", "cni.ifname"]
            .map(|key| attribute(&spans[0], key));
        assert_eq!(own, [plugin, "ADD", "pods", "eth0"]);
        let is_commit = |span: &Value| !attribute(span, "nf_tables.changes").is_empty();
        assert!(spans.iter().any(is_commit), "{plugin} changed nf_tables: {spans:?}");
    }
    let delegate = calls[0].iter().find(|span| span["name"] == "delegate").unwrap();
    assert_eq!(attribute(delegate, "cni.plugin"), "host-local");
    let requests: Vec<String> =
        calls[0].iter().map(|span| attribute(span, "netlink.type")).collect();
    for request in [RTM_NEWLINK, RTM_NEWADDR, RTM_NEWROUTE] {
        assert!(requests.contains(&request.to_string()), "{request}: {requests:?}");
    }

    let Outcome { status, stdout, stderr } =
        trace(&node, &["show", calls[0][0]["traceId"].as_str().unwrap()]);
    assert_eq!((status, &*stderr), (Some(0), ""));
    let indented = |text: &str| stdout.lines().any(|line| line.contains(&format!("  {text}")));
    for text in [
        "cnitool add",
        "  plugin ",
        "    bridge ADD",
        "      delegate host-local ADD",
        "RTM_NEWLINK",
    ] {
        assert!(indented(text) || stdout.contains(text), "{text}: {stdout}");
    }
    let Outcome { stdout, .. } = trace(&node, &["ls"]);
    assert_eq!(stdout.lines().count(), 4, "{stdout}");
    assert!(stdout.lines().last().unwrap().ends_with(" ok"), "{stdout}");
}

#[test]
fn a_call_continues_the_callers_trace() {
    let (node, container) = (Node::new(), Container::new());
    // A foreign plugin gets the span of its call as parent.
    node.script(
        "theirs",
        "cat >/dev/null; echo $TRACEPARENT >$0.parent; echo '{\"ips\":[{\"address\":\"10.1.0.9/24\"}]}'",
    );
    let mut conf = conf(&node);
    conf["ipam"] = json!({"type": "theirs"});
    let call = |verb| node.call("bridge", verb).conf(&conf).netns(&container.path());
    for untraced in ["", "00-1-2-03", &parent("00"), &parent("01-more"), "01"] {
        call("ADD").env("TRACEPARENT", untraced).result();
        call("DEL").env("TRACEPARENT", untraced).ok();
        assert_eq!(calls(TRACES).len(), 0, "{untraced:?}");
    }
    call("ADD").env("TRACEPARENT", &parent("01")).result();
    let calls = calls(TRACES);
    let [spans] = calls.as_slice() else { panic!("{calls:?}") };
    assert_nested(spans);
    assert_eq!(
        (&spans[0]["traceId"], &spans[0]["parentSpanId"]),
        (&json!(TRACE), &json!("b7ad6b7169203331"))
    );
    let plugin = spans.iter().find(|span| span["name"] == "plugin").unwrap();
    let handed = fs::read_to_string(node.bin().join("theirs.parent")).unwrap();
    assert_eq!(handed.trim(), format!("00-{TRACE}-{}-01", plugin["spanId"].as_str().unwrap()));
}

#[test]
fn a_failed_call_is_recorded_with_its_configuration() {
    let (node, container) = (Node::new(), Container::new());
    let mut conf = conf(&node);
    conf["mtu"] = json!(70_000);
    conf["args"] = json!({"password": "hunter2"});
    let call = |verb| {
        node.call("bridge", verb)
            .conf(&conf)
            .netns(&container.path())
            .env("CNI_ARGS", "IgnoreUnknown=1;TOKEN=hunter2")
    };
    let error = call("ADD").error();
    call("STATUS").run();
    let calls = calls(FAILED);
    let [spans] = calls.as_slice() else { panic!("STATUS would drive out the others: {calls:?}") };
    let root = &spans[0];
    assert_eq!((&root["name"], root["status"]["code"].as_u64()), (&json!("bridge ADD"), Some(2)));
    assert!(root["status"]["message"].as_str().unwrap().contains(&error.msg), "{root}");
    assert_eq!(attribute(root, "cni.error.code"), error.code.to_string());
    let kept: Value = serde_json::from_str(&attribute(root, "cni.config")).unwrap();
    assert_eq!((&kept["mtu"], &kept["args"]["password"]), (&json!(70_000), &json!("(left out)")));
    assert_eq!(attribute(root, "cni.args"), "IgnoreUnknown=1;TOKEN=(left out)");
    assert!(!fs::read_to_string(FAILED).unwrap().contains("hunter2"));
    let others = crate::trace::calls(TRACES);
    let names: Vec<_> = others.iter().map(|spans| &spans[0]["name"]).collect();
    assert_eq!(names, ["bridge STATUS"], "nobody asked for more");

    let Outcome { stdout, .. } = trace(&node, &["ls", "--failed"]);
    let line = stdout.lines().nth(1).unwrap();
    assert!(
        line.contains("bridge ADD  pods") && line.ends_with(&format!("code {}", error.code)),
        "{stdout}"
    );
    let id = line.split(' ').next().unwrap();
    let Outcome { stdout, .. } = trace(&node, &["show", id]);
    assert!(stdout.contains(&error.msg) && stdout.contains("\"mtu\":70000"), "{stdout}");
    let Outcome { status, stderr, .. } = trace(&node, &["show", "0123"]);
    let expected = "cnibox trace: no call \"0123\" is recorded: see cnibox trace ls\n";
    assert_eq!((status, &*stderr), (Some(1), expected));
}

/// Escape sequences in configurations and arguments do not reach the terminal of a person who runs
/// the tools.
#[test]
fn control_characters_of_a_configuration_are_escaped() {
    let (node, container) = (Node::new(), Container::new());
    let mut conf = conf(&node);
    let escapes = "x\u{1b}[2J\u{1b}]0;owned\u{7}\u{9b}1m\u{202e}y";
    conf["bridge"] = json!(escapes);
    let args = format!("IgnoreUnknown=1;K8S_POD_NAME=p{escapes}\nforged");
    let add = node.call("bridge", "ADD").conf(&conf).netns(&container.path());
    let Outcome { status, stderr, .. } = add.env("CNI_ARGS", &args).env("CNI_LOG", "debug").run();
    assert_eq!(status, Some(1));
    let net_d = node.path("net.d").display().to_string();
    fs::create_dir(&net_d).unwrap();
    fs::write(node.path("net.d/10.conf"), conf.to_string()).unwrap();
    let id = calls(FAILED)[0][0]["spanId"].as_str().unwrap().to_owned();
    let mut shown = vec![("the log of the plugin", stderr)];
    let (bin, netns) = (node.bin().display().to_string(), container.path());
    let odd_file = format!("/no/{escapes}");
    for (tool, args) in [
        ("cnibox", &["trace", "ls"][..]),
        ("cnibox", &["trace", "show", &id]),
        ("cnibox", &["trace", "stats"]),
        ("cnibox", &["lint", "--offline", &net_d]),
        ("cnibox", &["doctor", "--conf-dir", &net_d]),
        ("cnibox", &["doctor", "--json", "--conf-dir", &net_d]),
        ("cnibox", &["gc", "--network", escapes]),
        ("cnibox", &["ipam", "ls", escapes]),
        ("cnibox", &["sysdump", "--output", &odd_file]),
        ("cnibox", &[escapes]),
        ("cnitool", &["add", "pods", &netns, "--conf-dir", &net_d, "--plugin-path", &bin]),
    ] {
        let call = node.tool(tool, args);
        let call = if tool == "cnibox" { call.program(executable()) } else { call };
        let Outcome { stdout, stderr, .. } = call.run();
        shown.push((args[0], stdout + &stderr));
    }
    let is_odd = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
    for (what, text) in shown {
        assert!(!text.is_empty() || what == "the log of the plugin", "{what}");
        assert!(!text.contains(is_odd), "{what}: {text:?}");
        assert!(
            !text.lines().any(|line| line.trim() == line && line == "forged"),
            "{what}: {text}"
        );
    }
}

#[test]
fn stats_are_printed_as_text_and_for_prometheus() {
    let node = Node::new();
    let containers = [Container::new(), Container::new(), Container::new()];
    for (i, container) in containers.iter().enumerate() {
        add(&node, container).env("CNI_LOG", "trace").id(&format!("pod{i}")).result();
    }
    add(&node, &Container::new()).netns("/run/netns/none").error();
    fs::create_dir(node.path("net.d")).unwrap();
    let mut list = conf(&node);
    list["name"] = json!("pods");
    list["ipam"] = node.host_local(&["10.1.0.0/24", "fd00:1::/64"]);
    fs::write(node.path("net.d/10-pods.conf"), list.to_string()).unwrap();
    let Outcome { stdout, .. } = trace(&node, &["stats"]);
    let cells: Vec<&str> = stdout.lines().nth(1).unwrap().split_whitespace().collect();
    assert_eq!(cells[..4], ["bridge", "ADD", "4", "1"], "{stdout}");
    let conf = node.path("net.d").display().to_string();
    let Outcome { status, stdout, stderr } =
        trace(&node, &["stats", "--format", "prometheus", "--conf-dir", &conf]);
    assert_eq!((status, &*stderr), (Some(0), ""));
    for line in [
        "# TYPE cnibox_recorded_calls gauge",
        "cnibox_recorded_calls{plugin=\"bridge\",command=\"ADD\",code=\"0\"} 3",
        "cnibox_recorded_calls{plugin=\"bridge\",command=\"ADD\",code=\"8\"} 1",
        "# TYPE cnibox_recorded_call_duration_seconds summary",
        "cnibox_recorded_call_duration_seconds_count{plugin=\"bridge\",command=\"ADD\"} 3",
        "cnibox_ipam_addresses_taken{network=\"pods\",range=\"10.1.0.0/24\"} 3",
        "cnibox_ipam_addresses{network=\"pods\",range=\"10.1.0.0/24\"} 253",
        "cnibox_ipam_addresses_taken{network=\"pods\",range=\"fd00:1::/64\"} 0",
        "cnibox_ipam_addresses{network=\"pods\",range=\"fd00:1::/64\"} 18446744073709551614",
    ] {
        assert!(stdout.lines().any(|found| found == line), "{line}: {stdout}");
    }
    let sum = stdout.lines().find_map(|line| {
        line.strip_prefix(
            "cnibox_recorded_call_duration_seconds_sum{plugin=\"bridge\",command=\"ADD\"} ",
        )
    });
    let seconds: f64 = sum.unwrap().parse().unwrap();
    assert!(0.0 < seconds && seconds < 60.0, "{stdout}");
}

#[test]
fn a_directory_writable_by_others_is_not_used() {
    let (node, container) = (Node::new(), Container::new());
    node.sh("chmod 777 /run/cnibox");
    let call = add(&node, &container).env("CNI_LOG", "trace");
    let Outcome { status, stderr, .. } = call.run();
    assert_eq!((status, &*stderr), (Some(0), ""), "a recorder that cannot write is silent");
    add(&node, &container).netns("/run/netns/none").error();
    assert_eq!(fs::read_dir("/run/cnibox").unwrap().count(), 0);
}
