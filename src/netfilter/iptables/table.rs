//! The model of an iptables table, and the pending changes as lines for iptables-restore.
//!
//! Two checks prevent that a configured value adds commands to the script: every kind of word is validated when
//! the configuration is read ([`require_chain`], [`require_words`]), and [`script`] refuses every line with a
//! control character.

use std::collections::HashSet;

use crate::error::{Error, Result};

/// The maximum length of a chain name: `XT_EXTENSION_MAXNAMELEN` - 1.
const CHAIN: usize = 28;
/// The maximum length of an interface name: `IFNAMSIZ` - 1.
const INTERFACE: usize = 15;

/// Refuses an invalid chain name: iptables accepts 1 to 28 bytes without blanks that do not start with `-` or `!`.
/// Quotation marks would have to be escaped where iptables-save does not escape them.
pub fn require_chain(key: &str, name: &str) -> Result<()> {
    let is_valid = |c: char| c.is_ascii_graphic() && !matches!(c, '"' | '\'' | '\\');
    let is_short = !name.is_empty() && name.len() <= CHAIN;
    if is_short && !name.starts_with(['-', '!']) && name.chars().all(is_valid) {
        return Ok(());
    }
    Err(Error::config(format!("invalid {key} {name:?}")).with_details(
        "a chain's name has 1 to 28 printable ASCII characters, no blanks and quotation marks, \
         and does not begin with - or !",
    ))
}

/// Refuses an interface name that a rule cannot match: names that the kernel refuses, quotation marks, and a
/// trailing `+`, which is a wildcard in iptables.
pub fn require_interface(key: &str, name: &str) -> Result<()> {
    let is_bad = |c: char| c.is_control() || c.is_whitespace() || "/\"'\\".contains(c);
    if (1..=INTERFACE).contains(&name.len()) && !name.contains(is_bad) && !name.ends_with('+') {
        return Ok(());
    }
    Err(Error::config(format!("invalid interface name {name:?} in {key}")).with_details(
        "a rule names an interface by 1 to 15 bytes, without blanks, slashes and quotation marks, \
         and without + at the end",
    ))
}

/// Refuses words with control characters, such as line breaks.
pub fn require_words(key: &str, words: &[String]) -> Result<()> {
    match words.iter().find(|word| word.contains(char::is_control)) {
        Some(word) => Err(Error::config(format!("invalid word {word:?} in {key}"))
            .with_details("a word of iptables has no control characters, such as line breaks")),
        None => Ok(()),
    }
}

/// A rule: its chain and its arguments.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Rule {
    /// The chain.
    pub chain: String,
    /// The arguments after the chain, unquoted.
    pub words: Vec<String>,
}

impl Rule {
    /// A rule of `chain` without arguments: it matches every packet and does nothing.
    pub fn new(chain: &str) -> Rule {
        Rule { chain: chain.to_owned(), words: Vec::new() }
    }

    /// Appends arguments, unquoted: `["-s", "10.0.0.5/32"]`.
    #[must_use]
    pub fn with(mut self, words: &[impl AsRef<str>]) -> Rule {
        self.words.extend(words.iter().map(|word| word.as_ref().to_owned()));
        self
    }

    /// Appends a comment. Control characters, which interface names may contain, become blanks.
    #[must_use]
    pub fn comment(self, text: &str) -> Rule {
        let text = text.replace(char::is_control, " ");
        self.with(&["-m", "comment", "--comment", &text])
    }

    /// Appends the target, which comes last.
    #[must_use]
    pub fn target(self, target: &str) -> Rule {
        self.with(&["-j", target])
    }

    /// The argument of an option: of `-s`, `-j`, `--comment`.
    pub fn value(&self, option: &str) -> Option<&str> {
        let at = self.words.iter().position(|word| word == option)?;
        self.words.get(at + 1).map(String::as_str)
    }

    /// Whether the rule jumps to `target`.
    pub fn goes_to(&self, target: &str) -> bool {
        self.value("-j") == Some(target) || self.value("-g") == Some(target)
    }

    /// The arguments as iptables-restore reads them, each after a blank.
    pub(in crate::netfilter) fn text(&self) -> String {
        self.words.iter().fold(String::new(), |line, word| line + " " + &quoted(word))
    }
}

fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:,!+=@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("\"{}\"", word.replace('\\', "\\\\").replace('"', "\\\""))
}

/// Splits a line of iptables-save into words.
pub(super) fn words(line: &str) -> Vec<String> {
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

/// A pending change of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::netfilter) enum Change {
    NewChain(String),
    Append(Rule),
    /// After the first rules of the chain.
    Insert {
        rule: Rule,
        after: usize,
    },
    Delete(Rule),
    Flush(String),
    DeleteChain(String),
}

