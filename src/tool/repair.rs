//! `repair`: restores missing rules, bridges, ports and routes of this host's containers.

use std::collections::HashSet;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::folders::{CACHE, Folders, PLUGIN_PATH};
use super::in_process::InProcess;
use super::outcome::{FAILED, Outcome};
use super::pause::{Signals, Woken};
use super::{DRY_RUN, JSON, Tool, doctor, install, print};
use crate::cni::json::pretty;
use crate::error::{Code, Context, Error, Result};
use crate::log;
use crate::netfilter::{self, PacketFilter, Repair, Watch};
use crate::netlink::Changes;
use crate::options::{CommandLine, Opt, no_words, opt, usage};
use crate::repairs::Repairs;
use crate::runtime::{CachedAttachment, Runtime};
use crate::skel::Table;

pub(super) const TOOL: Tool = Tool {
    command: "cnibox repair",
    usage: "\
repair: restores missing rules, bridges, ports and routes of this host's containers

Usage:
  cnibox repair [--dry-run] [--json]
  cnibox repair --watch [--install DIR]

Restores missing rules of cnibox in the host's network namespace, in one transaction for each back end. Then restores
the network of each attachment in the runtimes' cache whose container is alive, as ADD created it: the bridge with its
gateway addresses and MAC, the port, addresses and routes of the host's end, kernel parameters of the host, and routes
of the container. Keeps settings that somebody changed. Prints each change.
",
    options: &[
        Opt { about: "print what is missing, and change nothing", ..DRY_RUN },
        Opt { about: "print an array of objects with action, object, problem and remedy", ..JSON },
        opt("--watch", "", "keep running, and repair after every change, until SIGTERM"),
        opt(INSTALL, "DIR", "with --watch: also restore the plugins in DIR that cnibox install put there"),
        PLUGIN_PATH,
        CACHE,
    ],
    notes: "
Run it on the host after \"nft flush ruleset\", from the unit that reloads your own rules:
  systemctl edit nftables.service
  [Service]
  ExecStartPost=/opt/cni/bin/cnibox repair
  ExecReload=/opt/cni/bin/cnibox repair
or permanently: systemctl enable --now cnibox-repair.service
An ADD that needs the rules restores them as well.

Exit status: 0 done; 1 something failed, see stderr, or with --dry-run something is missing; 2 wrong usage.
",
};

const INSTALL: &str = "--install";

/// Changes often come in quick succession, so one check covers several changes.
const SETTLE: Duration = Duration::from_millis(50);

/// The interval of checks if rules change without an event, as in the legacy iptables.
const INTERVAL: Duration = Duration::from_secs(1);

/// The pause after a check is this many times as long as the check, up to [`LONGEST_PAUSE`]: changes in quick succession
/// cost a tenth of a processor.
const PAUSE_FACTOR: u32 = 10;
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The pause doubles up to this as long as each check finds something missing: another program removes what is restored.
const LONGEST_DISPUTE: Duration = Duration::from_secs(30);

struct Job {
    runtime: Runtime,
    table: Table,
}

/// Runs the tool with the arguments that follow its name.
pub fn main(args: Vec<String>, table: Table) -> ExitCode {
    TOOL.run(args, check, |line| {
        let job = Job { runtime: Folders::read(&line).runtime(table), table };
        match (line.has("--watch"), line.has("--dry-run")) {
            (true, _) => job.watch(line.last(INSTALL)),
            (false, true) => job.once(Repair::Report, line.has(JSON.flag)),
            (false, false) => job.once(Repair::Restore, line.has(JSON.flag)),
        }
    })
}

fn check(line: CommandLine) -> Result<CommandLine> {
    no_words(&line)?;
    if let Some(odd) = line.given().find(|flag| [DRY_RUN.flag, JSON.flag].contains(flag))
        && line.has("--watch")
    {
        return Err(usage(format!("--watch excludes {odd}")));
    }
    if line.has(INSTALL) && !line.has("--watch") {
        return Err(usage("--install needs --watch"));
    }
    Ok(line)
}

