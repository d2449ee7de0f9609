//! A chained plugin of fifty lines of code: a file of hosts(5) for each attachment, for dnsmasq's
//! `hostsdir`.
//!
//! ```json
//! {"type": "hostsdir", "directory": "/run/hosts.d"}
//! ```
//!
//! The name of a container is its id. ADD creates the directory.

use std::path::PathBuf;
use std::process::ExitCode;
use std::{fs, io};

use cnibox_cni::plugin::{self, Attachment, Network, Plugin};
use cnibox_cni::{CniResult, Error, Result, ValidAttachment};

struct HostsDir;

#[derive(Default, serde::Deserialize)]
struct Keys {
    directory: PathBuf,
}

impl Plugin for HostsDir {
    const NAME: &'static str = "hostsdir";
    type Keys = Keys;

    fn add(network: &Network<Keys>, attachment: &Attachment) -> Result<CniResult> {
        let (file, lines) = (file(network, &attachment.into()), lines(attachment)?);
        let written =
            fs::create_dir_all(&network.keys.directory).and_then(|()| fs::write(&file, lines));
        written.map_err(|cause| Error::io(format_args!("write {}", file.display()), &cause))?;
        attachment.require_prev_result().cloned()
    }

    fn check(network: &Network<Keys>, attachment: &Attachment) -> Result<()> {
        let (file, lines) = (file(network, &attachment.into()), lines(attachment)?);
        let is_same = fs::read_to_string(&file).is_ok_and(|found| found == lines);
        is_same
            .then_some(())
            .ok_or_else(|| Error::internal(format!("{} is missing or changed", file.display())))
    }

    fn del(network: &Network<Keys>, attachment: &Attachment) -> Result<()> {
        remove(&file(network, &attachment.into()))
    }

    fn gc(network: &Network<Keys>, valid: &[ValidAttachment]) -> Result<()> {
        let valid: Vec<_> = valid.iter().map(|attachment| file(network, attachment)).collect();
        // `@` is in no name of a network or container.
        let own =
            network.keys.directory.join(format!("{}@", network.config.name)).display().to_string();
        let is_stale =
            |file: &PathBuf| file.display().to_string().starts_with(&own) && !valid.contains(file);
        let files = fs::read_dir(&network.keys.directory)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path());
        files.filter(is_stale).try_for_each(|file| remove(&file))
    }
}

fn file(
    network: &Network<Keys>,
    ValidAttachment { container_id, ifname }: &ValidAttachment,
) -> PathBuf {
    network.keys.directory.join(format!("{}@{container_id}@{ifname}", network.config.name))
}

fn lines(attachment: &Attachment) -> Result<String> {
    let addresses = attachment.require_prev_result()?.all_addresses();
    let lines: Vec<_> =
        addresses.iter().map(|ip| format!("{} {}\n", ip.addr(), attachment.container_id)).collect();
    Ok(lines.concat())
}

fn remove(file: &PathBuf) -> Result<()> {
    match fs::remove_file(file) {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => {
            removed.map_err(|cause| Error::io(format_args!("remove {}", file.display()), &cause))
        }
    }
}

fn main() -> ExitCode {
    plugin::main::<HostsDir>()
}
