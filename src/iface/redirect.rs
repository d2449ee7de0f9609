//! Redirects: a link passes all packets that it receives to another link, which sends them. They
//! are filters of traffic control, which see the packets before the network stack does.

use super::ContainerNetns;
use crate::netlink::traffic::{Qdisc, QdiscHook, RedirectFilter, TrafficFilterInfo, TrafficHandle};
use crate::netlink::{Link, Netlink};
use cni::error::{ErrorContext, Result};
use cni::sort::collect_set;

/// The handle of an `ingress` or `clsact` qdisc, always.
pub(super) const INGRESS: TrafficHandle = TrafficHandle::new(0xffff, 0);
/// The parent of the ingress filters of a `clsact` qdisc.
pub(super) const CLSACT_INGRESS: TrafficHandle = TrafficHandle::new(0xffff, 0xfff2);
/// The kind of the filters that redirect.
const REDIRECT_KIND: &str = "u32";
/// The class that the redirect sets on packets, as the reference of bandwidth does; nothing uses
/// it.
const CLASS: TrafficHandle = TrafficHandle::new(1, 1);

/// The parent of ingress filters; `None` if there is no such qdisc.
pub(super) fn find_ingress_parent(netlink: &Netlink, link: &Link) -> Result<Option<TrafficHandle>> {
    let qdisc = netlink.find_qdisc(link.index, QdiscHook::Ingress)?;
    Ok(qdisc.map(|info| if info.qdisc == Qdisc::Clsact { CLSACT_INGRESS } else { INGRESS }))
}

/// The priority of our redirect: before all other filters, but behind a [guard](super::guard), or
/// another filter that is no redirect, which has the first priority.
fn redirect_priority(filters: &[TrafficFilterInfo]) -> u16 {
    let is_other =
        |priority: &u16| filters.iter().any(|f| f.priority == *priority && f.kind != REDIRECT_KIND);
    (1..u16::MAX).find(|priority| !is_other(priority)).unwrap_or(u16::MAX)
}

/// The indexes of the links to which all packets that `from` receives are redirected; 0 for links
/// that are gone.
pub fn find_targets(netlink: &Netlink, from: &Link) -> Result<Vec<u32>> {
    let Some(hook) = find_ingress_parent(netlink, from)? else { return Ok(Vec::new()) };
    let filters = netlink.dump_filters(from.index, hook)?;
    Ok(filters.iter().filter_map(TrafficFilterInfo::redirect_of_all).collect())
}

/// Whether another device gets all packets that the container's interface receives: the tap of a
/// virtual machine.
pub fn has_target(inside: &ContainerNetns<'_>, ifname: &str) -> Result<bool> {
    Ok(!find_targets(&inside.netlink, &inside.require_link(ifname)?)?.is_empty())
}

/// Redirects all packets that `from` receives to `to`. Replaces our redirects to links that are
/// gone. Fails, or adds a second filter, if there is such a redirect already.
pub fn add(netlink: &Netlink, from: &Link, to: &Link) -> Result<()> {
    let (hook, priority) = if let Some(hook) = find_ingress_parent(netlink, from)? {
        delete_filters(netlink, from, hook, &[])?;
        (hook, redirect_priority(&netlink.dump_filters(from.index, hook)?))
    } else {
        netlink
            .add_qdisc(from.index, QdiscHook::Ingress, INGRESS, &Qdisc::Ingress)
            .context(|| "create ingress qdisc")?;
        (INGRESS, redirect_priority(&[]))
    };
    let filter = RedirectFilter { priority, class: CLASS, redirect: to.index };
    netlink.add_filter(from.index, hook, &filter).context(|| "add filter")
}

/// Deletes the redirects of `from` to these links, and ours to links that are gone, then the
/// ingress qdisc if it has no other filters.
pub fn remove(netlink: &Netlink, from: &Link, targets: &[u32]) -> Result<()> {
    let Some(hook) = find_ingress_parent(netlink, from)? else { return Ok(()) };
    delete_filters(netlink, from, hook, targets)?;
    if hook == INGRESS && netlink.dump_filters(from.index, hook)?.is_empty() {
        netlink.delete_qdisc(from.index, QdiscHook::Ingress)?;
    }
    Ok(())
}

/// Deletes the redirects of `from` to these links, and ours to links that are gone. If a priority
/// has no other filters, all are deleted at once: deleting them one by one leaves the hash tables
/// of u32.
fn delete_filters(
    netlink: &Netlink,
    from: &Link,
    hook: TrafficHandle,
    targets: &[u32],
) -> Result<()> {
    let mut filters = netlink.dump_filters(from.index, hook)?;
    let own_priority = redirect_priority(&filters);
    filters.retain(|filter| filter.selects);
    let is_stale = |filter: &TrafficFilterInfo| {
        filter.redirect_of_all().is_some_and(|index| {
            targets.contains(&index) || (index == 0 && filter.priority == own_priority)
        })
    };
    let priorities =
        collect_set(filters.iter().filter(|filter| is_stale(filter)).map(|f| f.priority));
    for priority in priorities {
        let of_priority = || filters.iter().filter(|filter| filter.priority == priority);
        if of_priority().all(is_stale) {
            netlink.delete_filters(from.index, hook, priority)?;
            continue;
        }
        for filter in of_priority().filter(|filter| is_stale(filter)) {
            netlink.delete_filter(from.index, hook, filter)?;
        }
    }
    Ok(())
}
