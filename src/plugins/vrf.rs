//! vrf: moves the container's interface into a VRF, a routing domain of its own inside the
//! container.
//!
//! It follows an interface plugin in a list and returns `prevResult` unchanged. Keys: `vrfname`,
//! which is required, and `table`. The VRF is created if missing, and deleted with its last
//! interface; a VRF that existed before the first interface stays (its alias marks it).
//!
//! The kernel sets an interface down and up when it joins or leaves a VRF: IPv6 addresses and
//! routes that are lost are restored. All state is in the container, none on the host. Programs
//! reach the addresses of a VRF when they bind to it (`SO_BINDTODEVICE`), or in all VRFs at once
//! with `net.ipv4.tcp_l3mdev_accept` and `udp_l3mdev_accept`, which the tuning plugin can set.

use std::time::Duration;

use serde::Deserialize;

use crate::files::lock::FileLock;
use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, Failures, GcRequest, Plugin,
    Rollback, require_prev_result,
};
use crate::iface::tables::{self, RoutingTables};
use crate::iface::{ContainerNetns, child, configure, verify};
use crate::netlink::{
    DuplicateDetection, KernelRoute, Link, LinkAddress, LinkChange, LinkKind, Netlink, NewLink,
    NewLinkAddress, RT_TABLE_MAIN, RouteAddMode, RouteFilter,
};
use cni::error::{Error, ErrorCode, ErrorContext, Result};
use cni::{CniResult, InterfaceName, SpecVersion};

/// The alias of a VRF that this plugin has created.
const OURS: &str = "cnibox";
/// The alias of a VRF that another program had created before the first ADD.
const OLDER_VRF_ALIAS: &str = "cnibox: was here before";
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

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct VrfConfig {
    vrfname: String,
    /// Its routing table. Default: the first unused table.
    table: u32,
}

impl VrfConfig {
    fn vrf_name(&self) -> Result<&str> {
        if self.vrfname.is_empty() {
            return Err(Error::config("configuration is expected to have a valid vrf name"));
        }
        InterfaceName::parse(&self.vrfname).map_err(|e| {
            e.context(format!("vrfname \"{}\"", self.vrfname)).with_code(ErrorCode::INVALID_CONFIG)
        })?;
        Ok(&self.vrfname)
    }
}

impl Plugin for Vrf {
    const NAME: &'static str = "vrf";
    const ABOUT: &'static str = "puts the interface into a routing domain of its own";
    const VERSIONS: &'static [SpecVersion] = SpecVersion::ALL.split_at(3).1;
    type Conf = VrfConfig;

    fn examine(_: &CallContext<'_>, conf: &VrfConfig, _: &mut ConfigRemarks) -> Result<()> {
        conf.vrf_name().map(drop)
    }

    fn add(_: &CallContext<'_>, conf: &VrfConfig, req: &AddRequest) -> Result<CniResult> {
        let name = conf.vrf_name()?;
        let prev =
            require_prev_result(req.prev.as_ref(), "missing prevResult from earlier plugin")?;
        let netns = req.sandbox.open_netns()?;
        let inside = ContainerNetns::open_in(netns)?;
        let netlink = &inside.netlink;
        let _lock = FileLock::acquire_netns_lock(netns)?;
        let link = find_interface(netlink, &req.ifname)?;
        let present = find_vrf(netlink, name)?;
        let vrf_index = present.as_ref().map(|vrf| vrf.link.index);
        if let Some(master) = link.master.filter(|master| Some(*master) != vrf_index) {
            return Err(other_master_error(netlink, &link, master));
        }
        let mut undo = Rollback::new();
        let vrf = if let Some(vrf) = &present {
            vrf.require_table(conf)?;
            // Without alias and interfaces: created by another program. A VRF that is also down was
            // left by a plugin that was killed while creating it.
            if vrf.link.alias.is_empty() && vrf.link.up && vrf.is_empty(netlink)? {
                undo.add_step("clear the alias of the VRF", || set_alias(netlink, &vrf.link, ""));
                set_alias(netlink, &vrf.link, OLDER_VRF_ALIAS)?;
            } else if !vrf.link.up {
                set_vrf_up(netlink, &vrf.link)?;
            }
            vrf
        } else {
            let table = choose_table(netlink, conf)?;
            undo.add_step("delete the VRF", || Ok(netlink.delete_link(name).map(drop)?));
            &create_vrf(netlink, name, table)?
        };
        if link.master.is_none() {
            let state = VolatileState::from_link(netlink, &link)?;
            let (member, former) = (link.clone(), state.clone());
            undo.add_step(format!("leave the VRF {name}"), move || {
                leave_vrf(netlink, &member, &former)
            });
            join_vrf(netlink, &link, vrf, state)?;
        }
        undo.commit();
        Ok(prev.clone())
    }

