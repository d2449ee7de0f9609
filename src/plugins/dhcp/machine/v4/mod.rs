//! The client's states, RFC 2131 section 4.4: from events and the time to actions.

use std::time::Duration;

use super::super::timing::{BootTime, NEVER, Random, Timing};
use super::super::v4::frame::{self, BROADCAST, Ends};
use super::super::v4::lease::{Binding, Lease};
use super::super::v4::message::{Kind, Message};
use super::super::v4::option::{self, Options};
use super::{Action, Failure, Listening, PROBES, Release, StateMachine};
use crate::netlink::Mac;

/// How often an offered address is requested before the client discovers again.
const MOST_REQUESTS: u32 = 4;
/// The shortest time between two requests of a renewal, except for short leases.
const BETWEEN_RENEWALS: Duration = Duration::from_secs(60);
/// The shortest time between two requests, however short the lease.
const SHORTEST_RENEWAL: Duration = Duration::from_secs(1);
/// The longest message that is accepted: it fits an Ethernet frame with IPv4 and UDP headers.
const MAX_SIZE: u16 = 1472;

/// The client of one interface.
#[derive(Clone, Debug)]
pub struct Client {
    /// The Ethernet address of the interface.
    pub mac: Mac,
    /// Whether answers have to be broadcast.
    pub broadcast: bool,
    /// The options of every message: the client identifier (61) and the configured options.
    pub options: Options,
    /// How long to wait for what.
    pub timing: Timing,
}

/// An exchange of messages with one number.
#[derive(Clone, Copy, Debug)]
struct Exchange {
    xid: u32,
    /// When the client began to ask.
    began: BootTime,
    /// How many messages were sent, and when the last one.
    sent: u32,
    asked: BootTime,
    /// When to send the next.
    until: BootTime,
}

#[derive(Clone, Debug)]
enum State {
    /// Waits before it begins (again).
    Init {
        until: BootTime,
    },
    Selecting(Exchange),
    Requesting {
        exchange: Exchange,
        offer: Binding,
    },
    Probing {
        lease: Lease,
        sent: u32,
        until: BootTime,
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
}

impl Machine {
    /// A client that begins now, and fails at `limit`.
    pub fn new(client: Client, now: BootTime, limit: BootTime, random: Random) -> Machine {
        let state = State::Init { until: now };
        Machine { client, state, random, out: Vec::new(), limit, failures: 0, conflicts: 0 }
    }

