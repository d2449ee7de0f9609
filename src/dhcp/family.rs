//! Address families and their leases.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::timing::BootTime;
use super::{v4, v6};
use crate::cni::CniResult;

/// A family of addresses.
#[derive(
    Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq, Hash, PartialOrd, Ord,
)]
pub enum Family {
    /// DHCP.
    #[default]
    #[serde(rename = "ipv4")]
    V4,
    /// DHCPv6.
    #[serde(rename = "ipv6")]
    V6,
}

impl Family {
    /// Both.
    pub const ALL: [Family; 2] = [Family::V4, Family::V6];
}

/// A lease of either family.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(untagged)]
pub enum Lease {
    /// IPv4.
    V4(v4::lease::Lease),
    /// IPv6.
    V6(v6::lease::Lease),
}

impl Lease {
    /// The address with its prefix.
    pub fn ip_net(&self) -> IpNet {
        match self {
            Lease::V4(lease) => lease.ip_net(),
            Lease::V6(lease) => lease.ip_net(),
        }
    }

    /// The address.
    pub fn address(&self) -> IpAddr {
        self.ip_net().addr()
    }

    /// The server, as text for a log.
    pub fn server(&self) -> String {
        match self {
            Lease::V4(lease) => lease.server.to_string(),
            Lease::V6(lease) => v6::text(&lease.server),
        }
    }

    /// The end of the lease: the address must not be used afterwards.
    pub fn expires(&self) -> BootTime {
        match self {
            Lease::V4(lease) => lease.expires,
            Lease::V6(lease) => lease.expires,
        }
    }

    /// The IPAM result. All IPv4 routes get the metric `priority`; 0 leaves the choice to the kernel.
    pub fn result(&self, priority: u32) -> CniResult {
        match self {
            Lease::V4(lease) => lease.result(priority),
            Lease::V6(lease) => lease.result(),
        }
    }

    /// Whether a change from this lease to `next` changes the interface.
    pub fn differs_on_link(&self, next: &Lease) -> bool {
        match (self, next) {
            (Lease::V4(old), Lease::V4(new)) => old.differs_on_link(new),
            (old, new) => old.ip_net() != new.ip_net(),
        }
    }
}

/// The IPAM result for all leases of an attachment.
pub fn result(leases: &[Lease], priority: u32) -> CniResult {
    let mut whole = CniResult::new();
    for lease in leases {
        let part = lease.result(priority);
        whole.ips.extend(part.ips);
        whole.routes.extend(part.routes);
        let dns = &mut whole.dns;
        dns.nameservers.extend(part.dns.nameservers);
        if dns.domain.is_empty() {
            dns.domain = part.dns.domain;
        }
        for domain in part.dns.search {
            if !dns.search.contains(&domain) {
                dns.search.push(domain);
            }
        }
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::super::tests::{MAC, ack};
    use super::super::timing::{NEVER, Random};
    use super::*;

    #[test]
    fn one_result_for_both_families() {
        let now = std::time::Duration::from_secs(1);
        let told: [(u8, &[u8]); 4] =
            [(3, &[10, 1, 2, 1]), (6, &[8, 8, 8, 8]), (15, b"a.com"), (119, b"\x01b\0\x01c\0")];
        let v4 =
            v4::lease::Lease::from_ack(&ack(&told), MAC, now, &mut Random::from_seed(1)).unwrap();
        let v6 = v6::lease::Lease {
            address: "2001:db8::5".parse().unwrap(),
            server: vec![0, 1, 0xab],
            renew: NEVER,
            rebind: NEVER,
            expires: NEVER,
            name_servers: vec!["2001:db8::1".parse().unwrap()],
            search: vec!["c".to_owned(), "d".to_owned()],
        };
        let (v4, v6) = (Lease::V4(v4), Lease::V6(v6));
        assert_eq!((v4.server().as_str(), v6.server().as_str()), ("10.1.2.1", "00:01:ab"));
        let whole = result(&[v4, v6], 0);
        let ips: Vec<_> = whole.ips.iter().map(|ip| ip.address.to_string()).collect();
        assert_eq!(ips, ["10.1.2.9/24", "2001:db8::5/128"]);
        assert_eq!(whole.routes.len(), 1);
        assert_eq!(whole.dns.nameservers, ["8.8.8.8", "2001:db8::1"]);
        assert_eq!(
            (whole.dns.domain.as_str(), whole.dns.search),
            ("a.com", vec!["b".to_owned(), "c".to_owned(), "d".to_owned()])
        );
    }
}
