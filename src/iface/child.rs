//! A link on top of another link, its master: macvlan, ipvlan, VLAN.
//!
//! | step | function |
//! | --- | --- |
//! | find the master, check the MTU | [`MasterConfig`] |
//! | create the child | [`create_link`]: in the container, under its final name, by one message |
//! | roll back | [`roll_back_link`] |
//! | kernel parameters, addresses, up, routes, the result | [`complete_link`] |
//! | CHECK | [`find_listed_link`], [`MasterConfig::verify_master`], [`verify_mtu`], [`CheckedLink::verify_layer3`] |
//! | DEL | [`delete_link`], which never needs the master |
//! | STATUS | [`MasterConfig::require_present`], [`require_driver`] |
//!
//! The master is on the host, or with `linkInContainer` in the container itself. The container's
//! network namespace is entered before the link is created, so that the link can be deleted after
//! any failure. [`AddRequest::attach_link`](crate::framework::AddRequest::attach_link) is the
//! common part of the plugins' ADD.

use std::os::fd::AsFd;

use ipnet::IpNet;
use nix::errno::Errno;

use super::configure::{self, AddressStyle};
use super::inside::{ContainerNetns, DEL_FIRST};
use super::mtu::{MtuConfig, default_route_link};
use super::{routes, verify, veth};
use crate::netlink::{BondSettings, Link, LinkKind, MacAddress, Netlink, NewLink, VethPeer};
use crate::netns::Netns;
use crate::repairs::RepairFindings;
use cni::error::{Error, ErrorContext, Result};
use cni::{CniResult, InterfaceName};

/// Attempts to choose a free index.
const INDEX_TRIES: usize = 5;

/// The child to create.
#[derive(Debug)]
pub struct NewChildLink<'a> {
    /// The name of the child in the container.
    pub ifname: &'a InterfaceName,
    /// The kind of the child, with the master.
    pub kind: LinkKind<'a>,
    /// In bytes; with 0 the kernel uses the MTU of the master.
    pub mtu: u32,
    /// The hardware address; `None` leaves it to the kernel.
    pub mac: Option<MacAddress>,
}

/// The master called `name`; without a name, the link of the default route, IPv4 first.
fn find_master(netlink: &Netlink, name: &str) -> Result<Link> {
    if name.is_empty() {
        return default_route_link(netlink).map_err(|e| {
            e.with_details(
                "name the link in the key \"master\"; with \"linkInContainer\" one of the container",
            )
        });
    }
    let failed = || format!("failed to lookup master \"{name}\"");
    if let Some(link) = netlink.find_link(name).context(failed)? {
        return Ok(link);
    }
    let remedy = match address_label_remedy(netlink, name)? {
        Some(remedy) => remedy,
        None => "\"master\" names a link of the host, or with \"linkInContainer\" one of the \
                 container"
            .to_owned(),
    };
    Err(Error::internal(format!("{}: Link not found", failed())).with_details(remedy))
}

/// The remedy for a link name that is in fact the label of an address, as in `eth0:1`; `None` for
/// other names.
pub fn address_label_remedy(netlink: &Netlink, name: &str) -> Result<Option<String>> {
    let Some((link, _)) = name.split_once(':') else { return Ok(None) };
    let is_link = netlink.find_link(link)?.is_some();
    Ok(is_link.then(|| format!("\"{name}\" is the label of an address: write \"{link}\"")))
}

