//! Selection of the device by name, MAC, path, PCI function or auxiliary device, and functions
//! bound to a userspace driver. Files in the plugin's own mount namespace simulate sysfs.

use serde_json::{Value, json};

use super::{MAC, is_back, plug, simple};
use crate::support::node::{Call, Container, Node};

#[test]
fn a_device_is_found_by_alternative_name_and_by_mac() {
    for keys in [
        json!({"device": "a-long-name-of-hd0"}),
        json!({"device": null, "hwaddr": MAC}),
        json!({"device": null, "hwaddr": "02-00-00-00-00-D0"}),
        json!({"device": null, "HWaddr": "0200.0000.00d0"}),
    ] {
        let (node, container) = (Node::new(), Container::new());
        plug(&node);
        let before = node.snapshot();
        let net = simple(&node, &keys);
        let result = net.add(&container);
        assert_eq!(result["interfaces"][0]["mac"], MAC);
        assert_eq!(container.ip("link show eth0")[0]["ifalias"], "hd0");
        net.check(&container, &result).ok();
        net.del(&container);
        is_back(&node, &before);
    }
}

#[test]
fn an_ambiguous_mac_is_refused() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    node.sh(&format!("ip link add br9 address {MAC} type bridge"));
    node.sh(&format!("ip link add link hd0 name mv9 address {MAC} type macvlan mode bridge"));
    let net = simple(&node, &json!({"device": null, "hwaddr": MAC}));
    // Links on top of other links (the macvlan, the bridge) are not candidates.
    net.add(&container);
    assert_eq!(container.ip("link show eth0")[0]["ifalias"], "hd0");
    net.del(&container);
    node.sh(&format!("ip link add twin address {MAC} type veth peer name twin9"));
    let msg =
        format!("failed to find host device: several links have the address {MAC}: twin, hd0");
    let error = net.on("ADD", &container).error();
    let either = msg.replace("twin, hd0", "hd0, twin");
    assert!(error.msg == msg || error.msg == either, "{error:?}");
}

/// The call with `/sys/bus` replaced by files; it does not need the namespace's sysfs.
fn with_sysfs(call: &Call, commands: &str) -> Call {
    let script = format!(
        "set -e; mount -t tmpfs none /sys/bus; cd /sys/bus; {commands}; exec \"$0\" \"$@\""
    );
    call.clone().in_script(&script)
}

#[test]
fn a_device_is_found_by_pci_address() {
    const TREE: &str = "mkdir -p pci/devices/0000:3d:00.1/net/hd0";
    const VIRTIO: &str = "mkdir -p pci/devices/0000:3d:00.1/virtio4/net/hd0";
    const SHADOWED: &str = "mkdir -p pci/devices/0000:3d:00.1/net/{a0,hd0}";
    let by_key = json!({"device": null, "pciBusID": "0000:3d:00.1"});
    let by_id = json!({"runtimeConfig": {"deviceID": "0000:3d:00.1"}, "device": "other"});
    for keys in [by_key, by_id] {
        for tree in [TREE, VIRTIO, SHADOWED] {
            let (node, container) = (Node::new(), Container::new());
            plug(&node);
            let before = node.snapshot();
            let net = simple(&node, &keys);
            let tree = tree.replace("{a0,hd0}", "a0; mkdir pci/devices/0000:3d:00.1/net/hd0");
            let result = with_sysfs(&net.on("ADD", &container), &tree).result();
            let entry = &result["interfaces"][0];
            assert_eq!((&entry["mac"], &entry["pciID"]), (&json!(MAC), &json!("0000:3d:00.1")));
            let check = net.check(&container, &result);
            with_sysfs(&check, "mkdir -p pci/devices/0000:3d:00.1").ok();
            // The PCI function may have been unplugged meanwhile.
            net.del(&container);
            is_back(&node, &before);
        }
    }
}

