//! `allowFrom`: ports for some clients, with both back ends.

use serde_json::{Value, json};

use super::{ALL, Pod, Ports, Rules, mapping, tcp, udp};
use crate::support::node::{Container, eventually};
use crate::support::traffic::Place;

fn ports_of_both() -> Value {
    json!([mapping(8080, 80, "tcp"), mapping(5353, 53, "udp")])
}

/// Who reaches the ports of a pod: a client in 192.0.2.0/24 and `2001:db8:9::/64`, another one in
/// 198.51.100.0/24 and `2001:db8:a::/64`, a container of the bridge, the host.
struct Clients {
    ports: Ports,
    server: Pod,
    neighbour: Pod,
    peer: Container,
    other: Container,
}

impl Clients {
    fn new(rules: Rules) -> Clients {
        let ports = Ports::new(rules, "1.1.0");
        let (server, neighbour) = (ports.pod("c1"), ports.pod("c2"));
        let (peer, other) = (ports.peer(), ports.outside("other", "198.51.100", "2001:db8:a"));
        for near in [&peer, &other] {
            assert!(near.reaches("2001:db8:1::2") && near.reaches("10.1.2.2"));
        }
        Clients { ports, server, neighbour, peer, other }
    }

    #[track_caller]
    fn add(&self, keys: &Value) {
        self.ports.call_with("ADD", &self.server, &ports_of_both(), keys).result();
        self.ports.call_with("CHECK", &self.server, &ports_of_both(), keys).ok();
    }

    /// The clients that reach the port by TCP, by their name and family.
    fn served(&self) -> Vec<&'static str> {
        let Clients { ports, server, neighbour, peer, other } = self;
        let to = &server.container;
        [
            ("peer4", tcp(peer, to, "192.0.2.1:8080", 80)),
            ("peer6", tcp(peer, to, "[2001:db8:9::1]:8080", 80)),
            ("other4", tcp(other, to, "198.51.100.1:8080", 80)),
            ("other6", tcp(other, to, "[2001:db8:a::1]:8080", 80)),
            ("neighbour4", tcp(&neighbour.container, to, "10.1.2.1:8080", 80)),
            ("localhost4", tcp(&ports.node, to, "127.0.0.1:8080", 80)),
        ]
        .into_iter()
        .filter_map(|(client, source)| source.map(|_| client))
        .collect()
    }
}

#[test]
fn listed_clients_alone_reach_the_ports() {
    for rules in ALL {
        let at = Clients::new(rules);
        let before = at.ports.state();
        for (list, served) in [
            (json!(["192.0.2.0/24", "2001:db8:a::/64"]), &["peer4", "other6"][..]),
            (json!(["192.0.2.2", "198.51.100.9"]), &["peer4"]),
            (json!(["2001:db8:9::2"]), &["peer6"]),
            (json!(["10.1.2.0/24", "127.0.0.0/8"]), &["neighbour4", "localhost4"]),
            (json!(["0.0.0.0/0"]), &["peer4", "other4", "neighbour4", "localhost4"]),
            (json!(["::/0", "198.51.100.77/24"]), &["peer6", "other4", "other6"]),
        ] {
            at.add(&json!({ "allowFrom": list }));
            assert_eq!(at.served(), served, "{rules:?} {list}");
            let over_udp = [(&at.peer, "192.0.2.1:5353"), (&at.other, "198.51.100.1:5353")]
                .map(|(client, target)| udp(client, &at.server.container, target, 53).is_some());
            assert_eq!(over_udp, [served.contains(&"peer4"), served.contains(&"other4")]);
        }
        at.ports.del(&at.server, &ports_of_both());
        if rules != Rules::Nftables {
            let left = at.ports.state();
            assert!(!left.contains("10.1.2.2") && !left.contains("192.0.2"), "{left}");
            continue;
        }
        let (left, list) = (at.ports.state(), "nft list chain inet cnibox_portmap conditional");
        assert!(!left.contains("c1") && before.len() < left.len(), "the empty table: {left}");
        assert!(!at.ports.node.sh(list).contains("saddr"));
    }
}

