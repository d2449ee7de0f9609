//! iptables: one `iptables-save` to read a table, at most one `iptables-restore` to change it.
//!
//! A table may have tens of thousands of rules of others, which take long to read. What finds the
//! table as it expects it does without: [`Iptables::add_expected`], [`Iptables::delete_expected`].
//!
//! A [`Table`] is a table as it is read. Changes to it are only those that are necessary, so the
//! same plan can run twice; [`Iptables::update`] makes them in one transaction, and plans again if
//! another program changed the table in between. Rules are compared word by word with what
//! `iptables-save` prints: write them in its order (addresses and interfaces, protocol, matches,
//! target) and with masks.
//!
//! | file | |
//! | --- | --- |
//! | `table.rs` | a table, its rules, and the changes to come |
//! | `records.rs` | rules that come back after a flush |
//! | `incompatible.rs` | tables that iptables-save cannot print, rules that cannot be deleted together |

mod incompatible;
mod records;
pub mod table;

use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ::iptables::IPTables;

pub use self::records::Records;
pub use self::table::{Rule, Table};
use crate::cmd;
use crate::error::{Code, Error, Result};
use crate::files::lock::Lock;
use crate::log;
use crate::netlink::{Family, nftables};
use crate::netns;

/// Not the lock of iptables itself, which its programs take.
const LOCK: &str = "/run/cnibox-iptables.lock";

/// How long a turn is waited for: on a node with tens of thousands of rules a change takes a second,
/// and a hundred pods may be started at once.
const TURN: Duration = Duration::from_secs(30);

/// How long a change is planned again while other programs change the table, too.
const REPLANNING: Duration = Duration::from_secs(10);

/// How often the same change of the same table fails before it is believed to be refused. Others
/// may come and go between two looks, and a busy kernel refuses for a moment.
const REFUSALS: usize = 4;

