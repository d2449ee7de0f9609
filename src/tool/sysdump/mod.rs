//! `cnibox sysdump`: one file with what a maintainer would ask for, and no secrets.
//!
//! | file | |
//! | --- | --- |
//! | `archive.rs` | the tar file and its bounds |

mod archive;

use std::fs::{self, OpenOptions};
use std::io::{self, BufWriter};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use self::archive::{Archive, Keep};
use super::doctor::{self, Diagnosis};
use super::gc::{CACHE, CONF, Folders, LEASES, PLUGIN_PATH};
use super::{Tool, ipam, print};
use crate::attachment::{Liveness, Record};
use crate::cmd;
use crate::cni::json::{Json, compact, pretty};
use crate::cni::secrets;
use crate::error::{Error, Result};
use crate::netlink::{Netlink, RouteFilter};
use crate::netns::Netns;
use crate::options::{self, CommandLine, Opt, no_words, opt};
use crate::runtime::{Attach, CachedAttachment, EXTENSIONS, Runtime, conf_files};
use crate::skel::{Table, record};
use crate::sort::sort;
use crate::sysctl;

pub(super) const TOOL: Tool = Tool {
    command: "cnibox sysdump",
    usage: "\
sysdump: one file with what a maintainer would ask for

Usage:
  cnibox sysdump [--output FILE]

Collects, in a tar file of less than 1 MB that only root can read: what cnibox doctor says, versions, network
configurations, cached attachments, leases, links, addresses, routes, rules of the packet filter, kernel parameters and
what lies in the folders of plugins and state. Values of keys such as \"password\" or \"token\" are left out, and
logs. Addresses, names and MACs of containers are in it: look at it before you hand it on. Changes nothing else.
",
    options: &[
        Opt {
            short: Some('o'),
            ..opt("--output", "FILE", "a new file; \"-\" is stdout [cnibox-sysdump-HOST-SECONDS.tar]")
        },
        CONF,
        PLUGIN_PATH,
        CACHE,
        LEASES,
    ],
    notes: "
Exit status: 0 done; 1 the file could not be written; 2 wrong usage.
",
};

const ABOUT: &str = "\
What cnibox sysdump found on a node.

  doctor.json       what is wrong, by cnibox doctor
  version.txt       cnibox, kernel, operating system
  net.d/            the network configurations
  attachments.json  the attachments in the runtimes' cache: configuration, arguments, result
  containers.txt    links, addresses, routes in containers with which something is wrong
  leases.json       the leases of host-local
  records.json      what is noted of attachments in /run/cni/cnibox
  failed.jsonl      the last calls that failed, as the flight recorder has them
  traces.jsonl      the last calls that were recorded on request
  folders.txt       mode, owner, size, time and name of what lies in the folders of plugins and state
  network/          links, addresses, routes
  filter/           rules of the packet filter
  sysctl.txt        kernel parameters
  modules.txt       kernel modules
  kernel.log        the kernel's messages about networks
";

/// What other programs tell: file, program, arguments.
const PROGRAMS: [(&str, &str, &[&str]); 18] = [
    ("network/links.txt", "ip", &["-d", "link"]),
    ("network/addresses.txt", "ip", &["addr"]),
    ("network/routes.txt", "ip", &["route", "show", "table", "all"]),
    ("network/routes6.txt", "ip", &["-6", "route", "show", "table", "all"]),
    ("network/rules.txt", "ip", &["rule"]),
    ("network/rules6.txt", "ip", &["-6", "rule"]),
    ("network/neighbours.txt", "ip", &["neigh"]),
    ("network/namespaces.txt", "ip", &["netns", "list-id"]),
    ("network/bridge-links.txt", "bridge", &["-d", "link"]),
    ("network/bridge-vlans.txt", "bridge", &["vlan"]),
    ("network/bridge-fdb.txt", "bridge", &["fdb"]),
    ("network/qdiscs.txt", "tc", &["-s", "qdisc"]),
    ("filter/nft-tables.txt", "nft", &["list", "tables"]),
    ("filter/iptables-save.txt", "iptables-save", &[]),
    ("filter/ip6tables-save.txt", "ip6tables-save", &[]),
    ("filter/iptables-legacy-save.txt", "iptables-legacy-save", &[]),
    ("filter/ip6tables-legacy-save.txt", "ip6tables-legacy-save", &[]),
    ("filter/nft-ruleset.txt", "nft", &["list", "ruleset"]),
];

