//! A plugin that makes an interface: what its results say against what the kernel has, and what is left after DEL.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::protocol::fails_well;
use super::{Attachment, Subject, results};
use crate::call::Answer;
use crate::check::Check;
use crate::observe::{Link, Snapshot};
use crate::traffic::pings;
use crate::world::{self, Netns, OUTSIDE, Result};

/// How long the kernel may take to remove what went with a namespace.
const PATIENCE: Duration = Duration::from_secs(3);

pub fn run(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let case = Case { subject };
    let at = case.attachment("sanity-1", "one")?;
    // What the first calls make for all, such as chains, a bridge or a log of failures, is no leak.
    subject.call("ADD", &at, None).env("CNI_NETNS", "/run/netns/nowhere").run()?;
    let first = case.add(&at)?;
    check.of("add.succeeds", &first, first.succeeded());
    if !first.succeeded() {
        return Ok(());
    }
    case.del(&at, first.json.as_ref())?;
    let before = world::snapshot()?;
    case.attach(&at, &before, check)?;
    // Each group starts from what is there: a leak is told once.
    case.names_that_are_taken(&at, check)?;
    case.several(&at, check)?;
    case.without_namespace(&world::snapshot()?, check)?;
    case.failures(&at, &world::snapshot()?, check)?;
    case.damage(&at, check)
}

/// The calls of a plugin that makes an interface.
pub struct Case<'a> {
    pub subject: &'a Subject<'a>,
}

