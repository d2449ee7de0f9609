//! Token buckets on links, and leading what a container sends to its device.

use crate::error::{Context, Error, Result};
use crate::netlink::traffic::{Filter, FilterInfo, Handle, Hook, Match, Qdisc, QdiscInfo, Tbf};
use crate::netlink::{Link, Netlink};
use crate::skel::{Failures, Rollback};

/// The handle of our token buckets, and the reference's.
const BUCKET: Handle = Handle::new(1, 0);
/// The handle of an `ingress` or `clsact` qdisc, always.
const INGRESS: Handle = Handle::new(0xffff, 0);
/// Where `clsact` has the filters of what comes in.
const CLSACT_INGRESS: Handle = Handle::new(0xffff, 0xfff2);
/// The class that the redirect notes on packets; nothing uses it.
const CLASS: Handle = Handle::new(1, 1);
const PRIORITY: u16 = 1;

/// The root qdisc of a link: a token bucket that may be ours, or none. A qdisc of another program is an
/// error: a link has only one.
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

/// Puts the bucket in place of `former`.
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

/// Removes the bucket of a link, if it is one.
pub(super) fn del_bucket(host: &Netlink, link: &Link) -> Result<()> {
    if bucket_of(host, link).is_ok_and(|bucket| bucket.is_some()) {
        host.del_qdisc(link.index, Hook::Root)?;
    }
    Ok(())
}

/// The qdisc that ingress filters are attached to; `None` if there is none yet.
fn hook(host: &Netlink, end: &Link) -> Result<Option<Handle>> {
    let there = host.qdisc(end.index, Hook::Ingress)?;
    Ok(there.map(|info| if info.qdisc == Qdisc::Clsact { CLSACT_INGRESS } else { INGRESS }))
}

fn redirect_to(ifb: &Link) -> Filter {
    Filter { priority: PRIORITY, packets: Match::All, class: CLASS, redirect: ifb.index }
}

/// Redirects what comes in by `end` to the device, with one filter, and replaces a filter to a device that is gone.
pub(super) fn redirect<'a>(
    host: &'a Netlink,
    end: &Link,
    ifb: &Link,
    undo: &mut Rollback<'a>,
) -> Result<()> {
    if leads_to(host, end, ifb)? {
        return Ok(());
    }
    let (from, to) = (end.clone(), [ifb.index]);
    undo.push(format!("end the redirect of \"{}\"", end.name), move || {
        stop_redirect(host, &from, &to)
    });
    let there = hook(host, end)?;
    if there.is_none() {
        host.add_qdisc(end.index, Hook::Ingress, INGRESS, &Qdisc::Ingress)
            .context(|| "create ingress qdisc")?;
    }
    let hook = there.unwrap_or(INGRESS);
    del_redirects(host, end, hook, &[])?;
    host.add_filter(end.index, hook, &redirect_to(ifb)).context(|| "add filter")
}

/// Whether what comes in by `end` is led to the device.
pub(super) fn leads_to(host: &Netlink, end: &Link, ifb: &Link) -> Result<bool> {
    let Some(hook) = hook(host, end)? else { return Ok(false) };
    let filter = redirect_to(ifb);
    Ok(host.dump_filters(end.index, hook)?.iter().any(|there| there.is(&filter)))
}

/// Ends the redirects of `end` to these devices and to those that are gone, and removes what they
/// hang on when nothing else does.
pub(super) fn stop_redirect(host: &Netlink, end: &Link, ifbs: &[u32]) -> Result<()> {
    let Some(hook) = hook(host, end)? else { return Ok(()) };
    let mut failures = Failures::new();
    failures.keep(del_redirects(host, end, hook, ifbs));
    if hook == INGRESS && host.dump_filters(end.index, hook)?.is_empty() {
        failures.keep(host.del_qdisc(end.index, Hook::Ingress).map_err(Error::from));
    }
    failures.into_result()
}

/// Deletes the redirects of `end` to these devices and to those that are gone; with the last of
/// the priority its tables, which would stay where others have filters of the kind.
fn del_redirects(host: &Netlink, end: &Link, hook: Handle, ifbs: &[u32]) -> Result<()> {
    let mut filters = host.dump_filters(end.index, hook)?;
    filters.retain(|there| there.priority == PRIORITY && there.selects);
    let is_stale = |there: &FilterInfo| {
        there.is_redirect_of_all(PRIORITY)
            && there.redirect.is_some_and(|index| index == 0 || ifbs.contains(&index))
    };
    if !filters.is_empty() && filters.iter().all(is_stale) {
        host.del_filters(end.index, hook, PRIORITY)?;
        return Ok(());
    }
    for there in filters.iter().filter(|there| is_stale(there)) {
        host.del_filter(end.index, hook, there)?;
    }
    Ok(())
}

/// The link has this bucket.
pub(super) fn verify_bucket(host: &Netlink, link: &Link, wanted: Tbf) -> Result<()> {
    let found = match host.qdisc(link.index, Hook::Root)? {
        Some(QdiscInfo { qdisc: Qdisc::Tbf(found), .. }) => Some(found),
        _ => None,
    };
    let differs = |what: &str, found: u64, wanted: u64| {
        let details = format!("\"{}\" has {found}, configured is {wanted}", link.name);
        Err(Error::internal(format!("{what} doesn't match")).with_details(details))
    };
    match found {
        None => Err(Error::internal("Failed to find qdisc")
            .with_details(format!("\"{}\" is not shaped", link.name))),
        Some(found) if found.rate != wanted.rate => differs("Rate", found.rate, wanted.rate),
        Some(found) if found.limit != wanted.limit => {
            differs("Limit", found.limit.into(), wanted.limit.into())
        }
        Some(found) if found.buffer != wanted.buffer => {
            differs("Buffer", found.buffer.into(), wanted.buffer.into())
        }
        Some(_) => Ok(()),
    }
}
