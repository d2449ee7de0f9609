//! `cnibox egress`: lists the containers with an egress policy and what they were refused, replaces
//! policies, tells which entry of a policy decides, and proposes policies.

mod events;
mod names;
mod reload;

use std::fmt::Write;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::Path;
use std::process::ExitCode;

use serde::Serialize;

use self::names::{SeenNames, explain_name};
pub use self::reload::{PolicyFilesWatch, repair_links, repair_policies};
use super::{JSON, NETWORK, ToolCommand, format_table, json_text, print_text};
use crate::framework::{PluginService, Rollback};
use crate::iface::guard::{self, SINK};
use crate::netfilter::egress::compile::Service;
use crate::netfilter::egress::explain::{DestinationPlace, explain};
use crate::netfilter::egress::lint::find_idle_entries;
use crate::netfilter::egress::policy::{EgressPolicy, PolicyEntry, parse_service, service_name};
use crate::netfilter::egress::probe::require_name_service;
use crate::netfilter::egress::report::{PortReport, RefusedFlow, list_ports};
use crate::netfilter::egress::{self, EgressPart, source};
use crate::netfilter::{AttachmentId, PacketFilter};
use crate::netlink::{LinkAddress, Netlink};
use crate::options::{CommandLine, CommandOption, long_option, require_no_words, usage_error};
use crate::resolver::asked::AskedName;
use cni::error::{Error, ErrorContext, Result};

pub(super) const TOOL: ToolCommand = ToolCommand {
    command: "cnibox egress ls",
    usage: "\
egress: lists what containers with a policy were refused, explains and replaces policies

Usage:
  cnibox egress ls [--network NAME] [--container ID] [--json | --metrics]
  cnibox egress check --container ID [--network NAME] [--interface NAME] ADDRESS|NAME [SERVICE]
  cnibox egress learn --container ID [--network NAME] [--interface NAME]
  cnibox egress set --container ID [--network NAME] [--interface NAME] FILE
  cnibox egress reload [--network NAME] [--container ID]
  cnibox egress events [--network NAME] [--container ID] [--interval SECONDS]
  cnibox egress resolver [--upstream ADDRESS[:PORT]]...

ls prints each container with a policy, the number of packets and bytes that the policy refused, \
            and the last 50 refused
flows: destination, protocol and port; or arp, and the neighbour that was asked for. A flow is \
            kept for ten minutes after
its last packet; at most 50 new flows of a container are recorded at once, and 5 more per minute.

check tells which entry of each policy in force decides about a service, such as tcp/443, at an \
            address, or where
a name leads; without SERVICE about all ports of TCP. The status is 1 if the container may not reach it.

learn prints the policy of a container with entries for the flows that ls prints: what it was \
            refused, or would have
been refused in the mode audit. Read it before you use it.

set replaces all policies of a running container by the one in FILE, by one transaction. Open \
            connections are judged by
the new policy. It lasts until the next ADD of the attachment.

reload reads the files that EGRESS_POLICY has named again, and puts what has changed in force in \
            all their containers, each by
one transaction, as repair does, and repair --watch within a second. Containers whose policies \
            \"set\" has replaced are left.

events prints a line of JSON for each flow that was refused, or would have been in the mode audit, \
            until it is stopped: first
for those that ls prints, then for new packets.

resolver is the daemon that answers the queries of containers whose policies have names; see: \
            cnibox egress resolver --help
",
    options: &[
        NETWORK,
        long_option("--container", "ID", "this container only: its id, or the beginning of it"),
        long_option(
            "--interface",
            "NAME",
            "the interface in the container, if it has several with a policy",
        ),
        CommandOption {
            about: "print an array of objects with network, container, interface, port, counters, \
                    flows and the policies in force",
            ..JSON
        },
        long_option(
            events::INTERVAL,
            "SECONDS",
            "with events: the time between two looks at the counters, default 5",
        ),
        long_option("--metrics", "", "print counters in the text format of Prometheus"),
    ],
    notes: "
Exit status: 0 done; 1 failed, see stderr; 2 wrong usage.

Example:
  cnibox egress ls
  cnibox egress check --container 4f1c00a2b7d3 10.20.0.5 tcp/443
  cnibox egress set --container 4f1c00a2b7d3 FILE.json
  cnibox egress events >>/var/log/egress.json
",
};

