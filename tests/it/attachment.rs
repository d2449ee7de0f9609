//! State of a stale attachment never applies to the next container with the same address.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use cnibox::testing::attachment::{AttachmentId, AttachmentRecord, EndedBy, Liveness};
use serde_json::{Value, json};

use crate::support::compare::peer;
use crate::support::net::{Net, merged};
use crate::support::node::{Call, Container, Node, eventually};

const BACK_ENDS: [&str; 2] = ["nftables", "iptables"];
const PORT: u16 = 18_081;

/// A network configuration list of bridge, portmap, firewall and bandwidth.
struct Chain<'n> {
    node: &'n Node,
    backend: &'static str,
    keys: Value,
}

impl<'n> Chain<'n> {
    /// Creates the list with a range of one usable address.
    fn new(node: &'n Node, backend: &'static str) -> Chain<'n> {
        let ipam = node.host_local(&["10.88.0.0/30"]);
        Chain { node, backend, keys: json!({"ipam": ipam}) }
    }

    fn call(&self, plugin: &'static str, verb: &str, id: &str, keys: &Value) -> Call {
        let mut all = json!({"backend": self.backend});
        if plugin == "bridge" {
            all = json!({"bridge": "br9", "isGateway": true, "ipMasq": true,
                "ipMasqBackend": self.backend, "macspoofchk": true});
        }
        let net = Net::new(self.node, plugin, "1.1.0", &merged(&merged(&all, &self.keys), keys));
        net.call(verb, id)
    }

    fn behind(&self, plugin: &'static str, verb: &str, id: &str, prev: &Value) -> Call {
        let port = json!([{"hostPort": PORT, "containerPort": 80, "protocol": "tcp"}]);
        let rates = json!({"egressRate": 8_000_000, "egressBurst": 8_000_000});
        let keys = json!({"prevResult": prev,
            "runtimeConfig": {"portMappings": port, "bandwidth": rates}});
        self.call(plugin, verb, id, &keys)
    }

    /// ADD of all plugins after bridge.
    fn add_rest(&self, id: &str, container: &Container, prev: &Value) {
        for plugin in ["portmap", "firewall", "bandwidth"] {
            self.behind(plugin, "ADD", id, prev).netns(&container.path()).result();
        }
    }
    fn add(&self, id: &str, container: &Container) -> Value {
        let path = container.path();
        let prev = self.call("bridge", "ADD", id, &json!({})).netns(&path).result();
        self.add_rest(id, container, &prev);
        prev
    }

    /// The ruleset and the ifb devices, as text.
    fn state(&self) -> String {
        self.node.sh("nft list ruleset; ip -d link show type ifb")
    }

    #[track_caller]
    fn has_nothing_of(&self, id: &str) {
        let state = self.state();
        assert!(!state.contains(id), "{}: {state}", self.backend);
    }
}

#[test]
fn a_reclaimed_address_has_no_state_of_the_dead_container() {
    for backend in BACK_ENDS {
        let node = Node::new();
        let chain = Chain::new(&node, backend);
        let (dead, next) = (Container::new(), Container::new());
        chain.add("the-dead-one", &dead);
        let state = chain.state();
        assert!(state.contains("the-dead-one") && state.contains(&PORT.to_string()));
        drop(dead);
        let add = chain.call("bridge", "ADD", "next", &json!({})).netns(&next.path());
        eventually("the address can be had", || add.run().status == Some(0));
        chain.has_nothing_of("the-dead-one");
        chain.has_nothing_of(&PORT.to_string());
        assert!(!chain.state().contains("bwp"), "the device that shaped is gone");
    }
}

/// `/run` may be full of other programs' files: DEL removes the attachment's record, and its parts
/// before, without a byte of space.
#[test]
fn del_needs_no_space_for_its_records() {
    for backend in BACK_ENDS {
        let node = Node::new();
        node.sh("mount -o remount,size=256k /run/cni");
        let (chain, container) = (Chain::new(&node, backend), Container::new());
        let prev = chain.add("c1", &container);
        node.sh("cat /dev/zero > /run/cni/filler 2> /dev/null || true");
        for plugin in ["bandwidth", "firewall", "portmap", "bridge"] {
            chain.behind(plugin, "DEL", "c1", &prev).netns(&container.path()).ok();
        }
        chain.has_nothing_of("c1");
        assert_eq!(node.sh("find /run/cni ! -type d ! -name '*.lock'"), "/run/cni/filler\n");
    }
}

