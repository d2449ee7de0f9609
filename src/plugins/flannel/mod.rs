//! flannel: hands its work to another plugin, bridge with host-local unless the configuration says
//! otherwise, with the subnet that flannel's daemon has written for this node.
//!
//! Keys: `subnetFile`, `dataDir`, `delegate`, `ipam`, and `runtimeConfig`, `args` and `dns`, which are
//! handed on. The result is the delegate's.
//!
//! On the host it leaves, while the container lives, the delegate's configuration in `dataDir`
//! (`record.rs`) beside what the delegate leaves; for good, the folder.

mod derive;
mod record;
mod subnet;

use std::path::{Path, PathBuf};

use serde::Deserialize;

use self::derive::Derived;
use self::record::{Place, Record, Records};
use self::subnet::SubnetEnv;
use crate::attachment::Owner;
use crate::cni::json::keys::Keys;
use crate::cni::json::{self, Json};
use crate::cni::{CniResult, SpecVersion};
use crate::error::{Code, Context, Error, Result};
use crate::log;
use crate::repairs::Repairs;
use crate::skel::{AddReq, CheckReq, Cx, DelReq, Failures, GcReq, Plugin, Remarks, Rollback, Verb};

/// Where the daemon writes.
const SUBNET_FILE: &str = "/run/flannel/subnet.env";
/// Where configurations are kept.
const DATA_DIR: &str = "/var/lib/cni/flannel";
/// The interface of a record that tells none.
const USUAL: &str = "eth0";
/// What GC is told, under its two names.
const ATTACHMENTS: [&str; 2] = ["cni.dev/valid-attachments", "cni.dev/attachments"];

#[derive(Debug)]
pub struct Flannel;

/// The keys of the plugin, but for those that are handed on.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Conf {
    /// What the daemon has written. Default: `/run/flannel/subnet.env`.
    subnet_file: Option<PathBuf>,
    /// Where the delegate's configuration is kept. Default: `/var/lib/cni/flannel`.
    data_dir: Option<PathBuf>,
}

impl Conf {
    fn env(&self) -> Result<SubnetEnv> {
        SubnetEnv::read(self.subnet_file.as_deref().unwrap_or(Path::new(SUBNET_FILE)))
    }

    fn records(&self) -> Records {
        Records::at(self.data_dir.as_deref().unwrap_or(Path::new(DATA_DIR)))
    }
}

impl Plugin for Flannel {
    const NAME: &'static str = "flannel";
    const ABOUT: &'static str = "hands the node's flannel subnet to bridge or another";
    const REPAIRS: bool = true;
    type Conf = Conf;

    fn keys() -> Keys {
        Keys::of::<Conf>().with("delegate", Keys::Any).with("ipam", Keys::Any)
    }

    fn examine(cx: &Cx<'_>, _: &Conf, _: &mut Remarks) -> Result<()> {
        Derived::from(&cx.net, None).map(drop)
    }

    fn add(cx: &Cx<'_>, conf: &Conf, req: &AddReq) -> Result<CniResult> {
        let derived = Derived::from(&cx.net, Some(&conf.env()?))?;
        let (text, records) = (derived.text()?, conf.records());
        let (id, ifname) = (req.id.as_str(), req.ifname.as_str());
        let network = cx.net.name.as_str();
        let owner = Owner::new(&cx.net.name, &req.id, &req.ifname);
        let delegate = cx.delegate(&derived.plugin).context(|| "failed to delegate add")?;
        let delegate = delegate.with_conf(text.as_bytes());
        let former = records.find(id, ifname, network)?;
        log::debug(format_args!("netconf sent to delegate plugin: {text}"));
        let mut undo = Rollback::new();
        let (cleaner, kept) = (delegate.clone(), &records);
        undo.push("take the delegate's work back", move || match former {
            // The attachment is there already, and stays as it is.
            Some(former) => kept.save(&owner, &former.conf, former.place.as_ref()),
            None => match cleaner.run(Verb::Del) {
                // As long as the record is there, DEL or GC can try again.
                Err(error) if !is_of_configuration(error.code()) => Err(error),
                _ => forget(kept, id, ifname, network),
            },
        });
        records.save(&owner, text.as_bytes(), Place::at(&req.sandbox.path).as_ref())?;
        let result = delegate.run(Verb::Add)?.unwrap_or_default();
        undo.commit();
        Ok(result)
    }

