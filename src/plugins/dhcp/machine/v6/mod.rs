//! The client's states, RFC 9915 section 18.2. Rapid Commit is not asked for: every server that
//! receives it assigns an address, and those that the client does not take are not given back.

use std::net::Ipv6Addr;

use super::super::timing::{BootTime, NEVER, Random, Timing};
use super::super::v6::duid::Client;
use super::super::v6::lease::Lease;
use super::super::v6::message::{IaNa, Kind, Message, WANTED};
use super::super::v6::neighbour;
use super::super::v6::reply::{self, Binding, Offer, Outcome};
use super::super::v6::retransmit::{Exchange, Repeat};
use super::{Action, Failure, Listening, PROBES, Release, StateMachine};
use crate::netlink::Mac;

/// The preference of a server that is to be chosen at once.
const AT_ONCE: u8 = 255;

#[derive(Clone, Debug)]
enum State {
    /// Waits before it begins (again).
    Init {
        until: BootTime,
    },
    /// Waits for servers.
    Soliciting {
        exchange: Exchange,
        best: Option<Offer>,
    },
    /// Has chosen one; `held` is the lease that it does not know (any more).
    Requesting {
        exchange: Exchange,
        binding: Binding,
        held: Option<Lease>,
    },
    Probing {
        lease: Lease,
        sent: u32,
        until: BootTime,
    },
    Declining {
        exchange: Exchange,
        binding: Binding,
    },
    Bound {
        lease: Lease,
    },
    Renewing {
        exchange: Exchange,
        lease: Lease,
    },
    Rebinding {
        exchange: Exchange,
        lease: Lease,
    },
    Ended,
}

/// One client of one interface.
#[derive(Debug)]
pub struct Machine {
    client: Client,
    state: State,
    random: Random,
    /// What is to be done next.
    out: Vec<Action>,
    /// By when there must be a first lease.
    limit: BootTime,
    /// Beginnings since the last lease.
    failures: u32,
    conflicts: u32,
    /// What a server has said about the longest wait between two Solicits.
    sol_max_rt: Option<u32>,
    /// What was refused last, so that it is told once.
    refusal: String,
}

impl Machine {
    /// A client that begins now, and fails at `limit`. It is not delayed at random as section
    /// 18.2.1 has it: the kernel has delayed the link's address already.
    pub fn new(client: Client, now: BootTime, limit: BootTime, random: Random) -> Machine {
        Machine {
            client,
            state: State::Init { until: now },
            random,
            out: Vec::new(),
            limit,
            failures: 0,
            conflicts: 0,
            sol_max_rt: None,
            refusal: String::new(),
        }
    }

    /// A client that goes on with a lease.
    pub fn resume(client: Client, lease: Lease, random: Random) -> Machine {
        let state = State::Bound { lease };
        Machine { state, ..Machine::new(client, NEVER, NEVER, random) }
    }

    /// The lease that may be used.
    pub fn lease(&self) -> Option<&Lease> {
        match &self.state {
            State::Requesting { held, .. } => held.as_ref(),
            State::Bound { lease }
            | State::Renewing { lease, .. }
            | State::Rebinding { lease, .. } => Some(lease),
            _ => None,
        }
    }

    /// A message has arrived.
    pub fn receive(&mut self, now: BootTime, message: &Message) -> Vec<Action> {
        let ours = message.client == self.client.duid && !message.server.is_empty();
        if !ours || self.xid() != Some(message.xid) {
            return self.take_actions();
        }
        self.sol_max_rt = message.sol_max_rt.or(self.sol_max_rt);
        match (std::mem::replace(&mut self.state, State::Ended), message.kind) {
            (State::Soliciting { exchange, best }, Kind::Advertise) => {
                self.advertised(now, message, exchange, best);
            }
            (State::Requesting { exchange, binding, held }, Kind::Reply)
                if message.server == binding.server =>
            {
                self.answered(now, message, exchange, binding, held);
            }
            (state @ (State::Renewing { .. } | State::Rebinding { .. }), Kind::Reply) => {
                self.extended(now, message, state);
            }
            (State::Declining { binding, .. }, Kind::Reply) if message.server == binding.server => {
                self.declined(now);
            }
            (state, _) => self.state = state,
        }
        self.take_actions()
    }

