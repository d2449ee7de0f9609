//! `make bench`: the same pods, attached and detached alternately with two plugin directories.
//!
//! Like a container runtime, the benchmark starts one process per call and passes JSON on standard
//! input; a sample is the time from before the spawn to after the exit. Each directory works in a
//! private host (network namespace) of identical layout. The directories alternate call by call, so
//! that other load on the machine affects both.
//!
//! | module | |
//! | --- | --- |
//! | `options` | the command line |
//! | `sandbox` | user namespace for unprivileged users, directory removed even on Ctrl-C |
//! | `case` | the cases: plugins and configurations |
//! | `netavark` | podman's network stack, compared with bridge and portmap |
//! | `netfilter` | the packet filter of a plugin, and unrelated rules in it |
//! | `world` | a plugin directory, its private host, the existing pods; one timed call |
//! | `contest` | alternating measurements: rounds, batches, memory, executed programs |
//! | `kernel` | the link of a pod, and the tap device of a virtual machine, without a plugin |
//! | `ports` | portmap alone: many ports, with and without other containers' mappings |
//! | `table` | medians, percentiles, ratios |
//! | `report` | the same numbers as JSON |
#![allow(missing_docs, clippy::print_stdout, clippy::print_stderr, reason = "it prints its table")]

mod case;
mod contest;
mod kernel;
mod netavark;
mod netfilter;
mod options;
mod ports;
mod report;
mod sandbox;
mod table;
mod world;

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use case::{CASES, Case};
use options::Options;
use table::{Table, Unit};
use world::World;

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

/// Debian's containernetworking-plugins.
const DEBIAN_PEER: &str = "/usr/lib/cni";

/// The maximum number of ports of a Linux bridge (`BR_MAX_PORTS` - 1).
const BRIDGE_PORTS: usize = 1023;

/// The sizes of the lease store; the last one leaves one free address in the subnet.
const LEASES: [usize; 5] = [10, 1_000, 20_000, 60_000, 65_532];

fn main() -> ExitCode {
    let done =
        Options::parse(std::env::args().skip(1).collect()).and_then(|options| match options {
            Err(text) => {
                print!("{text}");
                Ok(ExitCode::SUCCESS)
            }
            Ok(options) => match sandbox::dir() {
                None => sandbox::enter(),
                Some(dir) => run(&options, &dir).map(|()| ExitCode::SUCCESS),
            },
        });
    done.unwrap_or_else(|error| {
        eprintln!("pods: {error}");
        ExitCode::FAILURE
    })
}

fn run(options: &Options, dir: &Path) -> Result<()> {
    let bench = Bench { options, dir, ours: ours(dir)?, peer: peer()? };
    bench.describe();
    let mut table = Table::new("ours", bench.peer.as_deref().map(|peer| bench.heading(peer)));
    for case in bench.selected() {
        if case.name == case::NETAVARK {
            bench.netavark(&mut table, case)?;
            continue;
        }
        if case.name == case::REDIRECT_TAP {
            let world = World::new(&bench.ours, dir, case, 0, options)?;
            let empty = kernel::empty_program(dir)?;
            let [add, requests, started] =
                contest::redirected_taps(&world, case, options.rounds, empty.as_deref())?;
            table.beside("kernel", case.name, "ADD", Unit::Ms, &[add.clone(), requests]);
            if empty.is_some() {
                table.beside(
                    "kernel, started",
                    case.name,
                    "ADD, process",
                    Unit::Ms,
                    &[add, started],
                );
            }
            continue;
        }
        for &pods in options.pods_of(case) {
            bench.case(&mut table, case, pods)?;
        }
    }
    if options.wants("leases") {
        bench.leases(&mut table)?;
    }
    for list in ports::LISTS.into_iter().filter(|_| options.wants("ports")) {
        let worlds = bench.ports_worlds()?;
        ports::ports(&mut table, &worlds, list, options.rounds)?;
    }
    for count in ports::OTHERS.into_iter().filter(|_| options.wants("others")) {
        let worlds = bench.ports_worlds()?;
        ports::others(&mut table, &worlds, count, options.rounds)?;
    }
    let directories = [Some(bench.ours.as_path()), bench.peer.as_deref()];
    options
        .json
        .as_ref()
        .map_or(Ok(()), |file| report::write(file, options, directories, table.rows()))
}

