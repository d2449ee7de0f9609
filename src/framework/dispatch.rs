//! Decodes and checks a call (names, version, namespace, configuration, `prevResult`) and calls the plugin's method.

use super::call::{
    Applet, AppletKind, AppletMain, BuiltinPlugin, CallEnvironment, CniVerb, ConfigRemarks, PluginCall, PluginCaller,
    PluginFunction, PluginService,
};
use super::context::{CallContext, absent_key_warning, is_removal, warn_absent_key};
use super::plugin::{AddRequest, CheckRequest, ContainerSandbox, DelRequest, GcRequest, Plugin};
use super::reclaim;
use super::rollback::Rollback;
use crate::attachment::{AttachmentId, forget_attachment};
use crate::cni::version::{nearest_supported, quoted_list};
use crate::cni::{CniResult, ContainerId, InterfaceName, NetworkConfig, SpecVersion, VersionNumber};
use crate::error::{Error, ErrorCode, Result};
use crate::files::lock::FileLock;
use crate::log;
use crate::netfilter::localhost;
use crate::netns::Netns;
use crate::repairs::RepairFindings;

impl Applet {
    /// The applet of a plugin.
    pub const fn for_plugin<P: Plugin>(kind: AppletKind) -> Applet {
        Applet::for_plugin_with_services::<P>(kind, &[])
    }

