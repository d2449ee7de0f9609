//! route-override: deletes routes of the container's interface and adds others.
//!
//! A chained plugin, behind an interface plugin: it returns `prevResult` with the routes that the
//! container then has. Keys: `flushroutes`, `flushgateway`, `delroutes`, `addroutes`, `skipcheck`,
//! all of which `args.cni` may override. Routes are deleted first, then added.
//!
//! State on the host while the container lives: a file in `/run/cni/route-override` with the
//! changes for DEL to undo.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::Path;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::attachment::AttachmentId;
use crate::attachment::backup::{self, BackupFile};
use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, Failures, GcRequest, Plugin,
    Rollback, require_prev_result,
};
use crate::iface::{ContainerNetns, ON_LINK, configure, tables, verify};
use crate::netlink::{
    KernelRoute, Link, Netlink, NetlinkResult, RT_TABLE_MAIN, RouteAddMode, RouteFilter,
};
use cni::config::Args;
use cni::error::{Error, ErrorContext, Result};
use cni::files;
use cni::sort::sort_by_key;
use cni::{CniResult, InterfaceName, ResultRoute};

/// The directory of all records. No configuration chooses it.
const DIR: &str = "/run/cni/route-override";

#[derive(Debug)]
pub struct RouteOverride;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct RouteOverrideConfig {
    /// Whether to delete all routes through a gateway, and the default routes.
    flushroutes: bool,
    /// Whether to delete the default routes.
    flushgateway: bool,
    /// Routes to delete, by destination, table and metric.
    delroutes: Vec<ResultRoute>,
    /// Routes to add. Without `gw`, the gateway is that of `prevResult` for the family.
    addroutes: Vec<ResultRoute>,
    /// Whether CHECK ignores the routes.
    skipcheck: bool,
    args: Args<RouteOverrideArgs>,
}

/// Keys for one container, which replace those of the configuration, also with `false` or an empty
/// list.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct RouteOverrideArgs {
    flushroutes: Option<bool>,
    flushgateway: Option<bool>,
    delroutes: Option<Vec<ResultRoute>>,
    addroutes: Option<Vec<ResultRoute>>,
    skipcheck: Option<bool>,
}

impl RouteOverrideConfig {
    fn flushes_routes(&self) -> bool {
        self.args.cni.flushroutes.unwrap_or(self.flushroutes)
    }

    fn flushes_gateway(&self) -> bool {
        self.args.cni.flushgateway.unwrap_or(self.flushgateway)
    }

    fn delroutes(&self) -> &[ResultRoute] {
        self.args.cni.delroutes.as_ref().unwrap_or(&self.delroutes)
    }

    fn addroutes(&self) -> &[ResultRoute] {
        self.args.cni.addroutes.as_ref().unwrap_or(&self.addroutes)
    }

    /// Refuses routes that no kernel accepts.
    fn require_valid(&self) -> Result<()> {
        for ResultRoute { dst, gw, .. } in self.addroutes() {
            if let Some(gw @ IpAddr::V4(_)) = gw
                && dst.addr().is_ipv6()
            {
                let msg = format!("addroutes: the gateway {gw} of {dst} is of another family");
                return Err(Error::config(msg)
                    .with_details("give the IPv6 route a gateway of IPv6, or no \"gw\""));
            }
        }
        Ok(())
    }
}

impl Plugin for RouteOverride {
    const NAME: &'static str = "route-override";
    const ABOUT: &'static str = "deletes and adds routes of the container's interface";
    type Conf = RouteOverrideConfig;

    fn examine(
        _: &CallContext<'_>,
        conf: &RouteOverrideConfig,
        _: &mut ConfigRemarks,
    ) -> Result<()> {
        conf.require_valid()
    }

    fn add(
        cx: &CallContext<'_>,
        conf: &RouteOverrideConfig,
        req: &AddRequest,
    ) -> Result<CniResult> {
        conf.require_valid()?;
        let prev = require_prev_result(req.prev.as_ref(), "Required prevResult missing")?;
        // STATUS does not know whether there will be anything to record.
        backup::require_writable(Path::new(DIR))?;
        let inside = ContainerNetns::open_in(req.sandbox.open_netns()?)?;
        let links = container_links(&inside, prev, &req.ifname)?;
        let selection = RouteSelection { conf, prev };
        let wanted = CniResult { routes: conf.addroutes().to_vec(), ..prev.clone() };
        let changes = RouteChanges::plan(&inside.netlink, &links, &selection, &wanted)?;
        if changes != RouteChanges::default() {
            let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
            let file = BackupFile::new(Path::new(DIR), &owner);
            let former = file.read_content()?;
            let record = OverrideRecord::for_changes(owner, &inside, former.as_deref(), &changes);
            let mut undo = Rollback::new();
            undo.add_step("restore the record", || {
                Ok(former
                    .map_or_else(|| file.remove_files(), |content| file.write_content(&content))?)
            });
            file.write_content(
                &serde_json::to_vec(&record).map_err(|e| Error::internal(e.to_string()))?,
            )?;
            undo.add_step("restore the routes", || Ok(changes.undo(&inside.netlink)?));
            changes.apply(&inside, &links[0], &wanted)?;
            undo.commit();
        }
        Ok(selection.change_result(&wanted))
    }

