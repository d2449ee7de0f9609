//! The benchmark's cases: chains of plugins and their configurations.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::netfilter::Backend;

pub(crate) const BRIDGE: &str = "cni0";

/// The master of macvlan, ipvlan and VLAN interfaces.
pub(crate) const MASTER: &str = "up0";

/// The case that compares bridge with `ipMasq` and portmap to netavark.
pub(crate) const NETAVARK: &str = "netavark";

/// The case that compares tc-redirect-tap to the kernel's time for the same device and filters.
pub(crate) const REDIRECT_TAP: &str = "tc-redirect-tap";

/// The case whose policy has names, with the resolver on its host.
pub(crate) const EGRESS_NAMES: &str = "egress-names";

/// The subnet file of the flannel daemon.
pub(crate) const SUBNET_FILE: &str = "subnet.env";
pub(crate) const SUBNET_ENV: &str = "FLANNEL_NETWORK=10.0.0.0/8\nFLANNEL_SUBNET=10.1.0.1/16\n\
    FLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n";

/// The network's name, which is also the name of its lease directory.
pub(crate) const NETWORK: &str = "bench";

#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// The plugin that creates the interface.
    pub(crate) plugin: &'static str,
    /// The plugins chained behind `plugin`.
    chained: &'static [&'static str],
    /// Whether the loopback network is attached first.
    loopback: bool,
    pub(crate) dual: bool,
    masq: bool,
    /// The number of ports that portmap maps.
    pub(crate) ports: usize,
}

const BRIDGE_CASE: Case = Case {
    name: "bridge",
    plugin: "bridge",
    chained: &[],
    loopback: false,
    dual: false,
    masq: false,
    ports: 0,
};

const PORTMAP_CASE: Case = Case { chained: &["portmap"], ports: 1, ..BRIDGE_CASE };

pub(crate) const CASES: &[Case] = &[
    Case { name: "version", ..BRIDGE_CASE },
    Case { name: "link", ..BRIDGE_CASE },
    Case { name: "host-local", plugin: "host-local", ..BRIDGE_CASE },
    BRIDGE_CASE,
    Case { name: "bridge-dual", dual: true, ..BRIDGE_CASE },
    Case { name: "bridge-masq", masq: true, ..BRIDGE_CASE },
    Case { name: "ptp", plugin: "ptp", ..BRIDGE_CASE },
    Case { name: "macvlan", plugin: "macvlan", ..BRIDGE_CASE },
    Case { name: "ipvlan", plugin: "ipvlan", ..BRIDGE_CASE },
    Case { name: "vlan", plugin: "vlan", ..BRIDGE_CASE },
    Case { name: "dummy", plugin: "dummy", ..BRIDGE_CASE },
    Case { name: "host-device", plugin: "host-device", ..BRIDGE_CASE },
    Case { name: "tap", plugin: "tap", ..BRIDGE_CASE },
    Case { name: "portmap-1", ..PORTMAP_CASE },
    Case { name: "portmap-32", ports: 32, ..PORTMAP_CASE },
    Case { name: "chain", loopback: true, masq: true, ..PORTMAP_CASE },
    // Compared with netavark instead of another plugin directory.
    Case { name: NETAVARK, masq: true, ..PORTMAP_CASE },
    Case { name: REDIRECT_TAP, chained: &[REDIRECT_TAP], ..BRIDGE_CASE },
    Case { name: "bandwidth", chained: &["bandwidth"], ..BRIDGE_CASE },
    Case { name: "tuning", chained: &["tuning"], ..BRIDGE_CASE },
    Case { name: "egress", chained: &["egress"], ..BRIDGE_CASE },
    Case { name: EGRESS_NAMES, chained: &["egress"], ..BRIDGE_CASE },
    Case { name: "sbr", chained: &["sbr"], ..BRIDGE_CASE },
    Case { name: "flannel", plugin: "flannel", ..BRIDGE_CASE },
    Case {
        name: "seven",
        loopback: true,
        masq: true,
        chained: &["portmap", "bandwidth", "firewall", "tuning", "sbr"],
        ..PORTMAP_CASE
    },
    Case { name: "chain-firewall", chained: &["portmap", "firewall"], ..PORTMAP_CASE },
];

impl Case {
    pub(crate) fn is_version(&self) -> bool {
        self.name == "version"
    }

    /// Whether the case measures only the creation of the link, without a plugin.
    pub(crate) fn is_link(&self) -> bool {
        self.name == "link"
    }

