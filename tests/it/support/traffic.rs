//! Traffic between the host and containers, and among containers.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::node::{Container, Node};

const LIMIT: Duration = Duration::from_secs(5);

/// A place where sockets can be opened.
pub(crate) trait Place {
    /// Runs code in this place.
    fn within<T: Send>(&self, code: impl FnOnce() -> T + Send) -> T;

    /// Whether a ping to `target` is answered within `seconds`. Pings are repeated, because the
    /// kernel adds the local route of an IPv6 address in a work queue, after the address.
    fn reaches_within(&self, target: &str, seconds: u32) -> bool {
        // An ICMP error ends ping(8) at once. Routers send such errors while the global address is
        // tentative, because their source is link-local then.
        let deadline = Instant::now() + Duration::from_secs(seconds.into());
        let limit = seconds.min(3).to_string();
        self.within(|| {
            loop {
                let mut ping = Command::new("ping");
                ping.args(["-n", "-c", "1", "-w", &limit, target]);
                ping.stdout(Stdio::null()).stderr(Stdio::null());
                if ping.status().unwrap().success() {
                    return true;
                }
                if Instant::now() >= deadline {
                    return false;
                }
                thread::sleep(Duration::from_millis(100));
            }
        })
    }

    /// Whether a ping to `target` is answered.
    fn reaches(&self, target: &str) -> bool {
        self.reaches_within(target, PATIENCE)
    }
}

impl Place for Node {
    fn within<T: Send>(&self, code: impl FnOnce() -> T + Send) -> T {
        code()
    }
}

impl Place for Container {
    fn within<T: Send>(&self, code: impl FnOnce() -> T + Send) -> T {
        self.run(code)
    }
}

/// The timeout, in seconds, of a ping that should be answered. See `converse` for the reason.
pub(crate) const PATIENCE: u32 = 20;

/// A TCP request and reply with a server at `ip` in `server`.
#[track_caller]
pub(crate) fn tcp(client: &impl Place, server: &impl Place, ip: &str) {
    let ip: IpAddr = ip.parse().unwrap();
    let listener = server.within(|| TcpListener::bind((ip, 0)).unwrap());
    let address = listener.local_addr().unwrap();
    converse(client, &listener, address);
}

/// The same via `address`, which is translated to `port` of any IPv4 address in `server`.
#[track_caller]
pub(crate) fn tcp_through(client: &impl Place, server: &impl Place, address: &str, port: u16) {
    let any = Ipv4Addr::UNSPECIFIED;
    let listener = server.within(|| TcpListener::bind((any, port)).unwrap());
    converse(client, &listener, address.parse().unwrap());
}

#[track_caller]
fn converse(client: &impl Place, listener: &TcpListener, address: SocketAddr) {
    // During duplicate address detection the kernel does not answer for the IPv6 address, and
    // connecting fails with "no route to host".
    let connect = || TcpStream::connect_timeout(&address, LIMIT);
    let near = client.within(|| (0..6).find_map(|_| connect().ok()));
    let mut near = near.expect("no connection");
    near.set_read_timeout(Some(LIMIT)).unwrap();
    let (mut far, _) = listener.accept().unwrap();
    far.set_read_timeout(Some(LIMIT)).unwrap();
    near.write_all(b"question").unwrap();
    assert_eq!(read::<8>(&mut far), *b"question");
    far.write_all(b"answer").unwrap();
    assert_eq!(read::<6>(&mut near), *b"answer");
}

/// The same over UDP. Returns the client address that the server sees.
#[track_caller]
pub(crate) fn udp(client: &impl Place, server: &impl Place, ip: &str) -> IpAddr {
    let ip: IpAddr = ip.parse().unwrap();
    let open = |address: SocketAddr| {
        let socket = UdpSocket::bind(address).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket
    };
    let far = server.within(|| open((ip, 0).into()));
    let any: IpAddr = if ip.is_ipv4() { "0.0.0.0" } else { "::" }.parse().unwrap();
    let near = client.within(|| open((any, 0).into()));
    near.send_to(b"question", far.local_addr().unwrap()).unwrap();
    let mut buffer = [0; 16];
    let (length, from) = far.recv_from(&mut buffer).unwrap();
    assert_eq!(buffer[..length], *b"question");
    far.send_to(b"answer", from).unwrap();
    let (length, _) = near.recv_from(&mut buffer).unwrap();
    assert_eq!(buffer[..length], *b"answer");
    from.ip()
}

fn read<const N: usize>(stream: &mut TcpStream) -> [u8; N] {
    let mut buffer = [0; N];
    stream.read_exact(&mut buffer).unwrap();
    buffer
}
