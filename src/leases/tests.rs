//! The lease store as a whole: both implementations' leases, garbage collection, many at once.

mod cost;
mod heal;
mod trespass;
mod trust;

use std::cell::Cell;
use std::collections::HashSet;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::time::Duration;
use std::{fs, io};

use super::journal::Journal;
use super::lines::{Contents, Entry, FileId, Removal};
use super::quarantine::Quarantine;
use super::*;
use crate::attachment::boot::tests::{BOOT_START, MACHINE};
use crate::attachment::{Boot, Doubt, HostEnd, Liveness, Made};
use crate::files::dir::Dir;
use crate::files::{Error, Result};

thread_local! {
    /// How many lease files this thread has read.
    pub(super) static READS: Cell<usize> = const { Cell::new(0) };
}

const BOOT: &str = "this-boot";

/// A boot of the machine of this thread.
fn boot(id: &str) -> Boot {
    Boot { machine: Some(MACHINE.get().unwrap_or("machine").to_owned()), id: id.to_owned() }
}

const NETWORK: &str = "net";

struct Scene {
    root: tempfile::TempDir,
    dir: PathBuf,
}

impl Scene {
    fn new() -> Scene {
        // Whatever the test makes is older than a boot that it simulates later.
        BOOT_START.set(Some(i64::MAX));
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join(NETWORK)).unwrap();
        Scene { dir: root.path().join(NETWORK), root }
    }

    fn dir(&self) -> &Path {
        &self.dir
    }

    fn open(&self) -> LeaseStore {
        self.open_in_boot(BOOT)
    }

    fn open_in_boot(&self, boot: &str) -> LeaseStore {
        let terms = LeaseOptions::default();
        LeaseStore::open_dir(self.opened(), Some(self::boot(boot)), terms).unwrap()
    }

    fn opened(&self) -> Dir {
        Dir::open(self.dir()).unwrap()
    }

    fn folder(&self) -> Dir {
        journal::make_folder(&self.opened()).unwrap()
    }

    /// The journal as a command finds it.
    fn journal(&self) -> Journal {
        Journal::open(&self.opened(), &self.folder(), &boot(BOOT)).unwrap()
    }

    /// A journal of nothing.
    fn empty_journal(&self) -> Journal {
        let nothing = Contents::default();
        Journal::create(&self.opened(), &self.folder(), &boot(BOOT), &nothing).unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir().join(name)
    }

    /// What the reference, or a person, does behind our back.
    fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.path(name), content).unwrap();
    }

    fn reserve(&self, address: &str, owner: &LeaseOwner) {
        assert!(self.open().reserve(ip(address), owner).unwrap());
    }

    fn journal_file(&self) -> PathBuf {
        self.path(".cnibox/leases")
    }

    fn text(&self) -> String {
        fs::read_to_string(self.journal_file()).unwrap()
    }

    fn end(&self, journal: Journal) {
        let quarantine = Quarantine::new(Duration::ZERO, None);
        journal.seal(&self.opened(), &self.folder(), &quarantine).unwrap();
    }

    /// Gives folder and journal one seal, as a session does.
    fn seal(&self) {
        stamp(&self.journal_file(), 2);
        stamp(self.dir(), 2);
    }

    fn sealed(&self) -> bool {
        fs::metadata(self.dir()).unwrap().mtime_nsec() == 424_242_000
    }

    /// The first step of a reservation for container 1.
    fn create(&self, address: &str) {
        self.write(address, "container1\r\neth0");
    }

    fn owned(&self, owner: &LeaseOwner) -> Vec<IpAddr> {
        let mut ips = self.open().owned_by(owner).unwrap();
        ips.sort();
        ips
    }
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn ips(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| ip(text)).collect()
}

fn owner(n: usize) -> LeaseOwner {
    LeaseOwner::new(&format!("container{n}"), "eth0")
}

