//! `cnibox egress events`: what containers are refused, as lines of JSON.

use std::collections::HashMap;
use std::net::IpAddr;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use serde::Serialize;

use super::super::pause::{StopSignals, WakeReason};
use super::super::print_text;
use super::{SeenNames, flow_service, selected_ports};
use crate::netfilter::PacketFilter;
use crate::netfilter::egress::compile::Service;
use crate::netfilter::egress::report::PortReport;
use crate::options::{CommandLine, usage_error};
use cni::error::Result;
use cni::json::encode_compact;

pub(super) const INTERVAL: &str = "--interval";

/// The interval unless another is given, and the longest, in seconds.
const DEFAULT: u64 = 5;
const LONGEST: u64 = 3600;

/// Packets of one flow since the last event about it.
#[derive(Serialize)]
struct RefusalEvent {
    /// Of the last packet, as in RFC 3339, in UTC.
    time: String,
    network: String,
    container: String,
    interface: String,
    /// The namespace and name of the pod; empty if the runtime has given none.
    pod: String,
    destination: IpAddr,
    /// The name that has led the container there, if it has asked the resolver of the node.
    #[serde(skip_serializing_if = "String::is_empty")]
    name: String,
    /// Such as `tcp/443`; `arp` for a neighbour that was asked for.
    service: String,
    packets: u64,
    /// `refused`, or `noted` in the mode audit.
    verdict: &'static str,
}

/// A flow of an attachment.
type FlowKey = (String, IpAddr, Option<Service>);

/// The packets of each flow that events have told of.
#[derive(Default)]
struct ReportedFlows(HashMap<FlowKey, u64>);

impl ReportedFlows {
    /// The events about what is new in the reports. A flow that has fewer packets than before was
    /// forgotten in between.
    fn find_new(&mut self, ports: &[PortReport], now: SystemTime) -> Vec<RefusalEvent> {
        let (mut events, mut present) = (Vec::new(), HashMap::new());
        for port in ports {
            let (owner, part) = (port.stored.attachment_id(), &port.stored.content);
            let seen = SeenNames::of_port(port);
            for flow in &port.flows {
                let key = (owner.instance_id(), flow.addr, flow.service);
                let told = self.0.get(&key).copied().filter(|told| *told <= flow.packets);
                let packets = flow.packets - told.unwrap_or_default();
                present.insert(key, flow.packets);
                if packets == 0 && told.is_some() {
                    continue;
                }
                events.push(RefusalEvent {
                    time: humantime::format_rfc3339_millis(now - flow.age).to_string(),
                    network: owner.network.to_owned(),
                    container: owner.id.to_owned(),
                    interface: owner.ifname.to_owned(),
                    pod: part.pod.clone(),
                    destination: flow.addr,
                    name: seen.name_of(flow.addr).unwrap_or_default().to_owned(),
                    service: flow_service(flow),
                    packets,
                    verdict: if part.is_audited { "noted" } else { "refused" },
                });
            }
        }
        self.0 = present;
        events
    }
}

pub(super) fn read_interval(line: &CommandLine) -> Result<Duration> {
    let Some(text) = line.last_value(INTERVAL) else { return Ok(Duration::from_secs(DEFAULT)) };
    let seconds = text.parse().ok().filter(|seconds| (1..=LONGEST).contains(seconds));
    let wrong = || usage_error(format!("{INTERVAL} {text}: not a number from 1 to {LONGEST}"));
    Ok(Duration::from_secs(seconds.ok_or_else(wrong)?))
}

/// Prints events until SIGTERM or SIGINT, or until nobody reads them.
pub(super) fn print_events(line: &CommandLine, interval: Duration) -> Result<ExitCode> {
    let signals = StopSignals::block_signals()?;
    let (filter, mut reported) = (PacketFilter::new(), ReportedFlows::default());
    loop {
        match selected_ports(line, &filter) {
            Ok(ports) => {
                for event in reported.find_new(&ports, SystemTime::now()) {
                    print_text(&(encode_compact(&event)? + "\n"))?;
                }
            }
            // The next look may succeed.
            Err(error) => warn!("{error}"),
        }
        if signals.wait_for_event(&[], Some(interval))? == Some(WakeReason::End) {
            return Ok(ExitCode::SUCCESS);
        }
    }
}
