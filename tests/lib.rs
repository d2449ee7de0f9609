//! What the tests of this repository share: its root, and the executables under test.

#![allow(clippy::panic, reason = "tests")]

use std::env;
use std::path::{Path, PathBuf};

/// The root of the repository.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("/"))
}

/// The executable `cnibox` under test: that of `CNIBOX_BIN`, or that of `cargo build`.
///
/// # Panics
///
/// If there is none.
pub fn cnibox() -> PathBuf {
    let named = env::var_os("CNIBOX_BIN");
    named.map_or_else(|| built("cnibox", "cargo build, or name one in CNIBOX_BIN"), PathBuf::from)
}

/// The executable `cni-sanity` of `cargo build`.
///
/// # Panics
///
/// If there is none.
pub fn cni_sanity() -> PathBuf {
    built("cni-sanity", "cargo build -p cni-sanity")
}

/// The executable of an example of `crates/cni`.
///
/// # Panics
///
/// If there is none.
pub fn example(name: &str) -> PathBuf {
    built(&format!("examples/{name}"), "cargo build --workspace --examples")
}

/// An executable in cargo's directory of the running test.
fn built(name: &str, remedy: &str) -> PathBuf {
    let test = env::current_exe().unwrap_or_default();
    let directory = test.parent().and_then(Path::parent).unwrap_or(Path::new("."));
    let path = directory.join(name);
    assert!(path.exists(), "{} does not exist: first {remedy}", path.display());
    path
}
