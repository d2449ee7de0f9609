//! Programs of the node that listen on a port that leads to a container.

use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use crate::netfilter::ports::PortOwner;
use crate::tool::finding::Finding;
use cni::files;

/// The sockets of the node, and the state of those that wait for clients: `TCP_LISTEN`, and
/// `TCP_CLOSE` of UDP sockets without a peer.
const SOCKETS: [(&str, &str, &str); 4] =
    [("tcp", "tcp", "0A"), ("tcp", "tcp6", "0A"), ("udp", "udp", "07"), ("udp", "udp6", "07")];

/// The size limit of such a file in bytes: half a million sockets.
const MAX_BYTES: usize = 64 << 20;

/// The protocol and the address of a socket.
pub(super) type Listener = (&'static str, SocketAddr);

/// The sockets that wait for clients. What cannot be read is left out.
pub(super) fn listening_sockets() -> Vec<Listener> {
    let mut found = Vec::new();
    for (proto, file, state) in SOCKETS {
        let path = Path::new("/proc/thread-self/net").join(file);
        let text = files::read_text(&path, MAX_BYTES).unwrap_or_default();
        for line in text.lines() {
            let words: Vec<&str> = line.split_ascii_whitespace().take(4).collect();
            if let [_, local, _, its] = words[..]
                && its == state
                && let Some(local) = parse_address(local)
            {
                found.push((proto, local));
            }
        }
    }
    found
}

/// Parses an address like `0100007F:0016`: words of 32 bits in the byte order of the machine.
fn parse_address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let words =
        (0..ip.len()).step_by(8).map(|at| u32::from_str_radix(ip.get(at..at + 8)?, 16).ok());
    let words: Option<Vec<u32>> = words.collect();
    let bytes: Vec<u8> = words?.into_iter().flat_map(u32::to_ne_bytes).collect();
    let ip = match <[u8; 4]>::try_from(&*bytes) {
        Ok(v4) => IpAddr::from(v4),
        Err(_) => IpAddr::from(<[u8; 16]>::try_from(&*bytes).ok()?),
    };
    Some(SocketAddr::new(ip, port))
}

/// The finding for a program whose clients reach the container instead. It may be the runtime, which
/// some let hold the ports of containers.
pub(super) fn find_hidden_program(owner: &PortOwner, listeners: &[Listener]) -> Option<Finding> {
    let (proto, socket) = listeners.iter().find(|listener| is_hidden(owner, listener))?;
    let port = socket.port();
    let problem =
        format!("a program of the node listens on {socket}, but its clients reach {owner}");
    let remedy = format!(
        "ss -Hlntup sport = :{port} # names it: unless it is the runtime, choose another hostPort"
    );
    Some(Finding::new_note(format!("{proto} port {port}"), problem, remedy))
}

fn is_hidden(owner: &PortOwner, (proto, socket): &Listener) -> bool {
    let leads = |port: &String| {
        let Some((place, of)) = port.split_once('/') else { return false };
        let has_port = match place.parse::<SocketAddr>() {
            Ok(only) if !socket.ip().is_unspecified() => only == *socket,
            Ok(only) => only.port() == socket.port(),
            Err(_) => place.parse() == Ok(socket.port()),
        };
        of == *proto && has_port
    };
    // The port of `::1` stays that of the node.
    let ip = socket.ip();
    let has_family = |target: &IpAddr| {
        ip.is_unspecified()
            || (target.is_ipv4() == ip.is_ipv4() && (ip.is_ipv4() || !ip.is_loopback()))
    };
    owner.ports.iter().any(leads) && owner.targets.iter().any(has_family)
}
