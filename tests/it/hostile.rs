//! Actions of a malicious container on its links and on the wire, and the limits of their effects.

use std::net::{Ipv6Addr, SocketAddrV6};
use std::os::fd::{AsFd, AsRawFd};
use std::thread;

use cnibox::testing::netlink::{LinkChange, Netlink};
use cnibox::testing::netns::Netns;
use nix::fcntl::{Flock, FlockArg};
use nix::ifaddrs::getifaddrs;
use nix::sys::socket::bind;
use serde_json::{Value, json};
use socket2::{Domain, Protocol, Socket, Type};

use crate::lane::{self, needs};
use crate::support::net::{Net, no_veth_remains, wire};
use crate::support::node::{Container, Node, eventually};
use crate::support::strace::{self, Hits, Syscall};
use crate::support::traffic::Place;

const NAMESAKE: &str = "ip link set eth0 down && ip link set eth0 name kept";

/// Networks with a veth pair per container.
fn pairs(node: &Node) -> [Net<'_>; 2] {
    let ipam = node.host_local(&["10.1.2.0/24"]);
    let keys = json!({"bridge": "br0", "isGateway": true, "ipam": ipam});
    ["bridge", "ptp"].map(|plugin| Net::new(node, plugin, "1.1.0", &keys))
}

/// The name of the host's veth end.
fn end(result: &Value) -> String {
    let interfaces = result["interfaces"].as_array().unwrap();
    let end = interfaces.iter().rfind(|i| i["sandbox"].is_null()).unwrap();
    end["name"].as_str().unwrap().to_owned()
}

fn is_there(node: &Node, link: &str) -> bool {
    node.ip("link").as_array().unwrap().iter().any(|entry| entry["ifname"] == link)
}

fn host_parameter(node: &Node, link: &str, key: &str) -> String {
    node.sh(&format!("cat /proc/sys/net/ipv6/conf/{link}/{key}")).trim().to_owned()
}

/// Hides or replaces the container's interface: no link, or another one, has its name.
fn play(trick: usize, container: &Container, other: &Container) {
    let sh = |line: &str| container.sh(&format!("sh -c '{line}'"));
    match trick {
        0 => drop(sh(NAMESAKE)),
        1 => drop(sh(&format!("{NAMESAKE} address 02:00:00:00:00:77"))),
        2 => drop(sh(&format!("{NAMESAKE} && ip link add eth0 type veth peer name other"))),
        3 => drop(sh(&format!(
            "{NAMESAKE} && ip link set kept up && ip link add link kept eth0 type macvlan"
        ))),
        _ => {
            let there = Netns::open(other.path()).unwrap();
            container.run(|| {
                let netlink = Netlink::open().unwrap();
                let index = netlink.require_link("eth0").unwrap().index;
                netlink.change_link(index, LinkChange::new().move_to_netns(there.as_fd())).unwrap();
            });
        }
    }
}

#[test]
fn del_removes_an_interface_however_it_was_changed() {
    for trick in 0..5 {
        for told in [true, false] {
            let node = Node::new();
            for net in pairs(&node) {
                let (one, two, other) = (Container::new(), Container::new(), Container::new());
                let prev = net.add(&one);
                let neighbour = end(&net.call("ADD", "c2").netns(&two.path()).result());
                play(trick, &one, &other);
                let prev = if told { prev } else { Value::Null };
                let del = net.with(&json!({"prevResult": prev}));
                del.del(&one);
                let what = format!("{} {trick} {told}", net.plugin);
                let left = node.ip("link show type veth").to_string().matches("veth").count();
                assert!(is_there(&node, &neighbour), "{what}");
                assert_eq!(left, neighbour.matches("veth").count(), "{what}");
                del.del(&one);
                assert!(is_there(&node, &neighbour), "{what}");
                net.call("DEL", "c2").netns(&two.path()).ok();
                no_veth_remains(&node);
            }
        }
    }
}

