//! The client's states, RFC 2131 section 4.4: events and the time go in, what to do comes out.

use std::time::Duration;

use super::client::{Claim, Client, Failure, Listening, Output, PROBES};
use super::lease::Lease;
use super::message::{Kind, Message, Options};
use super::option;
use super::timing::{Moment, NEVER, Random, Timing};
use crate::netlink::Mac;

/// How often an offered address is asked for before another one is looked for.
const MOST_REQUESTS: u32 = 4;
/// Between two requests while a lease is renewed, but for leases too short for it.
const BETWEEN_RENEWALS: Duration = Duration::from_secs(60);
/// Between two requests however short the lease.
const SHORTEST_RENEWAL: Duration = Duration::from_secs(1);
/// The longest message that is taken: it fits an Ethernet frame with IPv4 and UDP headers.
const MAX_SIZE: u16 = 1472;

/// An exchange of messages with one number.
#[derive(Clone, Copy, Debug)]
struct Exchange {
    xid: u32,
    /// When the client began to ask.
    began: Moment,
    /// How many messages were sent, and when the last one.
    sent: u32,
    asked: Moment,
    /// When to send the next.
    until: Moment,
}

#[derive(Clone, Debug)]
enum State {
    /// Waits before it begins (again).
    Init {
        until: Moment,
    },
    Selecting(Exchange),
    Requesting {
        exchange: Exchange,
        offer: Claim,
    },
    Probing {
        lease: Lease,
        sent: u32,
        until: Moment,
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
}

impl Machine {
    /// A client that begins now, and fails at `limit`.
    pub fn new(client: Client, now: Moment, limit: Moment, random: Random) -> Machine {
        let state = State::Init { until: now };
        Machine { client, state, random, limit, failures: 0, conflicts: 0 }
    }

    /// A client that goes on with a lease.
    pub fn resume(client: Client, lease: Lease, random: Random) -> Machine {
        let state = State::Bound { lease };
        Machine { client, state, random, limit: NEVER, failures: 0, conflicts: 0 }
    }

    /// When [`Machine::tick`] is to be called, unless something arrives before.
    pub fn deadline(&self) -> Moment {
        let until = match &self.state {
            State::Init { until } | State::Probing { until, .. } => *until,
            State::Selecting(exchange) | State::Requesting { exchange, .. } => exchange.until,
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
            State::Selecting(_) | State::Requesting { .. } | State::Rebinding { .. } => {
                Listening::Frames
            }
            State::Probing { lease, .. } => Listening::FramesAndArp(lease.address()),
            State::Renewing { lease, .. } => Listening::FramesAndUdp(lease.address()),
        }
    }

    /// The lease that may be used.
    pub fn lease(&self) -> Option<&Lease> {
        match &self.state {
            State::Bound { lease }
            | State::Renewing { lease, .. }
            | State::Rebinding { lease, .. } => Some(lease),
            _ => None,
        }
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
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Init { .. } => {
                let exchange = self.begin(now);
                self.discover(now, exchange, &mut out);
            }
            State::Selecting(exchange) => self.discover(now, exchange, &mut out),
            State::Requesting { exchange, .. } if exchange.sent >= MOST_REQUESTS => {
                out.push(Output::Note("the server that made the offer is silent".to_owned()));
                let exchange = self.begin(now);
                self.discover(now, exchange, &mut out);
            }
            State::Requesting { exchange, offer } => self.request(now, exchange, offer, &mut out),
            State::Probing { lease, sent, .. } => self.probe(now, lease, sent, &mut out),
            State::Bound { lease }
            | State::Renewing { lease, .. }
            | State::Rebinding { lease, .. }
                if now >= lease.expires =>
            {
                out.push(Output::Lost("the lease has expired"));
                self.start_over(now, Duration::ZERO);
            }
            State::Rebinding { exchange, lease } => self.rebind(now, exchange, lease, &mut out),
            State::Bound { lease } | State::Renewing { lease, .. } if now >= lease.rebind => {
                let exchange = self.begin(now);
                self.rebind(now, exchange, lease, &mut out);
            }
            State::Renewing { exchange, lease } => self.renew(now, exchange, lease, &mut out),
            State::Bound { lease } => {
                let exchange = self.begin(now);
                self.renew(now, exchange, lease, &mut out);
            }
            State::Ended => {}
        }
        out
    }

