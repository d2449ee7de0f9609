//! `repair`: restores what this host's containers have lost: rules, bridges, ports, routes.

use std::collections::HashSet;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::gc::{CACHE, Folders, PLUGIN_PATH};
use super::in_process::InProcess;
use super::pause::{Signals, Woken};
use super::{Tool, doctor, install, print};
use crate::error::{Code, Context, Result};
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
repair: restores what this host's containers have lost

Usage:
  cnibox repair [--dry-run | --watch [--install DIR]]

Looks at our tables in the host's network namespace and restores what is missing, in one transaction for each
back end. Then each attachment that a runtime has cached and whose container lives gets back, as its ADD made
it: its bridge with gateway and MAC, its port, addresses and routes of the host's end, kernel parameters of the
host, and routes of the container. What is whole stays as it is; what somebody has set otherwise is left alone.
Each of these is printed.
",
    options: &[
        Opt {
            short: Some('n'),
            ..opt("--dry-run", "", "print what is missing, and change nothing")
        },
        opt("--watch", "", "stay, and repair after every change; ends on SIGTERM"),
        opt(INSTALL, "DIR", "with --watch: keep the plugins in DIR as well, those that cnibox install put there"),
        PLUGIN_PATH,
        CACHE,
    ],
    notes: "
Run it on the host after \"nft flush ruleset\", from the unit that reloads your own rules:
  systemctl edit nftables.service
  [Service]
  ExecStartPost=/opt/cni/bin/cnibox repair
  ExecReload=/opt/cni/bin/cnibox repair
or all the time: systemctl enable --now cnibox-repair.service
An ADD that needs the rules restores them as well.

Exit status: 0 everything is whole; 1 something failed, see stderr, or with --dry-run something is missing;
2 wrong usage.
",
};

const INSTALL: &str = "--install";

/// Changes often come in quick succession, so one look serves several changes.
const SETTLE: Duration = Duration::from_millis(50);

/// How often to look where rules change without an event: those of the legacy iptables.
const INTERVAL: Duration = Duration::from_secs(1);

/// The pause after a look is this many times as long as the look, so that changes in quick succession cost
/// a tenth of a processor; but [`LONGEST_PAUSE`] at most, on a busy node.
const PAUSE_FACTOR: u32 = 10;
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// As long as each look finds something missing, somebody removes what is restored: the pause doubles
/// up to this.
const LONGEST_DISPUTE: Duration = Duration::from_secs(30);

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    Once(Repair),
    Watch,
}

/// What to do, and where attachments and plugins are.
struct Job {
    mode: Mode,
    /// The folder of plugins that is kept as installed.
    install: Option<String>,
    runtime: Runtime,
    table: Table,
}

/// Runs the tool with the arguments that follow its name.
pub fn main(args: Vec<String>, table: Table) -> ExitCode {
    TOOL.run(
        args,
        |line| Job::read(&line, table),
        |job| match job.mode {
            Mode::Once(repair) => job.once(repair),
            Mode::Watch => job.watch(),
        },
    )
}

impl Job {
    fn read(line: &CommandLine, table: Table) -> Result<Job> {
        no_words(line)?;
        let mode = match (line.has("--dry-run"), line.has("--watch")) {
            (true, true) => return Err(usage("--watch changes what --dry-run only prints")),
            (true, false) => Mode::Once(Repair::Report),
            (false, true) => Mode::Watch,
            (false, false) => Mode::Once(Repair::Restore),
        };
        let install = line.last(INSTALL).map(str::to_owned);
        if install.is_some() && mode != Mode::Watch {
            return Err(usage("--install goes with --watch"));
        }
        Ok(Job { mode, install, runtime: Folders::read(line).runtime(table), table })
    }

