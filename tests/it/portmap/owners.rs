//! Several containers, networks and interfaces: no call touches another attachment's ports.

use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use cnibox::testing::attachment::{AttachmentRecord, Liveness};
use ipnet::IpNet;
use serde_json::{Value, json};

use super::{ALL, LIMIT, Pod, Ports, Rules, mapping, patiently, tcp};
use crate::support::net::Net;
use crate::support::node::{Call, eventually};
use crate::support::strace;
use crate::support::traffic::Place;

#[test]
fn the_error_names_the_container_that_has_the_port() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let (one, two) = (ports.pod("c1"), ports.pod("c2"));
        let http = json!([mapping(8080, 80, "tcp")]);
        ports.add(&one, &http);
        let records = || ports.node.sh("ls /run/cni/cnibox/portmap");
        let (before, recorded) = (ports.state(), records());
        let both = json!([mapping(8081, 80, "tcp"), mapping(8080, 80, "tcp")]);
        let error = ports.call("ADD", &two, &both).error();
        let start = "host port 8080/tcp is taken by container \"c1\" (network \"net\"";
        assert!(error.msg.starts_with(start), "{error:?}");
        assert!(
            error.details.ends_with("if it has ended: cnibox gc --network net --container c1"),
            "{error:?}"
        );
        assert_eq!((ports.state(), records()), (before.clone(), recorded), "{rules:?}");
        ports.del(&two, &both);
        assert_eq!(ports.state(), before, "{rules:?}");
        let others =
            json!([mapping(8080, 80, "udp"), mapping(8080, 80, "sctp"), mapping(8079, 80, "tcp")]);
        ports.add(&two, &others);
        ports.del(&two, &others);
        let one_address = json!([
            {"hostPort": 8080, "containerPort": 81, "protocol": "tcp", "hostIP": "10.1.2.1"}]);
        ports.add(&two, &one_address);
        let error = ports.call("ADD", &ports.pod("c3"), &one_address).error();
        assert!(error.msg.starts_with("host port 10.1.2.1:8080/tcp is taken"), "{error:?}");
        ports.del(&two, &one_address);
        assert_eq!(ports.state(), before);
        ports.del(&one, &http);
        ports.add(&two, &http);
        assert!(tcp(&ports.node, &two.container, "10.1.2.1:8080", 80).is_some(), "{rules:?}");
    }
}

#[test]
fn a_host_ip_may_be_mapped_beside_all_addresses() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let (one, two, peer) = (ports.pod("c1"), ports.pod("c2"), ports.peer());
        ports.node.sh("ip addr add 192.0.2.3/24 dev peer");
        let mut special = mapping(8080, 80, "tcp");
        special["hostIP"] = json!("192.0.2.3");
        // Neither list is the more specific one for all of its ports.
        let mut other = mapping(9090, 80, "tcp");
        other["hostIP"] = json!("192.0.2.1");
        let (a, b) =
            (json!([mapping(9090, 80, "tcp"), special]), json!([mapping(8080, 80, "tcp"), other]));
        for (first, second) in [((&one, &a), (&two, &b)), ((&two, &b), (&one, &a))] {
            for (pod, list) in [first, second] {
                ports.add(pod, list);
            }
            for (pod, list) in [first, second] {
                ports.call("CHECK", pod, list).ok();
            }
            for (target, pod, other) in [
                ("192.0.2.3:8080", &one, &two),
                ("192.0.2.1:8080", &two, &one),
                ("192.0.2.3:9090", &one, &two),
                ("192.0.2.1:9090", &two, &one),
            ] {
                let served = tcp(&peer, &pod.container, target, 80).is_some();
                assert!(served, "{rules:?} {target}: {}", ports.state());
                assert!(tcp(&peer, &other.container, target, 80).is_none(), "{rules:?} {target}");
            }
            for (pod, list) in [first, second] {
                ports.del(pod, list);
            }
            if rules != Rules::Nftables {
                let left = ports.state();
                assert!(!left.contains("CNI-DN-"), "{rules:?}: {left}");
            }
        }
    }
}

#[test]
fn each_host_ip_is_served_before_all_addresses() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let (all, peer) = (ports.pod("c1"), ports.peer());
        ports.node.sh("ip addr add 192.0.2.3/24 dev peer");
        ports.add(&all, &json!([mapping(8080, 80, "tcp")]));
        let pods = [("192.0.2.1", ports.pod("c2")), ("192.0.2.3", ports.pod("c3"))];
        for (addr, pod) in &pods {
            let mut one = mapping(8080, 80, "tcp");
            one["hostIP"] = json!(addr);
            ports.add(pod, &json!([one]));
            let served = tcp(&peer, &pod.container, &format!("{addr}:8080"), 80).is_some();
            assert!(served, "{rules:?} {addr}: {}", ports.state());
        }
    }
}

