//! Reads tables of iptables, and changes them in one transaction.
//!
//! A [`IptablesTable`] records only necessary changes, so a plan is idempotent, and
//! [`IptablesHandle::update_table`] plans again if another program has changed the table in
//! between. Rules are compared word by word with the output of `iptables-save`: write them in its
//! order (addresses and interfaces, protocol, matches, target) and with prefix lengths.
//!
//! iptables on top of `nf_tables` is read and changed over netlink. iptables-legacy, an `iptables`
//! that is a script, and rules with words that this program does not know need `iptables-save` and
//! `iptables-restore`.
//!
//! | file | |
//! | --- | --- |
//! | `table.rs` | a table, its rules, and pending changes |
//! | `direct.rs` | tables over netlink |
//! | `encoding.rs` | rules as expressions of `nf_tables` |
//! | `extensions.rs` | matches and targets |

mod direct;
mod encoding;
mod extensions;
pub mod table;

use std::fmt;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use self::extensions::EXTENSIONS;
pub use self::extensions::{
    PORT_EXTENSIONS, RANDOM_FULLY, XT_COMMENT, XT_CONNTRACK, XT_MASQUERADE,
};
pub use self::table::{IptablesRule, IptablesTable};
use crate::cmd::{self, ProgramOutput};
use crate::files::lock::FileLock;
use crate::netlink::IpFamily;
use crate::netlink::nftables::{self, NftSocket, XtExtension};
use crate::netns;
use ::iptables::IPTables;
use cni::error::{Error, ErrorCode, Result};

/// Serialises the changes of our processes; the lock of iptables itself is taken by its programs.
const LOCK: &str = "/run/cnibox-iptables.lock";

/// The timeout of the lock: with tens of thousands of rules a change takes a second, and a hundred
/// pods may start at once.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a change is retried while other programs change the table, too.
const RETRIES: Duration = Duration::from_secs(10);

/// How often an identical change of an identical table fails before the failure is final. Another
/// program may undo its own change between two reads, and a busy kernel refuses changes
/// temporarily.
const REFUSALS: usize = 4;

/// The remedy where iptables lacks what its rules need.
pub(super) const LACKING_MODULE: &str =
    "load the modules ip_tables and xt_comment, or choose the back end \"nftables\"";

/// What iptables reports if the kernel lacks a table, a match or a target.
const MISSING_MODULE_HELP: [&str; 3] =
    ["No such file or directory", "No chain/target/match by that name", "Couldn't load match"];

/// An implementation of iptables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IptablesFlavour {
    /// The default implementation of the node: `iptables`.
    Default,
    /// On top of `nf_tables`: `iptables-nft`.
    Nft,
    /// On top of the kernel's `ip_tables`: `iptables-legacy`.
    Legacy,
}

/// The chains of a table that a plan needs.
#[derive(Clone, Copy, Debug)]
pub enum ChainScope<'a> {
    /// Some chains.
    Chains(SomeChains<'a>),
    /// The base chains and all chains of CNI plugins.
    All,
}

/// See [`ChainScope::Chains`].
#[derive(Clone, Copy)]
pub struct SomeChains<'a> {
    pub names: &'a [&'a str],
    /// Selects rules; the chains that they jump to are read, too.
    pub leads_on: &'a dyn Fn(&IptablesRule) -> bool,
    /// Those of the chains of which the beginning is enough, if it has the rules `until`, with the
    /// number of rules that they have for each recorded attachment. A plan that needs a rule beyond
    /// starts again with all chains.
    pub beginnings: &'a [(&'a str, usize)],
    /// Rules, or parts of rules.
    pub until: &'a [IptablesRule],
    /// The number of recorded attachments. A chain with fewer rules is read as a whole: it may be
    /// an old one that was saved and loaded.
    pub recorded: usize,
}

impl fmt::Debug for SomeChains<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.names).finish()
    }
}