impl Case<'_> {
    fn is(&self, kinds: &[&str]) -> bool {
        kinds.contains(&self.subject.kind.name)
    }

    /// The name that the interface has to have.
    pub fn ifname(&self) -> &'static str {
        if self.is(&["loopback"]) { "lo" } else { "eth0" }
    }

    fn attachment(&self, id: &'static str, netns: &str) -> Result<Attachment> {
        Ok(Attachment { id, netns: Netns::new(netns)?, ifname: self.ifname() })
    }

    /// host-device takes a device that is there.
    pub fn prepare(&self) -> Result<()> {
        if !self.is(&["host-device"]) || world::index("spare0").is_ok() {
            return Ok(());
        }
        // The other ends of those that are in containers have names as well.
        let names = (1..).map(|number| format!("spare{number}"));
        let mut free = names.filter(|name| world::index(name).is_err());
        free.next().map_or(Ok(()), |name| world::make_pair("spare0", &name))
    }

    /// ADD.
    pub fn add(&self, at: &Attachment) -> Result<Answer> {
        self.prepare()?;
        self.subject.run("ADD", at, None)
    }

    /// DEL, with the result of ADD where the version sends it.
    pub fn del(&self, at: &Attachment, result: Option<&Value>) -> Result<Answer> {
        self.subject.run("DEL", at, self.subject.prev(result))
    }

    /// ADD, CHECK, DEL of one container.
    fn attach(&self, at: &Attachment, before: &Snapshot, check: &mut Check) -> Result<()> {
        let empty = at.netns.snapshot()?;
        let added = self.add(at)?;
        check.of("add.again-after-del", &added, added.succeeded());
        results::look(self.subject, at, &added, check);
        let Some(result) = added.json.as_ref().filter(|_| added.succeeded()) else { return Ok(()) };
        self.kernel(at, &added, result, check)?;
        self.traffic(at, result, check)?;
        if self.subject.since("0.4.0") {
            let good = self.subject.run("CHECK", at, Some(result))?;
            check.of("check.succeeds", &good, good.succeeded());
            check.of("check.silent", &good, good.stdout.is_empty());
            let bare = self.subject.run("CHECK", at, None)?;
            check.of("check.no-prev-result", &bare, fails_well(&bare));
        }
        let deleted = self.del(at, Some(result))?;
        check.of("del.succeeds", &deleted, deleted.succeeded());
        check.of("del.silent", &deleted, deleted.stdout.is_empty());
        let links = at.netns.links()?;
        let is_there = links.iter().any(|link| link.name == at.ifname && link.name != "lo");
        check.of("del.removes-interface", &deleted, !is_there);
        check.none("del.leaves-nothing", &leftovers(before)?);
        let inside = at.netns.snapshot()?;
        if at.ifname == "lo" {
            check.that("del.leaves-nothing-inside", true, String::new);
        } else {
            check.none("del.leaves-nothing-inside", &inside.without(&empty));
        }
        let again = self.del(at, Some(result))?;
        check.of("del.twice", &again, again.succeeded());
        let third = self.subject.run("DEL", at, None)?;
        check.of("del.no-prev-result", &third, third.succeeded());
        let never = Attachment { id: "sanity-never", ..at.clone() };
        let never = self.subject.run("DEL", &never, None)?;
        check.of("del.never-added", &never, never.succeeded());
        if self.subject.since("0.4.0") {
            let gone = self.subject.run("CHECK", at, Some(result))?;
            check.of("check.after-del", &gone, fails_well(&gone) || at.ifname == "lo");
        }
        Ok(())
    }

    fn kernel(
        &self,
        at: &Attachment,
        added: &Answer,
        result: &Value,
        check: &mut Check,
    ) -> Result<()> {
        let links = at.netns.links()?;
        let link = links.iter().find(|link| link.name == at.ifname);
        check.of("kernel.interface", added, link.is_some());
        let Some(link) = link else { return Ok(()) };
        check.of("kernel.up", added, link.up);
        let others = links.iter().filter(|other| other.name != "lo" && other.name != at.ifname);
        let others: Vec<&str> = others.map(|other| other.name.as_str()).collect();
        check.none("kernel.no-other-interface", &others);
        let named = results::addresses(result);
        if self.subject.kind.has_ipam {
            check.of("result.has-addresses", added, named.len() == 2);
        }
        kernel_addresses(at, link, &named, check)?;
        if !self.subject.since("0.3.0") {
            return Ok(());
        }
        let interfaces = result["interfaces"].as_array().cloned().unwrap_or_default();
        let own = interfaces.iter().find(|interface| interface["sandbox"] == at.netns.path());
        check.of("result.names-interface", added, own.is_some_and(|own| own["name"] == at.ifname));
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
            let name = interface["name"].as_str().unwrap_or_default();
            if interface["sandbox"].as_str().unwrap_or_default().is_empty() {
                check.that("kernel.host-interface", world::index(name).is_ok(), || {
                    format!("{name} is not on the node")
                });
            }
        }
        for address in results::list(result, "ips") {
            let index = address["interface"].as_u64().and_then(|index| usize::try_from(index).ok());
            let of = index.and_then(|index| interfaces.get(index));
            let is_inside = of.is_none_or(|of| of["sandbox"] == at.netns.path());
            check.of("result.ip.in-sandbox", added, is_inside);
        }
        kernel_routes(at, result, check)
    }

    fn traffic(&self, at: &Attachment, result: &Value, check: &mut Check) -> Result<()> {
        let from = Some(&at.netns);
        if self.is(&["bridge", "ptp"]) {
            for gateway in results::gateways(result) {
                let id = if gateway.is_ipv4() { "traffic.gateway4" } else { "traffic.gateway6" };
                check.that(id, pings(from, gateway)?, || format!("no answer from {gateway}"));
            }
            for (ip, id) in OUTSIDE.into_iter().zip(["traffic.masquerade4", "traffic.masquerade6"])
            {
                check.that(id, pings(from, ip)?, || {
                    format!("no answer from {ip}, which has no route back")
                });
            }
            for (ip, _) in results::addresses(result) {
                let id = if ip.is_ipv4() { "traffic.from-node4" } else { "traffic.from-node6" };
                check.that(id, pings(None, ip)?, || format!("no answer from {ip}"));
            }
        }
        if self.is(&["macvlan", "ipvlan"]) {
            for (ip, id) in OUTSIDE.into_iter().zip(["traffic.uplink4", "traffic.uplink6"]) {
                check.that(id, pings(from, ip)?, || format!("no answer from {ip} on the uplink"));
            }
        }
        if self.is(&["loopback"]) {
            for (ip, id) in [("127.0.0.1", "traffic.loopback4"), ("::1", "traffic.loopback6")] {
                let ip: IpAddr = ip.parse().map_err(|error| format!("{ip}: {error}"))?;
                check.that(id, pings(from, ip)?, || format!("no answer from {ip}"));
            }
        }
        Ok(())
    }

    /// An interface of the name is there already.
    fn names_that_are_taken(&self, at: &Attachment, check: &mut Check) -> Result<()> {
        if self.is(&["loopback"]) {
            return Ok(());
        }
        let first = self.add(at)?;
        let (inside, outside) = (at.netns.snapshot()?, world::snapshot()?);
        let other = Attachment { id: "sanity-2", ..at.clone() };
        let second = self.add(&other)?;
        check.of("add.interface-exists", &second, fails_well(&second));
        let changed = at.netns.snapshot()?;
        check.of("add.interface-exists-keeps", &second, inside.without(&changed).is_empty());
        if self.is(&["host-device"]) {
            // The first one comes back under this name.
            drop(world::delete("spare0"));
        } else {
            check.none("add.failure-leaves-nothing", &leftovers(&outside)?);
        }
        self.del(at, first.json.as_ref()).map(drop)
    }

    /// Several interfaces of one container, and several containers.
    fn several(&self, at: &Attachment, check: &mut Check) -> Result<()> {
        if self.is(&["loopback", "host-device", "vlan"]) {
            return Ok(());
        }
        let other = Attachment { ifname: "eth1", ..at.clone() };
        let mut conf = self.subject.conf.clone();
        // Two default routes in one container are another matter.
        conf["ipam"]["routes"] = json!([]);
        // The gateway of a point-to-point link has a route of its own.
        if self.is(&["ptp"]) && conf["ipam"]["type"] == "host-local" {
            conf["name"] = json!("sanity-more");
            conf["ipam"]["ranges"] =
                json!([[{"subnet": "10.87.0.0/16"}], [{"subnet": "fd87::/64"}]]);
        }
        let subject = Subject { conf, ..*self.subject };
        // What the first ADD of a network makes is no leak.
        let made = subject.run("ADD", &other, None)?;
        subject.run("DEL", &other, subject.prev(made.json.as_ref()))?;
        let before = world::snapshot()?;
        let first = self.add(at)?;
        let Some(result) = first.json.as_ref().filter(|_| first.succeeded()) else {
            return Ok(());
        };
        let alone = at.netns.snapshot()?;
        let never = subject.run("DEL", &other, None)?;
        check.of("del.other-interface", &never, never.succeeded());
        let now = at.netns.snapshot()?;
        check.none("del.other-interface-keeps-first", &alone.without(&now));
        let second = subject.run("ADD", &other, None)?;
        check.of("add.second-interface", &second, second.succeeded());
        if let Some(more) = second.json.as_ref().filter(|_| second.succeeded()) {
            let is_shared = share_address(result, more);
            check.of("add.second-interface-address", &second, !is_shared);
            let deleted = subject.run("DEL", &other, subject.prev(Some(more)))?;
            check.of("del.second-interface", &deleted, deleted.succeeded());
            let now = at.netns.snapshot()?;
            check.none("del.second-interface-keeps-first", &alone.without(&now));
        }
        self.second_container(at, result, &alone, check)?;
        self.del(at, Some(result))?;
        check.none("del.several-leave-nothing", &leftovers(&before)?);
        Ok(())
    }

    /// Another container beside the one of `result`, whose namespace is `alone` without it.
    fn second_container(
        &self,
        at: &Attachment,
        result: &Value,
        alone: &Snapshot,
        check: &mut Check,
    ) -> Result<()> {
        let neighbour = self.attachment("sanity-3", "two")?;
        let added = self.add(&neighbour)?;
        check.of("add.second-container", &added, added.succeeded());
        let Some(more) = added.json.as_ref().filter(|_| added.succeeded()) else { return Ok(()) };
        check.of("add.second-container-address", &added, !share_address(result, more));
        let from = Some(&at.netns);
        if self.is(&["bridge", "macvlan"]) {
            for (ip, _) in results::addresses(more) {
                let id = if ip.is_ipv4() { "traffic.containers4" } else { "traffic.containers6" };
                check.that(id, pings(from, ip)?, || format!("no answer from {ip}"));
            }
        }
        let deleted = self.del(&neighbour, Some(more))?;
        check.of("del.second-container", &deleted, deleted.succeeded());
        let now = at.netns.snapshot()?;
        check.none("del.second-container-keeps-first", &alone.without(&now));
        let gateway = results::gateways(result).into_iter().next();
        if let Some(gateway) = gateway.filter(|_| self.is(&["bridge", "ptp"])) {
            let answers = pings(from, gateway)?;
            let detail = || format!("no answer from {gateway}");
            check.that("traffic.after-neighbours-del", answers, detail);
        }
        Ok(())
    }

    /// DEL for containers whose namespace is unknown or gone.
    fn without_namespace(&self, before: &Snapshot, check: &mut Check) -> Result<()> {
        let at = self.attachment("sanity-4", "three")?;
        let added = self.add(&at)?;
        let call = self
            .subject
            .call("DEL", &at, self.subject.prev(added.json.as_ref()))
            .env("CNI_NETNS", "");
        let deleted = call.run()?;
        check.of("del.no-netns", &deleted, deleted.succeeded());
        let leases: Vec<String> = leftovers(before)?;
        let files: Vec<&String> =
            leases.iter().filter(|line| line.starts_with("file /var/lib/cni")).collect();
        check.that("del.no-netns-releases", files.is_empty(), || format!("{files:?}"));
        self.del(&at, added.json.as_ref())?;
        let added = self.add(&at)?;
        at.netns.remove()?;
        let deleted = self.del(&at, added.json.as_ref())?;
        check.of("del.netns-gone", &deleted, deleted.succeeded());
        let again = self.del(&at, added.json.as_ref())?;
        check.of("del.netns-gone-twice", &again, again.succeeded());
        if self.is(&["host-device"]) {
            return Ok(());
        }
        check.none("del.netns-gone-leaves-nothing", &leftovers(before)?);
        Ok(())
    }

    /// An ADD that fails leaves nothing.
    fn failures(&self, at: &Attachment, before: &Snapshot, check: &mut Check) -> Result<()> {
        self.prepare()?;
        let call = self.subject.call("ADD", at, None).env("CNI_NETNS", "/run/netns/nowhere");
        let failed = call.run()?;
        check.of("add.netns-missing", &failed, fails_well(&failed) || at.ifname == "lo");
        if self.is(&["host-device"]) {
            return Ok(());
        }
        check.none("add.netns-missing-leaves-nothing", &leftovers(before)?);
        if !self.subject.kind.has_ipam {
            return Ok(());
        }
        let with = |ipam: Value| {
            let mut conf = self.subject.conf.clone();
            conf["ipam"] = ipam;
            Subject { conf, ..*self.subject }
        };
        let missing = with(json!({"type": "no-such-ipam"})).run("ADD", at, None)?;
        check.of("add.ipam-missing", &missing, fails_well(&missing));
        check.none("add.ipam-missing-leaves-nothing", &leftovers(before)?);
        // An interface that the failed ADD left must not be the reason for the next failure.
        self.del(at, None)?;
        if self.subject.conf["ipam"]["type"] == "host-local" {
            let one = json!([[{"subnet": "10.77.0.0/24", "rangeStart": "10.77.0.9", "rangeEnd": "10.77.0.9"}]]);
            let small =
                with(json!({"type": "host-local", "dataDir": "/var/lib/cni/small", "ranges": one}));
            // A lease of somebody else takes the only address.
            let other = json!({"cniVersion": self.subject.version, "name": "sanity", "type": "host-local",
                "ipam": small.conf["ipam"]});
            let path = self.subject.folder.join("host-local");
            let taken =
                crate::call::Call::new(&path, "ADD", &other).env("CNI_CONTAINERID", "somebody");
            taken.env("CNI_NETNS", &at.netns.path()).env("CNI_IFNAME", "eth0").run()?;
            let now = world::snapshot()?;
            let full = small.run("ADD", at, None)?;
            check.of("add.ipam-full", &full, fails_well(&full));
            check.none("add.ipam-full-leaves-nothing", &leftovers(&now)?);
            let deleted = small.run("DEL", at, None)?;
            check.of("del.after-failed-add", &deleted, deleted.succeeded());
        }
        Ok(())
    }

    /// CHECK says what is missing, and DEL works nevertheless.
    fn damage(&self, at: &Attachment, check: &mut Check) -> Result<()> {
        let added = self.add(at)?;
        let Some(result) = added.json.as_ref().filter(|_| added.succeeded()) else { return Ok(()) };
        let ifname = at.ifname;
        at.netns
            .run(|| if ifname == "lo" { world::down(ifname) } else { world::delete(ifname) })?;
        if self.subject.since("0.4.0") {
            let gone = self.subject.run("CHECK", at, Some(result))?;
            check.of("check.interface-gone", &gone, fails_well(&gone));
        }
        let deleted = self.del(at, Some(result))?;
        // Nobody can give the device back.
        check.of("del.interface-gone", &deleted, deleted.succeeded() || self.is(&["host-device"]));
        Ok(())
    }
}

