//! flannel: delegates to another plugin, by default bridge with host-local, with the subnet that
//! flanneld has written for this node.
//!
//! Keys: `subnetFile`, `dataDir`, `delegate`, `ipam`, and `runtimeConfig`, `args` and `dns`, which
//! are passed on. The result is the delegate's.
//!
//! State on the host while the container lives: the delegate's configuration in `dataDir`
//! (`record.rs`), and the state of the delegate; permanently: the directory.

mod derive;
mod record;
mod subnet;

use std::path::{Path, PathBuf};

use serde::Deserialize;

use self::derive::derive_config;
use self::record::{DelegateRecord, DelegateRecordStore, RecordedNamespace};
use self::subnet::SubnetEnv;
use crate::attachment::AttachmentId;
use crate::files::trust;
use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, Failures, GcRequest, Plugin,
    Rollback, reference_gc,
};
use crate::repairs::RepairFindings;
use cni::error::{Error, ErrorCode, ErrorContext, Result};
use cni::json::keys::DecodedKeys;
use cni::json::{self, Json};
use cni::plugin::CniVerb;
use cni::{CniResult, SpecVersion};

const SUBNET_FILE: &str = "/run/flannel/subnet.env";
const DATA_DIR: &str = "/var/lib/cni/flannel";
/// The interface of a record that names none.
const DEFAULT_IFNAME: &str = "eth0";

#[derive(Debug)]
pub struct Flannel;

/// The plugin's own keys.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FlannelConfig {
    /// The file that flanneld writes. Default: `/run/flannel/subnet.env`.
    subnet_file: Option<PathBuf>,
    /// The directory of the delegates' configurations. Default: `/var/lib/cni/flannel`.
    data_dir: Option<PathBuf>,
}

impl FlannelConfig {
    fn read_subnet_env(&self) -> Result<SubnetEnv> {
        SubnetEnv::read_file(self.subnet_file.as_deref().unwrap_or(Path::new(SUBNET_FILE)))
    }

    fn record_directory(&self) -> &Path {
        let given = self.data_dir.as_deref().filter(|dir| !dir.as_os_str().is_empty());
        given.unwrap_or(Path::new(DATA_DIR))
    }

    /// The records; fails if other users than root could have written them, because a record names
    /// the plugin that DEL executes.
    fn open_records(&self) -> Result<DelegateRecordStore> {
        Ok(DelegateRecordStore::from_trusted_directory(&trust::resolve_data_dir(
            self.record_directory(),
        )?))
    }

    /// As [`FlannelConfig::open_records`], for the verbs of an existing attachment, which no
    /// invalid key prevents: without records the delegate's configuration is derived from the
    /// request.
    fn open_records_if_trusted(&self) -> Option<DelegateRecordStore> {
        self.open_records()
            .inspect_err(|error| {
                warn!("{error}; its records are ignored");
            })
            .ok()
    }
}

impl Plugin for Flannel {
    const NAME: &'static str = "flannel";
    const ABOUT: &'static str = "delegates to bridge with the node's flannel subnet";
    const REPAIRS: bool = true;
    type Conf = FlannelConfig;

    fn keys() -> DecodedKeys {
        DecodedKeys::of_type::<FlannelConfig>()
            .with_member("delegate", DecodedKeys::Any)
            .with_member("ipam", DecodedKeys::Any)
    }

    fn examine(cx: &CallContext<'_>, conf: &FlannelConfig, _: &mut ConfigRemarks) -> Result<()> {
        trust::require_data_dir_path(conf.record_directory())?;
        derive_config(&cx.net, None).map(drop)
    }

