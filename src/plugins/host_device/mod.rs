//! host-device: moves a network device of the host into the container, and back on DEL.
//!
//! Keys: one of `device`, `hwaddr`, `kernelpath`, `pciBusID`, or the capability `deviceID` (a PCI
//! address or a name on the auxiliary bus), which has precedence; `ipam` is optional; with
//! `useInterfaceNetwork` the device keeps its addresses and routes in the container. A PCI function
//! with a userspace driver (VFIO, DPDK) has no interface: it is only reported, with its addresses.
//!
//! While the container has the device, its alias is its name on the host, as with the reference
//! plugin, and a record below `/run/cni/host-device` holds the rest of its state. DEL restores
//! name, alias, MAC, MTU, master, the addresses and routes of an administrator, and sets the device
//! up if it was up. Nothing else remains on the host.

mod find;
mod sysfs;

use serde::Deserialize;

use self::find::DeviceSelector;
use self::sysfs::Sysfs;
use crate::attachment::liveness::is_pair;
use crate::devices::location::DeviceSearch;
use crate::devices::lost::{self, LostDevice};
use crate::devices::origin::HostNetwork;
use crate::devices::record::{
    DeviceRecord, DeviceRecordStore, DeviceReturn, missing_device_remedy, recorded_device_remedy,
    state_for_record,
};
use crate::devices::transfer;
use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, Failures, GcRequest, Plugin,
    Rollback, delete_and_release,
};
use crate::iface::child::{self, CheckedLink};
use crate::iface::{ContainerNetns, configure, verify};
use crate::netlink::{Link, Netlink};
use cni::error::{Error, ErrorCode, ErrorContext, Result};
use cni::{CniResult, ResultInterface};

const NAME: &str = "host-device";

pub struct HostDevice;

/// The keys of a host-device network.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct HostDeviceConfig {
    /// The name of the interface on the host, or an alternative name.
    device: Option<String>,
    hwaddr: Option<String>,
    /// The directory of the interface's device below `/sys/devices`.
    kernelpath: Option<String>,
    /// The PCI address of the device, such as `0000:3d:00.1`.
    #[serde(rename = "pciBusID")]
    pci_bus_id: Option<String>,
    /// Give the container the addresses and routes that the device has on the host.
    use_interface_network: bool,
    /// Whether the default routes of `ipam` and of the device are the container's. Default: true.
    default_route: Option<bool>,
    /// Whether router advertisements give the interface addresses and routes, if it has IPv6
    /// addresses of `ipam`. Default: as the kernel decides.
    #[serde(rename = "acceptRA")]
    accept_ra: Option<bool>,
    runtime_config: HostDeviceRuntimeConfig,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct HostDeviceRuntimeConfig {
    /// The device that a device plugin of the orchestrator has allocated to the container.
    #[serde(rename = "deviceID")]
    device_id: Option<String>,
}

impl Plugin for HostDevice {
    const NAME: &'static str = NAME;
    const ABOUT: &'static str = "moves a device of the host into the container";
    type Conf = HostDeviceConfig;

    fn examine(_: &CallContext<'_>, conf: &HostDeviceConfig, _: &mut ConfigRemarks) -> Result<()> {
        DeviceSelector::from_config(conf, &Sysfs::new()).map(drop)
    }

