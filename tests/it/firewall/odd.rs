//! Tables that iptables cannot list, lists incompletely, or cannot change as requested.

use serde_json::json;

use super::{net, rules};
use crate::masquerade::flavoured;
use crate::support::node::{Container, Node};
use crate::support::strace;

/// Creates a wrapper script of a program; returns a `PATH` that finds it first.
fn wrapper(node: &Node, name: &str, script: &str) -> String {
    node.script(name, &format!("set -- /usr/sbin/{name} \"$@\"\n{script}"));
    format!("{}:/usr/sbin:/usr/bin:/bin", node.bin().display())
}

#[test]
fn rules_that_iptables_cannot_list_are_skipped() {
    let native = ["ct state established,related accept", "log prefix \"x\""];
    for (hook, rule) in ["INPUT", "FORWARD"].iter().flat_map(|hook| native.map(|r| (hook, r))) {
        let (node, container) = (Node::new(), Container::new());
        let conf = net(&node, "1.1.0", &json!({"backend": "iptables"}));
        let other = container.path();
        node.sh("iptables -A FORWARD -s 192.0.2.7/32 -j ACCEPT; iptables -A INPUT -j ACCEPT");
        node.sh(&format!("nft 'insert rule ip filter {hook} {rule}'"));
        node.sh("iptables-save -t filter | grep -q incompatible");
        conf.add(&container);
        conf.add(&container);
        conf.call("ADD", "c2").netns(&other).result();
        conf.on("CHECK", &container).ok();
        let jumps = node.sh("nft list chain ip filter FORWARD | grep -c 'jump CNI-FORWARD'");
        assert_eq!(jumps.trim(), "1", "{hook} {rule}");
        conf.del(&container);
        conf.call("DEL", "c2").netns(&other).ok();
        let accepted = || node.sh("iptables -S CNI-FORWARD");
        assert!(!accepted().contains("10.1.2.2"), "{hook} {rule}: {}", accepted());
        conf.add(&container);
        let gc = conf.with(&json!({"cni.dev/valid-attachments": []}));
        gc.call("GC", "").without("CNI_CONTAINERID").ok();
        assert!(!accepted().contains("10.1.2.2"), "{hook} {rule}: {}", accepted());
        node.sh("nft list ruleset | grep -q 192.0.2.7");
    }
}

#[test]
fn a_truncated_table_listing_is_refused() {
    let (node, container) = (Node::new(), Container::new());
    let conf = net(&node, "1.1.0", &json!({"backend": "iptables"}));
    // An iptables that is a script is used as it is.
    wrapper(&node, "iptables-restore", "exec \"$@\"");
    let path = wrapper(&node, "iptables-save", "\"$@\" | sed '/^-A/,$d'");
    conf.add(&container);
    let before = rules(&node);
    let error = conf.on("ADD", &container).env("PATH", &path).error();
    assert_eq!((error.code, error.msg.contains("ended too early")), (11, true), "{error:?}");
    let jumps = |text: &str| text.matches("-j CNI-FORWARD").count();
    assert_eq!(jumps(&rules(&node)), jumps(&before));
    // The next GC removes duplicate jumps of earlier incomplete listings.
    let jump = "-m comment --comment 'CNI firewall plugin rules' -j CNI-FORWARD";
    node.sh(&format!("iptables -I FORWARD {jump}; iptables -I FORWARD {jump}"));
    conf.add(&container);
    let valid = json!([{"containerID": "c1", "ifname": "eth0"}]);
    let gc = conf.with(&json!({"cni.dev/valid-attachments": valid}));
    gc.call("GC", "").without("CNI_CONTAINERID").ok();
    assert_eq!(jumps(&rules(&node)), jumps(&before));
}

/// iptables-restore exits with status 0 after an empty script.
#[test]
fn a_script_that_cannot_be_written_is_an_error() {
    strace::require();
    let (node, container) = (Node::new(), Container::new());
    let conf = net(&node, "1.1.0", &json!({"backend": "iptables"}));
    let legacy = flavoured(&node, "iptables-legacy");
    let legacy = |verb| conf.on(verb, &container).env("PATH", &format!("{legacy}:/usr/bin:/bin"));
    // The record is written after the rules are deleted.
    let fails = "inject=write:error=EIO:when=1";
    let wrapper = ["strace", "-qq", "-o", "/dev/null", "-e", "trace=write", "-e", fails];
    legacy("ADD").result();
    let error = legacy("DEL").under(&wrapper).error();
    assert!(error.msg.contains("-restore: "), "{error:?}");
    assert!(node.sh("iptables-legacy -S CNI-FORWARD").contains("10.1.2.2"));
    legacy("DEL").ok();
    assert!(!node.sh("iptables-legacy -S CNI-FORWARD").contains("10.1.2.2"));
}
