//! The files of a folder, and what is wrong between them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use ipnet::IpNet;

use super::network::Network;
use super::{Finding, Severity};
use crate::error::Error;
use crate::runtime::{EXTENSIONS, conf_files};

/// The files that are meant. A folder that has none is a finding: a runtime then has no network.
pub(super) fn files(paths: &[PathBuf], findings: &mut Vec<Finding>) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for path in paths {
        if !path.is_dir() {
            files.push(path.clone());
            continue;
        }
        let none = || {
            let msg = "there is no network configuration: \"cni plugin not initialized\"";
            Error::config(msg).with_details("install a file that ends in .conflist")
        };
        let found = conf_files(path, &EXTENSIONS);
        match found.and_then(|found| if found.is_empty() { Err(none()) } else { Ok(found) }) {
            Ok(found) => files.extend(found),
            Err(error) => findings.push(Finding::new(path, "", None, Severity::Error, &error)),
        }
    }
    files
}

/// What is wrong between the networks of a node.
pub(super) fn compare(networks: &[Network]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut files: HashMap<&str, &Path> = HashMap::new();
    for network in networks.iter().filter(|network| !network.name.is_empty()) {
        let first = *files.entry(&network.name).or_insert(&network.file);
        if first != network.file {
            let msg = format!("network \"{}\" is already in {}", network.name, first.display());
            let error = Error::config(msg)
                .with_details("runtimes use the first of them: rename or remove one");
            findings.push(network.warning(&error));
        }
    }
    for (i, network) in networks.iter().enumerate() {
        for other in networks[..i].iter().filter(|other| other.name != network.name) {
            if let Some((own, others)) = overlap(&network.subnets, &other.subnets) {
                let (name, file) = (&other.name, other.file.display());
                let msg = format!("subnet {own} overlaps {others} of network \"{name}\" in {file}");
                let error = Error::config(msg)
                    .with_details("two containers may get the same address: choose another subnet");
                findings.push(network.warning(&error));
            }
        }
    }
    findings
}

fn overlap(own: &[IpNet], others: &[IpNet]) -> Option<(IpNet, IpNet)> {
    let pairs = own.iter().flat_map(|a| others.iter().map(move |b| (*a, *b)));
    pairs.into_iter().find(|(a, b)| a.contains(b) || b.contains(a))
}