    /// A message has arrived from the Ethernet address `from`, which is not known of UDP.
    pub fn receive(&mut self, now: Moment, message: &Message, from: Option<Mac>) -> Vec<Output> {
        let mut out = Vec::new();
        if message.chaddr != self.client.mac || Some(message.xid) != self.xid() {
            return out;
        }
        match (std::mem::replace(&mut self.state, State::Ended), message.kind) {
            (State::Selecting(exchange), Kind::Offer) => match usable_offer(message, from) {
                Some(offer) => {
                    let exchange = Exchange { sent: 0, ..exchange };
                    self.request(now, exchange, offer, &mut out);
                }
                None => self.state = State::Selecting(exchange),
            },
            (State::Requesting { exchange, offer }, kind @ (Kind::Ack | Kind::Nak))
                if option::address(&message.options, option::SERVER) == Some(offer.server) =>
            {
                if kind == Kind::Nak {
                    self.refused(now, message, &mut out);
                    return out;
                }
                if message.yiaddr == offer.address {
                    self.acknowledged(now, message, (exchange, from), &mut out);
                } else {
                    self.state = State::Requesting { exchange, offer };
                }
            }
            (
                State::Renewing { exchange, lease } | State::Rebinding { exchange, lease },
                Kind::Ack,
            ) => {
                self.extended(now, message, (exchange, from), lease, &mut out);
            }
            (State::Renewing { .. } | State::Rebinding { .. }, Kind::Nak) => {
                out.push(Output::Lost("the server does not let us keep it"));
                self.refused(now, message, &mut out);
            }
            (state, _) => self.state = state,
        }
        out
    }

    /// Somebody else has the address that [`Listening::FramesAndArp`] is about.
    pub fn conflict(&mut self, now: Moment) -> Vec<Output> {
        let State::Probing { lease, .. } = &self.state else { return Vec::new() };
        let mut message = Message::new(Kind::Decline, self.random.number(), self.client.mac);
        message.options = self.identity();
        let options = &mut message.options;
        options.insert(option::REQUESTED, lease.address().octets().to_vec());
        options.insert(option::SERVER, lease.server.octets().to_vec());
        options.insert(option::SENTENCE, b"the address is in use".to_vec());
        let note = format!("declined {}, which somebody on the link uses", lease.address());
        let pause = Timing::after_conflict(self.conflicts);
        self.conflicts += 1;
        self.start_over(now, pause);
        vec![Output::Note(note), Output::Broadcast(message)]
    }

