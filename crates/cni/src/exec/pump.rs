//! The three pipes of a running program, served by one thread with poll(2), so that no order of
//! reads and writes in the program causes a deadlock.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::process::{Child, ChildStderr, ChildStdin, ChildStdout};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// A pipe that is ready for writing accepts this many bytes without blocking (`PIPE_BUF`).
const CHUNK: usize = 4096;
/// The part of stderr that is kept for the error message; all of stderr is forwarded.
const KEPT_STDERR: usize = 64 * 1024;

/// The open pipes, and the data read from them.
pub(crate) struct PipePump<'a> {
    stdin: Option<ChildStdin>,
    stdout: Option<ChildStdout>,
    stderr: Option<ChildStderr>,
    request: &'a [u8],
    output: Vec<u8>,
    errors: Vec<u8>,
}

impl<'a> PipePump<'a> {
    /// Takes the pipes out of `child`.
    pub(crate) fn new(child: &mut Child, request: &'a [u8]) -> PipePump<'a> {
        PipePump {
            stdin: child.stdin.take().filter(|_| !request.is_empty()),
            stdout: child.stdout.take(),
            stderr: child.stderr.take(),
            request,
            output: Vec::new(),
            errors: Vec::new(),
        }
    }

    /// Serves the pipes until all are closed; `false` if the deadline passes before.
    pub(crate) fn serve_pipes(
        &mut self,
        until: Option<Instant>,
        forward: &mut dyn Write,
    ) -> io::Result<bool> {
        while self.stdin.is_some() || self.stdout.is_some() || self.stderr.is_some() {
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(false);
            }
            let [stdin, stdout, stderr] = self.wait_ready(until)?;
            if stdin {
                self.feed_stdin()?;
            }
            if stdout {
                read_pipe(&mut self.stdout, |bytes| self.output.extend_from_slice(bytes))?;
            }
            if stderr {
                read_pipe(&mut self.stderr, |bytes| {
                    // An error of writing to stderr cannot be reported anywhere.
                    drop(forward.write_all(bytes).and_then(|()| forward.flush()));
                    let room = KEPT_STDERR.saturating_sub(self.errors.len()).min(bytes.len());
                    self.errors.extend_from_slice(&bytes[..room]);
                })?;
            }
        }
        Ok(true)
    }

    /// The stdout of the program, and the beginning of its stderr.
    pub(crate) fn into_output(self) -> (Vec<u8>, Vec<u8>) {
        (self.output, self.errors)
    }

    /// Waits until stdin, stdout or stderr is ready. None of them is ready if the deadline passes.
    fn wait_ready(&self, until: Option<Instant>) -> io::Result<[bool; 3]> {
        let pipes = [
            self.stdin.as_ref().map(|pipe| PollFd::new(pipe.as_fd(), PollFlags::POLLOUT)),
            self.stdout.as_ref().map(|pipe| PollFd::new(pipe.as_fd(), PollFlags::POLLIN)),
            self.stderr.as_ref().map(|pipe| PollFd::new(pipe.as_fd(), PollFlags::POLLIN)),
        ];
        let is_open = pipes.each_ref().map(Option::is_some);
        let mut fds: Vec<PollFd<'_>> = pipes.into_iter().flatten().collect();
        match poll(&mut fds, remaining_timeout(until)) {
            Ok(_) => {}
            Err(Errno::EINTR) => return Ok([false; 3]),
            Err(errno) => return Err(errno.into()),
        }
        let mut fds = fds.iter();
        // A pipe that the program has closed is ready too.
        Ok(is_open.map(|is_open| is_open && fds.next().is_some_and(|fd| fd.any() != Some(false))))
    }

    /// Writes the next part of the request. Closes the pipe after the last part, or if the program
    /// has closed it without reading everything, which is allowed.
    fn feed_stdin(&mut self) -> io::Result<()> {
        let Some(pipe) = &mut self.stdin else { return Ok(()) };
        let chunk = &self.request[..self.request.len().min(CHUNK)];
        match pipe.write(chunk) {
            Ok(written) => self.request = &self.request[written..],
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
            Err(cause) if cause.kind() == io::ErrorKind::BrokenPipe => self.request = &[],
            // Closing the pipe here would make a partial request look complete.
            Err(cause) => return Err(cause),
        }
        if self.request.is_empty() {
            self.stdin = None;
        }
        Ok(())
    }
}

/// Reads once from a pipe that is ready, and closes it at its end.
fn read_pipe<R: Read>(pipe: &mut Option<R>, mut take: impl FnMut(&[u8])) -> io::Result<()> {
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

/// The remaining time, rounded up so that the last millisecond is not spent in a busy loop.
fn remaining_timeout(until: Option<Instant>) -> PollTimeout {
    let Some(until) = until else { return PollTimeout::NONE };
    let left = until.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
    PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
}
