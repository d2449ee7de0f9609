//! IPAM delegation: a delegate that is this executable runs in the same process, any other in a
//! child process; results and errors are identical.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use serde_json::{Value, json};

use crate::lane::{self, needs};
use crate::support::compare::{assert_same, normal};
use crate::support::net::{Net, merged, wire};
use crate::support::node::{Call, Container, MILESTONES, Node, assert_unchanged, executable};

/// Records environment and stdin, then sources the script `recorder.<verb>` if it exists.
const RECORDER: &str = r#"
env | grep -E '^(CNI_|OTHER)' | sort > "$0.$CNI_COMMAND.env"
cat > "$0.$CNI_COMMAND.stdin"
echo "recorder $CNI_COMMAND" >&2
if [ -e "$0.$CNI_COMMAND" ]; then . "$0.$CNI_COMMAND"; fi"#;

/// A node with the recorder as IPAM plugin.
struct Recorded {
    node: Node,
    container: Container,
    conf: Value,
}

impl Recorded {
    fn new(add: &str) -> Recorded {
        let node = Node::new();
        node.script("recorder", RECORDER);
        let conf = json!({"name": "n", "cniVersion": "1.1.0", "ipam": {"type": "recorder"}});
        let recorded = Recorded { node, container: Container::new(), conf };
        recorded.answer("ADD", add);
        recorded
    }

    fn answer(&self, verb: &str, script: &str) {
        fs::write(self.node.bin().join(format!("recorder.{verb}")), script).unwrap();
    }

    fn call(&self, plugin: &str, verb: &str) -> Call {
        self.node.call(plugin, verb).conf(&self.conf).netns(&self.container.path())
    }

    fn recorded(&self, verb: &str, what: &str) -> Option<String> {
        fs::read_to_string(self.node.bin().join(format!("recorder.{verb}.{what}"))).ok()
    }
}

const ONE_ADDRESS: &str =
    r#"echo '{"cniVersion":"1.0.0","ips":[{"address":"10.9.0.2/24","gateway":"10.9.0.1"}]}'"#;

fn refusing(code: u32) -> String {
    format!(
        r#"echo '{{"cniVersion":"1.0.0","code":{code},"msg":"no way","details":"said so"}}'; exit 1"#
    )
}