impl Change {
    /// The line for iptables-restore.
    fn line(&self) -> String {
        let with = |command: &str, rule: &Rule| format!("{command} {}{}", rule.chain, rule.text());
        match self {
            Change::NewChain(chain) => format!("-N {chain}"),
            Change::Append(rule) => with("-A", rule),
            Change::Insert { rule, after } => {
                format!("-I {} {}{}", rule.chain, after + 1, rule.text())
            }
            Change::Delete(rule) => with("-D", rule),
            Change::Flush(chain) => format!("-F {chain}"),
            Change::DeleteChain(chain) => format!("-X {chain}"),
        }
    }
}

/// A table as it was read, with the pending changes applied.
#[derive(Clone, Debug, Default)]
pub struct Table {
    /// `nat`, `filter`, `raw`.
    pub name: String,
    /// The names of the chains that were read.
    pub chains: Vec<String>,
    /// The rules of these chains in their order.
    pub rules: Vec<Rule>,
    /// Whether only some chains were read.
    pub(super) is_partial: bool,
    /// Whether a plan needs more chains than were read.
    pub(super) is_insufficient: bool,
    /// The pending changes.
    pub(super) changes: Vec<Change>,
}

impl Table {
    /// A table without chains and rules.
    pub fn empty(name: &str) -> Table {
        Table { name: name.to_owned(), ..Table::default() }
    }

    /// Parses the output of iptables-save.
    pub fn parse(name: &str, text: &str) -> Table {
        let mut table = Table::empty(name);
        for line in text.lines() {
            if let Some(chain) = line.strip_prefix(':') {
                table.chains.extend(chain.split(' ').next().map(ToOwned::to_owned));
            } else if let Some(rule) = line.strip_prefix("-A ") {
                let mut words = words(rule).into_iter();
                let chain = words.next().unwrap_or_default();
                table.rules.push(Rule { chain, words: words.collect() });
            }
        }
        table
    }

    /// The first pending change, as text.
    pub fn first_change(&self) -> Option<String> {
        self.changes.first().map(Change::line)
    }

    /// Whether the chain exists.
    pub fn has_chain(&self, chain: &str) -> bool {
        self.chains.iter().any(|name| name == chain)
    }

    /// The rules of one chain.
    pub fn rules_of(&self, chain: &str) -> impl Iterator<Item = &Rule> {
        self.rules.iter().filter(move |rule| rule.chain == chain)
    }

    /// Whether the rule exists.
    pub fn has(&self, rule: &Rule) -> bool {
        self.rules.contains(rule)
    }

    /// Creates the chain unless it exists.
    pub fn ensure_chain(&mut self, chain: &str) {
        if !self.has_chain(chain) {
            self.chains.push(chain.to_owned());
            self.changes.push(Change::NewChain(chain.to_owned()));
        }
    }

    /// Appends the rule unless it exists.
    pub fn append_unique(&mut self, rule: Rule) {
        if !self.has(&rule) {
            self.changes.push(Change::Append(rule.clone()));
            self.rules.push(rule);
        }
    }

    /// As [`append_unique`](Table::append_unique) for many rules, in linear time.
    pub fn append_all_unique(&mut self, rules: Vec<Rule>) {
        let mut present: HashSet<&Rule> = self.rules.iter().collect();
        let is_new: Vec<bool> = rules.iter().map(|rule| present.insert(rule)).collect();
        for (rule, _) in rules.into_iter().zip(is_new).filter(|(_, is_new)| *is_new) {
            self.changes.push(Change::Append(rule.clone()));
            self.rules.push(rule);
        }
    }

    /// Inserts the rule after the first `skip` rules of its chain unless it exists.
    pub fn insert_unique(&mut self, skip: usize, rule: Rule) {
        if !self.has(&rule) {
            self.changes.push(Change::Insert { rule: rule.clone(), after: skip });
            self.rules.insert(0, rule);
        }
    }

    /// Deletes the duplicates of a rule.
    pub fn del_duplicates(&mut self, rule: &Rule) {
        let copies: Vec<Rule> = self.rules.extract_if(.., |present| present == rule).collect();
        self.changes.extend(copies.iter().skip(1).cloned().map(Change::Delete));
        self.rules.extend(copies.into_iter().take(1));
    }

    /// Deletes the rules for which `which` returns true.
    pub fn del_rules(&mut self, which: impl Fn(&Rule) -> bool) {
        let deleted = self.rules.extract_if(.., |rule| which(rule));
        self.changes.extend(deleted.map(Change::Delete));
    }

