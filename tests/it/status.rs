//! STATUS succeeds exactly if the next ADD does: random networks on nodes with random defects, and
//! with other pods whose rules are damaged, or that come and go.

use std::fs;
use std::process::Stdio;

use serde_json::{Value, json};

use crate::support::net::{merged, wire};
use crate::support::node::{Call, Container, Node, Outcome, Running, executable};
use crate::support::random::Random;

/// Sets the key to one of the values, or leaves it out.
fn maybe(random: &mut Random, conf: &mut Value, key: &str, values: &[Value]) {
    if random.one_in(2) {
        conf[key] = random.any(values).clone();
    }
}

fn ipam(random: &mut Random) -> Value {
    let pool = |subnets: &[&str]| {
        let ranges: Vec<Value> = subnets.iter().map(|subnet| json!([{"subnet": subnet}])).collect();
        json!({"type": "host-local", "dataDir": "DIR/leases", "ranges": ranges})
    };
    match random.below(12) {
        0..5 => pool(&["10.88.0.0/16"]),
        5 => pool(&["10.88.0.0/16", "fd00:88::/64"]),
        6 => pool(&["fd00:88::/64"]),
        7 => pool(&["10.88.0.0/30"]),
        8 => pool(&["10.88.0.1/16"]),
        9 => {
            json!({"type": "static", "addresses": [{"address": "10.88.0.9/16", "gateway": "10.88.0.1"}]})
        }
        10 => json!({"type": "static", "addresses": [{"address": "10.88.0.9"}]}),
        _ => json!({"type": "nope"}),
    }
}

fn interface(random: &mut Random) -> Value {
    let backends = [json!("nftables"), json!("iptables"), json!("ipfw")];
    let masq = [json!(true), json!(false)];
    let mut conf = match random.below(10) {
        0..4 => {
            let mut conf = json!({"type": "bridge", "bridge": "cni0"});
            maybe(random, &mut conf, "isDefaultGateway", &masq);
            maybe(random, &mut conf, "hairpinMode", &masq);
            maybe(random, &mut conf, "macspoofchk", &masq);
            maybe(
                random,
                &mut conf,
                "bridge",
                &[json!("cni1"), json!("wire0"), json!("a-name-that-is-too-long")],
            );
            maybe(
                random,
                &mut conf,
                "mtu",
                &[json!(1400), json!(1500), json!(100_000), json!("auto")],
            );
            if random.one_in(8) {
                conf["promiscMode"] = json!(true);
            }
            conf
        }
        4..6 => {
            let mut conf = json!({"type": "ptp"});
            maybe(random, &mut conf, "mtu", &[json!(1400), json!(100_000), json!(-1)]);
            conf
        }
        6..8 => {
            let mut conf = json!({"type": "macvlan", "master": "wire0"});
            maybe(random, &mut conf, "master", &[json!("gone0"), json!("wire0")]);
            maybe(random, &mut conf, "mode", &[json!("bridge"), json!("private"), json!("brigde")]);
            maybe(random, &mut conf, "mtu", &[json!(1400), json!(1500), json!(9000)]);
            return merged(&conf, &json!({"ipam": ipam(random)}));
        }
        8 => {
            let mut conf = json!({"type": "tap"});
            maybe(random, &mut conf, "mac", &[json!("02:00:00:00:00:01"), json!("nonsense")]);
            maybe(random, &mut conf, "mtu", &[json!(1400), json!(-1)]);
            conf
        }
        _ => {
            json!({"type": random.any(&["brigde", "dummy", "vlan"]), "master": "wire0", "vlanId": 7})
        }
    };
    maybe(random, &mut conf, "ipMasq", &masq);
    maybe(random, &mut conf, "ipMasqBackend", &backends);
    if !random.one_in(6) {
        conf["ipam"] = ipam(random);
    }
    conf
}

