//! The daemon's socket and the connections of plugins.

use std::convert::Infallible;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{Either, select};
use listenfd::ListenFd;
use nix::sys::signalfd::SignalFd;
use nix::sys::stat::{Mode, umask};
use nix::unistd::geteuid;
use tokio::io::Interest;
use tokio::net;
use tokio::sync::Semaphore;
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

use super::super::passing::{self, PassedDescriptors};
use super::super::rpc::{DaemonReply, DaemonRequest, LONGEST};
use super::occupants;
use super::registry::LeaseRegistry;
use crate::daemon::watch_readable;
use crate::stderr;
use cni::error::{Error, Result, io_text};

/// The maximum number of connections; more wait in the kernel's backlog.
const MAX_CONNECTIONS: usize = 1024;
/// The timeout of a plugin for its request, and for reading the reply.
const IO_TIMEOUT: Duration = Duration::from_secs(10);
/// The wait after a connection could not be accepted.
const RECOVERY: Duration = Duration::from_millis(100);
/// The reply to the reference's plugin, which reads HTTP.
const GO_RPC_ANSWER: &[u8] =
    b"HTTP/1.0 501 this daemon is cnibox's and serves the dhcp plugin of cnibox only\n\n";

/// Takes the socket that systemd passed in `LISTEN_FDS`, or creates one at `path`, for root only.
/// Also returns the path of a created socket, to be removed at the end.
pub(super) fn open_listener(path: &Path) -> Result<(UnixListener, Option<PathBuf>)> {
    let failed = |why: String| Error::internal(format!("Error getting listener: {why}"));
    let mut passed = ListenFd::from_env();
    match passed.len() {
        0 => Ok((
            bind_socket(path).map_err(|e| {
                failed(format!("listen unix {}: bind: {}", path.display(), io_text(&e)))
            })?,
            Some(path.to_owned()),
        )),
        1 => match passed.take_unix_listener(0) {
            Ok(Some(listener)) => Ok((listener, None)),
            _ => Err(failed("LISTEN_FDS=1 but no FD found".to_owned())),
        },
        n => Err(failed(format!("Too many ({n}) FDs passed through socket activation"))),
    }
}

/// Replaces the stale socket of a killed process.
fn bind_socket(path: &Path) -> io::Result<UnixListener> {
    if let Some(dir) = path.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
    }
    // Connecting to a file of another type fails with the same errno.
    let is_socket = || fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket());
    match UnixStream::connect(path) {
        Ok(_) => return Err(io::ErrorKind::AddrInUse.into()),
        Err(e) if e.kind() == io::ErrorKind::ConnectionRefused && is_socket() => {
            fs::remove_file(path)?;
        }
        Err(_) => {}
    }
    let before = umask(Mode::S_IXUSR | Mode::S_IRWXG | Mode::S_IRWXO);
    let bound = UnixListener::bind(path);
    umask(before);
    bound
}

/// Serves plugins until SIGTERM or SIGINT.
pub(super) async fn serve_until_signal(
    listener: net::UnixListener,
    signals: SignalFd,
    registry: Rc<LeaseRegistry>,
) -> io::Result<()> {
    let signals = watch_readable(signals)?;
    let signal = pin!(async { signals.readable().await.map(drop) });
    let accepting = pin!(accept_connections(listener, registry));
    match select(signal, accepting).await {
        Either::Left((received, _)) => received,
        Either::Right((never, _)) => match never {},
    }
}

async fn accept_connections(
    listener: net::UnixListener,
    registry: Rc<LeaseRegistry>,
) -> Infallible {
    let free = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        // The semaphore is never closed, so the result is always a permit.
        let permit = Arc::clone(&free).acquire_owned().await;
        match listener.accept().await {
            Ok((stream, _)) => {
                let registry = Rc::clone(&registry);
                spawn_local(async move {
                    let _permit = permit;
                    if let Err(error) = serve_connection(stream, &registry).await {
                        stderr::write_line(format_args!("could not serve a request: {error}"));
                    }
                });
            }
            Err(error) => {
                warn!("could not {}", Error::io("accept a connection", &error));
                sleep(RECOVERY).await;
            }
        }
    }
}

