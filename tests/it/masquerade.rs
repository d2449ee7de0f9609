//! `ipMasq` of bridge and ptp with every back end: the visible source address, remaining state, and
//! DEL across cnibox and the reference.

mod except;
mod overlap;

use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::net::{Net, merged};
use crate::support::node::{Call, Container, Node, exists};
use crate::support::traffic::Place;

/// The addresses of the host on the external network, and of the external machine.
const HOST: [&str; 2] = ["192.0.2.1", "2001:db8:ff::1"];
const OUTSIDE: [&str; 2] = ["192.0.2.2", "2001:db8:ff::2"];

/// `ipMasqBackend`, and the iptables variant.
const BACKENDS: [(&str, &str); 3] =
    [("nftables", ""), ("iptables", "iptables-nft"), ("iptables", "iptables-legacy")];

/// A network with a back end, on a node with an external network.
struct Masq<'n> {
    net: Net<'n>,
    path: String,
}

impl<'n> Masq<'n> {
    fn new(node: &'n Node, plugin: &'static str, (key, flavour): (&str, &str)) -> Masq<'n> {
        let ipam = node.host_local(&["10.1.2.0/24", "2001:db8:1::/64"]);
        let gateway = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
        let keys = json!({"ipMasq": true, "ipMasqBackend": key, "bridge": "br0",
                          "isGateway": true, "ipam": merged(&ipam, &json!({"routes": gateway}))});
        let net = Net::new(node, plugin, "1.1.0", &keys);
        let path = std::env::var("PATH").unwrap();
        let path =
            if flavour.is_empty() { path } else { format!("{}:{path}", flavoured(node, flavour)) };
        Masq { net, path }
    }

    /// The same network with other keys.
    fn with(&self, keys: &Value) -> Masq<'n> {
        Masq { net: self.net.with(keys), path: self.path.clone() }
    }

    fn call(&self, verb: &str, id: &str, netns: &str) -> Call {
        self.net.call(verb, id).netns(netns).env("PATH", &self.path)
    }

    #[track_caller]
    fn add(&self, id: &str, container: &Container) -> Value {
        self.call("ADD", id, &container.path()).result()
    }

    /// DEL without namespace and `prevResult`.
    #[track_caller]
    fn del(&self, id: &str) {
        self.call("DEL", id, "").ok();
    }
}

/// The kernel cuts comments of iptables rules, which have the names of network and container.
#[test]
fn long_names_are_recognised() {
    for backend in BACKENDS {
        let (node, container) = (Node::new(), Container::new());
        let name = format!("my_project.{}-net_default", "x".repeat(190));
        let id = format!("default-{}", "ab".repeat(32));
        let masq = Masq::new(&node, "bridge", backend).with(&json!({"name": name}));
        let prev = masq.add(&id, &container);
        let rules = || node.sh("nft list ruleset; iptables-legacy-save -t nat | sed 's/^[#:].*//'");
        let before = rules();
        let check = masq.with(&json!({"prevResult": prev}));
        check.call("CHECK", &id, &container.path()).ok();
        masq.call("STATUS", "", "").without("CNI_CONTAINERID").ok();
        let repair = node.cnibox(&["repair"]).env("PATH", &masq.path);
        repair.printed();
        assert_eq!(rules(), before, "{backend:?}");
        masq.del(&id);
        assert!(!rules().contains("10.1.2."), "{backend:?}: {}", rules());
    }
}

/// The programs are gone at DEL: a warning, and the next DEL with them deletes the rules.
#[test]
fn del_names_rules_that_only_iptables_legacy_could_delete() {
    let (node, container) = (Node::new(), Container::new());
    let masq = Masq::new(&node, "ptp", BACKENDS[2]);
    masq.add("c1", &container);
    let program = "$(readlink -f /usr/sbin/iptables-legacy)";
    let copy = node.path("copy").display().to_string();
    node.sh(&format!("cp {program} {copy}"));
    let rules = || node.sh(&format!("{copy} iptables-save -t nat"));
    assert!(rules().contains("10.1.2.2"));
    node.sh(&format!("mount --bind /dev/null {program}"));
    let told = masq.call("DEL", "c1", "").run();
    let chain = "stay in chain CNI-";
    assert!(told.status == Some(0) && told.stderr.matches(chain).count() == 1, "{told:?}");
    assert!(rules().contains("10.1.2.2"));
    node.sh(&format!("umount {program}"));
    let told = masq.call("DEL", "c1", "").run();
    assert_eq!((told.status, &*told.stderr), (Some(0), ""));
    assert!(!rules().contains("10.1.2.2"), "{}", rules());
}

