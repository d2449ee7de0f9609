//! GC and STATUS, which exist since 1.1.0.

use serde_json::{Value, json};

use super::{Answer, Attachment, Check, Profile, Result, Subject, VALID, leftovers, lost};
use crate::profiles::KINDS;
use crate::world;

/// Networks with leases of their own in one directory: name, bridge, subnet, and the last of the
/// addresses, which begin at 10.
const OWN: [&str; 4] = ["sanity", "sanity3", "10.66.0", "12"];
const OTHER: [&str; 4] = ["sanity-other", "sanity1", "10.67.0", "12"];
const SMALL: [&str; 4] = ["sanity-small", "sanity2", "10.68.0", "10"];

pub fn run(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    if subject.is(&["dhcp"]) {
        let status = check.fails("status.daemon", subject.plain("STATUS").run())?;
        told(&status, check);
        return Ok(());
    }
    subject.prepare()?;
    let status = subject.plain("STATUS").run();
    check.succeeds_silently(["status.succeeds", "status.silent"], status)?;
    // Only of known types it is known that they change the network of the node. A user namespace
    // has no other user, and another user may not reach the plugin's file.
    if KINDS.iter().any(|kind| kind.name == subject.kind.name)
        && matches!(subject.kind.profile, Profile::Interface | Profile::Chained)
        && !subject.is(&["loopback"])
        && let Ok(status) = subject.plain("STATUS").without_privileges().run()
    {
        let status = check.fails("status.unprivileged", Ok(status))?;
        told(&status, check);
    }
    let empty = subject.with(json!({VALID: []}));
    check.succeeds_silently(["gc.succeeds", "gc.silent"], empty.plain("GC").run())?;
    check.succeeds("gc.twice", empty.plain("GC").run())?;
    if subject.kind.has_ipam {
        not_ready(subject, check)?;
    }
    let has_leases = subject.is(&["host-local"]) || subject.conf["ipam"]["type"] == "host-local";
    // One device or one VLAN allows only one attachment.
    let is_single = subject.is(&["host-device", "bond", "vlan"]);
    if has_leases && subject.kind.profile != Profile::Foreign && !is_single {
        leases(subject, check)?;
        exhausted(&network(subject, SMALL), check)?;
    }
    if subject.kind.profile == Profile::Chained {
        stale(subject, check)?;
    }
    Ok(())
}

/// Tests that a STATUS that fails prints an error object.
fn told(status: &Answer, check: &mut Check) {
    if status.failed() {
        let is_error = status.json.as_ref().is_some_and(|json| json["code"].is_u64());
        check.of("status.error", status, is_error);
    }
}

/// The IPAM plugin is missing. Other verbs work nevertheless, once it is there.
fn not_ready(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let missing = subject.with(json!({"ipam": {"type": "no-such-ipam"}}));
    let status = check.fails("status.ipam-missing", missing.plain("STATUS").run())?;
    told(&status, check);
    let at = subject.attachment("status", "status")?;
    let added = check.succeeds("status.others", subject.add(&at))?;
    subject.del(&at, added.json.as_ref()).map(drop)
}

/// The subject, with the leases of its own network.
fn network<'a>(subject: &Subject<'a>, [name, bridge, subnet, last]: [&str; 4]) -> Subject<'a> {
    let mut members = json!({"name": name, "ipam": {"type": "host-local", "dataDir": "/var/lib/cni/gc",
        "ranges": [[{"subnet": format!("{subnet}.0/24"), "rangeStart": format!("{subnet}.10"),
            "rangeEnd": format!("{subnet}.{last}")}]]}});
    if subject.is(&["bridge"]) {
        members["bridge"] = json!(bridge);
    }
    subject.with(members)
}

/// The only address is given out.
fn exhausted(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let at = subject.attachment("full", "full")?;
    let added = subject.run("ADD", &at, None)?;
    let status = check.fails("status.exhausted", subject.plain("STATUS").run())?;
    told(&status, check);
    subject.del(&at, added.json.as_ref()).map(drop)
}

/// GC of a chained plugin removes what a stale attachment has on the node, and keeps what a valid
/// one has.
fn stale(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let (valid, stale) = (subject.container_of("c1")?, subject.container_of("c10")?);
    let kept = subject.add(&valid)?;
    let (before, inside) = (world::snapshot()?, valid.netns.snapshot()?);
    let added = subject.second().add(&stale)?;
    if let Some(failed) = [kept, added].iter().find(|added| !added.succeeded()) {
        check.of("gc.setup", failed, false);
        return Ok(());
    }
    let list = json!([{"containerID": valid.id, "ifname": valid.ifname}]);
    let collected = subject.with(json!({VALID: list})).plain("GC").run();
    let collected = check.succeeds("gc.collects", collected)?;
    let mut gone = lost(&before, &world::snapshot()?);
    gone.extend(lost(&inside, &valid.netns.snapshot()?));
    check.effect("gc.keeps-valid", &collected, gone.is_empty(), || gone.join("; "));
    let mut left = leftovers(&before)?;
    // Of a policy the filter stays, until the container's interface is gone.
    left.retain(|line| !subject.is(&["egress"]) || !line.starts_with("qdisc ingress of "));
    check.effect("gc.removes-stale", &collected, left.is_empty(), || left.join("; "));
    Ok(())
}

/// GC releases the addresses of stale attachments, and keeps that of a valid one, and those of
/// other networks.
fn leases(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let (other, subject) = (network(subject, OTHER), network(subject, OWN));
    let add = |subject: &Subject<'_>, id, netns| -> Result<(Attachment, Answer)> {
        let at = subject.attachment(id, netns)?;
        let added = subject.run("ADD", &at, None)?;
        Ok((at, added))
    };
    // "c10" is valid; the other two ids are a prefix of it, and have it as a prefix.
    let (valid, kept) = add(&subject, "c10", "valid")?;
    let stale = [add(&subject, "c1", "stale")?, add(&subject, "c100", "older")?];
    let (foreign, theirs) = add(&other, "c1", "foreign")?;
    let all = [&kept, &stale[0].1, &stale[1].1, &theirs];
    if let Some(failed) = all.into_iter().find(|added| !added.succeeded()) {
        check.of("gc.setup", failed, false);
        return Ok(());
    }
    let without_list = subject.plain("GC").run()?;
    let mut are_good = true;
    for (at, added) in [(&valid, &kept), (&stale[0].0, all[1])] {
        are_good &= subject.run("CHECK", at, added.json.as_ref())?.succeeded();
    }
    check.of("gc.no-list", &without_list, are_good);
    // The namespace of the stale attachment still exists, which is irrelevant to GC.
    let gc = subject.with(json!({VALID: [{"containerID": valid.id, "ifname": valid.ifname},
        {"containerID": stale[0].0.id, "ifname": "eth7"}]}));
    check.succeeds("gc.collects", gc.plain("GC").run())?;
    check.succeeds("gc.keeps-valid", subject.run("CHECK", &valid, kept.json.as_ref()))?;
    let prev: Option<&Value> = theirs.json.as_ref();
    check.succeeds("gc.other-network", other.run("CHECK", &foreign, prev))?;
    if subject.is(&["ipvlan"]) {
        // The kernel refuses an address of another link of the same master, and GC need not enter
        // namespaces.
        for (stale, _) in &stale {
            stale.netns.run(|| world::delete(stale.ifname))?;
        }
    }
    for (id, netns) in [("next", "next"), ("last", "last")] {
        check.succeeds(
            "gc.releases-stale",
            subject.run("ADD", &subject.attachment(id, netns)?, None),
        )?;
    }
    Ok(())
}