    fn check(_: &CallContext<'_>, conf: &VrfConfig, req: &CheckRequest) -> Result<()> {
        let name = conf.vrf_name()?;
        let prev =
            require_prev_result(req.prev.as_ref(), "missing prevResult from earlier plugin")?;
        let inside = ContainerNetns::open_in(req.sandbox.open_netns()?)?;
        let netlink = &inside.netlink;
        let vrf = find_vrf(netlink, name)?
            .ok_or_else(|| Error::internal(format!("vrf: there is no VRF \"{name}\"")))?;
        vrf.require_table(conf)?;
        verify::require_up(&vrf.link, verify::IN_CONTAINER)?;
        let link = find_interface(netlink, &req.ifname)?;
        if link.master != Some(vrf.link.index) {
            let ifname = &req.ifname;
            let msg = format!("failed to find {ifname} associated to vrf {name}");
            return Err(Error::internal(msg));
        }
        if let Some(index) = prev.interfaces.iter().position(|entry| entry.name == link.name) {
            // IPv4 addresses are not touched by this plugin.
            let mut restored = prev.clone();
            restored.ips.retain(|ip| ip.address.addr().is_ipv6());
            verify::require_addresses(&inside, &link, &restored, index)?;
        }
        verify::require_routes(&inside, &result_in_table(prev, vrf.table))
    }

    fn del(_: &CallContext<'_>, conf: &VrfConfig, req: &DelRequest) -> Result<()> {
        let Some(netns) = &req.netns else { return Ok(()) };
        let inside = ContainerNetns::open_in(netns)?;
        let netlink = &inside.netlink;
        let _lock = FileLock::acquire_netns_lock(netns).unwrap_or_else(|error| {
            warn!("DEL continues without the lock of the namespace: {error}");
            None
        });
        let link = netlink.find_link(req.ifname.as_str())?;
        let Some(vrf) = find_vrf_to_leave(netlink, conf, link.as_ref())? else { return Ok(()) };
        let mut failures = Failures::new();
        // Whether this or an earlier DEL may have removed the last interface of the VRF.
        let mut left = link.is_none();
        if let Some(link) = link.filter(|link| link.master == Some(vrf.link.index)) {
            let state =
                VolatileState::from_link(netlink, &link)?.move_routes(vrf.table, RT_TABLE_MAIN);
            failures.keep_error(leave_vrf(netlink, &link, &state));
            left = true;
        }
        failures.keep_error(delete_unused_vrf(netlink, &vrf, left));
        failures.into_result()
    }

    fn gc(_: &CallContext<'_>, _: &VrfConfig, _: &GcRequest) -> Result<()> {
        // The kernel deletes the VRF with the container's namespace.
        FileLock::remove_stale_locks();
        Ok(())
    }

    fn status(cx: &CallContext<'_>, conf: &VrfConfig) -> Result<()> {
        Self::require_sound(cx, conf)?;
        child::require_driver(&|_| LinkKind::Vrf { table: FIRST_TABLE }).or_unavailable()
    }
}

#[derive(Clone, Debug)]
struct RoutingDomain {
    link: Link,
    table: u32,
}