#[test]
fn a_lease_is_kept_if_deleting_the_rules_fails() {
    let node = Node::new();
    let chain = Chain::new(&node, "iptables");
    let (dead, next) = (Container::new(), Container::new());
    chain.add("the-dead-one", &dead);
    drop(dead);
    // Rules of iptables-legacy, which only its programs can look for.
    node.sh("iptables-legacy -t nat -S");
    let broken = node.path("broken");
    fs::create_dir(&broken).unwrap();
    for tool in ["save", "restore"] {
        let file = broken.join(format!("iptables-legacy-{tool}"));
        fs::write(&file, "#!/bin/sh\nexit 1\n").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let path = format!("{}:{}", broken.display(), std::env::var("PATH").unwrap());
    let add = chain.call("bridge", "ADD", "next", &json!({})).netns(&next.path());
    let hindered = add.clone().env("PATH", &path);
    eventually("the lease would be reclaimed", || {
        let outcome = hindered.run();
        assert_eq!(outcome.status, Some(1), "{outcome:?}");
        outcome.stderr.contains("10.88.0.2 of container the-dead-one, interface eth0 stays")
    });
    assert_eq!(node.leases("net"), ["10.88.0.2"]);
    eventually("the address can be had", || add.run().status == Some(0));
    chain.has_nothing_of("the-dead-one");
}

/// The same list with an IPAM plugin that keeps no leases.
fn with_static<'n>(node: &'n Node, backend: &'static str) -> Chain<'n> {
    let ipam = json!({"type": "static", "addresses":
        [{"address": "10.88.0.2/24", "gateway": "10.88.0.1"}]});
    Chain { node, backend, keys: json!({"ipam": ipam}) }
}

#[test]
fn addresses_of_the_dead_are_free_with_any_ipam_plugin() {
    for backend in BACK_ENDS {
        let node = Node::new();
        let chain = with_static(&node, backend);
        let (first, next) = (Container::new(), Container::new());
        chain.add("the-dead-one", &first);
        let add = chain.call("bridge", "ADD", "next", &json!({})).netns(&next.path());
        assert_eq!(lives(), [Liveness::Alive]);
        add.result();
        assert!(chain.state().contains(&PORT.to_string()), "who lives keeps all");
        chain.call("bridge", "DEL", "next", &json!({})).netns(&next.path()).ok();
        // Restores "the-dead-one" as the last owner of the address.
        chain.add("the-dead-one", &Container::new());
        drop(first);
        eventually("it is gone", || lives() == [Liveness::Gone(EndedBy::HostEnd)]);
        let outcome = add.run();
        assert_eq!(outcome.status, Some(0), "{outcome:?}");
        assert!(outcome.stderr.contains("removed what container \"the-dead-one\" left"));
        chain.has_nothing_of("the-dead-one");
        chain.has_nothing_of(&PORT.to_string());
        assert_eq!(AttachmentRecord::read_all(None).len(), 1);
    }
}

#[test]
fn a_replaced_record_has_no_entry_by_its_former_address() {
    let (node, first, second) = (Node::new(), Container::new(), Container::new());
    let mut chain = with_static(&node, "nftables");
    for (container, address) in [(&first, "10.88.0.2"), (&second, "10.88.0.3")] {
        chain.keys["ipam"]["addresses"][0]["address"] = json!(format!("{address}/24"));
        chain.call("bridge", "ADD", "c1", &json!({})).netns(&container.path()).result();
        assert_eq!(node.sh("ls /run/cni/cnibox/by-address"), format!("{address}\n"));
    }
}

#[test]
fn cnibox_gc_removes_state_of_the_dead_without_a_lease() {
    let node = Node::new();
    let chain = with_static(&node, "nftables");
    let (dead, alive) = (Container::new(), Container::new());
    chain.add("the-dead-one", &dead);
    drop(dead);
    eventually("it is gone", || lives() == [Liveness::Gone(EndedBy::HostEnd)]);
    let gc = |more: &[&str]| {
        let dir = node.path("leases").display().to_string();
        let args = [&["gc", "--network", "net", "--data-dir", dir.as_str()], more].concat();
        node.cnibox(&args).run().stdout
    };
    let what = "state of container the-dead-one, interface eth0: its link on the host is gone";
    assert_eq!(gc(&["--dry-run"]), format!("would remove {what} (network net)\n"));
    assert!(chain.state().contains("the-dead-one"));
    assert_eq!(gc(&[]), format!("removed {what} (network net)\n"));
    chain.has_nothing_of("the-dead-one");
    chain.add("the-live-one", &alive);
    assert_eq!(gc(&[]), "no dead attachment was found\n");
    assert!(chain.state().contains("the-live-one"));
}

/// The reference deletes the rules of an address, and leaves our note of its owner.
#[test]
fn a_stale_label_of_the_reference_keeps_no_rules() {
    let Some(dir) = peer("bridge and firewall") else { return };
    let node = Node::new();
    let mut chain = Chain::new(&node, "iptables");
    chain.keys = merged(&chain.keys, &json!({"cniVersion": "1.0.0", "macspoofchk": false}));
    let (x, y) = (Container::new(), Container::new());
    let paths = [x.path(), y.path()];
    let of = |plugin: &'static str, verb: &str, id: &str, prev: &Value| {
        chain.behind(plugin, verb, id, prev).netns(&paths[usize::from(id == "y")])
    };
    let first = of("bridge", "ADD", "x", &Value::Null).result();
    of("firewall", "ADD", "x", &first).result();
    for plugin in ["firewall", "bridge"] {
        let theirs = of(plugin, "DEL", "x", &first).program(dir.join(plugin));
        theirs.env("CNI_PATH", &dir.display().to_string()).ok();
    }
    drop(x);
    let next = of("bridge", "ADD", "y", &Value::Null).result();
    assert_eq!(first["ips"], next["ips"], "the address of x");
    of("firewall", "ADD", "y", &next).result();
    of("firewall", "CHECK", "y", &next).ok();
    of("firewall", "DEL", "y", &next).ok();
    let rules = node.sh("iptables-save -t filter");
    assert!(!rules.contains("10.88.0.2"), "{rules}");
}

