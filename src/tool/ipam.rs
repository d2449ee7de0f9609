//! `ipam`: the leases of host-local, for a person on the node: who has which address, whether that
//! container is alive, and how to get an address back.

use std::cmp::Ordering;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::SystemTime;

use serde_json::{Value, json};

use super::{Tool, columns, print};
use crate::attachment::{Liveness, Record};
use crate::cni::NetworkName;
use crate::error::{Code, Error, Result};
use crate::leases::{
    self, DATA_DIR, Lease, LeaseOptions, LeaseStatus, LeaseStore, Listing, Reclaimed, Reservation,
};
use crate::log;
use crate::options::{CommandLine, Opt, opt, unknown_word, usage};
use crate::skel::{Failures, Table, reclaim};
use crate::sort::{sort_by, sort_by_key};

const OPTIONS: &[Opt] = &[
    opt(
        "--data-dir",
        "DIR",
        "folder of the networks' folders, \"dataDir\" of the configuration;\ndefault /var/lib/cni/networks",
    ),
    opt(
        "--json",
        "",
        "ls: an array of objects with network, address, container, interface (null in\n\
         leases of old releases), age (seconds), alive (true, false, or null for not\n\
         known) and reason (why alive is false, or the address reserved)",
    ),
    opt(
        "--empty",
        "",
        "gc: also addresses whose files are empty: what a crash of another program left,\n\
         or somebody's reservation",
    ),
    Opt {
        short: Some('n'),
        ..opt("--dry-run", "", "free, gc: tell what would be taken back, and change nothing")
    },
];

pub(super) const TOOL: Tool = Tool {
    command: "ipam",
    usage: "\
ipam: who has which address of host-local, and how to get one back

Usage:
  ipam ls   [<network>] [--json]       list the leases; changes nothing, waits for nobody
  ipam free <network> <address>        take one address back, also one that is reserved
  ipam free <network> <container>      take all addresses of a container back, by its whole id
  ipam gc   [<network>] [--empty]      take back the addresses of containers that are certainly gone,
                                       and remove their host ports and other rules
Each may be called as \"cnibox ipam ...\".
",
    options: OPTIONS,
    notes: "
  -h, --help       this text

ALIVE is \"yes\" where the container's network namespace is there, \"no\" where the lease was made
before the last boot or its namespace is gone, \"?\" where nothing is proved: gc and the plugin leave
such a lease alone. free asks no questions: an address that is still in use will be given to
somebody else as well.

Exit status: 0 done; 1 something failed, see stderr; 2 wrong usage; 3 no such network or lease.

Example:
  ipam ls pods
  ipam gc --dry-run
  ipam free pods 10.88.0.17
",
};

const NOT_THERE: u8 = 3;

/// What to do.
#[derive(Debug, PartialEq, Eq)]
enum Command {
    List { network: Option<String>, json: bool },
    Free { network: String, what: String, dry_run: bool },
    Gc { network: Option<String>, empty: bool, dry_run: bool },
}

impl Command {
    fn network(&self) -> Option<&str> {
        match self {
            Command::List { network, .. } | Command::Gc { network, .. } => network.as_deref(),
            Command::Free { network, .. } => Some(network),
        }
    }
}

/// One call.
#[derive(Debug)]
struct Job {
    command: Command,
    data_dir: PathBuf,
}

/// How it went.
enum Outcome {
    Done(String),
    /// There is no such network or lease.
    NotThere(String),
}

/// Runs the tool with the arguments that follow its name.
pub fn main(args: Vec<String>, _: Table) -> ExitCode {
    TOOL.run(
        args,
        |line| Job::read(&line),
        |job| match run(&job.command, &job.data_dir)? {
            Outcome::Done(text) => print(&text),
            Outcome::NotThere(what) => {
                log::line(format_args!("ipam: {what}"));
                Ok(ExitCode::from(NOT_THERE))
            }
        },
    )
}

impl Job {
    fn read(line: &CommandLine) -> Result<Job> {
        let mut words = line.words.iter().cloned();
        let name = words.next().ok_or_else(|| usage("say what to do: ls, free or gc"))?;
        let dry_run = line.has("--dry-run");
        let (command, allowed): (_, &[&str]) = match &*name {
            "ls" | "list" => {
                (Command::List { network: words.next(), json: line.has("--json") }, &["--json"])
            }
            "gc" => {
                let empty = line.has("--empty");
                (Command::Gc { network: words.next(), empty, dry_run }, &["--empty", "--dry-run"])
            }
            "free" => {
                let wanted = || usage("free needs a network and an address or container");
                let (network, what) = words.next().zip(words.next()).ok_or_else(wanted)?;
                (Command::Free { network, what, dry_run }, &["--dry-run"])
            }
            other => return Err(unknown_word("command", other, &["ls", "free", "gc"])),
        };
        let is_odd = |flag: &&str| *flag != "--data-dir" && !allowed.contains(flag);
        if let Some(flag) = line.given().find(is_odd) {
            return Err(usage(format!("{flag} is not for {name}")));
        }
        if let Some(network) = command.network() {
            NetworkName::parse(network)?;
        }
        if let Some(extra) = words.next() {
            return Err(usage(format!("unexpected argument \"{extra}\"")));
        }
        Ok(Job { command, data_dir: line.last("--data-dir").unwrap_or(DATA_DIR).into() })
    }
}

