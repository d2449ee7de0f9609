//! A container with two networks that name the same destinations, for every interface plugin: the
//! later one is preferred, and what moves or removes routes of one network leaves the other alone.
//! All by packets to forty destinations, which a route of both networks would divide between them.

mod shared;

use std::net::{IpAddr, UdpSocket};

use nix::sys::socket::{setsockopt, sockopt};
use serde_json::{Value, json};

use crate::support::net::merged;
use crate::support::node::{Call, Container, Node};

/// Destinations of the default routes, and of routes that both networks name; without their ends.
const DEFAULT: [&str; 2] = ["192.0.2.", "2001:db8:f::"];
const NAMED: [&str; 2] = ["198.51.100.", "2001:db8:9::"];
const COUNT: usize = 40;

const FIRST: [usize; 2] = [COUNT, 0];
const SECOND: [usize; 2] = [0, COUNT];

/// The addresses of the container in its second network.
const ADDRESSES: [&str; 2] = ["10.2.0.5", "fd02::5"];

fn routes() -> Value {
    json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"},
           {"dst": "198.51.100.0/24"}, {"dst": "2001:db8:9::/48"}])
}

/// The keys of a network of a plugin, on top of links that [`World::new`] creates.
fn keys(plugin: &str) -> Value {
    match plugin {
        "bridge" => json!({"bridge": "br2"}),
        "vlan" => json!({"master": "wire0", "vlanId": 5}),
        "macvlan" | "ipvlan" => json!({"master": "wire0"}),
        "host-device" => json!({"device": "hd0"}),
        "bond" => json!({"mode": "active-backup", "links": [{"name": "hd0"}, {"name": "hd1"}]}),
        _ => json!({}),
    }
}

/// The `number`th network of a container.
fn network(plugin: &str, number: u8, extra: &Value) -> Value {
    let addresses = json!([
        {"address": format!("10.{number}.0.5/24"), "gateway": format!("10.{number}.0.1")},
        {"address": format!("fd0{number}::5/64"), "gateway": format!("fd0{number}::1")},
    ]);
    let base = json!({"cniVersion": "1.1.0", "name": format!("n{number}"), "type": plugin,
        "ipam": {"type": "static", "addresses": addresses, "routes": routes()}});
    merged(&merged(&base, &keys(plugin)), extra)
}

/// A container with the interface `eth0` of a bridge.
struct World {
    node: Node,
    container: Container,
    /// Configuration and result of the first network.
    first: (Value, Value),
}

impl World {
    fn new() -> World {
        let (node, container) = (Node::new(), Container::new());
        for pair in ["wire0 type veth peer name wire1", "hd0 type veth peer name far0"] {
            node.sh(&format!("ip link add {pair}"));
        }
        node.sh("ip link add hd1 type veth peer name far1");
        node.sh("for i in wire0 wire1 hd0 far0 far1; do ip link set $i up; done");
        container.set_sysctl("net/ipv6/conf/default/dad_transmits", "0");
        let conf = network("bridge", 1, &json!({"bridge": "br1"}));
        let mut world = World { node, container, first: (conf.clone(), Value::Null) };
        world.first.1 = world.call("ADD", "eth0", &conf).result();
        assert_eq!(world.all_shares(), [FIRST; 4]);
        world
    }

    fn call(&self, verb: &str, ifname: &str, conf: &Value) -> Call {
        let call = self.node.call(conf["type"].as_str().unwrap(), verb).conf(conf);
        call.ifname(ifname).netns(&self.container.path())
    }

    /// Adds `net1`; the warnings are about each route that is preferred.
    fn add_second(&self, conf: &Value) -> Value {
        self.call("ADD", "net1", conf).result()
    }

    #[track_caller]
    fn check(&self, ifname: &str, conf: &Value, prev: &Value) {
        self.call("CHECK", ifname, &merged(conf, &json!({"prevResult": prev}))).ok();
    }

    /// A chained plugin behind the second network: its configuration and result.
    #[track_caller]
    fn chain(&self, prev: &Value, keys: &Value) -> (Value, Value) {
        let base = json!({"cniVersion": "1.1.0", "name": "n2", "prevResult": prev});
        let conf = merged(&base, keys);
        let result = self.call("ADD", "net1", &conf).result();
        self.check("net1", &conf, &result);
        self.check("eth0", &self.first.0, &self.first.1);
        (conf, result)
    }

