//! The state machine of a client, RFC 2131 section 4.4 and RFC 9915 section 18.2. It has no I/O: received messages and
//! the time lead to actions, which the daemon performs.
//!
//! | file | |
//! | --- | --- |
//! | `v4/` | messages and timeouts of DHCP |
//! | `v6/` | messages and timeouts of DHCPv6 |

pub mod v4;
pub mod v6;

use std::fmt::Debug;
use std::mem;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use super::family;
use super::timing::{BootTime, Exchange, NEVER, Random, Timers, Timing};
use super::v4::frame::Ends;
use super::v4::lease::Flaw;
use super::v4::message::Message as MessageV4;
use super::v6::message::Message as MessageV6;
use crate::netlink::Mac;

/// How many probes are sent for an address before its use.
const PROBES: u32 = 2;
/// The preference of a server whose offer is taken without waiting for others.
const AT_ONCE: u8 = 255;

/// The wait after the second and each further address conflict (RFC 2131, section 3.1, step 5).
const AFTER_CONFLICT: Duration = Duration::from_secs(10);

/// A state machine of either family.
pub trait StateMachine: Debug {
    /// When to call [`StateMachine::tick`], unless something is received before.
    fn deadline(&self) -> BootTime;
    /// The sockets that have to be open now.
    fn listening(&self) -> Listening;
    /// Handles a timeout.
    fn tick(&mut self, now: BootTime) -> Vec<Action>;
    /// Handles a received frame or datagram.
    fn receive(&mut self, now: BootTime, source: Source, bytes: &[u8]) -> Vec<Action>;
    /// The release of the lease, or of the address that the server may have assigned already.
    fn release(&mut self) -> Option<Release>;
    /// The Ethernet address of the interface, which a chained plugin may change.
    fn mac(&mut self) -> &mut Mac;
}

/// A message that releases an address.
#[derive(Debug)]
pub enum Release {
    /// DHCPRELEASE in a frame with this source and destination.
    V4(MessageV4, Ends),
    /// The first Release of its exchange, and the address.
    V6(MessageV6, Ipv6Addr),
}

impl Release {
    /// The address.
    pub fn address(&self) -> IpAddr {
        match self {
            Release::V4(_, ends) => ends.src.into(),
            Release::V6(_, address) => (*address).into(),
        }
    }
}

