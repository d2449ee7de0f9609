//! The reference plugin before or after cnibox: each deletes the other's objects.

use serde_json::{Value, json};

use super::{Ports, Rules, mapping, reference};

fn web() -> Value {
    json!([mapping(8080, 80, "tcp"), mapping(5353, 53, "udp")])
}

#[test]
fn each_deletes_iptables_mappings_of_the_other() {
    let Some(program) = reference() else { return };
    for rules in [Rules::Iptables, Rules::Legacy] {
        let ports = Ports::new(rules, "1.0.0");
        let pod = ports.pod("c1");
        // Debian's reference ignores the key `backend`.
        let theirs = |verb: &str| ports.call(verb, &pod, &web()).program(&program);
        theirs("ADD").result();
        theirs("DEL").ok();
        let base = ports.state();
        ports.add(&pod, &web());
        let ours = ports.state();
        theirs("DEL").ok();
        assert_eq!(ports.state(), base, "{rules:?}");
        theirs("ADD").result();
        assert_ne!(ports.state(), base);
        ports.add(&pod, &web());
        assert_eq!(ports.state(), ours, "{rules:?}: an ADD of ours replaces theirs");
        ports.del(&pod, &web());
        theirs("ADD").result();
        let keys = json!({"backend": "nftables"});
        ports.call_with("DEL", &pod, &json!([]), &keys).ok();
        assert_eq!(ports.state(), base, "{rules:?}: DEL asks nobody for the back end");
    }
}

#[test]
fn gc_removes_stale_mappings_of_the_reference() {
    let Some(program) = reference() else { return };
    let ports = Ports::new(Rules::Iptables, "1.0.0");
    let (one, two) = (ports.pod("c1"), ports.pod("c2"));
    let other = json!([mapping(8081, 80, "tcp")]);
    ports.call("ADD", &one, &web()).program(&program).result();
    let left = ports.state();
    ports.call("ADD", &two, &other).program(&program).result();
    let valid = json!([{"containerID": "c1", "ifname": "eth0"}]);
    let keys = json!({"cniVersion": "1.1.0", "cni.dev/valid-attachments": valid});
    ports.path(ports.net(&json!([]), &keys).call("GC", "")).ok();
    assert_eq!(ports.state(), left);
}

/// The tables that releases of the reference create with nftables in one family, for two
/// containers.
fn table(ports: &Ports, family: &str, addr: &str) {
    for line in [
        "add table F cni_hostport",
        "add chain F cni_hostport hostports",
        "add chain F cni_hostport hostip_hostports",
        "add chain F cni_hostport masquerading",
        "add rule F cni_hostport hostports tcp dport 8080 dnat to A:80 comment c1",
        "add rule F cni_hostport hostports tcp dport 8081 dnat to A:80 comment c2",
        "add rule F cni_hostport hostip_hostports tcp dport 1 dnat to A:80 comment c1",
        "add rule F cni_hostport masquerading F saddr B counter comment c1",
    ] {
        let line = line.replace(" F ", &format!(" {family} ")).replace('A', addr);
        let line = line.replace('B', addr.trim_matches(['[', ']']));
        ports.node.sh(&format!("nft '{line}'"));
    }
}

/// Mappings on all addresses, and on one address of each family.
fn mixed() -> Value {
    let on = |ip: &str, port: u16| {
        let mut mapping = mapping(port, 80, "tcp");
        mapping["hostIP"] = json!(ip);
        mapping
    };
    json!([
        mapping(8080, 80, "tcp"),
        on("10.1.2.1", 8081),
        on("2001:db8:1::1", 8082),
        on("0.0.0.0", 8083),
        mapping(5353, 53, "udp")
    ])
}

#[test]
fn each_checks_iptables_mappings_of_the_other() {
    let Some(program) = reference() else { return };
    for rules in [Rules::Iptables, Rules::Legacy] {
        let ports = Ports::new(rules, "1.0.0");
        let pod = ports.pod("c1");
        for keys in [json!({}), json!({"snat": false})] {
            let call = |verb: &str| ports.call_with(verb, &pod, &mixed(), &keys);
            let checks = || call("CHECK").program(&program).run();
            call("ADD").program(&program).result();
            call("CHECK").ok();
            // Some releases look for the rules of each family in both.
            let is_able = checks().status == Some(0);
            call("DEL").ok();
            call("ADD").result();
            let outcome = checks();
            assert!(!is_able || outcome.status == Some(0), "{rules:?}: {outcome:?}");
            ports.node.sh(&format!(
                "{0} -t nat -F $({0} -t nat -S | grep -o '^-N CNI-DN.*' | cut -c4-)",
                ports.node.path("flavour").join("iptables").display()
            ));
            let error = call("CHECK").error();
            assert!(error.msg.contains("is missing in iptables table nat"), "{error:?}");
            call("DEL").ok();
        }
    }
}

