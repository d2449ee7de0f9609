//! vrf: moves the container's interface into a VRF, a routing domain of its own inside the container.
//!
//! It follows an interface plugin in a list and returns `prevResult` unchanged. Keys: `vrfname`, which is required, and
//! `table`. The VRF is created if missing, and deleted with its last interface; a VRF that existed before the first
//! interface stays (its alias marks it).
//!
//! The kernel sets an interface down and up when it joins or leaves a VRF: IPv6 addresses and routes that are lost are
//! restored. All of this is in the container; on the host it leaves nothing. Programs reach the addresses of a VRF when
//! they bind to it (`SO_BINDTODEVICE`), or in all VRFs at once with `net.ipv4.tcp_l3mdev_accept` and
//! `udp_l3mdev_accept`, which the tuning plugin can set.

use std::time::Duration;

use serde::Deserialize;

use crate::cni::{CniResult, IfName, SpecVersion};
use crate::error::{Code, Context, Error, Result};
use crate::files::lock::Lock;
use crate::iface::tables::{self, Tables};
use crate::iface::{Inside, child, configure, verify};
use crate::log;
use crate::netlink::{
    Addr, Dad, Link, LinkChange, LinkKind, Netlink, NewAddr, NewLink, RT_TABLE_MAIN, Route,
    RouteFilter, RouteMode,
};
use crate::skel::{
    AddReq, CheckReq, Cx, DelReq, Failures, GcReq, Plugin, Remarks, Rollback, require_prev,
};

/// The alias of a VRF that this plugin has created.
const OURS: &str = "cnibox";
/// The alias of a VRF that existed before.
const KEPT: &str = "cnibox: was here before";
/// The first table that is chosen.
const FIRST_TABLE: u32 = 1;
/// The table of the host's own addresses.
const RT_TABLE_LOCAL: u32 = 255;
/// `RTPROT_KERNEL`: routes that the kernel adds with addresses.
const BY_KERNEL: u8 = 2;
/// `IFA_F_TEMPORARY`: addresses that the kernel generates.
const TEMPORARY: u32 = 1;
/// Timeout until IPv6 addresses are usable, as in the reference.
const SETTLE: Duration = Duration::from_millis(2550);

pub struct Vrf;

/// The keys of the plugin.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Conf {
    /// The name of the VRF.
    vrfname: String,
    /// Its routing table. Default: the first unused table.
    table: u32,
}

impl Conf {
    fn name(&self) -> Result<&str> {
        if self.vrfname.is_empty() {
            return Err(Error::config("configuration is expected to have a valid vrf name"));
        }
        IfName::parse(&self.vrfname).map_err(|e| {
            e.context(format!("vrfname \"{}\"", self.vrfname)).with_code(Code::INVALID_CONFIG)
        })?;
        Ok(&self.vrfname)
    }
}

impl Plugin for Vrf {
    const NAME: &'static str = "vrf";
    const ABOUT: &'static str = "puts the interface into a routing domain of its own";
    const VERSIONS: &'static [SpecVersion] = SpecVersion::ALL.split_at(3).1;
    type Conf = Conf;

    fn examine(_: &Cx<'_>, conf: &Conf, _: &mut Remarks) -> Result<()> {
        conf.name().map(drop)
    }

    fn add(_: &Cx<'_>, conf: &Conf, req: &AddReq) -> Result<CniResult> {
        let name = conf.name()?;
        let prev = require_prev(req.prev.as_ref(), "missing prevResult from earlier plugin")?;
        let netns = req.sandbox.netns()?;
        let inside = Inside::enter(netns)?;
        let netlink = &inside.netlink;
        let _turn = Lock::turn_in(netns)?;
        let link = interface(netlink, &req.ifname)?;
        let present = find(netlink, name)?;
        let vrf_index = present.as_ref().map(|vrf| vrf.link.index);
        if let Some(master) = link.master.filter(|master| Some(*master) != vrf_index) {
            return Err(has_master(netlink, &link, master));
        }
        let mut undo = Rollback::new();
        let vrf = if let Some(vrf) = &present {
            vrf.require_table(conf)?;
            // Without alias and interfaces: created by another program. If it is down as well, a plugin was killed
            // while creating it.
            if vrf.link.alias.is_empty() && vrf.link.up && vrf.is_empty(netlink)? {
                undo.push("clear the alias of the VRF", || set_alias(netlink, &vrf.link, ""));
                set_alias(netlink, &vrf.link, KEPT)?;
            } else if !vrf.link.up {
                set_up(netlink, &vrf.link)?;
            }
            vrf
        } else {
            let table = choose_table(netlink, conf)?;
            undo.push("delete the VRF", || Ok(netlink.del_link(name).map(drop)?));
            &create(netlink, name, table)?
        };
        if link.master.is_none() {
            let lost = Volatile::of(netlink, &link)?;
            let (member, back) = (link.clone(), lost.clone());
            undo.push(format!("leave the VRF {name}"), move || leave(netlink, &member, &back));
            join(netlink, &link, vrf, lost)?;
        }
        undo.commit();
        Ok(prev.clone())
    }

