//! Calls of delegates: of IPAM plugins, and of the delegate of flannel. The recorder replaces the
//! delegate.

use std::fs;
use std::net::{IpAddr, Ipv4Addr};

use serde_json::{Value, json};

use super::values::SUBNET;
use super::{Answer, Attachment, Call, Check, Result, Subject, VALID, leftovers, results};
use crate::observe;
use crate::recorder::{KILLED, NAME, Recorded, Recorder, WORDS};
use crate::world::{self, OUTSIDE};

const ARGS: &str = "IgnoreUnknown=1;K8S_POD_NAME=web";

/// An error that no other plugin returns.
const REFUSAL: &str =
    r#"{"cniVersion": "1.0.0", "code": 111, "msg": "no room", "details": "at the inn"}"#;

/// The gateway of bridge in the results of the recorder.
const BRIDGE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 88, 0, 1));

/// Keys of routes since 1.1.0: assertion, key, and a value that the kernel takes with a gateway.
/// Scope 200 is that of a site.
const ROUTE_KEYS: [(&str, &str, u32); 5] = [
    ("delegation.ipam.route-mtu", "mtu", 1400),
    ("delegation.ipam.route-advmss", "advmss", 1300),
    ("delegation.ipam.route-priority", "priority", 77),
    ("delegation.ipam.route-table", "table", 177),
    ("delegation.ipam.route-scope", "scope", 200),
];

pub fn run(subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    let recorder = Recorder::install("/run/recorder")?;
    let path = format!("{}:{}", recorder.directory.display(), subject.directory.display());
    if subject.is(&["flannel"]) {
        fs::write("/run/subnet.env", SUBNET)?;
        let subject = subject.with(json!({"subnetFile": "/run/subnet.env",
            "delegate": {"type": NAME, "hairpinMode": true}}));
        return Stage { subject: &subject, recorder, path }.flannel(check);
    }
    let subject = subject.with(json!({"ipam": {"type": NAME, "own": {"key": [1, 2]}}}));
    let stage = Stage { subject: &subject, recorder, path };
    stage.good(check)?;
    stage.verbs(check)?;
    stage.refusals(check)?;
    stage.paths(check)
}

struct Stage<'a> {
    /// The plugin, configured to delegate to the recorder.
    subject: &'a Subject<'a>,
    recorder: Recorder,
    /// The value of `CNI_PATH`.
    path: String,
}

