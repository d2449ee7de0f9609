//! The kernel's links, addresses and routes.
//!
//! [`Netlink`] is one socket in one network namespace with plain, synchronous methods. Below it
//! rtnetlink's connection runs on a single-threaded tokio runtime, one for each thread, which
//! turns only inside a request. Nothing outside this folder sees a packet: lookups return
//! [`Link`], [`Addr`] and [`Route`], changes take [`NewLink`], [`LinkChange`], [`NewAddr`] and
//! [`Route`].
//!
//! The verbs: `x` looks up, `require_x` fails when there is none, `add_x` fails when there is
//! one, `del_x` tells whether there was one, `dump_x` lists.
//!
//! | file | |
//! | --- | --- |
//! | `request.rs` | the one place that sends, collects answers and decodes errors |
//! | `packet.rs` | messages and attributes as bytes |
//! | `link.rs`, `tun.rs`, `new_link.rs`, `link_change.rs` | links: reading, creating, changing |
//! | `nsid.rs` | the numbers of other namespaces |
//! | `bridge_vlan.rs` | VLANs of the ports of bridges |
//! | `addr.rs`, `route.rs`, `rule.rs` | addresses, routes, policy rules |
//! | `events.rs` | waiting for the kernel instead of sleeping |
//! | `traffic/` | traffic control: qdiscs and filters |
//! | `attribute.rs`, `netfilter.rs` | attributes, netfilter's messages and its socket |
//! | `socket.rs` | the socket below the connection of rtnetlink |
//! | `later.rs` | closing that socket without waiting |
//! | `nftables/` | the packet filter |
//! | `conntrack.rs` | forgetting connections |

mod addr;
mod attribute;
mod bridge_vlan;
pub mod conntrack;
mod error;
mod events;
#[doc(hidden)]
pub mod fuzz;
mod later;
mod link;
mod link_change;
mod mac;
mod netfilter;
mod new_link;
pub mod nftables;
mod nsid;
mod packet;
mod request;
mod route;
mod rule;
mod socket;
#[cfg(test)]
mod tests;
pub mod traffic;
mod tun;

use std::cell::{OnceCell, RefCell, RefMut};
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::rc::Rc;

use nix::errno::Errno;
use rtnetlink::proto::{NetlinkCodec, from_socket_with_codec};
use rtnetlink::sys::AsyncSocket;
use rtnetlink::sys::protocols::NETLINK_ROUTE;
use tokio::runtime::{self, Runtime};

pub use self::addr::{Addr, Dad, Lifetime, NewAddr};
pub use self::bridge_vlan::{PortVlans, Tagging, VlanPort};
use self::error::Failure;
pub use self::error::{Error, Result};
pub use self::events::Waited;
pub use self::link::{BridgeInfo, BridgePort, Link, MacvlanInfo, OperState, Parent};
pub use self::link_change::{LinkChange, Switch};
pub use self::mac::{InvalidMac, Mac};
pub use self::new_link::{IpvlanMode, LinkKind, MacvlanMode, NewLink, VethPeer};
use self::packet::Packet;
use self::request::Channel;
pub use self::route::{Family, NextHop, RT_TABLE_MAIN, Route, RouteFilter, RouteMode};
pub use self::rule::Rule;
use self::socket::RouteSocket;
pub use self::tun::TunInfo;
use crate::netns::{self, Netns};

/// A netlink socket in one network namespace. It belongs to the thread that made it, and must
/// not be used inside an async task.
pub struct Netlink {
    // Before the runtime: it deregisters its socket there when it is dropped.
    channel: RefCell<Channel>,
    runtime: Rc<Runtime>,
    home: Home,
}

/// Where another socket is opened in place of one that failed.
enum Home {
    /// In the calling thread's namespace.
    Here,
    In(Netns),
}

impl Home {
    fn open(&self, runtime: &Runtime) -> Result<RouteSocket> {
        let runtime = runtime.handle();
        match self {
            Home::Here => open(runtime),
            Home::In(ns) => ns.run(|| open(runtime))?,
        }
    }
}

impl Netlink {
    /// A socket in the calling thread's namespace.
    pub fn open() -> Result<Netlink> {
        Netlink::new(Home::Here)
    }

    /// A socket in `ns`, for use on the calling thread.
    pub fn open_in(ns: &Netns) -> Result<Netlink> {
        Netlink::new(Home::In(ns.try_clone()?))
    }

    fn new(home: Home) -> Result<Netlink> {
        let runtime = runtime().map_err(opening)?;
        let channel = Channel::new(home.open(&runtime)?);
        Ok(Netlink { channel: RefCell::new(channel), runtime, home })
    }

    /// The connection, over a new socket if the last one failed. netlink-proto would send what could
    /// not be sent with the next request, which may be there to undo it, and give up that one too.
    fn channel(&self) -> Result<RefMut<'_, Channel>, Failure> {
        let mut channel = self.channel.try_borrow_mut().map_err(|_| Errno::EBUSY)?;
        if channel.broken {
            let socket = self.home.open(&self.runtime).map_err(|_| Errno::ECONNRESET)?;
            *channel = Channel::new(socket);
        }
        Ok(channel)
    }
}

impl Channel {
    fn new(socket: RouteSocket) -> Channel {
        let (mut connection, handle, unsolicited) =
            from_socket_with_codec::<Packet, RouteSocket, NetlinkCodec>(socket);
        // Without these an error at the end of a dump, and a connection that was lost before
        // the acknowledgement, would look like success.
        connection.set_forward_done(true);
        connection.set_forward_ack(true);
        let events = VecDeque::new();
        Channel { connection, handle, unsolicited, joined: false, events, broken: false }
    }
}

impl fmt::Debug for Netlink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Netlink").finish_non_exhaustive()
    }
}

/// Opens a socket in the namespace of the calling thread, for use by this runtime.
fn open(runtime: &runtime::Handle) -> Result<RouteSocket> {
    netns::at_home()?;
    let _registers_there = runtime.enter();
    let mut opened = RouteSocket::new(NETLINK_ROUTE).map_err(opening)?;
    let socket = opened.socket_mut();
    // Errors with a sentence and without a copy of the request, and filters that are not
    // ignored: kernels before 4.20 do without.
    let options = [
        socket.set_ext_ack(true),
        socket.set_cap_ack(true),
        socket.set_netlink_get_strict_chk(true),
    ];
    drop(options);
    Ok(opened)
}

/// The calling thread's runtime, made at its first use.
fn runtime() -> io::Result<Rc<Runtime>> {
    thread_local!(static RUNTIME: OnceCell<Rc<Runtime>> = const { OnceCell::new() });
    RUNTIME.with(|cell| {
        if let Some(runtime) = cell.get() {
            return Ok(Rc::clone(runtime));
        }
        let made = Rc::new(runtime::Builder::new_current_thread().enable_all().build()?);
        Ok(Rc::clone(cell.get_or_init(|| made)))
    })
}

fn opening(cause: io::Error) -> Error {
    Failure::from(cause).doing("open", || "netlink socket".to_owned())
}
