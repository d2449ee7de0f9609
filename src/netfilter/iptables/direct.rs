//! Tables of iptables on top of `nf_tables`, read and changed over netlink: no process is started.
//!
//! A rule is deleted by its handle. Changes apply only if nothing has changed since the table was
//! read.

use std::collections::HashSet;

use nix::errno::Errno;

use super::encoding::{decode_rule, encode_rule};
use super::table::{IptablesRule, IptablesTable, TableChange};
use super::{ChainScope, nft_table_for};
use crate::netlink::IpFamily;
use crate::netlink::nftables::{
    self, DSTNAT, FILTER, ForeignRule, NetfilterHook, NftBatch, NftChain, NftSocket, RAW,
    RulePosition, SRCNAT,
};
use cni::error::{Error, ErrorCode, Result};

/// The prefix of the names of CNI plugins' chains.
const CNI: &str = "CNI";

/// The number of chains from which on all rules of the table are read at once, if the table has not
/// many chains of other programs.
const FEW: usize = 16;

/// How often a change is planned again after other programs have changed the packet filter.
const ATTEMPTS: usize = 200;

/// A table and the kernel's numbers of its rules.
struct TableSnapshot {
    table: IptablesTable,
    handles: Vec<(IptablesRule, u64)>,
}

/// Reads the chains of the scope. With [`ChainScope::All`] these are the chains of CNI plugins, and
/// the base chains, which lead to them; of other chains only the names are read.
pub(super) fn read_table(
    nft: &NftSocket,
    family: IpFamily,
    name: &str,
    scope: ChainScope<'_>,
) -> Result<IptablesTable> {
    Ok(TableSnapshot::read_scope(nft, family, name, scope)?.table)
}

/// Commits the changes of `plan`. Returns false if a rule cannot be expressed, or the kernel lacks
/// an extension of it.
pub(super) fn update_table(
    nft: &NftSocket,
    family: IpFamily,
    name: &str,
    mut scope: ChainScope<'_>,
    plan: &dyn Fn(&mut IptablesTable),
) -> Result<bool> {
    let mut keeps_chains = false;
    for _ in 0..ATTEMPTS {
        let generation = nft.read_generation()?;
        let mut found = TableSnapshot::read_scope(nft, family, name, scope)?;
        plan(&mut found.table);
        if found.table.is_insufficient {
            scope = ChainScope::All;
            continue;
        }
        if keeps_chains {
            found.table.changes.retain(|change| !matches!(change, TableChange::DeleteChain(_)));
        }
        let Some(batch) = found.into_batch(family) else { return Ok(false) };
        match nft.commit_at_generation(batch, generation) {
            Err(error) if error.errno() == Some(Errno::ERESTART) => {}
            // A rule of another program jumps to a chain, which stays, without rules.
            Err(error) if error.errno() == Some(Errno::EBUSY) && !keeps_chains => {
                warn!("could not delete a chain of iptables table {name}: {error}");
                keeps_chains = true;
            }
            Err(error) if matches!(error.errno(), Some(Errno::ENOENT | Errno::EOPNOTSUPP)) => {
                return Ok(false);
            }
            outcome => return Ok(outcome.map(|()| true)?),
        }
    }
    let msg = format!("change iptables table {name}: others kept changing the packet filter");
    Err(Error::new(ErrorCode::TRY_AGAIN, msg))
}

impl TableSnapshot {
    fn read_scope(
        nft: &NftSocket,
        family: IpFamily,
        name: &str,
        scope: ChainScope<'_>,
    ) -> Result<TableSnapshot> {
        let table = IptablesTable {
            is_partial: !matches!(scope, ChainScope::All),
            ..IptablesTable::new_empty(name)
        };
        let mut found = TableSnapshot { table, handles: Vec::new() };
        match scope {
            ChainScope::All => {
                let all = nft.dump_chains(nft_table_for(family, name))?;
                let needed =
                    all.iter().filter(|chain| chain.base.is_some() || chain.name.starts_with(CNI));
                let needed: HashSet<&str> = needed.map(|chain| chain.name.as_str()).collect();
                if needed.len() >= FEW && needed.len() * 2 >= all.len() {
                    let rules = nft.dump_foreign_rules(nft_table_for(family, name), None)?;
                    found.add_rules(
                        family,
                        rules.into_iter().filter(|rule| needed.contains(rule.chain.as_str())),
                    );
                } else {
                    let mut needed =
                        all.iter().filter(|chain| needed.contains(chain.name.as_str()));
                    needed.try_for_each(|chain| found.read_rules(nft, family, &chain.name))?;
                }
                found.table.chains.extend(all.iter().map(|chain| chain.name.clone()));
            }
            ChainScope::Chains(chains, leads_on) => {
                for chain in chains {
                    found.read_chain(nft, family, chain)?;
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
                    if !chains.contains(&chain.as_str()) && !found.table.has_chain(&chain) {
                        found.read_chain(nft, family, &chain)?;
                    }
                }
            }
        }
        Ok(found)
    }

    fn read_chain(&mut self, nft: &NftSocket, family: IpFamily, chain: &str) -> Result<()> {
        let before = self.handles.len();
        self.read_rules(nft, family, chain)?;
        let has_rules = self.handles.len() > before;
        if has_rules
            || nft.has_object(nft_table_for(family, &self.table.name).named_chain(chain))?
        {
            self.table.chains.push(chain.to_owned());
        }
        Ok(())
    }

    fn read_rules(&mut self, nft: &NftSocket, family: IpFamily, chain: &str) -> Result<()> {
        let found = nft.dump_foreign_rules(nft_table_for(family, &self.table.name), Some(chain))?;
        self.add_rules(family, found.into_iter());
        Ok(())
    }

    fn add_rules(&mut self, family: IpFamily, found: impl Iterator<Item = ForeignRule>) {
        for foreign in found {
            let words = decode_rule(&foreign.expressions, family);
            let rule = IptablesRule { chain: foreign.chain, words };
            self.handles.push((rule.clone(), foreign.handle));
            self.table.rules.push(rule);
        }
    }

    /// The changes; `None` if a rule cannot be expressed.
    fn into_batch(mut self, family: IpFamily) -> Option<NftBatch> {
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
        let mut bases: Vec<&str> = Vec::new();
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
                        TableChange::Insert { after, .. } => {
                            let mut present =
                                self.handles.iter().filter(|(r, _)| r.chain == rule.chain);
                            RulePosition::After(present.nth(after - 1)?.1)
                        }
                        _ => RulePosition::End,
                    };
                    batch.insert_rule_at(chain, &encode_rule(&rule.words, family)?, place);
                }
                TableChange::Delete(rule) => {
                    let at = self.handles.iter().position(|(present, _)| present == rule)?;
                    let (_, handle) = self.handles.remove(at);
                    batch.delete_rule(table.named_chain(&rule.chain), handle);
                }
                TableChange::Flush(chain) => {
                    self.handles.retain(|(rule, _)| rule.chain != *chain);
                    batch.flush_chain(table.named_chain(chain));
                }
                TableChange::DeleteChain(chain) => {
                    _ = batch.delete_object(table.named_chain(chain));
                }
            }
        }
        Some(batch)
    }
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
