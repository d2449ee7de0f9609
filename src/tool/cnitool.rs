//! `cnitool`: attach a network namespace to a network by hand.
//!
//! The reference's commands, environment and output, and beside that: options for everything the
//! environment says, `version` and `validate`, a choice of what GC keeps, and no debris: an ADD
//! that fails undoes what its plugins had done.

mod options;
#[cfg(test)]
mod tests;

use std::path::Path;
use std::process::ExitCode;

use options::{OPTIONS, Options};
use sha2::{Digest, Sha512};

use super::{Tool, lint, print};
use crate::cni::Attachment;
use crate::cni::json::{Json, pretty};
use crate::error::{Code, Error, Result};
use crate::runtime::cache::hex;
use crate::runtime::{Attach, NetworkList, OnAddError, Runtime};
use crate::skel::{Table, record};

pub(super) const TOOL: Tool = Tool {
    command: "cnitool",
    usage: "\
cnitool: attach a network namespace to a network by hand

Usage:
  cnitool add      <network> <netns>   attach; prints the result
  cnitool check    <network> <netns>   verify that the attachment is as it was made
  cnitool del      <network> <netns>   detach; may be repeated
  cnitool gc       <network>           remove what is left of attachments that are not kept
  cnitool status   <network>           tell whether the network's plugins could serve an add
  cnitool validate <network>           look up its plugins, compare versions, and lint its configuration
  cnitool version  <plugin>            print the specification versions a plugin speaks

<network> is the \"name\" in a file of the configuration directory, <netns> the path of a network
namespace (/run/netns/x, /proc/<pid>/ns/net).
",
    options: OPTIONS,
    notes: "CNI_ARGS (k=v;k=v) is passed to the plugins.

Example:
  ip netns add testing
  export CNI_PATH=/opt/cni/bin
  cnitool add mynet /run/netns/testing
  cnitool del mynet /run/netns/testing
",
};

/// Runs the tool with the arguments that follow its name. Only `add`, `validate`, `version` and
/// `--help` print something on stdout.
pub fn main(args: Vec<String>, table: Table) -> ExitCode {
    let read = |line| Options::read(&line, |name| std::env::var(name).ok());
    TOOL.run(args, read, |options| {
        record::begin(|| format!("cnitool {}", options.command));
        let outcome = run(&options, table);
        record::end_of_tool(&outcome);
        print(&outcome?)
    })
}

/// Does what is asked and returns what to print.
fn run(options: &Options, table: Table) -> Result<String> {
    let runtime = Runtime {
        cache_dir: options.cache_dir.clone(),
        on_add_error: OnAddError::Undo,
        ..Runtime::new(options.plugin_dirs.clone())
    };
    if options.command == "version" {
        return version(&runtime, &options.subject);
    }
    let list = NetworkList::load(&options.conf_dir, &options.subject)?;
    let silent = |()| String::new();
    match options.command.as_str() {
        "add" => add(&runtime, &list, &attach(options)?),
        "check" => runtime.check(&list, &attach(options)?).map(silent),
        "del" => runtime.del(&list, &attach(options)?).map(silent),
        "gc" => runtime.gc(&list, kept(options)?.as_deref()).map(silent),
        "status" => runtime.status(&list).map(silent),
        _ => {
            lint::require_sound(&options.conf_dir, table, &|network| network == list.name)?;
            validate(&runtime, &list)
        }
    }
}

fn add(runtime: &Runtime, list: &NetworkList, attach: &Attach) -> Result<String> {
    match runtime.add(list, attach)? {
        Some(result) => pretty(&result.to_json()),
        None => Ok(String::new()),
    }
}

fn validate(runtime: &Runtime, list: &NetworkList) -> Result<String> {
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

fn version(runtime: &Runtime, plugin: &str) -> Result<String> {
    Ok(runtime.version_info(plugin)?.supported_versions.join(" ") + "\n")
}

/// The attachment that the arguments and the environment describe.
fn attach(options: &Options) -> Result<Attach> {
    let capability_args = capability_args(&options.cap_args)?;
    let args = pairs(&options.cni_args)?;
    let netns = absolute(&options.netns)?;
    let container_id = match &options.container_id {
        Some(id) => id.clone(),
        None => container_id(&netns),
    };
    Ok(Attach { args, capability_args, ..Attach::new(&container_id, &netns, &options.ifname) })
}

fn capability_args(text: &str) -> Result<Vec<(String, Json)>> {
    let refuse = |why: String| {
        Error::new(Code::DECODE, why).with_details(
            "capability arguments are an object, for instance {\"mac\": \"02:00:00:00:00:01\"}",
        )
    };
    if text.is_empty() {
        return Ok(Vec::new());
    }
    match Json::parse(text.as_bytes()).map_err(refuse)? {
        Json::Object(members) => Ok(members),
        Json::Null => Ok(Vec::new()),
        other => Err(refuse(format!("{} is not an object", other.go_type()))),
    }
}

/// `CNI_ARGS`; stricter than the plugins, as the reference is here.
fn pairs(text: &str) -> Result<Vec<(String, String)>> {
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

/// The attachments that GC keeps; `None` if nothing was said.
fn kept(options: &Options) -> Result<Option<Vec<Attachment>>> {
    if options.keep.is_empty() {
        return Ok(options.keep_none.then(Vec::new));
    }
    let parse = |what: &String| {
        let (owner, ifname) = what.rsplit_once(':').unwrap_or((what, &options.ifname));
        let container_id =
            if owner.contains('/') { container_id(&absolute(owner)?) } else { owner.to_owned() };
        Ok(Attachment { container_id, ifname: ifname.to_owned() })
    };
    options.keep.iter().map(parse).collect::<Result<_>>().map(Some)
}

/// The path from the root, without `.`, `..` and superfluous slashes. Links are not resolved: the
/// text is the namespace's identity here.
fn absolute(path: &str) -> Result<String> {
    let path = std::path::absolute(Path::new(path))
        .map_err(|cause| Error::io("find the working directory", &cause))?;
    let mut parts: Vec<&str> = Vec::new();
    let text = path.to_string_lossy();
    for part in text.split('/').filter(|part| !part.is_empty() && *part != ".") {
        if part == ".." {
            parts.pop();
        } else {
            parts.push(part);
        }
    }
    Ok(format!("/{}", parts.join("/")))
}

/// The id of a container that is nothing but a namespace.
fn container_id(netns: &str) -> String {
    format!("cnitool-{}", hex(&Sha512::digest(netns)[..10]))
}
