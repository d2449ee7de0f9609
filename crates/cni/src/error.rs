//! The error of all layers above the kernel: a CNI code, a message, and a remedy.
//!
//! Texts are lower case without a full stop and say what was attempted, on what, and why it
//! failed: `add address 10.1.2.3/24 to "eth0": file exists`. Context is put in front
//! ([`ErrorContext::context`]), causes are never repeated. Errors of a delegate keep their code and
//! message ([`Error::foreign`]); context added to them lands in `details`.
#![warn(missing_docs)]

use std::{fmt, io};

use nix::errno::Errno;

/// A `Result` whose error is [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// An error code of the CNI specification (section "Error"), or a plugin's own from 100 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorCode(pub u32);

impl ErrorCode {
    /// A plugin failed without an error object.
    pub const UNKNOWN: ErrorCode = ErrorCode(0);
    /// The configuration's `cniVersion` is not supported.
    pub const INCOMPATIBLE_VERSION: ErrorCode = ErrorCode(1);
    /// A field of the configuration is not supported; the message names key and value.
    pub const UNSUPPORTED_FIELD: ErrorCode = ErrorCode(2);
    /// The container is unknown; the runtime need not clean up.
    pub const UNKNOWN_CONTAINER: ErrorCode = ErrorCode(3);
    /// A `CNI_*` environment variable is missing or invalid; the message names it.
    pub const INVALID_ENVIRONMENT: ErrorCode = ErrorCode(4);
    /// Reading standard input or a state file failed.
    pub const IO: ErrorCode = ErrorCode(5);
    /// The configuration is not valid JSON, or has a value of the wrong type.
    pub const DECODE: ErrorCode = ErrorCode(6);
    /// The configuration decodes, but has invalid or contradictory values.
    pub const INVALID_CONFIG: ErrorCode = ErrorCode(7);
    /// `CNI_NETNS` is the plugin's own namespace (the reference's code, not in the specification).
    pub const INVALID_NETNS: ErrorCode = ErrorCode(8);
    /// A transient condition; the runtime may retry.
    pub const TRY_AGAIN: ErrorCode = ErrorCode(11);
    /// STATUS: the plugin cannot serve ADD.
    pub const NOT_AVAILABLE: ErrorCode = ErrorCode(50);
    /// STATUS: as 50, and existing containers may be cut off.
    pub const LIMITED_CONNECTIVITY: ErrorCode = ErrorCode(51);
    /// Anything else: the reference's code for every untyped error.
    pub const INTERNAL: ErrorCode = ErrorCode(999);
}

/// An error of a plugin or of the runtime side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    code: ErrorCode,
    msg: String,
    details: String,
    foreign: bool,
}

impl Error {
    /// An error with a code of its own.
    ///
    /// ```
    /// # use cnibox_cni::{Error, ErrorCode};
    /// let error = Error::new(ErrorCode::TRY_AGAIN, "the uplink has no carrier");
    /// assert_eq!(error.code(), ErrorCode(11));
    /// ```
    pub fn new(code: ErrorCode, msg: impl Into<String>) -> Error {
        Error { code, msg: msg.into(), details: String::new(), foreign: false }
    }

    /// An error of the plugin's own logic, code 999.
    ///
    /// ```
    /// # use cnibox_cni::{Error, ErrorCode};
    /// assert_eq!(Error::internal("no answer").code(), ErrorCode(999));
    /// ```
    pub fn internal(msg: impl Into<String>) -> Error {
        Error::new(ErrorCode::INTERNAL, msg)
    }

    /// A configuration that decodes but cannot work, code 7.
    ///
    /// ```
    /// # use cnibox_cni::{Error, ErrorCode};
    /// assert_eq!(Error::config("\"mtu\" is below 68").code(), ErrorCode(7));
    /// ```
    pub fn config(msg: impl Into<String>) -> Error {
        Error::new(ErrorCode::INVALID_CONFIG, msg)
    }