/// The path of a namespace is that of the next container when DEL of the former one is late.
#[test]
fn a_late_del_leaves_the_next_container_alone() {
    let node = Node::new();
    for net in pairs(&node) {
        let (former, next) = (Container::new(), Container::new());
        let prev = net.add(&former);
        drop(former);
        eventually("the former pair ends", || !is_there(&node, &end(&prev)));
        node.sh(&format!("ip link add other type veth peer name eth0 netns {}", next.path()));
        net.with(&json!({"prevResult": prev})).call("DEL", "c1").netns(&next.path()).ok();
        assert!(is_there(&node, "other"), "{}", net.plugin);
        node.sh("ip link del other");
    }
}

#[test]
fn gc_deletes_interfaces_whatever_the_container_changed() {
    let node = Node::new();
    for net in pairs(&node) {
        let (one, two, other) = (Container::new(), Container::new(), Container::new());
        let stranger = net.with(&json!({"name": "another"}));
        let gone = end(&net.add(&one));
        let valid = end(&net.call("ADD", "c2").netns(&two.path()).result());
        let foreign = end(&stranger.add(&other));
        play(0, &one, &other);
        let list = json!([{"containerID": "c2", "ifname": "eth0"}]);
        let gc = net.with(&json!({"cni.dev/valid-attachments": list}));
        gc.call("GC", "").without("CNI_CONTAINERID").ok();
        assert!(!is_there(&node, &gone), "{}", net.plugin);
        assert!(is_there(&node, &valid) && is_there(&node, &foreign), "{}", net.plugin);
        assert_eq!(net.leases().len(), 1);
        stranger.del(&other);
        net.call("DEL", "c2").netns(&two.path()).ok();
    }
}

#[test]
fn a_foreign_link_with_the_same_name_is_kept() {
    let node = Node::new();
    for net in pairs(&node) {
        let container = Container::new();
        container.sh("ip link add other type veth peer name eth0");
        let outcome = net.on("DEL", &container).run();
        assert_eq!(outcome.status, Some(0));
        assert!(outcome.stderr.contains("is left alone"), "{outcome:?}");
        assert!(container.try_sh("ip link show eth0"), "both ends are the container's");
        container.sh("ip link del eth0");
        let second = end(&net.on("ADD", &container).ifname("eth1").result());
        container.sh("ip link set eth1 down");
        container.sh("ip link set eth1 name eth0");
        net.del(&container);
        assert!(is_there(&node, &second), "the other attachment of the container");
        net.on("DEL", &container).ifname("eth1").ok();
        assert!(!is_there(&node, &second));
    }
}

#[test]
fn gc_deletes_a_renamed_macvlan() {
    let node = Node::new();
    wire(&node);
    let keys = json!({"master": "wire0", "ipam": node.host_local(&["10.1.2.0/24"])});
    let net = Net::new(&node, "macvlan", "1.1.0", &keys);
    let container = Container::new();
    let prev = net.add(&container);
    net.on("ADD", &container).ifname("eth1").result();
    play(3, &container, &container);
    let del = net.with(&json!({"prevResult": prev}));
    del.del(&container);
    assert!(!container.try_sh("ip link show kept"), "renamed, with another link in its place");
    del.del(&container);
    assert!(container.try_sh("ip link show eth1"), "the other attachment");
}

#[test]
fn check_does_not_trust_indexes_chosen_by_the_container() {
    let node = Node::new();
    for net in pairs(&node) {
        let (container, other) = (Container::new(), Container::new());
        let result = net.add(&container);
        net.check(&container, &result).ok();
        let show = container.ip("link show eth0")[0].clone();
        play(4, &container, &other);
        let [index, peer] = ["ifindex", "link_index"].map(|key| show[key].to_string());
        let mac = show["address"].as_str().unwrap();
        container.sh(&format!(
            "ip link add eth0 index {index} address {mac} up type veth peer name x index {peer}"
        ));
        let address = result["ips"][0]["address"].as_str().unwrap();
        container.sh(&format!("ip addr add {address} dev eth0"));
        let error = net.check(&container, &result).error();
        assert!(error.msg.contains("was not found"), "{error:?}");
        net.with(&json!({"prevResult": result})).del(&container);
    }
}

