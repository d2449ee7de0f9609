//! The first packet behind an answer is never lost; and figures of many questions.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::super::address;
use super::client::{client, connect, receive};
use super::wire::{A, Message, Record};
use super::{GATEWAYS, Inside, OUTSIDE, PUBLIC, Site, list};
use crate::support::conflist::Attached;
use crate::support::node::Container;
use crate::support::random::Random;
use crate::support::traffic::Place;

/// The port of the servers outside, for datagrams.
const PORT: u16 = 4433;
/// Questions per second of a container that the resolver answers in any case.
const PACE: Duration = Duration::from_millis(11);

/// Each name `NUMBER.example.net` has an address of its own in 20.0.0.0/8.
fn address_of(number: u32) -> Ipv4Addr {
    Ipv4Addr::from(0x1400_0000 + number)
}

fn serve_numbers(site: &Site) {
    site.upstream.answer(|asked| {
        let name = asked.message.questions[0].0.clone();
        let number = name.split('.').next().unwrap_or_default().parse().unwrap_or(0);
        let ip = address_of(number);
        vec![
            asked
                .message
                .reply(0, vec![Record::address(&name, &ip.to_string()).with_ttl(60)])
                .encode(),
        ]
    });
}

/// A question by a socket that may have earlier answers to others.
fn resolve(socket: &UdpSocket, name: &str) -> Option<IpAddr> {
    let question = Message::question(name, A);
    socket.send(&question.encode()).ok()?;
    let mut buffer = [0; 1500];
    loop {
        let length = receive(socket, &mut buffer).ok()?;
        let answer = Message::decode(&buffer[..length])?;
        if answer.id == question.id && answer.questions == question.questions {
            return answer.ips().first().copied();
        }
    }
}

/// Four containers, each with questions about fresh names, and at once a datagram to the address,
/// or a connection. With `CNIBOX_LONG` there are a hundred thousand.
#[test]
fn the_first_packet_behind_an_answer_passes() {
    let rounds = if std::env::var_os("CNIBOX_LONG").is_some() { 25_000 } else { 250 };
    let site = Site::new();
    serve_numbers(&site);
    let ports = [format!("udp/{PORT}"), "tcp/443".to_owned()];
    let keys = json!({"allow": [{"to": ["*.example.net"], "ports": ports}]});
    let kinds = ["bridge", "ptp", "bridge", "ptp"];
    let containers: Vec<Inside> =
        (0..4).map(|nth| site.attach(kinds[nth], &format!("c{nth}"), Some(&keys))).collect();
    let server = site.outside.within(|| UdpSocket::bind(("0.0.0.0", PORT)).unwrap());
    server.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let (arrived, next) = (Mutex::new(HashSet::new()), AtomicU32::new(1));
    let is_over = std::sync::atomic::AtomicBool::new(false);
    let sent = Mutex::new(Vec::new());
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffer = [0; 8];
            loop {
                match server.recv(&mut buffer) {
                    Ok(_) => drop(arrived.lock().unwrap().insert(u64::from_be_bytes(buffer))),
                    Err(_) if is_over.load(Ordering::Relaxed) => return,
                    Err(_) => {}
                }
            }
        });
        let asking: Vec<_> = containers
            .iter()
            .map(|inside| {
                scope.spawn(|| {
                    let socket = client(&inside.container, GATEWAYS[0]);
                    let sender = inside.container.within(|| UdpSocket::bind("0.0.0.0:0").unwrap());
                    for round in 0..rounds {
                        let began = Instant::now();
                        let number = next.fetch_add(1, Ordering::Relaxed);
                        let ip = resolve(&socket, &format!("{number}.example.net"));
                        assert_eq!(ip, Some(address_of(number).into()), "{number}");
                        if round % 5 == 4 {
                            let ip = ip.unwrap().to_string();
                            connect(&inside.container, &ip, 443).unwrap();
                        } else {
                            let bytes = u64::from(number).to_be_bytes();
                            sender.send_to(&bytes, (ip.unwrap(), PORT)).unwrap();
                            sent.lock().unwrap().push(number);
                        }
                        thread::sleep(PACE.saturating_sub(began.elapsed()));
                    }
                })
            })
            .collect();
        for one in asking {
            one.join().unwrap();
        }
        thread::sleep(Duration::from_secs(1));
        is_over.store(true, Ordering::Relaxed);
    });
    let (mut sent, arrived) = (sent.into_inner().unwrap(), arrived.into_inner().unwrap());
    sent.retain(|number| !arrived.contains(&u64::from(*number)));
    for number in &sent {
        let ip = address_of(*number);
        println!(
            "{number} was lost: {}",
            site.node.sh(&format!("nft list ruleset | grep -F '{ip}' || true"))
        );
    }
    for table in ["/proc/net/snmp", "/proc/net/stat/nf_conntrack", "/proc/net/softnet_stat"] {
        println!("{table}\n{}", site.node.sh(&format!("cat {table}")));
    }
    println!("outside:\n{}", site.outside.sh("grep Udp: /proc/net/snmp; ip -s link show eth0"));
    assert!(sent.is_empty(), "datagrams were lost: {sent:?}");
}

/// The number in the name that a socket asks for, by the socket's place and its questions before.
type Choice<'c> = &'c (dyn Fn(usize, usize) -> usize + Sync);

