//! Tests of plugins that create an interface: the results are compared with the kernel, and DEL
//! must delete everything.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rtnetlink::LinkMessageBuilder;
use serde_json::{Value, json};

use super::{Answer, Attachment, Call, Check, Netns, Result, Subject, leftovers, lost, results};
use crate::observe::{self, Link, Snapshot};
use crate::traffic::{self, LIMIT};
use crate::world::{self, OUTSIDE};

pub fn run(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let at = subject.attachment("sanity-1", "one")?;
    // Objects that the first calls create for all later calls, such as chains, a bridge or a log,
    // are no leak.
    subject.call("ADD", &at, None).env("CNI_NETNS", "/run/netns/nowhere").run()?;
    let first = check.succeeds("add.succeeds", subject.add(&at))?;
    if !first.succeeded() {
        return Ok(());
    }
    let deleted = check.succeeds("del.succeeds", subject.del(&at, first.json.as_ref()))?;
    is_removed(&at, &deleted, check)?;
    attach(subject, &at, &world::snapshot()?, check)?;
    // Each group starts from the current state: a leak is reported once.
    existing_interface(subject, &at, check)?;
    repeated(subject, &at, check)?;
    several(subject, &at, check)?;
    without_namespace(subject, &world::snapshot()?, check)?;
    failures(subject, &at, &world::snapshot()?, check)?;
    missing_interface(subject, &at, check)
}

/// ADD, CHECK, DEL of one container.
fn attach(
    subject: &Subject<'_>,
    at: &Attachment,
    before: &Snapshot,
    check: &mut Check,
) -> Result<()> {
    let empty = at.netns.snapshot()?;
    let added = check.succeeds("add.again-after-del", subject.add(at))?;
    results::look(subject, at, &added, check);
    let Some(result) = added.result() else { return Ok(()) };
    kernel(subject, at, &added, result, check)?;
    traffic(subject, at, result, check)?;
    let (has_check, is_lo) = (subject.since("0.4.0"), at.ifname == "lo");
    if has_check {
        let checked = subject.run("CHECK", at, Some(result));
        check.succeeds_silently(["check.succeeds", "check.silent"], checked)?;
        check.fails("check.no-prev-result", subject.run("CHECK", at, None))?;
        later_plugin(subject, at, result, check)?;
    }
    let deleted = subject.del(at, Some(result));
    let deleted = check.succeeds_silently(["del.succeeds", "del.silent"], deleted)?;
    is_removed(at, &deleted, check)?;
    check.none("del.leaves-nothing", &leftovers(before)?);
    let left = if is_lo { Vec::new() } else { at.netns.snapshot()?.without(&empty) };
    check.none("del.leaves-nothing-inside", &left);
    check.succeeds("del.twice", subject.del(at, Some(result)))?;
    check.succeeds("del.no-prev-result", subject.del(at, None))?;
    let never = Attachment { id: "sanity-never", ..at.clone() };
    check.succeeds("del.never-added", subject.del(&never, None))?;
    if has_check {
        let checked = subject.run("CHECK", at, Some(result))?;
        check.of("check.after-del", &checked, checked.failed() || is_lo);
    }
    Ok(())
}

/// The interface does not exist after DEL; lo cannot be deleted.
fn is_removed(at: &Attachment, deleted: &Answer, check: &mut Check) -> Result<()> {
    let is_gone = at.ifname == "lo" || at.netns.link(at.ifname)?.is_none();
    check.effect("del.removes-interface", deleted, is_gone, || {
        format!("{} is still in the container", at.ifname)
    });
    Ok(())
}

/// A later plugin of the list deleted the default routes and added another one, and its result says
/// so.
fn later_plugin(
    subject: &Subject<'_>,
    at: &Attachment,
    result: &Value,
    check: &mut Check,
) -> Result<()> {
    if !subject.is(&["bridge", "ptp"]) {
        return Ok(());
    }
    let mut last = result.clone();
    let gateways = results::gateways(result);
    let Some(IpAddr::V4(gateway)) = gateways.iter().find(|ip| ip.is_ipv4()) else { return Ok(()) };
    last["routes"] = json!([{"dst": "10.201.0.0/16", "gw": gateway}]);
    at.netns.run(|| {
        world::delete_routes(0)?;
        world::add_route([10, 201, 0, 0].into(), 16, *gateway)
    })?;
    check.succeeds("check.later-plugin", subject.run("CHECK", at, Some(&last))).map(drop)
}

