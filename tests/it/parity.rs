//! The reference plugins (`PEER`, or Debian's in `/usr/lib/cni`) compared with cnibox: the same
//! configuration on two fresh nodes yields the same result, byte for byte except random parts, and
//! the same kernel state except for [`DIFFERENCES`], which docs/parity.md explains.

use std::path::{Path, PathBuf};
use std::thread;

use serde_json::{Value, json};

use crate::lane::{self, needs};
use crate::support::compare::{self, assert_same, normal};
use crate::support::net::{merged, no_veth_remains, wire};
use crate::support::node::{Call, Container, Node};

/// The intended differences: (prefix, infix, text): lines of the state that start with `prefix` and
/// contain `infix` are compared without `text`.
const DIFFERENCES: [(&str, &str, &str); 9] = [
    // With the reference, a container's router advertisements configure the host through its
    // gateway.
    ("host parameter cni0.100", "accept_ra", "=0"),
    ("host parameter cni0.100", "accept_ra", "=1"),
    // cnibox skips duplicate address detection where a duplicate is impossible.
    ("host addr", "fd00", " nodad"),
    // Duplicate address detection has not finished when the reference returns.
    ("host addr", "fd00", " tentative"),
    // The reference deletes the kernel's subnet route; cnibox prevents its creation.
    ("container addr", "dev eth0", " noprefixroute"),
    // The reference sets an explicit broadcast address, which the kernel derives itself.
    ("host addr", "", " brd"),
    ("container addr", "", " brd"),
    ("container addr", "fd00", " nodad"),
    ("container addr", "fd00", " tentative"),
];
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side<'a> {
    Ours,
    Reference(&'a Path),
}

/// A configuration to run on both sides.
struct Case {
    name: &'static str,
    plugin: &'static str,
    subnets: &'static [&'static str],
    keys: Value,
    versions: &'static [&'static str],
}

/// Debian's reference does not support 1.1.0.
const ALL: [&str; 6] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0"];
const SOME: [&str; 2] = ["0.2.0", "1.0.0"];
const NEWEST: [&str; 1] = ["1.0.0"];
const V4: &[&str] = &["10.1.2.0/24"];
const V6: &[&str] = &["fd00:1::/64"];
const DUAL: &[&str] = &["10.1.2.0/24", "fd00:1::/64"];

