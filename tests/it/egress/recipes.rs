//! The recipes of `docs/egress.md`, as the page prints them: what passes, and what is refused.
//! A container of the same list without egress and its followers reaches whatever is refused.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{FAR, OUTSIDE, add_outside, address, bind};
use crate::examples::blocks;
use crate::support::conflist::{Attached, Conflist};
use crate::support::node::{Container, Node, eventually};
use crate::support::tap::Machine;
use crate::support::traffic::Place;

const PAGE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/egress.md"));

/// Private hosts outside: the database, its neighbour, the registry, a name server.
const PRIVATE: [&str; 4] = ["10.20.0.5", "10.20.0.6", "10.20.0.7", "10.20.0.53"];
const RESOLVER: &str = PRIVATE[3];
/// An address of the node that is public.
const PUBLIC_NODE: &str = "203.0.113.1";

/// The address of the node that the host outside knows.
const OUTSIDE_NODE: &str = "10.9.0.1";

/// How long an answer may take that should not come.
const WAIT: Duration = Duration::from_millis(300);

/// A place and service, and whether the container with the policy reaches it.
type Case<'c> = (&'c str, &'c str, bool);

/// The list behind a heading of the page.
pub(super) fn recipe(heading: &str) -> Value {
    let (_, text) = PAGE.split_once(&format!("\n### {heading}\n")).expect("no such recipe");
    serde_json::from_str(blocks(text, "json")[0]).unwrap()
}

/// A node with the list of a recipe, a host outside, and two containers without a policy.
struct Site {
    node: Node,
    outside: Container,
    bare: Container,
    neighbour: Container,
    /// The address of the neighbour.
    near: String,
    conf: Value,
}

impl Site {
    fn new(heading: &str) -> Site {
        Site::with_list(recipe(heading))
    }

    fn with_list(conf: Value) -> Site {
        let node = Node::new();
        node.sh(&format!("ip addr add {PUBLIC_NODE}/32 dev lo"));
        let file = node.path("resolv.conf");
        std::fs::write(&file, format!("nameserver {RESOLVER}\n")).unwrap();
        // Another node of this thread may have mounted its own.
        node.sh("umount -q /etc/resolv.conf || true");
        node.sh(&format!("mount --bind {} /etc/resolv.conf", file.display()));
        let outside = add_outside(&node);
        for ip in PRIVATE {
            outside.sh(&format!("ip addr add {ip}/32 dev eth0"));
        }
        node.sh(&format!("ip route add 10.20.0.0/24 via {}", OUTSIDE[0]));
        let (bare, neighbour, near) = (Container::new(), Container::new(), String::new());
        let mut site = Site { node, outside, bare, neighbour, near, conf };
        site.attach_without_policy("bare", &site.bare);
        let result = site.attach_without_policy("neighbour", &site.neighbour);
        site.near = address(&result, 0);
        site
    }

    fn list(&self) -> Conflist<'_> {
        Conflist::new(&self.node, self.conf.clone())
    }

    fn attach(&self, at: &Attached) -> Value {
        let list = self.list();
        let result = list.add(at).unwrap();
        list.check(at, &result).unwrap();
        result
    }

    fn attach_without_policy(&self, id: &str, container: &Container) -> Value {
        let mut list = self.list();
        let plugins = list.conf["plugins"].as_array_mut().unwrap();
        let policy = plugins.iter().position(|plugin| plugin["type"] == "egress").unwrap();
        plugins.truncate(policy);
        // The port of a container of the same list may be published.
        let mut at = Attached::new(id, &container.path());
        if id == "neighbour" {
            at.runtime = json!({"portMappings": [{"hostPort": 8081, "containerPort": 80, "protocol": "tcp"}]});
        }
        list.add(&at).unwrap()
    }

    /// What the container reaches at this place, and the one without a policy in any case.
    #[track_caller]
    fn reaches(&self, inside: &Container, server: &impl Place, cases: &[Case<'_>]) {
        for &(ip, service, passes) in cases {
            eventually(&format!("without a policy: {ip} {service}"), || {
                answers(&self.bare, server, ip, service)
            });
            if passes {
                eventually(&format!("{ip} {service}"), || answers(inside, server, ip, service));
            } else {
                assert!(!answers(inside, server, ip, service), "{ip} {service} is refused");
            }
        }
    }
}

