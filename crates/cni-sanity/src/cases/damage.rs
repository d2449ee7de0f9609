//! Damage that CHECK must detect, and objects of others that DEL must keep whatever its input.

use std::fs;
use std::net::SocketAddr;

use rtnetlink::LinkMessageBuilder;
use rtnetlink::packet_route::AddressFamily;
use serde_json::{Value, json};

use super::{Attachment, Check, Netns, Result, Subject, leftovers, results};
use crate::traffic::{LIMIT, pings, tcp};
use crate::world::{self, NODE, OUTSIDE, UPLINK};

/// The types that create an interface.
const INTERFACES: &[&str] =
    &["bridge", "ptp", "macvlan", "ipvlan", "vlan", "host-device", "bond", "dummy", "tap"];

/// A host device that is deleted cannot be returned.
const VIRTUAL: &[&str] = &["bridge", "ptp", "macvlan", "ipvlan", "vlan", "bond", "dummy", "tap"];

/// Ids of containers, one for each damage of a type.
const IDS: [&str; 10] = [
    "damaged-a",
    "damaged-b",
    "damaged-c",
    "damaged-d",
    "damaged-e",
    "damaged-f",
    "damaged-g",
    "damaged-h",
    "damaged-i",
    "damaged-j",
];

/// Damages an object of an attachment, given its container and its result.
type Damage = fn(&Netns, &Value) -> Result<()>;

/// Assertions about CHECK, the types that they apply to, and the damage.
const DAMAGES: &[(&str, &[&str], Damage)] = &[
    ("damage.address-gone", INTERFACES, |at, _| {
        at.run(|| world::delete_addresses("eth0", AddressFamily::Inet))
    }),
    ("damage.address-gone", INTERFACES, |at, _| {
        at.run(|| world::delete_addresses("eth0", AddressFamily::Inet6))
    }),
    ("damage.route-gone", &["bridge", "ptp"], |at, _| at.run(|| world::delete_routes(0))),
    ("damage.route-gone", INTERFACES, |at, _| at.run(|| world::delete_routes(20))),
    ("damage.route-gone", INTERFACES, |at, _| at.run(|| world::delete_routes(40))),
    ("damage.other-kind", VIRTUAL, |at, _| {
        at.run(|| world::delete("eth0").and_then(|()| world::make_pair("eth0", "eth9")))
    }),
    ("damage.bridge-gone", &["bridge"], |_, _| world::delete("sanity0")),
    ("damage.port-gone", &["bridge"], |_, result| world::release_port(&host_end(result)?)),
    ("damage.host-end-down", &["bridge", "ptp"], |_, result| {
        world::set_link(&host_end(result)?, LinkMessageBuilder::down)
    }),
    ("damage.tuning.sysctl", &["tuning"], |at, _| {
        at.run(|| Ok(fs::write("/proc/sys/net/ipv4/conf/eth0/arp_filter", "0")?))
    }),
    ("damage.tuning.sysctl", &["tuning"], |at, _| {
        at.run(|| Ok(fs::write("/proc/sys/net/ipv4/conf/eth0/log_martians", "0")?))
    }),
    ("damage.tuning.mtu", &["tuning"], |at, _| {
        at.run(|| world::set_link("eth0", |link| link.mtu(1290)))
    }),
    ("damage.bandwidth.qdisc", &["bandwidth"], |_, _| world::delete_qdiscs("tbf")),
    ("damage.sbr.rule", &["sbr"], |at, _| at.run(world::delete_source_rules)),
    ("damage.route-override.gone", &["route-override"], |at, _| {
        at.run(|| world::delete_routes(24))
    }),
    ("damage.route-override.gone", &["route-override"], |at, _| {
        at.run(|| world::delete_routes(48))
    }),
    ("damage.tc-redirect-tap.device", &["tc-redirect-tap"], |at, _| {
        at.run(|| world::delete("tap0"))
    }),
    ("damage.tc-redirect-tap.redirect", &["tc-redirect-tap"], |at, _| {
        at.run(|| world::delete_qdiscs("ingress"))
    }),
    ("damage.egress.filter", &["egress"], |_, result| {
        world::delete_qdisc(&host_end(result)?, "ingress")
    }),
    ("damage.egress.flushed", &["egress"], |_, _| world::flush_rules()),
    ("damage.vrf.gone", &["vrf"], |at, _| at.run(|| world::delete("blue"))),
    ("damage.portmap.flushed", &["portmap"], |_, _| world::flush_rules()),
    ("damage.firewall.flushed", &["firewall"], |_, _| world::flush_rules()),
];

pub fn run(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    if subject.since("0.4.0") {
        damages(subject, check)?;
        if subject.is(INTERFACES) {
            forged_check(subject, check)?;
        }
        if subject.is(&["portmap", "firewall"]) {
            not_made(subject, check)?;
        }
    }
    if subject.is(INTERFACES) {
        forged_del(subject, check)?;
    }
    if subject.is(&["bridge", "ptp", "portmap", "firewall", "egress"]) {
        flushed(subject, check)?;
    }
    Ok(())
}