fn cases() -> Vec<Case> {
    let case =
        |name, plugin, subnets, versions, keys| Case { name, plugin, subnets, keys, versions };
    let routes = json!([{"dst": "192.168.0.0/16"}, {"dst": "10.9.0.0/16", "gw": "10.1.2.9"}]);
    vec![
        case("bridge", "bridge", V4, &ALL, json!({"isGateway": true})),
        case("default gateway", "bridge", V4, &SOME, json!({"isDefaultGateway": true})),
        case("no gateway", "bridge", V4, &SOME, json!({"bridge": "br9"})),
        case("bridge v6", "bridge", V6, &SOME, json!({"isDefaultGateway": true})),
        case("bridge dual", "bridge", DUAL, &SOME, json!({"isDefaultGateway": true})),
        case("L2", "bridge", &[], &NEWEST, json!({})),
        case("hairpin", "bridge", V4, &NEWEST, json!({"isGateway": true, "hairpinMode": true})),
        case("promiscuous", "bridge", V4, &NEWEST, json!({"promiscMode": true})),
        case("mtu", "bridge", V4, &NEWEST, json!({"isGateway": true, "mtu": 1400})),
        case("mac", "bridge", V4, &NEWEST, json!({"runtimeConfig": {"mac": "c2:11:22:33:44:55"}})),
        case(
            "dns",
            "bridge",
            V4,
            &ALL,
            json!({"dns": {"nameservers": ["10.0.0.9"], "domain": "d"}}),
        ),
        case("bridge routes", "bridge", V4, &ALL, json!({"isGateway": true, "routes": routes})),
        case("ptp", "ptp", V4, &ALL, json!({"mtu": 5000})),
        case("ptp dual", "ptp", DUAL, &NEWEST, json!({})),
        case("ptp routes", "ptp", V4, &SOME, json!({"routes": [{"dst": "0.0.0.0/0"}]})),
        case("macvlan", "macvlan", V4, &ALL, json!({"master": "wire0", "routes": routes})),
        case("macvlan v6", "macvlan", V6, &SOME, json!({"master": "wire0"})),
        case("macvlan dual", "macvlan", DUAL, &SOME, json!({"master": "wire0", "mtu": 1400})),
        case("macvlan L2", "macvlan", &[], &ALL, json!({"master": "wire0", "mode": "private"})),
        case("macvlan default", "macvlan", V4, &NEWEST, json!({"mode": "vepa"})),
        case(
            "macvlan mac",
            "macvlan",
            V4,
            &NEWEST,
            json!({"master": "wire0", "mac": "c2:11:22:33:44:55", "dns": {"domain": "d"}}),
        ),
        case(
            "macvlan passthru",
            "macvlan",
            &[],
            &NEWEST,
            json!({"master": "wire0", "mode": "passthru"}),
        ),
        case("macvlan bad mtu", "macvlan", V4, &NEWEST, json!({"master": "wire0", "mtu": 1601})),
        case("macvlan bad mode", "macvlan", V4, &NEWEST, json!({"master": "wire0", "mode": "x"})),
        case("macvlan bad mac", "macvlan", V4, &NEWEST, json!({"master": "wire0", "mac": "x"})),
        case("host-local", "host-local", V4, &ALL, json!({})),
        case("host-local dual", "host-local", DUAL, &ALL, json!({"routes": routes})),
        case("host-local v6", "host-local", V6, &ALL, json!({})),
        case("host-local bad", "host-local", &["10.1.2.3/24"], &SOME, json!({})),
        case("host-local small", "host-local", &["10.1.2.0/31"], &SOME, json!({})),
    ]
}

/// Cases that need kernels with VLANs.
fn cases_with_vlans() -> Vec<Case> {
    let case =
        |name, plugin, subnets, versions, keys| Case { name, plugin, subnets, keys, versions };
    let routes = json!([{"dst": "192.168.0.0/16"}, {"dst": "10.9.0.0/16", "gw": "10.1.2.9"}]);
    let vlan = json!({"master": "wire0", "vlanId": 7});
    let gateway = json!({"isDefaultGateway": true, "vlan": 100});
    vec![
        case("vlan", "vlan", V4, &SOME, json!({"master": "wire0", "vlanId": 7, "routes": routes})),
        case(
            "vlan dual",
            "vlan",
            DUAL,
            &NEWEST,
            json!({"master": "wire0", "vlanId": 7, "mtu": 1400}),
        ),
        case("vlan v6", "vlan", V6, &NEWEST, vlan.clone()),
        case(
            "vlan bad mtu",
            "vlan",
            V4,
            &NEWEST,
            json!({"master": "wire0", "vlanId": 7, "mtu": 1601}),
        ),
        case("bridge vlan", "bridge", V4, &SOME, gateway.clone()),
        case("bridge vlan dual", "bridge", DUAL, &NEWEST, gateway),
        case("bridge vlan L2", "bridge", &[], &NEWEST, json!({"vlan": 100})),
    ]
}

/// Cases that need kernels with ipvlan.
fn ipvlan_cases() -> Vec<Case> {
    let case = |name, subnets, versions, keys: Value| {
        let keys = merged(&json!({"master": "wire0"}), &keys);
        Case { name, plugin: "ipvlan", subnets, keys, versions }
    };
    let routes = json!([{"dst": "192.168.0.0/16"}, {"dst": "10.9.0.0/16", "gw": "10.1.2.9"}]);
    vec![
        case("ipvlan", V4, &ALL, json!({"routes": routes})),
        case("ipvlan dual", DUAL, &NEWEST, json!({"mode": "l2", "mtu": 1400})),
        case("ipvlan l3", V4, &NEWEST, json!({"mode": "l3"})),
        case("ipvlan l3s", V4, &NEWEST, json!({"mode": "l3s", "dns": {"domain": "d"}})),
        case("ipvlan bad mode", V4, &NEWEST, json!({"mode": "x"})),
    ]
}