/// The line of a lease of container 1, whose file is there.
fn entry(scene: &Scene, address: &str, of_file: &str) -> Entry {
    let file = FileId::of(&fs::metadata(scene.path(of_file)).unwrap());
    Entry { lease: owner(1).lease(ip(address)), file, end: None, made: Made::Now }
}

fn stamp(path: &Path, second: u64) {
    let time = std::time::UNIX_EPOCH + Duration::new(second, 424_242_000);
    fs::File::open(path).unwrap().set_modified(time).unwrap();
}

fn reads(work: impl FnOnce()) -> usize {
    READS.set(0);
    work();
    READS.get()
}

#[test]
fn files_are_those_of_the_reference() {
    let root = tempfile::tempdir().unwrap();
    let data_dir = root.path().join("a/b");
    assert!(
        LeaseStore::open_existing(&data_dir, "net", LeaseOptions::default()).unwrap().is_none()
    );
    assert!(!data_dir.exists());
    let mut store = LeaseStore::open(&data_dir, "net", LeaseOptions::default()).unwrap();
    let owner = LeaseOwner::new(" c1\t", "eth0");
    assert!(store.reserve(ip("10.1.2.2"), &owner).unwrap());
    assert!(store.reserve(ip("2001:DB8:0::2"), &owner).unwrap());
    assert!(!store.reserve(ip("10.1.2.2"), &LeaseOwner::new("c2", "eth0")).unwrap());
    store.set_last_reserved(0, ip("10.1.2.2")).unwrap();
    drop(store);
    let dir = data_dir.join("net");
    for (name, content) in [
        ("10.1.2.2", "c1\r\neth0"),
        ("2001:db8::2", "c1\r\neth0"),
        ("last_reserved_ip.0", "10.1.2.2"),
        ("lock", ""),
    ] {
        assert_eq!(fs::read_to_string(dir.join(name)).unwrap(), content, "{name}");
    }
    let mode = |name| fs::metadata(dir.join(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode("10.1.2.2"), 0o600);
    assert_eq!(mode(""), 0o755);
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 5, "those four and .cnibox");
    let mut store =
        LeaseStore::open_existing(&data_dir, "net", LeaseOptions::default()).unwrap().unwrap();
    assert_eq!(store.release(&owner).unwrap().len(), 2);
    assert!(store.release(&owner).unwrap().is_empty());
    assert_eq!(store.last_reserved(0), Some(ip("10.1.2.2")), "kept");
}

#[test]
fn last_reserved_tolerates() {
    let scene = Scene::new();
    let store = scene.open();
    assert_eq!(store.last_reserved(0), None);
    for (content, want) in [("10.0.0.2\n", Some(ip("10.0.0.2"))), ("", None), ("x", None)] {
        scene.write("last_reserved_ip.0", content);
        assert_eq!(store.last_reserved(0), want);
    }
    fs::create_dir(scene.path("last_reserved_ip.1")).unwrap();
    assert_eq!(store.last_reserved(1), None);
}

#[test]
fn old_leases_go_only_if_there_is_no_present_one() {
    let scene = Scene::new();
    scene.write("10.0.0.2", "container1");
    scene.write("10.0.0.3", "container1\r\neth0\n");
    scene.write("10.0.0.4", "container1\r\neth1");
    for _ in 0..2 {
        assert_eq!(scene.owned(&owner(1)), ips(&["10.0.0.2", "10.0.0.3"]));
    }
    assert_eq!(scene.open().release(&owner(1)).unwrap(), ips(&["10.0.0.3"]));
    assert_eq!(scene.open().release(&owner(1)).unwrap(), ips(&["10.0.0.2"]));
    assert!(scene.path("10.0.0.4").exists());
}