/// After a flush a port is for the same clients; rules that are missing are found.
#[test]
fn clients_are_as_before_after_a_repair() {
    for rules in ALL {
        let at = Clients::new(rules);
        let keys = json!({"allowFrom": ["192.0.2.0/24", "10.1.2.3", "2001:db8:9::/64"]});
        at.add(&keys);
        let flush = match rules {
            Rules::Nftables => "nft flush ruleset".to_owned(),
            _ => ["iptables", "ip6tables"]
                .map(|name| {
                    let program = at.ports.node.path("flavour").join(name);
                    format!("{} -t nat -F", program.display())
                })
                .join("; "),
        };
        let whole = at.ports.state();
        at.ports.node.sh(&flush);
        at.ports.call_with("CHECK", &at.server, &ports_of_both(), &keys).error();
        let repair = at.ports.path(at.ports.node.cnibox(&["repair"])).run();
        assert_eq!(repair.status, Some(0), "{repair:?}");
        at.ports.call_with("CHECK", &at.server, &ports_of_both(), &keys).ok();
        assert_eq!(at.served(), ["peer4", "peer6", "neighbour4"], "{rules:?}: {whole}");
        let program = at.ports.node.path("flavour").join("iptables");
        let program = program.display();
        at.ports.node.sh(&if rules == Rules::Nftables {
            "nft flush chain inet cnibox_portmap conditional".to_owned()
        } else {
            format!(
                "(echo '*nat'; {program}-save -t nat | grep -e '-s 10.1.2.3/32' | \
                 sed 's/^-A/-D/'; echo COMMIT) | {program}-restore -n"
            )
        });
        at.ports.call_with("CHECK", &at.server, &ports_of_both(), &keys).error();
        let others = json!({"name": "others", "allowFrom": ["198.51.100.0/24"]});
        let more = json!([mapping(8081, 80, "tcp")]);
        at.ports.call_with("ADD", &at.neighbour, &more, &others).result();
        assert!(!at.served().contains(&"other4"), "{rules:?}: the list of another container");
    }
}

/// With conditions, a client has to meet both.
#[test]
fn clients_and_conditions_are_combined() {
    for rules in ALL {
        let at = Clients::new(rules);
        let keys = match rules {
            Rules::Nftables => json!({"conditionsV4": ["ip saddr != 192.0.2.2"],
                "conditionsV6": ["iifname peer"]}),
            _ => json!({"conditionsV4": ["!", "-i", "peer"], "conditionsV6": ["-i", "peer"]}),
        };
        let list = json!({"allowFrom": ["192.0.2.0/24", "198.51.100.0/24", "2001:db8::/32"]});
        at.add(&crate::support::net::merged(&list, &keys));
        assert_eq!(at.served(), ["peer6", "other4"], "{rules:?}");
    }
}

/// With nftables such ports are not reserved, but what a container that has ended has left serves
/// nobody.
#[test]
fn rules_of_ended_containers_serve_no_client() {
    let at = Clients::new(Rules::Nftables);
    let keys = json!({"allowFrom": ["192.0.2.0/24"]});
    let Clients { ports, server, neighbour, peer, .. } = at;
    ports.call_with("ADD", &neighbour, &ports_of_both(), &keys).result();
    let reaches = |to: &Container| tcp(&peer, to, "192.0.2.1:8080", 80).is_some();
    assert!(reaches(&neighbour.container));
    ports.call_with("ADD", &server, &ports_of_both(), &keys).result();
    assert!(reaches(&neighbour.container) && !reaches(&server.container), "the first one serves");
    ports.call_with("DEL", &server, &ports_of_both(), &keys).ok();
    let pairs = || ports.node.sh("ip -br link show type veth").lines().count();
    let before = pairs();
    drop(neighbour);
    // The kernel deletes a namespace later.
    eventually("the pair is gone", || pairs() < before);
    ports.call_with("ADD", &server, &ports_of_both(), &keys).result();
    assert!(reaches(&server.container), "{}", ports.state());
}

#[test]
fn lists_of_clients_are_validated() {
    let at = Ports::new(Rules::Iptables, "1.1.0");
    let pod = at.pod("c1");
    let before = at.state();
    for (keys, msg) in [
        (json!({"allowFrom": []}), "\"allowFrom\" is empty: no client could use the ports"),
        (
            json!({"allowFrom": ["10.0.0.0/8", "10.0.0.0/33"]}),
            "allowFrom[1] \"10.0.0.0/33\": not a network or address",
        ),
        (
            json!({"allowFrom": ["example.org"]}),
            "allowFrom[0] \"example.org\": not a network or address",
        ),
        (
            json!({"allowFrom": vec!["192.0.2.7"; 5001]}),
            "\"allowFrom\": more than 10000 rules for 2 ports",
        ),
        (
            json!({"allowFrom": ["192.0.2.7"], "conditionsV4": ["!", "-s", "192.0.2.9"]}),
            "\"-s\" of conditionsV4 beside \"allowFrom\"",
        ),
    ] {
        let error = at.call_with("ADD", &pod, &ports_of_both(), &keys).error();
        assert_eq!(error.brief(), (7, format!("failed to parse config: {msg}").as_str()));
        assert_eq!(at.state(), before);
        at.call_with("DEL", &pod, &ports_of_both(), &keys).ok();
    }
}
