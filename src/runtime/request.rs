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
        set(&mut request, "prevResult", prev.to_json());
    }
    let given = |name: &str| attach.capability_args.iter().rfind(|(key, _)| key == name).cloned();
    let wanted: Vec<_> = plugin.wanted().filter_map(given).collect();
    if !wanted.is_empty() {
        set(&mut request, "runtimeConfig", Json::Object(wanted));
    }
    encode(request)
}

/// The request for GC and STATUS. With a list of valid attachments, both spellings of its key:
/// that of the tag 1.1.0 and that of the text since then. Without one, neither, because an
/// absent key does not mean that nothing is valid.
pub(super) fn for_network(
    list: &NetworkList,
    plugin: &PluginConf,
    valid: Option<&[Attachment]>,
) -> Result<Vec<u8>> {
    let mut request = common(list, plugin);
    if let Some(valid) = valid {
        let array = Json::Array(valid.iter().map(attachment_json).collect());
        set(&mut request, "cni.dev/attachments", array.clone());
        set(&mut request, "cni.dev/valid-attachments", array);
    }
    encode(request)
}

fn common(list: &NetworkList, plugin: &PluginConf) -> Json {
    let mut request = plugin.json.clone();
    set(&mut request, "name", list.name.as_str().into());
    set(&mut request, "cniVersion", list.cni_version.as_str().into());
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
    compact(&distinct(request).normalised().sorted()).map(String::into_bytes)
}

/// Sets a member, whatever case its key was written in before: a plugin ignores the case, so a
/// second spelling would compete with this one.
pub(super) fn set(object: &mut Json, key: &str, value: Json) {
    if let Json::Object(members) = object {
        members.retain(|(k, _)| !k.eq_ignore_ascii_case(key));
        members.push((key.to_owned(), value));
    }
}

/// The same document with each key once in every object; the last one stays.
pub(super) fn distinct(json: Json) -> Json {
    match json {
        Json::Array(items) => Json::Array(items.into_iter().map(distinct).collect()),
        Json::Object(members) => {
            let mut kept: Vec<(String, Json)> = Vec::with_capacity(members.len());
            for (key, value) in members {
                let value = distinct(value);
                match kept.iter_mut().find(|(k, _)| *k == key) {
                    Some((_, earlier)) => *earlier = value,
                    None => kept.push((key, value)),
                }
            }
            Json::Object(kept)
        }
        other => other,
    }
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
