//! Leases of attachments that have ended: created in an earlier boot, or without their end on the
//! host; and leases that must not be mistaken for them.

use std::os::fd::AsFd;
use std::rc::Rc;
use std::time::SystemTime;

use super::*;
use crate::attachment::EndedBy;
use crate::netlink::{LinkChange, LinkKind, Netlink, NewLink, VethPeer};
use crate::netns::{self, Netns, isolate_test_thread};

/// The host's end of a pair into `ns`, with the label of the attachment of container `n`.
fn pair(n: usize, ns: &Netns) -> HostVeth {
    let host = Netlink::open().unwrap();
    let peer = VethPeer::new("eth0").with_netns(ns.as_fd());
    let name = format!("veth{n}");
    let link = host.add_and_read_link(&NewLink::new(&name, LinkKind::Veth { peer })).unwrap();
    host.change_link(link.index, LinkChange::new().set_alias(&owner(n).object_label())).unwrap();
    HostVeth::from_labelled_link(&host, &link).unwrap()
}

/// The leases that are reclaimed in a boot.
fn reclaimed(scene: &Scene, boot: &str) -> Vec<(IpAddr, EndedBy)> {
    let gone = scene.open_in_boot(boot).reclaim_ended(|_, gone| gone).unwrap();
    gone.into_iter().map(|gone| (gone.lease.ip, gone.why)).collect()
}

/// An end that no longer exists, of a container whose namespace has ended.
fn gone_end() -> HostVeth {
    let peer = Some(ContainerVeth { nsid: 9999, index: 2 });
    HostVeth { netns: netns::current_id().unwrap(), index: 9999, labelled: true, peer }
}

/// The liveness of a lease.
fn life_of(scene: &Scene, address: &str) -> Liveness {
    let directory = OpenDirectory::open(&scene.path(".cnibox")).unwrap();
    let current = Rc::new(boot(BOOT));
    let noted = JournalContents::read_journal(Some(&directory), &current);
    judge_entries(NETWORK, &[noted.entries[&ip(address)].clone()], &current)[0]
}

fn life(scene: &Scene) -> Liveness {
    life_of(scene, "192.0.2.2")
}

fn listing(scene: &Scene, network: &str) -> LeaseListing {
    LeaseListing::open_writable(scene.root.path(), network, LeaseOptions::default()).unwrap()
}

#[test]
fn leases_of_an_earlier_boot_are_reclaimed() {
    let scene = Scene::new();
    scene.reserve("10.0.0.2", owner(1));
    scene.write("10.0.0.3", "container2\r\neth0");
    // Any command in the same boot adds the reference's lease to the journal.
    drop(scene.open());
    assert_eq!(reclaimed(&scene, BOOT), []);
    assert!(scene.open_in_boot("next").reserve_address(ip("10.0.0.4"), owner(3), None).unwrap());
    // The mark of an earlier boot is kept when the journal is rewritten after changes by the
    // reference.
    for round in 0..3 {
        scene.write(&format!("10.0.1.{round}"), "container9\r\neth0");
        drop(scene.open_in_boot("next"));
    }
    let gone = [ip("10.0.0.2"), ip("10.0.0.3")].map(|ip| (ip, EndedBy::EarlierBoot));
    assert_eq!(reclaimed(&scene, "next"), gone);
    assert_eq!(reclaimed(&scene, "next"), []);
    assert_eq!(reclaimed(&scene, "third")[0], (ip("10.0.0.4"), EndedBy::EarlierBoot));
}