    fn add(cx: &CallContext<'_>, conf: &FlannelConfig, req: &AddRequest) -> Result<CniResult> {
        let json = derive_config(&cx.net, Some(&conf.read_subnet_env()?))?;
        let (text, records) = (
            json::encode_compact(&json)?,
            DelegateRecordStore::create_in_directory(conf.record_directory())?,
        );
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let delegate =
            cx.find_delegate(delegate_type(&json)).context(|| "failed to delegate add")?;
        let delegate = delegate.with_config(text.as_bytes());
        let former = records.find_record(&owner)?;
        debug!("netconf sent to delegate plugin: {text}");
        let mut undo = Rollback::new();
        let (cleaner, saved) = (delegate.clone(), &records);
        undo.add_step("undo the delegate's ADD", move || match former {
            // The attachment existed before.
            Some(former) => saved.save_record(&owner, &former.conf, former.note.sandbox),
            None => match cleaner.run_verb(CniVerb::Del) {
                // The record stays, so that DEL or GC can retry.
                Err(error) if !is_about_configuration(error.code()) => Err(error),
                _ => saved.find_record(&owner)?.map_or(Ok(()), |record| record.remove_files()),
            },
        });
        let netns = RecordedNamespace::from_path(&req.sandbox.path);
        records.save_record(&owner, text.as_bytes(), netns)?;
        let result = delegate.run_verb(CniVerb::Add)?.unwrap_or_default();
        undo.commit();
        Ok(result)
    }

    fn check(cx: &CallContext<'_>, conf: &FlannelConfig, req: &CheckRequest) -> Result<()> {
        run_delegate(cx, &find_add_config(cx, conf, req)?, CniVerb::Check).or_else(|error| {
            match error.code() {
                // Plugins of early versions have no CHECK.
                ErrorCode::INCOMPATIBLE_VERSION => Ok(()),
                _ => Err(error),
            }
        })
    }

    fn repair(
        cx: &CallContext<'_>,
        conf: &FlannelConfig,
        req: &CheckRequest,
        repairs: &mut RepairFindings,
    ) -> Result<()> {
        let json = find_add_config(cx, conf, req)?;
        let text = json::encode_compact(&json)?;
        cx.find_delegate(delegate_type(&json))?
            .with_config(text.as_bytes())
            .repair_attachment(repairs)
    }

    fn del(cx: &CallContext<'_>, conf: &FlannelConfig, req: &DelRequest) -> Result<()> {
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let mut record = None;
        if let Some(records) = conf.open_records_if_trusted() {
            records.remove_temporary_file(&owner)?;
            record = records.find_record(&owner)?;
            if record.is_none() {
                return Ok(());
            }
        }
        let saved = record.as_ref().and_then(|record| {
            let derived = "the saved configuration is derived again";
            record.parse_config().inspect_err(|e| warn!("{derived}: {e}")).ok()
        });
        let mut json = saved
            .map_or_else(|| derive_config(&cx.net, conf.read_subnet_env().ok().as_ref()), Ok)?;
        // The result is in the layout of the request's version.
        let version = json.get_present_member("cniVersion").and_then(Json::as_str);
        let is_same_version = version == Some(cx.version.as_str());
        if is_same_version && cx.version >= SpecVersion::V0_4_0 {
            copy_keys(cx, &mut json, &["prevResult"]);
        }
        run_delegate(cx, &json, CniVerb::Del)?;
        record.map_or(Ok(()), |record| record.remove_files())
    }

    fn gc(cx: &CallContext<'_>, conf: &FlannelConfig, req: &GcRequest) -> Result<()> {
        let network = cx.net.name.as_str();
        let mut failures = Failures::new();
        // One configuration for each delegate.
        let mut confs = Vec::from_iter(
            failures.keep_error(derive_config(&cx.net, conf.read_subnet_env().ok().as_ref())),
        );
        let mut of_reference = Vec::new();
        let records = conf.open_records_if_trusted();
        if let Some(records) = &records {
            records.remove_temporary_files(
                network,
                &AttachmentId::from_attachments(&cx.net.name, &req.valid),
            );
        }
        let all = records.as_ref().and_then(|records| failures.keep_error(records.list_records()));
        let all = all.unwrap_or_default();
        // The network of a malformed record is unknown.
        for record in all.iter().filter(|record| record.network_name().as_deref() == Some(network))
        {
            let Some(json) = failures.keep_error(record.parse_config()) else { continue };
            let id = &record.container_id;
            let is_valid = match &record.note.ifname {
                Some(ifname) => req.is_valid_attachment(id, ifname),
                None => req.valid.iter().any(|a| a.container_id == *id),
            };
            if !is_valid && record.note.ifname.is_none() {
                of_reference.push(record);
            } else if !is_valid {
                let sandbox = &record.note.sandbox;
                // A later attachment may be in the same namespace.
                let has_own_tables_only =
                    all.iter().filter(|r| r.note.sandbox == *sandbox).count() == 1;
                let netns = sandbox
                    .as_ref()
                    .filter(|_| has_own_tables_only)
                    .and_then(RecordedNamespace::present_path);
                let ifname = record.note.ifname.as_deref().unwrap_or(DEFAULT_IFNAME);
                let deleted = cx.find_delegate(delegate_type(&json)).and_then(|delegate| {
                    let delegate = delegate.with_config(&record.conf);
                    delegate
                        .for_attachment(id, ifname, netns.unwrap_or_default())
                        .run_verb(CniVerb::Del)
                });
                failures.keep_error(deleted.and_then(|_| record.remove_files()));
            }
            if !confs.iter().any(|other| delegate_type(other) == delegate_type(&json)) {
                confs.push(json);
            }
        }
        for mut json in confs {
            let keys = ["cni.dev/valid-attachments", "cni.dev/attachments", "cniVersion"];
            copy_keys(cx, &mut json, &keys);
            failures.keep_error(run_delegate(cx, &json, CniVerb::Gc));
        }
        for record in of_reference {
            failures.keep_error(remove_if_unused(record, network));
        }
        failures.into_result()
    }

