//! The device: its name, owners, queues and MTU, and links of others.

use nix::libc;
use serde_json::{Value, json};

use super::{GID, NAME, SUBJECT, UID, check};
use crate::support::chained::Pod;
use crate::support::net::{GATEWAYS, Net};
use crate::support::tap::{MULTI, SINGLE, open};

/// The device as `ip` prints it.
fn shown(pod: &Pod<'_>, name: &str) -> Value {
    pod.container.ip(&format!("-d link show {name}"))[0].clone()
}

#[test]
fn the_device_is_as_the_arguments_say() {
    for (args, name, user, group) in [
        (String::new(), "tap0", Some(0), Some(0)),
        (format!("IgnoreUnknown=1;K8S_POD_NAME=a=b;{NAME}=vm0"), "vm0", Some(0), Some(0)),
        (format!("{UID}=1001;{GID}=1002;OTHER=1"), "tap0", Some(1001), Some(1002)),
        (format!("{UID}=1001"), "tap0", Some(1001), None),
        (format!("{GID}=1002"), "tap0", None, Some(1002)),
        // Cut, as the original does.
        (format!("{NAME}=a-name-of-more-than-15"), "a-name-of-more-", Some(0), Some(0)),
    ] {
        let pod = SUBJECT.pod("1.1.0");
        let last = pod.call("ADD").env("CNI_ARGS", &args).result();
        let link = shown(&pod, name);
        let info = &link["linkinfo"]["info_data"];
        for (key, value) in
            [("type", json!("tap")), ("vnet_hdr", json!(true)), ("persist", json!(true))]
        {
            assert_eq!(info[key], value, "{args}: {info}");
        }
        for (key, wanted) in [("user", user), ("group", group)] {
            // `ip` prints the names of ids that have one.
            let found = if info[key] == "root" { json!(0) } else { info[key].clone() };
            assert_eq!(found, json!(wanted), "{args}: {key} of {info}");
        }
        assert_eq!(link["address"], last["interfaces"][2]["mac"]);
        assert!(link["flags"].as_array().unwrap().contains(&json!("UP")), "{link}");
        check(&pod, &last).env("CNI_ARGS", &args).ok();
        pod.call_with("DEL", &json!({"prevResult": last})).ok();
        pod.assert_settles_as(&pod.before, &args);
    }
}

#[test]
fn queues_headers_and_mtu_are_as_configured() {
    for (keys, flags, other) in
        [(json!({}), SINGLE, MULTI), (json!({"multiQueue": true, "vnetHdr": false}), MULTI, SINGLE)]
    {
        let pod = SUBJECT.pod_with("1.1.0", &keys);
        pod.container.sh("ip link set eth0 mtu 1400");
        let last = pod.call("ADD").result();
        let link = shown(&pod, "tap0");
        assert_eq!((&link["mtu"], &last["interfaces"][2]["mtu"]), (&json!(1400), &json!(1400)));
        assert_eq!(last["interfaces"][3]["mtu"], json!(1400));
        assert_eq!(link["linkinfo"]["info_data"]["vnet_hdr"], json!(keys["vnetHdr"].is_null()));
        check(&pod, &last).ok();
        let wrong = pod.container.run(|| open("tap0", other)).unwrap_err();
        assert_eq!(wrong.raw_os_error(), Some(libc::EINVAL), "{keys}: {wrong}");
        let first = pod.container.run(|| open("tap0", flags)).unwrap();
        assert_eq!(pod.container.run(|| open("tap0", flags)).is_ok(), flags == MULTI, "{keys}");
        // A second ADD keeps the device of a running machine.
        assert_eq!(pod.call("ADD").result(), last);
        check(&pod, &last).ok();
        drop(first);
    }
}

