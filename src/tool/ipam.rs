//! `ipam`: lists the leases of host-local with the state of their containers, and releases addresses.

use std::net::IpAddr;
use std::process::ExitCode;
use std::time::SystemTime;

use serde::Serialize;

use super::folders::{CACHE, CONF, Folders, LEASES, Store};
use super::life::{Selection, doubt, in_words, is_alive};
use super::{NOT_FOUND, Tool, columns, print};
use crate::attachment::{Liveness, Record};
use crate::cni::NetworkName;
use crate::cni::json::pretty;
use crate::error::{Error, Result};
use crate::leases::{
    Lease, LeaseOptions, LeaseStatus, LeaseStore, Listing, Reclaimed, Reservation,
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
    LEASES,
    CONF,
    CACHE,
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

struct Job {
    command: Command,
    folders: Folders,
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
        let of_folders = [LEASES.flag, CONF.flag, CACHE.flag];
        let is_odd = |flag: &&str| !of_folders.contains(flag) && !allowed.contains(flag);
        if let Some(flag) = line.given().find(is_odd) {
            return Err(usage(format!("{flag} is not an option of {name}")));
        }
        if let Some(extra) = words.next() {
            return Err(usage(format!("unexpected argument \"{extra}\"")));
        }
        Ok(Job { command, folders: Folders::read(line) })
    }

    fn run(&self) -> Result<String> {
        let stores = |network: &Option<String>| stores(&self.folders, network.as_deref());
        match &self.command {
            Command::List { network, json: true } => list_json(&stores(network)?),
            Command::List { network, json: false } => {
                let heading = ["NETWORK", "ADDRESS", "CONTAINER", "INTERFACE", "AGE", "ALIVE"];
                let rows = rows(&stores(network)?)?;
                let lines =
                    [heading.map(str::to_owned)].into_iter().chain(rows.iter().map(Row::cells));
                Ok(columns(lines.collect()))
            }
            Command::Free { network, what, dry_run } => {
                free(&stores(&Some(network.clone()))?, what, *dry_run)
            }
            Command::Gc { network, empty, dry_run } => {
                let selection = Selection { network: network.as_deref(), container: None };
                gc_all(&stores(network)?, &selection, *empty, *dry_run)
            }
        }
    }
}

/// The leases of the network, of which there must be some, or of all networks.
fn stores(folders: &Folders, network: Option<&str>) -> Result<Vec<Store>> {
    let stores = folders.stores(network)?;
    match network {
        Some(network) if stores.is_empty() => {
            let msg = format!("no network \"{network}\" in {}", folders.searched(network));
            Err(Error::new(NOT_FOUND, msg))
        }
        _ => Ok(stores),
    }
}

/// The output of `ipam ls --json`.
pub(super) fn list_json(stores: &[Store]) -> Result<String> {
    Ok(pretty(&rows(stores)?)? + "\n")
}

fn read(store: &Store) -> Result<Listing> {
    Ok(Listing::open_existing(&store.data_dir, &store.network)?.unwrap_or_default())
}

/// Locks the leases of a network; `None` if its folder was removed meanwhile.
fn lock(store: &Store) -> Result<Option<LeaseStore>> {
    LeaseStore::open_existing(&store.data_dir, &store.network, LeaseOptions::default())
}

/// Reclaims, or with `dry_run` lists, the leases and other state of dead attachments; with `empty`, also the addresses of
/// empty files.
pub(super) fn gc_all(
    stores: &[Store],
    selection: &Selection<'_>,
    empty: bool,
    dry_run: bool,
) -> Result<String> {
    let mut text = String::new();
    for store in stores {
        text += &gc(store, selection, empty, dry_run)?;
    }
    // The state of dead attachments without a lease of host-local.
    for record in Record::all(selection.network) {
        let liveness = record.liveness();
        let (word, why) = match selection.end(&record.network, &record.id, liveness) {
            Some(why) if dry_run => ("would remove", why),
            Some(why) => {
                if !reclaim::if_gone(&record)? {
                    let _turn = Record::turn(record.owner())?;
                    reclaim::attachment(record.owner(), &record.ips)?;
                }
                ("removed", why)
            }
            None => match doubt(liveness) {
                Some(why) if dry_run && selection.has(&record.network, &record.id) => {
                    (IN_DOUBT, why)
                }
                _ => continue,
            },
        };
        let Record { id, ifname, network, .. } = &record;
        let what = format!("state of container {id}, interface {ifname}: {why}");
        text.extend([word, " ", &what, " (network ", network, ")\n"]);
    }
    Ok(text)
}