    /// Lets the gateways of the interfaces answer: among IPv4 default routes the kernel goes on to
    /// the next one otherwise. An interface may be missing.
    fn know_gateways(&self) {
        for (number, name) in (1..).zip(["eth0", "net1", "net2", "net3"]) {
            for gateway in [format!("10.{number}.0.1"), format!("fd0{number}::1")] {
                let entry = format!("{gateway} lladdr 02:00:00:00:00:99 dev {name} nud reachable");
                self.container.try_sh(&format!("ip neigh replace {entry}"));
            }
        }
    }

    /// How many of forty datagrams leave through `eth0` and `net1`.
    fn shares(&self, to: &str, from: Option<&str>, device: Option<&str>) -> [usize; 2] {
        self.know_gateways();
        let out = "type filter hook postrouting priority 0;";
        self.container.sh(&format!(
            "nft 'table inet seen; delete table inet seen; table inet seen'
             nft 'add chain inet seen out {{ {out} }}'
             for i in eth0 net1; do nft add rule inet seen out udp dport 9 oifname $i counter; done"
        ));
        self.container.run(|| {
            let any = if to.contains(':') { "::" } else { "0.0.0.0" };
            let from: IpAddr = from.unwrap_or(any).parse().unwrap();
            let socket = UdpSocket::bind((from, 0)).unwrap();
            if let Some(device) = device {
                setsockopt(&socket, sockopt::BindToDevice, &device.into()).unwrap();
            }
            for end in 1..=COUNT {
                let to: IpAddr = format!("{to}{end}").parse().unwrap();
                socket.send_to(b"question", (to, 9)).unwrap();
            }
        });
        let seen = self.container.sh("nft list table inet seen");
        ["eth0", "net1"].map(|name| {
            let line = seen.lines().find(|line| line.contains(name)).unwrap();
            let count = line.split("packets ").nth(1).unwrap().split(' ').next().unwrap();
            count.parse().unwrap()
        })
    }

    /// [`World::shares`] of the default routes, IPv4 first, and of the named routes.
    fn all_shares(&self) -> [[usize; 2]; 4] {
        let [[a, b], [c, d]] = [DEFAULT, NAMED].map(|to| to.map(|to| self.shares(to, None, None)));
        [a, b, c, d]
    }
}

fn the_later_interface_is_preferred(plugin: &str) {
    let world = World::new();
    let conf = network(plugin, 2, &json!({}));
    let outcome = world.call("ADD", "net1", &conf).run();
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    let result: Value = serde_json::from_str(&outcome.stdout).unwrap();
    assert_eq!(world.all_shares(), [SECOND; 4]);
    for dst in ["0.0.0.0/0", "::/0", "198.51.100.0/24", "2001:db8:9::/48"] {
        let warning = format!("\"net1\" takes the traffic to {dst} from \"eth0\"");
        assert!(outcome.stderr.contains(&warning), "{dst}: {}", outcome.stderr);
    }
    assert_eq!(result["routes"], routes());
    world.check("net1", &conf, &result);
    world.check("eth0", &world.first.0, &world.first.1);
    world.call("DEL", "net1", &merged(&conf, &json!({"prevResult": result}))).ok();
    assert_eq!(world.all_shares(), [FIRST; 4]);
    world.check("eth0", &world.first.0, &world.first.1);
}

fn default_route_false_leaves_it_to_the_first(plugin: &str) {
    let world = World::new();
    let conf = network(plugin, 2, &json!({"defaultRoute": false}));
    let result = world.add_second(&conf);
    assert_eq!(world.all_shares(), [FIRST, FIRST, SECOND, SECOND]);
    assert_eq!(result["routes"], json!([routes()[2], routes()[3]]));
    world.check("net1", &conf, &result);
    world.check("eth0", &world.first.0, &world.first.1);
    world.call("DEL", "net1", &merged(&conf, &json!({"prevResult": result}))).ok();
    let wrong = network(plugin, 2, &json!({"defaultRoute": "no"}));
    assert_eq!(world.call("ADD", "net1", &wrong).error().code, 6);
}

