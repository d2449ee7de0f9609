//! What commands cost, whatever the number of leases. The time is measured by `make bench`.

use super::*;

/// How many leases are read by asking, reserving, releasing and asking again, with `n` leases of
/// others around.
fn leases_read(n: u32) -> usize {
    let scene = Scene::new();
    for i in 0..n {
        let ip = Ipv4Addr::from_bits(0x0a01_0000 + i);
        scene.write(&ip.to_string(), format!("other{i}\r\neth0"));
    }
    drop(scene.open());
    reads(|| {
        assert_eq!(scene.owned(&owner(1)), ips(&[]));
        scene.reserve("10.0.0.2", &owner(1));
        assert_eq!(scene.open().release(&owner(1)).unwrap(), ips(&["10.0.0.2"]));
        assert_eq!(scene.owned(&owner(1)), ips(&[]));
    })
}

#[test]
fn cost_does_not_grow_with_the_leases_of_others() {
    let (few, many) = (leases_read(10), leases_read(2_000));
    assert_eq!((few, many), (1, 1), "only the lease that is released is read");
}