    /// The applet of a plugin with services.
    pub const fn for_plugin_with_services<P: Plugin>(kind: AppletKind, services: &'static [PluginService]) -> Applet {
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

/// Runs `P` for a call whose environment was checked ([`CallEnvironment::require_variables`]). The result is within the
/// limits of the configuration's version.
///
/// The compiler generates this function for each plugin, so the parts that are the same for all plugins are in
/// functions without the type parameter.
fn dispatch_call<P: Plugin>(call: &PluginCall<'_>) -> Result<Option<CniResult>> {
    let (verb, cx) = &prepare_call(call, P::VERSIONS)?;
    let conf = decode_config::<P>(cx)?;
    let leaves_record = || P::OUTLIVES_ITS_CONTAINER || cx.has_mac_lease(P::NAME);
    match verb {
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
    let (_, cx) = prepare_call(call, P::VERSIONS)?;
    P::examine(&cx, &decode_config::<P>(&cx)?, remarks)
}

/// Repairs the attachment of a call whose environment was checked.
fn repair_call<P: Plugin>(call: &PluginCall<'_>, repairs: &mut RepairFindings) -> Result<()> {
    if !P::REPAIRS {
        return Ok(());
    }
    let (_, cx) = prepare_call(call, P::VERSIONS)?;
    let conf = decode_config::<P>(&cx)?;
    let req = check_request(&cx)?;
    refuse_own_namespace(&call.env, req.sandbox.open_netns()?)?;
    P::repair(&cx, &conf, &req, repairs)
}

fn decode_config<P: Plugin>(cx: &CallContext<'_>) -> Result<P::Conf> {
    let json = &cx.net.json;
    let conf = if cx.is_removal() { json.decode_valid_members(&warn_absent_key) } else { json.decode() };
    conf.map_err(|e| e.context("failed to load netconf"))
}

const UNLISTED: &str = "GC without \"cni.dev/valid-attachments\" releases nothing: \
    an absent list says nothing about what is valid";

/// Decodes and checks the part of a call that is the same for all plugins.
fn prepare_call<'a>(call: &'a PluginCall<'a>, supported: &[SpecVersion]) -> Result<(CniVerb, CallContext<'a>)> {
    let command = &call.env.command;
    let verb = CniVerb::parse(command);
    let unknown = || {
        Error::new(ErrorCode::INVALID_ENVIRONMENT, format!("unknown CNI_COMMAND: {command}"))
            .with_details("the commands are ADD, CHECK, DEL, GC, STATUS and VERSION")
    };
    // The configuration is read first, as in the reference; without a valid command, the error reports both.
    let mut net = NetworkConfig::parse(call.stdin)
        .map_err(|e| if verb.is_none() { e.with_details(unknown().to_string()) } else { e })?;
    let Some(verb) = verb else { return Err(unknown()) };
    if net.json.get_present_member("plugins").is_some() {
        log::warn("the configuration is a list (\"plugins\"), but a plugin gets one entry; cnitool runs a list");
    }
    if verb == CniVerb::Del
        && let Err(error) = net.read_version()
    {
        warn_absent_key(&error);
    } else {
        net.read_version()?;
    }
    let version = match verb {
        CniVerb::Check => version_for_verb(verb, SpecVersion::V0_4_0, &net.cni_version, supported)?,
        CniVerb::Gc | CniVerb::Status => version_for_verb(verb, SpecVersion::V1_1_0, &net.cni_version, supported)?,
        CniVerb::Del => {
            supported_version(&net.cni_version, supported).unwrap_or_else(|error| newest_for_del(call, &error))
        }
        _ => supported_version(&net.cni_version, supported)?,
    };
    let report = |error: &Error| call.warn_once(absent_key_warning(error));
    net.read_common(is_removal(call).then_some(&report))?;
    log::set_network(net.name.as_str());
    Ok((verb, CallContext::new(call, net, version)))
}

/// The version of a DEL whose configuration has a version that the plugin does not support: ADD had another version.
fn newest_for_del(call: &PluginCall<'_>, error: &Error) -> SpecVersion {
    call.warn_once(format_args!("{error}; DEL goes on as with {}", SpecVersion::NEWEST));
    SpecVersion::NEWEST
}

/// The comparison is exact: `1.0` is not `1.0.0`.
fn supported_version(text: &str, supported: &[SpecVersion]) -> Result<SpecVersion> {
    SpecVersion::parse_exact(text).filter(|v| supported.contains(v)).ok_or_else(|| {
        let written = if text.is_empty() { SpecVersion::V0_1_0.as_str() } else { text };
        let list = quoted_list(supported);
        let write = nearest_supported(written, supported).map_or(String::new(), |near| format!("; write \"{near}\""));
        Error::new(ErrorCode::INCOMPATIBLE_VERSION, "incompatible CNI versions")
            .with_details(format!("config is \"{written}\", plugin supports {list}{write}"))
    })
}

/// The checks for a verb of version `since` and later, in the reference's order.
fn version_for_verb(verb: CniVerb, since: SpecVersion, text: &str, supported: &[SpecVersion]) -> Result<SpecVersion> {
    let refuse = |part: &str| {
        let msg = format!("{part} version does not allow {}", verb.as_str());
        Err(Error::new(ErrorCode::INCOMPATIBLE_VERSION, msg))
    };
    let wanted: VersionNumber = text.parse()?;
    if wanted < since.into() {
        return refuse("config");
    }
    if !supported.iter().any(|v| VersionNumber::from(*v) >= wanted) {
        return refuse("plugin");
    }
    supported_version(text, supported)
}

/// The request of an ADD. For a plugin that `connects`, what an earlier container of this name left is removed.
fn begin_add(cx: &CallContext<'_>, connects: bool) -> Result<AddRequest> {
    let env = &cx.call.env;
    let sandbox = ContainerSandbox::at_path(&env.netns);
    if cx.call.caller == PluginCaller::Runtime
        && let Ok(netns) = sandbox.open_netns()
    {
        refuse_own_namespace(env, netns)?;
    }
    let (id, ifname) = parse_names(env)?;
    let req = AddRequest { id, sandbox, ifname, prev: prev_result(cx)? };
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

/// The result of a completed ADD in the version of the request; `run` undoes the ADD if that version cannot represent
/// it.
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
        log::warn(format_args!("roll back an ADD without a result: {error}"));
    }
}

/// The request of a GC; `None` without a list of valid attachments.
fn begin_gc(cx: &CallContext<'_>, plugin: &'static str, connects: bool) -> Result<Option<GcRequest>> {
    if connects {
        FileLock::remove_stale_locks();
    }
    let valid = cx.net.valid_attachments()?;
    if valid.is_none() {
        log::warn(UNLISTED);
    }
    valid.map(|valid| cx.gc_request(plugin, valid)).transpose()
}

/// Restores protections of the host that a flush of rules may have removed, also if the plugin has no rules: containers
/// would reach the host's loopback addresses until a plugin with rules runs.
fn restore_protection(cx: &CallContext<'_>) {
    if cx.call.caller == PluginCaller::Runtime
        && let Err(error) = localhost::restore_if_flushed(cx.packet_filter())
    {
        log::warn(format_args!("containers may reach 127.0.0.0/8 of the host: {error}"));
    }
}

fn check_request(cx: &CallContext<'_>) -> Result<CheckRequest> {
    let sandbox = ContainerSandbox::at_path(&cx.call.env.netns);
    let (id, ifname) = parse_names(&cx.call.env)?;
    Ok(CheckRequest { id, sandbox, ifname, prev: prev_result(cx)? })
}

/// The request of a DEL. A plugin that `connects` takes the attachment's lock. A namespace that no longer exists is not
/// an error. A namespace that cannot be opened is treated as absent and reported at the end, so that no address leaks.
fn begin_del(cx: &CallContext<'_>, connects: bool) -> Result<(DelRequest, Result<()>)> {
    let (id, ifname) = parse_names(&cx.call.env)?;
    let (netns, trouble) = match usable_namespace(cx.call) {
        Ok(netns) => (netns, Ok(())),
        Err(error) => (None, Err(error)),
    };
    let prev = cx.net.json.get_present_member("prevResult");
    let prev = prev.map(|json| CniResult::decode(json, cx.version)).transpose();
    let prev = prev.unwrap_or_else(|error| {
        cx.call.warn_once(format_args!("DEL continues without prevResult: {error}"));
        None
    });
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
            log::warn(format_args!("{path} is this plugin's own namespace: the container's namespace is gone"));
            Ok(None)
        }
        Ok(netns) => Ok(Some(netns)),
        Err(error) if error.is_gone() => {
            log::debug(error);
            Ok(None)
        }
        Err(error) => Err(Error::from(error).with_code(ErrorCode::INVALID_NETNS)),
    }
}