/// Kernel parameters that decide over containers' packets.
const PARAMETERS: [&str; 24] = [
    "net/bridge/bridge-nf-call-arptables",
    "net/bridge/bridge-nf-call-ip6tables",
    "net/bridge/bridge-nf-call-iptables",
    "net/ipv4/conf/all/accept_local",
    "net/ipv4/conf/all/arp_ignore",
    "net/ipv4/conf/all/forwarding",
    "net/ipv4/conf/all/proxy_arp",
    "net/ipv4/conf/all/route_localnet",
    "net/ipv4/conf/all/rp_filter",
    "net/ipv4/conf/default/forwarding",
    "net/ipv4/conf/default/rp_filter",
    "net/ipv4/ip_forward",
    "net/ipv4/ip_local_port_range",
    "net/ipv4/ip_local_reserved_ports",
    "net/ipv4/neigh/default/gc_thresh3",
    "net/ipv6/conf/all/accept_ra",
    "net/ipv6/conf/all/disable_ipv6",
    "net/ipv6/conf/all/forwarding",
    "net/ipv6/conf/default/accept_dad",
    "net/ipv6/conf/default/disable_ipv6",
    "net/ipv6/neigh/default/gc_thresh3",
    "net/netfilter/nf_conntrack_count",
    "net/netfilter/nf_conntrack_max",
    "user/max_net_namespaces",
];

/// Words of the kernel's messages about networks. The others may be of audit, with command lines in them.
const LOGGED: [&str; 10] = [
    "bridge",
    "conntrack",
    "martian",
    "neighbour",
    "netfilter",
    "nf_",
    "segfault",
    "vlan",
    "veth",
    "x_tables",
];

/// Entries of one folder that are listed, with those below it.
const ENTRIES: usize = 1000;

/// Bytes of network configurations in all.
const CONFIGURATIONS: usize = 128 * 1024;

/// Containers that are looked into.
const CONTAINERS: usize = 20;

struct Job {
    output: Option<String>,
    folders: Folders,
}

/// `cnibox sysdump` with the arguments behind it.
pub(super) fn main(args: Vec<String>, table: Table) -> ExitCode {
    TOOL.run(args, |line| Job::read(&line), |job| job.run(table))
}

impl Job {
    fn read(line: &CommandLine) -> Result<Job> {
        no_words(line)?;
        let output = line.last("--output").map(str::to_owned);
        Ok(Job { output, folders: Folders::read(line) })
    }

    fn run(&self, table: Table) -> Result<ExitCode> {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let host = sysctl::read("kernel/hostname").unwrap_or_default();
        let host = host.replace(|c: char| !c.is_ascii_alphanumeric() && c != '.', "-");
        let root = format!("cnibox-sysdump-{host}-{time}");
        let archive = self.collect(&root, time, table);
        if self.output.as_deref() == Some("-") {
            let written = archive.write(ABOUT, io::stdout().lock());
            written.map_err(|cause| Error::io("write to stdout", &cause))?;
            return Ok(ExitCode::SUCCESS);
        }
        let path = self.output.clone().unwrap_or_else(|| format!("{root}.tar"));
        // Never through a link, nor over a file of others.
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        let written = file.and_then(|file| archive.write(ABOUT, BufWriter::new(file)));
        written.map_err(|cause| Error::io(format_args!("write {path}"), &cause))?;
        print(&format!("{path}\n"))
    }

    /// What matters most comes first, as what comes last may have no room.
    fn collect(&self, root: &str, time: u64, table: Table) -> Archive {
        let mut archive = Archive::new(root, time);
        let runtime = self.folders.runtime(table);
        let found = match doctor::examine(&self.folders, &runtime, table) {
            Ok((found, _)) => found,
            Err(error) => {
                archive.miss(format!("doctor.json: {error}"));
                Vec::new()
            }
        };
        let objects: Vec<_> = found.iter().map(Diagnosis::to_json).collect();
        add_json(&mut archive, "doctor.json", &objects);
        archive.add("version.txt", &versions(), Keep::Head);
        self.configurations(&mut archive);
        self.attachments(&mut archive, &runtime, &found);
        match ipam::list_json(&self.folders.leases) {
            Ok(text) => archive.add("leases.json", &text, Keep::Head),
            Err(error) => archive.miss(format!("leases.json: {error}")),
        }
        for (name, ring) in [("failed.jsonl", record::failed()), ("traces.jsonl", record::traces())]
        {
            match ring.read() {
                Ok(text) => archive.add(name, &text, Keep::Tail),
                Err(error) => archive.miss(format!("{name}: {error}")),
            }
        }
        add_json(&mut archive, "records.json", &Record::all(None));
        archive.add("sysctl.txt", &parameters(), Keep::Head);
        self.entries(&mut archive);
        match fs::read_to_string("/proc/modules") {
            Ok(text) => archive.add("modules.txt", &text, Keep::Head),
            Err(cause) => archive.miss(format!("modules.txt: {cause}")),
        }
        programs(&mut archive);
        archive
    }