/// A board without a clock of its own: the first call of a boot is made before the time is set.
#[test]
fn a_call_with_a_wrong_clock_loses_no_proof() {
    let scene = Scene::new();
    scene.reserve("10.0.0.2", owner(1));
    for boot in ["next", "third"] {
        BOOT_START.set(Some(0));
        assert_eq!(reclaimed(&scene, boot), [], "made after the start of this boot, by the clock");
        assert!(
            scene.open_in_boot(boot).reserve_address(ip("10.0.0.3"), owner(2), None).unwrap()
                == (boot == "next")
        );
    }
    let text = scene.text();
    let boots = text.lines().filter(|line| line.starts_with("boot"));
    let mut ids: Vec<_> = boots.map(|line| line.split(' ').nth(3).unwrap()).collect();
    ids.sort_unstable();
    assert_eq!(ids, ["next", BOOT], "{text}");
    BOOT_START.set(Some(i64::MAX));
    let gone = ["10.0.0.2", "10.0.0.3"].map(|address| (ip(address), EndedBy::EarlierBoot));
    assert_eq!(reclaimed(&scene, "third"), gone);
}

#[test]
fn an_entry_whose_boot_cannot_be_read_is_in_doubt() {
    for (line, damaged) in
        [("\nboot 1 machine this-boot .", "\nboot 1 machi"), ("\nboot 1 machine this-boot .", "")]
    {
        let scene = Scene::new();
        scene.reserve("10.0.0.2", owner(1));
        assert!(
            scene.open_in_boot("third").reserve_address(ip("10.0.0.3"), owner(2), None).unwrap()
        );
        let text = scene.text();
        assert_eq!(text.matches(line).count(), 1, "{text}");
        fs::write(scene.journal_file(), text.replacen(line, damaged, 1)).unwrap();
        assert_eq!(reclaimed(&scene, "fourth"), [(ip("10.0.0.3"), EndedBy::EarlierBoot)], "{text}");
    }
}

/// Entries with a boot that was judged when they were written, and ends without the container's
/// end.
#[test]
fn a_journal_of_an_earlier_build_ends_no_lease() {
    isolate_test_thread();
    let scene = Scene::new();
    for n in 2..5 {
        scene.attach(&format!("10.0.0.{n}"), owner(n), gone_end());
    }
    let id = netns::current_id().unwrap();
    let mut text =
        scene.text().replace(&format!("{id}:9999:own:9999:2"), &format!("{id}:9999:own"));
    let old = |text: &str, n: usize, word: &str| {
        let line = text.lines().find(|line| line.contains(&format!(" 10.0.0.{n} "))).unwrap();
        text.replace(line, &line.replace(" this .", word))
    };
    text = old(&text, 3, " earlier .");
    text = old(&text, 4, " - .");
    fs::write(scene.journal_file(), text).unwrap();
    assert_eq!(reclaimed(&scene, BOOT), []);
    assert_eq!(scene.owned(owner(3)), ips(&["10.0.0.3"]));
    let doubts =
        [UnknownBecause::Moved(9999), UnknownBecause::OtherBoot, UnknownBecause::OtherBoot];
    for (n, doubt) in (2..5).zip(doubts) {
        assert_eq!(life_of(&scene, &format!("10.0.0.{n}")), Liveness::Unknown(doubt));
    }
    assert_eq!(reclaimed(&scene, "next"), [(ip("10.0.0.2"), EndedBy::EarlierBoot)]);
}

#[test]
fn leases_of_another_machine_are_kept_as_uncertain() {
    let scene = Scene::new();
    let on = |machine| MACHINE.set(Some(machine));
    on("one");
    scene.reserve("10.0.0.2", owner(1));
    scene.write("10.0.0.3", "container2\r\neth0");
    let long_ago = SystemTime::UNIX_EPOCH + Duration::from_secs(1);
    let file = fs::File::options().write(true).open(scene.path("10.0.0.3")).unwrap();
    file.set_modified(long_ago).unwrap();
    drop(file);
    on("two");
    assert_eq!(reclaimed(&scene, "two-a"), []);
    assert!(scene.open_in_boot("two-a").reserve_address(ip("10.0.0.4"), owner(4), None).unwrap());
    // Also in later boots; the lease of this machine is then of an earlier boot.
    let gone = [(ip("10.0.0.4"), EndedBy::EarlierBoot)];
    assert_eq!(reclaimed(&scene, "two-b"), gone);
    assert_eq!(reclaimed(&scene, "two-c"), []);
    on("one");
    let gone = [(ip("10.0.0.2"), EndedBy::EarlierBoot)];
    assert_eq!(reclaimed(&scene, "one-b"), gone, "the other may have been made on either machine");
    assert_eq!(
        scene.open_in_boot("one-b").release_attachment(owner(2)).unwrap(),
        ips(&["10.0.0.3"])
    );
}

