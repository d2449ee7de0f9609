//! Neighbours: the link-layer addresses of addresses on links of the host.

use std::net::IpAddr;

use nix::libc::{self, RTM_GETNEIGH};

use super::attribute::parse_attributes;
use super::error::NetlinkResult;
use super::request::NetlinkRequest;
use super::{IpFamily, Netlink};

/// `NDA_DST` (`linux/neighbour.h`), missing in the libc of musl.
const NDA_DST: u16 = 1;
/// Length of `struct ndmsg`.
const NDMSG: usize = 12;
/// Offset of the state in `struct ndmsg`.
const STATE_AT: usize = 8;

/// The states in which the kernel has heard from the neighbour, or was told of it.
const HEARD: u16 =
    libc::NUD_REACHABLE | libc::NUD_STALE | libc::NUD_DELAY | libc::NUD_PROBE | libc::NUD_PERMANENT;

/// The address of an entry, if the neighbour was heard.
fn parse_heard(body: &[u8]) -> Option<IpAddr> {
    let state = u16::from_ne_bytes([*body.get(STATE_AT)?, *body.get(STATE_AT + 1)?]);
    let address = parse_attributes(body.get(NDMSG..)?).find(|attr| attr.kind == NDA_DST)?;
    address.to_ip().filter(|_| state & HEARD != 0)
}

impl Netlink {
    /// Whether the kernel knows a neighbour with this address on any link.
    pub fn has_neighbour(&self, addr: IpAddr) -> NetlinkResult<bool> {
        let mut header = [0; NDMSG];
        header[0] = IpFamily::af_number(Some(IpFamily::of_address(addr)));
        let request = NetlinkRequest::new(RTM_GETNEIGH, &header);
        let heard = self.socket.request_list(&request, "list", &"neighbours", parse_heard)?;
        Ok(heard.contains(&addr))
    }
}