    /// What has to be given back if the client ends now.
    pub fn claim(&self) -> Option<Claim> {
        match &self.state {
            // The acknowledgement may be on its way.
            State::Requesting { offer, .. } => Some(*offer),
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

    /// The message that gives an address back.
    pub fn release(client: &Client, claim: &Claim, random: &mut Random) -> Message {
        let mut message = Message::new(Kind::Release, random.number(), client.mac);
        message.ciaddr = claim.address;
        let id = client.options.get(&option::CLIENT_ID).cloned();
        message.options.extend(id.map(|id| (option::CLIENT_ID, id)));
        message.options.insert(option::SERVER, claim.server.octets().to_vec());
        message
    }

    fn xid(&self) -> Option<u32> {
        match &self.state {
            State::Selecting(exchange)
            | State::Requesting { exchange, .. }
            | State::Renewing { exchange, .. }
            | State::Rebinding { exchange, .. } => Some(exchange.xid),
            _ => None,
        }
    }

    /// A fresh exchange of which nothing was sent.
    fn begin(&mut self, now: Moment) -> Exchange {
        Exchange { xid: self.random.number(), began: now, sent: 0, asked: now, until: now }
    }

    fn start_over(&mut self, now: Moment, pause: Duration) {
        self.state = State::Init { until: now + pause };
    }

    /// Counts a message that is sent now and waits for its answer.
    fn sent(&mut self, now: Moment, exchange: Exchange) -> Exchange {
        let until = now + self.client.timing.wait(exchange.sent, &mut self.random);
        Exchange { sent: exchange.sent + 1, asked: now, until, ..exchange }
    }

    fn identity(&self) -> Options {
        let id = self.client.options.get(&option::CLIENT_ID).cloned();
        id.map(|id| (option::CLIENT_ID, id)).into_iter().collect()
    }

    fn message(&self, kind: Kind, exchange: Exchange, now: Moment) -> Message {
        let mut message = Message::new(kind, exchange.xid, self.client.mac);
        let elapsed = now.saturating_sub(exchange.began).as_secs();
        message.secs = u16::try_from(elapsed).unwrap_or(u16::MAX);
        message.options.clone_from(&self.client.options);
        message.options.insert(option::MAX_SIZE, MAX_SIZE.to_be_bytes().to_vec());
        message
    }

    fn discover(&mut self, now: Moment, exchange: Exchange, out: &mut Vec<Output>) {
        let mut message = self.message(Kind::Discover, exchange, now);
        message.broadcast = self.client.broadcast;
        out.push(Output::Broadcast(message));
        self.state = State::Selecting(self.sent(now, exchange));
    }

    fn request(&mut self, now: Moment, exchange: Exchange, offer: Claim, out: &mut Vec<Output>) {
        let mut message = self.message(Kind::Request, exchange, now);
        message.broadcast = self.client.broadcast;
        message.options.insert(option::REQUESTED, offer.address.octets().to_vec());
        message.options.insert(option::SERVER, offer.server.octets().to_vec());
        out.push(Output::Broadcast(message));
        let exchange = self.sent(now, exchange);
        self.state = State::Requesting { exchange, offer };
    }

    fn acknowledged(
        &mut self,
        now: Moment,
        ack: &Message,
        (exchange, from): (Exchange, Option<Mac>),
        out: &mut Vec<Output>,
    ) {
        let mac = from.unwrap_or(super::frame::EVERYBODY);
        match Lease::from_ack(ack, mac, exchange.asked, &mut self.random) {
            Ok(lease) if self.client.timing.probe.is_zero() => self.bind(lease, out),
            Ok(lease) => self.probe(now, lease, 0, out),
            // The first time somebody waits for the reason; later on another server may do better.
            Err(flaw) if self.limit != NEVER => {
                self.limit = NEVER;
                out.push(Output::Failed(Failure::Unusable(flaw)));
            }
            Err(flaw) => {
                out.push(Output::Note(format!("an acknowledgement is of no use: {flaw:?}")));
                self.pause(now);
            }
        }
    }

    /// The answer to a renewal is a lease, or it is no answer.
    fn extended(
        &mut self,
        now: Moment,
        ack: &Message,
        (exchange, from): (Exchange, Option<Mac>),
        old: Lease,
        out: &mut Vec<Output>,
    ) {
        let mac = from.unwrap_or(old.server_mac);
        let lease = Lease::from_ack(ack, mac, exchange.asked, &mut self.random);
        match lease {
            Ok(lease) => self.bind(lease, out),
            Err(flaw) => {
                out.push(Output::Note(format!("an acknowledgement is of no use: {flaw:?}")));
                let exchange = Exchange { until: exchange.until.max(now), ..exchange };
                self.state = if now < old.rebind {
                    State::Renewing { exchange, lease: old }
                } else {
                    State::Rebinding { exchange, lease: old }
                };
            }
        }
    }

    fn refused(&mut self, now: Moment, nak: &Message, out: &mut Vec<Output>) {
        let why = option::sentence(&nak.options);
        let why = if why.is_empty() { why } else { format!(": {why}") };
        out.push(Output::Note(format!("refused by the server{why}")));
        self.pause(now);
    }

    /// Begins again, later each time.
    fn pause(&mut self, now: Moment) {
        let pause = self.client.timing.after_refusal(self.failures, &mut self.random);
        self.failures = self.failures.saturating_add(1);
        self.start_over(now, pause);
    }

    fn probe(&mut self, now: Moment, lease: Lease, sent: u32, out: &mut Vec<Output>) {
        if sent == PROBES {
            self.bind(lease, out);
            return;
        }
        out.push(Output::Probe(lease.address().into()));
        let until = now + self.client.timing.probe / PROBES;
        self.state = State::Probing { lease, sent: sent + 1, until };
    }

    fn bind(&mut self, lease: Lease, out: &mut Vec<Output>) {
        (self.limit, self.failures, self.conflicts) = (NEVER, 0, 0);
        out.push(Output::Bound(lease.clone().into()));
        self.state = State::Bound { lease };
    }

    fn renew(&mut self, now: Moment, exchange: Exchange, lease: Lease, out: &mut Vec<Output>) {
        let mut message = self.message(Kind::Request, exchange, now);
        message.ciaddr = lease.address();
        out.push(Output::Unicast(message, lease.server));
        let until = between(now, lease.rebind, &lease);
        let exchange = Exchange { sent: exchange.sent + 1, asked: now, until, ..exchange };
        self.state = State::Renewing { exchange, lease };
    }

    fn rebind(&mut self, now: Moment, exchange: Exchange, lease: Lease, out: &mut Vec<Output>) {
        let mut message = self.message(Kind::Request, exchange, now);
        message.ciaddr = lease.address();
        message.broadcast = self.client.broadcast;
        out.push(Output::Broadcast(message));
        let until = between(now, lease.expires, &lease);
        let exchange = Exchange { sent: exchange.sent + 1, asked: now, until, ..exchange };
        self.state = State::Rebinding { exchange, lease };
    }
}

/// When to ask again: after half of the time that is left, and not within a minute (RFC 2131,
/// section 4.4.5), which is less for leases of less than a quarter of an hour.
fn between(now: Moment, end: Moment, lease: &Lease) -> Moment {
    let whole = lease.expires.saturating_sub(lease.renew).saturating_mul(2);
    let floor = (whole / 16).clamp(SHORTEST_RENEWAL, BETWEEN_RENEWALS);
    now + (end.saturating_sub(now) / 2).max(floor)
}

fn usable_offer(offer: &Message, from: Option<Mac>) -> Option<Claim> {
    let server = option::address(&offer.options, option::SERVER)?;
    let address = offer.yiaddr;
    let usable = !address.is_unspecified() && !address.is_broadcast() && !address.is_multicast();
    let server_mac = from.unwrap_or(super::frame::EVERYBODY);
    usable.then_some(Claim { address, server, server_mac })
}

#[cfg(test)]
mod tests;