#[test]
fn the_second_attachment_gets_the_next_name() {
    let pod = SUBJECT.pod("1.0.0");
    let more = Net::new(
        &pod.node,
        "ptp",
        "1.0.0",
        &json!({"ipam": pod.node.host_local(&["10.7.0.0/24"])}),
    );
    let prev = more.on("ADD", &pod.container).ifname("net1").result();
    let first = pod.call("ADD").result();
    let call =
        |verb: &str, prev: &Value| pod.call_with(verb, &json!({"prevResult": prev})).ifname("net1");
    let second = call("ADD", &prev).result();
    let names = |result: &Value| {
        [&result["interfaces"][2], &result["interfaces"][3]].map(|i| i["name"].clone())
    };
    assert_eq!(
        (names(&first), names(&second)),
        ([json!("tap0"), json!("tap0")], [json!("tap1"), json!("tap1")])
    );
    call("DEL", &Value::Null).ok();
    check(&pod, &first).ok();
    assert!(!pod.container.try_sh("ip link show tap1"));
}

#[test]
fn a_link_of_another_is_refused_and_stays() {
    for link in [
        "ip link add vm0 type veth peer name vm1",
        "ip tuntap add vm0 mode tap",
        "ip link add vm0 type bridge",
    ] {
        let pod = SUBJECT.pod("1.1.0");
        pod.container.sh(link);
        let before = pod.state();
        let add = pod.call("ADD").env("CNI_ARGS", &format!("{NAME}=vm0"));
        pod.is_refused(&add, (999, "container already has an interface \"vm0\""));
        pod.call("DEL").ok();
        // The result of a DEL may name it.
        let mut listed = pod.prev.clone();
        let path = pod.container.path();
        let entries =
            [json!({"name": "vm0", "sandbox": path}), json!({"name": "vm0", "sandbox": "c1"})];
        listed["interfaces"].as_array_mut().unwrap().extend(entries);
        pod.call_with("DEL", &json!({"prevResult": listed})).ok();
        pod.assert_as(&before, link);
    }
}

#[test]
fn an_interface_that_is_redirected_is_refused() {
    let pod = SUBJECT.pod("1.1.0");
    pod.container.sh("ip tuntap add mine mode tap");
    pod.container.sh("tc qdisc add dev eth0 ingress");
    pod.container.sh(
        "tc filter add dev eth0 parent ffff: protocol all u32 match u32 0 0 action mirred egress redirect dev mine",
    );
    let before = pod.state();
    pod.is_refused(&pod.call("ADD"), (999, "\"eth0\" is redirected to \"mine\" already"));
    pod.call("DEL").ok();
    pod.assert_as(&before, "the redirect of another");
}

#[test]
fn another_request_needs_a_del_first() {
    let pod = SUBJECT.pod("1.1.0");
    pod.call("ADD").result();
    let error = pod.call("ADD").env("CNI_ARGS", &format!("{NAME}=vm0")).error();
    assert_eq!(error.brief(), (999, "the tap device is \"tap0\", not \"vm0\""));
    assert_eq!(error.details, "run DEL first");
    assert!(pod.container.try_sh("ip link show tap0"));
}

#[test]
fn filters_of_others_stay() {
    let filter = "protocol ip prio 9 u32 match u32 0 0 flowid 1:7";
    for qdisc in ["ingress", "clsact"] {
        let pod = SUBJECT.pod("1.1.0");
        pod.container.sh(&format!("tc qdisc add dev eth0 {qdisc}"));
        pod.container.sh(&format!("tc filter add dev eth0 ingress {filter}"));
        // After a filter is added anew, tc names the qdisc.
        let show =
            || pod.container.sh("tc filter show dev eth0 ingress").replace("parent ffff: ", "");
        let before = show();
        let last = pod.call("ADD").result();
        check(&pod, &last).ok();
        pod.call("DEL").ok();
        assert_eq!(show(), before, "{qdisc}");
        assert!(pod.container.sh("tc qdisc show dev eth0").contains(qdisc));
        assert!(pod.container.pings(GATEWAYS[0]));
    }
}
