//! `ipam`: lists the leases of host-local with the state of their containers, and releases addresses.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use serde::Serialize;

use super::{NOT_FOUND, Tool, columns, print};
use crate::attachment::{Liveness, Record};
use crate::cni::NetworkName;
use crate::cni::json::pretty;
use crate::error::{Error, Result};
use crate::leases::{
    self, DATA_DIR, Lease, LeaseOptions, LeaseStatus, LeaseStore, Listing, Reclaimed, Reservation,
};
use crate::log;
use crate::options::{CommandLine, Opt, opt, unknown_word, usage};
use crate::skel::{Failures, Table, reclaim};
use crate::sort::{sort_by, sort_by_key};

pub(super) const TOOL: Tool = Tool {
    command: "ipam",
    usage: "\
ipam: lists and releases the addresses of host-local

Usage:
  ipam ls   [<network>] [--json]       list the leases; changes nothing, does not wait for a lock
  ipam free <network> <address>        release one address, even if it is reserved
  ipam free <network> <container>      release all addresses of a container, given by its full id
  ipam gc   [<network>] [--empty]      release the addresses of containers that are certainly dead, and remove
                                       their host ports and other rules
Each command is also available as \"cnibox ipam ...\".
",
    options: &[
    opt(
        "--data-dir",
        "DIR",
        "parent of the networks' directories, \"dataDir\" of the configuration;\ndefault /var/lib/cni/networks",
    ),
    opt(
        "--json",
        "",
        "ls: an array of objects with network, address, container, interface (null in\n\
         leases of old releases), age (seconds), alive (true, false, or null if\n\
         unknown), reason (why alive is not true, or why the address is reserved)\n\
         and reclaimed (from which container the address was, and why)",
    ),
    opt(
        "--empty",
        "",
        "gc: also addresses whose files are empty: left by a crash of another program,\n\
         or reserved by an administrator",
    ),
    Opt {
        short: Some('n'),
        ..opt("--dry-run", "", "free, gc: print the addresses, and change nothing")
    },
    ],
    notes: "
ALIVE is \"yes\" if the host's end of the container's veth pair exists, \"no\" if that end is gone or the lease was made
before the last boot, \"?\" if neither is proved: gc and the plugin keep such a lease. free does not ask for
confirmation: an address that is still in use will be allocated to another container as well.

Exit status: 0 done; 1 something failed, see stderr; 2 wrong usage; 3 no such network or lease.

Example:
  ipam ls pods
  ipam gc --dry-run
  ipam free pods 10.88.0.17
",
};

/// The beginning of lines about what stays because nothing proves that its attachment has ended.
const IN_DOUBT: &str = "in doubt, kept:";

#[derive(Debug, PartialEq, Eq)]
enum Command {
    List { network: Option<String>, json: bool },
    Free { network: String, what: String, dry_run: bool },
    Gc { network: Option<String>, empty: bool, dry_run: bool },
}

#[derive(Debug)]
struct Job {
    command: Command,
    data_dir: PathBuf,
}

/// Runs the tool with the arguments that follow its name.
pub fn main(args: Vec<String>, _: Table) -> ExitCode {
    TOOL.run(args, |line| Job::read(&line), |job| print(&job.run()?))
}

