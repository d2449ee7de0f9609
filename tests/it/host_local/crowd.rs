//! Thousands of leases: concurrent calls, and pools with a single free address.

use std::collections::HashSet;
use std::fs;
use std::net::Ipv4Addr;
use std::sync::Barrier;

use serde_json::json;

use super::{del, net, one_set};
use crate::support::node::Node;
use crate::support::strace;

/// Runs `work` for 0..32 in as many threads at the same time. The threads, and so their child
/// processes, inherit the caller's namespaces.
fn at_once<T: Send>(work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let (start, work) = (Barrier::new(32), &work);
    let wait = |n| {
        start.wait();
        work(n)
    };
    let wait = &wait;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..32).map(|n| scope.spawn(move || wait(n))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Creates lease files of the reference for `count` addresses from 10.77.0.2 on, except the offsets
/// in `free`.
fn crowd(node: &Node, count: u32, free: &[u32]) {
    let store = node.path("leases/net");
    fs::create_dir_all(&store).unwrap();
    for n in (0..count).filter(|n| !free.contains(n)) {
        let ip = Ipv4Addr::from_bits(0x0a4d_0002 + n);
        fs::write(store.join(ip.to_string()), format!("crowd-{n}\r\neth0")).unwrap();
    }
}

#[test]
fn thirty_two_concurrent_calls_work_on_5000_leases() {
    let node = Node::new();
    let net = one_set(&node, &["10.77.0.0/16"]);
    crowd(&node, 5_000, &[]);
    let ids: Vec<_> = (0..32).map(|n| format!("c{n}")).collect();
    let addresses = at_once(|n| {
        let result = net.call("ADD", &ids[n]).netns("/x").result();
        result["ips"][0]["address"].as_str().unwrap().to_owned()
    });
    assert_eq!(addresses.iter().collect::<HashSet<_>>().len(), 32);
    assert_eq!(net.leases().len(), 5_032);
    at_once(|n| match n % 3 {
        0 => net.call("CHECK", &ids[n]).netns("/x").ok(),
        1 => del(&net, &ids[n]),
        _ => net.call("STATUS", "").ok(),
    });
    at_once(|n| del(&net, &ids[n]));
    assert_eq!(net.leases().len(), 5_000);
}

#[test]
fn the_last_free_address_of_a_large_pool_is_found_quickly() {
    const FREE: u32 = 41_234;
    let node = Node::new();
    let net = one_set(&node, &["10.77.0.0/16"]);
    // 10.77.0.2 to 10.77.255.254.
    crowd(&node, 65_533, &[FREE]);
    let add = || net.call("ADD", "c1").netns("/x");
    let ip = Ipv4Addr::from_bits(0x0a4d_0002 + FREE);
    let address = json!(format!("{ip}/16"));
    assert_eq!(add().result()["ips"][0]["address"], address, "the first one writes the journal");
    for last in ["10.77.0.2", "10.77.255.254", &ip.to_string(), "10.77.161.0", "10.77.161.100"] {
        del(&net, "c1");
        fs::write(node.path("leases/net/last_reserved_ip.0"), last).unwrap();
        let cost = strace::cost(&node, &add());
        println!("the last free address of a /16 after {last}: {cost:?}");
        // One lookup per address would be 65,000 system calls; the journal has 7 MB, a directory
        // listing 2 MB.
        assert!(cost.calls < 1_000 && cost.bytes < 10_000_000, "after {last}: {cost:?}");
        assert_eq!(net.leases().len(), 65_533, "after {last}");
    }
}

#[test]
fn large_pools_are_as_fast_as_small_ones() {
    let node = Node::new();
    for subnet in ["2001:db8:1::/64", "2001:db8:100::/56", "2001:db8:2::/48"] {
        let net = net(&node, "1.1.0", &json!({"ranges": [[{"subnet": subnet}]]}));
        for n in 0..70 {
            net.call("ADD", &format!("c{n}")).netns("/x").result();
        }
        net.call("STATUS", "").ok();
        assert_eq!(net.leases().len(), 70, "{subnet}");
        let cost = strace::cost(&node, &net.call("ADD", "c70").netns("/x"));
        assert!(cost.calls < 500, "{subnet}: {cost:?}");
        (0..71).for_each(|n| del(&net, &format!("c{n}")));
    }
}
