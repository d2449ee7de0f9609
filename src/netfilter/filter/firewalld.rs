//! Addresses as sources of a zone of firewalld, by its D-Bus interface. Only its running
//! configuration is changed: a reload of firewalld forgets them.
//!
//! firewalld knows no owners. Who gave it an address stands in sets of our `nf_tables` table,
//! `firewalld4` and `firewalld6`, so that DEL and GC find the addresses without `prevResult`. On
//! a kernel without `nf_tables` that part is left out.

use std::net::IpAddr;

use super::dbus::{Bus, Failure, Method};
use super::nftables::{SOURCES, remove};
use super::{Network, Owner, Pod, missing};
use crate::error::{Error, Result};
use crate::log;
use crate::netlink::nftables::{Batch, Element, Nft, Value};

/// The zone of a configuration that names none.
pub const DEFAULT_ZONE: &str = "trusted";

const NAME: &str = "org.fedoraproject.FirewallD1";
const ZONE: Method<'_> = Method {
    destination: NAME,
    path: "/org/fedoraproject/FirewallD1",
    interface: "org.fedoraproject.FirewallD1.zone",
    member: "",
};

/// A zone of firewalld that answers.
#[derive(Debug)]
pub struct Zone<'a> {
    bus: Bus,
    name: &'a str,
}

impl<'a> Zone<'a> {
    /// The zone `name`, if firewalld runs.
    pub fn find(name: &'a str) -> Option<Zone<'a>> {
        let mut bus = Bus::system().inspect_err(|e| log::debug(e)).ok()?;
        bus.has_owner(NAME).inspect_err(|e| log::debug(e)).ok()?.then_some(Zone { bus, name })
    }

    /// The zone `name` of a firewalld that was asked for by name.
    pub fn open(name: &'a str) -> Result<Zone<'a>> {
        let bus = Bus::system().map_err(|e| {
            Error::internal(format!("connect to the D-Bus system bus: {e}"))
                .with_details("start firewalld, or choose another \"backend\"")
        })?;
        Ok(Zone { bus, name })
    }

    fn call(&mut self, member: &'static str, ip: IpAddr) -> Result<bool, Failure> {
        let source = source(ip);
        let answer = self.bus.call(Method { member, ..ZONE }, &[self.name, &source])?;
        Ok(answer.is_true())
    }

    /// Puts the addresses into the zone: all of them, or none that was not there.
    pub fn add(&mut self, nft: &Nft, pod: &Pod) -> Result<()> {
        remember(nft, pod);
        let mut added = Vec::new();
        for ip in &pod.ips {
            match self.call("addSource", *ip) {
                Ok(_) => added.push(*ip),
                Err(error) if error.to_string().contains("ZONE_ALREADY_SET") => {}
                Err(error) => {
                    for ip in added {
                        self.remove_source(ip);
                    }
                    return Err(self.refused(*ip, &error));
                }
            }
        }
        Ok(())
    }

    fn refused(&self, ip: IpAddr, cause: &Failure) -> Error {
        let (source, zone) = (source(ip), self.name);
        let msg = format!("failed to add the address {source} to {zone} zone: {cause}");
        let remedy = match cause {
            Failure::Refused(_, text) if text.contains("ZONE_CONFLICT") => {
                "the address is in another zone: remove it there, or set \"firewalldZone\""
            }
            Failure::Refused(_, text) if text.contains("INVALID_ZONE") => {
                "create the zone, or set \"firewalldZone\" to one of firewall-cmd --get-zones"
            }
            _ => "is firewalld running? see systemctl status firewalld",
        };
        Error::internal(msg).with_details(remedy)
    }

    /// Verifies that each address is in the zone.
    pub fn check(&mut self, pod: &Pod) -> Result<()> {
        for ip in &pod.ips {
            let (source, zone) = (source(*ip), self.name);
            match self.call("querySource", *ip) {
                Ok(true) => {}
                Ok(false) => return Err(missing(format!("address {source} in {zone} zone"))),
                Err(error) => {
                    let msg = format!("failed to find the address {source} in {zone} zone");
                    return Err(Error::internal(msg).with_details(error.to_string()));
                }
            }
        }
        Ok(())
    }

    /// Takes the attachment's addresses out of the zone, but for those that somebody else has
    /// meanwhile.
    pub fn del(&mut self, nft: &Nft, pod: &Pod) {
        let owned = SOURCES.owned(nft, pod).unwrap_or_default();
        let foreign = SOURCES.foreign(nft, pod).unwrap_or_default();
        let mut ips = pod.ips.clone();
        ips.extend(owned.iter().filter_map(|(_, element)| address(element)));
        ips.sort();
        ips.dedup();
        for ip in ips.into_iter().filter(|ip| !foreign.contains(ip)) {
            self.remove_source(ip);
        }
        // Last, so that what is left by a DEL that is killed can be found.
        if !owned.is_empty()
            && let Err(error) = remove(nft, |nft| SOURCES.owned(nft, pod))
        {
            log::debug(format_args!("forget what firewalld got: {error}"));
        }
    }

    /// Takes the addresses of all attachments of the network but `valid` out of the zone.
    pub fn gc(&mut self, nft: &Nft, network: &Network, valid: &[Owner]) -> Result<()> {
        for ip in SOURCES.stale(nft, network, valid)?.iter().filter_map(|(_, e)| address(e)) {
            self.remove_source(ip);
        }
        remove(nft, |nft| SOURCES.stale(nft, network, valid))
    }

    /// The reference ignores every error here: most often the address is not there any more.
    fn remove_source(&mut self, ip: IpAddr) {
        if let Err(error) = self.call("removeSource", ip) {
            log::debug(format_args!("remove {} from {} zone: {error}", source(ip), self.name));
        }
    }

    /// Whether firewalld is there.
    pub fn status(&mut self) -> Result<()> {
        match self.bus.has_owner(NAME) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Error::internal("firewalld is not running").with_details(
                "start it (systemctl start firewalld), or choose another \"backend\"",
            )),
            Err(error) => Err(Error::internal(format!("ask the D-Bus system bus: {error}"))),
        }
    }
}

/// Whether firewalld was given an address of the attachment, as far as is known.
pub fn has(nft: &Nft, pod: &Pod) -> bool {
    SOURCES.owned(nft, pod).is_ok_and(|owned| !owned.is_empty())
}

/// Whether firewalld was given anything for the network by attachments that are not valid.
pub fn has_stale(nft: &Nft, network: &Network, valid: &[Owner]) -> bool {
    SOURCES.stale(nft, network, valid).is_ok_and(|stale| !stale.is_empty())
}

fn remember(nft: &Nft, pod: &Pod) {
    let write = || -> Result<()> {
        let mut batch = Batch::new();
        SOURCES.ensure(&mut batch);
        SOURCES.put(nft, pod, &mut batch)?;
        Ok(nft.commit(batch)?)
    };
    if let Err(error) = write() {
        log::debug(format_args!("remember what firewalld gets: {error}"));
    }
}

/// As the reference writes it.
fn source(ip: IpAddr) -> String {
    format!("{ip}/{}", if ip.is_ipv4() { 32 } else { 128 })
}

fn address(element: &Element) -> Option<IpAddr> {
    match element.key.0.first()? {
        Value::Ip(ip) => Some(*ip),
        _ => None,
    }
}