    fn check(_: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        let name = conf.name()?;
        let prev = require_prev(req.prev.as_ref(), "missing prevResult from earlier plugin")?;
        let inside = Inside::enter(req.sandbox.netns()?)?;
        let netlink = &inside.netlink;
        let vrf = find(netlink, name)?
            .ok_or_else(|| Error::internal(format!("vrf: there is no VRF \"{name}\"")))?;
        vrf.require_table(conf)?;
        verify::is_up(&vrf.link, verify::IN_CONTAINER)?;
        let link = interface(netlink, &req.ifname)?;
        if link.master != Some(vrf.link.index) {
            let ifname = &req.ifname;
            let msg = format!("failed to find {ifname} associated to vrf {name}");
            return Err(Error::internal(msg));
        }
        if let Some(index) = prev.interfaces.iter().position(|entry| entry.name == link.name) {
            // IPv4 addresses are not touched by this plugin.
            let mut restored = prev.clone();
            restored.ips.retain(|ip| ip.address.addr().is_ipv6());
            verify::addresses(&inside, &link, &restored, index)?;
        }
        verify::routes(&inside, &in_table(prev, vrf.table))
    }

    fn del(_: &Cx<'_>, conf: &Conf, req: &DelReq) -> Result<()> {
        let Some(netns) = &req.netns else { return Ok(()) };
        let inside = Inside::enter(netns)?;
        let netlink = &inside.netlink;
        let _turn = Lock::turn_in(netns).unwrap_or_else(|error| {
            log::warn(error);
            None
        });
        let link = netlink.link(req.ifname.as_str())?;
        let Some(vrf) = left_vrf(netlink, conf, link.as_ref())? else { return Ok(()) };
        let mut failures = Failures::new();
        // Whether the VRF may have lost its last interface by this or an earlier DEL.
        let mut left = link.is_none();
        if let Some(link) = link.filter(|link| link.master == Some(vrf.link.index)) {
            let lost = Volatile::of(netlink, &link)?.in_table(vrf.table, RT_TABLE_MAIN);
            failures.keep(leave(netlink, &link, &lost));
            left = true;
        }
        failures.keep(retire(netlink, &vrf, left));
        failures.into_result()
    }

    fn gc(_: &Cx<'_>, _: &Conf, _: &GcReq) -> Result<()> {
        // The kernel deletes the VRF with the container's namespace.
        Lock::sweep_turns();
        Ok(())
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        Self::require_sound(cx, conf)?;
        child::require_driver(&|_| LinkKind::Vrf { table: FIRST_TABLE }).or_unavailable()
    }
}

/// A VRF and its table.
#[derive(Clone, Debug)]
struct Domain {
    link: Link,
    table: u32,
}

impl Domain {
    fn require_table(&self, conf: &Conf) -> Result<()> {
        let Domain { link, table } = self;
        if conf.table == 0 || conf.table == *table {
            return Ok(());
        }
        let name = &link.name;
        let msg = format!("VRF {name} already exist with different routing table {table}");
        Err(Error::internal(msg))
    }

    fn is_empty(&self, netlink: &Netlink) -> Result<bool> {
        let links = netlink.dump_links()?;
        Ok(!links.iter().any(|link| link.master == Some(self.link.index)))
    }
}

fn interface(netlink: &Netlink, ifname: &IfName) -> Result<Link> {
    netlink
        .link(ifname.as_str())?
        .ok_or_else(|| Error::internal(format!("could not get link by name {ifname}")))
}

fn has_master(netlink: &Netlink, link: &Link, master: u32) -> Error {
    let master = netlink.link_by_index(master).ok().flatten();
    let master = master.map(|master| master.name).unwrap_or_default();
    let name = &link.name;
    Error::internal(format!("interface {name} has already a master set: {master}"))
}

