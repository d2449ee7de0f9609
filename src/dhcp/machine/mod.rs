//! The state machine of a client, RFC 2131 section 4.4 and RFC 9915 section 18.2. It has no I/O:
//! received messages and the time lead to actions, which the daemon performs.
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
pub use self::protocol::{
    ClientAction, DhcpProtocol, ExchangeStep, NeededSockets, PacketSource, ReleaseMessage,
    ServerReply,
};
use super::timing::{BootClockTime, MessageExchange, NEVER, RandomGenerator};
use crate::netlink::MacAddress;

/// How many probes are sent for an address before its use.
const PROBES: u32 = 2;
/// The wait after the second and each further address conflict (RFC 2131, section 3.1, step 5).
const AFTER_CONFLICT: Duration = Duration::from_secs(10);

/// A state machine of either family.
pub trait StateMachine: Debug {
    /// When to call [`StateMachine::handle_timeout`], unless something is received before.
    fn next_deadline(&self) -> BootClockTime;
    /// The sockets that have to be open now.
    fn needed_sockets(&self) -> NeededSockets;
    fn handle_timeout(&mut self, now: BootClockTime) -> Vec<ClientAction>;
    /// Handles a received frame or datagram.
    fn handle_packet(
        &mut self,
        now: BootClockTime,
        source: PacketSource,
        bytes: &[u8],
    ) -> Vec<ClientAction>;
    /// The release of the lease, or of the address that the server may have assigned already.
    fn release_message(&mut self) -> Option<ReleaseMessage>;
    /// The Ethernet address of the interface, which a chained plugin may change.
    fn mac_mut(&mut self) -> &mut MacAddress;
}

/// `Init` waits before a start; `Selecting` has the best offer so far; `Requesting` may hold a
/// lease that the server does not know any more; `Probing` counts the probes that were sent.
#[derive(Debug)]
enum ClientState<P: DhcpProtocol> {
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

impl<P: DhcpProtocol> ClientState<P> {
    /// The message that the state waits for a reply to.
    fn pending_step(&self) -> Option<ExchangeStep<'_, P>> {
        match self {
            ClientState::Selecting(_) => Some(ExchangeStep::Discover),
            ClientState::Requesting { binding, .. } => Some(ExchangeStep::Request(binding)),
            ClientState::Declining(binding) => Some(ExchangeStep::Decline(binding)),
            ClientState::Renewing(lease) => Some(ExchangeStep::Renew(lease)),
            ClientState::Rebinding(lease) => Some(ExchangeStep::Rebind(lease)),
            ClientState::Init
            | ClientState::Probing(..)
            | ClientState::Bound(_)
            | ClientState::Ended => None,
        }
    }

    /// The lease whose address is in use.
    fn lease_in_use(&self) -> Option<&P::Lease> {
        match self {
            ClientState::Requesting { held, .. } => held.as_ref(),
            ClientState::Bound(lease)
            | ClientState::Renewing(lease)
            | ClientState::Rebinding(lease) => Some(lease),
            _ => None,
        }
    }
}

#[derive(Debug)]
pub struct ClientMachine<P: DhcpProtocol> {
    client: P,
    state: ClientState<P>,
    /// The exchange of a state that has a [`ExchangeStep`].
    exchange: MessageExchange,
    /// The end of the current wait.
    until: BootClockTime,
    random: RandomGenerator,
    actions: Vec<ClientAction>,
    /// The time limit of the first lease.
    limit: BootClockTime,
    /// Refusals since the last lease.
    refusals: u32,
    /// Conflicts since the last lease.
    conflicts: u32,
    /// The last refusal: repetitions are not logged.
    refusal: String,
}

impl<P: DhcpProtocol> ClientMachine<P> {
    /// A client that starts at `now` and fails at `limit`. The random delay of RFC 9915 section
    /// 18.2.1 is not needed: the kernel has delayed the link-local address already.
    pub fn new(
        client: P,
        now: BootClockTime,
        limit: BootClockTime,
        random: RandomGenerator,
    ) -> ClientMachine<P> {
        ClientMachine {
            client,
            state: ClientState::Init,
            exchange: MessageExchange::begin_at(now, 0),
            until: now,
            random,
            actions: Vec::new(),
            limit,
            refusals: 0,
            conflicts: 0,
            refusal: String::new(),
        }
    }

    pub fn resume_lease(client: P, lease: P::Lease, random: RandomGenerator) -> ClientMachine<P> {
        let state = ClientState::Bound(lease);
        ClientMachine { state, ..ClientMachine::new(client, NEVER, NEVER, random) }
    }

    /// The address that the server may have assigned to the client.
    fn assigned_binding(&self) -> Option<P::Binding> {
        match &self.state {
            // The reply may be on its way.
            ClientState::Requesting { binding, .. } => Some(binding.clone()),
            ClientState::Probing(lease, _) => Some(lease.into()),
            state => state.lease_in_use().map(Into::into),
        }
    }

