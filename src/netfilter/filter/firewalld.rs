//! Addresses as sources of a zone of firewalld, by its D-Bus interface. Only firewalld's running
//! configuration is changed, so that its reload forgets them.
//!
//! firewalld knows no owners. A record of each attachment says which addresses it has in which zone:
//! DEL and GC find them without `prevResult`, and the next ADD, and `cnibox repair`, restore those of
//! running containers after a reload.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::dbus::{Bus, texts};
use super::{Pod, missing};
use crate::attachment::{Keepsake, Kept};
use crate::cni::ip::host_net;
use crate::error::{Error, Result, io_text};
use crate::log;
use crate::netfilter::Repair;
use crate::netfilter::names::Owner;
use crate::sort::sort;

/// The zone of a configuration that names none.
pub const DEFAULT_ZONE: &str = "trusted";

const NAME: &str = "org.fedoraproject.FirewallD1";
const ZONE: &str = "org.fedoraproject.FirewallD1.zone";

const KEPT: Kept = Kept::of("firewalld");

/// The sources of an attachment.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Record {
    zone: String,
    ips: Vec<IpAddr>,
}

/// A zone of firewalld that answers.
#[derive(Debug)]
pub struct Zone<'a> {
    bus: Bus,
    name: &'a str,
}

impl<'a> Zone<'a> {
    /// The zone `name`, if firewalld runs.
    pub fn find(name: &'a str) -> Option<Zone<'a>> {
        let mut bus = Bus::system().inspect_err(|e| log::debug(io_text(e))).ok()?;
        let is_there = bus.has_owner(NAME).inspect_err(|e| log::debug(io_text(e))).ok()?;
        is_there.then_some(Zone { bus, name })
    }

    /// The zone `name` of a firewalld that was asked for by name.
    pub fn open(name: &'a str) -> Result<Zone<'a>> {
        let bus = Bus::system().map_err(|e| {
            Error::internal(format!("connect to the D-Bus system bus: {}", io_text(&e)))
                .with_details("start firewalld, or choose another \"backend\"")
        })?;
        Ok(Zone { bus, name })
    }

    /// Adds a source to a zone, or removes it.
    fn change(&mut self, member: &str, zone: &str, ip: IpAddr) -> io::Result<()> {
        self.bus.call(NAME, ZONE, member, &[zone, &host_net(ip).to_string()]).map(drop)
    }

    /// The sources of a zone, as firewalld writes them.
    fn sources(&mut self, zone: &str) -> io::Result<HashSet<String>> {
        let answer = self.bus.call(NAME, ZONE, "getSources", &[zone])?;
        Ok(texts(&answer).into_iter().collect())
    }

    /// Makes the addresses sources of the zone: all of them, or none that was not there. Where those
    /// of another attachment are gone, the sources of all are restored.
    pub fn add(&mut self, pod: &Pod<'_>) -> Result<()> {
        let (owner, zone) = (pod.owner, self.name.to_owned());
        let earlier = KEPT.read::<Record>(owner);
        KEPT.keep(owner, Record { zone, ips: pod.ips.clone() });
        let mut added = Vec::new();
        for ip in &pod.ips {
            match self.change("addSource", self.name, *ip) {
                Ok(()) => added.push(*ip),
                Err(error) if error.to_string().contains("ZONE_ALREADY_SET") => {}
                Err(error) => {
                    for ip in added {
                        self.remove_source(self.name, ip);
                    }
                    match earlier {
                        Some(earlier) => KEPT.keep(owner, earlier),
                        None => KEPT.remove(owner)?,
                    }
                    return Err(self.refused(*ip, &error));
                }
            }
        }
        if let Some(Record { zone, ips }) = earlier {
            let former = ips.iter().filter(|ip| zone != self.name || !pod.ips.contains(ip));
            self.remove_own(owner, &zone, former.copied().collect());
        }
        if let Some(other) = KEPT.all::<Record>().find(|kept| kept.owner() != owner)
            && self.first_missing(&[other]).is_some()
        {
            self.restore(KEPT.living());
        }
        Ok(())
    }

    fn refused(&self, ip: IpAddr, cause: &io::Error) -> Error {
        let (source, zone, cause) = (host_net(ip), self.name, io_text(cause));
        let msg = format!("failed to add the address {source} to {zone} zone: {cause}");
        let remedy = if cause.contains("ZONE_CONFLICT") {
            "the address is in another zone: remove it there, or set \"firewalldZone\""
        } else if cause.contains("INVALID_ZONE") {
            "create the zone, or set \"firewalldZone\" to one of firewall-cmd --get-zones"
        } else {
            "is firewalld running? see systemctl status firewalld"
        };
        Error::internal(msg).with_details(remedy)
    }

    /// Verifies that each address is in the zone.
    pub fn check(&mut self, pod: &Pod<'_>) -> Result<()> {
        let sources = self.sources(self.name).map_err(|error| {
            let msg = format!("failed to list the sources of {} zone", self.name);
            Error::internal(msg).with_details(io_text(&error))
        })?;
        let absent =
            pod.ips.iter().map(|ip| host_net(*ip)).find(|ip| !sources.contains(&ip.to_string()));
        absent.map_or(Ok(()), |source| {
            let error = missing(format!("address {source} in {} zone", self.name));
            Err(error.with_details(KEPT.remedy(pod.owner, None)))
        })
    }

    /// What a reload of firewalld took from running containers: the first source.
    pub fn damage(&mut self) -> Option<String> {
        self.first_missing(&KEPT.living())
    }

    fn first_missing(&mut self, all: &[Keepsake<Record>]) -> Option<String> {
        let mut zones = HashMap::new();
        all.iter().find_map(|kept| {
            let Record { zone, ips } = &kept.content;
            let ask = || self.sources(zone).inspect_err(|e| log::debug(io_text(e))).ok();
            let sources = zones.entry(zone).or_insert_with(ask).as_ref()?;
            let mut wanted = ips.iter().map(|ip| host_net(*ip).to_string());
            let absent = wanted.find(|source| !sources.contains(source))?;
            Some(format!("source {absent} is missing in firewalld's zone {zone}"))
        })
    }

    /// Makes the addresses of these attachments sources again.
    fn restore(&mut self, all: Vec<Keepsake<Record>>) {
        for kept in all {
            let Record { zone, ips } = &kept.content;
            for ip in ips {
                if let Err(e) = self.change("addSource", zone, *ip)
                    && !e.to_string().contains("ZONE_ALREADY_SET")
                {
                    let (source, cause) = (host_net(*ip), io_text(&e));
                    log::warn(format_args!("restore source {source} in zone {zone}: {cause}"));
                }
            }
            // A DEL that ended meanwhile has removed the record first.
            if !KEPT.is_there(&kept.owner().instance()) {
                self.remove_own(kept.owner(), zone, ips.clone());
            }
        }
    }

    /// Removes the sources of the attachment twice, and its record in between: a process that restores sources at the
    /// same time either finds no record, or has restored them before the second removal.
    pub fn del(&mut self, pod: &Pod<'_>) -> Result<()> {
        let kept = KEPT.read::<Record>(pod.owner);
        let zone = kept.as_ref().map_or_else(|| self.name.to_owned(), |kept| kept.zone.clone());
        let mut ips = pod.ips.clone();
        ips.extend(kept.into_iter().flat_map(|kept| kept.ips));
        sort(&mut ips);
        ips.dedup();
        self.remove_own(pod.owner, &zone, ips.clone());
        KEPT.remove(pod.owner)?;
        let sources = self.sources(&zone).unwrap_or_default();
        ips.retain(|ip| sources.contains(&host_net(*ip).to_string()));
        self.remove_own(pod.owner, &zone, ips);
        Ok(())
    }

    /// Removes the attachment's addresses from the zone, without those of other running attachments.
    fn remove_own(&mut self, owner: Owner<'_>, zone: &str, mut ips: Vec<IpAddr>) {
        if !ips.is_empty() {
            let mut others = KEPT.living::<Record>();
            others.retain(|kept| kept.owner() != owner);
            ips.retain(|ip| !others.iter().any(|kept| kept.content.ips.contains(ip)));
        }
        for ip in ips {
            self.remove_source(zone, ip);
        }
    }

    /// Removes the sources of all attachments of the network but `valid`.
    pub fn gc(&mut self, network: &str, valid: &[Owner<'_>]) -> Result<()> {
        let stale: Vec<Keepsake<Record>> = stale(network, valid).collect();
        for kept in &stale {
            KEPT.remove(kept.owner())?;
            self.remove_own(kept.owner(), &kept.content.zone, kept.content.ips.clone());
        }
        Ok(())
    }

    /// The reference ignores every error here: most often the source is not there any more.
    fn remove_source(&mut self, zone: &str, ip: IpAddr) {
        if let Err(error) = self.change("removeSource", zone, ip) {
            let (source, error) = (host_net(ip), io_text(&error));
            log::debug(format_args!("remove source {source} from zone {zone}: {error}"));
        }
    }

    /// Whether firewalld is there.
    pub fn status(&mut self) -> Result<()> {
        match self.bus.has_owner(NAME) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Error::internal("firewalld is not running").with_details(
                "start it (systemctl start firewalld), or choose another \"backend\"",
            )),
            Err(error) => {
                Err(Error::internal(format!("ask the D-Bus system bus: {}", io_text(&error))))
            }
        }
    }
}

/// Looks for the sources of running containers, which a reload of firewalld removes. Returns the first that
/// was missing.
pub fn heal(repair: Repair) -> Option<String> {
    let living = KEPT.living::<Record>();
    let mut zone = if living.is_empty() { None } else { Zone::find(DEFAULT_ZONE) }?;
    let missing = zone.first_missing(&living)?;
    if repair == Repair::Restore {
        zone.restore(living);
    }
    Some(missing)
}

/// Whether the attachment has sources, as its record says.
pub fn has(pod: &Pod<'_>) -> bool {
    KEPT.is_there(&pod.owner.instance())
}

/// Whether attachments of the network have sources that are not among `valid`.
pub fn has_stale(network: &str, valid: &[Owner<'_>]) -> bool {
    stale(network, valid).next().is_some()
}

fn stale(network: &str, valid: &[Owner<'_>]) -> impl Iterator<Item = Keepsake<Record>> {
    let is_stale = move |kept: &Keepsake<Record>| {
        kept.owner().network == network && !valid.contains(&kept.owner())
    };
    KEPT.all().filter(is_stale)
}
