//! What the resolver of the node has seen: names for the flows of containers, and names that were
//! refused.

use std::collections::HashMap;
use std::fmt::Write;
use std::net::IpAddr;

use crate::netfilter::egress::EgressPart;
use crate::netfilter::egress::compile::Service;
use crate::netfilter::egress::explain;
use crate::netfilter::egress::named_address::NamedAddress;
use crate::netfilter::egress::policy::PolicyEntry;
use crate::netfilter::egress::report::PortReport;
use crate::resolver::asked::{AskedName, NameVerdict, read_asked_names};
use cni::error::Result;

/// The service of a name that was refused before an address of it was known.
const HTTPS: &str = "tcp/443";

/// The names of a container.
pub(super) struct SeenNames {
    pub(super) asked: Vec<AskedName>,
    by_address: HashMap<IpAddr, String>,
}

impl SeenNames {
    pub(super) fn of_port(report: &PortReport) -> SeenNames {
        let asked = read_asked_names(report.stored.attachment_id());
        let named = report.stored.content.named.iter().map(|named| (named.ip, &named.name));
        let seen =
            asked.iter().flat_map(|asked| asked.addresses.iter().map(|ip| (*ip, &asked.name)));
        let by_address = seen.chain(named).map(|(ip, name)| (ip, name.clone())).collect();
        SeenNames { asked, by_address }
    }

    /// The name that has led the container to the address.
    pub(super) fn name_of(&self, addr: IpAddr) -> Option<&str> {
        self.by_address.get(&addr).map(String::as_str)
    }

    /// The names that were refused: neither the container nor the resolver knows an address.
    fn refused(&self) -> impl Iterator<Item = &AskedName> {
        self.asked.iter().filter(|asked| asked.verdict == NameVerdict::Refused)
    }

    /// A line of `ls` for each name that was refused.
    pub(super) fn refused_lines(&self) -> Vec<String> {
        let line = |asked: &AskedName| match asked.addresses.as_slice() {
            [] => format!("{} dns", asked.name),
            refused => {
                let refused: Vec<String> = refused.iter().map(IpAddr::to_string).collect();
                format!("{} dns: {}", asked.name, refused.join(" "))
            }
        };
        self.refused().map(line).collect()
    }

    /// Entries for the names that were refused as such.
    pub(super) fn learned_entries(&self) -> Vec<PolicyEntry> {
        let refused = self.refused().filter(|asked| asked.addresses.is_empty());
        let entry = |asked: &AskedName| PolicyEntry {
            to: vec![asked.name.clone()],
            ports: Some(vec![HTTPS.to_owned()]),
        };
        refused.map(entry).collect()
    }
}

/// What the policies of a container say about a service where a name leads: the text, and whether
/// all of them allow it.
pub(super) fn explain_name(
    port: &EgressPart,
    name: &str,
    service: &str,
    first: Service,
) -> Result<(String, bool)> {
    let (mut text, mut is_allowed) = (String::new(), true);
    for (number, policy) in (1..).zip(&port.policies) {
        let decision = explain::explain_name(policy, &port.scene(), name, first)?;
        let verdict = if decision.is_allowed { "allowed" } else { "refused" };
        _ = writeln!(text, "{service} is {verdict} by {} of policy {number}", decision.by);
        is_allowed &= decision.is_allowed;
    }
    let is_open = |named: &&NamedAddress| named.name == name && named.remaining() > 0;
    for NamedAddress { ip, .. } in port.named.iter().filter(is_open) {
        _ = writeln!(text, "{ip} is in force");
    }
    Ok((text, is_allowed))
}
