//! `cnibox gc`: deletes the attachments of dead containers, without a runtime.

use std::collections::HashSet;
use std::path::Path;
use std::process::ExitCode;

use super::directories::{CACHE, CONF, LEASES, LeaseDirectory, PLUGIN_PATH, ToolDirectories};
use super::life::{AttachmentSelection, doubt_reason};
use super::outcome::{ActionOutcome, IN_DOUBT, report_outcomes};
use super::{DRY_RUN, JSON, NETWORK, ToolCommand};
use crate::attachment::{AttachmentId, AttachmentRecord, Liveness, LivenessDoubt};
use crate::cni::{ContainerId, NetworkName};
use crate::error::{Error, Result};
use crate::framework::{AppletTable, Failures, reclaim};
use crate::leases::{DATA_DIR, LeaseStatus, ReclaimedLease};
use crate::options::{CommandLine, CommandOption, long_option, require_no_words};
use crate::runtime::{AttachmentParams, CachedAttachment, NetworkList, Runtime};

pub(super) const TOOL: ToolCommand = ToolCommand {
    command: "cnibox gc",
    usage: "\
gc: deletes the attachments of dead containers

Usage:
  cnibox gc [--network NAME] [--container ID] [--dry-run] [--json]

The leases of host-local, rules and devices of each attachment whose container has certainly ended are deleted. Then
it gets a DEL: with the configuration and the arguments of its ADD if it is in the runtimes' cache, else with the
current configuration of the network. An attachment that is not proved to have ended stays, unless --container names
it; --dry-run lists it with the reason.

\"cnitool gc\" is the GC of a runtime instead: it deletes every attachment of one network that is not in a list, even if
its container is alive.
",
    options: &[
        CommandOption { about: "print the attachments, also those in doubt, and change nothing", ..DRY_RUN },
        NETWORK,
        long_option(
            "--container",
            "ID",
            "this container only, also if nothing proves that it has ended; not if it is alive",
        ),
        CommandOption { about: "print an array of objects with action, object, network, problem and remedy", ..JSON },
        CONF,
        PLUGIN_PATH,
        CACHE,
        LEASES,
    ],
    notes: "
Exit status: 0 done; 1 something failed, see stderr, or with --dry-run something would be deleted; 2 wrong usage.
",
};

/// The remedy for what `--dry-run` lists.
const COLLECT: &str = "cnibox gc";

/// An attachment that can be deleted, with the reason.
struct EndedAttachment {
    list: NetworkList,
    attach: AttachmentParams,
    why: String,
}

/// The attachments that were found.
#[derive(Default)]
struct FoundAttachments {
    known: HashSet<(String, String, String)>,
    ended: Vec<EndedAttachment>,
    /// Attachments that stay, with the reason.
    doubtful: Vec<ActionOutcome>,
}

impl FoundAttachments {
    /// Whether the attachment was not known before.
    fn insert_if_new(&mut self, network: &str, id: &str, ifname: &str) -> bool {
        self.known.insert((network.to_owned(), id.to_owned(), ifname.to_owned()))
    }
}

/// The attachments of the selection whose network is known: from the cache, else from records and leases, with the
/// current configuration of the network.
fn find_ended(
    directories: &ToolDirectories,
    runtime: &Runtime,
    selection: &AttachmentSelection<'_>,
) -> Result<FoundAttachments> {
    let mut found = FoundAttachments::default();
    for (cached, life) in directories.cached_attachments(runtime)? {
        let CachedAttachment { network, attach, .. } = &cached;
        let AttachmentParams { container_id, ifname, .. } = attach;
        found.insert_if_new(network, container_id, ifname);
        if let Some(why) = selection.deletion_reason(network, container_id, life.liveness) {
            if let Some(list) = cached.network_list() {
                // The path may belong to another container meanwhile.
                let attach = AttachmentParams { netns: String::new(), ..cached.attach };
                found.ended.push(EndedAttachment { list, attach, why });
            }
        } else if selection.has_attachment(network, container_id)
            && let Some(why) = life.doubt_reason(&attach.netns)
        {
            let object = format!("container {container_id}, interface {ifname}");
            found.doubtful.push(outcome_in_doubt(network, container_id, object, why));
        }
    }
    let mut add = |network: &str, id: &str, ifname: &str, liveness: Liveness| {
        // The first source that has the attachment counts: the cache, then the record, then the lease.
        if found.insert_if_new(network, id, ifname)
            && let Some(why) = selection.deletion_reason(network, id, liveness)
            && let Ok(list) = NetworkList::load(&directories.conf, network)
        {
            found.ended.push(EndedAttachment { list, attach: AttachmentParams::new(id, "", ifname), why });
        }
    };
    for record in AttachmentRecord::read_all(selection.network) {
        add(&record.network, &record.id, &record.ifname, record.liveness());
    }
    for store in directories.find_lease_directories(selection.network)? {
        for status in store.read_listing()?.lease_statuses() {
            if let Some(ifname) = &status.lease.ifname {
                add(&store.network, &status.lease.id, ifname, status.liveness);
            }
        }
    }
    Ok(found)
}