/// A directory of links to the cnibox executable.
fn ours(dir: &Path) -> Result<PathBuf> {
    let binary = cnibox_tests::cnibox();
    let binary = fs::canonicalize(&binary)
        .map_err(|e| format!("CNIBOX_BIN \"{}\": {e}", binary.display()))?;
    let directory = dir.join("ours");
    fs::create_dir_all(&directory)?;
    for applet in cnibox::testing::APPLETS {
        std::os::unix::fs::symlink(&binary, directory.join(applet.name))?;
    }
    Ok(directory)
}

/// The directory of the peer: `PEER`, or Debian's if it exists.
fn peer() -> Result<Option<PathBuf>> {
    let named = std::env::var_os("PEER").filter(|value| !value.is_empty()).map(PathBuf::from);
    let directory = named.clone().unwrap_or_else(|| DEBIAN_PEER.into());
    if directory.join("bridge").exists() {
        return Ok(Some(fs::canonicalize(directory)?));
    }
    match named {
        Some(directory) if directory != Path::new(DEBIAN_PEER) => {
            Err(format!("PEER \"{}\": no plugin \"bridge\" there", directory.display()).into())
        }
        _ => Ok(None),
    }
}

/// The settings of a benchmark run.
struct Bench<'a> {
    options: &'a Options,
    dir: &'a Path,
    ours: PathBuf,
    peer: Option<PathBuf>,
}

