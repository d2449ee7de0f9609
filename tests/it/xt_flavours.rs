//! Nodes with both flavours of iptables, where `iptables` is not the one in which kubelet and
//! kube-proxy have their rules: Talos 1.7, k3s on distributions with iptables-legacy.

use serde_json::json;

use crate::doctor::Ward;
use crate::masquerade::flavoured;
use crate::support::net::Net;
use crate::support::node::{Container, Node};

const FLAVOURS: [&str; 2] = ["iptables-nft", "iptables-legacy"];

#[test]
fn the_flavour_that_kubelet_has_marked_is_used() {
    let [nft, legacy] = FLAVOURS;
    for (mark, kubelet, own) in [
        ("KUBE-IPTABLES-HINT", nft, legacy),
        ("KUBE-IPTABLES-HINT", legacy, nft),
        ("KUBE-KUBELET-CANARY", legacy, nft),
        ("OTHER", nft, legacy),
        ("OTHER", legacy, nft),
    ] {
        let (node, container) = (Node::new(), Container::new());
        let used = if mark == "OTHER" { own } else { kubelet };
        node.sh(&format!("{kubelet} -w -t mangle -N {mark}"));
        let path = format!("{}:{}", flavoured(&node, own), std::env::var("PATH").unwrap());
        let ipam = node.host_local(&["10.1.2.0/24"]);
        let net = Net::new(&node, "bridge", "1.1.0", &json!({"ipMasq": true, "ipam": ipam}));
        let call =
            |net: &Net<'_>, verb| net.call(verb, "c").netns(&container.path()).env("PATH", &path);
        let have_rules = || {
            let count = "-save -t nat | grep -c CNI- || true";
            FLAVOURS.map(|flavour| node.sh(&format!("{flavour}{count}")).trim() != "0")
        };
        let result = call(&net, "ADD").result();
        assert_eq!(have_rules(), FLAVOURS.map(|flavour| flavour == used), "{mark} in {kubelet}");
        call(&net.with(&json!({"prevResult": result})), "CHECK").ok();
        call(&net, "DEL").ok();
        assert_eq!(have_rules(), [false; 2], "{mark} in {kubelet}");
    }
}

#[test]
fn doctor_tells_of_two_flavours() {
    let ipam = json!({"type": "host-local", "dataDir": "LEASES", "subnet": "10.88.0.0/16"});
    let ward = Ward::with(&json!([{"type": "bridge", "isGateway": true, "ipam": ipam}]));
    ward.attach(0);
    ward.node.sh("iptables-legacy -w -t mangle -N OTHER");
    assert!(!ward.doctor().1.contains("kubelet"));
    ward.node.sh("iptables-legacy -w -t mangle -N KUBE-IPTABLES-HINT");
    let (status, text) = ward.doctor();
    let told = "note: node: kubelet has its rules in iptables-legacy, which cnibox uses, too";
    assert!(status == Some(0) && text.contains(told), "{text}");
}
