//! From a call to the plugin's method: name, version, namespace, configuration, `prevResult`.

use super::call::{Applet, Call, Caller, Env, Kind, Main, OwnPlugin, Remarks, Service, Verb};
use super::context::{Cx, absent, removes};
use super::plugin::{AddReq, DelReq, Plugin, Sandbox};
use super::reclaim;
use super::rollback::Rollback;
use crate::attachment::{Owner, forget};
use crate::cni::version::{nearest, quoted_list};
use crate::cni::{CniResult, ContainerId, IfName, NetConf, SpecVersion, Version};
use crate::error::{Code, Error, Result};
use crate::log;
use crate::netfilter::localhost;
use crate::netns::Netns;
use crate::repairs::Repairs;

impl Applet {
    /// The applet of a plugin.
    pub const fn plugin<P: Plugin>(kind: Kind) -> Applet {
        Applet::with_service::<P>(kind, None)
    }

    /// The applet of a plugin that may have a service.
    pub const fn with_service<P: Plugin>(kind: Kind, service: Option<Service>) -> Applet {
        let plugin = OwnPlugin {
            kind,
            versions: P::VERSIONS,
            run: dispatch::<P>,
            repair: repair::<P>,
            keys: P::keys,
            examine: examine::<P>,
            service,
        };
        Applet { name: P::NAME, kind, about: P::ABOUT, main: Main::Plugin(plugin) }
    }
}

/// Runs `P` for a call whose environment was checked ([`Env::check`]). The result is within the
/// limits of the configuration's version.
///
/// The compiler generates this function for each plugin, so the parts that are the same for all plugins are in functions
/// without the type parameter.
fn dispatch<P: Plugin>(call: &Call<'_>) -> Result<Option<CniResult>> {
    let (verb, cx) = &prepare(call, P::VERSIONS)?;
    let conf = decode::<P>(cx)?;
    match verb {
        Verb::Add => return add::<P>(cx, &conf).map(Some),
        Verb::Check => P::check(cx, &conf, &request(cx, Sandbox::at(&call.env.netns))?)?,
        Verb::Del => {
            let (req, trouble) = del_request(cx)?;
            P::del(cx, &conf, &req)?;
            if P::OUTLIVES_ITS_CONTAINER || cx.is_leased(P::NAME) {
                forget(Owner::new(&cx.net.name, &req.id, &req.ifname), P::NAME)?;
            }
            trouble?;
        }
        Verb::Gc => {
            let valid = cx.net.valid_attachments()?;
            let req = valid.map(|valid| cx.gc_request(P::NAME, valid)).transpose()?;
            if let Some(req) = &req {
                P::gc(cx, &conf, req)?;
            } else {
                log::warn(UNLISTED);
                P::gc_unlisted(cx, &conf)?;
            }
            if P::OUTLIVES_ITS_CONTAINER || cx.is_leased(P::NAME) {
                reclaim::collect(P::NAME, &cx.net.name, req.as_ref())?;
            }
        }
        Verb::Status => P::status(cx, &conf)?,
        Verb::Version => {}
    }
    Ok(None)
}

/// Examines the configuration of a call, for `cnibox lint`.
fn examine<P: Plugin>(call: &Call<'_>, remarks: &mut Remarks) -> Result<()> {
    let (_, cx) = prepare(call, P::VERSIONS)?;
    P::examine(&cx, &decode::<P>(&cx)?, remarks)
}

/// Repairs the attachment of a call whose environment was checked.
fn repair<P: Plugin>(call: &Call<'_>, repairs: &mut Repairs) -> Result<()> {
    if !P::REPAIRS {
        return Ok(());
    }
    let (_, cx) = prepare(call, P::VERSIONS)?;
    let conf = decode::<P>(&cx)?;
    let req = request(&cx, Sandbox::at(&call.env.netns))?;
    refuse_own_namespace(&call.env, req.sandbox.netns()?)?;
    P::repair(&cx, &conf, &req, repairs)
}

fn decode<P: Plugin>(cx: &Cx<'_>) -> Result<P::Conf> {
    let json = &cx.net.json;
    let conf = if cx.removes() { json.decode_sound(&absent) } else { json.decode() };
    conf.map_err(|e| e.context("failed to load netconf"))
}

const UNLISTED: &str = "GC without \"cni.dev/valid-attachments\" releases nothing: \
    an absent list says nothing about what is valid";

