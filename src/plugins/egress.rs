//! egress: what the container may reach, in force when ADD returns.
//!
//! A chained plugin, behind an interface plugin whose interface is a veth pair with an end on the
//! host: it returns `prevResult`. Keys: `policy`, `allow`, `deny`, `profile`, `serve`, `policyDir`,
//! `limits`, `mode`, `refuse`. The same object may come by the capability `egressPolicy`, by `args.cni.egressPolicy`, and as
//! the file of `policyDir` that `EGRESS_POLICY` of `CNI_ARGS` names. A packet must be allowed by
//! each policy that is given; without any, nothing is allowed. The capability `portMappings` tells
//! which services the container publishes.
//!
//! State on the host while the container lives: elements of the tables `inet` and `bridge
//! cnibox_egress`, and the chain and sets of its policy, which containers with equal policies
//! share; a filter on the host's end of the pair, which stays after DEL until the pair is deleted.
//! Permanently: the tables `inet`, `bridge` and `netdev cnibox_egress` and `netdev
//! cnibox_egress_answers`, and the links of the sink ([`guard`]).

mod config;
mod surroundings;

use std::net::IpAddr;

use self::config::{EgressConfig, require_known_keys};
use self::surroundings::{
    HostAddresses, find_answered, find_uplinks, known_ports, link_local_addresses, name_servers,
    networks_of, pin_mac, require_unused_mac, routers_of,
};
use crate::attachment::AttachmentRecord;
use crate::files::lock::FileLock;
use crate::framework::{
    AddRequest, CallContext, CheckRequest, ConfigRemarks, DelRequest, GcRequest, Plugin, Rollback,
    require_prev_result,
};
use crate::iface::guard::SINK;
use crate::iface::{ContainerNetns, checksums, guard, peer, redirect};
use crate::netfilter::egress::lint::find_idle_entries;
use crate::netfilter::egress::policy::{CompiledPolicy, EgressPolicy};
use crate::netfilter::egress::probe::{require_name_service, require_reachable, require_resolver};
use crate::netfilter::egress::source::pod_name;
use crate::netfilter::egress::{self, EgressPart};
use crate::netfilter::{AttachmentId, RuleBackend};
use crate::netlink::{Link, LinkAddress, Netlink};
use crate::netns::Netns;
use crate::repairs::RepairFindings;
use cni::CniResult;
use cni::error::{Error, ErrorContext, Result};

/// The maximum number of networks in a policy whose entries ADD compares with each other.
const MOST_COMPARED: usize = 64;

#[derive(Debug)]
pub struct Egress;

impl Plugin for Egress {
    const NAME: &'static str = "egress";
    const ABOUT: &'static str = "limits what the container can reach";
    const OUTLIVES_ITS_CONTAINER: bool = true;
    const REPAIRS: bool = true;
    type Conf = EgressConfig;

    fn examine(
        cx: &CallContext<'_>,
        conf: &EgressConfig,
        remarks: &mut ConfigRemarks,
    ) -> Result<()> {
        require_known_keys(&cx.net.json)?;
        conf.examine(cx, usize::MAX, remarks)
    }

