//! Permitted parameters: the node's allowlist, the safe profile.

use serde_json::{Value, json};

use super::{SUBJECT, bare};
use crate::support::node::Call;

const TTL: &str = "net/ipv4/ip_default_ttl";

/// The call on a node whose allowlist has these lines.
fn with_allowlist(call: Call, lines: &str) -> Call {
    let file = "/etc/cni/tuning/allowlist.conf";
    call.in_script(&format!(
        "mount -t tmpfs none /etc && mkdir -p /etc/cni/tuning && printf '%s' '{lines}' > {file} && exec \"$0\""
    ))
}

#[test]
fn only_keys_of_the_allowlist_are_accepted() {
    let pod = SUBJECT.pod("1.1.0");
    let add = |key: &str, lines: &str| {
        let net = bare(&pod, &json!({"sysctl": {key: "31"}}));
        with_allowlist(net.on("ADD", &pod.container), lines).run()
    };
    let dotted = "net.ipv4.ip_default_ttl";
    for (lines, key) in [
        (r"^net\.ipv4\.ip_[a-z_]*$", dotted),
        ("\n  default \n\n^nothing$\n", dotted),
        (r"^net\.ipv4\.ip_default_ttl$", TTL),
        (r"^net/ipv4/ip_default_ttl$", TTL),
    ] {
        let outcome = add(key, lines);
        assert_eq!(outcome.status, Some(0), "{lines} {key}: {outcome:?}");
        pod.container.sh(&format!("sh -c 'echo 64 > /proc/sys/{TTL}'"));
    }
    for (lines, key) in
        [("", dotted), (r"^net\.core\.", dotted), ("^net/ipv4/ip_default_ttl$", dotted)]
    {
        let error: Value = serde_json::from_str(&add(key, lines).stdout).unwrap();
        let msg = format!(
            "Sysctl {key} is not allowed. Only the following sysctls are allowed: [{lines}]"
        );
        assert_eq!((&error["msg"], &error["code"]), (&json!(msg), &json!(7)));
        assert_eq!(pod.container.sysctl(TTL), "64");
    }
    let error: Value = serde_json::from_str(&add(dotted, "(").stdout).unwrap();
    assert!(error["msg"].as_str().unwrap().contains("invalid expression \"(\""), "{error}");
    assert_eq!(pod.container.sysctl(TTL), "64");

    // Only ADD and STATUS enforce the allowlist.
    let net = bare(&pod, &json!({"sysctl": {dotted: "31"}}));
    let prev = net.add(&pod.container);
    with_allowlist(net.check(&pod.container, &prev), "nothing").ok();
    with_allowlist(net.on("DEL", &pod.container), "(").ok();
    let status = |lines: &str| with_allowlist(net.call("STATUS", ""), lines);
    status("ttl").ok();
    assert_eq!(status("nothing").error().code, 50);
    assert_eq!(status("(").error().code, 50);
}

#[test]
fn the_safe_profile_refuses_other_keys_by_name() {
    let pod = SUBJECT.pod("1.1.0");
    let net =
        |sysctl: Value| bare(&pod, &json!({"profile": "safe", "sysctl": sysctl, "mtu": 1400}));
    let safe = json!({"net.ipv4.conf.IFNAME.arp_notify": "1", "net.ipv4.tcp_syncookies": "1",
        "net.ipv4.ping_group_range": "0 1"});
    let result = net(safe.clone()).add(&pod.container);
    net(safe.clone()).check(&pod.container, &result).ok();
    assert_eq!(pod.container.sysctl("net/ipv4/conf/eth0/arp_notify"), "1");
    for key in [
        "net.ipv4.conf.all.forwarding",
        "net.ipv4.conf.lo.arp_notify",
        "net.ipv4.ip_forward",
        "net/ipv4/tcp_mem",
        "net.nf_conntrack_max",
    ] {
        let mut sysctl = safe.clone();
        sysctl[key] = json!("1");
        let msg = format!("Sysctl {key} is not allowed by the profile \"safe\"");
        net(sysctl).add_is_refused(&pod.container, 7, &msg);
        let args = json!({"args": {"cni": {"sysctl": {key: "1"}}}});
        net(safe.clone()).with(&args).add_is_refused(&pod.container, 7, &msg);
    }
    // The allowlist applies in addition.
    let call = net(safe.clone()).on("ADD", &pod.container);
    assert_eq!(with_allowlist(call, "^net.core").run().status, Some(1));
    // The node's own namespace is not a container.
    let here = format!("/proc/{}/ns/net", nix::unistd::gettid());
    let call = net(safe.clone()).call("ADD", "c1").netns(&here).env("CNI_NETNS_OVERRIDE", "1");
    let msg = "the profile \"safe\" sets no sysctl in the network namespace of the node";
    assert_eq!(call.error().brief(), (7, msg));
}

/// The parameters of the safe profile exist in a container and are namespaced.
#[test]
fn safe_keys_belong_to_the_network_namespace() {
    let pod = SUBJECT.pod("1.1.0");
    let source = include_str!("../../../src/plugins/tuning/permission.rs");
    let list = source.split("const SAFE").nth(1).unwrap().split("];").next().unwrap();
    let keys: Vec<&str> = list.split('"').filter(|text| text.starts_with("net/")).collect();
    assert!(keys.len() > 30);
    for key in keys {
        let key = key.replace("IFNAME", "eth0");
        let inside = pod.container.sysctl(&key);
        if key.contains("eth0") {
            continue;
        }
        let host = pod.node.sh(&format!("cat /proc/sys/{key}"));
        let other = match inside.as_str() {
            "0" => "1".to_owned(),
            "1" => "0".to_owned(),
            _ if key.contains("port_range") => "2000 3000".to_owned(),
            _ if key.contains("reserved") => "81".to_owned(),
            _ if key.contains("group_range") => "0 1".to_owned(),
            _ if key.contains("mem") => "4096 5000 6000".to_owned(),
            number => (number.parse::<u64>().unwrap() / 2).to_string(),
        };
        bare(&pod, &json!({"profile": "safe", "sysctl": {&key: other}})).add(&pod.container);
        assert_ne!(pod.container.sysctl(&key), inside, "{key} was set to {other}");
        assert_eq!(pod.node.sh(&format!("cat /proc/sys/{key}")), host, "{key} is the host's too");
    }
}
