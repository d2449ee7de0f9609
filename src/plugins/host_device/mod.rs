//! host-device: moves a network device of the host into the container, and back on DEL.
//!
//! Keys: one of `device`, `hwaddr`, `kernelpath`, `pciBusID`, or the capability `deviceID` (a PCI
//! address or a name on the auxiliary bus), which goes before them; `ipam` is optional; with
//! `useInterfaceNetwork` the device keeps its addresses and routes in the container; `dataDir` is where is kept what has to be given back. A PCI function that a program drives (DPDK) has no
//! interface: it is only reported, with its addresses.
//!
//! While the container has the device, its alias is the name that it had on the host, as the
//! reference plugin has it, and a file below `dataDir` tells the rest. On DEL it gets back its name,
//! alias, MAC, MTU, the addresses and routes that people gave it, and is up if it was. On the
//! host nothing else is left.

mod find;
mod identity;
mod location;
mod network;
mod origin;
mod record;
mod sysfs;
mod transfer;

use serde::Deserialize;

use self::find::Selector;
use self::location::{Known, Outcome};
use self::network::HostNetwork;
use self::origin::Origin;
use self::record::{Record, Records};
use self::sysfs::Sysfs;
use self::transfer::Arrival;
use crate::cni::{CniResult, Interface};
use crate::error::{Code, Context, Error, Result};
use crate::iface::{Inside, child, verify};
use crate::log;
use crate::netns::Netns;
use crate::skel::{AddReq, CheckReq, Cx, DelReq, Failures, GcReq, Plugin, Remarks, Rollback};

#[derive(Debug)]
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
    /// Whether the container gets the addresses and routes that the device has on the host.
    use_interface_network: bool,
    /// Where is kept how devices were on the host. Default: `/run/cni/host-device`.
    data_dir: Option<String>,
    runtime_config: RuntimeConfig,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RuntimeConfig {
    /// What a device plugin of the orchestrator chose for the container.
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
        if let Some(pci) = selector.pci().filter(|id| sysfs.is_user_space(id)) {
            if conf.use_interface_network {
                let msg = format!("useInterfaceNetwork: a program drives {pci}");
                return Err(Error::config(msg).with_details("it has no addresses and routes"));
            }
            return report_only(cx, req, pci);
        }
        let (inside, host) = (Inside::enter(netns)?, cx.host()?);
        let records = records(cx, conf);
        let device =
            find::require(host, &sysfs, &selector).map_err(|e| explain(e, &selector, &records))?;
        transfer::require_room(&inside, &device, &req.ifname)?;
        let l3 = cx.has_ipam();
        if l3 {
            // A device that went and came back has lost what protocols gave it.
            cx.ipam()?;
        }
        let origin = Origin::of(host, &device)?;
        let network = if conf.use_interface_network {
            HostNetwork::of(host, &device)?
        } else {
            HostNetwork::default()
        };
        let record = Record::new(req, &origin);
        let mut undo = Rollback::new();

        undo.push(format!("give \"{}\" back", device.name), || {
            let ifname = req.ifname.as_str();
            let known = Known { ifname, origin: Some(&origin), selector: None };
            let outcome = known.hand_back(host, Some(netns), None)?;
            records.conclude(record.clone(), outcome)
        });
        records.keep(&record)?;
        let up = (!l3 && network.ips.is_empty()) || cx.ipam_needs_link();
        let arrival = if up { Arrival::Up } else { Arrival::Down };
        transfer::into_container(host, &device, netns, &req.ifname, arrival)?;
        let mut result = if l3 { cx.ipam_add(&mut undo)? } else { CniResult::new() };
        network.add_ips(&mut result);
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
        if selector.pci().is_some_and(|id| sysfs.is_user_space(id)) {
            return Ok(());
        }
        let link = inside.netlink.link(&entry.name)?.ok_or_else(|| {
            let name = &entry.name;
            Error::internal(format!("Container Interface name in prevResult: {name} not found"))
        })?;
        verify::same_mac(&link, entry)?;
        verify::is_up_inside(&link)?;
        if link.alias.is_empty() {
            let msg = format!("\"{}\" has no alias, which is its name on the host", link.name);
            return Err(Error::internal(msg));
        }
        verify::addresses(&inside, &link, prev, index)?;
        verify::routes(&inside, prev)
    }

    fn del(cx: &Cx<'_>, conf: &Conf, req: &DelReq) -> Result<()> {
        let mut failures = Failures::new();
        // Before the device leaves, which a DHCP release needs.
        failures.keep(cx.if_ipam(Cx::ipam_del));
        failures.keep(hand_back(cx, conf, req));
        failures.into_result()
    }

    fn gc(cx: &Cx<'_>, conf: &Conf, req: &GcReq) -> Result<()> {
        let mut failures = Failures::new();
        failures.keep(cx.if_ipam(Cx::ipam_gc));
        let records = records(cx, conf);
        records.sweep(|id, ifname| req.is_valid(id, ifname));
        let (valid, stale): (Vec<_>, Vec<_>) = records
            .of_network()
            .into_iter()
            .partition(|record| req.is_valid(&record.container_id, &record.ifname));
        for record in stale {
            // A container that came later has it, in the same namespace.
            let passed_on = |other: &Record| {
                other.device.name == record.device.name && other.netns == record.netns
            };
            let passed_on = valid.iter().any(passed_on);
            let released = if passed_on { Ok(Outcome::Done) } else { release(cx, &record) };
            failures.keep(released.and_then(|outcome| records.conclude(record, outcome)));
        }
        failures.into_result()
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        let sysfs = Sysfs::new();
        // A device that is away is no fault, and which one it will be is often not known yet; but
        // hardware that is named must be there.
        let selector = Selector::of(conf, &sysfs).or_unavailable()?;
        if let Some(id) =
            selector.as_ref().and_then(Selector::pci).filter(|id| !sysfs.pci(id).exists())
        {
            let error = Error::new(Code::NOT_AVAILABLE, format!("there is no PCI device {id}"));
            return Err(error);
        }
        cx.usable_host()?;
        cx.if_ipam(Cx::ipam_status)
    }
}

