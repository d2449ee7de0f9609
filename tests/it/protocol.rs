//! The behaviour common to all plugins as this project defines it: environment, versions, VERSION,
//! the about text. `cni-sanity` tests the conformance to the specification: `sanity.rs`.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use serde_json::{Value, json};

use crate::support::net::{Net, merged};
use crate::support::node::{Container, Node, executable};
use crate::support::strace;

const PLUGINS: [&str; 4] = ["bridge", "host-local", "loopback", "ptp"];

#[test]
fn version_needs_no_input_and_no_other_variable() {
    let node = Node::new();
    for plugin in PLUGINS {
        let outcome = node.call(plugin, "VERSION").without("CNI_PATH").run();
        assert_eq!(
            outcome.stdout,
            "{\"cniVersion\":\"1.1.0\",\"supportedVersions\":[\"0.1.0\",\"0.2.0\",\"0.3.0\",\"0.3.1\",\"0.4.0\",\"1.0.0\",\"1.1.0\"]}\n"
        );
        assert_eq!((outcome.status, outcome.stderr.as_str()), (Some(0), ""));
    }
}

#[test]
fn a_plugin_without_variables_prints_what_it_is() {
    let node = Node::new();
    for plugin in PLUGINS {
        let outcome = node.call(plugin, "").without("CNI_COMMAND").run();
        assert_eq!((outcome.status, outcome.stdout.as_str()), (Some(0), ""));
        let lines: Vec<_> = outcome.stderr.lines().collect();
        let start = format!("CNI {plugin} plugin v1.9.1+cnibox.");
        assert!(lines.len() == 2 && lines[0].starts_with(&start), "{lines:?}");
        let versions =
            "CNI protocol versions supported: 0.1.0, 0.2.0, 0.3.0, 0.3.1, 0.4.0, 1.0.0, 1.1.0";
        assert_eq!(lines[1], versions);
    }
}

#[test]
fn the_help_of_a_plugin_lists_its_keys() {
    let node = Node::new();
    let help = |plugin, word| node.tool(plugin, &[word]).printed();
    for (plugin, keys) in [
        ("bridge", &["isDefaultGateway", "vlanTrunk[].minID"][..]),
        ("host-local", &["ipam.ranges[][].rangeStart", "ipam.reuseDelay"]),
        ("loopback", &["none of its own"]),
    ] {
        let text = help(plugin, "--help");
        assert!(text.starts_with(&format!("{plugin}: ")), "{text}");
        for key in keys {
            assert!(text.contains(&format!("\n  {key}\n")), "{key}: {text}");
        }
        assert!(!text.contains("runtimeConfig"), "{text}");
        assert_eq!([help(plugin, "-h"), help(plugin, "help")], [text.clone(), text]);
        assert_eq!(help(plugin, "--version"), help("cnitool", "--version"));
    }
}

#[test]
fn missing_and_invalid_variables_are_named() {
    let node = Node::new();
    let conf = json!({"name": "n", "cniVersion": "1.0.0"});
    let add = node.call("bridge", "ADD").conf(&conf).netns("/x");
    let brief = |call: crate::support::node::Call| {
        let error = call.error();
        (error.code, error.msg)
    };
    let missing = add.clone().without("CNI_NETNS").without("CNI_IFNAME").without("CNI_PATH");
    assert_eq!(
        brief(missing),
        (4, "required env variables [CNI_NETNS,CNI_IFNAME,CNI_PATH] missing".into())
    );
    for (ifname, msg) in [
        ("sixteen-bytes-xx", "interface name is too long"),
        ("..", "interface name is . or .."),
        ("a/b", "interface name contains / or : or whitespace characters"),
    ] {
        assert_eq!(brief(add.clone().ifname(ifname)), (4, msg.into()));
    }
    for id in ["a/b", "../x", "..", "a b"] {
        let error = add.clone().id(id).error();
        assert_eq!(error.brief(), (4, "invalid characters in containerID"));
        assert_eq!(error.details, id);
    }
    let unknown = node.call("bridge", "FOO").conf(&conf);
    assert_eq!(brief(unknown), (4, "unknown CNI_COMMAND: FOO".into()));
}

