//! `cnibox gc`: deletes the attachments of dead containers, without a runtime.

mod lost_devices;
mod port_owners;
mod remains;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use super::directories::{
    CACHE, CONF, LEASES, LeaseDirectory, PLUGIN_PATH, ToolDirectories, named_lease_directories,
};
use super::in_process::InProcessExecutor;
use super::life::{AttachmentSelection, doubt_reason};
use super::outcome::{ActionOutcome, IN_DOUBT, LEFT_ALONE, report_outcomes};
use super::snapshot::NodeSnapshot;
use super::{DRY_RUN, JSON, NETWORK, ToolCommand, print_text};
use crate::attachment::{AttachmentId, AttachmentRecord, Liveness, UnknownBecause};
use crate::framework::{AppletTable, AttachmentTurn, Failures, reclaim};
use crate::leases::{DATA_DIR, LeaseStatus, ReclaimedLease};
use crate::netfilter::PacketFilter;
use crate::netfilter::ports::{self, PortOwner};
use crate::options::{CommandLine, CommandOption, long_option, require_no_words};
use cni::error::{Error, Result};
use cni::exec::PluginExecutor;
use cni::runtime::{AttachmentParams, CachedAttachment, NetworkList, PluginConfig, Runtime};
use cni::sort::sort_items;
use cni::{ContainerId, NetworkName};

pub(super) const TOOL: ToolCommand = ToolCommand {
    command: "cnibox gc",
    usage: "\
gc: deletes the attachments of dead containers

Usage:
  cnibox gc [--network NAME] [--container ID] [--dry-run] [--json]

The leases of host-local, rules and devices of each attachment whose container has certainly ended \
            are deleted. Then
it gets a DEL: with the configuration and the arguments of its ADD if it is in the runtimes' \
            cache, else with the
current configuration of the network. So are rules that lead a port of the host to a container \
            which is gone, also of
other programs. An attachment that is not proved to have ended stays, unless --container names it; \
            --dry-run lists it
with the reason and the command.

\"cnitool gc\" is the GC of a runtime instead: it deletes every attachment of one network that is \
            not in a list, even if
its container is alive.
",
    options: &[
        CommandOption {
            about: "print the attachments, also those in doubt, and change nothing",
            ..DRY_RUN
        },
        NETWORK,
        long_option(
            "--container",
            "ID",
            "this container only, also if nothing proves that it has ended; not if it is alive",
        ),
        CommandOption {
            about: "print an array of objects with action, object, network, problem and remedy",
            ..JSON
        },
        CONF,
        PLUGIN_PATH,
        CACHE,
        LEASES,
    ],
    notes: "
Exit status: 0 done; 1 something failed, or nothing of --container was deleted, see stderr, or \
            with --dry-run something
would be deleted; 2 wrong usage.
",
};

/// The remedy for what `--dry-run` lists.
const COLLECT: &str = "cnibox gc";

/// An attachment that can be ended, with the reason.
struct EndedAttachment {
    network: String,
    attach: AttachmentParams,
    /// The network at ADD, else its current configuration, if either is known.
    list: Option<NetworkList>,
    why: String,
}

impl EndedAttachment {
    fn attachment_id(&self) -> AttachmentId<'_> {
        let AttachmentParams { container_id: id, ifname, .. } = &self.attach;
        AttachmentId { network: &self.network, ifname, id }
    }

    /// Whether it is `lo` alone, which has no record and ends with its namespace.
    fn is_loopback(&self) -> bool {
        let plugins = self.list.as_ref().map(|list| &list.plugins);
        plugins.is_some_and(|all| all.iter().all(|plugin| plugin.plugin_type == "loopback"))
    }

    /// The attachment in messages.
    fn object(&self) -> String {
        let AttachmentParams { container_id, ifname, .. } = &self.attach;
        format!("container {container_id}, interface {ifname}")
    }
}

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

/// Runs `cnibox gc` with the arguments that follow.
pub(super) fn main(args: Vec<String>, table: AppletTable) -> ExitCode {
    TOOL.run_command(
        args,
        |line| {
            require_no_words(&line)?;
            line.last_value(NETWORK.flag)
                .map_or(Ok(()), |name| NetworkName::parse(name).map(drop))?;
            line.last_value("--container").map_or(Ok(()), |id| ContainerId::parse(id).map(drop))?;
            Ok(line)
        },
        |line| run_gc(&line, table),
    )
}

