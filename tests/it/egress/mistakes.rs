//! Mistakes in a policy never open anything: unknown and repeated keys, two policies of one list,
//! entries without effect.

use std::fs;

use serde_json::{Value, json};

use super::list;
use crate::support::conflist::{Attached, Conflist};
use crate::support::net::merged;
use crate::support::node::{Container, Node, eventually};
use crate::support::snapshot::assert_unchanged;

/// A container on a bridge, before ADD of egress.
struct Bare {
    node: Node,
    container: Container,
    result: Value,
}

impl Bare {
    fn new() -> Bare {
        let (node, container) = (Node::new(), Container::new());
        let mut bare = list(&node, "bridge", &json!({}));
        bare.conf["plugins"].as_array_mut().unwrap().pop();
        let result = bare.add(&Attached::new("c1", &container.path())).unwrap();
        Bare { node, container, result }
    }

    fn at(&self) -> Attached {
        Attached::new("c1", &self.container.path())
    }

    fn list(&self, keys: &Value) -> Conflist<'_> {
        list(&self.node, "bridge", keys)
    }
}

/// The end of a configuration with these members, behind `{"type": "egress"`, written as they are.
type Members = &'static str;

/// Mistakes, most of them in a configuration that otherwise allows everything, each with the
/// message.
const MISTAKES: [(Members, &str); 55] = [
    (r#""policy":"allow","dney":[{"to":["10.0.0.0/8"]}]"#, r#"unknown key "dney""#),
    (r#""policy":"allow","denny":[{"to":["10.0.0.0/8"]}]"#, r#"unknown key "denny""#),
    (r#""policy":"allow","denied":[]"#, r#"unknown key "denied""#),
    (r#""policy":"allow","denyOut":["169.254.169.254/32"]"#, r#"unknown key "denyOut""#),
    (r#""policy":"allow","deny ":[]"#, r#"unknown key "deny ""#),
    (r#""policy":"allow","block":[]"#, r#"unknown key "block""#),
    (r#""policy":"allow","except":[]"#, r#"unknown key "except""#),
    (r#""policy":"allow","profil":"sandbox""#, r#"unknown key "profil""#),
    (r#""policy":"allow","profiles":["sandbox"]"#, r#"unknown key "profiles""#),
    (r#""policy":"allow","sandbox":true"#, r#"unknown key "sandbox""#),
    (r#""profile":"sandbox","polciy":"deny""#, r#"unknown key "polciy""#),
    (r#""profile":"sandbox","default":"deny""#, r#"unknown key "default""#),
    (r#""profile":"sandbox","defaultPolicy":"deny""#, r#"unknown key "defaultPolicy""#),
    (r#""profile":"sandbox","verdict":"deny""#, r#"unknown key "verdict""#),
    (r#""alow":[]"#, r#"unknown key "alow""#),
    (r#""allowed":[]"#, r#"unknown key "allowed""#),
    (r#""policy":"allow","egressPolicy":{}"#, r#"unknown key "egressPolicy""#),
    (r#""policy":"allow","egress":{}"#, r#"unknown key "egress""#),
    (r#""policy":"allow","mod":"audit""#, r#"unknown key "mod""#),
    (r#""policy":"allow","mode":"watch""#, r#"mode "watch": unknown value"#),
    (r#""policy":"allow","refuse":"silent""#, r#"refuse "silent": unknown value"#),
    (r#""policy":"allow","refused":"drop""#, r#"unknown key "refused""#),
    (r#""policy":"allow","policydirectory":"/etc/cni/p""#, r#"unknown key "policydirectory""#),
    (r#""policy":"allow","policyDirs":["/etc/cni/p"]"#, r#"unknown key "policyDirs""#),
    (r#""policy":"allow","capabilites":{"egressPolicy":true}"#, r#"unknown key "capabilites""#),
    (r#""policy":"allow","runtimConfig":{}"#, r#"unknown key "runtimConfig""#),
    (r#""policy":"allow","arg":{"cni":{}}"#, r#"unknown key "arg""#),
    (r#""policy":"allow","deny":[{"too":["10.0.0.0/8"]}]"#, r#"unknown key "too" in deny[0]"#),
    (r#""policy":"allow","deny":[{"cidr":"10.0.0.0/8"}]"#, r#"unknown key "cidr" in deny[0]"#),
    (r#""allow":[{"cidr":"1.1.1.1/32"}]"#, r#"unknown key "cidr" in allow[0]"#),
    (r#""allow":[{"to":["10.0.0.0/8"],"port":["tcp/443"]}]"#, r#"unknown key "port" in allow[0]"#),
    (
        r#""allow":[{"to":["192.0.2.7"]},{"to":["10.0.0.0/8"],"except":["10.1.0.0/16"]}]"#,
        r#"unknown key "except" in allow[1]"#,
    ),
    (r#""allow":[{"to":["10.0.0.0/8"],"ports":null}]"#, "allow[0].ports is null"),
    (r#""policy":"allow","deny":null"#, "deny is null"),
    (r#""policy":"allow","profile":null"#, "profile is null"),
    (
        r#""policy":"allow","capabilities":{"egresPolicy":true}"#,
        r#"unknown key "egresPolicy" in capabilities"#,
    ),
    (
        r#""policy":"allow","capabilities":{"egresspolicy":true}"#,
        r#"unknown key "egresspolicy" in capabilities"#,
    ),
    (
        r#""policy":"allow","capabilities":{"egress":true}"#,
        r#"unknown key "egress" in capabilities"#,
    ),
    (
        r#""policy":"allow","runtimeConfig":{"egresPolicy":{}}"#,
        r#"unknown key "egresPolicy" in runtimeConfig"#,
    ),
    (
        r#""policy":"allow","runtimeConfig":{"egressPolicies":[]}"#,
        r#"unknown key "egressPolicies" in runtimeConfig"#,
    ),
    (
        r#""policy":"allow","runtimeConfig":{"egressPolicy":{"alow":[]}}"#,
        r#"unknown key "alow" in runtimeConfig.egressPolicy"#,
    ),
    (
        r#""policy":"allow","runtimeConfig":{"egressPolicy":{"policy":"allow","deny":[{"port":[]}]}}"#,
        r#"unknown key "port" in runtimeConfig.egressPolicy.deny[0]"#,
    ),
    (
        r#""policy":"allow","args":{"egressPolicy":{"allow":[]}}"#,
        r#"unknown key "egressPolicy" in args"#,
    ),
    (r#""policy":"allow","args":{"cin":{"egressPolicy":{}}}"#, r#"unknown key "cin" in args"#),
    (
        r#""policy":"allow","args":{"cni":{"egressPolcy":{}}}"#,
        r#"unknown key "egressPolcy" in args.cni"#,
    ),
    (
        r#""policy":"allow","args":{"cni":{"egress-policy":{}}}"#,
        r#"unknown key "egress-policy" in args.cni"#,
    ),
    (
        r#""policy":"allow","args":{"cni":{"egressPolicy":{"profil":"sandbox"}}}"#,
        r#"unknown key "profil" in args.cni.egressPolicy"#,
    ),
    (r#""policy":"deny","policy":"allow""#, r#"repeated key "policy""#),
    (
        r#""policy":"allow","deny":[{"to":["10.0.0.0/8"]}],"Deny":[{"to":["192.0.2.7"]}]"#,
        r#"repeated key "Deny""#,
    ),
    (
        r#""policy":"allow","deny":[{"to":["10.0.0.0/8"],"to":["192.0.2.7"]}]"#,
        r#"repeated key "to" in deny[0]"#,
    ),
    (
        r#""policy":"allow","args":{"cni":{"egressPolicy":{"deny":[{}],"deny":[]}}}"#,
        r#"repeated key "deny" in args.cni.egressPolicy"#,
    ),
    (
        r#""policy":"allow","args":{"cni":{"egressPolicy":{"deny":[{}]}},"cni":{"egressPolicy":{"deny":[]}}}"#,
        r#"repeated key "deny" in args.cni.egressPolicy"#,
    ),
    (
        r#""policy":"allow","runtimeConfig":{"egressPolicy":{"deny":[{}]},"egressPolicy":{"deny":[]}}"#,
        r#"repeated key "deny" in runtimeConfig.egressPolicy"#,
    ),
    (
        r#""policy":"allow","runtimeConfig":{"egressPolicy":{"policy":"deny"}},"RuntimeConfig":{"egressPolicy":{"policy":"allow"}}"#,
        r#"repeated key "policy" in runtimeConfig.egressPolicy"#,
    ),
    (
        r#""policy":"allow","deny":[{"to":["0.0.0.0"]}]"#,
        r#"deny[0].to[0] "0.0.0.0": nothing is sent to this address"#,
    ),
];

#[test]
fn mistakes_in_keys_are_refused_and_nothing_is_attached() {
    let bare = Bare::new();
    let before = bare.node.snapshot();
    for (members, msg) in MISTAKES {
        let conf = format!(
            r#"{{"type":"egress",{members},"cniVersion":"1.1.0","name":"net","prevResult":{}}}"#,
            bare.result
        );
        let call = bare.list(&json!({})).call("ADD", &bare.at(), 1, None).stdin(conf);
        let error = call.error();
        assert_eq!(error.brief(), (7, msg), "{members}");
        assert!(!error.details.is_empty(), "{members}");
        assert_unchanged(&before, &bare.node.snapshot());
        call.env("CNI_COMMAND", "DEL").ok();
        let bridge = json!({"type": "bridge", "ipam": {"type": "static"}});
        let text = format!(
            r#"{{"cniVersion":"1.1.0","name":"net","plugins":[{bridge},{{"type":"egress",{members}}}]}}"#
        );
        let file = bare.node.path("net.conflist");
        fs::write(&file, text).unwrap();
        let outcome = bare.node.cnibox(&["lint", "--offline", &file.display().to_string()]).run();
        let said = format!("error: plugin 1 \"egress\": {msg}; ");
        assert!(outcome.stdout.contains(&said), "{members}: {outcome:?}");
        let first = msg.split(" in ").next().unwrap();
        assert_eq!(outcome.stdout.matches(first).count(), 1, "{members}: {outcome:?}");
        fs::remove_file(file).unwrap();
    }
}

#[test]
fn mistakes_in_cni_args_are_refused() {
    let bare = Bare::new();
    let dir = bare.node.state("egress-policies");
    fs::create_dir_all(&dir).unwrap();
    for name in ["all", "one"] {
        fs::write(dir.join(format!("{name}.json")), r#"{"policy":"allow"}"#).unwrap();
    }
    fs::write(dir.join("twice.json"), r#"{"policy":"deny","policy":"allow"}"#).unwrap();
    let before = bare.node.snapshot();
    let call = |args: &str| {
        let list = bare.list(&json!({"profile": "sandbox", "policyDir": dir}));
        list.call("ADD", &bare.at(), 1, Some(&bare.result)).env("CNI_ARGS", args)
    };
    let twice = dir.join("twice.json").display().to_string();
    for (args, msg) in [
        ("EGRESS_POLICY=all;EGRESS_POLICY=one", r#"ARGS: EGRESS_POLICY is "all" and "one""#),
        (
            "EGRESS_POLICY=one;IgnoreUnknown=1;EGRESS_POLICY=all",
            r#"ARGS: EGRESS_POLICY is "one" and "all""#,
        ),
        ("egress_policy=one", "ARGS: unknown key egress_policy"),
        ("EGRES_POLICY=one", "ARGS: unknown key EGRES_POLICY"),
        ("EGRESS_POLICY=twice", &*format!(r#"policy "{twice}": repeated key "policy""#)),
    ] {
        assert_eq!(call(args).error().brief(), (7, msg), "{args}");
        assert_unchanged(&before, &bare.node.snapshot());
    }
    call("EGRESS_POLICY=one;K8S_POD_NAME=egress;EGRESS_POLICY=one").result();
}

/// What runtimes, other plugins and people write beside a policy is no mistake.
#[test]
fn keys_of_others_are_left() {
    let bare = Bare::new();
    let dir = bare.node.state("egress-policies");
    fs::create_dir_all(&dir).unwrap();
    let policy = json!({"allow": [{"to": ["192.0.2.7"], "comment": "the mirror"}], "//": "why"});
    fs::write(dir.join("one.json"), policy.to_string()).unwrap();
    let others = json!({
        "_comment": "a note", "description": "pods", "deviceID": "0000:03:00.1", "pciBusID": "0000:03:00.1",
        "cni.dev/valid-attachments": [], "cni.dev/attachments": [], "cni.dev/new": 1, "org.example.key": {"deny": 1}, "dns": {}, "ipam": {},
        "disableCheck": true, "disableGC": true, "ipMasq": false, "loadOnlyInlinedPlugins": true,
        "capabilities": {"egressPolicy": true, "portMappings": true, "bandwidth": true, "io.kubernetes.cri.pod-annotations": true},
        "runtimeConfig": {"bandwidth": {"egressRate": 1}, "egressPolicy": policy,
            "io.kubernetes.cri.pod-annotations": {"egress-policy": "x"},
            "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": ""}]},
        "args": {"labels": [{"key": "a", "value": "b"}], "cri": {}, "cni": {"ips": [], "mac": "", "egressPolicy": policy}},
    });
    let mut other_case = others.clone();
    other_case["cniversion"] = json!("1.1.0");
    other_case["args"] = Value::Null;
    other_case["runtimeConfig"] = json!({"egressPolicy": null});
    for keys in [
        json!({"Policy": "allow", "PolicyDir": dir}),
        json!({"allow": policy["allow"], "policyDir": dir}),
        merged(&others, &json!({"policyDir": dir})),
        merged(&other_case, &json!({"profile": "sandbox", "policyDir": dir})),
    ] {
        let list = bare.list(&keys);
        let args = "IgnoreUnknown=1;K8S_POD_NAMESPACE=egress;EGRESS_POLICY=one";
        let add = list.call("ADD", &bare.at(), 1, Some(&bare.result)).env("CNI_ARGS", args);
        let outcome = add.run();
        assert_eq!((outcome.status, outcome.stderr.as_str()), (Some(0), ""), "{keys}");
        list.call("CHECK", &bare.at(), 1, Some(&bare.result)).ok();
        list.call("DEL", &bare.at(), 1, Some(&bare.result)).ok();
    }
}

#[test]
fn an_unknown_key_prevents_no_removal() {
    let bare = Bare::new();
    bare.list(&json!({"policy": "allow"})).call("ADD", &bare.at(), 1, Some(&bare.result)).result();
    let list = bare.list(&json!({"policy": "allow", "dney": [], "deny": [{"too": []}]}));
    list.call("CHECK", &bare.at(), 1, Some(&bare.result)).ok();
    list.call("STATUS", &bare.at(), 1, None).ok();
    list.gc(&[bare.at()]).unwrap();
    list.call("DEL", &bare.at(), 1, Some(&bare.result)).ok();
    assert!(!bare.node.sh("nft list ruleset").contains("policy_"));
}

#[test]
fn a_second_egress_of_a_list_is_refused() {
    let bare = Bare::new();
    let strict = bare.list(&json!({"allow": [{"to": ["192.0.2.0/24"]}]}));
    let lax = bare.list(&json!({"policy": "allow"}));
    let msg = "interface \"eth0\" already has a policy of another egress";
    for (first, second) in [(&strict, &lax), (&lax, &strict)] {
        let add = |list: &Conflist<'_>| list.call("ADD", &bare.at(), 1, Some(&bare.result));
        add(first).result();
        let before = bare.node.snapshot();
        assert_eq!(add(second).error().brief(), (7, msg));
        assert_unchanged(&before, &bare.node.snapshot());
        // The same list again, also while another policy was put in force.
        add(first).result();
        let file = bare.node.path("policy.json").display().to_string();
        fs::write(&file, r#"{"allow": [{"to": ["198.51.100.7"]}]}"#).unwrap();
        for _ in 0..2 {
            bare.node.tool("egress", &["set", "--container", "c1", &file]).printed();
        }
        assert_eq!(add(second).error().brief(), (7, msg));
        add(first).result();
        assert_eq!(add(second).error().brief(), (7, msg));
        first.call("CHECK", &bare.at(), 1, Some(&bare.result)).ok();
        first.call("DEL", &bare.at(), 1, Some(&bare.result)).ok();
    }
}

/// A container with a name, an address and a pair of the same names as one whose DEL was lost.
#[test]
fn another_policy_after_a_lost_del_is_accepted() {
    let (node, container) = (Node::new(), Container::new());
    let mut first = list(&node, "bridge", &json!({"policy": "allow"}));
    first.conf["plugins"][0]["hostInterfaceName"] = json!("vpod");
    first.conf["plugins"][0]["capabilities"] = json!({"mac": true});
    let mut at = Attached::new("c1", &container.path());
    at.runtime = json!({"mac": "02:00:00:00:00:07"});
    first.add(&at).unwrap();
    container.sh("ip link del eth0");
    node.sh("rm -r /run/cni/ipam* /var/lib/cni/networks 2>/dev/null || :");
    let mut other = first.clone();
    other.conf["plugins"][1]["policy"] = json!("deny");
    let result = other.add(&at).unwrap();
    other.check(&at, &result).unwrap();
    // The same in a new namespace.
    drop(container);
    eventually("the pair is deleted", || !node.sh("ip -br link").contains("vpod"));
    let container = Container::new();
    at.netns = container.path();
    let result = first.add(&at).unwrap();
    first.check(&at, &result).unwrap();
    first.del(&at, Some(&result)).unwrap();
    assert!(!node.sh("nft list ruleset").contains("policy_"));
}

#[test]
fn add_warns_of_entries_that_decide_nothing() {
    let bare = Bare::new();
    for (keys, said) in [
        (
            json!({"profile": "sandbox", "allow": [{"to": ["192.0.2.7", "10.0.0.0/8"]}]}),
            r#"allow[0].to[1] "10.0.0.0/8" allows nothing; "deny" or the profile refuses it, and decides where prefixes are equally long: write "10.0.0.0/9" and "10.128.0.0/9""#,
        ),
        (
            json!({"profile": "sandbox", "allow": [{"to": ["10.1.2.0/24"]}]}),
            r#"allow[0].to[0] "10.1.2.0/24" opens none of the containers there"#,
        ),
        (
            json!({"allow": [{"ports": ["tcp/443"]}]}),
            r#"allow[0] without "to" allows nothing: write "to": ["0.0.0.0/0", "::/0"] for all"#,
        ),
        (
            json!({"runtimeConfig": {"egressPolicy": {"allow": [{"to": ["192.0.2.7"], "ports": []}]}}}),
            r#"allow[0] with "ports": [] allows nothing: leave "ports" out for all services"#,
        ),
        (
            json!({"allow": [{"to": ["10.0.0.0/8"]}], "deny": [{"to": ["10.0.0.0/8"]}]}),
            r#"allow[0].to[0] "10.0.0.0/8" allows nothing"#,
        ),
    ] {
        let list = bare.list(&keys);
        let outcome = list.call("ADD", &bare.at(), 1, Some(&bare.result)).run();
        assert_eq!(outcome.status, Some(0), "{keys}: {outcome:?}");
        assert!(outcome.stderr.contains(said), "{keys}: {outcome:?}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{keys}: {outcome:?}");
        list.call("DEL", &bare.at(), 1, Some(&bare.result)).ok();
    }
}

/// `serve` is no policy: beside a named one it does not make an empty one.
#[test]
fn serve_alone_refuses_nothing() {
    let bare = Bare::new();
    let dir = bare.node.state("egress-policies");
    fs::create_dir_all(&dir).unwrap();
    fs::write(dir.join("one.json"), r#"{"allow": [{"to": ["192.0.2.7"]}]}"#).unwrap();
    let list = bare.list(&json!({"policyDir": dir, "serve": ["tcp/80"]}));
    let add = list.call("ADD", &bare.at(), 1, Some(&bare.result));
    add.env("CNI_ARGS", "EGRESS_POLICY=one").result();
    let rules = bare.node.sh("nft list table inet cnibox_egress");
    assert!(rules.contains("192.0.2.7"), "{rules}");
    let record: Value =
        serde_json::from_str(&bare.node.sh("cat /run/cni/cnibox/attachments/*.json")).unwrap();
    assert_eq!(record["rules"]["egress"]["published"], json!(["tcp/80"]));
    let list = bare.list(&json!({"policyDir": dir, "serve": ["http"]}));
    let error = list.call("ADD", &bare.at(), 1, Some(&bare.result)).error();
    assert_eq!(error.brief(), (7, "serve[0] \"http\": not a service"));
}
