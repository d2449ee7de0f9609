//! DHCPv6 messages of a client and their timeouts, RFC 9915 section 18.2. Rapid Commit is not
//! requested: every server that receives it assigns an address, and the addresses that the client
//! does not choose are never released.

use std::net::IpAddr;
use std::time::Duration;

use super::super::family;
use super::super::timing::{
    BootClockTime, ClientTiming, LeaseTimers, MessageExchange, RandomGenerator,
};
use super::super::v6::lease::{Dhcp6Binding, Dhcp6Lease, Dhcp6ReplyFlaw, is_usable};
use super::super::v6::message::{
    Dhcp6Message, Dhcp6MessageKind, IdentityAssociation, WANTED, in_hundredths, status,
};
use super::super::v6::neighbour;
use super::super::v6::retransmit::RetransmitTimeouts;
use super::{ClientAction, DhcpProtocol, NeededSockets, PacketSource, ReleaseMessage, ServerReply};
use crate::netlink::MacAddress;

/// The client of one interface.
#[derive(Debug)]
pub struct Dhcp6Client {
    pub duid: Vec<u8>,
    /// The IAID of the interface's only identity association.
    pub iaid: u32,
    /// The Ethernet address of the interface, for probes only.
    pub mac: MacAddress,
    /// The configured timeouts.
    pub timing: ClientTiming,
    /// The last `SOL_MAX_RT` option of a server, in seconds.
    pub sol_max_rt: Option<u32>,
}

type Dhcp6Step<'a> = super::ExchangeStep<'a, Dhcp6Client>;

impl DhcpProtocol for Dhcp6Client {
    type Message = Dhcp6Message;
    type Lease = Dhcp6Lease;
    type Binding = Dhcp6Binding;

    const LEASE: fn(Dhcp6Lease) -> family::DhcpLease = family::DhcpLease::V6;
    const XID_BITS: u32 = 24;
    const REQUEST_KEEPS_XID: bool = false;
    /// Half of `REQ_MAX_RC`: half a minute, which leaves time for another server.
    const REQUESTS: u32 = 5;
    /// `DEC_MAX_RC`.
    const DECLINES: u32 = 4;
    const LISTENING: NeededSockets = NeededSockets::Udp;

    fn mac_mut(&mut self) -> &mut MacAddress {
        &mut self.mac
    }

    fn client_timing(&self) -> &ClientTiming {
        &self.timing
    }

    fn leased_address(lease: &Dhcp6Lease) -> IpAddr {
        lease.address.into()
    }

    fn lease_timers(lease: &Dhcp6Lease) -> LeaseTimers {
        LeaseTimers { renew: lease.renew, rebind: lease.rebind, expires: lease.expires }
    }

    fn build_message(&self, step: &Dhcp6Step<'_>, exchange: &MessageExchange) -> ClientAction {
        let (kind, address, server) = match step {
            Dhcp6Step::Discover => (Dhcp6MessageKind::Solicit, None, None),
            Dhcp6Step::Request(binding) => {
                (Dhcp6MessageKind::Request, Some(binding.address), Some(&binding.server))
            }
            Dhcp6Step::Decline(binding) => {
                (Dhcp6MessageKind::Decline, Some(binding.address), Some(&binding.server))
            }
            Dhcp6Step::Renew(lease) => {
                (Dhcp6MessageKind::Renew, Some(lease.address), Some(&lease.server))
            }
            Dhcp6Step::Rebind(lease) => (Dhcp6MessageKind::Rebind, Some(lease.address), None),
        };
        ClientAction::Multicast(Dhcp6Message {
            client: self.duid.clone(),
            server: server.cloned().unwrap_or_default(),
            ias: vec![IdentityAssociation::for_address(self.iaid, address)],
            elapsed: in_hundredths(exchange.elapsed_time()),
            requested: if kind == Dhcp6MessageKind::Decline { Vec::new() } else { WANTED.to_vec() },
            ..Dhcp6Message::new(kind, exchange.xid)
        })
    }

    fn message_timeout(
        &self,
        step: &Dhcp6Step<'_>,
        exchange: &MessageExchange,
        random: &mut RandomGenerator,
    ) -> Duration {
        let left = |end: BootClockTime| end.saturating_sub(exchange.asked);
        let repeat = match step {
            Dhcp6Step::Discover => RetransmitTimeouts::for_solicit(&self.timing, self.sol_max_rt),
            Dhcp6Step::Request(_) | Dhcp6Step::Decline(_) => {
                RetransmitTimeouts::for_request(&self.timing)
            }
            Dhcp6Step::Renew(lease) => {
                RetransmitTimeouts::for_renew(left(lease.rebind.min(lease.expires)))
            }
            Dhcp6Step::Rebind(lease) => RetransmitTimeouts::for_renew(left(lease.expires)),
        };
        repeat.next_timeout(exchange, random)
    }

