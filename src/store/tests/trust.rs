//! When the index is believed: others' changes, damage, crashes.

use super::*;

#[test]
fn a_lease_overwritten_with_the_id_alone_is_released() {
    let scene = Scene::new();
    scene.reserve("10.0.0.2", &owner(1));
    scene.write("10.0.0.2", "container1");
    assert!(scene.sealed(), "overwriting in place shows in no directory");
    assert_eq!(scene.open().release(&owner(1)).unwrap(), ips(&["10.0.0.2"]));
}

#[test]
fn the_references_changes_are_seen_at_once() {
    let scene = Scene::new();
    // Many rounds: some of the changes fall into the clock tick of the seal.
    for _ in 0..200 {
        scene.reserve("10.0.0.2", &owner(1));
        assert!(scene.sealed());
        scene.write("10.0.0.3", "container2\r\neth0");
        assert_eq!(scene.owned(&owner(2)), ips(&["10.0.0.3"]), "appeared");
        fs::remove_file(scene.path("10.0.0.3")).unwrap();
        assert_eq!(scene.owned(&owner(2)), ips(&[]), "disappeared");
        fs::remove_file(scene.path("10.0.0.2")).unwrap();
        scene.write("10.0.0.2", "container3\r\neth0");
        assert_eq!(scene.owned(&owner(1)), ips(&[]), "another's now");
        assert_eq!(scene.open().release(&owner(3)).unwrap(), ips(&["10.0.0.2"]));
    }
}

#[test]
fn a_damaged_index_is_found_out() {
    type Damage<'a> = &'a dyn Fn(&Scene);
    let scene = Scene::new();
    let damages: [(&str, Damage<'_>); 9] = [
        ("all gone", &|s| fs::remove_dir_all(s.path(".cnibox")).unwrap()),
        ("index gone", &|s| fs::remove_file(s.index_file()).unwrap()),
        ("half built", &|s| {
            fs::rename(s.index_file(), s.path(".cnibox/index.new")).unwrap();
        }),
        ("empty", &|s| fs::write(s.index_file(), "").unwrap()),
        ("cut", &|s| {
            let half = fs::read(s.index_file()).unwrap();
            fs::write(s.index_file(), &half[..half.len() / 2]).unwrap();
        }),
        ("bad magic", &|s| s.damage(0, *b"garbage")),
        ("slots lost", &|s| s.damage(64, std::iter::repeat(0))),
        ("slots garbled", &|s| s.damage(64, std::iter::repeat(1))),
        ("of another boot", &|s| s.damage(8, [0; 16])),
    ];
    for (what, damage) in damages {
        scene.reserve("10.0.0.2", &owner(1));
        damage(&scene);
        assert_eq!(scene.open().release(&owner(1)).unwrap(), ips(&["10.0.0.2"]), "{what}");
        assert!(scene.sealed(), "{what}");
    }
}

#[test]
fn without_an_index_everything_is_read() {
    let scene = Scene::new();
    scene.write(".cnibox", "in the way");
    scene.reserve("10.0.0.2", &owner(1));
    scene.reserve("10.0.0.3", &owner(2));
    assert_eq!(scene.owned(&owner(1)), ips(&["10.0.0.2"]));
    let open = || LeaseStore::open_dir(scene.opened(), None, Terms::default()).unwrap();
    assert_eq!(open().owned_by(&owner(2)).unwrap(), ips(&["10.0.0.3"]));
    assert!(open().reserve(ip("10.0.0.4"), &owner(2)).unwrap());
    assert_eq!(open().release(&owner(2)).unwrap().len(), 2);
    assert!(!scene.path(".cnibox-tmp").exists());
}

/// Each step at which kill -9 may end a command, left as it is; then other commands.
#[test]
fn killed_at_any_step() {
    type Step = fn(&Scene, index::Index);
    let steps: [(&str, Step); 13] = [
        ("reserve: temporary written", |s, _| s.write(".cnibox/tmp", "container1\r\neth0")),
        ("reserve: lease linked", |s, _| {
            s.write(".cnibox/tmp", "container1\r\neth0");
            fs::hard_link(s.path(".cnibox/tmp"), s.path("10.0.0.3")).unwrap();
        }),
        ("reserve: not indexed", |s, _| s.create("10.0.0.3")),
        ("reserve: not sealed", |s, mut index| {
            s.create("10.0.0.3");
            index.add(&owner(1).lease(ip("10.0.0.3")), note(s, "10.0.0.3")).unwrap();
        }),
        ("reserve: noted, not linked", |s, mut index| {
            index.add(&owner(1).lease(ip("10.0.0.3")), note(s, "10.0.0.2")).unwrap();
        }),
        ("reserve: only the index is sealed", |s, mut index| {
            index.add(&owner(1).lease(ip("10.0.0.3")), note(s, "10.0.0.2")).unwrap();
            index.seal().unwrap();
            s.create("10.0.0.3");
        }),
        ("reserve: the last address written", |s, _| {
            s.create("10.0.0.3");
            s.write("last_reserved_ip.0", "10.0.0.3");
        }),
        ("release: lease removed", |s, _| fs::remove_file(s.path("10.0.0.2")).unwrap()),
        ("release: not sealed", |s, mut index| {
            fs::remove_file(s.path("10.0.0.2")).unwrap();
            index.remove(&owner(1).lease(ip("10.0.0.2"))).unwrap();
        }),
        ("rebuild: old index removed", |s, _| fs::remove_file(s.index_file()).unwrap()),
        ("rebuild: temporary written", |s, _| {
            fs::rename(s.index_file(), s.path(".cnibox/index.new")).unwrap();
        }),
        ("rebuild: not sealed", |s, _| {
            s.empty_index();
        }),
        ("rebuild: only the index is sealed", |s, _| {
            s.empty_index().seal().unwrap();
            s.create("10.0.0.3");
        }),
    ];
    for (what, step) in steps {
        let scene = Scene::new();
        scene.reserve("10.0.0.2", &owner(1));
        step(&scene, scene.index());
        let mut there = ips(&["10.0.0.2", "10.0.0.3"]);
        there.retain(|ip| scene.path(&ip.to_string()).exists());
        assert_eq!(scene.owned(&owner(1)), there, "{what}");
        scene.reserve("10.0.0.7", &owner(7));
        let leases = scene.open().leases().unwrap();
        assert!(there.iter().all(|ip| leases.contains(&owner(1).lease(*ip))), "{what}");
        assert_eq!(scene.open().release(&owner(1)).unwrap().len(), there.len(), "{what}");
        assert!(!scene.path(".cnibox/tmp").exists(), "{what}");
    }
}

#[test]
fn a_session_seals_once_and_last() {
    let scene = Scene::new();
    scene.reserve("10.0.0.2", &owner(1));
    let mut store = scene.open();
    assert!(store.reserve(ip("10.0.0.3"), &owner(2)).unwrap());
    store.set_last_reserved(0, ip("10.0.0.3")).unwrap();
    assert!(!scene.sealed(), "not before its end");
    assert_eq!(store.release(&owner(1)).unwrap(), ips(&["10.0.0.2"]));
    drop(store);
    assert!(scene.sealed());
    // Only the directory changes: its seal still is that of the index.
    scene.open().set_last_reserved(0, ip("10.0.0.9")).unwrap();
    assert_eq!(reads(|| assert_eq!(scene.owned(&owner(2)), ips(&["10.0.0.3"]))), 1);
    let before = fs::metadata(scene.index_file()).unwrap();
    assert_eq!(scene.owned(&owner(1)), ips(&[]));
    let after = fs::metadata(scene.index_file()).unwrap();
    assert_eq!(
        (before.ino(), before.ctime_nsec()),
        (after.ino(), after.ctime_nsec()),
        "a question"
    );
}

#[test]
fn what_ends_half_way_is_not_sealed() {
    let scene = Scene::new();
    scene.reserve("10.0.0.2", &owner(1));
    let panics = || {
        let mut store = scene.open();
        assert!(store.reserve(ip("10.0.0.3"), &owner(1)).unwrap());
        store.change(
            || {
                scene.create("10.0.0.4");
                panic!("on purpose")
            },
            |_, ()| Ok(()),
        )
    };
    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).is_err());
    assert!(!scene.sealed());
    assert_eq!(scene.owned(&owner(1)), ips(&["10.0.0.2", "10.0.0.3", "10.0.0.4"]));
    assert!(scene.sealed());
    // An error, and then something that goes well, in one session.
    let mut store = scene.open();
    let failed: Result<()> = store.change(
        || {
            scene.create("10.0.0.5");
            Err(Error::new("create", scene.dir(), io::ErrorKind::Other))
        },
        |_, ()| Ok(()),
    );
    assert!(failed.is_err() && store.reserve(ip("10.0.0.6"), &owner(1)).unwrap());
    drop(store);
    assert!(!scene.sealed());
    assert_eq!(scene.owned(&owner(1)).len(), 5);
}