/// Decodes and checks the part of a call that is the same for all plugins.
fn prepare<'a>(call: &'a Call<'a>, supported: &[SpecVersion]) -> Result<(Verb, Cx<'a>)> {
    let command = &call.env.command;
    let verb = Verb::parse(command);
    let unknown = || {
        Error::new(Code::INVALID_ENVIRONMENT, format!("unknown CNI_COMMAND: {command}"))
            .with_details("the commands are ADD, CHECK, DEL, GC, STATUS and VERSION")
    };
    // The configuration is read first, as in the reference; without a valid command, the error reports both.
    let mut net = NetConf::parse(call.stdin)
        .map_err(|e| if verb.is_none() { e.with_details(unknown().to_string()) } else { e })?;
    let Some(verb) = verb else { return Err(unknown()) };
    if net.json.get_present("plugins").is_some() {
        log::warn(
            "the configuration is a list (\"plugins\"), but a plugin gets one entry; cnitool runs a list",
        );
    }
    if verb == Verb::Del
        && let Err(error) = net.read_version()
    {
        absent(&error);
    } else {
        net.read_version()?;
    }
    let version = match verb {
        Verb::Check => ladder(verb, SpecVersion::V0_4_0, &net.cni_version, supported)?,
        Verb::Gc | Verb::Status => ladder(verb, SpecVersion::V1_1_0, &net.cni_version, supported)?,
        Verb::Del => {
            member(&net.cni_version, supported).unwrap_or_else(|error| newest(call, &error))
        }
        _ => member(&net.cni_version, supported)?,
    };
    // A plugin that calls this one has warned of these keys.
    let report =
        if call.caller == Caller::Runtime { absent } else { |error: &Error| log::debug(error) };
    net.read_common(removes(call).then_some(&report))?;
    log::set_network(net.name.as_str());
    Ok((verb, Cx::new(call, net, version)))
}

/// The version of a DEL whose configuration has one that no plugin supports: ADD was called with another.
fn newest(call: &Call<'_>, error: &Error) -> SpecVersion {
    // A plugin that calls this one has warned already.
    if call.caller == Caller::Runtime {
        log::warn(format_args!("{error}; DEL goes on as with {}", SpecVersion::NEWEST));
    }
    SpecVersion::NEWEST
}

/// The comparison is exact: `1.0` is not `1.0.0`.
fn member(text: &str, supported: &[SpecVersion]) -> Result<SpecVersion> {
    SpecVersion::exact(text).filter(|v| supported.contains(v)).ok_or_else(|| {
        let written = if text.is_empty() { SpecVersion::V0_1_0.as_str() } else { text };
        let list = quoted_list(supported);
        let write = nearest(written, supported).map(|near| format!("; write \"{near}\""));
        let write = write.unwrap_or_default();
        Error::new(Code::INCOMPATIBLE_VERSION, "incompatible CNI versions")
            .with_details(format!("config is \"{written}\", plugin supports {list}{write}"))
    })
}

/// The checks for a verb of version `since` and later, in the reference's order.
fn ladder(
    verb: Verb,
    since: SpecVersion,
    text: &str,
    supported: &[SpecVersion],
) -> Result<SpecVersion> {
    let refuse = |part: &str| {
        let msg = format!("{part} version does not allow {}", verb.as_str());
        Err(Error::new(Code::INCOMPATIBLE_VERSION, msg))
    };
    let wanted: Version = text.parse()?;
    if wanted < since.into() {
        return refuse("config");
    }
    if !supported.iter().any(|v| Version::from(*v) >= wanted) {
        return refuse("plugin");
    }
    member(text, supported)
}

fn add<P: Plugin>(cx: &Cx<'_>, conf: &P::Conf) -> Result<CniResult> {
    let req = add_request(cx)?;
    if P::CONNECTS {
        restore_protection(cx);
    }
    let result = P::add(cx, conf, &req)?;
    let mut undo = Rollback::new();
    cx.note_lease(P::NAME, &req, &result, &mut undo);
    let converted = result.convert(cx.version).inspect_err(|_| {
        if !P::UNDO_IF_UNREPRESENTABLE {
            return;
        }
        // The ADD has succeeded, but this version cannot represent its result.
        let AddReq { id, ifname, .. } = req;
        let netns = Netns::open(&cx.call.env.netns).ok();
        if let Err(error) = P::del(cx, conf, &DelReq { id, ifname, netns, prev: None }) {
            log::warn(format_args!("roll back an ADD without a result: {error}"));
        }
    })?;
    undo.commit();
    Ok(converted)
}

