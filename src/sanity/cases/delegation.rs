//! What a plugin asks of others: of an IPAM plugin, and flannel of the plugin that makes the interface. The recorder
//! stands in their place.

use std::fs;

use serde_json::{Value, json};

use super::lifecycle::{Case, leftovers};
use super::protocol::fails_well;
use super::values::SUBNET;
use super::{Container, Containers, Subject, results};
use crate::call::{Answer, Call};
use crate::check::Check;
use crate::recorder::{KILLED, NAME, Recorded, Recorder, WORDS};
use crate::world::{self, Result};

const ARGS: &str = "IgnoreUnknown=1;K8S_POD_NAME=web";
const VALID: &str = "cni.dev/valid-attachments";

/// An error that only the recorder has.
const REFUSAL: &str =
    r#"{"cniVersion": "1.0.0", "code": 111, "msg": "no room", "details": "at the inn"}"#;

/// What each of the verbs must hand on: the variables that the plugin got.
const SAME: [(&str, &str); 5] = [
    ("CNI_CONTAINERID", "delegation.containerid"),
    ("CNI_NETNS", "delegation.netns"),
    ("CNI_IFNAME", "delegation.ifname"),
    ("CNI_ARGS", "delegation.args"),
    ("CNI_PATH", "delegation.path"),
];

pub fn run(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let recorder = Recorder::install("/run/recorder")?;
    let path = format!("{}:{}", recorder.folder.display(), subject.folder.display());
    let mut conf = subject.conf.clone();
    if subject.kind.name == "flannel" {
        conf["subnetFile"] = json!("/run/subnet.env");
        conf["delegate"] = json!({"type": NAME, "hairpinMode": true});
        fs::write("/run/subnet.env", SUBNET).map_err(|error| error.to_string())?;
    } else {
        conf["ipam"] = json!({"type": NAME, "own": {"key": [1, 2]}});
    }
    let containers = Containers::of(subject);
    let stage = Stage { subject, containers, recorder, path, conf };
    if subject.kind.name == "flannel" {
        return stage.flannel(check);
    }
    stage.good(check)?;
    stage.verbs(check)?;
    stage.refusals(check)?;
    stage.paths(check)
}

struct Stage<'a> {
    subject: &'a Subject<'a>,
    containers: Containers<'a>,
    recorder: Recorder,
    path: String,
    conf: Value,
}

