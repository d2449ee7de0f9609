//! The model of an iptables table, and the pending changes as lines for iptables-restore.
//!
//! Two checks prevent that a configured value adds commands to the script: every kind of word is
//! validated when the configuration is read ([`require_chain_name`], [`require_words`]), and
//! [`restore_script`] refuses every line with a control character.

use std::collections::HashSet;
use std::hash::{Hash, Hasher};

use cni::error::{Error, Result};

/// The maximum length of a chain name: `XT_EXTENSION_MAXNAMELEN` - 1.
const CHAIN: usize = 28;
/// The maximum length of an interface name: `IFNAMSIZ` - 1.
const INTERFACE: usize = 15;

/// The chains that are built into tables, and the names after `-j` that are no chains: verdicts, and
/// the targets of iptables, 1.8.13. An `iptables -N` with such a name fails.
const NO_CHAINS: &str = "\
    PREROUTING INPUT FORWARD OUTPUT POSTROUTING ACCEPT DROP QUEUE RETURN AUDIT CHECKSUM \
    CLASSIFY CLUSTERIP CONNMARK CONNSECMARK CT DNAT DNPT DSCP ECN HL HMARK IDLETIMER LED LOG \
    MARK MASQUERADE NETMAP NFLOG NFQUEUE NOTRACK RATEEST REDIRECT REJECT SECMARK SET SNAT \
    SNPT SYNPROXY TCPMSS TCPOPTSTRIP TEE TOS TPROXY TRACE TTL ULOG";

/// Refuses an invalid chain name: iptables accepts 1 to 28 bytes without spaces that do not start
/// with `-` or `!`. Quotation marks would have to be escaped where iptables-save does not escape
/// them.
pub fn require_chain_name(key: &str, name: &str) -> Result<()> {
    if NO_CHAINS.split(' ').any(|taken| taken == name) {
        let problem = format!("invalid {key} {name:?}: a built-in chain or a target of iptables");
        return Err(Error::config(problem).with_details("give the chain another name"));
    }
    let is_short = !name.is_empty() && name.len() <= CHAIN;
    if is_short
        && !name.starts_with(['-', '!'])
        && name.chars().all(|c: char| c.is_ascii_graphic() && !matches!(c, '"' | '\'' | '\\'))
    {
        return Ok(());
    }
    Err(Error::config(format!("invalid {key} {name:?}")).with_details(
        "a chain's name has 1 to 28 printable ASCII characters, no spaces and quotation marks, \
         and does not begin with - or !",
    ))
}

/// Refuses an interface name that a rule cannot match: names that the kernel refuses, quotation
/// marks, and a trailing `+`, which is a wildcard in iptables.
pub fn require_interface_name(key: &str, name: &str) -> Result<()> {
    if (1..=INTERFACE).contains(&name.len())
        && !name.contains(|c: char| c.is_control() || c.is_whitespace() || "/\"'\\".contains(c))
        && !name.ends_with('+')
    {
        return Ok(());
    }
    Err(Error::config(format!("invalid interface name {name:?} in {key}")).with_details(
        "a rule names an interface by 1 to 15 bytes, without spaces, slashes and quotation marks, \
         and without + at the end",
    ))
}

/// Refuses words with control characters, such as line breaks, and options that select a family:
/// iptables-restore reads over the rules of the other one.
pub fn require_words(key: &str, words: &[String]) -> Result<()> {
    let families = ["-4", "-6", "--ipv4", "--ipv6"];
    if let Some(word) = words.iter().find(|word| families.contains(&word.as_str())) {
        return Err(Error::config(format!("invalid word {word:?} in {key}"))
            .with_details("leave it out: conditionsV4 is for IPv4, conditionsV6 for IPv6"));
    }
    match words.iter().find(|word| word.contains(char::is_control)) {
        Some(word) => Err(Error::config(format!("invalid word {word:?} in {key}"))
            .with_details("a word of iptables has no control characters, such as line breaks")),
        None => Ok(()),
    }
}

/// A rule: its chain and its arguments. Its number is not compared.
#[derive(Clone, Debug)]
pub struct IptablesRule {
    pub chain: String,
    /// The arguments after the chain, unquoted.
    pub words: Vec<String>,
    /// The kernel's number of a rule that was read over netlink, else 0.
    pub(super) handle: u64,
}