/// The kernel's state equals the result.
fn kernel(
    subject: &Subject<'_>,
    at: &Attachment,
    added: &Answer,
    result: &Value,
    check: &mut Check,
) -> Result<()> {
    let links = at.netns.run(observe::links)?;
    let link = links.iter().find(|link| link.name == at.ifname);
    check.effect("kernel.interface", added, link.is_some(), || {
        format!("{} is not in the container", at.ifname)
    });
    let Some(link) = link else { return Ok(()) };
    check.effect("kernel.up", added, link.up, || format!("{} is down", at.ifname));
    let others = links.iter().map(|link| link.name.clone());
    // The links of a bond keep their names.
    let is_known =
        |name: &str| name == "lo" || name == at.ifname || subject.devices().contains(&name);
    let others: Vec<String> = others.filter(|name| !is_known(name)).collect();
    check.none("kernel.no-other-interface", &others);
    let named = results::addresses(result);
    if subject.kind.has_ipam {
        check.effect("result.has-addresses", added, named.len() == 2, || {
            format!("{} addresses, not one of each family", named.len())
        });
    }
    kernel_addresses(at, link, &named, check)?;
    if !subject.since("0.3.0") {
        return Ok(());
    }
    let interfaces: Vec<&Value> = results::list(result, "interfaces").collect();
    let sandbox = at.netns.path();
    let is_own = |one: &&&Value| one["name"] == at.ifname && one["sandbox"] != "";
    let own = interfaces.iter().find(is_own);
    check.effect("result.names-interface", added, own.is_some(), || {
        format!("{} is not in interfaces", at.ifname)
    });
    if let Some(own) = own {
        let mac = own["mac"].as_str().unwrap_or_default().to_lowercase();
        check.that("kernel.mac", mac.is_empty() || mac == link.mac, || {
            format!("{} in the kernel, {mac} in the result", link.mac)
        });
        let mtu = own["mtu"].as_u64();
        check.that("kernel.mtu", mtu.is_none_or(|mtu| mtu == u64::from(link.mtu)), || {
            format!("{} in the kernel", link.mtu)
        });
    }
    for interface in &interfaces {
        if interface["sandbox"].as_str().unwrap_or_default().is_empty() {
            let name = interface["name"].as_str().unwrap_or_default();
            check.that("kernel.host-interface", world::index(name).is_ok(), || {
                format!("{name} is not on the node")
            });
        }
    }
    for address in results::list(result, "ips") {
        let index = address["interface"].as_u64().and_then(|index| usize::try_from(index).ok());
        let interface = index.and_then(|index| interfaces.get(index));
        let is_inside = interface.is_none_or(|interface| interface["sandbox"] == sandbox);
        check.of("result.ip.in-sandbox", added, is_inside);
    }
    kernel_routes(at, result, check)
}

/// The interface has the addresses of the result, and no others but loopback and link-local ones.
fn kernel_addresses(
    at: &Attachment,
    link: &Link,
    named: &[(IpAddr, u8)],
    check: &mut Check,
) -> Result<()> {
    let mut addresses = at.netns.run(observe::addresses)?;
    addresses.retain(|address| address.index == link.index);
    for (ip, prefix) in named {
        let is_there = addresses.iter().any(|a| (a.ip, a.prefix) == (*ip, *prefix));
        check.that("kernel.address", is_there, || format!("{ip}/{prefix} is not on {}", at.ifname));
    }
    for address in addresses {
        let is_own = match address.ip {
            IpAddr::V4(ip) => ip.is_loopback(),
            IpAddr::V6(ip) => ip.is_loopback() || ip.is_unicast_link_local(),
        };
        let is_named = named.iter().any(|(ip, _)| *ip == address.ip);
        check.that("result.names-addresses", is_own || is_named, || {
            format!("{} is not in the result", address.ip)
        });
    }
    Ok(())
}