/// Creates the child in the container under its final name, so that [`delete_link`] finds the child
/// even if this process is killed. `netlink` is a socket in the master's network namespace. With
/// `up` the same message sets the child up: for a child without addresses, or with addresses that
/// are requested through the child (DHCP).
pub fn create_link(
    netlink: &Netlink,
    inside: &ContainerNetns<'_>,
    wanted: &NewChildLink<'_>,
    up: bool,
) -> Result<()> {
    let name = wanted.ifname.as_str();
    let link = NewLink::new(name, wanted.kind.clone()).with_mtu(wanted.mtu).with_mac(wanted.mac);
    let link = link.with_netns(inside.netns.as_fd());
    let link = if up { link.set_up() } else { link };
    let failed = || format!("failed to create {}", wanted.kind);
    let Err(mut refused) = netlink.add_link(&link) else { return Ok(()) };
    if refused.is_exists() {
        if inside.netlink.find_link(name)?.is_some() {
            let msg = format!("container already has an interface \"{name}\": file exists");
            return Err(Error::internal(msg).with_details(DEL_FIRST)).context(failed);
        }
        // Kernels before 6.15 look for the name in the namespace of the caller, unless the request
        // has an index.
        let tries = if netlink.find_link(name)?.is_some() { INDEX_TRIES } else { 0 };
        for _ in 0..tries {
            match netlink.add_link(&link.clone().with_index(random_index())) {
                Ok(()) => return Ok(()),
                Err(error) => refused = error,
            }
            if refused.errno() != Some(Errno::EBUSY) {
                break;
            }
        }
    }
    if refused.is_unanswered() {
        // The link may exist.
        drop(delete_link(inside.netns, wanted.ifname, &wanted.kind.to_string(), None));
    }
    let remedy = refused.errno().and_then(|errno| refusal_remedy(netlink, errno, &wanted.kind));
    let error = Error::from(refused).context(failed());
    Err(remedy.map_or(error.clone(), |remedy| error.with_details(remedy)))
}

/// The remedy for a refused request, by its errno.
fn refusal_remedy(netlink: &Netlink, errno: Errno, kind: &LinkKind<'_>) -> Option<String> {
    let find = |index: u32| netlink.find_link_by_index(index).ok().flatten();
    Some(match (errno, kind) {
        (Errno::EBUSY, LinkKind::Macvlan { link, .. } | LinkKind::Ipvlan { link, .. }) => {
            let master = find(*link)?;
            match master.master.and_then(find) {
                Some(Link { name, kind, .. }) => format!(
                    "\"{}\" is a port of \"{name}\" ({}): write \"master\": \"{name}\"",
                    master.name,
                    kind.unwrap_or_default()
                ),
                None => format!("\"{}\" has children of another kind", master.name),
            }
        }
        (Errno::EADDRINUSE, LinkKind::Macvlan { .. }) => {
            "another macvlan on the master, or the master itself, has this MAC address".to_owned()
        }
        (Errno::EINVAL, LinkKind::Macvlan { .. }) => {
            "choose another master: a macvlan in mode \"passthru\" is the only one on its master, \
             which must be an Ethernet device"
                .to_owned()
        }
        (Errno::EINVAL, LinkKind::Bond(BondSettings { xmit_hash_policy: Some(5), .. })) => {
            "\"xmitHashPolicy\": \"vlan+srcmac\" needs Linux 5.12: choose another one".to_owned()
        }
        (Errno::EEXIST, LinkKind::Vlan { link, id }) => format!(
            "another link, maybe of another container, has VLAN {id} of \"{}\": several containers \
             share it by a bridge",
            find(*link)?.name
        ),
        _ => return None,
    })
}

/// Deletes the link that [`create_link`] has created.
pub fn roll_back_link(inside: &ContainerNetns<'_>, ifname: &InterfaceName) -> Result<()> {
    Ok(inside.netlink.delete_link(ifname.as_str()).map(drop)?)
}

/// Adds the addresses and routes of `result` to the child, sets the child up, and adds the child to
/// `result`. Without addresses the child stays as [`create_link`] created it.
pub fn complete_link(
    inside: &ContainerNetns<'_>,
    ifname: &InterfaceName,
    sandbox: &str,
    result: &mut CniResult,
) -> Result<Link> {
    result.assign_ips_to_first();
    let link = inside.require_link(ifname.as_str())?;
    result.interfaces = vec![veth::interface_entry(&link, sandbox)];
    if !result.ips.is_empty() {
        configure_link(inside, &link, result, AddressStyle::Detect)?;
    }
    Ok(link)
}

/// Adds the addresses and routes of `result` to the interface, and sets the interface up. The
/// neighbours learn of all addresses by announcements.
pub fn configure_link(
    inside: &ContainerNetns<'_>,
    link: &Link,
    result: &CniResult,
    style: AddressStyle,
) -> Result<()> {
    configure::enable_announcements(&inside.netlink, link);
    configure::configure_layer3(inside, link, result, style, &[("ndisc_notify", "1")])
}

/// An attachment's link as the result of its ADD lists it.
#[derive(Debug)]
pub struct RecordedLink {
    pub mac: MacAddress,
    pub addresses: Vec<IpNet>,
}