/// The VRF called `name`; `None` if there is no link of this name.
fn find(netlink: &Netlink, name: &str) -> Result<Option<Domain>> {
    let Some(link) = netlink.link(name)? else { return Ok(None) };
    match link.vrf_table {
        Some(table) => Ok(Some(Domain { link, table })),
        None => Err(Error::internal(format!("Netlink {name} is not a VRF"))),
    }
}

/// The VRF that DEL takes the interface out of: the one that it is in, else that of the configuration, which may have been
/// changed since ADD.
fn left_vrf(netlink: &Netlink, conf: &Conf, link: Option<&Link>) -> Result<Option<Domain>> {
    let master = link.and_then(|link| link.master).map(|index| netlink.link_by_index(index));
    if let Some(link) = master.transpose()?.flatten()
        && let Some(table) = link.vrf_table
    {
        return Ok(Some(Domain { link, table }));
    }
    let found = conf.name().and_then(|name| find(netlink, name));
    Ok(found.inspect_err(|error| log::warn(error)).unwrap_or_default())
}

/// The table for a new VRF.
fn choose_table(netlink: &Netlink, conf: &Conf) -> Result<u32> {
    let table = conf.table;
    if table == 0 {
        return Tables::look(netlink)?.take_free(FIRST_TABLE);
    }
    let links = netlink.dump_links()?;
    if let Some(other) = links.iter().find(|link| link.vrf_table == Some(table)) {
        log::warn(format_args!("{} shares the table {table} with {}", conf.vrfname, other.name));
    }
    Ok(table)
}

/// Creates a VRF. One message sets it up and its alias, so a VRF that is down is incomplete.
fn create(netlink: &Netlink, name: &str, table: u32) -> Result<Domain> {
    let link = netlink
        .create_link(&NewLink::new(name, LinkKind::Vrf { table }))
        .context(|| format!("could not add VRF {name}"))?;
    set_up(netlink, &link)?;
    Ok(Domain { link, table })
}

fn set_up(netlink: &Netlink, vrf: &Link) -> Result<()> {
    netlink
        .set_link(vrf.index, LinkChange::new().up().alias(OURS))
        .context(|| format!("could not set link up for VRF {}", vrf.name))
}

fn set_alias(netlink: &Netlink, vrf: &Link, text: &str) -> Result<()> {
    Ok(netlink.set_link(vrf.index, LinkChange::new().alias(text))?)
}

/// Moves the interface into the VRF, and restores the addresses and routes that the kernel drops in the VRF's table.
fn join(netlink: &Netlink, link: &Link, vrf: &Domain, lost: Volatile) -> Result<()> {
    let Domain { link: master, table } = vrf;
    netlink
        .set_link(link.index, LinkChange::new().master(master.index))
        .context(|| format!("could not set vrf {} as master of {}", master.name, link.name))?;
    lost.in_table(RT_TABLE_MAIN, *table).restore(netlink, link, *table, *table)
}

/// Removes the interface from its VRF. A route that cannot be restored afterwards is not an error: usually the interface
/// is about to be deleted.
fn leave(netlink: &Netlink, link: &Link, lost: &Volatile) -> Result<()> {
    netlink
        .set_link(link.index, LinkChange::new().no_master())
        .context(|| format!("take {} out of its VRF", link.name))?;
    if let Err(error) = lost.restore(netlink, link, RT_TABLE_MAIN, RT_TABLE_LOCAL) {
        log::debug(format_args!("after leaving the VRF: {error}"));
    }
    Ok(())
}

/// Deletes the VRF if it is empty, unless it existed before. `left` is whether it may have lost its last interface.
fn retire(netlink: &Netlink, vrf: &Domain, left: bool) -> Result<()> {
    if !vrf.is_empty(netlink)? {
        return Ok(());
    }
    let index = vrf.link.index;
    match vrf.link.alias.as_str() {
        KEPT => set_alias(netlink, &vrf.link, "")?,
        OURS => drop(netlink.del_link_by_index(index)?),
        // The reference sets no alias.
        "" if left || !vrf.link.up => drop(netlink.del_link_by_index(index)?),
        _ => {}
    }
    Ok(())
}

