//! Policy rules.

use super::{net, sandbox};
use crate::netlink::{IpFamily, Netlink, PolicyRule};

/// The rules without those that the kernel creates.
fn own(netlink: &Netlink) -> Vec<PolicyRule> {
    let mut rules = netlink.dump_rules().unwrap();
    rules.retain(|rule| rule.src.is_some() || !rule.plain);
    rules
}

#[test]
fn all_fields_of_a_rule_are_read_back() {
    let netlink = sandbox();
    for (src, table) in [("10.1.0.2/32", 100), ("10.2.0.0/16", 70_000), ("fd00::2/128", 101)] {
        let src = net(src);
        let rule = PolicyRule {
            family: IpFamily::of_address(src.addr()),
            src: Some(src),
            table,
            priority: Some(400),
            plain: true,
        };
        netlink.add_rule(&rule).unwrap();
        assert!(netlink.add_rule(&rule).unwrap_err().is_exists());
        assert_eq!(own(&netlink), std::slice::from_ref(&rule));
        assert_eq!(netlink.delete_rule(&rule), Ok(true));
        assert_eq!(netlink.delete_rule(&rule), Ok(false));
    }
}

#[test]
fn the_kernel_inserts_a_later_rule_before_the_others() {
    let netlink = sandbox();
    let rules = [("10.1.0.2", 100), ("10.1.0.3", 101)]
        .map(|(addr, table)| PolicyRule::from_host(addr.parse().unwrap(), table));
    for rule in &rules {
        netlink.add_rule(rule).unwrap();
    }
    let tables: Vec<_> = own(&netlink).iter().map(|rule| (rule.table, rule.priority)).collect();
    assert_eq!(tables, [(101, Some(32764)), (100, Some(32765))]);
}

#[test]
fn a_rule_with_another_condition_is_not_plain() {
    let netlink = sandbox();
    for narrowing in ["fwmark 7", "iif lo", "oif lo", "to 10.9.0.0/16", "tos 0x10", "ipproto tcp"] {
        let line = format!("rule add from 10.1.0.2 {narrowing} lookup 100 pref 9");
        crate::netlink::tests::ip(&line);
        let rules = own(&netlink);
        assert!(!rules[0].plain && rules[0].src == Some(net("10.1.0.2/32")), "{narrowing}");
        crate::netlink::tests::ip("rule del pref 9");
    }
    crate::netlink::tests::ip("rule add not from 10.1.0.2 lookup 100");
    crate::netlink::tests::ip("rule add from 10.1.0.2 blackhole");
    crate::netlink::tests::ip("rule add from 10.1.0.2 lookup main suppress_prefixlength 0");
    assert_eq!(own(&netlink).iter().map(|rule| rule.plain).collect::<Vec<_>>(), [false; 3]);
}

#[test]
fn a_rule_is_formatted_as_by_iproute2() {
    let rule = PolicyRule::from_host("10.1.0.2".parse().unwrap(), 100);
    assert_eq!(rule.to_string(), "from 10.1.0.2 lookup 100");
    let rule = PolicyRule { src: None, table: 254, ..rule };
    assert_eq!(rule.to_string(), "from all lookup main");
}