/// Deletes the link `ifname` of this kind; success if there is none. A link `ifname` of another
/// kind does not belong to the attachment and stays: the container may have
/// [renamed](find_renamed_link) the attachment's link, and created another link of the same name.
pub fn delete_link(
    netns: &Netns,
    ifname: &InterfaceName,
    kind: &str,
    recorded: Option<&RecordedLink>,
) -> Result<()> {
    let inside = Netlink::open_in(netns)?;
    let mut named = inside.find_link(ifname.as_str())?;
    if named.take_if(|link| link.kind.as_deref() != Some(kind)).is_some() {
        warn!("\"{ifname}\" is not of kind {kind}, and is left alone");
    }
    if let Some(link) = &named {
        inside.delete_link_by_index(link.index)?;
    }
    let Some(recorded) = recorded else { return Ok(()) };
    if named.is_some_and(|link| link.mac == Some(recorded.mac)) {
        return Ok(());
    }
    match find_renamed_link(&inside, kind, recorded)? {
        Some(link) => Ok(inside.delete_link_by_index(link.index).map(drop)?),
        None => Ok(()),
    }
}

/// The attachment's link, which the container has renamed: the only link of this kind with the
/// recorded MAC, if it has all recorded addresses, which are about to be released. The MAC alone
/// proves nothing: another attachment may have the same MAC, and ipvlan and VLAN links have the MAC
/// of their master.
fn find_renamed_link(
    inside: &Netlink,
    kind: &str,
    recorded: &RecordedLink,
) -> Result<Option<Link>> {
    let RecordedLink { mac, addresses } = recorded;
    if addresses.is_empty() {
        return Ok(None);
    }
    let mut links = inside.dump_links()?;
    links.retain(|link| link.kind.as_deref() == Some(kind) && link.mac == Some(*mac));
    let [link] = &links[..] else { return Ok(None) };
    let present = inside.dump_addresses(link.index)?;
    let has_all = addresses.iter().all(|net| present.iter().any(|addr| addr.net == *net));
    Ok(has_all.then(|| link.clone()))
}

/// CHECK: an attachment's link, with the result that lists it.
#[derive(Debug)]
pub struct CheckedLink<'r> {
    pub link: Link,
    pub prev: &'r CniResult,
    /// The index of the interface in `prev`.
    pub index: usize,
}

/// CHECK: the link that `prev` lists with this name and sandbox; fails unless the link is of this
/// kind, is up, and has the listed hardware address.
pub fn find_listed_link<'r>(
    inside: &ContainerNetns<'_>,
    prev: &'r CniResult,
    ifname: &InterfaceName,
    sandbox: &str,
    kind: &str,
) -> Result<CheckedLink<'r>> {
    let (index, entry) = verify::find_container_entry(prev, ifname, sandbox)?;
    let link = verify::find_container_link(inside, entry, kind)?;
    verify::require_up(&link, verify::IN_CONTAINER)?;
    Ok(CheckedLink { link, prev, index })
}

/// Restores the container's missing routes through an interface; see [`routes::restore_missing`].
pub fn restore_routes(
    inside: &ContainerNetns<'_>,
    found: &CheckedLink<'_>,
    repairs: &mut RepairFindings,
) -> Result<()> {
    let CheckedLink { link, prev, index } = found;
    let mut wanted = routes::connected_routes(link, prev, *index);
    wanted.extend(configure::plan_routes(prev, link.index));
    routes::restore_missing(inside, link, &wanted, repairs)
}

impl CheckedLink<'_> {
    /// CHECK: fails unless the interface has its addresses and the container its routes.
    pub fn verify_layer3(&self, inside: &ContainerNetns<'_>) -> Result<()> {
        verify::require_addresses(inside, &self.link, self.prev, self.index)?;
        verify::require_routes(inside, self.prev)
    }
}

/// The configuration's keys for the master.
#[derive(Clone, Copy, Debug)]
pub struct MasterConfig<'a> {
    /// The name of the master; empty for the link of the default route.
    pub name: &'a str,
    /// Whether the master is in the container.
    pub in_container: bool,
    /// The MTU of the child: at most the MTU of the master.
    pub mtu: MtuConfig,
}

