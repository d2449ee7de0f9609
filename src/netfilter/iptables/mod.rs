//! iptables: one `iptables-save` reads a table, at most one `iptables-restore` changes it.
//!
//! Reading a table with tens of thousands of foreign rules is slow. [`Iptables::add_expected`] and
//! [`Iptables::delete_expected`] do not read it if its relevant part is as expected.
//!
//! A [`Table`] records only necessary changes, so a plan is idempotent. [`Iptables::update`] commits the changes in
//! one transaction, and plans again if another program has changed the table in between. Rules are compared word by
//! word with the output of `iptables-save`: write them in its order (addresses and interfaces, protocol, matches,
//! target) and with prefix lengths.
//!
//! | file | |
//! | --- | --- |
//! | `table.rs` | a table, its rules, and pending changes |
//! | `incompatible.rs` | tables that iptables-save cannot print, rules that cannot be deleted in one transaction |

mod incompatible;
pub mod table;

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ::iptables::IPTables;
use serde::de::DeserializeOwned;

pub use self::table::{Rule, Table};
use super::shared::another;
use super::{Owner, Repair};
use crate::attachment::{Keepsake, Kept};
use crate::cmd;
use crate::error::{Code, Error, Result};
use crate::files::lock::Lock;
use crate::log;
use crate::netlink::{Family, nftables};
use crate::netns;

/// Serialises the changes of our processes; the lock of iptables itself is taken by its programs.
const LOCK: &str = "/run/cnibox-iptables.lock";

/// The timeout of the lock: with tens of thousands of rules a change takes a second, and a hundred pods may start
/// at once.
const LOCK_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a change is retried while other programs change the table, too.
const RETRIES: Duration = Duration::from_secs(10);

/// How often an identical change of an identical table fails before the failure is final. Another program may undo
/// its own change between two reads, and a busy kernel refuses changes temporarily.
const REFUSALS: usize = 4;

/// An implementation of iptables.
#[derive(Clone, Copy, Debug)]
pub enum Flavour {
    /// The default implementation of the node: `iptables`.
    Default,
    /// On top of `nf_tables`: `iptables-nft`.
    Nft,
    /// On top of the kernel's `ip_tables`: `iptables-legacy`.
    Legacy,
}

/// The programs for one family.
#[derive(Clone, Debug)]
pub struct Iptables {
    family: Family,
    list: Option<PathBuf>,
    save: PathBuf,
    restore: PathBuf,
}

impl Iptables {
    /// The programs if they are installed. Starts no process.
    pub fn find(family: Family, flavour: Flavour) -> Option<Iptables> {
        let flavour = match flavour {
            Flavour::Default => "",
            Flavour::Nft => "-nft",
            Flavour::Legacy => "-legacy",
        };
        let find = |suffix| cmd::find(&format!("{}{flavour}{suffix}", program(family)));
        let (list, save, restore) = (find(""), find("-save")?, find("-restore")?);
        Some(Iptables { family, list, save, restore })
    }

    /// The programs of the flavour, else the default programs.
    pub fn find_or_default(family: Family, flavour: Flavour) -> Option<Iptables> {
        Iptables::find(family, flavour).or_else(|| Iptables::find(family, Flavour::Default))
    }

    /// The default programs.
    pub fn require(family: Family) -> Result<Iptables> {
        Iptables::find(family, Flavour::Default).ok_or_else(|| {
            let name = program(family);
            Error::internal(format!("failed to locate iptables: no {name}-restore in PATH"))
                .with_details("install iptables, or choose the back end \"nftables\"")
        })
    }

    /// Reads a table, or the printable part of a table that iptables-save refuses to print. Reading a legacy table
    /// creates it.
    pub fn read(&self, name: &str) -> Result<Table> {
        let text = cmd::run(&self.save, &["-t", name], "")?.require_success()?;
        if text.lines().any(|line| line.starts_with('#') && line.contains("is incompatible")) {
            return self.read_parts(name);
        }
        // A read error in the middle of the table is not reported otherwise.
        if text.contains(&format!("*{name}\n")) && !text.contains("\nCOMMIT\n") {
            let msg = format!("read iptables table {name}: iptables-save ended too early");
            return Err(Error::new(Code::TRY_AGAIN, msg));
        }
        Ok(Table::parse(name, &text))
    }

