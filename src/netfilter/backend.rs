//! Which of the kernel's two interfaces rules are made with, as the reference plugins choose.

use std::cell::OnceCell;
use std::fs;

use nix::errno::Errno;
use serde::{Deserialize, Serialize};

use super::all;
use super::iptables::{self, Flavour, Iptables, iptables_table};
use super::names::Owner;
use crate::attachment::Kept;
use crate::cmd;
use crate::error::{Context, Error, Result};
use crate::netlink;
pub use crate::netlink::Family;
use crate::netlink::nftables::{Nft, Table};

/// The name of a table that does not exist: asking for it tells whether the kernel has `nf_tables`.
const PROBED: Table<'_> = Table::inet("cnibox_probe");

/// The expressions that iptables on top of `nf_tables` makes and prints. It prints some `log` and
/// `limit` only; a table with one of the others is changed by iptables nevertheless.
const PRINTED: [&str; 11] = [
    "match",
    "target",
    "counter",
    "immediate",
    "payload",
    "meta",
    "cmp",
    "bitwise",
    "lookup",
    "limit",
    "log",
];

/// What a kernel without `nf_tables` answers, or refuses the socket with.
const LACKING: [Errno; 4] =
    [Errno::EINVAL, Errno::EOPNOTSUPP, Errno::EPROTONOSUPPORT, Errno::EAFNOSUPPORT];

/// How rules are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// `nf_tables`, over netlink.
    Nftables,
    /// The programs of iptables.
    Iptables,
}

impl Backend {
    /// The back end of this name, if `value` names one; none if it is empty. `unknown` begins the
    /// message: `unknown ipmasq backend "ebtables"`, code 7.
    pub fn parse(value: Option<&str>, unknown: &str) -> Result<Option<Backend>> {
        match value.unwrap_or_default() {
            "" => Ok(None),
            "nftables" => Ok(Some(Backend::Nftables)),
            "iptables" => Ok(Some(Backend::Iptables)),
            other => Err(Error::config(format!("{unknown} \"{other}\""))
                .with_details("the back ends are \"iptables\" and \"nftables\"")),
        }
    }

    /// For ADD: the configured one; without, iptables where it is installed and works and its tables
    /// have no rules that it cannot print, else nftables. Where nobody has used an installed iptables
    /// yet, it is tried, which starts a process.
    pub fn choose(configured: Option<Backend>, filter: &PacketFilter) -> Backend {
        let usual = || match Backend::usual(filter) {
            Backend::Iptables if filter.has_unprintable_rules() => Backend::Nftables,
            usual => usual,
        };
        configured.unwrap_or_else(usual)
    }

    /// For CHECK: the configured one; without, the one that `kept` tells of the attachment, or that
    /// the reference would have chosen.
    pub fn of(
        configured: Option<Backend>,
        filter: &PacketFilter,
        kept: Kept,
        owner: Owner<'_>,
    ) -> Backend {
        let recorded = || Some(kept.read::<Recorded>(owner)?.backend);
        configured.or_else(recorded).unwrap_or_else(|| Backend::usual(filter))
    }

    fn usual(filter: &PacketFilter) -> Backend {
        let installed = || Iptables::find(Family::V4, Flavour::Default).is_some();
        let works = || installed() && (filter.has_iptables() || probe());
        if !works() && filter.require_nf_tables().is_ok() {
            return Backend::Nftables;
        }
        Backend::Iptables
    }

    /// For STATUS: whether this back end can work here at all; code 50 with a remedy if not.
    pub fn require_usable(self, filter: &PacketFilter) -> Result<()> {
        let usable = match self {
            Backend::Nftables => filter.require_nf_tables(),
            Backend::Iptables => Iptables::require(Family::V4).and_then(|programs| {
                // A chain that iptables cannot print is no obstacle: the probe tells.
                if programs.list("filter", "INPUT").is_some() || probe() {
                    return Ok(());
                }
                Err(Error::internal("iptables is installed but does not work")
                    .with_details("run iptables -t filter -S INPUT 1 to see why"))
            }),
        };
        usable.or_unavailable()
    }
}

/// What the records of all features have.
#[derive(Deserialize)]
struct Recorded {
    backend: Backend,
}

/// Whether iptables can look at the kernel's rules: status 1 is "no rule 1".
fn probe() -> bool {
    let Some(program) = cmd::find("iptables") else { return false };
    let output = cmd::run(&program, &["-t", "filter", "-S", "INPUT", "1"], "");
    output.is_ok_and(|output| matches!(output.code, Some(0 | 1)))
}

/// The packet filter of the calling thread's namespace, opened on first use. One for each call of
/// a plugin: the kernel is slow to close a socket that deleted something.
#[derive(Debug, Default)]
pub struct PacketFilter {
    nft: OnceCell<Nft>,
    /// Whether the kernel has it.
    present: OnceCell<bool>,
    /// The tables of the old iptables, of IPv4 and IPv6.
    legacy: [OnceCell<String>; 2],
}

impl PacketFilter {
    /// Nothing opened yet.
    pub fn new() -> PacketFilter {
        PacketFilter::default()
    }

    /// `nf_tables`.
    pub fn nft(&self) -> Result<&Nft> {
        Ok(self.open()?)
    }

    fn open(&self) -> netlink::Result<&Nft> {
        if let Some(nft) = self.nft.get() {
            return Ok(nft);
        }
        let opened = Nft::open()?;
        Ok(self.nft.get_or_init(|| opened))
    }

