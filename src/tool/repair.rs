//! `repair`: restores missing rules, bridges, ports and routes of this host's containers.

use std::collections::HashSet;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant, UNIX_EPOCH};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::directories::{CACHE, PLUGIN_PATH, ToolDirectories};
use super::egress::{self, PolicyFilesWatch};
use super::in_process::InProcessExecutor;
use super::life::find_rival;
use super::outcome::{ActionOutcome, FAILED, LEFT_ALONE, MISSING, RESTORED, report_outcomes};
use super::pause::{StopSignals, WakeReason};
use super::snapshot::{NodeSnapshot, wait_for_running_calls};
use super::{DRY_RUN, JSON, ToolCommand, doctor, install, print_text};
use crate::attachment::{AttachmentId, AttachmentRecord, Liveness};
use crate::devices::lost::LostDevice;
use crate::framework::{AppletTable, AttachmentTurn};
use cni::error::{Error, ErrorCode, ErrorContext, Result};

use crate::netfilter::reconcile::{ReconcileMode, reconcile_all};
use crate::netfilter::{PacketFilter, PacketFilterWatch};
use crate::netlink::{LossEvents, Netlink};
use crate::netns::NetnsIdentity;
use crate::options::{CommandLine, CommandOption, long_option, require_no_words, usage_error};
use crate::repairs::RepairFindings;
use cni::runtime::{CachedAttachment, Runtime};

pub(super) const TOOL: ToolCommand = ToolCommand {
    command: "cnibox repair",
    usage: "\
repair: restores missing rules, bridges, ports and routes of this host's containers

Usage:
  cnibox repair [--dry-run] [--json]
  cnibox repair --watch [--install DIR]

Restores missing rules of cnibox in the host's network namespace, in one transaction for each back \
            end. Then restores
the network of each attachment in the runtimes' caches whose container is alive, as ADD created it: \
            the bridge with its
gateway addresses and MAC, the port, addresses and routes of the host's end, kernel parameters of \
            the host, and routes
of the container. Keeps settings that somebody changed. Puts changed files of egress policies in \
            force. Prints each change.
",
    options: &[
        CommandOption { about: "print what is missing, and change nothing", ..DRY_RUN },
        CommandOption {
            about: "print an array of objects with action, object, problem and remedy",
            ..JSON
        },
        long_option("--watch", "", "keep running, and repair after every change, until SIGTERM"),
        long_option(
            INSTALL,
            "DIR",
            "with --watch: also restore the plugins in DIR that cnibox install put there",
        ),
        PLUGIN_PATH,
        CommandOption {
            about: "parent of the cache, DIR/results [/var/lib/cni, and that of multus, \
                    /var/lib/cni/multus]",
            ..CACHE
        },
    ],
    notes: "
Run it on the host after \"nft flush ruleset\", from the unit that reloads your own rules:
  systemctl edit nftables.service
  [Service]
  ExecStartPost=/opt/cni/bin/cnibox repair
  ExecReload=/opt/cni/bin/cnibox repair
or permanently: systemctl enable --now cnibox-repair.service
An ADD that needs the rules also restores them.

Exit status: 0 done; 1 something failed, see stderr, or with --dry-run something is missing; 2 \
            wrong usage.
",
};

const INSTALL: &str = "--install";

/// Changes often come in quick succession, so one check covers several changes.
const SETTLE: Duration = Duration::from_millis(50);

/// The interval of checks if rules change without an event, as in the legacy iptables.
const INTERVAL: Duration = Duration::from_secs(1);

/// The pause after a check is this many times as long as the check, up to [`LONGEST_PAUSE`]:
/// changes in quick succession take about a tenth of the time of a processor.
const PAUSE_FACTOR: u32 = 10;
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The longest pause while each check finds something missing; the pause doubles after each of
/// them, because another program removes what is restored.
const LONGEST_DISPUTE: Duration = Duration::from_secs(30);

