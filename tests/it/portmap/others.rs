//! Mappings beside the rules of other programs, and tables of an earlier release.

use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::time::Instant;

use serde_json::json;

use super::{ALL, LIMIT, Pod, Ports, Rules, mapping, patiently, tcp};
use crate::support::net::Net;
use crate::support::node::Container;
use crate::support::traffic::Place;

impl Ports {
    /// An attachment whose replies to its neighbours pass the host.
    fn routed(&self, id: &'static str) -> Pod {
        let ipam = self.node.host_local(&["10.44.0.0/24", "2001:db8:44::/64"]);
        let mut keys = json!({"ipam": ipam});
        keys["ipam"]["routes"] = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]);
        let container = Container::new();
        let net = Net::new(&self.node, "ptp", self.version, &keys);
        let prev = net.call("ADD", id).netns(&container.path()).result();
        Pod { id, container, prev }
    }

    /// Leads Service addresses to the container at .3, as kube-proxy does.
    fn serve(&self) {
        self.node
            .sh("nft 'add table inet proxy; add chain inet proxy pre { type nat hook prerouting priority dstnat; }'");
        for (family, service, target) in [
            ("ip", "10.96.0.10", "10.44.0.3:80"),
            ("ip6", "2001:db8:96::10", "[2001:db8:44::3]:80"),
        ] {
            let rule = format!("{family} daddr {service} tcp dport 80 dnat {family} to {target}");
            self.node.sh(&format!("nft add rule inet proxy pre {rule}"));
        }
    }
}

/// A host port of a container does not change the source of clients that another program leads to
/// it, although both have the same port.
#[test]
fn services_keep_source_addresses_of_clients() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let (client, server) = (ports.routed("c1"), ports.routed("c2"));
        ports.serve();
        ports.add(&server, &json!([mapping(80, 80, "tcp")]));
        assert!(client.container.reaches("2001:db8:44::3"), "the kernel is done with IPv6");
        for (service, host, source) in [
            ("10.96.0.10:80", "10.44.0.1:80", "10.44.0.2"),
            ("[2001:db8:96::10]:80", "[2001:db8:44::1]:80", "2001:db8:44::2"),
        ] {
            let of_service = tcp(&client.container, &server.container, service, 80);
            assert_eq!(of_service, Some(source.parse().unwrap()), "{rules:?} {service}");
            let of_host = tcp(&client.container, &server.container, host, 80);
            assert_ne!(of_host, Some(source.parse().unwrap()), "{rules:?} {host}: translated");
            assert!(of_host.is_some(), "{rules:?} {host}");
        }
        let tracked = ports.node.sh("conntrack -L 2>/dev/null; conntrack -L -f ipv6 2>/dev/null");
        let marked = |line: &&str| line.contains("mark=") && !line.contains("mark=0 ");
        assert_eq!(tracked.lines().find(marked), None, "{rules:?}: no mark remains");
    }
}

/// Policy routing and traffic shaping mark connections, and accept them by the whole mark.
#[test]
fn marks_of_other_programs_change_nothing() {
    for rules in ALL {
        for of_others in [
            "$i -t mangle -A POSTROUTING -j CONNMARK --save-mark",
            "$i -t mangle -A FORWARD -j CONNMARK --set-mark 7; $i -t mangle -A OUTPUT -j CONNMARK --set-mark 9",
            "$i -t mangle -A PREROUTING -m conntrack --ctstate NEW -j CONNMARK --set-mark 2; $i -P FORWARD DROP; \
             $i -A FORWARD -m connmark --mark 2 -j ACCEPT",
        ] {
            let ports = Ports::new(rules, "1.1.0");
            let (server, neighbour, peer) = (ports.pod("c1"), ports.pod("c2"), ports.peer());
            ports.add(&server, &json!([mapping(8080, 80, "tcp")]));
            assert!(peer.reaches("2001:db8:1::2"), "the kernel is done with IPv6");
            ports.node.sh(&format!("for i in iptables ip6tables; do {of_others}; done"));
            for host in ["192.0.2.1:8080", "[2001:db8:9::1]:8080"] {
                let source = tcp(&peer, &server.container, host, 80);
                assert!(source.is_some(), "{rules:?} {of_others}: {host} from outside");
                for near in [&neighbour, &server] {
                    let source = tcp(&near.container, &server.container, host, 80);
                    assert!(source.is_some(), "{rules:?} {of_others}: {host} from {}", near.id);
                }
            }
            let source = tcp(&ports.node, &server.container, "127.0.0.1:8080", 80);
            assert!(source.is_some(), "{rules:?} {of_others}: from the host");
        }
    }
}

