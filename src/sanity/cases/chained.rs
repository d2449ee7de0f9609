//! A plugin that changes what plugins before it made: bridge of the same folder goes first.

use std::fs;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use serde_json::Value;

use super::protocol::fails_well;
use super::{Attachment, Subject, results};
use crate::call::Answer;
use crate::check::Check;
use crate::traffic::{tcp, tcp_within, udp};
use crate::world::{self, NODE, Netns, Result, World};

/// How long is waited for what should not come.
const MOMENT: Duration = Duration::from_secs(1);

pub fn run(subject: &Subject<'_>, world: &World, check: &mut Check) -> Result<()> {
    let at = Attachment { id: "sanity-1", netns: Netns::new("chain")?, ifname: "eth0" };
    let bridge = |verb: &str, prev: Option<&Value>| super::bridge(subject, verb, &at, prev);
    let made = bridge("ADD", None)?;
    let Some(prev) = made.json.clone().filter(|_| made.succeeded()) else {
        return Err(format!("bridge, which goes first: {}", made.said()));
    };
    // What the first calls make for all is no leak.
    subject.call("ADD", &at, None).run()?;
    let first = subject.run("ADD", &at, Some(&prev))?;
    check.of("add.succeeds", &first, first.succeeded());
    if !first.succeeded() {
        return Ok(());
    }
    subject.run("DEL", &at, subject.prev(first.json.as_ref()))?;
    let (before, inside) = (world::snapshot()?, at.netns.snapshot()?);
    let added = subject.run("ADD", &at, Some(&prev))?;
    check.of("chained.add-after-del", &added, added.succeeded());
    results::look(subject, &at, &added, check);
    let Some(result) = added.json.as_ref().filter(|_| added.succeeded()) else { return Ok(()) };
    passed_on(&added, &prev, result, check);
    effect(subject, world, &at, &added, result, check)?;
    if subject.since("0.4.0") {
        let good = subject.run("CHECK", &at, Some(result))?;
        check.of("check.succeeds", &good, good.succeeded());
        check.of("check.silent", &good, good.stdout.is_empty());
    }
    let deleted = subject.run("DEL", &at, subject.prev(Some(result)))?;
    check.of("del.succeeds", &deleted, deleted.succeeded());
    check.of("del.silent", &deleted, deleted.stdout.is_empty());
    let now = world::snapshot()?;
    check.none("del.leaves-nothing", &now.without(&before));
    check.none("chained.del-keeps-the-others", &before.without(&now));
    let after = at.netns.snapshot()?;
    check.none("del.leaves-nothing-inside", &after.without(&inside));
    let again = subject.run("DEL", &at, subject.prev(Some(result)))?;
    check.of("del.twice", &again, again.succeeded());
    let bare = subject.run("DEL", &at, None)?;
    check.of("del.no-prev-result", &bare, bare.succeeded());
    let alone = subject.run("ADD", &at, None)?;
    check.of("chained.no-prev-result", &alone, fails_well(&alone));
    let added = subject.run("ADD", &at, Some(&prev))?;
    let nowhere =
        subject.call("DEL", &at, subject.prev(added.json.as_ref())).env("CNI_NETNS", "").run()?;
    check.of("del.no-netns", &nowhere, nowhere.succeeded());
    bridge("DEL", subject.prev(Some(&prev)))?;
    at.netns.remove()?;
    let gone = subject.run("DEL", &at, subject.prev(added.json.as_ref()))?;
    check.of("del.netns-gone", &gone, gone.succeeded());
    Ok(())
}

/// What plugins before it made is in its result as well.
fn passed_on(added: &Answer, prev: &Value, result: &Value, check: &mut Check) {
    let names = |of: &Value| -> Vec<Value> {
        results::list(of, "interfaces").map(|one| one["name"].clone()).collect()
    };
    let (before, after) = (names(prev), names(result));
    check.of("chained.keeps-interfaces", added, before.iter().all(|name| after.contains(name)));
    let (before, after) = (results::addresses(prev), results::addresses(result));
    check.of("chained.keeps-addresses", added, before.iter().all(|ip| after.contains(ip)));
    let routes = |of: &Value| -> Vec<Value> {
        results::list(of, "routes").map(|one| one["dst"].clone()).collect()
    };
    let (before, after) = (routes(prev), routes(result));
    check.of("chained.keeps-routes", added, before.iter().all(|dst| after.contains(dst)));
}

/// What the plugin is for.
fn effect(
    subject: &Subject<'_>,
    world: &World,
    at: &Attachment,
    added: &Answer,
    result: &Value,
    check: &mut Check,
) -> Result<()> {
    match subject.kind.name {
        "portmap" => ports(world, at, check)?,
        "tuning" => {
            let value = at.netns.run(|| {
                fs::read_to_string("/proc/sys/net/ipv4/conf/eth0/arp_filter")
                    .map_err(|error| error.to_string())
            })?;
            check.that("tuning.sysctl", value.trim() == "1", || {
                format!("arp_filter is {}", value.trim())
            });
            let links = at.netns.links()?;
            let mtu = links.iter().find(|link| link.name == at.ifname).map(|link| link.mtu);
            check.that("tuning.mtu", mtu == Some(1300), || format!("{mtu:?}"));
        }
        "bandwidth" => {
            let shaped = world::snapshot()?;
            let is_shaped = shaped.has("qdisc tbf of ");
            check.of("bandwidth.qdisc", added, is_shaped);
        }
        "sbr" => {
            let inside = at.netns.snapshot()?;
            let own =
                results::addresses(result).into_iter().map(|(ip, _)| ip).find(IpAddr::is_ipv4);
            let names_it = own.is_some_and(|ip| inside.has(&format!("Source({ip})")));
            check.of("sbr.rule", added, names_it);
        }
        "vrf" => {
            let links = at.netns.links()?;
            let vrf = links.iter().find(|link| link.name == "blue");
            let link = links.iter().find(|link| link.name == at.ifname);
            let is_in =
                vrf.is_some_and(|vrf| link.is_some_and(|link| link.master == Some(vrf.index)));
            check.of("vrf.master", added, is_in);
        }
        _ => {}
    }
    Ok(())
}

/// The ports of the node reach the container, and no others.
fn ports(world: &World, at: &Attachment, check: &mut Check) -> Result<()> {
    let ids = [["portmap.tcp4", "portmap.udp4"], ["portmap.tcp6", "portmap.udp6"]];
    for (ip, [over_tcp, over_udp]) in NODE.into_iter().zip(ids) {
        let to = SocketAddr::new(ip, 8080);
        let seen = tcp(world.outside(), to, &at.netns, 80)?;
        check.that(over_tcp, seen.is_some(), || format!("no connection from outside to {to}"));
        let to = SocketAddr::new(ip, 8081);
        let seen = udp(world.outside(), to, &at.netns, 81)?;
        check.that(over_udp, seen, || format!("no answer from {to}"));
        let to = SocketAddr::new(ip, 82);
        let seen = tcp_within(world.outside(), to, &at.netns, 80, MOMENT)?;
        check.that("portmap.only-mapped", seen.is_none(), || format!("{to} answers as well"));
    }
    Ok(())
}
