//! Forwarding between interfaces of the host.

use std::net::IpAddr;

use crate::error::{Context, Result};
use crate::sysctl;

/// Switches forwarding on for the families of `ips`; never off again, as others may rely on it.
/// Nothing is written where it is on already.
pub fn enable(ips: impl Iterator<Item = IpAddr>) -> Result<()> {
    let (mut v4, mut v6) = (false, false);
    for ip in ips {
        *if ip.is_ipv4() { &mut v4 } else { &mut v6 } = true;
    }
    let wanted = [(v4, "net/ipv4/ip_forward"), (v6, "net/ipv6/conf/all/forwarding")];
    for (_, key) in wanted.iter().filter(|(wanted, _)| *wanted) {
        sysctl::ensure(key, "1").context(|| "failed to enable forwarding")?;
    }
    Ok(())
}