fn sbr_takes_the_routes_of_its_own_interface(plugin: &str) {
    let world = World::new();
    let result = world.add_second(&network(plugin, 2, &json!({})));
    let (conf, _) = world.chain(&result, &json!({"type": "sbr"}));
    assert_eq!(world.all_shares(), [FIRST; 4]);
    for to in [DEFAULT, NAMED] {
        for (to, from) in to.into_iter().zip(ADDRESSES) {
            assert_eq!(world.shares(to, Some(from), None), SECOND, "{to}");
        }
    }
    world.call("DEL", "net1", &conf).ok();
    world.check("eth0", &world.first.0, &world.first.1);
    assert_eq!(world.all_shares()[..2], [FIRST; 2]);
}

fn route_override_deletes_the_routes_of_its_own_interface(plugin: &str) {
    let named: Value = routes().as_array().unwrap()[2..].into();
    for (keys, expected) in [
        (json!({"flushgateway": true}), [FIRST, FIRST, SECOND, SECOND]),
        (json!({"flushroutes": true}), [FIRST; 4]),
        (json!({"delroutes": named}), [SECOND, SECOND, FIRST, FIRST]),
    ] {
        let world = World::new();
        let result = world.add_second(&network(plugin, 2, &json!({})));
        let keys = merged(&keys, &json!({"type": "route-override"}));
        let (conf, _) = world.chain(&result, &keys);
        assert_eq!(world.all_shares(), expected, "{keys}");
        world.call("DEL", "net1", &conf).ok();
        assert_eq!(world.all_shares(), [SECOND; 4], "{keys}");
    }
}

fn vrf_takes_the_routes_of_its_own_interface(plugin: &str) {
    let world = World::new();
    let result = world.add_second(&network(plugin, 2, &json!({})));
    let (conf, _) = world.chain(&result, &json!({"type": "vrf", "vrfname": "red"}));
    assert_eq!(world.all_shares(), [FIRST; 4]);
    for to in DEFAULT.into_iter().chain(NAMED) {
        assert_eq!(world.shares(to, None, Some("red")), SECOND, "{to}");
    }
    world.call("DEL", "net1", &conf).ok();
    assert_eq!(world.all_shares(), [SECOND; 4]);
}

/// The tests for each plugin, each with the kernel features that it needs.
macro_rules! tests {
    ($($module:ident: $plugin:literal $(, $feature:ident)?;)+) => { $(
        mod $module {
            use crate::lane::{self, needs};

            #[test]
            fn the_later_interface_is_preferred() {
                $(needs!(lane::$feature);)?
                super::the_later_interface_is_preferred($plugin);
            }

            #[test]
            fn default_route_false_leaves_it_to_the_first() {
                $(needs!(lane::$feature);)?
                super::default_route_false_leaves_it_to_the_first($plugin);
            }

            #[test]
            fn sbr_takes_the_routes_of_its_own_interface() {
                $(needs!(lane::$feature);)?
                super::sbr_takes_the_routes_of_its_own_interface($plugin);
            }

            #[test]
            fn route_override_deletes_the_routes_of_its_own_interface() {
                $(needs!(lane::$feature);)?
                super::route_override_deletes_the_routes_of_its_own_interface($plugin);
            }

            #[test]
            fn vrf_takes_the_routes_of_its_own_interface() {
                needs!(lane::VRF $(, lane::$feature)?);
                super::vrf_takes_the_routes_of_its_own_interface($plugin);
            }
        }
    )+ };
}

tests! {
    bridge: "bridge";
    ptp: "ptp";
    macvlan: "macvlan";
    ipvlan: "ipvlan", IPVLAN;
    vlan: "vlan", VLAN;
    host_device: "host-device";
    tap: "tap";
    dummy: "dummy", DUMMY;
    bond: "bond", BOND;
}

/// The interface that all datagrams to the destinations of [`DEFAULT`] leave through.
fn preferred(world: &World, names: &[&str]) -> [String; 2] {
    world.know_gateways();
    DEFAULT.map(|to| {
        let routes: Vec<Value> = (1..=COUNT)
            .map(|end| world.container.ip(&format!("route get {to}{end}"))[0]["dev"].clone())
            .collect();
        assert!(routes.iter().all(|dev| *dev == routes[0]), "{names:?}: {routes:?}");
        routes[0].as_str().unwrap().to_owned()
    })
}