#[test]
fn a_new_lease_is_not_mistaken_for_the_recorded_one() {
    let scene = Scene::new();
    let later = SystemTime::now() + Duration::from_secs(5);
    for again in ["container1\r\neth0", "container1", "container2\r\neth0"] {
        scene.reserve("10.0.0.2", owner(1));
        scene.reserve("10.0.0.3", owner(1));
        // The reference, in the next boot and before any command of ours.
        fs::remove_file(scene.path("10.0.0.2")).unwrap();
        scene.write("10.0.0.2", again);
        let file = fs::File::options().write(true).open(scene.path("10.0.0.2")).unwrap();
        file.set_modified(later).unwrap();
        assert_eq!(
            reclaimed(&scene, "next"),
            [(ip("10.0.0.3"), EndedBy::EarlierBoot)],
            "{again:?}"
        );
        fs::remove_file(scene.path("10.0.0.2")).unwrap();
        fs::remove_dir_all(scene.path(".cnibox")).unwrap();
    }
}

#[test]
fn a_reused_link_index_does_not_prove_life() {
    isolate_test_thread();
    let scene = Scene::new();
    let (host, ns) = (Netlink::open().unwrap(), Netns::create_unnamed().unwrap());
    let others = pair(7, &ns);
    let other = host.add_and_read_link(&NewLink::new("other0", LinkKind::Ifb)).unwrap();
    for end in [others, HostVeth { index: other.index, ..others }] {
        scene.attach("192.0.2.2", owner(1), end);
        assert_eq!(reclaimed(&scene, BOOT), [(ip("192.0.2.2"), EndedBy::HostEnd)], "{end:?}");
    }
    // In doubt the lease stays: the link is in another namespace, or has lost its label.
    let elsewhere = HostVeth { netns: others.netns + 1, ..gone_end() };
    scene.attach("192.0.2.2", owner(1), elsewhere);
    scene.attach("192.0.2.3", owner(1), others);
    host.change_link(others.index, LinkChange::new().set_alias("of a person")).unwrap();
    assert_eq!(reclaimed(&scene, BOOT), []);
    // A link of another program has no label, and is known by its index.
    scene.attach("192.0.2.4", owner(1), HostVeth { labelled: false, ..others });
    assert_eq!(reclaimed(&scene, BOOT), []);
    host.delete_link_by_index(others.index).unwrap();
    assert_eq!(reclaimed(&scene, BOOT).len(), 2);
    assert_eq!(scene.leases(), [AddressLease::new(ip("192.0.2.2"), owner(1))]);
}

#[test]
fn a_host_end_that_was_moved_is_not_gone() {
    isolate_test_thread();
    let (host, router) = (Netlink::open().unwrap(), Netns::create_unnamed().unwrap());
    let there = Netlink::open_in(&router).unwrap();
    for is_index_taken in [false, true] {
        let (scene, ns) = (Scene::new(), Netns::create_unnamed().unwrap());
        let end = pair(1, &ns);
        scene.attach("192.0.2.2", owner(1), end);
        if is_index_taken {
            there.add_link(&NewLink::new("other0", LinkKind::Ifb).with_index(end.index)).unwrap();
        }
        host.change_link(end.index, LinkChange::new().move_to_netns(router.as_fd())).unwrap();
        let doubt = Liveness::Unknown(UnknownBecause::Moved(end.index));
        assert_eq!(
            (life(&scene), reclaimed(&scene, BOOT)),
            (doubt, vec![]),
            "index taken: {is_index_taken}"
        );
        // Another link has the index.
        host.add_link(&NewLink::new("other1", LinkKind::Ifb).with_index(end.index)).unwrap();
        assert_eq!(
            (life(&scene), reclaimed(&scene, BOOT)),
            (doubt, vec![]),
            "index taken: {is_index_taken}"
        );
        let moved = there.require_link("veth1").unwrap();
        assert_eq!(moved.index != end.index, is_index_taken);
        host.delete_link("other1").unwrap();
        assert!(there.delete_link("veth1").unwrap());
        assert_eq!(
            reclaimed(&scene, BOOT),
            [(ip("192.0.2.2"), EndedBy::HostEnd)],
            "index taken: {is_index_taken}"
        );
    }
}

