//! Actions and sockets of the state machine, and the differences between DHCP and DHCPv6.

use std::fmt::Debug;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use super::super::family;
use super::super::timing::{Exchange, Random, Timers, Timing};
use super::super::v4::frame::Ends;
use super::super::v4::lease::Flaw;
use super::super::v4::message::Message as MessageV4;
use super::super::v6::message::Message as MessageV6;
use crate::netlink::Mac;

/// The preference of a server whose offer is taken without waiting for others.
pub const AT_ONCE: u8 = 255;

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
