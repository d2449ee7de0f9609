//! The packet filter loses the rules: nothing opens in between, and the rules come back.

use std::time::Duration;

use serde_json::json;

use super::{FAR, OUTSIDE, World, datagram_arrives, list};
use crate::firewall::firewalld::Firewalld;
use crate::lane::{self, needs};
use crate::support::conflist::Attached;
use crate::support::net::merged;
use crate::support::node::{Container, Running, eventually};
use crate::support::snapshot::without_recorded;

#[test]
fn nothing_opens_after_a_flush_and_the_next_add_restores() {
    for kind in ["bridge", "ptp"] {
        let keys = json!({"allow": [{"to": ["192.0.2.0/24"], "ports": ["udp/53"]}]});
        let world = World::new(kind, &keys);
        world.node.sh("nft flush ruleset");
        assert!(world.reaches(&world.outside, FAR[0], 53), "{kind}: what is allowed passes");
        for (ip, port) in
            [(FAR[0], 54), (FAR[1], 53), (OUTSIDE[0], 53), (OUTSIDE[1], 53), (FAR[3], 53)]
        {
            assert!(!world.reaches(&world.outside, ip, port), "{kind}: {ip} {port}");
        }
        assert!(!world.reaches(&world.node, "10.1.2.1", 53), "{kind}: the host");
        assert!(!world.reaches(&world.neighbour, "10.1.2.2", 53), "{kind}: the neighbour");
        let list = list(&world.node, kind, &json!({"policy": "allow"}));
        let other = Container::new();
        list.add(&Attached::new("other", &other.path())).unwrap();
        let own = super::list(&world.node, kind, &keys);
        own.check(&world.attached(), &world.result).unwrap();
        // Without its rules the table keeps its sets, chains and elements.
        for table in world.node.sh("nft list tables | grep egress").lines() {
            world.node.sh(&format!("nft flush {table}"));
        }
        list.add(&Attached::new("third", &Container::new().path())).unwrap();
        own.check(&world.attached(), &world.result).unwrap();
        assert!(
            world.reaches(&world.outside, FAR[0], 53) && !world.reaches(&world.outside, FAR[0], 54),
            "{kind}"
        );
    }
}

#[test]
fn repair_restores_policies_and_filters() {
    let keys = json!({"profile": "sandbox"});
    let world = World::new("bridge", &keys);
    let list = list(&world.node, "bridge", &keys);
    // The chains of this one have the same name in both tables.
    let empty = super::list(&world.node, "bridge", &json!({}));
    let (second, third) = (Container::new(), Container::new());
    let closed = Attached::new("closed", &second.path());
    let of_closed = empty.add(&closed).unwrap();
    let rules = || {
        let text = without_recorded(&world.node.sh("nft -s list ruleset"));
        let mut lines: Vec<_> = text
            .lines()
            .map(|line| line.trim().trim_start_matches("elements = { ").to_owned())
            .collect();
        lines.sort();
        lines
    };
    let before = rules();
    for damage in [
        "nft flush ruleset",
        "nft flush map inet cnibox_egress ports",
        "nft delete table bridge cnibox_egress",
        "nft flush table bridge cnibox_egress",
        "nft flush table inet cnibox_egress; nft flush table bridge cnibox_egress",
    ] {
        world.node.sh(damage);
        list.add(&Attached::new("third", &third.path())).unwrap();
        list.check(&world.attached(), &world.result).unwrap();
        empty.check(&closed, &of_closed).unwrap();
        list.del(&Attached::new("third", &third.path()), None).unwrap();
        world.node.sh(damage);
        let outcome = world.node.cnibox(&["repair"]).run();
        assert!(outcome.status == Some(0) && outcome.stdout.contains("restored: "), "{outcome:?}");
        list.check(&world.attached(), &world.result).unwrap();
        empty.check(&closed, &of_closed).unwrap();
        assert!(rules() == before, "{damage}:\n{}", world.node.sh("nft list ruleset"));
        assert_eq!(world.node.cnibox(&["repair"]).printed(), "nothing was missing\n");
    }
}