/// A directory in which `iptables` and its companions are those of `flavour`.
pub(crate) fn flavoured(node: &Node, flavour: &str) -> String {
    let dir = node.path(flavour);
    std::fs::create_dir_all(&dir).unwrap();
    for family in ["iptables", "ip6tables"] {
        for program in ["", "-save", "-restore"] {
            let target = format!("/usr/sbin/{}{program}", flavour.replace("iptables", family));
            assert!(exists(&target), "{target} is missing: install the package \"iptables\"");
            let link = dir.join(format!("{family}{program}"));
            if !exists(&link) {
                symlink(target, link).unwrap();
            }
        }
    }
    dir.display().to_string()
}

/// A machine next to the host without a route back to the containers.
pub(crate) fn outside(node: &Node) -> Container {
    let outside = Container::new();
    node.sh("ip link add out0 type veth peer name peer0");
    node.sh(&format!("ip link set peer0 netns {}", outside.path()));
    node.sh("ip addr add 192.0.2.1/24 dev out0; ip addr add 2001:db8:ff::1/64 dev out0 nodad; ip link set out0 up");
    outside.sh("ip link set lo up");
    outside.sh("ip addr add 192.0.2.2/24 dev peer0");
    outside.sh("ip addr add 2001:db8:ff::2/64 dev peer0 nodad");
    outside.sh("ip link set peer0 up");
    outside
}

/// The source address that `server` sees when `client` sends to its address `ip`. Several packets
/// are sent, because the kernel may still be resolving neighbours.
#[track_caller]
pub(crate) fn seen(client: &impl Place, server: &impl Place, ip: &str) -> String {
    let ip: IpAddr = ip.parse().unwrap();
    let bind = |address: SocketAddr| UdpSocket::bind(address).unwrap();
    let far = server.within(|| bind((ip, 0).into()));
    far.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
    let any: IpAddr = if ip.is_ipv4() { "0.0.0.0" } else { "::" }.parse().unwrap();
    let near = client.within(|| bind((any, 0).into()));
    for _ in 0..10 {
        near.send_to(b"x", far.local_addr().unwrap()).unwrap();
        if let Ok((_, from)) = far.recv_from(&mut [0; 1]) {
            return from.ip().to_string();
        }
    }
    panic!("nothing came to {ip}");
}

