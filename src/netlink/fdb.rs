//! The forwarding database of a bridge: the MACs that were seen behind its ports, and those of the host.

use nix::libc::{NDA_MASTER, RTM_GETNEIGH};
use rtnetlink::packet_route::AddressFamily;

use super::attribute::{attrs, word};
use super::error::Result;
use super::request::Request;
use super::{Mac, Netlink};

// Missing in libc.
const NDA_LLADDR: u16 = 2;
/// Length of `struct ndmsg`.
const NDMSG: usize = 12;
/// Offset of the index of the link in `struct ndmsg`.
const IFINDEX_AT: usize = 4;

/// A MAC and the port that frames to it leave by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FdbEntry {
    /// The index of the port, or of the bridge for the host.
    pub port: u32,
    pub mac: Mac,
}

impl FdbEntry {
    fn parse(body: &[u8]) -> Option<FdbEntry> {
        let port = word(body, IFINDEX_AT)?;
        let mac = attrs(body.get(NDMSG..)?).find(|attr| attr.kind == NDA_LLADDR)?;
        Some(FdbEntry { port, mac: Mac::from_bytes(mac.value)? })
    }
}

impl Netlink {
    /// The forwarding database of the bridge with this index. A MAC has an entry for each VLAN.
    pub fn dump_fdb(&self, bridge: u32) -> Result<Vec<FdbEntry>> {
        let mut header = [0; NDMSG];
        header[0] = AddressFamily::Bridge.into();
        let mut request = Request::new(RTM_GETNEIGH, &header);
        request.body.u32(NDA_MASTER, bridge);
        let target = self.label(bridge);
        self.socket.list(&request, "list the forwarding database of", &target, FdbEntry::parse)
    }
}
