//! `replay`: a failed call again, in network namespaces of its own.

use std::fmt::Write;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;

use super::failed;
use super::recording::Recording;
use crate::cni::json::{Json, compact, pretty};
use crate::cni::{CniResult, SpecVersion};
use crate::error::Result;
use crate::iface::Inside;
use crate::iface::configure::{Connected, Style, add_routes, addresses_and_up, set_up};
use crate::netlink::{Dad, LinkChange, LinkKind, Netlink, NewLink, VethPeer};
use crate::netns::{self, Netns};
use crate::skel::call::{Call, Caller, Env, RunFn};
use crate::skel::{Table, Verb};
use crate::tool::print;

/// Folders with the node's state, which stays out of reach: tables of leases, locks, sockets of daemons.
const HIDDEN: [&str; 2] = ["/run", "/var/lib/cni"];

/// Makes the call, as ADD and, if it is another verb, that verb behind it, and then DEL.
pub(super) fn replay(recording: &Recording, table: Table) -> Result<ExitCode> {
    let (plugin, verb) = (recording.get("cni.plugin"), recording.get("cni.command"));
    let config = recording.get("cni.config");
    if config.is_empty() {
        let what = "replay a call that has not failed";
        return Err(failed(what, "only failed calls are recorded with their configuration"));
    }
    let own = table.plugin(plugin);
    let run = own
        .ok_or_else(|| failed("replay", format!("\"{plugin}\" is no plugin of this executable")))?
        .run;
    let config =
        Json::parse(config.as_bytes()).map_err(|why| failed("read the configuration", why))?;
    let mut hidden: Vec<&Path> = HIDDEN.map(Path::new).to_vec();
    let data_dirs =
        [config.get("dataDir"), config.get("ipam").and_then(|ipam| ipam.get("dataDir"))];
    let data_dirs = data_dirs.into_iter().flatten().filter_map(Json::as_str).map(Path::new);
    hidden.extend(data_dirs.filter(|dir| dir.is_dir()));
    netns::hide(&hidden)?;
    let container = Netns::fresh()?;
    let netns = container.path().display().to_string();
    let ifname = recording.get("cni.ifname");
    prepare(&config, &container, ifname)?;
    // The sandbox in the previous result.
    let config = match recording.get("cni.netns") {
        "" => compact(&config)?,
        old => compact(&config)?.replace(&format!("\"{old}\""), &format!("\"{netns}\"")),
    };
    let env = Env {
        command: String::new(),
        container_id: recording.get("cni.container_id").to_owned(),
        netns,
        ifname: ifname.to_owned(),
        args: recording.get("cni.args").to_owned(),
        path: recording.get("cni.path").to_owned(),
        netns_override: String::new(),
    };
    let call = Call { env, stdin: config.as_bytes(), table, caller: Caller::Runtime };
    let mut text = format!("{plugin}, in network namespaces without anything else:\n");
    let mut status = ExitCode::SUCCESS;
    let verbs =
        [Some(Verb::Add), Verb::parse(verb).filter(|verb| *verb != Verb::Add), Some(Verb::Del)];
    for verb in verbs.into_iter().flatten() {
        let (line, is_ok) = outcome(run, &call, verb)?;
        text += &line;
        if !is_ok {
            status = ExitCode::FAILURE;
        }
    }
    print(&text)?;
    Ok(status)
}

fn outcome(run: RunFn, call: &Call<'_>, verb: Verb) -> Result<(String, bool)> {
    let call = Call { env: call.env.with_verb(verb), ..call.clone() };
    let mut text = format!("{}: ", verb.as_str());
    let outcome = run(&call);
    let is_ok = outcome.is_ok();
    let written = match outcome {
        Ok(None) => writeln!(text, "ok"),
        Ok(Some(result)) => writeln!(text, "ok\n{}", pretty(&result.to_json())?),
        Err(error) => writeln!(text, "code {}: {error}", error.code().0),
    };
    written.map_err(|cause| failed("write the outcome", cause))?;
    Ok((text, is_ok))
}

fn version_of(config: &Json) -> Option<SpecVersion> {
    SpecVersion::exact(config.get("cniVersion")?.as_str()?)
}

/// Makes what the plugin expects to find: the host's interface that it is to use, and behind other plugins the
/// container's one with the addresses and routes of the previous result. Both are ends of veth pairs.
fn prepare(config: &Json, container: &Netns, ifname: &str) -> Result<()> {
    let host = Netlink::open()?;
    let up = |netlink: &Netlink, name: &str| -> Result<()> {
        Ok(netlink.set_link(netlink.require_link(name)?.index, LinkChange::new().up())?)
    };
    up(&host, "lo")?;
    let named = ["master", "device"].into_iter().filter_map(|key| config.get(key)?.as_str());
    for name in named.filter(|name| !name.is_empty()) {
        let peer = VethPeer::new("replay-peer");
        host.add_link(&NewLink::new(name, LinkKind::Veth { peer }).up())?;
        up(&host, "replay-peer")?;
    }
    let Some(Json::Array(interfaces)) =
        config.get("prevResult").and_then(|prev| prev.get("interfaces"))
    else {
        return Ok(());
    };
    let text = |interface: &Json, key: &str| {
        interface.get(key).and_then(Json::as_str).unwrap_or_default().to_owned()
    };
    let of_host: Vec<String> = interfaces
        .iter()
        .filter(|interface| text(interface, "sandbox").is_empty())
        .map(|interface| text(interface, "name"))
        .collect();
    let host_end = of_host.iter().find(|name| name.starts_with("veth")).or(of_host.last());
    let peer = VethPeer::new(ifname).netns(container.as_fd());
    let host_end = host_end.map_or("replay-end", String::as_str);
    host.add_link(&NewLink::new(host_end, LinkKind::Veth { peer }).up())?;
    let inside = Inside::enter(container)?;
    let link = inside.netlink.require_link(ifname)?;
    let (Some(prev), Some(version)) = (config.get("prevResult"), version_of(config)) else {
        return set_up(&inside, &link);
    };
    let prev = CniResult::decode_prev(prev, version)?;
    addresses_and_up(&inside, &link, &prev, Style { dad: Dad::Off, connected: Connected::Route })?;
    add_routes(&inside, &link, &prev)
}
