//! Where the device of an attachment is when the attachment ends: in the container under its name or
//! another one, on the host under a name of the kernel's choice, or gone.

use super::find::Selector;
use super::journey;
use super::origin::Origin;
use crate::cni::{CniResult, Interface};
use crate::error::{Context, Error, Result};
use crate::iface::Inside;
use crate::log;
use crate::netlink::{Link, Netlink};
use crate::netns::Netns;

/// What is known of an attachment that ends.
#[derive(Debug)]
pub(super) struct Known<'a> {
    /// The name of the interface in the container.
    pub(super) ifname: &'a str,
    /// How the device was on the host, unless the reference did the ADD.
    pub(super) origin: Option<&'a Origin>,
    /// How the configuration names it.
    pub(super) selector: Option<&'a Selector>,
}

impl Known<'_> {
    /// Finds the device and gives it back; success if it is nowhere.
    pub(super) fn hand_back(
        &self,
        host: &Netlink,
        netns: Option<&Netns>,
        prev: Option<&CniResult>,
    ) -> Result<()> {
        if let Some(netns) = netns {
            let inside = Inside::enter(netns)?;
            if let Some((device, origin)) = self.in_container(&inside, prev)? {
                return journey::back_to_host(&inside, host, &device, &origin);
            }
        }
        match self.on_host(host)? {
            Some((device, origin)) => journey::settle(host, &device, &origin),
            None => Ok(()),
        }
    }

    /// The device in the container. It may have been renamed there.
    fn in_container(
        &self,
        inside: &Inside<'_>,
        prev: Option<&CniResult>,
    ) -> Result<Option<(Link, Origin)>> {
        let named = inside.netlink.link(self.ifname)?;
        let Some(origin) = self.origin else {
            return Ok(match named {
                Some(link) => self.by_alias(&link, prev)?.map(|origin| (link, origin)),
                None => None,
            });
        };
        if let Some(link) = named.filter(|link| link.alias == origin.name) {
            return Ok(Some((link, origin.clone())));
        }
        let links = inside.netlink.dump_links()?;
        let by_alias = links.iter().find(|link| link.alias == origin.name);
        let has_mac = |link: &&Link| link.mac.is_some_and(|mac| mac.to_string() == origin.mac);
        let device = by_alias.or_else(|| links.iter().filter(|l| !l.loopback).find(has_mac));
        Ok(device.map(|link| (link.clone(), origin.clone())))
    }

    /// What the alias tells where nothing else is known: the name on the host, unless the
    /// configuration speaks of another device.
    fn by_alias(&self, link: &Link, prev: Option<&CniResult>) -> Result<Option<Origin>> {
        let name = &link.name;
        if !link.alias.is_empty() {
            let ours = self.selector.is_none_or(|selector| selector.admits(link, &link.alias));
            return Ok(ours.then(|| Origin::named(&link.alias)));
        }
        let mac = link.mac.map(|mac| mac.to_string()).unwrap_or_default();
        let reported = |entry: &Interface| entry.name == *name && entry.mac == mac;
        match self.selector {
            Some(Selector::Name(host))
                if prev.is_some_and(|p| p.interfaces.iter().any(reported)) =>
            {
                Ok(Some(Origin::named(host)))
            }
            _ if link.parent.is_some() => Err(Error::internal(format!(
                "failed to find original ifname for \"{name}\" (alias is not set)"
            ))
            .with_details("move the device to the host by hand, or set its alias")),
            _ => {
                log::warn(format_args!("\"{name}\" in the container is no device of the host"));
                Ok(None)
            }
        }
    }

    /// The device on the host, with something still to be given back. The kernel moves hardware
    /// there when its namespace ends, with the name that it had or `dev` and a number, and with its
    /// alias; after a DEL that was killed it has its own name.
    fn on_host(&self, host: &Netlink) -> Result<Option<(Link, Origin)>> {
        let origin = match (self.origin, self.selector) {
            (Some(origin), _) => origin.clone(),
            (None, Some(Selector::Name(name))) if host.link(name)?.is_none() => Origin::named(name),
            _ => return Ok(None),
        };
        let came_back = |link: &Link| {
            let number = link.name.strip_prefix("dev").unwrap_or_default();
            let by_kernel = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
            let by_us = link.name == origin.name;
            link.alias == origin.name && (link.name == self.ifname || by_kernel || by_us)
        };
        let device = host.dump_links().context(|| "look for the device on the host")?;
        Ok(device.into_iter().find(came_back).map(|link| (link, origin)))
    }
}