/// With nftables a port of the host on `::1` is the host's own.
#[test]
fn services_of_the_ipv6_loopback_address_stay_reachable() {
    let ports = Ports::new(Rules::Nftables, "1.1.0");
    let pod = ports.pod("c1");
    ports.add(&pod, &json!([mapping(8080, 80, "tcp"), mapping(8081, 81, "tcp")]));
    let own = patiently(|| TcpListener::bind("[::1]:8080"));
    let connect = |target: &str| TcpStream::connect_timeout(&target.parse().unwrap(), LIMIT);
    connect("[::1]:8080").expect("the host's own service");
    drop(own);
    let start = Instant::now();
    let refusal = connect("[::1]:8081").unwrap_err();
    assert_eq!(refusal.kind(), ErrorKind::ConnectionRefused);
    assert!(start.elapsed() < LIMIT / 2);
    assert!(tcp(&ports.node, &pod.container, "127.0.0.1:8080", 80).is_some());
    assert!(tcp(&ports.node, &pod.container, "[2001:db8:1::1]:8080", 80).is_some());
}

/// Conditions keep Service addresses on local links (kube-proxy with IPVS) out of the mappings.
#[test]
fn conditions_exclude_service_addresses_of_the_host() {
    let ports = Ports::new(Rules::Nftables, "1.1.0");
    let (client, server) = (ports.pod("c1"), ports.pod("c2"));
    ports.node.sh("ip link add kube-ipvs0 type bridge; ip addr add 10.96.0.10/32 dev kube-ipvs0");
    let keys = json!({"conditionsV4": ["ip", "daddr", "!=", "10.96.0.0/12"]});
    let web = json!([mapping(80, 80, "tcp")]);
    let asks = |target: &str| tcp(&client.container, &server.container, target, 80).is_some();
    ports.add(&server, &web);
    assert!(asks("10.96.0.10:80"), "every local address");
    ports.call_with("ADD", &server, &web, &keys).result();
    assert!(!asks("10.96.0.10:80") && asks("10.1.2.1:80"));
}

/// Tables of an earlier release may lack some rules. The next ADD or STATUS completes the tables,
/// and loses no mapping.
#[test]
fn tables_of_an_earlier_release_are_completed() {
    let ports = Ports::new(Rules::Nftables, "1.1.0");
    let (one, two, peer) = (ports.pod("c1"), ports.pod("c2"), ports.peer());
    let list = json!([mapping(8080, 80, "tcp")]);
    ports.add(&one, &list);
    let complete = ports.state();
    let added = ["own address", "own IPv6 address", "no container has ::1"];
    let remove_rule = |comment: &str| {
        let find = format!("nft -a list table inet cnibox_portmap | grep '\"{comment}\"'");
        let line = ports.node.sh(&find);
        let handle = line.trim().rsplit(' ').next().unwrap().to_owned();
        let chain = ports
            .node
            .sh(&format!("nft -a list table inet cnibox_portmap | awk '/chain/ {{c=$2}} /\"{comment}\"/ {{print c}}'"));
        let chain = chain.trim();
        ports.node.sh(&format!("nft delete rule inet cnibox_portmap {chain} handle {handle}"));
    };
    for comment in added {
        remove_rule(comment);
    }
    assert_ne!(ports.state(), complete);
    assert!(tcp(&peer, &one.container, "192.0.2.1:8080", 80).is_some(), "the former rules");
    ports.net(&list, &json!({})).call("STATUS", "").without("CNI_CONTAINERID").ok();
    assert_eq!(ports.state(), complete);
    ports.call("CHECK", &one, &list).ok();
    for comment in added {
        remove_rule(comment);
    }
    ports.add(&two, &json!([mapping(8081, 80, "tcp")]));
    ports.del(&two, &json!([mapping(8081, 80, "tcp")]));
    assert_eq!(ports.state(), complete);
    let near = tcp(&two.container, &one.container, "192.0.2.1:8080", 80);
    assert!(near.is_some() && tcp(&peer, &one.container, "192.0.2.1:8080", 80).is_some());
}

