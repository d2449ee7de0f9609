//! The folders that the tools work on, with the options for them: configurations, plugins, the runtimes' cache, and the
//! leases of host-local.
//!
//! host-local keeps its leases in the `dataDir` of its configuration. The tools look into the default folder, those of
//! `--data-dir`, and those that the configurations in the folder of configurations and in the cache name.

use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::in_process::InProcess;
use super::life::{Life, lives};
use crate::cni::NetworkName;
use crate::error::Result;
use crate::invoke::split_path;
use crate::leases::{self, DATA_DIR, LeaseOptions, LeaseStore, Listing};
use crate::log;
use crate::options::{CommandLine, Opt, opt};
use crate::runtime::{
    CachedAttachment, DEFAULT_CACHE_DIR, EXTENSIONS, Json, NetworkList, OnDelError, PluginConf,
    Runtime, conf_files,
};
use crate::skel::Table;
use crate::sort::sort;

/// The default folder of network configurations.
pub(super) const CONF_DIR: &str = "/etc/cni/net.d";

/// The default folder of plugins, unless this executable is in one.
pub(super) const PLUGIN_DIR: &str = "/opt/cni/bin";

/// Where folders of state are: nobody but root can write there.
const STATE: [&str; 2] = ["/run/cni", "/var/lib/cni"];

pub(super) const CONF: Opt =
    opt("--conf-dir", "DIR", "directory of network configurations [/etc/cni/net.d]");
pub(super) const PLUGIN_PATH: Opt = opt(
    "--plugin-path",
    "DIRS",
    "directories of plugins [CNI_PATH, that of this executable if the links are there, /opt/cni/bin]",
);
pub(super) const CACHE: Opt =
    opt("--cache-dir", "DIR", "parent of the cache, DIR/results [/var/lib/cni]");
pub(super) const LEASES: Opt = opt(
    "--data-dir",
    "DIR",
    "also the leases in this directory, besides /var/lib/cni/networks and each \"dataDir\" of\n\
     the configurations and of cached attachments",
);

/// The folders of plugins, separated by colons: the argument, else `CNI_PATH`, else the folder of this executable if the
/// links of its plugins are there, else [`PLUGIN_DIR`].
pub(super) fn plugin_path(given: Option<&str>) -> String {
    let from_process = || std::env::var("CNI_PATH").ok().filter(|path| !path.is_empty());
    let own = || {
        let dir = std::env::current_exe().ok()?.parent()?.to_owned();
        // A name that no other program has. It may be a copy.
        dir.join("host-local").is_file().then(|| dir.display().to_string())
    };
    let given = given.map(str::to_owned).or_else(from_process).or_else(own);
    given.unwrap_or_else(|| PLUGIN_DIR.to_owned())
}

/// The folders of plugins, configurations and state.
pub(super) struct Folders {
    pub(super) conf: PathBuf,
    pub(super) cache: PathBuf,
    /// The folders of leases that no configuration needs to name.
    pub(super) leases: Vec<PathBuf>,
    /// Folders of plugins, separated by colons.
    pub(super) cni_path: String,
}

/// The leases of a network in one folder.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Store {
    pub(super) network: String,
    /// The parent of the folder with the leases.
    pub(super) data_dir: PathBuf,
}

impl Store {
    /// The leases, without a lock; none if there is no folder.
    pub(super) fn listing(&self) -> Result<Listing> {
        Ok(Listing::open_existing(&self.data_dir, &self.network)?.unwrap_or_default())
    }

    /// Locks the leases; `None` if their folder was removed meanwhile.
    pub(super) fn lock(&self) -> Result<Option<LeaseStore>> {
        LeaseStore::open_existing(&self.data_dir, &self.network, LeaseOptions::default())
    }

    /// Device and inode of the network's folder.
    fn identity(&self) -> Option<(u64, u64)> {
        let meta = fs::metadata(self.data_dir.join(&self.network)).ok()?;
        Some((meta.dev(), meta.ino()))
    }
}

