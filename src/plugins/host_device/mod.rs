//! host-device: moves a network device of the host into the container, and back on DEL.
//!
//! Keys: one of `device`, `hwaddr`, `kernelpath`, `pciBusID`, or the capability `deviceID` (a PCI address or a name on
//! the auxiliary bus), which has precedence; `ipam` is optional; with `useInterfaceNetwork` the device keeps its
//! addresses and routes in the container. A PCI function that a program drives (DPDK) has no interface: it is only
//! reported, with its addresses.
//!
//! While the container has the device, its alias is its name on the host, as with the reference plugin, and a record
//! below `/run/cni/host-device` holds the rest of its state. DEL restores name, alias, MAC, MTU, the addresses and routes of an
//! administrator, and sets the device up if it was up. Nothing else remains on the host.

mod find;
mod identity;
mod location;
mod origin;
mod record;
mod sysfs;
mod transfer;

use serde::Deserialize;

use self::find::Selector;
use self::location::Search;
use self::origin::{HostNetwork, Origin};
use self::record::{Record, Records};
use self::sysfs::Sysfs;
use crate::attachment::Owner;
use crate::cni::{CniResult, Interface};
use crate::error::{Code, Context, Error, Result};
use crate::iface::child::{self, Found};
use crate::iface::{Inside, verify};
use crate::netns::{Netns, NetnsId};
use crate::skel::{
    AddReq, CheckReq, Cx, DelReq, Failures, GcReq, Plugin, Remarks, Rollback, del_and_release,
};

pub struct HostDevice;

/// The keys of a host-device network.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Conf {
    /// The name of the interface on the host, or an alternative name.
    device: Option<String>,
    hwaddr: Option<String>,
    /// Its device's folder below `/sys/devices`.
    kernelpath: Option<String>,
    /// Its PCI address, such as `0000:3d:00.1`.
    #[serde(rename = "pciBusID")]
    pci_bus_id: Option<String>,
    /// Give the container the addresses and routes that the device has on the host.
    use_interface_network: bool,
    runtime_config: RuntimeConfig,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RuntimeConfig {
    /// The device that a device plugin of the orchestrator has allocated to the container.
    #[serde(rename = "deviceID")]
    device_id: Option<String>,
}

impl Plugin for HostDevice {
    const NAME: &'static str = "host-device";
    const ABOUT: &'static str = "moves a device of the host into the container";
    type Conf = Conf;

    fn examine(_: &Cx<'_>, conf: &Conf, _: &mut Remarks) -> Result<()> {
        Selector::of(conf, &Sysfs::new()).map(drop)
    }