#[test]
fn a_reservation_by_hand_is_never_given_out() {
    let files: [(&str, &[u8]); 8] = [
        ("10.0.0.2", b""),
        ("10.0.0.3", b"\0\0\0\0\0\0"),
        ("10.0.0.4", b"reserved for the printer\n"),
        ("10.0.0.5", b"printer"),
        ("10.0.0.6", b"# do not use"),
        ("10.0.0.7", b"container7\r\n"),
        ("10.0.0.8", b"container1\neth0"),
        ("2001:db8::5", b"\xde\xad"),
    ];
    let scene = Scene::new();
    scene.reserve("10.0.0.9", &owner(9));
    for (name, content) in files {
        scene.write(name, content);
    }
    std::os::unix::fs::symlink("nowhere", scene.path("10.0.0.10")).unwrap();
    fs::create_dir(scene.path("10.0.0.11")).unwrap();
    let all: HashSet<_> = (2..12).map(|n| ip(&format!("10.0.0.{n}"))).collect();
    let all: HashSet<_> = all.into_iter().chain([ip("2001:db8::5")]).collect();
    for boot in [BOOT, BOOT, "next", "third"] {
        let mut store = scene.open_in_boot(boot);
        assert_eq!(store.taken().unwrap(), all);
        for ip in &all {
            assert!(!store.reserve(*ip, &owner(1)).unwrap(), "{ip}");
        }
        assert!(store.release(&owner(1)).unwrap().is_empty());
        assert!(
            !store
                .reclaim_dead(|_, gone| gone)
                .unwrap()
                .iter()
                .any(|gone| gone.lease.ip != ip("10.0.0.9"))
        );
        let removed = store.retain(|lease| lease.ifname.is_none()).unwrap();
        assert!(removed.iter().all(|lease| lease.ip == ip("10.0.0.9")));
        assert_eq!(store.reserved().unwrap(), 8, "those that name no container");
        drop(store);
        scene.reserve("10.0.0.9", &owner(9));
    }
    for (name, content) in files {
        assert_eq!(fs::read(scene.path(name)).unwrap(), content, "{name}");
    }
    // A person may give them back.
    let removed = scene.open().remove_reserved(|reserved| reserved.empty).unwrap();
    assert_eq!(removed.iter().map(|r| r.ip).collect::<Vec<_>>(), ips(&["10.0.0.2", "10.0.0.3"]));
    let removed = scene.open().remove_reserved(|reserved| reserved.ip == ip("10.0.0.10")).unwrap();
    assert_eq!(removed.len(), 1);
    scene.reserve("10.0.0.10", &owner(1));
}

#[test]
fn a_lease_that_a_power_cut_emptied_is_told_from_a_reservation() {
    let scene = Scene::new();
    for n in 2..6 {
        scene.reserve(&format!("10.0.0.{n}"), &owner(n));
    }
    // What is lost is what the file has, not its times.
    for (name, length) in [("10.0.0.2", 0), ("10.0.0.3", 8)] {
        let file = fs::File::options().write(true).open(scene.path(name)).unwrap();
        let time = file.metadata().unwrap().modified().unwrap();
        file.set_len(0).and_then(|()| file.set_len(length)).unwrap();
        file.set_modified(time).unwrap();
    }
    scene.write("10.0.0.4", "");
    let left = || scene.open_in_boot("next").taken().unwrap();
    assert_eq!(left(), HashSet::from_iter(ips(&["10.0.0.4", "10.0.0.5"])));
    assert_eq!(left().len(), 2);
}

#[test]
fn a_rollback_takes_back_only_its_own() {
    let scene = Scene::new();
    scene.reserve("10.0.0.2", &owner(1));
    scene.reserve("10.0.0.3", &owner(1));
    scene.reserve("10.0.0.4", &owner(2));
    let mut store = scene.open();
    assert!(store.release_address(ip("10.0.0.3"), &owner(1)).unwrap());
    assert!(!store.release_address(ip("10.0.0.3"), &owner(1)).unwrap(), "gone");
    assert!(!store.release_address(ip("10.0.0.4"), &owner(1)).unwrap(), "another's");
    drop(store);
    assert_eq!(scene.owned(&owner(1)), ips(&["10.0.0.2"]));
    assert_eq!(scene.owned(&owner(2)), ips(&["10.0.0.4"]));
}