/// The same help for the other words.
const SET: ToolCommand = ToolCommand { command: "cnibox egress set", ..TOOL };
const LEARN: ToolCommand = ToolCommand { command: "cnibox egress learn", ..TOOL };
const CHECK: ToolCommand = ToolCommand { command: "cnibox egress check", ..TOOL };
const RELOAD: ToolCommand = ToolCommand { command: "cnibox egress reload", ..TOOL };
const EVENTS: ToolCommand = ToolCommand { command: "cnibox egress events", ..TOOL };

/// The words after `cnibox egress`.
pub const TOOLS: &[PluginService] = &[
    PluginService { name: "ls", main: list_main },
    PluginService { name: "check", main: check_main },
    PluginService { name: "learn", main: learn_main },
    PluginService { name: "set", main: set_main },
    PluginService { name: "reload", main: reload_main },
    PluginService { name: "events", main: events_main },
    PluginService { name: "resolver", main: crate::resolver::main },
];

const METRICS: &str = "--metrics";

fn list_main(args: Vec<String>) -> ExitCode {
    TOOL.run_command(args, require_list_options, |line| print_ports(&line))
}

fn set_main(args: Vec<String>) -> ExitCode {
    let require = |line| require_container(line, "set", "one file", 1..=1);
    SET.run_command(args, require, |line| replace_policy(&line))
}

fn check_main(args: Vec<String>) -> ExitCode {
    CHECK.run_command(args, read_question, |question| explain_policies(&question))
}

fn require_list_options(line: CommandLine) -> Result<CommandLine> {
    require_no_words(&line)?;
    if line.has_option(JSON.flag) && line.has_option(METRICS) {
        return Err(usage_error("--json excludes --metrics"));
    }
    Ok(line)
}

fn learn_main(args: Vec<String>) -> ExitCode {
    let require = |line| require_container(line, "learn", "no word", 0..=0);
    LEARN.run_command(args, require, |line| propose_policy(&line))
}

fn reload_main(args: Vec<String>) -> ExitCode {
    RELOAD.run_command(args, require_no_output_option, |line| reload::reload_policies(&line))
}

fn events_main(args: Vec<String>) -> ExitCode {
    let require = |line| {
        let line = require_no_output_option(line)?;
        events::read_interval(&line).map(|interval| (line, interval))
    };
    EVENTS.run_command(args, require, |(line, interval)| events::print_events(&line, interval))
}

/// Fails if the line has words, or an option about the output of `ls`.
fn require_no_output_option(line: CommandLine) -> Result<CommandLine> {
    require_no_words(&line)?;
    if let Some(flag) = line.given_flags().find(|flag| [JSON.flag, METRICS].contains(flag)) {
        return Err(usage_error(format!("{flag} is an option of ls")));
    }
    Ok(line)
}

/// Fails unless the line selects a container, and has `count` words, which are `what`.
fn require_container(
    line: CommandLine,
    word: &str,
    what: &str,
    count: RangeInclusive<usize>,
) -> Result<CommandLine> {
    if let Some(flag) =
        line.given_flags().find(|flag| [JSON.flag, METRICS, events::INTERVAL].contains(flag))
    {
        return Err(usage_error(format!("{flag} is not an option of {word}")));
    }
    if !count.contains(&line.words.len()) {
        return Err(usage_error(format!("{word} needs {what}")));
    }
    if !line.has_option("--container") {
        return Err(usage_error(format!("{word} needs --container")));
    }
    Ok(line)
}

/// The words of `check`.
struct Question {
    line: CommandLine,
    about: QuestionSubject,
    /// As it was written.
    service: String,
    first: Service,
}

/// What `check` is about.
enum QuestionSubject {
    Address(IpAddr),
    /// In lower case, without the final dot.
    Name(String),
}

