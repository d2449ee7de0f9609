//! The verbs of a plugin that stands behind bridge in a list and works inside the container, for
//! every version that it speaks. What it does ends with its DEL: the container is as bridge left it.

use serde_json::{Value, json};

use crate::net::{merged, settles};
use crate::node::{Call, Container, Node, Snapshot, VERSIONS, assert_unchanged};

/// A plugin under test.
pub(crate) struct Behind {
    pub(crate) plugin: &'static str,
    pub(crate) keys: Value,
    /// The first version that it speaks.
    pub(crate) since: &'static str,
    /// Does in a container what the kernel remembers for good.
    pub(crate) prepare: fn(&Container),
}

/// A container that bridge has attached.
pub(crate) struct Attached {
    pub(crate) node: Node,
    pub(crate) container: Container,
    pub(crate) version: &'static str,
    /// What bridge has printed.
    pub(crate) prev: Value,
    /// The host and the container before the plugin was called.
    pub(crate) before: (Snapshot, Snapshot),
    plugin: &'static str,
    conf: Value,
}

impl Attached {
    /// Attaches `eth0` of a dual-stack network with a route behind a router.
    pub(crate) fn new(behind: &Behind, version: &'static str) -> Attached {
        let node = Node::new();
        let container = Container::new();
        (behind.prepare)(&container);
        let mut ipam = node.host_local(&["10.1.2.0/24", "2001:db8:1::/64"]);
        ipam["routes"] = json!([{"dst": "192.168.0.0/16", "gw": "10.1.2.9"}, {"dst": "fd99::/16"}]);
        let common = json!({"cniVersion": version, "name": "net"});
        let bridge = merged(&common, &json!({"type": "bridge", "isGateway": true, "ipam": ipam}));
        let call = node.call("bridge", "ADD").conf(&bridge).id("c1").netns(&container.path());
        let prev = call.result();
        let before = (node.snapshot(), container.snapshot(&node));
        let conf = merged(&merged(&common, &json!({"type": behind.plugin})), &behind.keys);
        Attached { node, container, version, prev, before, plugin: behind.plugin, conf }
    }

    /// A call with other keys, without `prevResult` unless they have it.
    pub(crate) fn call_with(&self, verb: &str, keys: &Value) -> Call {
        let call = self.node.call(self.plugin, verb).conf(&merged(&self.conf, keys));
        call.id("c1").netns(&self.container.path())
    }

    /// A call without `prevResult`.
    pub(crate) fn bare(&self, verb: &str) -> Call {
        self.call_with(verb, &json!({}))
    }

    /// A call with `prevResult`.
    pub(crate) fn call(&self, verb: &str) -> Call {
        self.call_with(verb, &json!({"prevResult": self.prev}))
    }

    /// Everything is as bridge left it.
    #[track_caller]
    pub(crate) fn assert_as_before(&self) {
        assert_unchanged(&self.before.0, &self.node.snapshot());
        settles(&self.before.1, || self.container.snapshot(&self.node));
    }

    /// CHECK fails with this message and changes nothing.
    #[track_caller]
    pub(crate) fn check_finds(&self, msg: &str) {
        let before = self.container.snapshot(&self.node);
        let error = self.call("CHECK").error();
        assert_eq!(error.brief(), (999, msg));
        assert_unchanged(&before, &self.container.snapshot(&self.node));
    }

    /// A call is refused and changes nothing.
    #[track_caller]
    pub(crate) fn is_refused(&self, call: &Call, brief: (u64, &str)) {
        let before = (self.node.snapshot(), self.container.snapshot(&self.node));
        let error = call.error();
        assert_eq!(error.brief(), brief);
        assert_unchanged(&before.0, &self.node.snapshot());
        assert_unchanged(&before.1, &self.container.snapshot(&self.node));
    }
}

impl Behind {
    /// ADD passes the result through, CHECK agrees, DEL with and without `prevResult` and again
    /// restores the container, and all that may be absent may be absent.
    pub(crate) fn every_verb_in_every_version(&self) {
        for version in VERSIONS {
            let attached = Attached::new(self, version);
            if version < self.since {
                let error = attached.call("ADD").error();
                assert_eq!(error.brief(), (1, "incompatible CNI versions"), "{version}");
                attached.assert_as_before();
                continue;
            }
            Behind::add_check_del(&attached);
            Behind::nothing_to_delete(&attached);
            Behind::gc_and_status(&attached);
            let (path, call) = (attached.container.path(), attached.call("DEL"));
            attached.call("ADD").result();
            drop(attached.container);
            call.netns(&path).ok();
        }
    }

    fn add_check_del(attached: &Attached) {
        for round in ["with", "without", "with"] {
            assert_eq!(attached.call("ADD").result(), attached.prev, "passed through unchanged");
            let added = attached.container.snapshot(&attached.node);
            assert_ne!(added, attached.before.1, "nothing was done");
            if attached.version >= "0.4.0" {
                attached.call("CHECK").ok();
                assert_unchanged(&added, &attached.container.snapshot(&attached.node));
            } else {
                let error = attached.call("CHECK").error();
                assert_eq!(error.brief(), (1, "config version does not allow CHECK"));
            }
            assert_eq!(attached.call("ADD").result(), attached.prev, "once more");
            settles(&added, || attached.container.snapshot(&attached.node));
            let del = || if round == "with" { attached.call("DEL") } else { attached.bare("DEL") };
            del().ok();
            attached.assert_as_before();
            del().ok();
            attached.assert_as_before();
        }
    }

    fn nothing_to_delete(attached: &Attached) {
        attached.bare("DEL").netns("").ok();
        attached.bare("DEL").without("CNI_NETNS").ok();
        attached.call("DEL").netns("/var/run/netns/no-such").ok();
        assert!(!crate::node::exists("/var/run/netns/no-such"), "no lock file is made");
        attached.call("DEL").ifname("eth9").ok();
        attached.assert_as_before();
    }

    fn gc_and_status(attached: &Attached) {
        let added = || attached.container.snapshot(&attached.node);
        attached.call("ADD").result();
        let before = added();
        for verb in ["GC", "STATUS"] {
            let keys = json!({"cni.dev/valid-attachments": []});
            let call = attached.call_with(verb, &keys).without("CNI_NETNS");
            if attached.version < "1.1.0" {
                let msg = format!("config version does not allow {verb}");
                assert_eq!(call.error().brief(), (1, msg.as_str()));
            } else {
                call.ok();
            }
        }
        assert_unchanged(&before, &added());
        attached.call("DEL").ok();
        attached.assert_as_before();
    }
}
