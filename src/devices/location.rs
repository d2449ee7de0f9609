//! Finds the device of an attachment that ends: in the container under its name or another name, on
//! the host under a name chosen by the kernel, or nowhere.
//!
//! Only a link that is proved to be the device gets the addresses and routes of the device: see
//! [`super::identity`]. Of the kinds that prove nothing, a link under the device's name in the
//! container gets the device's name. All other links are left alone.

use super::identity::{DeviceIdentity, came_from_host};
use super::origin::OriginalState;
use super::record::{DeviceRecord, DeviceReturn};
use super::transfer;
use crate::iface::ContainerNetns;
use crate::netlink::{Link, Netlink};
use crate::netns::Netns;
use cni::error::{Error, ErrorContext, Result};
use cni::{CniResult, ResultInterface};

/// The device, or a link that is taken for it, with the state to restore; without a state its name
/// on the host is unknown or taken.
type DeviceCandidate = (Link, Option<OriginalState>);

/// The link in the place of the device in the container.
enum FoundInside {
    Device(Box<DeviceCandidate>),
    /// See [`DeviceReturn::Stays`].
    Unproved,
    Nothing,
}

impl FoundInside {
    fn device(link: Link, origin: Option<OriginalState>) -> FoundInside {
        FoundInside::Device(Box::new((link, origin)))
    }
}

/// The search for the device of an attachment that ends.
pub struct DeviceSearch<'a> {
    /// The name of the interface in the container.
    pub ifname: &'a str,
    /// The recorded state of the device on the host; `None` if the reference plugin did the ADD.
    pub origin: Option<&'a OriginalState>,
    /// The name of the device on the host by the configuration.
    pub configured: Option<&'a str>,
    /// Whether the configuration may mean a link of the container, whose name on the host may have
    /// been the second argument.
    pub may_select: &'a dyn Fn(&Link, &str) -> bool,
}