impl Bench<'_> {
    fn describe(&self) {
        let binary = fs::canonicalize(self.ours.join("bridge")).unwrap_or_default();
        let size = fs::metadata(&binary).map_or(0, |meta| meta.len());
        println!("ours   {} ({size} bytes)", binary.display());
        match &self.peer {
            Some(directory) => println!("peer   {}", directory.display()),
            None => {
                println!(
                    "peer   none: set PEER=<plugin directory>, or run scripts/prepare.sh bench"
                );
            }
        }
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        println!("kernel {}, {cores} cores, {} rounds", kernel.trim(), self.options.rounds);
        let (backend, foreign) = (self.options.backend.name(), self.options.foreign);
        println!("packet filter: {backend}, {foreign} rules of others");
        if let Some(peer) = &self.peer
            && let plugins = self.fallen_back(peer)
            && !plugins.is_empty()
        {
            println!("peer uses iptables: no {backend} in its {}", plugins.join(", "));
        }
        println!("ratio: how many times as long (as large) the right side is, by the medians\n");
    }

    fn fallen_back(&self, directory: &Path) -> Vec<&'static str> {
        netfilter::fallen_back(self.selected(), self.options.backend, directory)
    }

    /// The column heading of the peer, with the properties that distinguish the two.
    fn heading(&self, peer: &Path) -> &'static str {
        match self.fallen_back(peer)[..] {
            [] => "peer",
            ["firewall"] => "peer, mixed",
            _ => "peer, iptables",
        }
    }

    fn selected(&self) -> impl Iterator<Item = &'static Case> {
        CASES.iter().filter(|case| self.options.wants(case.name))
    }

    /// Measures one case with this number of existing pods.
    fn case(&self, table: &mut Table, case: &Case, pods: usize) -> Result<()> {
        let mut directories: Vec<_> = [&self.ours].into_iter().chain(&self.peer).collect();
        if case.is_link() {
            directories.truncate(1);
        }
        directories.retain(|directory| {
            let lacking = case.plugins().find(|plugin| !directory.join(plugin).exists());
            if let Some(plugin) = lacking {
                table::note(case.name, &format!("no {plugin} in {}", directory.display()));
            }
            lacking.is_none()
        });
        if let Some(kind) = case.rare_kind()
            && !world::has_kind(kind)?
        {
            table::note(case.name, &format!("this kernel has no {kind}"));
            return Ok(());
        }
        if case.is_bridge() && pods + 1 > BRIDGE_PORTS {
            table::note(case.name, &format!("no {pods} pods: a bridge has {BRIDGE_PORTS} ports"));
            return Ok(());
        }
        let worlds = self.worlds(&directories, |_| pods, case)?;
        let name = if pods > 0 { format!("{}, {pods} pods", case.name) } else { case.name.into() };
        if case.is_version() {
            let times = contest::versions(&worlds, case, self.options.rounds)?;
            table.row(&name, "VERSION", Unit::Ms, &times);
            return Ok(());
        }
        let times = if case.is_link() {
            worlds[0].on_host(|| kernel::links(self.options.rounds))??
        } else {
            contest::rounds(&worlds, case, self.options.rounds)?
        };
        table.row(&name, "ADD", Unit::Ms, &times.add);
        table.row(&name, "DEL", Unit::Ms, &times.del);
        if case.is_link() {
            return Ok(());
        }
        table.row(&name, "ADD, memory", Unit::Mb, &contest::memory(&worlds, case)?);
        if world::has_strace() {
            let started = contest::started(&worlds, case)?;
            table.row(&name, "ADD, started", Unit::Count, &started.add);
            table.row(&name, "DEL, started", Unit::Count, &started.del);
        } else {
            table::note(&name, "programs that are started: not counted without strace");
        }
        self.batches(table, &name, case, &worlds, pods)
    }

    fn batches(
        &self,
        table: &mut Table,
        name: &str,
        case: &Case,
        worlds: &[World],
        pods: usize,
    ) -> Result<()> {
        let batch = self.options.batch;
        let counts: Vec<_> = self.options.parallel.iter().copied().filter(|&n| n > 0).collect();
        if counts.is_empty() {
            return Ok(());
        }
        if case.is_bridge() && pods + batch > BRIDGE_PORTS {
            table::note(name, &format!("no batch of {batch}: a bridge has {BRIDGE_PORTS} ports"));
            return Ok(());
        }
        for at_once in counts {
            let times = contest::batches(worlds, case, self.options, at_once)?;
            table.row(name, &format!("{batch} ADD, {at_once} at once"), Unit::Ms, &times.add);
            table.row(name, &format!("{batch} DEL, {at_once} at once"), Unit::Ms, &times.del);
        }
        Ok(())
    }

    /// Compares with netavark if it is installed.
    fn netavark(&self, table: &mut Table, case: &Case) -> Result<()> {
        let Some(netavark) = netavark::Netavark::find(self.dir)? else {
            table::note(case.name, "none: NETAVARK=<executable>, of cargo install netavark");
            return Ok(());
        };
        table::note(case.name, &format!("the right side is {}", netavark.version()?));
        let ours = World::new(&self.ours, self.dir, case, 0, self.options)?;
        let times = netavark.rounds(&ours, case, self.options.rounds)?;
        table.beside("netavark", case.name, "ADD", Unit::Ms, &times.add);
        table.beside("netavark", case.name, "DEL", Unit::Ms, &times.del);
        if world::has_strace() {
            let started = netavark.started(&ours, case)?;
            table.beside("netavark", case.name, "ADD, started", Unit::Count, &started.add);
            table.beside("netavark", case.name, "DEL, started", Unit::Count, &started.del);
        }
        Ok(())
    }

    /// Measures host-local with few and with many leases, written in the reference plugin's format.
    fn leases(&self, table: &mut Table) -> Result<()> {
        let case = CASES.iter().find(|case| case.name == "host-local").ok_or("no host-local")?;
        let directories: Vec<_> = [&self.ours].into_iter().chain(&self.peer).collect();
        for leases in LEASES {
            let worlds = self.worlds(&directories, |_| leases, case)?;
            let rounds = contest::rounds(&worlds, case, self.options.rounds)?;
            let name = format!("{leases} leases");
            table.row(&name, "first ADD ever", Unit::Ms, &rounds.first);
            table.row(&name, "ADD", Unit::Ms, &rounds.add);
            table.row(&name, "DEL", Unit::Ms, &rounds.del);
        }
        Ok(())
    }

    /// One world per side, with bridge and portmap.
    fn ports_worlds(&self) -> Result<Vec<World>> {
        let case = CASES.iter().find(|case| case.name == "portmap-1").ok_or("no portmap-1")?;
        let directories: Vec<_> = [&self.ours].into_iter().chain(&self.peer).collect();
        self.worlds(&directories, |_| 0, case)
    }

    fn worlds(
        &self,
        directories: &[&PathBuf],
        pods: impl Fn(usize) -> usize,
        case: &Case,
    ) -> Result<Vec<World>> {
        let directories = directories.iter().enumerate();
        directories
            .map(|(i, directory)| World::new(directory, self.dir, case, pods(i), self.options))
            .collect()
    }
}