/// Linux 5.10 adds no intervals of several fields that a flush of the same transaction has removed.
#[test]
fn a_set_of_many_intervals_is_restored() {
    let allowed = |n: usize| {
        let ports = format!("tcp/{}-{}", 1000 + n, 1001 + n);
        json!({"to": [format!("198.18.{n}.0/24")], "ports": [ports]})
    };
    let keys = json!({"allow": (0..200).map(allowed).collect::<Vec<_>>()});
    let world = World::new("bridge", &keys);
    let rules = || without_recorded(&world.node.sh("nft -s list ruleset"));
    let (before, text) = (rules(), world.node.sh("nft list sets table inet cnibox_egress"));
    let set = text.split_whitespace().find(|word| word.ends_with("_ranges4")).unwrap();
    let element = "{ 198.18.9.0/24 . tcp . 1009-1010 }";
    world.node.sh(&format!("nft delete element inet cnibox_egress {set} '{element}'"));
    assert!(world.node.cnibox(&["repair"]).printed().contains("restored: "));
    assert!(rules() == before, "{}", rules());
}

/// Whoever changes the tables leaves names and comments as they are.
#[test]
fn changed_rules_are_found_and_restored() {
    needs!(lane::NFT_L4PROTO_IN_CONCATENATIONS);
    let keys = json!({"allow": [{"to": ["192.0.2.0/24"], "ports": ["udp/53"]}]});
    let world = World::new("bridge", &keys);
    let (list, third) = (list(&world.node, "bridge", &keys), Container::new());
    // Counters and handles differ.
    let rules = || without_recorded(&world.node.sh("nft -s list ruleset"));
    let listed = |text: &str| {
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let before = listed(&rules());
    let chains = world.node.sh("nft list ruleset");
    let policy = |family: &str| {
        let table = chains
            .split("table ")
            .find(|text| text.starts_with(&format!("{family} cnibox_egress {{")))
            .unwrap();
        let at = table.lines().find_map(|line| line.trim().strip_prefix("chain policy_")).unwrap();
        format!("{family} cnibox_egress policy_{}", at.trim_end_matches(" {"))
    };
    let (packets, frames) = (policy("inet"), policy("bridge"));
    let change = |chain: &str, comment: &str, rule: &str| {
        let find = format!(
            "nft -a list chain {chain} | sed -n 's/.*comment \"{comment}\" # handle //p' | head -n1"
        );
        format!("nft replace rule {chain} handle $({find}) {rule} comment '\"{comment}\"'")
    };
    let moved = |family: &str, chain: &str, from: &str, to: &str| {
        let table = format!("{family} cnibox_egress");
        let script = format!(
            "/chain {chain} {{/,/policy/s/hook {from} priority [^;]*/hook {to} priority 0/"
        );
        format!(
            "T=$(mktemp) && nft -s list table {table} | sed '{script}' >$T && \
             nft delete table {table} && nft -f $T && rm $T"
        )
    };
    let mac = world.result["interfaces"]
        .as_array()
        .unwrap()
        .iter()
        .find(|entry| entry["name"] == "eth0")
        .unwrap();
    let ports = format!("cnibox_egress ports '{{ \"br0\" . {} }}'", mac["mac"].as_str().unwrap());
    let damages = [
        ("table inet cnibox_egress is dormant", "nft add table inet cnibox_egress '{ flags dormant; }'".to_owned()),
        ("table bridge cnibox_egress is dormant", "nft add table bridge cnibox_egress '{ flags dormant; }'".to_owned()),
        (
            "table inet cnibox_egress is dormant",
            "nft add table inet cnibox_egress '{ flags dormant; }' && nft flush chain inet cnibox_egress prerouting && \
             nft delete chain inet cnibox_egress prerouting"
                .to_owned(),
        ),
        (
            "is missing in chain inet",
            "nft add chain inet cnibox_egress x && nft flush chain inet cnibox_egress prerouting && \
             nft delete chain inet cnibox_egress prerouting && nft add chain inet cnibox_egress prerouting && \
             nft delete chain inet cnibox_egress x"
                .to_owned(),
        ),
        ("a rule of another owner", "nft insert rule inet cnibox_egress prerouting accept".to_owned()),
        ("a rule of another owner", "nft add rule inet cnibox_egress link accept".to_owned()),
        ("a rule of another owner", "nft insert rule bridge cnibox_egress forward accept".to_owned()),
        ("a rule of another owner", "nft insert rule bridge cnibox_egress refused accept".to_owned()),
        ("was changed", format!("nft insert rule {packets} accept")),
        ("was changed", format!("nft insert rule {frames} accept")),
        ("refused was changed", change("inet cnibox_egress refused", "drop", "accept")),
        ("rejected was changed", change("inet cnibox_egress rejected", "reject", "accept")),
        ("link was changed", change("inet cnibox_egress link", "IPv4 options", "ip saddr 10.1.2.0/24 accept")),
        ("prerouting was changed", change("bridge cnibox_egress prerouting", "from another address", "iifname x drop")),
        ("was changed", change(&packets, "rejected", "accept")),
        ("was changed", change(&packets, "ranges4", "ip daddr 0.0.0.0/0 accept")),
        ("was changed", change(&frames, "refused", "accept")),
        ("was changed", format!("nft delete element inet {ports} && nft add element inet {}", ports.replace(" }", " : accept }"))),
        // nft writes other expressions than it lists.
        ("was changed", moved("inet", "prerouting", "prerouting", "input")),
        ("was changed", moved("bridge", "prerouting", "prerouting", "input")),
        ("was changed", moved("bridge", "forward", "forward", "output")),
        (
            "at another hook",
            "nft flush chain inet cnibox_egress forward && nft delete chain inet cnibox_egress forward && \
             nft add chain inet cnibox_egress forward '{ type filter hook input priority 0; }' && nft add rule inet \
             cnibox_egress forward iifname . ether saddr vmap @ports comment '\"policy of the container\"'"
                .to_owned(),
        ),
    ];
    for (found, damage) in &damages {
        let restorations: [&dyn Fn(); 2] = [
            &|| {
                list.add(&Attached::new("third", &third.path())).unwrap();
                list.del(&Attached::new("third", &third.path()), None).unwrap();
            },
            &|| assert_eq!(world.node.cnibox(&["repair"]).run().status, Some(0)),
        ];
        // ADD compares no expressions of rules, and no hooks.
        let is_quick = ["nft add", "nft insert"].iter().any(|command| damage.starts_with(command));
        for restore in &restorations[usize::from(!is_quick)..] {
            world.node.sh(damage);
            let error = list.check(&world.attached(), &world.result).unwrap_err();
            assert!(format!("{error:?}").contains(found), "{damage}: {error:?}");
            restore();
            list.check(&world.attached(), &world.result).unwrap();
            assert_eq!(listed(&rules()), before, "{damage}");
        }
    }
    assert_eq!(world.node.cnibox(&["repair"]).printed(), "nothing was missing\n");
}

/// As administrators save it for nftables.service: a table that nft does not read would prevent all
/// of their rules.
#[test]
fn a_saved_listing_is_loaded_again() {
    needs!(lane::NFT_L4PROTO_IN_CONCATENATIONS);
    let keys = json!({"allow": [{"to": ["192.0.2.0/24"], "ports": ["udp/53"]}, {"to": ["198.18.0.0/15", "10.1.2.9"]}]});
    let (world, other) = (World::new("bridge", &keys), Container::new());
    let mut all = list(&world.node, "bridge", &keys);
    let plugins = all.conf["plugins"].as_array_mut().unwrap();
    for (key, value) in [
        ("macspoofchk", json!(true)),
        ("ipMasq", json!(true)),
        ("ipMasqBackend", json!("nftables")),
    ] {
        plugins[0][key] = value;
    }
    let ports = json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"},
        {"hostPort": 8081, "containerPort": 81, "protocol": "udp", "hostIP": "127.0.0.1"}]);
    let mapping = json!({"type": "portmap", "backend": "nftables", "conditionsV4": ["ip", "saddr", "10.9.0.0/24"]});
    plugins.insert(1, merged(&mapping, &json!({"runtimeConfig": {"portMappings": ports}})));
    plugins
        .insert(2, json!({"type": "firewall", "backend": "nftables", "ingressPolicy": "isolated"}));
    let at = Attached::new("other", &other.path());
    let result = all.add(&at).unwrap();
    // Recorded flows of each kind.
    for ip in [OUTSIDE[0], OUTSIDE[1], "10.1.2.2"] {
        world.inside.sh(&format!("ping -c 1 -W 1 {ip} || true"));
        assert!(
            !world.reaches(&world.outside, FAR[0], 54)
                && !world.reaches(&world.outside, FAR[3], 54)
        );
    }
    world.node.sh("F=$(mktemp) && nft list ruleset >$F && nft flush ruleset && nft -f $F && rm $F");
    assert!(world.reaches(&world.outside, FAR[0], 53));
    assert!(
        !world.reaches(&world.outside, FAR[0], 54) && !world.reaches(&world.outside, FAR[3], 53)
    );
    assert_eq!(world.node.cnibox(&["repair"]).run().status, Some(0));
    all.check(&at, &result).unwrap();
}

