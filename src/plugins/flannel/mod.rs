//! flannel: delegates to another plugin, by default bridge with host-local, with the subnet that flanneld has written
//! for this node.
//!
//! Keys: `subnetFile`, `dataDir`, `delegate`, `ipam`, and `runtimeConfig`, `args` and `dns`, which are
//! passed on. The result is the delegate's.
//!
//! State on the host while the container lives: the delegate's configuration in `dataDir` (`record.rs`), and the state of
//! the delegate; permanently: the folder.

mod derive;
mod record;
mod subnet;

use std::path::{Path, PathBuf};

use serde::Deserialize;

use self::derive::derive;
use self::record::{Record, Records, Sandbox};
use self::subnet::SubnetEnv;
use crate::attachment::Owner;
use crate::cni::json::keys::Keys;
use crate::cni::json::{self, Json};
use crate::cni::{CniResult, SpecVersion};
use crate::error::{Code, Context, Error, Result};
use crate::files::trust;
use crate::log;
use crate::repairs::Repairs;
use crate::skel::{
    AddReq, CheckReq, Cx, DelReq, Failures, GcReq, Plugin, Remarks, Rollback, Verb, in_doubt,
};

const SUBNET_FILE: &str = "/run/flannel/subnet.env";
const DATA_DIR: &str = "/var/lib/cni/flannel";
/// The interface of a record that names none.
const DEFAULT_IFNAME: &str = "eth0";

#[derive(Debug)]
pub struct Flannel;

/// The plugin's own keys.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Conf {
    /// The file that flanneld writes. Default: `/run/flannel/subnet.env`.
    subnet_file: Option<PathBuf>,
    /// The folder of the delegates' configurations. Default: `/var/lib/cni/flannel`.
    data_dir: Option<PathBuf>,
}

impl Conf {
    fn env(&self) -> Result<SubnetEnv> {
        SubnetEnv::read(self.subnet_file.as_deref().unwrap_or(Path::new(SUBNET_FILE)))
    }

    fn dir(&self) -> &Path {
        let given = self.data_dir.as_deref().filter(|dir| !dir.as_os_str().is_empty());
        given.unwrap_or(Path::new(DATA_DIR))
    }

    /// The records; fails if others than root could have written them: they say which plugin DEL executes.
    fn records(&self) -> Result<Records> {
        Ok(Records::at(&trust::resolve(self.dir())?))
    }

    /// As [`Conf::records`], for the verbs of an attachment that exists, which are refused for no key: without records
    /// the delegate's configuration is derived from the request.
    fn records_if_trusted(&self) -> Option<Records> {
        let derived = |error: &_| {
            log::warn(format_args!("{error}; its records are ignored"));
        };
        self.records().inspect_err(derived).ok()
    }
}

impl Plugin for Flannel {
    const NAME: &'static str = "flannel";
    const ABOUT: &'static str = "delegates to bridge with the node's flannel subnet";
    const REPAIRS: bool = true;
    type Conf = Conf;

    fn keys() -> Keys {
        Keys::of::<Conf>().with("delegate", Keys::Any).with("ipam", Keys::Any)
    }

    fn examine(cx: &Cx<'_>, conf: &Conf, _: &mut Remarks) -> Result<()> {
        trust::require_place(conf.dir())?;
        derive(&cx.net, None).map(drop)
    }

    fn add(cx: &Cx<'_>, conf: &Conf, req: &AddReq) -> Result<CniResult> {
        let json = derive(&cx.net, Some(&conf.env()?))?;
        let (text, records) = (json::compact(&json)?, Records::create(conf.dir())?);
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let delegate = cx.delegate(plugin(&json)).context(|| "failed to delegate add")?;
        let delegate = delegate.with_conf(text.as_bytes());
        let former = records.find(&owner)?;
        log::debug(format_args!("netconf sent to delegate plugin: {text}"));
        let mut undo = Rollback::new();
        let (cleaner, saved) = (delegate.clone(), &records);
        undo.push("undo the delegate's ADD", move || match former {
            // The attachment existed before.
            Some(former) => saved.save(&owner, &former.conf, former.note.sandbox),
            None => match cleaner.run(Verb::Del) {
                // The record stays, so that DEL or GC can retry.
                Err(error) if !is_about_configuration(error.code()) => Err(error),
                _ => saved.find(&owner)?.map_or(Ok(()), |record| record.remove()),
            },
        });
        records.save(&owner, text.as_bytes(), Sandbox::at(&req.sandbox.path))?;
        let result = delegate.run(Verb::Add)?.unwrap_or_default();
        undo.commit();
        Ok(result)
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        run(cx, &conf_of_add(cx, conf, req)?, Verb::Check).or_else(|error| match error.code() {
            // Plugins of early versions have no CHECK.
            Code::INCOMPATIBLE_VERSION => Ok(()),
            _ => Err(error),
        })
    }

    fn repair(cx: &Cx<'_>, conf: &Conf, req: &CheckReq, repairs: &mut Repairs) -> Result<()> {
        let json = conf_of_add(cx, conf, req)?;
        let text = json::compact(&json)?;
        cx.delegate(plugin(&json))?.with_conf(text.as_bytes()).repair(repairs)
    }