    fn check(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<()> {
        let Order { plugin, text } = check_conf(cx, conf, req)?;
        let checked = cx.delegate(&plugin)?.with_conf(text.as_bytes()).run(Verb::Check);
        checked.map(drop).or_else(|error| match error.code() {
            // An older plugin has no CHECK.
            Code::INCOMPATIBLE_VERSION => Ok(()),
            _ => Err(error),
        })
    }

    fn repair(cx: &Cx<'_>, conf: &Conf, req: &CheckReq, repairs: &mut Repairs) -> Result<()> {
        let Order { plugin, text } = check_conf(cx, conf, req)?;
        cx.delegate(&plugin)?.with_conf(text.as_bytes()).repair(repairs)
    }

    fn del(cx: &Cx<'_>, conf: &Conf, req: &DelReq) -> Result<()> {
        let records = conf.records();
        let (id, ifname) = (req.id.as_str(), req.ifname.as_str());
        records.sweep_one(&Owner::new(&cx.net.name, &req.id, &req.ifname))?;
        let Some(record) = records.find(id, ifname, cx.net.name.as_str())? else { return Ok(()) };
        let Order { plugin, text } = clean_up_conf(cx, conf, &record)?;
        cx.delegate(&plugin)?.with_conf(text.as_bytes()).run(Verb::Del)?;
        records.remove(&record)
    }

    fn gc(cx: &Cx<'_>, conf: &Conf, req: &GcReq) -> Result<()> {
        let records = conf.records();
        let mut failures = Failures::new();
        records.sweep(cx.net.name.as_str(), &Owner::each(&cx.net.name, &req.valid));
        let all = failures.keep(records.list()).unwrap_or_default();
        // The network of an unreadable record is unknown.
        let ours = |record: &&Record| record.network().as_deref() == Some(cx.net.name.as_str());
        let mut work: Vec<(String, Json)> = Vec::new();
        let derived = failures.keep(Derived::from(&cx.net, conf.env().ok().as_ref()));
        work.extend(derived.map(|derived| (derived.plugin, derived.json)));
        for record in all.iter().filter(ours) {
            let Some((plugin, json)) = failures.keep(kept(record)) else { continue };
            if !work.iter().any(|(other, _)| *other == plugin) {
                work.push((plugin, json));
            }
            if !is_valid(record, req) {
                // An attachment that came later may have the same place.
                let alone = all.iter().filter(|other| other.place == record.place).count() == 1;
                let place = record.place.as_ref().filter(|_| alone).and_then(Place::path);
                let collected = collect(cx, record, place.unwrap_or_default());
                failures.keep(collected.and_then(|()| records.remove(record)));
            }
        }
        for (plugin, json) in work {
            failures.keep(collect_all(cx, &plugin, json));
        }
        failures.into_result()
    }

    fn status(cx: &Cx<'_>, conf: &Conf) -> Result<()> {
        let env = conf.env().or_unavailable()?;
        let derived = Derived::from(&cx.net, Some(&env)).or_unavailable()?;
        let text = derived.text()?;
        let delegate = cx.delegate(&derived.plugin).or_unavailable()?;
        delegate.with_conf(text.as_bytes()).run(Verb::Status).map(drop)
    }
}

/// A plugin and its configuration.
struct Order {
    plugin: String,
    text: String,
}

/// Whether the delegate has refused its configuration, so that it will never do anything with it.
fn is_of_configuration(code: Code) -> bool {
    let never =
        [Code::INCOMPATIBLE_VERSION, Code::UNSUPPORTED_FIELD, Code::DECODE, Code::INVALID_CONFIG];
    never.contains(&code)
}

/// Removes the record of an attachment.
fn forget(records: &Records, id: &str, ifname: &str, network: &str) -> Result<()> {
    match records.find(id, ifname, network)? {
        Some(record) => records.remove(&record),
        None => Ok(()),
    }
}

/// The delegate of a record and its configuration.
fn kept(record: &Record) -> Result<(String, Json)> {
    let json = record.json().map_err(|why| {
        let id = &record.container_id;
        Error::internal(format!("failed to parse netconf: {why}")).with_details(format!("of {id}"))
    })?;
    let plugin = json.get_present("type").and_then(Json::as_str).unwrap_or_default();
    Ok((plugin.to_owned(), json))
}

/// The delegate's configuration on CHECK: that of ADD.
fn check_conf(cx: &Cx<'_>, conf: &Conf, req: &CheckReq) -> Result<Order> {
    let record = conf
        .records()
        .find(req.id.as_str(), req.ifname.as_str(), cx.net.name.as_str())?
        .ok_or_else(|| {
        let msg = format!("flannel: no configuration is kept for {}, {}", req.id, req.ifname);
        Error::internal(msg).with_details("ADD did not happen on this node, or DEL did")
    })?;
    let (plugin, json) = kept(&record)?;
    Ok(Order { plugin, text: with_keys(cx, json, &["prevResult", "cniVersion"])? })
}

/// The delegate's configuration on DEL: that of ADD, with the result if the runtime has it;
/// or if that is lost, the configuration that ADD would make now.
fn clean_up_conf(cx: &Cx<'_>, conf: &Conf, record: &Record) -> Result<Order> {
    let (plugin, json) = match kept(record) {
        Ok(kept) => kept,
        Err(lost) => {
            log::warn(format_args!("the kept configuration is made anew: {lost}"));
            let derived = Derived::from(&cx.net, conf.env().ok().as_ref())?;
            (derived.plugin, derived.json)
        }
    };
    // A result is written for a version.
    let version = json.get_present("cniVersion").and_then(Json::as_str);
    let fits = cx.version >= SpecVersion::V0_4_0 && version == Some(cx.version.as_str());
    let keys: &[&str] = if fits { &["prevResult"] } else { &[] };
    Ok(Order { plugin, text: with_keys(cx, json, keys)? })
}

/// `json` with keys of the request.
fn with_keys(cx: &Cx<'_>, json: Json, keys: &[&str]) -> Result<String> {
    let Json::Object(mut members) = json else { return json::compact(&json) };
    for key in keys {
        if let Some(value) = cx.net.json.get(key) {
            members.retain(|(k, _)| !k.eq_ignore_ascii_case(key));
            members.push(((*key).to_owned(), value.clone()));
        }
    }
    json::compact(&Json::Object(members))
}

fn is_valid(record: &Record, req: &GcReq) -> bool {
    match &record.ifname {
        Some(ifname) => req.is_valid(&record.container_id, ifname),
        None => req.valid.iter().any(|a| a.container_id == record.container_id),
    }
}

/// Has the delegate remove a stale attachment, from its namespace too if that is there still.
fn collect(cx: &Cx<'_>, record: &Record, netns: &str) -> Result<()> {
    let (plugin, _) = kept(record)?;
    let ifname = record.ifname.as_deref().unwrap_or(USUAL);
    let delegate = cx.delegate(&plugin)?.with_conf(&record.conf);
    delegate.for_attachment(&record.container_id, ifname, netns).run(Verb::Del).map(drop)
}

/// Runs GC of the delegate for what no record names.
fn collect_all(cx: &Cx<'_>, plugin: &str, json: Json) -> Result<()> {
    let text = with_keys(cx, json, &[&ATTACHMENTS[..], &["cniVersion"]].concat())?;
    cx.delegate(plugin)?.with_conf(text.as_bytes()).run(Verb::Gc).map(drop)
}
