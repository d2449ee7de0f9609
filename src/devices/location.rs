//! Finds the device of an attachment that ends: in the container under its name or another name, on
//! the host under a name chosen by the kernel, or nowhere.
//!
//! Only a link that is proved to be the device gets the name, addresses and routes of the device:
//! see [`super::identity`]. A link that may be the device is put aside, and all other links are
//! left alone.

use super::identity::{DeviceIdentity, came_from_host};
use super::origin::OriginalState;
use super::record::DeviceRecord;
use super::transfer;
use crate::iface::ContainerNetns;
use crate::netlink::{Link, Netlink};
use crate::netns::Netns;
use cni::error::{Error, ErrorContext, Result};
use cni::{CniResult, ResultInterface};

/// A link of the container that may be the device, with the state to restore; without a state
/// nothing proves that the link is the device.
type DeviceCandidate = (Link, Option<OriginalState>);

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

    /// Finds the device and gives it back to the host; success if the device is nowhere. Returns
    /// the error of a state that could not be restored completely.
    pub fn return_device(
        &self,
        host: &Netlink,
        netns: Option<&Netns>,
        prev: Option<&CniResult>,
    ) -> Result<Option<Error>> {
        if let Some(netns) = netns {
            let inside = ContainerNetns::open_in(netns)?;
            match self.find_in_container(host, &inside, prev)? {
                Some((device, Some(origin))) => {
                    let arrived = transfer::move_back_to_host(&inside, host, &device, &origin)?;
                    return Ok(origin.restore_device(host, &arrived).err());
                }
                Some((link, None)) => {
                    let name = transfer::move_candidate_to_host(&inside, host, &link)?;
                    warn!(
                        "nothing proves that \"{}\" of the container is {}: it is on the host as \
                         \"{name}\", down",
                        link.name,
                        self.device_description()
                    );
                    return Ok(None);
                }
                None => {}
            }
        }
        let Some((device, origin)) = self.find_on_host(host)? else { return Ok(None) };
        let renamed = transfer::rename_back(host, &device, &origin);
        Ok(renamed.and_then(|device| origin.restore_device(host, &device)).err())
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
    ) -> Result<Option<DeviceCandidate>> {
        let Some(origin) = self.origin else { return self.find_by_alias(host, inside, prev) };
        let OriginalState { identity, .. } = origin;
        let links = inside.netlink.dump_links()?;
        if let Some(device) = identity.find_in_container(host, inside, &links, self.ifname)? {
            return Ok(Some((device.clone(), Some(origin.clone()))));
        }
        let claims = |link: &&Link| link.name == self.ifname && link.alias == origin.name;
        let Some(link) = links.iter().find(claims) else { return Ok(None) };
        if identity.is_certain() {
            let (name, device) = (&link.name, self.device_description());
            warn!("\"{name}\" of the container is not {device}: it stays there");
            return Ok(None);
        }
        Ok(identity.has_kind_of(link).then(|| (link.clone(), None)))
    }

    /// Without a record, the alias shows that the link is a device of the host. The alias is not
    /// trusted as the name on the host, which must be known from the configuration.
    fn find_by_alias(
        &self,
        host: &Netlink,
        inside: &ContainerNetns<'_>,
        prev: Option<&CniResult>,
    ) -> Result<Option<DeviceCandidate>> {
        let Some(link) = inside.netlink.find_link(self.ifname)? else { return Ok(None) };
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
        let is_proved = came_from_host(host, inside, &link)?;
        if !is_own || (DeviceIdentity::from_link(&link).is_certain() && !is_proved) {
            warn!("\"{}\" in the container is not a device of the host", link.name);
            return Ok(None);
        }
        let known = self.host_name().filter(|name| link.alias.is_empty() || link.alias == *name);
        let origin = known.filter(|_| is_proved).map(OriginalState::from_name);
        Ok(Some((link, origin)))
    }

    /// The device on the host, if its state is not completely restored. The kernel moves hardware
    /// to the host when its namespace ends, under its old name or as `dev` and a number, with
    /// its alias; a DEL that was killed has renamed it already.
    fn find_on_host(&self, host: &Netlink) -> Result<Option<(Link, OriginalState)>> {
        let Some(name) = self.host_name() else { return Ok(None) };
        let links = host.dump_links().context(|| "look for the device on the host")?;
        if let Some(origin) = self.origin {
            let device =
                origin.identity.find_on_host(&links, self.ifname, &origin.name).filter(|link| {
                    let is_renamed = link.name == origin.name && link.alias != origin.name;
                    !is_renamed || (origin.up && !link.up)
                });
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
