//! `cnibox install` and `uninstall` in private directories: created files, replaced files, and
//! refusals, which must change nothing.

mod faults;
mod live;
mod place;
mod protect;
mod watch;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use cnibox::testing::APPLETS;
use cnibox::testing::AppletKind;
use serde_json::{Value, json};

use crate::support::compare;
use crate::support::node::{Call, Node, Outcome, executable, exists};

/// The executable under test and a plugin directory, `plugins`.
struct Installer<'n> {
    node: &'n Node,
    directory: PathBuf,
}

impl<'n> Installer<'n> {
    fn new(node: &'n Node) -> Installer<'n> {
        let directory = node.path("plugins");
        fs::create_dir(&directory).unwrap();
        Installer { node, directory }
    }

    /// A call of `cnibox <command> <directory> <args>`.
    fn call(&self, command: &str, args: &[&str]) -> Call {
        let directory = self.directory.display().to_string();
        let args = [&[command, &directory], args].concat();
        self.node.tool("cnitool", &args).program(executable()).without("DESTDIR")
    }

    #[track_caller]
    fn install(&self, args: &[&str]) -> String {
        self.call("install", args).printed()
    }

    #[track_caller]
    fn uninstall(&self) -> String {
        self.call("uninstall", &[]).printed()
    }

    /// Asserts that the call fails with one line on stderr and changes nothing.
    #[track_caller]
    fn refused(&self, args: &[&str]) -> String {
        let before = self.state();
        let outcome = self.call("install", args).run();
        assert_eq!((outcome.status, outcome.stdout.as_str()), (Some(1), ""), "{outcome:?}");
        assert_eq!(self.state(), before, "{outcome:?}");
        outcome.stderr
    }

    /// Every file and link of the directory: contents or hash, mode and inode.
    fn state(&self) -> BTreeMap<PathBuf, String> {
        let mut found = BTreeMap::new();
        let mut directories = vec![self.directory.clone()];
        while let Some(directory) = directories.pop() {
            for entry in fs::read_dir(&directory).unwrap() {
                let path = entry.unwrap().path();
                let metadata = path.symlink_metadata().unwrap();
                let text = if metadata.is_dir() {
                    directories.push(path.clone());
                    "directory".to_owned()
                } else if metadata.is_symlink() {
                    format!("-> {}", fs::read_link(&path).unwrap().display())
                } else {
                    format!("{:o} {} {}", metadata.mode(), metadata.ino(), metadata.len())
                };
                found.insert(path.strip_prefix(&self.directory).unwrap().to_owned(), text);
            }
        }
        found
    }

    /// The names in the directory, without cnibox's own subdirectory.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.directory).unwrap();
        let mut names: Vec<String> =
            entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.retain(|name| name != ".cnibox");
        names.sort();
        names
    }

