//! What `cnitool` is told: arguments first, then the environment, then defaults.

use std::path::PathBuf;

use crate::error::{Error, Result};
use crate::invoke::split_path;
use crate::runtime::DEFAULT_CACHE_DIR;

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

/// The options as they were written, `--name value` and `--name=value` alike.
#[derive(Default)]
struct Raw {
    values: Vec<(&'static str, String)>,
    positional: Vec<String>,
    help: bool,
    keep_none: bool,
}

impl Options {
    /// Reads arguments and environment. Arguments beyond those of the command are ignored, as in
    /// the reference; so `gc` and `status` take a namespace that they have no use for. `None` if
    /// help is asked for.
    pub(super) fn parse(
        args: Vec<String>,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<Option<Options>> {
        let raw = Raw::parse(args)?;
        if raw.help || raw.positional.first().is_some_and(|command| command == "help") {
            return Ok(None);
        }
        let command = command(&raw.positional)?;
        let argument = |i: usize| raw.positional.get(i).cloned().unwrap_or_default();
        // Set but empty is as good as unset.
        let env = |name: &str| env(name).filter(|value| !value.is_empty());
        let option = |name: &str, variable: &str, default: &str| {
            raw.last(name).or_else(|| env(variable)).unwrap_or_else(|| default.to_owned())
        };
        let cache_dir = raw.last("--cache-dir");
        Ok(Some(Options {
            command,
            subject: argument(1),
            netns: argument(2),
            ifname: option("--ifname", "CNI_IFNAME", "eth0"),
            conf_dir: option("--net-conf-path", "NETCONFPATH", "/etc/cni/net.d").into(),
            plugin_dirs: split_path(&option("--plugin-path", "CNI_PATH", "")),
            cache_dir: cache_dir.map_or_else(|| DEFAULT_CACHE_DIR.into(), PathBuf::from),
            container_id: raw.last("--container-id"),
            cap_args: option("--cap-args", "CAP_ARGS", ""),
            cni_args: env("CNI_ARGS").unwrap_or_default(),
            keep: raw.all("--keep"),
            keep_none: raw.keep_none,
        }))
    }
}

impl Raw {
    fn parse(args: Vec<String>) -> Result<Raw> {
        let mut raw = Raw::default();
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--" => raw.positional.extend(args.by_ref()),
                "-h" | "--help" => raw.help = true,
                "--keep-none" => raw.keep_none = true,
                flag if flag.starts_with('-') && flag.len() > 1 => {
                    let (flag, value) = match flag.split_once('=') {
                        Some((flag, value)) => (flag, Some(value.to_owned())),
                        None => (flag, None),
                    };
                    let name = known(flag)?;
                    let value = value
                        .or_else(|| args.next())
                        .ok_or_else(|| usage(format!("flag needs an argument: {flag}")))?;
                    raw.values.push((name, value));
                }
                _ => raw.positional.push(arg),
            }
        }
        Ok(raw)
    }

    fn last(&self, name: &str) -> Option<String> {
        self.values.iter().rfind(|(n, _)| *n == name).map(|(_, value)| value.clone())
    }

    fn all(&self, name: &str) -> Vec<String> {
        self.values.iter().filter(|(n, _)| *n == name).map(|(_, value)| value.clone()).collect()
    }
}

fn known(flag: &str) -> Result<&'static str> {
    Ok(match flag {
        "-i" | "--ifname" => "--ifname",
        "--net-conf-path" => "--net-conf-path",
        "--plugin-path" => "--plugin-path",
        "--cache-dir" => "--cache-dir",
        "--container-id" => "--container-id",
        "--cap-args" => "--cap-args",
        "--keep" => "--keep",
        other => return Err(usage(format!("unknown flag: {other}"))),
    })
}

/// The command, if it exists and has its arguments.
fn command(positional: &[String]) -> Result<String> {
    let Some(name) = positional.first() else {
        return Err(usage("no command given".to_owned()));
    };
    let Some((_, needed)) = COMMANDS.iter().find(|(command, _)| command == name) else {
        let names: Vec<&str> = COMMANDS.iter().map(|(command, _)| *command).collect();
        let error = Error::config(format!("unknown command \"{name}\" for \"cnitool\""));
        return Err(error.with_details(format!("there are: {}", names.join(", "))));
    };
    let given = positional.len() - 1;
    if given < needed.len() {
        let names: Vec<String> = needed.iter().map(|n| format!("<{n}>")).collect();
        let count = needed.len();
        let error =
            Error::config(format!("requires at least {count} arg(s), only received {given}"));
        return Err(error.with_details(format!("usage: cnitool {name} {}", names.join(" "))));
    }
    Ok(name.clone())
}

fn usage(message: String) -> Error {
    Error::config(message).with_details("run cnitool --help")
}