    /// A client that goes on with a lease.
    pub fn resume(client: Client, lease: Lease, random: Random) -> Machine {
        let state = State::Bound { lease };
        Machine { state, ..Machine::new(client, NEVER, NEVER, random) }
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

    /// A message has arrived from the Ethernet address `from`, which is not known of UDP.
    pub fn receive(&mut self, now: BootTime, message: &Message, from: Option<Mac>) -> Vec<Action> {
        if message.chaddr != self.client.mac || Some(message.xid) != self.xid() {
            return self.take_actions();
        }
        match (std::mem::replace(&mut self.state, State::Ended), message.kind) {
            (State::Selecting(exchange), Kind::Offer) => match usable_offer(message, from) {
                Some(offer) => {
                    let exchange = Exchange { sent: 0, ..exchange };
                    self.request(now, exchange, offer);
                }
                None => self.state = State::Selecting(exchange),
            },
            (State::Requesting { exchange, offer }, kind @ (Kind::Ack | Kind::Nak))
                if option::address(&message.options, option::SERVER) == Some(offer.server) =>
            {
                if kind == Kind::Nak {
                    self.refused(now, message);
                    return self.take_actions();
                }
                if message.yiaddr == offer.address {
                    self.acknowledged(now, message, exchange, from);
                } else {
                    self.state = State::Requesting { exchange, offer };
                }
            }
            (
                State::Renewing { exchange, lease } | State::Rebinding { exchange, lease },
                Kind::Ack,
            ) => {
                self.extended(now, message, exchange, from, lease);
            }
            (State::Renewing { .. } | State::Rebinding { .. }, Kind::Nak) => {
                self.out.push(Action::Lost("the server does not let us keep it"));
                self.refused(now, message);
            }
            (state, _) => self.state = state,
        }
        self.take_actions()
    }

    /// Somebody else has the address that [`Listening::FramesAndArp`] is about.
    pub fn conflict(&mut self, now: BootTime) -> Vec<Action> {
        let State::Probing { lease, .. } = &self.state else { return Vec::new() };
        let mut message = Message::new(Kind::Decline, self.random.number(), self.client.mac);
        message.options = self.identity();
        let options = &mut message.options;
        options.insert(option::REQUESTED, lease.address().octets().to_vec());
        options.insert(option::SERVER, lease.server.octets().to_vec());
        options.insert(option::MESSAGE, b"the address is in use".to_vec());
        let note = format!("declined {}, which somebody on the link uses", lease.address());
        let pause = Timing::after_conflict(self.conflicts);
        self.conflicts += 1;
        self.start_over(now, pause);
        vec![Action::Note(note), Action::Broadcast(message)]
    }

    /// The address that the server may have assigned to the client.
    fn binding(&self) -> Option<Binding> {
        match &self.state {
            // The acknowledgement may be on its way.
            State::Requesting { offer, .. } => Some(*offer),
            State::Probing { lease, .. } => Some(lease.into()),
            _ => self.lease().map(Into::into),
        }
    }

    fn take_actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.out)
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
    fn begin(&mut self, now: BootTime) -> Exchange {
        Exchange { xid: self.random.number(), began: now, sent: 0, asked: now, until: now }
    }

    fn start_over(&mut self, now: BootTime, pause: Duration) {
        self.state = State::Init { until: now + pause };
    }

    /// Counts a message that is sent now and waits for its answer.
    fn sent(&mut self, now: BootTime, exchange: Exchange) -> Exchange {
        let until = now + self.client.timing.wait(exchange.sent, &mut self.random);
        Exchange { sent: exchange.sent + 1, asked: now, until, ..exchange }
    }

    fn identity(&self) -> Options {
        let id = self.client.options.get(&option::CLIENT_ID).cloned();
        id.map(|id| (option::CLIENT_ID, id)).into_iter().collect()
    }

    fn message(&self, kind: Kind, exchange: Exchange, now: BootTime) -> Message {
        let mut message = Message::new(kind, exchange.xid, self.client.mac);
        let elapsed = now.saturating_sub(exchange.began).as_secs();
        message.secs = u16::try_from(elapsed).unwrap_or(u16::MAX);
        message.options.clone_from(&self.client.options);
        message.options.insert(option::MAX_SIZE, MAX_SIZE.to_be_bytes().to_vec());
        message
    }

    fn discover(&mut self, now: BootTime, exchange: Exchange) {
        let mut message = self.message(Kind::Discover, exchange, now);
        message.broadcast = self.client.broadcast;
        self.out.push(Action::Broadcast(message));
        self.state = State::Selecting(self.sent(now, exchange));
    }

    fn request(&mut self, now: BootTime, exchange: Exchange, offer: Binding) {
        let mut message = self.message(Kind::Request, exchange, now);
        message.broadcast = self.client.broadcast;
        message.options.insert(option::REQUESTED, offer.address.octets().to_vec());
        message.options.insert(option::SERVER, offer.server.octets().to_vec());
        self.out.push(Action::Broadcast(message));
        let exchange = self.sent(now, exchange);
        self.state = State::Requesting { exchange, offer };
    }

