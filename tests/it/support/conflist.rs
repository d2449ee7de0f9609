//! Calls of the plugins of a list in the order and with the input of libcni, each in a process of
//! its own.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::support::node::{Call, Node, Outcome};

/// A list of plugins, whose executables are in one directory.
#[derive(Clone)]
pub(crate) struct Conflist<'n> {
    pub(crate) node: &'n Node,
    pub(crate) directory: PathBuf,
    /// `cniVersion`, `name` and `plugins`.
    pub(crate) conf: Value,
}

/// What identifies an attachment, and the capability arguments of the runtime.
#[derive(Clone, Debug)]
pub(crate) struct Attached {
    pub(crate) id: String,
    pub(crate) ifname: String,
    pub(crate) netns: String,
    pub(crate) runtime: Value,
}

impl Attached {
    /// The interface `eth0`, without capability arguments.
    pub(crate) fn new(id: &str, netns: &str) -> Attached {
        let (id, netns) = (id.to_owned(), netns.to_owned());
        Attached { id, netns, ifname: "eth0".to_owned(), runtime: json!({}) }
    }
}

/// A call that failed; a runtime calls no further plugin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failed {
    pub(crate) plugin: String,
    pub(crate) code: Option<u64>,
    pub(crate) msg: String,
}

impl<'n> Conflist<'n> {
    /// A list whose plugins are the executable under test.
    pub(crate) fn new(node: &'n Node, conf: Value) -> Conflist<'n> {
        Conflist { node, directory: node.bin(), conf }
    }

    /// The types of the plugins, in the order of ADD.
    pub(crate) fn types(&self) -> Vec<&str> {
        let plugins = self.conf["plugins"].as_array().unwrap().iter();
        plugins.map(|plugin| plugin["type"].as_str().unwrap()).collect()
    }

    /// One plugin's call for an attachment.
    pub(crate) fn call(&self, verb: &str, at: &Attached, nth: usize, prev: Option<&Value>) -> Call {
        let mut conf = self.conf["plugins"][nth].clone();
        for key in ["cniVersion", "name"] {
            conf[key] = self.conf[key].clone();
        }
        for (capability, used) in conf["capabilities"].clone().as_object().into_iter().flatten() {
            if *used == json!(true) && !at.runtime[capability].is_null() {
                conf["runtimeConfig"][capability] = at.runtime[capability].clone();
            }
        }
        if let Some(prev) = prev {
            conf["prevResult"] = prev.clone();
        }
        let plugin = conf["type"].as_str().unwrap().to_owned();
        let directory = self.directory.display().to_string();
        let call = self.node.call(&plugin, verb).program(self.directory.join(&plugin));
        call.env("CNI_PATH", &directory).conf(&conf).id(&at.id).ifname(&at.ifname).netns(&at.netns)
    }

    /// ADD of all plugins; the result of the last.
    pub(crate) fn add(&self, at: &Attached) -> Result<Value, Failed> {
        let mut prev = None;
        for (nth, plugin) in self.types().into_iter().enumerate() {
            let outcome = self.call("ADD", at, nth, prev.as_ref()).run();
            prev = Some(succeeded(plugin, &outcome)?);
        }
        Ok(prev.unwrap_or_default())
    }

    /// CHECK of all plugins until one fails.
    pub(crate) fn check(&self, at: &Attached, result: &Value) -> Result<(), Failed> {
        self.failures_of_check(at, result).next().map_or(Ok(()), Err)
    }

    /// CHECK of all plugins, also of those behind one that fails.
    pub(crate) fn failures_of_check(
        &self,
        at: &Attached,
        result: &Value,
    ) -> impl Iterator<Item = Failed> {
        self.types().into_iter().enumerate().filter_map(move |(nth, plugin)| {
            succeeded(plugin, &self.call("CHECK", at, nth, Some(result)).run()).err()
        })
    }

    /// DEL of all plugins, the last first.
    pub(crate) fn del(&self, at: &Attached, result: Option<&Value>) -> Result<(), Failed> {
        self.types().into_iter().enumerate().rev().try_for_each(|(nth, plugin)| {
            succeeded(plugin, &self.call("DEL", at, nth, result).run()).map(drop)
        })
    }

    /// GC of all plugins with these valid attachments. A runtime has called DEL for the others
    /// before.
    pub(crate) fn gc(&self, valid: &[Attached]) -> Result<(), Failed> {
        let listed = |at: &Attached| json!({"containerID": at.id, "ifname": at.ifname});
        let listed: Vec<Value> = valid.iter().map(listed).collect();
        let mut list = self.clone();
        list.conf["cniVersion"] = json!("1.1.0");
        for plugin in list.conf["plugins"].as_array_mut().unwrap() {
            plugin["cni.dev/valid-attachments"] = json!(listed);
        }
        let nobody = Attached::new("", "");
        list.types().into_iter().enumerate().try_for_each(|(nth, plugin)| {
            let call = ["CNI_CONTAINERID", "CNI_IFNAME", "CNI_NETNS"];
            let call = call.into_iter().fold(list.call("GC", &nobody, nth, None), Call::without);
            succeeded(plugin, &call.run()).map(drop)
        })
    }
}

/// The printed result; null if nothing was printed.
fn succeeded(plugin: &str, outcome: &Outcome) -> Result<Value, Failed> {
    let printed: Value = serde_json::from_str(&outcome.stdout).unwrap_or_default();
    if outcome.status == Some(0) {
        return Ok(printed);
    }
    let text = printed["msg"].as_str().unwrap_or(&outcome.stderr).to_owned();
    Err(Failed { plugin: plugin.to_owned(), code: printed["code"].as_u64(), msg: text })
}
