//! The `ifb` device to which a container's packets are redirected for shaping: one for each
//! attachment. The alias names the attachment, and the host's end of the veth pair.

use crate::attachment::{AttachmentId, network_hash, sha512_hex};
use crate::framework::Rollback;
use crate::netlink::{Link, LinkChange, LinkKind, MacAddress, Netlink, NewLink};
use cni::error::{Error, ErrorContext, Result};

/// The prefix and the length of names, as in the reference.
const PREFIX: &str = "bwp";
const LENGTH: usize = 15;
/// The separator before the name of the host's end in an alias.
const HOST: &str = ", host: ";

/// The possible names of an attachment's device. The first is the reference's, which does not
/// depend on the interface: the first interface of a container in a network gets the name.
pub(super) fn device_names(owner: &AttachmentId<'_>) -> [String; 2] {
    let shared = [owner.network, owner.id];
    [&shared[..], &[owner.network, owner.id, ":", owner.ifname]]
        .map(|texts| format!("{PREFIX}{}", sha512_hex(texts.concat(), LENGTH - PREFIX.len())))
}

/// Whether the link may be a device of the plugin, by its kind and name.
pub(super) fn is_candidate(link: &Link) -> bool {
    link.kind.as_deref() == Some("ifb") && link.name.starts_with(PREFIX)
}

/// The name of the host's end whose packets are redirected to the device.
pub(super) fn host_end_name(ifb: &Link) -> Option<&str> {
    ifb.alias.rsplit_once(HOST).map(|(_, host)| host)
}

/// Whether the link may be the attachment's device. The reference sets no alias, and a killed ADD
/// may not have set it.
fn may_belong_to(link: &Link, owner: &AttachmentId<'_>) -> bool {
    is_candidate(link) && (link.alias.is_empty() || owner.owns_comment(Some(&link.alias)))
}

/// A filter of devices that a killed ADD for the network left, without those of valid attachments.
/// The MAC identifies such a device: the kernel does not accept an alias in the message that
/// creates a link.
pub(super) fn unfinished_device_filter(
    network: &str,
    valid: &[AttachmentId<'_>],
) -> impl Fn(&Link) -> bool {
    let (mac, valid) =
        (network_mac(network), valid.iter().flat_map(device_names).collect::<Vec<_>>());
    move |link| link.alias.is_empty() && link.mac == Some(mac) && !valid.contains(&link.name)
}

/// The MAC of the network's devices, locally administered. No packet has this destination.
fn network_mac(network: &str) -> MacAddress {
    let number = u64::from_str_radix(&network_hash(network), 16).unwrap_or_default();
    let [_, _, mut octets @ ..] = number.to_be_bytes();
    octets[0] = octets[0] & !0b01 | 0b10;
    MacAddress(octets)
}

/// The devices that may be the attachment's.
pub(super) fn find_devices(host: &Netlink, owner: &AttachmentId<'_>) -> Result<Vec<Link>> {
    let mut found = Vec::new();
    for name in device_names(owner) {
        found.extend(host.find_link(&name)?.filter(|link| may_belong_to(link, owner)));
    }
    Ok(found)
}

/// Creates the device under the first unused name.
pub(super) fn create_device<'a>(
    host: &'a Netlink,
    owner: &AttachmentId<'_>,
    mtu: u32,
    undo: &mut Rollback<'a>,
) -> Result<Link> {
    for name in device_names(owner) {
        if host.find_link(&name)?.is_some() {
            continue;
        }
        // Without a queue: packets wait in the token bucket.
        let link = NewLink::new(&name, LinkKind::Ifb)
            .with_mac(network_mac(owner.network))
            .with_mtu(mtu)
            .with_txqlen(0)
            .set_up();
        match host.add_and_read_link(&link) {
            Ok(device) => {
                let index = device.index;
                undo.add_step(format!("delete \"{name}\""), move || {
                    Ok(host.delete_link_by_index(index).map(drop)?)
                });
                return Ok(device);
            }
            // Another interface of the container has got the name meanwhile.
            Err(error) if error.is_exists() => {}
            Err(error) => {
                // The kernel may have created the link, and only its reply was lost.
                if let Err(error) = host.delete_link(&name) {
                    debug!("could not {error}");
                }
                return Err(error).context(|| "adding link");
            }
        }
    }
    Err(Error::internal(format!("adding link: the names {:?} are taken", device_names(owner)))
        .with_details("rename these links of other programs, or remove them: \"ip link del\""))
}

/// Sets the alias, and the MTU of the host's end.
pub(super) fn label_device(
    host: &Netlink,
    ifb: &Link,
    owner: &AttachmentId<'_>,
    end: &Link,
) -> Result<()> {
    let alias = format!("{}{HOST}{}", owner.reference_comment(), end.name);
    let change = LinkChange::new().set_alias(&alias).set_mtu(end.mtu).set_up();
    host.change_link(ifb.index, change).context(|| "label the ifb device")
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: AttachmentId<'_> =
        AttachmentId { network: "cni-plugin-bandwidth-test", ifname: "eth0", id: "dummy" };

    fn ifb(alias: &str) -> Link {
        let (kind, alias) = (Some("ifb".to_owned()), alias.to_owned());
        Link { name: device_names(&OWNER)[0].clone(), kind, alias, ..Link::default() }
    }

    #[test]
    fn the_first_device_name_equals_the_references() {
        let [first, second] = device_names(&OWNER);
        assert_eq!(first, "bwpa8eda89404b7");
        assert!(second.len() == LENGTH && second != first);
        let other = device_names(&AttachmentId { ifname: "eth1", ..OWNER });
        assert!(other[0] == first && other[1] != second);
    }

    #[test]
    fn aliases_name_the_owner() {
        let alias = format!("{}{HOST}veth12345678", OWNER.reference_comment());
        let ours = ifb(&alias);
        assert!(may_belong_to(&ours, &OWNER));
        assert_eq!(host_end_name(&ours), Some("veth12345678"));
        assert!(!may_belong_to(&ours, &AttachmentId { ifname: "eth1", ..OWNER }));
        assert!(may_belong_to(&ifb(""), &OWNER));
        assert_eq!(host_end_name(&ifb("")), None);
        assert!(!may_belong_to(&ifb("mine"), &OWNER));
        let bridge = Link { kind: Some("bridge".to_owned()), ..ifb("") };
        assert!(!may_belong_to(&bridge, &OWNER));
    }
}