    fn acknowledged(
        &mut self,
        now: BootTime,
        ack: &Message,
        exchange: Exchange,
        from: Option<Mac>,
    ) {
        let mac = from.unwrap_or(BROADCAST);
        match Lease::from_ack(ack, mac, exchange.asked, &mut self.random) {
            Ok(lease) if self.client.timing.probe.is_zero() => self.bind(lease),
            Ok(lease) => self.probe(now, lease, 0),
            // During the first acquisition a plugin waits for the reason; later another server may do better.
            Err(flaw) if self.limit != NEVER => {
                self.limit = NEVER;
                self.out.push(Action::Failed(Failure::Unusable(flaw)));
            }
            Err(flaw) => {
                self.out.push(Action::Note(format!("an acknowledgement cannot be used: {flaw}")));
                self.pause(now);
            }
        }
    }

    /// The answer to a renewal is a lease, or it is no answer.
    fn extended(
        &mut self,
        now: BootTime,
        ack: &Message,
        exchange: Exchange,
        from: Option<Mac>,
        old: Lease,
    ) {
        let mac = from.unwrap_or(old.server_mac);
        let lease = Lease::from_ack(ack, mac, exchange.asked, &mut self.random);
        match lease {
            Ok(lease) => self.bind(lease),
            Err(flaw) => {
                self.out.push(Action::Note(format!("an acknowledgement cannot be used: {flaw}")));
                let exchange = Exchange { until: exchange.until.max(now), ..exchange };
                self.state = if now < old.rebind {
                    State::Renewing { exchange, lease: old }
                } else {
                    State::Rebinding { exchange, lease: old }
                };
            }
        }
    }

    fn refused(&mut self, now: BootTime, nak: &Message) {
        let why = option::sentence(&nak.options);
        let why = if why.is_empty() { why } else { format!(": {why}") };
        self.out.push(Action::Note(format!("refused by the server{why}")));
        self.pause(now);
    }

    /// Begins again, later each time.
    fn pause(&mut self, now: BootTime) {
        let pause = self.client.timing.after_refusal(self.failures, &mut self.random);
        self.failures = self.failures.saturating_add(1);
        self.start_over(now, pause);
    }

    fn probe(&mut self, now: BootTime, lease: Lease, sent: u32) {
        if sent == PROBES {
            self.bind(lease);
            return;
        }
        self.out.push(Action::Probe(lease.address().into()));
        let until = now + self.client.timing.probe / PROBES;
        self.state = State::Probing { lease, sent: sent + 1, until };
    }

    fn bind(&mut self, lease: Lease) {
        (self.limit, self.failures, self.conflicts) = (NEVER, 0, 0);
        self.out.push(Action::Bound(lease.clone().into()));
        self.state = State::Bound { lease };
    }

    fn renew(&mut self, now: BootTime, exchange: Exchange, lease: Lease) {
        let mut message = self.message(Kind::Request, exchange, now);
        message.ciaddr = lease.address();
        self.out.push(Action::Unicast(message, lease.server));
        let until = between(now, lease.rebind, &lease);
        let exchange = Exchange { sent: exchange.sent + 1, asked: now, until, ..exchange };
        self.state = State::Renewing { exchange, lease };
    }

