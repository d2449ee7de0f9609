//! dummy: lifecycle in every version, container state, CHECK, refusals.

use serde_json::{Value, json};

use crate::lane::{self, needs};
use crate::support::lifecycle::{Subject, golden, lifecycle};
use crate::support::net::{Net, addresses, dual_ipam, merged, routes, settles};
use crate::support::node::{Container, Node, assert_unchanged};
use crate::support::parallel::at_once;

const SUBJECT: Subject = Subject {
    plugin: "dummy",
    keys: |node| {
        let ipam = dual_ipam(node);
        json!({"mtu": 1400, "ipam": ipam})
    },
    // As macvlan's result: one interface, in the container.
    golden: golden!("macvlan"),
    remove_remainder: |_| {},
};

/// A network of version 1.1.0 with 10.1.2.0/24 and more `keys`.
fn simple<'n>(node: &'n Node, keys: &Value) -> Net<'n> {
    let base = json!({"ipam": node.host_local(&["10.1.2.0/24"])});
    Net::new(node, "dummy", "1.1.0", &merged(&base, keys))
}

lifecycle! { SUBJECT, needs lane::DUMMY;
    add_check_and_del_with_the_golden_result: add_check_del_del,
    del_without_a_namespace_releases_addresses: del_without_a_namespace,
    gc_keeps_valid_attachments_and_releases_stale_ones: gc,
    status_tells_of_an_exhausted_range: status,
}

#[test]
fn del_deletes_no_other_device_with_its_mac() {
    needs!(lane::DUMMY);
    crate::tap::del_keeps_the_other_with_the_same_mac("dummy");
}

#[test]
fn the_container_has_exactly_these_addresses_and_routes() {
    needs!(lane::DUMMY);
    let (node, container) = (Node::new(), Container::new());
    // A host interface of the same name does not matter.
    node.sh("ip link add eth0 type dummy");
    let before = node.snapshot();
    let net = Net::new(&node, "dummy", "1.1.0", &(SUBJECT.keys)(&node));
    let result = net.add(&container);
    let listing = container.ip("-d addr show eth0");
    assert_eq!(addresses(&listing), ["10.1.2.2/24", "2001:db8:1::2/64"]);
    assert_eq!(listing[0]["linkinfo"]["info_kind"], "dummy");
    assert_eq!(listing[0]["address"], result["interfaces"][0]["mac"]);
    let flags = listing[0]["flags"].as_array().unwrap();
    assert!(flags.contains(&json!("UP")) && flags.contains(&json!("NOARP")), "{flags:?}");
    assert_eq!(
        routes(&container.sh("ip route show")),
        [
            "10.1.2.0/24 dev eth0 proto kernel scope link src 10.1.2.2",
            "default via 10.1.2.1 dev eth0"
        ]
    );
    assert_eq!(
        routes(&container.sh("ip -6 route show")),
        [
            "2001:db8:1::/64 dev eth0 proto kernel metric 256 pref medium",
            "default via 2001:db8:1::1 dev eth0 metric 1024 pref medium",
        ]
    );
    container.sh("ip link set lo up");
    assert!(container.pings("10.1.2.2") && container.pings("2001:db8:1::2"), "its own addresses");
    net.del(&container);
    assert_unchanged(&before, &node.snapshot());
}

#[test]
fn mtu_mac_and_dns_come_from_the_configuration() {
    needs!(lane::DUMMY);
    let node = Node::new();
    let [key, capability] = ["c2:11:22:33:44:51", "c2:11:22:33:44:52"];
    let dns = json!({"nameservers": ["192.0.2.3"]});
    for (keys, mtu, mac) in [
        (json!({"mtu": 9000, "mac": key, "dns": dns}), 9000, key),
        (json!({"mac": key, "dns": dns, "runtimeConfig": {"mac": capability}}), 1500, capability),
    ] {
        let container = Container::new();
        let net = simple(&node, &keys);
        let result = net.add(&container);
        let link = &container.ip("link show eth0")[0];
        assert_eq!((&link["mtu"], &link["address"]), (&json!(mtu), &json!(mac)));
        let entry = &result["interfaces"][0];
        assert_eq!(
            (&entry["mtu"], &entry["mac"], &result["dns"]),
            (&json!(mtu), &json!(mac), &dns)
        );
        net.check(&container, &result).ok();
        net.del(&container);
    }
}

#[test]
fn refusals_change_nothing() {
    needs!(lane::DUMMY);
    let (node, container) = (Node::new(), Container::new());
    let no_ipam = "dummy interface requires an IPAM configuration";
    for ipam in [Value::Null, json!({})] {
        let net = simple(&node, &json!({"ipam": ipam}));
        net.add_is_refused(&container, 7, no_ipam);
        // The error is reported before the namespace is opened.
        let error = net.call("ADD", "c1").netns("/no/such/namespace").error();
        assert_eq!(error.brief(), (7, no_ipam));
        assert_eq!(net.call("STATUS", "").error().brief(), (50, no_ipam));
        net.del(&container);
        net.call("GC", "").conf(&merged(&net.conf, &json!({"cni.dev/valid-attachments": []}))).ok();
    }
    let bad_mac = "address x: invalid MAC address";
    simple(&node, &json!({"mac": "x"})).add_is_refused(&container, 7, bad_mac);
    let large = "mtu 4294967296 is larger than any link's";
    simple(&node, &json!({"mtu": 4_294_967_296_u64})).add_is_refused(&container, 7, large);
    let missing = simple(&node, &json!({"ipam": {"type": "no-such"}}));
    let before = container.snapshot(&node);
    assert!(missing.on("ADD", &container).error().msg.contains("no-such"));
    assert_unchanged(&before, &container.snapshot(&node));
}