/// All rules of both iptables variants and nftables, without counters.
fn rules(node: &Node) -> String {
    let iptables =
        "iptables-nft-save; ip6tables-nft-save; iptables-legacy-save; ip6tables-legacy-save";
    let text =
        node.sh(&format!("nft -s list ruleset 2>&1; {{ {iptables}; }} 2>&1 | grep -v '^#'; true"));
    let line = |line: &str| line.split(" [").next().unwrap_or_default().to_owned();
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// The number of lines in [`rules`] that belong to one container.
fn lines_of(node: &Node, id: &str) -> usize {
    let rules = rules(node);
    let ours = |line: &&str| {
        line.contains(&format!("id: {id}\""))
            || line.contains(&format!("id: \\\"{id}\\\""))
            || line.contains(&format!("id: \"{id}\""))
    };
    rules.lines().filter(ours).count()
}

fn each_back_end(test: impl Fn(&Node, &dyn Fn(&'static str) -> Masq<'_>)) {
    for backend in BACKENDS {
        println!("{backend:?}");
        let node = Node::new();
        // The closure's network borrows the node for `'static`.
        let node: &'static Node = Box::leak(Box::new(node));
        test(node, &|plugin| Masq::new(node, plugin, backend));
    }
}

#[test]
fn masquerading_applies_outside_of_the_subnet_only() {
    for plugin in ["bridge", "ptp"] {
        each_back_end(|node, masq| {
            let masq = masq(plugin);
            let (outside, one, two) = (outside(node), Container::new(), Container::new());
            let first = masq.add("c1", &one);
            masq.add("c2", &two);
            for (at, ips) in [("10.1.2.2", "10.1.2.3"), ("2001:db8:1::2", "2001:db8:1::3")]
                .into_iter()
                .enumerate()
            {
                assert_eq!(seen(&one, &outside, OUTSIDE[at]), HOST[at]);
                assert_eq!(seen(&two, &outside, OUTSIDE[at]), HOST[at]);
                assert_eq!(seen(&one, &two, ips.1), ips.0, "inside the subnet");
                assert_eq!(seen(&two, &one, ips.0), ips.1, "inside the subnet");
                assert!(one.reaches(OUTSIDE[at]), "answers come back");
            }
            masq.with(&json!({"prevResult": first})).call("CHECK", "c1", &one.path()).ok();
            masq.del("c1");
            masq.del("c1");
            assert_eq!(lines_of(node, "c1"), 0, "{}", rules(node));
            assert_eq!(seen(&two, &outside, OUTSIDE[0]), HOST[0], "c2 is as it was");
            let twin = Container::new();
            let before = rules(node);
            let third = masq.add("c3", &twin);
            assert_ne!(before, rules(node));
            let known = masq.with(&json!({"prevResult": third}));
            known.call("DEL", "c3", &twin.path()).ok();
            assert_eq!(before, rules(node), "DEL with prevResult");
        });
    }
}

#[test]
fn without_ip_masq_sources_are_not_changed() {
    let node = Node::new();
    let masq = Masq::new(&node, "ptp", BACKENDS[0]).with(&json!({"ipMasq": false}));
    let (outside, one) = (outside(&node), Container::new());
    masq.add("c1", &one);
    assert_eq!(seen(&one, &outside, OUTSIDE[0]), "10.1.2.2");
    assert_eq!(seen(&one, &outside, OUTSIDE[1]), "2001:db8:1::2");
    // As in the reference, an invalid back end is ignored without `ipMasq`.
    masq.with(&json!({"ipMasqBackend": "x"})).add("c2", &Container::new());
    assert_eq!(rules(&node), "");
}

#[test]
fn multicast_keeps_its_source() {
    each_back_end(|node, masq| {
        let outside = outside(node);
        let container = Container::new();
        let masq = masq("ptp");
        masq.add("c1", &container);
        // The host does not forward multicast, so it sends from the container's address itself.
        node.sh("ip addr add 10.1.2.2/32 dev out0; ip route add 239.0.0.0/8 dev out0");
        let near = UdpSocket::bind("10.1.2.2:0").unwrap();
        let group = Ipv4Addr::new(239, 1, 1, 1);
        let far = outside.run(|| {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.join_multicast_v4(&group, &"192.0.2.2".parse().unwrap()).unwrap();
            socket
        });
        far.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let port = far.local_addr().unwrap().port();
        for (target, source) in [(group, "10.1.2.2"), ("192.0.2.2".parse().unwrap(), HOST[0])] {
            near.send_to(b"x", (target, port)).unwrap();
            let (_, from) = far.recv_from(&mut [0; 1]).unwrap();
            assert_eq!(from.ip().to_string(), source, "to {target}");
        }
    });
}

#[test]
fn del_keeps_masquerading_of_other_attachments() {
    each_back_end(|node, masq| {
        let masq = masq("bridge");
        let ipam = node.host_local(&["10.7.0.0/16"]);
        let other = masq.with(&json!({"name": "net2", "ipam": ipam, "bridge": "br7"}));
        let (outside, one, two) = (outside(node), Container::new(), Container::new());
        let on_eth1 = |verb: &str, prev: &Value| {
            let known =
                masq.with(&json!({"prevResult": prev, "ipam": node.host_local(&["10.1.2.0/24"])}));
            known.call(verb, "c1", &one.path()).ifname("eth1")
        };
        masq.add("c2", &two);
        let empty = rules(node);
        let first = masq.add("c1", &one);
        let alone = rules(node);
        let second = on_eth1("ADD", &Value::Null).result();
        other.call("ADD", "c1", &one.path()).ifname("eth2").result();
        assert_eq!(seen(&one, &outside, OUTSIDE[0]), HOST[0]);
        other.call("DEL", "c1", &one.path()).ifname("eth2").ok();
        on_eth1("DEL", &second).ok();
        assert_eq!(rules(node), alone, "nothing of the subnet is left");
        assert_eq!(seen(&one, &outside, OUTSIDE[0]), HOST[0]);
        masq.with(&json!({"prevResult": first})).call("DEL", "c1", &one.path()).ok();
        assert_eq!(rules(node), empty);
        assert_eq!(seen(&two, &outside, OUTSIDE[0]), HOST[0]);
    });
}

#[test]
fn gc_removes_rules_of_stale_attachments() {
    each_back_end(|node, masq| {
        let masq = masq("bridge");
        let ipam = node.host_local(&["10.7.0.0/16"]);
        let other = masq.with(&json!({"name": "net2", "ipam": ipam, "forceAddress": true}));
        let (one, two, three) = (Container::new(), Container::new(), Container::new());
        masq.add("c1", &one);
        let wanted = rules(node);
        masq.add("c2", &two);
        other.add("c3", &three);
        let gc = |net: &Masq<'_>, valid: Value| {
            let call = net.with(&json!({"cni.dev/valid-attachments": valid}));
            call.call("GC", "", "").without("CNI_CONTAINERID").ok();
        };
        gc(&masq, json!([{"containerID": "c1", "ifname": "eth0"}]));
        assert_eq!((lines_of(node, "c2"), lines_of(node, "c1") > 0), (0, true));
        assert!(lines_of(node, "c3") > 0, "another network");
        gc(&other, json!([]));
        assert_eq!(rules(node), wanted, "the chain of the other subnet is gone, too");
    });
}

#[test]
fn check_reports_missing_rules() {
    each_back_end(|node, masq| {
        let (masq, one) = (masq("ptp"), Container::new());
        let prev = masq.add("c1", &one);
        let check = masq.with(&json!({"prevResult": prev})).call("CHECK", "c1", &one.path());
        check.ok();
        node.sh("nft flush ruleset; if grep -q nat /proc/thread-self/net/ip_tables_names; then iptables-legacy -t nat -F; fi; true");
        let error = check.error();
        let is_named = ["table inet cnibox_masquerade is gone", "is missing in iptables table nat"]
            .map(|text| error.msg.ends_with(text));
        assert!(error.code == 999 && is_named.contains(&true), "{error:?}");
    });
}

#[test]
fn check_covers_every_address_of_the_container() {
    let (node, one) = (Node::new(), Container::new());
    let masq = Masq::new(&node, "ptp", BACKENDS[0]);
    let prev = masq.add("c1", &one);
    let check = masq.with(&json!({"prevResult": prev})).call("CHECK", "c1", &one.path());
    check.ok();
    node.sh("nft delete element inet cnibox_masquerade pods6 '{ 2001:db8:1::2 }'");
    assert_eq!(
        check.error().brief(),
        (999, "2001:db8:1::2 is missing in map inet cnibox_masquerade pods6")
    );
}

#[test]
fn add_and_status_check_the_back_end() {
    let node = Node::new();
    for plugin in ["bridge", "ptp"] {
        let masq = Masq::new(&node, plugin, BACKENDS[0]);
        let status = |masq: &Masq<'_>| {
            masq.call("STATUS", "", "").without("CNI_CONTAINERID").without("CNI_NETNS")
        };
        status(&masq).ok();
        let bad = masq.with(&json!({"ipMasqBackend": "ebtables"}));
        let container = Container::new();
        bad.net.add_is_refused(&container, 7, "unknown ipmasq backend \"ebtables\"");
        assert_eq!(status(&bad).error().brief(), (50, "unknown ipmasq backend \"ebtables\""));
        let iptables = masq.with(&json!({"ipMasqBackend": "iptables"}));
        status(&iptables).ok();
        let hidden = "mount -t tmpfs none /usr/sbin && mount -t tmpfs none /sbin; exec \"$0\"";
        let error = status(&iptables).in_script(hidden).error();
        let msg = "failed to locate iptables: no iptables-restore in PATH";
        assert_eq!(error.brief(), (50, msg));
        assert!(error.details.contains("nftables"), "{}", error.details);
        // Without the key, an available back end is chosen.
        let any = masq.with(&json!({"ipMasqBackend": null}));
        status(&any).in_script(hidden).ok();
        any.call("ADD", "c1", &container.path()).in_script(hidden).result();
        assert!(node.sh("nft list tables").contains("inet cnibox_masquerade"));
        any.call("DEL", "c1", &container.path()).in_script(hidden).ok();
    }
}