    fn write(&self, name: &str, text: &[u8]) -> PathBuf {
        let path = self.directory.join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    /// The VERSION reply of an installed plugin, started as by a runtime.
    fn version(&self, name: &str) -> Outcome {
        self.node.call(name, "VERSION").program(self.directory.join(name)).run()
    }

    /// The first line of the plugin's about text; empty if the plugin cannot be started.
    fn about(&self, name: &str) -> String {
        let call = self.node.tool(name, &[]).program(self.directory.join(name));
        let stderr = call.try_run().map(|outcome| outcome.stderr).unwrap_or_default();
        stderr.lines().next().unwrap_or_default().to_owned()
    }

    #[track_caller]
    fn is_all_cnibox(&self) {
        for applet in APPLETS.iter().filter(|applet| applet.kind != AppletKind::Tool) {
            let outcome = self.version(applet.name);
            assert_eq!(outcome.status, Some(0), "{}: {outcome:?}", applet.name);
            assert!(self.about(applet.name).contains("+cnibox."), "{}", applet.name);
        }
    }

    fn binary(&self) -> PathBuf {
        self.directory.join("cnibox")
    }
}

/// An ELF file that identifies itself as a reference plugin; not executable.
fn like_the_reference(release: &str) -> Vec<u8> {
    let package = "github.com/containernetworking/plugins";
    format!("\x7fELF path\t{package}/plugins/main/bridge\nmod\t{package}\tv{release}\th1:x=\n")
        .into_bytes()
}

/// The executable under test with another version number of the same length.
fn as_release(release: &str) -> Vec<u8> {
    let own = format!("cnibox-release={};", env!("CARGO_PKG_VERSION"));
    let other = format!("cnibox-release={release};");
    assert_eq!(own.len(), other.len());
    let mut bytes = fs::read(executable()).unwrap();
    let at = bytes.windows(own.len()).position(|window| window == own.as_bytes());
    let at = at.expect("the executable has no mark");
    bytes[at..at + own.len()].copy_from_slice(other.as_bytes());
    bytes
}

#[test]
fn install_prints_how_to_run_the_commands() {
    let node = Node::new();
    let at = Installer::new(&node);
    let directory = at.directory.display().to_string();
    let hint = format!("cnibox and cnitool are in {directory}: export PATH=$PATH:{directory}\n");
    assert!(at.install(&[]).ends_with(&hint));
    let path = format!("/usr/bin:{directory}");
    assert!(!at.call("install", &[]).env("PATH", &path).printed().contains("PATH="));
    for quiet in [&["--json"][..], &["--dry-run"]] {
        assert!(!at.install(quiet).contains("PATH="), "{quiet:?}");
    }
    assert!(!at.call("install", &["--root", &directory]).printed().contains("PATH="));
}

#[test]
fn every_applet_is_installed_in_every_mode() {
    for mode in ["symlink", "hardlink", "copy"] {
        let node = Node::new();
        let at = Installer::new(&node);
        let said = at.install(&["--mode", mode]);
        let mut expected: Vec<_> = APPLETS.iter().map(|applet| applet.name).collect();
        expected.push("cnibox");
        expected.sort_unstable();
        assert_eq!(at.names(), expected, "{said}");
        at.is_all_cnibox();
        let binary = at.binary().metadata().unwrap();
        assert_eq!(binary.mode() & 0o7777, 0o755);
        assert_eq!(fs::read(at.binary()).unwrap(), fs::read(executable()).unwrap());
        let bridge = at.directory.join("bridge").symlink_metadata().unwrap();
        match mode {
            "symlink" => {
                assert_eq!(
                    fs::read_link(at.directory.join("bridge")).unwrap(),
                    Path::new("cnibox")
                );
            }
            "hardlink" => assert_eq!(bridge.ino(), binary.ino()),
            _ => assert!(bridge.ino() != binary.ino() && bridge.nlink() == 1),
        }
        let before = at.state();
        let said = at.install(&["--mode", mode]);
        assert!(said.contains("nothing to do"), "{said}");
        assert_eq!(at.state(), before);
        at.uninstall();
        assert_eq!(at.state(), BTreeMap::new(), "{mode}");
        assert!(at.uninstall().contains("nothing to do"));
    }
}

#[test]
fn install_changes_between_all_modes() {
    let node = Node::new();
    let at = Installer::new(&node);
    for mode in ["copy", "symlink", "hardlink", "copy", "hardlink", "symlink"] {
        at.install(&["--mode", mode]);
        at.is_all_cnibox();
        assert!(at.install(&["--mode", mode]).contains("nothing to do"), "{mode}");
    }
    at.uninstall();
    assert_eq!(at.names(), [""; 0]);
}

#[test]
fn the_reference_is_replaced_and_restored() {
    let Some(peer) = compare::peer("install over the reference") else { return };
    let node = Node::new();
    let at = Installer::new(&node);
    for name in ["bridge", "host-local", "loopback", "portmap"] {
        fs::copy(peer.join(name), at.directory.join(name)).unwrap();
    }
    // Some distributions install links.
    symlink(peer.join("ptp"), at.directory.join("ptp")).unwrap();
    at.write("calico", b"#!/bin/sh\n");
    let before = at.state();
    let said = at.install(&[]);
    assert!(said.contains("replaces a reference plugin, which is backed up"), "{said}");
    at.is_all_cnibox();
    // Reinstallations, in the same or another mode, do not change the backups.
    at.install(&["--mode", "copy"]);
    at.install(&[]);
    let said = at.uninstall();
    assert!(said.contains("restored: a reference plugin"), "{said}");
    assert_eq!(at.state(), before);
    assert_eq!(
        fs::read(at.directory.join("bridge")).unwrap(),
        fs::read(peer.join("bridge")).unwrap()
    );
}

#[test]
fn foreign_files_are_refused_without_an_option() {
    let node = Node::new();
    let at = Installer::new(&node);
    let script = b"#!/bin/sh\necho mine\n";
    at.write("bridge", script);
    symlink("nowhere", at.directory.join("ptp")).unwrap();
    let said = at.refused(&[]);
    let reason = "neither cnibox nor reference plugins: bridge, ptp; nothing was changed";
    assert!(said.contains(reason) && said.contains("--replace"), "{said}");
    at.install(&["--skip", "bridge,ptp"]);
    assert_eq!(fs::read(at.directory.join("bridge")).unwrap(), script);
    assert!(exists(at.directory.join("loopback")));
    let said = at.install(&["--replace"]);
    assert!(said.contains("replaces a foreign file, which is backed up"), "{said}");
    at.is_all_cnibox();
    at.uninstall();
    assert_eq!(at.names(), ["bridge", "ptp"]);
    assert_eq!(fs::read(at.directory.join("bridge")).unwrap(), script);
    assert_eq!(fs::read_link(at.directory.join("ptp")).unwrap(), Path::new("nowhere"));
    // Without a backup, `uninstall` restores nothing.
    at.install(&["--replace", "--no-backup"]);
    at.uninstall();
    assert_eq!(at.names(), [""; 0]);
}

#[test]
fn a_directory_in_a_plugins_place_is_never_replaced() {
    let node = Node::new();
    let at = Installer::new(&node);
    fs::create_dir(at.directory.join("bridge")).unwrap();
    assert!(at.refused(&["--replace"]).contains("bridge"));
    fs::remove_dir(at.directory.join("bridge")).unwrap();
    at.write("cnibox", b"something else");
    assert!(at.refused(&[]).contains("cnibox"));
    assert!(at.refused(&["--policy", "if-not-present"]).contains("neither cnibox nor"));
}

#[test]
fn downgrades_are_refused_unless_forced() {
    let node = Node::new();
    let at = Installer::new(&node);
    let newer = as_release("9.9.9");
    at.write("cnibox", &newer);
    let said = at.refused(&[]);
    assert!(said.contains("cnibox 9.9.9 is there, this is") && said.contains("--force"), "{said}");
    at.write("bridge", &like_the_reference("99.0.0"));
    at.write("ptp", &like_the_reference("1.0.0"));
    let said = at.install(&["--policy", "if-newer", "--no-verify"]);
    assert!(said.contains("stays: cnibox 9.9.9"), "{said}");
    assert!(said.contains("bridge         stays: the reference plugin 99.0.0"), "{said}");
    assert_eq!(fs::read(at.binary()).unwrap(), newer);
    assert!(at.about("ptp").contains("+cnibox."));
    assert_eq!(fs::read(at.directory.join("bridge")).unwrap(), like_the_reference("99.0.0"));
    at.install(&["--force"]);
    assert_eq!(fs::read(at.binary()).unwrap(), fs::read(executable()).unwrap());
    // The newer release replaces this one.
    let newer = node.path("cnibox-9.9.9");
    fs::write(&newer, as_release("9.9.9")).unwrap();
    fs::set_permissions(&newer, fs::Permissions::from_mode(0o755)).unwrap();
    let said = at.call("install", &["--policy", "if-newer"]).program(&newer).printed();
    assert!(said.contains("replaces cnibox"), "{said}");
    assert_eq!(fs::read(at.binary()).unwrap(), fs::read(&newer).unwrap());
    // The files that the first release replaced are restored all the same.
    let said = at.uninstall();
    assert!(said.contains("restored: the reference plugin 99.0.0"), "{said}");
    assert_eq!(at.names(), ["bridge", "ptp"]);
}

#[test]
fn policies_never_and_if_not_present_keep_files() {
    let node = Node::new();
    let at = Installer::new(&node);
    at.write("bridge", b"mine");
    let before = at.state();
    at.install(&["--policy", "never"]);
    assert_eq!(at.state(), before);
    at.install(&["--policy", "if-not-present"]);
    assert_eq!(fs::read(at.directory.join("bridge")).unwrap(), b"mine");
    assert_eq!(at.version("ptp").status, Some(0));
    assert!(at.install(&["--policy", "if-not-present"]).contains("nothing to do"));
    at.uninstall();
    assert_eq!(at.names(), ["bridge"]);
}

#[test]
fn a_dry_run_changes_nothing_and_prints_valid_json() {
    let node = Node::new();
    let at = Installer::new(&node);
    at.write("bridge", &like_the_reference("1.5.1"));
    let before = at.state();
    let report: Value = at.call("install", &["--dry-run", "--json"]).found();
    assert_eq!(at.state(), before);
    assert_eq!((&report["changed"], &report["dryRun"]), (&true.into(), &true.into()));
    let files = report["files"].as_array().unwrap();
    assert_eq!(files.len(), APPLETS.len() + 1);
    let bridge = files.iter().find(|file| file["name"] == "bridge").unwrap();
    assert_eq!((&bridge["action"], &bridge["backup"]), (&"replace".into(), &true.into()));
    assert_eq!(bridge["was"], "the reference plugin 1.5.1");
    let done: Value = at.call("install", &["--json"]).result();
    assert_eq!(done["files"], report["files"]);
    let report: Value = at.call("uninstall", &["--dry-run", "--json"]).found();
    at.is_all_cnibox();
    let files = report["files"].as_array().unwrap();
    let bridge = files.iter().find(|file| file["name"] == "bridge").unwrap();
    assert_eq!(bridge["action"], "restore");
}

#[test]
fn uninstall_keeps_files_changed_since() {
    let node = Node::new();
    let at = Installer::new(&node);
    at.write("bridge", &like_the_reference("1.5.1"));
    at.install(&[]);
    fs::remove_file(at.directory.join("bridge")).unwrap();
    at.write("bridge", b"newer than all");
    fs::remove_file(at.directory.join("ptp")).unwrap();
    let said = at.uninstall();
    assert!(said.contains("bridge         stays: a foreign file"), "{said}");
    assert_eq!(at.names(), ["bridge"]);
    assert_eq!(fs::read(at.directory.join("bridge")).unwrap(), b"newer than all");
    let kept = at.directory.join(".cnibox/backup/bridge");
    assert_eq!(fs::read(kept).unwrap(), like_the_reference("1.5.1"), "lost");
}

#[test]
fn applets_of_the_former_release_are_removed() {
    let node = Node::new();
    let at = Installer::new(&node);
    at.install(&[]);
    let manifest = at.directory.join(".cnibox/manifest.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&manifest).unwrap()).unwrap();
    let old = serde_json::json!({"name": "old-plugin", "link": "cnibox"});
    json["files"].as_array_mut().unwrap().push(old);
    fs::write(&manifest, json.to_string()).unwrap();
    symlink("cnibox", at.directory.join("old-plugin")).unwrap();
    let said = at.install(&[]);
    assert!(said.contains("old-plugin     removed"), "{said}");
    assert!(!exists(at.directory.join("old-plugin")));
    // A manifest must not lead outside the directory.
    json["files"][0]["name"] = "../escaped".into();
    fs::write(&manifest, json.to_string()).unwrap();
    assert!(at.refused(&[]).contains("\"../escaped\" is not a file name"));
}

/// The reference accepts what is refused here: an operator learns it before the plugins change.
#[test]
fn install_warns_of_networks_that_will_be_refused() {
    let node = Node::new();
    let at = Installer::new(&node);
    let conf_dir = node.path("net.d");
    fs::create_dir(&conf_dir).unwrap();
    let volume = "/var/lib/kubelet/pods/1/volumes/x";
    let plugins = json!([{"type": "tuning", "mtu": 1400, "dataDir": volume}]);
    let network = json!({"cniVersion": "1.0.0", "name": "pods", "plugins": plugins});
    fs::write(conf_dir.join("10-pods.conflist"), network.to_string()).unwrap();
    for arguments in [["--dry-run"].as_slice(), &[]] {
        let arguments = [&["--conf-dir", conf_dir.to_str().unwrap()], arguments].concat();
        let outcome = at.call("install", &arguments).run();
        assert!(outcome.status.is_some_and(|status| status < 2), "{outcome:?}");
        let warning = format!("\"tuning\": dataDir \"{volume}\" may be of a container");
        assert!(outcome.stderr.contains(&warning), "{outcome:?}");
    }
}

#[test]
fn a_configuration_is_installed_after_its_plugins() {
    let node = Node::new();
    let at = Installer::new(&node);
    let conf_dir = node.path("net.d");
    let source = node.path("10-x.conflist");
    let args = |extra: &[&'static str]| -> Vec<String> {
        let own =
            ["--conflist", source.to_str().unwrap(), "--conf-dir", conf_dir.to_str().unwrap()];
        own.iter().chain(extra).map(|arg| (*arg).to_owned()).collect()
    };
    let run = |extra: &[&'static str]| {
        let args = args(extra);
        at.call("install", &args.iter().map(String::as_str).collect::<Vec<_>>()).run()
    };
    let installed = conf_dir.join("10-x.conflist");
    for (text, reason) in [
        ("{", "error parsing configuration list"),
        (r#"{"name": "x y", "plugins": [{"type": "ptp"}]}"#, "invalid characters"),
        (r#"{"name": "x", "plugins": [{"type": "calico"}]}"#, "no plugin \"calico\" in"),
    ] {
        fs::write(&source, text).unwrap();
        let outcome = run(&[]);
        assert!(outcome.stderr.contains(reason), "{outcome:?}");
        assert_eq!((outcome.status, at.names().len()), (Some(1), 0), "{outcome:?}");
    }
    let list = r#"{"cniVersion": "1.0.0", "name": "x", "plugins": [{"type": "ptp"}]}"#;
    fs::write(&source, list).unwrap();
    let outcome = run(&[]);
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    assert_eq!(fs::read_to_string(&installed).unwrap(), list);
    assert!(run(&[]).stdout.contains("nothing to do"));
    // An update of an unmodified file, then of a file that has been edited.
    fs::write(&source, list.replace("1.0.0", "1.1.0")).unwrap();
    assert_eq!(run(&[]).status, Some(0));
    assert!(fs::read_to_string(&installed).unwrap().contains("1.1.0"));
    fs::write(&installed, "edited").unwrap();
    let outcome = run(&[]);
    assert!(outcome.stderr.contains("not from this installer"), "{outcome:?}");
    assert_eq!(fs::read_to_string(&installed).unwrap(), "edited");
    assert_eq!(run(&["--replace"]).status, Some(0));
    at.uninstall();
    assert_eq!(fs::read_to_string(&installed).unwrap(), "edited");
    fs::remove_file(&installed).unwrap();
    assert_eq!(run(&[]).status, Some(0));
    at.uninstall();
    assert!(!exists(&installed));
}
