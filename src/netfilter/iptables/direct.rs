//! Tables of iptables on top of `nf_tables`, read and changed over netlink: no process is started.
//!
//! A rule is deleted by its handle. Changes apply only if nothing has changed since the table was read.

use nix::errno::Errno;

use super::encoding::{decode, encode};
use super::table::{Change, Rule, Table};
use super::{Scope, iptables_table};
use crate::error::{Code, Error, Result};
use crate::log;
use crate::netlink::Family;
use crate::netlink::nftables::{self, Batch, Chain, DSTNAT, FILTER, Hook, Nft, Place, RAW, SRCNAT};

/// The prefix of the names of CNI plugins' chains.
const CNI: &str = "CNI";

/// How often a change is planned again after other programs have changed the packet filter.
const ATTEMPTS: usize = 200;

/// A table and the kernel's numbers of its rules.
struct Snapshot {
    table: Table,
    handles: Vec<(Rule, u64)>,
}

/// Reads the chains of the scope. Of a table with [`Scope::All`] these are the chains of CNI plugins and the base chains, which
/// lead to them; the names of all chains are read.
pub(super) fn read(nft: &Nft, family: Family, name: &str, scope: Scope<'_>) -> Result<Table> {
    Ok(Snapshot::read(nft, family, name, scope)?.table)
}

/// Commits the changes of `plan`. Returns false if a rule cannot be expressed, or the kernel lacks an extension of it.
pub(super) fn update(
    nft: &Nft,
    family: Family,
    name: &str,
    mut scope: Scope<'_>,
    plan: &dyn Fn(&mut Table),
) -> Result<bool> {
    let mut keeps_chains = false;
    for _ in 0..ATTEMPTS {
        let generation = nft.generation()?;
        let mut found = Snapshot::read(nft, family, name, scope)?;
        plan(&mut found.table);
        if found.table.is_insufficient {
            scope = Scope::All;
            continue;
        }
        if keeps_chains {
            found.table.changes.retain(|change| !matches!(change, Change::DeleteChain(_)));
        }
        let Some(batch) = found.batch(family) else { return Ok(false) };
        match nft.commit_at(batch, generation) {
            Err(error) if error.errno() == Some(Errno::ERESTART) => {}
            // A rule of another program jumps to a chain, which stays, without rules.
            Err(error) if error.errno() == Some(Errno::EBUSY) && !keeps_chains => {
                log::warn(format_args!("a chain of iptables table {name} stays: {error}"));
                keeps_chains = true;
            }
            Err(error) if matches!(error.errno(), Some(Errno::ENOENT | Errno::EOPNOTSUPP)) => {
                return Ok(false);
            }
            outcome => return Ok(outcome.map(|()| true)?),
        }
    }
    let msg = format!("change iptables table {name}: others kept changing the packet filter");
    Err(Error::new(Code::TRY_AGAIN, msg))
}

impl Snapshot {
    fn read(nft: &Nft, family: Family, name: &str, scope: Scope<'_>) -> Result<Snapshot> {
        let table = Table { is_partial: !matches!(scope, Scope::All), ..Table::empty(name) };
        let mut found = Snapshot { table, handles: Vec::new() };
        match scope {
            Scope::All => {
                for chain in nft.dump_chains(iptables_table(family, name))? {
                    if chain.base.is_some() || chain.name.starts_with(CNI) {
                        found.read_rules(nft, family, &chain.name)?;
                    }
                    found.table.chains.push(chain.name);
                }
            }
            Scope::Chains(chains, leads_on) => {
                for chain in chains {
                    found.read_chain(nft, family, chain)?;
                }
                let targets =
                    |rule: &Rule| leads_on(rule).then(|| rule.value("-j"))?.map(str::to_owned);
                let next: Vec<String> = found.table.rules.iter().filter_map(targets).collect();
                for chain in next {
                    if !chains.contains(&chain.as_str()) && !found.table.has_chain(&chain) {
                        found.read_chain(nft, family, &chain)?;
                    }
                }
            }
        }
        Ok(found)
    }

    fn read_chain(&mut self, nft: &Nft, family: Family, chain: &str) -> Result<()> {
        let before = self.handles.len();
        self.read_rules(nft, family, chain)?;
        let has_rules = self.handles.len() > before;
        if has_rules || nft.has(iptables_table(family, &self.table.name).chain(chain))? {
            self.table.chains.push(chain.to_owned());
        }
        Ok(())
    }

    fn read_rules(&mut self, nft: &Nft, family: Family, chain: &str) -> Result<()> {
        let found = nft.dump_foreign(iptables_table(family, &self.table.name).chain(chain))?;
        for foreign in found {
            let words = decode(&foreign.expressions, family);
            let rule = Rule { chain: chain.to_owned(), words };
            self.handles.push((rule.clone(), foreign.handle));
            self.table.rules.push(rule);
        }
        Ok(())
    }

    /// The changes; `None` if a rule cannot be expressed.
    fn batch(mut self, family: Family) -> Option<Batch> {
        let Table { name, changes, chains, .. } = &self.table;
        let table = iptables_table(family, name);
        let mut batch = Batch::new();
        let adds = |change: &Change| {
            !matches!(change, Change::Delete(_) | Change::Flush(_) | Change::DeleteChain(_))
        };
        if changes.iter().any(adds) {
            batch.ensure(table);
        }
        let mut bases: Vec<&str> = Vec::new();
        for change in changes {
            match change {
                Change::NewChain(chain) => _ = batch.ensure(table.chain(chain)),
                Change::Append(rule) | Change::Insert { rule, .. } => {
                    let chain = table.chain(&rule.chain);
                    if !chains.contains(&rule.chain)
                        && !bases.contains(&rule.chain.as_str())
                        && let Some(base) = base_chain(table, name, &rule.chain)
                    {
                        batch.ensure(base);
                        bases.push(&rule.chain);
                    }
                    let place = match change {
                        Change::Insert { after: 0, .. } => Place::Beginning,
                        Change::Insert { after, .. } => {
                            let mut of_chain =
                                self.handles.iter().filter(|(r, _)| r.chain == rule.chain);
                            Place::After(of_chain.nth(after - 1)?.1)
                        }
                        _ => Place::End,
                    };
                    batch.place_rule(chain, &encode(&rule.words, family)?, place);
                }
                Change::Delete(rule) => {
                    let at = self.handles.iter().position(|(present, _)| present == rule)?;
                    let (_, handle) = self.handles.remove(at);
                    batch.del_rule(table.chain(&rule.chain), handle);
                }
                Change::Flush(chain) => {
                    self.handles.retain(|(rule, _)| rule.chain != *chain);
                    batch.flush_chain(table.chain(chain));
                }
                Change::DeleteChain(chain) => _ = batch.del(table.chain(chain)),
            }
        }
        Some(batch)
    }
}

/// A built-in chain of iptables, if the table has one of this name.
fn base_chain<'a>(table: nftables::Table<'a>, name: &str, chain: &'a str) -> Option<Chain<'a>> {
    let hook = match chain {
        "PREROUTING" => Hook::Prerouting,
        "INPUT" => Hook::Input,
        "FORWARD" => Hook::Forward,
        "OUTPUT" => Hook::Output,
        "POSTROUTING" => Hook::Postrouting,
        _ => return None,
    };
    let chain = table.chain(chain);
    Some(match (name, hook) {
        ("nat", Hook::Prerouting | Hook::Output) => chain.nat(hook, DSTNAT),
        ("nat", _) => chain.nat(hook, SRCNAT),
        ("raw", _) => chain.filter(hook, RAW),
        _ => chain.filter(hook, FILTER),
    })
}