impl MasterConfig<'_> {
    /// The netlink socket in the master's network namespace.
    pub fn master_netlink<'n>(
        self,
        host: &'n Netlink,
        inside: &'n ContainerNetns<'_>,
    ) -> &'n Netlink {
        if self.in_container { &inside.netlink } else { host }
    }

    /// The master, and the MTU for the child in bytes.
    pub fn resolve_master(self, netlink: &Netlink, host: &Netlink) -> Result<(Link, u32)> {
        let master = find_master(netlink, self.name)?;
        let mtu = self.mtu.resolve_below(host, &master)?;
        Ok((master, mtu))
    }

    /// STATUS: fails if there is no master. A master in the container cannot be checked, because
    /// the container is not known yet.
    pub fn require_present(self, host: &Netlink) -> Result<()> {
        if self.in_container {
            Ok(())
        } else {
            self.resolve_master(host, host).map(drop).or_unavailable()
        }
    }

    /// CHECK: fails unless `link` is on top of the configured master. Without a configured master
    /// any existing link is accepted: the default route may have moved since ADD.
    pub fn verify_master(
        self,
        host: &Netlink,
        inside: &ContainerNetns<'_>,
        link: &Link,
    ) -> Result<()> {
        let in_container = link.link_netnsid.is_none();
        if self.name.is_empty() {
            let netlink = MasterConfig { in_container, ..self }.master_netlink(host, inside);
            return Ok(netlink.require_link_by_index(link.link.unwrap_or_default()).map(drop)?);
        }
        let master = find_master(self.master_netlink(host, inside), self.name)?;
        // The container may use the network namespace of the host.
        let is_same_netns = in_container == self.in_container
            || Netns::open_current().and_then(|host| host.is_same_as(inside.netns))?;
        if !is_same_netns || link.link != Some(master.index) {
            let place = match (is_same_netns, self.in_container) {
                (true, _) => "",
                (false, true) => " in the container",
                (false, false) => " on the host",
            };
            let (name, master) = (&link.name, &master.name);
            let msg = format!("interface \"{name}\" is not on top of \"{master}\"{place}");
            return Err(Error::internal(msg));
        }
        match self.mtu {
            // The default route may have moved since ADD.
            MtuConfig::Auto => Ok(()),
            MtuConfig::Bytes(_) => self.mtu.resolve_below(host, &master).map(drop),
        }
    }
}

/// The hardware address from the first source that is not empty; `None` leaves it to the kernel.
pub fn requested_mac(sources: &[&str]) -> Result<Option<MacAddress>> {
    let Some(text) = sources.iter().find(|text| !text.is_empty()) else { return Ok(None) };
    let mac = MacAddress::parse_unicast(text);
    mac.context(|| format!("invalid args {text} for MAC addr")).map(Some)
}

/// CHECK: fails unless `link` has this MTU; 0 means any.
pub fn verify_mtu(link: &Link, wanted: u32) -> Result<()> {
    if wanted == 0 || link.mtu == wanted {
        return Ok(());
    }
    let Link { name, mtu, .. } = link;
    Err(Error::internal(format!("interface \"{name}\" has MTU {mtu} instead of {wanted}"))
        .with_details(format!("{}ip link set {name} mtu {wanted}", verify::IN_CONTAINER)))
}

/// STATUS: fails if the kernel does not support a kind of link. Creates a link in a temporary
/// network namespace: there is no other way to learn whether the driver exists. `kind` gets the
/// index of an Ethernet link to use as the master.
pub fn require_driver(kind: &dyn Fn(u32) -> LinkKind<'static>) -> Result<()> {
    let elsewhere = Netns::create_unnamed()?;
    let netlink = Netlink::open_in(&elsewhere)?;
    let pair = LinkKind::Veth { peer: VethPeer::new("peer") };
    let master = netlink.add_and_read_link(&NewLink::new("master", pair))?;
    Ok(netlink.add_link(&NewLink::new("link", kind(master.index)))?)
}

/// A random index far above the indexes that the kernel assigns.
fn random_index() -> u32 {
    0x0100_0000 | (veth::random_number() & 0x00ff_ffff)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chosen_indexes_are_positive_and_differ() {
        let indexes: std::collections::HashSet<_> = (0..50).map(|_| random_index()).collect();
        assert!(indexes.len() > 40 && indexes.iter().all(|i| *i < 1 << 25));
    }
}
