//! The kernel's cost of a pod's link on a bridge: the lower bound of ADD and DEL, including the
//! cost that grows with the number of bridge ports; and that of a virtual machine's tap device.

use std::fs::{self, Permissions};
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cnibox::testing::iface::{NewTapDevice, create_device, redirect};
use cnibox::testing::netlink::{
    KernelRoute, LinkChange, LinkKind, Netlink, NewLink, NewLinkAddress, OnOffSetting,
    RouteAddMode, VethPeer,
};
use cnibox::testing::netns::Netns;

use crate::Result;
use crate::case::BRIDGE;
use crate::contest::{Times, ms};

/// Creates and deletes the links of pods one after the other, on the calling thread's host with
/// bridged pods. The requests are those of an ADD, sent by a process that is already running.
pub(crate) fn links(rounds: usize) -> Result<Times> {
    let mut times = Times::new(1);
    let host = Netlink::open()?;
    let bridge = bridge(&host)?;
    // Kept until the end: the kernel deletes namespaces asynchronously while holding its locks.
    let mut used = Vec::new();
    for round in 0..=rounds {
        let pod = Netns::create_unnamed()?;
        let inside = Netlink::open_in(&pod)?;
        let name = format!("link-{round}");
        let start = Instant::now();
        let link = add(&host, &name, bridge, (&pod, &inside))?;
        let added = start.elapsed();
        let start = Instant::now();
        host.delete_link_by_index(link)?;
        if round > 0 {
            times.add[0].push(ms(added));
            times.del[0].push(ms(start.elapsed()));
        }
        used.push(pod);
    }
    Ok(times)
}

/// The index of the bridge with the gateway's address.
fn bridge(host: &Netlink) -> Result<u32> {
    if host.find_link(BRIDGE)?.is_none() {
        let kind = LinkKind::Bridge { vlan_filtering: None };
        host.add_link(&NewLink::new(BRIDGE, kind).set_up())?;
    }
    let index = host.require_link(BRIDGE)?.index;
    host.add_address(index, &NewLinkAddress::new("10.1.0.1/16".parse()?))?;
    Ok(index)
}

fn add(host: &Netlink, name: &str, bridge: u32, pod: (&Netns, &Netlink)) -> Result<u32> {
    let (netns, inside) = pod;
    let peer = VethPeer::new("eth0").with_netns(netns.as_fd());
    let pair = NewLink::new(name, LinkKind::Veth { peer }).with_master(bridge).set_up();
    let port = host.add_and_read_link(&pair)?;
    let eth0 = port.link.ok_or("no other end")?;
    inside.change_link(eth0, LinkChange::new().set_arp_notify(OnOffSetting::On))?;
    inside.add_address(eth0, &NewLinkAddress::new("10.1.255.2/16".parse()?))?;
    inside.change_link(eth0, LinkChange::new().set_up())?;
    let mut route = KernelRoute::new("0.0.0.0/0".parse()?);
    route.gw = Some("10.1.0.1".parse()?);
    inside.add_route(&route, RouteAddMode::Create)?;
    Ok(port.index)
}

/// Creates a tap device that exchanges all packets with the pod's interface. The requests are those
/// of an ADD of tc-redirect-tap, sent by a process that is already running.
pub(crate) fn redirected_tap(pod: &Netns) -> Result<Duration> {
    let inside = Netlink::open_in(pod)?;
    let eth0 = inside.require_link("eth0")?;
    let start = Instant::now();
    let device = create_device(
        pod,
        NewTapDevice { vnet_hdr: true, owner: Some(0), group: Some(0), ..Default::default() },
    )?;
    let tap = inside.require_link(&device.name)?;
    inside.change_link(tap.index, LinkChange::new().set_alias("pod").set_mtu(eth0.mtu).set_up())?;
    redirect::add(&inside, &tap, &eth0)?;
    redirect::add(&inside, &eth0, &tap)?;
    device.make_persistent()?;
    Ok(start.elapsed())
}

/// An executable that only exits: to start it is the least that the kernel does for a call of a
/// plugin. `None` but on x86-64.
pub(crate) fn empty_program(dir: &Path) -> Result<Option<PathBuf>> {
    const BASE: u64 = 0x40_0000;
    const HEADERS: u64 = 64 + 56;
    /// `xor edi, edi`; `mov eax, SYS_exit`; `syscall`.
    const CODE: [u8; 9] = [0x31, 0xff, 0xb8, 60, 0, 0, 0, 0x0f, 0x05];
    if !cfg!(target_arch = "x86_64") {
        return Ok(None);
    }
    // elf(5): 64 bits, little-endian, ET_EXEC, EM_X86_64; one program header.
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0".to_vec();
    file.extend([BASE + HEADERS, 64, 0].map(u64::to_le_bytes).as_flattened());
    file.extend([0, 0, 64, 56, 1, 64, 0, 0].map(u16::to_le_bytes).as_flattened());
    // PT_LOAD, readable and executable.
    file.extend([1, 5].map(u32::to_le_bytes).as_flattened());
    let size = HEADERS + CODE.len() as u64;
    file.extend([0, BASE, BASE, size, size, 0x1000].map(u64::to_le_bytes).as_flattened());
    file.extend(CODE);
    let path = dir.join("empty");
    fs::write(&path, file)?;
    fs::set_permissions(&path, Permissions::from_mode(0o755))?;
    Ok(Some(path))
}