#[test]
fn watch_restores_within_a_second() {
    let keys = json!({"profile": "sandbox"});
    let world = World::new("bridge", &keys);
    let list = list(&world.node, "bridge", &keys);
    let _watch = Running::start(&world.node.cnibox(&["repair", "--watch"]));
    std::thread::sleep(Duration::from_millis(300));
    world.node.sh("nft flush ruleset");
    eventually("the policy is not restored", || {
        list.check(&world.attached(), &world.result).is_ok()
    });
}

#[test]
fn a_start_and_a_reload_of_firewalld_open_nothing() {
    let keys = json!({"allow": [{"to": ["192.0.2.0/24"]}]});
    let world = World::new("bridge", &keys);
    let list = list(&world.node, "bridge", &keys);
    let Some(mut firewalld) = Firewalld::start(&world.node) else { return };
    if !firewalld.serve_itself() {
        return;
    }
    let judged = || {
        list.check(&world.attached(), &world.result).unwrap();
        assert!(world.reaches(&world.outside, FAR[0], 9));
        assert!(
            !world.reaches(&world.outside, FAR[1], 9)
                && !world.reaches(&world.neighbour, "10.1.2.2", 9)
        );
    };
    firewalld.trust_all_interfaces();
    judged();
    firewalld.reload();
    judged();
}