impl Job {
    fn read(line: &CommandLine) -> Result<Job> {
        let mut words = line.words.iter().cloned();
        let name = words.next().ok_or_else(|| usage("a command is missing: ls, free or gc"))?;
        let network = words.next();
        if let Some(network) = &network {
            NetworkName::parse(network)?;
        }
        let dry_run = line.has("--dry-run");
        let (command, allowed): (_, &[&str]) = match &*name {
            "ls" | "list" => (Command::List { network, json: line.has("--json") }, &["--json"]),
            "gc" => {
                let empty = line.has("--empty");
                (Command::Gc { network, empty, dry_run }, &["--empty", "--dry-run"])
            }
            "free" => {
                let missing = || usage("free needs a network and an address or container");
                let (network, what) = network.zip(words.next()).ok_or_else(missing)?;
                (Command::Free { network, what, dry_run }, &["--dry-run"])
            }
            other => return Err(unknown_word("command", other, &["ls", "free", "gc"])),
        };
        let is_odd = |flag: &&str| *flag != "--data-dir" && !allowed.contains(flag);
        if let Some(flag) = line.given().find(is_odd) {
            return Err(usage(format!("{flag} is not an option of {name}")));
        }
        if let Some(extra) = words.next() {
            return Err(usage(format!("unexpected argument \"{extra}\"")));
        }
        Ok(Job { command, data_dir: line.last("--data-dir").unwrap_or(DATA_DIR).into() })
    }

    fn run(&self) -> Result<String> {
        let dir = &self.data_dir;
        match &self.command {
            Command::List { network, json: true } => list_json(dir, network.as_deref()),
            Command::List { network, json: false } => {
                let heading = ["NETWORK", "ADDRESS", "CONTAINER", "INTERFACE", "AGE", "ALIVE"];
                let rows = rows(dir, network.as_deref())?;
                let lines =
                    [heading.map(str::to_owned)].into_iter().chain(rows.iter().map(Row::cells));
                Ok(columns(&lines.collect::<Vec<_>>()))
            }
            Command::Free { network, what, dry_run } => free(dir, network, what, *dry_run),
            Command::Gc { network: None, empty, dry_run } => gc_all(dir, None, *empty, *dry_run),
            Command::Gc { network: Some(network), empty, dry_run } => {
                read(dir, network)?;
                gc_all(dir, Some(network), *empty, *dry_run)
            }
        }
    }
}

/// The output of `ipam ls --json`.
pub(super) fn list_json(data_dir: &Path, network: Option<&str>) -> Result<String> {
    Ok(pretty(&rows(data_dir, network)?)? + "\n")
}

fn no_network(data_dir: &Path, network: &str) -> Error {
    Error::new(NOT_FOUND, format!("no network \"{network}\" in {}", data_dir.display()))
}

/// The leases of a network.
fn read(data_dir: &Path, network: &str) -> Result<Listing> {
    Listing::open_existing(data_dir, network)?.ok_or_else(|| no_network(data_dir, network))
}

/// Locks the leases of a network.
fn lock(data_dir: &Path, network: &str) -> Result<LeaseStore> {
    let store = LeaseStore::open_existing(data_dir, network, LeaseOptions::default())?;
    store.ok_or_else(|| no_network(data_dir, network))
}

/// Reclaims, or with `dry_run` lists, the leases and other state of dead attachments in a network, or in all; with
/// `empty`, also the addresses of empty files.
pub(super) fn gc_all(
    data_dir: &Path,
    network: Option<&str>,
    empty: bool,
    dry_run: bool,
) -> Result<String> {
    let mut text = String::new();
    for name in leases::networks(data_dir)? {
        if network.is_none_or(|network| network == name) {
            text += &gc(data_dir, &name, empty, dry_run)?;
        }
    }
    // The state of dead attachments without a lease of host-local.
    for record in Record::all(network) {
        let (word, why) = match record.liveness() {
            Liveness::Gone(why) if dry_run => ("would remove", why.to_string()),
            Liveness::Gone(why) if reclaim::if_gone(&record)? => ("removed", why.to_string()),
            Liveness::Unknown(doubt) if dry_run => (IN_DOUBT, doubt.to_string()),
            _ => continue,
        };
        let Record { id, ifname, network, .. } = &record;
        let what = format!("state of container {id}, interface {ifname}: {why}");
        text = text + word + " " + &what + &format!(" (network {network})\n");
    }
    Ok(text)
}