/// The outcome for an attachment that stays because nothing proves its end; a person may know that it has ended.
fn outcome_in_doubt(network: &str, id: &str, object: String, why: String) -> ActionOutcome {
    let remedy = format!("{COLLECT} --network {network} --container {id}, if it has ended");
    ActionOutcome::new(IN_DOUBT, network, object, why).with_remedy(remedy)
}

/// Whether an attachment exists, by its record, else by its leases.
fn attachment_liveness(stores: &[LeaseDirectory], owner: AttachmentId<'_>) -> Liveness {
    let dirs = stores.iter().map(|store| store.data_dir.as_path()).chain([Path::new(DATA_DIR)]);
    let mut lives = dirs.map(|dir| reclaim::attachment_liveness(owner, dir));
    let unknown = Liveness::Unknown(LivenessDoubt::NoRecord);
    lives.find(|life| *life != unknown).unwrap_or(unknown)
}

/// Fails if the selection names a network or a container that this node does not know.
fn require_known(
    directories: &ToolDirectories,
    found: &FoundAttachments,
    selection: &AttachmentSelection<'_>,
) -> Result<()> {
    let missing = |what| Err(Error::config(what));
    if let Some(name) = selection.network {
        let is_configured = || directories.configured_networks().iter().any(|list| list.name == name);
        let is_cached = || found.known.iter().any(|(network, ..)| network == name);
        if !is_cached() && !is_configured() && directories.find_lease_directories(Some(name))?.is_empty() {
            return missing(format!("no network \"{name}\" on this node"));
        }
    }
    match selection.container {
        Some(id) if !found.known.iter().any(|(_, container, _)| container == id) => {
            missing(format!("no attachment of container \"{id}\" on this node"))
        }
        _ => Ok(()),
    }
}

/// Runs `cnibox gc` with the arguments that follow.
pub(super) fn main(args: Vec<String>, table: AppletTable) -> ExitCode {
    let read = |line: CommandLine| {
        require_no_words(&line)?;
        line.last_value(NETWORK.flag).map_or(Ok(()), |name| NetworkName::parse(name).map(drop))?;
        line.last_value("--container").map_or(Ok(()), |id| ContainerId::parse(id).map(drop))?;
        Ok(line)
    };
    TOOL.run_command(args, read, |line| run_gc(&line, table))
}

fn run_gc(line: &CommandLine, table: AppletTable) -> Result<ExitCode> {
    let selection =
        AttachmentSelection { network: line.last_value(NETWORK.flag), container: line.last_value("--container") };
    let dry_run = line.has_option(DRY_RUN.flag);
    let outcomes = collect_garbage(&ToolDirectories::from_command_line(line), table, &selection, dry_run)?;
    report_outcomes(&outcomes, line.has_option(JSON.flag), dry_run, "no dead attachment was found")
}

