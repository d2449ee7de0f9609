//! PCI network cards. They belong to the VM's initial network namespace, to which the kernel
//! returns physical devices when a namespace ends; so it is the host here.

use std::fs;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use crate::lane::{self, needs};
use crate::support::net::merged;
use crate::support::node::{Call, Container, Node, eventually};

/// The VM's initial network namespace.
const HOST: &str = "--net=/proc/1/ns/net";

/// The tests have the same cards.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A card with its name and MAC on the host.
struct Card {
    id: String,
    name: String,
    mac: String,
}

/// The first card with an interface in `<function>/<directory>`.
fn card(node: &Node, directory: &str) -> Card {
    let list = node.sh(&format!("nsenter {HOST} ls -d /sys/bus/pci/devices/*/{directory}/*"));
    let path = Path::new(list.lines().next().unwrap());
    let id = path.components().nth(5).unwrap().as_os_str().to_str().unwrap().to_owned();
    let name = path.file_name().unwrap().to_str().unwrap().to_owned();
    let mac = fs::read_to_string(path.join("address")).unwrap().trim().to_owned();
    Card { id, name, mac }
}

fn on_host(node: &Node, line: &str) -> String {
    node.sh(&format!("nsenter {HOST} {line}"))
}

/// A call of the plugin in the initial network namespace.
fn call(node: &Node, verb: &str, keys: &Value, netns: &str) -> Call {
    let common = json!({"cniVersion": "1.1.0", "name": "net", "type": "host-device",
        "ipam": node.host_local(&["10.1.2.0/24"])});
    let call = node.call("host-device", verb).conf(&merged(&common, keys));
    call.id("c1").ifname("net1").netns(netns).under(&["nsenter", HOST])
}

/// Asserts that the card is on the host: up, with its name, MAC and address, without an alias.
#[track_caller]
fn is_back(node: &Node, card: &Card) {
    let link: Value =
        serde_json::from_str(&on_host(node, &format!("ip -j addr show {}", card.name))).unwrap();
    let link = &link[0];
    assert_eq!((&link["address"], &link["mtu"]), (&json!(card.mac), &json!(1500)));
    assert!(link["flags"].as_array().unwrap().contains(&json!("UP")), "{link}");
    assert_eq!(link["ifalias"], Value::Null);
    assert_eq!(link["addr_info"][0]["local"], "192.0.2.7", "{link}");
}

#[test]
fn real_cards_are_found_by_every_key_and_returned() {
    needs!(lane::CARDS);
    let _turn = turn();
    let node = Node::new();
    for directory in ["net", "virtio*/net"] {
        let card = card(&node, directory);
        on_host(&node, &format!("ip addr add 192.0.2.7/24 dev {}", card.name));
        on_host(&node, &format!("ip link set {} up", card.name));
        for keys in [
            json!({"pciBusID": card.id}),
            json!({"runtimeConfig": {"deviceID": card.id}}),
            json!({"device": card.name}),
            json!({"hwaddr": card.mac}),
        ] {
            let container = Container::new();
            let result = call(&node, "ADD", &keys, &container.path()).result();
            let entry = json!({"name": "net1", "mac": card.mac, "mtu": 1500, "pciID": card.id,
                               "sandbox": container.path()});
            assert_eq!(result["interfaces"], json!([entry]), "{keys}");
            assert_eq!(container.ip("link show net1")[0]["ifalias"], json!(card.name));
            let check = merged(&keys, &json!({"prevResult": result}));
            call(&node, "CHECK", &check, &container.path()).ok();
            container.sh("sh -c 'ip link set net1 down; ip link set net1 mtu 1400 address 02:00:00:00:00:99'");
            call(&node, "DEL", &keys, &container.path()).ok();
            is_back(&node, &card);
        }
        ends_with_its_namespace(&node, &card, "true", "true");
        // With a name conflict the kernel chooses another name.
        ends_with_its_namespace(&node, &card, "ip link add net1 type dummy", "ip link del net1");
        on_host(&node, &format!("ip link set {} down", card.name));
        on_host(&node, &format!("ip addr flush dev {}", card.name));
    }
}

