//! The boot in which an attachment was created: all kernel objects of an attachment on the host end
//! with the boot.

use std::path::Path;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::sysctl::{self, REPLACED};
use cni::files;

/// The file with the machine id, see machine-id(5).
const MACHINE_ID: &str = "/etc/machine-id";
/// Limit of the size of [`MACHINE_ID`] in bytes.
const MAX_ID_BYTES: usize = 64;

/// A boot of a machine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct BootIdentity {
    /// The machine id; `None` if it is unknown.
    pub machine: Option<String>,
    /// The [boot id](sysctl::boot_id).
    pub id: String,
}

/// When a lease or record was created, relative to the current boot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BootRelation {
    Now,
    /// On this machine, in an earlier boot.
    Earlier,
    /// In another boot that is not certainly an earlier one of this machine: several machines may
    /// share the files.
    #[default]
    Elsewhere,
}

impl BootIdentity {
    /// The current boot, read once by each process. A boot that cannot be identified equals no
    /// boot, not even itself.
    pub fn current() -> BootIdentity {
        static CURRENT: OnceLock<BootIdentity> = OnceLock::new();
        let read = || {
            let id = sysctl::boot_id().unwrap_or_else(|_| REPLACED.to_string());
            BootIdentity { machine: machine_id(), id }
        };
        // Unit tests simulate several boots.
        if cfg!(test) { read() } else { CURRENT.get_or_init(read).clone() }
    }

    /// The relation of this boot to the boot `current`, for a lease or record that was created in
    /// this boot at `created` (seconds since 1970, by the wall clock).
    ///
    /// This boot is an earlier one if both boot ids are the kernel's own, both are of this machine,
    /// and the wall clock agrees. A clock that was set back makes the answer
    /// [`BootRelation::Elsewhere`], never [`BootRelation::Earlier`].
    pub fn relation_to(&self, current: &BootIdentity, created: i64) -> BootRelation {
        if sysctl::is_same_boot(&self.id, &current.id) {
            return BootRelation::Now;
        }
        let is_kernels = |boot: &BootIdentity| !boot.id.starts_with(REPLACED);
        let is_proved = is_kernels(self) && is_kernels(current) && self.is_same_machine(current);
        let is_earlier = is_proved && boot_start().is_some_and(|start| created < start);
        if is_earlier { BootRelation::Earlier } else { BootRelation::Elsewhere }
    }

    /// Whether both boots are certainly of one machine.
    pub fn is_same_machine(&self, other: &BootIdentity) -> bool {
        self.machine.is_some() && self.machine == other.machine
    }
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
    Some(current_unix_time() - seconds_since_boot()?)
}

/// The seconds since the start of the boot, suspend included.
pub fn seconds_since_boot() -> Option<i64> {
    let since = Duration::from(clock_gettime(ClockId::CLOCK_BOOTTIME).ok()?);
    i64::try_from(since.as_secs()).ok()
}

/// The id of this machine; `None` if there is none, or the file is on a tmpfs, which changes at
/// each boot.
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
        /// A machine id for this thread, in place of the true one.
        pub(crate) static MACHINE: Cell<Option<&'static str>> = const { Cell::new(None) };
        /// A start time of the kernel for this thread, in place of the true one.
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
            // Another machine, or an unknown machine.
            (boot_identity("m", "a"), boot_identity("n", "b"), LONG_AGO, BootRelation::Elsewhere),
            (boot_identity("m", "a"), boot_identity("", "b"), LONG_AGO, BootRelation::Elsewhere),
            (boot_identity("", "a"), boot_identity("m", "b"), LONG_AGO, BootRelation::Elsewhere),
            (boot_identity("", "a"), boot_identity("", "b"), LONG_AGO, BootRelation::Elsewhere),
            (boot_identity("", "a"), boot_identity("m", "a"), LONG_AGO, BootRelation::Now),
            // Boot ids that a container manager replaced.
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
