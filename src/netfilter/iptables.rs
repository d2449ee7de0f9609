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

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::backend::Family;
use crate::cmd;
use crate::error::{Code, Error, Result};
use crate::store::lock::Lock;

/// Not the lock of iptables itself, which its programs take.
const LOCK: &str = "/run/cnibox-iptables.lock";

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
    list: Option<PathBuf>,
    save: PathBuf,
    restore: PathBuf,
}

impl Iptables {
    /// The programs, where they are installed. Starts nothing.
    pub fn find(family: Family, flavour: Flavour) -> Option<Iptables> {
        let name = program(family, flavour);
        let find = |suffix| cmd::find(&format!("{name}{suffix}"));
        Some(Iptables { list: find(""), save: find("-save")?, restore: find("-restore")? })
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

    /// A table as it is. A legacy table that nobody used yet comes to be.
    pub fn read(&self, table: &str) -> Result<Draft> {
        let text = cmd::run(&self.save, &["-t", table], "")?.require_success()?;
        let foreign = text.lines().find(|l| l.starts_with('#') && l.contains("is incompatible"));
        match foreign {
            Some(line) => Err(Error::internal(format!("read iptables table {table}: {line}"))
                .with_details(
                    "another program changed it with nft; use the back end \"nftables\"",
                )),
            None => Ok(Draft::parse(table, &text)),
        }
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
    /// there is no place for the lock, it goes without.
    pub fn update(&self, table: &str, plan: impl Fn(&mut Draft) -> Result<()>) -> Result<()> {
        let _turn = Lock::exclusive(Path::new(LOCK)).ok();
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
        let _turn = Lock::exclusive(Path::new(LOCK)).ok();
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
    /// while a rule jumps to it.
    pub fn delete_expected(
        &self,
        expected: &Draft,
        plan: impl Fn(&mut Draft) -> Result<()>,
    ) -> Result<()> {
        let _turn = Lock::exclusive(Path::new(LOCK)).ok();
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
        match guess.script() {
            Some(script) => Ok(self.restore(&script)?.code == Some(0)),
            None => Ok(false),
        }
    }

    fn restore(&self, script: &str) -> Result<cmd::Output> {
        cmd::run(&self.restore, &["--noflush", "-w"], script)
    }

    fn update_in_turn(&self, table: &str, plan: impl Fn(&mut Draft) -> Result<()>) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        let (mut tried, mut refusals) = (None, 0);
        loop {
            let mut draft = self.read(table)?;
            let before = (draft.chains.clone(), draft.rules.clone());
            plan(&mut draft)?;
            let Some(script) = draft.script() else { return Ok(()) };
            let output = self.restore(&script)?;
            if output.code == Some(0) {
                return Ok(());
            }
            let attempt = Some((before, script));
            refusals = if attempt == tried { refusals + 1 } else { 1 };
            tried = attempt;
            if refusals == REFUSALS {
                return Err(output.failure());
            }
            if Instant::now() >= until {
                let msg = format!("change iptables table {table}: others kept changing it");
                let said = output.failure().msg().to_owned();
                return Err(Error::new(Code::TRY_AGAIN, msg).with_details(said));
            }
        }
    }
}

fn program(family: Family, flavour: Flavour) -> String {
    let family = match family {
        Family::V4 => "iptables",
        Family::V6 => "ip6tables",
    };
    match flavour {
        Flavour::Default => family.to_owned(),
        Flavour::Nft => format!("{family}-nft"),
        Flavour::Legacy => format!("{family}-legacy"),
    }
}

/// A rule: its chain and the words behind it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The chain that it is in.
    pub chain: String,
    words: Vec<String>,
}

impl Rule {
    /// A rule of `chain` with these words, unquoted: `["-s", "10.0.0.5/32"]`.
    pub fn new<S: Into<String>>(chain: &str, words: impl IntoIterator<Item = S>) -> Rule {
        Rule { chain: chain.to_owned(), words: words.into_iter().map(Into::into).collect() }
    }

    /// More words.
    #[must_use]
    pub fn with<S: Into<String>>(mut self, words: impl IntoIterator<Item = S>) -> Rule {
        self.words.extend(words.into_iter().map(Into::into));
        self
    }

