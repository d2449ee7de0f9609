//! Rules, compared with the output of nft.

use super::*;

/// Appends each rule to a filter chain and compares the output of nft.
fn shown(rules: &[(NftRule, &str)]) {
    let nft = sandbox();
    let chain = T.named_chain("f").at_filter_hook(NetfilterHook::Prerouting, RAW);
    let batch = one(|batch| {
        base(batch);
        batch.ensure_object(chain);
        for (rule, _) in rules {
            batch.append_rule(chain, rule);
        }
    });
    nft.commit_batch(batch).unwrap();
    let expected: Vec<&str> = rules.iter().map(|(_, text)| *text).collect();
    assert_eq!(listed("f"), expected);
}

#[test]
fn conditions_are_listed_by_nft_as_intended() {
    let new = NftRule::new;
    let mac = crate::netlink::MacAddress([2, 0, 0, 0, 0, 1]);
    shown(&[
        (new().saddr_is(ip("10.0.0.1")).accept(), "ip saddr 10.0.0.1 accept"),
        (new().daddr_is(ip("fd00::1")).drop(), "ip6 daddr fd00::1 drop"),
        (
            new().saddr_in("10.0.0.0/9".parse().unwrap()).return_to_caller(),
            "ip saddr 10.0.0.0/9 return",
        ),
        (
            new()
                .saddr_is(ip("10.0.0.1"))
                .daddr_not_in("10.0.0.0/24".parse().unwrap())
                .return_to_caller(),
            "ip saddr 10.0.0.1 ip daddr != 10.0.0.0/24 return",
        ),
        (
            new().daddr_in("ff00::/8".parse().unwrap()).return_to_caller(),
            "ip6 daddr ff00::/8 return",
        ),
        (new().dport_is(TransportProtocol::Tcp, 80).accept(), "tcp dport 80 accept"),
        (
            new()
                .match_equal(PacketField::Iifname, "eth0")
                .match_equal(PacketField::Oifname, "x")
                .jump_to("regular"),
            "iifname \"eth0\" oifname \"x\" jump regular",
        ),
        (
            new().match_equal(PacketField::EtherSaddr, mac).go_to("regular"),
            "ether saddr 02:00:00:00:00:01 goto regular",
        ),
        (
            new().any_bit_set(PacketField::CtState, CT_STATE_ANSWERS).accept(),
            "ct state established,related accept",
        ),
        (new().match_dnat().accept(), "ct status dnat accept"),
        (new().daddr_is_local().jump_to("regular"), "fib daddr type local jump regular"),
        (new().in_set(&[PacketField::IpSaddr], PODS).accept(), "ip saddr @pods accept"),
        (new().not_in_set(&[PacketField::IpDaddr], NETS).accept(), "ip daddr != @nets accept"),
        (new().verdict_by_map(&[PacketField::Iifname], NAMES), "iifname vmap @names"),
    ]);
}

#[test]
fn statements_are_listed_by_nft_as_intended() {
    let new = NftRule::new;
    shown(&[
        (new().accept().with_comment("net: pods, id: c1"), "accept comment \"net: pods, id: c1\""),
        (
            new().match_equal(PacketField::L4proto, TransportProtocol::Sctp).drop(),
            "meta l4proto sctp drop",
        ),
        (new().has_ip_options().drop(), "ip hdrlength != 5 drop"),
        (new().byte_is(PacketField::Pkttype, 0).accept(), "meta pkttype host accept"),
        (new().opens_no_connection().accept(), "tcp flags rst,ack accept"),
        (new().match_leaving().go_to("regular"), "meta oiftype != 0 goto regular"),
        (
            new().match_interface(PacketField::Oifkind, true, "veth").drop(),
            "meta oifkind \"veth\" drop",
        ),
    ]);
}

#[test]
fn translations_by_maps_are_listed_by_nft_as_intended() {
    let nft = sandbox();
    let key = [PacketField::IpDaddr, PacketField::L4proto, PacketField::Dport];
    let batch = one(|batch| {
        base(batch);
        let ports = NftRule::new().daddr_is_local().dnat_by_map(&key, DNAT4);
        batch.append_rule(PRE, &ports);
        let six =
            T.value_map("dnat6", &DNAT4.key[1..], &[ValueType::Ipv6Addr, ValueType::InetService]);
        batch.add_object(six).add_element(
            &six.element_with_key((TransportProtocol::Udp, 53))
                .with_values((ip("fd00::5"), 5353))
                .with_comment("dns"),
        );
        batch.append_rule(PRE, &NftRule::new().dnat_by_map(&key[1..], six));
        batch.append_rule(
            PRE,
            &NftRule::new()
                .match_equal(PacketField::L4proto, TransportProtocol::Udp)
                .dnat_to(ip("10.0.0.1"), 53),
        );
        batch.append_rule(
            PRE,
            &NftRule::new()
                .match_equal(PacketField::L4proto, TransportProtocol::Tcp)
                .dnat_to(ip("fd00::1"), 80),
        );
        let net = "10.1.0.0/16".parse().unwrap();
        let masquerade = NftRule::new().saddr_is(ip("10.1.0.5")).daddr_not_in(net).masquerade();
        batch.append_rule(POST, &masquerade);
    });
    nft.commit_batch(batch).unwrap();
    assert_eq!(
        listed("pre"),
        [
            "fib daddr type local dnat ip to ip daddr . meta l4proto . th dport map @dnat4",
            "meta nfproto ipv6 dnat ip6 to meta l4proto . th dport map @dnat6",
            "meta l4proto udp dnat ip to 10.0.0.1:53",
            "meta l4proto tcp dnat ip6 to [fd00::1]:80",
        ]
    );
    assert_eq!(listed("post"), ["ip saddr 10.1.0.5 ip daddr != 10.1.0.0/16 masquerade",]);
}

