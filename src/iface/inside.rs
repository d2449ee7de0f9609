//! A container's network namespace, and a netlink socket in it.

use std::iter;

use crate::netlink::{Link, Netlink};
use crate::netns::Netns;
use cni::error::{Error, Result};

/// The remedy for a name that is taken in the container.
pub(super) const DEL_FIRST: &str =
    "run DEL first, as an earlier ADD was not followed by one, or CNI_IFNAME is taken";

#[derive(Debug)]
pub struct ContainerNetns<'a> {
    pub netns: &'a Netns,
    pub netlink: Netlink,
    /// The key `acceptRA`: false refuses router advertisements of the interface.
    pub accept_ra: Option<bool>,
}

impl<'a> ContainerNetns<'a> {
    /// Opens a netlink socket in `netns`.
    pub fn open_in(netns: &'a Netns) -> Result<ContainerNetns<'a>> {
        Ok(ContainerNetns { netns, netlink: Netlink::open_in(netns)?, accept_ra: None })
    }

    /// The identity of the namespace within this boot: its [cookie](crate::netns::current_cookie), or
    /// before Linux 5.14 its inode number, which the kernel uses again.
    pub fn id(&self) -> Option<u64> {
        self.ids().next()
    }

    /// Whether the namespace has this [`id`](ContainerNetns::id). A call that could not ask for the
    /// cookie has recorded the inode number.
    pub fn has_id(&self, id: u64) -> bool {
        self.ids().any(|own| own == id)
    }

    fn ids(&self) -> impl Iterator<Item = u64> {
        let inode = || self.netns.device_and_inode().ok().map(|(_, inode)| inode);
        self.netlink.netns_cookie().into_iter().chain(iter::once_with(inode).flatten())
    }

    /// The same for an interface that is configured as `accept_ra` says.
    #[must_use]
    pub fn with_accept_ra(self, accept_ra: Option<bool>) -> ContainerNetns<'a> {
        ContainerNetns { accept_ra, ..self }
    }

    /// Fails if the container has a link called `ifname`.
    pub fn require_free_name(&self, ifname: &str) -> Result<()> {
        if self.netlink.find_link(ifname)?.is_none() {
            return Ok(());
        }
        let msg = format!("container already has an interface \"{ifname}\"");
        Err(Error::internal(msg).with_details(DEL_FIRST))
    }

    /// The link called `ifname`; fails if there is none.
    pub fn require_link(&self, ifname: &str) -> Result<Link> {
        Ok(self.netlink.require_link(ifname)?)
    }
}