fn run(command: &Command, data_dir: &Path) -> Result<Outcome> {
    let networks = |network: &Option<String>| match network {
        Some(network) => Ok(vec![network.clone()]),
        None => leases::networks(data_dir),
    };
    match command {
        Command::List { network, json } => {
            let mut rows = Vec::new();
            for network in networks(network)? {
                let Some(listing) = Listing::open_existing(data_dir, &network)? else {
                    return Ok(no_network(&network, data_dir));
                };
                let (leases, reserved) = (listing.statuses(), listing.reservations());
                let listed = leases.len() + reserved.len();
                warn_of_unreadable(&network, listing.taken().len().saturating_sub(listed));
                rows.extend(leases.into_iter().map(|status| Row::of_lease(&network, status)));
                rows.extend(reserved.into_iter().map(|reserved| Row::reserved(&network, reserved)));
            }
            sort_by(&mut rows, Row::order);
            let text = if *json { as_json(&rows)? } else { as_table(&rows) };
            Ok(Outcome::Done(text))
        }
        Command::Free { network, what, dry_run } => free(data_dir, network, what, *dry_run),
        Command::Gc { network, empty, dry_run } => {
            let mut text = String::new();
            for network in networks(network)? {
                match gc(data_dir, &network, *empty, *dry_run)? {
                    Some(lines) => text += &lines,
                    None => return Ok(no_network(&network, data_dir)),
                }
            }
            text += &gc_notes(network.as_deref(), *dry_run)?;
            Ok(Outcome::Done(text))
        }
    }
}

/// What `ipam ls --json` prints.
pub(super) fn list_json(data_dir: &Path) -> Result<String> {
    match run(&Command::List { network: None, json: true }, data_dir)? {
        Outcome::Done(text) | Outcome::NotThere(text) => Ok(text),
    }
}

/// Takes back, or with `dry_run` tells, what dead attachments have in these networks, or in all.
pub(super) fn gc_all(data_dir: &Path, network: Option<&str>, dry_run: bool) -> Result<String> {
    let mut text = String::new();
    for name in leases::networks(data_dir)? {
        if network.is_none_or(|network| network == name) {
            text += &gc(data_dir, &name, false, dry_run)?.unwrap_or_default();
        }
    }
    Ok(text + &gc_notes(network, dry_run)?)
}

/// What dead attachments left that have no lease of host-local, or none any more.
fn gc_notes(network: Option<&str>, dry_run: bool) -> Result<String> {
    let mut text = String::new();
    for record in Record::all(network) {
        let Liveness::Gone(why) = record.liveness() else { continue };
        let word = if dry_run { "would remove" } else { "removed" };
        if !dry_run {
            reclaim::attachment(record.owner(), &record.ips)?;
        }
        let Record { id, ifname, network, .. } = &record;
        let what = format!("what container {id}, interface {ifname} left");
        text = text + word + " " + &what + &format!(": {why} (network {network})\n");
    }
    Ok(text)
}

/// Leases are for root to read, and a list without them would look like a free network.
fn warn_of_unreadable(network: &str, unreadable: usize) {
    if unreadable > 0 {
        log::warn(format_args!("network {network}: {unreadable} leases cannot be read"));
    }
}

fn no_network(network: &str, data_dir: &Path) -> Outcome {
    Outcome::NotThere(format!("no network \"{network}\" in {}", data_dir.display()))
}

fn free(data_dir: &Path, network: &str, what: &str, dry_run: bool) -> Result<Outcome> {
    let Some(listing) = Listing::open_existing(data_dir, network)? else {
        return Ok(no_network(network, data_dir));
    };
    let address = what.parse::<IpAddr>().ok();
    let is_meant = |lease: &Lease| address.map_or(lease.id == what, |ip| lease.ip == ip);
    let is_reserved = |reserved: &Reservation| Some(reserved.ip) == address;
    // Before the lock: that may take a moment, and containers are waiting.
    let known: Vec<LeaseStatus> =
        listing.statuses().into_iter().filter(|status| is_meant(&status.lease)).collect();
    let (mut freed, reserved) = if dry_run {
        let reserved = listing.reservations().into_iter().filter(is_reserved).collect();
        (known.iter().map(|status| status.lease.clone()).collect(), reserved)
    } else {
        let store = LeaseStore::open_existing(data_dir, network, LeaseOptions::default())?;
        let Some(mut store) = store else { return Ok(no_network(network, data_dir)) };
        (store.retain(|lease| !is_meant(lease))?, store.remove_reserved(is_reserved)?)
    };
    if freed.is_empty() && reserved.is_empty() {
        let msg =
            format!("network \"{network}\" has no lease of \"{what}\"; see: ipam ls {network}");
        return Ok(Outcome::NotThere(msg));
    }
    sort_by_key(&mut freed, |lease| lease.ip);
    let word = if dry_run { "would free" } else { "freed" };
    let reserved = reserved.iter().map(Reservation::to_string);
    let mut text = String::new();
    for what in freed.iter().map(Lease::to_string).chain(reserved) {
        text = text + word + " " + &what + "\n";
    }
    for LeaseStatus { lease, liveness, .. } in known {
        if liveness == Liveness::Alive {
            let ip = lease.ip;
            log::warn(format_args!("the network namespace of {ip} is there: it may be in use"));
        }
    }
    Ok(Outcome::Done(text))
}

