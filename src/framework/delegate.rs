//! Calls another plugin: as a function if it is in this executable, else as a process.
//!
//! The plugin is always looked up on `CNI_PATH`, so that a foreign `host-local` earlier in the path
//! is used. Both ways have the same outcome: the result passes through the version's layout, errors
//! keep their code and message.

use std::cell::OnceCell;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::addressing::omit_default_routes;
use super::call::{
    AppletKind, BuiltinPlugin, PluginCall, PluginCaller, PluginFunction, TURN_VARIABLE,
};
use super::context::CallContext;
use super::reclaim;
use super::rollback::{Failures, Rollback};
use super::turn::AttachmentTurn;
use crate::attachment::{AttachmentId, AttachmentRecord};
use crate::invoke::{self, TracedExecutor};
use crate::netns::NetnsIdentity;
use crate::repairs::RepairFindings;
use crate::trace;
use cni::error::{Error, ErrorCode, Result};
use cni::exec;
use cni::exec::PluginExecutor;
use cni::names::nearest_word;
use cni::plugin::{CallEnvironment, CniVerb};
use cni::{CniResult, SpecVersion};

/// A plugin found on `CNI_PATH`.
#[derive(Clone, Debug)]
pub struct DelegatePlugin<'a> {
    cx: &'a CallContext<'a>,
    name: &'a str,
    program: DelegateProgram,
    conf: &'a [u8],
    env: CallEnvironment,
}

#[derive(Clone, Debug)]
enum DelegateProgram {
    Own(BuiltinPlugin),
    Foreign(PathBuf),
}