/// A fresh node and container for one side's plugin.
struct Bench<'a> {
    node: Node,
    container: Container,
    side: Side<'a>,
    case: &'a Case,
    conf: Value,
}

impl<'a> Bench<'a> {
    fn new(side: Side<'a>, case: &'a Case, version: &str) -> Bench<'a> {
        let node = Node::new();
        if ["macvlan", "ipvlan", "vlan"].contains(&case.plugin) {
            wire(&node);
            node.sh("ip route add default via 10.1.2.77 dev wire1; ip link set wire0 mtu 1600");
        }
        let mut conf = json!({"name": "n", "cniVersion": version});
        let mut keys = case.keys.clone();
        if !case.subnets.is_empty() {
            conf["ipam"] = node.host_local(case.subnets);
            if let Some(routes) = keys.as_object_mut().unwrap().remove("routes") {
                conf["ipam"]["routes"] = routes;
            }
        }
        conf.as_object_mut().unwrap().extend(keys.as_object().unwrap().clone());
        Bench { node, container: Container::new(), side, case, conf }
    }

    fn call(&self, side: Side<'_>, verb: &str) -> Call {
        let call = self.node.call(self.case.plugin, verb).conf(&self.conf);
        let call = call.netns(&self.container.path());
        match side {
            Side::Ours => call,
            Side::Reference(dir) => {
                let path: PathBuf = dir.join(self.case.plugin);
                call.program(path).env("CNI_PATH", &dir.display().to_string())
            }
        }
    }

    /// The result, or the error's message.
    fn add(&self) -> String {
        let outcome = self.call(self.side, "ADD").run();
        let text = normal(&outcome.stdout, &self.node, &self.container);
        if outcome.status == Some(0) {
            return text;
        }
        let error: Value = serde_json::from_str(&text).unwrap_or_default();
        format!("error: {}", error["msg"].as_str().unwrap_or(&text))
    }

    /// Links, addresses, routes and parameters, one per line, without the documented differences.
    fn state(&self) -> String {
        let (node, container) = (&self.node, &self.container);
        let mut lines = Vec::new();
        for (place, ip) in [
            ("host", &(|args: &str| node.ip(args)) as &dyn Fn(&str) -> Value),
            ("container", &|args: &str| container.ip(args)),
        ] {
            let all = |args: &str| -> Vec<Value> { ip(args).as_array().cloned().unwrap() };
            lines.extend(all("-d addr").iter().map(|link| format!("{place} {}", link_line(link))));
            for link in all("addr") {
                let addrs = link["addr_info"].as_array().unwrap();
                let wanted = addrs.iter().filter(|addr| addr["scope"] != "link");
                lines.extend(wanted.map(|addr| format!("{place} {}", addr_line(&link, addr))));
            }
            // Both families, without the routes that the kernel adds asynchronously after DAD.
            let routes = all("route show table all");
            let checked = |route: &&Value| match word(&route["type"]).as_str() {
                "anycast" => true,
                "local" => word(&route["dst"]).contains(':'),
                _ => false,
            };
            let wanted = routes.iter().filter(|route| !checked(route));
            let wanted = wanted.map(|route| format!("{place} {}", route_line(route)));
            let link_local = |line: &String| line.contains("fe80:") || line.contains("ff00:");
            lines.extend(wanted.filter(|line| !link_local(line)));
        }
        lines.extend(self.parameters());
        let text = normal(&lines.join("\n"), node, container);
        let mut lines: Vec<String> = text.lines().map(without_differences).collect();
        lines.sort();
        lines.join("\n")
    }

    fn parameters(&self) -> Vec<String> {
        let mut lines = Vec::new();
        // Without IPv6 addresses cnibox keeps the kernel's `accept_dad`.
        let without_ipv6 = self.case.plugin == "bridge"
            && !self.container.try_sh("ip -6 addr show eth0 scope global | grep -q inet6");
        for key in ["accept_dad", "accept_ra", "disable_ipv6", "enhanced_dad"] {
            let differs = key == "accept_dad" && without_ipv6;
            if differs || !self.container.try_sh("ip link show eth0") {
                continue;
            }
            let value = self.container.sysctl(&format!("net/ipv6/conf/eth0/{key}"));
            lines.push(format!("container parameter {key}={value}"));
        }
        if ["macvlan", "ipvlan"].contains(&self.case.plugin) && !lines.is_empty() {
            // Only later releases of the reference set `ndisc_notify`.
            let value = self.container.sysctl("net/ipv4/conf/eth0/arp_notify");
            lines.push(format!("container parameter arp_notify={value}"));
        }
        for key in ["net/ipv4/ip_forward", "net/ipv6/conf/all/forwarding"] {
            lines.push(format!(
                "host parameter {key}={}",
                self.node.sh(&format!("cat /proc/sys/{key}")).trim()
            ));
        }
        for link in self.node.ip("link").as_array().unwrap() {
            let name = link["ifname"].as_str().unwrap();
            let value = self.node.sh(&format!("cat /proc/sys/net/ipv6/conf/{name}/accept_ra"));
            lines.push(format!("host parameter {name} accept_ra={}", value.trim()));
        }
        lines
    }
}

