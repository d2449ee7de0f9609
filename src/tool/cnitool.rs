//! `cnitool`: attaches a network namespace to a network by hand.
//!
//! The reference's commands, environment and output. In addition: options for every variable of the
//! environment, the commands `version` and `validate`, the attachments that GC keeps, and an ADD
//! that undoes the work of its plugins if it fails.

#[cfg(test)]
mod tests;

use std::path::{Component, Path, PathBuf};
use std::process::ExitCode;

use sha2::{Digest, Sha512};

use super::directories::CONF_DIR;
use super::{ToolCommand, lint, print_text};
use crate::framework::{AppletTable, record};
use crate::invoke::TracedExecutor;
use crate::options::{CommandLine, CommandOption, long_option, unknown_word_error, usage_error};
use cni::ValidAttachment;
use cni::error::{Error, ErrorCode, Result};
use cni::exec::split_path;
use cni::json::{Json, encode_pretty};
use cni::runtime::cache::encode_hex;
use cni::runtime::{AttachmentParams, DEFAULT_CACHE_DIR, NetworkList, OnAddError, Runtime};

pub(super) const TOOL: ToolCommand = ToolCommand {
    command: "cnitool",
    usage: "\
cnitool: attaches a network namespace to a network by hand

Usage:
  cnitool add      <network> <netns>   attach, and print the result
  cnitool check    <network> <netns>   check that the attachment is still as add created it
  cnitool del      <network> <netns>   detach; may be repeated
  cnitool gc       <network>           remove the remains of attachments that are not kept
  cnitool status   <network>           check whether the network's plugins could serve an add
  cnitool validate <network>           find its plugins, compare versions, and lint its \
            configuration
  cnitool version  <plugin>            print the specification versions that a plugin supports

<network> is the \"name\" in a file of the configuration directory, <netns> the path of a network
namespace (/run/netns/x, /proc/<pid>/ns/net).
",
    options: OPTIONS,
    notes: "CNI_ARGS (k=v;k=v) is passed to the plugins.

gc is the GC of a runtime, for one network: it deletes every attachment that is not kept, even if \
            its container is
alive. \"cnibox gc\" works on the whole node, without a list, and deletes only attachments that \
            have certainly ended.

Exit status: 0 done; 1 something failed, see stderr; 2 wrong usage.

Example:
  ip netns add testing
  export CNI_PATH=/opt/cni/bin
  cnitool add mynet /run/netns/testing
  cnitool del mynet /run/netns/testing
",
};

