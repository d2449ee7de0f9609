//! `cnibox gc`: takes back what containers left that are gone, without a runtime.

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
    opt("--net-conf-path", "DIR", "network configurations [/etc/cni/net.d]");
pub(super) const PLUGIN_PATH: Opt =
    opt("--plugin-path", "DIRS", "where plugins are [CNI_PATH, /opt/cni/bin]");
pub(super) const CACHE: Opt =
    opt("--cache-dir", "DIR", "results are cached in DIR/results [/var/lib/cni]");
pub(super) const LEASES: Opt =
    opt("--data-dir", "DIR", "leases of host-local [/var/lib/cni/networks]");

pub(super) const TOOL: Tool = Tool {
    command: "cnibox gc",
    usage: "\
gc: takes back what containers left that are gone

Usage:
  cnibox gc [--network NAME] [--dry-run]

Each attachment whose container is certainly gone gets a DEL: with the configuration and the arguments of its ADD
if it is in the runtimes' cache, else with the network's configuration of today. Then go the leases of host-local, and
the rules and devices, of networks that are no more. Of containers that may live nothing is touched.
",
    options: &[
        Opt {
            short: Some('n'),
            ..opt("--dry-run", "", "print what would be taken back, and change nothing")
        },
        opt("--network", "NAME", "this network only"),
        CONF,
        PLUGIN_PATH,
        CACHE,
        LEASES,
    ],
    notes: "
Exit status: 0 done; 1 something could not be taken back, see stderr; 2 wrong usage.
",
};

struct Job {
    network: Option<String>,
    dry_run: bool,
    folders: Folders,
}

/// An attachment whose container is gone.
struct Dead {
    list: NetworkList,
    attach: Attach,
    why: Gone,
}

/// Network, container and interface.
type Triple = (String, String, String);

/// Where things are.
pub(super) struct Folders {
    pub(super) conf: PathBuf,
    pub(super) cache: PathBuf,
    pub(super) leases: PathBuf,
    /// Folders of plugins, separated by colons.
    pub(super) cni_path: String,
}

/// `cnibox gc` with the arguments behind it.
pub(super) fn main(args: Vec<String>, table: Table) -> ExitCode {
    TOOL.run(args, |line| Job::read(&line), |job| job.run(table))
}

impl Folders {
    /// As the options say that all tools have in common.
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

    /// A runtime that knows the attachments of the others, and runs our plugins in this process.
    pub(super) fn runtime(&self, table: Table) -> Runtime {
        Runtime {
            cache_dir: self.cache.clone(),
            on_del_error: OnDelError::Continue,
            executor: Box::new(InProcess { table }),
            ..Runtime::new(split_path(&self.cni_path))
        }
    }

    /// The attachments that are certainly gone by what was noted of them, and by their leases.
    fn gone(&self) -> Result<Vec<(Triple, Gone)>> {
        let mut gone = Vec::new();
        for record in Record::all(None) {
            if let Liveness::Gone(why) = record.liveness() {
                gone.push(((record.network, record.id, record.ifname), why));
            }
        }
        for network in leases::networks(&self.leases)? {
            let listing = Listing::open_existing(&self.leases, &network)?;
            for Reclaimed { lease, why } in
                listing.map(|listing| listing.gone()).unwrap_or_default()
            {
                if let Some(ifname) = lease.ifname {
                    gone.push(((network.clone(), lease.id, ifname), why));
                }
            }
        }
        Ok(gone)
    }

    /// Whether the container of a cached attachment can be alive.
    pub(super) fn liveness(&self, cached: &CachedAttachment) -> Liveness {
        let CachedAttachment { network, attach, .. } = cached;
        let owner = Owner { network, ifname: &attach.ifname, id: &attach.container_id };
        reclaim::liveness(owner, &attach.netns, &self.leases)
    }
}

impl Job {
    fn read(line: &CommandLine) -> Result<Job> {
        no_words(line)?;
        let network = line.last("--network").map(str::to_owned);
        if let Some(name) = &network {
            NetworkName::parse(name)?;
        }
        Ok(Job { network, dry_run: line.has("--dry-run"), folders: Folders::read(line) })
    }

    fn run(&self, table: Table) -> Result<ExitCode> {
        let runtime = self.folders.runtime(table);
        let mut lines = Vec::new();
        let mut status = ExitCode::SUCCESS;
        for Dead { list, attach, why } in self.dead(&runtime)? {
            let Attach { container_id, ifname, .. } = &attach;
            let what = format!(
                "container {container_id}, interface {ifname}: {why} (network {})",
                list.name
            );
            if self.dry_run {
                lines.push(format!("would detach {what}\n"));
                continue;
            }
            match runtime.del(&list, &attach) {
                Ok(()) => lines.push(format!("detached {what}\n")),
                Err(error) => {
                    log::warn(format_args!("cannot detach {what}: {error}"));
                    status = ExitCode::FAILURE;
                }
            }
        }
        // What has no network any more.
        lines.push(ipam::gc_all(
            &self.folders.leases,
            self.network.as_deref(),
            false,
            self.dry_run,
        )?);
        let text = lines.concat();
        let nothing = "nothing is left of containers that are gone\n";
        print(if text.is_empty() { nothing } else { &text })?;
        Ok(status)
    }

    /// The dead attachments whose network is known, each once: from the cache, else, by what was noted of
    /// them and by their leases, with the network's configuration of today.
    fn dead(&self, runtime: &Runtime) -> Result<Vec<Dead>> {
        let is_meant = |name: &str| self.network.as_ref().is_none_or(|network| network == name);
        let mut known = HashSet::new();
        let mut dead = Vec::new();
        for cached in runtime.cached_attachments("")? {
            let CachedAttachment { network, attach, .. } = &cached;
            known.insert((network.clone(), attach.container_id.clone(), attach.ifname.clone()));
            let Liveness::Gone(why) = self.folders.liveness(&cached) else { continue };
            if let (true, Some(list)) = (is_meant(network), cached.list()) {
                // Its path may be another container's by now.
                let attach = Attach { netns: String::new(), ..cached.attach };
                dead.push(Dead { list, attach, why });
            }
        }
        let mut others = self.folders.gone()?;
        others.retain(|((network, ..), _)| is_meant(network));
        for (owner, why) in others {
            if !known.insert(owner.clone()) {
                continue;
            }
            let (network, id, ifname) = owner;
            if let Ok(list) = NetworkList::load(&self.folders.conf, &network) {
                dead.push(Dead { list, attach: Attach::new(&id, "", &ifname), why });
            }
        }
        Ok(dead)
    }
}
