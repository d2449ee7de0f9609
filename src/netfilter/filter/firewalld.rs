//! Addresses as sources of a zone of firewalld, by its D-Bus interface. Only the runtime configuration of firewalld
//! is changed, so a reload deletes the sources.
//!
//! Sources have no owner in firewalld. A record of each attachment contains its addresses and zone: DEL and GC find
//! them without `prevResult`, and the next ADD and `cnibox repair` restore the sources of running containers after a
//! reload.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::dbus::{Bus, is_true, texts};
use super::missing;
use crate::attachment::{Keepsake, Kept};
use crate::cni::ip::host_net;
use crate::error::{Error, Result, io_text};
use crate::log;
use crate::netfilter::backend::Feature;
use crate::netfilter::layout::Restorable;
use crate::netfilter::shared::another;
use crate::netfilter::{Owner, Repair};
use crate::sort::sort;

/// The default of `firewalldZone`.
pub const DEFAULT_ZONE: &str = "trusted";

const NAME: &str = "org.fedoraproject.FirewallD1";
const ZONE: &str = "org.fedoraproject.FirewallD1.zone";

const KEPT: Kept = Kept("firewalld");

/// Has no tables, and the layout of the reference.
pub(in crate::netfilter) const FEATURE: Feature = Feature {
    state: Restorable { kept: KEPT, layouts: Vec::new, restore: |_| {} },
    heal: |_, repair| Ok(heal(repair)),
    remove: |_, owner, _| {
        // The record has the zone.
        let zone = if has(owner) { Zone::find(DEFAULT_ZONE) } else { None };
        zone.map_or(Ok(()), |mut zone| zone.del(owner, &[]))
    },
    hand_over: &[],
};

/// The sources of an attachment.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Record {
    zone: String,
    ips: Vec<IpAddr>,
}

/// A zone of a running firewalld.
#[derive(Debug)]
pub struct Zone<'a> {
    bus: Bus,
    name: &'a str,
}

