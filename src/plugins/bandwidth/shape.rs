//! Token buckets on links, and the redirect of a container's packets to its ifb device.

use crate::error::{Error, ErrorContext, Result};
use crate::framework::{Failures, Rollback};
use crate::netlink::traffic::{
    Qdisc, QdiscHook, QdiscInfo, RedirectFilter, TokenBucket, TrafficFilterInfo, TrafficHandle,
};
use crate::netlink::{Link, Netlink};

/// The handle of token buckets, as in the reference.
const BUCKET: TrafficHandle = TrafficHandle::new(1, 0);
/// The handle of an `ingress` or `clsact` qdisc, always.
const INGRESS: TrafficHandle = TrafficHandle::new(0xffff, 0);
/// The parent of the ingress filters of a `clsact` qdisc.
const CLSACT_INGRESS: TrafficHandle = TrafficHandle::new(0xffff, 0xfff2);
/// The class that the redirect sets on packets, as in the reference; nothing uses it.
const CLASS: TrafficHandle = TrafficHandle::new(1, 1);
const PRIORITY: u16 = 1;

/// The token bucket of a link that may be ours. Fails if the root qdisc is another program's: a link has only one.
pub(super) fn read_bucket(host: &Netlink, link: &Link) -> Result<Option<TokenBucket>> {
    match host.find_qdisc(link.index, QdiscHook::Root)? {
        None => Ok(None),
        Some(QdiscInfo { handle: BUCKET, qdisc: Qdisc::Tbf(tbf) }) => Ok(Some(tbf)),
        Some(QdiscInfo { handle, qdisc }) => {
            let (name, kind) = (&link.name, qdisc.kind_name());
            Err(Error::internal(format!("\"{name}\" has the qdisc {kind} {handle} already"))
                .with_details(format!("tc qdisc del dev {name} root")))
        }
    }
}

/// Replaces the bucket `former`.
pub(super) fn replace_bucket<'a>(
    host: &'a Netlink,
    link: &Link,
    former: Option<TokenBucket>,
    bucket: TokenBucket,
    undo: &mut Rollback<'a>,
) -> Result<()> {
    let index = link.index;
    undo.add_step(format!("restore the qdisc of \"{}\"", link.name), move || {
        match former {
            None => host.delete_qdisc(index, QdiscHook::Root).map(drop)?,
            Some(tbf) => host.replace_qdisc(index, QdiscHook::Root, BUCKET, &Qdisc::Tbf(tbf))?,
        }
        Ok(())
    });
    host.replace_qdisc(index, QdiscHook::Root, BUCKET, &Qdisc::Tbf(bucket)).context(|| "create qdisc")
}

/// Deletes the token bucket of a link.
pub(super) fn delete_bucket(host: &Netlink, link: &Link) -> Result<()> {
    if read_bucket(host, link).is_ok_and(|bucket| bucket.is_some()) {
        host.delete_qdisc(link.index, QdiscHook::Root)?;
    }
    Ok(())
}

/// The parent of ingress filters; `None` if there is no such qdisc.
fn find_ingress_parent(host: &Netlink, end: &Link) -> Result<Option<TrafficHandle>> {
    let qdisc = host.find_qdisc(end.index, QdiscHook::Ingress)?;
    Ok(qdisc.map(|info| if info.qdisc == Qdisc::Clsact { CLSACT_INGRESS } else { INGRESS }))
}

fn redirect_filter(ifb: &Link) -> RedirectFilter {
    RedirectFilter { priority: PRIORITY, class: CLASS, redirect: ifb.index }
}

/// Redirects all packets that `end` receives to the device. Replaces filters whose devices are gone.
pub(super) fn add_redirect<'a>(host: &'a Netlink, end: &Link, ifb: &Link, undo: &mut Rollback<'a>) -> Result<()> {
    if is_redirected(host, end, ifb)? {
        return Ok(());
    }
    let (from, to) = (end.clone(), [ifb.index]);
    undo.add_step(format!("end the redirect of \"{}\"", end.name), move || stop_redirect(host, &from, &to));
    let existing = find_ingress_parent(host, end)?;
    if existing.is_none() {
        host.add_qdisc(end.index, QdiscHook::Ingress, INGRESS, &Qdisc::Ingress).context(|| "create ingress qdisc")?;
    }
    let hook = existing.unwrap_or(INGRESS);
    delete_redirects(host, end, hook, &[])?;
    host.add_filter(end.index, hook, &redirect_filter(ifb)).context(|| "add filter")
}

/// Whether the packets that `end` receives are redirected to the device.
pub(super) fn is_redirected(host: &Netlink, end: &Link, ifb: &Link) -> Result<bool> {
    let Some(hook) = find_ingress_parent(host, end)? else { return Ok(false) };
    let filter = redirect_filter(ifb);
    Ok(host.dump_filters(end.index, hook)?.iter().any(|found| found.matches_filter(&filter)))
}

/// Deletes the redirects of `end` to these devices and to devices that are gone, then the ingress qdisc if it has no
/// other filters.
pub(super) fn stop_redirect(host: &Netlink, end: &Link, ifbs: &[u32]) -> Result<()> {
    let Some(hook) = find_ingress_parent(host, end)? else { return Ok(()) };
    let mut failures = Failures::new();
    failures.keep_error(delete_redirects(host, end, hook, ifbs));
    if hook == INGRESS && host.dump_filters(end.index, hook)?.is_empty() {
        failures.keep_error(host.delete_qdisc(end.index, QdiscHook::Ingress).map_err(Error::from));
    }
    failures.into_result()
}

/// Deletes the redirects of `end` to these devices and to devices that are gone. If the priority has no other filters,
/// all are deleted at once: deleting them one by one leaves the hash tables of u32.
fn delete_redirects(host: &Netlink, end: &Link, hook: TrafficHandle, ifbs: &[u32]) -> Result<()> {
    let mut filters = host.dump_filters(end.index, hook)?;
    filters.retain(|filter| filter.priority == PRIORITY && filter.selects);
    let is_stale = |filter: &TrafficFilterInfo| {
        filter.is_redirect_of_all(PRIORITY) && filter.redirect.is_some_and(|index| index == 0 || ifbs.contains(&index))
    };
    if !filters.is_empty() && filters.iter().all(is_stale) {
        host.delete_filters(end.index, hook, PRIORITY)?;
        return Ok(());
    }
    for filter in filters.iter().filter(|filter| is_stale(filter)) {
        host.delete_filter(end.index, hook, filter)?;
    }
    Ok(())
}

/// Verifies the token bucket of a link.
pub(super) fn verify_bucket(host: &Netlink, link: &Link, wanted: TokenBucket) -> Result<()> {
    let name = &link.name;
    let Some(QdiscInfo { qdisc: Qdisc::Tbf(found), .. }) = host.find_qdisc(link.index, QdiscHook::Root)? else {
        return Err(Error::internal("Failed to find qdisc")
            .with_details(format!("\"{name}\" is not shaped: attach the container again")));
    };
    for (what, found, wanted) in [
        ("Rate", found.rate, wanted.rate),
        ("Limit", found.limit.into(), wanted.limit.into()),
        ("Buffer", found.buffer.into(), wanted.buffer.into()),
    ] {
        if found != wanted {
            let details = format!("\"{name}\" has {found}, configured is {wanted}: attach the container again");
            return Err(Error::internal(format!("{what} doesn't match")).with_details(details));
        }
    }
    Ok(())
}
