//! Tables of iptables on top of `nf_tables`, read and changed over netlink: no process is started.
//!
//! A rule is deleted by its handle. Changes apply only if nothing has changed since the table was
//! read.

use std::collections::HashSet;

use nix::errno::Errno;

use super::encoding::{decode_rule, encode_rule};
use super::table::{IptablesRule, IptablesTable, TableChange};
use super::{ChainScope, SomeChains, nft_table_for};
use crate::netlink::nftables::{
    self, ChainInfo, DSTNAT, FILTER, ForeignRule, NetfilterHook, NftBatch, NftChain, NftSocket,
    RAW, RulePosition, SRCNAT,
};
use crate::netlink::{IpFamily, NetlinkResult};
use cni::error::{Error, ErrorCode, Result};

/// The prefix of the names of CNI plugins' chains.
const CNI: &str = "CNI";

/// The number of chains from which on all rules of the table are read at once, if the table has not
/// many chains of other programs.
const FEW: usize = 16;

/// The number of rules in a chain from which on its beginning is read by a socket of its own.
const FEW_RULES: usize = 16;

/// How often a change is planned again after other programs have changed the packet filter.
const ATTEMPTS: usize = 200;
/// How many of these attempts are refused for changes that do not concern them.
const RACES: usize = 3;

/// A table as it was read.
struct TableSnapshot {
    table: IptablesTable,
    mode: ReadMode,
    /// Whether the rules have changed while they were read.
    is_outdated: bool,
    /// The chains that have the name of a base chain, and are none.
    unhooked: Vec<String>,
}

/// What a table is read for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReadMode {
    /// A commit at the present generation, which a commit of any process makes impossible.
    AtGeneration,
    /// Knowing the table, whatever becomes of other tables meanwhile.
    Alone,
}

/// Reads the chains of the scope. With [`ChainScope::All`] these are the chains of CNI plugins, and
/// the base chains, which lead to them; of other chains only the names are read. A chain with the
/// name of a base chain that is none has no rules, as no packet passes them.
pub(super) fn read_table(
    nft: &NftSocket,
    family: IpFamily,
    name: &str,
    scope: ChainScope<'_>,
) -> Result<IptablesTable> {
    let found = TableSnapshot::read_scope(nft, family, name, scope, ReadMode::Alone)?;
    let TableSnapshot { mut table, unhooked, .. } =
        found.ok_or_else(|| others_kept_changing("read", name))?;
    table.rules.retain(|rule| !unhooked.contains(&rule.chain));
    Ok(table)
}

/// Commits the changes of `plan`. Returns false if a rule cannot be expressed, or the kernel lacks
/// an extension of it.
///
/// The first commits are refused if anything in the namespace has changed since the table was read.
/// After [`RACES`] of them changes of others count no longer: rules are appended to what is there
/// by then, and a rule is deleted or followed if it is still the one that was read.
pub(super) fn update_table(
    nft: &NftSocket,
    family: IpFamily,
    name: &str,
    mut scope: ChainScope<'_>,
    plan: &dyn Fn(&mut IptablesTable),
) -> Result<bool> {
    let mut keeps_chains = false;
    for attempt in 0..ATTEMPTS {
        let generation = nft.read_generation()?;
        let is_raced = attempt >= RACES;
        let mode = if is_raced { ReadMode::Alone } else { ReadMode::AtGeneration };
        let Some(mut found) = TableSnapshot::read_scope(nft, family, name, scope, mode)? else {
            continue;
        };
        plan(&mut found.table);
        if found.table.is_insufficient {
            scope = ChainScope::All;
            continue;
        }
        if keeps_chains {
            found.table.changes.retain(|change| !matches!(change, TableChange::DeleteChain(_)));
        }
        found.require_hooks(family)?;
        let Some((batch, used)) = found.into_batch(family) else { return Ok(false) };
        let (table, generation) = (nft_table_for(family, name), Some(generation));
        let read = || generation_with_rules(nft, family, table, &used);
        let Some(generation) = (if is_raced { read()? } else { generation }) else { continue };
        match nft.commit_at_generation(batch, generation) {
            Err(error) if error.errno() == Some(Errno::ERESTART) => {}
            // A rule of another program jumps to a chain, which stays, without rules.
            Err(error) if error.errno() == Some(Errno::EBUSY) && !keeps_chains => {
                warn!("could not delete a chain of iptables table {name}: {error}");
                keeps_chains = true;
            }
            // Or another program has deleted the chain.
            Err(error) if error.errno() == Some(Errno::ENOENT) && is_raced => {}
            Err(error) if matches!(error.errno(), Some(Errno::ENOENT | Errno::EOPNOTSUPP)) => {
                return Ok(false);
            }
            outcome => return Ok(outcome.map(|()| true)?),
        }
    }
    Err(others_kept_changing("change", name))
}

fn others_kept_changing(what: &str, name: &str) -> Error {
    let msg = format!("{what} iptables table {name}: others kept changing the packet filter");
    Error::new(ErrorCode::TRY_AGAIN, msg)
}

