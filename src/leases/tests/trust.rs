//! When the journal is trusted: changes by other programs, damage, crashes.

use super::*;

#[test]
fn a_lease_that_was_overwritten_is_released_by_its_owner() {
    for (n, text) in [(1, "container1"), (2, "container2\r\neth0")] {
        let scene = Scene::new();
        scene.reserve("10.0.0.2", owner(1));
        scene.write("10.0.0.2", text);
        assert!(scene.sealed(), "overwriting in place shows in no directory");
        assert_eq!(scene.open().release_attachment(owner(3 - n)).unwrap(), ips(&[]));
        assert_eq!(scene.open().release_attachment(owner(n)).unwrap(), ips(&["10.0.0.2"]));
    }
}

#[test]
fn changes_by_the_reference_are_seen_at_once() {
    let scene = Scene::new();
    // Many rounds: some of the changes fall into the clock tick of the seal.
    for _ in 0..200 {
        scene.reserve("10.0.0.2", owner(1));
        assert!(scene.sealed());
        scene.write("10.0.0.3", "container2\r\neth0");
        assert_eq!(scene.owned(owner(2)), ips(&["10.0.0.3"]), "appeared");
        fs::remove_file(scene.path("10.0.0.3")).unwrap();
        assert_eq!(scene.owned(owner(2)), ips(&[]), "disappeared");
        fs::remove_file(scene.path("10.0.0.2")).unwrap();
        scene.write("10.0.0.2", "container3\r\neth0");
        assert_eq!(scene.owned(owner(1)), ips(&[]), "another's now");
        assert_eq!(scene.open().release_attachment(owner(3)).unwrap(), ips(&["10.0.0.2"]));
    }
}

#[test]
fn the_journal_is_readable_text() {
    let scene = Scene::new();
    scene.reserve("10.0.0.2", owner(1));
    let peer = Some(ContainerVeth { nsid: 4, index: 2 });
    let end = HostVeth { netns: 1, index: 17, labelled: true, peer };
    scene.attach("2001:db8::3", AttachmentId { id: "c2", ifname: "%-é", ..owner(2) }, end);
    scene.write("10.0.0.4", "container3");
    scene.reserve("10.0.0.5", AttachmentId { id: "c4", ifname: "-", ..owner(4) });
    scene.open().release_attachment(owner(1)).unwrap();
    let text = scene.text();
    let file = |name| {
        let meta = fs::metadata(scene.path(name)).unwrap();
        format!("{}:{}", meta.ino(), meta.mtime() * 1_000_000_000 + meta.mtime_nsec())
    };
    let lines: Vec<&str> = text.lines().collect();
    let written = fs::metadata(scene.path("10.0.0.4")).unwrap().mtime();
    let entries = lines[1..4].iter().map(|line| line.len() + 1).sum::<usize>();
    let first = |second| format!("leases machine this-boot {second} 0:{entries} .");
    assert!([first(written), first(written + 1)].iter().any(|line| line == lines[0]), "{text}");
    let v6 = format!("+ c2 %25-%c3%a9 2001:db8::3 {} 1:17:own:4:2 this .", file("2001:db8::3"));
    let old = format!("+ container3 - 10.0.0.4 {} - this .", file("10.0.0.4"));
    let added = format!("+ c4 %2d 10.0.0.5 {} - this .", file("10.0.0.5"));
    assert_eq!(lines[1], v6, "{text}");
    assert_eq!(lines[3], old, "{text}");
    assert_eq!(lines[4..], [added.as_str(), "- 10.0.0.2 ."], "{text}");
    let mode = fs::metadata(scene.journal_file()).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode, 0o600);
}

#[test]
fn a_damaged_journal_is_ignored() {
    type Damage = fn(&Scene);
    let scene = Scene::new();
    let damages: [(&str, Damage); 9] = [
        ("all gone", |s| fs::remove_dir_all(s.path(".cnibox")).unwrap()),
        ("journal gone", |s| fs::remove_file(s.journal_file()).unwrap()),
        ("empty", |s| fs::write(s.journal_file(), "").unwrap()),
        ("cut", |s| fs::write(s.journal_file(), &s.text()[..s.text().len() / 2]).unwrap()),
        ("no text", |s| fs::write(s.journal_file(), b"\xff\0").unwrap()),
        ("header lost", |s| fs::write(s.journal_file(), s.text().replace("leases", "x")).unwrap()),
        ("of another boot", |s| {
            fs::write(s.journal_file(), s.text().replacen(BOOT, "other", 1)).unwrap();
        }),
        ("others can write it", |s| {
            fs::set_permissions(s.journal_file(), fs::Permissions::from_mode(0o666)).unwrap();
        }),
        ("another user's", |s| chown(s.journal_file(), Some(65_534), None).unwrap()),
    ];
    for (what, damage) in damages {
        for line in ["", "\n+ container1 eth0 10.0.0.2 x - this .", "\n?"] {
            scene.reserve("10.0.0.2", owner(1));
            damage(&scene);
            if scene.journal_file().exists() {
                // Sealed nevertheless: a disk may lose what it was told to keep.
                let text = fs::read(scene.journal_file()).unwrap();
                fs::write(scene.journal_file(), [&text, line.as_bytes()].concat()).unwrap();
                scene.seal();
            }
            let released = scene.open().release_attachment(owner(1)).unwrap();
            assert_eq!(released, ips(&["10.0.0.2"]), "{what}, {line:?}");
            assert!(scene.sealed(), "{what}");
        }
    }
}

