//! The numbers by which one network namespace knows another.

use std::os::fd::{AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::libc::RTM_GETNSID;
use rtnetlink::packet_route::nsid::{NsidAttribute, NsidMessage};

use super::Netlink;
use super::error::{Failure, Result};
use super::packet::{Packet, attrs};

/// `NETNSA_NSID`, missing in libc.
const NETNSA_NSID: u16 = 1;
/// `NETNSA_CURRENT_NSID`, missing in libc.
const NETNSA_CURRENT_NSID: u16 = 5;
/// Length of `struct rtgenmsg`, padded.
const HEADER_LEN: usize = 4;

impl Netlink {
    /// The number of the namespace `netns` in this socket's one, if it has one there. The kernel
    /// gives it when it first shows a link whose other end is in `netns`; it is never changed.
    pub fn nsid(&self, netns: BorrowedFd<'_>) -> Result<Option<i32>> {
        let fd = u32::try_from(netns.as_raw_fd()).unwrap_or(u32::MAX);
        Ok(self.nsids(vec![NsidAttribute::Fd(fd)])?.0)
    }

    /// The number that the namespace `nsid` has in the namespace `there`, both as this one calls
    /// them; `None` before Linux 5.0.
    pub fn nsid_in(&self, there: i32, nsid: i32) -> Result<Option<i32>> {
        let asked = vec![NsidAttribute::Id(nsid), NsidAttribute::TargetNsid(there)];
        let (found, translated) = self.nsids(asked)?;
        // Older kernels skip what they do not know, and answer for this namespace.
        Ok(found.filter(|_| translated == Some(nsid)))
    }

    /// `NETNSA_NSID` and `NETNSA_CURRENT_NSID` of the answer.
    fn nsids(&self, attributes: Vec<NsidAttribute>) -> Result<(Option<i32>, Option<i32>)> {
        let mut message = NsidMessage::default();
        message.attributes = attributes;
        let body = match self.one(Packet::new(RTM_GETNSID, &message)) {
            // A number that no namespace has any more.
            Err(Failure { errno: Errno::ENOENT | Errno::EINVAL, unanswered: false, .. }) => {
                return Ok((None, None));
            }
            answer => answer.map_err(|e| e.doing("look up", || "namespace id".to_owned()))?,
        };
        let answer = body.get(HEADER_LEN..).unwrap_or_default();
        let number = |kind| attrs(answer).find(|attr| attr.kind == kind)?.i32();
        let assigned = |nsid: &i32| *nsid >= 0;
        Ok((number(NETNSA_NSID).filter(assigned), number(NETNSA_CURRENT_NSID).filter(assigned)))
    }
}