/// The container has the routes of the result.
fn kernel_routes(at: &Attachment, result: &Value, check: &mut Check) -> Result<()> {
    let routes = at.netns.run(observe::routes)?;
    for route in results::list(result, "routes") {
        let Some((dst, prefix)) = results::prefix(&route["dst"]) else { continue };
        let gateway = results::ip(&route["gw"]);
        let is_there = routes.iter().any(|known| {
            known.leads_to(dst, prefix) && (gateway.is_none() || known.gateway == gateway)
        });
        check.that("kernel.route", is_there, || format!("no route {route}"));
    }
    Ok(())
}

/// Checks that an address answers.
fn pings(check: &mut Check, id: &str, from: &Netns, to: IpAddr, suffix: &str) -> Result<()> {
    check.that(id, traffic::pings(from, to, LIMIT)?, || format!("no answer from {to}{suffix}"));
    Ok(())
}

/// One of two ids, by the family of the address.
fn by_family(ip: IpAddr, [v4, v6]: [&str; 2]) -> &str {
    if ip.is_ipv4() { v4 } else { v6 }
}

fn traffic(
    subject: &Subject<'_>,
    at: &Attachment,
    result: &Value,
    check: &mut Check,
) -> Result<()> {
    let from = &at.netns;
    if subject.is(&["bridge", "ptp"]) {
        for gateway in results::gateways(result) {
            let id = by_family(gateway, ["traffic.gateway4", "traffic.gateway6"]);
            pings(check, id, from, gateway, "")?;
        }
        for ip in OUTSIDE {
            let id = by_family(ip, ["traffic.masquerade4", "traffic.masquerade6"]);
            pings(check, id, from, ip, ", which has no route back")?;
        }
        for (ip, _) in results::addresses(result) {
            let id = by_family(ip, ["traffic.from-node4", "traffic.from-node6"]);
            pings(check, id, &world::node(), ip, "")?;
        }
    }
    if subject.is(&["macvlan", "ipvlan"]) {
        for ip in OUTSIDE {
            let id = by_family(ip, ["traffic.uplink4", "traffic.uplink6"]);
            pings(check, id, from, ip, " on the uplink")?;
        }
    }
    if subject.is(&["loopback"]) {
        for ip in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
            let id = by_family(ip, ["traffic.loopback4", "traffic.loopback6"]);
            pings(check, id, from, ip, "")?;
        }
    }
    Ok(())
}

/// The interface exists already.
fn existing_interface(subject: &Subject<'_>, at: &Attachment, check: &mut Check) -> Result<()> {
    if subject.is(&["loopback"]) {
        return Ok(());
    }
    let first = subject.add(at)?;
    let (inside, outside) = (at.netns.snapshot()?, world::snapshot()?);
    let other = Attachment { id: "sanity-2", ..at.clone() };
    let second = check.fails("add.interface-exists", subject.add(&other))?;
    let changed = inside.without(&at.netns.snapshot()?);
    check.of("add.interface-exists-keeps", &second, changed.is_empty());
    if subject.devices().is_empty() {
        // The DEL that follows each ADD. It has no namespace: the interface there belongs to
        // another container.
        subject.call("DEL", &other, None).env("CNI_NETNS", "").run()?;
        check.none("add.failure-leaves-nothing", &leftovers(&outside)?);
    } else {
        // DEL returns the first devices under these names.
        subject.devices().iter().for_each(|name| drop(world::delete(name)));
    }
    subject.del(at, first.json.as_ref()).map(drop)
}

/// ADD is repeated without a DEL.
fn repeated(subject: &Subject<'_>, at: &Attachment, check: &mut Check) -> Result<()> {
    if subject.is(&["loopback"]) {
        return Ok(());
    }
    let first = subject.add(at)?;
    let (inside, node) = (at.netns.snapshot()?, world::snapshot()?);
    let again = check.fails("add.twice", subject.add(at))?;
    // Devices that are there for the second ADD have the names of those that DEL returns.
    subject.devices().iter().for_each(|name| drop(world::delete(name)));
    let mut gone = lost(&inside, &at.netns.snapshot()?);
    gone.extend(lost(&node, &world::snapshot()?));
    check.effect("add.twice-keeps", &again, gone.is_empty(), || gone.join("; "));
    subject.del(at, first.json.as_ref()).map(drop)
}

