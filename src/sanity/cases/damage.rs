//! Damage that CHECK must detect, and objects of others that DEL must keep whatever its input.

use std::fs;
use std::net::SocketAddr;

use serde_json::{Value, json};

use super::{Attachment, Check, Netns, Result, Subject, leftovers, results};
use crate::traffic::{LIMIT, pings, tcp};
use crate::world::{self, NODE, OUTSIDE, UPLINK};

/// The types that create an interface.
const INTERFACES: &[&str] =
    &["bridge", "ptp", "macvlan", "ipvlan", "vlan", "host-device", "dummy", "tap"];

/// A host device that is deleted cannot be returned.
const VIRTUAL: &[&str] = &["bridge", "ptp", "macvlan", "ipvlan", "vlan", "dummy", "tap"];

/// Damages an object of an attachment.
type Damage = fn(&Netns) -> Result<()>;

/// Assertions about CHECK, the types that they apply to, and the damage.
const DAMAGES: &[(&str, &[&str], Damage)] = &[
    ("damage.address-gone", INTERFACES, |at| at.run(|| world::delete_addresses("eth0"))),
    ("damage.route-gone", &["bridge", "ptp"], |at| at.run(world::delete_default_routes)),
    ("damage.other-kind", VIRTUAL, |at| {
        at.run(|| world::delete("eth0").and_then(|()| world::make_pair("eth0", "eth9")))
    }),
    ("damage.bridge-gone", &["bridge"], |_| world::delete("sanity0")),
    ("damage.tuning.sysctl", &["tuning"], |at| {
        at.run(|| Ok(fs::write("/proc/sys/net/ipv4/conf/eth0/arp_filter", "0")?))
    }),
    ("damage.tuning.mtu", &["tuning"], |at| {
        at.run(|| world::set_link("eth0", |link| link.mtu(1200)))
    }),
    ("damage.bandwidth.qdisc", &["bandwidth"], |_| world::delete_shapers()),
    ("damage.sbr.rule", &["sbr"], |at| at.run(world::delete_source_rules)),
    ("damage.vrf.gone", &["vrf"], |at| at.run(|| world::delete("blue"))),
    ("damage.portmap.flushed", &["portmap"], |_| world::flush_rules()),
    ("damage.firewall.flushed", &["firewall"], |_| world::flush_rules()),
];

pub fn run(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    if subject.since("0.4.0") {
        for (id, kinds, damage) in DAMAGES {
            if subject.is(kinds)
                && let Some((at, result)) = add(subject)?
            {
                damage(&at.netns)?;
                check.fails(id, subject.run("CHECK", &at, Some(&result)))?;
                check.succeeds("damage.del", subject.end(&at, Some(&result)))?;
            }
        }
        if subject.is(INTERFACES) {
            forged_check(subject, check)?;
        }
    }
    if subject.is(INTERFACES) {
        forged_del(subject, check)?;
    }
    if subject.is(&["bridge", "ptp", "portmap", "firewall"]) {
        flushed(subject, check)?;
    }
    Ok(())
}

/// A new container with the result of its ADD; `None` if ADD failed.
fn add(subject: &Subject<'_>) -> Result<Option<(Attachment, Value)>> {
    let at = subject.container()?;
    let added = subject.add(&at)?;
    Ok(added.result().cloned().map(|result| (at, result)))
}

/// CHECK with a prevResult that contains objects that never existed.
fn forged_check(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let Some((at, result)) = add(subject)? else { return Ok(()) };
    let mut other = result.clone();
    other["ips"][0]["address"] = json!("10.200.0.9/16");
    let mut route = result.clone();
    route["routes"] = json!([{"dst": "10.201.0.0/16"}]);
    let with = |key: &str, value: &str| {
        let mut forged = result.clone();
        for interface in forged["interfaces"].as_array_mut().into_iter().flatten() {
            interface[key] = json!(value);
        }
        forged
    };
    for (id, forged) in [
        ("damage.address-other", other),
        ("damage.route-other", route),
        ("damage.mac-other", with("mac", "02:00:5e:00:53:99")),
        ("damage.interface-other", with("name", "nowhere0")),
    ] {
        check.fails(id, subject.run("CHECK", &at, Some(&forged)))?;
    }
    check.succeeds("damage.none", subject.run("CHECK", &at, Some(&result)))?;
    subject.end(&at, Some(&result)).map(drop)
}

/// DEL with a prevResult that contains objects of others.
fn forged_del(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let Some((at, result)) = add(subject)? else { return Ok(()) };
    let (before, inside) = (world::snapshot()?, at.netns.snapshot()?);
    let mut forged = result.clone();
    for interface in forged["interfaces"].as_array_mut().into_iter().flatten() {
        *interface = json!({"name": UPLINK});
    }
    let other = Attachment { id: "sanity-stranger", ..subject.container()? };
    let deleted = subject.run("DEL", &other, Some(&forged))?;
    check.of("damage.forged-interface", &deleted, world::index(UPLINK).is_ok());
    check.none("damage.forged-keeps-container", &inside.without(&at.netns.snapshot()?));
    let mut lost = before.without(&world::snapshot()?);
    lost.retain(|line| !line.contains("spare"));
    check.none("damage.forged-keeps-node", &lost);
    if subject.is(&["bridge", "ptp"]) {
        check.that("damage.forged-keeps-traffic", pings(&at.netns, OUTSIDE[0], LIMIT)?, || {
            "no answer by ipMasq any more".to_owned()
        });
    }
    for garbage in
        [json!(7), json!("text"), json!({"interfaces": 7}), json!({"ips": [{"address": "none"}]})]
    {
        let answer = subject.run("DEL", &other, Some(&garbage))?;
        check.of("damage.garbage", &answer, answer.status.is_some());
    }
    subject.end(&at, Some(&result)).map(drop)
}

/// All rules of the packet filter were flushed.
fn flushed(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let Some((at, result)) = add(subject)? else { return Ok(()) };
    world::flush_rules()?;
    check.succeeds("damage.flushed.del", subject.end(&at, Some(&result)))?;
    world::flush_rules()?;
    let next = subject.container()?;
    let added = check.succeeds("damage.flushed.add", subject.add(&next))?;
    let Some(result) = added.result() else { return Ok(()) };
    let works = match subject.kind.name {
        "bridge" | "ptp" => pings(&next.netns, OUTSIDE[0], LIMIT)?,
        "portmap" => {
            let to = SocketAddr::new(NODE[0], 8080);
            tcp(&world::outside(), to, &next.netns, 80, LIMIT)?.is_some()
        }
        _ => results::addresses(result).len() == 2,
    };
    check.of("damage.flushed.traffic", &added, works);
    let now = world::snapshot()?;
    subject.end(&next, Some(result))?;
    check.none("damage.flushed.leaves-nothing", &leftovers(&now)?);
    Ok(())
}
