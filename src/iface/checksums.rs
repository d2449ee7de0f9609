//! The checksum offload of the container's end of a veth pair, which must be off where frames are
//! judged at the other end.
//!
//! With the offload a frame crosses the pair without its checksum, and with the places of the first
//! byte and of the word, which the sender has named: a program by `PACKET_VNET_HDR`, a virtual
//! machine by virtio-net. The kernel writes the word when the node sends the frame on. It can be a
//! part of the destination. Without the offload the word is there before the frame crosses.

use crate::iface::ContainerNetns;
use crate::repairs::RepairFindings;
use cni::error::{Error, Result};

/// Fails if the offload of the interface, whose other end on the host is `end`, is on.
pub fn require_no_offload(inside: &ContainerNetns<'_>, ifname: &str, end: &str) -> Result<()> {
    if !inside.netlink.has_checksum_offload(ifname)? {
        return Ok(());
    }
    Err(Error::internal(format!("{}: checksums are written behind the filter", is_on(ifname, end)))
        .with_details("\"cnibox repair\" switches it off"))
}

/// Switches the offload of the interface off, unless it cannot be read.
pub fn repair_offload(
    inside: &ContainerNetns<'_>,
    ifname: &str,
    end: &str,
    repairs: &mut RepairFindings,
) {
    if inside.netlink.has_checksum_offload(ifname).unwrap_or(false) {
        repairs.restore_missing(is_on(ifname, end), || {
            Ok(inside.netlink.set_checksum_offload(ifname, false)?)
        });
    }
}

fn is_on(ifname: &str, end: &str) -> String {
    format!("the transmit checksum offload of \"{ifname}\" behind port \"{end}\" is on")
}