    fn once(&self, repair: Repair) -> Result<ExitCode> {
        let repairs = self.look(repair);
        let text = repairs.to_string();
        let failed = repairs.failed();
        failed.iter().for_each(log::warn);
        let nothing = if failed.is_empty() { "nothing was missing\n" } else { "" };
        print(if text.is_empty() { nothing } else { &text })?;
        let is_wanting = repair == Repair::Report && !repairs.missing().is_empty();
        Ok(if is_wanting || !failed.is_empty() { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }

    /// The rules first: no port forwards before its rules are there.
    fn look(&self, repair: Repair) -> Repairs {
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

    /// What the plugins of an attachment restore, in the order of their list; one whose namespace is gone
    /// has lost nothing.
    fn attachment(&self, cached: &CachedAttachment, repairs: &mut Repairs) {
        let attach = &cached.attach;
        let Some(list) = cached.list().filter(|_| !attach.netns.is_empty()) else { return };
        // That of ADD, which is of all versions.
        let env = self.runtime.environment("ADD", attach);
        let title = || doctor::title(cached);
        let requests = match self.runtime.check_requests(&list, attach) {
            Ok(requests) => requests,
            Err(error) => return repairs.fail(error.context(title())),
        };
        for (path, request) in requests {
            match (InProcess { table: self.table }).repair(&path, &env, &request, repairs) {
                Ok(()) => {}
                Err(error) if error.code() == Code::INVALID_NETNS => return log::debug(error),
                Err(error) => repairs.fail(error.context(title())),
            }
        }
    }

    /// Repairs until SIGTERM or SIGINT. What goes wrong is reported, and tried again after the next change.
    fn watch(&self) -> Result<ExitCode> {
        let signals = Signals::block()?;
        if let Some(folder) = self.install.clone() {
            keep_installed(folder, self.table);
        }
        // Opened before the first look, so that no change after that look is missed.
        let mut rules = Watch::open(&PacketFilter::new());
        let mut links = Changes::listen()?;
        let mut told = HashSet::new();
        let mut dispute = Duration::ZERO;
        loop {
            let start = Instant::now();
            let repairs = self.look(Repair::Restore);
            tell(&repairs, &mut told)?;
            let pause = (start.elapsed() * PAUSE_FACTOR).clamp(SETTLE, LONGEST_PAUSE).max(dispute);
            let is_whole = repairs.missing().is_empty();
            dispute = if is_whole {
                Duration::ZERO
            } else {
                dispute.saturating_mul(2).clamp(SETTLE, LONGEST_DISPUTE)
            };
            let interval = rules.must_poll().then_some(INTERVAL);
            if signals.wait(&[], Some(pause))? == Some(Woken::End)
                || wait(&signals, &rules, &mut links, interval)? == Woken::End
            {
                return Ok(ExitCode::SUCCESS);
            }
            rules.renew(&PacketFilter::new());
        }
    }
}

/// Keeps a folder of plugins as installed, until the process ends. Where that fails, the process is to
/// end, so that whoever has started it sees it.
fn keep_installed(folder: String, table: Table) {
    thread::spawn(move || {
        install::keep(folder, table);
        kill(Pid::this(), Signal::SIGTERM).unwrap_or_default();
    });
}

/// Prints what was done, and what is new of what was not.
fn tell(repairs: &Repairs, told: &mut HashSet<String>) -> Result<()> {
    let left = repairs.left().iter().map(|what| format!("left alone: {what}"));
    let failed = repairs.failed().iter().map(ToString::to_string);
    let troubles: HashSet<String> = left.chain(failed).collect();
    troubles.difference(told).for_each(log::warn);
    *told = troubles;
    let lines: Vec<String> =
        repairs.missing().iter().map(|what| format!("restored: {what}\n")).collect();
    if lines.is_empty() { Ok(()) } else { print(&lines.concat()).map(drop) }
}

/// Waits for a change of rules or a loss of links, or for the end of `interval`.
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
        let rules_changed =
            rules.events().map(|events| signals.wait(&[events], Some(Duration::ZERO)));
        match rules_changed.transpose()?.flatten() {
            Some(Woken::End) => return Ok(Woken::End),
            Some(Woken::Change) => {
                drop(links.heard());
                return Ok(Woken::Change);
            }
            None => {}
        }
        match links.heard() {
            Ok(false) => {}
            Ok(true) => return Ok(Woken::Change),
            Err(error) => {
                log::debug(error);
                *links = Changes::listen()?;
                return Ok(Woken::Change);
            }
        }
    }
}
