//! Faults: plugins that are killed at any system call, full disks, full pipes, parallel calls. The
//! DEL that every runtime sends afterwards must delete all remains.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::Value;

use super::{Answer, Attachment, Check, Result, Subject, all_at_once, leftovers};
use crate::observe::Snapshot;
use crate::world;

/// The number of system calls at which a plugin is killed: all, if it makes fewer.
const POINTS: u64 = 48;

/// The number of parallel attachments.
const CROWD: usize = 64;

pub fn run(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let at = subject.attachment("sanity-1", "faults")?;
    // Objects that the first calls create for all later calls are no leak.
    subject.call("ADD", &at, None).env("CNI_NETNS", "/run/netns/nowhere").run()?;
    let first = subject.add(&at)?;
    if !first.succeeded() {
        return Err(format!("the first ADD: {}", first.summary()).into());
    }
    subject.del(&at, first.json.as_ref())?;
    killed(subject, &at, "ADD", check)?;
    killed(subject, &at, "DEL", check)?;
    full_output(subject, &at, check)?;
    full_disk(subject, &at, check)?;
    crowd(subject, check)
}

fn snapshots(at: &Attachment) -> Result<[Snapshot; 2]> {
    Ok([world::snapshot()?, at.netns.snapshot()?])
}

/// The lines that the node and the container have gained.
fn left(at: &Attachment, [node, inside]: &[Snapshot; 2]) -> Result<Vec<String>> {
    let mut left = leftovers(node)?;
    left.extend(at.netns.snapshot()?.without(inside));
    Ok(left)
}

/// Kills the verb at points that are spread over its system calls.
fn killed(subject: &Subject<'_>, at: &Attachment, verb: &str, check: &mut Check) -> Result<()> {
    let ([succeeds, leaves], is_del) = match verb {
        "ADD" => (["faults.killed-add.del", "faults.killed-add.leaves-nothing"], false),
        _ => (["faults.killed-del.del", "faults.killed-del.leaves-nothing"], true),
    };
    let add =
        || -> Result<Option<Value>> { if is_del { Ok(subject.add(at)?.json) } else { Ok(None) } };
    let run_until = |added: Option<&Value>, point| {
        if !is_del {
            subject.prepare()?;
        }
        subject.call(verb, at, subject.prev(added)).run_until(point)
    };
    let added = add()?;
    let calls = run_until(added.as_ref(), u64::MAX)?;
    subject.del(at, added.as_ref())?;
    let mut before = snapshots(at)?;
    for part in 0..calls.min(POINTS) {
        let point = part * calls / calls.min(POINTS);
        let added = add()?;
        run_until(added.as_ref(), point)?;
        check.succeeds(succeeds, subject.del(at, added.as_ref()))?;
        let left = left(at, &before)?;
        check.that(leaves, left.is_empty(), || {
            format!("{verb} killed at system call {point}: {}", left.join("; "))
        });
        if !left.is_empty() {
            // Each leak is reported once.
            before = snapshots(at)?;
        }
    }
    let added = check.succeeds("faults.killed.add", subject.add(at))?;
    subject.del(at, added.json.as_ref()).map(drop)
}

/// The result cannot be written.
fn full_output(subject: &Subject<'_>, at: &Attachment, check: &mut Check) -> Result<()> {
    let before = snapshots(at)?;
    subject.prepare()?;
    let full = crate::context(File::options().write(true).open("/dev/full"), "/dev/full")?;
    let status = subject.call("ADD", at, None).run_into(full)?;
    check.that("faults.full-output.add", status.is_some_and(|status| status != 0), || {
        format!("{status:?}")
    });
    check.succeeds("faults.full-output.del", subject.del(at, None))?;
    check.none("faults.full-output.leaves-nothing", &left(at, &before)?);
    Ok(())
}

/// State cannot be written.
fn full_disk(subject: &Subject<'_>, at: &Attachment, check: &mut Check) -> Result<()> {
    let (before, directory) = (snapshots(at)?, Path::new("/var/lib/cni"));
    mount(Some("tmpfs"), directory, Some("tmpfs"), MsFlags::empty(), Some("size=64k"))?;
    let mut filler = File::create(directory.join("filler"))?;
    while filler.write_all(&[0; 512]).is_ok() {}
    let added = subject.add(at)?;
    check.of("faults.full-disk.add", &added, added.status.is_some());
    drop(filler);
    fs::remove_file(directory.join("filler"))?;
    check.succeeds("faults.full-disk.del", subject.del(at, added.result()))?;
    umount2(directory, MntFlags::MNT_DETACH)?;
    check.none("faults.full-disk.leaves-nothing", &left(at, &before)?);
    Ok(())
}

/// Parallel ADDs, then parallel DELs.
fn crowd(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    if subject.is(&["host-device", "bond", "vlan"]) {
        return Ok(());
    }
    let before = world::snapshot()?;
    let ids = (0..CROWD).map(|number| format!("crowd-{number}"));
    let containers =
        ids.map(|id| Ok((subject.attachment("crowd", &id)?, id))).collect::<Result<Vec<_>>>()?;
    let mut all = |id: &str, verb: &str, results: &[Option<Value>]| {
        let answers = all_at_once(containers.iter().zip(results).map(|((at, id), result)| {
            subject.call(verb, at, subject.prev(result.as_ref())).env("CNI_CONTAINERID", id)
        }));
        let failed = answers.iter().find(|answer| !answer.succeeded());
        check.that(id, failed.is_none(), || failed.map(Answer::summary).unwrap_or_default());
        answers
    };
    let added = all("faults.crowd.add", "ADD", &vec![None; CROWD]);
    let results: Vec<_> = added.into_iter().map(|answer| answer.json).collect();
    all("faults.crowd.del", "DEL", &results);
    check.none("faults.crowd.leaves-nothing", &leftovers(&before)?);
    Ok(())
}
