//! Address families and their leases.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::timing::BootClockTime;
use super::{v4, v6};
use cni::CniResult;

#[derive(
    Clone, Copy, Debug, Default, Deserialize, Serialize, PartialEq, Eq, Hash, PartialOrd, Ord,
)]
pub enum DhcpFamily {
    #[default]
    #[serde(rename = "ipv4")]
    V4,
    #[serde(rename = "ipv6")]
    V6,
}

impl DhcpFamily {
    pub const ALL: [DhcpFamily; 2] = [DhcpFamily::V4, DhcpFamily::V6];
}

/// A lease of either family.
#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(untagged)]
pub enum DhcpLease {
    V4(v4::lease::Dhcp4Lease),
    V6(v6::lease::Dhcp6Lease),
}

impl DhcpLease {
    /// The address with its prefix.
    pub fn ip_net(&self) -> IpNet {
        match self {
            DhcpLease::V4(lease) => lease.ip_net(),
            DhcpLease::V6(lease) => lease.ip_net(),
        }
    }

    pub fn ip_address(&self) -> IpAddr {
        self.ip_net().addr()
    }

    /// The server, as text for a log.
    pub fn server_text(&self) -> String {
        match self {
            DhcpLease::V4(lease) => lease.server.to_string(),
            DhcpLease::V6(lease) => v6::duid_text(&lease.server),
        }
    }

    /// The end of the lease: the address must not be used afterwards.
    pub fn expiry_time(&self) -> BootClockTime {
        match self {
            DhcpLease::V4(lease) => lease.expires,
            DhcpLease::V6(lease) => lease.expires,
        }
    }

    /// The IPAM result. All IPv4 routes get the metric `priority`; 0 leaves the choice to the
    /// kernel.
    pub fn ipam_result(&self, priority: u32) -> CniResult {
        match self {
            DhcpLease::V4(lease) => lease.ipam_result(priority),
            DhcpLease::V6(lease) => lease.ipam_result(),
        }
    }

    /// Whether a change from this lease to `next` changes the interface.
    pub fn differs_on_link(&self, next: &DhcpLease) -> bool {
        match (self, next) {
            (DhcpLease::V4(old), DhcpLease::V4(new)) => old.differs_on_link(new),
            (old, new) => old.ip_net() != new.ip_net(),
        }
    }
}

/// The IPAM result for all leases of an attachment.
pub fn combined_result(leases: &[DhcpLease], priority: u32) -> CniResult {
    let mut whole = CniResult::new();
    for lease in leases {
        let part = lease.ipam_result(priority);
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
    use super::super::timing::{NEVER, RandomGenerator};
    use super::*;

    #[test]
    fn one_result_for_both_families() {
        let now = std::time::Duration::from_secs(1);
        let told: [(u8, &[u8]); 4] =
            [(3, &[10, 1, 2, 1]), (6, &[8, 8, 8, 8]), (15, b"a.com"), (119, b"\x01b\0\x01c\0")];
        let v4 = v4::lease::Dhcp4Lease::from_ack(
            &ack(&told),
            MAC,
            now,
            &mut RandomGenerator::from_seed(1),
        )
        .unwrap();
        let v6 = v6::lease::Dhcp6Lease {
            address: "2001:db8::5".parse().unwrap(),
            server: vec![0, 1, 0xab],
            renew: NEVER,
            rebind: NEVER,
            expires: NEVER,
            name_servers: vec!["2001:db8::1".parse().unwrap()],
            search: vec!["c".to_owned(), "d".to_owned()],
        };
        let (v4, v6) = (DhcpLease::V4(v4), DhcpLease::V6(v6));
        assert_eq!(
            (v4.server_text().as_str(), v6.server_text().as_str()),
            ("10.1.2.1", "00:01:ab")
        );
        let whole = combined_result(&[v4, v6], 0);
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
