//! `repair`: the rules of this host's containers come back after somebody flushed them.

use std::process::ExitCode;

use crate::error::{Context, Result};
use crate::log;
use crate::netfilter::{self, PacketFilter};

const HELP: &str = "\
repair: restores the rules of this host's containers that somebody flushed

Usage:
  cnibox repair    look at our tables in the host's network namespace, restore what is missing, in one
                   transaction, and print it; what is whole stays as it is

Run it on the host after \"nft flush ruleset\", or from the unit that reloads your own rules:
  systemctl edit nftables.service
  [Service]
  ExecStartPost=/opt/cni/bin/cnibox repair
  ExecReload=/opt/cni/bin/cnibox repair
An ADD that needs the rules does the same.

Exit status: 0 everything is whole; 1 something failed, see stderr; 2 wrong usage.
";

const WRONG_USAGE: u8 = 2;

/// Runs the tool with the arguments that follow its name.
pub fn main(args: Vec<String>) -> ExitCode {
    match args.into_iter().next().as_deref() {
        None => {}
        Some("-h" | "--help" | "help") => return super::print(HELP),
        Some(word) => {
            log::line(format_args!(
                "repair: unknown argument \"{word}\"; see: cnibox repair --help"
            ));
            return ExitCode::from(WRONG_USAGE);
        }
    }
    match repair() {
        Ok(text) => super::print(&text),
        Err(error) => {
            log::line(format_args!("repair: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn repair() -> Result<String> {
    let repaired = netfilter::heal(&PacketFilter::new()).context(|| "restore rules")?;
    let lines: Vec<String> =
        repaired.iter().map(|trouble| format!("restored: {trouble}\n")).collect();
    Ok(if lines.is_empty() { "nothing was missing\n".to_owned() } else { lines.concat() })
}