struct RepairJob {
    /// On the caches with attachments.
    runtimes: Vec<Runtime>,
    table: AppletTable,
}

/// Runs the tool with the arguments that follow its name.
pub fn main(args: Vec<String>, table: AppletTable) -> ExitCode {
    TOOL.run_command(args, check_options, |line| {
        let job = RepairJob {
            runtimes: ToolDirectories::from_command_line(&line).new_runtimes(table),
            table,
        };
        match (line.has_option("--watch"), line.has_option("--dry-run")) {
            (true, _) => job.repair_until_stopped(line.last_value(INSTALL)),
            (false, true) => job.repair_once(ReconcileMode::Report, line.has_option(JSON.flag)),
            (false, false) => job.repair_once(ReconcileMode::Apply, line.has_option(JSON.flag)),
        }
    })
}

fn check_options(line: CommandLine) -> Result<CommandLine> {
    require_no_words(&line)?;
    if let Some(odd) = line.given_flags().find(|flag| [DRY_RUN.flag, JSON.flag].contains(flag))
        && line.has_option("--watch")
    {
        return Err(usage_error(format!("--watch excludes {odd}")));
    }
    if line.has_option(INSTALL) && !line.has_option("--watch") {
        return Err(usage_error("--install needs --watch"));
    }
    Ok(line)
}

impl RepairJob {
    fn repair_once(&self, mode: ReconcileMode, json: bool) -> Result<ExitCode> {
        let repairs = self.repair_all(mode);
        let is_dry = mode == ReconcileMode::Report;
        repairs.repair_errors().iter().for_each(|warning| warn!("{warning}"));
        report_outcomes(&repair_outcomes(&repairs, is_dry), json, is_dry, "nothing was missing")
    }

    /// Restores the rules first: no port forwards before its rules are in force.
    fn repair_all(&self, mode: ReconcileMode) -> RepairFindings {
        let mut repairs = RepairFindings::new(mode == ReconcileMode::Report);
        egress::repair_links(&mut repairs);
        match reconcile_all(&PacketFilter::new(), mode).context(|| "restore rules") {
            Ok(outcome) => {
                repairs.record_missing(outcome.differences);
                outcome.failures.into_iter().for_each(|error| repairs.record_failure(error));
            }
            Err(error) => repairs.record_failure(error),
        }
        egress::repair_policies(&mut repairs);
        repair_lost_devices(&mut repairs).unwrap_or_else(|error| repairs.record_failure(error));
        let results: Vec<PathBuf> = self.runtimes.iter().map(Runtime::results_dir).collect();
        let snapshot = NodeSnapshot::take(&results);
        let (mut all, mut runtime_of) = (Vec::new(), Vec::new());
        for runtime in &self.runtimes {
            match runtime.cached_attachments("") {
                Ok(mut cached) => {
                    cached.retain(|cached| !is_at_later_namespace(cached));
                    runtime_of.extend(cached.iter().map(|_| runtime));
                    all.append(&mut cached);
                }
                Err(error) => repairs.record_failure(error),
            }
        }
        self.repair_attachments(&all, &runtime_of, &snapshot, &mut repairs);
        repairs
    }

    /// The differences of an attachment that a runtime is attaching or detaching at this moment are
    /// not reported.
    fn repair_attachments(
        &self,
        all: &[CachedAttachment],
        runtime_of: &[&Runtime],
        snapshot: &NodeSnapshot,
        repairs: &mut RepairFindings,
    ) {
        let mut found = Vec::new();
        for (cached, runtime) in all.iter().zip(runtime_of) {
            let mut own = repairs.for_attachment();
            own.shares_namespace = find_rival(all, cached).is_some();
            self.repair_attachment(runtime, cached, &mut own);
            if !own.is_empty() {
                found.push((cached, runtime, own));
            }
        }
        if !found.is_empty() {
            wait_for_running_calls();
        }
        for (cached, runtime, own) in found {
            if snapshot.is_at_rest(runtime, cached) {
                repairs.merge(own);
            }
        }
    }