    fn configurations(&self, archive: &mut Archive) {
        let folder = &self.folders.conf;
        let files = match conf_files(folder, &EXTENSIONS) {
            Ok(files) => files,
            Err(error) => return archive.miss(format!("net.d: {error}")),
        };
        let rest = archive.room().saturating_sub(CONFIGURATIONS);
        for file in files {
            let name = file.strip_prefix(folder).unwrap_or(&file).display().to_string();
            let read = fs::read(&file).map_err(|cause| cause.to_string());
            match read.and_then(|bytes| Json::parse(&bytes)) {
                Ok(_) if archive.room() < rest => archive.miss(format!("net.d/{name}: no room")),
                Ok(json) => add_json(archive, &format!("net.d/{name}"), &secrets::without(json)),
                // What is no JSON has secrets that nobody can tell.
                Err(why) => archive.miss(format!("net.d/{name}: {why}")),
            }
        }
    }

    /// Attachments with which something is wrong come first.
    fn attachments(&self, archive: &mut Archive, runtime: &Runtime, found: &[Diagnosis]) {
        let cached = match runtime.cached_attachments("") {
            Ok(cached) => cached,
            Err(error) => return archive.miss(format!("attachments.json: {error}")),
        };
        let is_unwell = |cached: &CachedAttachment| {
            let title = doctor::title(cached);
            found.iter().any(|diagnosis| diagnosis.subject == title)
        };
        let (unwell, well): (Vec<_>, Vec<_>) = cached.into_iter().partition(is_unwell);
        let worst_first = unwell.iter().chain(&well);
        let objects: Vec<Json> =
            worst_first.map(|cached| self.attachment(runtime, cached)).collect();
        // One object in a line: a cut leaves whole ones.
        let lines: Vec<String> = objects
            .iter()
            .filter_map(|object| compact(object).ok())
            .map(|line| line + "\n")
            .collect();
        archive.add("attachments.json", &lines.concat(), Keep::Head);
        let texts: Vec<String> = unwell.iter().take(CONTAINERS).map(inside).collect();
        archive.add("containers.txt", &texts.concat(), Keep::Head);
    }

    fn attachment(&self, runtime: &Runtime, cached: &CachedAttachment) -> Json {
        let Attach { container_id, netns, ifname, args, capability_args } = &cached.attach;
        let list = cached.list();
        let result = list.and_then(|list| runtime.cached_result(&list, &cached.attach).ok()?);
        let pair = |(key, value): &(String, String)| {
            Json::Array(vec![key.as_str().into(), value.as_str().into()])
        };
        let alive = match self.folders.liveness(cached) {
            Liveness::Alive => "yes".to_owned(),
            Liveness::Gone(why) => format!("no: {why}"),
            Liveness::Unknown => "unknown".to_owned(),
        };
        let members = [
            ("network", cached.network.as_str().into()),
            ("container", container_id.as_str().into()),
            ("interface", ifname.as_str().into()),
            ("netns", netns.as_str().into()),
            ("alive", Json::String(alive)),
            ("args", Json::Array(args.iter().map(pair).collect())),
            ("capabilityArgs", Json::Object(capability_args.clone())),
            ("config", Json::parse(&cached.config).unwrap_or(Json::Null)),
            ("result", result.map_or(Json::Null, |result| result.to_json())),
        ];
        let members = members.into_iter().map(|(key, value)| (key.to_owned(), value));
        secrets::without(Json::Object(members.collect()))
    }

    /// What lies in the folders of plugins and state.
    fn entries(&self, archive: &mut Archive) {
        let Folders { conf, cache, leases, cni_path } = &self.folders;
        let mut roots: Vec<PathBuf> = std::env::split_paths(cni_path).collect();
        roots.extend([conf.clone(), "/run/cni".into(), cache.clone()]);
        if !leases.starts_with(cache) {
            roots.push(leases.clone());
        }
        let mut text = String::new();
        for root in &roots {
            let mut lines = Vec::new();
            walk(root, &mut lines, ENTRIES);
            text += &lines.concat();
            if lines.len() == ENTRIES {
                archive.miss(format!(
                    "folders.txt: more than {ENTRIES} entries of {}",
                    root.display()
                ));
            }
        }
        archive.add("folders.txt", &text, Keep::Head);
    }
}