/// Several interfaces of one container, and several containers.
fn several(subject: &Subject<'_>, at: &Attachment, check: &mut Check) -> Result<()> {
    if subject.is(&["loopback", "host-device", "bond", "vlan"]) {
        return Ok(());
    }
    let eth1 = Attachment { ifname: "eth1", ..at.clone() };
    let mut conf = subject.conf.clone();
    // Two default routes in one container are not tested here.
    conf["ipam"]["routes"] = json!([]);
    // The gateway of a point-to-point link has a host route, which must differ.
    if subject.is(&["ptp"]) && conf["ipam"]["type"] == "host-local" {
        conf["name"] = json!("sanity-more");
        conf["ipam"]["ranges"] = json!([[{"subnet": "10.87.0.0/16"}], [{"subnet": "fd87::/64"}]]);
    }
    let more = Subject { conf, ..*subject };
    // Objects that the first ADD of a network creates for all later calls are no leak.
    let added = more.add(&eth1)?;
    more.del(&eth1, added.json.as_ref())?;
    let before = world::snapshot()?;
    let first = subject.add(at)?;
    let Some(result) = first.result() else { return Ok(()) };
    let (alone, node) = (at.netns.snapshot()?, world::snapshot()?);
    check.succeeds("del.other-interface", more.del(&eth1, None))?;
    check.none("del.other-interface-keeps-first", &alone.without(&at.netns.snapshot()?));
    let second = check.succeeds("add.second-interface", more.add(&eth1))?;
    if let Some(other) = second.result() {
        check.of("add.second-interface-address", &second, !share_address(result, other));
        let deleted = check.succeeds("del.second-interface", more.del(&eth1, Some(other)))?;
        if deleted.failed() {
            // Runtimes repeat DEL.
            more.del(&eth1, Some(other))?;
        }
        check.none("del.second-interface-leaves-nothing", &leftovers(&node)?);
        check.none("del.second-interface-keeps-first", &alone.without(&at.netns.snapshot()?));
    }
    second_container(subject, at, result, &alone, check)?;
    subject.del(at, Some(result))?;
    check.none("del.several-leave-nothing", &leftovers(&before)?);
    similar(subject, check)
}

/// Two containers; the id of one begins with the id of the other.
fn similar(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let [short, long] = [subject.attachment("c1", "c1")?, subject.attachment("c10", "c10")?];
    let kept = subject.add(&long)?;
    let (node, inside) = (world::snapshot()?, long.netns.snapshot()?);
    let added = subject.add(&short)?;
    subject.del(&short, added.json.as_ref())?;
    let mut lost = node.without(&world::snapshot()?);
    lost.extend(inside.without(&long.netns.snapshot()?));
    check.none("del.keeps-similar", &lost);
    subject.del(&long, kept.json.as_ref()).map(drop)
}

/// Another container beside the container of `result`, whose namespace is in the state `alone`.
fn second_container(
    subject: &Subject<'_>,
    at: &Attachment,
    result: &Value,
    alone: &Snapshot,
    check: &mut Check,
) -> Result<()> {
    let neighbour = subject.attachment("sanity-3", "two")?;
    let added = check.succeeds("add.second-container", subject.add(&neighbour))?;
    let Some(other) = added.result() else { return Ok(()) };
    check.of("add.second-container-address", &added, !share_address(result, other));
    if subject.is(&["bridge", "macvlan"]) {
        for (ip, _) in results::addresses(other) {
            let id = by_family(ip, ["traffic.containers4", "traffic.containers6"]);
            pings(check, id, &at.netns, ip, "")?;
        }
    }
    check.succeeds("del.second-container", subject.del(&neighbour, Some(other)))?;
    check.none("del.second-container-keeps-first", &alone.without(&at.netns.snapshot()?));
    if subject.is(&["bridge", "ptp"])
        && let Some(gateway) = results::gateways(result).first()
    {
        pings(check, "traffic.after-neighbours-del", &at.netns, *gateway, "")?;
    }
    Ok(())
}