#[test]
fn verbs_require_their_minimum_version() {
    let node = Node::new();
    let error = |verb: &str, version: &str| {
        let conf = json!({"name": "n", "cniVersion": version, "ipam": {"type": "host-local"}});
        let error = node.call("bridge", verb).netns("/x").conf(&conf).error();
        (error.code, error.msg)
    };
    assert_eq!(error("CHECK", "0.3.1"), (1, "config version does not allow CHECK".into()));
    assert_eq!(error("GC", "1.0.0"), (1, "config version does not allow GC".into()));
    assert_eq!(error("STATUS", "1.0.0"), (1, "config version does not allow STATUS".into()));
    assert_eq!(error("CHECK", "2.0.0"), (1, "plugin version does not allow CHECK".into()));
    assert_eq!(error("CHECK", "0.5.0"), (1, "incompatible CNI versions".into()));
    assert_eq!(error("CHECK", "x").0, 6);
    let conf = json!({"name": "n", "cniVersion": "0.5.0"});
    let error = node.call("bridge", "ADD").netns("/x").conf(&conf).error();
    assert_eq!(
        error.details,
        r#"config is "0.5.0", plugin supports ["0.1.0" "0.2.0" "0.3.0" "0.3.1" "0.4.0" "1.0.0" "1.1.0"]; write "0.4.0""#
    );
}

#[test]
fn del_reports_a_namespace_that_cannot_be_opened() {
    let (node, container) = (Node::new(), Container::new());
    let net = Net::new(&node, "ptp", "1.1.0", &json!({"ipam": node.host_local(&["10.1.0.0/24"])}));
    net.add(&container);
    let path = node.path("closed/netns").display().to_string();
    fs::create_dir(node.path("closed")).unwrap();
    fs::write(&path, "").unwrap();
    let closed = node.path("closed").display().to_string();
    node.sh(&format!(
        "mount --bind {} {path}; chmod 0 {closed}; chown 1 {closed}",
        container.path()
    ));
    let del = net.call("DEL", "c1").netns(&path);
    let caps = "-dac_override,-dac_read_search";
    let error = del.clone().under(&["setpriv", "--bounding-set", caps, "--inh-caps", caps]).error();
    assert_eq!(error.code, 8, "{error:?}");
    // What is on the host is deleted nevertheless.
    assert_eq!((net.leases(), node.ip("link show type veth")), (Vec::new(), json!([])));
    del.ok();
}

#[test]
fn the_plugins_own_namespace_is_refused_first_of_all() {
    let node = Node::new();
    // The test's thread has another namespace than the main thread.
    let own = format!("/proc/{}/task/{}/ns/net", std::process::id(), nix::unistd::gettid());
    for plugin in ["bridge", "ptp", "loopback"] {
        let conf =
            json!({"name": "n", "cniVersion": "1.1.0", "ipam": node.host_local(&["10.1.0.0/24"])});
        let before = node.snapshot();
        let error = node.call(plugin, "ADD").netns(&own).conf(&conf).error();
        let msg = "plugin's netns and netns from CNI_NETNS should not be the same";
        assert_eq!(error.brief(), (8, msg), "{plugin}");
        // The number of a process that has ended may be another process's now: the container is
        // gone.
        let outcome = node.call(plugin, "DEL").netns(&own).conf(&conf).run();
        assert_eq!(outcome.status, Some(0), "{plugin} {outcome:?}");
        let warning = "is this plugin's own namespace: the container's namespace is gone";
        assert!(outcome.stderr.contains(warning), "{outcome:?}");
        crate::support::node::assert_unchanged(&before, &node.snapshot());
    }
    // `CNI_NETNS_OVERRIDE` permits it.
    let conf = json!({"name": "n", "cniVersion": "1.1.0"});
    let call = node.call("loopback", "ADD").netns(&own).conf(&conf);
    call.env("CNI_NETNS_OVERRIDE", "True").result();
}

#[test]
fn keys_match_in_any_case_and_null_is_absent() {
    let node = Node::new();
    let container = Container::new();
    let mut ipam: Value = node.host_local(&["10.1.0.0/24"]);
    ipam["DATADIR"] = ipam["dataDir"].take();
    let conf =
        json!({"NAME": "n", "CniVersion": "1.0.0", "BRIDGE": "br7", "mtu": null, "IPAM": ipam});
    let result = node.call("bridge", "ADD").conf(&conf).netns(&container.path()).result();
    assert_eq!(result["interfaces"][0]["name"], "br7");
    assert_eq!(node.leases("n"), ["10.1.0.2"]);
}

#[test]
fn unknown_names_get_a_clear_error() {
    let node = Node::new();
    std::os::unix::fs::symlink(executable(), node.bin().join("brigde")).unwrap();
    let error = node.call("brigde", "ADD").error();
    assert_eq!(error.brief(), (7, "cnibox has no applet \"brigde\""));
    assert_eq!(error.details, "did you mean \"bridge\"?");
    let outcome = node.call("brigde", "").without("CNI_COMMAND").run();
    assert_eq!((outcome.status, outcome.stdout.as_str()), (Some(1), ""));
    assert!(outcome.stderr.contains("no applet \"brigde\""));
    std::os::unix::fs::symlink(executable(), node.bin().join("frobnicate")).unwrap();
    assert!(
        node.call("frobnicate", "ADD")
            .error()
            .details
            .starts_with("the applets are: bandwidth, bond, bridge, ")
    );
}