/// The system calls of an ADD that finds the bridge and the tables of an earlier one.
fn calls_of_later_add(node: &Node, net: &Net<'_>) -> Vec<Syscall> {
    let container = Container::new();
    net.add(&container);
    net.del(&container);
    let (outcome, calls) = strace::record(node, &net.on("ADD", &container));
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    net.del(&container);
    calls
}

/// A port that is up always has complete protection: ADD is killed before each netlink request.
#[test]
fn a_port_is_never_up_before_its_isolation() {
    let keys = json!({"macspoofchk": true, "portIsolation": true});
    let protected = |node: &Node| {
        let text = node.sh("ip -o -d link show type veth");
        let up = |line: &&str| line.contains(",UP") || line.contains("<UP");
        let mut seen = 0;
        for line in text.lines().filter(up) {
            let name = line.split_whitespace().nth(1).unwrap().split(['@', ':']).next().unwrap();
            assert_eq!(host_parameter(node, name, "accept_ra"), "0", "{line}");
            if line.contains("bridge_slave") {
                assert!(line.contains("isolated on"), "{line}");
                let rules = node.sh("nft list ruleset");
                assert!(rules.contains(&format!("\"{name}\" . ")), "{line}: {rules}");
                assert_eq!(host_parameter(node, "br0", "accept_ra"), "0");
            }
            seen += 1;
        }
        seen
    };
    let node = Node::new();
    for net in pairs(&node).map(|net| net.with(&keys)) {
        let calls = calls_of_later_add(&node, &net);
        let mut up = Hits::default();
        for point in calls.iter().filter(|call| call.verb() == "send") {
            let container = Container::new();
            point.run(&node, &net.on("ADD", &container), "signal=KILL");
            if protected(&node) > 0 {
                up.extend([point]);
            }
            net.del(&container);
        }
        up.assert_include(&["RTM_NEWADDR"]);
    }
}

#[test]
fn a_port_is_never_up_in_a_vlan_of_others() {
    needs!(lane::BRIDGE_VLAN);
    let node = Node::new();
    let net = Net::new(&node, "bridge", "1.1.0", &json!({"bridge": "br0", "vlan": 100}));
    let calls = calls_of_later_add(&node, &net);
    let mut up = Hits::default();
    for point in calls.iter().filter(|call| call.verb() == "send") {
        let container = Container::new();
        point.run(&node, &net.call("ADD", "c2").netns(&container.path()), "signal=KILL");
        // `ip` prints an empty object for each link that is not listed.
        let ports = node.ip("link show master br0 up");
        for name in ports.as_array().unwrap().iter().filter_map(|port| port["ifname"].as_str()) {
            let vlans = node.sh(&format!("bridge vlan show dev {name}"));
            assert!(vlans.contains("100 PVID Egress Untagged"), "{vlans}");
            assert!(!vlans.contains(" 1 "), "{vlans}");
            up.extend([point]);
        }
        net.call("DEL", "c2").netns(&container.path()).ok();
    }
    // The network has no addresses: the interface of the container is set up last.
    up.assert_include(&["RTM_NEWLINK"]);
}

