//! host-device: moves a network device of the host into the container, and back on DEL.
//!
//! Keys: one of `device`, `hwaddr`, `kernelpath`, `pciBusID`, or the capability `deviceID` (a PCI
//! address or a name on the auxiliary bus), which goes before them; `ipam` is optional; `dataDir`
//! is where is kept what has to be given back. A PCI function that a program drives (DPDK) has no
//! interface: it is only reported, with its addresses.
//!
//! While the container has the device, its alias is the name that it had on the host, as the
//! reference plugin has it, and a file below `dataDir` tells the rest. On DEL it gets back its name,
//! alias, MAC, MTU, the addresses and routes that people gave it, and is up if it was. On the
//! host nothing else is left.

mod find;
mod journey;
mod origin;
mod record;
mod sysfs;

use serde::Deserialize;

use self::find::Selector;
use self::journey::Arrival;
use self::origin::Origin;
use self::record::{Record, Records};
use self::sysfs::Sysfs;
use crate::cni::{CniResult, Interface, SpecVersion};
use crate::error::{Code, Context, Error, Result};
use crate::iface::configure::{self, Connected, Style};
use crate::iface::inside::{Inside, Setting};
use crate::iface::verify;
use crate::iface::veth::interface;
use crate::log;
use crate::netlink::{Dad, Link, Netlink};
use crate::netns::Netns;
use crate::skel::{AddReq, CheckReq, Cx, DelReq, Failures, GcReq, Plugin, Rollback};

/// The plugin.
#[derive(Debug)]
pub struct HostDevice;

/// The keys of a host-device network.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Conf {
    /// The name of the interface on the host, or an alternative name.
    device: Option<String>,
    /// Its Ethernet address.
    hwaddr: Option<String>,
    /// Its device's folder below `/sys/devices`.
    kernelpath: Option<String>,
    /// Its PCI address, such as `0000:3d:00.1`.
    #[serde(rename = "pciBusID")]
    pci_bus_id: Option<String>,
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

    fn add(cx: &Cx<'_>, conf: &Conf, req: &AddReq) -> Result<CniResult> {
        let sysfs = Sysfs::new();
        let selector = Selector::of(conf, &sysfs)?.ok_or_else(no_selector)?;
        let netns = req.sandbox.netns()?;
        if let Some(pci) = selector.pci().filter(|id| sysfs.is_user_space(id)) {
            return report_only(cx, req, pci);
        }
        let host = cx.host()?;
        let records = records(cx, conf);
        let device =
            find::require(host, &sysfs, &selector).map_err(|e| explain(e, &selector, &records))?;
        let inside = Inside::enter(netns)?;
        journey::require_room(&inside, &device, &req.ifname)?;
        let l3 = !cx.net.ipam_type.is_empty();
        if l3 {
            // A device that went and came back has lost what protocols gave it.
            cx.ipam()?;
        }
        let origin = Origin::of(host, &device)?;
        let mut undo = Rollback::new();

        let record = Record::new(req, &origin);
        undo.push("forget how the device was", || {
            records.forget(req.id.as_str(), req.ifname.as_str())
        });
        records.keep(&record);
        undo.push(format!("give \"{}\" back", device.name), || {
            journey::undo(&inside, host, &origin)
        });
        let arrival = if l3 { Arrival::Down } else { Arrival::Up };
        journey::into_container(host, &device, (netns, &req.ifname), arrival)?;
        let link = inside.link(req.ifname.as_str())?;
        let mut result = if l3 { cx.ipam_add(&mut undo)? } else { CniResult::new() };
        let pci = device.parent.as_ref().and_then(|parent| sysfs.pci_id(parent));
        let pci = pci.or_else(|| selector.pci().map(str::to_owned));
        report(&mut result, interface(&link, &req.sandbox.path), pci);
        if l3 {
            configure(&inside, &link, &result)?;
        }
        cx.finish(&mut result);
        undo.commit();
        Ok(result)
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        let sysfs = Sysfs::new();
        let selector = Selector::of(conf, &sysfs)?.ok_or_else(no_selector)?;
        let inside = Inside::enter(req.sandbox.netns()?)?;
        let l3 = !cx.net.ipam_type.is_empty();
        if l3 {
            cx.ipam_check()?;
        }
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
        verify::is_up(&link)?;
        if link.alias.is_empty() {
            let msg = format!("\"{}\" has no alias, which is its name on the host", link.name);
            return Err(Error::internal(msg));
        }
        verify::addresses(&inside, &link, (prev, index))?;
        verify::routes(&inside, prev)
    }

    fn del(cx: &Cx<'_>, conf: &Conf, req: &DelReq) -> Result<()> {
        let mut failures = Failures::new();
        // Before the device leaves, which a DHCP release needs.
        if !cx.net.ipam_type.is_empty() {
            failures.keep(cx.ipam_del());
        }
        failures.keep(hand_back(cx, conf, req));
        failures.into_result()
    }

    fn gc(cx: &Cx<'_>, conf: &Conf, req: &GcReq) -> Result<()> {
        let mut failures = Failures::new();
        if !cx.net.ipam_type.is_empty() {
            failures.keep(cx.ipam_gc());
        }
        let records = records(cx, conf);
        let (valid, stale): (Vec<_>, Vec<_>) = records
            .of_network()
            .into_iter()
            .partition(|record| req.is_valid(&record.container_id, &record.ifname));
        for record in stale {
            // A container that came later has it, in the same namespace.
            let passed_on = |other: &Record| {
                other.device.name == record.device.name && other.netns == record.netns
            };
            let released = if valid.iter().any(passed_on) { Ok(()) } else { release(cx, &record) };
            let (id, ifname) = (&record.container_id, &record.ifname);
            failures.keep(released.and_then(|()| records.forget(id, ifname)));
        }
        failures.into_result()
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        let unavailable = |e: Error| e.with_code(Code::NOT_AVAILABLE);
        let sysfs = Sysfs::new();
        // A device that is away is no fault, and which one it will be is often not known yet; but
        // hardware that is named must be there.
        let selector = Selector::of(conf, &sysfs).map_err(unavailable)?;
        if let Some(id) =
            selector.as_ref().and_then(Selector::pci).filter(|id| !sysfs.pci(id).exists())
        {
            let error = Error::new(Code::NOT_AVAILABLE, format!("there is no PCI device {id}"));
            return Err(error);
        }
        let host = cx.host().map_err(unavailable)?;
        host.require_admin().map_err(|e| unavailable(e.into()))?;
        if cx.net.ipam_type.is_empty() { Ok(()) } else { cx.ipam_status() }
    }
}

