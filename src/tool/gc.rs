//! `cnibox gc`: deletes the attachments of dead containers, without a runtime.

use std::collections::HashSet;
use std::path::Path;
use std::process::ExitCode;

use super::folders::{CACHE, CONF, Folders, LEASES, PLUGIN_PATH, Store};
use super::life::{Selection, doubt};
use super::outcome::{IN_DOUBT, Outcome, report};
use super::{DRY_RUN, JSON, NETWORK, Tool};
use crate::attachment::{Doubt, Liveness, Owner, Record};
use crate::cni::{ContainerId, NetworkName};
use crate::error::{Error, Result};
use crate::leases::{DATA_DIR, LeaseStatus, Reclaimed};
use crate::options::{CommandLine, Opt, no_words, opt};
use crate::runtime::{Attach, CachedAttachment, NetworkList, Runtime};
use crate::skel::{Failures, Table, reclaim};

pub(super) const TOOL: Tool = Tool {
    command: "cnibox gc",
    usage: "\
gc: deletes the attachments of dead containers

Usage:
  cnibox gc [--network NAME] [--container ID] [--dry-run] [--json]

The leases of host-local, rules and devices of each attachment whose container has certainly ended are deleted. Then
it gets a DEL: with the configuration and the arguments of its ADD if it is in the runtimes' cache, else with the
current configuration of the network. What is not proved to have ended is not touched,
unless it is named; --dry-run lists it with the reason.

\"cnitool gc\" is the runtime's GC instead: of one network, it removes what is not in a list, also if it is alive.
",
    options: &[
        Opt { about: "print the attachments, also those in doubt, and change nothing", ..DRY_RUN },
        NETWORK,
        opt(
            "--container",
            "ID",
            "this container only, also if nothing proves that it has ended; not if it is alive",
        ),
        Opt { about: "print an array of objects with action, object, network, problem and remedy", ..JSON },
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
struct Ended {
    list: NetworkList,
    attach: Attach,
    why: String,
}

/// The attachments that were found.
#[derive(Default)]
struct Found {
    known: HashSet<(String, String, String)>,
    ended: Vec<Ended>,
    /// Attachments that stay, with the reason.
    doubtful: Vec<Outcome>,
}

impl Found {
    /// Whether the attachment was not known before.
    fn is_new(&mut self, network: &str, id: &str, ifname: &str) -> bool {
        self.known.insert((network.to_owned(), id.to_owned(), ifname.to_owned()))
    }
}

/// The attachments of the selection whose network is known: from the cache, else from records and leases, with the
/// current configuration of the network.
fn find(folders: &Folders, runtime: &Runtime, selection: &Selection<'_>) -> Result<Found> {
    let mut found = Found::default();
    for (cached, life) in folders.attachments(runtime)? {
        let CachedAttachment { network, attach, .. } = &cached;
        let Attach { container_id, ifname, .. } = attach;
        found.is_new(network, container_id, ifname);
        if let Some(why) = selection.end(network, container_id, life.liveness) {
            if let Some(list) = cached.list() {
                // The path may belong to another container meanwhile.
                let attach = Attach { netns: String::new(), ..cached.attach };
                found.ended.push(Ended { list, attach, why });
            }
        } else if selection.has(network, container_id)
            && let Some(why) = life.doubt(&attach.netns)
        {
            let object = format!("container {container_id}, interface {ifname}");
            found.doubtful.push(in_doubt(network, container_id, object, why));
        }
    }
    let mut add = |network: &str, id: &str, ifname: &str, liveness: Liveness| {
        // What was found first counts: the cache, then the record, then the lease.
        if found.is_new(network, id, ifname)
            && let Some(why) = selection.end(network, id, liveness)
            && let Ok(list) = NetworkList::load(&folders.conf, network)
        {
            found.ended.push(Ended { list, attach: Attach::new(id, "", ifname), why });
        }
    };
    for record in Record::all(selection.network) {
        add(&record.network, &record.id, &record.ifname, record.liveness());
    }
    for store in folders.stores(selection.network)? {
        for status in store.listing()?.statuses() {
            if let Some(ifname) = &status.lease.ifname {
                add(&store.network, &status.lease.id, ifname, status.liveness);
            }
        }
    }
    Ok(found)
}

/// What stays because nothing proves its end, which a person may know.
fn in_doubt(network: &str, id: &str, object: String, why: String) -> Outcome {
    let remedy = format!("{COLLECT} --network {network} --container {id}, if it has ended");
    Outcome::new(IN_DOUBT, network, object, why).with_remedy(remedy)
}

/// Whether an attachment exists, by its record, else by its leases.
fn liveness(stores: &[Store], owner: Owner<'_>) -> Liveness {
    let dirs = stores.iter().map(|store| store.data_dir.as_path()).chain([Path::new(DATA_DIR)]);
    let mut lives = dirs.map(|dir| reclaim::liveness(owner, dir));
    let unknown = Liveness::Unknown(Doubt::NoRecord);
    lives.find(|life| *life != unknown).unwrap_or(unknown)
}

/// Fails if the selection names a network or a container that this node does not know.
fn require_known(folders: &Folders, found: &Found, selection: &Selection<'_>) -> Result<()> {
    let missing = |what| Err(Error::config(what));
    if let Some(name) = selection.network {
        let is_configured = || folders.networks().iter().any(|list| list.name == name);
        let is_cached = || found.known.iter().any(|(network, ..)| network == name);
        if !is_cached() && !is_configured() && folders.stores(Some(name))?.is_empty() {
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
pub(super) fn main(args: Vec<String>, table: Table) -> ExitCode {
    let read = |line: CommandLine| {
        no_words(&line)?;
        line.last(NETWORK.flag).map_or(Ok(()), |name| NetworkName::parse(name).map(drop))?;
        line.last("--container").map_or(Ok(()), |id| ContainerId::parse(id).map(drop))?;
        Ok(line)
    };
    TOOL.run(args, read, |line| run(&line, table))
}

fn run(line: &CommandLine, table: Table) -> Result<ExitCode> {
    let selection =
        Selection { network: line.last(NETWORK.flag), container: line.last("--container") };
    let dry_run = line.has(DRY_RUN.flag);
    let outcomes = collect(&Folders::read(line), table, &selection, dry_run)?;
    report(&outcomes, line.has(JSON.flag), dry_run, "no dead attachment was found")
}

/// Deletes, or with `dry_run` lists, the attachments of the selection that have ended.
pub(super) fn collect(
    folders: &Folders,
    table: Table,
    selection: &Selection<'_>,
    dry_run: bool,
) -> Result<Vec<Outcome>> {
    let runtime = folders.runtime(table);
    let found = find(folders, &runtime, selection)?;
    require_known(folders, &found, selection)?;
    // Reclaimed under the locks of the leases and records, because a runtime may attach a container again with the
    // same id; a DEL has no such lock.
    let mut reclaimed = Vec::new();
    for store in folders.stores(selection.network)? {
        leases(&store, selection, dry_run, &mut reclaimed)?;
    }
    for record in Record::all(selection.network) {
        reclaimed.extend(remains(&record, selection, dry_run)?);
    }
    let mut outcomes = Vec::new();
    for Ended { list, attach, why } in found.ended {
        let Attach { container_id, ifname, .. } = &attach;
        let network = &list.name;
        let object = format!("container {container_id}, interface {ifname}");
        if dry_run {
            let outcome = Outcome::new("would detach", network, object, why);
            outcomes.push(outcome.with_remedy(COLLECT));
            continue;
        }
        let owner = Owner { network, ifname, id: container_id };
        let liveness = liveness(&folders.stores(Some(network))?, owner);
        let is_reclaimed = liveness == Liveness::Unknown(Doubt::NoRecord);
        if !is_reclaimed && selection.end(network, container_id, liveness).is_none() {
            continue;
        }
        outcomes.push(match runtime.del(&list, &attach) {
            Ok(()) => Outcome::new("detached", network, object, why),
            Err(error) => Outcome::failed(network, object, &error.context("detach")),
        });
    }
    outcomes.extend(reclaimed);
    if dry_run {
        outcomes.extend(found.doubtful);
    }
    Ok(outcomes)
}

/// Reclaims, or with `dry_run` lists, the leases of dead attachments.
fn leases(
    store: &Store,
    selection: &Selection<'_>,
    dry_run: bool,
    outcomes: &mut Vec<Outcome>,
) -> Result<()> {
    let network = &store.network;
    let is_meant = |gone: &Reclaimed| selection.has(network, &gone.lease.id);
    let outcome = |action, gone: &Reclaimed| {
        Outcome::new(action, network, gone.lease.to_string(), gone.why.to_string())
    };
    if dry_run {
        let listing = store.listing()?;
        let gone = listing.gone().into_iter().filter(is_meant);
        outcomes.extend(gone.map(|gone| outcome("would reclaim", &gone).with_remedy(COLLECT)));
        for LeaseStatus { lease, liveness, .. } in listing.statuses() {
            if let Some(why) = doubt(liveness).filter(|_| selection.has(network, &lease.id)) {
                outcomes.push(in_doubt(network, &lease.id, lease.to_string(), why));
            }
        }
        return Ok(());
    }
    let Some(mut leases) = store.lock()? else { return Ok(()) };
    let mut failures = Failures::new();
    let reclaim = |name: &str, mut gone: Vec<Reclaimed>| {
        gone.retain(is_meant);
        reclaim::leases(name, gone, None, &mut failures)
    };
    let gone: Vec<_> = leases.reclaim_dead(reclaim)?;
    outcomes.extend(gone.iter().map(|gone| outcome("reclaimed", gone)));
    if let Err(error) = failures.into_result() {
        outcomes.push(Outcome::failed(network, format!("leases of network {network}"), &error));
    }
    Ok(())
}

/// Removes, or with `dry_run` lists, what a dead attachment left.
fn remains(record: &Record, selection: &Selection<'_>, dry_run: bool) -> Result<Option<Outcome>> {
    let Record { id, ifname, network, .. } = record;
    let object = format!("state of container {id}, interface {ifname}");
    let liveness = record.liveness();
    Ok(match selection.end(network, id, liveness) {
        Some(why) if dry_run => {
            Some(Outcome::new("would remove", network, object, why).with_remedy(COLLECT))
        }
        Some(why) => {
            if !reclaim::if_gone(record)? {
                let _turn = Record::turn(record.owner())?;
                reclaim::attachment(record.owner(), &record.ips)?;
            }
            Some(Outcome::new("removed", network, object, why))
        }
        None if dry_run && selection.has(network, id) => {
            doubt(liveness).map(|why| in_doubt(network, id, object, why))
        }
        None => None,
    })
}
