//! tap: lifecycle in every version, settings, CHECK, refusals, and frames read by a program.

mod frames;

use serde_json::{Value, json};

use crate::support::faults::{Scene, no_add_leaves_anything, survives_kill};
use crate::support::lifecycle::{Subject, golden, lifecycle};
use crate::support::net::{FIRST, Net, addresses, dual_ipam, merged, settles};
use crate::support::node::{Container, Node};
use crate::support::parallel::at_once;

const SUBJECT: Subject = Subject {
    plugin: "tap",
    keys: |node| {
        let ipam = dual_ipam(node);
        json!({"ipam": ipam})
    },
    golden: golden!("tap"),
    remove_remainder: |_| {},
};

/// A network of version 1.1.0 with 10.1.2.0/24 and `keys`.
fn simple<'n>(node: &'n Node, keys: &Value) -> Net<'n> {
    let base = json!({"ipam": node.host_local(&["10.1.2.0/24"])});
    Net::new(node, "tap", "1.1.0", &merged(&base, keys))
}

/// A network without IPAM.
fn layer2<'n>(node: &'n Node, keys: &Value) -> Net<'n> {
    Net::new(node, "tap", "1.1.0", keys)
}

/// The device as `ip` prints it.
fn device(container: &Container) -> Value {
    container.ip("-d link show eth0")[0].clone()
}

lifecycle! { SUBJECT;
    add_check_and_del_with_the_golden_result: add_check_del_del,
    status_tells_of_an_exhausted_range: status,
}

#[test]
fn the_device_is_a_persistent_tap_up_with_its_addresses() {
    let (node, container) = (Node::new(), Container::new());
    let net = Net::new(&node, "tap", "1.1.0", &(SUBJECT.keys)(&node));
    let result = net.add(&container);
    let link = device(&container);
    assert_eq!(link["linkinfo"]["info_kind"], "tun");
    let info = &link["linkinfo"]["info_data"];
    let expected = json!({"type": "tap", "pi": false, "vnet_hdr": false, "multi_queue": false, "persist": true});
    for (key, value) in expected.as_object().unwrap() {
        assert_eq!(&info[key], value, "{key}: {info}");
    }
    assert_eq!((&info["user"], &info["group"]), (&Value::Null, &Value::Null));
    assert!(link["flags"].as_array().unwrap().contains(&json!("UP")), "{link}");
    assert_eq!(link["address"], result["interfaces"][0]["mac"]);
    let shown = container.ip("addr show eth0");
    assert_eq!(addresses(&shown), ["10.1.2.2/24", "2001:db8:1::2/64"]);
    let global = container.sh("ip -6 -o addr show eth0 scope global");
    assert!(!global.contains("tentative"), "{global}");
}

#[test]
fn settings_come_from_capability_args_or_keys() {
    let mac = "02:00:00:00:00:77";
    let args = format!("IgnoreUnknown=1;MAC={mac}");
    let cases = [
        (json!({"mac": mac, "mtu": 1400}), ""),
        (json!({"mac": "02:00:00:00:00:01", "mtu": 1400}), args.as_str()),
        (
            json!({"mac": "02:00:00:00:00:01", "runtimeConfig": {"mac": mac}, "mtu": 1400}),
            "IgnoreUnknown=1;MAC=zz",
        ),
    ];
    for (keys, args) in cases {
        for owners in [
            json!({}),
            json!({"owner": 0, "group": 0}),
            json!({"owner": 1001, "group": 1002, "multiQueue": true}),
        ] {
            for ipam in [true, false] {
                let (node, container) = (Node::new(), Container::new());
                let before = container.snapshot(&node);
                let keys = merged(&keys, &owners);
                let net = if ipam { simple(&node, &keys) } else { layer2(&node, &keys) };
                let call = |net: &Net<'_>, verb| net.on(verb, &container).env("CNI_ARGS", args);
                // A value that is overridden is not validated.
                let result = call(&net, "ADD").result();
                let link = device(&container);
                assert_eq!((&link["address"], &link["mtu"]), (&json!(mac), &json!(1400)));
                let entry =
                    json!({"name": "eth0", "mac": mac, "mtu": 1400, "sandbox": container.path()});
                assert_eq!(result["interfaces"], json!([entry]));
                let info = &link["linkinfo"]["info_data"];
                assert_eq!(info["multi_queue"], json!(keys["multiQueue"] == json!(true)));
                let id = |key: &str, shown: &Value| match (&keys[key], shown) {
                    (Value::Null, Value::Null) => true,
                    (id, shown) => {
                        let names = if id == &json!(0) { ["root", "0"] } else { ["1001", "1002"] };
                        names.iter().any(|name| shown.as_str() == Some(name)) || shown == id
                    }
                };
                assert!(id("owner", &info["user"]) && id("group", &info["group"]), "{info}");
                call(&net.with(&json!({"prevResult": result})), "CHECK").ok();
                call(&net, "DEL").ok();
                call(&net, "DEL").ok();
                settles(&before, || container.snapshot(&node));
            }
        }
    }
}

