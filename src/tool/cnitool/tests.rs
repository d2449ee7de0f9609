//! The tool with a script as its plugin, and all inputs from arguments and environment.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use tempfile::TempDir;

use super::*;
use crate::applets::TABLE;
use crate::options::{self, ParsedCommandLine};

/// A node with one network `net` of one plugin, which logs verb, id, namespace and interface.
fn node() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log").display().to_string();
    plugin(
        &dir,
        &format!(
            "echo \"$CNI_COMMAND $CNI_CONTAINERID $CNI_NETNS $CNI_IFNAME $CNI_ARGS\" >> {log}\n\
             cat > {log}.$CNI_COMMAND\n\
             [ $CNI_COMMAND != VERSION ] || \
             echo '{{\"cniVersion\":\"1.1.0\",\"supportedVersions\":[\"1.0.0\",\"1.1.0\"]}}'\n\
             [ $CNI_COMMAND != ADD ] || \
             echo '{{\"cniVersion\":\"1.1.0\",\"ips\":[{{\"address\":\"10.0.0.1/24\"}}]}}'"
        ),
    );
    let text = r#"{"name":"net","cniVersion":"1.1.0","type":"a","capabilities":{"mac":true}}"#;
    fs::write(dir.path().join("10-net.conf"), text).unwrap();
    dir
}

fn plugin(dir: &TempDir, body: &str) {
    let path = dir.path().join("a");
    fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
}

fn words(text: &str) -> Vec<String> {
    text.split_whitespace().map(str::to_owned).collect()
}

/// Runs a command line on the node, with these variables set.
fn tool(dir: &TempDir, line: &str, env: &[(&str, &str)]) -> Result<String> {
    let mut args = words(line);
    let path = dir.path().display();
    for (flag, below) in [("--conf-dir", ""), ("--plugin-path", ""), ("--cache-dir", "/cache")] {
        args.push(format!("{flag}={path}{below}"));
    }
    let env = |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
    run_command(&read(args, env)?, TABLE)
}

/// The calls of the plugin since the last call of this function.
fn calls(dir: &TempDir) -> Vec<String> {
    let path = dir.path().join("log");
    let text = fs::read_to_string(&path).unwrap_or_default();
    drop(fs::remove_file(path));
    text.lines().map(|line| line.trim_end().to_owned()).collect()
}

fn read(args: Vec<String>, env: impl Fn(&str) -> Option<String>) -> Result<CnitoolOptions> {
    match options::parse_args(args, OPTIONS)? {
        ParsedCommandLine::Work(line) => CnitoolOptions::from_command_line(line, env),
        asked => panic!("{asked:?}"),
    }
}

fn options(line: &str, env: &[(&str, &str)]) -> Result<CnitoolOptions> {
    let env = |name: &str| env.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
    read(words(line), env)
}

#[test]
fn container_ids_are_derived_as_in_the_reference() {
    for (netns, id) in [
        ("/var/run/netns/testing", "cnitool-77383ca0a0715733ca6f"),
        ("/var/run/netns/cnitest", "cnitool-20c433bb2b1d6ede56d6"),
        ("/run/netns/testing", "cnitool-43057b9dcc39fe733071"),
    ] {
        assert_eq!(derive_container_id(netns), id);
    }
    for (path, clean) in
        [("/a//b/./c/../d/", "/a/b/d"), ("/../..", "/"), ("/proc/1/ns/net", "/proc/1/ns/net")]
    {
        assert_eq!(absolute_path(path).unwrap(), clean);
    }
    let here = std::env::current_dir().unwrap();
    assert_eq!(absolute_path("x/../y").unwrap(), here.join("y").display().to_string());
}

#[test]
fn add_check_and_del_work() {
    let dir = node();
    let id = "cnitool-43057b9dcc39fe733071";
    let said = tool(&dir, "add net /run/netns//testing", &[("CNI_ARGS", "K=V;L=W")]).unwrap();
    let result = concat!(
        "{\n    \"cniVersion\": \"1.1.0\",\n    \"ips\": [\n        {\n",
        "            \"address\": \"10.0.0.1/24\"\n        }\n    ]\n}"
    );
    assert_eq!(said, result);
    assert_eq!(calls(&dir), [format!("ADD {id} /run/netns/testing eth0 K=V;L=W")]);
    for verb in ["check", "del", "del"] {
        assert_eq!(tool(&dir, &format!("{verb} net /run/netns/testing extra"), &[]).unwrap(), "");
        let call = format!("{} {id} /run/netns/testing eth0", verb.to_uppercase());
        assert_eq!(calls(&dir), [call]);
    }
}