    fn push_note(&mut self, text: impl Into<String>) {
        self.actions.push(ClientAction::Note(text.into()));
    }

    /// Handles a message from the Ethernet address `from`, which is unknown for UDP.
    fn on_message(
        &mut self,
        now: BootClockTime,
        message: &P::Message,
        from: Option<MacAddress>,
    ) -> Vec<ClientAction> {
        if let Some(step) = self.state.pending_step()
            && let Some(answer) =
                self.client.interpret_reply(&step, &self.exchange, message, from, &mut self.random)
        {
            self.on_reply(now, answer);
        }
        mem::take(&mut self.actions)
    }

    fn on_reply(&mut self, now: BootClockTime, answer: ServerReply<P>) {
        match (mem::replace(&mut self.state, ClientState::Ended), answer) {
            (ClientState::Selecting(best), ServerReply::Offer(binding, preference)) => {
                // The best of all offers before the first timeout, afterwards the first offer.
                let is_better = best.as_ref().is_none_or(|(_, of_best)| preference > *of_best);
                if is_better && (preference == AT_ONCE || self.exchange.sent > 1) {
                    self.request_binding(now, binding, None);
                } else {
                    let best = if is_better { Some((binding, preference)) } else { best };
                    self.state = ClientState::Selecting(best);
                }
            }
            (ClientState::Requesting { held: None, .. }, ServerReply::Lease(lease))
                if !self.client.client_timing().probe.is_zero() =>
            {
                self.probe_address(now, lease, 0);
            }
            (_, ServerReply::Lease(lease)) => self.bind_lease(lease),
            (ClientState::Declining(_), ServerReply::Declined) => self.restart_after_decline(now),
            // A server that has lost its leases may assign the same address again (RFC 9915,
            // section 18.2.10.1).
            (
                ClientState::Renewing(lease) | ClientState::Rebinding(lease),
                ServerReply::NoBinding(binding),
            ) => {
                self.push_note("the server does not know the lease; it is requested again");
                self.request_binding(now, binding, Some(lease));
            }
            (state, ServerReply::Refused(why)) => {
                if state.lease_in_use().is_some() {
                    self.actions.push(ClientAction::Lost("the server refuses to renew the lease"));
                }
                self.report_refusal(&why);
                self.pause_after_refusal(now);
            }
            (state, ServerReply::Useless(why)) => {
                self.report_refusal(&why);
                self.state = state;
            }
            // During the first acquisition a plugin waits for the reason; later another server may
            // do better.
            (ClientState::Requesting { .. }, ServerReply::Flawed(flaw)) if self.limit != NEVER => {
                self.limit = NEVER;
                self.actions.push(ClientAction::Unusable(flaw));
            }
            (state, ServerReply::Flawed(flaw)) => {
                self.push_note(flaw.to_string());
                match state {
                    ClientState::Requesting { .. } => self.pause_after_refusal(now),
                    state => self.state = state,
                }
            }
            (state, _) => self.state = state,
        }
    }

    fn request_binding(&mut self, now: BootClockTime, binding: P::Binding, held: Option<P::Lease>) {
        let state = ClientState::Requesting { binding, held };
        if P::REQUEST_KEEPS_XID {
            self.exchange.sent = 0;
            self.send_state_message(now, state);
        } else {
            self.begin_exchange(now, state);
        }
    }

    /// Handles the use of the probed address by another host.
    fn on_conflict(&mut self, now: BootClockTime) -> Vec<ClientAction> {
        let ClientState::Probing(lease, _) = &self.state else { return Vec::new() };
        let (address, binding) = (P::leased_address(lease), lease.into());
        self.push_note(format!("declined {address}, which another host on the link uses"));
        self.begin_exchange(now, ClientState::Declining(binding));
        if P::DECLINES == 1 {
            self.restart_after_decline(now);
        }
        mem::take(&mut self.actions)
    }

    fn restart_after_decline(&mut self, now: BootClockTime) {
        let pause = if self.conflicts == 0 { Duration::ZERO } else { AFTER_CONFLICT };
        self.conflicts += 1;
        (self.state, self.until) = (ClientState::Init, now + pause);
    }

    /// Enters a state with a new exchange.
    fn begin_exchange(&mut self, now: BootClockTime, state: ClientState<P>) {
        self.exchange = MessageExchange::begin_at(now, self.next_xid());
        self.send_state_message(now, state);
    }

    fn next_xid(&mut self) -> u32 {
        self.random.next_number() >> (32 - P::XID_BITS)
    }

    /// Enters a state, or stays in it, and sends its message.
    fn send_state_message(&mut self, now: BootClockTime, state: ClientState<P>) {
        if let Some(step) = state.pending_step() {
            self.exchange.asked = now;
            self.actions.push(self.client.build_message(&step, &self.exchange));
            let wait = self.client.message_timeout(&step, &self.exchange, &mut self.random);
            self.exchange = self.exchange.after_sending(now, wait);
            self.until = now + wait;
        }
        self.state = state;
    }

