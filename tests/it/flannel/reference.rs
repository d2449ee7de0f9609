//! Records of the reference, which keeps one for each container and tells no interface.

use std::fs;

use super::{kept, simple};
use crate::node::{Container, Node};

#[test]
fn an_attachment_of_the_reference_is_deleted_by_ours() {
    let node = Node::new();
    let net = simple(&node);
    let container = Container::new();
    let prev = net.add(&container);
    // What it would have left: the same file, and nothing beside it.
    fs::remove_dir_all(node.path("flannel").join(".cnibox")).unwrap();
    assert_eq!(kept(&node), ["./c1"]);
    net.check(&container, &prev).ok();
    net.del(&container);
    assert_eq!((kept(&node), net.leases()), (vec![], vec![]));
    assert!(!container.try_sh("ip link show eth0"));
}

/// The reference's DEL as far as files go: it reads, hands on, and removes.
#[test]
fn an_attachment_of_ours_is_deleted_by_the_reference() {
    let node = Node::new();
    let net = simple(&node);
    let container = Container::new();
    net.add(&container);
    let file = node.path("flannel").join("c1");
    let conf = fs::read(&file).unwrap();
    let call = node.call("bridge", "DEL").stdin(conf).id("c1").netns(&container.path());
    call.ok();
    fs::remove_file(&file).unwrap();
    assert_eq!(net.leases(), [""; 0]);
    assert!(!container.try_sh("ip link show eth0"));
    // Back to ours: what is left beside it does no harm.
    net.del(&container);
    net.add(&container);
    assert_eq!(kept(&node), ["./.cnibox/c1", "./c1"]);
    net.del(&container);
    assert_eq!(kept(&node), [""; 0]);
}
