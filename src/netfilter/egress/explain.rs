//! Which entry of a policy decides a packet.

use std::net::{IpAddr, Ipv4Addr};

use super::compile::{Service, has_service};
use super::names::NamePattern;
use super::policy::{EgressPolicy, PolicyEntry, PolicyScene, is_name, parse_service};
use cni::error::Result;

/// The place of a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DestinationPlace {
    AnotherHost,
    Host,
    Neighbour,
}

impl DestinationPlace {
    /// The place, as a person names it.
    pub fn name(self) -> &'static str {
        match self {
            DestinationPlace::AnotherHost => "another host",
            DestinationPlace::Host => "the host itself",
            DestinationPlace::Neighbour => "a container of this host",
        }
    }
}

/// What a policy does with a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PolicyDecision {
    pub is_allowed: bool,
    /// The entry that decides, such as `allow[0]`, or the key of the policy that does.
    pub by: String,
}

/// What the policy does with packets of the service to the address.
pub fn explain(
    policy: &EgressPolicy,
    scene: &PolicyScene<'_>,
    place: DestinationPlace,
    addr: IpAddr,
    service: Service,
) -> Result<PolicyDecision> {
    let allows = |policy: &EgressPolicy| {
        let compiled = policy.compile(scene)?;
        let traffic = match place {
            DestinationPlace::AnotherHost => &compiled.routed,
            DestinationPlace::Host => &compiled.host,
            DestinationPlace::Neighbour => &compiled.neighbours,
        };
        Ok::<_, cni::error::Error>(traffic.allows(addr, service))
    };
    let is_allowed = allows(policy)?;
    let decided = |by: String| Ok(PolicyDecision { is_allowed, by });
    let entries = all_entries(policy);
    for (name, is_denial, at) in &entries {
        let mut without = policy.clone();
        entries_of(&mut without, *is_denial).remove(*at);
        if allows(&without)? != is_allowed {
            return decided(name.clone());
        }
    }
    // Several entries say the same: the first that says it alone.
    let none = EgressPolicy { allow: Vec::new(), deny: Vec::new(), ..policy.clone() };
    let mut first = None;
    if allows(&none)? != is_allowed {
        for (name, is_denial, at) in &entries {
            let mut alone = none.clone();
            let entry = entries_of(&mut policy.clone(), *is_denial).swap_remove(*at);
            entries_of(&mut alone, *is_denial).push(entry);
            if first.is_none() && allows(&alone)? == is_allowed {
                first = Some(name.clone());
            }
        }
    }
    decided(first.unwrap_or_else(|| {
        if policy.profile.is_empty() { "policy".to_owned() } else { "profile".to_owned() }
    }))
}

/// An address of the Internet for which no policy has an entry: of documentation (RFC 5737).
const SOMEWHERE: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1));

/// What the policy does with packets of the service to where the name leads; a policy without the
/// name decides by the address, and this is what it says about the Internet.
pub fn explain_name(
    policy: &EgressPolicy,
    scene: &PolicyScene<'_>,
    name: &str,
    service: Service,
) -> Result<PolicyDecision> {
    let table = policy.compile(scene)?.names;
    let Some((pattern, services)) = table.entry_of(name) else {
        return explain(policy, scene, DestinationPlace::AnotherHost, SOMEWHERE, service);
    };
    let is_allowed = has_service(services, service);
    let has_pattern = |entry: &PolicyEntry| {
        let names = entry.to.iter().filter(|text| is_name(text));
        names.filter_map(|text| NamePattern::parse(text).ok()).any(|own| own == *pattern)
    };
    let allows = |entry: &PolicyEntry| {
        let ports =
            entry.ports.as_deref().map(|ports| ports.iter().map(|port| parse_service(port)));
        ports.is_none_or(|mut ports| {
            ports.any(|range| range.is_ok_and(|range| has_service(&[range], service)))
        })
    };
    let entries = || policy.allow.iter().enumerate().filter(|(_, entry)| has_pattern(entry));
    let decides = entries().find(|(_, entry)| allows(entry)).or_else(|| entries().next());
    let by = decides.map_or_else(|| "policy".to_owned(), |(at, _)| format!("allow[{at}]"));
    Ok(PolicyDecision { is_allowed, by })
}

/// The names and places of all entries.
fn all_entries(policy: &EgressPolicy) -> Vec<(String, bool, usize)> {
    let mut all = Vec::new();
    for (key, is_denial, count) in
        [("allow", false, policy.allow.len()), ("deny", true, policy.deny.len())]
    {
        all.extend((0..count).map(|at| (format!("{key}[{at}]"), is_denial, at)));
    }
    all
}

fn entries_of(policy: &mut EgressPolicy, is_denial: bool) -> &mut Vec<PolicyEntry> {
    if is_denial { &mut policy.deny } else { &mut policy.allow }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netfilter::egress::policy::parse_service;

    #[test]
    fn the_entry_that_decides_is_named() {
        use DestinationPlace::{AnotherHost, Host, Neighbour};
        let json = r#"{"profile": "sandbox", "allow": [{"to": ["10.20.0.5"], "ports": ["tcp/443"]},
            {"to": ["10.0.0.0/9"]}, {"to": ["10.0.0.0/9"]}, {"to": ["neighbours"], "ports": ["udp"]}],
            "deny": [{"to": ["10.30.0.0/16"]}, {"ports": ["tcp/25"]}]}"#;
        let policy: EgressPolicy = serde_json::from_str(json).unwrap();
        for (place, addr, service, is_allowed, by) in [
            (AnotherHost, "10.20.0.5", "tcp/443", true, "allow[0]"),
            (AnotherHost, "10.20.0.6", "tcp/443", true, "allow[1]"),
            (AnotherHost, "10.30.0.6", "tcp/443", false, "deny[0]"),
            (AnotherHost, "10.200.0.6", "tcp/443", false, "profile"),
            (AnotherHost, "8.8.8.8", "tcp/443", true, "profile"),
            (AnotherHost, "8.8.8.8", "tcp/25", false, "deny[1]"),
            (Host, "10.20.0.5", "tcp/443", true, "allow[0]"),
            (Host, "10.20.0.6", "udp/53", true, "profile"),
            (Host, "10.20.0.6", "tcp/22", false, "profile"),
            (Neighbour, "10.20.0.6", "udp/9", true, "allow[3]"),
            (Neighbour, "10.20.0.6", "tcp/9", false, "profile"),
        ] {
            let service = parse_service(service).unwrap().first;
            let addr = addr.parse().unwrap();
            let decision = explain(&policy, &PolicyScene::default(), place, addr, service).unwrap();
            let expected = PolicyDecision { is_allowed, by: by.to_owned() };
            assert_eq!(decision, expected, "{place:?} {addr} {service:x}");
        }
    }
}