/// The descriptions end with the environment variable that the option overrides, and the default.
const OPTIONS: &[CommandOption] = &[
    CommandOption {
        short: Some('i'),
        ..long_option("--ifname", "NAME", "interface in the namespace [CNI_IFNAME, eth0]")
    },
    long_option("--conf-dir", "DIR", "network configurations [NETCONFPATH, /etc/cni/net.d]"),
    long_option("--plugin-path", "DIRS", "plugin directories, separated by colons [CNI_PATH]"),
    long_option("--cap-args", "JSON", "capability arguments, an object [CAP_ARGS]"),
    long_option("--container-id", "ID", "container id; by default a hash of <netns>"),
    long_option("--cache-dir", "DIR", "cached results [/var/lib/cni]"),
    long_option(
        "--keep",
        "WHAT",
        "gc: an attachment to keep, <netns>[:<ifname>] or <id>[:<ifname>]; a namespace \
         is\nwritten with a /. May be repeated. Without it every cached attachment of \
         the\nnetwork is removed, and plugins receive no list",
    ),
    long_option("--keep-none", "", "gc: pass the plugins an empty list of valid attachments"),
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

/// The command line and the environment.
#[derive(Debug)]
struct CnitoolOptions {
    /// With at least the arguments of the command.
    line: CommandLine,
    ifname: String,
    conf_dir: PathBuf,
    plugin_dirs: Vec<PathBuf>,
    cache_dir: PathBuf,
    cap_args: String,
    cni_args: String,
}

impl CnitoolOptions {
    /// Surplus arguments are ignored, as in the reference: `gc` and `status` accept a namespace.
    fn from_command_line(
        line: CommandLine,
        env: impl Fn(&str) -> Option<String>,
    ) -> Result<CnitoolOptions> {
        require_arguments(&line.words)?;
        // An empty variable counts as unset.
        let env = |name: &str| env(name).filter(|value| !value.is_empty());
        let option = |name: &str, variable: &str, default: &str| {
            let given = line.last_value(name).map(str::to_owned);
            given.or_else(|| env(variable)).unwrap_or_else(|| default.to_owned())
        };
        Ok(CnitoolOptions {
            ifname: option("--ifname", "CNI_IFNAME", "eth0"),
            conf_dir: option("--conf-dir", "NETCONFPATH", CONF_DIR).into(),
            plugin_dirs: split_path(&option("--plugin-path", "CNI_PATH", "")),
            cache_dir: line.last_value("--cache-dir").unwrap_or(DEFAULT_CACHE_DIR).into(),
            cap_args: option("--cap-args", "CAP_ARGS", ""),
            cni_args: env("CNI_ARGS").unwrap_or_default(),
            line,
        })
    }
}

/// Fails unless the command exists and has its arguments.
fn require_arguments(words: &[String]) -> Result<()> {
    let name = words.first().ok_or_else(|| usage_error("no command given"))?;
    let Some((_, arguments)) = COMMANDS.iter().find(|(command, _)| command == name) else {
        return Err(unknown_word_error("command", name, &COMMANDS.map(|(command, _)| command)));
    };
    let (given, count) = (words.len() - 1, arguments.len());
    if given < count {
        let error = usage_error(format!("requires at least {count} arg(s), only received {given}"));
        let names = arguments.join("> <");
        return Err(error.with_details(format!("usage: cnitool {name} <{names}>")));
    }
    Ok(())
}

/// Runs the tool with the arguments that follow its name. Only `add`, `validate`, `version` and
/// `--help` print on stdout.
pub fn main(args: Vec<String>, table: AppletTable) -> ExitCode {
    TOOL.run_command(
        args,
        |line| CnitoolOptions::from_command_line(line, |name| std::env::var(name).ok()),
        |options| {
            record::start_recording(|| format!("cnitool {}", options.line.words[0]));
            let outcome = run_command(&options, table);
            record::finish_tool(&outcome);
            print_text(&outcome?)
        },
    )
}

/// Runs the command and returns its output.
fn run_command(options: &CnitoolOptions, table: AppletTable) -> Result<String> {
    let runtime = Runtime {
        cache_dir: options.cache_dir.clone(),
        on_add_error: OnAddError::Undo,
        executor: Box::new(TracedExecutor),
        ..Runtime::new(options.plugin_dirs.clone())
    };
    let (command, subject) = (options.line.words[0].as_str(), &options.line.words[1]);
    if command == "version" {
        return Ok(runtime.version_info(subject)?.supported_versions.join(" ") + "\n");
    }
    let list = NetworkList::load(&options.conf_dir, subject)?;
    let silent = |()| String::new();
    match command {
        "add" => {
            let result = runtime.add(&list, &attachment_params(options)?)?;
            result.map_or(Ok(String::new()), |result| encode_pretty(&result.to_json()))
        }
        "check" => runtime.check(&list, &attachment_params(options)?).map(silent),
        "del" => runtime.del(&list, &attachment_params(options)?).map(silent),
        "gc" => runtime.gc(&list, kept_attachments(options)?.as_deref()).map(silent),
        "status" => runtime.status(&list).map(silent),
        _ => {
            lint::require_no_errors(&options.conf_dir, table, &|network| network == list.name)?;
            validate_network(&runtime, &list)
        }
    }
}

fn validate_network(runtime: &Runtime, list: &NetworkList) -> Result<String> {
    let capabilities = runtime.validate(list)?;
    let plugins: Vec<&str> = list.plugins.iter().map(|p| p.plugin_type.as_str()).collect();
    let version = if list.cni_version.is_empty() { "0.1.0" } else { &list.cni_version };
    let wanted = match capabilities.as_slice() {
        [] => String::new(),
        names => format!("capabilities {}\n", names.join(" ")),
    };
    let (name, plugins) = (&list.name, plugins.join(" "));
    Ok(format!("network {name}\nversion {version}\nplugins {plugins}\n{wanted}"))
}

/// The attachment of the command line and the environment.
fn attachment_params(options: &CnitoolOptions) -> Result<AttachmentParams> {
    let capability_args = parse_capability_args(&options.cap_args)?;
    let args = parse_cni_args(&options.cni_args)?;
    let netns = absolute_path(&options.line.words[2])?;
    let given = options.line.last_value("--container-id").map(str::to_owned);
    let container_id = given.unwrap_or_else(|| derive_container_id(&netns));
    Ok(AttachmentParams {
        args,
        capability_args,
        ..AttachmentParams::new(&container_id, &netns, &options.ifname)
    })
}

fn parse_capability_args(text: &str) -> Result<Vec<(String, Json)>> {
    let refuse = |error: Error| {
        error.context("capability arguments").with_details(
            "capability arguments are an object, for instance {\"mac\": \"02:00:00:00:00:01\"}",
        )
    };
    if text.is_empty() {
        return Ok(Vec::new());
    }
    match Json::parse(text.as_bytes()).map_err(refuse)? {
        Json::Object(members) => Ok(members),
        Json::Null => Ok(Vec::new()),
        other => Err(refuse(Error::new(ErrorCode::DECODE, other.wrong_type_message("an object")))),
    }
}

/// Parses `CNI_ARGS`, more strictly than plugins do, like the reference's cnitool.
fn parse_cni_args(text: &str) -> Result<Vec<(String, String)>> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    text.split(';')
        .map(|piece| match piece.split_once('=') {
            Some((k, v)) if !k.is_empty() && !v.is_empty() && !v.contains('=') => {
                Ok((k.to_owned(), v.to_owned()))
            }
            _ => Err(Error::internal(format!("invalid CNI_ARGS pair \"{piece}\""))
                .with_details("write it as KEY=VALUE;KEY=VALUE")),
        })
        .collect()
}