/// The kernel gives the id of a namespace that has ended to the next one, and the links of
/// containers have the same indexes.
#[test]
fn the_next_container_does_not_keep_the_lease_of_the_dead() {
    isolate_test_thread();
    let (host, ns) = (Netlink::open().unwrap(), Netns::create_unnamed().unwrap());
    let former = pair(1, &ns);
    host.delete_link_by_index(former.index).unwrap();
    // The same namespace has the same id. The next container may have the name of the former.
    let next = pair(1, &ns);
    assert_eq!(former.peer.map(|peer| peer.nsid), next.peer.map(|peer| peer.nsid));
    let of_next = HostVeth { peer: next.peer, ..former };
    let lease = |end| {
        let scene = Scene::new();
        scene.attach("192.0.2.2", owner(1), end);
        life(&scene)
    };
    for end in [former, of_next] {
        assert_eq!(lease(end), Liveness::Gone(EndedBy::HostEnd), "{end:?}");
    }
    // The host has an id of itself since it reported the pair of the next.
    let nsid = host.namespace_id(Netns::open_current().unwrap().as_fd()).unwrap().unwrap();
    let of_host = ContainerVeth { nsid, index: next.index };
    assert_eq!(lease(HostVeth { peer: Some(of_host), ..former }), Liveness::Gone(EndedBy::HostEnd));
    // The next one's end was moved, or is it that of the former?
    let router = Netns::create_unnamed().unwrap();
    host.change_link(next.index, LinkChange::new().move_to_netns(router.as_fd())).unwrap();
    assert_eq!(lease(of_next), Liveness::Unknown(UnknownBecause::Moved(former.index)));
    assert_eq!(
        lease(HostVeth { peer: None, ..former }),
        Liveness::Unknown(UnknownBecause::Moved(former.index))
    );
}

#[test]
fn notes_survive_kills_during_journal_replacement() {
    type Kill = fn(&Scene);
    isolate_test_thread();
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
        scene.attach("192.0.2.2", owner(1), gone_end());
        kill(&scene);
        assert_eq!(reclaimed(&scene, BOOT), [(ip("192.0.2.2"), EndedBy::HostEnd)], "{what}");
        scene.write("10.0.0.10", "container9\r\neth0");
        drop(scene.open());
        for name in ["tmp", "leases.new"] {
            assert!(!scene.path(".cnibox").join(name).exists(), "{what}: {name}");
        }
    }
}

#[test]
fn listing_reports_dead_owners_and_changes_nothing() {
    isolate_test_thread();
    let scene = Scene::new();
    let ns = Netns::create_unnamed().unwrap();
    assert!(
        listing(&scene, "none").taken_addresses().is_empty()
            && !scene.root.path().join("none").exists()
    );
    for (address, n, end) in [("192.0.2.2", 1, pair(1, &ns)), ("192.0.2.3", 2, gone_end())] {
        let store = LeaseStore::open_existing(scene.root.path(), NETWORK, LeaseOptions::default());
        assert!(store.unwrap().unwrap().reserve_address(ip(address), owner(n), Some(end)).unwrap());
    }
    scene.write("192.0.2.4", "container3\r\neth0");
    let before = fs::metadata(&scene.dir).unwrap().mtime_nsec();
    let listing = listing(&scene, NETWORK);
    let mut statuses = listing.lease_statuses();
    statuses.sort_by_key(|status| status.lease.ip);
    let lives: Vec<_> = statuses.iter().map(|status| status.liveness).collect();
    let doubt = Liveness::Unknown(UnknownBecause::NoHostEnd);
    assert_eq!(lives, [Liveness::Alive, Liveness::Gone(EndedBy::HostEnd), doubt]);
    assert_eq!(
        listing.unavailable_addresses(),
        HashSet::from_iter(ips(&["192.0.2.2", "192.0.2.4"]))
    );
    assert_eq!(fs::metadata(&scene.dir).unwrap().mtime_nsec(), before);
}