/// Whether a request to this address and service gets a reply of `server`, which listens at any of
/// its addresses; the service is `tcp/PORT`, `tcp/PORT:PORT` if the port is translated, or `icmp`.
fn answers(client: &impl Place, server: &impl Place, ip: &str, service: &str) -> bool {
    let Some((protocol, ports)) = service.split_once('/') else {
        return client.reaches_within(ip, 0);
    };
    let (port, server_port) = ports.split_once(':').unwrap_or((ports, ports));
    let ip: IpAddr = ip.parse().unwrap();
    let to = SocketAddr::new(ip, port.parse().unwrap());
    let any: IpAddr = if ip.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    let server_port = server_port.parse().unwrap();
    match protocol {
        "tcp" => answers_by_tcp(client, server, to, (any, server_port).into()),
        _ => answers_by_udp(client, server, to, (any, server_port).into()),
    }
}

fn answers_by_tcp(
    client: &impl Place,
    server: &impl Place,
    to: SocketAddr,
    at: SocketAddr,
) -> bool {
    let mut listener = None;
    eventually("the port is free", || {
        listener = server.within(|| TcpListener::bind(at)).ok();
        listener.is_some()
    });
    let listener = listener.unwrap();
    listener.set_nonblocking(true).unwrap();
    let Ok(mut near) = client.within(|| TcpStream::connect_timeout(&to, WAIT)) else {
        return false;
    };
    let deadline = Instant::now() + WAIT;
    let mut far = loop {
        match listener.accept() {
            Ok((far, _)) => break far,
            Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(2)),
            Err(_) => return false,
        }
    };
    let mut buffer = [0; 8];
    for socket in [&near, &far] {
        socket.set_read_timeout(Some(WAIT)).unwrap();
    }
    near.write_all(b"question").is_ok()
        && far.read_exact(&mut buffer).is_ok()
        && far.write_all(b"answered").is_ok()
        && near.read_exact(&mut buffer).is_ok()
        && buffer == *b"answered"
}

fn answers_by_udp(
    client: &impl Place,
    server: &impl Place,
    to: SocketAddr,
    at: SocketAddr,
) -> bool {
    let has_address = server.within(|| UdpSocket::bind((to.ip(), 0)).is_ok());
    // At any address it would answer from another one of them.
    let far = server.within(|| bind(if has_address { to.ip() } else { at.ip() }, at.port()));
    let near = client.within(|| UdpSocket::bind((at.ip(), 0)).unwrap());
    for socket in [&near, &far] {
        socket.set_read_timeout(Some(WAIT)).unwrap();
    }
    let mut buffer = [0; 16];
    // Connected, because another address must not answer.
    near.connect(to).is_ok()
        && near.send(b"question").is_ok()
        && far.recv_from(&mut buffer).is_ok_and(|(_, from)| far.send_to(b"answered", from).is_ok())
        && near.recv(&mut buffer).is_ok_and(|length| buffer[..length] == *b"answered")
}

