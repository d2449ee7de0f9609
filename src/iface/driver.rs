//! Whether the kernel supports a kind of link, for STATUS.

use crate::error::Result;
use crate::netlink::{LinkKind, Netlink, NewLink, VethPeer};
use crate::netns::Netns;

/// Creates a link in a temporary network namespace: there is no other way to learn whether the driver exists. `kind`
/// gets the index of an Ethernet link to use as the master.
pub fn require<'k>(kind: impl FnOnce(u32) -> LinkKind<'k>) -> Result<()> {
    let elsewhere = Netns::fresh()?;
    let netlink = Netlink::open_in(&elsewhere)?;
    let pair = LinkKind::Veth { peer: VethPeer::new("peer") };
    let master = netlink.create_link(&NewLink::new("master", pair))?;
    Ok(netlink.add_link(&NewLink::new("link", kind(master.index)))?)
}