#[test]
fn the_filter_stays_when_the_device_of_bandwidth_is_deleted() {
    let keys = json!({"allow": [{"to": ["192.0.2.0/24"]}]});
    let (world, container) = (World::new("bridge", &keys), Container::new());
    let mut list = list(&world.node, "bridge", &keys);
    let shaping = json!({"type": "bandwidth", "egressRate": 80_000_000, "egressBurst": 8_000_000});
    list.conf["plugins"].as_array_mut().unwrap().insert(1, shaping);
    let at = Attached::new("shaped", &container.path());
    let result = list.add(&at).unwrap();
    list.check(&at, &result).unwrap();
    for plugin in [2, 1] {
        list.call("DEL", &at, plugin, Some(&result)).ok();
    }
    assert!(datagram_arrives(&container, &world.outside, FAR[0], 9));
    assert!(!datagram_arrives(&container, &world.outside, FAR[1], 9));
    list.del(&at, Some(&result)).unwrap();
}

#[test]
fn the_filter_stays_until_the_pair_is_deleted() {
    let keys = json!({"allow": [{"to": ["192.0.2.0/24"]}]});
    let world = World::new("bridge", &keys);
    let list = list(&world.node, "bridge", &keys);
    // DEL of egress alone: the container may still run.
    list.call("DEL", &world.attached(), 1, Some(&world.result)).ok();
    assert!(!world.node.sh("nft list ruleset").contains("policy_"));
    assert!(world.reaches(&world.outside, FAR[0], 9) && !world.reaches(&world.outside, FAR[1], 9));
    list.call("DEL", &world.attached(), 0, Some(&world.result)).ok();
}