impl<'a> CallContext<'a> {
    /// Finds the plugin called `name` on `CNI_PATH`.
    pub fn find_delegate(&'a self, name: &'a str) -> Result<DelegatePlugin<'a>> {
        let own = self.call.table.find_plugin(name);
        let found = exec::find_plugin(name, &exec::split_path(&self.call.env.path));
        let program = match (found, own) {
            (Ok(path), Some(own)) if invoke::is_own_executable(&path) => DelegateProgram::Own(own),
            (Ok(path), _) => DelegateProgram::Foreign(path),
            // The link is gone; the state that the plugin created is not.
            (Err(_), Some(own)) if self.is_removal() => DelegateProgram::Own(own),
            (Err(error), _) => return Err(error),
        };
        let PluginCall { stdin, env, .. } = self.call;
        Ok(DelegatePlugin { cx: self, name, program, conf: stdin, env: env.clone() })
    }

    /// The attachment of the call, with the names of the environment.
    fn attachment_id(&self) -> AttachmentId<'_> {
        let CallEnvironment { container_id: id, ifname, .. } = &self.call.env;
        AttachmentId { network: self.net.name.as_str(), ifname, id }
    }

    /// Whether an IPAM plugin is configured.
    pub fn has_ipam(&self) -> bool {
        !self.net.ipam_type.is_empty()
    }

    /// Calls the IPAM plugin if one is configured: `cx.if_ipam(CallContext::ipam_check)`.
    pub fn if_ipam(&'a self, call: impl FnOnce(&'a CallContext<'a>) -> Result<()>) -> Result<()> {
        if self.has_ipam() { call(self) } else { Ok(()) }
    }

    /// The configuration's IPAM plugin. An interface plugin is refused, whichever executable has
    /// its name: it would call its IPAM plugin, which is itself, without end.
    pub fn ipam_plugin(&'a self) -> Result<DelegatePlugin<'a>> {
        let name = &self.net.ipam_type;
        match self.call.table.find_plugin(name) {
            Some(BuiltinPlugin {
                kind: kind @ (AppletKind::Interface | AppletKind::Chained),
                ..
            }) => {
                let msg = format!("invalid ipam type \"{name}\": it is a plugin of kind {kind}");
                Err(Error::config(msg)
                    .with_details("host-local, static and dhcp are plugins that manage addresses"))
            }
            _ => self.find_delegate(name),
        }
    }

    /// Requests addresses from the configuration's IPAM plugin and registers their release: after
    /// the links with the addresses are deleted, or before, if it [needs the
    /// link](CallContext::ipam_needs_link). The result is of the newest version; without default
    /// routes, if `default_route` is false.
    pub fn ipam_add(
        &'a self,
        undo: &mut Rollback<'a>,
        default_route: Option<bool>,
    ) -> Result<CniResult> {
        let ipam = self.ipam_plugin()?;
        let releaser = ipam.clone();
        let outcome: Rc<OnceCell<Result<Vec<IpAddr>>>> = Rc::default();
        let known = Rc::clone(&outcome);
        let what = "release the addresses";
        let release = move || self.release_added(&releaser, known.get());
        if self.ipam_needs_link() {
            undo.add_step(what, release);
        } else {
            undo.add_last_step(what, release);
        }
        let added = ipam.run_verb(CniVerb::Add).map(Option::unwrap_or_default);
        drop(
            outcome.set(
                added
                    .as_ref()
                    .map(|result| result.ips.iter().map(|ip| ip.address.addr()).collect())
                    .map_err(Clone::clone),
            ),
        );
        let (mut result, owner) = (added?, self.attachment_id());
        for ip in &result.ips {
            reclaim::remove_ended_owners(ip.address.addr(), owner)?;
        }
        result.version = SpecVersion::NEWEST;
        omit_default_routes(&mut result, default_route);
        if result.ips.is_empty() {
            return Err(Error::internal("IPAM plugin returned missing IP config").with_details(
                format!("\"{}\" reported no address: see its keys in \"ipam\"", ipam.name),
            ));
        }
        Ok(result)
    }

    /// Rolls back an ADD of the IPAM plugin with this outcome. host-local of this executable has
    /// rolled back its own failure, and otherwise loses the addresses that this ADD has
    /// reserved. Another IPAM plugin gets a DEL, also after its failure (spec, section 4,
    /// "Delegated plugins"), unless the names are those of an earlier instance, whose addresses
    /// it would release.
    fn release_added(
        &self,
        ipam: &DelegatePlugin<'_>,
        outcome: Option<&Result<Vec<IpAddr>>>,
    ) -> Result<()> {
        let is_own_leaser =
            ipam.name == reclaim::HOST_LOCAL && matches!(ipam.program, DelegateProgram::Own(_));
        match outcome {
            Some(Ok(ips)) if is_own_leaser => {
                reclaim::release_addresses(self, self.attachment_id(), ips)
            }
            Some(Err(_)) if is_own_leaser => Ok(()),
            Some(Err(_)) | None if self.has_earlier_instance() => Ok(()),
            _ => match ipam.run_verb(CniVerb::Del) {
                // DEL fails for the same reason as ADD, such as an invalid configuration: there is
                // nothing to undo.
                Err(e) if matches!(outcome, Some(Err(add)) if add.message() == e.message()) => {
                    Ok(())
                }
                done => done.map(drop),
            },
        }
    }

    /// For a failed ADD: whether the attachment may exist in another namespace, by its record or by
    /// the label of a link on the host.
    fn has_earlier_instance(&self) -> bool {
        let (owner, netns) =
            (self.attachment_id(), NetnsIdentity::at_path(Path::new(&self.call.env.netns)));
        let record = AttachmentRecord::find_by_attachment(owner);
        let own = self.host_end().map(|end| end.index);
        let links =
            || self.host_netlink().and_then(|host| Ok(host.dump_links()?)).unwrap_or_default();
        record.is_some_and(|record| record.netns != netns && !record.is_gone())
            || links()
                .iter()
                .any(|link| owner.owns_comment(Some(&link.alias)) && Some(link.index) != own)
    }

    /// Whether addresses are requested and released through the container's interface, which must
    /// exist and be up, as with dhcp. All other addresses are released after the interface is
    /// deleted.
    pub fn ipam_needs_link(&self) -> bool {
        self.net.ipam_type == "dhcp"
    }

    /// Releases the attachment's addresses, also if the configuration has got another IPAM plugin
    /// since ADD.
    pub fn ipam_del(&'a self) -> Result<()> {
        let mut failures = Failures::new();
        failures.keep_error(self.if_ipam(|cx| match cx.ipam_plugin() {
            Ok(ipam) => ipam.run_verb(CniVerb::Del).map(drop),
            // ADD has not called such a plugin.
            Err(error) if cx.is_wrong_ipam() => {
                warn!("no address is released by \"ipam\": {error}");
                Ok(())
            }
            Err(error) => Err(error),
        }));
        if self.net.ipam_type != reclaim::HOST_LOCAL && !self.is_collected() {
            failures.keep_error(reclaim::release_recorded_leases(self.attachment_id(), &[]));
        }
        failures.into_result()
    }

    /// Whether `ipam.type` is a plugin of another kind, or the name of an IPAM plugin of this
    /// executable with a mistake.
    fn is_wrong_ipam(&self) -> bool {
        let (table, name) = (self.call.table, &self.net.ipam_type);
        let kind = |name: &str| table.find_plugin(name).map(|plugin| plugin.kind);
        kind(name).or_else(|| nearest_word(name, table.plugin_names()).and_then(kind)).is_some()
    }

    pub fn ipam_check(&'a self) -> Result<()> {
        self.ipam_plugin()?.run_verb(CniVerb::Check).map(drop)
    }

    pub fn ipam_status(&'a self) -> Result<()> {
        self.ipam_plugin()?.run_verb(CniVerb::Status).map(drop)
    }
}