#[test]
fn check_accepts_nftables_mappings_of_the_reference() {
    let ports = Ports::new(Rules::Nftables, "1.1.0");
    let pod = ports.pod("c1");
    // ADD of the reference enables `route_localnet`.
    ports.node.sh("echo 1 > /proc/sys/net/ipv4/conf/cni0/route_localnet");
    table(&ports, "ip", "10.1.2.2");
    table(&ports, "ip6", "[2001:db8:1::2]");
    let both = json!([mapping(8080, 80, "tcp"), mapping(1, 80, "tcp")]);
    let one_rule = ports.call("CHECK", &pod, &both).error();
    assert!(one_rule.msg.contains("gone"), "{one_rule:?}");
    ports
        .node
        .sh("nft add rule ip cni_hostport masquerading ip saddr 127.0.0.1 counter comment c1");
    ports.call("CHECK", &pod, &both).ok();
    let more = json!([mapping(8080, 80, "tcp"), mapping(1, 80, "tcp"), mapping(2, 80, "tcp")]);
    let error = ports.call("CHECK", &pod, &more).error();
    assert!(error.msg.contains("gone"), "{error:?}");
}

#[test]
fn the_references_nftables_rules_are_deleted_by_container() {
    let ports = Ports::new(Rules::Nftables, "1.1.0");
    let pod = ports.pod("c1");
    table(&ports, "ip", "10.1.2.2");
    table(&ports, "ip6", "[2001:db8:1::2]");
    ports.del(&pod, &json!([]));
    let state = ports.state();
    assert!(!state.contains("c1"), "{state}");
    assert_eq!(state.matches("comment \"c2\"").count(), 2, "{state}");
}

/// The rules that iptables-save prints are those of the reference; iptables finds each of them and
/// deletes it.
#[test]
fn rules_equal_the_references() {
    let Some(program) = reference() else { return };
    let ports = Ports::new(Rules::Iptables, "1.0.0");
    let pod = ports.pod("c1");
    let save = || {
        let text = ports.node.sh("iptables-nft-save -t nat; ip6tables-nft-save -t nat");
        // Without the counters of chains.
        let of_chain = |line: &str| line.split(" [").next().unwrap().to_owned();
        let shown =
            |line: &str| if line.starts_with(':') { of_chain(line) } else { line.to_owned() };
        let lines = text.lines().filter(|line| !line.starts_with('#')).map(shown);
        lines.collect::<Vec<_>>().join("\n")
    };
    let many: Vec<Value> = (0..16).map(|n| mapping(8000 + n, 80, "tcp")).collect();
    let kinds = json!([mapping(1, 2, "tcp"), mapping(1, 3, "udp"), mapping(1, 4, "sctp")]);
    let at = |port: u16, ip: &str| {
        let mut mapping = mapping(port, 80, "tcp");
        mapping["hostIP"] = json!(ip);
        mapping
    };
    let of_address =
        json!([web()[0], at(81, "10.9.0.1"), at(82, "2001:db8:9::1"), at(83, "0.0.0.0")]);
    for mappings in [web(), json!(many), kinds, of_address] {
        for keys in [
            json!({}),
            json!({"snat": false}),
            json!({"markMasqBit": 5}),
            json!({"markMasqBit": 31}),
            json!({"externalSetMarkChain": "KUBE-MARK-MASQ"}),
            json!({"conditionsV4": ["!", "-s", "192.0.2.0/24"], "conditionsV6": ["!", "-s", "2001:db8:ff::/64"]}),
        ] {
            let call = |verb: &str| ports.call_with(verb, &pod, &mappings, &keys);
            let start = || {
                ports.node.sh("nft flush ruleset");
                ports.node.sh("for i in iptables ip6tables; do $i -t nat -N KUBE-MARK-MASQ; done");
            };
            start();
            call("ADD").program(&program).result();
            let theirs = save();
            call("DEL").program(&program).ok();
            let after_del = save();
            start();
            call("ADD").result();
            assert_eq!(save(), theirs, "{keys}");
            for line in save().lines().filter(|line| line.starts_with("-A ") && keys == json!({})) {
                let either = |verb: &str| {
                    let rule = line.replacen("-A", verb, 1);
                    format!("iptables -t nat {rule} || ip6tables -t nat {rule}")
                };
                ports.node.sh(&either("-C"));
                ports.node.sh(&either("-D"));
            }
            call("DEL").ok();
            start();
            call("ADD").result();
            call("DEL").program(&program).ok();
            assert_eq!(save(), after_del, "{keys}");
            call("DEL").ok();
        }
    }
}

/// The kernel refuses to delete a chain that a rule jumps to: it stays without rules, and the
/// container can be deleted.
#[test]
fn a_foreign_jump_does_not_prevent_del() {
    let ports = Ports::new(Rules::Iptables, "1.1.0");
    let pod = ports.pod("c1");
    ports.add(&pod, &web());
    let chain = ports.node.sh("iptables -t nat -S | grep -o '^-N CNI-DN.*' | cut -c4-");
    let jump = format!("-A OTHER -j {}", chain.trim());
    ports.node.sh(&format!("iptables -t nat -N OTHER; iptables -t nat {jump}"));
    ports.del(&pod, &web());
    let left = ports.state();
    assert!(left.contains(&jump) && !left.contains("8080"), "{left}");
}
