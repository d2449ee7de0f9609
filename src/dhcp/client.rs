//! The plugin's side of the daemon's socket: requests, the start of a daemon, and releases without
//! a daemon.

use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::conf::{DIRECTORY, DhcpIpamConfig, SOCKET};
use super::daemon::READY;
use super::family::DhcpFamily;
use super::interface;
use super::passing;
use super::record::{DhcpRecord, DhcpRecordStore};
use super::rpc::{DaemonReply, DaemonRequest, DaemonVerb, DhcpLeaseKey, LONGEST};
use crate::cmd;
use crate::framework::Failures;
use cni::CniResult;
use cni::error::{Error, ErrorCode, Result, io_text};

/// The timeout of a request other than ADD, and of the start of the daemon.
const LIMIT: Duration = Duration::from_secs(60);

/// The daemon of a configuration.
pub(super) struct DaemonClient {
    socket: PathBuf,
    may_start: bool,
}

impl DaemonClient {
    pub(super) fn from_ipam(ipam: &DhcpIpamConfig) -> DaemonClient {
        DaemonClient { socket: ipam.socket_path(), may_start: ipam.start_daemon }
    }

    /// Starts the daemon if none is running and the configuration allows it.
    pub(super) fn ensure_running(self) -> Result<DaemonClient> {
        if !self.may_start || self.connect().is_ok() {
            return Ok(self);
        }
        let socket = self.startable_socket()?;
        let records = DhcpRecordStore::open_or_create(&socket)?;
        // A plugin that has waited for the lock finds the daemon that another plugin started.
        let _lock = records.lock_daemon_start(LIMIT)?;
        if UnixStream::connect(&socket).is_err() {
            start_daemon_process(&socket, &records.pidfile_path())?;
        }
        Ok(self)
    }

    /// The socket of a daemon that may be started: below [`DIRECTORY`] after following links. The
    /// daemon creates directories and files beside the socket, and the author of a network's
    /// configuration must not choose where root does so.
    fn startable_socket(&self) -> Result<PathBuf> {
        let directory = self
            .socket
            .parent()
            .filter(|directory| directory.is_absolute())
            .and_then(resolve_symlinks);
        let allowed = resolve_symlinks(Path::new(DIRECTORY));
        match (directory, allowed, self.socket.file_name()) {
            (Some(directory), Some(allowed), Some(name)) if directory.starts_with(&allowed) => {
                Ok(directory.join(name))
            }
            _ => Err(Error::config(format!(
                "\"startDaemon\" is not possible for {}: it is not below {DIRECTORY}",
                self.socket.display()
            ))
            .with_details(format!(
                "start that daemon yourself, or set \"daemonSocketPath\" below {DIRECTORY}"
            ))),
        }
    }

    /// Sends a request and returns the result of the reply.
    pub(super) fn send_request(&self, request: &DaemonRequest) -> Result<Option<CniResult>> {
        self.send_with_descriptors(request, &[])
    }