#[test]
fn the_tap_joins_a_bridge_in_the_container() {
    let (node, container) = (Node::new(), Container::new());
    container.sh("ip link add br1 type bridge");
    for net in [layer2(&node, &json!({"bridge": "br1"})), simple(&node, &json!({"bridge": "br1"}))]
    {
        let result = net.add(&container);
        assert_eq!(device(&container)["master"], "br1");
        assert_eq!(result["interfaces"].as_array().unwrap().len(), 1);
        net.check(&container, &result).ok();
        container.sh("ip link set eth0 nomaster");
        net.check_finds(&container, &result, "\"eth0\" is not a port of bridge \"br1\"");
        net.del(&container);
    }
}

#[test]
fn add_without_ipam_only_creates_the_device() {
    let (node, container) = (Node::new(), Container::new());
    let before = container.snapshot(&node);
    for version in ["0.1.0", "0.3.1", "1.1.0"] {
        let net = Net::new(&node, "tap", version, &json!({"dns": {"domain": "d.example"}}));
        if version == "0.1.0" {
            let error = net.on("ADD", &container).error();
            assert_eq!(error.msg, "cannot convert: no valid IP addresses");
        } else {
            let result = net.add(&container);
            assert_eq!(
                (&result["ips"], &result["dns"]["domain"]),
                (&Value::Null, &json!("d.example"))
            );
            assert!(device(&container)["flags"].as_array().unwrap().contains(&json!("UP")));
            net.del(&container);
        }
        settles(&before, || container.snapshot(&node));
    }
}

#[test]
fn del_without_a_namespace_releases_the_address() {
    let node = Node::new();
    let net = simple(&node, &json!({}));
    let container = Container::new();
    net.add(&container);
    net.call("DEL", "c1").netns("").ok();
    assert_eq!(net.leases(), [""; 0]);
    net.del(&container);
    net.add(&container);
    let path = container.path();
    drop(container);
    net.call("DEL", "c1").netns(&path).ok();
    net.call("DEL", "c1").netns(&path).ok();
    net.call("DEL", "c1").netns("/var/run/netns/no-such").ok();
    assert_eq!(net.leases(), [""; 0]);
}

#[test]
fn del_keeps_other_devices() {
    let (node, container) = (Node::new(), Container::new());
    let net = simple(&node, &json!({}));
    let result = net.add(&container);
    net.on("DEL", &container).ifname("eth1").ok();
    net.call("DEL", "c2").netns("").ok();
    net.check(&container, &result).ok();
    net.del(&container);
    container.sh("ip link add eth0 up type bridge");
    let before = container.snapshot(&node);
    net.del(&container);
    settles(&before, || container.snapshot(&node));
}

/// Deletes one of two attachments that have one MAC, twice.
pub(crate) fn del_keeps_the_other_with_the_same_mac(plugin: &'static str) {
    let node = Node::new();
    let keys = json!({"mac": "02:00:00:00:00:77", "ipam": node.host_local(&["10.1.2.0/24"])});
    let (net, container) = (Net::new(&node, plugin, "1.1.0", &keys), Container::new());
    let prev = net.on("ADD", &container).ifname("dev1").result();
    net.on("ADD", &container).ifname("dev2").result();
    let del = net.with(&json!({"prevResult": prev})).on("DEL", &container).ifname("dev1");
    for _ in ["DEL", "DEL again"] {
        del.ok();
        assert!(!container.try_sh("ip link show dev1"));
        assert!(container.try_sh("ip link show dev2"));
    }
}

#[test]
fn del_deletes_no_other_device_with_its_mac() {
    del_keeps_the_other_with_the_same_mac("tap");
}

#[test]
fn gc_releases_the_addresses_of_stale_attachments() {
    let (node, container) = (Node::new(), Container::new());
    let net = simple(&node, &json!({}));
    net.add(&container);
    let gc = |valid: Value| net.with(&json!({"cni.dev/valid-attachments": valid})).call("GC", "");
    gc(json!([{"containerID": "c1", "ifname": "eth0"}])).ok();
    assert_eq!(net.leases(), [FIRST[0]]);
    gc(json!([])).ok();
    assert_eq!(net.leases(), [""; 0]);
    layer2(&node, &json!({"cni.dev/valid-attachments": []})).call("GC", "").ok();
}