#[test]
fn a_foreign_bridge_accepts_no_router_advertisements() {
    let node = Node::new();
    node.sh("ip link add br0 up type bridge");
    assert_eq!(host_parameter(&node, "br0", "accept_ra"), "1");
    let [net, _] = pairs(&node);
    let container = Container::new();
    let result = net.add(&container);
    assert_eq!(host_parameter(&node, "br0", "accept_ra"), "0");
    net.check(&container, &result).ok();
    let takes = |link: &str| {
        node.sh(&format!("echo 1 > /proc/sys/net/ipv6/conf/{link}/accept_ra"));
        let msg = format!("\"{link}\" accepts router advertisements of containers");
        assert_eq!(net.check(&container, &result).error().msg, msg);
        node.sh(&format!("echo 0 > /proc/sys/net/ipv6/conf/{link}/accept_ra"));
    };
    takes("br0");
    takes(&end(&result));
    net.call("ADD", "c2").netns(&Container::new().path()).result();
}

/// Sends a frame from the container's interface.
pub(crate) fn send_frame(container: &Container, frame: &[u8]) {
    assert_eq!(frame_socket(container).send(frame).unwrap(), frame.len());
}

/// A socket that sends frames from the container's `eth0`.
pub(crate) fn frame_socket(container: &Container) -> Socket {
    container.run(|| {
        let socket = Socket::new(Domain::PACKET, Type::RAW, None).unwrap();
        let mut links = getifaddrs().unwrap().filter(|link| link.interface_name == "eth0");
        let address = links.find_map(|link| link.address?.as_link_addr().copied()).unwrap();
        bind(socket.as_raw_fd(), &address).unwrap();
        socket
    })
}

#[test]
fn no_frame_moves_a_neighbours_address_to_a_checked_port() {
    for made_by_others in [false, true] {
        let node = Node::new();
        if made_by_others {
            node.sh("ip link add br0 up type bridge");
        }
        let [net, _] = pairs(&node);
        let net = net.with(&json!({"macspoofchk": true}));
        let (victim, attacker) = (Container::new(), Container::new());
        let result = net.add(&victim);
        net.call("ADD", "c2").netns(&attacker.path()).result();
        let mac = result["interfaces"][2]["mac"].as_str().unwrap();
        let source = mac.split(':').map(|octet| u8::from_str_radix(octet, 16).unwrap());
        let source: Vec<u8> = source.collect();
        assert!(victim.reaches("10.1.2.1"));
        let port = || {
            let fdb = node.sh("bridge fdb show br br0");
            let line = fdb.lines().find(|line| line.starts_with(mac)).unwrap_or_default();
            line.split_whitespace().nth(2).unwrap_or_default().to_owned()
        };
        assert_eq!(port(), end(&result));
        // Broadcast, and the link-local group addresses that bridges do not forward (STP, 802.1X,
        // LLDP).
        for to in [[0xff; 6], link_local(0), link_local(3), link_local(0x0e), link_local(0x0f)] {
            let frame = [&to[..], &source, &[0x88, 0xb5], &[0; 46]].concat();
            send_frame(&attacker, &frame);
            assert_eq!(port(), end(&result), "{to:x?}");
        }
        net.check(&victim, &result).ok();
        node.sh("ip link set br0 type bridge no_linklocal_learn 0");
        let msg = "bridge \"br0\" learns the sources of link-local frames";
        assert_eq!(net.check(&victim, &result).error().msg, msg);
    }
}

fn link_local(last: u8) -> [u8; 6] {
    [1, 0x80, 0xc2, 0, 0, last]
}

/// Sends a router advertisement from `container`.
fn advertise(container: &Container) {
    container.run(|| {
        let index = Netlink::open().unwrap().require_link("eth0").unwrap().index;
        let socket = Socket::new(Domain::IPV6, Type::RAW, Some(Protocol::ICMPV6)).unwrap();
        socket.set_multicast_hops_v6(255).unwrap();
        socket.set_multicast_if_v6(index).unwrap();
        let all: Ipv6Addr = "ff02::1".parse().unwrap();
        let mut advertisement = [0; 16];
        advertisement[..8].copy_from_slice(&[134, 0, 0, 0, 64, 0, 7, 8]);
        socket.send_to(&advertisement, &SocketAddrV6::new(all, 0, 0, index).into()).unwrap();
    });
}

