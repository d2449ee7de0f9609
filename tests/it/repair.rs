//! `cnibox repair`: restores lost state of live attachments and keeps manual changes.

use std::time::{Duration, Instant};
use std::{fs, thread};

use cnibox::testing::netlink::Netlink;
use serde_json::{Value, json};

use crate::doctor::Ward;
use crate::lane::{self, needs};
use crate::support::node::{Running, eventually};
use crate::support::traffic::Place;

const ONE_SECOND: Duration = Duration::from_secs(1);

/// A bridge network with these keys and its containers.
fn ward(keys: &Value, pods: usize) -> Ward {
    let base = json!({"type": "bridge", "bridge": "cni0", "isDefaultGateway": true, "ipMasq": true,
        "ipMasqBackend": "nftables", "ipam": {"type": "host-local", "dataDir": "LEASES",
        "ranges": [[{"subnet": "10.88.0.0/16"}], [{"subnet": "fd00:88::/64"}]]}});
    let portmap =
        json!({"type": "portmap", "backend": "nftables", "capabilities": {"portMappings": true}});
    attached(&json!([crate::support::net::merged(&base, keys), portmap]), pods)
}

fn attached(plugins: &Value, pods: usize) -> Ward {
    let ward = Ward::sized(plugins, pods);
    (0..pods).for_each(|pod| ward.attach(pod));
    ward
}

fn ptp() -> Ward {
    let ipam = json!({"type": "host-local", "dataDir": "LEASES", "routes": [{"dst": "0.0.0.0/0"}],
        "ranges": [[{"subnet": "10.88.0.0/16"}]]});
    attached(&json!([{"type": "ptp", "ipam": ipam}]), 2)
}

impl Ward {
    /// The output of `repair`, which must succeed.
    fn repair(&self) -> String {
        self.cnibox(&["repair"]).printed()
    }

    #[track_caller]
    fn assert_healthy(&self) {
        assert_eq!(self.doctor().1, format!("healthy: {} attachments\n", self.pods.len()));
        assert_eq!(self.repair(), "nothing was missing\n");
    }

    /// The host end of the first container's veth pair.
    fn port(&self) -> String {
        let text = self.pods[0].sh("ip -o link show eth0");
        let index = text.split("@if").nth(1).unwrap().split(':').next().unwrap();
        let line = self.node.sh(&format!("ip -o link | grep '^{index}: '"));
        line.split(": ").nth(1).unwrap().split('@').next().unwrap().to_owned()
    }

    fn watch(&self) -> Running {
        Running::start(&self.cnibox(&["repair", "--watch"]))
    }

    /// Whether all containers reach the gateway: one reply is enough. After a failed neighbour
    /// resolution, the kernel retries after one second.
    fn all_reach_the_gateway(&self) -> bool {
        self.pods.iter().all(|pod| pod.try_sh("ping -n -c 4 -i 0.5 -W 1 10.88.0.1"))
    }
}

/// libcni before 1.2, such as that of containerd 1.6 and 1.7 and of podman 4, caches no path of the
/// namespace; the result has it.
#[test]
fn attachments_of_older_runtimes_are_checked_and_repaired() {
    let ward = ward(&json!({}), 2);
    for pod in 0..2 {
        let file = ward.node.path("cache/results").join(format!("pods-pod{pod}-eth0"));
        let mut cached: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        assert!(cached.as_object_mut().unwrap().remove("netns").is_some());
        fs::write(&file, cached.to_string()).unwrap();
        // The clock was wrong at the time of ADD; the pair shows that the container is the same.
        ward.node.sh(&format!("touch -d '1 hour ago' {}", file.display()));
    }
    ward.assert_healthy();
    ward.node.sh("ip link del cni0");
    let text = ward.repair();
    assert!(text.contains("restored: bridge \"cni0\"\n"), "{text}");
    ward.assert_healthy();
    assert!(ward.all_reach_the_gateway());
}

#[test]
fn attachments_of_multus_are_repaired() {
    let ward = ward(&json!({}), 2);
    let results = ward.node.path("cache/results").display().to_string();
    ward.node.sh(&format!("mkdir /var/lib/cni/multus; cp -r {results} /var/lib/cni/multus"));
    ward.node.sh("ip link del cni0");
    let repair = ["repair", "--plugin-path", &ward.node.bin().display().to_string()];
    let text = ward.node.cnibox(&repair).printed();
    assert!(text.contains("restored: bridge \"cni0\"\n"), "{text}");
    ward.assert_healthy();
}

