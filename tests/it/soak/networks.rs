//! The networks of the soak, in five groups; together they use every plugin that this kernel
//! supports.

use std::fs;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use crate::lane;
use crate::support::net::wire;
use crate::support::node::{Node, eventually, exists};

pub(super) const GROUPS: usize = 5;

/// A network, which has a file in the node's directory of configurations.
pub(super) struct Network {
    pub(super) name: &'static str,
    pub(super) group: usize,
    plugins: Value,
    /// What a container pings.
    pub(super) gateway: Option<&'static str>,
    /// The host's address with the ports of containers.
    pub(super) host: Option<&'static str>,
    /// The first three bytes of the addresses that the runtime chooses.
    pub(super) chosen: Option<&'static str>,
    /// Devices of the host for one container, which others do not get meanwhile.
    pub(super) devices: &'static [usize],
    pub(super) taken: Mutex<()>,
    /// The number of addresses that host-local has.
    pub(super) capacity: usize,
    /// Attachments that may have an address.
    holders: AtomicUsize,
}

impl Network {
    fn new(group: usize, name: &'static str, plugins: Value) -> Network {
        Network {
            name,
            group,
            plugins,
            gateway: None,
            host: None,
            chosen: None,
            devices: &[],
            taken: Mutex::new(()),
            capacity: usize::MAX,
            holders: AtomicUsize::new(0),
        }
    }

    fn with_gateway(self, gateway: &'static str) -> Network {
        Network { gateway: Some(gateway), ..self }
    }

    fn with_ports_on(self, host: &'static str) -> Network {
        Network { host: Some(host), ..self }
    }

    /// An attachment may get an address from now on; whether it may be the last one.
    pub(super) fn takes_the_last(&self) -> bool {
        self.holders.fetch_add(1, Ordering::SeqCst) + 1 == self.capacity
    }

    /// An attachment has certainly no address any more; whether it may have been the last one.
    pub(super) fn gives_the_last_back(&self) -> bool {
        self.holders.fetch_sub(1, Ordering::SeqCst) == self.capacity
    }

    /// The name of the interface in the container.
    pub(super) fn ifname(&self) -> &'static str {
        if self.name == "loopback" { "lo" } else { "eth0" }
    }
}

fn host_local(subnet: &str, v6: Option<&str>) -> Value {
    let subnets = [Some(subnet), v6].into_iter().flatten();
    let ranges: Vec<Value> = subnets.map(|subnet| json!([{"subnet": subnet}])).collect();
    let mut routes = vec![json!({"dst": "0.0.0.0/0"})];
    if v6.is_some() {
        routes.push(json!({"dst": "::/0"}));
    }
    json!({"type": "host-local", "ranges": ranges, "routes": routes})
}

fn bridge(name: &str, backend: &str, ipam: &Value) -> Value {
    json!({"type": "bridge", "bridge": name, "isDefaultGateway": true, "ipMasq": true,
        "ipMasqBackend": backend, "ipam": ipam})
}

fn ptp(backend: &str, ipam: &Value) -> Value {
    json!({"type": "ptp", "ipMasq": true, "ipMasqBackend": backend, "ipam": ipam})
}

fn portmap(backend: &str) -> Value {
    json!({"type": "portmap", "backend": backend, "capabilities": {"portMappings": true}})
}

fn firewall(backend: &str, policy: &str) -> Value {
    json!({"type": "firewall", "backend": backend, "ingressPolicy": policy})
}

fn bandwidth() -> Value {
    json!({"type": "bandwidth", "ingressRate": 80_000_000, "ingressBurst": 800_000,
        "egressRate": 80_000_000, "egressBurst": 800_000})
}

fn tuning() -> Value {
    json!({"type": "tuning", "mtu": 1400, "sysctl": {"net.core.somaxconn": "500"}})
}

/// All networks; in that with few addresses host-local has `few`.
pub(super) fn all(node: &Node, few: usize) -> Vec<Network> {
    let mut all = with_iptables();
    all.extend(with_nftables(node));
    all.extend(routed(few));
    all.extend(wired());
    all.extend(odd());
    all
}

