//! Faults: a plugin that is killed at any system call, a full disk, a full pipe, many at once. What it left is gone
//! after the DEL that every runtime sends then.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use serde_json::Value;

use super::lifecycle::{Case, leftovers};
use super::protocol::fails_well;
use super::{Attachment, Subject};
use crate::call::Answer;
use crate::check::Check;
use crate::kill::Ended;
use crate::observe::Snapshot;
use crate::world::{self, Netns, Result};

/// At so many of its system calls a plugin is killed: all, if it makes no more.
const POINTS: u64 = 48;

/// How many containers come and go at once.
const CROWD: usize = 64;

pub fn run(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let case = Case { subject };
    let at = Attachment { id: "sanity-1", netns: Netns::new("faults")?, ifname: case.ifname() };
    // What the first calls make for all is no leak.
    subject.call("ADD", &at, None).env("CNI_NETNS", "/run/netns/nowhere").run()?;
    let first = case.add(&at)?;
    if !first.succeeded() {
        return Err(format!("the first ADD: {}", first.said()));
    }
    case.del(&at, first.json.as_ref())?;
    let faults = Faults { case, at };
    faults.killed("ADD", check)?;
    faults.killed("DEL", check)?;
    faults.full_output(check)?;
    faults.full_disk(check)?;
    crowd(subject, check)
}

struct Faults<'a> {
    case: Case<'a>,
    at: Attachment,
}

impl Faults<'_> {
    fn snapshot(&self) -> Result<(Snapshot, Snapshot)> {
        Ok((world::snapshot()?, self.at.netns.snapshot()?))
    }

    /// What is left on the node and in the container.
    fn left(&self, before: &(Snapshot, Snapshot)) -> Result<Vec<String>> {
        let mut left = leftovers(&before.0)?;
        let inside = self.at.netns.snapshot()?;
        left.extend(inside.without(&before.1).into_iter().map(str::to_owned));
        Ok(left)
    }

    /// The verb, killed at the system call `point`, for the attachment or what its ADD answered.
    fn kill(&self, verb: &str, added: Option<&Value>, point: u64) -> Result<Ended> {
        if verb == "ADD" {
            self.case.prepare()?;
        }
        let prev = self.case.subject.prev(added);
        self.case.subject.call(verb, &self.at, prev).run_until(point)
    }

    fn add(&self) -> Result<Option<Value>> {
        Ok(self.case.add(&self.at)?.json)
    }

    fn del(&self, added: Option<&Value>) -> Result<Answer> {
        self.case.del(&self.at, added)
    }

    fn killed(&self, verb: &str, check: &mut Check) -> Result<()> {
        let added = if verb == "DEL" { self.add()? } else { None };
        let calls = match self.kill(verb, added.as_ref(), u64::MAX)? {
            Ended::ByItself { calls, .. } => calls,
            Ended::Killed(_) => return Err("killed before the end".to_owned()),
        };
        self.del(added.as_ref())?;
        let mut before = self.snapshot()?;
        let [succeeds, leaves] = match verb {
            "ADD" => ["faults.killed-add.del", "faults.killed-add.leaves-nothing"],
            _ => ["faults.killed-del.del", "faults.killed-del.leaves-nothing"],
        };
        for part in 0..calls.min(POINTS) {
            let point = part * calls / calls.min(POINTS);
            let added = if verb == "DEL" { self.add()? } else { None };
            self.kill(verb, added.as_ref(), point)?;
            let deleted = self.del(added.as_ref())?;
            check.of(succeeds, &deleted, deleted.succeeded());
            let left = self.left(&before)?;
            check.that(leaves, left.is_empty(), || {
                format!("{verb} killed at system call {point}: {}", left.join("; "))
            });
            if !left.is_empty() {
                // A leak is told once.
                before = self.snapshot()?;
            }
        }
        let added = self.case.add(&self.at)?;
        check.of("faults.killed.add", &added, added.succeeded());
        self.del(added.json.as_ref()).map(drop)
    }

    /// Nobody gets the result.
    fn full_output(&self, check: &mut Check) -> Result<()> {
        let before = self.snapshot()?;
        self.case.prepare()?;
        let full = File::options()
            .write(true)
            .open("/dev/full")
            .map_err(|error| format!("/dev/full: {error}"))?;
        let status = self.case.subject.call("ADD", &self.at, None).run_into(full)?;
        check.that("faults.full-output.add", status.is_some_and(|status| status != 0), || {
            format!("{status:?}")
        });
        let deleted = self.del(None)?;
        check.of("faults.full-output.del", &deleted, deleted.succeeded());
        let left = self.left(&before)?;
        check.none("faults.full-output.leaves-nothing", &left);
        Ok(())
    }

    /// No room for state.
    fn full_disk(&self, check: &mut Check) -> Result<()> {
        let (before, folder) = (self.snapshot()?, Path::new("/var/lib/cni"));
        let options = Some("size=64k");
        mount(Some("tmpfs"), folder, Some("tmpfs"), MsFlags::empty(), options)
            .map_err(|error| error.to_string())?;
        let mut filler = File::create(folder.join("filler")).map_err(|error| error.to_string())?;
        while filler.write_all(&[0; 512]).is_ok() {}
        let added = self.case.add(&self.at)?;
        let is_told = added.succeeded() || fails_well(&added);
        check.of("faults.full-disk.add", &added, is_told);
        drop(filler);
        fs::remove_file(folder.join("filler")).map_err(|error| error.to_string())?;
        let deleted = self.del(added.json.as_ref().filter(|_| added.succeeded()))?;
        check.of("faults.full-disk.del", &deleted, deleted.succeeded());
        umount2(folder, MntFlags::MNT_DETACH).map_err(|error| error.to_string())?;
        let left = self.left(&before)?;
        check.none("faults.full-disk.leaves-nothing", &left);
        Ok(())
    }
}

/// Many containers at once, and all of them gone again.
fn crowd(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    if ["host-device", "vlan"].contains(&subject.kind.name) {
        return Ok(());
    }
    let before = world::snapshot()?;
    let ids: Vec<String> = (0..CROWD).map(|number| format!("crowd-{number}")).collect();
    let namespaces: Vec<Netns> = ids.iter().map(|id| Netns::new(id)).collect::<Result<_>>()?;
    let ifname = Case { subject }.ifname();
    let all = |verb: &str, results: &[Option<Value>]| -> Vec<Answer> {
        std::thread::scope(|scope| {
            let calls = ids.iter().zip(&namespaces).zip(results).map(|((id, netns), result)| {
                let at = Attachment { id: "crowd", netns: netns.clone(), ifname };
                let prev = subject.prev(result.as_ref());
                subject.call(verb, &at, prev).env("CNI_CONTAINERID", id)
            });
            let running: Vec<_> = calls.map(|call| scope.spawn(move || call.run())).collect();
            running.into_iter().filter_map(|one| one.join().ok()?.ok()).collect()
        })
    };
    let added = all("ADD", &vec![None; CROWD]);
    let failed =
        |answers: &[Answer]| answers.iter().find(|answer| !answer.succeeded()).map(Answer::said);
    check.that("faults.crowd.add", failed(&added).is_none(), || failed(&added).unwrap_or_default());
    let results: Vec<Option<Value>> = added.iter().map(|answer| answer.json.clone()).collect();
    let deleted = all("DEL", &results);
    check.that("faults.crowd.del", failed(&deleted).is_none(), || {
        failed(&deleted).unwrap_or_default()
    });
    let left = leftovers(&before)?;
    check.none("faults.crowd.leaves-nothing", &left);
    Ok(())
}
