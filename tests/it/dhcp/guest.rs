//! A virtual machine takes the interface of a lease, as with `KubeVirt`: the interface gets another
//! name and MAC, and becomes a port of the machine's bridge. The machine has its MAC and address,
//! and so has a placeholder with its name.

use std::net::Ipv4Addr;

use super::fake::{ACK, DISCOVER, Fake, OFFER, RELEASE, REQUEST, Seen};
use super::world::{World, addresses};
use crate::lane;
use crate::support::net::Net;
use crate::support::node::{Container, eventually};

const FIVE: [u8; 4] = [192, 168, 1, 5];
/// The lease is renewed every second. A renewal without a reply is followed by rebinding after 20
/// seconds.
const LONG: [(u8, &[u8]); 4] =
    [(3, &[192, 168, 1, 1]), (51, &[0, 1, 0, 0]), (58, &[0, 0, 0, 1]), (59, &[0, 0, 0, 20])];

fn mac(container: &Container) -> String {
    container.ip("link show dev eth0")[0]["address"].as_str().unwrap().to_owned()
}

/// The Ethernet address in a message.
fn sender(message: &Seen) -> String {
    let bytes: Vec<_> = message.bytes[28..34].iter().map(|byte| format!("{byte:02x}")).collect();
    bytes.join(":")
}

/// The state of the interfaces that the daemon must not change.
fn links(container: &Container) -> String {
    container.sh("ip -o addr show dev eth0; ip -o -4 addr show dev nic0; ip -o link show dev nic0")
}

/// Gives the interface to a machine; returns the machine.
fn give_to_machine(container: &Container) -> Container {
    let machine = Container::new();
    let mac = mac(container);
    container.set_sysctl("net/ipv4/conf/all/arp_ignore", "1");
    container.sh("ip link set eth0 down && ip link set eth0 name nic0 && ip addr flush dev nic0 \
         && ip link set nic0 address 02:00:00:aa:bb:cc && ip link add k6t type bridge \
         && ip link set k6t up && ip link set nic0 up master k6t");
    place(container);
    container.sh("ip link add tap0 up type veth peer name vm0 && ip link set tap0 master k6t");
    container.sh(&format!("ip link set vm0 netns {}", machine.path()));
    machine.sh(&format!(
        "ip link set vm0 address {mac} && ip link set vm0 up && ip addr add 192.168.1.5/24 dev vm0"
    ));
    eventually("the machine has no network", || machine.pings("192.168.1.1"));
    machine
}

/// Adds the placeholder.
fn place(container: &Container) {
    container.sh("ip link add eth0 type veth peer name place0 \
         && ip addr add 192.168.1.5/24 dev eth0");
}

/// A container with a lease of a server that never replies to a renewal.
fn deserted(world: &World) -> (Fake, Container, Net<'_>) {
    let server = Fake::start(|seen, earlier| match seen.kind() {
        DISCOVER if earlier == 0 => vec![seen.answer(OFFER, FIVE, &[])],
        REQUEST if earlier == 0 => vec![seen.answer(ACK, FIVE, &[])],
        _ => vec![],
    });
    let (net, container) = (world.net("1.1.0"), Container::new());
    net.add(&container);
    (server, container, net)
}

#[test]
fn the_lease_of_a_machine_is_renewed() {
    let world = World::new();
    let server = Fake::start(|seen, _| match seen.kind() {
        DISCOVER => vec![seen.answer(OFFER, FIVE, &LONG)],
        REQUEST => vec![seen.answer(ACK, FIVE, &LONG)],
        _ => vec![],
    });
    let mut daemon = world.daemon(&[]);
    let (net, container) = (world.net("1.1.0"), Container::new());
    net.add(&container);
    let leased_to = mac(&container);
    let machine = give_to_machine(&container);
    let before = links(&container);
    let is_renewed = || {
        let earlier = server.seen(REQUEST).len();
        // By rebinding alone this takes longer than `eventually` waits.
        eventually("no renewals", || server.seen(REQUEST).len() >= earlier + 4);
        for renewal in &server.seen(REQUEST)[earlier..] {
            assert_eq!(renewal.from.to_string(), "192.168.1.5:68");
            assert_eq!((renewal.ciaddr(), sender(renewal)), (FIVE.into(), leased_to.clone()));
        }
    };
    is_renewed();
    // Until Linux 5.14 nothing proves to another daemon that the namespace is that of the lease.
    let _next = lane::NETNS_COOKIE.is_here().then(|| {
        daemon.kill();
        let second = world.daemon(&[]);
        is_renewed();
        second
    });
    assert_eq!(server.seen(DISCOVER).len(), 1);
    assert_eq!(links(&container), before);
    assert!(machine.pings("192.168.1.1"));
    net.del(&container);
    let release = server.wait("no release", |message| message.kind() == RELEASE);
    assert_eq!(sender(&release), leased_to);
}

#[test]
fn the_end_of_a_lease_changes_no_interface_of_a_machine() {
    let world = World::new();
    let _daemon = world.daemon(&["-timeout", "500ms", "-resendmax", "1s"]);
    let (server, container, net) = deserted(&world);
    let leased_to = mac(&container);
    let _machine = give_to_machine(&container);
    let before = links(&container);
    eventually("no search", || server.seen(DISCOVER).len() >= 3);
    assert!(server.seen(DISCOVER).iter().all(|message| sender(message) == leased_to));
    assert_eq!(links(&container), before);
    net.del(&container);
}

#[test]
fn an_interface_that_only_has_the_name_is_not_that_of_the_lease() {
    let world = World::new();
    let _daemon = world.daemon(&["-timeout", "500ms", "-resendmax", "1s"]);
    let (server, container, net) = deserted(&world);
    let other = Container::new();
    container.sh(&format!("ip link set eth0 netns {}", other.path()));
    place(&container);
    container.sh("ip link set place0 up && ip link set eth0 up");
    eventually("the record stays", || world.records().is_empty());
    assert!(world.daemon_log().contains("interface eth0 does not exist any more"));
    assert_eq!(addresses(&container), ["192.168.1.5/24"]);
    let asked = server.seen(REQUEST);
    assert!(asked.iter().all(|message| message.ciaddr() == Ipv4Addr::UNSPECIFIED), "{asked:?}");
    net.del(&container);
}
