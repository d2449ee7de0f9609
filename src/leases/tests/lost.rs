//! Leases of this program that lost their text: by a power cut, which ended their containers, or by
//! a write that failed later, which ended nothing.

use super::*;
use crate::attachment::EndedBy;

/// Takes the text of a lease, as the file system does it: a file of this length, whose times stay.
fn lose_text(scene: &Scene, address: &str, length: u64) {
    let file = fs::File::options().write(true).open(scene.path(address)).unwrap();
    let time = file.metadata().unwrap().modified().unwrap();
    file.set_len(0).and_then(|()| file.set_len(length)).unwrap();
    file.set_modified(time).unwrap();
}

/// The addresses that the first command of a boot leaves taken.
fn taken_in(scene: &Scene, boot: &str) -> HashSet<IpAddr> {
    drop(scene.open_in_boot(boot));
    scene.open_in_boot(boot).taken_addresses().unwrap()
}

fn set(addresses: &[&str]) -> HashSet<IpAddr> {
    HashSet::from_iter(ips(addresses))
}

#[test]
fn a_lease_that_was_lost_in_a_power_cut_is_no_reservation() {
    let scene = Scene::new();
    for n in 2..6 {
        scene.reserve(&format!("10.0.0.{n}"), owner(n));
    }
    lose_text(&scene, "10.0.0.2", 0);
    lose_text(&scene, "10.0.0.3", 8);
    scene.write("10.0.0.4", "");
    for _ in 0..2 {
        assert_eq!(taken_in(&scene, "next"), set(&["10.0.0.4", "10.0.0.5"]));
    }
}

#[test]
fn the_lines_of_lost_leases_may_be_lost_too() {
    let scene = Scene::new();
    scene.reserve("10.0.0.2", owner(2));
    let before = scene.text();
    scene.reserve("10.0.0.3", owner(3));
    lose_text(&scene, "10.0.0.3", 0);
    fs::write(scene.journal_file(), before).unwrap();
    assert_eq!(taken_in(&scene, "next"), set(&["10.0.0.2"]));
}

#[test]
fn a_lease_that_loses_its_text_within_a_boot_is_written_again() {
    let scene = Scene::new();
    let end = HostVeth { netns: 1, index: 17, labelled: true, peer: None };
    for (n, length) in [(2, 0), (3, 8), (4, 100)] {
        let address = format!("10.0.0.{n}");
        scene.attach(&address, owner(n), end);
        lose_text(&scene, &address, length);
        // A command that changes nothing knows whose it is.
        let listing = LeaseListing::open_existing(scene.root.path(), NETWORK).unwrap().unwrap();
        assert_eq!(listing.list_reservations(), [], "{length} bytes");
        assert!(listing.lease_statuses().iter().any(|status| status.lease.id == owner(n).id));
        assert_eq!(find_lease(scene.root.path(), NETWORK, ip(&address)).unwrap().id, owner(n).id);
    }
    let text = scene.text();
    assert_eq!(scene.open().remove_reservations(|_| true).unwrap(), []);
    let (released, _) = scene.open().retain_leases(|lease| lease.id != owner(4).id, true).unwrap();
    assert_eq!(released, [AddressLease::new(ip("10.0.0.4"), owner(4))]);
    for n in 2..4 {
        let lease = fs::read_to_string(scene.path(&format!("10.0.0.{n}"))).unwrap();
        assert_eq!(lease, format!("container{n}\r\neth0"));
    }
    // The entries stay valid, also in a new journal.
    scene.write("10.0.0.9", "container9\r\neth0");
    drop(scene.open());
    for line in
        text.lines().filter(|line| line.contains(" 10.0.0.2 ") || line.contains(" 10.0.0.3 "))
    {
        assert!(scene.text().contains(line), "{line}: {}", scene.text());
    }
    lose_text(&scene, "10.0.0.2", 0);
    assert_eq!(scene.open().release_attachment(owner(2)).unwrap(), ips(&["10.0.0.2"]));
}

#[test]
fn a_lost_lease_that_nobody_knows_reserves_its_address() {
    type Loss = fn(&Scene);
    let losses: [(&str, Loss); 3] = [
        ("no journal", |scene| fs::remove_dir_all(scene.path(".cnibox")).unwrap()),
        ("no first line", |scene| fs::write(scene.journal_file(), "\0\0\0").unwrap()),
        ("of another machine", |scene| {
            let text = scene.text().replacen("machine", "another", 1);
            fs::write(scene.journal_file(), text.lines().next().unwrap()).unwrap();
        }),
    ];
    for (what, lose) in losses {
        let scene = Scene::new();
        scene.reserve("10.0.0.2", owner(2));
        lose_text(&scene, "10.0.0.2", 0);
        lose(&scene);
        // Older than the first line of the next journal.
        stamp(&scene.path("10.0.0.2"), 1000);
        for boot in ["next", "third"] {
            assert_eq!(taken_in(&scene, boot), set(&["10.0.0.2"]), "{what}");
        }
        let listing = LeaseListing::open_existing(scene.root.path(), NETWORK).unwrap().unwrap();
        let reserved = [AddressReservation { ip: ip("10.0.0.2"), empty: true }];
        assert_eq!(listing.list_reservations(), reserved, "{what}");
        assert_eq!(scene.open().remove_reservations(|_| true).unwrap(), reserved, "{what}");
    }
}

/// A board without a clock of its own, before the time is set.
#[test]
fn a_lost_lease_stays_while_the_clock_is_wrong() {
    let scene = Scene::new();
    scene.reserve("10.0.0.2", owner(2));
    lose_text(&scene, "10.0.0.2", 0);
    BOOT_START.set(Some(0));
    assert_eq!(taken_in(&scene, "next"), set(&["10.0.0.2"]));
    BOOT_START.set(Some(i64::MAX));
    let gone = scene.open_in_boot("next").reclaim_ended(|_, gone| gone).unwrap();
    let gone: Vec<_> = gone.into_iter().map(|gone| (gone.lease, gone.why)).collect();
    assert_eq!(gone, [(AddressLease::new(ip("10.0.0.2"), owner(2)), EndedBy::EarlierBoot)]);
}
