//! A veth pair between the host and a container.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::os::fd::AsFd;

use nix::errno::Errno;

use super::inside::{ContainerNetns, DEL_FIRST};
use super::peer;
use crate::netlink::{self, Link, LinkChange, LinkKind, MacAddress, Netlink, NewLink, VethPeer};
use crate::netns::Netns;
use crate::repairs::RepairFindings;
use crate::sysctl;
use cni::error::{Error, ErrorContext, Result};
use cni::{CniResult, InterfaceName, ResultInterface};

/// Attempts to choose a free name.
const NAME_TRIES: usize = 10;

/// The pair to create.
pub struct NewVethPair<'a> {
    pub ifname: &'a InterfaceName,
    /// The name of the host's end; `None` for a random one.
    pub host_name: Option<InterfaceName>,
    /// The MTU of both ends in bytes; 0 leaves it to the kernel.
    pub mtu: u32,
    /// The hardware address of the container's end; `None` for a random one.
    pub mac: Option<MacAddress>,
    /// The index of the bridge of which the host's end becomes a port.
    pub master: Option<u32>,
}

/// Both ends of a new pair, which are down.
pub struct VethPairEnds {
    pub host: Link,
    pub container: Link,
}

/// Creates the pair by one message to the kernel: the container's end in the container, the host's
/// end as a port of its bridge. No packet passes until [`start_host_end`]. A failure leaves no
/// link.
pub fn add_pair(host: &Netlink, netns: &Netns, wanted: &NewVethPair<'_>) -> Result<VethPairEnds> {
    let (ifname, mtu) = (wanted.ifname.as_str(), wanted.mtu);
    // Chosen here, so that the container's end need not be read back.
    let mac = wanted.mac.unwrap_or_else(MacAddress::random_local);
    let pair = |name: &str| {
        let peer = VethPeer::new(ifname).with_netns(netns.as_fd()).with_mtu(mtu).with_mac(mac);
        let link = NewLink::new(name, LinkKind::Veth { peer })
            .with_mtu(mtu)
            .with_mac(MacAddress::random_for_bridge_port());
        if let Some(master) = wanted.master { link.with_master(master) } else { link }
    };
    let chosen = wanted.host_name.as_ref().map(InterfaceName::as_str);
    let host = create_with_free_name(host, chosen, &pair, &|error, name| {
        // If the namespace cannot be entered, that error explains more than `error`.
        let inside = Netlink::open_in(netns)?;
        if !error.is_exists() {
            let full_bridge = wanted.master.filter(|_| error.errno() == Some(Errno::EXFULL));
            let error = Error::from(error);
            return Err(
                match full_bridge.and_then(|index| host.find_link_by_index(index).ok()?) {
                    Some(bridge) => error.context(format_args!(
                        "bridge \"{}\" has 1023 ports, the kernel's limit",
                        bridge.name
                    )),
                    None => error,
                },
            )
            .context(|| "failed to make veth pair");
        }
        if inside.find_link(ifname)?.is_none() {
            return Ok(());
        }
        let msg =
            format!("container veth name (\"{ifname}\") peer provided (\"{name}\") already exists");
        Err(Error::internal(msg).with_details(DEL_FIRST))
    })?;
    refuse_advertisements(&host);
    let container = Link {
        index: host.link.unwrap_or_default(),
        name: wanted.ifname.to_string(),
        kind: host.kind.clone(),
        mac: Some(mac),
        mtu: host.mtu,
        link: Some(host.index),
        ..Link::default()
    };
    Ok(VethPairEnds { host, container })
}