impl Stage<'_> {
    fn call(&self, verb: &str, at: &Attachment, prev: Option<&Value>) -> Call {
        self.recorder.forget();
        self.subject.call(verb, at, prev).env("CNI_PATH", &self.path).env("CNI_ARGS", ARGS)
    }

    fn add(&self, at: &Attachment) -> Result<Answer> {
        self.subject.prepare()?;
        self.call("ADD", at, None).run()
    }

    fn del(&self, at: &Attachment, prev: Option<&Value>) -> Result<Answer> {
        self.call("DEL", at, self.subject.prev(prev)).run()
    }

    /// Whether the plugin has called the delegate with this verb.
    fn has_called(&self, verb: &str) -> bool {
        !self.recorder.calls(verb).is_empty()
    }

    /// The result that the recorder returns.
    fn answer(&self) -> Value {
        let mut ips = if self.subject.is(&["macvlan", "ipvlan"]) {
            json!([{"address": "10.89.0.77/24"}, {"address": "fd89::77/64"}])
        } else {
            json!([{"address": "10.88.0.77/16", "gateway": "10.88.0.1"},
                {"address": "fd88::77/64", "gateway": "fd88::1"}])
        };
        if !self.subject.since("1.0.0") {
            ips[0]["version"] = json!("4");
            ips[1]["version"] = json!("6");
        }
        let gateway = if self.subject.is(&["macvlan", "ipvlan"]) { OUTSIDE[0] } else { BRIDGE };
        let mut routes = vec![
            json!({"dst": "10.123.0.0/16"}),
            json!({"dst": "10.124.0.0/16", "gw": gateway}),
            json!({"dst": "fd23::/48"}),
        ];
        if self.subject.since("1.1.0") {
            for (number, (_, key, value)) in (130..).zip(ROUTE_KEYS) {
                let dst = format!("10.{number}.0.0/16");
                routes.push(json!({"dst": dst, "gw": gateway, key: value}));
            }
        }
        json!({"cniVersion": self.subject.version, "ips": ips, "routes": routes,
            "dns": {"nameservers": ["10.1.2.3"]}})
    }

    /// The delegate got the variables and the keys that the specification requires.
    fn same(&self, answer: &Answer, calls: &[Recorded], at: &Attachment, check: &mut Check) {
        let Some(call) = calls.first() else { return };
        for (id, variable, expected) in [
            ("delegation.containerid", "CNI_CONTAINERID", at.id),
            ("delegation.netns", "CNI_NETNS", &at.netns.path()),
            ("delegation.ifname", "CNI_IFNAME", at.ifname),
            ("delegation.args", "CNI_ARGS", ARGS),
            ("delegation.path", "CNI_PATH", &self.path),
        ] {
            let given = call.variable(variable);
            check.effect(id, answer, given == expected, || {
                format!("{variable} of the delegate is \"{given}\", not \"{expected}\"")
            });
        }
        for (id, key, expected) in [
            ("delegation.version", "cniVersion", &json!(self.subject.version)),
            ("delegation.name", "name", &self.subject.conf["name"]),
        ] {
            let given = &call.stdin[key];
            check.effect(id, answer, given == expected, || {
                format!("{key} of the delegate is {given}, not {expected}")
            });
        }
    }

    /// A conforming IPAM plugin.
    fn good(&self, check: &mut Check) -> Result<()> {
        let at = self.subject.container()?;
        let given = self.answer();
        self.recorder.answers("ADD", 0, &given.to_string())?;
        let added = self.add(&at)?;
        let calls = self.recorder.calls("ADD");
        check.effect("delegation.ipam.add", &added, added.succeeded() && !calls.is_empty(), || {
            self.recorder.verbs()
        });
        check
            .effect("delegation.ipam.add-once", &added, calls.len() == 1, || self.recorder.verbs());
        self.same(&added, &calls, &at, check);
        if let Some(Recorded { stdin, .. }) = calls.first() {
            let conf = &self.subject.conf;
            let is_whole = stdin["ipam"] == conf["ipam"];
            let detail = || format!("the delegate's configuration is {stdin}, not {conf}");
            check.effect("delegation.ipam.section", &added, is_whole, detail);
            check.effect("delegation.configuration", &added, stdin == conf, detail);
        }
        check.of("delegation.stderr", &added, added.stderr.contains(WORDS));
        let Some(result) = added.result() else { return Ok(()) };
        Stage::applied(&at, &given, &added, result, check)?;
        if self.subject.since("0.4.0") {
            let checked = self.call("CHECK", &at, Some(result)).run()?;
            let calls = self.recorder.calls("CHECK");
            check.effect(
                "delegation.ipam.check",
                &checked,
                checked.succeeded() && !calls.is_empty(),
                || self.recorder.verbs(),
            );
            self.same(&checked, &calls, &at, check);
            let has_result = calls.iter().all(|call| call.stdin["prevResult"] == *result);
            check.effect("delegation.prev-result", &checked, has_result, || {
                format!("the delegate's prevResult is not {result}")
            });
            self.recorder.answers("CHECK", 1, REFUSAL)?;
            let refused = self.call("CHECK", &at, Some(result)).run();
            check.fails("delegation.ipam.check-fails", refused)?;
        }
        let deleted = self.del(&at, Some(result))?;
        let calls = self.recorder.calls("DEL");
        check.effect(
            "delegation.ipam.del",
            &deleted,
            deleted.succeeded() && !calls.is_empty(),
            || self.recorder.verbs(),
        );
        self.same(&deleted, &calls, &at, check);
        Ok(())
    }

    /// The addresses and routes that the IPAM plugin returned are in the result, and in the
    /// container.
    fn applied(
        at: &Attachment,
        given: &Value,
        added: &Answer,
        result: &Value,
        check: &mut Check,
    ) -> Result<()> {
        let (ips, named) = (results::addresses(given), results::addresses(result));
        let are_named = ips.iter().all(|ip| named.contains(ip));
        check.effect("delegation.ipam.addresses", added, are_named, || format!("not {ips:?}"));
        let inside = at.netns.run(observe::addresses)?;
        let are_set = ips.iter().all(|(ip, _)| inside.iter().any(|known| known.ip == *ip));
        check.effect("delegation.ipam.addresses-set", added, are_set, || {
            format!("not all of {ips:?} are in the container")
        });
        Stage::routes(at, given, added, result, check)?;
        let is_named = result["dns"]["nameservers"] == json!(["10.1.2.3"]);
        check.effect("delegation.ipam.dns", added, is_named, || {
            format!("dns is {}, without 10.1.2.3", result["dns"])
        });
        Ok(())
    }

    /// Each route is in the result and in the container, with all of its keys.
    fn routes(
        at: &Attachment,
        given: &Value,
        added: &Answer,
        result: &Value,
        check: &mut Check,
    ) -> Result<()> {
        let inside = at.netns.run(observe::routes)?;
        for route in results::list(given, "routes") {
            let Some((dst, prefix)) = results::prefix(&route["dst"]) else { continue };
            let missing = || format!("no route {route}");
            let has_all = |named: &Value| {
                route.as_object().is_some_and(|keys| keys.iter().all(|(k, v)| named[k] == *v))
            };
            let is_named = results::list(result, "routes").any(has_all);
            check.effect("delegation.ipam.routes", added, is_named, missing);
            let set = inside.iter().find(|known| known.leads_to(dst, prefix));
            let gateway = results::ip(&route["gw"]);
            let is_set = set.is_some_and(|set| gateway.is_none() || set.gateway == gateway);
            check.effect("delegation.ipam.routes-set", added, is_set, missing);
            for (id, key, value) in ROUTE_KEYS {
                if !route[key].is_null()
                    && let Some(set) = set
                {
                    let found = match key {
                        "mtu" => set.mtu,
                        "advmss" => set.advmss,
                        "priority" => set.priority,
                        "table" => Some(set.table),
                        _ => Some(u32::from(set.scope)),
                    };
                    check.effect(id, added, found == Some(value), || {
                        format!("the {key} of the route to {dst}/{prefix} is {found:?}")
                    });
                }
            }
        }
        Ok(())
    }

    /// DEL without a namespace, DEL that IPAM refuses, GC and STATUS.
    fn verbs(&self, check: &mut Check) -> Result<()> {
        let at = self.subject.container()?;
        let added = self.add(&at)?;
        let result = added.result();
        let without_netns = self.call("DEL", &at, self.subject.prev(result)).env("CNI_NETNS", "");
        let deleted = without_netns.run()?;
        check.effect("delegation.ipam.del-no-netns", &deleted, self.has_called("DEL"), || {
            self.recorder.verbs()
        });
        self.recorder.answers("DEL", 1, REFUSAL)?;
        check.fails("delegation.ipam.del-fails", self.del(&at, result))?;
        self.recorder.answers("DEL", 0, "")?;
        self.del(&at, result)?;
        if !self.subject.since("1.1.0") {
            return Ok(());
        }
        let valid = json!([{"containerID": "valid", "ifname": "eth0"}]);
        let subject = self.subject.with(json!({VALID: valid}));
        let call = |verb: &str| {
            self.recorder.forget();
            subject.plain(verb).env("CNI_PATH", &self.path).run()
        };
        let collected = call("GC")?;
        let calls = self.recorder.calls("GC");
        check.effect(
            "delegation.ipam.gc",
            &collected,
            collected.succeeded() && !calls.is_empty(),
            || self.recorder.verbs(),
        );
        let has_list = calls.iter().all(|call| call.stdin[VALID] == valid);
        check.effect("delegation.ipam.gc-attachments", &collected, has_list, || {
            format!("the delegate's list is not {valid}")
        });
        self.recorder.answers("GC", 1, REFUSAL)?;
        check.fails("delegation.ipam.gc-fails", call("GC"))?;
        let status = call("STATUS")?;
        let is_good = status.succeeded() && self.has_called("STATUS");
        check.effect("delegation.ipam.status", &status, is_good, || self.recorder.verbs());
        self.recorder.answers("STATUS", 1, REFUSAL)?;
        check.fails("delegation.ipam.status-fails", call("STATUS"))?;
        Ok(())
    }

    /// An IPAM plugin that refuses, or returns an unusable result.
    fn refusals(&self, check: &mut Check) -> Result<()> {
        let at = self.subject.container()?;
        let mut unusable = self.answer();
        unusable["routes"] = json!([{"dst": "10.123.0.0/16", "gw": "192.0.2.99"}]);
        let mut bare = self.answer();
        bare["ips"] = json!([]);
        bare["routes"] = json!([]);
        for (id, status, stdout) in [
            ("delegation.ipam.refuses", 1, REFUSAL),
            ("delegation.ipam.garbage", 0, "no result"),
            ("delegation.ipam.silent", 0, ""),
            ("delegation.ipam.silent-failure", 1, ""),
            ("delegation.ipam.killed", KILLED, ""),
            ("delegation.ipam.no-address", 0, &bare.to_string()),
            ("delegation.ipam.unusable", 0, &unusable.to_string()),
        ] {
            self.subject.prepare()?;
            let before = world::snapshot()?;
            self.recorder.answers("ADD", status, stdout)?;
            let added = check.fails(id, self.add(&at))?;
            if id == "delegation.ipam.refuses" {
                let stdout = String::from_utf8_lossy(&added.stdout);
                check.of("delegation.message", &added, stdout.contains("no room"));
                check.of("delegation.details", &added, stdout.contains("at the inn"));
                check.of("delegation.code", &added, added.code() == Some(111));
                check.effect("delegation.ipam.refuses-del", &added, self.has_called("DEL"), || {
                    self.recorder.verbs()
                });
            }
            if id == "delegation.ipam.unusable" {
                check.effect(
                    "delegation.ipam.unusable-del",
                    &added,
                    self.has_called("DEL"),
                    || self.recorder.verbs(),
                );
            }
            // The DEL that follows each ADD.
            self.del(&at, None)?;
            let left = leftovers(&before)?;
            check.that("delegation.ipam.leaves-nothing", left.is_empty(), || {
                format!("{id}: {}", left.join("; "))
            });
        }
        self.recorder.answers("ADD", 0, &self.answer().to_string())
    }

    /// The directories that are searched for an IPAM plugin.
    fn paths(&self, check: &mut Check) -> Result<()> {
        let at = self.subject.container()?;
        let second = Recorder::install("/run/second")?;
        second.answers("ADD", 0, &self.answer().to_string())?;
        let add = |path: &str, subject: &Subject<'_>| {
            subject.prepare()?;
            self.recorder.forget();
            second.forget();
            let added = subject.call("ADD", &at, None).env("CNI_PATH", path).run();
            subject.call("DEL", &at, None).env("CNI_PATH", path).run()?;
            added
        };
        let [one, two] = [&self.recorder, &second].map(|one| one.directory.display().to_string());
        let later = add(&format!("/run/nowhere:{one}"), self.subject);
        check.succeeds("delegation.path-later", later)?;
        let first = add(&format!("{two}:{one}"), self.subject)?;
        let is_first = !second.calls("ADD").is_empty() && !self.has_called("ADD");
        check.of("delegation.path-first", &first, is_first);
        check.fails("delegation.path-only", add("/run/nowhere", self.subject))?;
        let mut ipam = self.subject.conf["ipam"].clone();
        ipam["type"] = json!(format!("../second/{NAME}"));
        let upwards = add(&one, &self.subject.with(json!({"ipam": ipam})));
        let upwards = check.fails("delegation.type-path", upwards)?;
        check.of("delegation.type-path-not-run", &upwards, second.calls("ADD").is_empty());
        Ok(())
    }

    /// flannel generates the configuration of the plugin that creates the interface.
    fn flannel(&self, check: &mut Check) -> Result<()> {
        let at = self.subject.container()?;
        let mut given = self.answer();
        given["interfaces"] = json!([{"name": at.ifname, "sandbox": at.netns.path()}]);
        self.recorder.answers("ADD", 0, &given.to_string())?;
        let added = self.add(&at)?;
        let calls = self.recorder.calls("ADD");
        check.effect(
            "delegation.flannel.add",
            &added,
            added.succeeded() && calls.len() == 1,
            || self.recorder.verbs(),
        );
        self.same(&added, &calls, &at, check);
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
        let is_same = result["ips"] == given["ips"] && result["interfaces"][0]["name"] == at.ifname;
        check.of("delegation.flannel.result", &added, is_same);
        // The daemon may have stopped before DEL.
        fs::remove_file("/run/subnet.env")?;
        let deleted = self.del(&at, Some(&result))?;
        let calls = self.recorder.calls("DEL");
        check.effect(
            "delegation.flannel.del",
            &deleted,
            deleted.succeeded() && calls.len() == 1,
            || self.recorder.verbs(),
        );
        self.same(&deleted, &calls, &at, check);
        check.succeeds("delegation.flannel.del-twice", self.del(&at, Some(&result)))?;
        fs::write("/run/subnet.env", SUBNET)?;
        self.recorder.answers("ADD", 1, REFUSAL)?;
        // The first failure creates a log.
        self.add(&at)?;
        self.del(&at, None)?;
        let before = world::snapshot()?;
        let refused = check.fails("delegation.flannel.refuses", self.add(&at))?;
        check.effect("delegation.flannel.refuses-del", &refused, self.has_called("DEL"), || {
            self.recorder.verbs()
        });
        let stdout = String::from_utf8_lossy(&refused.stdout);
        check.of("delegation.message", &refused, stdout.contains("no room"));
        self.del(&at, None)?;
        check.none("delegation.flannel.leaves-nothing", &leftovers(&before)?);
        Ok(())
    }
}
