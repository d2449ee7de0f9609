//! IPv4 leases, built from a DHCPACK.

use std::net::Ipv4Addr;
use std::time::Duration;

use ipnet::{IpNet, Ipv4Net};
use serde::{Deserialize, Serialize};

use super::super::timing::{BootClockTime, LeaseTimers, NEVER, RandomGenerator, millis};
use super::message::Dhcp4Message;
use super::option::{self, Dhcp4Options, pairs};
use crate::netlink::MacAddress;
use cni::{CniResult, DnsConfig, IpConfig, ResultRoute};

/// The lease time if the server sends none, as in the reference.
const DEFAULT_TIME: Duration = Duration::from_secs(60 * 60);
/// The shortest lease time: shorter ones would let a server make the daemon renew without pause.
pub const SHORTEST_TIME: Duration = Duration::from_secs(4);
/// The lease time (option 51) of a lease without end.
const INFINITE: u32 = u32::MAX;
/// `RT_SCOPE_LINK`.
const ON_LINK: u8 = 253;

#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Dhcp4Lease {
    /// The address with the prefix of its subnet.
    pub net: Ipv4Net,
    /// The server identifier (option 54).
    pub server: Ipv4Addr,
    /// The source Ethernet address of the DHCPACK: the server's or a router's.
    pub server_mac: MacAddress,
    /// T1: renew with the server.
    #[serde(with = "millis")]
    pub renew: BootClockTime,
    /// T2: renew with any server.
    #[serde(with = "millis")]
    pub rebind: BootClockTime,
    /// The end of the lease: the address must not be used afterwards.
    #[serde(with = "millis")]
    pub expires: BootClockTime,
    /// The requested options of the DHCPACK.
    #[serde(with = "pairs")]
    pub options: Dhcp4Options,
}

/// An address that a server has offered or assigned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dhcp4Binding {
    pub address: Ipv4Addr,
    /// The server identifier.
    pub server: Ipv4Addr,
    /// The source Ethernet address of the server's reply.
    pub server_mac: MacAddress,
}

impl From<&Dhcp4Lease> for Dhcp4Binding {
    fn from(lease: &Dhcp4Lease) -> Dhcp4Binding {
        Dhcp4Binding {
            address: lease.ip_address(),
            server: lease.server,
            server_mac: lease.server_mac,
        }
    }
}

/// Why a DHCPACK is not usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dhcp4AckFlaw {
    /// No subnet mask, or an invalid mask.
    NoMask,
    /// Not an address of a host.
    BadAddress,
    /// No server identifier, so no server to renew with.
    NoServer,
}

impl std::fmt::Display for Dhcp4AckFlaw {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Dhcp4AckFlaw::NoMask => "DHCP option Subnet Mask not found in DHCPACK",
            Dhcp4AckFlaw::BadAddress => "address in DHCPACK is not valid for a host",
            Dhcp4AckFlaw::NoServer => "DHCP option Server Identifier not found in DHCPACK",
        })
    }
}

impl Dhcp4Lease {
    /// Reads a DHCPACK from `server_mac`, the reply to a request that was sent at `asked`.
    pub fn from_ack(
        ack: &Dhcp4Message,
        server_mac: MacAddress,
        asked: BootClockTime,
        random: &mut RandomGenerator,
    ) -> Result<Dhcp4Lease, Dhcp4AckFlaw> {
        let options = &ack.options;
        let net = validated_net(ack.yiaddr, options)?;
        let server =
            option::first_address(options, option::SERVER).ok_or(Dhcp4AckFlaw::NoServer)?;
        let seconds =
            |code| option::number_value(options, code).map(u64::from).map(Duration::from_secs);
        let times = if option::number_value(options, option::LEASE_TIME) == Some(INFINITE) {
            [NEVER; 3]
        } else {
            let time = seconds(option::LEASE_TIME).unwrap_or(DEFAULT_TIME).max(SHORTEST_TIME);
            let sent = seconds(option::RENEWAL).zip(seconds(option::REBINDING));
            let sensible =
                sent.filter(|(t1, t2)| *t1 >= Duration::from_secs(1) && t1 < t2 && *t2 < time);
            let (t1, t2) = sensible.unwrap_or((time / 2, time / 8 * 7));
            [t1, t2, time]
        };
        let LeaseTimers { renew, rebind, expires } = LeaseTimers::new(asked, times, random);
        Ok(Dhcp4Lease { net, server, server_mac, renew, rebind, expires, options: options.clone() })
    }

