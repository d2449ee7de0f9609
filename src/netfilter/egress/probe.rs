//! Whether the resolver of the node answers, and whether containers reach it.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::process;
use std::time::{Duration, Instant};

use ipnet::IpNet;

use super::part::EgressPart;
use super::redirect::{DNS, RESOLVER_PORT};
use crate::netns::Netns;
use cni::error::{Error, Result};

/// The name that the resolver answers for the node itself, and refuses to all others.
pub const PROBE_NAME: &str = "resolver.cnibox.invalid";

/// How long the resolver may take, which systemd may have to start first.
const LIMIT: Duration = Duration::from_secs(2);

/// How long an answer to a container may take, after one to the node; twice, because a datagram may
/// be lost.
const LIMIT_OF_CONTAINER: Duration = Duration::from_secs(1);

/// The flags of a question and of its answer without an error (RFC 1035, section 4.1.1): recursion
/// desired; a response.
const QUESTION: u16 = 0x0100;
const RESPONSE: u8 = 0x80;
const CODE: u8 = 0x0f;
/// Type A, class IN.
const ADDRESS: [u8; 4] = [0, 1, 0, 1];

/// Fails if the policies have names, and the container cannot ask the resolver of the node.
pub fn require_name_service(port: &EgressPart) -> Result<()> {
    if !port.has_names() {
        return Ok(());
    }
    if port.resolvers().is_empty() {
        let problem = "names in a policy need a router of the container that is this node";
        return Err(Error::config(problem).with_details(
            "set \"isGateway\" of bridge, or write addresses in place of the names",
        ));
    }
    require_resolver()
}

/// Fails unless the resolver answers, without which a container with names in its policy reaches
/// none of them.
pub fn require_resolver() -> Result<()> {
    match ask_resolver() {
        Ok(true) => Ok(()),
        Ok(false) => Err(resolver_error("another program answers")),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            Err(resolver_error("no answer within 2 s"))
        }
        Err(error) => Err(resolver_error(&cni::error::io_text(&error))),
    }
}

fn resolver_error(why: &str) -> Error {
    let problem = format!("the resolver for names in egress policies does not answer: {why}");
    Error::internal(problem).with_details(
        "start it with \"systemctl enable --now cnibox-egress-resolver.socket\", or run \"cnibox \
         egress resolver\"",
    )
}

/// Fails if the node drops what the container asks the resolver, which answers the node: as a host
/// that accepts nothing from its containers.
pub fn require_reachable(inside: &Netns, port: &EgressPart) -> Result<()> {
    // A link-local address would need the interface.
    let is_usable = |ip: &IpAddr| !matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local());
    let Some(router) = port.resolvers().into_iter().find(is_usable) else { return Ok(()) };
    let any: IpAddr =
        if router.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let ask = |socket: &UdpSocket| ask(socket, LIMIT_OF_CONTAINER).map(drop);
    let asked = inside.run_inside(|| {
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect((router, DNS))?;
        Ok(socket)
    })?;
    let asked = asked.and_then(|socket| ask(&socket).or_else(|_| ask(&socket)));
    match asked.err().map(|error| error.kind()) {
        Some(
            io::ErrorKind::WouldBlock
            | io::ErrorKind::ConnectionRefused
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::PermissionDenied,
        ) => {
            let is_of_family = |net: &&IpNet| net.addr().is_ipv4() == router.is_ipv4();
            let from = port.on_link.iter().find(is_of_family).map_or(any.into(), IpNet::trunc);
            let problem = format!("this node drops what containers of {from} ask its resolver");
            Err(Error::internal(problem).with_details(format!(
                "accept UDP and TCP to port {RESOLVER_PORT} from {from} in the packet filter of the \
                 node: \"ufw allow from {from} to any port {RESOLVER_PORT}\", or \"firewall-cmd \
                 --add-port={RESOLVER_PORT}/udp --add-port={RESOLVER_PORT}/tcp\"; if dmesg says \
                 \"neighbour table overflow\", raise net.ipv4.neigh.default.gc_thresh3"
            )))
        }
        // An answer, or the container cannot ask anybody yet.
        _ => Ok(()),
    }
}

fn ask_resolver() -> io::Result<bool> {
    let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
    socket.connect((Ipv4Addr::LOCALHOST, RESOLVER_PORT))?;
    ask(&socket, LIMIT)
}

/// Asks for the probe's name. Returns whether the answer is without an error.
fn ask(socket: &UdpSocket, limit: Duration) -> io::Result<bool> {
    socket.set_read_timeout(Some(limit))?;
    let [high, low, ..] = process::id().to_ne_bytes();
    socket.send(&question([high, low]))?;
    let mut answer = [0; 512];
    let end = Instant::now() + limit;
    // A signal interrupts waiting with a time limit, whatever its handler says.
    let length = loop {
        match socket.recv(&mut answer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted && Instant::now() < end => {}
            outcome => break outcome?,
        }
    };
    let [first, second, flags, code, ..] = answer;
    let is_answer = length >= 12 && [first, second] == [high, low] && flags & RESPONSE != 0;
    Ok(is_answer && code & CODE == 0)
}

fn question(id: [u8; 2]) -> Vec<u8> {
    let mut message = id.to_vec();
    message.extend([QUESTION, 1, 0, 0, 0].map(u16::to_be_bytes).as_flattened());
    for label in PROBE_NAME.split('.') {
        message.extend(u8::try_from(label.len()));
        message.extend(label.as_bytes());
    }
    message.push(0);
    message.extend(ADDRESS);
    message
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// What the probe makes of an answer, of which a test changes the bytes.
    fn outcome(change: impl Fn(&mut Vec<u8>)) -> bool {
        let server = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let client = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        client.connect(server.local_addr().unwrap()).unwrap();
        let asked = thread::spawn(move || ask(&client, Duration::from_secs(10)).unwrap());
        let mut buffer = [0; 512];
        let (length, from) = server.recv_from(&mut buffer).unwrap();
        let mut answer = buffer[..length].to_vec();
        answer[2] |= RESPONSE;
        change(&mut answer);
        server.send_to(&answer, from).unwrap();
        asked.join().unwrap()
    }

    #[test]
    fn another_program_at_the_port_is_not_the_resolver() {
        assert!(outcome(|_| ()));
        assert!(!outcome(|answer| answer[2] = 1), "an echo of the question");
        assert!(!outcome(|answer| answer[0] ^= 1), "another number");
        assert!(!outcome(|answer| answer[3] |= 3), "there is no such name");
        assert!(!outcome(|answer| answer.truncate(11)), "a part of an answer");
    }
}
