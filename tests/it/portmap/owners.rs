//! Several containers, networks and interfaces: nobody touches another's ports.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{ALL, Ports, Rules, mapping, tcp};
use crate::net::Net;
use crate::node::eventually;

#[test]
fn a_port_of_another_container_is_refused_by_its_name() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let (one, two) = (ports.pod("c1"), ports.pod("c2"));
        let http = json!([mapping(8080, 80, "tcp")]);
        ports.add(&one, &http);
        let before = ports.state();
        let both = json!([mapping(8081, 80, "tcp"), mapping(8080, 80, "tcp")]);
        let error = ports.call("ADD", &two, &both).error();
        let start = "host port 8080/tcp is taken by container \"c1\" (network \"net\"";
        assert!(error.msg.starts_with(start), "{error:?}");
        assert!(error.details.contains("GC"), "{error:?}");
        assert_eq!(ports.state(), before, "{rules:?}");
        ports.del(&two, &both);
        assert_eq!(ports.state(), before, "{rules:?}");
        let others =
            json!([mapping(8080, 80, "udp"), mapping(8080, 80, "sctp"), mapping(8079, 80, "tcp")]);
        ports.add(&two, &others);
        ports.del(&two, &others);
        let one_address = json!([
            {"hostPort": 8080, "containerPort": 81, "protocol": "tcp", "hostIP": "10.1.2.1"}]);
        if rules == Rules::Nftables {
            ports.add(&two, &one_address);
            assert!(tcp(&ports.node, &two.container, "10.1.2.1:8080", 81).is_some());
            assert!(tcp(&ports.node, &one.container, "127.0.0.1:8080", 80).is_some());
            ports.del(&two, &one_address);
        } else {
            let error = ports.call("ADD", &two, &one_address).error();
            assert!(error.msg.starts_with("host port 10.1.2.1:8080/tcp is taken"), "{error:?}");
        }
        assert_eq!(ports.state(), before);
        ports.del(&one, &http);
        ports.add(&two, &http);
        assert!(tcp(&ports.node, &two.container, "10.1.2.1:8080", 80).is_some(), "{rules:?}");
    }
}

#[test]
fn a_refusal_of_one_family_leaves_nothing_in_the_other() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let (one, two) = (ports.pod("c1"), ports.pod("c2"));
        let six =
            json!([{"hostPort": 8080, "containerPort": 80, "protocol": "tcp", "hostIP": "::"}]);
        ports.add(&two, &six);
        ports.del(&two, &six);
        ports.add(&two, &json!([mapping(9, 9, "tcp")]));
        ports.add(&one, &six);
        let before = ports.state();
        let error = ports.call("ADD", &two, &json!([mapping(8080, 80, "tcp")])).error();
        assert!(error.msg.contains("taken by container \"c1\""), "{error:?}");
        let after = ports.state();
        assert!(!after.contains("10.1.2.3:80") && !after.contains("10.1.2.3 . 80"), "{after}");
        if rules == Rules::Nftables {
            assert_eq!(after, before, "not even what the container had before is lost");
        }
    }
}

#[test]
fn networks_and_interfaces_of_one_container_are_apart() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let pod = ports.pod("c1");
        let (a, b, c) = (
            json!([mapping(8080, 80, "tcp")]),
            json!([mapping(8081, 80, "tcp")]),
            json!([mapping(8082, 80, "tcp")]),
        );
        ports.add(&pod, &a);
        let first = ports.state();
        let more = |network: &str, ifname: &str, subnet: &str| {
            let ipam = ports.node.host_local(&[subnet]);
            let keys = json!({"name": network, "bridge": "cni0", "ipam": ipam});
            let net = Net::new(&ports.node, "bridge", "1.1.0", &keys);
            net.on("ADD", &pod.container).ifname(ifname).result()
        };
        let prev = more("net", "eth1", "10.1.2.0/24");
        let elsewhere = more("other", "eth2", "10.1.2.128/25");
        let call = |verb: &str, list: &Value, (name, ifname, prev): (&str, &str, &Value)| {
            let net = ports.net(list, &json!({"name": name, "prevResult": prev}));
            ports.path(net.on(verb, &pod.container).ifname(ifname))
        };
        let second = |verb: &str| call(verb, &b, ("net", "eth1", &prev));
        let other = |verb: &str| call(verb, &c, ("other", "eth2", &elsewhere));
        second("ADD").result();
        other("ADD").result();
        second("CHECK").ok();
        other("CHECK").ok();
        ports.call("CHECK", &pod, &a).ok();
        for port in [8080, 8081, 8082] {
            let target = format!("10.1.2.1:{port}");
            assert!(tcp(&ports.node, &pod.container, &target, 80).is_some(), "{rules:?} {port}");
        }
        second("DEL").ok();
        other("DEL").ok();
        assert_eq!(ports.state(), first, "{rules:?}");
        second("ADD").result();
        ports.del(&pod, &a);
        assert!(tcp(&ports.node, &pod.container, "10.1.2.1:8081", 80).is_some());
        second("CHECK").ok();
    }
}