impl PartialEq for IptablesRule {
    fn eq(&self, other: &IptablesRule) -> bool {
        (&self.chain, &self.words) == (&other.chain, &other.words)
    }
}

impl Eq for IptablesRule {}

impl Hash for IptablesRule {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.chain, &self.words).hash(state);
    }
}

impl IptablesRule {
    /// A rule of `chain` without arguments: it matches every packet and does nothing.
    pub fn new(chain: &str) -> IptablesRule {
        IptablesRule { chain: chain.to_owned(), words: Vec::new(), handle: 0 }
    }

    /// Appends arguments, unquoted: `["-s", "10.0.0.5/32"]`.
    #[must_use]
    pub fn with_words(mut self, words: &[impl AsRef<str>]) -> IptablesRule {
        self.words.extend(words.iter().map(|word| word.as_ref().to_owned()));
        self
    }

    /// Appends a comment. Control characters, which interface names may contain, become spaces.
    #[must_use]
    pub fn with_comment(self, text: &str) -> IptablesRule {
        let text = text.replace(char::is_control, " ");
        self.with_words(&["-m", "comment", "--comment", &text])
    }

    /// Appends the target, which comes last.
    #[must_use]
    pub fn with_target(self, target: &str) -> IptablesRule {
        self.with_words(&["-j", target])
    }

    /// The argument of an option: of `-s`, `-j`, `--comment`.
    pub fn option_value(&self, option: &str) -> Option<&str> {
        let at = self.words.iter().position(|word| word == option)?;
        self.words.get(at + 1).map(String::as_str)
    }

    /// Whether the rule has these words of the same chain one after the other.
    pub(super) fn has_words_of(&self, part: &IptablesRule) -> bool {
        let mut places = self.words.windows(part.words.len().max(1));
        self.chain == part.chain && places.any(|words| words == part.words)
    }

    /// Whether `target` is the target of the rule, by a jump or a goto.
    pub fn goes_to(&self, target: &str) -> bool {
        self.option_value("-j") == Some(target) || self.option_value("-g") == Some(target)
    }

    /// The arguments as iptables-restore reads them, each after a space.
    pub(in crate::netfilter) fn quoted_words(&self) -> String {
        self.words.iter().fold(String::new(), |line, word| line + " " + &quote_word(word))
    }
}

fn quote_word(word: &str) -> String {
    if !word.is_empty()
        && word.chars().all(|c: char| c.is_ascii_alphanumeric() || "-_./:,!+=@%".contains(c))
    {
        return word.to_owned();
    }
    format!("\"{}\"", word.replace('\\', "\\\\").replace('"', "\\\""))
}

/// Splits a line of iptables-save into words.
pub(super) fn split_words(line: &str) -> Vec<String> {
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

#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::netfilter) enum TableChange {
    NewChain(String),
    Append(IptablesRule),
    /// After the first rules of the chain.
    Insert {
        rule: IptablesRule,
        after: usize,
        /// The last of these, if it was read over netlink.
        previous: Option<IptablesRule>,
    },
    Delete(IptablesRule),
    Flush(String),
    DeleteChain(String),
}

impl TableChange {
    /// The line for iptables-restore.
    fn script_line(&self) -> String {
        let with = |command: &str, rule: &IptablesRule| {
            format!("{command} {}{}", rule.chain, rule.quoted_words())
        };
        match self {
            TableChange::NewChain(chain) => format!("-N {chain}"),
            TableChange::Append(rule) => with("-A", rule),
            TableChange::Insert { rule, after, .. } => {
                format!("-I {} {}{}", rule.chain, after + 1, rule.quoted_words())
            }
            TableChange::Delete(rule) => with("-D", rule),
            TableChange::Flush(chain) => format!("-F {chain}"),
            TableChange::DeleteChain(chain) => format!("-X {chain}"),
        }
    }
}

/// A table as it was read, with the pending changes applied.
#[derive(Clone, Debug, Default)]
pub struct IptablesTable {
    /// `nat`, `filter`, `raw`.
    pub name: String,
    /// The names of the chains that were read.
    pub chains: Vec<String>,
    /// The rules of these chains in their order.
    pub rules: Vec<IptablesRule>,
    /// Whether only some chains were read.
    pub(super) is_partial: bool,
    /// The chains of which only the beginning was read.
    pub(super) beginnings: Vec<String>,
    /// Whether a plan needs more chains than were read.
    pub(super) is_insufficient: bool,
    /// The pending changes.
    pub(super) changes: Vec<TableChange>,
}

