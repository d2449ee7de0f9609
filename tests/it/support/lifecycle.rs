//! The verbs in the orders of runtimes, for every version and any plugin that creates a link and
//! delegates IPAM. `cni-sanity` (`sanity.rs`) tests the requirements of the specification itself.
//! Each function leaves the node as before, except for the subject's declared remainder.

use serde_json::{Value, json};

use crate::support::net::{
    FIRST, GATEWAYS, Net, SECOND, is_veth, no_veth_remains, normal, settles,
};
use crate::support::node::{Container, MILESTONES, Node, VERSIONS};
use crate::support::traffic::{Place, tcp, udp};

/// A plugin under test.
pub(crate) struct Subject {
    pub(crate) plugin: &'static str,
    /// Keys of a dual-stack network of 10.1.2.0/24 and `2001:db8:1::/64` with default routes.
    pub(crate) keys: fn(&Node) -> Value,
    /// The result of the first container in a version.
    pub(crate) golden: fn(&str) -> &'static str,
    /// Removes links that the plugin keeps permanently. Leases must never remain.
    pub(crate) remove_remainder: fn(&Node),
}

/// The results in the directory `golden/$directory`, by version.
macro_rules! golden {
    ($directory:literal) => {
        |version: &str| match version {
            "0.1.0" | "0.2.0" => include_str!(concat!("golden/", $directory, "/0.1.json")),
            "1.0.0" => include_str!(concat!("golden/", $directory, "/1.0.json")),
            "1.1.0" => include_str!(concat!("golden/", $directory, "/1.1.json")),
            _ => include_str!(concat!("golden/", $directory, "/0.3.json")),
        }
    };
}
pub(crate) use golden;

/// Defines tests by the names of [`Subject`] methods; skipped if the kernel lacks `needs`.
macro_rules! lifecycle {
    ($subject:ident; $($name:ident: $method:ident,)+) => {
        $(
            #[test]
            fn $name() {
                $subject.$method();
            }
        )+
    };
    ($subject:ident, needs $feature:expr; $($name:ident: $method:ident,)+) => {
        $(
            #[test]
            fn $name() {
                $crate::lane::needs!($feature);
                $subject.$method();
            }
        )+
    };
}
pub(crate) use lifecycle;

impl Subject {
    /// Runs `test` on a fresh node for each version and compares the node with the state before.
    #[track_caller]
    fn in_versions(&self, versions: &[&'static str], test: impl Fn(&Net<'_>)) {
        for version in versions {
            let node = Node::new();
            let before = node.snapshot();
            test(&Net::new(&node, self.plugin, version, &(self.keys)(&node)));
            no_veth_remains(&node);
            assert_eq!(node.leases("net"), [""; 0]);
            (self.remove_remainder)(&node);
            settles(&before, || node.snapshot());
        }
    }

    /// Whether the host reaches an address of a container; a dummy link is unreachable.
    fn reaches(&self, net: &Net<'_>, ip: &str) -> bool {
        self.plugin == "dummy" || net.node.reaches(ip)
    }

    /// ADD prints the golden result byte for byte in every version; CHECK succeeds, and two DELs
    /// restore the container.
    pub(crate) fn add_check_del_del(&self) {
        self.in_versions(&VERSIONS, |net| {
            let container = Container::new();
            let before = container.snapshot(net.node);
            let printed = net.on("ADD", &container).printed();
            let golden = (self.golden)(net.version).trim_end().replace("VERSION", net.version);
            assert_eq!(normal(&printed, &container), golden);
            assert_eq!(net.leases(), FIRST);
            if !MILESTONES.contains(&net.version) {
                return net.del(&container);
            }
            let prev: Value = serde_json::from_str(&printed).unwrap();
            if net.version >= "0.4.0" {
                let added = (net.node.snapshot(), container.snapshot(net.node));
                net.check(&container, &prev).ok();
                settles(&added.0, || net.node.snapshot());
                settles(&added.1, || container.snapshot(net.node));
            }
            net.del(&container);
            settles(&before, || container.snapshot(net.node));
            no_veth_remains(net.node);
            assert_eq!(net.leases(), [""; 0]);
            net.del(&container);
            settles(&before, || container.snapshot(net.node));
        });
    }

    /// Pings in all directions, TCP and UDP, over IPv4 and IPv6.
    pub(crate) fn traffic(&self) {
        self.in_versions(&MILESTONES, |net| {
            let (one, two) = (Container::new(), Container::new());
            net.add(&one);
            net.call("ADD", "c2").netns(&two.path()).result();
            for family in [0, 1] {
                assert!(one.reaches(GATEWAYS[family]), "container to host");
                assert!(net.node.reaches(FIRST[family]), "host to container");
                assert!(one.reaches(SECOND[family]), "container to container");
                assert!(two.reaches(FIRST[family]), "and back");
                tcp(&one, &two, SECOND[family]);
                let seen = udp(&one, &two, SECOND[family]);
                assert_eq!(seen.to_string(), FIRST[family], "nothing translates addresses");
                udp(net.node, &two, SECOND[family]);
                tcp(&two, net.node, GATEWAYS[family]);
            }
            net.del(&one);
            assert!(two.reaches(GATEWAYS[0]), "the other container keeps its network");
            net.call("DEL", "c2").netns(&two.path()).ok();
        });
    }