/// An executable is replaced by renaming a file beside it, and commands have links as applets have.
#[test]
fn the_executable_and_its_commands_have_names() {
    let node = Node::new();
    let called = |name: &str, args: &[&str]| {
        std::os::unix::fs::symlink(executable(), node.bin().join(name)).unwrap();
        let outcome = node.tool(name, args).run();
        assert_eq!((outcome.status, &*outcome.stderr), (Some(0), ""), "{name}");
        outcome.stdout
    };
    for name in ["cnibox.new", ".cnibox", "cnibox2", "cnibox-0.2.0-x86_64"] {
        assert!(called(name, &["version"]).starts_with("cnibox "), "{name}");
    }
    for name in ["doctor", "lint", "gc", "install", "trace"] {
        assert!(called(name, &["--help"]).starts_with(&format!("{name}: ")), "{name}");
        // As with the links of other tools, nothing is done without arguments.
        let alone = node.tool(name, &[]).run().stdout;
        assert!(alone.contains(&format!("\n  cnibox {name}")), "{name}: {alone}");
        let error = node.call(name, "ADD").error();
        assert_eq!(error.brief(), (7, &*format!("\"{name}\" is a tool, not a plugin")));
    }
}

/// The kernel assigns a closed standard descriptor to the next opened file, so the result could be
/// written to an arbitrary file.
#[test]
fn closed_standard_descriptors_do_not_become_other_files() {
    strace::require();
    let node = Node::new();
    let ipam = node.host_local(&["10.1.0.0/24"]);
    let conf = json!({"name": "n", "cniVersion": "1.0.0", "ipam": ipam});
    let record = node.path("strace").display().to_string();
    for closed in [">&-", "2>&- >&-", "<&- 2>&- >&-"] {
        let script = format!("exec \"$0\" {closed}");
        let wrapper = ["strace", "-y", "-e", "trace=write", "-o", &record, "sh", "-c", &script];
        node.call("host-local", "ADD").conf(&conf).netns("/no/such").under(&wrapper).run();
        let text = fs::read_to_string(&record).unwrap();
        let to_stdout: Vec<_> = text.lines().filter(|line| line.starts_with("write(1<")).collect();
        assert!(!to_stdout.is_empty(), "{closed}: no result in {text}");
        assert!(to_stdout.iter().all(|line| line.contains("</dev/null>, ")), "{closed}: {text}");
        // The result was lost, so the address is released.
        assert_eq!(node.leases("n"), [""; 0], "{closed}");
    }
    let call = node.call("host-local", "ADD").conf(&conf).netns("/no/such");
    let outcome = call.in_script("exec \"$0\" <&-").run();
    let error: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!((outcome.status, &error["code"]), (Some(1), &json!(6)), "{outcome:?}");
}

#[test]
fn add_rolls_back_if_stdout_is_closed() {
    let node = Node::new();
    let conf =
        json!({"name": "n", "cniVersion": "1.0.0", "ipam": node.host_local(&["10.1.0.0/24"])});
    let mut child = node.call("host-local", "ADD").netns("/no/such").command().spawn().unwrap();
    drop(child.stdout.take());
    child.stdin.take().unwrap().write_all(conf.to_string().as_bytes()).unwrap();
    let status = child.wait().unwrap();
    assert_eq!((status.code(), status.signal()), (Some(1), None));
    assert_eq!(node.leases("n"), [""; 0]);
}

#[test]
fn a_file_size_limit_is_reported_as_an_error() {
    let node = Node::new();
    let conf =
        json!({"name": "n", "cniVersion": "1.0.0", "ipam": node.host_local(&["10.1.0.0/24"])});
    let call = node.call("host-local", "ADD").conf(&conf).netns("/no/such");
    let outcome = call.in_script("ulimit -f 0; exec \"$0\"").run();
    assert_eq!(outcome.status, Some(1), "{outcome:?}");
    assert!(outcome.stdout.contains("file too large"), "{outcome:?}");
    assert_eq!(node.leases("n"), [""; 0]);
}

#[test]
fn an_endless_request_is_refused() {
    let node = Node::new();
    let call = node.call("host-local", "ADD").netns("/no/such");
    let outcome = call.in_script("exec \"$0\" </dev/zero").run();
    let error: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let msg = "error reading from stdin: the request is longer than 16 MiB";
    assert_eq!((outcome.status, &error["msg"]), (Some(1), &json!(msg)), "{outcome:?}");
}

