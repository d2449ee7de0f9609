//! GC and STATUS, which came with 1.1.0.

use serde_json::{Value, json};

use super::protocol::fails_well;
use super::{Attachment, Subject};
use crate::call::{Answer, Call};
use crate::check::Check;
use crate::profiles::Profile;
use crate::world::{self, Netns, Result};

const VALID: &str = "cni.dev/valid-attachments";

pub fn run(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    if subject.kind.name == "host-device" && world::index("spare0").is_err() {
        world::make_pair("spare0", "spare1")?;
    }
    let ask = |verb: &str, conf: &Value| Call::new(&subject.plugin(), verb, conf).run();
    let status = ask("STATUS", &subject.conf)?;
    check.of("status.succeeds", &status, status.succeeded());
    check.of("status.silent", &status, status.stdout.is_empty());
    let mut conf = subject.conf.clone();
    conf[VALID] = json!([]);
    let empty = ask("GC", &conf)?;
    check.of("gc.succeeds", &empty, empty.succeeded());
    check.of("gc.silent", &empty, empty.stdout.is_empty());
    let again = ask("GC", &conf)?;
    check.of("gc.twice", &again, again.succeeded());
    if subject.kind.has_ipam {
        let mut conf = subject.conf.clone();
        conf["ipam"] = json!({"type": "no-such-ipam"});
        let status = ask("STATUS", &conf)?;
        check.of("status.ipam-missing", &status, fails_well(&status));
    }
    let has_leases =
        subject.kind.name == "host-local" || subject.conf["ipam"]["type"] == "host-local";
    // Of one device or one VLAN there is no second attachment.
    let is_alone = ["host-device", "vlan"].contains(&subject.kind.name);
    if has_leases && subject.kind.profile != Profile::Foreign && !is_alone {
        leases(subject, check)?;
    }
    Ok(())
}

/// Of two attachments one is valid: GC takes back the other's address.
fn leases(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let mut conf = subject.conf.clone();
    conf["ipam"] = json!({"type": "host-local", "dataDir": "/var/lib/cni/gc",
        "ranges": [[{"subnet": "10.66.0.0/24", "rangeStart": "10.66.0.10", "rangeEnd": "10.66.0.11"}]]});
    let subject = Subject { conf, ..*subject };
    let attachment =
        |id, name| Ok::<_, String>(Attachment { id, netns: Netns::new(name)?, ifname: "eth0" });
    let (valid, stale) = (attachment("valid", "valid")?, attachment("stale", "stale")?);
    let kept = subject.run("ADD", &valid, None)?;
    let lost = subject.run("ADD", &stale, None)?;
    if !kept.succeeded() || !lost.succeeded() {
        check.of("gc.setup", &lost, false);
        return Ok(());
    }
    let without = Call::new(&subject.plugin(), "GC", &subject.conf).run()?;
    let both = [(&valid, &kept), (&stale, &lost)];
    let mut are_good = true;
    for (at, added) in both {
        are_good &= subject.run("CHECK", at, added.json.as_ref())?.succeeded();
    }
    check.of("gc.no-list", &without, are_good);
    // Its runtime has forgotten it: whether its namespace is there does not matter to GC.
    let mut conf = subject.conf.clone();
    conf[VALID] = json!([{"containerID": valid.id, "ifname": valid.ifname},
        {"containerID": stale.id, "ifname": "eth7"}]);
    let collected: Answer = Call::new(&subject.plugin(), "GC", &conf).run()?;
    check.of("gc.collects", &collected, collected.succeeded());
    let good = subject.run("CHECK", &valid, kept.json.as_ref())?;
    check.of("gc.keeps-valid", &good, good.succeeded());
    let next = attachment("next", "next")?;
    let freed = subject.run("ADD", &next, None)?;
    check.of("gc.releases-stale", &freed, freed.succeeded());
    Ok(())
}
