//! The directories that the tools work on, with the options for them: configurations, plugins, the
//! runtimes' cache, and the leases of host-local.
//!
//! host-local keeps its leases in the `dataDir` of its configuration. The tools look into the
//! default directory, the directories of `--data-dir`, and those that configurations name: files of
//! configurations, and configurations in the cache.

use std::collections::HashSet;
use std::fs::{self, DirEntry};
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::in_process::InProcessExecutor;
use super::life::{ContainerState, container_states};
use crate::framework::{AppletTable, CACHE_DIRS};
use crate::leases::{self, DATA_DIR, LeaseListing, LeaseOptions, LeaseStore};
use crate::options::{CommandLine, CommandOption, long_option};
use cni::NetworkName;
use cni::error::Result;
use cni::exec::split_path;
use cni::runtime::{
    CachedAttachment, DEFAULT_CACHE_DIR, EXTENSIONS, NetworkList, OnDelError, PluginConfig,
    Runtime, find_config_files,
};
use cni::sort::sort_items;

/// The default directory of network configurations.
pub(super) const CONF_DIR: &str = "/etc/cni/net.d";

/// The default directory of plugins, unless this executable is in a directory of plugins.
pub(super) const PLUGIN_DIR: &str = "/opt/cni/bin";

/// The parents of directories of state: only root can write there.
const STATE: [&str; 2] = ["/run/cni", "/var/lib/cni"];

/// The age at which an empty file of the cache is not one that a runtime is writing.
const ABANDONED: Duration = Duration::from_secs(600);

/// Why an empty file of the cache is of no use.
pub(super) const EMPTY: &str = "it is empty, as after a crash of a runtime";

pub(super) const CONF: CommandOption =
    long_option("--conf-dir", "DIR", "directory of network configurations [/etc/cni/net.d]");
pub(super) const PLUGIN_PATH: CommandOption = long_option(
    "--plugin-path",
    "DIRS",
    "directories of plugins [CNI_PATH, that of this executable if the links are there, \
     /opt/cni/bin]",
);
pub(super) const CACHE: CommandOption =
    long_option("--cache-dir", "DIR", "parent of the cache, DIR/results [/var/lib/cni]");
pub(super) const LEASES: CommandOption = long_option(
    "--data-dir",
    "DIR",
    "also the leases in this directory, besides /var/lib/cni/networks and each \"dataDir\" \
     of\nthe configurations and of cached attachments",
);

/// The directories of plugins, separated by colons: the argument, else `CNI_PATH`, else the
/// directory of this executable if the links of its plugins are there, else [`PLUGIN_DIR`].
pub(super) fn plugin_path(given: Option<&str>) -> String {
    let given = given
        .map(str::to_owned)
        .or_else(|| std::env::var("CNI_PATH").ok().filter(|path| !path.is_empty()))
        .or_else(|| {
            let dir = std::env::current_exe().ok()?.parent()?.to_owned();
            // No other program has this name. The file may be a link or a copy.
            dir.join("host-local").is_file().then(|| dir.display().to_string())
        });
    given.unwrap_or_else(|| PLUGIN_DIR.to_owned())
}

/// The directories of plugins, configurations and state.
pub(super) struct ToolDirectories {
    pub(super) conf: PathBuf,
    pub(super) cache: PathBuf,
    /// Also that of multus, unless the command line names one.
    caches: Vec<PathBuf>,
    /// Directories of leases: the default one, and those of `--data-dir`.
    pub(super) leases: Vec<PathBuf>,
    /// Directories of plugins, separated by colons.
    pub(super) cni_path: String,
    /// The options of directories in the command line, for commands in messages.
    pub(super) given: String,
}

/// The leases of a network in one directory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LeaseDirectory {
    pub(super) network: String,
    /// The parent of the directory with the leases.
    pub(super) data_dir: PathBuf,
}

impl LeaseDirectory {
    /// The leases, without a lock; none if there is no directory.
    pub(super) fn read_listing(&self) -> Result<LeaseListing> {
        Ok(LeaseListing::open_existing(&self.data_dir, &self.network)?.unwrap_or_default())
    }

    /// Whether the address is leased or reserved.
    pub(super) fn has_lease(&self, ip: IpAddr) -> bool {
        self.data_dir.join(&self.network).join(ip.to_string()).exists()
    }