#[test]
fn a_port_released_during_add_is_mapped() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let (old, new) = (ports.pod("c1"), ports.pod("c2"));
        let list = json!([mapping(8080, 80, "tcp")]);
        ports.add(&old, &list);
        let start = Instant::now();
        let child = ports.call("ADD", &new, &list).spawn().unwrap();
        thread::sleep(Duration::from_millis(500));
        ports.del(&old, &list);
        let given_up = start.elapsed();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{rules:?}: {output:?}");
        let took = start.elapsed();
        assert!(took < given_up + Duration::from_secs(1), "{rules:?}: {took:?}");
        assert!(tcp(&ports.node, &new.container, "10.1.2.1:8080", 80).is_some(), "{rules:?}");
        // The owner does not release the port.
        let start = Instant::now();
        let error = ports.call("ADD", &old, &list).error();
        assert!(error.msg.contains("is taken by container \"c2\""), "{error:?}");
        let took = start.elapsed().as_millis();
        assert!((2000..4000).contains(&took), "{rules:?}: {took}");
    }
}

#[test]
fn a_port_of_a_dead_container_is_reclaimed() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let (old, new) = (ports.pod("the-dead-one"), ports.pod("c2"));
        let list = json!([mapping(8080, 80, "tcp"), mapping(53, 53, "udp")]);
        ports.add(&old, &list);
        drop(old);
        let gone = |record: &AttachmentRecord| matches!(record.liveness(), Liveness::Gone(_));
        eventually("it is gone", || AttachmentRecord::read_all(None).iter().all(gone));
        ports.add_at_once(&new, &list);
        assert!(!ports.state().contains("the-dead-one"), "{rules:?}");
        assert!(tcp(&ports.node, &new.container, "10.1.2.1:8080", 80).is_some(), "{rules:?}");
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
        let start = Instant::now();
        let error = ports.call("ADD", &two, &json!([mapping(8080, 80, "tcp")])).error();
        assert!(error.msg.contains("taken by container \"c1\""), "{error:?}");
        // With iptables each attempt changes rules and must not mistake its own change for another
        // process's.
        let took = start.elapsed();
        assert!(took < Duration::from_secs(10), "{rules:?}: {took:?}");
        let after = ports.state();
        assert!(!after.contains("10.1.2.3:80") && !after.contains("10.1.2.3 . 80"), "{after}");
        if rules == Rules::Nftables {
            assert_eq!(after, before, "not even what the container had before is lost");
        }
    }
}