/// Deletes, or with `dry_run` lists, the attachments of the selection that have ended.
pub(super) fn collect_garbage(
    directories: &ToolDirectories,
    table: AppletTable,
    selection: &AttachmentSelection<'_>,
    dry_run: bool,
) -> Result<Vec<ActionOutcome>> {
    let runtime = directories.new_runtime(table);
    let found = find_ended(directories, &runtime, selection)?;
    require_known(directories, &found, selection)?;
    // Reclaimed under the locks of the leases and records, because a runtime may attach a container again with the
    // same id; a DEL has no such lock.
    let mut reclaimed = Vec::new();
    for store in directories.find_lease_directories(selection.network)? {
        reclaim_leases(&store, selection, dry_run, &mut reclaimed)?;
    }
    for record in AttachmentRecord::read_all(selection.network) {
        reclaimed.extend(remove_remains(&record, selection, dry_run)?);
    }
    let mut outcomes = Vec::new();
    for EndedAttachment { list, attach, why } in found.ended {
        let AttachmentParams { container_id, ifname, .. } = &attach;
        let network = &list.name;
        let object = format!("container {container_id}, interface {ifname}");
        if dry_run {
            let outcome = ActionOutcome::new("would detach", network, object, why);
            outcomes.push(outcome.with_remedy(COLLECT));
            continue;
        }
        let owner = AttachmentId { network, ifname, id: container_id };
        let liveness = attachment_liveness(&directories.find_lease_directories(Some(network))?, owner);
        let is_reclaimed = liveness == Liveness::Unknown(LivenessDoubt::NoRecord);
        if !is_reclaimed && selection.deletion_reason(network, container_id, liveness).is_none() {
            continue;
        }
        outcomes.push(match runtime.del(&list, &attach) {
            Ok(()) => ActionOutcome::new("detached", network, object, why),
            Err(error) => ActionOutcome::log_failure(network, object, &error.context("detach")),
        });
    }
    outcomes.extend(reclaimed);
    if dry_run {
        outcomes.extend(found.doubtful);
    }
    Ok(outcomes)
}

/// Reclaims, or with `dry_run` lists, the leases of dead attachments.
fn reclaim_leases(
    store: &LeaseDirectory,
    selection: &AttachmentSelection<'_>,
    dry_run: bool,
    outcomes: &mut Vec<ActionOutcome>,
) -> Result<()> {
    let network = &store.network;
    let is_meant = |gone: &ReclaimedLease| selection.has_attachment(network, &gone.lease.id);
    let outcome = |action, gone: &ReclaimedLease| {
        ActionOutcome::new(action, network, gone.lease.to_string(), gone.why.to_string())
    };
    if dry_run {
        let listing = store.read_listing()?;
        let gone = listing.ended_leases().into_iter().filter(is_meant);
        outcomes.extend(gone.map(|gone| outcome("would reclaim", &gone).with_remedy(COLLECT)));
        for LeaseStatus { lease, liveness, .. } in listing.lease_statuses() {
            if let Some(why) = doubt_reason(liveness).filter(|_| selection.has_attachment(network, &lease.id)) {
                outcomes.push(outcome_in_doubt(network, &lease.id, lease.to_string(), why));
            }
        }
        return Ok(());
    }
    let Some(mut leases) = store.lock_leases()? else { return Ok(()) };
    let mut failures = Failures::new();
    let reclaim = |name: &str, mut gone: Vec<ReclaimedLease>| {
        gone.retain(is_meant);
        reclaim::remove_lease_owners(name, gone, None, &mut failures)
    };
    let gone: Vec<_> = leases.reclaim_ended(reclaim)?;
    outcomes.extend(gone.iter().map(|gone| outcome("reclaimed", gone)));
    if let Err(error) = failures.into_result() {
        let object = format!("leases of network {network}");
        outcomes.push(ActionOutcome::log_failure(network, object, &error));
    }
    Ok(())
}

/// Removes, or with `dry_run` lists, the remains of a dead attachment.
fn remove_remains(
    record: &AttachmentRecord,
    selection: &AttachmentSelection<'_>,
    dry_run: bool,
) -> Result<Option<ActionOutcome>> {
    let AttachmentRecord { id, ifname, network, .. } = record;
    let object = format!("state of container {id}, interface {ifname}");
    let liveness = record.liveness();
    Ok(match selection.deletion_reason(network, id, liveness) {
        Some(why) if dry_run => Some(ActionOutcome::new("would remove", network, object, why).with_remedy(COLLECT)),
        Some(why) => {
            if !reclaim::remove_if_ended(record)? {
                let _turn = AttachmentRecord::lock_attachment(record.attachment_id())?;
                reclaim::remove_attachment_state(record.attachment_id(), &record.ips)?;
            }
            Some(ActionOutcome::new("removed", network, object, why))
        }
        None if dry_run && selection.has_attachment(network, id) => {
            doubt_reason(liveness).map(|why| outcome_in_doubt(network, id, object, why))
        }
        None => None,
    })
}