    fn add(cx: &CallContext<'_>, conf: &EgressConfig, req: &AddRequest) -> Result<CniResult> {
        let prev = require_prev_result(req.prev.as_ref(), "must be called as a chained plugin")?;
        let (policies, policy_file) = conf.policies(cx)?;
        RuleBackend::Nftables.require_usable(cx.packet_filter(), &[])?;
        let (host, filter) = (cx.host_netlink()?, cx.packet_filter());
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let _lock = egress::lock_policy(owner)?;
        let inside = &ContainerNetns::open_in(req.sandbox.open_netns()?)?;
        let (end, mut port) =
            find_port(host, inside, owner.ifname, prev, policies, conf.published()?)?;
        port.is_audited = conf.is_audited()?;
        port.is_silent = conf.is_silent()?;
        port.limits = conf.limits()?;
        port.policy_file = policy_file;
        port.pod = pod_name(cx.raw_args());
        warn_of_idle_entries(&port)?;
        // A failure leaves a former policy of the attachment in force.
        let former: Option<EgressPart> = egress::RECORDS.read_content(owner);
        // The container knows the addresses of names that it has asked for.
        let is_same_pair = |former: &&EgressPart| is_same_pair(former, &port);
        port.named = former.as_ref().filter(is_same_pair).map_or(Vec::new(), |f| f.named.clone());
        let compiled = port.compile()?;
        let program = port.fit_guard_filter(&compiled)?;
        require_name_service(&port)?;
        let place = guard::find_place(host, &end)?;
        if let Some(former) = &former {
            require_same_policies(owner, req, former, &port)?;
            port.replaces(former);
        }
        let mut undo = Rollback::new();
        cx.record_with_part(Self::NAME, req, prev, (egress::RECORDS, &port), &mut undo);
        undo.add_step("restore the policy", || {
            match former.as_ref().filter(|former| former.end == end.name) {
                Some(former) => egress::restore_port(filter, owner, former, &port),
                None => egress::delete_port(filter, owner),
            }
        });
        undo.add_step(format!("restore the filter of \"{}\"", end.name), || {
            guard::restore_filter(host, &end, place.program.as_ref())
        });
        if former.is_some() {
            egress::require_recorded(owner, &port)?;
        }
        let was_on = checksums::switch_off(inside, owner.ifname)?;
        undo.add_step("restore the checksum offload", move || {
            checksums::restore(inside, owner.ifname, was_on)
        });
        // The filter comes before the rules, because it holds whatever happens to them.
        guard::put_guard_at(host, &end, &place, program, SINK)?;
        egress::add_port(filter, owner, &port, &compiled)?;
        // What a virtual machine may ask, its container cannot.
        if port.has_names() && !redirect::has_target(inside, owner.ifname)? {
            require_reachable(inside.netns, &port)?;
        }
        undo.commit();
        let mut result = prev.clone();
        if port.has_names() {
            let server = |ip: &IpAddr| match ip {
                IpAddr::V6(v6) if v6.is_unicast_link_local() => format!("{ip}%{}", owner.ifname),
                _ => ip.to_string(),
            };
            result.dns.nameservers = port.resolvers().iter().map(server).collect();
        }
        Ok(result)
    }

    fn check(cx: &CallContext<'_>, _: &EgressConfig, req: &CheckRequest) -> Result<()> {
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let _lock = lock_named(owner)?;
        let (host, port) = (cx.host_netlink()?, recorded_port(owner)?);
        let end = connected_end(host, req, &port)?;
        require_same_bridge(host, &end, &port)?;
        checksums::require_no_offload(host, req.sandbox.open_netns()?, &end)?;
        if !guard::has_guard(host, &end, &port.guard_filter(&port.compile()?)?, SINK)? {
            return Err(Error::internal(format!(
                "the filter of \"{}\" is missing or was changed",
                end.name
            ))
            .with_details("\"cnibox repair\" restores it"));
        }
        egress::check_port(cx.packet_filter(), owner, &port)
    }

    fn repair(
        cx: &CallContext<'_>,
        _: &EgressConfig,
        req: &CheckRequest,
        repairs: &mut RepairFindings,
    ) -> Result<()> {
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let _lock = lock_named(owner)?;
        let (host, port) = (cx.host_netlink()?, recorded_port(owner)?);
        // A container that renames its interface, or moves it away, does not prevent the repair.
        let end = connected_end(host, req, &port)
            .or_else(|error| recorded_end(host, owner, &port)?.ok_or(error))?;
        require_same_bridge(host, &end, &port)?;
        let wanted = port.guard_filter(&port.compile()?)?;
        if !guard::has_guard(host, &end, &wanted, SINK).unwrap_or(false) {
            let what = format!("the filter of \"{}\"", end.name);
            repairs.restore_missing(what, || guard::put_guard(host, &end, wanted, SINK));
        }
        if let Ok(netns) = req.sandbox.open_netns() {
            checksums::repair_offload(host, netns, &end, repairs);
        }
        Ok(())
    }