fn read_question(line: CommandLine) -> Result<Question> {
    let line = require_container(line, "check", "an address or name, and one service", 1..=2)?;
    let word = &line.words[0];
    let about = match word.parse() {
        Ok(addr) => QuestionSubject::Address(addr),
        Err(_) if word.contains('.') => {
            QuestionSubject::Name(word.trim_end_matches('.').to_ascii_lowercase())
        }
        Err(_) => return Err(usage_error(format!("\"{word}\" is not an address or name"))),
    };
    let service = line.words.get(1).map_or("tcp", String::as_str).to_owned();
    let first = parse_service(&service).context(|| format!("\"{service}\""))?.first;
    Ok(Question { line, about, service, first })
}

/// The reports of the containers that the options select. A container is selected by its id, or by
/// the beginning of it, which other tools print, if no container has this id.
fn selected_ports(line: &CommandLine, filter: &PacketFilter) -> Result<Vec<PortReport>> {
    let mut ports = list_ports(filter)?;
    ports.retain(|port| {
        let owner = port.stored.attachment_id();
        [("--network", owner.network), ("--interface", owner.ifname)]
            .iter()
            .all(|(flag, value)| line.last_value(flag).is_none_or(|wanted| wanted == *value))
    });
    if let Some(wanted) = line.last_value("--container") {
        let id = |port: &PortReport| port.stored.attachment_id().id.to_owned();
        let is_whole = ports.iter().any(|port| id(port) == wanted);
        ports.retain(|port| id(port).starts_with(wanted) && (!is_whole || id(port) == wanted));
    }
    Ok(ports)
}

/// A line of `ls`, and an object of its JSON.
#[derive(Serialize)]
struct ListedPort {
    container: String,
    flows: Vec<String>,
    interface: String,
    malformed_packets: u64,
    /// `enforce` or `audit`.
    mode: &'static str,
    /// The names that the resolver has refused, or noted in the mode audit.
    names: Vec<AskedName>,
    network: String,
    /// The pod's namespace and name; empty if the runtime has given none.
    pod: String,
    /// The chain of the policies.
    policy: String,
    policies: Vec<EgressPolicy>,
    port: String,
    refused_bytes: u64,
    refused_packets: u64,
}

/// The service of a flow, such as `tcp/443`, or `arp`.
fn flow_service(flow: &RefusedFlow) -> String {
    flow.service.map_or_else(|| "arp".to_owned(), service_name)
}

/// The refused flows, with the names that have led there, and the refused names.
fn list_flows(report: &PortReport, seen: &SeenNames) -> Vec<String> {
    let flows = report.flows.iter().map(|flow| {
        let name = seen.name_of(flow.addr).map_or(String::new(), |name| format!(" ({name})"));
        format!("{} {}{name}", flow.addr, flow_service(flow))
    });
    flows.chain(seen.refused_lines()).collect()
}

impl ListedPort {
    fn from_report(report: &PortReport) -> ListedPort {
        let (owner, part) = (report.stored.attachment_id(), &report.stored.content);
        let seen = SeenNames::of_port(report);
        ListedPort {
            container: owner.id.to_owned(),
            flows: list_flows(report, &seen),
            interface: owner.ifname.to_owned(),
            malformed_packets: report.malformed.packets,
            mode: if part.is_audited { "audit" } else { "enforce" },
            names: seen.asked,
            network: owner.network.to_owned(),
            pod: part.pod.clone(),
            policy: report.policy.clone(),
            policies: part.policies.clone(),
            port: part.end.clone(),
            refused_bytes: report.refused.bytes,
            refused_packets: report.refused.packets,
        }
    }

    fn metrics(&self) -> String {
        let ListedPort { container, interface, network, policy, .. } = self;
        let [container, interface, network] =
            [container, interface, network].map(|text| text.replace(['"', '\\'], "_"));
        let labels = format!(
            "{{network=\"{network}\",container=\"{container}\",interface=\"{interface}\",policy=\"\
             {policy}\"}}"
        );
        let line = |name, value| format!("cnibox_egress_{name}_total{labels} {value}\n");
        let ListedPort { refused_packets, refused_bytes, malformed_packets, .. } = self;
        [
            line("refused_packets", refused_packets),
            line("refused_bytes", refused_bytes),
            line("malformed_packets", malformed_packets),
        ]
        .concat()
    }
}