#[test]
fn a_stale_label_of_the_reference_is_not_trusted() {
    let Some(dir) = peer("bridge and firewall") else { return };
    for late_del in [false, true] {
        let node = Node::new();
        let old = json!({"cniVersion": "1.0.0", "macspoofchk": false});
        let mut chain = Chain::new(&node, "iptables");
        chain.keys = merged(&chain.keys, &old);
        let (x, y) = (Container::new(), Container::new());
        let of = |plugin: &'static str, verb: &str, id: &str, prev: &Value| {
            let container = if id == "x" { &x } else { &y };
            chain.behind(plugin, verb, id, prev).netns(&container.path())
        };
        let theirs = |plugin: &'static str, verb: &str, id: &str, prev: &Value| {
            let call = of(plugin, verb, id, prev).program(dir.join(plugin));
            call.env("CNI_PATH", &dir.display().to_string())
        };
        let first = of("bridge", "ADD", "x", &Value::Null).result();
        of("firewall", "ADD", "x", &first).result();
        theirs("firewall", "DEL", "x", &first).ok();
        theirs("bridge", "DEL", "x", &first).ok();
        let next = theirs("bridge", "ADD", "y", &Value::Null).result();
        theirs("firewall", "ADD", "y", &next).result();
        assert_eq!(first["ips"], next["ips"], "the address of x");
        if late_del {
            chain.call("firewall", "DEL", "x", &json!({})).ok();
        } else {
            let valid = json!([{"containerID": "y", "ifname": "eth0"}]);
            let keys = json!({"cniVersion": "1.1.0", "cni.dev/valid-attachments": valid});
            chain.call("firewall", "GC", "", &keys).without("CNI_CONTAINERID").ok();
        }
        let rules = node.sh("iptables-save -t filter");
        assert!(rules.contains("-A CNI-FORWARD -s 10.88.0.2/32 -j ACCEPT"), "{rules}");
        assert!(rules.contains("-A CNI-FORWARD -d 10.88.0.2/32"), "{rules}");
        assert!(!rules.contains("id: x,"), "the note is gone: {rules}");
    }
}