fn chained(random: &mut Random, interface: &Value) -> Value {
    let backends = [json!("nftables"), json!("iptables")];
    // STATUS gets no `prevResult`, so it cannot detect a missing veth pair or missing addresses.
    let has_veth = matches!(interface["type"].as_str(), Some("bridge" | "ptp"));
    let kinds = match (interface.get("ipam").is_some(), has_veth) {
        (false, _) => 4,
        (true, false) => 6,
        (true, true) => 8,
    };
    match random.below(kinds) {
        0 => {
            let mut conf = json!({"type": "portmap", "capabilities": {"portMappings": true}});
            maybe(random, &mut conf, "backend", &backends);
            maybe(random, &mut conf, "markMasqBit", &[json!(3), json!(40)]);
            conf
        }
        1 => {
            let mut conf = json!({"type": "firewall"});
            maybe(random, &mut conf, "backend", &backends);
            maybe(random, &mut conf, "ingressPolicy", &[json!("open"), json!("nonsense")]);
            conf
        }
        2 => {
            let mut conf = json!({"type": "tuning", "dataDir": "/run/cni/tuning"});
            maybe(random, &mut conf, "mac", &[json!("02:00:00:00:00:02"), json!("nonsense")]);
            let bad = json!({"kernel.pid_max": "7"});
            maybe(random, &mut conf, "sysctl", &[json!({"net.core.somaxconn": "7"}), bad]);
            conf
        }
        3 => {
            let mut conf = json!({"type": "tc-redirect-tap"});
            maybe(random, &mut conf, "multiQueue", &[json!(true), json!(7)]);
            conf
        }
        4 => {
            let mut conf = json!({"type": "route-override", "flushroutes": true});
            let routes = [
                json!([{"dst": "198.51.100.0/24", "scope": 253}]),
                json!([{"dst": "fd99::/64", "gw": "10.88.0.1"}]),
            ];
            maybe(random, &mut conf, "addroutes", &routes);
            conf
        }
        5 => {
            let mut conf = json!({"type": "sbr"});
            maybe(random, &mut conf, "table", &[json!(7), json!(-1)]);
            conf
        }
        6 => {
            let mut conf = json!({"type": "egress"});
            maybe(random, &mut conf, "profile", &[json!("sandbox"), json!("nonsense")]);
            maybe(random, &mut conf, "serve", &[json!(["tcp/80"])]);
            let lists = [
                json!([{"to": ["192.0.2.0/24"], "ports": ["tcp/443"]}]),
                json!([{"to": ["192.0.2"]}]),
            ];
            maybe(random, &mut conf, "allow", &lists);
            conf
        }
        _ => {
            let mut conf = json!({"type": "bandwidth", "ingressRate": 8_000_000});
            maybe(random, &mut conf, "ingressBurst", &[json!(800_000)]);
            conf
        }
    }
}

/// Shell commands that damage the node in a way that STATUS must detect; `true` damages nothing.
const DEFECTS: [&str; 21] = [
    "true",
    "true",
    "mount -t tmpfs -o ro tmpfs /run/cni",
    "touch /run/cni/cnibox",
    "mkdir -p DIR/leases/pods/lock",
    "ip link set wire0 mtu 1300",
    "ip link del wire0",
    "ip link set wire0 down",
    "mkdir -p DIR/leases && mount -t tmpfs -o ro tmpfs DIR/leases",
    "touch DIR/leases",
    "mkdir -p DIR/leases/pods && touch DIR/leases/pods/10.88.0.2",
    "mkdir -p /run/cni/tuning && mount -t tmpfs -o ro tmpfs /run/cni/tuning",
    "mkdir -p /run/cni/route-override && mount -t tmpfs -o ro tmpfs /run/cni/route-override",
    "rm DIR/bin/portmap DIR/bin/firewall",
    "rm DIR/bin/host-local",
    "ln -sfn nothing DIR/bin/tuning",
    "ip link add cni0 type veth peer name cni0p",
    "ip link add cni0 type bridge && ip addr add 10.88.7.7/16 dev cni0",
    "ip link add cni0 type bridge && ip link set cni0 mtu 1300",
    "nft add table inet cnibox_masquerade && nft add table inet cnibox_portmap",
    "sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1",
];

/// What administrators and other programs do to the rules of the pods on a node; some have no
/// effect on some nodes.
const DAMAGES: [&str; 16] = [
    "true",
    "true",
    "nft flush ruleset",
    "nft flush ruleset; ip link del cni0",
    "iptables -t nat -F; iptables -t nat -X; iptables -F; iptables -X",
    "iptables -t nat -F POSTROUTING",
    "iptables -t nat -D PREROUTING 1",
    "iptables -D FORWARD 1",
    "nft delete table inet cnibox_masquerade; nft delete table inet cnibox_firewall",
    "nft flush table inet cnibox_masquerade; nft flush table inet cnibox_portmap",
    "nft flush map inet cnibox_masquerade pods4; nft flush map inet cnibox_portmap any",
    "nft flush chain inet cnibox_firewall forward; nft flush chain bridge cnibox_spoof prerouting",
    "nft add table inet cnibox_masquerade '{ flags dormant; }'",
    // Objects of other types, which ADD cannot replace.
    "nft delete table inet cnibox_masquerade; nft add table inet cnibox_masquerade; \
     nft add chain inet cnibox_masquerade pods4; nft add set inet cnibox_masquerade pods6 '{ type ifname; }'",
    "nft delete table inet cnibox_firewall; nft add table inet cnibox_firewall; \
     nft add set inet cnibox_firewall pods4 '{ type ipv4_addr; flags interval; }'",
    "rm -r /run/cni/cnibox; nft flush ruleset",
];

