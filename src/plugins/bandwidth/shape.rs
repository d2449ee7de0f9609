//! Token buckets on links, and the redirect of a container's packets to its ifb device.

use crate::framework::Rollback;
use crate::iface::redirect;
use crate::netlink::traffic::{Qdisc, QdiscHook, QdiscInfo, TokenBucket, TrafficHandle};
use crate::netlink::{Link, Netlink};
use cni::error::{Error, ErrorContext, Result};

/// The handle of token buckets, as in the reference.
const BUCKET: TrafficHandle = TrafficHandle::new(1, 0);

/// The token bucket of a link that may be ours. Fails if the root qdisc is another program's: a
/// link has only one.
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
    host.replace_qdisc(index, QdiscHook::Root, BUCKET, &Qdisc::Tbf(bucket))
        .context(|| "create qdisc")
}

pub(super) fn delete_bucket(host: &Netlink, link: &Link) -> Result<()> {
    if read_bucket(host, link).is_ok_and(|bucket| bucket.is_some()) {
        host.delete_qdisc(link.index, QdiscHook::Root)?;
    }
    Ok(())
}

/// Redirects all packets that `end` receives to the device. Replaces filters whose devices are
/// gone.
pub(super) fn add_redirect<'a>(
    host: &'a Netlink,
    end: &Link,
    ifb: &Link,
    undo: &mut Rollback<'a>,
) -> Result<()> {
    if redirect::find_targets(host, end)?.contains(&ifb.index) {
        return Ok(());
    }
    let (from, to) = (end.clone(), [ifb.index]);
    undo.add_step(format!("end the redirect of \"{}\"", end.name), move || {
        redirect::remove(host, &from, &to)
    });
    redirect::add(host, end, ifb)
}

pub(super) fn verify_bucket(host: &Netlink, link: &Link, wanted: TokenBucket) -> Result<()> {
    let name = &link.name;
    let Some(QdiscInfo { qdisc: Qdisc::Tbf(found), .. }) =
        host.find_qdisc(link.index, QdiscHook::Root)?
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