#[test]
fn forwarding_keeps_the_advertised_default_route() {
    let keys = |node: &Node| node.host_local(&["fd98::/64"]);
    for plugin in ["bridge", "ptp"] {
        let node = Node::new();
        let router = Container::new();
        node.sh("ip link add up0 type veth peer name eth0");
        let there = Netns::open(router.path()).unwrap();
        let netlink = Netlink::open().unwrap();
        let index = netlink.require_link("eth0").unwrap().index;
        netlink.change_link(index, LinkChange::new().move_to_netns(there.as_fd())).unwrap();
        node.sh("ip link set up0 up");
        router.sh("ip link set eth0 up");
        let default = || node.sh("ip -6 route show default");
        eventually("no default route", || {
            let ready = !router.sh("ip -6 addr show dev eth0 scope link -tentative").is_empty();
            if ready {
                advertise(&router);
            }
            default().contains("proto ra")
        });
        let ipam = keys(&node);
        let net = Net::new(&node, plugin, "1.1.0", &json!({"isGateway": true, "ipam": ipam}));
        node.sh("ip link add up1 type veth peer name up2");
        node.sh("ip link add vethreference type veth peer name up3");
        node.sh("ip link add lab0 type bridge; ip link add br7 type bridge; ip link set br7 up");
        node.sh("ip address add 192.0.2.2/24 dev br7; ip route add 198.51.100.0/24 via 192.0.2.1");
        net.add(&Container::new());
        assert_eq!(host_parameter(&node, "all", "forwarding"), "1");
        assert!(default().contains("dev up0 proto ra"), "{plugin}: {}", default());
        assert_eq!(host_parameter(&node, "up0", "accept_ra"), "2");
        assert_eq!(host_parameter(&node, "up1", "accept_ra"), "2", "without a route yet");
        assert_eq!(host_parameter(&node, "default", "accept_ra"), "2", "links to come");
        assert_eq!(host_parameter(&node, "vethreference", "accept_ra"), "1", "a container's");
        assert_eq!(host_parameter(&node, "lab0", "accept_ra"), "1", "a bridge of containers");
        assert_eq!(host_parameter(&node, "br7", "accept_ra"), "2", "a bridge that leads out");
        // New links of containers do not inherit it.
        net.call("ADD", "c2").netns(&Container::new().path()).result();
        let ends = node.sh("grep -l 2 /proc/sys/net/ipv6/conf/veth*/accept_ra || true");
        assert_eq!(ends, "", "{plugin}");
    }
}

#[test]
fn gateways_have_ipv6_if_it_is_disabled_by_default() {
    for plugin in ["bridge", "ptp"] {
        let node = Node::new();
        node.sh("echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6");
        let ipam = node.host_local(&["10.1.2.0/24", "2001:db8:1::/64"]);
        let net = Net::new(&node, plugin, "1.1.0", &json!({"isGateway": true, "ipam": ipam}));
        let container = Container::new();
        container.sh("sh -c 'echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6'");
        net.add(&container);
        assert!(container.reaches("2001:db8:1::1"), "{plugin}");
    }
}

#[test]
fn a_reused_address_is_reachable_immediately() {
    let node = Node::new();
    let range = json!([[{"subnet": "10.1.2.0/24"}], [{"subnet": "2001:db8:1::/64",
        "rangeStart": "2001:db8:1::5", "rangeEnd": "2001:db8:1::5"}]]);
    let mut ipam = node.host_local(&[]);
    ipam["ranges"] = range;
    let [net, _] = pairs(&node);
    let neighbour = Container::new();
    net.with(&json!({"ipam": {"type": "static", "addresses": [{"address": "2001:db8:1::9/64"}]}}))
        .call("ADD", "c9")
        .netns(&neighbour.path())
        .result();
    let net = net.with(&json!({"ipam": ipam}));
    let (one, two) = (Container::new(), Container::new());
    net.add(&one);
    assert!(neighbour.reaches("2001:db8:1::5") && node.reaches("2001:db8:1::5"));
    net.del(&one);
    net.add(&two);
    // A neighbour entry without an unsolicited advertisement becomes stale and is probed only after
    // five seconds.
    assert!(neighbour.reaches_within("2001:db8:1::5", 3), "the neighbour still asks the old one");
    assert!(node.reaches_within("2001:db8:1::5", 3), "the host still asks the old one");
}

