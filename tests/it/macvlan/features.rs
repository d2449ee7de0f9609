//! Addresses, MAC, MTU, layer 2, the order of calls to dhcp, address announcements, and refusals.

use std::fs;

use serde_json::{Value, json};

use super::{SUBJECT, layer2, simple};
use crate::lane::{self, needs};
use crate::support::net::{Net, addresses, routes, settles, wire};
use crate::support::node::{Container, Node, VERSIONS, assert_unchanged};
use crate::support::strace;
use crate::support::traffic::Place;

#[test]
fn the_container_has_exactly_the_configured_state() {
    let node = Node::new();
    let container = Container::new();
    let net = Net::new(&node, "macvlan", "1.1.0", &(SUBJECT.keys)(&node));
    let before = node.snapshot();
    let result = net.add(&container);
    assert_eq!(
        routes(&container.sh("ip route show")),
        [
            "10.1.2.0/24 dev eth0 proto kernel scope link src 10.1.2.2",
            "default via 10.1.2.1 dev eth0",
        ]
    );
    assert_eq!(
        routes(&container.sh("ip -6 route show")),
        [
            "2001:db8:1::/64 dev eth0 proto kernel metric 256 pref medium",
            "default via 2001:db8:1::1 dev eth0 metric 1024 pref medium",
        ]
    );
    let listing = container.ip("addr show eth0");
    assert_eq!(addresses(&listing), ["10.1.2.2/24", "2001:db8:1::2/64"]);
    // The segment is shared, so duplicate address detection runs, and ADD waits for its end.
    for info in listing[0]["addr_info"].as_array().unwrap() {
        assert_eq!((&info["nodad"], &info["tentative"]), (&Value::Null, &Value::Null), "{info}");
    }
    assert_eq!((&listing[0]["mtu"], &listing[0]["operstate"]), (&json!(1400), &json!("UP")));
    assert_eq!(listing[0]["address"], result["interfaces"][0]["mac"]);
    for (key, value) in [
        ("net/ipv4/conf/eth0/arp_notify", "1"),
        ("net/ipv6/conf/eth0/ndisc_notify", "1"),
        ("net/ipv6/conf/eth0/keep_addr_on_down", "1"),
        ("net/ipv6/conf/eth0/disable_ipv6", "0"),
    ] {
        assert_eq!(container.sysctl(key), value, "{key}");
    }
    let leases = |line: &&str| !line.contains("leases/net");
    let changed = before.difference(&node.snapshot());
    let lines: Vec<_> = changed.lines().filter(leases).filter(|line| !line.is_empty()).collect();
    assert_eq!(lines, ["--- leases", "before:", "after:"]);
}

#[test]
fn a_duplicate_ipv6_address_is_refused() {
    let node = Node::new();
    wire(&node);
    node.sh("ip addr add 2001:db8:1::2/64 dev wire1 nodad");
    let container = Container::new();
    let net = simple(&node, &json!({"ipam": node.host_local(&["2001:db8:1::/64"])}));
    let before = (node.snapshot(), container.snapshot(&node));
    let msg = "failed to settle addresses for \"eth0\": \
               another host on the link of \"eth0\" uses the address 2001:db8:1::2";
    assert_eq!(net.on("ADD", &container).error().brief(), (999, msg));
    settles(&before.0, || node.snapshot());
    settles(&before.1, || container.snapshot(&node));
}

#[test]
fn add_does_not_wait_for_a_master_without_carrier() {
    let node = Node::new();
    wire(&node);
    node.sh("ip link set wire1 down");
    let container = Container::new();
    let net = simple(&node, &json!({"ipam": node.host_local(&["2001:db8:1::/64"])}));
    let (outcome, calls) = strace::record(&node, &net.on("ADD", &container));
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    // Waiting for address events would require a netlink multicast group.
    assert!(!calls.iter().any(|call| call.text.contains("NETLINK_ADD_MEMBERSHIP")));
    assert!(outcome.stderr.contains("\"eth0\" has no carrier"), "{outcome:?}");
    let result: Value = serde_json::from_str(&outcome.stdout).unwrap();
    net.check(&container, &result).ok();
    assert!(container.sh("ip -6 -o addr show eth0").contains("tentative"));
    node.sh("ip link set wire1 up; ip addr add 2001:db8:1::1/64 dev wire1 nodad");
    crate::support::node::eventually("the address was never checked", || {
        !container.sh("ip -6 -o addr show eth0").contains("tentative")
    });
    assert!(container.reaches("2001:db8:1::1"));
}