/// The rules of a build that set a bit of the connection's mark: rules are recognised by their
/// comments, and the next ADD replaces all that have changed.
#[test]
fn rules_that_depend_on_a_mark_are_replaced() {
    let ports = Ports::new(Rules::Nftables, "1.1.0");
    let (one, two, peer) = (ports.pod("c1"), ports.pod("c2"), ports.peer());
    ports.add(&one, &json!([mapping(8080, 80, "tcp")]));
    let complete = ports.state();
    let former = ports.node.path("former.nft");
    let rules = r#"
        flush chain inet cnibox_portmap hostports
        flush chain inet cnibox_portmap postrouting
        table inet cnibox_portmap {
            chain hostports {
                ct mark set ct mark | 0x08000000 comment "translated here"
                jump conditional comment "under conditions"
                dnat ip to ip daddr . meta l4proto . th dport map @host4 comment "one address"
                meta nfproto ipv4 dnat ip to meta l4proto . th dport map @any4 comment "any address"
                dnat ip6 to ip6 daddr . meta l4proto . th dport map @host6 comment "one IPv6 address"
                meta nfproto ipv6 dnat ip6 to meta l4proto . th dport map @any6 comment "any IPv6 address"
                ct mark set ct mark & 0xf7ffffff comment "not translated here"
            }
            chain postrouting {
                ct mark & 0x08000000 == 0x00000000 return comment "only what was translated here"
                ct mark set ct mark & 0xf7ffffff comment "the mark has served its purpose"
                ct status dnat ip daddr vmap @mapped4 comment "by container"
                ct status dnat ip6 daddr vmap @mapped6 comment "by IPv6 container"
            }
        }"#;
    std::fs::write(&former, rules).unwrap();
    ports.node.sh(&format!("nft -f {}", former.display()));
    assert!(tcp(&ports.node, &one.container, "127.0.0.1:8080", 80).is_some(), "as they were");
    let other = json!([mapping(8081, 80, "tcp")]);
    ports.add(&two, &other);
    ports.del(&two, &other);
    assert_eq!(ports.state(), complete);
    assert!(tcp(&ports.node, &one.container, "127.0.0.1:8080", 80).is_some());
    for client in [&one.container, &two.container, &peer] {
        assert!(tcp(client, &one.container, "192.0.2.1:8080", 80).is_some());
    }
}

/// No hostIP, "0.0.0.0" and "::" mean all addresses: one port in two spellings is one mapping, to
/// two ports a mistake.
#[test]
fn equal_mappings_in_two_spellings_are_merged() {
    for rules in [Rules::Nftables, Rules::Iptables] {
        for other in ["::", "0.0.0.0"] {
            let ports = Ports::new(rules, "1.0.0");
            let pod = ports.pod("c1");
            let with = |container: u16| {
                let mut spelled = mapping(8080, container, "tcp");
                spelled["hostIP"] = json!(other);
                spelled
            };
            for list in [
                json!([mapping(8080, 80, "tcp"), with(80)]),
                json!([with(80), mapping(8080, 80, "tcp")]),
            ] {
                ports.add(&pod, &list);
                ports.del(&pod, &list);
            }
            let list = json!([mapping(8080, 80, "tcp"), with(81)]);
            let call = ports.net(&list, &json!({"prevResult": pod.prev})).call("ADD", pod.id);
            let error = call.netns(&pod.container.path()).error();
            let msg = "failed to parse config: host port 8080/tcp is mapped to two container ports";
            assert_eq!(error.brief(), (7, msg), "{rules:?} {other}");
        }
    }
}

/// Over netlink the kernel would take what iptables refuses, and iptables could not list the table
/// any more.
#[test]
fn words_that_iptables_refuses_leave_no_rule() {
    let ports = Ports::new(Rules::Iptables, "1.1.0");
    let pod = ports.pod("c1");
    let web = json!([mapping(8080, 80, "tcp")]);
    for keys in [
        json!({"conditionsV4": ["-d", "fd00:1::/64"]}),
        json!({"conditionsV4": ["!", "-s", "2001:db8:1::/64"]}),
        json!({"conditionsV6": ["-s", "192.0.2.0/24"]}),
        json!({"conditionsV4": ["!", "-s", "198.51.100.0/24", "!", "-s", "192.0.2.0/24"]}),
        json!({"conditionsV4": ["-s", "198.51.100.0/24", "-s", "192.0.2.0/24"]}),
        json!({"conditionsV4": ["!", "!", "-i", "br0"]}),
        json!({"conditionsV4": ["-p", "udp"]}),
        json!({"conditionsV4": ["-i", ""]}),
        json!({"conditionsV4": ["-i", "a-bridge-of-18-let"]}),
        json!({"conditionsV4": ["-6"]}),
        json!({"conditionsV6": ["--ipv4"]}),
        json!({"externalSetMarkChain": "MARK"}),
        json!({"externalSetMarkChain": "PREROUTING"}),
    ] {
        let refusal = ports.call_with("ADD", &pod, &web, &keys).error();
        assert!(!refusal.msg.is_empty(), "{keys}");
        let listed = ports.node.sh("iptables-save; ip6tables-save; iptables -t nat -S");
        assert!(!listed.contains("10.1.2.2") && !listed.contains("8080"), "{keys}: {listed}");
        ports.call_with("DEL", &pod, &web, &keys).ok();
    }
}

/// Whoever has switched a table off did so for all rules in it.
#[test]
fn a_dormant_table_of_others_is_left_asleep() {
    let ports = Ports::new(Rules::Iptables, "1.1.0");
    let pod = ports.pod("c1");
    ports.node.sh("nft add table ip nat '{ flags dormant; }'");
    ports.add(&pod, &json!([mapping(8080, 80, "tcp")]));
    let listed = ports.node.sh("nft list table ip nat");
    assert!(listed.contains("flags dormant") && listed.contains("8080"), "{listed}");
    ports.del(&pod, &json!([mapping(8080, 80, "tcp")]));
}
