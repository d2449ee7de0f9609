//! Operations on networks whose plugins are shell scripts.

mod cache;
mod conf;
mod housekeeping;
mod list;
mod ops;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use tempfile::TempDir;

use super::{AttachmentParams, NetworkList, Runtime};
use crate::json::Json;

/// A node: the directories of plugins, configurations and cache, and the recorded calls of plugins.
struct Node {
    dir: TempDir,
    runtime: Runtime,
}

impl Node {
    fn new() -> Node {
        let dir = tempfile::tempdir().unwrap();
        for name in ["bin", "net.d", "log"] {
            fs::create_dir(dir.path().join(name)).unwrap();
        }
        let runtime = Runtime {
            cache_dir: dir.path().join("cache"),
            deadline: Some(Duration::from_secs(30)),
            ..Runtime::new(vec![dir.path().join("bin")])
        };
        Node { dir, runtime }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A plugin that records each call and then does what `body` says.
    fn plugin(&self, name: &str, body: &str) {
        let log = self.path("log").display().to_string();
        let text = format!(
            "#!/bin/sh\n\
             echo \"$CNI_COMMAND {name}\" >> {log}/calls\n\
             cat > {log}/{name}.$CNI_COMMAND\n\
             echo \"$CNI_CONTAINERID|$CNI_NETNS|$CNI_IFNAME|$CNI_ARGS|$CNI_PATH\" \
             > {log}/{name}.$CNI_COMMAND.env\n\
             {body}\n"
        );
        let path = self.path("bin").join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }

    /// The calls so far, `VERB plugin` each.
    fn calls(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path("log/calls")).unwrap_or_default();
        text.lines().map(str::to_owned).collect()
    }

    fn forget_calls(&self) {
        drop(fs::remove_file(self.path("log/calls")));
    }

    /// The request that the plugin received on stdin at its last call of the verb.
    fn request(&self, plugin: &str, verb: &str) -> String {
        fs::read_to_string(self.path(&format!("log/{plugin}.{verb}"))).unwrap()
    }

    fn env(&self, plugin: &str, verb: &str) -> String {
        fs::read_to_string(self.path(&format!("log/{plugin}.{verb}.env"))).unwrap()
    }

    fn conf(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path("net.d").join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, text).unwrap();
        path
    }

    /// The files of the cache.
    fn cached(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.path("cache/results")) else { return vec![] };
        let mut names: Vec<_> =
            entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Writes a file into the cache.
    fn cache(&self, name: &str, text: &str) {
        fs::create_dir_all(self.path("cache/results")).unwrap();
        fs::write(self.path("cache/results").join(name), text).unwrap();
    }
}

fn attach() -> AttachmentParams {
    AttachmentParams {
        args: vec![("IP".to_owned(), "10.0.0.9".to_owned())],
        ..AttachmentParams::new("c1", "/run/netns/x", "eth0")
    }
}

fn list(text: &str) -> NetworkList {
    NetworkList::from_bytes(text.as_bytes()).unwrap()
}

/// The members of an object.
fn members(text: &str) -> Vec<(String, Json)> {
    match Json::parse(text.as_bytes()).unwrap() {
        Json::Object(members) => members,
        other => panic!("{other:?} is no object"),
    }
}

/// Prints a result with one address, in the version of the argument.
fn answer(version: &str, address: &str) -> String {
    format!("echo '{{\"cniVersion\":\"{version}\",\"ips\":[{{\"address\":\"{address}\"}}]}}'")
}