    /// With a comment.
    #[must_use]
    pub fn comment(self, text: &str) -> Rule {
        self.with(["-m", "comment", "--comment", text])
    }

    /// With a target, which comes last.
    #[must_use]
    pub fn target(self, target: &str) -> Rule {
        self.with(["-j", target])
    }

    /// The word behind `option`: of `-s`, `-j`, `--comment`.
    pub fn value(&self, option: &str) -> Option<&str> {
        let at = self.words.iter().position(|word| word == option)?;
        self.words.get(at + 1).map(String::as_str)
    }

    /// Its words behind the chain, unquoted.
    pub fn words(&self) -> &[String] {
        &self.words
    }

    /// Whether it jumps to `target`.
    pub fn goes_to(&self, target: &str) -> bool {
        self.value("-j") == Some(target) || self.value("-g") == Some(target)
    }

    /// The same rule with another target.
    #[must_use]
    pub fn redirected(&self, target: &str) -> Rule {
        let mut rule = self.clone();
        if let Some(at) = rule.words.iter().position(|word| word == "-j") {
            rule.words.truncate(at);
        }
        rule.target(target)
    }

    /// Its words behind the chain, as iptables-restore reads them.
    fn text(&self) -> String {
        self.words.iter().fold(String::new(), |line, word| line + " " + &quoted(word))
    }
}

fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,!+=@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    let mut text = String::from("\"");
    for c in word.chars() {
        if matches!(c, '"' | '\\') {
            text.push('\\');
        }
        // A line is a rule.
        text.push(if c.is_control() { ' ' } else { c });
    }
    text + "\""
}

