//! GC and STATUS, which exist since 1.1.0.

use serde_json::json;

use super::{Check, Profile, Result, Subject, VALID};
use crate::world;

pub fn run(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    subject.prepare()?;
    let status = subject.plain("STATUS").run();
    check.succeeds_silently(["status.succeeds", "status.silent"], status)?;
    let empty = subject.with(json!({VALID: []}));
    check.succeeds_silently(["gc.succeeds", "gc.silent"], empty.plain("GC").run())?;
    check.succeeds("gc.twice", empty.plain("GC").run())?;
    if subject.kind.has_ipam {
        let missing = subject.with(json!({"ipam": {"type": "no-such-ipam"}}));
        check.fails("status.ipam-missing", missing.plain("STATUS").run())?;
    }
    let has_leases = subject.is(&["host-local"]) || subject.conf["ipam"]["type"] == "host-local";
    // One device or one VLAN allows only one attachment.
    let is_single = subject.is(&["host-device", "vlan"]);
    if has_leases && subject.kind.profile != Profile::Foreign && !is_single {
        leases(subject, check)?;
    }
    Ok(())
}

/// GC releases the address of a stale attachment, and keeps that of a valid one.
fn leases(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let subject = subject.with(json!({"ipam": {"type": "host-local", "dataDir": "/var/lib/cni/gc",
        "ranges": [[{"subnet": "10.66.0.0/24", "rangeStart": "10.66.0.10", "rangeEnd": "10.66.0.11"}]]}}));
    let attachment = |id| subject.attachment(id, id);
    let (valid, stale) = (attachment("valid")?, attachment("stale")?);
    let (kept, lost) = (subject.run("ADD", &valid, None)?, subject.run("ADD", &stale, None)?);
    if !kept.succeeded() || !lost.succeeded() {
        check.of("gc.setup", &lost, false);
        return Ok(());
    }
    let without_list = subject.plain("GC").run()?;
    let mut are_good = true;
    for (at, added) in [(&valid, &kept), (&stale, &lost)] {
        are_good &= subject.run("CHECK", at, added.json.as_ref())?.succeeded();
    }
    check.of("gc.no-list", &without_list, are_good);
    // The namespace of the stale attachment still exists, which is irrelevant to GC.
    let gc = subject.with(json!({VALID: [{"containerID": valid.id, "ifname": valid.ifname},
        {"containerID": stale.id, "ifname": "eth7"}]}));
    check.succeeds("gc.collects", gc.plain("GC").run())?;
    check.succeeds("gc.keeps-valid", subject.run("CHECK", &valid, kept.json.as_ref()))?;
    if subject.is(&["ipvlan"]) {
        // The kernel refuses an address of another link of the same master, and GC need not enter namespaces.
        stale.netns.run(|| world::delete(stale.ifname))?;
    }
    check.succeeds("gc.releases-stale", subject.run("ADD", &attachment("next")?, None))?;
    Ok(())
}
