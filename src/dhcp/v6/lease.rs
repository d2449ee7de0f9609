//! IPv6 leases, built from a Reply.

use std::net::Ipv6Addr;
use std::time::Duration;

use ipnet::{IpNet, Ipv6Net};
use serde::{Deserialize, Serialize};

use super::super::timing::{BootClockTime, LeaseTimers, NEVER, RandomGenerator, millis};
use super::super::v4::lease::SHORTEST_TIME;
use super::message::{AssociationAddress, Dhcp6Message, IdentityAssociation};
use cni::{CniResult, DnsConfig, IpConfig};

/// An infinite lifetime, in seconds.
const INFINITE: u32 = u32::MAX;
/// DHCPv6 assigns addresses without a prefix length (RFC 5942).
const HOST: u8 = 128;

#[derive(Clone, Debug, Deserialize, Serialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Dhcp6Lease {
    pub address: Ipv6Addr,
    pub server: Vec<u8>,
    /// T1: renew with the server.
    #[serde(with = "millis")]
    pub renew: BootClockTime,
    /// T2: renew with any server.
    #[serde(with = "millis")]
    pub rebind: BootClockTime,
    /// The end of the valid lifetime: the address must not be used afterwards.
    #[serde(with = "millis")]
    pub expires: BootClockTime,
    /// DNS servers in order of preference.
    pub name_servers: Vec<Ipv6Addr>,
    /// The domain search list.
    pub search: Vec<String>,
}

/// An address that a server has offered or assigned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dhcp6Binding {
    pub address: Ipv6Addr,
    pub server: Vec<u8>,
}

impl From<&Dhcp6Lease> for Dhcp6Binding {
    fn from(lease: &Dhcp6Lease) -> Dhcp6Binding {
        Dhcp6Binding { address: lease.address, server: lease.server.clone() }
    }
}

/// Why a Reply is not usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dhcp6ReplyFlaw {
    /// No address of a host with valid lifetimes.
    NoAddress,
    /// T1 is greater than T2 (section 21.4).
    BadTimes,
    /// The valid lifetime of the client's address is 0.
    Withdrawn,
}

impl std::fmt::Display for Dhcp6ReplyFlaw {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Dhcp6ReplyFlaw::NoAddress => "it has no address that a host can use",
            Dhcp6ReplyFlaw::BadTimes => "its T1 is after its T2",
            Dhcp6ReplyFlaw::Withdrawn => "it takes the address back",
        })
    }
}

impl Dhcp6Lease {
    /// Reads the association `ia` of `reply`, the reply to a message that was sent at `asked`. Of
    /// several addresses the lease is `own` if present, else the first.
    pub fn from_reply(
        reply: &Dhcp6Message,
        ia: &IdentityAssociation,
        own: Option<Ipv6Addr>,
        asked: BootClockTime,
        random: &mut RandomGenerator,
    ) -> Result<Dhcp6Lease, Dhcp6ReplyFlaw> {
        if ia.t1 > ia.t2 && ia.t2 != 0 {
            return Err(Dhcp6ReplyFlaw::BadTimes);
        }
        let is_own = |addr: &&AssociationAddress| Some(addr.addr) == own;
        let mut usable = ia.addrs.iter().filter(|addr| is_usable(addr));
        let found = usable.clone().find(is_own).or_else(|| usable.next());
        let given = found.ok_or_else(|| match ia.addrs.iter().find(is_own) {
            Some(addr) if addr.valid == 0 => Dhcp6ReplyFlaw::Withdrawn,
            _ => Dhcp6ReplyFlaw::NoAddress,
        })?;
        let LeaseTimers { renew, rebind, expires } =
            LeaseTimers::new(asked, lease_times(ia, given), random);
        Ok(Dhcp6Lease {
            address: given.addr,
            server: reply.server.clone(),
            renew,
            rebind,
            expires,
            name_servers: reply.name_servers.clone(),
            search: reply.search.clone(),
        })
    }

    /// The address with its prefix.
    pub fn ip_net(&self) -> IpNet {
        Ipv6Net::new_assert(self.address, HOST).into()
    }

    /// The IPAM result. Routes are part of router advertisements, not of DHCPv6.
    pub fn ipam_result(&self) -> CniResult {
        let ip = IpConfig { address: self.ip_net(), gateway: None, interface: None };
        let dns = DnsConfig {
            nameservers: self.name_servers.iter().map(ToString::to_string).collect(),
            search: self.search.clone(),
            ..DnsConfig::default()
        };
        CniResult { ips: vec![ip], dns, ..CniResult::new() }
    }
}

/// Whether the address is valid for a host and has a valid lifetime.
pub fn is_usable(given: &AssociationAddress) -> bool {
    let addr = given.addr;
    let impossible = addr.is_unspecified()
        || addr.is_loopback()
        || addr.is_multicast()
        || addr.is_unicast_link_local()
        || addr.to_ipv4_mapped().is_some();
    !impossible && given.valid > 0 && given.preferred <= given.valid && given.status.is_success()
}

/// T1, T2 and the valid lifetime. The defaults of T1 and T2 are a half and four fifths of the
/// preferred lifetime (section 21.4), also for values that are not less than the valid lifetime.
fn lease_times(ia: &IdentityAssociation, given: &AssociationAddress) -> [Duration; 3] {
    let time = |seconds: u32| match seconds {
        INFINITE => NEVER,
        seconds => Duration::from_secs(seconds.into()),
    };
    let valid = time(given.valid).max(SHORTEST_TIME);
    let preferred = match given.preferred {
        // A deprecated address serves existing connections, for which it is kept.
        0 => valid,
        seconds => time(seconds).max(SHORTEST_TIME),
    };
    let sent = |seconds: u32| Some(time(seconds)).filter(|t| !t.is_zero() && *t < valid);
    let part = |part: Duration| if preferred == NEVER { NEVER } else { part };
    let t1 = sent(ia.t1).unwrap_or(part(preferred / 2));
    let t2 = sent(ia.t2).unwrap_or(part(preferred / 5 * 4)).max(t1);
    [t1, t2, valid]
}

