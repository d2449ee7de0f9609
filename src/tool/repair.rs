//! `repair`: restores the rules of this host's containers after a flush.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use super::pause::{Signals, Woken};
use super::{Tool, print};
use crate::error::{Context, Result};
use crate::log;
use crate::netfilter::{self, PacketFilter, Repair, Watch};
use crate::options::{CommandLine, Opt, no_words, opt, usage};
use crate::skel::Table;

pub(super) const TOOL: Tool = Tool {
    command: "cnibox repair",
    usage: "\
repair: restores the rules of this host's containers that were flushed

Usage:
  cnibox repair [--dry-run | --watch]

Looks at our tables in the host's network namespace, restores what is missing, in one transaction for each
back end, and prints it; what is whole stays as it is.
",
    options: &[
        Opt {
            short: Some('n'),
            ..opt("--dry-run", "", "print what is missing, and change nothing")
        },
        opt("--watch", "", "stay, and repair after every change of rules; ends on SIGTERM"),
    ],
    notes: "
Run it on the host after \"nft flush ruleset\", from the unit that reloads your own rules:
  systemctl edit nftables.service
  [Service]
  ExecStartPost=/opt/cni/bin/cnibox repair
  ExecReload=/opt/cni/bin/cnibox repair
or all the time: systemctl enable --now cnibox-repair.service
An ADD that needs the rules does the same.

Exit status: 0 everything is whole; 1 something failed, see stderr, or with --dry-run something is missing;
2 wrong usage.
",
};

/// Rules often change in quick succession, so one look serves several changes.
const SETTLE: Duration = Duration::from_millis(50);

/// How often to look where rules change without an event: those of the legacy iptables.
const INTERVAL: Duration = Duration::from_secs(1);

/// The pause after a look is this many times as long as the look, so that changes in quick succession cost
/// a tenth of a processor; but [`LONGEST_PAUSE`] at most, on a busy node.
const PAUSE_FACTOR: u32 = 10;
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Job {
    Once(Repair),
    Watch,
}

/// Runs the tool with the arguments that follow its name.
pub fn main(args: Vec<String>, _: Table) -> ExitCode {
    TOOL.run(
        args,
        |line| Job::read(&line),
        |job| match job {
            Job::Once(repair) => once(repair),
            Job::Watch => watch(),
        },
    )
}

impl Job {
    fn read(line: &CommandLine) -> Result<Job> {
        no_words(line)?;
        match (line.has("--dry-run"), line.has("--watch")) {
            (true, true) => Err(usage("--watch changes what --dry-run only prints")),
            (true, false) => Ok(Job::Once(Repair::Report)),
            (false, true) => Ok(Job::Watch),
            (false, false) => Ok(Job::Once(Repair::Restore)),
        }
    }
}

fn once(repair: Repair) -> Result<ExitCode> {
    let found = look(repair)?;
    if found.is_empty() {
        return print("nothing was missing\n");
    }
    print(&found)?;
    Ok(if repair == Repair::Report { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// One line for each thing that was missing.
fn look(repair: Repair) -> Result<String> {
    let found = netfilter::heal(&PacketFilter::new(), repair).context(|| "restore rules")?;
    let done = if repair == Repair::Report { "missing" } else { "restored" };
    let lines: Vec<String> = found.iter().map(|what| format!("{done}: {what}\n")).collect();
    Ok(lines.concat())
}

/// Repairs until SIGTERM or SIGINT. What goes wrong is reported, and tried again after the next change.
fn watch() -> Result<ExitCode> {
    let signals = Signals::block()?;
    // Opened before the first look, so that no change after that look is missed.
    let mut watch = Watch::open(&PacketFilter::new());
    loop {
        let start = Instant::now();
        match look(Repair::Restore) {
            Ok(found) => drop(print(&found)?),
            Err(error) => log::warn(error),
        }
        let pause = (start.elapsed() * PAUSE_FACTOR).clamp(SETTLE, LONGEST_PAUSE);
        let interval = watch.must_poll().then_some(INTERVAL);
        if signals.wait(None, Some(pause))? == Some(Woken::End)
            || signals.wait(watch.events(), interval)? == Some(Woken::End)
        {
            return Ok(ExitCode::SUCCESS);
        }
        watch.renew(&PacketFilter::new());
    }
}