    /// The filter stays: until the interface plugin deletes the pair, the container may still run.
    fn del(cx: &CallContext<'_>, _: &EgressConfig, req: &DelRequest) -> Result<()> {
        let owner = AttachmentId::new(&cx.net.name, &req.id, &req.ifname);
        let _lock = egress::lock_policy(owner)?;
        egress::delete_port(cx.packet_filter(), owner)
    }

    fn gc(cx: &CallContext<'_>, _: &EgressConfig, req: &GcRequest) -> Result<()> {
        let (network, valid) =
            (cx.net.name.as_str(), AttachmentId::from_attachments(&cx.net.name, &req.valid));
        egress::remove_stale_ports(cx.packet_filter(), network, &valid)
    }

    fn status(cx: &CallContext<'_>, conf: &EgressConfig) -> Result<()> {
        // Unknown keys fail ADD alone: containers of other networks still come and go.
        conf.examine(cx, 0, &mut ConfigRemarks::default()).or_unavailable()?;
        cx.require_serviceable(Some(RuleBackend::Nftables), &[egress::FEATURE])?;
        if conf.has_names() {
            require_resolver().or_unavailable()?;
        }
        let has_sink = SINK.require_usable(cx.usable_host_netlink()?).or_unavailable()?;
        try_guard(has_sink).or_unavailable()
    }
}

/// Puts a filter on the loopback interface of a new namespace, as ADD does on the host's end; with
/// the links of the sink unless the host has them, which proves that the kernel can create them.
fn try_guard(has_sink: bool) -> Result<()> {
    let netns = Netns::create_unnamed()?;
    let inside = Netlink::open_in(&netns)?;
    let link = inside.require_link("lo")?;
    let program = EgressPart::default().guard_filter(&CompiledPolicy::default())?;
    if has_sink {
        guard::try_guard(&inside, &link, program)
    } else {
        guard::put_guard(&inside, &link, program, SINK)
    }
}

