//! The cases: what is asked of a plugin, in which order.
//!
//! | file | |
//! | --- | --- |
//! | `protocol.rs` | VERSION, environment, stdin, errors: of every plugin |
//! | `results.rs` | the shape of results, by version |
//! | `lifecycle.rs` | plugins that make an interface: ADD, CHECK, DEL against the kernel |
//! | `ipam.rs` | plugins that give out addresses |
//! | `chained.rs` | plugins that change what others made |
//! | `housekeeping.rs` | GC and STATUS |
//! | `delegation.rs` | what a plugin asks of others: IPAM, and flannel's delegate |
//! | `process.rs` | the surroundings of the process, odd but right calls |
//! | `keys.rs` | keys of configurations: what each does |
//! | `values.rs` | values that must be refused |
//! | `damage.rs` | what CHECK has to see |
//! | `faults.rs` | plugins that are killed, full disks, crowds |

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

use std::cell::Cell;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::call::{Answer, Call};
use super::check::Check;
use super::profiles::{Kind, Profile, ipam};
use super::world::{Netns, Result, World};

/// What a case is about.
#[derive(Debug)]
pub struct Subject<'a> {
    pub kind: &'a Kind,
    pub version: &'a str,
    /// The folder of the plugins.
    pub folder: &'a Path,
    pub conf: Value,
    /// Only assertions whose id contains this are wanted.
    pub only: Option<&'a str>,
}

/// An attachment: a container and its interface.
#[derive(Clone, Debug)]
pub struct Attachment {
    pub id: &'static str,
    pub netns: Netns,
    pub ifname: &'static str,
}

impl Subject<'_> {
    /// The plugin's file.
    pub fn plugin(&self) -> PathBuf {
        self.folder.join(self.kind.name)
    }

    /// Whether the verdict of an assertion is wanted.
    pub fn asks(&self, id: &str) -> bool {
        self.only.is_none_or(|only| id.contains(only))
    }

    /// Whether the version is this one or a later one.
    pub fn since(&self, version: &str) -> bool {
        number(self.version) >= number(version)
    }

    /// A call for an attachment, with the result of its ADD where the version sends it.
    pub fn call(&self, verb: &str, at: &Attachment, prev: Option<&Value>) -> Call {
        let mut conf = self.conf.clone();
        if let Some(prev) = prev {
            conf["prevResult"] = prev.clone();
        }
        Call::new(&self.plugin(), verb, &conf)
            .env("CNI_CONTAINERID", at.id)
            .env("CNI_NETNS", &at.netns.path())
            .env("CNI_IFNAME", at.ifname)
    }

    /// CHECK and DEL get the result of ADD from 0.4.0 on.
    pub fn prev<'v>(&self, result: Option<&'v Value>) -> Option<&'v Value> {
        result.filter(|_| self.since("0.4.0"))
    }

    fn run(&self, verb: &str, at: &Attachment, prev: Option<&Value>) -> Result<Answer> {
        self.call(verb, at, prev).run()
    }
}

/// Containers for the calls of a plugin, one after the other.
pub struct Containers<'a> {
    pub subject: &'a Subject<'a>,
    made: Cell<u32>,
}

/// A container, and what plugins before this one made in it.
#[derive(Debug)]
pub struct Container {
    pub at: Attachment,
    pub prev: Option<Value>,
}

impl<'a> Containers<'a> {
    pub fn of(subject: &'a Subject<'a>) -> Containers<'a> {
        Containers { subject, made: Cell::new(0) }
    }

    /// A new one, by bridge of the same folder if the plugin is a chained one.
    pub fn make(&self) -> Result<Container> {
        self.made.set(self.made.get() + 1);
        let netns = Netns::new(&format!("container-{}", self.made.get()))?;
        let case = lifecycle::Case { subject: self.subject };
        let at = Attachment { id: "sanity-1", netns, ifname: case.ifname() };
        case.prepare()?;
        if self.subject.kind.profile != Profile::Chained {
            return Ok(Container { at, prev: None });
        }
        let made = bridge(self.subject, "ADD", &at, None)?;
        let prev = made.json.clone().filter(|_| made.succeeded());
        let prev = prev.ok_or_else(|| format!("bridge, which goes first: {}", made.said()))?;
        Ok(Container { at, prev: Some(prev) })
    }

    /// A call of the plugin with this configuration.
    pub fn call(&self, verb: &str, conf: &Value, of: &Container) -> Call {
        let subject = Subject { conf: conf.clone(), ..*self.subject };
        subject.call(verb, &of.at, of.prev.as_ref())
    }

    /// DEL of all, and the end of the namespace.
    pub fn end(&self, conf: &Value, of: &Container, result: Option<&Value>) -> Result<Answer> {
        let subject = Subject { conf: conf.clone(), ..*self.subject };
        let deleted = subject.run("DEL", &of.at, subject.prev(result))?;
        if let Some(prev) = &of.prev {
            bridge(self.subject, "DEL", &of.at, subject.prev(Some(prev)))?;
        }
        of.at.netns.remove()?;
        Ok(deleted)
    }
}

/// A call of bridge, which goes before plugins that are chained.
pub fn bridge(
    subject: &Subject<'_>,
    verb: &str,
    at: &Attachment,
    prev: Option<&Value>,
) -> Result<Answer> {
    let conf = json!({"cniVersion": subject.version, "name": "sanity", "type": "bridge", "bridge": "sanity0",
        "isGateway": true, "ipMasq": true, "hairpinMode": true, "ipam": ipam(subject.folder, "bridge")});
    let kind = Kind { name: "bridge", ..*subject.kind };
    Subject { kind: &kind, conf, ..*subject }.run(verb, at, prev)
}

/// For comparing versions: 1.0.0 is 10000.
pub fn number(version: &str) -> u32 {
    version.split('.').fold(0, |sum, part| sum * 100 + part.parse::<u32>().unwrap_or_default())
}

/// A case by its name: the hidden option of a child process.
pub fn run(name: &str, subject: &Subject<'_>, world: &World, check: &mut Check) -> Result<()> {
    match name {
        "protocol" => protocol::run(subject, check),
        "process" => process::run(subject, check),
        "values" => values::run(subject, check),
        "keys" => keys::run(subject, world, check),
        "damage" => damage::run(subject, world, check),
        "delegation" => delegation::run(subject, check),
        "lifecycle" => lifecycle::run(subject, check),
        "ipam" => ipam::run(subject, check),
        "chained" => chained::run(subject, world, check),
        "faults" => faults::run(subject, check),
        "housekeeping" => housekeeping::run(subject, check),
        _ => Err(format!("no case {name}")),
    }
}