fn gc(data_dir: &Path, network: &str, empty: bool, dry_run: bool) -> Result<String> {
    let listing = read(data_dir, network)?;
    let is_empty = |reserved: &Reservation| empty && reserved.empty;
    let in_doubt = |LeaseStatus { lease, liveness, .. }| match liveness {
        Liveness::Unknown(doubt) => {
            Some(format!("{IN_DOUBT} {lease}: {doubt} (network {network})\n"))
        }
        _ => None,
    };
    let mut doubts = String::new();
    let (word, gone, reserved) = if dry_run {
        doubts = listing.statuses().into_iter().filter_map(in_doubt).collect();
        let reserved = listing.reservations().into_iter().filter(is_empty).collect();
        ("would reclaim", listing.gone(), reserved)
    } else {
        let mut store = lock(data_dir, network)?;
        let mut failures = Failures::new();
        let reclaim = |name: &str, gone| reclaim::leases(name, gone, None, &mut failures);
        let gone = store.reclaim_dead(reclaim)?;
        failures.into_result().unwrap_or_else(log::warn);
        ("reclaimed", gone, if empty { store.remove_reserved(is_empty)? } else { Vec::new() })
    };
    let line = |what: String| format!("{word} {what} (network {network})\n");
    let gone = gone.iter().map(Reclaimed::to_string);
    let lines = gone.chain(reserved.iter().map(Reservation::to_string)).map(line);
    Ok(lines.collect::<String>() + &doubts)
}

fn free(data_dir: &Path, network: &str, what: &str, dry_run: bool) -> Result<String> {
    let listing = read(data_dir, network)?;
    let address = what.parse::<IpAddr>().ok();
    let is_meant = |lease: &Lease| address.map_or(lease.id == what, |ip| lease.ip == ip);
    let is_reserved = |reserved: &Reservation| Some(reserved.ip) == address;
    // Read before the lock is taken, as plugins wait for the lock.
    let mut known = listing.statuses();
    known.retain(|status| is_meant(&status.lease));
    let (mut freed, reserved) = if dry_run {
        let reserved = listing.reservations().into_iter().filter(is_reserved).collect();
        (known.iter().map(|status| status.lease.clone()).collect(), reserved)
    } else {
        let mut store = lock(data_dir, network)?;
        (store.retain(|lease| !is_meant(lease))?, store.remove_reserved(is_reserved)?)
    };
    if freed.is_empty() && reserved.is_empty() {
        let msg = format!("network \"{network}\" has no lease of \"{what}\"");
        return Err(Error::new(NOT_FOUND, msg).with_details(format!("see: ipam ls {network}")));
    }
    for LeaseStatus { lease, .. } in known.iter().filter(|known| known.liveness == Liveness::Alive)
    {
        let ip = lease.ip;
        log::warn(format_args!("the link of {ip} exists on the host: the address is in use"));
    }
    sort_by_key(&mut freed, |lease| lease.ip);
    let word = if dry_run { "would free" } else { "freed" };
    let line = |what: String| format!("{word} {what}\n");
    let freed = freed.iter().map(Lease::to_string);
    Ok(freed.chain(reserved.iter().map(Reservation::to_string)).map(line).collect())
}