/// The present generation, if all rules whose numbers a change uses are still there. These are read
/// alone, so that the time for which nothing may change is short. 0, which stands for any
/// generation, if there are none.
fn generation_with_rules(
    nft: &NftSocket,
    family: IpFamily,
    table: nftables::NftTable<'_>,
    used: &[IptablesRule],
) -> NetlinkResult<Option<u32>> {
    let generation = if used.is_empty() { 0 } else { nft.read_generation()? };
    for rule in used {
        let found = nft.find_foreign_rule(table.named_chain(&rule.chain), rule.handle)?;
        if found.is_none_or(|found| decode_rule(&found.expressions, family) != rule.words) {
            return Ok(None);
        }
    }
    Ok(Some(generation))
}

impl TableSnapshot {
    fn read_scope(
        nft: &NftSocket,
        family: IpFamily,
        name: &str,
        scope: ChainScope<'_>,
        mode: ReadMode,
    ) -> Result<Option<TableSnapshot>> {
        let table = IptablesTable {
            is_partial: !matches!(scope, ChainScope::All),
            ..IptablesTable::new_empty(name)
        };
        let mut found = TableSnapshot { table, mode, is_outdated: false, unhooked: Vec::new() };
        match scope {
            ChainScope::All => {
                let all = nft.dump_chains(nft_table_for(family, name))?;
                let needed =
                    all.iter().filter(|chain| chain.base.is_some() || chain.name.starts_with(CNI));
                let needed: HashSet<&str> = needed.map(|chain| chain.name.as_str()).collect();
                if needed.len() >= FEW && needed.len() * 2 >= all.len() {
                    found.read_rules(nft, family, None, &|rule| {
                        needed.contains(rule.chain.as_str())
                    })?;
                } else {
                    let mut needed =
                        all.iter().filter(|chain| needed.contains(chain.name.as_str()));
                    needed.try_for_each(|chain| {
                        found.read_rules(nft, family, Some(&chain.name), &|_| true)
                    })?;
                }
                for chain in all {
                    found.add_chain(family, chain);
                }
            }
            ChainScope::Chains(SomeChains { names, leads_on, beginnings, until, recorded }) => {
                for chain in names {
                    match beginnings.iter().find(|(name, _)| name == chain) {
                        Some((_, rules)) => {
                            let until = until.iter().filter(|rule| rule.chain == *chain).collect();
                            found.read_beginning(nft, family, chain, until, rules * recorded)?;
                        }
                        None => found.read_chain(nft, family, chain)?,
                    }
                }
                let next: Vec<String> = found
                    .table
                    .rules
                    .iter()
                    .filter_map(|rule| {
                        leads_on(rule).then(|| rule.option_value("-j"))?.map(str::to_owned)
                    })
                    .collect();
                for chain in next {
                    if !names.contains(&chain.as_str()) && !found.table.has_chain(&chain) {
                        found.read_chain(nft, family, &chain)?;
                    }
                }
            }
        }
        Ok(Some(found).filter(|found| !found.is_outdated))
    }

    fn read_chain(&mut self, nft: &NftSocket, family: IpFamily, chain: &str) -> Result<()> {
        let before = self.table.rules.len();
        self.read_rules(nft, family, Some(chain), &|_| true)?;
        let has_rules = self.table.rules.len() > before;
        let table = nft_table_for(family, &self.table.name);
        if has_rules && base_chain(table, &self.table.name, chain).is_none() {
            self.table.chains.push(chain.to_owned());
        } else if let Some(chain) = nft.read_chain(table.named_chain(chain))? {
            self.add_chain(family, chain);
        }
        Ok(())
    }

    /// Reads a chain until all of these rules were found, if it has at least so many rules.
    fn read_beginning(
        &mut self,
        nft: &NftSocket,
        family: IpFamily,
        chain: &str,
        mut until: Vec<&IptablesRule>,
        least: usize,
    ) -> Result<()> {
        let name = nft_table_for(family, &self.table.name).named_chain(chain);
        // A list that may be interrupted is read as a whole.
        let may_end = !until.is_empty() && self.mode == ReadMode::AtGeneration;
        let found = if may_end { nft.read_chain(name)? } else { None };
        let has_many = |info: &ChainInfo| info.uses as usize > least.max(FEW_RULES);
        let Some(info) = found.filter(has_many) else {
            return self.read_chain(nft, family, chain);
        };
        let rules = &mut self.table.rules;
        self.is_outdated |= NftSocket::visit_foreign_rules(name, &mut |foreign| {
            let rule = decode_foreign_rule(foreign, family);
            until.retain(|part| !rule.has_words_of(part));
            rules.push(rule);
            until.is_empty()
        })?;
        self.table.beginnings.extend(until.is_empty().then(|| chain.to_owned()));
        self.add_chain(family, info);
        Ok(())
    }

    fn add_chain(&mut self, family: IpFamily, chain: ChainInfo) {
        let name = &self.table.name;
        if chain.base.is_none()
            && base_chain(nft_table_for(family, name), name, &chain.name).is_some()
        {
            self.unhooked.push(chain.name.clone());
        }
        self.table.chains.push(chain.name);
    }