    fn add(cx: &CallContext<'_>, conf: &HostDeviceConfig, req: &AddRequest) -> Result<CniResult> {
        let sysfs = Sysfs::new();
        let selector =
            DeviceSelector::from_config(conf, &sysfs)?.ok_or_else(missing_selector_error)?;
        let netns = req.sandbox.open_netns()?;
        if let Some(pci) = selector.user_space_pci(&sysfs) {
            if conf.use_interface_network {
                let msg = format!("useInterfaceNetwork: a program drives {pci}");
                return Err(Error::config(msg).with_details("it has no addresses and routes"));
            }
            return report_user_space_pci(cx, conf, req, pci);
        }
        let (inside, host) =
            (ContainerNetns::open_in(netns)?.with_accept_ra(conf.accept_ra), cx.host_netlink()?);
        let records = DeviceRecordStore::for_network(NAME, &cx.net.name);
        let device = find_device(host, &sysfs, &selector)
            .map_err(|e| explain_missing_device(e, &sysfs, &selector))?;
        transfer::require_free_names(&inside, &device, req.ifname.as_str())?;
        let l3 = cx.has_ipam();
        if l3 {
            // Looked up before the move: a device loses the addresses of protocols (DHCP, SLAAC)
            // when it is moved.
            cx.ipam_plugin()?;
        }
        let origin = state_for_record(host, &device)?;
        let mut network = HostNetwork::default();
        if conf.use_interface_network {
            network = HostNetwork::from_device(host, &device, conf.default_route)?;
        }
        let netns_id = req.sandbox.netns_identity();
        let record = DeviceRecord {
            netns_id,
            ..DeviceRecord::new(&req.id, &req.ifname, &req.sandbox.path, origin)
        };
        let mut undo = Rollback::new();

        undo.add_step(format!("give \"{}\" back", device.name), || {
            let returned =
                DeviceSearch::for_record(&record).return_device(host, Some(netns), None)?;
            records.end_attachment(record.clone(), returned)
        });
        records.save_record(&record)?;
        let up = (!l3 && network.ips.is_empty()) || cx.ipam_needs_link();
        transfer::move_into_container(host, &device, netns, req.ifname.as_str(), up)?;
        let mut result =
            if l3 { cx.ipam_add(&mut undo, conf.default_route)? } else { CniResult::new() };
        network.ips.retain(|ip| result.ips.iter().all(|other| other.address != ip.address));
        result.ips.append(&mut network.ips);
        let link = child::complete_link(&inside, &req.ifname, &req.sandbox.path, &mut result)?;
        network.add_routes(&inside, &link, &mut result)?;
        if !result.ips.is_empty() {
            let has_near_end = is_pair(&device) && device.link_netnsid.is_none();
            let far = device.link.filter(|_| has_near_end).map(|index| (host, index));
            configure::announce_when_ready(&inside.netlink, &link, far)?;
        }
        let pci = device.parent.as_ref().and_then(|parent| sysfs.find_pci_id(parent));
        let pci = pci.or_else(|| selector.pci_function().map(str::to_owned));
        result.interfaces[0].pci_id = pci.unwrap_or_default();
        cx.finish_result(&mut result);
        undo.commit();
        Ok(result)
    }

    fn check(cx: &CallContext<'_>, conf: &HostDeviceConfig, req: &CheckRequest) -> Result<()> {
        let sysfs = Sysfs::new();
        let selector =
            DeviceSelector::from_config(conf, &sysfs)?.ok_or_else(missing_selector_error)?;
        let inside = ContainerNetns::open_in(req.sandbox.open_netns()?)?;
        cx.if_ipam(CallContext::ipam_check)?;
        let prev = req.require_final_result()?;
        let (index, entry) = verify::find_container_entry(prev, &req.ifname, &req.sandbox.path)?;
        if selector.user_space_pci(&sysfs).is_some() {
            return Ok(());
        }
        let link = inside.netlink.find_link(&entry.name)?.ok_or_else(|| {
            let name = &entry.name;
            Error::internal(format!("Container Interface name in prevResult: {name} not found"))
        })?;
        verify::require_same_mac(&link, entry)?;
        verify::require_up(&link, verify::IN_CONTAINER)?;
        if link.alias.is_empty() {
            let msg = format!("\"{}\" has no alias, which is its name on the host", link.name);
            return Err(Error::internal(msg));
        }
        CheckedLink { link, prev, index }.verify_layer3(&inside)
    }

    fn del(cx: &CallContext<'_>, conf: &HostDeviceConfig, req: &DelRequest) -> Result<()> {
        let mut failures = Failures::new();
        delete_and_release(cx, &mut failures, CallContext::ipam_del, |failures| {
            let returned = failures.keep_error(return_attached_device(cx, conf, req))?;
            // A link that stays in the container keeps its addresses.
            returned.then_some(())
        });
        failures.into_result()
    }

    fn gc(cx: &CallContext<'_>, _: &HostDeviceConfig, req: &GcRequest) -> Result<()> {
        let mut failures = Failures::new();
        delete_and_release(cx, &mut failures, CallContext::ipam_gc, |failures| {
            let records = DeviceRecordStore::for_network(NAME, &cx.net.name);
            let ended = records.end_stale_attachments(req, &|record, _| {
                DeviceSearch::for_record(record).return_device(
                    cx.host_netlink()?,
                    record.open_netns()?.as_ref(),
                    None,
                )
            });
            failures.keep_error(ended)
        });
        failures.into_result()
    }

