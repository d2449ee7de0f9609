//! The client's states, RFC 9915 section 18.2: events and the time go in, what to do comes out.
//!
//! Rapid Commit is not asked for: every server that hears it gives an address, and nobody gives
//! those back that the client does not take.

use std::net::Ipv6Addr;

use super::super::client::{Failure, Listening, Output, PROBES};
use super::super::timing::{Moment, NEVER, Random, Timing};
use super::exchange::{Exchange, Repeat};
use super::identity::Client;
use super::lease::Lease;
use super::message::{IaNa, Kind, Message, WANTED};
use super::verdict::{self, Claim, Verdict};
use crate::netlink::Mac;

/// The preference of a server that is to be chosen at once.
const AT_ONCE: u8 = 255;

/// What a server has advertised.
#[derive(Clone, Debug)]
struct Offer {
    claim: Claim,
    preference: u8,
}

#[derive(Clone, Debug)]
enum State {
    /// Waits before it begins (again).
    Init {
        until: Moment,
    },
    /// Waits for servers.
    Soliciting {
        exchange: Exchange,
        best: Option<Offer>,
    },
    /// Has chosen one; `held` is the lease that it does not know (any more).
    Requesting {
        exchange: Exchange,
        claim: Claim,
        held: Option<Lease>,
    },
    Probing {
        lease: Lease,
        sent: u32,
        until: Moment,
    },
    Declining {
        exchange: Exchange,
        claim: Claim,
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
    /// By when there must be a first lease.
    limit: Moment,
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
    pub fn new(client: Client, now: Moment, limit: Moment, random: Random) -> Machine {
        Machine {
            client,
            state: State::Init { until: now },
            random,
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

    /// When [`Machine::tick`] is to be called, unless something arrives before.
    pub fn deadline(&self) -> Moment {
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

    /// What has to be heard now.
    pub fn listening(&self) -> Listening {
        match &self.state {
            State::Init { .. } | State::Bound { .. } | State::Ended => Listening::None,
            State::Probing { lease, .. } => Listening::Neighbours(lease.address),
            _ => Listening::Udp,
        }
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

    /// What has to be given back if the client ends now.
    pub fn claim(&self) -> Option<Claim> {
        match &self.state {
            // The reply may be on its way.
            State::Requesting { claim, .. } => Some(claim.clone()),
            State::Probing { lease, .. } => Some(lease.into()),
            _ => self.lease().map(Into::into),
        }
    }

    /// The Ethernet address of the interface.
    pub fn mac(&self) -> Mac {
        self.client.mac
    }

    /// The interface has got another Ethernet address.
    pub fn set_mac(&mut self, mac: Mac) {
        self.client.mac = mac;
    }

    /// The message that gives an address back, as the first of its exchange.
    pub fn release(client: &Client, claim: &Claim, random: &mut Random) -> Message {
        let mut message = Message::new(Kind::Release, random.number());
        message.client.clone_from(&client.duid);
        message.server.clone_from(&claim.server);
        message.ias = vec![IaNa::of(client.iaid, Some(claim.address))];
        message
    }

    /// Time has passed.
    pub fn tick(&mut self, now: Moment) -> Vec<Output> {
        let mut out = Vec::new();
        if now >= self.limit {
            self.state = State::Ended;
            self.limit = NEVER;
            return vec![Output::Failed(Failure::TimeIsUp)];
        }
        if now < self.deadline() {
            return out;
        }
        if self.lease().is_some_and(|lease| now >= lease.expires) {
            out.push(Output::Lost("the lease has expired"));
            self.state = State::Init { until: now };
            return out;
        }
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Init { .. } => self.begin(now, &mut out),
            State::Soliciting { best: Some(offer), .. } => {
                self.choose(now, offer.claim, None, &mut out);
            }
            State::Soliciting { exchange, best: None } => self.solicit(now, exchange, &mut out),
            State::Requesting { exchange, claim, held } => {
                self.request_again(now, exchange, claim, held, &mut out);
            }
            State::Probing { lease, sent, .. } => self.probe(now, lease, sent, &mut out),
            State::Declining { exchange, claim } => self.decline(now, exchange, claim, &mut out),
            State::Bound { lease } | State::Renewing { lease, .. } if now >= lease.rebind => {
                let exchange = Exchange::begin(now, &mut self.random);
                self.rebind(now, exchange, lease, &mut out);
            }
            State::Bound { lease } => {
                let exchange = Exchange::begin(now, &mut self.random);
                self.renew(now, exchange, lease, &mut out);
            }
            State::Renewing { exchange, lease } => self.renew(now, exchange, lease, &mut out),
            State::Rebinding { exchange, lease } => self.rebind(now, exchange, lease, &mut out),
            State::Ended => {}
        }
        out
    }

    /// A message has arrived.
    pub fn receive(&mut self, now: Moment, message: &Message) -> Vec<Output> {
        let mut out = Vec::new();
        let ours = message.client == self.client.duid && !message.server.is_empty();
        if !ours || self.xid() != Some(message.xid) {
            return out;
        }
        self.sol_max_rt = message.sol_max_rt.or(self.sol_max_rt);
        match (std::mem::replace(&mut self.state, State::Ended), message.kind) {
            (State::Soliciting { exchange, best }, Kind::Advertise) => {
                self.advertised(now, message, (exchange, best), &mut out);
            }
            (State::Requesting { exchange, claim, held }, Kind::Reply)
                if message.server == claim.server =>
            {
                self.answered(now, message, (exchange, claim, held), &mut out);
            }
            (state @ (State::Renewing { .. } | State::Rebinding { .. }), Kind::Reply) => {
                self.extended(now, message, state, &mut out);
            }
            (State::Declining { claim, .. }, Kind::Reply) if message.server == claim.server => {
                self.declined(now);
            }
            (state, _) => self.state = state,
        }
        out
    }

    /// Somebody else has the address that [`Listening::Neighbours`] is about.
    pub fn conflict(&mut self, now: Moment) -> Vec<Output> {
        let State::Probing { lease, .. } = &self.state else { return Vec::new() };
        let claim = Claim::from(lease);
        let text = format!("declined {}, which somebody on the link uses", claim.address);
        let mut out = vec![Output::Note(text)];
        let exchange = Exchange::begin(now, &mut self.random);
        self.decline(now, exchange, claim, &mut out);
        out
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
        now: Moment,
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

    fn begin(&mut self, now: Moment, out: &mut Vec<Output>) {
        let exchange = Exchange::begin(now, &mut self.random);
        self.solicit(now, exchange, out);
    }

    fn solicit(&mut self, now: Moment, exchange: Exchange, out: &mut Vec<Output>) {
        out.push(Output::Multicast(self.message(Kind::Solicit, now, &exchange, None)));
        let repeat = Repeat::solicit(&self.client.timing, self.sol_max_rt);
        let exchange = exchange.send(now, repeat, &mut self.random);
        self.state = State::Soliciting { exchange, best: None };
    }

    /// The best of those that answer the first Solicit in time is chosen, later the first.
    fn advertised(
        &mut self,
        now: Moment,
        message: &Message,
        (exchange, best): (Exchange, Option<Offer>),
        out: &mut Vec<Output>,
    ) {
        let offer = match verdict::offer(message, self.client.iaid) {
            Ok(claim) => Some(Offer { claim, preference: message.preference }),
            Err(why) => {
                self.refused(&why, out);
                None
            }
        };
        let better = |offer: &Offer| best.as_ref().is_none_or(|b| offer.preference > b.preference);
        match offer.filter(better) {
            Some(offer) if offer.preference == AT_ONCE || exchange.sent > 1 => {
                self.choose(now, offer.claim, None, out);
            }
            Some(offer) => self.state = State::Soliciting { exchange, best: Some(offer) },
            None => self.state = State::Soliciting { exchange, best },
        }
    }

    fn choose(&mut self, now: Moment, claim: Claim, held: Option<Lease>, out: &mut Vec<Output>) {
        let exchange = Exchange::begin(now, &mut self.random);
        self.request(now, exchange, claim, held, out);
    }

    fn request(
        &mut self,
        now: Moment,
        exchange: Exchange,
        claim: Claim,
        held: Option<Lease>,
        out: &mut Vec<Output>,
    ) {
        let mut message = self.message(Kind::Request, now, &exchange, Some(claim.address));
        message.server.clone_from(&claim.server);
        out.push(Output::Multicast(message));
        let repeat = Repeat::request(&self.client.timing);
        let exchange = exchange.send(now, repeat, &mut self.random);
        self.state = State::Requesting { exchange, claim, held };
    }

    /// Or gives up on the server.
    fn request_again(
        &mut self,
        now: Moment,
        exchange: Exchange,
        claim: Claim,
        held: Option<Lease>,
        out: &mut Vec<Output>,
    ) {
        if !exchange.is_over(Repeat::request(&self.client.timing)) {
            return self.request(now, exchange, claim, held, out);
        }
        out.push(Output::Note("the server that made the offer is silent".to_owned()));
        match held {
            Some(lease) => {
                let exchange = Exchange::begin(now, &mut self.random);
                self.rebind(now, exchange, lease, out);
            }
            None => self.begin(now, out),
        }
    }

    /// What the server says to a Request.
    fn answered(
        &mut self,
        now: Moment,
        message: &Message,
        (exchange, claim, held): (Exchange, Claim, Option<Lease>),
        out: &mut Vec<Output>,
    ) {
        match self.judge(message, claim.address, exchange.asked) {
            // It has been in use all the time, by us.
            Verdict::Given(lease) if held.is_some() => self.bind(lease, out),
            Verdict::Given(lease) if self.client.timing.probe.is_zero() => self.bind(lease, out),
            Verdict::Given(lease) => self.probe(now, lease, 0, out),
            Verdict::Useless(why) => {
                self.refused(&why, out);
                self.state = State::Requesting { exchange, claim, held };
            }
            Verdict::NoBinding => self.start_over(now, held.is_some(), "NoBinding", out),
            Verdict::NoAddress(why) | Verdict::Refused(why) => {
                self.start_over(now, held.is_some(), &why, out);
            }
        }
    }

    /// What a server says to a Renew or Rebind.
    fn extended(&mut self, now: Moment, message: &Message, state: State, out: &mut Vec<Output>) {
        let (State::Renewing { exchange, lease } | State::Rebinding { exchange, lease }) = &state
        else {
            return;
        };
        match self.judge(message, lease.address, exchange.asked) {
            Verdict::Given(lease) => self.bind(lease, out),
            // A server that has forgotten its leases may give the same one again (18.2.10.1).
            Verdict::NoBinding => {
                let claim = Claim { address: lease.address, server: message.server.clone() };
                let text = "the server does not know the lease; it is asked for it again";
                out.push(Output::Note(text.to_owned()));
                self.choose(now, claim, Some(lease.clone()), out);
            }
            Verdict::Refused(why) => self.start_over(now, true, &why, out),
            Verdict::NoAddress(why) | Verdict::Useless(why) => {
                self.refused(&why, out);
                self.state = state;
            }
        }
    }

    fn judge(&mut self, reply: &Message, own: Ipv6Addr, asked: Moment) -> Verdict {
        verdict::judge(reply, self.client.iaid, own, asked, &mut self.random)
    }

    /// Tells about a refusal, but not each time that it is repeated.
    fn refused(&mut self, why: &str, out: &mut Vec<Output>) {
        if self.refusal != why {
            why.clone_into(&mut self.refusal);
            out.push(Output::Refused(format!("refused by the server: {why}")));
        }
    }

    /// Begins again, later each time; if a lease is `held`, without it.
    fn start_over(&mut self, now: Moment, held: bool, why: &str, out: &mut Vec<Output>) {
        if held {
            out.push(Output::Lost("the server does not let us keep it"));
        }
        self.refused(why, out);
        let pause = self.client.timing.after_refusal(self.failures, &mut self.random);
        self.failures = self.failures.saturating_add(1);
        self.state = State::Init { until: now + pause };
    }

    fn probe(&mut self, now: Moment, lease: Lease, sent: u32, out: &mut Vec<Output>) {
        if sent == PROBES {
            return self.bind(lease, out);
        }
        out.push(Output::Probe(lease.address.into()));
        let until = now + self.client.timing.probe / PROBES;
        self.state = State::Probing { lease, sent: sent + 1, until };
    }

    fn decline(&mut self, now: Moment, exchange: Exchange, claim: Claim, out: &mut Vec<Output>) {
        let repeat = Repeat::decline(&self.client.timing);
        if exchange.is_over(repeat) {
            return self.declined(now);
        }
        let mut message = self.message(Kind::Decline, now, &exchange, Some(claim.address));
        message.server.clone_from(&claim.server);
        out.push(Output::Multicast(message));
        let exchange = exchange.send(now, repeat, &mut self.random);
        self.state = State::Declining { exchange, claim };
    }

    fn declined(&mut self, now: Moment) {
        let pause = Timing::after_conflict(self.conflicts);
        self.conflicts += 1;
        self.state = State::Init { until: now + pause };
    }

    fn bind(&mut self, lease: Lease, out: &mut Vec<Output>) {
        (self.limit, self.failures, self.conflicts) = (NEVER, 0, 0);
        self.refusal.clear();
        out.push(Output::Bound(lease.clone().into()));
        self.state = State::Bound { lease };
    }

    fn renew(&mut self, now: Moment, exchange: Exchange, lease: Lease, out: &mut Vec<Output>) {
        let mut message = self.message(Kind::Renew, now, &exchange, Some(lease.address));
        message.server.clone_from(&lease.server);
        out.push(Output::Multicast(message));
        let exchange = self.ask(now, exchange, lease.rebind.min(lease.expires));
        self.state = State::Renewing { exchange, lease };
    }

    fn rebind(&mut self, now: Moment, exchange: Exchange, lease: Lease, out: &mut Vec<Output>) {
        out.push(Output::Multicast(self.message(
            Kind::Rebind,
            now,
            &exchange,
            Some(lease.address),
        )));
        let exchange = self.ask(now, exchange, lease.expires);
        self.state = State::Rebinding { exchange, lease };
    }

    fn ask(&mut self, now: Moment, exchange: Exchange, end: Moment) -> Exchange {
        exchange.send(now, Repeat::renew(end.saturating_sub(now)), &mut self.random)
    }
}

#[cfg(test)]
mod tests;