impl<'a> DeviceSearch<'a> {
    pub fn for_record(record: &'a DeviceRecord) -> DeviceSearch<'a> {
        DeviceSearch {
            ifname: record.name_in_container(),
            origin: Some(&record.device),
            configured: None,
            may_select: &|_, _| true,
        }
    }

    /// Finds the device and gives it back to the host.
    pub fn return_device(
        &self,
        host: &Netlink,
        netns: Option<&Netns>,
        prev: Option<&CniResult>,
    ) -> Result<DeviceReturn> {
        if let Some(netns) = netns {
            let inside = ContainerNetns::open_in(netns)?;
            match self.find_in_container(host, &inside, prev)? {
                FoundInside::Device(found) => {
                    let (link, origin) = *found;
                    return return_link(host, &inside, &link, origin).map(DeviceReturn::Returned);
                }
                FoundInside::Unproved => return Ok(DeviceReturn::Stays),
                FoundInside::Nothing => {}
            }
        }
        self.restore_on_host(host)
    }

    /// Restores the device if it is on the host.
    pub fn restore_on_host(&self, host: &Netlink) -> Result<DeviceReturn> {
        let Some((device, origin)) = self.find_on_host(host)? else {
            return Ok(DeviceReturn::Nowhere);
        };
        if !is_unfinished(&device, &origin) && (device.up || !origin.up) {
            return Ok(DeviceReturn::Returned(None));
        }
        let renamed = transfer::rename_back(host, &device, &origin);
        let restored = renamed.and_then(|device| origin.restore_device(host, &device));
        Ok(DeviceReturn::Returned(restored.err()))
    }

    /// Whether the device is on the host and lacks its name, or has its name as alias.
    pub fn is_unfinished_on_host(&self, host: &Netlink) -> Result<bool> {
        Ok(self.find_on_host(host)?.is_some_and(|(device, origin)| is_unfinished(&device, &origin)))
    }

    fn device_description(&self) -> String {
        self.host_name().map_or("the device".to_owned(), |name| format!("\"{name}\""))
    }

    fn host_name(&self) -> Option<&str> {
        self.origin.map_or(self.configured, |origin| Some(&origin.name))
    }

    fn find_in_container(
        &self,
        host: &Netlink,
        inside: &ContainerNetns<'_>,
        prev: Option<&CniResult>,
    ) -> Result<FoundInside> {
        let Some(origin) = self.origin else { return self.find_by_alias(host, inside, prev) };
        let OriginalState { identity, .. } = origin;
        let links = inside.netlink.dump_links()?;
        if let Some(device) = identity.find_in_container(host, inside, &links, self.ifname)? {
            return Ok(FoundInside::device(device.clone(), Some(origin.clone())));
        }
        let claims = |link: &&Link| link.name == self.ifname && link.alias == origin.name;
        let Some(link) = links.iter().find(claims) else { return Ok(FoundInside::Nothing) };
        if identity.is_certain() || !identity.has_kind_of(link) {
            let (name, device) = (&link.name, self.device_description());
            warn!("\"{name}\" of the container is not {device}: it stays there");
            return Ok(FoundInside::Nothing);
        }
        let unproved = OriginalState {
            up: false,
            master: String::new(),
            addresses: Vec::new(),
            routes: Vec::new(),
            ..origin.clone()
        };
        self.take_for_device(host, link.clone(), unproved)
    }

    /// A link of a kind that proves nothing is taken for the device, because no later container
    /// would get the device otherwise: it gets the name, if that is free, but no addresses and
    /// routes.
    fn take_for_device(
        &self,
        host: &Netlink,
        link: Link,
        origin: OriginalState,
    ) -> Result<FoundInside> {
        if host.find_link(&origin.name)?.is_some() {
            return Ok(FoundInside::device(link, None));
        }
        warn!(
            "nothing proves that \"{}\" of the container is {}: it is on the host under that \
             name, down, without addresses",
            link.name,
            self.device_description()
        );
        Ok(FoundInside::device(link, Some(origin)))
    }

    /// Without a record, the alias shows that the link is a device of the host. The alias is not
    /// trusted as the name on the host, which must be known from the configuration.
    fn find_by_alias(
        &self,
        host: &Netlink,
        inside: &ContainerNetns<'_>,
        prev: Option<&CniResult>,
    ) -> Result<FoundInside> {
        let Some(link) = inside.netlink.find_link(self.ifname)? else {
            return Ok(FoundInside::Nothing);
        };
        let reported = |entry: &ResultInterface| {
            let mac = link.mac.map(|mac| mac.to_string()).unwrap_or_default();
            entry.name == link.name && entry.mac.eq_ignore_ascii_case(&mac) && !mac.is_empty()
        };
        let reported = prev.is_some_and(|prev| prev.interfaces.iter().any(reported));
        let is_own = if link.alias.is_empty() {
            link.parent.is_some() || (reported && self.host_name().is_some())
        } else {
            (self.may_select)(&link, &link.alias)
        };
        if !is_own {
            warn!("\"{}\" in the container is not a device of the host", link.name);
            return Ok(FoundInside::Nothing);
        }
        let is_certain = DeviceIdentity::from_link(&link).is_certain();
        if is_certain && !came_from_host(host, inside, &link)? {
            warn!(
                "nothing proves that \"{}\" of the container came from the host: it stays there, \
                 and keeps its addresses",
                link.name
            );
            return Ok(FoundInside::Unproved);
        }
        let known = self.host_name().filter(|name| link.alias.is_empty() || link.alias == *name);
        let Some(name) = known else { return Ok(FoundInside::device(link, None)) };
        let origin = OriginalState::from_name(name);
        if is_certain {
            Ok(FoundInside::device(link, Some(origin)))
        } else {
            self.take_for_device(host, link, origin)
        }
    }

    /// The device on the host. The kernel moves hardware to the host when its namespace ends, under
    /// its old name or as `dev` and a number, with its alias; a DEL that was killed has renamed it
    /// already.
    fn find_on_host(&self, host: &Netlink) -> Result<Option<(Link, OriginalState)>> {
        let Some(name) = self.host_name() else { return Ok(None) };
        let links = host.dump_links().context(|| "look for the device on the host")?;
        if let Some(origin) = self.origin {
            let device = origin.identity.find_on_host(&links, self.ifname, &origin.name);
            return Ok(device.map(|link| (link.clone(), origin.clone())));
        }
        Ok(links
            .into_iter()
            .find(|link| {
                let number = link.name.strip_prefix("dev").unwrap_or_default();
                let by_kernel = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
                link.alias == name && (link.name == self.ifname || by_kernel)
            })
            .map(|link| (link, OriginalState::from_name(name))))
    }
}

/// Moves a link that was found in the container to the host. Returns the error of a state that could
/// not be restored completely.
fn return_link(
    host: &Netlink,
    inside: &ContainerNetns<'_>,
    link: &Link,
    origin: Option<OriginalState>,
) -> Result<Option<Error>> {
    if let Some(origin) = origin {
        let arrived = transfer::move_back_to_host(inside, host, link, &origin)?;
        return Ok(origin.restore_device(host, &arrived).err());
    }
    let name = transfer::move_unnamed_to_host(inside, host, link)?;
    warn!(
        "the name of \"{}\" of the container is unknown or taken: it is on the host as \"{name}\", \
         down",
        link.name
    );
    Ok(None)
}

/// Whether a device on the host lacks its name or its alias, which is restored last.
fn is_unfinished(device: &Link, origin: &OriginalState) -> bool {
    device.name != origin.name || device.alias == origin.name
}
