//! The `ifb` device to which a container's packets are redirected for shaping: one for each attachment. The alias names
//! the attachment, and the host's end of the veth pair.

use crate::attachment::{Owner, hash, network_hash};
use crate::error::{Context, Error, Result};
use crate::log;
use crate::netlink::{Link, LinkChange, LinkKind, Mac, Netlink, NewLink};
use crate::skel::Rollback;

/// The prefix and the length of names, as in the reference.
const PREFIX: &str = "bwp";
const LENGTH: usize = 15;
/// The separator before the name of the host's end in an alias.
const HOST: &str = ", host: ";

/// The possible names of an attachment's device. The first is the reference's, which does not depend on the interface:
/// the first interface of a container in a network gets the name.
pub(super) fn names(owner: &Owner<'_>) -> [String; 2] {
    let shared = [owner.network, owner.id];
    [&shared[..], &[owner.network, owner.id, ":", owner.ifname]].map(|texts| {
        let mut name = format!("{PREFIX}{}", hash(texts));
        name.truncate(LENGTH);
        name
    })
}

/// Whether the link may be a device of the plugin, by its kind and name.
pub(super) fn is_candidate(link: &Link) -> bool {
    link.kind.as_deref() == Some("ifb") && link.name.starts_with(PREFIX)
}

/// The name of the host's end whose packets are redirected to the device.
pub(super) fn host_end(ifb: &Link) -> Option<&str> {
    ifb.alias.rsplit_once(HOST).map(|(_, host)| host)
}

/// Whether the link may be the attachment's device. Without an alias it is the reference's, or that of a killed ADD.
fn may_be_of(link: &Link, owner: &Owner<'_>) -> bool {
    is_candidate(link) && (link.alias.is_empty() || owner.owns(Some(&link.alias)))
}

/// Returns whether a device was left by a killed ADD for the network, and is not of a valid attachment. Such a device is
/// known by its MAC: the kernel does not accept an alias in the message that creates a link.
pub(super) fn unfinished(network: &str, valid: &[Owner<'_>]) -> impl Fn(&Link) -> bool {
    let (mac, valid) = (mac_of(network), valid.iter().flat_map(names).collect::<Vec<_>>());
    move |link| link.alias.is_empty() && link.mac == Some(mac) && !valid.contains(&link.name)
}

/// The MAC of the network's devices, locally administered. No packet has this destination.
fn mac_of(network: &str) -> Mac {
    let number = u64::from_str_radix(&network_hash(network), 16).unwrap_or_default();
    let [_, _, mut octets @ ..] = number.to_be_bytes();
    octets[0] = octets[0] & !0b01 | 0b10;
    Mac(octets)
}

/// The devices that may be the attachment's.
pub(super) fn find(host: &Netlink, owner: &Owner<'_>) -> Result<Vec<Link>> {
    let mut found = Vec::new();
    for name in names(owner) {
        found.extend(host.link(&name)?.filter(|link| may_be_of(link, owner)));
    }
    Ok(found)
}

/// Creates the device under the first unused name.
pub(super) fn create<'a>(
    host: &'a Netlink,
    owner: &Owner<'_>,
    mtu: u32,
    undo: &mut Rollback<'a>,
) -> Result<Link> {
    for name in names(owner) {
        if host.link(&name)?.is_some() {
            continue;
        }
        // Without a queue: packets wait in the token bucket.
        let link =
            NewLink::new(&name, LinkKind::Ifb).mac(mac_of(owner.network)).mtu(mtu).txqlen(0).up();
        match host.create_link(&link) {
            Ok(device) => {
                let index = device.index;
                undo.push(format!("delete \"{name}\""), move || {
                    Ok(host.del_link_by_index(index).map(drop)?)
                });
                return Ok(device);
            }
            // Another interface of the container has got the name meanwhile.
            Err(error) if error.is_exists() => {}
            Err(error) => {
                // The kernel may have created the link, and only its reply was lost.
                if let Err(error) = host.del_link(&name) {
                    log::debug(error);
                }
                return Err(error).context(|| "adding link");
            }
        }
    }
    Err(Error::internal(format!("adding link: the names {:?} are taken", names(owner)))
        .with_details("rename these links of other programs, or remove them: \"ip link del\""))
}

/// Sets the alias, and the MTU of the host's end.
pub(super) fn label(host: &Netlink, ifb: &Link, owner: &Owner<'_>, end: &Link) -> Result<()> {
    let alias = format!("{}{HOST}{}", owner.comment(), end.name);
    let change = LinkChange::new().alias(&alias).mtu(end.mtu).up();
    host.set_link(ifb.index, change).context(|| "label the ifb device")
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWNER: Owner<'_> =
        Owner { network: "cni-plugin-bandwidth-test", ifname: "eth0", id: "dummy" };

    fn ifb(alias: &str) -> Link {
        let (kind, alias) = (Some("ifb".to_owned()), alias.to_owned());
        Link { name: names(&OWNER)[0].clone(), kind, alias, ..Link::default() }
    }

    #[test]
    fn the_first_name_is_that_of_the_reference() {
        let [first, second] = names(&OWNER);
        assert_eq!(first, "bwpa8eda89404b7");
        assert!(second.len() == LENGTH && second != first);
        let other = names(&Owner { ifname: "eth1", ..OWNER });
        assert!(other[0] == first && other[1] != second);
    }

    #[test]
    fn aliases_name_the_owner() {
        let alias = format!("{}{HOST}veth12345678", OWNER.comment());
        let ours = ifb(&alias);
        assert!(may_be_of(&ours, &OWNER));
        assert_eq!(host_end(&ours), Some("veth12345678"));
        assert!(!may_be_of(&ours, &Owner { ifname: "eth1", ..OWNER }));
        assert!(may_be_of(&ifb(""), &OWNER));
        assert_eq!(host_end(&ifb("")), None);
        assert!(!may_be_of(&ifb("mine"), &OWNER));
        let bridge = Link { kind: Some("bridge".to_owned()), ..ifb("") };
        assert!(!may_be_of(&bridge, &OWNER));
    }
}
