//! `cnibox` itself: its help, its list of applets, and the error for a name that is no applet.

use std::process::ExitCode;

use super::completion::{self, COMMANDS};
use super::{doctor, gc, install, lint, pause, print, sysdump, trace};
use crate::cni::SpecVersion;
use crate::error::{Code, Error};
use crate::log;
use crate::options;
use crate::skel::{Applet, Table, run};

/// The name of the executable, under which applets are arguments; a release's file name such as
/// `cnibox-0.1.0-x86_64` counts.
pub fn is_own_name(name: &str) -> bool {
    name == "cnibox" || name.starts_with("cnibox-")
}

/// The executable under a name that is no applet, with its arguments.
pub fn main(name: &str, args: &[String], table: Table) -> ExitCode {
    let applets = table.applets;
    if !is_own_name(name) {
        return unknown(name, applets);
    }
    match args.first().map(String::as_str) {
        None | Some("help" | "--help" | "-h") => say(&usage(applets)),
        Some("list" | "--list") => say(&list(applets)),
        Some("version" | "--version" | "-V") => say(&options::version()),
        Some("install") => install::main(args[1..].to_vec(), table),
        Some("uninstall") => install::main_uninstall(args[1..].to_vec()),
        Some("doctor") => doctor::main(args[1..].to_vec(), table),
        Some("gc") => gc::main(args[1..].to_vec(), table),
        Some("lint") => lint::main(args[1..].to_vec(), table),
        Some("sysdump") => sysdump::main(args[1..].to_vec(), table),
        Some("trace") => trace::main(args[1..].to_vec(), table),
        Some("pause") => pause::main(args[1..].to_vec()),
        Some("completion") => completion::main(args[1..].to_vec(), applets),
        Some(other) => unknown(other, applets),
    }
}

fn say(text: &str) -> ExitCode {
    print(text).unwrap_or(ExitCode::FAILURE)
}

/// A runtime that starts a link of a foreign name reads the error object; a person reads stderr.
fn unknown(name: &str, applets: &[Applet]) -> ExitCode {
    let names: Vec<_> = applets.iter().map(|applet| applet.name).collect();
    let words = names.iter().copied().chain(COMMANDS.map(|(word, _)| word));
    let remedy = match options::nearest(name, words) {
        Some(near) => format!("did you mean \"{near}\"?"),
        None => format!("it has: {}", names.join(", ")),
    };
    let error = Error::new(Code::INVALID_CONFIG, format!("cnibox has no applet \"{name}\""));
    let error = error.with_details(remedy);
    if std::env::var_os("CNI_COMMAND").is_some_and(|verb| !verb.is_empty()) {
        return run::fail(&error, SpecVersion::NEWEST);
    }
    log::line(error);
    ExitCode::FAILURE
}

fn list(applets: &[Applet]) -> String {
    let line = |applet: &Applet| {
        let Applet { name, kind, about, .. } = applet;
        format!("{name:<12} {kind:<10} {about}")
    };
    applets.iter().map(line).collect::<Vec<_>>().join("\n") + "\n"
}

fn usage(applets: &[Applet]) -> String {
    format!(
        "cnibox {}: every Linux CNI plugin in one executable

Usage:
  <applet> ...         as a link of that name, the way container runtimes start it
  cnibox <applet> ...  the same without a link
  cnibox list          the applets
  cnibox install       itself and a link for each applet in a folder of plugins; see --help
  cnibox uninstall     takes that back
  cnibox lint          tells what is wrong with network configurations
  cnibox doctor        tells what is wrong on this node, and what cures it
  cnibox sysdump       writes a file with what a maintainer would ask for
  cnibox trace         tells what calls did, and why they failed
  cnibox gc            takes back what containers left that are gone
  cnibox pause         waits for SIGTERM, as the main container of a DaemonSet
  cnibox completion    prints what bash, zsh or fish need to complete its arguments
  cnibox version       the version

Applets:
  {}

A plugin reads CNI_COMMAND and its kin from the environment and the network's configuration
from standard input; without CNI_COMMAND it tells the versions it speaks. To try a network by
hand, see: cnibox cnitool --help
",
        env!("CARGO_PKG_VERSION"),
        list(applets).trim_end().replace('\n', "\n  ")
    )
}