#[test]
fn repair_restores_a_deleted_bridge_with_its_ports() {
    for keys in [
        json!({}),
        json!({"hairpinMode": true, "macspoofchk": true, "mtu": 1400}),
        json!({"promiscMode": true, "portIsolation": true}),
    ] {
        let ward = ward(&keys, 2);
        ward.assert_healthy();
        ward.node.sh("ip link del cni0");
        assert!(!ward.pods[0].pings("10.88.0.1"));
        let text = ward.repair();
        for what in ["bridge \"cni0\"", "address 10.88.0.1/16 of \"cni0\"", "address fd00:88::1/64"]
        {
            assert!(text.contains(&format!("restored: {what}")), "{text}");
        }
        assert_eq!(text.matches("restored: port ").count(), 2, "{text}");
        assert!(ward.all_reach_the_gateway(), "{keys}");
        assert!(ward.pods[0].pings("fd00:88::1"));
        assert_eq!(ward.pods[0].pings("10.88.0.3"), keys["portIsolation"].is_null(), "{keys}");
        ward.assert_healthy();
        let mtu = keys["mtu"].as_u64().unwrap_or(1500);
        assert_eq!(ward.node.ip("link show cni0")[0]["mtu"], mtu);
    }
}

/// Nomad starts each file of its plugin directory without arguments, to see which plugin it is.
#[test]
fn a_plugin_link_without_arguments_only_prints() {
    let ward = ward(&json!({}), 1);
    ward.node.sh("nft flush ruleset; ip link del cni0");
    let before = ward.node.snapshot();
    for applet in cnibox::testing::APPLETS {
        let link = ward.node.tool(applet.name, &[]);
        let outcome = link.clone().run();
        assert_eq!(outcome.status, Some(0), "{}: {outcome:?}", applet.name);
        let about = format!("CNI {} plugin v", applet.name);
        assert!(outcome.stderr.starts_with(&about), "{outcome:?}");
        assert!(outcome.stderr.contains("CNI protocol versions supported: "), "{outcome:?}");
        if applet.kind == cnibox::testing::AppletKind::Tool {
            let outcome = link.env("CNI_COMMAND", "ADD").run();
            let error: Value = serde_json::from_str(&outcome.stdout).unwrap();
            let expected = format!("\"{}\" is a tool, not a plugin", applet.name);
            assert_eq!((outcome.status, &error["msg"]), (Some(1), &json!(expected)));
        }
    }
    assert!(before == ward.node.snapshot());
    assert!(ward.repair().contains("restored: "), "a command that is named does its work");
}

#[test]
fn repair_restores_vlans_of_ports() {
    needs!(lane::BRIDGE_VLAN);
    let ward = ward(&json!({"vlan": 100, "preserveDefaultVlan": false}), 2);
    ward.assert_healthy();
    ward.node.sh("ip link del cni0");
    ward.repair();
    assert!(ward.all_reach_the_gateway() && ward.pods[0].pings("10.88.0.3"));
    ward.assert_healthy();
    ward.node.sh(&format!("bridge vlan del dev {} vid 100", ward.port()));
    assert!(!ward.pods[0].pings("10.88.0.3"));
    ward.repair();
    assert!(ward.pods[0].pings("10.88.0.3"));
    ward.assert_healthy();
}

