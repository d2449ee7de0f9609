//! The reference plugin compared with cnibox: the same results, interfaces, parameters and backups,
//! and each restores the other's backups.

use serde_json::{Value, json};

use super::{ATTRIBUTES, MAC, SUBJECT};
use crate::support::chained::Pod;
use crate::support::compare::peer;
use crate::support::net::{Net, normal_json};
use crate::support::node::Call;

/// Debian's reference supports neither 1.1.0, nor `txQLen`, nor `IFNAME`.
fn keys() -> Value {
    json!({"mac": MAC, "mtu": 1400, "promisc": true, "allmulti": true, "txQLen": null,
        "sysctl": {"net.ipv4.conf.eth0.arp_notify": "1", "net.core.somaxconn": "128"}})
}

fn call(net: &Net<'_>, pod: &Pod<'_>, verb: &str, ours: bool) -> Call {
    let call = net.on(verb, &pod.container);
    if ours { call } else { call.program(peer("tuning").unwrap().join("tuning")) }
}

#[test]
fn backups_work_with_the_reference_in_both_directions() {
    if peer("tuning").is_none() {
        return;
    }
    for version in ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0"] {
        let run = |ours: bool| {
            let pod = SUBJECT.pod(version);
            let before = pod.state();
            let net = pod.net(&keys());
            let result = call(&net, &pod, "ADD", ours).result();
            let file = std::fs::read_to_string(pod.node.state("tuning/c1_eth0.json")).unwrap();
            let mut backup: Value = serde_json::from_str(&file).unwrap();
            for own in ["attachment", "network", "set"] {
                backup.as_object_mut().unwrap().remove(own);
            }
            // The original address is random.
            assert_ne!(backup["mac"], json!(MAC));
            backup["mac"] = json!("MAC");
            let link = pod.container.ip("link show eth0");
            let mut link: Vec<Value> =
                ["address", "mtu", "flags"].map(|key| link[0][key].clone()).into();
            // The kernel notices the carrier later.
            let carrier = [json!("NO-CARRIER"), json!("LOWER_UP")];
            link[2].as_array_mut().unwrap().retain(|flag| !carrier.contains(flag));
            let sysctls = ["net/ipv4/conf/eth0/arp_notify", "net/core/somaxconn"];
            let sysctls = sysctls.map(|key| pod.container.sysctl(key));
            if version >= "0.4.0" {
                let checked = net.with(&json!({"prevResult": result}));
                call(&checked, &pod, "CHECK", !ours).ok();
            }
            // The other implementation restores.
            call(&net, &pod, "DEL", !ours).ok();
            let after = pod.state();
            crate::support::node::assert_unchanged(&before.inside, &after.inside);
            assert_eq!(after.files, before.files, "{version}");
            let mut result = normal_json(&result, &pod.container);
            // Later releases of the reference omit empty objects.
            result.as_object_mut().unwrap().retain(|_, member| *member != json!({}));
            (result, backup, link, sysctls)
        };
        assert_eq!(run(true), run(false), "{version}");
    }
}

#[test]
fn a_backup_of_the_reference_survives_a_second_add() {
    let Some(dir) = peer("tuning") else { return };
    let pod = ATTRIBUTES.pod("1.0.0");
    let before = pod.state();
    let net = pod.plain();
    net.on("ADD", &pod.container).program(dir.join("tuning")).result();
    net.add(&pod.container);
    net.del(&pod.container);
    pod.assert_as(&before, "after an upgrade of the node");
}
