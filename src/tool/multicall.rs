//! `cnibox` itself: its commands, help and list of applets, and the error for an unknown name.

use std::process::ExitCode;

use super::{Tool, completion, doctor, gc, install, lint, pause, print, sysdump, trace};
use crate::error::{Code, Error};
use crate::log;
use crate::options;
use crate::skel::{Applet, Table, run};

type Main = fn(Vec<String>, Table) -> ExitCode;

/// The commands that are not applets, each with its main function.
pub(super) const COMMANDS: [(&Tool, Main); 9] = [
    (&install::INSTALL, install::main),
    (&install::UNINSTALL, install::main_uninstall),
    (&lint::TOOL, lint::main),
    (&doctor::TOOL, doctor::main),
    (&sysdump::TOOL, sysdump::main),
    (&trace::TOOL, trace::main),
    (&gc::TOOL, gc::main),
    (&pause::TOOL, pause::main),
    (&completion::TOOL, completion::main),
];

/// All commands, each with a description.
pub(super) fn commands() -> impl Iterator<Item = (&'static str, &'static str)> {
    COMMANDS.iter().map(|(tool, _)| tool.title()).chain([
        ("help", "prints this help"),
        ("list", "lists the applets"),
        ("version", "prints the version"),
    ])
}

/// Whether `name` is that of the executable, whose first argument is an applet or a command. The
/// name of a release's file, such as `cnibox-0.1.0-x86_64`, is one.
pub fn is_own_name(name: &str) -> bool {
    name == "cnibox" || name.starts_with("cnibox-")
}

/// Runs the executable under a name that is not an applet.
pub fn main(name: &str, args: &[String], table: Table) -> ExitCode {
    let applets = table.applets;
    if !is_own_name(name) {
        return unknown(name, applets);
    }
    let text = match args.first().map(String::as_str) {
        None | Some("help" | "--help" | "-h") => usage(applets),
        Some("list" | "--list") => list(applets),
        Some("version" | "--version" | "-V") => options::version(),
        Some(word) => {
            return match COMMANDS.iter().find(|(tool, _)| tool.title().0 == word) {
                Some((_, main)) => main(args[1..].to_vec(), table),
                None => unknown(word, applets),
            };
        }
    };
    print(&text).unwrap_or(ExitCode::FAILURE)
}

/// Fails. A runtime, which may have started a link of this name, reads the error object; a person
/// reads stderr.
fn unknown(name: &str, applets: &[Applet]) -> ExitCode {
    let names: Vec<_> = applets.iter().map(|applet| applet.name).collect();
    let words = names.iter().copied().chain(commands().map(|(word, _)| word));
    let remedy = match options::nearest(name, words) {
        Some(near) => format!("did you mean \"{near}\"?"),
        None => format!("the applets are: {}", names.join(", ")),
    };
    let error = Error::new(Code::INVALID_CONFIG, format!("cnibox has no applet \"{name}\""));
    let error = error.with_details(remedy);
    if std::env::var_os("CNI_COMMAND").is_some_and(|verb| !verb.is_empty()) {
        return run::fail_without_plugin(&error);
    }
    log::line(error);
    ExitCode::FAILURE
}

fn list(applets: &[Applet]) -> String {
    let line = |applet: &Applet| {
        let Applet { name, kind, about, .. } = applet;
        format!("{name:<12} {kind:<10} {about}\n")
    };
    applets.iter().map(line).collect()
}

fn usage(applets: &[Applet]) -> String {
    let commands: Vec<_> =
        commands().map(|(word, about)| format!("  cnibox {word:<12}  {about}\n")).collect();
    format!(
        "cnibox {}: every Linux CNI plugin in one executable

Usage:
  <applet> ...         as a link of that name, the way container runtimes start it
  cnibox <applet> ...  the same without a link
{}
Applets:
  {}

A plugin reads CNI_COMMAND and the other CNI_* variables from the environment and the network
configuration from standard input; without CNI_COMMAND it prints the supported versions. To try
a network by hand, see: cnibox cnitool --help
",
        env!("CARGO_PKG_VERSION"),
        commands.concat(),
        list(applets).trim_end().replace('\n', "\n  ")
    )
}