/// A line of the list. In JSON the keys are sorted, as everywhere.
#[derive(Serialize)]
struct Row {
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

/// The leases and reservations of a network, or of all, by network and address.
fn rows(data_dir: &Path, network: Option<&str>) -> Result<Vec<Row>> {
    let networks = match network {
        Some(network) => vec![network.to_owned()],
        None => leases::networks(data_dir)?,
    };
    let mut rows = Vec::new();
    for network in networks {
        let listing = read(data_dir, &network)?;
        let (leases, reserved) = (listing.statuses(), listing.reservations());
        // Only root may read leases, and a list without them would look like a free network.
        let unreadable = listing.taken().len().saturating_sub(leases.len() + reserved.len());
        if unreadable > 0 {
            log::warn(format_args!("network {network}: {unreadable} leases cannot be read"));
        }
        rows.extend(leases.into_iter().map(|status| Row::of_lease(&network, status)));
        rows.extend(reserved.iter().map(|reserved| Row::reserved(&network, reserved)));
    }
    sort_by(&mut rows, |a, b| (&a.network, a.address).cmp(&(&b.network, b.address)));
    Ok(rows)
}

impl Row {
    fn of_lease(network: &str, status: LeaseStatus) -> Row {
        // The nanoseconds of the time are not significant and may lie in the future.
        let age = |created| SystemTime::now().duration_since(created).unwrap_or_default().as_secs();
        let (alive, reason) = match status.liveness {
            Liveness::Alive => (Some(true), None),
            Liveness::Gone(why) => (Some(false), Some(why.to_string())),
            Liveness::Unknown(doubt) => (None, Some(doubt.to_string())),
        };
        let from = |Reclaimed { lease, why }| format!("from container {}: {why}", lease.id);
        let Lease { ip: address, id, ifname: interface } = status.lease;
        let (age, reclaimed) = (status.created.map(age), status.reclaimed.map(from));
        let (network, container) = (network.to_owned(), Some(id));
        Row { address, age, alive, container, interface, network, reason, reclaimed }
    }

    fn reserved(network: &str, reserved: &Reservation) -> Row {
        let (network, reason) = (network.to_owned(), Some(format!("reserved: {}", reserved.why())));
        let (age, alive, container, interface) = (None, None, None, None);
        let (address, reclaimed) = (reserved.ip, None);
        Row { address, age, alive, container, interface, network, reason, reclaimed }
    }

    fn cells(&self) -> [String; 6] {
        let word = |word: &Option<String>| word.clone().unwrap_or_else(|| "?".to_owned());
        let mut alive = match (self.alive, &self.container) {
            (Some(true), _) => "yes".to_owned(),
            (Some(false), _) => format!("no: {}", word(&self.reason)),
            (None, Some(_)) => format!("?: {}", word(&self.reason)),
            (None, None) => word(&self.reason),
        };
        if let Some(from) = &self.reclaimed {
            alive = alive + "; reclaimed " + from;
        }
        let age = self.age.map_or("?".to_owned(), short);
        let (container, interface) = (word(&self.container), word(&self.interface));
        [self.network.clone(), self.address.to_string(), container, interface, age, alive]
    }
}

/// A duration in its largest unit, rounded down.
pub(super) fn short(seconds: u64) -> String {
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
    use crate::options::{self, Asked};

    fn job(line: &str) -> Result<Job> {
        match options::parse(line.split_whitespace().map(str::to_owned).collect(), TOOL.options)? {
            Asked::Work(line) => Job::read(&line),
            asked => panic!("{asked:?}"),
        }
    }

    fn parsed(line: &str) -> Result<Command> {
        job(line).map(|job| job.command)
    }

    #[test]
    fn command_lines() {
        let net = || Some("net".to_owned());
        assert_eq!(parsed("ls"), Ok(Command::List { network: None, json: false }));
        assert_eq!(parsed("ls --json net"), Ok(Command::List { network: net(), json: true }));
        assert_eq!(parsed("gc -n"), Ok(Command::Gc { network: None, empty: false, dry_run: true }));
        let free = Command::Free { network: "net".into(), what: "10.0.0.2".into(), dry_run: false };
        assert_eq!(parsed("free net 10.0.0.2"), Ok(free));
        assert_eq!(job("ls --data-dir /x").unwrap().data_dir, PathBuf::from("/x"));
        for wrong in [
            "",
            "rm net",
            "free",
            "free net",
            "ls a b",
            "gc --json",
            "free net x --empty",
            "ls -n",
            "free a b --json",
            "ls -x",
            "gc ../x",
            "free /etc c1",
            "gc ../x",
            "free /etc c1",
            "ls --data-dir",
        ] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn ages() {
        let texts = [0, 59, 60, 3_599, 3_600, 86_399, 86_400, 864_000].map(short);
        assert_eq!(texts, ["0s", "59s", "1m", "59m", "1h", "23h", "1d", "10d"]);
    }
}