#[test]
fn add_announces_a_reused_address_to_neighbours() {
    let node = Node::new();
    wire(&node);
    // Keeps the neighbour entry reachable, so that only an announcement changes it.
    node.sh("echo 100000 > /proc/sys/net/ipv4/neigh/wire1/base_reachable_time_ms");
    let net = simple(&node, &json!({}));
    let one = Container::new();
    let mac = |result: &Value| result["interfaces"][0]["mac"].as_str().unwrap().to_owned();
    let first = mac(&net.add(&one));
    assert!(node.reaches("10.1.2.2"));
    let known = || node.ip("neigh show 10.1.2.2 dev wire1")[0]["lladdr"].clone();
    assert_eq!(known(), first);
    net.del(&one);
    // The kernel does not override entries younger than `locktime`.
    node.sh("echo 0 > /proc/sys/net/ipv4/neigh/wire1/locktime");
    let two = Container::new();
    let ipam = same_again(&node);
    let second = mac(&net.with(&json!({"ipam": ipam})).add(&two));
    assert_ne!(first, second);
    crate::support::node::eventually("the neighbour was not told", || known() == second);
}

/// A host-local configuration that leases the same address again instead of the next one.
fn same_again(node: &Node) -> Value {
    let mut ipam = node.host_local(&[]);
    ipam["ranges"] =
        json!([[{"subnet": "10.1.2.0/24", "rangeStart": "10.1.2.2", "rangeEnd": "10.1.2.2"}]]);
    ipam
}

#[test]
fn the_mac_comes_from_capability_cni_args_or_key() {
    let node = Node::new();
    wire(&node);
    let [key, args, capability] = ["c2:11:22:33:44:51", "c2:11:22:33:44:52", "c2:11:22:33:44:53"];
    for (keys, env, expected) in [
        (json!({"mac": key}), "", key),
        (json!({"mac": key}), &*format!("IgnoreUnknown=true;MAC={args};K8S=1"), args),
        (json!({"mac": key}), &*format!("MAC={args}"), args),
        (
            json!({"RuntimeConfig": {"mac": capability}, "mac": key}),
            &*format!("MAC={args}"),
            capability,
        ),
        (json!({"mac": "C2-11-22-33-44-51"}), "", key),
    ] {
        let container = Container::new();
        let net = layer2(&node, &keys);
        let result = net.on("ADD", &container).env("CNI_ARGS", env).result();
        assert_eq!(result["interfaces"][0]["mac"], expected, "{keys} {env}");
        assert_eq!(container.ip("link show eth0")[0]["address"], expected);
        net.check(&container, &result).env("CNI_ARGS", env).ok();
        // DEL ignores `CNI_ARGS`.
        net.on("DEL", &container).env("CNI_ARGS", "none").ok();
    }
}

#[test]
fn a_mac_of_a_sibling_is_refused() {
    let node = Node::new();
    wire(&node);
    let (one, two) = (Container::new(), Container::new());
    let mac = json!({"mac": "c2:11:22:33:44:55"});
    layer2(&node, &mac).add(&one);
    let before = two.snapshot(&node);
    for net in [layer2(&node, &mac), simple(&node, &mac)] {
        let error = net.call("ADD", "c2").netns(&two.path()).error();
        let why = ["address already in use", "device or resource busy"];
        assert!(why.iter().any(|why| error.msg.ends_with(why)), "{error:?}");
        assert!(error.details.contains("MAC address"), "{error:?}");
        settles(&before, || two.snapshot(&node));
        assert_eq!(net.leases(), [""; 0]);
    }
}

