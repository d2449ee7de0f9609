//! `ipam`: lists the leases of host-local with the state of their containers, and releases
//! addresses.

use std::net::IpAddr;
use std::process::ExitCode;
use std::time::SystemTime;

use serde::Serialize;

use super::directories::{CACHE, CONF, LEASES, LeaseDirectory, ToolDirectories};
use super::life::{alive_and_reason, format_alive};
use super::outcome::{ActionOutcome, report_outcomes};
use super::{DRY_RUN, JSON, NETWORK, ToolCommand, format_table, json_text, print_text};
use crate::attachment::Liveness;
use crate::framework::AppletTable;
use crate::leases::{AddressLease, AddressReservation, LeaseStatus, ReclaimedLease};
use crate::options::{
    CommandLine, CommandOption, long_option, unexpected_argument, unknown_word_error, usage_error,
};
use cni::NetworkName;
use cni::error::{Error, Result};
use cni::sort::{sort_by, sort_by_key};

pub(super) const TOOL: ToolCommand = ToolCommand {
    command: "ipam",
    usage: "\
ipam: lists and frees leases of host-local

Usage:
  cnibox ipam ls   [--network NAME] [--json]       list the leases; changes nothing, does not wait \
            for a lock
  cnibox ipam free --network NAME <address>        free one address, even if it is reserved
  cnibox ipam free --network NAME <container>      free all addresses of a container, given by its \
            full id
  cnibox ipam free --empty [--network NAME]        free the addresses whose files are empty
cnibox gc frees the addresses of dead containers.
",
    options: &[
        NETWORK,
        long_option(
            "--empty",
            "",
            "free: the addresses whose files are empty: left by a crash of another program, \
             or\nreserved by an administrator",
        ),
        long_option(
            "--force",
            "",
            "free: also an address that a container uses; another container may get it then",
        ),
        DRY_RUN,
        CommandOption {
            about: "ls: an array of objects with network, address, container, interface (null \
                    in\nleases of old releases), age (seconds), alive (true, false, or null \
                    if\nunknown), reason (why alive is not true, or why the address is \
                    reserved)\nand reclaimed (the container that had the address before, and why \
                    it lost it);\nfree: of objects with action, object, network, problem and \
                    remedy",
            ..JSON
        },
        LEASES,
        CONF,
        CACHE,
    ],
    notes: "
ALIVE is \"yes\" if the host's end of the container's veth pair exists, \"no\" if that end is gone \
            or the lease was made
before the last boot, \"?\" if neither is proved: gc and the plugin keep such a lease.

Exit status: 0 done; 1 something failed, see stderr, or with --dry-run something would be freed; 2 \
            wrong usage.

Example:
  cnibox ipam ls --network pods
  cnibox ipam free --network pods 10.88.0.17
",
};

#[derive(Debug, PartialEq, Eq)]
enum IpamCommand {
    List { network: Option<String> },
    Free { network: String, what: String, force: bool },
    FreeEmpty { network: Option<String> },
}

struct IpamRequest {
    command: IpamCommand,
    json: bool,
    dry_run: bool,
    directories: ToolDirectories,
}

/// Runs the tool with the arguments that follow its name.
pub fn main(args: Vec<String>, _: AppletTable) -> ExitCode {
    TOOL.run_command(args, |line| IpamRequest::from_command_line(&line), |job| job.run_command())
}

