//! Which back end an attachment's rules are made with, and found in.

use super::Conf;
use crate::error::Result;
use crate::log;
use crate::netfilter::backend::{self, PacketFilter};
use crate::netfilter::filter::firewalld::Zone;
use crate::netfilter::filter::{Pod, Policy, kept, nftables};
use crate::netfilter::layout;

/// A back end that was chosen.
#[derive(Debug)]
pub(super) enum Backend<'a> {
    /// `nf_tables`, over netlink.
    Nftables,
    /// The programs of iptables.
    Iptables,
    /// firewalld, over D-Bus.
    Firewalld(Zone<'a>),
}

/// Where a policy is kept beside firewalld.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PolicyBackend {
    /// `nf_tables`, over netlink.
    Nftables,
    /// The programs of iptables.
    Iptables,
}

impl<'a> Backend<'a> {
    /// The configured one; else firewalld if it runs, iptables if it works, `nf_tables`. As with
    /// the reference any other name means that nobody chose.
    pub(super) fn choose(conf: &'a Conf, filter: &PacketFilter) -> Result<Backend<'a>> {
        match conf.backend.as_str() {
            "nftables" => Ok(Backend::Nftables),
            "iptables" => Ok(Backend::Iptables),
            "firewalld" => Zone::open(conf.zone()).map(Backend::Firewalld),
            other => {
                if !["", "auto"].contains(&other) {
                    log::warn(format_args!(
                        "firewall: unknown backend \"{other}\" is ignored: nftables, iptables or firewalld"
                    ));
                }
                let found = Zone::find(conf.zone()).map(Backend::Firewalld);
                Ok(found.unwrap_or_else(|| Backend::without_firewalld(filter)))
            }
        }
    }

    fn without_firewalld(filter: &PacketFilter) -> Backend<'a> {
        match backend::Backend::choose(None, filter) {
            backend::Backend::Nftables => Backend::Nftables,
            backend::Backend::Iptables => Backend::Iptables,
        }
    }

    /// The one that the attachment's rules are in; where that cannot be told, the one to choose.
    pub(super) fn of(conf: &'a Conf, filter: &PacketFilter, pod: &Pod) -> Result<Backend<'a>> {
        let is_chosen = ["nftables", "iptables", "firewalld"].contains(&conf.backend.as_str());
        let has = filter.nft().and_then(|nft| nftables::has(nft, pod)).unwrap_or(false);
        if !is_chosen && has { Ok(Backend::Nftables) } else { Backend::choose(conf, filter) }
    }

    /// firewalld for DEL: if it is the back end, or was when it was given something.
    pub(super) fn zone_to_clean(conf: &'a Conf, was_given: bool) -> Option<Zone<'a>> {
        let is_possible = !["nftables", "iptables"].contains(&conf.backend.as_str());
        if is_possible || was_given { Zone::find(conf.zone()) } else { None }
    }

    /// For STATUS: whether it can work here.
    pub(super) fn require_usable(self, filter: &PacketFilter) -> Result<()> {
        match self {
            Backend::Nftables => backend::Backend::Nftables.require_usable(filter)?,
            Backend::Iptables => backend::Backend::Iptables.require_usable(filter)?,
            Backend::Firewalld(mut zone) => zone.status()?,
        }
        // Ports are isolated there, whatever the back end is.
        let nft = filter.nft_if_present()?;
        layout::refuse(nft.map(nftables::damage).transpose()?.flatten())?;
        layout::refuse(kept::damage()?)
    }
}

impl PolicyBackend {
    /// As the reference, iptables where it works. None for the policy that needs no rule.
    pub(super) fn choose(policy: Policy, filter: &PacketFilter) -> Option<PolicyBackend> {
        if policy == Policy::Open {
            return None;
        }
        Some(match backend::Backend::choose(None, filter) {
            backend::Backend::Nftables => PolicyBackend::Nftables,
            backend::Backend::Iptables => PolicyBackend::Iptables,
        })
    }
}