/// Every rule has a comment: an iptables that cannot match comments is not chosen, and STATUS and
/// ADD say so if it is configured.
#[test]
fn an_iptables_without_comments_is_not_selected() {
    let node = Node::new();
    let lacking = |program: &str, text: &str| {
        node.script(program, &format!("case {text} in *comment*) echo 'RULE_APPEND failed (No such file or directory)' >&2; exit 4;; esac\nexit 0"));
    };
    for program in ["iptables", "ip6tables"] {
        lacking(program, "\"$*\"");
        lacking(&format!("{program}-restore"), "$(cat)");
        node.script(&format!("{program}-save"), "exit 0");
    }
    let mut masq = Masq::new(&node, "bridge", ("iptables", ""));
    masq.path = format!("{}:{}", node.bin().display(), masq.path);
    let status = |masq: &Masq<'_>| {
        masq.call("STATUS", "", "").without("CNI_CONTAINERID").without("CNI_NETNS")
    };
    let container = Container::new();
    for call in [status(&masq), masq.call("ADD", "c1", &container.path())] {
        let error = call.error();
        assert!(error.msg.contains("No such file or directory"), "{}", error.msg);
        assert!(error.details.contains("xt_comment"), "{}", error.details);
    }
    let any = masq.with(&json!({"ipMasqBackend": null}));
    status(&any).ok();
    any.add("c1", &container);
    assert!(node.sh("nft list tables").contains("inet cnibox_masquerade"));
    any.call("DEL", "c1", &container.path()).ok();
}

