//! The links of a bond: found, moved in, made its ports, and given back.

use nix::errno::Errno;

use super::{BondConfig, KIND};
use crate::devices::identity::{DeviceIdentity, came_from_host};
use crate::devices::location::DeviceSearch;
use crate::devices::lost;
use crate::devices::origin::OriginalState;
use crate::devices::record::{
    DeviceRecord, DeviceRecordStore, DeviceReturn, missing_device_remedy, recorded_device_remedy,
    state_for_record,
};
use crate::devices::transfer;
use crate::framework::{AddRequest, CallContext, DelRequest};
use crate::iface::ContainerNetns;
use crate::netlink::{Link, LinkChange, MacAddress, Netlink};
use crate::netns::Netns;
use cni::InterfaceName;
use cni::error::{Error, Result};

/// The links of a new bond, on the host or in the container, which no other interface uses. They
/// keep their names, which must be free in the container.
pub(super) fn find_links(
    cx: &CallContext<'_>,
    conf: &BondConfig,
    inside: &ContainerNetns<'_>,
    ifname: &InterfaceName,
) -> Result<Vec<Link>> {
    let mut links: Vec<Link> = Vec::new();
    for named in &conf.links {
        let link = find_link(cx, conf, inside, &named.name)?;
        let (name, refuse) =
            (&link.name, |msg: String, remedy: &str| Err(Error::config(msg).with_details(remedy)));
        if link.loopback {
            return refuse(
                format!("\"{name}\" is the loopback interface"),
                "name other links in \"links\"",
            );
        }
        if links.iter().any(|other| other.index == link.index) {
            return refuse(
                format!("\"{}\" is \"{name}\", which \"links\" has already", named.name),
                "name each link once",
            );
        }
        if link.master.is_some() {
            let msg = format!("link \"{name}\" belongs to another bond, bridge or VRF");
            return Err(Error::internal(msg).with_details(format!("ip link set {name} nomaster")));
        }
        if !conf.links_in_container {
            if name == ifname.as_str()
                || link.alt_names.iter().any(|alias| alias == ifname.as_str())
            {
                let msg = format!("\"{ifname}\" is the name of a link of the bond");
                return refuse(msg, "choose another CNI_IFNAME");
            }
            transfer::require_free_names(inside, &link, name)?;
            // In the container nothing would prove that the two came from the host.
            let is_on = |upper: &Link, lower: &Link| {
                upper.link == Some(lower.index) && upper.link_netnsid.is_none()
            };
            if let Some(other) =
                links.iter().find(|other| is_on(other, &link) || is_on(&link, other))
            {
                let msg = format!(
                    "\"{name}\" and \"{}\" are ends of one link, or one is on the other",
                    other.name
                );
                return refuse(msg, "name links that are independent of each other");
            }
        }
        links.push(link);
    }
    Ok(links)
}

fn find_link(
    cx: &CallContext<'_>,
    conf: &BondConfig,
    inside: &ContainerNetns<'_>,
    name: &str,
) -> Result<Link> {
    let place = if conf.links_in_container { &inside.netlink } else { cx.host_netlink()? };
    let mut found = place.require_link(name);
    if found.is_err()
        && !conf.links_in_container
        && lost::restore_earlier(place, &|device| device.has_name(name))
    {
        found = place.require_link(name);
    }
    found.map_err(|error| {
        let remedy = if conf.links_in_container {
            "the container must have it before the bond: attach it first, or remove \
             \"linksInContainer\""
                .to_owned()
        } else if let Some(remedy) = recorded_device_remedy(&|device| device.has_name(name)) {
            remedy
        } else if matches!(inside.netlink.find_link(name), Ok(Some(_))) {
            "the container has it: write \"linksInContainer\": true".to_owned()
        } else {
            missing_device_remedy(name)
        };
        Error::from(error).context("failed to find a link of the bond").with_details(remedy)
    })
}

/// STATUS: fails if a link is neither on the host nor recorded as one that a container has.
pub(super) fn require_known(cx: &CallContext<'_>, conf: &BondConfig, host: &Netlink) -> Result<()> {
    let records = DeviceRecordStore::for_network(KIND, &cx.net.name).list_network_records();
    for named in &conf.links {
        let is_known = |record: &DeviceRecord| record.device.has_name(&named.name);
        if !records.iter().any(is_known) {
            host.require_link(&named.name)
                .map_err(|e| Error::from(e).with_details(missing_device_remedy(&named.name)))?;
        }
    }
    Ok(())
}

/// The records of the links, before anything is changed.
pub(super) fn new_records(
    cx: &CallContext<'_>,
    conf: &BondConfig,
    req: &AddRequest,
    inside: &ContainerNetns<'_>,
    links: &[Link],
) -> Result<Vec<DeviceRecord>> {
    let host = cx.host_netlink()?;
    let record = |link: &Link| {
        let device = if conf.links_in_container {
            OriginalState::from_device(&inside.netlink, link)?
        } else {
            state_for_record(host, link)?
        };
        let new = DeviceRecord::new(&req.id, &req.ifname, &req.sandbox.path, device);
        let (netns_id, in_container) = (req.sandbox.netns_identity(), conf.links_in_container);
        Ok(DeviceRecord { netns_id, port: link.name.clone(), in_container, ..new })
    };
    links.iter().map(record).collect()
}

