//! Decodes and checks a call (names, version, namespace, configuration, `prevResult`) and calls the
//! plugin's method.

use super::call::{
    Applet, AppletKind, AppletMain, BuiltinPlugin, ConfigRemarks, PluginCall, PluginCaller,
    PluginFunction, PluginService,
};
use super::context::CallContext;
use super::plugin::{AddRequest, CheckRequest, ContainerSandbox, DelRequest, GcRequest, Plugin};
use super::reclaim;
use super::rollback::Rollback;
use crate::attachment::{AttachmentId, forget_attachment};
use crate::files::lock::FileLock;
use crate::netfilter::localhost;
use crate::netns::Netns;
use crate::repairs::RepairFindings;
use crate::stderr;
use cni::error::{Error, ErrorCode, Result};
use cni::plugin::{
    CallEnvironment, CniVerb, DecodedRequest, no_prev_result_warning, own_namespace_error,
};
use cni::{CniResult, ContainerId, InterfaceName, SpecVersion};

impl Applet {
    pub const fn for_plugin<P: Plugin>(kind: AppletKind) -> Applet {
        Applet::for_plugin_with_services::<P>(kind, &[])
    }

    pub const fn for_plugin_with_services<P: Plugin>(
        kind: AppletKind,
        services: &'static [PluginService],
    ) -> Applet {
        let plugin = BuiltinPlugin {
            kind,
            versions: P::VERSIONS,
            connects: P::CONNECTS,
            run: dispatch_call::<P>,
            repair: repair_call::<P>,
            keys: P::keys,
            examine: examine_call::<P>,
            services,
        };
        Applet { name: P::NAME, kind, about: P::ABOUT, main: AppletMain::Plugin(plugin) }
    }
}

/// Runs `P` for a call whose environment was checked ([`CallEnvironment::require_variables`]). The
/// result is within the limits of the configuration's version.
///
/// The compiler generates this function for each plugin, so the parts that are the same for all
/// plugins are in functions without the type parameter.
fn dispatch_call<P: Plugin>(call: &PluginCall<'_>) -> Result<Option<CniResult>> {
    let cx = &prepare_call(call, P::VERSIONS)?;
    let conf = cx.decode_keys()?;
    let leaves_record = || P::OUTLIVES_ITS_CONTAINER || cx.has_mac_lease(P::NAME);
    match cx.verb {
        CniVerb::Add => {
            let req = begin_add(cx, P::CONNECTS)?;
            let result = P::add(cx, &conf, &req)?;
            let undo = P::UNDO_IF_UNREPRESENTABLE.then_some(dispatch_call::<P> as PluginFunction);
            return end_add(cx, P::NAME, &req, result, undo).map(Some);
        }
        CniVerb::Check => P::check(cx, &conf, &check_request(cx)?)?,
        CniVerb::Del => {
            let (req, trouble) = begin_del(cx, P::CONNECTS)?;
            P::del(cx, &conf, &req)?;
            if leaves_record() && !call.is_collected() {
                forget_attachment(AttachmentId::new(&cx.net.name, &req.id, &req.ifname), P::NAME)?;
            }
            trouble?;
        }
        CniVerb::Gc => {
            let req = begin_gc(cx, P::NAME, P::CONNECTS)?;
            match &req {
                Some(req) => P::gc(cx, &conf, req)?,
                None => P::gc_unlisted(cx, &conf)?,
            }
            if leaves_record() {
                reclaim::collect_garbage(P::NAME, &cx.net.name, req.as_ref())?;
            }
        }
        CniVerb::Status => P::status(cx, &conf)?,
        CniVerb::Version => {}
    }
    Ok(None)
}

/// Examines the configuration of a call, for `cnibox lint`.
fn examine_call<P: Plugin>(call: &PluginCall<'_>, remarks: &mut ConfigRemarks) -> Result<()> {
    let cx = prepare_call(call, P::VERSIONS)?;
    P::examine(&cx, &cx.decode_keys()?, remarks)
}

/// Repairs the attachment of a call whose environment was checked.
fn repair_call<P: Plugin>(call: &PluginCall<'_>, repairs: &mut RepairFindings) -> Result<()> {
    if !P::REPAIRS {
        return Ok(());
    }
    let cx = prepare_call(call, P::VERSIONS)?;
    let conf = cx.decode_keys()?;
    let req = check_request(&cx)?;
    refuse_own_namespace(&call.env, req.sandbox.open_netns()?)?;
    P::repair(&cx, &conf, &req, repairs)
}

const UNLISTED: &str = "GC without \"cni.dev/valid-attachments\" releases nothing: an absent list \
                        says nothing about what is valid";

/// Decodes and checks the part of a call that is the same for all plugins.
fn prepare_call<'a>(
    call: &'a PluginCall<'a>,
    supported: &[SpecVersion],
) -> Result<CallContext<'a>> {
    let request =
        DecodedRequest::decode(&call.env, call.stdin, supported, &|text| call.warn_once(text))?;
    stderr::set_network(request.config.name.as_str());
    Ok(CallContext::new(call, request))
}