/// Which of the two implementations of iptables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavour {
    /// The node's default implementation: `iptables`.
    Default,
    /// On top of `nf_tables`: `iptables-nft`.
    Nft,
    /// The old one: `iptables-legacy`.
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
    /// The programs, where they are installed. Starts nothing.
    pub fn find(family: Family, flavour: Flavour) -> Option<Iptables> {
        let name = program(family, flavour);
        let find = |suffix| cmd::find(&format!("{name}{suffix}"));
        let (list, save, restore) = (find(""), find("-save")?, find("-restore")?);
        Some(Iptables { family, list, save, restore })
    }

    /// The programs of the flavour; where they are not installed by that name, the node's own.
    pub fn find_or_default(family: Family, flavour: Flavour) -> Option<Iptables> {
        Iptables::find(family, flavour).or_else(|| Iptables::find(family, Flavour::Default))
    }

    /// The node's own programs.
    pub fn require(family: Family) -> Result<Iptables> {
        let name = program(family, Flavour::Default);
        Iptables::find(family, Flavour::Default).ok_or_else(|| {
            Error::internal(format!("failed to locate iptables: no {name}-restore in PATH"))
                .with_details("install iptables, or choose the back end \"nftables\"")
        })
    }

    /// A table as it is. Reading a legacy table creates it if it was never used. Of a table that iptables
    /// cannot show, what it can.
    pub fn read(&self, name: &str) -> Result<Table> {
        let text = cmd::run(&self.save, &["-t", name], "")?.require_success()?;
        if text.lines().any(|line| line.starts_with('#') && line.contains("is incompatible")) {
            return self.read_parts(name);
        }
        // Where reading fails in the middle, it says so nowhere else.
        if text.contains(&format!("*{name}\n")) && !text.contains("\nCOMMIT\n") {
            let msg = format!("read iptables table {name}: iptables-save ended too early");
            return Err(Error::new(Code::TRY_AGAIN, msg));
        }
        Ok(Table::parse(name, &text))
    }

    /// The lines of a built-in chain, its policy among them; `None` if it cannot be listed. The crate tells no
    /// failure, so that the line with the policy has to be there.
    pub fn list(&self, table: &str, chain: &str) -> Option<Vec<String>> {
        // `new` would start `iptables --version`, and `has_wait` wait without a limit.
        let cmd = self.list.as_deref().and_then(Path::to_str)?.to_owned().leak();
        let programs = IPTables { cmd, has_check: true, has_wait: false, is_numeric: false };
        netns::at_home().ok()?;
        let policy = format!("-P {chain} ");
        let is_whole = |lines: &Vec<String>| lines.iter().any(|line| line.starts_with(&policy));
        programs.list(table, chain).ok().filter(is_whole)
    }

    /// One chain of a table as it is; `None` if it cannot be had, for example because there is none.
    pub fn read_chain(&self, name: &str, chain: &str) -> Option<Table> {
        let list = self.list.as_deref()?;
        let output = cmd::run(list, &["-w", "-t", name, "-S", chain], "").ok()?;
        Some(Table::parse(name, &output.require_success().ok()?))
    }

    /// Reads a table and makes the changes that `plan` finds necessary: all, or none.
    ///
    /// One process of ours at a time: on `nf_tables` iptables-restore makes its changes to
    /// whatever is there by then, so that two that insert the same rule would both succeed. Where
    /// the lock file cannot be created, there is no lock; a lock that is held too long is an error.
    pub fn update(&self, name: &str, plan: &dyn Fn(&mut Table)) -> Result<()> {
        let _turn = turn()?;
        self.update_in_turn(name, plan)
    }

    /// Adds as [`Iptables::update`] does, but first to what `expect` says is there of it: if
    /// the rules of that are there, and none of the chains that `plan` makes, nothing more is read.
    /// What `plan` adds must be in a chain it makes, or jump to one, since of such rules there can
    /// be none before; or `expect` has looked.
    pub fn add_expected(
        &self,
        name: &str,
        expect: impl FnOnce() -> Option<Table>,
        plan: &dyn Fn(&mut Table),
    ) -> Result<()> {
        let _turn = turn()?;
        if let Some(expected) = expect() {
            let checks = expected.rules.iter().map(|rule| rule.line("-C")).collect();
            if self.try_expected(&expected, checks, plan)? {
                return Ok(());
            }
        }
        self.update_in_turn(name, plan)
    }

    /// Deletes as [`Iptables::update`] does, but first what `expected` makes `plan` delete: if all
    /// of that was there, the table is not read, however many rules of others it has. So `plan`
    /// must be such that its deletions fail where more is to be done, as the deletion of a chain does
    /// while a rule jumps to it. It goes on where another process holds the lock: a container that
    /// cannot be deleted is worse than a rule that is deleted twice.
    pub fn delete_expected(&self, expected: &Table, plan: &dyn Fn(&mut Table)) -> Result<()> {
        let _turn = turn_or_none();
        if self.try_expected(expected, Vec::new(), plan)? {
            return Ok(());
        }
        self.update_in_turn(&expected.name, plan)
    }

    /// Makes the changes that `plan` finds necessary in `expected`, after `checks`; whether the
    /// table was such that they could be made.
    fn try_expected(
        &self,
        expected: &Table,
        checks: Vec<String>,
        plan: &dyn Fn(&mut Table),
    ) -> Result<bool> {
        let mut guess = Table { changes: checks, ..expected.clone() };
        plan(&mut guess);
        match guess.script()? {
            Some(script) => Ok(self.restore(&script)?.code == Some(0)),
            None => Ok(false),
        }
    }

    fn restore(&self, script: &str) -> Result<cmd::Output> {
        cmd::run(&self.restore, &["--noflush", "-w"], script)
    }

    fn update_in_turn(&self, name: &str, plan: &dyn Fn(&mut Table)) -> Result<()> {
        let until = Instant::now() + REPLANNING;
        let (mut tried, mut refusals) = (None, 0);
        loop {
            let mut table = self.read(name)?;
            let before = (table.chains.clone(), table.rules.clone());
            plan(&mut table);
            self.settle(&mut table)?;
            let Some(script) = table.script()? else { return Ok(()) };
            let output = self.restore(&script)?;
            if output.code == Some(0) {
                return Ok(());
            }
            let attempt = Some((before, script));
            refusals = if attempt == tried { refusals + 1 } else { 1 };
            tried = attempt;
            if refusals == REFUSALS {
                let refusal = output.failure();
                return if table.only_deletes() {
                    self.delete_singly(&table, plan, &refusal)
                } else {
                    Err(refusal)
                };
            }
            if Instant::now() >= until {
                let msg = format!("change iptables table {name}: others kept changing it");
                let said = output.failure().msg().to_owned();
                return Err(Error::new(Code::TRY_AGAIN, msg).with_details(said));
            }
        }
    }
}

/// Whether the turn was waited for in vain; no deletion of this call waits again.
static GAVE_UP: AtomicBool = AtomicBool::new(false);

/// The turn at changing iptables; none where there is no place for its lock.
fn turn() -> Result<Option<Lock>> {
    match Lock::within(Path::new(LOCK), TURN) {
        Ok(lock) => Ok(Some(lock)),
        Err(error) if error.source.kind() == ErrorKind::TimedOut => {
            GAVE_UP.store(true, Ordering::Relaxed);
            let error = Error::new(Code::TRY_AGAIN, format!("change iptables: {error}"));
            Err(error.with_details("if that process hangs, end it"))
        }
        Err(_) => Ok(None),
    }
}

/// The same for a deletion, which goes on without.
fn turn_or_none() -> Option<Lock> {
    if GAVE_UP.load(Ordering::Relaxed) {
        return None;
    }
    turn().unwrap_or_else(|error| {
        log::warn(format_args!("{error}; going on without"));
        None
    })
}

/// As its programs are named.
impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Family::V4 { "iptables" } else { "ip6tables" })
    }
}

/// The table that iptables on top of `nf_tables` keeps its table in.
pub(super) fn iptables_table(family: Family, table: &str) -> nftables::Table<'_> {
    nftables::Table::new(family.into(), table)
}

fn program(family: Family, flavour: Flavour) -> String {
    match flavour {
        Flavour::Default => family.to_string(),
        Flavour::Nft => format!("{family}-nft"),
        Flavour::Legacy => format!("{family}-legacy"),
    }
}