#[test]
fn a_link_that_does_not_match_sysfs_is_refused() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let before = node.snapshot();
    let net = simple(&node, &json!({"device": null, "pciBusID": "0000:3d:00.1"}));
    let directory = "pci/devices/0000:3d:00.1/net/hd0";
    for file in ["echo 4711 > D/ifindex", "echo 02:00:00:00:00:77 > D/address"] {
        let tree = format!("mkdir -p {directory}; {}", file.replace('D', directory));
        let error = with_sysfs(&net.on("ADD", &container), &tree).error();
        let msg = "failed to find host device: link hd0 not found in the host's namespace";
        assert_eq!(error.brief(), (999, msg));
        is_back(&node, &before);
    }
}

#[test]
fn a_device_is_found_by_auxiliary_device() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    let before = node.snapshot();
    let keys = json!({"device": null, "runtimeConfig": {"deviceID": "mlx5_core.sf.4"}});
    let net = simple(&node, &keys);
    let tree = "mkdir -p auxiliary/devices/mlx5_core.sf.4/net/hd0";
    let call = |verb| with_sysfs(&net.on(verb, &container).ifname("net1"), tree);
    let result = call("ADD").result();
    let entry = json!({"name": "net1", "mac": MAC, "mtu": 1400, "sandbox": container.path()});
    assert_eq!(result["interfaces"], json!([entry]));
    call("DEL").ok();
    is_back(&node, &before);
}

#[test]
fn a_device_is_found_by_kernel_path() {
    let (node, container) = (Node::new(), Container::new());
    plug(&node);
    node.sh("ip link set hd0 down; ip link set hd0 name a00; ip link set a00 up");
    let net = simple(&node, &json!({"device": null, "kernelpath": "/sys/devices/virtual/"}));
    // A sysfs mount of this network namespace, with its first virtual device.
    let script = "mount -t sysfs none /sys && exec \"$0\" \"$@\"";
    let result = net.on("ADD", &container).in_script(script).result();
    assert_eq!(result["interfaces"][0]["mac"], MAC);
    assert_eq!(container.ip("link show eth0")[0]["ifalias"], "a00");
    net.on("DEL", &container).ok();
    assert_eq!(node.ip("link show a00")[0]["address"], MAC);
}

#[test]
fn a_device_with_a_userspace_driver_is_only_reported() {
    for driver in ["vfio-pci", "uio_pci_generic", "igb_uio"] {
        let (node, container) = (Node::new(), Container::new());
        plug(&node);
        let before = (node.snapshot(), container.snapshot(&node));
        let tree = format!(
            "mkdir -p pci/devices/0000:3d:00.1; ln -s ../../drivers/{driver} pci/devices/0000:3d:00.1/driver"
        );
        let net = simple(&node, &json!({"device": null, "pciBusID": "0000:3d:00.1"}));
        let result = with_sysfs(&net.on("ADD", &container), &tree).result();
        let entry = json!({"name": "eth0", "pciID": "0000:3d:00.1", "sandbox": container.path()});
        assert_eq!(result["interfaces"], json!([entry]));
        assert_eq!(result["ips"][0]["address"], "10.1.2.2/24");
        assert_eq!(result["ips"][0]["interface"], 0);
        with_sysfs(&net.check(&container, &result), &tree).ok();
        // An unrelated link `eth0` in the container stays.
        container.sh("ip link add eth0 type veth peer name eth9");
        with_sysfs(&net.on("DEL", &container), &tree).ok();
        assert!(container.try_sh("ip link show eth0"));
        is_back(&node, &before.0);
    }
}

#[test]
fn a_userspace_device_has_only_a_name_in_the_result() {
    let (node, container) = (Node::new(), Container::new());
    let tree =
        "mkdir -p pci/devices/0000:3d:00.1; ln -s x/vfio-pci pci/devices/0000:3d:00.1/driver";
    for version in ["0.3.0", "1.0.0"] {
        let keys = json!({"pciBusID": "0000:3d:00.1"});
        let net = crate::support::net::Net::new(&node, "host-device", version, &keys);
        let result = with_sysfs(&net.on("ADD", &container), tree).result();
        let entry: Value = json!([{"name": "eth0", "sandbox": container.path()}]);
        assert_eq!(result["interfaces"], entry);
        with_sysfs(&net.on("DEL", &container), tree).ok();
    }
}
