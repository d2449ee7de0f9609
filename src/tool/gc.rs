//! `cnibox gc`: deletes the attachments of dead containers, without a runtime.

use std::collections::HashSet;
use std::path::Path;
use std::process::ExitCode;

use super::folders::{CACHE, CONF, Folders, LEASES, PLUGIN_PATH, Store};
use super::life::Selection;
use super::{NOT_FOUND, Tool, ipam, print};
use crate::attachment::{Doubt, Liveness, Owner, Record};
use crate::cni::{ContainerId, NetworkName};
use crate::error::{Error, Result};
use crate::leases::{DATA_DIR, Listing};
use crate::log;
use crate::options::{CommandLine, Opt, no_words, opt};
use crate::runtime::{Attach, CachedAttachment, NetworkList, Runtime};
use crate::skel::{Table, reclaim};

pub(super) const TOOL: Tool = Tool {
    command: "cnibox gc",
    usage: "\
gc: deletes the attachments of dead containers

Usage:
  cnibox gc [--network NAME] [--container ID] [--dry-run]

Each attachment whose container has certainly ended gets a DEL: with the configuration and the arguments of its ADD
if it is in the runtimes' cache, else with the current configuration of the network. Then the leases of host-local,
rules and devices of networks without a configuration are deleted. What is not proved to have ended is not touched,
unless it is named; --dry-run lists it with the reason.
",
    options: &[
        Opt {
            short: Some('n'),
            ..opt("--dry-run", "", "print the attachments, also those in doubt, and change nothing")
        },
        opt("--network", "NAME", "this network only"),
        opt(
            "--container",
            "ID",
            "this container only, also if nothing proves that it has ended; not if it is alive",
        ),
        CONF,
        PLUGIN_PATH,
        CACHE,
        LEASES,
    ],
    notes: "
Exit status: 0 done; 1 a DEL failed, see stderr; 2 wrong usage; 3 no such network or container.
",
};

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
    doubtful: Vec<String>,
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
            let what = format!("container {container_id}, interface {ifname}: {why}");
            found.doubtful.push(format!("in doubt: {what} (network {network})\n"));
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
        let listing = Listing::open_existing(&store.data_dir, &store.network)?;
        for status in listing.iter().flat_map(Listing::statuses) {
            if let Some(ifname) = &status.lease.ifname {
                add(&store.network, &status.lease.id, ifname, status.liveness);
            }
        }
    }
    Ok(found)
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
    let missing = |what| Err(Error::new(NOT_FOUND, what));
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
        line.last("--network").map_or(Ok(()), |name| NetworkName::parse(name).map(drop))?;
        line.last("--container").map_or(Ok(()), |id| ContainerId::parse(id).map(drop))?;
        Ok(line)
    };
    TOOL.run(args, read, |line| run(&line, table))
}

fn run(line: &CommandLine, table: Table) -> Result<ExitCode> {
    let folders = Folders::read(line);
    let runtime = folders.runtime(table);
    let selection =
        Selection { network: line.last("--network"), container: line.last("--container") };
    let dry_run = line.has("--dry-run");
    let found = find(&folders, &runtime, &selection)?;
    require_known(&folders, &found, &selection)?;
    let mut lines = Vec::new();
    let mut status = ExitCode::SUCCESS;
    for Ended { list, attach, why } in found.ended {
        let Attach { container_id, ifname, .. } = &attach;
        let what =
            format!("container {container_id}, interface {ifname}: {why} (network {})", list.name);
        if dry_run {
            lines.push(format!("would detach {what}\n"));
            continue;
        }
        // A runtime may have attached the container again, with the same id.
        let owner = Owner { network: &list.name, ifname, id: container_id };
        let liveness = liveness(&folders.stores(Some(&list.name))?, owner);
        if selection.end(&list.name, container_id, liveness).is_none() {
            continue;
        }
        match runtime.del(&list, &attach) {
            Ok(()) => lines.push(format!("detached {what}\n")),
            Err(error) => {
                log::warn(format_args!("detach {what}: {error}"));
                status = ExitCode::FAILURE;
            }
        }
    }
    // State of networks that have no configuration.
    lines.push(ipam::gc_all(&folders.stores(selection.network)?, &selection, false, dry_run)?);
    if dry_run {
        lines.extend(found.doubtful);
    }
    let text = lines.concat();
    let nothing = "no dead attachment was found\n";
    print(if text.is_empty() { nothing } else { &text })?;
    Ok(status)
}