impl Record {
    fn new(req: &AddReq, origin: &Origin) -> Record {
        Record {
            container_id: req.id.to_string(),
            ifname: req.ifname.to_string(),
            netns: req.sandbox.path.clone(),
            device: origin.clone(),
            tried: false,
        }
    }
}

impl Records {
    /// Forgets a device that is back. What could not be given back is tried once more by the next
    /// command: what can never succeed must not keep the container from its end.
    fn conclude(&self, mut record: Record, outcome: Outcome) -> Result<()> {
        match outcome {
            Outcome::Incomplete(error) if !record.tried => {
                record.tried = true;
                self.keep(&record)?;
                return Err(error.with_details("the next DEL or GC tries once more"));
            }
            Outcome::Incomplete(error) => log::warn(error),
            Outcome::Done => {}
        }
        self.forget(&record.container_id, &record.ifname)
    }
}

fn records(cx: &Cx<'_>, conf: &Conf) -> Records {
    Records::new(conf.data_dir.as_deref(), &cx.net.name)
}

fn no_selector() -> Error {
    Error::internal(r#"specify either "device", "hwaddr", "kernelpath" or "pciBusID""#)
}

/// Adds to a device that was not found who may have it.
fn explain(error: Error, selector: &Selector, records: &Records) -> Error {
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

/// A device that a program drives has no interface to move: the addresses are the program's.
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

/// Finds the attachment's device wherever it is, and gives it back to the host.
fn hand_back(cx: &Cx<'_>, conf: &Conf, req: &DelReq) -> Result<()> {
    let records = records(cx, conf);
    let record = records.find(&req.id, &req.ifname);
    let sysfs = Sysfs::new();
    // Hardware that was removed cannot be named any more.
    let selector = Selector::of(conf, &sysfs).unwrap_or_default();
    let user_space =
        selector.as_ref().and_then(Selector::pci).is_some_and(|id| sysfs.is_user_space(id));
    if user_space && record.is_none() {
        return Ok(());
    }
    let origin = record.as_ref().map(|record| &record.device);
    let known = Known { ifname: req.ifname.as_str(), origin, selector: selector.as_ref() };
    let recorded = match (&req.netns, &record) {
        (None, Some(record)) => recorded_netns(record)?,
        _ => None,
    };
    let netns = req.netns.as_ref().or(recorded.as_ref());
    let outcome = known.hand_back(cx.host()?, netns, req.prev.as_ref())?;
    match record {
        Some(record) => records.conclude(record, outcome),
        // What cannot be read is removed as well.
        None => outcome.into_result().and(records.forget(req.id.as_str(), req.ifname.as_str())),
    }
}

/// The same for a stale attachment.
fn release(cx: &Cx<'_>, record: &Record) -> Result<Outcome> {
    let netns = recorded_netns(record)?;
    let known = Known { ifname: &record.ifname, origin: Some(&record.device), selector: None };
    known.hand_back(cx.host()?, netns.as_ref(), None)
}

/// The namespace that the device went to, if there is one at its path still. It may be another
/// one by now: what counts is what is found in it.
fn recorded_netns(record: &Record) -> Result<Option<Netns>> {
    let Ok(netns) = Netns::open(&record.netns) else { return Ok(None) };
    let home = Netns::current()?;
    Ok((!netns.same_as(&home)?).then_some(netns))
}