    /// DEL with a deleted, never existing or empty namespace, with and without `prevResult`.
    pub(crate) fn del_without_a_namespace(&self) {
        self.in_versions(&MILESTONES, |net| {
            // The path dangles: the kernel has removed the pair, but the lease remains.
            let container = Container::new();
            net.add(&container);
            let path = container.path();
            drop(container);
            net.call("DEL", "c1").netns(&path).ok();
            assert_eq!(net.leases(), [""; 0]);
            no_veth_remains(net.node);
            // Without a namespace, DEL releases the lease and finds a veth pair by its alias.
            let container = Container::new();
            let is_pair = ["bridge", "ptp"].contains(&net.plugin);
            net.add(&container);
            for _ in 0..2 {
                net.call("DEL", "c1").netns("").ok();
                assert_eq!(net.leases(), [""; 0]);
                assert_eq!(container.try_sh("ip link show eth0"), !is_pair);
            }
            // The reference sets no alias: only the result names the veth.
            if is_pair && net.version >= "0.4.0" {
                let prev = net.add(&container);
                let names = prev["interfaces"].as_array().unwrap().iter();
                let end =
                    names.filter_map(|entry| entry["name"].as_str()).find(|name| is_veth(name));
                net.node.sh(&format!("ip link set {} alias ''", end.unwrap()));
                net.call("DEL", "c1").ok();
                assert!(container.try_sh("ip link show eth0"), "nothing tells where it is");
                net.with(&json!({"prevResult": prev})).call("DEL", "c1").ok();
                no_veth_remains(net.node);
            }
            net.del(&container);
        });
    }

    /// GC keeps valid attachments and releases stale ones; without a list, it releases nothing.
    pub(crate) fn gc(&self) {
        self.in_versions(&["1.1.0"], |net| {
            let gc = |keys: Value| net.with(&keys).call("GC", "").without("CNI_CONTAINERID");
            let (one, two) = (Container::new(), Container::new());
            let add_two = || {
                net.call("ADD", "c2").netns(&two.path()).result();
                net.leases()
            };
            net.add(&one);
            let c1 = net.leases();
            assert_eq!(add_two().len(), 4);
            for keys in [json!({}), json!({"cni.dev/valid-attachmets": []})] {
                let outcome = gc(keys).run();
                assert_eq!((outcome.status, outcome.stdout.as_str()), (Some(0), ""));
                assert!(outcome.stderr.contains("releases nothing"), "{}", outcome.stderr);
                assert_eq!(net.leases().len(), 4);
            }
            let both = json!([{"containerID": "c1", "ifname": "eth0"},
                              {"containerID": "c2", "ifname": "eth0"}]);
            gc(json!({"cni.dev/valid-attachments": both})).ok();
            assert_eq!(net.leases().len(), 4);
            let c1_only = json!([{"containerID": "c1", "ifname": "eth0"},
                                 {"containerID": "c2", "ifname": "eth1"}]);
            gc(json!({"cni.dev/valid-attachments": c1_only})).ok();
            assert_eq!(net.leases(), c1, "c2's eth0 is stale although c2 has a valid eth1");
            for nobody in [json!([]), json!(null)] {
                let mut conf = net.conf.clone();
                conf["cni.dev/valid-attachments"] = nobody;
                net.call("GC", "").without("CNI_CONTAINERID").conf(&conf).ok();
                assert_eq!(net.leases(), [""; 0]);
                net.del(&one);
                net.add(&one);
            }
            assert!(self.reaches(net, &net.leases()[0]), "the network works after GC");
            gc(json!({"cni.dev/attachments": []})).ok();
            assert_eq!(net.leases(), [""; 0], "the key of the text of 1.1.0");
            net.del(&one);
            net.call("DEL", "c2").netns(&two.path()).ok();
        });
    }

    /// STATUS succeeds on 1.1.0, changes nothing, and calls the IPAM plugin.
    pub(crate) fn status(&self) {
        self.in_versions(&["1.1.0"], |net| {
            let status = || net.call("STATUS", "").without("CNI_CONTAINERID");
            status().ok();
            assert!(!crate::support::node::exists(net.node.path("leases")));
            let one = Container::new();
            let full = json!({"ipam": net.node.host_local(&["10.1.2.0/30"])});
            net.with(&full).add(&one);
            let error = net.with(&full).call("STATUS", "").error();
            let msg = "no IP addresses available in range set: 10.1.2.1-10.1.2.2";
            assert_eq!(error.brief(), (50, msg));
            net.with(&full).del(&one);
            net.with(&full).call("STATUS", "").ok();
        });
    }
}