    /// Lets the plugins restore an attachment, in the order of their list. An attachment without a
    /// namespace needs nothing.
    fn repair_attachment(
        &self,
        runtime: &Runtime,
        cached: &CachedAttachment,
        repairs: &mut RepairFindings,
    ) {
        let attach = &cached.attach;
        let Some(list) = cached.network_list().filter(|_| !attach.netns.is_empty()) else { return };
        // All versions of the specification have ADD.
        let env = runtime.call_environment("ADD", attach);
        let title = || doctor::attachment_title(cached);
        let owner = AttachmentId {
            network: &cached.network,
            ifname: &attach.ifname,
            id: &attach.container_id,
        };
        // A call of the runtime that has the turn attaches or detaches the container.
        let _lock = match AttachmentTurn::take(owner) {
            Ok(turn) => turn,
            Err(error) => return debug!("{error}"),
        };
        let requests = match runtime.check_requests(&list, attach) {
            Ok(requests) => requests,
            Err(error) => return repairs.record_failure(error.context(title())),
        };
        let plugins = InProcessExecutor::new(self.table);
        for (path, request) in requests {
            match plugins.run_repair(&path, &env, &request, repairs) {
                Ok(()) => {}
                Err(error) if error.code() == ErrorCode::INVALID_NETNS => return debug!("{error}"),
                Err(error) => repairs.record_failure(error.context(title())),
            }
        }
    }

    /// Repairs until SIGTERM or SIGINT. Failures are reported, and the repair is retried after the
    /// next change.
    fn repair_until_stopped(&self, install: Option<&str>) -> Result<ExitCode> {
        let signals = StopSignals::block_signals()?;
        if let Some(directory) = install {
            keep_installed(directory.into(), self.table);
        }
        // Opened before the first check, so that no change after that check is missed.
        let mut rules = PacketFilterWatch::open(&PacketFilter::new());
        let mut links = LossEvents::listen_for_losses()?;
        let mut reported = HashSet::new();
        let mut dispute = Duration::ZERO;
        let own = install::OwnExecutable::find_current()?;
        loop {
            own.restart_if_replaced();
            let start = Instant::now();
            let policies = PolicyFilesWatch::start();
            let repairs = self.repair_all(ReconcileMode::Apply);
            report_changes(&repairs, &mut reported)?;
            let pause = (start.elapsed() * PAUSE_FACTOR).clamp(SETTLE, LONGEST_PAUSE).max(dispute);
            dispute = match repairs.missing_state() {
                [] => Duration::ZERO,
                _ => (dispute * 2).clamp(SETTLE, LONGEST_DISPUTE),
            };
            let interval = (rules.must_poll() || own.is_missing()).then_some(INTERVAL);
            if signals.wait_for_event(&[], Some(pause))? == Some(WakeReason::End)
                || wait_for_change(&signals, &rules, &mut links, policies.as_ref(), interval)?
                    == WakeReason::End
            {
                return Ok(ExitCode::SUCCESS);
            }
            rules.restart_watch(&PacketFilter::new());
        }
    }
}

/// Whether the network namespace at the attachment's path was created after its ADD: it is another
/// container's. The times are those of the wall clock, so that a pair, which shows that the
/// container lives, counts more.
fn is_at_later_namespace(cached: &CachedAttachment) -> bool {
    let CachedAttachment { network, attach, written, .. } = cached;
    let created = NetnsIdentity::creation_time(Path::new(&attach.netns));
    let is_later = created.zip(*written).is_some_and(|(created, written)| {
        let since = written.duration_since(UNIX_EPOCH).unwrap_or_default();
        // Some file systems keep seconds, or pairs of them.
        let is_rounded = since.subsec_nanos() == 0;
        created > written + Duration::from_secs(if is_rounded { 2 } else { 0 })
    });
    let owner = AttachmentId { network, ifname: &attach.ifname, id: &attach.container_id };
    is_later
        && AttachmentRecord::find_by_attachment(owner)
            .is_none_or(|record| record.liveness() != Liveness::Alive)
}