    fn build_release(&self, binding: &Dhcp6Binding, xid: u32) -> ReleaseMessage {
        let message = Dhcp6Message {
            client: self.duid.clone(),
            server: binding.server.clone(),
            ias: vec![IdentityAssociation::for_address(self.iaid, Some(binding.address))],
            ..Dhcp6Message::new(Dhcp6MessageKind::Release, xid)
        };
        ReleaseMessage::V6(message, binding.address)
    }

    fn decode_message(_: PacketSource, bytes: &[u8]) -> Option<(Dhcp6Message, Option<MacAddress>)> {
        Some((Dhcp6Message::decode(bytes)?, None))
    }

    /// Sections 18.2.9 and 18.2.10.
    fn interpret_reply(
        &mut self,
        step: &Dhcp6Step<'_>,
        exchange: &MessageExchange,
        message: &Dhcp6Message,
        _: Option<MacAddress>,
        random: &mut RandomGenerator,
    ) -> Option<ServerReply<Dhcp6Client>> {
        let is_own = message.client == self.duid && !message.server.is_empty();
        if !is_own || message.xid != exchange.xid {
            return None;
        }
        self.sol_max_rt = message.sol_max_rt.or(self.sol_max_rt);
        let (kind, server, own) = match step {
            Dhcp6Step::Discover => (Dhcp6MessageKind::Advertise, None, None),
            Dhcp6Step::Request(offer) => {
                (Dhcp6MessageKind::Reply, Some(&offer.server), Some(offer.address))
            }
            Dhcp6Step::Decline(binding) => (Dhcp6MessageKind::Reply, Some(&binding.server), None),
            Dhcp6Step::Renew(lease) | Dhcp6Step::Rebind(lease) => {
                (Dhcp6MessageKind::Reply, None, Some(lease.address))
            }
        };
        if message.kind != kind || server.is_some_and(|server| *server != message.server) {
            return None;
        }
        let binding = |address| Dhcp6Binding { address, server: message.server.clone() };
        let ia = message.ias.iter().find(|ia| ia.iaid == self.iaid);
        let mut statuses = std::iter::once(&message.status).chain(ia.map(|ia| &ia.status));
        let failure = statuses.find(|status| !status.is_success());
        if let Dhcp6Step::Decline(_) = step {
            return Some(ServerReply::Declined);
        }
        if let Some(failure) = failure {
            let why = failure.to_string();
            return Some(match (step, failure.code) {
                (Dhcp6Step::Renew(lease) | Dhcp6Step::Rebind(lease), status::NO_BINDING) => {
                    ServerReply::NoBinding(binding(lease.address))
                }
                (Dhcp6Step::Discover, _) => ServerReply::Useless(why),
                (Dhcp6Step::Request(_), status::NO_BINDING | status::NO_ADDRS_AVAIL)
                | (_, status::NOT_ON_LINK) => ServerReply::Refused(why),
                // The next message may get a better reply.
                _ => ServerReply::Useless(why),
            });
        }
        let answer = match (step, ia) {
            (_, None) => Err(Dhcp6ReplyFlaw::NoAddress),
            (Dhcp6Step::Discover, Some(ia)) => {
                let given =
                    ia.addrs.iter().find(|addr| is_usable(addr)).ok_or(Dhcp6ReplyFlaw::NoAddress);
                given.map(|given| ServerReply::Offer(binding(given.addr), message.preference))
            }
            (_, Some(ia)) => Dhcp6Lease::from_reply(message, ia, own, exchange.asked, random)
                .map(ServerReply::Lease),
        };
        Some(answer.unwrap_or_else(|flaw| match flaw {
            Dhcp6ReplyFlaw::Withdrawn => ServerReply::Refused(flaw.to_string()),
            Dhcp6ReplyFlaw::NoAddress | Dhcp6ReplyFlaw::BadTimes => {
                ServerReply::Useless(flaw.to_string())
            }
        }))
    }

    fn is_conflict(&self, frame: &[u8], lease: &Dhcp6Lease) -> bool {
        neighbour::is_conflict(frame, self.mac, lease.address)
    }
}

#[cfg(test)]
mod tests;