/// The host's end of the attachment's pair, and the policy for it.
fn find_port(
    host: &Netlink,
    inside: &ContainerNetns<'_>,
    ifname: &str,
    prev: &CniResult,
    policies: Vec<EgressPolicy>,
    published: Vec<String>,
) -> Result<(Link, EgressPart)> {
    let link = inside.require_link(ifname)?;
    let refuse = |why: String| {
        Error::config(why).with_details("a policy needs a veth pair, as bridge and ptp create it")
    };
    let end = peer::find_host_end(host, inside, &link)?
        .ok_or_else(|| refuse(format!("interface \"{ifname}\" has no other end on the host")))?;
    let mac =
        link.mac.ok_or_else(|| refuse(format!("interface \"{ifname}\" has no MAC address")))?;
    let listed =
        prev.interfaces.iter().find(|entry| entry.name == ifname && !entry.sandbox.is_empty());
    if let Some(listed) =
        listed.filter(|entry| !entry.mac.is_empty() && entry.mac.parse() != Ok(mac))
    {
        return Err(refuse(format!(
            "interface \"{ifname}\" has the MAC address {mac}, not {}",
            listed.mac
        )));
    }
    let master = find_master(host, &end)?;
    if let Some(other) = master.as_ref().filter(|master| master.kind.as_deref() != Some("bridge")) {
        return Err(refuse(format!(
            "\"{}\" is a port of \"{}\", which is not a bridge",
            end.name, other.name
        )));
    }
    let (arrives_at, bridge) = (arrival_interfaces(host, &end, master.as_ref())?, master.as_ref());
    let fdb = bridge.map_or(Ok(Vec::new()), |bridge| known_ports(host, bridge, mac))?;
    require_unused_mac(&fdb, &end, mac)?;
    let mut ips: Vec<IpAddr> = prev.ips.iter().map(|ip| ip.address.addr()).collect();
    // tc-redirect-tap lists an address twice.
    ips.sort_unstable();
    ips.dedup();
    if ips.is_empty() {
        return Err(Error::config(format!("interface \"{ifname}\" has no address"))
            .with_details("a policy is bound to the addresses of the result: add \"ipam\""));
    }
    let answered = find_answered(host, &ips, &arrives_at)?;
    ips.extend(link_local_addresses(inside, &link, mac)?);
    let routers = routers_of(prev);
    let mut addresses = host.dump_all_addresses()?;
    let is_near = |addr: &LinkAddress| arrives_at.iter().any(|(index, _)| *index == addr.index);
    // The end of each pair has a link-local address, at which only its own link finds the host.
    let is_of_link = |ip| matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    addresses.retain(|addr| !is_of_link(addr.net.addr()) || is_near(addr));
    // Another network of the host may have the address of a router that is not the host.
    let near = addresses.iter().filter(|addr| is_near(addr));
    let near: Vec<IpAddr> = near.map(|addr| addr.net.addr()).collect();
    let is_routed_here = routers.iter().all(|router| near.contains(router));
    let known = HostAddresses::of_networks(addresses.iter().map(|addr| addr.net));
    let bridge_mac =
        bridge.filter(|_| is_routed_here).map_or(Ok(None), |bridge| pin_mac(host, bridge, &fdb))?;
    let mut uplinks = find_uplinks(host)?;
    // Another router on the bridge is behind it.
    uplinks.extend(bridge.filter(|_| bridge_mac.is_none()).map(|bridge| bridge.name.clone()));
    let port = EgressPart {
        end: end.name.clone(),
        mac,
        arrives_at: names_of(arrives_at),
        is_bridged: bridge.is_some(),
        bridge_mac,
        on_link: networks_of(prev),
        host: known.for_filter(&routers),
        routers,
        ips,
        answered,
        name_servers: name_servers(prev),
        uplinks,
        published,
        policies,
        ..EgressPart::default()
    };
    Ok((end, port))
}

/// Waits for the resolver of the node, which puts addresses of names in the record and in force one
/// after the other.
fn lock_named(owner: AttachmentId<'_>) -> Result<Option<FileLock>> {
    let has_names = recorded_port(owner)?.has_names();
    if has_names { egress::lock_policy(owner) } else { Ok(None) }
}

fn is_same_pair(former: &EgressPart, port: &EgressPart) -> bool {
    (&former.end, former.mac) == (&port.end, port.mac)
}

fn warn_of_idle_entries(port: &EgressPart) -> Result<()> {
    for policy in &port.policies {
        for idle in find_idle_entries(policy, &port.scene(), MOST_COMPARED)? {
            warn!("{idle}");
        }
    }
    Ok(())
}

/// Fails if another configuration has already given the pair a policy: a second `egress` of the
/// list would open what the first one refuses. Runtimes call ADD once for each pair; a repeated ADD
/// with the same policies restores what is missing. `former` is the recorded port; that of a pair
/// that is gone, whose DEL was lost, has been forgotten when this ADD began, or that of a plugin
/// before it.
fn require_same_policies(
    owner: AttachmentId<'_>,
    req: &AddRequest,
    former: &EgressPart,
    port: &EgressPart,
) -> Result<()> {
    if !is_same_pair(former, port) || *former.policies_of_add() == port.policies {
        return Ok(());
    }
    let record = AttachmentRecord::find_by_attachment(owner);
    if record.is_none_or(|record| record.netns != req.sandbox.netns_identity()) {
        return Ok(());
    }
    let ifname = owner.ifname;
    Err(Error::config(format!("interface \"{ifname}\" already has a policy of another egress"))
        .with_details(
            "one egress in a list: write one policy that allows what both allow; \"cnibox egress \
             set\" replaces that of a running container",
        ))
}

