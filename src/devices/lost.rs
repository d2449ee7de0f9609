//! What an attachment that has ended left to do.
//!
//! DEL succeeds also if the device is nowhere: the namespace has no path any more, but something
//! still holds it. The kernel gives hardware back when the namespace ends, under another name, and
//! nobody sends another DEL. So the record stays, as that of a lost device; GC, `cnibox gc`,
//! `cnibox repair` and an ADD of the device restore the device and remove the record.

use std::ffi::OsStr;
use std::path::PathBuf;

use super::location::DeviceSearch;
use super::origin::OriginalState;
use super::record::{DeviceRecord, DeviceRecordStore, DeviceReturn, all_records};
use crate::netlink::Netlink;
use cni::error::Result;

/// A device that DEL has not found.
pub struct LostDevice {
    directory: PathBuf,
    record: DeviceRecord,
}

impl LostDevice {
    /// All lost devices.
    pub fn find_all() -> Vec<LostDevice> {
        let lost = all_records().into_iter().filter(|(_, record)| record.lost);
        lost.map(|(directory, record)| LostDevice { directory, record }).collect()
    }

    pub fn network(&self) -> &str {
        self.directory.file_name().and_then(OsStr::to_str).unwrap_or_default()
    }

    pub fn container_id(&self) -> &str {
        &self.record.container_id
    }

    /// The device in messages.
    pub fn object(&self) -> String {
        let DeviceRecord { container_id, device, .. } = &self.record;
        format!("device {} of container {container_id}", device.name)
    }

    /// Whether the kernel has given the device back.
    pub fn is_on_host(&self, host: &Netlink) -> Result<bool> {
        DeviceSearch::for_record(&self.record).is_unfinished_on_host(host)
    }

    /// Whether the device may come back to the host.
    pub fn may_come_back(&self) -> bool {
        self.record.may_come_back()
    }

    /// Returns the device to the host, if it can be found. Returns whether it is there.
    pub fn give_back(self, host: &Netlink) -> Result<bool> {
        let netns = self.record.open_netns()?;
        let search = DeviceSearch::for_record(&self.record);
        let returned = search.return_device(host, netns.as_ref(), None)?;
        let is_back = matches!(returned, DeviceReturn::Returned(_));
        DeviceRecordStore::at_directory(&self.directory).end_attachment(self.record, returned)?;
        Ok(is_back)
    }
}

/// ADD: restores the devices that `is_meant` selects, if they are on the host without their name or
/// state: the namespace of an earlier attachment has ended since. Returns whether there was one.
pub fn restore_earlier(host: &Netlink, is_meant: &dyn Fn(&OriginalState) -> bool) -> bool {
    let mut has_restored = false;
    for (directory, record) in all_records() {
        let search = DeviceSearch::for_record(&record);
        if record.in_container
            || !is_meant(&record.device)
            || !search.is_unfinished_on_host(host).unwrap_or_default()
        {
            continue;
        }
        has_restored = true;
        let restored = search.restore_on_host(host).and_then(|returned| match returned {
            DeviceReturn::Returned(Some(error)) => Err(error),
            // The record of an attachment that has not ended stays for its DEL.
            _ if !record.lost => Ok(()),
            returned => {
                DeviceRecordStore::at_directory(&directory).end_attachment(record.clone(), returned)
            }
        });
        restored.unwrap_or_else(|error| warn!("{error}"));
    }
    has_restored
}