    /// The same with descriptors beside the request.
    pub(super) fn send_with_descriptors(
        &self,
        request: &DaemonRequest,
        passed: &[BorrowedFd<'_>],
    ) -> Result<Option<CniResult>> {
        call_daemon(self.connect().map_err(|e| self.connection_error(&e))?, request, passed)
    }

    /// Releases leases through the daemon; without a daemon, from the records on disk.
    pub(super) fn release_leases(&self, request: &DaemonRequest) -> Result<()> {
        match self.connect() {
            Ok(stream) => call_daemon(stream, request, &[]).map(drop),
            Err(e) => self.release_from_records(request, &e),
        }
    }

    /// Verifies that the daemon can serve an ADD now.
    pub(super) fn verify_status(&self) -> Result<()> {
        match self.connect() {
            Ok(stream) => {
                let request = DaemonRequest::new(DaemonVerb::Status, DhcpLeaseKey::default());
                call_daemon(stream, &request, &[]).map(drop)
            }
            Err(_) if self.may_start => self.startable_socket().map(drop),
            Err(e) => Err(self.connection_error(&e)),
        }
    }

    fn connect(&self) -> io::Result<UnixStream> {
        UnixStream::connect(&self.socket)
    }

    /// `cause` is the error of the connection to the daemon.
    fn release_from_records(&self, request: &DaemonRequest, cause: &io::Error) -> Result<()> {
        let records = match DhcpRecordStore::open_existing(&self.socket) {
            Ok(Some(records)) => records,
            Ok(None) => return Ok(()),
            // The daemon does not write leases to such a directory either.
            Err(error) => {
                warn!("could not use the records of leases: {error}");
                return Ok(());
            }
        };
        let stale: Vec<DhcpRecord> = if request.verb == DaemonVerb::Del {
            DhcpFamily::ALL
                .into_iter()
                .filter_map(|family| records.load_record(&request.key.with_family(family)))
                .collect()
        } else {
            let all = records.load_all().into_iter();
            all.filter(|record| request.is_stale(&record.key)).collect()
        };
        if !stale.is_empty() {
            warn!("{}", self.connection_error(cause));
        }
        let mut failures = Failures::new();
        for record in stale {
            if let Err(error) = interface::release_recorded(&record) {
                warn!("could not release a lease: {error}");
            }
            failures.keep_error(records.remove_record(&record.key));
        }
        failures.into_result()
    }

    fn connection_error(&self, cause: &io::Error) -> Error {
        let path = self.socket.display();
        let option = if self.socket == Path::new(SOCKET) {
            String::new()
        } else {
            format!(" -socketpath {path}")
        };
        let cause = io_text(cause);
        Error::internal(format!("error dialing DHCP daemon: dial unix {path}: connect: {cause}"))
            .with_details(format!(
                "start it with \"dhcp daemon{option}\" or its systemd units, or set \
                 \"startDaemon\" in \"ipam\""
            ))
    }
}

/// `path` without symbolic links; components that do not exist are kept.
fn resolve_symlinks(path: &Path) -> Option<PathBuf> {
    match path.canonicalize() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            Some(resolve_symlinks(path.parent()?)?.join(path.file_name()?))
        }
        found => found.ok(),
    }
}

fn start_daemon_process(socket: &Path, pidfile: &Path) -> Result<()> {
    let args = [
        "daemon".to_owned(),
        "-on-demand".to_owned(),
        format!("-socketpath={}", socket.display()),
        format!("-pidfile={}", pidfile.display()),
    ];
    let line = cmd::start_applet_daemon("dhcp", &args)?;
    if line.trim() == READY {
        return Ok(());
    }
    Err(Error::new(ErrorCode::TRY_AGAIN, format!("start the DHCP daemon: {}", line.trim())))
}

fn call_daemon(
    stream: UnixStream,
    request: &DaemonRequest,
    passed: &[BorrowedFd<'_>],
) -> Result<Option<CniResult>> {
    let method = match request.verb {
        DaemonVerb::Add => "DHCP.Allocate",
        DaemonVerb::Check => "DHCP.Check",
        DaemonVerb::Del => "DHCP.Release",
        DaemonVerb::Gc => "DHCP.GC",
        DaemonVerb::Status => "DHCP.Status",
    };
    let failed = |e: Error| e.context(format_args!("error calling {method}"));
    let no_reply = |e: io::Error| {
        failed(
            Error::new(ErrorCode::TRY_AGAIN, io_text(&e)).with_details("the daemon did not reply"),
        )
    };
    // The daemon limits the time of an ADD itself, with `-resendtimeout`.
    if request.verb != DaemonVerb::Add {
        stream.set_read_timeout(Some(LIMIT)).map_err(no_reply)?;
    }
    passing::send_line(&stream, request.encode_line()?.as_bytes(), passed).map_err(no_reply)?;
    let mut line = Vec::new();
    BufReader::new(stream.take(LONGEST)).read_until(b'\n', &mut line).map_err(no_reply)?;
    if line.starts_with(b"HTTP/") {
        let msg = "the DHCP daemon is that of the reference plugins";
        return Err(failed(Error::new(ErrorCode::TRY_AGAIN, msg).with_details(
            "end it, and start \"dhcp daemon\" of this executable: its containers get new leases",
        )));
    }
    if !line.ends_with(b"\n") {
        return Err(no_reply(io::Error::other("unexpected EOF")));
    }
    DaemonReply::decode_line(&line).map_err(failed)
}
