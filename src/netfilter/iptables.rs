//! iptables: one `iptables-save` to read a table, at most one `iptables-restore` to change it.
//!
//! A table may have tens of thousands of rules of others, which take long to read. What finds the
//! table as it expects it does without: [`Iptables::add_expected`], [`Iptables::delete_expected`].
//!
//! A [`Draft`] is a table as it is read. Changes to it are only those that are necessary, so the
//! same plan can run twice; [`Iptables::update`] makes them in one transaction, and plans again if
//! another program changed the table in between. Rules are compared word by word with what
//! `iptables-save` prints: write them in its order (addresses and interfaces, protocol, matches,
//! target) and with masks.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::backend::Family;
pub use super::draft::{Draft, Rule};
use crate::cmd;
use crate::error::{Code, Error, Result};
use crate::log;
use crate::store::lock::Lock;

/// Not the lock of iptables itself, which its programs take.
const LOCK: &str = "/run/cnibox-iptables.lock";

/// How long a turn is waited for: on a node with tens of thousands of rules a change takes a second,
/// and a hundred pods may be started at once.
const TURN: Duration = Duration::from_secs(30);

/// How long a change is planned anew that other programs get in the way of.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often the same change of the same table fails before it is believed to be refused. Others
/// may come and go between two looks, and a busy kernel refuses for a moment.
const REFUSALS: usize = 4;

/// Which of the two implementations of iptables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flavour {
    /// The one that the node has chosen: `iptables`.
    Default,
    /// On top of `nf_tables`: `iptables-nft`.
    Nft,
    /// The old one: `iptables-legacy`.
    Legacy,
}

/// The programs for one family.
#[derive(Clone, Debug)]
pub struct Iptables {
    pub(super) family: Family,
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

    /// The programs of each flavour; where they are not installed by that name, the node's own.
    pub fn find_each(family: Family, flavours: [Option<Flavour>; 2]) -> Vec<Iptables> {
        let find = |flavour| {
            Iptables::find(family, flavour).or_else(|| Iptables::find(family, Flavour::Default))
        };
        flavours.into_iter().flatten().filter_map(find).collect()
    }

    /// The node's own programs.
    pub fn require(family: Family) -> Result<Iptables> {
        let name = program(family, Flavour::Default);
        Iptables::find(family, Flavour::Default).ok_or_else(|| {
            Error::internal(format!("failed to locate iptables: no {name}-restore in PATH"))
                .with_details("install iptables, or choose the back end \"nftables\"")
        })
    }

    /// A table as it is. A legacy table that nobody used yet comes to be. Of one that iptables
    /// cannot show, what it can.
    pub fn read(&self, table: &str) -> Result<Draft> {
        let text = cmd::run(&self.save, &["-t", table], "")?.require_success()?;
        if text.lines().any(|line| line.starts_with('#') && line.contains("is incompatible")) {
            return self.read_parts(table);
        }
        // Where reading fails in the middle, it says so nowhere else.
        if text.contains(&format!("*{table}\n")) && !text.contains("\nCOMMIT\n") {
            let msg = format!("read iptables table {table}: iptables-save ended too early");
            return Err(Error::new(Code::TRY_AGAIN, msg));
        }
        Ok(Draft::parse(table, &text))
    }

    /// One chain of a table as it is; `None` if it cannot be had, for example because there is none.
    pub fn read_chain(&self, table: &str, chain: &str) -> Option<Draft> {
        let list = self.list.as_deref()?;
        let output = cmd::run(list, &["-w", "-t", table, "-S", chain], "").ok()?;
        Some(Draft::parse(table, &output.require_success().ok()?))
    }

    /// Reads a table and makes the changes that `plan` finds necessary: all, or none.
    ///
    /// One process of ours at a time: on `nf_tables` iptables-restore makes its changes to
    /// whatever is there by then, so that two that insert the same rule would both succeed. Where
    /// there is no place for the lock, it goes without; one that is held too long is an error.
    pub fn update(&self, table: &str, plan: impl Fn(&mut Draft) -> Result<()>) -> Result<()> {
        let _turn = turn()?;
        self.update_in_turn(table, plan)
    }

