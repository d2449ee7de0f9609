//! `cnibox` itself: what it is, which applets it has, and a clear word for a name it does not
//! answer to.

use std::process::ExitCode;

use super::{completion, install, pause, print};
use crate::error::{Code, Error};
use crate::log;
use crate::skel::{Applet, run};

/// The name of the executable, under which applets are arguments; a release's file name such as
/// `cnibox-0.1.0-x86_64` counts.
pub fn is_own_name(name: &str) -> bool {
    name == "cnibox" || name.starts_with("cnibox-")
}

/// The executable under a name that is no applet, with its arguments.
pub fn main(name: &str, args: &[String], applets: &[Applet]) -> ExitCode {
    if !is_own_name(name) {
        return unknown(name, applets);
    }
    match args.first().map(String::as_str) {
        None | Some("help" | "--help" | "-h") => print(&usage(applets)),
        Some("list" | "--list") => print(&list(applets)),
        Some("version" | "--version" | "-V") => {
            print(concat!("cnibox ", env!("CARGO_PKG_VERSION"), "\n"))
        }
        Some("install") => install::main(args[1..].to_vec(), applets),
        Some("uninstall") => install::main_uninstall(args[1..].to_vec()),
        Some("pause") => pause::main(&args[1..]),
        Some("completion") => completion::main(&args[1..], applets),
        Some(other) => unknown(other, applets),
    }
}

/// A runtime that starts a link of a foreign name reads the error object; a person reads stderr.
fn unknown(name: &str, applets: &[Applet]) -> ExitCode {
    let names: Vec<_> = applets.iter().map(|applet| applet.name).collect();
    let msg = format!("cnibox has no applet \"{name}\"");
    let remedy = format!("it has: {}", names.join(", "));
    if std::env::var_os("CNI_COMMAND").is_some_and(|verb| !verb.is_empty()) {
        let error = Error::new(Code::INVALID_CONFIG, msg).with_details(remedy);
        return run::fail_without_plugin(&error);
    }
    log::line(format_args!("{msg}; {remedy}"));
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
