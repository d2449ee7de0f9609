//! Leases of containers that are gone: of an earlier boot, of a namespace that is no more; and
//! all those that must not be taken for such.

use crate::attachment::Gone;
use std::time::{Duration, SystemTime};

use super::*;
use crate::netns::{Netns, NetnsId, isolate};

/// An owner that lives in `ns`.
fn tenant(n: usize, ns: &Netns) -> Owner {
    let id = NetnsId::at(ns.path());
    assert!(id.is_some_and(|id| id.ctime > 0));
    owner(n).with_netns(id)
}

/// What is reclaimed in a boot.
fn healed(scene: &Scene, boot: &str) -> Vec<(IpAddr, Gone)> {
    let gone = scene.open_in_boot(boot).reclaim_dead(|_, gone| gone).unwrap();
    gone.into_iter().map(|gone| (gone.lease.ip, gone.why)).collect()
}

fn left(scene: &Scene) -> Vec<IpAddr> {
    let mut left: Vec<_> = scene.open().leases().unwrap().iter().map(|lease| lease.ip).collect();
    left.sort();
    left
}

#[test]
fn a_lease_of_an_earlier_boot_is_reclaimed_whoever_made_it() {
    let scene = Scene::new();
    scene.reserve("10.0.0.2", &owner(1));
    scene.write("10.0.0.3", "container2\r\neth0");
    // The reference's is seen in its boot, by any command.
    drop(scene.open());
    assert_eq!(healed(&scene, BOOT), []);
    let mut store = scene.open_in_boot("next");
    assert!(store.reserve(ip("10.0.0.4"), &owner(3)).unwrap());
    drop(store);
    let gone = [ip("10.0.0.2"), ip("10.0.0.3")].map(|ip| (ip, Gone::EarlierBoot));
    assert_eq!(healed(&scene, "next"), gone);
    assert_eq!(healed(&scene, "next"), []);
    assert_eq!(healed(&scene, "third"), [(ip("10.0.0.4"), Gone::EarlierBoot)]);
}

#[test]
fn the_mark_of_an_earlier_boot_outlasts_what_others_do() {
    let scene = Scene::new();
    scene.reserve("10.0.0.2", &owner(1));
    for round in 0..3 {
        drop(scene.open_in_boot("next"));
        // The reference comes and goes: the journal is written anew.
        let name = format!("10.0.1.{round}");
        scene.write(&name, "container9\r\neth0");
    }
    assert_eq!(healed(&scene, "next"), [(ip("10.0.0.2"), Gone::EarlierBoot)]);
}

#[test]
fn leases_of_another_machine_are_in_doubt() {
    let scene = Scene::new();
    let on = |machine| MACHINE.set(Some(machine));
    on("one");
    scene.reserve("10.0.0.2", &owner(1));
    scene.write("10.0.0.3", "container2\r\neth0");
    let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1);
    let file = fs::File::options().write(true).open(scene.path("10.0.0.3")).unwrap();
    file.set_modified(long_ago).unwrap();
    drop(file);
    on("two");
    assert_eq!(healed(&scene, "two-a"), []);
    assert!(scene.open_in_boot("two-a").reserve(ip("10.0.0.4"), &owner(4)).unwrap());
    // Also in later boots; its own lease is of an earlier one.
    let gone = [(ip("10.0.0.4"), Gone::EarlierBoot)];
    assert_eq!(healed(&scene, "two-b"), gone);
    assert_eq!(healed(&scene, "two-c"), []);
    on("one");
    assert_eq!(healed(&scene, "one-b"), [], "another machine has had them since");
    assert_eq!(scene.open_in_boot("one-b").release(&owner(1)).unwrap(), ips(&["10.0.0.2"]));
}

#[test]
fn a_lease_that_was_made_anew_is_not_the_one_that_was_noted() {
    let scene = Scene::new();
    let later = SystemTime::now() + Duration::from_secs(5);
    for again in ["container1\r\neth0", "container1", "container2\r\neth0"] {
        scene.reserve("10.0.0.2", &owner(1));
        scene.reserve("10.0.0.3", &owner(1));
        // The reference, in the next boot and before any command of ours.
        fs::remove_file(scene.path("10.0.0.2")).unwrap();
        scene.write("10.0.0.2", again);
        let file = fs::File::options().write(true).open(scene.path("10.0.0.2")).unwrap();
        file.set_modified(later).unwrap();
        assert_eq!(healed(&scene, "next"), [(ip("10.0.0.3"), Gone::EarlierBoot)], "{again:?}");
        fs::remove_file(scene.path("10.0.0.2")).unwrap();
        fs::remove_dir_all(scene.path(".cnibox")).unwrap();
    }
}

#[test]
fn a_namespace_that_is_gone_gives_its_lease_back() {
    isolate();
    let scene = Scene::new();
    let (stays, goes) = (Netns::fresh().unwrap(), Netns::fresh().unwrap());
    scene.reserve("192.0.2.2", &tenant(1, &stays));
    scene.reserve("192.0.2.3", &tenant(2, &goes));
    scene.reserve("192.0.2.4", &owner(3));
    scene.write("192.0.2.5", "container4\r\neth0");
    assert_eq!(healed(&scene, BOOT), []);
    drop(goes);
    assert_eq!(healed(&scene, BOOT), [(ip("192.0.2.3"), Gone::Namespace)]);
    assert_eq!(left(&scene), ips(&["192.0.2.2", "192.0.2.4", "192.0.2.5"]));
}

