//! Whether the kernel can make links of a kind: STATUS asks before a container does.

use crate::error::Result;
use crate::netlink::{LinkKind, Netlink, NewLink, VethPeer};
use crate::netns::Netns;

/// Makes a link in a network namespace of its own, which vanishes at once: only the driver can tell that it is
/// there. `kind` gets the index of an Ethernet link for the new one to be on.
pub fn require<'k>(kind: impl FnOnce(u32) -> LinkKind<'k>) -> Result<()> {
    let elsewhere = Netns::fresh()?;
    let netlink = Netlink::open_in(&elsewhere)?;
    let pair = LinkKind::Veth { peer: VethPeer::new("peer") };
    let master = netlink.create_link(&NewLink::new("master", pair))?;
    Ok(netlink.add_link(&NewLink::new("link", kind(master.index)))?)
}