fn word(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn link_line(link: &Value) -> String {
    let flags = link["flags"].as_array().unwrap();
    let mut flags: Vec<_> = flags.iter().filter_map(Value::as_str).collect();
    // The kernel updates the carrier asynchronously.
    flags.retain(|flag| !matches!(*flag, "LOWER_UP" | "NO-CARRIER"));
    flags.sort_unstable();
    let port = &link["linkinfo"]["info_slave_data"];
    let data = &link["linkinfo"]["info_data"];
    format!(
        "link {} kind:{} mtu:{} flags:{flags:?} master {} hairpin:{} isolated:{} promiscuity:{} on:{} mode:{} queue:{}",
        word(&link["ifname"]),
        word(&link["linkinfo"]["info_kind"]),
        link["mtu"],
        word(&link["master"]),
        port["hairpin"],
        port["isolated"],
        link["promiscuity"],
        link["link_index"],
        data["mode"],
        data["bcqueuelen"]
    )
}

fn addr_line(link: &Value, addr: &Value) -> String {
    let flag = |name: &str| if addr[name] == true { format!(" {name}") } else { String::new() };
    let brd = if addr["broadcast"].is_null() { "" } else { " brd" };
    let flags = ["nodad", "noprefixroute", "tentative", "dadfailed"].map(flag).concat();
    format!(
        "addr {}/{} dev {} scope:{}{brd}{flags}",
        word(&addr["local"]),
        addr["prefixlen"],
        word(&link["ifname"]),
        word(&addr["scope"])
    )
}

fn route_line(route: &Value) -> String {
    let keys = ["type", "dst", "gateway", "dev", "table", "protocol", "scope", "prefsrc", "metric"];
    let given = keys.iter().filter(|key| !route[**key].is_null());
    let words: Vec<String> = given.map(|key| format!("{key} {}", word(&route[*key]))).collect();
    format!("route {}", words.join(" "))
}

fn without_differences(line: &str) -> String {
    let mut line = line.to_owned();
    for (start, contains, gone) in DIFFERENCES {
        if line.starts_with(start) && line.contains(contains) {
            line = line.replace(gone, "");
        }
    }
    line
}

/// Later releases of the reference print results of 1.0.0 with another order of keys and without
/// empty objects, and cnibox follows them. Older versions are compared byte for byte.
fn layout(result: &str, version: &str) -> String {
    let parsed = serde_json::from_str(result).ok().filter(|_| version == "1.0.0");
    let Some(mut value): Option<Value> = parsed else { return result.to_owned() };
    let object = value.as_object_mut().unwrap();
    object.retain(|_, member| *member != json!({}));
    serde_json::to_string_pretty(&value).unwrap()
}

/// Runs a case on fresh nodes on the calling thread.
fn compare(peer: &Path, case: &Case) {
    for version in case.versions {
        let what = format!("{} {version}: left ours, right the reference's", case.name);
        let run = |side| {
            let bench = Bench::new(side, case, version);
            let result = bench.add();
            (result, bench.state())
        };
        let ((ours, our_state), (theirs, their_state)) =
            (run(Side::Ours), run(Side::Reference(peer)));
        assert_same(&what, &layout(&ours, version), &layout(&theirs, version));
        assert_same(&what, &our_state, &their_state);
    }
}

/// Each implementation deletes the other's attachments.
fn delete_across(peer: &Path, case: &Case) {
    for (adds, deletes) in
        [(Side::Ours, Side::Reference(peer)), (Side::Reference(peer), Side::Ours)]
    {
        let bench = Bench::new(adds, case, "1.0.0");
        let before = bench.container.snapshot(&bench.node);
        let result = bench.add();
        if result.starts_with("error") {
            continue;
        }
        bench.call(deletes, "DEL").ok();
        let name = case.name;
        assert_eq!(bench.node.leases("n"), [""; 0], "{name}");
        // The reference never deletes the gateway interface of a VLAN.
        let stays = case.plugin == "bridge" && !case.keys["vlan"].is_null();
        if !(stays && matches!(deletes, Side::Reference(_))) {
            no_veth_remains(&bench.node);
        }
        crate::support::node::assert_unchanged(&before, &bench.container.snapshot(&bench.node));
        bench.call(adds, "DEL").ok();
    }
}

/// Runs each case on its own thread, because the reference waits for seconds.
fn each_case(cases: &[Case], work: impl Fn(&Case) + Sync) {
    let failed: Vec<&str> = thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> =
            cases.iter().map(|case| (case.name, scope.spawn(move || work(case)))).collect();
        threads.into_iter().filter_map(|(name, t)| t.join().is_err().then_some(name)).collect()
    });
    assert!(failed.is_empty(), "see above: {failed:?}");
}

