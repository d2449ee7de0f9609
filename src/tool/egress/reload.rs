//! Changed files of policies are put in force: `cnibox egress reload`, and `cnibox repair`, which also
//! makes the links of refused packets again.

use std::collections::BTreeSet;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::process::ExitCode;

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};

use super::super::print_text;
use super::{put_in_force, selected_ports};
use crate::iface::guard::SINK;
use crate::netfilter::egress::{self, EgressPart, source};
use crate::netfilter::{AttachmentId, PacketFilter};
use crate::netlink::Netlink;
use crate::options::CommandLine;
use crate::repairs::RepairFindings;
use cni::error::Result;

pub(super) fn reload_policies(line: &CommandLine) -> Result<ExitCode> {
    let filter = PacketFilter::new();
    let mut repairs = RepairFindings::new(false);
    for report in selected_ports(line, &filter)? {
        repair_policy(&filter, report.stored.attachment_id(), &mut repairs);
    }
    repairs.repair_errors().iter().for_each(|error| warn!("{error}"));
    let reloaded = repairs.missing_state().iter().map(|what| format!("reloaded: {what}\n"));
    let left = repairs.changed_state().iter().map(|what| format!("left alone: {what}\n"));
    let text: String = reloaded.chain(left).collect();
    print_text(if repairs.is_empty() { "no policy has changed\n" } else { &text })?;
    let has_failed = !repairs.repair_errors().is_empty();
    Ok(if has_failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// Makes the links again to which refused packets of containers go: without them there is no place
/// for the chains that tell and count.
pub fn repair_links(repairs: &mut RepairFindings) {
    let mut repair = || -> Result<()> {
        if !egress::RECORDS.has_restorable_part::<EgressPart>(&|_| true) {
            return Ok(());
        }
        let host = Netlink::open()?;
        if !SINK.require_usable(&host).unwrap_or(false) {
            let what = format!("links \"{}\" and \"{}\"", SINK.entry, SINK.port);
            repairs.restore_missing(what, || SINK.ensure_links(&host).map(drop));
        }
        Ok(())
    };
    repair().unwrap_or_else(|error| repairs.record_failure(error));
}

/// Puts the policies of all containers in force whose files have changed.
pub fn repair_policies(repairs: &mut RepairFindings) {
    let filter = PacketFilter::new();
    for stored in egress::RECORDS.iter_parts::<EgressPart>() {
        if stored.content.policy_file.is_some() {
            repair_policy(&filter, stored.attachment_id(), repairs);
        }
    }
}

fn repair_policy(filter: &PacketFilter, owner: AttachmentId<'_>, repairs: &mut RepairFindings) {
    let AttachmentId { network, id, ifname } = owner;
    let of = format!("{network} {id} {ifname}");
    // The runtime may detach the container meanwhile.
    let mut repair = || -> Result<()> {
        let _lock = egress::lock_policy(owner)?;
        let Some((stored, port)) = find_changed_policy(owner)? else { return Ok(()) };
        let file = port.policy_file.clone().unwrap_or_default();
        let what = format!("policy {} of {of}", file.display());
        if stored.added.is_empty() {
            repairs.restore_missing(what, || put_in_force(filter, owner, &stored, port));
        } else {
            repairs.record_changed(format!("{what}, which \"egress set\" has replaced"));
        }
        Ok(())
    };
    repair().unwrap_or_else(|error| repairs.record_failure(error.context(of)));
}

/// The recorded port of a container, and the one with the present content of its file, if that has
/// changed. A file that is gone leaves its policy in force.
fn find_changed_policy(owner: AttachmentId<'_>) -> Result<Option<(EgressPart, EgressPart)>> {
    let Some(stored) = egress::RECORDS.read_content::<EgressPart>(owner) else { return Ok(None) };
    let Some(file) = stored.policy_file.as_ref().filter(|file| file.exists()) else {
        return Ok(None);
    };
    let policy = source::read_trusted_policy(file)?;
    if stored.policies_of_add().last() == Some(&policy) {
        return Ok(None);
    }
    let mut port = stored.clone();
    port.policies.pop();
    port.policies.push(policy);
    Ok(Some((stored, port)))
}

/// Is readable after a change in a directory of files that policies of containers are from.
pub struct PolicyFilesWatch(Inotify);

impl AsFd for PolicyFilesWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl PolicyFilesWatch {
    /// Watches the directories of the present containers; `None` without any.
    pub fn start() -> Option<PolicyFilesWatch> {
        let parts = egress::RECORDS.iter_parts::<EgressPart>();
        let directories: BTreeSet<PathBuf> = parts
            .filter_map(|stored| stored.content.policy_file?.parent().map(PathBuf::from))
            .collect();
        if directories.is_empty() {
            return None;
        }
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)
            .inspect_err(|error| warn!("could not watch the files of policies: {error}"))
            .ok()?;
        let events = AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_MOVED_TO;
        for directory in directories {
            if let Err(error) = inotify.add_watch(&directory, events) {
                debug!("could not watch {}: {error}", directory.display());
            }
        }
        Some(PolicyFilesWatch(inotify))
    }

    /// Whether anything has changed since the last call.
    pub fn has_changed(&self) -> bool {
        self.0.read_events().is_ok_and(|events| !events.is_empty())
    }
}
