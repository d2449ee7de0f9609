//! Addresses as sources of a zone of firewalld, by its D-Bus interface. Only the runtime
//! configuration of firewalld is changed, so a reload deletes the sources.
//!
//! Sources have no owner in firewalld. A record of each attachment contains its addresses and zone:
//! DEL and GC find them without `prevResult`, and the next ADD and `cnibox repair` restore the
//! sources of running containers after a reload.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::dbus::DbusConnection;
use crate::attachment::{RecordStore, StoredRecord, decode_part};
use crate::netfilter::AttachmentId;
use crate::netfilter::backend::FilterFeature;
use crate::netfilter::elements::find_other_record;
use crate::netfilter::layout::RestorableState;
use cni::error::{Error, Result, io_text};
use cni::ip::host_net;
use cni::json::Json;
use cni::sort::sort_items;

/// The default of `firewalldZone`.
pub const DEFAULT_ZONE: &str = "trusted";

const NAME: &str = "org.fedoraproject.FirewallD1";
const ZONE: &str = "org.fedoraproject.FirewallD1.zone";

/// firewalld's error for a zone that it lacks.
const INVALID_ZONE: &str = "INVALID_ZONE";

const RECORDS: RecordStore = RecordStore("firewalld");

/// The feature, which has no tables, and the layout of the reference.
pub const FEATURE: FilterFeature = FilterFeature {
    check: |_, _, part| check_recorded_sources(part),
    restore: |_| {
        restore_missing_sources();
        Ok(())
    },
    remove: |_, owner, _| {
        // The record has the zone.
        let zone = if has_record(owner) { FirewalldZone::find_running(DEFAULT_ZONE) } else { None };
        zone.map_or(Ok(()), |mut zone| zone.delete_sources(owner, &[]))
    },
    ..FilterFeature::new(RestorableState {
        kept: RECORDS,
        layouts: &[],
        needs_table: |_| false,
        restore: |_| {},
    })
};

/// The sources of an attachment.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct FirewalldPart {
    zone: String,
    ips: Vec<IpAddr>,
}

/// A zone of a running firewalld.
#[derive(Debug)]
pub struct FirewalldZone<'a> {
    bus: DbusConnection,
    name: &'a str,
}