impl IptablesTable {
    /// A table without chains and rules.
    pub fn new_empty(name: &str) -> IptablesTable {
        IptablesTable { name: name.to_owned(), ..IptablesTable::default() }
    }

    /// Parses the output of iptables-save.
    pub fn parse_save_output(name: &str, text: &str) -> IptablesTable {
        let mut table = IptablesTable::new_empty(name);
        for line in text.lines() {
            if let Some(chain) = line.strip_prefix(':') {
                table.chains.extend(chain.split(' ').next().map(ToOwned::to_owned));
            } else if let Some(rule) = line.strip_prefix("-A ") {
                let mut words = split_words(rule).into_iter();
                let chain = words.next().unwrap_or_default();
                table.rules.push(IptablesRule { chain, words: words.collect(), handle: 0 });
            }
        }
        table
    }

    /// Whether a rule has these words of the same chain one after the other.
    pub fn has_words_of(&self, part: &IptablesRule) -> bool {
        self.rules.iter().any(|rule| rule.has_words_of(part))
    }

    /// Whether more than the beginning of the chain was read.
    pub fn has_read(&self, chain: &str) -> bool {
        !self.beginnings.iter().any(|name| name == chain)
    }

    /// Makes the plan start again with all chains, if only some were read.
    pub fn require_all_chains(&mut self) {
        self.is_insufficient |= self.is_partial;
    }

    /// The first pending change, as text.
    pub fn first_change(&self) -> Option<String> {
        self.changes.first().map(TableChange::script_line)
    }

    /// The first pending rule that the table lacked `before`, else the first pending change, as
    /// text.
    pub fn first_difference(&self, before: &IptablesTable) -> Option<String> {
        self.changes
            .iter()
            .find(|change| match change {
                TableChange::Append(rule) | TableChange::Insert { rule, .. } => {
                    !before.has_rule(rule)
                }
                _ => false,
            })
            .or(self.changes.first())
            .map(TableChange::script_line)
    }

    /// Whether the chain exists.
    pub fn has_chain(&self, chain: &str) -> bool {
        self.chains.iter().any(|name| name == chain)
    }

    pub fn rules_of_chain(&self, chain: &str) -> impl Iterator<Item = &IptablesRule> {
        self.rules.iter().filter(move |rule| rule.chain == chain)
    }

    /// Whether the rule exists.
    pub fn has_rule(&self, rule: &IptablesRule) -> bool {
        self.rules.contains(rule)
    }

    /// Like [`has_rule`](IptablesTable::has_rule), for a plan that adds the rule otherwise: it may
    /// be in the part of its chain that was not read.
    fn has_rule_or_rest(&mut self, rule: &IptablesRule) -> bool {
        let found = self.has_rule(rule);
        self.is_insufficient |= !found && !self.has_read(&rule.chain);
        found
    }

    /// Creates the chain unless it exists.
    pub fn ensure_chain(&mut self, chain: &str) {
        if !self.has_chain(chain) {
            self.chains.push(chain.to_owned());
            self.changes.push(TableChange::NewChain(chain.to_owned()));
        }
    }

    /// Appends the rule unless it exists.
    pub fn append_unique(&mut self, rule: IptablesRule) {
        if !self.has_rule_or_rest(&rule) {
            self.append(rule);
        }
    }

    /// Appends a rule that cannot be in the part of its chain that was not read, unless it exists.
    pub fn append_new(&mut self, rule: IptablesRule) {
        if !self.has_rule(&rule) {
            self.append(rule);
        }
    }

    fn append(&mut self, rule: IptablesRule) {
        let rule = IptablesRule { handle: 0, ..rule };
        self.changes.push(TableChange::Append(rule.clone()));
        self.rules.push(rule);
    }