#[test]
fn a_bridge_checks_source_addresses() {
    let nft = sandbox();
    let table = NftTable::new(TableFamily::Bridge, "nat");
    let pre = table.named_chain("PREROUTING").at_filter_hook(NetfilterHook::Prerouting, RAW);
    let (own, mac) = (table.named_chain("own"), crate::netlink::MacAddress([2, 0, 0, 0, 0, 1]));
    let batch = one(|batch| {
        batch.ensure_object(table).ensure_object(pre).ensure_object(own);
        batch.append_rule(
            pre,
            &NftRule::new()
                .match_equal(PacketField::Iifname, "veth1")
                .jump_to("own")
                .with_comment("check"),
        );
        batch.append_rule(
            own,
            &NftRule::new().match_equal(PacketField::EtherSaddr, mac).return_to_caller(),
        );
        batch.append_rule(own, &NftRule::new().saddr_is(ip("10.0.0.1")).return_to_caller());
        batch.append_rule(own, &NftRule::new().drop());
    });
    nft.commit_batch(batch).unwrap();
    let text = ruleset();
    for part in [
        "iifname \"veth1\" jump own comment \"check\"\n",
        "\tether saddr 02:00:00:00:00:01 return\n\t\tip saddr 10.0.0.1 return\n\t\tdrop\n",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn rules_are_appended_in_order_and_flushed() {
    let nft = sandbox();
    commit_base(&nft);
    let named = |name: &str| NftRule::new().with_comment(name);
    nft.commit_batch(one(|b| {
        b.append_rule(PRE, &named("a")).append_rule(PRE, &named("b"));
    }))
    .unwrap();
    let comments: Vec<_> =
        nft.dump_rules(PRE).unwrap().into_iter().filter_map(|rule| rule.comment).collect();
    assert_eq!(comments, ["a", "b"]);
    nft.commit_batch(one(|b| {
        b.flush_chain(PRE);
    }))
    .unwrap();
    assert!(nft.dump_rules(PRE).unwrap().is_empty());
}

#[test]
fn rules_of_the_reference_are_found_by_comment_and_deleted() {
    let ours = sandbox();
    let script = r#"
        table inet cni_plugins_masquerade {
            comment "Masquerading for plugins from github.com/containernetworking/plugins"
            chain masq_checks {
                ip saddr == 10.1.0.5 ip daddr != 10.1.0.0/16 masquerade comment "6fd94d501e58f0aa-287fc69eff0574a2, net: unit-test, if: eth0, id: one"
                ip6 saddr == fd00::5 ip6 daddr != fd00::/64 masquerade comment "6fd94d501e58f0aa-1111111111111111, net: unit-test, if: eth0, id: two"
            }
            chain postrouting {
                type nat hook postrouting priority 100;
                ip daddr == 224.0.0.0/4 return
                goto masq_checks
            }
        }"#;
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), script).unwrap();
    nft(&["-f", file.path().to_str().unwrap()]);
    let chain = NftTable::new_inet("cni_plugins_masquerade").named_chain("masq_checks");
    let rules = ours.dump_rules(chain).unwrap();
    assert_eq!(rules.len(), 2);
    assert_eq!(rules[0].expressions().last().map(String::as_str), Some("masq"));
    let mine = |rule: &RuleInfo| {
        let comment = rule.comment.as_deref().unwrap_or_default();
        comment.starts_with("6fd94d501e58f0aa-287fc69eff0574a2")
    };
    let handle = rules.iter().find(|rule| mine(rule)).unwrap().handle;
    ours.commit_batch(one(|batch| {
        batch.delete_rule(chain, handle);
    }))
    .unwrap();
    let left = ours.dump_rules(chain).unwrap();
    assert_eq!(left.iter().map(|rule| rule.handle).collect::<Vec<_>>(), [rules[1].handle]);
    assert!(!ruleset().contains("id: one") && ruleset().contains("id: two"));
}

/// The kernel sends the first parts of about 4 KiB, the others of 32 KiB: five parts.
#[test]
fn a_new_socket_reads_a_list_of_many_messages() {
    let chain = T.named_chain("f").at_filter_hook(NetfilterHook::Prerouting, RAW);
    let batch = one(|batch| {
        base(batch);
        batch.ensure_object(chain).ensure_element(&PODS.element_with_key(ip("10.0.0.1")));
        for last in 0..=255 {
            let addr = ip(&format!("10.1.0.{last}"));
            batch.append_rule(chain, &NftRule::new().saddr_is(addr).daddr_is(addr).accept());
        }
    });
    sandbox().commit_batch(batch).unwrap();
    let asked = [PODS.element_with_key(ip("10.0.0.1")), PODS.element_with_key(ip("10.0.0.2"))];
    let look = NftSocket::open().unwrap().read_table(T, &[], &asked).unwrap();
    assert_eq!(look.rules.len(), 256);
    assert_eq!(look.elements.iter().map(Option::is_some).collect::<Vec<_>>(), [true, false]);
    assert_eq!(NftSocket::open().unwrap().dump_rules(chain).unwrap().len(), 256);
}
