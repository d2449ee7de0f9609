//! Values restored by DEL after intermediate changes; GC.

use std::fs;

use serde_json::{Value, json};

use super::{MAC, SUBJECT, attribute, bare};
use crate::support::net::Net;

#[test]
fn a_second_add_keeps_the_original_values() {
    let pod = SUBJECT.pod("1.1.0");
    let before = pod.state();
    let add = |keys: Value| bare(&pod, &keys).add(&pod.container);
    add(json!({"mtu": 1400}));
    add(json!({"mtu": 1400}));
    add(json!({"mtu": 1300, "mac": MAC}));
    add(json!({"txQLen": 7}));
    assert_eq!(attribute(&pod, "mtu"), 1300);
    bare(&pod, &json!({})).del(&pod.container);
    pod.assert_as(&before, "after four ADDs");
}

#[test]
fn a_failed_second_add_keeps_the_backup_of_the_first() {
    let pod = SUBJECT.pod("1.1.0");
    let before = pod.state();
    let path = pod.node.state("tuning/c1_eth0.json");
    bare(&pod, &json!({"mtu": 1400})).add(&pod.container);
    let backup = fs::read_to_string(&path).unwrap();
    let second = bare(&pod, &json!({"mac": MAC, "mtu": 20})).on("ADD", &pod.container).run();
    assert_eq!(second.status, Some(1), "{second:?}");
    assert_eq!(fs::read_to_string(&path).unwrap(), backup);
    assert_eq!(attribute(&pod, "mtu"), 1400);
    bare(&pod, &json!({})).del(&pod.container);
    pod.assert_as(&before, "DEL");
}

#[test]
fn a_backup_of_an_earlier_interface_is_not_restored() {
    let pod = SUBJECT.pod("1.1.0");
    bare(&pod, &json!({"mtu": 1400, "mac": MAC})).add(&pod.container);
    // The runtime restarts the container with the same id, without DEL.
    pod.container.sh("ip link set eth0 mtu 9000 address 02:00:00:00:00:77");
    bare(&pod, &json!({"mtu": 1400, "mac": MAC})).add(&pod.container);
    bare(&pod, &json!({})).del(&pod.container);
    assert_eq!(attribute(&pod, "mtu"), 9000);
    assert_eq!(attribute(&pod, "mac"), "02:00:00:00:00:77");
}

#[test]
fn a_broken_backup_is_replaced_and_removed() {
    let pod = SUBJECT.pod("1.1.0");
    let path = pod.node.state("tuning/c1_eth0.json");
    fs::create_dir(pod.node.state("tuning")).unwrap();
    for broken in ["", "{", r#"{"mtu":"x"}"#] {
        fs::write(&path, broken).unwrap();
        let outcome = bare(&pod, &json!({"mtu": 1400})).on("ADD", &pod.container).run();
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        assert!(
            outcome.stderr.contains("replacing a backup that could not be read"),
            "{outcome:?}"
        );
        bare(&pod, &json!({})).del(&pod.container);
        assert_eq!(attribute(&pod, "mtu"), 1500);
        fs::write(&path, broken).unwrap();
        let outcome = bare(&pod, &json!({})).on("DEL", &pod.container).run();
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        assert!(outcome.stderr.contains("stays as it is"), "{outcome:?}");
        assert!(!path.exists());
    }
}

#[test]
fn a_failed_restoration_is_reported_and_retried() {
    for helps in [true, false] {
        let pod = SUBJECT.pod("1.1.0");
        let path = pod.node.state("tuning/c1_eth0.json");
        bare(&pod, &json!({"mtu": 1400, "txQLen": 9})).add(&pod.container);
        let text = fs::read_to_string(&path).unwrap().replacen("1500", "20", 1);
        fs::write(&path, text).unwrap();
        let error = bare(&pod, &json!({})).on("DEL", &pod.container).error();
        assert!(error.msg.starts_with("restore \"eth0\": set mtu 20"), "{error:?}");
        assert_eq!(attribute(&pod, "txQLen"), 1000, "the rest is restored");
        let text = fs::read_to_string(&path).unwrap();
        if helps {
            fs::write(&path, text.replacen("\"mtu\": 20", "\"mtu\": 1500", 1)).unwrap();
        }
        bare(&pod, &json!({})).del(&pod.container);
        assert!(!path.exists());
        assert_eq!(attribute(&pod, "mtu"), if helps { 1500 } else { 1400 });
    }
}

