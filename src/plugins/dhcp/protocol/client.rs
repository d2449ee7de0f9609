//! What goes into the states of a client, and what comes out.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::family;
use super::lease::{Flaw, Lease};
use super::message::{Message, Options};
use super::timing::Timing;
use super::v6;
use crate::netlink::Mac;

/// How often the link is asked whether somebody has the address.
pub const PROBES: u32 = 2;

/// Who asks, and how.
#[derive(Clone, Debug)]
pub struct Client {
    /// The Ethernet address of the interface.
    pub mac: Mac,
    /// Whether answers have to be broadcast.
    pub broadcast: bool,
    /// The client's name (option 61), and what else goes with every message.
    pub options: Options,
    /// How long to wait for what.
    pub timing: Timing,
}

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Output {
    /// Send to everybody on the link.
    Broadcast(Message),
    /// Send to the server, from the leased address.
    Unicast(Message, Ipv4Addr),
    /// Send to all servers of IPv6, from the address of the link.
    Multicast(v6::message::Message),
    /// Ask the link who has the address.
    Probe(IpAddr),
    /// There is a lease: the first, the same with more time, or another.
    Bound(family::Lease),
    /// The address may not be used any more. The search for another goes on.
    Lost(&'static str),
    /// No lease was had in time, or none that can be used. Nothing goes on.
    Failed(Failure),
    /// A server will not give an address now; for a person. The search goes on.
    Refused(String),
    /// For a person.
    Note(String),
}

/// Why there is no lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// Nobody answered, or nobody with an address, until time was up.
    TimeIsUp,
    /// The acknowledgement lacks what a lease needs.
    Unusable(Flaw),
}

/// An IPv4 address that a server has promised or given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The address.
    pub address: Ipv4Addr,
    /// The server.
    pub server: Ipv4Addr,
    /// Where its answer came from.
    pub server_mac: Mac,
}

impl From<&Lease> for Claim {
    fn from(lease: &Lease) -> Claim {
        Claim { address: lease.address(), server: lease.server, server_mac: lease.server_mac }
    }
}

/// What the client has to hear.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Listening {
    /// Nothing.
    None,
    /// Frames of the link.
    Frames,
    /// Frames, and ARP for this address.
    FramesAndArp(Ipv4Addr),
    /// Frames, since refusals are broadcast, and UDP to this address, so that the kernel does not
    /// tell the server that nobody listens.
    FramesAndUdp(Ipv4Addr),
    /// UDP to the address of the link, as in all of DHCPv6.
    Udp,
    /// Whether anybody else has this address.
    Neighbours(Ipv6Addr),
}
