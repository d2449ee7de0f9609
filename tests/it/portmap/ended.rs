//! Rules without a record, as the reference leaves them, or as they are loaded from a file after a
//! boot: the port is taken from what is proved to have no container, and from nothing else.

use serde_json::{Value, json};

use super::{ALL, Pod, Ports, Rules, mapping, reference, tcp};
use crate::support::net::Net;
use crate::support::node::{Container, Outcome, eventually};

/// The leases, in a directory that only root can write to.
const LEASES: &str = "/run/cni/leases";
/// The address of the first container.
const FIRST: &str = "10.1.2.2";

fn web() -> Value {
    json!([mapping(8080, 80, "tcp"), mapping(5353, 53, "udp")])
}

/// The bridge network; its record says where its leases are.
fn bridge(ports: &Ports, ipam: &Value) -> Value {
    json!({"name": "net", "bridge": "cni0", "isDefaultGateway": true, "ipMasq": true, "ipMasqBackend": ports.rules.key(), "ipam": ipam})
}

fn host_local() -> Value {
    json!({"type": "host-local", "dataDir": LEASES, "subnet": "10.1.2.0/24"})
}

fn attach(ports: &Ports, id: &'static str, ipam: &Value) -> Pod {
    let container = Container::new();
    let net = Net::new(&ports.node, "bridge", ports.version, &bridge(ports, ipam));
    let prev = ports.path(net.call("ADD", id).netns(&container.path())).result();
    Pod { id, container, prev }
}

fn detach(ports: &Ports, pod: &Pod, ipam: &Value) {
    let net = Net::new(&ports.node, "bridge", ports.version, &bridge(ports, ipam));
    ports.path(net.call("DEL", pod.id).netns(&pod.container.path())).ok();
}

/// Deletes what this program knows of its attachments.
fn forget(ports: &Ports) {
    ports
        .node
        .sh("rm -r /run/cni/cnibox/attachments /run/cni/cnibox/by-address /run/cni/cnibox/portmap");
}

/// A node with the ports of a container "old" that has no record.
fn with_old(rules: Rules, ipam: &Value) -> (Ports, Pod) {
    let ports = Ports::new(rules, "1.1.0");
    let old = attach(&ports, "old", ipam);
    ports.add(&old, &web());
    forget(&ports);
    (ports, old)
}

fn tool(ports: &Ports, words: &[&str]) -> Outcome {
    let [conf, cache] = ["net.d", "cache"].map(|name| ports.node.path(name).display().to_string());
    let directories = ["--data-dir", LEASES, "--conf-dir", &conf, "--cache-dir", &cache];
    ports.path(ports.node.cnibox(&[words, &directories].concat())).run()
}

#[track_caller]
fn takes_the_port(ports: &Ports, ipam: &Value) {
    let new = attach(ports, "new", ipam);
    ports.add_at_once(&new, &web());
    let state = ports.state();
    assert!(
        !state.contains("\"old\"") && !state.contains("id: old,"),
        "{:?}: {state}",
        ports.rules
    );
    assert!(tcp(&ports.node, &new.container, "10.1.2.1:8080", 80).is_some(), "{:?}", ports.rules);
}

/// A refused ADD, and a gc that leaves the port; doctor names the command with which it can be had.
#[track_caller]
fn leaves_the_port(ports: &Ports, ipam: &Value, why: &str) {
    let new = attach(ports, "new", ipam);
    let before = ports.state();
    let error = ports.call("ADD", &new, &web()).error();
    assert!(
        error.msg.starts_with("host port 8080/tcp is taken by container \"old\" (network \"net\""),
        "{error:?}"
    );
    assert!(
        error.details.ends_with("if it has ended: cnibox gc --network net --container old"),
        "{error:?}"
    );
    tool(ports, &["gc"]);
    assert_eq!(ports.state(), before, "{:?} {why}", ports.rules);
    let said = tool(ports, &["gc", "--dry-run"]).stdout;
    let line = said.lines().find(|line| {
        line.starts_with("in doubt: host ports 5353/udp, 8080/tcp of container old: ")
    });
    let line = line.unwrap_or_else(|| panic!("{said}"));
    assert!(
        line.contains(why) && line.contains("; cnibox gc --network net --container old --"),
        "{line}"
    );
    let findings = tool(ports, &["doctor"]).stdout;
    let found = findings
        .lines()
        .find(|line| line.starts_with("note: host ports 5353/udp, 8080/tcp: held by container"));
    let found = found.unwrap_or_else(|| panic!("{findings}"));
    assert!(
        found.contains(why) && found.contains("; cnibox gc --network net --container old --"),
        "{found}"
    );
    detach(ports, &new, ipam);
}