#[test]
fn gc_removes_what_no_valid_attachment_owns() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let (one, two, three) = (ports.pod("c1"), ports.pod("c2"), ports.pod("c3"));
        let [a, b, c] = [8080, 8081, 8082].map(|port| json!([mapping(port, 80, "tcp")]));
        let gc = |valid: Value| {
            let net = ports.net(&json!(null), &json!({"cni.dev/valid-attachments": valid}));
            ports.path(net.call("GC", "").without("CNI_CONTAINERID")).ok();
        };
        ports.call_with("ADD", &three, &c, &json!({"name": "other"})).result();
        let foreign = ports.state();
        ports.add(&one, &a);
        let c1 = ports.state();
        ports.add(&two, &b);
        let all = ports.state();
        let of = |id: &str| json!({"containerID": id, "ifname": "eth0"});
        gc(json!([of("c1"), of("c2")]));
        assert_eq!(ports.state(), all, "{rules:?}");
        gc(json!([of("c1"), {"containerID": "c2", "ifname": "eth9"}]));
        assert_eq!(ports.state(), c1, "{rules:?}");
        gc(json!([]));
        assert_eq!(ports.state(), foreign, "{rules:?}: another network's are not ours");
    }
}

#[test]
fn an_address_whose_former_container_vanished_is_taken_over() {
    let ports = Ports::new(Rules::Nftables, "1.1.0");
    let (gone, mut new) = (ports.pod("c1"), ports.pod("c2"));
    let [a, b] = [8080, 8081].map(|port| json!([mapping(port, 80, "tcp")]));
    ports.add(&gone, &a);
    new.prev =
        serde_json::from_str(&new.prev.to_string().replace("10.1.2.3/", "10.1.2.2/")).unwrap();
    ports.add(&new, &b);
    ports.call("CHECK", &new, &b).ok();
    ports.del(&gone, &a);
    ports.call("CHECK", &new, &b).ok();
}

fn median(mut run: impl FnMut() -> Duration) -> Duration {
    let mut times: Vec<_> = (0..11).map(|_| run()).collect();
    times.sort();
    times[5]
}

#[test]
fn ten_thousand_mappings_of_others_cost_nothing() {
    let ports = Ports::new(Rules::Nftables, "1.1.0");
    let pod = ports.pod("c1");
    let one = json!([mapping(80, 80, "tcp")]);
    let many: Vec<_> = (1..=32).map(|n| mapping(n, n, "tcp")).collect();
    let measure = || {
        [&one, &json!(many)].map(|list| {
            let (add, del) = (ports.call("ADD", &pod, list), ports.call("DEL", &pod, list));
            add.result();
            del.ok();
            let mut dels = Vec::new();
            let add = median(|| {
                let start = Instant::now();
                assert_eq!(add.run().status, Some(0));
                let time = start.elapsed();
                let start = Instant::now();
                assert_eq!(del.run().status, Some(0));
                dels.push(start.elapsed());
                time
            });
            dels.sort();
            [add, dels[5]]
        })
    };
    let empty = measure();
    let elements: Vec<_> =
        (1000..11_000).map(|n| format!("tcp . {n} comment \"other\" : 10.1.9.9 . {n}")).collect();
    let file = ports.node.path("many.nft");
    let line = format!("add element inet cnibox_portmap any4 {{ {} }}\n", elements.join(", "));
    std::fs::write(&file, line).unwrap();
    ports.node.sh(&format!("nft -f {}", file.display()));
    let full = measure();
    eprintln!("[ADD, DEL] of 1 and 32 ports: {empty:?}; with 10,000 others: {full:?}");
    for (full, empty) in full.iter().flatten().zip(empty.iter().flatten()) {
        assert!(*full < *empty * 3 + Duration::from_millis(30), "{full:?} {empty:?}");
    }
}

#[test]
fn many_at_once_and_each_once() {
    let ports = Ports::new(Rules::Nftables, "1.1.0");
    let pod = ports.pod("c0");
    let ids: [&str; 12] = ["p0", "p1", "p2", "p3", "p4", "p5", "p6", "p7", "p8", "p9", "pa", "pb"];
    let run = |verb: &str| {
        let children: Vec<_> = (0_u16..)
            .zip(ids)
            .map(|(n, id)| {
                let list = json!([mapping(7000 + n, 80, "tcp"), mapping(7000 + n, 80, "udp")]);
                let net = ports.net(&list, &json!({"prevResult": pod.prev}));
                let call = net.call(verb, id).netns(&pod.container.path());
                let mut child = call.command().spawn().unwrap();
                std::io::Write::write_all(
                    &mut child.stdin.take().unwrap(),
                    net.conf.to_string().as_bytes(),
                )
                .unwrap();
                child
            })
            .collect();
        for child in children {
            let output = child.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        }
    };
    run("ADD");
    let state = ports.state();
    assert_eq!(state.matches("fib daddr type local").count(), 2, "{state}");
    assert!(ids.iter().all(|id| state.contains(&format!("id: {id},"))));
    run("DEL");
    eventually("elements stayed", || !ports.state().contains("elements"));
}
