//! As `BuildKit` calls: its image has the plugins under names of its own, and each step of a build
//! has a new namespace.

use std::fs;
use std::os::unix::fs::symlink;

use serde_json::{Value, json};

use crate::support::node::{Call, Container, Node, assert_unchanged, executable};

/// The plugins of its image.
const NAMES: [&str; 4] = ["bridge", "loopback", "host-local", "firewall"];

/// A directory with these names only, the network that buildkitd writes for its bridge mode, and a
/// runtime.
struct BuildKit {
    node: Node,
}

impl BuildKit {
    fn new() -> BuildKit {
        let node = Node::new();
        fs::create_dir(node.path("image")).unwrap();
        for name in NAMES {
            let link = node.path("image").join(format!("buildkit-cni-{name}"));
            symlink(executable(), link).unwrap();
        }
        fs::create_dir(node.path("net.d")).unwrap();
        let list = json!({"cniVersion": "1.0.0", "name": "buildkit", "plugins": [
            {"type": "buildkit-cni-loopback"},
            {"type": "buildkit-cni-bridge", "bridge": "buildkit0", "isDefaultGateway": true, "ipMasq": true,
                "ipam": {"type": "buildkit-cni-host-local", "dataDir": node.path("leases"),
                    "ranges": [[{"subnet": "10.10.0.0/24"}]]}},
            {"type": "buildkit-cni-firewall", "ingressPolicy": "same-bridge"},
        ]});
        fs::write(node.path("net.d/buildkit.conflist"), list.to_string()).unwrap();
        BuildKit { node }
    }

    fn runtime(&self, verb: &str, step: usize, netns: &str) -> Call {
        let [cache, image, conf] =
            ["cache", "image", "net.d"].map(|name| self.node.path(name).display().to_string());
        let id = format!("step{step}");
        let args =
            ["cnitool", verb, "buildkit", netns, "--container-id", &id, "--cache-dir", &cache];
        let directories = ["--plugin-path", &image, "--conf-dir", &conf];
        self.node.cnibox(&[&args[..], &directories].concat())
    }
}

#[test]
fn buildkit_names_select_the_right_plugins() {
    let kit = BuildKit::new();
    for name in NAMES {
        let program = kit.node.path("image").join(format!("buildkit-cni-{name}"));
        let outcome = kit.node.tool(name, &[]).program(&program).run();
        assert_eq!(outcome.status, Some(0), "{name}: {outcome:?}");
        assert!(outcome.stderr.starts_with(&format!("CNI {name} plugin v")), "{outcome:?}");
    }
    // A name that only ends in letters of a plugin's is refused, as is one that ends in a tool's.
    for name in ["xbridge", "my-local", "my-repair"] {
        let program = kit.node.path("image").join(name);
        symlink(executable(), &program).unwrap();
        let outcome = kit.node.tool(name, &[]).program(&program).run();
        assert_eq!(outcome.status, Some(1), "{name}: {outcome:?}");
        assert!(outcome.stderr.contains(&format!("no applet \"{name}\"")), "{outcome:?}");
    }
}

#[test]
fn many_build_steps_leave_nothing() {
    let kit = BuildKit::new();
    // The bridge and the tables of the packet filter stay.
    let first = Container::new();
    kit.runtime("add", 0, &first.path()).printed();
    kit.runtime("del", 0, &first.path()).printed();
    let before = kit.node.snapshot();
    for step in 1..=20 {
        let namespace = Container::new();
        let result: Value = kit.runtime("add", step, &namespace.path()).result();
        let address = result["ips"][0]["address"].as_str().unwrap();
        assert!(address.starts_with("10.10.0."), "{result}");
        assert!(namespace.pings("10.10.0.1"), "step {step}");
        namespace.sh("ip -4 addr show dev lo | grep -q 127.0.0.1");
        kit.runtime("del", step, &namespace.path()).printed();
    }
    assert_unchanged(&before, &kit.node.snapshot());
    assert_eq!(kit.node.leases("buildkit"), [""; 0]);
}
