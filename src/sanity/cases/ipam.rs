//! A plugin that gives out addresses.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::protocol::fails_well;
use super::{Attachment, Subject, results};
use crate::check::Check;
use crate::world::{Netns, Result};

/// How many ask at once.
const CROWD: usize = 16;

pub fn run(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let netns = Netns::new("ipam")?;
    let at = Attachment { id: "sanity-1", netns: netns.clone(), ifname: "eth0" };
    let added = subject.run("ADD", &at, None)?;
    check.of("add.succeeds", &added, added.succeeded());
    results::look(subject, &at, &added, check);
    let Some(result) = added.json.as_ref().filter(|_| added.succeeded()) else { return Ok(()) };
    let interfaces = &result["interfaces"];
    let is_empty = interfaces.is_null() || interfaces.as_array().is_some_and(Vec::is_empty);
    check.of("ipam.no-interfaces", &added, is_empty);
    check.of("ipam.both-families", &added, results::addresses(result).len() == 2);
    if subject.since("0.4.0") {
        let good = subject.run("CHECK", &at, Some(result))?;
        check.of("check.succeeds", &good, good.succeeded());
        check.of("check.silent", &good, good.stdout.is_empty());
    }
    if subject.kind.name == "host-local" {
        leases(subject, &at, result, check)?;
    } else {
        let deleted = subject.run("DEL", &at, subject.prev(Some(result)))?;
        check.of("del.succeeds", &deleted, deleted.succeeded());
    }
    let again = subject.run("DEL", &at, subject.prev(Some(result)))?;
    check.of("del.twice", &again, again.succeeded());
    let bare = subject.call("DEL", &at, None).env("CNI_NETNS", "").run()?;
    check.of("del.no-netns", &bare, bare.succeeded());
    check.of("del.silent", &bare, bare.stdout.is_empty());
    Ok(())
}

/// host-local keeps which address is whose.
fn leases(subject: &Subject<'_>, at: &Attachment, result: &Value, check: &mut Check) -> Result<()> {
    let other = Attachment { id: "sanity-2", ..at.clone() };
    let second = subject.run("ADD", &other, None)?;
    check.of("ipam.second-container", &second, second.succeeded());
    let own = results::addresses(result);
    let theirs = second.json.as_ref().map(results::addresses).unwrap_or_default();
    check.of("ipam.unique", &second, !theirs.iter().any(|ip| own.contains(ip)));
    let more = Attachment { ifname: "eth1", ..at.clone() };
    let third = subject.run("ADD", &more, None)?;
    check.of("ipam.second-interface", &third, third.succeeded());
    let thirds = third.json.as_ref().map(results::addresses).unwrap_or_default();
    check.of(
        "ipam.unique-by-interface",
        &third,
        !thirds.iter().any(|ip| own.contains(ip) || theirs.contains(ip)),
    );
    let deleted = subject.run("DEL", &more, subject.prev(third.json.as_ref()))?;
    check.of("del.second-interface", &deleted, deleted.succeeded());
    if subject.since("0.4.0") {
        let kept = subject.run("CHECK", at, Some(result))?;
        check.of("ipam.del-keeps-other-interface", &kept, kept.succeeded());
    }
    let deleted = subject.run("DEL", at, subject.prev(Some(result)))?;
    check.of("del.succeeds", &deleted, deleted.succeeded());
    if subject.since("0.4.0") {
        let gone = subject.run("CHECK", at, Some(result))?;
        check.of("check.after-del", &gone, fails_well(&gone));
        let kept = subject.run("CHECK", &other, second.json.as_ref())?;
        check.of("ipam.del-keeps-others", &kept, kept.succeeded());
    }
    subject.run("DEL", &other, subject.prev(second.json.as_ref()))?;
    let of_range = |first: &str, last: &str, dir: &str| {
        let mut conf = subject.conf.clone();
        conf["ipam"] = json!({"type": "host-local", "dataDir": dir,
            "ranges": [[{"subnet": "10.77.0.0/24", "rangeStart": first, "rangeEnd": last}]]});
        Subject { conf, ..*subject }
    };
    let small = of_range("10.77.0.9", "10.77.0.9", "/var/lib/cni/small");
    let first = small.run("ADD", at, None)?;
    check.of(
        "ipam.range",
        &first,
        first.json.as_ref().map(results::addresses) == Some(vec![([10, 77, 0, 9].into(), 24)]),
    );
    let full = small.run("ADD", &other, None)?;
    check.of("ipam.full", &full, fails_well(&full));
    small.run("DEL", at, small.prev(first.json.as_ref()))?;
    let freed = small.run("ADD", &other, None)?;
    check.of("ipam.reused", &freed, freed.succeeded());
    crowd(&of_range("10.77.0.20", "10.77.0.200", "/var/lib/cni/crowd"), &at.netns, check);
    Ok(())
}

/// Many at once: each has an address of its own.
fn crowd(subject: &Subject<'_>, netns: &Netns, check: &mut Check) {
    let ids: Vec<String> = (0..CROWD).map(|number| format!("crowd-{number}")).collect();
    let answers = std::thread::scope(|scope| {
        let at = Attachment { id: "crowd", netns: netns.clone(), ifname: "eth0" };
        let calls = ids.iter().map(|id| subject.call("ADD", &at, None).env("CNI_CONTAINERID", id));
        let running: Vec<_> = calls.map(|call| scope.spawn(move || call.run())).collect();
        running.into_iter().filter_map(|one| one.join().ok()?.ok()).collect::<Vec<_>>()
    });
    let succeeded = answers.iter().filter(|answer| answer.succeeded()).count();
    let failed = answers.iter().find(|answer| !answer.succeeded());
    check.that("ipam.concurrent", succeeded == CROWD, || {
        format!(
            "{succeeded} of {CROWD}; {}",
            failed.map(crate::call::Answer::said).unwrap_or_default()
        )
    });
    let ips: BTreeSet<_> = answers
        .iter()
        .filter_map(|answer| answer.json.as_ref())
        .flat_map(results::addresses)
        .collect();
    check.that("ipam.concurrent-unique", ips.len() == succeeded, || {
        format!("{} addresses for {succeeded}", ips.len())
    });
}
