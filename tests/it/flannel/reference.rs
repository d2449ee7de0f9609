//! Records of the reference: one per container, without the interface.

use std::fs;

use super::{kept, simple};
use crate::support::node::{Container, Node};

#[test]
fn an_attachment_of_the_reference_is_deleted_by_ours() {
    let node = Node::new();
    let net = simple(&node);
    let container = Container::new();
    let prev = net.add(&container);
    // The reference leaves the same record without the note.
    fs::remove_dir_all(node.state("flannel").join(".cnibox")).unwrap();
    assert_eq!(kept(&node), ["./c1"]);
    net.check(&container, &prev).ok();
    net.del(&container);
    assert_eq!((kept(&node), net.leases()), (vec![], vec![]));
    assert!(!container.try_sh("ip link show eth0"));
}

/// The file operations of the reference's DEL: read the record, delegate, remove the record.
#[test]
fn an_attachment_of_ours_is_deleted_by_the_reference() {
    let node = Node::new();
    let net = simple(&node);
    let container = Container::new();
    net.add(&container);
    let file = node.state("flannel").join("c1");
    let conf = fs::read(&file).unwrap();
    let call = node.call("bridge", "DEL").stdin(conf).id("c1").netns(&container.path());
    call.ok();
    fs::remove_file(&file).unwrap();
    assert_eq!(net.leases(), [""; 0]);
    assert!(!container.try_sh("ip link show eth0"));
    // The remaining note does not affect later calls.
    net.del(&container);
    net.add(&container);
    assert_eq!(kept(&node), ["./.cnibox/c1", "./c1"]);
    net.del(&container);
    assert_eq!(kept(&node), [""; 0]);
}