    fn add(cx: &Cx<'_>, conf: &Conf, req: &AddReq) -> Result<CniResult> {
        let sysfs = Sysfs::new();
        let selector = Selector::of(conf, &sysfs)?.ok_or_else(no_selector)?;
        let netns = req.sandbox.netns()?;
        if let Some(pci) = selector.user_space_pci(&sysfs) {
            if conf.use_interface_network {
                let msg = format!("useInterfaceNetwork: a program drives {pci}");
                return Err(Error::config(msg).with_details("it has no addresses and routes"));
            }
            return report_only(cx, req, pci);
        }
        let (inside, host) = (Inside::enter(netns)?, cx.host()?);
        let records = Records::of(&cx.net.name);
        let device =
            find::device(host, &sysfs, &selector).map_err(|e| explain(e, &selector, &records))?;
        transfer::require_free_names(&inside, &device, &req.ifname)?;
        let l3 = cx.has_ipam();
        if l3 {
            // Looked up before the move: a device that is moved and back has lost the addresses of protocols.
            cx.ipam()?;
        }
        let origin = Origin::of(host, &device)?;
        let mut network = HostNetwork::default();
        if conf.use_interface_network {
            network = HostNetwork::of(host, &device)?;
        }
        let record = Record {
            container_id: req.id.to_string(),
            ifname: req.ifname.to_string(),
            netns: req.sandbox.path.clone(),
            netns_id: req.sandbox.identity(),
            device: origin,
            tried: false,
        };
        let mut undo = Rollback::new();

        undo.push(format!("give \"{}\" back", device.name), || {
            let incomplete = Search::of(&record).give_back(host, Some(netns), None)?;
            records.conclude(record.clone(), incomplete)
        });
        records.keep(&record)?;
        let up = (!l3 && network.ips.is_empty()) || cx.ipam_needs_link();
        transfer::into_container(host, &device, netns, &req.ifname, up)?;
        let mut result = if l3 { cx.ipam_add(&mut undo)? } else { CniResult::new() };
        network.ips.retain(|ip| result.ips.iter().all(|other| other.address != ip.address));
        result.ips.append(&mut network.ips);
        let link = child::attach(&inside, &req.ifname, &req.sandbox.path, &mut result)?;
        network.add_routes(&inside, &link, &mut result)?;
        let pci = device.parent.as_ref().and_then(|parent| sysfs.pci_id(parent));
        let pci = pci.or_else(|| selector.pci().map(str::to_owned));
        result.interfaces[0].pci_id = pci.unwrap_or_default();
        cx.finish(&mut result);
        undo.commit();
        Ok(result)
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        let sysfs = Sysfs::new();
        let selector = Selector::of(conf, &sysfs)?.ok_or_else(no_selector)?;
        let inside = Inside::enter(req.sandbox.netns()?)?;
        cx.if_ipam(Cx::ipam_check)?;
        let prev = req.require_prev()?;
        let (index, entry) = verify::container_entry(prev, &req.ifname, &req.sandbox.path)?;
        if selector.user_space_pci(&sysfs).is_some() {
            return Ok(());
        }
        let link = inside.netlink.link(&entry.name)?.ok_or_else(|| {
            let name = &entry.name;
            Error::internal(format!("Container Interface name in prevResult: {name} not found"))
        })?;
        verify::same_mac(&link, entry)?;
        verify::is_up(&link, verify::IN_CONTAINER)?;
        if link.alias.is_empty() {
            let msg = format!("\"{}\" has no alias, which is its name on the host", link.name);
            return Err(Error::internal(msg));
        }
        Found { link, prev, index }.verify_layer3(&inside)
    }

    fn del(cx: &Cx<'_>, conf: &Conf, req: &DelReq) -> Result<()> {
        let mut failures = Failures::new();
        del_and_release(cx, &mut failures, Cx::ipam_del, |failures| {
            failures.keep(give_back(cx, conf, req))
        });
        failures.into_result()
    }

    fn gc(cx: &Cx<'_>, _: &Conf, req: &GcReq) -> Result<()> {
        let mut failures = Failures::new();
        del_and_release(cx, &mut failures, Cx::ipam_gc, |failures| {
            failures.keep(give_back_stale(cx, &Records::of(&cx.net.name), req))
        });
        failures.into_result()
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        let sysfs = Sysfs::new();
        // A device may be in a container now, and is often allocated only by ADD; but hardware that the
        // configuration names must exist.
        let selector = Selector::of(conf, &sysfs).or_unavailable()?;
        let pci = selector.as_ref().and_then(Selector::pci);
        if let Some(id) = pci.filter(|id| !sysfs.device("pci", id).exists()) {
            let error = Error::new(Code::NOT_AVAILABLE, format!("there is no PCI device {id}"));
            return Err(error);
        }
        cx.usable_host()?;
        cx.if_ipam(Cx::ipam_status)
    }
}

