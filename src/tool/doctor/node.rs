//! What is wrong with the node as a whole: configurations, plugins, rules.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::diagnosis::Diagnosis;
use crate::invoke;
use crate::netfilter::{self, PacketFilter, Repair};
use crate::runtime::{EXTENSIONS, NetworkList, Runtime, conf_files};
use crate::skel::Table;
use crate::tool::lint::{self, Scope};

/// Rules that are missing.
pub(super) fn rules() -> Vec<Diagnosis> {
    let subject = "rules of containers";
    match netfilter::heal(&PacketFilter::new(), Repair::Report) {
        Ok(missing) => {
            let missing = missing.into_iter();
            let diagnosis =
                |what| Diagnosis::error(subject, format!("missing: {what}"), "cnibox repair");
            missing.map(|what| Diagnosis { is_rules: true, ..diagnosis(what) }).collect()
        }
        Err(error) => vec![Diagnosis::error(subject, error.msg(), error.details())],
    }
}

/// What `cnibox lint` finds.
pub(super) fn configurations(conf_dir: &Path, cni_path: &str, table: Table) -> Vec<Diagnosis> {
    let findings = lint::lint(&[conf_dir.to_owned()], table, Scope::Node { cni_path });
    findings.into_iter().map(Diagnosis::from).collect()
}

/// Plugins that these networks name and that are not there, or are others than they seem.
pub(super) fn plugins(networks: &[NetworkList], runtime: &Runtime, table: Table) -> Vec<Diagnosis> {
    let mut names = BTreeSet::new();
    for plugin in networks.iter().flat_map(|list| &list.plugins) {
        let ipam = Some(&plugin.ipam_type).filter(|name| !name.is_empty());
        names.extend([Some(&plugin.plugin_type), ipam].into_iter().flatten().cloned());
    }
    names.iter().filter_map(|name| plugin(name, runtime, table)).collect()
}

fn plugin(name: &str, runtime: &Runtime, table: Table) -> Option<Diagnosis> {
    let subject = format!("plugin \"{name}\"");
    let is_ours = table.find(name).is_some();
    let cure = |folder: &Path| {
        if is_ours {
            return format!("cnibox install {}", folder.display());
        }
        "install it, or remove it from the configuration".to_owned()
    };
    let place = |dir: &PathBuf| dir.join(name);
    let is_there = |path: &PathBuf| path.symlink_metadata().is_ok();
    let entry = runtime.plugin_dirs.iter().map(place).find(is_there);
    let folder = entry.as_deref().and_then(Path::parent);
    let folder =
        folder.or(runtime.plugin_dirs.first().map(PathBuf::as_path)).unwrap_or(Path::new("."));
    match runtime.executor.find(name, &runtime.plugin_dirs) {
        Err(error) => {
            let problem = match &entry {
                Some(path) if !path.exists() => format!("{} is a link to nothing", path.display()),
                _ => error.msg().to_owned(),
            };
            Some(Diagnosis::error(subject, problem, cure(folder)))
        }
        Ok(path) => {
            // A copy over the link of one plugin becomes the executable of all of them.
            let target = fs::read_link(&path).ok()?;
            let leads_to_cnibox = target.file_name().is_some_and(|name| name == "cnibox");
            (is_ours && leads_to_cnibox && !invoke::is_own_executable(&path)).then(|| {
                let problem = format!("{} is not the executable that runs now", path.display());
                Diagnosis::warning(subject, problem, cure(folder))
            })
        }
    }
}

/// The networks of a folder that can be read; lint tells of the others.
pub(super) fn networks(conf_dir: &Path) -> Vec<NetworkList> {
    let files = conf_files(conf_dir, &EXTENSIONS).unwrap_or_default();
    files.iter().filter_map(|file| NetworkList::from_any_file(file).ok()).collect()
}