    pub fn ip_address(&self) -> Ipv4Addr {
        self.net.addr()
    }

    /// The IPAM result.
    pub fn ipam_result(&self) -> CniResult {
        let gateway = option::first_address(&self.options, option::ROUTERS);
        let routes = self.result_routes(gateway);
        let (address, gateway) = (self.ip_net(), gateway.map(Into::into));
        let ip = IpConfig { address, gateway, interface: None };
        CniResult { ips: vec![ip], routes, dns: self.result_dns(), ..CniResult::new() }
    }

    /// Classless routes replace all other routes (RFC 3442).
    fn result_routes(&self, gateway: Option<Ipv4Addr>) -> Vec<ResultRoute> {
        let via = |(dst, gw): (Ipv4Net, Ipv4Addr)| ResultRoute {
            gw: Some(gw.into()),
            ..ResultRoute::for_destination(dst.into())
        };
        if let Some(routes) = option::classless_routes(&self.options) {
            return routes
                .into_iter()
                .map(|(dst, gw)| ResultRoute {
                    scope: gw.is_unspecified().then_some(ON_LINK),
                    ..via((dst, gw))
                })
                .collect();
        }
        let default = gateway.map(|gw| (Ipv4Net::default(), gw));
        option::static_routes(&self.options).into_iter().chain(default).map(via).collect()
    }

    fn result_dns(&self) -> DnsConfig {
        let servers = option::address_list(&self.options, option::NAME_SERVERS);
        DnsConfig {
            nameservers: servers.map(|server| server.to_string()).collect(),
            domain: option::domain_name(&self.options).unwrap_or_default(),
            search: option::search_domains(&self.options),
            options: Vec::new(),
        }
    }

    /// Whether a change from this lease to `next` changes the interface.
    pub fn differs_on_link(&self, next: &Dhcp4Lease) -> bool {
        let part = |lease: &Dhcp4Lease| {
            let result = lease.ipam_result();
            (result.ips, result.routes, option::interface_mtu(&lease.options))
        };
        part(self) != part(next)
    }

    /// The address with its prefix.
    pub fn ip_net(&self) -> IpNet {
        self.net.into()
    }
}

fn validated_net(address: Ipv4Addr, options: &Dhcp4Options) -> Result<Ipv4Net, Dhcp4AckFlaw> {
    let length = option::prefix_len(options).ok_or(Dhcp4AckFlaw::NoMask)?;
    let net = Ipv4Net::new(address, length).map_err(|_| Dhcp4AckFlaw::NoMask)?;
    let reserved = address.is_broadcast()
        || address.is_multicast()
        || address.is_loopback()
        || address.octets()[0] == 0
        // The network and the broadcast address of the subnet; /31 and /32 have neither.
        || (length < 31 && (address == net.network() || address == net.broadcast()));
    if reserved { Err(Dhcp4AckFlaw::BadAddress) } else { Ok(net) }
}

#[cfg(test)]
mod tests {
    use super::super::super::tests::{MAC, ack};
    use super::*;

    fn lease(extra: &[(u8, &[u8])]) -> Result<Dhcp4Lease, Dhcp4AckFlaw> {
        let asked = Duration::from_secs(100);
        Dhcp4Lease::from_ack(&ack(extra), MAC, asked, &mut RandomGenerator::from_seed(3))
    }

    /// Seconds of the three timers after the request, each with the earliest it may be.
    fn timers(extra: &[(u8, &[u8])]) -> [f64; 3] {
        let lease = lease(extra).unwrap();
        [lease.renew, lease.rebind, lease.expires].map(|t| t.as_secs_f64() - 100.0)
    }

    #[track_caller]
    fn assert_timers(extra: &[(u8, &[u8])], expected: [f64; 3]) {
        let found = timers(extra);
        let fine = found.iter().zip(expected).all(|(f, e)| *f <= e && *f >= e * 0.949);
        assert!(fine && (found[2] - expected[2]).abs() < 1e-6, "{found:?} {expected:?}");
    }