#[test]
fn mtu_and_queue_length_have_the_documented_defaults() {
    needs!(lane::MACVLAN_QUEUE);
    let node = Node::new();
    wire(&node);
    for (keys, mtu, queue) in [
        (json!({}), 1500, 1000),
        (json!({"mtu": 0, "bcqueuelen": 0}), 1500, 1000),
        (json!({"mtu": 1500, "bcqueuelen": 17}), 1500, 17),
        (json!({"mtu": 68}), 68, 1000),
    ] {
        let container = Container::new();
        let net = layer2(&node, &keys);
        let result = net.add(&container);
        let link = container.ip("-d link show eth0");
        assert_eq!(link[0]["mtu"], mtu, "{keys}");
        assert_eq!(link[0]["linkinfo"]["info_data"]["bcqueuelen"], queue, "{keys}");
        assert_eq!(result["interfaces"][0]["mtu"], mtu);
        net.check(&container, &result).ok();
        net.del(&container);
    }
}

#[test]
fn without_ipam_the_interface_is_up_and_has_no_address() {
    for version in VERSIONS {
        let node = Node::new();
        wire(&node);
        let container = Container::new();
        let before = (node.snapshot(), container.snapshot(&node));
        for ipam in [json!({}), Value::Null] {
            let mut conf = layer2(&node, &json!({"cniVersion": version})).conf;
            conf["ipam"] = ipam;
            let call = |verb| node.call("macvlan", verb).netns(&container.path()).conf(&conf);
            if version < "0.3.0" {
                // As in the reference: callers know that the interface exists nevertheless.
                let msg = "cannot convert: no valid IP addresses";
                assert_eq!(call("ADD").error().brief(), (999, msg));
            } else {
                let result = call("ADD").result();
                assert_eq!(result["interfaces"].as_array().unwrap().len(), 1, "{result}");
                assert!(result["ips"].is_null());
            }
            assert!(container.sh("ip -o link show eth0").contains(",UP"), "{version}");
            assert_eq!(container.sh("ip -4 -o addr show eth0"), "");
            call("DEL").ok();
            settles(&before.1, || container.snapshot(&node));
            assert_unchanged(&before.0, &node.snapshot());
        }
    }
}

/// An IPAM plugin of this name that prints `answer` on ADD and logs the calls and the link's state.
fn scripted<'n>(node: &'n Node, name: &str, answer: &str) -> Net<'n> {
    let log = node.path("calls");
    drop(fs::remove_file(&log));
    drop(fs::remove_file(node.bin().join(name)));
    let state = "nsenter --net=$CNI_NETNS ip -o link show $CNI_IFNAME | grep -o ',UP' || echo no";
    node.script(
        name,
        &format!("cat >/dev/null; echo $CNI_COMMAND $({state}) >> {}; {answer}", log.display()),
    );
    simple(node, &json!({"ipam": {"type": name}}))
}

fn calls(node: &Node) -> String {
    fs::read_to_string(node.path("calls")).unwrap()
}

#[test]
fn dhcp_finds_the_interface_up_and_releases_over_it() {
    let node = Node::new();
    wire(&node);
    let result = json!({"cniVersion": "1.0.0", "ips": [{"address": "10.1.2.9/24"}]});
    let answer = format!("[ $CNI_COMMAND != ADD ] || echo '{result}'");
    let container = Container::new();
    let net = scripted(&node, "dhcp", &answer);
    net.add(&container);
    assert!(container.reaches("10.1.2.1"));
    net.del(&container);
    assert_eq!(calls(&node), "ADD ,UP\nDEL ,UP\n");
    // Other IPAM plugins are called while the link is down: the kernel announces the addresses
    // present when a link comes up.
    let net = scripted(&node, "fixed", &answer);
    net.add(&container);
    net.del(&container);
    // The address must not be released before the link with it is deleted.
    assert_eq!(calls(&node), "ADD no\nDEL no\n");
}