/// The attachments that GC keeps; `None` without an option for them.
fn kept_attachments(options: &CnitoolOptions) -> Result<Option<Vec<ValidAttachment>>> {
    let line = &options.line;
    if !line.has_option("--keep") {
        return Ok(line.has_option("--keep-none").then(Vec::new));
    }
    line.all_values("--keep")
        .map(|kept| {
            let (owner, ifname) = str::rsplit_once(kept, ':').unwrap_or((kept, &options.ifname));
            let container_id = if owner.contains('/') {
                derive_container_id(&absolute_path(owner)?)
            } else {
                owner.to_owned()
            };
            Ok(ValidAttachment { container_id, ifname: ifname.to_owned() })
        })
        .collect::<Result<_>>()
        .map(Some)
}

/// The absolute path, without `.`, `..` and superfluous slashes. Links are not resolved: the text
/// identifies the namespace.
fn absolute_path(path: &str) -> Result<String> {
    let path = std::path::absolute(Path::new(path))
        .map_err(|cause| Error::io("find the working directory", &cause))?;
    let mut clean = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => drop(clean.pop()),
            component => clean.push(component),
        }
    }
    Ok(clean.display().to_string())
}

/// The container id for a namespace, as in the reference.
fn derive_container_id(netns: &str) -> String {
    format!("cnitool-{}", encode_hex(&Sha512::digest(netns)[..10]))
}