    fn del(cx: &Cx<'_>, conf: &Conf, req: &DelReq) -> Result<()> {
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let mut record = None;
        if let Some(records) = conf.records_if_trusted() {
            records.sweep_one(&owner)?;
            record = records.find(&owner)?;
            if record.is_none() {
                return Ok(());
            }
        }
        let saved = record.as_ref().and_then(|record| {
            let derived = "the saved configuration is derived again";
            record.json().inspect_err(|e| log::warn(format_args!("{derived}: {e}"))).ok()
        });
        let derived = || derive(&cx.net, conf.env().ok().as_ref());
        let mut json = saved.map_or_else(derived, Ok)?;
        // The result is in the layout of the request's version.
        let version = json.get_present("cniVersion").and_then(Json::as_str);
        let is_same_version = version == Some(cx.version.as_str());
        if is_same_version && cx.version >= SpecVersion::V0_4_0 {
            copy_keys(cx, &mut json, &["prevResult"]);
        }
        run(cx, &json, Verb::Del)?;
        record.map_or(Ok(()), |record| record.remove())
    }

    fn gc(cx: &Cx<'_>, conf: &Conf, req: &GcReq) -> Result<()> {
        let network = cx.net.name.as_str();
        let mut failures = Failures::new();
        // One configuration for each delegate.
        let mut confs = Vec::from_iter(failures.keep(derive(&cx.net, conf.env().ok().as_ref())));
        let mut of_reference = Vec::new();
        let records = conf.records_if_trusted();
        if let Some(records) = &records {
            records.sweep(network, &Owner::each(&cx.net.name, &req.valid));
        }
        let all = records.as_ref().and_then(|records| failures.keep(records.list()));
        let all = all.unwrap_or_default();
        // The network of a malformed record is unknown.
        for record in all.iter().filter(|record| record.network().as_deref() == Some(network)) {
            let Some(json) = failures.keep(record.json()) else { continue };
            let id = &record.container_id;
            let is_valid = match &record.note.ifname {
                Some(ifname) => req.is_valid(id, ifname),
                None => req.valid.iter().any(|a| a.container_id == *id),
            };
            if !is_valid && record.note.ifname.is_none() {
                of_reference.push(record);
            } else if !is_valid {
                let sandbox = &record.note.sandbox;
                // A later attachment may be in the same namespace.
                let is_alone = all.iter().filter(|r| r.note.sandbox == *sandbox).count() == 1;
                let netns = sandbox.as_ref().filter(|_| is_alone).and_then(Sandbox::path);
                let ifname = record.note.ifname.as_deref().unwrap_or(DEFAULT_IFNAME);
                let deleted = cx.delegate(plugin(&json)).and_then(|delegate| {
                    let delegate = delegate.with_conf(&record.conf);
                    delegate.for_attachment(id, ifname, netns.unwrap_or_default()).run(Verb::Del)
                });
                failures.keep(deleted.and_then(|_| record.remove()));
            }
            if !confs.iter().any(|other| plugin(other) == plugin(&json)) {
                confs.push(json);
            }
        }
        for mut json in confs {
            let keys = ["cni.dev/valid-attachments", "cni.dev/attachments", "cniVersion"];
            copy_keys(cx, &mut json, &keys);
            failures.keep(run(cx, &json, Verb::Gc));
        }
        for record in of_reference {
            failures.keep(remove_if_unused(record, network));
        }
        failures.into_result()
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        conf.records().or_unavailable()?;
        let json = conf.env().and_then(|env| derive(&cx.net, Some(&env))).or_unavailable()?;
        let text = json::compact(&json)?;
        let delegate = cx.delegate(plugin(&json)).or_unavailable()?;
        delegate.with_conf(text.as_bytes()).run(Verb::Status).map(drop)
    }
}

/// Removes a record of the reference whose container has no address any more: the delegate's GC releases it if no link can
/// be the container's. Without the record a later DEL would leave the link.
fn remove_if_unused(record: &Record, network: &str) -> Result<()> {
    let (json, id) = (record.json()?, &record.container_id);
    let leases = in_doubt::leases_of(&json, network)?;
    if leases.is_some_and(|leases| leases.iter().all(|status| status.lease.id != *id)) {
        return record.remove();
    }
    log::warn(format_args!(
        "GC keeps the record of container \"{id}\", which the reference made: its link may exist; DEL removes it"
    ));
    Ok(())
}

/// Whether the delegate has refused its configuration, so that its DEL always fails.
fn is_about_configuration(code: Code) -> bool {
    [Code::INCOMPATIBLE_VERSION, Code::UNSUPPORTED_FIELD, Code::DECODE, Code::INVALID_CONFIG]
        .contains(&code)
}

/// The delegate's name.
fn plugin(json: &Json) -> &str {
    json.get_present("type").and_then(Json::as_str).unwrap_or_default()
}

/// Runs the delegate with this configuration.
fn run(cx: &Cx<'_>, json: &Json, verb: Verb) -> Result<()> {
    let text = json::compact(json)?;
    cx.delegate(plugin(json))?.with_conf(text.as_bytes()).run(verb).map(drop)
}

/// The delegate's configuration of ADD, with the request's result.
fn conf_of_add(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<Json> {
    let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
    let Some(records) = conf.records_if_trusted() else {
        let mut json = derive(&cx.net, Some(&conf.env()?))?;
        copy_keys(cx, &mut json, &["prevResult"]);
        return Ok(json);
    };
    let record = records.find(&owner)?.ok_or_else(|| {
        let msg = format!("flannel: no configuration is saved for {}, {}", req.id, req.ifname);
        Error::internal(msg).with_details("ADD did not run on this node, or DEL has run since")
    })?;
    let mut json = record.json()?;
    copy_keys(cx, &mut json, &["prevResult", "cniVersion"]);
    Ok(json)
}

/// Copies keys of the request.
fn copy_keys(cx: &Cx<'_>, json: &mut Json, keys: &[&str]) {
    for key in keys {
        if let Some(value) = cx.net.json.get(key) {
            json.set(key, value.clone());
        }
    }
}
