//! Address families and their leases.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::timing::BootClockTime;
use super::v4::option::interface_mtu;
use super::{v4, v6};
use crate::framework::addressing::omit_default_routes;
use cni::{CniResult, ResultRoute};

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

/// What a configuration says about routes.
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct DhcpRouteConfig {
    /// Routes in addition to those of servers, which they replace if the destination is the same.
    pub added: Vec<ResultRoute>,
    /// If false, default routes are omitted.
    pub default_route: Option<bool>,
}

impl DhcpRouteConfig {
    pub fn is_default(&self) -> bool {
        *self == DhcpRouteConfig::default()
    }
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

    /// The IPAM result, with the configured routes of the family. Routes without a metric get
    /// `priority`; 0 leaves the choice to the kernel. Those without an MTU get that of the server.
    pub fn ipam_result(&self, priority: u32, conf: &DhcpRouteConfig) -> CniResult {
        let (mut result, mtu) = match self {
            DhcpLease::V4(lease) => (lease.ipam_result(), interface_mtu(&lease.options)),
            DhcpLease::V6(lease) => (lease.ipam_result(), None),
        };
        let is_v4 = self.ip_address().is_ipv4();
        let routes = &mut result.routes;
        routes.retain(|route| conf.added.iter().all(|own| own.dst.trunc() != route.dst.trunc()));
        routes.extend(conf.added.iter().filter(|own| own.dst.addr().is_ipv4() == is_v4).cloned());
        omit_default_routes(&mut result, conf.default_route);
        for route in &mut result.routes {
            route.priority = route.priority.or((priority != 0).then_some(priority));
            route.mtu = route.mtu.or(mtu);
        }
        result
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
pub fn combined_result(leases: &[DhcpLease], priority: u32, conf: &DhcpRouteConfig) -> CniResult {
    let mut whole = CniResult::new();
    for lease in leases {
        let part = lease.ipam_result(priority, conf);
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
    use cni::json::Json;

    #[test]
    fn one_result_for_both_families() {
        let now = std::time::Duration::from_secs(1);
        let told: [(u8, &[u8]); 6] = [
            (3, &[10, 1, 2, 1]),
            (33, &[11, 0, 0, 0, 10, 1, 2, 3]),
            (6, &[8, 8, 8, 8]),
            (15, b"a.com"),
            (119, b"\x01b\0\x01c\0"),
            (26, &[5, 0x14]),
        ];
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
        let leases = [v4, v6];
        let route = |text: &str| Json::parse(text.as_bytes()).unwrap().decode().unwrap();
        let added = vec![
            route(r#"{"dst":"11.0.0.9/8","gw":"10.1.2.4","mtu":1290,"priority":3}"#),
            route(r#"{"dst":"fd00::/8","gw":"fe80::1"}"#),
        ];
        let routes = |default_route| {
            let conf = DhcpRouteConfig { added: added.clone(), default_route };
            let routes = combined_result(&leases, 7, &conf).routes;
            let text = |r: &ResultRoute| {
                format!("{} {} {:?} {:?}", r.dst, r.gw.unwrap(), r.priority, r.mtu)
            };
            routes.iter().map(text).collect::<Vec<_>>()
        };
        let others = ["11.0.0.9/8 10.1.2.4 Some(3) Some(1290)", "fd00::/8 fe80::1 Some(7) None"];
        let default = "0.0.0.0/0 10.1.2.1 Some(7) Some(1300)";
        assert_eq!(routes(None), [default, others[0], others[1]]);
        assert_eq!(routes(Some(false)), others);
        let whole = combined_result(&leases, 0, &DhcpRouteConfig::default());
        let ips: Vec<_> = whole.ips.iter().map(|ip| ip.address.to_string()).collect();
        assert_eq!(ips, ["10.1.2.9/24", "2001:db8::5/128"]);
        assert_eq!((whole.routes.len(), whole.routes[0].priority), (2, None));
        assert_eq!(whole.dns.nameservers, ["8.8.8.8", "2001:db8::1"]);
        assert_eq!(
            (whole.dns.domain.as_str(), whole.dns.search),
            ("a.com", vec!["b".to_owned(), "c".to_owned(), "d".to_owned()])
        );
    }
}