/// The outcomes of a series of calls, with the leases after each call.
fn transcript(plugin: &str, version: &str, copied: bool) -> String {
    let node = Node::new();
    if copied {
        let path = node.bin().join("host-local");
        fs::remove_file(&path).unwrap();
        fs::copy(executable(), &path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let (container, other) = (Container::new(), Container::new());
    let mut ipam = node.host_local(&["10.1.0.0/30", "fd00:1::/64"]);
    ipam["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "10.7.0.0/16", "gw": "10.1.0.1"}]);
    let good = json!({"name": "n", "cniVersion": version, "isGateway": true, "ipam": ipam});
    let with = |key: &str, value: Value| {
        let mut conf = good.clone();
        conf["ipam"][key] = value;
        conf
    };
    let mut checked = good.clone();
    let mut out = String::new();
    let mut run = |what: &str, verb: &str, id: &str, conf: &Value, args: &str| -> String {
        let call = node.call(plugin, verb).id(id).conf(conf);
        let container = if id == "a" { &container } else { &other };
        let call = call.netns(&container.path());
        let outcome = call.env("CNI_ARGS", args).env("RUST_BACKTRACE", "0").run();
        let files = node.sh(&format!(
            "cd {} 2>/dev/null && find . -type f -not -path '*/.cnibox/*' | sort | xargs -r head -v -c 99 || true",
            node.path("leases").display()
        ));
        let text = normal(&format!("{outcome:?}\n{files}"), &node, container);
        // Log lines begin with the name of the applet of the logging process.
        let text = text.replace(&format!("cnibox: {plugin} "), "cnibox: host-local ");
        out.extend(["== ", what, "\n", &text, "\n"]);
        outcome.stdout
    };
    run("CHECK of nothing", "CHECK", "a", &good, "");
    run("STATUS", "STATUS", "a", &good, "");
    let result = run("ADD", "ADD", "a", &good, "");
    checked["prevResult"] = serde_json::from_str(&result).unwrap_or(json!({}));
    run("CHECK", "CHECK", "a", &checked, "");
    run("ADD to full range", "ADD", "b", &good, "");
    run("STATUS of full range", "STATUS", "b", &good, "");
    checked["cni.dev/valid-attachments"] = json!([{"containerID": "a", "ifname": "eth0"}]);
    run("GC of none", "GC", "a", &checked, "");
    checked["cni.dev/valid-attachments"] = json!([]);
    run("GC of all", "GC", "a", &checked, "");
    run("DEL", "DEL", "a", &good, "");
    run("DEL again", "DEL", "a", &good, "");
    run("requested", "ADD", "a", &good, "IP=10.1.0.2");
    run("DEL", "DEL", "a", &good, "");
    run("not in range", "ADD", "a", &good, "IP=10.9.9.9");
    run("bad argument", "ADD", "a", &good, "IP=x");
    run("two per family", "ADD", "a", &with("subnet", json!("10.2.0.0/24")), "");
    run("two per family", "DEL", "a", &with("subnet", json!("10.2.0.0/24")), "");
    run("host bits", "ADD", "a", &with("subnet", json!("10.2.0.9/24")), "");
    run("overlap", "ADD", "a", &with("subnet", json!("10.1.0.0/16")), "");
    run("no range", "ADD", "a", &with("ranges", json!([])), "");
    run("wrong type", "ADD", "a", &with("ranges", json!("x")), "");
    run("no resolv.conf", "ADD", "a", &with("resolvConf", json!("/nowhere")), "");
    run("no store", "ADD", "a", &with("dataDir", json!("/proc/x")), "");
    out
}

#[test]
fn host_local_answers_the_same_in_and_out_of_process() {
    for (plugin, versions) in [("bridge", &["1.1.0"][..]), ("ptp", &MILESTONES)] {
        for version in versions {
            let [linked, copied] = [false, true].map(|copied| transcript(plugin, version, copied));
            assert_same(&format!("{plugin} {version}: in process, exec"), &linked, &copied);
            assert!(linked.contains("no IP addresses available in range set"), "{linked}");
        }
    }
}

#[test]
fn a_copy_is_executed_and_a_link_is_not() {
    let node = Node::new();
    fs::copy(executable(), node.bin().join("copied")).unwrap();
    std::os::unix::fs::symlink("host-local", node.bin().join("linked")).unwrap();
    // The name is not an applet, so only an executed process can fail with this error.
    let error = |ipam: &str| {
        let container = Container::new();
        let conf = json!({"name": "n", "cniVersion": "1.0.0", "ipam": {"type": ipam}});
        node.call("ptp", "ADD").conf(&conf).netns(&container.path()).error().msg
    };
    assert_eq!(error("copied"), "cnibox has no applet \"copied\"");
    assert_eq!(error("linked"), "cnibox has no applet \"linked\"");
    let container = Container::new();
    let conf =
        json!({"name": "n", "cniVersion": "1.0.0", "ipam": node.host_local(&["10.1.0.0/24"])});
    let call = node.call("ptp", "ADD").conf(&conf).netns(&container.path());
    let programs = |call: &Call| {
        let (outcome, calls) = crate::support::strace::record(&node, call);
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        calls.iter().filter(|call| call.name == "execve").count()
    };
    assert_eq!(programs(&call), 1);
    fs::remove_file(node.bin().join("host-local")).unwrap();
    fs::copy(executable(), node.bin().join("host-local")).unwrap();
    let container = Container::new();
    assert_eq!(programs(&call.id("other").netns(&container.path())), 2);
}

#[test]
fn a_foreign_plugin_earlier_in_cni_path_is_used() {
    let scene = Recorded::new(ONE_ADDRESS);
    let first = scene.node.path("first");
    fs::create_dir(&first).unwrap();
    for name in ["recorder", "recorder.ADD"] {
        fs::rename(scene.node.bin().join(name), first.join(name)).unwrap();
    }
    fs::rename(first.join("recorder"), first.join("host-local")).unwrap();
    fs::rename(first.join("recorder.ADD"), first.join("host-local.ADD")).unwrap();
    let mut conf = scene.conf.clone();
    conf["ipam"] = scene.node.host_local(&["10.1.0.0/24"]);
    let path = format!("{}:{}", first.display(), scene.node.bin().display());
    let call = scene.call("bridge", "ADD").conf(&conf).env("CNI_PATH", &path);
    assert_eq!(call.result()["ips"][0]["address"], "10.9.0.2/24");
    assert!(scene.node.leases("n").is_empty());
}

#[test]
fn a_foreign_plugin_gets_the_environment_and_the_same_bytes() {
    for verb in ["ADD", "DEL", "CHECK", "GC", "STATUS"] {
        for plugin in ["bridge", "ptp"] {
            let scene = Recorded::new(ONE_ADDRESS);
            let mut conf = scene.conf.clone();
            conf["cni.dev/valid-attachments"] = json!([]);
            if verb == "CHECK" {
                conf["prevResult"] = scene.call(plugin, "ADD").result();
            }
            let text =
                format!(" {}\n\t ", conf.to_string().replace("\"name\"", "\"x\" :\t1e3, \"name\""));
            let call = scene.call(plugin, verb).stdin(text.clone()).env("OTHER", "value");
            let call = call.env("CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAME=p");
            let outcome = call.run();
            assert_eq!(outcome.status, Some(0), "{plugin} {verb}: {outcome:?}");
            assert_eq!(scene.recorded(verb, "stdin").unwrap(), text, "{plugin} {verb}");
            let mut expected: Vec<String> = call
                .command()
                .get_envs()
                .filter_map(|(key, value)| Some((key.to_str()?, value?.to_str()?)))
                .filter(|(key, _)| key.starts_with("CNI_") || *key == "OTHER")
                .map(|(key, value)| format!("{key}={value}"))
                .collect();
            expected.sort();
            let got = scene.recorded(verb, "env").unwrap();
            assert_eq!(got.lines().collect::<Vec<_>>(), expected, "{plugin} {verb}");
            assert!(outcome.stderr.contains(&format!("recorder {verb}\n")), "{outcome:?}");
        }
    }
}

#[test]
fn a_failed_delegate_add_is_deleted_and_passed_on() {
    for plugin in ["bridge", "ptp"] {
        let scene = Recorded::new(&refusing(11));
        let before = (scene.node.snapshot(), scene.container.snapshot(&scene.node));
        // The bridge may remain.
        let host = scene.node.ip("link show type veth");
        let outcome = scene.call(plugin, "ADD").run();
        let refusal: Value = serde_json::from_str(&outcome.stdout).unwrap();
        assert_eq!((&refusal["code"], &refusal["msg"]), (&json!(11), &json!("no way")));
        let details = refusal["details"].as_str().unwrap();
        assert_eq!(details, "said so");
        assert!(outcome.stderr.contains("recorder ADD\n"), "stderr of a failed delegate");
        let stdin = |verb| scene.recorded(verb, "stdin");
        assert!(stdin("DEL").is_some() && stdin("DEL") == stdin("ADD"), "{plugin}: no DEL");
        assert_eq!(scene.node.ip("link show type veth"), host);
        assert_unchanged(&before.1, &scene.container.snapshot(&scene.node));
    }
}

#[test]
fn errors_of_delegates_are_returned_unchanged() {
    for plugin in ["bridge", "ptp"] {
        for verb in ["DEL", "CHECK", "GC", "STATUS"] {
            let scene = Recorded::new(ONE_ADDRESS);
            let mut conf = scene.conf.clone();
            conf["cni.dev/valid-attachments"] = json!([]);
            conf["prevResult"] = scene.call(plugin, "ADD").result();
            scene.answer(verb, &refusing(50));
            let error = scene.call(plugin, verb).conf(&conf).error();
            assert_eq!(error.brief(), (50, "no way"), "{plugin} {verb}");
            assert_eq!(error.details, "said so", "{plugin} {verb}");
            // The error names the delegate if the delegate's error has no details.
            scene.answer(verb, "echo '{\"code\":100,\"msg\":\"full\"}'; exit 1");
            let error = scene.call(plugin, verb).conf(&conf).error();
            assert_eq!(error.brief(), (100, "full"), "{plugin} {verb}");
            assert_eq!(error.details, format!("{verb} of the delegate \"recorder\""));
        }
    }
}

#[test]
fn del_deletes_the_link_if_the_delegates_del_fails() {
    for plugin in ["bridge", "ptp"] {
        let scene = Recorded::new(ONE_ADDRESS);
        scene.call(plugin, "ADD").result();
        scene.answer("DEL", &refusing(11));
        scene.call(plugin, "DEL").error();
        assert_eq!(scene.container.ip("link show type veth"), json!([]), "{plugin}");
    }
}

/// Whether the interface is in the container, or the device on the host, at each DEL of the IPAM
/// plugin called `ipam`: in the rollback of an ADD, and in a DEL.
fn links_at_release(plugin: &str, keys: &Value, ipam: &str) -> [String; 2] {
    let mut scene = Recorded::new("");
    let (node, container) = (&scene.node, &scene.container);
    wire(node);
    let log = node.path("log");
    let of = |routes: Value| {
        let ips = json!([{"address": "10.1.2.9/24", "gateway": "10.1.2.1"}]);
        json!({"cniVersion": "1.0.0", "ips": ips, "routes": routes})
    };
    let answers = [of(json!([{"dst": "10.9.0.0/16", "gw": "172.16.0.1"}])), of(json!([]))];
    let mut found = Vec::new();
    scene.conf = merged(&scene.conf, &merged(keys, &json!({"ipam": {"type": ipam}})));
    for (answer, verb) in answers.iter().zip(["ADD", "DEL"]) {
        drop(fs::remove_file(&log));
        drop(fs::remove_file(node.bin().join(ipam)));
        let script = format!(
            "cat >/dev/null; [ $CNI_COMMAND != ADD ] || echo '{answer}'
             [ $CNI_COMMAND != DEL ] || \\
             {{ nsenter --net=$CNI_NETNS ip link show eth0 >&- 2>&- && echo there || echo gone; }} >> {}",
            log.display()
        );
        node.script(ipam, &script);
        let add = scene.call(plugin, "ADD").run();
        if verb == "DEL" {
            assert_eq!(add.status, Some(0), "{plugin}: {add:?}");
            scene.call(plugin, verb).ok();
        } else {
            assert!(add.stdout.contains("failed to add route '10.9.0.0/16"), "{plugin}: {add:?}");
        }
        found.push(fs::read_to_string(&log).unwrap().trim().to_owned());
        assert!(!container.try_sh("ip link show eth0"), "{plugin} {verb}");
    }
    found.try_into().unwrap()
}

/// No other container may get an address while a link of this one has it.
fn releases_in_order(plugin: &str, keys: &Value) {
    assert_eq!(links_at_release(plugin, keys, "fixed"), ["gone", "gone"], "{plugin}");
    // A DHCP release is sent over the link.
    assert_eq!(links_at_release(plugin, keys, "dhcp"), ["there", "there"], "{plugin}");
}

#[test]
fn an_address_is_released_after_its_link_is_deleted() {
    releases_in_order("bridge", &json!({"isGateway": true}));
    releases_in_order("ptp", &json!({}));
    releases_in_order("macvlan", &json!({"master": "wire0"}));
    releases_in_order("tap", &json!({}));
    releases_in_order("host-device", &json!({"device": "wire0"}));
}

#[test]
fn addresses_of_other_kinds_are_released_after_the_link() {
    needs!(lane::VLAN, lane::IPVLAN, lane::DUMMY);
    releases_in_order("vlan", &json!({"master": "wire0", "vlanId": 7}));
    releases_in_order("ipvlan", &json!({"master": "wire0"}));
    releases_in_order("dummy", &json!({}));
}

/// The address of a link that cannot be deleted stays in use.
#[test]
fn the_address_is_kept_if_the_link_cannot_be_deleted() {
    let node = Node::new();
    wire(&node);
    let ipam = node.host_local(&["10.1.2.0/24"]);
    for (plugin, keys) in [("ptp", json!({})), ("macvlan", json!({"master": "wire0"}))] {
        let container = Container::new();
        let net = Net::new(&node, plugin, "1.1.0", &merged(&json!({"ipam": ipam}), &keys));
        let prev = net.add(&container);
        let del = net.with(&json!({"prevResult": prev})).on("DEL", &container);
        let weak = del.clone().under(&["setpriv", "--bounding-set", "-net_admin", "--"]);
        let error = weak.error();
        assert!(error.msg.contains("not permitted"), "{plugin}: {error:?}");
        assert!(container.try_sh("ip link show eth0"), "{plugin}");
        assert_eq!(net.leases().len(), 1, "{plugin}");
        del.ok();
        assert_eq!(net.leases(), [""; 0], "{plugin}");
    }
}

#[test]
fn results_in_older_versions_are_converted() {
    for (answer, routes) in [
        (
            r#"{"cniVersion":"0.2.0","ip4":{"ip":"10.9.0.2/24","gateway":"10.9.0.1","routes":[{"dst":"10.0.0.0/8"}]}}"#,
            true,
        ),
        (r#"{"ip4":{"ip":"10.9.0.2/24","gateway":"10.9.0.1"}}"#, false),
        (
            r#"{"cniVersion":"0.4.0","ips":[{"version":"4","address":"10.9.0.2/24","gateway":"10.9.0.1"}],"routes":[{"dst":"10.0.0.0/8"}]}"#,
            true,
        ),
        (r#"{"cniVersion":"1.0.0","ips":[{"address":"10.9.0.2/24","gateway":"10.9.0.1"}]}"#, false),
    ] {
        for version in ["0.2.0", "0.4.0", "1.1.0"] {
            // A result without `cniVersion` has the configuration's version.
            if !answer.contains("cniVersion") && version != "0.2.0" {
                continue;
            }
            let mut scene = Recorded::new(&format!("echo '{answer}'"));
            scene.conf["cniVersion"] = json!(version);
            let result = scene.call("ptp", "ADD").result();
            let (address, route) = match version {
                "0.2.0" => (&result["ip4"]["ip"], &result["ip4"]["routes"][0]["dst"]),
                _ => (&result["ips"][0]["address"], &result["routes"][0]["dst"]),
            };
            assert_eq!(address, "10.9.0.2/24", "{answer} {result}");
            assert_eq!(route.is_string(), routes, "{answer} {result}");
            assert_eq!(result["cniVersion"], version);
        }
    }
}

#[test]
fn invalid_answers_of_delegates_are_errors() {
    for (script, code, msg) in [
        // Code 0: the delegate returned no error object.
        ("exit 3", 0, "netplugin failed: \"recorder ADD"),
        ("echo nonsense; exit 3", 0, "netplugin failed but error parsing its diagnostic message"),
        ("echo nonsense", 6, "ADD of the delegate \"recorder\": failed to unmarshal raw result"),
        ("kill -9 $$", 0, "netplugin failed: \"recorder ADD\\n\": signal: killed"),
        ("true", 6, "ADD of the delegate \"recorder\": failed to unmarshal raw result"),
        ("echo '{\"cniVersion\":\"1.0.0\"}'", 999, "IPAM plugin returned missing IP config"),
    ] {
        let scene = Recorded::new(script);
        let before = scene.container.snapshot(&scene.node);
        let error = scene.call("bridge", "ADD").error();
        println!("{script}: {} {}", error.code, error.msg);
        assert!(error.msg.starts_with(msg), "{script}: {}", error.msg);
        assert_eq!(error.code, code, "{script}: {}", error.msg);
        assert!(scene.recorded("DEL", "env").is_some(), "{script}: no DEL");
        assert_unchanged(&before, &scene.container.snapshot(&scene.node));
    }
}

/// An interface plugin as IPAM plugin could delegate to itself without end.
#[test]
fn an_interface_plugin_is_never_executed_as_ipam_plugin() {
    for plugin in ["bridge", "ptp"] {
        for (ipam, kind) in [("ptp", "interface"), ("flannel", "interface"), ("sbr", "chained")] {
            let (node, container) = (Node::new(), Container::new());
            let call =
                |verb, conf: &Value| node.call(plugin, verb).conf(conf).netns(&container.path());
            let good = json!({"name": "n", "cniVersion": "1.1.0", "cni.dev/valid-attachments": [],
                "ipam": node.host_local(&["10.1.0.0/24"])});
            let mut conf = good.clone();
            conf["prevResult"] = call("ADD", &good).result();
            conf["ipam"] = json!({"type": ipam});
            let msg = format!("invalid ipam type \"{ipam}\": it is a plugin of kind {kind}");
            for verb in ["STATUS", "GC", "CHECK"] {
                let error = call(verb, &conf).error();
                assert_eq!(error.brief(), (7, msg.as_str()), "{plugin} {verb}");
            }
            let warned = call("DEL", &conf).run();
            assert!(warned.status == Some(0) && warned.stderr.contains(&msg), "{warned:?}");
            assert_eq!(container.ip("link show type veth"), json!([]), "{plugin}");
            let before = (node.snapshot(), container.snapshot(&node));
            assert_eq!(call("ADD", &conf).error().brief(), (7, msg.as_str()), "{plugin}");
            assert_unchanged(&before.0, &node.snapshot());
            assert_unchanged(&before.1, &container.snapshot(&node));
        }
    }
}

/// The same with delegates that are not links to this executable: a copy, and a script.
#[test]
fn an_interface_plugin_is_refused_as_ipam_plugin() {
    for script in [false, true] {
        let node = Node::new();
        let path = node.bin().join("ptp");
        fs::remove_file(&path).unwrap();
        if script {
            let own = executable();
            node.script(
                "ptp",
                &format!("echo >> {}.calls; exec {} ptp", path.display(), own.display()),
            );
        } else {
            fs::copy(executable(), &path).unwrap();
        }
        let container = Container::new();
        let conf = json!({"name": "n", "cniVersion": "1.1.0", "ipam": {"type": "ptp"}});
        let call = |verb| node.call("bridge", verb).conf(&conf).netns(&container.path());
        for verb in ["ADD", "STATUS"] {
            assert_eq!(call(verb).error().code, 7, "{verb}");
        }
        call("DEL").ok();
        assert!(!node.bin().join("ptp.calls").exists(), "it was called");
    }
}
