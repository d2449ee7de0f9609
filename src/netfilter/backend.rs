//! Which of the kernel's two interfaces rules are made with, as the reference plugins choose.

use std::cell::OnceCell;
use std::fs;
use std::net::IpAddr;

use super::iptables::{Flavour, Iptables};
use crate::cmd;
use crate::error::{Code, Error, Result};
use crate::netlink::nftables::{self, Nft, Table};

/// How rules are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// `nf_tables`, over netlink.
    Nftables,
    /// The programs of iptables.
    Iptables,
}

impl Backend {
    /// The back end of this name, if `value` names one; none if it is empty. `what` is for the
    /// message: `unknown ipmasq backend "ebtables"`, code 7.
    pub fn parse(value: Option<&str>, what: &str) -> Result<Option<Backend>> {
        match value.unwrap_or_default() {
            "" => Ok(None),
            "nftables" => Ok(Some(Backend::Nftables)),
            "iptables" => Ok(Some(Backend::Iptables)),
            other => Err(Error::config(format!("unknown {what} backend \"{other}\""))
                .with_details("the back ends are \"iptables\" and \"nftables\"")),
        }
    }

    /// The configured one; without, iptables where it is installed and works, else nftables. Where
    /// nobody has used an installed iptables yet, it is tried, which starts a process.
    pub fn choose(configured: Option<Backend>, filter: &PacketFilter) -> Backend {
        let installed = || Iptables::find(Family::V4, Flavour::Default).is_some();
        let works = || installed() && (filter.has_iptables() || probe());
        match configured {
            Some(backend) => backend,
            None if works() => Backend::Iptables,
            None if filter.has_nf_tables().is_ok() => Backend::Nftables,
            None => Backend::Iptables,
        }
    }

    /// For STATUS: whether this back end can work here at all; code 50 with a remedy if not.
    pub fn require_usable(self, filter: &PacketFilter) -> Result<()> {
        let usable = match self {
            Backend::Nftables => filter.has_nf_tables(),
            Backend::Iptables => Iptables::require(Family::V4).and_then(|_| {
                if probe() {
                    return Ok(());
                }
                Err(Error::internal("iptables is installed but does not work")
                    .with_details("run iptables -t filter -S INPUT 1 to see why"))
            }),
        };
        usable.map_err(|e| e.with_code(Code::NOT_AVAILABLE))
    }
}

/// Whether iptables can look at the kernel's rules: status 1 is "no rule 1".
fn probe() -> bool {
    let Some(program) = cmd::find("iptables") else { return false };
    let output = cmd::run(&program, &["-t", "filter", "-S", "INPUT", "1"], "");
    output.is_ok_and(|output| matches!(output.code, Some(0 | 1)))
}

/// IPv4 or IPv6, which iptables keeps apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

impl Family {
    /// Both.
    pub const BOTH: [Family; 2] = [Family::V4, Family::V6];

    /// That of an address.
    pub fn of(addr: IpAddr) -> Family {
        if addr.is_ipv4() { Family::V4 } else { Family::V6 }
    }
}

/// The packet filter of the calling thread's namespace, opened on first use. One for each call of
/// a plugin: the kernel takes its time to close one that deleted something.
#[derive(Debug, Default)]
pub struct PacketFilter {
    nft: OnceCell<Nft>,
}

impl PacketFilter {
    /// Nothing opened yet.
    pub fn new() -> PacketFilter {
        PacketFilter::default()
    }

    /// `nf_tables`.
    pub fn nft(&self) -> Result<&Nft> {
        if let Some(nft) = self.nft.get() {
            return Ok(nft);
        }
        let opened = Nft::open()?;
        Ok(self.nft.get_or_init(|| opened))
    }

    /// Whether the kernel has `nf_tables`, at the cost of one question.
    pub fn has_nf_tables(&self) -> Result<()> {
        let asked = self.nft().and_then(|nft| Ok(nft.has_table(Table::inet("cnibox_probe"))?));
        asked.map(drop).map_err(|e| match e.details() {
            "" => e.with_details("load the kernel module nf_tables"),
            _ => e,
        })
    }

    /// The iptables programs that see the chain, found without starting any: the flavour on top of
    /// `nf_tables` if the chain is there, the old one if it has this table at all.
    pub fn iptables_with(&self, family: Family, table: &str, chain: &str) -> Vec<Iptables> {
        let nft = self.ask(|nft| nft.has_chain(iptables_table(family, table).chain(chain)));
        let legacy = has_legacy_table(family, table).then_some(Flavour::Legacy);
        Iptables::find_each(family, [nft.then_some(Flavour::Nft), legacy])
    }

    /// Whether iptables on top of `nf_tables` has a chain of ours in the table.
    pub fn has_iptables_chains(&self, family: Family, table: &str) -> bool {
        let table = iptables_table(family, table);
        let chains = |nft: &Nft| Ok(nft.has_table(table)?.then(|| nft.dump_chains(table)));
        self.ask(|nft| match chains(nft)? {
            Some(chains) => Ok(chains?.iter().any(|chain| chain.name.starts_with("CNI-"))),
            None => Ok(false),
        })
    }

    /// Whether somebody uses iptables here already.
    fn has_iptables(&self) -> bool {
        let has = |table| {
            has_legacy_table(Family::V4, table)
                || self.ask(|nft| nft.has_table(iptables_table(Family::V4, table)))
        };
        has("nat") || has("filter")
    }

    /// What cannot be asked is not there.
    fn ask(&self, question: impl FnOnce(&Nft) -> crate::netlink::Result<bool>) -> bool {
        self.nft().is_ok_and(|nft| question(nft).unwrap_or(false))
    }
}

/// The table that iptables on top of `nf_tables` keeps its table in.
fn iptables_table(family: Family, table: &str) -> Table<'_> {
    let family = match family {
        Family::V4 => nftables::Family::Ip,
        Family::V6 => nftables::Family::Ip6,
    };
    Table::new(family, table)
}

/// Whether the old iptables has used the table in the calling thread's namespace.
pub fn has_legacy_table(family: Family, table: &str) -> bool {
    let file = match family {
        Family::V4 => "/proc/thread-self/net/ip_tables_names",
        Family::V6 => "/proc/thread-self/net/ip6_tables_names",
    };
    fs::read_to_string(file).is_ok_and(|names| names.lines().any(|name| name == table))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_back_ends() {
        let parse = |value| Backend::parse(value, "ipmasq");
        assert_eq!(parse(None), Ok(None));
        assert_eq!(parse(Some("")), Ok(None));
        assert_eq!(parse(Some("nftables")), Ok(Some(Backend::Nftables)));
        assert_eq!(parse(Some("iptables")), Ok(Some(Backend::Iptables)));
        let error = parse(Some("ebtables")).unwrap_err();
        assert_eq!((error.code().0, error.msg()), (7, "unknown ipmasq backend \"ebtables\""));
    }
}