#[test]
fn a_coding_agent() {
    let site = Site::new("A coding agent in a devcontainer");
    let inside = Container::new();
    let mut at = Attached::new("c1", &inside.path());
    at.runtime =
        json!({"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]});
    site.attach(&at);
    site.reaches(
        &inside,
        &site.outside,
        &[
            (FAR[0], "tcp/443", true),
            (FAR[3], "tcp/22", true),
            (FAR[1], "icmp", true),
            ("10.20.0.7", "tcp/443", true),
            ("10.20.0.7", "tcp/80", false),
            ("10.20.0.5", "tcp/443", false),
            (RESOLVER, "udp/53", true),
            (RESOLVER, "tcp/53", true),
            (RESOLVER, "tcp/443", false),
            (OUTSIDE[0], "tcp/443", false),
            (FAR[2], "tcp/80", false),
        ],
    );
    site.reaches(
        &inside,
        &site.node,
        &[
            ("10.88.0.1", "udp/53", true),
            ("fd00:88::1", "tcp/53", true),
            ("10.88.0.1", "tcp/22", false),
            ("fd00:88::1", "tcp/22", false),
            (PUBLIC_NODE, "tcp/443", false),
        ],
    );
    let through_node: Case<'_> = (OUTSIDE_NODE, "tcp/8081:80", false);
    site.reaches(&inside, &site.neighbour, &[(&site.near, "tcp/80", false), through_node]);
    eventually("the published port", || {
        answers(&site.outside, &inside, OUTSIDE_NODE, "tcp/8080:80")
    });
}

#[test]
fn an_agent_without_name_service() {
    let mut conf = recipe("A coding agent in a devcontainer");
    conf["plugins"][2]["deny"] = json!([{"ports": ["udp/53", "tcp/53"]}]);
    let (site, inside) = (Site::with_list(conf), Container::new());
    site.attach(&Attached::new("c1", &inside.path()));
    let outside = [(RESOLVER, "udp/53", false), (FAR[0], "tcp/443", true)];
    site.reaches(&inside, &site.outside, &outside);
    site.reaches(&inside, &site.node, &[("10.88.0.1", "udp/53", false)]);
}

#[test]
fn a_ci_runner() {
    let site = Site::new("A CI runner");
    let inside = Container::new();
    site.attach(&Attached::new("c1", &inside.path()));
    site.reaches(
        &inside,
        &site.outside,
        &[
            (FAR[0], "tcp/443", true),
            (FAR[3], "tcp/80", true),
            (FAR[0], "tcp/22", false),
            (FAR[3], "tcp/25", false),
            (FAR[0], "udp/443", false),
            (FAR[0], "icmp", false),
            (RESOLVER, "udp/53", true),
            (RESOLVER, "tcp/443", false),
            ("10.20.0.7", "tcp/443", false),
            (FAR[2], "tcp/80", false),
        ],
    );
    site.reaches(
        &inside,
        &site.node,
        &[
            ("10.87.0.1", "udp/53", true),
            ("10.87.0.1", "tcp/80", false),
            ("fd00:87::1", "tcp/443", false),
            (PUBLIC_NODE, "tcp/443", false),
            (PUBLIC_NODE, "udp/53", true),
        ],
    );
    site.reaches(&inside, &site.neighbour, &[(&site.near, "tcp/80", false)]);
}

#[test]
fn a_firecracker_machine() {
    let site = Site::new("A Firecracker machine");
    let container = Container::new();
    let result = site.attach(&Attached::new("c1", &container.path()));
    let machine = Machine::boot(&container, &result);
    let inside = &machine.inside;
    site.reaches(
        inside,
        &site.outside,
        &[
            (FAR[0], "tcp/443", true),
            (FAR[0], "icmp", true),
            (RESOLVER, "udp/53", true),
            (RESOLVER, "tcp/80", false),
            ("10.20.0.7", "tcp/443", false),
            (FAR[2], "tcp/80", false),
        ],
    );
    site.reaches(
        inside,
        &site.node,
        &[(OUTSIDE_NODE, "udp/53", true), (OUTSIDE_NODE, "tcp/80", false)],
    );
    site.reaches(inside, &site.neighbour, &[(&site.near, "tcp/80", false)]);
    eventually("ssh to the machine", || {
        answers(&site.node, inside, &address(&result, 0), "tcp/22")
    });
    // Another MAC address.
    inside.sh("ip link set eth0 address 02:00:00:00:00:99");
    assert!(!answers(inside, &site.outside, FAR[0], "tcp/443"));
}

#[test]
fn one_database() {
    let site = Site::new("One database");
    let inside = Container::new();
    site.attach(&Attached { ifname: "net1".to_owned(), ..Attached::new("c1", &inside.path()) });
    for container in [&site.bare, &inside] {
        container.sh("ip route add default via 10.89.0.1");
    }
    site.reaches(
        &inside,
        &site.outside,
        &[
            ("10.20.0.5", "tcp/5432", true),
            ("10.20.0.5", "icmp", true),
            ("10.20.0.5", "tcp/22", false),
            ("10.20.0.5", "udp/5432", false),
            ("10.20.0.6", "tcp/5432", false),
            ("10.20.0.6", "icmp", false),
            (RESOLVER, "udp/53", false),
            (FAR[0], "tcp/443", false),
            (FAR[2], "tcp/80", false),
        ],
    );
    site.reaches(
        &inside,
        &site.node,
        &[("10.89.0.1", "udp/53", false), ("10.89.0.1", "icmp", false)],
    );
    site.reaches(&inside, &site.neighbour, &[(&site.near, "tcp/5432", false)]);
}

const CLUSTER: &str = "The pods of a Kubernetes node";

/// The list of the page, or the same one with a bridge.
fn cluster_list(kind: &str) -> Value {
    let mut list = recipe(CLUSTER);
    if kind == "bridge" {
        let interface = list["plugins"][0].as_object_mut().unwrap();
        let bridge =
            json!({"type": "bridge", "bridge": "cni0", "isGateway": true, "hairpinMode": true});
        interface.extend(bridge.as_object().unwrap().clone());
    }
    list
}

/// The node of a cluster, with a pod.
struct Cluster {
    site: Site,
    pod: Container,
    ip: String,
    /// The pod of cluster DNS, of the same list.
    dns: Container,
    dns_ip: String,
}

/// What translates the addresses of Services.
#[derive(Clone, Copy, Debug)]
enum Proxy {
    Nftables,
    IptablesNft,
    IptablesLegacy,
}

impl Cluster {
    fn new(kind: &str) -> Cluster {
        let site = Site::with_list(cluster_list(kind));
        // As for kube-proxy.
        site.node.sh("modprobe -q br_netfilter || true; echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables");
        let (pod, dns) = (Container::new(), Container::new());
        let mut at = Attached::new("c1", &pod.path());
        at.runtime =
            json!({"portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}]});
        let ip = address(&site.attach(&at), 0);
        // To a neighbour on a bridge no reply by UDP passes.
        let dns_ip = if kind == "ptp" {
            site.attach(&Attached::new("dns", &dns.path()))
        } else {
            site.attach_without_policy("dns", &dns)
        };
        let dns_ip = address(&dns_ip, 0);
        Cluster { site, pod, ip, dns, dns_ip }
    }

    /// The Services: address and service, the endpoint.
    fn services(&self) -> Vec<(&'static str, &'static str, String)> {
        vec![
            ("10.96.0.10", "udp/53", format!("{}:53", self.dns_ip)),
            ("10.96.0.10", "tcp/53", format!("{}:53", self.dns_ip)),
            ("10.96.0.1", "tcp/443", format!("{OUTSIDE_NODE}:6443")),
            ("10.96.7.20", "tcp/443", format!("{}:8443", self.site.near)),
            // Not in the policy.
            ("10.96.7.21", "tcp/443", format!("{}:8443", self.site.near)),
            ("10.96.7.20", "tcp/80", format!("{}:8443", self.site.near)),
            // In front of the pod with the policy.
            ("10.96.8.1", "tcp/80", format!("{}:8080", self.ip)),
        ]
    }

    fn translate(&self, proxy: Proxy) {
        let run = |line: String| drop(self.site.node.sh(&line));
        let tables = match proxy {
            Proxy::Nftables => {
                run("nft add table ip kube-proxy".to_owned());
                for (chain, hook) in [("services", "prerouting"), ("own", "output")] {
                    run(format!(
                        "nft 'add chain ip kube-proxy {chain} \
                         {{ type nat hook {hook} priority -100; }}'"
                    ));
                }
                None
            }
            Proxy::IptablesNft => Some("iptables-nft"),
            Proxy::IptablesLegacy => Some("iptables-legacy"),
        };
        for (ip, service, to) in self.services() {
            let (protocol, port) = service.split_once('/').unwrap();
            match tables {
                None => ["services", "own"].into_iter().for_each(|chain| {
                    run(format!(
                        "nft add rule ip kube-proxy {chain} ip daddr {ip} {protocol} dport {port} \
                         dnat to {to}"
                    ));
                }),
                Some(iptables) => ["PREROUTING", "OUTPUT"].into_iter().for_each(|chain| {
                    run(format!(
                        "{iptables} -w -t nat -A {chain} -d {ip} -p {protocol} --dport {port} \
                         -j DNAT --to-destination {to}"
                    ));
                }),
            }
        }
    }
}

#[test]
fn pods_of_a_kubernetes_node() {
    for (kind, proxy) in [
        ("ptp", Proxy::Nftables),
        ("ptp", Proxy::IptablesNft),
        ("bridge", Proxy::Nftables),
        ("bridge", Proxy::IptablesNft),
        ("bridge", Proxy::IptablesLegacy),
    ] {
        println!("{kind}, {proxy:?}");
        let cluster = Cluster::new(kind);
        cluster.translate(proxy);
        pods_reach_services_alone(&cluster);
        clients_reach_pods(&cluster);
    }
}

/// A Service is reached by its address alone, and the pods behind it only by it.
fn pods_reach_services_alone(cluster: &Cluster) {
    let Cluster { site, pod, dns, dns_ip, .. } = cluster;
    site.reaches(
        pod,
        dns,
        &[
            ("10.96.0.10", "udp/53", true),
            ("10.96.0.10", "tcp/53", true),
            (dns_ip, "udp/53", false),
            (dns_ip, "tcp/53", false),
        ],
    );
    site.reaches(
        pod,
        &site.node,
        &[
            ("10.96.0.1", "tcp/443:6443", true),
            (OUTSIDE_NODE, "tcp/6443", false),
            ("10.244.1.1", "tcp/10250", false),
        ],
    );
    site.reaches(
        pod,
        &site.neighbour,
        &[
            ("10.96.7.20", "tcp/443:8443", true),
            ("10.96.7.20", "tcp/80:8443", false),
            ("10.96.7.21", "tcp/443:8443", false),
            (&site.near, "tcp/8443", false),
            (OUTSIDE_NODE, "tcp/8081:80", false),
        ],
    );
    site.reaches(
        pod,
        &site.outside,
        &[
            (FAR[0], "tcp/443", true),
            (FAR[0], "tcp/80", false),
            (RESOLVER, "udp/53", true),
            ("10.20.0.5", "tcp/443", false),
            (FAR[2], "tcp/80", false),
        ],
    );
}

/// A probe of the kubelet, another node, and a pod of this node; directly, by a Service, and by the
/// published port.
fn clients_reach_pods(cluster: &Cluster) {
    let Cluster { site, pod, ip, dns, dns_ip } = cluster;
    for (to, service) in
        [(ip.as_str(), "tcp/8080"), ("10.96.8.1", "tcp/80:8080"), (OUTSIDE_NODE, "tcp/8080:80")]
    {
        eventually(&format!("{to}: the node"), || answers(&site.node, pod, to, service));
        eventually(&format!("{to}: outside"), || answers(&site.outside, pod, to, service));
        eventually(&format!("{to}: a pod"), || answers(&site.bare, pod, to, service));
    }
    assert!(site.node.reaches(ip) && site.bare.reaches(ip) && site.outside.reaches(ip), "pings");
    // A reply by UDP from a port that is not served.
    assert!(!answers(&site.outside, pod, ip, "udp/54"));
    for client in [&site.outside, &site.bare] {
        eventually("cluster DNS", || answers(client, dns, dns_ip, "udp/53"));
    }
    // Frames on a bridge belong to no connection.
    let to_neighbours = site.conf["plugins"][0]["type"] == "ptp";
    for (client, passes) in [(&site.outside, true), (&site.bare, to_neighbours)] {
        if passes {
            eventually("a served port", || answers(client, pod, ip, "udp/53"));
        } else {
            assert!(!answers(client, pod, ip, "udp/53"), "a served port, to a neighbour");
        }
    }
}

/// IPVS: the addresses of Services are the node's own.
#[test]
fn services_whose_addresses_the_node_has() {
    for is_late in [false, true] {
        let site = Site::new(CLUSTER);
        let add = || {
            for ip in ["10.96.7.20", "10.96.7.21"] {
                site.node.sh(&format!("ip addr add {ip}/32 dev lo"));
            }
        };
        if !is_late {
            add();
        }
        let pod = Container::new();
        site.attach(&Attached::new("c1", &pod.path()));
        if is_late {
            add();
        }
        site.reaches(
            &pod,
            &site.node,
            &[
                ("10.96.7.20", "tcp/443", true),
                ("10.96.7.20", "tcp/80", false),
                ("10.96.7.21", "tcp/443", false),
            ],
        );
    }
}