fn parse_names(env: &CallEnvironment) -> Result<(ContainerId, InterfaceName)> {
    Ok((ContainerId::parse(&env.container_id)?, InterfaceName::parse(&env.ifname)?))
}

fn prev_result(cx: &CallContext<'_>) -> Result<Option<CniResult>> {
    let prev = cx.net.json.get_present_member("prevResult");
    prev.map(|json| CniResult::decode_prev_result(json, cx.version)).transpose()
}

/// If the process in a path such as `/proc/4711/ns/net` has ended, its id may belong to a process of the host, whose
/// interfaces must not be changed.
fn is_own_namespace(env: &CallEnvironment, netns: &Netns) -> Result<bool> {
    if env.overrides_netns_check() {
        return Ok(false);
    }
    Netns::open_current()
        .and_then(|own| own.is_same_as(netns))
        .map_err(|e| Error::from(e).context("get plugin's netns failed").with_code(ErrorCode::INVALID_NETNS))
}

fn refuse_own_namespace(env: &CallEnvironment, netns: &Netns) -> Result<()> {
    if !is_own_namespace(env, netns)? {
        return Ok(());
    }
    let msg = "plugin's netns and netns from CNI_NETNS should not be the same";
    Err(Error::new(ErrorCode::INVALID_NETNS, msg)
        .with_details("CNI_NETNS_OVERRIDE=1 allows it, for a container in the host's namespace"))
}