    fn status(cx: &CallContext<'_>, conf: &HostDeviceConfig) -> Result<()> {
        let sysfs = Sysfs::new();
        // A device may be in a container now, and is often allocated only by ADD; but hardware that
        // the configuration names must exist.
        let selector = DeviceSelector::from_config(conf, &sysfs).or_unavailable()?;
        let pci = selector.as_ref().and_then(DeviceSelector::pci_function);
        if let Some(id) = pci.filter(|id| !sysfs.device_directory("pci", id).exists()) {
            let error =
                Error::new(ErrorCode::NOT_AVAILABLE, format!("there is no PCI device {id}"));
            return Err(error);
        }
        cx.usable_host_netlink()?;
        cx.if_ipam(CallContext::ipam_status)
    }
}

fn missing_selector_error() -> Error {
    Error::internal(r#"specify either "device", "hwaddr", "kernelpath" or "pciBusID""#)
}

/// The selected device. What an earlier attachment of it left to do is done first.
fn find_device(host: &Netlink, sysfs: &Sysfs, selector: &DeviceSelector) -> Result<Link> {
    let found = find::selected_device(host, sysfs, selector);
    let may_be_unfinished = |device: &Link| device.kind.is_none() || !device.alias.is_empty();
    if found.as_ref().map_or(true, may_be_unfinished)
        && lost::restore_earlier(host, &|device| selector.is_recorded(sysfs, device))
    {
        return find::selected_device(host, sysfs, selector);
    }
    found
}

/// The error of a missing device, with the name of the container that has the device.
fn explain_missing_device(error: Error, sysfs: &Sysfs, selector: &DeviceSelector) -> Error {
    let error = error.context("failed to find host device");
    match (recorded_device_remedy(&|device| selector.is_recorded(sysfs, device)), selector) {
        (Some(remedy), _) => error.with_details(remedy),
        (None, DeviceSelector::Name(name)) if error.details().is_empty() => {
            error.with_details(missing_device_remedy(name))
        }
        _ => error,
    }
}

/// The result for a device with a userspace driver: it has no interface to move, and a program uses
/// the addresses.
fn report_user_space_pci(
    cx: &CallContext<'_>,
    conf: &HostDeviceConfig,
    req: &AddRequest,
    pci: &str,
) -> Result<CniResult> {
    let mut undo = Rollback::new();
    let l3 = cx.has_ipam();
    let mut result =
        if l3 { cx.ipam_add(&mut undo, conf.default_route)? } else { CniResult::new() };
    result.interfaces = vec![ResultInterface {
        name: req.ifname.to_string(),
        sandbox: req.sandbox.path.clone(),
        pci_id: pci.to_owned(),
        ..ResultInterface::default()
    }];
    result.assign_ips_to_first();
    cx.finish_result(&mut result);
    undo.commit();
    Ok(result)
}

/// Finds the attachment's device and gives it back to the host. Returns whether no link in its place
/// stays in the container.
fn return_attached_device(
    cx: &CallContext<'_>,
    conf: &HostDeviceConfig,
    req: &DelRequest,
) -> Result<bool> {
    let records = DeviceRecordStore::for_network(NAME, &cx.net.name);
    let (host, netns, prev) = (cx.host_netlink()?, req.netns.as_ref(), req.prev.as_ref());
    if let Some(record) = records.find_record(req.id.as_str(), req.ifname.as_str()) {
        let netns = record.netns_of_del(netns)?;
        let returned =
            DeviceSearch::for_record(&record).return_device(host, netns.as_ref(), prev)?;
        return records.end_attachment(record, returned).map(|()| true);
    }
    for device in LostDevice::find_all() {
        if device.container_id() == req.id.as_str() {
            device.give_back(host)?;
        }
    }
    let sysfs = Sysfs::new();
    // The selector of removed hardware is unknown, which is not an error.
    let selector = DeviceSelector::from_config(conf, &sysfs).unwrap_or_default();
    let selector = selector.as_ref();
    if selector.is_some_and(|selector| selector.user_space_pci(&sysfs).is_some()) {
        return Ok(true);
    }
    let configured = selector.and_then(DeviceSelector::name);
    let may_select = |link: &Link, host_name: &str| {
        selector.is_none_or(|selector| selector.may_select(link, host_name))
    };
    let search = DeviceSearch {
        ifname: req.ifname.as_str(),
        origin: None,
        configured,
        may_select: &may_select,
    };
    let returned = search.return_device(host, netns, prev)?;
    // Also removes an unreadable record.
    records.remove_record(req.id.as_str(), req.ifname.as_str(), "")?;
    match returned {
        DeviceReturn::Returned(Some(error)) => Err(error),
        returned => Ok(!matches!(returned, DeviceReturn::Stays)),
    }
}
