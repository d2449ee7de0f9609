//! From process start to exit: the only place that prints a plugin's result.

use std::io::{self, IsTerminal, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use nix::errno::Errno;

use super::call::{Applet, AppletMain, AppletTable, BuiltinPlugin, CallEnvironment, CniVerb, PluginCall, PluginCaller};
use super::dispatch::roll_back_add;
use super::record;
use super::turn::AttachmentTurn;
use crate::cni::json::keys::DecodedKeys;
use crate::cni::json::{self, Json};
use crate::cni::{CniResult, SpecVersion, wire};
use crate::error::{Error, ErrorCode, Result, io_text};
use crate::{log, netlink, options};

/// The release of the reference plugins whose behaviour this program implements. nerdctl parses it in the about text to
/// detect features of the firewall plugin.
pub const REFERENCE_RELEASE: &str = "1.9.1";

/// Limit of standard input in bytes: a thousand times the list of all valid attachments of a node.
const MAX_REQUEST: u64 = 16 << 20;

/// Runs the applet with the arguments after its name.
pub fn main(applet: &Applet, mut args: Vec<String>, table: AppletTable) -> ExitCode {
    let plugin = match applet.main {
        AppletMain::Tool(tool) => return tool(args, table),
        AppletMain::Plugin(plugin) => plugin,
    };
    if let Some(service) = plugin.services.iter().find(|service| args.first().is_some_and(|arg| arg == service.name)) {
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
        Some(CniVerb::Version) => return print_text(&version_line(plugin.versions)),
        Some(CniVerb::Del | CniVerb::Gc) => netlink::set_process_ends(),
        _ => {}
    }
    log::set_call(record::call_name(applet.name, &env), &env.container_id);
    record::start_recording(|| record::call_name(applet.name, &env));
    // Large enough for most requests, which are then read by one system call.
    let mut stdin = Vec::with_capacity(8192);
    let read = env.require_variables().and_then(|()| read_stdin(&mut stdin));
    let call = PluginCall { env, stdin: &stdin, table, caller: PluginCaller::Runtime, turn: AttachmentTurn::default() };
    let outcome = read.and_then(|()| run_guarded(&|| (plugin.run)(&call)));
    record::finish_call(applet.name, &call, outcome.as_ref().err());
    let result = match outcome {
        Ok(None) => return ExitCode::SUCCESS,
        Ok(Some(result)) => result,
        Err(error) => return print_error(&error, requested_version(&stdin)),
    };
    let printed = match json::encode_pretty(&result.to_json()) {
        Ok(text) => print_text(&text),
        Err(error) => print_error(&error, result.version),
    };
    if printed != ExitCode::SUCCESS {
        // The runtime has ended, or would not know the result.
        roll_back_add(&call, plugin.run);
    }
    printed
}

fn read_stdin(stdin: &mut Vec<u8>) -> Result<()> {
    let failed = |why: &str| Error::new(ErrorCode::IO, format!("error reading from stdin: {why}"));
    let read = io::stdin().lock().take(MAX_REQUEST + 1).read_to_end(stdin);
    if read.map_err(|e| failed(&io_text(&e)))? as u64 > MAX_REQUEST {
        stdin.clear();
        return Err(failed("the request is longer than 16 MiB"));
    }
    Ok(())
}

/// Runs the plugin and reports a panic, after the rollback, as a CNI error.
fn run_guarded(run: &dyn Fn() -> Result<Option<CniResult>>) -> Result<Option<CniResult>> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(Error::internal(format!("cnibox panicked: {text}"))
            .with_details("this is a bug; stderr has the source location"))
    })
}

/// Prints the text of an applet that is started without `CNI_COMMAND`. nerdctl and Nomad parse the first line.
pub fn print_about(name: &str, versions: &[SpecVersion]) -> ExitCode {
    let own = env!("CARGO_PKG_VERSION");
    log::write_line(format_args!("CNI {name} plugin v{REFERENCE_RELEASE}+cnibox.{own}"));
    let versions: Vec<_> = versions.iter().map(|v| v.as_str()).collect();
    log::write_line(format_args!("CNI protocol versions supported: {}", versions.join(", ")));
    if io::stdin().is_terminal() {
        log::write_line(format_args!("started by container runtimes; see: {name} --help"));
    }
    ExitCode::SUCCESS
}

fn help_text(applet: &Applet, plugin: BuiltinPlugin) -> String {
    let Applet { name, about, .. } = applet;
    let mut keys = key_paths("", &(plugin.keys)());
    // Keys that the runtime adds.
    keys.retain(|key| !key.starts_with("runtimeConfig") && !key.starts_with("args"));
    let words: Vec<_> = plugin.services.iter().map(|service| format!("{name} {} --help", service.name)).collect();
    let tools = if words.is_empty() { String::new() } else { format!("Tools: {}\n", words.join(", ")) };
    let keys = if keys.is_empty() { "none of its own".to_owned() } else { keys.join("\n  ") };
    format!(
        "{name}: {about}

A CNI plugin: container runtimes start it with the CNI_* variables in the environment and the network's
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
            fields.iter().flat_map(|(name, keys)| key_paths(&format!("{at}{dot}{name}"), keys)).collect()
        }
    }
}

fn version_line(versions: &[SpecVersion]) -> String {
    let list: Vec<_> = versions.iter().map(|v| format!("\"{v}\"")).collect();
    let newest = SpecVersion::NEWEST;
    let list = list.join(",");
    format!("{{\"cniVersion\":\"{newest}\",\"supportedVersions\":[{list}]}}\n")
}

/// The version of an error object: the configuration's, or the newest if that is unknown.
fn requested_version(stdin: &[u8]) -> SpecVersion {
    let written = |json: Json| SpecVersion::parse_exact(json.get_member("cniVersion")?.as_str()?);
    Json::parse(stdin).ok().and_then(written).unwrap_or(SpecVersion::NEWEST)
}

/// Prints the error object.
pub fn print_error(error: &Error, version: SpecVersion) -> ExitCode {
    print_text(&wire::error_text(error, version));
    ExitCode::FAILURE
}

fn print_text(text: &str) -> ExitCode {
    // Without the standard library's buffer, which would write the last line separately.
    match write_all(io::stdout().as_fd(), text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::warn(format_args!("write the result to stdout: {}", io_text(&error)));
            ExitCode::FAILURE
        }
    }
}

fn write_all(fd: BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match nix::unistd::write(fd, bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_lists_supported_versions() {
        assert_eq!(
            version_line(&SpecVersion::ALL[5..]),
            "{\"cniVersion\":\"1.1.0\",\"supportedVersions\":[\"1.0.0\",\"1.1.0\"]}\n"
        );
    }

    #[test]
    fn panics_become_errors() {
        let error = run_guarded(&|| panic!("boom {}", 1)).unwrap_err();
        assert_eq!((error.code(), error.message()), (ErrorCode::INTERNAL, "cnibox panicked: boom 1"));
    }

    #[test]
    fn errors_have_the_version_of_the_configuration() {
        assert_eq!(requested_version(br#"{"cniVersion":"0.4.0"}"#), SpecVersion::V0_4_0);
        assert_eq!(requested_version(br#"{"cniVersion":"7"}"#), SpecVersion::NEWEST);
        assert_eq!(requested_version(b"{"), SpecVersion::NEWEST);
    }
}