#[test]
fn results_and_kernel_state_equal_the_references() {
    let Some(peer) = compare::peer("parity of results") else { return };
    each_case(&cases(), |case| compare(&peer, case));
}

#[test]
fn each_deletes_what_the_other_added() {
    let Some(peer) = compare::peer("parity of DEL") else { return };
    each_case(&cases(), |case| delete_across(&peer, case));
}

#[test]
fn bridge_vlans_equal_the_references() {
    needs!(lane::VLAN, lane::BRIDGE_VLAN);
    let Some(peer) = compare::peer("parity of VLANs") else { return };
    each_case(&cases_with_vlans(), |case| {
        compare(&peer, case);
        delete_across(&peer, case);
    });
}

#[test]
fn ipvlan_state_equals_the_references() {
    needs!(lane::IPVLAN);
    let Some(peer) = compare::peer("parity of ipvlan") else { return };
    each_case(&ipvlan_cases(), |case| {
        compare(&peer, case);
        delete_across(&peer, case);
    });
}

#[test]
fn loopback_state_equals_the_references() {
    let Some(peer) = compare::peer("parity of loopback") else { return };
    let case = Case {
        name: "loopback",
        plugin: "loopback",
        subnets: &[],
        keys: json!({}),
        versions: &ALL,
    };
    for version in ALL {
        let run = |side| {
            let bench = Bench::new(side, &case, version);
            let result = bench.add();
            (result, bench.container.sh("ip -o addr show lo"))
        };
        let (ours, theirs) = (run(Side::Ours), run(Side::Reference(&peer)));
        // The reference uses the layout of 1.0.0 for every version.
        if version == "1.0.0" {
            assert_same(version, &layout(&ours.0, version), &layout(&theirs.0, version));
        }
        assert_same(version, &ours.1, &theirs.1);
    }
}
