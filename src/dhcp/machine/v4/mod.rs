//! DHCP messages of a client and their timeouts, RFC 2131 section 4.4.

use std::net::IpAddr;
use std::time::Duration;

use super::super::family;
use super::super::timing::{ClientTiming, LeaseTimers, MessageExchange, RandomGenerator};
use super::super::v4::frame::{self, BROADCAST, FrameAddresses};
use super::super::v4::lease::{Dhcp4Binding, Dhcp4Lease};
use super::super::v4::message::{Dhcp4Message, Dhcp4MessageKind};
use super::super::v4::option::{self, Dhcp4Options};
use super::protocol::AT_ONCE;
use super::{ClientAction, DhcpProtocol, NeededSockets, PacketSource, ReleaseMessage, ServerReply};
use crate::netlink::MacAddress;

/// The shortest timeout of a renewal, except for short leases.
const BETWEEN_RENEWALS: Duration = Duration::from_secs(60);
/// The shortest timeout of a renewal, whatever the lease time.
const SHORTEST_RENEWAL: Duration = Duration::from_secs(1);
/// The longest message that the client accepts: an Ethernet frame without the IPv4 and UDP headers.
const MAX_SIZE: u16 = 1472;

/// The client of one interface.
#[derive(Debug)]
pub struct Dhcp4Client {
    /// The Ethernet address of the interface.
    pub mac: MacAddress,
    /// Whether servers must broadcast their replies.
    pub broadcast: bool,
    /// The options of every message: the client identifier (61) and the configured options.
    pub options: Dhcp4Options,
    /// The configured timeouts.
    pub timing: ClientTiming,
}

type Dhcp4Step<'a> = super::ExchangeStep<'a, Dhcp4Client>;

impl Dhcp4Client {
    /// A message with the client identifier as its only option, for DHCPDECLINE and DHCPRELEASE.
    fn minimal_message(
        &self,
        kind: Dhcp4MessageKind,
        xid: u32,
        binding: &Dhcp4Binding,
    ) -> Dhcp4Message {
        let mut message = Dhcp4Message::new(kind, xid, self.mac);
        let id = self.options.get_key_value(&option::CLIENT_ID);
        message.options.extend(id.map(|(code, value)| (*code, value.clone())));
        message.options.insert(option::SERVER, binding.server.octets().to_vec());
        message
    }
}

impl DhcpProtocol for Dhcp4Client {
    type Message = Dhcp4Message;
    type Lease = Dhcp4Lease;
    type Binding = Dhcp4Binding;

    const LEASE: fn(Dhcp4Lease) -> family::DhcpLease = family::DhcpLease::V4;
    const XID_BITS: u32 = 32;
    const REQUEST_KEEPS_XID: bool = true;
    const REQUESTS: u32 = 4;
    const DECLINES: u32 = 1;
    const LISTENING: NeededSockets = NeededSockets::Frames;

    fn mac_mut(&mut self) -> &mut MacAddress {
        &mut self.mac
    }

    fn client_timing(&self) -> &ClientTiming {
        &self.timing
    }

    fn leased_address(lease: &Dhcp4Lease) -> IpAddr {
        lease.ip_address().into()
    }

    fn lease_timers(lease: &Dhcp4Lease) -> LeaseTimers {
        LeaseTimers { renew: lease.renew, rebind: lease.rebind, expires: lease.expires }
    }

    fn build_message(&self, step: &Dhcp4Step<'_>, exchange: &MessageExchange) -> ClientAction {
        if let Dhcp4Step::Decline(binding) = step {
            let mut message =
                self.minimal_message(Dhcp4MessageKind::Decline, exchange.xid, binding);
            message.options.insert(option::REQUESTED, binding.address.octets().to_vec());
            message.options.insert(option::MESSAGE, b"the address is in use".to_vec());
            return ClientAction::Broadcast(message);
        }
        let kind = if let Dhcp4Step::Discover = step {
            Dhcp4MessageKind::Discover
        } else {
            Dhcp4MessageKind::Request
        };
        let mut message = Dhcp4Message::new(kind, exchange.xid, self.mac);
        message.secs = u16::try_from(exchange.elapsed_time().as_secs()).unwrap_or(u16::MAX);
        message.broadcast = self.broadcast;
        message.options.clone_from(&self.options);
        message.options.insert(option::MAX_SIZE, MAX_SIZE.to_be_bytes().to_vec());
        match step {
            Dhcp4Step::Request(binding) => {
                message.options.insert(option::REQUESTED, binding.address.octets().to_vec());
                message.options.insert(option::SERVER, binding.server.octets().to_vec());
            }
            Dhcp4Step::Renew(lease) => {
                (message.ciaddr, message.broadcast) = (lease.ip_address(), false);
                return ClientAction::Unicast(message, lease.server);
            }
            Dhcp4Step::Rebind(lease) => message.ciaddr = lease.ip_address(),
            Dhcp4Step::Discover | Dhcp4Step::Decline(_) => {}
        }
        ClientAction::Broadcast(message)
    }

