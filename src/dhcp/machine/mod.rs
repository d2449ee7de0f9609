//! The state machine of a client, RFC 2131 section 4.4 and RFC 9915 section 18.2. It has no I/O: received messages and
//! the time lead to actions, which the daemon performs.
//!
//! | file | |
//! | --- | --- |
//! | `protocol.rs` | the differences between both protocols |
//! | `v4/` | messages and timeouts of DHCP |
//! | `v6/` | messages and timeouts of DHCPv6 |

mod protocol;
pub mod v4;
pub mod v6;

use std::fmt::Debug;
use std::mem;
use std::time::Duration;

use self::protocol::AT_ONCE;
pub use self::protocol::{Action, Answer, Listening, Protocol, Release, Source, Step};
use super::timing::{BootTime, Exchange, NEVER, Random};
use crate::netlink::Mac;

/// How many probes are sent for an address before its use.
const PROBES: u32 = 2;
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