#[test]
fn gc_deletes_the_interface_before_releasing_its_address() {
    let node = Node::new();
    let chain = Chain::new(&node, "nftables");
    let (stale, next) = (Container::new(), Container::new());
    chain.add("stale", &stale);
    let gc = |plugin| {
        let keys = json!({"cni.dev/valid-attachments": []});
        chain.call(plugin, "GC", "", &keys).without("CNI_CONTAINERID")
    };
    // Called alone, host-local releases no address of a link that exists.
    let error = gc("host-local").error();
    assert_eq!(error.brief(), (11, "10.88.0.2 of container stale, interface eth0 stays"));
    assert_eq!(node.leases("net"), ["10.88.0.2"]);
    for plugin in ["bridge", "portmap", "firewall", "bandwidth"] {
        assert_eq!(gc(plugin).run().status, Some(0), "{plugin}");
        assert!(!stale.sh("ip addr").contains("10.88.0.2"), "{}", stale.sh("ip addr"));
    }
    assert_eq!(node.leases("net"), [""; 0]);
    chain.add("next", &next);
    assert!(next.sh("ip addr").contains("10.88.0.2"));
}

#[test]
fn leftovers_of_a_container_id_do_not_block_its_next_port() {
    let node = Node::new();
    let chain = Chain::new(&node, "nftables");
    let (first, next) = (Container::new(), Container::new());
    chain.add("same-name", &first);
    drop(first);
    eventually("it is gone", || lives() == [Liveness::Gone(EndedBy::HostEnd)]);
    let add = chain.call("bridge", "ADD", "same-name", &json!({})).netns(&next.path());
    eventually("its own former lease is reclaimed", || add.run().status == Some(0));
    let port = next.ip("-d link show eth0")[0]["link_index"].as_u64().unwrap();
    let ports = node.ip("link show type veth");
    let ports = ports.as_array().unwrap().iter();
    let name = ports.clone().find(|link| link["ifindex"].as_u64() == Some(port)).unwrap();
    let checked = node.sh("nft list set bridge cnibox_spoof checked");
    assert!(checked.contains(name["ifname"].as_str().unwrap()), "{checked}");
}

/// The liveness of every recorded attachment.
fn lives() -> Vec<Liveness> {
    AttachmentRecord::read_all(None).iter().map(AttachmentRecord::liveness).collect()
}

/// As after a GC that was killed when it had removed the link.
#[test]
fn gc_removes_a_record_whose_link_is_gone() {
    let (node, container) = (Node::new(), Container::new());
    let keys = json!({"macspoofchk": true, "ipam": node.host_local(&["10.1.2.0/24"])});
    let net = Net::new(&node, "bridge", "1.1.0", &keys);
    net.add(&container);
    node.sh("rm /run/cni/cnibox/spoof/*");
    drop(container);
    net.with(&json!({"cni.dev/valid-attachments": []})).call("GC", "").ok();
    assert_eq!(node.sh("ls /run/cni/cnibox/attachments"), "");
}

#[test]
fn gc_removes_a_truncated_record() {
    let node = Node::new();
    let chain = Chain::new(&node, "nftables");
    let container = Container::new();
    chain.add("valid", &container);
    let records = || -> Vec<String> {
        let entries = fs::read_dir("/run/cni/cnibox/attachments").unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    let complete = records();
    let cut_off = AttachmentId { network: "net", ifname: "eth0", id: "killed" }.instance_id();
    fs::write(format!("/run/cni/cnibox/attachments/{cut_off}.json"), "{\"network\":").unwrap();
    let valid = json!([{"containerID": "valid", "ifname": "eth0"}]);
    chain.call("bridge", "GC", "", &json!({"cni.dev/valid-attachments": valid})).ok();
    assert_eq!(records(), complete);
}

#[test]
fn gc_of_a_later_plugin_keeps_the_record_of_an_earlier() {
    let node = Node::new();
    let chain = Chain::new(&node, "nftables");
    let container = Container::new();
    chain.add("stale", &container);
    let owner = AttachmentId { network: "net", ifname: "eth0", id: "stale" };
    let recorded_by = || AttachmentRecord::find_by_attachment(owner).map(|record| record.plugin);
    assert_eq!(recorded_by().as_deref(), Some("bridge"));
    // The GC of bridge may have failed: its part of the state remains.
    chain.call("firewall", "GC", "", &json!({"cni.dev/valid-attachments": []})).ok();
    assert_eq!(recorded_by().as_deref(), Some("bridge"));
}