fn gc(store: &Store, selection: &Selection<'_>, empty: bool, dry_run: bool) -> Result<String> {
    let network = &store.network;
    let is_empty = |reserved: &Reservation| empty && reserved.empty;
    let mut in_doubt = String::new();
    let is_meant = |gone: &Reclaimed| selection.has(network, &gone.lease.id);
    let (word, gone, reserved) = if dry_run {
        let listing = read(store)?;
        for LeaseStatus { lease, liveness, .. } in listing.statuses() {
            if let Some(why) = doubt(liveness).filter(|_| selection.has(network, &lease.id)) {
                let what = format!("{lease}: {why}");
                in_doubt.extend([IN_DOUBT, " ", &what, " (network ", network, ")\n"]);
            }
        }
        let reserved = listing.reservations().into_iter().filter(is_empty).collect();
        ("would reclaim", listing.gone().into_iter().filter(is_meant).collect(), reserved)
    } else {
        let Some(mut leases) = lock(store)? else { return Ok(String::new()) };
        let mut failures = Failures::new();
        let reclaim = |name: &str, mut gone: Vec<Reclaimed>| {
            gone.retain(is_meant);
            reclaim::leases(name, gone, None, &mut failures)
        };
        let gone: Vec<_> = leases.reclaim_dead(reclaim)?;
        failures.into_result().unwrap_or_else(log::warn);
        ("reclaimed", gone, if empty { leases.remove_reserved(is_empty)? } else { Vec::new() })
    };
    let line = |what: String| format!("{word} {what} (network {network})\n");
    let gone = gone.iter().map(Reclaimed::to_string);
    let lines = gone.chain(reserved.iter().map(Reservation::to_string)).map(line);
    Ok(lines.collect::<String>() + &in_doubt)
}

/// Frees an address, or all addresses of a container, in these stores of one network.
fn free(stores: &[Store], what: &str, dry_run: bool) -> Result<String> {
    let address = what.parse::<IpAddr>().ok();
    let is_meant = |lease: &Lease| address.map_or(lease.id == what, |ip| lease.ip == ip);
    let is_reserved = |reserved: &Reservation| Some(reserved.ip) == address;
    let (mut known, mut freed, mut reserved) = (Vec::new(), Vec::new(), Vec::new());
    for store in stores {
        // Read before the lock is taken, as plugins wait for the lock.
        let listing = read(store)?;
        let mut statuses = listing.statuses();
        statuses.retain(|status| is_meant(&status.lease));
        if dry_run {
            freed.extend(statuses.iter().map(|status| status.lease.clone()));
            reserved.extend(listing.reservations().into_iter().filter(is_reserved));
        } else if let Some(mut leases) = lock(store)? {
            freed.extend(leases.retain(|lease| !is_meant(lease), false)?.0);
            reserved.extend(leases.remove_reserved(is_reserved)?);
        }
        known.extend(statuses);
    }
    if freed.is_empty() && reserved.is_empty() {
        let network = stores.first().map_or("", |store| &store.network);
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

/// The leases and reservations, by network and address.
fn rows(stores: &[Store]) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for store in stores {
        let (network, listing) = (&store.network, read(store)?);
        let (leases, reserved) = (listing.statuses(), listing.reservations());
        // Only root may read leases, and a list without them would look like a free network.
        let unreadable = listing.taken().len().saturating_sub(leases.len() + reserved.len());
        if unreadable > 0 {
            log::warn(format_args!("network {network}: {unreadable} leases cannot be read"));
        }
        rows.extend(leases.into_iter().map(|status| Row::of_lease(network, status)));
        rows.extend(reserved.iter().map(|reserved| Row::reserved(network, reserved)));
    }
    sort_by(&mut rows, |a, b| (&a.network, a.address).cmp(&(&b.network, b.address)));
    Ok(rows)
}

impl Row {
    fn of_lease(network: &str, status: LeaseStatus) -> Row {
        // The nanoseconds of the time are not significant and may lie in the future.
        let age = |created| SystemTime::now().duration_since(created).unwrap_or_default().as_secs();
        let (alive, reason) = is_alive(status.liveness);
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
        let mut alive = match self.container {
            Some(_) => in_words((self.alive, self.reason.clone())),
            None => word(&self.reason),
        };
        if let Some(from) = &self.reclaimed {
            alive.extend(["; reclaimed ", from]);
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
        let dirs = job("ls --data-dir /x --data-dir=/y").unwrap().folders.leases;
        assert_eq!(dirs[1..], ["/x", "/y"].map(std::path::PathBuf::from));
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
