//! The known plugin types: a working configuration of each, and the kernel features that it needs.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::world::{Needs, UPLINK};

/// The versions of the specification.
pub const VERSIONS: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// The purpose of a plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Profile {
    /// The plugin creates an interface.
    Interface,
    /// The plugin changes what earlier plugins of the list created.
    Chained,
    /// The plugin allocates addresses.
    Ipam,
    /// The purpose is not known: only the protocol can be tested.
    Foreign,
}

impl Profile {
    pub fn name(self) -> &'static str {
        match self {
            Profile::Interface => "interface",
            Profile::Chained => "chained",
            Profile::Ipam => "ipam",
            Profile::Foreign => "foreign",
        }
    }
}

/// A type of plugin, and what the tests must know about it.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub name: &'static str,
    pub profile: Profile,
    pub needs: Needs,
    /// Whether the plugin delegates to an IPAM plugin.
    pub has_ipam: bool,
}

const fn kind(name: &'static str, profile: Profile, needs: Needs, has_ipam: bool) -> Kind {
    Kind { name, profile, needs, has_ipam }
}

pub const KINDS: [Kind; 23] = [
    kind("bridge", Profile::Interface, Needs::Nothing, true),
    kind("ptp", Profile::Interface, Needs::Nothing, true),
    kind("macvlan", Profile::Interface, Needs::Nothing, true),
    kind("ipvlan", Profile::Interface, Needs::Ipvlan, true),
    kind("vlan", Profile::Interface, Needs::Vlan, true),
    kind("host-device", Profile::Interface, Needs::Nothing, true),
    kind("bond", Profile::Interface, Needs::Bond, true),
    kind("dummy", Profile::Interface, Needs::Dummy, true),
    kind("tap", Profile::Interface, Needs::Nothing, true),
    kind("loopback", Profile::Interface, Needs::Nothing, false),
    kind("host-local", Profile::Ipam, Needs::Nothing, false),
    kind("static", Profile::Ipam, Needs::Nothing, false),
    kind("portmap", Profile::Chained, Needs::Nothing, false),
    kind("tuning", Profile::Chained, Needs::Nothing, false),
    kind("bandwidth", Profile::Chained, Needs::Nothing, false),
    kind("firewall", Profile::Chained, Needs::Nothing, false),
    kind("sbr", Profile::Chained, Needs::Nothing, false),
    kind("route-override", Profile::Chained, Needs::Nothing, false),
    kind("tc-redirect-tap", Profile::Chained, Needs::Nothing, false),
    kind("egress", Profile::Chained, Needs::Nothing, false),
    kind("vrf", Profile::Chained, Needs::Vrf, false),
    // Without their daemons only the protocol can be tested.
    kind("dhcp", Profile::Foreign, Needs::Nothing, false),
    kind("flannel", Profile::Foreign, Needs::Nothing, false),
];

/// The ranges of host-local for a type. Interfaces on the uplink use the subnets of the uplink, so
/// that the other host answers.
fn ranges(kind: &str) -> Value {
    match kind {
        "macvlan" | "ipvlan" => json!([
            [{"subnet": "10.89.0.0/24", "rangeStart": "10.89.0.100", "rangeEnd": "10.89.0.200"}],
            [{"subnet": "fd89::/64", "rangeStart": "fd89::100", "rangeEnd": "fd89::200"}],
        ]),
        _ => json!([[{"subnet": "10.88.0.0/16"}], [{"subnet": "fd88::/64"}]]),
    }
}

/// The IPAM configuration of host-local, or an empty object if the directory has no host-local.
pub fn ipam(directory: &Path, kind: &str) -> Value {
    if !directory.join("host-local").exists() {
        return json!({});
    }
    let routes = match kind {
        "bridge" | "ptp" => {
            json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}, {"dst": "10.98.0.0/20", "gw": "10.88.0.1"}, {"dst": "fd98::/40", "gw": "fd88::1"}])
        }
        "macvlan" | "ipvlan" => {
            json!([{"dst": "10.98.0.0/20", "gw": "10.89.0.1"}, {"dst": "fd98::/40", "gw": "fd89::1"}])
        }
        _ => {
            json!([{"dst": "10.98.0.0/20", "gw": "10.88.0.1"}, {"dst": "fd98::/40", "gw": "fd88::1"}])
        }
    };
    json!({"type": "host-local", "ranges": ranges(kind), "routes": routes})
}

/// A configuration of a known type.
pub fn configuration(kind: &Kind, version: &str, directory: &Path) -> Value {
    let own = match kind.name {
        "bridge" => {
            json!({"bridge": "sanity0", "isGateway": true, "isDefaultGateway": false, "ipMasq": true})
        }
        "ptp" => json!({"ipMasq": true}),
        "macvlan" => json!({"master": UPLINK, "mode": "bridge"}),
        "ipvlan" => json!({"master": UPLINK, "mode": "l2"}),
        "vlan" => json!({"master": UPLINK, "vlanId": 5}),
        "host-device" => json!({"device": "spare0"}),
        "bond" => {
            json!({"mode": "active-backup", "links": [{"name": "spare0"}, {"name": "other0"}]})
        }
        "host-local" => {
            json!({"ipam": {"type": "host-local", "ranges": ranges("bridge"), "routes": [{"dst": "0.0.0.0/0"}]}})
        }
        "static" => {
            json!({"ipam": {"type": "static", "routes": [{"dst": "0.0.0.0/0", "gw": "10.88.0.1"}],
            "addresses": [{"address": "10.88.0.5/16", "gateway": "10.88.0.1"}, {"address": "fd88::5/64"}]}})
        }
        "portmap" => {
            json!({"capabilities": {"portMappings": true}, "runtimeConfig": {"portMappings": [
            {"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
            {"hostPort": 8081, "containerPort": 81, "protocol": "udp"},
            {"hostPort": 8083, "containerPort": 83, "protocol": "tcp"}]}})
        }
        "tuning" => {
            json!({"sysctl": {"net.ipv4.conf.eth0.arp_filter": "1", "net.ipv4.conf.eth0.log_martians": "1"}, "mtu": 1300})
        }
        "bandwidth" => {
            json!({"ingressRate": 8_000_000, "ingressBurst": 800_000, "egressRate": 8_000_000, "egressBurst": 800_000})
        }
        "route-override" => {
            json!({"addroutes": [{"dst": "10.203.7.0/24"}, {"dst": "fd97:203::/48"}]})
        }
        "egress" => {
            json!({"allow": [{"to": ["10.89.0.0/16", "fd89::/64"], "ports": ["tcp/443"]}]})
        }
        "vrf" => json!({"vrfname": "blue"}),
        "dhcp" => json!({"ipam": {"type": "dhcp"}}),
        _ => json!({}),
    };
    let mut all = json!({"cniVersion": version, "name": "sanity", "type": kind.name});
    if kind.has_ipam {
        all["ipam"] = ipam(directory, kind.name);
    }
    merge(&mut all, own);
    all
}

/// Sets members of an object; a null deletes the member.
pub fn merge(into: &mut Value, members: Value) {
    if let (Value::Object(into), Value::Object(members)) = (into, members) {
        for (key, value) in members {
            if value.is_null() {
                into.remove(&key);
            } else {
                into.insert(key, value);
            }
        }
    }
}