#[test]
fn repair_restores_each_lost_object() {
    let ward = ward(&json!({"hairpinMode": true, "macspoofchk": true}), 2);
    let port = ward.port();
    for (damage, what) in [
        (format!("ip link set {port} nomaster"), format!("port \"{port}\" of bridge \"cni0\"")),
        (format!("ip link set {port} down"), format!("port \"{port}\": it is down")),
        (
            format!("bridge link set dev {port} hairpin off"),
            format!("hairpin mode of port \"{port}\""),
        ),
        (
            format!("sysctl -qw net.ipv6.conf.{port}.accept_ra=1"),
            format!("sysctl net/ipv6/conf/{port}/accept_ra"),
        ),
        ("ip link set cni0 down".to_owned(), "bridge \"cni0\": it is down".to_owned()),
        (
            "ip addr del 10.88.0.1/16 dev cni0".to_owned(),
            "address 10.88.0.1/16 of \"cni0\"".to_owned(),
        ),
        ("sysctl -qw net.ipv4.ip_forward=0".to_owned(), "sysctl net/ipv4/ip_forward".to_owned()),
        (
            "sysctl -qw net.ipv4.conf.cni0.route_localnet=0".to_owned(),
            "sysctl net/ipv4/conf/cni0/route_localnet".to_owned(),
        ),
        (
            format!("nsenter --net={} ip route del default", ward.pods[0].path()),
            "route 0.0.0.0/0 via 10.88.0.1 dev eth0 in the container".to_owned(),
        ),
    ] {
        ward.node.sh(&damage);
        let dry = ward.cnibox(&["repair", "--dry-run"]).run();
        assert_eq!(dry.status, Some(1), "{damage}: {dry:?}");
        assert!(dry.stdout.contains(&format!("missing: {what}\n")), "{damage}: {dry:?}");
        let text = ward.repair();
        assert_eq!(text, dry.stdout.replace("missing: ", "restored: "), "{damage}");
        ward.assert_healthy();
    }
    assert!(ward.all_reach_the_gateway());
}

#[test]
fn repair_restores_host_routes_and_addresses_of_ptp() {
    let ward = ptp();
    let port = ward.port();
    for damage in [
        "ip link set PORT down",
        "ip route flush dev PORT",
        "ip addr flush dev PORT",
        "nsenter --net=NETNS ip route flush dev eth0",
    ] {
        let damage = damage.replace("PORT", &port).replace("NETNS", &ward.pods[0].path());
        ward.node.sh(&damage);
        assert!(ward.repair().contains("restored: "), "{damage}");
        assert!(ward.pods[0].pings("10.88.0.1") && ward.pods[0].pings("10.88.0.3"), "{damage}");
        ward.assert_healthy();
    }
}

