//! The way into the container and back.
//!
//! Each way is one message to the kernel, which moves the device and renames it, and on the way
//! into the container sets its alias, while nobody else can change a link. There is no moment at which it has lost its name, and no
//! third namespace that could take it down with itself. The kernel carries a message out in that
//! order and stops at the first trouble, so a name that is taken is looked for before, and a
//! device that got stuck under way is put back.

use std::os::fd::AsFd;

use super::origin::Origin;
use crate::cni::IfName;
use crate::error::{Context, Error, Result};
use crate::iface::Inside;
use crate::log;
use crate::netlink::{Link, LinkChange, Netlink};
use crate::netns::Netns;

/// What else is done to a device on its way into the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arrival {
    /// It is switched on.
    Up,
    /// It stays off: addresses come first.
    Down,
}

/// Nothing in the container may have the name, nor stand in the way of the alternative ones.
pub(super) fn require_room(inside: &Inside<'_>, device: &Link, ifname: &IfName) -> Result<()> {
    inside.require_free(ifname.as_str())?;
    for name in &device.alt_names {
        if name == ifname.as_str() {
            let msg = format!("\"{name}\" is an alternative name of \"{}\" itself", device.name);
            return Err(Error::internal(msg)
                .with_details("remove it (ip link property del), or choose another CNI_IFNAME"));
        }
        inside.require_free(name).map_err(|e| {
            e.with_details(format!("it is an alternative name of \"{}\"", device.name))
        })?;
    }
    Ok(())
}

/// Moves the device into the container, where it is called `ifname`.
pub(super) fn into_container(
    host: &Netlink,
    device: &Link,
    netns: &Netns,
    ifname: &IfName,
    arrival: Arrival,
) -> Result<()> {
    let name = &device.name;
    let mut change = LinkChange::new().netns(netns.as_fd()).name(ifname.as_str()).alias(name);
    if arrival == Arrival::Up {
        change = change.up();
    }
    host.set_link(device.index, change)
        .context(|| format!("failed to move \"{name}\" to container NS"))
}

/// Moves the device back to the host, where it gets its name. When that is taken, it stays where it
/// is, as it is. All else is to be given back then.
pub(super) fn back_to_host(
    inside: &Inside<'_>,
    host: &Netlink,
    device: &Link,
    origin: &Origin,
) -> Result<Link> {
    let name = &origin.name;
    if let Some(other) = host.link(name)? {
        return Err(name_is_taken(&other, name, "the device stays in the container"));
    }
    // One of these that the host has would keep the device in the container.
    origin.strip(&inside.netlink, device)?;
    let home = Netns::current()?;
    let change = LinkChange::new().netns(home.as_fd()).name(name);
    inside
        .netlink
        .set_link(device.index, change)
        .inspect_err(|_| return_stranded(host, device, inside.netns, origin))
        .context(|| format!("failed to move \"{}\" to hostNS as \"{name}\"", device.name))?;
    host.require_link(name).context(|| format!("failed to find \"{name}\" in hostNS"))
}

/// Moves a link that may be the device to the host, down, without addresses, and under a name that
/// no configuration uses. Returns that name.
pub(super) fn put_aside(inside: &Inside<'_>, host: &Netlink, link: &Link) -> Result<String> {
    let (home, nothing) = (Netns::current()?, Origin::default());
    let mut name = String::new();
    for number in 0.. {
        // The kernel's own pattern for devices of a namespace that ends.
        name = format!("dev{number}");
        if host.link(&name)?.is_none() {
            break;
        }
    }
    nothing.strip(&inside.netlink, link)?;
    let change = LinkChange::new().netns(home.as_fd()).name(&name).alias("");
    inside
        .netlink
        .set_link(link.index, change)
        .context(|| format!("failed to move \"{}\" to hostNS as \"{name}\"", link.name))?;
    nothing.strip(host, &host.require_link(&name)?)?;
    Ok(name)
}

/// Gives a device its name back that is on the host already: the kernel put it there when its
/// namespace ended, or a DEL did that was killed then.
pub(super) fn settle(host: &Netlink, device: &Link, origin: &Origin) -> Result<Link> {
    let name = &origin.name;
    if device.name != *name {
        if let Some(other) = host.link(name)? {
            let so = "the device stays on the host under another name";
            return Err(name_is_taken(&other, name, so));
        }
        // Many kernels rename only what is down.
        host.set_link(device.index, LinkChange::new().down())?;
        host.set_link(device.index, LinkChange::new().name(name))
            .context(|| format!("failed to rename \"{}\" to \"{name}\"", device.name))?;
    }
    Ok(host.require_link_by_index(device.index)?)
}

fn name_is_taken(other: &Link, name: &str, so: &str) -> Error {
    let as_what = if other.name == name { "is the name" } else { "is an alternative name" };
    Error::internal(format!("\"{name}\" {as_what} of another link on the host"))
        .with_details(format!("{so}: rename or remove \"{}\", then call DEL again", other.name))
}

/// The name was free when it was looked for and taken when the device came: back it goes.
fn return_stranded(host: &Netlink, device: &Link, netns: &Netns, origin: &Origin) {
    let (Some(identity), Ok(links)) = (&origin.identity, host.dump_links()) else { return };
    let stranded = identity.on_host(&links, &device.name);
    let Some(link) = stranded.filter(|link| link.name == device.name) else { return };
    let mut change = LinkChange::new().netns(netns.as_fd()).name(&device.name);
    if device.up {
        change = change.up();
    }
    if let Err(error) = host.set_link(link.index, change) {
        log::warn(format_args!("put \"{}\" back into the container: {error}", device.name));
    }
}
