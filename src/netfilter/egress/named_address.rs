//! An address to which a name leads, for a time.

use std::net::IpAddr;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// The times for which an address is allowed, in seconds, whatever the answer's time to live is.
pub(super) const SHORTEST: u32 = 60;
pub(super) const LONGEST: u32 = 3600;

/// An address to which a name leads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedAddress {
    /// The name that was asked for, in lower case.
    pub name: String,
    pub ip: IpAddr,
    /// When the address vanishes, in seconds of `CLOCK_BOOTTIME`, which nobody can set.
    pub until: u64,
}

impl NamedAddress {
    /// The address for the time to live of an answer, in seconds.
    pub fn with_ttl(name: &str, ip: IpAddr, ttl: u32) -> NamedAddress {
        let until = boot_seconds() + u64::from(ttl.clamp(SHORTEST, LONGEST));
        NamedAddress { name: name.to_owned(), ip, until }
    }

    /// Whether both are the same address of the same name, whatever their times are.
    pub fn is_same(&self, other: &NamedAddress) -> bool {
        (&self.name, self.ip) == (&other.name, other.ip)
    }

    /// The number of seconds until the address vanishes.
    pub fn remaining(&self) -> u32 {
        u32::try_from(self.until.saturating_sub(boot_seconds())).unwrap_or(LONGEST).min(LONGEST)
    }
}

/// Seconds since the start of the system, suspend included.
pub(super) fn boot_seconds() -> u64 {
    clock_gettime(ClockId::CLOCK_BOOTTIME).map_or(Duration::ZERO, Duration::from).as_secs()
}