#[test]
fn gc_keeps_what_it_is_told_to() {
    let scene = Scene::new();
    scene.reserve("10.0.0.2", &owner(1));
    scene.reserve("10.0.0.3", &owner(1));
    scene.reserve("10.0.0.4", &owner(2));
    scene.open().set_last_reserved(0, ip("10.0.0.4")).unwrap();
    scene.write("10.0.0.5", "container3");
    let mut store = scene.open();
    let keep = |lease: &Lease| lease.id == "container3" || lease.ip == ip("10.0.0.2");
    let gone: HashSet<IpAddr> = store.retain(keep).unwrap().iter().map(|l| l.ip).collect();
    assert_eq!(gone, HashSet::from_iter(ips(&["10.0.0.3", "10.0.0.4"])));
    drop(store);
    assert!(scene.sealed());
    assert_eq!(scene.owned(&owner(1)), ips(&["10.0.0.2"]));
    assert_eq!(scene.owned(&owner(2)), ips(&[]));
    let left = scene.open().leases().unwrap();
    assert_eq!(left.len(), 2);
    assert!(left.contains(&Lease { ip: ip("10.0.0.5"), id: "container3".into(), ifname: None }));
    assert!(scene.path("last_reserved_ip.0").exists() && scene.path("lock").exists());
}

#[test]
fn the_first_commands_of_a_network_make_its_store_together() {
    const COUNT: usize = 8;
    for _ in 0..100 {
        let (scene, start) = (Scene::new(), Barrier::new(COUNT));
        let open = || {
            start.wait();
            LeaseStore::open(scene.dir(), "net", LeaseOptions::default()).map(drop)
        };
        std::thread::scope(|scope| {
            let opening: Vec<_> = (0..COUNT).map(|_| scope.spawn(open)).collect();
            for opened in opening {
                opened.join().unwrap().unwrap();
            }
        });
    }
}

#[test]
fn a_listing_changes_nothing() {
    let scene = Scene::new();
    let peek =
        |network: &str| Listing::open_writable(scene.dir(), network, LeaseOptions::default());
    assert!(peek("net").unwrap().taken().is_empty());
    assert_eq!(fs::read_dir(scene.dir()).unwrap().count(), 0);
    drop(LeaseStore::open(scene.dir(), "net", LeaseOptions::default()).unwrap());
    scene.write("net/10.0.0.2", "container1\r\neth0");
    scene.write("net/10.0.0.3", "");
    let listing = peek("net").unwrap();
    assert_eq!(listing.taken().len(), 2);
    assert_eq!(listing.unavailable().len(), 2, "no file is taken for nothing");
    assert_eq!(listing.reservations(), [Reservation { ip: ip("10.0.0.3"), empty: true }]);
    scene.write("file", "");
    assert!(peek("file/net").is_err() && peek("file").is_err());
}

#[test]
fn many_at_once_never_share_an_address() {
    let scene = Scene::new();
    let (threads, each) = (8, 50);
    let start = Barrier::new(threads);
    let take = |thread: usize| {
        start.wait();
        let reserve = |n| {
            let mut store = scene.open();
            let owner = owner(thread * each + n);
            // All start at the same address.
            let free = (1..).map(|i| IpAddr::from(Ipv4Addr::from_bits(0x0a00_0000 + i)));
            free.into_iter().find(|ip| store.reserve(*ip, &owner).unwrap()).unwrap()
        };
        (0..each).map(reserve).collect::<Vec<_>>()
    };
    let all: Vec<IpAddr> = std::thread::scope(|scope| {
        let take = &take;
        let handles: Vec<_> = (0..threads).map(|n| scope.spawn(move || take(n))).collect();
        handles.into_iter().flat_map(|handle| handle.join().unwrap()).collect()
    });
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), threads * each);
    assert_eq!(scene.open().leases().unwrap().len(), threads * each);
}
