//! What is kept beside a lease to tell later whether its container can still be alive.
//!
//! A note belongs to one file, not to an address: whoever removes and makes the lease anew, or
//! writes something else into it, makes the note void.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;

use nix::time::{ClockId, clock_gettime};

use crate::netns::census::NetnsId;

const EARLIER_BOOT: u32 = 1;
const ELSEWHERE: u32 = 2;

/// One lease file, told from all others that had or will have its name: inode and modification
/// time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileId(u64);

/// What is known of a lease's container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Note {
    /// The file that this was noted of.
    pub(super) file: FileId,
    /// The network namespace that the lease was made for.
    pub(super) netns: Option<NetnsId>,
    /// Seconds from the start of the boot to when this was noted.
    pub(super) since: u32,
    /// The lease was made before this boot.
    pub(super) earlier_boot: bool,
    /// The lease was there when another machine had the store: nothing here tells of its container.
    pub(super) elsewhere: bool,
}

impl FileId {
    pub(super) fn of(meta: &Metadata) -> FileId {
        let time = meta.mtime().wrapping_mul(1_000_000_000).wrapping_add(meta.mtime_nsec());
        // An odd number with its bits well mixed: no two inodes fall together.
        let ino = meta.ino().wrapping_mul(0x9e37_79b9_7f4a_7c15);
        FileId(ino ^ time.cast_unsigned())
    }
}

impl Note {
    /// The same note when its machine is not this one.
    pub(super) fn taken_elsewhere(self) -> Note {
        Note { netns: None, earlier_boot: false, elsewhere: true, ..self }
    }

    /// The note of a lease that is made now for the container in this namespace.
    pub(super) fn new(file: FileId, netns: Option<NetnsId>) -> Note {
        Note { file, netns, since: uptime(), earlier_boot: false, elsewhere: false }
    }

    /// 8 bytes of the file, 4 of the namespace's device, 4 of its number, 8 of its time, 4 of the
    /// time of the note, 4 of flags.
    pub(super) fn bytes(&self) -> [u8; 32] {
        let mut bytes = [0; 32];
        bytes[..8].copy_from_slice(&self.file.0.to_be_bytes());
        if let Some(NetnsId { dev, ino, born }) = self.netns {
            bytes[8..12].copy_from_slice(&dev.to_be_bytes());
            bytes[12..16].copy_from_slice(&ino.to_be_bytes());
            bytes[16..24].copy_from_slice(&born.to_be_bytes());
        }
        bytes[24..28].copy_from_slice(&self.since.to_be_bytes());
        let earlier_boot = if self.earlier_boot { EARLIER_BOOT } else { 0 };
        let flags = earlier_boot | if self.elsewhere { ELSEWHERE } else { 0 };
        bytes[28..].copy_from_slice(&flags.to_be_bytes());
        bytes
    }

    pub(super) fn parse(bytes: &[u8; 32]) -> Option<Note> {
        let long = |at: usize| Some(u64::from_be_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
        let short = |at: usize| Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
        let netns = NetnsId { dev: short(8)?, ino: short(12)?, born: long(16)? };
        Some(Note {
            file: FileId(long(0)?),
            // No inode has the number 0.
            netns: (netns.ino != 0).then_some(netns),
            since: short(24)?,
            earlier_boot: short(28)? & EARLIER_BOOT != 0,
            elsewhere: short(28)? & ELSEWHERE != 0,
        })
    }
}

/// Seconds since the start of the boot, those asleep included; nobody can set this clock.
pub(super) fn uptime() -> u32 {
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME);
    now.ok().and_then(|now| u32::try_from(now.tv_sec()).ok()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn what_is_written_is_read_back() {
        let file = FileId(0x0102_0304_0506_0708);
        let netns = NetnsId { dev: 4, ino: 4_026_532_177, born: u64::MAX - 1 };
        for netns in [Some(netns), None] {
            for (earlier_boot, elsewhere) in [(false, false), (true, false), (false, true)] {
                let note = Note { file, netns, since: 7, earlier_boot, elsewhere };
                assert_eq!(Note::parse(&note.bytes()), Some(note));
            }
        }
    }

    #[test]
    fn a_file_that_was_changed_or_made_anew_is_another() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("10.0.0.2");
        let id = || FileId::of(&fs::metadata(&path).unwrap());
        fs::write(&path, "c1").unwrap();
        let first = id();
        fs::hard_link(&path, dir.path().join("other")).unwrap();
        assert_eq!(id(), first, "a second name changes nothing");
        fs::remove_file(&path).unwrap();
        fs::write(&path, "c1").unwrap();
        let later = std::time::SystemTime::now() + std::time::Duration::from_millis(1);
        fs::File::open(&path).unwrap().set_modified(later).unwrap();
        assert_ne!(id(), first);
    }
}