impl<'a> FirewalldZone<'a> {
    /// The zone `name`; `None` if firewalld is not running.
    pub fn find_running(name: &'a str) -> Option<FirewalldZone<'a>> {
        let mut bus = DbusConnection::connect_system_bus()
            .inspect_err(|e| debug!("could not connect to the system bus: {}", io_text(e)))
            .ok()?;
        let is_running = bus
            .has_name_owner(NAME)
            .inspect_err(|e| debug!("could not ask the system bus for firewalld: {}", io_text(e)))
            .ok()?;
        is_running.then_some(FirewalldZone { bus, name })
    }

    /// The zone `name`. Fails without a system bus.
    pub fn open_zone(name: &'a str) -> Result<FirewalldZone<'a>> {
        let bus = DbusConnection::connect_system_bus().map_err(|e| {
            Error::internal(format!("connect to the D-Bus system bus: {}", io_text(&e)))
                .with_details("start firewalld, or choose another \"backend\"")
        })?;
        Ok(FirewalldZone { bus, name })
    }

    /// Calls a method with a zone and a source.
    fn change_source(&mut self, member: &str, zone: &str, ip: IpAddr) -> io::Result<()> {
        self.bus.call_method(NAME, ZONE, member, &[zone, &host_net(ip).to_string()]).map(drop)
    }

    /// The sources of a zone, as firewalld writes them.
    fn list_sources(&mut self, zone: &str) -> io::Result<HashSet<String>> {
        Ok(self
            .bus
            .call_method(NAME, ZONE, "getSources", &[zone])?
            .to_strings()
            .into_iter()
            .collect())
    }

    /// Adds the addresses to the zone. On failure, removes the addresses that were added. If the
    /// sources of another attachment are missing, restores the sources of all attachments.
    pub fn add_sources(&mut self, owner: AttachmentId<'_>, ips: &[IpAddr]) -> Result<()> {
        let earlier = RECORDS.read_content::<FirewalldPart>(owner);
        RECORDS.add_part(owner, FirewalldPart { zone: self.name.to_owned(), ips: ips.to_vec() });
        let mut added = Vec::new();
        for ip in ips {
            match self.change_source("addSource", self.name, *ip) {
                Ok(()) => added.push(*ip),
                Err(error) if error.to_string().contains("ZONE_ALREADY_SET") => {}
                Err(error) => {
                    for ip in added {
                        self.remove_source(self.name, ip);
                    }
                    match earlier {
                        Some(earlier) => RECORDS.add_part(owner, earlier),
                        None => RECORDS.remove_part(owner)?,
                    }
                    return Err(self.refusal_error(*ip, &error));
                }
            }
        }
        if let Some(FirewalldPart { zone, ips: mut former }) = earlier {
            former.retain(|ip| zone != self.name || !ips.contains(ip));
            self.remove_unshared_sources(owner, &zone, former);
        }
        if let Some(other) = find_other_record(RECORDS, owner, |_: &FirewalldPart| true)
            && self.find_missing_source(&[&other.content]).is_some()
        {
            self.restore_sources(RECORDS.restorable_parts());
        }
        Ok(())
    }

    fn refusal_error(&self, ip: IpAddr, cause: &io::Error) -> Error {
        let (source, zone, cause) = (host_net(ip), self.name, io_text(cause));
        let msg = format!("failed to add the address {source} to {zone} zone: {cause}");
        let remedy = if cause.contains("ZONE_CONFLICT") {
            "the address is in another zone: remove it there, or set \"firewalldZone\""
        } else if cause.contains(INVALID_ZONE) {
            return self.missing_zone_error();
        } else {
            "is firewalld running? see systemctl status firewalld"
        };
        Error::internal(msg).with_details(remedy)
    }

    fn missing_zone_error(&self) -> Error {
        let zone = self.name;
        Error::internal(format!("firewalld has no zone \"{zone}\"")).with_details(format!(
            "firewall-cmd --permanent --new-zone={zone} && firewall-cmd --reload; or set \
             \"firewalldZone\" to one of firewall-cmd --get-zones"
        ))
    }

    /// Verifies that each address is in the zone.
    pub fn check_sources(&mut self, owner: AttachmentId<'_>, ips: &[IpAddr]) -> Result<()> {
        for source in ips.iter().map(|ip| host_net(*ip).to_string()) {
            let reply = self.bus.call_method(NAME, ZONE, "querySource", &[self.name, &source]);
            let reply = reply.map_err(|error| {
                let msg = format!("failed to find the address {source} in {} zone", self.name);
                Error::internal(msg).with_details(io_text(&error))
            })?;
            if !reply.is_true() {
                let msg = format!("expected address {source} in {} zone not found", self.name);
                return Err(Error::internal(msg).with_details(RECORDS.restore_remedy(owner)));
            }
        }
        Ok(())
    }

    fn find_missing_source(&mut self, all: &[&FirewalldPart]) -> Option<String> {
        let mut zones = HashMap::new();
        all.iter().find_map(|FirewalldPart { zone, ips }| {
            let ask = || {
                self.list_sources(zone)
                    .inspect_err(|e| {
                        debug!("could not list the sources of zone {zone}: {}", io_text(e));
                    })
                    .ok()
            };
            let sources = zones.entry(zone).or_insert_with(ask).as_ref()?;
            let mut wanted = ips.iter().map(|ip| host_net(*ip).to_string());
            let absent = wanted.find(|source| !sources.contains(source))?;
            Some(format!("source {absent} is missing in firewalld's zone {zone}"))
        })
    }

    /// Adds the sources of these attachments again.
    fn restore_sources(&mut self, all: Vec<StoredRecord<FirewalldPart>>) {
        for kept in all {
            let FirewalldPart { zone, ips } = &kept.content;
            for ip in ips {
                if let Err(e) = self.change_source("addSource", zone, *ip)
                    && !e.to_string().contains("ZONE_ALREADY_SET")
                {
                    let (source, cause) = (host_net(*ip), io_text(&e));
                    warn!("could not restore source {source} in zone {zone}: {cause}");
                }
            }
            // A DEL that has ended meanwhile has removed the record first.
            if !RECORDS.has_instance(&kept.attachment_id().instance_id()) {
                self.remove_unshared_sources(kept.attachment_id(), zone, ips.clone());
            }
        }
    }

    /// Removes the sources of the attachment twice, and its record in between: a process that
    /// restores sources at the same time either finds no record, or has restored them before
    /// the second removal.
    pub fn delete_sources(&mut self, owner: AttachmentId<'_>, ips: &[IpAddr]) -> Result<()> {
        let (mut ips, mut zone) = (ips.to_vec(), self.name.to_owned());
        if let Some(kept) = RECORDS.read_content::<FirewalldPart>(owner) {
            ips.extend(kept.ips);
            zone = kept.zone;
        }
        sort_items(&mut ips);
        ips.dedup();
        self.remove_unshared_sources(owner, &zone, ips.clone());
        RECORDS.remove_part(owner)?;
        let sources = self.list_sources(&zone).unwrap_or_default();
        ips.retain(|ip| sources.contains(&host_net(*ip).to_string()));
        self.remove_unshared_sources(owner, &zone, ips);
        Ok(())
    }

    /// Removes the attachment's addresses from the zone, except those of other running attachments.
    fn remove_unshared_sources(
        &mut self,
        owner: AttachmentId<'_>,
        zone: &str,
        mut ips: Vec<IpAddr>,
    ) {
        if !ips.is_empty() {
            let mut others = RECORDS.restorable_parts::<FirewalldPart>();
            others.retain(|kept| kept.attachment_id() != owner);
            ips.retain(|ip| !others.iter().any(|kept| kept.content.ips.contains(ip)));
        }
        for ip in ips {
            self.remove_source(zone, ip);
        }
    }

    /// Errors are ignored, as in the reference: usually the source no longer exists.
    fn remove_source(&mut self, zone: &str, ip: IpAddr) {
        if let Err(error) = self.change_source("removeSource", zone, ip) {
            let (source, error) = (host_net(ip), io_text(&error));
            debug!("could not remove source {source} from zone {zone}: {error}");
        }
    }

    /// Fails unless firewalld is running and has the zone.
    pub fn require_zone(&mut self) -> Result<()> {
        match self.bus.has_name_owner(NAME) {
            Ok(true) => match self.list_sources(self.name) {
                Err(error) if error.to_string().contains(INVALID_ZONE) => {
                    Err(self.missing_zone_error())
                }
                _ => Ok(()),
            },
            Ok(false) => Err(Error::internal("firewalld is not running").with_details(
                "start it (systemctl start firewalld), or choose another \"backend\"",
            )),
            Err(error) => {
                Err(Error::internal(format!("query the D-Bus system bus: {}", io_text(&error))))
            }
        }
    }
}

/// Fails if a source of the record is missing, while firewalld runs.
fn check_recorded_sources(part: &Json) -> Result<()> {
    let Some(sources) = decode_part::<FirewalldPart>(part) else { return Ok(()) };
    let missing = FirewalldZone::find_running(DEFAULT_ZONE)
        .and_then(|mut zone| zone.find_missing_source(&[&sources]));
    missing.map_or(Ok(()), |missing| Err(Error::internal(missing)))
}

fn restore_missing_sources() {
    let living = RECORDS.restorable_parts::<FirewalldPart>();
    let zone = if living.is_empty() { None } else { FirewalldZone::find_running(DEFAULT_ZONE) };
    if let Some(mut zone) = zone
        && zone
            .find_missing_source(&living.iter().map(|kept| &kept.content).collect::<Vec<_>>())
            .is_some()
    {
        zone.restore_sources(living);
    }
}

/// Whether there is a record of the attachment's sources.
pub fn has_record(owner: AttachmentId<'_>) -> bool {
    RECORDS.has_instance(&owner.instance_id())
}

/// Removes the sources of the network's attachments that are not among `valid`.
pub fn remove_stale_sources(network: &str, valid: &[AttachmentId<'_>]) -> Result<()> {
    let mut stale: Vec<StoredRecord<FirewalldPart>> = RECORDS.iter_parts().collect();
    stale.retain(|kept| {
        kept.attachment_id().network == network && !valid.contains(&kept.attachment_id())
    });
    let mut zone = if stale.is_empty() { None } else { FirewalldZone::find_running(DEFAULT_ZONE) };
    if let Some(zone) = &mut zone {
        for kept in stale {
            RECORDS.remove_part(kept.attachment_id())?;
            zone.remove_unshared_sources(
                kept.attachment_id(),
                &kept.content.zone,
                kept.content.ips.clone(),
            );
        }
    }
    Ok(())
}