/// Questions of all sockets in turn, so many per second in all, for some seconds, at random times: as
/// those of many containers that know nothing of each other. Each thread waits for its answer.
/// Returns how long the answers took, in microseconds, sorted.
fn measure(sockets: &[UdpSocket], rate: u32, seconds: u64, name: Choice<'_>) -> Vec<u128> {
    const THREADS: usize = 16;
    let (all, lost) = (Mutex::new(Vec::new()), AtomicU32::new(0));
    let mean = Duration::from_secs(1) * u32::try_from(THREADS).unwrap() / rate;
    let size = sockets.len().div_ceil(THREADS);
    thread::scope(|scope| {
        for (thread, part) in sockets.chunks(size).enumerate() {
            let (all, lost) = (&all, &lost);
            scope.spawn(move || {
                let (begin, mut own) = (Instant::now(), Vec::new());
                let mut random = Random::of_seed(u64::try_from(thread).unwrap());
                let mut due = begin;
                for question in 0.. {
                    // Exponentially distributed: a Poisson process.
                    let chance = f64::from(u32::try_from(random.below(1_000_000)).unwrap() + 1);
                    due += mean.mul_f64(-(chance / 1e6).ln());
                    if due.duration_since(begin).as_secs() >= seconds {
                        break;
                    }
                    thread::sleep(due.saturating_duration_since(Instant::now()));
                    let at = question % part.len();
                    let number = name(thread * size + at, question / part.len());
                    let asked = Instant::now();
                    match resolve(&part[at], &format!("{number}.example.net")) {
                        Some(_) => own.push(asked.elapsed().as_micros()),
                        None => drop(lost.fetch_add(1, Ordering::Relaxed)),
                    }
                }
                all.lock().unwrap().extend(own);
            });
        }
    });
    assert_eq!(lost.into_inner(), 0, "questions without an answer");
    let mut all = all.into_inner().unwrap();
    all.sort_unstable();
    all
}

/// What the resolver adds to the time of an answer, with 2,000 questions a second: about one name of
/// each container, two of its own, and ten of 10,000. `CNIBOX_LONG` is the number of containers,
/// without it 200.
#[test]
#[ignore = "takes long; prints figures"]
fn questions_per_second() {
    const RATE: u32 = 2000;
    let count: usize = std::env::var("CNIBOX_LONG").map_or(200, |text| text.parse().unwrap());
    let site = Site::new();
    serve_numbers(&site);
    let keys = json!({"allow": [{"to": ["*.example.net"], "ports": ["tcp/443"]}]});
    let mut list = list(&site.node, "ptp", &keys);
    // Room for more containers than a /24 has.
    list.conf["plugins"][0]["ipam"]["ranges"] = json!([[{"subnet": "10.64.0.0/16"}]]);
    let began = Instant::now();
    // IPv4 only: without the second of duplicate address detection.
    let attach = &|nth| {
        let container = Container::new();
        let at = Attached::new(&format!("c{nth}"), &container.path());
        let result = list.add(&at).unwrap();
        // The kernel keeps at most 1,024 neighbours for all namespaces, but any number of permanent
        // ones.
        let [near, far] = [0, 1].map(|end| result["interfaces"][end].clone());
        let neighbour = |ip: &str, of: &Value, dev: &Value| {
            format!("ip neigh replace {ip} lladdr {} dev {} nud permanent", of["mac"], dev["name"])
        };
        container.sh(&neighbour("10.64.0.1", &near, &far));
        site.node.sh(&neighbour(&address(&result, 0), &far, &near));
        container
    };
    let containers: Vec<Container> = thread::scope(|scope| {
        let part = |first| scope.spawn(move || (first..count).step_by(2).map(attach).collect());
        let parts: [thread::ScopedJoinHandle<'_, Vec<Container>>; 2] = [0, 1].map(part);
        parts.into_iter().flat_map(|part| part.join().unwrap()).collect()
    });
    println!("{count} containers in {:?}", began.elapsed());
    let through: Vec<UdpSocket> =
        containers.iter().map(|container| client(container, PUBLIC[0])).collect();
    let direct: Vec<UdpSocket> = (0..16).map(|_| client(&site.node, OUTSIDE[0])).collect();
    let resolver = site.resolver.as_ref().unwrap();
    let show = |what: &str, sockets: &[UdpSocket], seconds, name: Choice<'_>| {
        let ticks = resolver.ticks();
        let all = measure(sockets, RATE, seconds, name);
        let [p50, p99] = [50, 99].map(|percent| all[(all.len() - 1) * percent / 100]);
        let (answers, ticks) = (all.len(), resolver.ticks() - ticks);
        println!("{what}: {answers} answers, p50 {p50} us, p99 {p99} us, {ticks} ticks");
    };
    let one = |_, _| 1;
    let two = |container, question| 1 + container * 2 + question % 2;
    let ten = |container, question| 1 + (container * 7 + question % 10) % 10_000;
    show("the upstream alone", &direct, 20, &ten);
    show("the first questions", &through, 10, &one);
    show("one name of each container", &through, 20, &one);
    show("two names of each container, first", &through, 10, &two);
    show("two names of each container", &through, 60, &two);
    show("ten names of each container, first", &through, 30, &ten);
    show("ten names of each container", &through, 20, &ten);
    let memory = std::fs::read_to_string(format!("/proc/{}/status", resolver.id())).unwrap();
    println!("{}", memory.lines().find(|line| line.starts_with("VmRSS")).unwrap());
}
