//! What containers were refused: counters, and the last flows.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::Duration;

use super::compile::Service;
use super::policy::service_of_packet;
use super::table::{
    FLOW_TIMEOUT, FRAME_SETS, GUARD_ARP, GUARD_FLOWS, GUARD_REFUSED, PACKET_FLOWS, PACKET_SETS,
};
use super::{EgressPart, RECORDS};
use crate::attachment::StoredRecord;
use crate::netfilter::PacketFilter;
use crate::netlink::nftables::{NftSet, NftSocket, NftValue, PacketCount, RecordedKey, SetElement};
use crate::netlink::{MacAddress, NetlinkResult};
use cni::error::Result;
use cni::sort::sort_by_key;

/// The maximum number of flows that are reported for a container.
pub const FLOWS: usize = 50;

/// Refused packets, or in the mode audit those that would be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefusedFlow {
    /// The destination; of an ARP request the address that it asks for.
    pub addr: IpAddr,
    /// `None` for ARP.
    pub service: Option<Service>,
    pub packets: u64,
    /// The time since the last packet.
    pub age: Duration,
}

/// A container with a policy, and what it was refused.
#[derive(Debug)]
pub struct PortReport {
    pub stored: StoredRecord<EgressPart>,
    /// The chain of the policy, which equal policies share; empty if it is not in force.
    pub policy: String,
    /// What the policy refused.
    pub refused: PacketCount,
    /// What came with another source address, or is neither IP nor ARP.
    pub malformed: PacketCount,
    /// The last refused flows, the latest first.
    pub flows: Vec<RefusedFlow>,
}

/// The containers with a policy on this host.
pub fn list_ports(filter: &PacketFilter) -> Result<Vec<PortReport>> {
    let mut stored: Vec<_> = RECORDS.iter_parts::<EgressPart>().collect();
    sort_by_key(&mut stored, |stored| stored.attachment_id().instance_id());
    let refusals = filter.query_nft(&|nft| Refusals::read(nft))?;
    Ok(stored.into_iter().map(|stored| refusals.of_port(stored)).collect())
}

/// The content of the tables.
#[derive(Default)]
struct Refusals {
    containers: HashMap<MacAddress, ContainerRefusals>,
    malformed: HashMap<String, PacketCount>,
}

/// The entries of one container.
#[derive(Clone, Default)]
struct ContainerRefusals {
    policy: String,
    refused: PacketCount,
    flows: Vec<RefusedFlow>,
}

impl Refusals {
    fn read(nft: &NftSocket) -> NetlinkResult<Refusals> {
        let mut all = Refusals::default();
        for element in nft.dump_elements(PACKET_SETS.ports)? {
            if let (Some(mac), Some(chain)) = (mac_of(&element.key.0), element.target_chain()) {
                chain.clone_into(&mut all.containers.entry(mac).or_default().policy);
            }
        }
        for set in [PACKET_SETS.refused, FRAME_SETS.refused, GUARD_REFUSED] {
            for (SetElement { key, .. }, count) in nft.dump_counters(set)? {
                if let Some(mac) = mac_of(&key.0) {
                    add(&mut all.containers.entry(mac).or_default().refused, count);
                }
            }
        }
        for sets in [PACKET_SETS, FRAME_SETS] {
            for (SetElement { key, .. }, count) in nft.dump_counters(sets.guarded)? {
                if let Some(NftValue::IfName(name)) = key.0.into_iter().next() {
                    add(all.malformed.entry(name).or_default(), count);
                }
            }
        }
        for set in [PACKET_FLOWS, GUARD_FLOWS]
            .into_iter()
            .flat_map(|sets| [sets.flows4, sets.flows6])
            .chain([GUARD_ARP])
        {
            all.read_flows(nft, set)?;
        }
        Ok(all)
    }

    fn read_flows(&mut self, nft: &NftSocket, set: NftSet<'static>) -> NetlinkResult<()> {
        for RecordedKey { key, remaining, count } in nft.dump_recorded(set)? {
            let (mac, addr, service) = match key.0.as_slice() {
                [
                    NftValue::Mac(mac),
                    NftValue::Proto(proto),
                    NftValue::Port(port),
                    NftValue::Ip(ip),
                ] => (mac, *ip, Some(service_of_packet(proto.protocol_number(), *port))),
                [NftValue::Mac(mac), NftValue::Ip(ip)] => (mac, *ip, None),
                _ => continue,
            };
            let age = Duration::from_secs(FLOW_TIMEOUT.into()).saturating_sub(remaining);
            let flow = RefusedFlow { addr, service, packets: count.packets, age };
            let flows = &mut self.containers.entry(*mac).or_default().flows;
            // Both guards may have refused it.
            match flows.iter_mut().find(|known| (known.addr, known.service) == (addr, service)) {
                Some(known) => {
                    known.packets += flow.packets;
                    known.age = known.age.min(age);
                }
                None => flows.push(flow),
            }
        }
        Ok(())
    }

    fn of_port(&self, stored: StoredRecord<EgressPart>) -> PortReport {
        let EgressPart { mac, end, .. } = &stored.content;
        let ContainerRefusals { policy, refused, mut flows } =
            self.containers.get(mac).cloned().unwrap_or_default();
        sort_by_key(&mut flows, |flow| (flow.age, flow.addr, flow.service));
        flows.truncate(FLOWS);
        let malformed = self.malformed.get(end).copied().unwrap_or_default();
        PortReport { stored, policy, refused, malformed, flows }
    }
}

fn mac_of(key: &[NftValue]) -> Option<MacAddress> {
    if let [.., NftValue::Mac(mac)] = key { Some(*mac) } else { None }
}

fn add(total: &mut PacketCount, count: PacketCount) {
    total.packets += count.packets;
    total.bytes += count.bytes;
}
