//! The cases: calls of a plugin in a defined order, and the assertions about them.
//!
//! | file | |
//! | --- | --- |
//! | `protocol.rs` | VERSION, environment, stdin, errors: for every plugin |
//! | `results.rs` | the form of results, by version |
//! | `lifecycle.rs` | plugins that create an interface: ADD, CHECK, DEL against the kernel |
//! | `ipam.rs` | plugins that allocate addresses |
//! | `chained.rs` | plugins that change what others created |
//! | `housekeeping.rs` | GC and STATUS |
//! | `delegation.rs` | calls of delegates: IPAM plugins, and the delegate of flannel |
//! | `process.rs` | the environment of the process, unusual but valid calls |
//! | `keys.rs` | the effect of configuration keys |
//! | `values.rs` | values that must be refused |
//! | `damage.rs` | damage that CHECK must detect |
//! | `faults.rs` | killed plugins, full disks, parallel calls |

pub mod chained;
pub mod damage;
pub mod delegation;
pub mod faults;
pub mod housekeeping;
pub mod ipam;
pub mod keys;
pub mod lifecycle;
pub mod process;
pub mod protocol;
pub mod results;
pub mod values;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::Result;
use super::call::{Answer, Call};
use super::check::Check;
use super::observe::Snapshot;
use super::profiles::{Kind, Profile, ipam, merge};
use super::world::{self, Netns};

/// The time limit of the kernel's cleanup after the end of a namespace.
const PATIENCE: Duration = Duration::from_secs(3);

/// The configuration key of GC's attachments.
const VALID: &str = "cni.dev/valid-attachments";

/// The plugin under test, with a configuration.
#[derive(Debug)]
pub struct Subject<'a> {
    pub kind: &'a Kind,
    pub version: &'a str,
    /// The directory of the plugins.
    pub directory: &'a Path,
    pub conf: Value,
    /// Selects the assertions whose id contains this.
    pub only: Option<&'a str>,
}

/// An attachment: a container and its interface.
#[derive(Clone, Debug)]
pub struct Attachment {
    pub id: &'static str,
    pub netns: Netns,
    pub ifname: &'static str,
    /// The result of the earlier plugins of the list.
    pub prev: Option<Value>,
}