fn share_address(one: &Value, other: &Value) -> bool {
    let own = results::addresses(one);
    results::addresses(other).iter().any(|ip| own.contains(ip))
}

/// The interface has the addresses of the result, and no others but its own.
fn kernel_addresses(
    at: &Attachment,
    link: &Link,
    named: &[(IpAddr, u8)],
    check: &mut Check,
) -> Result<()> {
    let addresses: Vec<_> =
        at.netns.addresses()?.into_iter().filter(|address| address.index == link.index).collect();
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
    let routes = at.netns.routes()?;
    for route in results::list(result, "routes") {
        let Some((dst, prefix)) = results::prefix(&route["dst"]) else { continue };
        let wanted = (prefix != 0).then_some(dst);
        let is_there = routes
            .iter()
            .any(|known| (known.dst, known.prefix, known.is_v4) == (wanted, prefix, dst.is_ipv4()));
        check.that("kernel.route", is_there, || format!("no route to {dst}/{prefix}"));
    }
    Ok(())
}

/// What is on the node and was not.
pub fn leftovers(before: &Snapshot) -> Result<Vec<String>> {
    let end = Instant::now() + PATIENCE;
    loop {
        let now = world::snapshot()?;
        let left: Vec<String> = now.without(before).into_iter().map(str::to_owned).collect();
        if left.is_empty() || Instant::now() > end {
            return Ok(left);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