impl<'a> ChainScope<'a> {
    pub fn named_chains(names: &'a [&'a str]) -> ChainScope<'a> {
        ChainScope::leading_on(names, &|_| false)
    }

    /// The chains with these names, and those that their rules for which `leads_on` is true jump
    /// to.
    pub fn leading_on(
        names: &'a [&'a str],
        leads_on: &'a dyn Fn(&IptablesRule) -> bool,
    ) -> ChainScope<'a> {
        let (beginnings, until) = (&[][..], &[][..]);
        ChainScope::Chains(SomeChains { names, leads_on, beginnings, until, recorded: 0 })
    }

    /// Of these chains only the beginning, up to the rules that [`ChainScope::until`] names.
    #[must_use]
    pub fn with_beginnings(self, beginnings: &'a [(&'a str, usize)]) -> ChainScope<'a> {
        match self {
            ChainScope::Chains(some) => ChainScope::Chains(SomeChains { beginnings, ..some }),
            ChainScope::All => self,
        }
    }

    /// The beginnings of chains end with these rules, of one of so many recorded attachments.
    #[must_use]
    pub fn until(self, until: &'a [IptablesRule], recorded: usize) -> ChainScope<'a> {
        match self {
            ChainScope::Chains(some) => ChainScope::Chains(SomeChains { until, recorded, ..some }),
            ChainScope::All => self,
        }
    }
}

/// The lines of a built-in chain of iptables-legacy, its policy included; `None` if it cannot be
/// listed. The crate reports no failure, so the line with the policy is required.
pub fn list_legacy_chain(family: IpFamily, table: &str, chain: &str) -> Option<Vec<String>> {
    // For the life of the process, as the crate demands.
    static PROGRAMS: [OnceLock<Option<PathBuf>>; 2] = [const { OnceLock::new() }; 2];
    let program = PROGRAMS[usize::from(family == IpFamily::V6)]
        .get_or_init(|| cmd::find_program(&format!("{}-legacy", program_name(family))));
    // `new` would start `iptables --version`, and `has_wait` wait without a timeout.
    let cmd = program.as_deref()?.to_str()?;
    let programs = IPTables { cmd, has_check: true, has_wait: false, is_numeric: false };
    netns::require_home_netns().ok()?;
    let policy = format!("-P {chain} ");
    programs
        .list(table, chain)
        .ok()
        .filter(|lines| lines.iter().any(|line| line.starts_with(&policy)))
}

/// Whether iptables-legacy has one of these chains in a table. Starts a process.
pub(super) fn has_legacy_chain(table: &str, chains: &[&str]) -> bool {
    let Some(program) = cmd::find_program("iptables-legacy") else { return false };
    let listed = cmd::run_program(&program, &["-w", "5", "-t", table, "-S"], "");
    let text = listed.and_then(ProgramOutput::require_success).unwrap_or_default();
    text.lines().filter_map(|line| line.strip_prefix("-N ")).any(|name| chains.contains(&name))
}

/// The programs for one family.
#[derive(Clone, Debug)]
pub struct IptablesPrograms {
    save: PathBuf,
    restore: PathBuf,
    is_on_nf_tables: bool,
}

impl IptablesPrograms {
    /// The programs if they are installed. Starts no process.
    pub fn find_installed(family: IpFamily, flavour: IptablesFlavour) -> Option<IptablesPrograms> {
        let flavour = match flavour {
            IptablesFlavour::Default => "",
            IptablesFlavour::Nft => "-nft",
            IptablesFlavour::Legacy => "-legacy",
        };
        let find =
            |suffix| cmd::find_program(&format!("{}{flavour}{suffix}", program_name(family)));
        let (save, restore) = (find("-save")?, find("-restore")?);
        let target = fs::canonicalize(&restore).ok();
        let target = target.as_deref().and_then(Path::file_name).unwrap_or_default();
        let is_on_nf_tables = target.to_string_lossy().contains("nft");
        Some(IptablesPrograms { save, restore, is_on_nf_tables })
    }

    /// Whether the programs are links to iptables on top of `nf_tables`.
    pub fn are_on_nf_tables(&self) -> bool {
        self.is_on_nf_tables
    }

