//! A veth pair between the host and a container.

use std::os::fd::AsFd;

use super::names;
use crate::cni::{CniResult, IfName, Interface};
use crate::error::{Context, Error, Result};
use crate::log;
use crate::netlink::{Link, LinkKind, Mac, Netlink, NewLink, VethPeer};
use crate::netns::Netns;
use crate::sysctl;

/// How often a random name may be taken before something is wrong.
const NAME_TRIES: usize = 10;

/// What a pair is to be like.
#[derive(Clone, Copy, Debug)]
pub struct Wanted<'a> {
    /// The container's end.
    pub ifname: &'a IfName,
    /// MTU of both ends in bytes; 0 leaves it to the kernel.
    pub mtu: u32,
    /// Address of the container's end; the kernel chooses one otherwise.
    pub mac: Option<Mac>,
    /// The bridge that the host's end becomes a port of, by index.
    pub master: Option<u32>,
}

/// Both ends of a pair.
#[derive(Clone, Debug)]
pub struct Pair {
    /// The host's end, up.
    pub host: Link,
    /// The container's end, down.
    pub container: Link,
}

/// Makes the pair by one message to the kernel, each end in its place, the host's one up and in
/// its bridge. Nothing is left behind on failure.
pub fn add(host: &Netlink, netns: &Netns, wanted: Wanted<'_>) -> Result<Pair> {
    // Chosen here, so that nobody has to be asked for it.
    let mac = wanted.mac.unwrap_or_else(Mac::random_local);
    let host = create(host, netns, Wanted { mac: Some(mac), ..wanted })?;
    // Router advertisements of a container must not configure the host. Not all kernels have
    // IPv6.
    if let Err(error) = sysctl::write(&format!("net/ipv6/conf/{}/accept_ra", host.name), "0") {
        log::debug(error);
    }
    let container = Link {
        index: host.link.unwrap_or_default(),
        name: wanted.ifname.to_string(),
        kind: host.kind.clone(),
        mac: Some(mac),
        mtu: host.mtu,
        link: Some(host.index),
        ..Link::default()
    };
    Ok(Pair { host, container })
}

/// A link as results show it; `sandbox` is empty for one on the host.
pub fn interface(link: &Link, sandbox: &str) -> Interface {
    Interface {
        name: link.name.clone(),
        mac: link.mac.map(|mac| mac.to_string()).unwrap_or_default(),
        mtu: link.mtu,
        sandbox: sandbox.to_owned(),
        ..Interface::default()
    }
}

/// The MTU of a configuration: 0 or less leaves it to the kernel.
pub fn mtu(configured: i64) -> Result<u32> {
    u32::try_from(configured.max(0))
        .map_err(|_| Error::config(format!("mtu {configured} is larger than any link's")))
}

/// Deletes the pair by the container's end; success if there is none.
pub fn del_inside(netns: &Netns, ifname: &IfName) -> Result<()> {
    Ok(Netlink::open_in(netns)?.del_link(ifname.as_str()).map(drop)?)
}

/// Deletes the pair by what the result says of the host's end, for a container whose namespace
/// cannot be reached any more.
pub fn del_host_end(host: &Netlink, result: &CniResult) -> Result<()> {
    // The gateway of a VLAN is a veth on the host as well, and shared.
    let ends = result.interfaces.iter().filter(|entry| names::is_random_veth(&entry.name));
    for entry in ends.filter(|entry| entry.sandbox.is_empty()) {
        let Some(link) = host.link(&entry.name)? else { continue };
        // Another pair may have been given the name since; hardly one with the same address.
        let mac = link.mac.map(|mac| mac.to_string());
        if link.kind.as_deref() == Some("veth") && mac.as_deref() == Some(entry.mac.as_str()) {
            host.del_link_by_index(link.index)?;
        }
    }
    Ok(())
}

fn create(host: &Netlink, netns: &Netns, wanted: Wanted<'_>) -> Result<Link> {
    for _ in 0..NAME_TRIES {
        let name = names::random_veth();
        let peer = VethPeer::new(wanted.ifname.as_str())
            .netns(netns.as_fd())
            .mtu(wanted.mtu)
            .mac(wanted.mac);
        let mut link = NewLink::new(&name, LinkKind::Veth { peer }).mtu(wanted.mtu).up();
        if let Some(master) = wanted.master {
            link = link.master(master);
        }
        match host.create_link(&link) {
            Ok(link) => return Ok(link),
            Err(error) if error.is_exists() => {
                let ifname = wanted.ifname;
                if Netlink::open_in(netns)?.link(ifname.as_str())?.is_some() {
                    let msg = format!(
                        "container veth name (\"{ifname}\") peer provided (\"{name}\") already exists"
                    );
                    return Err(Error::internal(msg).with_details(
                        "an earlier ADD was not followed by DEL, or CNI_IFNAME is taken",
                    ));
                }
            }
            Err(error) => {
                if error.is_unanswered() {
                    // What has the name now is the pair.
                    drop(host.del_link(&name));
                }
                // A namespace that cannot even be entered is the better explanation.
                Netlink::open_in(netns)?;
                return Err(error).context(|| "failed to make veth pair");
            }
        }
    }
    Err(Error::internal("failed to find a unique veth name"))
}

/// Whether `result` lists a host end whose other end is `container`: the first entry outside the
/// sandbox that is such a link on the host.
pub fn find_host_end(
    host: &Netlink,
    result: &CniResult,
    container: &Link,
) -> Result<Option<(Link, Interface)>> {
    for entry in result.interfaces.iter().filter(|entry| entry.sandbox.is_empty()) {
        let Some(link) = host.link(&entry.name)? else { continue };
        let pair = link.kind.as_deref() == Some("veth")
            && container.link == Some(link.index)
            && link.link == Some(container.index);
        if pair {
            return Ok(Some((link, entry.clone())));
        }
    }
    Ok(None)
}