    /// The directory of the lease files.
    pub(super) fn path(&self) -> PathBuf {
        self.data_dir.join(&self.network)
    }

    /// Locks the leases; `None` if their directory was removed meanwhile.
    pub(super) fn lock_leases(&self) -> Result<Option<LeaseStore>> {
        LeaseStore::open_existing(&self.data_dir, &self.network, LeaseOptions::default())
    }

    /// Device and inode of the network's directory.
    fn device_and_inode(&self) -> Option<(u64, u64)> {
        let meta = fs::metadata(self.path()).ok()?;
        Some((meta.dev(), meta.ino()))
    }
}

impl ToolDirectories {
    /// Reads the options that tools have in common.
    pub(super) fn from_command_line(line: &CommandLine) -> ToolDirectories {
        let directory = |flag: CommandOption, default: &str| {
            PathBuf::from(line.last_value(flag.flag).unwrap_or(default))
        };
        let given_cache = line.last_value(CACHE.flag).map(PathBuf::from);
        ToolDirectories {
            conf: directory(CONF, CONF_DIR),
            cache: directory(CACHE, DEFAULT_CACHE_DIR),
            caches: given_cache.map_or(CACHE_DIRS.map(PathBuf::from).into(), |dir| vec![dir]),
            leases: [DATA_DIR]
                .into_iter()
                .chain(line.all_values(LEASES.flag))
                .map(real_path)
                .collect(),
            cni_path: plugin_path(line.last_value(PLUGIN_PATH.flag)),
            given: [CONF, PLUGIN_PATH, CACHE, LEASES]
                .iter()
                .flat_map(|option| {
                    line.all_values(option.flag).map(|value| format!(" {} {value}", option.flag))
                })
                .collect(),
        }
    }

    pub(super) fn doubt_remedy(&self, network: &str, id: &str) -> String {
        format!("cnibox gc --network {network} --container {id}{} # if it has ended", self.given)
    }

    /// A runtime on the cache of the node's runtimes, which runs own plugins in this process.
    pub(super) fn new_runtime(&self, table: AppletTable) -> Runtime {
        Runtime {
            cache_dir: self.cache.clone(),
            on_del_error: OnDelError::Continue,
            executor: Box::new(InProcessExecutor::new(table)),
            ..Runtime::new(split_path(&self.cni_path))
        }
    }

    /// Like [`ToolDirectories::new_runtime`], one on each cache of the node.
    pub(super) fn new_runtimes(&self, table: AppletTable) -> Vec<Runtime> {
        let on_cache = |cache_dir: &PathBuf| Runtime {
            cache_dir: cache_dir.clone(),
            ..self.new_runtime(table)
        };
        self.caches.iter().map(on_cache).collect()
    }

    /// The configured networks, without the files that cannot be read: lint reports those.
    pub(super) fn configured_networks(&self) -> Vec<NetworkList> {
        let files = find_config_files(&self.conf, &EXTENSIONS).unwrap_or_default();
        files.iter().filter_map(|file| NetworkList::from_any_file(file).ok()).collect()
    }

    pub(super) fn cached_attachments(
        &self,
        runtime: &Runtime,
    ) -> Result<Vec<(CachedAttachment, ContainerState)>> {
        let cached = runtime.cached_attachments("")?;
        let lives = container_states(&cached, |cached| self.find_data_dir(cached));
        Ok(cached.into_iter().zip(lives).collect())
    }

    /// Empty files of the cache that no runtime is writing now.
    pub(super) fn empty_cache_files(&self) -> Vec<PathBuf> {
        let is_abandoned = |entry: &DirEntry| {
            let meta = entry.metadata().ok().filter(|meta| meta.is_file() && meta.len() == 0)?;
            meta.modified().ok()?.elapsed().ok().filter(|age| *age > ABANDONED)
        };
        let entries = fs::read_dir(self.cache.join("results")).into_iter().flatten().flatten();
        let empty = entries.filter(|entry| is_abandoned(entry).is_some());
        empty.map(|entry| entry.path()).collect()
    }