/// Protections of the host that a flush of rules may have ended, also for a plugin without rules: until a plugin with rules of its own
/// runs, containers would reach the host's loopback addresses.
fn restore_protection(cx: &Cx<'_>) {
    if cx.call.caller == Caller::Runtime
        && let Err(error) = localhost::restore_if_flushed(cx.filter())
    {
        log::warn(format_args!("containers may reach 127.0.0.0/8 of the host: {error}"));
    }
}

fn add_request(cx: &Cx<'_>) -> Result<AddReq> {
    let env = &cx.call.env;
    let sandbox = Sandbox::at(&env.netns);
    if cx.call.caller == Caller::Runtime
        && let Ok(netns) = sandbox.netns()
    {
        refuse_own_namespace(env, netns)?;
    }
    request(cx, sandbox)
}

fn request(cx: &Cx<'_>, sandbox: Sandbox) -> Result<AddReq> {
    let (id, ifname) = names(&cx.call.env)?;
    Ok(AddReq { id, sandbox, ifname, prev: prev_result(cx)? })
}

/// A namespace that no longer exists is not an error. A namespace that cannot be opened is treated as absent and reported
/// at the end, so that no address leaks.
fn del_request(cx: &Cx<'_>) -> Result<(DelReq, Result<()>)> {
    let (id, ifname) = names(&cx.call.env)?;
    let (netns, trouble) = match usable_namespace(cx.call) {
        Ok(netns) => (netns, Ok(())),
        Err(error) => (None, Err(error)),
    };
    let prev = cx.net.json.get_present("prevResult");
    let prev = prev.map(|json| CniResult::decode(json, cx.version)).transpose();
    let prev = prev.unwrap_or_else(|error| {
        // A plugin that calls this one has warned already.
        if cx.call.caller == Caller::Runtime {
            log::warn(format_args!("DEL continues without prevResult: {error}"));
        }
        None
    });
    Ok((DelReq { id, netns, ifname, prev }, trouble))
}

fn usable_namespace(call: &Call<'_>) -> Result<Option<Netns>> {
    if call.env.netns.is_empty() {
        return Ok(None);
    }
    match Netns::open(&call.env.netns) {
        Ok(netns) if matches!(call.caller, Caller::Plugin(_)) => Ok(Some(netns)),
        Ok(netns) if is_own_namespace(&call.env, &netns)? => {
            let path = &call.env.netns;
            log::warn(format_args!(
                "{path} is this plugin's own namespace: that of the container is gone"
            ));
            Ok(None)
        }
        Ok(netns) => Ok(Some(netns)),
        Err(error) if error.is_gone() => {
            log::debug(error);
            Ok(None)
        }
        Err(error) => Err(Error::from(error).with_code(Code::INVALID_NETNS)),
    }
}

fn names(env: &Env) -> Result<(ContainerId, IfName)> {
    Ok((ContainerId::parse(&env.container_id)?, IfName::parse(&env.ifname)?))
}

fn prev_result(cx: &Cx<'_>) -> Result<Option<CniResult>> {
    let prev = cx.net.json.get_present("prevResult");
    prev.map(|json| CniResult::decode_prev(json, cx.version)).transpose()
}

/// If the process in a path such as `/proc/4711/ns/net` has ended, its id may belong to a process of the host, whose
/// interfaces must not be changed.
fn is_own_namespace(env: &Env, netns: &Netns) -> Result<bool> {
    if env.overrides_netns_check() {
        return Ok(false);
    }
    Netns::current().and_then(|own| own.same_as(netns)).map_err(|e| {
        Error::from(e).context("get plugin's netns failed").with_code(Code::INVALID_NETNS)
    })
}

fn refuse_own_namespace(env: &Env, netns: &Netns) -> Result<()> {
    if !is_own_namespace(env, netns)? {
        return Ok(());
    }
    let msg = "plugin's netns and netns from CNI_NETNS should not be the same";
    Err(Error::new(Code::INVALID_NETNS, msg)
        .with_details("CNI_NETNS_OVERRIDE=1 allows it, for a container in the host's namespace"))
}