    fn check(_: &CallContext<'_>, conf: &RouteOverrideConfig, req: &CheckRequest) -> Result<()> {
        if conf.args.cni.skipcheck.unwrap_or(conf.skipcheck) {
            return Ok(());
        }
        let prev = req.require_final_result()?;
        let inside = ContainerNetns::open_in(req.sandbox.open_netns()?)?;
        let links = container_links(&inside, prev, &req.ifname)?;
        let selection = RouteSelection { conf, prev };
        // A route of the result was added later, by this plugin or one behind it.
        let is_back =
            |part: &KernelRoute| selection.selects(part) && !verify::is_listed(part, prev);
        let present = inside.netlink.dump_routes(&RouteFilter::default())?;
        let mut parts = present.iter().filter_map(|route| part_of_links(route, &links));
        if let Some(found) = parts.find(is_back) {
            return Err(Error::internal(format!(
                "route-override: the container has the deleted route \"{found}\""
            ))
            .with_details(format!("{}ip route del {found}", verify::IN_CONTAINER)));
        }
        verify::require_routes(&inside, prev)
    }

    /// A route that cannot be restored is not an error: usually the interface is about to be
    /// deleted.
    fn del(cx: &CallContext<'_>, _: &RouteOverrideConfig, req: &DelRequest) -> Result<()> {
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let file = BackupFile::new(Path::new(DIR), &owner);
        if let (Some(netns), Some(content)) = (&req.netns, file.read_content()?) {
            let inside = ContainerNetns::open_in(netns)?;
            let changes = OverrideRecord::changes_of(owner, &inside, &content);
            match changes.map_or(Ok(()), |changes| changes.undo(&inside.netlink)) {
                Err(error) if error.is_unanswered() => return Err(error.into()),
                undone => drop(
                    undone.inspect_err(|error| debug!("could not restore the routes: {error}")),
                ),
            }
        }
        Ok(file.remove_files()?)
    }

    fn gc(cx: &CallContext<'_>, _: &RouteOverrideConfig, req: &GcRequest) -> Result<()> {
        let (dir, network) = (Path::new(DIR), cx.net.name.as_str());
        backup::remove_temporaries(
            dir,
            network,
            &AttachmentId::from_attachments(&cx.net.name, &req.valid),
        );
        let mut failures = Failures::new();
        for (path, content) in backup::read_backups(dir)? {
            let record = OverrideRecord::parse(&content).filter(|record| record.network == network);
            if record
                .is_some_and(|record| !req.is_valid_attachment(&record.container, &record.ifname))
            {
                failures.keep_error(files::remove_file(&path).map_err(Error::from));
            }
        }
        failures.into_result()
    }

    fn status(cx: &CallContext<'_>, conf: &RouteOverrideConfig) -> Result<()> {
        Self::require_sound(cx, conf)?;
        backup::require_writable(Path::new(DIR)).or_unavailable()?;
        cx.usable_host_netlink().map(drop)
    }
}

/// The container's interfaces that the result lists, the attachment's own first. A result without
/// interfaces, as before version 0.3.0, yields only the attachment's own.
fn container_links(
    inside: &ContainerNetns<'_>,
    prev: &CniResult,
    ifname: &InterfaceName,
) -> Result<Vec<Link>> {
    let listed = prev.interfaces.iter().filter(|entry| !entry.sandbox.is_empty());
    let mut names: Vec<&str> = listed.map(|entry| entry.name.as_str()).collect();
    sort_by_key(&mut names, |name| *name != ifname.as_str());
    let found = names.into_iter().filter_map(|name| inside.netlink.find_link(name).transpose());
    let links: Vec<Link> = found.collect::<NetlinkResult<_>>()?;
    if links.is_empty() { Ok(vec![inside.require_link(ifname.as_str())?]) } else { Ok(links) }
}

