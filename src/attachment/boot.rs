//! The boot in which an attachment was made: everything that a container has on the host ends with the boot.

use std::path::Path;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::files;
use crate::sysctl::{self, REPLACED};

/// The machine id, machine-id(5).
const MACHINE_ID: &str = "/etc/machine-id";
/// Limit of its size in bytes.
const MAX_ID_BYTES: usize = 64;

/// A boot of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootIdentity {
    /// The machine id; `None` if it is unknown.
    pub machine: Option<String>,
    /// The [boot id](sysctl::boot_id).
    pub id: String,
}

/// When something was made, relative to the current boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BootRelation {
    /// In this boot.
    Now,
    /// On this machine, in an earlier boot.
    Earlier,
    /// In another boot, of which nothing is proved: it may be a later one, or of another machine that shares the files.
    #[default]
    Elsewhere,
}

impl BootIdentity {
    /// The current boot, read once by a process. One that cannot be identified is no other boot, not even itself.
    pub fn current() -> BootIdentity {
        static CURRENT: OnceLock<BootIdentity> = OnceLock::new();
        let read = || {
            let id = sysctl::boot_id().unwrap_or_else(|_| REPLACED.to_string());
            BootIdentity { machine: machine_id(), id }
        };
        // Unit tests play several boots.
        if cfg!(test) { read() } else { CURRENT.get_or_init(read).clone() }
    }

    /// When something was made, at `created` (seconds since 1970, by the wall clock) in this boot.
    ///
    /// It was made in an earlier boot if both boot ids are the kernel's own, both are of this machine, and the wall
    /// clock agrees. A clock that was set back makes the answer [`BootRelation::Elsewhere`], never
    /// [`BootRelation::Earlier`].
    pub fn relation_to(&self, current: &BootIdentity, created: i64) -> BootRelation {
        let id = strip_replaced_mark(&self.id);
        if id == strip_replaced_mark(&current.id) && !id.is_empty() {
            return BootRelation::Now;
        }
        let is_kernels = |boot: &BootIdentity| !boot.id.starts_with(REPLACED);
        let is_proved = is_kernels(self) && is_kernels(current) && self.is_same_machine(current);
        let is_earlier = is_proved && boot_start().is_some_and(|start| created < start);
        if is_earlier { BootRelation::Earlier } else { BootRelation::Elsewhere }
    }

    /// Whether both are certainly of one machine.
    pub fn is_same_machine(&self, other: &BootIdentity) -> bool {
        self.machine.is_some() && self.machine == other.machine
    }
}

/// Releases up to 0.2.0 did not write the mark.
fn strip_replaced_mark(id: &str) -> &str {
    id.trim_start_matches(REPLACED)
}

/// The wall clock's time in seconds since 1970.
pub fn current_unix_time() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_secs()).unwrap_or_default()
}

/// The wall clock's time at which the kernel was started, in seconds since 1970.
fn boot_start() -> Option<i64> {
    #[cfg(test)]
    if let Some(start) = tests::BOOT_START.get() {
        return Some(start);
    }
    Some(current_unix_time() - clock_gettime(ClockId::CLOCK_BOOTTIME).ok()?.tv_sec())
}

/// The id of this machine; `None` if there is none, or the file is on a tmpfs, which changes at each boot.
fn machine_id() -> Option<String> {
    #[cfg(test)]
    if let Some(machine) = tests::MACHINE.get() {
        return Some(machine.to_owned());
    }
    read_machine_id(MACHINE_ID)
}

fn read_machine_id(path: &str) -> Option<String> {
    if statfs(path).ok()?.filesystem_type() == TMPFS_MAGIC {
        return None;
    }
    let text =
        String::from_utf8(files::read_regular_file(Path::new(path), MAX_ID_BYTES).ok()?).ok()?;
    let id = text.trim();
    // An image may have the text "uninitialized" in the file.
    let is_id = id.len() == 32 && id.chars().all(|c| c.is_ascii_hexdigit());
    is_id.then(|| id.to_owned())
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;
    use std::fs;

    use super::*;

    thread_local! {
        /// The machine that this thread takes for its own, instead of the one it is on.
        pub(crate) static MACHINE: Cell<Option<&'static str>> = const { Cell::new(None) };
        /// The time at which this thread's kernel was started, instead of the true one.
        pub(crate) static BOOT_START: Cell<Option<i64>> = const { Cell::new(None) };
    }

    fn boot_identity(machine: &str, id: &str) -> BootIdentity {
        BootIdentity {
            machine: Some(machine.to_owned()).filter(|id| !id.is_empty()),
            id: id.to_owned(),
        }
    }

    #[test]
    fn an_earlier_boot_needs_machine_boot_id_and_time() {
        const LONG_AGO: i64 = 1_000_000_000;
        const FUTURE: i64 = 1 << 40;
        for (then, now, created, made) in [
            (boot_identity("m", "a"), boot_identity("m", "a"), FUTURE, BootRelation::Now),
            (boot_identity("m", "a"), boot_identity("m", "b"), LONG_AGO, BootRelation::Earlier),
            // Made after the start of this boot, according to the clock.
            (boot_identity("m", "a"), boot_identity("m", "b"), FUTURE, BootRelation::Elsewhere),
            // Another machine, or unknown ones.
            (boot_identity("m", "a"), boot_identity("n", "b"), LONG_AGO, BootRelation::Elsewhere),
            (boot_identity("m", "a"), boot_identity("", "b"), LONG_AGO, BootRelation::Elsewhere),
            (boot_identity("", "a"), boot_identity("m", "b"), LONG_AGO, BootRelation::Elsewhere),
            (boot_identity("", "a"), boot_identity("", "b"), LONG_AGO, BootRelation::Elsewhere),
            (boot_identity("", "a"), boot_identity("m", "a"), LONG_AGO, BootRelation::Now),
            // A container manager's ids.
            (boot_identity("m", "~a"), boot_identity("m", "b"), LONG_AGO, BootRelation::Elsewhere),
            (boot_identity("m", "a"), boot_identity("m", "~b"), LONG_AGO, BootRelation::Elsewhere),
            (boot_identity("m", "a"), boot_identity("m", "~a"), LONG_AGO, BootRelation::Now),
            // Boots that cannot be identified.
            (boot_identity("m", "~"), boot_identity("m", "~"), LONG_AGO, BootRelation::Elsewhere),
        ] {
            assert_eq!(then.relation_to(&now, created), made, "{then:?} {now:?} {created}");
        }
    }

    #[test]
    fn invalid_machine_ids_are_ignored() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        for text in ["", "uninitialized\n", "0123456789abcdef0123456789abcde"] {
            fs::write(path, text).unwrap();
            assert_eq!(read_machine_id(path), None, "{text}");
        }
        assert_eq!(read_machine_id("/no/such"), None);
    }
}
