//! The plugin as a process: the request on stdin; the result, or the error object, on stdout.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use log::{LevelFilter, Log, Metadata, Record};
use nix::errno::Errno;

use crate::error::{Error, ErrorCode, Result, io_text};
use crate::json::{Json, encode_pretty};
use crate::result::CniResult;
use crate::version::SpecVersion;
use crate::wire;

/// Limit of standard input in bytes: a thousand times the list of all valid attachments of a node.
const MAX_REQUEST: u64 = 16 << 20;

/// Appends the request on stdin to `stdin`. Code 5 if it is longer than 16 MiB.
pub fn read_stdin(stdin: &mut Vec<u8>) -> Result<()> {
    let failed = |why: &str| Error::new(ErrorCode::IO, format!("error reading from stdin: {why}"));
    let read = io::stdin().lock().take(MAX_REQUEST + 1).read_to_end(stdin);
    if read.map_err(|e| failed(&io_text(&e)))? as u64 > MAX_REQUEST {
        stdin.clear();
        return Err(failed("the request is longer than 16 MiB"));
    }
    Ok(())
}

/// Runs the plugin and reports a panic of the program called `program`, after the drops, as a CNI
/// error.
pub fn run_guarded(
    program: &str,
    run: &dyn Fn() -> Result<Option<CniResult>>,
) -> Result<Option<CniResult>> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_default();
        Err(Error::internal(format!("{program} panicked: {text}"))
            .with_details("this is a bug; stderr has the source location"))
    })
}

/// The log of a plugin without a logger of its own.
struct StderrLog;

impl Log for StderrLog {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &Record<'_>) {
        // Nobody could be told that stderr is closed.
        drop(writeln!(io::stderr(), "{}", record.args()));
    }

    fn flush(&self) {}
}

/// Writes warnings to stderr, unless the program has a logger.
pub fn start_log() {
    if log::set_logger(&StderrLog).is_ok() {
        log::set_max_level(LevelFilter::Warn);
    }
}

/// Prints the reply to VERSION.
pub fn print_versions(versions: &[SpecVersion]) -> ExitCode {
    print_text(&version_line(versions))
}

fn version_line(versions: &[SpecVersion]) -> String {
    let list: Vec<_> = versions.iter().map(|v| format!("\"{v}\"")).collect();
    let newest = SpecVersion::NEWEST;
    let list = list.join(",");
    format!("{{\"cniVersion\":\"{newest}\",\"supportedVersions\":[{list}]}}\n")
}

/// Prints the result of an ADD, nothing for another verb, or the error object in the version of the
/// request.
pub fn print_outcome(outcome: &Result<Option<CniResult>>, stdin: &[u8]) -> ExitCode {
    match outcome {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(result)) => match encode_pretty(&result.to_json()) {
            Ok(text) => print_text(&text),
            Err(error) => print_error(&error, result.version),
        },
        Err(error) => print_error(error, requested_version(stdin)),
    }
}

/// The version of an error object: the configuration's, or the newest if that is unknown.
fn requested_version(stdin: &[u8]) -> SpecVersion {
    Json::parse(stdin)
        .ok()
        .and_then(|json| SpecVersion::parse_exact(json.get_member("cniVersion")?.as_str()?))
        .unwrap_or(SpecVersion::NEWEST)
}

/// Prints the error object.
pub fn print_error(error: &Error, version: SpecVersion) -> ExitCode {
    print_text(&wire::error_text(error, version));
    ExitCode::FAILURE
}

/// Prints a text on stdout; a failure is a warning.
pub fn print_text(text: &str) -> ExitCode {
    // Without the standard library's buffer, which would write the last line separately.
    match write_all(io::stdout().as_fd(), text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::warn!("could not write the result to stdout: {}", io_text(&error));
            ExitCode::FAILURE
        }
    }
}

fn write_all(fd: BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match nix::unistd::write(fd, bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_lists_supported_versions() {
        assert_eq!(
            version_line(&SpecVersion::ALL[5..]),
            "{\"cniVersion\":\"1.1.0\",\"supportedVersions\":[\"1.0.0\",\"1.1.0\"]}\n"
        );
    }

    #[test]
    fn panics_become_errors() {
        let error = run_guarded("bridge", &|| panic!("boom {}", 1)).unwrap_err();
        assert_eq!(
            (error.code(), error.message()),
            (ErrorCode::INTERNAL, "bridge panicked: boom 1")
        );
    }

    #[test]
    fn errors_have_the_version_of_the_configuration() {
        assert_eq!(requested_version(br#"{"cniVersion":"0.4.0"}"#), SpecVersion::V0_4_0);
        assert_eq!(requested_version(br#"{"cniVersion":"7"}"#), SpecVersion::NEWEST);
        assert_eq!(requested_version(b"{"), SpecVersion::NEWEST);
    }
}
