//! No live container is declared dead, whatever hides it; and what a dead one leaves is reclaimed.
//!
//! Each test has a network whose pool has one address and whose host port is one: every ADD of
//! another container needs what the first has.

mod dead;
mod hidden;
mod race;
mod twice;
mod unlisted;

use std::fs;

use serde_json::{Value, json};

use crate::support::net::merged;
use crate::support::node::{Call, Node, Outcome, executable};

/// The only address of the pool, and the host port.
const IP: &str = "10.88.0.2";
const PORT: u16 = 18_081;

/// The interface plugins, by a word.
const KINDS: [&str; 5] = ["bridge", "masquerading", "ptp", "macvlan", "foreign"];

/// An interface plugin of another program: a veth pair, with an address of host-local.
const FOREIGN: &str = r#"
conf=$(cat)
ipam() { printf %s "$conf" | "$CNI_PATH/host-local"; }
case $CNI_COMMAND in
ADD)
    out=$(ipam) || { printf %s "$out"; exit 1; }
    ip=$(printf %s "$out" | tr ',{}' '\n' | sed -n 's/.*"address": *"\(.*\)".*/\1/p' | head -1)
    ip link add "f$CNI_CONTAINERID" type veth peer name "p$CNI_CONTAINERID"
    ip link set "p$CNI_CONTAINERID" netns "$CNI_NETNS" name "$CNI_IFNAME"
    ip link set "f$CNI_CONTAINERID" up
    nsenter --net="$CNI_NETNS" ip addr add "$ip" dev "$CNI_IFNAME"
    nsenter --net="$CNI_NETNS" ip link set "$CNI_IFNAME" up
    echo '{"cniVersion":"1.1.0","interfaces":[{"name":"f'"$CNI_CONTAINERID"'"},
        {"name":"'"$CNI_IFNAME"'","sandbox":"'"$CNI_NETNS"'"}],"ips":[{"address":"'"$ip"'","interface":1}]}' ;;
DEL) ip link del "f$CNI_CONTAINERID" 2>/dev/null; ipam ;;
GC) ipam ;;
VERSION) echo '{"cniVersion":"1.1.0","supportedVersions":["1.0.0","1.1.0"]}' ;;
esac"#;

/// A node with one network, as a configuration list of an interface plugin, portmap, firewall and
/// bandwidth.
struct World {
    node: Node,
    kind: String,
    plugins: Vec<Value>,
    /// The program, such as a shell that hides files, under which all calls run.
    view: Vec<String>,
}

impl World {
    fn new(kind: &str) -> World {
        World::with_pool(kind, "10.88.0.0/30")
    }

    fn with_pool(kind: &str, subnet: &str) -> World {
        let node = Node::new();
        node.sh("mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns");
        node.sh(
            "ip link add up0 type veth peer name up1 && ip link set up0 up && ip link set up1 up",
        );
        node.script("foreign", FOREIGN);
        let keys = match kind {
            "bridge" => json!({"type": "bridge", "bridge": "br9", "isGateway": true}),
            "masquerading" | "static" => {
                json!({"type": "bridge", "bridge": "br9", "isGateway": true,
                "ipMasq": true, "ipMasqBackend": "nftables", "macspoofchk": true})
            }
            "ptp" => json!({"type": "ptp", "ipMasq": true, "ipMasqBackend": "nftables"}),
            "macvlan" => json!({"type": "macvlan", "master": "up0"}),
            other => json!({"type": other}),
        };
        // In the default directory, which is the only one that plugins after another program's
        // know.
        let leases = node.path("leases").display().to_string();
        node.sh("mkdir -p /var/lib/cni && mount -t tmpfs tmpfs /var/lib/cni");
        let networks = "/var/lib/cni/networks";
        node.sh(&format!("mkdir {leases} {networks} && mount --bind {leases} {networks}"));
        let ipam = match kind {
            "static" => {
                json!({"type": "static", "addresses": [{"address": "10.88.0.2/29", "gateway": "10.88.0.1"}]})
            }
            _ => json!({"type": "host-local", "ranges": [[{"subnet": subnet}]]}),
        };
        let mut plugins = vec![
            merged(&keys, &json!({"ipam": ipam})),
            json!({"type": "portmap", "backend": "nftables", "capabilities": {"portMappings": true}}),
            json!({"type": "firewall", "backend": "nftables"}),
        ];
        if kind != "macvlan" {
            plugins.push(
                json!({"type": "bandwidth", "egressRate": 8_000_000, "egressBurst": 8_000_000}),
            );
        }
        fs::create_dir(node.path("net.d")).unwrap();
        let list = json!({"cniVersion": "1.1.0", "name": "net", "plugins": plugins});
        fs::write(node.path("net.d/net.conflist"), list.to_string()).unwrap();
        World { node, kind: kind.to_owned(), plugins, view: Vec::new() }
    }