#[test]
fn gc_removes_stale_backups_of_its_network() {
    let pod = SUBJECT.pod("1.1.0");
    let net = bare(&pod, &json!({"mtu": 1400}));
    let ids = ["c1", "c2", "c3"];
    for id in ids {
        net.call("ADD", id).netns(&pod.container.path()).result();
    }
    net.with(&json!({"name": "other"})).call("ADD", "c4").netns(&pod.container.path()).result();
    fs::write(pod.node.state("tuning/c5_eth0.json"), r#"{"mtu":1500}"#).unwrap();
    fs::write(pod.node.state("tuning/c6_eth0.json"), "{").unwrap();
    let left = || {
        let files = pod.state().files;
        files.iter().map(|name| name.replace("_eth0.json", "")).collect::<Vec<_>>().join(" ")
    };
    let gc = |keys: Value| -> Net<'_> { net.with(&keys).with(&json!({"prevResult": null})) };
    let all = "c1 c2 c3 c4 c5 c6";
    gc(json!({})).call("GC", "").without("CNI_CONTAINERID").run();
    assert_eq!(left(), all, "no list");
    let of = |id: &str| json!({"containerID": id, "ifname": "eth0"});
    let list = json!([of("c1"), of("c2"), {"containerID": "c3", "ifname": "eth1"}]);
    gc(json!({"cni.dev/valid-attachments": list})).call("GC", "").ok();
    assert_eq!(left(), "c1 c2 c4 c5 c6");
    gc(json!({"cni.dev/valid-attachments": []})).call("GC", "").ok();
    assert_eq!(left(), "c4 c5 c6", "files of others stay");
    let nowhere = pod.node.path("nowhere");
    gc(json!({"cni.dev/valid-attachments": [], "dataDir": nowhere})).call("GC", "").ok();
}

#[test]
fn a_backup_of_another_attachment_is_kept() {
    let pod = SUBJECT.pod("1.1.0");
    let path = pod.node.state("tuning/c1_eth0_x.json");
    let net = bare(&pod, &json!({"mtu": 1400}));
    pod.container.sh("ip link add eth0_x type veth peer name far");
    let prev = json!({"cniVersion": "1.1.0", "interfaces":
        [{"name": "eth0_x", "sandbox": pod.container.path()}]});
    net.with(&json!({"prevResult": prev})).on("ADD", &pod.container).ifname("eth0_x").result();
    net.call("DEL", "c1_eth0").netns(&pod.container.path()).ifname("x").ok();
    assert!(path.exists());
    net.on("DEL", &pod.container).ifname("eth0_x").ok();
    assert!(!path.exists());
}

/// Container and interface identify an attachment; networks are renamed.
#[test]
fn del_under_another_name_of_the_network_restores() {
    let pod = SUBJECT.pod("1.1.0");
    let net = bare(&pod, &json!({"mtu": 1400, "mac": MAC}));
    let original = attribute(&pod, "address");
    net.add(&pod.container);
    let renamed = net.with(&json!({"name": "renamed"}));
    // An ADD under the new name keeps the original values as well.
    renamed.add(&pod.container);
    renamed.del(&pod.container);
    assert_eq!((attribute(&pod, "mtu"), attribute(&pod, "address")), (json!(1500), original));
    assert!(pod.state().files.is_empty());
}

#[test]
fn gc_removes_temporary_files_of_killed_commands() {
    let pod = SUBJECT.pod("1.1.0");
    let net = bare(&pod, &json!({"mtu": 1400}));
    net.add(&pod.container);
    let hash = |text: &str| pod.node.sh(&format!("printf %s {text} | sha512sum"))[..16].to_owned();
    let temporary = pod.node.state(&format!("tuning/.tmp-{}-{}", hash("net"), hash("eth0:gone")));
    fs::write(&temporary, "{").unwrap();
    let gc = |valid: Value| {
        net.with(&json!({"prevResult": null, "cni.dev/valid-attachments": valid}))
            .call("GC", "")
            .ok();
    };
    gc(json!([{"containerID": "gone", "ifname": "eth0"}]));
    assert!(temporary.exists());
    gc(json!([]));
    assert!(!temporary.exists());
}
