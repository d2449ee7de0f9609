//! A plugin that changes what earlier plugins of the list created: bridge of the same folder runs before it.

use std::fs;
use std::net::{IpAddr, SocketAddr};

use serde_json::Value;

use super::{Answer, Attachment, Check, Result, Subject, results};
use crate::traffic::{LIMIT, MOMENT, tcp, udp};
use crate::world::{self, NODE};

pub fn run(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let mut at = subject.attachment("sanity-1", "chain")?;
    // What the first calls create for all later ones is not a leak.
    let prev = subject.add_bridge(&at)?;
    subject.add(&at)?;
    at.prev = Some(prev.clone());
    let first = check.succeeds("add.succeeds", subject.add(&at))?;
    if !first.succeeded() {
        return Ok(());
    }
    subject.del(&at, first.json.as_ref())?;
    let (before, inside) = (world::snapshot()?, at.netns.snapshot()?);
    let added = check.succeeds("chained.add-after-del", subject.add(&at))?;
    results::look(subject, &at, &added, check);
    let Some(result) = added.result() else { return Ok(()) };
    passed_on(&added, &prev, result, check);
    effect(subject, &at, &added, result, check)?;
    if subject.since("0.4.0") {
        let checked = subject.run("CHECK", &at, Some(result));
        check.succeeds_silently(["check.succeeds", "check.silent"], checked)?;
    }
    check.succeeds_silently(["del.succeeds", "del.silent"], subject.del(&at, Some(result)))?;
    let now = world::snapshot()?;
    check.none("del.leaves-nothing", &now.without(&before));
    check.none("chained.del-keeps-the-others", &before.without(&now));
    check.none("del.leaves-nothing-inside", &at.netns.snapshot()?.without(&inside));
    check.succeeds("del.twice", subject.del(&at, Some(result)))?;
    check.succeeds("del.no-prev-result", subject.del(&at, None))?;
    check.fails("chained.no-prev-result", subject.run("ADD", &at, None))?;
    let added = subject.add(&at)?;
    let added = subject.prev(added.json.as_ref());
    let without_netns = subject.call("DEL", &at, added).env("CNI_NETNS", "");
    check.succeeds("del.no-netns", without_netns.run())?;
    subject.bridge("DEL", &at, subject.prev(Some(&prev)))?;
    at.netns.remove()?;
    check.succeeds("del.netns-gone", subject.run("DEL", &at, added))?;
    Ok(())
}

/// The result contains the result of the earlier plugins.
fn passed_on(added: &Answer, prev: &Value, result: &Value, check: &mut Check) {
    let keeps = |list: &str, key: &str| {
        let after: Vec<&Value> = results::list(result, list).map(|entry| &entry[key]).collect();
        results::list(prev, list).all(|entry| after.contains(&&entry[key]))
    };
    check.of("chained.keeps-interfaces", added, keeps("interfaces", "name"));
    let (before, after) = (results::addresses(prev), results::addresses(result));
    check.of("chained.keeps-addresses", added, before.iter().all(|ip| after.contains(ip)));
    check.of("chained.keeps-routes", added, keeps("routes", "dst"));
}

/// The purpose of the plugin.
fn effect(
    subject: &Subject<'_>,
    at: &Attachment,
    added: &Answer,
    result: &Value,
    check: &mut Check,
) -> Result<()> {
    match subject.kind.name {
        "portmap" => ports(at, check)?,
        "tuning" => {
            let path = "/proc/sys/net/ipv4/conf/eth0/arp_filter";
            let value = at.netns.run(|| Ok(fs::read_to_string(path)?))?;
            check.that("tuning.sysctl", value.trim() == "1", || {
                format!("arp_filter is {}", value.trim())
            });
            let mtu = at.netns.link(at.ifname)?.map(|link| link.mtu);
            check.that("tuning.mtu", mtu == Some(1300), || format!("{mtu:?}"));
        }
        "bandwidth" => {
            check.of("bandwidth.qdisc", added, world::snapshot()?.has("qdisc tbf of "));
        }
        "sbr" => {
            let mut ips = results::addresses(result).into_iter().map(|(ip, _)| ip);
            let inside = at.netns.snapshot()?;
            let has_rule = |ip| inside.has(&format!("Source({ip})"));
            check.of("sbr.rule", added, ips.find(IpAddr::is_ipv4).is_some_and(has_rule));
        }
        "vrf" => {
            let (vrf, link) = (at.netns.link("blue")?, at.netns.link(at.ifname)?);
            let master = link.and_then(|link| link.master);
            let is_port = vrf.is_some_and(|vrf| master == Some(vrf.index));
            check.of("vrf.master", added, is_port);
        }
        _ => {}
    }
    Ok(())
}

/// The mapped ports of the node reach the container, and no others.
fn ports(at: &Attachment, check: &mut Check) -> Result<()> {
    let ids = [["portmap.tcp4", "portmap.udp4"], ["portmap.tcp6", "portmap.udp6"]];
    let outside = world::outside();
    for (ip, [over_tcp, over_udp]) in NODE.into_iter().zip(ids) {
        let to = SocketAddr::new(ip, 8080);
        let peer = tcp(&outside, to, &at.netns, 80, LIMIT)?;
        check.that(over_tcp, peer.is_some(), || format!("no connection from outside to {to}"));
        let to = SocketAddr::new(ip, 8081);
        let is_answered = udp(&outside, to, &at.netns, 81, LIMIT)?;
        check.that(over_udp, is_answered, || format!("no answer from {to}"));
        let to = SocketAddr::new(ip, 82);
        let peer = tcp(&outside, to, &at.netns, 80, MOMENT)?;
        check.that("portmap.only-mapped", peer.is_none(), || format!("{to} answers as well"));
    }
    Ok(())
}
