//! DHCPv6 messages of a client and their timeouts, RFC 9915 section 18.2. Rapid Commit is not requested: every server
//! that receives it assigns an address, and the addresses that the client does not choose are never released.

use std::net::IpAddr;
use std::time::Duration;

use super::super::family;
use super::super::timing::{BootTime, Exchange, Random, Timers, Timing};
use super::super::v6::lease::{Binding, Flaw, Lease, is_usable};
use super::super::v6::message::{IaNa, Kind, Message, WANTED, hundredths, status};
use super::super::v6::neighbour;
use super::super::v6::retransmit::Repeat;
use super::{Action, Answer, Listening, Protocol, Release, Source};
use crate::netlink::Mac;

/// The client of one interface.
#[derive(Debug)]
pub struct Client {
    /// The DUID.
    pub duid: Vec<u8>,
    /// The IAID of the interface's only identity association.
    pub iaid: u32,
    /// The Ethernet address of the interface, for probes only.
    pub mac: Mac,
    /// The configured timeouts.
    pub timing: Timing,
    /// The last `SOL_MAX_RT` option of a server, in seconds.
    pub sol_max_rt: Option<u32>,
}

type Step<'a> = super::Step<'a, Client>;

impl Protocol for Client {
    type Message = Message;
    type Lease = Lease;
    type Binding = Binding;

    const LEASE: fn(Lease) -> family::Lease = family::Lease::V6;
    const XID_BITS: u32 = 24;
    const REQUEST_KEEPS_XID: bool = false;
    /// Half of `REQ_MAX_RC`: half a minute, which leaves time for another server.
    const REQUESTS: u32 = 5;
    /// `DEC_MAX_RC`.
    const DECLINES: u32 = 4;
    const LISTENING: Listening = Listening::Udp;

    fn mac(&mut self) -> &mut Mac {
        &mut self.mac
    }

    fn timing(&self) -> &Timing {
        &self.timing
    }

    fn address(lease: &Lease) -> IpAddr {
        lease.address.into()
    }

    fn timers(lease: &Lease) -> Timers {
        Timers { renew: lease.renew, rebind: lease.rebind, expires: lease.expires }
    }

    fn message(&self, step: &Step<'_>, exchange: &Exchange) -> Action {
        let (kind, address, server) = match step {
            Step::Discover => (Kind::Solicit, None, None),
            Step::Request(binding) => (Kind::Request, Some(binding.address), Some(&binding.server)),
            Step::Decline(binding) => (Kind::Decline, Some(binding.address), Some(&binding.server)),
            Step::Renew(lease) => (Kind::Renew, Some(lease.address), Some(&lease.server)),
            Step::Rebind(lease) => (Kind::Rebind, Some(lease.address), None),
        };
        Action::Multicast(Message {
            client: self.duid.clone(),
            server: server.cloned().unwrap_or_default(),
            ias: vec![IaNa::of(self.iaid, address)],
            elapsed: hundredths(exchange.elapsed()),
            requested: if kind == Kind::Decline { Vec::new() } else { WANTED.to_vec() },
            ..Message::new(kind, exchange.xid)
        })
    }

    fn wait(&self, step: &Step<'_>, exchange: &Exchange, random: &mut Random) -> Duration {
        let left = |end: BootTime| end.saturating_sub(exchange.asked);
        let repeat = match step {
            Step::Discover => Repeat::solicit(&self.timing, self.sol_max_rt),
            Step::Request(_) | Step::Decline(_) => Repeat::request(&self.timing),
            Step::Renew(lease) => Repeat::renew(left(lease.rebind.min(lease.expires))),
            Step::Rebind(lease) => Repeat::renew(left(lease.expires)),
        };
        repeat.wait(exchange, random)
    }

    fn release(&self, binding: &Binding, xid: u32) -> Release {
        let message = Message {
            client: self.duid.clone(),
            server: binding.server.clone(),
            ias: vec![IaNa::of(self.iaid, Some(binding.address))],
            ..Message::new(Kind::Release, xid)
        };
        Release::V6(message, binding.address)
    }

    fn decode(_: Source, bytes: &[u8]) -> Option<(Message, Option<Mac>)> {
        Some((Message::decode(bytes)?, None))
    }

    /// Sections 18.2.9 and 18.2.10.
    fn judge(
        &mut self,
        step: &Step<'_>,
        exchange: &Exchange,
        message: &Message,
        _: Option<Mac>,
        random: &mut Random,
    ) -> Option<Answer<Client>> {
        let is_own = message.client == self.duid && !message.server.is_empty();
        if !is_own || message.xid != exchange.xid {
            return None;
        }
        self.sol_max_rt = message.sol_max_rt.or(self.sol_max_rt);
        let (kind, server, own) = match step {
            Step::Discover => (Kind::Advertise, None, None),
            Step::Request(offer) => (Kind::Reply, Some(&offer.server), Some(offer.address)),
            Step::Decline(binding) => (Kind::Reply, Some(&binding.server), None),
            Step::Renew(lease) | Step::Rebind(lease) => (Kind::Reply, None, Some(lease.address)),
        };
        if message.kind != kind || server.is_some_and(|server| *server != message.server) {
            return None;
        }
        let binding = |address| Binding { address, server: message.server.clone() };
        let ia = message.ias.iter().find(|ia| ia.iaid == self.iaid);
        let mut statuses = std::iter::once(&message.status).chain(ia.map(|ia| &ia.status));
        let failure = statuses.find(|status| !status.is_success());
        if let Step::Decline(_) = step {
            return Some(Answer::Declined);
        }
        if let Some(failure) = failure {
            let why = failure.to_string();
            return Some(match (step, failure.code) {
                (Step::Renew(lease) | Step::Rebind(lease), status::NO_BINDING) => {
                    Answer::NoBinding(binding(lease.address))
                }
                (Step::Discover, _) => Answer::Useless(why),
                (Step::Request(_), status::NO_BINDING | status::NO_ADDRS_AVAIL)
                | (_, status::NOT_ON_LINK) => Answer::Refused(why),
                // The next message may get a better reply.
                _ => Answer::Useless(why),
            });
        }
        let answer = match (step, ia) {
            (_, None) => Err(Flaw::NoAddress),
            (Step::Discover, Some(ia)) => {
                let given = ia.addrs.iter().find(|addr| is_usable(addr)).ok_or(Flaw::NoAddress);
                given.map(|given| Answer::Offer(binding(given.addr), message.preference))
            }
            (_, Some(ia)) => {
                Lease::from_reply(message, ia, own, exchange.asked, random).map(Answer::Lease)
            }
        };
        Some(answer.unwrap_or_else(|flaw| match flaw {
            Flaw::Withdrawn => Answer::Refused(flaw.to_string()),
            Flaw::NoAddress | Flaw::BadTimes => Answer::Useless(flaw.to_string()),
        }))
    }

    fn conflicts(&self, frame: &[u8], lease: &Lease) -> bool {
        neighbour::conflict(frame, self.mac, lease.address)
    }
}

#[cfg(test)]
mod tests;
