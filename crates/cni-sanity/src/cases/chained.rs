//! Tests of plugins that change what earlier plugins of the list created; bridge of the same
//! directory is the earlier plugin.

use std::fs;
use std::net::{IpAddr, SocketAddr};

use serde_json::{Value, json};

use super::{Answer, Attachment, Check, Result, Subject, leftovers, lost, results};
use crate::observe::{self, Snapshot};
use crate::profiles::merge;
use crate::traffic::{LIMIT, MOMENT, tcp, udp};
use crate::world::{self, NODE, OUTSIDE};

pub fn run(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    if !again(subject, check)? {
        return Ok(());
    }
    let at = subject.container_of("sanity-5")?;
    let Some(prev) = at.prev.clone() else { return Ok(()) };
    let (before, inside) = (world::snapshot()?, at.netns.snapshot()?);
    let added = check.succeeds("add.succeeds", subject.add(&at))?;
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
    let mut left = now.without(&before);
    // The filter of a policy stays with the interface: until the pair is deleted the container may
    // still run.
    left.retain(|line| !subject.is(&["egress"]) || !line.starts_with("qdisc ingress of "));
    check.none("del.leaves-nothing", &left);
    check.none("chained.del-keeps-the-others", &lost(&before, &now));
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
    handed_on(subject, check)?;
    neighbours(subject, check)
}

/// ADD is repeated without a DEL; another attachment comes and goes: an interface of the same
/// container in the same network, one in another network, and one of another container.
fn neighbours(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let (second, other) = (subject.second(), json!({"name": "sanity-other"}));
    if subject.asks("chained.add-twice-keeps") {
        repeated(subject, check)?;
    }
    for (id, neighbour, is_inside) in [
        ("chained.keeps-other-interface", second.with(json!({})), true),
        ("chained.keeps-other-network", second.with(other), true),
        ("chained.keeps-other-container", second, false),
    ] {
        if !subject.asks(id) {
            continue;
        }
        let empty = world::snapshot()?;
        let first = subject.container_of("c1")?;
        let added = subject.add(&first)?;
        let mut at = Attachment { ifname: "eth1", ..first.clone() };
        if is_inside {
            at.prev = Some(subject.add_bridge(&at)?);
        } else {
            at = subject.container_of("c10")?;
        }
        let before = (&world::snapshot()?, &first.netns.snapshot()?);
        let next = neighbour.add(&at)?;
        keeps(id, subject, &first, before, &next, check)?;
        let deleted = neighbour.del(&at, next.result())?;
        keeps(id, subject, &first, before, &deleted, check)?;
        if is_inside {
            subject.bridge("DEL", &at, subject.prev(at.prev.as_ref()))?;
        } else {
            neighbour.end(&at, next.result())?;
        }
        subject.end(&first, added.result())?;
        // The kernel deletes the pairs of a namespace later.
        leftovers(&empty)?;
    }
    Ok(())
}

fn repeated(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let at = subject.container()?;
    let added = subject.add(&at)?;
    let before = (&world::snapshot()?, &at.netns.snapshot()?);
    let again = subject.add(&at)?;
    keeps("chained.add-twice-keeps", subject, &at, before, &again, check)?;
    subject.end(&at, added.result()).map(drop)
}

/// After a call for another attachment all is there that was there before, and a mapped port still
/// leads to the container.
fn keeps(
    id: &str,
    subject: &Subject<'_>,
    at: &Attachment,
    (node, inside): (&Snapshot, &Snapshot),
    answer: &Answer,
    check: &mut Check,
) -> Result<()> {
    let mut gone = lost(node, &world::snapshot()?);
    gone.extend(lost(inside, &at.netns.snapshot()?));
    // The plugin changes the other interface.
    gone.retain(|line| !line.contains("eth1"));
    check.effect(id, answer, gone.is_empty(), || gone.join("; "));
    if subject.is(&["portmap"]) {
        for ip in NODE {
            let to = SocketAddr::new(ip, 8080);
            let peer = tcp(&world::outside(), to, &at.netns, 80, LIMIT)?;
            check.effect(id, answer, peer.is_some(), || format!("no connection to {to}"));
        }
    }
    Ok(())
}

/// ADD, DEL, and both again on the same interface; returns whether the first ADD succeeded. Objects
/// that the first calls create for all later calls are no leak: the caller compares the state from
/// then on.
fn again(subject: &Subject<'_>, check: &mut Check) -> Result<bool> {
    let at = subject.container()?;
    subject.run("ADD", &at, None)?;
    let first = check.succeeds("add.succeeds", subject.add(&at))?;
    if !first.succeeded() {
        return Ok(false);
    }
    check.succeeds("del.succeeds", subject.del(&at, first.json.as_ref()))?;
    let added = check.succeeds("chained.add-after-del", subject.add(&at))?;
    subject.end(&at, added.result().or(first.result()))?;
    Ok(true)
}

