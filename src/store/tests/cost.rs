//! What commands cost, whatever the number of leases.

use std::time::Instant;

use super::*;

/// The point of the index: how many leases three commands read, and the microseconds that they take
/// (the median of `rounds`), with `n` leases of others around.
fn command_cost(n: u32, rounds: usize) -> (usize, u128) {
    let scene = Scene::new();
    for i in 0..n {
        let ip = Ipv4Addr::from_bits(0x0a01_0000 + i);
        scene.write(&ip.to_string(), format!("other{i}\r\neth0"));
    }
    drop(scene.open());
    let round = || {
        assert_eq!(scene.owned(&owner(1)), ips(&[]));
        scene.reserve("10.0.0.2", &owner(1));
        assert_eq!(scene.open().release(&owner(1)).unwrap(), ips(&["10.0.0.2"]));
        assert_eq!(scene.owned(&owner(1)), ips(&[]));
    };
    let reads = reads(round);
    let mut times: Vec<u128> = (0..rounds)
        .map(|_| {
            let start = Instant::now();
            round();
            start.elapsed().as_micros()
        })
        .collect();
    times.sort_unstable();
    (reads, times[times.len() / 2])
}

#[test]
fn cost_does_not_grow_with_the_leases_of_others() {
    let (few, many) = (command_cost(10, 1), command_cost(2_000, 1));
    assert_eq!((few.0, many.0), (1, 1), "only the lease that is released is read");
}

#[test]
#[ignore = "a measurement: cargo test --release -- --ignored --nocapture measure"]
fn measure() {
    for n in [10, 20_000] {
        let (reads, micros) = command_cost(n, 200);
        println!("{n} leases: ask, reserve, release, ask in {micros} us, {reads} lease read");
    }
    let scene = Scene::new();
    for i in 0..20_000 {
        scene.write(&Ipv4Addr::from_bits(0x0a01_0000 + i).to_string(), format!("other{i}\r\neth0"));
    }
    for _ in 0..2 {
        scene.write("by-the-reference", "");
        fs::remove_file(scene.path("by-the-reference")).unwrap();
        let start = Instant::now();
        drop(scene.open());
        println!("index of 20000 leases built in {} ms", start.elapsed().as_millis());
    }
}