async fn serve_connection(stream: net::UnixStream, registry: &Rc<LeaseRegistry>) -> Result<()> {
    let io_failed = |e: io::Error| Error::io("connection of a plugin", &e);
    let mut descriptors = Vec::new();
    let bytes = timeout(IO_TIMEOUT, read_request_line(&stream, &mut descriptors)).await;
    let bytes = bytes.unwrap_or_else(|elapsed| Err(elapsed.into())).map_err(io_failed)?;
    if bytes.starts_with(b"CONNECT ") {
        return write_reply(&stream, GO_RPC_ANSWER).await.map_err(io_failed);
    }
    let process = stream.peer_cred().ok().and_then(|peer| peer.pid()).map(i32::unsigned_abs);
    if let Some(is_visible) = process.and_then(is_visible) {
        registry.note_plugin(is_visible);
    }
    let request = require_permitted_user(&stream).and_then(|()| DaemonRequest::decode_line(&bytes));
    let request = request.map(|request| DaemonRequest {
        process: process.filter(|process| *process > 0),
        ..request
    });
    let passed = PassedDescriptors::from_descriptors(descriptors);
    let outcome = match request {
        Ok(request) => registry.serve_request(&request, passed, wait_for_hangup(&stream)).await,
        Err(error) => Err(error),
    };
    let reply = DaemonReply::from_outcome(outcome).encode_line()?;
    write_reply(&stream, reply.as_bytes()).await.map_err(io_failed)
}

/// Whether the daemon sees a process, which has the number 0 if it is in no PID namespace below the
/// daemon's. `None` if the process has ended, or procfs hides it.
fn is_visible(process: u32) -> Option<bool> {
    if process == 0 {
        return Some(false);
    }
    occupants::is_visible(process).then_some(true)
}

/// Refuses other users even if an administrator has changed the mode of the socket file.
fn require_permitted_user(stream: &net::UnixStream) -> Result<()> {
    let peer = stream.peer_cred().map_err(|e| Error::io("read the user of the plugin", &e))?.uid();
    if peer == 0 || peer == geteuid().as_raw() {
        return Ok(());
    }
    Err(Error::internal(format!("user {peer} may not ask for leases")))
}

/// Reads up to a newline.
async fn read_request_line(
    stream: &net::UnixStream,
    descriptors: &mut Vec<OwnedFd>,
) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    while bytes.len() as u64 <= LONGEST {
        match read_bytes(stream, &mut buffer, descriptors).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            length => bytes.extend(&buffer[..length]),
        }
        if let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            bytes.truncate(end);
            return Ok(bytes);
        }
    }
    Err(io::ErrorKind::InvalidData.into())
}

async fn read_bytes(
    stream: &net::UnixStream,
    buffer: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    stream
        .async_io(Interest::READABLE, || passing::receive_bytes(stream, buffer, descriptors))
        .await
}

async fn write_reply(stream: &net::UnixStream, mut bytes: &[u8]) -> io::Result<()> {
    let all = async {
        while !bytes.is_empty() {
            let sent = stream.async_io(Interest::WRITABLE, || stream.try_write(bytes)).await?;
            bytes = &bytes[sent..];
        }
        Ok(())
    };
    timeout(IO_TIMEOUT, all).await?
}

/// Ends when the plugin has closed its end of the connection; further bytes are ignored.
async fn wait_for_hangup(stream: &net::UnixStream) {
    while read_bytes(stream, &mut [0; 64], &mut Vec::new()).await.is_ok_and(|length| length > 0) {}
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_stale_socket_is_replaced_and_a_living_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sub/dhcp.sock");
        let first = open_listener(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(
            fs::metadata(dir.path().join("sub")).unwrap().permissions().mode() & 0o777,
            0o700
        );
        let error = open_listener(&path).unwrap_err();
        let text = format!("Error getting listener: listen unix {}: bind: ", path.display());
        assert!(error.message().starts_with(&text), "{error}");
        drop(first);
        assert!(path.exists());
        assert!(open_listener(&path).is_ok());
    }

    #[test]
    fn other_files_are_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::write(&path, "precious").unwrap();
        assert!(
            open_listener(&path).unwrap_err().message().ends_with(": bind: address already in use")
        );
        assert_eq!(fs::read_to_string(&path).unwrap(), "precious");
    }
}
