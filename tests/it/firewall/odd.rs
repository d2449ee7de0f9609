//! Tables that iptables cannot list, lists incompletely, or cannot change as requested.

use serde_json::json;

use super::{net, rules};
use crate::node::Node;
use crate::node::{Call, Container};
use crate::strace;

/// Creates a wrapper script of a program; returns a `PATH` that finds it first.
fn wrapper(node: &Node, name: &str, script: &str) -> String {
    node.script(name, &format!("set -- /usr/sbin/{name} \"$@\"\n{script}"));
    format!("{}:/usr/sbin:/usr/bin:/bin", node.bin().display())
}

#[test]
fn a_rule_that_iptables_cannot_show_stands_in_nobodys_way() {
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
fn a_rule_iptables_cannot_name_is_deleted_by_number() {
    let (node, container) = (Node::new(), Container::new());
    let conf = net(&node, "1.1.0", &json!({"backend": "iptables"}));
    let refusing = |what: &str| {
        wrapper(
            &node,
            "iptables-nft-restore",
            &format!(
                "text=$(cat)\ncase \"$text\" in *'{what}'*) echo Bad rule >&2; exit 1;; esac\n\
                 printf '%s\\n' \"$text\" | \"$@\""
            ),
        )
    };
    let del = |path: &str| -> Call { conf.on("DEL", &container).env("PATH", path) };
    let accept = "-D CNI-FORWARD -s 10.1.2.2/32 -j ACCEPT";
    conf.add(&container);
    del(&refusing(accept)).ok();
    assert!(!rules(&node).contains("10.1.2.2"), "{}", rules(&node));
    // If an accept rule cannot be deleted, DEL fails, but deletes everything else.
    conf.add(&container);
    let error = del(&refusing("-D CNI-FORWARD ")).error();
    assert!(error.msg.contains("CNI-FORWARD") && error.msg.contains("10.1.2.2"), "{error:?}");
    assert!(!rules(&node).contains("CNIBOX-FIREWALL -s"), "{}", rules(&node));
    conf.del(&container);
    // A remaining rule that no packet matches is a warning and does not fail DEL.
    conf.add(&container);
    let outcome = del(&refusing("-D CNIBOX-FIREWALL ")).run();
    assert_eq!(outcome.status, Some(0), "{outcome:?}");
    assert!(outcome.stderr.contains("CNIBOX-FIREWALL"), "{outcome:?}");
    assert!(!rules(&node).contains("-A CNI-FORWARD -s 10.1.2.2"), "{}", rules(&node));
}

#[test]
fn a_table_that_is_not_shown_to_its_end_is_not_believed() {
    let (node, container) = (Node::new(), Container::new());
    let conf = net(&node, "1.1.0", &json!({"backend": "iptables"}));
    let path = wrapper(&node, "iptables-save", "\"$@\" | sed '/^-A/,$d'");
    conf.add(&container);
    // Without the plugin's own chains ADD reads the complete table.
    node.sh("iptables -F CNIBOX-FIREWALL; iptables -X CNIBOX-FIREWALL");
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
    // The first write is that of the record.
    let fails = "inject=write:error=EIO:when=2";
    let wrapper = ["strace", "-qq", "-o", "/dev/null", "-e", "trace=write", "-e", fails];
    conf.add(&container);
    let error = conf.on("DEL", &container).under(&wrapper).error();
    assert!(error.msg.contains("-restore: "), "{error:?}");
    assert!(node.sh("iptables -S CNI-FORWARD").contains("10.1.2.2"));
    conf.del(&container);
    assert!(!node.sh("iptables -S CNI-FORWARD").contains("10.1.2.2"));
}