fn ends_with_its_namespace(node: &Node, card: &Card, before: &str, after: &str) {
    let keys = json!({"pciBusID": card.id});
    let container = Container::new();
    let path = container.path();
    call(node, "ADD", &keys, &path).result();
    on_host(node, before);
    drop(container);
    eventually("the kernel gives the card back", || on_host(node, "ip link").contains(&card.mac));
    assert!(!on_host(node, "ip link").contains(&format!("{}:", card.name)));
    call(node, "DEL", &keys, &path).ok();
    is_back(node, card);
    call(node, "DEL", &keys, &path).ok();
    on_host(node, after);
}

/// A descriptor holds the namespace when DEL comes, or there is no DEL: the next ADD by the bus
/// address, and GC, give the card its name and state.
#[test]
fn cards_that_come_back_late_have_their_names_and_state() {
    needs!(lane::CARDS);
    let _turn = turn();
    let node = Node::new();
    let card = card(&node, "net");
    on_host(&node, &format!("ip addr add 192.0.2.7/24 dev {}", card.name));
    on_host(&node, &format!("ip link set {} up", card.name));
    let keys = json!({"pciBusID": card.id});
    for (has_del, next) in [(true, "ADD"), (false, "ADD"), (true, "GC"), (true, "cnibox gc")] {
        let container = Container::new();
        let path = container.path();
        call(&node, "ADD", &keys, &path).result();
        let held = fs::File::open(&path).unwrap();
        drop(container);
        if has_del {
            call(&node, "DEL", &keys, &path).ok();
        }
        drop(held);
        let is_here = || on_host(&node, "ip link").contains(&card.mac);
        eventually("the kernel gives the card back", is_here);
        match next {
            "ADD" => {
                let later = Container::new();
                call(&node, "ADD", &keys, &later.path()).id("c2").result();
                call(&node, "DEL", &keys, &path).ok();
                assert_eq!(later.ip("link show net1")[0]["address"], json!(card.mac));
                call(&node, "DEL", &keys, &later.path()).id("c2").ok();
            }
            "GC" => {
                let unlisted = merged(&keys, &json!({"cni.dev/valid-attachments": []}));
                call(&node, "GC", &unlisted, "").ok();
            }
            _ => {
                node.cnibox(&["gc"]).under(&["nsenter", HOST]).printed();
            }
        }
        println!("{has_del} {next}");
        is_back(&node, &card);
        assert_eq!(super::records(&node), "");
    }
    on_host(&node, &format!("ip link set {} down", card.name));
    on_host(&node, &format!("ip addr flush dev {}", card.name));
}

#[test]
fn a_card_with_a_userspace_driver_is_only_reported() {
    needs!(lane::CARDS);
    let _turn = turn();
    let node = Node::new();
    let Card { id, mac, .. } = card(&node, "net");
    let bind = |driver: &str| {
        node.sh(&format!(
            "modprobe uio_pci_generic; cd /sys/bus/pci/devices/{id}
             echo {driver} > driver_override
             echo {id} > driver/unbind
             echo {id} > /sys/bus/pci/drivers_probe"
        ))
    };
    bind("uio_pci_generic");
    let container = Container::new();
    let keys = json!({"runtimeConfig": {"deviceID": id}});
    let result = call(&node, "ADD", &keys, &container.path()).result();
    let entry = json!({"name": "net1", "pciID": id, "sandbox": container.path()});
    assert_eq!(result["interfaces"], json!([entry]));
    assert_eq!(result["ips"][0]["address"], "10.1.2.2/24");
    let check = merged(&keys, &json!({"prevResult": result}));
    call(&node, "CHECK", &check, &container.path()).ok();
    call(&node, "DEL", &keys, &container.path()).ok();
    assert_eq!(node.leases("net"), [""; 0]);
    bind("e1000");
    eventually("the card is the kernel's again", || on_host(&node, "ip link").contains(&mac));
}
