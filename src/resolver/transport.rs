//! The sockets of containers while the resolver serves: messages by UDP, connections by TCP.

use std::cell::Cell;
use std::io;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::Duration;

use nix::libc;
use nix::sys::socket::getsockopt;
use nix::sys::socket::sockopt::{self, GetStruct};
use tokio::io::unix::AsyncFd;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{spawn_local, yield_now};
use tokio::time::{sleep, timeout};

use super::datagram::{LONGEST_QUERY, Path, receive_from, send_answer};
use super::limits::Counted;
use super::message::Question;
use super::serve::{Asker, Resolver};
use super::stream::{read_message, write_message};
use crate::daemon::watch_readable;
use cni::error::{Error, Result, io_text};

/// The maximum number of messages that are received at once.
const BATCH: usize = 64;
/// The maximum number of connections of a container, and of all.
const MOST_OF_CONTAINER: usize = 8;
const MOST_OF_ALL: usize = 1024;
/// The maximum number of queries of a connection.
const MOST_QUERIES: usize = 16;
/// The time limit of the next query, and of writing an answer.
const IDLE: Duration = Duration::from_secs(10);
/// The wait after a connection could not be accepted.
const RECOVERY: Duration = Duration::from_millis(100);

/// The space of a control message in the buffer of `getsockopt`, as `CMSG_SPACE` has it.
const fn control_space(data: usize) -> usize {
    size_of::<libc::cmsghdr>() + data.next_multiple_of(size_of::<usize>())
}

/// The control message with which the kernel tells how a connection arrived, once its listener has
/// asked for it: its buffer has this size and no other.
const SPACE4: usize = control_space(size_of::<libc::in_pktinfo>());
const SPACE6: usize = control_space(size_of::<libc::in6_pktinfo>());
/// `IP_PKTOPTIONS` of `linux/in.h`, which libc lacks.
const IP_PKTOPTIONS: i32 = 9;
/// `IPV6_2292PKTOPTIONS` of `linux/in6.h`, which libc lacks for some targets.
const IPV6_2292PKTOPTIONS: i32 = 6;

#[derive(Clone, Copy, Debug)]
struct Arrival4;
nix::getsockopt_impl!(
    Arrival4,
    libc::IPPROTO_IP,
    IP_PKTOPTIONS,
    [u8; SPACE4],
    GetStruct<[u8; SPACE4]>
);

#[derive(Clone, Copy, Debug)]
struct Arrival6;
nix::getsockopt_impl!(
    Arrival6,
    libc::IPPROTO_IPV6,
    IPV6_2292PKTOPTIONS,
    [u8; SPACE6],
    GetStruct<[u8; SPACE6]>
);

/// The index of the interface by which an accepted connection arrived.
fn arrival_interface(stream: &impl AsFd, is_ipv4: bool) -> Option<u32> {
    // A connection that was queued before the listener has asked for it: the kernel tells nothing.
    let is_told = if is_ipv4 {
        getsockopt(stream, sockopt::Ipv4PacketInfo)
    } else {
        getsockopt(stream, sockopt::Ipv6RecvPacketInfo)
    };
    if is_told != Ok(true) {
        return None;
    }
    // `ipi_ifindex` is the first field of in_pktinfo, and follows the address in in6_pktinfo.
    let header = size_of::<libc::cmsghdr>();
    let index = if is_ipv4 {
        getsockopt(stream, Arrival4).ok()?.get(header..)?.first_chunk().copied()
    } else {
        getsockopt(stream, Arrival6).ok()?.get(header + 16..)?.first_chunk().copied()
    };
    index.map(u32::from_ne_bytes).filter(|index| *index > 0)
}

/// Answers the queries of a UDP socket. Ends with an error only.
pub async fn serve_datagrams(resolver: Rc<Resolver>, socket: UdpSocket) -> Result<()> {
    let failed = |e: io::Error| Error::io("receive queries", &e);
    let socket = Rc::new(watch_readable(socket).map_err(failed)?);
    let mut buffer = Box::new([0; LONGEST_QUERY]);
    loop {
        let mut ready = socket.readable().await.map_err(failed)?;
        for _ in 0..BATCH {
            match receive_from(socket.get_ref(), &mut buffer) {
                Ok(Some((length, path))) => {
                    // After the query: it may have been sent because of a change.
                    resolver.refresh_containers()?;
                    serve_datagram(&resolver, &socket, path, &buffer[..length]);
                }
                Ok(None) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    ready.clear_ready();
                    break;
                }
                // An ICMP error of an earlier answer.
                Err(error) => resolver.log(format_args!("could not receive a query: {error}")),
            }
        }
        yield_now().await;
    }
}