    /// `nf_tables`; none if the kernel has none, which costs one question.
    pub fn nft_if_present(&self) -> Result<Option<&Nft>> {
        let present = match self.present.get() {
            Some(present) => *present,
            None => match self.open().and_then(|nft| nft.has(PROBED)) {
                Ok(_) => true,
                Err(error) if error.errno().is_some_and(|e| LACKING.contains(&e)) => false,
                Err(error) => return Err(error.into()),
            },
        };
        if *self.present.get_or_init(|| present) { self.nft().map(Some) } else { Ok(None) }
    }

    /// Fails with a remedy if the kernel has no `nf_tables`.
    fn require_nf_tables(&self) -> Result<()> {
        self.nft_if_present()?.map(drop).ok_or_else(|| {
            Error::internal("the kernel has no nf_tables")
                .with_details("load the module nf_tables, or choose the back end \"iptables\"")
        })
    }

    /// The iptables programs that see one of the chains, or with none given any that a CNI plugin
    /// made, found without starting any: the flavour on top of `nf_tables` if such a chain is
    /// there, the old one if it has this table at all.
    pub fn iptables_with(
        &self,
        family: Family,
        table: &str,
        chains: &[&str],
    ) -> Result<Vec<Iptables>> {
        let nft = self.has_chain(family, table, chains)?.then_some(Flavour::Nft);
        let legacy = self.has_legacy_table(family, table).then_some(Flavour::Legacy);
        let programs = |flavour| Iptables::find_or_default(family, flavour);
        Ok(nft.into_iter().chain(legacy).filter_map(programs).collect())
    }

    /// Deletes with iptables in the table `name` of each family and flavour that has one of `chains`, or with
    /// no chains any of a CNI plugin: what `plan` finds, after [trying](Iptables::delete_expected) what is
    /// `expected`. Starts nothing where there are none. All is tried; the errors are joined.
    pub(super) fn delete_with_iptables(
        &self,
        name: &str,
        chains: &[&str],
        expected: &dyn Fn(Family) -> iptables::Table,
        plan: &dyn Fn(&mut iptables::Table, Family),
    ) -> Result<()> {
        all(Family::BOTH.map(|family| {
            let found = self.iptables_with(family, name, chains)?;
            all(found.iter().map(|programs| {
                programs.delete_expected(&expected(family), &|table| plan(table, family))
            }))
        }))
    }

    /// Whether `nf_tables` has one of these chains of iptables, or with none given any of a CNI plugin.
    pub(super) fn has_chain(&self, family: Family, table: &str, chains: &[&str]) -> Result<bool> {
        let place = iptables_table(family, table);
        self.ask(|nft| {
            if chains.is_empty() {
                let all = if nft.has(place)? { nft.dump_chains(place)? } else { Vec::new() };
                return Ok(all.iter().any(|chain| chain.name.starts_with("CNI-")));
            }
            for chain in chains {
                if nft.has(place.chain(chain))? {
                    return Ok(true);
                }
            }
            Ok(false)
        })
    }

    /// Whether a table of iptables is in use in this namespace.
    fn has_iptables(&self) -> bool {
        let on_nft = |table| self.ask(|nft| nft.has(iptables_table(Family::V4, table)));
        let has =
            |table| self.has_legacy_table(Family::V4, table) || on_nft(table).unwrap_or_default();
        has("nat") || has("filter")
    }

    /// Whether another program, such as Tailscale, has rules of nft's own in the tables that iptables on top
    /// of `nf_tables` keeps its rules in.
    fn has_unprintable_rules(&self) -> bool {
        let has = |family, table| {
            let place = iptables_table(family, table);
            self.ask(|nft| nft.has_other_expressions(place, &PRINTED)).unwrap_or_default()
        };
        let is_legacy = ["nat", "filter"].iter().any(|t| self.has_legacy_table(Family::V4, t));
        !is_legacy && Family::BOTH.iter().any(|f| has(*f, "nat") || has(*f, "filter"))
    }

    /// Whether the old iptables has used the table.
    pub(super) fn has_legacy_table(&self, family: Family, table: &str) -> bool {
        let [v4, v6] = &self.legacy;
        let (names, file) = match family {
            Family::V4 => (v4, "/proc/thread-self/net/ip_tables_names"),
            Family::V6 => (v6, "/proc/thread-self/net/ip6_tables_names"),
        };
        let names = names.get_or_init(|| fs::read_to_string(file).unwrap_or_default());
        names.lines().any(|name| name == table)
    }

    /// The lines of a built-in chain of the old iptables, if that is in use.
    pub fn legacy_chain(&self, family: Family, table: &str, chain: &str) -> Option<Vec<String>> {
        let programs = || Iptables::find(family, Flavour::Legacy);
        self.has_legacy_table(family, table).then(programs)??.list(table, chain)
    }

    /// Nothing is in a kernel without `nf_tables`.
    fn ask(&self, question: impl FnOnce(&Nft) -> netlink::Result<bool>) -> Result<bool> {
        let nft = self.nft_if_present()?;
        Ok(nft.map(question).transpose()?.unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_back_ends() {
        let parse = |value| Backend::parse(value, "unknown ipmasq backend");
        assert_eq!(parse(None), Ok(None));
        assert_eq!(parse(Some("")), Ok(None));
        assert_eq!(parse(Some("nftables")), Ok(Some(Backend::Nftables)));
        assert_eq!(parse(Some("iptables")), Ok(Some(Backend::Iptables)));
        let error = parse(Some("ebtables")).unwrap_err();
        assert_eq!((error.code().0, error.msg()), (7, "unknown ipmasq backend \"ebtables\""));
    }
}