#[test]
fn a_failing_add_leaves_no_address_and_no_interface() {
    let node = Node::new();
    wire(&node);
    let container = Container::new();
    let before = (node.snapshot(), container.snapshot(&node));
    let result = |extra: Value| {
        let mut result = json!({"cniVersion": "1.0.0", "ips": [{"address": "10.1.2.9/24"}]});
        result.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        format!("[ $CNI_COMMAND != ADD ] || echo '{result}'")
    };
    let failing = "[ $CNI_COMMAND != ADD ] || { echo '{\"code\": 123, \"msg\": \"no\"}'; exit 1; }";
    let garbage = "[ $CNI_COMMAND != ADD ] || echo nonsense";
    let twice = json!({"ips": [{"address": "10.1.2.9/24"}, {"address": "10.1.2.9/24"}]});
    let unreachable = json!({"routes": [{"dst": "10.9.0.0/16", "gw": "172.16.0.1"}]});
    for (answer, code, msg) in [
        (failing.to_owned(), 123, "no"),
        (garbage.to_owned(), 0, ""),
        (result(json!({"ips": []})), 999, "IPAM plugin returned missing IP config"),
        (result(twice), 999, "failed to add IP addr 10.1.2.9/24 to \"eth0\": "),
        (result(unreachable), 999, "failed to add route '10.9.0.0/16 via 172.16.0.1 dev eth0': "),
    ] {
        let net = scripted(&node, "odd", &answer);
        let error = net.on("ADD", &container).error();
        assert!(code == 0 || error.code == code, "{error:?}");
        assert!(error.msg.starts_with(msg), "{error:?}");
        assert!(calls(&node).starts_with("ADD no\nDEL "), "{}", calls(&node));
        assert_eq!(calls(&node).lines().count(), 2);
        settles(&before.0, || node.snapshot());
        settles(&before.1, || container.snapshot(&node));
    }
}

#[test]
fn a_del_whose_ipam_fails_removes_the_interface() {
    let node = Node::new();
    wire(&node);
    let container = Container::new();
    layer2(&node, &json!({})).add(&container);
    let failing = "echo '{\"code\": 123, \"msg\": \"no\"}'; exit 1";
    let error = scripted(&node, "odd", failing).on("DEL", &container).error();
    assert_eq!(error.brief(), (123, "no"));
    assert!(!container.try_sh("ip link show eth0"));
}

#[test]
fn a_second_add_is_refused_and_the_first_lease_stays() {
    let node = Node::new();
    wire(&node);
    let container = Container::new();
    let net = simple(&node, &json!({}));
    let result = net.add(&container);
    let msg = "failed to create macvlan: container already has an interface \"eth0\": file exists";
    net.add_is_refused(&container, 999, msg);
    assert_eq!(net.leases(), ["10.1.2.2"]);
    net.check(&container, &result).ok();
    assert!(container.reaches("10.1.2.1"));
}

/// Two attachments of a container with one MAC, for a bond in a virtual machine. The DEL of one,
/// also if repeated, deletes nothing of the other.
#[test]
fn del_deletes_no_other_interface_with_its_mac() {
    let node = Node::new();
    wire(&node);
    node.sh("ip link add other0 up type veth peer name other1; ip link set other1 up");
    let mac = "02:00:00:00:00:77";
    let l2 = |master: &str| layer2(&node, &json!({"master": master, "mac": mac}));
    let l3 = |master: &str| simple(&node, &json!({"master": master, "mac": mac}));
    for nets in [[l2("wire0"), l2("other0")], [l3("wire0"), l3("other0")]] {
        let container = Container::new();
        let [one, two] = ["net1", "net2"];
        let prev = nets[0].on("ADD", &container).ifname(one).result();
        let other = nets[1].on("ADD", &container).ifname(two).result();
        let del = nets[0].with(&json!({"prevResult": prev})).on("DEL", &container).ifname(one);
        for _ in ["DEL", "DEL again"] {
            del.ok();
            assert!(!container.try_sh("ip link show net1"));
            let check = nets[1].with(&json!({"prevResult": other}));
            check.on("CHECK", &container).ifname(two).ok();
        }
        nets[1].on("DEL", &container).ifname(two).ok();
    }
}

