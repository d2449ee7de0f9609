//! A store in a folder that somebody else can write to: nothing is changed outside of it, and no
//! call waits for ever.

use std::os::unix::fs::{chown, symlink};

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use super::*;

/// All that a command does in a store, with an address that is free.
fn work(scene: &Scene) {
    let open = || scene.open();
    assert!(open().reserve(ip("10.0.0.3"), &owner(1)).unwrap());
    assert_eq!(open().owned_by(&owner(1)).unwrap(), ips(&["10.0.0.3"]));
    open().reclaim_dead(|_, gone| gone).unwrap();
    assert_eq!(open().release(&owner(1)).unwrap(), ips(&["10.0.0.3"]));
    open().retain(|_| false).unwrap();
}

#[test]
fn a_link_in_the_place_of_the_journal_leads_nowhere() {
    let (scene, victim) = (Scene::new(), tempfile::tempdir().unwrap());
    let precious = [".", "home", "leases", "leases.new", "tmp"];
    for name in &precious[1..] {
        fs::create_dir(victim.path().join(name)).unwrap();
        fs::write(victim.path().join(name).join("text"), "precious").unwrap();
    }
    let times = || {
        let time = |name: &&str| fs::metadata(victim.path().join(name)).unwrap().mtime_nsec();
        precious.iter().map(time).collect::<Vec<_>>()
    };
    let before = times();
    symlink(victim.path(), scene.path(".cnibox")).unwrap();
    for _ in 0..2 {
        work(&scene);
    }
    assert_eq!(times(), before);
    for name in &precious[1..] {
        let text = fs::read_to_string(victim.path().join(name).join("text"));
        assert_eq!(text.unwrap(), "precious", "{name}");
    }
    assert!(scene.path(".cnibox").is_symlink());
}

#[test]
fn links_in_the_folder_of_the_journal_lead_nowhere() {
    let (scene, victim) = (Scene::new(), tempfile::tempdir().unwrap());
    drop(scene.open());
    let there = victim.path().join("there");
    for name in ["leases", "leases.new", "tmp"] {
        for target in ["there", "not-there"] {
            fs::write(&there, "precious").unwrap();
            fs::remove_file(scene.path(".cnibox").join(name)).ok();
            symlink(victim.path().join(target), scene.path(".cnibox").join(name)).unwrap();
            work(&scene);
            assert_eq!(fs::read_to_string(&there).unwrap(), "precious", "{name}");
            assert_eq!(fs::read_dir(victim.path()).unwrap().count(), 1, "{name}");
        }
    }
}

#[test]
fn nothing_is_removed_that_is_not_known_by_name_and_kind() {
    let scene = Scene::new();
    scene.reserve("10.0.0.2", &owner(2));
    for name in ["old", "leases.d"] {
        fs::create_dir(scene.path(".cnibox").join(name)).unwrap();
        fs::write(scene.path(".cnibox").join(name).join("text"), "mine").unwrap();
    }
    fs::write(scene.path(".cnibox/note"), "mine").unwrap();
    fs::remove_file(scene.journal_file()).unwrap();
    fs::create_dir(scene.journal_file()).unwrap();
    fs::write(scene.journal_file().join("text"), "mine").unwrap();
    work(&scene);
    for name in ["old/text", "leases.d/text", "note", "leases/text"] {
        assert_eq!(fs::read_to_string(scene.path(".cnibox").join(name)).unwrap(), "mine");
    }
    assert_eq!(scene.owned(&owner(2)), ips(&[]), "the last step of the work frees all");
}

#[test]
fn a_folder_that_others_can_write_to_is_not_used() {
    for (mode, user) in [(0o777, 0), (0o770, 0), (0o700, 65_534)] {
        let scene = Scene::new();
        let root = scene.path(".cnibox");
        fs::create_dir(&root).unwrap();
        fs::set_permissions(&root, fs::Permissions::from_mode(mode)).unwrap();
        chown(&root, Some(user), None).unwrap();
        work(&scene);
        assert_eq!(fs::read_dir(&root).unwrap().count(), 0, "{mode:o} of {user}");
        assert_eq!(fs::metadata(&root).unwrap().permissions().mode() & 0o777, mode);
    }
}

