//! The socket below a connection, which keeps why it failed: netlink-proto only ends then.

use std::cell::Cell;
use std::io;
use std::task::{Context, Poll, ready};

use bytes::BufMut;
use nix::errno::Errno;
use rtnetlink::sys::{AsyncSocket, Socket, SocketAddr, TokioSocket};

/// A socket that knows its last failure.
pub(super) struct RouteSocket {
    inner: TokioSocket,
    failure: Cell<Option<Errno>>,
}

impl RouteSocket {
    /// Why the socket failed; `ECONNRESET` if it did not.
    pub(super) fn failure(&self) -> Errno {
        self.failure.get().unwrap_or(Errno::ECONNRESET)
    }

    /// Repeats a call that a signal has interrupted.
    fn watch<T>(&self, mut call: impl FnMut() -> Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        loop {
            let outcome = ready!(call());
            let Err(cause) = &outcome else { return Poll::Ready(outcome) };
            if cause.kind() != io::ErrorKind::Interrupted {
                self.failure.set(cause.raw_os_error().map(Errno::from_raw));
                return Poll::Ready(outcome);
            }
        }
    }
}

impl AsyncSocket for RouteSocket {
    fn socket_ref(&self) -> &Socket {
        self.inner.socket_ref()
    }

    fn socket_mut(&mut self) -> &mut Socket {
        self.inner.socket_mut()
    }

    fn new(protocol: isize) -> io::Result<RouteSocket> {
        Ok(RouteSocket { inner: TokioSocket::new(protocol)?, failure: Cell::new(None) })
    }

    fn poll_send(&self, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.watch(|| self.inner.poll_send(cx, buf))
    }

    fn poll_send_to(
        &self,
        cx: &mut Context<'_>,
        buf: &[u8],
        addr: &SocketAddr,
    ) -> Poll<io::Result<usize>> {
        self.watch(|| self.inner.poll_send_to(cx, buf, addr))
    }

    fn poll_recv<B: BufMut>(&self, cx: &mut Context<'_>, buf: &mut B) -> Poll<io::Result<()>> {
        self.watch(|| self.inner.poll_recv(cx, buf))
    }

    fn poll_recv_from<B: BufMut>(
        &self,
        cx: &mut Context<'_>,
        buf: &mut B,
    ) -> Poll<io::Result<SocketAddr>> {
        self.watch(|| self.inner.poll_recv_from(cx, buf))
    }

    fn poll_recv_from_full(&self, cx: &mut Context<'_>) -> Poll<io::Result<(Vec<u8>, SocketAddr)>> {
        self.watch(|| self.inner.poll_recv_from_full(cx))
    }
}