fn print_ports(line: &CommandLine) -> Result<ExitCode> {
    let ports = selected_ports(line, &PacketFilter::new())?;
    let ports: Vec<ListedPort> = ports.iter().map(ListedPort::from_report).collect();
    if line.has_option(JSON.flag) {
        return print_text(&json_text(&ports)?);
    }
    if line.has_option(METRICS) {
        return print_text(&ports.iter().map(ListedPort::metrics).collect::<String>());
    }
    let mut lines = Vec::new();
    for port in &ports {
        let refused = port.refused_packets + port.malformed_packets;
        let first = port.flows.first().cloned().unwrap_or_default();
        let cells = [&port.network, &port.container, &port.interface, &port.port].map(Clone::clone);
        let [network, container, interface, end] = cells;
        lines.push([
            network,
            container,
            interface,
            end,
            refused.to_string(),
            port.refused_bytes.to_string(),
            first,
        ]);
        let more = port.flows.iter().skip(1);
        lines.extend(more.map(|flow| {
            std::array::from_fn(|column| if column == 6 { flow.clone() } else { String::new() })
        }));
    }
    let heading = ["NETWORK", "CONTAINER", "INTERFACE", "PORT", "REFUSED", "BYTES", "FLOW"];
    print_text(&format_table(heading, lines))
}

/// The container that the options select, by its interface with a policy.
fn selected_port(line: &CommandLine, filter: &PacketFilter) -> Result<PortReport> {
    let mut ports = selected_ports(line, filter)?;
    let id = line.last_value("--container").unwrap_or_default();
    let report = ports.pop().ok_or_else(|| without_policy(line))?;
    let owner = report.stored.attachment_id();
    if let Some(other) = ports.iter().find(|port| port.stored.attachment_id().id != owner.id) {
        let ids = format!("{} and {}", owner.id, other.stored.attachment_id().id);
        return Err(Error::config(format!("\"{id}\" begins the ids of several containers"))
            .with_details(format!("write more of it: {ids}")));
    }
    if !ports.is_empty() {
        return Err(Error::config(format!(
            "container \"{id}\" has several interfaces with a policy"
        ))
        .with_details("add --interface, or --network"));
    }
    Ok(report)
}

fn without_policy(line: &CommandLine) -> Error {
    let id = line.last_value("--container").unwrap_or_default();
    Error::config(format!("container \"{id}\" has no egress policy"))
        .with_details("see: cnibox egress ls; a policy begins with an ADD of the plugin egress")
}