/// Creates a veth pair whose one end has the name that was `chosen`, or else a random one, and
/// returns that end. `pair` makes the request for a name. `refused` is called with the kernel's
/// error for a name, and returns success if another link has the name.
pub fn create_with_free_name<'p>(
    host: &Netlink,
    chosen: Option<&str>,
    pair: &dyn Fn(&str) -> NewLink<'p>,
    refused: &dyn Fn(netlink::NetlinkError, &str) -> Result<()>,
) -> Result<Link> {
    for _ in 0..NAME_TRIES {
        let random = format!("veth{:08x}", random_number());
        let name = chosen.unwrap_or(&random);
        match host.add_and_read_link(&pair(name)) {
            Ok(link) => return Ok(link),
            Err(error) => {
                if error.is_unanswered() && chosen.is_none() {
                    // The pair may have been created: a link with the random name is its end.
                    drop(host.delete_link(name));
                }
                refused(error, name)?;
            }
        }
        if chosen.is_some() {
            return Err(Error::internal(format!("the host has an interface \"{name}\" already"))
                .with_details(
                    "several containers need several names: put {{container}}, or {{namespace}} and \
                     {{pod}}, into \"hostInterfaceName\"",
                ));
        }
    }
    Err(Error::internal("failed to find a unique veth name"))
}

/// A random number. The standard library's hasher is keyed by the kernel's random numbers.
pub(super) fn random_number() -> u32 {
    (RandomState::new().build_hasher().finish() & 0xffff_ffff) as u32
}