/// The directory of the reference plugins, if installed.
fn reference() -> Option<String> {
    let peer = std::env::var("PEER").unwrap_or_else(|_| "/usr/lib/cni".to_owned());
    if exists(Path::new(&peer).join("bridge")) {
        return Some(peer);
    }
    assert!(std::env::var_os("CNIBOX_TEST_STRICT").is_none(), "no reference plugins in {peer}");
    println!("SKIP: no reference plugins in {peer}");
    None
}

#[test]
fn each_deletes_rules_of_the_other() {
    let Some(peer) = reference() else { return };
    for plugin in ["bridge", "ptp"] {
        for flavour in ["iptables-nft", "iptables-legacy"] {
            let node = Node::new();
            let masq = Masq::new(&node, plugin, ("iptables", flavour));
            let masq = masq.with(&json!({"cniVersion": "1.0.0"}));
            let theirs =
                |call: Call| call.program(format!("{peer}/{plugin}")).env("CNI_PATH", &peer);
            let outside = outside(&node);
            // One ADD and DEL first, for the tables that remain.
            let warm = Container::new();
            masq.add("c0", &warm);
            masq.call("DEL", "c0", &warm.path()).ok();
            let forget = || node.sh(&format!("rm -rf {}", node.path("leases").display()));
            forget();
            let before = rules(&node);
            let one = Container::new();
            let prev = theirs(masq.call("ADD", "c1", &one.path())).result();
            assert_eq!(seen(&one, &outside, OUTSIDE[0]), HOST[0]);
            let reference = rules(&node);
            masq.with(&json!({"prevResult": prev})).call("CHECK", "c1", &one.path()).ok();
            masq.del("c1");
            assert_eq!(rules(&node), before, "ours after theirs");
            let two = Container::new();
            forget();
            drop(one);
            masq.add("c1", &two);
            assert_eq!(rules(&node), reference, "the rules are the same");
            theirs(masq.call("DEL", "c1", &two.path())).ok();
            assert_eq!(rules(&node), before, "theirs after ours");
        }
    }
}

