//! The identity of an attachment, which owns links, rules and leases.

use std::cell::RefCell;

use sha2::{Digest, Sha512};

use cni::{ContainerId, InterfaceName, NetworkName, ValidAttachment};

/// Hexadecimal digits of each half of an instance's hash.
const HALF: usize = 16;

/// The attachment that owns a link, rule, lease or record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AttachmentId<'a> {
    pub network: &'a str,
    /// The name of the interface in the container.
    pub ifname: &'a str,
    /// The container id.
    pub id: &'a str,
}

impl<'a> AttachmentId<'a> {
    pub fn new(
        network: &'a NetworkName,
        id: &'a ContainerId,
        ifname: &'a InterfaceName,
    ) -> AttachmentId<'a> {
        AttachmentId { network: network.as_str(), ifname: ifname.as_str(), id: id.as_str() }
    }

    pub fn from_attachments(
        network: &'a NetworkName,
        attachments: &'a [ValidAttachment],
    ) -> Vec<AttachmentId<'a>> {
        let owner = |a: &'a ValidAttachment| AttachmentId {
            network: network.as_str(),
            ifname: &a.ifname,
            id: &a.container_id,
        };
        attachments.iter().map(owner).collect()
    }
}

thread_local! {
    /// The last attachment and its instance: a call needs the hash of its attachment twenty times.
    static LAST: RefCell<([String; 3], String)> = RefCell::default();
}

impl AttachmentId<'_> {
    /// The instance: a hash of the attachment, of fixed length. The reference begins the comments
    /// of nftables objects with the same hash.
    pub fn instance_id(&self) -> String {
        LAST.with_borrow_mut(|(attachment, instance)| {
            let names = [self.network, self.ifname, self.id];
            if instance.is_empty() || *attachment != names {
                let half = sha512_hex([self.ifname, ":", self.id].concat(), HALF);
                *instance = format!("{}-{half}", network_hash(self.network));
                *attachment = names.map(str::to_owned);
            }
            instance.clone()
        })
    }
}

/// The [instance](AttachmentId::instance_id) at the beginning of a label; `None` if the text is no
/// label.
pub fn instance_in_label(label: &str) -> Option<&str> {
    let (instance, _) = label.split_once(',')?;
    let (network, attachment) = instance.split_once('-')?;
    let is_half = |text: &str| text.len() == HALF && text.bytes().all(|b| b.is_ascii_hexdigit());
    (is_half(network) && is_half(attachment)).then_some(instance)
}

/// The prefix of the [instances](AttachmentId::instance_id) of a network's attachments.
pub fn network_hash(network: &str) -> String {
    sha512_hex(network, HALF)
}

/// The first digits, at most `length`, of the SHA-512, in hexadecimal.
pub fn sha512_hex(data: impl AsRef<[u8]>, length: usize) -> String {
    let digest = Sha512::digest(data);
    let digits = digest.iter().flat_map(|byte| [byte >> 4, byte & 15]).take(length);
    digits.filter_map(|digit| char::from_digit(digit.into(), 16)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instance_ids_are_read_from_own_labels_only() {
        let owner = AttachmentId { network: "n", ifname: "eth0", id: "c1" };
        let instance = owner.instance_id();
        assert_eq!(
            (owner.instance_id(), instance_in_label(&format!("{instance}, id: c1"))),
            (instance.clone(), Some(instance.as_str()))
        );
        for other in [
            AttachmentId { network: "m", ..owner },
            AttachmentId { ifname: "eth1", ..owner },
            AttachmentId { id: "c2", ..owner },
        ] {
            assert_ne!(other.instance_id(), instance, "{other:?}");
        }
        for other in ["", "uplink, of the printer", &instance, "0123-4567, id: x"] {
            assert_eq!(instance_in_label(other), None, "{other}");
        }
    }
}
