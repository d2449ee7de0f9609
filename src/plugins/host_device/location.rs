//! Where the device of an attachment is when the attachment ends: in the container under its name or
//! another name, on the host under a name of the kernel's choice, or gone.
//!
//! Only what is proven to be the device gets back what the device had: see [`super::identity`].
//! A link that may be the device is put aside, and a link that is not the device is left alone.

use super::find::Selector;
use super::identity::{Identity, came_from_host};
use super::origin::Origin;
use super::transfer;
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

/// What became of the device.
#[derive(Debug)]
pub(super) enum Outcome {
    /// It is as it was on the host, or nowhere.
    Done,
    /// It is on the host, but something could not be given back.
    Incomplete(Error),
}

/// The links of a container that may be the device.
#[derive(Debug)]
enum Found {
    Device(Box<(Link, Origin)>),
    /// What may be the device.
    Doubtful(Box<Link>),
    Nothing,
}

impl Known<'_> {
    /// Finds the device and gives it back; success if it is nowhere.
    pub(super) fn hand_back(
        &self,
        host: &Netlink,
        netns: Option<&Netns>,
        prev: Option<&CniResult>,
    ) -> Result<Outcome> {
        if let Some(netns) = netns {
            let inside = Inside::enter(netns)?;
            match self.in_container(host, &inside, prev)? {
                Found::Device(found) => {
                    let (device, origin) = *found;
                    let arrived = transfer::back_to_host(&inside, host, &device, &origin)?;
                    return Ok(Outcome::of(origin.give_back(host, &arrived)));
                }
                Found::Doubtful(link) => {
                    let name = transfer::put_aside(&inside, host, &link)?;
                    log::warn(format_args!(
                        "nothing proves that \"{}\" of the container is {}: it is on the host as \"{name}\", down",
                        link.name,
                        self.what()
                    ));
                    return Ok(Outcome::Done);
                }
                Found::Nothing => {}
            }
        }
        Ok(match self.on_host(host)? {
            Some((device, origin)) => Outcome::of(
                transfer::settle(host, &device, &origin)
                    .and_then(|settled| origin.give_back(host, &settled)),
            ),
            None => Outcome::Done,
        })
    }

    fn what(&self) -> String {
        self.name().map_or("the device".to_owned(), |name| format!("\"{name}\""))
    }

    /// The name on the host, as the host knows it.
    fn name(&self) -> Option<&str> {
        match (self.origin, self.selector) {
            (Some(origin), _) => Some(&origin.name),
            (None, Some(Selector::Name(name))) => Some(name),
            _ => None,
        }
    }

    fn in_container(
        &self,
        host: &Netlink,
        inside: &Inside<'_>,
        prev: Option<&CniResult>,
    ) -> Result<Found> {
        let Some((origin, identity)) = self.identity() else {
            return self.by_alias(host, inside, prev);
        };
        let links = inside.netlink.dump_links()?;
        if let Some(device) = identity.in_container(host, inside, &links, self.ifname)? {
            return Ok(Found::Device(Box::new((device.clone(), origin.clone()))));
        }
        let claims = |link: &&Link| link.name == self.ifname && link.alias == origin.name;
        Ok(match links.iter().find(claims) {
            Some(link) if identity.is_certain() => {
                let (name, what) = (&link.name, self.what());
                log::warn(format_args!(
                    "\"{name}\" of the container is not {what}: it stays there"
                ));
                Found::Nothing
            }
            Some(link) if identity.is_of_the_kind_of(link) => {
                Found::Doubtful(Box::new(link.clone()))
            }
            _ => Found::Nothing,
        })
    }

    fn identity(&self) -> Option<(&Origin, &Identity)> {
        let origin = self.origin?;
        Some((origin, origin.identity.as_ref()?))
    }

    /// What the alias tells where nothing is kept: that the link is a device of the host. Its name
    /// there must be known otherwise.
    fn by_alias(
        &self,
        host: &Netlink,
        inside: &Inside<'_>,
        prev: Option<&CniResult>,
    ) -> Result<Found> {
        let Some(link) = inside.netlink.link(self.ifname)? else { return Ok(Found::Nothing) };
        let reported = |entry: &Interface| {
            let mac = link.mac.map(|mac| mac.to_string()).unwrap_or_default();
            entry.name == link.name && entry.mac.eq_ignore_ascii_case(&mac) && !mac.is_empty()
        };
        let reported = prev.is_some_and(|prev| prev.interfaces.iter().any(reported));
        let ours = if link.alias.is_empty() {
            link.parent.is_some() || (reported && self.name().is_some())
        } else {
            self.selector.is_none_or(|selector| selector.admits(&link, &link.alias))
        };
        if !ours || (Identity::of(&link).is_certain() && !came_from_host(host, inside, &link)?) {
            log::warn(format_args!("\"{}\" in the container is no device of the host", link.name));
            return Ok(Found::Nothing);
        }
        let known = self.name().filter(|name| link.alias.is_empty() || link.alias == *name);
        Ok(match known {
            Some(name) if came_from_host(host, inside, &link)? => {
                Found::Device(Box::new((link, Origin::named(name))))
            }
            _ => Found::Doubtful(Box::new(link)),
        })
    }

    /// The device on the host, with something still to be given back. The kernel moves hardware
    /// there when its namespace ends, with the name that it had or `dev` and a number, and with its
    /// alias; after a DEL that was killed it has its own name.
    fn on_host(&self, host: &Netlink) -> Result<Option<(Link, Origin)>> {
        let links = || host.dump_links().context(|| "look for the device on the host");
        if let Some((origin, identity)) = self.identity() {
            let links = links()?;
            let device = identity.on_host(&links, self.ifname).filter(|link| {
                let settled = link.name == origin.name && link.alias != origin.name;
                !settled || (origin.up && !link.up)
            });
            return Ok(device.map(|link| (link.clone(), origin.clone())));
        }
        let Some(name) = self.name() else { return Ok(None) };
        let came_back = |link: &Link| {
            let number = link.name.strip_prefix("dev").unwrap_or_default();
            let by_kernel = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
            link.alias == name && (link.name == self.ifname || by_kernel)
        };
        let device = links()?.into_iter().find(came_back);
        Ok(device.map(|link| (link, Origin::named(name))))
    }
}

impl Outcome {
    /// Success if all is as it was.
    pub(super) fn into_result(self) -> Result<()> {
        match self {
            Outcome::Done => Ok(()),
            Outcome::Incomplete(error) => Err(error),
        }
    }

    fn of(given: Result<()>) -> Outcome {
        given.map_or_else(Outcome::Incomplete, |()| Outcome::Done)
    }
}
