//! The plugin's side of the daemon's socket: requests, the start of a daemon, and releases without a daemon.

use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::conf::{FOLDER, Ipam, SOCKET};
use super::daemon::READY;
use super::family::Family;
use super::interface;
use super::passing;
use super::record::{Record, Records};
use super::rpc::{Answer, Key, LONGEST, Request, Verb};
use crate::cmd;
use crate::cni::CniResult;
use crate::error::{Code, Error, Result, io_text};
use crate::log;
use crate::skel::Failures;

/// The timeout of a request other than ADD, and of the start of the daemon.
const LIMIT: Duration = Duration::from_secs(60);

/// The daemon of a configuration.
pub(super) struct Daemon {
    socket: PathBuf,
    may_start: bool,
}

impl Daemon {
    pub(super) fn of(ipam: &Ipam) -> Daemon {
        Daemon { socket: ipam.socket(), may_start: ipam.start_daemon }
    }

    /// Starts the daemon if none is running and the configuration allows it.
    pub(super) fn ensure(self) -> Result<Daemon> {
        if !self.may_start || self.connect().is_ok() {
            return Ok(self);
        }
        let socket = self.startable()?;
        let records = Records::create(&socket)?;
        // Plugins that wait for the lock find the daemon of the first one.
        let _turn = records.start_turn(LIMIT)?;
        if UnixStream::connect(&socket).is_err() {
            start(&socket, &records.pidfile())?;
        }
        Ok(self)
    }

    /// The socket of a daemon that may be started: below [`FOLDER`] after following links. The daemon creates folders
    /// and files beside the socket, and the author of a network's configuration must not choose where root does so.
    fn startable(&self) -> Result<PathBuf> {
        let folder = self.socket.parent().filter(|folder| folder.is_absolute()).and_then(resolve);
        let allowed = resolve(Path::new(FOLDER));
        match (folder, allowed, self.socket.file_name()) {
            (Some(folder), Some(allowed), Some(name)) if folder.starts_with(&allowed) => {
                Ok(folder.join(name))
            }
            _ => Err(Error::config(format!(
                "\"startDaemon\" is not possible for {}: it is not below {FOLDER}",
                self.socket.display()
            ))
            .with_details(format!(
                "start that daemon yourself, or set \"daemonSocketPath\" below {FOLDER}"
            ))),
        }
    }

    /// Sends a request and returns the result of the reply.
    pub(super) fn call(&self, request: &Request) -> Result<Option<CniResult>> {
        self.call_with(request, &[])
    }

    /// The same with descriptors beside the request.
    pub(super) fn call_with(
        &self,
        request: &Request,
        passed: &[BorrowedFd<'_>],
    ) -> Result<Option<CniResult>> {
        exchange(self.connect().map_err(|e| self.absent(&e))?, request, passed)
    }

    /// Releases leases through the daemon; without a daemon, from the records on disk.
    pub(super) fn call_or_replace(&self, request: &Request) -> Result<()> {
        match self.connect() {
            Ok(stream) => exchange(stream, request, &[]).map(drop),
            Err(e) => self.release_without(request, &e),
        }
    }

    /// Verifies that the daemon can serve an ADD now.
    pub(super) fn status(&self) -> Result<()> {
        match self.connect() {
            Ok(stream) => {
                let request = Request::new(Verb::Status, Key::default());
                exchange(stream, &request, &[]).map(drop)
            }
            Err(_) if self.may_start => self.startable().map(drop),
            Err(e) => Err(self.absent(&e)),
        }
    }

    fn connect(&self) -> io::Result<UnixStream> {
        UnixStream::connect(&self.socket)
    }

    /// `cause` is the error of the connection to the daemon.
    fn release_without(&self, request: &Request, cause: &io::Error) -> Result<()> {
        let records = match Records::open(&self.socket) {
            Ok(Some(records)) => records,
            Ok(None) => return Ok(()),
            // The daemon does not keep leases in such a folder either.
            Err(error) => {
                log::warn(error);
                return Ok(());
            }
        };
        let stale: Vec<Record> = if request.verb == Verb::Del {
            let of = |family: Family| records.load(&request.key.of(family));
            Family::ALL.into_iter().filter_map(of).collect()
        } else {
            let all = records.load_all().into_iter();
            all.filter(|record| request.is_stale(&record.key)).collect()
        };
        if !stale.is_empty() {
            log::warn(self.absent(cause));
        }
        let mut failures = Failures::new();
        for record in stale {
            if let Err(error) = interface::release_recorded(&record) {
                log::warn(error);
            }
            failures.keep(records.remove(&record.key));
        }
        failures.into_result()
    }

    fn absent(&self, cause: &io::Error) -> Error {
        let path = self.socket.display();
        let option = if self.socket == Path::new(SOCKET) {
            String::new()
        } else {
            format!(" -socketpath {path}")
        };
        let cause = io_text(cause);
        Error::internal(format!("error dialing DHCP daemon: dial unix {path}: connect: {cause}"))
            .with_details(format!(
                "start it with \"dhcp daemon{option}\" or its systemd units, or set \"startDaemon\" in \"ipam\""
            ))
    }
}

/// `path` without symbolic links; components that do not exist are kept.
fn resolve(path: &Path) -> Option<PathBuf> {
    match path.canonicalize() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            Some(resolve(path.parent()?)?.join(path.file_name()?))
        }
        found => found.ok(),
    }
}

fn start(socket: &Path, pidfile: &Path) -> Result<()> {
    let args = [
        "daemon".to_owned(),
        "-on-demand".to_owned(),
        format!("-socketpath={}", socket.display()),
        format!("-pidfile={}", pidfile.display()),
    ];
    let line = cmd::start_own("dhcp", &args)?;
    if line.trim() == READY {
        return Ok(());
    }
    Err(Error::new(Code::TRY_AGAIN, format!("start the DHCP daemon: {}", line.trim())))
}

fn exchange(
    stream: UnixStream,
    request: &Request,
    passed: &[BorrowedFd<'_>],
) -> Result<Option<CniResult>> {
    let method = match request.verb {
        Verb::Add => "DHCP.Allocate",
        Verb::Check => "DHCP.Check",
        Verb::Del => "DHCP.Release",
        Verb::Gc => "DHCP.GC",
        Verb::Status => "DHCP.Status",
    };
    let failed = |e: Error| e.context(format_args!("error calling {method}"));
    let lost = |e: io::Error| {
        failed(Error::new(Code::TRY_AGAIN, io_text(&e)).with_details("the daemon did not reply"))
    };
    // The daemon limits the time of an ADD itself, with `-resendtimeout`.
    if request.verb != Verb::Add {
        stream.set_read_timeout(Some(LIMIT)).map_err(lost)?;
    }
    passing::send(&stream, request.encode()?.as_bytes(), passed).map_err(lost)?;
    let mut line = Vec::new();
    BufReader::new(stream.take(LONGEST)).read_until(b'\n', &mut line).map_err(lost)?;
    if !line.ends_with(b"\n") {
        return Err(lost(io::Error::other("unexpected EOF")));
    }
    Answer::decode(&line).map_err(failed)
}
