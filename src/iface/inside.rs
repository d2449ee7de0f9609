//! A container: its namespace and a netlink socket in it.

use crate::error::{Error, Result};
use crate::netlink::{Link, Netlink};
use crate::netns::Netns;

/// The remedy for a name that is taken in the container.
pub(super) const DEL_FIRST: &str =
    "run DEL first, as an earlier ADD was not followed by one, or CNI_IFNAME is taken";

#[derive(Debug)]
pub struct Inside<'a> {
    pub netns: &'a Netns,
    pub netlink: Netlink,
}

impl<'a> Inside<'a> {
    /// Opens a netlink socket in `netns`.
    pub fn enter(netns: &'a Netns) -> Result<Inside<'a>> {
        Ok(Inside { netns, netlink: Netlink::open_in(netns)? })
    }

    /// Fails if the container has a link called `ifname`.
    pub fn require_free(&self, ifname: &str) -> Result<()> {
        if self.netlink.link(ifname)?.is_none() {
            return Ok(());
        }
        let msg = format!("container already has an interface \"{ifname}\"");
        Err(Error::internal(msg).with_details(DEL_FIRST))
    }

    /// The link called `ifname`; fails if there is none.
    pub fn link(&self, ifname: &str) -> Result<Link> {
        Ok(self.netlink.require_link(ifname)?)
    }
}
