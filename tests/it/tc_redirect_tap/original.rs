//! What the original creates: it is checked and deleted by this plugin.

use serde_json::{Value, json};

use super::{SUBJECT, check};
use crate::support::chained::Pod;

/// The commands that create the state of the original: no alias, a priority that the kernel
/// chooses, no class.
fn attach(pod: &Pod<'_>) -> Value {
    pod.container.sh("ip tuntap add tap0 mode tap user 0 group 0 vnet_hdr pi");
    pod.container.sh("ip link set tap0 up");
    for (from, to) in [("tap0", "eth0"), ("eth0", "tap0")] {
        pod.container.sh(&format!("tc qdisc add dev {from} ingress"));
        pod.container.sh(&format!(
            "tc filter add dev {from} parent ffff: protocol all u32 match u32 0 0 action mirred egress redirect dev {to}"
        ));
    }
    let mut last = pod.prev.clone();
    (SUBJECT.result)(&mut last, "1.0.0");
    // The original reports no MAC of the device, and all addresses.
    last["interfaces"][2].as_object_mut().unwrap().remove("mac");
    let mut second = last["ips"][1].clone();
    second["interface"] = json!(3);
    last["ips"].as_array_mut().unwrap().push(second);
    last
}

#[test]
fn its_devices_are_checked_and_deleted() {
    let pod = SUBJECT.pod("1.0.0");
    let last = attach(&pod);
    check(&pod, &last).ok();
    pod.call_with("DEL", &json!({"prevResult": last})).ok();
    pod.assert_settles_as(&pod.before, "DEL");
    let last = attach(&pod);
    let was = pod.state();
    pod.is_refused(&pod.call("ADD"), (999, "\"eth0\" is redirected to \"tap0\" already"));
    // Without a result nothing shows whose device it is.
    pod.bare("DEL").ok();
    pod.assert_as(&was, "DEL without prevResult");
    pod.call_with("DEL", &json!({"prevResult": last})).ok();
    pod.assert_settles_as(&pod.before, "DEL");
}

#[test]
fn all_addresses_are_repeated_on_request() {
    let pod = SUBJECT.pod_with("1.0.0", &json!({"allAddresses": true}));
    let result = pod.call("ADD").result();
    let ips = result["ips"].as_array().unwrap();
    let of = |index: i64| {
        let own = ips.iter().filter(|ip| ip["interface"] == json!(index));
        own.map(|ip| (ip["address"].clone(), ip["gateway"].clone())).collect::<Vec<_>>()
    };
    assert_eq!(of(3), of(1));
    assert_eq!(of(3).len(), 2);
    assert_eq!(result["routes"], pod.prev["routes"]);
}