impl Stage<'_> {
    fn call(&self, verb: &str, of: &Container, prev: Option<&Value>) -> Call {
        let mut conf = self.conf.clone();
        if let Some(prev) = prev {
            conf["prevResult"] = prev.clone();
        }
        let call = self.containers.call(verb, &conf, of);
        call.env("CNI_PATH", &self.path).env("CNI_ARGS", ARGS)
    }

    fn add(&self, of: &Container) -> Result<Answer> {
        Case { subject: self.subject }.prepare()?;
        self.recorder.forget();
        self.call("ADD", of, None).run()
    }

    fn del(&self, of: &Container, prev: Option<&Value>) -> Result<Answer> {
        self.recorder.forget();
        self.call("DEL", of, self.subject.prev(prev)).run()
    }

    /// The addresses that the recorder gives out.
    fn answer(&self) -> Value {
        let mut ips = match self.subject.kind.name {
            "macvlan" | "ipvlan" => {
                [json!({"address": "10.89.0.77/24"}), json!({"address": "fd89::77/64"})]
            }
            _ => [
                json!({"address": "10.88.0.77/16", "gateway": "10.88.0.1"}),
                json!({"address": "fd88::77/64", "gateway": "fd88::1"}),
            ],
        };
        if !self.subject.since("1.0.0") {
            for (address, family) in ips.iter_mut().zip(["4", "6"]) {
                address["version"] = json!(family);
            }
        }
        json!({"cniVersion": self.subject.version, "ips": ips, "routes": [{"dst": "10.123.0.0/16"}],
            "dns": {"nameservers": ["10.1.2.3"]}})
    }

    /// The call was handed on as the specification has it.
    fn same(&self, answer: &Answer, calls: &[Recorded], of: &Container, check: &mut Check) {
        let Some(call) = calls.first() else { return };
        let netns = of.at.netns.path();
        for (variable, id) in SAME {
            let wanted = match variable {
                "CNI_CONTAINERID" => of.at.id,
                "CNI_NETNS" => &netns,
                "CNI_IFNAME" => of.at.ifname,
                "CNI_ARGS" => ARGS,
                _ => &self.path,
            };
            check.of(id, answer, call.variable(variable) == wanted);
        }
        check.of("delegation.version", answer, call.stdin["cniVersion"] == self.subject.version);
        check.of("delegation.name", answer, call.stdin["name"] == self.conf["name"]);
    }

    /// An IPAM plugin that does what it should.
    fn good(&self, check: &mut Check) -> Result<()> {
        let container = self.containers.make()?;
        let wanted = self.answer();
        self.recorder.answers("ADD", 0, &wanted.to_string())?;
        let added = self.add(&container)?;
        let calls = self.recorder.calls("ADD");
        check.of("delegation.ipam.add", &added, added.succeeded() && !calls.is_empty());
        check.of("delegation.ipam.add-once", &added, calls.len() == 1);
        self.same(&added, &calls, &container, check);
        if let Some(call) = calls.first() {
            check.of("delegation.ipam.section", &added, call.stdin["ipam"] == self.conf["ipam"]);
            check.of("delegation.configuration", &added, call.stdin == self.conf);
        }
        check.of("delegation.stderr", &added, added.stderr.contains(WORDS));
        let Some(result) = added.json.as_ref().filter(|_| added.succeeded()) else { return Ok(()) };
        let given = results::addresses(&wanted);
        let is_named = given.iter().all(|ip| results::addresses(result).contains(ip));
        check.of("delegation.ipam.addresses", &added, is_named);
        let inside = container.at.netns.addresses()?;
        let is_there = given.iter().all(|(ip, _)| inside.iter().any(|known| known.ip == *ip));
        check.of("delegation.ipam.addresses-set", &added, is_there);
        let is_named = result["routes"].to_string().contains("10.123.0.0/16");
        check.of("delegation.ipam.routes", &added, is_named);
        let is_there = container.at.netns.snapshot()?.has("\"10.123.0.0\"/16");
        check.of("delegation.ipam.routes-set", &added, is_there);
        let is_named = result["dns"]["nameservers"] == json!(["10.1.2.3"]);
        check.of("delegation.ipam.dns", &added, is_named);
        if self.subject.since("0.4.0") {
            self.recorder.forget();
            let checked = self.call("CHECK", &container, Some(result)).run()?;
            let calls = self.recorder.calls("CHECK");
            check.of("delegation.ipam.check", &checked, checked.succeeded() && !calls.is_empty());
            self.same(&checked, &calls, &container, check);
            let has_it = calls.iter().all(|call| call.stdin["prevResult"] == *result);
            check.of("delegation.prev-result", &checked, has_it);
            self.recorder.answers("CHECK", 1, REFUSAL)?;
            let refused = self.call("CHECK", &container, Some(result)).run()?;
            check.of("delegation.ipam.check-fails", &refused, fails_well(&refused));
        }
        let deleted = self.del(&container, Some(result))?;
        let calls = self.recorder.calls("DEL");
        check.of("delegation.ipam.del", &deleted, deleted.succeeded() && !calls.is_empty());
        self.same(&deleted, &calls, &container, check);
        Ok(())
    }

    /// DEL without a namespace, DEL that IPAM refuses, GC and STATUS.
    fn verbs(&self, check: &mut Check) -> Result<()> {
        let container = self.containers.make()?;
        let added = self.add(&container)?;
        let result = added.json.as_ref().filter(|_| added.succeeded());
        self.recorder.forget();
        let prev = self.subject.prev(result);
        let nowhere = self.call("DEL", &container, prev).env("CNI_NETNS", "").run()?;
        let is_asked = !self.recorder.calls("DEL").is_empty();
        check.of("delegation.ipam.del-no-netns", &nowhere, is_asked);
        self.recorder.answers("DEL", 1, REFUSAL)?;
        let refused = self.del(&container, result)?;
        check.of("delegation.ipam.del-fails", &refused, fails_well(&refused));
        self.recorder.answers("DEL", 0, "")?;
        self.del(&container, result)?;
        if !self.subject.since("1.1.0") {
            return Ok(());
        }
        let mut conf = self.conf.clone();
        let valid = json!([{"containerID": "valid", "ifname": "eth0"}]);
        conf[VALID] = valid.clone();
        let ask = |verb: &str| {
            self.recorder.forget();
            Call::new(&self.subject.plugin(), verb, &conf).env("CNI_PATH", &self.path).run()
        };
        let collected = ask("GC")?;
        let calls = self.recorder.calls("GC");
        check.of("delegation.ipam.gc", &collected, collected.succeeded() && !calls.is_empty());
        let has_it = calls.iter().all(|call| call.stdin[VALID] == valid);
        check.of("delegation.ipam.gc-attachments", &collected, has_it);
        self.recorder.answers("GC", 1, REFUSAL)?;
        let refused = ask("GC")?;
        check.of("delegation.ipam.gc-fails", &refused, fails_well(&refused));
        let ready = ask("STATUS")?;
        let is_asked = !self.recorder.calls("STATUS").is_empty();
        check.of("delegation.ipam.status", &ready, ready.succeeded() && is_asked);
        self.recorder.answers("STATUS", 1, REFUSAL)?;
        let refused = ask("STATUS")?;
        check.of("delegation.ipam.status-fails", &refused, fails_well(&refused));
        Ok(())
    }

    /// An IPAM plugin that refuses, or answers what cannot be used.
    fn refusals(&self, check: &mut Check) -> Result<()> {
        let container = self.containers.make()?;
        let mut unusable = self.answer();
        unusable["routes"] = json!([{"dst": "10.123.0.0/16", "gw": "192.0.2.99"}]);
        let mut bare = self.answer();
        bare["ips"] = json!([]);
        bare["routes"] = json!([]);
        for (id, status, stdout) in [
            ("delegation.ipam.refuses", 1, REFUSAL.to_owned()),
            ("delegation.ipam.garbage", 0, "no result".to_owned()),
            ("delegation.ipam.silent", 0, String::new()),
            ("delegation.ipam.silent-failure", 1, String::new()),
            ("delegation.ipam.killed", KILLED, String::new()),
            ("delegation.ipam.no-address", 0, bare.to_string()),
            ("delegation.ipam.unusable", 0, unusable.to_string()),
        ] {
            Case { subject: self.subject }.prepare()?;
            let before = world::snapshot()?;
            self.recorder.answers("ADD", status, &stdout)?;
            let added = self.add(&container)?;
            check.of(id, &added, fails_well(&added));
            let is_released = !self.recorder.calls("DEL").is_empty();
            if id == "delegation.ipam.refuses" {
                let said = String::from_utf8_lossy(&added.stdout).into_owned();
                check.of("delegation.message", &added, said.contains("no room"));
                check.of("delegation.details", &added, said.contains("at the inn"));
                check.of("delegation.code", &added, added.code() == Some(111));
                check.of("delegation.ipam.refuses-del", &added, is_released);
            }
            if id == "delegation.ipam.unusable" {
                check.of("delegation.ipam.unusable-del", &added, is_released);
            }
            let left = leftovers(&before)?;
            check.that("delegation.ipam.leaves-nothing", left.is_empty(), || {
                format!("{id}: {}", left.join("; "))
            });
            self.del(&container, None)?;
        }
        self.recorder.answers("ADD", 0, &self.answer().to_string())
    }

    /// Where an IPAM plugin is looked for.
    fn paths(&self, check: &mut Check) -> Result<()> {
        let container = self.containers.make()?;
        let second = Recorder::install("/run/second")?;
        second.answers("ADD", 0, &self.answer().to_string())?;
        let mut conf = self.conf.clone();
        let with = |path: &str, conf: &Value| {
            Case { subject: self.subject }.prepare()?;
            self.recorder.forget();
            second.forget();
            let call = self.containers.call("ADD", conf, &container).env("CNI_PATH", path);
            let added = call.run()?;
            let del = self.containers.call("DEL", conf, &container);
            del.env("CNI_PATH", path).run()?;
            Ok::<_, String>(added)
        };
        let [one, two] = [&self.recorder, &second].map(|one| one.folder.display().to_string());
        let later = with(&format!("/run/nowhere:{one}"), &conf)?;
        check.of("delegation.path-later", &later, later.succeeded());
        let first = with(&format!("{two}:{one}"), &conf)?;
        let (of_first, of_second) = (second.calls("ADD"), self.recorder.calls("ADD"));
        let is_first = !of_first.is_empty() && of_second.is_empty();
        check.of("delegation.path-first", &first, is_first);
        let nowhere = with("/run/nowhere", &conf)?;
        check.of("delegation.path-only", &nowhere, fails_well(&nowhere));
        conf["ipam"]["type"] = json!(format!("../second/{NAME}"));
        let upwards = with(&one, &conf)?;
        check.of("delegation.type-path", &upwards, fails_well(&upwards));
        check.of("delegation.type-path-not-run", &upwards, second.calls("ADD").is_empty());
        Ok(())
    }

    /// flannel makes a configuration for the plugin that makes the interface.
    fn flannel(&self, check: &mut Check) -> Result<()> {
        let container = self.containers.make()?;
        let at = &container.at;
        let mut wanted = self.answer();
        wanted["interfaces"] = json!([{"name": at.ifname, "sandbox": at.netns.path()}]);
        self.recorder.answers("ADD", 0, &wanted.to_string())?;
        let added = self.add(&container)?;
        let calls = self.recorder.calls("ADD");
        check.of("delegation.flannel.add", &added, added.succeeded() && calls.len() == 1);
        self.same(&added, &calls, &container, check);
        if let Some(Recorded { stdin, .. }) = calls.first() {
            let ipam = stdin["ipam"].to_string();
            for (id, holds) in [
                ("delegation.flannel.type", stdin["type"] == NAME),
                ("delegation.flannel.own-keys", stdin["hairpinMode"] == true),
                ("delegation.flannel.ipam", stdin["ipam"]["type"] == "host-local"),
                ("delegation.flannel.subnet", ipam.contains("10.88.3.0/24")),
                ("delegation.flannel.route", ipam.contains("10.88.0.0/16")),
                ("delegation.flannel.mtu", stdin["mtu"] == 1400),
                ("delegation.flannel.masquerade", stdin["ipMasq"] == true),
            ] {
                check.of(id, &added, holds);
            }
        }
        let result = added.json.clone().unwrap_or_default();
        let is_same =
            result["ips"] == wanted["ips"] && result["interfaces"][0]["name"] == at.ifname;
        check.of("delegation.flannel.result", &added, is_same);
        // The daemon may be gone by then.
        fs::remove_file("/run/subnet.env").map_err(|error| error.to_string())?;
        let deleted = self.del(&container, Some(&result))?;
        let calls = self.recorder.calls("DEL");
        check.of("delegation.flannel.del", &deleted, deleted.succeeded() && calls.len() == 1);
        self.same(&deleted, &calls, &container, check);
        let again = self.del(&container, Some(&result))?;
        check.of("delegation.flannel.del-twice", &again, again.succeeded());
        fs::write("/run/subnet.env", SUBNET).map_err(|error| error.to_string())?;
        self.recorder.answers("ADD", 1, REFUSAL)?;
        // The first failure makes a log.
        self.add(&container)?;
        self.del(&container, None)?;
        let before = world::snapshot()?;
        let refused = self.add(&container)?;
        check.of("delegation.flannel.refuses", &refused, fails_well(&refused));
        check.of(
            "delegation.flannel.refuses-del",
            &refused,
            !self.recorder.calls("DEL").is_empty(),
        );
        let said = String::from_utf8_lossy(&refused.stdout).into_owned();
        check.of("delegation.message", &refused, said.contains("no room"));
        self.del(&container, None)?;
        let left = leftovers(&before)?;
        check.none("delegation.flannel.leaves-nothing", &left);
        Ok(())
    }
}