/// Each damage has a container of its own: leftovers of one damage must not cause the failure of
/// another.
fn damages(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    // Objects that the first calls create for all later calls, such as a log of failures, are no
    // leak.
    if let Some((at, result)) = add(subject)? {
        subject.run("CHECK", &at, Some(&json!({"cniVersion": "9.9.9", "ips": 7})))?;
        subject.end(&at, Some(&result))?;
    }
    let common = ["damage.del", "damage.leaves-nothing"];
    let asks = |id| subject.asks(id) || common.iter().any(|id| subject.asks(id));
    for ((id, _, damage), container) in
        DAMAGES.iter().filter(|(id, kinds, _)| subject.is(kinds) && asks(id)).zip(IDS)
    {
        let before = world::snapshot()?;
        let at = subject.container_of(container)?;
        let Some(result) = subject.add(&at)?.result().cloned() else { continue };
        damage(&at.netns, &result).map_err(|error| format!("{id}: {error}"))?;
        check.fails(id, subject.run("CHECK", &at, Some(&result)))?;
        check.succeeds("damage.del", subject.end(&at, Some(&result)))?;
        let mut left = leftovers(&before)?;
        // All containers share the bridge and the device of the node.
        left.retain(|line| !["sanity0", "spare"].iter().any(|shared| line.contains(shared)));
        check.that("damage.leaves-nothing", left.is_empty(), || {
            format!("{id}: {}", left.join("; "))
        });
    }
    Ok(())
}

/// The host's end of the container's interface.
fn host_end(result: &Value) -> Result<String> {
    let mut hosts = results::list(result, "interfaces")
        .filter(|one| one["sandbox"].as_str().unwrap_or_default().is_empty())
        .filter_map(|one| one["name"].as_str())
        .filter(|name| *name != "sanity0");
    Ok(hosts.next().ok_or("the result has no end of the host")?.to_owned())
}

/// A new container with the result of its ADD; `None` if ADD failed.
fn add(subject: &Subject<'_>) -> Result<Option<(Attachment, Value)>> {
    let at = subject.container()?;
    let added = subject.add(&at)?;
    Ok(added.result().cloned().map(|result| (at, result)))
}

/// CHECK with a prevResult of which one entry never existed.
fn forged_check(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let Some((at, result)) = add(subject)? else { return Ok(()) };
    let mut forged = Vec::new();
    for (number, interface) in results::list(&result, "interfaces").enumerate() {
        let name = if interface["name"] == at.ifname {
            "damage.interface-other"
        } else {
            "damage.host-interface-other"
        };
        forged.push((name, format!("/interfaces/{number}/name"), "nowhere0"));
        if interface["mac"].as_str().is_some_and(|mac| !mac.is_empty()) {
            let mac = format!("/interfaces/{number}/mac");
            forged.push(("damage.mac-other", mac, "02:00:5e:00:53:99"));
        }
    }
    for (list, key, id, others) in [
        ("ips", "address", "damage.address-other", ["10.200.0.9/16", "fd20::9/64"]),
        ("routes", "dst", "damage.route-other", ["10.201.0.0/16", "fd21::/48"]),
    ] {
        for (number, entry) in results::list(&result, list).enumerate() {
            let is_v6 = entry[key].as_str().is_some_and(|text| text.contains(':'));
            forged.push((id, format!("/{list}/{number}/{key}"), others[usize::from(is_v6)]));
        }
    }
    for (id, path, value) in forged {
        let mut other = result.clone();
        if let Some(entry) = other.pointer_mut(&path) {
            *entry = json!(value);
        }
        let checked = subject.run("CHECK", &at, Some(&other))?;
        check.effect(id, &checked, checked.failed(), || format!("{path} is not {value}"));
    }
    check.succeeds("damage.none", subject.run("CHECK", &at, Some(&result)))?;
    subject.end(&at, Some(&result)).map(drop)
}

/// CHECK of a chained plugin, with one entry more than ADD had.
fn not_made(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let Some((at, result)) = add(subject)? else { return Ok(()) };
    let (mut conf, mut prev) = (subject.conf.clone(), result.clone());
    let (id, list, entry) = if subject.is(&["portmap"]) {
        (
            "damage.portmap.other-port",
            &mut conf["runtimeConfig"]["portMappings"],
            json!({"hostPort": 8084, "containerPort": 84, "protocol": "tcp"}),
        )
    } else {
        let mut ip = prev["ips"][0].clone();
        ip["address"] = json!("10.88.200.9/16");
        ("damage.firewall.other-address", &mut prev["ips"], ip)
    };
    if let Some(list) = list.as_array_mut() {
        list.push(entry);
    }
    check.fails(id, Subject { conf, ..*subject }.run("CHECK", &at, Some(&prev)))?;
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
    check.effect("damage.forged-interface", &deleted, world::index(UPLINK).is_ok(), || {
        format!("{UPLINK} is gone")
    });
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
        "egress" => {
            let to = SocketAddr::new(OUTSIDE[0], 443);
            tcp(&next.netns, to, &world::outside(), 443, LIMIT)?.is_some()
        }
        _ => results::addresses(result).len() == 2,
    };
    check.of("damage.flushed.traffic", &added, works);
    let now = world::snapshot()?;
    subject.end(&next, Some(result))?;
    check.none("damage.flushed.leaves-nothing", &leftovers(&now)?);
    Ok(())
}
