//! Comparison with the reference plugin: the same results, devices, qdiscs and filters; CHECK and
//! DEL of each accept the other's state.

use serde_json::{Value, json};

use super::{IFB, SUBJECT, end, tc};
use crate::support::chained::Pod;
use crate::support::compare::peer;
use crate::support::net::{Net, normal_json};
use crate::support::node::Call;

fn call(net: &Net<'_>, pod: &Pod<'_>, verb: &str, ours: bool) -> Call {
    let call = net.on(verb, &pod.container);
    if ours { call } else { call.program(peer("bandwidth").unwrap().join("bandwidth")) }
}

/// The links, qdiscs and filters that an ADD creates, from `tc` and `ip`.
fn state(pod: &Pod<'_>) -> Vec<Value> {
    let end = end(pod);
    let mut filters = tc(pod, &format!("filter show dev {end} ingress"));
    for filter in filters.as_array_mut().unwrap() {
        if let Some(actions) = filter["options"]["actions"].as_array_mut() {
            // The reference adds the action twice; the second one is never reached.
            actions.truncate(1);
            for action in actions {
                action["index"] = json!(0);
            }
        }
    }
    let mut state = vec![filters];
    for dev in [end.as_str(), IFB] {
        let found = pod.node.ip(&format!("link show dev {dev}"));
        let keys = ["mtu", "flags", "txqlen", "qdisc"];
        state.extend(keys.map(|key| found[0][key].clone()));
        state.push(tc(pod, &format!("qdisc show dev {dev}")));
    }
    let text = json!(state).to_string().replace(&end, "END");
    serde_json::from_str(&text).unwrap()
}

#[test]
fn results_and_state_equal_the_references() {
    if peer("bandwidth").is_none() {
        return;
    }
    let limits = [
        json!({}),
        json!({"ingressRate": 8, "ingressBurst": 8, "egressRate": 16, "egressBurst": 8}),
        json!({"ingressRate": 3_333_333, "ingressBurst": 1_234_567, "egressRate": 40_000_000_000_u64}),
        json!({"egressRate": 1_000_001, "egressBurst": 77_777, "ingressRate": null, "ingressBurst": null}),
    ];
    for (version, limits) in ["0.3.0", "0.3.1", "0.4.0", "1.0.0"]
        .iter()
        .zip(limits.iter().cycle())
        .chain(limits.iter().map(|limits| (&"1.0.0", limits)))
    {
        let run = |ours: bool| {
            let pod = SUBJECT.pod(version);
            let before = pod.state();
            let net = pod.net(limits);
            let mut result = call(&net, &pod, "ADD", ours).result();
            let made = state(&pod);
            let checked = net.with(&json!({"prevResult": result}));
            if *version >= "0.4.0" {
                call(&checked, &pod, "CHECK", !ours).ok();
                call(&checked, &pod, "CHECK", ours).ok();
            }
            call(&checked, &pod, "DEL", !ours).ok();
            if ours {
                // The reference leaves the ingress qdisc and filter until the link is deleted; DEL
                // of cnibox removes the rest.
                assert_eq!(pod.node.ip("link show type ifb"), json!([]));
                call(&checked, &pod, "DEL", true).ok();
            }
            pod.assert_as(&before, version);
            // Later releases of the reference omit empty objects.
            result.as_object_mut().unwrap().retain(|_, member| *member != json!({}));
            (normal_json(&result, &pod.container), made)
        };
        assert_eq!(run(true), run(false), "{version} {limits}");
    }
}

#[test]
fn limits_survive_an_upgrade_from_the_reference() {
    let Some(dir) = peer("bandwidth upgrade") else { return };
    let pod = SUBJECT.pod("1.0.0");
    let before = pod.state();
    let net = pod.plain();
    net.on("ADD", &pod.container).program(dir.join("bandwidth")).result();
    // ADD reuses the reference's device.
    let result = net.add(&pod.container);
    assert_eq!(result["interfaces"][2]["name"], json!(IFB));
    assert_eq!(pod.node.ip("link show type ifb").as_array().unwrap().len(), 1);
    net.del(&pod.container);
    pod.assert_as(&before, "DEL");
}