    pub(crate) fn is_bridge(&self) -> bool {
        ["bridge", "flannel"].contains(&self.plugin) && !self.is_version()
    }

    /// The link kind that the plugin creates on top of [`MASTER`], if any.
    pub(crate) fn child(&self) -> Option<&'static str> {
        Some(self.plugin).filter(|plugin| ["macvlan", "ipvlan", "vlan"].contains(plugin))
    }

    /// The case's link kind if some kernels lack it.
    pub(crate) fn rare_kind(&self) -> Option<&'static str> {
        self.child().or(Some(self.plugin).filter(|plugin| *plugin == "dummy"))
    }

    /// All plugins in the order of ADD.
    pub(crate) fn plugins(&self) -> impl Iterator<Item = &'static str> {
        let loopback = self.loopback.then_some("loopback");
        loopback.into_iter().chain([self.plugin]).chain(self.chained.iter().copied())
    }

    /// The plugins that support more than one packet filter.
    pub(crate) fn filters(&self) -> impl Iterator<Item = &'static str> {
        let masq = self.masq.then_some(self.plugin);
        let chained = self.chained.iter().copied();
        masq.into_iter().chain(chained.filter(|plugin| ["portmap", "firewall"].contains(plugin)))
    }

    /// The configuration of one plugin.
    pub(crate) fn conf(&self, plugin: &str, data: &Path, backend: Backend) -> Value {
        let mut conf = match plugin {
            "loopback" => json!({"name": "cni-loopback"}),
            "portmap" => json!({"capabilities": {"portMappings": true}}),
            "bandwidth" => json!({"ingressRate": 8_000_000, "ingressBurst": 800_000,
                "egressRate": 8_000_000, "egressBurst": 800_000}),
            "tuning" => json!({"mtu": 1400, "dataDir": below_run(data),
                "sysctl": {"net.core.somaxconn": "500"}}),
            "egress" if self.name == EGRESS_NAMES => {
                json!({"allow": [{"to": ["api.example.org"], "ports": ["tcp/443"]}]})
            }
            "egress" => json!({"profile": "sandbox", "serve": []}),
            "sbr" | "firewall" | REDIRECT_TAP => json!({}),
            "flannel" => {
                json!({"subnetFile": data.join(SUBNET_FILE), "dataDir": below_run(data),
                "delegate": {"bridge": BRIDGE, "isDefaultGateway": true},
                "ipam": {"dataDir": data}})
            }
            _ => self.interface(data),
        };
        let is_masquerading = plugin == self.plugin && self.masq;
        if is_masquerading {
            conf["ipMasq"] = json!(true);
        }
        if let Some(backend) = backend.key().filter(|_| self.filters().any(|name| name == plugin)) {
            conf[if is_masquerading { "ipMasqBackend" } else { "backend" }] = json!(backend);
        }
        if conf["name"].is_null() {
            conf["name"] = json!(NETWORK);
        }
        conf["type"] = json!(plugin);
        // The newest version that Debian's plugins support.
        conf["cniVersion"] = json!("1.0.0");
        conf
    }

    fn interface(&self, data: &Path) -> Value {
        let mut ranges = vec![json!([{"subnet": "10.1.0.0/16"}])];
        if self.dual {
            ranges.push(json!([{"subnet": "fd00:1::/64"}]));
        }
        let mut ipam = json!({"type": "host-local", "dataDir": data, "ranges": ranges});
        let mut conf = json!({});
        match self.plugin {
            "bridge" => {
                conf["bridge"] = json!(BRIDGE);
                conf["isDefaultGateway"] = json!(true);
            }
            "macvlan" | "ipvlan" | "vlan" => {
                conf["master"] = json!(MASTER);
                ipam["routes"] = json!([{"dst": "0.0.0.0/0"}]);
            }
            // The device itself differs from pod to pod.
            "host-device" => conf["dataDir"] = json!(data.join("devices")),
            "ptp" => ipam["routes"] = json!([{"dst": "0.0.0.0/0"}]),
            _ => {}
        }
        conf["ipam"] = ipam;
        conf
    }
}

/// A directory for the state of a plugin, which believes only what is below `/run/cni` or
/// `/var/lib/cni`.
fn below_run(data: &Path) -> PathBuf {
    Path::new("/run/cni").join(data.file_name().unwrap_or_default())
}
