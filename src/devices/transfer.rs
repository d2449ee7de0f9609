//! Moves a device into the container and back.
//!
//! One message to the kernel moves the device, renames it and, on the way into the container, sets
//! its alias, while no other process can change a link. So the device never loses its name, and no
//! third namespace exists that could destroy it. The kernel applies a message in that order and
//! stops at the first error, so a taken name is looked up before, and a device that was moved but
//! not renamed is moved back.

use std::os::fd::AsFd;

use super::origin::OriginalState;
use crate::iface::ContainerNetns;
use crate::netlink::{Link, LinkChange, Netlink};
use crate::netns::Netns;
use cni::error::{Error, ErrorContext, Result};

/// Fails if the container has the name `ifname` or an alternative name of the device.
pub fn require_free_names(inside: &ContainerNetns<'_>, device: &Link, ifname: &str) -> Result<()> {
    inside.require_free_name(ifname)?;
    for name in &device.alt_names {
        if name == ifname {
            let msg = format!("\"{name}\" is an alternative name of \"{}\" itself", device.name);
            return Err(Error::internal(msg)
                .with_details("remove it (ip link property del), or choose another CNI_IFNAME"));
        }
        inside.require_free_name(name).map_err(|e| {
            e.with_details(format!("it is an alternative name of \"{}\"", device.name))
        })?;
    }
    Ok(())
}

/// Moves the device into the container under the name `ifname`; with `up` sets it up by the same
/// message.
pub fn move_into_container(
    host: &Netlink,
    device: &Link,
    netns: &Netns,
    ifname: &str,
    up: bool,
) -> Result<()> {
    let name = &device.name;
    let change = LinkChange::new().move_to_netns(netns.as_fd()).set_name(ifname).set_alias(name);
    host.change_link(device.index, if up { change.set_up() } else { change })
        .context(|| format!("failed to move \"{name}\" to container NS"))
}

/// Moves the device back to the host under its name. If the name is taken, the device stays in the
/// container, unchanged; everything else is to be restored by the caller.
pub fn move_back_to_host(
    inside: &ContainerNetns<'_>,
    host: &Netlink,
    device: &Link,
    origin: &OriginalState,
) -> Result<Link> {
    let name = &origin.name;
    if let Some(other) = host.find_link(name)? {
        return Err(name_taken_error(&other, name, "the device stays in the container"));
    }
    origin.remove_foreign_names(&inside.netlink, device)?;
    move_to_host(inside, device, name, LinkChange::new())
        .inspect_err(|_| return_stranded_device(host, device, inside.netns, origin))?;
    host.require_link(name).context(|| format!("failed to find \"{name}\" in hostNS"))
}

/// Moves a device whose name on the host is unknown to the host, down, without addresses, and under
/// a name that no configuration uses. Returns that name.
pub fn move_unnamed_to_host(
    inside: &ContainerNetns<'_>,
    host: &Netlink,
    link: &Link,
) -> Result<String> {
    let unknown = OriginalState::default();
    let mut number = 0;
    // The kernel gives the same names to devices that it takes back from a namespace that ends.
    while host.find_link(&format!("dev{number}"))?.is_some() {
        number += 1;
    }
    let name = format!("dev{number}");
    unknown.remove_foreign_names(&inside.netlink, link)?;
    move_to_host(inside, link, &name, LinkChange::new().set_alias(""))?;
    unknown.remove_foreign_names(host, &host.require_link(&name)?)?;
    Ok(name)
}

/// Moves a link, stripped of foreign alternative names: a name that the host has would keep the
/// link in the container.
fn move_to_host(
    inside: &ContainerNetns<'_>,
    link: &Link,
    name: &str,
    change: LinkChange,
) -> Result<()> {
    let home = Netns::open_current()?;
    inside
        .netlink
        .change_link(link.index, change.move_to_netns(home.as_fd()).set_name(name))
        .context(|| format!("failed to move \"{}\" to hostNS as \"{name}\"", link.name))
}

/// Renames a device that is on the host under another name: the kernel moved it there when its
/// namespace ended, or a killed DEL did.
pub fn rename_back(host: &Netlink, device: &Link, origin: &OriginalState) -> Result<Link> {
    let name = &origin.name;
    if device.name != *name {
        if let Some(other) = host.find_link(name)? {
            let outcome = "the device stays on the host under another name";
            return Err(name_taken_error(&other, name, outcome));
        }
        // Many kernels refuse to rename a link that is up.
        host.change_link(device.index, LinkChange::new().set_down())?;
        host.change_link(device.index, LinkChange::new().set_name(name))
            .context(|| format!("failed to rename \"{}\" to \"{name}\"", device.name))?;
    }
    Ok(host.require_link_by_index(device.index)?)
}

fn name_taken_error(other: &Link, name: &str, outcome: &str) -> Error {
    let kind = if other.name == name { "is the name" } else { "is an alternative name" };
    Error::internal(format!("\"{name}\" {kind} of another link on the host")).with_details(format!(
        "{outcome}: rename or remove \"{}\", then call DEL again",
        other.name
    ))
}

/// Moves a device back into the container, because another link took its name on the host between
/// lookup and move.
fn return_stranded_device(host: &Netlink, device: &Link, netns: &Netns, origin: &OriginalState) {
    let Ok(links) = host.dump_links() else { return };
    let stranded = origin.identity.find_on_host(&links, &device.name, &device.name);
    let Some(link) = stranded.filter(|link| link.name == device.name) else { return };
    let change = LinkChange::new().move_to_netns(netns.as_fd()).set_name(&device.name);
    let moved = host.change_link(link.index, if device.up { change.set_up() } else { change });
    if let Err(error) = moved {
        warn!("could not put \"{}\" back into the container: {error}", device.name);
    }
}
