//! The lease store as a whole: both implementations' leases, garbage collection, many at once.

mod lost;
mod reclaim;
mod trespass;
mod trust;

use std::cell::Cell;
use std::collections::HashSet;
use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::lines::JournalContents;
use super::notes::judge_entries;
use super::*;
use crate::attachment::boot::tests::{BOOT_START, MACHINE};
use crate::attachment::{
    AttachmentId, BootIdentity, ContainerVeth, HostVeth, Liveness, UnknownBecause,
};
use crate::files::dir::OpenDirectory;

thread_local! {
    /// How many lease files this thread has read.
    pub(super) static READS: Cell<usize> = const { Cell::new(0) };
}

const BOOT: &str = "this-boot";

/// A boot of this thread's machine, see [`MACHINE`].
fn boot(id: &str) -> BootIdentity {
    BootIdentity { machine: Some(MACHINE.get().unwrap_or("machine").to_owned()), id: id.to_owned() }
}

const NETWORK: &str = "net";

struct Scene {
    root: tempfile::TempDir,
    dir: PathBuf,
}

impl Scene {
    fn new() -> Scene {
        // All leases of the test are older than a boot that the test simulates later.
        BOOT_START.set(Some(i64::MAX));
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join(NETWORK)).unwrap();
        Scene { dir: root.path().join(NETWORK), root }
    }

    fn open(&self) -> LeaseStore {
        self.open_in_boot(BOOT)
    }

    fn open_in_boot(&self, boot: &str) -> LeaseStore {
        self.open_with(boot, LeaseOptions::default())
    }

    fn open_with(&self, boot: &str, options: LeaseOptions) -> LeaseStore {
        LeaseStore::open_directory(
            OpenDirectory::open(&self.dir).unwrap(),
            self::boot(boot),
            options,
        )
        .unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Writes a file as the reference or an administrator does, without an entry in the journal.
    fn write(&self, name: &str, content: impl AsRef<[u8]>) {
        fs::write(self.path(name), content).unwrap();
    }

    fn reserve(&self, address: &str, owner: AttachmentId<'_>) {
        assert!(self.open().reserve_address(ip(address), owner, None).unwrap());
    }

    /// Reserves the address for an attachment with this end of a pair on the host.
    fn attach(&self, address: &str, owner: AttachmentId<'_>, end: HostVeth) {
        assert!(self.open().reserve_address(ip(address), owner, Some(end)).unwrap());
    }

    fn leases(&self) -> Vec<AddressLease> {
        let noted = JournalContents::default();
        self.open().read_all_leases(&noted).unwrap().into_iter().map(|(lease, _)| lease).collect()
    }

    fn journal_file(&self) -> PathBuf {
        self.path(".cnibox/leases")
    }

    fn text(&self) -> String {
        fs::read_to_string(self.journal_file()).unwrap()
    }

    /// Gives directory and journal one seal, as a session does.
    fn seal(&self) {
        stamp(&self.journal_file(), 2);
        stamp(&self.dir, 2);
    }

    fn sealed(&self) -> bool {
        fs::metadata(&self.dir).unwrap().mtime_nsec() == 424_242_000
    }

    /// The first step of a reservation for container 1.
    fn create(&self, address: &str) {
        self.write(address, "container1\r\neth0");
    }

    fn owned(&self, owner: AttachmentId<'_>) -> Vec<IpAddr> {
        let mut ips = self.open().addresses_held_by(owner).unwrap();
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

fn owner(n: usize) -> AttachmentId<'static> {
    AttachmentId { network: NETWORK, ifname: "eth0", id: format!("container{n}").leak() }
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
fn leases_without_an_interface_are_released_last() {
    let scene = Scene::new();
    scene.write("10.0.0.2", "container1");
    scene.write("10.0.0.3", "container1\r\neth0\n");
    scene.write("10.0.0.4", "container1\r\neth1");
    for _ in 0..2 {
        assert_eq!(scene.owned(owner(1)), ips(&["10.0.0.2", "10.0.0.3"]));
    }
    assert_eq!(scene.open().release_attachment(owner(1)).unwrap(), ips(&["10.0.0.3"]));
    assert_eq!(scene.open().release_attachment(owner(1)).unwrap(), ips(&["10.0.0.2"]));
    assert!(scene.path("10.0.0.4").exists());
}

#[test]
fn a_reservation_by_hand_outlasts_boots() {
    let scene = Scene::new();
    scene.write("10.0.0.2", "printer");
    scene.write("10.0.0.3", "");
    symlink("nowhere", scene.path("10.0.0.10")).unwrap();
    fs::create_dir(scene.path("10.0.0.11")).unwrap();
    let all = HashSet::from_iter(ips(&["10.0.0.2", "10.0.0.3", "10.0.0.10", "10.0.0.11"]));
    for boot in [BOOT, "next", "third"] {
        let mut store = scene.open_in_boot(boot);
        assert!(store.release_attachment(owner(1)).unwrap().is_empty());
        assert_eq!(store.reclaim_ended(|_, gone| gone).unwrap(), []);
        assert_eq!(store.retain_leases(|lease| lease.ifname.is_none(), false).unwrap().0, []);
        assert_eq!(
            (store.taken_addresses().unwrap(), store.count_reservations().unwrap()),
            (all.clone(), 3)
        );
    }
    // An administrator may give them back.
    let removed =
        scene.open().remove_reservations(|reserved| reserved.ip == ip("10.0.0.10")).unwrap();
    assert_eq!(removed, [AddressReservation { ip: ip("10.0.0.10"), empty: false }]);
    scene.reserve("10.0.0.10", owner(1));
}

#[test]
fn leases_of_other_attachments_are_not_read() {
    let scene = Scene::new();
    for i in 0..2_000 {
        let ip = Ipv4Addr::from_bits(0x0a01_0000 + i);
        scene.write(&ip.to_string(), format!("other{i}\r\neth0"));
    }
    drop(scene.open());
    let work = || {
        assert_eq!(scene.owned(owner(1)), ips(&[]));
        scene.reserve("10.0.0.2", owner(1));
        assert_eq!(scene.open().release_attachment(owner(1)).unwrap(), ips(&["10.0.0.2"]));
        assert_eq!(scene.owned(owner(1)), ips(&[]));
    };
    assert_eq!(reads(work), 1, "only the lease that is released");
}