#[test]
fn del_keeps_an_interface_of_another_kind() {
    let node = Node::new();
    wire(&node);
    let container = Container::new();
    container.sh("ip link add eth0 type bridge");
    simple(&node, &json!({})).del(&container);
    container.sh("ip link show eth0");
}

#[test]
fn bad_configurations_change_nothing() {
    let node = Node::new();
    wire(&node);
    let container = Container::new();
    let group = "01:00:5e:00:00:01";
    for (keys, code, msg) in [
        (json!({"mode": "x"}), 7, "unknown macvlan mode: \"x\"".to_owned()),
        (json!({"mtu": 1501}), 7, "invalid MTU 1501, must be [0, master MTU(1500)]".to_owned()),
        (json!({"mtu": -1}), 7, "invalid MTU -1, must be [0, master MTU(1500)]".to_owned()),
        (
            json!({"mac": "zz"}),
            7,
            "invalid args zz for MAC addr: address zz: invalid MAC address".to_owned(),
        ),
        (
            json!({"mac": group}),
            7,
            format!(
                "invalid args {group} for MAC addr: address {group}: not a unicast address, but multicast"
            ),
        ),
    ] {
        simple(&node, &keys).add_is_refused(&container, code, &msg);
    }
    for (key, value) in [
        ("mtu", json!("1500")),
        ("bcqueuelen", json!(-1)),
        ("bcqueuelen", json!(4_294_967_296_u64)),
        ("linkInContainer", json!("true")),
        ("mode", json!(1)),
        ("master", json!([])),
    ] {
        let error = simple(&node, &json!({key: value})).on("ADD", &container).error();
        assert!(error.code == 6 && format!("{error:?}").contains(key), "{key}: {error:?}");
    }
    let net = simple(&node, &json!({}));
    let call = net.on("ADD", &container).env("CNI_ARGS", "MAC=zz");
    let msg = "invalid args zz for MAC addr: address zz: invalid MAC address";
    net.is_refused(&call, &container, (7, msg));
    let call = net.on("ADD", &container).env("CNI_ARGS", "none");
    net.is_refused(&call, &container, (999, "ARGS: invalid pair \"none\""));
    let net = layer2(&node, &json!({"mtu": 67}));
    let before = (node.snapshot(), container.snapshot(&node));
    let error = net.on("ADD", &container).error();
    assert!(error.msg.starts_with("failed to create macvlan: "), "{error:?}");
    assert_unchanged(&before.0, &node.snapshot());
    assert_unchanged(&before.1, &container.snapshot(&node));
}

#[test]
fn dns_of_ipam_is_used_unless_the_network_has_its_own() {
    let node = Node::new();
    wire(&node);
    let file = node.path("resolv.conf");
    fs::write(&file, "nameserver 192.0.2.3\n").unwrap();
    let mut ipam = node.host_local(&["10.1.2.0/24"]);
    ipam["resolvConf"] = json!(file);
    let container = Container::new();
    for (dns, expected) in [
        (Value::Null, json!({"nameservers": ["192.0.2.3"]})),
        (json!({"domain": "c.example"}), json!({"domain": "c.example"})),
    ] {
        let net = simple(&node, &json!({"ipam": ipam, "dns": dns}));
        assert_eq!(net.add(&container)["dns"], expected);
        net.del(&container);
    }
    let net = layer2(&node, &json!({"dns": {"nameservers": ["10.0.0.9"]}}));
    assert_eq!(net.add(&container)["dns"], json!({"nameservers": ["10.0.0.9"]}));
}
