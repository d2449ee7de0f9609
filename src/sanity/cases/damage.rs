//! Damage: what CHECK has to see, and what DEL must leave alone whatever it is told.

use std::fs;
use std::net::SocketAddr;

use serde_json::{Value, json};

use super::lifecycle::{Case, leftovers};
use super::protocol::fails_well;
use super::{Container, Containers, Subject, results};
use crate::call::Answer;
use crate::check::Check;
use crate::profiles::Profile;
use crate::traffic::{pings, tcp};
use crate::world::{self, NODE, OUTSIDE, Result, UPLINK, World};

pub fn run(subject: &Subject<'_>, world: &World, check: &mut Check) -> Result<()> {
    let stage = Stage { subject, containers: Containers::of(subject), world };
    if subject.kind.profile == Profile::Interface && subject.kind.name != "loopback" {
        stage.of_kernel(check)?;
        stage.of_result(check)?;
        stage.forged(check)?;
    }
    stage.of_type(check)?;
    if ["bridge", "ptp", "portmap", "firewall"].contains(&subject.kind.name) {
        stage.flushed(check)?;
    }
    Ok(())
}

struct Stage<'a> {
    subject: &'a Subject<'a>,
    containers: Containers<'a>,
    world: &'a World,
}

impl Stage<'_> {
    fn is(&self, kind: &str) -> bool {
        self.subject.kind.name == kind
    }

    fn add(&self) -> Result<Option<(Container, Value)>> {
        let container = self.containers.make()?;
        let added = self.containers.call("ADD", &self.subject.conf, &container).run()?;
        let result = added.json.filter(|_| added.status == Some(0));
        Ok(result.map(|result| (container, result)))
    }

    fn call(&self, verb: &str, of: &Container, result: &Value) -> Result<Answer> {
        self.subject.call(verb, &of.at, Some(result)).run()
    }

    /// CHECK after `damage` in the container.
    fn sees(
        &self,
        id: &str,
        check: &mut Check,
        damage: impl FnOnce(&Container) -> Result<()>,
    ) -> Result<()> {
        let Some((container, result)) = self.add()? else { return Ok(()) };
        damage(&container)?;
        let checked = self.call("CHECK", &container, &result)?;
        check.of(id, &checked, fails_well(&checked));
        let deleted = self.containers.end(&self.subject.conf, &container, Some(&result))?;
        check.of("damage.del", &deleted, deleted.succeeded());
        Ok(())
    }

    /// What the result names is not there any more.
    fn of_kernel(&self, check: &mut Check) -> Result<()> {
        if !self.subject.since("0.4.0") {
            return Ok(());
        }
        self.sees("damage.address-gone", check, |container| {
            container.at.netns.run(|| world::delete_addresses("eth0"))
        })?;
        if self.is("bridge") || self.is("ptp") {
            self.sees("damage.route-gone", check, |container| {
                container.at.netns.run(world::delete_default_routes)
            })?;
        }
        // Nobody can give a device back that is deleted.
        if !self.is("host-device") {
            self.sees("damage.other-kind", check, |container| {
                container.at.netns.run(|| {
                    world::delete("eth0")?;
                    world::make_pair("eth0", "eth9")
                })
            })?;
        }
        if self.is("bridge") {
            self.sees("damage.bridge-gone", check, |_| world::delete("sanity0"))?;
        }
        Ok(())
    }

    /// The result names what never was there.
    fn of_result(&self, check: &mut Check) -> Result<()> {
        if !self.subject.since("0.4.0") {
            return Ok(());
        }
        let Some((container, result)) = self.add()? else { return Ok(()) };
        let mut other = result.clone();
        other["ips"][0]["address"] = json!("10.200.0.9/16");
        let mut route = result.clone();
        route["routes"] = json!([{"dst": "10.201.0.0/16"}]);
        let mut mac = result.clone();
        for interface in mac["interfaces"].as_array_mut().into_iter().flatten() {
            interface["mac"] = json!("02:00:5e:00:53:99");
        }
        let mut name = result.clone();
        for interface in name["interfaces"].as_array_mut().into_iter().flatten() {
            interface["name"] = json!("nowhere0");
        }
        for (id, forged) in [
            ("damage.address-other", other),
            ("damage.route-other", route),
            ("damage.mac-other", mac),
            ("damage.interface-other", name),
        ] {
            let checked = self.call("CHECK", &container, &forged)?;
            check.of(id, &checked, fails_well(&checked));
        }
        let good = self.call("CHECK", &container, &result)?;
        check.of("damage.none", &good, good.succeeded());
        self.containers.end(&self.subject.conf, &container, Some(&result)).map(drop)
    }

    /// DEL with a prevResult that names what is somebody else's.
    fn forged(&self, check: &mut Check) -> Result<()> {
        let Some((container, result)) = self.add()? else { return Ok(()) };
        let before = world::snapshot()?;
        let inside = container.at.netns.snapshot()?;
        let mut forged = result.clone();
        for interface in forged["interfaces"].as_array_mut().into_iter().flatten() {
            *interface = json!({"name": UPLINK});
        }
        Case { subject: self.subject }.prepare()?;
        let stranger = self.containers.make()?;
        let other = super::Attachment { id: "sanity-stranger", ..stranger.at.clone() };
        let deleted = self.subject.call("DEL", &other, Some(&forged)).run()?;
        check.of("damage.forged-interface", &deleted, world::index(UPLINK).is_ok());
        let lost: Vec<String> = inside
            .without(&container.at.netns.snapshot()?)
            .into_iter()
            .map(str::to_owned)
            .collect();
        check.none("damage.forged-keeps-container", &lost);
        let now = world::snapshot()?;
        let lost: Vec<&str> = before.without(&now);
        let lost: Vec<&str> = lost.into_iter().filter(|line| !line.contains("spare")).collect();
        check.none("damage.forged-keeps-node", &lost);
        if self.is("bridge") || self.is("ptp") {
            let answers = pings(Some(&container.at.netns), OUTSIDE[0])?;
            check.that("damage.forged-keeps-traffic", answers, || {
                "no answer by ipMasq any more".to_owned()
            });
        }
        for garbage in [
            json!(7),
            json!("text"),
            json!({"interfaces": 7}),
            json!({"ips": [{"address": "none"}]}),
        ] {
            let answer = self.subject.call("DEL", &other, Some(&garbage)).run()?;
            check.of("damage.garbage", &answer, answer.status.is_some());
        }
        self.containers.end(&self.subject.conf, &container, Some(&result)).map(drop)
    }

    /// What chained plugins did is undone.
    fn of_type(&self, check: &mut Check) -> Result<()> {
        if !self.subject.since("0.4.0") {
            return Ok(());
        }
        match self.subject.kind.name {
            "tuning" => {
                self.sees("damage.tuning.sysctl", check, |container| {
                    let path = "/proc/sys/net/ipv4/conf/eth0/arp_filter";
                    container
                        .at
                        .netns
                        .run(|| fs::write(path, "0").map_err(|error| error.to_string()))
                })?;
                self.sees("damage.tuning.mtu", check, |container| {
                    container.at.netns.run(|| world::set_mtu("eth0", 1200))
                })
            }
            "bandwidth" => self.sees("damage.bandwidth.qdisc", check, |_| world::delete_shapers()),
            "sbr" => self.sees("damage.sbr.rule", check, |container| {
                container.at.netns.run(world::delete_source_rules)
            }),
            "vrf" => self.sees("damage.vrf.gone", check, |container| {
                container.at.netns.run(|| world::delete("blue"))
            }),
            "portmap" => self.sees("damage.portmap.flushed", check, |_| world::flush_rules()),
            "firewall" => self.sees("damage.firewall.flushed", check, |_| world::flush_rules()),
            _ => Ok(()),
        }
    }

    /// Somebody flushed all rules of the packet filter.
    fn flushed(&self, check: &mut Check) -> Result<()> {
        let Some((container, result)) = self.add()? else { return Ok(()) };
        world::flush_rules()?;
        let deleted = self.containers.end(&self.subject.conf, &container, Some(&result))?;
        check.of("damage.flushed.del", &deleted, deleted.succeeded());
        world::flush_rules()?;
        let next = self.containers.make()?;
        let added = self.containers.call("ADD", &self.subject.conf, &next).run()?;
        check.of("damage.flushed.add", &added, added.succeeded());
        let Some(result) = added.json.as_ref().filter(|_| added.succeeded()) else { return Ok(()) };
        let works = match self.subject.kind.name {
            "bridge" | "ptp" => pings(Some(&next.at.netns), OUTSIDE[0])?,
            "portmap" => {
                let to = SocketAddr::new(NODE[0], 8080);
                tcp(self.world.outside(), to, &next.at.netns, 80)?.is_some()
            }
            _ => results::addresses(result).len() == 2,
        };
        check.of("damage.flushed.traffic", &added, works);
        let now = world::snapshot()?;
        self.containers.end(&self.subject.conf, &next, Some(result))?;
        check.none("damage.flushed.leaves-nothing", &leftovers(&now)?);
        Ok(())
    }
}