    /// The directory with the leases of a cached attachment; the default directory if there is
    /// none.
    fn find_data_dir(&self, cached: &CachedAttachment) -> PathBuf {
        let named = cached.network_list().map(|list| data_dirs(&list)).unwrap_or_default();
        let mut dirs = named.into_iter().chain(self.leases.iter().cloned());
        let found = dirs.find(|dir| has_leases(dir, &cached.network));
        found.unwrap_or_else(|| DATA_DIR.into())
    }

    /// The leases of `network`, or of all networks, by network.
    pub(super) fn find_lease_directories(
        &self,
        network: Option<&str>,
    ) -> Result<Vec<LeaseDirectory>> {
        let mut stores = Vec::new();
        for dir in &self.leases {
            let of_dir = leases::list_networks(dir)?.into_iter();
            stores.extend(of_dir.map(|network| LeaseDirectory { network, data_dir: dir.clone() }));
        }
        stores.extend(self.configured_networks().iter().flat_map(named_lease_directories));
        let runtime = Runtime { cache_dir: self.cache.clone(), ..Runtime::new(Vec::new()) };
        let cached = runtime.cached_attachments("")?;
        let cached = cached.iter().filter_map(CachedAttachment::network_list);
        let mut cached: Vec<LeaseDirectory> =
            cached.flat_map(|list| named_lease_directories(&list)).collect();
        // The author of a configuration may be a tenant, and whoever writes leases decides what is
        // removed with them.
        let is_of_node =
            |store: &LeaseDirectory| STATE.iter().any(|dir| store.data_dir.starts_with(dir));
        stores.extend(cached.extract_if(.., |store| is_of_node(store)));
        let distinct = |stores: &mut Vec<LeaseDirectory>| {
            stores.retain(|store| network.is_none_or(|network| network == store.network));
            sort_items(stores);
            // A bind mount gives a directory a second name.
            let mut seen = HashSet::new();
            stores.retain(|store| {
                store.device_and_inode().is_none_or(|directory| seen.insert(directory))
            });
        };
        distinct(&mut stores);
        distinct(&mut cached);
        for LeaseDirectory { network, data_dir } in
            cached.iter().filter(|store| !stores.contains(store))
        {
            let dir = data_dir.display();
            warn!(
                "network {network}: its leases in {dir} are left out, because no configuration of \
                 this node names them: --data-dir {dir} adds them"
            );
        }
        Ok(stores)
    }

    /// The directories in which [`ToolDirectories::find_lease_directories`] looked, for messages.
    pub(super) fn searched_directories(&self, network: &str) -> String {
        let mut dirs = self.leases.clone();
        let lists = self.configured_networks().into_iter().filter(|list| list.name == network);
        dirs.extend(lists.flat_map(|list| data_dirs(&list)));
        sort_items(&mut dirs);
        dirs.dedup();
        let dirs: Vec<String> = dirs.iter().map(|dir| dir.display().to_string()).collect();
        dirs.join(", ")
    }
}

/// The path without symbolic links, so that a directory has one name.
fn real_path(dir: impl AsRef<Path>) -> PathBuf {
    fs::canonicalize(&dir).unwrap_or_else(|_| dir.as_ref().to_owned())
}

/// Whether the directory has leases of the network. `leases::list_networks` has the same condition.
fn has_leases(data_dir: &Path, network: &str) -> bool {
    NetworkName::parse(network).is_ok() && data_dir.join(network).join("lock").is_file()
}

/// Each `dataDir` of host-local in the configuration, also of a delegate.
fn data_dirs(list: &NetworkList) -> Vec<PathBuf> {
    let plugins = list.plugins.iter().map(PluginConfig::json);
    let with_delegates = plugins.flat_map(|json| [Some(json), json.get_present_member("delegate")]);
    with_delegates
        .flatten()
        .filter_map(|json| {
            let dir = json.get_present_member("ipam")?.get_present_member("dataDir")?;
            dir.as_str().filter(|dir| !dir.is_empty()).map(PathBuf::from)
        })
        .collect()
}

/// The leases of the network in each of its directories.
pub(super) fn named_lease_directories(list: &NetworkList) -> Vec<LeaseDirectory> {
    let network = &list.name;
    let named = data_dirs(list).into_iter().filter(|dir| dir.is_absolute());
    let stores = named.filter(|dir| has_leases(dir, network));
    stores
        .map(|dir| LeaseDirectory { network: network.clone(), data_dir: real_path(dir) })
        .collect()
}
