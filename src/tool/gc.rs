//! `cnibox gc`: deletes the attachments of dead containers, without a runtime.

use std::collections::HashSet;
use std::path::PathBuf;
use std::process::ExitCode;

use super::in_process::InProcess;
use super::{CONF_DIR, Tool, ipam, plugin_path, print};
use crate::attachment::{Gone, Liveness, Owner, Record};
use crate::cni::NetworkName;
use crate::error::Result;
use crate::invoke::split_path;
use crate::leases::{self, DATA_DIR, Listing, Reclaimed};
use crate::log;
use crate::options::{CommandLine, Opt, no_words, opt};
use crate::runtime::{
    Attach, CachedAttachment, DEFAULT_CACHE_DIR, NetworkList, OnDelError, Runtime,
};
use crate::skel::{Table, reclaim};

pub(super) const CONF: Opt =
    opt("--net-conf-path", "DIR", "directory of network configurations [/etc/cni/net.d]");
pub(super) const PLUGIN_PATH: Opt =
    opt("--plugin-path", "DIRS", "directories of plugins [CNI_PATH, /opt/cni/bin]");
pub(super) const CACHE: Opt =
    opt("--cache-dir", "DIR", "parent of the cache, DIR/results [/var/lib/cni]");
pub(super) const LEASES: Opt =
    opt("--data-dir", "DIR", "leases of host-local [/var/lib/cni/networks]");

pub(super) const TOOL: Tool = Tool {
    command: "cnibox gc",
    usage: "\
gc: deletes the attachments of dead containers

Usage:
  cnibox gc [--network NAME] [--dry-run]

Each attachment whose container is certainly dead gets a DEL: with the configuration and the arguments of its ADD
if it is in the runtimes' cache, else with the current configuration of the network. Then the leases of host-local,
rules and devices of networks without a configuration are deleted. What is not proved to have ended is not touched;
--dry-run lists it with the reason.
",
    options: &[
        Opt { short: Some('n'), ..opt("--dry-run", "", "print the attachments, and change nothing") },
        opt("--network", "NAME", "this network only"),
        CONF,
        PLUGIN_PATH,
        CACHE,
        LEASES,
    ],
    notes: "
Exit status: 0 done; 1 a DEL failed, see stderr; 2 wrong usage.
",
};

/// The directories of plugins, configurations and state.
pub(super) struct Folders {
    pub(super) conf: PathBuf,
    pub(super) cache: PathBuf,
    pub(super) leases: PathBuf,
    /// Directories of plugins, separated by colons.
    pub(super) cni_path: String,
}

impl Folders {
    /// Reads the options that tools have in common.
    pub(super) fn read(line: &CommandLine) -> Folders {
        let folder =
            |flag: Opt, default: &str| PathBuf::from(line.last(flag.flag).unwrap_or(default));
        Folders {
            conf: folder(CONF, CONF_DIR),
            cache: folder(CACHE, DEFAULT_CACHE_DIR),
            leases: folder(LEASES, DATA_DIR),
            cni_path: plugin_path(line.last(PLUGIN_PATH.flag)),
        }
    }

    /// A runtime on the cache of the node's runtimes, which runs own plugins in this process.
    pub(super) fn runtime(&self, table: Table) -> Runtime {
        Runtime {
            cache_dir: self.cache.clone(),
            on_del_error: OnDelError::Continue,
            executor: Box::new(InProcess { table }),
            ..Runtime::new(split_path(&self.cni_path))
        }
    }

    /// Whether the container of a cached attachment may be alive.
    pub(super) fn liveness(&self, cached: &CachedAttachment) -> Liveness {
        let CachedAttachment { network, attach, .. } = cached;
        let owner = Owner { network, ifname: &attach.ifname, id: &attach.container_id };
        reclaim::liveness(owner, &self.leases)
    }

    /// The attachments of dead containers whose network is known: from the cache, else from records and leases, with the
    /// current configuration of the network.
    fn dead(
        &self,
        runtime: &Runtime,
        network: Option<&str>,
    ) -> Result<Vec<(NetworkList, Attach, Gone)>> {
        let is_meant = |name: &str| network.is_none_or(|network| network == name);
        let mut known = HashSet::new();
        let mut dead = Vec::new();
        for cached in runtime.cached_attachments("")? {
            let CachedAttachment { network, attach, .. } = &cached;
            known.insert((network.clone(), attach.container_id.clone(), attach.ifname.clone()));
            let Liveness::Gone(why) = self.liveness(&cached) else { continue };
            if let (true, Some(list)) = (is_meant(network), cached.list()) {
                // The path may belong to another container meanwhile.
                dead.push((list, Attach { netns: String::new(), ..cached.attach }, why));
            }
        }
        let mut add = |network: &str, id: &str, ifname: &str, why| {
            if is_meant(network)
                && known.insert((network.to_owned(), id.to_owned(), ifname.to_owned()))
                && let Ok(list) = NetworkList::load(&self.conf, network)
            {
                dead.push((list, Attach::new(id, "", ifname), why));
            }
        };
        for record in Record::all(network) {
            if let Liveness::Gone(why) = record.liveness() {
                add(&record.network, &record.id, &record.ifname, why);
            }
        }
        for network in leases::networks(&self.leases)? {
            let listing = Listing::open_existing(&self.leases, &network)?;
            for Reclaimed { lease, why } in listing.iter().flat_map(Listing::gone) {
                if let Some(ifname) = &lease.ifname {
                    add(&network, &lease.id, ifname, why);
                }
            }
        }
        Ok(dead)
    }
}

/// Runs `cnibox gc` with the arguments that follow.
pub(super) fn main(args: Vec<String>, table: Table) -> ExitCode {
    let read = |line: CommandLine| {
        no_words(&line)?;
        line.last("--network").map_or(Ok(()), |name| NetworkName::parse(name).map(drop))?;
        Ok(line)
    };
    TOOL.run(args, read, |line| run(&line, table))
}

fn run(line: &CommandLine, table: Table) -> Result<ExitCode> {
    let folders = Folders::read(line);
    let runtime = folders.runtime(table);
    let (network, dry_run) = (line.last("--network"), line.has("--dry-run"));
    let mut lines = Vec::new();
    let mut status = ExitCode::SUCCESS;
    for (list, attach, why) in folders.dead(&runtime, network)? {
        let Attach { container_id, ifname, .. } = &attach;
        let what =
            format!("container {container_id}, interface {ifname}: {why} (network {})", list.name);
        if dry_run {
            lines.push(format!("would detach {what}\n"));
            continue;
        }
        // A runtime may have attached the container again, with the same id.
        let owner = Owner { network: &list.name, ifname, id: container_id };
        if !matches!(reclaim::liveness(owner, &folders.leases), Liveness::Gone(_)) {
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
    lines.push(ipam::gc_all(&folders.leases, network, false, dry_run)?);
    let text = lines.concat();
    let nothing = "no dead attachment was found\n";
    print(if text.is_empty() { nothing } else { &text })?;
    Ok(status)
}