/// The reference's layout on `nf_tables`, which Debian's release lacks.
#[test]
fn the_references_nftables_rules_are_removed() {
    let node = Node::new();
    let masq = Masq::new(&node, "ptp", BACKENDS[0]);
    let comment = |id: &str| {
        // The prefixes of SHA-512 of "net", and of "eth0:" plus the id.
        let hash = |text: &str| node.sh(&format!("printf %s '{text}' | sha512sum | cut -c1-16"));
        let (network, instance) = (hash("net"), hash(&format!("eth0:{id}")));
        format!("{}-{}, net: net, if: eth0, id: {id}", network.trim(), instance.trim())
    };
    let rule = |n: u8, id: &str| {
        format!(
            "ip saddr 10.1.2.{n} ip daddr != 10.1.2.0/24 masquerade comment \\\"{}\\\"",
            comment(id)
        )
    };
    let (one, two, three) = (rule(2, "c1"), rule(3, "c2"), rule(4, "c3"));
    let table = "inet cni_plugins_masquerade";
    node.sh(&format!(
        "nft \"add table {table}; add chain {table} masq_checks; add rule {table} masq_checks {one}; add rule {table} masq_checks {two}; add rule {table} masq_checks {three}\""
    ));
    masq.del("c1");
    assert_eq!([1, 2, 3].map(|n| lines_of(&node, &format!("c{n}"))), [0, 1, 1]);
    let valid = json!([{"containerID": "c3", "ifname": "eth0"}]);
    let gc = masq.with(&json!({"cni.dev/valid-attachments": valid}));
    gc.call("GC", "", "").without("CNI_CONTAINERID").ok();
    assert_eq!([1, 2, 3].map(|n| lines_of(&node, &format!("c{n}"))), [0, 0, 1]);
}

/// Runs `masquerade` in four threads simultaneously, as functions rather than processes, to hit the
/// few microseconds between reading and changing the rules; even rounds also delete. Returns the
/// errors.
fn at_once(subnet: impl Fn(usize) -> usize + Sync, meanwhile: impl Fn()) -> Vec<String> {
    use cnibox::testing::netfilter::{AttachmentId, PacketFilter, RuleBackend, masquerade};
    let (barrier, failures) = (std::sync::Barrier::new(5), std::sync::Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for n in 0..4 {
            let (barrier, failures, subnet) = (&barrier, &failures, &subnet);
            scope.spawn(move || {
                let (id, filter) = (format!("c{n}"), PacketFilter::new());
                let plain = masquerade::MasqueradeOptions::default();
                let owner = AttachmentId { network: "net", ifname: "eth0", id: &id };
                for round in 0..ROUNDS {
                    let addrs = [format!("10.1.{}.{n}/24", subnet(round)).parse().unwrap()];
                    barrier.wait();
                    let mut done = masquerade::add_addresses(
                        &filter,
                        RuleBackend::Nftables,
                        owner,
                        &addrs,
                        &plain,
                    )
                    .and_then(|()| masquerade::check_addresses(&filter, owner, &addrs, &plain));
                    if round % 2 == 0 {
                        done = done
                            .and_then(|()| masquerade::delete_addresses(&filter, owner, &addrs));
                    }
                    failures.lock().unwrap().extend(done.err().map(|e| e.to_string()));
                }
            });
        }
        for _ in 0..ROUNDS {
            barrier.wait();
            meanwhile();
        }
    });
    failures.into_inner().unwrap()
}

const ROUNDS: usize = 60;

#[test]
fn concurrent_adds_create_a_chain_once() {
    let node = Node::new();
    assert_eq!(at_once(|round| round, || ()), [""; 0]);
    let text = rules(&node);
    assert_eq!(text.matches("goto subnet-").count(), 4 * ROUNDS / 2);
    let chains = text.matches("masquerade comment").count();
    assert_eq!(chains, ROUNDS / 2, "one chain for each subnet that is in use");
    assert_eq!(text.matches("vmap @pods4").count(), 1);
}

#[test]
fn gc_does_not_disturb_concurrent_adds() {
    use cnibox::testing::netfilter::{PacketFilter, masquerade};
    let _node = Node::new();
    // GC of another network also deletes unreferenced chains.
    let gc = || {
        for _ in 0..5 {
            masquerade::remove_stale_addresses(&PacketFilter::new(), "other", &[]).unwrap();
        }
    };
    let even = at_once(|round| round % 2 * (round + 1), gc);
    assert_eq!(even, [""; 0]);
}
