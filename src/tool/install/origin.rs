//! The origin of an executable, read from its bytes. Foreign executables are not run: they may do
//! anything, and may not run where the installer runs.
//!
//! Our executables contain a mark with the release. Reference plugins are Go programs, and Go
//! writes the path of the main package into every executable, even a stripped one: `path`, a tab,
//! the package. Programs that use the reference's code as a library have another main package.

use std::fmt;
use std::hint::black_box;
use std::path::Path;

use memchr::memmem;
use sha2::{Digest, Sha256};

use super::files;
use cni::VersionNumber;
use cni::error::{Error, Result};
use cni::runtime::cache::encode_hex;

/// The text in our executables that names their release.
const MARK: &str = concat!("cnibox-release=", env!("CARGO_PKG_VERSION"), ";");
const MARK_START: &str = "cnibox-release=";
/// The main packages of the reference plugins, as Go's build information names them.
const PACKAGES: [&str; 2] = [
    "path\tgithub.com/containernetworking/plugins/plugins/",
    "path\tgithub.com/flannel-io/cni-plugin",
];
/// The text before the release in Go's build information: a linker flag, or the module.
const RELEASES: [&str; 3] = [
    "buildversion.BuildVersion=v",
    "mod\tgithub.com/containernetworking/plugins\tv",
    "mod\tgithub.com/flannel-io/cni-plugin\tv",
];
const ELF: &[u8] = b"\x7fELF";

/// The project that an executable comes from.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum ExecutableOrigin {
    /// This project, with the release.
    Own(String),
    /// A reference plugin, with the release if the file names it.
    Reference(Option<String>),
    Foreign,
}

impl ExecutableOrigin {
    pub(super) fn from_bytes(bytes: &[u8]) -> ExecutableOrigin {
        if !bytes.starts_with(ELF) {
            return ExecutableOrigin::Foreign;
        }
        let own = rest_after_matches(bytes, MARK_START).find_map(|rest| parse_release(rest, b';'));
        if let Some(release) = own {
            return ExecutableOrigin::Own(release);
        }
        if PACKAGES.iter().any(|package| rest_after_matches(bytes, package).next().is_some()) {
            return ExecutableOrigin::Reference(RELEASES.iter().find_map(|key| {
                rest_after_matches(bytes, key).find_map(|rest| parse_release(rest, b'"'))
            }));
        }
        ExecutableOrigin::Foreign
    }
}

/// Whether a release is newer than another. A text that is not a version is older than any version.
pub(super) fn is_newer_release(release: &str, other: &str) -> bool {
    let parse = |text: &str| text.parse::<VersionNumber>().ok();
    parse(release) > parse(other)
}

impl fmt::Display for ExecutableOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExecutableOrigin::Own(release) => write!(f, "cnibox {release}"),
            ExecutableOrigin::Reference(Some(release)) => {
                write!(f, "the reference plugin {release}")
            }
            ExecutableOrigin::Reference(None) => f.write_str("a reference plugin"),
            ExecutableOrigin::Foreign => f.write_str("a foreign file"),
        }
    }
}

/// The bytes after each occurrence of `needle`.
fn rest_after_matches<'a>(bytes: &'a [u8], needle: &'a str) -> impl Iterator<Item = &'a [u8]> {
    memmem::find_iter(bytes, needle).map(|at| &bytes[at + needle.len()..])
}

/// The version at the start of `rest`: digits and dots up to `end` or white space. A suffix after a
/// dash or plus sign is left out.
fn parse_release(rest: &[u8], end: u8) -> Option<String> {
    let length = rest
        .iter()
        .take(32)
        .position(|byte| *byte == end || byte.is_ascii_whitespace() || b"-+'".contains(byte))?;
    let text = std::str::from_utf8(&rest[..length]).ok().filter(|text| !text.is_empty())?;
    text.parse::<VersionNumber>().is_ok().then(|| text.to_owned())
}

/// This process's own executable.
pub(super) struct InstallPayload {
    pub(super) bytes: Vec<u8>,
    pub(super) sha256: String,
    pub(super) release: String,
}

impl InstallPayload {
    /// Reads `/proc/self/exe`, since the file may have been replaced on disk.
    pub(super) fn read_own() -> Result<InstallPayload> {
        let bytes = files::read_file(Path::new("/proc/self/exe"))
            .map_err(|cause| Error::io("read /proc/self/exe", &cause))?;
        // Without this use the linker would drop the mark.
        let ExecutableOrigin::Own(release) = ExecutableOrigin::from_bytes(&bytes) else {
            let mark = black_box(MARK);
            let msg =
                format!("this executable does not contain \"{mark}\", which names its release");
            return Err(Error::internal(msg));
        };
        let sha256 = sha256_hex(&bytes);
        Ok(InstallPayload { bytes, sha256, release })
    }
}

/// The SHA-256 of `bytes` in hexadecimal, as `sha256sum` prints it.
pub(super) fn sha256_hex(bytes: &[u8]) -> String {
    encode_hex(&Sha256::digest(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elf(text: &str) -> ExecutableOrigin {
        ExecutableOrigin::from_bytes(format!("\x7fELF..{text}..").as_bytes())
    }

    #[test]
    fn the_origin_of_an_executable_is_read_from_its_content() {
        assert_eq!(
            elf("cnibox-release=;cnibox-release=1.20.3;"),
            ExecutableOrigin::Own("1.20.3".into())
        );
        assert_eq!(elf("cnibox-release=%s"), ExecutableOrigin::Foreign);
        let main = "path\tgithub.com/containernetworking/plugins/plugins/main/bridge\n";
        assert_eq!(elf(main), ExecutableOrigin::Reference(None));
        let module = "mod\tgithub.com/containernetworking/plugins\tv1.5.1\th1:x\n";
        assert_eq!(
            elf(&format!("{main}{module}")),
            ExecutableOrigin::Reference(Some("1.5.1".into()))
        );
        let module = "mod\tgithub.com/containernetworking/plugins\tv1.6.0-rc1\n";
        assert_eq!(
            elf(&format!("{main}{module}")),
            ExecutableOrigin::Reference(Some("1.6.0".into()))
        );
        let flag = "build\t-ldflags=\"-X github.com/x/buildversion.BuildVersion=v1.7.1\"\n";
        assert_eq!(
            elf(&format!("{main}{flag}")),
            ExecutableOrigin::Reference(Some("1.7.1".into()))
        );
        // A foreign plugin that uses the reference's packages.
        let other = "path\tgithub.com/x/y\ndep\tgithub.com/containernetworking/plugins\tv1.1.1\n";
        assert_eq!(elf(other), ExecutableOrigin::Foreign);
        assert_eq!(
            ExecutableOrigin::from_bytes(format!("#!/bin/sh\n{main}").as_bytes()),
            ExecutableOrigin::Foreign
        );
    }

    #[test]
    fn releases_compare_by_number() {
        assert!(is_newer_release("0.10.0", "0.9.0") && !is_newer_release("0.9.0", "0.10.0"));
        assert!(!is_newer_release("1.0.0", "1.0.0") && is_newer_release("0.0.1", "?"));
    }

    #[test]
    fn hashes_match_sha256sum() {
        let empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        assert_eq!(sha256_hex(b""), empty);
    }
}