#[test]
fn options_win_over_the_environment() {
    let dir = node();
    let env = [("CNI_IFNAME", "net1"), ("CAP_ARGS", r#"{"mac":"env"}"#)];
    let request = || fs::read_to_string(dir.path().join("log.ADD")).unwrap();
    tool(&dir, "add net /x", &env).unwrap();
    assert!(calls(&dir)[0].ends_with(" /x net1") && request().contains(r#"{"mac":"env"}"#));
    let line = r#"-i net2 add --container-id mine net --cap-args={"mac":"arg"} /x"#;
    tool(&dir, line, &env).unwrap();
    assert_eq!(calls(&dir), ["ADD mine /x net2"]);
    assert!(request().contains(r#"{"mac":"arg"}"#));
    tool(&dir, "add net /x", &[("CNI_IFNAME", "")]).unwrap();
    assert!(calls(&dir)[0].ends_with(" eth0"));
}

#[test]
fn options_have_the_references_defaults() {
    let given = options("status net", &[]).unwrap();
    assert_eq!(given.conf_dir, PathBuf::from("/etc/cni/net.d"));
    assert_eq!((given.cache_dir, given.ifname.as_str()), ("/var/lib/cni".into(), "eth0"));
    assert!(given.plugin_dirs.is_empty());
    let env = [("NETCONFPATH", "/conf"), ("CNI_PATH", "/a:b")];
    let given = options("status net", &env).unwrap();
    assert_eq!((given.conf_dir, given.plugin_dirs.len()), ("/conf".into(), 2));
}

#[test]
fn wrong_arguments_are_explained() {
    for (line, text) in [
        ("", "no command given"),
        ("ad net /x", "unknown command \"ad\"; did you mean \"add\"?"),
        (
            "add net",
            "requires at least 2 arg(s), only received 1; usage: cnitool add <network> <netns>",
        ),
        ("gc", "requires at least 1 arg(s), only received 0; usage: cnitool gc <network>"),
    ] {
        assert_eq!(options(line, &[]).unwrap_err().to_string(), text);
    }
    let dir = node();
    let said = |line: &str, env: &[(&str, &str)]| tool(&dir, line, env).unwrap_err().to_string();
    let text = said("add nett /x", &[]);
    assert!(text.starts_with("no net configuration with name \"nett\" in "), "{text}");
    assert!(text.ends_with("; there are: net"), "{text}");
    for piece in ["K", "K=", "=V", "K=V=W", "K=V;"] {
        let bad = piece.rsplit(';').next().unwrap();
        let text = said("add net /x", &[("CNI_ARGS", piece)]);
        assert!(text.starts_with(&format!("invalid CNI_ARGS pair \"{bad}\"")), "{text}");
    }
    assert!(said("add net /x", &[("CAP_ARGS", "[]")]).contains("capability arguments are"));
    let bare = options("version a", &[]).unwrap();
    let text = run_command(&bare, TABLE).unwrap_err().to_string();
    assert!(text.starts_with("no paths provided; set CNI_PATH "), "{text}");
    assert!(calls(&dir).is_empty());
}

#[test]
fn a_failed_add_leaves_nothing() {
    let dir = node();
    let log = dir.path().join("log").display().to_string();
    plugin(
        &dir,
        &format!("echo $CNI_COMMAND >> {log}; echo '{{\"code\":7,\"msg\":\"no\"}}'; exit 1"),
    );
    let error = tool(&dir, "add net /x", &[]).unwrap_err();
    assert_eq!(error.to_string(), "plugin type=\"a\" name=\"net\" failed (add): no");
    assert_eq!(calls(&dir), ["ADD", "DEL"]);
}

#[test]
fn gc_keeps_the_named_attachments() {
    let dir = node();
    let key = "cni.dev/valid-attachments";
    let request = || fs::read_to_string(dir.path().join("log.GC")).unwrap();
    for netns in ["/run/netns/testing", "/x"] {
        tool(&dir, &format!("add net {netns}"), &[]).unwrap();
    }
    calls(&dir);
    tool(&dir, "gc net --keep /run/netns/testing --keep abc:net1", &[]).unwrap();
    let told = concat!(
        r#"[{"containerID":"cnitool-43057b9dcc39fe733071","ifname":"eth0"},"#,
        r#"{"containerID":"abc","ifname":"net1"}]"#
    );
    assert!(request().contains(told), "{}", request());
    assert_eq!(calls(&dir).len(), 2, "one DEL and GC");
    tool(&dir, "gc net --keep-none", &[]).unwrap();
    assert!(request().contains(&format!("\"{key}\":[]")));
    tool(&dir, "gc net /unused", &[]).unwrap();
    assert!(!request().contains(key));
}

#[test]
fn version_validate_and_status_print_their_answer() {
    let dir = node();
    assert_eq!(tool(&dir, "version a", &[]).unwrap(), "1.0.0 1.1.0\n");
    let said = tool(&dir, "validate net", &[]).unwrap();
    assert_eq!(said, "network net\nversion 1.1.0\nplugins a\ncapabilities mac\n");
    assert_eq!(tool(&dir, "status net", &[]).unwrap(), "");
    assert_eq!(calls(&dir).last().unwrap(), "STATUS");
    assert!(tool(&dir, "version none", &[]).is_err());
}