/// The result contains the result of the earlier plugins.
fn passed_on(added: &Answer, prev: &Value, result: &Value, check: &mut Check) {
    let keeps = |list: &str, key: &str| {
        let after: Vec<&Value> = results::list(result, list).map(|entry| &entry[key]).collect();
        results::list(prev, list).all(|entry| after.contains(&&entry[key]))
    };
    let detail = |list: &str| format!("prevResult has {list} {}", prev[list]);
    let is_kept = keeps("interfaces", "name");
    check.effect("chained.keeps-interfaces", added, is_kept, || detail("interfaces"));
    let (before, after) = (results::addresses(prev), results::addresses(result));
    let is_kept = before.iter().all(|ip| after.contains(ip));
    check
        .effect("chained.keeps-addresses", added, is_kept, || format!("prevResult has {before:?}"));
    check.effect("chained.keeps-routes", added, keeps("routes", "dst"), || detail("routes"));
}

/// Members of a result that a plugin passes on: assertion, list, member, the version since which
/// the member exists, and whether tuning may change it.
const MEMBERS: &[(&str, &str, &str, &str, bool)] = &[
    ("chained.keeps-sandbox", "interfaces", "sandbox", "0.3.0", false),
    ("chained.keeps-mac", "interfaces", "mac", "0.3.0", true),
    ("chained.keeps-mtu", "interfaces", "mtu", "1.1.0", true),
    ("chained.keeps-socket-path", "interfaces", "socketPath", "1.1.0", false),
    ("chained.keeps-pci-id", "interfaces", "pciID", "1.1.0", false),
    ("chained.keeps-gateway", "ips", "gateway", "0.3.0", false),
    ("chained.keeps-index", "ips", "interface", "0.3.0", false),
    ("chained.keeps-route-gw", "routes", "gw", "0.3.0", false),
    ("chained.keeps-route-mtu", "routes", "mtu", "1.1.0", false),
    ("chained.keeps-route-advmss", "routes", "advmss", "1.1.0", false),
    ("chained.keeps-route-priority", "routes", "priority", "1.1.0", false),
    ("chained.keeps-route-table", "routes", "table", "1.1.0", false),
    ("chained.keeps-route-scope", "routes", "scope", "1.1.0", false),
];

/// Members of `dns` that a plugin passes on: assertion and member.
const DNS: [(&str, &str); 4] = [
    ("chained.keeps-nameservers", "nameservers"),
    ("chained.keeps-domain", "domain"),
    ("chained.keeps-search", "search"),
    ("chained.keeps-options", "options"),
];

/// The result contains every member of a prevResult that has all of them.
fn handed_on(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    if !subject.since("0.3.0") {
        return Ok(());
    }
    let mut at = subject.container_of("sanity-6")?;
    let Some(prev) = &mut at.prev else { return Ok(()) };
    let is_newest = subject.since("1.1.0");
    enrich(prev, is_newest);
    let prev = prev.clone();
    let added = subject.add(&at)?;
    let Some(result) = added.result() else {
        check.of("chained.keeps-nameservers", &added, false);
        return Ok(());
    };
    let is_kept = |given: &Value, kept: &Value| given.is_null() || given == kept;
    for (id, list, key, since, tunable) in MEMBERS {
        if !subject.since(since) || (*tunable && subject.is(&["tuning"])) {
            continue;
        }
        let mut kept = results::list(result, list).map(|entry| &entry[*key]);
        let all = results::list(&prev, list)
            .all(|entry| kept.next().is_some_and(|kept| is_kept(&entry[*key], kept)));
        check.effect(id, &added, all, || format!("prevResult: {}", prev[*list]));
    }
    for (id, key) in DNS {
        let (given, kept) = (&prev["dns"][key], &result["dns"][key]);
        check.effect(id, &added, given == kept, || format!("{key} is {kept}, not {given}"));
    }
    subject.end(&at, Some(result)).map(drop)
}

/// Adds all members to a result that the version has.
fn enrich(result: &mut Value, is_newest: bool) {
    result["dns"] = json!({"nameservers": ["10.1.2.3"], "domain": "sanity.example",
        "search": ["one.example", "two.example"], "options": ["ndots:3"]});
    let mut route = json!({"dst": "10.202.0.0/16", "gw": "10.88.0.1"});
    if is_newest {
        merge(
            &mut route,
            json!({"mtu": 1400, "advmss": 1300, "priority": 77, "table": 202, "scope": 0}),
        );
        for interface in result["interfaces"].as_array_mut().into_iter().flatten() {
            merge(interface, json!({"socketPath": "/run/sanity.sock", "pciID": "0000:00:1f.6"}));
        }
    }
    if let Some(routes) = result["routes"].as_array_mut() {
        routes.push(route);
    } else {
        result["routes"] = json!([route]);
    }
}

