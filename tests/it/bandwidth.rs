//! bandwidth: lifecycle in every version, measured limits, owners of devices, CHECK, GC, STATUS,
//! faults, and comparison with the reference plugin.

mod measured;
mod owners;
mod reference;

use serde_json::{Value, json};

use crate::support::chained::{Pod, Subject};
use crate::support::net::merged;

/// The supported CNI versions.
const VERSIONS: [&str; 5] = ["0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// The ifb device of container `c1` in network `net`; the reference derives the same name.
const IFB: &str = "bwp623e1c388032";

const SUBJECT: Subject = Subject {
    plugin: "bandwidth",
    versions: &VERSIONS,
    keys: |_| {
        json!({"ingressRate": 8_000_000, "ingressBurst": 800_000,
               "egressRate": 16_000_000, "egressBurst": 800_000})
    },
    result: |result, version| {
        let mut ifb = json!({"name": IFB, "mac": "MAC"});
        if version == "1.1.0" {
            ifb["mtu"] = json!(1500);
        }
        result["interfaces"].as_array_mut().unwrap().push(ifb);
    },
    ..Subject::BEHIND_PTP
};

/// The name of the host's veth end.
fn end(pod: &Pod<'_>) -> String {
    pod.prev["interfaces"][0]["name"].as_str().unwrap().to_owned()
}

/// The JSON output of `tc`.
fn tc(pod: &Pod<'_>, what: &str) -> Value {
    let text = pod.node.sh(&format!("tc -j {what}"));
    if text.trim().is_empty() { json!([]) } else { serde_json::from_str(&text).unwrap() }
}

/// Rate and latency of the root qdisc (tbf), in tc's units.
fn bucket(pod: &Pod<'_>, dev: &str) -> Value {
    let listed = tc(pod, &format!("qdisc show dev {dev}"));
    let root = listed.as_array().unwrap().iter().find(|q| q["root"] == true).cloned();
    root.map(|qdisc| json!([qdisc["kind"], qdisc["handle"], qdisc["options"]["rate"]]))
        .unwrap_or_default()
}

/// The targets of the ingress redirects (`mirred`) on the host's veth end.
fn redirects(pod: &Pod<'_>) -> Vec<String> {
    let listed = pod.node.sh(&format!("tc filter show dev {} ingress", end(pod)));
    let lines = listed.lines().filter_map(|line| line.split_once("Egress Redirect to device "));
    lines.map(|(_, to)| to.trim_end_matches(") stolen").to_owned()).collect()
}

#[test]
fn add_lists_the_device_check_agrees_and_del_leaves_nothing() {
    SUBJECT.add_check_del_del();
}

#[test]
fn the_kernel_gets_the_configured_limits() {
    let pod = SUBJECT.pod("1.1.0");
    let (net, end) = (pod.plain(), end(&pod));
    net.add(&pod.container);
    assert_eq!(bucket(&pod, &end), json!(["tbf", "1:", 1_000_000]));
    assert_eq!(bucket(&pod, IFB), json!(["tbf", "1:", 2_000_000]));
    assert_eq!(redirects(&pod), [IFB]);
    let ifb = &pod.node.ip(&format!("-d link show {IFB}"))[0];
    assert_eq!((&ifb["mtu"], &ifb["txqlen"]), (&json!(1500), &Value::Null));
    assert!(ifb["flags"].as_array().unwrap().contains(&json!("UP")), "{ifb}");
    let alias = ifb["ifalias"].as_str().unwrap();
    assert!(alias.ends_with(&format!("net: net, if: eth0, id: c1, host: {end}")), "{alias}");

    // ADD with other limits updates the qdiscs.
    let other = net.with(&json!({"ingressRate": 80_000_000, "latency": 5}));
    other.add(&pod.container);
    assert_eq!(bucket(&pod, &end), json!(["tbf", "1:", 10_000_000]));
    let shown = pod.node.sh(&format!("tc qdisc show dev {end}"));
    assert!(shown.contains("lat 5ms"), "{shown}");
    assert_eq!(redirects(&pod), [IFB]);
}

#[test]
fn each_direction_may_be_limited_alone() {
    for (direction, source) in [("ingress", "own"), ("ingress", "runtime"), ("egress", "own")] {
        let pod = SUBJECT.pod("1.0.0");
        let before = pod.state();
        let none = json!({"ingressRate": null, "ingressBurst": null, "egressRate": null,
            "egressBurst": null});
        let limit =
            json!({format!("{direction}Rate"): 8_000_000, format!("{direction}Burst"): 800_000});
        let limit = match source {
            "own" => limit,
            _ => json!({"runtimeConfig": {"bandwidth": limit}}),
        };
        let net = pod.net(&merged(&none, &limit));
        let result = net.add(&pod.container);
        let shaped = json!(["tbf", "1:", 1_000_000]);
        let is_ingress = direction == "ingress";
        assert_eq!(bucket(&pod, &end(&pod)) == shaped, is_ingress, "{direction} {source}");
        let devices = pod.node.ip("link show type ifb");
        assert_eq!(devices.as_array().unwrap().len(), usize::from(!is_ingress));
        assert_eq!(result["interfaces"].as_array().unwrap().len(), 2 + usize::from(!is_ingress));
        net.check(&pod.container, &result).ok();
        net.del(&pod.container);
        pod.assert_as(&before, direction);
    }
}

#[test]
fn add_without_limits_changes_nothing() {
    for version in ["0.3.0", "0.4.0", "1.1.0"] {
        let pod = SUBJECT.pod(version);
        let before = pod.state();
        let net = pod.net(&json!({"ingressRate": 0, "ingressBurst": 0, "egressRate": null,
            "egressBurst": null, "runtimeConfig": {}}));
        assert_eq!(net.add(&pod.container), pod.prev);
        if version >= "0.4.0" {
            net.check(&pod.container, &pod.prev).ok();
        }
        net.del(&pod.container);
        pod.assert_as(&before, version);
    }
}

#[test]
fn del_removes_limits_without_prev_result_or_namespace() {
    SUBJECT.del_without(|pod, before, what| {
        if what == "namespace" {
            crate::support::node::assert_unchanged(&before.host, &pod.node.snapshot());
        }
        assert_eq!(pod.node.ip("link show type ifb"), json!([]), "{what}");
        assert_eq!(redirects(pod), [""; 0], "{what}: the container is cut off");
        assert!(pod.container.pings("10.1.2.1"), "{what}");
    });
}

#[test]
fn check_reports_changed_limits() {
    let pod = SUBJECT.pod("1.1.0");
    let (net, end) = (pod.plain(), end(&pod));
    let prev = net.add(&pod.container);
    let bucket = "root handle 1: tbf burst 100000 rate";
    let down = format!("interface \"{IFB}\" is down");
    let led = format!("ingress of \"{end}\" is not redirected to \"{IFB}\"");
    for (change, msg) in [
        (format!("tc qdisc del dev {end} root"), "Failed to find qdisc"),
        (format!("tc qdisc replace dev {end} root handle 2: pfifo"), "Failed to find qdisc"),
        (format!("tc qdisc replace dev {end} {bucket} 9Mbit latency 25ms"), "Rate doesn't match"),
        (format!("tc qdisc replace dev {end} {bucket} 8Mbit latency 26ms"), "Limit doesn't match"),
        (
            format!(
                "tc qdisc replace dev {end} root handle 1: tbf burst 99000 rate 8Mbit limit 125000"
            ),
            "Buffer doesn't match",
        ),
        (format!("tc qdisc del dev {IFB} root"), "Failed to find qdisc"),
        (format!("tc qdisc replace dev {IFB} {bucket} 8Mbit latency 25ms"), "Rate doesn't match"),
        (format!("ip link set {IFB} down"), &down),
        (format!("tc qdisc del dev {end} ingress"), &led),
        (format!("tc filter del dev {end} ingress"), &led),
        (format!("ip link del {IFB}"), "get ifb device: Link not found"),
    ] {
        pod.node.sh(&change);
        net.check_finds(&pod.container, &prev, msg);
        // ADD repairs each damage, but never replaces a foreign qdisc.
        if change.contains("pfifo") {
            let error = net.on("ADD", &pod.container).error();
            assert_eq!(error.msg, format!("\"{end}\" has the qdisc pfifo 2: already"));
            pod.node.sh(&format!("tc qdisc del dev {end} root"));
        }
        net.add(&pod.container);
        net.check(&pod.container, &prev).ok();
    }
}

#[test]
fn refusals_change_nothing() {
    let pod = SUBJECT.pod("1.1.0");
    for (keys, code, msg) in [
        (json!({"prevResult": null}), 999, "must be called as chained plugin"),
        (json!({"ingressBurst": 0}), 7, "if rate is set, burst must also be set"),
        (json!({"egressRate": null}), 7, "if burst is set, rate must also be set"),
        (json!({"egressBurst": 34_359_738_368_u64}), 7, "burst cannot be more than 4GB"),
        (json!({"egressRate": 7}), 7, "egressRate 7 is less than a byte a second"),
        (
            json!({"ingressRate": -1}),
            6,
            "failed to load netconf: expected a whole number that is not negative, found the number -1",
        ),
        (
            json!({"ingressRate": "1M"}),
            6,
            "failed to load netconf: expected a whole number that is not negative, found the text \"1M\"",
        ),
    ] {
        pod.net(&keys).add_is_refused(&pod.container, code, msg);
    }
    for version in ["0.1.0", "0.2.0"] {
        pod.net(&json!({"cniVersion": version})).add_is_refused(
            &pod.container,
            1,
            "incompatible CNI versions",
        );
    }
    let call = pod.plain().on("ADD", &pod.container).ifname("lo");
    let msg = "container interface lo has no veth peer: it is not a veth";
    pod.plain().is_refused(&call, &pod.container, (999, msg));
    let call = pod.plain().on("ADD", &pod.container).ifname("eth7");
    let msg = "container interface eth7 has no veth peer: Link not found";
    pod.plain().is_refused(&call, &pod.container, (999, msg));
    // DEL succeeds even if the limits are invalid.
    let net = pod.plain();
    let before = pod.state();
    net.add(&pod.container);
    net.with(&json!({"ingressBurst": 0})).del(&pod.container);
    pod.assert_as(&before, "DEL with bad limits");
}

/// Plugins of other projects list no interfaces, only the container's, or the host's with a
/// `sandbox`.
#[test]
fn the_pair_is_shaped_whatever_interfaces_the_result_lists() {
    let pod = SUBJECT.pod("1.1.0");
    let end = end(&pod);
    let before = pod.state();
    let inside = json!({"name": "eth0", "sandbox": pod.container.path()});
    for interfaces in [json!([]), json!([inside]), json!([{"name": end, "sandbox": "eth0"}])] {
        let ips = json!([{"address": "10.1.2.2/24"}]);
        let prev = json!({"cniVersion": "1.1.0", "interfaces": interfaces, "ips": ips});
        let net = pod.net(&json!({"prevResult": prev}));
        let result = net.add(&pod.container);
        assert_eq!(bucket(&pod, &end)[0], "tbf", "{interfaces}");
        assert_eq!(redirects(&pod), [IFB], "{interfaces}");
        net.check(&pod.container, &result).ok();
        net.with(&json!({"prevResult": result})).del(&pod.container);
        pod.assert_as(&before, &interfaces.to_string());
    }
}

#[test]
fn add_warns_of_a_burst_smaller_than_a_packet() {
    let pod = SUBJECT.pod("1.0.0");
    let outcome = pod.net(&json!({"ingressBurst": 8000})).on("ADD", &pod.container).run();
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    assert!(outcome.stderr.contains("a burst of 1000 bytes drops packets of 1514"), "{outcome:?}");
}

#[test]
fn add_warns_of_ignored_subnets() {
    let pod = SUBJECT.pod("1.0.0");
    let outcome =
        pod.net(&json!({"unshapedSubnets": ["10.0.0.0/8"]})).on("ADD", &pod.container).run();
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    assert!(outcome.stderr.contains("\"unshapedSubnets\" is ignored"), "{outcome:?}");
}

#[test]
fn status_reports_missing_kernel_features() {
    let pod = SUBJECT.pod("1.1.0");
    let before = pod.state();
    pod.plain().call("STATUS", "").without("CNI_CONTAINERID").ok();
    let error = pod.net(&json!({"ingressBurst": 0})).call("STATUS", "").error();
    assert_eq!(error.brief(), (50, "if rate is set, burst must also be set"));
    pod.assert_as(&before, "STATUS");
    let error = pod.net(&json!({"cniVersion": "1.0.0"})).call("STATUS", "").error();
    assert_eq!(error.brief(), (1, "config version does not allow STATUS"));
}

#[test]
fn a_failing_add_leaves_nothing_at_any_system_call() {
    SUBJECT.no_add_leaves_anything(&[
        "open",
        "write",
        "RTM_NEWLINK",
        "RTM_NEWQDISC",
        "RTM_NEWTFILTER",
    ]);
}

#[test]
fn an_add_or_del_killed_anywhere_is_cleaned_up_by_del() {
    SUBJECT.survives_kill(
        &["open", "write", "rename", "RTM_NEWLINK", "RTM_NEWQDISC", "RTM_NEWTFILTER"],
        &["unlink", "RTM_DELLINK", "RTM_DELQDISC", "RTM_DELTFILTER"],
    );
}

#[test]
fn add_rolls_back_if_its_result_cannot_be_written() {
    let pod = SUBJECT.pod("1.0.0");
    let before = pod.state();
    let call = pod.plain().on("ADD", &pod.container).in_script("exec \"$0\" >/dev/full");
    assert_eq!(call.run().status, Some(1));
    pod.assert_as(&before, "no room for the result");
}