/// Another network, whose pods come and go.
const OTHERS: &str = r#"{"cniVersion": "1.1.0", "name": "others", "plugins": [
    {"type": "bridge", "bridge": "cni9", "isGateway": true, "ipMasq": true,
     "ipam": {"type": "host-local", "dataDir": "DIR/leases", "subnet": "10.99.0.0/16"}},
    {"type": "portmap", "capabilities": {"portMappings": true}}, {"type": "firewall"}]}"#;

/// A network that a node without defects serves, with rules of random features and back ends.
fn sound(random: &mut Random) -> Vec<Value> {
    let backends = [json!("nftables"), json!("iptables")];
    let ranges = [
        json!([[{"subnet": "10.88.0.0/16"}]]),
        json!([[{"subnet": "10.88.0.0/16"}], [{"subnet": "fd00:88::/64"}]]),
    ];
    let ipam =
        json!({"type": "host-local", "dataDir": "DIR/leases", "ranges": random.any(&ranges)});
    let mut pair = json!({"type": random.any(&["bridge", "ptp"]), "ipMasq": true, "ipam": ipam});
    maybe(random, &mut pair, "ipMasqBackend", &backends);
    if pair["type"] == "bridge" {
        pair = merged(&pair, &json!({"bridge": "cni0", "isGateway": true}));
        maybe(random, &mut pair, "macspoofchk", &[json!(true)]);
    }
    let mut portmap = json!({"type": "portmap", "capabilities": {"portMappings": true}});
    maybe(random, &mut portmap, "backend", &backends);
    let mut firewall = json!({"type": "firewall"});
    maybe(random, &mut firewall, "backend", &backends);
    maybe(random, &mut firewall, "ingressPolicy", &[json!("same-bridge"), json!("isolated")]);
    let egress = json!({"type": "egress", "profile": "sandbox", "serve": ["tcp/80"]});
    let chained = [portmap, firewall, egress].into_iter().filter(|_| !random.one_in(3));
    [pair].into_iter().chain(chained.collect::<Vec<_>>()).collect()
}

struct Try {
    list: Value,
    defect: &'static str,
    /// The damage to the rules of pods that were attached before the defect.
    damage: &'static str,
    /// Whether pods of the other network come and go.
    has_load: bool,
}

impl Try {
    fn new(random: &mut Random) -> Try {
        let list = |plugins: Vec<Value>| json!({"cniVersion": "1.1.0", "name": "pods", "plugins": plugins});
        let has_load = random.one_in(2);
        if random.one_in(2) {
            let list = list(sound(random));
            return Try {
                list,
                defect: "true",
                damage: DAMAGES[random.below(DAMAGES.len())],
                has_load,
            };
        }
        let mut plugins = vec![interface(random)];
        while random.one_in(2) && plugins.len() < 4 {
            let next = chained(random, &plugins[0]);
            plugins.push(next);
        }
        Try {
            list: list(plugins),
            defect: DEFECTS[random.below(DEFECTS.len())],
            damage: "true",
            has_load,
        }
    }

    /// The outcomes of STATUS and ADD on a fresh node.
    fn run(&self) -> [Outcome; 2] {
        // Mounts disappear with the thread's mount namespace.
        std::thread::scope(|scope| scope.spawn(|| self.run_here()).join().unwrap())
    }

    fn run_here(&self) -> [Outcome; 2] {
        let node = Node::new();
        wire(&node);
        let dir = node.path("").display().to_string();
        let dir = dir.trim_end_matches('/');
        write_lists(&node, &[&self.list.to_string(), OTHERS]);
        let cnitool = |args: &[&str]| cnitool(&node, args);
        let (mapped, container) = (Container::new(), Container::new());
        if self.damage != "true" {
            let outcome = cnitool(&["cnitool", "add", "pods", &mapped.path()])
                .env("CAP_ARGS", &mapping(8080))
                .run();
            assert_eq!(outcome.status, Some(0), "{outcome:?}");
            let others =
                cnitool(&["cnitool", "add", "others", &mapped.path()]).env("CNI_IFNAME", "eth1");
            let outcome = others.env("CAP_ARGS", &mapping(8081)).run();
            assert_eq!(outcome.status, Some(0), "{outcome:?}");
        }
        node.sh(&self.defect.replace("DIR", dir));
        let load = self.has_load.then(|| visit(&node, 8082));
        let damage = || node.sh(&format!("{{ {}; }} 2> /dev/null || true", self.damage));
        damage();
        let status = cnitool(&["cnitool", "status", "pods"]).run();
        // STATUS may have restored what ADD has to restore, too.
        damage();
        let add = cnitool(&["cnitool", "add", "pods", &container.path()]).run();
        drop(load);
        [status, add]
    }
}

