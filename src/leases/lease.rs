//! A lease: the attachment that owns an address, and the lease's file.

use std::fmt;
use std::net::IpAddr;
use std::time::Duration;

use crate::attachment::{AttachmentId, EndedBy};
use crate::files::lock;
use cni::names::is_identifier;

/// The keys for leases in the configuration of a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseOptions {
    /// How long to wait for the lock.
    pub lock_timeout: Duration,
    /// Time before a freed address is allocated again.
    pub reuse_delay: Duration,
}

impl Default for LeaseOptions {
    fn default() -> LeaseOptions {
        LeaseOptions { lock_timeout: lock::TIMEOUT, reuse_delay: Duration::ZERO }
    }
}

/// A lease, as in its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressLease {
    /// The address: the file's name.
    pub ip: IpAddr,
    /// The container id.
    pub id: String,
    /// The container's interface; `None` in files of the reference up to release 0.7.5, which name
    /// only the container.
    pub ifname: Option<String>,
}

impl AddressLease {
    pub(super) fn new(ip: IpAddr, owner: AttachmentId<'_>) -> AddressLease {
        AddressLease { ip, id: owner.id.to_owned(), ifname: Some(owner.ifname.to_owned()) }
    }

    /// The attachment in `network`; `None` if the lease names only a container.
    pub fn attachment_in<'a>(&'a self, network: &'a str) -> Option<AttachmentId<'a>> {
        Some(AttachmentId { network, ifname: self.ifname.as_deref()?, id: &self.id })
    }

    /// Whether the lease names this owner, or the owner's container and no interface.
    pub(super) fn is_held_by(&self, owner: AttachmentId<'_>) -> bool {
        self.id == owner.id && self.ifname.as_deref().is_none_or(|ifname| ifname == owner.ifname)
    }

    pub(super) fn file_text(&self) -> String {
        match &self.ifname {
            Some(ifname) => format!("{}\r\n{ifname}", self.id),
            None => self.id.clone(),
        }
    }

    /// Parses a lease's file; `None` if the text is no lease in either form: an administrator may
    /// reserve an address by a file with any text.
    pub(super) fn parse_file(ip: IpAddr, content: &[u8]) -> Option<AddressLease> {
        let text = std::str::from_utf8(content).ok()?.trim();
        if text.contains(|c: char| c.is_control() && c != '\r' && c != '\n') {
            return None;
        }
        let (id, ifname) = match text.split_once("\r\n") {
            Some((_, ifname)) if !is_interface_name(ifname) => return None,
            Some((id, ifname)) => (id.trim_end(), Some(ifname.to_owned())),
            None => (text, None),
        };
        is_identifier(id).then(|| AddressLease { ip, id: id.to_owned(), ifname })
    }
}

impl fmt::Display for AddressLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of container {}", self.ip, self.id)?;
        self.ifname.as_ref().map_or(Ok(()), |ifname| write!(f, ", interface {ifname}"))
    }
}

/// A lease of an attachment that has ended. The lease is, or will be, removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReclaimedLease {
    pub lease: AddressLease,
    pub why: EndedBy,
}

impl fmt::Display for ReclaimedLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.lease, self.why)
    }
}

/// Whether the kernel accepts `name` as the name of a link.
fn is_interface_name(name: &str) -> bool {
    (1..=15).contains(&name.len())
        && !name.contains(|c: char| c.is_whitespace() || "/:".contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_files_of_all_writers_are_parsed() {
        let ip: IpAddr = "10.1.2.3".parse().unwrap();
        let parse =
            |content: &[u8]| AddressLease::parse_file(ip, content).map(|l| (l.id, l.ifname));
        let new = Some(("c1".to_owned(), Some("eth0".to_owned())));
        let old = Some(("c1".to_owned(), None));
        assert_eq!(parse(b"c1\r\neth0"), new);
        assert_eq!(parse(b" c1 \r\neth0\n"), new);
        assert_eq!(parse(b"c1"), old);
        assert_eq!(parse(b"c1\r\n"), old);
        let others: [&[u8]; 13] = [
            b"",
            b"  \r\n",
            b"\0\0\0\0",
            b"c1\r\n\0\0\0",
            b"_c1\r\neth0",
            b"c 1",
            b"\xff\xfe",
            b"c1\neth0",
            b"c1\r\neth0 of the printer",
            b"c1\r\nlonger-than-a-name-can-be",
            b"c1\r\neth0\r\neth1",
            b"reserved for the printer\n",
            b"# do not use",
        ];
        for content in others {
            assert_eq!(parse(content), None, "{content:?}");
        }
    }
}