/// The link whose port the end is. A VRF is none: packets arrive at its ports.
fn find_master(host: &Netlink, end: &Link) -> Result<Option<Link>> {
    let master = end.master.map(|index| host.find_link_by_index(index)).transpose()?.flatten();
    Ok(master.filter(|master| master.kind.as_deref() != Some("vrf")))
}

/// The indices and names of the interfaces by which packets of the end arrive: of the end, or of
/// its bridge and the VLANs of the bridge.
fn arrival_interfaces(
    host: &Netlink,
    end: &Link,
    bridge: Option<&Link>,
) -> Result<Vec<(u32, String)>> {
    let first = bridge.unwrap_or(end);
    let mut found = vec![(first.index, first.name.clone())];
    if let Some(bridge) =
        bridge.filter(|bridge| bridge.bridge.is_some_and(|bridge| bridge.vlan_filtering))
    {
        found.extend(
            host.dump_links()?
                .into_iter()
                .filter(|link| link.link == Some(bridge.index) && link.link_netnsid.is_none())
                .map(|link| (link.index, link.name)),
        );
    }
    Ok(found)
}

fn names_of(interfaces: Vec<(u32, String)>) -> Vec<String> {
    interfaces.into_iter().map(|(_, name)| name).collect()
}

fn recorded_port(owner: AttachmentId<'_>) -> Result<EgressPart> {
    egress::RECORDS.read_content(owner).ok_or_else(|| {
        Error::internal("the attachment has no record of its policy")
            .with_details("attach the container again")
    })
}

/// The port of the policy, if it is the other end of the container's interface.
fn connected_end(host: &Netlink, req: &CheckRequest, port: &EgressPart) -> Result<Link> {
    let inside = ContainerNetns::open_in(req.sandbox.open_netns()?)?;
    let link = inside.require_link(req.ifname.as_str())?;
    let end = peer::find_host_end(host, &inside, &link)?.filter(|end| end.name == port.end);
    end.ok_or_else(|| {
        Error::internal(format!(
            "interface \"{}\" is no longer connected to port \"{}\"",
            link.name, port.end
        ))
        .with_details("attach the container again")
    })
}

/// The port of the policy, if it is the link in the record of the attachment.
fn recorded_end(
    host: &Netlink,
    owner: AttachmentId<'_>,
    port: &EgressPart,
) -> Result<Option<Link>> {
    let recorded = AttachmentRecord::find_by_attachment(owner).and_then(|record| record.end);
    Ok(host
        .find_link(&port.end)?
        .filter(|end| recorded.is_some_and(|recorded| recorded.index == end.index)))
}

/// Fails if packets of the end arrive elsewhere than at the time of ADD.
fn require_same_bridge(host: &Netlink, end: &Link, port: &EgressPart) -> Result<()> {
    let bridge = find_master(host, end)?;
    let arrives_at = names_of(arrival_interfaces(host, end, bridge.as_ref())?);
    let mac = bridge.and_then(|bridge| bridge.mac);
    let changed = if port.arrives_at.first() != arrives_at.first() {
        format!("port \"{}\" is no longer a port of \"{}\"", end.name, port.arrives_at[0])
    } else if port.arrives_at != arrives_at {
        format!(
            "packets of port \"{}\" arrive at {}, its policy is for {}",
            end.name,
            arrives_at.join(", "),
            port.arrives_at.join(", ")
        )
    } else if port.bridge_mac.is_some() && port.bridge_mac != mac {
        format!("the MAC address of bridge \"{}\" was changed", arrives_at[0])
    } else {
        return Ok(());
    };
    Err(Error::internal(changed).with_details("attach the container again"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_frames_are_counted_at_the_port_of_the_sink() {
        assert_eq!(egress::SINK_PORT, SINK.port);
    }
}
