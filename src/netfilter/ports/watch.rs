//! Waiting for a port that another container has: until rules have changed.

use std::thread;
use std::time::{Duration, Instant};

use crate::log;
use crate::netfilter::backend::{Family, PacketFilter};
use crate::netlink::nftables::{self, Nft};

/// How often to look where the kernel tells nobody: at the rules of the old iptables.
const INTERVAL: Duration = Duration::from_millis(100);

/// Rests between two looks: a try that fails half-way changes rules itself, which is heard as well.
const PAUSE: Duration = Duration::from_millis(20);

/// Hears of changes that are made from its opening on.
#[derive(Debug)]
pub struct Watch {
    nft: Option<nftables::Watch>,
    /// Whether rules may change unheard.
    legacy: bool,
}

impl Watch {
    /// One in the calling thread's namespace.
    pub fn open(filter: &PacketFilter) -> Watch {
        let nft = Nft::watch().inspect_err(|e| log::debug(e)).ok();
        let has_legacy = |family: &Family| filter.has_legacy_table(*family, "nat");
        let legacy = nft.is_none() || Family::BOTH.iter().any(has_legacy);
        Watch { nft, legacy }
    }

    /// Waits until it is worth looking again; false when `until` has come.
    pub fn heard(&self, until: Instant) -> bool {
        thread::sleep(PAUSE);
        let now = Instant::now();
        let end = if self.legacy { until.min(now + INTERVAL) } else { until };
        let heard = self.nft.as_ref().map(|nft| nft.heard(end));
        if !matches!(heard, Some(Ok(_))) {
            thread::sleep(end.saturating_duration_since(Instant::now()));
        }
        Instant::now() < until
    }
}