impl Subject<'_> {
    fn plugin(&self) -> PathBuf {
        self.directory.join(self.kind.name)
    }

    /// Whether the plugin is of one of these types.
    fn is(&self, kinds: &[&str]) -> bool {
        kinds.contains(&self.kind.name)
    }

    /// Whether the verdict of an assertion is wanted.
    fn asks(&self, id: &str) -> bool {
        self.only.is_none_or(|only| id.contains(only))
    }

    /// Whether the version is this or a later one.
    fn since(&self, version: &str) -> bool {
        number(self.version) >= number(version)
    }

    /// The plugin with these members of the configuration changed.
    fn with(&self, members: Value) -> Self {
        let mut conf = self.conf.clone();
        merge(&mut conf, members);
        Subject { conf, ..*self }
    }

    /// The required interface name.
    fn ifname(&self) -> &'static str {
        if self.is(&["loopback"]) { "lo" } else { "eth0" }
    }

    /// An attachment in a new namespace.
    fn attachment(&self, id: &'static str, netns: &str) -> Result<Attachment> {
        Ok(Attachment { id, netns: Netns::new(netns)?, ifname: self.ifname(), prev: None })
    }

    /// An attachment in a new namespace. For a chained plugin, bridge of the same directory has
    /// attached the namespace before.
    fn container(&self) -> Result<Attachment> {
        self.container_of("sanity-1")
    }

    /// The same as [`Subject::container`], for a container with this id.
    fn container_of(&self, id: &'static str) -> Result<Attachment> {
        static NUMBER: AtomicU32 = AtomicU32::new(1);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let mut at = self.attachment(id, &format!("container-{number}"))?;
        self.prepare()?;
        if self.kind.profile == Profile::Chained {
            at.prev = Some(self.add_bridge(&at)?);
        }
        Ok(at)
    }

    fn add_bridge(&self, at: &Attachment) -> Result<Value> {
        let added = self.bridge("ADD", at, None)?;
        let result = added.result().cloned();
        result.ok_or_else(|| format!("bridge, which goes first: {}", added.summary()).into())
    }

    /// The plugin for a second attachment beside the first: both cannot have the same ports of the
    /// node, nor the same routes of a container.
    fn second(&self) -> Self {
        self.with(match self.kind.name {
            "portmap" => json!({"runtimeConfig": {"portMappings": [
                {"hostPort": 9080, "containerPort": 90, "protocol": "tcp"},
                {"hostPort": 9081, "containerPort": 91, "protocol": "udp"}]}}),
            "route-override" => json!({"addroutes": [{"dst": "10.206.7.0/24"}]}),
            _ => json!({}),
        })
    }

    /// A call of bridge, the first plugin of the list of a chained plugin.
    fn bridge(&self, verb: &str, at: &Attachment, prev: Option<&Value>) -> Result<Answer> {
        let mut ipam = ipam(self.directory, "bridge");
        if at.ifname != self.ifname() {
            // Two default routes in one container are not tested.
            ipam["routes"] = json!([]);
        }
        let conf = json!({"cniVersion": self.version, "name": "sanity", "type": "bridge", "bridge": "sanity0",
            "isGateway": true, "ipMasq": true, "hairpinMode": true, "ipam": ipam});
        let kind = Kind { name: "bridge", ..*self.kind };
        Subject { kind: &kind, conf, ..*self }.run(verb, at, prev)
    }

    /// The devices that the plugin moves.
    fn devices(&self) -> &'static [&'static str] {
        match self.kind.name {
            "host-device" => &["spare0"],
            "bond" => &["spare0", "other0"],
            _ => &[],
        }
    }

    /// Creates the devices that the plugin moves.
    fn prepare(&self) -> Result<()> {
        for device in self.devices().iter().filter(|name| world::index(name).is_err()) {
            // The peers of devices in containers also have such names.
            let names = (1..).map(|number| format!("spare{number}"));
            let mut free = names.filter(|name| world::index(name).is_err());
            free.next().map_or(Ok(()), |name| world::make_pair(device, &name))?;
        }
        Ok(())
    }

    /// A call without an attachment.
    fn plain(&self, verb: &str) -> Call {
        Call::new(&self.plugin(), verb, &self.conf)
    }

    /// A call for an attachment, with this `prevResult`.
    fn call(&self, verb: &str, at: &Attachment, prev: Option<&Value>) -> Call {
        let mut conf = self.conf.clone();
        if let Some(prev) = prev {
            conf["prevResult"] = prev.clone();
        }
        Call::new(&self.plugin(), verb, &conf)
            .env("CNI_CONTAINERID", at.id)
            .env("CNI_NETNS", &at.netns.path())
            .env("CNI_IFNAME", at.ifname)
    }

    fn run(&self, verb: &str, at: &Attachment, prev: Option<&Value>) -> Result<Answer> {
        self.call(verb, at, prev).run()
    }

    /// CHECK and DEL have a `prevResult` since 0.4.0.
    fn prev<'v>(&self, result: Option<&'v Value>) -> Option<&'v Value> {
        result.filter(|_| self.since("0.4.0"))
    }

    /// ADD, after the earlier plugins of the list.
    fn add(&self, at: &Attachment) -> Result<Answer> {
        self.prepare()?;
        self.run("ADD", at, at.prev.as_ref())
    }

    /// DEL, with the result of ADD if DEL of the version has a `prevResult`.
    fn del(&self, at: &Attachment, result: Option<&Value>) -> Result<Answer> {
        self.run("DEL", at, self.prev(result))
    }

    /// DEL of all plugins of the list, and of the namespace.
    fn end(&self, at: &Attachment, result: Option<&Value>) -> Result<Answer> {
        let deleted = self.del(at, result)?;
        if let Some(prev) = &at.prev {
            self.bridge("DEL", at, self.prev(Some(prev)))?;
        }
        at.netns.remove()?;
        Ok(deleted)
    }
}

/// A version as a number that can be compared: 1.0.0 is 10000.
fn number(version: &str) -> u32 {
    version.split('.').fold(0, |sum, part| sum * 100 + part.parse::<u32>().unwrap_or_default())
}

/// The lines that the second snapshot lacks, without those that are of no attachment.
fn lost(before: &Snapshot, now: &Snapshot) -> Vec<String> {
    let mut lost = before.without(now);
    // noqueue is the default of the kernel, which a shaper replaces. The peers of devices that
    // plugins move are the suite's own.
    lost.retain(|line| !line.starts_with("qdisc noqueue") && !line.contains("spare"));
    lost
}

/// The lines that the node's state has gained.
fn leftovers(before: &Snapshot) -> Result<Vec<String>> {
    let end = Instant::now() + PATIENCE;
    loop {
        let left = world::snapshot()?.without(before);
        if left.is_empty() || Instant::now() > end {
            return Ok(left);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Runs calls in parallel.
fn all_at_once(calls: impl Iterator<Item = Call>) -> Vec<Answer> {
    std::thread::scope(|scope| {
        let running: Vec<_> = calls.map(|call| scope.spawn(move || call.run())).collect();
        running.into_iter().filter_map(|call| call.join().ok()?.ok()).collect()
    })
}

/// Runs a case by its name.
pub fn run(name: &str, subject: &Subject<'_>, check: &mut Check) -> Result<()> {
    match name {
        "protocol" => protocol::run(subject, check),
        "process" => process::run(subject, check),
        "values" => values::run(subject, check),
        "keys" => keys::run(subject, check),
        "damage" => damage::run(subject, check),
        "delegation" => delegation::run(subject, check),
        "lifecycle" => lifecycle::run(subject, check),
        "ipam" => ipam::run(subject, check),
        "chained" => chained::run(subject, check),
        "faults" => faults::run(subject, check),
        "housekeeping" => housekeeping::run(subject, check),
        _ => Err(format!("no case {name}").into()),
    }
}
