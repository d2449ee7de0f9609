//! Calls another plugin: as a function if it is in this executable, else as a process.
//!
//! The plugin is always looked up on `CNI_PATH`, so that a foreign `host-local` earlier in the path is used. Both ways have
//! the same outcome: the result passes through the version's layout, errors keep their code and message.

use std::cell::OnceCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::call::{Call, Caller, Env, Kind, OwnPlugin, RunFn, Verb};
use super::context::Cx;
use super::reclaim;
use super::rollback::{Failures, Rollback};
use crate::attachment::Owner;
use crate::cni::{CniResult, SpecVersion};
use crate::error::{Code, Error, Result};
use crate::options::nearest;
use crate::repairs::Repairs;
use crate::{invoke, log, trace};

/// A plugin found on `CNI_PATH`.
#[derive(Clone, Debug)]
pub struct Delegate<'a> {
    cx: &'a Cx<'a>,
    name: &'a str,
    program: Program,
    conf: &'a [u8],
    env: Env,
}

#[derive(Clone, Debug)]
enum Program {
    Own(OwnPlugin),
    Foreign(PathBuf),
}

impl<'a> Cx<'a> {
    /// Finds the plugin called `name` on `CNI_PATH`.
    pub fn delegate(&'a self, name: &'a str) -> Result<Delegate<'a>> {
        let own = self.call.table.plugin(name);
        let found = invoke::find(name, &invoke::split_path(&self.call.env.path));
        let program = match (found, own) {
            (Ok(path), Some(own)) if invoke::is_own_executable(&path) => Program::Own(own),
            (Ok(path), _) => Program::Foreign(path),
            // The link is gone; what it made is not.
            (Err(_), Some(own)) if self.removes() => Program::Own(own),
            (Err(error), _) => return Err(error),
        };
        let Call { stdin, env, .. } = self.call;
        Ok(Delegate { cx: self, name, program, conf: stdin, env: env.clone() })
    }

    /// Whether an IPAM plugin is configured.
    pub fn has_ipam(&self) -> bool {
        !self.net.ipam_type.is_empty()
    }

    /// Calls the IPAM plugin if one is configured: `cx.if_ipam(Cx::ipam_check)`.
    pub fn if_ipam(&'a self, call: impl FnOnce(&'a Cx<'a>) -> Result<()>) -> Result<()> {
        if self.has_ipam() { call(self) } else { Ok(()) }
    }

    /// The configuration's IPAM plugin. An interface plugin is refused, whichever executable has its name: it would call
    /// its IPAM plugin in turn, without end.
    pub fn ipam(&'a self) -> Result<Delegate<'a>> {
        let name = &self.net.ipam_type;
        match self.call.table.plugin(name) {
            Some(OwnPlugin { kind: kind @ (Kind::Interface | Kind::Chained), .. }) => {
                let msg = format!("invalid ipam type \"{name}\": it is a plugin of kind {kind}");
                Err(Error::config(msg)
                    .with_details("host-local, static and dhcp are plugins that manage addresses"))
            }
            _ => self.delegate(name),
        }
    }

    /// Requests addresses from the configuration's IPAM plugin and registers their release, which is also run if the IPAM
    /// plugin itself fails (spec, section 4, "Delegated plugins"): after the links with the addresses are deleted, or
    /// before, if it [needs the link](Cx::ipam_needs_link). The result is of the newest version.
    pub fn ipam_add(&'a self, undo: &mut Rollback<'a>) -> Result<CniResult> {
        let ipam = self.ipam()?;
        let releaser = ipam.clone();
        let add_error: Rc<OnceCell<String>> = Rc::default();
        let del_error = Rc::clone(&add_error);
        let what = "release the addresses";
        let release = move || match releaser.run(Verb::Del) {
            // DEL fails for the same reason as ADD, such as an invalid configuration: there is nothing to undo.
            Err(e) if del_error.get().is_some_and(|msg| msg == e.msg()) => Ok(()),
            done => done.map(drop),
        };
        if self.ipam_needs_link() {
            undo.push(what, release);
        } else {
            undo.push_last(what, release);
        }
        let added = ipam.run(Verb::Add).inspect_err(|e| drop(add_error.set(e.msg().to_owned())));
        let mut result = added?.unwrap_or_default();
        let Env { container_id: id, ifname, .. } = &self.call.env;
        let owner = Owner { network: self.net.name.as_str(), ifname, id };
        for ip in &result.ips {
            reclaim::address(ip.address.addr(), owner)?;
        }
        result.version = SpecVersion::NEWEST;
        if result.ips.is_empty() {
            return Err(Error::internal("IPAM plugin returned missing IP config").with_details(
                format!("\"{}\" reported no address: see its keys in \"ipam\"", ipam.name),
            ));
        }
        Ok(result)
    }

    /// Whether addresses are requested and released over the container's interface, which must exist and be up: with
    /// dhcp. All other addresses are released after the interface is deleted.
    pub fn ipam_needs_link(&self) -> bool {
        self.net.ipam_type == "dhcp"
    }

    /// Releases the attachment's addresses, whatever the configuration says now of who gave them.
    pub fn ipam_del(&'a self) -> Result<()> {
        let Env { container_id: id, ifname, .. } = &self.call.env;
        let owner = Owner { network: self.net.name.as_str(), ifname, id };
        let mut failures = Failures::new();
        failures.keep(self.if_ipam(|cx| match cx.ipam() {
            Ok(ipam) => ipam.run(Verb::Del).map(drop),
            // ADD has called no such plugin.
            Err(error) if cx.is_wrong_ipam() => {
                log::warn(format_args!("no address is released by \"ipam\": {error}"));
                Ok(())
            }
            Err(error) => Err(error),
        }));
        if self.net.ipam_type != reclaim::LEASER {
            failures.keep(reclaim::leases_of(owner, &[]));
        }
        failures.into_result()
    }

    /// Whether `ipam.type` is a plugin of another kind, or the name of an IPAM plugin of this executable with a mistake.
    fn is_wrong_ipam(&self) -> bool {
        let (table, name) = (self.call.table, &self.net.ipam_type);
        let kind = |name: &str| table.plugin(name).map(|plugin| plugin.kind);
        let meant = || nearest(name, table.plugins()).and_then(kind);
        kind(name).or_else(meant).is_some()
    }

    pub fn ipam_check(&'a self) -> Result<()> {
        self.ipam()?.run(Verb::Check).map(drop)
    }

    /// STATUS of the IPAM plugin.
    pub fn ipam_status(&'a self) -> Result<()> {
        self.ipam()?.run(Verb::Status).map(drop)
    }
}

