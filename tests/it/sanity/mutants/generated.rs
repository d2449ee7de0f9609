//! Mutants that are generated: every verb of every type that fails without a reason, and every
//! member of a result that has another name or another type.

use super::Mutant;

/// The types that this machine's kernel surely has.
const INTERFACES: [&str; 4] = ["bridge", "ptp", "macvlan", "tap"];
const CHAINED: [&str; 8] = [
    "tuning",
    "portmap",
    "bandwidth",
    "firewall",
    "sbr",
    "route-override",
    "tc-redirect-tap",
    "egress",
];
const IPAM: [&str; 2] = ["host-local", "static"];

/// Verbs, and the assertion that a failure of each contradicts.
const VERBS: [(&str, &str); 5] = [
    ("ADD", "add.succeeds"),
    ("DEL", "del.succeeds"),
    ("CHECK", "check.succeeds"),
    ("GC", "gc.succeeds"),
    ("STATUS", "status.succeeds"),
];

/// Types, and the assertion that a DEL contradicts that does nothing.
const IDLE_DEL: [(&str, &str); 12] = [
    ("bridge", "del.removes-interface"),
    ("ptp", "del.removes-interface"),
    ("macvlan", "del.removes-interface"),
    ("tap", "del.removes-interface"),
    ("host-local", "ipam.reused"),
    ("portmap", "keys.portmap.stops"),
    ("firewall", "del.leaves-nothing"),
    ("bandwidth", "del.leaves-nothing"),
    ("sbr", "del.leaves-nothing-inside"),
    ("route-override", "del.leaves-nothing-inside"),
    ("tc-redirect-tap", "del.leaves-nothing-inside"),
    ("egress", "del.leaves-nothing"),
];

/// Members of a result that a chained plugin hands on, and the assertion about each.
const HANDED_ON: [(&str, &str); 17] = [
    ("name", "chained.keeps-interfaces"),
    ("mac", "chained.keeps-mac"),
    ("mtu", "chained.keeps-mtu"),
    ("sandbox", "chained.keeps-sandbox"),
    ("socketPath", "chained.keeps-socket-path"),
    ("pciID", "chained.keeps-pci-id"),
    ("gateway", "chained.keeps-gateway"),
    ("interface", "chained.keeps-index"),
    ("gw", "chained.keeps-route-gw"),
    ("advmss", "chained.keeps-route-advmss"),
    ("priority", "chained.keeps-route-priority"),
    ("table", "chained.keeps-route-table"),
    ("scope", "chained.keeps-route-scope"),
    ("nameservers", "chained.keeps-nameservers"),
    ("domain", "chained.keeps-domain"),
    ("search", "chained.keeps-search"),
    ("options", "chained.keeps-options"),
];

/// Members of a result, and the assertions about one that has another type.
const TYPED: [(&str, &str); 9] = [
    ("cniVersion", "result.cni-version"),
    ("name", "result.interface.name"),
    ("mac", "result.interface.mac"),
    ("mtu", "result.interface.mtu"),
    ("sandbox", "result.interface.sandbox"),
    ("address", "result.ip.address"),
    ("gateway", "result.ip.gateway"),
    ("interface", "result.ip.interface"),
    ("dst", "result.routes"),
];

/// Lists of a result, and the assertions about one that is none.
const LISTS: [(&str, &str); 3] = [
    ("interfaces", "result.interfaces-list"),
    ("ips", "result.ips-list"),
    ("routes", "result.routes"),
];

/// Members that a result must have.
const NEEDED: [(&str, &str); 4] = [
    ("cniVersion", "result.cni-version"),
    ("name", "result.interface.name"),
    ("address", "result.ip.address"),
    ("dst", "result.routes"),
];

pub(super) fn all() -> Vec<Mutant> {
    let mut all = Vec::new();
    let mut add = |kind, verb, seen, body: String| {
        all.push(Mutant { kind, version: "1.1.0", verb, body, seen, clause: None });
    };
    for kind in INTERFACES.into_iter().chain(CHAINED).chain(IPAM) {
        for (verb, seen) in VERBS {
            add(kind, verb, seen, "exit 1".to_owned());
        }
    }
    for (kind, seen) in IDLE_DEL {
        add(kind, "DEL", seen, "exit 0".to_owned());
    }
    for kind in INTERFACES {
        add(kind, "CHECK", "check.interface-gone", "exit 0".to_owned());
        add(kind, "GC", "delegation.ipam.gc", "exit 0".to_owned());
        add(kind, "STATUS", "delegation.ipam.status", "exit 0".to_owned());
    }
    for kind in CHAINED {
        add(kind, "STATUS", "status.unprivileged", "exit 0".to_owned());
    }
    for kind in ["bandwidth", "firewall"] {
        add(kind, "GC", "gc.removes-stale", "exit 0".to_owned());
    }
    for kind in ["firewall", "sbr"] {
        for (key, seen) in HANDED_ON {
            add(kind, "ADD", seen, format!("bend 's/\"{key}\"/\"other\"/'"));
        }
    }
    for (key, seen) in NEEDED {
        add("ptp", "ADD", seen, format!("bend 's/\"{key}\"/\"other\"/'"));
    }
    for (key, seen) in TYPED {
        add("ptp", "ADD", seen, format!("bend 's/\"{key}\": [^,]*/\"{key}\": true/'"));
    }
    for (key, seen) in LISTS {
        let edit = format!("s/\"{key}\": \\[[^]]*\\]/\"{key}\": true/");
        let body = format!("out=$(run); status=$?; echo \"$out\" | sed -z '{edit}'; exit $status");
        add("ptp", "ADD", seen, body);
    }
    all
}