/// The reference deletes no rule at a DEL without a list of ports, and the address is released.
#[test]
fn a_port_that_leads_to_nobody_is_taken() {
    for rules in ALL {
        let (ports, old) = with_old(rules, &host_local());
        detach(&ports, &old, &host_local());
        takes_the_port(&ports, &host_local());
    }
}

#[test]
fn a_port_that_leads_to_another_container_is_taken() {
    for rules in ALL {
        let (ports, old) = with_old(rules, &host_local());
        detach(&ports, &old, &host_local());
        let at = json!({"type": "host-local", "dataDir": LEASES, "ranges": [[{"subnet": "10.1.2.0/24", "rangeStart": FIRST, "rangeEnd": FIRST}]]});
        let _other = attach(&ports, "other", &at);
        takes_the_port(&ports, &host_local());
    }
}

/// As after a boot with saved rules: the lease says whether the container is gone.
#[test]
fn the_lease_of_the_container_itself_decides() {
    for rules in ALL {
        let (ports, old) = with_old(rules, &host_local());
        let new = attach(&ports, "new", &host_local());
        let before = ports.state();
        let error = ports.call("ADD", &new, &web()).error();
        assert!(error.msg.contains("is taken by container \"old\""), "{rules:?}: {error:?}");
        tool(&ports, &["gc"]);
        assert_eq!(ports.state(), before, "{rules:?}");
        drop(old);
        eventually("its link is gone", || {
            ports.node.sh("ip -o link show type veth").lines().count() == 1
        });
        detach(&ports, &new, &host_local());
        takes_the_port(&ports, &host_local());
    }
}

#[test]
fn a_port_of_a_container_in_doubt_is_never_taken() {
    for rules in [Rules::Nftables, Rules::Iptables] {
        // The lease of another program: nothing shows whether the container lives.
        let (ports, _old) = with_old(rules, &host_local());
        ports.node.sh(&format!("rm -r {LEASES}/net/.cnibox"));
        leaves_the_port(
            &ports,
            &host_local(),
            "it has no link on the host that would show its end",
        );
        // The leases are those of another network, or there are none.
        let fixed = json!({"type": "static", "addresses": [{"address": "10.1.2.2/24"}]});
        let (ports, _old) = with_old(rules, &fixed);
        let other = json!({"type": "static", "addresses": [{"address": "10.1.2.3/24"}]});
        leaves_the_port(&ports, &other, "its network has no leases");
    }
    for (what, why) in [
        (format!("ip route add {FIRST}/32 dev cni0"), "a route to"),
        (
            format!("ip neigh add {FIRST} lladdr 02:00:00:00:00:01 dev cni0 nud stale"),
            "heard the neighbour",
        ),
        (format!("touch {LEASES}/net/{FIRST}"), "is in use"),
        (
            format!("printf 'old\\r\\neth0' > {LEASES}/net/10.1.2.99"),
            "it has a lease of another address",
        ),
    ] {
        println!("{what}");
        let (ports, old) = with_old(Rules::Iptables, &host_local());
        // A bridge without ports has no carrier, and the kernel forgets its neighbours.
        let _other = attach(&ports, "other", &host_local());
        detach(&ports, &old, &host_local());
        ports.node.sh(&what);
        leaves_the_port(&ports, &host_local(), why);
    }
}

