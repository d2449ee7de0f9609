//! From process start to exit.

use std::env;
use std::io::{self, IsTerminal};
use std::process::ExitCode;

use super::call::{Applet, AppletMain, AppletTable, BuiltinPlugin, PluginCall, TURN_VARIABLE};
use super::dispatch::roll_back_add;
use super::record;
use crate::{netlink, options, stderr};
use cni::SpecVersion;
use cni::json::keys::DecodedKeys;
use cni::plugin::process::{print_outcome, print_text, print_versions, read_stdin, run_guarded};
use cni::plugin::{CallEnvironment, CniVerb};

/// The release of the reference plugins whose behaviour this program implements. nerdctl parses it
/// in the about text to detect features of the firewall plugin.
pub const REFERENCE_RELEASE: &str = "1.9.1";

/// Runs the applet with the arguments after its name.
pub fn main(applet: &Applet, mut args: Vec<String>, table: AppletTable) -> ExitCode {
    let plugin = match applet.main {
        AppletMain::Tool(tool) => return tool(args, table),
        AppletMain::Plugin(plugin) => plugin,
    };
    if let Some(service) =
        plugin.services.iter().find(|service| args.first().is_some_and(|arg| arg == service.name))
    {
        args.remove(0);
        return (service.main)(args);
    }
    match args.first().map(String::as_str) {
        Some("help" | "--help" | "-h") => return print_text(&help_text(applet, plugin)),
        Some("--version" | "-V") => return print_text(&options::version_text()),
        _ => {}
    }
    let env = CallEnvironment::from_process();
    if env.command.is_empty() {
        return print_about(applet.name, plugin.versions);
    }
    match CniVerb::parse(&env.command) {
        Some(CniVerb::Version) => return print_versions(plugin.versions),
        Some(CniVerb::Del | CniVerb::Gc) => netlink::set_process_ends(),
        _ => {}
    }
    stderr::set_call(record::call_name(applet.name, &env), &env.container_id);
    record::start_recording(|| record::call_name(applet.name, &env));
    // Large enough for most requests, which are then read by one system call.
    let mut stdin = Vec::with_capacity(8192);
    let read = env.require_variables().and_then(|()| read_stdin(&mut stdin));
    let turn_of_caller = env::var(TURN_VARIABLE).unwrap_or_default();
    let call = PluginCall { turn_of_caller, ..PluginCall::new(env, &stdin, table) };
    let outcome = read.and_then(|()| run_guarded("cnibox", &|| (plugin.run)(&call)));
    record::finish_call(applet.name, &call, outcome.as_ref().err());
    let printed = print_outcome(&outcome, &stdin);
    if printed != ExitCode::SUCCESS && outcome.is_ok() {
        // The runtime has ended, or would not know the result.
        roll_back_add(&call, plugin.run);
    }
    printed
}

/// Prints the text of an applet that is started without `CNI_COMMAND`. nerdctl and Nomad parse the
/// first line.
pub fn print_about(name: &str, versions: &[SpecVersion]) -> ExitCode {
    let own = env!("CARGO_PKG_VERSION");
    stderr::write_line(format_args!("CNI {name} plugin v{REFERENCE_RELEASE}+cnibox.{own}"));
    let versions: Vec<_> = versions.iter().map(|v| v.as_str()).collect();
    stderr::write_line(format_args!("CNI protocol versions supported: {}", versions.join(", ")));
    if io::stdin().is_terminal() {
        stderr::write_line(format_args!("started by container runtimes; see: {name} --help"));
    }
    ExitCode::SUCCESS
}

fn help_text(applet: &Applet, plugin: BuiltinPlugin) -> String {
    let Applet { name, about, .. } = applet;
    let mut keys = key_paths("", &(plugin.keys)());
    // Keys that the runtime adds.
    keys.retain(|key| !key.starts_with("runtimeConfig") && !key.starts_with("args"));
    let words: Vec<_> =
        plugin.services.iter().map(|service| format!("{name} {} --help", service.name)).collect();
    let tools =
        if words.is_empty() { String::new() } else { format!("Tools: {}\n", words.join(", ")) };
    let keys = if keys.is_empty() { "none of its own".to_owned() } else { keys.join("\n  ") };
    format!(
        "{name}: {about}

A CNI plugin: container runtimes start it with the CNI_* variables in the environment and the \
         network's
configuration on standard input.

Configuration keys (described in man cnibox-{name}):
  {keys}

{tools}To call plugins by hand: cnibox cnitool --help. To check a configuration: cnibox lint.
"
    )
}

/// The full paths of the keys, such as `ipam.ranges[][].subnet`.
fn key_paths(at: &str, keys: &DecodedKeys) -> Vec<String> {
    match keys {
        DecodedKeys::Any if at.is_empty() => Vec::new(),
        DecodedKeys::Any => vec![at.to_owned()],
        DecodedKeys::Items(keys) => key_paths(&format!("{at}[]"), keys),
        DecodedKeys::Fields(fields) => {
            let dot = if at.is_empty() { "" } else { "." };
            fields
                .iter()
                .flat_map(|(name, keys)| key_paths(&format!("{at}{dot}{name}"), keys))
                .collect()
        }
    }
}