/// An action of a state machine.
#[derive(Debug, PartialEq, Eq)]
pub enum Action {
    /// Broadcast on the link.
    Broadcast(MessageV4),
    /// Send to the server from the leased address.
    Unicast(MessageV4, Ipv4Addr),
    /// Send to all DHCPv6 servers from the link-local address.
    Multicast(MessageV6),
    /// Send an ARP probe or Neighbor Solicitation for the address.
    Probe(IpAddr),
    /// Use a lease: the first, a renewed, or a different one.
    Bound(family::Lease),
    /// Stop using the address, for this reason. The search for another continues.
    Lost(&'static str),
    /// Fail: no server assigned an address before the time limit.
    TimeIsUp,
    /// Fail: the DHCPACK is not usable.
    Unusable(Flaw),
    /// Log that a server refuses an address, and report it if the time limit is exceeded. The search continues.
    Refused(String),
    /// Log a text.
    Note(String),
}

/// The sockets of a state.
#[derive(Debug, PartialEq, Eq)]
pub enum Listening {
    /// None.
    None,
    /// DHCP messages in frames.
    Frames,
    /// Messages by UDP. In DHCP also in frames, because DHCPNAK is broadcast; the UDP socket keeps the kernel from
    /// replying "port unreachable" to the server.
    Udp,
    /// ARP or Neighbor Discovery for this address.
    Neighbours(IpAddr),
}

/// A socket that something was received from.
#[derive(Clone, Copy, Debug)]
pub enum Source {
    /// Ethernet frames with UDP.
    Frames,
    /// Payloads of UDP datagrams.
    Udp,
    /// Ethernet frames with ARP or Neighbor Discovery.
    Neighbours,
}

/// A message that the client sends and repeats until a reply arrives.
#[derive(Debug)]
pub enum Step<'a, P: Protocol> {
    /// DHCPDISCOVER or Solicit.
    Discover,
    /// DHCPREQUEST or Request for an offered address.
    Request(&'a P::Binding),
    /// DHCPDECLINE or Decline of an address that another host uses.
    Decline(&'a P::Binding),
    /// DHCPREQUEST or Renew to the server of the lease.
    Renew(&'a P::Lease),
    /// DHCPREQUEST or Rebind to all servers.
    Rebind(&'a P::Lease),
}

/// The meaning of a server's reply.
#[derive(Debug)]
pub enum Answer<P: Protocol> {
    /// An offer, with the preference of the server (0 to 255).
    Offer(P::Binding, u8),
    /// A new or renewed lease.
    Lease(P::Lease),
    /// The server does not know the lease, which can be requested again.
    NoBinding(P::Binding),
    /// The client must not use the address, for this reason.
    Refused(String),
    /// No decision about the address, for this reason: the message is repeated.
    Useless(String),
    /// A DHCPACK that is not usable.
    Flawed(Flaw),
    /// The server has received the Decline.
    Declined,
}

/// Messages and timeouts of one client with one protocol.
pub trait Protocol: Debug + Sized {
    /// A message.
    type Message;
    /// A lease.
    type Lease: Clone + Debug;
    /// An address that a server has offered or assigned.
    type Binding: Clone + Debug + for<'l> From<&'l Self::Lease>;

    /// Wraps a lease.
    const LEASE: fn(Self::Lease) -> family::Lease;
    /// The number of bits of a transaction ID.
    const XID_BITS: u32;
    /// Whether a request has the transaction ID of the offer.
    const REQUEST_KEEPS_XID: bool;
    /// How many requests are sent to the server of an offer.
    const REQUESTS: u32;
    /// How many declines are sent; 1 if servers do not reply to it.
    const DECLINES: u32;
    /// The socket for replies to multicast or broadcast messages.
    const LISTENING: Listening;

    /// The Ethernet address of the interface.
    fn mac(&mut self) -> &mut Mac;
    /// The configured timeouts.
    fn timing(&self) -> &Timing;
    /// The address of a lease.
    fn address(lease: &Self::Lease) -> IpAddr;
    /// The timers of a lease.
    fn timers(lease: &Self::Lease) -> Timers;
    /// A message to be sent at `exchange.asked`.
    fn message(&self, step: &Step<'_, Self>, exchange: &Exchange) -> Action;
    /// The timeout of that message.
    fn wait(&self, step: &Step<'_, Self>, exchange: &Exchange, random: &mut Random) -> Duration;
    /// The release of an address, with this transaction ID.
    fn release(&self, binding: &Self::Binding, xid: u32) -> Release;
    /// Decodes a server's message, with its source Ethernet address if known.
    fn decode(source: Source, bytes: &[u8]) -> Option<(Self::Message, Option<Mac>)>;
    /// The meaning of a message from the Ethernet address `from`; `None` if it is not a reply to the last message of the
    /// exchange, which was that of `step`.
    fn judge(
        &mut self,
        step: &Step<'_, Self>,
        exchange: &Exchange,
        message: &Self::Message,
        from: Option<Mac>,
        random: &mut Random,
    ) -> Option<Answer<Self>>;
    /// Whether the frame is from another host that uses the address, or probes for it.
    fn conflicts(&self, frame: &[u8], lease: &Self::Lease) -> bool;
}

/// `Init` waits before a start; `Selecting` has the best offer so far; `Requesting` may hold a lease that the server
/// does not know any more; `Probing` counts the probes that were sent.
#[derive(Debug)]
enum State<P: Protocol> {
    Init,
    Selecting(Option<(P::Binding, u8)>),
    Requesting { binding: P::Binding, held: Option<P::Lease> },
    Probing(P::Lease, u32),
    Declining(P::Binding),
    Bound(P::Lease),
    Renewing(P::Lease),
    Rebinding(P::Lease),
    Ended,
}

impl<P: Protocol> State<P> {
    /// The message that the state waits for a reply to.
    fn step(&self) -> Option<Step<'_, P>> {
        match self {
            State::Selecting(_) => Some(Step::Discover),
            State::Requesting { binding, .. } => Some(Step::Request(binding)),
            State::Declining(binding) => Some(Step::Decline(binding)),
            State::Renewing(lease) => Some(Step::Renew(lease)),
            State::Rebinding(lease) => Some(Step::Rebind(lease)),
            State::Init | State::Probing(..) | State::Bound(_) | State::Ended => None,
        }
    }

    /// The lease whose address is in use.
    fn lease(&self) -> Option<&P::Lease> {
        match self {
            State::Requesting { held, .. } => held.as_ref(),
            State::Bound(lease) | State::Renewing(lease) | State::Rebinding(lease) => Some(lease),
            _ => None,
        }
    }
}

/// The state machine of one client.
#[derive(Debug)]
pub struct Machine<P: Protocol> {
    client: P,
    state: State<P>,
    /// The exchange of a state that has a [`Step`].
    exchange: Exchange,
    /// The end of the current wait.
    until: BootTime,
    random: Random,
    actions: Vec<Action>,
    /// The time limit of the first lease.
    limit: BootTime,
    /// Refusals since the last lease.
    refusals: u32,
    /// Conflicts since the last lease.
    conflicts: u32,
    /// The last refusal: repetitions are not logged.
    refusal: String,
}

impl<P: Protocol> Machine<P> {
    /// A client that starts at `now` and fails at `limit`. The random delay of RFC 9915 section 18.2.1 is not needed:
    /// the kernel has delayed the link-local address already.
    pub fn new(client: P, now: BootTime, limit: BootTime, random: Random) -> Machine<P> {
        Machine {
            client,
            state: State::Init,
            exchange: Exchange::begin(now, 0),
            until: now,
            random,
            actions: Vec::new(),
            limit,
            refusals: 0,
            conflicts: 0,
            refusal: String::new(),
        }
    }

    /// A client that continues with a lease.
    pub fn resume(client: P, lease: P::Lease, random: Random) -> Machine<P> {
        let state = State::Bound(lease);
        Machine { state, ..Machine::new(client, NEVER, NEVER, random) }
    }

    /// The address that the server may have assigned to the client.
    fn binding(&self) -> Option<P::Binding> {
        match &self.state {
            // The reply may be on its way.
            State::Requesting { binding, .. } => Some(binding.clone()),
            State::Probing(lease, _) => Some(lease.into()),
            state => state.lease().map(Into::into),
        }
    }

    fn note(&mut self, text: impl Into<String>) {
        self.actions.push(Action::Note(text.into()));
    }

    /// Handles a message from the Ethernet address `from`, which is unknown for UDP.
    fn on_message(
        &mut self,
        now: BootTime,
        message: &P::Message,
        from: Option<Mac>,
    ) -> Vec<Action> {
        if let Some(step) = self.state.step()
            && let Some(answer) =
                self.client.judge(&step, &self.exchange, message, from, &mut self.random)
        {
            self.on_answer(now, answer);
        }
        mem::take(&mut self.actions)
    }

    fn on_answer(&mut self, now: BootTime, answer: Answer<P>) {
        match (mem::replace(&mut self.state, State::Ended), answer) {
            (State::Selecting(best), Answer::Offer(binding, preference)) => {
                // The best of all offers before the first timeout, afterwards the first offer.
                let is_better = best.as_ref().is_none_or(|(_, of_best)| preference > *of_best);
                if is_better && (preference == AT_ONCE || self.exchange.sent > 1) {
                    self.request(now, binding, None);
                } else {
                    let best = if is_better { Some((binding, preference)) } else { best };
                    self.state = State::Selecting(best);
                }
            }
            (State::Requesting { held: None, .. }, Answer::Lease(lease))
                if !self.client.timing().probe.is_zero() =>
            {
                self.probe(now, lease, 0);
            }
            (_, Answer::Lease(lease)) => self.bind(lease),
            (State::Declining(_), Answer::Declined) => self.declined(now),
            // A server that has lost its leases may assign the same address again (RFC 9915, section 18.2.10.1).
            (State::Renewing(lease) | State::Rebinding(lease), Answer::NoBinding(binding)) => {
                self.note("the server does not know the lease; it is requested again");
                self.request(now, binding, Some(lease));
            }
            (state, Answer::Refused(why)) => {
                if state.lease().is_some() {
                    self.actions.push(Action::Lost("the server refuses to renew the lease"));
                }
                self.refused(&why);
                self.pause(now);
            }
            (state, Answer::Useless(why)) => {
                self.refused(&why);
                self.state = state;
            }
            // During the first acquisition a plugin waits for the reason; later another server may do better.
            (State::Requesting { .. }, Answer::Flawed(flaw)) if self.limit != NEVER => {
                self.limit = NEVER;
                self.actions.push(Action::Unusable(flaw));
            }
            (state, Answer::Flawed(flaw)) => {
                self.note(flaw.to_string());
                match state {
                    State::Requesting { .. } => self.pause(now),
                    state => self.state = state,
                }
            }
            (state, _) => self.state = state,
        }
    }

    fn request(&mut self, now: BootTime, binding: P::Binding, held: Option<P::Lease>) {
        let state = State::Requesting { binding, held };
        if P::REQUEST_KEEPS_XID {
            self.exchange.sent = 0;
            self.send(now, state);
        } else {
            self.begin(now, state);
        }
    }

    /// Handles the use of the probed address by another host.
    fn on_conflict(&mut self, now: BootTime) -> Vec<Action> {
        let State::Probing(lease, _) = &self.state else { return Vec::new() };
        let (address, binding) = (P::address(lease), lease.into());
        self.note(format!("declined {address}, which another host on the link uses"));
        self.begin(now, State::Declining(binding));
        if P::DECLINES == 1 {
            self.declined(now);
        }
        mem::take(&mut self.actions)
    }

    fn declined(&mut self, now: BootTime) {
        let pause = if self.conflicts == 0 { Duration::ZERO } else { AFTER_CONFLICT };
        self.conflicts += 1;
        (self.state, self.until) = (State::Init, now + pause);
    }

    /// Enters a state with a new exchange.
    fn begin(&mut self, now: BootTime, state: State<P>) {
        self.exchange = Exchange::begin(now, self.xid());
        self.send(now, state);
    }

    fn xid(&mut self) -> u32 {
        self.random.number() >> (32 - P::XID_BITS)
    }

    /// Enters a state, or stays in it, and sends its message.
    fn send(&mut self, now: BootTime, state: State<P>) {
        if let Some(step) = state.step() {
            self.exchange.asked = now;
            self.actions.push(self.client.message(&step, &self.exchange));
            let wait = self.client.wait(&step, &self.exchange, &mut self.random);
            self.exchange = self.exchange.send(now, wait);
            self.until = now + wait;
        }
        self.state = state;
    }

    fn probe(&mut self, now: BootTime, lease: P::Lease, sent: u32) {
        if sent == PROBES {
            return self.bind(lease);
        }
        self.actions.push(Action::Probe(P::address(&lease)));
        self.until = now + self.client.timing().probe / PROBES;
        self.state = State::Probing(lease, sent + 1);
    }

    fn bind(&mut self, lease: P::Lease) {
        (self.limit, self.refusals, self.conflicts) = (NEVER, 0, 0);
        self.refusal.clear();
        self.actions.push(Action::Bound((P::LEASE)(lease.clone())));
        self.state = State::Bound(lease);
    }

    /// Reports a refusal, unless it repeats the last one.
    fn refused(&mut self, why: &str) {
        let colon = if why.is_empty() { "" } else { ": " };
        let text = format!("refused by the server{colon}{why}");
        if self.refusal != text {
            self.refusal.clone_from(&text);
            self.actions.push(Action::Refused(text));
        }
    }

    /// Restarts after a wait that grows with each refusal.
    fn pause(&mut self, now: BootTime) {
        let pause = self.client.timing().after_refusal(self.refusals, &mut self.random);
        self.refusals = self.refusals.saturating_add(1);
        (self.state, self.until) = (State::Init, now + pause);
    }
}

impl<P: Protocol> StateMachine for Machine<P> {
    fn deadline(&self) -> BootTime {
        let until = match &self.state {
            State::Bound(lease) => P::timers(lease).renew,
            State::Renewing(lease) => self.until.min(P::timers(lease).rebind),
            State::Rebinding(lease) | State::Requesting { held: Some(lease), .. } => {
                self.until.min(P::timers(lease).expires)
            }
            State::Ended => NEVER,
            _ => self.until,
        };
        until.min(self.limit)
    }

    fn listening(&self) -> Listening {
        match &self.state {
            State::Init | State::Bound(_) | State::Ended => Listening::None,
            State::Probing(lease, _) => Listening::Neighbours(P::address(lease)),
            State::Renewing(_) => Listening::Udp,
            _ => P::LISTENING,
        }
    }

    fn tick(&mut self, now: BootTime) -> Vec<Action> {
        if now >= self.limit {
            (self.state, self.limit) = (State::Ended, NEVER);
            return vec![Action::TimeIsUp];
        }
        if now < self.deadline() {
            return Vec::new();
        }
        let expired = self.state.lease().is_some_and(|lease| now >= P::timers(lease).expires);
        match mem::replace(&mut self.state, State::Ended) {
            _ if expired => {
                self.actions.push(Action::Lost("the lease has expired"));
                (self.state, self.until) = (State::Init, now);
            }
            State::Init => self.begin(now, State::Selecting(None)),
            State::Selecting(Some((binding, _))) => self.request(now, binding, None),
            State::Requesting { held, .. } if self.exchange.sent >= P::REQUESTS => {
                self.note("the server of the offer does not reply");
                self.begin(now, held.map_or(State::Selecting(None), State::Rebinding));
            }
            State::Probing(lease, sent) => self.probe(now, lease, sent),
            State::Declining(_) if self.exchange.sent >= P::DECLINES => self.declined(now),
            State::Bound(lease) | State::Renewing(lease) if now >= P::timers(&lease).rebind => {
                self.begin(now, State::Rebinding(lease));
            }
            State::Bound(lease) => self.begin(now, State::Renewing(lease)),
            state => self.send(now, state),
        }
        mem::take(&mut self.actions)
    }

    fn receive(&mut self, now: BootTime, source: Source, bytes: &[u8]) -> Vec<Action> {
        match (source, &self.state) {
            (Source::Neighbours, State::Probing(lease, _))
                if self.client.conflicts(bytes, lease) =>
            {
                self.on_conflict(now)
            }
            (Source::Neighbours, _) => Vec::new(),
            (source, _) => match P::decode(source, bytes) {
                Some((message, from)) => self.on_message(now, &message, from),
                None => Vec::new(),
            },
        }
    }

    fn release(&mut self) -> Option<Release> {
        let binding = self.binding()?;
        let xid = self.xid();
        Some(self.client.release(&binding, xid))
    }

    fn mac(&mut self) -> &mut Mac {
        self.client.mac()
    }
}
