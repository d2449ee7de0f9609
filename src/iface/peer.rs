//! Finds the other end of a link by the kernel's attributes alone: an index or a name identifies a
//! link only together with the link's network namespace.

use std::os::fd::AsFd;

use super::ContainerNetns;
use crate::netlink::{Link, Netlink};
use crate::netns::Netns;
use cni::CniResult;
use cni::error::Result;

/// Whether two [`Link::link_netnsid`] stand for the same network namespace: `outer` of a link on
/// the host, and `inner` of a link in the container.
pub fn is_same_netns(
    host: &Netlink,
    inside: &ContainerNetns<'_>,
    outer: Option<i32>,
    inner: Option<i32>,
) -> Result<bool> {
    let known = match outer {
        None => inside.netlink.namespace_id(Netns::open_current()?.as_fd())?,
        Some(outer) => match host.namespace_id(inside.netns.as_fd())? {
            Some(container) if container == outer => return Ok(inner.is_none()),
            Some(container) => host.namespace_id_in(container, outer)?,
            None => None,
        },
    };
    Ok(inner.is_some() && known == inner)
}

/// Whether the other end of a link of the container, or the device below it, is on the host.
pub fn is_peer_on_host(host: &Netlink, inside: &ContainerNetns<'_>, link: &Link) -> Result<bool> {
    Ok(link.link.is_some() && is_same_netns(host, inside, None, link.link_netnsid)?)
}

/// The host's end of the veth pair whose other end is `link`, in the container. The attributes of
/// `link` are a hint only; the attributes of the host's end decide.
pub fn find_host_end(
    host: &Netlink,
    inside: &ContainerNetns<'_>,
    link: &Link,
) -> Result<Option<Link>> {
    let Some(end) = link.link.map(|index| host.find_link_by_index(index)).transpose()?.flatten()
    else {
        return Ok(None);
    };
    let is_veth = |link: &Link| link.kind.as_deref() == Some("veth");
    let paired = is_veth(link) && is_veth(&end) && end.link == Some(link.index);
    let Some(netns) = end.link_netnsid.filter(|_| paired) else { return Ok(None) };
    Ok((host.namespace_id(inside.netns.as_fd())? == Some(netns)).then_some(end))
}

/// The links of the host in a result whose other end is in the container `netns`. Plugins of any
/// kind may have created them, so only the kernel's attributes count.
pub fn find_listed_ends(host: &Netlink, netns: &Netns, result: &CniResult) -> Result<Vec<Link>> {
    let mut ends = Vec::new();
    for entry in result.interfaces.iter().filter(|entry| entry.sandbox.is_empty()) {
        ends.extend(host.find_link(&entry.name)?.filter(|link| link.link_netnsid.is_some()));
    }
    // Read after the links: the kernel assigns the id no later than it reports a link into the
    // namespace.
    let container = if ends.is_empty() { None } else { host.namespace_id(netns.as_fd())? };
    ends.retain(|end| container.is_some() && end.link_netnsid == container);
    Ok(ends)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::{LinkKind, NewLink, VethPeer};
    use crate::netns;

    fn veth<'a>(name: &str, peer: VethPeer<'a>) -> NewLink<'a> {
        NewLink::new(name, LinkKind::Veth { peer })
    }

    #[test]
    fn pairs_with_the_same_indexes_are_told_apart() {
        netns::isolate_test_thread();
        let (host, container) = (Netlink::open().unwrap(), Netns::create_unnamed().unwrap());
        let inside = ContainerNetns::open_in(&container).unwrap();
        // Makes the indexes of the ends differ.
        host.add_link(&veth("x", VethPeer::new("y"))).unwrap();
        let peer = VethPeer::new("eth0").with_netns(container.as_fd());
        let end = host.add_and_read_link(&veth("veth0", peer)).unwrap();
        let link = inside.require_link("eth0").unwrap();
        assert_eq!(find_host_end(&host, &inside, &link).unwrap().unwrap().name, "veth0");

        inside.netlink.add_link(&veth("a", VethPeer::new("b")).with_index(end.index)).unwrap();
        let forged = inside.require_link("b").unwrap();
        assert_eq!(forged.link, Some(end.index));
        assert_eq!(find_host_end(&host, &inside, &forged).unwrap(), None);
        assert!(!is_peer_on_host(&host, &inside, &inside.require_link("lo").unwrap()).unwrap());
    }

    #[test]
    fn a_peer_in_a_third_namespace_is_recognised() {
        netns::isolate_test_thread();
        let (host, container) = (Netlink::open().unwrap(), Netns::create_unnamed().unwrap());
        let (inside, third) =
            (ContainerNetns::open_in(&container).unwrap(), Netns::create_unnamed().unwrap());
        let other = Netns::create_unnamed().unwrap();
        for (name, netns) in [("one", &third), ("two", &container), ("three", &other)] {
            host.add_link(&veth(name, VethPeer::new(name).with_netns(netns.as_fd()))).unwrap();
            host.require_link(name).unwrap();
        }
        let peer = VethPeer::new("x").with_netns(third.as_fd());
        inside.netlink.add_link(&veth("eth1", peer)).unwrap();
        let inner = inside.require_link("eth1").unwrap().link_netnsid;
        let outer = |name: &str| host.require_link(name).unwrap().link_netnsid;
        let same = |outer, inner| is_same_netns(&host, &inside, outer, inner).unwrap();
        assert!(same(outer("one"), inner));
        assert!(!same(outer("three"), inner) && !same(None, inner) && !same(Some(77), inner));
        assert!(same(outer("two"), None) && !same(outer("two"), inner));
    }
}