impl IpamRequest {
    fn from_command_line(line: &CommandLine) -> Result<IpamRequest> {
        let mut words = line.words.iter().cloned();
        let name = words.next().ok_or_else(|| usage_error("a command is missing: ls or free"))?;
        let (empty, force) = (line.has_option("--empty"), line.has_option("--force"));
        let mut words: Vec<String> = words.collect();
        let network = line.last_value(NETWORK.flag).map(str::to_owned);
        if let Some(network) = &network {
            NetworkName::parse(network)?;
        }
        let (command, allowed): (_, &[&str]) = match &*name {
            "ls" | "list" => (IpamCommand::List { network }, &[JSON.flag]),
            "free" if empty => {
                (IpamCommand::FreeEmpty { network }, &["--empty", DRY_RUN.flag, JSON.flag])
            }
            "free" => {
                let missing = || usage_error("free needs --network and an address or container");
                let what = words.pop().ok_or_else(missing)?;
                let network = network.ok_or_else(missing)?;
                let allowed = &["--force", DRY_RUN.flag, JSON.flag];
                (IpamCommand::Free { network, what, force }, allowed)
            }
            other => return Err(unknown_word_error("command", other, &["ls", "free"])),
        };
        let of_all = [LEASES.flag, CONF.flag, CACHE.flag, NETWORK.flag];
        let is_odd = |flag: &&str| !of_all.contains(flag) && !allowed.contains(flag);
        if let Some(flag) = line.given_flags().find(is_odd) {
            return Err(usage_error(format!("{flag} is not an option of {name}")));
        }
        if let Some(extra) = words.first() {
            return Err(unexpected_argument(extra));
        }
        Ok(IpamRequest {
            command,
            json: line.has_option(JSON.flag),
            dry_run: line.has_option(DRY_RUN.flag),
            directories: ToolDirectories::from_command_line(line),
        })
    }

    fn run_command(&self) -> Result<ExitCode> {
        let stores = |network: &Option<String>| {
            require_lease_directories(&self.directories, network.as_deref())
        };
        let outcomes = match &self.command {
            IpamCommand::List { network } if self.json => {
                return print_text(&list_json(&stores(network)?)?);
            }
            IpamCommand::List { network } => {
                let heading = ["NETWORK", "ADDRESS", "CONTAINER", "INTERFACE", "AGE", "ALIVE"];
                let rows = list_rows(&stores(network)?)?;
                return print_text(&format_table(
                    heading,
                    rows.iter().map(LeaseListRow::text_cells),
                ));
            }
            IpamCommand::Free { network, what, force } => {
                free_leases(&stores(&Some(network.clone()))?, what, *force, self.dry_run)?
            }
            IpamCommand::FreeEmpty { network } => {
                free_empty_files(&stores(network)?, self.dry_run)?
            }
        };
        report_outcomes(&outcomes, self.json, self.dry_run, "nothing to free was found")
    }
}

/// The leases of the network, of which there must be some, or of all networks.
fn require_lease_directories(
    directories: &ToolDirectories,
    network: Option<&str>,
) -> Result<Vec<LeaseDirectory>> {
    let stores = directories.find_lease_directories(network)?;
    match network {
        Some(network) if stores.is_empty() => {
            let msg = format!(
                "no network \"{network}\" in {}",
                directories.searched_directories(network)
            );
            Err(Error::config(msg))
        }
        _ => Ok(stores),
    }
}

/// The output of `ipam ls --json`.
pub(super) fn list_json(stores: &[LeaseDirectory]) -> Result<String> {
    json_text(&list_rows(stores)?)
}

