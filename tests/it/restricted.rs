//! Nodes that refuse plugins something: parameters mounted read-only, a kernel without IPv6, a user
//! namespace.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use serde_json::json;

use crate::support::net::{Net, dual_ipam};
use crate::support::node::{Container, Node, executable};
use crate::support::traffic::Place;

/// Runs a plugin with read-only kernel parameters.
const READ_ONLY: &str = "mount -o bind,ro /proc/sys /proc/sys && exec \"$0\"";

/// Runs a plugin without parameters of IPv6.
const WITHOUT_IPV6: &str = "mount -t tmpfs tmpfs /proc/sys/net/ipv6 && exec \"$0\"";

#[test]
fn read_only_parameters_with_the_right_value_are_accepted() {
    let node = Node::new();
    let net =
        Net::new(&node, "bridge", "1.0.0", &json!({"isGateway": true, "ipam": dual_ipam(&node)}));
    let add = |container: &Container, id: &str| {
        net.call("ADD", id).netns(&container.path()).in_script(READ_ONLY)
    };
    let error = add(&Container::new(), "c1").error();
    assert!(error.msg.contains("sysctl net/ipv4/ip_forward=1: read-only file system"), "{error:?}");
    node.sh("ip link del cni0; cd /proc/sys/net && echo 1 > ipv4/ip_forward && \
             echo 1 > ipv6/conf/all/forwarding && echo 0 > ipv6/conf/default/accept_ra");

    let container = Container::new();
    let added = add(&container, "c1").run();
    assert_eq!(added.status, Some(0), "{added:?}");
    let said = "read-only file system; its file system is mounted read-only: mount it read-write; \
                IPv6 addresses are lost if the interface is set down";
    assert_eq!(added.stderr.lines().count(), 1, "{added:?}");
    assert!(
        added.stderr.contains("keep_addr_on_down=1") && added.stderr.trim().ends_with(said),
        "{added:?}"
    );
    assert!(container.pings("10.1.2.1") && container.reaches("2001:db8:1::1"));

    let quiet = Container::new();
    quiet.sh("sh -c 'echo 1 > /proc/sys/net/ipv6/conf/default/keep_addr_on_down'");
    let added = add(&quiet, "c2").run();
    assert_eq!((added.status, added.stderr.as_str()), (Some(0), ""));
}

#[test]
fn a_kernel_without_ipv6_causes_no_warning() {
    for plugin in ["bridge", "ptp"] {
        let (node, container) = (Node::new(), Container::new());
        let ipam = node.host_local(&["10.1.2.0/24"]);
        let net = Net::new(&node, plugin, "1.0.0", &json!({"isGateway": true, "ipam": ipam}));
        for verb in ["ADD", "DEL"] {
            let outcome = net.on(verb, &container).in_script(WITHOUT_IPV6).run();
            assert_eq!((outcome.status, outcome.stderr.as_str()), (Some(0), ""), "{plugin} {verb}");
        }
    }
}

/// Attaches and detaches a container in a user namespace whose `/run` belongs to another user. `$0`
/// is the directory of plugins.
const ROOTLESS: &str = r#"
set -e
ip link set lo up
unshare -n sleep 60 & trap "kill $!" EXIT
sleep 0.3
export CNI_PATH=$0 CNI_CONTAINERID=c1 CNI_IFNAME=eth0 CNI_NETNS=/proc/$!/ns/net
keys='"cniVersion":"1.0.0","name":"pods"'
bridge='{'$keys',"type":"bridge","isGateway":true,"ipMasq":true,"ipMasqBackend":"nftables","ipam":{"type":"host-local",
"dataDir":"'$0'/leases","ranges":[[{"subnet":"10.1.2.0/24"}],[{"subnet":"fd00:1::/64"}]]}'
portmap='{'$keys',"type":"portmap","backend":"nftables","runtimeConfig":{"portMappings":[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}]}'
firewall='{'$keys',"type":"firewall","backend":"nftables"'
prev=$(CNI_COMMAND=ADD $0/bridge <<X
$bridge}
X
)
for conf in portmap firewall; do
    eval "text=\$$conf"
    for verb in ADD DEL; do echo "$text,\"prevResult\":$prev}" | CNI_COMMAND=$verb $0/$conf; done
done
echo "$bridge,\"prevResult\":$prev}" | CNI_COMMAND=DEL $0/bridge
"#;

#[test]
fn a_rootless_runtime_gets_no_warnings() {
    let node = Node::new();
    // For a user who may read neither the directory of the test nor the one of the build.
    let directory = node.sh("mktemp -d").trim().to_owned();
    fs::copy(executable(), format!("{directory}/cnibox")).unwrap();
    fs::set_permissions(&directory, fs::Permissions::from_mode(0o755)).unwrap();
    for name in ["bridge", "portmap", "firewall", "host-local"] {
        std::os::unix::fs::symlink("cnibox", format!("{directory}/{name}")).unwrap();
    }
    node.sh(&format!("mkdir {directory}/leases && chown 65534:65534 {directory}/leases"));
    let user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "unshare", "-rnm"];
    let call = node.tool("cnitool", &[]).program(&directory);
    let outcome = call.under(&[&user[..], &["sh", "-c", ROOTLESS]].concat()).run();
    fs::remove_dir_all(&directory).unwrap();
    assert_eq!((outcome.status, outcome.stderr.as_str()), (Some(0), ""), "{outcome:?}");
}
