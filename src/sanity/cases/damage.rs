//! Damage that CHECK must detect, and objects of others that DEL must keep whatever its input.

use std::fs;
use std::net::SocketAddr;

use serde_json::{Value, json};

use super::{Attachment, Check, Profile, Result, Subject, leftovers, results};
use crate::traffic::{LIMIT, pings, tcp};
use crate::world::{self, NODE, OUTSIDE, UPLINK};

pub fn run(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let has_check = subject.since("0.4.0");
    if subject.kind.profile == Profile::Interface && !subject.is(&["loopback"]) {
        if has_check {
            kernel(subject, check)?;
            result(subject, check)?;
        }
        forged(subject, check)?;
    }
    if has_check {
        chained(subject, check)?;
    }
    if subject.is(&["bridge", "ptp", "portmap", "firewall"]) {
        flushed(subject, check)?;
    }
    Ok(())
}

/// A new container with the result of its ADD; `None` if ADD failed.
fn add(subject: &Subject<'_>) -> Result<Option<(Attachment, Value)>> {
    let at = subject.container()?;
    let added = subject.run("ADD", &at, at.prev.as_ref())?;
    Ok(added.result().cloned().map(|result| (at, result)))
}

/// CHECK fails after `damage`, which runs in the container, and DEL succeeds.
fn detects(
    subject: &Subject<'_>,
    id: &str,
    check: &mut Check,
    damage: impl FnOnce() -> Result<()> + Send,
) -> Result<()> {
    detects_on_node(subject, id, check, |at| at.netns.run(damage))
}

fn detects_on_node(
    subject: &Subject<'_>,
    id: &str,
    check: &mut Check,
    damage: impl FnOnce(&Attachment) -> Result<()>,
) -> Result<()> {
    let Some((at, result)) = add(subject)? else { return Ok(()) };
    damage(&at)?;
    check.fails(id, subject.run("CHECK", &at, Some(&result)))?;
    check.succeeds("damage.del", subject.end(&at, Some(&result)))?;
    Ok(())
}

/// Objects of the result are missing in the kernel.
fn kernel(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    detects(subject, "damage.address-gone", check, || world::delete_addresses("eth0"))?;
    if subject.is(&["bridge", "ptp"]) {
        detects(subject, "damage.route-gone", check, world::delete_default_routes)?;
    }
    // A deleted device cannot be returned.
    if !subject.is(&["host-device"]) {
        detects(subject, "damage.other-kind", check, || {
            world::delete("eth0")?;
            world::make_pair("eth0", "eth9")
        })?;
    }
    if subject.is(&["bridge"]) {
        detects_on_node(subject, "damage.bridge-gone", check, |_| world::delete("sanity0"))?;
    }
    Ok(())
}

/// The result contains objects that never existed.
fn result(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
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
fn forged(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
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

/// The changes of chained plugins are reverted.
fn chained(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    match subject.kind.name {
        "tuning" => {
            detects(subject, "damage.tuning.sysctl", check, || {
                Ok(fs::write("/proc/sys/net/ipv4/conf/eth0/arp_filter", "0")?)
            })?;
            detects(subject, "damage.tuning.mtu", check, || {
                world::set_link("eth0", |link| link.mtu(1200))
            })
        }
        "sbr" => detects(subject, "damage.sbr.rule", check, world::delete_source_rules),
        "vrf" => detects(subject, "damage.vrf.gone", check, || world::delete("blue")),
        "bandwidth" => {
            detects_on_node(subject, "damage.bandwidth.qdisc", check, |_| world::delete_shapers())
        }
        "portmap" => {
            detects_on_node(subject, "damage.portmap.flushed", check, |_| world::flush_rules())
        }
        "firewall" => {
            detects_on_node(subject, "damage.firewall.flushed", check, |_| world::flush_rules())
        }
        _ => Ok(()),
    }
}

/// All rules of the packet filter were flushed.
fn flushed(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let Some((at, result)) = add(subject)? else { return Ok(()) };
    world::flush_rules()?;
    check.succeeds("damage.flushed.del", subject.end(&at, Some(&result)))?;
    world::flush_rules()?;
    let next = subject.container()?;
    let added = subject.run("ADD", &next, next.prev.as_ref());
    let added = check.succeeds("damage.flushed.add", added)?;
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