/// Restores the devices of ended attachments that the kernel has given back since.
fn repair_lost_devices(repairs: &mut RepairFindings) -> Result<()> {
    let host = Netlink::open()?;
    for device in LostDevice::find_all() {
        if device.is_on_host(&host)? {
            let object = device.object();
            repairs.restore_missing(object, || device.give_back(&host).map(drop));
        }
    }
    Ok(())
}

fn repair_outcomes(repairs: &RepairFindings, is_dry: bool) -> Vec<ActionOutcome> {
    let (action, remedy) = if is_dry { (MISSING, "cnibox repair") } else { (RESTORED, "") };
    let missing = repairs.missing_state().iter();
    let missing = missing.map(|what| ActionOutcome::new(action, "", what, "").with_remedy(remedy));
    let left =
        repairs.changed_state().iter().map(|what| ActionOutcome::new(LEFT_ALONE, "", what, ""));
    let failed = repairs.repair_errors().iter().map(|error| {
        ActionOutcome::new(FAILED, "", "repair", error.message()).with_remedy(error.details())
    });
    missing.chain(left).chain(failed).collect()
}

/// Keeps a directory of plugins as installed, until the process ends. A failure ends the process,
/// so that its service manager notices.
fn keep_installed(directory: PathBuf, table: AppletTable) {
    thread::spawn(move || {
        install::maintain_installation(&directory, table)
            .unwrap_or_else(|error| warn!("could not keep the installation: {error}"));
        kill(Pid::this(), Signal::SIGTERM).unwrap_or_default();
    });
}

/// Prints what was restored, and logs what could not be restored, unless the previous call reported
/// it.
fn report_changes(repairs: &RepairFindings, reported: &mut HashSet<String>) -> Result<()> {
    let left = repairs.changed_state().iter().map(|what| format!("left alone: {what}"));
    let failed = repairs.repair_errors().iter().map(ToString::to_string);
    let troubles: HashSet<String> = left.chain(failed).collect();
    troubles.difference(reported).for_each(|warning| warn!("{warning}"));
    *reported = troubles;
    let text: String =
        repairs.missing_state().iter().map(|what| format!("restored: {what}\n")).collect();
    if text.is_empty() { Ok(()) } else { print_text(&text).map(drop) }
}

/// Waits for a change of rules or policies, a loss of links, a signal, or the end of `interval`.
fn wait_for_change(
    signals: &StopSignals,
    rules: &PacketFilterWatch,
    links: &mut LossEvents,
    policies: Option<&PolicyFilesWatch>,
    interval: Option<Duration>,
) -> Result<WakeReason> {
    loop {
        let sources = rules.event_descriptor().into_iter().chain([links.as_fd()]);
        let sources: Vec<_> = sources.chain(policies.map(AsFd::as_fd)).collect();
        match signals.wait_for_event(&sources, interval)? {
            Some(WakeReason::End) => return Ok(WakeReason::End),
            None => return Ok(WakeReason::Change),
            Some(WakeReason::Change) => {}
        }
        let is_lost = links.drain_events().or_else(|error| {
            debug!("{error}");
            *links = LossEvents::listen_for_losses()?;
            Ok::<_, Error>(true)
        })?;
        let woken = rules
            .event_descriptor()
            .map(|events| signals.wait_for_event(&[events], Some(Duration::ZERO)));
        match woken.transpose()?.flatten() {
            None if !is_lost && !policies.is_some_and(PolicyFilesWatch::has_changed) => {}
            woken => return Ok(woken.unwrap_or(WakeReason::Change)),
        }
    }
}