#[test]
fn a_number_that_another_namespace_has_got_is_no_life() {
    isolate();
    let scene = Scene::new();
    let ns = Netns::fresh().unwrap();
    let id = NetnsId::at(ns.path()).unwrap();
    let before = NetnsId { ctime: id.ctime - 1, ..id };
    scene.reserve("192.0.2.2", &owner(1).with_netns(Some(before)));
    assert_eq!(healed(&scene, BOOT), [(ip("192.0.2.2"), Gone::Namespace)]);
    // In doubt it stays: nothing pinned the namespace, or it has the address.
    scene.reserve("192.0.2.2", &owner(1).with_netns(Some(NetnsId { ctime: 0, ..id })));
    scene.reserve("127.0.0.1", &owner(2).with_netns(Some(before)));
    let up = || std::process::Command::new("ip").args(["link", "set", "lo", "up"]).status();
    assert!(ns.run(up).unwrap().unwrap().success());
    assert_eq!(healed(&scene, BOOT), []);
}

#[test]
fn notes_outlast_kills_while_the_journal_is_replaced() {
    type Kill = fn(&Scene);
    isolate();
    let kills: [(&str, Kill); 4] = [
        ("unsealed", |s| s.write("10.0.0.9", "container9\r\neth0")),
        ("half of a line written", |s| {
            let half = "\n+ container1 eth0 192.0.2.2 1";
            fs::write(s.journal_file(), s.text() + half).unwrap();
        }),
        ("half of the new one written", |s| {
            fs::write(s.path(".cnibox/leases.new"), &s.text()[..s.text().len() / 2]).unwrap();
        }),
        ("a lease's temporary", |s| s.write(".cnibox/tmp", "container1\r\neth0")),
    ];
    for (what, kill) in kills {
        let scene = Scene::new();
        let ns = Netns::fresh().unwrap();
        scene.reserve("192.0.2.2", &tenant(1, &ns));
        kill(&scene);
        drop(ns);
        assert_eq!(healed(&scene, BOOT), [(ip("192.0.2.2"), Gone::Namespace)], "{what}");
    }
}

#[test]
fn a_listing_tells_who_is_gone_and_changes_nothing() {
    isolate();
    let scene = Scene::new();
    let (stays, goes) = (Netns::fresh().unwrap(), Netns::fresh().unwrap());
    let network = scene.path("net");
    let open =
        || LeaseStore::open_existing(scene.dir(), "net", LeaseOptions::default()).unwrap().unwrap();
    fs::create_dir(&network).unwrap();
    assert!(open().reserve(ip("192.0.2.2"), &tenant(1, &stays)).unwrap());
    assert!(open().reserve(ip("192.0.2.3"), &tenant(2, &goes)).unwrap());
    drop(goes);
    scene.write("net/192.0.2.4", "container3\r\neth0");
    let before = fs::metadata(&network).unwrap().mtime_nsec();
    let listing = Listing::open_writable(scene.dir(), "net", LeaseOptions::default()).unwrap();
    let mut lives: Vec<_> = listing.statuses().iter().map(|k| (k.lease.ip, k.liveness)).collect();
    lives.sort_by_key(|(ip, _)| *ip);
    let expected = [Liveness::Alive, Liveness::Gone(Gone::Namespace), Liveness::Unknown];
    assert_eq!(lives.iter().map(|(_, life)| *life).collect::<Vec<_>>(), expected);
    assert_eq!(listing.unavailable(), HashSet::from_iter(ips(&["192.0.2.2", "192.0.2.4"])));
    assert_eq!(fs::metadata(&network).unwrap().mtime_nsec(), before);
}

#[test]
fn freed_addresses_are_quarantined() {
    let scene = Scene::new();
    let terms = LeaseOptions { reuse_delay: Duration::from_secs(1000), ..LeaseOptions::default() };
    let open = |boot: &str, terms| {
        LeaseStore::open_dir(scene.opened(), Some(boot.to_owned()), terms).unwrap()
    };
    for (n, address) in ["10.0.0.2", "10.0.0.3"].into_iter().enumerate() {
        assert!(open(BOOT, terms).reserve(ip(address), &owner(n)).unwrap());
    }
    open(BOOT, terms).release(&owner(0)).unwrap();
    let kept = open(BOOT, terms).quarantined();
    assert!(kept.len() == 1 && kept[&ip("10.0.0.2")] > Duration::from_secs(990), "{kept:?}");
    assert!(
        open(BOOT, LeaseOptions::default()).quarantined().is_empty(),
        "nobody asked for a delay"
    );
    assert_eq!(scene.owned(&owner(1)), ips(&["10.0.0.3"]), "the journal agrees");
    // A rollback frees what nobody had.
    open(BOOT, terms).release_address(ip("10.0.0.3"), &owner(1)).unwrap();
    assert_eq!(open(BOOT, terms).quarantined().len(), 1);
    // In another boot both clocks are asked; this one has been running for a while.
    let long = LeaseOptions { reuse_delay: Duration::from_secs(u64::from(u32::MAX)), ..terms };
    assert_eq!(open("next", long).quarantined().len(), 1);
    let path = scene.path(".cnibox/freed");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace(" .", "")).unwrap();
    assert!(open(BOOT, terms).quarantined().is_empty(), "a line that was cut short");
    let past = "\n10.0.0.9 this-boot 0 0 .".repeat(300);
    fs::write(&path, past).unwrap();
    assert!(open(BOOT, terms).reserve(ip("10.0.0.4"), &owner(4)).unwrap());
    open(BOOT, LeaseOptions { reuse_delay: Duration::from_secs(1), ..terms })
        .release(&owner(4))
        .unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap().lines().count(), 2, "the past is forgotten");
}
