//! Connections of plugins.

use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures::future::{Either, select};
use nix::sys::signalfd::SignalFd;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};

use super::super::rpc::{Answer, LONGEST, Request};
use super::registry::Registry;
use super::sockets::watch;
use crate::error::{Code, Error, Result};
use crate::log;

/// How many plugins are served at once; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 1024;
/// How long a plugin may take to send its request or to read the answer.
const IO_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait when no connection can be accepted.
const RECOVERY: Duration = Duration::from_millis(100);
/// The answer as the reference's plugin reads it.
const GO_RPC_ANSWER: &[u8] =
    b"HTTP/1.0 501 this daemon is cnibox's and serves the dhcp plugin of cnibox only\n\n";

/// Serves plugins until SIGTERM or SIGINT.
pub(super) async fn until_signal(
    listener: UnixListener,
    signals: SignalFd,
    registry: Rc<Registry>,
) -> io::Result<()> {
    let signals = watch(signals)?;
    let signal = pin!(async { signals.readable().await.map(drop) });
    let accepting = pin!(accept(listener, registry));
    match select(signal, accepting).await {
        Either::Left((received, _)) => received,
        Either::Right((never, _)) => match never {},
    }
}

async fn accept(listener: UnixListener, registry: Rc<Registry>) -> std::convert::Infallible {
    let free = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        // The semaphore is never closed, so there always is a permit.
        let turn = Arc::clone(&free).acquire_owned().await;
        match listener.accept().await {
            Ok((stream, _)) => {
                let registry = Rc::clone(&registry);
                spawn_local(async move {
                    let _turn = turn;
                    if let Err(error) = connection(stream, &registry).await {
                        log::line(format_args!("a request: {error}"));
                    }
                });
            }
            Err(error) => {
                log::warn(Error::io("accept a connection", &error));
                sleep(RECOVERY).await;
            }
        }
    }
}

async fn connection(stream: UnixStream, registry: &Rc<Registry>) -> Result<()> {
    let lost = |e: io::Error| Error::io("talk to the plugin", &e);
    let bytes = match timeout(IO_TIMEOUT, line(&stream)).await {
        Ok(read) => read.map_err(lost)?,
        Err(_) => return Err(lost(io::ErrorKind::TimedOut.into())),
    };
    if bytes.starts_with(b"CONNECT ") {
        return write(&stream, GO_RPC_ANSWER).await.map_err(lost);
    }
    let outcome = match permitted(&stream).and_then(|()| Request::decode(&bytes)) {
        Ok(request) => registry.serve(&request, hangup(&stream)).await,
        Err(error) => Err(error),
    };
    let text = Answer::of(outcome).encode()?;
    write(&stream, text.as_bytes()).await.map_err(lost)
}

/// The socket's file is root's; where its mode was changed, other users are still refused.
fn permitted(stream: &UnixStream) -> Result<()> {
    let peer = stream.peer_cred().map_err(|e| Error::io("ask who the plugin is", &e))?;
    let own = nix::unistd::geteuid().as_raw();
    if peer.uid() == 0 || peer.uid() == own {
        return Ok(());
    }
    Err(Error::new(Code::INTERNAL, format!("user {} may not ask for leases", peer.uid())))
}

/// The bytes up to a newline.
async fn line(stream: &UnixStream) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut buffer = [0; 4096];
    loop {
        stream.readable().await?;
        match stream.try_read(&mut buffer) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => bytes.extend(&buffer[..n]),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => continue,
            Err(e) => return Err(e),
        }
        if let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            bytes.truncate(end);
            return Ok(bytes);
        }
        if bytes.len() as u64 > LONGEST {
            return Err(io::ErrorKind::InvalidData.into());
        }
    }
}

async fn write(stream: &UnixStream, mut bytes: &[u8]) -> io::Result<()> {
    let all = async {
        while !bytes.is_empty() {
            stream.writable().await?;
            match stream.try_write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    };
    timeout(IO_TIMEOUT, all).await?
}

/// Ends when the plugin has closed its end.
async fn hangup(stream: &UnixStream) {
    let mut buffer = [0; 64];
    loop {
        if stream.readable().await.is_err() {
            return;
        }
        match stream.try_read(&mut buffer) {
            // Further bytes from the plugin are dropped.
            Ok(1..) => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            Ok(0) | Err(_) => return,
        }
    }
}