fn with_iptables() -> Vec<Network> {
    let mut first = bridge("br-old", "iptables", &host_local("10.11.0.0/16", Some("fd00:11::/64")));
    first["hairpinMode"] = json!(true);
    let plugins =
        json!([first, portmap("iptables"), firewall("iptables", "open"), tuning(), bandwidth()]);
    let usual = Network::new(0, "usual", plugins);
    vec![usual.with_gateway("10.11.0.1").with_ports_on("10.11.0.1")]
}

fn with_nftables(node: &Node) -> Vec<Network> {
    let mut first = bridge("br-new", "nftables", &host_local("10.12.0.0/16", Some("fd00:12::/64")));
    first["macspoofchk"] = json!(true);
    let plugins = json!([
        first,
        portmap("nftables"),
        firewall("nftables", "same-bridge"),
        tuning(),
        bandwidth()
    ]);
    let modern = Network::new(1, "modern", plugins);
    let plugins = json!([
        {"type": "loopback"},
        bridge("br-box", "nftables", &host_local("10.13.0.0/16", None)),
        portmap("nftables"),
        {"type": "egress", "profile": "sandbox", "capabilities": {"portMappings": true},
            "allow": [{"to": ["192.0.2.0/24"], "ports": ["tcp/443"]}]},
    ]);
    let sandbox = Network::new(1, "sandbox", plugins).with_ports_on("10.13.0.1");
    let env = node.path("subnet.env");
    let text = "FLANNEL_NETWORK=10.14.0.0/16\nFLANNEL_SUBNET=10.14.1.1/24\n\
                FLANNEL_MTU=1450\nFLANNEL_IPMASQ=false\n";
    fs::write(&env, text).unwrap();
    let delegate = json!({"bridge": "br-flannel", "isDefaultGateway": true});
    let plugins = json!([{"type": "flannel", "subnetFile": env, "delegate": delegate}]);
    let flannel = Network::new(1, "flannel", plugins).with_gateway("10.14.1.1");
    vec![modern.with_gateway("10.12.0.1").with_ports_on("10.12.0.1"), sandbox, flannel]
}

fn routed(few: usize) -> Vec<Network> {
    let plugins = json!([
        ptp("nftables", &host_local("10.15.0.0/16", None)),
        portmap("nftables"),
        {"type": "sbr"},
    ]);
    let source = Network::new(2, "source", plugins).with_ports_on("10.15.0.1");
    let mut ipam = host_local("10.16.0.0/24", None);
    ipam["ranges"][0][0]["rangeStart"] = json!("10.16.0.10");
    ipam["ranges"][0][0]["rangeEnd"] = json!(format!("10.16.0.{}", 9 + few));
    let plugins = json!([ptp("iptables", &ipam), portmap("iptables")]);
    let small = Network::new(2, "small", plugins).with_gateway("10.16.0.1");
    let small = Network { capacity: few, ..small.with_ports_on("10.16.0.1") };
    let plugins =
        json!([ptp("nftables", &host_local("10.17.0.0/16", None)), {"type": "tc-redirect-tap"}]);
    let machine = Network::new(2, "machine", plugins);
    let mut found = vec![source, small, machine];
    if lane::VRF.is_here() {
        let pair = ptp("nftables", &host_local("10.18.0.0/16", None));
        let plugins = json!([pair, {"type": "vrf", "vrfname": "blue"}]);
        found.push(Network::new(2, "domain", plugins));
    }
    found
}

/// Children of a link, and leases of the server on `br-dhcp`.
fn wired() -> Vec<Network> {
    let child = |kind: &str, subnet: &str| {
        let mut ipam = host_local(subnet, None);
        ipam["ranges"][0][0]["rangeStart"] = json!(subnet.replace(".0/24", ".2"));
        json!([{"type": kind, "master": "wire0", "vlanId": 5, "ipam": ipam}, {"type": "tuning"}])
    };
    let macvlan = Network::new(3, "macvlan", child("macvlan", "10.1.2.0/24"));
    let plugins = json!([{"type": "bridge", "bridge": "br-dhcp", "ipam": {"type": "dhcp"}}]);
    let leased = Network::new(3, "leased", plugins);
    let mut found = vec![macvlan.with_gateway("10.1.2.1"), leased.with_gateway("192.168.1.1")];
    // A macvlan and an ipvlan cannot share a master, and macvlan's may become the master of vlan.
    if lane::VLAN.is_here() {
        found.push(Network::new(3, "vlan", child("vlan", "10.1.3.0/24")));
    }
    if lane::IPVLAN.is_here() {
        let mut plugins = child("ipvlan", "10.1.4.0/24");
        plugins[0]["master"] = json!("wire1");
        found.push(Network::new(3, "ipvlan", plugins));
    }
    found
}

