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
//! | `faults.rs` | plugins that are killed, full disks, crowds |

pub mod chained;
pub mod faults;
pub mod housekeeping;
pub mod ipam;
pub mod lifecycle;
pub mod protocol;
pub mod results;

use std::path::{Path, PathBuf};

use serde_json::Value;

use super::call::{Answer, Call};
use super::check::Check;
use super::profiles::Kind;
use super::world::{Netns, Result, World};

/// What a case is about.
#[derive(Debug)]
pub struct Subject<'a> {
    pub kind: &'a Kind,
    pub version: &'a str,
    /// The folder of the plugins.
    pub folder: &'a Path,
    pub conf: Value,
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

/// For comparing versions: 1.0.0 is 10000.
pub fn number(version: &str) -> u32 {
    version.split('.').fold(0, |sum, part| sum * 100 + part.parse::<u32>().unwrap_or_default())
}

/// A case by its name: the hidden option of a child process.
pub fn run(name: &str, subject: &Subject<'_>, world: &World, check: &mut Check) -> Result<()> {
    match name {
        "protocol" => protocol::run(subject, check),
        "lifecycle" => lifecycle::run(subject, check),
        "ipam" => ipam::run(subject, check),
        "chained" => chained::run(subject, world, check),
        "faults" => faults::run(subject, check),
        "housekeeping" => housekeeping::run(subject, check),
        _ => Err(format!("no case {name}")),
    }
}