fn run_gc(line: &CommandLine, table: AppletTable) -> Result<ExitCode> {
    let selection = AttachmentSelection {
        network: line.last_value(NETWORK.flag),
        container: line.last_value("--container"),
    };
    let dry_run = line.has_option(DRY_RUN.flag);
    let directories = ToolDirectories::from_command_line(line);
    let outcomes = collect_garbage(&directories, table, selection, dry_run)?;
    if let Some(id) = selection.container.filter(|_| outcomes.is_empty()) {
        let msg = format!(
            "nothing of container \"{id}\" can be deleted: it is alive, or has just changed"
        );
        return Err(Error::config(msg).with_details("delete the container"));
    }
    let json = line.has_option(JSON.flag);
    let status = report_outcomes(&outcomes, json, dry_run, "no dead attachment was found")?;
    if !json && !dry_run && selection.container.is_none() {
        // Nothing may be left of the network.
        let left = collect_garbage(
            &directories,
            table,
            AttachmentSelection { network: None, ..selection },
            true,
        )?;
        // Cache, lease, record and rules of an attachment have one remedy.
        let left = left.iter().filter(|outcome| {
            outcome.action == IN_DOUBT && selection.has_network(&outcome.network)
        });
        let left: HashSet<&str> = left.map(|outcome| outcome.remedy.as_str()).collect();
        if !left.is_empty() {
            let count = left.len();
            let options = &directories.given;
            print_text(&format!(
                "{count} in doubt: {COLLECT} --dry-run{options} lists them with the command for \
                 each\n"
            ))?;
        }
    }
    Ok(status)
}

/// Deletes, or with `dry_run` lists, the attachments of the selection that have ended.
pub(super) fn collect_garbage(
    directories: &ToolDirectories,
    table: AppletTable,
    selection: AttachmentSelection<'_>,
    dry_run: bool,
) -> Result<Vec<ActionOutcome>> {
    let runtime = directories.new_runtime(table);
    let stores = directories.find_lease_directories(selection.network)?;
    // Before anything is judged.
    let with_files: Vec<PathBuf> =
        stores.iter().map(LeaseDirectory::path).chain([runtime.results_dir()]).collect();
    let before = NodeSnapshot::take(&with_files);
    let packets = PacketFilter::new();
    let port_owners = ports::list_port_owners(&packets)?;
    let collector = GarbageCollector {
        directories,
        table,
        runtime,
        selection,
        stores,
        before,
        packets,
        port_owners,
    };
    let found = collector.find_ended()?;
    collector.require_known(&found)?;
    let mut outcomes = Vec::new();
    for ended in &found.ended {
        if dry_run {
            outcomes.extend(collector.list_ended(ended)?);
        } else {
            outcomes.extend(collector.end_attachment(ended));
        }
    }
    for store in &collector.stores {
        collector.reclaim_leases(store, dry_run, &mut outcomes)?;
    }
    for record in AttachmentRecord::read_all(collector.selection.network) {
        outcomes.extend(collector.remove_remains(&record, dry_run));
    }
    collector.collect_port_owners(dry_run, &mut outcomes)?;
    collector.return_lost_devices(dry_run, &mut outcomes)?;
    collector.remove_empty_files(dry_run, &mut outcomes)?;
    if dry_run {
        outcomes.extend(found.doubtful);
    }
    Ok(outcomes)
}

struct GarbageCollector<'a> {
    directories: &'a ToolDirectories,
    table: AppletTable,
    runtime: Runtime,
    selection: AttachmentSelection<'a>,
    /// The directories of leases of the selection.
    stores: Vec<LeaseDirectory>,
    before: NodeSnapshot,
    packets: PacketFilter,
    /// The owners of host ports, before anything is judged.
    port_owners: Vec<PortOwner>,
}

