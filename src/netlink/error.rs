//! Errors of netlink requests.

use std::fmt;
use std::io;

use nix::errno::Errno;

use cni::error::{ErrorCode, errno_text};

pub type NetlinkResult<T, E = NetlinkError> = Result<T, E>;

/// A failed request, or a link in an unexpected state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NetlinkError {
    /// The kernel refused a request, or did not reply.
    Request {
        /// The attempt: `add link`.
        op: &'static str,
        /// The object: `"eth0"`.
        target: String,
        failure: RequestFailure,
        /// The remedy, for `details`.
        remedy: Option<String>,
    },
    /// The network namespace could not be entered.
    Netns(cni::error::Error),
    /// There is no link with this name or index.
    NoLink(String),
    /// Duplicate address detection failed or timed out.
    Dad(String),
}

impl NetlinkError {
    /// The error number of a refusal by the kernel.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            NetlinkError::Request { failure, .. } => failure.refusal_errno(),
            _ => None,
        }
    }

    /// Whether the object to be added exists.
    pub fn is_exists(&self) -> bool {
        self.errno() == Some(Errno::EEXIST)
    }

    /// Whether the object to be read, changed or deleted is absent.
    pub fn is_not_found(&self) -> bool {
        match self {
            NetlinkError::NoLink(_) => true,
            NetlinkError::Request { failure, .. } => failure.is_not_found(),
            _ => false,
        }
    }

    /// Whether the kernel did not reply, so that the outcome of the request is unknown.
    pub fn is_unanswered(&self) -> bool {
        matches!(
            self,
            NetlinkError::Request { failure: RequestFailure { unanswered: true, .. }, .. }
        )
    }

    /// Adds a remedy, if the kernel refused the request.
    #[must_use]
    pub(super) fn with_remedy(mut self, text: String) -> NetlinkError {
        if let NetlinkError::Request {
            remedy,
            failure: RequestFailure { unanswered: false, .. },
            ..
        } = &mut self
        {
            *remedy = Some(text);
        }
        self
    }

    #[must_use]
    pub(super) fn with_missing_module(self, module: &str) -> NetlinkError {
        self.with_remedy(format!("load the kernel module {module:?} on the node"))
    }
}

/// Replaces the error of an absent object by `absent`.
pub(super) fn unless_absent<T>(result: NetlinkResult<T>, absent: T) -> NetlinkResult<T> {
    match result {
        Err(error) if error.is_not_found() => Ok(absent),
        other => other,
    }
}

impl fmt::Display for NetlinkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NetlinkError::Request { op, target, failure, .. } => {
                write!(f, "{op} {target}: ")?;
                if failure.unanswered {
                    f.write_str("no answer from the kernel: ")?;
                } else if let Some(sentence) = &failure.kernel {
                    write!(f, "{}: ", sentence.trim_end_matches('.'))?;
                }
                f.write_str(&errno_text(failure.errno))
            }
            NetlinkError::Netns(error) => f.write_str(error.message()),
            // containerd looks for "not found" in the error of a DEL.
            NetlinkError::NoLink(name) => write!(f, "link {name} not found"),
            NetlinkError::Dad(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for NetlinkError {}

impl From<crate::netns::NetnsError> for NetlinkError {
    fn from(error: crate::netns::NetnsError) -> Self {
        NetlinkError::Netns(error.into())
    }
}

impl From<NetlinkError> for cni::error::Error {
    fn from(error: NetlinkError) -> Self {
        let plain = cni::error::Error::internal(error.to_string());
        let is_full = error.errno() == Some(Errno::EXFULL);
        let lacks_permission = error.errno() == Some(Errno::EPERM);
        match error {
            NetlinkError::Request { remedy: Some(remedy), .. } => plain.with_details(remedy),
            _ if lacks_permission => {
                plain.with_details("cnibox needs CAP_NET_ADMIN in this network namespace")
            }
            _ if is_full => plain.with_details(
                "a bridge has at most 1023 ports: make a network with another name in the key \
                 \"bridge\"",
            ),
            NetlinkError::Netns(error) => error.with_code(ErrorCode::INVALID_NETNS),
            _ => plain,
        }
    }
}

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestFailure {
    pub(super) errno: Errno,
    /// The kernel's message, if there is one.
    pub(super) kernel: Option<String>,
    /// Whether the kernel did not reply, and may have executed the request: then the error number
    /// is the socket's.
    pub(super) unanswered: bool,
}

impl RequestFailure {
    pub(super) fn new_unanswered(errno: Errno) -> RequestFailure {
        RequestFailure { unanswered: true, ..errno.into() }
    }

    /// Whether the object to be read, changed or deleted is absent.
    pub(super) fn is_not_found(&self) -> bool {
        matches!(
            self.refusal_errno(),
            Some(Errno::ENODEV | Errno::ENOENT | Errno::ESRCH | Errno::EADDRNOTAVAIL)
        )
    }

    /// The error number, if it is the kernel's reply.
    pub(super) fn refusal_errno(&self) -> Option<Errno> {
        (!self.unanswered).then_some(self.errno)
    }

    /// The error with the attempt `op` and the object `target`.
    pub(super) fn into_error(self, op: &'static str, target: &dyn fmt::Display) -> NetlinkError {
        NetlinkError::Request { op, target: target.to_string(), failure: self, remedy: None }
    }
}

impl From<Errno> for RequestFailure {
    fn from(errno: Errno) -> RequestFailure {
        RequestFailure { errno, kernel: None, unanswered: false }
    }
}

impl From<io::Error> for RequestFailure {
    fn from(error: io::Error) -> RequestFailure {
        RequestFailure::from(error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(errno: Errno, kernel: Option<&str>) -> NetlinkError {
        RequestFailure { kernel: kernel.map(str::to_owned), ..errno.into() }
            .into_error("add route", &"10.1.0.0/16")
    }

    #[test]
    fn the_kernels_message_precedes_the_error_number() {
        assert_eq!(
            refused(Errno::ENETUNREACH, Some("Nexthop has invalid gateway.")).to_string(),
            "add route 10.1.0.0/16: Nexthop has invalid gateway: network is unreachable"
        );
        assert_eq!(refused(Errno::EEXIST, None).to_string(), "add route 10.1.0.0/16: file exists");
    }

    #[test]
    fn a_missing_capability_has_a_remedy() {
        let top = cni::error::Error::from(refused(Errno::EPERM, None));
        assert_eq!(top.code(), ErrorCode::INTERNAL);
        assert_eq!(top.details(), "cnibox needs CAP_NET_ADMIN in this network namespace");
    }

    #[test]
    fn absence_has_several_error_numbers() {
        for errno in [Errno::ENODEV, Errno::ESRCH, Errno::ENOENT, Errno::EADDRNOTAVAIL] {
            assert!(refused(errno, None).is_not_found(), "{errno}");
        }
        assert!(NetlinkError::NoLink(r#""eth9""#.to_owned()).is_not_found());
        assert!(refused(Errno::EEXIST, None).is_exists());
    }
}
