//! The table against a simple model, and all that a file may be that is no table.

use std::collections::HashSet;
use std::fs;
use std::net::Ipv4Addr;

use super::*;

struct Scene(tempfile::TempDir);

impl Scene {
    fn new() -> Scene {
        Scene(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("index")
    }

    fn create(&self, entries: &[(Key, IpAddr)]) -> Table {
        let entries: Vec<_> = entries.iter().map(|(key, ip)| entry(*key, *ip)).collect();
        Table::create(self.folder(), Origin::here("boot"), &entries).unwrap()
    }

    fn open(&self) -> Result<Table> {
        Ok(Table::open(&self.folder(), "boot")?.0)
    }

    fn folder(&self) -> Rc<Dir> {
        Rc::new(Dir::open(self.0.path()).unwrap())
    }

    fn salvage(&self) -> Option<(Vec<Entry>, Origin)> {
        salvage(&self.folder(), NAME)
    }

    fn damage(&self, at: usize, bytes: &[u8]) {
        let mut content = fs::read(self.path()).unwrap();
        content[at..at + bytes.len()].copy_from_slice(bytes);
        fs::write(self.path(), content).unwrap();
    }
}

/// With a note that is all sevens.
fn entry(key: Key, ip: IpAddr) -> Entry {
    Entry { key, ip, note: Note::parse(&[7; 32]).unwrap() }
}

fn ip(n: u32) -> IpAddr {
    Ipv4Addr::from_bits(0x0a00_0000 + n).into()
}

fn key(n: u32) -> Key {
    Key::new(&format!("c{n}"), Some("eth0"))
}

fn held(table: &mut Table, n: u32) -> Vec<IpAddr> {
    let (mut ips, old) = table.lookup(&format!("c{n}"), "eth0").unwrap();
    assert!(old.is_empty());
    ips.sort();
    ips
}

#[test]
fn the_layout_is_the_same_everywhere() {
    let scene = Scene::new();
    let v6: IpAddr = "2001:db8::7".parse().unwrap();
    let key = Key { id: 0x0102_0304_0506_0709, ifname: 0x1112_1314_1516_1718 };
    let mut table = scene.create(&[(key, ip(9))]);
    table.insert(entry(key, v6)).unwrap();
    table.finish().unwrap();
    let bytes = fs::read(scene.path()).unwrap();
    assert_eq!(bytes.len(), 64 + 32 * 64);
    assert_eq!(bytes[..8], *b"cniboxL\x02");
    assert_eq!(bytes[8..24], digest("boot"));
    assert_eq!(bytes[24..36], [0, 0, 0, 32, 0, 0, 0, 2, 0, 0, 0, 0]);
    // Half of the id's number, modulo 32, is 4.
    let at = 64 + 4 * 64;
    let head = [1, 2, 3, 4, 5, 6, 7, 9, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18];
    let mapped = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 9];
    assert_eq!(bytes[at..at + 32], [head, mapped].concat());
    let note = entry(key, v6).note.bytes();
    assert_eq!((&bytes[at + 32..at + 64], &bytes[at + 96..at + 128]), (&note[..], &note[..]));
    let v6 = [0x20, 1, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7];
    assert_eq!(bytes[at + 64..at + 96], [head, v6].concat());
    assert!(bytes[64..at].iter().chain(&bytes[at + 128..]).all(|byte| *byte == 0));
}

#[test]
fn agrees_with_a_model() {
    let scene = Scene::new();
    let mut table = scene.create(&[]);
    let mut model: HashSet<(u32, IpAddr)> = HashSet::new();
    let mut random = 1_u32;
    for step in 0..20_000 {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        // First it grows, then it lives on with one size.
        let (n, ip) = ((random >> 8) % 400.min(step / 8 + 1), ip(random >> 24 & 3));
        if model.remove(&(n, ip)) {
            table.remove(key(n), ip).unwrap();
        } else {
            model.insert((n, ip));
            table.insert(entry(key(n), ip)).unwrap();
        }
        if step % 500 == 0 {
            table.finish().unwrap();
            table = scene.open().unwrap();
            assert_eq!(table.header.taken as usize, model.len());
            for n in 0..400 {
                let mut want: Vec<_> =
                    model.iter().filter(|(owner, _)| *owner == n).map(|(_, ip)| *ip).collect();
                want.sort();
                assert_eq!(held(&mut table, n), want, "{n} after {step}");
            }
        }
        assert!(!table.header.is_crowded());
    }
    assert!(table.header.slots <= 4096, "removed slots are used again: {:?}", table.header);
}

#[test]
fn built_whole_is_like_built_bit_by_bit() {
    let entries: Vec<_> = (0..5_000).map(|n| (key(n), ip(n))).collect();
    let scene = Scene::new();
    let mut table = scene.create(&entries);
    assert!((0..5_000).all(|n| held(&mut table, n) == [ip(n)]));
    let mut table = scene.create(&[]);
    assert!(entries.iter().all(|(key, ip)| table.insert(entry(*key, *ip)).is_ok()));
    assert!((0..5_000).all(|n| held(&mut table, n) == [ip(n)]));
    assert!(held(&mut table, 5_000).is_empty());
    assert!(!scene.0.path().join(TEMP).exists());
}

