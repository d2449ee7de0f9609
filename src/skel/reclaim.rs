//! What a dead attachment left on the node is taken back as a whole, by whoever finds a part of it
//! in the way: rules would lead the next owner of its address to places where it never was.

use std::net::IpAddr;

use ipnet::IpNet;

use super::rollback::Failures;
use crate::attachment::Owner;
use crate::error::{Error, Result};
use crate::log;
use crate::netfilter::filter::firewalld::{self, Zone};
use crate::netfilter::filter::{self, Pod, nftables, xtables};
use crate::netfilter::{PacketFilter, masquerade, ports, spoof};
use crate::netlink::Netlink;
use crate::store::Reclaimed;

/// Removes everything of an attachment that is certainly gone, and had these addresses, from the
/// calling thread's namespace.
pub fn attachment(owner: Owner<'_>, ips: &[IpAddr]) -> Result<()> {
    let filter = PacketFilter::new();
    let nets: Vec<IpNet> = ips.iter().map(|ip| IpNet::from(*ip)).collect();
    let mut failures = Failures::new();
    failures.keep(ports::reclaim(&filter, owner));
    failures.keep(masquerade::del(&filter, owner, &nets));
    failures.keep(spoof::del(&filter, owner, &[]));
    failures.keep(passage(&filter, owner, ips));
    failures.keep(shaping(owner));
    failures.into_result()
}

/// What the firewall plugin made, in every back end. Its zone of firewalld is not known: the one
/// that is the default is tried.
fn passage(filter: &PacketFilter, owner: Owner<'_>, ips: &[IpAddr]) -> Result<()> {
    let pod = |ips: &[IpAddr]| Pod::new(filter::Owner::new(owner), ips.iter().copied());
    let mut failures = Failures::new();
    failures.keep(xtables::del(filter, &pod(ips)));
    if let Some(nft) = failures.keep(filter.nft_if_present()).flatten() {
        // Found by their comments, also those of addresses that nobody knows any more.
        let pod = pod(&[]);
        failures.keep(nftables::del(nft, &pod));
        if firewalld::has(nft, &pod)
            && let Some(mut zone) = Zone::find(firewalld::DEFAULT_ZONE)
        {
            zone.del(nft, &pod);
        }
    }
    failures.into_result()
}

/// The devices through which its packets were led.
fn shaping(owner: Owner<'_>) -> Result<()> {
    let host = Netlink::open()?;
    let mut failures = Failures::new();
    for link in host.dump_links()? {
        if link.kind.as_deref() == Some("ifb") && owner.owns(Some(&link.alias)) {
            failures.keep(host.del_link_by_index(link.index).map_err(Error::from));
        }
    }
    failures.into_result()
}

/// Takes back what these leases' owners have besides; those that stay are left out, with a warning.
pub fn leases(network: &str, mut gone: Vec<Reclaimed>) -> Vec<Reclaimed> {
    let mut reclaimed = Vec::new();
    while let Some(first) = gone.first().map(|gone| gone.lease.clone()) {
        let is_same = |other: &mut Reclaimed| {
            other.lease.id == first.id && other.lease.ifname == first.ifname
        };
        let same: Vec<Reclaimed> = gone.extract_if(.., is_same).collect();
        // Releases up to 0.7.5 of the reference did not write the interface.
        let ifname = first.ifname.as_deref().unwrap_or("eth0");
        let ips: Vec<IpAddr> = same.iter().map(|gone| gone.lease.ip).collect();
        match attachment(Owner { network, ifname, id: &first.id }, &ips) {
            Ok(()) => reclaimed.extend(same),
            Err(e) => log::warn(format_args!("{first} stays: its rules cannot be removed: {e}")),
        }
    }
    reclaimed
}
