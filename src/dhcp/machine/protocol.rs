//! Actions and sockets of the state machine, and the differences between DHCP and DHCPv6.

use std::fmt::Debug;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use super::super::family;
use super::super::timing::{ClientTiming, LeaseTimers, MessageExchange, RandomGenerator};
use super::super::v4::frame::FrameAddresses;
use super::super::v4::lease::Dhcp4AckFlaw;
use super::super::v4::message::Dhcp4Message as MessageV4;
use super::super::v6::message::Dhcp6Message as MessageV6;
use crate::netlink::MacAddress;

/// The preference of a server whose offer is taken without waiting for others.
pub const AT_ONCE: u8 = 255;

#[derive(Debug)]
pub enum ReleaseMessage {
    /// DHCPRELEASE in a frame with this source and destination.
    V4(MessageV4, FrameAddresses),
    /// The first Release of its exchange, and the address.
    V6(MessageV6, Ipv6Addr),
}

impl ReleaseMessage {
    pub fn released_address(&self) -> IpAddr {
        match self {
            ReleaseMessage::V4(_, ends) => ends.src.into(),
            ReleaseMessage::V6(_, address) => (*address).into(),
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub enum ClientAction {
    /// Broadcast on the link.
    Broadcast(MessageV4),
    /// Send to the server from the leased address.
    Unicast(MessageV4, Ipv4Addr),
    /// Send to all DHCPv6 servers from the link-local address.
    Multicast(MessageV6),
    /// Send an ARP probe or Neighbor Solicitation for the address.
    Probe(IpAddr),
    /// Use a lease: the first, a renewed, or a different one.
    Bound(family::DhcpLease),
    /// Stop using the address, for this reason. The search for another continues.
    Lost(&'static str),
    /// Fail: no server assigned an address before the time limit.
    TimeIsUp,
    /// Fail: the DHCPACK is not usable.
    Unusable(Dhcp4AckFlaw),
    /// Log that a server refuses an address, and report it if the time limit is exceeded. The
    /// search continues.
    Refused(String),
    Note(String),
}

/// The sockets of a state.
#[derive(Debug, PartialEq, Eq)]
pub enum NeededSockets {
    None,
    /// DHCP messages in frames.
    Frames,
    /// Messages by UDP. In DHCP also in frames, because DHCPNAK is broadcast; the UDP socket keeps
    /// the kernel from replying "port unreachable" to the server.
    Udp,
    /// ARP or Neighbor Discovery for this address.
    Neighbours(IpAddr),
}

/// A socket that something was received from.
#[derive(Clone, Copy, Debug)]
pub enum PacketSource {
    /// Ethernet frames with UDP.
    Frames,
    /// Payloads of UDP datagrams.
    Udp,
    /// Ethernet frames with ARP or Neighbor Discovery.
    Neighbours,
}

/// A message that the client sends and repeats until a reply arrives.
#[derive(Debug)]
pub enum ExchangeStep<'a, P: DhcpProtocol> {
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

#[derive(Debug)]
pub enum ServerReply<P: DhcpProtocol> {
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
    Flawed(Dhcp4AckFlaw),
    /// The server has received the Decline.
    Declined,
}

/// Messages and timeouts of one client with one protocol.
pub trait DhcpProtocol: Debug + Sized {
    type Message;
    type Lease: Clone + Debug;
    /// An address that a server has offered or assigned.
    type Binding: Clone + Debug + for<'l> From<&'l Self::Lease>;

    const LEASE: fn(Self::Lease) -> family::DhcpLease;
    /// The number of bits of a transaction ID.
    const XID_BITS: u32;
    /// Whether a request has the transaction ID of the offer.
    const REQUEST_KEEPS_XID: bool;
    /// How many requests are sent to the server of an offer.
    const REQUESTS: u32;
    /// How many declines are sent; 1 if servers do not reply to it.
    const DECLINES: u32;
    /// The socket for replies to multicast or broadcast messages.
    const LISTENING: NeededSockets;

    /// The Ethernet address of the interface.
    fn mac_mut(&mut self) -> &mut MacAddress;
    /// The configured timeouts.
    fn client_timing(&self) -> &ClientTiming;
    fn leased_address(lease: &Self::Lease) -> IpAddr;
    fn lease_timers(lease: &Self::Lease) -> LeaseTimers;
    /// A message to be sent at `exchange.asked`.
    fn build_message(
        &self,
        step: &ExchangeStep<'_, Self>,
        exchange: &MessageExchange,
    ) -> ClientAction;
    /// The timeout of that message.
    fn message_timeout(
        &self,
        step: &ExchangeStep<'_, Self>,
        exchange: &MessageExchange,
        random: &mut RandomGenerator,
    ) -> Duration;
    /// The release of an address, with this transaction ID.
    fn build_release(&self, binding: &Self::Binding, xid: u32) -> ReleaseMessage;
    /// Decodes a server's message, with its source Ethernet address if known.
    fn decode_message(
        source: PacketSource,
        bytes: &[u8],
    ) -> Option<(Self::Message, Option<MacAddress>)>;
    /// The meaning of a message from the Ethernet address `from`; `None` if it is not a reply to
    /// the last message of the exchange, which was that of `step`.
    fn interpret_reply(
        &mut self,
        step: &ExchangeStep<'_, Self>,
        exchange: &MessageExchange,
        message: &Self::Message,
        from: Option<MacAddress>,
        random: &mut RandomGenerator,
    ) -> Option<ServerReply<Self>>;
    /// Whether the frame is from another host that uses the address, or probes for it.
    fn is_conflict(&self, frame: &[u8], lease: &Self::Lease) -> bool;
}
