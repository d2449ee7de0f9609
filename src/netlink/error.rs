//! What a netlink request can fail with.

use std::fmt;
use std::io;

use nix::errno::Errno;

use crate::error::{Code, errno_text};

/// A `Result` of this layer.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failed request, or a link that is not as it has to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    Refused {
        /// What was attempted: `add link`.
        op: &'static str,
        /// On what: `"eth0"`.
        target: String,
        /// The kernel's error number.
        errno: Errno,
        /// The kernel's own sentence about it, if it sent one.
        kernel: Option<String>,
        /// What a person can do about it, where that is known.
        remedy: Option<String>,
    },
    /// The socket failed or the kernel was silent: whether it has done it is not known.
    Unanswered {
        /// What was attempted: `add link`.
        op: &'static str,
        /// On what: `"eth0"`.
        target: String,
        /// Why there is no answer.
        errno: Errno,
    },
    /// The network namespace could not be entered; the text says which and why.
    Netns(crate::error::Error),
    /// There is no link with this name or index.
    NoLink(String),
    /// Another machine uses the address.
    DadFailed {
        /// The name of the link.
        link: String,
        /// The address in question.
        addr: std::net::IpAddr,
    },
    /// Duplicate address detection did not end in time.
    StillTentative {
        /// The name of the link.
        link: String,
        /// How long was waited.
        seconds: u64,
    },
}

impl Error {
    /// The kernel's error number, if the kernel refused something.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            Error::Refused { errno, .. } => Some(*errno),
            _ => None,
        }
    }

    /// Whether the thing to be added is there already.
    pub fn is_exists(&self) -> bool {
        self.errno() == Some(Errno::EEXIST)
    }

    /// Whether the thing to be read, changed or deleted is absent.
    pub fn is_not_found(&self) -> bool {
        matches!(self, Error::NoLink(_))
            || matches!(
                self.errno(),
                Some(Errno::ENODEV | Errno::ENOENT | Errno::ESRCH | Errno::EADDRNOTAVAIL)
            )
    }

    /// Whether the kernel gave no answer, so that nothing is known about the thing itself.
    pub fn is_unanswered(&self) -> bool {
        matches!(self, Error::Unanswered { .. })
    }

    /// Says what can be done about a refusal.
    #[must_use]
    pub(super) fn with_remedy(mut self, text: String) -> Error {
        if let Error::Refused { remedy, .. } = &mut self {
            *remedy = Some(text);
        }
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Refused { op, target, errno, kernel, .. } => {
                write!(f, "{op} {target}: ")?;
                if let Some(sentence) = kernel {
                    write!(f, "{}: ", sentence.trim_end_matches('.'))?;
                }
                f.write_str(&errno_text(*errno))
            }
            Error::Unanswered { op, target, errno } => {
                write!(f, "{op} {target}: no answer from the kernel: {}", errno_text(*errno))
            }
            Error::Netns(error) => f.write_str(error.msg()),
            // "not found" is what containerd looks for in the error of a DEL.
            Error::NoLink(name) => write!(f, "link {name} not found"),
            Error::DadFailed { link, addr } => {
                write!(f, "link {link} has address {addr} in DADFAILED state")
            }
            Error::StillTentative { link, seconds } => {
                write!(f, "link {link} still has tentative addresses after {seconds} seconds")
            }
        }
    }
}

impl std::error::Error for Error {}

impl From<crate::netns::Error> for Error {
    fn from(error: crate::netns::Error) -> Self {
        Error::Netns(error.into())
    }
}

impl From<Error> for crate::error::Error {
    fn from(error: Error) -> Self {
        let top = crate::error::Error::internal(error.to_string());
        match error {
            Error::Refused { remedy: Some(remedy), .. } => top.with_details(remedy),
            Error::Refused { errno: Errno::EPERM, .. } => {
                top.with_details("cnibox needs CAP_NET_ADMIN in this network namespace")
            }
            Error::Netns(error) => error.with_code(Code::INVALID_NETNS),
            _ => top,
        }
    }
}

/// A refusal before it is known what was attempted.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) errno: Errno,
    pub(super) kernel: Option<String>,
    /// Where in the request the kernel found fault, for those who can say what is there.
    pub(super) offset: Option<u32>,
    /// Whether the number is the socket's, and the request may have been granted.
    pub(super) unanswered: bool,
}

impl Failure {
    /// There was no answer.
    pub(super) fn unanswered(errno: Errno) -> Failure {
        Failure { unanswered: true, ..errno.into() }
    }

    /// Names the attempt; `target` is made only now, because most requests succeed.
    pub(super) fn doing(self, op: &'static str, target: impl FnOnce() -> String) -> Error {
        let Failure { errno, kernel, .. } = self;
        if self.unanswered {
            return Error::Unanswered { op, target: target(), errno };
        }
        Error::Refused { op, target: target(), errno, kernel, remedy: None }
    }
}

impl From<Errno> for Failure {
    fn from(errno: Errno) -> Failure {
        Failure { errno, kernel: None, offset: None, unanswered: false }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Failure {
        Failure::from(error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(errno: Errno, kernel: Option<&str>) -> Error {
        Failure { kernel: kernel.map(str::to_owned), ..errno.into() }
            .doing("add route", || "10.1.0.0/16".to_owned())
    }

    #[test]
    fn the_kernels_sentence_stands_before_the_error_number() {
        assert_eq!(
            refused(Errno::ENETUNREACH, Some("Nexthop has invalid gateway.")).to_string(),
            "add route 10.1.0.0/16: Nexthop has invalid gateway: network is unreachable"
        );
        assert_eq!(refused(Errno::EEXIST, None).to_string(), "add route 10.1.0.0/16: file exists");
    }

    #[test]
    fn a_missing_capability_has_a_remedy() {
        let top = crate::error::Error::from(refused(Errno::EPERM, None));
        assert_eq!(top.code(), Code::INTERNAL);
        assert_eq!(top.details(), "cnibox needs CAP_NET_ADMIN in this network namespace");
    }

    #[test]
    fn absence_has_many_numbers() {
        for errno in [Errno::ENODEV, Errno::ESRCH, Errno::ENOENT, Errno::EADDRNOTAVAIL] {
            assert!(refused(errno, None).is_not_found(), "{errno}");
        }
        assert!(Error::NoLink(r#""eth9""#.to_owned()).is_not_found());
        assert!(refused(Errno::EEXIST, None).is_exists());
    }
}
