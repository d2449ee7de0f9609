//! The location of the master, its deletion, and the properties that the VLAN inherits.

use serde_json::json;

use super::{quick, simple, tagged_wire};
use crate::lane::{self, needs};
use crate::support::net::{GATEWAYS, settles};
use crate::support::node::Node;
use crate::support::traffic::Place;

#[test]
fn the_limits_of_vlan_id_and_mtu_are_accepted() {
    needs!(lane::VLAN);
    let (node, container) = (Node::new(), quick());
    tagged_wire(&node, &[100]);
    node.sh("ip link set wire0 mtu 1300");
    for (keys, id, mtu) in [
        (json!({"vlanId": 0}), 0, 1300),
        (json!({"vlanId": 1, "mtu": 0}), 1, 1300),
        (json!({"vlanId": 4094, "mtu": 1300}), 4094, 1300),
        (json!({"mtu": 68}), 100, 68),
    ] {
        let net = simple(&node, &keys);
        let result = net.add(&container);
        let link = &container.ip("-d link show eth0")[0];
        assert_eq!((&link["mtu"], &link["linkinfo"]["info_data"]["id"]), (&json!(mtu), &json!(id)));
        let entry = &result["interfaces"][0];
        assert_eq!((&entry["mtu"], &entry["mac"]), (&json!(mtu), &link["address"]));
        net.check(&container, &result).ok();
        net.del(&container);
    }
}

#[test]
fn the_container_may_use_an_interface_name_of_the_host() {
    needs!(lane::VLAN);
    let node = Node::new();
    tagged_wire(&node, &[100, 200]);
    node.sh("ip link add eth0 up type bridge");
    let before = node.snapshot();
    let (one, two) = (quick(), quick());
    let net = simple(&node, &json!({}));
    let result = net.add(&one);
    net.with(&json!({"vlanId": 200})).call("ADD", "c2").netns(&two.path()).result();
    assert!(one.reaches(GATEWAYS[0]));
    net.check(&one, &result).ok();
    net.del(&one);
    net.call("DEL", "c2").netns(&two.path()).ok();
    settles(&before, || node.snapshot());
}

#[test]
fn the_master_may_be_in_the_container() {
    needs!(lane::VLAN);
    let (node, container) = (Node::new(), quick());
    tagged_wire(&node, &[100]);
    node.sh(&format!("ip link set wire0 netns {}", container.path()));
    container.sh("ip link set wire0 up");
    let before = (node.snapshot(), container.snapshot(&node));
    let net = simple(&node, &json!({"linkInContainer": true}));
    // STATUS does not know the container, so the master is not looked up.
    net.call("STATUS", "").ok();
    let result = net.add(&container);
    assert!(container.reaches(GATEWAYS[0]));
    net.check(&container, &result).ok();
    let elsewhere = net.with(&json!({"linkInContainer": false}));
    let msg = "failed to lookup master \"wire0\": Link not found";
    elsewhere.check_finds(&container, &result, msg);
    net.del(&container);
    settles(&before.0, || node.snapshot());
    settles(&before.1, || container.snapshot(&node));
    // Without the namespace, the address is released all the same.
    net.add(&container);
    net.call("DEL", "c1").netns("").ok();
    assert_eq!(net.leases(), [""; 0]);
    net.with(&json!({"master": "gone"})).add_is_refused(
        &quick(),
        999,
        "failed to lookup master \"gone\": Link not found",
    );
}

#[test]
fn del_needs_no_master_and_no_valid_configuration() {
    needs!(lane::VLAN);
    let (node, container) = (Node::new(), quick());
    tagged_wire(&node, &[100]);
    let net = simple(&node, &json!({"mtu": 1400}));
    let before = container.snapshot(&node);
    net.add(&container);
    // ADD would be refused now. The kernel itself lowers the VLAN's MTU.
    node.sh("ip link set wire0 mtu 1300");
    net.del(&container);
    settles(&before, || container.snapshot(&node));
    assert_eq!(net.leases(), [""; 0]);
    node.sh("ip link set wire0 mtu 1500");
    for broken in [json!({"master": null}), json!({"vlanId": null}), json!({"vlanId": 9999})] {
        net.add(&container);
        net.with(&broken).del(&container);
        settles(&before, || container.snapshot(&node));
        assert_eq!(net.leases(), [""; 0]);
    }
    net.add(&container);
    // The kernel deletes the VLAN with its master.
    node.sh("ip link del wire0");
    net.del(&container);
    settles(&before, || container.snapshot(&node));
    assert_eq!(net.leases(), [""; 0]);
}

#[test]
fn a_master_that_is_down_is_reported() {
    needs!(lane::VLAN);
    let (node, container) = (Node::new(), quick());
    tagged_wire(&node, &[100]);
    node.sh("ip link set wire0 down");
    let net = simple(&node, &json!({}));
    let msg = "master \"wire0\" is down: network is down";
    net.add_is_refused(&container, 999, msg);
    let status = net.call("STATUS", "").error();
    assert_eq!((status.brief(), status.details.as_str()), ((50, msg), "ip link set wire0 up"));
}
