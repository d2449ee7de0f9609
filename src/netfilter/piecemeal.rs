//! What iptables does not do in one piece: showing a table that has a rule of nft's own, which it
//! cannot put into words, and deleting rules of which one cannot be deleted by its words.

use std::mem;

use super::backend::iptables_table;
use super::draft::{Draft, Rule, script, words};
use super::iptables::Iptables;
use crate::error::{Error, Result};
use crate::log;
use crate::netlink::nftables::Nft;

/// What the names of CNI plugins' chains begin with.
const CNI: &str = "CNI";

impl Iptables {
    /// A table chain by chain, as far as that goes: those of CNI plugins, and those of the kernel's
    /// hooks that lead to them.
    pub(super) fn read_parts(&self, table: &str) -> Result<Draft> {
        let mut draft = Draft::empty(table);
        for chain in Nft::open()?.dump_chains(iptables_table(self.family, table))? {
            if chain.base.is_some() || chain.name.starts_with(CNI) {
                match self.read_chain(table, &chain.name) {
                    Some(part) => draft.rules.extend(part.rules),
                    None => draft.unreadable.push(chain.name.clone()),
                }
            }
            draft.chains.push(chain.name);
        }
        Ok(draft)
    }

    /// Whether the rule is there, in a chain that can be read or not.
    pub fn has(&self, draft: &Draft, rule: &Rule) -> Result<bool> {
        if draft.has(rule) || !draft.unreadable.contains(&rule.chain) {
            return Ok(draft.has(rule));
        }
        Ok(self.look_for(&draft.table, &rule.chain, &rule.text())? == Some(0))
    }

    /// Leaves out what is to be added to chains that cannot be read, and is there.
    pub(super) fn settle(&self, draft: &mut Draft) -> Result<()> {
        let changes = mem::take(&mut draft.changes);
        for change in &changes {
            let unsure = addition(change).filter(|(chain, text)| {
                // To a chain that is yet to be made nothing leads.
                let is_new =
                    target(text).is_some_and(|name| changes.contains(&format!("-N {name}")));
                draft.unreadable.iter().any(|known| known == chain) && !is_new
            });
            let Some((chain, text)) = unsure else {
                draft.changes.push(change.clone());
                continue;
            };
            match self.look_for(&draft.table, chain, text)? {
                Some(0) => {}
                Some(1) => draft.changes.push(change.clone()),
                // In front of what the search did not get past: there the next one finds it.
                _ => draft.changes.push(format!("-I {chain} 1{text}")),
            }
        }
        Ok(())
    }

    /// 0: the rule is there; 1: it is not; else it cannot be told.
    fn look_for(&self, table: &str, chain: &str, text: &str) -> Result<Option<i32>> {
        Ok(self.restore(&script(table, &[format!("-C {chain}{text}")])?)?.code)
    }

    /// Makes deletions that iptables refused to make together one by one: by the rule's words, and
    /// in chains of CNI plugins by its number. Fails with `refusal` if what stays can carry traffic,
    /// else tells of it.
    pub(super) fn delete_singly(
        &self,
        draft: &Draft,
        plan: impl Fn(&mut Draft) -> Result<()>,
        refusal: &Error,
    ) -> Result<()> {
        let table = draft.table.as_str();
        for change in &draft.changes {
            if self.restore(&script(table, std::slice::from_ref(change))?)?.code == Some(0) {
                continue;
            }
            if let Some(by_number) = self.by_number(table, change) {
                self.restore(&script(table, &[by_number])?)?;
            }
        }
        let after = self.read(table)?;
        let mut left = after.clone();
        plan(&mut left)?;
        let stays = |change: &&String| can_carry_traffic(&after, change);
        if let Some(change) = left.changes.iter().find(stays) {
            let msg = format!("iptables table {table} still has what \"{change}\" is to delete");
            return Err(Error::internal(msg).with_details(refusal.msg()));
        }
        for change in left.changes {
            log::warn(format_args!("iptables table {table}: \"{change}\" fails; it does no harm"));
        }
        Ok(())
    }

    /// A rule's deletion by its number. Others may change their chains at any moment.
    fn by_number(&self, table: &str, change: &str) -> Option<String> {
        let (chain, text) = deletion(change).filter(|(chain, _)| chain.starts_with(CNI))?;
        let rules = self.read_chain(table, chain)?.rules;
        let number = rules.iter().position(|rule| rule.text() == text)? + 1;
        Some(format!("-D {chain} {number}"))
    }
}

/// Chain and words of a rule that a change adds; the words begin with a blank.
fn addition(change: &str) -> Option<(&str, &str)> {
    if let Some(rest) = change.strip_prefix("-A ") {
        return split(rest);
    }
    let (chain, rest) = split(change.strip_prefix("-I ")?)?;
    Some((chain, split(&rest[1..])?.1))
}

/// Chain and words of a rule that a change deletes.
fn deletion(change: &str) -> Option<(&str, &str)> {
    split(change.strip_prefix("-D ")?)
}

fn split(text: &str) -> Option<(&str, &str)> {
    Some(text.split_at(text.find(' ')?))
}

fn target(text: &str) -> Option<String> {
    let mut words = words(text).into_iter().skip_while(|word| word != "-j");
    words.nth(1)
}

/// Whether packets can meet what this change was to delete, and be led anywhere by it.
fn can_carry_traffic(draft: &Draft, change: &str) -> bool {
    let has_rules = |chain: &str| {
        draft.rules.iter().any(|rule| rule.chain == chain)
            || draft.unreadable.iter().any(|unread| unread == chain)
    };
    let is_entered = |chain: &str| {
        !chain.starts_with(CNI)
            || !draft.unreadable.is_empty()
            || draft.rules.iter().any(|rule| rule.goes_to(chain))
    };
    if let Some(chain) = change.strip_prefix("-F ") {
        return is_entered(chain);
    }
    let Some((chain, text)) = deletion(change) else { return false };
    let leads = target(text).is_some_and(|to| !draft.has_chain(&to) || has_rules(&to));
    is_entered(chain) && leads
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_packets_meet_carries_traffic() {
        let draft = Draft::parse(
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
            assert_eq!(can_carry_traffic(&draft, change), carries, "{change}");
        }
    }

    #[test]
    fn changes_are_read_as_they_are_written() {
        assert_eq!(addition("-I FORWARD 1 -j X"), Some(("FORWARD", " -j X")));
        assert_eq!(
            addition("-A FORWARD -s 10.0.0.1/32 -j X"),
            Some(("FORWARD", " -s 10.0.0.1/32 -j X"))
        );
        assert_eq!((addition("-N X"), addition("-D X -j Y")), (None, None));
        assert_eq!(target(" -m comment --comment \"-j Z\" -j X").as_deref(), Some("X"));
    }
}