#[test]
fn the_seal_joins_the_index_to_its_store() {
    let scene = Scene::new();
    scene.reserve("10.0.0.2", &owner(1));
    let old = fs::read(scene.index_file()).unwrap();
    scene.reserve("10.0.0.3", &owner(2));
    fs::write(scene.index_file(), old).unwrap();
    assert_eq!(scene.owned(&owner(2)), ips(&["10.0.0.3"]), "an older copy of the index");
    let seal = |path: &Path, second| {
        let time = std::time::UNIX_EPOCH + std::time::Duration::new(second, 424_242_000);
        fs::File::open(path).unwrap().set_modified(time).unwrap();
    };
    scene.write("10.0.0.4", "container3\r\neth0");
    seal(scene.dir(), 1);
    assert_eq!(scene.owned(&owner(3)), ips(&["10.0.0.4"]), "sealed, but not by us");
}

#[test]
fn an_index_grows_with_its_store() {
    let scene = Scene::new();
    let mut store = scene.open();
    for n in 0..300 {
        let ip = Ipv4Addr::from_bits(0x0a00_0000 + n).into();
        assert!(store.reserve(ip, &owner(n as usize)).unwrap());
    }
    drop(store);
    let all = reads(|| {
        for n in 0..300 {
            assert_eq!(scene.owned(&owner(n)).len(), 1);
        }
    });
    assert_eq!(all, 300, "only the lease that is asked for is read");
}

#[test]
fn a_lease_overwritten_with_another_owner_is_not_taken_from_it() {
    let scene = Scene::new();
    scene.reserve("10.0.0.2", &owner(1));
    scene.write("10.0.0.2", "container2\r\neth0");
    assert!(scene.sealed(), "overwriting in place shows in no directory");
    assert!(scene.open().release(&owner(1)).unwrap().is_empty());
    assert_eq!(scene.owned(&owner(2)), ips(&["10.0.0.2"]), "found by the rebuild");
}