/// Writes the lists of networks, whose state is in the directory of the node.
fn write_lists(node: &Node, lists: &[&str]) {
    let dir = node.path("").display().to_string();
    fs::create_dir(node.path("net.d")).unwrap();
    for (nth, list) in lists.iter().enumerate() {
        let list = list.replace("DIR", dir.trim_end_matches('/'));
        fs::write(node.path(&format!("net.d/{nth}.conflist")), list).unwrap();
    }
}

/// A call of `cnibox` with the directories of the node.
fn cnitool(node: &Node, args: &[&str]) -> Call {
    let below = |name: &str| node.path(name).display().to_string();
    let (conf, cache, plugins) = (below("net.d"), below("cache"), below("bin"));
    let directories = ["--conf-dir", &conf, "--cache-dir", &cache, "--plugin-path", &plugins];
    node.tool("cnitool", &[args, &directories].concat()).program(executable()).without("CNI_PATH")
}

/// A pod of the other network that comes and goes, with a mapped port.
fn visit(node: &Node, port: u16) -> (Running, Container) {
    let visitor = Container::new();
    let add = cnitool(node, &["cnitool", "add", "others", &visitor.path()])
        .env("CAP_ARGS", &mapping(port));
    let script = r#"shift 2; while :; do "$0" cnitool add "$@"; "$0" cnitool del "$@"; done"#;
    (Running::start_with(&add.under(&["sh", "-c", script]), Stdio::null()), visitor)
}

/// A mapping of this port, as `cnitool` takes it.
fn mapping(port: u16) -> String {
    json!({"portMappings": [{"hostPort": port, "containerPort": 80, "protocol": "tcp"}]})
        .to_string()
}

fn compare(pairs: usize, seed: u64) {
    let mut random = Random(seed);
    let (mut works, mut wrong) = (0, Vec::new());
    for nth in 0..pairs {
        let attempt = Try::new(&mut random);
        let [status, add] = attempt.run();
        works += usize::from(add.status == Some(0));
        if (status.status == Some(0)) != (add.status == Some(0)) {
            let Try { list, defect, damage, has_load } = attempt;
            wrong.push(format!(
                "{nth}: {defect}; {damage}; load {has_load}\n{}\nSTATUS {}\nADD {}",
                list["plugins"], status.stderr, add.stderr
            ));
        }
    }
    println!(
        "status: seed {seed}: {pairs} pairs, {works} that work, {} that disagree",
        wrong.len()
    );
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(works * 8 > pairs && works * 8 < pairs * 7, "{works} of {pairs} work");
}

#[test]
fn status_agrees_with_the_next_add() {
    compare(100, 0x5eed_0001);
}

#[test]
#[ignore = "takes minutes: make test-long"]
fn status_agrees_with_the_next_add_two_thousand_times() {
    compare(2000, 0x5eed_0002);
}

/// Nothing is damaged while pods come and go: STATUS succeeds, and no tool reports or restores
/// anything. A record is written before its rules, and deleted before them.
#[test]
fn pods_that_come_and_go_are_no_damage() {
    for backend in ["iptables", "nftables"] {
        let node = Node::new();
        let mut list: Value = serde_json::from_str(OTHERS).unwrap();
        for (plugin, key) in [(0, "ipMasqBackend"), (1, "backend"), (2, "backend")] {
            list["plugins"][plugin][key] = json!(backend);
        }
        write_lists(&node, &[&list.to_string()]);
        node.sh("sysctl -qw net.ipv4.ip_forward=1");
        let visits: Vec<_> = (8080..8083).map(|port| visit(&node, port)).collect();
        for _ in 0..40 {
            let outcome = cnitool(&node, &["cnitool", "status", "others"]).run();
            assert_eq!(outcome.status, Some(0), "{backend}: {outcome:?}");
        }
        let cache = node.path("cache").display().to_string();
        for tool in [&["repair", "--dry-run"][..], &["repair"]].repeat(3) {
            let args = [tool, &["--cache-dir", &cache]].concat();
            let outcome = node.cnibox(&args).run();
            assert_eq!(outcome.stdout, "nothing was missing\n", "{backend}: {tool:?} {outcome:?}");
        }
        drop(visits);
    }
}
