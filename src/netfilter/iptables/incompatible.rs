//! Tables that iptables-save refuses to print because of a native nftables rule, and deletions that fail as one
//! transaction because one rule cannot be deleted by its arguments.

use std::{mem, slice};

use super::table::{Rule, Table, words};
use super::{Iptables, iptables_table};
use crate::error::{Error, Result};
use crate::log;
use crate::netlink::nftables::Nft;

/// The prefix of the names of CNI plugins' chains.
const CNI: &str = "CNI";

impl Iptables {
    /// Reads a table chain by chain as far as possible: the chains of CNI plugins, and the base chains, which lead
    /// to them.
    pub(super) fn read_parts(&self, name: &str) -> Result<Table> {
        let mut table = Table::empty(name);
        for chain in Nft::open()?.dump_chains(iptables_table(self.family, name))? {
            if chain.base.is_some() || chain.name.starts_with(CNI) {
                match self.read_chain(name, &chain.name) {
                    Some(part) => table.rules.extend(part.rules),
                    None => table.unreadable.push(chain.name.clone()),
                }
            }
            table.chains.push(chain.name);
        }
        Ok(table)
    }

    /// Whether the rule exists, in a readable or unreadable chain.
    pub fn has(&self, table: &Table, rule: &Rule) -> Result<bool> {
        let is_unknown = !table.has(rule) && table.unreadable.contains(&rule.chain);
        Ok(if is_unknown { self.find_rule(&table.name, rule)? == Some(0) } else { table.has(rule) })
    }

    /// Removes from the pending changes the rules that exist in unreadable chains.
    pub(in crate::netfilter) fn resolve_unreadable(&self, table: &mut Table) -> Result<()> {
        let changes = mem::take(&mut table.changes);
        for change in &changes {
            let unsure = rule_of(change, &["-A", "-I"]).filter(|rule| {
                // No rule jumps to a chain that is yet to be created.
                let is_new =
                    rule.value("-j").is_some_and(|to| changes.contains(&format!("-N {to}")));
                table.unreadable.contains(&rule.chain) && !is_new
            });
            match unsure.as_ref().map(|rule| self.find_rule(&table.name, rule)).transpose()? {
                Some(Some(0)) => {}
                None | Some(Some(1)) => table.changes.push(change.clone()),
                // The search stopped at an incompatible rule: a rule before that one will be found.
                Some(_) => table
                    .changes
                    .extend(unsure.map(|rule| format!("-I {} 1{}", rule.chain, rule.text()))),
            }
        }
        Ok(())
    }

    /// Searches for a rule with `-C`. Status 0: the rule exists; 1: it does not exist; others: unknown.
    fn find_rule(&self, name: &str, rule: &Rule) -> Result<Option<i32>> {
        Ok(self.restore(name, &[rule.line("-C")])?.code)
    }

    /// Deletes one by one what iptables refused to delete in one transaction: rules by their arguments, and in
    /// chains of CNI plugins also by number. Fails with `refusal` if a remaining rule can affect traffic, else logs
    /// the remaining rules.
    pub(super) fn delete_singly(
        &self,
        table: &Table,
        plan: &dyn Fn(&mut Table),
        refusal: &Error,
    ) -> Result<()> {
        let name = table.name.as_str();
        for change in &table.changes {
            let is_done = self.restore(name, slice::from_ref(change))?.code == Some(0);
            if !is_done && let Some(by_number) = self.by_number(name, change) {
                self.restore(name, &[by_number])?;
            }
        }
        let after = self.read(name)?;
        let mut remaining = after.clone();
        plan(&mut remaining);
        for change in remaining.changes {
            if can_affect_traffic(&after, &change) {
                let msg = format!("iptables table {name}: \"{change}\" fails");
                return Err(Error::internal(msg).with_details(refusal.msg()));
            }
            log::warn(format_args!("iptables table {name}: \"{change}\" fails; it does no harm"));
        }
        Ok(())
    }

    /// The command that deletes a rule by its number, which other programs may change at any moment.
    fn by_number(&self, name: &str, change: &str) -> Option<String> {
        let rule = rule_of(change, &["-D"]).filter(|rule| rule.chain.starts_with(CNI))?;
        let rules = self.read_chain(name, &rule.chain)?.rules;
        let number = rules.iter().position(|present| *present == rule)? + 1;
        Some(format!("-D {} {number}", rule.chain))
    }
}

/// The rule of a change, if its command is one of `commands`.
fn rule_of(change: &str, commands: &[&str]) -> Option<Rule> {
    let mut words = words(change).into_iter();
    let command = words.next().filter(|command| commands.contains(&command.as_str()))?;
    let chain = words.next()?;
    let words = words.skip(usize::from(command == "-I")).collect();
    Some(Rule { chain, words })
}

/// Whether packets can traverse what a failed deletion has left, with an effect.
fn can_affect_traffic(table: &Table, change: &str) -> bool {
    let has_rules = |chain: &str| {
        table.rules_of(chain).next().is_some() || table.unreadable.iter().any(|c| c == chain)
    };
    let is_entered = |chain: &str| {
        !chain.starts_with(CNI)
            || !table.unreadable.is_empty()
            || table.rules.iter().any(|rule| rule.goes_to(chain))
    };
    if let Some(chain) = change.strip_prefix("-F ") {
        return is_entered(chain);
    }
    let Some(rule) = rule_of(change, &["-D"]) else { return false };
    is_entered(&rule.chain)
        && rule.value("-j").is_some_and(|to| !table.has_chain(to) || has_rules(to))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rules_that_packets_traverse_affect_traffic() {
        let table = Table::parse(
            "filter",
            ":FORWARD ACCEPT [0:0]\n:CNI-FORWARD - [0:0]\n:CNIBOX-FIREWALL - [0:0]\n\
             :CNI-EMPTY - [0:0]\n-A FORWARD -j CNI-FORWARD\n-A FORWARD -j CNI-EMPTY\n\
             -A CNI-FORWARD -s 10.1.2.2/32 -j ACCEPT\n-A CNIBOX-FIREWALL -s 10.1.2.2/32\n",
        );
        for (change, affects) in [
            ("-D CNI-FORWARD -s 10.1.2.2/32 -j ACCEPT", true),
            ("-D FORWARD -j CNI-FORWARD", true),
            ("-F CNI-FORWARD", true),
            ("-D FORWARD -j CNI-EMPTY", false),
            ("-D CNIBOX-FIREWALL -s 10.1.2.2/32", false),
            ("-F CNIBOX-FIREWALL", false),
            ("-X CNI-EMPTY", false),
        ] {
            assert_eq!(can_affect_traffic(&table, change), affects, "{change}");
        }
    }

    #[test]
    fn changes_are_parsed_as_they_are_written() {
        let rule = Rule::new("FORWARD").with(&["-s", "10.0.0.1/32"]).comment("-j Z").target("X");
        let added = |change: &str| rule_of(change, &["-A", "-I"]);
        assert_eq!(added(&rule.line("-A")).as_ref(), Some(&rule));
        assert_eq!(added(&format!("-I FORWARD 1{}", rule.text())).as_ref(), Some(&rule));
        assert_eq!((added("-N X"), added("-D X -j Y")), (None, None));
        assert_eq!(rule.value("-j"), Some("X"));
    }
}