impl<'a> Delegate<'a> {
    /// The same plugin with another configuration on standard input.
    #[must_use]
    pub fn with_conf(self, conf: &'a [u8]) -> Self {
        Delegate { conf, ..self }
    }

    /// The same plugin for another attachment; `netns` is empty if the namespace no longer exists.
    #[must_use]
    pub fn for_attachment(mut self, container_id: &str, ifname: &str, netns: &str) -> Self {
        container_id.clone_into(&mut self.env.container_id);
        ifname.clone_into(&mut self.env.ifname);
        netns.clone_into(&mut self.env.netns);
        self
    }

    /// Runs the plugin with this call's environment and standard input and the given verb. The details of its errors name
    /// the plugin, except for errors about the configuration, whose details name a key.
    pub fn run(&self, verb: Verb) -> Result<Option<CniResult>> {
        let span = trace::span("delegate");
        span.text("cni.plugin", || self.name);
        span.text("cni.command", || verb.as_str());
        let outcome = span.end_with(match &self.program {
            Program::Own(plugin) => self.call(plugin.run, verb),
            Program::Foreign(path) => self.exec(path, verb),
        });
        outcome.map_err(|e| match e.code() {
            Code::INVALID_CONFIG => e,
            _ => e.context(format!("{} of the delegate \"{}\"", verb.as_str(), self.name)),
        })
    }

    fn call(&self, run: RunFn, verb: Verb) -> Result<Option<CniResult>> {
        run(&self.request(verb)).map_err(|e| Error::foreign(e.code(), e.msg(), e.details()))
    }

    fn request(&self, verb: Verb) -> Call<'_> {
        let env = self.env.with_verb(verb);
        Call {
            env,
            stdin: self.conf,
            table: self.cx.call.table,
            caller: Caller::Plugin(self.cx.end()),
        }
    }

    /// Repairs the attachment, if the plugin is in this executable; foreign plugins have no such function.
    pub fn repair(&self, repairs: &mut Repairs) -> Result<()> {
        match &self.program {
            Program::Own(plugin) => (plugin.repair)(&self.request(Verb::Add), repairs),
            Program::Foreign(_) => Ok(()),
        }
    }

    fn exec(&self, path: &Path, verb: Verb) -> Result<Option<CniResult>> {
        let env = self.env.with_verb(verb);
        // The process inherits the other variables; a variable that is unset in both environments stays unset.
        let inherited = self.cx.call.env.vars();
        let given = env.vars().into_iter().zip(inherited);
        let given = given.filter(|((_, value), (_, old))| !value.is_empty() || !old.is_empty());
        let given = given.map(|(given, _)| given);
        let env = given.map(|(key, value)| (key, value.to_owned())).collect();
        let exec = invoke::Exec { path, env, stdin: self.conf, deadline: None };
        let stdout = invoke::exec(&exec)?;
        if verb != Verb::Add {
            return Ok(None);
        }
        invoke::read_result(&stdout, self.cx.version).map(Some)
    }
}
