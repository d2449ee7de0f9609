//! What the daemon keeps, whichever family it is of.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use super::client::{self, Listening, Output};
use super::message::Message;
use super::timing::Moment;
use super::{frame, lease, machine, v6};
use crate::cni::{CniResult, Dns};
use crate::netlink::Mac;

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

/// An address on loan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lease {
    /// Of IPv4.
    V4(lease::Lease),
    /// Of IPv6.
    V6(v6::lease::Lease),
}

impl From<lease::Lease> for Lease {
    fn from(lease: lease::Lease) -> Lease {
        Lease::V4(lease)
    }
}

impl From<v6::lease::Lease> for Lease {
    fn from(lease: v6::lease::Lease) -> Lease {
        Lease::V6(lease)
    }
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

    /// Who gave it, for a person.
    pub fn server(&self) -> String {
        match self {
            Lease::V4(lease) => lease.server.to_string(),
            Lease::V6(lease) => v6::identity::text(&lease.server),
        }
    }

    /// When the address may not be used any more.
    pub fn expires(&self) -> Moment {
        match self {
            Lease::V4(lease) => lease.expires,
            Lease::V6(lease) => lease.expires,
        }
    }

    /// The result of IPAM. Every route gets `priority` unless that is zero.
    pub fn result(&self, priority: u32) -> CniResult {
        match self {
            Lease::V4(lease) => lease.result(priority),
            Lease::V6(lease) => lease.result(),
        }
    }

    /// Whether the interface has to be changed to go from this lease to `next`.
    pub fn differs_on_link(&self, next: &Lease) -> bool {
        match (self, next) {
            (Lease::V4(old), Lease::V4(new)) => old.differs_on_link(new),
            (old, new) => old.ip_net() != new.ip_net(),
        }
    }

    /// What has to be given back of it.
    pub fn claim(&self) -> Claim {
        match self {
            Lease::V4(lease) => Claim::V4(lease.into()),
            Lease::V6(lease) => Claim::V6(lease.into()),
        }
    }
}

/// The result of IPAM for all leases of an attachment.
pub fn result(leases: &[Lease], priority: u32) -> CniResult {
    let mut whole = CniResult::new();
    for lease in leases {
        let part = lease.result(priority);
        whole.ips.extend(part.ips);
        whole.routes.extend(part.routes);
        extend(&mut whole.dns, part.dns);
    }
    whole
}

fn extend(dns: &mut Dns, more: Dns) {
    dns.nameservers.extend(more.nameservers);
    if dns.domain.is_empty() {
        dns.domain = more.domain;
    }
    for domain in more.search {
        if !dns.search.contains(&domain) {
            dns.search.push(domain);
        }
    }
}

/// An address that a server has promised or given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Claim {
    /// Of IPv4.
    V4(client::Claim),
    /// Of IPv6.
    V6(v6::verdict::Claim),
}

impl Claim {
    /// The address.
    pub fn address(&self) -> IpAddr {
        match self {
            Claim::V4(claim) => claim.address.into(),
            Claim::V6(claim) => claim.address.into(),
        }
    }
}

/// Who asks, and how.
#[derive(Clone, Debug)]
pub enum Client {
    /// For an address of IPv4.
    V4(client::Client),
    /// For one of IPv6.
    V6(v6::identity::Client),
}

impl Client {
    /// The interface has this Ethernet address now.
    pub fn set_mac(&mut self, mac: Mac) {
        match self {
            Client::V4(client) => client.mac = mac,
            Client::V6(client) => client.mac = mac,
        }
    }
}

/// The states of a client.
#[derive(Debug)]
pub enum Machine {
    /// Of IPv4.
    V4(machine::Machine),
    /// Of IPv6.
    V6(v6::machine::Machine),
}

impl Machine {
    /// A client that begins now, and fails at `limit`; or one that goes on with a lease.
    pub fn new(client: Client, lease: Option<Lease>, now: Moment, limit: Moment) -> Machine {
        let random = super::timing::Random::new();
        match (client, lease) {
            (Client::V4(client), Some(Lease::V4(lease))) => {
                Machine::V4(machine::Machine::resume(client, lease, random))
            }
            (Client::V6(client), Some(Lease::V6(lease))) => {
                Machine::V6(v6::machine::Machine::resume(client, lease, random))
            }
            (Client::V4(client), _) => {
                Machine::V4(machine::Machine::new(client, now, limit, random))
            }
            (Client::V6(client), _) => {
                Machine::V6(v6::machine::Machine::new(client, now, limit, random))
            }
        }
    }

