//! DHCP messages of a client and their timeouts, RFC 2131 section 4.4.

use std::net::IpAddr;
use std::time::Duration;

use super::super::family;
use super::super::timing::{Exchange, Random, Timers, Timing};
use super::super::v4::frame::{self, BROADCAST, Ends};
use super::super::v4::lease::{Binding, Lease};
use super::super::v4::message::{Kind, Message};
use super::super::v4::option::{self, Options};
use super::protocol::AT_ONCE;
use super::{Action, Answer, Listening, Protocol, Release, Source};
use crate::netlink::Mac;

/// The shortest timeout of a renewal, except for short leases.
const BETWEEN_RENEWALS: Duration = Duration::from_secs(60);
/// The shortest timeout of a renewal, whatever the lease time.
const SHORTEST_RENEWAL: Duration = Duration::from_secs(1);
/// The longest message that the client accepts: an Ethernet frame without the IPv4 and UDP headers.
const MAX_SIZE: u16 = 1472;

/// The client of one interface.
#[derive(Debug)]
pub struct Client {
    /// The Ethernet address of the interface.
    pub mac: Mac,
    /// Whether servers must broadcast their replies.
    pub broadcast: bool,
    /// The options of every message: the client identifier (61) and the configured options.
    pub options: Options,
    /// The configured timeouts.
    pub timing: Timing,
}

type Step<'a> = super::Step<'a, Client>;

impl Client {
    /// A message with the client identifier as its only option, for DHCPDECLINE and DHCPRELEASE.
    fn bare(&self, kind: Kind, xid: u32, binding: &Binding) -> Message {
        let mut message = Message::new(kind, xid, self.mac);
        let id = self.options.get_key_value(&option::CLIENT_ID);
        message.options.extend(id.map(|(code, value)| (*code, value.clone())));
        message.options.insert(option::SERVER, binding.server.octets().to_vec());
        message
    }
}

impl Protocol for Client {
    type Message = Message;
    type Lease = Lease;
    type Binding = Binding;

    const LEASE: fn(Lease) -> family::Lease = family::Lease::V4;
    const XID_BITS: u32 = 32;
    const REQUEST_KEEPS_XID: bool = true;
    const REQUESTS: u32 = 4;
    const DECLINES: u32 = 1;
    const LISTENING: Listening = Listening::Frames;

    fn mac(&mut self) -> &mut Mac {
        &mut self.mac
    }

    fn timing(&self) -> &Timing {
        &self.timing
    }

    fn address(lease: &Lease) -> IpAddr {
        lease.address().into()
    }

    fn timers(lease: &Lease) -> Timers {
        Timers { renew: lease.renew, rebind: lease.rebind, expires: lease.expires }
    }

    fn message(&self, step: &Step<'_>, exchange: &Exchange) -> Action {
        if let Step::Decline(binding) = step {
            let mut message = self.bare(Kind::Decline, exchange.xid, binding);
            message.options.insert(option::REQUESTED, binding.address.octets().to_vec());
            message.options.insert(option::MESSAGE, b"the address is in use".to_vec());
            return Action::Broadcast(message);
        }
        let kind = if let Step::Discover = step { Kind::Discover } else { Kind::Request };
        let mut message = Message::new(kind, exchange.xid, self.mac);
        message.secs = u16::try_from(exchange.elapsed().as_secs()).unwrap_or(u16::MAX);
        message.broadcast = self.broadcast;
        message.options.clone_from(&self.options);
        message.options.insert(option::MAX_SIZE, MAX_SIZE.to_be_bytes().to_vec());
        match step {
            Step::Request(binding) => {
                message.options.insert(option::REQUESTED, binding.address.octets().to_vec());
                message.options.insert(option::SERVER, binding.server.octets().to_vec());
            }
            Step::Renew(lease) => {
                (message.ciaddr, message.broadcast) = (lease.address(), false);
                return Action::Unicast(message, lease.server);
            }
            Step::Rebind(lease) => message.ciaddr = lease.address(),
            Step::Discover | Step::Decline(_) => {}
        }
        Action::Broadcast(message)
    }

    /// Renewals are repeated after half of the remaining time, but not within a minute (RFC 2131, section 4.4.5), which
    /// is less for leases of less than a quarter of an hour.
    fn wait(&self, step: &Step<'_>, exchange: &Exchange, random: &mut Random) -> Duration {
        let (lease, end) = match step {
            Step::Renew(lease) => (lease, lease.rebind),
            Step::Rebind(lease) => (lease, lease.expires),
            _ => return self.timing.wait(exchange.sent, random),
        };
        let whole = lease.expires.saturating_sub(lease.renew).saturating_mul(2);
        let floor = (whole / 16).clamp(SHORTEST_RENEWAL, BETWEEN_RENEWALS);
        (end.saturating_sub(exchange.asked) / 2).max(floor)
    }

    fn release(&self, binding: &Binding, xid: u32) -> Release {
        let Binding { address, server, server_mac } = *binding;
        let mut message = self.bare(Kind::Release, xid, binding);
        message.ciaddr = address;
        let ends = Ends { src_mac: self.mac, dst_mac: server_mac, src: address, dst: server };
        Release::V4(message, ends)
    }

    fn decode(source: Source, bytes: &[u8]) -> Option<(Message, Option<Mac>)> {
        let (from, payload) = match source {
            Source::Frames => {
                frame::read_udp(bytes).map(|(from, payload)| (Some(from), payload))?
            }
            _ => (None, bytes),
        };
        Some((Message::decode(payload)?, from))
    }

    fn judge(
        &mut self,
        step: &Step<'_>,
        exchange: &Exchange,
        message: &Message,
        from: Option<Mac>,
        random: &mut Random,
    ) -> Option<Answer<Client>> {
        if message.chaddr != self.mac || message.xid != exchange.xid {
            return None;
        }
        let server = option::address(&message.options, option::SERVER);
        let server_mac = match (step, message.kind) {
            (Step::Discover, Kind::Offer) => {
                let (address, server_mac) = (message.yiaddr, from.unwrap_or(BROADCAST));
                let unusable =
                    address.is_unspecified() || address.is_broadcast() || address.is_multicast();
                let binding = Binding { address, server: server?, server_mac };
                return (!unusable).then_some(Answer::Offer(binding, AT_ONCE));
            }
            (Step::Request(offer), Kind::Ack)
                if server == Some(offer.server) && message.yiaddr == offer.address =>
            {
                BROADCAST
            }
            (Step::Renew(lease) | Step::Rebind(lease), Kind::Ack) => lease.server_mac,
            (Step::Request(offer), Kind::Nak) if server != Some(offer.server) => return None,
            (Step::Request(_) | Step::Renew(_) | Step::Rebind(_), Kind::Nak) => {
                return Some(Answer::Refused(option::sentence(&message.options)));
            }
            _ => return None,
        };
        let lease = Lease::from_ack(message, from.unwrap_or(server_mac), exchange.asked, random);
        Some(lease.map_or_else(Answer::Flawed, Answer::Lease))
    }

    fn conflicts(&self, frame: &[u8], lease: &Lease) -> bool {
        frame::arp_conflict(frame, self.mac, lease.address())
    }
}

#[cfg(test)]
mod tests;