#[test]
fn gc_removes_and_doctor_reports_rules_without_a_container() {
    for rules in ALL {
        let (ports, old) = with_old(rules, &host_local());
        let living = attach(&ports, "living", &host_local());
        ports.add(&living, &json!([mapping(8081, 80, "tcp")]));
        detach(&ports, &old, &host_local());
        let findings = tool(&ports, &["doctor"]).stdout;
        let why = "it has no lease, and nobody has 10.1.2.2";
        let found = findings.lines().find(|line| {
            line.starts_with(
                "warning: host ports 5353/udp, 8080/tcp: the rules of container \"old\"",
            )
        });
        assert!(
            found.is_some_and(|line| line.ends_with(&format!(": {why}; cnibox gc"))),
            "{rules:?}: {findings}"
        );
        let line = |word: &str| {
            format!("{word} host ports 5353/udp, 8080/tcp of container old: {why} (network net)\n")
        };
        let dry = tool(&ports, &["gc", "--dry-run"]);
        assert_eq!((dry.status, dry.stdout), (Some(1), line("would remove")), "{rules:?}");
        let done = tool(&ports, &["gc"]);
        assert_eq!((done.status, done.stdout), (Some(0), line("removed")), "{rules:?}");
        let state = ports.state();
        assert!(
            !state.contains("\"old\"") && !state.contains("id: old,") && !state.contains(FIRST),
            "{rules:?}: {state}"
        );
        assert!(tcp(&ports.node, &living.container, "10.1.2.1:8081", 80).is_some(), "{rules:?}");
        assert!(!tool(&ports, &["doctor"]).stdout.contains("host port"), "{rules:?}");
    }
}

/// What only rules name: no lease, no record, no file of a runtime's cache.
#[test]
fn gc_removes_what_a_person_names() {
    for rules in ALL {
        let fixed = json!({"type": "static", "addresses": [{"address": "10.1.2.2/24"}]});
        let (ports, old) = with_old(rules, &fixed);
        drop(old);
        let named = ["--network", "net", "--container", "old"];
        let gc = |more: &[&str]| tool(&ports, &[&["gc"], &named[..], more].concat());
        let said = |word: &str| {
            format!("{word} host ports 5353/udp, 8080/tcp of container old: named by --container, ")
        };
        let dry = gc(&["--dry-run"]);
        assert!(
            dry.status == Some(1) && dry.stdout.starts_with(&said("would remove")),
            "{rules:?}: {dry:?}"
        );
        let done = gc(&[]);
        assert!(
            done.status == Some(0) && done.stdout.starts_with(&said("removed")),
            "{rules:?}: {done:?}"
        );
        let state = ports.state();
        assert!(
            !state.contains("\"old\"") && !state.contains("id: old,") && !state.contains(FIRST),
            "{rules:?}: {state}"
        );
        for more in [&[][..], &["--json"]] {
            let nothing = gc(more);
            assert_eq!((nothing.status, &*nothing.stdout), (Some(1), ""), "{rules:?}: {nothing:?}");
        }
    }
}

/// The same with the reference's own rules.
#[test]
fn ports_of_the_reference_are_taken_if_its_container_is_gone() {
    let Some(program) = reference() else { return };
    for rules in [Rules::Iptables, Rules::Legacy] {
        let ports = Ports::new(rules, "1.0.0");
        let old = attach(&ports, "old", &host_local());
        ports.call("ADD", &old, &web()).program(&program).result();
        let living = attach(&ports, "living", &host_local());
        let other = json!([mapping(8081, 80, "tcp")]);
        ports.call("ADD", &living, &other).program(&program).result();
        ports.node.sh("rm -r /run/cni/cnibox/attachments /run/cni/cnibox/by-address");
        // A DEL without a list of ports.
        ports.call("DEL", &old, &json!([])).program(&program).run();
        detach(&ports, &old, &host_local());
        takes_the_port(&ports, &host_local());
        let next = attach(&ports, "next", &host_local());
        let error = ports.call("ADD", &next, &other).error();
        assert!(
            error.msg.contains("host port 8081/tcp is taken by container \"living\""),
            "{rules:?}: {error:?}"
        );
        tool(&ports, &["gc"]);
        assert!(tcp(&ports.node, &living.container, "10.1.2.1:8081", 80).is_some(), "{rules:?}");
    }
}