#[test]
fn the_lock_and_the_last_address_are_no_way_out_either() {
    type Trap = fn(&Path, &Path);
    let traps: [(&str, Trap); 4] = [
        ("a link", |victim, path| symlink(victim, path).unwrap()),
        ("a link to nothing", |victim, path| symlink(victim.join("x"), path).unwrap()),
        ("a FIFO", |_, path| mkfifo(path, Mode::S_IRWXU).unwrap()),
        ("a folder", |_, path| fs::create_dir(path).unwrap()),
    ];
    for (what, trap) in traps {
        let (scene, victim) = (Scene::new(), tempfile::tempdir().unwrap());
        let file = victim.path().join("file");
        fs::write(&file, "precious").unwrap();
        trap(&file, &scene.path("last_reserved_ip.0"));
        trap(&file, &scene.path("10.0.0.7"));
        let mut store = scene.open();
        assert_eq!(store.last_reserved(0), None, "{what}");
        let error = store.set_last_reserved(0, ip("10.0.0.3")).unwrap_err();
        let msg =
            format!("open {}: not a regular file", scene.path("last_reserved_ip.0").display());
        assert_eq!(error.msg(), msg, "{what}");
        assert!(!error.details().is_empty(), "{what}");
        drop(store);
        work(&scene);
        assert!(scene.path("10.0.0.7").symlink_metadata().is_ok(), "{what}");
        fs::remove_file(scene.path("lock")).unwrap();
        trap(&file, &scene.path("lock"));
        let opened = LeaseStore::open_dir(scene.opened(), None, LeaseOptions::default());
        let msg = format!("open lock {}: not a regular file", scene.path("lock").display());
        assert_eq!(opened.unwrap_err().msg(), msg, "{what}");
        assert_eq!(fs::read_to_string(&file).unwrap(), "precious", "{what}");
        assert_eq!(fs::read_dir(victim.path()).unwrap().count(), 1, "{what}");
    }
}

#[test]
fn a_second_name_of_another_file_is_not_written_to() {
    let (scene, victim) = (Scene::new(), tempfile::NamedTempFile::new().unwrap());
    fs::write(victim.path(), "precious").unwrap();
    fs::hard_link(victim.path(), scene.path("last_reserved_ip.0")).unwrap();
    let error = scene.open().set_last_reserved(0, ip("10.0.0.3")).unwrap_err();
    assert!(error.msg().ends_with("it has another name as well"), "{error}");
    assert_eq!(fs::read_to_string(victim.path()).unwrap(), "precious");
}

#[test]
fn only_root_may_link_the_folder_of_a_network() {
    let scene = Scene::new();
    let open = || LeaseStore::open(scene.dir(), "net", LeaseOptions::default());
    fs::create_dir(scene.path("disk")).unwrap();
    for target in [scene.path("disk"), PathBuf::from("disk")] {
        symlink(target, scene.path("net")).unwrap();
        assert!(open().unwrap().reserve(ip("10.0.0.2"), &owner(1)).unwrap());
        assert_eq!(open().unwrap().release(&owner(1)).unwrap(), ips(&["10.0.0.2"]));
        fs::remove_file(scene.path("net")).unwrap();
    }
    let other = tempfile::tempdir().unwrap();
    symlink(other.path(), scene.path("net")).unwrap();
    std::os::unix::fs::lchown(scene.path("net"), Some(65_534), None).unwrap();
    let error = open().unwrap_err();
    let text = "net: a symbolic link that belongs to user 65534";
    assert!(error.msg().ends_with(text), "{error}");
    let existing = LeaseStore::open_existing(scene.dir(), "net", LeaseOptions::default());
    assert!(
        existing.is_err()
            && Listing::open_writable(scene.dir(), "net", LeaseOptions::default()).is_err()
    );
    assert_eq!(fs::read_dir(other.path()).unwrap().count(), 0);
}
