//! The first packet behind an answer is never lost; and figures of many questions.

use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use super::client::{PATIENCE, connect};
use super::wire::{A, Message, Record};
use super::{GATEWAYS, Inside, OUTSIDE, Site};
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
        let length = socket.recv(&mut buffer).ok()?;
        let answer = Message::decode(&buffer[..length])?;
        if answer.id == question.id && answer.questions == question.questions {
            return answer.ips().first().copied();
        }
    }
}

fn client(inside: &Inside) -> UdpSocket {
    let socket = inside.container.within(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    socket.connect((GATEWAYS[0], 53)).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket
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
                    let socket = client(inside);
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

/// Latencies in microseconds, sorted.
struct Latencies(Vec<u128>);

impl Latencies {
    fn percentile(&self, percent: usize) -> u128 {
        self.0[(self.0.len() - 1) * percent / 100]
    }
}

/// Questions of all sockets in turn, so many per second in all, for some seconds; each thread waits
/// for its answer.
fn measure(
    sockets: &[UdpSocket],
    rate: u32,
    seconds: u64,
    name: impl Fn(u32) -> String + Sync,
) -> Latencies {
    const THREADS: usize = 16;
    let (all, lost) = (Mutex::new(Vec::new()), AtomicU32::new(0));
    let interval = Duration::from_secs(1) * u32::try_from(THREADS).unwrap() / rate;
    let next = AtomicU32::new(0);
    thread::scope(|scope| {
        for part in sockets.chunks(sockets.len().div_ceil(THREADS)) {
            let (all, lost, next, name) = (&all, &lost, &next, &name);
            scope.spawn(move || {
                let (begin, mut own) = (Instant::now(), Vec::new());
                let mut due = begin;
                for socket in part.iter().cycle() {
                    if due.duration_since(begin).as_secs() >= seconds {
                        break;
                    }
                    thread::sleep(due.saturating_duration_since(Instant::now()));
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let asked = Instant::now();
                    match resolve(socket, &name(number)) {
                        Some(_) => own.push(asked.elapsed().as_micros()),
                        None => drop(lost.fetch_add(1, Ordering::Relaxed)),
                    }
                    due += interval;
                }
                all.lock().unwrap().extend(own);
            });
        }
    });
    assert_eq!(lost.into_inner(), 0, "questions without an answer");
    let mut all = all.into_inner().unwrap();
    all.sort_unstable();
    Latencies(all)
}

/// What the resolver adds to the time of an answer, with 2,000 questions a second; containers by
/// `CNIBOX_LONG`, without it 200.
#[test]
#[ignore = "takes long; prints figures"]
fn questions_per_second() {
    let count: usize = std::env::var("CNIBOX_LONG").map_or(200, |text| text.parse().unwrap());
    let site = Site::new();
    serve_numbers(&site);
    let keys = json!({"allow": [{"to": ["*.example.net"], "ports": ["tcp/443"]}]});
    // A network for the containers of this test alone: host-local has a /24 for the others.
    let began = Instant::now();
    let containers: Vec<Inside> =
        (0..count).map(|nth| site.attach("bridge", &format!("c{nth}"), Some(&keys))).collect();
    println!("{count} containers in {:?}", began.elapsed());
    let through: Vec<UdpSocket> = containers.iter().map(client).collect();
    let direct: Vec<UdpSocket> = (0..through.len())
        .map(|_| {
            let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
            socket.connect((OUTSIDE[0], 53)).unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            socket
        })
        .collect();
    let show = |what: &str, latencies: &Latencies| {
        let [p50, p99] = [50, 99].map(|percent| latencies.percentile(percent));
        println!("{what}: {} answers, p50 {p50} us, p99 {p99} us", latencies.0.len());
    };
    let known = |_| "1.example.net".to_owned();
    let fresh = |number: u32| format!("{number}.example.net");
    let rate = 2000;
    show("the upstream alone", &measure(&direct, rate, 20, known));
    drop(measure(&through, rate, 5, known));
    show("an address that is in force", &measure(&through, rate, 20, known));
    show("a fresh address each time", &measure(&through, rate / 4, 20, fresh));
    let ticks = site.resolver.as_ref().unwrap().ticks();
    show("an address that is in force", &measure(&through, rate, 20, known));
    let spent = site.resolver.as_ref().unwrap().ticks() - ticks;
    println!("processor time: {spent} ticks for {} questions", rate * 20);
    let id = site.resolver.as_ref().unwrap().id();
    let memory = std::fs::read_to_string(format!("/proc/{id}/status")).unwrap();
    println!("{}", memory.lines().find(|line| line.starts_with("VmRSS")).unwrap());
}
