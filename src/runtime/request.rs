//! What a plugin is given: the request on stdin and the environment.

use std::path::PathBuf;

use super::{Attach, NetworkList, PluginConf};
use crate::cni::json::{Json, compact};
use crate::cni::{Attachment, CniResult};
use crate::error::Result;
use crate::invoke;

/// The request for ADD, CHECK and DEL: the plugin's configuration with the network's name and
/// version, the previous result, and the capability arguments that the plugin asks for. Those
/// two replace static ones of the file, which else stay.
pub(super) fn for_attachment(
    list: &NetworkList,
    plugin: &PluginConf,
    attach: &Attach,
    prev: Option<&CniResult>,
) -> Result<Vec<u8>> {
    let mut request = common(list, plugin);
    if let Some(prev) = prev {
        request.set("prevResult", prev.to_json());
    }
    let given = |name: &str| attach.capability_args.iter().rfind(|(key, _)| key == name).cloned();
    let wanted: Vec<_> = plugin.wanted().filter_map(given).collect();
    if !wanted.is_empty() {
        request.set("runtimeConfig", Json::Object(wanted));
    }
    encode(request)
}

/// The request for GC and STATUS. A list of valid attachments is written under both spellings of its key:
/// the spelling of the tag 1.1.0 of the specification, and the later one. Without a list neither key is
/// written, because an absent key does not mean that nothing is valid.
pub(super) fn for_network(
    list: &NetworkList,
    plugin: &PluginConf,
    valid: Option<&[Attachment]>,
) -> Result<Vec<u8>> {
    let mut request = common(list, plugin);
    if let Some(valid) = valid {
        let array = Json::Array(valid.iter().map(attachment_json).collect());
        request.set("cni.dev/attachments", array.clone());
        request.set("cni.dev/valid-attachments", array);
    }
    encode(request)
}

fn common(list: &NetworkList, plugin: &PluginConf) -> Json {
    let mut request = plugin.json.clone();
    request.set("name", list.name.as_str().into());
    request.set("cniVersion", list.cni_version.as_str().into());
    request
}

fn attachment_json(attachment: &Attachment) -> Json {
    Json::Object(vec![
        ("containerID".to_owned(), attachment.container_id.as_str().into()),
        ("ifname".to_owned(), attachment.ifname.as_str().into()),
    ])
}

/// Compact, keys sorted. Integral floats become integers: Go plugins take nothing else for an
/// integer field, and the reference writes them so.
fn encode(request: Json) -> Result<Vec<u8>> {
    compact(&request.distinct().normalised().sorted()).map(String::into_bytes)
}

/// All six variables, empty where there is nothing to say.
pub(super) fn environment(
    command: &str,
    attach: &Attach,
    dirs: &[PathBuf],
) -> Vec<(&'static str, String)> {
    let args: Vec<String> = attach.args.iter().map(|(k, v)| format!("{k}={v}")).collect();
    let dirs: Vec<String> = dirs.iter().map(|dir| invoke::text(dir)).collect();
    vec![
        ("CNI_COMMAND", command.to_owned()),
        ("CNI_CONTAINERID", attach.container_id.clone()),
        ("CNI_NETNS", attach.netns.clone()),
        ("CNI_IFNAME", attach.ifname.clone()),
        ("CNI_ARGS", args.join(";")),
        ("CNI_PATH", dirs.join(":")),
    ]
}