/// Tests the effect that is the purpose of the plugin.
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
            for name in ["arp_filter", "log_martians"] {
                let path = format!("/proc/sys/net/ipv4/conf/eth0/{name}");
                let value = at.netns.run(|| Ok(fs::read_to_string(path)?))?;
                check.that("tuning.sysctl", value.trim() == "1", || {
                    format!("{name} is {}", value.trim())
                });
            }
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
        "route-override" => {
            let inside = at.netns.snapshot()?;
            let has_both =
                inside.has("\"10.203.7.0\"/24 via") && inside.has("\"fd97:203::\"/48 via");
            check.of("route-override.routes", added, has_both);
        }
        "egress" => destinations(at, check)?,
        "tc-redirect-tap" => machine(subject, at, added, result, check)?,
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

/// Packets pass between a tap device and the container's interface, and the result has the machine
/// behind the device, as firecracker-go-sdk reads it.
fn machine(
    subject: &Subject<'_>,
    at: &Attachment,
    added: &Answer,
    result: &Value,
    check: &mut Check,
) -> Result<()> {
    let tap = at.netns.run(observe::links)?.into_iter().find(|link| link.kind == "tun");
    check.of("tc-redirect-tap.device", added, tap.as_ref().is_some_and(|tap| tap.up));
    let Some(tap) = tap else { return Ok(()) };
    let both = at
        .netns
        .run(|| Ok(world::is_redirected(at.ifname)? && world::is_redirected(&tap.name)?))?;
    check.of("tc-redirect-tap.redirect", added, both);
    if subject.since("0.3.0") {
        let mac = at.netns.link(at.ifname)?.map(|link| link.mac).unwrap_or_default();
        let index = results::list(result, "interfaces").position(|one| one["sandbox"] == at.id);
        let machine = index.map(|index| &result["interfaces"][index]);
        let is_read = machine.is_some_and(|one| one["name"] == tap.name && one["mac"] == mac);
        check.of("tc-redirect-tap.machine", added, is_read);
        let own = results::list(result, "ips")
            .filter(|ip| ip["interface"].as_u64() == index.map(|index| index as u64));
        check.of("tc-redirect-tap.one-address", added, own.count() == 1);
    }
    Ok(())
}

/// The container reaches the allowed service of the other host, and no other service.
fn destinations(at: &Attachment, check: &mut Check) -> Result<()> {
    let (outside, ids) = (
        world::outside(),
        [["egress.allowed4", "egress.refused4"], ["egress.allowed6", "egress.refused6"]],
    );
    for (ip, [allowed, refused]) in OUTSIDE.into_iter().zip(ids) {
        let reaches =
            |port, limit| tcp(&at.netns, SocketAddr::new(ip, port), &outside, port, limit);
        let peer = reaches(443, LIMIT)?;
        check.that(allowed, peer.is_some(), || format!("no connection to port 443 of {ip}"));
        let peer = reaches(8443, MOMENT)?;
        check.that(refused, peer.is_none(), || format!("port 8443 of {ip} answers as well"));
    }
    Ok(())
}

/// The mapped ports of the node reach the container, and no others.
fn ports(at: &Attachment, check: &mut Check) -> Result<()> {
    let ids = [["portmap.tcp4", "portmap.udp4"], ["portmap.tcp6", "portmap.udp6"]];
    let outside = world::outside();
    for (ip, [over_tcp, over_udp]) in NODE.into_iter().zip(ids) {
        for (host, container) in [(8080, 80), (8083, 83)] {
            let to = SocketAddr::new(ip, host);
            let peer = tcp(&outside, to, &at.netns, container, LIMIT)?;
            check.that(over_tcp, peer.is_some(), || format!("no connection from outside to {to}"));
        }
        let to = SocketAddr::new(ip, 8081);
        let is_answered = udp(&outside, to, &at.netns, 81, LIMIT)?;
        check.that(over_udp, is_answered, || format!("no answer from {to}"));
        let to = SocketAddr::new(ip, 82);
        let peer = tcp(&outside, to, &at.netns, 80, MOMENT)?;
        check.that("portmap.only-mapped", peer.is_none(), || format!("{to} answers as well"));
    }
    Ok(())
}