impl Folders {
    /// Reads the options that tools have in common.
    pub(super) fn read(line: &CommandLine) -> Folders {
        let folder =
            |flag: Opt, default: &str| PathBuf::from(line.last(flag.flag).unwrap_or(default));
        Folders {
            conf: folder(CONF, CONF_DIR),
            cache: folder(CACHE, DEFAULT_CACHE_DIR),
            leases: [DATA_DIR].into_iter().chain(line.all(LEASES.flag)).map(real_path).collect(),
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

    /// The configured networks, without the files that cannot be read: lint reports those.
    pub(super) fn networks(&self) -> Vec<NetworkList> {
        let files = conf_files(&self.conf, &EXTENSIONS).unwrap_or_default();
        files.iter().filter_map(|file| NetworkList::from_any_file(file).ok()).collect()
    }

    /// All attachments in the cache, with the state of their containers.
    pub(super) fn attachments(&self, runtime: &Runtime) -> Result<Vec<(CachedAttachment, Life)>> {
        let cached = runtime.cached_attachments("")?;
        let lives = lives(&cached, |cached| self.data_dir(cached));
        Ok(cached.into_iter().zip(lives).collect())
    }

    /// The folder with the leases of a cached attachment; the default folder if there is none.
    fn data_dir(&self, cached: &CachedAttachment) -> PathBuf {
        let named = cached.list().map(|list| data_dirs(&list)).unwrap_or_default();
        let mut dirs = named.into_iter().chain(self.leases.iter().cloned());
        let found = dirs.find(|dir| has_leases(dir, &cached.network));
        found.unwrap_or_else(|| DATA_DIR.into())
    }

    /// The leases of `network`, or of all networks, by network.
    pub(super) fn stores(&self, network: Option<&str>) -> Result<Vec<Store>> {
        let mut stores = Vec::new();
        for dir in &self.leases {
            let of_dir = leases::networks(dir)?.into_iter();
            stores.extend(of_dir.map(|network| Store { network, data_dir: dir.clone() }));
        }
        stores.extend(self.networks().iter().flat_map(named_stores));
        let runtime = Runtime { cache_dir: self.cache.clone(), ..Runtime::new(Vec::new()) };
        let cached = runtime.cached_attachments("")?;
        let cached = cached.iter().filter_map(CachedAttachment::list);
        let mut cached: Vec<Store> = cached.flat_map(|list| named_stores(&list)).collect();
        // Their author may be a tenant, and who writes leases decides what is removed with them.
        let is_of_node = |store: &Store| STATE.iter().any(|dir| store.data_dir.starts_with(dir));
        stores.extend(cached.extract_if(.., |store| is_of_node(store)));
        let is_meant = |store: &Store| network.is_none_or(|network| network == store.network);
        let distinct = |stores: &mut Vec<Store>| {
            stores.retain(is_meant);
            sort(stores);
            // A bind mount gives a folder a second name.
            let mut seen = HashSet::new();
            stores.retain(|store| store.identity().is_none_or(|folder| seen.insert(folder)));
        };
        distinct(&mut stores);
        distinct(&mut cached);
        for Store { network, data_dir } in cached.iter().filter(|store| !stores.contains(store)) {
            let dir = data_dir.display();
            log::warn(format_args!(
                "network {network}: its leases in {dir} are left out, because no configuration of this node names \
                 them: --data-dir {dir} adds them"
            ));
        }
        Ok(stores)
    }

    /// The folders in which [`Folders::stores`] looked, for messages.
    pub(super) fn searched(&self, network: &str) -> String {
        let mut dirs = self.leases.clone();
        let lists = self.networks().into_iter().filter(|list| list.name == network);
        dirs.extend(lists.flat_map(|list| data_dirs(&list)));
        sort(&mut dirs);
        dirs.dedup();
        let dirs: Vec<String> = dirs.iter().map(|dir| dir.display().to_string()).collect();
        dirs.join(", ")
    }
}

/// The path without symbolic links, so that a folder has one name.
fn real_path(dir: impl AsRef<Path>) -> PathBuf {
    fs::canonicalize(&dir).unwrap_or_else(|_| dir.as_ref().to_owned())
}

/// Whether the folder has leases of the network. [`leases::networks`] has the same condition.
fn has_leases(data_dir: &Path, network: &str) -> bool {
    NetworkName::parse(network).is_ok() && data_dir.join(network).join("lock").is_file()
}

/// Each `dataDir` of host-local in the configuration, also of a delegate.
fn data_dirs(list: &NetworkList) -> Vec<PathBuf> {
    let of_ipam = |json: &Json| {
        let dir = json.get_present("ipam")?.get_present("dataDir")?;
        dir.as_str().filter(|dir| !dir.is_empty()).map(PathBuf::from)
    };
    let plugins = list.plugins.iter().map(PluginConf::json);
    let with_delegates = plugins.flat_map(|json| [Some(json), json.get_present("delegate")]);
    with_delegates.flatten().filter_map(of_ipam).collect()
}

/// The leases of the network in each of its folders.
fn named_stores(list: &NetworkList) -> Vec<Store> {
    let network = &list.name;
    let named = data_dirs(list).into_iter().filter(|dir| dir.is_absolute());
    let stores = named.filter(|dir| has_leases(dir, network));
    stores.map(|dir| Store { network: network.clone(), data_dir: real_path(dir) }).collect()
}