    fn probe_address(&mut self, now: BootClockTime, lease: P::Lease, sent: u32) {
        if sent == PROBES {
            return self.bind_lease(lease);
        }
        self.actions.push(ClientAction::Probe(P::leased_address(&lease)));
        self.until = now + self.client.client_timing().probe / PROBES;
        self.state = ClientState::Probing(lease, sent + 1);
    }

    fn bind_lease(&mut self, lease: P::Lease) {
        (self.limit, self.refusals, self.conflicts) = (NEVER, 0, 0);
        self.refusal.clear();
        self.actions.push(ClientAction::Bound((P::LEASE)(lease.clone())));
        self.state = ClientState::Bound(lease);
    }

    /// Reports a refusal, unless it repeats the last one.
    fn report_refusal(&mut self, why: &str) {
        let colon = if why.is_empty() { "" } else { ": " };
        let text = format!("refused by the server{colon}{why}");
        if self.refusal != text {
            self.refusal.clone_from(&text);
            self.actions.push(ClientAction::Refused(text));
        }
    }

    /// Restarts after a wait that grows with each refusal.
    fn pause_after_refusal(&mut self, now: BootClockTime) {
        let pause = self.client.client_timing().after_refusal(self.refusals, &mut self.random);
        self.refusals = self.refusals.saturating_add(1);
        (self.state, self.until) = (ClientState::Init, now + pause);
    }
}

impl<P: DhcpProtocol> StateMachine for ClientMachine<P> {
    fn next_deadline(&self) -> BootClockTime {
        let until = match &self.state {
            ClientState::Bound(lease) => P::lease_timers(lease).renew,
            ClientState::Renewing(lease) => self.until.min(P::lease_timers(lease).rebind),
            ClientState::Rebinding(lease) | ClientState::Requesting { held: Some(lease), .. } => {
                self.until.min(P::lease_timers(lease).expires)
            }
            ClientState::Ended => NEVER,
            _ => self.until,
        };
        until.min(self.limit)
    }

    fn needed_sockets(&self) -> NeededSockets {
        match &self.state {
            ClientState::Init | ClientState::Bound(_) | ClientState::Ended => NeededSockets::None,
            ClientState::Probing(lease, _) => NeededSockets::Neighbours(P::leased_address(lease)),
            ClientState::Renewing(_) => NeededSockets::Udp,
            _ => P::LISTENING,
        }
    }

    fn handle_timeout(&mut self, now: BootClockTime) -> Vec<ClientAction> {
        if now >= self.limit {
            (self.state, self.limit) = (ClientState::Ended, NEVER);
            return vec![ClientAction::TimeIsUp];
        }
        if now < self.next_deadline() {
            return Vec::new();
        }
        let expired =
            self.state.lease_in_use().is_some_and(|lease| now >= P::lease_timers(lease).expires);
        match mem::replace(&mut self.state, ClientState::Ended) {
            _ if expired => {
                self.actions.push(ClientAction::Lost("the lease has expired"));
                (self.state, self.until) = (ClientState::Init, now);
            }
            ClientState::Init => self.begin_exchange(now, ClientState::Selecting(None)),
            ClientState::Selecting(Some((binding, _))) => self.request_binding(now, binding, None),
            ClientState::Requesting { held, .. } if self.exchange.sent >= P::REQUESTS => {
                self.push_note("the server of the offer does not reply");
                let next = held.map_or(ClientState::Selecting(None), ClientState::Rebinding);
                self.begin_exchange(now, next);
            }
            ClientState::Probing(lease, sent) => self.probe_address(now, lease, sent),
            ClientState::Declining(_) if self.exchange.sent >= P::DECLINES => {
                self.restart_after_decline(now);
            }
            ClientState::Bound(lease) | ClientState::Renewing(lease)
                if now >= P::lease_timers(&lease).rebind =>
            {
                self.begin_exchange(now, ClientState::Rebinding(lease));
            }
            ClientState::Bound(lease) => self.begin_exchange(now, ClientState::Renewing(lease)),
            state => self.send_state_message(now, state),
        }
        mem::take(&mut self.actions)
    }

    fn handle_packet(
        &mut self,
        now: BootClockTime,
        source: PacketSource,
        bytes: &[u8],
    ) -> Vec<ClientAction> {
        match (source, &self.state) {
            (PacketSource::Neighbours, ClientState::Probing(lease, _))
                if self.client.is_conflict(bytes, lease) =>
            {
                self.on_conflict(now)
            }
            (PacketSource::Neighbours, _) => Vec::new(),
            (source, _) => match P::decode_message(source, bytes) {
                Some((message, from)) => self.on_message(now, &message, from),
                None => Vec::new(),
            },
        }
    }

    fn release_message(&mut self) -> Option<ReleaseMessage> {
        let binding = self.assigned_binding()?;
        let xid = self.next_xid();
        Some(self.client.build_release(&binding, xid))
    }

    fn mac_mut(&mut self) -> &mut MacAddress {
        self.client.mac_mut()
    }
}