    /// The call as seen from this world's view.
    fn seen(&self, call: Call) -> Call {
        let view: Vec<&str> = self.view.iter().map(String::as_str).collect();
        if view.is_empty() { call } else { call.under(&view) }
    }

    /// A node-wide tool of cnibox.
    fn tool(&self, args: &[&str]) -> Call {
        let [cache, bin, leases, conf] = ["cache", "bin", "leases", "net.d"]
            .map(|name| self.node.path(name).display().to_string());
        let directories: &[&str] = match args {
            ["ipam", ..] => &["--data-dir", &leases],
            ["cnitool", ..] => &["--cache-dir", &cache, "--plugin-path", &bin, "--conf-dir", &conf],
            _ => &[
                "--cache-dir",
                &cache,
                "--plugin-path",
                &bin,
                "--conf-dir",
                &conf,
                "--data-dir",
                &leases,
            ],
        };
        let call = self.node.tool("cnitool", &[args, directories].concat()).program(executable());
        self.seen(call)
    }

    /// `cnitool add`, `check` or `del` of a container that wants the host port.
    fn runtime(&self, verb: &str, id: &str, netns: &str) -> Call {
        self.runtime_at(verb, id, netns, PORT)
    }

    /// As [`World::runtime`], with another host port.
    fn runtime_at(&self, verb: &str, id: &str, netns: &str, port: u16) -> Call {
        let port = json!([{"hostPort": port, "containerPort": 80, "protocol": "tcp"}]);
        let caps = json!({"portMappings": port}).to_string();
        self.tool(&["cnitool", verb, "net", netns, "--container-id", id, "--cap-args", &caps])
    }

    /// A call of the `index`th plugin of the list.
    fn plugin(&self, index: usize, verb: &str, keys: &Value) -> Call {
        let name = self.plugins[index]["type"].as_str().unwrap().to_owned();
        let common = json!({"cniVersion": "1.1.0", "name": "net"});
        let conf = merged(&merged(&common, &self.plugins[index]), keys);
        self.seen(self.node.call(&name, verb).conf(&conf))
    }

    /// GC of each plugin of the list, with these containers as valid; without a list if `None`.
    fn gc(&self, valid: Option<&[&str]>) -> Vec<Outcome> {
        let listed = |id: &&str| json!({"containerID": id, "ifname": "eth0"});
        let valid = valid.map(|ids| ids.iter().map(listed).collect::<Vec<_>>());
        let keys = json!({"cni.dev/valid-attachments": valid});
        let plugins = 0..self.plugins.len();
        plugins.map(|n| self.plugin(n, "GC", &keys).without("CNI_CONTAINERID").run()).collect()
    }

    /// The packet filter's rules and the devices that shape, as text.
    fn state(&self) -> String {
        self.node.sh("nft -s list ruleset; ip -o link show type ifb | sed 's/:.*//; s/.*/shapes/'")
    }

    /// The liveness of a container in `cnibox ipam ls`; `null` if it is in doubt or there is no
    /// lease.
    fn liveness_of(&self, id: &str) -> Value {
        let has_leases = self.node.path("leases/net").exists();
        has_leases
            .then(|| self.listed(id))
            .flatten()
            .map_or(Value::Null, |row| row["alive"].clone())
    }

    /// The [liveness](World::liveness_of) of a container that lives.
    fn expected_liveness(&self) -> Value {
        if ["macvlan", "static"].contains(&self.kind.as_str()) {
            Value::Null
        } else {
            Value::Bool(true)
        }
    }

    /// The row of a container in `cnibox ipam ls`, if it has a lease.
    fn listed(&self, id: &str) -> Option<Value> {
        let rows = self.tool(&["ipam", "ls", "--network", "net", "--json"]).printed();
        let rows: Vec<Value> = serde_json::from_str(&rows).unwrap();
        rows.into_iter().find(|row| row["container"] == id)
    }
}
