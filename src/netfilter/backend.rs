//! Which of the kernel's two interfaces rules are made with, as the reference plugins choose.

use std::cell::OnceCell;
use std::fmt;
use std::fs;
use std::net::IpAddr;

use nix::errno::Errno;
use serde::{Deserialize, Serialize};

use super::iptables::{Flavour, Iptables};
use crate::cmd;
use crate::error::{Context, Error, Result};
use crate::netlink;
use crate::netlink::nftables::{self, Nft, Table};

/// A table to ask for; nobody has it.
const PROBED: Table<'_> = Table::inet("cnibox_probe");

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
            None if filter.require_nf_tables().is_ok() => Backend::Nftables,
            None => Backend::Iptables,
        }
    }

    /// For STATUS: whether this back end can work here at all; code 50 with a remedy if not.
    pub fn require_usable(self, filter: &PacketFilter) -> Result<()> {
        let usable = match self {
            Backend::Nftables => filter.require_nf_tables(),
            Backend::Iptables => Iptables::require(Family::V4).and_then(|_| {
                if probe() {
                    return Ok(());
                }
                Err(Error::internal("iptables is installed but does not work")
                    .with_details("run iptables -t filter -S INPUT 1 to see why"))
            }),
        };
        usable.or_unavailable()
    }
}

/// Whether iptables can look at the kernel's rules: status 1 is "no rule 1".
fn probe() -> bool {
    let Some(program) = cmd::find("iptables") else { return false };
    let output = cmd::run(&program, &["-t", "filter", "-S", "INPUT", "1"], "");
    output.is_ok_and(|output| matches!(output.code, Some(0 | 1)))
}

/// IPv4 or IPv6, which iptables keeps apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
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

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if *self == Family::V4 { "iptables" } else { "ip6tables" })
    }
}

/// The packet filter of the calling thread's namespace, opened on first use. One for each call of
/// a plugin: the kernel takes its time to close one that deleted something.
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
            None => match self.open().and_then(|nft| nft.has_table(PROBED)) {
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

    /// The iptables programs that see the chain, found without starting any: the flavour on top of
    /// `nf_tables` if the chain is there, the old one if it has this table at all.
    pub fn iptables_with(&self, family: Family, table: &str, chain: &str) -> Result<Vec<Iptables>> {
        let nft = self.has_chain(family, table, chain)?;
        let legacy = self.has_legacy_table(family, table).then_some(Flavour::Legacy);
        Ok(Iptables::find_each(family, [nft.then_some(Flavour::Nft), legacy]))
    }

    /// Whether `nf_tables` has the chain of iptables.
    pub(super) fn has_chain(&self, family: Family, table: &str, chain: &str) -> Result<bool> {
        self.ask(|nft| nft.has_chain(iptables_table(family, table).chain(chain)))
    }

    /// As [`iptables_with`](PacketFilter::iptables_with), for any chain that a CNI plugin made.
    pub fn iptables_with_any(&self, family: Family, table: &str) -> Result<Vec<Iptables>> {
        let place = iptables_table(family, table);
        let nft = self.ask(|nft| {
            let chains = if nft.has_table(place)? { nft.dump_chains(place)? } else { Vec::new() };
            Ok(chains.iter().any(|chain| chain.name.starts_with("CNI-")))
        })?;
        let legacy = self.has_legacy_table(family, table).then_some(Flavour::Legacy);
        Ok(Iptables::find_each(family, [nft.then_some(Flavour::Nft), legacy]))
    }

    /// Whether somebody uses iptables here already.
    fn has_iptables(&self) -> bool {
        let on_nft = |table| self.ask(|nft| nft.has_table(iptables_table(Family::V4, table)));
        let has =
            |table| self.has_legacy_table(Family::V4, table) || on_nft(table).unwrap_or_default();
        has("nat") || has("filter")
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

    /// Nothing is in a kernel without `nf_tables`.
    fn ask(&self, question: impl FnOnce(&Nft) -> netlink::Result<bool>) -> Result<bool> {
        let nft = self.nft_if_present()?;
        Ok(nft.map(question).transpose()?.unwrap_or_default())
    }
}

/// The table that iptables on top of `nf_tables` keeps its table in.
pub(super) fn iptables_table(family: Family, table: &str) -> Table<'_> {
    let family = match family {
        Family::V4 => nftables::Family::Ip,
        Family::V6 => nftables::Family::Ip6,
    };
    Table::new(family, table)
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