    /// The error object of another plugin: code and message stay as they are whatever context is
    /// added on the way up.
    ///
    /// ```
    /// # use cnibox_cni::{Error, ErrorCode};
    /// let error = Error::from_other_plugin(ErrorCode(105), "pool empty", "").context("host-local");
    /// assert_eq!((error.message(), error.details()), ("pool empty", "host-local"));
    /// ```
    pub fn from_other_plugin(
        code: ErrorCode,
        msg: impl Into<String>,
        details: impl Into<String>,
    ) -> Error {
        Error { code, msg: msg.into(), details: details.into(), foreign: true }
    }

    /// A failed system call or file operation on `what`: `open /x: no such file or directory`.
    ///
    /// ```
    /// # use cnibox_cni::Error;
    /// let cause = std::fs::read("/no/such/file").unwrap_err();
    /// assert_eq!(Error::io("read /no/such/file", &cause).message(), "read /no/such/file: no such file or directory");
    /// ```
    pub fn io(what: impl fmt::Display, cause: &io::Error) -> Error {
        Error::new(ErrorCode::IO, format!("{what}: {}", io_text(cause)))
            .with_details(io_remedy(cause))
    }

    /// Sets the details: the remedy, or the circumstances.
    ///
    /// ```
    /// # use cnibox_cni::{Error, ErrorCode};
    /// let error = Error::config("no uplink").with_details("set \"master\"");
    /// assert_eq!(error.to_string(), "no uplink; set \"master\"");
    /// ```
    #[must_use]
    pub fn with_details(mut self, details: impl Into<String>) -> Error {
        self.details = details.into();
        self
    }

    /// Changes the code, keeping the text.
    ///
    /// ```
    /// # use cnibox_cni::{Error, ErrorCode};
    /// assert_eq!(Error::internal("busy").with_code(ErrorCode::TRY_AGAIN).code(), ErrorCode(11));
    /// ```
    #[must_use]
    pub fn with_code(mut self, code: ErrorCode) -> Error {
        self.code = code;
        self
    }

    /// Puts `what` in front of the message; for a delegate's error, into the details if those
    /// are empty.
    ///
    /// ```
    /// # use cnibox_cni::{Error, ErrorCode};
    /// assert_eq!(Error::config("no uplink").context("macvlan").message(), "macvlan: no uplink");
    /// ```
    #[must_use]
    pub fn context(mut self, what: impl fmt::Display) -> Error {
        if !self.foreign {
            self.msg = format!("{what}: {}", self.msg);
        } else if self.details.is_empty() {
            self.details = what.to_string();
        }
        self
    }

    /// The CNI error code.
    ///
    /// ```
    /// # use cnibox_cni::{Error, ErrorCode};
    /// assert_eq!(Error::config("no uplink").code(), ErrorCode::INVALID_CONFIG);
    /// ```
    pub fn code(&self) -> ErrorCode {
        self.code
    }

    /// The message, without the details.
    ///
    /// ```
    /// # use cnibox_cni::{Error, ErrorCode};
    /// assert_eq!(Error::config("no uplink").with_details("set it").message(), "no uplink");
    /// ```
    pub fn message(&self) -> &str {
        &self.msg
    }

    /// The details; empty if there are none.
    ///
    /// ```
    /// # use cnibox_cni::{Error, ErrorCode};
    /// assert_eq!(Error::config("no uplink").details(), "");
    /// ```
    pub fn details(&self) -> &str {
        &self.details
    }

    /// Fails with one error for several: the first one's code and details, all messages joined with
    /// `; `.
    ///
    /// ```
    /// # use cnibox_cni::{Error, ErrorCode};
    /// let both = Error::join_all([Error::config("a"), Error::internal("b")]).unwrap_err();
    /// assert_eq!((both.code(), both.message()), (ErrorCode::INVALID_CONFIG, "a; b"));
    /// assert_eq!(Error::join_all([]), Ok(()));
    /// ```
    pub fn join_all(errors: impl IntoIterator<Item = Error>) -> Result<()> {
        let mut errors = errors.into_iter();
        let Some(mut first) = errors.next() else { return Ok(()) };
        for error in errors {
            first.msg = format!("{}; {}", first.msg, error.msg);
            if first.details.is_empty() {
                first.details = error.details;
            }
        }
        Err(first)
    }
}