    /// Reads a table. Reading a legacy table creates it.
    fn read_table(&self, name: &str) -> Result<IptablesTable> {
        let text = cmd::run_program(&self.save, &["-t", name], "")?.require_success()?;
        if text.lines().any(|line| line.starts_with('#') && line.contains("is incompatible")) {
            let msg =
                format!("read iptables table {name}: it has rules that iptables cannot print");
            return Err(Error::internal(msg).with_details(
                "remove these rules of another program, or choose the back end \"nftables\"",
            ));
        }
        // A read error in the middle of the table is not reported otherwise.
        if text.contains(&format!("*{name}\n")) && !text.contains("\nCOMMIT\n") {
            let msg = format!("read iptables table {name}: iptables-save ended too early");
            return Err(Error::new(ErrorCode::TRY_AGAIN, msg));
        }
        Ok(IptablesTable::parse_save_output(name, &text))
    }

    /// Reads a table and commits the changes of `plan`, again if that fails. On `nf_tables`
    /// iptables-restore applies its changes to the table as it is by then.
    fn update_table(&self, name: &str, plan: &dyn Fn(&mut IptablesTable)) -> Result<()> {
        let until = Instant::now() + RETRIES;
        let (mut former, mut refusals) = (None, 0);
        loop {
            let mut table = self.read_table(name)?;
            let before = (table.chains.clone(), table.rules.clone());
            plan(&mut table);
            if table.changes.is_empty() {
                return Ok(());
            }
            let script = table::restore_script(name, &table.changes)?;
            let output = cmd::run_program(&self.restore, &["--noflush", "-w"], &script)?;
            if output.code == Some(0) {
                return Ok(());
            }
            let attempt = Some((before, script));
            refusals = if attempt == former { refusals + 1 } else { 1 };
            former = attempt;
            if refusals == REFUSALS {
                let error = output.failure_error();
                let lacks = MISSING_MODULE_HELP.iter().any(|text| error.message().contains(text));
                return Err(if lacks {
                    error.with_details(LACKING_MODULE)
                } else if error.message().contains("/run/xtables.lock: Is a directory") {
                    // As which a volume of a pod is made, without a type of its hostPath.
                    error.with_details("rmdir /run/xtables.lock")
                } else {
                    error
                });
            } else if Instant::now() >= until {
                let msg = format!("change iptables table {name}: others kept changing it");
                let cause = output.failure_error().message().to_owned();
                return Err(Error::new(ErrorCode::TRY_AGAIN, msg).with_details(cause));
            }
        }
    }
}

/// The tables of one family.
#[derive(Debug)]
pub struct IptablesHandle<'n> {
    pub family: IpFamily,
    flavour: IptablesFlavour,
    /// The socket, for tables on top of `nf_tables`.
    nft: Option<&'n NftSocket>,
}

impl<'n> IptablesHandle<'n> {
    /// The tables of a flavour, over the socket if there is one; `None` if programs are required
    /// that are not installed.
    pub(super) fn open_if_usable(
        family: IpFamily,
        flavour: IptablesFlavour,
        nft: Option<&'n NftSocket>,
    ) -> Option<Self> {
        let tables = IptablesHandle { family, flavour, nft };
        (nft.is_some() || tables.find_programs().is_ok()).then_some(tables)
    }

    /// The programs of the flavour, else the default ones.
    fn find_programs(&self) -> Result<IptablesPrograms> {
        let find = |flavour| IptablesPrograms::find_installed(self.family, flavour);
        let found = find(self.flavour).or_else(|| find(IptablesFlavour::Default));
        found.ok_or_else(|| not_found_error(self.family))
    }

    /// Reads the chains of the scope; without netlink the whole table.
    pub fn read_table(&self, name: &str, scope: ChainScope<'_>) -> Result<IptablesTable> {
        match self.nft {
            Some(nft) => direct::read_table(nft, self.family, name, scope),
            None => self.find_programs()?.read_table(name),
        }
    }

    /// Reads the chains of the scope, and commits the changes of `plan` in one transaction.
    ///
    /// Our processes are serialised by a lock. If the lock file cannot be created, there is no
    /// lock; a lock timeout is an error.
    pub fn update_table(
        &self,
        name: &str,
        scope: ChainScope<'_>,
        plan: &dyn Fn(&mut IptablesTable),
    ) -> Result<()> {
        let _lock = take_lock()?;
        self.update_locked(name, scope, plan)
    }