    fn rebind(&mut self, now: BootTime, exchange: Exchange, lease: Lease) {
        let mut message = self.message(Kind::Request, exchange, now);
        message.ciaddr = lease.address();
        message.broadcast = self.client.broadcast;
        self.out.push(Action::Broadcast(message));
        let until = between(now, lease.expires, &lease);
        let exchange = Exchange { sent: exchange.sent + 1, asked: now, until, ..exchange };
        self.state = State::Rebinding { exchange, lease };
    }
}

impl StateMachine for Machine {
    fn deadline(&self) -> BootTime {
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

    fn listening(&self) -> Listening {
        match &self.state {
            State::Init { .. } | State::Bound { .. } | State::Ended => Listening::None,
            State::Selecting(_) | State::Requesting { .. } | State::Rebinding { .. } => {
                Listening::Frames
            }
            State::Probing { lease, .. } => Listening::FramesAndArp(lease.address()),
            State::Renewing { lease, .. } => Listening::FramesAndUdp(lease.address()),
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
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Init { .. } => {
                let exchange = self.begin(now);
                self.discover(now, exchange);
            }
            State::Selecting(exchange) => self.discover(now, exchange),
            State::Requesting { exchange, .. } if exchange.sent >= MOST_REQUESTS => {
                self.out.push(Action::Note("the server that made the offer is silent".to_owned()));
                let exchange = self.begin(now);
                self.discover(now, exchange);
            }
            State::Requesting { exchange, offer } => self.request(now, exchange, offer),
            State::Probing { lease, sent, .. } => self.probe(now, lease, sent),
            State::Bound { lease }
            | State::Renewing { lease, .. }
            | State::Rebinding { lease, .. }
                if now >= lease.expires =>
            {
                self.out.push(Action::Lost("the lease has expired"));
                self.start_over(now, Duration::ZERO);
            }
            State::Rebinding { exchange, lease } => self.rebind(now, exchange, lease),
            State::Bound { lease } | State::Renewing { lease, .. } if now >= lease.rebind => {
                let exchange = self.begin(now);
                self.rebind(now, exchange, lease);
            }
            State::Renewing { exchange, lease } => self.renew(now, exchange, lease),
            State::Bound { lease } => {
                let exchange = self.begin(now);
                self.renew(now, exchange, lease);
            }
            State::Ended => {}
        }
        self.take_actions()
    }

    fn frame(&mut self, now: BootTime, frame: &[u8]) -> Vec<Action> {
        let Some((from, payload)) = frame::read_udp(frame) else { return Vec::new() };
        let message = Message::decode(payload);
        message.map(|message| self.receive(now, &message, Some(from))).unwrap_or_default()
    }

    fn datagram(&mut self, now: BootTime, payload: &[u8]) -> Vec<Action> {
        let message = Message::decode(payload);
        message.map(|message| self.receive(now, &message, None)).unwrap_or_default()
    }

    fn neighbour(&mut self, now: BootTime, frame: &[u8]) -> Vec<Action> {
        match self.listening() {
            Listening::FramesAndArp(address)
                if frame::arp_conflict(frame, self.client.mac, address) =>
            {
                self.conflict(now)
            }
            _ => Vec::new(),
        }
    }

    fn release(&mut self) -> Option<Release> {
        let Binding { address, server, server_mac } = self.binding()?;
        let mut message = Message::new(Kind::Release, self.random.number(), self.client.mac);
        message.ciaddr = address;
        message.options = self.identity();
        message.options.insert(option::SERVER, server.octets().to_vec());
        let ends =
            Ends { src_mac: self.client.mac, dst_mac: server_mac, src: address, dst: server };
        Some(Release::V4(message, ends))
    }

    fn mac(&self) -> Mac {
        self.client.mac
    }

    fn set_mac(&mut self, mac: Mac) {
        self.client.mac = mac;
    }
}

/// When to ask again: after half of the time that is left, and not within a minute (RFC 2131,
/// section 4.4.5), which is less for leases of less than a quarter of an hour.
fn between(now: BootTime, end: BootTime, lease: &Lease) -> BootTime {
    let whole = lease.expires.saturating_sub(lease.renew).saturating_mul(2);
    let floor = (whole / 16).clamp(SHORTEST_RENEWAL, BETWEEN_RENEWALS);
    now + (end.saturating_sub(now) / 2).max(floor)
}

fn usable_offer(offer: &Message, from: Option<Mac>) -> Option<Binding> {
    let server = option::address(&offer.options, option::SERVER)?;
    let address = offer.yiaddr;
    let usable = !address.is_unspecified() && !address.is_broadcast() && !address.is_multicast();
    let server_mac = from.unwrap_or(BROADCAST);
    usable.then_some(Binding { address, server, server_mac })
}

#[cfg(test)]
mod tests;
