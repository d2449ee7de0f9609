//! The daemon's socket: passed by systemd, or made by the daemon.

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use listenfd::ListenFd;
use nix::sys::stat::{Mode, umask};

use crate::error::{Error, Result, io_text};

/// A socket that listens.
#[derive(Debug)]
pub(super) struct Listening {
    pub(super) listener: UnixListener,
    /// The socket's file, to be removed at the end; none if systemd passed the socket.
    pub(super) own: Option<PathBuf>,
}

/// Takes the socket that systemd passed, or makes one at `path`, for root only.
pub(super) fn listen(path: &Path) -> Result<Listening> {
    let failed = |why: String| Error::internal(format!("Error getting listener: {why}"));
    if let Some(listener) = activated().map_err(failed)? {
        return Ok(Listening { listener, own: None });
    }
    let listener = bind(path)
        .map_err(|e| failed(format!("listen unix {}: bind: {}", path.display(), io_text(&e))))?;
    Ok(Listening { listener, own: Some(path.to_owned()) })
}

/// The socket that was passed by `LISTEN_PID` and `LISTEN_FDS`.
fn activated() -> Result<Option<UnixListener>, String> {
    let mut passed = ListenFd::from_env();
    match passed.len() {
        0 => Ok(None),
        1 => match passed.take_unix_listener(0) {
            Ok(Some(listener)) => Ok(Some(listener)),
            _ => Err("LISTEN_FDS=1 but no FD found".to_owned()),
        },
        n => Err(format!("Too many ({n}) FDs passed through socket activation")),
    }
}

/// A socket file without a listener was left by a process that was killed.
fn bind(path: &Path) -> io::Result<UnixListener> {
    if let Some(dir) = path.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    }
    match UnixStream::connect(path) {
        Ok(_) => return Err(io::ErrorKind::AddrInUse.into()),
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused && is_socket(path) => {
            fs::remove_file(path)?;
        }
        Err(_) => {}
    }
    let before = umask(Mode::S_IXUSR | Mode::S_IRWXG | Mode::S_IRWXO);
    let bound = UnixListener::bind(path);
    umask(before);
    bound
}

/// Connecting to a file of another type fails with the same errno.
fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_stale_socket_is_replaced_and_a_living_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sub/dhcp.sock");
        let first = listen(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(
            fs::metadata(dir.path().join("sub")).unwrap().permissions().mode() & 0o777,
            0o700
        );
        let error = listen(&path).unwrap_err();
        let text = format!("Error getting listener: listen unix {}: bind: ", path.display());
        assert!(error.msg().starts_with(&text), "{error}");
        drop(first);
        assert!(path.exists());
        assert!(listen(&path).is_ok());
    }

    #[test]
    fn what_is_no_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "precious").unwrap();
        assert!(listen(&path).unwrap_err().msg().ends_with(": bind: address already in use"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }
}