#[test]
fn ports_belong_to_network_and_interface() {
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

/// As with `podman network connect`: the container's ports are requested in each of its networks.
struct Networks {
    ports: Ports,
    pod: Pod,
    list: Value,
    /// Name, interface and result of each network.
    all: Vec<(&'static str, &'static str, Value)>,
}

impl Networks {
    fn new(rules: Rules, list: Value) -> Networks {
        let ports = Ports::new(rules, "1.1.0");
        let pod = ports.pod("c1");
        let mut all = vec![("net", "eth0", pod.prev.clone())];
        for (network, ifname, subnet) in
            [("second", "eth1", "10.1.3.0/24"), ("third", "eth2", "10.1.4.0/24")]
        {
            let ipam = ports.node.host_local(&[subnet]);
            let keys = json!({"name": network, "bridge": network, "isGateway": true, "ipam": ipam});
            let net = Net::new(&ports.node, "bridge", "1.1.0", &keys);
            all.push((network, ifname, net.on("ADD", &pod.container).ifname(ifname).result()));
        }
        Networks { ports, pod, list, all }
    }

    fn call(&self, verb: &str, at: usize) -> Call {
        let (name, ifname, prev) = &self.all[at];
        let net = self.ports.net(&self.list, &json!({"name": name, "prevResult": prev}));
        self.ports.path(net.on(verb, &self.pod.container).ifname(ifname))
    }

    /// The index of the network in which the port arrives, if any.
    fn served(&self, port: u16) -> Option<usize> {
        let host = &self.ports.node;
        let to = |at: &usize| {
            let (_, _, prev) = &self.all[*at];
            let addr: IpNet = prev["ips"][0]["address"].as_str().unwrap().parse().unwrap();
            let bound =
                self.pod.container.within(|| patiently(|| TcpListener::bind((addr.addr(), 80))));
            let target = format!("10.1.2.1:{port}").parse().unwrap();
            let near = host.within(|| TcpStream::connect_timeout(&target, LIMIT));
            bound.set_nonblocking(true).unwrap();
            // A listener that was closed accepts as long as a child process of another test has
            // not yet executed its program: this one must have the connection.
            let accepted = |_| bound.accept().map_err(|_| thread::sleep(LIMIT / 50)).is_ok();
            near.is_ok() && (0..50).any(accepted)
        };
        (0..self.all.len()).find(to)
    }

    /// Asserts that CHECK succeeds in exactly these networks.
    #[track_caller]
    fn hold(&self, valid: &[usize]) {
        for at in 0..self.all.len() {
            let outcome = self.call("CHECK", at).run();
            assert_eq!(outcome.status == Some(0), valid.contains(&at), "{at}: {outcome:?}");
        }
    }

    fn gc(&self, at: usize) {
        let keys = json!({"name": self.all[at].0, "cni.dev/valid-attachments": []});
        let net = self.ports.net(&json!(null), &keys);
        self.ports.path(net.call("GC", "").without("CNI_CONTAINERID")).ok();
    }
}

#[test]
fn a_container_may_map_a_port_in_each_of_its_networks() {
    for rules in ALL {
        let on_one = json!({"hostPort": 8081, "containerPort": 80, "protocol": "tcp",
            "hostIP": "10.1.2.1"});
        let networks =
            Networks::new(rules, json!([mapping(8080, 80, "tcp"), on_one, mapping(53, 53, "udp")]));
        let (ports, other) = (&networks.ports, networks.ports.pod("c2"));
        let both = |at: usize| {
            assert_eq!([8080, 8081].map(|port| networks.served(port)), [Some(at); 2], "{rules:?}");
        };
        // At the same time: each waits two seconds for the container to give up its ports.
        let refused = || {
            let lists = [&networks.list, &json!([mapping(53, 53, "udp")])];
            let calls = lists.map(|list| ports.call("ADD", &other, list));
            thread::scope(|scope| {
                calls.each_ref().map(|call| scope.spawn(|| call.error())).map(|refusal| {
                    let error = refusal.join().unwrap();
                    assert!(error.msg.contains("is taken by container \"c1\""), "{error:?}");
                })
            });
        };
        let mut states = Vec::new();
        for at in 0..3 {
            networks.call("ADD", at).result();
            states.push(ports.state());
            networks.hold(&(0..=at).collect::<Vec<_>>());
            both(0);
            refused();
        }
        // DEL of the last network, twice, then ADD: the first network serves the ports throughout.
        for _ in 0..2 {
            networks.call("DEL", 2).ok();
            assert_eq!(ports.state().lines().count(), states[1].lines().count(), "{rules:?}");
        }
        networks.call("ADD", 2).result();
        assert_eq!(ports.state(), states[2], "{rules:?}");
        // DEL of the network in the middle.
        networks.call("DEL", 1).ok();
        networks.hold(&[0, 2]);
        both(0);
        // DEL of the first network removes the ports until the next network requests them.
        for repeated in [false, true] {
            networks.call("DEL", 0).ok();
            if rules == Rules::Nftables && !repeated {
                networks.hold(&[]);
                assert_eq!(networks.served(8080), None);
                networks.call("ADD", 2).result();
            }
            networks.hold(&[2]);
            both(2);
            refused();
        }
        networks.call("ADD", 0).result();
        networks.hold(&[0, 2]);
        both(2);
        networks.gc(2);
        if rules == Rules::Nftables {
            networks.call("ADD", 0).result();
        }
        networks.hold(&[0]);
        both(0);
        networks.gc(0);
        assert_eq!(networks.served(8080), None, "{rules:?}");
        let left = ports.state();
        assert!(!left.contains("c1") && !left.contains("10.1.2.2"), "{rules:?}: {left}");
        ports.add(&other, &networks.list);
    }
}

#[test]
fn gc_removes_mappings_of_stale_attachments() {
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
fn mappings_to_a_shared_address_are_separate() {
    for rules in ALL {
        for first in [0, 1] {
            for with_ports in [true, false] {
                println!("{rules:?}: DEL of {first}, with ports: {with_ports}");
                let ports = Ports::new(rules, "1.1.0");
                let (one, mut two) = (ports.pod("c1"), ports.pod("c2"));
                let text = two.prev.to_string().replace("10.1.2.3/", "10.1.2.2/");
                two.prev = serde_json::from_str(&text.replace("1::3/", "1::2/")).unwrap();
                let pods = [one, two];
                let lists = [8080, 8081].map(|port| json!([mapping(port, 80, "tcp")]));
                ports.add(&pods[0], &lists[0]);
                let alone = ports.state();
                ports.add(&pods[1], &lists[1]);
                for at in [0, 1] {
                    ports.call("CHECK", &pods[at], &lists[at]).ok();
                }
                let known = if with_ports { lists[first].clone() } else { json!(null) };
                ports.del(&pods[first], &known);
                let last = 1 - first;
                ports.call("CHECK", &pods[last], &lists[last]).ok();
                // From the container itself, which needs the host's address as its source.
                let target = format!("10.1.2.1:{}", 8080 + last);
                let (node, container) = (&ports.node, &pods[0].container);
                assert!(tcp(container, container, &target, 80).is_some(), "{}", ports.state());
                assert!(tcp(node, container, &target, 80).is_some(), "{}", ports.state());
                if first == 1 {
                    assert_eq!(ports.state(), alone);
                }
                ports.del(&pods[last], &lists[last]);
                assert!(!ports.state().contains("10.1.2.2"), "{}", ports.state());
            }
        }
    }
}

#[test]
fn a_port_of_a_living_container_is_kept_after_a_flush() {
    for rules in ALL {
        let ports = Ports::new(rules, "1.1.0");
        let (one, two) = (ports.pod("c1"), ports.pod("c2"));
        let list = json!([mapping(8080, 80, "tcp")]);
        ports.add(&one, &list);
        ports.node.sh(match rules {
            Rules::Legacy => "iptables-legacy -t nat -F; ip6tables-legacy -t nat -F",
            _ => "nft flush ruleset",
        });
        let error = ports.call("ADD", &two, &list).error();
        assert!(error.msg.contains("is taken by container \"c1\""), "{rules:?}: {error:?}");
        let state = ports.state();
        assert!(state.contains("10.1.2.2") && !state.contains("10.1.2.3"), "{rules:?}: {state}");
    }
}

/// The median CPU time of each call over 11 consecutive runs.
fn worked(calls: [&Call; 2]) -> [Duration; 2] {
    let script = "TIMEFORMAT='%3U %3S'; time \"$0\" >/dev/null";
    let time = |call: &Call| {
        let outcome = call.clone().under(&["bash", "-c", script]).run();
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        let numbers = outcome.stderr.split_whitespace().map(|n| n.parse::<f64>().unwrap());
        Duration::from_secs_f64(numbers.sum())
    };
    let mut times: Vec<_> = (0..11).map(|_| calls.map(time)).collect();
    [0, 1].map(|at| {
        times.sort_by_key(|both| both[at]);
        times[5][at]
    })
}

/// Adds the elements of 10,000 other containers to every map and set that ADD writes to.
fn fill(ports: &Ports) {
    let each = |text: &dyn Fn(u16) -> String| {
        let texts: Vec<_> = (1000..11_000).map(text).collect();
        texts.join(", ")
    };
    let ip = |n: u16| format!("10.9.{}.{}", n / 250, n % 250 + 1);
    let lines = [
        ("any4", each(&|n| format!("tcp . {n} comment \"other\" : {} . {n}", ip(n)))),
        ("mapped4", each(&|n| format!("{} comment \"other\" : goto from-10.9.0.0/16", ip(n)))),
        ("attachments", each(&|n| format!("\"a{n}\" . \"b{n}\" comment \"other\" : 2"))),
    ];
    let file = ports.node.path("many.nft");
    let line = |(set, elements): &(_, _)| {
        format!("add element inet cnibox_portmap {set} {{ {elements} }}\n")
    };
    let chain = "add chain inet cnibox_portmap from-10.9.0.0/16 { ip saddr 10.9.0.0/16 masquerade; \
                 ip saddr 127.0.0.0/8 masquerade; }\n";
    let lines = chain.to_owned() + &lines.iter().map(line).collect::<String>();
    std::fs::write(&file, lines).unwrap();
    ports.node.sh(&format!("nft -f {}", file.display()));
}

#[test]
fn ten_thousand_other_mappings_do_not_slow_down_add() {
    let ports = Ports::new(Rules::Nftables, "1.1.0");
    let pod = ports.pod("c1");
    let one = json!([mapping(80, 80, "tcp")]);
    let many: Vec<_> = (1..=32).map(|n| mapping(n, n, "tcp")).collect();
    // The same container has an additional port in another network, with another address.
    let held = json!([mapping(99, 99, "tcp")]);
    ports.call_with("ADD", &pod, &held, &json!({"name": "first"})).result();
    let mut there = ports.pod("c1-elsewhere");
    there.id = "c1";
    let measure = || {
        [(&pod, &one), (&pod, &json!(many)), (&there, &held)].map(|(pod, list)| {
            let (add, del) = (ports.call("ADD", pod, list), ports.call("DEL", pod, list));
            // The first ADD creates the table.
            add.result();
            del.ok();
            let costs = [&add, &del].map(|call| strace::cost(&ports.node, call));
            (costs, worked([&add, &del]))
        })
    };
    let empty = measure();
    fill(&ports);
    let full = measure();
    for ((costs, times), (costs_among_many, times_among_many)) in empty.into_iter().zip(full) {
        println!("{costs:?} {times:?}; among 10,000: {costs_among_many:?} {times_among_many:?}");
        for (alone, among_many) in costs.into_iter().zip(costs_among_many) {
            assert!(among_many.calls <= alone.calls + 20, "{alone:?} {among_many:?}");
            assert!(among_many.bytes <= alone.bytes + 4096, "{alone:?} {among_many:?}");
        }
        for (alone, among_many) in times.into_iter().zip(times_among_many) {
            assert!(among_many < alone * 2 + Duration::from_millis(4), "{alone:?} {among_many:?}");
        }
    }
}

#[test]
fn add_time_is_linear_in_the_number_of_ports() {
    let ports = Ports::new(Rules::Nftables, "1.1.0");
    let pod = ports.pod("c1");
    let [few, many] = [150, 1_500].map(|count| {
        let list: Vec<_> = (1..=count).map(|n| mapping(n, n, "udp")).collect();
        let list = json!(list);
        worked([&ports.call("ADD", &pod, &list), &ports.call("DEL", &pod, &list)])
    });
    println!("{few:?} {many:?}");
    for (few, many) in few.into_iter().zip(many) {
        assert!(many < few * 20, "{few:?} {many:?}");
    }
}

#[test]
fn concurrent_adds_map_each_port_once() {
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
    eventually("elements stayed", || !ports.state().contains("id: p"));
}

/// The reference concatenates network and container id in chain names, so these two distinct
/// attachments share a name.
#[test]
fn containers_with_the_same_chain_name_are_separate() {
    for rules in [Rules::Iptables, Rules::Legacy] {
        let ports = Ports::new(rules, "1.1.0");
        let (one, two) = (ports.pod("2abc"), ports.pod("abc"));
        let lists = [json!([mapping(8081, 80, "tcp")]), json!([mapping(8082, 80, "tcp")])];
        let of = |verb: &str, pod: &Pod, network: &str, ports_of: &Value| {
            let net = ports.net(ports_of, &json!({"name": network, "prevResult": pod.prev}));
            ports.path(net.call(verb, pod.id).netns(&pod.container.path()))
        };
        let all = [(&one, "n1", &lists[0]), (&two, "n12", &lists[1])];
        let serves = |at: usize| {
            let target = format!("10.1.2.1:808{}", at + 1);
            tcp(&ports.node, &all[at].0.container, &target, 80).is_some()
        };
        for (first, second) in [(0, 1), (1, 0)] {
            for at in [first, second, first] {
                let (pod, network, list) = all[at];
                of("ADD", pod, network, list).result();
            }
            assert!(serves(first) && serves(second), "{rules:?}: {}", ports.state());
            for at in [first, second] {
                let (pod, network, list) = all[at];
                of("CHECK", pod, network, list).ok();
            }
            let (pod, network, list) = all[first];
            of("DEL", pod, network, list).ok();
            assert!(!serves(first) && serves(second), "{rules:?}: {}", ports.state());
            of("DEL", pod, network, list).ok();
            let gc = json!({"cni.dev/valid-attachments": []});
            let net = ports.net(&json!([]), &json!({"name": all[first].1})).with(&gc);
            ports.path(net.call("GC", "")).ok();
            assert!(serves(second), "{rules:?}: {}", ports.state());
            let (pod, network, list) = all[second];
            of("DEL", pod, network, list).ok();
            assert!(!ports.state().contains("CNI-DN-"), "{rules:?}: {}", ports.state());
        }
    }
}
