//! Strings of a configuration or result remain single arguments of iptables.

use serde_json::json;

use super::{net, rules};
use crate::support::net::Net;
use crate::support::node::{Container, Node};

/// Terminates the rule's line and its transaction.
const INJECTED: &str = "X\n-I INPUT -s 192.0.2.6/32 -j ACCEPT\nCOMMIT\n*filter\n-N Y";

#[test]
fn words_of_the_configuration_cannot_inject_rules() {
    let (node, container) = (Node::new(), Container::new());
    for backend in ["iptables", "nftables"] {
        let conf = net(&node, "1.1.0", &json!({"backend": backend}));
        let long = "a-name-of-twenty-nine-letters";
        for (key, value) in [
            ("iptablesAdminChainName", INJECTED),
            ("iptablesAdminChainName", "-F"),
            ("iptablesAdminChainName", long),
            // A verdict, a built-in chain, targets: the reference refuses them, too.
            ("iptablesAdminChainName", "ACCEPT"),
            ("iptablesAdminChainName", "INPUT"),
            ("iptablesAdminChainName", "TEE"),
            ("iptablesAdminChainName", "MASQUERADE"),
            ("firewalldZone", INJECTED),
        ] {
            let refusal = conf.with(&json!({key: value})).on("ADD", &container).error();
            assert_eq!(refusal.brief().0, 7, "{refusal:?}");
            assert!(refusal.brief().1.contains(key), "{refusal:?}");
            assert!(refusal.brief().1.contains(&format!("{value:?}")), "{refusal:?}");
            assert_eq!(rules(&node).trim(), "");
        }
    }
}

#[test]
fn bridge_names_of_results_cannot_inject_rules() {
    let (node, container) = (Node::new(), Container::new());
    for bridge in [INJECTED, "br\"0", "br+", "a-bridge-of-18-let"] {
        let mut keys = json!({"backend": "iptables", "ingressPolicy": "isolated"});
        keys["prevResult"] = super::prev("1.1.0", &super::IPS);
        keys["prevResult"]["interfaces"][0]["name"] = json!(bridge);
        let refusal = net(&node, "1.1.0", &keys).on("ADD", &container).error();
        assert_eq!(refusal.brief().0, 7, "{bridge:?}: {refusal:?}");
        assert_eq!(rules(&node).trim(), "");
    }
}

#[test]
fn chain_names_valid_for_iptables_are_accepted() {
    let (node, container) = (Node::new(), Container::new());
    let keys = json!({"backend": "iptables", "iptablesAdminChainName": "k8s.fw:1#_0123456789"});
    let conf = net(&node, "1.1.0", &keys);
    conf.add(&container);
    assert!(rules(&node).contains("-j k8s.fw:1#_0123456789"), "{}", rules(&node));
    conf.on("CHECK", &container).ok();
    conf.del(&container);
    assert!(!rules(&node).contains("10.1.2.2"), "{}", rules(&node));
}

#[test]
fn words_of_port_mappings_cannot_inject_rules() {
    let (node, container) = (Node::new(), Container::new());
    let prev = json!({"cniVersion": "1.1.0", "ips": [{"address": "10.1.2.2/24"}]});
    let ports = json!([{"hostPort": 80, "containerPort": 80, "protocol": "tcp"}]);
    let keys = json!({"backend": "iptables", "prevResult": prev,
        "runtimeConfig": {"portMappings": ports}});
    let conf = Net::new(&node, "portmap", "1.1.0", &keys);
    for (keys, key) in [
        (json!({"externalSetMarkChain": INJECTED}), "externalSetMarkChain"),
        (json!({"externalSetMarkChain": ""}), "externalSetMarkChain"),
        (json!({"conditionsV4": ["!", "-s", INJECTED]}), "conditionsV4"),
        (json!({"conditionsV6": ["-s", "2001:db8::/64\r"]}), "conditionsV6"),
    ] {
        let call = conf.with(&keys);
        let refusal = call.on("ADD", &container).error();
        assert_eq!(refusal.brief().0, 7, "{refusal:?}");
        assert!(refusal.brief().1.contains(key), "{refusal:?}");
        // DEL accepts a configuration that ADD rejects: no rule can exist.
        call.del(&container);
    }
    let made = node.sh("iptables-nft-save; ip6tables-nft-save");
    assert!(!made.contains("-A"), "{made}");
}
