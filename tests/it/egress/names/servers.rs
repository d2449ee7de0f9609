//! dnsmasq and unbound as name servers of the node.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::client::Way;
use super::wire::{A, AAAA, HTTPS, Message, NOERROR, NXDOMAIN, REFUSED, Record};
use super::{GATEWAYS, Site, names};
use crate::support::node::eventually;
use crate::support::traffic::Place;

/// A server in the place outside; ended on drop, by its own id.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Starts a program, unless it is missing. Waits until the server at 10.9.0.2 answers.
fn start(site: &Site, program: &str, args: &[&str], port: u16) -> Option<Server> {
    let log = File::create(site.node.path(&format!("{program}.log"))).unwrap();
    let mut command = Command::new(program);
    command.args(args).stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    let child = match site.outside.within(|| command.spawn()) {
        Ok(child) => Server(child),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            println!("skipped: no {program}");
            return None;
        }
        Err(error) => panic!("{program}: {error}"),
    };
    let log = || fs::read_to_string(site.node.path(&format!("{program}.log"))).unwrap();
    eventually(&format!("{program} does not answer: {}", log()), || {
        let question = Message::question("api.example.org", A);
        Way::udp("10.9.0.2").at_port(port).is_answered(&site.outside, &question)
    });
    Some(child)
}

/// What containers of both kinds find.
fn is_served(site: &Site) {
    for kind in ["bridge", "ptp"] {
        let id = format!("of-{kind}");
        let inside = site.attach(kind, &id, Some(&names()));
        for (name, ip) in [
            ("api.example.org", "192.0.2.7"),
            ("API.example.ORG", "2001:db8:f::7"),
            ("a.example.net", "203.0.113.10"),
            ("www.example.net", "203.0.113.14"),
        ] {
            assert!(!inside.reaches(ip, 443), "{kind} {name}");
            inside.finds(name, &[ip]);
            assert!(inside.reaches(ip, 443) && !inside.reaches(ip, 80), "{kind} {name}");
        }
        let rcode = |name, kind| inside.ask(name, kind).rcode();
        assert_eq!(rcode("none.example.net", A), NXDOMAIN, "{kind}");
        assert_eq!(rcode("a.example.net", AAAA), NOERROR, "{kind}");
        assert_eq!(rcode("other.example.org", A), REFUSED, "{kind}");
        // It leads inside.
        let inner = inside.ask("inner.example.net", A);
        assert_eq!((inner.rcode(), inner.ips().len()), (NOERROR, 0), "{kind}: {inner:?}");
        // More than fits in a datagram to and from the resolver.
        let question = Message::question("many.example.net", A);
        let many = Way::udp(GATEWAYS[0]).ask(&inside.container, &question);
        assert!(many.is_truncated(), "{kind}: {many:?}");
        let many = Way::tcp(GATEWAYS[0]).ask(&inside.container, &question);
        assert_eq!(many.ips().len(), 64, "{kind}");
        let many: Vec<String> = many.ips().iter().map(ToString::to_string).collect();
        assert!(many.iter().take(3).all(|ip| inside.reaches(ip, 443)), "{kind}: {many:?}");
    }
}

/// The addresses of many.example.net.
fn many() -> impl Iterator<Item = String> {
    (100..220).map(|nth| format!("203.0.113.{nth}"))
}

#[test]
fn dnsmasq_is_asked() {
    let mut site = Site::without_resolver();
    // Its port.
    drop(std::mem::replace(
        &mut site.upstream,
        super::Upstream::start(&site.outside, "10.9.0.2", 54),
    ));
    let hosts = site.node.path("hosts");
    let many: String = many().map(|ip| format!("{ip} many.example.net\n")).collect();
    let own = "192.0.2.7 api.example.org\n2001:db8:f::7 api.example.org\n\
               203.0.113.10 a.example.net\n203.0.113.14 edge.example.com\n\
               10.1.2.1 inner.example.net\n203.0.113.15 other.example.org\n";
    fs::write(&hosts, format!("{own}{many}")).unwrap();
    let hosts = format!("--addn-hosts={}", hosts.display());
    eventually("the port is free", || {
        site.outside.within(|| std::net::UdpSocket::bind("10.9.0.2:53").is_ok())
    });
    let args = [
        "--keep-in-foreground",
        "--conf-file=/dev/null",
        "--pid-file=",
        "--user=root",
        "--log-facility=-",
        "--no-resolv",
        "--no-hosts",
        "--local=/#/",
        "--listen-address=10.9.0.2",
        "--bind-interfaces",
        "--except-interface=lo",
        "--cname=www.example.net,edge.example.com",
        hosts.as_str(),
    ];
    let Some(_server) = start(&site, "dnsmasq", &args, 53) else { return };
    site.start_resolver(&["10.9.0.2"]);
    is_served(&site);
}

/// A resolver with a cache, which asks the server of the test.
#[test]
fn unbound_is_asked() {
    let mut site = Site::without_resolver();
    let mut zone = super::zone();
    zone.push(Record::address("inner.example.net", "10.1.2.1"));
    zone.extend(many().map(|ip| Record::address("many.example.net", &ip)));
    let alpn: (u16, &[u8]) = (1, b"\x02h2");
    let hint: (u16, &[u8]) = (4, &[203, 0, 113, 90]);
    zone.push(Record::service("svc.example.net", HTTPS, "", &[alpn, hint]));
    site.upstream.serve(zone);
    let file = site.node.path("unbound.conf");
    let directory = site.node.path("");
    write_unbound(&file, &directory);
    let args = ["-d", "-c", file.to_str().unwrap()];
    let Some(_server) = start(&site, "unbound", &args, 5300) else { return };
    site.start_resolver(&["10.9.0.2:5300"]);
    is_served(&site);
    let inside = site.attach("bridge", "c1", Some(&names()));
    let answer = inside.ask("svc.example.net", HTTPS);
    let bare = Record::service("svc.example.net", HTTPS, "", &[alpn]);
    assert_eq!(answer.answers[0].data, bare.data, "{answer:?}");
    // A server that gives no answer: neither does unbound.
    site.upstream.answer(|asked| vec![asked.message.reply(REFUSED, Vec::new()).encode()]);
    let answer = inside.ask("fresh.example.net", A);
    assert_eq!(answer.rcode(), super::wire::SERVFAIL, "{answer:?}");
}

fn write_unbound(file: &Path, directory: &Path) {
    let directory = directory.display();
    let text = format!(
        "server:\n  directory: \"{directory}\"\n  chroot: \"\"\n  username: \"\"\n  pidfile: \"\"\n  \
         use-syslog: no\n  logfile: \"\"\n  do-daemonize: no\n  interface: 10.9.0.2@5300\n  \
         access-control: 0.0.0.0/0 allow\n  module-config: \"iterator\"\n  \
         do-not-query-localhost: no\n  num-threads: 1\n  prefetch: no\n  \
         unblock-lan-zones: yes\n  insecure-lan-zones: yes\n\
         remote-control:\n  control-enable: no\n\
         forward-zone:\n  name: \".\"\n  forward-addr: 10.9.0.2@53\n"
    );
    fs::write(file, text).unwrap();
}