/// The addresses and routes that an interface loses when it is set down.
#[derive(Clone, Debug)]
struct Volatile {
    addrs: Vec<Addr>,
    routes: Vec<Route>,
}

impl Volatile {
    /// IPv6 addresses, and the routes that the kernel does not add with addresses.
    fn of(netlink: &Netlink, link: &Link) -> Result<Volatile> {
        let mut addrs = global_v6(netlink, link)?;
        addrs.retain(|addr| addr.flags & TEMPORARY == 0);
        let mut routes = tables::routes_of(netlink, link, None)?;
        routes.retain(|route| {
            route.protocol != Some(BY_KERNEL) && route.table != Some(RT_TABLE_LOCAL)
        });
        Ok(Volatile { addrs, routes })
    }

    /// Moves the routes of one table to another.
    fn in_table(mut self, from: u32, to: u32) -> Volatile {
        for route in self.routes.iter_mut().filter(|route| route.table == Some(from)) {
            route.table = Some(to);
        }
        self
    }

    /// Restores missing addresses and routes. The kernel adds the routes to subnets in the table `main`, and those to
    /// the addresses themselves in `local`.
    fn restore(&self, netlink: &Netlink, link: &Link, main: u32, local: u32) -> Result<()> {
        let present = global_v6(netlink, link)?;
        // The kernel lists the newest IPv6 addresses first.
        for addr in self.addrs.iter().rev() {
            if !present.iter().any(|other| other.net == addr.net) {
                // No other link can have taken the address in the meantime.
                let again = NewAddr { dad: Dad::Off, ..configure::again(addr) };
                netlink.add_addr(link.index, &again).context(|| {
                    format!("could not restore address {} to {}", addr.net, link.name)
                })?;
            }
        }
        if link.up {
            self.wait(netlink, main, local)?;
        }
        for route in &self.routes {
            netlink
                .add_route(route, RouteMode::Replace)
                .context(|| format!("could not add route '{route}'"))?;
        }
        Ok(())
    }

    fn wait(&self, netlink: &Netlink, main: u32, local: u32) -> Result<()> {
        let hosts: Vec<_> = self.addrs.iter().map(|addr| addr.net.addr().into()).collect();
        let routed = self.addrs.iter().filter(|addr| !addr.is_without_prefix_route());
        let networks: Vec<_> = routed.map(|addr| addr.net.trunc()).collect();
        for (table, wanted) in [(local, hosts), (main, networks)] {
            let filter = RouteFilter { table: Some(table), ..RouteFilter::default() };
            if !wanted.is_empty() && !netlink.settle_routes(&filter, &wanted, SETTLE)? {
                log::debug(format_args!("the table {table} has no routes to {wanted:?} yet"));
            }
        }
        Ok(())
    }
}

fn global_v6(netlink: &Netlink, link: &Link) -> Result<Vec<Addr>> {
    let mut addrs = netlink.dump_addrs(link.index)?;
    addrs.retain(|addr| addr.net.addr().is_ipv6() && addr.scope == 0);
    Ok(addrs)
}

/// The result with its routes in the table of the VRF, except for those of a configured table.
fn in_table(prev: &CniResult, table: u32) -> CniResult {
    let mut prev = prev.clone();
    for route in &mut prev.routes {
        let configured = route.table.filter(|table| *table != 0 && *table != RT_TABLE_MAIN);
        route.table = configured.or(Some(table));
    }
    prev
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cni::Route;

    #[test]
    fn the_name_is_one_that_the_kernel_takes() {
        let name =
            |text: &str| Conf { vrfname: text.to_owned(), table: 0 }.name().map(str::to_owned);
        assert_eq!(name("blue"), Ok("blue".to_owned()));
        let msg = "configuration is expected to have a valid vrf name";
        assert_eq!(name("").unwrap_err(), Error::config(msg));
        assert_eq!(name("sixteen-bytes-xx").unwrap_err().code(), Code::INVALID_CONFIG);
    }

    #[test]
    fn routes_are_looked_for_in_the_vrf() {
        let mut prev = CniResult::new();
        for table in [None, Some(0), Some(254), Some(7)] {
            prev.routes.push(Route { table, ..Route::to("10.1.0.0/16".parse().unwrap()) });
        }
        let tables: Vec<_> = in_table(&prev, 5).routes.iter().map(|route| route.table).collect();
        assert_eq!(tables, [Some(5), Some(5), Some(5), Some(7)]);
    }
}