impl<'a> DelegatePlugin<'a> {
    /// The same plugin with another configuration on standard input.
    #[must_use]
    pub fn with_config(self, conf: &'a [u8]) -> Self {
        DelegatePlugin { conf, ..self }
    }

    /// The same plugin for another attachment; `netns` is empty if the namespace no longer exists.
    #[must_use]
    pub fn for_attachment(mut self, container_id: &str, ifname: &str, netns: &str) -> Self {
        container_id.clone_into(&mut self.env.container_id);
        ifname.clone_into(&mut self.env.ifname);
        netns.clone_into(&mut self.env.netns);
        self
    }

    /// Runs the plugin with this call's environment and standard input and the given verb. The
    /// details of its errors name the plugin, except for errors about the configuration, whose
    /// details name a key.
    pub fn run_verb(&self, verb: CniVerb) -> Result<Option<CniResult>> {
        let span = trace::begin_span("delegate");
        span.add_text("cni.plugin", || self.name);
        span.add_text("cni.command", || verb.as_str());
        let outcome = span.end_with(match &self.program {
            DelegateProgram::Own(plugin) => self.call_builtin(plugin.run, verb),
            DelegateProgram::Foreign(path) => self.execute_foreign(path, verb),
        });
        outcome.map_err(|e| match e.code() {
            ErrorCode::INVALID_CONFIG => e,
            _ => e.context(format!("{} of the delegate \"{}\"", verb.as_str(), self.name)),
        })
    }

    fn call_builtin(&self, run: PluginFunction, verb: CniVerb) -> Result<Option<CniResult>> {
        run(&self.plugin_call(verb))
            .map_err(|e| Error::from_other_plugin(e.code(), e.message(), e.details()))
    }

    fn plugin_call(&self, verb: CniVerb) -> PluginCall<'_> {
        let PluginCall { caller, turn, .. } = self.cx.call;
        let caller = match caller {
            PluginCaller::Lint => PluginCaller::Lint,
            PluginCaller::Collector => PluginCaller::Collector,
            PluginCaller::Runtime | PluginCaller::Plugin(_) => {
                PluginCaller::Plugin(self.cx.host_end())
            }
        };
        let turn =
            if self.is_for_same_attachment() { turn.clone() } else { AttachmentTurn::default() };
        PluginCall {
            env: self.env.with_verb(verb),
            stdin: self.conf,
            caller,
            turn,
            ..self.cx.call.clone()
        }
    }

    /// Whether the plugin is called for the attachment of this call.
    fn is_for_same_attachment(&self) -> bool {
        let call = &self.cx.call.env;
        self.env.container_id == call.container_id && self.env.ifname == call.ifname
    }

    /// Repairs the attachment, if the plugin is in this executable; foreign plugins have no such
    /// function.
    pub fn repair_attachment(&self, repairs: &mut RepairFindings) -> Result<()> {
        match &self.program {
            DelegateProgram::Own(plugin) => {
                (plugin.repair)(&self.plugin_call(CniVerb::Add), repairs)
            }
            DelegateProgram::Foreign(_) => Ok(()),
        }
    }

    fn execute_foreign(&self, path: &Path, verb: CniVerb) -> Result<Option<CniResult>> {
        let env = self.env.with_verb(verb);
        // The process inherits the other variables; a variable that is unset in both environments
        // stays unset.
        let inherited = self.cx.call.env.to_variables();
        let mut given = Vec::new();
        for ((key, value), (_, old)) in env.to_variables().into_iter().zip(inherited) {
            if !value.is_empty() || !old.is_empty() {
                given.push((key, value.to_owned()));
            }
        }
        if self.is_for_same_attachment() && self.cx.call.has_turn(self.cx.attachment_id()) {
            given.push((TURN_VARIABLE, self.cx.attachment_id().instance_id()));
        }
        let call = exec::PluginCommand { path, env: given, stdin: self.conf, deadline: None };
        let stdout = TracedExecutor.run_plugin(&call)?;
        if verb != CniVerb::Add {
            return Ok(None);
        }
        exec::read_result(&stdout, self.cx.version).map(Some)
    }
}