impl GarbageCollector<'_> {
    /// The attachments of the selection: from the cache, else from records and leases, with the
    /// current configuration of the network.
    fn find_ended(&self) -> Result<FoundAttachments> {
        let (mut found, selection) = (FoundAttachments::default(), &self.selection);
        for (cached, life) in self.directories.cached_attachments(&self.runtime)? {
            let CachedAttachment { network, attach, .. } = &cached;
            let AttachmentParams { container_id, ifname, .. } = attach;
            found.insert_if_new(network, container_id, ifname);
            if let Some(why) = selection.deletion_reason(network, container_id, life.liveness) {
                let (list, network) = (cached.network_list(), network.clone());
                // The path may belong to another container meanwhile.
                let attach = AttachmentParams { netns: String::new(), ..cached.attach };
                found.ended.push(EndedAttachment { network, attach, list, why });
            } else if selection.has_attachment(network, container_id)
                && let Some(why) = life.doubt_reason(&attach.netns)
            {
                let object = format!("container {container_id}, interface {ifname}");
                found.doubtful.push(self.outcome_in_doubt(network, container_id, object, why));
            }
        }
        let mut add = |network: &str, id: &str, ifname: &str, liveness: Liveness| {
            // The first source that has the attachment counts: the cache, then the record, then the
            // lease.
            if found.insert_if_new(network, id, ifname)
                && let Some(why) = selection.deletion_reason(network, id, liveness)
            {
                let list = NetworkList::load(&self.directories.conf, network).ok();
                let (network, attach) = (network.to_owned(), AttachmentParams::new(id, "", ifname));
                found.ended.push(EndedAttachment { network, attach, list, why });
            }
        };
        for record in AttachmentRecord::read_all(selection.network) {
            add(&record.network, &record.id, &record.ifname, record.liveness());
        }
        for store in &self.stores {
            for status in store.read_listing()?.lease_statuses() {
                if let Some(ifname) = &status.lease.ifname {
                    add(&store.network, &status.lease.id, ifname, status.liveness);
                }
            }
        }
        Ok(found)
    }

    /// Fails if the selection names a network or a container that this node does not know.
    fn require_known(&self, found: &FoundAttachments) -> Result<()> {
        let missing = |what| Err(Error::config(what));
        if let Some(name) = self.selection.network
            && !(found.known.iter().any(|(network, ..)| network == name))
            && !(self.port_owners.iter().any(|owner| owner.network == name))
            && !(self.directories.configured_networks().iter().any(|list| list.name == name))
            && self.stores.is_empty()
        {
            return missing(format!("no network \"{name}\" on this node"));
        }
        match self.selection.container {
            Some(id)
                if !found.known.iter().any(|(_, container, _)| container == id)
                    && !self.has_ports(id) =>
            {
                missing(format!("no attachment of container \"{id}\" on this node"))
            }
            _ => Ok(()),
        }
    }

    /// Whether rules lead ports of the host to the container in a network of the selection.
    fn has_ports(&self, id: &str) -> bool {
        self.port_owners
            .iter()
            .any(|owner| owner.id == id && self.selection.has_network(&owner.network))
    }

    /// Lists what [`GarbageCollector::end_attachment`] would do.
    fn list_ended(&self, ended: &EndedAttachment) -> Result<Vec<ActionOutcome>> {
        let outcome =
            |action, object| ActionOutcome::new(action, &ended.network, object, &ended.why);
        let mut outcomes = Vec::new();
        if ended.list.is_some() {
            outcomes.push(outcome("would detach", ended.object()));
        }
        if self.liveness(ended.attachment_id()).is_doubtful() {
            for store in self.stores_of(ended) {
                let mut leases = store.read_listing()?.lease_statuses();
                leases.retain(|status| {
                    status.lease.attachment_in(&store.network) == Some(ended.attachment_id())
                });
                outcomes.extend(
                    leases.iter().map(|status| outcome("would release", status.lease.to_string())),
                );
            }
        }
        Ok(outcomes.into_iter().map(|outcome| outcome.with_remedy(COLLECT)).collect())
    }

    /// Ends an attachment in its turn, if it is still the one that was found: the DEL of its
    /// plugins, and without a proof of its end also its leases and its other state.
    fn end_attachment(&self, ended: &EndedAttachment) -> Vec<ActionOutcome> {
        let failed =
            |error: Error| ActionOutcome::log_failure(&ended.network, ended.object(), &error);
        let (owner, mut outcomes) = (ended.attachment_id(), Vec::new());
        let turn = match AttachmentTurn::take_at_once(owner) {
            Ok(Some(turn)) => turn,
            Ok(None) => return vec![failed(Error::internal("its lock cannot be taken"))],
            Err(busy) if self.selection.container.is_some() => return vec![failed(busy)],
            // Another call is attaching or detaching it.
            Err(busy) => {
                let (network, object) = (&ended.network, ended.object());
                return vec![ActionOutcome::new(LEFT_ALONE, network, object, busy.message())];
            }
        };
        let life = self.liveness(owner);
        let is_same = self.files_of(ended).is_ok_and(|files| self.before.has_same(owner, &files));
        let why = self.selection.deletion_reason(&ended.network, owner.id, life);
        if !is_same || (why.is_none() && !ended.is_loopback()) {
            return outcomes;
        }
        if let Some(list) = &ended.list {
            outcomes.extend(
                self.detach(list, ended, turn.clone())
                    .unwrap_or_else(|e| Some(failed(e.context("detach")))),
            );
        }
        let released =
            if life.is_doubtful() { self.free_named(ended) } else { self.reclaim_elsewhere(ended) };
        outcomes.extend(released.unwrap_or_else(|error| vec![failed(error)]));
        if outcomes.is_empty() && life.is_doubtful() {
            let why = "it has neither a lease nor a record, nor a configuration with a plugin of \
                       this program first";
            outcomes.push(failed(Error::internal(why)));
        }
        outcomes
    }

    /// Sends a DEL to the plugins of the list. A plugin of another program gets none if it is
    /// before all plugins of this one: its ADD of a later container with the same names does
    /// not wait for the turn.
    fn detach(
        &self,
        list: &NetworkList,
        ended: &EndedAttachment,
        turn: AttachmentTurn,
    ) -> Result<Option<ActionOutcome>> {
        let (executor, dirs) =
            (InProcessExecutor::for_collector(self.table, turn), &self.runtime.plugin_dirs);
        // Whether an ADD of the plugin waits for the turn; `None` of one that connects nothing.
        let waits = |plugin: &PluginConfig| {
            let found = executor.find_plugin(&plugin.plugin_type, dirs);
            // A plugin that is missing fails.
            found.map_or(Some(true), |path| match executor.find_own_plugin(&path) {
                Some(own) => own.connects.then_some(true),
                None => Some(false),
            })
        };
        let waits: Vec<Option<bool>> = list.plugins.iter().map(waits).collect();
        let leads = waits.iter().find_map(|waits| *waits).unwrap_or(true) || ended.is_loopback();
        let position = |kind| waits.iter().position(|waits| *waits == Some(kind));
        let (first_own, mut own) = (position(true), list.clone());
        own.plugins.drain(..first_own.unwrap_or(list.plugins.len()));
        let runtime =
            Runtime { executor: Box::new(executor), ..self.directories.new_runtime(self.table) };
        let done = ActionOutcome::new("detached", &ended.network, ended.object(), &ended.why);
        if leads {
            return runtime.del(list, &ended.attach).map(|()| Some(done));
        }
        // The cache keeps the arguments for the DEL or GC of the runtime.
        runtime.del_and_keep_cached(&own, &ended.attach)?;
        let first = position(false).map_or("", |at| &list.plugins[at].plugin_type);
        let (object, network) = (ended.object(), &ended.network);
        warn!(
            "{object} (network {network}): no DEL was sent to \"{first}\", a plugin of another \
             program, which may be attaching it again; it stays in the cache"
        );
        Ok(None)
    }

    /// The directories with leases of the attachment: also those of its own configuration.
    fn stores_of(&self, ended: &EndedAttachment) -> Vec<LeaseDirectory> {
        let mut stores = self.stores.clone();
        stores.extend(ended.list.iter().flat_map(named_lease_directories));
        stores.retain(|store| store.network == ended.network);
        sort_items(&mut stores);
        stores.dedup();
        stores
    }

    /// The possible files of the attachment: in the cache, and its leases.
    fn files_of(&self, ended: &EndedAttachment) -> Result<Vec<PathBuf>> {
        let mut files = Vec::from(self.runtime.cache_paths(&ended.network, &ended.attach)?);
        for store in self.stores.iter().filter(|store| store.network == ended.network) {
            let owner = Some(ended.attachment_id());
            let leases =
                store.read_listing()?.lease_statuses().into_iter().map(|status| status.lease);
            let its = leases.filter(|lease| lease.attachment_in(&store.network) == owner);
            files.extend(its.map(|lease| store.path().join(lease.ip.to_string())));
        }
        Ok(files)
    }

    /// Releases the leases and removes the other state of an attachment in doubt that a person has
    /// named.
    fn free_named(&self, ended: &EndedAttachment) -> Result<Vec<ActionOutcome>> {
        let (owner, mut outcomes) = (ended.attachment_id(), Vec::new());
        let outcome =
            |action, object| ActionOutcome::new(action, &ended.network, object, &ended.why);
        for store in self.stores_of(ended) {
            let Some(mut leases) = store.lock_leases()? else { continue };
            for ip in leases.release_attachment(owner)? {
                outcomes.push(outcome("released", format!("{ip} of {}", ended.object())));
            }
        }
        if let Some(record) = AttachmentRecord::find_by_attachment(owner) {
            reclaim::remove_attachment_state(owner, &record.ips)?;
            outcomes.push(outcome("removed", format!("state of {}", ended.object())));
        }
        Ok(outcomes)
    }

    /// Reclaims the leases of an attachment that has ended in directories that only its own
    /// configuration names.
    fn reclaim_elsewhere(&self, ended: &EndedAttachment) -> Result<Vec<ActionOutcome>> {
        let mut outcomes = Vec::new();
        for store in self.stores_of(ended).iter().filter(|store| !self.stores.contains(store)) {
            let Some(mut leases) = store.lock_leases()? else { continue };
            let is_its = |gone: &ReclaimedLease| {
                gone.lease.attachment_in(&ended.network) == Some(ended.attachment_id())
            };
            let gone = leases.reclaim_ended(|_, gone| gone.into_iter().filter(is_its).collect())?;
            outcomes.extend(
                gone.iter().map(|gone| outcome_of_lease("reclaimed", &ended.network, gone)),
            );
        }
        Ok(outcomes)
    }

    /// Whether an attachment exists, by its record, else by its leases.
    fn liveness(&self, owner: AttachmentId<'_>) -> Liveness {
        let dirs = self
            .stores
            .iter()
            .filter(|store| store.network == owner.network)
            .map(|store| &*store.data_dir);
        let mut lives =
            dirs.chain([Path::new(DATA_DIR)]).map(|dir| reclaim::attachment_liveness(owner, dir));
        let unknown = Liveness::Unknown(UnknownBecause::NoRecord);
        lives.find(|life| *life != unknown).unwrap_or(unknown)
    }

    /// Reclaims, or with `dry_run` lists, the leases of dead attachments.
    fn reclaim_leases(
        &self,
        store: &LeaseDirectory,
        dry_run: bool,
        outcomes: &mut Vec<ActionOutcome>,
    ) -> Result<()> {
        let (network, selection) = (&store.network, &self.selection);
        let is_meant = |gone: &ReclaimedLease| selection.has_attachment(network, &gone.lease.id);
        if dry_run {
            let listing = store.read_listing()?;
            let gone = listing.ended_leases().into_iter().filter(is_meant);
            outcomes.extend(gone.map(|gone| {
                outcome_of_lease("would reclaim", network, &gone).with_remedy(COLLECT)
            }));
            for LeaseStatus { lease, liveness, .. } in listing.lease_statuses() {
                // What a person names is listed as released.
                let is_left =
                    selection.container.is_none() && selection.has_attachment(network, &lease.id);
                if let Some(why) = doubt_reason(liveness).filter(|_| is_left) {
                    outcomes.push(self.outcome_in_doubt(
                        network,
                        &lease.id,
                        lease.to_string(),
                        why,
                    ));
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
        outcomes.extend(gone.iter().map(|gone| outcome_of_lease("reclaimed", network, gone)));
        if let Err(error) = failures.into_result() {
            let object = format!("leases of network {network}");
            outcomes.push(ActionOutcome::log_failure(network, object, &error));
        }
        Ok(())
    }

    /// The outcome for an attachment that stays because nothing proves its end; a person may know
    /// that it has ended.
    fn outcome_in_doubt(
        &self,
        network: &str,
        id: &str,
        object: String,
        why: String,
    ) -> ActionOutcome {
        ActionOutcome::new(IN_DOUBT, network, object, why)
            .with_remedy(self.directories.doubt_remedy(network, id))
    }
}

/// The outcome for a lease whose attachment has ended.
fn outcome_of_lease(action: &'static str, network: &str, gone: &ReclaimedLease) -> ActionOutcome {
    ActionOutcome::new(action, network, gone.lease.to_string(), gone.why.to_string())
}
