//! The forwarding database of a bridge: the MAC addresses that were seen behind its ports, and
//! those of the host.

use nix::errno::Errno;
use nix::libc::RTM_GETNEIGH;
use rtnetlink::packet_route::AddressFamily;

use super::attribute::{parse_attributes, read_u32_at};
use super::error::NetlinkResult;
use super::request::NetlinkRequest;
use super::{MacAddress, Netlink};

// `linux/neighbour.h`; libc lacks the first everywhere, and the second with musl.
const NDA_LLADDR: u16 = 2;
const NDA_MASTER: u16 = 9;
/// Length of `struct ndmsg`.
const NDMSG: usize = 12;
/// Offset of the index of the link in `struct ndmsg`.
const IFINDEX_AT: usize = 4;

/// A MAC address, and the port through which frames to this address leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FdbEntry {
    /// The index of the port, or of the bridge for the host.
    pub port: u32,
    pub mac: MacAddress,
}

impl FdbEntry {
    fn parse(body: &[u8]) -> Option<FdbEntry> {
        let port = read_u32_at(body, IFINDEX_AT)?;
        let mac = parse_attributes(body.get(NDMSG..)?).find(|attr| attr.kind == NDA_LLADDR)?;
        Some(FdbEntry { port, mac: MacAddress::from_bytes(mac.value)? })
    }
}

impl Netlink {
    /// The entry of a MAC address without a VLAN in the forwarding database of the bridge.
    pub fn find_fdb_entry(&self, bridge: u32, mac: MacAddress) -> NetlinkResult<Option<FdbEntry>> {
        let mut header = [0; NDMSG];
        header[0] = AddressFamily::Bridge.into();
        let mut request = NetlinkRequest::new(RTM_GETNEIGH, &header);
        request.body.put_u32(NDA_MASTER, bridge).put_bytes(NDA_LLADDR, &mac.0);
        match self.socket.request_object(&request) {
            Ok(body) => Ok(FdbEntry::parse(&body)),
            Err(failure) if failure.refusal_errno() == Some(Errno::ENOENT) => Ok(None),
            Err(failure) => {
                let target = format!("{mac} at {}", self.link_label(bridge));
                Err(failure.into_error("look up", &target))
            }
        }
    }

    /// The forwarding database of the bridge with this index. A MAC address has an entry for each
    /// VLAN.
    pub fn dump_fdb(&self, bridge: u32) -> NetlinkResult<Vec<FdbEntry>> {
        let mut header = [0; NDMSG];
        header[0] = AddressFamily::Bridge.into();
        let mut request = NetlinkRequest::new(RTM_GETNEIGH, &header);
        request.body.put_u32(NDA_MASTER, bridge);
        let target = self.link_label(bridge);
        self.socket.request_list(
            &request,
            "list the forwarding database of",
            &target,
            FdbEntry::parse,
        )
    }
}
