//! tc-redirect-tap: lifecycle in every version, traffic of a machine, results, CHECK, refusals,
//! state of the original.

mod device;
mod original;
mod traffic;

use serde_json::{Value, json};

use crate::support::chained::{Pod, Subject};
use crate::support::conflist::{Attached, Conflist};
use crate::support::node::{Call, Container, Node};
use crate::support::strace;

const SUBJECT: Subject = Subject {
    plugin: "tc-redirect-tap",
    result: |result, version| {
        if version < "0.3.0" {
            return;
        }
        let interfaces = result["interfaces"].as_array_mut().unwrap();
        let (mut tap, mut machine) = (interfaces[1].clone(), interfaces[1].clone());
        (tap["name"], machine["name"], machine["sandbox"]) =
            (json!("tap0"), json!("tap0"), json!("c1"));
        interfaces.extend([tap, machine]);
        let mut first = result["ips"][0].clone();
        first["interface"] = json!(3);
        result["ips"].as_array_mut().unwrap().push(first);
    },
    ..Subject::BEHIND_PTP
};

/// The names of the `CNI_ARGS`.
const NAME: &str = "TC_REDIRECT_TAP_NAME";
const UID: &str = "TC_REDIRECT_TAP_UID";
const GID: &str = "TC_REDIRECT_TAP_GID";

/// A CHECK with the result `last` of the list.
fn check(pod: &Pod<'_>, last: &Value) -> Call {
    pod.call_with("CHECK", &json!({"prevResult": last}))
}

#[test]
fn every_verb_works_in_every_version() {
    SUBJECT.every_verb_in_every_version(&json!({}));
}

/// The result has the container's address a second time, for the machine.
#[test]
fn del_of_one_of_two_keeps_the_masquerading_of_the_other() {
    let node = Node::new();
    let ptp = json!({"type": "ptp", "ipMasq": true, "ipMasqBackend": "nftables",
        "ipam": node.host_local(&["10.1.2.0/24"])});
    let plugins = json!([ptp, {"type": "tc-redirect-tap"}]);
    let conf = json!({"cniVersion": "1.1.0", "name": "net", "plugins": plugins});
    let list = Conflist::new(&node, conf);
    let containers = [Container::new(), Container::new()];
    let [one, two] = [0, 1].map(|nth| Attached::new(&format!("c{nth}"), &containers[nth].path()));
    let results = [&one, &two].map(|at| list.add(at).unwrap());
    list.del(&one, Some(&results[0])).unwrap();
    let rules = node.sh("nft list table inet cnibox_masquerade");
    assert!(!rules.contains("id: c0") && rules.contains("id: c1"), "{rules}");
    list.del(&two, Some(&results[1])).unwrap();
    let rules = node.sh("nft list table inet cnibox_masquerade");
    assert!(!rules.contains("subnet-"), "{rules}");
}

#[test]
fn no_add_leaves_anything() {
    SUBJECT.no_add_leaves_anything(&["ioctl", "RTM_NEWLINK", "RTM_NEWQDISC", "RTM_NEWTFILTER"]);
}

#[test]
fn survives_kill() {
    SUBJECT.survives_kill(
        &["ioctl", "RTM_NEWLINK", "RTM_NEWQDISC", "RTM_NEWTFILTER"],
        &["RTM_DELLINK", "RTM_DELQDISC", "RTM_DELTFILTER"],
    );
}

#[test]
fn del_works_without_prev_result_and_namespace() {
    SUBJECT.del_without(|_, _, _| {});
}

#[test]
fn add_starts_no_process_and_makes_few_calls() {
    let pod = SUBJECT.pod("1.0.0");
    let (outcome, calls) = strace::record(&pod.node, &pod.call("ADD"));
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    let is_start = |call: &&strace::Syscall| {
        ["execve", "fork", "vfork", "clone", "clone3"].contains(&call.name.as_str())
    };
    let starts: Vec<_> = calls.iter().filter(is_start).map(|call| &call.text).collect();
    assert!(starts.len() <= 1, "the plugin itself only: {starts:?}");
    let requests = calls.iter().filter(|call| call.name == "sendto").count();
    assert!(requests <= 11, "{requests} requests: {calls:#?}");
}

#[test]
fn wrong_input_changes_nothing() {
    let pod = SUBJECT.pod("1.1.0");
    let numbers = "an id is a number";
    for (args, msg, details) in [
        (format!("{UID}=root"), format!("ARGS: invalid pair \"{UID}=root\""), numbers),
        (format!("{GID}=-1"), format!("ARGS: invalid pair \"{GID}=-1\""), numbers),
        (
            format!("{NAME}=a/b"),
            format!(
                "ARGS: invalid pair \"{NAME}=a/b\": interface name contains / or : or whitespace characters"
            ),
            "",
        ),
        (NAME.to_owned(), format!("ARGS: invalid pair \"{NAME}\""), ""),
    ] {
        for verb in ["ADD", "CHECK"] {
            let error = pod.call(verb).env("CNI_ARGS", &args).error();
            assert_eq!(error.brief(), (999, msg.as_str()), "{args}");
            assert!(error.details.contains(details), "{error:?}");
        }
        pod.call("DEL").env("CNI_ARGS", &args).ok();
    }
    pod.is_refused(&pod.bare("ADD"), (999, "must be called as a chained plugin"));
    pod.is_refused(&pod.bare("CHECK"), (999, "Required prevResult missing"));
    pod.is_refused(&pod.call("ADD").ifname("eth7"), (999, "link \"eth7\" not found"));
    let mut prev = pod.prev.clone();
    prev["ips"].as_array_mut().unwrap().iter_mut().for_each(|ip| ip["interface"] = json!(0));
    let call = pod.call_with("ADD", &json!({"prevResult": prev}));
    pod.is_refused(
        &call,
        (999, "no address of prevResult is one of \"eth0\": the machine has none"),
    );
    for keys in
        [json!({"multiQueue": 1}), json!({"vnetHdr": "yes"}), json!({"allAddresses": "one"})]
    {
        let error = pod.net(&keys).on("ADD", &pod.container).error();
        assert!(error.msg.starts_with("failed to load netconf"), "{keys}: {error:?}");
        pod.net(&keys).on("DEL", &pod.container).ok();
    }
    pod.assert_as(&pod.before, "wrong input");
    let wrong = pod.call_with("STATUS", &json!({"multiQueue": 1})).without("CNI_NETNS");
    assert!(wrong.run().status != Some(0));
}