#[test]
fn refusals_change_nothing() {
    let (node, container) = (Node::new(), Container::new());
    container.sh("ip link add br1 type bridge");
    container.sh("ip link add v1 type veth peer name v2");
    for (keys, code, msg) in [
        (json!({"bridge": "br9"}), 999, "failed to get bridge br9: link \"br9\" not found"),
        (json!({"bridge": "v1"}), 999, "failed to get bridge v1: it is not a bridge"),
        (json!({"mac": "zz"}), 7, "invalid args zz for MAC addr: address zz: invalid MAC address"),
        (json!({"mtu": 4_294_967_296_u64}), 7, "mtu 4294967296 is larger than any link's"),
        (json!({"mtu": 10}), 999, ""),
        (json!({"mac": "01:00:00:00:00:01"}), 7, ""),
        (json!({"args": "x"}), 6, ""),
        (json!({"owner": -1}), 6, ""),
        (json!({"owner": "root"}), 6, ""),
        (json!({"multiQueue": 1}), 6, ""),
        (json!({"ipam": {"type": "no-such"}}), 999, ""),
    ] {
        let before = (node.snapshot(), container.snapshot(&node));
        let error = simple(&node, &keys).on("ADD", &container).error();
        assert!(error.code == code && (msg.is_empty() || error.msg == msg), "{keys}: {error:?}");
        settles(&before.0, || node.snapshot());
        settles(&before.1, || container.snapshot(&node));
    }
    let net = simple(&node, &json!({}));
    for taken in ["br1", "v2"] {
        let call = net.on("ADD", &container).ifname(taken);
        let msg = format!("container already has an interface \"{taken}\"");
        net.is_refused(&call, &container, (999, &msg));
    }
    let result = net.add(&container);
    let error = net.on("ADD", &container).error();
    assert_eq!(error.brief(), (999, "container already has an interface \"eth0\""));
    net.check(&container, &result).ok();
    let call = net.on("ADD", &container).env("CNI_ARGS", "FOO=1");
    assert_eq!(call.error().msg, "ARGS: unknown args [\"FOO=1\"]");
    // DEL ignores unknown arguments.
    net.on("DEL", &container).env("CNI_ARGS", "FOO=1").ok();
    assert!(!container.try_sh("ip link show eth0"));
}

#[test]
fn add_deletes_the_device_if_a_route_is_refused() {
    let (node, container) = (Node::new(), Container::new());
    let mut ipam = node.host_local(&["10.1.2.0/24"]);
    ipam["routes"] = json!([{"dst": "10.9.0.0/16", "gw": "172.16.0.1"}]);
    let before = (node.snapshot(), container.snapshot(&node));
    let error = simple(&node, &json!({"ipam": ipam})).on("ADD", &container).error();
    assert!(error.msg.starts_with("failed to add route '10.9.0.0/16 via 172.16.0.1"), "{error:?}");
    settles(&before.0, || node.snapshot());
    settles(&before.1, || container.snapshot(&node));
}

#[test]
fn a_missing_dev_net_tun_is_named_by_add_and_status() {
    let (node, container) = (Node::new(), Container::new());
    let before = container.snapshot(&node);
    let net = simple(&node, &json!({}));
    let hide = "mount -t tmpfs none /dev && exec \"$0\" \"$@\"";
    let error = net.on("ADD", &container).in_script(hide).error();
    let msg = "failed to create tap \"eth0\": open /dev/net/tun: no such file or directory";
    assert_eq!(error.brief(), (999, msg));
    assert!(error.details.contains("kernel module \"tun\""), "{error:?}");
    let error = net.call("STATUS", "").in_script(hide).error();
    assert_eq!(error.brief(), (50, "open /dev/net/tun: no such file or directory"));
    settles(&before, || container.snapshot(&node));
    assert_eq!(net.leases(), [""; 0]);
}

