//! A store in a directory that others can write to: nothing outside the store is changed, and no
//! call waits for ever.

use super::*;

/// All operations of a command on a store, with a free address.
fn work(scene: &Scene) {
    let open = || scene.open();
    assert!(open().reserve_address(ip("10.0.0.3"), owner(1), None).unwrap());
    assert_eq!(open().addresses_held_by(owner(1)).unwrap(), ips(&["10.0.0.3"]));
    open().reclaim_ended(|_, gone| gone).unwrap();
    assert_eq!(open().release_attachment(owner(1)).unwrap(), ips(&["10.0.0.3"]));
    open().retain_leases(|_| false, true).unwrap();
}

#[test]
fn links_in_the_directory_of_the_journal_are_not_followed() {
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
fn only_own_files_are_removed() {
    let scene = Scene::new();
    scene.reserve("10.0.0.2", owner(2));
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
    assert_eq!(scene.owned(owner(2)), ips(&[]), "the last step of the work frees all");
}

#[test]
fn a_directory_writable_by_others_is_refused() {
    for (mode, user) in [(0o777, 0), (0o770, 0), (0o700, 65_534)] {
        let scene = Scene::new();
        let root = scene.path(".cnibox");
        fs::create_dir(&root).unwrap();
        fs::set_permissions(&root, fs::Permissions::from_mode(mode)).unwrap();
        chown(&root, Some(user), None).unwrap();
        work(&scene);
        assert_eq!(fs::read_dir(&root).unwrap().count(), 0, "{mode:o} of {user}");
        assert_eq!(fs::metadata(&root).unwrap().permissions().mode() & 0o777, mode);
        assert!(!scene.path(".cnibox-tmp").exists());
    }
}

#[test]
fn a_hard_link_to_another_file_is_not_written_to() {
    let (scene, victim) = (Scene::new(), tempfile::NamedTempFile::new().unwrap());
    fs::write(victim.path(), "precious").unwrap();
    fs::hard_link(victim.path(), scene.path("last_reserved_ip.0")).unwrap();
    let error = scene.open().set_last_reserved(0, ip("10.0.0.3")).unwrap_err();
    assert!(error.message().ends_with("it has a second name (hard link)"), "{error}");
    assert_eq!(fs::read_to_string(victim.path()).unwrap(), "precious");
}

#[test]
fn a_linked_network_directory_must_be_roots() {
    let scene = Scene::new();
    let open = || LeaseStore::open(&scene.dir, "net", LeaseOptions::default());
    fs::create_dir(scene.path("disk")).unwrap();
    for target in [scene.path("disk"), PathBuf::from("disk")] {
        symlink(target, scene.path("net")).unwrap();
        assert!(open().unwrap().reserve_address(ip("10.0.0.2"), owner(1), None).unwrap());
        assert_eq!(open().unwrap().release_attachment(owner(1)).unwrap(), ips(&["10.0.0.2"]));
        fs::remove_file(scene.path("net")).unwrap();
    }
    let other = tempfile::tempdir().unwrap();
    symlink(other.path(), scene.path("net")).unwrap();
    lchown(scene.path("net"), Some(65_534), None).unwrap();
    let error = open().unwrap_err();
    let text = "net: a symbolic link that belongs to user 65534";
    assert!(error.message().ends_with(text), "{error}");
    assert!(LeaseListing::open_writable(&scene.dir, "net", LeaseOptions::default()).is_err());
    assert_eq!(fs::read_dir(other.path()).unwrap().count(), 0);
}