#[test]
fn the_two_forms_and_the_interfaces_are_told_apart() {
    let scene = Scene::new();
    let keys = [Some("eth0"), Some("eth1"), None].map(|ifname| Key::new("c", ifname));
    let entries: Vec<_> = keys.into_iter().zip((1..).map(ip)).collect();
    let mut table = scene.create(&entries);
    assert_eq!(table.lookup("c", "eth0").unwrap(), (vec![ip(1)], vec![ip(3)]));
    assert_eq!(table.lookup("c", "eth2").unwrap(), (vec![], vec![ip(3)]));
    assert_eq!(table.lookup("d", "eth0").unwrap(), (vec![], vec![]));
    assert!(table.remove(keys[0], ip(2)).is_err(), "another's");
    table.remove(keys[0], ip(1)).unwrap();
    table.insert(entry(keys[1], ip(2))).unwrap();
    assert_eq!(table.header.taken, 2, "noted twice is noted once");
    assert_eq!(table.lookup("c", "eth1").unwrap(), (vec![ip(2)], vec![ip(3)]));
}

#[test]
fn what_is_no_table_is_refused() {
    let number = |n: u32| n.to_be_bytes();
    let headers: [(&str, usize, &[u8]); 8] = [
        ("magic", 0, b"CNI"),
        ("a later version", 7, &[3]),
        ("another boot", 8, &[0; 16]),
        ("no slots", 24, &number(0)),
        ("more slots than there are", 24, &number(128)),
        ("not a power of two", 24, &number(33)),
        ("full", 28, &number(32)),
        ("not known", 52, &[1]),
    ];
    let scene = Scene::new();
    for (what, at, bytes) in headers {
        scene.create(&[(key(1), ip(1))]);
        assert!(scene.open().is_ok());
        scene.damage(at, bytes);
        assert!(scene.open().is_err(), "{what}");
    }
    let whole = fs::read(scene.path()).unwrap();
    for length in [0, 1, 63, 64, whole.len() - 1] {
        scene.create(&[(key(1), ip(1))]);
        fs::write(scene.path(), &whole[..length]).unwrap();
        assert!(scene.open().is_err(), "cut to {length}");
    }
    fs::remove_file(scene.path()).unwrap();
    assert!(scene.open().is_err());
}

#[test]
fn slots_that_cannot_be_are_errors() {
    let scene = Scene::new();
    let garbage: [(&str, [u8; 8]); 2] = [("even", [2; 8]), ("neither", [0, 0, 0, 0, 0, 0, 1, 0])];
    for (what, bytes) in garbage {
        scene.create(&[]);
        for slot in 0..32 {
            scene.damage(64 + 64 * slot, &bytes);
        }
        let mut table = scene.open().unwrap();
        assert!(table.lookup("c", "eth0").is_err(), "{what}");
        assert!(table.insert(entry(key(1), ip(1))).is_err(), "{what}");
        assert!(table.remove(key(1), ip(1)).is_err(), "{what}");
        assert!(table.rewrite().is_err(), "{what}");
    }
    for slot in 0..32 {
        scene.damage(64 + 64 * slot, &[3; 64]);
    }
    let mut table = scene.open().unwrap();
    assert!(table.lookup("c", "eth0").is_err(), "no end");
    assert!(table.insert(entry(key(1), ip(1))).is_err(), "no room");
}

#[test]
fn shrinking_under_it_is_an_error() {
    let scene = Scene::new();
    let entries: Vec<_> = (0..1_000).map(|n| (key(n), ip(n))).collect();
    let mut table = scene.create(&entries);
    table.file().set_len(64).unwrap();
    assert!(table.lookup("c1", "eth0").is_err());
    assert!(table.lookup("c1", "eth0").is_err(), "also the second time");
}

#[test]
fn entries_are_had_from_a_table_of_any_boot_and_from_nothing_else() {
    let scene = Scene::new();
    let entries: Vec<_> = (0..100).map(|n| (key(n), ip(n))).collect();
    scene.create(&entries);
    for (boot, this_boot) in [("boot", true), ("another", false)] {
        let (mut found, origin) = scene.salvage().unwrap();
        found.sort_by_key(|entry| entry.ip);
        let want: Vec<_> = entries.iter().map(|(key, ip)| entry(*key, *ip)).collect();
        assert_eq!((found, origin.is_of_boot(boot)), (want, this_boot));
    }
    // A slot that makes no sense costs that one only.
    let taken = |bytes: &[u8]| bytes.chunks_exact(64).position(|slot| slot[7] & 1 == 1);
    let first = taken(&fs::read(scene.path()).unwrap()[64..]).unwrap();
    scene.damage(64 + 64 * first, &[2; 8]);
    assert_eq!(scene.salvage().unwrap().0.len(), 99);
    scene.damage(24, &[1; 4]);
    assert!(scene.salvage().is_none());
    fs::write(scene.path(), "c1\r\neth0").unwrap();
    assert!(scene.salvage().is_none());
}
