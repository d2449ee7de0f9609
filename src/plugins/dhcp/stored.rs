//! What is in the file of a lease.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use ipnet::Ipv4Net;
use serde::{Deserialize, Serialize};

use super::protocol::family::{Family, Lease};
use super::protocol::message::Options;
use super::protocol::timing::{Moment, NEVER};
use super::protocol::{lease, v6};
use super::record::Record;
use super::wire::{Key, pairs};
use crate::cni::json::{self, Json};
use crate::error::Result;
use crate::netlink::Mac;

/// The layout of the files of a family. A daemon that knows a later one reads these as well, and
/// one that does not know a family does not take its leases for others.
fn layout(family: Family) -> u32 {
    match family {
        Family::V4 => 1,
        Family::V6 => 2,
    }
}

/// What files of all layouts have, and all that a file has.
pub(super) struct Own {
    layout: u32,
    pub(super) boot: String,
    pub(super) key: Key,
    json: Json,
}

impl Own {
    pub(super) fn parse(bytes: &[u8]) -> Option<Own> {
        let json = Json::parse(bytes).ok()?;
        let layout = json.get_present("layout")?.decode().ok()?;
        let boot = json.get_present("boot")?.decode().ok()?;
        let key = json.get_present("key")?.decode().ok()?;
        Some(Own { layout, boot, key, json })
    }

    /// `None` for another boot, and for a layout or a lease that is not known here.
    pub(super) fn into_record(self, boot: &str) -> Option<Record> {
        let known = self.layout == layout(self.key.family) && self.boot == boot;
        known.then(|| self.json.decode::<Stored>().ok()?.into_record())?
    }
}

/// The record in a file of whatever boot, for the fuzz targets.
pub fn read(bytes: &[u8]) -> Option<Record> {
    let own = Own::parse(bytes)?;
    let boot = own.boot.clone();
    own.into_record(&boot)
}

/// The bytes of a record's file.
pub(super) fn encode(record: &Record, boot: &str) -> Result<String> {
    json::compact(&Stored::from((record, boot)))
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct Stored {
    layout: u32,
    boot: String,
    key: Key,
    netns: String,
    netns_id: (u64, u64),
    mac: [u8; 6],
    #[serde(with = "pairs")]
    options: Options,
    priority: u32,
    bare: bool,
    #[serde(default)]
    lease: Option<StoredLease>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lease_v6: Option<StoredLeaseV6>,
}

/// Times in milliseconds; an absent one is never.
#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct StoredLease {
    address: Ipv4Addr,
    prefix: u8,
    server: Ipv4Addr,
    server_mac: [u8; 6],
    #[serde(default)]
    renew: Option<u64>,
    #[serde(default)]
    rebind: Option<u64>,
    #[serde(default)]
    expires: Option<u64>,
    #[serde(with = "pairs")]
    options: Options,
}

#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct StoredLeaseV6 {
    address: Ipv6Addr,
    server: Vec<u8>,
    #[serde(default)]
    renew: Option<u64>,
    #[serde(default)]
    rebind: Option<u64>,
    #[serde(default)]
    expires: Option<u64>,
    #[serde(default)]
    name_servers: Vec<Ipv6Addr>,
    #[serde(default)]
    search: Vec<String>,
}

impl From<lease::Lease> for StoredLease {
    fn from(lease: lease::Lease) -> StoredLease {
        StoredLease {
            address: lease.address(),
            prefix: lease.net.prefix_len(),
            server: lease.server,
            server_mac: lease.server_mac.0,
            renew: to_millis(lease.renew),
            rebind: to_millis(lease.rebind),
            expires: to_millis(lease.expires),
            options: lease.options,
        }
    }
}

impl From<v6::lease::Lease> for StoredLeaseV6 {
    fn from(lease: v6::lease::Lease) -> StoredLeaseV6 {
        StoredLeaseV6 {
            address: lease.address,
            server: lease.server,
            renew: to_millis(lease.renew),
            rebind: to_millis(lease.rebind),
            expires: to_millis(lease.expires),
            name_servers: lease.name_servers,
            search: lease.search,
        }
    }
}

impl StoredLease {
    fn into_lease(self) -> Option<Lease> {
        let lease = lease::Lease {
            net: Ipv4Net::new(self.address, self.prefix).ok()?,
            server: self.server,
            server_mac: Mac(self.server_mac),
            renew: from_millis(self.renew),
            rebind: from_millis(self.rebind),
            expires: from_millis(self.expires),
            options: self.options,
        };
        Some(lease.into())
    }
}

impl StoredLeaseV6 {
    fn into_lease(self) -> Lease {
        let lease = v6::lease::Lease {
            address: self.address,
            server: self.server,
            renew: from_millis(self.renew),
            rebind: from_millis(self.rebind),
            expires: from_millis(self.expires),
            name_servers: self.name_servers,
            search: self.search,
        };
        lease.into()
    }
}

impl From<(&Record, &str)> for Stored {
    fn from((record, boot): (&Record, &str)) -> Stored {
        let record = record.clone();
        let (lease, lease_v6) = match record.lease {
            Some(Lease::V4(lease)) => (Some(lease.into()), None),
            Some(Lease::V6(lease)) => (None, Some(lease.into())),
            None => (None, None),
        };
        Stored {
            layout: layout(record.key.family),
            boot: boot.to_owned(),
            key: record.key,
            netns: record.netns,
            netns_id: record.netns_id,
            mac: record.mac.0,
            options: record.options,
            priority: record.priority,
            bare: record.bare,
            lease,
            lease_v6,
        }
    }
}

impl Stored {
    fn into_record(self) -> Option<Record> {
        let lease = match (self.key.family, self.lease, self.lease_v6) {
            (Family::V4, Some(lease), _) => Some(lease.into_lease()?),
            (Family::V6, _, Some(lease)) => Some(lease.into_lease()),
            _ => None,
        };
        Some(Record {
            key: self.key,
            netns: self.netns,
            netns_id: self.netns_id,
            mac: Mac(self.mac),
            options: self.options,
            priority: self.priority,
            bare: self.bare,
            lease,
        })
    }
}

fn to_millis(moment: Moment) -> Option<u64> {
    u64::try_from(moment.as_millis()).ok().filter(|_| moment != NEVER)
}

fn from_millis(millis: Option<u64>) -> Moment {
    millis.map_or(NEVER, Duration::from_millis)
}