#[test]
fn the_last_one_that_came_is_preferred() {
    let world = World::new();
    let confs = [
        ("net1", network("macvlan", 2, &json!({}))),
        ("net2", network("ptp", 3, &json!({}))),
        ("net3", network("bridge", 4, &json!({"bridge": "br4"}))),
    ];
    for (name, conf) in &confs {
        world.call("ADD", name, conf).result();
        assert_eq!(preferred(&world, &[name]), [*name, *name]);
    }
    for (name, conf) in &confs {
        world.call("DEL", name, conf).ok();
        world.call("ADD", name, conf).result();
        assert_eq!(preferred(&world, &[name]), [*name, *name]);
    }
    world.check("eth0", &world.first.0, &world.first.1);
    for (name, conf) in &confs {
        world.call("DEL", name, conf).ok();
    }
    assert_eq!(world.all_shares(), [FIRST; 4]);
}

#[test]
fn a_metric_that_another_interface_has_is_refused() {
    for (dst, first, second) in [
        ("192.0.2.0/24", json!(50), 50),
        ("2001:db8:f::/48", json!(50), 50),
        ("2001:db8:f::/48", Value::Null, 1024),
    ] {
        let world = World::new();
        let route =
            |priority: Value| json!([merged(&json!({"dst": dst}), &json!({"priority": priority}))]);
        let conf = |plugin, number, priority, extra: Value| {
            let mut conf = network(plugin, number, &extra);
            conf["ipam"]["routes"] = route(priority);
            conf
        };
        world.add_second(&conf("ptp", 2, first, json!({})));
        let conf = conf("bridge", 3, json!(second), json!({"bridge": "br3"}));
        let before = world.container.snapshot(&world.node);
        let error = world.call("ADD", "net2", &conf).error();
        let expected = format!(
            "failed to add route '{dst} via {} dev net2 metric {second}': \
             \"net1\" has a route to {dst} with the metric {second}, too",
            if dst.contains(':') { "fd03::1" } else { "10.3.0.1" },
        );
        assert_eq!(error.brief(), (999, expected.as_str()));
        assert!(error.details.contains("priority"), "{error:?}");
        crate::support::net::settles(&before, || world.container.snapshot(&world.node));
    }
}

#[test]
fn a_chosen_metric_far_below_stays_preferred() {
    let world = World::new();
    let mut chosen = network("ptp", 2, &json!({}));
    chosen["ipam"]["routes"] = json!([{"dst": "::/0", "priority": 50}]);
    world.add_second(&chosen);
    let later = network("macvlan", 3, &json!({}));
    world.call("ADD", "net2", &later).result();
    assert_eq!(preferred(&world, &["net2"]), ["net2", "net1"]);
}

#[test]
fn is_default_gateway_excludes_default_route_false() {
    let world = World::new();
    let conf = network("bridge", 2, &json!({"isDefaultGateway": true, "defaultRoute": false}));
    let msg = "\"isDefaultGateway\" adds the default routes that \"defaultRoute\": false omits";
    assert_eq!(world.call("ADD", "net1", &conf).error().brief(), (7, msg));
    let both = merged(&conf, &json!({"defaultRoute": true}));
    world.add_second(&both);
    assert_eq!(world.all_shares(), [SECOND; 4]);
}

#[test]
fn the_default_route_of_a_device_is_left_too() {
    for (keys, expected) in [(json!({"defaultRoute": false}), FIRST), (json!({}), SECOND)] {
        let world = World::new();
        world.node.sh("ip addr add 10.2.0.5/24 dev hd0; ip addr add fd02::5/64 dev hd0 nodad");
        world.node.sh("ip route add default via 10.2.0.1; ip route add default via fd02::1");
        let conf = json!({"cniVersion": "1.1.0", "name": "n2", "type": "host-device",
            "device": "hd0", "useInterfaceNetwork": true});
        let conf = merged(&conf, &keys);
        let result = world.add_second(&conf);
        world.check("net1", &conf, &result);
        assert_eq!(DEFAULT.map(|to| world.shares(to, None, None)), [expected; 2], "{keys}");
    }
}