#[test]
fn check_reports_every_kind_of_damage() {
    for (line, msg) in [
        ("ip link set eth0 down", "interface \"eth0\" is down"),
        ("ip addr del 10.1.2.2/24 dev eth0", "Failed to match addr 10.1.2.2/24 on interface eth0"),
        (
            "ip route del default",
            "Expected Route 0.0.0.0/0 via 10.1.2.1 not found in routing table",
        ),
        ("ip link del eth0", "Interface name eth0 not found in NETNS"),
        (
            "sh -c 'ip link del eth0; ip link add eth0 type bridge'",
            "Error: Container interface eth0 not of type tun",
        ),
        (
            "sh -c 'ip link del eth0; ip tuntap add mode tap name eth0 multi_queue; ip link set eth0 up address MAC'",
            "tap \"eth0\": multi_queue is true, not false",
        ),
    ] {
        let (node, container) = (Node::new(), Container::new());
        let net = Net::new(&node, "tap", "1.1.0", &(SUBJECT.keys)(&node));
        let result = net.add(&container);
        net.check(&container, &result).ok();
        let mac = result["interfaces"][0]["mac"].as_str().unwrap();
        container.sh(&line.replace("MAC", mac));
        net.check_finds(&container, &result, &msg.replace("NETNS", &container.path()));
    }
    let (node, container) = (Node::new(), Container::new());
    let net = layer2(&node, &json!({}));
    let result = net.add(&container);
    let mac = result["interfaces"][0]["mac"].as_str().unwrap();
    container.sh("ip link set eth0 address 02:00:00:00:00:99");
    let msg = format!("Interface eth0 Mac {mac} doesn't match link Mac: 02:00:00:00:00:99");
    net.check_finds(&container, &result, &msg);
    assert_eq!(net.on("CHECK", &container).error().msg, "Required prevResult missing");
    container.sh("ip link set eth0 address MAC".replace("MAC", mac).as_str());
    net.check(&container, &result).ok();
    // Without a configured owner, any owner is accepted.
    for (keys, msg) in [
        (json!({"owner": 8}), "tap \"eth0\": owner is 7, not 8"),
        (json!({"group": 8}), "tap \"eth0\": group is none, not 8"),
    ] {
        let net = net.with(&keys);
        container.sh("sh -c 'ip link del eth0; ip tuntap add mode tap name eth0 user 7'");
        container.sh(&format!("ip link set eth0 up address {mac}"));
        net.check_finds(&container, &result, msg);
    }
}

#[test]
fn an_selinux_label_is_ignored_without_selinux() {
    let (node, container) = (Node::new(), Container::new());
    if crate::support::node::exists("/sys/fs/selinux/enforce") {
        println!("SKIP: this kernel has SELinux, and which labels are possible is its policy's");
        return;
    }
    let label = json!({"selinuxcontext": "system_u:system_r:container_t:s0"});
    let net = simple(&node, &label);
    net.add(&container);
    net.del(&container);
    // On a kernel that only appears to have SELinux, setting the label fails.
    let before = (node.snapshot(), container.snapshot(&node));
    let script = "mount -t tmpfs none /sys/fs && mkdir /sys/fs/selinux && touch /sys/fs/selinux/enforce && exec \"$0\" \"$@\"";
    let error = net.on("ADD", &container).in_script(script).error();
    let start = "failed to create tap \"eth0\": failed set socket label: system_u:";
    assert!(error.msg.starts_with(start), "{error:?}");
    settles(&before.0, || node.snapshot());
    settles(&before.1, || container.snapshot(&node));
}

#[test]
fn fifty_containers_are_attached_concurrently() {
    const COUNT: usize = 50;
    let node = Node::new();
    let before = node.snapshot();
    let containers: Vec<_> = (0..COUNT).map(|_| Container::new()).collect();
    let paths: Vec<_> = containers.iter().map(Container::path).collect();
    let conf = simple(&node, &json!({})).conf;
    let call = |verb: &str, i: usize| {
        node.call("tap", verb).conf(&conf).id(&format!("c{i}")).netns(&paths[i])
    };
    let results = at_once(COUNT, |i| call("ADD", i).result());
    let mut ips: Vec<_> = results.iter().map(|r| r["ips"][0]["address"].to_string()).collect();
    ips.sort();
    ips.dedup();
    assert_eq!(ips.len(), COUNT, "an address twice");
    assert!(containers.iter().all(|c| device(c)["linkinfo"]["info_data"]["persist"] == true));
    at_once(COUNT, |i| call("DEL", i).ok());
    assert!(containers.iter().all(|c| !c.try_sh("ip link show eth0")));
    settles(&before, || node.snapshot());
}

fn scene() -> Scene {
    let keys = json!({"owner": 1001, "group": 1002, "mtu": 1400, "mac": "02:00:00:00:00:77"});
    Scene::new("tap", &keys).that_does(&["ioctl", "RTM_NEWLINK", "RTM_NEWADDR"], &["RTM_DELLINK"])
}

#[test]
fn a_failing_add_leaves_nothing_at_any_system_call() {
    no_add_leaves_anything(&scene());
}

#[test]
fn an_add_killed_anywhere_is_cleaned_up_by_del() {
    survives_kill(&scene(), "ADD");
}

#[test]
fn a_del_killed_anywhere_is_finished_by_the_next() {
    survives_kill(&scene(), "DEL");
}