fn share_address(one: &Value, other: &Value) -> bool {
    let own = results::addresses(one);
    results::addresses(other).iter().any(|ip| own.contains(ip))
}

/// DEL for containers whose namespace is unknown or deleted.
fn without_namespace(subject: &Subject<'_>, before: &Snapshot, check: &mut Check) -> Result<()> {
    let at = subject.attachment("sanity-4", "three")?;
    let added = subject.add(&at)?;
    let result = subject.prev(added.json.as_ref());
    let call = subject.call("DEL", &at, result).env("CNI_NETNS", "");
    check.succeeds("del.no-netns", call.run())?;
    let mut leases = leftovers(before)?;
    leases.retain(|line| line.starts_with("file /var/lib/cni"));
    check.that("del.no-netns-releases", leases.is_empty(), || format!("{leases:?}"));
    subject.del(&at, result)?;
    let added = subject.add(&at)?;
    at.netns.remove()?;
    check.succeeds("del.netns-gone", subject.del(&at, added.json.as_ref()))?;
    check.succeeds("del.netns-gone-twice", subject.del(&at, added.json.as_ref()))?;
    if subject.devices().is_empty() {
        check.none("del.netns-gone-leaves-nothing", &leftovers(before)?);
    }
    Ok(())
}

/// An ADD that fails leaves nothing.
fn failures(
    subject: &Subject<'_>,
    at: &Attachment,
    before: &Snapshot,
    check: &mut Check,
) -> Result<()> {
    subject.prepare()?;
    let failed = subject.call("ADD", at, None).env("CNI_NETNS", "/run/netns/nowhere").run()?;
    check.of("add.netns-missing", &failed, failed.failed() || at.ifname == "lo");
    if !subject.devices().is_empty() {
        return Ok(());
    }
    subject.call("DEL", at, None).env("CNI_NETNS", "/run/netns/nowhere").run()?;
    check.none("add.netns-missing-leaves-nothing", &leftovers(before)?);
    if !subject.kind.has_ipam {
        return Ok(());
    }
    let missing = subject.with(json!({"ipam": {"type": "no-such-ipam"}}));
    check.fails("add.ipam-missing", missing.run("ADD", at, None))?;
    subject.del(at, None)?;
    check.none("add.ipam-missing-leaves-nothing", &leftovers(before)?);
    if subject.conf["ipam"]["type"] != "host-local" {
        return Ok(());
    }
    let one =
        json!([[{"subnet": "10.77.0.0/24", "rangeStart": "10.77.0.9", "rangeEnd": "10.77.0.9"}]]);
    let small = subject.with(
        json!({"ipam": {"type": "host-local", "dataDir": "/var/lib/cni/small", "ranges": one}}),
    );
    // Another container holds the only address.
    let conf = json!({"cniVersion": subject.version, "name": "sanity", "type": "host-local",
        "ipam": small.conf["ipam"]});
    Call::new(&subject.directory.join("host-local"), "ADD", &conf)
        .env("CNI_CONTAINERID", "somebody")
        .env("CNI_NETNS", &at.netns.path())
        .env("CNI_IFNAME", "eth0")
        .run()?;
    let now = world::snapshot()?;
    check.fails("add.ipam-full", small.run("ADD", at, None))?;
    check.succeeds("del.after-failed-add", small.del(at, None))?;
    check.none("add.ipam-full-leaves-nothing", &leftovers(&now)?);
    Ok(())
}

/// CHECK detects a missing interface, and DEL succeeds nevertheless.
fn missing_interface(subject: &Subject<'_>, at: &Attachment, check: &mut Check) -> Result<()> {
    let added = subject.add(at)?;
    let Some(result) = added.result() else { return Ok(()) };
    at.netns.run(|| match at.ifname {
        "lo" => world::set_link("lo", LinkMessageBuilder::down),
        ifname => world::delete(ifname),
    })?;
    if subject.since("0.4.0") {
        check.fails("check.interface-gone", subject.run("CHECK", at, Some(result)))?;
    }
    let deleted = subject.del(at, Some(result))?;
    // A deleted device cannot be returned.
    let is_good = deleted.succeeded() || subject.is(&["host-device"]);
    check.of("del.interface-gone", &deleted, is_good);
    Ok(())
}