impl<'a> Zone<'a> {
    /// The zone `name`; `None` if firewalld is not running.
    pub fn find(name: &'a str) -> Option<Zone<'a>> {
        let mut bus = Bus::system().inspect_err(|e| log::debug(io_text(e))).ok()?;
        let is_running = bus.has_owner(NAME).inspect_err(|e| log::debug(io_text(e))).ok()?;
        is_running.then_some(Zone { bus, name })
    }

    /// The zone `name`. Fails without a system bus.
    pub fn open(name: &'a str) -> Result<Zone<'a>> {
        let bus = Bus::system().map_err(|e| {
            Error::internal(format!("connect to the D-Bus system bus: {}", io_text(&e)))
                .with_details("start firewalld, or choose another \"backend\"")
        })?;
        Ok(Zone { bus, name })
    }

    /// Calls a method with a zone and a source.
    fn change(&mut self, member: &str, zone: &str, ip: IpAddr) -> io::Result<()> {
        self.bus.call(NAME, ZONE, member, &[zone, &host_net(ip).to_string()]).map(drop)
    }

    /// The sources of a zone, as firewalld writes them.
    fn sources(&mut self, zone: &str) -> io::Result<HashSet<String>> {
        let answer = self.bus.call(NAME, ZONE, "getSources", &[zone])?;
        Ok(texts(&answer).into_iter().collect())
    }

    /// Adds the addresses to the zone. On failure, removes those that were added. If the sources of another
    /// attachment are missing, restores those of all attachments.
    pub fn add(&mut self, owner: Owner<'_>, ips: &[IpAddr]) -> Result<()> {
        let earlier = KEPT.read::<Record>(owner);
        KEPT.keep(owner, Record { zone: self.name.to_owned(), ips: ips.to_vec() });
        let mut added = Vec::new();
        for ip in ips {
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
        if let Some(Record { zone, ips: mut former }) = earlier {
            former.retain(|ip| zone != self.name || !ips.contains(ip));
            self.remove_own(owner, &zone, former);
        }
        if let Some(other) = another(KEPT, owner, |_: &Record| true)
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
    pub fn check(&mut self, owner: Owner<'_>, ips: &[IpAddr]) -> Result<()> {
        for source in ips.iter().map(|ip| host_net(*ip).to_string()) {
            let reply = self.bus.call(NAME, ZONE, "querySource", &[self.name, &source]);
            let reply = reply.map_err(|error| {
                let msg = format!("failed to find the address {source} in {} zone", self.name);
                Error::internal(msg).with_details(io_text(&error))
            })?;
            if !is_true(&reply) {
                let what = format!("address {source} in {} zone", self.name);
                return Err(missing(owner, KEPT, &what));
            }
        }
        Ok(())
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

    /// Adds the sources of these attachments again.
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
            // A DEL that has ended meanwhile has removed the record first.
            if !KEPT.exists(&kept.owner().instance()) {
                self.remove_own(kept.owner(), zone, ips.clone());
            }
        }
    }

    /// Removes the sources of the attachment twice, and its record in between: a process that restores sources at the
    /// same time either finds no record, or has restored them before the second removal.
    pub fn del(&mut self, owner: Owner<'_>, ips: &[IpAddr]) -> Result<()> {
        let (mut ips, mut zone) = (ips.to_vec(), self.name.to_owned());
        if let Some(kept) = KEPT.read::<Record>(owner) {
            ips.extend(kept.ips);
            zone = kept.zone;
        }
        sort(&mut ips);
        ips.dedup();
        self.remove_own(owner, &zone, ips.clone());
        KEPT.remove(owner)?;
        let sources = self.sources(&zone).unwrap_or_default();
        ips.retain(|ip| sources.contains(&host_net(*ip).to_string()));
        self.remove_own(owner, &zone, ips);
        Ok(())
    }

    /// Removes the attachment's addresses from the zone, except those of other running attachments.
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

    /// Errors are ignored as by the reference: usually the source does not exist any more.
    fn remove_source(&mut self, zone: &str, ip: IpAddr) {
        if let Err(error) = self.change("removeSource", zone, ip) {
            let (source, error) = (host_net(ip), io_text(&error));
            log::debug(format_args!("remove source {source} from zone {zone}: {error}"));
        }
    }

    /// Fails unless firewalld is running.
    pub fn status(&mut self) -> Result<()> {
        match self.bus.has_owner(NAME) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Error::internal("firewalld is not running").with_details(
                "start it (systemctl start firewalld), or choose another \"backend\"",
            )),
            Err(error) => {
                Err(Error::internal(format!("query the D-Bus system bus: {}", io_text(&error))))
            }
        }
    }
}

/// Looks for the sources of running containers. Returns the first missing source.
pub fn heal(repair: Repair) -> Option<String> {
    let living = KEPT.living::<Record>();
    let mut zone = if living.is_empty() { None } else { Zone::find(DEFAULT_ZONE) }?;
    let missing = zone.first_missing(&living)?;
    if repair == Repair::Restore {
        zone.restore(living);
    }
    Some(missing)
}

/// Whether there is a record of the attachment's sources.
pub fn has(owner: Owner<'_>) -> bool {
    KEPT.exists(&owner.instance())
}

/// Removes the sources of the network's attachments that are not among `valid`.
pub fn gc(network: &str, valid: &[Owner<'_>]) -> Result<()> {
    let mut stale: Vec<Keepsake<Record>> = KEPT.all().collect();
    stale.retain(|kept| kept.owner().network == network && !valid.contains(&kept.owner()));
    let mut zone = if stale.is_empty() { None } else { Zone::find(DEFAULT_ZONE) };
    if let Some(zone) = &mut zone {
        for kept in stale {
            KEPT.remove(kept.owner())?;
            zone.remove_own(kept.owner(), &kept.content.zone, kept.content.ips.clone());
        }
    }
    Ok(())
}