    /// Like [`append_new`](IptablesTable::append_new), for many rules, in linear time.
    pub fn append_all_unique(&mut self, rules: Vec<IptablesRule>) {
        let mut present: HashSet<&IptablesRule> = self.rules.iter().collect();
        let is_new: Vec<bool> = rules.iter().map(|rule| present.insert(rule)).collect();
        for (rule, _) in rules.into_iter().zip(is_new).filter(|(_, is_new)| *is_new) {
            self.append(rule);
        }
    }

    /// Inserts the rule after the first `skip` rules of its chain unless it exists.
    pub fn insert_unique(&mut self, skip: usize, rule: IptablesRule) {
        if !self.has_rule_or_rest(&rule) {
            let rule = IptablesRule { handle: 0, ..rule };
            let present = self.rules_of_chain(&rule.chain).filter(|rule| rule.handle != 0);
            let previous = present.take(skip).last().cloned();
            self.changes.push(TableChange::Insert { rule: rule.clone(), after: skip, previous });
            self.rules.insert(0, rule);
        }
    }

    pub fn delete_duplicates(&mut self, rule: &IptablesRule) {
        let copies: Vec<IptablesRule> =
            self.rules.extract_if(.., |present| present == rule).collect();
        self.changes.extend(copies.iter().skip(1).cloned().map(TableChange::Delete));
        self.rules.extend(copies.into_iter().take(1));
    }

    /// Deletes the rules for which `which` returns true.
    pub fn delete_rules(&mut self, which: impl Fn(&IptablesRule) -> bool) {
        let deleted = self.rules.extract_if(.., |rule| which(rule));
        self.changes.extend(deleted.map(TableChange::Delete));
    }

    /// Deletes the rules of the chain.
    pub fn flush_chain(&mut self, chain: &str) {
        if self.rules_of_chain(chain).next().is_some() {
            self.rules.retain(|rule| rule.chain != chain);
            self.changes.push(TableChange::Flush(chain.to_owned()));
        }
    }

    /// Deletes the chain with its rules if it exists. No rule may jump to it.
    pub fn delete_chain(&mut self, chain: &str) {
        self.flush_chain(chain);
        if self.has_chain(chain) {
            self.chains.retain(|name| name != chain);
            self.changes.push(TableChange::DeleteChain(chain.to_owned()));
        }
    }

    /// Like [`delete_chain`](IptablesTable::delete_chain), unless a rule jumps to the chain.
    pub fn delete_unused_chain(&mut self, chain: &str) {
        if !self.rules.iter().any(|rule| rule.goes_to(chain)) {
            self.delete_chain(chain);
        }
    }

    /// Deletes the chain with its rules and every rule that jumps to it.
    pub fn delete_chain_and_jumps(&mut self, chain: &str) {
        self.delete_rules(|rule| rule.goes_to(chain));
        self.delete_chain(chain);
    }
}

