//! What `cnitool` is told: arguments first, then the environment, then defaults.

use std::path::PathBuf;

use crate::error::Result;
use crate::invoke::split_path;
use crate::options::{CommandLine, Opt, opt, unknown_word, usage};
use crate::runtime::DEFAULT_CACHE_DIR;
use crate::tool::CONF_DIR;

/// Each tells the environment variable that it takes the place of, and the default.
pub(super) const OPTIONS: &[Opt] = &[
    Opt {
        short: Some('i'),
        ..opt("--ifname", "NAME", "interface in the namespace [CNI_IFNAME, eth0]")
    },
    opt("--net-conf-path", "DIR", "network configurations [NETCONFPATH, /etc/cni/net.d]"),
    opt("--plugin-path", "DIRS", "plugin directories, with colons [CNI_PATH]"),
    opt("--cap-args", "JSON", "capability arguments, an object [CAP_ARGS]"),
    opt("--container-id", "ID", "container id; made from <netns> if it is not given"),
    opt("--cache-dir", "DIR", "cached results [/var/lib/cni]"),
    opt(
        "--keep",
        "WHAT",
        "gc: an attachment to keep, <netns>[:<ifname>] or <id>[:<ifname>]; a namespace is\n\
         written with a /. May be repeated. Without it every cached attachment of the\n\
         network goes, and plugins are given no list",
    ),
    opt("--keep-none", "", "gc: tell the plugins that no attachment is valid"),
];

/// The commands, each with the names of its arguments.
const COMMANDS: [(&str, &[&str]); 7] = [
    ("add", &["network", "netns"]),
    ("check", &["network", "netns"]),
    ("del", &["network", "netns"]),
    ("gc", &["network"]),
    ("status", &["network"]),
    ("validate", &["network"]),
    ("version", &["plugin"]),
];

/// One command with everything it may need.
#[derive(Debug, Default)]
pub(super) struct Options {
    pub(super) command: String,
    /// The network, or for `version` the plugin.
    pub(super) subject: String,
    /// As written; empty for the commands without one.
    pub(super) netns: String,
    pub(super) ifname: String,
    pub(super) conf_dir: PathBuf,
    pub(super) plugin_dirs: Vec<PathBuf>,
    pub(super) cache_dir: PathBuf,
    pub(super) container_id: Option<String>,
    pub(super) cap_args: String,
    pub(super) cni_args: String,
    pub(super) keep: Vec<String>,
    pub(super) keep_none: bool,
}

impl Options {
    /// Reads the command line and the environment. Arguments beyond those of the command are
    /// ignored, as in the reference; so `gc` and `status` take a namespace that they have no use for.
    pub(super) fn read(
        line: &CommandLine,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Options> {
        let command = command(&line.words)?;
        let argument = |i: usize| line.words.get(i).cloned().unwrap_or_default();
        // Set but empty is as good as unset.
        let env = |name: &str| env(name).filter(|value| !value.is_empty());
        let option = |name: &str, variable: &str, default: &str| {
            let given = line.last(name).map(str::to_owned);
            given.or_else(|| env(variable)).unwrap_or_else(|| default.to_owned())
        };
        Ok(Options {
            command,
            subject: argument(1),
            netns: argument(2),
            ifname: option("--ifname", "CNI_IFNAME", "eth0"),
            conf_dir: option("--net-conf-path", "NETCONFPATH", CONF_DIR).into(),
            plugin_dirs: split_path(&option("--plugin-path", "CNI_PATH", "")),
            cache_dir: line.last("--cache-dir").unwrap_or(DEFAULT_CACHE_DIR).into(),
            container_id: line.last("--container-id").map(str::to_owned),
            cap_args: option("--cap-args", "CAP_ARGS", ""),
            cni_args: env("CNI_ARGS").unwrap_or_default(),
            keep: line.all("--keep").map(str::to_owned).collect(),
            keep_none: line.has("--keep-none"),
        })
    }
}

/// The command, if it exists and has its arguments.
fn command(positional: &[String]) -> Result<String> {
    let name = positional.first().ok_or_else(|| usage("no command given"))?;
    let Some((_, needed)) = COMMANDS.iter().find(|(command, _)| command == name) else {
        return Err(unknown_word("command", name, &COMMANDS.map(|(command, _)| command)));
    };
    let given = positional.len() - 1;
    if given < needed.len() {
        let names: Vec<String> = needed.iter().map(|n| format!("<{n}>")).collect();
        let count = needed.len();
        let error = usage(format!("requires at least {count} arg(s), only received {given}"));
        return Err(error.with_details(format!("usage: cnitool {name} {}", names.join(" "))));
    }
    Ok(name.clone())
}