#[test]
fn udev_does_not_change_the_mac_of_the_host_end() {
    let node = Node::new();
    for net in pairs(&node) {
        let container = Container::new();
        let end = end(&net.add(&container));
        let read = "mount -t sysfs sysfs /sys && cat /sys/class/net";
        let kind = node.sh(&format!("unshare -m sh -c '{read}/{end}/addr_assign_type'"));
        assert_eq!(kind, "3\n", "{}: neither the kernel's nor the device's", net.plugin);
        net.del(&container);
    }
}

#[test]
fn a_lock_on_the_namespace_blocks_nobody() {
    let node = Node::new();
    let container = Container::new();
    let [net, _] = pairs(&node);
    let prev = net.add(&container);
    let conf = json!({"cniVersion": "1.1.0", "name": "net", "type": "sbr", "prevResult": prev});
    let namespace = std::fs::File::open(container.path()).unwrap();
    let _lock = Flock::lock(namespace, FlockArg::LockExclusive).unwrap();
    for verb in ["ADD", "DEL"] {
        let call = node.call("sbr", verb).id("c1").netns(&container.path()).conf(&conf);
        let outcome = call.under(&["timeout", "5"]).run();
        assert_eq!(outcome.status, Some(0), "{verb}: {outcome:?}");
    }
}

/// Root owns the xtables lock; a process that holds it indefinitely must not block DEL.
#[test]
fn a_held_iptables_lock_is_reported_and_del_succeeds() {
    let (node, container) = (Node::new(), Container::new());
    let prev = json!({"cniVersion": "1.0.0", "ips": [{"address": "10.1.2.2/24"}]});
    let conf = json!({"cniVersion": "1.0.0", "name": "net", "type": "firewall", "backend": "iptables",
        "prevResult": prev});
    let call = |verb| node.call("firewall", verb).id("c1").netns(&container.path()).conf(&conf);
    call("ADD").result();
    // A lock file of this test, as concurrent tests use the common one.
    let path = node.path("lock");
    let file = std::fs::File::create(&path).unwrap();
    let _lock = Flock::lock(file, FlockArg::LockExclusive).unwrap();
    let place = "/run/cnibox-iptables.lock";
    let script = format!("mount --bind {} {place} && exec timeout 45 \"$0\"", path.display());
    let [add, del] = ["ADD", "DEL"].map(|verb| call(verb).in_script(&script));
    // At the same time: each waits half a minute for the lock. DEL has the turn of its attachment.
    let (error, deleted) = thread::scope(|scope| {
        let deleted = scope.spawn(|| del.run());
        (add.id("c2").error(), deleted.join().unwrap())
    });
    assert!(error.code == 11 && error.msg.contains("held for more than 30 s by"), "{error:?}");
    assert_eq!(deleted.status, Some(0));
    assert!(!node.sh("iptables-save").contains("10.1.2.2"));
}

#[test]
fn names_with_control_characters_are_refused() {
    let node = Node::new();
    let [net, _] = pairs(&node);
    let container = Container::new();
    let why = "interface name contains control characters";
    let error = net.on("ADD", &container).ifname("e\u{1}\u{1b}[2J").error();
    assert_eq!(error.brief(), (4, why));
    let error = net.with(&json!({"bridge": "br\u{1b}[2J"})).on("ADD", &container).error();
    assert_eq!((error.code, error.msg.contains(why)), (7, true), "{error:?}");
}