    /// Adds as [`Iptables::update`] does, but first to what `expect` says is there of `table`: if
    /// the rules of that are there, and none of the chains that `plan` makes, nothing more is read.
    /// What `plan` adds must be in a chain it makes, or jump to one, since of such rules there can
    /// be none before; or `expect` has looked.
    pub fn add_expected(
        &self,
        table: &str,
        expect: impl FnOnce() -> Option<Draft>,
        plan: impl Fn(&mut Draft) -> Result<()>,
    ) -> Result<()> {
        let _turn = turn()?;
        if let Some(expected) = expect() {
            let check = |rule: &Rule| format!("-C {}{}", rule.chain, rule.text());
            let checks = expected.rules.iter().map(check).collect();
            if self.try_expected(&expected, checks, &plan)? {
                return Ok(());
            }
        }
        self.update_in_turn(table, plan)
    }

    /// Deletes as [`Iptables::update`] does, but first what `expected` makes `plan` delete: if all
    /// of that was there, the table is not read, however many rules of others it has. So `plan`
    /// must be such that its deletions fail where more is to be done, as that of a chain does
    /// while a rule jumps to it. It goes on where somebody holds the lock: a container that cannot be
    /// deleted is worse than a rule that is deleted twice.
    pub fn delete_expected(
        &self,
        expected: &Draft,
        plan: impl Fn(&mut Draft) -> Result<()>,
    ) -> Result<()> {
        let _turn = turn_or_none();
        if self.try_expected(expected, Vec::new(), &plan)? {
            return Ok(());
        }
        self.update_in_turn(&expected.table, plan)
    }

    /// Makes the changes that `plan` finds necessary in `expected`, after `checks`; whether the
    /// table was such that they could be made.
    fn try_expected(
        &self,
        expected: &Draft,
        checks: Vec<String>,
        plan: impl Fn(&mut Draft) -> Result<()>,
    ) -> Result<bool> {
        let mut guess = Draft { changes: checks, ..expected.clone() };
        plan(&mut guess)?;
        match guess.script()? {
            Some(script) => Ok(self.restore(&script)?.code == Some(0)),
            None => Ok(false),
        }
    }

    pub(super) fn restore(&self, script: &str) -> Result<cmd::Output> {
        cmd::run(&self.restore, &["--noflush", "-w"], script)
    }

    fn update_in_turn(&self, table: &str, plan: impl Fn(&mut Draft) -> Result<()>) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        let (mut tried, mut refusals) = (None, 0);
        loop {
            let mut draft = self.read(table)?;
            let before = (draft.chains.clone(), draft.rules.clone());
            plan(&mut draft)?;
            self.settle(&mut draft)?;
            let Some(script) = draft.script()? else { return Ok(()) };
            let output = self.restore(&script)?;
            if output.code == Some(0) {
                return Ok(());
            }
            let attempt = Some((before, script));
            refusals = if attempt == tried { refusals + 1 } else { 1 };
            tried = attempt;
            if refusals == REFUSALS {
                let refusal = output.failure();
                return if draft.only_deletes() {
                    self.delete_singly(&draft, plan, &refusal)
                } else {
                    Err(refusal)
                };
            }
            if Instant::now() >= until {
                let msg = format!("change iptables table {table}: others kept changing it");
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

/// What `restore` would have to make again in the node's own iptables: the first line of it.
pub(super) fn missed(
    family: Family,
    table: &str,
    restore: impl Fn(&mut Draft),
) -> Result<Option<String>> {
    let tables = Iptables::require(family)?;
    let mut draft = tables.read(table)?;
    restore(&mut draft);
    tables.settle(&mut draft)?;
    let missed = |line: &String| format!("\"{line}\" is missing in {family} table {table}");
    Ok(draft.first_change().map(missed))
}

/// Restores what is missed; what was wrong.
pub(super) fn revive(
    family: Family,
    table: &str,
    restore: impl Fn(&mut Draft),
) -> Result<Option<String>> {
    let trouble = missed(family, table, &restore)?;
    if trouble.is_some() {
        Iptables::require(family)?.update(table, |draft| {
            restore(draft);
            Ok(())
        })?;
    }
    Ok(trouble)
}

fn program(family: Family, flavour: Flavour) -> String {
    match flavour {
        Flavour::Default => family.to_string(),
        Flavour::Nft => format!("{family}-nft"),
        Flavour::Legacy => format!("{family}-legacy"),
    }
}