#[test]
fn the_journal_is_sealed_at_the_end_of_a_session() {
    let scene = Scene::new();
    scene.reserve("10.0.0.2", owner(1));
    let mut store = scene.open();
    assert!(store.reserve_address(ip("10.0.0.3"), owner(2), None).unwrap());
    store.set_last_reserved(0, ip("10.0.0.3")).unwrap();
    assert!(!scene.sealed(), "not before its end");
    assert_eq!(store.release_attachment(owner(1)).unwrap(), ips(&["10.0.0.2"]));
    drop(store);
    assert!(scene.sealed());
    // Only the directory changes: its seal still matches the journal.
    scene.open().set_last_reserved(0, ip("10.0.0.9")).unwrap();
    assert_eq!(reads(|| assert_eq!(scene.owned(owner(2)), ips(&["10.0.0.3"]))), 1);
    let written = || {
        let meta = fs::metadata(scene.journal_file()).unwrap();
        (meta.ino(), meta.ctime_nsec())
    };
    let before = written();
    assert_eq!(scene.owned(owner(1)), ips(&[]));
    assert_eq!(written(), before, "a question");
}

#[test]
fn the_journal_is_not_sealed_after_a_failure() {
    let scene = Scene::new();
    let mut store = scene.open();
    fs::create_dir(scene.path("last_reserved_ip.0")).unwrap();
    assert!(store.set_last_reserved(0, ip("10.0.0.5")).is_err());
    // The next operation of the same session succeeds.
    scene.create("10.0.0.5");
    assert!(store.reserve_address(ip("10.0.0.6"), owner(1), None).unwrap());
    drop(store);
    assert!(!scene.sealed());
    assert_eq!(scene.owned(owner(1)), ips(&["10.0.0.5", "10.0.0.6"]));
    assert!(scene.sealed());
}

#[test]
fn an_older_copy_of_the_journal_is_ignored() {
    let scene = Scene::new();
    scene.reserve("10.0.0.2", owner(1));
    let old = fs::read(scene.journal_file()).unwrap();
    scene.reserve("10.0.0.3", owner(2));
    fs::write(scene.journal_file(), old).unwrap();
    assert_eq!(scene.owned(owner(2)), ips(&["10.0.0.3"]), "an older copy of the journal");
    scene.write("10.0.0.4", "container3\r\neth0");
    stamp(&scene.dir, 1);
    assert_eq!(scene.owned(owner(3)), ips(&["10.0.0.4"]), "sealed, but not by us");
}

/// Journals in which the lines of a container are searched, of containers whose ids begin with each
/// other.
#[test]
fn leases_are_found_wherever_their_lines_are() {
    let id = |n: usize| format!("{n:x}{}", "f".repeat(n % 90));
    for count in [0, 1, 2, 40, 1500] {
        let scene = Scene::new();
        let address =
            |n: usize| Ipv4Addr::from_bits(0x0a00_0000 + u32::try_from(n).unwrap()).to_string();
        for n in 0..count {
            scene.write(&address(n), format!("{}\r\neth{}", id(n), n % 3));
        }
        drop(scene.open());
        for n in (0..count).chain([1 << 30, 1 << 40]) {
            let (id, ifname) = (id(n), format!("eth{}", n % 3));
            let wanted = if n < count { vec![ip(&address(n))] } else { vec![] };
            let find = || scene.owned(AttachmentId { network: NETWORK, ifname: &ifname, id: &id });
            assert_eq!(
                reads(|| assert_eq!(find(), wanted, "{n} of {count}")),
                wanted.len(),
                "{n} of {count}"
            );
        }
        for odd in ["-", "00", "zzz", &"f".repeat(3000), &"f".repeat(30_000)] {
            assert_eq!(
                scene.owned(AttachmentId { network: NETWORK, ifname: "eth0", id: odd }),
                ips(&[])
            );
        }
    }
    // More leases of one container than a search reads, among others.
    let scene = Scene::new();
    let many = ips(&(0..500)
        .map(|n| format!("10.0.{}.{}", n / 250, n % 250))
        .collect::<Vec<_>>()
        .iter()
        .map(String::as_str)
        .collect::<Vec<_>>());
    for (n, ip) in many.iter().enumerate() {
        scene.write(&ip.to_string(), format!("{}\r\neth0", owner(1).id));
        for other in ["a", "z"] {
            scene.write(
                &format!("10.{}.{}.{}", other.len() + usize::from(other == "z"), n / 250, n % 250),
                format!("{other}{n}\r\neth0"),
            );
        }
    }
    drop(scene.open());
    assert_eq!(scene.owned(owner(1)), many);
}

#[test]
fn the_journal_is_compacted_when_most_lines_are_obsolete() {
    let scene = Scene::new();
    scene.reserve("10.0.0.2", owner(1));
    for _ in 0..1000 {
        scene.reserve("10.0.0.3", owner(2));
        assert_eq!(scene.open().release_attachment(owner(2)).unwrap(), ips(&["10.0.0.3"]));
        assert!(scene.sealed());
    }
    let lines = scene.text().lines().count();
    assert!(lines < 1900, "{lines}");
    assert!(!scene.path(".cnibox/leases.new").exists());
    assert_eq!(reads(|| assert_eq!(scene.owned(owner(1)), ips(&["10.0.0.2"]))), 1);
}