#[test]
fn invalid_utf8_in_a_configuration_is_accepted() {
    let (node, container) = (Node::new(), Container::new());
    let conf = b"{\"name\":\"n\",\"cniVersion\":\"1.0.0\",\"x\":\"\xff\"}";
    node.call("loopback", "ADD").stdin(conf).ifname("lo").netns(&container.path()).result();
}

#[test]
fn del_accepts_any_length_of_the_namespace_path() {
    let node = Node::new();
    let conf =
        json!({"name": "n", "cniVersion": "1.0.0", "ipam": node.host_local(&["10.1.0.0/24"])});
    let path = format!("/run/netns/{}", "x".repeat(300));
    for verb in ["ADD", "DEL", "DEL"] {
        let outcome = node.call("host-local", verb).conf(&conf).netns(&path).run();
        assert_eq!(outcome.status, Some(0), "{verb} {outcome:?}");
    }
    assert_eq!(node.leases("n"), [""; 0]);
}

/// The `security.capability` attribute, version 2: `CAP_NET_ADMIN`, permitted and effective.
const NET_ADMIN: [u8; 20] = {
    let mut bytes = [0; 20];
    (bytes[0], bytes[3], bytes[5]) = (1, 2, 1 << 4);
    bytes
};

#[test]
fn a_set_user_id_copy_refuses_other_users() {
    let node = Node::new();
    for dir in [node.path(""), node.bin()] {
        fs::set_permissions(dir, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let copy = node.bin().join("copy");
    // A program of the caller's choice, which the plugin would execute with its privileges.
    node.script("mine", "id >&2; exit 1");
    let conf = node.path("conf");
    let ipam = json!({"type": "mine"});
    let json = json!({"cniVersion": "1.1.0", "name": "n", "type": "ptp", "ipam": ipam});
    fs::write(&conf, json.to_string()).unwrap();
    let call = |user: &str| {
        let mut command = Command::new("setpriv");
        let ids = [format!("--reuid={user}"), format!("--regid={user}")];
        command.args(ids).arg("--clear-groups").arg(&copy).arg("ptp");
        command.env("CNI_COMMAND", "STATUS").env("CNI_PATH", node.bin());
        let output = command.stdin(fs::File::open(&conf).unwrap()).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        let error: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        (output.status.code(), error["msg"].as_str().unwrap_or_default().to_owned(), said)
    };
    let install = |mode: u32| {
        fs::copy(executable(), &copy).unwrap();
        fs::set_permissions(&copy, fs::Permissions::from_mode(mode)).unwrap();
    };
    let refusal = "set-user-id, set-group-id or with file capabilities: refused";
    for (mode, capabilities) in [(0o4755, false), (0o2755, false), (0o755, true)] {
        install(mode);
        if capabilities {
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::setxattr(&copy, "security.capability", &NET_ADMIN, flags).unwrap();
        }
        let (status, msg, said) = call("65534");
        assert!(said.starts_with(refusal) && msg.starts_with(refusal), "{mode:o} {said} {msg}");
        assert_eq!(status, Some(1), "{mode:o}");
        assert!(!call("0").2.contains(refusal), "{mode:o}: root has these powers anyway");
    }
    install(0o755);
    assert!(!call("65534").2.contains(refusal));
}

/// apptainer, singularity, nerdctl with the bit: the real user of all its children is not root.
#[test]
fn a_set_user_id_runtime_is_accepted() {
    let (node, container) = (Node::new(), Container::new());
    let ipam = node.host_local(&["10.1.0.0/24"]);
    let keys = json!({"ipMasq": true, "ipMasqBackend": "iptables", "ipam": ipam});
    let conf = merged(&json!({"cniVersion": "1.0.0", "name": "n"}), &keys);
    let runtime = [
        "python3",
        "-c",
        "import os, sys; os.setresuid(65534, 0, 0); os.execv(sys.argv[1], sys.argv[1:])",
    ];
    let call = |plugin: &str, verb| {
        node.call(plugin, verb).netns(&container.path()).conf(&conf).under(&runtime)
    };
    assert_eq!(call("ptp", "VERSION").run().status, Some(0));
    call("ptp", "ADD").result();
    // Also without the directories of root's programs in PATH.
    let narrow = call("ptp", "DEL").env("PATH", "/usr/bin:/bin").run();
    assert_eq!(narrow.status, Some(0), "{narrow:?}");
    assert_eq!(node.leases("n"), [""; 0]);
}