/// The words of a line of iptables-save.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let (mut in_quotes, mut chars) = (false, line.chars());
    while let Some(c) = chars.next() {
        match c {
            '"' => {
                in_quotes = !in_quotes;
                word.get_or_insert_default();
            }
            '\\' if in_quotes => word.get_or_insert_default().extend(chars.next()),
            ' ' if !in_quotes => words.extend(word.take()),
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// A table as it is, and the changes to come.
#[derive(Clone, Debug)]
pub struct Draft {
    table: String,
    chains: Vec<String>,
    rules: Vec<Rule>,
    changes: Vec<String>,
}

impl Draft {
    /// A table without chains and rules.
    pub fn empty(table: &str) -> Draft {
        Draft::parse(table, "")
    }

    /// The table `table` from what iptables-save printed.
    pub(super) fn parse(table: &str, text: &str) -> Draft {
        let mut draft = Draft {
            table: table.to_owned(),
            chains: Vec::new(),
            rules: Vec::new(),
            changes: Vec::new(),
        };
        for line in text.lines() {
            if let Some(chain) = line.strip_prefix(':') {
                draft.chains.extend(chain.split(' ').next().map(ToOwned::to_owned));
            } else if let Some(rule) = line.strip_prefix("-A ") {
                let mut words = words(rule).into_iter();
                let chain = words.next().unwrap_or_default();
                draft.rules.push(Rule { chain, words: words.collect() });
            }
        }
        draft
    }

    /// Whether the chain is there.
    pub fn has_chain(&self, chain: &str) -> bool {
        self.chains.iter().any(|name| name == chain)
    }

    /// The names of all chains.
    pub fn chains(&self) -> &[String] {
        &self.chains
    }

    /// The rules of all chains, in their order.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// Whether no change is necessary.
    pub fn is_unchanged(&self) -> bool {
        self.changes.is_empty()
    }

    /// Whether the rule is there.
    pub fn has(&self, rule: &Rule) -> bool {
        self.rules.contains(rule)
    }

    /// Creates the chain if it is not there.
    pub fn ensure_chain(&mut self, chain: &str) {
        if !self.has_chain(chain) {
            self.chains.push(chain.to_owned());
            self.changes.push(format!("-N {chain}"));
        }
    }

    /// Appends the rule if it is not there.
    pub fn append_unique(&mut self, rule: Rule) {
        if !self.has(&rule) {
            self.changes.push(format!("-A {}{}", rule.chain, rule.text()));
            self.rules.push(rule);
        }
    }

    /// Inserts the rule at the beginning of its chain if it is not there.
    pub fn insert_unique(&mut self, rule: Rule) {
        if !self.has(&rule) {
            self.changes.push(format!("-I {} 1{}", rule.chain, rule.text()));
            self.rules.insert(0, rule);
        }
    }

    /// Deletes all rules that `which` is true of.
    pub fn del_rules(&mut self, which: impl Fn(&Rule) -> bool) {
        let changes = &mut self.changes;
        self.rules.retain(|rule| {
            let goes = which(rule);
            if goes {
                changes.push(format!("-D {}{}", rule.chain, rule.text()));
            }
            !goes
        });
    }

    /// Deletes the rule, however often it is there.
    pub fn del(&mut self, rule: &Rule) {
        self.del_rules(|present| present == rule);
    }

    /// Deletes the rules of the chain if it is there.
    pub fn flush_chain(&mut self, chain: &str) {
        if self.rules.iter().any(|rule| rule.chain == chain) {
            self.rules.retain(|rule| rule.chain != chain);
            self.changes.push(format!("-F {chain}"));
        }
    }

    /// Deletes the chain with its rules if it is there. Rules that jump to it must go first.
    pub fn del_chain(&mut self, chain: &str) {
        self.flush_chain(chain);
        if self.has_chain(chain) {
            self.chains.retain(|name| name != chain);
            self.changes.push(format!("-X {chain}"));
        }
    }

    /// Deletes the chain with its rules and every rule that jumps to it.
    pub fn uproot_chain(&mut self, chain: &str) {
        self.del_rules(|rule| rule.goes_to(chain));
        self.del_chain(chain);
    }

    /// The changes for iptables-restore; `None` if there are none.
    fn script(&self) -> Option<String> {
        if self.changes.is_empty() {
            return None;
        }
        Some(format!("*{}\n{}\nCOMMIT\n", self.table, self.changes.join("\n")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAVED: &str = r#"# Generated
*nat
:POSTROUTING ACCEPT [3:180]
:CNI-1 - [0:0]
-A POSTROUTING -s 10.1.2.4/32 -m comment --comment "name: \"net\" id: \"c\\1\"" -j CNI-1
-A CNI-1 -d 10.1.2.0/24 -m comment --comment "" -j ACCEPT
-A CNI-1 ! -d 224.0.0.0/4 -m comment --comment plain -j MASQUERADE
COMMIT
"#;

    fn jump() -> Rule {
        Rule::new("POSTROUTING", ["-s", "10.1.2.4/32"])
            .comment("name: \"net\" id: \"c\\1\"")
            .target("CNI-1")
    }

    #[test]
    fn what_is_there_is_not_changed() {
        let mut draft = Draft::parse("nat", SAVED);
        assert_eq!(draft.chains(), ["POSTROUTING", "CNI-1"]);
        assert_eq!(draft.rules()[0], jump());
        assert_eq!(draft.rules()[1].value("--comment"), Some(""));
        draft.ensure_chain("CNI-1");
        draft.append_unique(jump());
        draft.insert_unique(jump());
        draft.del_chain("CNI-2");
        draft.del_rules(|rule| rule.goes_to("CNI-2"));
        assert_eq!(draft.script(), None);
    }

    #[test]
    fn rules_are_written_as_they_are_read() {
        let mut draft = Draft::parse("nat", SAVED);
        for rule in draft.rules().to_vec() {
            assert_eq!(words(&rule.text()), rule.words);
        }
        draft.uproot_chain("CNI-1");
        draft.ensure_chain("CNI-3");
        draft.append_unique(Rule::new("CNI-3", ["-p", "tcp"]).comment("a\nb").target("RETURN"));
        draft.insert_unique(Rule::new("CNI-3", ["-j", "ACCEPT"]));
        let script = draft.script().unwrap();
        let expected = r#"*nat
-D POSTROUTING -s 10.1.2.4/32 -m comment --comment "name: \"net\" id: \"c\\1\"" -j CNI-1
-F CNI-1
-X CNI-1
-N CNI-3
-A CNI-3 -p tcp -m comment --comment "a b" -j RETURN
-I CNI-3 1 -j ACCEPT
COMMIT
"#;
        assert_eq!(script, expected);
    }
}
