//! `cnibox sysdump`: collects the data for a bug report in one file, without secrets.
//!
//! `archive.rs` is the tar file and its limits.

mod archive;

use std::fs::{self, OpenOptions};
use std::io::{self, BufWriter};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use self::archive::SysdumpArchive;
use super::directories::{CACHE, CONF, LEASES, PLUGIN_PATH, ToolDirectories};
use super::finding::Finding;
use super::life::{ContainerState, alive_and_reason, format_alive};
use super::{ToolCommand, doctor, ipam, json_text, print_text};
use crate::attachment::AttachmentRecord;
use crate::cmd;
use crate::framework::{AppletTable, record};
use crate::netlink::{self, Netlink, RouteFilter};
use crate::netns::Netns;
use crate::options::{self, CommandLine, CommandOption, long_option, require_no_words};
use crate::secrets::{self, VisibleKeys};
use crate::sysctl;
use cni::error::{Error, Result};
use cni::files;
use cni::json::{Json, encode_compact};
use cni::runtime::{
    AttachmentParams, CachedAttachment, EXTENSIONS, MAX_CONF_BYTES, Runtime, find_config_files,
};
use cni::sort::sort_items;

pub(super) const TOOL: ToolCommand = ToolCommand {
    command: "cnibox sysdump",
    usage: "\
sysdump: collects the data for a bug report in one file

Usage:
  cnibox sysdump [--output FILE]

Writes a tar file of less than 1 MB, readable by root only, with the findings of cnibox doctor, \
            versions, network
configurations, cached attachments, leases, links, addresses, routes, rules of the packet filter, \
            kernel parameters and
listings of the directories of plugins and state. Omits logs, and values of keys such as \
            \"password\" or \"token\".
Contains addresses, names and MACs of containers: review it before you pass it on. Changes nothing \
            else.
",
    options: &[
        CommandOption {
            short: Some('o'),
            ..long_option(
                "--output",
                "FILE",
                "a new file; \"-\" is stdout [cnibox-sysdump-HOST-SECONDS.tar]",
            )
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
Data of a node, collected by cnibox sysdump.

  doctor.json       findings of cnibox doctor
  version.txt       cnibox, kernel, operating system
  net.d/            network configurations
  attachments.json  attachments in the runtimes' cache: configuration, arguments, result
  containers.txt    links, addresses, routes of containers with findings
  leases.json       leases of host-local
  records.json      records of attachments in /run/cni/cnibox
  failed.jsonl      the last failed calls, from the flight recorder
  traces.jsonl      the last calls that were recorded on request
  directories.txt       mode, owner, size, time and name of the files of plugins and state
  network/          links, addresses, routes
  filter/           rules of the packet filter
  sysctl.txt        kernel parameters
  modules.txt       kernel modules
  kernel.log        kernel messages about networks
";

/// Files with the output of other programs: file, program, arguments.
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

/// Kernel parameters that affect packets of containers.
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

/// Words in kernel messages about networks. Other messages may be audit records with command lines.
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

/// Limit of the entries that are listed of one directory tree.
const ENTRIES: usize = 1000;

/// Limit of the size of all network configurations in bytes.
const CONFIGURATIONS: usize = 128 * 1024;

/// Limit of the containers whose network is listed.
const CONTAINERS: usize = 20;

/// Runs `cnibox sysdump` with the arguments that follow.
pub(super) fn main(args: Vec<String>, table: AppletTable) -> ExitCode {
    TOOL.run_command(
        args,
        |line| require_no_words(&line).map(|()| line),
        |line| write_sysdump(&line, table),
    )
}

fn write_sysdump(line: &CommandLine, table: AppletTable) -> Result<ExitCode> {
    let time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let host = sysctl::read_value("kernel/hostname").unwrap_or_default();
    let host = host.replace(|c: char| !c.is_ascii_alphanumeric() && c != '.', "-");
    let root = format!("cnibox-sysdump-{host}-{time}");
    let archive = collect_files(
        &ToolDirectories::from_command_line(line),
        SysdumpArchive::new(&root, time),
        table,
    );
    let path = line.last_value("--output").map_or_else(|| format!("{root}.tar"), str::to_owned);
    if path == "-" {
        let written = archive.write_tar(ABOUT, io::stdout().lock());
        written.map_err(|cause| Error::io("write to stdout", &cause))?;
        return Ok(ExitCode::SUCCESS);
    }
    // `create_new` neither follows a link nor overwrites an existing file.
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    let written = file.and_then(|file| archive.write_tar(ABOUT, BufWriter::new(file)));
    written.map_err(|cause| Error::io(format_args!("write {path}"), &cause))?;
    print_text(&format!("{path}\n"))
}

struct AttachmentSources<'a> {
    directories: &'a ToolDirectories,
    runtime: Runtime,
    shown: VisibleKeys,
}

/// Adds the files, the most important ones first: there may be no room for the last ones.
fn collect_files(
    directories: &ToolDirectories,
    mut archive: SysdumpArchive,
    table: AppletTable,
) -> SysdumpArchive {
    let sources = AttachmentSources {
        directories,
        runtime: directories.new_runtime(table),
        shown: record::shown_keys(table),
    };
    let mut findings = Vec::new();
    match doctor::examine_node(directories, &sources.runtime, table) {
        Ok((found, _)) => {
            archive
                .add_result("doctor.json", json_text(&secrets::redact_texts(Json::encode(&found))));
            findings = found;
        }
        Err(error) => archive.add_missing("doctor.json", error),
    }
    archive.add_text("version.txt", &versions_text());
    sources.add_configurations(&mut archive);
    sources.add_attachments(&findings, &mut archive);
    let leases =
        directories.find_lease_directories(None).and_then(|stores| ipam::list_json(&stores));
    archive.add_result("leases.json", leases);
    for (name, ring) in
        [("failed.jsonl", record::failed_call_log()), ("traces.jsonl", record::trace_log())]
    {
        let lines = ring.read_lines().map(|lines| record::without_secrets(&lines, &sources.shown));
        archive.add_tail(name, lines);
    }
    archive.add_result("records.json", json_text(&AttachmentRecord::read_all(None)));
    archive.add_text("sysctl.txt", &parameters_text());
    add_directory_listing(directories, &mut archive);
    archive.add_text("modules.txt", &node_file("/proc/modules"));
    add_program_outputs(&mut archive);
    archive
}

impl AttachmentSources<'_> {
    fn add_configurations(&self, archive: &mut SysdumpArchive) {
        let dir = &self.directories.conf;
        let files = match find_config_files(dir, &EXTENSIONS) {
            Ok(files) => files,
            Err(error) => return archive.add_missing("net.d", error),
        };
        let rest = archive.free_bytes().saturating_sub(CONFIGURATIONS);
        for file in files {
            let name = format!("net.d/{}", file.strip_prefix(dir).unwrap_or(&file).display());
            let read = files::read_regular_file(&file, MAX_CONF_BYTES)
                .map_err(|cause| Error::io("read", &cause));
            match read.and_then(|bytes| Json::parse(&bytes)) {
                Ok(_) if archive.free_bytes() < rest => archive.add_missing(&name, "no room"),
                Ok(json) => {
                    archive.add_result(&name, json_text(&self.shown.redact_config(json)));
                }
                // Secrets cannot be found in a file that is not JSON.
                Err(why) => archive.add_missing(&name, why),
            }
        }
    }

    /// Adds the cached attachments, and the network of those containers with findings.
    fn add_attachments(&self, findings: &[Finding], archive: &mut SysdumpArchive) {
        let cached = match self.directories.cached_attachments(&self.runtime) {
            Ok(cached) => cached,
            Err(error) => return archive.add_missing("attachments.json", error),
        };
        let has_finding = |(cached, _): &(CachedAttachment, ContainerState)| {
            let title = doctor::attachment_title(cached);
            findings.iter().any(|finding| finding.subject.to_string() == title)
        };
        let (faulty, healthy): (Vec<_>, Vec<_>) = cached.into_iter().partition(has_finding);
        // One object per line: a cut keeps whole objects.
        let objects = faulty.iter().chain(&healthy).map(|known| self.attachment_object(known));
        let lines =
            objects.filter_map(|object| encode_compact(&object).ok()).map(|line| line + "\n");
        archive.add_text("attachments.json", &lines.collect::<String>());
        let faulty = faulty.iter().take(CONTAINERS);
        let texts: String = faulty.map(|(cached, _)| container_text(cached)).collect();
        archive.add_text("containers.txt", &texts);
    }

    fn attachment_object(&self, (cached, life): &(CachedAttachment, ContainerState)) -> Json {
        let AttachmentParams { container_id, netns, ifname, args, capability_args } =
            &cached.attach;
        let list = cached.network_list();
        let result =
            list.and_then(|list| self.runtime.cached_result(&list, &cached.attach).ok()?);
        let (alive, reason) = alive_and_reason(life.liveness);
        let alive = format_alive((alive, life.doubt_reason(netns).or(reason)));
        let config = Json::parse(&cached.config).unwrap_or(Json::Null);
        let capability_args = Json::Object(capability_args.clone());
        let members = [
            ("network", cached.network.as_str().into()),
            ("container", container_id.as_str().into()),
            ("interface", ifname.as_str().into()),
            ("netns", netns.as_str().into()),
            ("alive", Json::String(alive)),
            (
                "args",
                Json::Array(
                    args.iter()
                        .map(|(key, value)| {
                            Json::Array(vec![
                                key.as_str().into(),
                                secrets::redact_arg(key, value).as_str().into(),
                            ])
                        })
                        .collect(),
                ),
            ),
            ("capabilityArgs", self.shown.redact_capability_args(capability_args)),
            ("config", self.shown.redact_config(config)),
            ("result", secrets::redact_texts(result.map_or(Json::Null, |result| result.to_json()))),
        ];
        Json::Object(members.map(|(key, value)| (key.to_owned(), value)).into())
    }
}

/// Lists the directories of plugins, configurations and state.
fn add_directory_listing(directories: &ToolDirectories, archive: &mut SysdumpArchive) {
    let ToolDirectories { conf, cache, cni_path, .. } = directories;
    let mut roots: Vec<PathBuf> = std::env::split_paths(cni_path).collect();
    roots.extend([conf.clone(), "/run/cni".into(), cache.clone()]);
    for store in directories.find_lease_directories(None).unwrap_or_default() {
        let dir = store.data_dir.join(store.network);
        if !roots.iter().any(|root| dir.starts_with(root)) {
            roots.push(dir);
        }
    }
    let mut text = String::new();
    for root in &roots {
        let mut lines = Vec::new();
        list_tree(root, &mut lines);
        text += &lines.concat();
        if lines.len() == ENTRIES {
            let root = root.display();
            archive.add_missing(
                "directories.txt",
                format_args!("more than {ENTRIES} entries of {root}"),
            );
        }
    }
    archive.add_text("directories.txt", &text);
}

/// The content of a file about the node, or why it cannot be read.
fn node_file(path: &str) -> String {
    files::read_text(Path::new(path), MAX_CONF_BYTES).unwrap_or_else(|error| error.to_string())
}

fn versions_text() -> String {
    let own = std::env::current_exe().map(|path| path.display().to_string()).unwrap_or_default();
    let files = ["/proc/version", "/etc/os-release", "/proc/uptime"]
        .map(|file| format!("\n{file}:\n{}\n", node_file(file).trim_end()));
    format!("{}executable: {own}\n{}", options::version_text(), files.concat())
}

fn parameters_text() -> String {
    PARAMETERS
        .map(|key| match sysctl::read_value(key) {
            Ok(value) => format!("{} = {value}\n", key.replace('/', ".")),
            Err(error) => format!("# {}\n", error.message()),
        })
        .concat()
}

/// Adds a line for `path` and each entry below it, up to [`ENTRIES`] lines. Links are not followed.
fn list_tree(path: &Path, lines: &mut Vec<String>) {
    let name = path.display();
    let Ok(meta) = path.symlink_metadata() else {
        return lines.push(format!("{name}: not there\n"));
    };
    let target = fs::read_link(path).map(|target| format!(" -> {}", target.display()));
    let target = target.unwrap_or_default();
    lines.push(format!(
        "{:06o} {} {:>8} {} {name}{target}\n",
        meta.mode(),
        meta.uid(),
        meta.len(),
        meta.mtime()
    ));
    if !meta.is_dir() {
        return;
    }
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let mut entries: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    sort_items(&mut entries);
    for entry in entries {
        if lines.len() < ENTRIES {
            list_tree(&entry, lines);
        }
    }
}

fn add_program_outputs(archive: &mut SysdumpArchive) {
    for (name, program, args) in PROGRAMS {
        archive.add_result(name, program_output(program, args));
    }
    if cmd::find_program("ip").is_none() {
        archive.add_result("network/all.txt", network_text(Netlink::open()));
    }
    let kernel_log = program_output("dmesg", &[]).map(|text| {
        text.split_inclusive('\n')
            .filter(|line| LOGGED.iter().any(|word| line.contains(word)))
            .collect()
    });
    archive.add_tail("kernel.log", kernel_log);
}

fn program_output(program: &str, args: &[&str]) -> Result<String> {
    let path = cmd::find_program(program)
        .ok_or_else(|| Error::internal(format!("no {program} in PATH")))?;
    cmd::run_program(&path, args, "")?.require_success()
}

/// The network of a container, or why it cannot be read.
fn container_text(cached: &CachedAttachment) -> String {
    let netns = Netns::open(&cached.attach.netns);
    let text = netns.map_err(Error::from).and_then(|netns| network_text(Netlink::open_in(&netns)));
    let text = text.unwrap_or_else(|error| format!("{error}\n"));
    format!("{}:\n{text}\n", doctor::attachment_title(cached))
}

/// Links, addresses, routes and rules of a namespace, one in a line.
fn network_text(netlink: netlink::NetlinkResult<Netlink>) -> Result<String> {
    let netlink = netlink?;
    let lines = [
        debug_lines(&netlink.dump_links()?),
        debug_lines(&netlink.dump_all_addresses()?),
        debug_lines(&netlink.dump_routes(&RouteFilter::default())?),
        debug_lines(&netlink.dump_rules()?),
    ];
    Ok(lines.concat())
}

fn debug_lines(objects: &[impl std::fmt::Debug]) -> String {
    objects.iter().map(|object| format!("{object:?}\n")).collect()
}