/// What was, or would be, taken back in a network; `None` if there is no such network.
fn gc(data_dir: &Path, network: &str, empty: bool, dry_run: bool) -> Result<Option<String>> {
    let Some(listing) = Listing::open_existing(data_dir, network)? else { return Ok(None) };
    let is_empty = |reserved: &Reservation| empty && reserved.empty;
    let (word, gone, reserved) = if dry_run {
        let reserved = listing.reservations().into_iter().filter(is_empty).collect();
        ("would reclaim", listing.gone(), reserved)
    } else {
        let store = LeaseStore::open_existing(data_dir, network, LeaseOptions::default())?;
        let Some(mut store) = store else { return Ok(None) };
        let mut failures = Failures::new();
        let reclaim = |name: &str, gone| reclaim::leases(name, gone, None, &mut failures);
        let gone = store.reclaim_dead(reclaim)?;
        failures.into_result().unwrap_or_else(log::warn);
        ("reclaimed", gone, if empty { store.remove_reserved(is_empty)? } else { Vec::new() })
    };
    let gone = gone.iter().map(Reclaimed::to_string);
    let line = |what: String| format!("{word} {what} (network {network})\n");
    Ok(Some(gone.chain(reserved.iter().map(Reservation::to_string)).map(line).collect()))
}

/// A line of the list.
#[derive(Debug)]
struct Row {
    network: String,
    ip: IpAddr,
    container: Option<String>,
    ifname: Option<String>,
    /// Seconds, by the clock on the wall.
    age: Option<u64>,
    alive: Option<bool>,
    reason: Option<String>,
}

impl Row {
    fn of_lease(network: &str, status: LeaseStatus) -> Row {
        // Less than a second ahead: the nanoseconds of a lease's time are a mark.
        let age =
            status.created.map(|made| SystemTime::now().duration_since(made).unwrap_or_default());
        let (alive, reason) = match status.liveness {
            Liveness::Alive => (Some(true), None),
            Liveness::Gone(why) => (Some(false), Some(why.to_string())),
            Liveness::Unknown => (None, None),
        };
        let Lease { ip, id, ifname } = status.lease;
        let (network, age) = (network.to_owned(), age.map(|age| age.as_secs()));
        Row { network, ip, container: Some(id), ifname, age, alive, reason }
    }

    fn reserved(network: &str, reserved: Reservation) -> Row {
        Row {
            network: network.to_owned(),
            ip: reserved.ip,
            container: None,
            ifname: None,
            age: None,
            alive: None,
            reason: Some(format!("reserved: {}", reserved.why())),
        }
    }

    fn order(&self, other: &Row) -> Ordering {
        (&self.network, self.ip).cmp(&(&other.network, other.ip))
    }

    fn cells(&self) -> [String; 6] {
        let alive = match (self.alive, &self.reason) {
            (Some(true), _) => "yes".to_owned(),
            (Some(false), reason) => format!("no: {}", reason.as_deref().unwrap_or("?")),
            (None, reason) => reason.clone().unwrap_or_else(|| "?".to_owned()),
        };
        let word = |word: &Option<String>| word.clone().unwrap_or_else(|| "?".to_owned());
        let age = self.age.map_or("?".to_owned(), short);
        let (container, ifname) = (word(&self.container), word(&self.ifname));
        [self.network.clone(), self.ip.to_string(), container, ifname, age, alive]
    }

    fn json(&self) -> Value {
        json!({"network": self.network, "address": self.ip, "container": self.container,
               "interface": self.ifname, "age": self.age, "alive": self.alive,
               "reason": self.reason})
    }
}

/// Seconds as a person says them: the largest unit, rounded down.
pub(super) fn short(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m", seconds / 60),
        3_600..86_400 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

fn as_json(rows: &[Row]) -> Result<String> {
    let rows: Vec<Value> = rows.iter().map(Row::json).collect();
    let text = serde_json::to_string_pretty(&rows);
    text.map(|text| text + "\n").map_err(|e| Error::new(Code::INTERNAL, format!("write JSON: {e}")))
}

fn as_table(rows: &[Row]) -> String {
    let heading = ["NETWORK", "ADDRESS", "CONTAINER", "INTERFACE", "AGE", "ALIVE"];
    let mut lines = vec![heading.map(str::to_owned)];
    lines.extend(rows.iter().map(Row::cells));
    columns(&lines)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{self, Asked};

    fn job(line: &str) -> Result<Job> {
        match options::parse(line.split_whitespace().map(str::to_owned).collect(), OPTIONS)? {
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
