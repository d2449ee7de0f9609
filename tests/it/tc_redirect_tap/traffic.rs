//! A machine behind the device, whose program exchanges raw frames: it has the container's
//! addresses, and the container receives nothing.

use serde_json::{Value, json};

use super::SUBJECT;
use crate::support::net::{FIRST, GATEWAYS, Net, merged};
use crate::support::node::{Container, Node, eventually};
use crate::support::tap::{Machine, SINGLE, frame, open};

#[test]
fn a_machine_has_the_network_of_the_container() {
    for plugin in ["ptp", "bridge"] {
        for all in [false, true] {
            let subject = crate::support::chained::Subject {
                behind: (
                    plugin,
                    |node| json!({"isGateway": true, "ipam": crate::support::net::dual_ipam(node)}),
                ),
                ..SUBJECT
            };
            let pod = subject.pod_with("1.1.0", &json!({"allAddresses": all}));
            let last = pod.call("ADD").result();
            let machine = Machine::boot(&pod.container, &last);
            let families = if all { 2 } else { 1 };
            for (gateway, address) in GATEWAYS.iter().zip(FIRST).take(families) {
                eventually("the machine reaches the node", || machine.inside.pings(gateway));
                assert!(
                    pod.node.sh(&format!("ping -n -c 1 -W 2 {address}")).contains("1 received"),
                    "{plugin} {address}"
                );
            }
            let counters = machine.inside.ip("-s link show eth0");
            assert!(counters[0]["stats64"]["rx"]["packets"].as_u64() >= Some(3), "{counters}");
            // The container's own stack does not see the packets.
            pod.container.sh("ip addr flush dev eth0");
            assert!(machine.inside.pings(GATEWAYS[0]), "{plugin}");
            drop(machine);
            pod.call("DEL").ok();
        }
    }
}

#[test]
fn large_packets_and_streams_pass() {
    let pod = SUBJECT.pod_with("1.0.0", &json!({"allAddresses": true}));
    let last = pod.call("ADD").result();
    let machine = Machine::boot(&pod.container, &last);
    for size in [1472, 20_000] {
        eventually("large packets are answered", || {
            machine.inside.try_sh(&format!("ping -n -c 1 -W 2 -s {size} {}", GATEWAYS[0]))
        });
    }
    let listener = std::net::TcpListener::bind((GATEWAYS[0], 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let sent = machine.inside.run(|| {
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut total = Vec::new();
                std::io::Read::read_to_end(&mut listener.accept().unwrap().0, &mut total).unwrap();
                total.len()
            });
            let mut stream = std::net::TcpStream::connect((GATEWAYS[0], port)).unwrap();
            std::io::Write::write_all(&mut stream, &vec![7; 2_000_000]).unwrap();
            drop(stream);
            reader.join().unwrap()
        })
    });
    assert_eq!(sent, 2_000_000);
}

#[test]
fn a_reader_receives_what_the_interface_gets() {
    let pod = SUBJECT.pod("1.1.0");
    let last = pod.call("ADD").result();
    let mut tap = pod.container.run(|| open("tap0", SINGLE)).unwrap();
    let mac = last["interfaces"][1]["mac"].as_str().unwrap();
    let octets: Vec<u8> =
        mac.split(':').map(|octet| u8::from_str_radix(octet, 16).unwrap()).collect();
    let node = last["interfaces"][0]["name"].as_str().unwrap();
    pod.node.sh(&format!("ip neigh replace {} lladdr {mac} dev {node}", FIRST[0]));
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(10);
    let ping = pod.node.sh(&format!("ping -n -c 1 -W 1 -p c0ffee {} || true", FIRST[0]));
    assert!(ping.contains("0 received"), "the container does not answer: {ping}");
    let mut frames = std::iter::from_fn(|| frame(&mut tap, deadline));
    let is_ping = |bytes: &Vec<u8>| {
        bytes[..6] == octets && bytes.windows(3).any(|three| three == [0xc0, 0xff, 0xee])
    };
    assert!(frames.any(|bytes| is_ping(&bytes)), "the ping did not arrive");
}

#[test]
fn lists_with_other_chained_plugins_work_in_either_order() {
    let ports = json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]);
    let tap = json!({"type": "tc-redirect-tap", "allAddresses": true});
    let firewall = json!({"type": "firewall", "backend": "nftables"});
    let portmap =
        json!({"type": "portmap", "backend": "nftables", "runtimeConfig": {"portMappings": ports}});
    let tuning =
        |node: &Node| json!({"type": "tuning", "dataDir": node.state("tuning"), "mtu": 1400});
    let rates = json!({"type": "bandwidth", "egressRate": 80_000_000, "egressBurst": 8_000_000});
    let sbr = json!({"type": "sbr"});
    for order in 0..2 {
        let (node, container) = (Node::new(), Container::new());
        let ipam = crate::support::net::dual_ipam(&node);
        let first = json!({"type": "bridge", "isDefaultGateway": true, "ipMasq": true, "ipMasqBackend": "nftables", "ipam": ipam});
        let mut plugins = vec![
            first,
            firewall.clone(),
            portmap.clone(),
            tuning(&node),
            rates.clone(),
            sbr.clone(),
        ];
        plugins.insert(if order == 0 { 1 } else { plugins.len() }, tap.clone());
        if order == 0 {
            // It changes the MTU, which the device takes over from the interface.
            plugins.retain(|conf| conf["type"] != "tuning");
        }
        let call = |verb: &str, conf: &Value, prev: &Value| {
            let conf =
                merged(&json!({"cniVersion": "1.1.0", "name": "net", "prevResult": prev}), conf);
            node.call(conf["type"].as_str().unwrap(), verb)
                .id("c1")
                .netns(&container.path())
                .conf(&conf)
        };
        let last = plugins.iter().fold(Value::Null, |prev, conf| call("ADD", conf, &prev).result());
        for conf in &plugins {
            call("CHECK", conf, &last).ok();
        }
        let machine = Machine::boot(&container, &last);
        eventually("the machine reaches the node", || machine.inside.pings(GATEWAYS[0]));
        assert!(machine.inside.pings(GATEWAYS[1]), "{order}");
        drop(machine);
        for conf in plugins.iter().rev() {
            call("DEL", conf, &last).ok();
        }
        assert!(Net::new(&node, "bridge", "1.1.0", &json!({})).leases().is_empty());
    }
}
