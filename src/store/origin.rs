//! Where and when a table was made: what it notes of containers counts for one boot of one machine.

use std::fs::File;
use std::io::Read;

use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};

use super::table::digest;

/// What systemd and its like give a machine once and for all.
const MACHINE_ID: &str = "/etc/machine-id";
/// What stands for a machine that has none.
const NOT_KNOWN: [u8; 16] = [0; 16];

/// Hashes of the boot and of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Origin {
    boot: [u8; 16],
    machine: [u8; 16],
}

impl Origin {
    /// This machine, in the boot of this id.
    pub(super) fn here(boot: &str) -> Origin {
        let machine = machine_id().map_or(NOT_KNOWN, |id| digest(&id));
        Origin { boot: digest(boot), machine }
    }

    pub(super) fn is_of_boot(&self, boot: &str) -> bool {
        self.boot == digest(boot)
    }

    /// Whether both are known and are different machines.
    pub(super) fn is_elsewhere(&self, other: &Origin) -> bool {
        let known = self.machine != NOT_KNOWN && other.machine != NOT_KNOWN;
        known && self.machine != other.machine
    }

    pub(super) fn bytes(&self) -> [u8; 32] {
        let mut bytes = [0; 32];
        bytes[..16].copy_from_slice(&self.boot);
        bytes[16..].copy_from_slice(&self.machine);
        bytes
    }

    pub(super) fn parse(boot: &[u8], machine: &[u8]) -> Option<Origin> {
        Some(Origin { boot: boot.try_into().ok()?, machine: machine.try_into().ok()? })
    }
}

/// One that is kept in memory is made anew at each boot, and tells nothing.
#[cfg(not(test))]
fn machine_id() -> Option<String> {
    read(MACHINE_ID)
}

#[cfg(test)]
fn machine_id() -> Option<String> {
    super::tests::MACHINE.get().map(str::to_owned).or_else(|| read(MACHINE_ID))
}

fn read(path: &str) -> Option<String> {
    let file = File::open(path).ok()?;
    if fstatfs(&file).ok()?.filesystem_type() == TMPFS_MAGIC {
        return None;
    }
    let mut text = String::new();
    file.take(64).read_to_string(&mut text).ok()?;
    let id = text.trim();
    // An image may have "uninitialized" there.
    let is_id = id.len() == 32 && id.chars().all(|c| c.is_ascii_hexdigit());
    is_id.then(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_machine_id_is_none() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        for text in ["", "uninitialized\n", "0123456789abcdef0123456789abcde"] {
            std::fs::write(path, text).unwrap();
            assert_eq!(read(path), None, "{text}");
        }
        assert_eq!(read("/no/such"), None);
        let here = Origin::parse(&[1; 16], &[2; 16]).unwrap();
        for (machine, elsewhere) in [([2; 16], false), ([3; 16], true), (NOT_KNOWN, false)] {
            let there = Origin::parse(&[4; 16], &machine).unwrap();
            assert_eq!(
                (there.is_elsewhere(&here), here.is_elsewhere(&there)),
                (elsewhere, elsewhere)
            );
        }
    }
}