    #[test]
    fn timers_default_to_one_half_and_seven_eighths() {
        assert_timers(&[], [500.0, 875.0, 1000.0]);
        assert_timers(&[(58, &[0, 0, 0, 100]), (59, &[0, 0, 0, 200])], [100.0, 200.0, 1000.0]);
        for bad in [[0, 0, 0, 0], [0, 0, 1, 0], [0xff; 4]] {
            assert_timers(&[(58, &bad), (59, &[0, 0, 0, 200])], [500.0, 875.0, 1000.0]);
        }
        assert_timers(&[(59, &[0, 0, 0, 200])], [500.0, 875.0, 1000.0]);
        // T2 must be before the end of the lease.
        assert_timers(&[(58, &[0, 0, 0, 100]), (59, &[0, 0, 3, 232])], [500.0, 875.0, 1000.0]);
        assert_timers(&[(51, &[0, 0, 0, 0])], [2.0, 3.5, 4.0]);
        assert_timers(&[(51, &[1])], [1800.0, 3150.0, 3600.0]);
        assert_eq!(lease(&[(51, &[0xff; 4])]).unwrap().renew, NEVER);
    }

    #[test]
    fn addresses_that_no_host_can_have_are_refused() {
        for bad in
            [[0, 0, 0, 0], [255; 4], [224, 0, 0, 5], [127, 0, 0, 5], [10, 1, 2, 0], [10, 1, 2, 255]]
        {
            let message = Dhcp4Message { yiaddr: bad.into(), ..ack(&[]) };
            let read =
                Dhcp4Lease::from_ack(&message, MAC, NEVER / 2, &mut RandomGenerator::from_seed(1));
            assert_eq!(read, Err(Dhcp4AckFlaw::BadAddress), "{bad:?}");
        }
        assert_eq!(lease(&[(1, &[255, 0, 255, 0])]), Err(Dhcp4AckFlaw::NoMask));
        assert_eq!(lease(&[(1, &[255])]), Err(Dhcp4AckFlaw::NoMask));
        assert_eq!(lease(&[(54, &[1])]), Err(Dhcp4AckFlaw::NoServer));
        assert!(lease(&[(1, &[255; 4])]).is_ok());
    }

    #[test]
    fn a_lease_becomes_an_ipam_result() {
        let gateway: (u8, &[u8]) = (3, &[10, 1, 2, 1, 10, 1, 2, 2]);
        let result =
            lease(&[gateway, (6, &[8, 8, 8, 8]), (15, b"example.com")]).unwrap().ipam_result();
        assert_eq!(result.ips[0].address.to_string(), "10.1.2.9/24");
        assert_eq!(result.ips[0].gateway.unwrap().to_string(), "10.1.2.1");
        assert_eq!(result.routes.len(), 1);
        assert!(result.routes[0].is_default());
        assert_eq!(result.dns.nameservers, ["8.8.8.8"]);
        assert_eq!(result.dns.domain, "example.com");

        let both = [gateway, (33, &[10, 0, 0, 0, 10, 1, 2, 3])];
        let routes = lease(&both).unwrap().ipam_result().routes;
        let texts: Vec<_> = routes.iter().map(|r| format!("{} {}", r.dst, r.gw.unwrap())).collect();
        assert_eq!(texts, ["10.0.0.0/8 10.1.2.3", "0.0.0.0/0 10.1.2.1"]);

        let classless: (u8, &[u8]) = (121, &[8, 20, 0, 0, 0, 0, 8, 30, 10, 1, 2, 4]);
        let result =
            lease(&[gateway, (33, &[10, 0, 0, 0, 10, 1, 2, 3]), classless]).unwrap().ipam_result();
        assert!(result.ips[0].gateway.is_some());
        assert_eq!((result.routes.len(), result.routes[0].scope), (2, Some(253)));
        assert_eq!(result.routes[1].scope, None);

        let broken: (u8, &[u8]) = (121, &[99]);
        assert!(lease(&[gateway, broken]).unwrap().ipam_result().routes[0].is_default());
    }

    #[test]
    fn a_change_of_mask_or_router_changes_the_interface() {
        let one = lease(&[(3, &[10, 1, 2, 1])]).unwrap();
        let later = Dhcp4Lease { expires: NEVER, server: Ipv4Addr::LOCALHOST, ..one.clone() };
        assert!(!one.differs_on_link(&later));
        assert!(one.differs_on_link(&lease(&[(3, &[10, 1, 2, 2])]).unwrap()));
        assert!(
            one.differs_on_link(&lease(&[(3, &[10, 1, 2, 1]), (1, &[255, 255, 0, 0])]).unwrap())
        );
    }
}
