//! Giving leases back: in the namespace of the calling thread, while the interface is still there.

use std::io;
use std::net::UdpSocket;
use std::time::{Duration, Instant};

use super::interface::{self, Interface, InterfaceError};
use super::machine::Release;
use super::record::Record;
use super::timing::{NEVER, Timing};
use super::v4::frame::Ends;
use super::v6::message::{Kind, Message};
use super::{v4, v6};
use crate::error::{Context, Error, Result};

/// How long the server may take to say where it is. One behind a router never does.
const SERVER_ANSWERS: Duration = Duration::from_millis(200);
/// How long a server of IPv6 may take to confirm each of these releases. RFC 9915 begins with a
/// second, but a runtime waits for this.
const CONFIRMATIONS: [Duration; 3] =
    [Duration::from_millis(250), Duration::from_millis(500), Duration::from_secs(1)];
/// Longer than any message that is taken.
const BUFFER: usize = 2048;

/// Sends the release of a lease. It is under way when this returns, so the interface may go.
pub fn send(ifname: &str, release: Release) -> Result<()> {
    match release {
        Release::V4(message, ends) => send_v4(ifname, &message, ends),
        Release::V6(message, _) => send_v6(ifname, message),
    }
}

/// Releases the lease of a record, when no daemon does it.
pub fn release_recorded(record: &Record) -> Result<()> {
    let interface = Interface { netns: (&record.netns).into(), ifname: record.key.ifname.clone() };
    let netns = match interface.open(Some(record.netns_id)) {
        Err(InterfaceError::Gone(_)) => return Ok(()),
        opened => opened?,
    };
    let mut machine = record.machine(Timing::default(), false, NEVER, NEVER);
    let Some(mac) =
        netns.run(|| interface::mac_address(&interface.ifname)).map_err(Error::from)??
    else {
        return Ok(());
    };
    machine.set_mac(mac);
    let Some(release) = machine.release() else { return Ok(()) };
    netns.run(|| send(&interface.ifname, release)).map_err(Error::from)?
}

/// One message from the leased address, in a frame to where the server's answers came from.
fn send_v4(ifname: &str, message: &v4::message::Message, mut ends: Ends) -> Result<()> {
    let failed = || "failed to release DHCP lease: failed to send DHCPRELEASE";
    let socket = v4::socket::frames(ifname).map_err(|e| Error::io(ifname, &e)).context(failed)?;
    // A server on the link may send from another Ethernet address than it listens on.
    let found = v4::socket::resolve(ifname, ends.src, ends.dst, SERVER_ANSWERS);
    ends.dst_mac = found.ok().flatten().unwrap_or(ends.dst_mac);
    let sent = v4::socket::send(&socket, &ends, &message.encode());
    sent.map_err(|e| Error::io(ifname, &e)).context(failed)
}

/// Repeated until the server has confirmed it, or has had enough time.
fn send_v6(ifname: &str, mut message: Message) -> Result<()> {
    let failed = || "failed to release DHCPv6 lease";
    let io = |e: io::Error| Error::io(ifname, &e);
    let (socket, servers) = v6::socket::udp(ifname).map_err(io).context(failed)?;
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
    while v4::socket::is_readable(socket, deadline)? {
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
