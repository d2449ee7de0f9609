//! Token buckets on links, and the redirect of a container's packets to its ifb device.

use crate::error::{Context, Error, Result};
use crate::netlink::traffic::{Filter, FilterInfo, Handle, Hook, Qdisc, QdiscInfo, Tbf};
use crate::netlink::{Link, Netlink};
use crate::skel::{Failures, Rollback};

/// The handle of token buckets, as in the reference.
const BUCKET: Handle = Handle::new(1, 0);
/// The handle of an `ingress` or `clsact` qdisc, always.
const INGRESS: Handle = Handle::new(0xffff, 0);
/// The parent of the ingress filters of a `clsact` qdisc.
const CLSACT_INGRESS: Handle = Handle::new(0xffff, 0xfff2);
/// The class that the redirect sets on packets, as in the reference; nothing uses it.
const CLASS: Handle = Handle::new(1, 1);
const PRIORITY: u16 = 1;

/// The token bucket of a link that may be ours. Fails if the root qdisc is another program's: a link has only one.
pub(super) fn bucket_of(host: &Netlink, link: &Link) -> Result<Option<Tbf>> {
    match host.qdisc(link.index, Hook::Root)? {
        None => Ok(None),
        Some(QdiscInfo { handle: BUCKET, qdisc: Qdisc::Tbf(tbf) }) => Ok(Some(tbf)),
        Some(QdiscInfo { handle, qdisc }) => {
            let (name, kind) = (&link.name, qdisc.kind());
            Err(Error::internal(format!("\"{name}\" has the qdisc {kind} {handle} already"))
                .with_details(format!("tc qdisc del dev {name} root")))
        }
    }
}

/// Replaces the bucket `former`.
pub(super) fn put_bucket<'a>(
    host: &'a Netlink,
    link: &Link,
    former: Option<Tbf>,
    bucket: Tbf,
    undo: &mut Rollback<'a>,
) -> Result<()> {
    let index = link.index;
    undo.push(format!("restore the qdisc of \"{}\"", link.name), move || {
        match former {
            None => host.del_qdisc(index, Hook::Root).map(drop)?,
            Some(tbf) => host.replace_qdisc(index, Hook::Root, BUCKET, &Qdisc::Tbf(tbf))?,
        }
        Ok(())
    });
    host.replace_qdisc(index, Hook::Root, BUCKET, &Qdisc::Tbf(bucket)).context(|| "create qdisc")
}

/// Deletes the token bucket of a link.
pub(super) fn del_bucket(host: &Netlink, link: &Link) -> Result<()> {
    if bucket_of(host, link).is_ok_and(|bucket| bucket.is_some()) {
        host.del_qdisc(link.index, Hook::Root)?;
    }
    Ok(())
}

/// The parent of ingress filters; `None` if there is no such qdisc.
fn hook(host: &Netlink, end: &Link) -> Result<Option<Handle>> {
    let qdisc = host.qdisc(end.index, Hook::Ingress)?;
    Ok(qdisc.map(|info| if info.qdisc == Qdisc::Clsact { CLSACT_INGRESS } else { INGRESS }))
}

fn redirect_to(ifb: &Link) -> Filter {
    Filter { priority: PRIORITY, class: CLASS, redirect: ifb.index }
}

/// Redirects all packets that `end` receives to the device. Replaces filters whose devices are gone.
pub(super) fn redirect<'a>(
    host: &'a Netlink,
    end: &Link,
    ifb: &Link,
    undo: &mut Rollback<'a>,
) -> Result<()> {
    if is_redirected(host, end, ifb)? {
        return Ok(());
    }
    let (from, to) = (end.clone(), [ifb.index]);
    undo.push(format!("end the redirect of \"{}\"", end.name), move || {
        stop_redirect(host, &from, &to)
    });
    let existing = hook(host, end)?;
    if existing.is_none() {
        host.add_qdisc(end.index, Hook::Ingress, INGRESS, &Qdisc::Ingress)
            .context(|| "create ingress qdisc")?;
    }
    let hook = existing.unwrap_or(INGRESS);
    del_redirects(host, end, hook, &[])?;
    host.add_filter(end.index, hook, &redirect_to(ifb)).context(|| "add filter")
}

/// Whether the packets that `end` receives are redirected to the device.
pub(super) fn is_redirected(host: &Netlink, end: &Link, ifb: &Link) -> Result<bool> {
    let Some(hook) = hook(host, end)? else { return Ok(false) };
    let filter = redirect_to(ifb);
    Ok(host.dump_filters(end.index, hook)?.iter().any(|found| found.is(&filter)))
}

/// Deletes the redirects of `end` to these devices and to devices that are gone, then the ingress qdisc if it has no
/// other filters.
pub(super) fn stop_redirect(host: &Netlink, end: &Link, ifbs: &[u32]) -> Result<()> {
    let Some(hook) = hook(host, end)? else { return Ok(()) };
    let mut failures = Failures::new();
    failures.keep(del_redirects(host, end, hook, ifbs));
    if hook == INGRESS && host.dump_filters(end.index, hook)?.is_empty() {
        failures.keep(host.del_qdisc(end.index, Hook::Ingress).map_err(Error::from));
    }
    failures.into_result()
}

/// Deletes the redirects of `end` to these devices and to devices that are gone. If the priority has no other filters, all
/// are deleted at once: deleting them one by one leaves the hash tables of u32.
fn del_redirects(host: &Netlink, end: &Link, hook: Handle, ifbs: &[u32]) -> Result<()> {
    let mut filters = host.dump_filters(end.index, hook)?;
    filters.retain(|filter| filter.priority == PRIORITY && filter.selects);
    let is_stale = |filter: &FilterInfo| {
        filter.is_redirect_of_all(PRIORITY)
            && filter.redirect.is_some_and(|index| index == 0 || ifbs.contains(&index))
    };
    if !filters.is_empty() && filters.iter().all(is_stale) {
        host.del_filters(end.index, hook, PRIORITY)?;
        return Ok(());
    }
    for filter in filters.iter().filter(|filter| is_stale(filter)) {
        host.del_filter(end.index, hook, filter)?;
    }
    Ok(())
}

/// Verifies the token bucket of a link.
pub(super) fn verify_bucket(host: &Netlink, link: &Link, wanted: Tbf) -> Result<()> {
    let name = &link.name;
    let Some(QdiscInfo { qdisc: Qdisc::Tbf(found), .. }) = host.qdisc(link.index, Hook::Root)?
    else {
        return Err(Error::internal("Failed to find qdisc")
            .with_details(format!("\"{name}\" is not shaped: attach the container again")));
    };
    for (what, found, wanted) in [
        ("Rate", found.rate, wanted.rate),
        ("Limit", found.limit.into(), wanted.limit.into()),
        ("Buffer", found.buffer.into(), wanted.buffer.into()),
    ] {
        if found != wanted {
            let details = format!(
                "\"{name}\" has {found}, configured is {wanted}: attach the container again"
            );
            return Err(Error::internal(format!("{what} doesn't match")).with_details(details));
        }
    }
    Ok(())
}
