//! Puts the addresses of an answer in force for the container that asks, before the answer.

use std::net::IpAddr;
use std::time::Duration;

use crate::attachment::AttachmentId;
use crate::framework::AttachmentTurn;
use crate::iface::guard::{SINK, put_guard};
use crate::netfilter::PacketFilter;
use crate::netfilter::egress::named_address::NamedAddress;
use crate::netfilter::egress::resolved::{AddressUse, NamePolicies};
use crate::netfilter::egress::{self, EgressPart};
use crate::netlink::Netlink;
use crate::netlink::traffic::program::ProgramFilter;
use cni::error::{Error, Result};

/// How long another change of the policy may take: other containers wait as well. The container asks
/// again.
const PATIENCE: Duration = Duration::from_millis(100);

/// The number of seconds for which an address is in force after the container has forgotten it.
const SLACK: u32 = 5;

/// Puts the addresses to which the name leads, each with the time to live of its record in seconds,
/// in force for the attachment. Returns those that the answer may have, with the time to live for
/// the answer: not longer than the address is in force.
///
/// Blocks: for about a millisecond if an address is new, for microseconds otherwise.
pub(super) fn allow_addresses(
    filter: &PacketFilter,
    host: &Netlink,
    owner: AttachmentId<'_>,
    policies: &NamePolicies,
    name: &str,
    addresses: &[(IpAddr, u32)],
) -> Result<Vec<(IpAddr, u32)>> {
    let (mut told, mut named) = (Vec::new(), Vec::new());
    for &(ip, ttl) in addresses {
        match policies.judge_address(host, name, ip)? {
            AddressUse::Refused => {}
            AddressUse::Told => told.push((ip, ttl)),
            AddressUse::Named => {
                let left = policies.remaining_time(name, ip, ttl).unwrap_or_else(|| {
                    let address = NamedAddress::with_ttl(name, ip, ttl);
                    let left = address.remaining();
                    named.push(address);
                    left
                });
                told.push((ip, ttl.min(left.saturating_sub(SLACK))));
            }
        }
    }
    if !named.is_empty() {
        put_in_force(filter, host, owner, policies, &named)?;
    }
    Ok(told)
}

/// The record comes first: what restores the rules of the container restores these addresses.
fn put_in_force(
    filter: &PacketFilter,
    host: &Netlink,
    owner: AttachmentId<'_>,
    policies: &NamePolicies,
    named: &[NamedAddress],
) -> Result<()> {
    let _turn = AttachmentTurn::take_at_once(owner)?;
    let _lock = egress::lock_policy_within(owner, PATIENCE)?;
    let (mut given_up, mut program) = (Vec::new(), None);
    let port = egress::RECORDS.change_part(owner, |port: &mut EgressPart| {
        if !policies.are_of(port) {
            return false;
        }
        given_up = port.add_named(named);
        program = Some(fit_filter(port, policies, named.len(), &mut given_up));
        matches!(program, Some(Ok(_)))
    })?;
    let program = program.transpose()?;
    let Some((port, program)) = port.zip(program) else {
        return Err(Error::internal("the container has ended, or its policy was replaced"));
    };
    let end = host.require_link(&port.end)?;
    put_guard(host, &end, program, SINK)?;
    if !policies.put_addresses(filter, &port, named, &given_up)? {
        egress::add_port(filter, owner, &port, policies.compiled())?;
        policies.note_addresses(&port.named, &port.named);
    }
    Ok(())
}

/// The filter of the container. That of a large policy has place for fewer addresses: then only the
/// last `needed` ones are kept, or as many more as fit.
fn fit_filter(
    port: &mut EgressPart,
    policies: &NamePolicies,
    needed: usize,
    given_up: &mut Vec<NamedAddress>,
) -> Result<ProgramFilter> {
    loop {
        match policies.guard_filter(port) {
            Err(_) if port.named.len() > needed => {
                given_up.extend(port.keep_named(needed.max(port.named.len() / 2)));
            }
            outcome => return outcome,
        }
    }
}
