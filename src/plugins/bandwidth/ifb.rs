//! The `ifb` device through which a container's packets are redirected to be shaped. Each attachment has its
//! own; the device's alias names the attachment, and the link whose packets are redirected to the device.

use crate::attachment::{Owner, hash, network_hash};
use crate::cni::Interface;
use crate::error::{Context, Error, Result};
use crate::log;
use crate::netlink::{Link, LinkChange, LinkKind, Mac, Netlink, NewLink};

/// What names begin with.
const PREFIX: &str = "bwp";
/// How long they are.
const LENGTH: usize = 15;
/// What stands before the host's end in an alias.
const HOST: &str = ", host: ";

/// The names that an attachment's device may have. The first is the reference's, which all
/// interfaces of a container in a network share: the first of them has it.
pub(super) fn names(owner: &Owner<'_>) -> [String; 2] {
    let shared = [owner.network, owner.id];
    [&shared[..], &[owner.network, owner.id, ":", owner.ifname]].map(|texts| {
        let mut name = format!("{PREFIX}{}", hash(texts));
        name.truncate(LENGTH);
        name
    })
}

/// Whether this may be a device of the plugin, by its kind and name.
pub(super) fn is_one(link: &Link) -> bool {
    link.kind.as_deref() == Some("ifb") && link.name.starts_with(PREFIX)
}

/// The name of the link that is led to the device.
pub(super) fn host_of(ifb: &Link) -> Option<&str> {
    ifb.alias.rsplit_once(HOST).map(|(_, host)| host)
}

/// The owner of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Whose {
    Ours,
    /// The alias names no attachment: the reference's device, or the device of a killed ADD.
    Unknown,
    /// Another interface's of the container, or nothing of this plugin.
    Others,
}

pub(super) fn whose(link: &Link, owner: &Owner<'_>) -> Whose {
    match link.alias.as_str() {
        _ if !is_one(link) => Whose::Others,
        "" => Whose::Unknown,
        alias if owner.owns(Some(alias)) => Whose::Ours,
        _ => Whose::Others,
    }
}

/// Tells which devices are those of killed ADDs of the network, and no valid attachment's. The kernel
/// takes no alias in the message that makes a link, but an address.
pub(super) fn unfinished(network: &str, valid: &[Owner<'_>]) -> impl Fn(&Link) -> bool {
    let (mac, valid) = (mac_of(network), valid.iter().flat_map(names).collect::<Vec<_>>());
    move |link| link.alias.is_empty() && link.mac == Some(mac) && !valid.contains(&link.name)
}

/// The address of the network's devices, locally administered. Nothing is sent to it.
fn mac_of(network: &str) -> Mac {
    let number = u64::from_str_radix(&network_hash(network), 16).unwrap_or_default();
    let [_, _, octets @ ..] = number.to_be_bytes();
    Mac([octets[0] & !0b01 | 0b10, octets[1], octets[2], octets[3], octets[4], octets[5]])
}

/// The devices that are there under the attachment's names, and whose they are.
pub(super) fn find(host: &Netlink, owner: &Owner<'_>) -> Result<Vec<(Link, Whose)>> {
    let mut found = Vec::new();
    for name in names(owner) {
        if let Some(link) = host.link(&name)? {
            let whose = whose(&link, owner);
            found.push((link, whose));
        }
    }
    Ok(found)
}

/// Makes a device under the first name that is free.
pub(super) fn create(host: &Netlink, owner: &Owner<'_>, mtu: u32) -> Result<Link> {
    for name in names(owner) {
        if host.link(&name)?.is_some() {
            continue;
        }
        // Without a queue of its own: what waits, waits in the token bucket.
        let link =
            NewLink::new(&name, LinkKind::Ifb).mac(mac_of(owner.network)).mtu(mtu).txqlen(0).up();
        match host.create_link(&link) {
            Ok(made) => return Ok(made),
            // Another interface of the container has just been given it.
            Err(error) if error.is_exists() => {}
            Err(error) => {
                // The name was free: what has it now, only the answer being lost, is ours.
                if let Err(error) = host.del_link(&name) {
                    log::debug(error);
                }
                return Err(error).context(|| "adding link");
            }
        }
    }
    Err(Error::internal(format!("adding link: the names {:?} are taken", names(owner)))
        .with_details("an earlier ADD was not followed by DEL"))
}

/// Sets the alias, which names the attachment and the redirected link, and that link's MTU.
pub(super) fn label(host: &Netlink, ifb: &Link, owner: &Owner<'_>, end: &Link) -> Result<()> {
    let alias = format!("{}{HOST}{}", owner.comment(), end.name);
    let change = LinkChange::new().alias(&alias).mtu(end.mtu).up();
    host.set_link(ifb.index, change).context(|| "label the device that shapes")
}

/// The device as a result shows it.
pub(super) fn interface(ifb: &Link, mtu: u32) -> Interface {
    Interface { mtu, ..crate::iface::veth::interface(ifb, "") }
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
    fn the_first_name_is_the_references() {
        let [first, second] = names(&OWNER);
        assert_eq!(first, "bwpa8eda89404b7");
        assert!(second.len() == LENGTH && second != first);
        let other = names(&Owner { ifname: "eth1", ..OWNER });
        assert!(other[0] == first && other[1] != second);
    }

    #[test]
    fn aliases_tell_whose_they_are() {
        let alias = format!("{}{HOST}veth12345678", OWNER.comment());
        let ours = ifb(&alias);
        assert_eq!((whose(&ours, &OWNER), host_of(&ours)), (Whose::Ours, Some("veth12345678")));
        assert_eq!(whose(&ours, &Owner { ifname: "eth1", ..OWNER }), Whose::Others);
        assert_eq!((whose(&ifb(""), &OWNER), host_of(&ifb(""))), (Whose::Unknown, None));
        assert_eq!(whose(&ifb("mine"), &OWNER), Whose::Others);
        let bridge = Link { kind: Some("bridge".to_owned()), ..ifb("") };
        assert_eq!(whose(&bridge, &OWNER), Whose::Others);
    }
}
