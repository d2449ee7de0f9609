//! CHECK, and DEL beside foreign rules and routes.

use serde_json::json;

use super::{Pod, SUBJECT};
use crate::support::node::assert_unchanged;

#[test]
fn check_reports_every_kind_of_damage() {
    let attached = SUBJECT.pod_with("1.1.0", &json!({"gateways": ["10.1.2.1"]}));
    let again = || {
        attached.call("DEL").ok();
        attached.call("ADD").result();
        attached.call("CHECK").ok();
    };
    attached.call("ADD").result();
    let sh = |line: &str| drop(attached.container.sh(line));
    sh("ip rule del from 10.1.2.2");
    attached.check_finds("sbr: no rule from 10.1.2.2 to a table of its own");
    sh("ip rule add from 10.1.2.2 lookup main");
    attached.check_finds("sbr: no rule from 10.1.2.2 to a table of its own");
    sh("ip rule del from 10.1.2.2");
    sh("ip rule add from 10.1.2.2 lookup 100");
    again();
    sh("ip -6 rule del from 2001:db8:1::2");
    attached.check_finds("sbr: no rule from 2001:db8:1::2 to a table of its own");
    sh("ip -6 rule add from 2001:db8:1::2 lookup 101");
    again();
    sh("ip route del default table 100");
    attached.check_finds("sbr: the table 100 has no default route via 10.1.2.1 dev eth0");
    sh("ip route add default via 10.1.2.7 table 100");
    attached.check_finds("sbr: the table 100 has no default route via 10.1.2.1 dev eth0");
    again();
    sh("ip -6 route del default table 101");
    let msg = "sbr: the table 101 has no default route via 2001:db8:1::1 dev eth0";
    attached.check_finds(msg);
    again();
    sh("ip route del 192.168.0.0/16 table 100");
    attached.check_finds("Expected Route 192.168.0.0/16 via 10.1.2.9 not found in routing table");
    sh("ip route add 192.168.0.0/16 via 10.1.2.9 table 100");
    again();
    let error = attached.bare("CHECK").error();
    assert_eq!(error.brief(), (999, "Required prevResult missing"));
}

#[test]
fn check_covers_the_fixed_table_and_hints() {
    let attached = SUBJECT.pod_with("1.1.0", &json!({"table": 300}));
    attached.check_finds("sbr: no rule from 10.1.2.2 to the table 300");
    attached.call("ADD").result();
    attached.call("CHECK").ok();
    attached.container.sh("ip -6 rule del from 2001:db8:1::2");
    attached.check_finds("sbr: no rule from 2001:db8:1::2 to the table 300");

    let attached = SUBJECT.pod_with("1.1.0", &json!({"addSourceHints": true}));
    attached.call("ADD").result();
    attached.call("CHECK").ok();
    attached.container.sh("ip route del 10.1.2.0/24");
    attached.check_finds("sbr: the main table has no route to 10.1.2.0/24 with a source address");
}

#[test]
fn del_keeps_rules_of_others() {
    let pod = Pod::new();
    let sh = |line: &str| drop(pod.container.sh(line));
    // The same source with a mark, an interface, the main table, or another interface's table.
    sh("ip rule add from 192.168.1.209 fwmark 7 lookup 100");
    sh("ip rule add from 192.168.1.209 iif eth0 lookup 120");
    sh("ip rule add from 192.168.1.209 lookup main");
    sh("ip route add default via 10.0.0.1 table 130");
    sh("ip rule add from 192.168.1.209 lookup 130");
    sh("ip rule add from 192.168.1.208 lookup 140");
    let before = pod.container.snapshot(&pod.node);
    pod.add(&json!({}));
    assert_eq!(pod.rules("-4").len(), 6);
    pod.call("DEL", &json!({})).ok();
    assert_unchanged(&before, &pod.container.snapshot(&pod.node));
    pod.call("DEL", &json!({"prevResult": null})).ok();
    assert_unchanged(&before, &pod.container.snapshot(&pod.node));
}

#[test]
fn del_with_a_fixed_table_keeps_other_tables() {
    let pod = Pod::new();
    pod.container.sh("ip rule add from 192.168.1.209 lookup 4000");
    pod.add(&json!({"table": 5000}));
    pod.add(&json!({"table": 5000}));
    assert_eq!(pod.rules("-4").len(), 2, "the second ADD finds the first one's rule");
    pod.call("DEL", &json!({"table": 5000})).ok();
    assert_eq!(pod.rules("-4"), ["from 192.168.1.209 lookup 4000"]);
}

#[test]
fn del_removes_rules_without_interface_or_addresses() {
    let gone = ["ip link del net1", "ip addr flush dev net1"];
    for (prev, gone) in [(true, gone[0]), (false, gone[0]), (true, gone[1]), (false, gone[1])] {
        for table in [json!(null), json!(5000)] {
            let pod = Pod::dual();
            pod.add(&json!({"table": table}));
            pod.container.sh("ip rule add from 10.0.0.2 lookup 700");
            pod.container.sh(gone);
            let prev = if prev { pod.prev.clone() } else { json!(null) };
            pod.call("DEL", &json!({"table": table, "prevResult": prev})).ok();
            let left = pod.rules("-4");
            assert_eq!(left, ["from 10.0.0.2 lookup 700"], "eth0 has that address: {gone}");
            assert_eq!(pod.rules("-6"), [""; 0], "{gone}");
        }
    }
}

#[test]
fn two_interfaces_of_a_container_have_separate_tables() {
    let pod = Pod::new();
    let before = pod.container.snapshot(&pod.node);
    pod.add(&json!({}));
    let one = pod.container.snapshot(&pod.node);
    let eth0 = json!({"prevResult": {
        "interfaces": [{"name": "eth0"}],
        "ips": [{"address": "10.0.0.2/24", "gateway": "10.0.0.1", "interface": 0}],
        "routes": [{"dst": "0.0.0.0/0"}],
    }});
    pod.call("ADD", &eth0).ifname("eth0").result();
    assert_eq!(pod.rules("-4"), ["from 10.0.0.2 lookup 101", "from 192.168.1.209 lookup 100"]);
    assert_eq!(pod.routes("-4", "main"), [""; 0]);
    pod.call("DEL", &eth0).ifname("eth0").ok();
    assert_unchanged(&one, &pod.container.snapshot(&pod.node));
    pod.call("DEL", &json!({})).ok();
    assert_unchanged(&before, &pod.container.snapshot(&pod.node));
}