/// Frees an address, or all addresses of a container, in these stores of one network. One that a
/// container uses is freed only with `force`.
fn free_leases(
    stores: &[LeaseDirectory],
    what: &str,
    force: bool,
    dry_run: bool,
) -> Result<Vec<ActionOutcome>> {
    let address = what.parse::<IpAddr>().ok();
    let network = stores.first().map_or("", |store| &store.network);
    let is_meant = |lease: &AddressLease| address.map_or(lease.id == what, |ip| lease.ip == ip);
    let is_reserved = |reserved: &AddressReservation| Some(reserved.ip) == address;
    let (mut freed, mut reserved) = (Vec::new(), Vec::new());
    for store in stores {
        // Read before the lock is taken, as plugins wait for the lock.
        let listing = store.read_listing()?;
        let mut statuses = listing.lease_statuses();
        statuses.retain(|status| is_meant(&status.lease));
        if let Some(used) = statuses.iter().find(|it| it.liveness == Liveness::Alive && !force) {
            let msg = format!("{} is in use: its link on the host exists", used.lease);
            let remedy = "delete the container; --force frees the address all the same, and \
                          another container may get it";
            return Err(Error::config(msg).with_details(remedy));
        }
        if dry_run {
            freed.extend(statuses.into_iter().map(|status| status.lease));
            reserved.extend(listing.list_reservations().into_iter().filter(is_reserved));
        } else if let Some(mut leases) = store.lock_leases()? {
            freed.extend(leases.retain_leases(|lease| !is_meant(lease), false)?.0);
            reserved.extend(leases.remove_reservations(is_reserved)?);
        }
    }
    if freed.is_empty() && reserved.is_empty() {
        let msg = format!("network \"{network}\" has no lease of \"{what}\"");
        let remedy = format!("see: cnibox ipam ls --network {network}");
        return Err(Error::config(msg).with_details(remedy));
    }
    sort_by_key(&mut freed, |lease| lease.ip);
    let freed = freed.iter().map(AddressLease::to_string);
    let all = freed.chain(reserved.iter().map(AddressReservation::to_string));
    Ok(all.map(|object| freed_outcome(network, object, dry_run)).collect())
}

fn free_empty_files(stores: &[LeaseDirectory], dry_run: bool) -> Result<Vec<ActionOutcome>> {
    let is_empty = |reserved: &AddressReservation| reserved.empty;
    let mut outcomes = Vec::new();
    for store in stores {
        let reserved: Vec<AddressReservation> = if dry_run {
            store.read_listing()?.list_reservations().into_iter().filter(is_empty).collect()
        } else {
            let leases =
                store.lock_leases()?.map(|mut leases| leases.remove_reservations(is_empty));
            leases.transpose()?.unwrap_or_default()
        };
        outcomes.extend(
            reserved.iter().map(|it| freed_outcome(&store.network, it.to_string(), dry_run)),
        );
    }
    Ok(outcomes)
}

fn freed_outcome(network: &str, object: String, dry_run: bool) -> ActionOutcome {
    ActionOutcome::new(if dry_run { "would free" } else { "freed" }, network, object, "")
}

/// A line of the list. In JSON the keys are sorted, as everywhere.
#[derive(Serialize)]
struct LeaseListRow {
    address: IpAddr,
    /// Seconds, by the wall clock.
    age: Option<u64>,
    alive: Option<bool>,
    container: Option<String>,
    interface: Option<String>,
    network: String,
    reason: Option<String>,
    /// The previous owner, if the address was reclaimed, and why.
    reclaimed: Option<String>,
}

/// The leases and reservations, by network and address.
fn list_rows(stores: &[LeaseDirectory]) -> Result<Vec<LeaseListRow>> {
    let mut rows = Vec::new();
    for store in stores {
        let (network, listing) = (&store.network, store.read_listing()?);
        let (leases, reserved) = (listing.lease_statuses(), listing.list_reservations());
        // Only root may read leases, and a list without them would look like a free network.
        let unreadable =
            listing.taken_addresses().len().saturating_sub(leases.len() + reserved.len());
        if unreadable > 0 {
            warn!("network {network}: {unreadable} leases cannot be read");
        }
        rows.extend(leases.into_iter().map(|status| LeaseListRow::from_lease(network, status)));
        rows.extend(
            reserved.iter().map(|reserved| LeaseListRow::from_reservation(network, reserved)),
        );
    }
    sort_by(&mut rows, |a, b| (&a.network, a.address).cmp(&(&b.network, b.address)));
    Ok(rows)
}

