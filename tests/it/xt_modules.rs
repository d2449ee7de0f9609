//! Kernels without a module that rules of iptables need, as WSL's and minimal ones are. The name of
//! the extension is changed in a copy of the executable, so that the kernel answers as one without
//! the module.

use std::fs;
use std::os::unix::fs::symlink;

use serde_json::json;

use crate::support::conflist::{Attached, Conflist};
use crate::support::node::{Container, Node, executable};

/// Lets the node's plugins ask for an extension by a name that no kernel knows.
/// Returns that name.
fn lose_extension(node: &Node, name: &str) -> String {
    let (copy, changed) = (node.path("cnibox"), format!("{}Q", &name[..name.len() - 1]));
    let sed = format!("LC_ALL=C sed 's/{name}/{changed}/g'");
    node.sh(&format!("{sed} {} >{} && chmod 755 {1}", executable().display(), copy.display()));
    for entry in fs::read_dir(node.bin()).unwrap() {
        let link = entry.unwrap().path();
        fs::remove_file(&link).unwrap();
        symlink(&copy, link).unwrap();
    }
    changed
}

#[test]
fn a_missing_module_leads_to_nftables_or_is_named() {
    for (extension, module, plugin, table) in [
        ("MASQUERADE", "xt_MASQUERADE", 0, "cnibox_masquerade"),
        ("multiport", "xt_multiport", 1, "cnibox_portmap"),
        ("DNAT", "xt_nat", 1, "cnibox_portmap"),
        ("conntrack", "xt_conntrack", 2, "cnibox_firewall"),
    ] {
        let node = Node::new();
        let changed = lose_extension(&node, extension);
        let ipam = node.host_local(&["10.1.2.0/24"]);
        let plugins = json!([
            {"type": "bridge", "isGateway": true, "ipMasq": true, "ipam": ipam},
            {"type": "portmap", "capabilities": {"portMappings": true}},
            {"type": "firewall", "ingressPolicy": "same-bridge"},
        ]);
        let network = json!({"cniVersion": "1.1.0", "name": "n", "plugins": plugins});
        let mapping = json!({"hostPort": 8080, "containerPort": 80, "protocol": "tcp"});
        let container = Container::new();
        let mut attached = Attached::new("c", &container.path());
        attached.runtime = json!({"portMappings": [mapping]});
        let mut list = Conflist::new(&node, network);
        for nth in 0..3 {
            list.call("STATUS", &attached, nth, None).ok();
        }
        let result = list.add(&attached).unwrap();
        assert!(node.sh("nft list tables").contains(table), "{extension}");
        list.check(&attached, &result).unwrap();
        list.del(&attached, Some(&result)).unwrap();
        let key = if plugin == 0 { "ipMasqBackend" } else { "backend" };
        list.conf["plugins"][plugin][key] = json!("iptables");
        // The name of the module is changed, too, if it has that of the extension.
        let module = module.replace(extension, &changed);
        let remedy = format!("load the module {module}, or choose the back end \"nftables\"");
        let before = (plugin > 0).then(|| list.call("ADD", &attached, 0, None).result());
        for verb in ["STATUS", "ADD"] {
            let error = list.call(verb, &attached, plugin, before.as_ref()).error();
            assert!(error.details.contains(&remedy), "{extension} {verb}: {error:?}");
        }
        list.del(&attached, None).unwrap();
    }
}