fn odd() -> Vec<Network> {
    let tap = json!([{"type": "tap", "ipam": host_local("10.21.0.0/16", None)}]);
    let plugins = json!([
        bridge("br-odd", "nftables", &host_local("10.22.0.0/16", None)),
        {"type": "route-override", "flushgateway": true, "addroutes": [{"dst": "192.0.2.0/24"}]},
    ]);
    let overridden = Network::new(4, "overridden", plugins).with_gateway("10.22.0.1");
    let ipam = json!({"type": "static", "routes": [{"dst": "0.0.0.0/0", "gw": "10.23.0.1"}]});
    let mut chosen = bridge("br-static", "iptables", &ipam);
    chosen["capabilities"] = json!({"ips": true});
    let chosen = Network::new(4, "chosen", json!([chosen]));
    let mut found = vec![
        Network::new(4, "tap", tap),
        overridden,
        Network { chosen: Some("10.23"), ..chosen.with_gateway("10.23.0.1") },
        Network::new(4, "loopback", json!([{"type": "loopback"}])),
    ];
    found.extend([card("card-0", &[0]), card("card-1", &[1])]);
    if lane::DUMMY.is_here() {
        let plugins = json!([{"type": "dummy", "ipam": host_local("10.24.0.0/16", None)}]);
        found.push(Network::new(4, "dummy", plugins));
    }
    if lane::BOND.is_here() {
        let links = json!([{"name": "card2"}, {"name": "card3"}]);
        let bond = json!({"type": "bond", "mode": "active-backup", "links": links,
            "ipam": host_local("10.25.0.0/16", None)});
        found.push(Network { devices: &[2, 3], ..Network::new(4, "bond", json!([bond])) });
    }
    found
}

/// A device of the host.
fn card(name: &'static str, devices: &'static [usize]) -> Network {
    let device = format!("card{}", devices[0]);
    let ipam = host_local(&format!("10.26.{}.0/24", devices[0]), None);
    let plugins = json!([{"type": "host-device", "device": device, "ipam": ipam}]);
    Network { devices, ..Network::new(4, name, plugins) }
}

/// Makes the devices of a network: veth pairs with an address and a route, which DEL restores. A
/// pair ends with the namespace of its container, some time later, and the next one is made equal.
pub(super) fn provide(node: &Node, network: &Network) {
    for number in network.devices {
        let script = format!(
            "ip link show card{number} > /dev/null 2>&1 && exit
             ip link add card{number} index 10{number} address 02:0d:00:00:00:0{number} type veth \
                 peer name far{number} index 20{number} address 02:0f:00:00:00:0{number} \
                 2> /dev/null || exit 0
             ip link set far{number} up; ip link set card{number} up
             ip addr add 192.0.{number}.7/24 dev card{number}
             ip route add 198.51.{number}.0/24 via 192.0.{number}.9 dev card{number}"
        );
        eventually(&format!("card{number} does not come back"), || {
            node.sh(&script);
            exists(format!("/proc/sys/net/ipv4/conf/card{number}"))
        });
    }
}

/// Writes the configurations, and makes the links that the networks share.
pub(super) fn prepare(node: &Node, networks: &[Network]) {
    wire(node);
    node.sh("ip link add br-dhcp address 02:00:00:00:01:01 type bridge && \
             ip link set br-dhcp up && ip addr add 192.168.1.1/24 dev br-dhcp");
    fs::create_dir(node.path("net.d")).unwrap();
    for network in networks {
        let list = json!({"cniVersion": "1.1.0", "name": network.name, "plugins": network.plugins});
        let file = node.path(&format!("net.d/{}.conflist", network.name));
        fs::write(file, list.to_string()).unwrap();
        provide(node, network);
    }
}