    /// Deletes the rules of the chain.
    pub fn flush_chain(&mut self, chain: &str) {
        if self.rules_of(chain).next().is_some() {
            self.rules.retain(|rule| rule.chain != chain);
            self.changes.push(Change::Flush(chain.to_owned()));
        }
    }

    /// Deletes the chain with its rules if it exists. No rule may jump to it.
    pub fn del_chain(&mut self, chain: &str) {
        self.flush_chain(chain);
        if self.has_chain(chain) {
            self.chains.retain(|name| name != chain);
            self.changes.push(Change::DeleteChain(chain.to_owned()));
        }
    }

    /// As [`del_chain`](Table::del_chain), unless a rule jumps to the chain.
    pub fn del_unused_chain(&mut self, chain: &str) {
        if !self.rules.iter().any(|rule| rule.goes_to(chain)) {
            self.del_chain(chain);
        }
    }

    /// Deletes the chain with its rules and every rule that jumps to it.
    pub fn uproot_chain(&mut self, chain: &str) {
        self.del_rules(|rule| rule.goes_to(chain));
        self.del_chain(chain);
    }
}

/// The input of iptables-restore for these changes of a table. Fails if a line has a control character.
pub(super) fn script(name: &str, changes: &[Change]) -> Result<String> {
    let lines: Vec<String> = changes.iter().map(Change::line).collect();
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

    fn jump() -> Rule {
        Rule::new("POSTROUTING")
            .with(&["-s", "10.1.2.4/32"])
            .comment("name: \"net\" id: \"c\\1\"")
            .target("CNI-1")
    }

    #[test]
    fn existing_objects_are_not_changed() {
        let mut table = Table::parse("nat", SAVED);
        assert_eq!(table.chains, ["POSTROUTING", "CNI-1"]);
        assert_eq!(table.rules[0], jump());
        assert_eq!(table.rules[1].value("--comment"), Some(""));
        table.ensure_chain("CNI-1");
        table.append_unique(jump());
        table.insert_unique(0, jump());
        table.del_chain("CNI-2");
        table.del_rules(|rule| rule.goes_to("CNI-2"));
        assert!(table.changes.is_empty());
    }

    #[test]
    fn rules_are_written_as_iptables_save_prints_them() {
        let mut table = Table::parse("nat", SAVED);
        for rule in table.rules.clone() {
            assert_eq!(words(&rule.text()), rule.words);
        }
        table.uproot_chain("CNI-1");
        table.ensure_chain("CNI-3");
        table.append_unique(
            Rule::new("CNI-3").with(&["-p", "tcp"]).comment("a\nb").target("RETURN"),
        );
        table.insert_unique(0, Rule::new("CNI-3").target("ACCEPT"));
        let script = script("nat", &table.changes).unwrap();
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
            assert_eq!(require_chain("key", good), Ok(()), "{good}");
        }
        let long = "01234567890123456789012345678";
        for bad in
            ["", long, "-X", "!X", "a b", "a\nb", "a\tb", "a\"b", "a\\b", "ä", "a\0", "a\u{85}"]
        {
            let error = require_chain("key", bad).unwrap_err();
            assert_eq!((error.code().0, error.msg()), (7, &*format!("invalid key {bad:?}")));
        }
    }

    #[test]
    fn words_with_control_characters_are_refused() {
        assert!(require_words("key", &["!".to_owned(), "a \"b\"".to_owned()]).is_ok());
        let error = require_words("key", &["-s".to_owned(), "a\nCOMMIT".to_owned()]).unwrap_err();
        assert_eq!((error.code().0, error.msg()), (7, r#"invalid word "a\nCOMMIT" in key"#));
        for bad in ["", "sixteen-bytes-xx", "a b", "a/b", "br\n0", "br\"0", "br+"] {
            assert_eq!(require_interface("key", bad).unwrap_err().code().0, 7, "{bad}");
        }
        assert!(require_interface("key", "br0.100").is_ok());
    }

    #[test]
    fn scripts_with_control_characters_are_refused() {
        for chain in ["X\nCOMMIT", "X\r", "X\0"] {
            let mut table = Table::empty("nat");
            table.ensure_chain(chain);
            assert!(script("nat", &table.changes).is_err(), "{chain:?}");
        }
        let mut table = Table::empty("nat");
        table.append_unique(Rule::new("X").with(&["-s", "a\nb"]));
        assert!(script("nat", &table.changes).is_err());
        let rule = Rule::new("X").comment("if: e\u{1}h");
        assert_eq!(words(&rule.text()), rule.words, "a comment is found as it was written");
    }
}