impl Record {
    fn new(req: &AddReq, origin: &Origin) -> Record {
        Record {
            container_id: req.id.to_string(),
            ifname: req.ifname.to_string(),
            netns: req.sandbox.path.clone(),
            device: origin.clone(),
        }
    }
}

fn records(cx: &Cx<'_>, conf: &Conf) -> Records {
    Records::new(conf.data_dir.as_deref(), &cx.net.name)
}

fn no_selector() -> Error {
    let msg = r#"specify either "device", "hwaddr", "kernelpath" or "pciBusID""#;
    Error::internal(msg).with_details("or have the runtime choose by the capability \"deviceID\"")
}

/// Adds to a device that was not found who may have it.
fn explain(error: Error, selector: &Selector, records: &Records) -> Error {
    let (Selector::Name(name), true) = (selector, error.details().is_empty()) else {
        return error;
    };
    let holder = records.of_node().into_iter().find(|record| record.device.name == *name);
    match holder {
        Some(Record { container_id, ifname, .. }) => error.with_details(format!(
            "container {container_id} has it as {ifname}, or was not followed by DEL"
        )),
        None => error,
    }
}

/// A device that a program drives has no interface to move: the addresses are the program's.
fn report_only(cx: &Cx<'_>, req: &AddReq, pci: &str) -> Result<CniResult> {
    let mut undo = Rollback::new();
    let l3 = !cx.net.ipam_type.is_empty();
    let mut result = if l3 { cx.ipam_add(&mut undo)? } else { CniResult::new() };
    let entry = Interface {
        name: req.ifname.to_string(),
        sandbox: req.sandbox.path.clone(),
        ..Interface::default()
    };
    report(&mut result, entry, Some(pci.to_owned()));
    cx.finish(&mut result);
    undo.commit();
    Ok(result)
}

/// The one interface, which has all addresses.
fn report(result: &mut CniResult, mut entry: Interface, pci: Option<String>) {
    result.version = SpecVersion::NEWEST;
    entry.pci_id = pci.unwrap_or_default();
    result.interfaces = vec![entry];
    for ip in &mut result.ips {
        ip.interface = Some(0);
    }
}