/// Cilium names no interface of its addresses.
#[test]
fn addresses_without_an_interface_are_the_machines() {
    for interfaces in [true, false] {
        let pod = SUBJECT.pod("1.0.0");
        let mut prev = pod.prev.clone();
        for ip in prev["ips"].as_array_mut().unwrap() {
            ip.as_object_mut().unwrap().remove("interface");
        }
        if !interfaces {
            prev.as_object_mut().unwrap().remove("interfaces");
        }
        let last = pod.call_with("ADD", &json!({"prevResult": prev})).result();
        let of_machine = |ip: &&Value| {
            let index = ip["interface"].as_u64().and_then(|index| usize::try_from(index).ok());
            index.is_some_and(|index| last["interfaces"][index]["sandbox"] == "c1")
        };
        let ips: Vec<_> = last["ips"].as_array().unwrap().iter().filter(of_machine).collect();
        assert_eq!(ips.len(), 1, "{last}");
        assert_eq!(ips[0]["address"], prev["ips"][0]["address"]);
        check(&pod, &last).ok();
        pod.call_with("DEL", &json!({"prevResult": last})).ok();
        pod.assert_settles_as(&pod.before, "no interface of the addresses");
    }
}

#[test]
fn check_finds_each_damage() {
    let on_tap = "tc filter del dev tap0 ingress";
    let on_link = "tc filter del dev eth0 ingress";
    for (damage, msg) in [
        (on_tap, "ingress of \"tap0\" is not redirected to \"eth0\""),
        (on_link, "ingress of \"eth0\" is not redirected to \"tap0\""),
        ("tc qdisc del dev eth0 ingress", "ingress of \"eth0\" is not redirected to \"tap0\""),
        ("ip link set tap0 down", "interface \"tap0\" is down"),
        ("ip link set tap0 mtu 1400", "interface \"tap0\" has MTU 1400 instead of 1500"),
        ("ip link del tap0", "Interface name tap0 not found in NETNS"),
        // Before Linux 6.2 a link that is up keeps its name.
        (
            "ip link set tap0 down && ip link set tap0 name tap7 && ip link set tap7 up",
            "Interface name tap0 not found in NETNS",
        ),
        (
            "ip link set eth0 address 02:00:00:00:00:77",
            "Interface eth0 Mac MAC doesn't match link Mac: 02:00:00:00:00:77",
        ),
        (
            "ip link set tap0 address 02:00:00:00:00:77",
            "Interface tap0 Mac MAC doesn't match link Mac: 02:00:00:00:00:77",
        ),
        ("ip tuntap del tap0 mode tap", "Interface name tap0 not found in NETNS"),
    ] {
        let pod = SUBJECT.pod("1.1.0");
        let last = pod.call("ADD").result();
        check(&pod, &last).ok();
        pod.container.sh(damage);
        let was = pod.state();
        let error = check(&pod, &last).error();
        let msg = msg.replace("NETNS", &pod.container.path());
        let entry = if msg.contains("tap0 Mac") { 2 } else { 3 };
        let msg = msg.replace(
            "Mac MAC",
            &format!("Mac {}", last["interfaces"][entry]["mac"].as_str().unwrap()),
        );
        assert_eq!(error.brief(), (999, msg.as_str()), "{damage}");
        pod.assert_as(&was, "CHECK repairs nothing");
        if !damage.contains("eth0 address") {
            pod.call("DEL").ok();
            pod.assert_settles_as(&pod.before, damage);
        }
    }
    let pod = SUBJECT.pod("1.1.0");
    let last = pod.call("ADD").result();
    for (args, msg) in [
        (format!("{UID}=7"), "tap \"tap0\": owner is 0, not 7"),
        (format!("{GID}=7"), "tap \"tap0\": group is 0, not 7"),
        (format!("{NAME}=other"), "the tap device is \"tap0\", not \"other\""),
    ] {
        assert_eq!(check(&pod, &last).env("CNI_ARGS", &args).error().brief(), (999, msg));
    }
    let several = json!({"prevResult": last, "multiQueue": true});
    let error = pod.call_with("CHECK", &several).error();
    assert_eq!(error.brief(), (999, "tap \"tap0\": multi_queue is false, not true"));
    let msg = "prevResult has no interface whose sandbox is \"c1\"";
    assert_eq!(pod.call("CHECK").error().brief(), (999, msg));
}

#[test]
fn many_containers_are_attached_at_once() {
    SUBJECT.attaches_many_at_once();
}