    /// Somebody else has the address that [`Listening::Neighbours`] is about.
    pub fn conflict(&mut self, now: BootTime) -> Vec<Action> {
        let State::Probing { lease, .. } = &self.state else { return Vec::new() };
        let binding = Binding::from(lease);
        let text = format!("declined {}, which somebody on the link uses", binding.address);
        self.out.push(Action::Note(text));
        let exchange = Exchange::begin(now, &mut self.random);
        self.decline(now, exchange, binding);
        self.take_actions()
    }

    /// The address that the server may have assigned to the client.
    fn binding(&self) -> Option<Binding> {
        match &self.state {
            // The reply may be on its way.
            State::Requesting { binding, .. } => Some(binding.clone()),
            State::Probing { lease, .. } => Some(lease.into()),
            _ => self.lease().map(Into::into),
        }
    }

    fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.out)
    }

    fn xid(&self) -> Option<u32> {
        match &self.state {
            State::Soliciting { exchange, .. }
            | State::Requesting { exchange, .. }
            | State::Declining { exchange, .. }
            | State::Renewing { exchange, .. }
            | State::Rebinding { exchange, .. } => Some(exchange.xid),
            _ => None,
        }
    }

    /// A message of the client about `addr`.
    fn message(
        &self,
        kind: Kind,
        now: BootTime,
        exchange: &Exchange,
        addr: Option<Ipv6Addr>,
    ) -> Message {
        let mut message = Message::new(kind, exchange.xid);
        message.client.clone_from(&self.client.duid);
        message.ias = vec![IaNa::of(self.client.iaid, addr)];
        message.elapsed = exchange.elapsed(now);
        if kind != Kind::Decline {
            message.requested = WANTED.to_vec();
        }
        message
    }

    fn begin(&mut self, now: BootTime) {
        let exchange = Exchange::begin(now, &mut self.random);
        self.solicit(now, exchange);
    }

    fn solicit(&mut self, now: BootTime, exchange: Exchange) {
        self.out.push(Action::Multicast(self.message(Kind::Solicit, now, &exchange, None)));
        let repeat = Repeat::solicit(&self.client.timing, self.sol_max_rt);
        let exchange = exchange.send(now, repeat, &mut self.random);
        self.state = State::Soliciting { exchange, best: None };
    }

    /// The best of those that answer the first Solicit in time is chosen, later the first.
    fn advertised(
        &mut self,
        now: BootTime,
        message: &Message,
        exchange: Exchange,
        best: Option<Offer>,
    ) {
        let offer = match reply::offer(message, self.client.iaid) {
            Ok(offer) => Some(offer),
            Err(why) => {
                self.refused(&why);
                None
            }
        };
        let better = |offer: &Offer| best.as_ref().is_none_or(|b| offer.preference > b.preference);
        match offer.filter(better) {
            Some(offer) if offer.preference == AT_ONCE || exchange.sent > 1 => {
                self.choose(now, offer.binding, None);
            }
            Some(offer) => self.state = State::Soliciting { exchange, best: Some(offer) },
            None => self.state = State::Soliciting { exchange, best },
        }
    }

    fn choose(&mut self, now: BootTime, binding: Binding, held: Option<Lease>) {
        let exchange = Exchange::begin(now, &mut self.random);
        self.request(now, exchange, binding, held);
    }

    fn request(
        &mut self,
        now: BootTime,
        exchange: Exchange,
        binding: Binding,
        held: Option<Lease>,
    ) {
        let mut message = self.message(Kind::Request, now, &exchange, Some(binding.address));
        message.server.clone_from(&binding.server);
        self.out.push(Action::Multicast(message));
        let repeat = Repeat::request(&self.client.timing);
        let exchange = exchange.send(now, repeat, &mut self.random);
        self.state = State::Requesting { exchange, binding, held };
    }

    /// Or gives up on the server.
    fn request_again(
        &mut self,
        now: BootTime,
        exchange: Exchange,
        binding: Binding,
        held: Option<Lease>,
    ) {
        if !exchange.is_over(Repeat::request(&self.client.timing)) {
            return self.request(now, exchange, binding, held);
        }
        self.out.push(Action::Note("the server that made the offer is silent".to_owned()));
        match held {
            Some(lease) => {
                let exchange = Exchange::begin(now, &mut self.random);
                self.rebind(now, exchange, lease);
            }
            None => self.begin(now),
        }
    }

    /// What the server says to a Request.
    fn answered(
        &mut self,
        now: BootTime,
        message: &Message,
        exchange: Exchange,
        binding: Binding,
        held: Option<Lease>,
    ) {
        match self.evaluate(message, binding.address, exchange.asked) {
            // It has been in use all the time, by us.
            Outcome::Given(lease) if held.is_some() => self.bind(lease),
            Outcome::Given(lease) if self.client.timing.probe.is_zero() => self.bind(lease),
            Outcome::Given(lease) => self.probe(now, lease, 0),
            Outcome::Useless(why) => {
                self.refused(&why);
                self.state = State::Requesting { exchange, binding, held };
            }
            Outcome::NoBinding => self.start_over(now, held.is_some(), "NoBinding"),
            Outcome::NoAddress(why) | Outcome::Refused(why) => {
                self.start_over(now, held.is_some(), &why);
            }
        }
    }

    /// What a server says to a Renew or Rebind.
    fn extended(&mut self, now: BootTime, message: &Message, state: State) {
        let (State::Renewing { exchange, lease } | State::Rebinding { exchange, lease }) = &state
        else {
            return;
        };
        match self.evaluate(message, lease.address, exchange.asked) {
            Outcome::Given(lease) => self.bind(lease),
            // A server that has forgotten its leases may give the same one again (18.2.10.1).
            Outcome::NoBinding => {
                let binding = Binding { address: lease.address, server: message.server.clone() };
                let text = "the server does not know the lease; it is asked for it again";
                self.out.push(Action::Note(text.to_owned()));
                self.choose(now, binding, Some(lease.clone()));
            }
            Outcome::Refused(why) => self.start_over(now, true, &why),
            Outcome::NoAddress(why) | Outcome::Useless(why) => {
                self.refused(&why);
                self.state = state;
            }
        }
    }

    fn evaluate(&mut self, reply: &Message, own: Ipv6Addr, asked: BootTime) -> Outcome {
        reply::evaluate(reply, self.client.iaid, own, asked, &mut self.random)
    }

    /// Tells about a refusal, but not each time that it is repeated.
    fn refused(&mut self, why: &str) {
        if self.refusal != why {
            why.clone_into(&mut self.refusal);
            self.out.push(Action::Refused(format!("refused by the server: {why}")));
        }
    }

    /// Begins again, later each time; if a lease is `held`, without it.
    fn start_over(&mut self, now: BootTime, held: bool, why: &str) {
        if held {
            self.out.push(Action::Lost("the server does not let us keep it"));
        }
        self.refused(why);
        let pause = self.client.timing.after_refusal(self.failures, &mut self.random);
        self.failures = self.failures.saturating_add(1);
        self.state = State::Init { until: now + pause };
    }

    fn probe(&mut self, now: BootTime, lease: Lease, sent: u32) {
        if sent == PROBES {
            return self.bind(lease);
        }
        self.out.push(Action::Probe(lease.address.into()));
        let until = now + self.client.timing.probe / PROBES;
        self.state = State::Probing { lease, sent: sent + 1, until };
    }

    fn decline(&mut self, now: BootTime, exchange: Exchange, binding: Binding) {
        let repeat = Repeat::decline(&self.client.timing);
        if exchange.is_over(repeat) {
            return self.declined(now);
        }
        let mut message = self.message(Kind::Decline, now, &exchange, Some(binding.address));
        message.server.clone_from(&binding.server);
        self.out.push(Action::Multicast(message));
        let exchange = exchange.send(now, repeat, &mut self.random);
        self.state = State::Declining { exchange, binding };
    }

    fn declined(&mut self, now: BootTime) {
        let pause = Timing::after_conflict(self.conflicts);
        self.conflicts += 1;
        self.state = State::Init { until: now + pause };
    }

    fn bind(&mut self, lease: Lease) {
        (self.limit, self.failures, self.conflicts) = (NEVER, 0, 0);
        self.refusal.clear();
        self.out.push(Action::Bound(lease.clone().into()));
        self.state = State::Bound { lease };
    }

    fn renew(&mut self, now: BootTime, exchange: Exchange, lease: Lease) {
        let mut message = self.message(Kind::Renew, now, &exchange, Some(lease.address));
        message.server.clone_from(&lease.server);
        self.out.push(Action::Multicast(message));
        let exchange = self.ask(now, exchange, lease.rebind.min(lease.expires));
        self.state = State::Renewing { exchange, lease };
    }

    fn rebind(&mut self, now: BootTime, exchange: Exchange, lease: Lease) {
        let message = self.message(Kind::Rebind, now, &exchange, Some(lease.address));
        self.out.push(Action::Multicast(message));
        let exchange = self.ask(now, exchange, lease.expires);
        self.state = State::Rebinding { exchange, lease };
    }

    fn ask(&mut self, now: BootTime, exchange: Exchange, end: BootTime) -> Exchange {
        exchange.send(now, Repeat::renew(end.saturating_sub(now)), &mut self.random)
    }
}