fn no_selector() -> Error {
    Error::internal(r#"specify either "device", "hwaddr", "kernelpath" or "pciBusID""#)
}

/// Adds to the error of a missing device the container that has the device.
fn explain(error: Error, selector: &Selector, records: &Records<'_>) -> Error {
    let error = error.context("failed to find host device");
    let (Selector::Name(name), true) = (selector, error.details().is_empty()) else {
        return error;
    };
    let holder = records.of_node().into_iter().find(|record| record.device.name == *name);
    match holder {
        Some(Record { container_id, ifname, .. }) => error.with_details(format!(
            "container {container_id} has it as {ifname}, or was not followed by DEL: detach it there first"
        )),
        None => error.with_details("\"ip link\" lists the links of the host"),
    }
}

/// The result for a device that a program drives: it has no interface to move, and the program uses the addresses.
fn report_only(cx: &Cx<'_>, req: &AddReq, pci: &str) -> Result<CniResult> {
    let mut undo = Rollback::new();
    let l3 = cx.has_ipam();
    let mut result = if l3 { cx.ipam_add(&mut undo)? } else { CniResult::new() };
    result.interfaces = vec![Interface {
        name: req.ifname.to_string(),
        sandbox: req.sandbox.path.clone(),
        pci_id: pci.to_owned(),
        ..Interface::default()
    }];
    result.assign_to_first();
    cx.finish(&mut result);
    undo.commit();
    Ok(result)
}

/// Finds the attachment's device and gives it back to the host.
fn give_back(cx: &Cx<'_>, conf: &Conf, req: &DelReq) -> Result<()> {
    let records = Records::of(&cx.net.name);
    let (host, netns, prev) = (cx.host()?, req.netns.as_ref(), req.prev.as_ref());
    if let Some(record) = records.find(req.id.as_str(), req.ifname.as_str()) {
        let recorded = if netns.is_none() { recorded_netns(&record)? } else { None };
        let netns = netns.or(recorded.as_ref());
        let incomplete = Search::of(&record).give_back(host, netns, prev)?;
        return records.conclude(record, incomplete);
    }
    let sysfs = Sysfs::new();
    // The selector of removed hardware is unknown, which is not an error.
    let selector = Selector::of(conf, &sysfs).unwrap_or_default();
    let selector = selector.as_ref();
    if selector.is_some_and(|selector| selector.user_space_pci(&sysfs).is_some()) {
        return Ok(());
    }
    let search = Search { ifname: req.ifname.as_str(), origin: None, selector };
    let incomplete = search.give_back(host, netns, prev)?;
    // Removes a record that cannot be read as well.
    incomplete.map_or(Ok(()), Err).and(records.forget(req.id.as_str(), req.ifname.as_str()))
}

/// As [`give_back`] for all attachments that are not valid.
fn give_back_stale(cx: &Cx<'_>, records: &Records<'_>, req: &GcReq) -> Result<()> {
    let mut failures = Failures::new();
    records.sweep(&Owner::each(&cx.net.name, &req.valid));
    let (valid, stale): (Vec<_>, Vec<_>) = records
        .of_network()
        .into_iter()
        .partition(|record| req.is_valid(&record.container_id, &record.ifname));
    for record in stale {
        // A later container in the same namespace may have the device.
        let has_device =
            |other: &Record| other.device.name == record.device.name && other.netns == record.netns;
        let released = if valid.iter().any(has_device) { Ok(None) } else { release(cx, &record) };
        failures.keep(released.and_then(|incomplete| records.conclude(record, incomplete)));
    }
    failures.into_result()
}

/// As [`give_back`] for a stale attachment.
fn release(cx: &Cx<'_>, record: &Record) -> Result<Option<Error>> {
    let netns = recorded_netns(record)?;
    Search::of(record).give_back(cx.host()?, netns.as_ref(), None)
}

/// The namespace at the recorded path, if it is the recorded one: another container's namespace is not entered. A
/// namespace that nothing pins cannot be told from a later one.
fn recorded_netns(record: &Record) -> Result<Option<Netns>> {
    let Some(known) = record.netns_id.filter(|id| id.ctime != 0) else { return Ok(None) };
    let Ok(netns) = Netns::open(&record.netns) else { return Ok(None) };
    let is_recorded =
        netns.identity()? == (known.dev, known.ino) && NetnsId::at(netns.path()) == Some(known);
    Ok((is_recorded && !netns.same_as(&Netns::current()?)?).then_some(netns))
}