/// Fails with the [joined](Error::join_all) errors of several steps, all of which are attempted.
#[doc(hidden)]
pub fn join_outcomes(outcomes: impl IntoIterator<Item = Result<()>>) -> Result<()> {
    Error::join_all(outcomes.into_iter().filter_map(Result::err))
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.msg)?;
        if self.details.is_empty() { Ok(()) } else { write!(f, "; {}", self.details) }
    }
}

impl std::error::Error for Error {}

/// Adds context to a failing `Result`; the closure runs only on failure.
pub trait ErrorContext<T> {
    /// Puts `what()` in front of the error's message.
    fn context<D: fmt::Display>(self, what: impl FnOnce() -> D) -> Result<T>;

    /// Changes the code to [`ErrorCode::NOT_AVAILABLE`], for STATUS.
    fn or_unavailable(self) -> Result<T>;
}

impl<T, E: Into<Error>> ErrorContext<T> for Result<T, E> {
    fn context<D: fmt::Display>(self, what: impl FnOnce() -> D) -> Result<T> {
        self.map_err(|e| e.into().context(what()))
    }

    fn or_unavailable(self) -> Result<T> {
        self.map_err(|e| e.into().with_code(ErrorCode::NOT_AVAILABLE))
    }
}

/// An errno as the kernel's users know it, in lower case: `no such file or directory`. Runtimes
/// match on this wording (containerd ignores a DEL error that contains it).
#[doc(hidden)]
pub fn errno_text(errno: Errno) -> String {
    let text = errno.desc();
    let mut chars = text.chars();
    match (chars.next(), chars.clone().next()) {
        (Some(first), Some('a'..='z')) => first.to_lowercase().chain(chars).collect(),
        // An abbreviation, as in `I/O error` and `RPC version wrong`.
        _ => text.to_owned(),
    }
}

/// The remedy for a failed operation on a file, by its errno; empty if the remedy depends on the
/// operation.
fn io_remedy(cause: &io::Error) -> &'static str {
    match cause.raw_os_error().map(Errno::from_raw) {
        Some(Errno::EROFS) => "its file system is mounted read-only: mount it read-write",
        Some(Errno::ENOSPC) => "free space on its file system, or inodes: \"df -i\" counts them",
        Some(Errno::ENOTDIR) => "a part of the path is a file: remove or rename it",
        Some(Errno::EACCES | Errno::EPERM) => "run it as root",
        _ => "",
    }
}

/// The text of an I/O error without Rust's `(os error 2)`.
///
/// ```
/// # use cnibox_cni::error::io_text;
/// assert_eq!(io_text(&std::io::Error::from_raw_os_error(2)), "no such file or directory");
/// ```
pub fn io_text(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(raw) => errno_text(Errno::from_raw(raw)),
        None => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn context_is_prepended_and_details_are_kept() {
        let error = Error::config("no such master").with_details("create it").context("macvlan");
        assert_eq!(error.to_string(), "macvlan: no such master; create it");
        assert_eq!(error.code(), ErrorCode::INVALID_CONFIG);
    }

    #[test]
    fn a_delegates_error_keeps_its_message() {
        let error =
            Error::from_other_plugin(ErrorCode(105), "pool empty", "").context("host-local");
        assert_eq!((error.code(), error.message()), (ErrorCode(105), "pool empty"));
        assert_eq!(error.details(), "host-local");
        let error = Error::from_other_plugin(ErrorCode(105), "pool empty", "since noon")
            .context("host-local");
        assert_eq!(error.details(), "since noon");
    }

    #[test]
    fn errno_texts_are_those_that_runtimes_match() {
        assert_eq!(errno_text(Errno::ENOENT), "no such file or directory");
        assert_eq!(errno_text(Errno::EIO), "I/O error");
        let error = io::Error::from_raw_os_error(libc_enoent());
        assert_eq!(Error::io("open /x", &error).message(), "open /x: no such file or directory");
    }

    fn libc_enoent() -> i32 {
        Errno::ENOENT as i32
    }

    #[test]
    fn joined_errors_keep_the_first_code() {
        assert_eq!(Error::join_all([]), Ok(()));
        let both =
            Error::join_all([Error::new(ErrorCode(100), "a"), Error::internal("b")]).unwrap_err();
        assert_eq!((both.code(), both.to_string()), (ErrorCode(100), "a; b".to_owned()));
    }
}
