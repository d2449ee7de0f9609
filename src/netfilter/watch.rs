//! Waits for a change of rules by any program.

use std::os::fd::{AsFd, BorrowedFd};
use std::thread;
use std::time::{Duration, Instant};

use super::backend::{IpFamily, PacketFilter};
use crate::netlink::nftables::{self, NftSocket};

/// The poll interval where the kernel sends no events: for the rules of iptables-legacy.
const INTERVAL: Duration = Duration::from_millis(100);

/// The minimum delay between two attempts: a failed attempt to take a port changes rules, which
/// also causes events.
const PAUSE: Duration = Duration::from_millis(20);

/// Receives the changes made after it was opened.
#[derive(Debug)]
pub struct PacketFilterWatch {
    nft: Option<nftables::NftablesWatch>,
    /// Whether rules may change without an event, as the rules of iptables-legacy do.
    polls: bool,
}

impl PacketFilterWatch {
    /// Watches the calling thread's namespace.
    pub fn open(filter: &PacketFilter) -> PacketFilterWatch {
        let mut watch = PacketFilterWatch { nft: None, polls: true };
        watch.restart_watch(filter);
        watch
    }

    /// Drops the changes received so far, and determines again whether `nf_tables` and
    /// iptables-legacy are used.
    pub fn restart_watch(&mut self, filter: &PacketFilter) {
        let dropped = self.nft.as_ref().map(|nft| nft.wait_for_change(Instant::now()));
        if !matches!(dropped, Some(Ok(_))) {
            self.nft = NftSocket::watch_changes().inspect_err(|e| debug!("{e}")).ok();
        }
        let has_legacy =
            |table| IpFamily::BOTH.iter().any(|family| filter.has_legacy_table(*family, table));
        self.polls = self.nft.is_none() || has_legacy("nat") || has_legacy("filter");
    }

    /// A descriptor that is readable after a change; `None` if the kernel has no `nf_tables`.
    pub fn event_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.nft.as_ref().map(AsFd::as_fd)
    }

    /// Whether rules may change without an event.
    pub fn must_poll(&self) -> bool {
        self.polls
    }

    /// Waits for a change, at least for [`PAUSE`]. Returns false if the deadline has passed.
    pub fn wait_for_change(&self, until: Instant) -> bool {
        thread::sleep(PAUSE);
        let now = Instant::now();
        let end = if self.polls { until.min(now + INTERVAL) } else { until };
        let heard = self.nft.as_ref().map(|nft| nft.wait_for_change(end));
        if !matches!(heard, Some(Ok(_))) {
            thread::sleep(end.saturating_duration_since(Instant::now()));
        }
        Instant::now() < until
    }
}