impl LeaseListRow {
    fn from_lease(network: &str, status: LeaseStatus) -> LeaseListRow {
        // The nanoseconds of the time are not significant and may lie in the future.
        let age = |created| SystemTime::now().duration_since(created).unwrap_or_default().as_secs();
        let (alive, reason) = alive_and_reason(status.liveness);
        LeaseListRow {
            address: status.lease.ip,
            age: status.created.map(age),
            alive,
            container: Some(status.lease.id),
            interface: status.lease.ifname,
            network: network.to_owned(),
            reason,
            reclaimed: status
                .reclaimed
                .map(|ReclaimedLease { lease, why }| format!("from container {}: {why}", lease.id)),
        }
    }

    fn from_reservation(network: &str, reserved: &AddressReservation) -> LeaseListRow {
        LeaseListRow {
            address: reserved.ip,
            age: None,
            alive: None,
            container: None,
            interface: None,
            network: network.to_owned(),
            reason: Some(format!("reserved: {}", reserved.reason_text())),
            reclaimed: None,
        }
    }

    fn text_cells(&self) -> [String; 6] {
        let word = |word: &Option<String>| word.clone().unwrap_or_else(|| "?".to_owned());
        let mut alive = match self.container {
            Some(_) => format_alive((self.alive, self.reason.clone())),
            None => word(&self.reason),
        };
        if let Some(from) = &self.reclaimed {
            alive.extend(["; reclaimed ", from]);
        }
        [
            self.network.clone(),
            self.address.to_string(),
            word(&self.container),
            word(&self.interface),
            self.age.map_or("?".to_owned(), short_duration),
            alive,
        ]
    }
}

/// A duration in its largest unit, rounded down.
pub(super) fn short_duration(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m", seconds / 60),
        3_600..86_400 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{self, ParsedCommandLine};

    fn job(line: &str) -> Result<IpamRequest> {
        let words = line.split_whitespace().map(str::to_owned).collect();
        match options::parse_args(words, TOOL.options)? {
            ParsedCommandLine::Work(line) => IpamRequest::from_command_line(&line),
            asked => panic!("{asked:?}"),
        }
    }

    fn parsed(line: &str) -> Result<IpamCommand> {
        job(line).map(|job| job.command)
    }

    #[test]
    fn command_lines_are_parsed() {
        let net = || Some("net".to_owned());
        assert_eq!(parsed("ls"), Ok(IpamCommand::List { network: None }));
        assert_eq!(parsed("ls --json --network net"), Ok(IpamCommand::List { network: net() }));
        let free = |force| {
            let (network, what) = ("net".to_owned(), "10.0.0.2".to_owned());
            Ok(IpamCommand::Free { network, what, force })
        };
        assert_eq!(parsed("free --network net 10.0.0.2"), free(false));
        assert_eq!(parsed("free --network=net --force 10.0.0.2"), free(true));
        assert_eq!(parsed("free --empty"), Ok(IpamCommand::FreeEmpty { network: None }));
        assert_eq!(
            parsed("free --empty --network net"),
            Ok(IpamCommand::FreeEmpty { network: net() })
        );
        let dirs = job("ls --data-dir /x --data-dir=/y").unwrap().directories.leases;
        assert_eq!(dirs[1..], ["/x", "/y"].map(std::path::PathBuf::from));
        for wrong in [
            "",
            "rm net",
            "free",
            "free net",
            "free --network net",
            "free --network net a b",
            "free --empty net x",
            "free --empty --force",
            "ls a b",
            "ls --force",
            "ls net",
            "free net 10.0.0.2",
            "gc",
            "ls -n",
            "ls -x",
            "free /etc c1",
            "free --network /etc c1",
            "ls --data-dir",
        ] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn durations_are_printed_in_one_unit() {
        let texts = [0, 59, 60, 3_599, 3_600, 86_399, 86_400, 864_000].map(short_duration);
        assert_eq!(texts, ["0s", "59s", "1m", "59m", "1h", "23h", "1d", "10d"]);
    }
}
