//! Waiting for a port that another container has: until rules have changed.

use std::time::{Duration, Instant};

use nix::poll::{PollTimeout, poll};

use crate::log;
use crate::netfilter::backend::{Family, PacketFilter};
use crate::netlink::nftables::{self, Nft};

/// How often to look where the kernel tells nobody: at the rules of the old iptables.
const INTERVAL: Duration = Duration::from_millis(100);

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
        let now = Instant::now();
        let end = if self.legacy { until.min(now + INTERVAL) } else { until };
        let heard = if let Some(nft) = &self.nft {
            nft.heard(end).inspect_err(|e| log::debug(e)).unwrap_or_default()
        } else {
            let left = u16::try_from(end.saturating_duration_since(now).as_millis());
            poll(&mut [], PollTimeout::from(left.unwrap_or_default())).is_err()
        };
        heard || Instant::now() < until
    }
}
