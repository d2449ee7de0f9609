//! Tables, chains, sets: creating, deleting, atomicity, errors.

use std::thread;

use super::*;

#[test]
fn objects_are_listed_as_if_created_by_nft() {
    let nft = sandbox();
    commit_base(&nft);
    let elements = one(|batch| {
        let web = DNAT4
            .element_with_key((ip("10.0.0.1"), TransportProtocol::Tcp, 80))
            .with_values((ip("10.1.0.1"), 8080));
        batch.add_element(&web.with_comment("net: pods, id: c1"));
        batch.add_element(
            &NAMES.element_with_key("eth0").with_verdict(PacketVerdict::jump_to("regular")),
        );
        batch.add_element(&NETS.element_with_key(ip("192.0.2.1")).with_comment("one"));
    });
    nft.commit_batch(elements).unwrap();
    let expected = "\
table inet t {
	comment \"the table\"
	map dnat4 {
		type ipv4_addr . inet_proto . inet_service : ipv4_addr . inet_service
		elements = { 10.0.0.1 . tcp . 80 comment \"net: pods, id: c1\" : 10.1.0.1 . 8080 }
	}

	set pods {
		type ipv4_addr
	}

	map names {
		type ifname : verdict
		elements = { \"eth0\" : jump regular }
	}

	set nets {
		type ipv4_addr
		elements = { 192.0.2.1 comment \"one\" }
	}

	chain pre {
		type nat hook prerouting priority dstnat; policy accept;
	}

	chain post {
		type nat hook postrouting priority srcnat; policy accept;
	}

	chain regular {
		comment \"a chain\"
	}
}
";
    assert_eq!(ruleset(), expected);
    assert!(
        nft.has_object(T).unwrap() && nft.has_object(PRE).unwrap() && nft.has_object(NETS).unwrap()
    );
    let chains = nft.dump_chains(T).unwrap();
    let names: Vec<_> = chains.iter().map(|c| (c.name.as_str(), c.base.as_deref())).collect();
    assert_eq!(names, [("pre", Some("nat")), ("post", Some("nat")), ("regular", None)]);
    assert_eq!(chains[2].uses, 1);
}

#[test]
fn objects_of_every_family_and_type_are_created() {
    let nft = sandbox();
    let bridge = NftTable::new(TableFamily::Bridge, "b");
    let (four, six) =
        (NftTable::new(TableFamily::Ip, "four"), NftTable::new(TableFamily::Ip6, "six"));
    let batch = one(|batch| {
        batch.ensure_object(bridge).ensure_object(four).ensure_object(six);
        batch.ensure_object(
            bridge.named_chain("PREROUTING").at_filter_hook(NetfilterHook::Prerouting, -300),
        );
        batch.ensure_object(four.named_chain("c").at_filter_hook(NetfilterHook::Forward, FILTER));
        batch.ensure_object(six.named_chain("c").at_nat_hook(NetfilterHook::Output, DSTNAT));
        batch.ensure_object(six.named_set("macs", &[ValueType::EtherAddr, ValueType::Mark]));
    });
    nft.commit_batch(batch).unwrap();
    // nftables 1.1 prints the name of this priority.
    let text = ruleset().replace("hook output priority dstnat;", "hook output priority -100;");
    for part in [
        "table bridge b {\n\tchain PREROUTING {\n\t\ttype filter hook prerouting priority dstnat; policy accept;",
        "table ip four {\n\tchain c {\n\t\ttype filter hook forward priority filter; policy accept;",
        "type nat hook output priority -100; policy accept;",
        "type ether_addr . mark\n",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn ensuring_again_changes_nothing_and_adding_again_fails() {
    let nft = sandbox();
    commit_base(&nft);
    let before = ruleset();
    commit_base(&nft);
    assert_eq!(ruleset(), before);
    for (batch, text) in [
        (
            one(|b| {
                b.add_object(T);
            }),
            "add table inet t: file exists",
        ),
        (
            one(|b| {
                b.add_object(PRE);
            }),
            "add chain inet t pre: file exists",
        ),
        (
            one(|b| {
                b.add_object(DNAT4);
            }),
            "add map inet t dnat4: file exists",
        ),
    ] {
        let error = nft.commit_batch(batch).unwrap_err();
        assert!(error.is_exists());
        assert_eq!(error.to_string(), text);
    }
}

#[test]
fn deleting_twice_succeeds() {
    let nft = sandbox();
    delete_twice(&nft);
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let numbers: Vec<u32> =
        release.split('.').take(2).map(|number| number.parse().unwrap()).collect();
    assert_eq!(nft.destroys.get(), numbers >= vec![6, 3], "{release}");
}

#[test]
fn deleting_twice_succeeds_without_destroy_messages() {
    let nft = sandbox();
    nft.destroys.set(false);
    delete_twice(&nft);
}

#[test]
fn an_unsupported_message_type_is_tried_once() {
    let nft = sandbox();
    commit_base(&nft);
    let mut batch = one(|b| {
        b.delete_object(PODS);
    });
    batch.changes[0].destroy = Some(message_type(250));
    nft.commit_batch(batch).unwrap();
    assert!(!nft.destroys.get() && !nft.has_object(PODS).unwrap());
}

#[test]
fn the_first_of_thousands_of_errors_is_reported() {
    let nft = sandbox();
    commit_base(&nft);
    let batch = || {
        one(|batch| {
            for n in 0..20_000_u16 {
                let [high, low] = n.to_be_bytes();
                batch.add_element(&PODS.element_with_key(IpAddr::from([10, 1, high, low])));
            }
        })
    };
    nft.commit_batch(batch()).unwrap();
    let error = nft.commit_batch(batch()).unwrap_err();
    assert_eq!(error.to_string(), "add element 10.1.0.0 to set inet t pods: file exists");
    nft.commit_batch(one(|b| {
        b.flush_set(PODS);
    }))
    .unwrap();
    assert!(nft.dump_elements(PODS).unwrap().is_empty());
}

fn delete_twice(nft: &NftSocket) {
    commit_base(nft);
    let element = DNAT4.element_with_key((ip("10.0.0.1"), TransportProtocol::Tcp, 80));
    let batch = || {
        one(|batch| {
            batch.ensure_element(&PODS.element_with_key(ip("10.0.0.1")));
            batch.delete_element(&element).delete_rule(PRE, 4711).delete_object(REGULAR);
            batch.delete_object(NETS).delete_object(NftTable::new_inet("none"));
        })
    };
    nft.commit_batch(batch()).unwrap();
    nft.commit_batch(batch()).unwrap();
    assert!(!nft.has_object(NETS).unwrap() && !nft.has_object(REGULAR).unwrap());
    assert_eq!(nft.dump_elements(PODS).unwrap().len(), 1);
    nft.commit_batch(one(|b| {
        b.delete_object(T);
    }))
    .unwrap();
    nft.commit_batch(one(|b| {
        b.delete_object(T).delete_element(&element);
    }))
    .unwrap();
    assert_eq!(ruleset(), "");
    assert!(!nft.has_object(T).unwrap() && nft.dump_rules(PRE).unwrap().is_empty());
    assert!(nft.dump_elements(DNAT4).unwrap().is_empty() && nft.dump_chains(T).unwrap().is_empty());
}

#[test]
fn a_failed_change_cancels_the_whole_batch() {
    let nft = sandbox();
    commit_base(&nft);
    let element = DNAT4
        .element_with_key((ip("10.0.0.1"), TransportProtocol::Tcp, 80))
        .with_values((ip("10.1.0.1"), 8080));
    nft.commit_batch(one(|b| {
        b.add_element(&element);
    }))
    .unwrap();
    let before = ruleset();
    let other = element.clone().with_values((ip("10.1.0.2"), 8080));
    let rule = NftRule::new().in_set(&[PacketField::IpSaddr], T.named_set("nosuch", &[])).accept();
    let jump = NftRule::new().jump_to("nowhere").with_comment("c1");
    for (bad, text) in [
        (
            one(|b| {
                b.add_element(&element);
            }),
            "add element 10.0.0.1 . tcp . 80 to map inet t dnat4: file exists",
        ),
        (
            one(|b| {
                b.ensure_element(&other);
            }),
            "ensure element 10.0.0.1 . tcp . 80 in map inet t dnat4: file exists",
        ),
        (
            one(|b| {
                b.append_rule(PRE, &rule);
            }),
            "add rule to chain inet t pre: in its lookup expression: no such file or directory",
        ),
        (
            one(|b| {
                b.append_rule(PRE, &jump);
            }),
            "add rule \"c1\" to chain inet t pre: in its immediate expression: no such file or \
             directory",
        ),
        (
            one(|b| {
                b.append_rule(PRE, &NftRule::new().masquerade().with_comment("m"));
            }),
            "add rule \"m\" to chain inet t pre: operation not supported on transport endpoint",
        ),
    ] {
        let mut batch = one(|batch| {
            batch.add_element(&PODS.element_with_key(ip("10.9.9.9")));
            batch.append_rule(POST, &NftRule::new().masquerade());
        });
        batch.changes.extend(bad.changes);
        batch.add_object(T.named_chain("late"));
        let error = nft.commit_batch(batch).unwrap_err().to_string();
        assert_eq!(error, text);
        assert_eq!(ruleset(), before);
    }
}

#[test]
fn sixteen_sockets_commit_concurrently() {
    let nft = sandbox();
    let here = Netns::open_current().unwrap();
    thread::scope(|scope| {
        for worker in 0..16_u8 {
            let here = &here;
            scope.spawn(move || {
                let nft = here.run_inside(|| NftSocket::open().unwrap()).unwrap();
                for round in 0..10 {
                    let mut batch = NftBatch::new();
                    base(&mut batch);
                    batch.flush_chain(POST).append_rule(POST, &NftRule::new().masquerade());
                    batch.add_element(&PODS.element_with_key(IpAddr::from([10, 0, worker, round])));
                    nft.commit_batch(batch).unwrap();
                    let mut update = |nft: &NftSocket| {
                        let rules = nft.dump_rules(REGULAR)?;
                        let mut batch = NftBatch::new();
                        if let Some(last) = rules.last().filter(|_| rules.len() > 3) {
                            batch.delete_rule(REGULAR, last.handle);
                        }
                        batch.append_rule(REGULAR, &NftRule::new().accept());
                        Ok(batch)
                    };
                    nft.update_tables(&mut update).unwrap();
                }
            });
        }
    });
    assert_eq!(nft.dump_elements(PODS).unwrap().len(), 160);
    assert_eq!(nft.dump_rules(POST).unwrap().len(), 1);
    assert_eq!(nft.dump_rules(REGULAR).unwrap().len(), 4);
}