impl Job {
    fn once(&self, repair: Repair, json: bool) -> Result<ExitCode> {
        let repairs = self.restore(repair);
        let is_dry = repair == Repair::Report;
        let failed = repairs.failed();
        let is_found = is_dry && !repairs.missing().is_empty() || !failed.is_empty();
        let text = match repairs.to_string() {
            _ if json => pretty(&outcomes(&repairs, is_dry))? + "\n",
            text if text.is_empty() && failed.is_empty() => "nothing was missing\n".to_owned(),
            text => text,
        };
        failed.iter().for_each(log::warn);
        print(&text)?;
        Ok(if is_found { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }

    /// Restores the rules first: no port forwards before its rules are in force.
    fn restore(&self, repair: Repair) -> Repairs {
        let mut repairs = Repairs::new(repair == Repair::Report);
        match netfilter::heal(&PacketFilter::new(), repair).context(|| "restore rules") {
            Ok(found) => repairs.found(found),
            Err(error) => repairs.fail(error),
        }
        match self.runtime.cached_attachments("") {
            Ok(all) => all.iter().for_each(|cached| self.attachment(cached, &mut repairs)),
            Err(error) => repairs.fail(error),
        }
        repairs
    }

    /// Lets the plugins restore an attachment, in the order of their list. An attachment without a namespace needs nothing.
    fn attachment(&self, cached: &CachedAttachment, repairs: &mut Repairs) {
        let attach = &cached.attach;
        let Some(list) = cached.list().filter(|_| !attach.netns.is_empty()) else { return };
        // All versions of the specification have ADD.
        let env = self.runtime.environment("ADD", attach);
        let title = || doctor::title(cached);
        let requests = match self.runtime.check_requests(&list, attach) {
            Ok(requests) => requests,
            Err(error) => return repairs.fail(error.context(title())),
        };
        let plugins = InProcess { table: self.table };
        for (path, request) in requests {
            match plugins.repair(&path, &env, &request, repairs) {
                Ok(()) => {}
                Err(error) if error.code() == Code::INVALID_NETNS => return log::debug(error),
                Err(error) => repairs.fail(error.context(title())),
            }
        }
    }

    /// Repairs until SIGTERM or SIGINT. Failures are reported, and the repair is retried after the next change.
    fn watch(&self, install: Option<&str>) -> Result<ExitCode> {
        let signals = Signals::block()?;
        if let Some(folder) = install {
            keep_installed(folder.into(), self.table);
        }
        // Opened before the first check, so that no change after that check is missed.
        let mut rules = Watch::open(&PacketFilter::new());
        let mut links = Changes::listen()?;
        let mut reported = HashSet::new();
        let mut dispute = Duration::ZERO;
        let own = install::Own::find()?;
        loop {
            own.renew();
            let start = Instant::now();
            let repairs = self.restore(Repair::Restore);
            report(&repairs, &mut reported)?;
            let pause = (start.elapsed() * PAUSE_FACTOR).clamp(SETTLE, LONGEST_PAUSE).max(dispute);
            dispute = match repairs.missing() {
                [] => Duration::ZERO,
                _ => (dispute * 2).clamp(SETTLE, LONGEST_DISPUTE),
            };
            let interval = (rules.must_poll() || own.is_missing()).then_some(INTERVAL);
            if signals.wait(&[], Some(pause))? == Some(Woken::End)
                || wait(&signals, &rules, &mut links, interval)? == Woken::End
            {
                return Ok(ExitCode::SUCCESS);
            }
            rules.renew(&PacketFilter::new());
        }
    }
}

/// The findings, for JSON.
fn outcomes(repairs: &Repairs, is_dry: bool) -> Vec<Outcome> {
    let (action, remedy) = if is_dry { ("missing", "cnibox repair") } else { ("restored", "") };
    let missing = repairs.missing().iter();
    let missing = missing.map(|what| Outcome::new(action, "", what, "").with_remedy(remedy));
    let left = repairs.left().iter().map(|what| Outcome::new("left alone", "", what, ""));
    let failed = repairs
        .failed()
        .iter()
        .map(|error| Outcome::new(FAILED, "", "repair", error.msg()).with_remedy(error.details()));
    missing.chain(left).chain(failed).collect()
}

/// Keeps a directory of plugins as installed, until the process ends. A failure ends the process, so that its service
/// manager notices.
fn keep_installed(folder: PathBuf, table: Table) {
    thread::spawn(move || {
        install::keep(&folder, table).unwrap_or_else(log::warn);
        kill(Pid::this(), Signal::SIGTERM).unwrap_or_default();
    });
}

/// Prints what was restored, and logs what was not, unless it was reported the last time.
fn report(repairs: &Repairs, reported: &mut HashSet<String>) -> Result<()> {
    let left = repairs.left().iter().map(|what| format!("left alone: {what}"));
    let failed = repairs.failed().iter().map(ToString::to_string);
    let troubles: HashSet<String> = left.chain(failed).collect();
    troubles.difference(reported).for_each(log::warn);
    *reported = troubles;
    let line = |what| format!("restored: {what}\n");
    let text: String = repairs.missing().iter().map(line).collect();
    if text.is_empty() { Ok(()) } else { print(&text).map(drop) }
}

/// Waits for a change of rules, a loss of links, a signal, or the end of `interval`.
fn wait(
    signals: &Signals,
    rules: &Watch,
    links: &mut Changes,
    interval: Option<Duration>,
) -> Result<Woken> {
    loop {
        let sources: Vec<_> = rules.events().into_iter().chain([links.as_fd()]).collect();
        match signals.wait(&sources, interval)? {
            Some(Woken::End) => return Ok(Woken::End),
            None => return Ok(Woken::Change),
            Some(Woken::Change) => {}
        }
        let is_lost = links.heard().or_else(|error| {
            log::debug(error);
            *links = Changes::listen()?;
            Ok::<_, Error>(true)
        })?;
        let woken = rules.events().map(|events| signals.wait(&[events], Some(Duration::ZERO)));
        match woken.transpose()?.flatten() {
            None if !is_lost => {}
            woken => return Ok(woken.unwrap_or(Woken::Change)),
        }
    }
}
