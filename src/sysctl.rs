//! Kernel parameters below `/proc/sys`, which only this file names.
//!
//! Keys have slashes, `net/ipv4/conf/eth0.100/arp_notify`, because the names of interfaces contain
//! dots. Keys below `net/` are those of the network namespace of the *calling thread*, see
//! [`Netns::run`](crate::netns::Netns::run_inside).

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::statfs::{PROC_SUPER_MAGIC, fstatfs};

use crate::netns;
use cni::error::{Error, ErrorCode, Result};
use cni::files::open_file;

/// The value of `key`, without the newline at its end.
pub fn read_value(key: &str) -> Result<String> {
    match open_parameter(key, OFlag::O_RDONLY).and_then(read_file) {
        Ok(mut value) => {
            value.truncate(value.trim_end_matches('\n').len());
            Ok(value)
        }
        Err(e) => Err(access_error("read", key, &e)),
    }
}

/// As [`read_value`]; `None` if the parameter is write-only.
pub fn read_if_readable(key: &str) -> Result<Option<String>> {
    let write_only = |file: &PathBuf| {
        let readable = fs::metadata(file).map(|meta| meta.permissions().mode() & 0o444 != 0);
        !readable.unwrap_or(true)
    };
    if parameter_path(key).is_ok_and(|file| write_only(&file)) {
        return Ok(None);
    }
    read_value(key).map(Some)
}

/// Whether `key` exists in the calling thread's namespace.
pub fn key_exists(key: &str) -> bool {
    parameter_path(key).is_ok_and(|file| file.is_file())
}

pub fn write_value(key: &str, value: &str) -> Result<()> {
    open_parameter(key, OFlag::O_WRONLY)
        .and_then(|mut file| file.write_all(value.as_bytes()))
        .map_err(|e| access_error("write", &format!("{key}={value}"), &e))
}

fn open_parameter(key: &str, flags: OFlag) -> io::Result<File> {
    open_file(parameter_path(key)?, flags)
}

fn access_error(attempt: &str, key: &str, cause: &io::Error) -> Error {
    let error =
        Error::io(format_args!("{attempt} sysctl {key}"), cause).with_code(ErrorCode::INTERNAL);
    match cause.raw_os_error().map(Errno::from_raw) {
        Some(Errno::ENOENT) if key.starts_with("net/ipv6/conf/") => error.with_details(
            "the kernel has no IPv6 there, as it is switched off or the MTU is below 1280: raise \
             the MTU, or remove what needs IPv6",
        ),
        Some(Errno::ENOENT) => {
            error.with_details("the kernel has no such parameter: \"sysctl -aN\" lists all")
        }
        Some(Errno::EINVAL) => {
            error.with_details("the kernel refuses this value; the present value shows the format")
        }
        _ => error,
    }
}

/// Sets `key` to `value` unless `key` has that value; returns whether it was written. An equal
/// value is not written, because `/proc/sys` may be mounted read-only and because writing some keys
/// (`forwarding`) has effects even when nothing changes.
pub fn ensure_value(key: &str, value: &str) -> Result<bool> {
    if read_value(key)? == value {
        return Ok(false);
    }
    write_value(key, value).map(|()| true)
}

/// The id of this boot (`random(4)`). A container manager may bind-mount a file over it that
/// changes with every start of the container: such an id, which is not the kernel's, begins with
/// [`REPLACED`].
pub fn boot_id() -> Result<String> {
    const KEY: &str = "kernel/random/boot_id";
    let read = || {
        let file = open_parameter(KEY, OFlag::O_RDONLY)?;
        let is_kernels = fstatfs(&file)?.filesystem_type() == PROC_SUPER_MAGIC;
        let id = read_file(file)?.trim().to_owned();
        Ok(if is_kernels { id } else { format!("{REPLACED}{id}") })
    };
    read().map_err(|e| access_error("read", KEY, &e))
}

/// The first character of a [boot id](boot_id) that is not the kernel's.
pub const REPLACED: char = '~';

/// Whether two [boot ids](boot_id) are of one boot: a file over the kernel's may have the kernel's
/// id.
pub fn is_same_boot(one: &str, other: &str) -> bool {
    let id = one.trim_start_matches(REPLACED);
    !id.is_empty() && id == other.trim_start_matches(REPLACED)
}

/// The kernel returns a value in one read if the buffer has room, so no second read is needed.
fn read_file(mut file: File) -> io::Result<String> {
    let mut text = vec![0; 512];
    let length = file.read(&mut text)?;
    let more = length == text.len();
    text.truncate(length);
    if more {
        file.read_to_end(&mut text)?;
    }
    String::from_utf8(text).map_err(|_| io::ErrorKind::InvalidData.into())
}

/// The file of `key`. A segment `..` or an absolute key would leave `/proc/sys`: requests contain
/// names of interfaces.
fn parameter_path(key: &str) -> io::Result<PathBuf> {
    if key.split('/').all(|segment| !matches!(segment, "" | "." | "..")) {
        netns::require_home_netns().map_err(io::Error::other)?;
        return Ok(PathBuf::from("/proc/sys").join(key));
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "invalid key"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::{Netns, isolate_test_thread};

    #[test]
    fn keys_cannot_leave_the_directory() {
        for key in ["../etc/passwd", "net/../../etc/passwd", "/etc/passwd", "", "net//x", "net/."] {
            let text = read_value(key).unwrap_err().to_string();
            assert_eq!(text, format!("read sysctl {key}: invalid key"));
        }
    }

    #[test]
    fn names_of_interfaces_may_contain_dots() {
        assert_eq!(
            parameter_path("net/ipv4/conf/a..b.1/x").unwrap().to_str().unwrap(),
            "/proc/sys/net/ipv4/conf/a..b.1/x"
        );
    }

    #[test]
    fn a_value_is_written_only_when_it_differs() {
        isolate_test_thread();
        assert!(ensure_value("net/ipv4/conf/lo/arp_notify", "1").unwrap());
        assert!(!ensure_value("net/ipv4/conf/lo/arp_notify", "1").unwrap());
        assert_eq!(read_value("net/ipv4/conf/lo/arp_notify").unwrap(), "1");
    }

    #[test]
    fn values_belong_to_the_namespace_of_the_thread() {
        isolate_test_thread();
        let other = Netns::create_unnamed().unwrap();
        other.run_inside(|| write_value("net/ipv4/conf/lo/arp_notify", "1")).unwrap().unwrap();
        assert_eq!(read_value("net/ipv4/conf/lo/arp_notify").unwrap(), "0");
    }

    #[test]
    fn write_only_keys_are_not_read() {
        isolate_test_thread();
        assert_eq!(read_if_readable("net/ipv4/route/flush"), Ok(None));
        assert_eq!(read_if_readable("net/ipv4/ip_forward"), Ok(Some("0".to_owned())));
        assert!(read_if_readable("net/ipv4/no_such_key").is_err());
        assert!(key_exists("net/ipv4/ip_forward"));
        assert!(
            !key_exists("net/ipv4") && !key_exists("net/ipv4/no_such_key") && !key_exists("net/..")
        );
    }

    #[test]
    fn errors_name_key_value_and_cause() {
        let error = write_value("net/ipv4/no_such_key", "1").unwrap_err();
        assert_eq!(
            error.to_string(),
            "write sysctl net/ipv4/no_such_key=1: no such file or directory; the kernel has no \
             such parameter: \"sysctl -aN\" lists all"
        );
    }

    #[test]
    fn the_boot_id_is_a_uuid() {
        assert_eq!(boot_id().unwrap().len(), 36);
    }
}
