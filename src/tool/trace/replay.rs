//! `replay`: repeats a failed call in temporary network namespaces.

use std::os::fd::AsFd;
use std::path::Path;
use std::process::ExitCode;

use super::Recording;
use crate::cni::json::{Json, compact, pretty};
use crate::cni::{CniResult, SpecVersion};
use crate::error::{Error, Result};
use crate::iface::Inside;
use crate::iface::configure::{Style, add_routes, addresses_and_up};
use crate::netlink::{LinkChange, LinkKind, Netlink, NewLink, VethPeer};
use crate::netns::{self, Netns};
use crate::skel::call::{Call, Caller, Env};
use crate::skel::{Applet, Table, Verb};
use crate::tool::print;

/// Directories that the replay must not reach, as they hold the node's state: leases, locks, sockets of daemons.
const HIDDEN: [&str; 2] = ["/run", "/var/lib/cni"];

/// Calls ADD, then the recorded verb if that is another one, then DEL.
pub(super) fn replay(recording: &Recording, table: Table) -> Result<ExitCode> {
    let plugin = recording.get("cni.plugin");
    let config = recording.get("cni.config");
    if config.is_empty() {
        let msg =
            "replay a successful call: only failed calls are recorded with their configuration";
        return Err(Error::internal(msg));
    }
    let own = table.find(plugin).and_then(Applet::as_plugin).ok_or_else(|| {
        Error::internal(format!("replay: \"{plugin}\" is not a plugin of this executable"))
    })?;
    let config = Json::parse(config.as_bytes())
        .map_err(|why| Error::internal(format!("read the configuration: {why}")))?;
    hide_state(&config)?;
    let container = Netns::fresh()?;
    let (netns, ifname) = (container.path().display().to_string(), recording.get("cni.ifname"));
    let host = Netlink::open()?;
    add_parents(&config, &host)?;
    add_interface(&config, &host, &container, ifname)?;
    let config = match recording.get("cni.netns") {
        "" => compact(&config)?,
        // The sandbox in the previous result.
        old => compact(&config)?.replace(&format!("\"{old}\""), &format!("\"{netns}\"")),
    };
    let env = Env {
        container_id: recording.get("cni.container_id").to_owned(),
        netns,
        ifname: ifname.to_owned(),
        args: recording.get("cni.args").to_owned(),
        path: recording.get("cni.path").to_owned(),
        ..Env::default()
    };
    let recorded = Verb::parse(recording.get("cni.command")).filter(|verb| *verb != Verb::Add);
    let mut lines = vec![format!("{plugin}, in network namespaces without anything else:\n")];
    let mut status = ExitCode::SUCCESS;
    for verb in [Some(Verb::Add), recorded, Some(Verb::Del)].into_iter().flatten() {
        let (env, stdin) = (env.with_verb(verb), config.as_bytes());
        let call = Call { env, stdin, table, caller: Caller::Runtime };
        let outcome = match (own.run)(&call) {
            Ok(None) => "ok".to_owned(),
            Ok(Some(result)) => format!("ok\n{}", pretty(&result.to_json())?),
            Err(error) => {
                status = ExitCode::FAILURE;
                format!("code {}: {error}", error.code().0)
            }
        };
        lines.push(format!("{}: {outcome}\n", verb.as_str()));
    }
    print(&lines.concat())?;
    Ok(status)
}

/// Hides the node's state from this process.
fn hide_state(config: &Json) -> Result<()> {
    let ipam = config.get("ipam").and_then(|ipam| ipam.get("dataDir"));
    let data_dirs = [config.get("dataDir"), ipam].into_iter().flatten().filter_map(Json::as_str);
    let mut hidden: Vec<&Path> = HIDDEN.map(Path::new).to_vec();
    hidden.extend(data_dirs.map(Path::new).filter(|dir| dir.is_dir()));
    Ok(netns::hide(&hidden)?)
}

/// Creates the interfaces of the host that the plugin uses, as ends of veth pairs.
fn add_parents(config: &Json, host: &Netlink) -> Result<()> {
    let up = |name: &str| -> Result<()> {
        Ok(host.set_link(host.require_link(name)?.index, LinkChange::new().up())?)
    };
    up("lo")?;
    let named = ["master", "device"].into_iter().filter_map(|key| config.get(key)?.as_str());
    for name in named.filter(|name| !name.is_empty()) {
        let peer = VethPeer::new("replay-peer");
        host.add_link(&NewLink::new(name, LinkKind::Veth { peer }).up())?;
        up("replay-peer")?;
    }
    Ok(())
}

/// Creates the container's interface with the addresses and routes of the previous result, if there is one, as an end
/// of a veth pair.
fn add_interface(config: &Json, host: &Netlink, container: &Netns, ifname: &str) -> Result<()> {
    let version =
        config.get("cniVersion").and_then(|version| SpecVersion::exact(version.as_str()?));
    // The plugin reports a previous result that is invalid.
    let (Some(prev), Some(version)) = (config.get("prevResult"), version) else { return Ok(()) };
    let Ok(prev) = CniResult::decode_prev(prev, version) else { return Ok(()) };
    if prev.interfaces.is_empty() {
        return Ok(());
    }
    let on_host = prev.interfaces.iter().filter(|interface| interface.sandbox.is_empty());
    let mut names = on_host.map(|interface| interface.name.as_str());
    let host_end = names.clone().find(|name| name.starts_with("veth")).or(names.next_back());
    let peer = VethPeer::new(ifname).netns(container.as_fd());
    let host_end = host_end.unwrap_or("replay-end");
    host.add_link(&NewLink::new(host_end, LinkKind::Veth { peer }).up())?;
    let inside = Inside::enter(container)?;
    let link = inside.netlink.require_link(ifname)?;
    addresses_and_up(&inside, &link, &prev, Style::Immediate)?;
    add_routes(&inside, &link, &prev)
}
