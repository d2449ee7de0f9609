//! The clients of DHCP and DHCPv6 for the daemon: a state machine without input or output, and the actions
//! that it asks for.
//!
//! | file | |
//! | --- | --- |
//! | `v4/` | the client's states, RFC 2131 section 4.4 |
//! | `v6/` | the client's states, RFC 9915 section 18.2 |

pub mod v4;
pub mod v6;

use std::fmt::Debug;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::family::Lease;
use super::timing::BootTime;
use super::v4::frame::Ends;
use super::v4::lease::Flaw;
use super::v4::message::Message as MessageV4;
use super::v6::message::Message as MessageV6;
use crate::netlink::Mac;

/// How many probes ask the link whether another host has the address.
pub const PROBES: u32 = 2;

/// The states of a client of one interface.
pub trait StateMachine: Debug {
    /// When [`StateMachine::tick`] is to be called, unless something arrives before.
    fn deadline(&self) -> BootTime;
    /// The sockets that have to be open now.
    fn listening(&self) -> Listening;
    /// Handles the end of a wait.
    fn tick(&mut self, now: BootTime) -> Vec<Action>;
    /// Handles an Ethernet frame with a UDP datagram; DHCPv6 takes none.
    fn frame(&mut self, _now: BootTime, _frame: &[u8]) -> Vec<Action> {
        Vec::new()
    }
    /// Handles a message from a UDP socket.
    fn datagram(&mut self, now: BootTime, payload: &[u8]) -> Vec<Action>;
    /// Handles an ARP or Neighbor Discovery frame.
    fn neighbour(&mut self, now: BootTime, frame: &[u8]) -> Vec<Action>;
    /// The release of what the client has now, a lease that may be on its way included.
    fn release(&mut self) -> Option<Release>;
    /// The Ethernet address of the interface.
    fn mac(&self) -> Mac;
    /// Sets the Ethernet address, which a chained plugin may have changed.
    fn set_mac(&mut self, mac: Mac);
}

/// A message that gives an address back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Release {
    /// DHCPRELEASE, in a frame between these ends.
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

/// An action that a state machine asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Broadcast on the link.
    Broadcast(MessageV4),
    /// Send to the server, from the leased address.
    Unicast(MessageV4, Ipv4Addr),
    /// Send to all DHCPv6 servers, from the link-local address.
    Multicast(MessageV6),
    /// Ask the link who has the address.
    Probe(IpAddr),
    /// Use a lease: the first, the same with more time, or another.
    Bound(Lease),
    /// Stop using the address. The search for another goes on.
    Lost(&'static str),
    /// Give up: no lease was had in time, or none that can be used.
    Failed(Failure),
    /// Log that a server gives no address now. The search goes on.
    Refused(String),
    /// Log a text.
    Note(String),
}

/// Why there is no lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// No server gave an address in time.
    TimeIsUp,
    /// The acknowledgement lacks what a lease needs.
    Unusable(Flaw),
}

/// The sockets that a state needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listening {
    /// None.
    None,
    /// Frames of the link.
    Frames,
    /// Frames, and ARP for this address.
    FramesAndArp(Ipv4Addr),
    /// Frames, since DHCPNAK is broadcast, and UDP to this address, so that the kernel answers no
    /// server with "port unreachable".
    FramesAndUdp(Ipv4Addr),
    /// UDP to the link-local address, as in all of DHCPv6.
    Udp,
    /// Neighbor Discovery for this address.
    Neighbours(Ipv6Addr),
}