    /// When [`Machine::tick`] is to be called, unless something arrives before.
    pub fn deadline(&self) -> Moment {
        match self {
            Machine::V4(machine) => machine.deadline(),
            Machine::V6(machine) => machine.deadline(),
        }
    }

    /// What has to be heard now.
    pub fn listening(&self) -> Listening {
        match self {
            Machine::V4(machine) => machine.listening(),
            Machine::V6(machine) => machine.listening(),
        }
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Moment) -> Vec<Output> {
        match self {
            Machine::V4(machine) => machine.tick(now),
            Machine::V6(machine) => machine.tick(now),
        }
    }

    /// A frame with UDP in it has arrived.
    pub fn frame(&mut self, now: Moment, frame: &[u8]) -> Vec<Output> {
        let Machine::V4(machine) = self else { return Vec::new() };
        let read = frame::read_udp(frame);
        let read = read.and_then(|(from, payload)| Some((from, Message::decode(payload)?)));
        let heard = |(from, message)| machine.receive(now, &message, Some(from));
        read.map(heard).unwrap_or_default()
    }

    /// A message has arrived by UDP.
    pub fn datagram(&mut self, now: Moment, payload: &[u8]) -> Vec<Output> {
        match self {
            Machine::V4(machine) => {
                let heard = |message| machine.receive(now, &message, None);
                Message::decode(payload).map(heard).unwrap_or_default()
            }
            Machine::V6(machine) => {
                let heard = |message| machine.receive(now, &message);
                v6::message::Message::decode(payload).map(heard).unwrap_or_default()
            }
        }
    }

    /// A frame has arrived that may show who has an address.
    pub fn neighbour(&mut self, now: Moment, frame: &[u8]) -> Vec<Output> {
        match (self.listening(), self) {
            (Listening::FramesAndArp(address), Machine::V4(machine))
                if frame::arp_conflict(frame, machine.mac(), address) =>
            {
                machine.conflict(now)
            }
            (Listening::Neighbours(address), Machine::V6(machine))
                if v6::neighbour::conflict(frame, machine.mac(), address) =>
            {
                machine.conflict(now)
            }
            _ => Vec::new(),
        }
    }

    /// What has to be given back if the client ends now.
    pub fn claim(&self) -> Option<Claim> {
        match self {
            Machine::V4(machine) => machine.claim().map(Claim::V4),
            Machine::V6(machine) => machine.claim().map(Claim::V6),
        }
    }

    /// The Ethernet address of the interface.
    pub fn mac(&self) -> Mac {
        match self {
            Machine::V4(machine) => machine.mac(),
            Machine::V6(machine) => machine.mac(),
        }
    }

    /// The interface has got another Ethernet address.
    pub fn set_mac(&mut self, mac: Mac) {
        match self {
            Machine::V4(machine) => machine.set_mac(mac),
            Machine::V6(machine) => machine.set_mac(mac),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::lease::tests::ack;
    use super::super::message::tests::MAC;
    use super::super::timing::{NEVER, Random};
    use super::*;

    #[test]
    fn one_result_for_both_families() {
        let now = std::time::Duration::from_secs(1);
        let told: [(u8, &[u8]); 4] =
            [(3, &[10, 1, 2, 1]), (6, &[8, 8, 8, 8]), (15, b"a.com"), (119, b"\x01b\0\x01c\0")];
        let v4 = lease::Lease::from_ack(&ack(&told), MAC, now, &mut Random::from_seed(1)).unwrap();
        let v6 = v6::lease::Lease {
            address: "2001:db8::5".parse().unwrap(),
            server: vec![0, 1, 0xab],
            renew: NEVER,
            rebind: NEVER,
            expires: NEVER,
            name_servers: vec!["2001:db8::1".parse().unwrap()],
            search: vec!["c".to_owned(), "d".to_owned()],
        };
        let (v4, v6) = (Lease::from(v4), Lease::from(v6));
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
