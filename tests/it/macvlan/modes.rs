//! The traffic that each mode permits and blocks.

use serde_json::{Value, json};

use super::{layer2, simple};
use crate::support::net::wire;
use crate::support::node::{Container, Node, assert_unchanged};
use crate::support::traffic::Place;

const ONE: &str = "10.1.2.2";
const TWO: &str = "10.1.2.3";
const GATEWAY: &str = "10.1.2.1";

/// Two containers on the same master in this mode.
fn two(node: &Node, mode: &str) -> [Container; 2] {
    let net = simple(node, &json!({"mode": mode}));
    ["c1", "c2"].map(|id| {
        let container = Container::new();
        net.call("ADD", id).netns(&container.path()).result();
        container
    })
}

/// Whether the containers reach each other; both must reach the external network.
#[track_caller]
fn see_each_other([one, two]: &[Container; 2]) -> bool {
    assert!(one.reaches(GATEWAY) && two.reaches(GATEWAY));
    let (there, back) = (one.reaches_within(TWO, 2), two.reaches_within(ONE, 2));
    assert_eq!(there, back);
    there
}

#[test]
fn children_in_mode_bridge_reach_each_other() {
    let node = Node::new();
    wire(&node);
    let pair = two(&node, "bridge");
    assert!(see_each_other(&pair));
    // Frames flooded to the far end do not matter: without an address it does not reply.
    node.sh("ip addr flush dev wire1");
    assert!(pair[0].reaches(TWO) && !pair[0].reaches_within(GATEWAY, 1));
}

#[test]
fn children_in_mode_private_do_not_reach_each_other() {
    let node = Node::new();
    wire(&node);
    assert!(!see_each_other(&two(&node, "private")));
}

#[test]
fn children_in_mode_vepa_need_a_switch_that_reflects() {
    let node = Node::new();
    wire(&node);
    let pair = two(&node, "vepa");
    assert!(!see_each_other(&pair));
    node.sh("ip addr flush dev wire1; ip link add sw0 type bridge");
    node.sh("ip link set wire1 master sw0; ip link set sw0 up; ip addr add 10.1.2.1/24 dev sw0");
    assert!(!see_each_other(&pair));
    node.sh("ip link set wire1 type bridge_slave hairpin on");
    assert!(see_each_other(&pair));
}

#[test]
fn a_master_in_mode_passthru_has_one_child() {
    let node = Node::new();
    wire(&node);
    let net = layer2(&node, &json!({"mode": "passthru"}));
    let (one, two) = (Container::new(), Container::new());
    let before = node.snapshot();
    let result = net.add(&one);
    let master = node.ip("link show wire0");
    assert_eq!(result["interfaces"][0]["mac"], master[0]["address"], "the address is one");
    one.sh("ip addr add 10.1.2.2/24 dev eth0");
    assert!(one.reaches(GATEWAY));
    for mode in ["passthru", "bridge"] {
        let mut second = net.conf.clone();
        second["mode"] = json!(mode);
        let call = net.call("ADD", "c2").netns(&two.path()).conf(&second);
        let before = (node.snapshot(), two.snapshot(&node));
        let error = call.error();
        let start = "failed to create macvlan: add link \"eth0\" (macvlan): ";
        assert!(error.msg.starts_with(start), "{mode}: {error:?}");
        let remedy = "choose another master: a macvlan in mode \"passthru\" is the only one on its master, \
                      which must be an Ethernet device";
        assert_eq!(error.details, remedy, "{mode}");
        assert_unchanged(&before.0, &node.snapshot());
        assert_unchanged(&before.1, &two.snapshot(&node));
    }
    net.check(&one, &result).ok();
    net.del(&one);
    assert_unchanged(&before, &node.snapshot());
}

#[test]
fn a_mac_for_mode_passthru_is_refused_with_a_warning() {
    let node = Node::new();
    wire(&node);
    let container = Container::new();
    let net = layer2(&node, &json!({"mode": "passthru", "mac": "02:11:22:33:44:55"}));
    let outcome = net.on("ADD", &container).run();
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    assert!(outcome.stderr.contains("02:11:22:33:44:55 is not used"), "{outcome:?}");
    let result: Value = serde_json::from_str(&outcome.stdout).unwrap();
    let link = container.ip("link show eth0");
    assert_eq!(result["interfaces"][0]["mac"], link[0]["address"]);
    assert_eq!(node.ip("link show wire0")[0]["address"], link[0]["address"]);
}

#[test]
fn every_mode_is_set_and_the_default_is_bridge() {
    let node = Node::new();
    wire(&node);
    let set = |mode| ("mode", mode);
    for (key, kernel) in [
        ("bridge", "bridge"),
        ("", "bridge"),
        ("private", "private"),
        ("vepa", "vepa"),
        ("passthru", "passthru"),
    ] {
        let container = Container::new();
        let net = layer2(&node, &[set(key)].into_iter().collect());
        let result = net.add(&container);
        let link = container.ip("-d link show eth0");
        assert_eq!(link[0]["linkinfo"]["info_data"]["mode"], kernel, "{key}");
        net.check(&container, &result).ok();
        net.del(&container);
    }
    let container = Container::new();
    let msg = "unknown macvlan mode: \"Bridge\"";
    layer2(&node, &json!({"mode": "Bridge"})).add_is_refused(&container, 7, msg);
}