    /// The lines of a built-in chain, its policy included; `None` if it cannot be listed. The crate reports no
    /// failure, so the line with the policy is required.
    pub fn list(&self, table: &str, chain: &str) -> Option<Vec<String>> {
        // `new` would start `iptables --version`, and `has_wait` wait without a timeout.
        let cmd = self.list.as_deref().and_then(Path::to_str)?.to_owned().leak();
        let programs = IPTables { cmd, has_check: true, has_wait: false, is_numeric: false };
        netns::at_home().ok()?;
        let policy = format!("-P {chain} ");
        let is_complete = |lines: &Vec<String>| lines.iter().any(|line| line.starts_with(&policy));
        programs.list(table, chain).ok().filter(is_complete)
    }

    /// Reads one chain of a table; `None` if that fails, for example because the chain does not exist.
    pub fn read_chain(&self, name: &str, chain: &str) -> Option<Table> {
        let list = self.list.as_deref()?;
        let output = cmd::run(list, &["-w", "-t", name, "-S", chain], "").ok()?;
        Some(Table::parse(name, &output.require_success().ok()?))
    }

    /// Reads a table and commits the changes of `plan` in one transaction.
    ///
    /// Our processes are serialised by a lock: on `nf_tables` iptables-restore applies its changes to the table as
    /// it is by then, so two processes could insert the same rule. If the lock file cannot be created, there is no
    /// lock; a lock timeout is an error.
    pub fn update(&self, name: &str, plan: &dyn Fn(&mut Table)) -> Result<()> {
        self.add_expected(name, &|| None, plan)
    }

    /// As [`Iptables::update`], but first tries to commit the changes that `plan` applies to the table of `expect`,
    /// without reading the table: in a script that fails unless the rules of that table exist. So what `plan` adds
    /// must be in a chain that it creates, or jump to such a chain, since no such rules can exist; or `expect` has
    /// looked for them.
    pub fn add_expected(
        &self,
        name: &str,
        expect: &dyn Fn() -> Option<Table>,
        plan: &dyn Fn(&mut Table),
    ) -> Result<()> {
        let _lock = lock()?;
        if let Some(mut expected) = expect() {
            expected.changes = expected.rules.iter().map(|rule| rule.line("-C")).collect();
            if self.try_expected(expected, plan)? {
                return Ok(());
            }
        }
        self.update_locked(name, plan)
    }

    /// As [`Iptables::update`], but first tries to commit the deletions that `plan` applies to `expected`. If they
    /// succeed, the table is not read. So the deletions must fail where more is to be deleted: as the deletion of a
    /// chain fails while a rule jumps to it. A lock timeout is ignored: a container that cannot be deleted is worse
    /// than a rule that is deleted twice.
    pub fn delete_expected(&self, mut expected: Table, plan: &dyn Fn(&mut Table)) -> Result<()> {
        let _lock = lock_or_continue();
        let name = expected.name.clone();
        expected.changes.clear();
        if self.try_expected(expected, plan)? { Ok(()) } else { self.update_locked(&name, plan) }
    }

    /// Commits the pending changes of `expected` and those of `plan`. Returns whether that succeeded.
    fn try_expected(&self, mut expected: Table, plan: &dyn Fn(&mut Table)) -> Result<bool> {
        plan(&mut expected);
        let Table { name, changes, .. } = &expected;
        Ok(!changes.is_empty() && self.restore(name, changes)?.code == Some(0))
    }

    fn restore(&self, name: &str, changes: &[String]) -> Result<cmd::Output> {
        cmd::run(&self.restore, &["--noflush", "-w"], &table::script(name, changes)?)
    }

    fn update_locked(&self, name: &str, plan: &dyn Fn(&mut Table)) -> Result<()> {
        let until = Instant::now() + RETRIES;
        let (mut former, mut refusals) = (None, 0);
        loop {
            let mut table = self.read(name)?;
            let before = (table.chains.clone(), table.rules.clone());
            plan(&mut table);
            self.resolve_unreadable(&mut table)?;
            if table.changes.is_empty() {
                return Ok(());
            }
            let output = self.restore(name, &table.changes)?;
            if output.code == Some(0) {
                return Ok(());
            }
            let only_deletes = table
                .changes
                .iter()
                .all(|line| ["-D ", "-F ", "-X "].iter().any(|v| line.starts_with(v)));
            let attempt = Some((before, table.changes.clone()));
            refusals = if attempt == former { refusals + 1 } else { 1 };
            former = attempt;
            if refusals == REFUSALS && only_deletes {
                return self.delete_singly(&table, plan, &output.failure());
            } else if refusals == REFUSALS {
                return Err(output.failure());
            } else if Instant::now() >= until {
                let msg = format!("change iptables table {name}: others kept changing it");
                let cause = output.failure().msg().to_owned();
                return Err(Error::new(Code::TRY_AGAIN, msg).with_details(cause));
            }
        }
    }
}

