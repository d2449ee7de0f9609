//! Waiting for a change of rules, by whatever program.

use std::os::fd::{AsFd, BorrowedFd};
use std::thread;
use std::time::{Duration, Instant};

use super::backend::{Family, PacketFilter};
use crate::log;
use crate::netlink::nftables::{self, Nft};

/// How often to look for a taken port where the kernel sends no events: at the rules of the legacy iptables.
const INTERVAL: Duration = Duration::from_millis(100);

/// How long a port that is taken is not looked at again: a try that fails half-way changes rules
/// itself, which is heard as well.
const PAUSE: Duration = Duration::from_millis(20);

/// Hears of changes that are made from its opening on.
#[derive(Debug)]
pub struct Watch {
    nft: Option<nftables::Watch>,
    /// Whether rules may change without an event: those of the legacy iptables.
    polls: bool,
}

impl Watch {
    /// One in the calling thread's namespace.
    pub fn open(filter: &PacketFilter) -> Watch {
        let mut watch = Watch { nft: None, polls: true };
        watch.renew(filter);
        watch
    }

    /// Drops the changes that were heard, and looks again which of `nf_tables` and the legacy iptables are
    /// in use.
    pub fn renew(&mut self, filter: &PacketFilter) {
        let dropped = self.nft.as_ref().map(|nft| nft.heard(Instant::now()));
        if !matches!(dropped, Some(Ok(_))) {
            self.nft = Nft::watch().inspect_err(|e| log::debug(e)).ok();
        }
        let has_legacy =
            |table| Family::BOTH.iter().any(|family| filter.has_legacy_table(*family, table));
        self.polls = self.nft.is_none() || has_legacy("nat") || has_legacy("filter");
    }

    /// What has input after a change, unless the kernel has no `nf_tables`.
    pub fn events(&self) -> Option<BorrowedFd<'_>> {
        self.nft.as_ref().map(AsFd::as_fd)
    }

    /// Whether rules may change without an event.
    pub fn must_poll(&self) -> bool {
        self.polls
    }

    /// For a port that another container has: waits until it is worth looking again; false when
    /// `until` has come.
    pub fn heard(&self, until: Instant) -> bool {
        thread::sleep(PAUSE);
        let now = Instant::now();
        let end = if self.polls { until.min(now + INTERVAL) } else { until };
        let heard = self.nft.as_ref().map(|nft| nft.heard(end));
        if !matches!(heard, Some(Ok(_))) {
            thread::sleep(end.saturating_duration_since(Instant::now()));
        }
        Instant::now() < until
    }
}