/// The input of iptables-restore for these changes of a table. Fails if a line has a control
/// character.
pub(super) fn restore_script(name: &str, changes: &[TableChange]) -> Result<String> {
    let lines: Vec<String> = changes.iter().map(TableChange::script_line).collect();
    match lines.iter().find(|line| line.contains(char::is_control)) {
        Some(line) => {
            let msg = format!("refuse to change iptables: control character in line {line:?}");
            Err(Error::internal(msg))
        }
        None => Ok(format!("*{name}\n{}\nCOMMIT\n", lines.join("\n"))),
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

    fn jump() -> IptablesRule {
        IptablesRule::new("POSTROUTING")
            .with_words(&["-s", "10.1.2.4/32"])
            .with_comment("name: \"net\" id: \"c\\1\"")
            .with_target("CNI-1")
    }

    #[test]
    fn existing_objects_are_not_changed() {
        let mut table = IptablesTable::parse_save_output("nat", SAVED);
        assert_eq!(table.chains, ["POSTROUTING", "CNI-1"]);
        assert_eq!(table.rules[0], jump());
        assert_eq!(table.rules[1].option_value("--comment"), Some(""));
        table.ensure_chain("CNI-1");
        table.append_unique(jump());
        table.insert_unique(0, jump());
        table.delete_chain("CNI-2");
        table.delete_rules(|rule| rule.goes_to("CNI-2"));
        assert!(table.changes.is_empty());
    }

    #[test]
    fn a_plan_that_needs_the_rest_of_a_chain_is_insufficient() {
        let beginning = || {
            let table = IptablesTable::parse_save_output("nat", SAVED);
            IptablesTable { beginnings: vec!["POSTROUTING".to_owned()], ..table }
        };
        let absent = || IptablesRule::new("POSTROUTING").with_target("CNI-2");
        let plans: [fn(&mut IptablesTable, IptablesRule); 3] = [
            IptablesTable::append_unique,
            |table, rule| table.insert_unique(0, rule),
            IptablesTable::append_new,
        ];
        for (plan, needs_rest) in plans.into_iter().zip([true, true, false]) {
            let mut table = beginning();
            plan(&mut table, jump());
            assert!(!table.is_insufficient && table.changes.is_empty());
            plan(&mut table, absent());
            assert_eq!((table.is_insufficient, table.changes.len()), (needs_rest, 1));
        }
        let table = beginning();
        assert!(table.has_words_of(&IptablesRule::new("POSTROUTING").with_target("CNI-1")));
        assert!(!table.has_words_of(&absent()));
    }

    #[test]
    fn rules_are_written_as_iptables_save_prints_them() {
        let mut table = IptablesTable::parse_save_output("nat", SAVED);
        for rule in table.rules.clone() {
            assert_eq!(split_words(&rule.quoted_words()), rule.words);
        }
        table.delete_chain_and_jumps("CNI-1");
        table.ensure_chain("CNI-3");
        table.append_unique(
            IptablesRule::new("CNI-3")
                .with_words(&["-p", "tcp"])
                .with_comment("a\nb")
                .with_target("RETURN"),
        );
        table.insert_unique(0, IptablesRule::new("CNI-3").with_target("ACCEPT"));
        let script = restore_script("nat", &table.changes).unwrap();
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

    #[test]
    fn chain_names_are_validated_as_iptables_does() {
        for good in ["CNI-ADMIN", "a", "k8s.fw:1#_", "0123456789012345678901234567"] {
            assert_eq!(require_chain_name("key", good), Ok(()), "{good}");
        }
        for taken in ["ACCEPT", "INPUT", "MARK", "POSTROUTING", "ULOG"] {
            let error = require_chain_name("key", taken).unwrap_err();
            let problem =
                format!("invalid key {taken:?}: a built-in chain or a target of iptables");
            assert_eq!((error.code().0, error.message()), (7, &*problem));
        }
        let long = "01234567890123456789012345678";
        for bad in
            ["", long, "-X", "!X", "a b", "a\nb", "a\tb", "a\"b", "a\\b", "ä", "a\0", "a\u{85}"]
        {
            let error = require_chain_name("key", bad).unwrap_err();
            assert_eq!((error.code().0, error.message()), (7, &*format!("invalid key {bad:?}")));
        }
    }

    #[test]
    fn words_with_control_characters_are_refused() {
        assert!(require_words("key", &["!".to_owned(), "a \"b\"".to_owned()]).is_ok());
        let error = require_words("key", &["-s".to_owned(), "a\nCOMMIT".to_owned()]).unwrap_err();
        assert_eq!((error.code().0, error.message()), (7, r#"invalid word "a\nCOMMIT" in key"#));
        let error = require_words("key", &["-6".to_owned()]).unwrap_err();
        assert_eq!((error.code().0, error.message()), (7, "invalid word \"-6\" in key"));
        for bad in ["", "sixteen-bytes-xx", "a b", "a/b", "br\n0", "br\"0", "br+"] {
            assert_eq!(require_interface_name("key", bad).unwrap_err().code().0, 7, "{bad}");
        }
        assert!(require_interface_name("key", "br0.100").is_ok());
    }

    #[test]
    fn scripts_with_control_characters_are_refused() {
        for chain in ["X\nCOMMIT", "X\r", "X\0"] {
            let mut table = IptablesTable::new_empty("nat");
            table.ensure_chain(chain);
            assert!(restore_script("nat", &table.changes).is_err(), "{chain:?}");
        }
        let mut table = IptablesTable::new_empty("nat");
        table.append_unique(IptablesRule::new("X").with_words(&["-s", "a\nb"]));
        assert!(restore_script("nat", &table.changes).is_err());
        let rule = IptablesRule::new("X").with_comment("if: e\u{1}h");
        assert_eq!(
            split_words(&rule.quoted_words()),
            rule.words,
            "a comment is found as it was written"
        );
    }
}