/// Prints which entry of each policy decides about a service at an address.
fn explain_policies(question: &Question) -> Result<ExitCode> {
    let Question { line, about, service, first } = question;
    let first = *first;
    let report = selected_port(line, &PacketFilter::new())?;
    let port = &report.stored.content;
    let addr = match about {
        QuestionSubject::Address(addr) => *addr,
        QuestionSubject::Name(name) => {
            let (text, is_allowed) = explain_name(port, name, service, first)?;
            print_text(&text)?;
            return Ok(if is_allowed { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
    };
    let host = Netlink::open()?;
    let place = find_place_of(&host, &host.dump_all_addresses()?, port, addr)?;
    let mut text = format!("{addr} is {}\n", place.name());
    if let Some(named) = port.find_named(addr, first)? {
        let (name, left) = (&named.name, named.remaining());
        _ = writeln!(text, "{service} is allowed: {name} leads there for another {left} s");
        print_text(&text)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut is_allowed = true;
    for (number, policy) in (1..).zip(&port.policies) {
        let decision = explain(policy, &port.scene(), place, addr, first)?;
        let verdict = if decision.is_allowed { "allowed" } else { "refused" };
        let by = decision.by;
        _ = writeln!(text, "{service} is {verdict} by {by} of policy {number}");
        is_allowed &= decision.is_allowed;
    }
    print_text(&text)?;
    Ok(if is_allowed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Prints the container's policy with entries for what it was refused.
fn propose_policy(line: &CommandLine) -> Result<ExitCode> {
    let report = selected_port(line, &PacketFilter::new())?;
    let port = &report.stored.content;
    let mut policy = match port.policies.as_slice() {
        [alone] => alone.clone(),
        _ => EgressPolicy::default(),
    };
    let host = Netlink::open()?;
    let addresses = host.dump_all_addresses()?;
    let (known, seen) = (policy.allow.len(), SeenNames::of_port(&report));
    for RefusedFlow { addr, service, .. } in &report.flows {
        let Some(service) = service else { continue };
        let to = match find_place_of(&host, &addresses, port, *addr)? {
            DestinationPlace::Host => "host".to_owned(),
            DestinationPlace::Neighbour => addr.to_string(),
            DestinationPlace::AnotherHost => {
                seen.name_of(*addr).map_or_else(|| addr.to_string(), str::to_owned)
            }
        };
        let service = service_name(*service);
        let (_, learned) = policy.allow.split_at_mut(known);
        let entry = learned.iter_mut().find(|entry| entry.to[0] == to);
        match entry.and_then(|entry| entry.ports.as_mut()) {
            Some(ports) if ports.contains(&service) => {}
            Some(ports) => ports.push(service),
            None => {
                policy.allow.push(PolicyEntry { to: vec![to], ports: Some(vec![service]) });
            }
        }
    }
    policy.allow.extend(seen.learned_entries());
    print_text(&json_text(&policy)?)
}

/// Where packets of the container to an address end; `own` has the addresses of the host.
fn find_place_of(
    host: &Netlink,
    own: &[LinkAddress],
    port: &EgressPart,
    addr: IpAddr,
) -> Result<DestinationPlace> {
    if own.iter().any(|own| own.net.addr() == addr) {
        return Ok(DestinationPlace::Host);
    }
    if port.on_link.iter().any(|net| net.contains(&addr)) {
        return Ok(DestinationPlace::Neighbour);
    }
    let link = egress::find_container_link(host, addr)?;
    let is_near = link.is_some_and(|link| !port.uplinks.contains(&link.name));
    Ok(if is_near { DestinationPlace::Neighbour } else { DestinationPlace::AnotherHost })
}

/// Puts a policy in force in place of a container's policies.
fn replace_policy(line: &CommandLine) -> Result<ExitCode> {
    let filter = PacketFilter::new();
    let report = selected_port(line, &filter)?;
    let owner = report.stored.attachment_id();
    let file = &line.words[0];
    let policy = source::read_policy(Path::new(file))?;
    let _lock = egress::lock_policy(owner)?;
    // Meanwhile it may have been detached, or attached again.
    let stored: EgressPart =
        egress::RECORDS.read_content(owner).ok_or_else(|| without_policy(line))?;
    let added = stored.policies_of_add().clone();
    // What is set is enforced.
    let port = EgressPart { policies: vec![policy], added, is_audited: false, ..stored.clone() };
    put_in_force(&filter, owner, &stored, port)?;
    let AttachmentId { network, id, ifname } = owner;
    print_text(&format!("{network} {id} {ifname}: the policy is that of {file}\n"))
}

/// Puts a port in force in place of the `stored` one. The caller has the lock.
fn put_in_force(
    filter: &PacketFilter,
    owner: AttachmentId<'_>,
    stored: &EgressPart,
    mut port: EgressPart,
) -> Result<()> {
    for policy in &port.policies {
        for idle in find_idle_entries(policy, &port.scene(), usize::MAX)? {
            warn!("{idle}");
        }
    }
    require_name_service(&port)?;
    port.replaces(stored);
    let compiled = port.compile()?;
    let program = port.fit_guard_filter(&compiled)?;
    let host = Netlink::open()?;
    let end = host.require_link(&port.end)?;
    let place = guard::find_place(&host, &end)?;
    place.program.as_ref().ok_or_else(|| {
        Error::internal(format!("port \"{}\" is not guarded", port.end))
            .with_details("cnibox repair")
    })?;
    let mut undo = Rollback::new();
    undo.add_step("restore the policy", || egress::restore_port(filter, owner, stored, &port));
    egress::RECORDS.add_part(owner, &port);
    egress::require_recorded(owner, &port)?;
    undo.add_step("restore the filter", || {
        guard::restore_filter(&host, &end, place.program.as_ref())
    });
    guard::put_guard_at(&host, &end, &place, program, SINK).context(|| "replace the filter")?;
    egress::add_port(filter, owner, &port, &compiled)?;
    undo.commit();
    Ok(())
}
