//! Which back end an attachment's rules are made with, and found in.

use std::net::IpAddr;

use super::Conf;
use crate::error::Result;
use crate::log;
use crate::netfilter::backend::Backend::{Iptables, Nftables};
use crate::netfilter::backend::{self, PacketFilter};
use crate::netfilter::filter::firewalld::{self, Zone};
use crate::netfilter::{Owner, Repair, filter, layout};

/// A back end that was chosen.
#[derive(Debug)]
pub(super) enum Backend<'a> {
    /// `nf_tables` or iptables.
    Kernel(backend::Backend),
    /// firewalld, over D-Bus.
    Firewalld(Zone<'a>),
}

impl<'a> Backend<'a> {
    /// The configured one; else firewalld if it runs, iptables if it works, `nf_tables`. As with
    /// the reference any other name is as none.
    pub(super) fn choose(conf: &'a Conf, filter: &PacketFilter) -> Result<Backend<'a>> {
        Backend::choose_or(conf, || kernel(filter))
    }

    fn choose_or(
        conf: &'a Conf,
        otherwise: impl FnOnce() -> backend::Backend,
    ) -> Result<Backend<'a>> {
        match conf.backend.as_str() {
            "nftables" => Ok(Backend::Kernel(Nftables)),
            "iptables" => Ok(Backend::Kernel(Iptables)),
            "firewalld" => Zone::open(conf.zone()).map(Backend::Firewalld),
            other => {
                if !["", "auto"].contains(&other) {
                    log::warn(format_args!(
                        "firewall: unknown backend \"{other}\" is ignored; choose nftables, iptables or firewalld"
                    ));
                }
                let found = Zone::find(conf.zone()).map(Backend::Firewalld);
                Ok(found.unwrap_or_else(|| Backend::Kernel(otherwise())))
            }
        }
    }

    /// The back end of the attachment's rules; if unknown, the back end that ADD would choose.
    pub(super) fn of(
        conf: &'a Conf,
        filter: &PacketFilter,
        owner: Owner<'_>,
        ips: &[IpAddr],
    ) -> Result<Backend<'a>> {
        let is_chosen = ["nftables", "iptables", "firewalld"].contains(&conf.backend.as_str());
        let has = filter::is_on_nft(filter, owner, ips).unwrap_or(false);
        if !is_chosen && has {
            Ok(Backend::Kernel(Nftables))
        } else {
            Backend::choose_or(conf, || kernel_of(filter, owner))
        }
    }

    /// firewalld for DEL: if it is the back end, or was when it was given something.
    pub(super) fn zone_to_clean(conf: &'a Conf, was_given: bool) -> Option<Zone<'a>> {
        let is_possible = !["nftables", "iptables"].contains(&conf.backend.as_str());
        if is_possible || was_given { Zone::find(conf.zone()) } else { None }
    }

    /// For STATUS: whether it can work here.
    pub(super) fn require_usable(self, filter: &PacketFilter) -> Result<()> {
        match self {
            Backend::Kernel(backend) => backend.require_usable(filter)?,
            Backend::Firewalld(mut zone) => {
                zone.status()?;
                layout::refuse(firewalld::heal(Repair::Report))?;
            }
        }
        layout::refuse(filter::damage(filter)?)
    }
}

/// What ADD makes rules with beside firewalld, or without it.
pub(super) fn kernel(filter: &PacketFilter) -> backend::Backend {
    backend::Backend::choose(None, filter)
}

/// What the attachment's rules were made with beside firewalld, or without it.
pub(super) fn kernel_of(filter: &PacketFilter, owner: Owner<'_>) -> backend::Backend {
    backend::Backend::of(None, filter, filter::KEPT, owner)
}
