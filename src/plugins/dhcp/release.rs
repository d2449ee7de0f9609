//! Giving leases back: in the namespace of the calling thread, while the interface is still there.

use std::io;
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use super::place::{self, Place, Trouble};
use super::protocol::client;
use super::protocol::family::{Claim, Client, Lease};
use super::protocol::frame::Ends;
use super::protocol::machine::Machine;
use super::protocol::timing::{Random, Timing};
use super::protocol::v6;
use super::protocol::v6::message::{Kind, Message};
use super::record::Record;
use super::{socket, socket_v6};
use crate::error::{Context, Error, Result};

/// How long the server may take to say where it is. One behind a router never does.
const SERVER_ANSWERS: Duration = Duration::from_millis(200);
/// How long a server of IPv6 may take to confirm each of these releases. RFC 9915 begins with a
/// second, but a runtime waits for this.
const CONFIRMATIONS: [Duration; 3] =
    [Duration::from_millis(250), Duration::from_millis(500), Duration::from_secs(1)];
/// Longer than any message that is taken.
const BUFFER: usize = 2048;

/// Gives a lease back. That is under way when this returns, so the interface may go.
pub fn release(ifname: &str, client: &Client, claim: &Claim) -> Result<()> {
    match (client, claim) {
        (Client::V4(client), Claim::V4(claim)) => release_v4(ifname, client, claim),
        (Client::V6(client), Claim::V6(claim)) => release_v6(ifname, client, claim),
        // A client claims addresses of its own family only.
        _ => Ok(()),
    }
}

/// The same for a record, when no daemon does it.
pub fn release_recorded(record: &Record) -> Result<()> {
    let Some(claim) = record.lease.as_ref().map(Lease::claim) else { return Ok(()) };
    let place = Place { netns: (&record.netns).into(), ifname: record.key.ifname.clone() };
    let netns = match place.open(Some(record.netns_id)) {
        Err(Trouble::Gone(_)) => return Ok(()),
        opened => opened?,
    };
    let mut client = record.client(Timing::default(), false);
    netns
        .run(|| match place::look(&place.ifname)? {
            Some(mac) => {
                client.set_mac(mac);
                release(&place.ifname, &client, &claim)
            }
            None => Ok(()),
        })
        .map_err(Error::from)?
}

/// One message from the leased address, in a frame to where the server's answers came from.
fn release_v4(ifname: &str, client: &client::Client, claim: &client::Claim) -> Result<()> {
    let failed = || "failed to release DHCP lease: failed to send DHCPRELEASE";
    let socket = socket::frames(ifname).map_err(|e| Error::io(ifname, &e)).context(failed)?;
    let message = Machine::release(client, claim, &mut Random::new()).encode();
    let client::Claim { address, server, server_mac } = *claim;
    // A server on the link may send from another Ethernet address than it listens on.
    let found = socket::resolve(ifname, address, server, SERVER_ANSWERS);
    let dst_mac = found.ok().flatten().unwrap_or(server_mac);
    let ends = Ends { src_mac: client.mac, dst_mac, src: address, dst: server };
    socket::send(&socket, &ends, &message).map_err(|e| Error::io(ifname, &e)).context(failed)
}

/// Repeated until the server has confirmed it, or has had enough time.
fn release_v6(
    ifname: &str,
    client: &v6::identity::Client,
    claim: &v6::verdict::Claim,
) -> Result<()> {
    let failed = || "failed to release DHCPv6 lease";
    let io = |e: io::Error| Error::io(ifname, &e);
    let (socket, servers) = socket_v6::udp(ifname).map_err(io).context(failed)?;
    let mut message = v6::machine::Machine::release(client, claim, &mut Random::new());
    let begun = Instant::now();
    for limit in CONFIRMATIONS {
        let hundredths = begun.elapsed().as_millis() / 10;
        message.elapsed = u16::try_from(hundredths).unwrap_or(u16::MAX);
        socket.send_to(&message.encode(), servers).map_err(io).context(failed)?;
        if is_confirmed(&socket, &message, limit).map_err(io).context(failed)? {
            return Ok(());
        }
    }
    Err(Error::internal(failed()).with_details("the server has not confirmed it"))
}

fn is_confirmed(socket: &UdpSocket, sent: &Message, limit: Duration) -> io::Result<bool> {
    let deadline = Instant::now() + limit;
    let mut buffer = [0; BUFFER];
    while socket::is_readable(socket, deadline)? {
        let (length, _) = socket.recv_from(&mut buffer)?;
        let is_answer = |message: &Message| {
            message.kind == Kind::Reply
                && (message.xid, &message.client) == (sent.xid, &sent.client)
                && message.server == sent.server
        };
        if Message::decode(&buffer[..length]).as_ref().is_some_and(is_answer) {
            return Ok(true);
        }
    }
    Ok(false)
}