/// Whether a name is a random one of [`create_with_free_name`]: `veth` and eight hexadecimal
/// digits, as in the reference plugins.
fn is_random_name(name: &str) -> bool {
    let digits = name.strip_prefix("veth").unwrap_or_default();
    digits.len() == 8 && digits.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// Sets the host's end up. The same message makes the changes in `change`, and sets the label of
/// the attachment as the alias, by which [`delete_pair`] and [`delete_labelled_pairs`] find the
/// pair even if the container changed its end.
pub fn start_host_end(host: &Netlink, end: &Link, label: &str, change: LinkChange) -> Result<()> {
    host.change_link(end.index, change.set_alias(label).set_up())
        .context(|| format!("failed to set \"{}\" up", end.name))
}

/// Disables `accept_ra`: router advertisements of a container must not configure the host. To be
/// called before the link can receive packets. A kernel without IPv6 has no `accept_ra`.
pub fn refuse_advertisements(link: &Link) {
    let key = format!("net/ipv6/conf/{}/accept_ra", link.name);
    if link.accept_ra.is_some_and(|accepts| accepts != 0)
        && let Err(error) = sysctl::write_value(&key, "0")
        // Without the file the link has no IPv6, and accepts nothing.
        && sysctl::key_exists(&key)
    {
        warn!("could not disable router advertisements: {error}");
    }
}

/// Disables `accept_ra` again where it was enabled.
pub fn refuse_advertisements_again(link: &Link, repairs: &mut RepairFindings) {
    if link.accept_ra.unwrap_or_default() != 0 {
        repairs.restore_missing(format!("sysctl net/ipv6/conf/{}/accept_ra", link.name), || {
            refuse_advertisements(link);
            Ok(())
        });
    }
}

/// The entry of a link in results; `sandbox` is empty for a link of the host.
pub fn interface_entry(link: &Link, sandbox: &str) -> ResultInterface {
    ResultInterface {
        name: link.name.clone(),
        mac: link.mac.map(|mac| mac.to_string()).unwrap_or_default(),
        mtu: link.mtu,
        sandbox: sandbox.to_owned(),
        ..ResultInterface::default()
    }
}

/// Deletes an attachment's pair; success if there is none. The container may have renamed, replaced
/// or moved its end, so the pair is found by the host's end: first by its name in the result, then
/// as the other end of the container's interface, then by a label that `is_own` accepts.
pub fn delete_pair(
    host: &Netlink,
    ifname: &InterfaceName,
    netns: Option<&Netns>,
    result: Option<&CniResult>,
    is_own: &dyn Fn(&str) -> bool,
) -> Result<()> {
    if let Some(result) = result
        && let Some(end) = find_listed_end(host, result, is_own)?
    {
        return Ok(host.delete_link_by_index(end.index).map(drop)?);
    }
    let inside = netns.map(|netns| {
        delete_by_container_end(host, &ContainerNetns::open_in(netns)?, ifname, result, is_own)
    });
    if inside == Some(Ok(true)) {
        return Ok(());
    }
    let labelled = delete_labelled_pairs(host, is_own);
    inside.transpose().and(labelled)
}

/// The host's end in the result. The name may have been reused: a pair is the attachment's if its
/// alias is the attachment's label or, for a pair without an alias, if its MAC is the recorded one.
fn find_listed_end(
    host: &Netlink,
    result: &CniResult,
    is_own: &dyn Fn(&str) -> bool,
) -> Result<Option<Link>> {
    for entry in listed_ends(result) {
        let Some(link) = host.find_link(&entry.name)? else { continue };
        if is_veth(&link)
            && (is_own(&link.alias) || (link.alias.is_empty() && has_mac(&link, entry)))
        {
            return Ok(Some(link));
        }
    }
    Ok(None)
}

fn has_mac(link: &Link, entry: &ResultInterface) -> bool {
    link.mac.is_some_and(|mac| mac.to_string() == entry.mac)
}

/// The host's ends in the result. The gateway of a VLAN is also a veth link of the host, but
/// attachments share it.
fn listed_ends(result: &CniResult) -> impl Iterator<Item = &ResultInterface> {
    let all = result.interfaces.iter();
    all.filter(|entry| entry.sandbox.is_empty() && is_random_name(&entry.name))
}

/// Deletes the pair by the container's end, unless label or MAC show that the pair is another
/// attachment's: the path of the namespace may lead to the next container. Returns whether the pair
/// was deleted.
fn delete_by_container_end(
    host: &Netlink,
    inside: &ContainerNetns<'_>,
    ifname: &InterfaceName,
    result: Option<&CniResult>,
    is_own: &dyn Fn(&str) -> bool,
) -> Result<bool> {
    let Some(link) = inside.netlink.find_link(ifname.as_str())? else { return Ok(false) };
    // Older versions and the reference plugins set no label, but list the MAC since 0.3.0.
    let mut listed = result.into_iter().flat_map(listed_ends).peekable();
    let lists_none = listed.peek().is_none();
    let may_be_own = |end: &Link| {
        is_own(&end.alias)
            || (end.alias.is_empty() && (lists_none || listed.any(|entry| has_mac(end, entry))))
    };
    if let Some(end) = peer::find_host_end(host, inside, &link)?.filter(may_be_own) {
        return Ok(host.delete_link_by_index(end.index)?);
    }
    warn!("\"{ifname}\" is not this attachment's veth, and is left alone");
    Ok(false)
}

/// Deletes the pairs whose host's end has a label that `is_wanted` accepts.
pub fn delete_labelled_pairs(host: &Netlink, is_wanted: &dyn Fn(&str) -> bool) -> Result<()> {
    let ends = host.dump_links()?.into_iter();
    for end in ends.filter(|link| is_veth(link) && is_wanted(&link.alias)) {
        host.delete_link_by_index(end.index)?;
    }
    Ok(())
}

fn is_veth(link: &Link) -> bool {
    link.kind.as_deref() == Some("veth")
}

/// The host's end whose other end is `container`, with its entry in `result`.
pub fn find_listed_host_end(
    host: &Netlink,
    inside: &ContainerNetns<'_>,
    result: &CniResult,
    container: &Link,
) -> Result<Option<(Link, ResultInterface)>> {
    let Some(end) = peer::find_host_end(host, inside, container)? else { return Ok(None) };
    let listed = |entry: &&ResultInterface| entry.sandbox.is_empty() && entry.name == end.name;
    let entry = result.interfaces.iter().find(listed).cloned();
    Ok(entry.map(|entry| (end, entry)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_names_differ_and_match_the_pattern() {
        let names: std::collections::HashSet<_> =
            (0..100).map(|_| format!("veth{:08x}", random_number())).collect();
        assert_eq!(names.len(), 100);
        assert!(names.iter().all(|name| is_random_name(name)));
        for other in ["veth", "veth1234567", "vethABCDEF01", "br0.100", "veth123456789"] {
            assert!(!is_random_name(other), "{other}");
        }
    }
}