#[test]
fn freed_addresses_are_quarantined() {
    let scene = Scene::new();
    let terms = LeaseOptions { reuse_delay: Duration::from_secs(1000), ..LeaseOptions::default() };
    let open = |boot, terms| scene.open_with(boot, terms);
    for (n, address) in ["10.0.0.2", "10.0.0.3"].into_iter().enumerate() {
        assert!(open(BOOT, terms).reserve_address(ip(address), owner(n), None).unwrap());
    }
    open(BOOT, terms).release_attachment(owner(0)).unwrap();
    let kept = open(BOOT, terms).quarantined_addresses();
    assert!(kept.len() == 1 && kept[&ip("10.0.0.2")] > Duration::from_secs(990), "{kept:?}");
    assert!(scene.open().quarantined_addresses().is_empty(), "nobody asked for a delay");
    assert_eq!(scene.owned(owner(1)), ips(&["10.0.0.3"]), "the journal agrees");
    // A rollback frees an address that nobody used.
    assert!(!open(BOOT, terms).release_address(ip("10.0.0.3"), owner(0)).unwrap(), "another's");
    assert!(open(BOOT, terms).release_address(ip("10.0.0.3"), owner(1)).unwrap());
    assert!(!open(BOOT, terms).release_address(ip("10.0.0.3"), owner(1)).unwrap(), "gone");
    assert_eq!(open(BOOT, terms).quarantined_addresses().len(), 1);
    // In another boot both clocks are asked; this one has been running for a while.
    let long = LeaseOptions { reuse_delay: Duration::from_secs(u64::from(u32::MAX)), ..terms };
    assert_eq!(open("next", long).quarantined_addresses().len(), 1);
    // The journal is rewritten.
    for _ in 0..3 {
        scene.write("10.0.1.2", "container9\r\neth0");
        assert_eq!(open("next", long).quarantined_addresses().len(), 1);
        fs::remove_file(scene.path("10.0.1.2")).unwrap();
        assert_eq!(
            open("next", long).quarantined_addresses().len(),
            2,
            "what the reference frees, too"
        );
    }
    fs::write(scene.journal_file(), scene.text().replace(" .", "")).unwrap();
    assert!(open(BOOT, terms).quarantined_addresses().is_empty(), "lines that were cut short");
}

#[test]
fn the_next_lease_tells_why_the_address_was_reclaimed() {
    isolate_test_thread();
    let scene = Scene::new();
    scene.attach("192.0.2.2", owner(1), gone_end());
    assert_eq!(reclaimed(&scene, BOOT).len(), 1);
    let text = scene.text();
    assert!(text.ends_with("\n- 192.0.2.2 - host-end container1 eth0 ."), "{text}");
    scene.reserve("192.0.2.2", owner(2));
    // The journal is rewritten: after each change by the reference, and when most of its lines are
    // out of date.
    for _ in 0..1000 {
        scene.reserve("192.0.2.3", owner(3));
        scene.open().release_attachment(owner(3)).unwrap();
    }
    scene.write("192.0.2.9", "container9\r\neth0");
    drop(scene.open());
    let statuses = listing(&scene, NETWORK).lease_statuses();
    let of = |address: &str| statuses.iter().find(|s| s.lease.ip == ip(address)).unwrap();
    let told = of("192.0.2.2").reclaimed.as_ref().unwrap();
    assert_eq!((told.lease.id.as_str(), told.why), ("container1", EndedBy::HostEnd));
    assert!(of("192.0.2.9").reclaimed.is_none());
    scene.open().release_attachment(owner(2)).unwrap();
    scene.write("192.0.2.10", "");
    drop(scene.open());
    assert!(!scene.text().contains("192.0.2.2 "), "{}", scene.text());
}