/// The part of a route that uses these links.
fn part_of_links(route: &KernelRoute, links: &[Link]) -> Option<KernelRoute> {
    tables::find_part(route, &|oif| links.iter().any(|link| link.index == oif))
}

/// The routes that the configuration deletes.
struct RouteSelection<'a> {
    conf: &'a RouteOverrideConfig,
    prev: &'a CniResult,
}

impl RouteSelection<'_> {
    fn selects(&self, route: &KernelRoute) -> bool {
        let slot = route_slot(route);
        slot.1 == RT_TABLE_MAIN && self.flushes(route)
            || self.conf.delroutes().iter().any(|del| {
                let table = del.table.filter(|table| *table != 0);
                let named = KernelRoute {
                    table,
                    priority: del.priority.or(route.priority),
                    ..KernelRoute::new(del.dst)
                };
                route_slot(&named) == slot
            })
    }

    /// Whether a route of the main table is flushed. Routes on the link, to link-local addresses
    /// and to the subnets of the addresses, which ptp reaches through the gateway, stay.
    fn flushes(&self, route: &KernelRoute) -> bool {
        let (conf, dst) = (self.conf, route.dst.trunc());
        if dst.prefix_len() == 0 {
            return conf.flushes_gateway() || conf.flushes_routes() && route.scope != Some(ON_LINK);
        }
        let is_link_local = match dst.addr() {
            IpAddr::V4(addr) => addr.is_link_local(),
            IpAddr::V6(addr) => addr.is_unicast_link_local(),
        };
        conf.flushes_routes()
            && !tables::is_direct_route(route)
            && !is_link_local
            && !(self.prev.ips.iter().any(|ip| ip.address.trunc() == dst))
    }

    /// The result without the deleted routes, and with those of `wanted`.
    fn change_result(&self, wanted: &CniResult) -> CniResult {
        let mut result = self.prev.clone();
        let kept = self
            .prev
            .routes
            .iter()
            .filter(|route| !self.selects(&verify::wanted_route(route, self.prev)))
            .map(|route| (route, self.prev));
        result.routes.clear();
        for (route, of) in kept.chain(wanted.routes.iter().map(|route| (route, wanted))) {
            // A route without a gateway is one through the gateway of an address, if the result has
            // that gateway.
            let gw = if self.conf.flushes_gateway() {
                configure::effective_gateway(route, of)
            } else {
                route.gw
            };
            let route = ResultRoute { gw, ..route.clone() };
            if !result.routes.contains(&route) {
                result.routes.push(route);
            }
        }
        for ip in result.ips.iter_mut().filter(|_| self.conf.flushes_gateway()) {
            let v4 = ip.address.addr().is_ipv4();
            ip.gateway =
                Some(if v4 { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() });
        }
        result
    }
}

/// What the kernel tells routes apart by: destination, table and metric. No two routes of IPv4 are
/// added with the same.
fn route_slot(route: &KernelRoute) -> (IpNet, u32, u32) {
    (route.dst.trunc(), route.table.unwrap_or(RT_TABLE_MAIN), tables::metric(route))
}

fn is_same_route(found: &KernelRoute, wanted: &KernelRoute) -> bool {
    let hops = |route: &KernelRoute| {
        let single = route.nexthops.is_empty().then_some((route.gw, route.oif));
        let mut hops: Vec<_> =
            route.nexthops.iter().map(|hop| (hop.gw, hop.oif)).chain(single).collect();
        sort_by_key(&mut hops, |hop| *hop);
        hops
    };
    route_slot(found) == route_slot(wanted)
        && hops(found) == hops(wanted)
        && (found.mtu, found.advmss) == (wanted.mtu, wanted.advmss)
}

/// Routes to delete and to add.
#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
struct RouteChanges {
    removed: Vec<KernelRoute>,
    added: Vec<KernelRoute>,
    /// The routes of which some of `removed` are parts.
    #[serde(skip)]
    shared: Vec<KernelRoute>,
}