fn configure(inside: &Inside<'_>, link: &Link, result: &CniResult) -> Result<()> {
    let name = &link.name;
    let mut settings = configure::settings(result, name);
    // Neighbours may know another owner of the address: the kernel announces the new one when the
    // link comes up.
    settings.push(Setting::optional(format!("net/ipv4/conf/{name}/arp_notify"), "1"));
    settings.push(Setting::optional(format!("net/ipv6/conf/{name}/ndisc_notify"), "1"));
    inside.set(&settings)?;
    // Others are on the same wire, so IPv6 addresses are asked for.
    let style = Style { dad: Dad::Kernel, connected: Connected::Route };
    configure::addresses_and_up(inside, link, result, style)?;
    configure::add_routes(inside, link, result)
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
    known.hand_back(cx.host()?, netns, req.prev.as_ref())?;
    records.forget(req.id.as_str(), req.ifname.as_str())
}

/// The same for an attachment that nobody wants any more.
fn release(cx: &Cx<'_>, record: &Record) -> Result<()> {
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

/// What is known of an attachment that ends.
#[derive(Debug)]
struct Known<'a> {
    /// The name of the interface in the container.
    ifname: &'a str,
    /// How the device was on the host, unless the reference did the ADD.
    origin: Option<&'a Origin>,
    /// How the configuration names it.
    selector: Option<&'a Selector>,
}

impl Known<'_> {
    fn hand_back(
        &self,
        host: &Netlink,
        netns: Option<&Netns>,
        prev: Option<&CniResult>,
    ) -> Result<()> {
        if let Some(netns) = netns {
            let inside = Inside::enter(netns)?;
            if let Some((device, origin)) = self.in_container(&inside, prev)? {
                return journey::back_to_host(&inside, host, &device, &origin);
            }
        }
        match self.on_host(host)? {
            Some((device, origin)) => journey::settle(host, &device, &origin),
            None => Ok(()),
        }
    }

    /// The device in the container. It may have been renamed there.
    fn in_container(
        &self,
        inside: &Inside<'_>,
        prev: Option<&CniResult>,
    ) -> Result<Option<(Link, Origin)>> {
        let named = inside.netlink.link(self.ifname)?;
        let Some(origin) = self.origin else {
            return Ok(match named {
                Some(link) => self.by_alias(&link, prev)?.map(|origin| (link, origin)),
                None => None,
            });
        };
        if let Some(link) = named.filter(|link| link.alias == origin.name) {
            return Ok(Some((link, origin.clone())));
        }
        let links = inside.netlink.dump_links()?;
        let by_alias = links.iter().find(|link| link.alias == origin.name);
        let has_mac = |link: &&Link| link.mac.is_some_and(|mac| mac.to_string() == origin.mac);
        let device = by_alias.or_else(|| links.iter().filter(|l| !l.loopback).find(has_mac));
        Ok(device.map(|link| (link.clone(), origin.clone())))
    }

    /// What the alias tells where nothing else is known: the name on the host, unless the
    /// configuration speaks of another device.
    fn by_alias(&self, link: &Link, prev: Option<&CniResult>) -> Result<Option<Origin>> {
        let name = &link.name;
        if !link.alias.is_empty() {
            let ours = self.selector.is_none_or(|selector| selector.admits(link, &link.alias));
            return Ok(ours.then(|| Origin::named(&link.alias)));
        }
        let mac = link.mac.map(|mac| mac.to_string()).unwrap_or_default();
        let reported = |entry: &Interface| entry.name == *name && entry.mac == mac;
        match self.selector {
            Some(Selector::Name(host))
                if prev.is_some_and(|p| p.interfaces.iter().any(reported)) =>
            {
                Ok(Some(Origin::named(host)))
            }
            _ if link.parent.is_some() => Err(Error::internal(format!(
                "failed to find original ifname for \"{name}\" (alias is not set)"
            ))
            .with_details("move the device to the host by hand, or set its alias")),
            _ => {
                log::warn(format_args!("\"{name}\" in the container is no device of the host"));
                Ok(None)
            }
        }
    }

    /// The device on the host: the kernel moves hardware there when its namespace ends, with the
    /// name that it had or `dev` and a number, and with its alias.
    fn on_host(&self, host: &Netlink) -> Result<Option<(Link, Origin)>> {
        let origin = match (self.origin, self.selector) {
            (Some(origin), _) => origin.clone(),
            (None, Some(Selector::Name(name))) if host.link(name)?.is_none() => Origin::named(name),
            _ => return Ok(None),
        };
        let fell_back = |link: &Link| {
            let number = link.name.strip_prefix("dev").unwrap_or_default();
            let by_kernel = !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit());
            link.alias == origin.name && (link.name == self.ifname || by_kernel)
        };
        let device = host.dump_links().context(|| "look for the device on the host")?;
        Ok(device.into_iter().find(fell_back).map(|link| (link, origin)))
    }
}
