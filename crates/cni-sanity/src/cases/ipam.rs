//! Tests of plugins that allocate addresses.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::{Answer, Attachment, Check, Result, Subject, all_at_once, results};

/// The number of parallel calls.
const CROWD: usize = 16;

pub fn run(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let at = subject.attachment("sanity-1", "ipam")?;
    let added = check.succeeds("add.succeeds", subject.add(&at))?;
    results::look(subject, &at, &added, check);
    let Some(result) = added.result() else { return Ok(()) };
    let interfaces = &result["interfaces"];
    let is_empty = interfaces.is_null() || interfaces.as_array().is_some_and(Vec::is_empty);
    check.of("ipam.no-interfaces", &added, is_empty);
    let has_index = results::list(result, "ips").any(|ip| !ip["interface"].is_null());
    check.of("ipam.no-index", &added, !has_index);
    check.of("ipam.both-families", &added, results::addresses(result).len() == 2);
    if subject.since("0.4.0") {
        let checked = subject.run("CHECK", &at, Some(result));
        check.succeeds_silently(["check.succeeds", "check.silent"], checked)?;
    }
    if subject.is(&["host-local"]) {
        leases(subject, &at, result, check)?;
    } else {
        check.succeeds("del.succeeds", subject.del(&at, Some(result)))?;
    }
    check.succeeds("del.twice", subject.del(&at, Some(result)))?;
    let without_netns = subject.call("DEL", &at, None).env("CNI_NETNS", "");
    check.succeeds_silently(["del.no-netns", "del.silent"], without_netns.run())?;
    Ok(())
}

/// host-local stores the owner of each address.
fn leases(subject: &Subject<'_>, at: &Attachment, result: &Value, check: &mut Check) -> Result<()> {
    let addresses =
        |answer: &Answer| answer.json.as_ref().map(results::addresses).unwrap_or_default();
    let other = Attachment { id: "sanity-2", ..at.clone() };
    let second = check.succeeds("ipam.second-container", subject.add(&other))?;
    let (own, others) = (results::addresses(result), addresses(&second));
    check.of("ipam.unique", &second, !others.iter().any(|ip| own.contains(ip)));
    let eth1 = Attachment { ifname: "eth1", ..at.clone() };
    let third = check.succeeds("ipam.second-interface", subject.add(&eth1))?;
    let is_taken = addresses(&third).iter().any(|ip| own.contains(ip) || others.contains(ip));
    check.of("ipam.unique-by-interface", &third, !is_taken);
    check.succeeds("del.second-interface", subject.del(&eth1, third.json.as_ref()))?;
    let has_check = subject.since("0.4.0");
    if has_check {
        let checked = subject.run("CHECK", at, Some(result));
        check.succeeds("ipam.del-keeps-other-interface", checked)?;
    }
    check.succeeds("del.succeeds", subject.del(at, Some(result)))?;
    if has_check {
        check.fails("check.after-del", subject.run("CHECK", at, Some(result)))?;
        let checked = subject.run("CHECK", &other, second.json.as_ref());
        check.succeeds("ipam.del-keeps-others", checked)?;
    }
    subject.del(&other, second.json.as_ref())?;
    let with_range = |first: &str, last: &str, dir: &str| {
        subject.with(json!({"ipam": {"type": "host-local", "dataDir": dir,
            "ranges": [[{"subnet": "10.77.0.0/24", "rangeStart": first, "rangeEnd": last}]]}}))
    };
    let small = with_range("10.77.0.9", "10.77.0.9", "/var/lib/cni/small");
    let first = small.add(at)?;
    check.of("ipam.range", &first, addresses(&first) == [([10, 77, 0, 9].into(), 24)]);
    check.fails("ipam.full", small.add(&other))?;
    small.add(at)?;
    check.fails("ipam.add-twice-keeps", small.add(&other))?;
    small.del(at, first.json.as_ref())?;
    check.succeeds("ipam.reused", small.add(&other))?;
    similar(&with_range("10.77.0.10", "10.77.0.13", "/var/lib/cni/similar"), at, check)?;
    crowd(&with_range("10.77.0.20", "10.77.0.200", "/var/lib/cni/crowd"), at, check);
    Ok(())
}

/// DEL releases one of four addresses, whose owners have names that begin with each other: of two
/// further ADDs the first gets the address, and the second fails.
fn similar(subject: &Subject<'_>, at: &Attachment, check: &mut Check) -> Result<()> {
    let owner = |id, ifname| Attachment { id, ifname, ..at.clone() };
    let owners = [("c1", "eth1"), ("c1", "eth10"), ("c10", "eth1"), ("c10", "eth10")]
        .map(|(id, ifname)| owner(id, ifname));
    for owner in &owners {
        subject.add(owner)?;
    }
    subject.del(&owners[0], None)?;
    subject.add(&owner("next", "eth0"))?;
    check.fails("ipam.del-keeps-similar", subject.add(&owner("more", "eth0"))).map(drop)
}

/// Parallel calls get different addresses.
fn crowd(subject: &Subject<'_>, at: &Attachment, check: &mut Check) {
    let answers = all_at_once((0..CROWD).map(|number| {
        subject.call("ADD", at, None).env("CNI_CONTAINERID", &format!("crowd-{number}"))
    }));
    let succeeded = answers.iter().filter(|answer| answer.succeeded()).count();
    check.that("ipam.concurrent", succeeded == CROWD, || {
        let failed = answers.iter().find(|answer| !answer.succeeded());
        format!("{succeeded} of {CROWD}; {}", failed.map(Answer::summary).unwrap_or_default())
    });
    let results = answers.iter().filter_map(|answer| answer.json.as_ref());
    let ips: BTreeSet<_> = results.flat_map(results::addresses).collect();
    check.that("ipam.concurrent-unique", ips.len() == succeeded, || {
        format!("{} addresses for {succeeded}", ips.len())
    });
}
