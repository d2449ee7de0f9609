//! What iptables does not do in one piece: printing a table that has a rule of nft's own, which it
//! has no words for, and deleting rules of which one cannot be deleted by its words.

use std::mem;

use super::table::{Rule, Table, script, words};
use super::{Iptables, iptables_table};
use crate::error::{Error, Result};
use crate::log;
use crate::netlink::nftables::Nft;

/// What the names of CNI plugins' chains begin with.
const CNI: &str = "CNI";

impl Iptables {
    /// A table chain by chain, as far as that goes: the chains of CNI plugins, and the chains of the kernel's
    /// hooks that lead to them.
    pub(in crate::netfilter) fn read_parts(&self, name: &str) -> Result<Table> {
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

    /// Whether the rule is there, in a chain that can be read or not.
    pub fn has(&self, table: &Table, rule: &Rule) -> Result<bool> {
        if table.has(rule) || !table.unreadable.contains(&rule.chain) {
            return Ok(table.has(rule));
        }
        Ok(self.look_for(&table.name, rule)? == Some(0))
    }

    /// Leaves out what is to be added to chains that cannot be read, and is there.
    pub(in crate::netfilter) fn settle(&self, table: &mut Table) -> Result<()> {
        let changes = mem::take(&mut table.changes);
        for change in &changes {
            let unsure = rule_of(change, &["-A", "-I"]).filter(|rule| {
                // To a chain that is yet to be made nothing leads.
                let is_new =
                    rule.value("-j").is_some_and(|to| changes.contains(&format!("-N {to}")));
                table.unreadable.contains(&rule.chain) && !is_new
            });
            let Some(rule) = unsure else {
                table.changes.push(change.clone());
                continue;
            };
            match self.look_for(&table.name, &rule)? {
                Some(0) => {}
                Some(1) => table.changes.push(change.clone()),
                // In front of what the search did not get past: there the next one finds it.
                _ => table.changes.push(format!("-I {} 1{}", rule.chain, rule.text())),
            }
        }
        Ok(())
    }

    /// 0: the rule is there; 1: it is not; another status: unknown.
    fn look_for(&self, name: &str, rule: &Rule) -> Result<Option<i32>> {
        Ok(self.restore(&script(name, &[rule.line("-C")])?)?.code)
    }

    /// Makes deletions that iptables refused to make together one by one: by the rule's words, and
    /// in chains of CNI plugins by its number. Fails with `refusal` if what stays can carry traffic,
    /// else tells of it.
    pub(in crate::netfilter) fn delete_singly(
        &self,
        table: &Table,
        plan: &dyn Fn(&mut Table),
        refusal: &Error,
    ) -> Result<()> {
        let name = table.name.as_str();
        for change in &table.changes {
            if self.restore(&script(name, std::slice::from_ref(change))?)?.code == Some(0) {
                continue;
            }
            if let Some(by_number) = self.by_number(name, change) {
                self.restore(&script(name, &[by_number])?)?;
            }
        }
        let after = self.read(name)?;
        let mut left = after.clone();
        plan(&mut left);
        let stays = |change: &&String| can_carry_traffic(&after, change);
        if let Some(change) = left.changes.iter().find(stays) {
            let msg = format!("iptables table {name} still has what \"{change}\" is to delete");
            return Err(Error::internal(msg).with_details(refusal.msg()));
        }
        for change in left.changes {
            log::warn(format_args!("iptables table {name}: \"{change}\" fails; it does no harm"));
        }
        Ok(())
    }

    /// A rule's deletion by its number. Others may change their chains at any moment.
    fn by_number(&self, name: &str, change: &str) -> Option<String> {
        let rule = rule_of(change, &["-D"]).filter(|rule| rule.chain.starts_with(CNI))?;
        let rules = self.read_chain(name, &rule.chain)?.rules;
        let number = rules.iter().position(|present| *present == rule)? + 1;
        Some(format!("-D {} {number}", rule.chain))
    }
}

/// The rule that a change is about, if it is one of these commands.
fn rule_of(change: &str, commands: &[&str]) -> Option<Rule> {
    let mut words = words(change).into_iter();
    let command = words.next().filter(|command| commands.contains(&command.as_str()))?;
    let chain = words.next()?;
    let words = words.skip(usize::from(command == "-I")).collect();
    Some(Rule { chain, words })
}

/// Whether packets can meet what this change was to delete, and be led anywhere by it.
fn can_carry_traffic(table: &Table, change: &str) -> bool {
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
    fn only_what_packets_meet_carries_traffic() {
        let table = Table::parse(
            "filter",
            ":FORWARD ACCEPT [0:0]\n:CNI-FORWARD - [0:0]\n:CNIBOX-FIREWALL - [0:0]\n\
             :CNI-EMPTY - [0:0]\n-A FORWARD -j CNI-FORWARD\n-A FORWARD -j CNI-EMPTY\n\
             -A CNI-FORWARD -s 10.1.2.2/32 -j ACCEPT\n-A CNIBOX-FIREWALL -s 10.1.2.2/32\n",
        );
        for (change, carries) in [
            ("-D CNI-FORWARD -s 10.1.2.2/32 -j ACCEPT", true),
            ("-D FORWARD -j CNI-FORWARD", true),
            ("-F CNI-FORWARD", true),
            ("-D FORWARD -j CNI-EMPTY", false),
            ("-D CNIBOX-FIREWALL -s 10.1.2.2/32", false),
            ("-F CNIBOX-FIREWALL", false),
            ("-X CNI-EMPTY", false),
        ] {
            assert_eq!(can_carry_traffic(&table, change), carries, "{change}");
        }
    }

    #[test]
    fn changes_are_read_as_they_are_written() {
        let rule = Rule::new("FORWARD", ["-s", "10.0.0.1/32"]).comment("-j Z").target("X");
        let added = |change: &str| rule_of(change, &["-A", "-I"]);
        assert_eq!(added(&rule.line("-A")).as_ref(), Some(&rule));
        assert_eq!(added(&format!("-I FORWARD 1{}", rule.text())).as_ref(), Some(&rule));
        assert_eq!((added("-N X"), added("-D X -j Y")), (None, None));
        assert_eq!(rule.value("-j"), Some("X"));
    }
}