    fn status(cx: &CallContext<'_>, conf: &FlannelConfig) -> Result<()> {
        conf.open_records().or_unavailable()?;
        let json = conf
            .read_subnet_env()
            .and_then(|env| derive_config(&cx.net, Some(&env)))
            .or_unavailable()?;
        let text = json::encode_compact(&json)?;
        let delegate = cx.find_delegate(delegate_type(&json)).or_unavailable()?;
        delegate.with_config(text.as_bytes()).run_verb(CniVerb::Status).map(drop)
    }
}

/// Removes a record of the reference whose container has no address any more: the delegate's GC
/// releases it if no link can be the container's. Without the record a later DEL would leave the
/// link.
fn remove_if_unused(record: &DelegateRecord, network: &str) -> Result<()> {
    let (json, id) = (record.parse_config()?, &record.container_id);
    let leases = reference_gc::read_network_leases(&json, network)?;
    if leases.is_some_and(|leases| leases.iter().all(|status| status.lease.id != *id)) {
        return record.remove_files();
    }
    warn!(
        "GC keeps the record of container \"{id}\", which the reference made: its link may exist; \
         DEL removes it"
    );
    Ok(())
}

/// Whether the delegate has refused its configuration, so that its DEL always fails.
fn is_about_configuration(code: ErrorCode) -> bool {
    [
        ErrorCode::INCOMPATIBLE_VERSION,
        ErrorCode::UNSUPPORTED_FIELD,
        ErrorCode::DECODE,
        ErrorCode::INVALID_CONFIG,
    ]
    .contains(&code)
}

fn delegate_type(json: &Json) -> &str {
    json.get_present_member("type").and_then(Json::as_str).unwrap_or_default()
}

/// Runs the delegate with this configuration.
fn run_delegate(cx: &CallContext<'_>, json: &Json, verb: CniVerb) -> Result<()> {
    let text = json::encode_compact(json)?;
    cx.find_delegate(delegate_type(json))?.with_config(text.as_bytes()).run_verb(verb).map(drop)
}

/// The delegate's configuration of ADD, with the request's result.
fn find_add_config(cx: &CallContext<'_>, conf: &FlannelConfig, req: &CheckRequest) -> Result<Json> {
    let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
    let Some(records) = conf.open_records_if_trusted() else {
        let mut json = derive_config(&cx.net, Some(&conf.read_subnet_env()?))?;
        copy_keys(cx, &mut json, &["prevResult"]);
        return Ok(json);
    };
    let record = records.find_record(&owner)?.ok_or_else(|| {
        let msg = format!("flannel: no configuration is saved for {}, {}", req.id, req.ifname);
        Error::internal(msg).with_details("ADD did not run on this node, or DEL has run since")
    })?;
    let mut json = record.parse_config()?;
    copy_keys(cx, &mut json, &["prevResult", "cniVersion"]);
    Ok(json)
}

fn copy_keys(cx: &CallContext<'_>, json: &mut Json, keys: &[&str]) {
    for key in keys {
        if let Some(value) = cx.net.json.get_member(key) {
            json.set_member(key, value.clone());
        }
    }
}