impl StateMachine for Machine {
    fn deadline(&self) -> BootTime {
        let until = match &self.state {
            State::Init { until } | State::Probing { until, .. } => *until,
            State::Soliciting { exchange, .. } | State::Declining { exchange, .. } => {
                exchange.until
            }
            State::Requesting { exchange, held, .. } => {
                exchange.until.min(held.as_ref().map_or(NEVER, |lease| lease.expires))
            }
            State::Bound { lease } => lease.renew,
            State::Renewing { exchange, lease } => exchange.until.min(lease.rebind),
            State::Rebinding { exchange, lease } => exchange.until.min(lease.expires),
            State::Ended => NEVER,
        };
        until.min(self.limit)
    }

    fn listening(&self) -> Listening {
        match &self.state {
            State::Init { .. } | State::Bound { .. } | State::Ended => Listening::None,
            State::Probing { lease, .. } => Listening::Neighbours(lease.address),
            _ => Listening::Udp,
        }
    }

    fn tick(&mut self, now: BootTime) -> Vec<Action> {
        if now >= self.limit {
            self.state = State::Ended;
            self.limit = NEVER;
            return vec![Action::Failed(Failure::TimeIsUp)];
        }
        if now < self.deadline() {
            return self.take_actions();
        }
        if self.lease().is_some_and(|lease| now >= lease.expires) {
            self.out.push(Action::Lost("the lease has expired"));
            self.state = State::Init { until: now };
            return self.take_actions();
        }
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Init { .. } => self.begin(now),
            State::Soliciting { best: Some(offer), .. } => {
                self.choose(now, offer.binding, None);
            }
            State::Soliciting { exchange, best: None } => self.solicit(now, exchange),
            State::Requesting { exchange, binding, held } => {
                self.request_again(now, exchange, binding, held);
            }
            State::Probing { lease, sent, .. } => self.probe(now, lease, sent),
            State::Declining { exchange, binding } => self.decline(now, exchange, binding),
            State::Bound { lease } | State::Renewing { lease, .. } if now >= lease.rebind => {
                let exchange = Exchange::begin(now, &mut self.random);
                self.rebind(now, exchange, lease);
            }
            State::Bound { lease } => {
                let exchange = Exchange::begin(now, &mut self.random);
                self.renew(now, exchange, lease);
            }
            State::Renewing { exchange, lease } => self.renew(now, exchange, lease),
            State::Rebinding { exchange, lease } => self.rebind(now, exchange, lease),
            State::Ended => {}
        }
        self.take_actions()
    }

    fn datagram(&mut self, now: BootTime, payload: &[u8]) -> Vec<Action> {
        let message = Message::decode(payload);
        message.map(|message| self.receive(now, &message)).unwrap_or_default()
    }

    fn neighbour(&mut self, now: BootTime, frame: &[u8]) -> Vec<Action> {
        match self.listening() {
            Listening::Neighbours(address)
                if neighbour::conflict(frame, self.client.mac, address) =>
            {
                self.conflict(now)
            }
            _ => Vec::new(),
        }
    }

    fn release(&mut self) -> Option<Release> {
        let binding = self.binding()?;
        let mut message = Message::new(Kind::Release, self.random.number());
        message.client.clone_from(&self.client.duid);
        message.server = binding.server;
        message.ias = vec![IaNa::of(self.client.iaid, Some(binding.address))];
        Some(Release::V6(message, binding.address))
    }

    fn mac(&self) -> Mac {
        self.client.mac
    }

    fn set_mac(&mut self, mac: Mac) {
        self.client.mac = mac;
    }
}

#[cfg(test)]
mod tests;