#[test]
fn add_rolls_back_if_the_name_is_in_use_or_a_step_fails() {
    needs!(lane::DUMMY);
    let (node, container) = (Node::new(), Container::new());
    let net = simple(&node, &json!({}));
    let result = net.add(&container);
    let msg = "failed to create dummy: add link \"eth0\" (dummy): file exists";
    net.add_is_refused(&container, 999, msg);
    net.check(&container, &result).ok();
    net.del(&container);
    let mut ipam = node.host_local(&["10.1.2.0/24"]);
    ipam["routes"] = json!([{"dst": "10.9.0.0/16", "gw": "172.16.0.1"}]);
    node.script("broken", "cat >/dev/null; echo '{\"code\": 11, \"msg\": \"no\"}'; exit 1");
    node.script("empty", "cat >/dev/null; echo '{\"cniVersion\": \"1.1.0\"}'");
    for (ipam, code, start) in [
        (ipam, 999, "failed to add route '10.9.0.0/16 via 172.16.0.1"),
        (json!({"type": "broken"}), 11, "no"),
        (json!({"type": "empty"}), 999, "IPAM plugin returned missing IP config"),
    ] {
        let net = simple(&node, &json!({"ipam": ipam}));
        let before = (node.snapshot(), container.snapshot(&node));
        let error = net.on("ADD", &container).error();
        assert!(error.code == code && error.msg.starts_with(start), "{error:?}");
        settles(&before.0, || node.snapshot());
        settles(&before.1, || container.snapshot(&node));
    }
}

#[test]
fn del_keeps_a_link_of_another_kind() {
    needs!(lane::DUMMY);
    let (node, container) = (Node::new(), Container::new());
    container.sh("ip link add eth0 type bridge");
    let before = container.snapshot(&node);
    let outcome = simple(&node, &json!({})).on("DEL", &container).run();
    assert_eq!((outcome.status, outcome.stdout.as_str()), (Some(0), ""));
    assert!(outcome.stderr.contains("\"eth0\" is not of kind dummy"), "{}", outcome.stderr);
    assert_unchanged(&before, &container.snapshot(&node));
}

#[test]
fn check_reports_every_kind_of_damage() {
    needs!(lane::DUMMY);
    let broken = |line: &str, msg: &str| {
        let (node, container) = (Node::new(), Container::new());
        let net = Net::new(&node, "dummy", "1.1.0", &(SUBJECT.keys)(&node));
        let result = net.add(&container);
        net.check(&container, &result).ok();
        container.sh(line);
        let mac = result["interfaces"][0]["mac"].as_str().unwrap();
        let msg = msg.replace("NETNS", &container.path()).replace("MAC", mac);
        net.check_finds(&container, &result, &msg);
    };
    broken("ip link set eth0 down", "interface \"eth0\" is down");
    broken("ip link del eth0", "Interface name eth0 not found in NETNS");
    broken(
        "sh -c 'ip link del eth0; ip link add eth0 up type bridge'",
        "Error: Container interface eth0 not of type dummy",
    );
    let mac = "Interface eth0 Mac MAC doesn't match link Mac: 02:00:00:00:00:99";
    broken("ip link set eth0 address 02:00:00:00:00:99", mac);
    let mtu = "interface \"eth0\" has MTU 1300 instead of 1400";
    broken("ip link set eth0 mtu 1300", mtu);
    let address = "Failed to match addr 10.1.2.2/24 on interface eth0";
    broken("ip addr del 10.1.2.2/24 dev eth0", address);
    let route = "Expected Route 0.0.0.0/0 via 10.1.2.1 not found in routing table";
    broken("ip route del default", route);
}

#[test]
fn fifty_containers_at_once() {
    const COUNT: usize = 50;
    needs!(lane::DUMMY);
    let node = Node::new();
    let net = simple(&node, &json!({}));
    let containers: Vec<_> = (0..COUNT).map(|_| Container::new()).collect();
    let call = |verb: &str, i: usize| {
        let call = node.call("dummy", verb).conf(&net.conf);
        call.id(&format!("c{i}")).netns(&containers[i].path())
    };
    let results = at_once(COUNT, |i| call("ADD", i).result());
    assert_eq!(net.leases().len(), COUNT);
    for (container, result) in containers.iter().zip(&results) {
        let listing = container.ip("addr show eth0");
        assert_eq!(addresses(&listing), [result["ips"][0]["address"].as_str().unwrap()]);
    }
    at_once(COUNT, |i| call("DEL", i).ok());
    assert_eq!(net.leases(), [""; 0]);
    assert!(containers.iter().all(|c| c.ip("link").as_array().unwrap().len() == 1));
}