fn add_json(archive: &mut Archive, name: &str, value: &impl serde::Serialize) {
    match pretty(value) {
        Ok(text) => archive.add(name, &(text + "\n"), Keep::Head),
        Err(error) => archive.miss(format!("{name}: {error}")),
    }
}

fn versions() -> String {
    let own = std::env::current_exe().map(|path| path.display().to_string()).unwrap_or_default();
    let content = |file: &str| {
        let content = fs::read_to_string(file).unwrap_or_else(|cause| cause.to_string());
        format!("\n{file}:\n{}\n", content.trim_end())
    };
    let files = ["/proc/version", "/etc/os-release", "/proc/uptime"].map(content);
    format!("{}executable: {own}\n{}", options::version(), files.concat())
}

fn parameters() -> String {
    let line = |key: &str| match sysctl::read(key) {
        Ok(value) => format!("{} = {value}\n", key.replace('/', ".")),
        Err(error) => format!("# {}\n", error.msg()),
    };
    PARAMETERS.map(line).concat()
}

/// A line for each entry below `path` and itself, links not followed; `limit` lines at most.
fn walk(path: &Path, lines: &mut Vec<String>, limit: usize) {
    let Ok(meta) = path.symlink_metadata() else {
        return lines.push(format!("{}: not there\n", path.display()));
    };
    let target = fs::read_link(path).map(|target| format!(" -> {}", target.display()));
    let (mode, owner, size, time) = (meta.mode(), meta.uid(), meta.len(), meta.mtime());
    let (name, target) = (path.display(), target.unwrap_or_default());
    lines.push(format!("{mode:06o} {owner} {size:>8} {time} {name}{target}\n"));
    if !meta.is_dir() {
        return;
    }
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let mut entries: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    sort(&mut entries);
    for entry in entries {
        if lines.len() < limit {
            walk(&entry, lines, limit);
        }
    }
}

fn programs(archive: &mut Archive) {
    for (name, program, args) in PROGRAMS {
        match output_of(program, args) {
            Ok(text) => archive.add(name, &text, Keep::Head),
            Err(error) => archive.miss(format!("{name}: {error}")),
        }
    }
    if cmd::find("ip").is_none() {
        match Netlink::open().map_err(Error::from).and_then(|netlink| network(&netlink)) {
            Ok(text) => archive.add("network/all.txt", &text, Keep::Head),
            Err(error) => archive.miss(format!("network/all.txt: {error}")),
        }
    }
    match output_of("dmesg", &[]) {
        Ok(text) => {
            let is_of_networks = |line: &&str| LOGGED.iter().any(|word| line.contains(word));
            let lines: Vec<&str> = text.split_inclusive('\n').filter(is_of_networks).collect();
            archive.add("kernel.log", &lines.concat(), Keep::Tail);
        }
        Err(error) => archive.miss(format!("kernel.log: {error}")),
    }
}

fn output_of(program: &str, args: &[&str]) -> Result<String> {
    let path =
        cmd::find(program).ok_or_else(|| Error::internal(format!("no {program} in PATH")))?;
    cmd::run(&path, args, "")?.require_success()
}

/// What is in the namespace of a container.
fn inside(cached: &CachedAttachment) -> String {
    let netns = Netns::open(&cached.attach.netns).map_err(Error::from);
    let netlink = netns.and_then(|netns| Ok(Netlink::open_in(&netns)?));
    let text = netlink.and_then(|netlink| network(&netlink));
    let text = text.unwrap_or_else(|error| format!("{error}\n"));
    format!("{}:\n{text}\n", doctor::title(cached))
}

/// Links, addresses, routes and rules of a namespace, one in a line.
fn network(netlink: &Netlink) -> Result<String> {
    let lines = [
        lines(&netlink.dump_links()?),
        lines(&netlink.dump_all_addrs()?),
        lines(&netlink.dump_routes(&RouteFilter::default())?),
        lines(&netlink.dump_rules()?),
    ];
    Ok(lines.concat())
}

fn lines(all: &[impl std::fmt::Debug]) -> String {
    all.iter().map(|one| format!("{one:?}\n")).collect::<Vec<_>>().concat()
}