/// The request of an ADD. For a plugin that `connects`, what an earlier container of this name left
/// is removed.
fn begin_add(cx: &CallContext<'_>, connects: bool) -> Result<AddRequest> {
    let env = &cx.call.env;
    let sandbox = ContainerSandbox::at_path(&env.netns);
    if cx.call.caller == PluginCaller::Runtime
        && let Ok(netns) = sandbox.open_netns()
    {
        refuse_own_namespace(env, netns)?;
    }
    let (id, ifname) = parse_names(env)?;
    let req = AddRequest { id, sandbox, ifname, prev: cx.net.prev_result(cx.version, None)? };
    if connects {
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        if !cx.call.has_turn(owner) {
            cx.call.turn.take_for_add(owner)?;
            cx.end_former_instance(owner, &req);
        }
        restore_protection(cx);
    }
    Ok(req)
}

/// The result of a completed ADD in the version of the request; `run` undoes the ADD if that
/// version cannot represent it.
fn end_add(
    cx: &CallContext<'_>,
    plugin: &str,
    req: &AddRequest,
    result: CniResult,
    run: Option<PluginFunction>,
) -> Result<CniResult> {
    let mut undo = Rollback::new();
    cx.record_if_leased(plugin, req, &result, &mut undo);
    let converted = result.convert_to(cx.version).inspect_err(|_| {
        if let Some(run) = run {
            roll_back_add(cx.call, run);
        }
    })?;
    undo.commit();
    Ok(converted)
}

/// Rolls back an ADD whose result is lost.
pub(super) fn roll_back_add(call: &PluginCall<'_>, run: PluginFunction) {
    let del = PluginCall { env: call.env.with_verb(CniVerb::Del), ..call.clone() };
    if let Err(error) = run(&del) {
        warn!("could not undo an ADD without a result: {error}");
    }
}

/// The request of a GC; `None` without a list of valid attachments.
fn begin_gc(
    cx: &CallContext<'_>,
    plugin: &'static str,
    connects: bool,
) -> Result<Option<GcRequest>> {
    if connects {
        FileLock::remove_stale_locks();
    }
    let valid = cx.net.valid_attachments()?;
    if valid.is_none() {
        warn!("{}", UNLISTED);
    }
    valid.map(|valid| cx.gc_request(plugin, valid)).transpose()
}

/// Restores protections of the host that a flush of rules may have removed, also if the plugin has
/// no rules: containers would reach the host's loopback addresses until a plugin with rules runs.
fn restore_protection(cx: &CallContext<'_>) {
    if cx.call.caller == PluginCaller::Runtime
        && let Err(error) = localhost::restore_if_flushed(cx.packet_filter())
    {
        warn!("containers may reach 127.0.0.0/8 of the host: {error}");
    }
}

fn check_request(cx: &CallContext<'_>) -> Result<CheckRequest> {
    let sandbox = ContainerSandbox::at_path(&cx.call.env.netns);
    let (id, ifname) = parse_names(&cx.call.env)?;
    Ok(CheckRequest { id, sandbox, ifname, prev: cx.net.prev_result(cx.version, None)? })
}

/// The request of a DEL. A plugin that `connects` takes the attachment's lock. A namespace that no
/// longer exists is not an error. A namespace that cannot be opened is treated as absent and
/// reported at the end, so that no address leaks.
fn begin_del(cx: &CallContext<'_>, connects: bool) -> Result<(DelRequest, Result<()>)> {
    let (id, ifname) = parse_names(&cx.call.env)?;
    let (netns, trouble) = match usable_namespace(cx.call) {
        Ok(netns) => (netns, Ok(())),
        Err(error) => (None, Err(error)),
    };
    let prev = cx
        .net
        .prev_result(cx.version, Some(&|error| cx.call.warn_once(no_prev_result_warning(error))))?;
    let owner = AttachmentId::new(&cx.net.name, &id, &ifname);
    if connects && !cx.call.has_turn(owner) {
        cx.call.turn.take_for_del(owner);
    }
    Ok((DelRequest { id, netns, ifname, prev }, trouble))
}

fn usable_namespace(call: &PluginCall<'_>) -> Result<Option<Netns>> {
    if call.env.netns.is_empty() {
        return Ok(None);
    }
    match Netns::open(&call.env.netns) {
        Ok(netns) if matches!(call.caller, PluginCaller::Plugin(_)) => Ok(Some(netns)),
        Ok(netns) if is_own_namespace(&call.env, &netns)? => {
            let path = &call.env.netns;
            warn!("{path} is this plugin's own namespace: the container's namespace is gone");
            Ok(None)
        }
        Ok(netns) => Ok(Some(netns)),
        Err(error) if error.is_gone() => {
            debug!("{error}");
            Ok(None)
        }
        Err(error) => Err(Error::from(error).with_code(ErrorCode::INVALID_NETNS)),
    }
}

fn parse_names(env: &CallEnvironment) -> Result<(ContainerId, InterfaceName)> {
    Ok((ContainerId::parse(&env.container_id)?, InterfaceName::parse(&env.ifname)?))
}

/// If the process in a path such as `/proc/4711/ns/net` has ended, its id may belong to a process
/// of the host, whose interfaces must not be changed.
fn is_own_namespace(env: &CallEnvironment, netns: &Netns) -> Result<bool> {
    if env.overrides_netns_check() {
        return Ok(false);
    }
    Netns::open_current().and_then(|own| own.is_same_as(netns)).map_err(|e| {
        Error::from(e).context("get plugin's netns failed").with_code(ErrorCode::INVALID_NETNS)
    })
}

fn refuse_own_namespace(env: &CallEnvironment, netns: &Netns) -> Result<()> {
    if !is_own_namespace(env, netns)? {
        return Ok(());
    }
    Err(own_namespace_error())
}
