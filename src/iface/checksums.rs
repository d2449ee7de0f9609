//! The checksum offload of the container's end of a veth pair, which must be off where frames are
//! judged at the other end.
//!
//! With the offload a frame crosses the pair without its checksum, and with the places of the first
//! byte and of the word, which the sender has named: a program by `PACKET_VNET_HDR`, a virtual
//! machine by virtio-net. The kernel writes the word when the node sends the frame on. It can be a
//! part of the destination. Without the offload the word is there before the frame crosses.

use crate::iface::{ContainerNetns, peer};
use crate::netlink::{Link, Netlink};
use crate::netns::Netns;
use crate::repairs::RepairFindings;
use cni::error::{Error, Result};

/// Switches the offload of the interface off. Returns whether it was on.
pub fn switch_off(inside: &ContainerNetns<'_>, ifname: &str) -> Result<bool> {
    let was_on = inside.netlink.has_checksum_offload(ifname)?;
    if was_on {
        inside.netlink.set_checksum_offload(ifname, false)?;
    }
    Ok(was_on)
}

/// Switches it on again, if it was on before [`switch_off`].
pub fn restore(inside: &ContainerNetns<'_>, ifname: &str, was_on: bool) -> Result<()> {
    Ok(if was_on { inside.netlink.set_checksum_offload(ifname, true) } else { Ok(()) }?)
}

/// Fails if the offload is on at the other end, in `netns`, of a pair of the host.
pub fn require_no_offload(host: &Netlink, netns: &Netns, end: &Link) -> Result<()> {
    let inside = ContainerNetns::open_in(netns)?;
    let Some(link) = find_sender(host, &inside, end)? else { return Ok(()) };
    if !inside.netlink.has_checksum_offload(&link.name)? {
        return Ok(());
    }
    Err(Error::internal(format!("{}: checksums are written behind the filter", is_on(&link, end)))
        .with_details("\"cnibox repair\" switches it off"))
}

/// Switches the offload off at the other end, in `netns`, unless that cannot be read.
pub fn repair_offload(host: &Netlink, netns: &Netns, end: &Link, repairs: &mut RepairFindings) {
    if let Ok(inside) = ContainerNetns::open_in(netns)
        && let Ok(Some(link)) = find_sender(host, &inside, end)
        && inside.netlink.has_checksum_offload(&link.name).unwrap_or(false)
    {
        let what = is_on(&link, end);
        repairs.restore_missing(what, || switch_off(&inside, &link.name).map(drop));
    }
}

/// The other end of the pair, whatever its name is now; `None` if it is not in the namespace.
fn find_sender(host: &Netlink, inside: &ContainerNetns<'_>, end: &Link) -> Result<Option<Link>> {
    let find = |index| inside.netlink.find_link_by_index(index);
    let Some(link) = end.link.map(find).transpose()?.flatten() else { return Ok(None) };
    let is_paired =
        peer::find_host_end(host, inside, &link)?.is_some_and(|found| found.index == end.index);
    Ok(is_paired.then_some(link))
}

fn is_on(link: &Link, end: &Link) -> String {
    format!("the transmit checksum offload of \"{}\" behind port \"{}\" is on", link.name, end.name)
}