fn serve_datagram(
    resolver: &Rc<Resolver>,
    socket: &Rc<AsyncFd<UdpSocket>>,
    path: Path,
    message: &[u8],
) {
    let container = match resolver.find_asker(path.interface, path.source.ip()) {
        Some(Asker::Container(container)) => container,
        Some(Asker::Node) => {
            if let Some(answer) = Resolver::answer_node(message) {
                drop(send_answer(socket.get_ref(), &path, &answer));
            }
            return;
        }
        None => return,
    };
    let Some(ticket) = resolver.admit(&container) else { return };
    let (resolver, socket, message) = (Rc::clone(resolver), Rc::clone(socket), message.to_vec());
    spawn_local(async move {
        let Some(answer) = resolver.answer(&ticket, &message, Question::udp_limit).await else {
            return;
        };
        // A container whose answer does not fit in the socket's buffer asks again.
        if let Err(error) = send_answer(socket.get_ref(), &path, &answer) {
            resolver.log(format_args!("could not send an answer: {}", io_text(&error)));
        }
    });
}

/// Serves the connections of a TCP socket. Ends with an error only.
pub async fn serve_connections(
    resolver: Rc<Resolver>,
    listener: std::net::TcpListener,
    connections: Rc<Cell<usize>>,
) -> Result<()> {
    let listener =
        TcpListener::from_std(listener).map_err(|e| Error::io("accept connections", &e))?;
    loop {
        let (stream, source) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                resolver.log(format_args!("could not accept a connection: {error}"));
                sleep(RECOVERY).await;
                continue;
            }
        };
        resolver.refresh_containers()?;
        let Some(asker) = identify(&resolver, &stream, source.ip()) else { continue };
        let Some(counted) = Counted::new(&connections, MOST_OF_ALL) else { continue };
        let own = match &asker {
            Asker::Container(container) => Some(&container.usage.connections),
            Asker::Node => None,
        };
        let own = own.map(|count| Counted::new(count, MOST_OF_CONTAINER));
        if matches!(own, Some(None)) {
            continue;
        }
        let resolver = Rc::clone(&resolver);
        spawn_local(async move {
            let _counted = (counted, own);
            // The container may close the connection at any time.
            drop(serve_connection(&resolver, &stream, source.ip()).await);
        });
    }
}

/// Who has connected: by the arrival interface, or where the kernel does not tell, by the address.
fn identify(resolver: &Resolver, stream: &TcpStream, source: IpAddr) -> Option<Asker> {
    match arrival_interface(stream, source.is_ipv4()) {
        Some(interface) => resolver.find_asker(interface, source),
        None => resolver.find_asker_by_router(stream.local_addr().ok()?.ip(), source),
    }
}

async fn serve_connection(
    resolver: &Resolver,
    stream: &TcpStream,
    source: IpAddr,
) -> io::Result<()> {
    for _ in 0..MOST_QUERIES {
        let message = timeout(IDLE, read_message(stream, LONGEST_QUERY)).await??;
        // The container may have ended meanwhile, or its policies have changed.
        resolver.refresh_containers().map_err(io::Error::other)?;
        let answer = match identify(resolver, stream, source) {
            Some(Asker::Container(container)) => match resolver.admit(&container) {
                Some(ticket) => resolver.answer(&ticket, &message, |_| usize::from(u16::MAX)).await,
                None => None,
            },
            Some(Asker::Node) => Resolver::answer_node(&message),
            None => None,
        };
        let Some(answer) = answer else { return Ok(()) };
        timeout(IDLE, write_message(stream, &answer)).await??;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use nix::net::if_::if_nametoindex;
    use nix::sys::socket::setsockopt;

    use super::*;

    #[test]
    fn the_kernel_tells_how_a_connection_arrived() {
        let lo = if_nametoindex("lo").unwrap();
        for addr in ["127.0.0.1:0", "[::1]:0"] {
            let listener = TcpListener::bind(addr).unwrap();
            let is_ipv4 = listener.local_addr().unwrap().is_ipv4();
            let _early = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            if is_ipv4 {
                setsockopt(&listener, sockopt::Ipv4PacketInfo, &true).unwrap();
            } else {
                setsockopt(&listener, sockopt::Ipv6RecvPacketInfo, &true).unwrap();
            }
            let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let (early, _) = listener.accept().unwrap();
            assert_eq!(arrival_interface(&early, is_ipv4), None, "{addr}");
            let (stream, _) = listener.accept().unwrap();
            assert_eq!(arrival_interface(&stream, is_ipv4), Some(lo), "{addr}");
        }
    }
}