/// A card whose driver restarts takes its children with it: repair makes such a child again.
fn child_is_made_again(kind: &str, keys: &Value) {
    let ipam = json!({"type": "host-local", "dataDir": "LEASES",
        "ranges": [[{"subnet": "10.88.0.0/16", "rangeStart": "10.88.0.2"}], [{"subnet": "fd00:88::/64"}]],
        "routes": [{"dst": "10.99.0.0/16"}]});
    let base = json!({"type": kind, "master": "card0", "ipam": ipam});
    let plugins = json!([crate::support::net::merged(&base, keys)]);
    let ward = Ward::sized(&plugins, 1);
    let plug = || {
        ward.node.sh(
            "ip link add card0 address 02:00:00:00:00:ca type veth peer name far0; ip link set card0 up; ip link set far0 up
                      ip addr add 10.88.0.1/16 dev far0",
        );
        if kind == "vlan" {
            ward.node.sh("ip addr flush dev far0; ip link add link far0 name far0.5 type vlan id 5
                          ip link set far0.5 up; ip addr add 10.88.0.1/16 dev far0.5");
        }
    };
    plug();
    ward.attach(0);
    let pod = &ward.pods[0];
    let shown = || {
        let mut link = pod.ip("-d link show eth0")[0].clone();
        let attributes = link.as_object_mut().unwrap();
        attributes.retain(|key, _| ["address", "mtu", "linkinfo"].contains(&key.as_str()));
        (link, pod.sh("ip -4 -o addr show eth0"), pod.sh("ip route"))
    };
    let (before, is_layer3) = (shown(), keys.get("ipam").is_none());
    ward.node.sh("ip link del card0");
    assert!(!pod.try_sh("ip link show eth0"), "{kind}");
    assert_eq!(ward.cnibox(&["repair"]).run().status, Some(1), "{kind}: there is no master");
    plug();
    let text = ward.repair();
    assert!(text.starts_with("restored: interface \"eth0\" in "), "{kind}: {text}");
    let after = shown();
    assert_eq!((&after.0, &after.2), (&before.0, &before.2), "{kind}");
    assert_eq!(after.1.contains("10.88.0.2/16"), is_layer3, "{kind}: {}", after.1);
    if is_layer3 {
        assert!(pod.reaches("10.88.0.1"), "{kind}");
    }
    assert_eq!(ward.repair(), "nothing was missing\n");
    // A renamed interface is not missing.
    pod.sh("ip link set eth0 down; ip link set eth0 name other; ip link set other up");
    let text = ward.repair();
    assert!(text.starts_with("left alone: interface \"eth0\" in "), "{kind}: {text}");
    assert!(!pod.try_sh("ip link show eth0"), "{kind}");
}

#[test]
fn repair_makes_a_macvlan_again() {
    child_is_made_again("macvlan", &json!({"mode": "private", "mtu": 1400}));
    child_is_made_again("macvlan", &json!({"ipam": null, "mac": "02:00:00:00:00:77"}));
}

/// A container that ended without DEL, and a later one at the same path: nothing proves whose
/// namespace it is, and the interface of the first does not belong into that of the second.
#[test]
fn repair_makes_no_interface_where_another_container_may_be() {
    let ward = Ward::sized(&json!([{"type": "macvlan", "master": "card0"}]), 1);
    ward.node.sh("ip link add card0 type veth peer name far0; ip link set card0 up");
    ward.attach(0);
    let pod = &ward.pods[0];
    pod.sh("ip link del eth0");
    let (path, conf) = (pod.path(), ward.node.path("net.d").display().to_string());
    let add = ["cnitool", "add", "pods", &path, "--container-id", "later", "--conf-dir", &conf];
    ward.cnibox(&add).printed();
    pod.sh("ip link del eth0");
    let text = ward.repair();
    assert!(text.starts_with("left alone: interface \"eth0\" in "), "{text}");
    assert!(!pod.try_sh("ip link show eth0"));
}

/// A container that ended without DEL, and at its path the namespace of another one, which nothing
/// has attached: a mount, and a process with the number of an earlier one.
#[test]
fn repair_changes_nothing_in_a_later_namespace_at_the_path() {
    let ward = Ward::sized(&json!([{"type": "macvlan", "master": "card0"}]), 0);
    ward.node.sh("ip link add card0 type veth peer name far0; ip link set card0 up");
    let below = |name: &str| ward.node.path(name).display().to_string();
    let conf = below("net.d");
    let attach = |id: &str, path: &str| {
        let words = ["cnitool", "add", "pods", path, "--container-id", id, "--conf-dir", &conf];
        ward.cnibox(&words).printed();
        below(&format!("cache/results/pods-{id}-eth0"))
    };
    let holder = Running::start(&ward.node.tool("", &["-n", "sleep", "1000"]).program("unshare"));
    let of_process = format!("/proc/{}/ns/net", holder.id());
    let is_apart = || fs::read_link(&of_process).ok() != fs::read_link("/proc/self/ns/net").ok();
    eventually("unshare", is_apart);
    let links = |path: &str| ward.node.sh(&format!("nsenter --net={path} ip -o link"));
    let lose = |path: &str| ward.node.sh(&format!("nsenter --net={path} ip link del eth0"));
    let (named, restored) = (&*below("pod"), "restored: interface \"eth0\" in ");
    let make = || ward.node.sh(&format!("touch {named} && unshare --net={named} true"));

    make();
    attach("earlier", named);
    ward.node.sh(&format!("umount {named}; sleep 0.02"));
    make();
    let process = attach("process", &of_process);
    lose(&of_process);
    assert_eq!(ward.repair(), format!("{restored}{of_process}\n"));
    lose(&of_process);
    // As after a boot, whose processes have the same numbers.
    ward.node.sh(&format!("touch -d '1 hour ago' {process}"));
    assert_eq!(ward.repair(), "nothing was missing\n");
    for path in [named, &of_process] {
        assert!(!links(path).contains("eth0"), "{path}");
    }
    // The namespace of its own ADD.
    attach("same", named);
    lose(named);
    assert_eq!(ward.repair(), format!("{restored}{named}\n"));
}

#[test]
fn repair_makes_an_ipvlan_and_a_vlan_again() {
    needs!(lane::IPVLAN, lane::VLAN);
    child_is_made_again("ipvlan", &json!({"mode": "l2"}));
    child_is_made_again("vlan", &json!({"vlanId": 5}));
}

#[test]
fn repair_keeps_manual_changes() {
    let ward = ward(&json!({}), 2);
    let (port, inside) = (ward.port(), format!("nsenter --net={} ", ward.pods[0].path()));
    for (change, left) in [
        (
            format!("ip link add br1 type bridge; ip link set {port} master br1"),
            "is a port of another link",
        ),
        (
            "ip addr del 10.88.0.1/16 dev cni0; ip addr add 10.88.0.9/16 dev cni0".to_owned(),
            "address 10.88.0.1/16 of \"cni0\": it has 10.88.0.9/16",
        ),
        (
            format!("{inside}ip route replace default via 10.88.0.3"),
            "the container has \"0.0.0.0/0 via 10.88.0.3\"",
        ),
        (
            format!(
                "{inside}ip route del 10.88.0.0/16; {inside}ip rule add from 10.88.0.2 lookup 7"
            ),
            "the container has policy rules",
        ),
    ] {
        ward.node.sh(&change);
        let before = (ward.node.snapshot(), ward.pods[0].snapshot(&ward.node));
        let text = ward.repair();
        assert!(
            text.lines().any(|line| line.starts_with("left alone: ") && line.contains(left)),
            "{text}"
        );
        assert!(!text.contains("restored: "), "{text}");
        assert!(before == (ward.node.snapshot(), ward.pods[0].snapshot(&ward.node)), "{change}");
    }
}

/// A container may have changed the MAC of its interface since ADD.
#[test]
fn repair_does_not_allow_a_mac_that_a_container_chose() {
    let ward = ward(&json!({"macspoofchk": true}), 1);
    let (port, allowed) =
        (ward.port(), || ward.node.sh("nft list set bridge cnibox_spoof allowed"));
    let before = allowed();
    ward.pods[0].sh("ip link set eth0 address 02:00:00:00:00:99");
    ward.node.sh(&format!("ip link set {port} nomaster"));
    assert!(ward.repair().contains(&format!("restored: port \"{port}\"")));
    assert_eq!(allowed(), before);
}

#[test]
fn repair_allows_the_mac_of_the_result_only() {
    let ipam = json!({"type": "host-local", "dataDir": "LEASES", "ranges": [[{"subnet": "10.88.0.0/16"}]]});
    let bridge = json!({"type": "bridge", "bridge": "cni0", "macspoofchk": true, "ipam": ipam});
    let ward = attached(&json!([bridge, {"type": "tuning", "mac": "02:00:00:00:00:42"}]), 1);
    let port = ward.port();
    ward.node.sh(&format!("ip link set {port} nomaster"));
    assert!(ward.repair().contains(&format!("restored: port \"{port}\"")));
    let allowed = ward.node.sh("nft list set bridge cnibox_spoof allowed");
    assert!(allowed.contains("02:00:00:00:00:42"), "{allowed}");
    assert_eq!(allowed.matches(&port).count(), 1, "{allowed}");
}

/// A foreign veth pair with the name from the result is not the container's.
#[test]
fn repair_ignores_foreign_links_with_the_same_name() {
    let ward = ward(&json!({}), 1);
    let port = ward.port();
    ward.node.sh(&format!("ip link del {port}; ip link add {port} type veth peer name other"));
    ward.pods[0].sh("ip link add eth0 type veth peer name x");
    let before = ward.node.snapshot();
    ward.repair();
    assert!(before == ward.node.snapshot(), "{}", before.difference(&ward.node.snapshot()));
}

#[test]
fn watch_restores_traffic() {
    let ward = ward(&json!({}), 20);
    let watch = ward.watch();
    for damage in [
        "ip link del cni0",
        "nft flush ruleset; ip link del cni0",
        "sysctl -qw net.ipv4.ip_forward=0",
    ] {
        eventually("it sleeps", || watch.sleeps());
        ward.node.sh(damage);
        let start = Instant::now();
        eventually("traffic", || {
            ward.pods[19].try_sh("ping -n -c 1 -W 3 10.88.0.1")
                && ward.node.sh("sysctl -n net.ipv4.ip_forward").trim() == "1"
        });
        // Usually 0.1 seconds; the limit allows for concurrent tests.
        assert!(start.elapsed() < 10 * ONE_SECOND, "{damage}: {:?}", start.elapsed());
        assert!(ward.all_reach_the_gateway(), "{damage}");
        eventually("all of it", || ward.doctor().1 == "healthy: 20 attachments\n");
    }
    watch.ends();
}

/// An upgrade renames a new file over the executable: plugins are links to that file then.
#[test]
fn a_checksum_offload_is_switched_off_again() {
    let bridge = json!({"type": "bridge", "bridge": "cni0", "isGateway": true,
        "ipam": {"type": "host-local", "dataDir": "LEASES", "subnet": "10.88.0.0/16"}});
    let ward = attached(&json!([bridge, {"type": "egress", "profile": "sandbox", "serve": []}]), 2);
    ward.assert_healthy();
    let offload = || Netlink::open().unwrap().has_checksum_offload("eth0").unwrap();
    let switch_on = || Netlink::open().unwrap().set_checksum_offload("eth0", true).unwrap();
    ward.pods[0].run(switch_on);
    let what = "the transmit checksum offload of \"eth0\" behind port \"veth";
    let found = ward.doctor().1;
    assert!(found.contains(what) && found.contains("\"cnibox repair\" switches it off"), "{found}");
    let found = ward.cnibox(&["repair", "--dry-run"]).run().stdout;
    assert!(found.contains(what) && ward.pods[0].run(offload), "{found}");
    // Also if the container has renamed its interface.
    ward.pods[1].run(switch_on);
    ward.pods[1].sh("ip link set eth0 down");
    ward.pods[1].sh("ip link set eth0 name other");
    ward.pods[1].sh("ip link add eth0 type veth peer name eth1");
    let done = ward.cnibox(&["repair"]).run().stdout;
    assert!(done.contains(what) && done.contains(&what.replace("eth0", "other")), "{done}");
    assert!(!ward.pods[0].run(offload));
    ward.pods[1].sh("ip link del eth0");
    ward.pods[1].sh("ip link set other name eth0 up");
    assert!(!ward.pods[1].run(offload));
    ward.assert_healthy();
}

#[test]
fn watch_restores_the_filter_of_a_policy() {
    let ipam = json!({"type": "host-local", "dataDir": "LEASES", "ranges": [[{"subnet": "10.88.0.0/16"}]]});
    let bridge = json!({"type": "bridge", "bridge": "cni0", "isGateway": true, "ipam": ipam});
    let ward = attached(&json!([bridge, {"type": "egress", "profile": "sandbox", "serve": []}]), 1);
    let (_watch, port) = (ward.watch(), ward.port());
    thread::sleep(ONE_SECOND);
    for object in ["filter", "qdisc"] {
        ward.node.sh(&format!("tc {object} del dev {port} ingress"));
        let has_filter = || {
            ward.node.sh(&format!("tc filter show dev {port} ingress")).contains("cnibox-refused")
        };
        eventually("the filter is not restored", has_filter);
    }
    // Also if the container has renamed its interface.
    ward.pods[0]
        .sh("ip link set eth0 down; ip link set eth0 name other; ip link add eth0 type veth");
    ward.node.sh(&format!("tc qdisc del dev {port} ingress"));
    let has_filter =
        || ward.node.sh(&format!("tc filter show dev {port} ingress")).contains("cnibox-refused");
    eventually("the filter of a renamed interface is not restored", has_filter);
    for damage in [
        "ip link set cnibox-drop up",
        "ip link set cnibox-dropped nomaster",
        "ip link del cnibox-drop",
    ] {
        ward.node.sh(damage);
        eventually(damage, || {
            let links = ward
                .node
                .sh("ip -o link show cnibox-drop || :; ip -o link show master cnibox-drop || :");
            !links.lines().next().unwrap_or("UP").contains("UP") && links.contains("cnibox-dropped")
        });
    }
}

#[test]
fn watch_executes_the_new_executable_after_an_upgrade() {
    let ward = ward(&json!({}), 1);
    let bin = ward.node.bin().display().to_string();
    let replace = || {
        let own = crate::support::node::executable();
        ward.node.sh(&format!("cp {} {bin}/new && mv {bin}/new {bin}/cnibox", own.display()));
    };
    replace();
    ward.node.sh(&format!(
        "cd {bin} && for link in *; do [ $link = cnibox ] || ln -sfn cnibox $link; done"
    ));
    let watch = ward.cnibox(&["repair", "--watch"]).program(ward.node.bin().join("cnibox"));
    let watch = Running::start(&watch);
    for upgrade in [false, true, true] {
        eventually("it sleeps", || watch.sleeps());
        if upgrade {
            replace();
            assert!(watch.executable().ends_with(" (deleted)"));
        }
        ward.node.sh("ip link del cni0");
        eventually("traffic", || ward.pods[0].try_sh("ping -n -c 1 -W 3 10.88.0.1"));
        assert_eq!(watch.executable(), format!("{bin}/cnibox"));
    }
    watch.ends();
}

/// Nor does a watch that keeps the directory put its own release back.
#[test]
fn watch_does_not_downgrade_an_upgraded_directory() {
    let ward = ward(&json!({}), 1);
    let [directory, new] =
        ["plugins", "new"].map(|name| ward.node.path(name).display().to_string());
    ward.node.cnibox(&["install", &directory]).without("DESTDIR").printed();
    let program = ward.node.path("plugins/cnibox");
    let args = ["repair", "--watch", "--install", &directory, "--plugin-path", &directory];
    let cache = ward.node.path("cache").display().to_string();
    let watch = ward.node.cnibox(&[&args[..], &["--cache-dir", &cache]].concat());
    let watch = Running::start(&watch.program(&program));
    eventually("it sleeps", || watch.sleeps());
    // Another executable of the same release.
    ward.node
        .sh(&format!("cp {directory}/cnibox {new} && echo >>{new} && mv {new} {directory}/cnibox"));
    let size = || fs::metadata(&program).unwrap().len();
    let upgraded = size();
    eventually("it is the new one", || watch.executable() == format!("{directory}/cnibox"));
    eventually("it sleeps", || watch.sleeps());
    ward.node.sh(&format!("rm {directory}/portmap; ip link del cni0"));
    eventually("the directory is kept", || program.with_file_name("portmap").exists());
    eventually("traffic", || ward.pods[0].try_sh("ping -n -c 1 -W 3 10.88.0.1"));
    assert_eq!(size(), upgraded, "the new one stays");
    // What is no cnibox is not executed.
    ward.node.sh(&format!("cp /bin/true {new} && mv {new} {directory}/cnibox"));
    eventually("it is healed", || size() == upgraded);
    watch.ends();
}

/// The watch backs off if another process keeps removing the restored state.
#[test]
fn watch_backs_off_if_another_process_undoes_repairs() {
    let ward = ward(&json!({}), 1);
    let log = ward.node.path("log");
    let watch = ward.cnibox(&["repair", "--watch"]);
    let mut watch = watch.command().stdout(fs::File::create(&log).unwrap()).spawn().unwrap();
    let end = Instant::now() + 6 * ONE_SECOND;
    while Instant::now() < end {
        drop(std::process::Command::new("ip").args(["link", "del", "cni0"]).output().unwrap());
        thread::sleep(Duration::from_millis(5));
    }
    let restored = fs::read_to_string(&log).unwrap().matches("restored: bridge").count();
    watch.kill().unwrap();
    watch.wait().unwrap();
    // Without pauses there would be a hundred.
    assert!((2..=20).contains(&restored), "{restored}");
}

/// Measures the figures of docs/operator.md.
#[test]
#[ignore = "takes long; prints figures"]
fn repair_of_500_containers_is_measured() {
    let ward = ward(&json!({"macspoofchk": true}), 500);
    for round in 0..5 {
        ward.node.sh("nft flush ruleset; iptables -F; ip link del cni0");
        let start = Instant::now();
        ward.repair();
        let restored = start.elapsed();
        for pod in [0, 250, 499] {
            let reaches = || ward.pods[pod].try_sh("ping -n -c 1 -W 0.2 10.88.0.1");
            eventually("traffic", reaches);
            println!("repair {round}: {restored:?}, traffic of {pod} after {:?}", start.elapsed());
        }
    }
    let start = Instant::now();
    ward.assert_healthy();
    println!("doctor and a repair of what is whole: {:?}", start.elapsed());
    let watch = ward.watch();
    for round in 0..5 {
        thread::sleep(5 * ONE_SECOND);
        ward.node.sh("nft flush ruleset; iptables -F; ip link del cni0");
        let start = Instant::now();
        eventually("traffic", || ward.pods[499].try_sh("ping -n -c 1 -W 0.05 10.88.0.1"));
        println!("watch {round}: traffic after {:?}", start.elapsed());
    }
    watch.ends();
}