/// Makes the links of the container ports of the bond, in their order. `distinct` gives a MAC to
/// each link that has the MAC of an earlier one.
pub(super) fn attach_links(
    inside: &ContainerNetns<'_>,
    bond: &Link,
    links: &[Link],
    distinct: bool,
) -> Result<()> {
    for (number, link) in links.iter().enumerate() {
        let name = &link.name;
        let port = inside.require_link(name)?;
        let change = |change| inside.netlink.change_link(port.index, change);
        if port.up {
            // Only links that are down become ports; the kernel sets them up.
            change(LinkChange::new().set_down())?;
        }
        let taken = distinct && links[..number].iter().any(|other| other.mac == link.mac);
        if taken {
            change(LinkChange::new().set_mac(MacAddress::random_local()))?;
        }
        change(LinkChange::new().set_master(bond.index)).map_err(|error| {
            let fixed_mac = error.errno() == Some(Errno::EOPNOTSUPP);
            let error = Error::from(error)
                .context(format!("failed to add \"{name}\" to \"{}\"", bond.name));
            let remedy = "its driver does not change its MAC: set failOverMac to 1, with mode \
                          \"active-backup\"";
            if fixed_mac { error.with_details(remedy) } else { error }
        })?;
    }
    Ok(())
}

/// CHECK: fails unless all links are ports of the bond.
pub(super) fn verify_links(
    conf: &BondConfig,
    inside: &ContainerNetns<'_>,
    bond: &Link,
) -> Result<()> {
    for named in &conf.links {
        let (name, bond_name) = (&named.name, &bond.name);
        let link = inside.require_link(name)?;
        if link.master != Some(bond.index) {
            let msg = format!("link \"{name}\" is not a port of \"{bond_name}\"");
            let remedy = format!(
                "in the container: ip link set {name} down; ip link set {name} master {bond_name}"
            );
            return Err(Error::internal(msg).with_details(remedy));
        }
    }
    Ok(())
}

/// Gives a recorded link back: to the host, or to the container that it was in. The bond is deleted
/// already.
pub(super) fn give_back(
    cx: &CallContext<'_>,
    record: &DeviceRecord,
    netns: Option<&Netns>,
) -> Result<DeviceReturn> {
    if !record.in_container {
        return DeviceSearch::for_record(record).return_device(cx.host_netlink()?, netns, None);
    }
    // A link that was deleted, with its namespace or by the plugin that made it, needs nothing.
    let Some(netns) = netns else { return Ok(DeviceReturn::Nowhere) };
    let inside = Netlink::open_in(netns)?;
    let name = &record.device.name;
    let Some(link) = inside.find_link(name)? else { return Ok(DeviceReturn::Nowhere) };
    if link.master.is_some() || !record.device.identity.has_kind_of(&link) {
        let msg =
            format!("\"{name}\" of the container is in use, or not the former link of the bond");
        return Ok(DeviceReturn::Returned(Some(Error::internal(msg))));
    }
    Ok(DeviceReturn::Returned(record.device.restore_device(&inside, &link).err()))
}

/// For a DEL without records, what is known of the configured links that are ports of the bond: an
/// ADD of the original keeps none. As with the original, a link of the host comes back down, and
/// one of the container is set up.
pub(super) fn unrecorded_ports(
    cx: &CallContext<'_>,
    conf: &BondConfig,
    req: &DelRequest,
    netns: &Netns,
) -> Result<Vec<DeviceRecord>> {
    let inside = ContainerNetns::open_in(netns)?;
    let bond = inside
        .netlink
        .find_link(req.ifname.as_str())?
        .filter(|link| link.kind.as_deref() == Some(KIND));
    let Some(bond) = bond else { return Ok(Vec::new()) };
    let in_container = conf.links_in_container;
    let mut records = Vec::new();
    for port in
        inside.netlink.dump_links()?.into_iter().filter(|link| link.master == Some(bond.index))
    {
        let is_named = conf.links.iter().any(|link| link.name == port.name);
        if !is_named || !(in_container || came_from_host(cx.host_netlink()?, &inside, &port)?) {
            warn!(
                "nothing proves that \"{}\" is a link of the bond: it stays in the container",
                port.name
            );
            continue;
        }
        // As the host sees it.
        let identity = DeviceIdentity::from_link(&Link { link_netnsid: None, ..port.clone() });
        let device =
            OriginalState { identity, up: in_container, ..OriginalState::from_name(&port.name) };
        let new =
            DeviceRecord::new(&req.id, &req.ifname, &netns.path().display().to_string(), device);
        records.push(DeviceRecord { port: port.name, in_container, ..new });
    }
    Ok(records)
}