    /// Like [`IptablesHandle::update_table`], for deletions, which ignore a lock timeout: a
    /// container that cannot be deleted is worse than a rule that is deleted twice.
    pub fn delete_from_table(
        &self,
        name: &str,
        scope: ChainScope<'_>,
        plan: &dyn Fn(&mut IptablesTable),
    ) -> Result<()> {
        let _lock = take_lock_or_continue();
        self.update_locked(name, scope, plan)
    }

    fn update_locked(
        &self,
        name: &str,
        scope: ChainScope<'_>,
        plan: &dyn Fn(&mut IptablesTable),
    ) -> Result<()> {
        if let Some(nft) = self.nft
            && direct::update_table(nft, self.family, name, scope, plan)?
        {
            return Ok(());
        }
        let changed = self.find_programs()?.update_table(name, plan);
        let missing = |nft: &NftSocket| nft.find_missing_extension(self.family, EXTENSIONS);
        changed.map_err(|error| match self.nft.and_then(missing) {
            Some(missing) => error.with_details(missing_extension_error(missing).details()),
            None => error,
        })
    }
}

/// The error if the kernel lacks what rules on top of `nf_tables` need.
pub(super) fn missing_extension_error(missing: &XtExtension) -> Error {
    let XtExtension { name, module, .. } = missing;
    Error::internal(format!("the kernel lacks the extension {name} of iptables"))
        .with_details(format!("load the module {module}, or choose the back end \"nftables\""))
}

/// The error if no programs are installed.
pub(super) fn not_found_error(family: IpFamily) -> Error {
    let name = program_name(family);
    Error::internal(format!("failed to locate iptables: no {name}-restore in PATH"))
        .with_details("install iptables, or choose the back end \"nftables\"")
}

/// Whether the lock has timed out; deletions of this process do not wait for it again.
static TIMED_OUT: AtomicBool = AtomicBool::new(false);

/// Whether this process holds the lock for more than one change.
static IS_HELD: AtomicBool = AtomicBool::new(false);

/// The lock of the tables, for several changes: no other process of ours changes them meanwhile.
pub struct TablesLock(
    #[expect(dead_code, reason = "it is released when it is dropped")] Option<FileLock>,
);

impl TablesLock {
    pub fn acquire() -> Result<TablesLock> {
        Ok(TablesLock::hold(take_lock()?))
    }

    /// Like [`TablesLock::acquire`], for deletions, which continue after a timeout.
    pub fn acquire_or_continue() -> TablesLock {
        TablesLock::hold(take_lock_or_continue())
    }

    fn hold(lock: Option<FileLock>) -> TablesLock {
        IS_HELD.store(true, Ordering::Relaxed);
        TablesLock(lock)
    }
}

impl Drop for TablesLock {
    fn drop(&mut self) {
        IS_HELD.store(false, Ordering::Relaxed);
    }
}

/// Takes the lock; `None` if its file cannot be created, or if this process holds it.
fn take_lock() -> Result<Option<FileLock>> {
    if IS_HELD.load(Ordering::Relaxed) {
        return Ok(None);
    }
    match FileLock::acquire_within(Path::new(LOCK), LOCK_TIMEOUT) {
        Ok(lock) => Ok(Some(lock)),
        Err(error) if error.source.kind() == ErrorKind::TimedOut => {
            TIMED_OUT.store(true, Ordering::Relaxed);
            let error = Error::new(ErrorCode::TRY_AGAIN, format!("change iptables: {error}"));
            Err(error.with_details("if that process hangs, end it"))
        }
        Err(_) => Ok(None),
    }
}

/// Like [`take_lock`], for deletions, which continue after a timeout.
fn take_lock_or_continue() -> Option<FileLock> {
    if TIMED_OUT.load(Ordering::Relaxed) {
        return None;
    }
    take_lock().unwrap_or_else(|error| {
        warn!("continuing without the lock of iptables: {error}");
        None
    })
}

pub(super) fn program_name(family: IpFamily) -> &'static str {
    if family == IpFamily::V4 { "iptables" } else { "ip6tables" }
}

/// The table of `nf_tables` that iptables on top of `nf_tables` stores its table in.
pub(super) fn nft_table_for(family: IpFamily, table: &str) -> nftables::NftTable<'_> {
    nftables::NftTable::new(family.into(), table)
}