    /// Fails if a rule would be added to a chain that no packet passes.
    fn require_hooks(&self, family: IpFamily) -> Result<()> {
        let added = self.table.changes.iter().filter_map(|change| match change {
            TableChange::Append(rule) | TableChange::Insert { rule, .. } => Some(&rule.chain),
            _ => None,
        });
        let Some(chain) = added.into_iter().find(|chain| self.unhooked.contains(chain)) else {
            return Ok(());
        };
        let table = nft_table_for(family, &self.table.name);
        let msg = format!("chain {chain} of table {table} is at no hook: no packet passes it");
        Err(Error::internal(msg)
            .with_details(format!("nft rename chain {table} {chain} unused-{chain}")))
    }

    /// Reads those rules of a chain, or of all, that are needed. The kernel reports a change of any
    /// table: two equal lists show that it was not one of this table.
    fn read_rules(
        &mut self,
        nft: &NftSocket,
        family: IpFamily,
        chain: Option<&str>,
        is_needed: &dyn Fn(&ForeignRule) -> bool,
    ) -> Result<()> {
        let dump = || nft.dump_foreign_rules(nft_table_for(family, &self.table.name), chain);
        let (mut found, mut is_changed) = dump()?;
        if self.mode == ReadMode::Alone {
            for _ in 0..ATTEMPTS {
                if !is_changed {
                    break;
                }
                let (again, interrupted) = dump()?;
                is_changed = interrupted && again != found;
                found = again;
            }
        }
        self.is_outdated |= is_changed;
        if self.is_outdated {
            return Ok(());
        }
        for foreign in found.into_iter().filter(is_needed) {
            self.table.rules.push(decode_foreign_rule(foreign, family));
        }
        Ok(())
    }

    /// The changes, and the rules whose numbers they use; `None` if a rule cannot be expressed.
    fn into_batch(self, family: IpFamily) -> Option<(NftBatch, Vec<IptablesRule>)> {
        let IptablesTable { name, changes, chains, .. } = &self.table;
        let table = nft_table_for(family, name);
        let mut batch = NftBatch::new();
        if changes.iter().any(|change| {
            !matches!(
                change,
                TableChange::Delete(_) | TableChange::Flush(_) | TableChange::DeleteChain(_)
            )
        }) {
            batch.ensure_object(table);
        }
        let (mut bases, mut used): (Vec<&str>, _) = (Vec::new(), Vec::new());
        for change in changes {
            match change {
                TableChange::NewChain(chain) => _ = batch.ensure_object(table.named_chain(chain)),
                TableChange::Append(rule) | TableChange::Insert { rule, .. } => {
                    let chain = table.named_chain(&rule.chain);
                    if !chains.contains(&rule.chain)
                        && !bases.contains(&rule.chain.as_str())
                        && let Some(base) = base_chain(table, name, &rule.chain)
                    {
                        batch.ensure_object(base);
                        bases.push(&rule.chain);
                    }
                    let place = match change {
                        TableChange::Insert { after: 0, .. } => RulePosition::Beginning,
                        TableChange::Insert { previous, .. } => {
                            used.push(previous.clone()?);
                            RulePosition::After(used.last()?.handle)
                        }
                        _ => RulePosition::End,
                    };
                    batch.insert_rule_at(chain, &encode_rule(&rule.words, family)?, place);
                }
                // Added by the same plan.
                TableChange::Delete(IptablesRule { handle: 0, .. }) => return None,
                TableChange::Delete(rule) => {
                    batch.delete_rule(table.named_chain(&rule.chain), rule.handle);
                    used.push(rule.clone());
                }
                TableChange::Flush(chain) => _ = batch.flush_chain(table.named_chain(chain)),
                TableChange::DeleteChain(chain) => {
                    _ = batch.delete_object(table.named_chain(chain));
                }
            }
        }
        Some((batch, used))
    }
}

fn decode_foreign_rule(foreign: ForeignRule, family: IpFamily) -> IptablesRule {
    let words = decode_rule(&foreign.expressions, family);
    IptablesRule { chain: foreign.chain, words, handle: foreign.handle }
}

/// A built-in chain of iptables, if the table has one of this name.
fn base_chain<'a>(
    table: nftables::NftTable<'a>,
    name: &str,
    chain: &'a str,
) -> Option<NftChain<'a>> {
    let hook = match chain {
        "PREROUTING" => NetfilterHook::Prerouting,
        "INPUT" => NetfilterHook::Input,
        "FORWARD" => NetfilterHook::Forward,
        "OUTPUT" => NetfilterHook::Output,
        "POSTROUTING" => NetfilterHook::Postrouting,
        _ => return None,
    };
    let chain = table.named_chain(chain);
    Some(match (name, hook) {
        ("nat", NetfilterHook::Prerouting | NetfilterHook::Output) => {
            chain.at_nat_hook(hook, DSTNAT)
        }
        ("nat", _) => chain.at_nat_hook(hook, SRCNAT),
        ("raw", _) => chain.at_filter_hook(hook, RAW),
        _ => chain.at_filter_hook(hook, FILTER),
    })
}
