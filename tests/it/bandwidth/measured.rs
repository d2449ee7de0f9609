//! Limits measured with iperf3: between the host and a limited container, and with an unlimited
//! container.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use super::SUBJECT;
use crate::support::chained::Pod;
use crate::support::net::Net;
use crate::support::node::Container;

/// Rate limit in bit/s, for both directions.
const RATE: f64 = 20e6;

/// Lower bound of the TCP or UDP payload's share of a 1514 byte frame.
const PAYLOAD: f64 = 1428.0 / 1514.0;

/// An iperf3 server in a container, killed on drop.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

fn serve(container: &Container, ip: &str) -> Server {
    let mut command = Command::new("nsenter");
    command.arg(format!("--net={}", container.path())).args(["--", "iperf3", "-s", "-1", "-B", ip]);
    let mut child = command.arg("--forceflush").stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let listening = lines.any(|line| line.unwrap().contains("listening"));
    assert!(listening, "no server: install the package \"iperf3\" (make test does)");
    // Drain the pipe so that later output cannot block the server.
    std::thread::spawn(move || lines.for_each(drop));
    Server(child)
}

/// Received payload rate in bit/s. `-R` in `args` measures from the container to the host.
fn measure(pod: &Pod<'_>, container: &Container, ip: &str, args: &str) -> f64 {
    let _server = serve(container, ip);
    let text = pod.node.sh(&format!("iperf3 -J -c {ip} --connect-timeout 5000 {args}"));
    let report: Value = serde_json::from_str(&text).unwrap();
    report["end"]["sum_received"]["bits_per_second"].as_f64().unwrap_or_else(|| panic!("{text}"))
}

/// Asserts that the rate is within 10 % of the limit. On a busy machine a measurement may be too
/// low and is repeated; a rate that is too high fails at once.
#[track_caller]
fn assert_limited(pod: &Pod<'_>, ip: &str, args: &str) {
    let mut seen = Vec::new();
    for _ in 0..3 {
        let payload = measure(pod, &pod.container, ip, args);
        seen.push(payload / 1e6);
        assert!(payload < RATE * 1.1, "{args} is not limited: {seen:?} Mbit/s");
        if payload > RATE * PAYLOAD * 0.9 {
            println!("{args}: {seen:?} Mbit/s");
            return;
        }
    }
    panic!("{args} is too slow: {seen:?} Mbit/s");
}

fn limited() -> Pod<'static> {
    let pod = SUBJECT.pod("1.1.0");
    let (rate, burst) = (20_000_000, 400_000);
    let limits = json!({"ingressRate": rate, "ingressBurst": burst, "egressRate": rate,
        "egressBurst": burst});
    pod.net(&limits).add(&pod.container);
    pod
}

#[test]
fn tcp_keeps_to_the_limits_in_both_directions() {
    let pod = limited();
    assert_limited(&pod, "10.1.2.2", "-t 3");
    assert_limited(&pod, "10.1.2.2", "-t 3 -R");
    assert_limited(&pod, "2001:db8:1::2", "-t 3 -R");
}

#[test]
fn udp_keeps_to_the_limits_in_both_directions() {
    let pod = limited();
    assert_limited(&pod, "2001:db8:1::2", "-t 3 -u -b 50M -l 1428");
    assert_limited(&pod, "10.1.2.2", "-t 3 -u -b 50M -l 1428 -R");
}

#[test]
fn other_containers_are_not_limited() {
    let pod = limited();
    let neighbour = Container::new();
    let ipam = pod.node.host_local(&["10.1.2.0/24"]);
    let ptp = Net::new(&pod.node, "ptp", "1.1.0", &json!({"ipam": ipam}));
    ptp.call("ADD", "c2").netns(&neighbour.path()).result();
    let bandwidth = |verb: &str| {
        let none = json!({"ingressRate": null, "ingressBurst": null, "egressRate": null,
            "egressBurst": null});
        pod.net(&none).call(verb, "c2").netns(&neighbour.path())
    };
    bandwidth("ADD").result();
    // Saturate the first container's limit meanwhile.
    let _server = serve(&pod.container, "10.1.2.2");
    let mut busy = Command::new("iperf3");
    busy.args(["-c", "10.1.2.2", "-t", "20"]).stdout(Stdio::null());
    let _busy = Server(busy.spawn().unwrap());
    for args in ["-t 2", "-t 2 -R"] {
        let rate = measure(&pod, &neighbour, "10.1.2.3", args);
        assert!(rate > 3.0 * RATE, "{args}: {} Mbit/s", rate / 1e6);
    }
}

#[test]
fn without_the_plugin_and_after_del_there_is_no_limit() {
    let pod = limited();
    pod.plain().del(&pod.container);
    for args in ["-t 1", "-t 1 -R"] {
        let rate = measure(&pod, &pod.container, "10.1.2.2", args);
        assert!(rate > 3.0 * RATE, "{args}: {} Mbit/s", rate / 1e6);
    }
}