    /// Renewals are repeated after half of the remaining time, but not within a minute (RFC 2131,
    /// section 4.4.5), which is less for leases of less than a quarter of an hour.
    fn message_timeout(
        &self,
        step: &Dhcp4Step<'_>,
        exchange: &MessageExchange,
        random: &mut RandomGenerator,
    ) -> Duration {
        let (lease, end) = match step {
            Dhcp4Step::Renew(lease) => (lease, lease.rebind),
            Dhcp4Step::Rebind(lease) => (lease, lease.expires),
            _ => return self.timing.message_timeout(exchange.sent, random),
        };
        let whole = lease.expires.saturating_sub(lease.renew).saturating_mul(2);
        let floor = (whole / 16).clamp(SHORTEST_RENEWAL, BETWEEN_RENEWALS);
        (end.saturating_sub(exchange.asked) / 2).max(floor)
    }

    fn build_release(&self, binding: &Dhcp4Binding, xid: u32) -> ReleaseMessage {
        let Dhcp4Binding { address, server, server_mac } = *binding;
        let mut message = self.minimal_message(Dhcp4MessageKind::Release, xid, binding);
        message.ciaddr = address;
        let ends =
            FrameAddresses { src_mac: self.mac, dst_mac: server_mac, src: address, dst: server };
        ReleaseMessage::V4(message, ends)
    }

    fn decode_message(
        source: PacketSource,
        bytes: &[u8],
    ) -> Option<(Dhcp4Message, Option<MacAddress>)> {
        let (from, payload) = match source {
            PacketSource::Frames => {
                frame::decode_udp(bytes).map(|(from, payload)| (Some(from), payload))?
            }
            _ => (None, bytes),
        };
        Some((Dhcp4Message::decode(payload)?, from))
    }

    fn interpret_reply(
        &mut self,
        step: &Dhcp4Step<'_>,
        exchange: &MessageExchange,
        message: &Dhcp4Message,
        from: Option<MacAddress>,
        random: &mut RandomGenerator,
    ) -> Option<ServerReply<Dhcp4Client>> {
        if message.chaddr != self.mac || message.xid != exchange.xid {
            return None;
        }
        let server = option::first_address(&message.options, option::SERVER);
        let server_mac = match (step, message.kind) {
            (Dhcp4Step::Discover, Dhcp4MessageKind::Offer) => {
                let (address, server_mac) = (message.yiaddr, from.unwrap_or(BROADCAST));
                let unusable =
                    address.is_unspecified() || address.is_broadcast() || address.is_multicast();
                let binding = Dhcp4Binding { address, server: server?, server_mac };
                return (!unusable).then_some(ServerReply::Offer(binding, AT_ONCE));
            }
            (Dhcp4Step::Request(offer), Dhcp4MessageKind::Ack)
                if server == Some(offer.server) && message.yiaddr == offer.address =>
            {
                BROADCAST
            }
            (Dhcp4Step::Renew(lease) | Dhcp4Step::Rebind(lease), Dhcp4MessageKind::Ack) => {
                lease.server_mac
            }
            (Dhcp4Step::Request(offer), Dhcp4MessageKind::Nak) if server != Some(offer.server) => {
                return None;
            }
            (
                Dhcp4Step::Request(_) | Dhcp4Step::Renew(_) | Dhcp4Step::Rebind(_),
                Dhcp4MessageKind::Nak,
            ) => {
                return Some(ServerReply::Refused(option::server_message(&message.options)));
            }
            _ => return None,
        };
        let mut lease =
            Dhcp4Lease::from_ack(message, from.unwrap_or(server_mac), exchange.asked, random);
        if let Ok(lease) = &mut lease
            && let Some(requested) = self.options.get(&option::PARAMETERS)
        {
            lease.options.retain(|code, _| requested.contains(code));
        }
        Some(lease.map_or_else(ServerReply::Flawed, ServerReply::Lease))
    }

    fn is_conflict(&self, frame: &[u8], lease: &Dhcp4Lease) -> bool {
        frame::is_arp_conflict(frame, self.mac, lease.ip_address())
    }
}

#[cfg(test)]
mod tests;