impl RouteChanges {
    /// Chooses the routes to delete, and those of `wanted` to add. A route that is wanted and
    /// present stays; another one with the same destination, table and metric is an error.
    fn plan(
        netlink: &Netlink,
        links: &[Link],
        selection: &RouteSelection<'_>,
        wanted: &CniResult,
    ) -> Result<RouteChanges> {
        let mut added = configure::plan_routes(wanted, links[0].index);
        let (mut removed, mut kept, mut shared) = (Vec::new(), Vec::new(), Vec::new());
        for found in netlink.dump_routes(&RouteFilter::default())? {
            let part = part_of_links(&found, links).filter(|part| {
                selection.selects(part) && !added.iter().any(|route| is_same_route(part, route))
            });
            match part {
                Some(part) if part == found => removed.push(part),
                Some(part) => {
                    removed.push(part);
                    shared.push(found.clone());
                    kept.push(found);
                }
                None => kept.push(found),
            }
        }
        added.retain(|route| !kept.iter().any(|found| is_same_route(found, route)));
        for route in &added {
            if let Some(found) = kept.iter().find(|found| route_slot(found) == route_slot(route)) {
                let msg = format!(
                    "addroutes: route {route}: the container has \"{found}\" with the same metric"
                );
                let remedy = "add its \"dst\" to \"delroutes\" if it is of this interface, or \
                              give the new route a \"priority\", its metric";
                return Err(Error::internal(msg).with_details(remedy));
            }
        }
        // The kernel accepts only routes through reachable gateways.
        sort_by_key(&mut removed, |route| !tables::is_direct_route(route));
        Ok(RouteChanges { removed, added, shared })
    }

    fn apply(&self, inside: &ContainerNetns<'_>, link: &Link, wanted: &CniResult) -> Result<()> {
        for route in &self.removed {
            tables::delete_part(&inside.netlink, route, &self.shared)?;
        }
        for route in &self.added {
            let added = inside.netlink.add_route(route, RouteAddMode::Exclusive);
            added.map_err(|error| {
                configure::refused_route_error(error.into(), route, link, wanted)
            })?;
        }
        Ok(())
    }

    /// Undoes what was done of the changes: completes all steps that can be done, then reports the
    /// first error.
    fn undo(&self, netlink: &Netlink) -> NetlinkResult<()> {
        let present = netlink.dump_routes(&RouteFilter::default())?;
        let (added, kept): (Vec<_>, Vec<_>) = present
            .into_iter()
            .partition(|found| self.added.iter().any(|route| is_same_route(found, route)));
        let mut done = Ok(());
        for found in &added {
            done = done.and(netlink.delete_route(found).map(drop));
        }
        for route in self.removed.iter().filter(|route| !kept.contains(route)) {
            done = done.and(tables::add_again(netlink, route));
        }
        done
    }
}

/// The record of an attachment: what DEL undoes.
#[derive(Debug, Serialize, Deserialize)]
struct OverrideRecord {
    network: String,
    container: String,
    ifname: String,
    /// The [id](ContainerNetns::id) of the container's namespace, if it is known.
    netns: Option<u64>,
    changes: RouteChanges,
}

impl OverrideRecord {
    /// The record of `changes`, with those of an earlier ADD: of another such plugin in the list,
    /// or of one that was not followed by DEL.
    fn for_changes(
        owner: AttachmentId<'_>,
        inside: &ContainerNetns<'_>,
        former: Option<&[u8]>,
        changes: &RouteChanges,
    ) -> OverrideRecord {
        let mut all =
            former.and_then(|content| Self::changes_of(owner, inside, content)).unwrap_or_default();
        for route in &changes.removed {
            // A route that an earlier ADD added is not restored.
            if !all.removed.contains(route)
                && !all.added.iter().any(|added| is_same_route(route, added))
            {
                all.removed.push(route.clone());
            }
        }
        all.added.retain(|route| !changes.added.contains(route));
        all.added.extend_from_slice(&changes.added);
        let [network, container, ifname] =
            [owner.network, owner.id, owner.ifname].map(str::to_owned);
        OverrideRecord { network, container, ifname, netns: inside.id(), changes: all }
    }

    /// `None` for a malformed record, with a warning.
    fn parse(content: &[u8]) -> Option<OverrideRecord> {
        serde_json::from_slice(content)
            .inspect_err(|error| warn!("a record in {DIR} is ignored: {error}"))
            .ok()
    }

    /// The changes in this namespace; `None` if the record is of another attachment, because the
    /// names of two attachments' files can be equal, or of an earlier container with the same
    /// id.
    fn changes_of(
        owner: AttachmentId<'_>,
        inside: &ContainerNetns<'_>,
        content: &[u8],
    ) -> Option<RouteChanges> {
        let record = Self::parse(content)?;
        let is_own =
            (record.container.as_str(), record.ifname.as_str()) == (owner.id, owner.ifname);
        let is_other = record.netns.is_some_and(|netns| !inside.has_id(netns));
        (is_own && !is_other).then_some(record.changes)
    }
}
