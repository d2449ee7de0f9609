//! The checksum offload of a link: what the link sends may leave without its checksum, which the
//! receiver of a frame, or a card, then writes at the place that the sender has named.
//!
//! A socket of any kind accepts the ioctl, and acts in the network namespace of the socket.

use std::os::fd::{AsFd, AsRawFd};
use std::ptr;

use nix::errno::Errno;
use nix::libc::{self, c_char};

use super::Netlink;
use super::error::{NetlinkResult, RequestFailure};

/// From `linux/sockios.h`; libc lacks it.
const SIOCETHTOOL: libc::Ioctl = 0x8946;

/// From `linux/ethtool.h`. They read and set all offloads of checksums of sent frames, that of SCTP
/// too.
const ETHTOOL_GTXCSUM: u32 = 0x16;
const ETHTOOL_STXCSUM: u32 = 0x17;

/// `struct ethtool_value` of `linux/ethtool.h`.
#[repr(C)]
struct EthtoolValue {
    command: u32,
    data: u32,
}

impl Netlink {
    /// Whether frames can leave the link without their checksum (`ethtool -k`).
    pub fn has_checksum_offload(&self, link: &str) -> NetlinkResult<bool> {
        Ok(self.call_ethtool(link, "read", ETHTOOL_GTXCSUM, 0)? != 0)
    }

    /// Changes it (`ethtool -K NAME tx off`). Without it the kernel writes the checksum before the
    /// link gets the frame, and splits large packets.
    pub fn set_checksum_offload(&self, link: &str, is_on: bool) -> NetlinkResult<()> {
        self.call_ethtool(link, "set", ETHTOOL_STXCSUM, is_on.into()).map(drop)
    }

    #[expect(unsafe_code, reason = "the kernel offers no other way without a second socket")]
    fn call_ethtool(
        &self,
        link: &str,
        op: &'static str,
        command: u32,
        data: u32,
    ) -> NetlinkResult<u32> {
        let mut value = EthtoolValue { command, data };
        let mut name: [c_char; libc::IFNAMSIZ] = [0; libc::IFNAMSIZ];
        // The last byte remains NUL.
        for (to, from) in name[..libc::IFNAMSIZ - 1].iter_mut().zip(link.bytes()) {
            *to = c_char::from_ne_bytes([from]);
        }
        let pointer = ptr::from_mut(&mut value).cast();
        let mut request = libc::ifreq {
            ifr_name: name,
            ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_data: pointer },
        };
        // SAFETY: the kernel reads and writes one `struct ifreq`, and the `struct ethtool_value`
        // that it points to; both outlive the call, and any bytes are valid integers.
        let done =
            unsafe { libc::ioctl(self.socket.as_fd().as_raw_fd(), SIOCETHTOOL, &raw mut request) };
        Errno::result(done)
            .map_err(|errno| RequestFailure::from(errno).into_error(op, &of_link(link)))?;
        Ok(value.data)
    }
}

fn of_link(link: &str) -> String {
    format!("checksum offload of \"{link}\"")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::{LinkKind, NewLink, VethPeer};
    use crate::netns::{Netns, isolate_test_thread};

    #[test]
    fn the_offload_is_that_of_the_sockets_namespace() {
        isolate_test_thread();
        let (host, container) = (Netlink::open().unwrap(), Netns::create_unnamed().unwrap());
        let inside = Netlink::open_in(&container).unwrap();
        let peer = VethPeer::new("eth0").with_netns(container.as_fd());
        host.add_link(&NewLink::new("eth0", LinkKind::Veth { peer })).unwrap();
        let both = || [&host, &inside].map(|netlink| netlink.has_checksum_offload("eth0").unwrap());
        assert_eq!(both(), [true, true]);
        inside.set_checksum_offload("eth0", false).unwrap();
        assert_eq!(both(), [true, false]);
        inside.set_checksum_offload("eth0", true).unwrap();
        assert_eq!(both(), [true, true]);
    }

    #[test]
    fn a_refusal_names_the_link() {
        isolate_test_thread();
        let error = Netlink::open().unwrap().set_checksum_offload("eth7", false).unwrap_err();
        assert!(error.is_not_found());
        assert_eq!(error.to_string(), "set checksum offload of \"eth7\": no such device");
    }
}
