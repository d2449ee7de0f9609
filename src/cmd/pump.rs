//! The three pipes of a running program, served by one thread: whatever is ready is served, so no
//! order of reading and writing on the other side can make both wait.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// A pipe that poll(2) calls writable takes this much without blocking (`PIPE_BUF`).
const CHUNK: usize = 4096;
/// How much of stderr is kept for the error message; all of it is forwarded.
const KEPT_STDERR: usize = 64 * 1024;

/// Why the pump stopped.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// All pipes are closed.
    Closed,
    /// The time is over.
    Expired,
}

/// The open pipes and what has come through them.
pub(crate) struct Pump<'a> {
    stdin: Option<ChildStdin>,
    stdout: Option<ChildStdout>,
    stderr: Option<ChildStderr>,
    request: &'a [u8],
    output: Vec<u8>,
    errors: Vec<u8>,
}

/// Which pipes have something to do.
#[derive(Default)]
struct Ready {
    stdin: bool,
    stdout: bool,
    stderr: bool,
}

impl<'a> Pump<'a> {
    /// Takes the pipes out of `child`.
    pub(crate) fn new(child: &mut Child, request: &'a [u8]) -> Pump<'a> {
        Pump {
            stdin: child.stdin.take().filter(|_| !request.is_empty()),
            stdout: child.stdout.take(),
            stderr: child.stderr.take(),
            request,
            output: Vec::new(),
            errors: Vec::new(),
        }
    }

    /// Serves the pipes until all are closed or the time is over.
    pub(crate) fn run(
        &mut self,
        until: Option<Instant>,
        forward: &mut dyn Write,
    ) -> io::Result<Ended> {
        while self.stdin.is_some() || self.stdout.is_some() || self.stderr.is_some() {
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(Ended::Expired);
            }
            let ready = self.wait(until)?;
            if ready.stdin {
                self.feed()?;
            }
            if ready.stdout {
                drain(&mut self.stdout, |bytes| self.output.extend_from_slice(bytes))?;
            }
            if ready.stderr {
                drain(&mut self.stderr, |bytes| {
                    // An error of writing to stderr cannot be reported.
                    drop(forward.write_all(bytes).and_then(|()| forward.flush()));
                    let room = KEPT_STDERR.saturating_sub(self.errors.len()).min(bytes.len());
                    self.errors.extend_from_slice(&bytes[..room]);
                })?;
            }
        }
        Ok(Ended::Closed)
    }

    /// What the program printed on stdout, and the beginning of what it printed on stderr.
    pub(crate) fn into_output(self) -> (Vec<u8>, Vec<u8>) {
        (self.output, self.errors)
    }

    /// Sleeps until something is ready, or the time is over: nothing is ready then.
    fn wait(&self, until: Option<Instant>) -> io::Result<Ready> {
        let mut ready = Ready::default();
        let (mut fds, mut flags) = (Vec::with_capacity(3), Vec::with_capacity(3));
        if let Some(pipe) = &self.stdin {
            fds.push(PollFd::new(pipe.as_fd(), PollFlags::POLLOUT));
            flags.push(&mut ready.stdin);
        }
        if let Some(pipe) = &self.stdout {
            fds.push(PollFd::new(pipe.as_fd(), PollFlags::POLLIN));
            flags.push(&mut ready.stdout);
        }
        if let Some(pipe) = &self.stderr {
            fds.push(PollFd::new(pipe.as_fd(), PollFlags::POLLIN));
            flags.push(&mut ready.stderr);
        }
        match poll(&mut fds, timeout(until)) {
            Ok(_) => {}
            Err(Errno::EINTR) => return Ok(Ready::default()),
            Err(errno) => return Err(errno.into()),
        }
        for (fd, flag) in fds.iter().zip(flags) {
            // A pipe that was closed on the other side is ready too: to be noticed as such.
            *flag = fd.any().unwrap_or(true);
        }
        Ok(ready)
    }

    /// Writes the next piece of the request; closes the pipe after the last one, or when the
    /// program has closed its end without reading, which is its right.
    fn feed(&mut self) -> io::Result<()> {
        let Some(pipe) = &mut self.stdin else { return Ok(()) };
        let chunk = &self.request[..self.request.len().min(CHUNK)];
        match pipe.write(chunk) {
            Ok(written) => self.request = &self.request[written..],
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
            Err(cause) if cause.kind() == io::ErrorKind::BrokenPipe => self.request = &[],
            // The program must not take a part, or nothing, for all.
            Err(cause) => return Err(cause),
        }
        if self.request.is_empty() {
            self.stdin = None;
        }
        Ok(())
    }
}

/// Reads once from a pipe that is ready, and closes it at its end.
fn drain<R: Read>(pipe: &mut Option<R>, mut take: impl FnMut(&[u8])) -> io::Result<()> {
    let Some(reader) = pipe else { return Ok(()) };
    let mut buffer = [0; 16 * 1024];
    match reader.read(&mut buffer) {
        Ok(0) => *pipe = None,
        Ok(n) => take(&buffer[..n]),
        Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
        Err(cause) => return Err(cause),
    }
    Ok(())
}

/// The time left, rounded up so that the last millisecond is not spent polling.
fn timeout(until: Option<Instant>) -> PollTimeout {
    let Some(until) = until else { return PollTimeout::NONE };
    let left = until.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
    PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
}