#[cfg(test)]
mod tests {
    use super::super::super::tests::{FIVE, addr};
    use super::super::message::{Dhcp6MessageKind, Dhcp6Status};
    use super::*;

    fn read(ia: &IdentityAssociation, own: Option<Ipv6Addr>) -> Result<Dhcp6Lease, Dhcp6ReplyFlaw> {
        let mut reply = Dhcp6Message::new(Dhcp6MessageKind::Reply, 1);
        reply.server = vec![0, 1, 9];
        reply.name_servers = vec![Ipv6Addr::LOCALHOST];
        reply.search = vec!["example.com".to_owned()];
        Dhcp6Lease::from_reply(
            &reply,
            ia,
            own,
            Duration::from_secs(100),
            &mut RandomGenerator::from_seed(3),
        )
    }

    #[track_caller]
    fn assert_timers((t1, t2): (u32, u32), (preferred, valid): (u32, u32), expected: [f64; 3]) {
        let ia = IdentityAssociation {
            t1,
            t2,
            addrs: vec![addr(FIVE, preferred, valid)],
            ..IdentityAssociation::default()
        };
        let lease = read(&ia, None).unwrap();
        let found = [lease.renew, lease.rebind, lease.expires].map(|t| t.as_secs_f64() - 100.0);
        let fine = found.iter().zip(expected).all(|(f, e)| *f <= e && *f >= e * 0.949);
        assert!(fine && (found[2] - expected[2]).abs() < 1e-6, "{found:?} {expected:?}");
    }

    #[test]
    fn timers_default_to_parts_of_the_preferred_lifetime() {
        assert_timers((100, 200), (900, 1000), [100.0, 200.0, 1000.0]);
        assert_timers((0, 0), (500, 1000), [250.0, 400.0, 1000.0]);
        assert_timers((300, 0), (500, 1000), [300.0, 400.0, 1000.0]);
        assert_timers((450, 0), (500, 1000), [450.0, 450.0, 1000.0]);
        assert_timers((5000, 6000), (500, 1000), [250.0, 400.0, 1000.0]);
        assert_timers((0, 0), (0, 1000), [500.0, 800.0, 1000.0]);
        assert_timers((0, 0), (1, 1), [2.0, 3.2, 4.0]);
    }

    #[test]
    fn a_lease_without_an_end_is_not_renewed() {
        let ia = IdentityAssociation {
            addrs: vec![addr(FIVE, INFINITE, INFINITE)],
            ..IdentityAssociation::default()
        };
        let lease = read(&ia, None).unwrap();
        assert_eq!((lease.renew, lease.rebind, lease.expires), (NEVER, NEVER, NEVER));
        let told = IdentityAssociation { t1: INFINITE, t2: INFINITE, ..ia };
        assert_eq!(read(&told, None).unwrap().renew, NEVER);
    }

    #[test]
    fn addresses_that_no_host_can_have_are_refused() {
        for bad in ["::", "::1", "ff02::1", "fe80::5", "::ffff:10.0.0.1"] {
            let ia = IdentityAssociation {
                addrs: vec![addr(bad.parse().unwrap(), 1, 2)],
                ..IdentityAssociation::default()
            };
            assert_eq!(read(&ia, None), Err(Dhcp6ReplyFlaw::NoAddress), "{bad}");
        }
        let other = "2001:db8::6".parse().unwrap();
        let refused = Dhcp6Status { code: 2, sentence: String::new() };
        let refused = AssociationAddress { status: refused, ..addr(other, 5, 5) };
        let several = vec![addr(FIVE, 0, 0), addr(FIVE, 9, 8), refused, addr(other, 5, 5)];
        let ia = IdentityAssociation { addrs: several, ..IdentityAssociation::default() };
        assert_eq!(read(&ia, Some(FIVE)).unwrap().address, other);
        let two = IdentityAssociation {
            addrs: vec![addr(other, 5, 5), addr(FIVE, 5, 5)],
            ..IdentityAssociation::default()
        };
        assert_eq!(read(&two, Some(FIVE)).unwrap().address, FIVE);
        assert_eq!(read(&two, None).unwrap().address, other);
        let withdrawn =
            IdentityAssociation { addrs: vec![addr(FIVE, 0, 0)], ..IdentityAssociation::default() };
        assert_eq!(read(&withdrawn, Some(FIVE)), Err(Dhcp6ReplyFlaw::Withdrawn));
        assert_eq!(read(&withdrawn, None), Err(Dhcp6ReplyFlaw::NoAddress));
        assert_eq!(
            read(&IdentityAssociation { t1: 9, t2: 8, ..two }, None),
            Err(Dhcp6ReplyFlaw::BadTimes)
        );
    }

    #[test]
    fn a_lease_becomes_an_ipam_result() {
        let ia =
            IdentityAssociation { addrs: vec![addr(FIVE, 5, 5)], ..IdentityAssociation::default() };
        let lease = read(&ia, None).unwrap();
        let result = lease.ipam_result();
        assert_eq!(result.ips[0].address.to_string(), "2001:db8::5/128");
        assert_eq!(result.ips[0].address, lease.ip_net());
        assert_eq!((result.ips[0].gateway, result.routes.len()), (None, 0));
        assert_eq!(result.dns.nameservers, ["::1"]);
        assert_eq!(result.dns.search, ["example.com"]);
    }
}