/// Whether the lock has timed out; deletions of this process do not wait for it again.
static TIMED_OUT: AtomicBool = AtomicBool::new(false);

/// Takes the lock; `None` if its file cannot be created.
fn lock() -> Result<Option<Lock>> {
    match Lock::within(Path::new(LOCK), LOCK_TIMEOUT) {
        Ok(lock) => Ok(Some(lock)),
        Err(error) if error.source.kind() == ErrorKind::TimedOut => {
            TIMED_OUT.store(true, Ordering::Relaxed);
            let error = Error::new(Code::TRY_AGAIN, format!("change iptables: {error}"));
            Err(error.with_details("if that process hangs, end it"))
        }
        Err(_) => Ok(None),
    }
}

/// As [`lock`] for deletions, which continue after a timeout.
fn lock_or_continue() -> Option<Lock> {
    if TIMED_OUT.load(Ordering::Relaxed) {
        return None;
    }
    lock().unwrap_or_else(|error| {
        log::warn(format_args!("{error}; continuing without the lock"));
        None
    })
}

/// The name of the family's program.
pub(super) fn program(family: Family) -> &'static str {
    if family == Family::V4 { "iptables" } else { "ip6tables" }
}

/// The table of `nf_tables` that iptables on top of `nf_tables` stores its table in.
pub(super) fn iptables_table(family: Family, table: &str) -> nftables::Table<'_> {
    nftables::Table::new(family.into(), table)
}

/// The records of the attachments whose rules a feature creates with iptables. A flush is detected by the absence of
/// another attachment's rules, and the rules of all attachments are restored from the records.
pub struct Records<R> {
    /// All records of the feature, records of other back ends included.
    pub kept: Kept,
    /// The table with the rules.
    pub table: &'static str,
    /// Whether the record has rules in this family's table.
    pub is_of: fn(&R, Family) -> bool,
    /// Creates the rules of one record unless they exist.
    pub restore: fn(&mut Table, Family, &Keepsake<R>),
}

impl<R: DeserializeOwned> Records<R> {
    /// The record of another living attachment, whose rules show whether the table was flushed.
    pub fn another(&self, owner: Owner<'_>, family: Family) -> Option<Keepsake<R>> {
        another(self.kept, owner, |content| (self.is_of)(content, family))
    }

    /// Creates the rules of all attachments of this host except those of `but`, unless they exist.
    pub fn restore(&self, table: &mut Table, family: Family, but: Option<Owner<'_>>) {
        for kept in self.kept.living() {
            if (self.is_of)(&kept.content, family) && Some(kept.owner()) != but {
                (self.restore)(table, family, &kept);
            }
        }
    }

    /// The first missing rule of attachments of this host.
    pub fn damage(&self) -> Result<Option<String>> {
        self.heal(Repair::Report)
    }

    /// Looks for the rules of attachments of this host. Returns the first missing rule.
    pub fn heal(&self, repair: Repair) -> Result<Option<String>> {
        let all = self.kept.living();
        let mut used = Family::BOTH.to_vec();
        used.retain(|family| all.iter().any(|kept| (self.is_of)(&kept.content, *family)));
        heal(self.table, &used, &|table, family| self.restore(table, family, None), repair)
    }
}

/// Looks for the rules that `restore` creates in the tables of these families. Returns the first missing rule.
fn heal(
    name: &str,
    families: &[Family],
    restore: &dyn Fn(&mut Table, Family),
    repair: Repair,
) -> Result<Option<String>> {
    let mut missing = None;
    for family in families.iter().copied() {
        let programs = Iptables::require(family)?;
        let mut table = programs.read(name)?;
        restore(&mut table, family);
        programs.resolve_unreadable(&mut table)?;
        if let Some(line) = table.first_change() {
            let program = program(family);
            missing.get_or_insert(format!("\"{line}\" is missing in {program} table {name}"));
            if repair == Repair::Restore {
                programs.update(name, &|table| restore(table, family))?;
            }
        }
    }
    Ok(missing)
}
