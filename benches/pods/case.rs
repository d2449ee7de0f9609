//! What is attached: a plugin and its configuration.

use std::path::Path;

use serde_json::{Value, json};

/// The name of the bridge.
pub(crate) const BRIDGE: &str = "cni0";

/// The name of the network, and so of the folder of its leases.
pub(crate) const NETWORK: &str = "bench";

#[derive(Debug)]
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) plugin: &'static str,
    pub(crate) dual: bool,
}

pub(crate) const CASES: &[Case] = &[
    Case { name: "version", plugin: "bridge", dual: false },
    Case { name: "host-local", plugin: "host-local", dual: false },
    Case { name: "bridge", plugin: "bridge", dual: false },
    Case { name: "bridge-dual", plugin: "bridge", dual: true },
    Case { name: "ptp", plugin: "ptp", dual: false },
];

impl Case {
    pub(crate) fn is_version(&self) -> bool {
        self.name == "version"
    }

    pub(crate) fn is_bridge(&self) -> bool {
        self.plugin == "bridge" && !self.is_version()
    }

    /// The configuration: in 1.0.0, the newest that Debian's plugins speak.
    pub(crate) fn conf(&self, data: &Path) -> Value {
        let mut ranges = vec![json!([{"subnet": "10.1.0.0/16"}])];
        if self.dual {
            ranges.push(json!([{"subnet": "fd00:1::/64"}]));
        }
        let mut ipam = json!({"type": "host-local", "dataDir": data, "ranges": ranges});
        let mut conf = json!({"cniVersion": "1.0.0", "name": NETWORK, "type": self.plugin});
        match self.plugin {
            "bridge" => {
                conf["bridge"] = json!(BRIDGE);
                conf["isDefaultGateway"] = json!(true);
            }
            "ptp" => ipam["routes"] = json!([{"dst": "0.0.0.0/0"}]),
            _ => {}
        }
        conf["ipam"] = ipam;
        conf
    }
}