impl RoutingDomain {
    fn require_table(&self, conf: &VrfConfig) -> Result<()> {
        let RoutingDomain { link, table } = self;
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

fn find_interface(netlink: &Netlink, ifname: &InterfaceName) -> Result<Link> {
    netlink
        .find_link(ifname.as_str())?
        .ok_or_else(|| Error::internal(format!("could not get link by name {ifname}")))
}

fn other_master_error(netlink: &Netlink, link: &Link, master: u32) -> Error {
    let master = netlink.find_link_by_index(master).ok().flatten();
    let master = master.map(|master| master.name).unwrap_or_default();
    let name = &link.name;
    Error::internal(format!("interface {name} has already a master set: {master}"))
}

/// The VRF called `name`; `None` if there is no link of this name.
fn find_vrf(netlink: &Netlink, name: &str) -> Result<Option<RoutingDomain>> {
    let Some(link) = netlink.find_link(name)? else { return Ok(None) };
    match link.vrf_table {
        Some(table) => Ok(Some(RoutingDomain { link, table })),
        None => Err(Error::internal(format!("Netlink {name} is not a VRF"))),
    }
}

/// The VRF that DEL removes the interface from: the VRF that has the interface, else the VRF of the
/// configuration, which may have been changed since ADD.
fn find_vrf_to_leave(
    netlink: &Netlink,
    conf: &VrfConfig,
    link: Option<&Link>,
) -> Result<Option<RoutingDomain>> {
    let master = link.and_then(|link| link.master).map(|index| netlink.find_link_by_index(index));
    if let Some(link) = master.transpose()?.flatten()
        && let Some(table) = link.vrf_table
    {
        return Ok(Some(RoutingDomain { link, table }));
    }
    let found = conf.vrf_name().and_then(|name| find_vrf(netlink, name));
    Ok(found.inspect_err(|error| warn!("{error}")).unwrap_or_default())
}

fn choose_table(netlink: &Netlink, conf: &VrfConfig) -> Result<u32> {
    let table = conf.table;
    if table == 0 {
        return RoutingTables::read_tables(netlink)?.take_free(FIRST_TABLE);
    }
    let links = netlink.dump_links()?;
    if let Some(other) = links.iter().find(|link| link.vrf_table == Some(table)) {
        warn!("{} shares the table {table} with {}", conf.vrfname, other.name);
    }
    Ok(table)
}

/// Creates a VRF. One message sets it up and its alias, so a VRF that is down is incomplete.
fn create_vrf(netlink: &Netlink, name: &str, table: u32) -> Result<RoutingDomain> {
    let link = netlink
        .add_and_read_link(&NewLink::new(name, LinkKind::Vrf { table }))
        .context(|| format!("could not add VRF {name}"))?;
    set_vrf_up(netlink, &link)?;
    Ok(RoutingDomain { link, table })
}

fn set_vrf_up(netlink: &Netlink, vrf: &Link) -> Result<()> {
    netlink
        .change_link(vrf.index, LinkChange::new().set_up().set_alias(OURS))
        .context(|| format!("could not set link up for VRF {}", vrf.name))
}

fn set_alias(netlink: &Netlink, vrf: &Link, text: &str) -> Result<()> {
    Ok(netlink.change_link(vrf.index, LinkChange::new().set_alias(text))?)
}

/// Moves the interface into the VRF, and restores in the VRF's table the addresses and routes that
/// the kernel drops.
fn join_vrf(
    netlink: &Netlink,
    link: &Link,
    vrf: &RoutingDomain,
    state: VolatileState,
) -> Result<()> {
    let RoutingDomain { link: master, table } = vrf;
    state.leave_shared_routes(netlink, link)?;
    netlink
        .change_link(link.index, LinkChange::new().set_master(master.index))
        .context(|| format!("could not set vrf {} as master of {}", master.name, link.name))?;
    state.move_routes(RT_TABLE_MAIN, *table).restore_on_link(netlink, link, *table, *table)
}

/// Removes the interface from its VRF. A route that cannot be restored afterwards is not an error:
/// usually the interface is about to be deleted.
fn leave_vrf(netlink: &Netlink, link: &Link, state: &VolatileState) -> Result<()> {
    state.leave_shared_routes(netlink, link)?;
    netlink
        .change_link(link.index, LinkChange::new().clear_master())
        .context(|| format!("take {} out of its VRF", link.name))?;
    if let Err(error) = state.restore_on_link(netlink, link, RT_TABLE_MAIN, RT_TABLE_LOCAL) {
        debug!(
            "could not restore the addresses and routes of {} outside the VRF: {error}",
            link.name
        );
    }
    Ok(())
}

/// Deletes the VRF if it is empty, unless it existed before. `left` is whether a DEL may have
/// removed its last interface.
fn delete_unused_vrf(netlink: &Netlink, vrf: &RoutingDomain, left: bool) -> Result<()> {
    if !vrf.is_empty(netlink)? {
        return Ok(());
    }
    let index = vrf.link.index;
    match vrf.link.alias.as_str() {
        OLDER_VRF_ALIAS => set_alias(netlink, &vrf.link, "")?,
        OURS => drop(netlink.delete_link_by_index(index)?),
        // The reference sets no alias.
        "" if left || !vrf.link.up => drop(netlink.delete_link_by_index(index)?),
        _ => {}
    }
    Ok(())
}

/// The addresses and routes that an interface loses when it is set down.
#[derive(Clone, Debug)]
struct VolatileState {
    addrs: Vec<LinkAddress>,
    routes: Vec<KernelRoute>,
    /// The routes of which some of `routes` are parts: the kernel drops no next hop of these.
    shared: Vec<KernelRoute>,
}

impl VolatileState {
    /// IPv6 addresses, and the routes that the kernel does not add with addresses.
    fn from_link(netlink: &Netlink, link: &Link) -> Result<VolatileState> {
        let mut addrs = global_ipv6_addresses(netlink, link)?;
        addrs.retain(|addr| addr.flags & TEMPORARY == 0);
        let mut shared = netlink.dump_routes(&RouteFilter::default())?;
        let mut routes = tables::select_routes(&shared, link, None);
        routes.retain(|route| {
            route.protocol != Some(BY_KERNEL) && route.table != Some(RT_TABLE_LOCAL)
        });
        shared.retain(|route| tables::is_shared(route, link.index));
        Ok(VolatileState { addrs, routes, shared })
    }

    /// Takes the next hops through the link out of the routes that it shares with other links.
    fn leave_shared_routes(&self, netlink: &Netlink, link: &Link) -> Result<()> {
        for whole in &self.shared {
            if let Some(part) = tables::find_part(whole, &|oif| oif == link.index) {
                tables::delete_part(netlink, &part, &self.shared)?;
            }
        }
        Ok(())
    }

    /// Moves the routes of one table to another.
    fn move_routes(mut self, from: u32, to: u32) -> VolatileState {
        for route in self.routes.iter_mut().filter(|route| route.table == Some(from)) {
            route.table = Some(to);
        }
        self
    }

    /// Restores missing addresses and routes. The kernel adds the routes to subnets in the table
    /// `main`, and those to the addresses themselves in `local`.
    fn restore_on_link(&self, netlink: &Netlink, link: &Link, main: u32, local: u32) -> Result<()> {
        let present = global_ipv6_addresses(netlink, link)?;
        // The kernel lists the newest IPv6 addresses first.
        for addr in self.addrs.iter().rev() {
            if !present.iter().any(|other| other.net == addr.net) {
                // No other link can have taken the address in the meantime.
                let again = NewLinkAddress {
                    dad: DuplicateDetection::Off,
                    ..configure::request_to_restore(addr)
                };
                netlink.add_address(link.index, &again).context(|| {
                    format!("could not restore address {} to {}", addr.net, link.name)
                })?;
            }
        }
        if link.up {
            self.wait_for_routes(netlink, main, local)?;
        }
        let present = netlink.dump_routes(&RouteFilter::default())?;
        for route in &self.routes {
            let is_chosen = !tables::has_usual_metric(route);
            let failed = || format!("could not add route '{route}'");
            match tables::prefer_to_others(netlink, link, route, is_chosen, &present)
                .context(failed)?
            {
                Some(preferred) => netlink.add_route(&preferred, RouteAddMode::Create),
                None => netlink.add_route(route, RouteAddMode::Replace),
            }
            .context(failed)?;
        }
        Ok(())
    }

    fn wait_for_routes(&self, netlink: &Netlink, main: u32, local: u32) -> Result<()> {
        let hosts: Vec<_> = self.addrs.iter().map(|addr| addr.net.addr().into()).collect();
        let routed = self.addrs.iter().filter(|addr| !addr.is_without_prefix_route());
        let networks: Vec<_> = routed.map(|addr| addr.net.trunc()).collect();
        for (table, wanted) in [(local, hosts), (main, networks)] {
            let filter = RouteFilter { table: Some(table), ..RouteFilter::default() };
            if !wanted.is_empty() && !netlink.wait_for_routes(&filter, &wanted, SETTLE)? {
                debug!("the table {table} has no routes to {wanted:?} yet");
            }
        }
        Ok(())
    }
}

fn global_ipv6_addresses(netlink: &Netlink, link: &Link) -> Result<Vec<LinkAddress>> {
    let mut addrs = netlink.dump_addresses(link.index)?;
    addrs.retain(|addr| addr.net.addr().is_ipv6() && addr.scope == 0);
    Ok(addrs)
}

/// The result with its routes in the table of the VRF, except for those of a configured table.
fn result_in_table(prev: &CniResult, table: u32) -> CniResult {
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
    use cni::ResultRoute;

    #[test]
    fn invalid_vrf_names_are_refused() {
        let name = |text: &str| {
            VrfConfig { vrfname: text.to_owned(), table: 0 }.vrf_name().map(str::to_owned)
        };
        assert_eq!(name("blue"), Ok("blue".to_owned()));
        let msg = "configuration is expected to have a valid vrf name";
        assert_eq!(name("").unwrap_err(), Error::config(msg));
        assert_eq!(name("sixteen-bytes-xx").unwrap_err().code(), ErrorCode::INVALID_CONFIG);
    }

    #[test]
    fn routes_of_the_interface_are_searched_in_the_vrf() {
        let mut prev = CniResult::new();
        for table in [None, Some(0), Some(254), Some(7)] {
            prev.routes.push(ResultRoute {
                table,
                ..ResultRoute::for_destination("10.1.0.0/16".parse().unwrap())
            });
        }
        let tables: Vec<_> =
            result_in_table(&prev, 5).routes.iter().map(|route| route.table).collect();
        assert_eq!(tables, [Some(5), Some(5), Some(5), Some(7)]);
    }
}
